"""`zero_rows_kernel`: set the first rows of each segment to zero.

A segment is `capacity` rows for one expert. The first counts[s] rows of segment s are in use.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def zero_rows_kernel(
    x_ptr, counts_ptr, capacity, hidden_size, programs_per_segment,
    BLOCK_HIDDEN: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """x[s, c] = 0 for c < counts[s].

    Grid: (segments, programs_per_segment). Program (s, i) zeros the rows c with c %
        programs_per_segment = i.

    x_ptr: (segments, capacity, hidden_size), contiguous.
    counts_ptr: (segments,) int32, the number of rows in use.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    """
    pdl_wait(USE_PDL)
    segment = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(counts_ptr + segment), capacity)  # NaN-free: integer operands
    zeros = tl.zeros((BLOCK_HIDDEN,), x_ptr.dtype.element_ty)
    for row in range(tl.program_id(1), count, programs_per_segment):
        row_ptr = x_ptr + (segment * capacity + row) * hidden_size
        for first in range(0, hidden_size, BLOCK_HIDDEN):
            columns = first + tl.arange(0, BLOCK_HIDDEN)
            tl.store(row_ptr + columns, zeros, mask=columns < hidden_size)
