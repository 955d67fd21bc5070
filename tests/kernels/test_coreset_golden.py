"""Coreset attention against golden float64 values, the temperature's constants, and one backend against the other."""

import json
import math
from pathlib import Path

import pytest
import torch

from kernels.coreset_attention import compress_kv, noise_shape, weighted_attention, wildcat_attention
from kernels.coreset_attention.temperature import RHO_0, lambert_w, multiplier, query_radii, spread

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "wildcat" / "golden.json").read_text(encoding="utf-8"))
BACKENDS = ("torch", "reference")
by_backend = pytest.mark.parametrize("backend", BACKENDS)
by_case = pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"{c['sampler']}-{c['r']}-{c['B']}")
BETA = 0.25


def closed_form(n, d, a, b, c):
    tokens, channels = (torch.arange(1, size + 1, dtype=torch.float64) for size in (n, d))
    tokens = tokens[:, None]
    x = torch.sin(a * tokens + b * channels**2) + 0.6 * torch.cos(c * tokens * channels / 7 + channels)
    return x[None, None]


@pytest.fixture(scope="module")
def golden():
    return (
        closed_form(32, 16, 0.9, 0.31, 0.5),
        closed_form(256, 16, 0.11, 0.17, 0.23),
        closed_form(256, 8, 0.05, 0.41, 0.77),
    )


def golden_options(case):
    shape = noise_shape(256, rank=case["r"], bins=case["B"])
    b, step, place = (torch.arange(1, size + 1, dtype=torch.float64) for size in shape)
    noise = place * 0.6180339887498949 + step[:, None] * 0.41421356237309515 + b[:, None, None] * 0.7320508075688772
    noise = noise.frac().clamp(1e-12, 1 - 1e-12) if case["sampler"] == "gumbel" else None
    return {"rank": case["r"], "bins": case["B"], "scale": BETA, "sampler": case["sampler"], "noise": noise}


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


@by_backend
@by_case
def test_the_golden_coreset_is_found_with_the_same_keys(case, backend, golden):
    q, k, v = golden
    coreset = compress_kv(k, v, query_radius=GOLDEN["checks"]["R_Q"], backend=backend, **golden_options(case))
    assert coreset.pivots[0, 0].tolist() == case["pivots"]
    torch.testing.assert_close(coreset.tau[0, 0], doubles(case["tau"]), rtol=1e-9, atol=0)
    torch.testing.assert_close(coreset.weights[0, 0, :4], doubles(case["w_raw_first4"]), rtol=1e-9, atol=0)
    assert abs(float(coreset.weights.sum()) - case["w_raw_sum"]) < 1e-9
    torch.testing.assert_close(coreset.keys, k[:, :, coreset.pivots[0, 0]], rtol=0, atol=1e-14)
    assert (query_radii(q)[0] - GOLDEN["checks"]["R_Q"]).abs() < 1e-12


@by_backend
@by_case
def test_the_golden_outputs_are_reached(case, backend, golden):
    q, k, v = golden
    out = wildcat_attention(q, k, v, backend=backend, **golden_options(case))
    torch.testing.assert_close(out[0, 0, 0], doubles(case["out_row0"]), rtol=0, atol=1e-9)
    assert abs(float(out.sum()) - case["out_sum"]) < 1e-9
    assert abs(float(out.abs().sum()) - case["out_abs_sum"]) < 1e-9
    exact = wildcat_attention(q, k, v, rank=256, scale=BETA, backend=backend)
    assert abs(float((out - exact).abs().max()) - case["max_err_vs_exact"]) < 1e-9


@by_backend
def test_a_coreset_of_all_keys_gives_the_golden_exact_attention(backend, golden):
    out = wildcat_attention(*golden, rank=256, scale=BETA, backend=backend)
    torch.testing.assert_close(out[0, 0, 0], doubles(GOLDEN["checks"]["exact_row0"]), rtol=0, atol=1e-9)
    assert abs(float(out.sum()) - GOLDEN["checks"]["exact_sum"]) < 1e-9


@by_backend
@by_case
def test_compressing_then_attending_is_the_whole(case, backend, golden):
    q, k, v = golden
    options = golden_options(case)
    coreset = compress_kv(k, v, query_radius=query_radii(q)[0], backend=backend, **options)
    found = weighted_attention(q, coreset, scale=BETA, backend=backend)
    torch.testing.assert_close(found, wildcat_attention(q, k, v, backend=backend, **options), rtol=0, atol=1e-12)


def test_lambert_w_inverts_w_times_its_exponential():
    w = torch.logspace(-12, 4, 200, dtype=torch.float64)
    x = w[w < 600] * w[w < 600].exp()
    torch.testing.assert_close(lambert_w(x), w[w < 600], rtol=1e-12, atol=0)
    two_over_e2 = doubles([2 / math.e**2])
    torch.testing.assert_close(lambert_w(two_over_e2), doubles([0.21771510575709011]), rtol=1e-13, atol=0)
    assert abs(math.sqrt(1 + math.exp(float(lambert_w(two_over_e2)) + 2)) - RHO_0) < 1e-13


