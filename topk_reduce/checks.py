"""Argument checks of reducers, for callers other than a kernel."""

from typing import Annotated

import torch

from modular_kernel.errors import DtypeError, LayoutError, ShapeError
from modular_kernel.spec.problem import dtype_name
from modular_kernel.tensors import DispatchedRouting, ExpertRows
from modular_kernel.utils.argument_checks import MAX_INT32, Between, Count, expect
from modular_kernel.utils.tensor_checks import (
    check_no_gradients,
    check_output,
    check_tensor,
    check_tensors,
)


def check_rows(given: object, out: torch.Tensor, shape: str) -> None:
    """Raise an InputError for arguments that a reducer cannot take.

    A reducer calls this unless `given.checked`; a kernel has checked its arguments already.

    given: what the reducer was called with.
    shape: that of `given.rows`: "(T, H)", "(T, K, H)", or "(e, C, H)", which needs row_of_pair_TK.
        A reducer that takes both of the latter passes "(T, K, H)" if row_of_pair_TK is None.
    """
    expect("rows", given, ExpertRows)
    assert isinstance(given, ExpertRows)
    expect("rows: scale", given.scale, float)
    expect("rows: routing", given.routing, DispatchedRouting | None)
    expect("rows: num_local", given.num_local, Annotated[int, Between(0, MAX_INT32)])
    expect("rows: checked", given.checked, bool)
    rows = check_tensor("rows", given.rows)
    device = rows.device
    check_tensor("out", out, device=device)
    inputs = {"row_of_pair_TK": given.row_of_pair_TK, "topk_weights_TK": given.topk_weights_TK}
    if given.routing is not None:
        inputs["topk_ids_TK"] = check_tensor("topk_ids_TK", given.routing.topk_ids_TK)
        inputs["expert_map"] = given.routing.expert_map
    check_tensors(inputs, optional=inputs, device=device)
    check_no_gradients({"rows": rows, "out": out, "topk_weights_TK": given.topk_weights_TK})
    _check_shapes(given, out, shape)
    rows_if_distinct = {} if out is rows else {"rows": rows}
    check_output("out", out, inputs | rows_if_distinct)


def _check_shapes(given: ExpertRows, out: torch.Tensor, shape: str) -> None:
    rows, pairs, weights_TK = given.rows, given.row_of_pair_TK, given.topk_weights_TK
    if rows.dim() != shape.count(",") + 1:
        raise ShapeError("rows", got=tuple(rows.shape), need=shape)
    if shape == "(e, C, H)" and pairs is None:
        raise ShapeError("row_of_pair_TK", got=None, need="(T, K) int32")
    leading = tuple(rows.shape[:-1]) if pairs is None else tuple(pairs.shape)
    sizes = [(*leading[:1], rows.shape[-1]), (*leading, rows.shape[-1])]
    if tuple(out.shape) not in sizes:
        raise ShapeError("out", got=tuple(out.shape), need=" or ".join(map(str, sizes)))
    _check("rows", rows, None, (rows.dtype,))
    _check("out", out, None, (rows.dtype,))
    _check("row_of_pair_TK", pairs, 2, (torch.int32,))
    if len(leading) == 2:
        if weights_TK is not None and tuple(weights_TK.shape) != leading:
            raise ShapeError("topk_weights_TK", got=tuple(weights_TK.shape), need=leading)
        _check("topk_weights_TK", weights_TK, 2, (torch.float32,))
    if given.routing is not None:
        _check_routing(given.routing, leading)


def _check_routing(routing: DispatchedRouting, lead: tuple[int, ...]) -> None:
    expect("rows: num_experts", routing.num_experts, Count)
    ids_TK, map_E = routing.topk_ids_TK, routing.expert_map
    _check("topk_ids_TK", ids_TK, 2, (torch.int32, torch.int64))
    if tuple(ids_TK.shape) != lead:
        raise ShapeError("topk_ids_TK", got=tuple(ids_TK.shape), need=lead)
    if map_E is not None and tuple(map_E.shape) != (routing.num_experts,):
        raise ShapeError("expert_map", got=tuple(map_E.shape), need=(routing.num_experts,))
    _check("expert_map", map_E, 1, (torch.int32,))


def _check(
    what: str, tensor: torch.Tensor | None, dims: int | None, dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor is None:
        return
    if tensor.dtype not in dtypes:
        need = " or ".join(map(dtype_name, dtypes))
        raise DtypeError(what, got=dtype_name(tensor.dtype), need=need)
    if dims not in (None, tensor.dim()):
        raise ShapeError(what, got=tuple(tensor.shape), need=f"{dims} dimensions")
    if not tensor.is_contiguous():
        raise LayoutError(what, got=f"strides {tensor.stride()}", need="contiguous")
