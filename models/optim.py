"""Optimizers by name, and learning rates as pure functions of the iteration.

The values are those that BasicSR prints, whose schedules are incremental: the schedule of iteration i has taken i - 1
steps, so a milestone at m acts from iteration m + 1 on; a linear warm-up writes over it below ``warmup_iter``; and
MultiStepLR, which only ever multiplies the rate it finds, goes on from the last value of the warm-up. As nothing is
kept between iterations, a resumed run cannot have another rate than an unbroken one.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from options.errors import OptionsError
from options.registry import OPTIMIZERS, SCHEDULERS

_OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
for _name in _OPTIMIZERS:
    # Adafactor came after the oldest torch that is supported
    if hasattr(torch.optim, _name):
        OPTIMIZERS.register(getattr(torch.optim, _name))


def build_optimizer(parameters: Iterable[Tensor | dict[str, Any]], spec: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Build the optimizer ``spec["type"]``.

    Args:
        parameters: tensors, of which the frozen ones are left out, or parameter groups as torch takes them.
        spec: ``type`` and the optimizer's keyword arguments; left as it is.

    Raises:
        OptionsError: an unknown type or argument (the nearest one is named), a value that torch refuses, or nothing
            to train.
    """
    trained = [item for item in parameters if isinstance(item, Mapping) or item.requires_grad]
    if not trained:
        raise OptionsError(f"the optimizer {spec.get('type')} has nothing to train: every parameter is frozen")
    if "params" in spec:
        raise OptionsError("the optimizer's params are the network's; remove params from its options")
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.items()}
    try:
        return OPTIMIZERS.build(arguments, params=trained)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise OptionsError(f"the optimizer cannot be built from {dict(spec)}: {error}") from error


class Schedule:
    """A warm-up and what follows it, without a state.

    Attributes:
        length: the last iteration that the schedule describes; None when it never ends.
    """

    length: int | None = None

    def __call__(self, iteration: int, base_lr: float, *, warmup_iter: int = -1) -> float:
        """The learning rate of an iteration.

        Args:
            iteration: counted from 1.
            base_lr: the optimizer's ``lr``.
            warmup_iter: below this iteration the rate is ``base_lr * iteration / warmup_iter``.

        Raises:
            ValueError: an iteration below 1.
        """
        if iteration < 1:
            raise ValueError(f"iterations count from 1, got {iteration}")
        if iteration < warmup_iter:
            return base_lr / warmup_iter * iteration
        return self._after_warmup(iteration - 1, base_lr, warmup_iter)

    def _after_warmup(self, steps: int, base_lr: float, warmup_iter: int) -> float:
        """The rate after so many steps of the schedule."""
        raise NotImplementedError


@SCHEDULERS.register()
class Constant(Schedule):
    """The base rate for ever. What a run without a scheduler has."""

    def _after_warmup(self, steps: int, base_lr: float, warmup_iter: int) -> float:
        return base_lr


@SCHEDULERS.register()
class MultiStepLR(Schedule):
    """The rate is multiplied by ``gamma`` after each milestone.

    Args:
        milestones: the last iteration before each drop; one that is given twice acts twice.
        gamma: the factor.
        restarts: the last iteration before each return to ``base_lr`` times its weight.
        restart_weights: one for each restart.
    """

    def __init__(
        self,
        *,
        milestones: Sequence[int],
        gamma: float = 0.1,
        restarts: Sequence[int] = (0,),
        restart_weights: Sequence[float] = (1,),
    ) -> None:
        self.milestones = Counter(int(milestone) for milestone in milestones)
        self.gamma = float(gamma)
        _same_length(restarts=restarts, restart_weights=restart_weights)
        self.restarts = dict(zip(map(int, restarts), map(float, restart_weights), strict=True))

    def _after_warmup(self, steps: int, base_lr: float, warmup_iter: int) -> float:
        lr, first = base_lr, 0
        if warmup_iter > 1:
            first = warmup_iter - 1
            lr = base_lr / warmup_iter * first
        for event in sorted({*self.milestones, *self.restarts}):
            if first <= event <= steps:
                # a restart wins over a milestone in the same place
                weight = self.restarts.get(event)
                lr = lr * self.gamma ** self.milestones[event] if weight is None else base_lr * weight
        return lr


