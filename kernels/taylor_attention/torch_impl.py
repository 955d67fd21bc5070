"""T-MSA by plain PyTorch: one product for numerator and denominator, a backward pass that keeps q, k, v and d x d sums.

With q^ and k^ the scaled vectors, W = [k^ v^T | sum k^] is (d, d + 1), and [numerator; denominator] = W^T q^ + const:
the denominator is computed once, not once for each of the d channels. Backward, with Z = [a; b] the gradients by
these two,

    dq^ = W Z    dW = q^ Z^T    dk^ = dW[:, :d] v + dW[:, d]    dv = dW[:, :d]^T k^ + sum a

and the second term of V2 (the "focused" one) is the same once more. All sums are kept in float32 at least, since the
output differs from the mean of v in its third digit.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.exported import is_exported
from kernels.taylor_attention import open_sizes
from kernels.taylor_attention.parts import taylor_map, taylor_sums, units


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
    """The ``torch`` backend: (b, heads, d, n) -> (b, heads, d, n)."""
    if is_exported(q, k, v, temperature, gate, focus_weight):
        factors = (temperature, gate, focus_weight)
        settings = {"norm": norm, "eps": eps, "gate_mode": gate_mode, "focus_power": focus_power}
        return open_sizes.taylor_attention(q, k, v, *factors, **settings)
    if torch.compiler.is_compiling():
        # it traces plain operators in half the time, and decides itself what to keep for the backward pass
        wide = [None if x is None else _widened(v.dtype, x)[0] for x in (q, k, v, temperature, gate, focus_weight)]
        queries, keys = (units(x, norm=norm, eps=eps, focus_power=focus_power) for x in wide[:2])
        factors = {"temperature": wide[3], "gate": wide[4], "gate_mode": gate_mode, "focus_weight": wide[5]}
        return taylor_map(queries, taylor_sums(keys, wide[2]), eps=eps, **factors).to(v.dtype)
    settings = _Settings(norm, eps, gate_mode, focus_power)
    return _TaylorAttention.apply(q, k, v, temperature, gate, focus_weight, settings)


class _Settings:
    """What is no tensor: the length, the eps, how the gate acts, and the powers of the terms."""

    def __init__(self, norm: float, eps: float, gate_mode: str, focus_power: int | None) -> None:
        self.norm, self.eps, self.multiplies = norm, eps, gate_mode == "multiply"
        self.powers = (1,) if focus_power is None else (1, focus_power)


class _TaylorAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        temperature: Tensor | None,
        gate: Tensor | None,
        focus_weight: Tensor | None,
        settings: _Settings,
    ) -> Tensor:
        wide = _widened(v.dtype, q, k, v)
        sums = _sums(wide[1], wide[2], settings)
        y, _ = _quotient(wide[0], sums, focus_weight, v.shape[-1], settings)
        ctx.save_for_backward(q, k, v, temperature, gate, focus_weight, *sums)
        ctx.settings = settings
        if temperature is not None:
            y = y * temperature.to(y.dtype)[:, None, None]
        if gate is not None:
            factor = gate.to(y.dtype)[:, :, None]
            y = y * factor if settings.multiplies else y + factor
        return y.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "taylor_attention by torch has no second derivative (create_graph=True); take backend='reference'"
            )
        q, k, v, temperature, gate, focus_weight, *sums = ctx.saved_tensors
        settings = ctx.settings
        wide_q, wide_k, wide_v, grad = _widened(v.dtype, q, k, v, grad)
        y, denominator = _quotient(wide_q, sums, focus_weight, v.shape[-1], settings)
        d_temperature, d_gate, upstream = _factors_backward(grad, y, temperature, gate, settings)
        upstream = upstream / denominator
        z = torch.cat([upstream, -(upstream * y).sum(dim=-2, keepdim=True)], dim=-2)
        dq, dk, dv = torch.zeros_like(wide_q), torch.zeros_like(wide_k), upstream.sum(dim=-1, keepdim=True)
        d_focus = None
        d = v.shape[-2]
        for power, w in zip(settings.powers, sums[1:], strict=True):
            weight = focus_weight.to(w.dtype)[:, None, None] if power > 1 else 1
            units_q, units_k = (_Unit(x, power, settings) for x in (wide_q, wide_k))
            dw = units_q.value @ z.mT
            if power > 1:
                d_focus = (w * dw).sum(dim=(0, 2, 3))
            dw = dw * weight
            dq += units_q.backward(weight * (w @ z))
            dk += units_k.backward(dw[..., :d] @ wide_v + dw[..., d:])
            dv = dv + dw[..., :d].mT @ units_k.value
        gradients = (dq, dk, dv, d_temperature, d_gate, d_focus)
        inputs = (q, k, v, temperature, gate, focus_weight)
        return *(None if x is None else g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True)), None


class _Unit:
    """Vectors of each pixel, x or a power of its positive part, scaled to a length; and the way back."""

    def __init__(self, x: Tensor, power: int, settings: _Settings) -> None:
        self.power, self.norm = power, settings.norm
        eps = settings.eps
        if power > 1:
            # over its largest entry, or high powers overflow; the eps, which decides on faint pixels, with it
            positive = x.relu()
            self.top = positive.amax(dim=-2, keepdim=True)
            self.top = torch.where(self.top > 0, self.top, 1)
            self.positive = positive / self.top
            x = self.positive**power
            eps = eps * self.top**-power
        self.vector = x
        self.length = x.square().sum(dim=-2, keepdim=True).sqrt()
        self.scale = 1 / (self.length / settings.norm + eps)
        self.value = x * self.scale

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient by x."""
        along = (self.value * grad).sum(dim=-2, keepdim=True)
        # a zero vector has no direction
        along = torch.where(self.length > 0, along / (self.norm * self.length), 0)
        grad = (grad - self.vector * along) * self.scale
        if self.power > 1:
            grad = grad * self.power * self.positive ** (self.power - 1) / self.top
        return grad


