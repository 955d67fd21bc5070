"""Ship a trained network: python -m scripts.model_card experiments/NAME -o archs/weights --scores own=CSV other=CSV.

Writes NAME.safetensors, NAME.md (what it is, what it was trained on and how, its scores), NAME.csv (every score) and
NAME.png (the learning curve) from the files of the training run and the metrics.csv of test runs.
"""

import argparse
import csv
import io
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from archs import ARCHS
from data.io import EXTENSIONS
from models import logbook
from models.files import write_text, write_whole
from models.runtime import run
from options.errors import OptionsError
from scripts.convert_weights import TASKS, convert

LICENCE = "Apache-2.0"
# (picture, set) -> metric -> value
Scores = dict[tuple[str, str], dict[str, float]]


def main(argv: list[str]) -> None:
    """Parse and write the four files."""
    parser = argparse.ArgumentParser(prog="python -m scripts.model_card", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, metavar="experiments/NAME", help="folder of the finished training run")
    parser.add_argument("-o", "--out", type=Path, default=Path("archs/weights"), metavar="DIR", help="where to write")
    parser.add_argument("--title", required=True, help="what to call the network, such as 'SST-tiny x2'")
    parser.add_argument("--task", choices=TASKS, help="what it is for; default: sr where the scale is above 1")
    parser.add_argument("--machine", default="", metavar="TEXT", help="what it was trained on: cores, PyTorch")
    parser.add_argument(
        "--scores", nargs="+", required=True, metavar="LABEL=metrics.csv", help="of the network first, then of others"
    )
    parser.add_argument("--note", action="append", default=[], metavar="TEXT", help="a paragraph for the end")
    parser.add_argument("--force", action="store_true", help="replace an earlier card and weights")
    args = parser.parse_args(argv)
    logbook.start_logging()
    for path in ship(
        args.run,
        args.out,
        title=args.title,
        task=args.task,
        machine=args.machine,
        scores=args.scores,
        notes=args.note,
        force=args.force,
    ):
        print(f"wrote {path} ({path.stat().st_size:,} bytes)")


def ship(
    run_folder: Path,
    out: Path,
    *,
    title: str,
    task: str | None,
    machine: str,
    scores: Sequence[str],
    notes: Sequence[str],
    force: bool,
) -> list[Path]:
    """Write weights, card, scores and curve of a training run; returns the files.

    Raises:
        OptionsError: the run is not finished, a table of scores lacks something, or files exist and ``force`` is off.
    """
    options = _options(run_folder)
    name = options["name"]
    files = [out / f"{name}{suffix}" for suffix in (".safetensors", ".md", ".csv", ".png")]
    there = [str(file) for file in files if file.exists()]
    if there and not force:
        raise OptionsError(f"{', '.join(there)} exist; --force replaces them")
    tables = dict(_read_scores(text) for text in scores)
    steps = _steps(run_folder)
    if not steps or steps[-1]["iter"] < options["train"]["total_iter"]:
        done = steps[-1]["iter"] if steps else 0
        raise OptionsError(f"{run_folder} ended at iteration {done} of {options['train']['total_iter']}; go on first")
    weights, card, table, curve = files
    facts = {
        "name": name,
        "title": title,
        "license": LICENCE,
        "iteration": steps[-1]["iter"],
        "seed": options.get("manual_seed", 0),
        "trained_on": options["datasets"]["train"]["dataroot_gt"],
    }
    convert(run_folder, weights, task=task, facts=facts, force=True)
    text = "\n\n".join(
        [*_head(options, weights, title), *_training(options, steps, machine), *_scores_of(tables), *notes]
    )
    write_text(card, text + "\n")
    write_text(table, _csv(tables))
    write_whole(curve, lambda temporary: shutil.copyfile(run_folder / "curve.png", temporary))
    return files


def _options(run_folder: Path) -> dict[str, Any]:
    found = sorted(run_folder.glob("*.effective.yml"))
    if not found:
        raise OptionsError(f"{run_folder} holds no .effective.yml; name the folder of a training run")
    return yaml.safe_load(found[-1].read_text(encoding="utf-8"))


