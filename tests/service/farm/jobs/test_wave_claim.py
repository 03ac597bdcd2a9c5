"""Waves on a real database: all members in one transaction or none, within every limit."""

from collections import Counter

import pytest

from farm import profile_control, waves
from farm.db.session import unit_of_work
from farm.jobs import lifecycle
from farm.jobs.job import Rules
from farm.jobs.policy import Failure, FailureKind
from farm.jobs.states import State
from farm.jobs.wave_claim import claim_wave
from farm.metrics.families import REGISTRY
from farm.retention import delete_old_waves
from tests.job_rows import REQUEST
from tests.service.driver import PROFILE, RESULT, in_threads

CRASH = Failure(FailureKind.CRASH, neighbours=1)


def ids(wave):
    return [member.job.id for member in wave.members] if wave else []


def let_wait(driver, seconds=61):
    past = f"interval '{seconds} seconds'"
    earlier = f"queued_at = queued_at - {past}, not_before = not_before - {past}"
    driver.sql(f"UPDATE job SET {earlier} WHERE state = 'queued'")


@pytest.mark.req("F-45")
def test_a_wave_claims_all_its_members_at_once_under_one_name(driver):
    jobs = [driver.submit().id for _ in range(5)]
    wave = driver.claim_wave()
    assert (ids(wave), wave.num_slots) == (jobs[:4], 4)
    assert driver.usage() == (1, 4)
    for job_id in jobs[:4]:
        taken = driver.job(job_id)
        assert (taken.state, taken.epoch, taken.lease_until is None) == (State.STARTING, 1, False)
        (attempt,) = driver.attempts(job_id)
        assert attempt.wave_id == wave.id
        assert driver.events(job_id)[-1].data["wave"] == wave.id
    (row,) = driver.run(waves.list_waves)
    assert (row.fill, row.num_members, row.num_ghosts, row.outcome) == ("full", 4, 0, None)
    assert {member.job_id for member in row.members} == set(jobs[:4])
    driver.check_invariants()


@pytest.mark.req("F-45")
def test_three_jobs_wait_for_a_fourth_and_are_padded_after_a_minute(driver):
    jobs = [driver.submit().id for _ in range(3)]
    assert driver.claim_wave() is None
    (forming,) = driver.run(waves.forming_waves, {PROFILE: 4})
    assert (forming.num_waiting, forming.num_slots, forming.is_due) == (3, 4, False)
    let_wait(driver)
    assert driver.run(waves.forming_waves, {PROFILE: 4})[0].is_due
    assert ids(driver.claim_wave()) == jobs
    (row,) = driver.run(waves.list_waves)
    assert (row.fill, row.num_members, row.num_ghosts) == ("pad", 3, 1)
    assert row.waited_s >= 61
    assert driver.run(waves.num_ghosts, row.formed_at) == 1


def test_a_profile_that_waits_is_never_padded(driver):
    driver.run(profile_control.set_waves, PROFILE, "op", size=None, max_wait_s=0, fill="wait")
    driver.submit()
    let_wait(driver)
    assert driver.claim_wave() is None


@pytest.mark.req("F-45")
def test_steps_and_tier_keep_jobs_apart(driver):
    for steps in (4, 5, 4, 5, 4):
        driver.submit(request=REQUEST.__class__(prompt="x", tier="272p", num_inference_steps=steps, seed=1))
    assert driver.claim_wave() is None
    driver.submit(request=REQUEST.__class__(prompt="x", tier="272p", num_inference_steps=4, seed=1))
    assert {member.job.steps for member in driver.claim_wave().members} == {4}


def test_an_account_at_its_limit_leaves_its_slots_to_others(driver):
    driver.rules = Rules(max_running=2)
    mine = [driver.submit().id for _ in range(4)]
    assert driver.claim_wave() is None
    other = driver.new_account()
    theirs = [driver.submit(other).id for _ in range(3)]
    wave = driver.claim_wave()
    assert Counter(member.job.account_id for member in wave.members) == {driver.account: 2, other: 2}
    assert set(ids(wave)) == {*mine[:2], *theirs[:2]}


def test_accounts_take_turns_in_a_wave(driver):
    other = driver.new_account()
    mine = [driver.submit().id for _ in range(6)]
    theirs = [driver.submit(other).id for _ in range(2)]
    assert set(ids(driver.claim_wave())) == {*mine[:2], *theirs}


@pytest.mark.req("F-46")
def test_a_job_of_two_crashed_waves_runs_alone_and_its_neighbours_without_it(driver):
    driver.rules = Rules(max_infra_losses=9)
    jobs = [driver.submit().id for _ in range(2)]
    for round_ in (1, 2):
        wave = driver.claim_wave(num_slots=2)
        assert set(ids(wave)) == set(jobs)
        for member in wave.members:
            driver.run(lifecycle.fail, member.job.id, member.epoch, CRASH)
        driver.sql("UPDATE job SET not_before = now()")
        assert {driver.job(job_id).crashed_waves for job_id in jobs} == {round_}
    assert [len(ids(driver.claim_wave(num_slots=2))) for _ in range(3)] == [1, 1, 0]
    assert {row.fill for row in driver.run(waves.list_waves)} == {"full", "alone"}
    assert {driver.job(job_id).crash_count for job_id in jobs} == {0}


