"""Look-ups that hang: bounded in time, and only the places of their own account are used up."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from farm.webhooks.guard import Policy, UrlRefusedError
from worker.host_lookup import PLACES_PER_ACCOUNT, HostLookups

pytestmark = pytest.mark.req("F-32")

PUBLIC = "93.184.216.34"


class Resolver:
    """Answers at once, but for hosts that hang until they are released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def __call__(self, host: str, _port: int) -> list[str]:
        if host.startswith("hangs"):
            self.released.wait(30)
        if host.startswith("breaks"):
            raise LookupError(host)
        return [PUBLIC]


@pytest.fixture
def resolver() -> Iterator[Resolver]:
    made = Resolver()
    yield made
    made.released.set()


async def reason(lookups: HostLookups, account_id: str, url: str) -> str:
    with pytest.raises(UrlRefusedError) as caught:
        await lookups.resolve(account_id, url)
    return caught.value.reason


async def test_the_checked_address_is_returned(resolver) -> None:
    target = await HostLookups(Policy(), resolver).resolve("a", "https://hooks.example/in")
    assert (target.ip, target.host, target.path) == (PUBLIC, "hooks.example", "/in")


async def test_a_refusal_of_the_guard_comes_through(resolver) -> None:
    assert await reason(HostLookups(Policy(), resolver), "a", "https://127.0.0.1/") == "address"


async def test_a_name_server_that_hangs_costs_a_while_and_no_more(resolver) -> None:
    lookups = HostLookups(Policy(), resolver, timeout_s=0.05)
    assert await reason(lookups, "a", "https://hangs.example/") == "dns_timeout"


async def test_look_ups_that_hang_use_up_the_places_of_their_account_only(resolver) -> None:
    lookups = HostLookups(Policy(), resolver, timeout_s=1)
    hanging = [reason(lookups, "greedy", f"https://hangs{n}.example/") for n in range(PLACES_PER_ACCOUNT)]
    assert set(await asyncio.gather(*hanging)) == {"dns_timeout"}
    # The threads are not over: this account waits for one of its places, another does not.
    assert await reason(lookups, "greedy", "https://hooks.example/") == "dns_timeout"
    assert await lookups.resolve("modest", "https://hooks.example/")
    resolver.released.set()
    answered = False
    while not answered:  # as soon as one of the threads is over
        with contextlib.suppress(UrlRefusedError):
            answered = (await lookups.resolve("greedy", "https://hooks.example/")).ip == PUBLIC


async def test_a_resolver_that_breaks_gives_its_place_back(resolver, monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    lookups = HostLookups(Policy(), resolver, timeout_s=60)
    for _ in range(PLACES_PER_ACCOUNT + 1):
        with contextlib.suppress(RuntimeError):
            await lookups.resolve("a", "https://breaks.example/")
    assert await lookups.resolve("a", "https://hooks.example/")
