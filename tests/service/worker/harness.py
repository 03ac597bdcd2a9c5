"""Parts of the worker's tests: jobs to submit, agents in threads and processes, waiting with a deadline."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import Engine, select

from farm.accounts import ensure_account
from farm.db import tables
from farm.db.session import unit_of_work
from farm.groups import GroupStatus, Wish, get_group, set_wanted_state
from farm.jobs import lifecycle
from farm.jobs.claim import claim
from farm.jobs.control import request_cancel
from farm.jobs.job import Asset, Attempt, Job, NewAsset, Rules
from farm.jobs.states import State
from farm.jobs.submit import Submission, submit
from farm.profiles import Profile, Profiles
from farm.settings import Settings
from magi2.contract import CONTRACT_VERSION, GenerationRequest
from worker.agent import Agent, AgentConfig, AgentError
from worker.group import GroupTimes
from worker.liveness import StallLimits

DEADLINE_S = 60.0
PROFILE = "tiny-cpu"
# Short leases, and the engines of the tests; the working directory is not that of the sources.
OF_WORKERS = {
    "FARM_WORKER__LEASE_S": "4",
    "FARM_WORKER__HEARTBEAT_S": "0.3",
    "MAGI2_TESTING": "1",
    "PYTHONPATH": str(Path(__file__).parents[3]),
}
QUICK = GroupTimes(
    stall=StallLimits(load_s=30, first_step_s=20, step_s=20, other_s=20),
    cancel_grace_s=10,
    late_rank_s=0.5,
    ping_s=10,
    term_s=1,
)


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """Return the first true answer, or fail saying what never happened."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}")


def chaos(**script: Any) -> str:
    """Return a prompt that is a script of the chaos engine."""
    return "chaos " + json.dumps(script)


@dataclass
class Bench:
    """A database with one account, seen as a client and a ticker would."""

    database: Engine
    rules: Rules
    account_id: str = field(init=False)

    def __post_init__(self) -> None:
        with unit_of_work(self.database) as conn:
            self.account_id = ensure_account(conn, "tests")

    def submit(
        self,
        prompt: str = "A red fox walks through fresh snow.",
        *,
        steps: int = 3,
        profile: str = PROFILE,
        image: NewAsset | None = None,
        output: tuple[int, int] | None = None,
        **members: Any,
    ) -> Job:
        """Queue one job."""
        request = GenerationRequest(prompt, "272p", steps, seed=7, has_image=image is not None)
        if output is not None:
            request = replace(request, output_width=output[0], output_height=output[1])
        submission = Submission(
            account_id=self.account_id,
            request=request,
            profile=profile,
            exec_timeout_s=members.pop("exec_timeout_s", 900),
            retention_s=86_400,
            input=image,
            **members,
        )
        with unit_of_work(self.database) as conn:
            return submit(conn, submission)

    def cancel(self, job: Job) -> None:
        """Ask for the end of a job."""
        with unit_of_work(self.database) as conn:
            request_cancel(conn, self.account_id, job.id, "test")

    def job(self, job_id: str) -> Job:
        """Read a job."""
        with unit_of_work(self.database) as conn:
            return Job.from_row(
                conn.execute(select(tables.job).where(tables.job.c.id == job_id)).mappings().one()
            )

    def sweep(self) -> None:
        """Take back what nobody holds any more, and let no requeued job wait for its backoff."""
        with unit_of_work(self.database) as conn:
            lifecycle.reap_leases(conn, rules=self.rules)
            # A row that is due already is not written: a claim at this moment would skip it as locked.
            backing_off = tables.job.c.not_before > sqlalchemy.func.now()
            conn.execute(
                sqlalchemy.update(tables.job)
                .where(tables.job.c.state == State.QUEUED, backing_off)
                .values(not_before=sqlalchemy.func.now())
            )

    def wait(self, job: Job, *states: State, timeout_s: float = DEADLINE_S) -> Job:
        """Sweep until the job is in one of the states, and return it."""

        def reached() -> Job | None:
            self.sweep()
            now = self.job(job.id)
            return now if now.state in states else None

        found: Job = wait_until(reached, f"{job.id} becoming {' or '.join(states)}", timeout_s)
        return found

    def wait_for_step(self, job: Job, step: int = 1) -> Job:
        """Wait until the job is denoising and a heartbeat has said so."""

        def reached() -> Job | None:
            now = self.job(job.id)
            return now if now.state == State.RUNNING and now.phase == "denoise" and now.step >= step else None

        found: Job = wait_until(reached, f"{job.id} reaching step {step}")
        return found

    def assets(self, job: Job) -> dict[str, Asset]:
        """Return the public objects of a job by kind."""
        with unit_of_work(self.database) as conn:
            rows = conn.execute(select(tables.asset).where(tables.asset.c.job_id == job.id)).mappings()
            return {row["kind"]: Asset(**row) for row in rows}

    def attempts(self, job: Job) -> list[Attempt]:
        """Return the attempts of a job in order."""
        with unit_of_work(self.database) as conn:
            query = select(tables.job_attempt).where(tables.job_attempt.c.job_id == job.id)
            return [
                Attempt(**row) for row in conn.execute(query.order_by(tables.job_attempt.c.epoch)).mappings()
            ]

    def event_types(self, job: Job) -> list[str]:
        """Return the timeline's types, after checking that it has no gaps."""
        with unit_of_work(self.database) as conn:
            query = select(tables.job_event.c.seq, tables.job_event.c.type)
            rows = conn.execute(
                query.where(tables.job_event.c.job_id == job.id).order_by(tables.job_event.c.seq)
            ).all()
        assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
        return [row.type for row in rows]

    def group_state(self, group_id: str) -> str | None:
        """Return what the row of a group says."""
        with unit_of_work(self.database) as conn:
            query = select(tables.worker_group.c.state).where(tables.worker_group.c.id == group_id)
            return conn.execute(query).scalar_one_or_none()

    def take_over(self, job: Job, group_id: str) -> Job:
        """Do at once what a lost lease leads to: the job goes back to the queue and to another group."""
        with unit_of_work(self.database) as conn:
            row = tables.job.c.id == job.id
            past = sqlalchemy.func.now() - timedelta(seconds=1)
            conn.execute(sqlalchemy.update(tables.job).where(row).values(lease_until=past))
            assert lifecycle.reap_leases(conn, rules=self.rules) == 1
            conn.execute(sqlalchemy.update(tables.job).where(row).values(not_before=past))
            claimed = claim(conn, group_id, PROFILE, "boot_other", [CONTRACT_VERSION], rules=self.rules)
            assert claimed is not None
            return claimed.job

    def wish(self, group_id: str, wanted: str | None) -> None:
        """Ask something of a group, as an operator does."""
        with unit_of_work(self.database) as conn:
            set_wanted_state(conn, group_id, None if wanted is None else Wish(wanted), "test")

    def group(self, group_id: str) -> GroupStatus:
        """Return everything that is known of a group."""
        with unit_of_work(self.database) as conn:
            return get_group(conn, group_id)


