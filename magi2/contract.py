"""The request contract: what MAGI-2 Preview makes, and every rule a request must keep.

The one implementation for command, api and worker: `validate` reads raw fields (JSON values or form
strings) and reports all broken rules at once, each as (field, code, message); `problems_of` runs the
same rules again on a stored request. Nothing is corrected silently. Torch-free and without side
effects, but for drawing a seed. The token count and the pixels of an image are checked elsewhere, with
the problems made here.
"""

import dataclasses
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from magi2.prompt_rules import UNREADABLE_PROMPT, read_prompt
from magi2.values import as_boolean, as_integer, as_number, shown

CONTRACT_VERSION = 1

CLIP_SECONDS = 10
NUM_FRAMES = 125
FPS = Fraction(25, 2)
SAMPLE_RATE_HZ = 44_100
NUM_SAMPLES = 441_000
NUM_AUDIO_LATENTS = 250
NUM_LATENT_FRAMES = 32

DEFAULT_TIER = "540p"
DEFAULT_STEPS = 100
MAX_STEPS = 200
MAX_SEED = 2**63 - 1
MAX_PROMPT_CHARS = 60_000
MAX_PROMPT_TOKENS = 7_000
MIN_OUTPUT_SIDE, MAX_OUTPUT_SIDE = 64, 4096
MIN_IMAGE_SIDE = 32
IMAGE_FIELD = "input_reference"
ACCELERATIONS = ("off", "cache_dit")

_TEXT_TASKS = frozenset({"t2v", "t2va", "text-to-video"})
_IMAGE_TASKS = frozenset({"i2v", "i2va", "image-to-video"})
_MEDIA_FIELDS = frozenset(
    {
        "video",
        "audio",
        "video_reference",
        "audio_reference",
        "input_video",
        "input_audio",
        "video_url",
        "audio_url",
    }
)
# Every field that `validate` understands; all others are refused by name.
REQUEST_FIELDS = frozenset(
    {"prompt", "task", "resolution", "size", "width", "height", "seconds", "duration", "num_frames", "fps"}
    | {"num_inference_steps", "seed", "n", "output_width", "output_height", "deterministic", "acceleration"}
)


@dataclass(frozen=True)
class Tier:
    """A resolution that the model generates at, with the longest image that fits it."""

    name: str
    width: int
    height: int
    max_aspect: int

    @property
    def latent_width(self) -> int:
        """Columns of a latent frame."""
        return self.width // 16

    @property
    def latent_height(self) -> int:
        """Rows of a latent frame."""
        return self.height // 16


# From small to large: a profile's cap counts in this order.
TIERS = {tier.name: tier for tier in (Tier("272p", 448, 256, 14), Tier("540p", 896, 512, 28))}


@dataclass(frozen=True)
class Problem:
    """One broken rule: the field, a stable code and what to change."""

    field: str
    code: str
    message: str


@dataclass(frozen=True)
class ImageFacts:
    """The size of a reference image, upright (EXIF orientation applied)."""

    width: int
    height: int


@dataclass(frozen=True)
class Limits:
    """What one profile allows and takes where a request says nothing."""

    profile: str
    default_tier: str
    max_tier: str
    default_steps: int
    max_steps: int
    deterministic: bool
    accelerations: tuple[str, ...] = ("off",)
    default_acceleration: str = "off"


def default_limits(*, deterministic: bool = False) -> Limits:
    """Return the engine's own limits, without any profile's."""
    return Limits("default", DEFAULT_TIER, DEFAULT_TIER, DEFAULT_STEPS, MAX_STEPS, deterministic)


