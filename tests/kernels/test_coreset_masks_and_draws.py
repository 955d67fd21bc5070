"""What coreset attention attends to and how it draws: masks, layouts, groups of queries, batches, seeds, noise."""

import pytest
import torch

import kernels.coreset_attention as coreset_attention
from kernels.coreset_attention import compress_kv, noise_shape, weighted_attention, wildcat_attention
from kernels.coreset_attention.bins import make_bins

SAMPLERS = ("gumbel", "cdf", "greedy", "uniform")
by_backend = pytest.mark.parametrize("backend", ["torch", "reference"])
by_sampler = pytest.mark.parametrize("sampler", SAMPLERS)
LAYOUTS = {
    "one bin": {"rank": 9},
    "slices": {"rank": 15, "bins": 5},
    "tiles": {"rank": 12, "bins": 4, "grid": (7, 9)},
    "strips": {"rank": 9, "bins": 3, "grid": (9, 7), "layout": "strips"},
    "more bins than tokens": {"rank": 200, "bins": 90},
    "all keys": {"rank": 63},
}
by_layout = pytest.mark.parametrize("options", LAYOUTS.values(), ids=list(LAYOUTS))


def drawn(*, b=1, m_heads=1, heads=1, m=9, n=63, d=6, dv=5, dtype=torch.float64):
    shapes = (b, m_heads, m, d), (b, heads, n, d), (b, heads, n, dv)
    return tuple(torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)


