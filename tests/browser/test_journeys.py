"""What operators do, from end to end in a browser, wide and narrow."""

import re

import pytest
from playwright.sync_api import Page, expect

from farm.admins import Role
from farm.groups import get_group
from farm.jobs.queries import get_job
from farm.jobs.states import State
from tests.browser.conftest import PATIENCE_MS, Visit
from tests.browser.farm import MARKUP, PASSWORD, PROFILE, LivedFarm

# A busy machine draws slowly; waits are bounded one by one.
pytestmark = pytest.mark.timeout(900)
SIZES = pytest.mark.parametrize("size", ["wide", "narrow"])
GROUP = "render-01-tiny-cpu-0"
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture
def farm(lived: LivedFarm) -> LivedFarm:
    lived.start()
    lived.login("alice")
    return lived


def state_of(farm: LivedFarm, job_id: str) -> State:
    with farm.database.connect() as conn:
        return get_job(conn, farm.account_id, job_id).state


def audited(farm: LivedFarm, action: str) -> list:
    return farm.execute("SELECT actor, target, before, after FROM audit_log WHERE action = :a", a=action)


def go(page: Page, name: str) -> None:
    """Use the navigation, which is behind a menu where the screen is small."""
    menu = page.get_by_text("Menu", exact=True)
    if menu.is_visible():
        menu.click()
    page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()


