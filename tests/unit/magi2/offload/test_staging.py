"""Staging on the CPU; the way to a GPU and back is proven in tests/gpu."""

import torch
from torch import nn

from magi2.offload.staging import Stage


def test_staging_on_the_cpu_moves_nothing() -> None:
    module, stage = nn.Linear(2, 2), Stage(torch.device("cpu"))
    before = module.weight.data_ptr()
    stage.pin(module)
    with stage.holding(module):
        assert module.weight.data_ptr() == before
    assert module.weight.data_ptr() == before
