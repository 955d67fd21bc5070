"""What the Triton kernels that choose keys of a bin share: its places, odds of its keys, the solve at the end."""

from kernels.triton_parts import tl, triton


@triton.jit
def tokens_of(place, part, grid_h, grid_w, down, across, wide, width):
    """Places of bin ``part`` -> tokens, and whether a place holds one; as ``Bins.tokens``."""
    row, column = part // across, part % across
    y = row * grid_h // down + place // wide
    x = column * grid_w // across + place % wide
    there = (place < width) & (y < (row + 1) * grid_h // down) & (x < (column + 1) * grid_w // across)
    return y * grid_w + x, there


@triton.jit
def present(token, there, mask, mask_n, HAS_MASK: tl.constexpr):
    """Which of the places hold a key that is there."""
    if HAS_MASK:
        there = there & (tl.load(mask + token * mask_n, mask=there, other=0) != 0)
    return there


@triton.jit
def centred(x, token, there, mean, c, by_token, by_channel, SIZE: tl.constexpr, ACC: tl.constexpr):
    """Rows of x less the mean, 0 where there is none."""
    inside = there[:, None] & (c < SIZE)[None, :]
    at = (token * by_token)[:, None] + (c * by_channel)[None, :]
    return tl.where(inside, tl.load(x + at, mask=inside, other=0).to(ACC) - mean[None, :], 0)


@triton.jit
def lambert_w(x):
    """As in ``temperature.py``, float64."""
    far = tl.where(x > 2.718281828459045, x, 3.0)
    w = tl.where(x > 2.718281828459045, tl.log(far) - tl.log(tl.log(far)), x / 2.718281828459045)
    for _ in range(8):
        w = w / (1 + w) * (1 + tl.log(x) - tl.log(w))
    return w


@triton.jit
def multiplier(query_radius, key_radius, count, BETA: tl.constexpr, TAU_MULT: tl.constexpr):
    """As in ``temperature.py``, float64."""
    q, k = query_radius.to(tl.float64), key_radius.to(tl.float64)
    radii = q * k * BETA
    # not "larger than": NaN stays
    some = (radii < 1e-290) == 0
    radii, k = tl.where(some, radii, 1.0), tl.where(some, k, 1.0)
    number = tl.where(count > 1, count, 1).to(tl.float64)
    b0 = tl.log(number) / radii + 2
    rho = b0 / (2 * lambert_w(b0 / (2 * 3.191601025323704)))
    return tl.where(some, tl.sqrt(q / k * BETA / rho) / TAU_MULT, 0.0)


@triton.jit
def scores(
    left, half, place, t, noise, width, R: tl.constexpr, EPS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    UNIFORM: tl.constexpr, HAS_NOISE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Log odds of each key in step t, and what chance adds; -inf where it is exhausted."""
    some = left > tl.maximum(t, 64).to(ACC) * EPS
    weight = tl.zeros_like(left)
    if not UNIFORM:
        weight = tl.log(tl.where(some, left, 1.0)) + 2 * half
    if HAS_NOISE:
        u = tl.load(noise + t * width + place, mask=(place < width) & (t < R), other=0.5).to(ACC)
        low, high = tl.full((), LOW, ACC), tl.full((), HIGH, ACC)
        u = tl.where(u < low, low, tl.where(u > high, high, u))
        weight -= tl.log(-tl.log(u))
    return tl.where(some, weight, float("-inf"))


@triton.jit
def against_pivot(x, half, key, key_half):
    """g of the pivot with each key; NaN stays."""
    z = tl.sum(x * key[None, :], 1) - half - key_half
    return tl.exp(tl.where(z > 0, 0.0, z))


@triton.jit
def remaining(left, f):
    """What is left of each key; NaN and the mark of the chosen stay."""
    rest = left - f * f
    return tl.where(left < 0, left, tl.where(rest < 0, 0.0, rest))


@triton.jit
def solved(sums, ones, lower, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """The y with L^T y = (sums, ones), the last slot first."""
    slot = tl.arange(0, BLOCK_R)
    for step in range(R):
        t = R - 1 - step
        column = tl.load(lower + slot * R + t, mask=(slot > t) & (slot < R), other=0)
        root = tl.load(lower + t * R + t)
        take = tl.where(slot == t, 1.0, -column)
        y, one = tl.sum(take[:, None] * sums, 0) / root, tl.sum(take * ones, 0) / root
        sums = tl.where((slot == t)[:, None], y[None, :], sums)
        ones = tl.where(slot == t, one, ones)
    return sums, ones


@triton.jit
def write(
    pivots, values, weights, log_back, program, tokens, sums, ones, back,
    DV: tl.constexpr, R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Store what was found for one bin; of an empty slot nothing."""
    slot, cv = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    active, first = tokens >= 0, program * R
    tl.store(pivots + first + slot, tokens.to(tl.int64), mask=slot < R)
    tl.store(weights + first + slot, tl.where(active, ones, 0), mask=slot < R)
    tl.store(log_back + first + slot, tl.where(active, back, float("-inf")), mask=slot < R)
    at = (first + slot)[:, None] * DV + cv[None, :]
    inside = (slot < R)[:, None] & (cv < DV)[None, :]
    tl.store(values + at, tl.where(active[:, None], sums, 0), mask=inside)
