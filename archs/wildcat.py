"""SST and MB-TaylorFormer with attention from a coreset of the keys (WildCat).

Papers: Schröder and Mackey, "WildCat: Near-Linear Attention in Theory and Practice", https://arxiv.org/abs/2602.10056,
and those of :mod:`archs.sst` and :mod:`archs.mb_taylorformer`, whose weights load as they are.
Differs from the authors' code, which is for language models and image generators: keys are chosen from tiles of the
image; windows and images of any size; an image's result does not depend on its batch; training.
``set_attention`` switches a network between the coreset and what it is compared with, also by the option
``network_g.attention``.

The gradients take the choice of the keys and their weights for constants. A network that learns by them is trained with
noise: each step draws keys of its own.
"""

import math
from collections.abc import Sequence

from torch import nn

from archs.layers import check_integers, one_of, per_layer
from archs.mb_taylorformer import PRESETS, STAGES, MBTaylorFormer
from archs.sst import SST, RPBAttention, WindowAttention
from archs.taylor_blocks import Attention
from archs.wildcat_attention import TokenCore, WindowCore
from options.registry import ARCHS

SST_ATTENTION = ("coreset", "exact", "mean")
TAYLOR_ATTENTION = ("coreset", "exact", "taylor")

_B = PRESETS["MB-TaylorFormer-B"]


@ARCHS.register()
class WildCatSST(SST):
    """SST that attends from a coreset in its large windows, or over the whole image.

    Args:
        window_sizes: as in SST; 0 stands for the whole image, whose positions are stretched to its height and width,
            so that a layer of any window may become one of the image with the same weights.
        dim, num_heads, n_blocks, ranks, exp_ratio, attn_type, rib_hidden_dim, rib_n_freqs, upscaling_factor,
            upsampler_type, gate_type, intermediate_dim, in_channels, attention_dtype: as in SST. ("ranks" are those of
            the bias.)
        rank: keys of the coreset of a window or image, one number for each entry of ``window_sizes`` or one for all;
            where it is no less than their number, attention is exact.
        bins: tiles that they are chosen from separately, the same way; at most ``rank``, for few keys in each tile
            serve badly: a quarter of it or less is better.
        threshold: windows of this side and larger ones attend from a coreset, and images of ``threshold**2`` pixels and
            more; the others exactly.
        fallback_gamma: heads whose logits spread more than this (gamma = largest logit over the logarithm of the number
            of keys) attend exactly; None for none. A number is refused under ``torch.compile``.
        attention: "coreset"; "exact" for exact attention everywhere, which is SST itself; or "mean", which answers the
            mean of the values where the threshold asks for a coreset: to see how much attention matters there.

    Raises:
        ValueError: an argument out of its range, lists of different lengths, or a table of positions ("RPB") or shifted
            windows (one size of window throughout) where a coreset or the mean is asked for.
    """

    _least_window = 0

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
        rank: int | Sequence[int] = 256,
        bins: int | Sequence[int] = 16,
        threshold: int = 48,
        fallback_gamma: float | None = None,
        attention: str = "coreset",
    ) -> None:
        super().__init__(
            dim=dim,
            window_sizes=window_sizes,
            num_heads=num_heads,
            n_blocks=n_blocks,
            ranks=ranks,
            exp_ratio=exp_ratio,
            attn_type=attn_type,
            rib_hidden_dim=rib_hidden_dim,
            rib_n_freqs=rib_n_freqs,
            upscaling_factor=upscaling_factor,
            upsampler_type=upsampler_type,
            gate_type=gate_type,
            intermediate_dim=intermediate_dim,
            in_channels=in_channels,
            attention_dtype=attention_dtype,
        )
        common = _common(threshold, fallback_gamma) | {"attention": one_of("attention", attention, SST_ATTENTION)}
        for block in self.body[:-2]:
            coresets = _coresets(rank, bins, len(block) - 1)
            for layer, coreset in zip(block[:-1], coresets, strict=True):
                attn = layer.attn
                attn.core = WindowCore(window=attn.window, heads=attn.heads, **coreset, **common)
        self.set_attention(attention)

    def set_attention(self, mode: str) -> None:
        """Attend by "coreset", "exact" or "mean" from now on; see the argument ``attention``.

        Raises:
            ValueError: another mode, or one that a layer cannot follow; nothing is changed then.
        """
        one_of("attention", mode, SST_ATTENTION)
        layers = [module for module in self.modules() if isinstance(module, WindowAttention)]
        for attn in layers:
            _check_window(attn, mode)
        for attn in layers:
            attn.core.attention = mode


