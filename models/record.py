"""What a page shows of a run: its scores, its pictures by their files, facts and options; kept beside the page."""

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from models import home
from models.base import Base
from models.files import write_text
from models.judging import better_of
from models.report import SetScores
from options.errors import DataError
from options.schema import Options

# beside the page, so that scripts.compare can show it beside others
FILE = Path("page.json")
# raised when a record can no longer be read as before
VERSION = 1


@dataclass
class Shown:
    """One picture.

    Attributes:
        name: of the picture within its set.
        scores: of each network, label -> value; empty where there is no ground truth.
        baseline: scores of the baseline; empty without one.
        size: (h, w) of the outputs in pixels; None where no pictures were kept.
        outputs: file of each network's result, or None.
        others: files of what all networks share: ``input``, ``baseline``, ``gt``, ``thumbnail``.
    """

    name: str
    scores: list[dict[str, float]] = field(default_factory=lambda: [{}])
    baseline: dict[str, float] = field(default_factory=dict)
    size: tuple[int, int] | None = None
    outputs: list[Path | None] = field(default_factory=lambda: [None])
    others: dict[str, Path] = field(default_factory=dict)


@dataclass
class ShownSet:
    """One set of pictures.

    Attributes:
        name: of the set.
        protocol: label of a metric -> how it was computed, in words.
        better: label -> "higher" or "lower".
        baseline: what was judged beside the networks, or None.
        means: of each network, label -> mean over the pictures.
        baseline_means: the same of the baseline.
        pictures: in the order of the set; those of a training have scores and no files.
        count: how many pictures were judged.
    """

    name: str
    protocol: dict[str, str]
    better: dict[str, str]
    baseline: str | None
    means: list[dict[str, float]]
    baseline_means: dict[str, float]
    pictures: list[Shown]
    count: int


@dataclass
class Record:
    """What one page shows.

    Attributes:
        kind: "test", "training" or "comparison".
        title: of the page.
        networks: what each network is called.
        scale: output size over input size.
        sets: what they were judged on.
        facts: of each network, (subject, value).
        options: of each network, the options in force as YAML.
        remarks: what a reader must know of the page itself.
        left_out: what the page does not show though a reader would look for it; stands at its head.
        curve: the lines of ``metrics.jsonl``; empty but for a training.
    """

    kind: str
    title: str
    networks: list[str]
    scale: int
    sets: list[ShownSet]
    facts: list[list[tuple[str, str]]]
    options: list[str]
    remarks: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)


def of_run(kind: str, model: Base, options: Options, results: Sequence[SetScores], *, command: str) -> Record:
    """The record of a run, whose pictures are not in it yet.

    Args:
        kind: "test" or "training".
        results: the scores of each set.
        command: how the run was started.
    """
    better = {label: better_of(metric) for label, metric in options.val.metrics.items()}
    sets = []
    for scores in results:
        pictures = [Shown(name, [own], reference) for name, own, reference in scores.rows]
        means = [scores.means()] if scores.rows else [{}]
        shared = (scores.baseline, means, scores.baseline_means() if scores.rows else {})
        sets.append(ShownSet(scores.name, dict(scores.protocol), better, *shared, pictures, len(pictures)))
    facts = [*_facts(model, options), ("command", command)]
    return Record(kind, options.name, [options.name], options.scale, sets, [facts], [home.text_in_force(options)])


def _facts(model: Base, options: Options) -> list[tuple[str, str]]:
    count = sum(parameter.numel() for parameter in model.network.parameters())
    weights = options.path.pretrain_network_g
    device = str(model.device)
    if model.device.type == "cuda":
        device = f"{device} ({torch.cuda.get_device_name(model.device)})"
    val = options.val
    ways = {"tiles": val.tile, "overlap": val.overlap, "dtype": val.dtype, "self-ensemble": val.self_ensemble}
    chosen = [f"{way} {value}" for way, value in ways.items() if value not in (None, False)]
    return [
        ("when", f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"),
        ("network", f"{options.network_g.type}, {count:,} parameters, x{options.scale}"),
        ("weights", "as the network is built" if weights is None else str(weights)),
        ("restored by", ", ".join(chosen)),
        ("device", device),
        ("versions", f"Pellucid {_version()}, PyTorch {torch.__version__}, Python {platform.python_version()}"),
        ("option file", str(options.file or "none")),
    ]


def _version() -> str:
    try:
        return importlib.metadata.version("pellucid")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def save(folder: Path, record: Record) -> None:
    """Write the record of a page into its folder; the files it names lie there or beside it."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [plain(entry) for entry in value]
        if isinstance(value, Path):
            return value.relative_to(folder).as_posix()
        # JSON has no infinity and no NaN
        return repr(value) if isinstance(value, float) and value - value != 0 else value

    text = json.dumps({"version": VERSION, **plain(asdict(record))}, indent=1, allow_nan=False)
    write_text(folder / FILE, text + "\n")


def load(folder: Path) -> Record:
    """The record of the page in ``folder``.

    Raises:
        DataError: there is none, or it is damaged or of another version.
    """
    path, again = folder / FILE, "run test.py again, with val.save_img and val.report true"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder} is no results folder with a page ({FILE} is missing): {again}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): {again}") from error
    try:
        if content.pop("version") != VERSION:
            raise DataError(f"{path} was written by another version of Pellucid: {again}")
        content["sets"] = [_read_set(folder, entry) for entry in content["sets"]]
        content["facts"] = [[(subject, value) for subject, value in facts] for facts in content["facts"]]
        return Record(**content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is no record of a page ({error!r}): {again}") from error


def _read_set(folder: Path, entry: dict[str, Any]) -> ShownSet:
    pictures = []
    for own in entry["pictures"]:
        own["scores"], own["baseline"] = [_numbers(scores) for scores in own["scores"]], _numbers(own["baseline"])
        own["size"] = tuple(own["size"]) if own["size"] else None
        own["outputs"] = [folder / name if name else None for name in own["outputs"]]
        own["others"] = {kind: folder / name for kind, name in own["others"].items()}
        pictures.append(Shown(**own))
    means, baseline = [_numbers(own) for own in entry["means"]], _numbers(entry["baseline_means"])
    return ShownSet(**{**entry, "pictures": pictures, "means": means, "baseline_means": baseline})


def _numbers(scores: Mapping[str, float | str]) -> dict[str, float]:
    return {label: float(value) for label, value in scores.items()}
