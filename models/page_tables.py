"""The tables of a page: a row a picture, a group of columns a metric, the mean at the foot; and the means as headlines.

All that comes from outside, names above all, goes through :func:`text`.
"""

import base64
import html
import math
import mimetypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from models.record import Record, Shown, ShownSet

# label, scores of each network and of the baseline -> value, or None where there is none
_Value = Callable[[str, list[dict[str, float]], dict[str, float]], float | None]


@dataclass(frozen=True)
class _Column:
    """One column of each metric.

    Attributes:
        title: at its head.
        value: what it shows.
        is_gain: it is a difference, shown with its sign.
    """

    title: str
    value: _Value
    is_gain: bool = False


def text(value: str) -> str:
    """Any string as the text of an element or a quoted attribute."""
    return html.escape(value, quote=True)


def number(value: float, decimals: int, *, signed: bool = False) -> str:
    """A score for people: infinity as its sign, a real minus."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "−∞" if value < 0 else "+∞" if signed else "∞"
    shown = f"{value:{'+' if signed else ''}.{decimals}f}"
    # a change too small to show has no direction
    return f"±{shown[1:]}" if signed and float(shown) == 0 else shown.replace("-", "−")


def decimals_of(label: str, entry: ShownSet) -> int:
    """Three where the metric reaches 2 (decibels), four otherwise (0..1)."""
    means = [*entry.means, entry.baseline_means]
    values = [abs(own[label]) for own in means if math.isfinite(own.get(label, math.nan))]
    return 3 if max(values, default=0) >= 2 else 4


def tables(record: Record) -> str:
    """A table for each set that has pictures with scores, or at least means."""
    place, parts = 0, []
    for entry in record.sets:
        parts.append(_table(record, entry, place))
        place += len(entry.pictures)
    return "\n".join(parts)


def headlines(record: Record) -> str:
    """The mean of each metric on each set, one card each."""
    cards = [_card(record, entry, label) for entry in record.sets if any(entry.means) for label in entry.protocol]
    opened = '<section aria-labelledby="means-title"><h2 id="means-title" class="unseen">Means</h2>'
    return f'{opened}<div class="cards">{"".join(cards)}</div></section>' if cards else ""


def _card(record: Record, entry: ShownSet, label: str) -> str:
    # a headline says decibels to the hundredth
    decimals = {3: 2}.get(decimals_of(label, entry), 4)
    gains = {column.title: column for column in _columns(record, entry) if column.is_gain}
    lines = []
    for column in _columns(record, entry):
        value = column.value(label, entry.means, entry.baseline_means)
        if column.is_gain or value is None:
            continue
        gain = gains.get(_gain_title(record, column.title))
        change = gain.value(label, entry.means, entry.baseline_means) if gain else None
        kind = "main" if column.title in record.networks else "beside"
        shown = f'<span class="of">{text(column.title)}</span> <b>{number(value, decimals)}</b>'
        if change is not None:
            change_shown = number(change, decimals, signed=True)
            shown += f' <span class="gain {_tone(change, label, entry)}">{change_shown}</span>'
        lines.append(f'<li class="{kind}">{shown}</li>')
    return (
        f'<article class="card"><h3><span class="metric">{text(label)}</span> {text(entry.name)}</h3>'
        f"<ul>{''.join(lines)}</ul><p>mean of {entry.count} · {text(entry.protocol[label])}</p></article>"
    )


def _columns(record: Record, entry: ShownSet) -> list[_Column]:
    def own(place: int) -> _Value:
        return lambda label, scores, _: scores[place].get(label) if place < len(scores) else None

    def reference(label: str, _: list[dict[str, float]], baseline: dict[str, float]) -> float | None:
        return baseline.get(label)

    def gain(value: _Value, base: _Value) -> _Value:
        def difference(label: str, scores: list[dict[str, float]], baseline: dict[str, float]) -> float | None:
            one, other = value(label, scores, baseline), base(label, scores, baseline)
            if one is None or other is None:
                return None
            # two that equal the ground truth differ by nothing
            return 0.0 if one == other else one - other

        return difference

    networks = [_Column(name, own(place)) for place, name in enumerate(record.networks)]
    beside = [_Column(entry.baseline, reference)] if entry.baseline else []
    if len(networks) == 1:
        gains = [_Column("gain", gain(networks[0].value, reference), True)] if beside else []
        return [*networks, *beside, *gains]
    first = networks[0]
    gains = [_Column(f"gain of {n.title}", gain(n.value, first.value), True) for n in networks[1:]]
    return [*beside, *networks, *gains]


def _gain_title(record: Record, network: str) -> str:
    if len(record.networks) == 1:
        return "gain" if network == record.networks[0] else ""
    return f"gain of {network}"


def _tone(gain: float, label: str, entry: ShownSet) -> str:
    if math.isnan(gain) or gain == 0:
        return ""
    return "up" if (gain > 0) == (entry.better.get(label, "higher") == "higher") else "down"


def _table(record: Record, entry: ShownSet, first: int) -> str:
    columns = _columns(record, entry)
    labels = list(entry.protocol)
    heading = f'<h3 id="{_anchor(first, entry)}">{text(entry.name)}</h3>'
    if not any(entry.means) and not entry.pictures:
        return f"{heading}<p>No pictures were judged.</p>"
    if not any(entry.means):
        why = "Without ground truth" if entry.protocol else "No metric was asked for"
        remark, labels = f"<p>{why}, so there are no scores.</p>", []
    else:
        remark = ""
    groups = "".join(_group(label, entry, len(columns)) for label in labels)
    heads = "".join(_head(column, label, column is columns[0]) for label in labels for column in columns)
    rows = "".join(_row(shown, first + place, labels, columns, entry) for place, shown in enumerate(entry.pictures))
    mean = _cells(labels, columns, entry, entry.means, entry.baseline_means)
    foot = f'<tfoot><tr><th scope="row">mean of {entry.count}</th>{mean}</tr></tfoot>' if labels else ""
    return (
        f'{heading}{remark}<div class="scroll" role="region" tabindex="0" aria-labelledby="{_anchor(first, entry)}">'
        f"<table><thead><tr><td></td>{groups}</tr><tr>{_sorter('picture', 'picture', 'name')}{heads}</tr></thead>"
        f"<tbody>{rows}</tbody>{foot}</table></div>"
    )


def _anchor(first: int, entry: ShownSet) -> str:
    # never from a name, which may hold anything
    return f"set-{first}-{len(entry.pictures)}"


def _group(label: str, entry: ShownSet, span: int) -> str:
    lower = " · lower is better" if entry.better.get(label) == "lower" else ""
    protocol = f'<span class="protocol">{text(entry.protocol[label])}{lower}</span>'
    return f'<th scope="colgroup" colspan="{span}"><span class="metric">{text(label)}</span> {protocol}</th>'


def _head(column: _Column, label: str, is_first: bool) -> str:
    kind = "gain" if column.is_gain else "score"
    return _sorter(column.title, f"{label}, {column.title}", f"{kind} first" if is_first else kind)


def _sorter(title: str, spoken: str, kind: str) -> str:
    button = (
        f'<button type="button" data-spoken="{text(spoken)}">{text(title)}<span aria-hidden="true"></span></button>'
    )
    return f'<th scope="col" class="{kind}" aria-sort="none">{button}</th>'


def _row(shown: Shown, place: int, labels: list[str], columns: list[_Column], entry: ShownSet) -> str:
    name = text(shown.name)
    if any(shown.outputs):
        name = f'<a href="#picture-{place}" data-picture="{place}">{_thumbnail(shown)}<span>{name}</span></a>'
    cells = _cells(labels, columns, entry, shown.scores, shown.baseline)
    return f'<tr><th scope="row" data-value="{text(shown.name)}">{name}</th>{cells}</tr>'


def _thumbnail(shown: Shown) -> str:
    path = shown.others.get("thumbnail")
    # an empty description: the name stands beside it
    return f'<img src="{data_uri(path)}" alt="">' if path is not None and path.is_file() else ""


def data_uri(path: Path) -> str:
    """A picture file as a ``data:`` address."""
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _cells(
    labels: list[str],
    columns: list[_Column],
    entry: ShownSet,
    scores: list[dict[str, float]],
    baseline: Mapping[str, float],
) -> str:
    cells = []
    for label in labels:
        decimals = decimals_of(label, entry)
        for column in columns:
            value = column.value(label, scores, dict(baseline))
            kinds = ["first"] if column is columns[0] else []
            if value is None:
                cells.append(f'<td class="{" ".join([*kinds, "none"])}" data-value="nan">–</td>')
                continue
            kinds += ["gain", _tone(value, label, entry)] if column.is_gain else []
            shown = number(value, decimals, signed=column.is_gain)
            cells.append(f'<td class="{" ".join(kinds)}" data-value="{value!r}" title="{value!r}">{shown}</td>')
    return "".join(cells)
