"""Charts as inline SVG, drawn on the server: no library, no script, and words for those who do not see them.

Sizes are attributes and colours are classes, because the pages allow no inline style.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 160, 36
_PAD = 3


def sparkline(values: Sequence[float | None], label: str, unit: str = "") -> Markup:
    """Draw a small line of a series, oldest first; None breaks the line.

    Args:
        values: One per step of time.
        label: What it shows, for the text alternative.
        unit: Put behind numbers in the text alternative.
    """
    known = [value for value in values if value is not None]
    if not known:
        return Markup('<p class="chart-empty">No data yet</p>')
    top = max(*known, 0) or 1
    last = next(value for value in reversed(values) if value is not None)
    text = f"{label}: now {_short(last)}{unit}, highest {_short(max(known))}{unit} of {len(values)} hours"
    step = (WIDTH - 2 * _PAD) / max(len(values) - 1, 1)
    points = [
        None if value is None else (_PAD + index * step, HEIGHT - _PAD - value / top * (HEIGHT - 2 * _PAD))
        for index, value in enumerate(values)
    ]
    line, is_open = [], False
    for point in points:
        if point is not None:
            line.append(f"{'L' if is_open else 'M'}{point[0]:.1f} {point[1]:.1f}")
        is_open = point is not None
    drawn = [point for point in points if point is not None]
    area = ""
    if len(drawn) == len(points) and len(points) > 1:
        floor = HEIGHT - _PAD
        path = f"{' '.join(line)} L{drawn[-1][0]:.1f} {floor} L{drawn[0][0]:.1f} {floor} Z"
        area = f'<path class="area" d="{path}"/>'
    return Markup(
        '<svg class="spark" role="img" aria-label="{label}" viewBox="0 0 {width} {height}" '
        'preserveAspectRatio="none">{area}<path class="line" d="{line}"/></svg>'
    ).format(
        label=escape(text),
        width=WIDTH,
        height=HEIGHT,
        area=Markup(area),  # noqa: S704 - numbers that were formatted above
        line=" ".join(line),
    )


def bar(share: float | None, label: str) -> Markup:
    """Draw how full something is, from 0 to 1."""
    if share is None:
        return Markup('<span class="muted">-</span>')
    filled = min(max(share, 0.0), 1.0) * 100
    text = f"{label}: {filled:.0f} %"
    level = "high" if filled >= 90 else "mid" if filled >= 60 else "low"
    return Markup(
        '<svg class="meter {level}" role="img" aria-label="{text}" viewBox="0 0 100 6" '
        'preserveAspectRatio="none"><rect class="track" width="100" height="6" rx="1"/>'
        '<rect class="fill" width="{filled:.1f}" height="6" rx="1"/></svg>'
    ).format(level=level, text=escape(text), filled=filled)


@dataclass(frozen=True)
class Span:
    """A stretch of a timeline, in seconds from its start."""

    name: str
    start_s: float
    end_s: float
    kind: str


def timeline_bar(spans: Sequence[Span], label: str) -> Markup:
    """Draw stretches of time one after the other."""
    if not spans:
        return Markup('<p class="chart-empty">Nothing has happened yet</p>')
    start = min(span.start_s for span in spans)
    whole = max(max(span.end_s for span in spans) - start, 0.001)
    parts = [
        Markup(
            '<rect class="span {kind}" x="{x:.2f}" width="{w:.2f}" height="14"><title>{title}</title></rect>'
        ).format(
            kind=span.kind,
            x=(span.start_s - start) / whole * 1000,
            w=max((span.end_s - span.start_s) / whole * 1000, 2.0),
            title=f"{span.name}: {span.end_s - span.start_s:.1f} s",
        )
        for span in spans
    ]
    said = ", ".join(f"{span.name} {span.end_s - span.start_s:.1f} s" for span in spans)
    return Markup(
        '<svg class="timeline" role="img" aria-label="{label}" viewBox="0 0 1000 14" '
        'preserveAspectRatio="none">{parts}</svg>'
    ).format(label=f"{label}: {said}", parts=Markup("").join(parts))


def _short(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.2f}"
