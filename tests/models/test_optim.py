"""Learning rates against a step-by-step imitation of BasicSR's loop, and optimizers by name."""

import inspect
import math
from collections import Counter

import pytest
import torch

from models.optim import LearningRate, build_optimizer
from options.errors import OptionsError
from options.registry import OPTIMIZERS, SCHEDULERS


def _imitation(spec, base, total, warmup=-1):
    """The rates that an incremental scheduler and a warm-up that writes over it produce, iteration by iteration."""
    rates, lr = [], _incremental(spec, base, base, 0)
    for iteration in range(1, total + 1):
        if iteration > 1:
            lr = _incremental(spec, lr, base, iteration - 1)
        if iteration < warmup:
            lr = base / warmup * iteration
        rates.append(lr)
    return rates


def _incremental(spec, lr, base, step):
    """The rate after one step of the scheduler that finds ``lr``."""
    if spec["type"].startswith("MultiStep"):
        restarts = list(spec.get("restarts", [0]))
        if step in restarts:
            return base * spec.get("restart_weights", [1])[restarts.index(step)]
        return lr * spec.get("gamma", 0.1) ** Counter(spec["milestones"])[step]
    periods = spec["periods"]
    ends = [sum(periods[: i + 1]) for i in range(len(periods))]
    i = next(k for k, end in enumerate(ends) if step <= end)
    start = 0 if i == 0 else ends[i - 1]
    floor = spec["eta_mins"][i] if "eta_mins" in spec else spec.get("eta_min", 0)
    weight = spec.get("restart_weights", [1])[i]
    return floor + weight * 0.5 * (base - floor) * (1 + math.cos(math.pi * ((step - start) / periods[i])))


SPECS = {
    "drops": {"type": "MultiStepLR", "milestones": [10, 20, 25], "gamma": 0.5},
    "unsorted, doubled": {"type": "MultiStepRestartLR", "milestones": [20, 7, 20, 8, 9], "gamma": 0.3},
    "restarts": {
        "type": "MultiStepRestartLR",
        "milestones": [5, 12, 20],
        "gamma": 0.5,
        "restarts": [0, 12, 16],
        "restart_weights": [1, 0.7, 0.5],
    },
    "restart later": {"type": "MultiStepLR", "milestones": [3], "restarts": [15], "restart_weights": [0.5]},
    "one cosine": {"type": "CosineAnnealingRestartLR", "periods": [30], "eta_min": 1e-7},
    "cosines": {
        "type": "CosineAnnealingRestartLR",
        "periods": [10, 5, 15],
        "restart_weights": [1, 0.5, 0.25],
        "eta_min": 1e-6,
    },
    "flat, then a cosine": {
        "type": "CosineAnnealingRestartCyclicLR",
        "periods": [12, 18],
        "restart_weights": [1, 1],
        "eta_mins": [2e-4, 1e-5],
    },
}


@pytest.mark.parametrize("warmup", [-1, 0, 1, 2, 8, 11, 30])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_iteration_has_the_rate_of_the_incremental_loop(spec, warmup):
    rate = LearningRate(spec, warmup_iter=warmup)
    assert [rate(i, 2e-4) for i in range(1, 31)] == _imitation(spec, 2e-4, 30, warmup)


def test_the_printed_rates_of_a_cosine():
    rate = LearningRate({"type": "CosineAnnealingRestartLR", "periods": [20], "eta_min": 1e-7})
    assert [f"{rate(i, 2e-4):.3e}" for i in (5, 10, 15, 20)] == ["1.809e-04", "1.157e-04", "4.130e-05", "1.331e-06"]


def test_the_plateau_after_a_warm_up_keeps_its_last_value():
    spec = {"type": "MultiStepLR", "milestones": [250_000, 400_000], "gamma": 0.5}
    rate = LearningRate(spec, warmup_iter=20_000)
    assert rate(1, 5e-4) == 5e-4 / 20_000
    assert rate(20_000, 5e-4) == rate(250_000, 5e-4) == pytest.approx(4.99975e-4, rel=1e-12)
    assert rate(250_001, 5e-4) == rate(20_000, 5e-4) * 0.5


def test_a_rate_depends_on_nothing_but_the_iteration():
    rate = LearningRate(SPECS["restarts"], warmup_iter=4)
    forwards = {i: rate(i, 1e-3) for i in range(1, 31)}
    assert {i: rate(i, 1e-3) for i in reversed(range(1, 31))} == forwards


