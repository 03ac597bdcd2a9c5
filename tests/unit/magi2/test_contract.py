"""Every rule of the request contract, its code and message; all problems at once; no input escapes them."""

import json
import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magi2.contract import (
    FPS,
    IMAGE_FIELD,
    REQUEST_FIELDS,
    TIERS,
    GenerationRequest,
    ImageFacts,
    Limits,
    Problem,
    draw_seed,
    problems_of,
    undecodable_image,
    validate,
    wave_key,
    wave_problems,
)
from magi2.values import shown
from tests.contract_requests import CACHED, IMAGE, LIMITS, SMALL, accepted, problems


def test_bare_prompt_takes_the_engine_defaults() -> None:
    request = accepted(seed=7)
    assert request == GenerationRequest("A boat.", "540p", 100, 7, None, None, False, "off", has_image=False)
    assert (request.width, request.height) == (896, 512)


def test_seed_that_is_not_given_is_drawn_and_recorded() -> None:
    validated = validate({"prompt": "x"}, limits=LIMITS, draw_seed=lambda: 99)
    assert validated.request is not None
    assert validated.request.seed == 99


def test_drawn_seeds_differ_and_survive_any_json_reader() -> None:
    seeds = {draw_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**53 and int(float(seed)) == seed for seed in seeds)


def test_form_strings_are_read_like_json_values() -> None:
    as_form = accepted(
        resolution="272P", seconds="10", num_frames="125", fps="12.5", num_inference_steps="20", seed="42",
        n="1", output_width="128", output_height="64", deterministic="false", acceleration="off",
    )  # fmt: skip
    as_json = accepted(
        resolution="272p", seconds=10, num_frames=125, fps=12.5, num_inference_steps=20, seed=42, n=1,
        output_width=128, output_height=64, deterministic=False, acceleration="off",
    )  # fmt: skip
    assert as_form == as_json == GenerationRequest("A boat.", "272p", 20, 42, 128, 64)


def test_none_counts_as_not_given_in_every_field() -> None:
    nothing = dict.fromkeys([*REQUEST_FIELDS, "negative_prompt", "whatever"]) | {
        "prompt": "A boat.",
        "seed": 1,
    }
    assert validate(nothing, limits=LIMITS).request == accepted(seed=1)


@pytest.mark.parametrize("field", ["seconds", "duration"])
@pytest.mark.parametrize("value", [10, 10.0, "10", "10.0", "1e1", "10.", "+10", Fraction(10)])
def test_ten_seconds_are_accepted_in_any_spelling(field: str, value: object) -> None:
    accepted(**{field: value})


@pytest.mark.parametrize("field", ["seconds", "duration"])
@pytest.mark.parametrize(
    "value",
    [
        9,
        11,
        10.001,
        "9.99",
        "",
        "  ",
        "ten",
        float("nan"),
        float("inf"),
        "nan",
        10**400,
        True,
        [10],
        {},
        "\u0661\u0660",
    ],
)
def test_any_other_length_is_refused(field: str, value: object) -> None:
    text = f"seconds must be 10; MAGI-2 Preview makes 10-second clips only (got {shown(value)})"
    assert problems(**{field: value}) == [Problem(field, "seconds_unsupported", text)]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *(
            (124, "124"),
            ("250", "250"),
            (125.5, "125.5"),
            (True, "true"),
            ("", "an empty text"),
            ("x" * 99, "x" * 37 + "..."),
        ),
        *(
            pytest.param(10**5000, "an integer of 16610 bits", id="huge"),
            ([125], "a value of type list"),
            ("\u0661", "'\\u0661'"),
        ),
    ],
)
def test_other_number_of_frames_is_refused_and_shown(value: object, said: str) -> None:
    want = Problem("num_frames", "num_frames_unsupported", f"num_frames must be 125 (got {said})")
    assert problems(num_frames=value) == [want]


@pytest.mark.parametrize("value", [12.5, "12.5", "12.50", FPS])
def test_the_rate_is_accepted(value: object) -> None:
    accepted(fps=value)


