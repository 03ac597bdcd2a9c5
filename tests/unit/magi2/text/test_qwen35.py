"""The text tower: the right hidden state, a strict load of any published key layout, and the pooled token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from magi2.errors import CheckpointError, InvalidInput
from magi2.offload.lazy import HostRuntime
from magi2.text.negative import NEGATIVE_PROMPT
from magi2.text.qwen35 import NUM_RECENT, TextEncoder, TextFeatures, loading_problems

TEXT = "A tea seller pours one cup. <Figure 1> end"
INDEX = "model.safetensors.index.json"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: t for shard in sorted(folder.glob("*.safetensors")) for name, t in load_file(shard).items()}


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Replace the shards of a folder by one file with these tensors."""
    for shard in folder.glob("model*.safetensors*"):
        shard.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def load(folder: Path) -> TextEncoder:
    return TextEncoder.load(folder, torch.float32, "cpu")


def test_features_are_the_third_hidden_state_from_the_end_of_the_whole_model(
    text_folder: Path, tower: TextEncoder
) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

    whole = Qwen3_5TextModel.from_pretrained(text_folder, dtype=torch.float32, local_files_only=True).eval()
    encoded = tower.encode(TEXT)
    with torch.no_grad():
        hidden = whole(input_ids=torch.tensor([encoded.token_ids]), output_hidden_states=True).hidden_states
    assert torch.equal(encoded.features, hidden[-3])


def test_tower_holds_no_layer_that_it_does_not_run(tower: TextEncoder) -> None:
    names = {name.split(".")[1] for name, _ in tower.module.named_parameters() if name.startswith("layers.")}
    assert names == {str(k) for k in range(6)}
    assert not any(p.requires_grad for p in tower.module.parameters())
    assert not any(name.startswith("norm") for name, _ in tower.module.named_parameters())


def test_features_have_one_row_a_token_in_the_dtype_of_the_tower(text_folder: Path) -> None:
    encoded = TextEncoder.load(text_folder, torch.bfloat16, "cpu").encode(TEXT)
    assert encoded.features.shape == (1, len(encoded.token_ids), 64)
    assert encoded.features.dtype == torch.bfloat16
    assert len(encoded.offsets) == len(encoded.token_ids)


def test_tokens_are_counted_without_encoding(tower: TextEncoder) -> None:
    assert tower.count_tokens(TEXT) == len(tower.encode(TEXT).token_ids)
    assert tower.count_tokens("1" * 9000) == 9000


def test_text_of_too_many_tokens_is_never_cut(tower: TextEncoder) -> None:
    with pytest.raises(InvalidInput, match="prompt is 7001 tokens; at most 7000 are supported"):
        tower.encode("1" * 7001)


def test_encoding_twice_gives_the_same_bits(tower: TextEncoder) -> None:
    assert torch.equal(tower.encode(TEXT).features, tower.encode(TEXT).features)


@pytest.mark.parametrize("layout", ["causal", "bare"])
def test_other_published_key_layouts_load_alike(own_folder: Path, tower: TextEncoder, layout: str) -> None:
    prefix = "model." if layout == "causal" else ""
    tensors = {
        name.replace("model.language_model.", prefix): tensor
        for name, tensor in tensors_of(own_folder).items()
        if not name.startswith("model.visual.") and (layout == "causal" or name != "lm_head.weight")
    }
    rewrite(own_folder, tensors)
    config = json.loads((own_folder / "config.json").read_text())
    (own_folder / "config.json").write_text(json.dumps(config["text_config"]))
    assert torch.equal(load(own_folder).encode(TEXT).features, tower.encode(TEXT).features)


