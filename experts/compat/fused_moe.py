"""Functions with the names and arguments of `fused_moe` in SGLang and vLLM.

    sorted_ids, expert_ids, num_post = moe_align_block_size(topk_ids_TK, config["BLOCK_SIZE_M"], E)
    invoke_fused_moe_kernel(x_TH, w1, None, h_PN, None, None, None, topk_weights_TK, topk_ids_TK,
                            sorted_ids, expert_ids, num_post, False, K, config)
    moe_sum_reduce_triton(rows_TKH, out_TH, 1.0)

`TritonExperts` runs the same kernel, but applies the activation at the end of the first GEMM.
"""

from collections.abc import Mapping, Sequence

import torch

from experts.triton.configs.select import choose_config, override_config
from experts.triton.launch_config import LaunchConfig
from experts.triton.operands import gemm2_operands, weight_rejections
from modular_kernel.errors import (
    ConfigurationError,
    DeviceError,
    DtypeError,
    IncompatibleError,
    LayoutError,
    RoutingError,
    ShapeError,
)
from modular_kernel.ops.quantize import quantize_values
from modular_kernel.ops.reduce import moe_sum_reduce
from modular_kernel.quant.quantized_weights import weight_specs
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.utils.argument_checks import Count, expect, expect_each
from modular_kernel.utils.tensor_checks import check_no_gradients, check_output, check_tensor

_FIELD_BY_KEY = {
    "BLOCK_SIZE_M": "block_m",
    "BLOCK_SIZE_N": "block_n",
    "BLOCK_SIZE_K": "block_k",
    "GROUP_SIZE_M": "group_m",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}


def moe_sum_reduce_triton(
    input: torch.Tensor, output: torch.Tensor, routed_scaling_factor: float
) -> None:
    """Write routed_scaling_factor times the sum of input (T, K, H) over K to output (T, H).

    Raise the same errors as `modular_kernel.ops.reduce.moe_sum_reduce`.
    """
    moe_sum_reduce(input, output, routed_scaling_factor)


def try_get_optimal_moe_config(
    w1_shape: Sequence[int],
    w2_shape: Sequence[int],
    top_k: int,
    dtype: torch.dtype,
    M: int,
    *,
    quant: str = "none",
) -> dict[str, int]:
    """Return the tile that the aligned path of `TritonExperts` uses for GEMM 2 of M tokens.

    The tile can also be used for GEMM 1. `invoke_fused_moe_kernel` accepts it as `config`. Raise
    ConfigurationError if the shapes do not match.

    w1_shape: (E, 2I, H).
    w2_shape: (E, H, I), unpacked.
    quant: the quantization scheme.
    """
    expect("M", M, Count)
    w1_shape = expect_each("w1_shape", w1_shape, int)
    w2_shape = expect_each("w2_shape", w2_shape, int)
    if len(w1_shape) != 3 or len(w2_shape) != 3 or w1_shape[2] != w2_shape[1]:
        got = f"{tuple(w1_shape)} and {tuple(w2_shape)}"
        raise ConfigurationError("w1_shape and w2_shape", got=got, need="(E, 2I, H) and (E, H, I)")
    problem = Problem(
        tokens=M, hidden=w2_shape[1], intermediate=w2_shape[2], experts=w2_shape[0], top_k=top_k,
        dtype=dtype, quant=quant,
    )  # fmt: skip
    _, tile = choose_config(problem, M).typed_launches(LaunchConfig)
    return {key: getattr(tile, field) for key, field in _FIELD_BY_KEY.items()}


