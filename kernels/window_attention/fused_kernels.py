"""Triton kernels of window attention.

    s = q k^T + q' k'^T      p = exp2(f s - l)     out = p v             f = scale log2(e), l = log2 sum exp2(f s)
    dp = g v^T               ds = p (dp - delta)   delta = sum(g out)    g the gradient of out
    dv = p^T g   dk = scale ds^T q   dk' = scale ds^T q'   dq = scale ds k   dq' = scale ds k'

q, k, v are rows of the image (b, h, w, [q|k|v][head][d]), addressed through its strides: nothing is cut into windows
or padded. q', k' (heads, window^2, rank) are the positional factors, q' with the factor that makes ``scale`` common.

Blocks: one program has BLOCK_M queries (BLOCK_N keys in ``backward_kv``) of one window and head, and streams the
other side. 64 and more rows keep the tensor cores of Hopper busy. d is continued to a power of two, BLOCK_D, by masked
columns, and rank to one or to the sum of two, BLOCK_R and the tail BLOCK_T (34 to 32 + 16). Compile-time numbers are
in capitals, also scale and its kin: they follow from the network.
"""

from kernels.triton_parts import dot, operand, stored, tl, triton

# a number that is 1, or a multiple of 16, would else be compiled in: many times over for images of many sizes
SIZES = ("images", "height", "width", "down", "across", "windows", "per_program")


@triton.jit
def reflected(position, size, FOLDS: tl.constexpr):
    """Where the image continued by reflection has ``position``; FOLDS 0: inside, 1: at most one mirror, 2: any."""
    if FOLDS == 0:
        source = position
    elif FOLDS == 1:
        source = size - 1 - tl.abs(position - (size - 1))
    else:
        period = tl.maximum(2 * size - 2, 1)
        rest = position % period
        source = tl.minimum(rest, period - rest)
    return source


