"""Opening and closing a pipeline: one per process, whole reports, both dtypes, the strict setting."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from magi2 import determinism
from magi2.config import EngineConfig
from magi2.contract import TIERS, GenerationRequest, Tier
from magi2.errors import CheckpointError, EngineError, LayoutError
from magi2.parallel.groups import Groups
from magi2.parallel.layout import Layout
from magi2.pipeline import Magi2Pipeline, Rendered

REQUEST = GenerationRequest("a red kite over the sea", "272p", 1, seed=7)


@pytest.fixture(autouse=True)
def numerics() -> Iterator[None]:
    yield
    determinism.configure(deterministic=False)


def render(config: EngineConfig, request: GenerationRequest = REQUEST) -> Rendered:
    pipeline = Magi2Pipeline(config)
    try:
        return pipeline(request)
    finally:
        pipeline.close()


def test_load_reports_its_parts(tiny_root: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    Magi2Pipeline(EngineConfig(tiny_root), progress=lambda *report: reports.append(report)).close()
    assert reports == [("load", part, 5) for part in range(6)]


def test_checkpoint_that_does_not_fit_is_reported_whole(own_root: Path) -> None:
    (own_root / "preview/model-00001-of-00002.safetensors").unlink()
    (own_root / "turbo_vae/checkpoint.ckpt").unlink()
    with pytest.raises(CheckpointError) as refused:
        Magi2Pipeline(EngineConfig(own_root))
    assert refused.value.problems == [
        "preview/model-00001-of-00002.safetensors is missing",
        "turbo_vae/checkpoint.ckpt is missing",
    ]


def test_refused_checkpoint_leaves_room_for_another(tiny_root: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        Magi2Pipeline(EngineConfig(tmp_path))
    Magi2Pipeline(EngineConfig(tiny_root)).close()


@pytest.mark.parametrize("version", [2, 3, 4])
def test_attention_that_cannot_run_is_refused_before_any_weight_is_read(
    tiny_root: Path, version: int
) -> None:
    reports: list[tuple[str, int, int]] = []
    with pytest.raises(LayoutError, match=f"MAGI2_FLASH_ATTN_VERSION: flash attention version {version}"):
        Magi2Pipeline(
            EngineConfig(tiny_root, flash_attn_version=version),
            progress=lambda *report: reports.append(report),
        )
    assert reports == []


def test_version_that_is_insisted_on_reaches_every_layer(
    tiny_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Magi2Pipeline, "_refuse_attention", lambda *_: None)
    for layout in (Layout(), Layout(layerwise=True)):
        pipeline = Magi2Pipeline(EngineConfig(tiny_root, flash_attn_version=2), groups=Groups(layout=layout))
        found = {part.flash_attn_version for part in pipeline.transformer.modules() if _is_attention(part)}
        pipeline.close()
        assert found == {2}


def _is_attention(part: torch.nn.Module) -> bool:
    return hasattr(part, "flash_attn_version")


def test_closed_pipeline_renders_nothing_and_closes_again(tiny_root: Path) -> None:
    pipeline = Magi2Pipeline(EngineConfig(tiny_root))
    pipeline.close()
    pipeline.close()
    with pytest.raises(EngineError, match="closed"):
        pipeline(REQUEST)


def test_closing_an_old_pipeline_leaves_the_open_one(tiny_root: Path) -> None:
    first = Magi2Pipeline(EngineConfig(tiny_root))
    first.close()
    second = Magi2Pipeline(EngineConfig(tiny_root))
    first.close()
    with pytest.raises(EngineError, match="open"):
        Magi2Pipeline(EngineConfig(tiny_root))
    second.close()


def test_float32_is_near_bfloat16_and_not_equal(tiny_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIERS, "272p", Tier("272p", 64, 64, 2))
    half, full = (render(EngineConfig(tiny_root, dtype=dtype)) for dtype in ("bfloat16", "float32"))
    difference = (half.clip.samples - full.clip.samples).norm() / full.clip.samples.norm()
    assert 0 < difference < 0.5


def test_strict_deterministic_render_equals_the_ordinary_one(
    tiny_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TIERS, "272p", Tier("272p", 64, 64, 2))
    ordinary = render(EngineConfig(tiny_root))
    strict_request = GenerationRequest.from_json(REQUEST.to_json() | {"deterministic": True})
    strict = render(EngineConfig(tiny_root, deterministic=True), strict_request)
    assert torch.equal(strict.clip.frames, ordinary.clip.frames)
    assert torch.equal(strict.clip.samples, ordinary.clip.samples)
