"""What is made of a finished render: the check against the request, pictures, sound, sidecar, upload.

Nothing is stored before the check has passed, and every object goes under the key of its epoch, so an
upload of a stale attempt can never be taken for the result. A file that breaks the contract is an engine
error.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.jobs import lifecycle
from farm.jobs.job import NewAsset
from farm.jobs.lifecycle import Result
from farm.jobs.phases import Progress
from farm.jobs.policy import Failure, FailureKind
from farm.media import MediaError, extract_audio, inspect_output, make_sprite_sheet, make_thumbnail
from farm.storage import StorageError, output_key
from magi2.contract import CLIP_SECONDS, FPS, NUM_FRAMES, SAMPLE_RATE_HZ
from magi2.media.probe import Probe
from worker.attempt import Attempt, AttemptFailedError, CanceledError, Stopwatch, plain
from worker.engine_api import RenderResult

META_VERSION = 1
MEDIA_TYPES = {
    "video": "video/mp4",
    "thumb": "image/jpeg",
    "sprite": "image/jpeg",
    "audio": "audio/wav",
    "meta": "application/json",
}
FILE_NAMES = {
    "video": "video.mp4",
    "thumb": "thumb.jpg",
    "sprite": "sprite.jpg",
    "audio": "audio.wav",
    "meta": "meta.json",
}


@dataclass(frozen=True)
class Output:
    """A checked clip on this host, what was cut from it, and what the engine and the probe say of it."""

    video: Path
    thumbnail: Path
    thumbnail_size: tuple[int, int]
    sprite: Path
    sprite_size: tuple[int, int]
    audio: Path
    facts: Probe
    stats: dict[str, Any]


def check_output(attempt: Attempt, rendered: RenderResult) -> Output:
    """Hold the file against the contract and cut thumbnail, sprite sheet and sound from it.

    Raises:
        AttemptFailedError: It is not the clip that was asked for.
    """
    attempt.ensure_wanted()
    with Stopwatch(attempt, "check"):
        request = attempt.request
        video = Path(rendered.path)
        inspection = inspect_output(video, request.width, request.height)
        if inspection.problems or inspection.facts is None:
            raise AttemptFailedError(_breach(inspection.problems))
        thumbnail, sprite, audio = (
            attempt.folder / FILE_NAMES[kind] for kind in ("thumb", "sprite", "audio")
        )
        try:
            size, sprite_size = make_thumbnail(video, thumbnail), make_sprite_sheet(video, sprite)
            extract_audio(video, audio)
        except MediaError as error:
            raise AttemptFailedError(_breach([str(error)])) from error
    stats = dict(rendered.stats)
    return Output(video, thumbnail, size, sprite, sprite_size, audio, inspection.facts, stats)


def upload(attempt: Attempt, output: Output, fingerprint: dict[str, str]) -> Result:
    """Mark the job as uploading, store everything, and return what `succeed` records.

    Raises:
        AttemptFailedError: The store refused five times in a row.
        LeaseLostError: Somebody else has the job; nothing more may be uploaded.
    """
    attempt.ensure_wanted()
    lease = attempt.lease
    attempt.fenced(
        attempt.write(lambda conn: lifecycle.mark_uploading(conn, lease.job_id, lease.epoch)), "uploading"
    )
    attempt.note(Progress("upload"))
    width, height = attempt.request.width, attempt.request.height
    try:
        with Stopwatch(attempt, "upload"):
            video = _store(attempt, "video", output.video, width, height)
            thumb = _store(attempt, "thumb", output.thumbnail, *output.thumbnail_size)
            sprite = _store(attempt, "sprite", output.sprite, *output.sprite_size)
            audio = _store(attempt, "audio", output.audio)
            data = _result_data(attempt, output, video, fingerprint)
            meta = _store(attempt, "meta", _write_meta(attempt, data | {"probe": output.facts.to_json()}))
    except StorageError as error:
        failure = Failure(FailureKind.UPLOAD, detail={"during": "upload", "error": error.message})
        raise AttemptFailedError(failure) from error
    peak = output.stats.get("peak_memory_mb")
    return Result(
        data=data,
        assets=[video, thumb, sprite, audio, meta],
        timings=dict(attempt.timings),
        peak_memory_mb=None if peak is None else round(peak),
        measured=attempt.measured,
    )


def succeed(attempt: Attempt, result: Result) -> None:
    """Finish the job in one fenced transaction.

    Raises:
        CanceledError: A cancel came first and has been carried out.
        LeaseLostError: Somebody else has the job.
    """
    attempt.ensure_wanted()
    lease = attempt.lease
    accepted = attempt.write(lambda conn: lifecycle.succeed(conn, lease.job_id, lease.epoch, result))
    if not accepted and lease.cancel_requested:
        raise CanceledError
    attempt.fenced(accepted, "succeeded")


def _breach(problems: list[str]) -> Failure:
    return Failure(FailureKind.ENGINE_ERROR, detail=plain({"kind": "self_check", "problems": problems}))


def _store(
    attempt: Attempt, kind: str, path: Path, width: int | None = None, height: int | None = None
) -> NewAsset:
    job = attempt.claimed.job
    key = output_key(job.account_id, job.id, attempt.claimed.epoch, FILE_NAMES[kind], job.created_at)
    stored = attempt.with_store(lambda: attempt.tools.store.put(key, path, MEDIA_TYPES[kind]))
    digest = stored.sha256 or ""
    return NewAsset(kind, key, stored.bytes, digest, MEDIA_TYPES[kind], width=width, height=height)


def _result_data(
    attempt: Attempt, output: Output, video: NewAsset, fingerprint: dict[str, str]
) -> dict[str, Any]:
    """Return `job.result`: what the video object shows of a finished clip."""
    request = attempt.request
    seconds = float(CLIP_SECONDS)
    return {
        "media_type": video.media_type,
        "bytes": video.bytes,
        "sha256": video.sha256,
        "video": {
            "width": request.width,
            "height": request.height,
            "frames": NUM_FRAMES,
            "fps": float(FPS),
            "duration_s": seconds,
        },
        "audio": {"sample_rate": SAMPLE_RATE_HZ, "channels": 2, "duration_s": seconds},
        "inference_time_s": attempt.timings.get("render"),
        "stage_durations": output.stats.get("stage_durations", {}),
        "peak_memory_mb": output.stats.get("peak_memory_mb"),
        "peak_host_pss_mb": (attempt.measured or {}).get("host_pss_mb"),
        "conditioning": output.stats.get("conditioning", {}),
        "acceleration": request.acceleration,
        "acceleration_report": output.stats.get("acceleration"),
        "engine": fingerprint,
    }


def _write_meta(attempt: Attempt, data: dict[str, Any]) -> Path:
    """Write the sidecar: enough to make the same clip again, and to know that it is the same."""
    job = attempt.claimed.job
    meta = {
        "meta_version": META_VERSION,
        "id": job.id,
        "epoch": attempt.claimed.epoch,
        "profile": job.profile,
        "contract_version": job.contract_version,
        "request": attempt.request.to_json(),
        "seed": job.seed,
        "timings": attempt.timings,
        **data,
    }
    path = attempt.folder / FILE_NAMES["meta"]
    path.write_text(json.dumps(meta, indent=1, sort_keys=True), encoding="utf-8")
    return path
