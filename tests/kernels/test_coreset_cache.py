"""Compressing a cache of keys and values: what is kept as it is, what is summed up, and what it is worth."""

import pytest
import torch

from kernels.coreset_attention import compress_cache, compress_kv, weighted_attention

by_backend = pytest.mark.parametrize("backend", ["torch", "reference"])


def walk(n=300, *, b=1, heads=2, d=8, dv=6, m=20):
    """Tokens that change little by little, so that neighbours say the same."""
    steps = torch.randn(b, heads, n, d + dv, dtype=torch.float64)
    x = torch.nn.functional.avg_pool1d(steps.flatten(0, 1).mT, 31, 1, 15, count_include_pad=False).mT
    x = (5 * x).unflatten(0, (b, heads))
    return torch.randn(b, heads, m, d, dtype=torch.float64), x[..., :d], x[..., d:]


def attention(q, k, v, mask=None):
    mask = None if mask is None else mask[:, None, None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@by_backend
def test_the_first_and_last_tokens_are_kept_as_they_are(backend):
    _, k, v = walk()
    coreset = compress_cache(k, v, rank=60, bins=3, protect=(5, 7), backend=backend)
    kept = [*range(5), *range(293, 300)]
    assert coreset.keys.shape == (1, 2, 60, 8)
    assert coreset.pivots[0, 0, :12].tolist() == kept
    assert coreset.weights[:, :, :12].eq(1).all()
    assert coreset.keys[:, :, :12].equal(k[:, :, kept])
    assert coreset.values[:, :, :12].equal(v[:, :, kept])
    between = coreset.pivots[:, :, 12:]
    assert between.ge(5).all()
    assert between.lt(293).all()
    own = compress_kv(k[:, :, 5:293], v[:, :, 5:293], rank=48, bins=3, backend=backend)
    assert between.equal(own.pivots + 5)
    assert coreset.weights[:, :, 12:].equal(own.weights)
    torch.testing.assert_close(coreset.lower, v.amin(dim=2))
    torch.testing.assert_close(coreset.upper, v.amax(dim=2))
    torch.testing.assert_close(coreset.keys, k.gather(2, coreset.pivots[..., None].expand(-1, -1, -1, 8)))


def test_32_tokens_are_kept_at_each_end_by_default():
    _, k, v = walk()
    assert compress_cache(k, v, rank=80).pivots[0, 0, :64].tolist() == [*range(32), *range(268, 300)]


@by_backend
@pytest.mark.parametrize("protect", [(4, 4), (0, 0), (0, 9)])
def test_a_rank_that_holds_all_tokens_is_exact(protect, backend):
    q, k, v = walk(n=50)
    coreset = compress_cache(k, v, rank=50, protect=protect, backend=backend)
    assert coreset.weights.eq(1).all()
    out = weighted_attention(q, coreset, backend=backend)
    torch.testing.assert_close(out, attention(q, k, v), rtol=0, atol=1e-10)


@by_backend
@pytest.mark.parametrize("n", [1, 5, 63, 64])
def test_a_short_cache_is_returned_whole(n, backend):
    q, k, v = walk(n=n)
    out = weighted_attention(q, compress_cache(k, v, rank=64, backend=backend))
    torch.testing.assert_close(out, attention(q, k, v), rtol=0, atol=1e-10)


@by_backend
@pytest.mark.parametrize("protect", [(5, 7), (0, 5), (5, 0), (0, 0)])
def test_masked_tokens_are_neither_kept_nor_chosen(protect, backend):
    q, k, v = walk(b=2)
    there = torch.rand(2, 300) > 0.3
    there[:, [0, 297]] = False
    spoilt = [x.masked_fill(~there[:, None, :, None], torch.nan) for x in (k, v)]
    coreset = compress_cache(*spoilt, rank=150, protect=protect, key_mask=there, backend=backend)
    chosen = coreset.pivots.flatten(1)
    for i in range(2):
        assert there[i][chosen[i][chosen[i] >= 0]].all()
    assert not coreset.weights[coreset.pivots < 0].any()
    # also for a query that would prefer an empty slot
    out = weighted_attention(q, coreset, backend=backend)
    torch.testing.assert_close(out, attention(q, k, v, there), rtol=0, atol=0.05)
    assert weighted_attention(1e4 * q, coreset, backend=backend).isfinite().all()


@by_backend
def test_a_cache_without_tokens_gives_zero(backend):
    q, k, v = (x * torch.nan if i else x for i, x in enumerate(walk(b=2)))
    there = torch.zeros(2, 300, dtype=torch.bool)
    for protect in ((3, 3), (0, 0)):
        coreset = compress_cache(k, v, rank=20, protect=protect, key_mask=there, backend=backend)
        assert coreset.pivots.eq(-1).all()
        assert not weighted_attention(q, coreset, backend=backend).any()


def test_it_says_more_than_the_same_number_of_tokens():
    q, k, v = walk(n=600)
    exact = attention(q, k, v)
    coreset = compress_cache(k, v, rank=75, protect=(8, 8))
    error = (weighted_attention(q, coreset) - exact).square().mean().sqrt()
    ends = [*range(8), *range(600 - 67, 600)]
    strided = torch.linspace(0, 599, 75).long()
    for kept in (ends, strided):
        plain = (attention(q, k[:, :, kept], v[:, :, kept]) - exact).square().mean().sqrt()
        assert error < plain / 4


def test_gradients_reach_kept_and_chosen_tokens():
    q, k, v = walk(n=90)
    k.requires_grad_()
    v.requires_grad_()
    coreset = compress_cache(k, v, rank=30, protect=(4, 4))
    for_k, for_v = torch.autograd.grad(weighted_attention(q, coreset).square().sum(), (k, v))
    touched = for_k[0, 0].abs().sum(dim=-1).nonzero()[:, 0]
    assert touched.equal(coreset.pivots[0, 0].sort().values)
    assert for_v.ne(0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 10, "protect": (5, 5)}, "rank must be more than the 10 protected tokens, got 10"),
        ({"rank": 10, "protect": (-1, 5)}, "protect must be two numbers"),
        ({"rank": 10, "protect": (1, 2, 3)}, "protect must be two numbers"),
        ({"rank": 10, "protect": (1, 2), "grid": (10, 30)}, "grid must be None"),
        ({"rank": 300, "protect": (1, 2), "grid": (10, 30)}, "grid must be None"),
        ({"rank": 0, "protect": (0, 0)}, "rank must be a whole number"),
        ({"rank": 10, "protect": (1, 2), "key_mask": torch.ones(1, 3, dtype=torch.bool)}, "key_mask must be"),
        ({"rank": 10, "protect": (1, 2), "sampler": "best"}, "sampler must be"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_what_cannot_be_kept_is_refused(options, message):
    _, k, v = walk()
    with pytest.raises(ValueError, match=message):
        compress_cache(k, v, **options)
