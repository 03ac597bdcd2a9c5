"""Jobs with what is read beside them, for the answers: objects in the store, place in the queue, estimate.

Functions of the domain's kind: they take a connection, read and write nothing. `api/presenter.py` makes the
answers from what they return.
"""

import math

from sqlalchemy import Connection

from api.idempotency import Answer
from api.presenter import View, etag_of, poll_after_ms, present
from api.schemas import CreatedWebhook, Video, VideoList
from farm.errors import NotFoundError
from farm.ids import is_id
from farm.jobs.estimates import Estimator, queue_positions
from farm.jobs.job import Job
from farm.jobs.queries import ListQuery, assets_by_job, get_job, list_jobs
from farm.jobs.states import State
from magi2.values import shown


def checked_id(text: str, prefix: str = "video", what: str = "this video") -> str:
    """Return an id that has the form of one.

    Raises:
        NotFoundError: It cannot name anything, so the database is not asked.
    """
    if not is_id(text, prefix):
        raise NotFoundError(f"{what} ({shown(text)})")
    return text


def read_view(conn: Connection, estimator: Estimator, account_id: str, job_id: str) -> View:
    """Return a job of an account.

    Raises:
        NotFoundError: Unknown, deleted, or of another account.
    """
    return view_of(conn, estimator, get_job(conn, account_id, job_id))


def view_of(conn: Connection, estimator: Estimator, job: Job) -> View:
    """Return a job that was read already."""
    assets = assets_by_job(conn, job.account_id, [job.id], "video") if job.state is State.SUCCEEDED else {}
    estimate = estimator.estimate(conn, job)
    return View(job, assets.get(job.id), estimate.queue_position, estimate.eta_s)


def read_page(conn: Connection, account_id: str, query: ListQuery) -> tuple[list[View], bool]:
    """Read a page; `eta_s` stays null in lists, since it takes several queries for each job."""
    page = list_jobs(conn, account_id, query)
    finished = [job.id for job in page.jobs if job.state is State.SUCCEEDED]
    assets = assets_by_job(conn, account_id, finished, "video") if finished else {}
    queued = [job.id for job in page.jobs if job.state is State.QUEUED]
    positions = queue_positions(conn, queued) if queued else {}
    views = [View(job, assets.get(job.id), positions.get(job.id)) for job in page.jobs]
    return views, page.has_more


def page_of(videos: list[Video], *, has_more: bool) -> VideoList:
    """Return a page in OpenAI's form."""
    first_id, last_id = (videos[0].id, videos[-1].id) if videos else (None, None)
    return VideoList(data=videos, first_id=first_id, last_id=last_id, has_more=has_more)


def read_headers(view: View) -> dict[str, str]:
    """Return the headers of an answer that shows one video."""
    headers = {"ETag": etag_of(view.job), "Cache-Control": "private, no-cache"}
    after_ms = poll_after_ms(view)
    if after_ms is not None:
        headers["openai-poll-after-ms"] = str(after_ms)
        headers["Retry-After"] = str(math.ceil(after_ms / 1000))
    return headers


def answer_of(view: View, base_url: str, webhook: CreatedWebhook | None = None) -> Answer:
    """Return the answer that shows one video."""
    return Answer.of(present(view, base_url, webhook), headers=read_headers(view), job_id=view.job.id)