@dataclass(frozen=True)
class GenerationRequest:
    """A complete request: every default is filled in, so the same values give the same clip."""

    prompt: str
    tier: str
    num_inference_steps: int
    seed: int
    output_width: int | None = None
    output_height: int | None = None
    deterministic: bool = False
    acceleration: str = "off"
    has_image: bool = False

    @property
    def width(self) -> int:
        """Width of the finished clip."""
        return self.output_width or TIERS[self.tier].width

    @property
    def height(self) -> int:
        """Height of the finished clip."""
        return self.output_height or TIERS[self.tier].height

    def to_json(self) -> dict[str, Any]:
        """Return the request as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "GenerationRequest":
        """Read what `to_json` wrote.

        Raises:
            ValueError: A key is missing or unknown.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if values.keys() != names:
            raise ValueError(
                f"not a stored request: keys {sorted(values.keys() ^ names)} are missing or unknown"
            )
        return cls(**values)


@dataclass(frozen=True)
class Validated:
    """The outcome of `validate`: a request exactly when there is no problem."""

    request: GenerationRequest | None
    problems: list[Problem]
    notices: list[str]


def draw_seed() -> int:
    """Draw a seed of 53 bits, which any JSON reader keeps exactly."""
    return secrets.randbelow(2**53)


def validate(
    fields: Mapping[str, object],
    *,
    limits: Limits,
    images: Sequence[ImageFacts] = (),
    draw_seed: Callable[[], int] = draw_seed,
    others: Collection[str] = (),
) -> Validated:
    """Check raw request fields against every rule and fill in the defaults.

    Args:
        fields: Names of REQUEST_FIELDS (others are problems); a value of None counts as not given.
        limits: Caps and defaults of the profile that the request is for.
        images: One entry for each reference image that came with the request.
        draw_seed: Called if the request names no seed.
        others: Fields that the caller reads itself, to be named where an unknown one is refused.
    """
    reader = _Reader(_given(fields), limits, has_image=bool(images), others=others)
    request = _read_request(reader, draw_seed)
    _check_task(reader, len(images))
    reader.problems += image_problems(images, request.tier or None)
    return Validated(None if reader.problems else request, reader.problems, _notices(reader))


def problems_of(request: GenerationRequest, limits: Limits) -> list[Problem]:
    """Run the rules again on a stored request; its image, if any, is checked with `image_problems`."""
    fields = request.to_json()
    fields["resolution"] = fields.pop("tier")
    fields.pop("has_image")
    reader = _Reader(_given(fields), limits, has_image=request.has_image)
    _read_request(reader, draw_seed)
    return reader.problems


def image_problems(images: Sequence[ImageFacts], tier: str | None) -> list[Problem]:
    """Check how many reference images there are, and the size of each, for a tier (None: for any)."""
    limit = TIERS[tier] if tier else max(TIERS.values(), key=lambda t: t.max_aspect)
    found = []
    if len(images) > 1:
        found.append(
            Problem(IMAGE_FIELD, "image_count", f"exactly one image is supported (got {len(images)})")
        )
    for image in images:
        short, long = sorted((image.width, image.height))
        if short < MIN_IMAGE_SIDE:
            text = f"the image must be at least {MIN_IMAGE_SIDE}x{MIN_IMAGE_SIDE} (got {_size(image)})"
            found.append(Problem(IMAGE_FIELD, "image_too_small", text))
        # The image keeps its shape with its long side at the tier's width; sides are cut to multiples of 32.
        if short < 1 or int(short * limit.width / long) < MIN_IMAGE_SIDE:
            text = f"the image is too elongated for {limit.name}: at most {limit.max_aspect}:1"
            text += f" (got {_size(image)})"
            found.append(Problem(IMAGE_FIELD, "image_aspect", text))
    return found


def _size(image: ImageFacts) -> str:
    return f"{image.width}x{image.height}"


def undecodable_image(reason: str = "") -> Problem:
    """Make the problem of an image that cannot be read; `reason` says more, such as its size."""
    text = "the image could not be read as a still PNG, JPEG or WebP"
    return Problem(IMAGE_FIELD, "image_undecodable", f"{text}: {reason}" if reason else text)


def invalid_prompt() -> Problem:
    """Make the problem of a prompt that no tokenizer can read."""
    return Problem("prompt", *UNREADABLE_PROMPT)


