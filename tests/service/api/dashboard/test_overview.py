"""The overview without a browser: what its charts say to those who do not see them."""

import re

from api.dashboard import overview as page
from farm.db.session import unit_of_work
from farm.profile_control import pause_profile
from farm.watch.overview import overview
from tests.service.api.conftest import SUBMIT, Farm
from tests.service.api.dashboard.test_access import make_login, visitor

LABEL = re.compile('aria-label="([^"]+ of 24 hours)"')


def sample(farm: Farm, minutes_ago: int, queued: int, up: int, busy: int, lag_s: float) -> None:
    farm.execute(
        "INSERT INTO farm_sample VALUES (now() - make_interval(mins => :m), :queued, :up, :busy, :lag_s)",
        m=minutes_ago,
        queued=queued,
        up=up,
        busy=busy,
        lag_s=lag_s,
    )


async def test_history_is_drawn_by_hour_and_told_in_words(farm: Farm) -> None:
    make_login(farm)
    async with visitor(farm) as client:
        assert "No data yet" in (await client.get("/admin/")).text
        for minutes_ago, *values in (
            (1, 4, 2, 2, 0.0),
            (30, 9, 1, 1, 2.5),
            (150, 40, 3, 3, 61.0),
            (25 * 60, 999, 99, 99, 999.0),  # more than a day ago
        ):
            sample(farm, minutes_ago, *values)
        labels = set(LABEL.findall((await client.get("/admin/")).text))
    assert labels >= {
        "Longest queue of each hour: now 9 jobs, highest 40 jobs of 24 hours",
        "Fewest groups up in each hour: now 1, highest 3 of 24 hours",
        "Most groups busy in each hour: now 2, highest 3 of 24 hours",
        "Longest outbox lag of each hour: now 2.50 s, highest 61 s of 24 hours",
    }


def test_hours_without_a_ticker_are_gaps(farm: Farm) -> None:
    sample(farm, 30, 9, 1, 1, 0.0)
    sample(farm, 150, 40, 3, 3, 0.0)
    with farm.database.connect() as conn:
        found = overview(conn).history
    assert found.queued == [None] * 21 + [40, None, 9]
    assert page.PAGES[0].regions == ("warnings", "totals", "profiles")  # the charts come with the live part


async def test_paused_profile_is_told_even_if_nobody_serves_or_uses_it(farm: Farm) -> None:
    make_login(farm)
    async with visitor(farm) as client:
        assert "s-paused" not in (await client.get("/admin/")).text
        with unit_of_work(farm.database) as conn:
            pause_profile(conn, "sp4", "admin:alice")
        shown = (await client.get("/admin/")).text
    assert re.findall(r'">([^<]+)</a> <span class="badge s-paused">', shown) == ["sp4"]


async def test_search_for_a_state_that_is_none_is_refused(farm: Farm) -> None:
    make_login(farm)
    async with visitor(farm) as client:
        shown = (await client.get("/admin/jobs?state=zzz")).text
    assert "state is &#39;zzz&#39;; use one of" in shown
    assert "<option selected>zzz</option>" in shown


async def test_queue_of_a_paused_profile_promises_no_start(farm: Farm) -> None:
    make_login(farm)
    async with farm.client() as user:
        await user.post("/v1/videos", json=SUBMIT)
        farm.finish()
        await user.post("/v1/videos", json=SUBMIT)
    async with visitor(farm) as client:
        assert re.findall(r'data-label="Starts">(.*?)</td>', (await client.get("/admin/queue")).text) == [
            "next"
        ]
        with unit_of_work(farm.database) as conn:
            pause_profile(conn, "tiny-cpu", "admin:alice")
        shown = (await client.get("/admin/queue")).text
    assert re.findall(r'data-label="Starts">(.*?)</td>', shown) == ['<span class="muted">unknown</span>']
