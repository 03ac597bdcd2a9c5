"""The HTTP half of the client; see the package for what it promises."""

import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

Video = dict[str, Any]

FINAL = frozenset({"completed", "failed"})
TIMEOUT_S = 30.0
STREAM_SILENCE_S = 45.0  # three of the farm's pings
LONG_POLL_S = 20
MAX_TRIES = 5
MAX_PAUSE_S = 30.0
# Answers that say "later", not "no".
_LATER = frozenset({429, 502, 503, 504})
_IN_PROGRESS = "idempotency_in_progress"


class FarmError(Exception):
    """The farm refused a request; `errors` lists every problem that it has."""

    def __init__(self, status: int, code: str, message: str, errors: list[dict[str, str]]) -> None:
        super().__init__(f"{code}: {message}")
        self.status = status
        self.code = code
        self.message = message
        self.errors = errors


class WaitTimeoutError(Exception):
    """The video was not finished in time; it goes on."""


class Farm:
    """One farm and one API key; a context, whose end closes its connections."""

    def __init__(self, url: str, key: str = "", *, timeout_s: float = TIMEOUT_S) -> None:
        """Prepare; nothing is contacted yet."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def submit(
        self,
        prompt: str,
        *,
        image: Path | str | None = None,
        idempotency_key: str | None = None,
        **members: Any,
    ) -> Video:
        """Submit one video and return its object; members are those of `POST /v1/videos`."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        fields = {"prompt": prompt, **members}
        if image is None:
            return self._json("POST", "/v1/videos", headers=headers, json=fields)
        form = {name: _as_text(value) for name, value in fields.items()}
        files = {"input_reference": (Path(image).name, Path(image).read_bytes())}
        return self._json("POST", "/v1/videos", headers=headers, data=form, files=files)

    def get(self, video_id: str) -> Video:
        """Return a video object, whatever its state."""
        return self._json("GET", f"/v1/videos/{video_id}")

    def cancel(self, video_id: str) -> Video:
        """Stop a video."""
        return self._json(
            "POST", f"/v1/videos/{video_id}/cancel", headers={"Idempotency-Key": uuid.uuid4().hex}
        )

    def wait(
        self,
        video_id: str,
        *,
        timeout_s: float | None = None,
        show: Callable[[dict[str, Any]], None] | None = None,
    ) -> Video:
        """Return the video once it has ended, well or not.

        Args:
            video_id: Which one.
            timeout_s: Give up after so long; None waits for ever.
            show: Called with the data of every event or poll.

        Raises:
            WaitTimeoutError: It has not ended in time.
            FarmError: It does not exist, or the key may not see it.
        """
        until_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        last_id = ""
        while True:
            try:
                for name, event_id, data in self._events(video_id, last_id, until_s):
                    last_id = event_id or last_id
                    if show is not None:
                        show(data)
                    if name == "done" or (name == "snapshot" and data["status"] in FINAL):
                        return data
            except httpx.TransportError:
                pass  # a broken stream is resumed, or polling takes its place
            video = self._poll(video_id, until_s)
            if show is not None:
                show(video)
            if video["status"] in FINAL:
                return video
            if time.monotonic() >= until_s:
                raise WaitTimeoutError(f"{video_id} was not finished after {timeout_s:g} s; it goes on")

    def download(self, video_id: str, target: Path | str, *, variant: str = "video") -> Path:
        """Write the clip, or what was made of it, to a file that appears only when it is complete."""
        path = Path(target)
        unfinished = path.with_name(path.name + ".part")
        link = self._json("GET", f"/v1/videos/{video_id}/url", params={"variant": variant})["url"]
        # A plain request: the store refuses links that come with a key, and must not see it.
        with httpx.stream("GET", link, timeout=TIMEOUT_S) as answer:
            answer.raise_for_status()
            with unfinished.open("wb") as file:
                for chunk in answer.iter_bytes():
                    file.write(chunk)
        unfinished.replace(path)
        return path

    def _events(
        self, video_id: str, last_id: str, until_s: float
    ) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
        """Read the event stream; ends when the farm ends it or the time is over."""
        headers = {"Last-Event-ID": last_id} if last_id else {}
        silence_s = max(0.1, min(STREAM_SILENCE_S, until_s - time.monotonic()))
        limits = httpx.Timeout(TIMEOUT_S, read=silence_s)
        path = f"/v1/videos/{video_id}/events"
        with self._http.stream("GET", path, headers=headers, timeout=limits) as answer:
            if answer.is_error:
                answer.read()
                if answer.status_code in _LATER:
                    return
                _raise_for(answer)
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                name, _, value = line.partition(":")
                if line:
                    fields[name] = value.removeprefix(" ")
                elif "event" in fields:
                    yield fields["event"], fields.get("id"), json.loads(fields.get("data", "{}"))
                    fields = {}
                if time.monotonic() >= until_s:
                    return

    def _poll(self, video_id: str, until_s: float) -> Video:
        wait_s = int(max(0, min(LONG_POLL_S, until_s - time.monotonic())))
        return self._json("GET", f"/v1/videos/{video_id}", params={"wait": wait_s})

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Ask, and ask again where the farm or the network says "later"; every POST here carries a key."""
        for attempt in range(1, MAX_TRIES + 1):
            is_last = attempt == MAX_TRIES
            pause_s = min(0.5 * 2**attempt, MAX_PAUSE_S)
            try:
                answer = self._http.request(method, path, **options)
            except httpx.TransportError:
                if is_last:
                    raise
            else:
                if answer.is_success:
                    body: dict[str, Any] = answer.json()
                    return body
                if is_last or not _is_later(answer):
                    _raise_for(answer)
                pause_s = min(float(answer.headers.get("retry-after", pause_s)), MAX_PAUSE_S)
            time.sleep(pause_s)
        raise AssertionError("unreachable")


def _is_later(answer: httpx.Response) -> bool:
    if answer.status_code == 409:
        return _problem(answer).get("code") == _IN_PROGRESS
    return answer.status_code in _LATER


def _raise_for(answer: httpx.Response) -> None:
    body = _problem(answer)
    message = str(body.get("detail") or f"HTTP {answer.status_code}")
    raise FarmError(answer.status_code, str(body.get("code") or "unknown"), message, body.get("errors") or [])


def _problem(answer: httpx.Response) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
