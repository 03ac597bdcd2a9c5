"""When a delivery is tried again."""

import pytest

from farm.webhooks.deliveries import JITTER, SCHEDULE_S, Outcome, next_delay_s
from farm.webhooks.messages import MAX_ATTEMPTS


@pytest.mark.parametrize("attempt", range(1, MAX_ATTEMPTS))
def test_a_failure_waits_as_the_schedule_says_give_or_take_the_jitter(attempt: int) -> None:
    planned_s = SCHEDULE_S[attempt - 1]
    for _ in range(50):
        delay_s = next_delay_s(attempt, Outcome(1, http_status=500, error="http_500"), 0, MAX_ATTEMPTS)
        assert delay_s is not None
        assert planned_s * (1 - JITTER) <= delay_s <= planned_s * (1 + JITTER)


@pytest.mark.parametrize(
    ("attempt", "outcome"),
    [
        (1, Outcome(1, http_status=204)),
        (1, Outcome(1, http_status=410, error="http_410")),
        (MAX_ATTEMPTS, Outcome(1, error="timeout")),
    ],
)
def test_success_gone_and_the_last_try_end_a_delivery(attempt: int, outcome: Outcome) -> None:
    assert next_delay_s(attempt, outcome, 0, MAX_ATTEMPTS) is None


@pytest.mark.parametrize(
    ("asked_s", "least_s", "most_s"), [(60.0, 60.0, 60.0), (9e9, 3600.0, 3600.0), (0.0, 4.0, 6.0)]
)
def test_retry_after_is_heeded_up_to_an_hour(asked_s: float, least_s: float, most_s: float) -> None:
    delay_s = next_delay_s(
        1, Outcome(1, http_status=503, error="http_503", retry_after_s=asked_s), 0, MAX_ATTEMPTS
    )
    assert delay_s is not None
    assert least_s <= delay_s <= most_s


def test_retry_after_of_an_ordinary_error_is_not_heeded() -> None:
    delay_s = next_delay_s(
        1, Outcome(1, http_status=500, error="http_500", retry_after_s=3000.0), 0, MAX_ATTEMPTS
    )
    assert delay_s is not None
    assert delay_s <= SCHEDULE_S[0] * (1 + JITTER)


@pytest.mark.parametrize("status", [301, 302, 404, 500])
def test_anything_but_2xx_is_no_success(status: int) -> None:
    assert not Outcome(1, http_status=status, error=f"http_{status}").is_success
