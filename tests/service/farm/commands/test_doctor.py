"""`magi2-farm doctor` finds each planted fault by name, and nothing else: real servers, a machine made up."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis

from farm.commands import doctor
from farm.commands.doctor_checks import MACHINE_CHECKS, Finding, Purpose, check_kernels
from farm.commands.doctor_machine import GIB, NVLINK, Gpu, Machine
from farm.profiles import load_profiles
from farm.settings import SHIPPED_PROFILES, Settings, load_settings
from farm.storage import ObjectStore
from tests.compose_file import ROOT

PROFILES = load_profiles(SHIPPED_PROFILES)
PAIRS = [(first, second) for first in range(4) for second in range(first + 1, 4)]
HEALTHY = Machine(
    gpus=[Gpu(index, "NVIDIA H200", 141 * GIB, (9, 0), numa_node=0) for index in range(4)],
    links=dict.fromkeys(PAIRS, NVLINK),
    host_bytes=512 * GIB,
    disk_free_bytes=500 * GIB,
)


@dataclass
class Planted:
    """What a test may spoil before the doctor looks."""

    settings: Settings
    machine: Machine
    profile: str
    monkeypatch: pytest.MonkeyPatch
    redis_url: str
    empty_url: str

    def set(self, **changes: Any) -> None:
        self.machine = replace(self.machine, **changes)

    def gpus(self, **changes: Any) -> None:
        first, *others = self.machine.gpus
        self.set(gpus=[replace(first, **changes), *others])


def old_schema(planted: Planted) -> None:
    planted.monkeypatch.setenv("DATABASE_URL", planted.empty_url)
    planted.settings = load_settings()


def evicting_broker(planted: Planted) -> None:
    with redis.Redis.from_url(planted.redis_url) as broker:
        broker.config_set("maxmemory-policy", "allkeys-lru")


def missing_bucket(planted: Planted) -> None:
    planted.settings = planted.settings.model_copy(update={"s3_bucket": "no-such-bucket"})


def wrong_public_address(planted: Planted) -> None:
    planted.settings = planted.settings.model_copy(update={"s3_public_endpoint_url": "http://127.0.0.1:9"})


def wrong_clock(planted: Planted) -> None:
    planted.monkeypatch.setattr(ObjectStore, "clock_offset_s", lambda _: -400.0)


def missing_gpu(planted: Planted) -> None:
    planted.set(gpus=planted.machine.gpus[:3])


def broken_gpu_memory(planted: Planted) -> None:
    planted.gpus(uncorrected_errors=3)


def old_gpu(planted: Planted) -> None:
    planted.gpus(name="Tesla T4", capability=(7, 5))


def slow_link(planted: Planted) -> None:
    planted.set(links={**planted.machine.links, (1, 3): "SYS"})


def low_memlock(planted: Planted) -> None:
    planted.profile = "dlo-sp4"
    planted.set(memlock_bytes=8 * 2**20)


def little_host_memory(planted: Planted) -> None:
    planted.profile = "dlo-sp4"
    planted.set(host_bytes=128 * GIB)


def small_gpu(planted: Planted) -> None:
    planted.gpus(memory_bytes=48 * GIB)


def hf_kernels(planted: Planted) -> None:
    planted.set(packages=frozenset({"torch", "kernels"}))


def full_disk(planted: Planted) -> None:
    planted.set(disk_free_bytes=1 * GIB)


FAULTS: list[tuple[Callable[[Planted], None], set[str], str]] = [
    (old_schema, {"database"}, "magi2-farm migrate"),
    (evicting_broker, {"broker"}, "noeviction"),
    (missing_bucket, {"object store", "clock"}, "bucket"),
    (wrong_public_address, {"object store"}, "FARM_S3_PUBLIC_ENDPOINT_URL"),
    (wrong_clock, {"clock"}, "NTP"),
    (missing_gpu, {"gpus"}, "driver"),
    (broken_gpu_memory, {"gpus"}, "reset"),
    (old_gpu, {"gpus"}, "bfloat16"),
    (slow_link, {"gpu links"}, "NVLink"),
    (low_memlock, {"memlock"}, "LimitMEMLOCK=infinity"),
    (little_host_memory, {"host memory"}, "pins less"),
    (small_gpu, {"layout"}, "dlo-sp4"),
    (hf_kernels, {"hf kernels"}, "pip uninstall kernels"),
    (full_disk, {"disk"}, "FARM_STATE_DIR"),
]


@pytest.fixture
def planted(
    settings: Settings,
    redis_url: str,
    new_database: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Planted:
    # The slow two have tests of their own, and `layouts` looks at the devices of the real machine.
    left_out = (doctor.check_encoder, doctor.check_layouts)
    monkeypatch.setattr(doctor, "CHECKS", [check for check in doctor.CHECKS if check not in left_out])
    machine_checks = [check for check in MACHINE_CHECKS if check is not check_kernels]
    monkeypatch.setattr(doctor, "MACHINE_CHECKS", machine_checks)
    return Planted(settings, HEALTHY, "sp4", monkeypatch, redis_url, new_database("template1"))


@pytest.fixture(autouse=True)
def broker_as_it_was(redis_url: str):
    yield
    with redis.Redis.from_url(redis_url) as broker:
        broker.config_set("maxmemory-policy", "noeviction")


def findings_of(planted: Planted) -> list[Finding]:
    purpose = Purpose(planted.machine, PROFILES.get(planted.profile), (0, 1, 2, 3))
    return doctor.examine(planted.settings, purpose)


@pytest.mark.parametrize("profile", ["sp4", "dlo-sp4", "dlo-dp4", "tiny-cpu"])
def test_a_good_machine_and_a_good_farm_have_nothing_to_mend(planted: Planted, profile: str) -> None:
    planted.profile = profile
    assert [finding for finding in findings_of(planted) if not finding.is_ok or finding.fix] == []


@pytest.mark.parametrize(("plant", "parts", "remedy"), FAULTS, ids=[plant.__name__ for plant, *_ in FAULTS])
def test_each_fault_is_found_by_name_and_alone(
    planted: Planted, plant: Callable[[Planted], None], parts: set[str], remedy: str
) -> None:
    plant(planted)
    bad = [finding for finding in findings_of(planted) if not finding.is_ok]
    assert {finding.part for finding in bad} == parts
    assert any(remedy in f"{finding.fix} {finding.message}" for finding in bad)
    assert all(finding.fix for finding in bad)


def test_devices_on_two_nodes_are_a_warning_where_weights_are_pinned(planted: Planted) -> None:
    planted.profile = "dlo-sp4"
    planted.gpus(numa_node=1)
    [warned] = [finding for finding in findings_of(planted) if finding.fix]
    assert (warned.part, warned.is_ok) == ("numa", True)
    assert "numactl" in warned.fix


@pytest.mark.timeout(600)
def test_a_kernel_that_computes_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    purpose = Purpose(HEALTHY)
    monkeypatch.chdir(ROOT)
    assert check_kernels(purpose).is_ok
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    dispatch = tmp_path / "kernels/dispatch.py"
    text = dispatch.read_text()
    assert text.count("return swiglu7.swiglu7(x)") == 1
    dispatch.write_text(text.replace("return swiglu7.swiglu7(x)", "return swiglu7.swiglu7(x) * 1.01"))
    monkeypatch.chdir(tmp_path)
    found = check_kernels(purpose)
    assert not found.is_ok
    assert "swiglu7 differs" in found.message
    assert found.fix
