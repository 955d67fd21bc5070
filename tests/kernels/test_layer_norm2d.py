"""Layer norm of pixels: the definition, every backend, memory formats and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from kernels.layer_norm2d import cases, layer_norm2d

by_form = pytest.mark.parametrize("centred", [True, False], ids=["centred", "bias-free"])
by_backend = pytest.mark.parametrize("backend", ["torch", "reference"])


def test_the_reference_is_the_formula():
    x, weight, bias = cases.make_inputs((2, 8, 5, 7), dtype=torch.float64)
    variance, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
    expected = (x - mean) / (variance + 1e-6).sqrt() * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)
    torch.testing.assert_close(layer_norm2d(x, weight, bias, backend="reference"), expected, rtol=0, atol=1e-12)


def test_without_centring_the_mean_stays():
    x, weight, bias = cases.make_inputs((2, 8, 5, 7), dtype=torch.float64)
    deviation = (x.var(dim=1, correction=0, keepdim=True) + 1e-6).sqrt()
    expected = x / deviation * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)
    found = layer_norm2d(x, weight, bias, centred=False, backend="reference")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@by_form
@by_backend
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels-last"])
@pytest.mark.parametrize("dtype", list(cases.TOLERANCES), ids=str)
@pytest.mark.parametrize("shape", cases.SMALL, ids=str)
def test_every_backend_equals_the_float64_reference_with_every_gradient(shape, dtype, channels_last, backend, centred):
    inputs = cases.make_inputs(shape, dtype=dtype, channels_last=channels_last)
    results = []
    for tensors, name in ((inputs, backend), ([t.double() for t in inputs], "reference")):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        out = layer_norm2d(*leaves, centred=centred, backend=name)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])
    assert results[0][0].dtype == dtype
    for found, expected in zip(*results, strict=True):
        error = (found.double() - expected.double()).norm()
        assert error <= 2 * cases.TOLERANCES[dtype] * expected.double().norm()


@by_backend
def test_weight_and_bias_may_be_missing(backend):
    x, weight, bias = cases.make_inputs((2, 8, 5, 7), dtype=torch.float64)
    plain = layer_norm2d(x, None, None, backend=backend)
    torch.testing.assert_close(plain.mean(dim=1), torch.zeros(2, 5, 7, dtype=x.dtype), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer_norm2d(x, weight, None, backend=backend), plain * weight.view(-1, 1, 1))
    torch.testing.assert_close(layer_norm2d(x, None, bias, backend=backend), plain + bias.view(-1, 1, 1))


@by_backend
def test_gradients_of_16_bit_parameters_are_summed_over_many_pixels(backend):
    x, weight, bias = cases.make_inputs((1, 4, 128, 128), dtype=torch.bfloat16, channels_last=True)
    bias.requires_grad_()
    layer_norm2d(x, weight, bias, backend=backend).sum().backward()
    assert bias.grad.tolist() == [128.0**2] * 4


@by_backend
def test_a_single_channel_is_its_own_mean(backend):
    x, weight, bias = cases.make_inputs((1, 1, 3, 3))
    torch.testing.assert_close(layer_norm2d(x, weight, bias, backend=backend), bias.expand(1, 1, 3, 3))


@by_form
@by_backend
def test_the_gradients_are_the_derivatives(backend, centred):
    tensors = [t.requires_grad_() for t in cases.make_inputs((1, 3, 2, 2), dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *t: layer_norm2d(*t, centred=centred, backend=backend), tensors)


@by_backend
def test_the_memory_format_is_kept(backend):
    for channels_last in (False, True):
        tensors = cases.make_inputs((2, 8, 5, 7), channels_last=channels_last)
        assert layer_norm2d(*tensors, backend=backend).stride() == tensors[0].stride()


def test_the_path_of_other_devices_keeps_the_memory_format():
    # meta tensors take it; their strides tell the memory format
    x, weight, bias = (t.to("meta") for t in cases.make_inputs((2, 8, 5, 7)))
    for image in (x, x.to(memory_format=torch.channels_last)):
        assert layer_norm2d(image, weight, bias).stride() == image.stride()


@by_backend
def test_a_view_gives_what_its_copy_gives(backend):
    x, weight, bias = cases.make_inputs((2, 8, 9, 7))
    for view in (x[:, ::2], x[:, :, 1:-1, 2:], x.transpose(2, 3), x[:1].expand(2, -1, -1, -1)):
        c = view.shape[1]
        expected = F.layer_norm(view.permute(0, 2, 3, 1), (c,), weight[:c], bias[:c], 1e-6).permute(0, 3, 1, 2)
        torch.testing.assert_close(layer_norm2d(view, weight[:c], bias[:c], backend=backend), expected)


@by_backend
def test_statistics_of_16_bit_images_are_kept_in_float32(backend):
    # in bfloat16, 256 + 1 is 256: the sum over the channels would lose everything but the large one
    x = torch.full((1, 512, 1, 1), 1.0)
    x[0, 0] = 256
    expected = layer_norm2d(x, None, None, backend="reference")
    found = layer_norm2d(x.bfloat16(), None, None, backend=backend)
    assert (found.float() - expected).norm() < cases.TOLERANCES[torch.bfloat16] * expected.norm()


@by_backend
def test_eps_is_added_to_the_variance(backend):
    x = torch.tensor([1.0, 3.0]).reshape(1, 2, 1, 1)
    torch.testing.assert_close(layer_norm2d(x, None, None, 3.0, backend=backend).flatten(), torch.tensor([-0.5, 0.5]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.rand(2, 3, 4), None, None), r"x must be \(b, c, h, w\).*\(2, 3, 4\)"),
        ((torch.ones(1, 2, 3, 3, dtype=torch.int32), None, None), "float dtype"),
        ((torch.rand(1, 4, 2, 2), torch.ones(3), None), r"weight must be \(c,\) = \(4,\), got \(3,\)"),
        ((torch.rand(1, 4, 2, 2), None, torch.ones(4, 1)), r"bias must be .*got \(4, 1\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer_norm2d(*arguments)
