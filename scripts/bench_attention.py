"""Error and time of coreset attention (WildCat) beside exact attention and other ways to approximate it.

    python -m scripts.bench_attention --out results/attention [--inputs gaussian,photo,window] [--quick] [--threads 1]

Inputs are Gaussian (the paper's figure 3; nothing there can be compressed), features of photographs, and windows of SST
whose keys carry a position. The relative error is 0 for exact attention and 1 for the mean value, so that it tells how
much of what attention does is lost; it is taken over all photographs and seeds. All ways to attend are timed by turns
in one process, with as many queries as keys; the ratio to PyTorch's fused attention counts, on an idle machine.
"""

import argparse
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.coreset_attention import cases, wildcat_attention
from models import logbook
from models.runtime import run
from options.errors import OptionsError
from options.registry import nearest
from scripts import attention_peers as peers
from scripts import attention_report as report
from scripts import attention_trained
from scripts.attention_inputs import INPUTS, Case, large_enough, make_cases, read_photos

# settings that --quick lowers; what is given on the command line stays
USUAL = {
    "n": (8192, 16384, 32768, 65536, 131072),
    "d": (32, 64),
    "sides": (64, 96, 256),
    "windows": (64, 96),
    "amplitudes": (0.0, 2.0, 4.0),
    "std": (1.0, 3.0),
    "rank": (64, 128, 256, 512),
    "bins": (1, 16, 64),
    "seeds": 3,
    "queries": 4096,
    "repeats": 3,
    "crops": ("middle",),
}
QUICK = {
    "n": (2048,),
    "d": (32,),
    "sides": (48,),
    "windows": (32,),
    "amplitudes": (2.0,),
    "std": (1.0,),
    "rank": (64, 256),
    "bins": (16,),
    "seeds": 1,
    "queries": 1024,
    "repeats": 2,
    "crops": ("middle",),
}


@dataclass(frozen=True)
class Method:
    """One way to attend; ``call(q, k, v, scale=..., grid=..., seed=...)``."""

    name: str
    call: Callable[..., Tensor]
    rank: int | None = None
    bins: int | None = None


@dataclass
class Row:
    """What was found for one method on one case: errors by draw, seconds by turn."""

    method: Method
    relative: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def methods(ranks: Sequence[int], bins: Sequence[int]) -> tuple[list[Method], list[str]]:
    """All ways to attend, exact attention first, and in words what of them is left out."""
    found = [
        Method("exact (SDPA)", _plain(peers.exact_attention)),
        Method("mean of v", _plain(peers.mean_value)),
        Method("Taylor, 1st order", _plain(peers.taylor_first_order)),
    ]
    for rank in ranks:
        found += [
            Method("uniform keys", _seeded(peers.uniform_subset, rank), rank),
            Method("averaged keys", _pooled(peers.pooled_attention, rank=rank), rank),
            Method("Nystrom, 6 steps", _pooled(peers.nystrom_attention, rank=rank), rank),
            Method("Nystrom, pinv", _pooled(peers.nystrom_attention, rank=rank, iterations=None), rank),
        ]
        found += [Method("WildCat", partial(_wildcat, rank, count), rank, count) for count in bins if count <= rank]
    missing = [f"{rank} keys in {count} bins" for rank, count in itertools.product(ranks, bins) if count > rank]
    return found, [f"left out, as each bin has one key at least: {', '.join(missing)}"] if missing else []


