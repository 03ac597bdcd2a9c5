"""Random weights of the transformer, drawn where they are needed, and the loaders' own way with them.

Promises: a tensor's values follow from its name alone, so ranks, layouts and the single rank agree without a
file; a rank keeps its own part only; activations keep a harmless size. A pool lets layers of a kind share a
few masters on the host, whose copies are as large as the real ones': for timing, not for comparing.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import torch
from torch import Tensor

from magi2.checkpoint.keys import build_on_meta, expected_tensors
from magi2.checkpoint.load import fill_from
from magi2.checkpoint.load_streamed import Streaming, stream_from
from magi2.config import ModelConfig
from magi2.model.distribute import Own
from magi2.model.transformer import Magi2Transformer
from magi2.offload.lazy import HostRuntime
from magi2.offload.masters import PrivateMemory
from magi2.offload.runtime import CudaRuntime
from magi2.parallel.groups import Groups

_SMALL = ("norm", "alpha", "bias", "sinks")


class RandomSource:
    """A source of tensors for `magi2.checkpoint.load`, drawn on the device when asked for."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.needs = expected_tensors(config)
        self._config, self._device = config, device

    def __call__(self, name: str, own: Own) -> Tensor:
        """Return a rank's own part, in memory of its own."""
        whole = self._draw(name)
        mine = own(whole)
        return mine if mine.untyped_storage().nbytes() == mine.nbytes else mine.clone()

    def _draw(self, name: str) -> Tensor:
        need = self.needs[name]
        generator = torch.Generator(self._device).manual_seed(crc32(name.encode()))
        tensor = torch.empty(need.shape, dtype=need.dtype, device=self._device)
        if name.endswith("bands"):
            steps = torch.arange(len(tensor), device=self._device)
            return tensor.copy_(10_000.0 ** (-steps / len(tensor)))
        tensor.normal_(generator=generator)
        if "expert_bias" in name:
            return tensor.mul_(0.02)
        if "bias_res" in name:  # residual streams keep mostly to themselves
            return tensor.mul_(0.2).add_(2 * torch.eye(tensor.shape[0], device=self._device))
        if any(word in name for word in _SMALL):
            return tensor.mul_(0.2)
        if "phi" in name:
            return tensor
        gain = 1 / self._config.moe.route_scale if name.endswith("W_down") else 1.0
        return tensor.mul_(gain * tensor.shape[1] ** -0.5)


def reduced(config: ModelConfig) -> ModelConfig:
    """Return as few layers of the released sizes as have both kinds and fit one device: two of each."""
    if config.num_layers <= 5:
        return config
    layers = {"num_layers": 4, "mm_layers": (0, 3)}
    return _replaced(config, layers, (1, 2))


def _replaced(config: ModelConfig, layers: dict[str, object], moe_layers: tuple[int, ...]) -> ModelConfig:
    arch = config.to_arch_config()
    arch |= layers | {"moe_config": arch["moe_config"] | {"moe_layers": list(moe_layers)}}
    return ModelConfig.from_arch_config(arch)


def resident(config: ModelConfig, device: torch.device, groups: Groups) -> Magi2Transformer:
    """Return a rank's transformer with all weights on its device."""
    source = RandomSource(config, device)
    return fill_from(build_on_meta(config), source, list(source.needs), device=device, groups=groups)


@contextmanager
def streamed(
    config: ModelConfig, device: torch.device, groups: Groups, *, num_distinct: int, host_bytes: int | None
) -> Iterator[Magi2Transformer]:
    """Yield a rank's transformer with layers on the host.

    Args:
        config: Sizes.
        device: Of this rank.
        groups: Of a streamed layout.
        num_distinct: Masters of each kind of layer; as many as there are layers means no pool.
        host_bytes: Of the host, where it shows less than it has.
    """
    is_cpu = device.type == "cpu"
    model = stream_from(
        build_on_meta(config),
        RandomSource(config, device),
        Streaming(),
        runtime=HostRuntime() if is_cpu else LockedOnce(device),
        groups=groups,
        memory=Pool(config, config.num_layers if is_cpu else num_distinct),
        free_bytes=host_bytes,
    )
    try:
        yield model
    finally:
        if model.streamer is not None:
            model.streamer.close()


class Pool:
    """Host memory in which the layers of a kind take turns in a few masters."""

    def __init__(self, config: ModelConfig, num_distinct: int) -> None:
        self._memory = PrivateMemory()
        self._digests: dict[int, int] = {}
        self._like: dict[int, int] = {}
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for layer in range(config.num_layers):
            first = kinds.setdefault((layer in config.mm_layers, layer in config.moe.layers), [])
            first.append(layer)
            self._like[layer] = first[(len(first) - 1) % num_distinct]

    def block(self, block: int, nbytes: int) -> Tensor:
        """Return the memory of the layer whose master this one uses."""
        return self._memory.block(self._like[block], nbytes)

    def digest_of(self, block: int) -> int | None:
        """Return None for a layer that is written; others count as written from the begin."""
        first = self._like[block]
        return self._digests.get(first, None if first == block else 0)

    def fill_done(self, block: int, digest: int) -> None:
        """Remember a written layer's digest."""
        self._digests.setdefault(self._like[block], digest)

    def close(self) -> None:
        """Unmap."""
        self._memory.close()


class LockedOnce(CudaRuntime):
    """CUDA's streams for masters that several layers share: each is page-locked once."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._locks: Counter[int] = Counter()

    def register(self, memory: Tensor) -> bool:
        """Page-lock memory unless it is."""
        address = memory.data_ptr()
        if not self._locks[address] and not super().register(memory):
            return False
        self._locks[address] += 1
        return True

    def unregister(self, memory: Tensor) -> None:
        """Unlock memory with its last user."""
        address = memory.data_ptr()
        self._locks[address] -= 1
        if not self._locks[address]:
            super().unregister(memory)
