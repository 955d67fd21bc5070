"""Window attention over pieces of the logits: what its tricks could break."""

from functools import partial

import pytest
import torch

from kernels.dispatch import explain
from kernels.window_attention import cases, chunked, window_attention

CASE = cases.Case("", 2, 13, 17, 2, 6, 8, 3)


def with_gradients(arguments, **options):
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    leaves = {name: arguments[name].detach().clone().requires_grad_() for name in names}
    out = window_attention(**{**arguments, **leaves, **options})
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), upstream)]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("piece", [16 * 64, 40 * 64, 64 * 64, 3 * 64 * 64], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_neither_the_pieces_nor_the_threads_change_the_result(batch, piece, threads, monkeypatch, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(threads)
    case = cases.Case("", batch, 13, 7, 1, 6, 8, 3)
    arguments = cases.make_inputs(case, dtype=torch.float64)
    expected = with_gradients(arguments, backend="reference")
    monkeypatch.setattr(chunked, "PIECE", piece)
    monkeypatch.setattr(chunked, "SMALLEST_SHARE", 16)
    monkeypatch.setattr(chunked, "FEWEST", 16)
    for found, wanted in zip(with_gradients(arguments, backend="chunked"), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def loud(pixel, size):
    """A window in which the logit of one key, which no sample holds, is larger than all others by ``size``."""
    arguments = cases.make_inputs(cases.Case("", 1, 16, 16, 1, 4, 16, 0))
    qkv = arguments["qkv"].zero_()
    qkv[..., 0], qkv[..., 8:] = 2.0, torch.rand(1, 16, 16, 4)
    qkv.view(256, 12)[pixel, 4] = size
    return arguments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [50.0, 120.0, 1000.0, 30000.0])
def test_a_key_that_outweighs_all_sampled_ones_by_far_takes_everything(size, dtype):
    sampled = set(chunked._sample(torch.arange(256).reshape(1, 256, 1)).flatten().tolist())
    pixel = next(i for i in range(256) if i not in sampled)
    arguments = loud(pixel, size)
    out, d_qkv = with_gradients(arguments, backend="chunked", dtype=dtype)
    wanted = arguments["qkv"].view(256, 12)[pixel, 8:].expand(1, 16, 16, 4)
    torch.testing.assert_close(out, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
    assert d_qkv.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(value):
    arguments = cases.make_inputs(CASE)
    arguments["qkv"][0, 2, 3, 0] = value
    out = window_attention(**arguments, backend="chunked")
    expected = window_attention(**arguments, backend="reference")
    assert torch.equal(out.isnan(), expected.isnan())
    assert expected.isnan().any()


@pytest.mark.parametrize(("offset", "ratio"), [(0.0, 1.3), (2.0, 0.8)])
def test_bfloat16_is_about_as_exact_as_in_pytorchs_attention_and_more_so_around_a_mean(offset, ratio):
    arguments = cases.make_inputs(cases.Case("", 1, 32, 32, 2, 16, 32, 16))
    arguments["qkv"][..., -32:] += offset
    exact = window_attention(**arguments, dtype=torch.float64, backend="reference")
    errors = {}
    for backend in ("chunked", "sdpa"):
        out = window_attention(**arguments, dtype=torch.bfloat16, backend=backend)
        errors[backend] = float((out - exact).norm() / exact.norm())
    assert errors["chunked"] <= ratio * errors["sdpa"]


def test_it_is_taken_where_it_is_faster_and_says_why_not_elsewhere(monkeypatch):
    monkeypatch.setattr(chunked, "_multiplies_bfloat16", lambda: True)

    def reason(qkv, window, **options):
        return explain("window_attention", qkv, window=window, heads=2, **options)

    qkv = torch.rand(1, 8, 8, 48)
    assert reason(qkv, 8, dtype=torch.bfloat16).startswith("window_attention: chunked")
    assert reason(qkv, 64).startswith("window_attention: chunked")
    assert "windows of 32 in float32 are slower" in reason(qkv, 32)
    assert "backward pass is slower in float32" in reason(qkv.clone().requires_grad_(), 64)
    assert "overflow in float16" in reason(qkv, 8, dtype=torch.float16)
    assert "this tensor is on meta" in reason(qkv.to("meta"), 64)
    monkeypatch.setattr(chunked, "_multiplies_bfloat16", lambda: False)
    assert "no fast products in bfloat16" in reason(qkv, 8, dtype=torch.bfloat16)


def test_under_a_compiler_another_backend_runs():
    arguments = {**cases.make_inputs(CASE), "dtype": torch.bfloat16}
    compiled = torch.compile(lambda: window_attention(**arguments), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(), window_attention(**arguments, backend="sdpa"))


def test_a_second_derivative_is_refused_in_words():
    arguments = cases.make_inputs(CASE, dtype=torch.float64)
    qkv = arguments["qkv"].requires_grad_()
    out = window_attention(**arguments, backend="chunked")
    with pytest.raises(RuntimeError, match=r"no second derivative .*backend='torch'"):
        torch.autograd.grad(out.sum(), qkv, create_graph=True)


@pytest.mark.parametrize("size", [40, 80, 150, 1000])
@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
def test_runaway_logits_in_bfloat16_stay_finite(backend, size):
    arguments = cases.make_inputs(cases.Case("", 1, 32, 32, 2, 4, 32, 0), dtype=torch.float32)
    arguments["qkv"][..., :16] *= size
    out, d_qkv = with_gradients(arguments, backend=backend, dtype=torch.bfloat16)
    assert out.isfinite().all()
    assert d_qkv.isfinite().all()


def test_transforms_go_to_another_backend():
    arguments = {**cases.make_inputs(CASE), "dtype": torch.bfloat16}
    qkv = arguments.pop("qkv")
    attend = lambda x: window_attention(x, **arguments).sum()  # noqa: E731
    expected = torch.autograd.grad(attend(qkv.requires_grad_()), qkv)[0]
    found = torch.func.grad(attend)(qkv.detach())
    assert (found - expected).norm() < 0.05 * expected.norm()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert window_attention(mode.from_tensor(qkv.detach()), **arguments).shape == (2, 13, 17, 12)


def test_factors_in_float32_do_not_blur_an_image_in_float64():
    arguments = cases.make_inputs(CASE, dtype=torch.float64)
    rounded = {name: arguments[name].float() for name in ("q_pos", "k_pos")}
    exact = window_attention(**{**arguments, **{k: v.double() for k, v in rounded.items()}}, backend="reference")
    torch.testing.assert_close(
        window_attention(**{**arguments, **rounded}, backend="chunked"), exact, atol=1e-12, rtol=0
    )
