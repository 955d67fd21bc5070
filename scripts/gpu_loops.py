"""Two Triton loops that live in registers: what a GPU can do at most in exponentials and in float32 arithmetic.

Imports triton. Each program keeps its numbers from beginning to end and writes one sum, so that nothing can be left
out.
"""

from kernels.triton_parts import tl, triton

# numbers of one program, and warps that share them
SIZE = 2048
WARPS = 8
STEPS = 256


@triton.jit
def exponentials(out, count: tl.constexpr, width: tl.constexpr):
    """``count`` times ``width`` exponentials of base 2, and as many additions."""
    x = tl.arange(0, width).to(tl.float32) * 0.001 - tl.program_id(0) * 0.0001
    for _ in range(count):
        # of a number below 0, as in a softmax, and no fixed point too soon
        x = tl.exp2(x) - 1.5
    tl.store(out + tl.program_id(0), tl.sum(x, axis=0))


@triton.jit
def multiply_adds(out, count: tl.constexpr, width: tl.constexpr):
    """``count`` times four times ``width`` fused multiplications and additions, in four chains."""
    x = tl.arange(0, width).to(tl.float32) * 0.001 + tl.program_id(0) * 0.0001
    a, b, c, d = x, x + 1, x + 2, x + 3
    for _ in range(count):
        a = a * 0.999 + 0.5
        b = b * 0.998 + 0.25
        c = c * 0.997 + 0.125
        d = d * 0.996 + 0.0625
    tl.store(out + tl.program_id(0), tl.sum(a + b + c + d, axis=0))
