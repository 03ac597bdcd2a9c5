"""The queue against a model of it: whatever is done in whatever order, rows are what the specification says.

hypothesis draws what users, agents and sweeps do, stale agents and lost leases included, and does it on the
database and on the model below, which is written from the specification's tables, not from the code. After
each step every job, every answer and the account's counters must agree, and all invariants must hold.
"""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import text

from farm.db.session import unit_of_work
from farm.errors import AlreadyFinishedError, FarmError, NotFoundError, NotRetryableError, QueueFullError
from farm.jobs import lifecycle
from farm.jobs.control import delete_job, request_cancel, retry
from farm.jobs.job import Job, Rules
from farm.jobs.phases import Progress
from farm.jobs.policy import Failure, FailureKind
from farm.jobs.states import ACTIVE, TERMINAL, State
from tests.service.driver import RESULT

RULES = Rules(max_queued=6, max_running=2, max_infra_losses=2)
GROUPS = ("group-a", "group-b", "group-c")
MAX_ATTEMPTS = 3
NEXT = {State.STARTING: State.RUNNING, State.RUNNING: State.UPLOADING, State.UPLOADING: State.SUCCEEDED}
# The failure policy as its table says it: what is an end the first time.
ENDS_AT_ONCE = {
    FailureKind.INVALID_INPUT: "invalid_input",
    FailureKind.OUT_OF_MEMORY: "out_of_memory",
    FailureKind.DEADLINE: "deadline_exceeded",
}
# What may happen again: the code when it is the end, after how many of it, and whether a backoff follows.
REPEATED = {
    FailureKind.CRASH: ("worker_crashed", 3, True),
    FailureKind.ENGINE_ERROR: ("engine_error", 1, False),
    FailureKind.UPLOAD: ("upload_failed", 2, True),
    FailureKind.INTERNAL: ("internal", MAX_ATTEMPTS, True),
}


@dataclass
class Model:
    """What a job should be."""

    id: str
    account: str
    rank: tuple[float, str]  # its place in the queue
    priority: int
    state: State = State.QUEUED
    epoch: int = 0
    seq: int = 1
    attempts: int = 0
    retries: int = 0
    group: str | None = None
    counts: Counter[str] = field(default_factory=Counter)  # failures of each kind since the last retry
    crash_groups: set[str] = field(default_factory=set)
    is_canceling: bool = False
    is_deleted: bool = False
    is_poison: bool = False
    waits: bool = False  # in a backoff
    has_lease: bool = True
    code: str | None = None

    def move(self, to: State, code: str | None = None) -> None:
        self.state, self.seq, self.code = to, self.seq + 1, code
        self.waits = False
        if to is State.QUEUED:
            self.group = None

    def budget_is_used(self) -> bool:
        charged = self.attempts - self.counts["agent_lost"] - self.counts["preempted"]
        return charged >= MAX_ATTEMPTS

    def fail(self, kind: FailureKind) -> None:
        """End an attempt by the table of failures."""
        if self.is_canceling:
            self.move(State.CANCELED, "canceled")
            return
        earlier = self.counts[kind.value]
        code, waits = self._verdict(kind, earlier)
        self.counts[kind.value] += 1
        self.is_poison |= code == "poison_job"
        self.move(State.FAILED if code else State.QUEUED, code)
        self.waits = code is None and waits

    def _verdict(self, kind: FailureKind, earlier: int) -> tuple[str | None, bool]:
        """Return the code of the end, if it is one, and whether a backoff follows otherwise."""
        if kind is FailureKind.CRASH:
            self.crash_groups.add(self.group or "")
            if earlier + 1 >= 3 or len(self.crash_groups) >= 2:
                return "poison_job", False
        if kind is FailureKind.AGENT_LOST:
            return ("worker_lost" if earlier >= RULES.max_infra_losses else None), earlier > 0
        if kind is FailureKind.PREEMPTED:
            return None, False
        if kind in ENDS_AT_ONCE:
            return ENDS_AT_ONCE[kind], False
        code, most, waits = REPEATED[kind]
        return (code if earlier >= most or self.budget_is_used() else None), waits

    def retry(self) -> None:
        self.move(State.QUEUED)
        self.attempts, self.counts, self.crash_groups = 0, Counter(), set()
        self.is_canceling = False
        self.retries += 1


