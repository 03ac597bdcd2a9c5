"""One whole request on warm networks of released size with random weights: prompt in, checked mp4 out.

The parts of a render as the pipeline puts them together, without a checkpoint: the text tower visits the
device for a prompt that it has not seen (features of the negative prompt are kept), one denoising step of
both branches, the audio decoder, the video decoder, and the file that is encoded meanwhile. A few distinct
resident layers stand for the 40 of the transformer; none of its weights moves. Run by
`stream_gpu.py --only request`.
"""

import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import remove_weight_norm

from benchmarks.kernels import step
from magi2 import packing
from magi2.checkpoint.tiny_vae import TURBO_TINY
from magi2.config import ModelConfig, SamplingConfig
from magi2.contract import TIERS, Tier
from magi2.media.probe import breaches, probe
from magi2.media.writer import ClipWriter
from magi2.model.denoiser import TransformerDenoiser
from magi2.offload.staging import Stage
from magi2.sampling.loop import denoise
from magi2.sampling.noise import draw_noise
from magi2.vae.oobleck import AudioDecoder, OobleckConfig, empty_decoder
from magi2.vae.resample import fourier_resample
from magi2.vae.turbo import TurboDecoder
from magi2.vae.turbo_network import TurboConfig, TurboNetwork

TIER, NUM_TOKENS, GOAL_S = "272p", 800, 5.0
TURBO_RELEASED = TURBO_TINY | {
    "decoder_block_out_channels": [64, 128, 256, 512],
    "decoder_layers_per_block": [2, 2, 2, 3, 3],
}


class Rows(Protocol):
    """Where figures go."""

    def add(self, name: str, *, ok: bool = True, **facts: object) -> None: ...


class Networks:
    """What one render needs, the transformer on the device and the others on the host."""

    def __init__(self, device: torch.device, tower: Any, *, is_tiny: bool) -> None:
        self.device, self.tower, self.is_tiny = device, tower, is_tiny
        self.tier = Tier(TIER, 128, 64, 4) if is_tiny else TIERS[TIER]
        self.config = ModelConfig.tiny() if is_tiny else ModelConfig.released()
        self.transformer = step.build(step.Setting(device, is_tiny, pool=4, repeats=1))
        turbo = TurboConfig.from_json(TURBO_TINY if is_tiny else TURBO_RELEASED, source="benchmark")
        with torch.device("meta"):
            network = TurboNetwork(turbo)
        self.video = TurboDecoder(_drawn(network, torch.bfloat16), turbo)
        oobleck = OobleckConfig(4 if is_tiny else 128, (1, 2, 4, 8, 16), (2, 4, 4, 8, 8))
        self.audio = AudioDecoder(_drawn(empty_decoder(oobleck), torch.float32))
        self.stage = Stage(device)
        for module in (tower, self.video.module, self.audio.module):
            self.stage.pin(module)
        self.negative: Tensor | None = None

    def encode(self, seed: int) -> list[Tensor]:
        """Return the features of a new prompt and of the negative one, which is encoded once."""
        with self.stage.holding(self.tower):
            if self.negative is None:
                self.negative = self._features(0)
            return [self._features(seed), self.negative]

    def render(self, seed: int, path: Path) -> dict[str, float]:
        """Render one clip and return the seconds of its phases."""
        seconds: dict[str, float] = {}
        began = time.perf_counter()

        def passed(phase: str) -> None:
            nonlocal began
            step.synchronize(self.device)
            now = time.perf_counter()
            seconds[phase], began = round(now - began, 3), now

        positive, negative = self.encode(seed)
        passed("text_encode")
        noise = draw_noise(seed, self.tier, self.device.type).to(self.device)
        denoiser = TransformerDenoiser(self.transformer, packing.Conditioning((positive, negative)))
        latents = denoise(denoiser, noise.video, noise.audio, num_steps=1, sampling=SamplingConfig())
        passed("denoise")
        with ClipWriter(path) as writer:
            with self.stage.holding(self.audio.module):
                samples = fourier_resample(self.audio.decode(latents.audio))[0].cpu().T.contiguous()
            # Of random weights: sound of any size, finite.
            samples = torch.nan_to_num(samples).clamp(-1.0, 1.0)
            writer.begin(samples, (self.tier.width, self.tier.height), None)
            passed("decode_audio")
            with self.stage.holding(self.video.module):
                for frames in self.video.decode(latents.video):
                    writer.add(frames)
            passed("decode_video")
            writer.finish()
            passed("mux")
        return seconds

    @torch.no_grad()
    def _features(self, seed: int) -> Tensor:
        """Encode drawn tokens, and fit the width of a tiny tower to the model's."""
        generator = torch.Generator().manual_seed(seed)
        length = 8 if self.is_tiny else NUM_TOKENS
        ids = torch.randint(0, self.tower.config.vocab_size, (1, length), generator=generator)
        embedded = self.tower.embed_tokens(ids.to(self.tower.embed_tokens.weight.device)).to(self.device)
        features: Tensor = self.tower(inputs_embeds=embedded, use_cache=False).last_hidden_state
        width = self.config.text_in_channels
        if features.shape[2] != width and not self.is_tiny:
            raise ValueError(f"the tower gives {features.shape[2]} channels, the model takes {width}")
        return features.repeat(1, 1, -(-width // features.shape[2]))[..., :width]


def _drawn(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Fill a network built on meta, on the host, so that what passes through it keeps its size roughly."""
    module = module.to(dtype).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    for tensor in module.parameters():
        scale = tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.05
        tensor.data.copy_(scale * torch.randn(tensor.shape, generator=generator))
    for part in list(module.modules()):
        if hasattr(part, "weight_g"):
            remove_weight_norm(part)
    return module.requires_grad_(requires_grad=False)


def addresses(module: nn.Module) -> list[int]:
    """Return where the weights lie."""
    return [tensor.data_ptr() for tensor in module.parameters()]


def measure_request(device: torch.device, tower: Any, rows: Rows, *, is_tiny: bool) -> None:
    """Render three clips one after the other; the second and third are warm."""
    networks = Networks(device, tower, is_tiny=is_tiny)
    before = addresses(networks.transformer)
    with tempfile.TemporaryDirectory() as folder:
        for number, attempt in enumerate(("first", "warm", "warm again"), start=1):
            path = Path(folder) / f"{number}.mp4"
            begin = time.perf_counter()
            seconds = networks.render(number, path)
            total = time.perf_counter() - begin
            broken = breaches(probe(path), networks.tier.width, networks.tier.height)
            is_fast = is_tiny or attempt == "first" or total <= GOAL_S
            rows.add(
                f"request of one step, {TIER}, {attempt}",
                ok=is_fast and not broken,
                total_s=round(total, 3),
                phases=seconds,
                breaches=broken,
            )
    rows.add("transformer stayed where it was", ok=addresses(networks.transformer) == before)
    networks.stage.close()
