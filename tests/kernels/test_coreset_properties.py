"""What must hold of coreset attention for any input: law, bounds, where it is exact, what it does not depend on."""

import itertools
import math

import pytest
import torch

from kernels.coreset_attention import Coreset, compress_kv, weighted_attention, wildcat_attention
from kernels.coreset_attention.temperature import query_radii

FLOATS = (torch.float64, torch.float32)
by_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
by_sampler = pytest.mark.parametrize("sampler", ["gumbel", "cdf", "greedy", "uniform"])
by_backend = pytest.mark.parametrize("backend", ["torch", "reference"])
by_bins = pytest.mark.parametrize("bins", [1, 4])


def bound(dtype, double, single):
    return {"rtol": 0, "atol": double if dtype == torch.float64 else single}


def drawn(m=9, n=48, *, d=6, dv=5, heads=1, dtype=torch.float64):
    return tuple(
        torch.randn(1, heads, size, width, dtype=torch.float64).to(dtype) for size, width in ((m, d), (n, d), (n, dv))
    )


def softmax_attention(q, k, v, *, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.softmax(scale * q.double() @ k.double().mT, dim=-1) @ v.double()


def matrices(k, *, beta, q=None, **options):
    """The kernel matrix of one bin's recentred keys at its temperature, W, and the coreset, for heads side by side."""
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    radius = None if q is None else q.norm(dim=-1).amax()
    coreset = compress_kv(k, eye, scale=beta, query_radius=radius, **options)
    x = k - k.mean(dim=2, keepdim=True)
    # of one bin
    h = torch.exp(beta / coreset.tau[..., :1, None] ** 2 * (x @ x.mT))
    return h, coreset.values, coreset


def residual(h, w, pivots):
    return h - h.gather(-1, pivots[..., None, :].expand(*h.shape[:-1], pivots.shape[-1])) @ w


@by_dtype
@pytest.mark.parametrize(
    ("rank", "bins", "n"), [(48, 1, 48), (60, 1, 48), (48, 6, 48), (20, 5, 17), (1, 1, 1), (4, 9, 3)]
)
def test_a_slot_for_every_key_is_exact_attention(rank, bins, n, dtype):
    q, k, v = drawn(n=n, dtype=dtype)
    out = wildcat_attention(q, k, v, rank=rank, bins=bins)
    torch.testing.assert_close(out.double(), softmax_attention(q, k, v), **bound(dtype, 1e-8, 1e-5))
    coreset = compress_kv(k, v, rank=rank, bins=bins)
    assert coreset.weights.eq(1).all()
    assert coreset.pivots[0, 0].tolist() == list(range(n))


@by_dtype
@by_sampler
def test_few_distinct_keys_are_exact_and_leave_slots_empty(sampler, dtype):
    q, k, v = drawn(n=60, dtype=dtype)
    k = k[:, :, :5].repeat(1, 1, 12, 1)
    coreset = compress_kv(k, v, rank=16, bins=2, sampler=sampler)
    empty = coreset.pivots < 0
    assert empty.sum() == 6
    assert not coreset.weights[empty].any()
    assert not coreset.values[empty].any()
    out = wildcat_attention(q, k, v, rank=16, bins=2, sampler=sampler)
    torch.testing.assert_close(out.double(), softmax_attention(q, k, v), **bound(dtype, 1e-10, 1e-6))


@by_dtype
@by_sampler
@by_bins
def test_a_chosen_key_stands_for_itself_alone_and_is_chosen_once(bins, sampler, dtype):
    _, k, _ = drawn(dtype=dtype)
    _, w, coreset = matrices(k, beta=0.4, rank=12, bins=bins, sampler=sampler)
    pivots = coreset.pivots[0, 0]
    assert pivots.unique().numel() == 12
    torch.testing.assert_close(w[0, 0][:, pivots], torch.eye(12, dtype=dtype), **bound(dtype, 1e-8, 1e-5))
    torch.testing.assert_close(w.sum(dim=-1), coreset.weights, **bound(dtype, 1e-9, 1e-4))


@by_sampler
def test_the_weights_solve_the_kernel_equations(sampler):
    q, k, v = drawn()
    h, w, coreset = matrices(k, beta=0.4, q=q, rank=12, sampler=sampler)
    pivots = coreset.pivots[0, 0]
    direct = torch.linalg.solve(h[0, 0][pivots][:, pivots], h[0, 0][pivots])
    torch.testing.assert_close(w[0, 0], direct, rtol=1e-7, atol=1e-7)
    # exact on the rows of the chosen keys
    left = residual(h, w, coreset.pivots)[0, 0]
    assert left[pivots].abs().max() < 1e-8 * h.max()
    p = torch.exp(0.4 * q @ k[:, :, pivots].mT)
    expected = (p @ (direct @ v)) / (p @ direct.sum(dim=-1, keepdim=True))
    out = wildcat_attention(q, k, v, rank=12, scale=0.4, sampler=sampler)
    torch.testing.assert_close(out, expected.clamp(v.amin(dim=2), v.amax(dim=2)), rtol=1e-7, atol=1e-7)


@by_sampler
def test_more_keys_leave_less_and_never_less_than_nothing(sampler):
    _, k, _ = drawn()
    traces = []
    for rank in range(1, 16):
        h, w, coreset = matrices(k, beta=0.4, rank=rank, sampler=sampler)
        left = residual(h, w, coreset.pivots)[0, 0]
        diagonal = h[0, 0].diagonal()
        unweighted = left / (diagonal[:, None] * diagonal).sqrt()
        assert torch.linalg.eigvalsh(unweighted).min() > -1e-9
        traces.append((float(left.trace()), float(unweighted.trace())))
    for earlier, later in itertools.pairwise(traces):
        assert later[0] <= earlier[0] * (1 + 1e-9)
        assert later[1] <= earlier[1] * (1 + 1e-9)


@by_dtype
@by_bins
@pytest.mark.parametrize("alike", ["keys", "queries"])
def test_equal_keys_or_zero_queries_give_the_mean_value(alike, bins, dtype):
    q, k, v = drawn(dtype=dtype)
    q, k = (torch.zeros_like(q), k) if alike == "queries" else (q, k[:, :, :1].expand_as(k).contiguous())
    out = wildcat_attention(q, k, v, rank=8, bins=bins)
    torch.testing.assert_close(out, v.mean(dim=2, keepdim=True).expand_as(out), **bound(dtype, 1e-12, 1e-6))


@by_bins
def test_a_constant_value_is_returned_as_it_is(bins):
    q, k, v = drawn()
    out = wildcat_attention(q, k, torch.full_like(v, 3.7), rank=8, bins=bins)
    torch.testing.assert_close(out, torch.full_like(out, 3.7), rtol=0, atol=1e-12)


@by_bins
def test_values_are_scaled_and_shifted_channel_by_channel(bins):
    q, k, v = drawn()
    factor, shift = torch.randn(5, dtype=torch.float64), 10 * torch.randn(5, dtype=torch.float64)
    out = wildcat_attention(q, k, v * factor + shift, rank=8, bins=bins)
    expected = wildcat_attention(q, k, v, rank=8, bins=bins) * factor + shift
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-8)


