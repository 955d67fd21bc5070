"""Milliseconds of a call on a GPU or a CPU, and what the machine can do at most."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from scripts import gpu_ops
from scripts.gpu_crew import Step
from scripts.gpu_rows import Row

# milliseconds to warm up for, and to measure for
WARM, REPEAT = 5.0, 25.0
# bytes that push everything else out of the cache of an H200
CACHE = 256 * 2**20
# cycles of torch.cuda._sleep in a millisecond: at most 1.98 GHz
CYCLES = 2_000_000
# launches that a GPU takes without making the CPU wait
QUEUE = 800


def quantiles(
    run: Callable[[], Any], *, device: str, warm: float = WARM, repeat: float = REPEAT, launches: int = 10
) -> tuple[float, float, float]:
    """Median, 20 % and 80 % of the milliseconds of ``run``, with a cold cache.

    On a GPU calls are queued behind a pause, so that it never waits for Python: what is measured is the time of its
    kernels, however small.

    Args:
        run: the call.
        device: "cuda" or "cpu".
        warm, repeat: milliseconds to spend on warming up and on measuring.
        launches: about how many kernels a call launches, so that the queue takes them all.
    """
    times = _cuda_times(run, warm, repeat, launches) if torch.device(device).type == "cuda" else _cpu_times(run, repeat)
    times = torch.tensor(sorted(times), dtype=torch.float64)
    return tuple(float(times.quantile(q)) for q in (0.5, 0.2, 0.8))


def timed(row: Row, run: Callable[[], Any], *, device: str, **options: Any) -> Row:
    """``row`` with its milliseconds; on a CPU, which is for testing this script, the call is made and not timed."""
    if torch.device(device).type == "cpu":
        run()
        return replace(row, note="run, not timed")
    ms, p20, p80 = quantiles(run, device=device, **options)
    return replace(row, ms=ms, p20=p20, p80=p80)


def ceiling_steps(*, device: str) -> list[Step]:
    """What bounds every kernel: memory, products of matrices, exponentials, float32 arithmetic."""
    cpu = torch.device(device).type == "cpu"
    makers = {"bytes": _copy, "bf16": _product, "tf32": _product, "exps": _loop, "fma": _loop}
    return [
        Step(f"ceiling {name}", _ceiling_row(name), _ceiling(name, make, device, small=cpu), seconds=30, alone=True)
        for name, make in makers.items()
    ]


def _ceiling(name: str, make: Callable[..., Any], device: str, *, small: bool) -> Callable[[], list[Row]]:
    def measure() -> list[Row]:
        run, amount = make(name, device, small)
        with gpu_ops.precision(name):
            row = timed(_ceiling_row(name), run, device=device)
        if row.ms is None:
            return [row]
        rate = amount / row.ms * 1000
        unit = {"bytes": "TB/s", "exps": "T exp/s"}.get(name, "TFLOP/s")
        return [replace(row, work={"rate": rate}, note=f"{rate / 1e12:.2f} {unit}")]

    return measure


def _ceiling_row(name: str) -> Row:
    return Row("ceiling", "ceiling", name)


def _copy(name: str, device: str, small: bool) -> tuple[Callable[[], Any], float]:
    source = torch.empty(2**16 if small else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.numel()


def _product(name: str, device: str, small: bool) -> tuple[Callable[[], Any], float]:
    size = 64 if small else 8192
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: a @ b, 2 * size**3


def _loop(name: str, device: str, small: bool) -> tuple[Callable[[], Any], float]:
    from scripts import gpu_loops as loops

    programs, steps = (2, 2) if small else (132 * 32, loops.STEPS)
    out = torch.empty(programs, device=device)
    kernel, each = (loops.exponentials, 1) if name == "exps" else (loops.multiply_adds, 8)

    def run() -> None:
        kernel[(programs,)](out, count=steps, width=loops.SIZE, num_warps=loops.WARPS)

    return run, programs * steps * loops.SIZE * each


def _cuda_times(run: Callable[[], Any], warm: float, repeat: float, launches: int) -> list[float]:
    # read before each call, not written: what is to be written back would be, during the call
    cache = torch.zeros(CACHE // 4, device="cuda")
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3):
        cache.sum()
        run()
    queued = (time.perf_counter() - begin) * 1000 / 3
    torch.cuda.synchronize()
    each = (time.perf_counter() - begin) * 1000 / 3
    for _ in range(int(warm / each)):
        run()
    count = max(5, min(int(repeat / each) + 1, 100))
    batch = max(1, min(count, QUEUE // (launches + 4)))
    times: list[float] = []
    while len(times) < count:
        times += _batch(run, cache, batch, queued)
    return times


def _batch(run: Callable[[], Any], cache: torch.Tensor, batch: int, queued: float) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(batch)]
    torch.cuda.synchronize()
    torch.cuda._sleep(int(min(1.5 * queued * batch, 100.0) * CYCLES))
    for first, last in events:
        cache.sum()
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(last) for first, last in events]


def _cpu_times(run: Callable[[], Any], repeat: float) -> list[float]:
    run()
    times, until = [], time.perf_counter() + repeat / 1000
    while not times or (time.perf_counter() < until and len(times) < 100):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1000)
    return times
