"""Learning curves as SVG, from the lines of ``metrics.jsonl``; drawn here, so that they show without a script too."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.page_tables import number, text

# points of a line; where a run has more, each point is the mean of neighbours
MOST = 600
WIDTH, HEIGHT = 720, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 30, 10, 30

Points = list[tuple[float, float]]


@dataclass
class _Chart:
    """Lines over the same iterations, each with its label; dashed ones are constants to compare with."""

    title: str
    lines: dict[str, Points] = field(default_factory=dict)
    dashed: dict[str, Points] = field(default_factory=dict)
    logarithmic: bool = False


def curves(rows: Sequence[Mapping[str, Any]]) -> str:
    """A figure each for losses, learning rate and every metric; empty where there is nothing to draw."""
    steps = [row for row in rows if row.get("kind") == "train"]
    # lines of another version of the log are passed over
    validations = [row for row in rows if row.get("kind") == "val" and {"set", "scores"} <= row.keys()]
    charts = [_scores(label, validations) for label in dict.fromkeys(k for row in validations for k in row["scores"])]
    losses = {label: _points(steps, label) for label in dict.fromkeys(k for row in steps for k in row if k[:2] == "l_")}
    finite = [y for line in losses.values() for _, y in line if math.isfinite(y)]
    charts.append(_Chart("loss", losses, logarithmic=min(finite, default=0) > 0))
    charts.append(_Chart("learning rate", {"learning rate": _points(steps, "lr")}))
    iterations = [row["iter"] for row in (*steps, *validations)]
    span = (min(iterations), max(iterations)) if iterations else (0, 1)
    return "".join(_figure(chart, span) for chart in charts if any(chart.lines.values()))


def _scores(label: str, validations: Sequence[Mapping[str, Any]]) -> _Chart:
    chart = _Chart(label)
    for name in dict.fromkeys(row["set"] for row in validations):
        own = [row for row in validations if row["set"] == name and label in row["scores"]]
        chart.lines[name] = [(row["iter"], row["scores"][label]) for row in own]
        for kind, values in (own[-1].get("baseline") or {} if own else {}).items():
            chart.dashed[f"{name}, {kind}"] = [(row["iter"], values[label]) for row in (own[0], own[-1])]
    return chart


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> Points:
    return [(row["iter"], row[key]) for row in rows if key in row]


def _thinned(line: Points) -> Points:
    k = -(-len(line) // MOST)
    groups = [line[start : start + k] for start in range(0, len(line), k)] if k > 1 else [[point] for point in line]
    # not fsum, which refuses infinities of both signs
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _figure(chart: _Chart, span: tuple[float, float]) -> str:
    lines = {label: _thinned(line) for label, line in chart.lines.items() if line}
    everything = [point for line in (*lines.values(), *chart.dashed.values()) for point in line]
    ys = [y for _, y in everything if math.isfinite(y)] or [0.0]
    across = _Axis(*span, LEFT, WIDTH - RIGHT)
    up = _Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP, logarithmic=chart.logarithmic, margin=0.06)
    parts = [_grid(across, up)]
    for place, line in enumerate(lines.values()):
        parts.append(_path(line, across, up, f"line c{place % 6}"))
    for place, line in enumerate(chart.dashed.values()):
        if line[0][0] == line[-1][0]:
            # of a single validation; a line without length would not be seen
            line = [(across.low, line[0][1]), (across.high, line[0][1])]
        parts.append(_path(line, across, up, f"line dashed c{place % 6}"))
    keys = [f'<li class="c{place % 6}">{text(label)}</li>' for place, label in enumerate(lines)]
    keys += [f'<li class="dashed c{place % 6}">{text(label)}</li>' for place, label in enumerate(chart.dashed)]
    legend = f"<ul class='legend'>{''.join(keys)}</ul>" if len(keys) > 1 else ""
    spoken = f"{chart.title} over iterations. {' '.join(_spoken(label, line) for label, line in lines.items())}"
    k = -(-max(map(len, chart.lines.values())) // MOST)
    scale = " (logarithmic)" if chart.logarithmic else ""
    scale += f", each point the mean of {k} neighbouring lines of the log" if k > 1 else ""
    gaps = sum(not math.isfinite(y) for line in (*chart.lines.values(), *chart.dashed.values()) for _, y in line)
    scale += f", {gaps} {'value is' if gaps == 1 else 'values are'} infinite or NaN and left out" if gaps else ""
    return (
        f"<figure><figcaption><b>{text(chart.title)}</b> over iterations{scale}{legend}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(spoken)}">{"".join(parts)}</svg></figure>'
    )


def _spoken(label: str, line: Points) -> str:
    (first, start), (last, end) = line[0], line[-1]
    return f"{label}: {start:.4g} at {first:.0f}, {end:.4g} at {last:.0f}."


class _Axis:
    """Values to places along one side of the picture."""

    def __init__(
        self, low: float, high: float, start: float, end: float, *, logarithmic: bool = False, margin: float = 0
    ) -> None:
        self._logarithmic = logarithmic
        low, high = self._scaled(low), self._scaled(high)
        size = max(abs(low), abs(high))
        # a single value has a middle, but no span; nor has one that differs by the rounding of its means
        has_span = high - low > 1e-9 * size
        room = (high - low) * margin if has_span else size * 0.05 or 0.5
        self.low, self.high = low - room, high + room
        self._start, self._end = start, end

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._logarithmic else value

    def __call__(self, value: float) -> float:
        share = (self._scaled(value) - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Four to nine round values that lie within."""
        if self._logarithmic and self.high - self.low > 1:
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            found = [m * 10.0**p for p in powers for m in ((1, 2, 5) if self.high - self.low < 3 else (1,))]
            return [value for value in found if self.low <= math.log10(value) <= self.high]
        low, high = (10**self.low, 10**self.high) if self._logarithmic else (self.low, self.high)
        rough = (high - low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
        first = math.ceil(low / step)
        return [place * step for place in range(first, math.floor(high / step) + 1)]


def _grid(across: _Axis, up: _Axis) -> str:
    parts = []
    for value in up.ticks():
        y = up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
    for value in across.ticks():
        label = f'<text x="{across(value):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_tick(value)}</text>'
        parts.append(label)
    return "".join(parts)


def _tick(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.2g}".replace("-", "−")
    return f"{value:,.10g}".replace("-", "−") if abs(value) >= 1 else number(round(value, 6), 6).rstrip("0").rstrip(".")


def _path(line: Points, across: _Axis, up: _Axis, kind: str) -> str:
    places = [(across(x), up(y)) if math.isfinite(y) else None for x, y in line]
    if len(line) == 1 and places[0]:
        return f'<circle class="{kind}" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3"/>'
    steps, pen = [], "M"
    for place in places:
        # a value that is not finite breaks the line
        steps.append(f"{pen}{place[0]:.1f} {place[1]:.1f}" if place else "")
        pen = "L" if place else "M"
    return f'<path class="{kind}" d="{"".join(steps)}"/>'