def too_many_tokens(num_tokens: int) -> Problem:
    """Make the problem of a prompt that only the tokenizer finds too long."""
    return Problem(
        "prompt",
        "prompt_too_long",
        f"prompt is {num_tokens} tokens; at most {MAX_PROMPT_TOKENS} are supported",
    )


def wave_key(request: GenerationRequest) -> str:
    """Name what requests must share to run in one wave, such as 272p/4/det=0."""
    return f"{request.tier}/{request.num_inference_steps}/det={int(request.deterministic)}"


def wave_problems(requests: Sequence[GenerationRequest], num_slots: int) -> list[Problem]:
    """Check that requests fit one wave: not more than its slots, all with one wave key."""
    text = f"a wave has {num_slots} slots, all with the same number of steps and the same tier"
    found = [Problem("batch", "batch_size", text)] if len(requests) > num_slots else []
    if len({wave_key(request) for request in requests}) > 1:
        found.append(Problem("batch", "batch_steps", text))
    return found


def _given(fields: Mapping[str, object]) -> dict[str, object]:
    return {str(name): value for name, value in fields.items() if value is not None}


@dataclass
class _Reader:
    given: dict[str, object]
    limits: Limits
    has_image: bool
    others: Collection[str] = ()
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def refuse(self, field: str, code: str, message: str) -> None:
        self.problems.append(Problem(field, code, message))

    def refuse_value(self, field: str, code: str, rule: str) -> None:
        """Say a rule and what was given instead."""
        self.refuse(field, code, f"{rule} (got {shown(self.given[field])})")

    def refuse_profile_limit(self, field: str, remark: str = "") -> None:
        own = self.limits
        text = (
            f"profile {own.profile} takes at most {own.max_tier} and {own.max_steps} steps; "
            f"without values it uses {own.default_tier} and {own.default_steps}"
        )
        got = f" (got {field} {shown(self.given[field])})" if field in self.given else ""
        self.refuse(field, "profile_limit", text + remark + got)


def _read_request(reader: _Reader, draw_seed: Callable[[], int]) -> GenerationRequest:
    """Read all fields but the task; after a problem the request is only a draft."""
    prompt, problem = read_prompt(reader.given.get("prompt"), MAX_PROMPT_CHARS, has_image=reader.has_image)
    if problem:
        reader.refuse("prompt", *problem)
    tier = _read_tier(reader)
    _check_clip_shape(reader)
    steps = _read_steps(reader)
    seed = _read_seed(reader)
    output_width, output_height = _read_pair(reader, _OUTPUT_SIDES) or (None, None)
    request = GenerationRequest(
        prompt=prompt,
        tier=tier or "",
        num_inference_steps=steps,
        seed=draw_seed() if seed is None else seed,
        output_width=output_width,
        output_height=output_height,
        deterministic=_read_deterministic(reader),
        acceleration=_read_acceleration(reader),
        has_image=reader.has_image,
    )
    _check_strangers(reader)
    return request


def _read_tier(reader: _Reader) -> str | None:
    """Read resolution, size and width with height, which must agree; None where they name no tier."""
    name = reader.given.get("resolution")
    tier = TIERS.get(name.lower()) if isinstance(name, str) else None
    if name is not None and tier is None:
        text = "resolution must be 272p or 540p; the 1080p refiner is not available"
        reader.refuse_value("resolution", "resolution_unsupported", text)
    size, sides = _read_size(reader), _read_pair(reader, _SIDES)
    if size and sides and size != sides:
        text = f"size {_by(size)} and width and height {_by(sides)} differ; give only one of them"
        reader.refuse("size", "size_resolution_mismatch", text)
    elif size or sides:
        tier = _tier_of_size(reader, "size" if size else "width", size or sides or (0, 0), tier)
    elif name is None and not reader.given.keys() & {"size", "width", "height"}:
        tier = TIERS[reader.limits.default_tier]
    order = list(TIERS)
    if tier and order.index(tier.name) > order.index(reader.limits.max_tier):
        named = [field for field in ("resolution", "size", "width") if field in reader.given]
        reader.refuse_profile_limit(named[0] if named else "resolution")
    return tier.name if tier else None


