"""The parts of MB-TaylorFormer: Taylor-expanded attention with its gate, gated feed-forward layer, patch embedding.

Papers: Qiu et al., "MB-TaylorFormer: Multi-branch Efficient Transformer Expanded by Taylor Formula for Image Dehazing",
ICCV 2023 (sec. 3), and Jin et al., "MB-TaylorFormer V2", TPAMI 2025, https://arxiv.org/abs/2501.04486.
Differs from the authors' code: everything is channels-last; the weight of a norm is folded into the 1x1 convolution
behind it; what looks only a few pixels around is computed in tiles on a CPU (:mod:`kernels.tiles`), the sums that
attention takes over the image in a pass of their own; the denominator is computed once, not for each channel.
Modules hold weights under the published names; the branches of V2, stacked in one tensor there, run one by one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from archs.taylor_parts import gated, heads_of, image_of, local, pointwise, separable, wide
from kernels import dispatch
from kernels.deform_conv import deform_depthwise_conv2d
from kernels.exported import is_exported
from kernels.taylor_attention import taylor_attention
from kernels.taylor_attention.parts import taylor_map, taylor_sums, units
from kernels.tiles import Part, in_tiles, suits

# hidden channels of the feed-forward layer over its input's
EXPANSION = 2.66
# tiles of attention over the usual ones: 233 instead of 281 ms forward and backward, 48 channels, 256 x 256 pixels
TILE_SCALE = 4


@dataclass(frozen=True)
class Form:
    """What V1 and V2 do differently in attention.

    Attributes:
        norm: length of queries and keys.
        eps: added to their lengths and to the denominator.
        focus_power: power of the second term, or None for none.
        gate_mode: "multiply" by a gate computed from queries and keys, or "add" one computed from the values.
    """

    norm: float
    eps: float
    focus_power: int | None
    gate_mode: str

    @property
    def gates_values(self) -> bool:
        """Whether the gate is computed from the values."""
        return self.gate_mode == "add"


class Conv(nn.Conv2d):
    """A convolution without padding rules of its own: weights under their published name, drawn as PyTorch does."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, *, groups: int = 1, bias: bool = False
    ) -> None:
        super().__init__(in_channels, out_channels, kernel, padding=kernel // 2, groups=groups, bias=bias)


class BiasFreeNorm(nn.Module):
    """Weights of :func:`normed` for some branches, under the published name ``body.weight``."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.body = nn.ParameterDict({"weight": nn.Parameter(torch.ones(*shape))})


class Gate(nn.Module):
    """The convolutions of the multi-scale attention refinement (MSAR): one output for each head, by three sizes.

    Args:
        heads: number of heads.
        width: input channels of a head.
        branches: of V2, stacked in each weight.
    """

    def __init__(self, heads: int, width: int, branches: int) -> None:
        super().__init__()
        self.width, self.sizes = width, head_groups(heads)
        # how far the widest kernel looks
        self.reach = max(kernel for kernel, _ in self.sizes) // 2
        self.conv_list = nn.ModuleList(
            Conv(n * width * branches, n * branches, kernel, groups=n * branches, bias=True) for kernel, n in self.sizes
        )

    def weights(self, branch: int) -> list[Tensor]:
        """Weight and bias of each size of kernel."""
        found = []
        for (_, n), conv in zip(self.sizes, self.conv_list, strict=True):
            found += [conv.weight[branch * n : (branch + 1) * n], conv.bias[branch * n : (branch + 1) * n]]
        return found

    def compute(self, part: Part, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """(b, heads * width, h, w), the part with its surroundings -> (b, heads, h, w), after the sigmoid"""
        found, first = [], 0
        for i, (_, n) in enumerate(self.sizes):
            weight, bias = (w if w.dtype == x.dtype else w.to(x.dtype) for w in weights[2 * i : 2 * i + 2])
            own = x[:, first * self.width : (first + n) * self.width]
            found.append(_to_one_channel(part, own, weight) + bias[:, None, None])
            first += n
        return torch.cat(found, dim=1).sigmoid()


def _to_one_channel(part: Part, x: Tensor, weight: Tensor) -> Tensor:
    """Convolution of each group of channels to one, weight (groups, channels, k, k).

    The other way round than usual: a product with every tap first, then the sum of what the taps give at their places.
    """
    n, width, k, _ = weight.shape
    half = k // 2
    if is_exported():
        return part.conv2d(x, weight, groups=n)
    x = part.cut(x, half)
    b, _, h, w = x.shape
    # the place of a tap in the sum is opposite to its place in the kernel
    taps = weight.flip(2, 3).flatten(2).mT  # (n, k * k, width)
    products = taps @ x.permute(0, 2, 3, 1).reshape(b, h * w, n, width).permute(0, 2, 3, 1)
    return part.cut(F.fold(products.flatten(1, 2), (h, w), k, padding=half))


class Attention(nn.Module):
    """Multi-head self-attention by Taylor expansion (T-MSA) with its gate, beside a shortcut.

    Args:
        dim: channels. heads: a divisor of it. branches: stacked in each weight, 0 for one that is not stacked.
        form: V1 or V2.
    """

    def __init__(self, *, dim: int, heads: int, branches: int, form: Form) -> None:
        super().__init__()
        self.dim, self.heads, self.form = dim, heads, form
        stacked, p = (branches,) if branches else (), max(branches, 1)
        self.temperature = nn.Parameter(torch.ones(*stacked, heads, 1, 1))
        if form.focus_power is not None:
            self.scale = nn.Parameter(torch.ones(*stacked, heads, 1, 1))
            # published with every V2 network; it takes no part in the computation
            self.one_M = nn.Parameter(torch.ones(1), requires_grad=False)
        self.qkv = Conv(dim * p, 3 * dim * p, 1, groups=p)
        self.qkv_dwconv = Conv(3 * dim * p, 3 * dim * p, 3, groups=3 * dim * p)
        self.project_out = Conv(dim * p, dim * p, 1, groups=p)
        self.refine_att = Gate(heads, (1 if form.gates_values else 2) * dim // heads, p)
        # what attends instead of the Taylor expansion, unless it is told to leave that; see archs.wildcat
        self.core: nn.Module | None = None

    def forward(self, x: Tensor, norm: Tensor, branch: int = 0) -> Tensor:
        """(b, dim, h, w) -> (b, dim, h, w), where ``norm`` (dim,) weighs the channels of the norm before"""
        rows = slice(3 * self.dim * branch, 3 * self.dim * (branch + 1))
        qkv = self.qkv.weight[rows].flatten(1) * norm, self.qkv_dwconv.weight[rows]
        out = self.project_out.weight[self.dim * branch : self.dim * (branch + 1)].flatten(1)
        gate = self.refine_att.weights(branch)
        factors = [self.temperature.reshape(-1, self.heads)[branch]]
        if self.form.focus_power is not None:
            factors.append(self.scale.reshape(-1, self.heads)[branch].sigmoid())
        halo = 1 + self.refine_att.reach
        given = self._core() is not None or dispatch.requested("taylor_attention") not in (None, "torch")
        if given or not suits(x, halo=halo, width=3 * self.dim):
            return self._whole(x, qkv, out, factors, gate)
        keys_values = [w[self.dim :] for w in qkv]
        sums = in_tiles(self._sums, [x], [], keys_values, halo=1, width=3 * self.dim, scale=TILE_SCALE, total=True)
        # the queries, and what the gate is made of
        queries = [self._for_queries(w) for w in qkv]
        shared = [*queries, out, *factors, *gate]
        return in_tiles(self._outputs, [x], [sums], shared, halo=halo, width=3 * self.dim, scale=TILE_SCALE)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *arguments: Any) -> None:
        # files from before the release have no such entry
        if hasattr(self, "one_M"):
            state_dict.setdefault(f"{prefix}one_M", self.one_M.detach())
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _core(self) -> nn.Module | None:
        return self.core if self.core is not None and self.core.acts else None

    def _for_queries(self, rows: Tensor) -> Tensor:
        """Of weights (3 dim, ...) those of queries and values one after the other, or of queries and keys by heads."""
        if self.form.gates_values:
            return torch.cat([rows[: self.dim], rows[2 * self.dim :]])
        heads = rows.unflatten(0, (3, self.heads, self.dim // self.heads))
        return heads[:2].transpose(0, 1).flatten(0, 2)

    def _sums(self, part: Part, maps: Sequence[Tensor], images: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
        k, v = heads_of(local(part, maps[0], *shared), 2, self.heads)
        with dispatch.no_autocast(k.device.type):
            return taylor_sums(self._units(wide(k)), wide(v))

    def _outputs(
        self, part: Part, maps: Sequence[Tensor], images: Sequence[Tensor], shared: Sequence[Tensor]
    ) -> Tensor:
        (x,), (sums,), (weight, depthwise, out, *rest) = maps, images, shared
        factors, gate_weights = rest[: -2 * len(self.refine_att.sizes)], rest[-2 * len(self.refine_att.sizes) :]
        both = local(part, x, weight, depthwise, self.refine_att.reach)
        with dispatch.no_autocast(x.device.type):
            both = wide(both)
            if self.form.gates_values:
                queries = self._units(heads_of(part.cut(both[:, : self.dim]), 1, self.heads)[0])
                of_gate = both[:, self.dim :]
            else:
                (pairs,) = self._units(heads_of(both, 1, 2 * self.heads)[0])
                of_gate = image_of(pairs, both)
                queries = (heads_of(part.cut(of_gate), 1, 2 * self.heads)[0][:, ::2],)
            gate = self.refine_att.compute(part, of_gate, gate_weights).flatten(2)
            y = taylor_map(queries, sums, eps=self.form.eps, gate=gate, **self._settings(factors, both.dtype))
        x = part.cut(x)
        return x + pointwise(image_of(y, x).to(x.dtype), out)

    def _whole(
        self, x: Tensor, qkv: Sequence[Tensor], out: Tensor, factors: Sequence[Tensor], gate_weights: Sequence[Tensor]
    ) -> Tensor:
        """The attention of the whole image at once."""
        part = Part.all(x)
        q, k, v = heads_of(local(part, x, *qkv), 3, self.heads)
        with dispatch.no_autocast(x.device.type):
            if self.form.gates_values:
                of_gate = image_of(wide(v), x)
            else:
                (a,), (b,) = (self._units(wide(t)) for t in (q, k))
                of_gate = image_of(torch.stack([a, b], dim=2).flatten(1, 2), x)
            gate = self.refine_att.compute(part, of_gate, gate_weights).flatten(2)
        core = self._core()
        if core is not None:
            y = core(q, k, v, gate, factors[0].to(gate.dtype), size=tuple(x.shape[2:]))
        else:
            settings = {"norm": self.form.norm, "eps": self.form.eps, "focus_power": self.form.focus_power}
            y = taylor_attention(q, k, v, gate=gate, **settings, **self._settings(factors, gate.dtype))
        return x + pointwise(image_of(y, x).to(x.dtype), out)

    def _units(self, x: Tensor) -> tuple[Tensor, ...]:
        return units(x, norm=self.form.norm, eps=self.form.eps, focus_power=self.form.focus_power)

    def _settings(self, factors: Sequence[Tensor], dtype: torch.dtype) -> dict[str, Any]:
        temperature, focus_weight = (*factors, None)[:2]
        return {
            "temperature": temperature.to(dtype),
            "focus_weight": None if focus_weight is None else focus_weight.to(dtype),
            "gate_mode": self.form.gate_mode,
        }


class FeedForward(nn.Module):
    """Weights of the gated feed-forward layer (GDFN): one input convolution in V1, two of stacked branches in V2."""

    def __init__(self, *, dim: int, branches: int) -> None:
        super().__init__()
        self.dim, self.hidden, self.stacked = dim, int(dim * EXPANSION), branches > 0
        p, hidden = max(branches, 1), self.hidden * max(branches, 1)
        if self.stacked:
            self.project_in_1, self.project_in_2 = (Conv(dim * p, hidden, 1, groups=p) for _ in range(2))
            self.dwconv_1, self.dwconv_2 = (Conv(hidden, hidden, 3, groups=hidden) for _ in range(2))
        else:
            self.project_in = Conv(dim, 2 * hidden, 1)
            self.dwconv = Conv(2 * hidden, 2 * hidden, 3, groups=2 * hidden)
        self.project_out = Conv(hidden, dim * p, 1, groups=p)

    def forward(self, x: Tensor, norm: Tensor, branch: int = 0) -> Tensor:
        """(b, dim, h, w) -> (b, dim, h, w), where ``norm`` (dim,) weighs the channels of the norm before"""
        if self.stacked:
            rows = slice(self.hidden * branch, self.hidden * (branch + 1))
            weight = torch.cat([self.project_in_1.weight[rows], self.project_in_2.weight[rows]])
            depthwise = torch.cat([self.dwconv_1.weight[rows], self.dwconv_2.weight[rows]])
        else:
            weight, depthwise = self.project_in.weight, self.dwconv.weight
        out = self.project_out.weight[self.dim * branch : self.dim * (branch + 1)].flatten(1)
        shared = [weight.flatten(1) * norm, depthwise, out]
        return in_tiles(self._compute, [x], [], shared, halo=1, width=2 * self.hidden)

    def _compute(
        self, part: Part, maps: Sequence[Tensor], images: Sequence[Tensor], shared: Sequence[Tensor]
    ) -> Tensor:
        (x,), (weight, depthwise, out) = maps, shared
        hidden = gated(local(part, x, weight, depthwise))
        return part.cut(x) + pointwise(hidden, out)


class TaylorBlock(nn.Module):
    """Attention and gated feed-forward layer, each behind a norm and beside a shortcut; of one branch or of some."""

    def __init__(self, *, dim: int, heads: int, branches: int, form: Form) -> None:
        super().__init__()
        shape = (branches, dim) if branches else (dim,)
        self.norm1 = BiasFreeNorm(shape)
        self.attn = Attention(dim=dim, heads=heads, branches=branches, form=form)
        self.norm2 = BiasFreeNorm(shape)
        self.ffn = FeedForward(dim=dim, branches=branches)

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        """(b, dim, h, w) -> (b, dim, h, w)"""
        dim = x.shape[1]
        x = self.attn(x, self.norm1.body["weight"].reshape(-1, dim)[branch], branch)
        return self.ffn(x, self.norm2.body["weight"].reshape(-1, dim)[branch], branch)


class PatchEmbedding(nn.Module):
    """Depthwise separable and deformable convolution (DSDCN): offsets, 3x3 taps at them, 1x1 convolution, Hardswish.

    Args:
        dim: channels.
        clamp: limits of the offsets in pixels, or None.
    """

    def __init__(self, dim: int, *, clamp: tuple[float, float] | None) -> None:
        super().__init__()
        self.clamp = clamp
        self.offset_generator = nn.Sequential(Conv(dim, dim, 3, groups=dim), Conv(dim, 18, 1))
        self.dcn = Conv(dim, dim, 3, groups=dim)
        self.pwconv = Conv(dim, dim, 1)
        for conv in (*self.offset_generator, self.pwconv):
            nn.init.normal_(conv.weight, std=math.sqrt(2 / (conv.kernel_size[0] ** 2 * conv.out_channels)))

    def forward(self, x: Tensor) -> Tensor:
        """(b, dim, h, w) -> (b, dim, h, w)"""
        offset = separable(x, *self.offset_generator)
        y = deform_depthwise_conv2d(x, offset, self.dcn.weight, clamp=self.clamp)
        return in_tiles(self._mix, [y], [], [self.pwconv.weight.flatten(1)], halo=0, width=2 * x.shape[1])

    @staticmethod
    def _mix(part: Part, maps: Sequence[Tensor], images: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
        return F.hardswish(pointwise(maps[0], shared[0]))


class SKFF(nn.Module):
    """Selective fusion of the branches: their sum, weighted for each channel by what the mean of the image says.

    Args:
        dim: channels. branches: number of maps.
    """

    def __init__(self, dim: int, branches: int) -> None:
        super().__init__()
        narrow = max(dim // 8, 4)
        self.conv_du = nn.Sequential(Conv(dim, narrow, 1), nn.PReLU())
        self.fcs = nn.ModuleList(Conv(narrow, dim, 1) for _ in range(branches))

    def forward(self, maps: Sequence[Tensor], shortcut: Tensor | None) -> Tensor:
        """(b, dim, h, w) of each branch, and what is added to the result -> (b, dim, h, w)"""
        _, dim, h, w = maps[0].shape
        mean = in_tiles(self._total, maps, halo=0, width=dim * len(maps), total=True) / (h * w)
        narrow = self.conv_du(mean.to(maps[0].dtype)[:, :, None, None])
        shares = torch.stack([fc(narrow) for fc in self.fcs], dim=1).softmax(dim=1)
        added = [] if shortcut is None else [shortcut]
        return in_tiles(self._mixed, [*maps, *added], [shares], halo=0, width=dim * len(maps))

    @staticmethod
    def _total(part: Part, maps: Sequence[Tensor], images: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
        return sum(wide(x).sum(dim=(2, 3)) for x in maps)

    @staticmethod
    def _mixed(part: Part, maps: Sequence[Tensor], images: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
        (shares,) = images
        n = shares.shape[1]
        out = maps[0] * shares[:, 0]
        for i in range(1, n):
            out = torch.addcmul(out, maps[i], shares[:, i])
        return out + maps[n] if len(maps) > n else out


def head_groups(heads: int) -> list[tuple[int, int]]:
    """Sizes of the gate's kernels and how many heads have each: 3x3 for the first ones, then 5x5, then 7x7.

    As published for 1, 2, 4 and 8 heads; other numbers are divided in the same proportions.
    """
    if heads <= 2:
        counts = (heads, 0, 0)
    elif heads <= 4:
        counts = (heads // 2, heads - heads // 2, 0)
    else:
        small = max(1, heads // 4)
        counts = (small, (heads - small) // 2, heads - small - (heads - small) // 2)
    return [(kernel, n) for kernel, n in zip((3, 5, 7), counts, strict=True) if n]