@pytest.mark.parametrize(
    ("value", "said"), [(12, "12"), ("25/2", "25/2"), (25.0, "25.0"), (float("nan"), "nan")]
)
def test_other_rate_is_refused_and_shown(value: object, said: str) -> None:
    assert problems(fps=value) == [Problem("fps", "fps_unsupported", f"fps must be 12.5 (got {said})")]


@pytest.mark.parametrize(("value", "tier"), [("272p", "272p"), ("540P", "540p")])
def test_resolution_names_the_tier(value: str, tier: str) -> None:
    assert accepted(resolution=value).tier == tier


@pytest.mark.parametrize(
    "value", ["1080p", "720p", "", " 540p", "540", 540, 540.0, True, ["540p"], "\uff15\uff14\uff10p"]
)
def test_other_resolution_is_refused(value: object) -> None:
    text = f"resolution must be 272p or 540p; the 1080p refiner is not available (got {shown(value)})"
    assert problems(resolution=value) == [Problem("resolution", "resolution_unsupported", text)]


@pytest.mark.parametrize(
    "fields",
    [
        *(
            {"size": "448x256"},
            {"width": 448, "height": "256"},
            {"size": "448x256", "width": 448, "height": 256},
        ),
        {"resolution": "272p", "size": "448x256", "width": "448", "height": "256"},
    ],
)
def test_size_names_the_tier(fields: dict[str, object]) -> None:
    assert accepted(**fields).tier == "272p"


@pytest.mark.parametrize(("given", "missing"), [("width", "height"), ("height", "width")])
def test_width_and_height_come_together(given: str, missing: str) -> None:
    want = Problem(missing, "size_incomplete", "width and height must be given together")
    assert problems(**{given: 896}) == [want]


@pytest.mark.parametrize(
    "value",
    [
        *(
            "896X512",
            "896 x 512",
            "896*512",
            "896x",
            "x512",
            "896",
            "0x512",
            "-896x512",
            "896.0x512",
            "",
            "1e3x512",
        ),
        *("896x512\n", "\u0668x\u0665", "9" * 100 + "x1", 896, [896, 512], {"width": 896}, True),
    ],
)
def test_size_of_another_form_is_refused(value: object) -> None:
    text = "size must look like 896x512 with positive integers; the sizes there are: 448x256 and 896x512"
    text += f" (got {shown(value)})"
    assert problems(size=value) == [Problem("size", "size_invalid", text)]


@pytest.mark.parametrize("value", [0, -448, 448.0, "448.0", "", True, [448], float("nan")])
def test_side_that_is_no_positive_integer_is_refused(value: object) -> None:
    text = "size must look like 896x512 with positive integers; the sizes there are: 448x256 and 896x512"
    text += f" (got width {shown(value)})"
    assert problems(width=value, height=256) == [Problem("width", "size_invalid", text)]


@pytest.mark.parametrize("fields", [{"size": "1920x1080"}, {"size": "512x896"}, {"size": "1x1"}])
def test_size_that_is_no_preset_is_refused(fields: dict[str, object]) -> None:
    text = "size must be 448x256 or 896x512; use output_width and output_height to resize the result"
    text += f" (got {fields['size']})"
    assert problems(**fields) == [Problem("size", "size_unsupported", text)]


def test_sides_that_are_no_preset_are_refused() -> None:
    assert [(p.field, p.code) for p in problems(width=10**400, height=1)] == [("width", "size_unsupported")]


def test_size_must_be_that_of_the_resolution() -> None:
    text = "resolution 540p means 896x512 (got 448x256)"
    assert problems(resolution="540p", size="448x256") == [Problem("size", "size_resolution_mismatch", text)]
    assert problems(resolution="540p", width=448, height=256) == [
        Problem("width", "size_resolution_mismatch", text)
    ]
    assert [p.code for p in problems(resolution="540p", size="640x480")] == ["size_resolution_mismatch"]


