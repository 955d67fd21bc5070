"""T-MSA by Triton, forward and backward in two passes over the pixels each.

    W = sum of [k^; 1] [v; 1]^T    [numerator; denominator] = W^T [q^; 1]    out = numerator / (denominator + eps)
    Z = [a; b], a = dy / (denominator + eps), b = -a.y    dW = sum of [q^; 1] Z^T    [dq^; .] = W Z
    [dk^; .] = dW [v; 1]    [dv; .] = dW^T [k^; 1]    dx = r dx^ - x (x.dx^) r^2 / (norm |x|)

with r = 1 / (|x| / norm + eps), and the focused term of V2 the same once more, with powers in place of x, a zero in
place of the 1, and a weight.
The ones make one matrix of all sums: a head of 24 channels fills 25 of its 32 rows. A program walks over blocks of 16
to 64 pixels of one head with the matrices in registers: larger blocks spill, since float32 needs the products of three
parts ("tf32x3"), and so do W and dW together. So the pass of dq walks over its pixels once more for dW, when they are
in the L2 cache. Programs write the sums that they found, and one sum over the programs follows: no atomics, the same
bits every time. Kept for the backward pass: q, k, v and W. Channels or pixels may lie side by side; what else comes is
copied.
"""

from typing import Any

import torch
from torch import Tensor

from kernels import launch
from kernels.taylor_attention import fused_aot
from kernels.taylor_attention.fused_layout import (
    empty,
    empty_factors,
    empty_gate,
    empty_sums,
    gate_kind,
    in_units,
    is_last,
    launched,
    walkable,
)
from kernels.taylor_attention.fused_parts import (
    both_of,
    columns,
    focused,
    matrices,
    own,
    places,
    power,
    row_of,
    store_terms,
    sums_of,
    unit_backward,
    unit_of,
)
from kernels.triton_parts import dot, operand, stored, tl, triton


