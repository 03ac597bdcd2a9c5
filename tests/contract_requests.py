"""Requests for the tests of the contract: limits to hold them against, and what comes of some fields."""

from typing import Any

from magi2.contract import (
    GenerationRequest,
    ImageFacts,
    Limits,
    Problem,
    default_limits,
    problems_of,
    validate,
)

LIMITS = default_limits()
SMALL = Limits("tiny-cpu", "272p", "272p", 4, 20, deterministic=True)
CACHED = Limits("sp4", "540p", "540p", 100, 200, deterministic=False, accelerations=("off", "cache_dit"))
IMAGE = ImageFacts(640, 480)


def problems(images: tuple[ImageFacts, ...] = (), limits: Limits = LIMITS, **fields: Any) -> list[Problem]:
    return validate({"prompt": "A boat."} | fields, limits=limits, images=images).problems


def accepted(
    images: tuple[ImageFacts, ...] = (), limits: Limits = LIMITS, **fields: Any
) -> GenerationRequest:
    validated = validate({"prompt": "A boat."} | fields, limits=limits, images=images)
    assert validated.problems == []
    assert validated.request is not None
    assert problems_of(validated.request, limits) == []
    return validated.request
