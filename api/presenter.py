"""Turns the rows of a job into the video object that clients see.

Pure: everything that needs the database (the asset, the place in the queue, the estimate) comes in. Times of
OpenAI's members are Unix seconds; the farm's own are RFC 3339 in UTC with milliseconds.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from api.members import MODEL_ID
from api.schemas import AudioFacts, Conditioning, CreatedWebhook, Urls, Video, VideoError, VideoFacts
from farm.jobs.job import Asset, Job
from farm.jobs.states import State, openai_status
from magi2.contract import CLIP_SECONDS, FPS, NUM_FRAMES, SAMPLE_RATE_HZ, TIERS, GenerationRequest

AUDIO_CHANNELS = 2
POLL_QUEUED_MS, POLL_RUNNING_MS, POLL_NEAR_END_MS, POLL_MAX_MS = 1000, 2000, 500, 10_000
NEAR_END_S = 5.0
# A client should come back about twenty times over what is left of a long render.
POLLS_PER_ETA = 20


@dataclass(frozen=True)
class View:
    """A job with what was read beside it."""

    job: Job
    video: Asset | None = None
    queue_position: int | None = None
    eta_s: float | None = None


def present(view: View, base_url: str, webhook: CreatedWebhook | None = None) -> Video:
    """Build the video object of a job."""
    job = view.job
    request = GenerationRequest.from_json(job.params)
    tier = TIERS[request.tier]
    result = job.result or {}
    is_done = job.state is State.SUCCEEDED
    return Video(
        id=job.id,
        model=MODEL_ID,
        status=openai_status(job.state),  # type: ignore[arg-type] # the table holds just these four words
        progress=100 if is_done else min(job.progress, 99),
        created_at=int(job.created_at.timestamp()),
        completed_at=_unix(job.finished_at) if is_done else None,
        expires_at=_unix(view.video.expires_at) if is_done and view.video else None,
        seconds=str(CLIP_SECONDS),
        size=f"{tier.width}x{tier.height}",
        prompt=job.prompt,
        error=_error(job),
        state=job.state.value,
        phase=job.phase if job.is_active else None,
        step=job.step,
        total_steps=job.steps,
        eta_s=None if job.is_finished else view.eta_s,
        queue_position=view.queue_position,
        attempt=job.epoch,
        max_attempts=job.max_attempts,
        retry_count=job.retry_count,
        profile=job.profile,
        group=job.group_id,
        priority=job.priority,
        seed=job.seed,
        num_frames=NUM_FRAMES,
        fps=float(FPS),
        resolution=tier.name,
        has_input_reference=job.input_asset_id is not None,
        metadata=job.metadata,
        user=job.user_tag,
        queued_at=_iso(job.queued_at),
        started_at=_iso(job.started_at) if job.started_at else None,
        finished_at=_iso(job.finished_at) if job.finished_at else None,
        cancel_requested_at=_iso(job.cancel_requested_at) if job.cancel_requested_at else None,
        expires_in=job.expires_in_s,
        inference_time_s=_inference_time_s(job, result),
        queue_time_s=_seconds_between(job.queued_at, job.started_at),
        stage_durations=result.get("stage_durations") or {},
        peak_memory_mb=result.get("peak_memory_mb"),
        conditioning=Conditioning(**result["conditioning"]) if result.get("conditioning") else None,
        acceleration=request.acceleration,
        deterministic=request.deterministic,
        notices=job.notices,
        media_type=view.video.media_type if view.video else None,
        bytes=view.video.bytes if view.video else None,
        sha256=view.video.sha256 if view.video else None,
        video=VideoFacts(
            width=request.width,
            height=request.height,
            frames=NUM_FRAMES,
            fps=float(FPS),
            duration_s=float(CLIP_SECONDS),
        ),
        audio=AudioFacts(sample_rate=SAMPLE_RATE_HZ, channels=AUDIO_CHANNELS, duration_s=float(CLIP_SECONDS)),
        urls=_urls(job, base_url),
        webhook=webhook,
    )


def etag_of(job: Job) -> str:
    """Return the entity tag: it changes with every event of the job."""
    return f'"{job.seq}"'


def poll_after_ms(view: View) -> int | None:
    """Say when to ask again: soon near the end, less often when much is left; None for a finished job."""
    job = view.job
    if job.is_finished:
        return None
    if job.state is State.QUEUED:
        return POLL_QUEUED_MS
    if job.state is State.UPLOADING or (view.eta_s is not None and view.eta_s <= NEAR_END_S):
        return POLL_NEAR_END_MS
    if view.eta_s is None:
        return POLL_RUNNING_MS
    return min(max(int(view.eta_s * 1000 / POLLS_PER_ETA), POLL_RUNNING_MS), POLL_MAX_MS)


def _error(job: Job) -> VideoError | None:
    if job.state not in {State.FAILED, State.CANCELED, State.EXPIRED}:
        return None
    stored = job.error or {}
    return VideoError(
        code=stored.get("code", job.state.value),
        message=stored.get("message", f"the video was {job.state.value}"),
        retryable=bool(stored.get("retryable", False)),
    )


def _urls(job: Job, base_url: str) -> Urls:
    here = f"{base_url}/v1/videos/{job.id}"
    content = f"{here}/content" if job.state is State.SUCCEEDED else None
    return Urls(
        content=content,
        thumbnail=f"{content}?variant=thumbnail" if content else None,
        events=None,
        cancel=None if job.is_finished else f"{here}/cancel",
    )


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


def _iso(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
