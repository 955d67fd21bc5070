"""Inputs, sizes and tolerances of coreset attention, for tests, benchmarks and the check on a GPU.

Random Gaussian keys have nothing to compress, and on them an answer of the mean value is hard to beat; features of
photographs are what the operator is for. How well they can be compressed differs a hundredfold between photographs and
between draws of the features, so that one of them shows little. All are drawn in float64 by a seeded generator.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.coreset_attention.temperature import gauge

# largest relative error (Frobenius norm) of outputs and gradients against float64 with the same pivots
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}

# channels of the photo features, and half-waves per window side of the fastest positional wave
FEATURES = 64
HALF_WAVES = 6
PLACES = ("middle", "corner")


def gaussian_inputs(
    n: int, d: int, *, queries: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k and v, drawn in this order (the inputs of the paper's figure 3).

    Args:
        n: number of keys. d: channels.
        queries: number of queries; as many as keys by default.

    Returns:
        q ``(1, 1, queries, d)``, k and v ``(1, 1, n, d)``.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = (n if queries is None else queries, n, n)
    q, k, v = (torch.randn(1, 1, size, d, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return q, k, v


def photo_inputs(
    image: Tensor,
    *,
    side: int,
    d: int,
    logit_std: float = 1.0,
    place: str = "middle",
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as an untrained network makes them of a crop of a photograph.

    Two random 3x3 convolutions with GELU, a LayerNorm, and projections of which those of queries and keys share half
    their variance, as pixels that look alike attend to each other. The crop is continued by reflection: a border of
    zeros would give its pixels keys like no others.

    Args:
        image: ``(3, h, w)``, RGB in 0..1.
        side: the crop is ``side`` x ``side`` pixels, at least 2, each a token, row by row.
        d: channels of q, k and v.
        logit_std: standard deviation of ``q.k / sqrt(d)`` over the keys, mean of the queries; q is scaled to it.
        place: of the crop, "middle" or "corner" (the upper left one).

    Returns:
        q, k, v: ``(1, 1, side * side, d)``.

    Raises:
        ValueError: the image is not ``(3, h, w)``, or smaller than the crop, an unknown place, or a crop of one colour.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        fan_in = math.prod(shape[1:])
        return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(fan_in)

    x = crop(image, side, place).double() - 0.5
    for channels in (3, FEATURES):
        # the gain of GELU is that of ReLU, near enough
        weight = math.sqrt(2) * draw(FEATURES, channels, 3, 3)
        x = F.gelu(F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), weight))
    tokens = F.layer_norm(x.flatten(2).transpose(1, 2), (FEATURES,))  # (1, n, 64)
    to_k, other, to_v = draw(d, FEATURES), draw(d, FEATURES), draw(d, FEATURES)
    q, k, v = (tokens @ weight.T for weight in (0.7 * to_k + 0.7 * other, to_k, to_v))
    spread = float(mean_logit_std(q, k, scale=1 / math.sqrt(d)))
    if spread < 1e-9:
        raise ValueError(f"the {side} x {side} crop has one colour: its logits cannot be scaled")
    return tuple(x.unsqueeze(1).to(dtype) for x in (q * (logit_std / spread), k, v))


def window_inputs(
    image: Tensor,
    *,
    window: int,
    d: int,
    amplitude: float,
    rank: int = 32,
    logit_std: float = 1.0,
    place: str = "middle",
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """One window of SST: photo features with factors of position beside them, so that the logits are plain ``q.k``.

    The positional bias is a sum of ``rank / 2`` random waves of the distance of two pixels, up to six half-waves per
    window side, and largest, ``amplitude``, where a pixel meets itself; a trained bias prefers the neighbours, too.

    Args:
        image: ``(3, h, w)``, RGB in 0..1.
        window: side of the window in pixels.
        d: channels of the content. rank: channels of the position, even.
        amplitude: largest bias; 0 leaves the content alone.
        logit_std: of the content. place: of the crop. Both as in :func:`photo_inputs`.

    Returns:
        q, k: ``(1, 1, window * window, d + rank)``, to be used with ``scale=1``; v: ``(1, 1, window * window, d)``.

    Raises:
        ValueError: as :func:`photo_inputs`, or ``rank`` is odd.
    """
    if rank % 2:
        raise ValueError(f"rank must be even, as each wave takes a cosine and a sine; got {rank}")
    q, k, v = photo_inputs(image, side=window, d=d, logit_std=logit_std, place=place, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    waves = HALF_WAVES * math.pi * (2 * torch.rand(rank // 2, 2, generator=generator, dtype=torch.float64) - 1)
    line = (torch.arange(window, dtype=torch.float64) + 0.5) / window
    phases = torch.cartesian_prod(line, line) @ waves.T  # (n, rank / 2)
    position = math.sqrt(2 * amplitude / rank) * torch.cat([phases.cos(), phases.sin()], dim=-1)[None, None]
    q, k = torch.cat([q / math.sqrt(d), position], dim=-1), torch.cat([k, position], dim=-1)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def crop(image: Tensor, side: int, place: str) -> Tensor:
    """(3, h, w) -> (1, 3, side, side), as in :func:`photo_inputs`."""
    if image.ndim != 3 or image.shape[0] != 3:
        raise ValueError(f"image must be (3, h, w), got {tuple(image.shape)}")
    h, w = image.shape[1:]
    if not 2 <= side <= min(h, w):
        raise ValueError(f"side must be within 2 and the image's {min(h, w)}, got {side}")
    if place not in PLACES:
        raise ValueError(f"place must be one of {', '.join(PLACES)}, got {place!r}")
    top, left = ((h - side) // 2, (w - side) // 2) if place == "middle" else (0, 0)
    return image[None, :, top : top + side, left : left + side]


def mean_logit_std(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """Standard deviation of ``scale * q.k`` over the keys, mean over everything else; without the logits."""
    centred = k - k.mean(dim=-2, keepdim=True)
    covariance = centred.transpose(-2, -1) @ centred / k.shape[-2]
    return scale * ((q @ covariance) * q).sum(dim=-1).clamp(min=0).sqrt().mean()


def gamma(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """``(b, heads)``: :func:`kernels.coreset_attention.temperature.gauge` of the longest query and key."""
    k = k - k.mean(dim=-2, keepdim=True)
    longest = [x.norm(dim=-1).amax(dim=-1) for x in (q, k)]
    return gauge(*longest, torch.tensor(k.shape[-2]), beta=scale)


def multiply_adds(n: int, m: int, d: int, *, dv: int, rank: int, bins: int) -> tuple[int, int]:
    """Multiply-adds of one head: with a coreset, and of exact attention.

    Args:
        n, m: keys and queries. d: channels of both. dv: channels of the values.
        rank, bins: of the coreset; even bins.
    """
    slots, width = -(-rank // bins), -(-n // bins)
    rows, updates, sums = n * slots * d, n * slots * (slots - 1) // 2, n * slots * (dv + 1)
    solve = bins * slots * slots * (dv + 1) // 2
    whole = m * n * (d + dv)
    if slots >= width:
        return whole, whole
    return rows + updates + sums + solve + m * bins * slots * (d + dv + 2), whole


def relative_error(out: Tensor, exact: Tensor, v: Tensor) -> float:
    """Error over what attention adds to the mean value: 0 is exact, and 1 is what ``v.mean()`` for each query has.

    Args:
        out, exact: ``(b, heads, m, dv)``.
        v: ``(b, heads, n, dv)``, the values.
    """
    exact, v = exact.double(), v.double()
    signal = exact - v.mean(dim=-2, keepdim=True)
    return float((out.double() - exact).square().mean().sqrt() / signal.square().mean().sqrt())
