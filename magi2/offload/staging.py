"""Networks that live on the host and visit the device for one phase: text encoder, image VAE, decoders.

Promises: while a network is staged its weights are on the device, before and after that they are the host's
own and the device's are free again; nothing is ever copied back, since inference changes no weight. On
the CPU staging is nothing at all. Whoever stages keeps two networks from being on the device together.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Stage:
    """The way of networks to one device and back.

    Args:
        device: Where staged networks compute.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def holding(self, module: nn.Module) -> Iterator[None]:
        """Keep a network's weights on the device inside the `with` block."""
        if self.device.type == "cpu":
            yield
            return
        masters = [(tensor, tensor.data) for tensor in _tensors(module)]
        try:
            _move_in(masters, self.device)
            yield
        finally:
            for tensor, master in masters:
                tensor.data = master

    def pin(self, module: nn.Module) -> None:
        """Put a network's weights into page-locked host memory, from which copies are fast."""
        if self.device.type == "cuda":
            for tensor in _tensors(module):
                tensor.data = tensor.data.pin_memory()


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _move_in(masters: list[tuple[Tensor, Tensor]], device: torch.device) -> None:
    try:
        _copy(masters, device)
    except torch.OutOfMemoryError:
        # Other phases leave cached blocks behind; without them there may be room.
        torch.cuda.empty_cache()
        _copy(masters, device)


def _copy(masters: list[tuple[Tensor, Tensor]], device: torch.device) -> None:
    # One stream: what computes with the weights is enqueued behind their copies.
    for tensor, master in masters:
        tensor.data = master.to(device, non_blocking=True)
