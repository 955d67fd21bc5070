"""Time, peak memory, parameters and multiplications of a network, beside an unfused baseline with the same weights.

    python -m scripts.bench_arch SSTlight --scale 2 --size 128 128 --attention_dtype bfloat16 [--train] [--profile]

The baseline is the plain way to write the network down: NCHW throughout, windows copied out and back, positional
factors computed for every call, v padded for PyTorch's fused attention, each operator by itself. Both are measured
in turn in one process, and their memory in a process each. Ratios count; milliseconds depend on the machine.
"""

import argparse
import ctypes
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from archs.sst import PRESETS, SST, Block, Layer, RIBAttention
from kernels import dispatch
from models.runtime import run
from options.errors import OptionsError


@dataclass(frozen=True)
class Job:
    """What is measured: a network's arguments, the size ``(h, w)`` of its input, and how."""

    arguments: dict[str, Any]
    scale: int
    size: tuple[int, int]
    batch: int
    attention_dtype: str
    train: bool
    device: str

    @property
    def smallest(self) -> int:
        """The smallest side that the baseline's reflection takes, which goes around once."""
        return max(self.arguments["window_sizes"]) // 2 + 1

    def network(self) -> SST:
        torch.manual_seed(0)
        net = SST(**self.arguments, upscaling_factor=self.scale, attention_dtype=self.attention_dtype)
        with torch.no_grad():
            for parameter in net.parameters():
                # fresh positions are all but zero
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        return net.to(self.device).train(self.train)

    def image(self) -> Tensor:
        return torch.rand(self.batch, 3, *self.size, generator=torch.Generator().manual_seed(1)).to(self.device)


def unfused(net: SST, x: Tensor) -> Tensor:
    """The forward pass of an SST with RIB, written down plainly; (b, c, h, w) -> (b, c, h * scale, w * scale)."""
    features = F.conv2d(x, net.proj.weight, net.proj.bias, padding=1)
    y = features
    for part in net.body:
        y = _unfused_block(part, y) if isinstance(part, Block) else _unfused_leaf(part, y)
    return net.upsampler(features + y, x)


def _unfused_block(block: Block, x: Tensor) -> Tensor:
    y = x
    for layer in block:
        if isinstance(layer, Layer):
            y = y + _unfused_attention(layer.attn, _unfused_leaf(layer.norm_attn, y))
            z = F.gelu(_conv(layer.ffn.proj, _unfused_leaf(layer.norm_ffn, y)))
            y = y + _conv(layer.ffn.agg, z + F.gelu(_conv(layer.ffn.dwc, z)))
        else:
            y = _conv(layer, y)
    return x + y


def _unfused_leaf(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.Conv2d):
        return _conv(module, x)
    # a layer norm of the channels: transposed, normalised, transposed back
    y = F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], module.weight, module.bias, module.eps)
    return y.permute(0, 3, 1, 2).contiguous()


def _conv(module: nn.Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, module.weight, module.bias, padding=module.padding, groups=module.groups)


def _unfused_attention(attn: RIBAttention, x: Tensor) -> Tensor:
    (b, c, h, w), n, heads = x.shape, attn.window, attn.heads
    gate = x
    for part in attn.gate or ():
        gate = _conv(part, gate) if isinstance(part, nn.Conv2d) else part(gate)
    padded = F.pad(x, (0, -w % n, 0, -h % n), mode="reflect")
    rows, columns, d = padded.shape[2] // n, padded.shape[3] // n, c // heads
    qkv = _conv(attn.to_qkv, padded).reshape(b, 3, heads, d, rows, n, columns, n)
    q, k, v = qkv.permute(1, 0, 4, 6, 2, 5, 7, 3).reshape(3, b * rows * columns, heads, n * n, d).unbind(0)
    q_pos, k_pos = attn.factors()
    rank, dtype = q_pos.shape[-1], attn.attention_dtype or x.dtype
    q_pos, k_pos = (f[None].expand(len(q), -1, -1, -1).to(dtype).contiguous() for f in (q_pos / math.sqrt(rank), k_pos))
    q = torch.cat([(q / math.sqrt(d)).to(dtype), q_pos], dim=-1)
    k = torch.cat([k.to(dtype), k_pos], dim=-1)
    out = F.scaled_dot_product_attention(q, k, F.pad(v.to(dtype), (0, rank)), scale=1.0)[..., :d]
    out = out.reshape(b, rows, columns, heads, n, n, d).permute(0, 3, 6, 1, 4, 2, 5)
    out = out.reshape(b, c, rows * n, columns * n)[..., :h, :w].to(x.dtype)
    return _conv(attn.to_out, out if attn.gate is None else out * gate)


VARIANTS: dict[str, Callable[[SST, Tensor], Tensor]] = {"pellucid": lambda net, x: net(x), "unfused": unfused}


def step(job: Job, net: SST, image: Tensor, variant: str) -> Tensor:
    """One forward pass or, in training, one forward and backward pass; returns the output."""
    if not job.train:
        with torch.inference_mode():
            return VARIANTS[variant](net, image)
    net.zero_grad(set_to_none=True)
    out = VARIANTS[variant](net, image)
    (out - 0.5).abs().mean().backward()
    return out.detach()


def measure_time(job: Job, repeats: int) -> dict[str, float]:
    """Variant -> smallest seconds of ``repeats`` runs, the variants taking turns after one run each to warm up."""
    net, image = job.network(), job.image()
    best = dict.fromkeys(VARIANTS, math.inf)
    for turn in range(repeats + 1):
        for variant in VARIANTS:
            began = time.perf_counter()
            step(job, net, image, variant)
            if job.device != "cpu":
                torch.cuda.synchronize()
            if turn:
                best[variant] = min(best[variant], time.perf_counter() - began)
    return best


