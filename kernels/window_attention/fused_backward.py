"""Triton kernel of window attention: everything backward, one program for a window and head.

    s = k q^T + k' q'^T      p = exp2(f s - l)     dp = v g^T            f = scale log2(e), l from the forward pass
    ds = p (dp - delta)      dv = p g              dk = scale ds q       dk' = scale ds q'       delta = sum(g out)
                             dq = scale ds^T k     dq' = scale ds^T k'

Five products instead of the seven of ``backward_q`` and ``backward_kv`` in ``fused_kernels.py``, which has the names.
Keys are outside, BLOCK_N at a time, with dk and dv in registers; queries inside, BLOCK_M at a time. Where all keys are
one block, dq is complete at once; otherwise it is summed in ``d_q``, memory each number of which is one program's. So
are the sums over windows for q' and k'. A program reads there what it wrote itself, always behind a barrier, and
nothing is added atomically: the same input gives the same bits.
"""

from kernels.triton_parts import dot, operand, stored, tl, triton
from kernels.window_attention.fused_kernels import SIZES, columns, key_offsets, place, store_keys


@triton.jit(do_not_specialize=SIZES)
def backward(
    qkv, q_pos, k_pos, out, grad, lse, d_qkv, d_edge, d_q, d_q_pos, d_k_pos, images, height, width, down, across,
    windows, per_program, stride_b, stride_y, stride_x,
    FACTOR: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr,
    WINDOW: tl.constexpr, FOLDS: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``d_qkv`` (b, h, w, 3 * heads * d) for ``per_program`` windows, and the sums over these windows for q' and k',
    one entry of ``d_q_pos`` and ``d_k_pos`` (programs, heads, window^2, rank); ``d_edge`` as ``store_keys`` tells, and
    room in ``d_q`` (b, h, w, heads * d) if there are more keys than BLOCK_N."""
    N: tl.constexpr = WINDOW * WINDOW
    C: tl.constexpr = HEADS * D
    program = tl.program_id(0)
    head = program % HEADS
    begin = program // HEADS * per_program
    c = tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R if RANK > 0 else 1)
    t = BLOCK_R + tl.arange(0, BLOCK_T if BLOCK_T > 0 else 1)
    sums = program.to(tl.int64) * (N * RANK)

    for index in range(begin, tl.minimum(begin + per_program, windows)):
        image, row, column = place(index, down, across)
        top, left = row * WINDOW, column * WINDOW
        # offsets from here are 32-bit numbers, which take half the registers
        origin = (image * height + top) * width + left
        line = ((image * HEADS + head) * height + top) * width + left
        corner = qkv + image * stride_b + top.to(tl.int64) * stride_y + left.to(tl.int64) * stride_x + head * D
        for low in range(0, N, BLOCK_N):
            n = low + tl.arange(0, BLOCK_N)
            keys = n < N
            at = key_offsets(n, top, left, height, width, stride_y, stride_x, WINDOW, FOLDS)[:, None] + c[None, :]
            key_mask = columns(keys, c, D, BLOCK_D)
            k = operand(tl.load(corner + C + at, mask=key_mask, other=0.0), TYPE)
            v = operand(tl.load(corner + 2 * C + at, mask=key_mask, other=0.0), TYPE)
            dk = tl.zeros((BLOCK_N, BLOCK_D), ACC)
            dv = tl.zeros((BLOCK_N, BLOCK_D), ACC)
            if RANK > 0:
                places = (n * RANK)[:, None] + r[None, :]
                place_mask = columns(keys, r, RANK, BLOCK_R)
                kp = operand(tl.load(k_pos + head * (N * RANK) + places, mask=place_mask, other=0.0), TYPE)
                d_kp = tl.zeros((BLOCK_N, BLOCK_R), ACC)
            if BLOCK_T > 0:
                tail = (n * RANK)[:, None] + t[None, :]
                tail_mask = columns(keys, t, RANK, BLOCK_R + BLOCK_T)
                kt = operand(tl.load(k_pos + head * (N * RANK) + tail, mask=tail_mask, other=0.0), TYPE)
                d_kt = tl.zeros((BLOCK_N, BLOCK_T), ACC)

            # queries of the rows that are there; all, where the sums are written for the first time
            fresh = (index == begin) & (low == 0)
            rows = tl.where(fresh, WINDOW, tl.minimum(height - top, WINDOW))
            for start in range(0, rows * WINDOW, BLOCK_M):
                m = start + tl.arange(0, BLOCK_M)
                y, x = m // WINDOW, m % WINDOW
                queries = (top + y < height) & (left + x < width) & (m < N)
                mask = columns(queries, c, D, BLOCK_D)
                q = tl.load(corner + (y * stride_y + x * stride_x)[:, None] + c[None, :], mask=mask, other=0.0)
                q = operand(q, TYPE)
                s = dot(k, tl.trans(q), tl.zeros((BLOCK_N, BLOCK_M), ACC), PRECISION)
                if RANK > 0:
                    near = (m * RANK)[:, None] + r[None, :]
                    near_mask = columns(m < N, r, RANK, BLOCK_R)
                    qp = operand(tl.load(q_pos + head * (N * RANK) + near, mask=near_mask, other=0.0), TYPE)
                    s = dot(kp, tl.trans(qp), s, PRECISION)
                if BLOCK_T > 0:
                    far = (m * RANK)[:, None] + t[None, :]
                    far_mask = columns(m < N, t, RANK, BLOCK_R + BLOCK_T)
                    qt = operand(tl.load(q_pos + head * (N * RANK) + far, mask=far_mask, other=0.0), TYPE)
                    s = dot(kt, tl.trans(qt), s, PRECISION)
                within = y * width + x
                # so that places outside the image get p = 0
                high = tl.load(lse + line + within, mask=queries, other=float("inf"))
                p = tl.exp2(s * FACTOR - high[None, :])
                if N % BLOCK_N != 0:
                    # there is no key to multiply it by, but infinity times 0 is no 0
                    p = tl.where(keys[:, None], p, 0.0)
                own = (within * C)[:, None] + c[None, :]
                g = tl.load(grad + origin * C + head * D + own, mask=mask, other=0.0)
                o = tl.load(out + origin * C + head * D + own, mask=mask, other=0.0)
                mean = tl.sum(g.to(ACC) * o.to(ACC), 1)
                g = operand(g, TYPE)
                dv = dot(operand(p, TYPE), g, dv, PRECISION)
                dp = dot(v, tl.trans(g), tl.zeros((BLOCK_N, BLOCK_M), ACC), PRECISION)
                ds = operand(p * (dp - mean[None, :]), TYPE)
                dk = dot(ds, q, dk, PRECISION)
                across_ds = tl.trans(ds)
                dq = dot(across_ds, k, tl.zeros((BLOCK_M, BLOCK_D), ACC), PRECISION)
                if N > BLOCK_N:
                    dq += tl.load(d_q + origin * C + head * D + own, mask=mask & (low > 0), other=0.0)
                    tl.store(d_q + origin * C + head * D + own, dq, mask=mask & (low + BLOCK_N < N))
                place_q = d_qkv + origin * (3 * C) + head * D + (within * (3 * C))[:, None] + c[None, :]
                tl.store(place_q, stored(dq * SCALE, d_qkv.dtype.element_ty), mask=mask & (low + BLOCK_N >= N))
                if RANK > 0:
                    d_kp = dot(ds, qp, d_kp, PRECISION)
                    d_qp = dot(across_ds, kp, tl.zeros((BLOCK_M, BLOCK_R), ACC), PRECISION) * SCALE
                    d_qp += tl.load(d_q_pos + sums + near, mask=near_mask & (fresh == 0), other=0.0)
                    tl.store(d_q_pos + sums + near, d_qp, mask=near_mask)
                if BLOCK_T > 0:
                    d_kt = dot(ds, qt, d_kt, PRECISION)
                    d_qt = dot(across_ds, kt, tl.zeros((BLOCK_M, BLOCK_T), ACC), PRECISION) * SCALE
                    d_qt += tl.load(d_q_pos + sums + far, mask=far_mask & (fresh == 0), other=0.0)
                    tl.store(d_q_pos + sums + far, d_qt, mask=far_mask)

            store_keys(
                d_qkv, d_edge, dk * SCALE, dv, n, keys, c, image, top, left, head, images, height, width, down, across,
                HEADS, D, WINDOW, FOLDS, BLOCK_D,
            )  # fmt: skip
            if RANK > 0:
                d_kp = d_kp * SCALE + tl.load(d_k_pos + sums + places, mask=place_mask & (index > begin), other=0.0)
                tl.store(d_k_pos + sums + places, d_kp, mask=place_mask)
            if BLOCK_T > 0:
                d_kt = d_kt * SCALE + tl.load(d_k_pos + sums + tail, mask=tail_mask & (index > begin), other=0.0)
                tl.store(d_k_pos + sums + tail, d_kt, mask=tail_mask)
            # another thread may read what this one wrote: the same blocks come again with the next keys or window
            tl.debug_barrier()
