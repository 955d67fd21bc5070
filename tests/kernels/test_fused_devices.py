"""Triton launches on the current device: the operators make it that of their tensors."""

import contextlib

import pytest
import torch

from kernels.coreset_attention import wildcat_attention
from kernels.deform_conv import deform_depthwise_conv2d
from kernels.taylor_attention import taylor_attention

# name: shapes of the tensors, and the operator
CALLS = {
    "taylor_attention": ([(1, 1, 2, 3)] * 3, lambda *t: taylor_attention(*t, norm=0.5, eps=1e-6, backend="triton")),
    "deform_conv": (
        [(1, 2, 2, 3), (1, 18, 2, 3), (2, 1, 3, 3)],
        lambda *t: deform_depthwise_conv2d(*t, clamp=(-1.0, 1.0), backend="triton"),
    ),
    "coreset_attention": ([(1, 1, 4, 2)] * 3, lambda *t: wildcat_attention(*t, rank=2, backend="triton")),
}


@pytest.fixture
def current(interpreter, monkeypatch):
    """What the current device is for each launch, as far as the operators have said."""
    from triton.runtime.interpreter import GridExecutor

    entered, launches, launch = [], [], GridExecutor.__call__

    @contextlib.contextmanager
    def device_of(x):
        entered.append(x.device)
        yield
        entered.pop()

    def launched(self, *arguments, **options):
        launches.append(entered[-1] if entered else None)
        return launch(self, *arguments, **options)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(GridExecutor, "__call__", launched)
    return launches


@pytest.mark.interpreter
@pytest.mark.parametrize(("op", "deterministic"), [*((op, False) for op in CALLS), ("deform_conv", True)])
def test_every_kernel_is_launched_on_the_device_of_its_tensors(op, deterministic, current, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    shapes, call = CALLS[op]
    tensors = [torch.rand(shape).requires_grad_() for shape in shapes]
    forward = call(*tensors)
    before = len(current)
    forward.sum().backward()
    assert 0 < before < len(current)
    assert set(current) == {tensors[0].device}
