"""What `magi2-farm doctor` knows of this machine: devices, links, memory, limits, disk. It judges nothing.

Read from the driver (NVML, no torch), from /proc and /sys; what cannot be read is None or empty. Tests put a
`Machine` of their own in its place.
"""

import resource
import shutil
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pynvml

GIB = 2**30
_MEMINFO = Path("/proc/meminfo")
_PCI = Path("/sys/bus/pci/devices")
# As `nvidia-smi topo -m` spells them.
_LINKS = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
NVLINK = "NVLINK"


@dataclass(frozen=True)
class Gpu:
    """One device of the driver."""

    index: int
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    numa_node: int | None = None
    uncorrected_errors: int = 0


@dataclass(frozen=True)
class Machine:
    """One host; `links` says how each pair of devices is joined."""

    gpus: list[Gpu] = field(default_factory=list)
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    gpu_note: str = ""  # why there are no devices
    memlock_bytes: int | None = None  # None: unlimited
    host_bytes: int | None = None
    disk_free_bytes: int = 0
    packages: frozenset[str] = frozenset()


def read_machine(state_dir: Path) -> Machine:
    """Look at this host."""
    gpus, links, note = _read_gpus()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        gpus=gpus,
        links=links,
        gpu_note=note,
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        host_bytes=_host_bytes(_MEMINFO),
        disk_free_bytes=shutil.disk_usage(_existing(state_dir)).free,
        packages=frozenset((dist.name or "").lower() for dist in metadata.distributions()),
    )


def _read_gpus() -> tuple[list[Gpu], dict[tuple[int, int], str], str]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], {}, str(error)
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpus = [_read_gpu(index, handle) for index, handle in enumerate(handles)]
        links = {
            (first, second): _link(handles[first], handles[second])
            for first in range(len(handles))
            for second in range(first + 1, len(handles))
        }
    except pynvml.NVMLError as error:
        return [], {}, str(error)
    finally:
        pynvml.nvmlShutdown()
    return gpus, links, ""


def _read_gpu(index: int, handle: Any) -> Gpu:
    try:
        errors = pynvml.nvmlDeviceGetTotalEccErrors(
            handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        )
    except pynvml.NVMLError:  # a device without such memory
        errors = 0
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        capability=(int(major), int(minor)),
        numa_node=_numa_node(str(pynvml.nvmlDeviceGetPciInfo(handle).busId)),
        uncorrected_errors=int(errors),
    )


def _link(first: Any, second: Any) -> str:
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == pynvml.NVML_P2P_STATUS_OK:
            return NVLINK
        return _LINKS.get(int(pynvml.nvmlDeviceGetTopologyCommonAncestor(first, second)), "unknown")
    except pynvml.NVMLError:
        return "unknown"


def _numa_node(bus_id: str, devices: Path = _PCI) -> int | None:
    """Read the node of a PCI device; the driver writes eight digits of domain, the kernel four."""
    try:
        node = int((devices / bus_id.lower()[-12:] / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _host_bytes(meminfo: Path) -> int | None:
    """Return all memory of the host, or None where there is no /proc."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")), None)


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    resolved = folder.resolve()
    return next(path for path in (resolved, *resolved.parents) if path.exists())
