"""MB-TaylorFormer, versions 1 and 2: multi-branch U-nets with linear attention by Taylor expansion.

Papers: Qiu et al., "MB-TaylorFormer: Multi-branch Efficient Transformer Expanded by Taylor Formula for Image Dehazing",
ICCV 2023 (fig. 2), and Jin et al., "MB-TaylorFormer V2: Improved Multi-branch Linear Transformer Expanded by Taylor
Formula for Image Restoration", TPAMI 2025, https://arxiv.org/abs/2501.04486.
Published weights load as they are; files of V2 without ``one_M`` too.
Differs from the authors' code: sizes are checked; channels-last inside; images of any number of channels; any number of
heads; parts as in :mod:`archs.taylor_blocks`.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from archs.layers import check_integers
from archs.taylor_blocks import EXPANSION, SKFF, Conv, Form, PatchEmbedding, TaylorBlock
from archs.taylor_parts import separable
from kernels.tiles import Part, in_tiles
from options.registry import ARCHS

logger = logging.getLogger("pellucid")

_B = {"dim": (24, 48, 72, 96), "num_blocks": (2, 3, 3, 4), "heads": (1, 2, 4, 8), "num_path": (2, 2, 2, 2)}
_L = {**_B, "num_blocks": (4, 6, 6, 8), "num_path": (2, 3, 3, 3)}

# the published networks
PRESETS = {
    "MB-TaylorFormer-B": {"type": "MBTaylorFormer", **_B},
    "MB-TaylorFormer-L": {"type": "MBTaylorFormer", **_L},
    "MB-TaylorFormerV2-B": {"type": "MBTaylorFormerV2", **_B},
    "MB-TaylorFormerV2-L": {"type": "MBTaylorFormerV2", **_L},
    "MB-TaylorFormerV2-XL": {"type": "MBTaylorFormerV2", **_L, "dim": (28, 56, 112, 160)},
}

# name of each stage, its level, and the level whose width it has: what is joined at full size has twice the channels
STAGES = (
    ("encoder_level1", 0, 0),
    ("encoder_level2", 1, 1),
    ("encoder_level3", 2, 2),
    ("latent", 3, 3),
    ("decoder_level3", 2, 2),
    ("decoder_level2", 1, 1),
    ("decoder_level1", 0, 1),
    ("refinement", 0, 1),
)


class _Down(nn.Module):
    """Half the size: depthwise 3x3 and 1x1 convolution, then pixel unshuffle."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Conv(in_channels, in_channels, 3, groups=in_channels), Conv(in_channels, out_channels // 4, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(b, in_channels, h, w) -> (b, out_channels, h / 2, w / 2)"""
        return F.pixel_unshuffle(separable(x, *self.body), 2).contiguous(memory_format=torch.channels_last)


class _Up(nn.Module):
    """Twice the size: depthwise 3x3 and 1x1 convolution, then pixel shuffle."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Conv(in_channels, in_channels, 3, groups=in_channels), Conv(in_channels, 4 * out_channels, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(b, in_channels, h, w) -> (b, out_channels, 2 h, 2 w)"""
        return F.pixel_shuffle(separable(x, *self.body), 2).contiguous(memory_format=torch.channels_last)


class _Chain(nn.Module):
    """The patch embeddings of a stage: each takes what the one before gives."""

    def __init__(self, dim: int, branches: int, clamp: tuple[float, float] | None) -> None:
        super().__init__()
        self.patch_embeds = nn.ModuleList(
            nn.ModuleDict({"patch_conv": PatchEmbedding(dim, clamp=clamp)}) for _ in range(branches)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """(b, dim, h, w) -> the same for each branch"""
        maps = []
        for embedding in self.patch_embeds:
            x = embedding["patch_conv"](x)
            maps.append(x)
        return maps


class _Blocks(nn.Module):
    """A stack of blocks, of one branch (V1) or of all (V2)."""

    def __init__(self, *, dim: int, heads: int, depth: int, branches: int, form: Form) -> None:
        super().__init__()
        self.MHCA_layers = nn.ModuleList(
            TaylorBlock(dim=dim, heads=heads, branches=branches, form=form) for _ in range(depth)
        )
        self.checkpointing = False

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        """(b, dim, h, w) -> (b, dim, h, w)"""
        for block in self.MHCA_layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, branch, use_reentrant=False)
            else:
                x = block(x, branch)
        return x


