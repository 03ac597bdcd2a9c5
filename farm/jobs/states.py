"""The states of a job and the moves between them; nothing else defines either.

Only `farm/jobs/transition.py` writes a state, and it obeys `EDGES`. Tests turn the same table into a database
trigger that refuses everything else.
"""

from enum import StrEnum


class State(StrEnum):
    """Where a job is."""

    QUEUED = "queued"  # accepted and waiting, also while a backoff runs
    STARTING = "starting"  # claimed by a group; weights load, inputs are fetched
    RUNNING = "running"  # ranks compute
    UPLOADING = "uploading"  # the encoded file is being stored
    SUCCEEDED = "succeeded"  # the asset rows are committed
    FAILED = "failed"  # gave up; `error` says why
    CANCELED = "canceled"  # a user or an operator stopped it
    EXPIRED = "expired"  # nobody claimed it before its queue deadline


ACTIVE = frozenset({State.STARTING, State.RUNNING, State.UPLOADING})
TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELED, State.EXPIRED})
RETRYABLE = TERMINAL - {State.SUCCEEDED}

EDGES: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.STARTING, State.CANCELED, State.EXPIRED}),
    State.STARTING: frozenset({State.RUNNING, State.QUEUED, State.FAILED, State.CANCELED}),
    State.RUNNING: frozenset({State.UPLOADING, State.QUEUED, State.FAILED, State.CANCELED}),
    State.UPLOADING: frozenset({State.SUCCEEDED, State.QUEUED, State.FAILED, State.CANCELED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset({State.QUEUED}),
    State.CANCELED: frozenset({State.QUEUED}),
    State.EXPIRED: frozenset({State.QUEUED}),
}

_OPENAI = {
    State.QUEUED: "queued",
    State.STARTING: "in_progress",
    State.RUNNING: "in_progress",
    State.UPLOADING: "in_progress",
    State.SUCCEEDED: "completed",
    State.FAILED: "failed",
    State.CANCELED: "failed",
    State.EXPIRED: "failed",
}


def sources(to: State) -> frozenset[State]:
    """Return the states from which a job may move to `to`."""
    return frozenset(state for state, targets in EDGES.items() if to in targets)


def openai_status(state: State) -> str:
    """Return the word of the OpenAI video object; its SDK knows only these four."""
    return _OPENAI[state]


def states_of(status: str) -> frozenset[State]:
    """Return the states that an OpenAI status stands for; empty for an unknown word."""
    return frozenset(state for state, word in _OPENAI.items() if word == status)
