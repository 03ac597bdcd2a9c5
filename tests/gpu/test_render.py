"""On one CUDA device: the whole pipeline on the tiny checkpoint, and networks that visit the device."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from magi2.checkpoint.tiny import write_tiny_checkpoint
from magi2.config import EngineConfig
from magi2.contract import TIERS, GenerationRequest
from magi2.media.mp4 import write_mp4
from magi2.offload.staging import Stage
from magi2.pipeline import Magi2Pipeline, Rendered

PROMPT = "A tea seller pours one cup while the morning market opens behind her."


def image() -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((640, 480)).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def is_same(left: Rendered, right: Rendered) -> bool:
    return torch.equal(left.clip.frames, right.clip.frames) and torch.equal(
        left.clip.samples, right.clip.samples
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture
def pipeline(root: Path, device: torch.device) -> Iterator[Magi2Pipeline]:
    opened = Magi2Pipeline(EngineConfig(root, device=str(device)))
    yield opened
    opened.close()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("given", [None, image()], ids=["text", "image"])
def test_clip_keeps_the_contract_and_repeats(
    pipeline: Magi2Pipeline, tier: str, given: bytes | None, tmp_path: Path
) -> None:
    request = GenerationRequest(PROMPT, tier, 2, 5, has_image=given is not None)
    rendered = pipeline(request, image=given)
    assert is_same(pipeline(request, image=given), rendered)
    assert rendered.clip.frames.float().std() > 5
    write_mp4(tmp_path / "clip.mp4", rendered.clip, preset="ultrafast")
    assert rendered.stats.peak_memory_mb is not None
    assert rendered.stats.peak_memory_mb > 1


def test_only_the_transformer_stays_on_the_device(pipeline: Magi2Pipeline) -> None:
    pipeline(GenerationRequest(PROMPT, "272p", 1, 5))
    visitors = (pipeline.text_encoder, pipeline.video_decoder, pipeline.audio_decoder)
    for visitor in visitors:
        assert {tensor.device.type for tensor in visitor.module.state_dict().values()} == {"cpu"}
    assert {tensor.device.type for tensor in pipeline.transformer.state_dict().values()} == {"cuda"}


def test_staging_brings_the_hosts_own_weights_back(device: torch.device) -> None:
    module, stage = nn.Linear(64, 64), Stage(device)
    stage.pin(module)
    master = module.weight.data_ptr()
    assert module.weight.is_pinned()
    ones = torch.ones(1, 64, device=device)
    with torch.no_grad(), stage.holding(module):
        module(ones)  # cuBLAS takes its workspace once
    before = torch.cuda.memory_allocated(device)
    with torch.no_grad(), stage.holding(module):
        assert module(ones).is_cuda
    assert module.weight.data_ptr() == master
    assert torch.cuda.memory_allocated(device) == before


def test_staging_puts_everything_back_after_a_failure(device: torch.device) -> None:
    module, stage = nn.Linear(64, 64), Stage(device)
    with pytest.raises(ValueError, match="broken"), stage.holding(module):
        raise ValueError("broken")
    assert module.weight.device.type == "cpu"
