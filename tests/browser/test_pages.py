"""Every page, wide and narrow, light and dark: fits, is not clipped, can be used by everybody.

Screenshots of what was looked at are written to `build/screenshots/`.
"""

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from tests.browser.conftest import SCREENSHOTS, Visit
from tests.browser.farm import LivedFarm

# A busy machine draws slowly; waits are bounded one by one.
pytestmark = pytest.mark.timeout(900)
PATHS = {
    "overview": "/admin/",
    "queue": "/admin/queue",
    "jobs": "/admin/jobs",
    "jobs-empty": "/admin/jobs?q=nothing+like+this",
    "job-done": "/admin/jobs/{done}",
    "job-failed": "/admin/jobs/{failed}",
    "job-running": "/admin/jobs/{running}",
    "bulk": "/admin/jobs/bulk?do=cancel&state=queued",
    "groups": "/admin/groups",
    "waves": "/admin/waves",
    "quarantine": "/admin/quarantine",
    "webhooks": "/admin/webhooks",
    "endpoint": "/admin/webhooks/{endpoint}",
    "delivery": "/admin/webhooks/deliveries/{delivery}",
    "accounts": "/admin/accounts",
    "account": "/admin/accounts/{account}",
    "storage": "/admin/storage",
    "audit": "/admin/audit",
    "system": "/admin/system",
    "not-found": "/admin/nothing",
}
# What is wider or higher than its own box though nothing scrolls there: text that nobody can read.
CLIPPED = """() => [...document.querySelectorAll("body *")].filter((element) => {
  const style = getComputedStyle(element);
  const unseen = "svg, .skip, .visually-hidden, details:not([open]) > :not(summary)";
  if (style.display === "none" || element.closest(unseen)) return false;
  if (element.clientWidth === 0 || element.textContent.trim() === "") return false;
  const hides = (axis) => ["hidden", "clip"].includes(style[axis]);
  const wide = element.scrollWidth > element.clientWidth + 1 && hides("overflowX");
  const high = element.scrollHeight > element.clientHeight + 1 && hides("overflowY");
  const box = element.getBoundingClientRect();
  const leaves = box.right > innerWidth + 1 || box.left < -1;
  return wide || high || leaves || style.textOverflow === "ellipsis";
}).map((element) => element.outerHTML.slice(0, 160))"""
TOO_WIDE = "() => Math.max(document.documentElement.scrollWidth, document.body.scrollWidth) - innerWidth"


def problems_of(page: Page) -> list[str]:
    """Return what axe calls serious or critical."""
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {node['html'][:160]}"
        for each in found
        if each["impact"] in {"serious", "critical"}
        for node in each["nodes"]
    ]


def keep(page: Page, name: str) -> Path:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    return path


@pytest.mark.parametrize(("size", "scheme"), [("wide", "light"), ("narrow", "light"), ("wide", "dark")])
@pytest.mark.req("F-50")
def test_every_page_fits_and_can_be_used(lived: LivedFarm, visit: Visit, size: str, scheme: str) -> None:
    ids = {**lived.live_long(), "account": lived.account_id}
    lived.login("alice")
    door = visit(size, name=None, scheme=scheme)
    door.goto("/admin/login")
    page = visit(size, scheme=scheme)
    faults, errors = {}, []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    for name, path in [("login", ""), *PATHS.items()]:
        shown = page if path else door
        if path:
            answer = shown.goto(path.format(**ids), wait_until="load")
            assert answer.status == (404 if name == "not-found" else 200), path
        label = f"{name}-{size}-{scheme}"
        keep(shown, label)
        found = [f"{shown.evaluate(TOO_WIDE)} px too wide"] if shown.evaluate(TOO_WIDE) > 0 else []
        found += [f"clipped: {each}" for each in shown.evaluate(CLIPPED)]
        found += problems_of(shown)
        assert shown.title() != "owned"
        if found:
            faults[label] = found
    assert faults == {}
    assert [error for error in errors if "404" not in error] == []