def test_without_a_scheduler_the_rate_is_constant_after_the_warm_up():
    rate = LearningRate(None, warmup_iter=4)
    assert [rate(i, 1.0) for i in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rate.length is None


def test_periods_end_and_the_rate_stays_there():
    rate = LearningRate(SPECS["cosines"])
    assert rate.length == 30
    assert rate(31, 2e-4) == rate(32, 2e-4) == rate(1000, 2e-4) == pytest.approx(1e-6)
    assert LearningRate(SPECS["drops"]).length is None


def test_iterations_count_from_1():
    with pytest.raises(ValueError, match="count from 1, got 0"):
        LearningRate(None)(0, 1e-3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"type": "MultiStepLR", "milestone": [1]}, "did you mean milestones"),
        ({"type": "MultiStepLR"}, "milestones: is missing"),
        ({"type": "CosineAnealingRestartLR", "periods": [1]}, "did you mean CosineAnnealingRestartLR"),
        ({"type": "CosineAnnealingRestartLR", "periods": [1, 2]}, "equally long: periods .*restart_weights"),
        ({"type": "CosineAnnealingRestartLR", "periods": []}, "equally long|at least 1"),
        ({"type": "CosineAnnealingRestartLR", "periods": [0]}, "at least 1"),
        ({"type": "MultiStepLR", "milestones": [1], "restarts": [0, 5]}, "equally long: restarts"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(spec, message):
    with pytest.raises(OptionsError, match=message):
        LearningRate(spec)


def test_every_scheduler_says_its_arguments_in_its_signature():
    assert {"MultiStepLR", "CosineAnnealingRestartLR", "CosineAnnealingRestartCyclicLR"} <= set(SCHEDULERS.names())
    assert SCHEDULERS.get("MultiStepRestartLR") is SCHEDULERS.get("MultiStepLR")
    for name in SCHEDULERS:
        for parameter in inspect.signature(SCHEDULERS.get(name)).parameters.values():
            assert parameter.kind is parameter.KEYWORD_ONLY
            assert parameter.annotation is not parameter.empty


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_every_optimizer_takes_a_step(name):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = build_optimizer([weight], {"type": name, "lr": 0.1})
    (weight**2).sum().backward()
    optimizer.step()
    assert type(optimizer) is getattr(torch.optim, name)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not torch.equal(weight, torch.ones(4))


def test_the_options_arrive_and_stay_as_they_are():
    spec = {"type": "AdamW", "lr": 5e-4, "betas": [0.9, 0.9], "weight_decay": 0}
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(1))], spec)
    assert optimizer.defaults["betas"] == (0.9, 0.9)
    assert optimizer.defaults["weight_decay"] == 0
    assert spec == {"type": "AdamW", "lr": 5e-4, "betas": [0.9, 0.9], "weight_decay": 0}


def test_frozen_parameters_are_left_out():
    frozen, free = torch.nn.Parameter(torch.ones(1), requires_grad=False), torch.nn.Parameter(torch.ones(1))
    optimizer = build_optimizer([frozen, free], {"type": "SGD", "lr": 1.0})
    assert optimizer.param_groups[0]["params"] == [free]
    with pytest.raises(OptionsError, match="nothing to train"):
        build_optimizer([frozen], {"type": "SGD", "lr": 1.0})


def test_groups_keep_their_own_rate():
    first, second = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = build_optimizer([{"params": [first], "lr": 0.5}, {"params": [second]}], {"type": "Adam", "lr": 0.1})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"type": "AdamV", "lr": 1e-3}, "did you mean Adam"),
        ({"type": "AdamW", "learning_rate": 1e-3}, "learning_rate: unknown argument of AdamW"),
        ({"type": "AdamW", "weight_decy": 1e-3}, "did you mean weight_decay"),
        ({"type": "AdamW", "lr": -1.0}, "Invalid learning rate"),
        ({"type": "AdamW", "params": []}, "remove params"),
        ({"lr": 1e-3}, "needs a type"),
    ],
)
def test_a_wrong_optimizer_is_refused_by_name(spec, message):
    with pytest.raises(OptionsError, match=message):
        build_optimizer([torch.nn.Parameter(torch.ones(1))], spec)