@triton.jit
def columns(rows, column, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of a block of ``rows`` (a mask) by BLOCK columns of which SIZE are there."""
    if SIZE >= BLOCK:
        mask = rows[:, None]
    else:
        mask = rows[:, None] & (column < SIZE)[None, :]
    return mask


@triton.jit
def place(window_index, down, across):
    """Number of a window -> its image, and its row and column in units of windows."""
    line = window_index // across
    return (line // down).to(tl.int64), line % down, window_index % across


@triton.jit
def key_offsets(n, top, left, height, width, stride_y, stride_x, WINDOW: tl.constexpr, FOLDS: tl.constexpr):
    """Keys ``n`` of the window at (top, left) -> offsets of their pixels from its corner, negative where reflected."""
    y = reflected(top + n // WINDOW, height, FOLDS) - top
    x = reflected(left + n % WINDOW, width, FOLDS) - left
    return y * stride_y + x * stride_x


@triton.jit
def store_keys(
    d_qkv, d_edge, dk, dv, n, keys, c, image, top, left, head, images, height, width, down, across,
    HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, FOLDS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store ``dk`` and ``dv`` of the keys ``n`` of a window as the k and v of ``d_qkv``.

    Pixels added by reflection go to ``d_edge``: the rows below the images, (b, added, width and added, [k|v][head][d]),
    then the columns right of them, (b, height, added, ...). They are folded back afterwards, in a fixed order.
    """
    C: tl.constexpr = HEADS * D
    y, x = top + n // WINDOW, left + n % WINDOW
    own = (((y - top) * width + x - left) * (3 * C))[:, None] + c[None, :]
    own_mask = columns(keys & (y < height) & (x < width), c, D, BLOCK_D)
    d_qkv += ((image * height + top) * width + left) * (3 * C) + C + head * D
    tl.store(d_qkv + own, stored(dk, d_qkv.dtype.element_ty), mask=own_mask)
    tl.store(d_qkv + C + own, stored(dv, d_qkv.dtype.element_ty), mask=own_mask)
    if FOLDS > 0:
        added_y, added_x = down * WINDOW - height, across * WINDOW - width
        below = (image * added_y + y - height) * (across * WINDOW) + x
        beside = (images * added_y) * (across * WINDOW) + (image * height + y) * added_x + x - width
        there = (tl.where(y < height, beside, below) * (2 * C) + head * D)[:, None] + c[None, :]
        there_mask = columns(keys & ((y >= height) | (x >= width)), c, D, BLOCK_D)
        tl.store(d_edge + there, dk, mask=there_mask)
        tl.store(d_edge + C + there, dv, mask=there_mask)


@triton.jit(do_not_specialize=SIZES)
def forward(
    qkv, q_pos, k_pos, out, lse, height, width, down, across, stride_b, stride_y, stride_x,
    FACTOR: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr, WINDOW: tl.constexpr,
    FOLDS: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``out`` (b, h, w, heads * d) and ``lse`` (b, heads, h, w), in base 2."""
    N: tl.constexpr = WINDOW * WINDOW
    BLOCKS: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    head = program // BLOCKS % HEADS
    image, row, column = place(program // BLOCKS // HEADS, down, across)
    top, left = row * WINDOW, column * WINDOW
    tall, wide = tl.minimum(height - top, WINDOW), tl.minimum(width - left, WINDOW)
    first = program % BLOCKS * BLOCK_M
    # only queries inside the image have numbers, so the last blocks of a window that reaches over are empty
    if first >= tall * wide:
        return

    corner = qkv + image * stride_b + top.to(tl.int64) * stride_y + left.to(tl.int64) * stride_x + head * D
    m = first + tl.arange(0, BLOCK_M)
    y, x = m // wide, m % wide
    queries = m < tall * wide
    c = tl.arange(0, BLOCK_D)
    query_mask = columns(queries, c, D, BLOCK_D)
    q = tl.load(corner + (y * stride_y + x * stride_x)[:, None] + c[None, :], mask=query_mask, other=0.0)
    q = operand(q, TYPE)
    if RANK > 0:
        r = tl.arange(0, BLOCK_R)
        places = ((head * N + y * WINDOW + x) * RANK)[:, None] + r[None, :]
        qp = operand(tl.load(q_pos + places, mask=columns(queries, r, RANK, BLOCK_R), other=0.0), TYPE)
    if BLOCK_T > 0:
        t = BLOCK_R + tl.arange(0, BLOCK_T)
        tail = ((head * N + y * WINDOW + x) * RANK)[:, None] + t[None, :]
        qt = operand(tl.load(q_pos + tail, mask=columns(queries, t, RANK, BLOCK_R + BLOCK_T), other=0.0), TYPE)

    highest = tl.full((BLOCK_M,), float("-inf"), ACC)
    total = tl.zeros((BLOCK_M,), ACC)
    acc = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        keys = n < N
        at = key_offsets(n, top, left, height, width, stride_y, stride_x, WINDOW, FOLDS)[:, None] + c[None, :]
        mask = columns(keys, c, D, BLOCK_D)
        k = operand(tl.load(corner + HEADS * D + at, mask=mask, other=0.0), TYPE)
        s = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), ACC), PRECISION)
        if RANK > 0:
            near = ((head * N + n) * RANK)[:, None] + r[None, :]
            kp = operand(tl.load(k_pos + near, mask=columns(keys, r, RANK, BLOCK_R), other=0.0), TYPE)
            s = dot(qp, tl.trans(kp), s, PRECISION)
        if BLOCK_T > 0:
            far = ((head * N + n) * RANK)[:, None] + t[None, :]
            kt = operand(tl.load(k_pos + far, mask=columns(keys, t, RANK, BLOCK_R + BLOCK_T), other=0.0), TYPE)
            s = dot(qt, tl.trans(kt), s, PRECISION)
        if N % BLOCK_N != 0:
            s = tl.where(keys[None, :], s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2(s * FACTOR - (higher * FACTOR)[:, None])
        fade = tl.exp2((highest - higher) * FACTOR)
        total = total * fade + tl.sum(p, 1)
        v = operand(tl.load(corner + 2 * HEADS * D + at, mask=mask, other=0.0), TYPE)
        acc = dot(operand(p, TYPE), v, acc * fade[:, None], PRECISION)
        highest = higher

    within = y * width + x
    out += ((image * height + top) * width + left) * (HEADS * D) + head * D
    own = (within * (HEADS * D))[:, None] + c[None, :]
    tl.store(out + own, stored(acc / total[:, None], out.dtype.element_ty), mask=query_mask)
    lse += ((image * HEADS + head) * height + top) * width + left
    tl.store(lse + within, highest * FACTOR + tl.log2(total), mask=queries)


@triton.jit(do_not_specialize=SIZES)
def backward_q(
    qkv, q_pos, k_pos, out, grad, lse, delta, d_qkv, d_q_pos, height, width, down, across, windows, per_program,
    stride_b, stride_y, stride_x,
    FACTOR: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr,
    WINDOW: tl.constexpr, FOLDS: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The q of ``d_qkv`` and ``delta`` (b, heads, h, w) for the same BLOCK_M places of ``per_program`` windows, and the
    sum over these windows for q', one entry of ``d_q_pos`` (programs, heads, window^2, rank)."""
    N: tl.constexpr = WINDOW * WINDOW
    C: tl.constexpr = HEADS * D
    BLOCKS: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    head = program // BLOCKS % HEADS
    group = program // BLOCKS // HEADS
    first = program % BLOCKS * BLOCK_M
    m = first + tl.arange(0, BLOCK_M)
    y, x = m // WINDOW, m % WINDOW
    c = tl.arange(0, BLOCK_D)
    if RANK > 0:
        r = tl.arange(0, BLOCK_R)
        places = ((head * N + m) * RANK)[:, None] + r[None, :]
        place_mask = columns(m < N, r, RANK, BLOCK_R)
        qp = operand(tl.load(q_pos + places, mask=place_mask, other=0.0), TYPE)
        d_qp = tl.zeros((BLOCK_M, BLOCK_R), ACC)
    if BLOCK_T > 0:
        t = BLOCK_R + tl.arange(0, BLOCK_T)
        tail = ((head * N + m) * RANK)[:, None] + t[None, :]
        tail_mask = columns(m < N, t, RANK, BLOCK_R + BLOCK_T)
        qt = operand(tl.load(q_pos + tail, mask=tail_mask, other=0.0), TYPE)
        d_qt = tl.zeros((BLOCK_M, BLOCK_T), ACC)

    for index in range(group * per_program, tl.minimum((group + 1) * per_program, windows)):
        image, row, column = place(index, down, across)
        top, left = row * WINDOW, column * WINDOW
        queries = (top + y < height) & (left + x < width) & (m < N)
        query_mask = columns(queries, c, D, BLOCK_D)
        corner = qkv + image * stride_b + top.to(tl.int64) * stride_y + left.to(tl.int64) * stride_x + head * D
        q = tl.load(corner + (y * stride_y + x * stride_x)[:, None] + c[None, :], mask=query_mask, other=0.0)
        q = operand(q, TYPE)
        # offsets from the corner are 32-bit numbers, which take half the registers
        origin = (image * height + top) * width + left
        line = ((image * HEADS + head) * height + top) * width + left
        within = y * width + x
        own = (within * C)[:, None] + c[None, :]
        g = tl.load(grad + origin * C + head * D + own, mask=query_mask, other=0.0)
        o = tl.load(out + origin * C + head * D + own, mask=query_mask, other=0.0)
        # so that places outside the image get p = 0
        high = tl.load(lse + line + within, mask=queries, other=float("inf"))
        mean = tl.sum(g.to(ACC) * o.to(ACC), 1)
        tl.store(delta + line + within, mean, mask=queries)
        g = operand(g, TYPE)
        dq = tl.zeros((BLOCK_M, BLOCK_D), ACC)
        # no keys for a block that lies below the image
        for start in range(0, tl.where(top + first // WINDOW < height, N, 0), BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            keys = n < N
            at = key_offsets(n, top, left, height, width, stride_y, stride_x, WINDOW, FOLDS)[:, None] + c[None, :]
            mask = columns(keys, c, D, BLOCK_D)
            k = operand(tl.load(corner + HEADS * D + at, mask=mask, other=0.0), TYPE)
            s = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), ACC), PRECISION)
            if RANK > 0:
                near = ((head * N + n) * RANK)[:, None] + r[None, :]
                kp = operand(tl.load(k_pos + near, mask=columns(keys, r, RANK, BLOCK_R), other=0.0), TYPE)
                s = dot(qp, tl.trans(kp), s, PRECISION)
            if BLOCK_T > 0:
                far = ((head * N + n) * RANK)[:, None] + t[None, :]
                kt = operand(tl.load(k_pos + far, mask=columns(keys, t, RANK, BLOCK_R + BLOCK_T), other=0.0), TYPE)
                s = dot(qt, tl.trans(kt), s, PRECISION)
            p = tl.exp2(s * FACTOR - high[:, None])
            if N % BLOCK_N != 0:
                p = tl.where(keys[None, :], p, 0.0)
            v = operand(tl.load(corner + 2 * HEADS * D + at, mask=mask, other=0.0), TYPE)
            dp = dot(g, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), ACC), PRECISION)
            ds = operand(p * (dp - mean[:, None]), TYPE)
            dq = dot(ds, k, dq, PRECISION)
            if RANK > 0:
                d_qp = dot(ds, kp, d_qp, PRECISION)
            if BLOCK_T > 0:
                d_qt = dot(ds, kt, d_qt, PRECISION)
        place_q = d_qkv + origin * (3 * C) + head * D + (within * (3 * C))[:, None] + c[None, :]
        tl.store(place_q, stored(dq * SCALE, d_qkv.dtype.element_ty), mask=query_mask)

    if RANK > 0:
        sums = d_q_pos + group.to(tl.int64) * (HEADS * N * RANK)
        tl.store(sums + places, d_qp * SCALE, mask=place_mask)
        if BLOCK_T > 0:
            tl.store(sums + tail, d_qt * SCALE, mask=tail_mask)


