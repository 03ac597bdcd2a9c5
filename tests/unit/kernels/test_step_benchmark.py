"""The benchmark of a whole step: it runs at tiny sizes, and its floors are those of the cost model."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import step
from benchmarks.kernels.measure import Ceilings
from kernels import dispatch
from magi2.config import ModelConfig
from magi2.model.linear import ModalityLinear
from magi2.model.tokens import Tokens


def test_tiny_run_records_every_operation_and_a_labelled_projection(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    functions = [getattr(dispatch, name) for name in step.OPERATIONS], ModalityLinear.forward
    words = ["--tiny", "--device", "cpu", "--tier", "272p", "--repeats", "1", "--out", str(out)]
    assert step.main([*words, "--link-gb-per-s", "300"]) == 0
    assert ([getattr(dispatch, name) for name in step.OPERATIONS], ModalityLinear.forward) == functions
    [tier] = json.loads(out.read_text("utf-8"))["tiers"]
    found = {row["operation"] for row in tier["operations"]}
    # On a CPU the attention kernel corrects sinks itself.
    assert found >= set(step.OPERATIONS.values()) - {"sink correction"}
    assert found >= {
        step.ATTENTION_PRODUCTS,
        step.DENSE_PRODUCTS,
        step.MOE_PRODUCTS,
        step.ADAPTERS,
        step.REST,
    }
    total = sum(row["ms"] for row in tier["operations"]) / 1e3
    assert total == pytest.approx(tier["metered_step_s"], rel=0.02)
    projection = tier["projection"]
    assert "not a measurement" in projection["label"]
    assert projection["exchanges"] == "in full at 300.0 GB/s"


def test_a_pool_stands_for_all_layers() -> None:
    model = step.build(step.Setting(torch.device("cpu"), is_tiny=True, pool=1, repeats=1))
    config = ModelConfig.tiny()
    assert len(model.block.layers) == config.num_layers
    kinds = {(i in config.mm_layers, i in config.moe.layers) for i in range(config.num_layers)}
    assert len({id(layer) for layer in model.block.layers}) == len(kinds)
    for index, layer in enumerate(model.block.layers):
        assert hasattr(layer.mlp, "moe_mlp") == (index in config.moe.layers)


@pytest.mark.parametrize(("video", "tera_flop"), [(57_344, 4787.8), (14_336, 619.0)], ids=["540p", "272p"])
def test_floors_are_those_of_the_cost_model(video: int, tera_flop: float) -> None:
    branches = [video + 250 + text for text in step.TEXT_LENGTHS]
    tokens = Tokens((), (0, branches[0], sum(branches)), torch.empty(sum(branches), 96))
    # A product at 1 PFLOP/s takes as many milliseconds as it has TFLOP.
    least = step.floors(ModelConfig.released(), tokens, Ceilings(1e15, 1e30, 0, 0))
    assert sum(least.values()) == pytest.approx(tera_flop, rel=1e-3)


def test_released_sizes_need_a_device() -> None:
    with pytest.raises(SystemExit):
        step.main(["--device", "cpu"])
