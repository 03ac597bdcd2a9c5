"""Reads: pages that neither skip nor repeat, filters, and what is not there for this account."""

from datetime import timedelta

import pytest

from farm.errors import NotFoundError
from farm.jobs import queries
from farm.jobs.control import delete_job
from farm.jobs.job import NewAsset
from farm.jobs.queries import ListQuery
from farm.jobs.states import State
from tests.service.driver import VIDEO


def page(driver, **options):
    return driver.run(queries.list_jobs, driver.account, ListQuery(**options))


def ids(found):
    return [job.id for job in found.jobs]


def walk(driver, *, between=lambda: None, **options):
    """Read all pages; do something between two of them."""
    seen, after = [], None
    while True:
        found = page(driver, after=after, limit=3, **options)
        seen += ids(found)
        if not found.has_more:
            return seen
        after = found.jobs[-1].id
        between()


@pytest.mark.req("F-17")
def test_pages_newest_first_repeat_and_skip_nothing_while_jobs_arrive(driver):
    jobs = [driver.submit().id for _ in range(10)]
    assert walk(driver, between=driver.submit) == jobs[::-1]


@pytest.mark.req("F-17")
def test_pages_oldest_first_show_what_arrives_meanwhile_once(driver):
    jobs = [driver.submit().id for _ in range(4)]

    def arrive():
        if len(jobs) < 9:
            jobs.append(driver.submit().id)

    assert walk(driver, is_ascending=True, between=arrive) == jobs


@pytest.mark.req("F-17")
def test_jobs_of_the_same_instant_are_told_apart_by_id(driver):
    for _ in range(7):
        driver.submit()
    driver.sql("UPDATE job SET created_at = '2026-01-01Z'")
    every = sorted(row.id for row in driver.sql("SELECT id FROM job"))
    assert walk(driver) == every[::-1]
    assert walk(driver, is_ascending=True) == every


@pytest.mark.req("F-17")
def test_a_page_that_ends_exactly_is_known_to_be_the_last(driver):
    jobs = [driver.submit().id for _ in range(3)]
    found = page(driver, limit=3)
    assert (ids(found), found.has_more) == (jobs[::-1], False)


@pytest.mark.req("F-17")
@pytest.mark.parametrize("whose", ["unknown", "other", "deleted"])
def test_a_page_after_a_job_that_is_not_there_is_no_page(driver, whose):
    job_id = "video_unknown"
    if whose == "other":
        job_id = driver.submit(driver.new_account()).id
    if whose == "deleted":
        job_id = driver.submit().id
        driver.run(delete_job, driver.account, job_id, "user")
    with pytest.raises(NotFoundError):
        page(driver, after=job_id)


def test_filters_narrow_the_list(driver):
    failed = driver.reach(State.FAILED)
    tagged = driver.submit(user_tag="ann", metadata={"order": "7", "shop": "x"}, profile="sp4")
    plain = driver.submit()
    assert ids(page(driver, states=[State.FAILED, State.EXPIRED])) == [failed.id]
    assert ids(page(driver, profile="sp4")) == [tagged.id]
    assert ids(page(driver, user_tag="ann")) == [tagged.id]
    assert ids(page(driver, metadata={"order": "7"})) == [tagged.id]
    assert ids(page(driver, metadata={"order": "8"})) == []
    assert ids(page(driver, created_after=failed.created_at)) == [plain.id, tagged.id]
    assert ids(page(driver, created_before=plain.created_at)) == [tagged.id, failed.id]
    soon = plain.created_at + timedelta(days=1)
    both = page(driver, created_after=failed.created_at, created_before=soon, profile="sp4")
    assert ids(both) == [tagged.id]


def test_deleted_jobs_and_those_of_others_are_not_listed(driver):
    mine, deleted = driver.submit(), driver.submit()
    driver.submit(driver.new_account())
    driver.run(delete_job, driver.account, deleted.id, "user")
    assert ids(page(driver)) == [mine.id]


@pytest.mark.parametrize("read", [queries.get_job, queries.timeline])
def test_a_job_of_another_account_is_not_found(driver, read):
    job = driver.submit(driver.new_account())
    with pytest.raises(NotFoundError):
        driver.run(read, driver.account, job.id)


def test_objects_are_found_by_kind_also_when_they_have_expired(driver):
    job = driver.reach(State.SUCCEEDED)
    found = driver.run(queries.get_asset, driver.account, job.id, "video")
    assert (found.key, found.sha256, found.bytes, found.deleted_at) == (VIDEO.key, VIDEO.sha256, 10, None)
    assert driver.run(queries.get_asset, driver.account, job.id, "thumb") is None
    driver.sql("UPDATE asset SET deleted_at = now()")
    assert driver.run(queries.get_asset, driver.account, job.id, "video").deleted_at is not None


def test_objects_of_a_deleted_job_or_of_another_account_are_not_found(driver):
    job = driver.reach(State.SUCCEEDED)
    with pytest.raises(NotFoundError):
        driver.run(queries.get_asset, driver.new_account(), job.id, "video")
    driver.run(delete_job, driver.account, job.id, "user")
    with pytest.raises(NotFoundError):
        driver.run(queries.get_asset, driver.account, job.id, "video")


def test_objects_of_a_page_come_in_one_read(driver):
    done, other = driver.reach(State.SUCCEEDED), driver.reach(State.FAILED)
    found = driver.run(queries.assets_by_job, driver.account, [done.id, other.id], "video")
    assert {job_id: asset.key for job_id, asset in found.items()} == {done.id: VIDEO.key}


def test_a_job_knows_its_input_image(driver):
    image = NewAsset("input", "v1/a/in/aa.png", 5, "aa" * 32, "image/png", 640, 480)
    with_image, without = driver.submit(input=image), driver.submit()
    assert driver.run(queries.get_input, with_image).key == image.key
    assert driver.run(queries.get_input, without) is None


def test_the_timeline_tells_all_events_and_attempts(driver):
    job = driver.reach(State.SUCCEEDED)
    told = driver.run(queries.timeline, driver.account, job.id)
    assert [event.type for event in told.events] == [
        "queued",
        "starting",
        "running",
        "uploading",
        "succeeded",
    ]
    assert [(attempt.epoch, attempt.outcome) for attempt in told.attempts] == [(1, "succeeded")]