@SIZES
@pytest.mark.req("F-50")
@pytest.mark.usefixtures("farm")
def test_login_refuses_a_wrong_password_and_opens_with_the_right_one(visit: Visit, size: str) -> None:
    page = visit(size, name=None)
    page.goto("/admin/jobs?state=failed")
    expect(page).to_have_url(re.compile(r"/admin/login\?next="))
    page.get_by_label("Name").fill("alice")
    page.get_by_label("Password").fill("wrong wrong wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("wrong")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(re.compile(r"/admin/jobs\?state=failed$"))
    cookie = next(each for each in page.context.cookies() if each["name"] == "magi2_admin")
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Lax", "/admin")
    if size == "narrow":
        page.get_by_text("Menu", exact=True).click()
    page.get_by_role("button", name="Log out").locator("visible=true").click()
    expect(page).to_have_url(re.compile("/admin/login"))
    page.goto("/admin/")
    expect(page).to_have_url(re.compile("/admin/login"))


@SIZES
def test_progress_moves_without_a_reload_and_the_finished_video_plays(farm, visit: Visit, size: str) -> None:
    job_id = farm.submit()
    held = farm.claim()
    farm.report(held, 1)
    page = visit(size)
    page.goto(f"/admin/jobs/{job_id}")
    page.evaluate("window.isTheSamePage = true")
    expect(page.get_by_text("Step 1 of 8")).to_be_visible()
    first = float(page.locator("#progress").get_attribute("value"))
    farm.report(held, 5)
    expect(page.get_by_text("Step 5 of 8")).to_be_visible()
    assert float(page.locator("#progress").get_attribute("value")) > first
    farm.finish(held)
    video = page.get_by_label("The finished clip")
    expect(video).to_be_visible()
    page.evaluate("() => { document.querySelector('video').muted = true; }")
    page.evaluate("() => document.querySelector('video').play()")
    page.wait_for_function("() => document.querySelector('video').currentTime > 0")
    assert page.evaluate("document.querySelector('video').videoWidth") == 448
    assert page.evaluate("window.isTheSamePage") is True
    expect(page.get_by_role("link", name="Download")).to_have_attribute("download", f"{job_id}.mp4")


@SIZES
@pytest.mark.req("F-50")
def test_cancel_and_retry_go_through_the_farm_and_are_audited(farm, visit: Visit, size: str) -> None:
    job_id = farm.submit()
    page = visit(size)
    page.goto(f"/admin/jobs/{job_id}")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Canceled. A running job stops")).to_be_visible()
    assert state_of(farm, job_id) is State.CANCELED
    page.get_by_role("button", name="Retry", exact=True).click()
    expect(page.get_by_text("Queued again")).to_be_visible()
    assert state_of(farm, job_id) is State.QUEUED
    [canceled], [retried] = audited(farm, "job.cancel"), audited(farm, "job.retry")
    assert (canceled.actor, canceled.target) == ("admin:alice", job_id)
    assert (canceled.before["state"], canceled.after["state"]) == ("queued", "canceled")
    assert (retried.before["state"], retried.after["state"]) == ("canceled", "queued")
    page.goto("/admin/audit")
    expect(page.get_by_text("job.retry")).to_be_visible()


@SIZES
def test_group_is_drained_and_taken_back(farm, visit: Visit, size: str) -> None:
    page = visit(size)
    go(page, "Groups")
    page.get_by_role("button", name=f"Drain {GROUP}").click()
    expect(page.get_by_text("asked: draining")).to_be_visible()
    with farm.database.connect() as conn:
        assert get_group(conn, GROUP).wanted_state == "draining"
    page.get_by_role("button", name=f"Take back draining of {GROUP}").click()
    expect(page.get_by_role("button", name=f"Drain {GROUP}")).to_be_visible()
    entries = audited(farm, "group.drain") + audited(farm, "group.undrain")
    assert [entry.actor for entry in entries] == ["admin:alice"] * 2


@SIZES
def test_dead_delivery_is_replayed(farm, visit: Visit, size: str) -> None:
    endpoint_id = farm.endpoint()
    farm.submit()
    farm.finish(farm.claim())
    delivery_id = farm.bury_delivery()
    page = visit(size)
    go(page, "Webhooks")
    page.get_by_role("link", name="studio hook").click()
    expect(page).to_have_url(re.compile(endpoint_id))
    page.get_by_role("link", name="video.completed").click()
    expect(page.get_by_text("<h1>Oops</h1> the receiver broke")).to_be_visible()
    page.get_by_role("button", name="Replay").click()
    expect(page.get_by_text("Sent again, under the same message id.")).to_be_visible()
    [row] = farm.execute("SELECT id, status FROM webhook_delivery")
    assert (row.id, row.status) == (delivery_id, "pending")


@SIZES
@pytest.mark.req("F-50")
def test_key_is_made_shown_once_and_revoked(farm, visit: Visit, size: str) -> None:
    page = visit(size)
    go(page, "Accounts")
    page.get_by_role("link", name="acme films").click()
    page.get_by_text("New key", exact=True).click()
    page.get_by_label("What it is for").fill("night batch")
    page.get_by_role("button", name="Make the key").click()
    key = page.locator("#new-key").inner_text()
    assert re.fullmatch(r"mk_live_[0-9A-Za-z]{8}_[0-9A-Za-z]{36}", key)
    answer = page.request.get("/v1/videos", headers={"Authorization": f"Bearer {key}"})
    assert answer.status == 200
    page.get_by_role("link", name="I have it").click()
    assert key not in page.content()
    row = (
        page.get_by_role("row").filter(has_text="night batch")
        if size == "wide"
        else page.locator("tr", has_text="night batch")
    )
    row.get_by_text("Revoke", exact=True).click()
    row.get_by_role("button", name="Revoke").click()
    expect(page.get_by_text("Revoked. It stops working")).to_be_visible()
    answer = page.request.get("/v1/videos", headers={"Authorization": f"Bearer {key}"})
    assert answer.status == 401
    made = audited(farm, "key.create")
    assert [entry.actor for entry in made] == ["admin:alice"]
    assert key not in str(made)


@pytest.mark.req("F-50")
def test_prompt_with_markup_stays_text(farm, visit: Visit) -> None:
    job_id = farm.submit(MARKUP)
    page = visit()
    for path in ("/admin/queue", "/admin/jobs", f"/admin/jobs/{job_id}"):
        page.goto(path)
        expect(page.get_by_text("<img src=x onerror=").first).to_be_visible()
        page.wait_for_selector("#liveness[data-state=live]")
        assert "owned" not in page.title()
        assert page.locator("main b, main img[src=x]").count() == 0


def test_viewer_sees_everything_but_changes_nothing(farm, visit: Visit) -> None:
    farm.login("victor", Role.VIEWER)
    job_id = farm.submit()
    page = visit(name="victor")
    for path in ("/admin/", "/admin/queue", f"/admin/jobs/{job_id}", "/admin/groups"):
        page.goto(path)
        assert page.locator("main form[method=post]").count() == 0
    page.goto("/admin/audit")
    expect(page.get_by_role("heading", name="Not allowed")).to_be_visible()


def test_pages_work_without_javascript(farm, visit: Visit) -> None:
    job_id = farm.submit()
    page = visit(has_script=False)
    page.goto("/admin/queue")
    page.get_by_text("Purge", exact=True).click()
    page.get_by_label("Name of the profile").fill("something else")
    page.get_by_role("button", name="Cancel all of them").click()
    expect(page.get_by_role("alert")).to_contain_text("nothing was purged")
    assert state_of(farm, job_id) is State.QUEUED
    page.get_by_text("Purge", exact=True).click()
    page.get_by_label("Name of the profile").fill(PROFILE)
    page.get_by_role("button", name="Cancel all of them").click()
    expect(page.get_by_text("1 job canceled.")).to_be_visible()
    assert state_of(farm, job_id) is State.CANCELED


def test_keyboard_reaches_and_presses_everything(farm, visit: Visit) -> None:
    job_id = farm.submit()
    page = visit()
    page.goto(f"/admin/jobs/{job_id}")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == "Cancel":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    expect(page.get_by_text("Canceled. A running job stops")).to_be_visible()
    assert state_of(farm, job_id) is State.CANCELED


def test_open_question_survives_fresh_regions(farm, visit: Visit) -> None:
    job_id = farm.submit()
    page = visit()
    page.goto(f"/admin/jobs/{job_id}")
    page.wait_for_selector("#liveness[data-state=live]")
    page.get_by_text("Quarantine", exact=True).last.click()
    page.get_by_label("Note").fill("half a sentence")
    held = farm.claim()
    farm.report(held, 4)
    page.wait_for_function("() => document.querySelector('#job_timeline').textContent.includes('running')")
    assert page.get_by_label("Note").input_value() == "half a sentence"
    page.keyboard.press("Escape")
    page.get_by_role("heading", name="Request").click()
    expect(page.get_by_text("Step 4 of 8")).to_be_visible()
