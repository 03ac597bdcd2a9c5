"""The checks of `magi2-farm doctor` that judge a machine: devices, links, memory, limits, kernels, disk.

Each takes what is known of the machine and the profile that shall run on it, and gives one finding. Memory is
judged by the same calculator that refuses a layout in `python -m magi2 plan` and in the worker.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from farm.commands.doctor_layouts import layout_of
from farm.commands.doctor_machine import GIB, NVLINK, Gpu, Machine
from farm.profiles import Profile
from magi2.parallel.layout import Layout, LayoutError
from magi2.parallel.memory import MemoryPlan, check_memory, released_plan

OLDEST_CAPABILITY = (8, 0)  # bfloat16 matrices
MIN_FREE_DISK_BYTES = 20 * GIB
MIN_FREE_DISK_CPU_BYTES = 2 * GIB
SELF_TEST_TIMEOUT_S = 300
HF_KERNELS = "kernels"
# In a process of its own: the command line never imports torch. Operators run on the device that the engine
# would use; the definitions run on the CPU in fp32.
_SELF_TEST = """
import torch
from kernels import attention, dispatch, mh_moe, rms_norm, swiglu7
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
limit = 0.03 if device == "cuda" else 1e-4

def close(name, got, want):
    error = ((got.float().cpu() - want).abs().max() / want.abs().max()).item()
    if not error <= limit:
        raise SystemExit(f"{name} differs from its definition by {error:.3g} (allowed: {limit})")

def on_device(*tensors):
    return [tensor.to(device, dtype) for tensor in tensors]

def rounded(*shape):
    return torch.randn(*shape).to(dtype).float()

