"""Rows of jobs for tests that need no database: a complete `Job` with what matters to the test changed."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from farm.jobs.job import Job
from farm.jobs.states import State
from magi2.contract import GenerationRequest

AT = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
REQUEST = GenerationRequest(prompt="A red fox walks.", tier="272p", num_inference_steps=4, seed=7)
RUNNING = Job(
    id="video_01h00000000000000000000000",
    account_id="acct_01h00000000000000000000000",
    state=State.RUNNING,
    phase="denoise",
    profile="tiny-cpu",
    requested_profile="auto",
    priority=0,
    prompt=REQUEST.prompt,
    params=REQUEST.to_json(),
    contract_version=1,
    wave_key="272p/4/det=0",
    input_asset_id=None,
    seed=7,
    steps=4,
    step=2,
    progress=47,
    epoch=1,
    attempts=1,
    infra_losses=0,
    preemptions=0,
    crash_count=0,
    engine_errors=0,
    upload_failures=0,
    crashed_waves=0,
    crash_groups=[],
    max_attempts=3,
    retry_count=0,
    group_id="group-a",
    avoid_group=None,
    lease_until=AT,
    not_before=AT,
    queue_deadline=AT,
    expires_in_s=86_400,
    exec_timeout_s=900,
    attempt_deadline=AT,
    cancel_requested_at=None,
    cancel_by=None,
    deleted_at=None,
    error=None,
    result=None,
    notices=[],
    metadata={},
    user_tag=None,
    retention_s=604_800,
    seq=3,
    rank_at=AT,
    created_at=AT,
    queued_at=AT,
    started_at=AT,
    running_at=AT,
    uploading_at=None,
    finished_at=None,
)


def running_job(**changes: Any) -> Job:
    """Return a job on its first attempt, with some columns changed."""
    return replace(RUNNING, **changes)
