"""`generate`: every rule from the command line, and one real clip."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from magi2.commands import engine_flags
from magi2.config import CacheConfig
from magi2.contract import TIERS, Tier
from magi2.sampling import cache

ENOUGH = ("generate", "--prompt", "a red kite")


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "first.png"
    Image.new("RGB", (64, 48), "orange").save(path)
    return path


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--prompt", " "], "prompt is required and must not be blank"),
        (["--prompt", "x" * 60_001], "60001"),
        (["--prompt", '{"global_layer": "text"}'], "no usable caption text"),
        (["--seconds", "5"], "seconds must be 10"),
        (["--num-frames", "124"], "num_frames must be 125 (got 124)"),
        (["--fps", "25"], "fps must be 12.5 (got 25)"),
        (["--resolution", "1080p"], "resolution must be 272p or 540p"),
        (["--size", "896"], "size must look like 896x512"),
        (["--size", "640x480"], "size must be 448x256 or 896x512"),
        (["--size", "448x256", "--resolution", "540p"], "resolution 540p means 896x512"),
        (["--output-width", "640"], "must be given together"),
        (["--output-width", "641", "--output-height", "480"], "must be even integers"),
        (["--num-inference-steps", "0"], "num_inference_steps must be an integer from 1 to 200"),
        (["--seed", "-1"], "seed must be an integer from 0"),
        (
            ["--negative-prompt", "blur"],
            "--negative-prompt cannot be given: the negative prompt is the model's own",
        ),
    ],
)
def test_broken_rule_is_one_clear_line_and_exit_2(magi2: Callable, words: list[str], line: str) -> None:
    outcome = magi2(*ENOUGH, *words)
    assert outcome.code == 2
    assert outcome.out == ""
    assert len(outcome.err.splitlines()) == 1
    assert line in outcome.err


def test_all_broken_rules_are_reported_at_once(magi2: Callable) -> None:
    outcome = magi2("generate", "--seconds", "5", "--seed", "x", "--fps", "24")
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) == 4


def test_image_that_is_not_there_is_named(magi2: Callable, tmp_path: Path) -> None:
    outcome = magi2(*ENOUGH, "--image", tmp_path / "absent.png")
    assert outcome.code == 2
    assert "absent.png cannot be read: No such file" in outcome.err


def test_image_that_is_no_image_is_refused(magi2: Callable, tmp_path: Path) -> None:
    (tmp_path / "note.png").write_text("no image", encoding="utf-8")
    outcome = magi2(*ENOUGH, "--image", tmp_path / "note.png")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert "still PNG, JPEG or WebP" in outcome.err


@pytest.mark.parametrize(
    ("size", "line"), [((640, 20), "at least 32x32"), ((1024, 64), "too elongated for 272p")]
)
def test_image_of_a_bad_size_is_refused(
    magi2: Callable, tmp_path: Path, size: tuple[int, int], line: str
) -> None:
    Image.new("RGB", size).save(tmp_path / "bad.png")
    outcome = magi2(*ENOUGH, "--resolution", "272p", "--image", tmp_path / "bad.png")
    assert outcome.code == 2
    assert line in outcome.err


def test_second_image_is_refused(magi2: Callable, picture: Path) -> None:
    outcome = magi2(*ENOUGH, "--image", picture, "--image", picture)
    assert outcome.code == 2
    assert "exactly one image is supported (got 2)" in outcome.err


def test_output_folder_must_exist(magi2: Callable, tmp_path: Path) -> None:
    outcome = magi2(*ENOUGH, "--output", tmp_path / "absent/clip.mp4")
    assert outcome.code == 2
    assert "the folder does not exist" in outcome.err


@pytest.mark.parametrize("given", [".", "", "/", "/dev/null", "/proc/clip.mp4"])
def test_unusable_output_is_refused_in_one_line_before_the_checkpoint_is_read(
    magi2: Callable, tmp_path: Path, given: str
) -> None:
    outcome = magi2(*ENOUGH, "--output", given, "--checkpoint", tmp_path / "absent")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert outcome.err.startswith(f"magi2: --output {given or '.'}: ")


def test_negative_prompt_names_no_fields(magi2: Callable) -> None:
    assert "there are" not in magi2(*ENOUGH, "--negative-prompt", "blur").err


def test_layout_without_its_ranks_says_how_to_launch(
    magi2: Callable, tiny_root: Path, tmp_path: Path
) -> None:
    words = ("--checkpoint", tiny_root, "--ulysses", "4", "--output", tmp_path / "clip.mp4")
    outcome = magi2(*ENOUGH, *words)
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    told = "4 ranks are needed, 1 was launched: torchrun --nproc-per-node 4 -m magi2 generate ..."
    assert told in outcome.err


def test_checkpoint_must_be_named_somewhere(magi2: Callable) -> None:
    outcome = magi2(*ENOUGH)
    assert outcome.code == 2
    assert "MAGI2_CKPT_ROOT" in outcome.err


@pytest.mark.parametrize("device", ["banana", "cuda:99"])
def test_device_that_is_not_there_is_named_in_one_line(magi2: Callable, tiny_root: Path, device: str) -> None:
    outcome = magi2(*ENOUGH, "--checkpoint", tiny_root, "--device", device)
    assert outcome.code == 2
    assert f"--device {device}: torch finds no such device here; use cpu" in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_checkpoint_that_does_not_fit_is_reported_whole_with_exit_1(magi2: Callable, tmp_path: Path) -> None:
    outcome = magi2(*ENOUGH, "--checkpoint", tmp_path, "--output", tmp_path / "clip.mp4")
    assert outcome.code == 1
    assert outcome.err.count("is missing") == 10
    assert not (tmp_path / "clip.mp4").exists()


def test_checkpoint_of_the_environment_is_used(
    magi2: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = magi2
    monkeypatch.setenv("MAGI2_CKPT_ROOT", str(tmp_path / "from-environment"))
    outcome = run(*ENOUGH, "--output", tmp_path / "clip.mp4")
    assert outcome.code == 1
    assert "from-environment" in outcome.err


def test_attention_of_the_environment_is_refused_by_name(
    magi2: Callable, tiny_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGI2_FLASH_ATTN_VERSION", "3")
    outcome = magi2("generate", "--checkpoint", str(tiny_root), "--device", "cpu", "--prompt", "x")
    assert outcome.code == 2
    assert "MAGI2_FLASH_ATTN_VERSION: flash attention version 3 cannot run here" in outcome.err


def test_clip_is_written_with_its_image_and_its_seed_is_told(
    magi2: Callable, monkeypatch: pytest.MonkeyPatch, tiny_root: Path, picture: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(TIERS, "272p", Tier("272p", 64, 64, 2))
    few = ("--resolution", "272p", "--num-inference-steps", "1", "--device", "cpu", "--measure")
    places = ("--checkpoint", tiny_root, "--image", picture, "--output", tmp_path / "clip.mp4")
    outcome = magi2(*ENOUGH, *few, *places)
    assert outcome.code == 0, outcome.err
    seed = outcome.err.split("--seed ")[1].split()[0]
    assert f"seed {seed}, 1 step at 272p" in outcome.out
    for stage in ("load", "text_encode", "image_encode", "denoise", "decode_video", "decode_audio", "mux"):
        assert f"{stage} " in outcome.out
    assert "peak host memory of all processes " in outcome.out
    assert magi2("probe", tmp_path / "clip.mp4", "--width", "64", "--height", "64").code == 0


def test_cached_steps_are_told(
    magi2: Callable, monkeypatch: pytest.MonkeyPatch, tiny_root: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(TIERS, "272p", Tier("272p", 64, 64, 2))
    eager = CacheConfig(threshold=0.99, warmup_steps=1)
    monkeypatch.setattr(engine_flags, "cache_of", lambda _arguments: eager)
    few = ("--resolution", "272p", "--num-inference-steps", "3", "--device", "cpu", "--cache-dit")
    outcome = magi2(*ENOUGH, *few, "--checkpoint", tiny_root, "--output", tmp_path / "clip.mp4")
    assert outcome.code == 0, outcome.err
    assert "2 of 3 steps from the cache" in outcome.out


def test_cache_without_its_package_is_refused_with_its_flag(
    magi2: Callable, monkeypatch: pytest.MonkeyPatch, tiny_root: Path
) -> None:
    monkeypatch.setattr(cache, "find_spec", lambda _name: None)
    outcome = magi2(*ENOUGH, "--cache-dit", "--checkpoint", tiny_root)
    assert outcome.code == 2
    assert (
        "--cache-dit: the package cache-dit is not installed: pip install 'magi2-farm[cache]'" in outcome.err
    )