q, k, v = (rounded(96, 4, 64) for _ in range(3))
sinks = torch.randn(1, 4)
want = attention.chunked_attention(q, k, v, sinks, bounds=[0, 40, 96], softcap=0.0, scale=64**-0.5)
got = dispatch.attend(*on_device(q, k, v), sinks.to(device), bounds=[0, 40, 96], softcap=0.0)
close("attention", got, want)
x = rounded(64, 256)
close("swiglu7", dispatch.activate(*on_device(x)), swiglu7.swiglu7(x))
weight = torch.randn(256)
close("rms_norm", dispatch.rms_norm(*on_device(x), weight.to(device)), rms_norm.rms_norm(x, weight))
x = rounded(48, 2, 64)
gate, bias = torch.randn(2, 8, 64), torch.zeros(2, 8)
options = {"top_k": 2, "route_norm": True, "route_scale": 1.0}
routes = mh_moe.route(x, gate, bias, **options)
matrices = [0.1 * rounded(16, 64, 128), 0.1 * rounded(16, 64, 128), 0.1 * rounded(16, 128, 64)]
matrices = [matrix.to(dtype).float() for matrix in matrices]
want = mh_moe.routed_experts(x, routes, mh_moe.ExpertWeights(*matrices))
moved = mh_moe.Routes(*(part.to(device) for part in routes))
got = dispatch.routed_experts(*on_device(x), moved, mh_moe.ExpertWeights(*on_device(*matrices)))
close("routed_experts", got, want)
print(f"{device}: " + ", ".join(f"{name} {'/'.join(ran)}" for name, ran in dispatch.report().items()))
"""


@dataclass(frozen=True)
class Finding:
    """What one check found; `fix` says what to change. With a fix and `is_ok`, it is advice."""

    part: str
    is_ok: bool
    message: str
    fix: str = ""


@dataclass(frozen=True)
class Purpose:
    """What this machine is to do: run a profile on some devices, or, without one, no worker at all."""

    machine: Machine
    profile: Profile | None = None
    devices: tuple[int, ...] = ()

    @property
    def gpus(self) -> list[Gpu]:
        """Return the devices that are meant and exist; without a choice, as many as the profile takes."""
        by_index = {gpu.index: gpu for gpu in self.machine.gpus}
        chosen: Sequence[int] = (
            self.devices or list(by_index)[: self.profile.devices if self.profile else None]
        )
        return [by_index[index] for index in chosen if index in by_index]

    @property
    def needs_gpus(self) -> bool:
        """Tell whether the profile runs on devices."""
        return self.profile is not None and self.profile.devices > 0

    def memory(self) -> tuple[Layout, MemoryPlan] | None:
        """Return the layout and what it needs; None where nothing is planned."""
        if self.profile is None or not self.needs_gpus:
            return None
        layout = layout_of(self.profile)
        smallest = min((gpu.memory_bytes for gpu in self.gpus), default=None)
        return layout, released_plan(layout, tier=self.profile.max_tier, device_bytes=smallest)


def check_gpus(purpose: Purpose) -> Finding:
    """Count the devices, and look at their model and at errors of their memory."""
    part, machine = "gpus", purpose.machine
    found = ", ".join(f"{gpu.index}: {gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB" for gpu in machine.gpus)
    if not purpose.needs_gpus:
        return Finding(part, True, found or "none, and none needed")
    wanted = purpose.profile.devices if purpose.profile else 0
    if len(purpose.gpus) < wanted:
        fix = "install the NVIDIA driver, or choose a profile with fewer devices (magi2-farm profiles list)"
        note = f" ({machine.gpu_note})" if machine.gpu_note else ""
        return Finding(part, False, f"{len(purpose.gpus)} of {wanted} devices found{note}", fix)
    for gpu in purpose.gpus:
        if gpu.uncorrected_errors:
            message = f"device {gpu.index} has met {gpu.uncorrected_errors} uncorrectable memory errors"
            return Finding(part, False, message, "reset it (nvidia-smi --gpu-reset), or replace it")
        if gpu.capability < OLDEST_CAPABILITY:
            message = f"device {gpu.index} ({gpu.name}) has compute capability {gpu.capability}"
            return Finding(part, False, message, f"{OLDEST_CAPABILITY} or newer is needed, for bfloat16")
    return Finding(part, True, found)


def check_gpu_links(purpose: Purpose) -> Finding:
    """Show how the devices of a group are joined; sequence parallelism lives on the links."""
    part, indexes = "gpu links", [gpu.index for gpu in purpose.gpus]
    links = {pair: purpose.machine.links.get(pair, "unknown") for pair in _pairs(indexes)}
    if not links:
        return Finding(part, True, "one device or none: no links")
    shown = ", ".join(f"{first}-{second} {link}" for (first, second), link in links.items())
    slow = [f"{first}-{second}" for (first, second), link in links.items() if link != NVLINK]
    if not slow or not purpose.needs_gpus:
        return Finding(part, True, shown)
    return Finding(
        part, False, f"{shown}: no NVLink between {', '.join(slow)}",
        "name devices that are joined (--devices, FARM_WORKER__DEVICES), or take layerwise-1gpu",
    )  # fmt: skip


def check_numa(purpose: Purpose) -> Finding:
    """Show the memory node beside each device; pinned memory far from its device is copied slower."""
    part, nodes = "numa", {gpu.index: gpu.numa_node for gpu in purpose.gpus}
    if not nodes:
        return Finding(part, True, "no devices")
    shown = ", ".join(
        f"device {index}: node {'?' if node is None else node}" for index, node in nodes.items()
    )
    planned = purpose.memory()
    is_spread = len(set(nodes.values())) > 1
    if planned is None or not planned[1].pinned or not is_spread:
        return Finding(part, True, shown)
    fix = (
        "start the worker with memory of all these nodes (numactl --interleave=NODES), or use devices of one"
    )
    return Finding(part, True, shown, fix)


def check_memlock(purpose: Purpose) -> Finding:
    """Compare the limit of locked memory with what one rank pins."""
    part, limit, planned = "memlock", purpose.machine.memlock_bytes, purpose.memory()
    shown = "unlimited" if limit is None else f"{limit / GIB:.2f} GiB"
    pinned = planned[1].pinned if planned else 0
    if limit is None or limit >= pinned:
        return Finding(part, True, shown)
    fix = "LimitMEMLOCK=infinity (systemd), ulimits.memlock: -1 (compose), or ulimit -l unlimited"
    return Finding(part, False, f"{shown}, and a rank pins {pinned / GIB:.1f} GiB", fix)


def check_host_memory(purpose: Purpose) -> Finding:
    """Compare the host's memory with what the profile pins and keeps on it."""
    part, there, planned = "host memory", purpose.machine.host_bytes, purpose.memory()
    shown = "unknown" if there is None else f"{there / GIB:.1f} GiB"
    if planned is None or there is None:
        return Finding(part, True, shown)
    needed = planned[1].pinned_node
    if there >= needed:
        return Finding(part, True, f"{shown} for {needed / GIB:.1f} GiB")
    fix = "add memory, or take a profile that pins less: python -m magi2 plan compares them"
    return Finding(part, False, f"{shown}, and this profile needs {needed / GIB:.1f} GiB", fix)


