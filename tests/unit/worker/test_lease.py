from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from farm.jobs.job import Beat
from worker.heartbeat import Lease


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make_lease(clock, lease_s=30.0):
    claimed = SimpleNamespace(job=SimpleNamespace(id="video_a"), epoch=3, lease_s=lease_s)
    return Lease(claimed, sent_at=clock.now, clock=clock)


def test_lease_counts_as_lost_five_seconds_before_its_end(clock):
    lease = make_lease(clock)
    clock.now = 124.9
    assert not lease.lost
    clock.now = 125.0
    assert lease.lost == "no heartbeat was accepted in time"


def test_accepted_beat_counts_from_when_it_was_sent(clock):
    lease = make_lease(clock)
    clock.now = 123.0  # the answer took three seconds
    lease.renew(120.0, Beat(30.0, False, False, None))
    clock.now = 144.9
    assert not lease.lost
    clock.now = 145.0
    assert lease.lost


def test_lease_once_lost_is_never_found_again(clock):
    lease = make_lease(clock)
    clock.now = 200.0
    assert lease.lost
    lease.renew(200.0, Beat(30.0, False, False, None))
    assert lease.lost == "no heartbeat was accepted in time"


def test_first_reason_stays(clock):
    lease = make_lease(clock)
    lease.lose("fenced out")
    clock.now = 200.0
    assert lease.lost == "fenced out"


def test_what_a_beat_tells_is_not_forgotten_by_the_next(clock):
    lease = make_lease(clock)
    lease.renew(100.0, Beat(30.0, True, True, None))
    lease.renew(101.0, Beat(30.0, False, False, None))
    assert (lease.cancel_requested, lease.deadline_passed) == (True, True)


def test_short_lease_still_leaves_most_of_itself(clock):
    lease = make_lease(clock, lease_s=3.0)
    clock.now = 102.4
    assert not lease.lost
    clock.now = 102.5
    assert lease.lost
