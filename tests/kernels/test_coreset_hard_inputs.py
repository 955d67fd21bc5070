"""Coreset attention where a float could break: equal and nearly equal keys, no lengths, offsets, outliers, overflow."""

import pytest
import torch

from kernels.coreset_attention import compress_kv, wildcat_attention

N, D, RANK = 2048, 32, 64
by_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 1, n, D, generator=generator, dtype=torch.float64) for n in (256, N, N))


def largest_error(q, k, v, *, dtype, **options):
    """Against exact attention in float64 to what float32 makes of the inputs."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    out = wildcat_attention(q, k, v, rank=RANK, **options)
    assert out.isfinite().all()
    assert out.ge(v.amin(dim=2, keepdim=True)).all()
    assert out.le(v.amax(dim=2, keepdim=True)).all()
    return float((out.double() - exact).abs().max())


def limit(dtype, double, single):
    return double if dtype == torch.float64 else single


def repeated(k, count, *, noise=0.0):
    generator = torch.Generator().manual_seed(1)
    order = torch.randint(count, (N,), generator=generator)
    return k[:, :, order] + noise * torch.randn(k.shape, generator=generator, dtype=k.dtype)


@by_dtype
def test_equal_keys_take_one_slot_of_each_bin(dtype, inputs):
    q, k, v = inputs
    assert largest_error(q, repeated(k, 1), v, bins=16, dtype=dtype) < limit(dtype, 5e-16, 5e-8)
    coreset = compress_kv(repeated(k, 1).to(dtype), v.to(dtype), rank=RANK, bins=16)
    assert (coreset.pivots >= 0).sum() == 16


@by_dtype
@pytest.mark.parametrize(
    ("noise", "double", "single"), [(0.0, 2e-15, 2e-7), (1e-6, 4e-7, 5e-7), (1e-3, 4e-4, 5e-4)], ids=str
)
def test_ten_keys_are_told_apart_and_their_copies_are_not(noise, double, single, dtype, inputs):
    q, k, v = inputs
    keys = repeated(k, 10, noise=noise)
    assert largest_error(q, keys, v, bins=4, dtype=dtype) < limit(dtype, double, single)
    if not noise:
        coreset = compress_kv(keys.to(dtype), v.to(dtype), rank=RANK, bins=4)
        assert (coreset.pivots >= 0).sum() == 40


@by_dtype
def test_keys_on_a_line_exhaust_before_the_slots(dtype, inputs):
    q, k, v = inputs
    line = torch.linspace(-1, 1, N, dtype=torch.float64)[:, None] * k[:, :, :1]
    assert largest_error(q, line, v, dtype=dtype) < limit(dtype, 5e-9, 7e-5)
    coreset = compress_kv(line.to(dtype), v.to(dtype), rank=RANK, query_radius=float(q.norm(dim=-1).max()))
    assert (coreset.pivots >= 0).sum() < limit(dtype, 30, 20)


@by_dtype
@pytest.mark.parametrize("bins", [1, 16])
@pytest.mark.parametrize("scaled", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1.0, 1e-20), (1e-20, 1e-20)], ids=str)
def test_queries_or_keys_without_length_give_the_mean(scaled, bins, dtype, inputs):
    q, k, v = inputs
    q, k = q * scaled[0], k * scaled[1]
    assert largest_error(q, k, v, bins=bins, dtype=dtype) < limit(dtype, 5e-16, 1e-7)


@by_dtype
def test_an_offset_of_all_keys_costs_no_digits(dtype, inputs):
    q, k, v = inputs
    plain = largest_error(q, k, v, bins=4, dtype=dtype)
    assert largest_error(q, k + 1e3, v, bins=4, dtype=dtype) == pytest.approx(
        plain, rel=1e-9 if dtype.itemsize == 8 else 1e-4
    )


@by_dtype
def test_a_large_mean_of_the_values_costs_no_digits(dtype, inputs):
    q, k, v = inputs
    assert largest_error(q, k, 1e6 + 1e-3 * v, bins=16, dtype=dtype) < 3e-4


@by_dtype
@pytest.mark.parametrize(
    ("n", "bins"), [(1, 1), (1, 16), (3, 16), (3, 100), (RANK - 1, 1), (RANK, 1), (RANK, 16), (RANK - 1, 16)]
)
def test_fewer_tokens_than_slots_or_bins_are_exact(n, bins, dtype, inputs):
    q, k, v = inputs
    error = largest_error(q, k[:, :, :n], v[:, :, :n], bins=bins, dtype=dtype)
    assert error < limit(dtype, 5e-15, 2e-6)


@by_dtype
@pytest.mark.parametrize("factor", [3, 30, 1000])
@pytest.mark.parametrize("bins", [1, 16])
def test_steep_logits_stay_finite_and_within_the_values(bins, factor, dtype, inputs):
    q, k, v = inputs
    error = largest_error(factor * q, factor * k, v, bins=bins, dtype=dtype)
    assert error < 0.7 * float(v.amax() - v.amin())


@by_dtype
@pytest.mark.parametrize("factor", [30, 1e3, 1e6])
def test_one_long_key_is_chosen_and_spoils_nothing(factor, dtype, inputs):
    q, k, v = inputs
    k = k.clone()
    k[:, :, 77] *= factor
    q = q - (q @ k[0, 0, 77])[..., None] * k[0, 0, 77] / k[0, 0, 77].square().sum()
    error = largest_error(q, k, v, bins=16, dtype=dtype)
    assert error < 0.04 * float(v.amax() - v.amin())
    assert 77 in compress_kv(k.to(dtype), v.to(dtype), rank=RANK, bins=16).pivots


@by_dtype
def test_one_long_query_leaves_the_others_their_accuracy(dtype, inputs):
    q, k, v = inputs
    longer = q.clone()
    longer[:, :, 5] *= 30
    errors = []
    for queries in (q, longer):
        exact = torch.nn.functional.scaled_dot_product_attention(queries, k, v)
        out = wildcat_attention(*(x.to(dtype) for x in (queries, k, v)), rank=RANK, bins=16)
        assert out.isfinite().all()
        errors.append((out.double() - exact)[:, :, torch.arange(256) != 5].abs().max())
    assert errors[1] < 1.5 * errors[0]


@by_dtype
@pytest.mark.parametrize("bins", [1, 16])
def test_lengths_far_apart_do_not_overflow(bins, dtype, inputs):
    q, k, v = inputs
    # exp(s) of the longest key over that of the shortest is beyond the largest float32, in each bin
    k = k * torch.logspace(-3, 2, N, dtype=torch.float64)[torch.randperm(N)][:, None]
    coreset = compress_kv(k.to(dtype), v.to(dtype), rank=RANK, bins=bins, query_radius=float(30 * q.norm(dim=-1).max()))
    assert all(x.isfinite().all() for x in (coreset.keys, coreset.values, coreset.weights))
    out, expected = (
        wildcat_attention((30 * q).to(dtype), k.to(dtype), v.to(dtype), rank=RANK, bins=bins, backend=backend)
        for backend in ("torch", "reference")
    )
    assert float((out - expected).abs().mean()) < limit(dtype, 1e-6, 0.05) * float(v.amax() - v.amin())


@by_dtype
def test_slots_that_stay_empty_do_not_scale_the_others_away(dtype):
    # the first key of a bin is missing: its place has no length, and is what an empty slot points at
    k = torch.randn(1, 1, 16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = 60 * k / k.norm(dim=-1, keepdim=True)
    q, v = k / 60, torch.arange(16, dtype=torch.float64)[None, None, :, None]
    mask = (torch.arange(16) % 8 >= 4)[None]
    out, expected = (
        wildcat_attention(*(x.to(dtype) for x in (q, k, v)), rank=12, bins=2, scale=1.0, key_mask=mask, backend=backend)
        for backend in ("torch", "reference")
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=limit(dtype, 1e-9, 1e-4))
    assert out.std() > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [1, 30])
def test_16_bit_inputs_stay_finite(factor, dtype, inputs):
    q, k, v = (x.to(dtype) for x in inputs)
    out = wildcat_attention(factor * q, factor * k, 100 * v, rank=RANK, bins=16)
    assert out.isfinite().all()
    huge = wildcat_attention(q, k, (v * 0 + 60_000).to(dtype), rank=RANK, bins=16)
    assert huge.isfinite().all()


def test_what_is_not_a_number_is_not_hidden(inputs):
    q, k, v = (x.clone() for x in inputs)
    q[:, :, 3, 0] = torch.nan
    assert wildcat_attention(q, k, v, rank=RANK)[:, :, 3].isnan().all()
    q, k, v = (x.clone() for x in inputs)
    v[:, :, 9] = torch.nan
    assert wildcat_attention(q, k, v, rank=RANK).isnan().all()
    for recentre in (True, False):
        q, k, v = (x.clone() for x in inputs)
        k[:, :, 9, 0] = torch.nan
        assert wildcat_attention(q, k, v, rank=RANK, recentre=recentre).isnan().all()
