"""Drives jobs through the real functions on a real database, one committed transaction per call."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from sqlalchemy import Engine, text

from farm import groups
from farm.accounts import ensure_account
from farm.db.session import unit_of_work
from farm.groups import Group
from farm.jobs import lifecycle
from farm.jobs.claim import claim
from farm.jobs.control import request_cancel
from farm.jobs.job import DEFAULT_RULES, Claimed, Job, NewAsset, Rules
from farm.jobs.lifecycle import Result
from farm.jobs.policy import Failure, FailureKind
from farm.jobs.states import State
from farm.jobs.submit import Submission, submit
from farm.jobs.wave_claim import ClaimedWave, claim_wave
from tests.job_rows import REQUEST
from tests.row_invariants import IN_FLIGHT, NEVER

PROFILE = "tiny-cpu"
GROUP = "group-a"
VIDEO = NewAsset("video", "v1/x/video.mp4", 10, "ab" * 32, "video/mp4", 448, 256)
RESULT = Result({"bytes": 10}, [VIDEO], {"render": 2.0}, 100)


@dataclass
class Driver:
    """A farm's database and one account in it."""

    engine: Engine
    rules: Rules = DEFAULT_RULES
    _names: Iterable[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        """Make the account that is used where a test names none."""
        self.account = self.new_account()

    def run(self, act: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function of the domain in a transaction of its own."""
        with unit_of_work(self.engine) as conn:
            return act(conn, *args, **options)

    def sql(self, statement: str, **values: Any) -> Any:
        """Run a statement of the test's own; rows come back as a list."""
        with unit_of_work(self.engine) as conn:
            result = conn.execute(text(statement), values)
            return result.all() if result.returns_rows else result.rowcount

    def new_account(self, **limits: Any) -> str:
        """Make an account."""
        return self.run(ensure_account, f"account-{next(self._names)}", limits)

    def submission(self, **changes: Any) -> Submission:
        """Return a plain submission with some members changed."""
        plain = Submission(self.account, REQUEST, PROFILE, exec_timeout_s=900, retention_s=604_800)
        return replace(plain, **changes)

    def submit(self, account: str | None = None, **changes: Any) -> Job:
        """Queue a job."""
        submission = self.submission(account_id=account or self.account, **changes)
        return self.run(submit, submission, rules=self.rules)

    def claim(
        self, group: str = GROUP, profile: str = PROFILE, versions: tuple[int, ...] = (1,)
    ) -> Claimed | None:
        """Claim the next job."""
        return self.run(claim, group, profile, f"boot-of-{group}", versions, rules=self.rules)

    def claim_wave(
        self, group: str = GROUP, profile: str = PROFILE, *, num_slots: int = 4
    ) -> ClaimedWave | None:
        """Claim the next wave."""
        boot = f"boot-of-{group}"
        return self.run(claim_wave, group, profile, boot, (1,), num_slots=num_slots, rules=self.rules)

    def job(self, job_id: str) -> Job:
        """Read a job as it is, hidden or not."""
        with unit_of_work(self.engine) as conn:
            row = conn.execute(text("SELECT * FROM job WHERE id = :id"), {"id": job_id}).mappings().one()
            return Job.from_row(row)

    def register(self, group: str = GROUP, profile: str = PROFILE, state: str = "ready") -> None:
        """Make a live group."""
        self.run(groups.register, Group(group, "host", profile, "", f"boot-of-{group}"))
        self.run(groups.heartbeat, group, f"boot-of-{group}", state)

    def reach(self, state: State, **changes: Any) -> Job:
        """Submit a job and bring it to a state by the shortest legal way."""
        job_id = self.submit(**changes).id
        if state is State.EXPIRED:
            self.age(job_id, queue_deadline="1 second")
            self.run(lifecycle.expire_queued)
        elif state is State.CANCELED:
            self.run(request_cancel, self.job(job_id).account_id, job_id, "user")
        elif state is not State.QUEUED:
            self._work(job_id, state)
        found = self.job(job_id)
        assert found.state is state
        return found

    def _work(self, job_id: str, state: State) -> None:
        claimed = self.claim()
        assert claimed is not None
        assert claimed.job.id == job_id, "reach() needs an otherwise empty queue"
        steps = [(lifecycle.mark_running, ()), (lifecycle.mark_uploading, ()), (lifecycle.succeed, (RESULT,))]
        order = [State.STARTING, State.RUNNING, State.UPLOADING, State.SUCCEEDED]
        if state is State.FAILED:
            self.run(lifecycle.fail, job_id, 1, Failure(FailureKind.INVALID_INPUT, "no"))
            return
        for step, more in steps[: order.index(state)]:
            assert self.run(step, job_id, 1, *more)

    def age(self, job_id: str, **columns: str) -> None:
        """Put times of a job into the past by so much, as if that time had gone by."""
        changes = ", ".join(f"{column} = now() - interval '{past}'" for column, past in columns.items())
        self.sql(f"UPDATE job SET {changes} WHERE id = :id", id=job_id)

    def wipe(self) -> None:
        """Forget all jobs."""
        self.sql("DELETE FROM job")
        self.sql("UPDATE account_usage SET queued = 0, running = 0")

    def events(self, job_id: str) -> list[Any]:
        """Return the events of a job in order."""
        return self.sql("SELECT * FROM job_event WHERE job_id = :id ORDER BY seq", id=job_id)

    def attempts(self, job_id: str) -> list[Any]:
        """Return the attempts of a job in order."""
        return self.sql("SELECT * FROM job_attempt WHERE job_id = :id ORDER BY epoch", id=job_id)

    def usage(self, account: str | None = None) -> tuple[int, int]:
        """Return the counters of an account: queued, running."""
        query = "SELECT queued, running FROM account_usage WHERE account_id = :id"
        return tuple(self.sql(query, id=account or self.account)[0])

    def everything(self) -> dict[str, list[Any]]:
        """Return all rows that a job may change, for comparing before and after."""
        tables = ("job", "job_event", "job_attempt", "asset", "account_usage", "outbox", "webhook_message")
        return {table: sorted(map(str, self.sql(f"SELECT * FROM {table}"))) for table in tables}

    def check_invariants(self) -> None:
        """Assert what must hold after any history whatever."""
        for query in (*NEVER.values(), IN_FLIGHT):
            assert self.sql(query) == [], query


def in_threads(acts: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run functions at the same time and return what they return; the first exception is raised."""
    acts = list(acts)
    with ThreadPoolExecutor(len(acts)) as pool:
        return [future.result() for future in [pool.submit(act) for act in acts]]