def test_size_and_sides_must_agree() -> None:
    text = "size 896x512 and width and height 448x256 differ; give only one of them"
    assert problems(size="896x512", width=448, height=256) == [
        Problem("size", "size_resolution_mismatch", text)
    ]


@pytest.mark.parametrize(("width", "height"), [(64, 64), (4096, 64), ("1920", "1080"), (66, 4094)])
def test_output_size_is_accepted_and_is_the_size_of_the_clip(width: Any, height: Any) -> None:
    request = accepted(output_width=width, output_height=height)
    assert (request.width, request.height) == (int(width), int(height))


@pytest.mark.parametrize(
    ("given", "missing"), [("output_width", "output_height"), ("output_height", "output_width")]
)
def test_output_sides_come_together(given: str, missing: str) -> None:
    want = Problem(missing, "output_size_incomplete", "output_width and output_height must be given together")
    assert problems(**{given: 128}) == [want]


@pytest.mark.parametrize(
    "value", [62, 63, 65, 4097, 4098, -64, 0, 128.0, "128.0", True, "", [], 10**400, float("inf")]
)
def test_output_side_out_of_bounds_is_refused(value: object) -> None:
    text = "output_width and output_height must be even integers between 64 and 4096"
    assert problems(output_width=value, output_height=64) == [
        Problem("output_width", "output_size_invalid", f"{text} (got output_width {shown(value)})")
    ]


def test_two_bad_sides_are_two_different_lines() -> None:
    found = problems(output_width=63, output_height=63)
    assert [p.field for p in found] == ["output_width", "output_height"]
    assert len({p.message for p in found}) == 2


@pytest.mark.parametrize("value", [1, 200, "100", "+4"])
def test_steps_are_accepted(value: object) -> None:
    assert accepted(num_inference_steps=value).num_inference_steps == int(value)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "value", [0, 201, -1, 4.0, 4.5, "4.0", "1e1", "", " ", True, False, [4], {}, 10**400, float("nan")]
)
def test_other_steps_are_refused(value: object) -> None:
    text = f"num_inference_steps must be an integer from 1 to 200 (got {shown(value)})"
    assert problems(num_inference_steps=value) == [Problem("num_inference_steps", "steps_invalid", text)]


@pytest.mark.parametrize("value", [0, 2**63 - 1, "9223372036854775807"])
def test_seed_is_accepted(value: object) -> None:
    assert accepted(seed=value).seed == int(value)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "value", [-1, 2**63, "9223372036854775808", 1.0, "1.0", True, "", "random", [], 1e18, -(10**400)]
)
def test_other_seed_is_refused(value: object) -> None:
    text = f"seed must be an integer from 0 to 9223372036854775807 (got {shown(value)})"
    assert problems(seed=value) == [Problem("seed", "seed_invalid", text)]


@pytest.mark.parametrize("value", [2, 0, "2", True, "", [1]])
def test_more_than_one_clip_is_refused(value: object) -> None:
    text = f"exactly one clip is made per request (got {shown(value)})"
    assert problems(n=value) == [Problem("n", "num_outputs", text)]


def test_more_than_one_image_is_refused() -> None:
    want = Problem(IMAGE_FIELD, "image_count", "exactly one image is supported (got 2)")
    assert problems((IMAGE, IMAGE)) == [want]


def test_image_is_recorded() -> None:
    assert accepted((IMAGE,)).has_image


@pytest.mark.parametrize("task", ["i2v", "I2VA", "image-to-video", "image_to_video"])
def test_image_task_needs_an_image(task: str) -> None:
    want = Problem(IMAGE_FIELD, "image_required", "image-to-video needs one image")
    assert problems(task=task) == [want]
    accepted((IMAGE,), task=task)


def test_text_task_goes_without_an_image() -> None:
    accepted(task="text-to-video")
    assert [(p.field, p.code) for p in problems((IMAGE,), task="t2v")] == [("task", "field_unsupported")]


