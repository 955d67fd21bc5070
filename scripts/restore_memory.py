"""How large a piece of a picture fits into memory, decided before it is tried.

On Linux nothing is said when memory runs out: the kernel ends the process. So a small piece is restored first and
measured; what networks need grows with the pixels.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.cache import available_memory
from models import heap
from models.infer import restore
from scripts.restore_layers import LayerTimes
from scripts.restore_network import Restorer

GIB = 1 << 30
# of what is free: others want some, and estimates err
_SHARE = 0.6
_RESERVE = 256 << 20
_SAFETY = 1.3
# pieces of these sides are restored to see what the network needs; the second one only where the first leaves doubt
PROBES = (192, 448)
# where memory cannot be measured
_FALLBACK_TILE = 256
_SMALLEST = 64
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Need:
    """What a network takes on the way.

    Attributes:
        base: bytes for ``pixels`` input pixels that it sees at once; None where it cannot be measured.
        slope: bytes for each further one.
        seconds: for each input pixel.
    """

    base: float | None
    pixels: int
    slope: float
    seconds: float

    def bytes(self, pixels: int) -> float:
        """Bytes for so many pixels at once."""
        return self.base * min(1, pixels / self.pixels) + self.slope * max(0, pixels - self.pixels)

    def room(self, budget: int) -> int:
        """How many pixels may be seen at once with so many bytes."""
        if budget <= self.base:
            return int(budget / self.base * self.pixels)
        return self.pixels + int((budget - self.base) / max(self.slope, 1))


class PeakMemory:
    """Peak of this process (CPU) or of the GPU's tensors while the block runs: ``with PeakMemory(device) as peak``.

    Attributes:
        before, peak: bytes; None where the system does not tell.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.before: int | None = None
        self.peak: int | None = None

    def __enter__(self) -> "PeakMemory":
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self.before = torch.cuda.memory_allocated(self._device)
            return self
        try:
            _CLEAR.write_text("5")
            self.before = _status("VmRSS")
        except OSError:
            pass
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self._device)
        elif self.before is not None:
            self.peak = _status("VmHWM")


class Gauge:
    """Measures what a network needs, when it is first asked.

    Args:
        restorer: the network.
        channels: of its input.
    """

    def __init__(self, restorer: Restorer, channels: int) -> None:
        self._restorer, self._channels = restorer, channels
        self._start: int | None = None
        self.need: Need | None = None
        # when each layer is done, as a share of the whole time
        self.shares: list[float] = []
        self._refined = False

    def tile(self, size: tuple[int, int], budget: int | None) -> int | None:
        """The side of the tiles for a picture of this size (h, w), None for the whole: the largest that fits.

        Args:
            budget: bytes that the network may take; None where nobody says.
        """
        # a small picture takes less time than the measuring would
        if max(size) <= PROBES[0]:
            return None
        if self.need is None:
            peak, seconds = self._probe(PROBES[0])
            pixels = PROBES[0] ** 2
            self.need = Need(peak, pixels, (peak or 0) / pixels, seconds / pixels)
        tile = choose_tile(size, self.need, budget, self._restorer.network)
        if tile is None or self._refined or self.need.base is None:
            return tile
        # networks that work piece by piece themselves take much for little pictures, and little more for large ones
        peak, seconds = self._probe(PROBES[1])
        pixels, grown = PROBES[1] ** 2, PROBES[1] ** 2 - self.need.pixels
        slope = max((peak - self.need.base) / grown, 0.5 * peak / pixels)
        self.need, self._refined = Need(peak, pixels, slope, seconds / pixels), True
        return choose_tile(size, self.need, budget, self._restorer.network)

    def _probe(self, side: int) -> tuple[float | None, float]:
        """Bytes and seconds that noise of this side takes."""
        # or what pictures before have left would be taken for nothing needed
        heap.release()
        piece = torch.rand(1, self._channels, side, side, generator=torch.Generator().manual_seed(0))
        with PeakMemory(self._restorer.device) as memory, LayerTimes(self._restorer.network) as layers:
            began = time.perf_counter()
            restore(self._restorer.network, piece, dtype=self._restorer.dtype)
            seconds = time.perf_counter() - began
        self.shares = layers.shares
        # what was there before the first one: memory that a process has freed stays its own for a while
        self._start = memory.before if self._start is None else self._start
        known = memory.peak is not None and self._start is not None
        return (_SAFETY * max(memory.peak - self._start, 0) if known else None), seconds


def free_memory(device: torch.device) -> int | None:
    """Bytes that a picture may take: what is free, less what others should keep; None where nobody says."""
    free = available_memory()
    if device.type == "cuda":
        # what PyTorch keeps for the next tensor is free as well
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + kept
    return None if free is None else max(0, int(_SHARE * free) - _RESERVE)


def picture_memory(size: tuple[int, int], scale: int, channels: int, *, deep: bool, ensemble: bool) -> int:
    """Bytes that a picture and its result take in main memory beside what the network needs.

    Args:
        size: (h, w) of the input.
        deep: 16 bits a sample, not 8.
        ensemble: a second result is there while views are added up.
    """
    sample = 2 if deep else 1
    pixels = math.prod(size)
    before = pixels * (channels * 4 + 2 * (channels + 1) * sample)
    # the sum of the tiles in float32; whole numbers, as they are, turned for the encoder and encoded
    after = pixels * scale**2 * (channels * 4 * (2 if ensemble else 1) + 3 * (channels + 1) * sample)
    return before + after


def choose_tile(size: tuple[int, int], need: Need, budget: int | None, network: Any) -> int | None:
    """The side of the tiles, None for the whole picture: the largest that the budget has room for.

    Args:
        size: (h, w) of the picture.
        need: of the network.
        budget: bytes; None where nobody says.
        network: its ``multiple_of``, ``tile_multiple`` and ``minimum`` are regarded.
    """
    if need.base is None or budget is None:
        return None if max(size) <= _FALLBACK_TILE else _FALLBACK_TILE
    multiple, minimum = (getattr(network, fact, 1) for fact in ("multiple_of", "minimum"))
    padded = math.prod(math.ceil(max(side, minimum) / multiple) * multiple for side in size)
    if need.bytes(padded) <= budget:
        return None
    unit = math.lcm(multiple, getattr(network, "tile_multiple", 1))
    side = math.isqrt(need.room(budget))
    return max(side // unit * unit, math.ceil(max(minimum, _SMALLEST) / multiple) * multiple)


def _status(key: str) -> int | None:
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None
