"""Passwords of these tests cost nothing to hash; what real ones cost is proven by `test_admins.py`."""

import pytest
from argon2 import PasswordHasher

from farm import admins


@pytest.fixture(autouse=True)
def quick_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admins, "_HASHER", PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))
