"""Window attention: the reference against independent formulas, and every backend against the reference."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F

from kernels.dispatch import available
from kernels.window_attention import cases, layout, reference, torch_impl, window_attention

BACKENDS = ("chunked", "sdpa", "torch", "reference")
by_name = pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name.replace(" ", "-"))
by_backend = pytest.mark.parametrize("backend", BACKENDS)


def with_gradients(arguments, backend, bias=None):
    """The output and the gradient of each tensor, for a fixed random upstream gradient."""
    arguments = dict(arguments) if bias is None else {**arguments, "bias": bias}
    leaves = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            leaves[name] = arguments[name] = value.detach().clone().requires_grad_()
    out = window_attention(**arguments, backend=backend)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_as_good_as(found, expected, limit):
    # a window of equal pixels has no gradient at its factors: the noise there is that of the image's gradient
    floor = expected["qkv"].double().norm()
    for name, value in expected.items():
        error = (found[name].double() - value.double()).norm()
        assert error <= limit * value.double().norm().maximum(floor), (name, float(error), float(value.norm()))


def pixel_by_pixel(qkv, q_pos, k_pos, *, heads, window, scale=None):
    """The formula with loops, each query by itself, over an image padded by torch (or by repetition of one pixel)."""
    b, h, w, channels = qkv.shape
    d = channels // (3 * heads)
    scale = 1 / math.sqrt(d) if scale is None else scale
    right, bottom = -w % window, -h % window
    image = F.pad(qkv.permute(0, 3, 1, 2), (0, right, 0, bottom), mode="reflect").permute(0, 2, 3, 1)
    out = torch.zeros(b, h, w, heads * d, dtype=qkv.dtype)
    for i in range(b):
        for y in range(h):
            for x in range(w):
                top, left = y // window * window, x // window * window
                inside = image[i, top : top + window, left : left + window].reshape(window * window, 3, heads, d)
                n = (y - top) * window + x - left
                for head in range(heads):
                    logits = inside[:, 1, head] @ image[i, y, x].reshape(3, heads, d)[0, head] * scale
                    logits = logits + k_pos[head] @ q_pos[head, n] / math.sqrt(q_pos.shape[-1])
                    out[i, y, x, head * d : head * d + d] = torch.softmax(logits, 0) @ inside[:, 2, head]
    return out


@pytest.mark.parametrize("size", [(4, 8), (5, 7), (3, 6)], ids=str)
def test_the_reference_is_the_formula_of_each_pixel(size):
    arguments = cases.make_inputs(cases.Case("", 2, *size, 2, 3, 4, 2), dtype=torch.float64)
    torch.testing.assert_close(
        window_attention(**arguments, backend="reference"), pixel_by_pixel(**arguments), rtol=0, atol=1e-12
    )


def test_the_scale_is_the_inverse_root_of_the_head_size_unless_given():
    arguments = cases.make_inputs(cases.SMALL[1], dtype=torch.float64)
    d = cases.SMALL[1].d
    expected = window_attention(**arguments, scale=d**-0.5, backend="reference")
    torch.testing.assert_close(window_attention(**arguments, backend="reference"), expected, rtol=0, atol=1e-12)
    for backend in BACKENDS:
        found = window_attention(**arguments, scale=0.1, backend=backend)
        torch.testing.assert_close(found, pixel_by_pixel(**arguments, scale=0.1), rtol=0, atol=1e-12)


@by_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@by_name
def test_every_backend_equals_the_float64_reference_with_every_gradient(case, dtype, backend):
    arguments = cases.make_inputs(case, dtype=dtype)
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    found = with_gradients(arguments, backend)
    assert found["out"].dtype == dtype
    assert found["out"].shape == (case.batch, case.height, case.width, case.heads * case.d)
    # 16-bit gradients go through a rounded softmax and a rounded output
    limit = cases.TOLERANCES[dtype] * (3 if dtype == torch.bfloat16 else 1)
    assert_as_good_as(found, with_gradients(exact, "reference"), limit)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_float16_works_too(backend):
    arguments = cases.make_inputs(cases.SMALL[1], dtype=torch.float16)
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    found = with_gradients(arguments, backend)
    assert_as_good_as(found, with_gradients(exact, "reference"), 3 * cases.TOLERANCES[torch.float16])


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("factors", [True, False], ids=["with factors", "alone"])
def test_a_dense_bias_is_added_to_the_logits(backend, factors):
    case = cases.Case("", 2, 7, 9, 2, 4, 4, 3 if factors else 0)
    arguments = cases.make_inputs(case, dtype=torch.float64)
    bias = torch.randn(2, 16, 16, dtype=torch.float64)
    found, expected = with_gradients(arguments, backend, bias), with_gradients(arguments, "reference", bias)
    assert_as_good_as(found, expected, 1e-12)
    if factors:
        folded = bias + arguments["q_pos"] @ arguments["k_pos"].mT / math.sqrt(3)
        alone = {**arguments, "q_pos": None, "k_pos": None}
        torch.testing.assert_close(found["out"], window_attention(**alone, bias=folded, backend="torch"))


@by_backend
def test_the_gradients_are_the_derivatives(backend):
    arguments = cases.make_inputs(cases.Case("", 1, 3, 5, 2, 2, 4, 2), dtype=torch.float64)
    tensors = [arguments.pop(name).requires_grad_() for name in ("qkv", "q_pos", "k_pos")]
    assert torch.autograd.gradcheck(lambda *t: window_attention(*t, **arguments, backend=backend), tensors)


@by_backend
def test_a_constant_upstream_gradient_of_stride_zero_is_right(backend):
    arguments = cases.make_inputs(cases.SMALL[1], dtype=torch.float64)
    grads = []
    for name in (backend, "reference"):
        qkv = arguments["qkv"].clone().requires_grad_()
        window_attention(**{**arguments, "qkv": qkv}, backend=name).sum().backward()
        grads.append(qkv.grad)
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_reflection_is_torchs_and_goes_on_from_mirror_to_mirror(size):
    length = 24
    row = torch.arange(size)
    indices = reference.reflected(size, length)
    image = row.reshape(1, 1, size, 1).expand(2, 5, -1, 1)
    assert torch.equal(layout.continue_by_reflection(image, length)[0, 0, :, 0], indices)
    if size > 1:
        padded = row.reshape(1, 1, size).double()
        while padded.shape[-1] < length:
            step = min(length - padded.shape[-1], padded.shape[-1] - 1)
            padded = F.pad(padded, (0, step), mode="reflect")
        assert torch.equal(padded.flatten().long(), indices)
    else:
        assert torch.equal(indices, torch.zeros(length, dtype=torch.long))


@by_backend
def test_the_pixels_added_by_reflection_are_attended_to(backend):
    case = cases.Case("", 1, 5, 6, 2, 4, 4, 3)
    arguments = cases.make_inputs(case, dtype=torch.float64)
    qkv = arguments["qkv"]
    whole = F.pad(qkv.permute(0, 3, 1, 2), (0, 2, 0, 3), mode="reflect").permute(0, 2, 3, 1)
    expected = window_attention(**{**arguments, "qkv": whole}, backend="reference")[:, :5, :6]
    torch.testing.assert_close(window_attention(**arguments, backend=backend), expected, rtol=0, atol=1e-12)


@by_backend
def test_views_give_what_their_copies_give(backend):
    arguments = cases.make_inputs(cases.SMALL[1])
    qkv = arguments["qkv"]
    expected = window_attention(**arguments, backend=backend)
    channels_first = qkv.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    inside = F.pad(qkv, (2, 3, 1, 1, 1, 2))[:, 1:-2, 1:-1, 2:-3]
    every_other = qkv.repeat_interleave(2, dim=1)[:, ::2]
    for view in (channels_first, inside, every_other):
        assert not view.is_contiguous()
        torch.testing.assert_close(window_attention(**{**arguments, "qkv": view}, backend=backend), expected)
    transposed = {name: arguments[name].mT.contiguous().mT for name in ("q_pos", "k_pos")}
    torch.testing.assert_close(window_attention(**{**arguments, **transposed}, backend=backend), expected)
    one = qkv[:1].expand(2, -1, -1, -1)
    torch.testing.assert_close(window_attention(**{**arguments, "qkv": one}, backend=backend)[1], expected[0])


@by_backend
def test_the_inputs_stay_as_they_are(backend):
    arguments = cases.make_inputs(cases.SMALL[1])
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    window_attention(**arguments, backend=backend)
    assert all(torch.equal(arguments[k], v) for k, v in before.items())


@by_backend
def test_windows_do_not_see_each_other(backend):
    arguments = cases.make_inputs(cases.SMALL[0])
    changed = arguments["qkv"].clone()
    changed[:, :4, :4] += 1
    out = window_attention(**arguments, backend=backend)
    out_changed = window_attention(**{**arguments, "qkv": changed}, backend=backend)
    same = (out == out_changed).all(dim=-1)
    assert not same[:, :4, :4].any()
    assert same[:, 4:].all()
    assert same[:, :, 4:].all()


@by_backend
def test_large_logits_stay_finite_and_equal_values_give_their_mean(backend):
    arguments = cases.make_inputs(cases.SMALL[1])
    assert window_attention(**{**arguments, "qkv": arguments["qkv"] * 100}, backend=backend).isfinite().all()
    flat = torch.ones_like(arguments["qkv"])
    torch.testing.assert_close(window_attention(**{**arguments, "qkv": flat}, backend=backend), flat[..., :12])


@pytest.mark.parametrize("backend", ["chunked", "sdpa", "torch"])
def test_a_faint_position_beside_large_content_survives_bfloat16(backend):
    # every content logit is 64, where bfloat16 counts in steps of a half; the factors add 0 or 0.25
    qkv = torch.full((1, 2, 2, 3 * 4), 4.0)
    qkv[..., 8:] = torch.randn(1, 2, 2, 4)
    q_pos, k_pos = torch.ones(1, 4, 1), torch.tensor([0, 0.25, 0, 0.25]).reshape(1, 4, 1)
    arguments = {"heads": 1, "window": 2, "scale": 1.0}
    expected = window_attention(qkv.bfloat16().float(), q_pos, k_pos, **arguments, backend="reference")
    found = window_attention(qkv.bfloat16(), q_pos.bfloat16(), k_pos.bfloat16(), **arguments, backend=backend)
    assert (found.float() - expected).norm() < 5e-3 * expected.norm()


@by_backend
def test_factors_of_higher_precision_are_rounded_once(backend):
    arguments = cases.make_inputs(cases.SMALL[0], dtype=torch.float32)
    mixed = {**arguments, "qkv": arguments["qkv"].bfloat16()}
    out = window_attention(**mixed, backend=backend)
    assert out.dtype == torch.bfloat16
    expected = window_attention(**arguments, backend="reference")
    assert (out.float() - expected).norm() < 2 * cases.TOLERANCES[torch.bfloat16] * expected.norm()


@by_backend
def test_a_computation_in_bfloat16_takes_and_returns_float32_with_its_gradients(backend):
    arguments = {**cases.make_inputs(cases.SMALL[1]), "dtype": torch.bfloat16}
    exact = {**cases.make_inputs(cases.SMALL[1]), "dtype": torch.float64}
    found = with_gradients(arguments, backend)
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert_as_good_as(found, with_gradients(exact, "reference"), 3 * cases.TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [0, 3, 16])
def test_sdpa_takes_the_flash_kernel_on_the_cpu(dtype, rank, monkeypatch):
    arguments = cases.make_inputs(cases.Case("", 1, 9, 17, 2, 8, 8, rank), dtype=dtype)
    arguments["qkv"].requires_grad_()
    math_path, flash_path = 0, 1
    choices, attend = [], F.scaled_dot_product_attention

    def watched(q, k, v, **options):
        choices.append(torch._fused_sdp_choice(q, k, v, **options))
        # why v is continued by zeros
        if rank:
            choices.append(torch._fused_sdp_choice(q, k, v[..., :8], **options))
        return attend(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    window_attention(**arguments, backend="sdpa")
    assert choices == ([flash_path, math_path] if rank else [flash_path])


def test_sdpa_goes_through_many_windows_in_parts(monkeypatch):
    arguments = cases.make_inputs(cases.SMALL[0])
    expected = window_attention(**arguments, backend="sdpa")
    monkeypatch.setattr(torch_impl, "MOST_WINDOWS", 5)
    calls = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *a, **k: calls.append(len(q)) or attend(q, *a, **k)
    )
    monkeypatch.setattr(torch_impl, "_on_cpu", lambda x: False)
    torch.testing.assert_close(window_attention(**arguments, backend="sdpa"), expected)
    assert calls == [5, 5, 2]


def test_the_flash_backend_calls_the_package_with_equal_16_bit_heads(monkeypatch):
    case = cases.Case("", 1, 9, 8, 2, 8, 4, 8)
    arguments = cases.make_inputs(case, dtype=torch.bfloat16)
    seen = {}

    class Package:
        @staticmethod
        def flash_attn_func(q, k, v, softmax_scale, causal):
            seen.update(shapes=(q.shape, k.shape, v.shape), causal=causal)
            out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=softmax_scale)
            return out.transpose(1, 2), None

    monkeypatch.setitem(sys.modules, "flash_attn_interface", Package)
    monkeypatch.setitem(torch_impl._found, "flash", "flash_attn_interface")
    out = torch_impl.flash(**arguments, bias=None, scale=8**-0.5)
    torch.testing.assert_close(out, window_attention(**arguments, backend="sdpa"))
    assert seen == {"shapes": ((6, 16, 2, 16),) * 3, "causal": False}


@pytest.mark.parametrize("installed", [None, "json"])
def test_the_package_is_looked_for_also_while_compiling(installed, monkeypatch):
    monkeypatch.setattr(torch_impl, "_found", {})
    monkeypatch.setattr(torch_impl, "FLASH_PACKAGES", ("no_such_package", installed or "nor_this"))
    monkeypatch.setitem(sys.modules, "nor_this", None)
    arguments = cases.make_inputs(cases.SMALL[0])
    compiled = torch.compile(lambda: window_attention(**arguments), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(), window_attention(**arguments))
    assert torch_impl._found == {"flash": installed}


def test_flash_says_each_thing_that_is_missing(monkeypatch):
    monkeypatch.setitem(torch_impl._found, "flash", None)
    arguments = cases.make_inputs(cases.Case("", 1, 8, 8, 2, 6, 4, 3))
    text = torch_impl.flash_supports(**arguments, bias=torch.zeros(2, 16, 16))
    for reason in ("pellucid[flash]", "on cpu", "not float32", "multiple of 8 up to 256, not 9", "no dense bias"):
        assert reason in text
    monkeypatch.setitem(torch_impl._found, "flash", "flash_attn")
    assert torch_impl.flash_supports() is None
    assert "pellucid[flash]" not in torch_impl.flash_supports(arguments["qkv"])
    assert "flash" not in available("window_attention", arguments["qkv"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.rand(3, 4, 24)}, r"qkv must be \(b, h, w, 3 \* heads \* d\).*\(3, 4, 24\)"),
        ({"qkv": torch.rand(1, 0, 4, 24)}, "h, w >= 1"),
        ({"qkv": torch.ones(1, 4, 4, 24, dtype=torch.int64)}, "float dtype, got torch.int64"),
        ({"heads": 5}, "heads=5, got 24"),
        ({"heads": 0}, "heads=0"),
        ({"window": 0}, "window=0"),
        ({"window": 8}, r"q_pos must be .*\(2, 64, rank\), got \(2, 16, 3\)"),
        ({"k_pos": None}, "k_pos is None; give both"),
        ({"q_pos": None}, "q_pos is None; give both"),
        ({"k_pos": torch.rand(2, 16, 5)}, "same rank, got 3 and 5"),
        ({"k_pos": torch.rand(2, 16, 3).double()}, "one dtype, got torch.float32 and torch.float64"),
        ({"q_pos": torch.rand(16, 3)}, r"q_pos must be .*got \(16, 3\)"),
        ({"q_pos": torch.rand(2, 16, 0)}, r"got \(2, 16, 0\)"),
        ({"bias": torch.rand(2, 16, 15)}, r"bias must be .*\(2, 16, 16\), got \(2, 16, 15\)"),
        ({"bias": torch.rand(2, 16, 16, device="meta")}, "bias is on meta and qkv on cpu"),
        ({"scale": 0.0}, "scale must be a positive number, got 0.0"),
        ({"scale": math.nan}, "got nan"),
        ({"dtype": torch.int32}, "dtype must be a float type, got torch.int32"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(changes, message):
    arguments = cases.make_inputs(cases.Case("", 1, 4, 4, 2, 4, 4, 3))
    with pytest.raises(ValueError, match=message):
        window_attention(**{**arguments, **changes})


def test_the_costs_are_those_of_the_definition():
    case = cases.Case("", 1, 360, 640, 6, 32, 48, 16)
    assert case.tokens == 258_048
    assert case.pairs == 258_048 * 48**2 * 6
    assert round(cases.flops(case) / 1e9) == 571
    assert cases.flops(case, backward=True) == case.pairs * (6 * 48 + 4 * 32)
    assert cases.bytes_moved(case, itemsize=2) == 2 * (4 * 230_400 * 192 + 2 * 6 * 48**2 * 16)
