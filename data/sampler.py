"""The order of training samples: one endless stream, fixed by a seed, that any number of ranks share.

Position p of the stream belongs to pass ``p // size``. Ranks take positions in turn, so that the batches which all
ranks process together are one contiguous piece of the stream, whatever their number is.
"""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

# keeps the random numbers of the order apart from those of samples
_ORDER_STREAM = 1


class EndlessSampler(Sampler[tuple[int, int]]):
    """Yields ``(epoch, index)`` for ever; no key comes twice, so each visit of a picture has its own randomness.

    Args:
        size: number of pictures.
        seed: fixes the order together with the pass.
        shuffle: False goes through the pictures in order.
        ratio: visits of each picture per shuffled pass (dataset_enlarge_ratio).
        rank, world: this process among all; it gets positions start + rank, start + rank + world, ...
        start: position in the stream at which all ranks together begin.

    Raises:
        ValueError: an empty set, or a ratio, rank, world or start out of range.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        ratio: int = 1,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
    ) -> None:
        if size < 1 or ratio < 1 or start < 0 or not 0 <= rank < world:
            raise ValueError(f"no stream of {size=}, {ratio=}, {start=}, {rank=}, {world=}")
        self.size, self.seed, self.shuffle, self.ratio = size, seed, shuffle, ratio
        self.rank, self.world, self.start = rank, world, start
        self._order: tuple[int, np.ndarray] | None = None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        position = self.start + self.rank
        while True:
            yield self.key(position)
            position += self.world

    def key(self, position: int) -> tuple[int, int]:
        """The sample at a position of the stream, over all ranks."""
        turn, place = divmod(position, self.size * self.ratio)
        drawn = int(self._turn_order(turn)[place]) if self.shuffle else place
        return turn * self.ratio + drawn // self.size, drawn % self.size

    def _turn_order(self, turn: int) -> np.ndarray:
        if self._order is None or self._order[0] != turn:
            rng = np.random.default_rng([self.seed, turn, 0, _ORDER_STREAM])
            self._order = turn, rng.permutation(self.size * self.ratio)
        return self._order[1]


class ShardSampler(Sampler[int]):
    """Pictures rank, rank + world, ... in order, each once over all ranks, none repeated to even things out."""

    def __init__(self, size: int, *, rank: int = 0, world: int = 1) -> None:
        self._indices = range(rank, size, world)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)