@pytest.mark.parametrize("task", ["v2v", "", 5, True, ["t2v"]])
def test_other_task_is_refused(task: object) -> None:
    assert [(p.field, p.code) for p in problems(task=task)] == [("task", "field_unsupported")]


@pytest.mark.parametrize(
    ("tier", "width", "height"),
    [("272p", 1400, 100), ("272p", 100, 1400), ("540p", 2800, 100), ("540p", 100, 1401)],
)
def test_image_up_to_the_longest_shape_of_the_tier_is_accepted(tier: str, width: int, height: int) -> None:
    accepted((ImageFacts(width, height),), resolution=tier)


@pytest.mark.parametrize(
    ("tier", "width", "height"),
    [("272p", 1401, 100), ("272p", 100, 1401), ("540p", 2801, 100), ("540p", 100, 2900)],
)
def test_longer_image_is_refused(tier: str, width: int, height: int) -> None:
    text = f"the image is too elongated for {tier}: at most {TIERS[tier].max_aspect}:1"
    text += f" (got {width}x{height})"
    want = [Problem(IMAGE_FIELD, "image_aspect", text)]
    assert problems((ImageFacts(width, height),), resolution=tier) == want


@pytest.mark.parametrize(("width", "height"), [(31, 31), (31, 100), (100, 31), (1, 1), (0, 0)])
def test_tiny_image_is_refused(width: int, height: int) -> None:
    text = f"the image must be at least 32x32 (got {width}x{height})"
    assert Problem(IMAGE_FIELD, "image_too_small", text) in problems((ImageFacts(width, height),))


def test_smallest_image_is_accepted() -> None:
    accepted((ImageFacts(32, 32),))


def test_unreadable_image_is_named_by_its_code() -> None:
    text = "the image could not be read as a still PNG, JPEG or WebP"
    assert undecodable_image() == Problem(IMAGE_FIELD, "image_undecodable", text)
    assert undecodable_image("it has 3 frames").message == f"{text}: it has 3 frames"


@pytest.mark.parametrize("field", ["video", "audio", "input_video", "audio_url"])
def test_video_and_audio_conditions_are_refused(field: str) -> None:
    text = "only text and one still image can be given; video and audio conditions are not supported"
    assert problems(**{field: "x"}) == [Problem(field, "media_unsupported", text)]


@pytest.mark.parametrize(
    "field",
    [
        "negative_prompt",
        "guidance_scale",
        "true_cfg_scale",
        "audio_guidance",
        "refiner",
        "image_path",
        "image",
        "extra",
    ],
)
@pytest.mark.parametrize("value", ["", "x", 5.0, False])
def test_other_fields_are_refused_by_name(field: str, value: object) -> None:
    known = ", ".join(sorted(REQUEST_FIELDS))
    want = Problem(field, "field_unsupported", f"field {field} is not supported; there are {known}")
    assert problems(**{field: value}) == [want]


def test_unknown_field_is_told_what_the_caller_reads_itself_too() -> None:
    (found,) = validate({"prompt": "x", "priorty": 1}, limits=LIMITS, others=["priority"]).problems
    assert "priority" in found.message.split("there are ")[1].split(", ")


def test_name_of_an_unknown_field_is_shown_safely() -> None:
    found = validate({"prompt": "x", "\ud800" * 99: 1, 5: 1}, limits=LIMITS).problems  # type: ignore[dict-item]
    assert [p.code for p in found] == ["field_unsupported"] * 2
    assert all((p.field + p.message).isascii() and len(p.message) < 400 for p in found)


@pytest.mark.parametrize(("limits", "value"), [(LIMITS, "off"), (CACHED, "cache_dit"), (CACHED, "off")])
def test_acceleration_that_the_profile_takes_is_accepted(limits: Limits, value: str) -> None:
    assert accepted(limits=limits, acceleration=value).acceleration == value


@pytest.mark.parametrize("value", ["turbo", "", "OFF", True, False, 0, ["off"], {}])
def test_unknown_acceleration_is_refused(value: object) -> None:
    found = problems(acceleration=value)
    assert [(p.field, p.code) for p in found] == [("acceleration", "field_unsupported")]
    assert found[0].message.startswith("field acceleration is not supported")


