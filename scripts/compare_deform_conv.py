"""The deformable convolution beside torchvision's, where that is installed: values, gradients and times.

python -m scripts.compare_deform_conv                 differences in float64; exit code 1 if one is too large
python -m scripts.compare_deform_conv --write FILE    torchvision's results of the small cases, as .npz
python -m scripts.compare_deform_conv --time          milliseconds of both, by turns
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.deform_conv import deform_depthwise_conv2d

# in float64, over the largest entry, or 1 if that is smaller
LARGEST_DIFFERENCE = 1e-13
# name: shape of x, clamp, what the offsets are
CASES: dict[str, tuple[tuple[int, int, int, int], tuple[float, float] | None, str]] = {
    "fractions": ((2, 3, 6, 7), (-3.0, 3.0), "normal"),
    "no clamp": ((1, 3, 5, 6), None, "normal"),
    "whole pixels": ((1, 2, 6, 5), None, "whole"),
    "on the bounds of the clamp": ((1, 2, 5, 5), (-2.0, 1.0), "whole"),
    "one pixel": ((1, 2, 1, 1), (-1.0, 1.0), "normal"),
}
LARGE = {
    "a large map": ((2, 24, 70, 130), (-3.0, 3.0), "normal"),
    "a large map, no clamp": ((1, 5, 140, 66), None, "far"),
}
TIMED = ((24, 256), (24, 128), (48, 256), (48, 128), (48, 64), (72, 128), (72, 64), (96, 128), (96, 64), (96, 32))


def main(argv: list[str] | None = None) -> int:
    """Compare, write or time; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", help="store torchvision's results of the small cases")
    parser.add_argument("--time", action="store_true", help="time both instead")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch; 1 unless said")
    parser.add_argument("--rounds", type=int, default=7, help="times that each is timed; the shortest counts")
    arguments = parser.parse_args(argv)
    try:
        from torchvision.ops import deform_conv2d
    # one that was built for another PyTorch fails with the second
    except (ImportError, RuntimeError) as error:
        print(f"torchvision cannot be imported: {error}\nInstall the one made for this PyTorch, {torch.__version__}")
        return 1
    torch.set_num_threads(arguments.threads)

    def theirs(x: Tensor, offset: Tensor, weight: Tensor, *, clamp: tuple[float, float] | None) -> Tensor:
        return deform_conv2d(x, clamped(offset, clamp), weight, padding=1)

    if arguments.time:
        return time_both(theirs, rounds=arguments.rounds)
    if arguments.write:
        return write(theirs, arguments.write)
    return compare(theirs)


def compare(theirs: Callable[..., Tensor]) -> int:
    """Print the largest differences of each case; 1 if one is larger than it may be."""
    wrong = 0
    for name, (shape, clamp, kind) in {**CASES, **LARGE}.items():
        inputs = make_inputs(shape, kind)
        expected = with_gradients(theirs, inputs, clamp=clamp)
        for backend in ("torch", "reference"):
            found = with_gradients(deform_depthwise_conv2d, inputs, clamp=clamp, backend=backend)
            differences = {
                key: float((found[key] - value).abs().max() / value.abs().max().clamp(min=1))
                for key, value in expected.items()
            }
            good = all(value <= LARGEST_DIFFERENCE for value in differences.values())
            wrong += not good
            text = ", ".join(f"{key} {value:.1e}" for key, value in differences.items())
            print(f"{'same' if good else 'DIFFERENT'}  {name}, {backend}: {text}")
    print(f"{wrong} of {2 * len({**CASES, **LARGE})} differ by more than {LARGEST_DIFFERENCE}")
    return 1 if wrong else 0


def write(theirs: Callable[..., Tensor], file: str) -> int:
    """Store inputs, results and gradients of the small cases."""
    arrays: dict[str, np.ndarray] = {}
    for name, (shape, clamp, kind) in CASES.items():
        inputs = make_inputs(shape, kind)
        results = with_gradients(theirs, inputs, clamp=clamp)
        stored = {**inputs, **results, "clamp": torch.tensor([] if clamp is None else clamp, dtype=torch.float64)}
        arrays |= {f"{name}/{key}": value.numpy() for key, value in stored.items()}
    np.savez_compressed(file, **arrays)
    print(f"wrote {len(CASES)} cases to {file}")
    return 0


def time_both(theirs: Callable[..., Tensor], *, rounds: int) -> int:
    """Print milliseconds, forward and forward with backward, float32, channels-last for ours."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, shortest of {rounds}; ms")
    print("channels, map | forward: torchvision, ours, ratio | with backward: torchvision, ours, ratio")
    for channels, size in TIMED:
        inputs = make_inputs((1, channels, size, size), "narrow", dtype=torch.float32)
        last = {**inputs, **{k: inputs[k].contiguous(memory_format=torch.channels_last) for k in ("x", "upstream")}}
        cells = []
        for measure in (_forward, with_gradients):
            best = [float("inf")] * 2
            for _ in range(rounds):
                for i, (op, given) in enumerate(((theirs, inputs), (deform_depthwise_conv2d, last))):
                    start = time.perf_counter()
                    measure(op, given, clamp=(-3.0, 3.0))
                    best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
            cells.append(f"{best[0]:.1f} | {best[1]:.1f} | {best[0] / best[1]:.1f}x")
        print(f"| {channels}, {size} x {size} | {cells[0]} | {cells[1]} |", flush=True)
    return 0


def clamped(offset: Tensor, clamp: tuple[float, float] | None) -> Tensor:
    """With a gradient on the bounds, as torch.clamp has it up to PyTorch 2.13."""
    if clamp is None:
        return offset
    inside = (offset >= clamp[0]) & (offset <= clamp[1])
    return torch.where(inside, offset, offset.detach().clamp(*clamp))


def make_inputs(
    shape: tuple[int, int, int, int], kind: str, *, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """x, offset, weight and a gradient to send back, by a seeded generator."""
    b, c, h, w = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    offset = draw(b, 18, h, w) * {"narrow": 1, "normal": 2, "whole": 2, "far": 30}[kind]
    if kind == "whole":
        offset = offset.round()
    return {"x": draw(b, c, h, w), "offset": offset, "weight": draw(c, 1, 3, 3), "upstream": draw(b, c, h, w)}


def with_gradients(op: Callable[..., Tensor], inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The output, and the gradients by x, offset and weight."""
    leaves = [inputs[name].detach().requires_grad_() for name in ("x", "offset", "weight")]
    out = op(*leaves, **options)
    gradients = torch.autograd.grad(out, leaves, inputs["upstream"])
    return dict(zip(("out", "d_x", "d_offset", "d_weight"), (out.detach(), *gradients), strict=True))


@torch.no_grad()
def _forward(op: Callable[..., Tensor], inputs: dict[str, Tensor], **options: Any) -> Tensor:
    return op(inputs["x"], inputs["offset"], inputs["weight"], **options)


if __name__ == "__main__":
    sys.exit(main())
