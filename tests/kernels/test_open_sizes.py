"""The forms that exported graphs hold compute what the definitions say."""

import math

import pytest
import torch

from archs.taylor_parts import heads_of
from kernels.exported import is_exported
from kernels.taylor_attention import cases, taylor_attention
from kernels.taylor_attention import open_sizes as open_taylor
from kernels.window_attention import open_sizes as open_windows
from kernels.window_attention import window_attention

EXACT = {torch.float64: 1e-12, torch.float32: 2e-6}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (5, 7), (8, 8), (9, 17)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_windows_are_gathered_as_the_definition_cuts_them(size, dtype, fused):
    heads, window, d, rank = 2, 4, 3, 5
    qkv = torch.randn(2, *size, 3 * heads * d, dtype=dtype)
    q_pos, k_pos = torch.randn(2, heads, window**2, rank, dtype=dtype)
    settings = {"heads": heads, "window": window, "scale": 0.7}
    expected = window_attention(qkv, q_pos, k_pos, **settings, backend="reference")
    found = open_windows.attention(qkv, q_pos, k_pos, None, fused=fused, **settings)
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT[dtype])


def test_softmax_of_sixteen_bits_is_wide_in_a_graph_too():
    qkv = (4 * torch.randn(1, 8, 8, 3 * 2 * 8)).bfloat16()
    bias = 20 * torch.randn(2, 16, 16)
    settings = {"heads": 2, "window": 4, "scale": 1 / math.sqrt(8)}
    expected = window_attention(qkv, None, None, bias=bias, **settings, backend="torch")
    found = open_windows.attention(qkv, None, None, bias, fused=False, **settings)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name.replace(" ", "-"))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_taylor_attention_of_a_graph_is_the_definition(case, dtype):
    arguments = cases.make_inputs(case, dtype=dtype)
    # a vector of length zero has a direction in neither
    arguments["q"] = arguments["q"].detach().clone()
    arguments["q"][..., 0] = 0
    expected = taylor_attention(**arguments, backend="reference")
    optional = [arguments.get(name) for name in ("temperature", "gate", "focus_weight")]
    found = open_taylor.taylor_attention(*(arguments[name] for name in "qkv"), *optional, **case.settings)
    assert (found - expected).norm() <= EXACT[dtype] * expected.norm()


def test_heads_of_a_piece_of_a_map_keep_each_vector_together():
    piece = torch.randn(1, 12, 8, 8).contiguous(memory_format=torch.channels_last)[:, :, 2:-2, 2:-2]
    (first, _) = heads_of(piece, 2, 3)
    assert first.shape == (1, 3, 2, 16)
    assert first.stride(2) == 1
    torch.testing.assert_close(first, piece[:, :6].reshape(1, 3, 2, 16), rtol=0, atol=0)


def test_a_compiled_network_is_not_taken_for_an_exported_one():
    seen = []

    def asks(x):
        seen.append(is_exported(x))
        return x + 1

    torch.compile(asks, backend="eager")(torch.ones(2))
    asks(torch.ones(2))
    assert seen == [False, False]
    torch.export.export(torch.nn.Identity(), (torch.ones(2),), strict=False)
    torch.jit.trace(asks, torch.ones(2), check_trace=False)
    assert seen[2:] == [True]