def _steps(run_folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OptionsError(f"cannot read {run_folder / 'metrics.jsonl'}: {error.strerror}") from error
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def _head(options: Mapping[str, Any], weights: Path, title: str) -> list[str]:
    spec = options["network_g"]
    network = ARCHS.build(spec)
    count = sum(parameter.numel() for parameter in network.parameters())
    arguments = ", ".join(f"`{key}: {value}`" for key, value in spec.items() if key != "type")
    return [
        f"# {title}",
        f"`{weights.name}`: {spec['type']} with {count:,} parameters, {weights.stat().st_size:,} bytes, {LICENCE} like "
        f"the program. {arguments}.",
        f"![The learning curve]({options['name']}.png)",
    ]


def _training(options: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], machine: str) -> list[str]:
    train, data = options["train"], options["datasets"]["train"]
    root = Path(data["dataroot_gt"])
    count = sum(path.suffix.lower() in EXTENSIONS for path in root.rglob("*"))
    if not count:
        raise OptionsError(f"there are no pictures in {root}, from which the network is said to be trained")
    listed = root.parent / "LICENSES.md"
    licences = f" (authors and licences: `{listed}`)" if listed.is_file() else ""
    # the fastest tenth: what a step takes when the machine does nothing else
    fast = sorted(row["time"] for row in steps)[len(steps) // 10]
    last, batch = steps[-1]["iter"], data["batch_size_per_gpu"]
    start = (options.get("path") or {}).get("pretrain_network_g")
    file = next(Path("options/train").glob(f"*/{options['name']}.yml"), None)
    command = f"`python train.py -opt {file}`: " if file else ""
    origin = f"`{start}`" if start else "random weights"
    sizes = ", ".join(f"{factor:g}" for factor in data.get("gt_scales") or [])
    side = f"{data['gt_size']}x{data['gt_size']} pixels"
    crops = f"{side} of photographs at {sizes} times their size" if sizes else side
    return [
        "## Training",
        f"- Data: {count} photographs, `{root}`{licences}; it starts from {origin}.",
        f"- Recipe: {command}{last:,} iterations of {batch} crops of {crops}, "
        f"{train['optim_g']['type']}, learning rate {train['optim_g']['lr']:g}, {train['pixel_opt']['type']}, "
        f"average of the weights {train['ema_decay']}, seed {options.get('manual_seed', 0)}.",
        f"- Time: {fast:.2f} s an iteration in its fastest tenth; {last:,} of them would take {fast * last / 60:.0f} "
        f"minutes at that pace{f' ({machine})' if machine else ''}.",
    ]


def _scores_of(tables: Mapping[str, tuple[str, Scores]]) -> list[str]:
    """A table for each metric: a row a picture, a column a network, the baseline last."""
    first = next(iter(tables.values()))[1]
    metrics = list(dict.fromkeys(metric for row in first.values() for metric in row if ":" not in metric))
    parts = ["## Scores"]
    for metric in metrics:
        baseline = next((key for row in first.values() for key in row if key.startswith(f"{metric}:")), None)
        columns = [*tables, *([baseline.split(":")[1]] if baseline else [])]
        protocol = next(iter(tables.values()))[0]
        lines = [
            f"{metric} ({protocol_of(protocol, metric)}):\n",
            f"| photograph | {' | '.join(columns)} |",
            f"|---|{'---|' * len(columns)}",
        ]
        rows = [(key, [scores.get(key, {}) for _, scores in tables.values()]) for key in first]
        for (picture, group), found in rows:
            values = [row.get(metric, math.nan) for row in found] + (
                [first[picture, group][baseline]] if baseline else []
            )
            mean = picture.startswith("mean of")
            cells = [_cell(value, metric) for value in values]
            label = f"**{group}: {picture}**" if mean else picture
            lines.append(f"| {label} | {' | '.join(f'**{cell}**' if mean else cell for cell in cells)} |")
        parts.append("\n".join(lines))
    return parts


def protocol_of(protocols: str, metric: str) -> str:
    """How a metric was computed, from ``label=words`` lines."""
    return dict(line.split("=", 1) for line in protocols.splitlines())[metric]


def _cell(value: float, metric: str) -> str:
    return f"{value:.2f}" if "psnr" in metric else f"{value:.4f}"


def _read_scores(text: str) -> tuple[str, tuple[str, Scores]]:
    """``LABEL=file``, and of the file the protocols and the scores of each picture."""
    label, sign, file = text.partition("=")
    if not sign:
        raise OptionsError(f"--scores {text}: write LABEL=metrics.csv")
    try:
        rows = list(csv.DictReader(io.StringIO(Path(file).read_text(encoding="utf-8"))))
    except OSError as error:
        raise OptionsError(f"cannot read {file}: {error.strerror}") from error
    if not rows or not {"set", "picture", "metric", "protocol", "value"} <= set(rows[0]):
        raise OptionsError(f"{file} is no metrics.csv of test.py")
    scores: Scores = {}
    for row in rows:
        own = scores.setdefault((row["picture"], row["set"]), {})
        own[row["metric"]] = float(row["value"])
        if row["baseline"]:
            own[f"{row['metric']}:{row['baseline']}"] = float(row["baseline_value"])
    return label, ("\n".join(dict.fromkeys(f"{row['metric']}={row['protocol']}" for row in rows)), scores)


def _csv(tables: Mapping[str, tuple[str, Scores]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["network", "set", "picture", "metric", "protocol", "value"])
    told = set()
    for label, (protocols, scores) in tables.items():
        for (picture, group), row in scores.items():
            for key, value in row.items():
                metric, _, baseline = key.partition(":")
                line = (baseline or label, group, picture, metric, protocol_of(protocols, metric), f"{value:.6g}")
                if line[:4] not in told:
                    told.add(line[:4])
                    writer.writerow(line)
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
