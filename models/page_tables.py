"""The tables of a page: a row a picture, a group of columns a metric, the mean at the foot; and the means as headlines.

All that comes from outside, names above all, goes through :func:`text`.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Look:
    """How a row shows its picture.

    Attributes:
        thumbnail: address of the small picture; empty without one.
        link: address of the picture where no script runs; empty where there is nothing that the viewer could show.
    """

    thumbnail: str = ""
    link: str = ""


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
    """Three where the metric reaches 2 in the mean, be it infinitely (decibels), four otherwise (0..1)."""
    values = [abs(own.get(label, math.nan)) for own in (*entry.means, entry.baseline_means)]
    return 3 if any(value >= 2 for value in values) else 4


def tables(record: Record, looks: Sequence[Look] = ()) -> str:
    """A table for each set that has pictures with scores, or at least means.

    Args:
        looks: of all pictures, set by set; empty shows none.
    """
    place, parts = 0, []
    looks = looks or [Look()] * sum(len(entry.pictures) for entry in record.sets)
    for entry in record.sets:
        parts.append(_table(record, entry, place, looks[place : place + len(entry.pictures)]))
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
            if one != other:
                return one - other
            # two pictures that equal the ground truth differ by nothing; two means with such ones, by who knows what
            return math.nan if math.isinf(one) and scores is entry.means else 0.0

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


def _table(record: Record, entry: ShownSet, first: int, looks: Sequence[Look]) -> str:
    columns = _columns(record, entry)
    labels = list(entry.protocol)
    heading = f'<h3 id="{_anchor(first, entry)}">{text(entry.name)}</h3>'
    if not any(entry.means) and not entry.pictures:
        return f"{heading}<p>No pictures were judged.</p>"
    if not any(entry.means):
        none = "No metric was computed in one way" if len(record.networks) > 1 else "No metric was asked for"
        why = "Without ground truth" if entry.protocol else none
        remark, labels = f"<p>{why}, so there are no scores.</p>", []
    else:
        remark = ""
    groups = "".join(_group(label, entry, len(columns)) for label in labels)
    heads = "".join(_head(column, label, column is columns[0]) for label in labels for column in columns)
    rows = []
    for place, (shown, look) in enumerate(zip(entry.pictures, looks, strict=True), start=first):
        cells = _cells(labels, columns, entry, shown.scores, shown.baseline)
        rows.append(f'<tr><th scope="row" data-value="{text(shown.name)}">{_name(shown, place, look)}</th>{cells}</tr>')
    mean = _cells(labels, columns, entry, entry.means, entry.baseline_means)
    foot = f'<tfoot><tr><th scope="row">mean of {entry.count}</th>{mean}</tr></tfoot>' if labels else ""
    return (
        f'{heading}{remark}<div class="scroll" role="region" tabindex="0" aria-labelledby="{_anchor(first, entry)}">'
        f"<table><thead><tr><td></td>{groups}</tr><tr>{_sorter('picture', 'picture', 'name')}{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody>{foot}</table></div>"
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


def _name(shown: Shown, place: int, look: Look) -> str:
    # an empty description: the name stands beside it
    small = f'<img src="{text(look.thumbnail)}" alt="" loading="lazy">' if look.thumbnail else ""
    name = f"{small}<span>{text(shown.name)}</span>"
    return f'<a href="{text(look.link)}" data-picture="{place}">{name}</a>' if look.link else f"<div>{name}</div>"


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
