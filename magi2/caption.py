"""The structured prompt: a JSON caption becomes the compact text that the text encoder reads.

`normalise` and `add_reference_marker` follow the reference to the character: a prompt that is no JSON
object with a `global_layer` stays as it is. Nesting is measured without recursion, so that no prompt
can exhaust the stack; whoever takes prompts refuses more than MAX_NESTING levels before calling
anything else here. No tokens, no torch.

Source: the reference, inference/model/qwen35.py. Differs: a limit on nesting.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_NESTING = 64
REFERENCE_SENTENCE = "The first frame refers to <Figure 1>"

# A whole JSON string (or the rest of the text if it never closes), or one bracket. Possessive, hence linear.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)

_Object = Mapping[str, Any]
_SUBJECT_ATTRIBUTES = ("gender", "age_group", "ethnicity", "clothing", "appearance_details")


def text_nesting(text: str) -> int:
    """Count how deep the brackets nest in a text that begins like a JSON object or list; 0 for another.

    Reading stops where the first bracket is closed again: what follows cannot be part of the same JSON value.
    """
    text = text.strip()
    depth = deepest = 0
    if not text.startswith(("{", "[")):
        return 0
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in {"{", "["}:
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in {"}", "]"}:
            depth -= 1
            if depth == 0:
                break
    return deepest


def value_nesting(value: object, *, max_values: int) -> int:
    """Count how deep objects and lists nest in a JSON value; what exceeds MAX_NESTING counts as one more.

    Raises:
        OverflowError: The value holds more than `max_values` values.
    """
    level, depth, seen = [value], 0, 0
    while level:
        seen += len(level)
        if seen > max_values:
            raise OverflowError(f"more than {max_values} values")
        containers = [v for v in level if isinstance(v, dict | list | tuple)]
        if not containers or depth > MAX_NESTING:
            break
        depth += 1
        level = [child for c in containers for child in (c.values() if isinstance(c, dict) else c)]
    return depth


def parse_json(text: str) -> Any:
    """Parse a prompt that is a JSON object or list; None for any other text.

    Raises:
        ValueError: The text nests deeper than MAX_NESTING.
    """
    if text_nesting(text) > MAX_NESTING:
        raise ValueError(f"the prompt is nested deeper than {MAX_NESTING} levels")
    stripped = text.strip()
    if not stripped.startswith(("{", "[")):
        return None
    try:
        return json.loads(stripped)
    except ValueError:  # no JSON, or a number of more digits than Python reads
        return None


def normalise(text: str) -> str:
    """Return the text that the tokenizer gets for a prompt.

    A caption under `global_layer` is rendered to lines. It may render to nothing: the caller refuses that.

    Raises:
        ValueError: The text nests deeper than MAX_NESTING.
    """
    caption = _pruned(parse_json(text))
    if not isinstance(caption, dict) or "global_layer" not in caption:
        return text
    try:
        return "\n".join(line for line in _lines(caption) if line.strip())
    except TypeError:  # a number or true where a list belongs: the reference then takes the raw prompt
        return text


def add_reference_marker(prompt: str) -> str:
    """Say in a prompt, before it is normalised, that the reference image is its first frame.

    Raises:
        ValueError: The prompt nests deeper than MAX_NESTING.
    """
    caption = parse_json(prompt)
    if not isinstance(caption, dict):
        return f"{prompt}reference_layer:{REFERENCE_SENTENCE}"  # no separator, as in the reference
    return json.dumps(caption | {"reference_layer": [REFERENCE_SENTENCE]}, ensure_ascii=False)


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        children = {key: _pruned(child) for key, child in value.items()}
        return {key: child for key, child in children.items() if child is not None and child not in ([], {})}
    if isinstance(value, list):
        return [_pruned(child) for child in value if child is not None]
    return value


def _object(value: Any) -> _Object:
    return value if isinstance(value, dict) else {}


def _objects(values: Any) -> Iterator[_Object]:
    return (value for value in values or [] if isinstance(value, dict))


def _one(value: Any) -> str:
    """Render a value in one line: null as nothing, white space runs as one blank."""
    return "" if value is None else " ".join((value if isinstance(value, str) else str(value)).split())


def _joined(separator: str, parts: list[str]) -> str:
    return separator.join(part for part in parts if part)


def _pairs(pairs: dict[str, str]) -> str:
    return "; ".join(f"{key}={value}" for key, value in pairs.items() if value)


def _lines(caption: _Object) -> Iterator[str]:
    static = _object(caption["global_layer"])
    yield from _head_lines(static)
    yield from _static_lines(static)
    segments = _object(caption.get("dynamic_layer")).get("timeline_segments")
    if isinstance(segments, list) and segments:
        yield "timeline:"
        for segment in _objects(segments):
            yield from _segment_lines(segment)
    references = caption.get("reference_layer")
    if isinstance(references, list):
        yield from map(str, references)


def _head_lines(static: _Object) -> Iterator[str]:
    context, description = _one(static.get("context")), _one(static.get("description"))
    if context or description:
        yield f"context: {context}" if context else "context"
    yield description
    look = _object(static.get("aesthetics"))
    keys = {"style": "style", "mood": "mood_atmosphere", "color": "color_scheme"}
    aesthetics = _pairs({name: _one(look.get(key)) for name, key in keys.items()})
    if aesthetics:
        yield f"aesthetics: {aesthetics}"
    sound = _object(static.get("audio_baseline"))
    dialogue = _object(sound.get("dialogue"))
    tags = dialogue.get("speaker_tags")
    speakers = ",".join(_one(tag) for tag in (tags if isinstance(tags, list) else [tags]))
    audio = _pairs(
        {
            "language": _one(dialogue.get("language")),
            "speakers": speakers,
            "ambience": _one(sound.get("ambience")),
        }
    )
    if audio:
        yield f"audio: {audio}"


def _static_lines(static: _Object) -> Iterator[str]:
    subjects, objects = static.get("alive_subjects_static"), static.get("objects_static")
    if isinstance(subjects, list) and subjects:
        yield "subjects:"
        yield from map(_subject_line, _objects(subjects))
    if isinstance(objects, list) and objects:
        yield "objects:"
        yield from map(_object_line, _objects(objects))


def _subject_line(subject: _Object) -> str:
    line = " - " + _joined(" | ", [_one(subject.get("subject_id")), _one(subject.get("description"))])
    place = _joined("; ", [_one(subject.get("position")), _one(subject.get("orientation"))])
    attributes = _object(subject.get("visual_attributes"))
    pairs = _pairs({key: _one(attributes.get(key)) for key in _SUBJECT_ATTRIBUTES})
    return line + (f" ({place})" if place else "") + (f" :: {pairs}" if pairs else "")


def _object_line(thing: _Object) -> str:
    line = " - " + _joined(" | ", [_one(thing.get("object_id")), _one(thing.get("description"))])
    traits = _joined("; ", [_one(thing.get("shape_and_color")), _one(thing.get("position"))])
    return line + (f" :: {traits}" if traits else "")


def _segment_lines(segment: _Object) -> Iterator[str]:
    info = _object(segment.get("segment_basic_info"))
    span = _joined(" ", [_one(info.get("timestamp_range")), _one(info.get("segment_description"))])
    yield f" - {span}".rstrip()
    for line in _objects(_object(segment.get("audio")).get("dialogue_lines")):
        text, speaker, at = (_one(line.get(key)) for key in ("text", "speaker", "timestamp"))
        if text:
            yield f"   - {_joined(' ', ['dialogue', speaker])}: {text}" + (f" ({at})" if at else "")
    for subject in _objects(segment.get("alive_subjects")):
        action = _object(subject.get("action"))
        keys = ("primary_action", "interaction", "facial_expression")
        parts = _joined("; ", [_one(action.get(key)) for key in keys])
        if parts:  # without an id the blank before the colon stays, as in the reference
            yield f"   - action {_one(subject.get('subject_id'))}: {parts}"
    for thing in _objects(segment.get("objects")):
        state = _object(thing.get("dynamic_state"))
        parts = _joined("; ", [_one(state.get(key)) for key in ("state_change", "motion_detail")])
        if parts:
            yield f"   - objects {_one(thing.get('object_id'))}: {parts}"