class _Stage(nn.Module):
    """Blocks of each branch, and the fusion of the branches."""

    def __init__(self, *, dim: int, heads: int, depth: int, branches: int, form: Form) -> None:
        super().__init__()
        blocks = {"dim": dim, "heads": heads, "depth": depth, "form": form}
        self.branches = branches
        if form.focus_power is None:
            self.mhca_blks = nn.ModuleList(_Blocks(branches=0, **blocks) for _ in range(branches))
        else:
            self.mhca_blk = _Blocks(branches=branches, **blocks)
        self.aggregate = SKFF(dim, branches)

    def forward(self, maps: list[Tensor], shortcut: Tensor | None) -> Tensor:
        """(b, dim, h, w) of each branch, and what is added to the result -> (b, dim, h, w); empties the list"""
        results = []
        for i in range(self.branches):
            # let go of what was consumed: at full size each map is large
            x = maps.pop(0)
            results.append(self.mhca_blks[i](x) if hasattr(self, "mhca_blks") else self.mhca_blk(x, i))
            del x
        return self.aggregate(results, shortcut)


class _TaylorUNet(nn.Module):
    """What both versions share: four levels, a latent stage below and a refinement at the end."""

    scale = 1
    multiple_of = tile_multiple = 8
    minimum = 8
    # attention and fusion look at the whole image
    halo = None

    def __init__(
        self,
        *,
        form: Form,
        first_shortcut: bool,
        image: tuple[int, bool],
        levels: tuple[Sequence[int], ...],
        bias: bool,
        offset_clamp: Sequence[float] | None,
    ) -> None:
        super().__init__()
        inp_channels, dual_pixel_task = image
        check_integers(inp_channels=inp_channels)
        names = ("dim", "num_blocks", "heads", "num_path")
        dim, num_blocks, heads, num_path = map(_per_level, names, levels)
        _check_dims(dim, heads)
        clamp = _limits(offset_clamp)
        self.in_channels = inp_channels
        # two views of a dual-pixel sensor make one image
        self.out_channels = 3 if dual_pixel_task else inp_channels
        self.first_shortcut, self.dual_pixel_task = first_shortcut, dual_pixel_task
        self.patch_embed = nn.ModuleDict({"proj": Conv(inp_channels, dim[0], 3)})
        for name, level, width in STAGES:
            settings = {"dim": dim[width], "branches": num_path[level]}
            setattr(self, f"patch_embed_{name}", _Chain(dim[width], num_path[level], clamp))
            setattr(self, name, _Stage(heads=heads[level], depth=num_blocks[level], form=form, **settings))
        self.down1_2, self.down2_3, self.down3_4 = (_Down(dim[i], dim[i + 1]) for i in range(3))
        self.up4_3, self.up3_2, self.up2_1 = (_Up(dim[i], dim[i - 1]) for i in (3, 2, 1))
        self.reduce_chan_level3 = nn.Sequential(Conv(2 * dim[2], dim[2], 1, bias=bias))
        self.reduce_chan_level2 = nn.Sequential(Conv(2 * dim[1], dim[1], 1, bias=bias))
        if dual_pixel_task:
            self.skip_conv = Conv(dim[0], dim[1], 1, bias=bias)
        self.output = nn.Sequential(Conv(dim[1], self.out_channels, 3))

    def forward(self, x: Tensor) -> Tensor:
        """(b, inp_channels, h, w) -> (b, out_channels, h, w); RGB in 0..1, h and w multiples of 8"""
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"x must be (b, {self.in_channels}, h, w), got {tuple(x.shape)}")
        if any(side % self.multiple_of or side < self.minimum for side in x.shape[2:]):
            raise ValueError(f"height and width must be multiples of {self.multiple_of}, got {tuple(x.shape[2:])}")
        features = self.patch_embed["proj"](x.contiguous(memory_format=torch.channels_last))
        out = self._decode(*self._encode(features))
        if self.dual_pixel_task:
            return self.output(out + self.skip_conv(features)).contiguous()
        return (self.output(out) + x).contiguous()

    def _encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Features of the image -> the results of the levels, finest first, and the latent map"""
        first = self._stage("encoder_level1", x, shortcut=self.first_shortcut)
        second = self._stage("encoder_level2", self.down1_2(first))
        third = self._stage("encoder_level3", self.down2_3(second))
        return first, second, third, self._stage("latent", self.down3_4(third))

    def _decode(self, first: Tensor, second: Tensor, third: Tensor, latent: Tensor) -> Tensor:
        x = _joined(self.up4_3(latent), third, self.reduce_chan_level3[0])
        del latent, third
        x = _joined(self.up3_2(self._stage("decoder_level3", x)), second, self.reduce_chan_level2[0])
        del second
        x = self.up2_1(self._stage("decoder_level2", x))
        x = torch.cat([x, first], dim=1)
        del first
        x = self._stage("decoder_level1", x)
        return self._stage("refinement", x)

    def _stage(self, name: str, x: Tensor, *, shortcut: bool = True) -> Tensor:
        maps = getattr(self, f"patch_embed_{name}")(x)
        return getattr(self, name)(maps, x if shortcut else None)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the input of each block for the backward pass and compute the rest again."""
        for blocks in (module for module in self.modules() if isinstance(module, _Blocks)):
            blocks.checkpointing = enable


