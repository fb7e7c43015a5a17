"""Plots as SVG text, for a page that needs nothing else: lines, points and bars on plain axes."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 44
COLOURS = ("#1f6feb", "#c8553d", "#2a7f62", "#8250df", "#b08800", "#57606a")
MAX_POINTS = 2000

Points = Sequence[tuple[float, float]]


def text(value: object) -> str:
    """Returns text that is safe inside markup."""
    return html.escape(str(value), quote=True)


def number(value: float) -> str:
    """Returns a short number: 1.2k, 3.4M, 0.0123."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if suffix == "k" else size
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.4g}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Returns "1 trial" or "1,200 trials"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def shortened(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


class _Scale:
    """From values to pixels along one axis, linear or logarithmic."""

    def __init__(self, values: Sequence[float], first: float, last: float, log: bool):
        low, high = min(values), max(values)
        if low == high:
            low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
        self.log = log
        self.low, self.high = (math.log10(low), math.log10(high)) if log else (low, high)
        pad = 0.04 * (self.high - self.low)
        self.low, self.high = self.low - pad, self.high + pad
        self._first, self._last = first, last

    def __call__(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        share = (at - self.low) / (self.high - self.low)
        return self._first + share * (self._last - self._first)

    def ticks(self) -> Iterator[float]:
        """Yields about five round values inside the axis."""
        if self.log and self.high - self.low >= 1:
            for power in range(math.ceil(self.low), math.floor(self.high) + 1):
                yield 10.0**power
            return
        low, high = (10**self.low, 10**self.high) if self.log else (self.low, self.high)
        raw = (high - low) / 5
        size = 10 ** math.floor(math.log10(raw))
        step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw)
        value = math.ceil(low / step) * step
        while value <= high:
            yield 0.0 if abs(value) < step * 1e-9 else value
            value += step


def _frame(x: _Scale, y: _Scale, x_label: str, y_label: str) -> Iterator[str]:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    for value in x.ticks():
        at = x(value)
        yield f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{number(value)}</text>'
    for value in y.ticks():
        at = y(value)
        yield f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(value)}</text>'
    middle = (_LEFT + right) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{text(x_label)}</text>'
    yield (
        f'<text x="14" y="{(_TOP + bottom) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(_TOP + bottom) / 2})">{text(y_label)}</text>'
    )


def _svg(parts: Sequence[str], title: str, height: float = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{text(title)}</title>{''.join(parts)}</svg>"
    )


def thinned(points: Points, most: int = MAX_POINTS) -> Points:
    """Returns at most `most` of the points, evenly taken, the last one included."""
    if len(points) <= most:
        return points
    step = (len(points) - 1) / (most - 1)
    return [points[round(index * step)] for index in range(most)]


def lines(title: str, series: Mapping[str, Points], x_label: str, y_label: str) -> str:
    """Returns a plot of step lines, each with its name at its end."""
    every = [point for points in series.values() for point in points]
    x = _Scale([p[0] for p in every], _LEFT, WIDTH - _RIGHT - 96, log=False)
    y = _Scale([p[1] for p in every], HEIGHT - _BOTTOM, _TOP, log=False)
    parts = list(_frame(x, y, x_label, y_label))
    places: list[float] = []
    for index, (name, points) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = f"M{x(points[0][0]):.1f} {y(points[0][1]):.1f}"
        for at, value in thinned(points)[1:]:
            path += f"H{x(at):.1f}V{y(value):.1f}"
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        place = y(points[-1][1]) + 4
        while any(abs(place - other) < 13 for other in places):
            place += 13 if place < HEIGHT / 2 else -13
        places.append(place)
        label = shortened(name, 16)
        at = x(points[-1][0]) + 4
        parts.append(
            f'<text x="{at:.1f}" y="{place:.1f}" style="fill:{colour}">{text(label)}</text>'
        )
    return _svg(parts, title)


def scatter(title: str, series: Mapping[str, Points], x_label: str, y_label: str) -> str:
    """Returns a log-log plot of points with the line on which both are equal, and a legend."""
    every = [point for points in series.values() for point in points]
    both = [value for point in every for value in point]
    x = _Scale(both, _LEFT, WIDTH - _RIGHT, log=True)
    y = _Scale(both, HEIGHT - _BOTTOM, _TOP, log=True)
    parts = list(_frame(x, y, x_label, y_label))
    ends = [10**x.low, 10**x.high]
    parts.append(
        f'<line class="rule" x1="{x(ends[0]):.1f}" y1="{y(ends[0]):.1f}" '
        f'x2="{x(ends[1]):.1f}" y2="{y(ends[1]):.1f}"/>'
    )
    most = max(1, MAX_POINTS // len(series))
    for index, (name, points) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        for across, up in thinned(points, most):
            parts.append(
                f'<circle cx="{x(across):.1f}" cy="{y(up):.1f}" r="2.5" fill="{colour}" '
                f'fill-opacity="0.55"/>'
            )
        place = _TOP + 14 + 15 * index
        parts.append(f'<circle cx="{_LEFT + 12}" cy="{place - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + 22}" y="{place}">{text(name)}</text>')
    return _svg(parts, title)


def bars(title: str, values: Mapping[str, float], shown: Callable[[float], str] = number) -> str:
    """Returns horizontal bars, a row each, with their values beside them."""
    row, left = 22, 190
    height = row * len(values) + 10
    most = max(max(values.values()), 1e-12)
    parts = []
    for index, (name, value) in enumerate(values.items()):
        top = 5 + row * index
        length = max(1.0, value / most * (WIDTH - left - 110))
        label = shortened(name, 28)
        parts += [
            f'<text x="{left - 8}" y="{top + 14}" text-anchor="end">{text(label)}</text>',
            f'<rect x="{left}" y="{top + 3}" width="{length:.1f}" height="{row - 8}" '
            f'fill="{COLOURS[0]}" rx="2"/>',
            f'<text x="{left + length + 6:.1f}" y="{top + 14}">{text(shown(value))}</text>',
        ]
    return _svg(parts, title, height)
