"""The small HTTP client behind `submit`, `jobs` and `demo`: the public API and nothing else.

URL and key come from the command line or, by default, from the state folder of embedded mode. Failures become
`CommandError` with the exit code of their kind. It retries only reads, and only while it waits for a job.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx

from farm.commands.exits import CommandError, Exit
from farm.embedded.state import Access

TIMEOUT_S = 30.0
POLL_S = 0.25
STREAM_SILENCE_S = 45.0  # three of the farm's pings
FINAL_STATUSES = frozenset({"completed", "failed"})
Video = dict[str, Any]


class FarmClient:
    """A client of one farm with one key; a context, whose end closes its connections."""

    def __init__(self, access: Access) -> None:
        """Prepare; nothing is contacted yet."""
        self._url = access.url.rstrip("/")
        self._http = httpx.Client(
            base_url=self._url,
            headers={"Authorization": f"Bearer {access.key}"},
            timeout=TIMEOUT_S,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def submit(self, fields: Mapping[str, Any], image: Path | None = None) -> Video:
        """Submit a job; with an image as multipart."""
        if image is None:
            return self._json("POST", "/v1/videos", json=dict(fields))
        form = {name: str(value) for name, value in fields.items()}
        with image.open("rb") as file:
            return self._json("POST", "/v1/videos", data=form, files={"input_reference": (image.name, file)})

    def get(self, job_id: str) -> Video:
        """Return the video object."""
        return self._json("GET", f"/v1/videos/{job_id}")

    def list(self, query: Mapping[str, Any]) -> list[Video]:
        """Return one page of jobs."""
        videos: list[Video] = self._json("GET", "/v1/videos", params=dict(query))["data"]
        return videos

    def cancel(self, job_id: str) -> Video:
        """Ask for the end of a job."""
        return self._json("POST", f"/v1/videos/{job_id}/cancel")

    def retry(self, job_id: str, changes: Mapping[str, Any]) -> Video:
        """Queue a job that did not succeed again."""
        return self._json("POST", f"/v1/videos/{job_id}/retry", json=dict(changes))

    def read(self, path: str, **query: Any) -> dict[str, Any]:
        """Return what a path of the API answers."""
        return self._json(
            "GET", path, params={name: value for name, value in query.items() if value is not None}
        )

    def act(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Post to a path of the API and return what it answers."""
        return self._json("POST", path, json=dict(body or {}))

    def events(self, job_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Follow the event stream of a job: the name and the data of each event, until the farm ends it."""
        path = f"/v1/videos/{job_id}/events"
        timeout = httpx.Timeout(TIMEOUT_S, read=STREAM_SILENCE_S)
        with self._typed_errors(), self._http.stream("GET", path, timeout=timeout) as answer:
            if answer.is_error:
                answer.read()
            _raise_for(answer)
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                if line:
                    fields[name] = value
                elif "event" in fields:
                    yield fields["event"], json.loads(fields["data"])
                    fields = {}

    def wait(
        self,
        job_id: str,
        *,
        timeout_s: float | None = None,
        show: Callable[[Video], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Video:
        """Poll until the job is finished; a farm that is away for a moment is asked again.

        Args:
            job_id: The job.
            timeout_s: Give up after this long; None waits for ever.
            show: Called with every video object that was read.
            meanwhile: Called between polls.

        Raises:
            CommandError: The time is over (124), or the key is refused.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                video = self.get(job_id)
            except CommandError as error:
                if error.code is not Exit.UNREACHABLE:
                    raise
            else:
                if show is not None:
                    show(video)
                if video["status"] in FINAL_STATUSES:
                    return video
            if deadline is not None and time.monotonic() > deadline:
                raise CommandError(
                    f"{job_id} was not finished after {timeout_s:g} s; it goes on", Exit.TIMEOUT
                )
            if meanwhile is not None:
                meanwhile()
            time.sleep(POLL_S)

    def download(self, job_id: str, target: Path) -> None:
        """Write the finished clip to a file, which appears only when it is complete."""
        unfinished = target.with_name(target.name + ".part")
        path = f"/v1/videos/{job_id}/content"
        # It redirects to the store; the client drops the key there, since the host is another.
        with self._typed_errors(), self._http.stream("GET", path, follow_redirects=True) as answer:
            if answer.is_error:
                answer.read()
            _raise_for(answer)
            with unfinished.open("wb") as file:
                for chunk in answer.iter_bytes():
                    file.write(chunk)
        unfinished.replace(target)

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        with self._typed_errors():
            answer = self._http.request(method, path, **options)
        _raise_for(answer)
        body: dict[str, Any] = answer.json()
        return body

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise CommandError(
                f"the farm at {self._url} cannot be reached ({type(error).__name__}); "
                "start it with `magi2-farm up`, or name another with --url",
                Exit.UNREACHABLE,
            ) from None


def _raise_for(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    try:
        body = answer.json()
    except ValueError:
        body = {}
    lines = [_line(problem["loc"], problem["msg"]) for problem in body.get("errors") or []]
    message = "\n".join(lines) or body.get("detail") or f"HTTP {answer.status_code}"
    code = _EXIT_OF_STATUS.get(answer.status_code, Exit.FAILED)
    raise CommandError(message, code, reason=body.get("code"))


def _line(loc: str, msg: str) -> str:
    return msg if msg.startswith(f"{loc} ") else f"{loc}: {msg}"


_EXIT_OF_STATUS = {
    400: Exit.USAGE,
    413: Exit.USAGE,
    415: Exit.USAGE,
    422: Exit.USAGE,
    401: Exit.AUTH,
    403: Exit.AUTH,
    503: Exit.UNREACHABLE,
}
