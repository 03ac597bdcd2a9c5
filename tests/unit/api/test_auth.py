"""The memory of good keys."""

from api.auth import CACHE_ENTRIES, CACHE_TTL_S, KeyCache
from farm.accounts import Principal

WHO = Principal("acct_1", "key_1", frozenset({"videos:read"}))


def test_principal_is_remembered_for_its_time_only() -> None:
    at = [100.0]
    cache = KeyCache(lambda: at[0])
    cache.put("key", "10.0.0.1", WHO)
    at[0] += CACHE_TTL_S - 0.1
    assert cache.get("key", "10.0.0.1") is WHO
    at[0] += 0.1
    assert cache.get("key", "10.0.0.1") is None


def test_key_from_another_address_is_looked_up_again() -> None:
    cache = KeyCache(lambda: 100.0)
    cache.put("key", "10.0.0.1", WHO)
    assert cache.get("key", "10.0.0.2") is None
    assert cache.get("key", None) is None


def test_memory_is_bounded_and_holds_no_key() -> None:
    cache = KeyCache(lambda: 100.0)
    for number in range(CACHE_ENTRIES + 10):
        cache.put(f"secret-{number}", None, WHO)
    assert len(cache._entries) == CACHE_ENTRIES
    assert cache.get("secret-0", None) is None
    assert cache.get(f"secret-{CACHE_ENTRIES + 9}", None) is WHO
    assert "secret" not in str(list(cache._entries))
