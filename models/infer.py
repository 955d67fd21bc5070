"""A trained network over pictures of any size: padding, tiles, self-ensemble, precision.

A network says what it needs by its attributes, each with a default: ``scale`` (1), ``multiple_of`` (1) and ``minimum``
(1) for the sides of its input, ``halo`` (None, that is global: how far an output pixel looks), ``tile_multiple`` (1:
where tiles start), ``in_channels``. Nothing here knows a network by name.
"""

import contextlib
import functools
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models import heap
from options.errors import OptionsError, UserError

logger = logging.getLogger("pellucid")

SMALLEST_TILE = 16
# how allocators speak that raise no class of their own: the CPU's, C++'s, MPS', cuBLAS', and CUDA outside of allocators
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|std::bad_alloc|out of memory|could not create a (?:memory|primitive)"
    r"|ALLOC_FAILED"
)
WRONG_DTYPE = re.compile(r"bfloat16|float16|\bhalf\b|dtype|scalar type|input type", re.IGNORECASE)

Call = Callable[[Tensor], Tensor]


def inference_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """What ``val.dtype`` means on a device: the dtype for :func:`restore`, None for the network's own.

    Args:
        name: "float32", "bfloat16", "float16", or "auto": bfloat16 on a GPU that computes in it, float32 elsewhere.

    Raises:
        OptionsError: the device does not compute in it, or only slower than in float32.
    """
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        return torch.bfloat16 if native else None
    if name == "float16" and device.type == "cpu":
        raise OptionsError("val.dtype: float16 is slower than float32 on a CPU; take bfloat16, float32 or auto")
    if name == "bfloat16" and device.type == "cuda" and not native:
        gpu = torch.cuda.get_device_name(device)
        raise OptionsError(f"val.dtype: {gpu} does not compute in bfloat16; take float16, float32 or auto")
    return None if name == "float32" else getattr(torch, name)


@dataclass
class TileMemory:
    """What was learnt when memory did not suffice, so that the next picture need not run out of it first.

    One for each network and device; :func:`restore` reads and writes it.

    Attributes:
        failed: pixels, over the batch, of the smallest piece that did not fit; None while all did.
        tile: side of the tiles that fitted then.
    """

    failed: int | None = None
    tile: int | None = None

    def limit(self, lq: Tensor, tile: int | None) -> int | None:
        """``tile``, or the smaller one that fitted where pieces of this size failed before."""
        if self.failed is None or self.tile is None or _pixels(lq, tile) < self.failed:
            return tile
        return self.tile if tile is None else min(tile, self.tile)


