"""Crops per second of the data room, beside the reading that decodes a whole file for every crop.

python -m scripts.bench_loader --folder GT [LQ] [--workers 2] [--seconds 10]
python -m scripts.bench_loader -opt FILE.yml

With GT alone both ways of training are measured: on pairs (LQ pictures are made in a temporary folder) and on GT
pictures whose LQ side is made on the fly. All readings yield the same tensors, which is checked before the timing.
They take turns, so that a busy machine slows all of them down; CPU time counts what the processes really used.
"""

import argparse
import contextlib
import itertools
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import torch
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

import archs  # noqa: F401  networks register themselves, so that option files can be checked
from data import build_loader
from data.augment import flip_and_rotate
from data.backends import FolderSource, open_source
from data.clean import DownsampleImageDataset
from data.dataset import split_key
from data.degrade import bicubic_downsample_crop, mod_crop
from data.lmdb_file import write_lmdb
from data.loader import Loader
from data.paired import PairedImageDataset
from data.prepare import make_lr
from data.sampler import EndlessSampler
from data.workers import start_worker
from models import logbook, runtime
from options import load
from options.errors import OptionsError, UserError

READINGS = ("one decode per crop", "disk", "lmdb", "memory")
_ROUNDS = 2
_WARM = 4


class OneDecodePerCrop(Dataset):
    """The crops of a data set, read as BasicSR does: file, whole decode, whole float picture, crop, flip, tensor.

    Args:
        dataset: an 8-bit RGB training set on disk; it says which crops.
    """

    def __init__(self, dataset: PairedImageDataset | DownsampleImageDataset) -> None:
        self.dataset, self.seed = dataset, dataset.seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        epoch, index = split_key(key)
        rng, side, scale = self.dataset._rng(epoch, index), self.dataset.crop.gt_size, self.dataset.scale
        if isinstance(self.dataset, PairedImageDataset):
            gt_name, lq_name = self.dataset.pairs[index]
            gt, lq = (_float(_imread(path)) for path in (self.dataset.gt.path(gt_name), self.dataset.lq.path(lq_name)))
            gt = gt[: lq.shape[0] * scale, : lq.shape[1] * scale]
            top, left = self.dataset.crop.draw(gt, rng)
            lq = lq[top // scale : (top + side) // scale, left // scale : (left + side) // scale]
        else:
            whole = mod_crop(_imread(self.dataset.gt.path(self.dataset.files[index])), scale)
            gt = _float(whole)
            top, left = self.dataset.crop.draw(gt, rng)
            low = side // scale, side // scale
            lq = _float(bicubic_downsample_crop(whole, scale, (top // scale, left // scale), low))
        gt = gt[top : top + side, left : left + side]
        flips = {"use_hflip": self.dataset.use_hflip, "use_rot": self.dataset.use_rot}
        gt, lq = flip_and_rotate((gt, lq), rng, **flips)
        return {"lq": _tensor(lq), "gt": _tensor(gt)}


@dataclass
class Score:
    """What one reading has done so far."""

    crops: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    memory: float = 0.0
    rates: list[float] = field(default_factory=list)

    def add(self, crops: int, seconds: float, cpu: float, memory: float) -> None:
        """Count one turn."""
        self.crops, self.seconds, self.cpu = self.crops + crops, self.seconds + seconds, self.cpu + cpu
        self.memory = max(self.memory, memory)
        self.rates.append(crops / seconds)


def main(argv: list[str]) -> None:
    """Parse, check that all readings agree, measure, print the table."""
    args = _parse(argv)
    logbook.start_logging(level=logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        table = Table(title=f"{args.workers} workers, GT {args.gt_size}, x{args.scale}, batch {args.batch}")
        for column in ("set", "reading", "crops/s (each turn)", "ratio", "CPU ms/crop", "ratio", "MiB"):
            table.add_column(column, justify="right" if column not in ("set", "reading") else "left")
        for label, kind, roots in _sets(args, Path(folder)):
            print(f"measuring {label}: {_ROUNDS} turns of each reading", file=sys.stderr, flush=True)
            scores = measure(kind, roots, args)
            _add_rows(table, label, scores)
        logbook.console.print(table)
    print(
        "MiB: proportional set size of the process and its workers. The tensors of all readings were equal bit by bit."
    )


def measure(kind: str, roots: dict[str, dict[str, str]], args: argparse.Namespace) -> dict[str, Score]:
    """Scores by reading.

    Args:
        kind: ``"PairedImageDataset"`` or ``"DownsampleImageDataset"``.
        roots: ``disk`` and ``lmdb`` -> data roots.

    Raises:
        UserError: two readings differ in a bit.
    """
    loaders = {reading: _loader(kind, reading, roots, args) for reading in READINGS}
    first = {reading: _first(loader) for reading, loader in loaders.items()}
    for reading, batches in first.items():
        for one, two in zip(first[READINGS[0]], batches, strict=True):
            if not all(one[key].equal(two[key]) for key in ("lq", "gt")):
                raise UserError(f"{kind}: the crops of {reading} differ from those of {READINGS[0]}")
    scores = {reading: Score() for reading in READINGS}
    for _ in range(_ROUNDS):
        for reading, loader in loaders.items():
            scores[reading].add(*_turn(loader, args.seconds / _ROUNDS))
    return scores


def _first(loader: Any) -> list[dict[str, Any]]:
    with contextlib.closing(iter(loader)) as stream:
        return list(itertools.islice(stream, 4))


def _turn(loader: Loader, seconds: float) -> tuple[int, float, float, float]:
    """Crops, seconds, CPU seconds and MiB of one turn, after the workers are warm."""
    crops = 0
    with contextlib.closing(iter(loader)) as stream:
        for _ in range(_WARM):
            next(stream)
        cpu, began = _cpu(), time.perf_counter()
        while time.perf_counter() - began < seconds:
            crops += len(next(stream)["gt"])
        spent = time.perf_counter() - began
        return crops, spent, _cpu() - cpu, _memory()


def _loader(kind: str, reading: str, roots: dict[str, dict[str, str]], args: argparse.Namespace) -> Loader:
    backend = reading if reading in ("lmdb", "memory") else "disk"
    arguments = {"gt_size": args.gt_size, "use_hflip": True, "use_rot": True, "io_backend": {"type": backend}}
    arguments |= roots["lmdb" if reading == "lmdb" else "disk"]
    options = SimpleNamespace(
        type=kind,
        name=reading,
        phase="train",
        scale=args.scale,
        seed=0,
        batch_size_per_gpu=args.batch,
        num_worker_per_gpu=args.workers,
        num_prefetch_queue=2,
        dataset_enlarge_ratio=1,
        prefetch_mode=None,
        pin_memory=False,
        persistent_workers=None,
        use_shuffle=True,
        arguments=lambda: arguments,
    )
    loader = build_loader(options)
    if reading != READINGS[0]:
        return loader
    plain = OneDecodePerCrop(loader.dataset)
    workers = {"worker_init_fn": start_worker, "persistent_workers": True} if args.workers else {}
    sampler = EndlessSampler(len(plain), seed=0)
    loading = DataLoader(plain, batch_size=args.batch, sampler=sampler, num_workers=args.workers, **workers)
    return Loader(loading, plain, world=1, start=0, endless=True)


def _sets(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, dict[str, dict[str, str]]]]:
    """(label, type of the data set, roots) of what is measured; LQ pictures and databases are made on the way."""
    gt, lq = args.gt, args.lq
    settings = {"threads": max(1, args.workers)}
    if lq is None and args.kind != "DownsampleImageDataset":
        lq = str(folder / "lq")
        make_lr(FolderSource(gt), lq, args.scale, tmpl="{}", alpha="error", watch=lambda items, _: items, **settings)
    sides = {"dataroot_gt": gt, "dataroot_lq": lq}
    stored = {key: str(folder / f"{key}.lmdb") for key, root in sides.items() if root}
    for key, target in stored.items():
        write_lmdb(open_source(sides[key]), target, replace_dots=True, **settings)
    if args.kind != "DownsampleImageDataset":
        paired = {"filename_tmpl": args.tmpl}
        yield "pairs", "PairedImageDataset", {"disk": sides | paired, "lmdb": stored | paired}
    if args.kind != "PairedImageDataset":
        only = [{"dataroot_gt": roots["dataroot_gt"]} for roots in (sides, stored)]
        yield "GT only", "DownsampleImageDataset", dict(zip(("disk", "lmdb"), only, strict=True))


def _add_rows(table: Table, label: str, scores: dict[str, Score]) -> None:
    base = scores[READINGS[0]]
    for reading, score in scores.items():
        rate, cost = score.crops / score.seconds, score.cpu / score.crops * 1000
        table.add_row(
            label,
            reading,
            f"{rate:,.0f} ({', '.join(f'{rate:,.0f}' for rate in score.rates)})",
            f"{rate / (base.crops / base.seconds):.2f}",
            f"{cost:.3f}" if score.cpu else "-",
            f"{base.cpu / base.crops * 1000 / cost:.2f}" if score.cpu else "-",
            f"{score.memory:,.0f}" if score.memory else "-",
        )


def _processes() -> list[int]:
    return [os.getpid(), *(child.pid for child in multiprocessing.active_children())]


def _cpu() -> float:
    """CPU seconds of this process and its workers; 0 where the system does not tell."""
    total = 0
    for process in _processes():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK") if total else 0.0


def _memory() -> float:
    """MiB of this process and its workers, shared pages counted once; 0 where the system does not tell."""
    total = 0
    for process in _processes():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def _imread(path: str) -> np.ndarray:
    return cv2.imdecode(np.frombuffer(Path(path).read_bytes(), np.uint8), cv2.IMREAD_COLOR)[..., ::-1]


def _float(image: np.ndarray) -> np.ndarray:
    return image.astype(np.float32) / 255.0


def _tensor(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_loader", description=__doc__.split("\n\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("-opt", help="option file; its training set is measured")
    what.add_argument("--folder", nargs="+", metavar=("GT", "LQ"), help="8-bit RGB pictures")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each reading")
    parser.add_argument("--scale", type=int, default=2)
    parser.add_argument("--gt_size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tmpl", default="{}", help="LQ name from the GT name")
    args = parser.parse_args(argv)
    args.kind = None
    if args.opt:
        _take_options(args)
    elif len(args.folder) > 2:
        parser.error("--folder takes GT, or GT and LQ")
    else:
        args.gt, args.lq = args.folder[0], args.folder[1] if len(args.folder) > 1 else None
        args.kind = "PairedImageDataset" if args.lq else None
    return args


def _take_options(args: argparse.Namespace) -> None:
    options = load.load(args.opt, [])
    (training,) = options.phase("train").values()
    if training.type not in ("PairedImageDataset", "DownsampleImageDataset"):
        raise OptionsError(
            f"{args.opt}: a {training.type} cannot be measured; PairedImageDataset and DownsampleImageDataset can"
        )
    given = training.arguments()
    args.kind, args.scale, args.batch = training.type, options.scale, training.loaded_batch
    args.gt, args.lq, args.gt_size = given["dataroot_gt"], given.get("dataroot_lq"), given["gt_size"]
    args.tmpl = given.get("filename_tmpl", "{}")


if __name__ == "__main__":
    sys.exit(runtime.run(main, sys.argv[1:]))