@by_backend
@by_sampler
def test_masked_keys_are_as_good_as_removed(sampler, backend):
    q, k, v = drawn()
    there = torch.rand(1, 63) > 0.4
    noise = torch.rand(noise_shape(63, rank=9, sampler=sampler), dtype=torch.float64)
    kept = noise if sampler == "cdf" else noise[:, :, there[0]]
    options = {"rank": 9, "sampler": sampler, "backend": backend}
    expected = wildcat_attention(q, k[:, :, there[0]], v[:, :, there[0]], noise=kept, **options)
    found = wildcat_attention(q, k, v, key_mask=there, noise=noise, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    coreset, removed = (
        compress_kv(k, v, key_mask=there, noise=noise, **options),
        compress_kv(k[:, :, there[0]], v[:, :, there[0]], noise=kept, **options),
    )
    assert coreset.pivots[0, 0].equal(there[0].nonzero()[:, 0][removed.pivots[0, 0]])
    for name in ("values", "weights", "lower", "upper", "gamma", "tau"):
        torch.testing.assert_close(getattr(coreset, name), getattr(removed, name), rtol=1e-8, atol=1e-8)


@by_backend
@by_layout
def test_what_is_masked_may_be_anything_and_gets_no_gradient(options, backend):
    q, k, v = drawn(b=2)
    there = torch.rand(2, 63) > 0.4
    spoilt = [x.masked_fill(~there[:, None, :, None], torch.nan).requires_grad_() for x in (k, v)]
    out = wildcat_attention(q, *spoilt, key_mask=there, backend=backend, **options)
    torch.testing.assert_close(out, wildcat_attention(q, k, v, key_mask=there, backend=backend, **options))
    for gradient in torch.autograd.grad(out.square().sum(), spoilt):
        assert gradient.isfinite().all()
        assert not gradient.masked_select(~there[:, None, :, None]).any()


@by_backend
@by_layout
def test_an_image_without_keys_gives_zero_and_spares_the_others(options, backend):
    q, k, v = drawn(b=2)
    there = torch.ones(2, 63, dtype=torch.bool)
    there[0] = False
    out = wildcat_attention(q, k, v, key_mask=there, backend=backend, **options)
    assert not out[0].any()
    torch.testing.assert_close(out[1:], wildcat_attention(q[1:], k[1:], v[1:], backend=backend, **options))


@by_backend
def test_a_bin_without_keys_leaves_its_slots_empty(backend):
    q, k, v = drawn()
    there = torch.ones(1, 63, dtype=torch.bool)
    there[:, :21] = False
    coreset = compress_kv(k, v, rank=12, bins=3, key_mask=there, backend=backend)
    assert coreset.pivots[0, 0, :4].eq(-1).all()
    assert coreset.pivots[0, 0, 4:].ge(21).all()
    assert not coreset.weights[0, 0, :4].any()
    assert coreset.tau[0, 0, 0].isinf()
    # large enough that a key of weight 0 far away would take the softmax for itself
    out = wildcat_attention(1e4 * q, k, v, rank=12, bins=3, key_mask=there, backend=backend)
    assert out.isfinite().all()


@by_backend
def test_a_mask_may_differ_between_heads(backend):
    q, k, v = drawn(b=2, m_heads=4, heads=2)
    there = torch.rand(2, 2, 63) > 0.4
    out = wildcat_attention(q, k, v, rank=9, key_mask=there, sampler="greedy", backend=backend)
    for head in range(2):
        own = slice(2 * head, 2 * head + 2)
        one = (q[:, own], k[:, head : head + 1], v[:, head : head + 1])
        expected = wildcat_attention(*one, rank=9, key_mask=there[:, head], sampler="greedy", backend=backend)
        torch.testing.assert_close(out[:, own], expected, rtol=0, atol=1e-10)


@by_backend
@pytest.mark.parametrize(
    ("options", "side"),
    [
        ({"layout": "tiles", "bins": 6}, (3, 4)),
        ({"layout": None, "bins": 6}, (3, 4)),
        ({"layout": "strips", "bins": 3}, (2, 12)),
        ({"layout": "slices", "bins": 4}, None),
    ],
    ids=str,
)
def test_each_bin_chooses_from_its_own_part_of_the_image(options, side, backend):
    _, k, v = drawn(n=72)
    pivots = compress_kv(k, v, rank=12, grid=(6, 12), backend=backend, **options).pivots[0, 0].view(options["bins"], -1)
    if side is None:
        bins = pivots // 18
    else:
        bins = pivots // 12 // side[0] * (12 // side[1]) + pivots % 12 // side[1]
    assert bins.equal(torch.arange(options["bins"])[:, None].expand_as(bins))


@pytest.mark.parametrize("grid", [(7, 11), (11, 7), (1, 77), (13, 5)])
@pytest.mark.parametrize("bins", [2, 6, 7, 16])
@pytest.mark.parametrize("layout", ["tiles", "strips", "slices"])
def test_bins_hold_every_token_once_whatever_the_sides(layout, bins, grid):
    made = make_bins(grid[0] * grid[1], bins, grid, layout)
    tokens, held = made.tokens(torch.device("cpu"))
    assert tokens[held].sort().values.equal(torch.arange(grid[0] * grid[1]))
    sizes = held.sum(dim=-1)
    assert sizes.min() >= 1
    assert made.count <= bins
    assert noise_shape(grid[0] * grid[1], rank=20, bins=bins, grid=grid, layout=layout) == (
        *(made.count, -(-20 // made.count)),
        sizes.max() if made.even else made.width,
    )


def test_tiles_are_as_square_as_they_can_be():
    for grid, bins, tiles in (
        ((64, 64), 16, (4, 4)),
        ((32, 64), 8, (2, 4)),
        ((64, 32), 8, (4, 2)),
        ((5, 50), 5, (1, 5)),
    ):
        assert make_bins(grid[0] * grid[1], bins, grid, None).tiles == tiles


@by_backend
def test_grouped_queries_equal_repeated_keys(backend):
    q, k, v = drawn(b=2, m_heads=6, heads=2)
    options = {"rank": 9, "sampler": "greedy", "backend": backend}
    repeated = (x.repeat_interleave(3, dim=1) for x in (k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = wildcat_attention(*leaves, **options)
    # the radius is that of the group, so attend to one coreset
    for head in range(2):
        radius = coreset_attention.query_radii(q)[0][:, 3 * head : 3 * head + 3].amax(dim=1, keepdim=True)
        coreset = compress_kv(k[:, head : head + 1], v[:, head : head + 1], query_radius=radius, **options)
        for i in range(3 * head, 3 * head + 3):
            found = weighted_attention(q[:, i : i + 1], coreset, backend=backend)
            torch.testing.assert_close(out[:, i : i + 1], found, rtol=0, atol=1e-10)
    rank = {**options, "rank": 63}
    expected = wildcat_attention(q, *repeated, **rank)
    torch.testing.assert_close(wildcat_attention(*leaves, **rank), expected, rtol=0, atol=1e-12)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{"rank": 9}, {"rank": 16, "bins": 4, "grid": (8, 8)}, {"rank": 64}], ids=str)
def test_an_image_does_not_see_its_batch(options, dtype):
    # a BLAS rounds by the address; with such sides all images have aligned ones
    q, k, v = drawn(b=5, m_heads=2, heads=2, n=64, d=8, dv=8, dtype=dtype)
    out = wildcat_attention(q, k, v, **options)
    for i in (0, 3):
        assert wildcat_attention(*(x[i : i + 1] for x in (q, k, v)), **options).equal(out[i : i + 1])
    same = wildcat_attention(*(x[:1].expand(5, -1, -1, -1) for x in (q, k, v)), **options)
    assert all(same[i].equal(same[0]) for i in range(5))


@by_layout
def test_an_image_of_odd_sides_sees_its_batch_in_the_last_digit_at_most(options):
    q, k, v = drawn(b=5, m_heads=2, heads=2)
    out = wildcat_attention(q, k, v, **options)
    for i in (0, 3):
        alone = wildcat_attention(*(x[i : i + 1] for x in (q, k, v)), **options)
        torch.testing.assert_close(alone, out[i : i + 1], rtol=1e-12, atol=1e-12)


@by_backend
@by_sampler
def test_a_seed_decides_the_draw(sampler, backend):
    _, k, v = drawn(n=200, heads=2)
    options = {"rank": 12, "bins": 3, "sampler": sampler, "backend": backend}
    torch.manual_seed(5)
    default = compress_kv(k, v, **options).pivots
    torch.manual_seed(6)
    assert compress_kv(k, v, seed=0, **options).pivots.equal(default)
    assert compress_kv(k, v, seed=torch.tensor(0, dtype=torch.int32), **options).pivots.equal(default)
    assert compress_kv(k, v, seed=torch.tensor(7), **options).pivots.equal(compress_kv(k, v, seed=7, **options).pivots)
    for seed in (1, -1, 2**31, 2**80 + 9):
        assert compress_kv(k, v, seed=seed, **options).pivots.equal(default) is (sampler == "greedy")


@pytest.mark.parametrize("sampler", ["gumbel", "cdf", "uniform"])
def test_heads_and_bins_draw_on_their_own(sampler):
    _, k, v = drawn(n=60)
    k, v = (x[:, :, :30].repeat(1, 3, 2, 1) for x in (k, v))
    pivots = compress_kv(k, v, rank=20, bins=2, sampler=sampler).pivots[0].view(3, 2, 10) % 30
    assert pivots.view(6, 10).unique(dim=0).shape[0] == 6


@by_backend
@pytest.mark.parametrize("sampler", ["gumbel", "cdf", "uniform"])
def test_a_generator_draws_and_moves_on(sampler, backend):
    _, k, v = drawn(n=200)
    options = {"rank": 12, "sampler": sampler, "backend": backend}
    generator = torch.Generator().manual_seed(3)
    first, second = (compress_kv(k, v, generator=generator, **options).pivots for _ in range(2))
    assert not first.equal(second)
    assert compress_kv(k, v, generator=torch.Generator().manual_seed(3), **options).pivots.equal(first)


@by_backend
@pytest.mark.parametrize("sampler", ["gumbel", "cdf", "uniform"])
def test_noise_takes_the_place_of_the_seed(sampler, backend):
    _, k, v = drawn(n=200, heads=2)
    options = {"rank": 12, "bins": 3, "sampler": sampler, "backend": backend}
    shape = noise_shape(200, rank=12, bins=3, sampler=sampler)
    noise = torch.rand(2, *shape, generator=torch.Generator().manual_seed(8))
    found = compress_kv(k, v, noise=noise, **options).pivots
    assert found.equal(compress_kv(k, v, generator=torch.Generator().manual_seed(8), **options).pivots)
    shared = compress_kv(k, v, noise=noise[0], **options).pivots
    assert shared[:, 0].equal(found[:, 0])
    assert not shared[:, 1].equal(found[:, 1])


def test_a_seed_means_the_same_in_every_integer_type():
    q, k, v = drawn()
    expected = wildcat_attention(q, k, v, rank=8, bins=2, seed=-1)
    for dtype in (torch.int32, torch.int64):
        assert torch.equal(wildcat_attention(q, k, v, rank=8, bins=2, seed=torch.tensor(-1, dtype=dtype)), expected)


@by_backend
@pytest.mark.parametrize("grid", [(5, 5), (7, 9)], ids=str)
def test_a_rank_that_holds_all_keys_is_exact_on_uneven_tiles_too(grid, backend):
    n = grid[0] * grid[1]
    q, k, v = torch.randn(3, 1, 2, n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    out = wildcat_attention(q, k, v, rank=n, bins=4, grid=grid, backend=backend)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
