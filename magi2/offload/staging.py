"""Networks that live on the host and visit the device for one phase: text encoder, image VAE, decoders.

Promises: one page-locked master for each storage, so aliases, strides and offsets stay; while a network is
staged its weights are on the device, before and after that they are the host's own and the device's are free
again; nothing is ever copied back, since inference changes no weight; two networks are never staged together.
On the CPU staging is nothing at all. What is not staged here never moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from magi2.errors import EngineError
from magi2.offload.masters import PrivateMemory
from magi2.offload.runtime import CudaRuntime, Runtime, Stream


class Stage:
    """The way of networks to one device and back.

    Args:
        device: Where staged networks compute.
        runtime: Its streams; None makes them for CUDA, and none for the CPU, where nothing moves.
    """

    def __init__(self, device: torch.device, runtime: Runtime | None = None) -> None:
        self.device = device
        self._runtime = runtime or (CudaRuntime(device) if device.type == "cuda" else None)
        self._memory = PrivateMemory()
        self._locked: list[Tensor] = []
        self._is_taken = False

    @contextmanager
    def holding(self, module: nn.Module) -> Iterator[None]:
        """Keep a network's weights on the device inside the `with` block.

        Raises:
            EngineError: Another network is staged.
        """
        if self._runtime is None:
            yield
            return
        if self._is_taken:
            raise EngineError(
                "two networks were to be staged at the same time; their phases must not overlap"
            )
        masters = [(tensor, tensor.data) for tensor in _tensors(module)]
        self._is_taken = True
        try:
            self._move_in(self._runtime, masters)
            yield
        finally:
            self._is_taken = False
            for tensor, master in masters:
                tensor.data = master

    def pin(self, module: nn.Module) -> None:
        """Move a network's weights into page-locked host memory of exact size, each storage once."""
        if self._runtime is None:
            return
        moved: dict[int, Tensor] = {}
        for tensor in _tensors(module):
            storage = tensor.data.untyped_storage()
            if storage.nbytes() == 0:
                continue
            if storage.data_ptr() not in moved:
                master = self._memory.block(len(self._locked), storage.nbytes())[: storage.nbytes()]
                master.copy_(torch.tensor([], dtype=torch.uint8).set_(storage))
                self._runtime.register(master)
                self._locked.append(master)
                moved[storage.data_ptr()] = master
                # Its old address may be given to another storage as soon as it is free.
                moved[master.data_ptr()] = master
            tensor.data = _like(tensor.data, moved[storage.data_ptr()])

    def close(self) -> None:
        """Unlock all masters; the networks must not be used any more."""
        if self._runtime is not None:
            self._runtime.abandon()
            for master in self._locked:
                self._runtime.unregister(master)
        self._locked.clear()
        self._memory.close()

    def _move_in(self, runtime: Runtime, masters: list[tuple[Tensor, Tensor]]) -> None:
        try:
            self._copy(runtime, masters)
        except torch.OutOfMemoryError:
            # Other phases leave cached blocks behind; without them there may be room.
            torch.cuda.empty_cache()
            self._copy(runtime, masters)

    def _copy(self, runtime: Runtime, masters: list[tuple[Tensor, Tensor]]) -> None:
        """Copy every storage once, on the side; computing waits for the last copy."""
        arrived: dict[int, Tensor] = {}
        runtime.wait(Stream.COPY, runtime.record(Stream.COMPUTE))
        for tensor, master in masters:
            storage = master.untyped_storage()
            if storage.nbytes() == 0:
                continue
            if storage.data_ptr() not in arrived:
                source = torch.tensor([], dtype=torch.uint8).set_(storage)
                arrived[storage.data_ptr()] = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, device=runtime.device
                )
                runtime.copy(arrived[storage.data_ptr()], source)
            tensor.data = _like(master, arrived[storage.data_ptr()])
        done = runtime.record(Stream.COPY)
        runtime.wait(Stream.COMPUTE, done)
        if runtime.can_inspect:  # the host computes at once, without asking its compute stream
            runtime.synchronize(done)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _like(tensor: Tensor, memory: Tensor) -> Tensor:
    """Return a view of other bytes with a tensor's dtype, shape, strides and offset."""
    whole = memory[: memory.numel() // tensor.dtype.itemsize * tensor.dtype.itemsize].view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
