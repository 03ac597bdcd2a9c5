"""The edge table is the one of the specification, and its readings agree with it."""

import pytest

from farm.jobs.states import ACTIVE, EDGES, RETRYABLE, TERMINAL, State, openai_status, sources, states_of

SPECIFIED = {
    ("queued", "starting"),
    ("queued", "canceled"),
    ("queued", "expired"),
    ("starting", "running"),
    ("running", "uploading"),
    ("uploading", "succeeded"),
    *(
        (active, end)
        for active in ("starting", "running", "uploading")
        for end in ("queued", "failed", "canceled")
    ),
    ("failed", "queued"),
    ("canceled", "queued"),
    ("expired", "queued"),
}


@pytest.mark.req("F-01")
def test_edges_are_exactly_those_of_the_specification():
    assert {(start, end) for start, ends in EDGES.items() for end in ends} == SPECIFIED


@pytest.mark.req("F-02")
def test_a_success_has_no_way_out_and_other_ends_only_back_to_the_queue():
    assert EDGES[State.SUCCEEDED] == frozenset()
    assert all(EDGES[state] == {State.QUEUED} for state in RETRYABLE)


def test_every_state_is_queued_active_or_terminal():
    assert {State.QUEUED} | ACTIVE | TERMINAL == set(State)
    assert not ACTIVE & TERMINAL


@pytest.mark.parametrize("to", State)
def test_sources_are_the_edges_read_backwards(to):
    assert sources(to) == {start for start, ends in EDGES.items() if to in ends}


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("queued", "queued"),
        ("starting", "in_progress"),
        ("running", "in_progress"),
        ("uploading", "in_progress"),
        ("succeeded", "completed"),
        ("failed", "failed"),
        ("canceled", "failed"),
        ("expired", "failed"),
    ],
)
def test_openai_knows_four_words(state, word):
    assert openai_status(State(state)) == word
    assert State(state) in states_of(word)


def test_an_unknown_status_stands_for_no_state():
    assert states_of("running") == frozenset()