@triton.jit
def _sums(
    k_ptr, v_ptr, parts_ptr, n, heads, programs, each,
    kb, kh, ks, vb, vh, vs,
    NORM: tl.constexpr, EPS: tl.constexpr, POWER: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    PIXELS: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W of the pixels of each program."""
    head, image, first = own(heads, programs, each)
    first_w, second_w = sums_of(
        k_ptr, v_ptr, None, image, head, heads, n, first, min(first + each, tl.cdiv(n, PIXELS)),
        kb, kh, ks, vb, vh, vs,
        NORM, EPS, POWER, D, ROWS, PIXELS, LAST, UNIT, ACC, PRECISION, False,
    )  # fmt: skip
    store_terms(parts_ptr, first_w, second_w, POWER, ROWS)


@triton.jit
def _apply(
    q_ptr, w_ptr, temperature_ptr, gate_ptr, weight_ptr, out_ptr, n, heads, programs, each,
    qb, qh, qs, gb, gh, gn, ob, oh, os,
    NORM: tl.constexpr, EPS: tl.constexpr, POWER: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    PIXELS: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    WARM: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """The output of the pixels of each program. GATE: 0 none, 1 multiply, 2 add."""
    head, image, first = own(heads, programs, each)
    row = tl.arange(0, ROWS)
    first_w, second_w = matrices(w_ptr, weight_ptr, image * heads + head, head, POWER, ROWS, ACC)
    first_w, second_w = tl.trans(first_w), tl.trans(second_w)
    warm = tl.load(temperature_ptr + head).to(ACC) if WARM else 1.0
    for block in range(first, min(first + each, tl.cdiv(n, PIXELS))):
        pixel = block * PIXELS + tl.arange(0, PIXELS)
        inside = (row < D)[:, None] & (pixel < n)[None, :]
        q = tl.load(q_ptr + places(image, head, row, pixel, qb, qh, qs, LAST, UNIT), mask=inside, other=0).to(ACC)
        both = both_of(q, first_w, second_w, row, NORM, EPS, POWER, D, PRECISION, ACC)
        out = both * (warm / (row_of(both, row, D) + EPS))[None, :]
        if GATE > 0:
            at = gate_ptr + image * gb + head * gh + pixel.to(tl.int64) * gn
            gate = tl.load(at, mask=pixel < n, other=0).to(ACC)[None, :]
            out = out * gate if GATE == 1 else out + gate
        at = out_ptr + places(image, head, row, pixel, ob, oh, os, LAST, UNIT)
        tl.store(at, stored(out, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_queries(
    q_ptr, w_ptr, temperature_ptr, gate_ptr, weight_ptr, grad_ptr, dq_ptr, dgate_ptr, factors_ptr, warm_ptr, parts_ptr,
    n, heads, programs, each,
    qb, qh, qs, gb, gh, gn, ob, oh, os, db, dh, ds,
    NORM: tl.constexpr, EPS: tl.constexpr, POWER: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    PIXELS: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    WARM: tl.constexpr, GATE: tl.constexpr, SUM_PIXELS: tl.constexpr,
):  # fmt: skip
    """dq and the gradient by the gate; that by the temperature and dW, of each program.

    The program walks over its blocks a second time for dW, in smaller ones, and finds them in the L2 cache, with the
    factors a / dy and b that it kept. One product serves all of the first walk: of U = W [dy; 0] comes
    dy.numerator = [q^; 1].U, and W Z = U a / dy + W[:, D] b.
    """
    head, image, first = own(heads, programs, each)
    row = tl.arange(0, ROWS)
    first_w, second_w = matrices(w_ptr, weight_ptr, image * heads + head, head, POWER, ROWS, ACC)
    first_last, second_last = columns(w_ptr, weight_ptr, image * heads + head, head, POWER, ROWS, ACC, D)
    warm = tl.load(temperature_ptr + head).to(ACC) if WARM else 1.0
    d_warm = tl.zeros((PIXELS,), ACC)
    for block in range(first, min(first + each, tl.cdiv(n, PIXELS))):
        pixel = block * PIXELS + tl.arange(0, PIXELS)
        inside = (row < D)[:, None] & (pixel < n)[None, :]
        q = tl.load(q_ptr + places(image, head, row, pixel, qb, qh, qs, LAST, UNIT), mask=inside, other=0).to(ACC)
        at = grad_ptr + places(image, head, row, pixel, ob, oh, os, LAST, UNIT)
        grad = tl.load(at, mask=inside, other=0).to(ACC)
        upstream = operand(grad, ACC)
        u = dot(operand(first_w, ACC), upstream, tl.zeros((ROWS, PIXELS), ACC), PRECISION)
        unit, r, length = unit_of(q, NORM, EPS)
        # dy and the denominator along the query, without and with the 1
        own_u, own_last = tl.sum(unit * u, axis=0), tl.sum(unit * first_last[:, None], axis=0)
        along = own_u + row_of(u, row, D)
        denominator = own_last + tl.sum(tl.where(row == D, first_last, 0), axis=0) + EPS
        if POWER > 0:
            focus_u = dot(operand(second_w, ACC), upstream, tl.zeros((ROWS, PIXELS), ACC), PRECISION)
            vector, least, positive, top = focused(q, EPS, POWER)
            focus, focus_r, focus_length = unit_of(vector, NORM, least)
            own_focus_u, own_focus_last = tl.sum(focus * focus_u, axis=0), tl.sum(focus * second_last[:, None], axis=0)
            along += own_focus_u
            denominator += own_focus_last
        # where there is no pixel, there may be nothing to divide by
        factor = 1 / tl.where(pixel < n, denominator, 1)
        along = along * factor
        scale = factor * warm
        if GATE > 0:
            at = gate_ptr + image * gb + head * gh + pixel.to(tl.int64) * gn
            gate = tl.load(at, mask=pixel < n, other=0).to(ACC)
            d_gate = along * warm if GATE == 1 else tl.sum(grad, axis=0)
            at = dgate_ptr + (image * heads + head) * n + pixel
            tl.store(at, stored(d_gate, dgate_ptr.dtype.element_ty), mask=pixel < n)
        if GATE == 1:
            scale = scale * gate
            d_warm += along * gate
        else:
            d_warm += along
        b = -along * scale
        at = factors_ptr + (image * heads + head) * 2 * n + pixel
        tl.store(at, scale, mask=pixel < n)
        tl.store(at + n, b, mask=pixel < n)
        d_unit = u * scale[None, :] + first_last[:, None] * b[None, :]
        dq = unit_backward(q, r, length, d_unit, own_u * scale + own_last * b, NORM)
        if POWER > 0:
            d_unit = focus_u * scale[None, :] + second_last[:, None] * b[None, :]
            d_vector = unit_backward(
                vector, focus_r, focus_length, d_unit, own_focus_u * scale + own_focus_last * b, NORM
            )
            dq += d_vector * power(positive, POWER - 1) * (POWER / top)[None, :]
        at = dq_ptr + places(image, head, row, pixel, db, dh, ds, LAST, UNIT)
        tl.store(at, stored(dq, dq_ptr.dtype.element_ty), mask=inside)
    tl.store(warm_ptr + tl.program_id(0), tl.sum(d_warm, axis=0))
    # the factors may have been stored by other threads than those that load them
    tl.debug_barrier()
    tl.static_assert(PIXELS % SUM_PIXELS == 0)
    smaller: tl.constexpr = PIXELS // SUM_PIXELS
    first_d, second_d = sums_of(
        q_ptr, grad_ptr, factors_ptr, image, head, heads, n,
        first * smaller, min((first + each) * smaller, tl.cdiv(n, SUM_PIXELS)),
        qb, qh, qs, ob, oh, os,
        NORM, EPS, POWER, D, ROWS, SUM_PIXELS, LAST, UNIT, ACC, PRECISION, True,
    )  # fmt: skip
    store_terms(parts_ptr, first_d, second_d, POWER, ROWS)


@triton.jit
def _backward_keys(
    k_ptr, v_ptr, dw_ptr, weight_ptr, dk_ptr, dv_ptr, n, heads, programs, each,
    kb, kh, ks, vb, vh, vs, db, dh, ds,
    NORM: tl.constexpr, EPS: tl.constexpr, POWER: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    PIXELS: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """dk and dv from dW; APART in two walks over the blocks, where the registers do not hold dW and its transpose."""
    head, image, first = own(heads, programs, each)
    row = tl.arange(0, ROWS)
    first_d, second_d = matrices(dw_ptr, weight_ptr, image * heads + head, head, POWER, ROWS, ACC)
    for block in range(first, min(first + each, tl.cdiv(n, PIXELS))):
        pixel = block * PIXELS + tl.arange(0, PIXELS)
        inside = (row < D)[:, None] & (pixel < n)[None, :]
        one = (row == D)[:, None] & (pixel < n)[None, :]
        k = tl.load(k_ptr + places(image, head, row, pixel, kb, kh, ks, LAST, UNIT), mask=inside, other=0).to(ACC)
        v = tl.load(v_ptr + places(image, head, row, pixel, vb, vh, vs, LAST, UNIT), mask=inside, other=0).to(ACC)
        v = operand(tl.where(one, 1, v), ACC)
        unit, r, length = unit_of(k, NORM, EPS)
        d_unit = dot(first_d, v, tl.zeros((ROWS, PIXELS), ACC), PRECISION)
        dk = unit_backward(k, r, length, d_unit, tl.sum(unit * d_unit, axis=0), NORM)
        if POWER > 0:
            vector, least, positive, top = focused(k, EPS, POWER)
            unit, r, length = unit_of(vector, NORM, least)
            d_unit = dot(second_d, v, tl.zeros((ROWS, PIXELS), ACC), PRECISION)
            d_vector = unit_backward(vector, r, length, d_unit, tl.sum(unit * d_unit, axis=0), NORM)
            dk += d_vector * power(positive, POWER - 1) * (POWER / top)[None, :]
        at = places(image, head, row, pixel, db, dh, ds, LAST, UNIT)
        tl.store(dk_ptr + at, stored(dk, dk_ptr.dtype.element_ty), mask=inside)
        if not APART:
            dv = both_of(k, tl.trans(first_d), tl.trans(second_d), row, NORM, EPS, POWER, D, PRECISION, ACC)
            tl.store(dv_ptr + at, stored(dv, dv_ptr.dtype.element_ty), mask=inside)
    if APART:
        # from memory again, or registers hold them meanwhile
        first_d, second_d = matrices(dw_ptr, weight_ptr, image * heads + head, head, POWER, ROWS, ACC)
        first_d, second_d = tl.trans(first_d), tl.trans(second_d)
        for block in range(first, min(first + each, tl.cdiv(n, PIXELS))):
            pixel = block * PIXELS + tl.arange(0, PIXELS)
            inside = (row < D)[:, None] & (pixel < n)[None, :]
            k = tl.load(k_ptr + places(image, head, row, pixel, kb, kh, ks, LAST, UNIT), mask=inside, other=0).to(ACC)
            dv = both_of(k, first_d, second_d, row, NORM, EPS, POWER, D, PRECISION, ACC)
            at = dv_ptr + places(image, head, row, pixel, db, dh, ds, LAST, UNIT)
            tl.store(at, stored(dv, dv_ptr.dtype.element_ty), mask=inside)


def taylor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    gate: Tensor | None,
    focus_weight: Tensor | None,
    *,
    norm: float,
    eps: float,
    gate_mode: str,
    focus_power: int | None,
) -> Tensor:
    """The ``triton`` backend: (b, heads, d, n) -> (b, heads, d, n), with d innermost in memory where v has it so."""
    # one number for each head, which the kernels take to lie side by side
    temperature, focus_weight = (None if x is None else x.contiguous() for x in (temperature, focus_weight))
    return _op(q, k, v, temperature, gate, focus_weight, norm, eps, gate_mode == "multiply", focus_power or 0)[0]


@torch.library.custom_op("pellucid::taylor_attention", mutates_args=())
def _op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    gate: Tensor | None,
    focus_weight: Tensor | None,
    norm: float,
    eps: float,
    multiplies: bool,
    power: int,
) -> tuple[Tensor, Tensor]:
    """The output, and W of each image and head, (b * heads, terms * rows * rows)."""
    out = empty(v)
    if v.shape[0] == 0:
        return out, empty_sums(v, power)
    # Triton launches on the current device, which may be another one
    with torch.cuda.device_of(v):
        q, k, v = (walkable(x, is_last(v)) for x in (q, k, v))
        grid, counts, common = launched("sums", v, norm, eps, power)
        parts = empty_sums(v, power, counts[2])
        strides, common["UNIT"] = in_units(is_last(v), k, v)
        _sums[grid](k, v, parts, *counts, *strides, **common)
        w = parts.sum(dim=1)
        grid, counts, common = launched("apply", v, norm, eps, power)
        (*of_q, ob, oh, os), common["UNIT"] = in_units(is_last(v), q, out)
        epilogue = {"WARM": temperature is not None, "GATE": gate_kind(gate, multiplies)}
        of_gate = (0, 0, 0) if gate is None else gate.stride()
        tensors = (q, w, temperature, gate, focus_weight, out)
        _apply[grid](*tensors, *counts, *of_q, *of_gate, ob, oh, os, **common, **epilogue)
    return out, w


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None) -> tuple[Tensor, ...]:
    by_head = empty_factors(v[:, :, :, :0], None)[1]
    return empty(q, v), empty(k, v), empty(v), empty_gate(v, gate), by_head


@_op.register_fake
def _(q, k, v, temperature, gate, focus_weight, norm, eps, multiplies, power):
    return empty(v), empty_sums(v, power)


@torch.library.custom_op("pellucid::taylor_attention_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    gate: Tensor | None,
    focus_weight: Tensor | None,
    w: Tensor,
    norm: float,
    eps: float,
    multiplies: bool,
    power: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, the gradient by the gate, and, of each image and head, that by the temperature and dW."""
    dq, dk, dv, d_gate, by_head = _empty_gradients(q, k, v, gate)
    if v.shape[0] == 0:
        return dq, dk, dv, d_gate, by_head, empty_sums(v, power)
    with torch.cuda.device_of(v):
        last = is_last(v)
        q, k, v, grad = (walkable(x, last) for x in (q, k, v, grad))
        grid, counts, common = launched("backward_queries", v, norm, eps, power)
        factors, by_head = empty_factors(v, counts[2])
        parts = empty_sums(v, power, counts[2])
        (*of_q, ob, oh, os, db, dh, ds), common["UNIT"] = in_units(last, q, grad, dq)
        epilogue = {"WARM": temperature is not None, "GATE": gate_kind(gate, multiplies)}
        of_gate = (0, 0, 0) if gate is None else gate.stride()
        tensors = (q, w, temperature, gate, focus_weight, grad, dq, d_gate, factors, by_head, parts)
        _backward_queries[grid](*tensors, *counts, *of_q, *of_gate, ob, oh, os, db, dh, ds, **common, **epilogue)
        dw = parts.sum(dim=1)
        grid, counts, common = launched("backward_keys", v, norm, eps, power)
        strides, common["UNIT"] = in_units(last, k, v, dk)
        _backward_keys[grid](k, v, dw, focus_weight, dk, dv, *counts, *strides, **common)
    return dq, dk, dv, d_gate, by_head.sum(dim=1), dw


@_backward_op.register_fake
def _(grad, q, k, v, temperature, gate, focus_weight, w, norm, eps, multiplies, power):
    return *_empty_gradients(q, k, v, gate), empty_sums(v, power)


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:6], output[1])
    ctx.settings = inputs[6:]


