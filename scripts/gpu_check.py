"""Are the Triton kernels right and fast on this GPU? One command, one table, at most four minutes.

    python3 -m scripts.gpu_check [--deadline 210] [--out DIR] [--op OP ...] [--seed N]
    python3 -m scripts.gpu_check --device cpu --tiny

It needs PyTorch with CUDA, Triton and one GPU of compute capability 8.0 or more, and nothing else: what else could be
compared with (torchvision, flash-attn) and is not installed has a row that says "missing". The stages:

1. Beside each other, in several processes: every kernel, forward and backward, against float64 on odd and on usual
   shapes, in guarded memory full of NaN, twice, which must give the same bits; a layer through
   ``torch.compile(fullgraph=True)``; every shipped setting compiled; and what the timings need compiled ahead of them.
2. Alone: what the GPU can do at most, then each kernel beside its peers at the sizes of the networks, and the shipped
   settings one by one and varied.

The table comes last, in whatever way the run ends: at the deadline, by Ctrl-C, or with kernels that hang, which are
killed and fail. Its last line counts the checks. In DIR lie ``table.txt``, ``results.json`` with every row,
``worker.log`` with tracebacks, and, named after the GPU, a proposal for ``kernels/configs`` with milliseconds.

Exit codes: 0 every check passed, 1 one failed or none was made, 2 it cannot run here, 130 interrupted.

``--device cpu --tiny`` is a test of this script: every stage on the smallest shapes, kernels interpreted, nothing
timed. It says nothing about speed.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:
    # run as a file: its own folder is on the path, and the packages are beside that
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from kernels import launch
from scripts import gpu_bench, gpu_checks, gpu_compiling, gpu_crew, gpu_ops, gpu_rows, gpu_timer, gpu_tuning
from scripts.gpu_crew import Step
from scripts.gpu_rows import Row

# share of the time that checks may take, so that something is left to time
SHARE = 0.45
MOST_JOBS = 12
TRITON = "3.6"


class CannotRun(RuntimeError):
    """What is missing, and what to do."""


def main(argv: list[str] | None = None) -> int:
    """Parse, run, print the table; the exit code."""
    arguments = _parse(argv)
    start = time.monotonic()
    try:
        ops = prepare(arguments)
    except CannotRun as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = {"device": arguments.device, "tiny": arguments.tiny, "seed": arguments.seed, "names": ops}
    steps, rows, interrupted = plan(**options), {}, False
    try:
        run_all(steps, options, arguments, start, rows)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        signal.signal(signal.SIGTERM, before)
        found = report(steps, rows, arguments, time.monotonic() - start)
    return 130 if interrupted else gpu_rows.exit_code(found)


def prepare(arguments: argparse.Namespace) -> list[str]:
    """Names of the operators to check; the environment and the folder are as they must be afterwards.

    Raises:
        CannotRun: there is no device, no Triton, or nowhere to write.
    """
    if (arguments.device == "cpu") != arguments.tiny:
        raise CannotRun("--device cpu and --tiny go together: kernels are interpreted there, a thousand times slower")
    if importlib.util.find_spec("triton") is None:
        raise CannotRun("triton is not installed; pip install 'triton==3.6.0', on Linux")
    if arguments.device == "cpu":
        _can_interpret()
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        # interpreted kernels would be what is measured
        os.environ.pop("TRITON_INTERPRET", None)
        if not torch.cuda.is_available():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            raise CannotRun(
                f"no CUDA device is seen by PyTorch {torch.__version__}, {built}. Run it where nvidia-smi lists a GPU "
                "and PyTorch is built for CUDA; --device cpu --tiny tests the script itself on a CPU"
            )
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    # or each process that compiles a peer would start one for every core
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    known = {op.name: op for op in gpu_ops.operators()}
    unknown = [name for name in arguments.op or () if name not in known]
    if unknown:
        raise CannotRun(f"no kernels of {', '.join(unknown)}; there are those of {', '.join(known)}")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        gpu_rows.write_whole(arguments.out / "worker.log", "")
    except OSError as error:
        raise CannotRun(f"cannot write to {arguments.out}: {error.strerror}; choose another folder by --out") from error
    return [name for name in known if not arguments.op or name in arguments.op]


def plan(*, device: str, tiny: bool, seed: int, names: list[str]) -> list[Step]:
    """Every step, in order: first what can run beside others, then what runs alone."""
    ops = [op for op in gpu_ops.operators() if op.name in names]
    checks = gpu_checks.steps(ops, device=device, tiny=tiny, seed=seed)
    usual = [step for step in checks if not step.late]
    common = {"device": device, "tiny": tiny, "seed": seed}
    steps = [
        about_step(device, seed),
        # takes longest
        *([gpu_compiling.graph_step(device=device, tiny=tiny)] if gpu_compiling.has_kernels(ops) else []),
        *usual,
        *([] if tiny else gpu_bench.warm_steps(ops, device=device, seed=seed)),
        *(step for step in checks if step.late),
        *gpu_compiling.steps(ops),
        *gpu_timer.ceiling_steps(device=device),
        *gpu_bench.steps(ops, **common),
        *gpu_tuning.steps(ops, **common),
    ]
    # on a CPU that others use too, slow is not hung
    return [replace(step, seconds=10 * step.seconds) for step in steps] if tiny else steps


def run_all(
    steps: list[Step], options: dict[str, Any], arguments: argparse.Namespace, start: float, rows: dict[str, list[Row]]
) -> None:
    """Fill ``rows``: what can run beside others, for its share of the time, and then the rest."""
    until = start + arguments.deadline
    log = str(arguments.out / "worker.log")
    beside = [step for step in steps if not step.alone]
    alone = [step for step in steps if step.alone]
    jobs = 1 if arguments.tiny else max(1, min(MOST_JOBS, (os.cpu_count() or 2) * 3 // 4))
    share = 1.0 if arguments.tiny else SHARE
    if arguments.tiny:
        # one process for all: nothing is timed
        beside, alone = steps, []
    for part, count, end in ((beside, jobs, start + share * arguments.deadline), (alone, 1, until)):
        if not part:
            continue
        spent = time.monotonic() - start
        _say(f"{spent:.0f} s: {len(part)} steps {'one by one' if count == 1 else f'in {count} processes'}")
        gpu_crew.run(part, ("scripts.gpu_check", "plan", options), rows, until=end, jobs=count, log=log, say=_say)


def report(steps: list[Step], rows: dict[str, list[Row]], arguments: argparse.Namespace, seconds: float) -> list[Row]:
    """Print the table and write the files; returns every row, marks included."""
    for step in steps:
        rows.setdefault(step.name, [replace(step.row, ok=None, note="skipped: interrupted")])
    found = [row for step in steps for row in rows[step.name] if row.stage != "warm"]
    found += gpu_bench.marks(gpu_rows.finish(found))
    # where each setting is timed is for the files
    lines = gpu_rows.table([row for row in found if not row.backend.endswith("shipped")])
    print("\n".join(lines), flush=True)
    about = next((row.details for row in found if row.stage == "about" and row.details), {})
    settings = gpu_tuning.proposal(found, gpu=about.get("gpu", "unknown"), triton=about.get("triton", "unknown"))
    gpu_rows.write_whole(arguments.out / "table.txt", "\n".join(lines))
    gpu_rows.write(found, arguments.out, about | {"seconds": round(seconds, 1), "command": sys.argv[1:]})
    gpu_rows.write_settings(settings, arguments.out / f"{launch.slug(settings['gpu'])}.json")
    return found


def about_step(device: str, seed: int) -> Step:
    """The machine and the versions."""
    row = Row("about", "about")
    return Step("about", row, lambda: [about(row, device, seed)])


def about(row: Row, device: str, seed: int) -> Row:
    """The row of :func:`about_step`; its details go into the files."""
    versions = {name: _version(name) for name in ("torch", "triton", "numpy", "torchvision")}
    details = {**versions, "python": platform.python_version(), "seed": seed, "date": time.strftime("%Y-%m-%d")}
    if device == "cpu":
        details["gpu"] = "cpu"
    else:
        gpu = torch.cuda.get_device_properties(0)
        details |= {"gpu": gpu.name, "capability": [gpu.major, gpu.minor], "processors": gpu.multi_processor_count}
        details |= {"memory": gpu.total_memory, "cuda": torch.version.cuda, "nvidia_smi": _nvidia_smi()}
    words = ", ".join(f"{key} {details[key]}" for key in ("torch", "triton", "numpy", "torchvision", "seed"))
    warning = "" if str(versions["triton"]).startswith(TRITON) else f"; the settings are for triton {TRITON}"
    return replace(row, note=f"{details['gpu']}: {words}{warning}", details=details)


def _can_interpret() -> None:
    numbers = [tuple(int(x) for x in str(_version(name)).split(".")[:2]) for name in ("triton", "numpy")]
    if numbers[0] < (3, 7) and numbers[1] >= (2, 4):
        raise CannotRun("Triton's interpreter needs numpy below 2.4 here; pip install 'numpy<2.4' (a GPU needs none)")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> str:
    """Driver, clocks, power and temperature, as text."""
    query = "driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m scripts.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--deadline", type=_seconds, default=210.0, help="seconds for everything (210)")
    parser.add_argument("--out", type=Path, default=Path("results/gpu_check"), help="folder for the files")
    parser.add_argument("--op", nargs="*", help="operators, all by default")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="of the inputs; by the clock")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="with --device cpu: test this script")
    return parser.parse_args(argv)


def _seconds(text: str) -> float:
    if not (seconds := float(text)) > 0:
        raise ValueError
    return seconds


if __name__ == "__main__":
    sys.exit(main())
