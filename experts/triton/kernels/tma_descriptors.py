"""Host side: how a kernel is told to fetch boxes of rows by TMA, and how many programs it gets."""

from functools import cache

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BOX_BYTES = 128  # of a row: the widest swizzle


def tma_descriptor(
    rows: torch.Tensor, block_rows: int, columns: int | None = None
) -> TensorDescriptor:
    """Boxes of block_rows rows of `rows`: 2-D, contiguous, rows on 16 bytes.

    columns: of a box, a power of two, 128 bytes' worth unless told. What a box has beyond the
    tensor's end reads as zero and is not stored.
    """
    itemsize = rows.element_size()
    columns = columns or BOX_BYTES // itemsize
    layout = NVMMASharedLayout(
        swizzle_byte_width=min(BOX_BYTES, columns * itemsize), element_bitwidth=itemsize * 8, rank=2
    )
    block = [block_rows, columns]
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), block, layout)


def multiprocessors() -> int:
    """How many the current device has."""
    return _multiprocessors(triton.runtime.driver.active.get_current_device())


@cache
def _multiprocessors(device: object) -> int:
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return int(properties["multiprocessor_count"])