class AgentThread:
    """An agent without Celery, in a thread of the test."""

    def __init__(
        self, settings: Settings, environment: Mapping[str, str], *, devices: int = 0, **overrides: Any
    ) -> None:
        profile = Profile(
            PROFILE,
            devices,
            deterministic=False,
            execution_timeout_s=900,
            default_tier="272p",
            default_steps=4,
        )
        config = AgentConfig(
            profile=profile,
            profiles=Profiles(deterministic=False, auto=(PROFILE,), by_name={PROFILE: profile}),
            devices=tuple(range(devices)),
            engine="chaos",
            environment=environment,
            times=QUICK,
            poll_s=0.1,
            restart_pauses_s=(0.1,),
        )
        self.agent = Agent(settings, replace(config, **overrides))
        self.failure: AgentError | None = None
        self.thread = threading.Thread(target=self._run, name="agent-loop")
        self.thread.start()

    def _run(self) -> None:
        try:
            self.agent.run_forever()
        except AgentError as failure:
            self.failure = failure

    @property
    def pids(self) -> list[int]:
        return self.agent.group.pids

    def wait_ready(self) -> None:
        wait_until(lambda: self.agent.group.is_ready or self.failure, "the ranks being loaded")

    def stop(self, *, now: bool = True) -> None:
        self.agent.drain(now=now)
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()


class WorkerProcess:
    """`python -m worker` as an operator starts it."""

    def __init__(self, environment: Mapping[str, str], cwd: Path, *arguments: str) -> None:
        cwd.mkdir(parents=True, exist_ok=True)
        self.log = cwd / f"worker-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "worker", "--profile", PROFILE, *(arguments or ("--engine", "chaos"))],
                env=dict(environment),
                cwd=cwd,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        """End it whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and they in turn."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        for child in children.get(pending.pop(), []):
            found.append(child)
            pending.append(child)
    return found
