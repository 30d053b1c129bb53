"""Steps of an expert-parallel layer without all-to-all, under the names of SGLang's EPMoE.

    reorder_topk_ids, src2dst, seg_indptr = run_moe_ep_preproess(topk_ids, E)
    pre_reorder(x, gateup_input, src2dst, topk_ids, w13_input_scale, start, end)
    grouped_gemm_triton(gateup_input, w13, gateup_output, end - start + 1, True,
                        seg_indptr[start : end + 2], ...)
    silu_and_mul(gateup_output, down_input, reorder_topk_ids, w2_input_scale, start, end)
    grouped_gemm_triton(down_input, w2, down_output, ...)
    post_reorder(down_output, out, src2dst, topk_ids, topk_weights, start, end)

Every rank has all T tokens, but only the experts start_expert_id to end_expert_id (inclusive). A
rank writes its partial sum to `out`. An all-reduce of `out` gives the layer's output. A pair is a
token together with one of its K experts. Buffers have a row for each of the T * K pairs, but a rank
reads and writes only the rows of its own experts.

Shapes, dtypes and strides are checked. The values of ids are not checked, because reading them
would synchronize with the device.
"""

from collections.abc import Mapping
from typing import Annotated

import torch

from experts.triton.configs.select import choose_config
from experts.triton.grouped.base import GemmRows
from experts.triton.grouped.segments import m_grouped_gemm
from experts.triton.launch_config import LaunchConfig
from experts.triton.operands import gemm2_operands, scale_group
from modular_kernel.errors import (
    ConfigurationError,
    DeviceError,
    DtypeError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)
from modular_kernel.ops.permute import choose_hidden_block_size
from modular_kernel.ops.reduce import gather_weight_and_sum
from modular_kernel.ops.sort import max_tile_count
from modular_kernel.quant.quantized_weights import QMAX
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.problem import Problem, dtype_name
from modular_kernel.tensors import ExpertWeights
from modular_kernel.utils.argument_checks import MAX_INT32, Between, Count, expect, resolve_device
from modular_kernel.utils.tensor_checks import (
    check_no_gradients,
    check_output,
    check_tensor,
    check_tensors,
)

_FP8 = torch.float8_e4m3fn
_MIN_BLOCK_K = 32  # the minimum K of tl.dot for 8-bit operands


