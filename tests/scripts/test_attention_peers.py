"""Ways to approximate attention: exact where they keep everything, and each image by itself."""

import math

import pytest
import torch

from scripts import attention_peers as peers

GRID = (6, 8)
N, D, DV, SCALE = 48, 5, 3, 0.4

PEERS = {
    "mean": peers.mean_value,
    "taylor": peers.taylor_first_order,
    "uniform": lambda q, k, v, **more: peers.uniform_subset(q, k, v, rank=12, **more),
    "pooled": lambda q, k, v, **more: peers.pooled_attention(q, k, v, rank=12, grid=GRID, **more),
    "runs": lambda q, k, v, **more: peers.pooled_attention(q, k, v, rank=12, **more),
    "nystrom": lambda q, k, v, **more: peers.nystrom_attention(q, k, v, rank=12, grid=GRID, **more),
    "pinv": lambda q, k, v, **more: peers.nystrom_attention(q, k, v, rank=12, grid=GRID, iterations=None, **more),
}


@pytest.fixture
def inputs():
    return [torch.randn(2, 3, N, d, dtype=torch.float64) for d in (D, D, DV)]


def plain(q, k, v):
    return (SCALE * q @ k.transpose(-2, -1)).softmax(dim=-1) @ v


@pytest.mark.parametrize("width", [DV, D, D + 2])
def test_exact_attention_is_softmax_whatever_the_width_of_the_values(inputs, width):
    q, k, _ = inputs
    v = torch.randn(2, 3, N, width, dtype=torch.float64)
    torch.testing.assert_close(peers.exact_attention(q, k, v, scale=SCALE), plain(q, k, v), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "peer",
    [
        lambda *x: peers.uniform_subset(*x, scale=SCALE, rank=N),
        lambda *x: peers.pooled_attention(*x, scale=SCALE, rank=N),
        lambda *x: peers.pooled_attention(*x, scale=SCALE, rank=N, grid=GRID),
        lambda *x: peers.nystrom_attention(*x, scale=SCALE, rank=N, grid=GRID, iterations=None),
    ],
    ids=["uniform", "pooled runs", "pooled tiles", "nystrom"],
)
def test_keeping_all_keys_is_exact(inputs, peer):
    torch.testing.assert_close(peer(*inputs), plain(*inputs), rtol=1e-7, atol=1e-9)


def test_the_iteration_converges_to_the_pseudo_inverse(inputs):
    q, k, _ = (x[..., :4, :] for x in inputs)
    matrix = (q @ k.transpose(-2, -1)).softmax(dim=-1)
    exact = torch.linalg.pinv(matrix)
    torch.testing.assert_close(peers.iterate_pinv(matrix, 60), exact, rtol=1e-6, atol=1e-6)
    distance = [(peers.iterate_pinv(matrix, steps) - exact).norm() for steps in (2, 6, 12)]
    assert distance == sorted(distance, reverse=True)


def test_the_expansion_meets_softmax_where_logits_are_small(inputs):
    q, k, v = inputs
    mean = peers.mean_value(q, k, v, scale=SCALE)
    errors = []
    for factor in (1e-2, 1e-3):
        exact = plain(factor * q, k, v)
        errors.append((peers.taylor_first_order(factor * q, k, v, scale=SCALE) - exact).norm() / (mean - exact).norm())
    # what is left is of second order, against a signal of first
    assert errors[1] < 1e-2
    assert math.isclose(errors[0] / errors[1], 10, rel_tol=0.2)


def test_the_expansion_does_not_see_a_shift_of_all_keys(inputs):
    q, k, v = inputs
    shifted = peers.taylor_first_order(q, k + 7, v, scale=SCALE)
    torch.testing.assert_close(shifted, peers.taylor_first_order(q, k, v, scale=SCALE))


@pytest.mark.parametrize("name", PEERS)
def test_no_image_and_no_head_sees_another(inputs, name):
    whole = PEERS[name](*inputs, scale=SCALE)
    louder = [torch.cat([x[:1], 50 * x[1:]]) for x in inputs]
    torch.testing.assert_close(PEERS[name](*louder, scale=SCALE)[:1], whole[:1], rtol=1e-9, atol=1e-12)
    alone = PEERS[name](*(x[:, 1:2] for x in inputs), scale=SCALE)
    torch.testing.assert_close(alone, whole[:, 1:2], rtol=1e-9, atol=1e-12)


def test_the_subset_is_that_of_its_seed(inputs):
    first, again, other = (peers.uniform_subset(*inputs, scale=SCALE, rank=8, seed=seed) for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)


def test_tiles_are_averages_of_neighbours_on_the_grid():
    image = torch.arange(48.0).reshape(1, 1, 48, 1)
    tiles = peers.pool(image, 12, GRID)
    assert tiles.flatten()[:5].tolist() == [4.5, 6.5, 8.5, 10.5, 20.5]
    assert peers.pool(image, 12, None).flatten()[:2].tolist() == [1.5, 5.5]
    # three columns of eight pixels: the second shares its first and its last one with its neighbours
    assert peers.pool(image, 6, GRID).shape == (1, 1, 6, 1)
    assert peers.pool(image, 9, GRID).flatten()[:3].tolist() == [5.0, 7.5, 10.0]


@pytest.mark.parametrize(
    ("rank", "grid", "message"),
    [
        (0, GRID, "rank must be within 1 and the 48 tokens, got 0"),
        (49, GRID, "rank must be within 1 and the 48 tokens, got 49"),
        (11, GRID, "11 averages are not tiles of a grid of 6 x 8"),
        (12, (5, 8), "grid 5 x 8 does not hold 48 tokens"),
    ],
)
def test_numbers_of_averages_that_do_not_fit_are_refused(inputs, rank, grid, message):
    with pytest.raises(ValueError, match=message):
        peers.pooled_attention(*inputs, scale=SCALE, rank=rank, grid=grid)


def test_a_subset_of_more_keys_than_there_are_is_refused(inputs):
    with pytest.raises(ValueError, match="rank must be within 1 and the 48 tokens, got 49"):
        peers.uniform_subset(*inputs, scale=SCALE, rank=49)
