"""A whole farm for end-to-end tests: api, ticker and worker as processes, seen through HTTP."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from farm.embedded.process import leashed, log_tail
from tests.service.embedded.processes import descendants, is_alive

ROOT = Path(__file__).parents[2]
MODULES = {
    "api": ["api"],
    "ticker": ["worker.ticker"],
}
POLL_S = 0.1
JOB_POLL_S = 0.25


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
    """Return the first true answer, or fail saying what never happened."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(POLL_S)
    return answer


class FarmProcesses:
    """The roles of one farm; each may be killed and started again."""

    def __init__(
        self, environment: Mapping[str, str], key: str, logs: Path, *, profile: str = "tiny-cpu"
    ) -> None:
        self._environment = environment
        self._modules = MODULES | {"worker": ["worker", "--profile", profile]}
        self._logs = logs
        logs.mkdir()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{environment['FARM_API_PORT']}",
            headers={"Authorization": f"Bearer {key}"},
            timeout=30,
            trust_env=False,
        )

    def start(self, *roles: str) -> None:
        """Start roles; an api is waited for until it is ready."""
        for role in roles:
            with (self._logs / f"{role}.log").open("ab") as log:
                self._running[role] = subprocess.Popen(
                    leashed([sys.executable, "-m", *self._modules[role]]),
                    cwd=ROOT,
                    env=dict(self._environment),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        if "api" in roles:
            wait_until(self._is_ready, "a ready api", 60)

    def kill(self, role: str) -> None:
        """End a role as a crash does."""
        process = self._running.pop(role)
        process.kill()
        process.wait()

    def kill_engine(self) -> int:
        """Kill the rank process of the worker, or the last one of several, and return its number."""
        rank = max(wait_until(self._ranks, "a rank process", 60))
        os.kill(rank, signal.SIGKILL)
        return rank

    def stop(self) -> None:
        """End everything and see that no rank was left behind."""
        self.http.close()
        ranks = self._ranks()
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        wait_until(lambda: not any(map(is_alive, ranks)), "the end of the ranks")

    def submit(self, fields: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Submit a job and return its video object."""
        body = {"data": fields} if "files" in options else {"json": fields}
        answer = self.http.post("/v1/videos", **body, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def video(self, job_id: str) -> dict[str, Any]:
        answer = self.http.get(f"/v1/videos/{job_id}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait_for(
        self, job_id: str, reached: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = 600
    ):
        """Poll a job until something holds for it, and return it; a failure tells all that happened to it."""

        deadline = time.monotonic() + timeout_s
        while not reached(video := self.video(job_id)):
            assert video["status"] != "failed", f"{video['error']} {self.logs()}"
            if time.monotonic() > deadline:
                happened = self.http.get(f"/v1/videos/{job_id}/timeline").text
                raise AssertionError(
                    f"not within {timeout_s:.0f} s: {what}; {video} {happened} {self.logs()}"
                )
            time.sleep(JOB_POLL_S)
        return video

    def wait_for_denoising(self, job_id: str, attempt: int) -> dict[str, Any]:
        """Poll until an attempt is in the middle of its work."""
        return self.wait_for(
            job_id,
            lambda video: video["attempt"] == attempt and video["phase"] == "denoise",
            f"denoising in attempt {attempt}",
        )

    def download(self, job_id: str, target: Path) -> Path:
        """Fetch the clip by the content call, as a client does."""
        answer = self.http.get(f"/v1/videos/{job_id}/content", follow_redirects=True)
        assert answer.status_code == 200, answer.text
        target.write_bytes(answer.content)
        return target

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"--- {path.name}\n{log_tail(path)}" for path in sorted(self._logs.iterdir()))

    def _ranks(self) -> set[int]:
        worker = self._running.get("worker")
        return {pid for pid in descendants(worker.pid) if _runs(pid, "worker.rank")} if worker else set()

    def _is_ready(self) -> bool:
        assert self._running["api"].poll() is None, self.logs()
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False


def _runs(pid: int, module: str) -> bool:
    try:
        return module in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