@pytest.mark.req("F-45")
def test_a_member_that_somebody_holds_stops_the_whole_wave_and_nothing_stays_locked(driver, monkeypatch):
    monkeypatch.setattr("farm.jobs.wave_claim.PATIENCE_S", 0.05)
    jobs = [driver.submit().id for _ in range(4)]
    with unit_of_work(driver.engine) as other:
        other.exec_driver_sql("SELECT FROM job WHERE id = %s FOR UPDATE", (jobs[2],))
        with unit_of_work(driver.engine) as conn:
            assert claim_wave(conn, "g", PROFILE, "b", (1,), num_slots=4, rules=driver.rules) is None
            # Still inside the transaction: another one gets at everything.
            assert len(driver.sql("SELECT id FROM job WHERE id <> :id FOR UPDATE NOWAIT", id=jobs[2])) == 3
            assert driver.sql("SELECT account_id FROM account_usage FOR UPDATE NOWAIT")
    assert ids(driver.claim_wave()) == jobs


@pytest.mark.req("F-41")
def test_groups_that_form_waves_at_once_never_share_a_job(driver):
    accounts = [driver.account, driver.new_account(), driver.new_account()]
    for number in range(24):
        driver.submit(accounts[number % 3])

    def work(group):
        taken = []
        while wave := driver.claim_wave(group):
            taken.append(ids(wave))
        return taken

    working = [lambda name=f"g{number}": work(name) for number in range(4)]
    taken = [members for by_group in in_threads(working) for members in by_group]
    while wave := driver.claim_wave():
        taken.append(ids(wave))
    assert sorted(len(members) for members in taken) == [4] * 6
    assert len({job_id for members in taken for job_id in members}) == 24
    driver.check_invariants()


def test_a_paused_profile_is_claimed_by_nobody_until_it_is_resumed(driver):
    jobs = [driver.submit().id for _ in range(4)]
    driver.run(profile_control.pause_profile, PROFILE, "op", "new weights")
    assert (driver.claim(), driver.claim_wave()) == (None, None)
    driver.run(profile_control.resume_profile, PROFILE, "op")
    assert ids(driver.claim_wave()) == jobs


def test_waves_their_wait_and_their_ghosts_are_counted_once(driver):
    def counted():
        return [
            REGISTRY.get_sample_value(f"magi2_wave{name}", {"profile": PROFILE}) or 0.0
            for name in ("s_total", "_ghosts_total", "_wait_seconds_count")
        ]

    before = counted()
    for _ in range(4):
        driver.submit()
    wave = driver.claim_wave()
    assert [new - old for new, old in zip(counted(), before, strict=True)] == [1, 0, 1]
    driver.run(waves.end_wave, wave.id, "ended", 1)
    driver.run(waves.end_wave, wave.id, "crashed", 4)
    assert [new - old for new, old in zip(counted(), before, strict=True)] == [1, 1, 1]


def test_members_of_a_wave_end_each_in_their_own_way(driver):
    good, bad, _, _ = (driver.submit().id for _ in range(4))
    wave = driver.claim_wave()
    for job_id in (good,):
        for step, more in ((lifecycle.mark_running, ()), (lifecycle.mark_uploading, ())):
            assert driver.run(step, job_id, 1, *more)
        assert driver.run(lifecycle.succeed, job_id, 1, RESULT)
    driver.run(lifecycle.fail, bad, 1, Failure(FailureKind.INVALID_INPUT, "too long"))
    driver.run(waves.end_wave, wave.id, "ended", 1)
    driver.run(waves.end_wave, wave.id, "crashed", 4)
    (row,) = driver.run(waves.list_waves, profile=PROFILE)
    assert (row.outcome, row.num_ghosts) == ("ended", 1)
    assert {member.outcome for member in row.members} == {"succeeded", "failed", None}


def test_a_lost_wave_counts_as_crashed_for_all_its_members(driver):
    together = [driver.submit().id for _ in range(2)]
    driver.claim_wave(num_slots=2)
    lonely = driver.submit(
        request=REQUEST.__class__(prompt="x", tier="272p", num_inference_steps=9, seed=1)
    ).id
    let_wait(driver)
    driver.claim_wave(num_slots=2)
    driver.sql("UPDATE job SET lease_until = now() - interval '1 second'")
    assert driver.run(lifecycle.reap_leases) == 3
    assert [driver.job(job_id).crashed_waves for job_id in (*together, lonely)] == [1, 1, 0]


def test_waves_are_forgotten_with_the_events_of_their_time(driver):
    for _ in range(2):
        driver.submit()
        driver.submit()
        driver.claim_wave(num_slots=2)
    kept, old = driver.run(waves.list_waves)
    driver.sql("UPDATE wave SET formed_at = now() - interval '31 days' WHERE id = :id", id=old.id)
    assert driver.run(delete_old_waves) == 1
    assert [row.id for row in driver.run(waves.list_waves)] == [kept.id]
