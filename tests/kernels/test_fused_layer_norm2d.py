"""Layer norm of pixels by Triton: interpreted against float64, as PyTorch's operators, compiled ahead of time."""

import pytest
import torch

from kernels.dispatch import KernelUnavailable, available, explain
from kernels.layer_norm2d import cases, layer_norm2d

pytestmark = pytest.mark.interpreter
SHAPES = ((2, 8, 5, 7), (1, 3, 3, 3), (1, 48, 1, 1), (3, 5, 17, 23), (1, 1, 4, 4), (1, 180, 3, 11), (2, 600, 2, 3))


def with_gradients(tensors, upstream, **options):
    leaves = [None if t is None else t.requires_grad_() for t in tensors]
    out = layer_norm2d(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, [t for t in leaves if t is not None], upstream.to(out.dtype))]


def close(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        # a NaN would pass no comparison
        assert (a.double() - b.double()).norm() <= 2 * tolerance * b.double().norm()


by_form = pytest.mark.parametrize("centred", [True, False], ids=["centred", "bias-free"])


@by_form
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels-last"])
@pytest.mark.parametrize("dtype", list(cases.TOLERANCES), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_the_float64_reference_with_every_gradient(
    shape, dtype, channels_last, centred, guarded_outputs, guards
):
    tensors = cases.make_inputs(shape, dtype=dtype, channels_last=channels_last)
    upstream = torch.randn(shape)
    found = with_gradients([guards.around(t) for t in tensors], upstream, centred=centred, backend="triton")
    assert found[0].dtype == dtype
    wide, upstream = [t.double() for t in tensors], upstream.to(dtype).double()
    close(found, with_gradients(wide, upstream, centred=centred, backend="reference"), cases.TOLERANCES[dtype])


@by_form
@pytest.mark.parametrize("given", [(False, False), (True, False), (False, True)], ids=["plain", "weight", "bias"])
def test_weight_and_bias_may_be_missing(given, centred, interpreter, guards):
    x, *parameters = cases.make_inputs((2, 6, 5, 3), dtype=torch.float64)
    tensors = [x, *(p if there else None for p, there in zip(parameters, given, strict=True))]
    upstream = torch.randn(x.shape, dtype=torch.float64)
    guarded = [None if t is None else guards.around(t) for t in tensors]
    found = with_gradients(guarded, upstream, centred=centred, backend="triton")
    close(found, with_gradients(tensors, upstream, centred=centred, backend="reference"), 1e-12)


def test_views_give_what_their_copies_give(interpreter, guards):
    x, weight, bias = cases.make_inputs((2, 8, 9, 7), dtype=torch.float64)
    x, last = guards.around(x), guards.around(x.to(memory_format=torch.channels_last))
    views = [x[:, ::2], x[:, :, 1:-1, 2:], x.transpose(2, 3), x[:1].expand(2, -1, -1, -1), x[:, :, :1], x[..., :1]]
    views += [last[:, 2:], last[:, :, 1:-1], last[..., 2:5], last.transpose(2, 3), last[1:], last[:, :, :, :1]]
    for view in views:
        c = view.shape[1]
        # a sum gives an upstream gradient without strides, and a slice one whose strides are not the image's
        for upstream in (
            torch.ones((), dtype=x.dtype).expand(view.shape),
            torch.randn(*view.shape, 2).double()[..., 0],
        ):
            tensors = [view.detach(), weight[:c].detach(), bias[:c].detach()]
            copies = [t.clone() for t in tensors]
            found = with_gradients(tensors, upstream, backend="triton")
            close(found, with_gradients(copies, upstream, backend="reference"), 1e-12)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels-last"])
def test_an_empty_batch_has_gradients_of_zero(channels_last, interpreter):
    tensors = cases.make_inputs((0, 4, 2, 2), channels_last=channels_last)
    out, dx, dweight, dbias = with_gradients(tensors, torch.zeros(0, 4, 2, 2), backend="triton")
    assert out.shape == dx.shape == (0, 4, 2, 2)
    assert not dweight.any()
    assert not dbias.any()


def test_more_blocks_than_programs_are_shared_out(interpreter, monkeypatch):
    from kernels.layer_norm2d import fused

    block = fused._settings
    tensors = cases.make_inputs((2, 5, 7, 5), dtype=torch.float64)
    upstream = torch.randn(2, 5, 7, 5, dtype=torch.float64)
    monkeypatch.setattr(fused, "_settings", lambda kernel, *a: _few(block(kernel, *a), kernel))
    found = with_gradients(tensors, upstream, backend="triton")
    close(found, with_gradients(tensors, upstream, backend="reference"), 1e-12)


def _few(settings, kernel):
    return settings | {"BP": 4} | ({"programs": 3} if kernel == "backward" else {})


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning:triton")
def test_eps_may_be_zero(interpreter):
    tensors = cases.make_inputs((1, 5, 5, 7), dtype=torch.float64)
    upstream = torch.randn(1, 5, 5, 7, dtype=torch.float64)
    found = with_gradients(tensors, upstream, eps=0.0, backend="triton")
    close(found, with_gradients(tensors, upstream, eps=0.0, backend="reference"), 1e-12)


def test_the_memory_format_is_kept(interpreter):
    for channels_last in (False, True):
        tensors = cases.make_inputs((2, 8, 5, 7), channels_last=channels_last)
        out, dx, *_ = with_gradients(tensors, torch.randn(2, 8, 5, 7), backend="triton")
        assert out.stride() == dx.stride() == tensors[0].stride()


def test_gradients_of_16_bit_parameters_are_summed_over_many_pixels(interpreter):
    x, weight, bias = cases.make_inputs((1, 4, 128, 128), dtype=torch.bfloat16, channels_last=True)
    *_, dbias = with_gradients((x, weight, bias), torch.ones(1, 4, 128, 128), backend="triton")
    assert dbias.tolist() == [128.0**2] * 4


@by_form
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels-last"])
def test_the_gradients_are_the_derivatives(channels_last, centred, interpreter):
    tensors = cases.make_inputs((1, 3, 2, 3), dtype=torch.float64, channels_last=channels_last)
    leaves = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda *t: layer_norm2d(*t, centred=centred, backend="triton"), leaves)


def test_it_is_an_operator_as_pytorch_wants_it(interpreter):
    from kernels.layer_norm2d import fused

    x, weight, bias = cases.make_inputs((2, 4, 3, 5))
    for image in (x, x.to(memory_format=torch.channels_last), x.transpose(2, 3), x[:, ::2]):
        c = image.shape[1]
        leaves = [t.detach().requires_grad_() for t in (image, weight[:c], bias[:c])]
        torch.library.opcheck(fused._forward_op, (*leaves, 1e-6, True))
        torch.library.opcheck(fused._forward_op, (leaves[0], None, None, 1e-6, False))
        for sums in (True, False):
            torch.library.opcheck(fused._backward_op, (torch.randn(image.shape), image, weight[:c], 1e-6, sums, sums))


def test_it_compiles_to_one_graph_forwards_and_backwards(interpreter):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: layer_norm2d(*t, backend="triton"), fullgraph=True, backend="aot_eager")
    upstream = torch.randn(2, 8, 5, 7)
    for channels_last in (False, True):
        tensors = [t.requires_grad_() for t in cases.make_inputs((2, 8, 5, 7), channels_last=channels_last)]
        out = compiled(*tensors)
        found = [out, *torch.autograd.grad(out, tensors, upstream)]
        close(found, with_gradients(tensors, upstream, backend="reference"), cases.TOLERANCES[torch.float32])


