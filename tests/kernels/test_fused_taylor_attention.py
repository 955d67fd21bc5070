"""T-MSA by Triton: interpreted against float64, as PyTorch's operators, compiled ahead of time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.dispatch import KernelUnavailable, available, explain
from kernels.taylor_attention import cases, taylor_attention

pytestmark = pytest.mark.interpreter
ROOT = Path(__file__).parents[2]
CASES = (
    *cases.SMALL,
    cases.Case("several blocks", 1, 2, 24, 150),
    cases.Case("several blocks of v2", 1, 1, 18, 97, "v2"),
    cases.Case("wide heads", 1, 1, 48, 33, "v2"),
    cases.Case("rows that the ones do not fit", 1, 1, 16, 33),
    cases.Case("rows that are full", 1, 1, 15, 5, "v2"),
    cases.Case("one block", 1, 1, 3, 64),
    cases.Case("one pixel more", 1, 1, 3, 65, "v2"),
)
NAMED = {case.name: case for case in CASES}
# of each case float64 in both orders in memory; of some the others in that of the networks, which differ in little
RUNS = [
    *((case, torch.float64, last) for case in CASES for last in (False, True)),
    *(
        (NAMED[name], torch.float32, True)
        for name in ("v1", "v2", "v2 as first released", "several blocks", "wide heads")
    ),
    *((NAMED[name], torch.bfloat16, True) for name in ("v1", "several blocks of v2", "wide heads")),
    (NAMED["v1"], torch.float16, True),
    (NAMED["v2"], torch.bfloat16, False),
]
# tighter than what every backend promises: products of three tf32 parts are as good as float32
TOLERANCES = {**cases.TOLERANCES, torch.float32: 3e-6}
NAMES = ("q", "k", "v", "temperature", "gate", "focus_weight")
by_order = pytest.mark.parametrize("last", [False, True], ids=["pixels-innermost", "channels-innermost"])


def with_gradients(arguments, *, prepare=lambda x: x, upstream=None, **options):
    leaves = {k: prepare(v.detach()).requires_grad_() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    out = taylor_attention(**{**arguments, **leaves, **options})
    if upstream is None:
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def widened(arguments):
    return {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def images(arguments, change):
    return {**arguments, **{name: change(arguments[name]) for name in ("q", "k", "v")}}


def channels_innermost(x):
    """As the networks have it: heads side by side, with their channels innermost."""
    return x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)


def close(found, expected, tolerance):
    for name, value in expected.items():
        # these hardly matter: their gradients are the small differences of large numbers
        floor = 0.1 * float(expected["v"].norm()) if name in ("q", "k", "focus_weight") else 0
        error = float((found[name].double() - value).norm())
        assert error <= tolerance * max(float(value.norm()), floor), (name, error, float(value.norm()))


def name_of(run):
    case, dtype, last = run
    return f"{case.name.replace(' ', '-')}-{str(dtype)[6:]}-{'channels' if last else 'pixels'}-innermost"


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_it_equals_the_float64_reference_with_every_gradient(run, guarded_outputs, guards):
    case, dtype, last = run
    arguments = cases.make_inputs(case, dtype=dtype)
    if last:
        arguments = images(arguments, channels_innermost)
    found = with_gradients(arguments, prepare=guards.around, backend="triton")
    assert all(value.dtype == dtype for value in found.values())
    close(found, with_gradients(widened(arguments), backend="reference"), TOLERANCES[dtype])


@pytest.mark.parametrize("left_out", ["temperature", "gate"])
@pytest.mark.parametrize(("form", "gate_mode"), [("v1", "add"), ("v2", "multiply")])
def test_each_factor_acts_without_the_other_and_each_gate_in_either_form(form, gate_mode, left_out, interpreter):
    arguments = cases.make_inputs(cases.Case("", 1, 2, 3, 7, form), dtype=torch.float64)
    arguments["gate_mode"] = gate_mode
    close(with_gradients(arguments, backend="triton"), with_gradients(arguments, backend="reference"), 1e-11)
    del arguments[left_out]
    close(with_gradients(arguments, backend="triton"), with_gradients(arguments, backend="reference"), 1e-11)


def change_settings(monkeypatch, **changes):
    from kernels.taylor_attention import fused_layout

    settings = fused_layout.launch.settings

    def changed(*keys, **where):
        return {name: changes.get(name, value) for name, value in settings(*keys, **where).items()}

    monkeypatch.setattr(fused_layout.launch, "settings", changed)


@by_order
def test_programs_share_the_blocks_and_their_sums_are_added(last, guarded_outputs, monkeypatch):
    # 7 blocks for each head, the last one of 4 pixels: 4 programs, the last with one block; dW in halves of blocks
    change_settings(monkeypatch, programs=7, PIXELS=16, SUM_PIXELS=8)
    arguments = cases.make_inputs(cases.Case("", 1, 2, 5, 100, "v2"), dtype=torch.float64)
    arguments = images(arguments, channels_innermost) if last else arguments
    found = with_gradients(arguments, backend="triton")
    close(found, with_gradients(arguments, backend="reference"), 1e-11)


def test_views_give_what_their_copies_give(interpreter, guards):
    arguments = cases.make_inputs(cases.Case("", 2, 3, 5, 11), dtype=torch.float64)
    expected = with_gradients(arguments, backend="reference")
    for order in ((1, 0, 2, 3), (3, 2, 1, 0), (0, 3, 1, 2), (2, 0, 1, 3)):
        back = [order.index(i) for i in range(4)]
        views = images(arguments, lambda x, o=order, b=back: guards.around(x.permute(o).contiguous()).permute(b))
        views["gate"] = torch.stack([arguments["gate"]] * 2, dim=-1)[..., 0]
        # each leaf keeps its strides
        close(with_gradients(views, backend="triton"), expected, 1e-11)


@pytest.mark.parametrize("form", ["v1", "v2"])
def test_parts_of_a_packed_projection_are_read_where_they_lie(form, interpreter, guards):
    arguments = cases.make_inputs(cases.Case("", 2, 2, 5, 11, form), dtype=torch.float64)
    expected = with_gradients(arguments, backend="reference")
    packed = torch.stack([arguments[name] for name in ("q", "k", "v")], dim=1)  # (b, 3, heads, d, n)
    packed = guards.around(packed.permute(0, 4, 1, 2, 3).contiguous()).permute(2, 0, 3, 4, 1)
    close(with_gradients({**arguments, **dict(zip("qkv", packed, strict=True))}, backend="triton"), expected, 1e-11)
    # one of them in another order, and pixels of which every other counts
    spread = torch.stack([packed[0]] * 2, dim=-1)[..., 0]
    close(with_gradients({**arguments, "q": spread, "v": packed[2]}, backend="triton"), expected, 1e-11)


@by_order
def test_an_upstream_gradient_may_have_any_strides(last, interpreter):
    arguments = cases.make_inputs(cases.Case("", 1, 2, 3, 7, "v2"), dtype=torch.float64)
    arguments = images(arguments, channels_innermost) if last else arguments
    shape = arguments["v"].shape
    spread = torch.randn(*shape, 2, dtype=torch.float64)[..., 0]
    for upstream in (torch.ones((), dtype=torch.float64).expand(shape), spread, spread.mT.contiguous().mT):
        found = with_gradients(arguments, upstream=upstream, backend="triton")
        close(found, with_gradients(arguments, upstream=upstream, backend="reference"), 1e-11)


def test_the_output_is_laid_out_as_the_values_are(interpreter):
    arguments = cases.make_inputs(cases.SMALL[0])
    assert taylor_attention(**arguments, backend="triton").is_contiguous()
    out = taylor_attention(**images(arguments, channels_innermost), backend="triton")
    assert out.permute(0, 3, 1, 2).is_contiguous()


@pytest.mark.parametrize("image", ["black", "black queries and keys", "one black pixel", "constant", "opposed"])
@pytest.mark.parametrize("form", ["v1", "v2"])
def test_images_without_directions_give_no_nan(form, image, interpreter):
    arguments = cases.make_inputs(cases.Case("", 1, 2, 4, 9, form))
    for name in ("q", "k", "v", "gate") if image == "black" else ("q", "k"):
        x = arguments[name]
        x[..., 3 if image == "one black pixel" else slice(None)] = x[..., :1] if image in ("constant", "opposed") else 0
    if image == "opposed":
        # the denominator of V2 is next to nothing, and what float32 makes of it is noise
        arguments["k"] = -arguments["q"]
    found = with_gradients(arguments, backend="triton")
    assert all(value.isfinite().all() for value in found.values())
    if image != "opposed" or form == "v1":
        close(found, with_gradients(widened(arguments), backend="reference"), TOLERANCES[torch.float32])


def test_black_pixels_attend_to_all_alike(interpreter):
    arguments = cases.make_inputs(cases.Case("", 1, 2, 4, 9, "v2", False))
    black = {**arguments, "q": torch.zeros_like(arguments["q"]), "k": torch.zeros_like(arguments["k"])}
    out = taylor_attention(**black, backend="triton")
    torch.testing.assert_close(out, arguments["v"].mean(dim=-1, keepdim=True).expand_as(out))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("factor", [1e-39, 1e-30, 1e-6, 0.15, 1e6])
def test_faint_and_glaring_vectors_are_focused_as_in_float64(factor, interpreter):
    arguments = cases.make_inputs(cases.Case("", 1, 1, 4, 7, "v2", False))
    for name in ("q", "k"):
        arguments[name] *= factor
    expected = taylor_attention(**widened(arguments), backend="reference")
    found = with_gradients(arguments, backend="triton")
    torch.testing.assert_close(found["out"].double(), expected, rtol=1e-5, atol=1e-6)
    assert all(value.isfinite().all() for value in found.values())


def test_many_pixels_in_float16_stay_finite(interpreter, monkeypatch):
    change_settings(monkeypatch, PIXELS=4096)
    arguments = cases.make_inputs(cases.Case("", 1, 1, 2, 16_384, "v2"), dtype=torch.float16)
    arguments["v"] += 8
    out = taylor_attention(**arguments, backend="triton")
    exact = taylor_attention(**widened(arguments), backend="reference")
    assert (out.double() - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("form", ["v1", "v2", "v2-pre"])
def test_the_gradients_are_the_derivatives(form, interpreter):
    # entry by entry where there are few enough for it
    slow = form == "v1"
    arguments = cases.make_inputs(cases.Case("", 1, 1 if slow else 2, 2, 3, form), dtype=torch.float64)
    names = [name for name in NAMES if name in arguments]
    rest = {name: value for name, value in arguments.items() if name not in names}
    tensors = [arguments[name].requires_grad_() for name in names]

    def attend(*values):
        return taylor_attention(**dict(zip(names, values, strict=True)), **rest, backend="triton")

    assert torch.autograd.gradcheck(attend, tensors, fast_mode=not slow)


@pytest.mark.parametrize(("form", "order"), [("v1", (0, 3, 1, 2)), ("v2", (0, 1, 2, 3)), ("v1", (3, 2, 1, 0))], ids=str)
def test_it_is_an_operator_as_pytorch_wants_it(form, order, interpreter):
    from kernels.taylor_attention import fused

    back = [order.index(i) for i in range(4)]
    arguments = cases.make_inputs(cases.Case("", 1, 2, 2, 3, form, order[0] == 0))
    arguments = images(arguments, lambda x: x.permute(order).contiguous().permute(back))
    tensors = [arguments.get(name) for name in NAMES]
    settings = (
        arguments["norm"],
        arguments["eps"],
        arguments["gate_mode"] == "multiply",
        arguments["focus_power"] or 0,
    )
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    torch.library.opcheck(fused._op, (*leaves, *settings))
    out, w = fused._op(*tensors, *settings)
    torch.library.opcheck(fused._backward_op, (torch.randn_like(out), *tensors, w, *settings))


@pytest.mark.parametrize("case", cases.SMALL[:2], ids=lambda case: case.name)
def test_it_compiles_to_one_graph_forwards_and_backwards(case, interpreter):
    torch._dynamo.reset()
    arguments = cases.make_inputs(case)
    compiled = torch.compile(taylor_attention, fullgraph=True, backend="aot_eager")
    leaves = {k: v.requires_grad_() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    upstream = torch.randn(arguments["v"].shape, generator=torch.Generator().manual_seed(1))
    out = compiled(**arguments, backend="triton")
    found = [out, *torch.autograd.grad(out, list(leaves.values()), upstream)]
    out = taylor_attention(**arguments, backend="reference")
    expected = [out, *torch.autograd.grad(out, list(leaves.values()), upstream)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)


def test_a_second_derivative_is_refused_in_words(interpreter):
    arguments = cases.make_inputs(cases.SMALL[0], dtype=torch.float64)
    v = arguments["v"].requires_grad_()
    out = taylor_attention(**arguments, backend="triton").square().sum()
    (gradient,) = torch.autograd.grad(out, v, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative .*backend='reference'"):
        gradient.sum().backward()


def test_it_is_chosen_on_request_only_where_it_is_interpreted(interpreter):
    arguments = cases.make_inputs(cases.SMALL[0])
    tensors = [arguments.get(name) for name in NAMES]
    assert available("taylor_attention", *tensors)[0] == "triton"
    assert explain("taylor_attention", *tensors).startswith("taylor_attention: torch, chosen automatically")
    wide = cases.make_inputs(cases.Case("", 1, 1, 64, 2))
    with pytest.raises(KernelUnavailable, match="at most 63 channels, and this one has 64"):
        taylor_attention(**wide, backend="triton")


@pytest.mark.aot
def test_it_compiles_for_hopper_without_spills():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "scripts.aot_report", "--op", "taylor_attention"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command += ["--match", "fp32 focused 4x18 channels-last", "--arch", "90"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 compiled, 0 failed" in done.stdout