def _tier_of_size(reader: _Reader, field: str, size: tuple[int, int], tier: Tier | None) -> Tier | None:
    own = next((t for t in TIERS.values() if (t.width, t.height) == size), None)
    if tier and own is not tier:
        text = f"resolution {tier.name} means {_by((tier.width, tier.height))} (got {_by(size)})"
        reader.refuse(field, "size_resolution_mismatch", text)
    elif own is None:
        presets = " or ".join(_by((t.width, t.height)) for t in TIERS.values())
        text = f"size must be {presets}; use output_width and output_height to resize the result"
        reader.refuse(field, "size_unsupported", f"{text} (got {_by(size)})")
    return own


def _by(size: tuple[int, int]) -> str:
    return "x".join(map(shown, size))


def _read_size(reader: _Reader) -> tuple[int, int] | None:
    value = reader.given.get("size")
    match = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", value) if isinstance(value, str) else None
    if value is not None and match is None:
        reader.refuse_value("size", "size_invalid", _SIDES.message)
    return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True)
class _Pair:
    """Two fields that are given together, with what holds for the value of each."""

    first: str
    second: str
    code: str
    message: str
    is_allowed: Callable[[int], bool]


_NATIVE = " and ".join(f"{tier.width}x{tier.height}" for tier in TIERS.values())
_SIDES = _Pair(
    "width",
    "height",
    "size",
    f"size must look like 896x512 with positive integers; the sizes there are: {_NATIVE}",
    lambda side: side > 0,
)
_OUTPUT_SIDES = _Pair(
    "output_width",
    "output_height",
    "output_size",
    f"output_width and output_height must be even integers between {MIN_OUTPUT_SIDE} and {MAX_OUTPUT_SIDE}",
    lambda side: MIN_OUTPUT_SIDE <= side <= MAX_OUTPUT_SIDE and side % 2 == 0,
)


def _read_pair(reader: _Reader, pair: _Pair) -> tuple[int, int] | None:
    values = []
    for field, other in ((pair.first, pair.second), (pair.second, pair.first)):
        value = as_integer(reader.given.get(field))
        if field not in reader.given:
            if other in reader.given:
                text = f"{pair.first} and {pair.second} must be given together"
                reader.refuse(field, f"{pair.code}_incomplete", text)
        elif value is None or not pair.is_allowed(value):
            # Named, so that two bad sides do not give one line twice.
            text = f"{pair.message} (got {field} {shown(reader.given[field])})"
            reader.refuse(field, f"{pair.code}_invalid", text)
        else:
            values.append(value)
    return (values[0], values[1]) if len(values) == 2 else None


def _check_clip_shape(reader: _Reader) -> None:
    """Check the fields that have one right value each: they may be given, but not differ."""
    fixed: tuple[tuple[str, str, Fraction, str], ...] = (
        ("seconds", "seconds_unsupported", Fraction(CLIP_SECONDS), _SECONDS_TEXT),
        ("duration", "seconds_unsupported", Fraction(CLIP_SECONDS), _SECONDS_TEXT),
        ("num_frames", "num_frames_unsupported", Fraction(NUM_FRAMES), "num_frames must be 125"),
        ("fps", "fps_unsupported", FPS, "fps must be 12.5"),
        ("n", "num_outputs", Fraction(1), "exactly one clip is made per request"),
    )
    for field, code, right, text in fixed:
        value = reader.given.get(field)
        if value is not None and as_number(value) != right:
            reader.refuse_value(field, code, text)


_SECONDS_TEXT = "seconds must be 10; MAGI-2 Preview makes 10-second clips only"


