"""Claims: the order, the limits, and that nobody waits and nobody gets what another has."""

import random
import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
from sqlalchemy import text

from farm.db.session import unit_of_work
from farm.jobs import lifecycle
from farm.jobs.claim import claim
from farm.jobs.job import Rules
from farm.jobs.policy import Failure, FailureKind
from farm.jobs.states import State
from tests.service.driver import GROUP, RESULT, in_threads

NUM_GROUPS = 12


def claimed_ids(driver, number, **options):
    claims = [driver.claim(**options) for _ in range(number)]
    return [claimed.job.id if claimed else None for claimed in claims]


def test_a_claim_takes_the_job_under_a_new_epoch_and_a_lease(driver):
    job = driver.submit()
    claimed = driver.claim()
    taken = claimed.job
    assert (taken.id, taken.state, claimed.epoch, taken.attempts) == (job.id, State.STARTING, 1, 1)
    assert (taken.group_id, taken.phase, taken.progress) == (GROUP, "load", 0)
    assert taken.lease_until - taken.started_at == timedelta(seconds=30)
    assert taken.attempt_deadline - taken.started_at == timedelta(seconds=900)
    assert claimed.lease_s == 30
    (attempt,) = driver.attempts(job.id)
    assert (attempt.epoch, attempt.group_id, attempt.worker_boot_id) == (1, GROUP, f"boot-of-{GROUP}")
    assert driver.usage() == (0, 1)


def test_with_nothing_to_do_there_is_nothing_to_claim(driver):
    assert driver.claim() is None


def test_jobs_of_equal_priority_are_taken_in_order(driver):
    jobs = [driver.submit().id for _ in range(3)]
    assert claimed_ids(driver, 4) == [*jobs, None]


def test_higher_priority_goes_first_and_age_catches_up_at_ten_minutes_a_point(driver):
    low_and_old, normal, high = (driver.submit(priority=priority).id for priority in (-1, 0, 1))
    driver.age(low_and_old, queued_at="30 minutes", rank_at="20 minutes")
    assert claimed_ids(driver, 3) == [low_and_old, high, normal]


def test_a_job_in_backoff_is_left_alone_until_its_time(driver):
    waiting, ready = driver.submit(), driver.submit()
    driver.sql("UPDATE job SET not_before = now() + interval '1 hour' WHERE id = :id", id=waiting.id)
    assert claimed_ids(driver, 2) == [ready.id, None]
    driver.age(waiting.id, not_before="1 second")
    assert claimed_ids(driver, 1) == [waiting.id]


def test_only_jobs_of_the_profile_are_taken(driver):
    driver.submit(profile="sp4")
    assert driver.claim() is None
    assert driver.claim(profile="sp4") is not None


def test_jobs_of_a_newer_contract_are_left_alone(driver):
    newer, known = driver.submit(), driver.submit()
    driver.sql("UPDATE job SET contract_version = 2 WHERE id = :id", id=newer.id)
    assert claimed_ids(driver, 2) == [known.id, None]
    assert claimed_ids(driver, 1, versions=(1, 2)) == [newer.id]


def test_accounts_with_fewer_running_jobs_go_first(driver):
    busy, idle = driver.new_account(), driver.new_account()
    first = driver.submit(busy)
    assert claimed_ids(driver, 1) == [first.id]
    older = driver.submit(busy)
    younger = driver.submit(idle)
    assert claimed_ids(driver, 2) == [younger.id, older.id]


def test_between_equally_busy_accounts_the_longest_wait_goes_first(driver):
    accounts = [driver.new_account() for _ in range(3)]
    jobs = [driver.submit(account).id for account in accounts]
    assert claimed_ids(driver, 3) == jobs


def test_urgent_work_goes_first_even_of_a_busy_account(driver):
    busy, idle = driver.new_account(), driver.new_account()
    driver.submit(busy)
    driver.claim()
    calm = driver.submit(idle, priority=4)
    urgent = driver.submit(busy, priority=5)
    assert claimed_ids(driver, 2) == [urgent.id, calm.id]


def test_a_suspended_account_gets_nothing(driver):
    driver.submit()
    driver.sql("UPDATE account SET status = 'suspended'")
    assert driver.claim() is None


def test_after_an_engine_error_another_group_is_preferred(driver):
    driver.register("group-a")
    driver.register("group-b")
    job = driver.reach(State.RUNNING)
    driver.run(lifecycle.fail, job.id, 1, Failure(FailureKind.ENGINE_ERROR))
    assert driver.claim("group-a") is None
    assert driver.claim("group-b").job.id == job.id


@pytest.mark.parametrize("other", ["none", "gone", "silent", "of another profile"])
def test_after_an_engine_error_the_same_group_takes_it_again_if_it_is_the_only_one(driver, other):
    driver.register("group-a")
    if other != "none":
        driver.register("group-b", "sp4" if other == "of another profile" else "tiny-cpu")
    if other == "gone":
        driver.sql("UPDATE worker_group SET state = 'gone' WHERE id = 'group-b'")
    if other == "silent":
        driver.sql("UPDATE worker_group SET heartbeat_at = now() - interval '1 minute' WHERE id = 'group-b'")
    job = driver.reach(State.RUNNING)
    driver.run(lifecycle.fail, job.id, 1, Failure(FailureKind.ENGINE_ERROR))
    assert driver.claim("group-a").job.id == job.id


