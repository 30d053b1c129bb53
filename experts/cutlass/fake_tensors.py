"""Fake tensors, which describe the arguments of a CuTe DSL kernel when it is compiled."""

from typing import Any

from experts.triton.operands import TMA_BYTES


def fake_matrix(dtype: Any, rows: Any, columns: Any) -> Any:
    """Return a fake row-major matrix of dynamic size.

    Rows begin at multiples of 16 bytes, or of 4 bytes if elements have 32 bits.
    """
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    bits = dtype.width
    alignment = TMA_BYTES if bits < 32 else 4
    stride = cute.sym_int64(divisibility=alignment * 8 // bits)
    return make_fake_tensor(dtype, (rows, columns), (stride, 1), assumed_align=alignment)
