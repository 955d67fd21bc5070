"""Coreset attention by Triton, forward and backward.

    F = rows of the partial Cholesky factor of g, L = F at the pivots;   A = F diag(e^(s - top)) (v - mean v, 1)
    (V_S, w_S) = e^(top - s_S) L^-T A;   P = exp(beta q.k_S) / sum_S exp(beta q.k_S) w_S,   out = mean v + P V_S
    dV_S = P^T g, dw_S = -P^T d, ds = P (g V_S^T - d w_S^T), dq = beta ds k_S, dk_S = beta ds^T q;   dv = W^T dV_S

where d = sum(g P V_S). Pivots, W and temperature are constants of the backward pass, as in plain PyTorch, which makes
the means and ranges here too. The kernels are in ``fused_choose.py`` (one program for each bin of each head) and
``fused_attend.py`` (one for each block of queries). A bin is held in registers where its factor has at most 4,096
numbers and its keys 16,384; else F lies in memory and blocks of 128 or 256 keys are streamed, which is what the
registers hold. Nothing is added atomically: the same input gives the same bits.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels import launch
from kernels.coreset_attention import fused_attend, fused_choose, torch_impl
from kernels.coreset_attention import fused_layout as layout
from kernels.coreset_attention.limits import whole
from kernels.coreset_attention.torch_impl import CANCELLED, LARGEST_EXPONENT, Compressed, Settings
from kernels.triton_parts import triton

OP = "coreset_attention"
# the sums over queries are split so that this many programs share them
PROGRAMS = 1056


def compress(
    k: Tensor, v: Tensor, query_radius: Tensor | None, mask: Tensor | None, noise: Tensor | None, settings: Settings
) -> Compressed:
    """The ``triton`` backend of :func:`kernels.coreset_attention.torch_impl.compress`; the same keys by the same noise.

    With a slot for every key nothing is chosen, and the plain one is called.
    """
    if settings.exact:
        return torch_impl.compress(k, v, query_radius, mask, noise, settings)
    dtype = torch.promote_types(torch.promote_types(k.dtype, v.dtype), torch.float32)
    if mask is not None:
        # what is not there may be anything, NaN included
        k, v = (x.masked_fill(~mask[..., None], 0) for x in (k, v))
    with torch.no_grad():
        count = k.shape[2] if mask is None else mask.sum(dim=-1)
        over = count if mask is None else count.clamp(min=1)[..., None]
        key_mean, value_mean = ((x.sum(dim=2, dtype=dtype) / over).contiguous() for x in (k, v))
        if not settings.recentre:
            key_mean = torch.zeros_like(key_mean)
        lower, upper = (x.to(dtype) for x in torch_impl.value_range(v, mask))
        if query_radius is None:
            query_radius = _key_radius(k, key_mean, mask)
    bins = settings.bins
    keys, values, weights, pivots, gamma, tau, *_ = choose(
        k,
        v,
        key_mean,
        value_mean,
        query_radius.to(dtype).contiguous(),
        mask,
        None if mask is None else count,
        noise,
        [*bins.grid, *bins.tiles],
        settings.slots,
        settings.beta,
        settings.tau_mult,
        settings.sampler == "uniform",
        _learns(k, v),
    )
    gauges = (lower, upper, gamma.detach(), tau.detach())
    means = (key_mean[:, :, None], value_mean[:, :, None])
    return Compressed(keys, values, weights.detach(), *gauges, pivots, *means)


def attend(q: Tensor, coreset: Compressed, beta: float) -> Tensor:
    """The ``triton`` backend of :func:`kernels.coreset_attention.torch_impl.attend`."""
    dtype = torch.promote_types(q.dtype, coreset.values.dtype)
    keys, values, weights = (x.to(dtype) for x in (coreset.keys, coreset.values, coreset.weights))
    if q.dtype == torch.float16:
        # one number per head that cancels, so that products stay in range
        largest = weights.detach().abs().amax(dim=-1, keepdim=True)
        largest = largest.where(largest > 0, 1)
        weights, values = weights / largest, values / largest[..., None]
    bounds = (x.detach().to(dtype).contiguous() for x in (coreset.value_mean[:, :, 0], coreset.lower, coreset.upper))
    tensors = (q, *(x.contiguous() for x in (keys, values, weights)))
    return attend_forward(*tensors, *bounds, beta, _learns(*tensors))[0]


@torch.library.custom_op("pellucid::coreset_choose", mutates_args=())
def choose(
    k: Tensor,
    v: Tensor,
    key_mean: Tensor,
    value_mean: Tensor,
    radius: Tensor,
    mask: Tensor | None,
    count: Tensor | None,
    noise: Tensor | None,
    grid: list[int],
    slots: int,
    beta: float,
    tau_mult: float,
    uniform: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, weights, pivots, gamma and tau of a coreset, and, to ``keep`` for the backward pass, what brings
    the sums to scale, the weighted factor and L.

    ``grid`` is (h, w, tiles down, tiles across); means are (b, heads, d), the radius of the queries is (b, heads).
    """
    found = layout.allocate(k, v, radius, grid, slots, keep)
    _, values, weights, pivots, _, tau, back, rows, lower = found
    lines = radius.numel()
    if not lines:
        return found
    shape = _Shape(k, v, radius, grid, slots)
    lengths = torch.empty(tau.shape, dtype=radius.dtype, device=k.device)
    state = torch.empty((*tau.shape, 0 if shape.held else 2, shape.width), dtype=radius.dtype, device=k.device)
    if not shape.held and not keep:
        rows = torch.empty((*tau.shape, slots, shape.width), dtype=radius.dtype, device=k.device)
    info = torch.finfo(radius.dtype)
    seen, chance = (None if mask is None else mask.view(torch.uint8)), (None if noise is None else noise.contiguous())
    kernel = fused_choose.choose_held if shape.held else fused_choose.choose_streamed
    # Triton launches on the current device, which may be another one
    with torch.cuda.device_of(k):
        kernel[(lines * shape.bins,)](
            k, v, key_mean, value_mean, radius, k if mask is None else seen, k if noise is None else chance,
            pivots, values, weights, back, lengths, tau, rows, lower, state, *shape.place, *k.stride(), *v.stride(),
            *((0, 0, 0) if mask is None else mask.stride()),
            0 if noise is None or noise.shape[0] == 1 else chance.stride(0),
            BETA=beta, ROOT_BETA=beta**0.5, TAU_MULT=tau_mult, EPS=info.eps, LOW=info.tiny, HIGH=1 - info.eps / 2,
            UNIFORM=uniform, HAS_NOISE=noise is not None, HAS_MASK=mask is not None, KEEP=keep,
            **shape.constants, **shape.settings("choose_held" if shape.held else "choose_streamed"),
        )  # fmt: skip
        _finish(k, key_mean, radius, count, lengths, found, shape, beta)
    return found


