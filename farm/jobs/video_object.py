"""A job as the video object that clients see: in the answers of the api and in full webhook messages.

Pure: everything that needs the database (the object in the store, the place in the queue, the estimate) comes
in. Times of OpenAI's members are Unix seconds; the farm's own are RFC 3339 in UTC with milliseconds.
"""

from datetime import datetime
from typing import Any

from farm.jobs.job import Asset, Job
from farm.jobs.states import TERMINAL, State, openai_status
from magi2.contract import CLIP_SECONDS, FPS, NUM_FRAMES, SAMPLE_RATE_HZ, TIERS, GenerationRequest

MODEL_ID = "magi-2-preview"
AUDIO_CHANNELS = 2


def video_object(
    job: Job, video: Asset | None = None, *, queue_position: int | None = None, eta_s: float | None = None
) -> dict[str, Any]:
    """Return every member but `urls`, which depend on where clients reach the farm."""
    request = GenerationRequest.from_json(job.params)
    is_done = job.state is State.SUCCEEDED
    return {
        **_openai_members(job, request, video if is_done else None),
        **_request_members(job, request),
        **_progress_members(job),
        **_result_members(job, video),
        "queue_position": queue_position,
        "eta_s": None if job.is_finished else eta_s,
    }


def video_urls(job_id: str, state: State, base_url: str) -> dict[str, str | None]:
    """Return where to go next; null while there is nothing at that place."""
    here = f"{base_url}/v1/videos/{job_id}"
    content = f"{here}/content" if state is State.SUCCEEDED else None
    return {
        "content": content,
        "thumbnail": f"{content}?variant=thumbnail" if content else None,
        "events": f"{here}/events",
        "cancel": None if state in TERMINAL else f"{here}/cancel",
    }


def rfc3339(at: datetime) -> str:
    """Return an instant as the farm's own members show it."""
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _openai_members(job: Job, request: GenerationRequest, video: Asset | None) -> dict[str, Any]:
    tier = TIERS[request.tier]
    is_done = job.state is State.SUCCEEDED
    return {
        "id": job.id,
        "object": "video",
        "model": MODEL_ID,
        "status": openai_status(job.state),
        "progress": 100 if is_done else min(job.progress, 99),
        "created_at": int(job.created_at.timestamp()),
        "completed_at": _unix(job.finished_at) if is_done else None,
        "expires_at": _unix(video.expires_at) if video else None,
        "seconds": str(CLIP_SECONDS),
        "size": f"{tier.width}x{tier.height}",
        "prompt": job.prompt,
        "error": _error(job),
        "remixed_from_video_id": None,
    }


def _request_members(job: Job, request: GenerationRequest) -> dict[str, Any]:
    return {
        "profile": job.profile,
        "priority": job.priority,
        "seed": job.seed,
        "num_frames": NUM_FRAMES,
        "fps": float(FPS),
        "resolution": request.tier,
        "has_input_reference": job.input_asset_id is not None,
        "metadata": job.metadata,
        "user": job.user_tag,
        "batch_id": job.batch_id,
        "reuse": job.reuse,
        "expires_in": job.expires_in_s,
        "max_attempts": job.max_attempts,
        "acceleration": request.acceleration,
        "deterministic": request.deterministic,
        "notices": job.notices,
        "video": {
            "width": request.width,
            "height": request.height,
            "frames": NUM_FRAMES,
            "fps": float(FPS),
            "duration_s": float(CLIP_SECONDS),
        },
        "audio": {
            "sample_rate": SAMPLE_RATE_HZ,
            "channels": AUDIO_CHANNELS,
            "duration_s": float(CLIP_SECONDS),
        },
    }


def _progress_members(job: Job) -> dict[str, Any]:
    return {
        "state": job.state.value,
        "phase": job.phase if job.is_active else None,
        # The last report of a quick clip may be older than its last step.
        "step": job.steps if job.state is State.SUCCEEDED else job.step,
        "total_steps": job.steps,
        "attempt": job.epoch,
        "retry_count": job.retry_count,
        "group": job.group_id,
        "queued_at": rfc3339(job.queued_at),
        "started_at": _rfc3339(job.started_at),
        "finished_at": _rfc3339(job.finished_at),
        "cancel_requested_at": _rfc3339(job.cancel_requested_at),
        "queue_time_s": _seconds_between(job.queued_at, job.started_at),
    }


def _result_members(job: Job, video: Asset | None) -> dict[str, Any]:
    result = job.result or {}
    return {
        "inference_time_s": _inference_time_s(job, result),
        "stage_durations": result.get("stage_durations") or {},
        "peak_memory_mb": result.get("peak_memory_mb"),
        "peak_host_pss_mb": result.get("peak_host_pss_mb"),
        "conditioning": result.get("conditioning") or None,
        "media_type": video.media_type if video else None,
        "bytes": video.bytes if video else None,
        "sha256": video.sha256 if video else None,
    }


def _error(job: Job) -> dict[str, Any] | None:
    if job.state not in {State.FAILED, State.CANCELED, State.EXPIRED}:
        return None
    stored = job.error or {}
    return {
        "code": stored.get("code", job.state.value),
        "message": stored.get("message", f"the video was {job.state.value}"),
        "retryable": bool(stored.get("retryable", False)),
    }


def _inference_time_s(job: Job, result: dict[str, Any]) -> float | None:
    """Return what the engine measured, else the time from the first report of work to the upload."""
    measured = result.get("inference_time_s")
    if measured is not None:
        return float(measured)
    return _seconds_between(job.running_at, job.uploading_at)


def _seconds_between(start: datetime | None, end: datetime | None) -> float | None:
    if start is None or end is None or end < start:
        return None
    return round((end - start).total_seconds(), 3)


def _unix(at: datetime | None) -> int | None:
    return int(at.timestamp()) if at else None


def _rfc3339(at: datetime | None) -> str | None:
    return rfc3339(at) if at else None