@by_dtype
@by_bins
def test_a_shift_of_all_keys_changes_nothing(bins, dtype):
    q, k, v = drawn(dtype=dtype)
    shift = 1e3 * torch.randn(6, dtype=dtype)
    out = wildcat_attention(q, k + shift, v, rank=12, bins=bins, seed=5)
    torch.testing.assert_close(out, wildcat_attention(q, k, v, rank=12, bins=bins, seed=5), **bound(dtype, 1e-9, 1e-3))


@by_bins
def test_only_the_product_of_queries_keys_and_scale_counts(bins):
    q, k, v = drawn()
    out = wildcat_attention(q, k, v, rank=12, bins=bins, scale=0.3)
    for other in ((7.5 * q, k / 7.5, v, 0.3), (0.3 * q, k, v, 1.0), (q, 0.3 * k, v, 1.0)):
        found = wildcat_attention(*other[:3], rank=12, bins=bins, scale=other[3])
        torch.testing.assert_close(found, out, rtol=0, atol=1e-9)


def test_the_scale_is_one_over_the_root_of_the_width_by_default():
    q, k, v = drawn()
    assert wildcat_attention(q, k, v, rank=9).equal(wildcat_attention(q, k, v, rank=9, scale=1 / math.sqrt(6)))
    coreset = compress_kv(k, v, rank=9)
    assert weighted_attention(q, coreset).equal(weighted_attention(q, coreset, scale=1 / math.sqrt(6)))


