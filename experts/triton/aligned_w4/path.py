"""Products of a few rows an expert with 4-bit weights: how the aligned path launches them."""

from operator import attrgetter

import torch

from experts.triton.aligned_w4.config import (
    FEW,
    LEAST_M,
    FewRows,
    Shape,
    Spread,
    few,
    product_depth,
    shape,
)
from experts.triton.operands import Product, scale_group, word_format
from experts.triton.path import PathCall
from modular_kernel.ops.align import Aligned, align_specs
from modular_kernel.ops.launch.launch import launch
from modular_kernel.ops.launch.pdl import overlap
from modular_kernel.tensors import ExpertWeights
from modular_kernel.types import Problem
from modular_kernel.workspace import BufferSpec

_ALIGNMENT = 16  # bytes of one copy


def takes(problem: Problem, call: PathCall) -> bool:
    """Return whether the kernel takes `call`.

    Its rows and tiles are few, and its weights and tokens lie as the kernel reads them: words of
    weights 16 bytes at once.
    """
    return (
        few(problem, call.tokens.routing.topk_ids_TK.numel(), call.tiles)
        and call.tokens.x_TH.stride(1) == 1
        and lie_ready(call.weights)
    )


def lie_ready(weights: ExpertWeights) -> bool:
    """Whether w1 and w2, of bytes, can be read 16 bytes at once along their rows."""
    return all(
        w.stride(2) == 1
        and all(n % _ALIGNMENT == 0 for n in (w.data_ptr(), w.stride(0), w.stride(1)))
        for w in (weights.w1, weights.w2)
    )


def specs(problem: Problem, pairs: int) -> dict[str, BufferSpec]:
    """Return the buffers to align any call of up to `pairs` pairs, in blocks of either size."""
    least, most = (align_specs(pairs, rows, problem.e) for rows in (LEAST_M, FEW))
    return {name: max(least[name], most[name], key=attrgetter("numel")) for name in most}


def multiply(
    a: torch.Tensor,
    product: Product,
    aligned: Aligned,
    out: torch.Tensor,
    row_weights_TK: torch.Tensor | None,
    *,
    spread: Spread,
    write_zeros: bool,
) -> None:
    """One grouped GEMM over pairs aligned in blocks of spread.block_m rows.

    a: (T, H) tokens, or (P, I) one row per pair, values of a row side by side; out: a row per pair.
    """
    from experts.triton.aligned_w4.kernels.grouped_gemm_w4 import four_bit_gemm_kernel

    pairs = out.numel() // product.columns
    blocks = aligned.expert_ids.numel()
    gated, zeros = bool(product.constants["GATED"]), product.zero_point is not None
    rows = FewRows(product.scheme, product.columns, product.depth, gated, zeros)
    found = shape(rows, spread)
    launch(
        four_bit_gemm_kernel,
        (blocks * -(-product.columns // found.block_n),),
        a_ptr=a,
        row_weights_ptr=a if row_weights_TK is None else row_weights_TK,
        out_ptr=out,
        sorted_ptr=aligned.sorted_token_ids,
        expert_ids_ptr=aligned.expert_ids,
        num_post_ptr=aligned.num_tokens_post_padded,
        num_pairs=pairs,
        num_m=blocks,
        stride_am=a.stride(0),
        A_TOP_K=pairs // a.shape[0],
        WRITE_ZEROS=write_zeros,
        HAS_ROW_WEIGHTS=row_weights_TK is not None,
        BLOCK_M=spread.block_m,
        **_arguments(product, found),
        **overlap(),
    )


def _arguments(product: Product, found: Shape) -> dict[str, object]:
    """Kernel arguments that do not depend on how rows are found."""
    depth = product_depth(product.scheme, product.depth, found.depth)
    return {
        **packed_arguments(product),
        "columns": product.columns,
        "depth": product.depth,
        "UP_ROW": product.up_row,
        "ROW_STEP": product.step,
        "EVEN_K": product.depth % (found.num_warps * found.depth) == 0,
        "DEPTH": depth,
        "PARTS": found.num_warps,
        "GROUPS": found.depth // depth,
        "BLOCK_N": found.block_n,
        "EVEN_N": product.columns % found.block_n == 0,
        "num_warps": found.num_warps,
        "num_stages": found.num_stages,
        "maxnreg": found.registers or None,
        **product.constants,
    }


def packed_arguments(product: Product) -> dict[str, object]:
    """Where kernels for packed weights find a product's, and what lies beside them."""
    w, scale, zero, bias = product.w, product.scale, product.zero_point, product.bias
    assert scale is not None
    _, group = scale_group(product.scheme, product.depth)
    return {
        "b_ptr": w,
        "b_scale_ptr": scale,
        "zero_ptr": w if zero is None else zero,
        "bias_ptr": w if bias is None else bias,
        "stride_be": w.stride(0),
        "stride_bn": w.stride(1),
        "stride_bse": scale.stride(0),
        "stride_bsn": scale.stride(1),
        "stride_bze": 0 if zero is None else zero.stride(0),
        "stride_bzn": 0 if zero is None else zero.stride(1),
        "stride_bias": 0 if bias is None else bias.stride(0),
        "HAS_BIAS": bias is not None,
        "FORMAT": word_format(product.scheme),
        "HAS_ZERO": zero is not None,
        "GROUP_K": group or product.depth,
    }
