"""The deformable convolution: torchvision's results, plain convolutions, and every backend against the reference."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.deform_conv import cases, deform_depthwise_conv2d, torch_impl

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = np.load(ROOT / "tests/golden/deform_conv/torchvision.npz")
by_backend = pytest.mark.parametrize("backend", ["torch", "reference"])
by_case = pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name.replace(" ", "-"))


def with_gradients(x, offset, weight, upstream=None, **options):
    leaves = [tensor.detach().requires_grad_() for tensor in (x, offset, weight)]
    out = deform_depthwise_conv2d(*leaves, **options)
    if upstream is None:
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    gradients = torch.autograd.grad(out, leaves, upstream)
    return dict(zip(("out", "d_x", "d_offset", "d_weight"), (out.detach(), *gradients), strict=True))


def widened(arguments):
    return {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


@pytest.fixture
def threads():
    """``threads(n)``: PyTorch uses n from now on."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@by_backend
@pytest.mark.parametrize("name", sorted({key.split("/")[0] for key in GOLDEN.files}))
def test_values_and_gradients_are_those_of_torchvision(name, backend):
    stored = {k.split("/")[1]: torch.from_numpy(GOLDEN[k]) for k in GOLDEN.files if k.split("/")[0] == name}
    clamp = tuple(stored.pop("clamp").tolist()) or None
    inputs = {key: stored.pop(key) for key in ("x", "offset", "weight", "upstream")}
    found = with_gradients(**inputs, clamp=clamp, backend=backend)
    for key, value in stored.items():
        torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-13)


@by_backend
@pytest.mark.parametrize("dtype", list(cases.TOLERANCES), ids=str)
@by_case
def test_every_backend_equals_the_float64_reference_with_every_gradient(case, dtype, backend):
    arguments = cases.make_inputs(case, dtype=dtype)
    expected = with_gradients(**widened(arguments), backend="reference")
    found = with_gradients(**arguments, backend=backend)
    for name, value in expected.items():
        assert found[name].dtype == (arguments["offset"].dtype if name == "d_offset" else dtype)
        error = (found[name].double() - value).norm()
        assert error <= cases.TOLERANCES[dtype] * value.norm(), (name, float(error), float(value.norm()))


@by_backend
@pytest.mark.parametrize("clamp", [None, (-1.0, 0.75)], ids=["free", "clamped"])
def test_the_gradients_are_the_derivatives(clamp, backend):
    arguments = cases.make_inputs(cases.Case("", 1, 2, 3, 2), dtype=torch.float64)
    tensors = [arguments[name].requires_grad_() for name in ("x", "offset", "weight")]

    def convolve(*tensors):
        return deform_depthwise_conv2d(*tensors, clamp=clamp, backend=backend)

    assert torch.autograd.gradcheck(convolve, tensors)


@by_backend
def test_without_offsets_it_is_a_depthwise_convolution(backend):
    arguments = cases.make_inputs(cases.Case("", 2, 5, 9, 7), dtype=torch.float64)
    x, weight = arguments["x"], arguments["weight"]
    out = deform_depthwise_conv2d(x, torch.zeros_like(arguments["offset"]), weight, clamp=(-3, 3), backend=backend)
    torch.testing.assert_close(out, F.conv2d(x, weight, padding=1, groups=5))


@by_backend
def test_whole_offsets_shift_the_image_and_zeros_come_in(backend):
    arguments = cases.make_inputs(cases.Case("", 1, 3, 8, 6), dtype=torch.float64)
    weight = torch.zeros(3, 1, 3, 3, dtype=torch.float64)
    weight[:, :, 1, 1] = 1
    offset = torch.zeros_like(arguments["offset"])
    # tap 4 is the middle: two down, one to the left
    offset[:, 8], offset[:, 9] = 2, -1
    out = deform_depthwise_conv2d(arguments["x"], offset, weight, clamp=None, backend=backend)
    torch.testing.assert_close(out, F.pad(arguments["x"], (1, -1, -2, 2)))


