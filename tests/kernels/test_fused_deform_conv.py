"""The deformable convolution by Triton: interpreted against float64, as PyTorch's operators, compiled ahead of time."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kernels.deform_conv import cases, deform_depthwise_conv2d
from kernels.dispatch import KernelUnavailable, available, explain

pytestmark = pytest.mark.interpreter
ROOT = Path(__file__).parents[2]
CASES = (
    *cases.SMALL[:2],
    *(cases.Case(f"{c} channels", 1, c, 4, 6) for c in (24, 30, 48)),
    *cases.SMALL[2:5],
    cases.Case("one row", 1, 2, 1, 13),
    cases.Case("one column", 1, 2, 13, 1),
    cases.Case("one channel", 1, 1, 8, 8),
)
# how many of them in each dtype: others than float64 differ in what is loaded and stored only
FIRST = {torch.float64: len(CASES), torch.float32: 5, torch.float16: 1, torch.bfloat16: 1}
RUNS = [(case, dtype) for dtype, count in FIRST.items() for case in CASES[:count]]
CLAMPED = tuple(case for case in CASES[5:] if case.clamp[1] < 60)
by_clamp = pytest.mark.parametrize("clamp", [None, (-1.0, 0.8)], ids=["free", "clamped"])


def by_case(given):
    return pytest.mark.parametrize("case", given, ids=lambda case: case.name.replace(" ", "-"))


@pytest.fixture
def blocks(interpreter, monkeypatch):
    """``blocks(TH=8)``: kernels are launched with these settings; by now one block takes a small image."""
    from kernels.deform_conv import fused

    shipped = fused._settings

    def use(**changes):
        def settings(kernel, x):
            own = shipped(kernel, x)
            return own | {key: value for key, value in changes.items() if key in own}

        monkeypatch.setattr(fused, "_settings", settings)

    use(TH=16, TW=16, BO=1024)
    return use


@pytest.fixture
def deterministic():
    """``deterministic()``: from now on PyTorch is to do the same every time."""
    yield lambda: torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)


def with_gradients(x, offset, weight, upstream=None, *, prepare=lambda t: t, **options):
    leaves = [prepare(tensor.detach()).requires_grad_() for tensor in (x, offset, weight)]
    out = deform_depthwise_conv2d(*leaves, **options)
    if upstream is None:
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    gradients = torch.autograd.grad(out, leaves, upstream)
    return dict(zip(("out", "d_x", "d_offset", "d_weight"), (out.detach(), *gradients), strict=True))


def widened(arguments):
    return {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def last(x):
    return x.contiguous(memory_format=torch.channels_last)


def close(found, expected, tolerance):
    for name, value in expected.items():
        # a NaN would pass no comparison
        error = float((found[name].double() - value).norm())
        assert error <= tolerance * float(value.norm()), (name, error, float(value.norm()))


def operands(case, guards):
    """What the operators take, in guarded memory: pixels with their channels side by side, and tap by tap."""
    arguments = cases.make_inputs(case, dtype=torch.float64)
    x, weight = arguments["x"].permute(0, 2, 3, 1).contiguous(), arguments["weight"].reshape(-1, 9).t().contiguous()
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return [guards.around(t) for t in (upstream, x, arguments["offset"], weight)]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0].name.replace(' ', '-')}-{str(run[1])[6:]}")
def test_it_equals_the_float64_reference_with_every_gradient(run, blocks):
    case, dtype = run
    arguments = cases.make_inputs(case, dtype=dtype)
    if dtype != torch.float64:
        arguments["x"] = last(arguments["x"])
    found = with_gradients(**arguments, backend="triton")
    for name, value in found.items():
        assert value.dtype == (arguments["offset"].dtype if name == "d_offset" else dtype)
    close(found, with_gradients(**widened(arguments), backend="reference"), cases.TOLERANCES[dtype])


@pytest.mark.parametrize("gathered", [False, True], ids=["added", "gathered"])
@by_case((cases.Case("blocks of channels", 1, 33, 5, 9, (-1.0, 1.0)), cases.Case("images", 2, 3, 9, 2, (-2.0, 1.5))))
def test_blocks_as_they_are_launched_touch_nothing_but_their_tensors(
    case, gathered, guards, guarded_outputs, deterministic, monkeypatch
):
    from kernels.deform_conv import fused

    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: torch.empty(*shape, **options).zero_())
    upstream, x, offset, weight = operands(case, guards)
    if gathered:
        deterministic()
    out = fused._forward_op(x, offset, weight, *case.clamp)
    d_x, d_offset, d_weight = fused._backward_op(upstream, x, offset, weight, *case.clamp, [True] * 3)
    found = {"out": out, "d_x": d_x, "d_offset": d_offset, "d_weight": d_weight}
    arguments = {"x": x.permute(0, 3, 1, 2), "offset": offset, "weight": weight.t().reshape(-1, 1, 3, 3)}
    expected = with_gradients(**arguments, upstream=upstream.permute(0, 3, 1, 2), clamp=case.clamp, backend="reference")
    expected = {k: v.permute(0, 2, 3, 1) if k in ("out", "d_x") else v for k, v in expected.items()}
    expected["d_weight"] = expected["d_weight"].reshape(-1, 9).t()
    close(found, expected, 1e-13)


@by_case(CLAMPED)
def test_a_gathered_gradient_equals_the_added_one(case, blocks, deterministic):
    arguments = cases.make_inputs(case, dtype=torch.float64)
    added = with_gradients(**arguments, backend="triton")
    deterministic()
    close(with_gradients(**arguments, backend="triton"), added, 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gathered_gradient_keeps_the_tolerances(dtype, blocks, deterministic):
    arguments = cases.make_inputs(cases.Case("", 1, 3, 6, 5), dtype=dtype)
    expected = with_gradients(**widened(arguments), backend="reference")
    deterministic()
    found = with_gradients(**arguments, backend="triton")
    close(found, expected, cases.TOLERANCES[dtype])


@pytest.mark.parametrize("clamp", [(-3.0, 3.0), (-0.5, 2.25), (1.25, 1.75), (-4.0, -2.0)], ids=str)
def test_gathering_looks_as_far_as_a_sample_reaches_and_no_further(clamp, interpreter):
    from kernels.deform_conv import fused

    first, last_one = fused._reach(*clamp, 99)
    places = torch.arange(-9, 10)
    # from an output at zero, by both bounds and all steps, the pixels that a sample takes from
    taken = {
        int(p)
        for bound in torch.linspace(*clamp, 401, dtype=torch.float64)
        for step in (-1, 0, 1)
        for p in places[(places - step - bound).abs() < 1]
    }
    assert (first, last_one) == (min(taken), max(taken))


def test_without_a_clamp_nothing_can_be_gathered(interpreter, deterministic):
    arguments = cases.make_inputs(cases.Case("", 1, 2, 3, 4, None))
    arguments["x"].requires_grad_()
    out = deform_depthwise_conv2d(**arguments, backend="triton")
    deterministic()
    with pytest.raises(RuntimeError, match=r"without a clamp .*give clamp=\(low, high\) or take backend='reference'"):
        out.sum().backward()
    with pytest.raises(KernelUnavailable, match="without a clamp it adds the gradient by x in any order"):
        deform_depthwise_conv2d(**arguments, backend="triton")
    arguments["x"].requires_grad_(False)
    deform_depthwise_conv2d(**arguments, backend="triton")


def test_without_offsets_it_is_a_depthwise_convolution(blocks):
    arguments = cases.make_inputs(cases.Case("", 1, 5, 9, 7), dtype=torch.float64)
    x, weight = arguments["x"], arguments["weight"]
    out = deform_depthwise_conv2d(x, torch.zeros_like(arguments["offset"]), weight, clamp=(-3, 3), backend="triton")
    torch.testing.assert_close(out, F.conv2d(x, weight, padding=1, groups=5))


def test_whole_offsets_shift_the_image_and_zeros_come_in(blocks):
    arguments = cases.make_inputs(cases.Case("", 1, 3, 8, 6), dtype=torch.float64)
    weight = torch.zeros(3, 1, 3, 3, dtype=torch.float64)
    weight[:, :, 1, 1] = 1
    offset = torch.zeros_like(arguments["offset"])
    # tap 4 is the middle: two down, one to the left
    offset[:, 8], offset[:, 9] = 2, -1
    found = with_gradients(arguments["x"], offset, weight, clamp=(-2.0, 2.0), backend="triton")
    assert torch.equal(found["out"], F.pad(arguments["x"], (1, -1, -2, 2)))
    expected = with_gradients(arguments["x"], offset, weight, clamp=(-2.0, 2.0), backend="reference")
    close(found, expected, 1e-13)


def test_offsets_on_the_clamp_get_their_gradient_and_those_beyond_none(blocks):
    arguments = cases.make_inputs(cases.Case("", 1, 3, 7, 6, (-1.1, 2.3), 4.0), dtype=torch.float64)
    offset = arguments["offset"]
    offset[:, :4], offset[:, 4:8] = 2.3, -1.1
    found = with_gradients(**arguments, backend="triton")
    inside = (offset >= -1.1) & (offset <= 2.3)
    assert inside[:, :8].all()
    assert not found["d_offset"][~inside].any()
    assert found["d_offset"][:, :8].count_nonzero() > 200
    close(found, with_gradients(**arguments, backend="reference"), 1e-13)


def test_one_offset_that_is_not_a_number_spoils_one_pixel(blocks):
    arguments = cases.make_inputs(cases.Case("", 1, 3, 7, 6))
    arguments["offset"][0, 5, 2, 4] = math.nan
    out = deform_depthwise_conv2d(**arguments, backend="triton")
    spoilt = out.isnan()
    assert spoilt[0, :, 2, 4].all()
    assert spoilt.sum() == 3


def test_views_and_both_memory_formats_give_what_their_copies_give(blocks):
    arguments = cases.make_inputs(cases.Case("", 2, 4, 3, 5), dtype=torch.float64)
    expected = with_gradients(**arguments, backend="reference")
    views = {name: torch.cat([arguments[name]] * 2, dim=1)[:, : arguments[name].shape[1]] for name in ("x", "offset")}
    views["weight"] = arguments["weight"].mT.contiguous().mT
    padded = last(F.pad(arguments["x"], (1, 2, 1, 1), value=math.nan))[:, :, 1:-1, 1:-2]
    expanded = arguments["offset"][:1].expand(2, -1, -1, -1)
    for changed in (views, {"x": last(arguments["x"]), "offset": last(arguments["offset"])}, {"x": padded}):
        close(with_gradients(**{**arguments, **changed}, backend="triton"), expected, 1e-13)
    # the gradient of a sum has no strides
    arguments |= {"offset": expanded, "upstream": torch.ones((), dtype=torch.float64).expand(2, 4, 3, 5)}
    close(with_gradients(**arguments, backend="triton"), with_gradients(**arguments, backend="reference"), 1e-13)


def test_memory_formats_come_out_as_they_go_in(blocks):
    arguments = cases.make_inputs(cases.Case("", 1, 4, 6, 5))
    for layout in (torch.contiguous_format, torch.channels_last):
        arguments |= {name: arguments[name].contiguous(memory_format=layout) for name in ("x", "offset")}
        found = with_gradients(**arguments, backend="triton")
        assert found["out"].is_contiguous(memory_format=layout)
        assert found["d_offset"].is_contiguous(memory_format=layout)


@pytest.mark.parametrize("clamp", [None, (-3.0, 3.0)], ids=["free", "clamped"])
def test_an_empty_batch_has_gradients_of_zero(clamp, interpreter):
    found = with_gradients(**cases.make_inputs(cases.Case("", 0, 3, 5, 4, clamp)), backend="triton")
    assert found["out"].shape == found["d_x"].shape == (0, 3, 5, 4)
    assert found["d_offset"].shape == (0, 18, 5, 4)
    assert not found["d_weight"].any()


@pytest.mark.parametrize("gathered", [False, True], ids=["added", "gathered"])
@pytest.mark.parametrize("wanted", ["x", "offset", "weight"])
def test_only_the_gradients_that_are_asked_for_are_given(wanted, gathered, blocks, deterministic):
    arguments = cases.make_inputs(cases.Case("", 1, 3, 4, 5, (-1.0, 1.0)), dtype=torch.float64)
    expected = with_gradients(**arguments, upstream=torch.ones(1, 3, 4, 5).double(), backend="reference")
    if gathered:
        deterministic()
    arguments[wanted].requires_grad_()
    deform_depthwise_conv2d(**arguments, backend="triton").sum().backward()
    for name in ("x", "offset", "weight"):
        assert (arguments[name].grad is not None) == (name == wanted)
    torch.testing.assert_close(arguments[wanted].grad, expected[f"d_{wanted}"])


@by_clamp
def test_the_gradients_are_the_derivatives(clamp, blocks):
    arguments = cases.make_inputs(cases.Case("", 1, 2, 3, 2), dtype=torch.float64)
    tensors = [arguments[name].requires_grad_() for name in ("x", "offset", "weight")]

    def convolve(*tensors):
        return deform_depthwise_conv2d(*tensors, clamp=clamp, backend="triton")

    # along random directions: one by one, its 138 inputs would take a minute
    assert torch.autograd.gradcheck(convolve, tensors, fast_mode=True)


def test_it_is_an_operator_as_pytorch_wants_it(blocks):
    from kernels.deform_conv import fused

    x, offset, weight = torch.randn(1, 4, 3, 5), torch.randn(1, 18, 4, 3), torch.randn(9, 5)
    permuted = (x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3), last(offset), weight.t().contiguous().t())
    for tensors, clamp in (((x, offset, weight), (-3.0, 3.0)), (permuted, (None, None))):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        torch.library.opcheck(fused._forward_op, (*leaves, *clamp))
        wanted = [True, clamp[0] is None, True]
        torch.library.opcheck(fused._backward_op, (torch.randn(1, 4, 3, 5), *tensors, *clamp, wanted))


def test_it_compiles_to_one_graph_forwards_and_backwards(blocks):
    torch._dynamo.reset()

    def convolve(*tensors):
        return deform_depthwise_conv2d(*tensors, clamp=(-3, 3), backend="triton")

    compiled = torch.compile(convolve, fullgraph=True, backend="aot_eager")
    upstream = torch.randn(1, 3, 7, 6)
    for layout in (torch.contiguous_format, torch.channels_last):
        arguments = cases.make_inputs(cases.Case("", 1, 3, 7, 6))
        tensors = [arguments[n].contiguous(memory_format=layout).requires_grad_() for n in ("x", "offset", "weight")]
        out = compiled(*tensors)
        gradients = torch.autograd.grad(out, tensors, upstream)
        found = dict(zip(("out", "d_x", "d_offset", "d_weight"), (out.detach(), *gradients), strict=True))
        assert out.is_contiguous(memory_format=layout)
        close(found, with_gradients(**arguments, upstream=upstream, backend="reference"), 2e-6)


def test_autocast_changes_nothing(blocks):
    arguments = cases.make_inputs(cases.Case("", 1, 3, 4, 5))
    expected = deform_depthwise_conv2d(**arguments, backend="triton")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(deform_depthwise_conv2d(**arguments, backend="triton"), expected)


def test_a_second_derivative_is_refused_in_words(blocks):
    arguments = cases.make_inputs(cases.Case("", 1, 2, 3, 4))
    out = deform_depthwise_conv2d(**{**arguments, "x": arguments["x"].requires_grad_()}, backend="triton")
    (d_x,) = torch.autograd.grad(out.square().sum(), arguments["x"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative .*backend='reference'"):
        d_x.sum().backward()


def test_it_is_chosen_on_request_only_where_it_is_interpreted(interpreter):
    arguments = cases.make_inputs(cases.Case("", 1, 2, 3, 4))
    tensors = [arguments[name] for name in ("x", "offset", "weight")]
    assert available("deform_conv", *tensors)[0] == "triton"
    assert explain("deform_conv", *tensors, clamp=None).startswith("deform_conv: torch, chosen automatically")


def test_without_cuda_it_is_refused_with_the_reason():
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    with pytest.raises(KernelUnavailable, match="triton"):
        deform_depthwise_conv2d(**cases.make_inputs(cases.SMALL[0]), backend="triton")


@pytest.mark.aot
def test_it_compiles_for_hopper_without_spills():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "scripts.aot_report", "--op", "deform_conv", "--match", "fp32 c96", "--arch", "90"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 compiled, 0 failed" in done.stdout