def check_layout(purpose: Purpose) -> Finding:
    """Ask the memory calculator whether the layout fits the smallest of the devices."""
    part, planned = "layout", purpose.memory()
    if planned is None:
        return Finding(part, True, "nothing to plan: no profile with devices")
    layout, needed = planned
    if not purpose.gpus:
        return Finding(
            part, False, f"{layout} needs {needed.device / GIB:.1f} GiB a device", "mend gpus first"
        )
    smallest = min(gpu.memory_bytes for gpu in purpose.gpus)
    try:
        check_memory(needed, layout, device_bytes=smallest, host_bytes=needed.pinned_node)
    except LayoutError as error:
        fix = "choose a profile that streams (dlo-sp4, layerwise-1gpu), or devices with more memory"
        return Finding(part, False, str(error), fix)
    return Finding(part, True, f"{layout}: {needed.device / GIB:.1f} of {smallest / GIB:.1f} GiB a device")


def check_kernels(_: Purpose) -> Finding:
    """Run the operations of the engine, as it would, against their definitions."""
    part = "kernels"
    if importlib.util.find_spec("torch") is None:
        return Finding(part, True, "not checked: no engine is installed here")
    try:
        tested = subprocess.run(
            [sys.executable, "-c", _SELF_TEST],
            capture_output=True, text=True, timeout=SELF_TEST_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding(
            part, False, f"not done within {SELF_TEST_TIMEOUT_S} s", "look at the driver's log (dmesg)"
        )
    if tested.returncode != 0:
        said = tested.stderr.strip().splitlines()[-1:] or ["it was killed"]
        fix = "check that torch, triton and the driver fit (constraints.txt), then the device (nvidia-smi -q)"
        return Finding(part, False, said[0][-500:], fix)
    return Finding(part, True, tested.stdout.strip())


def check_hf_kernels(purpose: Purpose) -> Finding:
    """Refuse the package of Hugging Face that has our folder's name."""
    part = "hf kernels"
    if HF_KERNELS in purpose.machine.packages:
        return Finding(part, False, "the package kernels is installed", "pip uninstall kernels (ADR-0004)")
    return Finding(part, True, "not installed")


def check_disk(purpose: Purpose) -> Finding:
    """Look at the free space where clips are written before they are stored."""
    part, free = "disk", purpose.machine.disk_free_bytes
    needed = MIN_FREE_DISK_BYTES if purpose.needs_gpus else MIN_FREE_DISK_CPU_BYTES
    shown = f"{free / GIB:.1f} GiB free at FARM_STATE_DIR"
    if free >= needed:
        return Finding(part, True, shown)
    fix = "free some, or let FARM_STATE_DIR name a larger disk"
    return Finding(part, False, f"{shown}, {needed / GIB:.0f} GiB wanted", fix)


MACHINE_CHECKS = (
    check_gpus,
    check_gpu_links,
    check_numa,
    check_memlock,
    check_host_memory,
    check_layout,
    check_kernels,
    check_hf_kernels,
    check_disk,
)


def _pairs(indexes: Sequence[int]) -> list[tuple[int, int]]:
    ordered = sorted(indexes)
    return [(first, second) for place, first in enumerate(ordered) for second in ordered[place + 1 :]]