@by_backend
def test_offsets_beyond_the_clamp_act_as_its_bounds_and_get_no_gradient(backend):
    arguments = cases.make_inputs(cases.Case("", 1, 3, 7, 6, (-1.5, 2.0), 4.0), dtype=torch.float64)
    offset = arguments["offset"]
    offset[:, :4] = 2.0
    found = with_gradients(**arguments, backend=backend)
    free = with_gradients(**{**arguments, "offset": offset.clamp(-1.5, 2.0), "clamp": None}, backend=backend)
    inside = (offset >= -1.5) & (offset <= 2.0)
    assert inside[:, :4].all()
    assert not inside.all()
    torch.testing.assert_close(found["out"], free["out"])
    torch.testing.assert_close(found["d_offset"], free["d_offset"] * inside)


@by_backend
def test_one_offset_that_is_not_a_number_spoils_one_pixel(backend):
    arguments = cases.make_inputs(cases.Case("", 1, 3, 7, 6))
    arguments["offset"][0, 5, 2, 4] = math.nan
    out = deform_depthwise_conv2d(**arguments, backend=backend)
    spoilt = out.isnan()
    assert spoilt[0, :, 2, 4].all()
    assert spoilt.sum() == 3


@by_backend
def test_an_image_does_not_see_its_batch(backend):
    arguments = cases.make_inputs(cases.Case("", 3, 4, 9, 8))
    second = {k: v[1:2] if k in ("x", "offset") else v for k, v in arguments.items()}
    out = deform_depthwise_conv2d(**arguments, backend=backend)
    torch.testing.assert_close(out[1:2], deform_depthwise_conv2d(**second, backend=backend))


@by_backend
def test_views_give_what_their_copies_give(backend):
    arguments = cases.make_inputs(cases.Case("", 2, 4, 6, 5))
    expected = with_gradients(**arguments, backend=backend)
    views = {name: torch.cat([arguments[name]] * 2, dim=1)[:, : arguments[name].shape[1]] for name in ("x", "offset")}
    views["weight"] = arguments["weight"].mT.contiguous().mT
    assert not any(view.is_contiguous() for view in views.values())
    last = {k: v.contiguous(memory_format=torch.channels_last) for k, v in arguments.items() if k in ("x", "offset")}
    for changed in (views, last):
        for name, value in with_gradients(**{**arguments, **changed}, backend=backend).items():
            torch.testing.assert_close(value, expected[name])


@by_backend
def test_an_expanded_gradient_is_as_good_as_its_copy(backend):
    arguments = cases.make_inputs(cases.Case("", 2, 4, 6, 5))
    ones = torch.ones(()).expand(2, 4, 6, 5)
    expected = with_gradients(**arguments, upstream=ones.contiguous(), backend=backend)
    for name, value in with_gradients(**arguments, upstream=ones, backend=backend).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


@by_backend
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (1, 9)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_images_of_one_value_give_finite_outputs_and_gradients(value, dtype, size, backend):
    arguments = cases.make_inputs(cases.Case("", 2, 3, *size), dtype=dtype)
    arguments["x"] = torch.full_like(arguments["x"], value)
    found = with_gradients(**arguments, backend=backend)
    assert all(tensor.isfinite().all() for tensor in found.values())
    if value == 0:
        assert not found["out"].any()
        assert not found["d_offset"].any()
        assert not found["d_weight"].any()
        assert found["d_x"].any()


@by_backend
def test_256_x_256_pixels_in_float16_stay_finite_and_exact(backend):
    arguments = cases.make_inputs(cases.Case("", 1, 1, 256, 256), dtype=torch.float16)
    found = with_gradients(**arguments, upstream=arguments["x"], backend=backend)
    exact = with_gradients(**widened(arguments), upstream=arguments["x"].double(), backend="reference")
    for name, value in exact.items():
        assert found[name].isfinite().all(), name
        assert (found[name].double() - value).norm() <= cases.TOLERANCES[torch.float16] * value.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_channels_last_views_that_are_cut_out_give_the_same_in_every_dtype(dtype):
    arguments = cases.make_inputs(cases.Case("", 2, 4, 7, 5), dtype=dtype)
    expected = with_gradients(**arguments, backend="torch")
    x = torch.zeros(2, 9, 8, 4, dtype=dtype)
    x[:, 1:-1, 2:-1] = arguments["x"].permute(0, 2, 3, 1)
    arguments["x"] = x[:, 1:-1, 2:-1].permute(0, 3, 1, 2)
    assert not arguments["x"].is_contiguous(memory_format=torch.channels_last)
    for name, value in with_gradients(**arguments, backend="torch").items():
        assert (value.double() - expected[name].double()).norm() <= cases.TOLERANCES[dtype] * expected[
            name
        ].double().norm()