def difference(job: Job) -> tuple[float, float]:
    """Largest and mean absolute difference of the variants' outputs."""
    net, image = job.network(), job.image()
    first, second = (step(job, net, image, variant) for variant in VARIANTS)
    error = (first - second).abs()
    return float(error.max()), float(error.mean())


def measure_memory(job: Job) -> dict[str, float]:
    """Variant -> MiB that one step takes at its peak beyond network and image; each in a fresh process.

    On a CPU it is the memory that the system counts, which needs Linux; NaN elsewhere.
    """
    if job.device == "cpu" and not sys.platform.startswith("linux"):
        return dict.fromkeys(VARIANTS, math.nan)
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for variant in VARIANTS:
        with context.Pool(1) as pool:
            peaks[variant] = pool.apply(_peak, (job, variant, torch.get_num_threads()))
    return peaks


def _peak(job: Job, variant: str, threads: int) -> float:
    torch.set_num_threads(threads)
    net, image = job.network(), job.image()
    # what a first run sets up for good, at a size that leaves little memory behind
    small = replace(job, size=(job.smallest,) * 2, batch=1)
    step(small, net, small.image(), variant)
    net.zero_grad(set_to_none=True)
    if job.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(job, net, image, variant)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    step(job, net, image, variant)
    return (_status("VmHWM") - before) / 2**10


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))


def count(job: Job) -> tuple[int, int]:
    """Parameters, and multiplications (with an addition each) of one forward pass, from shapes alone.

    Convolutions and matrix products count, pixels added to whole windows included, v unpadded, and the products of
    positions once per window.
    """
    with torch.device("meta"):
        net = SST(**job.arguments, upscaling_factor=job.scale)
        image = torch.empty(job.batch, 3, *job.size)
    with dispatch.use_backend("window_attention", "sdpa"), FlopCounterMode(display=False) as counter, torch.no_grad():
        net(image)
    return sum(p.numel() for p in net.parameters()), counter.get_total_flops() // 2


def profile(job: Job, variant: str) -> list[tuple[str, float]]:
    """(operator, milliseconds of its own) of one step on one thread, the longest first."""
    net, image = job.network(), job.image()
    # the profiler sees no other threads
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    step(job, net, image, variant)
    with torch.profiler.profile() as recorded:
        step(job, net, image, variant)
    torch.set_num_threads(threads)
    rows = [(row.key, row.self_cpu_time_total / 1e3) for row in recorded.key_averages()]
    return sorted(rows, key=lambda row: -row[1])


def parse(argv: list[str]) -> tuple[Job, argparse.Namespace]:
    """What to measure, and the rest of the command line.

    Raises:
        OptionsError: a size, count or device that cannot be measured.
    """
    parser = argparse.ArgumentParser(prog="bench_arch", description=__doc__.splitlines()[0])
    parser.add_argument("preset", choices=PRESETS, nargs="?", default="SSTlight")
    parser.add_argument("--scale", type=int, default=2, choices=(2, 3, 4))
    parser.add_argument("--size", type=int, nargs=2, default=(128, 128), metavar=("H", "W"), help="of the input")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--attention_dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--train", action="store_true", help="a forward and backward pass instead of a forward one")
    parser.add_argument("--threads", type=int, help="default: as many as PyTorch takes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--profile", action="store_true", help="also list where the time goes")
    args = parser.parse_args(argv)
    size, dtype = tuple(args.size), args.attention_dtype
    job = Job(PRESETS[args.preset], args.scale, size, args.batch, dtype, args.train, args.device)
    if min(job.size) < job.smallest or min(job.batch, args.repeats) < 1:
        text = f"--size must be at least {job.smallest} {job.smallest}, as the baseline pads by one reflection"
        raise OptionsError(f"{text}; --batch and --repeats at least 1")
    if job.device != "cpu" and not torch.cuda.is_available():
        raise OptionsError("--device cuda: CUDA is not available here")
    return job, args


def main(argv: list[str]) -> None:
    """Measure and print."""
    job, args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    parameters, products = count(job)
    largest, mean = difference(job)
    memory, seconds = measure_memory(job), measure_time(job, args.repeats)
    what = "forward and backward" if job.train else "forward"
    title = f"{args.preset} x{job.scale}, {what}, {job.batch} x {job.size[0]} x {job.size[1]}, {job.device}, "
    table = Table()
    for name in ("", "ms", "speed-up", "peak MiB", "memory ratio"):
        table.add_column(name, justify="right" if name else "left")
    for variant in VARIANTS:
        ratios = seconds["unfused"] / seconds[variant], memory[variant] / memory["unfused"]
        cells = f"{seconds[variant] * 1e3:.1f}", f"{ratios[0]:.2f}", f"{memory[variant]:.0f}", f"{ratios[1]:.2f}"
        table.add_row(variant, *cells)
    console = Console(width=120)
    console.print(title + f"{torch.get_num_threads()} threads, attention {job.attention_dtype}")
    console.print(table)
    console.print(f"{parameters:,} parameters, {products / 1e9:.1f} G multiplications a forward pass")
    console.print(f"outputs differ by at most {largest:.1e}, {mean:.1e} in the mean")
    for variant in VARIANTS if args.profile else ():
        rows = profile(job, variant)
        total = sum(row[1] for row in rows)
        console.print(
            f"{variant}, one thread: " + ", ".join(f"{key} {ms:.0f} ms ({ms / total:.0%})" for key, ms in rows[:12])
        )


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
