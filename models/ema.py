"""Exponential moving average of a network's weights."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class EMA:
    """A second network whose weights follow the first one's slowly.

    Each update moves every floating-point parameter by ``1 - decay`` of the way to the trained one. Buffers (running
    statistics, tables) and parameters of other dtypes are copied: a running statistic is an average already, and
    BasicSR, which never copies them, judges the average of the weights by the statistics of the first iteration.
    There is no correction for the first steps, so an average may start from any weights, loaded ones included. The
    dtype is that of the trained weights; in half precision ``1 - decay`` can fall below what a weight resolves, and the
    average then stands still.

    Args:
        network: what is followed; copied as it is now, in eval mode, on its device. Without wrappers (DDP, compile).
        decay: 0 (a copy) to below 1 (0.999 is usual).

    Attributes:
        network: the average, a network that is never trained.

    Raises:
        ValueError: a decay outside 0..1.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay}")
        self.decay = decay
        self.network = copy.deepcopy(network).eval().requires_grad_(False)
        kept = nn.Module.get_extra_state
        self._extra = [name for name, module in network.named_modules() if type(module).get_extra_state is not kept]

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Follow ``network`` by one step.

        Raises:
            ValueError: its parameters or buffers are not those that the average was made of.
        """
        averages, trained = _pairs(dict(self.network.named_parameters()), dict(network.named_parameters()))
        floats = [i for i, average in enumerate(averages) if average.is_floating_point()]
        rest = [i for i, average in enumerate(averages) if not average.is_floating_point()]
        if floats:
            torch._foreach_lerp_([averages[i] for i in floats], [trained[i] for i in floats], 1 - self.decay)
        kept, current = _pairs(dict(self.network.named_buffers()), dict(network.named_buffers()))
        kept += [averages[i] for i in rest]
        current += [trained[i] for i in rest]
        if kept:
            torch._foreach_copy_(kept, current)
        # what a module keeps beside tensors is no average either
        for name in self._extra:
            state = copy.deepcopy(network.get_submodule(name).get_extra_state())
            self.network.get_submodule(name).set_extra_state(state)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights, under the network's own keys."""
        return self.network.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Take over averaged weights; as ``nn.Module.load_state_dict``."""
        self.network.load_state_dict(state, strict=strict)


def _pairs(averages: dict[str, Tensor], trained: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    if averages.keys() != trained.keys():
        odd = ", ".join(sorted(averages.keys() ^ trained.keys())[:5])
        raise ValueError(f"the network is not the one that the average was made of; they differ in {odd}")
    for name, average in averages.items():
        if average.shape != trained[name].shape:
            shapes = f"{tuple(average.shape)} became {tuple(trained[name].shape)}"
            raise ValueError(f"the network is not the one that the average was made of: {name} {shapes}")
    return list(averages.values()), [trained[name] for name in averages]
