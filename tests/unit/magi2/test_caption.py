"""Structured prompts render as the reference renders them, and no prompt exhausts the stack."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magi2.caption import (
    MAX_NESTING,
    REFERENCE_SENTENCE,
    add_reference_marker,
    normalise,
    text_nesting,
    value_nesting,
)


def rendered(caption: dict[str, Any]) -> str:
    return normalise(json.dumps(caption))


def rendered_segment(**segment: Any) -> list[str]:
    caption = {"global_layer": {"context": "c"}, "dynamic_layer": {"timeline_segments": [segment]}}
    return rendered(caption).split("\n")[2:]


def nested(levels: int) -> str:
    return '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)


EXAMPLE = {
    "global_layer": {
        "context": "Market scene",
        "description": "A tea seller pours\n one cup.",
        "aesthetics": {"style": "gouache", "color_scheme": "ochre", "contrast": "high"},
        "audio_baseline": {
            "ambience": "murmur",
            "dialogue": {"language": "English", "speaker_tags": "<subject 1>"},
        },
        "alive_subjects_static": [
            {
                "subject_id": "<subject 1>",
                "description": "a tea seller",
                "position": "left",
                "orientation": "profile",
                "visual_attributes": {"clothing": "blue vest", "gender": "female", "facial_features": "n"},
            }
        ],
        "objects_static": [
            {
                "object_id": "<object 1>",
                "description": "a glass",
                "shape_and_color": "small, clear",
                "position": "tray",
            }
        ],
    },
    "dynamic_layer": {
        "timeline_segments": [
            {
                "segment_basic_info": {
                    "timestamp_range": "00:00.0-00:10.0",
                    "segment_description": "One pour fills the glass.",
                },
                "audio": {
                    "dialogue_lines": [{"speaker": "<subject 1>", "text": "Here.", "timestamp": "00:08.0"}]
                },
                "alive_subjects": [
                    {
                        "subject_id": "<subject 1>",
                        "action": {"primary_action": "pouring", "interaction": "holds the pot"},
                    }
                ],
                "objects": [
                    {
                        "object_id": "<object 1>",
                        "dynamic_state": {"state_change": "fills", "motion_detail": "level rises"},
                    }
                ],
            }
        ]
    },
}
EXAMPLE_TEXT = """\
context: Market scene
A tea seller pours one cup.
aesthetics: style=gouache; color=ochre
audio: language=English; speakers=<subject 1>; ambience=murmur
subjects:
 - <subject 1> | a tea seller (left; profile) :: gender=female; clothing=blue vest
objects:
 - <object 1> | a glass :: small, clear; tray
