"""What caching steps should do, written plainly: the front layer runs always, the others in full steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from magi2.config import CacheConfig
from magi2.model.tokens import Tokens
from magi2.model.transformer import Magi2Transformer


class Counts:
    """How often each layer of a model ran while the block runs."""

    def __init__(self, model: Magi2Transformer) -> None:
        self.of: list[int] = [0] * len(model.block.layers)
        self._hooks = [
            layer.register_forward_hook(lambda *_, index=index: self._count(index))
            for index, layer in enumerate(model.block.layers)
        ]

    def _count(self, index: int) -> None:
        self.of[index] += 1

    def __enter__(self) -> "Counts":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


@contextmanager
def always_caching(model: Magi2Transformer, config: CacheConfig) -> Iterator[list[int]]:
    """Cache every step that warm-up and cap allow, whatever it changes; yields those that were cached."""
    front, *others = model.block.layers
    rest = Tensor()
    step = in_a_row = 0
    cached: list[int] = []

    def forward(s_LSC: Tensor, tokens: Tokens) -> Tensor:
        nonlocal rest, step, in_a_row
        s_LSC = front(s_LSC, tokens)
        if step >= config.warmup_steps and in_a_row < config.max_consecutive:
            s_LSC = s_LSC + rest
            in_a_row += 1
            cached.append(step)
        else:
            kept = s_LSC.clone()
            for layer in others:
                s_LSC = layer(s_LSC, tokens)
            rest = s_LSC - kept
            in_a_row = 0
        step += 1
        return s_LSC

    with mock.patch.object(model.block, "forward", forward):
        yield cached
