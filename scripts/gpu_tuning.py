"""Milliseconds of each shipped setting, and of a few others: what ``kernels/configs/<gpu>.json`` could say.

A setting is known by the key under which ``kernels.launch.settings`` found it. While a call runs, that function is
replaced by one that remembers what was asked for, and that can answer with another setting.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels import launch
from scripts import gpu_bench, gpu_ops
from scripts.gpu_bench import Run
from scripts.gpu_checks import relative_error
from scripts.gpu_crew import Step
from scripts.gpu_ops import Op
from scripts.gpu_rows import OWN, Row
from scripts.gpu_timer import quantiles

# seconds that the alternatives of one run may take; each is compiled first
PATIENCE = 25.0
# faster by less than this is noise
GAIN = 0.97
# keys that do not begin with the name of their kernel
KERNELS = {"attend": "forward", "attend_queries": "backward_queries", "attend_keys": "backward_keys"}
# runs whose settings are varied, from the most important one on
VARIED = 8

Setting = dict[str, Any]


@dataclass
class Recorder:
    """What was asked of ``launch.settings`` by (operator, key), and what to answer instead."""

    found: dict[tuple[str, str], Setting] = field(default_factory=dict)
    instead: dict[tuple[str, str], Setting] = field(default_factory=dict)


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Within the block, ``recorder`` sees and answers."""
    before = launch.settings

    def settings(op: str, *keys: str, **where: Any) -> Setting:
        setting = before(op, *keys, **where)
        key = key_of(op, keys, setting)
        recorder.found[op, key] = setting
        return dict(recorder.instead.get((op, key), setting))

    launch.settings = settings
    try:
        yield recorder
    finally:
        launch.settings = before


def key_of(op: str, keys: tuple[str, ...], setting: Setting) -> str:
    """The key that ``setting`` was found under."""
    names = [path.stem for path in launch.CONFIGS.glob("*.json")]
    for key in keys:
        for name in names:
            known = launch.configuration(name).get(op, {}).get(key)
            if known is not None and {k: v for k, v in known.items() if k not in launch.RECORD} == setting:
                return key
    raise KeyError(f"no file has this setting of {op} under {' or '.join(keys)}: {setting}")


def alternatives(setting: Setting) -> list[Setting]:
    """Neighbours: half and twice the warps and each block, one stage more and one less."""
    found = []
    for key, value in setting.items():
        limits = _limits(key)
        if limits:
            choices = (value + 1, value - 1) if key == "num_stages" else (2 * value, value // 2)
            found += [{**setting, key: choice} for choice in choices if limits[0] <= choice <= limits[1]]
    return found


def _limits(key: str) -> tuple[int, int] | None:
    """Least and largest value to try, or None for what is not varied."""
    if key.startswith("BLOCK") or key in ("PIXELS", "entries"):
        return 16, 2**13
    return {"num_warps": (1, 16), "num_stages": (1, 5), "TH": (2, 16), "TW": (2, 16)}.get(key)


def steps(ops: list[Op], *, device: str, tiny: bool, seed: int) -> list[Step]:
    """Time the shipped settings of every run, then vary those of the most important ones."""
    runs = [run for run in gpu_bench.runs(tiny) if run.op in ops]
    found = []
    for run in runs:
        found.append(_step(run, "shipped", lambda run=run: [shipped(run, device=device, seed=seed)]))
    # an interpreter has neither warps nor stages
    for run in [] if tiny else runs[:VARIED]:
        found.append(_step(run, "varied", lambda run=run: [varied(run, device=device, seed=seed)]))
    return found


def shipped(run: Run, *, device: str, seed: int) -> Row:
    """Milliseconds of each kernel of a run, by key."""
    with gpu_ops.precision(run.kind), recording(Recorder()) as recorder:
        call = gpu_bench.prepared(run, gpu_bench.OURS[run.op.name], device, seed)
        recorder.found.clear()
        call()
        times = kernel_times(call, device=device)
    details = [
        {"op": op, "key": key, "setting": setting, "ms": time_of(key, times)}
        for (op, key), setting in recorder.found.items()
    ]
    return replace(_row(run, "shipped"), note=f"{len(details)} settings", details={"settings": details})


def varied(run: Run, *, device: str, seed: int) -> Row:
    """The best neighbour of each setting, if it is faster than the shipped one and computes the same."""
    until = time.monotonic() + PATIENCE
    details, tried = [], 0
    with gpu_ops.precision(run.kind), recording(Recorder()) as recorder:
        call = gpu_bench.prepared(run, gpu_bench.OURS[run.op.name], device, seed)
        recorder.found.clear()
        right, base = _tensors(call()), _ms(call, device)
        limit = 2 * run.op.tolerance(run.kind)
        for (op, key), setting in dict(recorder.found).items():
            for other in alternatives(setting):
                if time.monotonic() > until:
                    break
                recorder.instead = {(op, key): other}
                tried += 1
                # what does not compile or fit is no candidate
                with contextlib.suppress(Exception):
                    if max(map(relative_error, _tensors(call()), right)) <= limit:
                        ms = _ms(call, device)
                        own = time_of(key, kernel_times(call, device=device))
                        details.append({"op": op, "key": key, "setting": other, "ms": own, "gain": ms / base})
        recorder.instead = {}
    better = [one for one in details if one["gain"] < GAIN]
    note = f"{tried} alternatives, {len(better)} faster"
    return replace(_row(run, "varied"), note=note, details={"settings": better, "all": details})


def kernel_times(call: Callable[[], Any], *, device: str, repeats: int = 5) -> dict[str, float]:
    """Milliseconds of one launch of each kernel, by its name; empty on a CPU."""
    if torch.device(device).type != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return {event.key: event.self_device_time_total / event.count / 1000 for event in profile.key_averages()}


def time_of(key: str, times: dict[str, float]) -> float | None:
    """Milliseconds of the kernel that the first part of ``key`` names."""
    name = key.split("/")[0]
    name = KERNELS.get(name, name)
    found = [ms for kernel, ms in times.items() if kernel.strip("_") == name]
    return round(found[0], 5) if found else None


def proposal(rows: Iterable[Row], *, gpu: str, triton: str) -> dict[str, Any]:
    """A file for ``kernels/configs``: what was measured first for a key, or the best of what was faster.

    Args:
        rows: of all stages.
        gpu: name of the device. triton: version that the settings were measured with.
    """
    settings: dict[str, dict[str, Setting]] = {}
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        for one in row.details.get("settings", ()) if row.stage == "tune" else ():
            op, key, gain = one["op"], one["key"], one.get("gain", 1.0)
            if gain < best.get((op, key), 1.01):
                best[op, key] = gain
                note = {"note": f"{gain:.2f} times the shipped setting's ms"} if gain < 1 else {}
                settings.setdefault(op, {})[key] = {**one["setting"], "triton": triton, "ms": one["ms"], **note}
    return {"gpu": gpu, "settings": settings}


def _ms(call: Callable[[], Any], device: str) -> float:
    return quantiles(call, device=device, warm=1.0, repeat=8.0)[0]


def _tensors(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _step(run: Run, kind: str, measure: Callable[[], list[Row]]) -> Step:
    return Step(f"{kind} {run.name}", _row(run, kind), measure, seconds=60, alone=True)


def _row(run: Run, kind: str) -> Row:
    return Row("tune", run.op.short, run.case.name, run.kind, run.what, f"{OWN} {kind}"[:18])
