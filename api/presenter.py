"""Turns the rows of a job into the answer that clients see, and says when they should look again.

What the members are is said in `farm/jobs/video_object.py`, which webhooks share. Pure: everything that needs
the database comes in.
"""

from dataclasses import dataclass

from api.schemas import CreatedWebhook, Urls, Video
from farm.jobs.job import Asset, Job
from farm.jobs.states import State
from farm.jobs.video_object import video_object, video_urls

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
    members = video_object(view.job, view.video, queue_position=view.queue_position, eta_s=view.eta_s)
    urls = Urls(**video_urls(view.job.id, view.job.state, base_url))
    return Video(**members, urls=urls, webhook=webhook)


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