@pytest.mark.req("F-12")
def test_an_account_at_its_limit_waits_while_others_go_on(driver):
    driver.rules = Rules(max_running=2)
    other = driver.new_account()
    mine = [driver.submit().id for _ in range(3)]
    theirs = driver.submit(other).id
    assert claimed_ids(driver, 4) == [mine[0], theirs, mine[1], None]
    driver.run(lifecycle.release, mine[0], 1)
    assert driver.claim() is not None


@pytest.mark.req("F-12")
def test_an_account_may_have_a_limit_of_its_own(driver):
    account = driver.new_account(max_running=1)
    driver.submit(account)
    driver.submit(account)
    assert driver.claim() is not None
    assert driver.claim() is None


def test_more_than_eight_accounts_are_all_served(driver):
    jobs = {driver.submit(driver.new_account()).id for _ in range(11)}
    assert set(claimed_ids(driver, 11)) == jobs


def test_a_claim_does_not_wait_for_a_locked_account(driver):
    other = driver.new_account()
    driver.submit()
    theirs = driver.submit(other)
    with unit_of_work(driver.engine) as conn:
        conn.execute(
            text("SELECT 1 FROM account_usage WHERE account_id = :id FOR UPDATE"), {"id": driver.account}
        )
        assert claimed_ids(driver, 2) == [theirs.id, None]


def test_a_claim_does_not_wait_for_a_locked_job(driver):
    locked, free = driver.submit(), driver.submit()
    with unit_of_work(driver.engine) as conn:
        conn.execute(text("SELECT 1 FROM job WHERE id = :id FOR UPDATE"), {"id": locked.id})
        assert claimed_ids(driver, 2) == [free.id, None]


def test_a_claim_that_came_back_empty_holds_no_lock(driver):
    driver.submit()
    locked = driver.submit(driver.new_account())
    driver.claim()
    with unit_of_work(driver.engine) as outer, unit_of_work(driver.engine) as conn:
        outer.execute(text("SELECT 1 FROM job WHERE id = :id FOR UPDATE"), {"id": locked.id})
        assert claim(conn, GROUP, "tiny-cpu", "boot", [1]) is None
        driver.sql("SELECT 1 FROM account_usage FOR UPDATE NOWAIT")


def test_work_that_another_holds_for_a_moment_is_claimed_a_moment_later(driver):
    job = driver.submit()
    is_locked = threading.Event()

    def hold():
        with unit_of_work(driver.engine) as conn:
            conn.execute(text("SELECT 1 FROM account_usage FOR UPDATE"))
            is_locked.set()
            time.sleep(0.1)

    def take():
        is_locked.wait()
        return driver.claim()

    assert in_threads([hold, take])[1].job.id == job.id


@pytest.mark.req("F-41")
@pytest.mark.parametrize("num_accounts", [1, 5])
def test_groups_that_claim_at_the_same_time_never_get_the_same_attempt(driver, num_accounts):
    driver.rules = Rules(max_running=1000)
    accounts = [driver.new_account() for _ in range(num_accounts)]
    jobs = {driver.submit(account).id for account in accounts for _ in range(60 // num_accounts)}

    def work(group):
        taken = []
        while (claimed := driver.claim(group)) is not None:
            taken.append((claimed.job.id, claimed.epoch, group))
        return taken

    groups = in_threads([lambda n=n: work(f"group-{n}") for n in range(NUM_GROUPS)])
    claims = [one for taken in groups for one in taken]
    assert {job_id for job_id, _, _ in claims} == jobs
    assert max(Counter((job_id, epoch) for job_id, epoch, _ in claims).values()) == 1
    stored = {(row.job_id, row.epoch, row.group_id) for row in driver.sql("SELECT * FROM job_attempt")}
    assert stored == set(claims)
    driver.check_invariants()


@pytest.mark.req("F-41")
@pytest.mark.req("F-12")
def test_claims_and_endings_at_the_same_time_never_exceed_a_limit_nor_repeat_an_epoch(driver):
    driver.rules = Rules(max_running=3, max_infra_losses=1000)
    accounts = [driver.new_account() for _ in range(4)]
    for account in accounts:
        for _ in range(12):
            driver.submit(account)
    # Counted by the database itself after each claim, in the claim's own transaction: no sampling.
    driver.sql(
        "CREATE FUNCTION check_limit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF (SELECT count(*) FROM job WHERE account_id = NEW.account_id"
        "     AND state IN ('starting', 'running', 'uploading')) > 3"
        " THEN RAISE EXCEPTION 'limit exceeded'; END IF; RETURN NULL; END $$"
    )
    driver.sql(
        "CREATE CONSTRAINT TRIGGER check_limit AFTER UPDATE ON job DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION check_limit()"
    )

    def work(group, seed):
        chance = random.Random(seed)
        taken = []
        while (claimed := driver.claim(group)) is not None:
            taken.append((claimed.job.id, claimed.epoch))
            driver.run(lifecycle.mark_running, claimed.job.id, claimed.epoch)
            if chance.random() < 0.3:
                driver.run(lifecycle.release, claimed.job.id, claimed.epoch)
                continue
            driver.run(lifecycle.mark_uploading, claimed.job.id, claimed.epoch)
            driver.run(lifecycle.succeed, claimed.job.id, claimed.epoch, RESULT)
        return taken

    groups = in_threads([lambda n=n: work(f"group-{n}", n) for n in range(NUM_GROUPS)])
    claims = Counter(one for taken in groups for one in taken)
    assert max(claims.values()) == 1
    assert len({job_id for job_id, _ in claims}) == 48
    driver.check_invariants()
