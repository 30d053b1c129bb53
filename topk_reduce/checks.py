"""Check the arguments of a reducer that is called directly, not by a FusedMoEModularKernel."""

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


def check_rows(expert_rows: object, out: torch.Tensor, shape: str) -> None:
    """Raise an InputError if a reducer does not accept these arguments.

    A FusedMoEModularKernel checks its arguments itself and sets `expert_rows.checked` to True.
    Reducers do not call this function then.

    expert_rows: the ExpertRows that the caller passed, not yet known to be of this type.
    out: the output tensor that the caller passed.
    shape: the shape that `expert_rows.rows` must have: "(T, H)", "(T, K, H)" or "(e, C, H)".
        "(e, C, H)" requires row_of_pair_TK.
    """
    expect("rows", expert_rows, ExpertRows)
    assert isinstance(expert_rows, ExpertRows)
    expect("rows: scale", expert_rows.scale, float)
    expect("rows: routing", expert_rows.routing, DispatchedRouting | None)
    expect("rows: num_local", expert_rows.num_local, Annotated[int, Between(0, MAX_INT32)])
    expect("rows: checked", expert_rows.checked, bool)
    rows = check_tensor("rows", expert_rows.rows)
    device = rows.device
    check_tensor("out", out, device=device)
    inputs = {
        "row_of_pair_TK": expert_rows.row_of_pair_TK,
        "topk_weights_TK": expert_rows.topk_weights_TK,
    }
    if expert_rows.routing is not None:
        inputs["topk_ids_TK"] = check_tensor("topk_ids_TK", expert_rows.routing.topk_ids_TK)
        inputs["expert_map"] = expert_rows.routing.expert_map
    check_tensors(inputs, optional=inputs, device=device)
    check_no_gradients({"rows": rows, "out": out, "topk_weights_TK": expert_rows.topk_weights_TK})
    _check_shapes(expert_rows, out, shape)
    rows_if_distinct = {} if out is rows else {"rows": rows}
    check_output("out", out, inputs | rows_if_distinct)


def _check_shapes(expert_rows: ExpertRows, out: torch.Tensor, shape: str) -> None:
    rows, row_of_pair_TK, weights_TK = (
        expert_rows.rows,
        expert_rows.row_of_pair_TK,
        expert_rows.topk_weights_TK,
    )
    if rows.dim() != shape.count(",") + 1:
        raise ShapeError("rows", got=tuple(rows.shape), need=shape)
    if shape == "(e, C, H)" and row_of_pair_TK is None:
        raise ShapeError("row_of_pair_TK", got=None, need="(T, K) int32")
    # (T, K), or (T,) if the rows are already summed.
    pair_shape = tuple(rows.shape[:-1] if row_of_pair_TK is None else row_of_pair_TK.shape)
    out_shapes = [(*pair_shape[:1], rows.shape[-1]), (*pair_shape, rows.shape[-1])]
    if tuple(out.shape) not in out_shapes:
        raise ShapeError("out", got=tuple(out.shape), need=" or ".join(map(str, out_shapes)))
    _check_format("rows", rows, None, (rows.dtype,))
    _check_format("out", out, None, (rows.dtype,))
    _check_format("row_of_pair_TK", row_of_pair_TK, 2, (torch.int32,))
    if len(pair_shape) == 2:
        if weights_TK is not None and tuple(weights_TK.shape) != pair_shape:
            raise ShapeError("topk_weights_TK", got=tuple(weights_TK.shape), need=pair_shape)
        _check_format("topk_weights_TK", weights_TK, 2, (torch.float32,))
    if expert_rows.routing is not None:
        _check_routing(expert_rows.routing, pair_shape)


def _check_routing(routing: DispatchedRouting, pair_shape: tuple[int, ...]) -> None:
    expect("rows: num_experts", routing.num_experts, Count)
    ids_TK, expert_map_E = routing.topk_ids_TK, routing.expert_map
    _check_format("topk_ids_TK", ids_TK, 2, (torch.int32, torch.int64))
    if tuple(ids_TK.shape) != pair_shape:
        raise ShapeError("topk_ids_TK", got=tuple(ids_TK.shape), need=pair_shape)
    if expert_map_E is not None and tuple(expert_map_E.shape) != (routing.num_experts,):
        raise ShapeError("expert_map", got=tuple(expert_map_E.shape), need=(routing.num_experts,))
    _check_format("expert_map", expert_map_E, 1, (torch.int32,))


def _check_format(
    name: str, tensor: torch.Tensor | None, num_dims: int | None, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise an InputError if `tensor` has another dtype or rank, or is not contiguous.

    num_dims: the number of dimensions; None accepts any number.
    """
    if tensor is None:
        return
    if tensor.dtype not in dtypes:
        need = " or ".join(map(dtype_name, dtypes))
        raise DtypeError(name, got=dtype_name(tensor.dtype), need=need)
    if num_dims not in (None, tensor.dim()):
        raise ShapeError(name, got=tuple(tensor.shape), need=f"{num_dims} dimensions")
    if not tensor.is_contiguous():
        raise LayoutError(name, got=f"strides {tensor.stride()}", need="contiguous")