@triton.jit(do_not_specialize=SIZES)
def backward_kv(
    qkv, q_pos, k_pos, grad, lse, delta, d_qkv, d_edge, d_k_pos, images, height, width, down, across, windows,
    per_program, stride_b, stride_y, stride_x,
    FACTOR: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr,
    WINDOW: tl.constexpr, FOLDS: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The k and v of ``d_qkv`` for the same BLOCK_N places of ``per_program`` windows, and the sum over these windows
    for k', one entry of ``d_k_pos`` (programs, heads, window^2, rank); ``d_edge`` as ``store_keys`` tells."""
    N: tl.constexpr = WINDOW * WINDOW
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    C: tl.constexpr = HEADS * D
    program = tl.program_id(0)
    head = program // BLOCKS % HEADS
    group = program // BLOCKS // HEADS
    n = program % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    keys = n < N
    c = tl.arange(0, BLOCK_D)
    key_mask = columns(keys, c, D, BLOCK_D)
    if RANK > 0:
        r = tl.arange(0, BLOCK_R)
        places = ((head * N + n) * RANK)[:, None] + r[None, :]
        place_mask = columns(keys, r, RANK, BLOCK_R)
        kp = operand(tl.load(k_pos + places, mask=place_mask, other=0.0), TYPE)
        d_kp = tl.zeros((BLOCK_N, BLOCK_R), ACC)
    if BLOCK_T > 0:
        t = BLOCK_R + tl.arange(0, BLOCK_T)
        tail = ((head * N + n) * RANK)[:, None] + t[None, :]
        tail_mask = columns(keys, t, RANK, BLOCK_R + BLOCK_T)
        kt = operand(tl.load(k_pos + tail, mask=tail_mask, other=0.0), TYPE)
        d_kt = tl.zeros((BLOCK_N, BLOCK_T), ACC)

    for index in range(group * per_program, tl.minimum((group + 1) * per_program, windows)):
        image, row, column = place(index, down, across)
        top, left = row * WINDOW, column * WINDOW
        corner = qkv + image * stride_b + top.to(tl.int64) * stride_y + left.to(tl.int64) * stride_x + head * D
        at = key_offsets(n, top, left, height, width, stride_y, stride_x, WINDOW, FOLDS)[:, None] + c[None, :]
        k = operand(tl.load(corner + C + at, mask=key_mask, other=0.0), TYPE)
        v = operand(tl.load(corner + 2 * C + at, mask=key_mask, other=0.0), TYPE)
        origin = (image * height + top) * width + left
        line = ((image * HEADS + head) * height + top) * width + left
        dk = tl.zeros((BLOCK_N, BLOCK_D), ACC)
        dv = tl.zeros((BLOCK_N, BLOCK_D), ACC)
        # queries of the rows that are there
        for start in range(0, tl.minimum(height - top, WINDOW) * WINDOW, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            y, x = m // WINDOW, m % WINDOW
            queries = (top + y < height) & (left + x < width) & (m < N)
            mask = columns(queries, c, D, BLOCK_D)
            q = tl.load(corner + (y * stride_y + x * stride_x)[:, None] + c[None, :], mask=mask, other=0.0)
            q = operand(q, TYPE)
            # keys by queries, so that p and ds need no transposition
            s = dot(k, tl.trans(q), tl.zeros((BLOCK_N, BLOCK_M), ACC), PRECISION)
            if RANK > 0:
                near = ((head * N + m) * RANK)[:, None] + r[None, :]
                qp = operand(tl.load(q_pos + near, mask=columns(m < N, r, RANK, BLOCK_R), other=0.0), TYPE)
                s = dot(kp, tl.trans(qp), s, PRECISION)
            if BLOCK_T > 0:
                far = ((head * N + m) * RANK)[:, None] + t[None, :]
                qt = operand(tl.load(q_pos + far, mask=columns(m < N, t, RANK, BLOCK_R + BLOCK_T), other=0.0), TYPE)
                s = dot(kt, tl.trans(qt), s, PRECISION)
            within = y * width + x
            high = tl.load(lse + line + within, mask=queries, other=float("inf"))
            mean = tl.load(delta + line + within, mask=queries, other=0.0)
            p = tl.exp2(s * FACTOR - high[None, :])
            own = (within * C)[:, None] + c[None, :]
            g = tl.load(grad + origin * C + head * D + own, mask=mask, other=0.0)
            g = operand(g, TYPE)
            dv = dot(operand(p, TYPE), g, dv, PRECISION)
            dp = dot(v, tl.trans(g), tl.zeros((BLOCK_N, BLOCK_M), ACC), PRECISION)
            ds = operand(p * (dp - mean[None, :]), TYPE)
            dk = dot(ds, q, dk, PRECISION)
            if RANK > 0:
                d_kp = dot(ds, qp, d_kp, PRECISION)
            if BLOCK_T > 0:
                d_kt = dot(ds, qt, d_kt, PRECISION)

        store_keys(
            d_qkv, d_edge, dk * SCALE, dv, n, keys, c, image, top, left, head, images, height, width, down, across,
            HEADS, D, WINDOW, FOLDS, BLOCK_D,
        )  # fmt: skip

    if RANK > 0:
        sums = d_k_pos + group.to(tl.int64) * (HEADS * N * RANK)
        tl.store(sums + places, d_kp * SCALE, mask=place_mask)
        if BLOCK_T > 0:
            tl.store(sums + tail, d_kt * SCALE, mask=tail_mask)
