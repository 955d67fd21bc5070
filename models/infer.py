"""A trained network over pictures of any size: padding, tiles, self-ensemble, and the way to 8 bits.

A network says what it needs by its attributes, each with a default: ``scale`` (1), ``multiple_of`` (1) and ``minimum``
(1) for the sides of its input, ``halo`` (None, that is global: how far an output pixel looks), ``tile_multiple`` (1:
where tiles start), ``in_channels``. Nothing here knows a network by name.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from options.errors import UserError

logger = logging.getLogger("pellucid")

SMALLEST_TILE = 16


def to_uint8(image: Tensor) -> np.ndarray:
    """A picture as 8-bit samples: clamped to 0..1, times 255, rounded half to even.

    Args:
        image: RGB ``(c, h, w)`` or ``(1, c, h, w)``, 0..1, any float dtype.

    Returns:
        ``(h, w, c)``, uint8.

    Raises:
        ValueError: another shape, or a value that is NaN or infinite, which would come out black or white.
    """
    if image.dim() == 4 and image.shape[0] == 1:
        image = image[0]
    if image.dim() != 3:
        raise ValueError(f"a picture must be (c, h, w) or (1, c, h, w), got {tuple(image.shape)}")
    image = image.detach().float()
    broken = int((~torch.isfinite(image)).sum())
    if broken:
        raise ValueError(f"{broken} of {image.numel()} values of the picture are NaN or infinite")
    return image.clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy()


@torch.inference_mode()
def restore(
    network: nn.Module, lq: Tensor, *, tile: int | None = None, overlap: int | None = None, self_ensemble: bool = False
) -> Tensor:
    """Run a network over pictures of any size.

    The picture is continued to the right and below by reflection (by its edge where it is too small for that) to a size
    that the network takes, and the result cut back. Tiles of a network with a finite ``halo`` give what the whole
    picture gives when they overlap by twice the halo, which is the default where the tile has room for it; otherwise
    neighbours are blended. When the memory of the device does not suffice, (smaller) tiles are tried, with a notice.

    Args:
        network: in eval mode for a reproducible result; its mode is left as it is.
        lq: ``(b, c, h, w)``, float, on any device: pieces travel to the network's device, the result is put together
            on that of ``lq``.
        tile: side in input pixels of what the network sees at once; brought to a size that the network takes. None
            for the whole picture.
        overlap: input pixels that neighbouring tiles share at least; None for a choice by the network's ``halo``.
        self_ensemble: the mean over the 8 flips and transpositions.

    Returns:
        ``(b, c, h * scale, w * scale)``, neither clamped nor rounded.

    Raises:
        ValueError: the input is not what the network takes, the overlap leaves nothing of the tile, or the network
            returns another size than its ``scale`` says.
        UserError: even the smallest tile does not fit into memory.
    """
    facts = _Facts.of(network)
    if lq.dim() != 4 or not lq.is_floating_point() or lq.numel() == 0:
        raise ValueError(f"lq must be (b, c, h, w) of a float dtype, got {lq.dtype} {tuple(lq.shape)}")
    if facts.in_channels not in (None, lq.shape[1]):
        raise ValueError(f"the network takes {facts.in_channels} channels, lq has {lq.shape[1]}: {tuple(lq.shape)}")
    if tile is not None and tile < 1:
        raise ValueError(f"tile must be at least 1, got {tile}")
    if overlap is not None and (overlap < 0 or (tile is not None and overlap >= tile)):
        raise ValueError(f"overlap must be at least 0 and below the tile's {tile}, got {overlap}")
    return _within_memory(network, lq, facts, tile, overlap, self_ensemble)


@dataclass(frozen=True)
class _Facts:
    """What a network says about itself."""

    scale: int
    multiple_of: int
    minimum: int
    halo: int | None
    tile_multiple: int
    in_channels: int | None
    device: torch.device | None

    @classmethod
    def of(cls, network: nn.Module) -> "_Facts":
        # DDP hides the attributes of what it wraps
        stated = network if hasattr(network, "scale") else getattr(network, "module", network)
        parameter = next(network.parameters(), None)
        return cls(
            scale=getattr(stated, "scale", 1),
            multiple_of=getattr(stated, "multiple_of", 1),
            minimum=getattr(stated, "minimum", 1),
            halo=getattr(stated, "halo", None),
            tile_multiple=getattr(stated, "tile_multiple", 1),
            in_channels=getattr(stated, "in_channels", None),
            device=None if parameter is None else parameter.device,
        )

    def fit(self, side: int) -> int:
        """The smallest side that the network takes and ``side`` pixels fit into."""
        return math.ceil(max(side, self.minimum) / self.multiple_of) * self.multiple_of


def _within_memory(
    network: nn.Module, lq: Tensor, facts: _Facts, tile: int | None, overlap: int | None, self_ensemble: bool
) -> Tensor:
    """Restore, in ever smaller tiles while the device is out of memory."""
    first, smallest, longest = tile, facts.fit(SMALLEST_TILE), max(lq.shape[-2:])
    while True:
        try:
            if self_ensemble:
                result = _mean_of_views(network, lq, facts, tile, overlap)
            else:
                result = _restore_view(network, lq, facts, tile, overlap)
        except torch.OutOfMemoryError as error:
            reason = str(error).split(". ")[0]
        else:
            if tile != first:
                whole = f"the whole picture ({lq.shape[-2]} x {lq.shape[-1]})" if first is None else f"tiles of {first}"
                logger.warning(f"out of memory with {whole}; restored in tiles of {tile}. Set tile to try less at once")
            return result
        # only here, past the except block, are the tensors of the failed attempt released
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        side = min(longest, tile or longest)
        if side <= smallest:
            raise UserError(f"out of memory with tiles of {side} pixels, and smaller ones make no sense: {reason}")
        tile = max(smallest, side // 2 // facts.multiple_of * facts.multiple_of)
        overlap = None if overlap is None or overlap > tile // 2 else overlap


def _restore_view(network: nn.Module, lq: Tensor, facts: _Facts, tile: int | None, overlap: int | None) -> Tensor:
    h, w = lq.shape[-2:]
    padded = _continued(lq, facts.fit(h), facts.fit(w))
    if tile is None or max(padded.shape[-2:]) <= tile:
        result = _run(network, padded, facts)
    else:
        result = _tiled(network, padded, facts, tile, overlap)
    return result[..., : h * facts.scale, : w * facts.scale]


def _mean_of_views(network: nn.Module, lq: Tensor, facts: _Facts, tile: int | None, overlap: int | None) -> Tensor:
    """The mean over the 8 flips and transpositions, each undone after the network."""
    total: Tensor | None = None
    for transposed in (False, True):
        view = lq.mT if transposed else lq
        for axes in ((), (-1,), (-2,), (-2, -1)):
            result = _restore_view(network, view.flip(axes).contiguous(), facts, tile, overlap).flip(axes)
            wide = (result.mT if transposed else result).to(torch.promote_types(result.dtype, torch.float32))
            total = wide if total is None else total + wide
    assert total is not None
    return (total / 8).to(result.dtype)


def _continued(image: Tensor, height: int, width: int) -> Tensor:
    """(b, c, h, w) -> (b, c, height, width), to the right and below"""
    below, right = height - image.shape[-2], width - image.shape[-1]
    if below:
        image = F.pad(image, (0, 0, 0, below), mode="reflect" if below < image.shape[-2] else "replicate")
    if right:
        image = F.pad(image, (0, right, 0, 0), mode="reflect" if right < image.shape[-1] else "replicate")
    return image


def _run(network: nn.Module, piece: Tensor, facts: _Facts) -> Tensor:
    """One call of the network; the result on the device of ``piece``."""
    result = network(piece if facts.device is None else piece.to(facts.device))
    expected = (piece.shape[0], piece.shape[2] * facts.scale, piece.shape[3] * facts.scale)
    if (result.shape[0], *result.shape[2:]) != expected:
        shapes = f"{tuple(piece.shape)} gave {tuple(result.shape)}"
        raise ValueError(f"the network's result has not the size that its scale of {facts.scale} says: {shapes}")
    return result.to(piece.device)


def _tiled(network: nn.Module, image: Tensor, facts: _Facts, tile: int, overlap: int | None) -> Tensor:
    """Restore tile by tile; each pixel is the mean of the tiles that show it, weighted by how far inside it lies."""
    rows = _spans(image.shape[-2], facts, tile, overlap)
    columns = _spans(image.shape[-1], facts, tile, overlap)
    total: Tensor | None = None
    for top, bottom, share_y in _shares(rows, facts):
        for left, right, share_x in _shares(columns, facts):
            result = _run(network, image[..., top:bottom, left:right], facts)
            if total is None:
                h, w = (side * facts.scale for side in image.shape[-2:])
                # half precision would round the sum
                dtype = torch.promote_types(result.dtype, torch.float32)
                total = torch.zeros(*result.shape[:2], h, w, dtype=dtype, device=image.device)
            share = (share_y[:, None] * share_x[None, :]).to(total)
            s = facts.scale
            total[..., top * s : bottom * s, left * s : right * s] += result * share
    assert total is not None
    return total.to(result.dtype)


def _spans(length: int, facts: _Facts, tile: int, overlap: int | None) -> list[tuple[int, int]]:
    """Where the tiles of one axis begin and end.

    They start at multiples of ``tile_multiple`` where the tile has room for that beside the overlap.
    """
    step = math.lcm(facts.multiple_of, facts.tile_multiple)
    tile = max(facts.fit(1), tile // step * step or tile // facts.multiple_of * facts.multiple_of)
    if overlap is None:
        overlap = _default_overlap(facts, tile)
    if length <= tile:
        return [(0, length)]
    if tile - overlap < step:
        step = facts.multiple_of
    if tile - overlap < step:
        raise ValueError(f"an overlap of {overlap} leaves less than {step} pixels of tiles of {tile}")
    last = math.ceil((length - tile) / step) * step
    if length - last < facts.minimum:
        last -= step
    starts = [*range(0, last, (tile - overlap) // step * step), last]
    return [(start, length if start == last else start + tile) for start in starts]


def _default_overlap(facts: _Facts, tile: int) -> int:
    if facts.halo is not None and 2 * facts.halo <= tile // 2:
        return 2 * facts.halo
    return min(tile // 4, tile - facts.multiple_of)


def _shares(spans: list[tuple[int, int]], facts: _Facts) -> Iterator[tuple[int, int, Tensor]]:
    """Each tile of one axis with its share in every output pixel; the shares of a pixel add up to 1."""
    s = facts.scale
    weights, total = [], torch.zeros(spans[-1][1] * s, dtype=torch.float64)
    for i, (start, end) in enumerate(spans):
        weight = torch.ones((end - start) * s, dtype=torch.float64)
        if i > 0:
            weight *= _ramp(len(weight), (spans[i - 1][1] - start) * s, facts)
        if i + 1 < len(spans):
            weight *= _ramp(len(weight), (end - spans[i + 1][0]) * s, facts).flip(0)
        weights.append(weight)
        total[start * s : end * s] += weight
    for (start, end), weight in zip(spans, weights, strict=True):
        yield start, end, weight / total[start * s : end * s]


def _ramp(length: int, shared: int, facts: _Facts) -> Tensor:
    """From 0 to 1 over the ``shared`` pixels: 0 as far as the missing neighbourhood reaches, if the rest suffices."""
    blind = shared // 4
    if facts.halo is not None and 2 * facts.halo * facts.scale <= shared:
        blind = facts.halo * facts.scale
    free = shared - 2 * blind
    ramp = torch.ones(length, dtype=torch.float64)
    ramp[:blind] = 0
    ramp[blind : blind + free] = torch.arange(1, free + 1, dtype=torch.float64) / (free + 1)
    return ramp
