"""Operations after the experts: weight, sum or gather the output rows of each token's pairs.

A pair is a token together with one of its K experts. The rows are either in the order of the pairs,
(T, K, H), or in any order, with a table that contains the row of each pair
(`gather_weight_and_sum`, `gather_rows`). All sums are accumulated in float32.
"""

import torch

from modular_kernel.errors import DtypeError, LayoutError, ShapeError
from modular_kernel.ops.count import id_arguments, uncounted_local_ids
from modular_kernel.ops.permute import choose_hidden_block_size
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.problem import dtype_name
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.utils.argument_checks import expect
from modular_kernel.utils.tensor_checks import check_no_gradients, check_output, check_tensor


def weight_and_sum(
    rows_TKH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    *,
    scale: float,
    out: torch.Tensor,
    routing: DispatchedRouting | None = None,
    num_local: int = 0,
) -> None:
    """Compute out[t] = scale * sum over k of weights_TK[t, k] * rows_TKH[t, k].

    Sums are accumulated in float32, in the order of k.

    rows_TKH: (T, K, H), contiguous.
    weights_TK: (T, K) float32; None means 1.
    out: output, (T, H).
    routing: if given, only rows of pairs whose expert is on this rank are read and summed.
    num_local: number of experts on this rank.
    """
    if out.numel() == 0:
        return
    if not use_triton(out):
        keep = None if routing is None else uncounted_local_ids(routing, num_local) >= 0
        weight_and_sum_ref(rows_TKH, weights_TK, scale=scale, out=out, keep_TK=keep)
        return
    row_source, ids = _make_row_source(rows_TKH, routing, num_local)
    _launch_sum(rows_TKH, weights_TK, rows_TKH.shape[1], scale, out, row_source, ids)


def _make_row_source(
    index: torch.Tensor, routing: DispatchedRouting | None, num_local: int
) -> tuple[str, dict[str, object]]:
    """Return ROW_SOURCE for the kernels in rows.py, and their id arguments, for rows (T, K, H).

    "all" sums every row. "ids" sums only rows of pairs whose expert is on this rank.
    """
    if routing is None:
        return "all", _make_index_arguments(index)
    ids = id_arguments(routing, num_local)
    ids["row_source_ptr"] = ids.pop("topk_ids_ptr")
    return "ids", ids


def _make_index_arguments(index: torch.Tensor) -> dict[str, object]:
    """Return the id arguments of a kernel that does not read expert ids.

    index: a table with the row of each pair, or any tensor if the kernel does not read a table.
    """
    return {
        "row_source_ptr": index,
        "expert_map_ptr": index,
        "num_experts": 0,
        "num_local_experts": 0,
        "HAS_EXPERT_MAP": False,
    }


def moe_sum_reduce(
    rows_TKH: torch.Tensor, out_TH: torch.Tensor, routed_scaling_factor: float = 1.0
) -> None:
    """Compute out_TH = routed_scaling_factor * rows_TKH.sum(1), accumulated in float32.

    rows_TKH: (T, K, H), a floating-point dtype, contiguous.
    out_TH: output, (T, H), the dtype of rows_TKH, contiguous. It must not share memory with
        rows_TKH.

    Raises an InputError for invalid tensors.
    """
    expect("routed_scaling_factor", routed_scaling_factor, float)
    check_tensor("rows", rows_TKH)
    check_tensor("out", out_TH, device=rows_TKH.device)
    check_no_gradients({"rows": rows_TKH, "out": out_TH})
    if rows_TKH.dim() != 3:
        raise ShapeError("rows", got=tuple(rows_TKH.shape), need="(T, K, H)")
    if out_TH.shape != (need := (rows_TKH.shape[0], rows_TKH.shape[2])):
        raise ShapeError("out", got=tuple(out_TH.shape), need=need)
    if not rows_TKH.is_floating_point() or out_TH.dtype is not rows_TKH.dtype:
        got = f"{dtype_name(rows_TKH.dtype)} rows, {dtype_name(out_TH.dtype)} out"
        raise DtypeError("rows and out", got=got, need="the same floating-point dtype")
    for name, tensor in (("rows", rows_TKH), ("out", out_TH)):
        if not tensor.is_contiguous():
            raise LayoutError(name, got=f"strides {tensor.stride()}", need="contiguous")
    check_output("out", out_TH, {"rows": rows_TKH})
    weight_and_sum(rows_TKH, None, scale=routed_scaling_factor, out=out_TH)


