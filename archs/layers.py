"""Parts that two networks use."""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.layer_norm2d import layer_norm2d
from options.registry import nearest

logger = logging.getLogger("pellucid")

UPSAMPLERS = ("pixelshuffle", "pixelshuffle_direct", "nn+conv")


class LayerNorm2d(nn.Module):
    """Layer norm of each pixel over its channels; the memory format is kept.

    Args:
        dim: number of channels.
        eps: added to the variance.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, c, h, w)"""
        return layer_norm2d(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class Pointwise(nn.Conv2d):
    """A 1x1 convolution, computed as the matrix product that it is: a channels-last image needs no copy for it."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(b, in_channels, h, w) -> (b, out_channels, h, w), channels-last"""
        return F.linear(x.permute(0, 2, 3, 1), self.weight[:, :, 0, 0], self.bias).permute(0, 3, 1, 2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Pointwise":
        super()._apply(fn, recurse)
        # channels-last would give the weight other strides than its gradient has, which distributed training objects to
        self.weight.data = self.weight.data.flatten(1)[:, :, None, None]
        return self


class Upsampler(nn.Module):
    """From features and the image they come from to the larger image.

    A state dict whose ``up_conv`` is for another scale is resampled when it is loaded (the sub-pixels of an output
    channel are a small image), so that a network can start from one of another scale.

    Args:
        dim: channels of the features.
        scale: at least 1; a power of two or 3 for "nn+conv".
        kind: "pixelshuffle" (one shuffle between convolutions, beside the enlarged image), "pixelshuffle_direct" (one
            convolution and a shuffle, beside the enlarged image) or "nn+conv" (nearest-neighbour stages; the image
            joins the features).
        intermediate_dim: channels between, not used by "pixelshuffle_direct".
        channels: of the image.
    """

    def __init__(
        self, dim: int, *, scale: int, kind: str = "pixelshuffle", intermediate_dim: int = 64, channels: int = 3
    ) -> None:
        super().__init__()
        check_integers(upscaling_factor=scale, intermediate_dim=intermediate_dim, in_channels=channels)
        self.scale, self.kind = scale, one_of("upsampler_type", kind, UPSAMPLERS)
        # output channels of up_conv per sub-pixel
        self.group = channels if kind == "pixelshuffle_direct" else intermediate_dim
        if kind == "nn+conv":
            self.f = nn.Sequential(*_nearest_stages(dim, scale, intermediate_dim, channels))
            self.f_img = nn.Sequential(
                nn.Conv2d(channels, dim, 1),
                nn.Conv2d(dim, dim, 7, padding=3),
                nn.LeakyReLU(0.1),
                nn.Conv2d(dim, dim, 1),
            )
        elif kind == "pixelshuffle":
            self.feature_conv = nn.Conv2d(dim, intermediate_dim, 3, padding=1)
            self.up_conv = nn.Conv2d(intermediate_dim, intermediate_dim * scale**2, 3, padding=1)
            self.final_conv = nn.Conv2d(intermediate_dim, channels, 3, padding=1)
        else:
            self.up_conv = nn.Conv2d(dim, channels * scale**2, 3, padding=1)

    def forward(self, features: Tensor, image: Tensor) -> Tensor:
        """(b, dim, h, w), (b, channels, h, w) -> (b, channels, h * scale, w * scale)"""
        if self.kind == "nn+conv":
            return self.f(features + self.f_img(image))
        if self.kind == "pixelshuffle":
            features = F.leaky_relu(self.feature_conv(features), 0.1)
            out = self.final_conv(F.pixel_shuffle(self.up_conv(features), self.scale))
        else:
            out = F.pixel_shuffle(self.up_conv(features), self.scale)
        return out + F.interpolate(image, scale_factor=self.scale, mode="nearest")

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *arguments: Any) -> None:
        for leaf in ("weight", "bias"):
            key = f"{prefix}up_conv.{leaf}"
            source = self._source_scale(state_dict.get(key))
            if source not in (None, self.scale):
                if leaf == "weight":
                    logger.warning("%sup_conv: resampled from scale %d to scale %d", prefix, source, self.scale)
                state_dict[key] = resample_subpixels(state_dict[key], self.group, source, self.scale)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _source_scale(self, parameter: Tensor | None) -> int | None:
        """The scale that a parameter of ``up_conv`` was made for; None if it is no such parameter."""
        if parameter is None or self.kind == "nn+conv" or parameter.ndim not in (1, 4):
            return None
        own = self.up_conv.bias if parameter.ndim == 1 else self.up_conv.weight
        scale = math.isqrt(len(parameter) // self.group)
        fits = scale > 0 and len(parameter) == self.group * scale**2 and parameter.shape[1:] == own.shape[1:]
        return scale if fits else None


def resample_subpixels(parameter: Tensor, group: int, source: int, target: int) -> Tensor:
    """(group * source**2, ...) -> (group * target**2, ...): bilinear on each output channel's grid of sub-pixels."""
    rest = parameter.shape[1:]
    grids = parameter.reshape(group, source, source, -1).permute(3, 0, 1, 2)
    grids = grids.to(torch.promote_types(grids.dtype, torch.float32))
    grids = F.interpolate(grids, size=(target, target), mode="bilinear", align_corners=False)
    return grids.permute(1, 2, 3, 0).reshape(group * target**2, *rest).to(parameter.dtype)


def _nearest_stages(dim: int, scale: int, width: int, channels: int) -> list[nn.Module]:
    """Convolutions between nearest-neighbour enlargements, each by 2, or by 3 once."""
    stages = [3] if scale == 3 else [2] * (scale.bit_length() - 1)
    if math.prod(stages) != scale:
        raise ValueError(f"nn+conv takes an upscaling_factor that is 3 or a power of two, got {scale}")
    layers: list[nn.Module] = [nn.Conv2d(dim, width, 3, padding=1), nn.LeakyReLU(0.1)]
    for factor in stages:
        layers += [nn.Upsample(scale_factor=factor), nn.Conv2d(width, width, 3, padding=1), nn.LeakyReLU(0.1)]
    return [*layers, nn.Conv2d(width, channels, 3, padding=1)]


class WeightCache:
    """Keeps what was last computed from some weights alone, as long as those weights stay what they were.

    For inference: ``get`` computes anew whenever gradients are on, under ``torch.compile``, and for tensors without
    values. A change is told by the storage and the version of each weight; on the CPU the values are compared too, as
    writes through ``.data`` move no version. Elsewhere the owner must ``clear`` after such a write (its ``train`` and
    ``eval`` do). A copy of the owner starts with an empty cache.
    """

    def __init__(self) -> None:
        self._entry: tuple[tuple, Tensor | None, Any] | None = None

    def get(self, weights: Sequence[Tensor], key: object, compute: Callable[[], Any]) -> Any:
        """``compute()``, or what it returned last time for the same ``weights`` and ``key``."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not all(map(_is_plain, weights)):
            return compute()
        stamp = (key, *((w.device, w.dtype, w.data_ptr(), w._version) for w in weights))
        on_cpu = weights[0].device.type == "cpu"
        values = torch.cat([w.detach().flatten() for w in weights]) if on_cpu else None
        entry = self._entry
        if entry is None or entry[0] != stamp or (on_cpu and not torch.equal(entry[1], values)):
            entry = self._entry = (stamp, values, compute())
        return entry[2]

    def clear(self) -> None:
        """Forget everything."""
        self._entry = None

    def __reduce__(self) -> tuple:
        return WeightCache, ()


def _is_plain(weight: Tensor) -> bool:
    """True for a tensor with values of its own whose versions are counted."""
    return type(weight) in (Tensor, nn.Parameter) and weight.device.type != "meta" and not weight.is_inference()


def one_of(argument: str, value: Any, known: Collection) -> Any:
    """``value``, which must be one of ``known``.

    Raises:
        ValueError: it is not; the nearest and all known values are in the message.
    """
    if value not in known:
        hint = nearest(value, [name for name in known if name is not None])
        raise ValueError(f"unknown {argument} {value!r}{hint} Known: {', '.join(str(name) for name in known)}")
    return value


def check_integers(*, least: int = 1, **numbers: int) -> None:
    """Raise ValueError for a number that is no integer of at least ``least``; its name is in the message."""
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {number!r}")


def per_layer(
    argument: str, value: Any, layers: int | None = None, *, optional: bool = False, least: int = 1
) -> list[Any]:
    """One integer (or None, if ``optional``) per layer; a single value stands for all layers.

    Args:
        argument: its name in messages.
        value: one entry, or a sequence of them.
        layers: their number; None if ``value`` tells it.
        optional: whether None is an entry.
        least: what an integer is at least.

    Raises:
        ValueError: a list of another length, or an entry that is no such integer.
    """
    values = list(value) if isinstance(value, Sequence) else [value] * (layers or 1)
    if not values or len(values) != (layers or len(values)):
        raise ValueError(f"{argument} must have one entry per layer ({layers or 'at least 1'}), got {value!r}")
    for i, entry in enumerate(values):
        if not (optional and entry is None):
            check_integers(least=least, **{f"{argument}[{i}]": entry})
    return values