@ARCHS.register()
class MBTaylorFormer(_TaylorUNet):
    """MB-TaylorFormer, version 1: the gate multiplies, first-order attention.

    Args:
        inp_channels: of the image, in and out.
        dim: channels of the four levels, multiples of 4; the second must be twice the first.
        num_blocks: blocks of each branch at each level; the refinement has those of the first level.
        heads: of the attention at each level, divisors of ``dim``.
        num_path: branches at each level.
        bias: of the 1x1 convolutions that join two levels.
        dual_pixel_task: the image is a pair of views (6 channels) and the result one RGB image, not a correction of it.
        qk_norm: length of queries and keys.
        offset_clamp: limits of the sampling offsets in pixels; None for none.
        model_name, out_channels, num_refinement_blocks, ffn_expansion_factor, LayerNorm_type: in the published files
            and without effect, as in the published code; a notice says so where another value was meant.

    Raises:
        ValueError: an argument out of its range.
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
    ) -> None:
        if not 0 < qk_norm < float("inf"):
            raise ValueError(f"qk_norm must be a positive number, got {qk_norm}")
        super().__init__(
            form=Form(norm=float(qk_norm), eps=1e-6, focus_power=None, gate_mode="multiply"),
            first_shortcut=True,
            image=(inp_channels, dual_pixel_task),
            levels=(dim, num_blocks, heads, num_path),
            bias=bias,
            offset_clamp=offset_clamp,
        )
        given = {"model_name": (model_name, None), "out_channels": (out_channels, self.out_channels)}
        given |= _unused(num_refinement_blocks, num_blocks[0], ffn_expansion_factor, LayerNorm_type)
        _tell_unused("MBTaylorFormer", given)


@ARCHS.register()
class MBTaylorFormerV2(_TaylorUNet):
    """MB-TaylorFormer, version 2: a focused second term in the attention, and a gate of the values that is added.

    Args:
        focus_power: power of the focused term: 8 in the published repository and its weights, 4 in its pre-release.
        inp_channels, dim, num_blocks, heads, num_path, bias, dual_pixel_task, offset_clamp: as in MBTaylorFormer.
        qk_norm, N, path_emb_dim, model_name, out_channels, num_refinement_blocks, ffn_expansion_factor, LayerNorm_type:
            without effect, as in the published code, whose queries and keys have length 1.

    Raises:
        ValueError: an argument out of its range.
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
        focus_power: int = 8,
        offset_clamp: Sequence[float] | None = (-3, 3),
        model_name: int | str | None = None,
        out_channels: int | None = None,
        num_refinement_blocks: int | None = None,
        ffn_expansion_factor: float | None = None,
        LayerNorm_type: str | None = None,  # noqa: N803
        qk_norm: float | None = None,
        N: int | None = None,  # noqa: N803
        path_emb_dim: int | None = None,
    ) -> None:
        check_integers(least=2, focus_power=focus_power)
        super().__init__(
            form=Form(norm=1.0, eps=1e-8, focus_power=focus_power, gate_mode="add"),
            first_shortcut=False,
            image=(inp_channels, dual_pixel_task),
            levels=(dim, num_blocks, heads, num_path),
            bias=bias,
            offset_clamp=offset_clamp,
        )
        given = {"model_name": (model_name, None), "out_channels": (out_channels, self.out_channels)}
        given |= _unused(num_refinement_blocks, num_blocks[0], ffn_expansion_factor, LayerNorm_type)
        given |= {"qk_norm": (qk_norm, 1), "N": (N, None), "path_emb_dim": (path_emb_dim, None)}
        _tell_unused("MBTaylorFormerV2", given)


