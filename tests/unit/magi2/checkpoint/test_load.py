"""Strict loading: what is refused, what the router gets, what it costs in memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from magi2.checkpoint.index import INDEX_NAME, SINGLE_NAME, write_model_config
from magi2.checkpoint.keys import expected_tensors
from magi2.checkpoint.load import load_transformer
from magi2.config import ModelConfig
from magi2.errors import CheckpointError
from tests.unit.magi2.model.tiny import random_model, small_config


def stored() -> dict[str, Tensor]:
    return {k: v.clone() for k, v in random_model(small_config(params_dtype="bfloat16")).state_dict().items()}


def test_weights_arrive_as_stored(tmp_path: Path) -> None:
    state = stored()
    save_file(state, tmp_path / SINGLE_NAME)
    model = load_transformer(tmp_path, small_config(params_dtype="bfloat16"))
    for name, tensor in model.state_dict().items():
        source = (
            name.replace("router.expert_bias", "router.expert_bias_ema") if name.endswith("_bias") else name
        )
        assert torch.equal(tensor, state[source]), name
    assert not model.training


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    state = stored()
    names = sorted(state)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file({name: state[name] for name in own}, tmp_path / shard)
    weight_map = {name: shard for shard, own in shards.items() for name in own}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    model = load_transformer(tmp_path, small_config(params_dtype="bfloat16"))
    assert torch.equal(model.state_dict()[names[1]], state[names[1]])


def test_router_gets_the_averaged_bias_and_never_the_raw_one(tmp_path: Path) -> None:
    state = stored()
    save_file(state, tmp_path / SINGLE_NAME)
    model = load_transformer(tmp_path, small_config(params_dtype="bfloat16"))
    name = "block.layers.1.mlp.moe_mlp.router.expert_bias"
    assert not torch.equal(state[name], state[f"{name}_ema"])
    assert torch.equal(model.state_dict()[name], state[f"{name}_ema"])


def test_bands_come_from_the_file(tmp_path: Path) -> None:
    state = stored()
    state["pre_adapter.rope.bands"] += 0.5
    save_file(state, tmp_path / SINGLE_NAME)
    model = load_transformer(tmp_path, small_config(params_dtype="bfloat16"))
    assert torch.equal(model.pre_adapter.rope.bands, state["pre_adapter.rope.bands"])


def test_floats_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    state = stored()
    name = "block.layers.0.attention.linear_qkv.weight"
    save_file(
        {k: v.double() if k == "pre_adapter.rope.bands" else v for k, v in state.items()},
        tmp_path / SINGLE_NAME,
    )
    model = load_transformer(tmp_path, small_config())
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}
    assert torch.equal(model.state_dict()[name], state[name].float())


def test_all_differences_come_in_one_error(tmp_path: Path) -> None:
    state = stored()
    lost = "block.layers.3.mlp.moe_mlp.router.expert_bias_ema"
    del state[lost]
    state["stranger"] = torch.zeros(1)
    state["block.layers.0.attention.sinks"] = torch.zeros(2, 3)
    state["pre_adapter.rope.bands"] = torch.zeros(2, dtype=torch.int64)
    save_file(state, tmp_path / SINGLE_NAME)
    with pytest.raises(CheckpointError) as caught:
        load_transformer(tmp_path, small_config())
    assert len(caught.value.problems) == 4
    for words in (lost, "stranger is not expected", "sinks has shape [2, 3]", "bands has dtype I64"):
        assert words in str(caught.value)


def test_broken_files_are_reported_beside_missing_tensors(tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).write_bytes(b"no tensors here")
    with pytest.raises(CheckpointError) as caught:
        load_transformer(tmp_path, small_config())
    assert "is cut short or not a safetensors file" in caught.value.problems[0]
    assert "pre_adapter.rope.bands is missing" in caught.value.problems


# A model of about 100 MB, so that the interpreter's own noise does not count.
MEASURED = small_config(
    hidden_size=768,
    head_dim=64,
    num_query_groups=12,
    text_in_channels=512,
    params_dtype="bfloat16",
    num_layers=6,
)
MEASURE = """
import sys
from pathlib import Path
import torch
from magi2.checkpoint.index import read_model_config
from magi2.checkpoint.load import load_transformer

def mapped():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {k: int(v.split()[0]) * 1024 for k, v in (line.split(":") for line in lines)}

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

root = Path(sys.argv[1])
config = read_model_config(root)
before, top = mapped(), peak()
model = load_transformer(root / "preview", config)
total = sum(float(t.sum()) for t in model.state_dict().values())
print(mapped()["Pss"] - before["Pss"], mapped()["Anonymous"] - before["Anonymous"], peak() - top)
"""


def test_mapped_checkpoint_adds_little_more_than_its_bytes(tmp_path: Path) -> None:
    write_model_config(tmp_path, MEASURED)
    path = tmp_path / "preview" / SINGLE_NAME
    save_file(zeros(MEASURED), path)
    size = path.stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    resident, private, at_peak = (int(word) for word in done.stdout.split())
    assert size > 80e6
    assert resident <= 1.3 * size
    assert at_peak <= 1.3 * size
    assert private <= 0.3 * size


def zeros(config: ModelConfig) -> dict[str, Tensor]:
    return {
        name: torch.zeros(need.shape, dtype=need.dtype) for name, need in expected_tensors(config).items()
    }
