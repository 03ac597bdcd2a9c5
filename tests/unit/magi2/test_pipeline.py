"""The pipeline on the tiny checkpoint, with a tier of few tokens, so that a render takes a second."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from magi2.config import CacheConfig, EngineConfig
from magi2.contract import TIERS, GenerationRequest, Tier
from magi2.errors import EngineError, InvalidInput, OutOfMemory, Stopped
from magi2.media.mp4 import write_mp4
from magi2.media.writer import ClipWriter
from magi2.parallel.groups import Groups
from magi2.parallel.layout import Layout
from magi2.pipeline import Magi2Pipeline, Rendered

SMALL = Tier("272p", 128, 64, 4)
REQUEST = GenerationRequest("a red kite over the sea", "272p", 2, seed=7)


def image(width: int = 64, height: int = 48) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def request(**changes: object) -> GenerationRequest:
    return GenerationRequest.from_json(REQUEST.to_json() | changes)


@pytest.fixture(scope="module")
def opened(tiny_root: Path) -> Iterator[Magi2Pipeline]:
    pipeline = Magi2Pipeline(EngineConfig(tiny_root))
    yield pipeline
    pipeline.close()


@pytest.fixture
def pipeline(opened: Magi2Pipeline, monkeypatch: pytest.MonkeyPatch) -> Magi2Pipeline:
    monkeypatch.setitem(TIERS, "272p", SMALL)
    return opened


def is_same(left: Rendered, right: Rendered) -> bool:
    return torch.equal(left.clip.frames, right.clip.frames) and torch.equal(
        left.clip.samples, right.clip.samples
    )


def test_clip_has_the_contract_shape_and_content(pipeline: Magi2Pipeline) -> None:
    clip = pipeline(REQUEST).clip
    assert clip.frames.shape == (125, 64, 128, 3)
    assert clip.samples.shape == (441_000, 2)
    assert clip.frames.float().std() > 5
    assert 0.005 < clip.samples.square().mean().sqrt() < 1


def test_equal_requests_give_equal_frames_and_samples(pipeline: Magi2Pipeline) -> None:
    assert is_same(pipeline(REQUEST), pipeline(REQUEST))


@pytest.mark.parametrize(
    "changes", [{"seed": 8}, {"prompt": "a blue kite over the hills"}, {"num_inference_steps": 3}]
)
def test_seed_prompt_and_steps_each_change_the_clip(
    pipeline: Magi2Pipeline, changes: dict[str, object]
) -> None:
    assert not is_same(pipeline(REQUEST), pipeline(request(**changes)))


def test_image_changes_the_clip_and_is_recorded(pipeline: Magi2Pipeline) -> None:
    with_image = pipeline(request(has_image=True), image=image())
    assert not is_same(with_image, pipeline(REQUEST))
    conditioning = with_image.stats.conditioning
    assert conditioning["reference_grid"] == [6, 8]
    for branch in conditioning["branches"].values():
        assert (branch["special"], branch["reference"]) == (1, 48)


def test_stats_count_the_tokens_of_both_branches(pipeline: Magi2Pipeline) -> None:
    conditioning = pipeline(REQUEST).stats.conditioning
    assert conditioning["reference_grid"] is None
    conditional, unconditional = (conditioning["branches"][name] for name in ("conditional", "unconditional"))
    assert (conditional["video"], conditional["audio"], conditional["reference"]) == (32 * 4 * 8, 250, 0)
    assert conditional["text"] == pipeline.text_encoder.count_tokens(REQUEST.prompt)
    assert unconditional["text"] > conditional["text"]


def test_stats_time_every_stage_that_ran(pipeline: Magi2Pipeline) -> None:
    stats = pipeline(request(has_image=True), image=image()).stats
    assert list(stats.stage_durations) == [
        "text_encode",
        "image_encode",
        "denoise",
        "decode_audio",
        "decode_video",
    ]
    assert stats.peak_memory_mb is None


def test_progress_reports_each_phase_from_nothing_to_all(pipeline: Magi2Pipeline) -> None:
    reports: list[tuple[str, int, int]] = []
    pipeline(REQUEST, progress=lambda *report: reports.append(report))
    assert [step for phase, step, _ in reports if phase == "denoise"] == [0, 1, 2]
    assert [step for phase, step, _ in reports if phase == "decode_video"] == list(range(6))
    phases = list(dict.fromkeys(phase for phase, _, _ in reports))
    assert phases == ["text_encode", "denoise", "decode_audio", "decode_video"]


@pytest.mark.parametrize("phase", ["text_encode", "denoise", "decode_video"])
def test_stop_is_honoured_at_the_next_boundary(pipeline: Magi2Pipeline, phase: str) -> None:
    reports: list[tuple[str, int]] = []
    with pytest.raises(Stopped):
        pipeline(
            REQUEST,
            progress=lambda phase, step, _total: reports.append((phase, step)),
            should_stop=lambda: (phase, 1) in reports,
        )
    assert reports[-1] == (phase, 1)


def test_render_after_a_stop_is_whole(pipeline: Magi2Pipeline) -> None:
    before = pipeline(REQUEST)
    with pytest.raises(Stopped):
        pipeline(REQUEST, should_stop=lambda: True)
    assert is_same(pipeline(REQUEST), before)


def test_final_size_is_the_requests(pipeline: Magi2Pipeline) -> None:
    clip = pipeline(request(output_width=66, output_height=70)).clip
    assert (clip.width, clip.height) == (66, 70)


def test_validate_names_every_broken_rule(pipeline: Magi2Pipeline) -> None:
    bad = request(num_inference_steps=500, output_width=63, output_height=64, has_image=True)
    with pytest.raises(InvalidInput) as refused:
        pipeline.validate(bad, image(20, 20))
    assert {problem.code for problem in refused.value.problems} >= {
        "steps_invalid",
        "output_size_invalid",
        "image_too_small",
    }


def test_prompt_of_too_many_tokens_is_refused_with_their_number(pipeline: Magi2Pipeline) -> None:
    with pytest.raises(InvalidInput, match=r"prompt is \d+ tokens; at most 7000") as refused:
        pipeline.validate(request(prompt="Q" * 7001), None)
    assert refused.value.problems[0].code == "prompt_too_long"


@pytest.mark.parametrize("given", [None, image()], ids=["image is missing", "image is extra"])
def test_request_and_image_must_fit_together(pipeline: Magi2Pipeline, given: bytes | None) -> None:
    with pytest.raises(InvalidInput, match="do not fit together"):
        pipeline.validate(request(has_image=given is None), given)


def test_other_deterministic_setting_is_refused(pipeline: Magi2Pipeline) -> None:
    with pytest.raises(InvalidInput) as refused:
        pipeline.validate(request(deterministic=True), None)
    assert refused.value.problems[0].code == "deterministic_mismatch"


def test_exhausted_memory_is_named(pipeline: Magi2Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIERS, "272p", Tier("272p", 16 * 2**20, 16 * 2**20, 4))
    with pytest.raises(OutOfMemory, match="out of memory on host"):
        pipeline(REQUEST)


def test_second_pipeline_in_a_process_is_refused(opened: Magi2Pipeline) -> None:
    with pytest.raises(EngineError, match="close it"):
        Magi2Pipeline(opened.config)


def test_fingerprint_is_of_this_checkpoint(opened: Magi2Pipeline) -> None:
    assert opened.fingerprint()["dtype"] == "bfloat16"


def test_cached_steps_are_recorded_and_leave_the_next_render_alone(
    pipeline: Magi2Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = pipeline(request(num_inference_steps=3))
    assert plain.stats.acceleration is None
    eager = replace(pipeline.config, cache=CacheConfig(threshold=0.99, warmup_steps=1))
    monkeypatch.setattr(pipeline, "config", eager)
    wanted = request(num_inference_steps=3, acceleration="cache_dit")
    first, second = pipeline(wanted), pipeline(wanted)
    assert first.stats.acceleration["cached_steps"] == [1, 2]
    assert first.stats.acceleration["threshold"] == 0.99
    assert is_same(first, second)
    assert not is_same(first, plain)
    assert is_same(pipeline(request(num_inference_steps=3)), plain)


def test_cache_is_refused_where_replicas_share_collectives(
    pipeline: Magi2Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "groups", Groups(Layout(data_parallel=2, dlo=True)))
    with pytest.raises(InvalidInput, match="--data-parallel above 1: ranks may skip different collectives"):
        pipeline.validate(request(acceleration="cache_dit"), None)
    pipeline.validate(REQUEST, None)


def test_file_encoded_while_decoding_is_that_of_the_finished_clip(
    pipeline: Magi2Pipeline, tmp_path: Path
) -> None:
    wanted = request(output_width=66, output_height=70)
    with ClipWriter(tmp_path / "during.mp4", preset="ultrafast") as writer:
        rendered = pipeline(wanted, writer=writer)
        writer.finish()
    assert is_same(rendered, pipeline(wanted))
    write_mp4(tmp_path / "after.mp4", rendered.clip, preset="ultrafast")
    assert (tmp_path / "during.mp4").read_bytes() == (tmp_path / "after.mp4").read_bytes()


def test_stop_between_windows_leaves_no_file(pipeline: Magi2Pipeline, tmp_path: Path) -> None:
    windows: list[int] = []

    def progress(phase: str, step: int, _total: int) -> None:
        windows.extend([step] * (phase == "decode_video"))

    def render() -> None:
        with ClipWriter(tmp_path / "clip.mp4") as writer:
            pipeline(REQUEST, progress=progress, should_stop=lambda: 2 in windows, writer=writer)

    with pytest.raises(Stopped):
        render()
    assert list(tmp_path.iterdir()) == []


def test_failed_encoder_stops_no_decoding_and_is_told_at_the_end(
    pipeline: Magi2Pipeline, tmp_path: Path
) -> None:
    with ClipWriter(tmp_path / "gone" / "clip.mp4") as writer:
        rendered = pipeline(REQUEST, writer=writer)
        with pytest.raises(EngineError, match="could not be encoded or written"):
            writer.finish()
    assert is_same(rendered, pipeline(REQUEST))
