"""A plain stack of layers, streamed."""

import pytest
import torch
from torch import Tensor, nn

from magi2.errors import EngineError
from magi2.offload.layers import stream_layers
from magi2.offload.lazy import HostRuntime


class Layer(nn.Module):
    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(16, width, generator=torch.Generator().manual_seed(seed)), requires_grad=False
        )
        self.register_buffer("shift", torch.full((16,), float(seed)), persistent=False)

    def forward(self, x: Tensor, *, factor: float) -> tuple[Tensor, float]:
        return torch.relu(x @ self.weight @ self.weight.T) * factor + self.shift, factor


def stack() -> nn.ModuleList:
    return nn.ModuleList(Layer(8 + 8 * place, place) for place in range(5))


def run(layers: nn.ModuleList) -> Tensor:
    x = torch.ones(3, 16)
    for layer in layers:
        x, _ = layer(x / 16, factor=0.5)
    return x


@pytest.mark.parametrize("seed", range(6))
def test_streamed_stack_equals_the_resident_one(seed: int) -> None:
    want, layers = run(stack()), stack()
    ring = stream_layers(layers, HostRuntime(seed=seed))
    for _ in range(2):
        assert torch.equal(run(layers), want)
    assert all(t.numel() == 0 for t in [*layers.parameters(), *layers.buffers()])
    ring.close()


def test_layers_that_share_weights_are_refused() -> None:
    layers = stack()
    layers[1].weight = layers[0].weight
    with pytest.raises(EngineError, match="layers that share tensors"):
        stream_layers(layers, HostRuntime())
