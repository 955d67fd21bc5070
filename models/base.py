"""What the training loop asks of a model."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.distributed import Processes
from options.errors import OptionsError

Batch = Mapping[str, Any]


class Base(ABC):
    """A network with all that is needed to train and judge it.

    Attributes:
        network: the network that is trained.
        device: where it lives.
        iteration: optimizer steps taken so far.
        changing: True while weights, average and iteration do not belong together.
    """

    network: nn.Module
    device: torch.device
    iteration: int
    changing: bool = False

    @abstractmethod
    def train_step(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Take one optimizer step over the batches (one, or ``accum_iter``) and return detached scalars to log."""

    @abstractmethod
    def predict(self, lq: Tensor) -> Tensor:
        """(b, c, h, w) in 0..1 -> (b, c, h * scale, w * scale), with the weights that are judged, in eval mode."""

    def distribute(self, processes: Processes) -> None:
        """Prepare to train as one of several processes, whose gradients are averaged.

        Raises:
            OptionsError: this model trains in one process only.
        """
        if processes.world > 1:
            raise OptionsError(f"{type(self).__name__} trains in one process only; start train.py without torchrun")

    @abstractmethod
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rate of each parameter group in the latest step."""

    @abstractmethod
    def weights(self) -> dict[str, dict[str, Tensor]]:
        """``{"params": ..., "params_ema": ...}`` (the second with EMA only), on the CPU."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that training needs to go on, in plain types and tensors; the weights included."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