@by_backend
@by_dtype
def test_results_stay_within_the_range_of_the_values(dtype, backend):
    q, k, v = (5 * x for x in drawn(m=200, n=200, dtype=dtype))
    out = wildcat_attention(q, k, v, rank=6, sampler="uniform", backend=backend)
    assert out.le(v.amax(dim=2, keepdim=True)).all()
    assert out.ge(v.amin(dim=2, keepdim=True)).all()
    coreset = compress_kv(k, v, rank=20, backend=backend)
    torch.testing.assert_close(coreset.lower, v.amin(dim=2), rtol=0, atol=0)
    torch.testing.assert_close(coreset.upper, v.amax(dim=2), rtol=0, atol=0)
    free = weighted_attention(q, coreset, backend=backend)
    lower, upper = (torch.full_like(coreset.lower, x) for x in (-0.3, 0.2))
    out = weighted_attention(q, coreset._replace(lower=lower, upper=upper), backend=backend)
    torch.testing.assert_close(out, free.clamp(-0.3, 0.2), rtol=0, atol=1e-5)
    assert out.eq(0.2).any()


@by_backend
def test_weights_that_cancel_give_the_middle_of_the_values(backend):
    q, k, v = drawn(n=2)
    one = torch.ones(1, 1, 5, dtype=torch.float64)
    weights = torch.tensor([[[1.0, -1.0]]], dtype=torch.float64)
    coreset = Coreset(k[:, :, :1].repeat(1, 1, 2, 1), v, weights, -one[0], 3 * one[0], one[..., 0], one, weights.long())
    out = weighted_attention(q, coreset, backend=backend)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-12)


def test_the_weights_add_up_to_about_the_number_of_keys():
    _, k, v = drawn(n=256, d=4)
    for bins in (1, 4):
        total = compress_kv(k, v, rank=64, bins=bins).weights.sum()
        assert abs(total / 256 - 1) < 0.03


