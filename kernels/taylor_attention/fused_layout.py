"""Memory and launches of the kernels of T-MSA: how images lie in memory, what outputs look like, how many programs."""

import math
from typing import Any

import torch
from torch import Tensor

from kernels import launch
from kernels.triton_parts import tl, triton


def launched(kernel: str, v: Tensor, norm: float, eps: float, power: int) -> tuple[tuple[int], tuple, dict[str, Any]]:
    """The grid, the counts that a kernel takes, and what it is compiled with."""
    b, heads, d, n = v.shape
    rows = rows_of(d)
    common = launch.settings("taylor_attention", *_keys(kernel, rows, power), device=v.device)
    blocks = triton.cdiv(n, common["PIXELS"])
    each = triton.cdiv(blocks * b * heads, common.pop("programs"))
    programs = triton.cdiv(blocks, each)
    common |= {"NORM": norm, "EPS": eps, "POWER": power, "D": d, "ROWS": rows, "LAST": is_last(v)}
    common |= {"ACC": tl.float64 if v.dtype == torch.float64 else tl.float32}
    return (b * heads * programs,), (n, heads, programs, each), common


def _keys(kernel: str, rows: int, power: int) -> tuple[str, ...]:
    form = "focused" if power else "plain"
    return f"{kernel}/{form}/{rows}", f"{kernel}/{rows}"


def rows_of(d: int) -> int:
    """Rows of the matrices: the channels and the ones, and tensor cores take no fewer than 16."""
    return max(16, triton.next_power_of_2(d + 1))


def is_last(v: Tensor) -> bool:
    """Whether the d channels of a vector lie side by side."""
    return v.stride(2) == 1


def empty(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Of the shape and type of x, dense, with d innermost and then the heads where ``like`` has d innermost."""
    b, heads, d, n = x.shape
    if is_last(x if like is None else like):
        return torch.empty(b, n, heads, d, dtype=x.dtype, device=x.device).permute(0, 2, 3, 1)
    return torch.empty(b, heads, d, n, dtype=x.dtype, device=x.device)


def empty_gate(v: Tensor, gate: Tensor | None) -> Tensor:
    """Memory for the gradient of the gate, with no entries where there is none."""
    gate = v[0:0] if gate is None else gate
    return torch.empty(gate.shape, dtype=gate.dtype, device=v.device)


def empty_sums(v: Tensor, power: int, programs: int | None = None) -> Tensor:
    """Memory for the matrices of each image and head (and program)."""
    b, heads, d, _ = v.shape
    entries = rows_of(d) ** 2 * (2 if power else 1)
    return torch.empty(*_by_program(b * heads, programs), entries, dtype=_wide(v), device=v.device)


def empty_factors(v: Tensor, programs: int | None) -> tuple[Tensor, Tensor]:
    """Memory for two factors of each pixel and head, and for one number of each image and head (and program)."""
    b, heads, _, n = v.shape
    factors = torch.empty(b * heads, 2, n, dtype=_wide(v), device=v.device)
    return factors, torch.empty(_by_program(b * heads, programs), dtype=_wide(v), device=v.device)


def _by_program(pairs: int, programs: int | None) -> tuple[int, ...]:
    return (pairs,) if programs is None else (pairs, programs)


def _wide(v: Tensor) -> torch.dtype:
    return torch.promote_types(v.dtype, torch.float32)


def gate_kind(gate: Tensor | None, multiplies: bool) -> int:
    """What the kernels call GATE: 0 for none, 1 for a factor, 2 for a term."""
    return 0 if gate is None else 1 if multiplies else 2


def walkable(x: Tensor, last: bool) -> Tensor:
    """x if the vectors (or else the pixels) lie side by side; a copy otherwise."""
    if last:
        close = x.stride(2) == 1 or x.shape[2] == 1
        return x if close else x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def in_units(last: bool, *images: Tensor) -> tuple[list[int], int]:
    """From image to image, head to head and pixel to pixel (or else channel to channel), in the unit, and that.

    It is the largest power of two up to 16 that divides all of them.
    """
    strides = [s for x in images for s in (x.stride(0), x.stride(1), x.stride(3 if last else 2))]
    unit = math.gcd(16, *strides)
    return [s // unit for s in strides], unit
