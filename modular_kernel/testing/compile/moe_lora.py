"""Launch the kernels of `run_moe_lora` on meta tensors, for compilation.

Meta tensors have shapes but no data.
"""

import torch

from modular_kernel.ops.moe_lora import MoELoRABatchInfo, run_moe_lora

EXPERTS, SLOTS = 8, 4


def launch_all(
    dtype: torch.dtype, max_rank: int, *, tokens: int = 4, hidden: int = 512, top_k: int = 2
) -> None:
    """Launch the kernels of both strategies, staged and fused.

    max_rank: the maximum rank of the adapters.
    """
    intermediate = hidden // 2
    shapes = (
        (max_rank, hidden),
        (2 * intermediate, max_rank),
        (max_rank, intermediate),
        (hidden, max_rank),
    )
    a13, b13, a2, b2 = (_empty(SLOTS, EXPERTS, *shape, dtype=dtype) for shape in shapes)
    ids_dtype = torch.int64 if dtype is torch.float32 else torch.int32
    info = MoELoRABatchInfo(
        _empty(tokens, dtype=torch.int32), _empty(SLOTS, dtype=ids_dtype), _empty(SLOTS)
    )
    x_TH, out_TH = _empty(tokens, hidden, dtype=dtype), _empty(tokens, hidden, dtype=dtype)
    ids_TK, weights_TK = _empty(tokens, top_k, dtype=ids_dtype), _empty(tokens, top_k)
    args = x_TH, ids_TK, weights_TK, info, a13, b13, a2, b2, out_TH
    run_moe_lora(*args, strategy="staged")
    run_moe_lora(*args, strategy="fused")


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
