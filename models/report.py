"""Scores of one or more sets as a table, a CSV file and a learning curve."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

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


def protocol_of(metric: MetricOptions) -> str:
    """``Y, crop 2, 8 bit``: how a metric of the options is computed."""
    arguments = metric.arguments()
    channel = "Y" if arguments.get("test_y_channel") else "RGB"
    return f"{channel}, crop {arguments.get('crop_border', 0)}, 8 bit"


def table(results: Sequence[SetScores], *, pictures: bool = True) -> Table:
    """The scores of all sets: a row a picture (with ``pictures``) and a row of means a set."""
    labels = list(dict.fromkeys(label for scores in results for label in scores.protocol))
    baseline = next((scores.baseline for scores in results if scores.baseline), None)
    protocols = {f"{label}: {scores.protocol[label]}" for scores in results for label in scores.protocol}
    grid = Table(title="Scores", caption="; ".join(sorted(protocols)))
    for name in ("set", "picture"):
        grid.add_column(name, overflow="fold")
    for label in labels:
        for name in (label, baseline, "gain") if baseline else (label,):
            grid.add_column(name, justify="right", no_wrap=True)
    for scores in results:
        for picture, own, reference in scores.rows if pictures else ():
            grid.add_row(scores.name, picture, *_cells(labels, own, reference, baseline is not None))
        cells = _cells(labels, scores.means(), scores.baseline_means(), baseline is not None)
        grid.add_row(scores.name, f"mean of {len(scores.rows)}", *cells, style="bold", end_section=True)
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
    """Draw loss, learning rate and validation scores of a ``metrics.jsonl`` as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    scores = [row for row in rows if row["kind"] == "val"]
    labels = list(dict.fromkeys(key for row in scores for key, value in row.items() if _is_score(row, key, value)))
    figure = Figure(figsize=(7, 2.6 * (1 + max(len(labels), 0))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 + len(labels), 1, sharex=True, squeeze=False)[:, 0]
    for key in (key for key in (steps[0] if steps else ()) if key.startswith("l_")):
        axes[0].plot([row["iter"] for row in steps], [row[key] for row in steps], label=key)
    axes[0].set(ylabel="loss", yscale="log")
    rate = axes[0].twinx()
    rate.plot([row["iter"] for row in steps], [row["lr"] for row in steps], color="0.6", lw=1, ls="--")
    rate.set_ylabel("learning rate (dashed)", color="0.4")
    axes[0].legend(loc="upper right")
    for axis, label in zip(axes[1:], labels, strict=True):
        for name in dict.fromkeys(row["set"] for row in scores):
            own = [row for row in scores if row["set"] == name and label in row]
            line = axis.plot([row["iter"] for row in own], [row[label] for row in own], "o-", ms=3, label=name)[0]
            bases = [(key, row[key]) for row in own for key in row if key.startswith(f"{label}_")]
            for key, value in dict(bases).items():
                axis.axhline(value, color=line.get_color(), ls=":", label=f"{name}, {key[len(label) + 1 :]}")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    axes[-1].set_xlabel("iteration")
    figure.savefig(picture, dpi=110)


def _is_score(row: Mapping[str, object], key: str, value: object) -> bool:
    reference = any(key.startswith(f"{other}_") for other in row if other not in ("kind", "iter", "set", key))
    return key != "iter" and isinstance(value, (int, float)) and not reference


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