@torch.inference_mode()
def restore(
    network: nn.Module,
    lq: Tensor,
    *,
    tile: int | None = None,
    overlap: int | None = None,
    self_ensemble: bool = False,
    dtype: torch.dtype | None = None,
    memory: TileMemory | None = None,
) -> Tensor:
    """Run a network over pictures of any size.

    The picture is continued to the right and below by reflection (by its edge where it is too small for that) to a size
    that the network takes, and the result cut back. Tiles of a network with a finite ``halo`` give what the whole
    picture gives when they overlap by twice the halo, which is the default where the tile has room for it; otherwise
    neighbours overlap by a quarter of the tile and are blended. When memory does not suffice, (smaller) tiles are
    tried, with a notice.

    Args:
        network: in eval mode for a reproducible result; its mode is left as it is.
        lq: ``(b, c, h, w)``, float, on any device: pieces travel to the network's device, the result is put together
            on that of ``lq``.
        tile: side in input pixels of what the network sees at once; brought to a size that the network takes. None
            for the whole picture.
        overlap: input pixels that neighbouring tiles share at least; None for a choice by the network's ``halo``.
        self_ensemble: the mean over the 8 flips and transpositions.
        dtype: what the network computes in (autocast: sums, norms and what it keeps in float32 stay there); see
            :func:`inference_dtype`. None for its own.
        memory: hand the same one over for each picture, so that running out of memory is learnt once.

    Returns:
        ``(b, c, h * scale, w * scale)``, neither clamped nor rounded; with ``dtype`` in the dtype of ``lq``.

    Raises:
        ValueError: the input is not what the network takes, the overlap leaves nothing of the tile, or the network
            returns another size than its ``scale`` says.
        UserError: even the smallest tile does not fit into memory, or the network cannot compute in ``dtype``.
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
    call = functools.partial(_run, network, facts=facts, dtype=dtype)
    way = _mean_of_views if self_ensemble else _restore_view
    attempt = functools.partial(way, call, lq, facts)
    on_cpu = next(network.parameters(), lq).device.type == "cpu"
    with heap.kept() if on_cpu else contextlib.nullcontext():
        return _within_memory(attempt, lq, facts, tile, overlap, TileMemory() if memory is None else memory)


def seen_pixels(network: nn.Module, size: tuple[int, int], *, tile: int | None, overlap: int | None) -> int:
    """How many input pixels :func:`restore` sends through the network for one view of a picture of this size (h, w).

    What neighbouring tiles share counts as often as they show it; for estimates of time.
    """
    facts = _Facts.of(network)
    sides = [facts.fit(side) for side in size]
    if tile is None or max(sides) <= tile:
        return math.prod(sides)
    return math.prod(sum(end - start for start, end in _spans(side, facts, tile, overlap)) for side in sides)


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


def _pixels(lq: Tensor, tile: int | None) -> int:
    """How many pixels of ``lq`` the network sees at once, over the batch."""
    return lq.shape[0] * math.prod(side if tile is None else min(side, tile) for side in lq.shape[-2:])


def _within_memory(
    attempt: Callable[[int | None, int | None], Tensor],
    lq: Tensor,
    facts: _Facts,
    tile: int | None,
    overlap: int | None,
    memory: TileMemory,
) -> Tensor:
    """Restore, in ever smaller tiles while the device is out of memory."""
    asked, smallest, longest = (tile, overlap), facts.fit(SMALLEST_TILE), max(lq.shape[-2:])
    tile = started = memory.limit(lq, tile)
    while True:
        overlap = None if asked[1] is None or (tile != asked[0] and asked[1] > tile // 2) else asked[1]
        try:
            result = attempt(tile, overlap)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            reason = str(error).split(". ")[0] or type(error).__name__
        else:
            if tile != started:
                _tell(lq, started, tile, asked[1] != overlap)
                memory.tile = tile
            return result
        # only here, past the except block, are the tensors of the failed attempt released
        heap.release()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        memory.failed = _pixels(lq, tile)
        side = min(longest, tile or longest)
        if side <= smallest:
            raise UserError(f"out of memory with tiles of {side} pixels, and smaller ones make no sense: {reason}")
        tile = max(smallest, side // 2 // facts.multiple_of * facts.multiple_of)


def _tell(lq: Tensor, started: int | None, tile: int, other_overlap: bool) -> None:
    whole = f"the whole picture ({lq.shape[-2]} x {lq.shape[-1]})" if started is None else f"tiles of {started}"
    manner = f"tiles of {tile}{' with the default overlap' if other_overlap else ''}, as are all pictures of this size"
    logger.warning(f"out of memory with {whole}; restored in {manner}. Set tile to try less at once")


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(OUT_OF_MEMORY.search(str(error)))


def _restore_view(
    call: Call,
    lq: Tensor,
    facts: _Facts,
    tile: int | None,
    overlap: int | None,
    flipped: tuple[bool, bool] = (False,) * 2,
) -> Tensor:
    """Restore the picture, or what it becomes when it is flipped along (rows, columns)."""
    (h, w), s = lq.shape[-2:], facts.scale
    rows, columns = (_sources(side, facts, flip).to(lq.device) for side, flip in zip((h, w), flipped, strict=True))
    if tile is None or max(len(rows), len(columns)) <= tile:
        result = call(_piece(lq, rows, columns))
    else:
        result = _tiled(call, lq, rows, columns, facts=facts, tile=tile, overlap=overlap)
    return result[..., : h * s, : w * s]


def _mean_of_views(call: Call, lq: Tensor, facts: _Facts, tile: int | None, overlap: int | None) -> Tensor:
    """The mean over the 8 flips and transpositions, each undone after the network."""
    total: Tensor | None = None
    for transposed in (False, True):
        view = lq.mT if transposed else lq
        for flipped in ((False, False), (False, True), (True, False), (True, True)):
            result = _restore_view(call, view, facts, tile, overlap, flipped)
            result = result.flip([axis for axis, flip in zip((-2, -1), flipped, strict=True) if flip])
            result = result.mT if transposed else result
            # in place, as one more picture is memory that a tile cannot have; in float32, as halves would be rounded
            if total is None:
                total = result.to(torch.promote_types(result.dtype, torch.float32)) / 8
            else:
                total.add_(result, alpha=1 / 8)
            dtype = result.dtype
            del result
    return total.to(dtype)


def _sources(length: int, facts: _Facts, flipped: bool) -> Tensor:
    """Which pixel of the picture stands at each place of one axis, once it is flipped and continued."""
    place = torch.arange(facts.fit(length))
    if len(place) - length < length:
        source = torch.where(place < length, place, 2 * (length - 1) - place)
    else:
        source = place.clamp(max=length - 1)
    return length - 1 - source if flipped else source


def _piece(lq: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return lq[..., rows[:, None], columns].contiguous()


def _run(network: nn.Module, piece: Tensor, *, facts: _Facts, dtype: torch.dtype | None) -> Tensor:
    """One call of the network; the result on the device of ``piece``, and in its dtype if another one is asked for."""
    device = piece.device if facts.device is None else facts.device
    cast = contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)
    try:
        with cast:
            result = network(piece.to(device))
    except RuntimeError as error:
        if dtype is None or _is_out_of_memory(error) or not WRONG_DTYPE.search(str(error)):
            raise
        name, text = str(dtype).removeprefix("torch."), str(error).splitlines()[0]
        raise UserError(f"the network cannot compute in {name} ({text}); take float32") from error
    expected = (piece.shape[0], piece.shape[2] * facts.scale, piece.shape[3] * facts.scale)
    if (result.shape[0], *result.shape[2:]) != expected:
        shapes = f"{tuple(piece.shape)} gave {tuple(result.shape)}"
        raise ValueError(f"the network's result has not the size that its scale of {facts.scale} says: {shapes}")
    return result.to(piece.device, result.dtype if dtype is None else piece.dtype)


def _tiled(
    call: Call, lq: Tensor, rows: Tensor, columns: Tensor, *, facts: _Facts, tile: int, overlap: int | None
) -> Tensor:
    """Restore tile by tile; each pixel is the mean of the tiles that show it, weighted by how far inside it lies."""
    total: Tensor | None = None
    s, across = facts.scale, _shares(_spans(len(columns), facts, tile, overlap), facts)
    for top, bottom, share_y in _shares(_spans(len(rows), facts, tile, overlap), facts):
        for left, right, share_x in across:
            result = call(_piece(lq, rows[top:bottom], columns[left:right]))
            if total is None:
                # half precision would round the sum
                dtype = torch.promote_types(result.dtype, torch.float32)
                shape = (*result.shape[:2], len(rows) * s, len(columns) * s)
                total = torch.zeros(shape, dtype=dtype, device=lq.device)
            share = (share_y[:, None] * share_x[None, :]).to(total)
            total[..., top * s : bottom * s, left * s : right * s] += result * share
    return total.to(result.dtype)


def _spans(length: int, facts: _Facts, tile: int, overlap: int | None) -> list[tuple[int, int]]:
    """Where the tiles of one axis begin and end.

    They start and end at multiples of ``tile_multiple`` where the tile has room for that beside the overlap, otherwise
    of the largest part of it: of windows of 16, 32 and 64 pixels, those of 16 and 32 then lie as in the whole picture.
    """
    cycle, unit = math.lcm(facts.multiple_of, facts.tile_multiple), facts.multiple_of
    for step in (step for step in range(cycle, 0, -unit) if cycle % step == 0):
        side = tile // step * step if step > unit else max(facts.fit(1), tile // unit * unit)
        shared = _default_overlap(facts, side) if overlap is None else overlap
        if side >= facts.minimum and side - shared >= step:
            break
    if length <= max(tile, side):
        return [(0, length)]
    if side - shared < step:
        raise ValueError(f"an overlap of {shared} leaves less than {step} pixels of tiles of {side}")
    last = math.ceil((length - side) / step) * step
    if length - last < facts.minimum:
        last -= step
    starts = [*range(0, last, (side - shared) // step * step), last]
    return [(start, length if start == last else start + side) for start in starts]


def _default_overlap(facts: _Facts, tile: int) -> int:
    if facts.halo is not None and 2 * facts.halo <= min(tile // 2, tile - facts.multiple_of):
        return 2 * facts.halo
    return min(tile // 4, max(0, tile - facts.multiple_of))


def _shares(spans: list[tuple[int, int]], facts: _Facts) -> list[tuple[int, int, Tensor]]:
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
    return [(a, b, weight / total[a * s : b * s]) for (a, b), weight in zip(spans, weights, strict=True)]


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