def test_acceleration_that_the_profile_forbids_is_refused_with_caps_and_defaults() -> None:
    found = problems(limits=SMALL, acceleration="cache_dit")
    text = "profile tiny-cpu takes at most 272p and 20 steps; without values it uses 272p and 4"
    assert [(p.field, p.code) for p in found] == [("acceleration", "profile_limit")]
    assert found[0].message == f"{text}; acceleration can only be off (got acceleration cache_dit)"


@pytest.mark.parametrize("value", [False, "no", 0])
def test_deterministic_must_be_the_setting_of_the_farm(value: object) -> None:
    text = "deterministic is fixed when a worker starts; this farm runs with deterministic=true"
    text += f" (got {shown(value)})"
    assert problems(limits=SMALL, deterministic=value) == [
        Problem("deterministic", "deterministic_mismatch", text)
    ]
    assert accepted(limits=LIMITS, deterministic=value).deterministic is False


@pytest.mark.parametrize("value", ["maybe", "", 2, [], float("nan")])
def test_deterministic_that_is_no_boolean_is_refused(value: object) -> None:
    assert [p.code for p in problems(deterministic=value)] == ["deterministic_mismatch"]


def test_setting_of_the_farm_is_taken_where_a_request_says_nothing() -> None:
    assert accepted(limits=SMALL).deterministic is True


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        *(
            ({"resolution": "540p"}, "resolution"),
            ({"size": "896x512"}, "size"),
            ({"num_inference_steps": 21}, "num_inference_steps"),
        ),
        ({"width": 896, "height": 512}, "width"),
    ],
)
def test_what_exceeds_the_profile_is_refused_with_caps_and_defaults(
    fields: dict[str, object], field: str
) -> None:
    text = "profile tiny-cpu takes at most 272p and 20 steps; without values it uses 272p and 4"
    text += f" (got {field} {fields[field]})"
    assert problems(limits=SMALL, **fields) == [Problem(field, "profile_limit", text)]


def test_profile_defaults_are_taken_with_a_notice_each() -> None:
    validated = validate({"prompt": "x"}, limits=SMALL)
    assert validated.request is not None
    assert (validated.request.tier, validated.request.num_inference_steps) == ("272p", 4)
    assert validated.notices == [
        "num_inference_steps was not given: profile tiny-cpu uses 4 (usually 100)",
        "resolution was not given: profile tiny-cpu uses 272p (usually 540p)",
    ]


def test_values_that_are_given_bring_no_notice() -> None:
    fields = {"prompt": "x", "num_inference_steps": 4, "size": "448x256"}
    assert validate(fields, limits=SMALL).notices == []


def test_profile_that_switches_the_cache_on_says_so() -> None:
    limits = Limits("fast", "540p", "540p", 100, 200, False, ("off", "cache_dit"), "cache_dit")
    validated = validate({"prompt": "x"}, limits=limits)
    assert validated.request is not None
    assert validated.request.acceleration == "cache_dit"
    assert validated.notices == ["acceleration was not given: profile fast uses cache_dit (usually off)"]


def test_all_problems_are_reported_at_once() -> None:
    found = problems(
        (ImageFacts(9, 9), IMAGE), prompt=" ", resolution="1080p", seconds=5, num_frames=1, fps=1, size="x",
        num_inference_steps=0, seed=-1, n=2, output_width=1, deterministic="x", acceleration="y", video="v",
        zzz=1,
    )  # fmt: skip
    assert {p.code for p in found} == {
        *(
            "prompt_missing",
            "resolution_unsupported",
            "size_invalid",
            "seconds_unsupported",
            "fps_unsupported",
        ),
        *("num_frames_unsupported", "num_outputs", "steps_invalid", "seed_invalid", "output_size_invalid"),
        *("output_size_incomplete", "deterministic_mismatch", "field_unsupported", "image_count"),
        *("image_too_small", "media_unsupported"),
    }


