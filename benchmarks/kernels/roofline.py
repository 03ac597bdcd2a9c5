"""Draws the roofline of a record of `bench.py`: FLOP/s over FLOP per byte of every kernel, and the ceilings.

FLOP and bytes are those of the definition, every input and output once, at the sizes of the record (one of
four sequence-parallel ranks at 540p). A kernel that reads something twice, or multiplies in more terms, lies
lower for it. Rows that do no arithmetic are left out.

Usage: python benchmarks/kernels/roofline.py RECORD.json PICTURE.svg
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

MOE_HEADS, NUM_EXPERTS, TOP_K, MOE_WIDTH, EXPERT_WIDTH, MOE_TOKENS = 3, 256, 6, 256, 1280, 115_800
TOKENS, WIDTH, HEADS, HEAD_DIM = 28_950, 3072, 24, 128
ATTENTION_HEADS, SEGMENT = 6, 57_900

PRODUCT, COPY = "8192^3 bf16 product", "device copy, 2 GiB"
_ONE, _STREAMS = 2 * TOKENS * WIDTH, 8 * TOKENS * WIDTH  # bytes of [L, C] and of four streams, bf16
_ROUTES = MOE_HEADS * MOE_TOKENS * TOP_K
_ROWS, _MOE_INPUT = 2 * _ROUTES * MOE_WIDTH, 2 * MOE_HEADS * MOE_TOKENS * MOE_WIDTH
_MATRICES = 6 * MOE_HEADS * NUM_EXPERTS * MOE_WIDTH * EXPERT_WIDTH
_EXPERT_FLOP = 6 * _ROUTES * MOE_WIDTH * EXPERT_WIDTH
_ATTENTION_FLOP = 2 * 4 * SEGMENT**2 * ATTENTION_HEADS * HEAD_DIM
_ATTENTION_BYTES = 2 * 4 * 2 * SEGMENT * ATTENTION_HEADS * HEAD_DIM


class Work(NamedTuple):
    """What a definition computes and moves at least."""

    flop: float
    num_bytes: float


# By the name of a row without its variant; a ", torch" row has the work of the kernel beside it.
WORK = {
    "rms_norm": Work(4 * TOKENS * WIDTH, 2 * _ONE),
    "q norm + rope": Work(7 * TOKENS * WIDTH, 2 * _ONE + 4 * 96 * TOKENS),
    "swiglu7": Work(8 * TOKENS * 5120, 6 * TOKENS * 5120),
    "sink correction": Work(TOKENS * WIDTH, 2 * _ONE + 4 * TOKENS * HEADS),
    "sigmoid gate": Work(TOKENS * WIDTH, 2 * _ONE + 2 * TOKENS * HEADS),
    "mhc gates": Work(51 * 4 * TOKENS * WIDTH, _STREAMS),
    "mhc pre_mix": Work(7 * TOKENS * WIDTH, _STREAMS + _ONE),
    "mhc post_mix": Work(36 * TOKENS * WIDTH, 2 * _STREAMS + _ONE),
    "mhc pair: post, gates, pre": Work((36 + 204 + 7) * TOKENS * WIDTH, 2 * _STREAMS + 2 * _ONE),
    "route": Work(2 * MOE_HEADS * MOE_TOKENS * MOE_WIDTH * NUM_EXPERTS, _MOE_INPUT + 12 * _ROUTES),
    "experts": Work(_EXPERT_FLOP, _MOE_INPUT + _MATRICES + _MOE_INPUT),
    "experts, triton: tiles": Work(_EXPERT_FLOP, _MOE_INPUT + _MATRICES + _ROWS),
    "experts, hopper: tiles": Work(_EXPERT_FLOP, _MOE_INPUT + _MATRICES + _ROWS),
    "sum of slots": Work((TOP_K - 1) * MOE_HEADS * MOE_TOKENS * MOE_WIDTH, _ROWS + _MOE_INPUT),
    "attention, cudnn": Work(_ATTENTION_FLOP, _ATTENTION_BYTES),
    "attention, flash2": Work(_ATTENTION_FLOP, _ATTENTION_BYTES),
}


class Point(NamedTuple):
    """A kernel in the picture."""

    name: str
    intensity: float
    flops: float
    ms: float
    of_roof: float

    @property
    def is_definition(self) -> bool:
        return self.name.endswith(", torch")


def work_of(name: str) -> Work | None:
    """Return what a row's kernel has to do."""
    plain = name.removesuffix(", torch")
    return WORK.get(plain) or WORK.get("experts" if plain.endswith("sort, tiles, sum") else "")