def test_channels_last_comes_out_as_it_goes_in():
    arguments = cases.make_inputs(cases.Case("", 2, 4, 6, 5))
    for layout in (torch.contiguous_format, torch.channels_last):
        arguments["x"] = arguments["x"].contiguous(memory_format=layout)
        found = with_gradients(**arguments, backend="torch")
        assert found["out"].is_contiguous(memory_format=layout)
        assert found["d_x"].is_contiguous(memory_format=layout)


@pytest.mark.parametrize("clamp", [(-3.0, 3.0), None], ids=["clamped", "free"])
def test_the_number_of_threads_changes_no_bit_and_neither_does_a_second_run(clamp, threads):
    arguments = cases.make_inputs(cases.Case("", 1, 5, 90, 110, clamp))
    threads(1)
    expected = with_gradients(**arguments, backend="torch")
    for count in (2, 3, 3):
        threads(count)
        for name, value in with_gradients(**arguments, backend="torch").items():
            assert torch.equal(value, expected[name]), (name, count)


@pytest.mark.parametrize("together", [0, 10_000], ids=["in shares", "images together"])
def test_several_small_pieces_give_what_one_gives(together, monkeypatch):
    arguments = cases.make_inputs(cases.Case("", 2, 3, 29, 31), dtype=torch.float64)
    expected = with_gradients(**arguments, backend="reference")
    small = {"PIECE": 100, "FEWEST": 7, "PIECE_BACKWARD": 100, "FEWEST_BACKWARD": 50, "SHARE_ROWS": 2, "SHARE": 65}
    for name, value in {**small, "TOGETHER": together}.items():
        monkeypatch.setattr(torch_impl, name, value)
    for name, value in with_gradients(**arguments, backend="torch").items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("wanted", ["x", "offset", "weight"])
def test_only_the_gradients_that_are_asked_for_are_given(wanted):
    arguments = cases.make_inputs(cases.SMALL[0])
    expected = with_gradients(**arguments, upstream=torch.ones(2, 5, 7, 9), backend="torch")
    arguments[wanted].requires_grad_()
    deform_depthwise_conv2d(**arguments, backend="torch").sum().backward()
    for name in ("x", "offset", "weight"):
        assert (arguments[name].grad is not None) == (name == wanted)
    torch.testing.assert_close(arguments[wanted].grad, expected[f"d_{wanted}"])


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operator makes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self.size = max(self.size, tensor.untyped_storage().nbytes())
        return out


def test_a_wide_map_needs_no_memory_beyond_its_own_size():
    case = cases.Case("", 1, 24, 64, 1280)
    arguments = cases.make_inputs(case)
    own = arguments["x"].nbytes
    with Largest() as largest, torch.no_grad():
        deform_depthwise_conv2d(**arguments, backend="torch")
    # the output; nine samples of each pixel would be nine times as much
    assert largest.size == own
    with Largest() as largest:
        with_gradients(**arguments, upstream=torch.ones(()).expand_as(arguments["x"]), backend="torch")
    assert largest.size <= own


def test_it_compiles_to_one_graph_forwards_and_backwards():
    arguments = cases.make_inputs(cases.Case("", 2, 3, 7, 6))
    tensors = [arguments[name].requires_grad_() for name in ("x", "offset", "weight")]

    def convolve(*tensors):
        return deform_depthwise_conv2d(*tensors, clamp=(-3, 3))

    upstream = torch.randn(2, 3, 7, 6)
    compiled = torch.compile(convolve, fullgraph=True, backend="aot_eager")
    results = [(out, *torch.autograd.grad(out, tensors, upstream)) for out in (compiled(*tensors), convolve(*tensors))]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@by_backend
