"""Products of a few rows an expert with 4-bit weights: how the aligned path launches them."""

import math
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from experts.triton_gemm import Product, scale_group
from experts.triton_path import PathCall
from modular_kernel.ops.align import Aligned, align_specs
from modular_kernel.ops.launch import launch
from modular_kernel.ops.overlap import overlap
from modular_kernel.schemes import QuantScheme
from modular_kernel.types import Problem
from modular_kernel.workspace import BufferSpec

_FEW = 16  # block_m of the tiles that this kernel takes the place of
_LEAST_M = 8  # the narrow side of a tensor core's product
_ROWS = 6  # mean rows of an expert up to which few have more than _LEAST_M
_MOST_ROWS = 12  # and more than _FEW: weights are unpacked once more for each further block
_MOST_REGISTERS = 128  # by `_registers`: more, and the compiler spills some
_DEPTH = 128  # of the products of one warp in one step
_LEAST_DEPTH = 32  # four lanes of one word each
_ALIGNMENT = 16  # bytes of one copy


@dataclass(frozen=True)
class Shape:
    """One launch: columns of a block (a gated product has as many up columns), warps that share
    the depth, and steps in flight."""

    block_n: int
    num_warps: int
    num_stages: int


# (below so many blocks of 64 columns, from this depth on, shape): the first row that applies.
# Measured on one H200 (2026-11-20, triton 3.6.0, bf16) over Mixtral, DeepSeek-V3 EP8, Qwen3-30B
# and gpt-oss with 1, 4 and 16 tokens.
_Rows = tuple[tuple[float, int, Shape], ...]
_SHAPES: dict[tuple[str, bool], _Rows] = {
    ("uint4", True): (
        (200, 0, Shape(32, 4, 3)),
        (math.inf, 4096, Shape(64, 4, 2)),
        (1000, 0, Shape(32, 2, 4)),
        (math.inf, 0, Shape(64, 2, 3)),
    ),
    ("uint4", False): (
        (200, 0, Shape(32, 4, 4)),
        (500, 0, Shape(64, 2, 3)),
        (math.inf, 0, Shape(128, 2, 3)),
    ),
    ("float4_e2m1", True): (
        (200, 0, Shape(16, 2, 4)),
        (500, 4096, Shape(16, 4, 3)),
        (math.inf, 0, Shape(32, 2, 4)),
    ),
    ("float4_e2m1", False): (
        (math.inf, 8192, Shape(32, 4, 4)),
        (200, 0, Shape(32, 4, 4)),
        (math.inf, 1024, Shape(32, 2, 4)),
        (math.inf, 0, Shape(32, 1, 4)),
    ),
}
# Twice the rows take registers for twice the sums.
_WIDE = {
    ("uint4", True): Shape(32, 2, 4),
    ("uint4", False): Shape(64, 2, 3),
    ("float4_e2m1", True): Shape(16, 2, 4),
    ("float4_e2m1", False): Shape(32, 2, 4),
}


def serves(problem: Problem) -> bool:
    """Whether the kernel can compute `problem`: 16-bit rows, depths that words of eight fill."""
    if not problem.scheme.packed or problem.dtype is torch.float32:
        return False
    return all(
        _depth(problem.scheme, k) >= _LEAST_DEPTH for k in (problem.hidden, problem.intermediate)
    )


def takes(problem: Problem, call: PathCall) -> bool:
    """Whether rows and tiles of `call` are few, and its weights and tokens lie as the kernel reads
    them: words of weights 16 bytes at once."""
    return (
        call.tiles.gemm1.block_m == _FEW
        and call.tokens.routing.topk_ids_TK.numel() <= _MOST_ROWS * problem.experts
        and call.tokens.x_TH.stride(1) == 1
        and all(
            w.stride(2) == 1
            and all(n % _ALIGNMENT == 0 for n in (w.data_ptr(), w.stride(0), w.stride(1)))
            for w in (call.weights.w1, call.weights.w2)
        )
    )


def block_m(problem: Problem, pairs: int) -> int:
    """Rows of a block in a call of so many pairs: 8, or 16 where many experts have more."""
    return _LEAST_M if pairs <= _ROWS * problem.experts else _FEW


