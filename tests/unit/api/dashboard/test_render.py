"""Words, charts and templates of the dashboard."""

import re
from datetime import timedelta
from pathlib import Path

import pytest

from api.dashboard import charts
from api.dashboard.access import safe_path
from api.dashboard.render import about, ago, brief, duration, fragment, percent, size, with_query
from farm.clock import now

DASHBOARD = Path(__file__).parents[4] / "api" / "dashboard"
TEMPLATES = sorted((DASHBOARD / "templates").rglob("*.html"))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
@pytest.mark.req("F-50")
def test_template_has_no_inline_script_style_or_foreign_address(path: Path) -> None:
    source = path.read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", source) == []
    assert re.findall(r"\sstyle=|<style|\son[a-z]+=|javascript:", source) == []
    assert re.findall(r"(?:src|href|action)=\"(?:https?:)?//", source) == []
    assert "|safe" not in source.replace(" ", "")


def test_static_files_load_nothing_from_elsewhere() -> None:
    for path in (DASHBOARD / "static").iterdir():
        source = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"https?:|@import|url\(", source) == []


@pytest.mark.req("F-50")
def test_user_text_is_escaped_everywhere_a_macro_puts_it() -> None:
    html = fragment("error.html", {**_bare(), "error": _Error()})
    assert "<b>" not in html
    assert "&lt;b&gt;" in html
    assert "<script" not in str(charts.sparkline([1, 2], "<script>"))
    assert '"><b' not in str(charts.bar(0.5, '"><b>'))
    assert "<b>" not in str(charts.timeline_bar([charts.Span("<b>", 0, 1, "run")], "<b>"))


class _Error:
    http_status = 404
    message = "<b>nothing</b>"


def _bare() -> dict[str, object]:
    return {"visitor": None, "said": "", "said_kind": "", "here": "/admin/", "live_url": None}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/admin/jobs?state=failed", "/admin/jobs?state=failed"),
        ("https://evil.example/", "/admin/"),
        ("//evil.example/admin/", "/admin/"),
        ("/admin//evil.example", "/admin/"),
        ("/admin/\\evil.example", "/admin/"),
        ("/admin/\r\nSet-Cookie: a=b", "/admin/"),
        ("/administrator", "/admin/"),
        ("", "/admin/"),
    ],
)
@pytest.mark.req("F-50")
def test_only_own_paths_are_gone_back_to(given: str, shown: str) -> None:
    assert safe_path(given) == shown


def test_durations_and_sizes_are_short() -> None:
    assert [duration(value) for value in (None, 0.25, 59, 60, 3_725, 90_000)] == [
        "-",
        "0.2 s",
        "59 s",
        "1 min",
        "1 h 2 min",
        "1 d 1 h",
    ]
    assert [size(value) for value in (None, 0, 1_536, 5 * 1024**3)] == ["-", "0 B", "1.5 KiB", "5.0 GiB"]
    assert [percent(value) for value in (None, 0.0, 0.034, 0.5, 1.0)] == [
        "-",
        "0 %",
        "3.4 %",
        "50 %",
        "100 %",
    ]
    assert ago(now() - timedelta(minutes=3)) == "3 min ago"
    assert ago(now() + timedelta(hours=1, seconds=1)).startswith("in ")
    assert ago(None) == "never"
    assert [about(value) for value in (11, 75, 5_000, 300_000)] == ["11 s", "75 s", "83 min", "3 d"]


def test_long_text_is_cut_where_it_is_one_line_of_many() -> None:
    assert brief("a\n b " * 100, 10) == "a b a b a\N{HORIZONTAL ELLIPSIS}"
    assert with_query("/admin/jobs", q="a b", state="") == "/admin/jobs?q=a+b"


def test_chart_says_in_words_what_it_shows() -> None:
    drawn = str(charts.sparkline([0, 3, None, 2], "Finished"))
    assert 'aria-label="Finished: now 2, highest 3 of 4 hours"' in drawn
    assert "No data yet" in str(charts.sparkline([None], "Finished"))
    assert 'aria-label="Memory: 50 %"' in str(charts.bar(0.5, "Memory"))
