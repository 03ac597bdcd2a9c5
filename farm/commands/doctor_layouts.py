"""The doctor's look at the profiles: which of them fit this machine's devices and memory.

By the calculator that the engine itself refuses with, for the released model at the profile's largest tier.
Without a device there is nothing to fit, and it tells what each profile would need.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import pynvml

from farm.profiles import Profile, load_profiles
from farm.settings import Settings
from magi2.parallel.layout import Layout, LayoutError
from magi2.parallel.memory import GIB, check_memory, released_plan

_MEMBERS = {each.name for each in fields(Layout)}


def device_bytes() -> list[int]:
    """Return the memory of each NVIDIA device of this machine."""
    with _library() as is_there:
        if not is_there:
            return []
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]


def host_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fit(settings: Settings) -> tuple[bool, str, str]:
    """Return whether something can run here, a line about the profiles, and what to change."""
    devices, host = device_bytes(), host_bytes()
    profiles = [each for each in load_profiles(settings.profiles_file).by_name.values() if each.devices]
    if not devices:
        return True, f"no NVIDIA device here; {', '.join(map(_need, profiles))}", ""
    refused = {profile.name: _why_not(profile, devices, host) for profile in profiles}
    said = "; ".join(f"{name} {'fits' if why is None else 'does not'}" for name, why in refused.items())
    reasons = [why for why in refused.values() if why is not None]
    return len(reasons) < len(refused), f"{len(devices)} devices: {said}", "\n      ".join(reasons)


def _need(profile: Profile) -> str:
    needed = released_plan(layout_of(profile), tier=profile.max_tier)
    return f"{profile.name} needs {profile.devices} of {needed.device / GIB:.1f} GiB"


def _why_not(profile: Profile, devices: list[int], host: int) -> str | None:
    if profile.devices > len(devices):
        return f"{profile.name}: {profile.devices} devices needed, {len(devices)} there"
    layout, smallest = layout_of(profile), sorted(devices, reverse=True)[profile.devices - 1]
    needed = released_plan(layout, tier=profile.max_tier, device_bytes=smallest)
    try:
        check_memory(needed, layout, device_bytes=smallest, host_bytes=host)
    except LayoutError as error:
        return f"{profile.name}: {error}"
    return None


def layout_of(profile: Profile) -> Layout:
    """Return the layout of a profile."""
    return Layout.from_flags({name: value for name, value in profile.layout.items() if name in _MEMBERS})


@contextmanager
def _library() -> Iterator[bool]:
    """Open NVML while the block runs; False where there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()
