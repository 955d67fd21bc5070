"""Coreset attention, defined in plain PyTorch, float64, one bin after the other: short, without tricks.

g(x, y) = exp(x.y - |x|^2/2 - |y|^2/2)   for keys less their mean, times sqrt(beta) / tau
W       = g(S, S)^-1 g(S, all)           where S are the chosen keys
V_S, w  = sum_l W[S, l] exp(s_l - s_S) (v_l, 1)   with s = |x|^2 / 2
out     = sum_S exp(beta q.k_S) V_S / sum_S exp(beta q.k_S) w_S, within the range of the values
"""

import torch
from torch import Tensor

from kernels.coreset_attention.pivots import EXHAUSTED
from kernels.coreset_attention.temperature import gauge, multiplier
from kernels.coreset_attention.torch_impl import CANCELLED, LARGEST_EXPONENT, Compressed, Settings


def compress(
    k: Tensor, v: Tensor, query_radius: Tensor | None, mask: Tensor | None, noise: Tensor | None, settings: Settings
) -> Compressed:
    """As :func:`kernels.coreset_attention.torch_impl.compress`, without gradients of the choice."""
    b, heads, n, _ = k.shape
    dtype = torch.promote_types(torch.promote_types(k.dtype, v.dtype), torch.float32)
    if mask is None:
        mask = torch.ones(b, heads, n, dtype=torch.bool, device=k.device)
    # what is not there may be anything, NaN included
    k, v = (x.masked_fill(~mask[..., None], 0) for x in (k, v))
    parts = []
    for i in range(b):
        for h in range(heads):
            drawn = None if noise is None else noise.expand(heads, *noise.shape[1:])[h].double()
            radius = None if query_radius is None else query_radius[i, h].double()
            parts.append(_one_head(k[i, h].double(), v[i, h].double(), mask[i, h], radius, drawn, settings))
    stacked = (torch.stack(x).unflatten(0, (b, heads)) for x in zip(*parts, strict=True))
    return Compressed(*(x if x.dtype == torch.int64 else x.to(dtype) for x in stacked))


def attend(q: Tensor, coreset: Compressed, beta: float) -> Tensor:
    """As :func:`kernels.coreset_attention.torch_impl.attend`."""
    group = q.shape[1] // coreset.weights.shape[1]
    c = Compressed(*(x.repeat_interleave(group, dim=1) for x in coreset))
    logits = beta * q.double() @ c.keys.double().mT
    p = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    denominator, absolute = (
        (p * w.double()[..., None, :]).sum(dim=-1, keepdim=True) for w in (c.weights, c.weights.abs())
    )
    lost = denominator <= CANCELLED * torch.finfo(torch.float64).eps * absolute
    out = c.value_mean + ((p @ c.values.double()) / denominator.masked_fill(lost, 1)).masked_fill(lost, 0)
    return out.clamp(c.lower[..., None, :], c.upper[..., None, :]).to(q.dtype)


def _one_head(
    k: Tensor, v: Tensor, mask: Tensor, query_radius: Tensor | None, noise: Tensor | None, settings: Settings
) -> tuple[Tensor, ...]:
    present = mask.nonzero()[:, 0]
    key_mean, value_mean = ((x[present].detach().sum(dim=0) / max(len(present), 1))[None] for x in (k, v))
    key_mean = key_mean if settings.recentre else torch.zeros_like(key_mean)
    # what is chosen, and how it is weighed, are constants of the backward pass
    fixed = (k - key_mean).detach()
    order, held = settings.bins.tokens(k.device)
    bins = [tokens[places & mask[tokens]] for tokens, places in zip(order, held, strict=True)]
    lengths = torch.stack([torch.cat([k.new_zeros(1), fixed[t].norm(dim=-1)]).amax() for t in bins])
    radius = lengths.amax() if query_radius is None else query_radius
    counts = torch.tensor([len(tokens) for tokens in bins], device=k.device)
    factors = multiplier(radius, lengths, counts, beta=settings.beta, tau_mult=settings.tau_mult)
    found = []
    # with a slot for every key nothing is chosen
    for i, tokens in enumerate([] if settings.exact else bins):
        # the noise of a place, also where keys before it are missing
        places = (held[i] & mask[order[i]]).nonzero()[:, 0]
        drawn = None if noise is None else noise[i] if settings.sampler == "cdf" else noise[i][:, places]
        found.append(_one_bin(factors[i] * fixed[tokens], v[tokens] - value_mean, tokens, drawn, settings))
    if found:
        pivots, log_back, values, weights = (torch.cat(x) for x in zip(*found, strict=True))
    else:
        pivots = torch.where(mask, torch.arange(len(k), device=k.device), -1)
        log_back, weights = k.new_zeros(len(k)), mask.to(k.dtype)
        values = (v - value_mean) * mask[:, None]
    back = (log_back - (log_back.amax() - LARGEST_EXPONENT).clamp(min=0)).exp()
    some = present[:1] if not (pivots >= 0).any() else pivots[pivots >= 0][:1]
    tokens = torch.where(pivots >= 0, pivots, some if len(some) else 0)
    seen = v[present].detach() if len(present) else torch.zeros_like(v[:1])
    gamma = gauge(radius, lengths.amax(), counts.sum(), beta=settings.beta)
    return (
        *(k[tokens] - key_mean, values * back[:, None], weights * back, seen.amin(dim=0), seen.amax(dim=0)),
        *(gamma, settings.beta**0.5 / factors, pivots, key_mean, value_mean),
    )


def _one_bin(x: Tensor, v: Tensor, tokens: Tensor, noise: Tensor | None, settings: Settings) -> tuple[Tensor, ...]:
    """Tokens chosen (-1 where none was left), log of what brings the sums to their own scale, sums of v and of 1."""
    slots, s = settings.slots, x.square().sum(dim=-1) / 2
    chosen: list[int] = []
    g = (x @ x.mT - s[:, None] - s).exp()
    for t in range(min(slots, len(x))):
        weights, rows = _weights(g, chosen), g[chosen]
        left = (1 - (rows * weights).sum(dim=0)).clamp(min=0)
        left[chosen] = 0
        score = left.log() + 2 * s if settings.sampler != "uniform" else torch.zeros_like(left)
        score = score.where(left > max(EXHAUSTED, t) * torch.finfo(x.dtype).eps, -torch.inf)
        if score.amax() == -torch.inf:
            break
        chosen.append(_draw(score, None if noise is None else noise[t], settings.sampler))
    weights = _weights(g, chosen) * (s - s.amax() if len(s) else s).exp()
    sums = x.new_zeros(slots, v.shape[-1] + 1)
    sums[: len(chosen)] = weights @ torch.cat([v, torch.ones_like(v[:, :1])], dim=-1)
    pivots, back = tokens.new_full((slots,), -1), x.new_full((slots,), -torch.inf)
    pivots[: len(chosen)] = tokens[chosen]
    back[: len(chosen)] = s.amax() - s[chosen] if chosen else 0
    return pivots, back, sums[:, :-1], sums[:, -1]


def _weights(g: Tensor, chosen: list[int]) -> Tensor:
    return torch.linalg.solve(g[chosen][:, chosen], g[chosen])


def _draw(score: Tensor, noise: Tensor | None, sampler: str) -> int:
    if sampler == "cdf":
        total = (score - score.amax()).exp().cumsum(dim=0)
        return int((total <= noise * total[-1]).sum().clamp(max=len(score) - 1))
    return int((score if noise is None else score - (-noise.clamp(1e-300, 1 - 1e-16).log()).log()).argmax())
