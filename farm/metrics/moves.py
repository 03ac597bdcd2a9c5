"""What is counted when a job moves. Called only after the transaction of the move has committed."""

from farm.jobs.job import Job
from farm.jobs.policy import FailureKind
from farm.jobs.states import ACTIVE, TERMINAL, State
from farm.metrics import families as of


def count_move(before: Job, after: Job, failure: str | None) -> None:
    """Count a move; `failure` is why an attempt ended, if it ended badly."""
    profile, tier = before.profile, str(before.params.get("tier", ""))
    if after.state is State.STARTING and after.started_at is not None:
        of.ATTEMPTS.labels(profile).inc()
        could_start_at = max(before.queued_at, before.not_before)
        waited_s = (after.started_at - could_start_at).total_seconds()
        of.QUEUE_WAIT.labels(profile, tier).observe(max(0.0, waited_s))
    if before.state in ACTIVE:
        _count_end_of_attempt(profile, failure)
    if after.state in TERMINAL:
        code = str((after.error or {}).get("code", ""))
        of.FINISHED.labels(profile, after.state.value, code).inc()
        if code == "poison_job":
            of.POISON.labels(profile).inc()
    if after.state is State.SUCCEEDED:
        _observe_success(after, profile, tier)


def count_fenced(profile: str) -> None:
    """Count a write that named a stale epoch."""
    of.FENCED.labels(profile).inc()


def count_wave(profile: str, num_ghosts: int, waited_s: float) -> None:
    """Count a wave when it is formed."""
    of.WAVES.labels(profile).inc()
    of.WAVE_GHOSTS.labels(profile).inc(num_ghosts)
    of.WAVE_WAIT.labels(profile).observe(max(0.0, waited_s))


def count_late_ghosts(profile: str, num_ghosts: int) -> None:
    """Count slots that lost their job after their wave was formed."""
    of.WAVE_GHOSTS.labels(profile).inc(max(0, num_ghosts))


def _count_end_of_attempt(profile: str, failure: str | None) -> None:
    if failure == FailureKind.AGENT_LOST:
        of.LEASE_LOST.labels(profile).inc()
    elif failure == FailureKind.PREEMPTED:
        of.PREEMPTIONS.labels(profile).inc()


def _observe_success(job: Job, profile: str, tier: str) -> None:
    stretches = (
        (of.RENDER_SECONDS, job.running_at, job.uploading_at),
        (of.UPLOAD_SECONDS, job.uploading_at, job.finished_at),
        (of.E2E_SECONDS, job.created_at, job.finished_at),
    )
    for histogram, begun_at, ended_at in stretches:
        if begun_at is not None and ended_at is not None:
            histogram.labels(profile, tier).observe(max(0.0, (ended_at - begun_at).total_seconds()))
    durations = (job.result or {}).get("stage_durations", {})
    for phase, seconds in durations.items():
        of.PHASE_SECONDS.labels(profile, phase).observe(seconds)
    if "denoise" in durations and job.steps > 0:
        of.STEP_SECONDS.labels(profile, tier).observe(durations["denoise"] / job.steps)
