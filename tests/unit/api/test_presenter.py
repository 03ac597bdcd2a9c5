"""From rows to the video object, without a database."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from api.presenter import View, etag_of, poll_after_ms, present
from api.schemas import CreatedWebhook
from farm.jobs.job import Asset, Job
from farm.jobs.states import ACTIVE, TERMINAL, State, openai_status
from magi2.contract import GenerationRequest

AT = datetime(2026, 2, 1, 12, 0, 0, 250_000, tzinfo=UTC)
REQUEST = GenerationRequest("a fox", "540p", 100, 42, output_width=1280, output_height=720)


def job(state: State = State.QUEUED, **values: Any) -> Job:
    base: dict[str, Any] = dict.fromkeys(Job.__dataclass_fields__)
    base |= {
        "id": "video_1",
        "account_id": "acct_1",
        "state": state,
        "profile": "sp4",
        "reuse": "off",
        "priority": 0,
        "prompt": "a fox",
        "params": REQUEST.to_json(),
        "seed": 42,
        "steps": 100,
        "step": 0,
        "progress": 0,
        "epoch": 1,
        "max_attempts": 3,
        "retry_count": 0,
        "expires_in_s": 86_400,
        "notices": [],
        "metadata": {},
        "seq": 7,
        "created_at": AT,
        "queued_at": AT,
    }
    return Job(**{**base, **values})


def asset(**values: Any) -> Asset:
    base: dict[str, Any] = dict.fromkeys(Asset.__dataclass_fields__)
    base |= {"kind": "video", "bytes": 10, "sha256": "ab", "media_type": "video/mp4"}
    return Asset(**{**base, **values})


@pytest.mark.parametrize("state", list(State))
def test_every_state_has_its_word_for_openai_and_its_error_or_none(state: State) -> None:
    video = present(View(job(state, progress=100, finished_at=AT)), "http://farm")
    assert (video.state, video.status) == (state.value, openai_status(state))
    assert (video.error is None) == (state not in TERMINAL - {State.SUCCEEDED})
    assert (video.completed_at is not None) == (state is State.SUCCEEDED)
    assert (video.urls.cancel is None) == (state in TERMINAL)
    assert (video.urls.content is None) == (state is not State.SUCCEEDED)
    assert (video.progress, video.step) == ((100, 100) if state is State.SUCCEEDED else (99, 0))


@pytest.mark.parametrize("state", [State.CANCELED, State.EXPIRED])
def test_ending_without_a_stored_error_still_has_a_code(state: State) -> None:
    error = present(View(job(state)), "http://farm").error
    assert error is not None
    assert error.code == state.value


def test_stored_error_is_shown_without_what_is_for_operators() -> None:
    stored = {
        "code": "engine_error",
        "message": "the engine failed",
        "retryable": True,
        "detail": "/opt/x.py",
    }
    error = present(View(job(State.FAILED, error=stored)), "http://farm").error
    assert error is not None
    assert error.model_dump() == {"code": "engine_error", "message": "the engine failed", "retryable": True}


def test_size_is_what_was_generated_and_video_is_what_comes_out() -> None:
    video = present(View(job()), "http://farm")
    assert (video.size, video.resolution) == ("896x512", "540p")
    assert (video.video.width, video.video.height) == (1280, 720)


def test_times_are_unix_for_openai_and_milliseconds_for_us() -> None:
    started = AT + timedelta(seconds=2.5)
    video = present(View(job(State.RUNNING, started_at=started)), "http://farm")
    assert video.created_at == int(AT.timestamp())
    assert video.queued_at == "2026-02-01T12:00:00.250Z"
    assert video.queue_time_s == 2.5


def test_inference_time_is_the_engines_own_or_that_of_the_states() -> None:
    times = {"running_at": AT, "uploading_at": AT + timedelta(seconds=8)}
    by_states = present(View(job(State.SUCCEEDED, **times)), "http://farm")
    by_engine = present(View(job(State.SUCCEEDED, result={"inference_time_s": 7.5}, **times)), "http://farm")
    assert (by_states.inference_time_s, by_engine.inference_time_s) == (8.0, 7.5)


def test_times_of_an_older_attempt_give_no_negative_wait() -> None:
    video = present(View(job(queued_at=AT, started_at=AT - timedelta(seconds=5))), "http://farm")
    assert video.queue_time_s is None


def test_conditioning_comes_from_the_result() -> None:
    stored = {"reference_grid": [18, 28], "branches": {"conditional": {"video": 14336}}, "more": 1}
    video = present(View(job(State.SUCCEEDED, result={"conditioning": stored})), "http://farm")
    assert video.conditioning is not None
    assert video.conditioning.model_dump() == stored
    for result in (None, {}, {"conditioning": {}}, {"conditioning": None}):
        assert present(View(job(State.SUCCEEDED, result=result)), "http://farm").conditioning is None


def test_file_facts_come_from_the_asset() -> None:
    view = View(job(State.SUCCEEDED, finished_at=AT), asset(expires_at=AT + timedelta(days=7)))
    video = present(view, "http://farm")
    assert (video.bytes, video.sha256, video.media_type) == (10, "ab", "video/mp4")
    assert video.expires_at == int(AT.timestamp()) + 7 * 86_400


def test_webhook_is_shown_only_where_it_was_made() -> None:
    made = CreatedWebhook(url="https://a.example/", events=["video.completed"], signing_secret="whsec_x")
    assert present(View(job()), "http://farm", made).webhook == made
    assert present(View(job()), "http://farm").webhook is None


@pytest.mark.parametrize(
    ("state", "eta_s", "after_ms"),
    [
        (State.QUEUED, None, 1000),
        (State.QUEUED, 3600.0, 1000),
        (State.STARTING, None, 2000),
        (State.RUNNING, None, 2000),
        (State.RUNNING, 30.0, 2000),
        (State.RUNNING, 120.0, 6000),
        (State.RUNNING, 3600.0, 10_000),
        (State.RUNNING, 4.0, 500),
        (State.UPLOADING, None, 500),
        (State.SUCCEEDED, None, None),
        (State.FAILED, None, None),
    ],
)
def test_next_poll_follows_what_is_left(state: State, eta_s: float | None, after_ms: int | None) -> None:
    assert poll_after_ms(View(job(state), eta_s=eta_s)) == after_ms


def test_tag_is_the_number_of_the_newest_event() -> None:
    assert etag_of(job()) == '"7"'


@pytest.mark.parametrize("state", sorted(ACTIVE))
def test_phase_is_shown_only_while_a_group_holds_the_job(state: State) -> None:
    held = job(state, phase="denoise")
    assert present(View(held), "http://farm").phase == "denoise"
    assert present(View(replace(held, state=State.QUEUED)), "http://farm").phase is None
