"""How far a network is with one piece of a picture, told by its layers."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

# more may come than was counted, when memory runs out
_NEARLY = 0.99


class LayerTimes:
    """While the block runs, note when each layer is done; of several runs of the network the last one counts.

    Args:
        network: its layers are its modules without modules in them.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def __enter__(self) -> "LayerTimes":
        self._hooks = [layer.register_forward_hook(self._note) for layer in _layers(self._network)]
        self._hooks.append(self._network.register_forward_pre_hook(self._begin))
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._all = time.perf_counter() - self._began

    @property
    def shares(self) -> list[float]:
        """For each layer that ran, in their order, the share of the time that had passed when it was done, 0..1."""
        return [min(1.0, (moment - self._began) / self._all) for moment in self._times]

    def _begin(self, *_: object) -> None:
        self._times, self._began = [], time.perf_counter()

    def _note(self, *_: object) -> None:
        self._times.append(time.perf_counter())


class Watched:
    """While the block runs, what the network has seen moves the progress on: whole pieces, and layers of the present.

    Where memory runs out, the picture begins anew in more pieces; the progress waits then.

    Args:
        network: what is run, piece by piece.
        total: pixels that it will see in all.
        shares: of :class:`LayerTimes`; empty where nothing was measured, then only whole pieces count.
        progress: called with the share that is done, 0..1.
    """

    def __init__(
        self, network: nn.Module, total: int, *, shares: Sequence[float], progress: Callable[[float], None]
    ) -> None:
        self._network, self._total, self._shares, self._progress = network, total, shares, progress
        self._seen = self._piece = self._layer = 0
        self._told = 0.0

    def __enter__(self) -> None:
        self._hooks = [
            self._network.register_forward_pre_hook(self._begin),
            self._network.register_forward_hook(self._end),
        ]
        if self._shares:
            self._hooks += [layer.register_forward_hook(self._go_on) for layer in _layers(self._network)]

    def __exit__(self, kind: type | None, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            self._progress(1.0)

    def _begin(self, _module: nn.Module, inputs: tuple) -> None:
        self._piece, self._layer = inputs[0].shape[-2] * inputs[0].shape[-1], 0

    def _go_on(self, *_: object) -> None:
        # a network may do more steps for a larger piece than for the one that was measured
        share = self._shares[min(self._layer, len(self._shares) - 1)]
        self._layer += 1
        self._tell(self._seen + share * self._piece)

    def _end(self, *_: Any) -> None:
        self._seen += self._piece
        self._tell(self._seen)

    def _tell(self, pixels: float) -> None:
        self._told = max(self._told, min(_NEARLY, pixels / self._total))
        self._progress(self._told)


def _layers(network: nn.Module) -> list[nn.Module]:
    # a network without modules in it is told as a whole
    return [module for module in network.modules() if module is not network and not any(module.children())]