def _sums(k: Tensor, v: Tensor, settings: _Settings) -> tuple[Tensor, ...]:
    """The sum of v, (b, heads, d, 1), and [k^ v^T | sum k^], (b, heads, d, d + 1), of each term."""
    sums = [v.sum(dim=-1, keepdim=True)]
    for power in settings.powers:
        units = _Unit(k, power, settings).value
        sums.append(torch.cat([units @ v.mT, units.sum(dim=-1, keepdim=True)], dim=-1))
    return tuple(sums)


def _quotient(
    q: Tensor, sums: tuple[Tensor, ...], focus_weight: Tensor | None, pixels: int, settings: _Settings
) -> tuple[Tensor, Tensor]:
    """The attention before temperature and gate, (b, heads, d, n), and its denominator, (b, heads, 1, n)."""
    base, *products = sums
    both = torch.cat([base, torch.full_like(base[..., :1, :], pixels + settings.eps)], dim=-2)
    for power, w in zip(settings.powers, products, strict=True):
        weight = focus_weight.to(w.dtype)[:, None, None] if power > 1 else 1
        both = both + (weight * w).mT @ _Unit(q, power, settings).value
    return both[..., :-1, :] / both[..., -1:, :], both[..., -1:, :]


def _factors_backward(
    grad: Tensor, y: Tensor, temperature: Tensor | None, gate: Tensor | None, settings: _Settings
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Gradients by temperature, gate and y."""
    dtype = y.dtype
    warm = 1 if temperature is None else temperature.to(dtype)[:, None, None]
    open_ = 1 if gate is None or not settings.multiplies else gate.to(dtype)[:, :, None]
    product = (grad * y).sum(dim=-2, keepdim=True)
    d_temperature = None if temperature is None else (product * open_).sum(dim=(0, 2, 3))
    d_gate = None
    if gate is not None:
        d_gate = ((product * warm) if settings.multiplies else grad.sum(dim=-2, keepdim=True)).squeeze(-2)
    return d_temperature, d_gate, grad * warm * open_


def _widened(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(dtype, torch.float32)) for x in tensors]
