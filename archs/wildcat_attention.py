"""What attends in the networks of :mod:`archs.wildcat` in place of the attention of the networks they come from.

Paper: Schröder and Mackey, "WildCat: Near-Linear Attention in Theory and Practice", https://arxiv.org/abs/2602.10056;
the operator is :mod:`kernels.coreset_attention`. A core has no weights of its own but a learned temperature, so that
the files of the plain networks fit. Which keys make up the coreset is drawn at random: by a fixed seed in evaluation,
anew for each call in training, from PyTorch's generator.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from archs.taylor_parts import wide
from kernels.coreset_attention import wildcat_attention
from kernels.coreset_attention.torch_impl import exact
from kernels.dispatch import no_autocast
from kernels.taylor_attention.parts import units
from kernels.window_attention.torch_impl import lengthened, merge


class WindowCore(nn.Module):
    """Attention of SST in windows, or over the whole image, from a coreset.

    Args:
        window: side in pixels, or 0 for the whole image.
        heads: number of heads.
        rank: keys of the coreset. bins: tiles of the window, or of the image, that they are chosen from separately.
        threshold: side of the smallest window that it takes; for an image, the root of the least number of pixels.
        fallback_gamma: what makes a head exact, or None; see the operator.
        attention: "coreset", "exact", or "mean" (the mean of the values in place of a coreset).
    """

    def __init__(
        self,
        *,
        window: int,
        heads: int,
        rank: int,
        bins: int,
        threshold: int,
        fallback_gamma: float | None,
        attention: str,
    ) -> None:
        super().__init__()
        self.window, self.heads, self.threshold, self.attention = window, heads, threshold, attention
        self.rank, self.bins, self.fallback_gamma = rank, bins, fallback_gamma

    def takes(self, size: tuple[int, int]) -> bool:
        """Whether it attends in place of the exact attention in windows, for an image of this (h, w)."""
        return self.window == 0 or self._reduces(size)

    def forward(
        self, qkv: Tensor, q_pos: Tensor | None, k_pos: Tensor | None, bias: None, dtype: torch.dtype
    ) -> Tensor:
        """(b, h, w, 3 * heads * d), twice (heads, pixels, rank) or None -> (b, h, w, heads * d)"""
        b, h, w, channels = qkv.shape
        d = channels // (3 * self.heads)
        settings = {"heads": self.heads, "scale": 1 / math.sqrt(d)}
        with no_autocast(qkv.device.type):
            if self.window:
                tokens = lengthened(qkv.to(dtype), q_pos, k_pos, window=self.window, equal=False, **settings)
                out = self._attend(*tokens, (self.window, self.window), settings["scale"])
                return merge(out, qkv.shape, self.window).to(qkv.dtype)
            tokens = _pixels(qkv.to(dtype), q_pos, k_pos, **settings)
            out = self._attend(*tokens, (h, w), settings["scale"])
            return out.transpose(1, 2).reshape(b, h, w, self.heads * d).to(qkv.dtype)

    def _reduces(self, size: tuple[int, int]) -> bool:
        h, w = (self.window, self.window) if self.window else size
        return self.attention != "exact" and h * w >= self.threshold**2

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], scale: float) -> Tensor:
        if not self._reduces(grid):
            return exact(q, k, v, None, scale)
        if self.attention == "mean":
            return wide(v).mean(dim=2, keepdim=True).to(v.dtype).expand_as(v)
        return _from_coreset(self, q, k, v, grid, scale)

    def extra_repr(self) -> str:
        return _settings_of(self)


class TokenCore(nn.Module):
    """Softmax attention of MB-TaylorFormer over the whole image, from a coreset, times the gate.

    Args:
        heads: number of heads.
        norm: length of queries and keys, or None for theirs over the root of their size.
        eps: added to their lengths.
        learned_temperature: a factor of the logits of each head, 1 at first.
        rank, bins: as in :class:`WindowCore`.
        threshold: least number of pixels for which a coreset is made; fewer attend exactly.
        fallback_gamma: as in :class:`WindowCore`.
        attention: "coreset", "exact" or "taylor" (leave it to the Taylor expansion).
    """

    def __init__(
        self,
        *,
        heads: int,
        norm: float | None,
        eps: float,
        learned_temperature: bool,
        rank: int,
        bins: int,
        threshold: int,
        fallback_gamma: float | None,
        attention: str,
    ) -> None:
        super().__init__()
        self.norm, self.eps, self.threshold, self.attention = norm, eps, threshold, attention
        self.rank, self.bins, self.fallback_gamma = rank, bins, fallback_gamma
        self.register_parameter("logit_scale", nn.Parameter(torch.ones(heads)) if learned_temperature else None)

    @property
    def acts(self) -> bool:
        """Whether it attends in place of the Taylor expansion."""
        return self.attention != "taylor"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, temperature: Tensor, *, size: tuple[int, int]
    ) -> Tensor:
        """(b, heads, d, h * w) thrice, gate (b, heads, h * w), temperature (heads,) -> (b, heads, d, h * w)"""
        with no_autocast(v.device.type):
            q, k, values = (wide(x) for x in (q, k, v))
            scale = 1 / math.sqrt(q.shape[2])
            if self.norm is not None:
                (q,), (k,) = (units(x, norm=self.norm, eps=self.eps) for x in (q, k))
                scale = 1.0
            if self.logit_scale is not None:
                q = q * self.logit_scale.to(q.dtype)[:, None, None]
            out = self._attend(q.mT, k.mT, values.mT, size, scale).mT
            return (out * temperature[:, None, None] * gate[:, :, None]).to(v.dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], scale: float) -> Tensor:
        if self.attention == "exact" or q.shape[2] < self.threshold:
            return exact(q, k, v, None, scale)
        return _from_coreset(self, q, k, v, grid, scale)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *arguments: Any) -> None:
        # the files of the plain network have no temperature
        if self.logit_scale is not None:
            state_dict.setdefault(f"{prefix}logit_scale", torch.ones_like(self.logit_scale.detach()))
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        return _settings_of(self)


def _pixels(
    qkv: Tensor, q_pos: Tensor | None, k_pos: Tensor | None, *, heads: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(b, h, w, 3 * heads * d) -> q, k, v, each (b, heads, h * w, ...), q and k continued by the positional factors."""
    b, h, w, channels = qkv.shape
    q, k, v = qkv.reshape(b, h * w, 3, heads, channels // (3 * heads)).permute(2, 0, 3, 1, 4).unbind(0)
    if q_pos is None:
        return q, k, v
    rank = q_pos.shape[-1]
    q_pos = q_pos * (1 / (scale * math.sqrt(rank)))
    q_pos, k_pos = (x.to(q.dtype).expand(b, -1, -1, -1) for x in (q_pos, k_pos))
    return torch.cat([q, q_pos], dim=-1), torch.cat([k, k_pos], dim=-1), v


def _from_coreset(
    core: WindowCore | TokenCore, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], scale: float
) -> Tensor:
    # in training a fresh draw, from the generator whose state a checkpoint keeps
    seed = torch.randint(2**31 - 1, (), device=q.device) if core.training else 0
    settings = {"rank": core.rank, "bins": core.bins, "fallback_gamma": core.fallback_gamma}
    return wildcat_attention(q, k, v, scale=scale, grid=grid, seed=seed, **settings)


def _settings_of(core: WindowCore | TokenCore) -> str:
    return f"attention={core.attention}, rank={core.rank}, bins={core.bins}, threshold={core.threshold}"
