"""What a mutant is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One broken rule."""

    rule: str
    what: str
    path: str
    old: str
    new: str
    test: str
