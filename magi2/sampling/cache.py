"""Cache-DiT on the repeated layers for one request: the only module that knows the package `cache-dit`.

Promises: embedding, packing, sinks and the output adapters run in every step; a step may take all layers but
the first from the one before, by the package's own rule. Every request starts without memory of another,
and after it, however it ended, the model is the plain one. All ranks of the world decide alike, since the
package averages over its default group; that they did is checked. It is approximate and off by default.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from magi2.config import CacheConfig
from magi2.errors import EngineError
from magi2.model.tokens import Tokens
from magi2.model.transformer import Block
from magi2.parallel.groups import Group

PACKAGE = "cache_dit"
_LAYERS = "layers"
_MARK = "_is_cached"
# Layers at the front that run in every step; their change decides about the others.
_FRONT = 1


@dataclass(frozen=True)
class CacheReport:
    """Which steps of a run came from the cache, counted from 0, and by which numbers."""

    num_steps: int
    cached_steps: tuple[int, ...]
    config: CacheConfig

    def to_json(self) -> dict[str, Any]:
        """Return what a job records."""
        return {
            "kind": PACKAGE,
            "num_steps": self.num_steps,
            "cached_steps": list(self.cached_steps),
            **asdict(self.config),
        }


class StepCache:
    """The cache of one run; `report` answers after the last step."""

    def __init__(self, adapter: Any, config: CacheConfig, num_steps: int) -> None:
        self._adapter = adapter
        self._config = config
        self._num_steps = num_steps

    def report(self, replica: Group) -> CacheReport:
        """Return which steps were cached; all ranks of the replica must ask.

        Raises:
            EngineError: The ranks did not take the same steps from the cache.
        """
        # Imported here: an optional package that takes seconds to import.
        import cache_dit

        cached = cache_dit.summary(self._adapter, logging=False)[-1].cached_steps
        own = torch.zeros(self._num_steps, dtype=torch.uint8)
        own[list(cached)] = 1
        if any(not torch.equal(other, own) for other in replica.stack(own)):
            raise EngineError("the ranks took different steps from the cache; the clip was not made")
        return CacheReport(self._num_steps, tuple(cached), self._config)


def missing_package() -> str | None:
    """Return why nothing can be cached here, without importing the package; None if it can."""
    if find_spec(PACKAGE) is not None:
        return None
    return "the package cache-dit is not installed: pip install 'magi2-farm[cache]', or leave the cache off"


@contextmanager
def cached(block: Block, config: CacheConfig, num_steps: int) -> Iterator[StepCache]:
    """Cache the steps of one run while the block runs.

    Args:
        block: The owner of the list of layers.
        config: When a step may be cached.
        num_steps: Of the run.
    """
    # Imported here: an optional package that takes seconds to import, asked for by few runs.
    import cache_dit

    _quieten()
    _forget_marks(cache_dit)
    adapter = cache_dit.BlockAdapter(
        transformer=block,
        blocks=_separate(block.layers),
        blocks_name=_LAYERS,
        forward_pattern=cache_dit.ForwardPattern.Pattern_3,
        check_forward_pattern=False,
        # Both branches are in one call, or under branch parallelism one is in each rank's only call.
        has_separate_cfg=False,
    )
    rule = cache_dit.DBCacheConfig(
        Fn_compute_blocks=_FRONT,
        Bn_compute_blocks=0,
        max_warmup_steps=config.warmup_steps,
        residual_diff_threshold=config.threshold,
        max_continuous_cached_steps=config.max_consecutive,
        enable_separate_cfg=False,
        num_inference_steps=num_steps,
    )
    # The package hands back another object than it got; only that one can be asked and disabled.
    adapter = cache_dit.enable_cache(adapter, cache_config=rule)
    try:
        yield StepCache(adapter, config, num_steps)
    finally:
        cache_dit.disable_cache(adapter)
        # It leaves its forward behind, as an attribute that hides the class's own.
        vars(block).pop("forward", None)
        _forget_marks(cache_dit)


class _Apart(nn.Module):
    """A layer that leaves its input as it is: the package compares it with the output, or subtracts it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, s_LSC: Tensor, tokens: Tokens) -> Tensor:
        """Run the layer on a copy of the streams."""
        out: Tensor = self.layer(s_LSC.clone(), tokens)
        return out


def _separate(layers: nn.ModuleList) -> nn.ModuleList:
    """Return the layers; the first of those in front and of the others write no longer in place."""
    return nn.ModuleList(
        _Apart(layer) if index in {0, _FRONT} else layer for index, layer in enumerate(layers)
    )


def _forget_marks(package: Any) -> None:
    """Remove the mark that an engine leaves on a class of the package: it would hide the next one's cache."""
    holder = package.caching.FakeDiffusionPipeline
    if _MARK in vars(holder):
        delattr(holder, _MARK)


def _quieten() -> None:
    """Keep the package's remarks off stdout, which belongs to results."""
    for handler in logging.getLogger(PACKAGE.upper()).handlers:
        if type(handler.formatter).__module__.startswith(PACKAGE):  # its own, not one that listens in
            handler.setLevel(logging.ERROR)
