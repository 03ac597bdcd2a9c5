"""The profiles of the farm: `profiles.yaml`, read and checked. Which of them are live is `farm/groups.py`'s.

The same file is read by api, agent and ticker. `deterministic` holds for the whole farm; a row may repeat it
but not differ. The members of a row that describe the layout have the names of the engine's flags, with
underscores. `cache_dit` says whether a request may ask for the acceleration of that name, or has it at once.
"""

import difflib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from farm.errors import InvalidFieldError, SettingsError
from magi2.config import CACHE_NUMBERS, CacheConfig
from magi2.contract import (
    ACCELERATIONS,
    DEFAULT_STEPS,
    DEFAULT_TIER,
    MAX_STEPS,
    TIERS,
    GenerationRequest,
    Limits,
    problems_of,
)
from magi2.parallel.layout import Layout, LayoutError, check_released
from magi2.values import shown

AUTO = "auto"
_ACCELERATIONS = {"forbidden": ("off",), "allowed": ACCELERATIONS, "on": ACCELERATIONS}
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
    # What a row says nothing of is `allowed`, but for waves, whose members would have to skip alike.
    cache_dit: Annotated[
        Literal["forbidden", "allowed", "on"] | None,
        BeforeValidator(lambda given: "on" if given is True else given),  # which YAML makes of a bare `on`
    ] = None
    cache_threshold: float | None = None
    cache_warmup_steps: int | None = None
    cache_max_consecutive: int | None = None
    # Of the engine's large matrices; the released weights are bfloat16.
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    # Quality of the H.264 stream: smaller is better and larger in bytes; 0 would be another H.264 profile.
    crf: int = Field(default=10, ge=1, le=40)
    deterministic: bool | None = None
    default_tier: str = DEFAULT_TIER
    max_tier: str = DEFAULT_TIER
    default_steps: int = Field(default=DEFAULT_STEPS, ge=1, le=MAX_STEPS)
    max_steps: int = Field(default=MAX_STEPS, ge=1, le=MAX_STEPS)
    execution_timeout_s: int = Field(default=MAX_TIMEOUT_S, ge=MIN_TIMEOUT_S, le=MAX_TIMEOUT_S)
    roomier: str | None = None
    spill: list[str] = []
    warm_up: bool = False

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
        if self.data_parallel > 1 and self.cache_dit not in {None, "forbidden"}:
            raise ValueError(
                f"cache_dit: {self.cache_dit} with data_parallel {self.data_parallel}: the clips of a wave "
                "would have to skip the same steps; set cache_dit: forbidden"
            )
        CacheConfig.from_row(self.cache_numbers())
        try:
            layout = Layout.from_flags({member: getattr(self, member) for member in _LAYOUT})
            check_released(layout)
        except LayoutError as error:
            raise ValueError(str(error)) from None
        return self

    def cache_numbers(self) -> dict[str, Any]:
        """Return what the row itself says of when a step may come from the cache."""
        given = {name: getattr(self, f"cache_{name}") for name in CACHE_NUMBERS}
        return {f"cache_{name}": value for name, value in given.items() if value is not None}

    def cache_rule(self) -> str:
        """Return whether requests may ask for the cache, or have it unless they say no."""
        return self.cache_dit or ("forbidden" if self.data_parallel > 1 else "allowed")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    deterministic: bool
    auto: list[str] = Field(min_length=1)
    auto_waves: list[str] = []
    profiles: dict[str, _Row] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_together(self) -> "_File":
        rows = self.profiles.values()
        named = [
            *self.auto,
            *self.auto_waves,
            *(row.roomier for row in rows if row.roomier),
            *(to for row in rows for to in row.spill),
        ]
        for name in named:
            if name not in self.profiles:
                raise ValueError(f"{name} is named in auto, auto_waves, roomier or spill but has no row")
        for name in self.auto_waves:
            if self.profiles[name].data_parallel == 1:
                raise ValueError(f"{name} is named in auto_waves but runs one job at a time")
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
    spill: tuple[str, ...] = ()  # where its jobs may be moved when nobody serves it, in this order
    warm_up: bool = False  # a group is ready only after a self-test

    @property
    def world(self) -> int:
        """Ranks of a group: one a device, or on the CPU as many as the layout asks for."""
        return prod(self.layout.get(degree, 1) for degree in _DEGREES)

    @property
    def gpus(self) -> int:
        """Devices that one job occupies; a profile without devices counts as one."""
        return max(1, self.devices // self.wave_size)

    def limits(self) -> Limits:
        """Return what request validation needs to know."""
        return Limits(
            profile=self.name,
            default_tier=self.default_tier,
            max_tier=self.max_tier,
            default_steps=self.default_steps,
            max_steps=self.max_steps,
            deterministic=self.deterministic,
            accelerations=_ACCELERATIONS[self.cache_dit],
            default_acceleration="cache_dit" if self.cache_dit == "on" else "off",
        )


@dataclass(frozen=True)
class Profiles:
    """All rows of the file, in its order."""

    deterministic: bool
    auto: tuple[str, ...]
    by_name: dict[str, Profile]
    auto_waves: tuple[str, ...] = ()  # of these, for `auto` jobs of low priority that fill whole waves

    def get(self, name: str) -> Profile:
        """Return a profile by name.

        Raises:
            InvalidFieldError: There is none of that name; the message lists them.
        """
        if name not in self.by_name:
            near = difflib.get_close_matches(name, self.by_name, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidFieldError(
                "profile",
                f"profile must be auto or one of {', '.join(self.by_name)} (got {shown(name)}){hint}",
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

    def live_waves(self, live: AbstractSet[str]) -> list[Profile]:
        """Return the live profiles whose waves `auto` jobs of low priority may fill, in the file's order."""
        return [self.by_name[name] for name in self.auto_waves if name in live]

    @property
    def wave_sizes(self) -> dict[str, int]:
        """Slots of the profiles whose layout runs several clips side by side."""
        return {name: row.wave_size for name, row in self.by_name.items() if row.wave_size > 1}

    def spill(
        self, name: str, usable: AbstractSet[str], request: GenerationRequest, *, is_auto: bool
    ) -> Profile | None:
        """Return the first profile of those in use that a waiting job may move to; None if there is none.

        Those that the row lists come first, then, for a job that asked for `auto`, the farm's order. A
        profile whose caps or settings refuse the request is never chosen.
        """
        allowed = (*self.by_name[name].spill, *(self.auto if is_auto else ()))
        for other in allowed:
            profile = self.by_name[other]
            if other != name and other in usable and not problems_of(request, profile.limits()):
                return profile
        return None

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


def load_profiles(path: Path, *, named_by: str = "FARM_PROFILES_FILE") -> Profiles:
    """Read and check the file.

    Args:
        path: The file.
        named_by: What named it: said where it cannot be read.

    Raises:
        SettingsError: The message names the row, the member and what is allowed.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise SettingsError(f"{named_by} {path} cannot be read: {exc.strerror}") from None
    except yaml.YAMLError as exc:
        raise SettingsError(f"{path.name} is not YAML: {exc}") from None
    try:
        parsed = _File.model_validate(raw)
    except ValidationError as exc:
        problems = "; ".join(_sentence(problem) for problem in exc.errors())
        raise SettingsError(f"{path.name}: {problems}") from None
    rows = {name: _profile(name, row, parsed) for name, row in parsed.profiles.items()}
    return Profiles(parsed.deterministic, tuple(parsed.auto), rows, tuple(parsed.auto_waves))


def _profile(name: str, row: _Row, parsed: _File) -> Profile:
    return Profile(
        name=name,
        devices=row.devices,
        deterministic=parsed.deterministic,
        execution_timeout_s=row.execution_timeout_s,
        layout={member: getattr(row, member) for member in _LAYOUT}
        | {"dtype": row.dtype, "crf": row.crf}
        | row.cache_numbers(),
        wave_size=row.data_parallel,
        default_tier=row.default_tier,
        max_tier=row.max_tier,
        default_steps=row.default_steps,
        max_steps=row.max_steps,
        cache_dit=row.cache_rule(),
        roomier=row.roomier,
        spill=tuple(row.spill),
        warm_up=row.warm_up,
    )


def _sentence(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    said = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else str(said)
