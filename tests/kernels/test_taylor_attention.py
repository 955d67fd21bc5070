"""T-MSA: the reference against the sum over all pairs of pixels, and every backend against the reference."""

import pytest
import torch

from kernels.taylor_attention import cases, reference, taylor_attention
from kernels.taylor_attention.parts import taylor_map, taylor_sums, units

BACKENDS = ("torch", "reference")
by_backend = pytest.mark.parametrize("backend", BACKENDS)
by_case = pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name.replace(" ", "-"))


def with_gradients(arguments, **options):
    leaves = {k: v.detach().clone().requires_grad_() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    out = taylor_attention(**{**arguments, **leaves, **options})
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def widened(arguments):
    return {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def pair_by_pair(q, k, v, *, norm, eps, gate_mode, focus_power, temperature=None, gate=None, focus_weight=None):
    """The weights of all pairs, written out."""

    def unit(x):
        return x / (x.norm(dim=2, keepdim=True) / norm + eps)

    weights = 1 + unit(q).mT @ unit(k)
    if focus_power is not None:
        more = unit(q.clamp(min=0) ** focus_power).mT @ unit(k.clamp(min=0) ** focus_power)
        weights = weights + focus_weight.view(-1, 1, 1) * more
    out = (weights @ v.mT / (weights.sum(dim=-1, keepdim=True) + eps)).mT
    out = out if temperature is None else out * temperature.view(-1, 1, 1)
    if gate is None:
        return out
    return out * gate.unsqueeze(2) if gate_mode == "multiply" else out + gate.unsqueeze(2)


@by_case
def test_the_reference_is_a_weighted_mean_over_all_pairs(case):
    arguments = cases.make_inputs(case, dtype=torch.float64)
    found = taylor_attention(**arguments, backend="reference")
    torch.testing.assert_close(found, pair_by_pair(**arguments), rtol=0, atol=1e-12)


@by_backend
@pytest.mark.parametrize("dtype", list(cases.TOLERANCES), ids=str)
@by_case
def test_every_backend_equals_the_float64_reference_with_every_gradient(case, dtype, backend):
    arguments = cases.make_inputs(case, dtype=dtype)
    found, expected = (
        with_gradients(arguments, backend=backend),
        with_gradients(widened(arguments), backend="reference"),
    )
    for name, value in expected.items():
        assert found[name].dtype == dtype
        error = (found[name].double() - value).norm()
        # these hardly matter: their gradients are the small differences of large numbers
        floor = 0.1 * expected["v"].norm() if name in ("q", "k", "focus_weight") else 0
        assert error <= cases.TOLERANCES[dtype] * max(value.norm(), floor), (name, float(error), float(value.norm()))


@by_backend
@pytest.mark.parametrize("form", ["v1", "v2", "v2-pre"])
def test_the_gradients_are_the_derivatives(form, backend):
    arguments = cases.make_inputs(cases.Case("", 1, 2, 3, 5, form), dtype=torch.float64)
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    rest = {name: value for name, value in arguments.items() if name not in names}
    tensors = [arguments[name].requires_grad_() for name in names]

    def attend(*values):
        return taylor_attention(**dict(zip(names, values, strict=True)), **rest, backend=backend)

    assert torch.autograd.gradcheck(attend, tensors)


@by_backend
@pytest.mark.parametrize("form", ["v1", "v2"])
def test_black_pixels_attend_to_all_alike_and_have_finite_gradients(form, backend):
    arguments = cases.make_inputs(cases.Case("", 1, 2, 4, 9, form, False))
    for name in ("q", "k"):
        arguments[name][..., 3] = 0
    found = with_gradients(arguments, backend=backend)
    torch.testing.assert_close(with_gradients(widened(arguments), backend="reference")["out"].float(), found["out"])
    assert all(value.isfinite().all() for value in found.values())
    all_black = {**arguments, "q": torch.zeros_like(arguments["q"]), "k": torch.zeros_like(arguments["k"])}
    out = taylor_attention(**all_black, backend=backend)
    torch.testing.assert_close(out, arguments["v"].mean(dim=-1, keepdim=True).expand_as(out))


@by_backend
@pytest.mark.parametrize("factor", [1e-6, 0.15, 1e3, 1e6])
def test_faint_and_glaring_vectors_are_focused_as_in_float64(factor, backend):
    if backend == "reference" and factor > 1:
        pytest.skip("the definition squares powers of eight, which float32 cannot hold")
    arguments = cases.make_inputs(cases.Case("", 1, 1, 4, 7, "v2", False))
    for name in ("q", "k"):
        arguments[name] *= factor
    expected = taylor_attention(**widened(arguments), backend="reference")
    torch.testing.assert_close(taylor_attention(**arguments, backend=backend).double(), expected, rtol=1e-5, atol=1e-6)
    assert all(value.isfinite().all() for value in with_gradients(arguments, backend=backend).values())


@by_backend
@pytest.mark.parametrize("form", ["v1", "v2"])
def test_65536_pixels_in_float16_stay_finite(form, backend):
    arguments = cases.make_inputs(cases.Case("", 1, 1, 2, 65_536, form), dtype=torch.float16)
    out = taylor_attention(**arguments, backend=backend)
    exact = taylor_attention(**widened(arguments), backend="reference")
    assert (out.double() - exact).norm() < 1e-3 * exact.norm()


@by_backend
def test_equal_values_are_their_own_mean(backend):
    arguments = cases.make_inputs(cases.SMALL[1], dtype=torch.float64) | {"temperature": None, "gate": None}
    arguments["v"] = torch.full_like(arguments["v"], 0.7)
    out = taylor_attention(**arguments, backend=backend)
    torch.testing.assert_close(out, arguments["v"], rtol=1e-7, atol=0)


@by_backend
def test_the_order_of_the_pixels_does_not_matter(backend):
    arguments = cases.make_inputs(cases.SMALL[0], dtype=torch.float64)
    order = torch.randperm(35)
    shuffled = {name: arguments[name][..., order] for name in ("q", "k", "v", "gate")}
    out = taylor_attention(**{**arguments, **shuffled}, backend=backend)
    torch.testing.assert_close(out, taylor_attention(**arguments, backend=backend)[..., order])


@by_backend
def test_views_give_what_their_copies_give(backend):
    arguments = cases.make_inputs(cases.SMALL[0])
    expected = with_gradients(arguments, backend=backend)
    views = {name: arguments[name].mT.contiguous().mT for name in ("q", "k", "v")}
    views["q"] = torch.cat([views["q"], views["k"]], dim=2)[:, :, : views["q"].shape[2]]
    assert not any(view.is_contiguous() for view in views.values())
    for name, value in with_gradients({**arguments, **views}, backend=backend).items():
        torch.testing.assert_close(value, expected[name])
    out = taylor_attention(**{**arguments, "v": arguments["v"].requires_grad_()}, backend=backend)
    (constant,) = torch.autograd.grad(out.sum(), arguments["v"])
    (ones,) = torch.autograd.grad(taylor_attention(**arguments, backend=backend), arguments["v"], torch.ones_like(out))
    torch.testing.assert_close(constant, ones)


def test_the_reference_has_a_gradient_at_zero():
    x = torch.zeros(1, 1, 3, 2, requires_grad=True)
    reference.unit(x, 1.0, 1e-8).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.rand(2, 6, 35)}, r"q must be \(b, heads, d, n\) of a float dtype, got \(2, 6, 35\)"),
        ({"v": torch.ones(2, 2, 6, 35, dtype=torch.int64)}, "q and v must have one shape|v must be"),
        ({"k": torch.rand(2, 2, 6, 34)}, r"k and v must have one shape and device, got \(2, 2, 6, 34\)"),
        ({"temperature": torch.ones(3)}, r"temperature must be \(2,\), got \(3,\)"),
        ({"gate": torch.ones(2, 2, 34)}, r"gate must be \(2, 2, 35\)"),
        ({"focus_power": 8}, "go together"),
        ({"focus_weight": torch.ones(2)}, "go together"),
        ({"focus_power": 1, "focus_weight": torch.ones(2)}, "at least 2, got 1"),
        ({"gate_mode": "times"}, "one of multiply, add, got 'times'"),
        ({"norm": 0.0}, "norm must be a positive number, got 0.0"),
        ({"eps": float("nan")}, "eps must be a positive number, got nan"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(changes, message):
    with pytest.raises(ValueError, match=message):
        taylor_attention(**{**cases.make_inputs(cases.SMALL[0]), **changes})


@pytest.mark.parametrize("case", cases.SMALL[:2], ids=lambda case: case.name)
def test_it_compiles_to_one_graph_forwards_and_backwards(case):
    torch._dynamo.reset()
    arguments = cases.make_inputs(case)
    compiled = torch.compile(taylor_attention, fullgraph=True, backend="aot_eager")
    leaves = {k: v.requires_grad_() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    upstream = torch.randn(arguments["v"].shape, generator=torch.Generator().manual_seed(1))
    results = []
    for attend in (compiled, taylor_attention):
        out = attend(**arguments)
        results.append([out, *torch.autograd.grad(out, list(leaves.values()), upstream)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5)


def test_a_second_derivative_is_refused_in_words():
    arguments = cases.make_inputs(cases.SMALL[0], dtype=torch.float64)
    q = arguments["q"].requires_grad_()
    with pytest.raises(RuntimeError, match=r"no second derivative .*backend='reference'"):
        torch.autograd.grad(taylor_attention(**arguments, backend="torch").sum(), q, create_graph=True)


@pytest.mark.parametrize("focus_power", [None, 8], ids=["v1", "v2"])
def test_a_second_derivative_of_the_unit_vectors_is_refused(focus_power):
    x = torch.randn(1, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    out = units(x, norm=0.5, eps=1e-6, focus_power=focus_power)[-1]
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def in_pieces(arguments, bounds):
    """The attention in two passes over pieces of the image."""
    arguments = dict(arguments)
    q, k, v, gate = (arguments.pop(name, None) for name in ("q", "k", "v", "gate"))
    norm, focus_power, eps = arguments.pop("norm"), arguments.pop("focus_power"), arguments["eps"]
    pieces = [slice(a, b) for a, b in zip((0, *bounds), (*bounds, v.shape[-1]), strict=True)]

    def unit(x):
        return units(x, norm=norm, eps=eps, focus_power=focus_power)

    sums = sum(taylor_sums(unit(k[..., piece]), v[..., piece]) for piece in pieces)
    outputs = []
    for piece in pieces:
        own = None if gate is None else gate[..., piece]
        outputs.append(taylor_map(unit(q[..., piece]), sums, gate=own, **arguments))
    return torch.cat(outputs, dim=-1)


@pytest.mark.parametrize("bounds", [(), (1,), (3, 4, 15)], ids=["whole", "two", "four"])
@pytest.mark.parametrize("form", ["v1", "v2", "v2-pre"])
@pytest.mark.parametrize("factors", [True, False], ids=["factors", "plain"])
def test_two_passes_over_pieces_are_the_whole_attention(factors, form, bounds):
    arguments = cases.make_inputs(cases.Case("", 2, 3, 4, 19, form, factors), dtype=torch.float64)
    expected = taylor_attention(**arguments, backend="reference")
    torch.testing.assert_close(in_pieces(arguments, bounds), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", ["v1", "v2", "v2-pre"])
def test_the_gradients_of_two_passes_are_the_derivatives_and_those_of_the_whole(form):
    arguments = cases.make_inputs(cases.Case("", 1, 2, 3, 5, form), dtype=torch.float64)
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    tensors = [arguments[name].requires_grad_() for name in names]

    def attend(*values):
        return in_pieces({**arguments, **dict(zip(names, values, strict=True))}, (2,))

    assert torch.autograd.gradcheck(attend, tensors)
    expected = with_gradients(arguments, backend="reference")
    upstream = torch.randn(1, 2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad(attend(*tensors), tensors, upstream)
    for name, value in zip(names, found, strict=True):
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


EXTREMES = {"zero": 0.0, "constant": 0.4, "negative": -0.4, "faint": 1e-30, "glaring": 1e15}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pixels", [1, 7])
@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("form", ["v1", "v2"])
def test_images_of_one_value_attend_to_it_with_finite_gradients(form, value, pixels, dtype):
    arguments = cases.make_inputs(cases.Case("", 2, 2, 3, pixels, form, False), dtype=dtype)
    arguments |= {name: torch.full_like(arguments[name], EXTREMES[value]) for name in ("q", "k")}
    arguments["v"] = torch.full_like(arguments["v"], 0.5)
    found = with_gradients(arguments, backend="torch")
    torch.testing.assert_close(found["out"], arguments["v"], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)
    assert all(gradient.isfinite().all() for gradient in found.values())
    if dtype == torch.float32:
        torch.testing.assert_close(in_pieces(arguments, (1,) if pixels > 1 else ()), arguments["v"])
        leaves = {name: arguments[name].requires_grad_() for name in ("q", "k", "v")}
        out = in_pieces({**arguments, **leaves}, ())
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), list(leaves.values())))


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides_give_the_same_in_every_dtype(dtype, backend):
    arguments = cases.make_inputs(cases.Case("", 2, 3, 5, 21, "v2"), dtype=dtype)
    expected = with_gradients(arguments, backend=backend)
    for order in ((1, 0, 2, 3), (3, 2, 1, 0), (0, 3, 1, 2)):
        back = [order.index(i) for i in range(4)]
        views = {name: arguments[name].permute(order).contiguous().permute(back) for name in ("q", "k", "v")}
        views["gate"] = torch.stack([arguments["gate"]] * 2, dim=-1)[..., 0]
        for name, value in with_gradients({**arguments, **views}, backend=backend).items():
            tolerance = cases.TOLERANCES[dtype] * max(float(expected[name].double().norm()), 1e-2)
            assert float((value.double() - expected[name].double()).norm()) <= tolerance, name


@pytest.mark.parametrize("form", ["v1", "v2"])
def test_65536_pixels_in_float16_have_finite_gradients(form):
    arguments = cases.make_inputs(cases.Case("", 1, 2, 3, 65_536, form), dtype=torch.float16)
    assert all(value.isfinite().all() for value in with_gradients(arguments, backend="torch").values())


@pytest.mark.parametrize("form", ["v1", "v2"])
def test_65536_pixels_in_float16_stay_finite_under_a_compiler(form):
    arguments = cases.make_inputs(cases.Case("", 1, 1, 2, 65_536, form), dtype=torch.float16)
    out = torch.compile(taylor_attention, fullgraph=True, backend="aot_eager")(**arguments)
    exact = taylor_attention(**widened(arguments), backend="reference")
    assert out.dtype == torch.float16
    assert (out.double() - exact).norm() < 1e-3 * exact.norm()