@torch.library.custom_op("pellucid::coreset_spread", mutates_args=())
def spread(
    d_keys: Tensor,
    d_values: Tensor,
    k: Tensor,
    v: Tensor,
    pivots: Tensor,
    back: Tensor,
    rows: Tensor,
    lower: Tensor,
    grid: list[int],
    slots: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of k and v by those of the keys and values of the coreset."""
    dk, dv = layout.empty_like(k, k.shape[3], k.dtype), layout.empty_like(v, v.shape[3], v.dtype)
    if not back.numel():
        return dk, dv
    shape = _Shape(k, v, back, grid, slots)
    constants = shape.constants | shape.settings("spread")
    with torch.cuda.device_of(k):
        fused_choose.spread[(k.shape[0] * k.shape[1] * shape.bins,)](
            d_keys.contiguous(), d_values.contiguous(), pivots, back, rows, lower, dk, dv, *shape.place, *dk.stride(),
            *dv.stride(), **constants,
        )  # fmt: skip
    return dk, dv


@torch.library.custom_op("pellucid::coreset_attend", mutates_args=())
def attend_forward(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Tensor,
    mean: Tensor,
    lower: Tensor,
    upper: Tensor,
    beta: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result (b, m_heads, m, dv); to ``keep`` for the backward pass, it less the mean, log2 of the denominators.

    The coreset, (b, heads, r, ...), and ``mean``, ``lower`` and ``upper``, (b, heads, dv), are contiguous and of one
    dtype, that of the sums.
    """
    out, centred, lse = layout.allocate_attend(q, values, keep)
    if out.numel():
        constants, settings = _attend_constants("attend", q, keys, values, beta)
        dtype = q.dtype if q.element_size() == 2 else values.dtype
        blocks = triton.cdiv(q.shape[2], settings["BLOCK_M"])
        with torch.cuda.device_of(q):
            fused_attend.forward[(q.shape[0] * q.shape[1] * blocks,)](
                q, keys, values, weights, mean, lower, upper, out, centred, lse, q.shape[2], keys.shape[2],
                *q.stride(), *out.stride(), LOST=CANCELLED * torch.finfo(dtype).eps, KEEP=keep, **constants, **settings,
            )  # fmt: skip
    return out, centred, lse


@torch.library.custom_op("pellucid::coreset_attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Tensor,
    mean: Tensor,
    lower: Tensor,
    upper: Tensor,
    centred: Tensor,
    lse: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, and of the keys, values and weights of the coreset."""
    dq, grad = layout.empty_like(q, q.shape[3], q.dtype), layout.close(grad)
    sums = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (keys, values, weights)]
    if not centred.numel():
        return dq, *(x.zero_() for x in sums)
    m, r, lines = q.shape[2], keys.shape[2], keys.shape[0] * keys.shape[1]
    delta = torch.empty(lse.shape, dtype=lse.dtype, device=q.device)
    given = (q, keys, values, weights, mean, lower, upper, centred, lse, grad)
    constants, settings = _attend_constants("attend_queries", q, keys, values, beta)
    with torch.cuda.device_of(q):
        fused_attend.backward_queries[(q.shape[0] * q.shape[1] * triton.cdiv(m, settings["BLOCK_M"]),)](
            *given, dq, delta, m, r, *q.stride(), *grad.stride(), *dq.stride(), BETA=beta, **constants, **settings
        )
    constants, settings = _attend_constants("attend_keys", q, keys, values, beta)
    blocks = triton.cdiv(m, settings["BLOCK_M"]) * (q.shape[1] // keys.shape[1])
    parts = lines * triton.cdiv(r, settings["BLOCK_N"])
    splits = max(1, min(blocks, PROGRAMS // parts))
    partial = sums
    if splits > 1:
        partial = [torch.empty((splits, *x.shape), dtype=x.dtype, device=x.device) for x in sums]
    with torch.cuda.device_of(q):
        fused_attend.backward_keys[(parts * splits,)](
            *given, delta, *partial, m, r, lines, splits, *q.stride(), *grad.stride(), BETA=beta, **constants,
            **settings,
        )  # fmt: skip
    return dq, *(partial if splits == 1 else (x.sum(dim=0) for x in partial))


@choose.register_fake
def _(k, v, key_mean, value_mean, radius, mask, count, noise, grid, slots, beta, tau_mult, uniform, keep):
    return layout.allocate(k, v, radius, grid, slots, keep)


@spread.register_fake
def _(d_keys, d_values, k, v, pivots, back, rows, lower, grid, slots):
    return layout.empty_like(k, k.shape[3], k.dtype), layout.empty_like(v, v.shape[3], v.dtype)


@attend_forward.register_fake
def _(q, keys, values, weights, mean, lower, upper, beta, keep):
    return layout.allocate_attend(q, values, keep)


@attend_backward.register_fake
def _(grad, q, keys, values, weights, mean, lower, upper, centred, lse, beta):
    sums = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (keys, values, weights))
    return layout.empty_like(q, q.shape[3], q.dtype), *sums


def _setup_choose(ctx: Any, inputs: tuple, output: tuple) -> None:
    k, v, *_ = inputs
    _, _, _, pivots, _, _, back, rows, lower = output
    ctx.grid, ctx.slots, ctx.inputs = inputs[8], inputs[9], len(inputs)
    ctx.save_for_backward(k, v, pivots, back, rows, lower)
    ctx.set_materialize_grads(False)


def _spread(ctx: Any, d_keys: Tensor | None, d_values: Tensor | None, *constant: Tensor | None) -> tuple:
    k, v, pivots, back, rows, lower = ctx.saved_tensors
    if d_keys is None and d_values is None:
        return (None,) * ctx.inputs
    slots = back.new_zeros(pivots.shape)[..., None]
    d_keys = slots.expand(*pivots.shape, k.shape[3]) if d_keys is None else d_keys
    d_values = slots.expand(*pivots.shape, v.shape[3]) if d_values is None else d_values
    dk, dv = spread(d_keys, d_values, k, v, pivots, back, rows, lower, ctx.grid, ctx.slots)
    return dk, dv, *(None for _ in range(ctx.inputs - 2))


def _setup_attend(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.beta, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _attend_gradients(ctx: Any, grad: Tensor | None, *kept: Tensor | None) -> tuple:
    if grad is None:
        return (None,) * 9
    return *attend_backward(grad, *ctx.saved_tensors, ctx.beta), None, None, None, None, None


def _refused(ctx: Any, *gradients: Tensor) -> None:
    raise RuntimeError(f"{OP} by triton has no second derivative (create_graph=True); take backend='reference'")


choose.register_autograd(_spread, setup_context=_setup_choose)
attend_forward.register_autograd(_attend_gradients, setup_context=_setup_attend)
spread.register_autograd(_refused)
attend_backward.register_autograd(_refused)


class _Shape:
    """The bins of one call, and what the kernels that choose are compiled for."""

    def __init__(self, k: Tensor, v: Tensor, sums: Tensor, grid: list[int], slots: int) -> None:
        self.device, (h, w, down, across) = k.device, grid
        wide = -(-w // across)
        self.bins, self.width = down * across, -(-h // down) * wide
        self.place = (h, w, down, across, wide, self.width)
        d, dv = k.shape[3], v.shape[3]
        self.held = layout.is_held(self.width, slots, d)
        self.constants = layout.choose_constants(k.shape[1], d, dv, slots, sums.dtype)

    def settings(self, kernel: str) -> dict[str, Any]:
        """Warps, and the block of keys."""
        settings = launch.settings(OP, *layout.choose_keys(kernel, self.constants), device=self.device)
        return settings | ({"BLOCK": whole(self.width)} if kernel == "choose_held" else {})


def _finish(
    k: Tensor,
    key_mean: Tensor,
    radius: Tensor,
    count: Tensor | None,
    lengths: Tensor,
    found: tuple[Tensor, ...],
    shape: _Shape,
    beta: float,
) -> None:
    """Complete what the bins of each head found."""
    keys, values, weights, pivots, gamma, _, back, *_ = found
    constants = {name: value for name, value in shape.constants.items() if name not in ("R", "PRECISION")}
    r = weights.shape[2]
    fused_choose.finish[(radius.numel(),)](
        k, key_mean, radius, k if count is None else count, pivots, values, weights, back, lengths, keys, gamma,
        r, shape.bins, k.shape[2], *k.stride(), BETA=beta, LARGEST=LARGEST_EXPONENT, HAS_MASK=count is not None,
        BLOCK_ALL=triton.next_power_of_2(r), BLOCK_BINS=triton.next_power_of_2(shape.bins), num_warps=4,
        **(constants | {"BLOCK_R": 32}),
    )  # fmt: skip


def _attend_constants(
    kernel: str, q: Tensor, keys: Tensor, values: Tensor, beta: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    group, d, dv = q.shape[1] // keys.shape[1], q.shape[3], values.shape[3]
    constants = layout.attend_constants(q.shape[1], group, d, dv, q.dtype, values.dtype, beta)
    return constants, launch.settings(OP, *layout.attend_keys(kernel, constants), device=q.device)


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _key_radius(k: Tensor, mean: Tensor, mask: Tensor | None) -> Tensor:
    """The largest length of the keys less their mean, (b, heads)."""
    squares = (k - mean[:, :, None]).square().sum(dim=-1)
    return (squares if mask is None else squares.masked_fill(~mask, 0)).amax(dim=-1).sqrt()


def aot_cases() -> Iterator[launch.AotCase]:
    """Every way in which the kernels are compiled for the published networks."""
    from kernels.coreset_attention import fused_aot

    return fused_aot.aot_cases()
