"""TMA descriptors and the number of SMs, for the launch code of kernels that use TMA.

A TMA load or store copies a box between global and shared memory. A box is a rectangle of a matrix
whose size is fixed in the descriptor.
"""

from functools import cache

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BOX_BYTES = 128  # bytes per row of a box, the widest swizzle of shared memory


def tma_descriptor(
    rows: torch.Tensor, block_rows: int, columns: int | None = None
) -> TensorDescriptor:
    """Return a TMA descriptor for boxes of a matrix.

    Elements of a box that are outside the matrix are read as zero and are not stored.

    rows: the matrix, contiguous, with rows aligned to 16 bytes.
    block_rows: rows per box.
    columns: columns per box, a power of two. By default, as many as fit into 128 bytes.
    """
    itemsize = rows.element_size()
    columns = columns or BOX_BYTES // itemsize
    layout = NVMMASharedLayout(
        swizzle_byte_width=min(BOX_BYTES, columns * itemsize), element_bitwidth=itemsize * 8, rank=2
    )
    block = [block_rows, columns]
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), block, layout)


def count_sms() -> int:
    """Return the number of SMs of the current device."""
    return _count_sms(triton.runtime.driver.active.get_current_device())


@cache
def _count_sms(device: object) -> int:
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return int(properties["multiprocessor_count"])