def _plain(peer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, *, scale, grid, seed: peer(q, k, v, scale=scale)


def _seeded(peer: Callable[..., Tensor], rank: int) -> Callable[..., Tensor]:
    return lambda q, k, v, *, scale, grid, seed: peer(q, k, v, scale=scale, rank=rank, seed=seed)


def _pooled(peer: Callable[..., Tensor], **settings: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, *, scale, grid, seed: peer(q, k, v, scale=scale, grid=grid, **settings)


def _wildcat(
    rank: int, bins: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, grid: tuple[int, int] | None, seed: int
) -> Tensor:
    return wildcat_attention(q, k, v, rank=rank, bins=bins, scale=scale, grid=grid, seed=seed)


@torch.no_grad()
def measure(case: Case, ways: Sequence[Method], args: argparse.Namespace) -> dict[str, Any]:
    """Errors over all draws and times of the first; see :func:`report.entry`."""
    rows, gammas = [Row(way) for way in ways], []
    queries = min(case.n, args.queries)
    for number, draw in enumerate(case.draws):
        q, k, v = draw()
        chosen = torch.randperm(case.n, generator=torch.Generator().manual_seed(number))[:queries]
        exact = peers.exact_attention(q[:, :, chosen], k, v, scale=case.scale)
        gammas.append(float(cases.gamma(q, k, scale=case.scale).max()))
        rounded, extent = [x.float() for x in (q, k, v)], float(v.max() - v.min())
        for row in rows:
            out = _some(row.method, rounded, chosen, case, seed=number)
            row.relative.append(cases.relative_error(out, exact, v))
            row.largest.append(float((out.double() - exact).abs().max()) / extent)
    time_all(case, rows, args)
    return report.entry(case, rows, queries, gammas)


def _some(way: Method, inputs: Sequence[Tensor], chosen: Tensor, case: Case, *, seed: int) -> Tensor:
    """The output for some of the queries; what chooses keys or landmarks sees all of them, as it does in use."""
    q, k, v = inputs
    settings = {"scale": case.scale, "grid": case.grid, "seed": seed}
    if way.rank is None:
        return way.call(q[:, :, chosen], k, v, **settings)
    return way.call(q, k, v, **settings)[:, :, chosen]


def time_all(case: Case, rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Add seconds to the rows, by turns; a slow one is left out of later turns once it had ``args.seconds``."""
    inputs, clock = [x.float() for x in case.draws[0]()], _clock()
    for _ in range(args.repeats):
        for row in rows:
            if row.seconds and sum(row.seconds) > args.seconds:
                continue
            began = clock()
            row.method.call(*inputs, scale=case.scale, grid=case.grid, seed=0)
            row.seconds.append(clock() - began)


def _clock() -> Callable[[], float]:
    """Processor time where one thread works, which other processes hardly change; else the time on the wall."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def main(argv: list[str]) -> None:
    """Parse, measure each case, print its table, write what was found so far."""
    logbook.start_logging(level=logging.WARNING)
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    found, notes = gather(args)
    ways, missing = methods(args.rank, args.bins)
    notes += missing + _load()
    _check_ranks(found, args.rank)
    files = report.files(args.out, force=args.force) if args.out else {}
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "force")}
    entries = []
    for number, case in enumerate(found, start=1):
        print(f"{number} of {len(found)}: {case.kind}, {case.label}", file=sys.stderr, flush=True)
        entries.append(measure(case, ways, args))
        logbook.console.print(report.table(entries[-1]))
        # each time, as a long run may be interrupted
        report.write(files, entries, settings=settings, notes=notes)
    for note in notes:
        print(f"note: {note}")
    if files:
        print(f"wrote {', '.join(map(str, files.values()))}")


def gather(args: argparse.Namespace) -> tuple[list[Case], list[str]]:
    """All inputs, and in words what of them is left out."""
    photos = read_photos(args.photos) if {"photo", "window"} & set(args.inputs) else {}
    found, notes = make_cases(args, photos)
    if args.weights:
        network = attention_trained.read_network(args.opt, args.weights)
        fitting = large_enough(photos, max(args.windows), notes)
        found += attention_trained.trained_cases(network, fitting, args.windows, args.crops)
    return found, notes


def _load() -> list[str]:
    """What keeps the times from being right, in words."""
    kind = "processor time of one thread" if _clock() is time.process_time else "time on the wall"
    notes = [f"times are {kind} and need an idle machine; ratios within one run are what counts"]
    with_load = hasattr(os, "getloadavg") and os.getloadavg()[0]
    if with_load and with_load > 0.5:
        notes.append(f"the machine was busy at the start: load {with_load:.1f} with {os.cpu_count()} processors")
    return notes


def _check_ranks(found: Sequence[Case], ranks: Sequence[int]) -> None:
    smallest = min(found, key=lambda case: case.n)
    if max(ranks) > smallest.n:
        text = f"--rank {max(ranks)} is more than the {smallest.n} keys of {smallest.kind}, {smallest.label}"
        raise OptionsError(f"{text}; lower it or enlarge that")
    for case, rank in itertools.product(found, ranks):
        try:
            peers.divide(rank, *(case.grid or (1, case.n)))
        except ValueError as error:
            raise OptionsError(f"--rank {rank}: {error}") from error


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, each a tuple or a number, with the usual or the quick value where nothing is given."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_attention",
        description=__doc__.split("\n\n")[0] + " Lists are separated by commas.",
    )

    def add(name: str, of: Callable[[str], Any], text: str) -> None:
        parser.add_argument(f"--{name}", type=of, help=f"{text} ({_words(USUAL[name])}; quick: {_words(QUICK[name])})")

    parser.add_argument("--inputs", type=_names, default=INPUTS, help=f"any of {','.join(INPUTS)}; all by default")
    add("n", _integers, "gaussian: numbers of keys")
    add("d", _integers, "channels of queries and keys")
    add("sides", _integers, "photo: sides of the crop in pixels")
    add("std", _numbers, "photo: standard deviations of the logits")
    add("windows", _integers, "window: sides in pixels")
    add("amplitudes", _numbers, "window: largest positional bias")
    add("crops", _names, "photo and window: where the crop lies, any of middle,corner")
    add("rank", _integers, "keys that are left")
    add("bins", _integers, "parts that WildCat compresses apart")
    add("seeds", int, "draws of each input, and of each photograph")
    add("queries", int, "most queries that errors are taken over")
    add("repeats", int, "turns of timing, of which the shortest counts")
    parser.add_argument("--seconds", type=float, default=20.0, help="no further turns for a method that took longer")
    parser.add_argument("--photos", nargs="+", metavar="FILE", help="photographs or folders of them instead")
    parser.add_argument("--weights", metavar="FILE", help="window: of an SST, whose layers are measured instead")
    parser.add_argument("--opt", metavar="FILE.yml", help="the option file that the weights belong to")
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch; its own choice by default")
    parser.add_argument("--out", metavar="FOLDER", help="write results.md, results.json and results.png there")
    parser.add_argument("--force", action="store_true", help="overwrite them")
    parser.add_argument("--quick", action="store_true", help="small sizes: a try in seconds, no evidence")
    args = parser.parse_args(argv)
    for name, value in (QUICK if args.quick else USUAL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    for option, known in (("inputs", INPUTS), ("crops", cases.PLACES)):
        for name in getattr(args, option):
            if name not in known:
                raise OptionsError(f"--{option}: unknown {name!r}{nearest(name, known)} (known: {', '.join(known)})")
    for option in ("n", "d", "sides", "windows", "rank", "bins", "seeds", "queries", "repeats"):
        value, smallest = getattr(args, option), 2 if option in ("n", "sides", "windows") else 1
        if min(value if isinstance(value, tuple) else (value,)) < smallest:
            raise OptionsError(f"--{option} must be at least {smallest}, got {_words(value)}")
    for option, fits, text in (("std", lambda x: x > 0, "above 0"), ("amplitudes", lambda x: x >= 0, "at least 0")):
        if not all(fits(value) and math.isfinite(value) for value in getattr(args, option)):
            raise OptionsError(f"--{option} must be {text}, got {_words(getattr(args, option))}")
    if bool(args.weights) != bool(args.opt) or (args.weights and "window" not in args.inputs):
        raise OptionsError("--weights and --opt go together, and with window among the --inputs")
    if args.threads < 0 or not args.seconds >= 0:
        raise OptionsError(f"--threads and --seconds must not be negative, got {args.threads} and {args.seconds}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _integers(text: str) -> tuple[int, ...]:
    return _list(text, int, "whole numbers")


def _numbers(text: str) -> tuple[float, ...]:
    return _list(text, float, "numbers")


def _list(text: str, kind: Callable[[str], Any], words: str) -> tuple[Any, ...]:
    try:
        return tuple(dict.fromkeys(kind(number) for number in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are not {words} separated by commas") from None


def _words(value: Any) -> str:
    return ",".join(
        f"{x:g}" if isinstance(x, float) else str(x) for x in (value if isinstance(value, tuple) else [value])
    )


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
