"""The shipped board and alert rules use metrics and labels that exist, in queries that parse."""

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.metric_table import SERIES

ROOT = Path(__file__).parents[3]
BOARD = json.loads((ROOT / "deploy/grafana/magi2-farm.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = {
    **{
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "5m")
        for panel in PANELS
        for target in panel["targets"]
    },
    **{rule["alert"]: rule["expr"] for rule in RULES},
}
NAME = re.compile(r"\bmagi2_[a-z0-9_]+")
# name{matchers} or name without matchers.
SELECTOR = re.compile(r"\b(magi2_[a-z0-9_]+)(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\b(?:by|on) \(([^)]*)\)")


def labels_asked_of(expression: str) -> set[str]:
    return {label.strip() for labels in GROUPING.findall(expression) for label in labels.split(",")}


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_query_parses_and_names_only_series_and_labels_that_exist(where: str) -> None:
    expression = EXPRESSIONS[where]
    promql_parser.parse(expression)
    selected = SELECTOR.findall(expression)
    assert selected
    known: set[str] = set()
    for name, matchers in selected:
        assert name in SERIES, name
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        assert used <= set(SERIES[name]), (name, used)
        known |= set(SERIES[name])
    assert labels_asked_of(expression) <= known


def test_legends_and_sentences_name_labels_that_their_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert wanted <= labels_asked_of(target["expr"]), panel["title"]
    for rule in RULES:
        wanted = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert wanted <= labels_asked_of(rule["expr"]), rule["alert"]


def test_board_shows_every_metric_of_the_table() -> None:
    shown = {name for text in (target["expr"] for panel in PANELS for target in panel["targets"])
             for name in NAME.findall(text)}  # fmt: skip
    hidden = {
        series
        for series in SERIES
        if not series.endswith(("_sum", "_count", "_bucket")) and series not in shown
    }
    assert hidden == set()


def test_every_documented_trouble_has_an_alert() -> None:
    alerts = {rule["alert"] for rule in RULES}
    assert alerts >= {
        "Magi2QueueOld",
        "Magi2NoLiveGroup",
        "Magi2OutboxOld",
        "Magi2WebhooksDead",
        "Magi2GroupSick",
        "Magi2PoisonJob",
        "Magi2SweepStale",
        "Magi2StorageErrors",
    }


def test_every_alert_leads_to_a_recipe_that_exists() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    titles = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    for rule in RULES:
        document, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert document == "docs/operations.md"
        assert anchor in titles, rule["alert"]
        assert rule["labels"]["severity"] in {"warning", "critical"}


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in BOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