def test_a_second_derivative_is_refused_in_words(interpreter):
    x, weight, bias = (t.requires_grad_() for t in cases.make_inputs((1, 3, 2, 2), dtype=torch.float64))
    out = layer_norm2d(x, weight, bias, backend="triton").square().sum()
    (dx,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative .*backend='reference'"):
        dx.sum().backward()


def test_it_is_chosen_on_request_only_where_it_is_interpreted(interpreter):
    x = torch.rand(1, 4, 3, 3)
    assert available("layer_norm2d", x)[0] == "triton"
    assert explain("layer_norm2d", x, None, None, eps=1e-6).startswith("layer_norm2d: torch, chosen automatically")
    with pytest.raises(KernelUnavailable, match="at most 1024 channels, and this one has 1025"):
        layer_norm2d(torch.rand(1, 1025, 1, 1), None, None, backend="triton")


def test_without_cuda_it_is_refused_with_the_reason():
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    with pytest.raises(KernelUnavailable, match="triton"):
        layer_norm2d(torch.rand(1, 4, 3, 3), None, None, backend="triton")


@pytest.mark.aot
def test_it_compiles_for_hopper_and_ampere_without_spills(aot_report):
    assert aot_report("--op", "layer_norm2d", "--match", "fp32 c48 channels-last") == "4 compiled, 0 failed"