def gather_weight_and_sum(
    rows_RH: torch.Tensor,
    row_of_pair_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Compute out[t] = scale * sum over k of weights_TK[t, k] * rows_RH[row_of_pair_TK[t, k]].

    rows_RH: (R, H).
    row_of_pair_TK: (T, K) int32; -1 skips the pair.
    weights_TK: (T, K) float32; None means 1.
    out: output, (T, H).
    """
    if out.numel() == 0:
        return
    if not use_triton(out):
        keep = row_of_pair_TK >= 0
        rows = rows_RH[row_of_pair_TK.clamp(min=0).long()]
        weight_and_sum_ref(rows, weights_TK, scale=scale, out=out, keep_TK=keep)
        return
    ids = _make_index_arguments(row_of_pair_TK)
    _launch_sum(rows_RH, weights_TK, row_of_pair_TK.shape[1], scale, out, "rows", ids)


def _launch_sum(
    rows: torch.Tensor,
    weights_TK: torch.Tensor | None,
    top_k: int,
    scale: float,
    out: torch.Tensor,
    row_source: str,
    id_args: dict[str, object],
) -> None:
    from modular_kernel.ops.kernels.rows import weight_and_sum_kernel

    tokens, hidden = out.shape
    block = choose_hidden_block_size(hidden)
    launch(
        weight_and_sum_kernel,
        (tokens * -(-hidden // block),),
        rows_ptr=rows,
        router_weights_ptr=rows if weights_TK is None else weights_TK,
        out_ptr=out,
        hidden_size=hidden,
        scale=float(scale),
        TOP_K=top_k,
        ROW_SOURCE=row_source,
        HAS_ROUTER_WEIGHTS=weights_TK is not None,
        BLOCK_HIDDEN=block,
        **id_args,
        **pdl_arguments(),
    )


def gather_rows(
    rows_RH: torch.Tensor,
    row_of_pair_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Compute out[t, k] = scale * weights_TK[t, k] * rows_RH[row_of_pair_TK[t, k]].

    rows_RH: (R, H).
    row_of_pair_TK: (T, K) int32. For -1, the output is 0.
    weights_TK: (T, K) float32; None means 1.
    out: output, (T, K, H).
    """
    if out.numel() == 0:
        return
    if not use_triton(out):
        keep = row_of_pair_TK >= 0
        rows = rows_RH[row_of_pair_TK.clamp(min=0).long()]
        out.copy_(_apply_weights(rows, weights_TK, scale, keep))
        return
    _launch_gather(rows_RH, weights_TK, scale, out, "rows", _make_index_arguments(row_of_pair_TK))


def scale_rows(
    rows_TKH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    *,
    scale: float,
    out: torch.Tensor,
    routing: DispatchedRouting | None = None,
    num_local: int = 0,
) -> None:
    """Compute out = scale * weights_TK * rows_TKH, with zero rows for skipped pairs.

    rows_TKH: (T, K, H).
    weights_TK: (T, K) float32; None means 1.
    out: output, (T, K, H), which may be `rows_TKH`.
    routing: if given, only weights of pairs whose expert is on this rank are read. If None, all
        weights must be finite.
    num_local: number of experts on this rank.
    """
    if out.numel() == 0 or (weights_TK is None and scale == 1.0 and out is rows_TKH):
        return
    if not use_triton(out):
        keep = None if routing is None else uncounted_local_ids(routing, num_local) >= 0
        out.copy_(_apply_weights(rows_TKH, weights_TK, scale, keep))
        return
    row_source, ids = _make_row_source(rows_TKH, routing, num_local)
    _launch_gather(rows_TKH, weights_TK, scale, out, row_source, ids)


def _launch_gather(
    rows: torch.Tensor,
    weights_TK: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    row_source: str,
    id_args: dict[str, object],
) -> None:
    from modular_kernel.ops.kernels.rows import gather_rows_kernel

    hidden = out.shape[-1]
    block = choose_hidden_block_size(hidden)
    launch(
        gather_rows_kernel,
        (out.numel() // hidden, -(-hidden // block)),
        rows_ptr=rows,
        router_weights_ptr=rows if weights_TK is None else weights_TK,
        out_ptr=out,
        hidden_size=hidden,
        scale=float(scale),
        ROW_SOURCE=row_source,
        HAS_ROUTER_WEIGHTS=weights_TK is not None,
        BLOCK_HIDDEN=block,
        **id_args,
    )


def _apply_weights(
    rows_TKH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    scale: float,
    keep_TK: torch.Tensor | None,
) -> torch.Tensor:
    values = rows_TKH.float() * scale
    if weights_TK is not None:
        values = values * weights_TK[..., None]
    return values if keep_TK is None else torch.where(keep_TK[..., None], values, 0.0)


def weight_and_sum_ref(
    rows_TKH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    *,
    scale: float,
    out: torch.Tensor,
    keep_TK: torch.Tensor | None = None,
) -> None:
    """Torch reference of `weight_and_sum`.

    keep_TK: (T, K) bool, the pairs to sum; None means all pairs.
    """
    out.copy_(_apply_weights(rows_TKH, weights_TK, 1.0, keep_TK).sum(1) * scale)