def specs(problem: Problem, pairs: int) -> dict[str, BufferSpec]:
    """The buffers to align any call of up to `pairs` pairs, in blocks of either size."""
    least, few = (align_specs(pairs, rows, problem.e) for rows in (_LEAST_M, _FEW))
    return {name: max(least[name], few[name], key=attrgetter("numel")) for name in few}


def multiply(
    a: torch.Tensor,
    product: Product,
    aligned: Aligned,
    out: torch.Tensor,
    row_weights_TK: torch.Tensor | None,
    *,
    block_m: int,
    write_zeros: bool,
) -> None:
    """One grouped GEMM over pairs aligned in blocks of rows.

    a: (T, H) tokens, or (P, I) one row per pair, values of a row side by side; out: a row per pair.
    """
    from experts.kernels.triton.four_bit_gemm import four_bit_gemm_kernel

    pairs = out.numel() // product.columns
    blocks = aligned.expert_ids.numel()
    shape = _shape(product, min(pairs, product.w.shape[0]), block_m)
    launch(
        four_bit_gemm_kernel,
        (blocks * -(-product.columns // shape.block_n),),
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
        BLOCK_M=block_m,
        **_arguments(product, shape),
        **overlap(),
    )


def _arguments(product: Product, shape: Shape) -> dict[str, object]:
    """Kernel arguments that do not depend on how rows are found."""
    w, scale, zero, bias = product.w, product.scale, product.zero_point, product.bias
    assert scale is not None
    _, group = scale_group(product.scheme, product.depth)
    depth = _depth(product.scheme, product.depth)
    return {
        "b_ptr": w,
        "b_scale_ptr": scale,
        "zero_ptr": w if zero is None else zero,
        "bias_ptr": w if bias is None else bias,
        "columns": product.columns,
        "depth": product.depth,
        "up_row": product.up_row,
        "stride_be": w.stride(0),
        "stride_bn": w.stride(1),
        "stride_bse": scale.stride(0),
        "stride_bsn": scale.stride(1),
        "stride_bze": 0 if zero is None else zero.stride(0),
        "stride_bzn": 0 if zero is None else zero.stride(1),
        "stride_bias": 0 if bias is None else bias.stride(0),
        "ROW_STEP": product.step,
        "HAS_BIAS": bias is not None,
        "E2M1": product.scheme.weight == "float4_e2m1",
        "HAS_ZERO": zero is not None,
        "EVEN_K": product.depth % (shape.num_warps * _DEPTH) == 0,
        "GROUP_K": group or product.depth,
        "DEPTH": depth,
        "PARTS": shape.num_warps,
        "GROUPS": _DEPTH // depth,
        "BLOCK_N": shape.block_n,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
        **product.constants,
    }


def _shape(product: Product, experts: int, block_m: int) -> Shape:
    """experts: at most so many have a row."""
    kind = product.scheme.weight, bool(product.constants["GATED"])
    if block_m == _LEAST_M:
        blocks = experts * -(-product.columns // 64)
        found = next(
            shape
            for below, depth, shape in _SHAPES[kind]
            if blocks < below and product.depth >= depth
        )
    else:
        found = _WIDE[kind]
    while found.block_n > 64 and product.columns % found.block_n:
        found = replace(found, block_n=found.block_n // 2)
    while found.block_n > 16 and _registers(found, product, block_m) > _MOST_REGISTERS:
        found = replace(found, block_n=found.block_n // 2)
    return found


def _registers(shape: Shape, product: Product, block_m: int) -> int:
    """What a thread holds at once: words, sums, and a step's products of each group, beside what
    zero points take from them."""
    rows = shape.block_n * (2 if product.constants["GATED"] else 1)
    groups = _DEPTH // _depth(product.scheme, product.depth)
    per_group = 1 if product.zero_point is None else (2 if groups == 1 else 3)
    return rows // 2 + rows * block_m // 32 * (1 + groups * per_group)


def _depth(scheme: QuantScheme, k: int) -> int:
    """The depth of one product: within a group, and a divisor of all of the depth k."""
    _, group = scale_group(scheme, k)
    return math.gcd(group, _DEPTH, k)