@ARCHS.register()
class WildCatMBTaylorFormer(MBTaylorFormer):
    """MB-TaylorFormer, version 1, with softmax attention from a coreset in place of the Taylor expansion.

    The weights of the plain network fit as they are: its expansion is the first order of this softmax, and at its
    length of queries and keys, 0.5, near to it. Lengths that the expansion could not follow are what is to be gained.

    Args:
        inp_channels, dim, num_blocks, heads, num_path, bias, dual_pixel_task, offset_clamp, model_name, out_channels,
            num_refinement_blocks, ffn_expansion_factor, LayerNorm_type: as in MBTaylorFormer.
        normalise: bring queries and keys to the length ``qk_norm``; otherwise they stay what they are, and logits are
            divided by the root of their size. The gate sees them at that length in any case.
        qk_norm: that length.
        learned_temperature: learn a factor of the logits of each head, beginning at 1. The parameter
            ``...attn.core.logit_scale`` is the only one that the plain network lacks; its files load all the same.
        rank: keys of the coreset at each of the four levels, or one number for all. They are for an image as a whole:
            much larger ones than in training want more.
        bins: tiles of the image that they are chosen from separately, the same way; at most ``rank``.
        threshold: least number of pixels of a level for which a coreset is made; fewer attend exactly.
        fallback_gamma: as in WildCatSST.
        attention: "coreset"; "exact" for the exact softmax; or "taylor" for the plain network, which has no temperature
            and no other lengths: it is refused with those. The first two compute the attention of the whole image at
            once, not in tiles, which takes more memory on large pictures.

    Raises:
        ValueError: an argument out of its range, or "taylor" with ``normalise`` off or a learned temperature.
    """

    def __init__(
        self,
        *,
        inp_channels: int = 3,
        dim: Sequence[int] = _B["dim"],
        num_blocks: Sequence[int] = _B["num_blocks"],
        heads: Sequence[int] = _B["heads"],
        num_path: Sequence[int] = _B["num_path"],
        bias: bool = False,
        dual_pixel_task: bool = False,
        qk_norm: float = 0.5,
        offset_clamp: Sequence[float] | None = (-3, 3),
        model_name: int | str | None = None,
        out_channels: int | None = None,
        num_refinement_blocks: int | None = None,
        ffn_expansion_factor: float | None = None,
        LayerNorm_type: str | None = None,  # noqa: N803
        normalise: bool = True,
        learned_temperature: bool = False,
        rank: int | Sequence[int] = (128, 128, 64, 64),
        bins: int | Sequence[int] = (16, 16, 4, 4),
        threshold: int = 1024,
        fallback_gamma: float | None = None,
        attention: str = "coreset",
    ) -> None:
        super().__init__(
            inp_channels=inp_channels,
            dim=dim,
            num_blocks=num_blocks,
            heads=heads,
            num_path=num_path,
            bias=bias,
            dual_pixel_task=dual_pixel_task,
            qk_norm=qk_norm,
            offset_clamp=offset_clamp,
            model_name=model_name,
            out_channels=out_channels,
            num_refinement_blocks=num_refinement_blocks,
            ffn_expansion_factor=ffn_expansion_factor,
            LayerNorm_type=LayerNorm_type,
        )
        self.normalise, self.learned_temperature = normalise, learned_temperature
        common = _common(threshold, fallback_gamma) | {"attention": one_of("attention", attention, TAYLOR_ATTENTION)}
        common |= {"eps": 1e-6, "norm": float(qk_norm) if normalise else None}
        coresets = _coresets(rank, bins, 4)
        for name, level, _ in STAGES:
            for attn in _attentions(getattr(self, name)):
                own = {"heads": attn.heads, "learned_temperature": learned_temperature, **coresets[level]}
                attn.core = TokenCore(**own, **common)
        self.set_attention(attention)

    def set_attention(self, mode: str) -> None:
        """Attend by "coreset", "exact" or "taylor" from now on; see the argument ``attention``.

        Raises:
            ValueError: another mode, or "taylor" in a network that has more than the Taylor expansion knows of.
        """
        one_of("attention", mode, TAYLOR_ATTENTION)
        own = {"normalise=false": not self.normalise, "learned_temperature=true": self.learned_temperature}
        given = [option for option, there in own.items() if there]
        if mode == "taylor" and given:
            raise ValueError(
                f"attention=taylor is the plain network, which does nothing by {' and '.join(given)}; leave that out, "
                "or take attention=exact to compare with"
            )
        for attn in _attentions(self):
            attn.core.attention = mode


def _attentions(module: nn.Module) -> list[Attention]:
    return [part for part in module.modules() if isinstance(part, Attention)]


def _coresets(rank: int | Sequence[int], bins: int | Sequence[int], layers: int) -> list[dict[str, int]]:
    """Rank and bins of each layer."""
    ranks, bins = per_layer("rank", rank, layers), per_layer("bins", bins, layers)
    for i, (keys, tiles) in enumerate(zip(ranks, bins, strict=True)):
        if tiles > keys:
            raise ValueError(f"bins[{i}]={tiles} must not be above rank[{i}]={keys}: each tile gives one key at least")
    return [{"rank": keys, "bins": tiles} for keys, tiles in zip(ranks, bins, strict=True)]


def _common(threshold: int, fallback_gamma: float | None) -> dict[str, int | float | None]:
    check_integers(threshold=threshold)
    number = isinstance(fallback_gamma, int | float) and not isinstance(fallback_gamma, bool)
    if fallback_gamma is not None and not (number and 0 < fallback_gamma < math.inf):
        raise ValueError(f"fallback_gamma must be a positive number or None, got {fallback_gamma!r}")
    return {"threshold": threshold, "fallback_gamma": fallback_gamma}


def _check_window(attn: WindowAttention, mode: str) -> None:
    """Raise ValueError where a layer cannot attend by ``mode``."""
    window, table = attn.window, isinstance(attn, RPBAttention)
    if table and window == 0:
        raise ValueError("attn_type=RPB has a table for windows, and none for a whole image (0 in window_sizes)")
    if mode == "exact" or window < attn.core.threshold:
        return
    way_out = f"take attention=exact, or a threshold above {window} for exact attention in these windows"
    if table:
        raise ValueError(
            f"attention={mode} takes no table of positions (attn_type=RPB) in windows of {window}; {way_out}, or RIB"
        )
    if attn.shift:
        raise ValueError(
            f"attention={mode} takes no shifted windows, which window_sizes of {window} throughout ask for; {way_out}"
        )
