"""Timings beside the peers at the shapes of the networks, and the marks that they must reach.

Every backend of every run is a step of its own, ordered by importance, so that a run which is cut short is of use.
Backward is timed by itself: the gradients of a graph that is kept.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels import coreset_attention
from scripts import gpu_ops, gpu_peers
from scripts.gpu_crew import Step
from scripts.gpu_ops import CORESET, DEFORM, NORM, TAYLOR, WINDOW, CoresetCase, NormCase, Op
from scripts.gpu_ops import deform as deform_cases
from scripts.gpu_ops import taylor as taylor_cases
from scripts.gpu_ops import window as window_cases
from scripts.gpu_peers import Call
from scripts.gpu_rows import OWN, Row, best_peer
from scripts.gpu_timer import timed

Maker = Callable[[gpu_ops.Inputs], Call]


@dataclass(frozen=True)
class Run:
    """One operator, case, dtype and pass, its work and its peers by name."""

    op: Op
    case: Any
    kind: str
    what: str
    work: Callable[[Any, str, str], dict[str, float]]
    peers: dict[str, Maker] = field(default_factory=dict)
    launches: int = 10

    def row(self, backend: str) -> Row:
        """Without a result."""
        work = self.work(self.case, self.kind, self.what)
        return Row("bench", self.op.short, self.case.name, self.kind, self.what, backend, work=work)

    @property
    def name(self) -> str:
        """Of its steps, up to the backend."""
        return f"{self.op.name} {self.case.name} {self.kind} {self.what}"


def plain(op: Op, backend: str = "torch") -> Maker:
    """A backend of ours; by PyTorch."""
    return lambda arguments: lambda: op.call(arguments, backend)


def sdpa(maker: Callable[[gpu_ops.Inputs, str], Call], *names: str) -> dict[str, Maker]:
    """A maker for each of the kernels of SDPA."""
    return {name: lambda arguments, name=name: maker(arguments, name) for name in names}


OPS = (WINDOW, DEFORM, TAYLOR, CORESET, NORM)
# our kernels
OURS = {op.name: plain(op, OWN) for op in OPS}
HALF = ("sdpa-flash", "sdpa-cudnn", "sdpa-eff")
WINDOW_PEERS = sdpa(gpu_peers.window_sdpa, *HALF)
WINDOW_MORE = WINDOW_PEERS | {"flex": gpu_peers.window_flex, "flash-attn": gpu_peers.window_flash}
WINDOW_FLOAT = sdpa(gpu_peers.window_sdpa, "sdpa-eff")
DEFORM_PEERS = {"torchvision": gpu_peers.deform_torchvision, "torch": plain(DEFORM)}
TAYLOR_PEERS = {"torch": plain(TAYLOR), "eager": gpu_peers.taylor_eager, "compiled": gpu_peers.taylor_compiled}
CORESET_HALF = sdpa(gpu_peers.exact_sdpa, *HALF) | {"torch": gpu_peers.coreset_torch}
CORESET_FLOAT = sdpa(gpu_peers.exact_sdpa, "sdpa-eff")
NORM_PEERS = {"F.layer_norm": gpu_peers.norm_torch}


def runs(tiny: bool = False) -> list[Run]:
    """What is timed, most important first."""
    if tiny:
        return _tiny()
    w16, w32, w48, w64, w96, light = window_cases.PUBLISHED
    c24 = deform_cases.Case("C24 640x360", 1, 24, 360, 640)
    c48 = deform_cases.Case("C48 320x180", 1, 48, 180, 320)
    c72 = deform_cases.Case("C72 160x90", 1, 72, 90, 160)
    h1 = taylor_cases.Case("h1 d24 640x360", 1, 1, 24, 230_400)
    h2 = taylor_cases.Case("h2 d24 320x180", 1, 2, 24, 57_600)
    focused = taylor_cases.Case("h2 d24 v2", 1, 2, 24, 57_600, "v2")
    large = CoresetCase("n57600 r256", 2, 57_600, 24, 256, 16)
    middle = CoresetCase("n9216 r128", 4, 9216, 48, 128, 8)
    lines = NormCase("C192 640x360", (1, 192, 360, 640), True)
    thin = NormCase("C48 640x360", (1, 48, 360, 640), False)
    of_window = (WINDOW, gpu_ops.window_work)
    return [
        _run(*of_window, w64, "bf16", "fwd", WINDOW_MORE),
        _run(DEFORM, gpu_ops.deform_work, c24, "fp32", "fwd", DEFORM_PEERS, 40),
        _run(DEFORM, gpu_ops.deform_work, c24, "fp32", "bwd", DEFORM_PEERS, 80),
        _run(TAYLOR, gpu_ops.taylor_work, h1, "fp32", "fwd", TAYLOR_PEERS, 30),
        _run(CORESET, gpu_ops.coreset_work, large, "bf16", "fwd", CORESET_HALF, 200),
        _run(*of_window, w16, "bf16", "fwd", WINDOW_MORE),
        _run(*of_window, w64, "bf16", "bwd", WINDOW_PEERS, 20),
        _run(*of_window, w16, "bf16", "bwd", WINDOW_PEERS, 20),
        _run(CORESET, gpu_ops.coreset_work, large, "fp32", "fwd", CORESET_FLOAT, 30),
        _run(TAYLOR, gpu_ops.taylor_work, h1, "fp32", "bwd", {"torch": plain(TAYLOR)}, 40),
        _run(*of_window, w64, "tf32", "fwd", WINDOW_FLOAT),
        _run(*of_window, w32, "bf16", "fwd", WINDOW_PEERS),
        _run(*of_window, w48, "bf16", "fwd", WINDOW_PEERS),
        _run(*of_window, w96, "bf16", "fwd", WINDOW_PEERS),
        _run(*of_window, light, "bf16", "fwd", WINDOW_PEERS),
        _run(NORM, gpu_ops.norm_work, lines, "bf16", "fwd", NORM_PEERS),
        _run(NORM, gpu_ops.norm_work, thin, "fp32", "fwd", NORM_PEERS),
        _run(NORM, gpu_ops.norm_work, lines, "bf16", "bwd", NORM_PEERS, 20),
        _run(DEFORM, gpu_ops.deform_work, c48, "fp32", "fwd", DEFORM_PEERS, 60),
        _run(DEFORM, gpu_ops.deform_work, c72, "fp32", "fwd", DEFORM_PEERS, 90),
        _run(TAYLOR, gpu_ops.taylor_work, h2, "fp32", "fwd", TAYLOR_PEERS, 30),
        _run(TAYLOR, gpu_ops.taylor_work, focused, "fp32", "fwd", {"torch": plain(TAYLOR)}, 30),
        _run(*of_window, w64, "fp32", "fwd", WINDOW_FLOAT),
        _run(*of_window, w64, "tf32", "bwd", WINDOW_FLOAT, 20),
        _run(*of_window, w16, "fp32/bf16", "fwd", {}),
        _run(TAYLOR, gpu_ops.taylor_work, h1, "bf16", "fwd", {"torch": plain(TAYLOR)}, 30),
        _run(CORESET, gpu_ops.coreset_work, middle, "fp32", "fwd", CORESET_FLOAT, 30),
    ]


def steps(ops: list[Op], *, device: str, tiny: bool, seed: int) -> list[Step]:
    """One for each backend of each run, ours first; an operator without kernels of its own has none."""
    found = []
    for run in runs(tiny):
        if run.op in ops:
            found.append(_step(run, OWN, OURS[run.op.name], device, seed))
            found += [_step(run, name, maker, device, seed) for name, maker in run.peers.items()]
    return found


def warm_steps(ops: list[Op], *, device: str, seed: int) -> list[Step]:
    """Call once, beside others, what compiles: the caches on disk are full when the timings begin."""
    found = []
    for run in runs():
        if run.op in ops:
            compiles = {name: run.peers[name] for name in ("flex", "compiled") if name in run.peers}
            for backend, maker in ({OWN: OURS[run.op.name]} | compiles).items():
                found.append(_step(run, backend, maker, device, seed, warm=True))
    return found


def marks(rows: list[Row]) -> list[Row]:
    """What the timings must reach, as checks; None where something was not measured.

    Args:
        rows: finished ones; see :func:`scripts.gpu_rows.finish`.
    """
    found = []
    for row in rows:
        if row.stage == "bench" and row.backend == OWN:
            for text, value, least in _marks_of(row, rows):
                state = None if value is None else value >= least
                note = f"{text}: {'skipped, not measured' if value is None else f'{value:.3g}'}"
                found.append(replace(Row("mark", *row.run, "mark"), ok=state, note=note, details={"least": least}))
    return found


def _marks_of(row: Row, rows: list[Row]) -> list[tuple[str, float | None, float]]:
    """What is asked of one timing: in words, what was measured, and the least that it may be."""

    def times(*peers: str) -> float | None:
        best = best_peer(rows, row, peers)
        return best / row.ms if row.ms and best else None

    rate = row.work.get("pairs", 0) / row.ms / 1e9 if row.ms else None
    of_floor = row.floor_ms / row.ms if row.ms and row.floor_ms else None
    key = (row.op, row.shape, row.dtype, row.what)
    if key == ("window", "SST-L w64", "bf16", "fwd"):
        return [("T logits/s, least 1.7", rate, 1.7), ("times best SDPA, least 1.0", times("sdpa"), 1.0)]
    if key == ("window", "SST-L w16", "bf16", "fwd"):
        return [("share of the floor, least 0.4", of_floor, 0.4), ("times best SDPA, least 0.9", times("sdpa"), 0.9)]
    if key[0] == "window" and key[2:] == ("bf16", "fwd") and row.shape.startswith("SST-L"):
        return [("T logits/s, least 1.7", rate, 1.7), ("times best SDPA, least 0.9", times("sdpa"), 0.9)]
    if key[:3] == ("deform", "C24 640x360", "fp32"):
        least = 4.0 if row.what == "fwd" else 2.0
        return [(f"times torchvision, least {least:g}", times("torchvision"), least)]
    if key == ("taylor", "h1 d24 640x360", "fp32", "fwd"):
        return [("share of the floor, least 0.5", of_floor, 0.5)]
    if key[:2] == ("wildcat", "n57600 r256"):
        return [("times exact, least 5", times("sdpa"), 5.0)]
    return []


def _run(op: Op, work: Any, case: Any, kind: str, what: str, peers: dict[str, Maker], launches: int = 10) -> Run:
    return Run(op, case, kind, what, work, peers, launches)


def _tiny() -> list[Run]:
    """One run of each operator, with every peer, so that the self-test calls them all."""
    own_sdpa = {"sdpa": lambda arguments: lambda: WINDOW.call(arguments, "sdpa")}
    peers = {
        WINDOW.name: own_sdpa | {"flash-attn": gpu_peers.window_flash},
        DEFORM.name: DEFORM_PEERS,
        TAYLOR.name: {"torch": plain(TAYLOR), "eager": gpu_peers.taylor_eager},
        CORESET.name: {"torch": gpu_peers.coreset_torch},
        NORM.name: NORM_PEERS,
    }
    work = {
        WINDOW.name: gpu_ops.window_work,
        DEFORM.name: gpu_ops.deform_work,
        TAYLOR.name: gpu_ops.taylor_work,
        CORESET.name: gpu_ops.coreset_work,
        NORM.name: gpu_ops.norm_work,
    }
    return [_run(op, work[op.name], op.tiny[0], "fp32", "bwd", peers[op.name]) for op in OPS]


def _step(run: Run, backend: str, maker: Maker, device: str, seed: int, *, warm: bool = False) -> Step:
    row = run.row(backend)

    def measure() -> list[Row]:
        try:
            with gpu_ops.precision(run.kind):
                call = prepared(run, maker, device, seed)
                if warm:
                    call()
                    return []
                return [timed(row, call, device=device, launches=run.launches)]
        except gpu_peers.Missing as error:
            return [replace(row, note=f"missing: {error}")]

    if warm:
        return Step(f"warm {run.name} {backend}", replace(row, stage="warm"), measure, seconds=60)
    return Step(f"bench {run.name} {backend}", row, measure, seconds=60, alone=True)


@functools.cache
def _inputs(op: Op, case: Any, kind: str, device: str, seed: int) -> gpu_ops.Inputs:
    """Drawn once for all that a process times: a CPU takes a second for a large image; all are 5 GB."""
    return op.inputs(case, kind, device, seed)


def prepared(run: Run, maker: Maker, device: str, seed: int) -> Call:
    """The pass of the run as a call without arguments: the output, or the gradients in the order of the inputs."""
    arguments = _inputs(run.op, run.case, run.kind, device, seed)
    if run.op is CORESET:
        # as after its one warning: a look at gamma makes a GPU wait for Python in every call
        coreset_attention._warned.add("gamma")
    if run.op is DEFORM and maker is OURS[DEFORM.name]:
        # each in its own layout: here as the networks hold their images, and the peers in NCHW
        arguments = gpu_ops.channels_last(arguments)
    if run.what == "fwd":
        call = maker(arguments)

        def forward() -> Any:
            with torch.no_grad():
                return call()

        return forward
    inputs = {key: x.detach().requires_grad_() for key, x in gpu_ops.leaves(arguments).items()}
    out = maker(arguments | inputs)()
    # laid out as the output is: that of a network comes so, and another would be copied first
    upstream = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, list(inputs.values()), upstream, retain_graph=True)
