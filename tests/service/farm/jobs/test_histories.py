"""Whatever happens to a farm, in whatever order and by however many at once, the invariants hold.

One random history is walked step by step; then many are walked by threads at the same time, where besides
nobody may ever be refused by a deadlock. The seed of a history is in the name of its test.
"""

import random
from collections.abc import Callable
from contextlib import suppress

import pytest
from sqlalchemy import text

from farm.accounts import recount
from farm.db.session import unit_of_work
from farm.errors import AlreadyFinishedError, NotFoundError, NotRetryableError, QueueFullError
from farm.jobs import lifecycle
from farm.jobs.control import delete_job, request_cancel, retry
from farm.jobs.job import Rules
from farm.jobs.phases import Progress
from farm.jobs.policy import Failure, FailureKind
from farm.jobs.submit import JobWebhook
from farm.outbox import relay_once
from farm.webhooks.messages import EVENT_TYPES
from tests.service.driver import RESULT, Driver, in_threads

NUM_STEPS = 150
NUM_THREADS = 8
STEPS_PER_THREAD = 40
HOOK = JobWebhook("https://hooks.example/in", EVENT_TYPES, b"sealed")


class Walker:
    """Does one random thing after another, as users, agents and tickers do, stale ones included."""

    def __init__(self, driver: Driver, accounts: list[str], seed: int) -> None:
        self.driver = driver
        self.accounts = accounts
        self.chance = random.Random(seed)
        self.group = f"group-{seed}"
        self.held: list[tuple[str, int]] = []  # every claim that was ever made here, live or long lost

    def step(self) -> None:
        """Do one thing; what a user would be refused is fine, everything else is not."""
        acts: list[tuple[int, Callable[[], object]]] = [
            (6, self.submit),
            (6, self.claim),
            (8, self.go_on),
            (3, self.fail),
            (2, self.control),
            (2, self.sweep),
        ]
        (act,) = self.chance.choices([act for _, act in acts], [weight for weight, _ in acts])
        with suppress(NotFoundError, AlreadyFinishedError, NotRetryableError, QueueFullError):
            act()

    def submit(self) -> None:
        account = self.chance.choice(self.accounts)
        webhook = HOOK if self.chance.random() < 0.3 else None
        self.driver.submit(account, priority=self.chance.randint(-10, 10), webhook=webhook)

    def claim(self) -> None:
        claimed = self.driver.claim(self.group)
        if claimed is not None:
            self.held.append((claimed.job.id, claimed.epoch))

    def go_on(self) -> None:
        if not self.held:
            return
        job_id, epoch = self.chance.choice(self.held[-6:])
        run = self.driver.run
        run(lifecycle.beat, job_id, epoch, self.group, Progress("denoise", self.chance.randint(0, 4), 4))
        for act, more in (
            (lifecycle.mark_running, ()),
            (lifecycle.mark_uploading, ()),
            (lifecycle.succeed, (RESULT,)),
        ):
            if self.chance.random() < 0.7:
                run(act, job_id, epoch, *more)

    def fail(self) -> None:
        if self.held:
            job_id, epoch = self.chance.choice(self.held)
            kind = self.chance.choice(list(FailureKind))
            self.driver.run(lifecycle.fail, job_id, epoch, Failure(kind), rules=self.driver.rules)

    def control(self) -> None:
        jobs = self.driver.sql("SELECT id, account_id FROM job ORDER BY created_at")
        if not jobs:
            return
        job = self.chance.choice(jobs)
        act = self.chance.choice([request_cancel, delete_job, retry])
        options = {"rules": self.driver.rules} if act is retry else {"by": "user"}
        self.driver.run(act, job.account_id, job.id, **options)

    def sweep(self) -> None:
        """Let time pass for some jobs, and sweep."""
        late = self.chance.choice(["lease_until", "attempt_deadline", "queue_deadline", "not_before"])
        past = text(
            f"UPDATE job SET {late} = now() - interval '1 hour' WHERE {late} IS NOT NULL AND id = ANY(:ids)"
        )
        with unit_of_work(self.driver.engine) as conn:
            query = text("SELECT id FROM job ORDER BY created_at FOR UPDATE SKIP LOCKED")
            ids = [job_id for job_id in conn.execute(query).scalars() if self.chance.random() < 0.3]
            conn.execute(past, {"ids": ids})
        sweeps = [
            (lifecycle.reap_leases, {"rules": self.driver.rules}),
            (lifecycle.expire_queued, {}),
        ]
        for act, options in sweeps:
            self.driver.run(act, **options)
        relay_once(self.driver.engine, lambda *_: None)
        assert self.driver.run(recount, self.chance.choice(self.accounts)) is None


def prepare(driver: Driver) -> list[str]:
    driver.rules = Rules(max_queued=15, max_running=3, max_infra_losses=2)
    accounts = [driver.new_account() for _ in range(4)]
    driver.sql(
        "INSERT INTO webhook_endpoint (id, account_id, url, event_types)"
        " VALUES ('we_1', :id, 'https://hooks.example/all', :types)",
        id=accounts[0],
        types=["video.completed", "video.queued", "video.expired"],
    )
    return accounts


@pytest.mark.req("F-02")
@pytest.mark.req("F-03")
@pytest.mark.parametrize("seed", range(4))
def test_a_random_history_keeps_every_invariant(driver, seed):
    walker = Walker(driver, prepare(driver), seed)
    for step in range(NUM_STEPS):
        walker.step()
        if step % 10 == 0:
            driver.check_invariants()
    driver.check_invariants()
    happened = {row.type for row in driver.sql("SELECT DISTINCT type FROM job_event")}
    assert happened >= {"queued", "starting", "running", "uploading", "succeeded", "failed", "canceled"}


@pytest.mark.req("F-41")
@pytest.mark.parametrize("seed", [100, 200])
def test_histories_at_the_same_time_never_deadlock_and_keep_every_invariant(driver, seed):
    accounts = prepare(driver)
    walkers = [Walker(driver, accounts, seed + number) for number in range(NUM_THREADS)]

    def walk(walker):
        for _ in range(STEPS_PER_THREAD):
            walker.step()

    in_threads([lambda walker=walker: walk(walker) for walker in walkers])
    driver.check_invariants()
    claims = [claim for walker in walkers for claim in walker.held]
    assert len(claims) == len(set(claims))
