"""One render, from a checked request to a clip: encode, denoise, decode.

Promises: weights are loaded once and stay; one pipeline is open per process; equal requests give equal frames
and samples on equal hardware; a request to stop is honoured at the next step boundary. The transformer stays
on its device, the other networks visit it for their phase. Over several ranks all make the same calls; the
output rank alone encodes and makes the clip, and its answer to whether to stop holds for all. It writes no
file, reads no environment and draws no seed: the request says everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from PIL.Image import Image as Picture
from torch import Tensor

from kernels.dispatch import attention_setting, choose_attention
from magi2 import determinism
from magi2.checkpoint.fingerprint import fingerprint
from magi2.checkpoint.index import PREVIEW, TEXT_ENCODER, read_model_config, stored_bytes
from magi2.checkpoint.load import load_transformer
from magi2.checkpoint.load_streamed import Streaming, load_streamed
from magi2.checkpoint.verify import AUDIO_DECODER, IMAGE_VAE, TURBO_VAE, verify_checkpoint
from magi2.config import EngineConfig, ModelConfig, SamplingConfig
from magi2.contract import (
    ACCELERATIONS,
    IMAGE_FIELD,
    NUM_FRAMES,
    TIERS,
    GenerationRequest,
    ImageFacts,
    Problem,
    default_limits,
    image_problems,
    problems_of,
)
from magi2.errors import CheckpointError, EngineError, InvalidInput, LayoutError
from magi2.media.clip import Clip
from magi2.media.image import open_image, prepare_reference
from magi2.media.writer import ClipWriter
from magi2.model.denoiser import TransformerDenoiser
from magi2.model.transformer import Magi2Transformer
from magi2.offload.memory import has_room, host_bytes, named_exhaustion
from magi2.offload.runtime import CudaRuntime
from magi2.offload.shared import shared_folder
from magi2.offload.staging import Stage
from magi2.packing import Conditioning, Reference
from magi2.parallel.groups import Groups
from magi2.parallel.layout import check
from magi2.parallel.memory import (
    BY_LAYER,
    STREAMED_TEXT_BYTES,
    Placement,
    as_count,
    check_memory,
    place,
    plan,
)
from magi2.record import ProgressFn, RenderStats, RunRecord, silent
from magi2.sampling.cache import StepCache, cached, missing_package
from magi2.sampling.loop import denoise
from magi2.sampling.noise import Latents, draw_noise
from magi2.text.prompt import encoder_text
from magi2.text.qwen35 import TextEncoder
from magi2.text.tokenizer import PromptTokenizer
from magi2.vae.oobleck import AudioDecoder
from magi2.vae.resample import fourier_resample
from magi2.vae.turbo import TurboDecoder
from magi2.vae.wan22 import ImageEncoder

__all__ = ["Magi2Pipeline", "ProgressFn", "RenderStats", "Rendered"]

# The networks that visit the device for a phase.
_VISITORS = ("text_encoder", "image_encoder", "video_decoder", "audio_decoder")


@dataclass(frozen=True, eq=False)
class Rendered:
    """A finished clip with its record."""

    clip: Clip
    stats: RenderStats


class Magi2Pipeline:
    """The engine of one process, weights loaded.

    Args:
        config: Checkpoint, device, dtype and the rest that is fixed for the life of the process.
        progress: Told ("load", finished parts, parts).
        groups: Of this rank, opened by the caller, who closes them after the pipeline; None means one device.

    Raises:
        CheckpointError: The checkpoint does not fit; every problem of the folder is named.
        LayoutError: The layout does not fit the model or the machine, or the attention that is insisted on
            cannot run; no weight was read.
        EngineError: Another pipeline is open in this process.
    """

    _open: ClassVar[Magi2Pipeline | None] = None

    # These three are on the output rank only, the video decoder also on ranks that share its windows.
    text_encoder: TextEncoder
    image_encoder: ImageEncoder
    audio_decoder: AudioDecoder
    video_decoder: TurboDecoder

    def __init__(
        self, config: EngineConfig, *, progress: ProgressFn | None = None, groups: Groups | None = None
    ) -> None:
        if Magi2Pipeline._open is not None:
            raise EngineError("a pipeline is open in this process; close it before opening another")
        self.config = config
        self.device = torch.device(config.device)
        self.groups = groups or Groups()
        self.sampling = SamplingConfig()
        determinism.configure(deterministic=config.deterministic)
        self._stage = Stage(self.device)
        try:
            self._load(progress or silent)
        except CheckpointError as error:
            problems = verify_checkpoint(config.checkpoint).problems
            raise CheckpointError(problems or error.problems) from error
        Magi2Pipeline._open = self

    def _load(self, progress: ProgressFn) -> None:
        root, dtype = self.config.checkpoint, getattr(torch, self.config.dtype)
        model = read_model_config(root).with_dtype(self.config.dtype)
        check(self.groups.layout, model)
        self._refuse_attention(model)
        self._refuse_too_large(model)
        progress("load", 0, 5)
        if self.groups.is_output:
            self.text_encoder = TextEncoder.load(root / TEXT_ENCODER, dtype, "cpu")
            self.tokenizer = self.text_encoder.tokenizer
            progress("load", 1, 5)
            self.image_encoder = ImageEncoder.load(root / IMAGE_VAE)
            progress("load", 2, 5)
            self.audio_decoder = AudioDecoder.load(root / AUDIO_DECODER)
        else:
            self.tokenizer = PromptTokenizer.load(root / TEXT_ENCODER)
        progress("load", 3, 5)
        if self._is_decoding:
            self.video_decoder = TurboDecoder.load(root / TURBO_VAE, dtype)
        progress("load", 4, 5)
        self.transformer = self._load_transformer(root / PREVIEW, model)
        self._house_visitors()
        progress("load", 5, 5)

    def _house_visitors(self) -> None:
        """Page-lock the networks that visit; stream the text encoder where it has no room beside the rest."""
        for name in _VISITORS:
            if name not in self.__dict__:
                continue
            module = getattr(self, name).module
            if name == "text_encoder" and not has_room(self.device, module):
                self.text_encoder.stream(CudaRuntime(self.device))
            else:
                self._stage.pin(module)

    def _load_transformer(self, folder: Path, model: ModelConfig) -> Magi2Transformer:
        version = self.config.flash_attn_version
        if not self.groups.layout.is_streamed:
            return load_transformer(
                folder, model, device=self.device, flash_attn_version=version, groups=self.groups
            )
        placement = self._placement(model)
        streaming = Streaming(
            placement.stream_by, placement.num_resident, shared_folder=shared_folder(self.device)
        )
        return load_streamed(
            folder, model, streaming, device=self.device, flash_attn_version=version, groups=self.groups
        )

    def _placement(self, model: ModelConfig) -> Placement:
        """Choose how layers are streamed, equally on all ranks; what fits the largest clip fits all."""
        layout = self.groups.layout
        if self.device.type != "cuda":
            return Placement(num_resident=as_count(layout.resident_blocks))
        return place(model, layout, device_bytes=self._least_free())

    def _least_free(self) -> int:
        """Return what the fullest device of all ranks has free."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(self.groups.world.stack(torch.tensor(free)).min())

    @property
    def _is_decoding(self) -> bool:
        """Whether this rank makes frames, its own or for the output rank."""
        return self.groups.is_output or self.groups.windows.size > 1

    def _refuse_attention(self, model: ModelConfig) -> None:
        """Refuse a flash attention version that cannot run here."""
        version, dtype = self.config.flash_attn_version, getattr(torch, model.params_dtype)
        setting = attention_setting(
            self.device, dtype, model.head_dim, model.attn_softcap, flash_attn_version=version
        )
        try:
            choose_attention(setting)
        except ValueError as error:
            raise LayoutError(f"MAGI2_FLASH_ATTN_VERSION: {error}") from error

    def _refuse_too_large(self, model: ModelConfig) -> None:
        """Refuse a layout that cannot hold even the smallest clip, by what the fullest device has free."""
        if self.device.type != "cuda":
            return
        layout, least = self.groups.layout, self._least_free()
        stored = stored_bytes(self.config.checkpoint / TEXT_ENCODER)
        smallest = min(TIERS.values(), key=lambda tier: tier.width).name
        # An encoder that does not fit is streamed.
        staged, stream_by = min(stored, STREAMED_TEXT_BYTES), BY_LAYER
        if layout.is_streamed:
            chosen = self._placement(model)
            stream_by, layout = chosen.stream_by, replace(layout, resident_blocks=chosen.num_resident)
        needed = plan(
            model, layout, tier=smallest, staged_bytes=staged, auxiliary_bytes=stored, stream_by=stream_by
        )
        hosts = self.groups.world.stack(torch.tensor(host_bytes()))
        check_memory(needed, layout, device_bytes=least, host_bytes=int(hosts.min()))

    def validate(self, request: GenerationRequest, image: bytes | None) -> None:
        """Check a request on the host: the contract again, the image's pixels and the prompt's tokens.

        Raises:
            InvalidInput: Every broken rule.
        """
        self._checked(request, image)

    def __call__(
        self,
        request: GenerationRequest,
        *,
        image: bytes | None = None,
        progress: ProgressFn | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        before_step: Callable[[], bool] | None = None,
        writer: ClipWriter | None = None,
    ) -> Rendered | None:
        """Render one clip; None on every rank but the output rank.

        Args:
            request: A valid request; equal ones give equal clips.
            image: The uploaded file, exactly if the request says that it has one.
            progress: Told (phase, finished, total); phases are those of `magi2.record`.
            should_stop: Asked at every step boundary, and between windows of frames on one rank; of several
                ranks the output rank's answer counts.
            before_step: Of a wave: asked exactly once before every step instead, on all ranks of all
                replicas; both answers are then already equal on all ranks.
            writer: Given the sound and each window's frames as they come, where the clip is made; its caller
                finishes it, and learns there what it could not do.

        Raises:
            InvalidInput: The request breaks a rule.
            Stopped: `should_stop` said so.
            OutOfMemory: The device or the host has too little.
            EngineError: The result is not finite, or the pipeline is closed.
            PeerLost: Another rank is gone or late; this process must end.
        """
        picture = self._checked(request, image)
        replica = self.groups.replica
        if (self.groups.layout.data_parallel > 1) != (before_step is not None):
            raise EngineError(
                "replicas that share streamed weights render in waves; one without any renders alone"
            )
        agreed = should_stop if before_step else lambda: replica.agree(wanted=should_stop())
        run = RunRecord(self.device, progress or silent, agreed)
        with named_exhaustion(self.device):
            conditioning = self._encode(request, picture, run)
            latents = self._denoise(request, conditioning, run, before_step or agreed)
            clip = self._decode(request, latents, run, writer)
        stats = run.stats(replica)
        return None if clip is None else Rendered(clip, stats)

    def fingerprint(self) -> dict[str, str]:
        """Return what a job records of this engine, so that a clip can be made again."""
        made_by = fingerprint(self.config, self.transformer.config)
        return made_by | {"layout": str(self.groups.layout)}

    def close(self) -> None:
        """Let go of all weights; the process may then open another pipeline."""
        if Magi2Pipeline._open is self:
            Magi2Pipeline._open = None
            if self.transformer.streamer is not None:
                self.transformer.streamer.close()
            if self.groups.is_output:
                self.text_encoder.close()
            self._stage.close()
            for name in (*_VISITORS, "transformer"):
                self.__dict__.pop(name, None)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _checked(self, request: GenerationRequest, image: bytes | None) -> Picture | None:
        """Return the upright picture of a request without problems."""
        if Magi2Pipeline._open is not self:
            raise EngineError("the pipeline is closed; open another")
        limits = default_limits(deterministic=self.config.deterministic)
        problems = problems_of(request, replace(limits, accelerations=ACCELERATIONS))
        problems += self._acceleration_problems(request)
        if request.has_image != (image is not None):
            text = "the request and its image do not fit together: has_image must say whether one came"
            problems.append(Problem(IMAGE_FIELD, "image_count", text))
        picture = None if image is None else open_image(image)
        if picture is not None:
            problems += image_problems([ImageFacts(picture.width, picture.height)], request.tier)
        if problems:
            raise InvalidInput(problems)
        text = encoder_text(request.prompt, has_image=request.has_image)
        self.tokenizer.tokenize_prompt(text)
        return picture

    def _acceleration_problems(self, request: GenerationRequest) -> list[Problem]:
        """Return why this engine cannot skip what the request lets it skip."""
        if request.acceleration == ACCELERATIONS[0]:
            return []
        why = missing_package()
        if self.groups.layout.data_parallel > 1:
            why = "--data-parallel above 1: ranks may skip different collectives; use off"
        return [Problem("acceleration", "profile_limit", f"acceleration cache_dit: {why}")] if why else []

    def _cached(self, request: GenerationRequest) -> AbstractContextManager[StepCache | None]:
        """Let layers be skipped while the block runs, if the request wants it."""
        if request.acceleration == ACCELERATIONS[0]:
            return nullcontext()
        return self._immediate(cached(self.transformer.block, self.config.cache, request.num_inference_steps))

    @contextmanager
    def _immediate(self, cache: AbstractContextManager[StepCache]) -> Iterator[StepCache]:
        """Finish every streamed layer at once while a cache looks at what each gave."""
        streamer = self.transformer.streamer
        with cache as steps:
            if streamer is not None:
                streamer.is_immediate = True
            try:
                yield steps
            finally:
                if streamer is not None:
                    streamer.is_immediate = False

    def _encode(self, request: GenerationRequest, picture: Picture | None, run: RunRecord) -> Conditioning:
        """Turn prompt, negative prompt and picture into what every rank's transformer is conditioned on."""
        own: list[Tensor] = []
        with run.stage("text_encode", 1):
            if self.groups.is_output:
                own = self._encode_text(encoder_text(request.prompt, has_image=request.has_image))
        if picture is not None:
            with run.stage("image_encode", 1):
                if self.groups.is_output:
                    tier = TIERS[request.tier]
                    with self._stage.holding(self.image_encoder.module):
                        pixels = prepare_reference(picture, tier.width, tier.height)
                        own.append(self.image_encoder.encode(pixels))
        shared = self.groups.replica.share(own if self.groups.is_output else None, self.device)
        positive, negative, special, *latents = shared
        return Conditioning((positive, negative), tuple(Reference(latent, special) for latent in latents))

    def _encode_text(self, text: str) -> list[Tensor]:
        """Return the features of the prompt and of the negative one, and the image's marker."""
        is_whole = not self.text_encoder.is_streamed
        with self._stage.holding(self.text_encoder.module) if is_whole else nullcontext():
            encoded = self.text_encoder.encode(text)
            negative = self.text_encoder.encode_negative()
            return [encoded.features, negative.features, self.text_encoder.special_token(encoded, text)]

    def _denoise(
        self,
        request: GenerationRequest,
        conditioning: Conditioning,
        run: RunRecord,
        before_step: Callable[[], bool],
    ) -> Latents:
        """Draw the noise and take it to the latents of the clip, all steps."""
        source = self.config.noise_device or self.device.type
        noise = draw_noise(request.seed, TIERS[request.tier], source).to(self.device)
        denoiser = TransformerDenoiser(self.transformer, conditioning)
        num_steps = request.num_inference_steps
        with run.stage("denoise", num_steps) as done, self._cached(request) as cache:
            run.note(conditioning, denoiser.token_counts(noise.video, noise.audio))
            latents = denoise(
                denoiser,
                noise.video,
                noise.audio,
                num_steps=num_steps,
                sampling=self.sampling,
                on_step=lambda step, _total: done(step),
                should_stop=before_step,
            )
            if cache is not None:
                run.acceleration = cache.report(self.groups.replica).to_json()
            return latents

    def _decode(
        self, request: GenerationRequest, latents: Latents, run: RunRecord, writer: ClipWriter | None
    ) -> Clip | None:
        """Turn the latents into samples and frames; None where they are another rank's."""
        tier = TIERS[request.tier]
        size = (request.width, request.height)
        output_size = None if size == (tier.width, tier.height) else size
        samples = torch.empty(0)
        # The sound comes first, so that a writer can encode the pictures while they are made.
        with run.stage("decode_audio", 1):
            if self.groups.is_output:
                samples = self._decode_audio(latents.audio)
                if writer is not None:
                    writer.begin(samples, (tier.width, tier.height), output_size)
        frames = torch.empty(0, dtype=torch.uint8)
        num_windows = len(self.video_decoder.windows(latents.video)) if self._is_decoding else 1
        with run.stage("decode_video", num_windows) as done:
            if self._is_decoding:
                frames = torch.empty(NUM_FRAMES, tier.height, tier.width, 3, dtype=torch.uint8)
                for window, rows in enumerate(self._decode_video(latents.video, frames, run), start=1):
                    if writer is not None and self.groups.is_output:
                        writer.add(rows)
                    done(window)
        return Clip(frames, samples, output_size) if self.groups.is_output else None

    def _decode_audio(self, latent: Tensor) -> Tensor:
        """Return the samples of a clip."""
        with self._stage.holding(self.audio_decoder.module):
            samples_CW = fourier_resample(self.audio_decoder.decode(latent))[0].cpu()
        return samples_CW.T.contiguous()

    def _decode_video(self, latent: Tensor, frames: Tensor, run: RunRecord) -> Iterator[Tensor]:
        """Fill the clip's frames and yield each window's, or make some of them for the output rank."""
        first = 0
        with self._stage.holding(self.video_decoder.module):
            for chunk in self.video_decoder.decode(latent, self.groups.windows):
                last = first + len(chunk)
                frames[first:last] = chunk
                yield frames[first:last]
                first = last
                if self.groups.replica.size == 1:  # ranks that share windows stop together, after them
                    run.check()