ARCHS.alias(
    "MB_TaylorFormer",
    "MBTaylorFormer",
    "network_g.type MB_TaylorFormer is taken for version 1; the published files of version 2 carry the same name: for "
    "those set network_g.type=MBTaylorFormerV2",
)


def _joined(up: Tensor, skip: Tensor, conv: nn.Conv2d) -> Tensor:
    """1x1 convolution of two maps one after the other: (b, c, h, w) twice -> (b, c, h, w)"""

    def run(part: Part, maps: Sequence[Tensor], images: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
        return F.conv2d(torch.cat(list(maps), dim=1), *shared)

    weights = [w for w in (conv.weight, conv.bias) if w is not None]
    return in_tiles(run, [up, skip], [], weights, halo=0, width=2 * conv.in_channels)


def _per_level(name: str, values: Sequence[int]) -> list[int]:
    values = list(values) if isinstance(values, Sequence) else [values]
    if len(values) != 4:
        raise ValueError(f"{name} must have one entry for each of the 4 levels, got {values}")
    check_integers(**{f"{name}[{i}]": value for i, value in enumerate(values)})
    return values


def _check_dims(dim: Sequence[int], heads: Sequence[int]) -> None:
    if dim[1] != 2 * dim[0]:
        raise ValueError(f"dim[1] must be twice dim[0], as the finest maps are joined at that width, got {list(dim)}")
    for i, name in enumerate(f"dim[{i}]" for i in range(4)):
        if dim[i] % 4:
            raise ValueError(f"{name} must be a multiple of 4 (pixel unshuffle), got {dim[i]}")
        if dim[i] % heads[i]:
            raise ValueError(f"heads[{i}] must divide {name}={dim[i]}, got {heads[i]}")


def _limits(clamp: Sequence[float] | None) -> tuple[float, float] | None:
    if clamp is None or clamp == []:
        return None
    bounds = list(clamp) if isinstance(clamp, Sequence) else []
    if len(bounds) != 2 or not -math.inf < bounds[0] <= bounds[1] < math.inf:
        raise ValueError(f"offset_clamp must be [low, high] in pixels, both finite, or None, got {clamp!r}")
    return float(bounds[0]), float(bounds[1])


def _unused(refinement: Any, blocks: int, expansion: Any, norm: Any) -> dict[str, tuple[Any, Any]]:
    """Option -> (what was given, what is done anyway)."""
    return {
        "num_refinement_blocks": (refinement, blocks),
        "ffn_expansion_factor": (expansion, EXPANSION),
        "LayerNorm_type": (norm, "BiasFree"),
    }


def _tell_unused(network: str, options: dict[str, tuple[Any, Any]]) -> None:
    found = [
        f"{name} {given}" + (f" (it is {done})" if done is not None else "")
        for name, (given, done) in options.items()
        if given is not None and given != done
    ]
    if found:
        logger.warning(f"{network}: without effect, as in the published code: {', '.join(found)}")
