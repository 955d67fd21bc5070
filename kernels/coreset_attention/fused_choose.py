"""Triton kernels that choose and weigh the keys of a coreset; the formulas are in ``fused.py``.

One program has one bin of one head. ``choose_held`` keeps the keys, what is left of them and the factor F in registers;
``choose_streamed`` walks over a larger bin in blocks, once for each pivot, and keeps its state in memory that fits the
second-level cache. Of a key that was chosen -1 is left, of one that is exhausted or absent nothing. Reductions take
no NaN for a number where it matters: a key that is none must show in the result.
"""

from kernels.coreset_attention.fused_parts import (
    against_pivot,
    centred,
    multiplier,
    present,
    remaining,
    scores,
    solved,
    tokens_of,
    write,
)
from kernels.triton_parts import dot, operand, stored, tl, triton


@triton.jit
def choose_held(
    k, v, key_mean, value_mean, radius, mask, noise,
    pivots, values, weights, log_back, lengths, tau, rows, lower, state,
    grid_h, grid_w, down, across, wide, width, kb, kh, kn, kc, vb, vh, vn, vc, mb, mh, mn, noise_h,
    BETA: tl.constexpr, ROOT_BETA: tl.constexpr, TAU_MULT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, R: tl.constexpr, EPS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    UNIFORM: tl.constexpr, HAS_NOISE: tl.constexpr, HAS_MASK: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A bin of up to BLOCK places; ``state`` is not used."""
    program = tl.program_id(0).to(tl.int64)
    bins = down * across
    line, part = program // bins, (program % bins).to(tl.int32)
    image, head = line // HEADS, line % HEADS
    k += image * kb + head * kh
    noise += head * noise_h + part.to(tl.int64) * R * width
    lower += program * R * R
    place, slot = tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    c, cv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    token, there = tokens_of(place, part, grid_h, grid_w, down, across, wide, width)
    alive = present(token, there, mask + image * mb + head * mh, mn, HAS_MASK)
    mean = tl.load(key_mean + line * D + c, mask=c < D, other=0)
    x = centred(k, token, alive, mean, c, kn, kc, D, ACC)
    squares = tl.sum(x * x, 1)
    total = tl.sum(squares, 0)
    length = tl.sqrt(tl.where(total == total, tl.max(squares, 0), total))
    wide_factor = multiplier(tl.load(radius + line), length, tl.sum(alive.to(tl.int32), 0), BETA, TAU_MULT)
    tl.store(lengths + program, length)
    none = wide_factor == 0
    tl.store(tau + program, tl.where(none, float("inf"), ROOT_BETA / tl.where(none, 1.0, wide_factor)).to(ACC))
    factor = wide_factor.to(ACC)
    x, half = x * factor, squares * (factor * factor / 2)

    top = tl.max(half, 0)
    scale = tl.where(alive, tl.exp(half - top), 0)
    v += image * vb + head * vh
    middle = tl.load(value_mean + line * DV + cv, mask=cv < DV, other=0)
    sums, ones = tl.zeros((BLOCK_R, BLOCK_V), ACC), tl.zeros((BLOCK_R,), ACC)
    left = tl.where(alive, 1.0, 0.0).to(ACC)
    known = tl.zeros((BLOCK_R, BLOCK), ACC)
    tokens, halves = tl.full((BLOCK_R,), -1, tl.int32), tl.zeros((BLOCK_R,), ACC)
    for t in range(R):
        score = scores(left, half, place, t, noise, width, R, EPS, LOW, HIGH, UNIFORM, HAS_NOISE, ACC)
        best, pivot = tl.max(score, 0, return_indices=True)
        # beside odds that are no number, a place past the bin may seem the best
        pivot = tl.minimum(pivot, width - 1)
        # a maximum may take -inf for it
        lost = tl.max((score != score).to(tl.int32), 0) > 0
        some, own = (best != float("-inf")) | lost, place == pivot
        chosen, _ = tokens_of(pivot, part, grid_h, grid_w, down, across, wide, width)
        key = tl.load(k + chosen * kn + c * kc, mask=c < D, other=0).to(ACC)
        key = tl.where(c < D, key - mean, 0)
        key_half = tl.sum(key * key, 0) * (factor * factor / 2)
        row = against_pivot(x, half, key * factor, key_half)
        # of slots to come the factor is 0
        said = tl.sum(tl.where(own[None, :], known, 0), 1)
        row = tl.where(left < 0, 0, row - tl.sum(said[:, None] * known, 0))
        root = tl.sqrt(tl.where(some, tl.sum(tl.where(own, left, 0), 0), 1.0))
        root = tl.where(lost, float("nan"), root)
        f = tl.where(some, tl.where(own, root, row / root), 0)
        known = tl.where((slot == t)[:, None], f[None, :], known)
        # beside the chain of steps: nothing waits for these
        value, weighed = centred(v, token, alive, middle, cv, vn, vc, DV, ACC), f * scale
        sums = tl.where((slot == t)[:, None], tl.sum(weighed[:, None] * value, 0)[None, :], sums)
        ones = tl.where(slot == t, tl.sum(weighed, 0), ones)
        tl.store(lower + t * R + slot, tl.where(slot == t, root, tl.where(some, said, 0)), mask=slot < R)
        left = tl.where(own, -1, remaining(left, f))
        tokens = tl.where(slot == t, tl.where(some, chosen, -1), tokens)
        halves = tl.where(slot == t, key_half, halves)

    if KEEP:
        at = program * R * width + slot[:, None] * width + place[None, :]
        tl.store(rows + at, known * scale[None, :], mask=(slot < R)[:, None] & (place < width)[None, :])
    # other threads wrote what is read now
    tl.debug_barrier()
    sums, ones = solved(sums, ones, lower, R, BLOCK_R)
    write(pivots, values, weights, log_back, program, tokens, sums, ones, top - halves, DV, R, BLOCK_V, BLOCK_R)


@triton.jit
def choose_streamed(
    k, v, key_mean, value_mean, radius, mask, noise,
    pivots, values, weights, log_back, lengths, tau, rows, lower, state,
    grid_h, grid_w, down, across, wide, width, kb, kh, kn, kc, vb, vh, vn, vc, mb, mh, mn, noise_h,
    BETA: tl.constexpr, ROOT_BETA: tl.constexpr, TAU_MULT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, R: tl.constexpr, EPS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    UNIFORM: tl.constexpr, HAS_NOISE: tl.constexpr, HAS_MASK: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A bin of any size; ``state`` has half the squared lengths and what is left, (programs, 2, width), ``rows`` F."""
    program = tl.program_id(0).to(tl.int64)
    bins = down * across
    line, part = program // bins, (program % bins).to(tl.int32)
    image, head = line // HEADS, line % HEADS
    k += image * kb + head * kh
    mask += image * mb + head * mh
    noise += head * noise_h + part.to(tl.int64) * R * width
    lower += program * R * R
    rows += program * R * width
    halfs = state + program * 2 * width
    lefts = halfs + width
    lane, slot = tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    c, cv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    mean = tl.load(key_mean + line * D + c, mask=c < D, other=0)
    longest, total, count = tl.zeros((BLOCK,), ACC), tl.zeros((BLOCK,), ACC), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        place = start + lane
        token, there = tokens_of(place, part, grid_h, grid_w, down, across, wide, width)
        alive = present(token, there, mask, mn, HAS_MASK)
        x = centred(k, token, alive, mean, c, kn, kc, D, ACC)
        squares = tl.sum(x * x, 1)
        tl.store(halfs + place, squares, mask=place < width)
        tl.store(lefts + place, tl.where(alive, 1.0, 0.0).to(ACC), mask=place < width)
        longest, total, count = tl.maximum(longest, squares), total + squares, count + alive.to(tl.int32)
    total = tl.sum(total, 0)
    longest = tl.where(total == total, tl.max(longest, 0), total)
    wide_factor = multiplier(tl.load(radius + line), tl.sqrt(longest), tl.sum(count, 0), BETA, TAU_MULT)
    tl.store(lengths + program, tl.sqrt(longest))
    none = wide_factor == 0
    tl.store(tau + program, tl.where(none, float("inf"), ROOT_BETA / tl.where(none, 1.0, wide_factor)).to(ACC))
    factor = wide_factor.to(ACC)
    to_half = factor * factor / 2

    # a thread may read what another one wrote
    tl.debug_barrier()
    best, at_best = tl.full((BLOCK,), float("-inf"), ACC), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        place = start + lane
        left = tl.load(lefts + place, mask=place < width, other=0)
        half = tl.load(halfs + place, mask=place < width, other=0) * to_half
        score = scores(left, half, place, 0, noise, width, R, EPS, LOW, HIGH, UNIFORM, HAS_NOISE, ACC)
        # a NaN is better than numbers, and stays
        better = ((score <= best) == 0) & (best == best)
        best, at_best = tl.where(better, score, best), tl.where(better, place, at_best)
    tokens, halves = tl.full((BLOCK_R,), -1, tl.int32), tl.zeros((BLOCK_R,), ACC)
    for t in range(R):
        lost = tl.max((best != best).to(tl.int32), 0) > 0
        highest = tl.max(best, 0)
        some = (highest != float("-inf")) | lost
        # the first of equals; of what is not a number any
        pivot = tl.minimum(tl.min(tl.where(best == highest, at_best, width), 0), width - 1)
        # what other threads wrote in the last step is read now
        tl.debug_barrier()
        chosen, _ = tokens_of(pivot, part, grid_h, grid_w, down, across, wide, width)
        key = tl.load(k + chosen * kn + c * kc, mask=c < D, other=0).to(ACC)
        key = tl.where(c < D, key - mean, 0)
        key_half = tl.sum(key * key, 0) * to_half
        said = tl.load(rows + slot * width + pivot, mask=slot < t, other=0)
        root = tl.sqrt(tl.where(some, tl.load(lefts + pivot), 1.0))
        root = tl.where(lost, float("nan"), root)
        tl.store(lower + t * R + slot, tl.where(slot == t, root, tl.where(some, said, 0)), mask=slot < R)
        tokens = tl.where(slot == t, tl.where(some, chosen, -1), tokens)
        halves = tl.where(slot == t, key_half, halves)
        # before any thread writes what is left of the pivot
        tl.debug_barrier()
        best = tl.full((BLOCK,), float("-inf"), ACC)
        for start in range(0, width, BLOCK):
            place = start + lane
            token, there = tokens_of(place, part, grid_h, grid_w, down, across, wide, width)
            x = centred(k, token, present(token, there, mask, mn, HAS_MASK), mean, c, kn, kc, D, ACC) * factor
            half = tl.load(halfs + place, mask=place < width, other=0) * to_half
            left = tl.load(lefts + place, mask=place < width, other=0)
            at = slot[:, None] * width + place[None, :]
            known = tl.load(rows + at, mask=(slot < t)[:, None] & (place < width)[None, :], other=0)
            # several threads have the same key, and all of them must have read it before one writes
            tl.debug_barrier()
            row = against_pivot(x, half, key * factor, key_half) - tl.sum(said[:, None] * known, 0)
            row = tl.where(left < 0, 0, row)
            own = place == pivot
            f = tl.where(some, tl.where(own, root, row / root), 0)
            tl.store(rows + t * width + place, f, mask=place < width)
            left = tl.where(own, -1, remaining(left, f))
            tl.store(lefts + place, left, mask=place < width)
            score = scores(left, half, place, t + 1, noise, width, R, EPS, LOW, HIGH, UNIFORM, HAS_NOISE, ACC)
            better = ((score <= best) == 0) & (best == best)
            best, at_best = tl.where(better, score, best), tl.where(better, place, at_best)

    tl.debug_barrier()
    top = longest * to_half
    value_mean = tl.load(value_mean + line * DV + cv, mask=cv < DV, other=0)
    sums, ones = tl.zeros((BLOCK_R, BLOCK_V), ACC), tl.zeros((BLOCK_R,), ACC)
    for start in range(0, width, 64):
        place = start + tl.arange(0, 64)
        token, there = tokens_of(place, part, grid_h, grid_w, down, across, wide, width)
        alive = present(token, there, mask, mn, HAS_MASK)
        half = tl.load(halfs + place, mask=place < width, other=0) * to_half
        at = slot[:, None] * width + place[None, :]
        inside = (slot < R)[:, None] & (place < width)[None, :]
        weighed = tl.load(rows + at, mask=inside, other=0) * tl.where(alive, tl.exp(half - top), 0)[None, :]
        if KEEP:
            # as above
            tl.debug_barrier()
            tl.store(rows + at, weighed, mask=inside)
        value = centred(v + image * vb + head * vh, token, alive, value_mean, cv, vn, vc, DV, ACC)
        sums = dot(operand(weighed, ACC), operand(value, ACC), sums, PRECISION)
        ones += tl.sum(weighed, 1)
    sums, ones = solved(sums, ones, lower, R, BLOCK_R)
    write(pivots, values, weights, log_back, program, tokens, sums, ones, top - halves, DV, R, BLOCK_V, BLOCK_R)


@triton.jit
def finish(
    k, key_mean, radius, count, pivots, values, weights, log_back, lengths, keys, gamma,
    r, bins, n, kb, kh, kn, kc,
    BETA: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LARGEST: tl.constexpr,
    HAS_MASK: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_ALL: tl.constexpr, BLOCK_BINS: tl.constexpr,
):  # fmt: skip
    """Bring BLOCK_R slots of a head to their scale, which is one for all its bins, and fetch their keys; ``log_back``
    becomes the factor. An empty slot takes the key of the first that is not, or token 0."""
    line = tl.program_id(0).to(tl.int64)
    image, head = line // HEADS, line % HEADS
    every, part = tl.arange(0, BLOCK_ALL), tl.arange(0, BLOCK_BINS)
    logs = tl.load(log_back + line * r + every, mask=every < r, other=float("-inf"))
    excess = tl.max(logs, 0) - LARGEST
    excess = tl.where(excess > 0, excess, 0)
    all_pivots = tl.load(pivots + line * r + every, mask=every < r, other=-1)
    first = tl.min(tl.where(all_pivots >= 0, every, BLOCK_ALL), 0)
    spare = tl.sum(tl.where(every == first, all_pivots, 0), 0).to(tl.int32)
    c, cv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    mean = tl.load(key_mean + line * D + c, mask=c < D, other=0)
    # all logs are read before one is replaced
    tl.debug_barrier()
    for start in range(0, r, BLOCK_R):
        slot = start + tl.arange(0, BLOCK_R)
        here = slot < r
        own = line * r + slot
        back = tl.exp(tl.load(log_back + own, mask=here, other=float("-inf")) - excess)
        weight = tl.load(weights + own, mask=here, other=0)
        at, inside = values + own[:, None] * DV + cv[None, :], here[:, None] & (cv < DV)[None, :]
        value = tl.load(at, mask=inside, other=0)
        # several threads have the same slot, and all of them must have read it before one writes
        tl.debug_barrier()
        tl.store(log_back + own, back, mask=here)
        tl.store(weights + own, weight * back, mask=here)
        tl.store(at, value * back[:, None], mask=inside)
        token = tl.load(pivots + own, mask=here, other=-1).to(tl.int32)
        token = tl.where(token >= 0, token, spare)
        key = centred(k + image * kb + head * kh, token, here, mean, c, kn, kc, D, ACC)
        tl.store(keys + own[:, None] * D + c[None, :], key, mask=here[:, None] & (c < D)[None, :])
    length = tl.max(tl.load(lengths + line * bins + part, mask=part < bins, other=0), 0)
    if HAS_MASK:
        n = tl.load(count + line)
    number = tl.full((), 0, tl.float64) + n
    found = tl.load(radius + line).to(tl.float64) * length.to(tl.float64) * BETA
    tl.store(gamma + line, (found / tl.log(tl.where(number > 2, number, 2.0))).to(ACC))


@triton.jit
def spread(
    d_keys, d_values, pivots, back, rows, lower, dk, dv,
    grid_h, grid_w, down, across, wide, width, kb, kh, kn, kc, vb, vh, vn, vc,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of one bin: of its values W^T d_values, of its keys d_keys at the pivots and 0 elsewhere."""
    program = tl.program_id(0).to(tl.int64)
    bins = down * across
    line, part = program // bins, (program % bins).to(tl.int32)
    image, head = line // HEADS, line % HEADS
    dk += image * kb + head * kh
    dv += image * vb + head * vh
    rows += program * R * width
    lower += program * R * R
    lane, slot = tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    c, cv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    own = program * R + slot
    inside = (slot < R)[:, None] & (cv < DV)[None, :]
    u = tl.load(d_values + own[:, None] * DV + cv[None, :], mask=inside, other=0).to(ACC)
    u *= tl.load(back + own, mask=slot < R, other=0)[:, None]
    # L u = d_values, the first slot first
    for t in range(R):
        take = tl.load(lower + t * R + slot, mask=slot < t, other=0)
        take = tl.where(slot == t, 1.0, -take)
        y = tl.sum(take[:, None] * u, 0) / tl.load(lower + t * R + t)
        u = tl.where((slot == t)[:, None], y[None, :], u)
    for start in range(0, width, BLOCK):
        place = start + lane
        token, there = tokens_of(place, part, grid_h, grid_w, down, across, wide, width)
        at = place[:, None] + (slot * width)[None, :]
        weighed = tl.load(rows + at, mask=(place < width)[:, None] & (slot < R)[None, :], other=0)
        found = dot(operand(weighed, ACC), operand(u, ACC), tl.zeros((BLOCK, BLOCK_V), ACC), PRECISION)
        at = (token * vn)[:, None] + (cv * vc)[None, :]
        tl.store(dv + at, stored(found, dv.dtype.element_ty), mask=there[:, None] & (cv < DV)[None, :])
        at = (token * kn)[:, None] + (c * kc)[None, :]
        tl.store(dk + at, tl.zeros((BLOCK, BLOCK_D), dk.dtype.element_ty), mask=there[:, None] & (c < D)[None, :])
    # the zeros come first
    tl.debug_barrier()
    token = tl.load(pivots + own, mask=slot < R, other=-1).to(tl.int32)
    chosen = (token >= 0)[:, None] & (c < D)[None, :]
    found = tl.load(d_keys + own[:, None] * D + c[None, :], mask=chosen, other=0)
    at = (token * kn)[:, None] + (c * kc)[None, :]
    tl.store(dk + at, stored(found, dk.dtype.element_ty), mask=chosen)
