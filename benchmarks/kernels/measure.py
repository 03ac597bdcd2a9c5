"""What the benchmarks of kernels share: times of device work, ceilings of the same run, a record's stamp."""

import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

import torch


class Ceilings(NamedTuple):
    """What the device reached: bf16 product in FLOP/s, copy in bytes read and written a second."""

    flops: float
    bandwidth: float
    product_ms: float
    copy_ms: float


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(work: Callable[[], object], device: torch.device, *, repeats: int = 15, warm: int = 3) -> float:
    """Return the median time of a piece of work: by events on CUDA, by the clock elsewhere."""
    for _ in range(warm):
        work()
    times = []
    for _ in range(repeats):
        if device.type != "cuda":
            began = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - began))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The device waits until the host has queued everything: only device time is measured.
        torch.cuda._sleep(1_000_000)  # noqa: SLF001 - torch has no public way to occupy the device
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def ceilings(device: torch.device, *, is_tiny: bool = False) -> Ceilings:
    """Measure a square bf16 product (8192, tiny 256) and a copy (2 GiB, tiny 1 MiB)."""
    size, nbytes = (256, 1 << 20) if is_tiny else (8192, 1 << 31)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product_ms = median_ms(lambda: a @ b, device)
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), device)
    return Ceilings(2e3 * size**3 / product_ms, 2e3 * nbytes / copy_ms, product_ms, copy_ms)


def stamp(device: torch.device, commit: str | None) -> dict[str, str]:
    """Return what a record says of machine, versions and code."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "triton": triton, "commit": commit or found}