def _gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    _, _, v, temperature, gate, focus_weight, w = ctx.saved_tensors
    dq, dk, dv, d_gate, by_head, dw = _backward_op(grad, *ctx.saved_tensors, *ctx.settings)
    d_temperature = d_weight = None
    if temperature is not None:
        d_temperature = by_head.view(v.shape[:2]).sum(dim=0).to(temperature.dtype)
    if focus_weight is not None:
        second = w.shape[1] // 2
        d_weight = (w[:, second:] * dw[:, second:]).sum(dim=1).view(v.shape[:2]).sum(dim=0)
        d_weight = d_weight.to(focus_weight.dtype)
    return dq, dk, dv, d_temperature, None if gate is None else d_gate, d_weight, None, None, None, None


def _refused(ctx: Any, *gradients: Tensor) -> None:
    raise RuntimeError(
        "taylor_attention by triton has no second derivative (create_graph=True); take backend='reference'"
    )


_op.register_autograd(_gradients, setup_context=_setup)
_backward_op.register_autograd(_refused)


def aot_cases() -> list[launch.AotCase]:
    """Every shipped configuration, for the heads of the published networks."""
    kernels = {"sums": _sums, "apply": _apply}
    return fused_aot.cases(kernels | {"backward_queries": _backward_queries, "backward_keys": _backward_keys})
