"""Ways to approximate softmax attention that coreset attention is measured against.

Each takes q ``(b, heads, m, d)``, k ``(b, heads, n, d)``, v ``(b, heads, n, dv)`` of one float dtype and the factor
``scale`` of the logits, and returns ``(b, heads, m, dv)``. None lets a head or an image see another one.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.coreset_attention.bins import squarest


def exact_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Softmax attention by PyTorch's fused kernel.

    Values narrower than the keys get channels of zeros: the kernel for CPUs wants one width, and without it PyTorch
    writes out all logits.
    """
    missing = k.shape[-1] - v.shape[-1]
    out = F.scaled_dot_product_attention(q, k, F.pad(v, (0, max(missing, 0))), scale=scale)
    return out[..., : v.shape[-1]]


def mean_value(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """The mean of all values for each query: what is left of attention when nothing attends."""
    return v.mean(dim=-2, keepdim=True).expand(*q.shape[:-1], v.shape[-1])


def uniform_subset(q: Tensor, k: Tensor, v: Tensor, *, scale: float, rank: int, seed: int = 0) -> Tensor:
    """Exact attention to ``rank`` keys chosen at random without replacement, the same ones for all heads.

    Raises:
        ValueError: ``rank`` is not within 1 and the number of keys.
    """
    _check_rank(rank, k)
    chosen = torch.randperm(k.shape[-2], generator=torch.Generator().manual_seed(seed))[:rank].to(k.device)
    return exact_attention(q, k[..., chosen, :], v[..., chosen, :], scale=scale)


def pooled_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, rank: int, grid: tuple[int, int] | None = None
) -> Tensor:
    """Exact attention to averages of neighbouring keys and values.

    Source: Wang et al., "PVT v2: Improved Baselines with Pyramid Vision Transformer", 2022 (linear attention by average
    pooling), without its learned layers.

    Args:
        rank: number of averages, at most the number of keys.
        grid: ``(h, w)`` of the image whose pixels the keys are, row by row: averages are of its tiles. Without it they
            are of runs of tokens.

    Raises:
        ValueError: ``rank`` is not within 1 and the number of keys, or not the number of tiles of any division.
    """
    return exact_attention(q, pool(k, rank, grid), pool(v, rank, grid), scale=scale)


def nystrom_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    rank: int,
    grid: tuple[int, int] | None = None,
    iterations: int | None = 6,
) -> Tensor:
    """Softmax attention factored through averages of queries and keys.

    ``softmax(q k~) pinv(softmax(q~ k~)) softmax(q~ k) v``, where q~ and k~ are averages of neighbours.

    Source: Xiong et al., "Nystromformer: A Nystrom-based Algorithm for Approximating Self-Attention", AAAI 2021
    (sec. 3.2). Differs from the paper's code: the iteration for the pseudo-inverse starts from the norms of each head's
    own matrix, not from the largest of the batch; the skip convolution of the values is left out.

    Args:
        rank: number of averages. grid: as in :func:`pooled_attention`; the queries need the same one.
        iterations: steps of the iteration, 6 in the paper; None takes the pseudo-inverse itself, by singular values.

    Raises:
        ValueError: as :func:`pooled_attention`, for the queries too.
    """
    q_mean, k_mean = pool(q, rank, grid), pool(k, rank, grid)
    middle = (scale * q_mean @ k_mean.transpose(-2, -1)).softmax(dim=-1)
    inverse = torch.linalg.pinv(middle) if iterations is None else iterate_pinv(middle, iterations)
    values = inverse @ exact_attention(q_mean, k, v, scale=scale)  # (b, heads, rank, dv)
    return exact_attention(q, k_mean, values, scale=scale)


def iterate_pinv(a: Tensor, iterations: int) -> Tensor:
    """Approximate pseudo-inverse of each ``(rank, rank)`` matrix by a third-order iteration.

    Source: Razavi et al., "A new iterative method for finding approximate inverses of complex matrices", 2014.
    """
    columns, rows = (a.abs().sum(dim=dim).amax(dim=-1)[..., None, None] for dim in (-2, -1))
    z = a.transpose(-2, -1) / (columns * rows)
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z


def taylor_first_order(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Softmax with its exponential expanded to first order, around the mean key.

    Softmax does not change when all keys are shifted, but its expansion does: around their mean the denominator is the
    number of keys, whatever the query, and the expansion is at its best. It then is the mean value and the covariance
    of keys and values times the query.

    Source: Qiu et al., "MB-TaylorFormer: Multi-branch Efficient Transformer Expanded by Taylor Formula for Image
    Dehazing", ICCV 2023 (sec. 3.2), which scales q and k to a length of 0.5 so that it holds; here the logits are what
    they are.
    """
    mean = v.mean(dim=-2, keepdim=True)
    # one centred factor makes a covariance
    return mean + scale * q @ (k.transpose(-2, -1) @ (v - mean) / k.shape[-2])


def pool(x: Tensor, rank: int, grid: tuple[int, int] | None) -> Tensor:
    """``(b, heads, n, d)`` -> ``(b, heads, rank, d)``: averages of neighbours, by tiles that are as square as can be.

    Tiles of a side that does not divide the image's share a row or a column of pixels.

    Raises:
        ValueError: ``rank`` is not within 1 and n, or not the number of tiles of any division of the grid.
    """
    _check_rank(rank, x)
    b, heads, n, d = x.shape
    h, w = grid or (1, n)
    if h * w != n:
        raise ValueError(f"grid {h} x {w} does not hold {n} tokens")
    tiles = divide(rank, h, w)
    if h % tiles[0] == 0 and w % tiles[1] == 0:
        return x.reshape(b, heads, tiles[0], h // tiles[0], tiles[1], w // tiles[1], d).mean(dim=(3, 5)).flatten(2, 3)
    channels = x.transpose(-2, -1).reshape(b * heads, d, h, w)
    return F.adaptive_avg_pool2d(channels, tiles).reshape(b, heads, d, rank).transpose(-2, -1)


def divide(rank: int, h: int, w: int) -> tuple[int, int]:
    """Rows and columns of ``rank`` tiles, as the bins of a coreset are cut.

    Raises:
        ValueError: no rows and columns make up ``rank``.
    """
    tiles = squarest(rank, h, w)
    if tiles is None:
        raise ValueError(f"{rank} averages are not tiles of a grid of {h} x {w}; a power of two is")
    return tiles


def _check_rank(rank: int, k: Tensor) -> None:
    if not 1 <= rank <= k.shape[-2]:
        raise ValueError(f"rank must be within 1 and the {k.shape[-2]} tokens, got {rank}")