def run_moe_ep_preproess(
    topk_ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort topk_ids (T, K), int32 or int64; return (reorder_topk_ids, src2dst, seg_indptr).

    - reorder_topk_ids: (T * K,), the ids in a stable sort.
    - src2dst: (T * K,) int32, the sorted position of each pair t * K + k.
    - seg_indptr: (num_experts + 1,) int64. The rows of expert i start at seg_indptr[i] and end
      before seg_indptr[i + 1].

    Skipped pairs have the id -1 and precede the pairs of all experts.
    """
    check_tensor("topk_ids", topk_ids)
    _check_integers("topk_ids", topk_ids)
    expect("num_experts", num_experts, Count)
    ids_P = topk_ids.flatten()
    reorder_topk_ids, reorder_ids = torch.sort(ids_P, stable=True)
    rows_P = torch.arange(ids_P.numel(), dtype=torch.int32, device=ids_P.device)
    src2dst = torch.empty_like(rows_P).scatter_(0, reorder_ids, rows_P)
    expert_ids = torch.arange(num_experts + 1, dtype=ids_P.dtype, device=ids_P.device)
    return reorder_topk_ids, src2dst, torch.searchsorted(reorder_topk_ids, expert_ids)


def pre_reorder(
    hidden_states: torch.Tensor,
    gateup_input: torch.Tensor,
    src2dst: torch.Tensor,
    topk_ids: torch.Tensor,
    a1_scales: torch.Tensor | None,
    start_expert_id: int,
    end_expert_id: int,
) -> None:
    """gateup_input[src2dst[p]] = hidden_states[p // K] / a1_scales[expert of p], for local pairs p.

    hidden_states: (T, H), contiguous rows.
    gateup_input: (T * K, H), contiguous. Only the rows of local pairs are written. Float8 values
        saturate.
    src2dst: (T * K,), from `run_moe_ep_preproess`.
    topk_ids: (T, K).
    a1_scales: (local experts,) float32; None means 1.
    """
    inputs = {"hidden_states": hidden_states, "src2dst": src2dst, "topk_ids": topk_ids}
    _check_tensors("gateup_input", gateup_input, inputs, a1_scales=a1_scales)
    _check_experts(start_expert_id, end_expert_id)
    _check_rank(topk_ids=topk_ids, hidden_states=hidden_states)
    (tokens, top_k), hidden = topk_ids.shape, hidden_states.shape[1]
    _check_shape_and_strides("gateup_input", gateup_input, (tokens * top_k, hidden))
    _check_shape_and_strides("hidden_states", hidden_states, (tokens, hidden), rows_only=True)
    _check_shape_and_strides("src2dst", src2dst, (tokens * top_k,))
    _check_shape_and_strides("topk_ids", topk_ids, (tokens, top_k))
    _check_integers("topk_ids", topk_ids)
    _check_scales("a1_scales", a1_scales, end_expert_id - start_expert_id + 1)
    if gateup_input.numel() == 0:
        return
    _require_triton(hidden_states)
    from experts.compat.kernels.reorder import pre_reorder_kernel

    block = choose_hidden_block_size(hidden)
    launch(
        pre_reorder_kernel,
        (tokens, -(-hidden // block)),
        x_ptr=hidden_states,
        rows_ptr=gateup_input,
        src2dst_ptr=src2dst,
        ids_ptr=topk_ids,
        hidden=hidden,
        stride_x=hidden_states.stride(0),
        start_expert=start_expert_id,
        end_expert=end_expert_id,
        TOP_K=top_k,
        BLOCK_H=block,
        **_make_scale_arguments(a1_scales, gateup_input),
    )


def silu_and_mul(
    gateup_output: torch.Tensor,
    down_input: torch.Tensor,
    reorder_topk_ids: torch.Tensor,
    w2_input_scale: torch.Tensor | None,
    start_expert_id: int,
    end_expert_id: int,
) -> None:
    """down_input[r] = silu(gate) * up / w2_input_scale[expert of r], for rows r of local experts.

    gateup_output: (R, 2I), contiguous, gate values first.
    down_input: (R, I), contiguous. Only the rows of local experts are written. Float8 values
        saturate.
    reorder_topk_ids: (R,), from `run_moe_ep_preproess`.
    w2_input_scale: (local experts,) float32; None means 1.

    The result is computed in float32 and rounded once.
    """
    inputs = {"gateup_output": gateup_output, "reorder_topk_ids": reorder_topk_ids}
    _check_tensors("down_input", down_input, inputs, w2_input_scale=w2_input_scale)
    _check_experts(start_expert_id, end_expert_id)
    _check_rank(down_input=down_input)
    rows, intermediate = down_input.shape
    _check_shape_and_strides("gateup_output", gateup_output, (rows, 2 * intermediate))
    _check_shape_and_strides("down_input", down_input, (rows, intermediate))
    _check_shape_and_strides("reorder_topk_ids", reorder_topk_ids, (rows,))
    _check_integers("reorder_topk_ids", reorder_topk_ids)
    _check_scales("w2_input_scale", w2_input_scale, end_expert_id - start_expert_id + 1)
    if down_input.numel() == 0:
        return
    _require_triton(gateup_output)
    from experts.compat.kernels.reorder import silu_and_mul_kernel

    block = choose_hidden_block_size(intermediate)
    launch(
        silu_and_mul_kernel,
        (rows, -(-intermediate // block)),
        x_ptr=gateup_output,
        out_ptr=down_input,
        ids_ptr=reorder_topk_ids,
        intermediate=intermediate,
        start_expert=start_expert_id,
        end_expert=end_expert_id,
        BLOCK=block,
        **_make_scale_arguments(w2_input_scale, down_input),
    )


def post_reorder(
    down_output: torch.Tensor,
    output: torch.Tensor,
    src2dst: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    start_expert_id: int,
    end_expert_id: int,
) -> None:
    """output[t] = sum over local pairs of topk_weights[t, k] * down_output[src2dst[t * K + k]].

    down_output: (T * K, H), contiguous.
    output: (T, H), contiguous. A token without a local pair gets exact zeros.
    src2dst: (T * K,), from `run_moe_ep_preproess`.
    topk_ids: (T, K).
    topk_weights: (T, K) float32, contiguous.

    The sum is computed in float32 and rounded once.
    """
    inputs = {"down_output": down_output, "src2dst": src2dst}
    _check_tensors("output", output, inputs | {"topk_ids": topk_ids, "topk_weights": topk_weights})
    _check_experts(start_expert_id, end_expert_id)
    _check_rank(topk_ids=topk_ids, output=output)
    (tokens, top_k), hidden = topk_ids.shape, output.shape[1]
    _check_shape_and_strides("down_output", down_output, (tokens * top_k, hidden))
    _check_shape_and_strides("output", output, (tokens, hidden))
    _check_shape_and_strides("src2dst", src2dst, (tokens * top_k,))
    _check_shape_and_strides("topk_weights", topk_weights, (tokens, top_k))
    _check_dtype("topk_weights", topk_weights, torch.float32)
    is_local_TK = _is_local(topk_ids, start_expert_id, end_expert_id)
    row_of_pair_TK = torch.where(is_local_TK, src2dst.view(tokens, top_k), -1).to(torch.int32)
    gather_weight_and_sum(down_output, row_of_pair_TK, topk_weights, scale=1.0, out=output)


def grouped_gemm_triton(  # noqa: PLR0913 (EPMoE's names and order)
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    batch_size: int,
    weight_column_major: bool,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor | None = None,
    use_fp8_w8a8: bool = False,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
) -> torch.Tensor:
    """c[r] = a[r] @ b[weight_indices[i]]^T for every row r of segment i; return c.

    a: (R, K), contiguous.
    b: (E, N, K), any strides.
    c: (R, N), contiguous. Rows outside all segments are not written.
    batch_size: the number of segments.
    weight_column_major: must be True, because b is (E, N, K).
    seg_indptr: (batch_size + 1,), non-decreasing. Segment i starts at row seg_indptr[i] and ends
        before seg_indptr[i + 1].
    weight_indices: (batch_size,), the index in b of each segment's weights. None means 0, 1, ...
    use_fp8_w8a8: whether a and b are float8_e4m3fn with scales.
    scale_a: float32 (batch_size,) or, with block_shape, (R, ceil(K / bk)).
    scale_b: float32 (E,) or, with block_shape, (E, ceil(N / bn), ceil(K / bk)).
    block_shape: [bn, bk], the weight rows and K elements that share a scale.
    """
    expect("weight_column_major", weight_column_major, bool)
    expect("use_fp8_w8a8", use_fp8_w8a8, bool)
    if not weight_column_major:
        need = "True, because b is (experts, N, K)"
        raise ConfigurationError("weight_column_major", got=weight_column_major, need=need)
    optional = {"scale_a": scale_a, "scale_b": scale_b, "weight_indices": weight_indices}
    _check_tensors("c", c, {"a": a, "b": b, "seg_indptr": seg_indptr}, **optional)
    expect("batch_size", batch_size, Annotated[int, Between(0, MAX_INT32)])
    expect("block_shape", block_shape, list[int] | tuple[int, ...] | None)
    _check_rank(a=a, c=c)
    _check_rank(3, b=b)
    (m, k), (experts, n, _) = a.shape, b.shape
    _check_shape_and_strides("a", a, (m, k))
    _check_shape_and_strides("c", c, (m, n))
    _check_shape_and_strides("seg_indptr", seg_indptr, (batch_size + 1,))
    if b.shape[2] != k:
        raise ShapeError("b", got=tuple(b.shape), need=(experts, n, k))
    if weight_indices is None:
        weight_indices = torch.arange(batch_size, device=a.device)
    _check_shape_and_strides("weight_indices", weight_indices, (batch_size,))
    problem = Problem(
        tokens=m,
        hidden=n,
        intermediate=k,
        experts=experts,
        top_k=1,
        dtype=c.dtype,
        quant=_derive_quant_scheme(a, b, use_fp8_w8a8, block_shape),
    )
    if m == 0 or batch_size == 0:
        return c
    row_scales = _get_row_scales(scale_a, scale_b, seg_indptr, problem) if use_fp8_w8a8 else None
    _require_triton(a)
    # The configuration of GEMM 2, which has no activation in its epilogue.
    _, config = choose_config(problem, m).typed_launches(LaunchConfig)
    tiles = _make_segment_tiles(seg_indptr, weight_indices, m, config.block_m)
    operands = gemm2_operands(ExpertWeights(w1=b, w2=b, w2_scale=scale_b), problem)
    m_grouped_gemm(GemmRows(a, row_scales), operands, config, tiles, c, problem.fp32_precision)
    return c


class GroupedGemmRunner(torch.nn.Module):
    """`grouped_gemm_triton` as a module without state.

    device: the device of the tensors.
    use_flashinfer: must be False. Otherwise, raise UnsupportedError.
    """

    def __init__(self, device: torch.device | str, use_flashinfer: bool = False) -> None:
        super().__init__()
        expect("use_flashinfer", use_flashinfer, bool)
        self.device, self.use_flashinfer = resolve_device(device), use_flashinfer
        if use_flashinfer:
            need = "False, because only the Triton grouped GEMM is available"
            raise UnsupportedError("use_flashinfer", got=use_flashinfer, need=need)

    forward = staticmethod(grouped_gemm_triton)


def _derive_quant_scheme(
    a: torch.Tensor, b: torch.Tensor, use_fp8_w8a8: bool, block_shape: list[int] | None
) -> str:
    """Return the quantization scheme (`Problem.quant`) that the options describe."""
    for name, tensor in (("a", a), ("b", b)):
        if use_fp8_w8a8 or name == "b":
            _check_dtype(name, tensor, _FP8 if use_fp8_w8a8 else a.dtype)
    if block_shape is not None and not use_fp8_w8a8:
        raise ConfigurationError(
            "block_shape", got=block_shape, need="None unless use_fp8_w8a8=True"
        )
    if not use_fp8_w8a8:
        return "none"
    if block_shape is None:
        return "fp8_w8a8_tensor"
    return f"fp8_w8a8_block:block={block_shape[0]}x{block_shape[1]}"


def _get_row_scales(
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    seg_indptr: torch.Tensor,
    problem: Problem,
) -> torch.Tensor:
    """Check scale_a and scale_b, and return the scales of the rows of `a`.

    The result is (R, 1) or, with block_shape, (R, ceil(K / bk)).
    """
    rows, scheme, experts = problem.tokens, problem.scheme, problem.experts
    segments = seg_indptr.numel() - 1
    need_a: tuple[int, ...] = (segments,)
    need_b: tuple[int, ...] = (experts,)
    if scheme.granularity == "block":
        block_n, block_k = scheme.group
        groups = -(-problem.intermediate // block_k)
        need_a, need_b = (rows, groups), (experts, -(-problem.hidden // block_n), groups)
        _, group_k = scale_group(scheme, problem.intermediate)
        if group_k % _MIN_BLOCK_K:
            need = f"a multiple of {_MIN_BLOCK_K}, or K={problem.intermediate}"
            raise ConfigurationError("block_shape[1]", got=block_k, need=need)
    for name, scale, need_shape in (("scale_a", scale_a, need_a), ("scale_b", scale_b, need_b)):
        if scale is None:
            raise ConfigurationError(name, got=None, need=f"float32 {need_shape} for float8")
        _check_shape_and_strides(name, scale, need_shape)
        _check_dtype(name, scale, torch.float32)
    assert scale_a is not None
    if scheme.granularity == "block":
        return scale_a
    row = torch.arange(rows, dtype=seg_indptr.dtype, device=seg_indptr.device)
    segment = torch.searchsorted(seg_indptr[1:].contiguous(), row, right=True)
    return scale_a[segment.clamp(max=segments - 1)][:, None].contiguous()


def _make_segment_tiles(
    seg_indptr: torch.Tensor, weight_indices: torch.Tensor, rows: int, block_m: int
) -> torch.Tensor:
    """Split segments into tiles of at most block_m rows, laid out as in `ops.sort.SortedPairs`."""
    segments, device = weight_indices.numel(), seg_indptr.device
    starts, ends = seg_indptr[:-1].long(), seg_indptr[1:].long()
    tile_counts = (ends - starts + block_m - 1) // block_m
    tile_ends = tile_counts.cumsum(0)
    tile_index = torch.arange(max_tile_count(rows, block_m, segments), device=device)
    segment = torch.searchsorted(tile_ends, tile_index, right=True).clamp(max=segments - 1)
    first_row = starts[segment] + (tile_index - (tile_ends - tile_counts)[segment]) * block_m
    tile_fields = (weight_indices[segment], first_row, ends[segment], tile_ends[-1:])
    return torch.cat([tile_field.to(torch.int32) for tile_field in tile_fields])


def _is_local(ids: torch.Tensor, start_expert_id: int, end_expert_id: int) -> torch.Tensor:
    return (ids >= start_expert_id) & (ids <= end_expert_id)


def _make_scale_arguments(scales: torch.Tensor | None, out: torch.Tensor) -> dict[str, object]:
    return {
        "scales_ptr": out if scales is None else scales,
        "HAS_SCALES": scales is not None,
        "QMAX": QMAX["float8_e4m3fn"] if out.dtype == _FP8 else 0.0,
    }


def _require_triton(tensor: torch.Tensor) -> None:
    if not use_triton(tensor):
        need = "a GPU with triton, or triton's interpreter"
        raise DeviceError("device of the tensors", got=tensor.device, need=need)


def _check_shape_and_strides(
    what: str, tensor: torch.Tensor, shape: tuple[int, ...], *, rows_only: bool = False
) -> None:
    """Check the shape, and that the tensor (or, with rows_only, each of its rows) is contiguous."""
    if tuple(tensor.shape) != shape:
        raise ShapeError(what, got=tuple(tensor.shape), need=shape)
    has_valid_strides = (
        tensor.stride(-1) == 1 or tensor.numel() == 0 if rows_only else tensor.is_contiguous()
    )
    if not has_valid_strides:
        need = "stride(-1) == 1" if rows_only else "contiguous"
        raise LayoutError(what, got=f"strides {tensor.stride()}", need=need)


def _check_tensors(
    what: str,
    output: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    **optional: torch.Tensor | None,
) -> None:
    """Check devices and gradients, and that `output` overlaps no input."""
    check_tensor(what, output)
    all_inputs = {**inputs, **optional}
    check_tensors(all_inputs, optional=optional, device=output.device)
    check_no_gradients({what: output, **all_inputs})
    check_output(what, output, all_inputs)


def _check_experts(start: int, end: int) -> None:
    """Check the ids of the first and the last local expert; the range may be empty."""
    expect("start_expert_id", start, Annotated[int, Between(0, MAX_INT32)])
    expect("end_expert_id", end, Annotated[int, Between(-1, MAX_INT32)])


def _check_rank(need: int = 2, /, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != need:
            raise ShapeError(name, got=tuple(tensor.shape), need=f"{need} dimensions")


def _check_integers(what: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise DtypeError(what, got=dtype_name(tensor.dtype), need="int32 or int64")


def _check_dtype(what: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise DtypeError(what, got=dtype_name(tensor.dtype), need=dtype_name(dtype))


def _check_scales(what: str, scales: torch.Tensor | None, experts: int) -> None:
    if scales is not None:
        _check_shape_and_strides(what, scales, (experts,))
        _check_dtype(what, scales, torch.float32)