def points(record: Mapping[str, Any]) -> list[Point]:
    """Return the kernels of a record that do arithmetic, by FLOP per byte."""
    peak, bandwidth = ceilings_of(record)
    found = []
    for row in record["rows"]:
        work = work_of(row["kernel"])
        if work is None:
            continue
        intensity, flops = work.flop / work.num_bytes, work.flop / row["ms"] * 1e3
        roof = min(peak, bandwidth * intensity)
        found.append(Point(row["kernel"], intensity, flops, row["ms"], flops / roof))
    return sorted(found, key=lambda point: (point.intensity, point.ms))


def ceilings_of(record: Mapping[str, Any]) -> tuple[float, float]:
    """Return FLOP/s and bytes per second that the device reached in the same run."""
    rows = {row["kernel"]: row for row in record["rows"]}
    return rows[PRODUCT]["tflops"] * 1e12, rows[COPY]["tb_per_s"] * 1e12


# The picture: powers of ten from and to, and the plot's edges in pixels.
_X_DECADES, _Y_DECADES = (-1, 4), (10, 15)
_LEFT, _TOP, _WIDE, _HIGH, _LIST = 70, 40, 520, 400, 620


def draw(record: Mapping[str, Any]) -> str:
    """Return the picture as SVG; equal records give equal text."""
    peak, bandwidth = ceilings_of(record)
    shown = points(record)
    height = max(_TOP + _HIGH + 50, _TOP + 16 * len(shown) + 40)
    title = f"{record['device']}, torch {record['torch']}, Triton {record['triton']}, {record['commit']}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="960" height="{height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        _text(_LEFT, 22, escape(title), size=13),
        *_axes(),
        *_roof(peak, bandwidth),
        *_dots(shown),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _x(intensity: float) -> float:
    low, high = _X_DECADES
    return _LEFT + _WIDE * (math.log10(intensity) - low) / (high - low)


def _y(flops: float) -> float:
    low, high = _Y_DECADES
    return _TOP + _HIGH * (1 - (math.log10(flops) - low) / (high - low))


def _text(x: float, y: float, words: str, *, size: int = 11, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#222">{words}</text>'
    )


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, width: float = 1.0) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )


def _axes() -> Iterator[str]:
    right, bottom = _LEFT + _WIDE, _TOP + _HIGH
    for decade in range(_X_DECADES[0], _X_DECADES[1] + 1):
        x = _x(10.0**decade)
        yield _line(x, _TOP, x, bottom, "#ddd")
        yield _text(x, bottom + 16, f"{10.0**decade:g}", anchor="middle")
    for decade in range(_Y_DECADES[0], _Y_DECADES[1] + 1):
        y = _y(10.0**decade)
        yield _line(_LEFT, y, right, y, "#ddd")
        yield _text(_LEFT - 6, y + 4, f"{10.0 ** (decade - 12):g}", anchor="end")
    yield _text((_LEFT + right) / 2, bottom + 36, "FLOP per byte", anchor="middle")
    yield _text(_LEFT, _TOP - 6, "TFLOP/s")


def _roof(peak: float, bandwidth: float) -> Iterator[str]:
    left, right = 10.0 ** _X_DECADES[0], 10.0 ** _X_DECADES[1]
    ridge = peak / bandwidth
    yield _line(_x(left), _y(bandwidth * left), _x(ridge), _y(peak), "#444", 2)
    yield _line(_x(ridge), _y(peak), _x(right), _y(peak), "#444", 2)
    yield _text(_x(right), _y(peak) - 6, f"{peak / 1e12:.0f} TFLOP/s, bf16 product", anchor="end")
    yield _text(_x(left) + 8, _y(bandwidth * left) - 70, f"{bandwidth / 1e12:.2f} TB/s, copy")


def _dots(shown: list[Point]) -> Iterator[str]:
    yield _text(_LIST, _TOP - 6, "kernels filled, torch definitions hollow: ms, share of the roof")
    for number, point in enumerate(shown, start=1):
        x, y = _x(point.intensity), _y(point.flops)
        fill = "#fff" if point.is_definition else "#1f6fb4"
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="#1f6fb4"/>'
        yield _text(x + 5, y - 4, str(number), size=9)
        words = f"{number}  {point.name}: {point.ms:.3f} ms, {100 * point.of_roof:.0f} %"
        yield _text(_LIST, _TOP + 16 * number, escape(words))


def main(words: list[str]) -> int:
    """Draw one record."""
    if len(words) != 2:
        print(__doc__)
        return 2
    record = json.loads(Path(words[0]).read_text("utf-8"))
    Path(words[1]).write_text(draw(record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
