"""Ids: their form, their order, their uniqueness."""

import time_machine

from farm.ids import is_id, new_id


def test_an_id_is_a_prefix_and_26_characters_without_a_dot():
    text = new_id("video")
    assert text.startswith("video_")
    assert len(text) == len("video_") + 26
    assert text.isascii()
    assert "." not in text
    assert text == text.lower()


def test_ids_sort_by_time():
    with time_machine.travel("2026-01-01T00:00:00Z", tick=False):
        early = new_id("evt")
    with time_machine.travel("2026-01-01T00:00:00.002Z", tick=False):
        late = new_id("evt")
    assert early < late


def test_ids_of_one_millisecond_differ():
    with time_machine.travel("2026-01-01T00:00:00Z", tick=False):
        assert len({new_id("evt") for _ in range(1000)}) == 1000


def test_is_id_knows_its_own_and_nothing_else():
    assert is_id(new_id("video"), "video")
    for text in (
        "video_",
        "video_123",
        "evt_" + "0" * 26,
        "video_" + "u" * 26,
        "video_" + "8" + "0" * 25,
        "",
    ):
        assert not is_id(text, "video")
