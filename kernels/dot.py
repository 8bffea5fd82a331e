"""The matrix product of two tiles, as the kernels use it."""

import triton
import triton.language as tl

# The interpreter multiplies bfloat16 as if its bits were integers; a CPU takes the product in float32 instead.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc=None):
    """Give a · b (+ acc) in float32; float32 operands are not rounded to tf32 on the way."""
    if a.dtype == tl.float32 or _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)
