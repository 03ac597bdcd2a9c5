"""The served model: every limit of a request, and what each profile does with one."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from api.auth import requires
from api.deps import ServicesDep
from api.members import (
    EXTRA_PARAMS,
    MAX_ATTEMPTS,
    MAX_EXPIRES_IN_S,
    MAX_METADATA_KEY,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE,
    MIN_EXPIRES_IN_S,
)
from api.schemas import ModelInfo, ModelList, ProfileInfo
from farm.accounts import Principal
from farm.groups import live_fingerprints
from farm.images import MAX_IMAGE_BYTES, MAX_PIXELS, MAX_SIDE
from farm.jobs.video_object import MODEL_ID
from farm.profiles import Profile
from magi2.contract import (
    CLIP_SECONDS,
    CONTRACT_VERSION,
    FPS,
    MAX_OUTPUT_SIDE,
    MAX_PROMPT_CHARS,
    MAX_PROMPT_TOKENS,
    MAX_SEED,
    MAX_STEPS,
    MIN_IMAGE_SIDE,
    MIN_OUTPUT_SIDE,
    NUM_FRAMES,
    SAMPLE_RATE_HZ,
    TIERS,
)

router = APIRouter(prefix="/v1", tags=["models"])


OWNER = "sand-ai"


@router.get("/models")
async def list_models(
    services: ServicesDep, _: Annotated[Principal, Depends(requires("videos:read"))]
) -> ModelList:
    """Return the one model with its limits, so that clients need not guess."""
    engines = await services.read(live_fingerprints)
    profiles = [_profile_info(profile, engines) for profile in services.profiles.by_name.values()]
    model = ModelInfo(
        id=MODEL_ID,
        created=int(services.started_at.timestamp()),
        owned_by=OWNER,
        contract_version=CONTRACT_VERSION,
        limits=_limits(),
        profiles=profiles,
    )
    return ModelList(data=[model])


def _profile_info(profile: Profile, engines: dict[str, dict[str, Any] | None]) -> ProfileInfo:
    limits = profile.limits()
    return ProfileInfo(
        name=profile.name,
        is_live=profile.name in engines,
        engine=engines.get(profile.name),
        default_resolution=limits.default_tier,
        max_resolution=limits.max_tier,
        default_num_inference_steps=limits.default_steps,
        max_num_inference_steps=limits.max_steps,
        accelerations=list(limits.accelerations),
        default_acceleration=limits.default_acceleration,
        deterministic=limits.deterministic,
        execution_timeout_s=profile.execution_timeout_s,
        max_execution_timeout_s=profile.execution_timeout_cap_s,
        jobs_at_a_time=profile.wave_size,
    )


def _limits() -> dict[str, Any]:
    return {
        "prompt": {"max_characters": MAX_PROMPT_CHARS, "max_tokens": MAX_PROMPT_TOKENS},
        "seconds": CLIP_SECONDS,
        "num_frames": NUM_FRAMES,
        "fps": float(FPS),
        "audio": {"sample_rate": SAMPLE_RATE_HZ, "channels": 2},
        "sizes": {tier.name: f"{tier.width}x{tier.height}" for tier in TIERS.values()},
        "num_inference_steps": {"min": 1, "max": MAX_STEPS},
        "seed": {"min": 0, "max": MAX_SEED},
        "n": 1,
        "output_side": {"min": MIN_OUTPUT_SIDE, "max": MAX_OUTPUT_SIDE, "multiple_of": 2},
        "input_reference": {
            "max_images": 1,
            "formats": ["png", "jpeg", "webp"],
            "max_bytes": MAX_IMAGE_BYTES,
            "max_pixels": MAX_PIXELS,
            "max_side": MAX_SIDE,
            "min_side": MIN_IMAGE_SIDE,
            "max_aspect": {tier.name: tier.max_aspect for tier in TIERS.values()},
        },
        "extra_params": list(EXTRA_PARAMS),
        "expires_in": {"min": MIN_EXPIRES_IN_S, "max": MAX_EXPIRES_IN_S},
        "max_attempts": {"min": 1, "max": MAX_ATTEMPTS},
        "metadata": {
            "max_pairs": MAX_METADATA_PAIRS,
            "max_key": MAX_METADATA_KEY,
            "max_value": MAX_METADATA_VALUE,
        },
    }
