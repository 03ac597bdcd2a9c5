"""The doctor's look at layouts: what fits these devices, by the engine's own calculator."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from farm.commands import doctor_layouts
from magi2.parallel.memory import GIB

SETTINGS = SimpleNamespace(profiles_file=Path(__file__).parents[4] / "profiles.yaml")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def have(devices: list[int], host: int) -> tuple[bool, str, str]:
        monkeypatch.setattr(doctor_layouts, "device_bytes", lambda: [size * GIB for size in devices])
        monkeypatch.setattr(doctor_layouts, "host_bytes", lambda: host * GIB)
        return doctor_layouts.fit(SETTINGS)

    return have


def test_without_devices_it_tells_what_each_profile_needs(machine) -> None:
    is_ok, message, fix = machine([], 8)
    assert (is_ok, fix) == (True, "")
    assert "no NVIDIA device here; sp4 needs 4 of 110.5 GiB" in message
    assert "tiny-cpu" not in message


def test_profiles_that_fit_are_told_from_those_that_do_not(machine) -> None:
    is_ok, message, fix = machine([141] * 4, 128)
    assert is_ok
    assert message.startswith("4 devices: sp4 fits; dlo-sp4 does not;")
    assert "dlo-sp4: layout --ulysses 4" in fix
    assert "of host memory needed, 128.0 GiB there" in fix


def test_machine_for_no_profile_is_a_fault_with_the_numbers(machine) -> None:
    is_ok, message, fix = machine([24], 64)
    assert not is_ok
    assert message.startswith("1 devices: sp4 does not;")
    assert "sp4: 4 devices needed, 1 there" in fix
    assert "of host memory needed, 64.0 GiB there" in fix


def test_small_device_takes_the_layout_streamed_by_head(machine) -> None:
    _, message, _ = machine([48], 400)
    assert "layerwise-1gpu fits" in message


def test_machine_without_a_driver_has_no_devices() -> None:
    assert doctor_layouts.device_bytes() == []
    assert doctor_layouts.host_bytes() > GIB // 2