def test_all_missing_unexpected_and_misshapen_tensors_are_named_at_once(own_folder: Path) -> None:
    tensors = tensors_of(own_folder)
    base = "model.language_model."
    del tensors[base + "layers.0.mlp.up_proj.weight"], tensors[base + "layers.3.self_attn.q_norm.weight"]
    tensors[base + "layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    tensors[base + "layers.2.extra"] = torch.zeros(1)
    tensors["stranger.weight"] = torch.zeros(1)
    rewrite(own_folder, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(own_folder)
    found = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 5
    for part in (
        "missing tensor layers.0.mlp.up_proj",
        "layers.3.self_attn.q_norm",
        "unexpected tensor stranger",
    ):
        assert part in found.replace("missing tensor model.", "missing tensor ")
    assert "layers.2.extra" in found
    assert "misshapen" in found


def test_missing_shard_is_named(own_folder: Path) -> None:
    shard = sorted(set(json.loads((own_folder / INDEX).read_text())["weight_map"].values()))[0]
    (own_folder / shard).unlink()
    with pytest.raises(CheckpointError, match=r"no readable Qwen3\.5 text model"):
        load(own_folder)


def test_truncated_shard_is_named(own_folder: Path) -> None:
    shard = sorted(own_folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"no readable Qwen3\.5 text model"):
        load(own_folder)


def test_missing_configuration_is_named(own_folder: Path) -> None:
    (own_folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="own holds no readable"):
        load(own_folder)


def report(**changes: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {
        "missing_keys": set(),
        "unexpected_keys": set(),
        "mismatched_keys": set(),
        "error_msgs": [],
    }
    return empty | changes


@pytest.mark.parametrize(
    "key",
    [
        *(
            "model.visual.blocks.0.norm1.bias",
            "visual.pos_embed.weight",
            "lm_head.weight",
            "mtp.layers.0.norm.weight",
        ),
        *("model.layers.62.mlp.up_proj.weight", "layers.63.input_layernorm.weight"),
        "model.language_model.layers.63.mlp.up_proj.weight",
    ],
)
def test_parts_that_the_tower_leaves_out_may_be_in_the_folder(key: str) -> None:
    assert loading_problems(report(unexpected_keys={key}), 62) == []


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.64.mlp.up_proj.weight",
        "model.layers.6.x",
        "model.layers.0.extra",
        "visuals.x",
        "adapter.weight",
    ],
)
def test_anything_else_in_the_folder_is_a_problem(key: str) -> None:
    assert loading_problems(report(unexpected_keys={key}), 62) == [f"unexpected tensor {key}"]


def test_every_kind_of_problem_is_named() -> None:
    found = loading_problems(
        report(missing_keys={"b", "a"}, mismatched_keys={("c", 1, 2)}, error_msgs=["e"]), 6
    )
    assert found == ["missing tensor a", "missing tensor b", "misshapen tensor ('c', 1, 2)", "e"]


def features(num_tokens: int) -> TextFeatures:
    rows = torch.arange(num_tokens * 4, dtype=torch.bfloat16).reshape(1, num_tokens, 4)
    offsets = tuple((5 * k, 5 * k + 5) for k in range(num_tokens))
    return TextFeatures(rows, tuple(range(num_tokens)), offsets)


def test_special_token_is_the_mean_of_the_figure_in_the_features_dtype() -> None:
    encoded = features(4)
    got = TextEncoder.special_token(encoded, "12345<Figure 1>rest")
    assert got.shape == (1, 1, 4)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, encoded.features[:, 1:3].mean(dim=1, keepdim=True))


def test_special_token_of_a_text_without_the_figure_is_zero() -> None:
    got = TextEncoder.special_token(features(2), "plain text")
    assert torch.equal(got, torch.zeros(1, 1, 4, dtype=torch.bfloat16))


def test_negative_prompt_is_encoded_once_a_process(text_folder: Path, tower: TextEncoder) -> None:
    first = tower.encode_negative()
    again = load(text_folder).encode_negative()
    assert again is first
    assert torch.equal(first.features, tower.encode(NEGATIVE_PROMPT).features)


def test_other_weights_at_the_same_place_get_features_of_their_own(own_folder: Path) -> None:
    first = load(own_folder).encode_negative()
    tensors = tensors_of(own_folder)
    rewrite(
        own_folder,
        {name: tensor * 2 if "embed_tokens" in name else tensor for name, tensor in tensors.items()},
    )
    assert not torch.equal(load(own_folder).encode_negative().features, first.features)


def test_each_dtype_gets_features_of_its_own(text_folder: Path, tower: TextEncoder) -> None:
    half = TextEncoder.load(text_folder, torch.bfloat16, "cpu").encode_negative()
    assert half.features.dtype == torch.bfloat16
    assert tower.encode_negative().features.dtype == torch.float32


def test_loading_writes_nothing_to_the_terminal(text_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(text_folder).encode(TEXT)
    assert capfd.readouterr() == ("", "")


def test_streamed_tower_gives_the_features_of_the_resident_one(text_folder: Path) -> None:
    want = aligned(load(text_folder)).encode(TEXT)
    for seed in range(3):
        tower = load(text_folder)
        tower.stream(HostRuntime(seed=seed))
        assert tower.is_streamed
        for text in ("another text first", TEXT):
            got = tower.encode(text)
        assert torch.equal(got.features, want.features)
        assert got.token_ids == want.token_ids
        tower.close()


def aligned(tower: TextEncoder) -> TextEncoder:
    """Copy the layers out of the mapped file: products on a CPU depend on the alignment."""
    for tensor in tower.module.layers.parameters():
        tensor.data = tensor.data.clone()
    return tower


def test_latest_texts_are_encoded_once(text_folder: Path) -> None:
    tower, calls = load(text_folder), []
    tower.module.register_forward_hook(lambda *_: calls.append(1))
    first = tower.encode(TEXT)
    assert tower.encode(TEXT) is first
    assert tower.encode(TEXT + " ") is not first
    assert len(calls) == 2
    for other in range(NUM_RECENT):
        tower.encode(f"text {other}")
    tower.encode(TEXT)
    assert len(calls) == 3 + NUM_RECENT