class Queue(RuleBasedStateMachine):
    """The rules: each does one thing to both and compares the answers."""

    driver = None
    claims = Bundle("claims")  # every claim that was ever made: its job and its epoch

    @initialize()
    def begin(self):
        self.driver.wipe()
        self.driver.sql("DELETE FROM quarantine")
        self.driver.rules = RULES
        self.accounts = [self.driver.new_account() for _ in range(2)]
        self.jobs: dict[str, Model] = {}
        # No group is live, so nobody is preferred to anybody after an engine error.

    def pick(self, data, jobs):
        return self.jobs[data.draw(st.sampled_from(sorted(jobs)), label="job")]

    def count(self, account, states):
        return sum(job.account == account and job.state in states for job in self.jobs.values())

    @rule(which=st.integers(0, 1), priority=st.integers(-2, 6))
    def submit(self, which, priority):
        account = self.accounts[which]
        is_full = self.count(account, {State.QUEUED}) >= RULES.max_queued
        try:
            row = self.driver.submit(account, priority=priority, max_attempts=MAX_ATTEMPTS)
        except QueueFullError:
            assert is_full
            return
        assert not is_full
        self.jobs[row.id] = Model(row.id, account, (row.rank_at.timestamp(), row.id), priority)

    def next_job(self):
        """Return which job a claim must take: urgent accounts, then idle ones, then by age."""
        heads = []
        for account in self.accounts:
            ready = [job for job in self.jobs.values() if job.account == account and self.may_start(job)]
            running = self.count(account, ACTIVE)
            if ready and running < RULES.max_running:
                head = min(ready, key=lambda job: job.rank)
                heads.append((head.priority < 5, running, head.rank[0], account, head))
        return min(heads, key=lambda entry: entry[:4])[4] if heads else None

    @staticmethod
    def may_start(job):
        return job.state is State.QUEUED and not job.waits

    @rule(target=claims, group=st.sampled_from(GROUPS))
    def claim(self, group):
        wanted = self.next_job()
        claimed = self.driver.claim(group)
        if wanted is None:
            assert claimed is None
            return multiple()
        assert claimed is not None
        assert (claimed.job.id, claimed.epoch) == (wanted.id, wanted.epoch + 1)
        wanted.move(State.STARTING)
        wanted.epoch += 1
        wanted.attempts += 1
        wanted.group, wanted.has_lease = group, True
        return (wanted.id, wanted.epoch)

    def holds(self, claim):
        """Return the job of a claim if the claim is still the live one."""
        job = self.jobs[claim[0]]
        return job if job.epoch == claim[1] and job.state in ACTIVE else None

    @rule(claim=claims, group=st.sampled_from(GROUPS), step=st.integers(0, 4))
    def beat(self, claim, group, step):
        held = self.holds(claim)
        answer = self.driver.run(lifecycle.beat, *claim, group, Progress("denoise", step, 4), rules=RULES)
        if held is None or held.group != group:
            assert answer is None
            return
        assert answer is not None
        assert answer.cancel_requested == held.is_canceling
        held.has_lease = True

    @rule(claim=claims, to=st.sampled_from(sorted(NEXT.values())))
    def move(self, claim, to):
        """Advance an attempt by one move, or try to skip one."""
        self.go_on(claim, to)

    def go_on(self, claim, to):
        acts = {
            State.RUNNING: (lifecycle.mark_running, ()),
            State.UPLOADING: (lifecycle.mark_uploading, ()),
            State.SUCCEEDED: (lifecycle.succeed, (RESULT,)),
        }
        act, more = acts[to]
        held = self.holds(claim)
        accepted = self.driver.run(act, *claim, *more)
        found = self.jobs[claim[0]]
        if (found.epoch, found.state) == (claim[1], to):
            assert accepted  # it asked again, since it never heard the answer; nothing changes
            return
        is_legal = held is not None and NEXT[held.state] is to
        assert accepted == (is_legal and not (to is State.SUCCEEDED and held.is_canceling))
        if accepted:
            held.move(to)
        elif is_legal:
            held.move(State.CANCELED, "canceled")  # cancel came first

    @rule(data=st.data(), num_moves=st.integers(1, 3))
    def render(self, data, num_moves):
        """Bring a live attempt some moves further: at random, few would ever get to their end."""
        for _ in range(num_moves):
            live = [job.id for job in self.jobs.values() if job.state in ACTIVE]
            if not live:
                return
            job = self.pick(data, live)
            self.go_on((job.id, job.epoch), NEXT[job.state])

    @rule(data=st.data(), kind=st.sampled_from(sorted(FailureKind)))
    def fail_live(self, data, kind):
        live = [job.id for job in self.jobs.values() if job.state in ACTIVE]
        if live:
            job = self.pick(data, live)
            self.fail((job.id, job.epoch), kind)

    @rule(data=st.data())
    def cancel_live(self, data):
        """Ask for the end of a live attempt, and let it go on as if it had not heard of it yet."""
        live = [job.id for job in self.jobs.values() if job.state in ACTIVE and not job.is_deleted]
        if live:
            job = self.pick(data, live)
            assert self.act(request_cancel, job, by="user") is None
            self.stop(job)
            while job.state in ACTIVE:
                self.go_on((job.id, job.epoch), NEXT[job.state])

    @rule(claim=claims, kind=st.sampled_from(sorted(FailureKind)))
    def fail_any(self, claim, kind):
        self.fail(claim, kind)

    def fail(self, claim, kind):
        held = self.holds(claim)
        after = self.driver.run(lifecycle.fail, *claim, Failure(FailureKind(kind)), rules=RULES)
        assert (after is None) == (held is None)
        if held is not None:
            held.fail(FailureKind(kind))
            assert after.state is held.state

    @rule(claim=claims)
    def stop_ranks(self, claim):
        """Report that the ranks have stopped, whether somebody asked for it or not."""
        held = self.holds(claim)
        after = self.driver.run(lifecycle.finish_cancel, *claim)
        is_legal = held is not None and held.is_canceling
        assert (after is not None) == is_legal
        if is_legal:
            held.move(State.CANCELED, "canceled")

    @rule(claim=consumes(claims))
    def crash(self, claim):
        """Kill the agent of a claim: it does nothing any more, and its lease runs out."""
        held = self.holds(claim)
        if held is not None:
            self.driver.age(held.id, lease_until="1 second")
            held.has_lease = False

    @rule()
    def sweep_leases(self):
        lost = [job for job in self.jobs.values() if job.state in ACTIVE and not job.has_lease]
        assert self.driver.run(lifecycle.reap_leases, rules=RULES) == len(lost)
        for job in lost:
            job.fail(FailureKind.AGENT_LOST)

    def act(self, act, job, **options):
        """Do what a user does; return the refusal, if it is one."""
        try:
            self.driver.run(act, job.account, job.id, **options)
        except FarmError as refusal:
            return type(refusal)
        return None

    @rule(data=st.data())
    def cancel(self, data):
        if not self.jobs:
            return
        job = self.pick(data, self.jobs)
        refusal = self.act(request_cancel, job, by="user")
        if job.is_deleted:
            assert refusal is NotFoundError
        elif job.state in TERMINAL:
            assert refusal is AlreadyFinishedError
        else:
            assert refusal is None
            self.stop(job)

    @staticmethod
    def stop(job):
        if job.state is State.QUEUED:
            job.is_canceling = True
            job.move(State.CANCELED, "canceled")
        elif not job.is_canceling:
            job.is_canceling = True
            job.seq += 1

    @rule(data=st.data())
    def delete(self, data):
        if not self.jobs:
            return
        job = self.pick(data, self.jobs)
        refusal = self.act(delete_job, job, by="user")
        assert refusal is (NotFoundError if job.is_deleted else None)
        if not job.is_deleted:
            if job.state not in TERMINAL:
                self.stop(job)
            job.is_deleted = True
            job.seq += 1

    @rule(data=st.data())
    def retry(self, data):
        ended = [job.id for job in self.jobs.values() if job.state in TERMINAL]
        job = self.pick(data, ended) if ended else None
        if job is None:
            return
        refusal = self.act(retry, job, rules=RULES)
        if job.is_deleted:
            assert refusal is NotFoundError
        elif job.state is State.SUCCEEDED:
            assert refusal is NotRetryableError
        elif job.is_poison:
            assert refusal is not None
        elif self.count(job.account, {State.QUEUED}) >= RULES.max_queued:
            assert refusal is QueueFullError
        else:
            assert refusal is None
            job.retry()
            job.rank = (self.row(job.id).rank_at.timestamp(), job.id)

    @rule(data=st.data())
    def expire(self, data):
        """Let the queue deadline of a waiting job pass, and sweep."""
        waiting = [job.id for job in self.jobs.values() if job.state is State.QUEUED]
        job = self.pick(data, waiting) if waiting else None
        if job is None:
            assert self.driver.run(lifecycle.expire_queued) == 0
            return
        self.driver.age(job.id, queue_deadline="1 second")
        assert self.driver.run(lifecycle.expire_queued) == 1
        job.move(State.EXPIRED, "profile_unavailable")

    @rule()
    def pass_time(self):
        """Let all backoffs end."""
        self.driver.sql("UPDATE job SET not_before = now() WHERE state = 'queued'")
        for job in self.jobs.values():
            job.waits = False

    def row(self, job_id):
        return self.driver.job(job_id)

    @invariant()
    def rows_are_what_the_model_says(self):
        if not hasattr(self, "jobs"):
            return
        with unit_of_work(self.driver.engine) as conn:
            rows = [Job.from_row(row) for row in conn.execute(text("SELECT * FROM job")).mappings()]
        found = {
            row.id: (
                *(row.state, row.epoch, row.seq, row.attempts, row.retry_count, row.group_id),
                *((row.error or {}).get("code"), row.deleted_at is not None, row.lease_until is not None),
            )
            for row in rows
        }
        wanted = {
            job.id: (
                *(job.state, job.epoch, job.seq, job.attempts, job.retries, job.group),
                *(job.code, job.is_deleted, job.state in ACTIVE),
            )
            for job in self.jobs.values()
        }
        assert found == wanted

    @invariant()
    def counters_are_what_the_model_counts(self):
        if not hasattr(self, "jobs"):
            return
        for account in self.accounts:
            counted = (self.count(account, {State.QUEUED}), self.count(account, ACTIVE))
            assert self.driver.usage(account) == counted
            assert counted[1] <= RULES.max_running

    @invariant()
    def invariants_hold(self):
        if hasattr(self, "jobs"):
            self.driver.check_invariants()


@pytest.mark.timeout(600)
@pytest.mark.req("F-01")
@pytest.mark.req("F-02")
@pytest.mark.req("F-03")
@pytest.mark.req("F-46")
def test_queue_does_what_its_model_does(driver):
    machine = type("QueueOnDatabase", (Queue,), {"driver": driver})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=12,
            stateful_step_count=60,
            # Every example costs a second: a failure is shown as it was found.
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            print_blob=True,
        ),
    )
