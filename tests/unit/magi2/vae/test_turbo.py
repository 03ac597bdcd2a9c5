"""The video decoder: loading, windows, precision. What it computes is held against the golden files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from magi2.errors import CheckpointError
from magi2.vae import turbo, turbo_network
from magi2.vae.pixels import to_uint8
from magi2.vae.turbo import TurboDecoder
from magi2.vae.turbo_network import TurboConfig, rms_norm


def write(folder: Path, state: object) -> None:
    torch.save(state, folder / turbo.CHECKPOINT_NAME)


def configure(folder: Path, **changes: Any) -> None:
    path = folder / turbo.CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), encoding="utf-8")


def loaded(folder: Path) -> dict[str, Tensor]:
    return {
        f"decoder.{n}": v for n, v in TurboDecoder.load(folder, torch.float32).module.state_dict().items()
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def latent() -> Tensor:
    return torch.randn(1, 48, 6, 2, 3, generator=torch.Generator().manual_seed(4))


def test_plain_dictionary_is_loaded(turbo_folder: Path, turbo_weights: dict[str, Tensor]) -> None:
    assert same(loaded(turbo_folder), turbo_weights)


def test_averaged_weights_are_chosen_and_training_heads_left_out(
    turbo_folder: Path, turbo_weights: dict[str, Tensor]
) -> None:
    ema = {f"module.{name}": value for name, value in turbo_weights.items()}
    ema["module.aligned_feature_projection_heads.0.weight"] = torch.ones(3)
    other = {name: value + 1 for name, value in ema.items()}
    write(turbo_folder, {"epoch": 1, "ema_state_dict": ema, "state_dict": other})
    assert same(loaded(turbo_folder), turbo_weights)


def test_trained_weights_are_taken_where_there_are_no_averaged_ones(
    turbo_folder: Path, turbo_weights: dict[str, Tensor]
) -> None:
    write(turbo_folder, {"epoch": 1, "state_dict": turbo_weights})
    assert same(loaded(turbo_folder), turbo_weights)


def test_missing_extra_and_misshapen_tensors_are_all_named(
    turbo_folder: Path, turbo_weights: dict[str, Tensor]
) -> None:
    changed = dict(turbo_weights)
    del changed["decoder.conv_in.conv.bias"]
    changed["decoder.conv_out.conv.bias"] = torch.zeros(3)
    changed["decoder.norm_out.weight"] = torch.zeros(3)
    changed["encoder.conv_in.weight"] = torch.zeros(3)
    write(turbo_folder, {"ema_state_dict": changed})
    with pytest.raises(CheckpointError) as caught:
        TurboDecoder.load(turbo_folder)
    assert sorted(caught.value.problems) == [
        "checkpoint.ckpt: tensor decoder.conv_in.conv.bias is missing",
        "checkpoint.ckpt: tensor decoder.conv_out.conv.bias has the shape [3], expected [12]",
        "checkpoint.ckpt: tensor decoder.norm_out.weight is not part of this network",
        "checkpoint.ckpt: tensor encoder.conv_in.weight is not part of this network",
    ]


def test_weights_that_are_not_finite_are_refused(
    turbo_folder: Path, turbo_weights: dict[str, Tensor]
) -> None:
    changed = turbo_weights | {"decoder.conv_in.conv.bias": torch.full((8,), float("nan"))}
    write(turbo_folder, changed)
    with pytest.raises(
        CheckpointError, match=r"decoder\.conv_in\.conv\.bias holds values that are not finite"
    ):
        TurboDecoder.load(turbo_folder)


def test_training_state_without_weights_is_refused(turbo_folder: Path) -> None:
    write(turbo_folder, {"ema_state_dict": None})
    with pytest.raises(CheckpointError, match="ema_state_dict is a NoneType, not a dictionary"):
        TurboDecoder.load(turbo_folder)


@pytest.mark.parametrize("name", [turbo.CHECKPOINT_NAME, turbo.CONFIG_NAME])
def test_missing_file_is_named(turbo_folder: Path, name: str) -> None:
    (turbo_folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: the file is missing"):
        TurboDecoder.load(turbo_folder)


def test_unknown_config_fields_are_ignored(turbo_folder: Path) -> None:
    configure(turbo_folder, aligned_feature_projection_mode="conv-2layer", anything={"a": 1})
    assert TurboDecoder.load(turbo_folder).config.first_chunk_size == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_causal": True}, "decoder_causal is True; only False is supported"),
        ({"decoder_is_dw_conv": [False, False, True, False, False]}, "depthwise convolutions; only false"),
        ({"use_unpatchify": False}, "use_unpatchify is False; only True"),
        ({"patch_size": 4}, "patch_size is 4; only 2"),
        ({"patch_size_t": 2}, "patch_size_t is 2; only 1"),
        ({"latent_channels": 16}, "latent_channels is 16; only 48"),
        ({"temporal_compression_ratio": 8}, "temporal_compression_ratio is 8; only 4"),
        ({"decoder_spatio_temporal_scaling": [False, False, True, True]}, "scaling is false"),
        ({"decoder_spatio_only": [False, True, True, False]}, "enlarge by 16 in space and 2 in time"),
        ({"decoder_layers_per_block": [1, 1, 1, 1]}, "must be equally long"),
        ({"decoder_block_out_channels": 4}, "wrong form"),
        ({"step_size": 0}, "the window 3/0 must be positive"),
    ],
)
def test_config_of_another_network_is_refused(
    turbo_folder: Path, changes: dict[str, Any], message: str
) -> None:
    configure(turbo_folder, **changes)
    with pytest.raises(CheckpointError, match=f"{turbo.CONFIG_NAME}: .*{message}"):
        TurboDecoder.load(turbo_folder)


def test_missing_config_field_is_named(turbo_folder: Path) -> None:
    path = turbo_folder / turbo.CONFIG_NAME
    values = json.loads(path.read_text("utf-8"))
    del values["step_size"]
    with pytest.raises(CheckpointError, match="the field step_size is missing"):
        TurboConfig.from_json(values, source=turbo.CONFIG_NAME)


def test_forbidden_values_are_reported_together(turbo_folder: Path) -> None:
    configure(turbo_folder, decoder_causal=True, patch_size=1)
    with pytest.raises(CheckpointError) as caught:
        TurboDecoder.load(turbo_folder)
    assert len(caught.value.problems) == 2


def test_default_precision_is_bf16(turbo_folder: Path, latent: Tensor) -> None:
    decoder = TurboDecoder.load(turbo_folder)
    assert {value.dtype for value in decoder.module.state_dict().values()} == {torch.bfloat16}
    assert decoder.decode_float(latent).dtype == torch.bfloat16


def test_decode_yields_one_chunk_of_bytes_a_window(turbo_folder: Path, latent: Tensor) -> None:
    decoder = TurboDecoder.load(turbo_folder, torch.float32)
    chunks = list(decoder.decode(latent))
    assert [chunk.shape for chunk in chunks] == [(9, 32, 48, 3), (8, 32, 48, 3), (4, 32, 48, 3)]
    assert {chunk.dtype for chunk in chunks} == {torch.uint8}
    assert torch.equal(torch.cat(chunks), to_uint8(decoder.decode_float(latent)))


def test_windows_do_not_depend_on_each_other(turbo_folder: Path, latent: Tensor) -> None:
    decoder = TurboDecoder.load(turbo_folder, torch.float32)
    prepared, windows = decoder.prepare(latent), decoder.windows(latent)
    forward = [decoder.decode_window(prepared, window) for window in windows]
    backward = [decoder.decode_window(prepared, window) for window in reversed(windows)]
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))


def test_padding_repeats_the_last_latent_frame(turbo_folder: Path, latent: Tensor) -> None:
    prepared = TurboDecoder.load(turbo_folder, torch.float32).prepare(latent)
    assert prepared.shape[2] == 7
    assert torch.equal(prepared[:, :, 6], prepared[:, :, 5])


@pytest.mark.parametrize("shape", [(2, 48, 1, 1, 1), (1, 16, 1, 1, 1), (48, 1, 1, 1), (1, 48, 0, 1, 1)])
def test_latent_of_another_shape_is_refused(turbo_folder: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape \[1, 48, T, Y, X\] is needed"):
        TurboDecoder.load(turbo_folder).prepare(torch.zeros(shape))


def test_decode_leaves_no_graph_behind(turbo_folder: Path, latent: Tensor) -> None:
    decoder = TurboDecoder.load(turbo_folder, torch.float32)
    assert not decoder.decode_float(latent.requires_grad_(requires_grad=True)).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_in_slices_is_the_norm_of_the_whole(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    x = torch.randn(1, 5, 7, 3, 4, generator=torch.Generator().manual_seed(5)).to(dtype)
    whole = rms_norm(x, 1e-6)
    wide = x.float()
    assert torch.equal(whole, (wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6)).to(dtype))
    monkeypatch.setattr(turbo_network, "_NORM_SLICE_VALUES_CPU", 2 * 5 * 3 * 4)
    torch.testing.assert_close(rms_norm(x, 1e-6), whole)


def test_processor_without_bf16_convolutions_gives_nearly_the_same_video(
    turbo_folder: Path, latent: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = TurboDecoder.load(turbo_folder)
    usual = decoder.decode_float(latent)
    monkeypatch.setattr(turbo_network, "_has_bf16_convolutions", lambda: False)
    widened = decoder.decode_float(latent)
    assert widened.dtype == torch.bfloat16
    assert (usual.float() - widened.float()).abs().mean() < 1e-2
