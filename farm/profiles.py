"""The profiles of the farm: `profiles.yaml`, read and checked. Which of them are live is `farm/groups.py`'s."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magi2.contract import GenerationRequest, Limits


@dataclass(frozen=True)
class CacheDit:
    """How Cache-DiT may be used: `mode` is forbidden, allowed or on; the rest are its own settings."""

    mode: str = "allowed"
    threshold: float = 0.24
    warmup: int = 4
    max_consecutive: int = 3


@dataclass(frozen=True)
class Profile:
    """A way to run the engine; `layout` holds the flags of the engine's command line, underscores for dashes."""

    name: str
    devices: int
    deterministic: bool
    execution_timeout_s: int
    execution_timeout_cap_s: int
    layout: dict[str, Any] = field(default_factory=dict)
    wave_size: int = 1
    default_tier: str = "540p"
    max_tier: str = "540p"
    default_steps: int = 100
    max_steps: int = 200
    cache_dit: CacheDit = CacheDit()
    roomier: str | None = None

    def limits(self) -> Limits:
        """Return what request validation needs to know."""
        ...


@dataclass(frozen=True)
class Profiles:
    """All rows of the file, in its order."""

    deterministic: bool
    auto: tuple[str, ...]
    by_name: dict[str, Profile]

    def get(self, name: str) -> Profile:
        """Return a profile by name.

        Raises:
            InvalidFieldError: There is none of that name; the message lists them.
        """
        ...

    def resolve(self, requested: str | None, live: AbstractSet[str]) -> Profile:
        """Return the profile for a request: the one it names, or for `auto` the first live one of the file's order."""
        ...

    def roomier(self, name: str, live: AbstractSet[str], request: GenerationRequest) -> str | None:
        """Return a live profile that needs less device memory than this one and takes the request."""
        ...


def load_profiles(path: Path) -> Profiles:
    """Read and check the file.

    Raises:
        SettingsError: The message names the row, the member and what is allowed.
    """
    ...
