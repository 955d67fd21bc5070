"""Triton kernels of attention to a weighted coreset; the formulas are in ``fused.py``.

One program has BLOCK_M queries (BLOCK_N keys of the coreset in ``backward_keys``) of one head and streams the other
side. The denominator is a sum of float32 numbers with the weights as they are, whatever the products are made of. What
is kept for the backward pass is the result less the mean value, float32, and log2 of the denominator.
"""

from kernels.triton_parts import dot, operand, stored, tl, triton


@triton.jit
def tile(x, row, rows, column, by_row, by_column, SIZE: tl.constexpr):
    """Entries of a matrix, 0 beyond ``rows`` and SIZE columns; from its start on, 32 bits reach every one."""
    at = (row * by_row)[:, None] + (column * by_column)[None, :]
    return tl.load(x + at, mask=(row < rows)[:, None] & (column < SIZE)[None, :], other=0)


@triton.jit
def within(g, centred, mean, lower, upper):
    """The gradient where the result lies within the range of the values: beyond, it does not move."""
    out = centred + mean[None, :]
    return tl.where((out >= lower[None, :]) & (out <= upper[None, :]), g, 0)


@triton.jit
def forward(
    q, keys, values, weights, mean, lower, upper, out, centred, lse, m_all, r, qb, qh, qm, qc, ob, oh, om, oc,
    FACTOR: tl.constexpr, LOST: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, KEEP: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``out`` by its strides, and, to KEEP, ``centred`` (b, m_heads, m, dv) and ``lse`` (b, m_heads, m)."""
    blocks = tl.cdiv(m_all, BLOCK_M)
    line = (tl.program_id(0) // blocks).to(tl.int64)
    image, head = line // HEADS, line % HEADS
    source = image * (HEADS // GROUP) + head // GROUP
    m = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    c, cv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    query = operand(tile(q + image * qb + head * qh, m, m_all, c, qm, qc, D), TYPE)
    highest = tl.full((BLOCK_M,), float("-inf"), ACC)
    total, absolute = tl.zeros((BLOCK_M,), ACC), tl.zeros((BLOCK_M,), ACC)
    acc = tl.zeros((BLOCK_M, BLOCK_V), ACC)
    for start in range(0, r, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        key = operand(tile(keys + source * r * D, n, r, c, D, 1, D), TYPE)
        s = dot(query, tl.trans(key), tl.zeros((BLOCK_M, BLOCK_N), ACC), PRECISION)
        s = tl.where((n < r)[None, :], s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2(s * FACTOR - (higher * FACTOR)[:, None])
        fade = tl.exp2((highest - higher) * FACTOR)
        weight = tl.load(weights + source * r + n, mask=n < r, other=0)
        total = total * fade + tl.sum(p * weight[None, :], 1)
        absolute = absolute * fade + tl.sum(p * tl.abs(weight)[None, :], 1)
        value = operand(tile(values + source * r * DV, n, r, cv, DV, 1, DV), TYPE)
        acc = dot(operand(p, TYPE), value, acc * fade[:, None], PRECISION)
        highest = higher

    # NaN is not cancellation, and stays
    lost = total <= absolute * LOST
    safe = tl.where(lost, 1.0, total)
    acc = tl.where(lost[:, None], 0.0, acc / safe[:, None])
    inside = (m < m_all)[:, None] & (cv < DV)[None, :]
    if KEEP:
        at = (m * DV)[:, None] + cv[None, :]
        tl.store(centred + line * m_all * DV + at, acc, mask=inside)
        log = tl.where(lost, float("inf"), highest * FACTOR + tl.log2(safe))
        tl.store(lse + line * m_all + m, log, mask=m < m_all)
    bound = source * DV + cv
    low, high = tl.load(lower + bound, mask=cv < DV, other=0), tl.load(upper + bound, mask=cv < DV, other=0)
    acc += tl.load(mean + bound, mask=cv < DV, other=0)[None, :]
    acc = tl.where(acc < low[None, :], low[None, :], tl.where(acc > high[None, :], high[None, :], acc))
    at = (m * om)[:, None] + (cv * oc)[None, :]
    tl.store(out + image * ob + head * oh + at, stored(acc, out.dtype.element_ty), mask=inside)


@triton.jit
def backward_queries(
    q, keys, values, weights, mean, lower, upper, centred, lse, grad, dq, delta, m_all, r,
    qb, qh, qm, qc, gb, gh, gm, gc, db, dh, dm, dc,
    FACTOR: tl.constexpr, BETA: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``dq`` by its strides, and ``delta`` (b, m_heads, m)."""
    blocks = tl.cdiv(m_all, BLOCK_M)
    line = (tl.program_id(0) // blocks).to(tl.int64)
    image, head = line // HEADS, line % HEADS
    source = image * (HEADS // GROUP) + head // GROUP
    m = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    c, cv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    query = operand(tile(q + image * qb + head * qh, m, m_all, c, qm, qc, D), TYPE)
    bound = source * DV + cv
    low, high = tl.load(lower + bound, mask=cv < DV, other=0), tl.load(upper + bound, mask=cv < DV, other=0)
    found = tile(centred + line * m_all * DV, m, m_all, cv, DV, 1, DV)
    g = tile(grad + image * gb + head * gh, m, m_all, cv, gm, gc, DV).to(ACC)
    g = within(g, found, tl.load(mean + bound, mask=cv < DV, other=0), low, high)
    mixed = tl.sum(g * found, 1)
    tl.store(delta + line * m_all + m, mixed, mask=m < m_all)
    g = operand(g, TYPE)
    # so that rows beyond get p = 0
    log = tl.load(lse + line * m_all + m, mask=m < m_all, other=float("inf"))
    acc = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    for start in range(0, r, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        key = operand(tile(keys + source * r * D, n, r, c, D, 1, D), TYPE)
        s = dot(query, tl.trans(key), tl.zeros((BLOCK_M, BLOCK_N), ACC), PRECISION)
        p = tl.exp2(tl.where((n < r)[None, :], s, float("-inf")) * FACTOR - log[:, None])
        value = operand(tile(values + source * r * DV, n, r, cv, DV, 1, DV), TYPE)
        dp = dot(g, tl.trans(value), tl.zeros((BLOCK_M, BLOCK_N), ACC), PRECISION)
        weight = tl.load(weights + source * r + n, mask=n < r, other=0)
        ds = p * (dp - mixed[:, None] * weight[None, :])
        acc = dot(operand(ds, TYPE), key, acc, PRECISION)
    at = (m * dm)[:, None] + (c * dc)[None, :]
    inside = (m < m_all)[:, None] & (c < D)[None, :]
    tl.store(dq + image * db + head * dh + at, stored(acc * BETA, dq.dtype.element_ty), mask=inside)


@triton.jit
def backward_keys(
    q, keys, values, weights, mean, lower, upper, centred, lse, grad, delta, d_keys, d_values, d_weights, m_all, r,
    lines, splits, qb, qh, qm, qc, gb, gh, gm, gc,
    FACTOR: tl.constexpr, BETA: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What every ``splits``-th block of queries gives keys, values and weights, (splits, b * heads, r, ...)."""
    parts = tl.cdiv(r, BLOCK_N)
    program = tl.program_id(0)
    n = program % parts * BLOCK_N + tl.arange(0, BLOCK_N)
    source = (program // parts % lines).to(tl.int64)
    split = program // parts // lines
    image, first_head = source // (HEADS // GROUP), source % (HEADS // GROUP) * GROUP
    c, cv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    key = operand(tile(keys + source * r * D, n, r, c, D, 1, D), TYPE)
    value = operand(tile(values + source * r * DV, n, r, cv, DV, 1, DV), TYPE)
    weight = tl.load(weights + source * r + n, mask=n < r, other=0)
    bound = source * DV + cv
    low, high = tl.load(lower + bound, mask=cv < DV, other=0), tl.load(upper + bound, mask=cv < DV, other=0)
    middle = tl.load(mean + bound, mask=cv < DV, other=0)
    dk, dv = tl.zeros((BLOCK_N, BLOCK_D), ACC), tl.zeros((BLOCK_N, BLOCK_V), ACC)
    dw = tl.zeros((BLOCK_N,), ACC)
    blocks = tl.cdiv(m_all, BLOCK_M)
    for index in range(split, blocks * GROUP, splits):
        head = first_head + index // blocks
        line = image * HEADS + head
        m = index % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        query = operand(tile(q + image * qb + head * qh, m, m_all, c, qm, qc, D), TYPE)
        # keys by queries, so that p and ds need no transposition
        s = dot(key, tl.trans(query), tl.zeros((BLOCK_N, BLOCK_M), ACC), PRECISION)
        log = tl.load(lse + line * m_all + m, mask=m < m_all, other=float("inf"))
        p = tl.exp2(s * FACTOR - log[None, :])
        found = tile(centred + line * m_all * DV, m, m_all, cv, DV, 1, DV)
        g = tile(grad + image * gb + head * gh, m, m_all, cv, gm, gc, DV).to(ACC)
        g = operand(within(g, found, middle, low, high), TYPE)
        dv = dot(operand(p, TYPE), g, dv, PRECISION)
        mixed = tl.load(delta + line * m_all + m, mask=m < m_all, other=0)
        dw -= tl.sum(p * mixed[None, :], 1)
        dp = dot(value, tl.trans(g), tl.zeros((BLOCK_N, BLOCK_M), ACC), PRECISION)
        ds = p * (dp - weight[:, None] * mixed[None, :])
        dk = dot(operand(ds, TYPE), query, dk, PRECISION)
    own = (split.to(tl.int64) * lines + source) * r + n
    tl.store(d_keys + own[:, None] * D + c[None, :], dk * BETA, mask=(n < r)[:, None] & (c < D)[None, :])
    tl.store(d_values + own[:, None] * DV + cv[None, :], dv, mask=(n < r)[:, None] & (cv < DV)[None, :])
    tl.store(d_weights + own, dw, mask=n < r)