def invoke_fused_moe_kernel(  # noqa: PLR0913  (SGLang's arguments, in its order)
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    C: torch.Tensor,
    A_scale: torch.Tensor | None,
    B_scale: torch.Tensor | None,
    B_zp: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    mul_routed_weight: bool,
    top_k: int,
    config: Mapping[str, int],
    *,
    quant: str = "none",
) -> None:
    """C[p] = A[p // top_k] @ B[expert of p]^T + bias, times topk_weights[p] if mul_routed_weight.

    A pair p is a token together with one of its experts. P is the number of pairs.

    A: (P / top_k, K), unquantized. It has one row per token if top_k > 1, and one row per pair if
        top_k = 1.
    B: (e, N, K) with any strides, or packed.
    bias: (e, N), or None.
    C: (..., N), contiguous, with P rows and A's dtype. Rows of pairs without a local expert are set
        to 0.
    A_scale: (1,) for a scheme with a static scale, otherwise None. The function itself quantizes A.
    B_scale: has the shape and dtype of w2_scale in an `ExpertWeights` of the scheme.
    B_zp: has the shape and dtype of w2_zero_point in an `ExpertWeights` of the scheme.
    topk_weights: P float32 values, read if mul_routed_weight. With a bias, the product is rounded
        before it is weighted.
    topk_ids: (T, top-k), P ids in total.
    sorted_token_ids: the first result of `moe_align_block_size` for config["BLOCK_SIZE_M"].
    expert_ids: the second result of `moe_align_block_size`.
    num_tokens_post_padded: the third result of `moe_align_block_size`.
    config: has BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K and GROUP_SIZE_M. num_warps and num_stages
        are optional.
    quant: the quantization scheme.

    The values in the results of `moe_align_block_size` are checked on a CPU, but not on a GPU,
    where invalid values cause out-of-bounds reads. Raise InputError for arguments that violate
    these requirements, and IncompatibleError if the kernel does not support the scheme.
    """
    expect("mul_routed_weight", mul_routed_weight, bool)
    optional = {"bias": bias, "A_scale": A_scale, "B_scale": B_scale, "B_zp": B_zp}
    tensors = {"A": A, "B": B, "topk_ids": topk_ids, "sorted_token_ids": sorted_token_ids}
    tensors |= {"expert_ids": expert_ids, "num_tokens_post_padded": num_tokens_post_padded}
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    if mul_routed_weight:
        check_tensor("topk_weights", topk_weights)
        tensors["topk_weights"] = topk_weights  # type: ignore[assignment]
    problem = _make_problem(A, B, C, tensors, top_k, has_bias=bias is not None, quant=quant)
    tile = _make_tile(config, problem)
    _check_alignment(tensors, problem, tile, topk_ids.numel())
    weights = ExpertWeights(B, B, b2=bias, w2_scale=B_scale, w2_zero_point=B_zp, a2_scale=A_scale)
    _check_weights(weights, problem)
    if not use_triton(A):
        need = "a GPU with triton, or triton's interpreter"
        raise DeviceError("device of the tensors", got=A.device, need=need)
    if C.numel() == 0:
        return
    from experts.triton.aligned.kernels.grouped_gemm import grouped_gemm_kernel

    rows, scale = A, None
    if problem.scheme.quantizes_activations:
        rows, scale = quantize_values(A.float(), problem.scheme, A_scale)
    num_pairs, num_blocks = topk_ids.numel(), expert_ids.numel()
    # The kernel would multiply by the router weight before it adds the bias.
    kernel_applies_weights = mul_routed_weight and bias is None
    launch(
        grouped_gemm_kernel,
        (num_blocks * -(-problem.hidden // tile.block_n),),
        a_ptr=rows,
        router_weights_ptr=topk_weights if kernel_applies_weights else rows,
        out_ptr=C,
        sorted_token_ids_ptr=sorted_token_ids,
        expert_ids_ptr=expert_ids,
        num_tokens_post_padded_ptr=num_tokens_post_padded,
        num_pairs=num_pairs,
        num_m_blocks=num_blocks,
        stride_am=rows.stride(0),
        stride_ak=rows.stride(1),
        PAIRS_PER_A_ROW=top_k,
        WRITE_ZEROS=True,
        HAS_ROUTER_WEIGHTS=kernel_applies_weights,
        **gemm2_operands(weights, problem).arguments(tile, problem.fp32_precision, scale),
    )
    if mul_routed_weight and not kernel_applies_weights:
        assert topk_weights is not None
        C.view(num_pairs, problem.hidden).mul_(topk_weights.reshape(num_pairs, 1))


def _make_problem(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    top_k: int,
    *,
    has_bias: bool,
    quant: str,
) -> Problem:
    """Check A, C and the devices, and return the problem whose GEMM 2 is this GEMM."""
    expect("top_k", top_k, Count)
    for name, tensor in {**tensors, "C": C}.items():
        check_tensor(name, tensor)
        if tensor.device != A.device:
            raise DeviceError(name, got=tensor.device, need=f"{A.device}, the device of A")
    check_no_gradients({**tensors, "C": C})
    check_output("C", C, dict(tensors))
    num_pairs = tensors["topk_ids"].numel()
    if A.dim() != 2 or B.dim() != 3:
        got = f"{tuple(A.shape)} and {tuple(B.shape)}"
        raise ShapeError("A and B", got=got, need="(P / top_k, K) and (e, N, K)")
    if A.shape[0] * top_k != num_pairs:
        raise ShapeError("A", got=tuple(A.shape), need=f"P / top_k = {num_pairs} / {top_k} rows")
    problem = Problem(
        tokens=max(1, A.shape[0]), hidden=B.shape[1], intermediate=A.shape[1], experts=B.shape[0],
        top_k=1, dtype=A.dtype, quant=quant, bias=has_bias,
    )  # fmt: skip
    machine = Machine()
    if A.device.type == "cuda":
        machine = Machine("cuda", torch.cuda.get_device_capability(A.device))
    if rejections := weight_rejections("invoke_fused_moe_kernel", problem, machine):
        raise IncompatibleError("invoke_fused_moe_kernel", rejections)
    if C.dtype is not A.dtype:
        raise DtypeError("C", got=C.dtype, need=f"{A.dtype}, the dtype of A")
    if C.dim() < 2 or C.shape[-1] != B.shape[1] or C.numel() != num_pairs * B.shape[1]:
        need = f"(..., N) with P = {num_pairs} rows, N = {B.shape[1]}"
        raise ShapeError("C", got=tuple(C.shape), need=need)
    if not C.is_contiguous():
        raise LayoutError("C", got=f"strides {C.stride()}", need="contiguous")
    return problem


def _make_tile(config: Mapping[str, int], problem: Problem) -> LaunchConfig:
    """Return the tile of config. Raise ConfigurationError if the kernel cannot use it."""
    expect("config", config, Mapping)
    if unknown_keys := sorted(set(config) - set(_FIELD_BY_KEY)):
        need = f"only {', '.join(_FIELD_BY_KEY)}"
        raise ConfigurationError("config", got=", ".join(map(str, unknown_keys)), need=need)
    with override_config(config):
        return choose_config(problem, problem.tokens).typed_launches(LaunchConfig)[1]


def _check_alignment(
    tensors: Mapping[str, torch.Tensor], problem: Problem, tile: LaunchConfig, num_pairs: int
) -> None:
    """Check the results of `moe_align_block_size`. Their values are checked only on a CPU."""
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    sorted_ids, expert_ids, num_post_padded = (tensors[name] for name in names)
    for name, tensor in zip(names, (sorted_ids, expert_ids, num_post_padded), strict=True):
        if tensor.dtype is not torch.int32:
            raise DtypeError(name, got=tensor.dtype, need=torch.int32)
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ShapeError(name, got=tuple(tensor.shape), need="1 dimension, contiguous")
    if len(expert_ids) != -(-len(sorted_ids) // tile.block_m) or len(num_post_padded) != 1:
        got = f"{len(expert_ids)} and {len(num_post_padded)}"
        need = f"{-(-len(sorted_ids) // tile.block_m)} blocks of {tile.block_m} ids, and 1"
        raise ShapeError("expert_ids and num_tokens_post_padded", got=got, need=need)
    weights = tensors.get("topk_weights")
    if weights is not None:
        if weights.dtype is not torch.float32:
            raise DtypeError("topk_weights", got=weights.dtype, need=torch.float32)
        if weights.numel() != num_pairs or not weights.is_contiguous():
            need = f"{num_pairs} values, contiguous"
            raise ShapeError("topk_weights", got=tuple(weights.shape), need=need)
    if sorted_ids.device.type != "cpu":
        return
    num_ids = int(num_post_padded)
    has_valid_ids = 0 <= num_ids <= len(sorted_ids) and bool((sorted_ids[:num_ids] >= 0).all())
    if not has_valid_ids or bool(((expert_ids < -1) | (expert_ids >= problem.experts)).any()):
        need = "the results of moe_align_block_size for the experts of B"
        raise RoutingError(
            "alignment", got=f"{num_ids} of {len(sorted_ids)} ids, or invalid expert ids", need=need
        )


def _check_weights(weights: ExpertWeights, problem: Problem) -> None:
    """Check that B, its scales and its bias can be the w2 of `problem`."""
    specs = weight_specs(problem)
    tensors = {"w2": weights.w2, "w2_scale": weights.w2_scale, "a2_scale": weights.a2_scale}
    tensors["w2_zero_point"] = weights.w2_zero_point
    labels = {"w2": "B", "w2_scale": "B_scale", "w2_zero_point": "B_zp", "a2_scale": "A_scale"}
    for name, tensor in tensors.items():
        spec, label = specs.get(name), labels[name]
        if (spec is None) != (tensor is None):
            got = "None" if tensor is None else "a tensor"
            raise ConfigurationError(label, got=got, need=f"{spec} for quant={problem.quant}")
        if spec is None or tensor is None:
            continue
        if tuple(tensor.shape) != spec.shape:
            raise ShapeError(label, got=tuple(tensor.shape), need=f"{spec.legend} = {spec.shape}")
        if tensor.dtype not in spec.dtypes:
            raise DtypeError(label, got=tensor.dtype, need=" or ".join(map(str, spec.dtypes)))
        if name != "w2" and not tensor.is_contiguous():
            raise LayoutError(label, got=f"strides {tensor.stride()}", need="contiguous")
    bias = weights.b2
    if bias is not None and tuple(bias.shape) != (problem.experts, problem.hidden):
        need = f"(e, N) = {(problem.experts, problem.hidden)}"
        raise ShapeError("bias", got=tuple(bias.shape), need=need)
    if bias is not None and bias.dtype not in (torch.float32, problem.dtype):
        raise DtypeError("bias", got=bias.dtype, need=f"float32 or {problem.dtype}")
