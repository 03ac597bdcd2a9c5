"""On one CUDA device: the video decoder at its released size, with random weights."""

import pytest
import torch
from torch import Tensor

from magi2.vae.turbo import TurboDecoder
from magi2.vae.turbo_network import TurboConfig, TurboNetwork
from tests.released import RELEASED_TURBO

GIB = 2**30


def decoder(dtype: torch.dtype, device: str) -> TurboDecoder:
    torch.manual_seed(0)
    config = TurboConfig.from_json(RELEASED_TURBO, source="released")
    module = TurboNetwork(config).to(device, dtype).eval().requires_grad_(requires_grad=False)
    return TurboDecoder(module, config)


def latent(rows: int, columns: int, num_latents: int = 32) -> Tensor:
    return torch.randn(1, 48, num_latents, rows, columns, generator=torch.Generator().manual_seed(1))


def test_windows_repeated_and_reordered_give_equal_bits() -> None:
    turbo, clip = decoder(torch.bfloat16, "cuda"), latent(16, 28)
    prepared, windows = turbo.prepare(clip), turbo.windows(clip)
    forward = [turbo.decode_window(prepared, window).cpu() for window in windows]
    backward = [turbo.decode_window(prepared, window).cpu() for window in reversed(windows)]
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))


def test_peak_memory_at_540p_stays_below_8_gib() -> None:
    turbo = decoder(torch.bfloat16, "cuda")
    torch.cuda.reset_peak_memory_stats()
    chunks = list(turbo.decode(latent(32, 56)))
    assert sum(len(chunk) for chunk in chunks) == 125
    assert chunks[0].shape[1:] == (512, 896, 3)
    assert not chunks[0].is_cuda
    assert torch.cuda.max_memory_allocated() < 8 * GIB


def test_strict_deterministic_mode_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    turbo, clip = decoder(torch.bfloat16, "cuda"), latent(4, 4, num_latents=7)
    usual = turbo.decode_float(clip)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.use_deterministic_algorithms(mode=True)
    try:
        strict = turbo.decode_float(clip)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert (usual.float() - strict.float()).abs().mean() < 1e-2


def test_device_agrees_with_the_cpu_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    clip = latent(2, 2, num_latents=8)
    on_gpu = decoder(torch.float32, "cuda").decode_float(clip).cpu()
    on_cpu = decoder(torch.float32, "cpu").decode_float(clip)
    torch.testing.assert_close(on_gpu, on_cpu, rtol=0.0, atol=1e-4)