timeline:
 - 00:00.0-00:10.0 One pour fills the glass.
   - dialogue <subject 1>: Here. (00:08.0)
   - action <subject 1>: pouring; holds the pot
   - objects <object 1>: fills; level rises"""


def test_whole_caption_renders_in_the_order_of_the_reference() -> None:
    assert rendered(EXAMPLE) == EXAMPLE_TEXT


@pytest.mark.parametrize("around", [" ", "\n\t", "\u00a0"])
def test_white_space_around_a_caption_does_not_matter(around: str) -> None:
    assert normalise(around + json.dumps(EXAMPLE) + around) == EXAMPLE_TEXT


@pytest.mark.parametrize(
    "text",
    [
        *(
            "A boat.",
            "  outer blanks stay  ",
            "",
            "42",
            '"text"',
            "null",
            "[1, 2]",
            "{not json",
            "{} trailing",
        ),
        *(
            '{"global_layer": null}',
            '{"global_layer": {}}',
            '{"global_layer": []}',
            '{"scene": 1}',
            "\ufeff{}",
        ),
        '{"global_layer": {"context": {"deep": []}}}',
        '{"global_layer": {"n": ' + "9" * 5000 + "}}",
    ],
)
def test_text_without_a_usable_caption_stays_as_it_is(text: str) -> None:
    assert normalise(text) == text


@pytest.mark.parametrize("layer", ["text", "", False, 0, 1.5, [1], [None, 1]])
def test_caption_of_the_wrong_type_renders_to_nothing(layer: object) -> None:
    assert rendered({"global_layer": layer}) == ""


def test_values_become_one_line_and_are_written_as_python_writes_them() -> None:
    layer = {"context": " a\n\tb ", "description": True, "aesthetics": {"style": 3.0, "color_scheme": 7}}
    assert rendered({"global_layer": layer}) == "context: a b\nTrue\naesthetics: style=3.0; color=7"


def test_description_alone_keeps_the_bare_heading() -> None:
    assert rendered({"global_layer": {"description": "d"}}) == "context\nd"


def test_blank_speaker_tags_stay_as_empty_entries() -> None:
    dialogue = {"speaker_tags": ["A", " ", None, "B"]}
    assert rendered({"global_layer": {"audio_baseline": {"dialogue": dialogue}}}) == "audio: speakers=A,,B"


def test_entries_that_are_no_objects_are_skipped_under_their_heading() -> None:
    layer = {"context": "c", "alive_subjects_static": ["x", 1], "objects_static": [[]]}
    assert rendered({"global_layer": layer}) == "context: c\nsubjects:\nobjects:"


def test_missing_parts_leave_no_separators() -> None:
    subjects = [{}, {"subject_id": "I"}, {"description": "D"}, {"subject_id": "I", "orientation": "O"}]
    objects = [{"object_id": "I", "position": "P"}, {"description": "D", "shape_and_color": "S"}]
    got = rendered({"global_layer": {"alive_subjects_static": subjects, "objects_static": objects}})
    assert got.split("\n") == [
        *("subjects:", " - ", " - I", " - D", " - I (O)"),
        *("objects:", " - I :: P", " - D :: S"),
    ]


def test_segment_without_words_is_a_bare_dash() -> None:
    assert rendered_segment(other="x") == [" -"]


def test_dialogue_needs_a_text() -> None:
    lines = [{"speaker": "A"}, {"text": "T"}, {"text": "T", "speaker": "A", "timestamp": "1"}, {"text": " "}]
    got = rendered_segment(audio={"dialogue_lines": lines})
    assert got == [" -", "   - dialogue: T", "   - dialogue A: T (1)"]


def test_actions_and_states_without_an_id_keep_the_blank_before_the_colon() -> None:
    subjects = [{"action": {"facial_expression": "smile"}}, {"subject_id": "S", "action": "walks"}]
    objects = [{"dynamic_state": {"motion_detail": "m"}}, {"object_id": "O"}]
    got = rendered_segment(alive_subjects=subjects, objects=objects)
    assert got == [" -", "   - action : smile", "   - objects : m"]


@pytest.mark.parametrize("value", [5, 1.5, True])
@pytest.mark.parametrize("field", ["alive_subjects", "objects"])
def test_number_where_a_segment_wants_a_list_keeps_the_raw_prompt(field: str, value: object) -> None:
    segment = {"segment_basic_info": {"segment_description": "d"}, field: value}
    text = json.dumps({"global_layer": {}, "dynamic_layer": {"timeline_segments": [segment]}, "a": 1})
    text = text.replace('"global_layer": {}', '"global_layer": {"context": "c"}')
    assert normalise(text) == text


@pytest.mark.parametrize("value", ["text", {"a": {"text": "t"}}])
def test_text_or_object_where_a_segment_wants_a_list_yields_nothing(value: object) -> None:
    assert rendered_segment(audio={"dialogue_lines": value}, objects=value) == [" -"]


def test_reference_lines_come_last_and_keep_their_blanks() -> None:
    got = rendered(
        {"reference_layer": [" two  blanks ", "", "  ", None, 7], "global_layer": {"context": "c"}}
    )
    assert got == "context: c\n two  blanks \n7"


def test_marker_replaces_the_references_of_a_caption() -> None:
    got = add_reference_marker(' {"reference_layer": "old", "a": "\u6e56", "n": 1.50} ')
    assert got == '{"reference_layer": ["' + REFERENCE_SENTENCE + '"], "a": "\u6e56", "n": 1.5}'


@pytest.mark.parametrize("text", ["A boat.", "A boat. \n", "[1]", "42", "{not json", ""])
def test_marker_follows_any_other_prompt_without_a_separator(text: str) -> None:
    assert add_reference_marker(text) == text + "reference_layer:The first frame refers to <Figure 1>"


@pytest.mark.parametrize("levels", [1, 2, MAX_NESTING])
def test_nesting_up_to_the_limit_is_read(levels: int) -> None:
    assert text_nesting(nested(levels)) == levels
    assert normalise(nested(levels)) == nested(levels)


@pytest.mark.parametrize(
    "text",
    [nested(MAX_NESTING + 1), "[" * 60_000, "  " + '{"a":' * 9_000, '["' + "\\" * 8 + '",' + "[" * 99],
    ids=["one level more", "only brackets", "never closed", "behind a string"],
)
def test_deeper_nesting_is_an_error_and_no_exhausted_stack(text: str) -> None:
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        normalise(text)
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        add_reference_marker(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "' + "[" * 200 + '"}',
        '["\\"' + "{" * 200 + '"]',
        "[a] " + "[" * 200,
        "x" + "[" * 200,
        '{"' + "{" * 200,
    ],
)
def test_brackets_in_strings_or_behind_the_value_do_not_count(text: str) -> None:
    assert text_nesting(text) == 1 or not text.startswith(("{", "["))
    assert normalise(text) == text


def test_nesting_of_a_value_counts_objects_and_lists() -> None:
    assert value_nesting({"a": [{"b": 1}], "c": 2}, max_values=10) == 3
    assert value_nesting("text", max_values=10) == 0


def test_nesting_of_a_value_stops_beyond_the_limit() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert value_nesting(loop, max_values=1000) == MAX_NESTING + 1


def test_value_of_too_many_parts_is_not_walked() -> None:
    wide: object = 1
    for _ in range(60):
        wide = [wide, wide]  # 2**60 leaves by sharing
    with pytest.raises(OverflowError):
        value_nesting(wide, max_values=10_000)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.sampled_from(sorted("abc")) | st.text(max_size=4), children, max_size=4)
    ),
    max_leaves=30,
)


@given(JSON)
def test_text_and_value_nesting_agree_on_any_json(value: object) -> None:
    assert text_nesting(json.dumps(value)) == value_nesting(value, max_values=10_000)


@given(JSON, JSON)
def test_any_json_in_a_caption_normalises_to_lines_that_are_not_blank(
    static: object, dynamic: object
) -> None:
    text = json.dumps({"global_layer": static, "dynamic_layer": dynamic})
    got = normalise(text)
    assert got in {text, ""} or all(line.strip() for line in got.split("\n"))


@given(st.text(alphabet='{}[]"\\: ,a1', max_size=200))
def test_nesting_of_bracket_soup_bounds_what_the_parser_finds(text: str) -> None:
    depth = text_nesting(text)
    assert depth <= len(text)
    try:
        value = json.loads(text)
    except ValueError:
        return
    assert value_nesting(value, max_values=1000) == depth


def test_nesting_limit_leaves_the_stack_room() -> None:
    assert sys.getrecursionlimit() > 10 * MAX_NESTING
