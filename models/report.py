"""Scores of one or more sets as a table, a CSV file and a learning curve."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from models.files import write_whole
from options.schema import MetricOptions


@dataclass
class SetScores:
    """Scores of one set of pictures.

    Attributes:
        name: of the set.
        protocol: label of the metric -> how it was computed, in words.
        baseline: what the second column of numbers belongs to ("bicubic"), or None.
        rows: (picture, scores of the network, scores of the baseline).
    """

    name: str
    protocol: dict[str, str]
    baseline: str | None = None
    rows: list[tuple[str, dict[str, float], dict[str, float]]] = field(default_factory=list)

    def means(self) -> dict[str, float]:
        """Mean over the pictures of each metric; infinite where a picture is."""
        return _means([scores for _, scores, _ in self.rows])

    def baseline_means(self) -> dict[str, float]:
        """The same of the baseline; empty without one."""
        return _means([reference for _, _, reference in self.rows])

    def unusual(self) -> list[str]:
        """Pictures whose score is infinite (equal to the ground truth) or not a number."""
        return [
            f"{self.name}/{picture}: {label} is {value}"
            for picture, scores, _ in self.rows
            for label, value in scores.items()
            if not math.isfinite(value)
        ]


def protocols(metrics: Mapping[str, MetricOptions]) -> dict[str, str]:
    """Label -> how the metric is computed: ``Y, crop 2, 8 bit``, or ``RGB, crop 0, float`` without rounding."""
    found = {}
    for label, metric in metrics.items():
        arguments = metric.arguments()
        channel = "Y" if arguments.get("test_y_channel") else "RGB"
        found[label] = f"{channel}, crop {arguments.get('crop_border', 0)}, {'8 bit' if metric.quantize else 'float'}"
    return found


def table(results: Sequence[SetScores]) -> Table:
    """The scores of all sets: a row a picture and a row of means a set."""
    labels = list(dict.fromkeys(label for scores in results for label in scores.protocol))
    baseline = next((scores.baseline for scores in results if scores.baseline), None)
    protocols = {f"{label}: {scores.protocol[label]}" for scores in results for label in scores.protocol}
    # names are the user's: as plain strings, what they have in brackets would be taken for a style
    grid = Table(title="Scores", caption=Text("; ".join(sorted(protocols)), style="table.caption"))
    for name in ("set", "picture"):
        grid.add_column(name, overflow="fold")
    for label in labels:
        for name in (Text(label), baseline, "gain") if baseline else (Text(label),):
            grid.add_column(name, justify="right", no_wrap=True)
    for scores in results:
        for picture, own, reference in scores.rows:
            cells = _cells(labels, own, reference, baseline is not None)
            grid.add_row(Text(scores.name), Text(picture), *cells)
        cells = _cells(labels, scores.means(), scores.baseline_means(), baseline is not None)
        grid.add_row(Text(scores.name), f"mean of {len(scores.rows)}", *cells, style="bold", end_section=True)
    return grid


def write_csv(path: Path, results: Sequence[SetScores]) -> None:
    """One line for each set, picture and metric: value, protocol, and the baseline's value where there is one."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["set", "picture", "metric", "protocol", "value", "baseline", "baseline_value"])
        for scores in results:
            rows = [*scores.rows, (f"mean of {len(scores.rows)}", scores.means(), scores.baseline_means())]
            for picture, own, reference in rows:
                for label, value in own.items():
                    base = repr(reference[label]) if label in reference else ""
                    line = [
                        scores.name,
                        picture,
                        label,
                        scores.protocol[label],
                        repr(value),
                        scores.baseline or "",
                        base,
                    ]
                    writer.writerow(line)


def learning_curve(metrics: Path, picture: Path) -> None:
    """Draw losses, learning rate and validation scores of a ``metrics.jsonl`` as a PNG."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    validations = [row for row in rows if row["kind"] == "val"]
    labels = list(dict.fromkeys(label for row in validations for label in row["scores"]))
    figure = Figure(figsize=(7, 2.6 * (1 + len(labels))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 + len(labels), 1, sharex=True, squeeze=False)[:, 0]
    _draw_losses(axes[0], steps)
    for axis, label in zip(axes[1:], labels, strict=True):
        _draw_scores(axis, label, validations)
    axes[-1].set_xlabel("iteration")
    write_whole(picture, lambda temporary: figure.savefig(temporary, dpi=110, format="png"))


def _draw_losses(axis: Axes, steps: Sequence[Mapping[str, float]]) -> None:
    for label in dict.fromkeys(key for row in steps for key in row if key.startswith("l_")):
        own = [row for row in steps if label in row]
        # a line needs two points
        axis.plot([row["iter"] for row in own], [row[label] for row in own], "-" if len(own) > 1 else "o", label=label)
    # a loss below zero (PSNRLoss) has no logarithm, and would not be drawn
    positive = all(row[key] > 0 for row in steps for key in row if key.startswith("l_"))
    axis.set(ylabel="loss", yscale="log" if positive else "linear")
    if axis.lines:
        axis.legend(loc="best")
    rate = axis.twinx()
    rate.plot([row["iter"] for row in steps], [row["lr"] for row in steps], color="0.6", lw=1, ls="--")
    rate.set_ylabel("learning rate (dashed)", color="0.4")


def _draw_scores(axis: Axes, label: str, validations: Sequence[Mapping[str, Any]]) -> None:
    for name in dict.fromkeys(row["set"] for row in validations):
        own = [row for row in validations if row["set"] == name and label in row["scores"]]
        if not own:
            continue
        line = axis.plot([row["iter"] for row in own], [row["scores"][label] for row in own], "o-", ms=3, label=name)[0]
        for baseline, values in own[-1].get("baseline", {}).items():
            axis.axhline(values[label], color=line.get_color(), ls=":", label=f"{name}, {baseline}")
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
    axis.legend(loc="best")


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    labels = dict.fromkeys(label for row in rows for label in row)
    return {label: math.fsum(row[label] for row in rows) / len(rows) for label in labels}


def _cells(
    labels: Sequence[str], own: Mapping[str, float], reference: Mapping[str, float], with_baseline: bool
) -> list[str]:
    cells = []
    for label in labels:
        cells.append(f"{own[label]:.4f}" if label in own else "")
        if with_baseline:
            cells.append(f"{reference[label]:.4f}" if label in reference else "")
            cells.append(f"{own[label] - reference[label]:+.4f}" if label in own and label in reference else "")
    return cells
