"""Which wave is started: pure choice among what may run."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from farm.jobs.wave_claim import Candidate, choose
from farm.profile_control import Control

AT = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
PAD = Control("dlo-dp4", wave_max_wait_s=60, wave_fill="pad")


def waiting(number, key="540p/100/det=0", **changes):
    plain = Candidate(
        id=f"video_{number}",
        account_id="acct_a",
        wave_key=key,
        rank_at=AT + timedelta(seconds=number),
        is_urgent=False,
        is_alone=False,
        waited_s=1.0,
        running_then=number,
    )
    return replace(plain, **changes)


def chosen(candidates, control=PAD, num_slots=4):
    choice = choose(candidates, control, num_slots)
    return None if choice is None else (choice.fill, [member.id for member in choice.members])


@pytest.mark.req("F-45")
def test_a_full_wave_starts_at_once_with_the_first_of_its_key():
    assert chosen([waiting(number) for number in (5, 3, 1, 4, 2)]) == (
        "full",
        [f"video_{n}" for n in (1, 2, 3, 4)],
    )


@pytest.mark.req("F-45")
def test_jobs_of_different_keys_never_share_a_wave():
    mixed = [waiting(number, key=f"540p/{100 + number % 2}/det=0") for number in range(6)]
    assert chosen(mixed) is None
    assert chosen([replace(one, waited_s=61) for one in mixed]) == ("pad", ["video_0", "video_2", "video_4"])


@pytest.mark.req("F-45")
@pytest.mark.parametrize(
    ("fill", "waited_s", "started"), [("pad", 59.9, 0), ("pad", 60, 2), ("wait", 999, 0), ("spill", 999, 0)]
)
def test_an_incomplete_wave_waits_from_its_oldest_member_on(fill, waited_s, started):
    found = chosen([waiting(1), waiting(2, waited_s=waited_s)], replace(PAD, wave_fill=fill))
    assert len(found[1] if found else []) == started


def test_a_full_wave_does_not_wait_for_an_incomplete_one_that_came_first():
    early = [waiting(0, key="272p/4/det=0")]
    assert chosen([*early, *(waiting(number) for number in range(1, 5))])[0] == "full"
    assert chosen([replace(early[0], waited_s=60), *(waiting(number) for number in range(1, 5))])[0] == "pad"


@pytest.mark.req("F-46")
def test_a_job_that_was_in_two_crashed_waves_gets_no_neighbours():
    lonely = waiting(2, is_alone=True)
    assert chosen([lonely, *(waiting(number) for number in (3, 4, 5))]) == ("alone", ["video_2"])
    assert chosen([lonely, *(waiting(number) for number in (1, 3, 4, 5))])[1] == [
        f"video_{n}" for n in (1, 3, 4, 5)
    ]


def test_urgent_work_and_accounts_with_little_running_go_first():
    busy = [waiting(number, running_then=number + 5) for number in range(4)]
    other = waiting(9, account_id="acct_b", running_then=1)
    assert chosen([*busy, other])[1][0] == "video_9"
    urgent = waiting(8, is_urgent=True, running_then=9)
    assert chosen([*busy, other, urgent])[1][:2] == ["video_8", "video_9"]


def test_an_operator_may_ask_for_smaller_waves_but_not_for_larger_ones():
    two = [waiting(1), waiting(2)]
    assert chosen(two, replace(PAD, wave_size=2))[0] == "full"
    assert chosen(two, replace(PAD, wave_size=9)) is None
