"""What stands for tensors while a kernel in CuTe DSL is compiled."""

from typing import Any

from experts.triton.operands import TMA_BYTES


def any_matrix(dtype: Any, rows: Any, columns: Any) -> Any:
    """Stand for a matrix of any size: values of a row side by side, rows on 16 bytes or values."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    bits = dtype.width
    aligned = TMA_BYTES if bits < 32 else 4
    stride = cute.sym_int64(divisibility=aligned * 8 // bits)
    return make_fake_tensor(dtype, (rows, columns), (stride, 1), assumed_align=aligned)