@pytest.mark.parametrize(
    ("b0", "rho"),
    [
        (2.0, 4.078439693318738),
        (2.5, 4.275451),
        (3.0, 4.465668),
        (4.0, 4.829163),
        (10.0, 6.718005),
        (100.0, 24.521495),
    ],
)
def test_rho_takes_the_values_of_equation_12(b0, rho):
    # b0 = log(n) / radii + 2; for 2 the keys are one
    radii, counts = doubles([1.0]), doubles([b0 - 2]).exp()
    assert abs(float(spread(radii, counts)) - rho) < 1e-6
    upper, exact = rho, {2.0: 3.945817560677501, 4.0: 4.611422, 100.0: 23.330946}.get(b0)
    if exact is not None:
        u = exact**2 - 1
        assert abs(u * math.log(u) / exact - 2 * exact - b0) < 2e-5
        assert 0.8 * upper < exact < upper


@pytest.mark.parametrize(("query", "key"), [(0.0, 2.0), (2.0, 0.0), (0.0, 0.0), (1e-300, 1e-300)])
def test_without_lengths_the_keys_collapse_instead_of_dividing_by_zero(query, key):
    found = multiplier(doubles([query]), doubles([key]), doubles([9]), beta=1.0, tau_mult=1.0)
    assert found.item() == 0


def test_the_temperature_is_balanced_between_queries_and_keys():
    q, k, n = doubles([3.0]), doubles([2.0]), doubles([50])
    found = multiplier(q, k, n, beta=0.5, tau_mult=2.0)
    b0 = math.log(50) / (0.5 * 3 * 2) + 2
    rho = b0 / (2 * float(lambert_w(doubles([b0 / (2 * RHO_0)]))))
    tau = 2.0 * math.sqrt(2 / 3 * rho)
    torch.testing.assert_close(found, doubles([math.sqrt(0.5) / tau]), rtol=1e-12, atol=0)


def test_one_outlier_query_does_not_stretch_the_radius_of_all():
    q = torch.nn.functional.normalize(torch.randn(1, 1, 256, 32, dtype=torch.float64), dim=-1)
    assert query_radii(q)[0].item() == pytest.approx(1)
    q[0, 0, [7, 9]] *= 30
    assert query_radii(q)[0].item() == pytest.approx(1.5)
    q[0, 0, 3] *= 40
    assert query_radii(q)[0].item() == pytest.approx(40)
    # not a few queries among empty ones
    q[0, 0, 1:] = 0
    assert query_radii(q)[0].item() == pytest.approx(1)


# (b, m_heads, heads, m, n, d, dv, options)
LAYOUTS = {
    "one bin": (1, 1, 1, 5, 23, 6, 4, {"rank": 7}),
    "bins that do not divide": (2, 2, 2, 9, 37, 8, 5, {"rank": 13, "bins": 5}),
    "grouped queries": (2, 6, 2, 9, 32, 4, 4, {"rank": 8, "bins": 4}),
    "tiles": (1, 2, 2, 11, 54, 8, 3, {"rank": 16, "bins": 6, "grid": (9, 6)}),
    "odd tiles": (2, 1, 1, 7, 77, 5, 8, {"rank": 18, "bins": 6, "grid": (7, 11)}),
    "strips": (1, 2, 1, 7, 77, 5, 8, {"rank": 9, "bins": 3, "grid": (11, 7), "layout": "strips"}),
    "slices of a grid": (1, 1, 1, 7, 35, 5, 8, {"rank": 12, "bins": 4, "grid": (5, 7), "layout": "slices"}),
    "more bins than tokens": (1, 2, 2, 4, 3, 5, 8, {"rank": 2, "bins": 7}),
    "one token": (1, 1, 1, 3, 1, 5, 8, {"rank": 4}),
    "all keys": (1, 2, 1, 3, 12, 5, 8, {"rank": 12, "bins": 3}),
    "own scale and temperature": (1, 1, 1, 6, 40, 8, 8, {"rank": 10, "scale": 1.0, "tau_mult": 1.7}),
    "not recentred": (1, 1, 1, 6, 40, 8, 8, {"rank": 10, "recentre": False}),
}


def drawn(b, m_heads, heads, m, n, d, dv, dtype=torch.float64):
    shapes = (b, m_heads, m, d), (b, heads, n, d), (b, heads, n, dv)
    return tuple(torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)


def with_gradients(inputs, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = wildcat_attention(*leaves, **options)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).sin()
    return out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))


@pytest.mark.parametrize("masked", [False, True], ids=["all there", "masked"])
@pytest.mark.parametrize("sampler", ["gumbel", "cdf", "greedy", "uniform"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_torch_backend_equals_the_reference_with_every_gradient(layout, sampler, masked):
    *sizes, options = LAYOUTS[layout]
    inputs = drawn(*sizes)
    mask = torch.rand(sizes[0], sizes[4]) > 0.3 if masked else None
    options = {**options, "sampler": sampler, "key_mask": mask, "seed": 3}
    expected = with_gradients(inputs, backend="reference", **options)
    for found, value in zip(with_gradients(inputs, backend="torch", **options), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sampler", ["gumbel", "cdf", "greedy", "uniform"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_backends_find_the_same_coreset(layout, sampler):
    *sizes, options = LAYOUTS[layout]
    _, k, v = drawn(*sizes)
    mask = torch.rand(k.shape[:3]) > 0.3
    found, expected = (
        compress_kv(k, v, sampler=sampler, key_mask=mask, backend=backend, **options) for backend in BACKENDS
    )
    assert found.pivots.equal(expected.pivots)
    for name in found._fields:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_stays_near_float64(layout):
    *sizes, options = LAYOUTS[layout]
    inputs = drawn(*sizes, dtype=torch.float32)
    expected = with_gradients([x.double() for x in inputs], backend="reference", **options)
    for found, value in zip(with_gradients(inputs, **options), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), value, rtol=1e-3, atol=2e-5)