def _read_steps(reader: _Reader) -> int:
    if "num_inference_steps" not in reader.given:
        return reader.limits.default_steps
    steps = as_integer(reader.given["num_inference_steps"])
    if steps is None or not 1 <= steps <= MAX_STEPS:
        text = f"num_inference_steps must be an integer from 1 to {MAX_STEPS}"
        reader.refuse_value("num_inference_steps", "steps_invalid", text)
        return reader.limits.default_steps
    if steps > reader.limits.max_steps:
        reader.refuse_profile_limit("num_inference_steps")
    return steps


def _read_seed(reader: _Reader) -> int | None:
    seed = as_integer(reader.given.get("seed"))
    if "seed" in reader.given and (seed is None or not 0 <= seed <= MAX_SEED):
        reader.refuse_value("seed", "seed_invalid", f"seed must be an integer from 0 to {MAX_SEED}")
    return seed


def _read_deterministic(reader: _Reader) -> bool:
    own = reader.limits.deterministic
    if "deterministic" in reader.given and as_boolean(reader.given["deterministic"]) is not own:
        fixed = "deterministic is fixed when a worker starts"
        text = f"{fixed}; this farm runs with deterministic={str(own).lower()}"
        reader.refuse_value("deterministic", "deterministic_mismatch", text)
    return own


def _read_acceleration(reader: _Reader) -> str:
    value = reader.given.get("acceleration", reader.limits.default_acceleration)
    allowed = " or ".join(reader.limits.accelerations)
    if not isinstance(value, str) or value not in ACCELERATIONS:
        text = f"field acceleration is not supported with the value {shown(value)}; use {allowed}"
        reader.refuse("acceleration", "field_unsupported", text)
        return "off"
    if value not in reader.limits.accelerations:
        reader.refuse_profile_limit("acceleration", f"; acceleration can only be {allowed}")
    return value


def _check_task(reader: _Reader, num_images: int) -> None:
    value = reader.given.get("task")
    task = value.lower().replace("_", "-") if isinstance(value, str) else None
    if task in _IMAGE_TASKS and num_images == 0:
        reader.refuse(IMAGE_FIELD, "image_required", "image-to-video needs one image")
    elif task in _TEXT_TASKS and num_images > 0:
        text = (
            f"field task is not supported with the value {shown(value)} and an image; leave one of them out"
        )
        reader.refuse("task", "field_unsupported", text)
    elif value is not None and task not in _TEXT_TASKS | _IMAGE_TASKS:
        text = (
            f"field task is not supported with the value {shown(value)}; use text-to-video or image-to-video"
        )
        reader.refuse("task", "field_unsupported", text)


def _check_strangers(reader: _Reader) -> None:
    for name in reader.given:
        if name in _MEDIA_FIELDS:
            text = "only text and one still image can be given; video and audio conditions are not supported"
            reader.refuse(name, "media_unsupported", text)
        elif name not in REQUEST_FIELDS:
            known = ", ".join(sorted(REQUEST_FIELDS.union(reader.others)))
            text = f"field {shown(name)} is not supported; there are {known}"
            reader.refuse(shown(name), "field_unsupported", text)


def _notices(reader: _Reader) -> list[str]:
    """Say which defaults are the profile's and not the usual ones."""
    own, given = reader.limits, reader.given.keys()
    taken: list[tuple[str, object, object]] = []
    if "num_inference_steps" not in given and own.default_steps != DEFAULT_STEPS:
        taken.append(("num_inference_steps", own.default_steps, DEFAULT_STEPS))
    if not given & {"resolution", "size", "width"} and own.default_tier != DEFAULT_TIER:
        taken.append(("resolution", own.default_tier, DEFAULT_TIER))
    if "acceleration" not in given and own.default_acceleration != "off":
        taken.append(("acceleration", own.default_acceleration, "off"))
    return [
        f"{field} was not given: profile {own.profile} uses {value} (usually {usual})"
        for field, value, usual in taken
    ]
