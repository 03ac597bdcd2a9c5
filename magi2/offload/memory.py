"""What torch raises when memory runs out, as the engine's own failure."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from magi2.errors import OutOfMemory

# torch states the size that it could not get only in words, "2.50 GiB" on CUDA and bytes on the host.
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
# What a text of 7,000 tokens takes beside the weights.
_ROOM_TO_COMPUTE = 2 * 2**30
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@contextmanager
def named_exhaustion(device: torch.device) -> Iterator[None]:
    """Turn running out of memory inside the block into `OutOfMemory`.

    Raises:
        OutOfMemory: The device, or the host, had less than was asked for.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(device)
        raise OutOfMemory(free, _needed(error), str(device)) from error
    except MemoryError as error:
        raise OutOfMemory(_free_on_host(), 0, "host") from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise OutOfMemory(_free_on_host(), _needed(error), "host") from error


def _needed(error: Exception) -> int:
    match = _TRIED.search(str(error))
    return int(float(match[1]) * _UNITS[match[2]]) if match else 0


def host_bytes() -> int:
    """Return the bytes of memory that the host has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_on_host() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def has_room(device: torch.device, module: nn.Module) -> bool:
    """Say whether a network can be on the device as a whole, beside what is there for good."""
    if device.type != "cuda":
        return True
    needed = sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
    torch.cuda.empty_cache()  # what only the allocator holds is free
    free, _ = torch.cuda.mem_get_info(device)
    return needed + _ROOM_TO_COMPUTE <= free


def available_host_bytes() -> int:
    """Return how much memory the host could give, counting caches that it would drop."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _free_on_host()
