"""Whole networks through the Triton kernels, interpreted, against the reference of every operator.

A new network adds a row to ``NETWORKS``. Widths, windows and ranks are the published ones; blocks are fewer and images
small, as the interpreter takes milliseconds for what a GPU does in nanoseconds.
"""

import copy
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from archs import ARCHS
from archs.mb_taylorformer import PRESETS as MBT_PRESETS
from archs.sst import PRESETS
from kernels import dispatch, launch
from kernels.dispatch import use_backend

# the fixture lives beside the tests of the kernels
interpreter = runpy.run_path(str(Path(__file__).parents[1] / "kernels" / "conftest.py"))["interpreter"]

# largest difference of any tensor (Frobenius norm) from the reference in float64, relative to the tensor, or to
# CANCELLED of the largest one where sums cancel: a focus weight at one pixel, a PReLU whose inputs are all positive
CANCELLED = 1e-4
# in float32, sums of temperatures and of gates cancel to a hundredth of their terms
LIMITS = {torch.float64: 1e-10, torch.float32: 5e-5}
# by operator: the interpreter's time goes by the number of blocks, whatever their size
LARGE_BLOCKS = {"window_attention": {"BLOCK_M": 256, "BLOCK_N": 512}, "deform_conv": {"BC": 128}}


@dataclass(frozen=True)
class Network:
    """A network, an image, and the operators whose kernels must run; windows are reflected if ``size`` is not whole."""

    options: dict[str, Any]
    size: tuple[int, int]
    operators: tuple[str, ...]
    # a coreset may choose other keys in another precision
    dtypes: tuple[torch.dtype, ...] = tuple(LIMITS)


_TAYLOR = ("taylor_attention", "deform_conv", "layer_norm2d")
_ONE_BLOCK = {"num_blocks": (1, 1, 1, 1), "num_refinement_blocks": 1}
_WINDOWS = {"window_sizes": (8, 16), "num_heads": 3, "ranks": (16, 24), "rank": 32, "bins": 4, "threshold": 16}
_CORESET = {"rank": 16, "bins": 4, "threshold": 64}

NETWORKS = {
    # one block of the published five, so each window and rank once
    "SST-light": Network(
        {"type": "SST", **PRESETS["SSTlight"], "n_blocks": 1}, (4, 19), ("window_attention", "layer_norm2d")
    ),
    # a block of each stage, with all its branches
    "V1-B": Network({**MBT_PRESETS["MB-TaylorFormer-B"], **_ONE_BLOCK}, (8, 8), _TAYLOR),
    "V2-B": Network({**MBT_PRESETS["MB-TaylorFormerV2-B"], **_ONE_BLOCK}, (8, 8), _TAYLOR),
    # coresets in windows and images that the interpreter has time for
    "WildCatSST": Network(
        {"type": "WildCatSST", **PRESETS["SSTlight"], "n_blocks": 1, **_WINDOWS},
        (4, 19),
        ("window_attention", "coreset_attention", "layer_norm2d"),
        (torch.float64,),
    ),
    "WildCatMBTaylorFormer": Network(
        {**MBT_PRESETS["MB-TaylorFormer-B"], "type": "WildCatMBTaylorFormer", **_ONE_BLOCK, **_CORESET},
        (8, 8),
        ("coreset_attention", "deform_conv", "layer_norm2d"),
        (torch.float64,),
    ),
}


@pytest.fixture
def large_blocks(monkeypatch):
    shipped = launch.settings

    def settings(op, *names, **where):
        return {**shipped(op, *names, **where), **LARGE_BLOCKS.get(op, {})}

    monkeypatch.setattr(launch, "settings", settings)


@pytest.fixture(scope="module")
def example(request):
    """A row of the table, its network in float64, an image, and what the reference makes of it."""
    network = NETWORKS[request.param]
    torch.manual_seed(0)
    net = ARCHS.build(network.options).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    x = torch.rand(1, 3, *network.size, dtype=torch.float64)
    return network, net, x, with_gradients(net, x, "reference")


def with_gradients(net, x, backend):
    """The output, and the gradient of the image and of each parameter, by name."""
    x = x.clone().requires_grad_()
    # for what is drawn
    torch.manual_seed(2)
    with use_backend(backend):
        out = net(x)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = {"image": x, **{name: p for name, p in net.named_parameters() if p.requires_grad}}
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream.to(out.dtype))
    return {"output": out.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreter", "large_blocks")
@pytest.mark.parametrize(
    ("example", "dtype"),
    [(name, dtype) for name, network in NETWORKS.items() for dtype in network.dtypes],
    ids=str,
    indirect=["example"],
)
def test_output_and_every_gradient_are_those_of_the_reference(example, dtype, monkeypatch):
    network, net, x, expected = example
    monkeypatch.setattr(dispatch, "_decisions", {})
    found = with_gradients(copy.deepcopy(net).to(dtype), x.to(dtype), "triton")
    for operator in network.operators:
        assert any(line.startswith(f"{operator} runs by triton") for line in dispatch.decisions()), operator
    least = CANCELLED * max(value.norm() for value in expected.values())
    errors = {key: float((found[key] - value).norm() / max(value.norm(), least)) for key, value in expected.items()}
    # a NaN would pass no comparison
    assert {key: error for key, error in errors.items() if not error <= LIMITS[dtype]} == {}
