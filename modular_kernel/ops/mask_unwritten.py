"""mask_unwritten_pairs: mask the pairs of undefined rows of a receive buffer.

A library that receives tokens from other ranks writes them to the first rows of a buffer, and
leaves the other rows undefined. This operation sets the expert ids of the other rows to -1, so that
kernels skip them. A pair is a token together with one of its K experts.
"""

import torch

from modular_kernel.errors import ShapeError
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton

_PAIRS_PER_PROGRAM = 256  # two per lane


def mask_unwritten_pairs(
    ids_RK: torch.Tensor,
    weights_RK: torch.Tensor,
    count: torch.Tensor,
    *,
    out_ids_RK: torch.Tensor,
    out_weights_RK: torch.Tensor,
) -> None:
    """Copy the ids and weights of the first `count` rows, and mask the other rows.

    Masked pairs get id -1 and weight 0. The weight of a pair with a negative id is also set to 0.

    ids_RK: (R, K) integers, contiguous.
    weights_RK: (R, K) float32, contiguous.
    count: number of rows that were received, a tensor with one integer on the same device.
    out_ids_RK: output, (R, K) int32, contiguous.
    out_weights_RK: output, (R, K) float32, contiguous.

    Raises ShapeError if shapes differ or a tensor is not contiguous.
    """
    shape = tuple(ids_RK.shape)
    tensors = {"weights": weights_RK, "masked ids": out_ids_RK, "masked weights": out_weights_RK}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shape or not (tensor.is_contiguous() and ids_RK.is_contiguous()):
            got = f"{tuple(tensor.shape)}, strides {tensor.stride()} and {ids_RK.stride()}"
            raise ShapeError(name, got=got, need=f"a contiguous {shape}, and contiguous ids")
    if ids_RK.numel() == 0:
        return
    if not use_triton(ids_RK):
        mask_unwritten_pairs_ref(
            ids_RK, weights_RK, count, out_ids_RK=out_ids_RK, out_weights_RK=out_weights_RK
        )
        return
    from modular_kernel.ops.kernels.mask_unwritten import mask_unwritten_pairs_kernel

    pairs = ids_RK.numel()
    launch(
        mask_unwritten_pairs_kernel,
        (-(-pairs // _PAIRS_PER_PROGRAM),),
        topk_ids_ptr=ids_RK,
        router_weights_ptr=weights_RK,
        num_rows_ptr=count,
        out_topk_ids_ptr=out_ids_RK,
        out_router_weights_ptr=out_weights_RK,
        num_pairs=pairs,
        TOP_K=shape[1],
        BLOCK_PAIRS=_PAIRS_PER_PROGRAM,
        **pdl_arguments(),
    )


def mask_unwritten_pairs_ref(
    ids_RK: torch.Tensor,
    weights_RK: torch.Tensor,
    count: torch.Tensor,
    *,
    out_ids_RK: torch.Tensor,
    out_weights_RK: torch.Tensor,
) -> None:
    """Torch reference of `mask_unwritten_pairs`."""
    row_R1 = torch.arange(len(ids_RK), device=ids_RK.device)[:, None]
    valid_RK = (row_R1 < count) & (ids_RK >= 0)
    out_ids_RK.copy_(torch.where(valid_RK, ids_RK, -1))
    out_weights_RK.copy_(torch.where(valid_RK, weights_RK, 0))
