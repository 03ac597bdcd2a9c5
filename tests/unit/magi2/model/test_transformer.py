"""The whole model at odd sizes: what it depends on, what it must not depend on, and how rows are cut."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import dispatch
from magi2 import packing
from magi2.model import tokens
from magi2.model.denoiser import TransformerDenoiser
from magi2.model.transformer import Magi2Transformer
from magi2.packing import CONDITIONAL, UNCONDITIONAL, Conditioning
from tests.unit.magi2.model.tiny import conditioning, latents, random_model, seeded, small_config

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def predict(
    model: Magi2Transformer, given: Conditioning, *, timestep: int = 500, branches: tuple[int, ...] = (0, 1)
) -> tuple[Tensor, Tensor]:
    return TransformerDenoiser(model, given, branches=branches).predict(*latents(), timestep)


VARIANTS = {
    "plain": {},
    "grouped-keys": {"num_query_groups": 1},
    "softcap": {"attn_softcap": 5.0},
    "three-sinks": {"sink_token_num": 3},
    "no-time": {"time_channel_dim": 0},
    "no-mixture": {"moe": replace(small_config().moe, layers=())},
    "only-mixture": {"moe": replace(small_config().moe, layers=(0, 1, 2, 3), routed_width=None)},
    "bf16": {"params_dtype": "bfloat16"},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_predictions_have_the_latents_shape(changes: dict[str, object]) -> None:
    video, audio = predict(random_model(small_config(**changes)), conditioning(num_images=1))
    assert (video.shape, audio.shape) == ((2, 6, 2, 3, 4), (2, 9, 8))
    assert video.dtype == audio.dtype == torch.float32
    assert bool(video.isfinite().all())
    assert bool(audio.isfinite().all())


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_branch_alone_predicts_what_it_does_beside_the_other(changes: dict[str, object]) -> None:
    model = random_model(small_config(**changes | {"params_dtype": "float32"}))
    both = predict(model, conditioning(num_images=1))
    for branch in (CONDITIONAL, UNCONDITIONAL):
        alone = predict(model, conditioning(num_images=1), branches=(branch,))
        for got, want in zip(alone, both, strict=True):
            torch.testing.assert_close(got[0], want[branch], **CLOSE)


@pytest.mark.parametrize("num_images", [0, 2])
def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch, num_images: int) -> None:
    model = random_model(small_config())
    want = predict(model, conditioning(num_images=num_images))
    monkeypatch.setattr(tokens, "_MIN_ROWS", 5)
    monkeypatch.setitem(tokens._BLOCK_VALUES, "cpu", 1)
    got = predict(model, conditioning(num_images=num_images))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_padding_reaches_no_real_row() -> None:
    model = random_model(small_config())
    want = predict(model, conditioning())
    video, audio = latents()
    batch = packing.pack(video, audio, conditioning(), align=48)
    time_row = packing.time_row(500, model.config.time_channel_dim)
    out = model(model.prepare(batch), *packing.latent_rows(video, audio), time_row)
    assert batch.num_tokens % 48 == 0
    for got, expected in zip(packing.unpack(out, batch), want, strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_text_and_image_and_timestep_matter() -> None:
    model = random_model(small_config())
    base = predict(model, conditioning(num_images=1))[0]
    other_text = replace(conditioning(num_images=1), text=(seeded(1, 5, 10, seed=9), conditioning().text[1]))
    changed = predict(model, other_text)[0]
    assert not torch.allclose(changed[0], base[0], atol=1e-4)
    torch.testing.assert_close(changed[1], base[1], **CLOSE)
    blank = replace(conditioning(num_images=1), use_reference_for_uncond=False)
    without_image = predict(model, blank)[0]
    torch.testing.assert_close(without_image[0], base[0], **CLOSE)
    assert not torch.allclose(without_image[1], base[1], atol=1e-4)
    assert not torch.allclose(predict(model, conditioning(num_images=1), timestep=501)[0], base, atol=1e-5)


def test_equal_steps_give_equal_bits() -> None:
    denoiser = TransformerDenoiser(random_model(small_config()), conditioning())
    first, second = (denoiser.predict(*latents(), 321) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_later_steps_use_their_own_latents() -> None:
    model = random_model(small_config())
    denoiser = TransformerDenoiser(model, conditioning())
    denoiser.predict(*latents(), 900)
    moved = tuple(x + 1 for x in latents())
    got = denoiser.predict(*moved, 100)
    want = TransformerDenoiser(model, conditioning()).predict(*moved, 100)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_prediction_leaves_the_latents_alone() -> None:
    video, audio = latents()
    TransformerDenoiser(random_model(small_config()), conditioning()).predict(video, audio, 5)
    assert torch.equal(video, latents()[0])
    assert torch.equal(audio, latents()[1])


def test_token_counts_tell_the_kinds_of_each_branch() -> None:
    denoiser = TransformerDenoiser(random_model(small_config()), conditioning(num_images=1))
    common = {"video": 24, "audio": 9, "special": 1, "reference": 6}
    assert denoiser.token_counts(*latents()) == [common | {"text": 5}, common | {"text": 2}]


def test_every_operation_of_the_model_goes_through_the_dispatcher() -> None:
    dispatch.clear_report()
    predict(random_model(small_config()), conditioning())
    assert dispatch.report() == {
        "attention": ("sdpa_cpu",),
        "mhc": ("torch",),
        "mhc_gates": ("torch",),
        "qk_norm_rope": ("torch",),
        "rms_norm": ("torch",),
        "route": ("torch",),
        "routed_experts": ("torch",),
        "swiglu7": ("torch",),
    }


def test_flash_version_that_cannot_run_is_refused_not_replaced() -> None:
    model = Magi2Transformer(small_config(), flash_attn_version=3)
    model.load_state_dict(random_model(small_config()).state_dict())
    with pytest.raises(ValueError, match="flash attention version 3 cannot run"):
        predict(model, conditioning())


def test_no_weight_is_trained() -> None:
    assert not any(p.requires_grad for p in random_model(small_config()).parameters())
