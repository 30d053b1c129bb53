"""Fake tensors, which describe the arguments of a CuTe DSL kernel to its compiler."""

from typing import Any

from experts.triton.operands import TMA_BYTES


def make_fake_matrix(dtype: Any, rows: Any, columns: Any) -> Any:
    """Return a fake row-major matrix of dynamic size.

    Rows start at multiples of 16 bytes, or at multiples of 4 bytes if elements have 32 bits.

    dtype: a numeric type of the DSL, such as cutlass.Float32.
    rows, columns: sizes, as integers or symbolic integers of the DSL.
    """
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    bits = dtype.width
    alignment_bytes = TMA_BYTES if bits < 32 else 4
    stride = cute.sym_int64(divisibility=alignment_bytes * 8 // bits)
    return make_fake_tensor(dtype, (rows, columns), (stride, 1), assumed_align=alignment_bytes)
