"""What the kernels of T-MSA share: which pixels a program has, the vectors at their length and the way back."""

from kernels.triton_parts import dot, operand, tl, triton


@triton.jit
def own(heads, programs, each):
    """Head, image and first block of this program."""
    program = tl.program_id(0)
    pair = (program // programs).to(tl.int64)
    return pair % heads, pair // heads, (program % programs) * each


@triton.jit
def places(image, head, row, pixel, by_image, by_head, by_side, LAST: tl.constexpr, UNIT: tl.constexpr):
    """Where the entries of a block are. Distances come in UNIT entries, so that the compiler knows them to be that."""
    start = (image * by_image + head * by_head) * UNIT
    if LAST:
        return start + (pixel.to(tl.int64) * by_side * UNIT)[None, :] + row[:, None]
    return start + (row.to(tl.int64) * by_side * UNIT)[:, None] + pixel[None, :]


@triton.jit
def matrices(w_ptr, weight_ptr, pair, head, POWER: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr):
    """The matrix of each term, the second by its weight."""
    row = tl.arange(0, ROWS)
    return _terms(w_ptr, weight_ptr, row[:, None] * ROWS + row[None, :], pair, head, POWER, ROWS, ACC)


@triton.jit
def columns(
    w_ptr, weight_ptr, pair, head, POWER: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Column D of the matrix of each term: what makes the denominator."""
    return _terms(w_ptr, weight_ptr, tl.arange(0, ROWS) * ROWS + D, pair, head, POWER, ROWS, ACC)


@triton.jit
def _terms(w_ptr, weight_ptr, entry, pair, head, POWER: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr):
    at = w_ptr + pair * (ROWS * ROWS * (2 if POWER > 0 else 1)) + entry
    first = tl.load(at)
    second = first
    if POWER > 0:
        second = tl.load(at + ROWS * ROWS) * tl.load(weight_ptr + head).to(ACC)
    return first, second


@triton.jit
def store_terms(parts_ptr, first, second, POWER: tl.constexpr, ROWS: tl.constexpr):
    """What this program found of the matrix of each term."""
    row = tl.arange(0, ROWS)
    at = parts_ptr + tl.program_id(0).to(tl.int64) * (ROWS * ROWS * (2 if POWER > 0 else 1))
    at += row[:, None] * ROWS + row[None, :]
    tl.store(at, first)
    if POWER > 0:
        tl.store(at + ROWS * ROWS, second)


@triton.jit
def sums_of(
    x_ptr, y_ptr, factors_ptr, image, head, heads, n, first, last,
    xb, xh, xs, yb, yh, ys,
    NORM: tl.constexpr, EPS: tl.constexpr, POWER: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    PIXELS: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    FACTORS: tl.constexpr,
):  # fmt: skip
    """The sum of [x^; 1] [y; 1]^T over some blocks of pixels; with FACTORS f and b, of [x^; 1] [f y; b]^T."""
    row = tl.arange(0, ROWS)
    first_w, second_w = tl.zeros((ROWS, ROWS), ACC), tl.zeros((ROWS, ROWS), ACC)
    for block in range(first, last):
        pixel = block * PIXELS + tl.arange(0, PIXELS)
        inside = (row < D)[:, None] & (pixel < n)[None, :]
        one = (row == D)[:, None] & (pixel < n)[None, :]
        x = tl.load(x_ptr + places(image, head, row, pixel, xb, xh, xs, LAST, UNIT), mask=inside, other=0).to(ACC)
        y = tl.load(y_ptr + places(image, head, row, pixel, yb, yh, ys, LAST, UNIT), mask=inside, other=0).to(ACC)
        if FACTORS:
            at = factors_ptr + (image * heads + head) * 2 * n + pixel
            scale = tl.load(at, mask=pixel < n, other=0)
            b = tl.load(at + n, mask=pixel < n, other=0)
            y = tl.where(one, b[None, :], y * scale[None, :])
        else:
            y = tl.where(one, 1, y)
        y = tl.trans(operand(y, ACC))
        unit, _, _ = unit_of(x, NORM, EPS)
        first_w = dot(operand(tl.where(one, 1, unit), ACC), y, first_w, PRECISION)
        if POWER > 0:
            vector, least, _, _ = focused(x, EPS, POWER)
            unit, _, _ = unit_of(vector, NORM, least)
            second_w = dot(operand(unit, ACC), y, second_w, PRECISION)
    return first_w, second_w


@triton.jit
def both_of(
    q, first_w, second_w, row,
    NORM: tl.constexpr, EPS: tl.constexpr, POWER: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Numerator and, in row D, denominator, from the transposed matrices."""
    unit, _, _ = unit_of(q, NORM, EPS)
    unit = tl.where((row == D)[:, None], 1, unit)
    both = dot(first_w, operand(unit, ACC), tl.zeros((q.shape[0], q.shape[1]), ACC), PRECISION)
    if POWER > 0:
        vector, least, _, _ = focused(q, EPS, POWER)
        unit, _, _ = unit_of(vector, NORM, least)
        both = dot(second_w, operand(unit, ACC), both, PRECISION)
    return both


@triton.jit
def row_of(both, row, D: tl.constexpr):
    """Row D, where the denominators are."""
    return tl.sum(tl.where((row == D)[:, None], both, 0), axis=0)


@triton.jit
def unit_of(x, NORM: tl.constexpr, eps):
    """The vectors at their length, the factor that brought them there, and how long they were."""
    length = tl.sqrt(tl.sum(x * x, axis=0))
    r = 1 / (length / NORM + eps)
    return x * r[None, :], r, length


@triton.jit
def unit_backward(x, r, length, grad, along, NORM: tl.constexpr):
    """From the gradient by the vectors at their length to that by the vectors; a zero vector has no direction.

    ``along`` is the gradient along the vectors at their length.
    """
    along = tl.where(length > 0, along / (NORM * length), 0)
    return (grad - x * along[None, :]) * r[None, :]


@triton.jit
def focused(x, EPS: tl.constexpr, POWER: tl.constexpr):
    """Powers of the positive parts over the largest, and the eps that goes with them: high powers overflow."""
    positive = tl.maximum(x, 0)
    top = tl.max(positive, axis=0)
    # smaller ones have no float32 to divide by, and eps leaves nothing of them
    top = tl.where(top > 1e-30, top, 1)
    positive = positive / top[None, :]
    return power(positive, POWER), EPS / power(top, POWER), positive, top


@triton.jit
def power(x, POWER: tl.constexpr):
    """x ** POWER, by squares for the published powers."""
    if POWER == 8:
        x = x * x
        x = x * x
        y = x * x
    elif POWER == 4:
        x = x * x
        y = x * x
    else:
        y = x
        for _ in tl.static_range(POWER - 1):
            y = y * x
    return y