@pytest.mark.parametrize("bins", [1, 3])
def test_the_error_is_within_the_bounds_of_lemmas_1_and_2(bins):
    for seed in range(5):
        torch.manual_seed(seed)
        q, k, v = drawn(m=20, n=60, d=4)
        beta, radius = 0.5, q.norm(dim=-1).max()
        eye = torch.eye(60, dtype=torch.float64)[None, None]
        for rank in (6, 15, 36):
            options = {"rank": rank, "bins": bins, "scale": beta, "query_radius": radius, "seed": seed}
            w, coreset = compress_kv(k, eye, **options).values[0, 0], compress_kv(k, v, **options)
            x = (k - k.mean(dim=2, keepdim=True))[0, 0]
            a = torch.exp(beta * q[0, 0] @ x.mT)
            gap = (a - torch.exp(beta * q[0, 0] @ x[coreset.pivots[0, 0]].mT) @ w).square().sum(dim=-1).max()
            limit = 0
            for i, tokens in enumerate(torch.arange(60).view(bins, -1)):
                tau, own = coreset.tau[0, 0, i], slice(i * (rank // bins), (i + 1) * (rank // bins))
                h = torch.exp(beta * x[tokens] @ x[tokens].mT / tau**2)
                left = h - torch.exp(beta * x[tokens] @ x[coreset.pivots[0, 0, own]].mT / tau**2) @ w[own][:, tokens]
                limit += torch.exp(beta * tau**2 * radius**2) * torch.linalg.matrix_norm(left, 2)
            assert gap <= limit
            error = (weighted_attention(q, coreset, scale=beta) - softmax_attention(q, k, v, scale=beta)).abs().max()
            assert error <= v.abs().max() * min(3 / math.sqrt(60) * gap.sqrt() / a.min(), 2)


def test_the_mean_residual_is_within_its_bounds():
    draws, n, rank = 600, 30, 5
    # many heads with the same keys are many draws
    k = torch.randn(1, 1, n, 3, dtype=torch.float64).expand(1, draws, n, 3)
    h, w, coreset = matrices(k, beta=1.0, rank=rank)
    left = residual(h, w, coreset.pivots)[0]
    phi = h[0, 0]
    for _ in range(rank):
        phi = phi - phi @ phi / phi.trace()
    traces = left.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    assert traces.mean() <= phi.trace() + 3 * traces.std() / math.sqrt(draws)
    assert torch.linalg.matrix_norm(left.mean(dim=0), 2) <= 1.05 * torch.linalg.matrix_norm(phi, 2)
    # and uniform keys do worse, so that the bound says something
    h, w, coreset = matrices(k, beta=1.0, rank=rank, sampler="uniform")
    assert residual(h, w, coreset.pivots)[0].diagonal(dim1=-2, dim2=-1).sum(dim=-1).mean() > traces.mean()


@pytest.mark.parametrize("source", ["seed", "generator"])
@pytest.mark.parametrize("sampler", ["gumbel", "cdf", "uniform"])
def test_the_first_two_keys_are_drawn_by_their_law(sampler, source):
    draws, n = 20_000, 6
    k = torch.randn(1, 1, n, 3, dtype=torch.float64).expand(1, draws, n, 3)
    options = {"generator": torch.Generator().manual_seed(0)} if source == "generator" else {"seed": 1}
    h, _, coreset = matrices(k, beta=1.0, rank=2, sampler=sampler, **options)
    h = h[0, 0]
    left = h.diagonal() - h.square() / h.diagonal()[:, None]
    first, second = (h.diagonal(), left) if sampler != "uniform" else (torch.ones(n), 1 - torch.eye(n))
    law = (first / first.sum())[:, None] * second / second.sum(dim=-1, keepdim=True)
    expected = (draws * law.double())[~torch.eye(n, dtype=torch.bool)]
    pairs = torch.bincount(coreset.pivots[0] @ torch.tensor([n, 1]), minlength=n * n).view(n, n)
    assert not pairs.diagonal().any()
    statistic = ((pairs[~torch.eye(n, dtype=torch.bool)] - expected).square() / expected).sum()
    degrees = n * (n - 1) - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


def test_the_greedy_sampler_takes_the_largest_remainder_each_time():
    _, k, _ = drawn()
    h, _, coreset = matrices(k, beta=0.4, rank=10, sampler="greedy")
    left, chosen = h[0, 0].clone(), []
    for _ in range(10):
        chosen.append(int(left.diagonal().argmax()))
        row = left[chosen[-1]]
        left = left - row[:, None] * row / row[chosen[-1]]
    assert coreset.pivots[0, 0].tolist() == chosen


def test_gamma_is_the_largest_logit_over_the_log_of_the_number_of_keys():
    q, k, v = drawn(n=50)
    radius = query_radii(q)[0]
    coreset = compress_kv(k, v, rank=8, bins=3, scale=0.7, query_radius=radius)
    length = (k - k.mean(dim=2, keepdim=True)).norm(dim=-1).amax(dim=-1)
    torch.testing.assert_close(coreset.gamma, 0.7 * radius * length / math.log(50), rtol=1e-12, atol=0)
    # without queries the keys stand for them
    own = compress_kv(k, v, rank=8, scale=0.7)
    torch.testing.assert_close(own.gamma, 0.7 * length**2 / math.log(50), rtol=1e-12, atol=0)


def test_tau_mult_multiplies_the_temperature():
    q, k, v = drawn()
    one, two = (compress_kv(k, v, rank=8, bins=2, tau_mult=f) for f in (1.0, 2.5))
    torch.testing.assert_close(two.tau, 2.5 * one.tau)
    found = [wildcat_attention(q, k, v, rank=8, tau_mult=f) for f in (1.0, 2.5)]
    assert not torch.allclose(*found)


@by_backend
@pytest.mark.parametrize("options", [{"rank": 8}, {"rank": 12, "bins": 4}], ids=str)
def test_gradients_hold_keys_weights_and_temperature_constant(options, backend):
    q, k, v = (x.requires_grad_() for x in drawn())
    options = {**options, "scale": 0.4, "query_radius": query_radii(q.detach())[0]}
    eye = torch.eye(48, dtype=torch.float64)[None, None]
    chosen = compress_kv(k.detach(), eye, backend="reference", **options)
    p = torch.exp(0.4 * q @ k[:, :, chosen.pivots[0, 0]].mT)
    closed_form = (p @ (chosen.values @ v)) / (p @ chosen.weights[..., None])
    del options["query_radius"]
    out = wildcat_attention(q, k, v, backend=backend, **options)
    torch.testing.assert_close(out, closed_form, rtol=0, atol=1e-10)
    upstream = torch.randn_like(out)
    found, expected = (torch.autograd.grad(x, (q, k, v), upstream, retain_graph=True) for x in (out, closed_form))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@by_backend
def test_the_gradients_are_the_derivatives(backend):
    q, k, v = drawn(m=3, n=14, d=3, dv=2)
    assert torch.autograd.gradcheck(
        lambda x: wildcat_attention(q, k, x, rank=6, bins=2, backend=backend), [v.requires_grad_()]
    )
    coreset = compress_kv(k, v.detach(), rank=6, bins=2)
    leaves = [x.detach().requires_grad_() for x in (q, *coreset[:3])]

    def attend(x, *own):
        return weighted_attention(x, coreset._replace(**dict(zip(coreset._fields, own, strict=False))), backend=backend)

    assert torch.autograd.gradcheck(attend, leaves)
