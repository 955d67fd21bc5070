"""Parts that the Triton kernels share. Importing this file imports triton, so it is imported on first use only.

Under ``TRITON_INTERPRET=1`` kernels run in numpy, which has no bfloat16: there a product of bfloat16 operands is one
of their bit patterns, and a cast to bfloat16 cuts digits off. The helpers below keep such numbers in float32, rounded
to the steps of the narrow type, so that the interpreter computes what a GPU does.
"""

from kernels.dispatch import KernelUnavailable

try:
    import triton
    import triton.language as tl
    from triton import knobs
except ImportError as error:
    raise KernelUnavailable(f"triton cannot be imported ({error}); pip install 'pellucid[triton]'") from error

__all__ = ["INTERPRET", "dot", "interpreted", "operand", "stored", "tl", "to_bfloat16", "to_tf32", "triton"]

interpreted: bool = knobs.runtime.interpret
INTERPRET = tl.constexpr(interpreted)

if interpreted == isinstance(tl.zeros, triton.JITFunction):
    raise KernelUnavailable(
        "triton was imported before TRITON_INTERPRET was set or unset; set the variable before Python starts"
    )


@triton.jit
def to_bfloat16(x):
    """float32, rounded to the nearest bfloat16, ties to even; stays float32."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    # the sum would carry a NaN over into the sign
    return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)


@triton.jit
def to_tf32(x):
    """float32, rounded to the 10 bits after the point that tensor cores keep; stays float32."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = (bits + 0x1000) & -8192
    return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)


@triton.jit
def operand(x, TYPE: tl.constexpr):
    """``x`` as ``dot`` takes it where products are of TYPE."""
    if INTERPRET and TYPE == tl.bfloat16:
        y = to_bfloat16(x.to(tl.float32))
    else:
        y = x.to(TYPE)
    return y


@triton.jit
def stored(x, TYPE: tl.constexpr):
    """``x`` as it is stored in memory of TYPE, rounded to nearest even."""
    return operand(x, TYPE).to(TYPE)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``a @ b + acc`` for operands made by ``operand``, in the type of ``acc``.

    PRECISION holds for float32 operands: "tf32", "tf32x3" or "ieee".
    """
    if INTERPRET and PRECISION == "tf32" and a.dtype == tl.float32:
        # bfloat16 and its steps are unchanged by this
        a = to_tf32(a)
        b = to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
