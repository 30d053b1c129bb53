"""Fake tensors for compiling CuTe DSL kernels."""

from typing import Any

from experts.triton.operands import TMA_BYTES


def fake_matrix(dtype: Any, rows: Any, columns: Any) -> Any:
    """Return a fake row-major matrix of dynamic size.

    Each row begins at a multiple of 16 bytes, or of 4 bytes for 32-bit values.
    """
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    bits = dtype.width
    alignment = TMA_BYTES if bits < 32 else 4
    stride = cute.sym_int64(divisibility=alignment * 8 // bits)
    return make_fake_tensor(dtype, (rows, columns), (stride, 1), assumed_align=alignment)