SCHEDULERS.alias("MultiStepRestartLR", "MultiStepLR")


@SCHEDULERS.register()
class CosineAnnealingRestartCyclicLR(Schedule):
    """Half a cosine per period, from the base rate times the period's weight down to the period's own floor.

    After the last period the rate stays where it ended.

    Args:
        periods: iterations of each period.
        restart_weights: factor on the way from the floor to the base rate, one for each period.
        eta_mins: the floor of each period.
    """

    def __init__(
        self,
        *,
        periods: Sequence[int],
        restart_weights: Sequence[float] = (1,),
        eta_mins: Sequence[float] = (0,),
    ) -> None:
        _same_length(periods=periods, restart_weights=restart_weights, eta_mins=eta_mins)
        self.periods = tuple(int(period) for period in periods)
        if not self.periods or min(self.periods) < 1:
            raise ValueError(f"periods must be numbers of at least 1, got {list(periods)}")
        self.restart_weights = tuple(float(weight) for weight in restart_weights)
        self.eta_mins = tuple(float(floor) for floor in eta_mins)
        self.ends = tuple(accumulate(self.periods))
        self.length = self.ends[-1]

    def _after_warmup(self, steps: int, base_lr: float, warmup_iter: int) -> float:
        steps = min(steps, self.ends[-1])
        # the last step of a period still belongs to it
        i = bisect_left(self.ends, steps)
        done = (steps - (self.ends[i] - self.periods[i])) / self.periods[i]
        floor = self.eta_mins[i]
        return floor + self.restart_weights[i] * 0.5 * (base_lr - floor) * (1 + math.cos(math.pi * done))


@SCHEDULERS.register()
class CosineAnnealingRestartLR(CosineAnnealingRestartCyclicLR):
    """Half a cosine per period, all down to the same floor.

    Args:
        periods: iterations of each period.
        restart_weights: factor on the way from the floor to the base rate, one for each period.
        eta_min: the floor.
    """

    def __init__(
        self, *, periods: Sequence[int], restart_weights: Sequence[float] = (1,), eta_min: float = 0.0
    ) -> None:
        super().__init__(periods=periods, restart_weights=restart_weights, eta_mins=(eta_min,) * len(periods))


class LearningRate:
    """A schedule and its warm-up, ``(iteration, base_lr) -> lr``.

    Args:
        spec: ``type`` and the schedule's keyword arguments; None for a constant rate.
        warmup_iter: below this iteration the rate rises linearly; at most 1 for none.

    Attributes:
        length: the last iteration that the schedule describes; None when it never ends.

    Raises:
        OptionsError: an unknown type or argument, or values that do not belong together.
    """

    def __init__(self, spec: Mapping[str, Any] | None = None, *, warmup_iter: int = -1) -> None:
        try:
            self.schedule: Schedule = Constant() if spec is None else SCHEDULERS.build(spec)
        except (KeyError, TypeError, ValueError) as error:
            raise OptionsError(f"train.scheduler: {error}") from error
        self.warmup_iter = warmup_iter
        self.length = self.schedule.length

    def __call__(self, iteration: int, base_lr: float) -> float:
        """The rate of an iteration, counted from 1."""
        return self.schedule(iteration, base_lr, warmup_iter=self.warmup_iter)


def _same_length(**lists: Sequence[Any]) -> None:
    if len({len(values) for values in lists.values()}) > 1:
        given = ", ".join(f"{name} {list(values)}" for name, values in lists.items())
        raise ValueError(f"these must be equally long: {given}")