def test_autocast_changes_nothing(backend):
    arguments = cases.make_inputs(cases.SMALL[0])
    expected = deform_depthwise_conv2d(**arguments, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        out = deform_depthwise_conv2d(**arguments, backend=backend)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_a_second_derivative_is_refused_in_words():
    arguments = cases.make_inputs(cases.SMALL[0])
    out = deform_depthwise_conv2d(**{**arguments, "x": arguments["x"].requires_grad_()}, backend="torch")
    with pytest.raises(RuntimeError, match=r"no second derivative .*backend='reference'"):
        torch.autograd.grad(out.sum(), arguments["x"], create_graph=True)


def test_training_says_nothing_of_beta():
    code = """
import torch
from kernels.deform_conv import cases, deform_depthwise_conv2d
arguments = cases.make_inputs(cases.SMALL[0])
arguments["offset"].requires_grad_()
deform_depthwise_conv2d(**arguments).sum().backward()
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.rand(5, 7, 9)}, r"x must be \(b, c, h, w\) .*got \(5, 7, 9\)"),
        ({"x": torch.rand(2, 5, 0, 9)}, r"at least one channel and pixel, got \(2, 5, 0, 9\)"),
        ({"x": torch.ones(2, 5, 7, 9, dtype=torch.int64)}, "x must be of a float dtype, got torch.int64"),
        ({"offset": torch.rand(2, 9, 7, 9)}, r"offset must be \(2, 18, 7, 9\) .*got \(2, 9, 7, 9\)"),
        ({"offset": torch.rand(2, 18, 7, 8)}, r"offset must be \(2, 18, 7, 9\) .*got \(2, 18, 7, 8\)"),
        ({"offset": torch.ones(2, 18, 7, 9, dtype=torch.int32)}, "offset must be of a float dtype, got torch.int32"),
        ({"weight": torch.rand(5, 5, 3, 3)}, r"weight must be \(5, 1, 3, 3\) .*got \(5, 5, 3, 3\)"),
        ({"weight": torch.rand(5, 1, 3, 3, device="meta")}, "weight must be on the device of x, cpu, got meta"),
        ({"clamp": (1.0, -1.0)}, r"finite and in this order, or None, got \(1.0, -1.0\)"),
        ({"clamp": (-1.0, math.nan)}, r"finite and in this order, or None, got \(-1.0, nan\)"),
        ({"clamp": (-math.inf, 1.0)}, r"finite and in this order, or None, got \(-inf, 1.0\)"),
        ({"clamp": (1.0, 2.0, 3.0)}, r"\(lowest, highest\) in pixels, or None, got \(1.0, 2.0, 3.0\)"),
        ({"clamp": 3.0}, r"\(lowest, highest\) in pixels, or None, got 3.0"),
        ({"clamp": ()}, r"\(lowest, highest\) in pixels, or None, got \(\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(changes, message):
    with pytest.raises(ValueError, match=message):
        deform_depthwise_conv2d(**{**cases.make_inputs(cases.SMALL[0]), **changes})


def test_the_comparison_says_in_words_that_torchvision_is_missing(monkeypatch, capsys):
    from scripts import compare_deform_conv

    monkeypatch.setitem(sys.modules, "torchvision.ops", None)
    assert compare_deform_conv.main([]) == 1
    assert "torchvision cannot be imported" in capsys.readouterr().out


@pytest.mark.parametrize("size", [(5, 7), (1, 1), (1, 6)], ids=str)
@pytest.mark.parametrize("clamp", [None, (-3, 2)], ids=str)
def test_a_graph_for_other_programs_holds_for_sizes_that_were_not_traced(size, clamp):
    generator = torch.Generator().manual_seed(0)

    def tensors(b, h, w):
        shapes = (b, 4, h, w), (b, 18, h, w), (4, 1, 3, 3)
        x, offset, weight = (torch.randn(shape, generator=generator) for shape in shapes)
        # up to far outside of the image
        return x, 4 * offset, weight

    traced = torch.jit.trace(lambda *given: deform_depthwise_conv2d(*given, clamp=clamp), tensors(1, 8, 4))
    given = tensors(2, *size)
    expected = deform_depthwise_conv2d(*given, clamp=clamp, backend="reference")
    torch.testing.assert_close(traced(*given), expected, rtol=0, atol=1e-5)
