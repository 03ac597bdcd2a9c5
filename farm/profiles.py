"""The profiles of the farm: `profiles.yaml`, read and checked. Which of them are live is `farm/groups.py`'s.

The same file is read by api, agent and ticker. `deterministic` holds for the whole farm; a row may repeat it
but not differ. The members of a row that describe the layout have the names of the engine's flags, with
underscores.
"""

import difflib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from farm.errors import InvalidFieldError, SettingsError
from magi2.contract import (
    DEFAULT_STEPS,
    DEFAULT_TIER,
    MAX_STEPS,
    TIERS,
    GenerationRequest,
    Limits,
    problems_of,
)
from magi2.parallel.layout import Layout, LayoutError, check_released

AUTO = "auto"
MIN_TIMEOUT_S = 900
MAX_TIMEOUT_S = 4 * 3600
_DEGREES = ("tp", "ulysses", "cfg_parallel", "data_parallel")
_LAYOUT = (
    *_DEGREES,
    "ep",
    "hsdp",
    "vae_patch_parallel",
    "layerwise",
    "cpu_offload",
    "dlo",
    "dlo_no_allgather",
    "resident_blocks",
)


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    devices: int = Field(ge=0, le=8)
    tp: Literal[1, 2, 4] = 1
    ulysses: int = Field(default=1, ge=1, le=8)
    cfg_parallel: Literal[1, 2] = 1
    data_parallel: int = Field(default=1, ge=1, le=4)
    ep: int | None = Field(default=None, ge=1, le=8)
    hsdp: bool = False
    vae_patch_parallel: int = Field(default=1, ge=1, le=8)
    layerwise: bool = False
    cpu_offload: bool = False
    dlo: bool = False
    dlo_no_allgather: bool = False
    resident_blocks: int | Literal["auto"] = 0
    # Cache-DiT has no adapter in this release, so no row may allow it.
    cache_dit: Literal["forbidden"] = "forbidden"
    deterministic: bool | None = None
    default_tier: str = DEFAULT_TIER
    max_tier: str = DEFAULT_TIER
    default_steps: int = Field(default=DEFAULT_STEPS, ge=1, le=MAX_STEPS)
    max_steps: int = Field(default=MAX_STEPS, ge=1, le=MAX_STEPS)
    execution_timeout_s: int = Field(default=MAX_TIMEOUT_S, ge=MIN_TIMEOUT_S, le=MAX_TIMEOUT_S)
    roomier: str | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "_Row":
        for tier in (self.default_tier, self.max_tier):
            if tier not in TIERS:
                raise ValueError(f"tier {tier} does not exist; there are {', '.join(TIERS)}")
        if TIERS[self.default_tier].width > TIERS[self.max_tier].width:
            raise ValueError(f"default_tier {self.default_tier} is above max_tier {self.max_tier}")
        if self.default_steps > self.max_steps:
            raise ValueError(f"default_steps {self.default_steps} is above max_steps {self.max_steps}")
        world = prod(getattr(self, degree) for degree in _DEGREES)
        if self.devices and world != self.devices:
            raise ValueError(
                f"{' x '.join(_DEGREES)} is {world}, but devices is {self.devices}; they must be equal"
            )
        try:
            layout = Layout.from_flags({member: getattr(self, member) for member in _LAYOUT})
            check_released(layout)
        except LayoutError as error:
            raise ValueError(str(error)) from None
        return self


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    deterministic: bool
    auto: list[str] = Field(min_length=1)
    profiles: dict[str, _Row] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_together(self) -> "_File":
        named = [*self.auto, *(row.roomier for row in self.profiles.values() if row.roomier)]
        for name in named:
            if name not in self.profiles:
                raise ValueError(f"{name} is named in auto or roomier but has no row")
        for name, row in self.profiles.items():
            if row.deterministic not in {None, self.deterministic}:
                raise ValueError(
                    f"{name} says deterministic: {row.deterministic}, the farm {self.deterministic}; "
                    "it is one setting for all, at the top of the file"
                )
        if AUTO in self.profiles:
            raise ValueError("no profile can be named auto")
        return self


@dataclass(frozen=True)
class Profile:
    """A way to run the engine; `layout` holds the flags of its command line, underscores for dashes."""

    name: str
    devices: int
    deterministic: bool
    execution_timeout_s: int
    execution_timeout_cap_s: int = MAX_TIMEOUT_S
    layout: Mapping[str, Any] = field(default_factory=dict)
    wave_size: int = 1
    default_tier: str = DEFAULT_TIER
    max_tier: str = DEFAULT_TIER
    default_steps: int = DEFAULT_STEPS
    max_steps: int = MAX_STEPS
    cache_dit: str = "forbidden"
    roomier: str | None = None

    @property
    def world(self) -> int:
        """Ranks of a group: one a device, or on the CPU as many as the layout asks for."""
        return prod(self.layout.get(degree, 1) for degree in _DEGREES)

    def limits(self) -> Limits:
        """Return what request validation needs to know."""
        return Limits(
            profile=self.name,
            default_tier=self.default_tier,
            max_tier=self.max_tier,
            default_steps=self.default_steps,
            max_steps=self.max_steps,
            deterministic=self.deterministic,
        )


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
        if name not in self.by_name:
            near = difflib.get_close_matches(name, self.by_name, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidFieldError(
                "profile", f"profile must be auto or one of {', '.join(self.by_name)}{hint}"
            )
        return self.by_name[name]

    def resolve(self, requested: str | None, live: AbstractSet[str]) -> Profile:
        """Return the profile for a request: the one it names, or for `auto` the first live one in order.

        With none of them live, `auto` takes the first of the file, whose queue then waits for a group.

        Raises:
            InvalidFieldError: There is no profile of that name.
        """
        if requested not in {None, AUTO}:
            return self.get(str(requested))
        return self.by_name[next((name for name in self.auto if name in live), self.auto[0])]

    def roomier(self, name: str, live: AbstractSet[str], request: GenerationRequest) -> str | None:
        """Return a live profile that needs less device memory than this one and takes the request."""
        seen = {name}
        following = self.by_name[name].roomier
        while following is not None and following not in seen:
            profile = self.by_name[following]
            if following in live and not problems_of(request, profile.limits()):
                return following
            seen.add(following)
            following = profile.roomier
        return None


def load_profiles(path: Path) -> Profiles:
    """Read and check the file.

    Raises:
        SettingsError: The message names the row, the member and what is allowed.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise SettingsError(f"PROFILES_FILE {path} cannot be read: {exc.strerror}") from None
    except yaml.YAMLError as exc:
        raise SettingsError(f"{path.name} is not YAML: {exc}") from None
    try:
        parsed = _File.model_validate(raw)
    except ValidationError as exc:
        problems = "; ".join(_sentence(problem) for problem in exc.errors())
        raise SettingsError(f"{path.name}: {problems}") from None
    rows = {name: _profile(name, row, parsed) for name, row in parsed.profiles.items()}
    return Profiles(parsed.deterministic, tuple(parsed.auto), rows)


def _profile(name: str, row: _Row, parsed: _File) -> Profile:
    return Profile(
        name=name,
        devices=row.devices,
        deterministic=parsed.deterministic,
        execution_timeout_s=row.execution_timeout_s,
        layout={member: getattr(row, member) for member in _LAYOUT},
        wave_size=row.data_parallel,
        default_tier=row.default_tier,
        max_tier=row.max_tier,
        default_steps=row.default_steps,
        max_steps=row.max_steps,
        cache_dit=row.cache_dit,
        roomier=row.roomier,
    )


def _sentence(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    said = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else str(said)
