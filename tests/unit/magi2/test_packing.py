"""Packing rules that the stored batches do not show: one branch alone, sharing of rows, runs, devices."""

import pytest
import torch
from torch import Tensor

from magi2 import packing
from magi2.packing import AUDIO, CONDITIONAL, TEXT, UNCONDITIONAL, VIDEO, Conditioning, Kind, Reference, Run


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def latents() -> tuple[Tensor, Tensor]:
    return seeded(1, 4, 2, 3, 2), seeded(1, 5, 6)


def conditioning(*, with_image: bool = False) -> Conditioning:
    image = (Reference(seeded(1, 4, 1, 2, 3), seeded(1, 1, 7)),) if with_image else ()
    return Conditioning((seeded(1, 3, 7), seeded(1, 2, 7, seed=1)), image)


def test_both_branches_show_the_same_latent_rows() -> None:
    batch = packing.pack(*latents(), conditioning())
    assert batch.video.shape == (12, 4)
    assert batch.audio.shape == (5, 6)
    sources = {(p.kind, p.source) for p in batch.parts if p.kind.is_generated}
    assert sources == {(Kind.VIDEO, 0), (Kind.AUDIO, 0)}


def test_image_rows_are_stored_once_for_both_branches() -> None:
    batch = packing.pack(*latents(), conditioning(with_image=True))
    assert batch.video.shape[0] == 12 + 6
    assert batch.text.shape[0] == 3 + 2 + 1


def test_features_are_stored_at_their_own_width() -> None:
    batch = packing.pack(*latents(), conditioning(with_image=True))
    assert [batch.rows(m).shape[1] for m in (VIDEO, AUDIO, TEXT)] == [4, 6, 7]
    assert all(batch.rows(m).dtype == torch.float32 for m in (VIDEO, AUDIO, TEXT))


@pytest.mark.parametrize("branch", [CONDITIONAL, UNCONDITIONAL])
def test_one_branch_alone_equals_its_half_of_both(branch: int) -> None:
    both = packing.pack(*latents(), conditioning(with_image=True))
    alone = packing.pack(*latents(), conditioning(with_image=True), branches=(branch,))
    start, stop = both.segment_bounds[branch : branch + 2]
    assert torch.equal(alone.coords, both.coords[start:stop])
    assert torch.equal(alone.modality, both.modality[start:stop])
    assert alone.segment_lengths == (stop - start,)
    text = next(p for p in alone.parts if p.kind is Kind.TEXT)
    assert torch.equal(alone.text[text.source : text.source + text.length], conditioning().text[branch][0])


@pytest.mark.parametrize(("with_image", "num_runs"), [(False, 6), (True, 7)])
def test_runs_of_one_modality_are_as_long_as_they_can_be(*, with_image: bool, num_runs: int) -> None:
    batch = packing.pack(*latents(), conditioning(with_image=with_image))
    assert len(batch.runs) == num_runs
    ids = torch.cat([torch.full((r.stop - r.start,), r.modality) for r in batch.runs])
    assert torch.equal(ids.int(), batch.modality)


def test_empty_runs_vanish_and_neighbours_join() -> None:
    runs = [Run(0, 2, TEXT), Run(2, 2, VIDEO), Run(2, 5, TEXT), Run(5, 6, AUDIO)]
    assert packing.merge_runs(runs) == (Run(0, 5, TEXT), Run(5, 6, AUDIO))


def test_video_rows_run_along_the_width_first() -> None:
    video, audio = latents()
    rows, audio_rows = packing.latent_rows(video, audio)
    assert torch.equal(rows[1], video[0, :, 0, 0, 1])
    assert torch.equal(rows[2], video[0, :, 0, 1, 0])
    assert torch.equal(rows[6], video[0, :, 1, 0, 0])
    assert torch.equal(audio_rows, audio[0])


def test_unpacking_is_the_way_back() -> None:
    video, audio = latents()
    batch = packing.pack(video, audio, conditioning(with_image=True), align=16)
    out = torch.zeros(batch.num_tokens, 6)
    for part in batch.parts:
        rows = batch.rows(part.kind.modality)[part.source : part.source + part.length, :6]
        out[part.start : part.stop, : rows.shape[1]] = rows
    got_video, got_audio = packing.unpack(out, batch)
    assert torch.equal(got_video, video.expand(2, -1, -1, -1, -1))
    assert torch.equal(got_audio, audio.expand(2, -1, -1))


def test_padding_is_a_segment_of_its_own_and_only_where_needed() -> None:
    plain = packing.pack(*latents(), conditioning())
    padded = packing.pack(*latents(), conditioning(), align=plain.num_tokens)
    assert padded.segment_lengths == plain.segment_lengths
    padded = packing.pack(*latents(), conditioning(), align=plain.num_tokens - 1)
    assert padded.segment_lengths == (*plain.segment_lengths, plain.num_tokens - 2)


def test_padding_carries_no_time() -> None:
    assert torch.equal(packing.time_row_of(Kind.PADDING, 500.0, 8), torch.zeros(8))


@pytest.mark.parametrize("kind", [Kind.TEXT, Kind.SPECIAL, Kind.REFERENCE])
def test_constant_rows_carry_the_clean_time(kind: Kind) -> None:
    assert packing.time_row_of(kind, 500.0, 8).tolist() == [1.0] * 4 + [0.0] * 4


def test_text_of_any_float_dtype_is_packed_as_fp32() -> None:
    text = (seeded(1, 3, 7).bfloat16(), seeded(1, 2, 7).half())
    batch = packing.pack(*latents(), Conditioning(text))
    assert torch.equal(batch.text[:3], text[0][0].float())


@pytest.mark.parametrize(("num_audio", "num_latents"), [(1, 1), (8, 1), (9, 2), (16, 2), (250, 32)])
def test_audio_is_stretched_over_the_latents_that_it_covers(num_audio: int, num_latents: int) -> None:
    batch = packing.pack(latents()[0], seeded(1, num_audio, 6), conditioning())
    audio = next(p for p in batch.parts if p.kind is Kind.AUDIO)
    assert batch.coords[audio.start].tolist() == [0, 0, 0, num_audio, 1, 1, num_latents, 1, 1]