def test_stored_request_reads_back_equal() -> None:
    request = accepted((IMAGE,), resolution="272p", seed=2**63 - 1, output_width=64, output_height=66)
    assert GenerationRequest.from_json(json.loads(json.dumps(request.to_json()))) == request


@pytest.mark.parametrize("change", [{"extra": 1}, {"prompt": None}])
def test_stored_request_of_other_keys_is_refused(change: dict[str, object]) -> None:
    values = accepted().to_json() | change
    values = {name: value for name, value in values.items() if name != "prompt" or value is not None}
    with pytest.raises(ValueError, match="not a stored request"):
        GenerationRequest.from_json(values)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        *(({"tier": "1080p"}, "resolution_unsupported"), ({"num_inference_steps": 999}, "steps_invalid")),
        *(({"seed": -1}, "seed_invalid"), ({"output_width": 65, "output_height": 64}, "output_size_invalid")),
        *(({"prompt": ""}, "prompt_missing"), ({"deterministic": True}, "deterministic_mismatch")),
        *(({"acceleration": "cache_dit"}, "profile_limit"), ({"output_width": 64}, "output_size_incomplete")),
    ],
)
def test_stored_request_meets_the_same_rules_again(change: dict[str, object], code: str) -> None:
    stored = GenerationRequest.from_json(accepted().to_json() | change)
    assert [p.code for p in problems_of(stored, LIMITS)] == [code]


def test_wave_key_names_tier_steps_and_determinism() -> None:
    assert wave_key(accepted(limits=SMALL)) == "272p/4/det=1"
    assert wave_key(accepted((IMAGE,), num_inference_steps=8)) == "540p/8/det=0"


def test_wave_takes_equal_requests_up_to_its_slots() -> None:
    text = "a wave has 2 slots, all with the same number of steps and the same tier"
    one, other = accepted(num_inference_steps=4), accepted(num_inference_steps=5)
    assert wave_problems([one, one], 2) == []
    assert wave_problems([one, one, one], 2) == [Problem("batch", "batch_size", text)]
    assert wave_problems([one, other], 2) == [Problem("batch", "batch_steps", text)]


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.binary(max_size=4)
)
TEXTS = st.sampled_from(
    ["10", "12.5", "125", "896x512", "448x256", "272p", "true", "off", "cache_dit", "i2v", "1e1"]
)
VALUES = st.recursive(
    SCALARS | TEXTS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3)
)
NAMES = st.sampled_from(sorted(REQUEST_FIELDS)) | st.text(max_size=8)
IMAGES = st.lists(st.builds(ImageFacts, st.integers(0, 20_000), st.integers(0, 20_000)), max_size=3)


@settings(max_examples=400)
@given(st.dictionaries(NAMES, VALUES, max_size=8), IMAGES, st.sampled_from([LIMITS, SMALL, CACHED]))
def test_any_fields_give_a_valid_request_or_printable_problems(
    fields: dict[str, Any], images: list[ImageFacts], limits: Limits
) -> None:
    validated = validate(fields, limits=limits, images=images)
    assert (validated.request is None) == bool(validated.problems)
    for problem in validated.problems:
        assert all(text.isascii() and text.isprintable() and text for text in (problem.code, problem.message))
    if validated.request is not None:
        stored = GenerationRequest.from_json(json.loads(json.dumps(validated.request.to_json())))
        assert stored == validated.request
        assert problems_of(stored, limits) == []


@given(st.text(max_size=300) | st.text(alphabet='{}[]",:\\ud8globa_ayerntx ', max_size=300))
def test_any_prompt_is_read_or_refused_with_and_without_an_image(prompt: str) -> None:
    for images in ((), (IMAGE,)):
        found = problems(images, prompt=prompt)
        assert {p.field for p in found} <= {"prompt"}


def test_contract_loads_without_torch() -> None:
    code = "import sys, magi2.contract, magi2.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
