"""A pipeline whose transformer is streamed from the host: the clip is the resident one's, to the byte."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from magi2 import determinism
from magi2.checkpoint.load_streamed import Streaming
from magi2.config import EngineConfig
from magi2.contract import TIERS, GenerationRequest, Tier
from magi2.errors import EngineError
from magi2.parallel.groups import Groups
from magi2.parallel.layout import Layout
from magi2.parallel.memory import BY_HEAD
from magi2.pipeline import Magi2Pipeline, Rendered

REQUEST = GenerationRequest("a red kite over the sea", "272p", 2, seed=7)
FEW_TOKENS = Tier("272p", 128, 64, 4)


@pytest.fixture(autouse=True)
def few_tokens() -> Iterator[None]:
    with mock.patch.dict(TIERS, {"272p": FEW_TOKENS}):
        yield
    determinism.configure(deterministic=False)


def render(root: Path, layout: Layout, *, count: int = 1) -> Rendered:
    pipeline = Magi2Pipeline(EngineConfig(root), groups=Groups(layout))
    try:
        for _ in range(count):
            rendered = pipeline(REQUEST)
        return rendered
    finally:
        pipeline.close()


def same(a: Rendered, b: Rendered) -> bool:
    return torch.equal(a.clip.frames, b.clip.frames) and torch.equal(a.clip.samples, b.clip.samples)


def test_streamed_clips_equal_the_resident_one(tiny_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resident = render(tiny_root, Layout())
    hybrid = Layout(layerwise=True, cpu_offload=True, resident_blocks=2)
    assert same(render(tiny_root, hybrid, count=2), resident)
    monkeypatch.setattr("magi2.pipeline.Streaming", lambda *_, **__: Streaming(BY_HEAD))
    assert same(render(tiny_root, Layout(layerwise=True)), resident)


def test_closed_pipeline_lets_go_of_masters_and_slots(tiny_root: Path) -> None:
    pipeline = Magi2Pipeline(EngineConfig(tiny_root), groups=Groups(Layout(layerwise=True)))
    ring = pipeline.transformer.streamer.ring
    pipeline.close()
    assert ring._slots == []
    assert ring._masters._flats == {}


def test_replicas_without_a_wave_are_refused(tiny_root: Path) -> None:
    pipeline = Magi2Pipeline(EngineConfig(tiny_root))
    pipeline.groups = Groups(Layout(data_parallel=2, dlo=True))
    try:
        with pytest.raises(EngineError, match="replicas that share streamed weights render in waves"):
            pipeline(REQUEST)
    finally:
        pipeline.close()
