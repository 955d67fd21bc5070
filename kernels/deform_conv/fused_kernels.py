"""The Triton kernels of the deformable convolution; what they compute is in ``fused.py``.

All see images as (b, h, w, c) without gaps. A block has TH x TW pixels, two-dimensional so that what its neighbours
read is in the cache, and BC channels, which lie side by side: the places and weights of the corners are found once for
each pixel and tap, and a row of channels is read by one wide load. Offsets are read where they lie, by four strides.
"""

from kernels.triton_parts import dot, stored, tl, triton

# pixels beyond which an offset leads outside every image; whole numbers in float32 and in 32 bits
FAR = tl.constexpr(8388608.0)


@triton.jit
def forward(
    x_ptr, offset_ptr, weight_ptr, out_ptr, h, w, across, tiles, ob, oc, oy, ox,
    LOW: tl.constexpr, HIGH: tl.constexpr, CLAMP: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """out = sum_t w_t v_t of a block of pixels and of channels; blocks of channels come one after the other."""
    chunks: tl.constexpr = (C + BC - 1) // BC
    program = tl.program_id(0)
    image, y, z, inside = _pixels(program // chunks, h, w, across, tiles, TH, TW)
    c = program % chunks * BC + tl.arange(0, BC)
    there = inside[:, None] & (c < C)[None, :]
    x_ptr += image * h * w * C
    offset_ptr += image * ob + y.to(tl.int64) * oy + z.to(tl.int64) * ox
    total = tl.zeros((TH * TW, BC), ACC)
    for tap in range(9):
        down, right, _, _ = _offsets(offset_ptr, 2 * tap, oc, inside, LOW, HIGH, CLAMP, ACC)
        top, down = _parted(down, y + (tap // 3 - 1))
        left, right = _parted(right, z + (tap % 3 - 1))
        at = x_ptr + ((top.to(tl.int64) * w + left) * C)[:, None] + c[None, :]
        here, beside, below, across_ = _corners(top, left, h, w)
        sampled = tl.load(at, mask=here[:, None] & there, other=0).to(ACC) * ((1 - down) * (1 - right))[:, None]
        sampled += tl.load(at + C, mask=beside[:, None] & there, other=0).to(ACC) * ((1 - down) * right)[:, None]
        at += w * C
        sampled += tl.load(at, mask=below[:, None] & there, other=0).to(ACC) * (down * (1 - right))[:, None]
        sampled += tl.load(at + C, mask=across_[:, None] & there, other=0).to(ACC) * (down * right)[:, None]
        total += sampled * tl.load(weight_ptr + tap * C + c, mask=c < C, other=0).to(ACC)[None, :]
    at = out_ptr + ((image * h + y) * w + z)[:, None] * C + c[None, :]
    tl.store(at, stored(total, out_ptr.dtype.element_ty), mask=there)


@triton.jit
def backward(
    x_ptr, offset_ptr, weight_ptr, dy_ptr, dx_ptr, doffset_ptr, parts_ptr, h, w, across, tiles,
    ob, oc, oy, ox, db, dc, dy, dz,
    LOW: tl.constexpr, HIGH: tl.constexpr, CLAMP: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr, ACC: tl.constexpr,
    BY_X: tl.constexpr, BY_OFFSET: tl.constexpr, BY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Of a block of pixels: gradients by its offsets, its part of those by the weight, and additions to those by x."""
    program = tl.program_id(0)
    image, y, z, inside = _pixels(program, h, w, across, tiles, TH, TW)
    x_ptr += image * h * w * C
    dx_ptr += image * h * w * C
    dy_ptr += ((image * h + y) * w + z)[:, None] * C
    offset_ptr += image * ob + y.to(tl.int64) * oy + z.to(tl.int64) * ox
    doffset_ptr += image * db + y.to(tl.int64) * dy + z.to(tl.int64) * dz
    parts_ptr += program.to(tl.int64) * 9 * C
    for tap in range(9):
        down, right, through_y, through_z = _offsets(offset_ptr, 2 * tap, oc, inside, LOW, HIGH, CLAMP, ACC)
        top, down = _parted(down, y + (tap // 3 - 1))
        left, right = _parted(right, z + (tap % 3 - 1))
        here, beside, below, across_ = _corners(top, left, h, w)
        place = ((top.to(tl.int64) * w + left) * C)[:, None]
        d_down, d_right = tl.zeros((TH * TW,), ACC), tl.zeros((TH * TW,), ACC)
        for first in range(0, C, BC):
            c = first + tl.arange(0, BC)
            there = inside[:, None] & (c < C)[None, :]
            g = tl.load(dy_ptr + c[None, :], mask=there, other=0).to(ACC)
            u = g * tl.load(weight_ptr + tap * C + c, mask=c < C, other=0).to(ACC)[None, :]
            if BY_OFFSET or BY_WEIGHT:
                at = x_ptr + place + c[None, :]
                p = tl.load(at, mask=here[:, None] & there, other=0).to(ACC)
                q = tl.load(at + C, mask=beside[:, None] & there, other=0).to(ACC)
                r = tl.load(at + w * C, mask=below[:, None] & there, other=0).to(ACC)
                s = tl.load(at + (w + 1) * C, mask=across_[:, None] & there, other=0).to(ACC)
                upper, lower = p + (q - p) * right[:, None], r + (s - r) * right[:, None]
                d_down += tl.sum(u * (lower - upper), axis=1)
                d_right += tl.sum(u * ((q - p) + ((s - r) - (q - p)) * down[:, None]), axis=1)
                if BY_WEIGHT:
                    part = tl.sum(g * (upper + (lower - upper) * down[:, None]), axis=0)
                    tl.store(parts_ptr + tap * C + c, part, mask=c < C)
            if BY_X:
                at = dx_ptr + place + c[None, :]
                _add(at, u * ((1 - down) * (1 - right))[:, None], here[:, None] & there)
                _add(at + C, u * ((1 - down) * right)[:, None], beside[:, None] & there)
                _add(at + w * C, u * (down * (1 - right))[:, None], below[:, None] & there)
                _add(at + (w + 1) * C, u * (down * right)[:, None], across_[:, None] & there)
        if BY_OFFSET:
            at = doffset_ptr + 2 * tap * dc
            kind: tl.constexpr = doffset_ptr.dtype.element_ty
            tl.store(at, stored(tl.where(through_y, d_down, 0), kind), mask=inside)
            tl.store(at + dc, stored(tl.where(through_z, d_right, 0), kind), mask=inside)


@triton.jit
def gather(
    offset_ptr, weight_ptr, dy_ptr, dx_ptr, h, w, across, tiles, ob, oc, oy, ox,
    LOW: tl.constexpr, HIGH: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr, BO: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx = sum_t w_t (A_t dy) of a block of pixels and of channels, in a fixed order.

    A_t is what each output that can reach the block, FIRST to LAST pixels before it, takes from each pixel. BO outputs
    come at a time, and A_t is theirs for all channels.
    """
    chunks: tl.constexpr = (C + BC - 1) // BC
    wide: tl.constexpr = TW + LAST - FIRST
    outputs: tl.constexpr = (TH + LAST - FIRST) * wide
    program = tl.program_id(0)
    image, y, z, inside = _pixels(program // chunks, h, w, across, tiles, TH, TW)
    block = program // chunks % tiles
    c = program % chunks * BC + tl.arange(0, BC)
    total = tl.zeros((TH * TW, BC), ACC)
    for start in range(0, outputs, BO):
        o = start + tl.arange(0, BO)
        row, column = block // across * TH - LAST + o // wide, block % across * TW - LAST + o % wide
        there = (o < outputs) & (row >= 0) & (row < h) & (column >= 0) & (column < w)
        at = dy_ptr + ((image * h + row) * w + column)[:, None] * C + c[None, :]
        g = tl.load(at, mask=there[:, None] & (c < C)[None, :], other=0).to(ACC)
        at = offset_ptr + image * ob + row.to(tl.int64) * oy + column.to(tl.int64) * ox
        for tap in range(9):
            down, right, _, _ = _offsets(at, 2 * tap, oc, there, LOW, HIGH, True, ACC)
            by_row = _share((y[:, None] - row[None, :] - (tap // 3 - 1)).to(ACC) - down[None, :])
            by_column = _share((z[:, None] - column[None, :] - (tap % 3 - 1)).to(ACC) - right[None, :])
            weight = tl.load(weight_ptr + tap * C + c, mask=c < C, other=0).to(ACC)
            total += dot(by_row * by_column, g, tl.zeros((TH * TW, BC), ACC), PRECISION) * weight[None, :]
    at = dx_ptr + ((image * h + y) * w + z)[:, None] * C + c[None, :]
    tl.store(at, stored(total, dx_ptr.dtype.element_ty), mask=inside[:, None] & (c < C)[None, :])


@triton.jit
def _pixels(tile, h, w, across, tiles, TH: tl.constexpr, TW: tl.constexpr):
    """Image, rows and columns of the pixels of a block, and which of them there are."""
    p = tl.arange(0, TH * TW)
    block = tile % tiles
    y, z = block // across * TH + p // TW, block % across * TW + p % TW
    return (tile // tiles).to(tl.int64), y, z, (y < h) & (z < w)


@triton.jit
def _offsets(
    offset_ptr, channel, oc, there, LOW: tl.constexpr, HIGH: tl.constexpr, CLAMP: tl.constexpr, ACC: tl.constexpr
):
    """The offsets down and right, clamped, and where the clamp lets their gradients through."""
    at = offset_ptr + channel * tl.cast(oc, tl.int64)
    down = tl.load(at, mask=there, other=0).to(ACC)
    right = tl.load(at + oc, mask=there, other=0).to(ACC)
    through_y, through_z = down == down, right == right
    if CLAMP:
        # bounds of the type of the offsets: a number alone is a float32
        low, high = tl.full(down.shape, LOW, ACC), tl.full(down.shape, HIGH, ACC)
        through_y, through_z = (down >= low) & (down <= high), (right >= low) & (right <= high)
        # comparisons, which leave alone what is not a number
        down = tl.where(down < low, low, tl.where(down > high, high, down))
        right = tl.where(right < low, low, tl.where(right > high, high, right))
    return down, right, through_y, through_z


@triton.jit
def _parted(offset, start):
    """The place of the corner before, and how far from it: apart from the whole pixels the fraction is exact."""
    whole = tl.floor(offset)
    return tl.minimum(tl.maximum(whole, -FAR), FAR).to(tl.int32) + start, offset - whole


@triton.jit
def _corners(top, left, h, w):
    """Which of the four corners are pixels: here, to the right, below, below to the right."""
    over, under = (top >= 0) & (top < h), (top >= -1) & (top < h - 1)
    before, behind = (left >= 0) & (left < w), (left >= -1) & (left < w - 1)
    return over & before, over & behind, under & before, under & behind


@triton.jit
def _share(distance):
    """What a sample takes from a row or column at a distance in pixels."""
    return tl.maximum(1 - tl.abs(distance), 0)


@triton.jit
def _add(at, value, mask):
    tl.atomic_add(at, value, mask=mask, sem="relaxed")
