"""SST, the Scalable Super-resolution Transformer, with Rank-factorized Implicit neural Bias (RIB).

Paper: Lee et al., "Rank-factorized Implicit Neural Bias: Scaling Super-Resolution Transformer with FlashAttention",
https://arxiv.org/abs/2603.06738 (sec. 3). Published weights load as they are.
Differs from the authors' code: images of any size, down to 1x1; reflection happens inside the attention; attention in
bfloat16 is a choice (``attention_dtype``) and any module dtype works; the positional factors are cached in inference;
``NoPE`` attends over pixels on every backend; the dense table of relative positions (``RPB``) is built by strides.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from archs.layers import LayerNorm2d, Pointwise, Upsampler, WeightCache, check_integers, one_of, per_layer
from kernels.dispatch import no_autocast
from kernels.window_attention import window_attention
from kernels.window_attention.layout import continue_by_reflection
from options.registry import ARCHS

GATES = ("DWC", "Linear", None)
ATTENTION_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIREN_FREQUENCY = 30.0

_CYCLE = (16, 32, 64, 16, 32, 64)
_PLUS_CYCLE = (16, 32, 48, 32, 48, 96)
_RIB = {"attn_type": "RIB", "rib_hidden_dim": 32, "rib_n_freqs": 10, "gate_type": "DWC"}
_LIGHT = {"dim": 48, "n_blocks": 5, "num_heads": (3,) * 6, "ranks": (16, 16, 16, 24, 24, 24), "exp_ratio": 1.5}
_BASE = {"dim": 180, "n_blocks": 6, "num_heads": (6,) * 6, "ranks": (18, 18, 18, 34, 34, 34), "exp_ratio": 1.25}
_LARGE = {"dim": 192, "n_blocks": 8, "num_heads": (6,) * 6, "ranks": (16, 16, 16, 32, 32, 32), "exp_ratio": 2}
_XLARGE = {**_LARGE, "dim": 224, "n_blocks": 10, "num_heads": (7,) * 6}
_DIRECT = {"upsampler_type": "pixelshuffle_direct"}
_SHUFFLE_64 = {"upsampler_type": "pixelshuffle", "intermediate_dim": 64}
_SHUFFLE_96 = {"upsampler_type": "pixelshuffle", "intermediate_dim": 96}

# the published networks; each takes upscaling_factor 2, 3 or 4 besides
PRESETS = {
    "SSTlight": {**_LIGHT, "window_sizes": (8, 16, 32, 16, 32, 64), **_RIB, **_DIRECT},
    "SSTlight_Plus": {**_LIGHT, "window_sizes": _PLUS_CYCLE, **_RIB, **_DIRECT},
    "SST": {**_BASE, "window_sizes": _CYCLE, **_RIB, **_SHUFFLE_64},
    "SST_Plus": {**_BASE, "window_sizes": _PLUS_CYCLE, **_RIB, **_SHUFFLE_64},
    "SSTLarge": {**_LARGE, "window_sizes": _CYCLE, **_RIB, **_SHUFFLE_96},
    "SSTLarge_Plus": {**_LARGE, "window_sizes": _PLUS_CYCLE, **_RIB, **_SHUFFLE_96},
    "SSTXL_Plus": {**_XLARGE, "window_sizes": _PLUS_CYCLE, **_RIB, **_SHUFFLE_96},
}


def rib_features(window: int | tuple[int, int], n_freqs: int) -> Tensor:
    """Coordinates of the pixels of a window in (-1, 1), x first, and their sines and cosines at octaves, without pi.

    Args:
        window: its side, or its height and width, each of which the coordinates are stretched to.
        n_freqs: number of octaves.

    Returns:
        ``(h * w, 2 + 4 * n_freqs)``, float32: x, y, then per octave sin x, sin y, cos x, cos y.
    """
    sides = (window, window) if isinstance(window, int) else window
    centres = [2 * (torch.arange(n, dtype=torch.float32, device="cpu") + 0.5) / n - 1 for n in sides]
    y, x = torch.meshgrid(*centres, indexing="ij")
    xy = torch.stack([x.flatten(), y.flatten()], dim=-1)
    octaves = [f(xy * 2**i) for i in range(n_freqs) for f in (torch.sin, torch.cos)]
    return torch.cat([xy, *octaves], dim=-1)


class WindowAttention(nn.Module):
    """Gated attention within windows; by itself without any position (NoPE).

    Args:
        dim: number of channels. window: side in pixels. heads: number of heads, a divisor of ``dim``.
        gate_type: "DWC" (depthwise 3x3, then 1x1), "Linear" (1x1) or None.
        shift: move the windows by half their side, around the borders of the image.
        attention_dtype: dtype of the attention; None for bfloat16 on CUDA and the input's own elsewhere.
    """

    def __init__(
        self,
        *,
        dim: int,
        window: int,
        heads: int,
        gate_type: str | None,
        shift: bool,
        attention_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.window, self.heads, self.shift, self.attention_dtype = window, heads, shift, attention_dtype
        # what attends instead where it takes the image, and what a window of 0 stands for; see archs.wildcat
        self.core: nn.Module | None = None
        self.to_qkv = Pointwise(dim, 3 * dim)
        self.to_out = Pointwise(dim, dim)
        self.gate = None
        if gate_type is not None:
            local = [nn.Conv2d(dim, dim, 3, padding=1, groups=dim)] if gate_type == "DWC" else []
            self.gate = nn.Sequential(*local, Pointwise(dim, dim), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        """(b, dim, h, w) -> (b, dim, h, w)"""
        qkv = self.to_qkv(x).permute(0, 2, 3, 1)
        dtype = self._dtype(qkv)
        size = tuple(qkv.shape[1:3])
        q_pos, k_pos, bias = self.positions(dtype, size)
        attend = self.core if self.core is not None and self.core.takes(size) else self._attend
        out = attend(qkv, q_pos, k_pos, bias, dtype).permute(0, 3, 1, 2)
        return self.to_out(out if self.gate is None else out * self.gate(x))

    def positions(
        self, dtype: torch.dtype, size: tuple[int, int]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Positional factors of the queries and keys, ``(heads, window**2, rank)`` each, and a dense bias; without a
        window (0), those of the ``h * w`` pixels of an image of this ``size``."""
        return None, None, None

    def _attend(
        self, qkv: Tensor, q_pos: Tensor | None, k_pos: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        settings = {"heads": self.heads, "window": self.window, "bias": bias, "dtype": dtype}
        if not self.shift:
            return window_attention(qkv, q_pos, k_pos, **settings)
        _, h, w, _ = qkv.shape
        half = self.window // 2
        qkv = continue_by_reflection(qkv, self.window).roll((-half, -half), dims=(1, 2))
        return window_attention(qkv, q_pos, k_pos, **settings).roll((half, half), dims=(1, 2))[:, :h, :w]

    def _dtype(self, qkv: Tensor) -> torch.dtype:
        if self.attention_dtype is not None:
            return self.attention_dtype
        # a float64 network is there for exact values
        rounded = qkv.device.type == "cuda" and qkv.dtype != torch.float64
        return torch.bfloat16 if rounded else qkv.dtype


class RIBAttention(WindowAttention):
    """Window attention whose bias is a product of two factors, each a small network of the coordinates (sec. 3.1).

    Args:
        rank: length of the factors.
        hidden_dim: width of the network's one hidden layer.
        n_freqs: octaves of the coordinate features.
        siren: use the plain coordinates and a sine layer instead (RIBSiren).
        common: the arguments of :class:`WindowAttention`.
    """

    def __init__(
        self, *, rank: int, hidden_dim: int = 32, n_freqs: int = 10, siren: bool = False, **common: Any
    ) -> None:
        super().__init__(**common)
        self.siren, self.n_freqs = siren, 0 if siren else n_freqs
        self.to_hidden = nn.Parameter(torch.empty(2 + 4 * self.n_freqs, hidden_dim))
        self.hidden_b = nn.Parameter(torch.zeros(1, hidden_dim))
        self.to_q = nn.Parameter(torch.empty(self.heads, hidden_dim, rank))
        self.to_k = nn.Parameter(torch.empty(self.heads, hidden_dim, rank))
        self.register_buffer("rib_coords", None, persistent=False)
        self._place_features()
        self._cache = WeightCache()
        self.reset_positions()

    def reset_positions(self) -> None:
        """Draw the weights of the factors anew."""
        nn.init.zeros_(self.hidden_b)
        if not self.siren:
            for weight in (self.to_hidden, self.to_q, self.to_k):
                nn.init.normal_(weight, std=0.05)
            return
        first, second = 1 / len(self.to_hidden), math.sqrt(6 / self.to_q.shape[1]) / SIREN_FREQUENCY
        for weight, bound in ((self.to_hidden, first), (self.to_q, second), (self.to_k, second)):
            nn.init.uniform_(weight, -bound, bound)

    def factors(self, size: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Factors of queries and keys, ``(heads, window**2, rank)`` each, in float32 (float64 in a float64 network);
        ``size`` as in :meth:`positions`."""
        coords = self.rib_coords if self.window else rib_features(size, self.n_freqs).to(self.to_hidden.device)
        weights = (coords, self.to_hidden, self.hidden_b, self.to_q, self.to_k)
        dtype = torch.promote_types(self.to_hidden.dtype, torch.float32)
        with no_autocast(self.to_hidden.device.type):
            features, to_hidden, hidden_b, to_q, to_k = (w.to(dtype) for w in weights)
            hidden = features @ to_hidden + hidden_b
            hidden = torch.sin(SIREN_FREQUENCY * hidden) if self.siren else F.relu(hidden)
            return hidden @ to_q, hidden @ to_k

    def positions(self, dtype: torch.dtype, size: tuple[int, int]) -> tuple[Tensor, Tensor, None]:
        """See :class:`WindowAttention`; remembered between calls in inference."""
        weights = (self.to_hidden, self.hidden_b, self.to_q, self.to_k)
        size = None if self.window else size
        q_pos, k_pos = self._cache.get(weights, (dtype, size), lambda: tuple(f.to(dtype) for f in self.factors(size)))
        return q_pos, k_pos, None

    def train(self, mode: bool = True) -> "RIBAttention":
        """As in any module, and forget remembered factors."""
        self._cache.clear()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RIBAttention":
        super()._apply(fn, recurse)
        self._cache.clear()
        self._place_features()
        return self

    def _load_from_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        self._cache.clear()
        super()._load_from_state_dict(*arguments, **keywords)

    def _place_features(self) -> None:
        # made anew: a 16-bit copy would blur the high octaves, and to_empty() would leave noise
        self.rib_coords = rib_features(self.window, self.n_freqs).to(self.to_hidden.device)


class RPBAttention(WindowAttention):
    """Window attention with a table of one bias per head and relative position; arguments as there."""

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self.relative_position_bias = nn.Parameter(0.001 * torch.randn(self.heads, (2 * self.window - 1) ** 2))

    def positions(self, dtype: torch.dtype, size: tuple[int, int]) -> tuple[None, None, Tensor]:
        """See :class:`WindowAttention`: bias[query, key] = table[key - query]."""
        side = 2 * self.window - 1
        table = self.relative_position_bias.to(dtype).reshape(self.heads, side, side)
        # unfolded, the windows of the table run over the queries, last one first
        bias = table.unfold(1, self.window, 1).unfold(2, self.window, 1).flip(1, 2)
        return None, None, bias.reshape(self.heads, self.window**2, self.window**2)


# "Naive", "SDPA" and "Flex" are three published ways to compute one thing
PUBLISHED_NAMES = {"Naive": "RPB", "SDPA": "RPB", "Flex": "RPB"}
ATTENTION = {"RIB": RIBAttention, "RIBSiren": RIBAttention, "NoPE": WindowAttention, "RPB": RPBAttention}


class ConvFFN(nn.Module):
    """Feed-forward layer with a depthwise 3x3 convolution between its two projections."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.proj = Pointwise(dim, hidden_dim)
        self.dwc = nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim)
        self.agg = Pointwise(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(b, dim, h, w) -> (b, dim, h, w)"""
        x = F.gelu(self.proj(x))
        return self.agg(x + F.gelu(self.dwc(x)))


class Layer(nn.Module):
    """Attention and feed-forward layer, each behind a norm and beside a shortcut."""

    def __init__(self, dim: int, attn: WindowAttention, hidden_dim: int) -> None:
        super().__init__()
        self.norm_attn = LayerNorm2d(dim)
        self.attn = attn
        self.norm_ffn = LayerNorm2d(dim)
        self.ffn = ConvFFN(dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(b, dim, h, w) -> (b, dim, h, w)"""
        x = x + self.attn(self.norm_attn(x))
        return x + self.ffn(self.norm_ffn(x))


class Block(nn.Sequential):
    """One layer for each window of the cycle and a 3x3 convolution, beside a shortcut."""

    checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """(b, dim, h, w) -> (b, dim, h, w)"""
        y = x
        for layer in self:
            if self.checkpointing and torch.is_grad_enabled():
                y = checkpoint(layer, y, use_reentrant=False)
            else:
                y = layer(y)
        return x + y


@ARCHS.register()
class SST(nn.Module):
    """Super-resolution transformer with cyclic windows, rank-factorized bias and convolutional local attention.

    Args:
        dim: channels inside.
        window_sizes: side of the window of each layer of a block, in pixels.
        num_heads: heads of each layer, or one number for all; divisors of ``dim``.
        n_blocks: number of blocks; every block runs through the same cycle of windows.
        ranks: rank of each layer's bias, or one for all; None for 256 minus the size of a head.
        exp_ratio: hidden channels of the feed-forward layers over ``dim``.
        attn_type: "RIB", "RIBSiren" (plain coordinates, a sine layer), "NoPE" (no position) or "RPB" (a table; the
            published names "Naive", "SDPA" and "Flex" mean the same).
        rib_hidden_dim, rib_n_freqs: width of RIB's hidden layer (None: 32), octaves of its features (None: 10).
        upscaling_factor: scale of the output.
        upsampler_type: "pixelshuffle", "pixelshuffle_direct" or "nn+conv".
        gate_type: gate on the attention: "DWC", "Linear" or None (also spelled "none").
        intermediate_dim: channels of the upsampler, not used by "pixelshuffle_direct".
        in_channels: channels of the image, in and out.
        attention_dtype: dtype of the attention: "auto" (bfloat16 on CUDA, as published, unless the network is float64;
            the input's own elsewhere), "float32", "bfloat16" or "float16".

    Raises:
        ValueError: an argument out of its range, or lists of different lengths.
    """

    multiple_of = 1
    minimum = 1
    halo = None
    # of an entry of window_sizes
    _least_window = 1

    def __init__(
        self,
        *,
        dim: int,
        window_sizes: Sequence[int],
        num_heads: int | Sequence[int],
        n_blocks: int,
        ranks: int | Sequence[int | None] | None = None,
        exp_ratio: float = 2,
        attn_type: str = "RIB",
        rib_hidden_dim: int | None = 32,
        rib_n_freqs: int | None = 10,
        upscaling_factor: int = 2,
        upsampler_type: str = "pixelshuffle_direct",
        gate_type: str | None = "DWC",
        intermediate_dim: int = 64,
        in_channels: int = 3,
        attention_dtype: str = "auto",
    ) -> None:
        super().__init__()
        windows = per_layer("window_sizes", window_sizes, least=self._least_window)
        heads = per_layer("num_heads", num_heads, len(windows))
        ranks = per_layer("ranks", ranks, len(windows), optional=True)
        rib_hidden_dim = 32 if rib_hidden_dim is None else rib_hidden_dim
        rib_n_freqs = 10 if rib_n_freqs is None else rib_n_freqs
        check_integers(dim=dim, n_blocks=n_blocks, rib_hidden_dim=rib_hidden_dim, in_channels=in_channels)
        check_integers(least=0, rib_n_freqs=rib_n_freqs)
        hidden_dim = int(dim * exp_ratio)
        check_integers(**{"dim * exp_ratio": hidden_dim})
        ranks = [_rank_of(dim, *layer) for layer in zip(heads, ranks, strict=True)]
        kind = one_of("attn_type", PUBLISHED_NAMES.get(attn_type, attn_type), ATTENTION)
        rib = {"hidden_dim": rib_hidden_dim, "n_freqs": rib_n_freqs, "siren": kind == "RIBSiren"}
        common = {
            "dim": dim,
            "gate_type": one_of("gate_type", None if gate_type in ("none", "None") else gate_type, GATES),
            "attention_dtype": ATTENTION_DTYPES[one_of("attention_dtype", attention_dtype, ATTENTION_DTYPES)],
        }
        # as published: one size of window throughout asks for shifted windows in every other layer
        shifts = [len(set(windows)) == 1 and i % 2 == 1 for i in range(len(windows))]

        def layer(window: int, heads: int, rank: int, shift: bool) -> Layer:
            extra = {"rank": rank, **rib} if ATTENTION[kind] is RIBAttention else {}
            return Layer(dim, ATTENTION[kind](window=window, heads=heads, shift=shift, **common, **extra), hidden_dim)

        self.scale = upscaling_factor
        self.in_channels = self.out_channels = in_channels
        self.tile_multiple = math.lcm(*filter(None, windows))
        self.proj = nn.Conv2d(in_channels, dim, 3, padding=1)
        cycle = list(zip(windows, heads, ranks, shifts, strict=True))
        blocks = [Block(*(layer(*row) for row in cycle), nn.Conv2d(dim, dim, 3, padding=1)) for _ in range(n_blocks)]
        self.body = nn.Sequential(*blocks, LayerNorm2d(dim), nn.Conv2d(dim, dim, 3, padding=1))
        self.upsampler = Upsampler(
            dim, scale=upscaling_factor, kind=upsampler_type, intermediate_dim=intermediate_dim, channels=in_channels
        )
        self.apply(_init_conv)

    def forward(self, x: Tensor) -> Tensor:
        """(b, in_channels, h, w) -> (b, in_channels, h * scale, w * scale); RGB in 0..1, any h, w >= 1"""
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"x must be (b, {self.in_channels}, h, w), got {tuple(x.shape)}")
        # channels-last inside: the projection is then the layout that the attention reads, and the norms need no copy
        features = self.proj(x.contiguous(memory_format=torch.channels_last))
        return self.upsampler(features + self.body(features), x).contiguous()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the input of each layer for the backward pass and compute the rest again."""
        for module in self.body:
            if isinstance(module, Block):
                module.checkpointing = enable


def _rank_of(dim: int, heads: int, rank: int | None) -> int:
    """The rank of a layer's factors, where None stands for what fills the head up to 256."""
    if dim % heads:
        divisors = ", ".join(str(n) for n in range(1, dim + 1) if dim % n == 0)
        raise ValueError(f"num_heads must divide dim={dim}, got {heads}; these do: {divisors}")
    if rank is None and dim // heads >= 256:
        raise ValueError(f"ranks=None stands for 256 - dim / num_heads, which is {256 - dim // heads}; give the rank")
    return 256 - dim // heads if rank is None else rank


def _init_conv(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        if module.kernel_size[-1] == 1:
            nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
