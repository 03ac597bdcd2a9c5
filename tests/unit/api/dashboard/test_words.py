"""What pages say in words: logs, settings, sides of a change, warnings, and where time went."""

import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from api.dashboard import jobs
from api.dashboard.access import Visitor
from api.dashboard.overview import warnings_of
from api.dashboard.render import fragment
from api.dashboard.system import plain
from farm.admins import Role

AT = datetime(2026, 2, 1, tzinfo=UTC)
SIDE = re.compile(r'<td data-label="(Before|After)">(.*?)</td>', re.DOTALL)


def after(seconds: float) -> datetime:
    return AT + timedelta(seconds=seconds)


def attempt(**at: float) -> SimpleNamespace:
    names = ("queued_at", "started_at", "running_at", "uploading_at", "ended_at")
    return SimpleNamespace(**{name: after(at[name]) if name in at else None for name in names})


def test_bar_of_time_has_no_wait_over_an_earlier_attempt() -> None:
    found: Any = SimpleNamespace(
        at=after(100),
        events=[SimpleNamespace(at=AT)],
        attempts=[
            attempt(queued_at=0, started_at=5, running_at=10, ended_at=50),
            attempt(queued_at=0, started_at=58, running_at=60),  # as an earlier release wrote it
        ],
    )
    spans = [(span.name, span.start_s, span.end_s) for span in jobs.spans_of(found)]
    assert spans == [
        ("waiting", 0, 5),
        ("starting", 5, 10),
        ("running", 10, 50),
        ("waiting", 50, 58),
        ("starting", 58, 60),
        ("running", 60, 100),
    ]


def test_log_is_told_by_rank() -> None:
    assert jobs.log_of({"log": {"0": ["a", "b"], "1": []}}) == "rank 0:\na\nb\n\nrank 1:\nno output"
    assert jobs.log_of({"log": ["a", "b"]}) == "a\nb"
    assert jobs.log_of({"stderr": "a"}) == "a"
    assert jobs.log_of({"log": {}}) == ""


def test_times_of_phases_follow_each_other_as_the_phases_do() -> None:
    times = {"mux": 1, "other": 2, "denoise": 3, "text_encode": 4, "decode_video": 5}
    names = [name for name, _ in jobs.in_order(times)]
    assert names == ["text_encode", "denoise", "decode_video", "mux", "other"]
    attempt_times = {"check": 1, "render": 2, "upload": 3}  # as PostgreSQL keeps them
    assert [name for name, _ in jobs.in_order(attempt_times)] == ["render", "check", "upload"]


@pytest.mark.parametrize(
    ("before", "changed", "shown"),
    [
        (None, {"a": 1}, ["none", "a: 1"]),
        ({"a": None}, {"a": 1}, ["none", "a: 1"]),
        ({"a": 1}, {"a": None}, ["a: 1", "none"]),
        ({"a": 1}, {"a": 1}, ["the same", "the same"]),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, ["b: 2", "b: 3"]),
        (None, None, ["none", "none"]),
    ],
)
def test_sides_of_a_change_say_none_and_the_same_only_where_it_is_so(
    before: dict[str, Any] | None, changed: dict[str, Any] | None, shown: list[str]
) -> None:
    page = audit_page(before=before, after=changed)
    texts = [re.sub("<dt[^>]*hidden.*?</dt>", "", html) for _, html in SIDE.findall(page)]
    assert [re.sub("<[^>]+>", "", text.replace("</dt>", ": ")).strip() for text in texts] == shown


def test_short_target_of_a_change_is_not_broken() -> None:
    assert '<span class="id nowrap">alice</span>' in audit_page(target="alice")
    assert '<span class="id">acct_' in audit_page(target="acct_0123456789abcdef")


def audit_page(**changes: Any) -> str:
    base = {"id": 1, "at": AT, "actor": "system:cli", "ip": None, "action": "x", "target": "alice"}
    entry = SimpleNamespace(**{**base, "before": None, "after": None, **changes})
    context = {
        "visitor": Visitor("alice", Role.ADMIN, "admin:alice", None),
        "section": "audit",
        "said": "",
        "said_kind": "",
        "here": "/admin/audit",
        "live_url": None,
        "log": SimpleNamespace(entries=[entry], has_more=False),
        "filters": {"actor": "", "action": "", "target": ""},
    }
    return fragment("audit.html", context)


@pytest.mark.parametrize(("num", "words"), [(1, "1 job waits for p"), (2, "2 jobs wait for p")])
def test_warning_counts_as_people_do(num: int, words: str) -> None:
    profile = SimpleNamespace(name="p", queued=num, groups_up=0, oldest_s=None)
    farm: Any = SimpleNamespace(
        profiles=[profile], sick_groups=0, outbox_oldest_s=None, failure_rate_1h=None, disabled_endpoints=0
    )
    assert warnings_of(farm, [], {}) == [("bad", f"{words}, which no group serves", "/groups")]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("None", "not set"),
        ("True", "true"),
        ("[]", "none"),
        ("['a', 'b']", "a, b"),
        ("[broken", "[broken"),
        ("7", "7"),
    ],
)
def test_settings_are_shown_without_python(value: str, shown: str) -> None:
    assert plain(value) == shown
