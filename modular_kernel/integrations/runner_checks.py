"""Checks of the tensors that an external dispatcher passes to `MoeRunner`.

Kernels compute addresses from the sizes and values of these tensors, so invalid tensors would cause
out-of-bounds reads.
"""

import torch

from modular_kernel.errors import DeviceError, DtypeError, RoutingError, ShapeError
from modular_kernel.integrations.runner_formats import (
    DeepEPLLDispatchOutput,
    DispatchOutput,
    StandardDispatchOutput,
)
from modular_kernel.spec.router import Permutation, RoutingData, TritonKernelTopKOutput
from modular_kernel.utils.argument_checks import expect
from modular_kernel.utils.tensor_checks import check_tensor

_ID_DTYPES = (torch.int32, torch.int64)


def check_dispatched(dispatched: DispatchOutput) -> None:
    """Check the tensors of a dispatch output.

    In the standard format, only hidden_states and expert-sorted routing data are checked, because
    the kernel checks the other tensors. The values of row counts are checked only on a CPU, because
    reading them on a GPU would synchronize. Raises DtypeError, ShapeError, DeviceError, LayoutError
    or RoutingError.
    """
    x = dispatched.hidden_states
    check_tensor("hidden_states", x)
    if isinstance(dispatched, StandardDispatchOutput):
        _check_dims("hidden_states", x, "(T, H)")
        _check_sorted(dispatched.topk_output)
        return
    is_batched = isinstance(dispatched, DeepEPLLDispatchOutput)
    _check_dims("hidden_states", x, "(e, C, H)" if is_batched else "(R, H)")
    if dispatched.hidden_states_scale is not None:
        _expect_on_device_of_x("hidden_states_scale", dispatched.hidden_states_scale, x)
    num_rows = None if is_batched else len(x)
    _check_pairs(dispatched.topk_ids, dispatched.topk_weights, x, num_rows)
    if isinstance(dispatched, DeepEPLLDispatchOutput):
        _check_counts(dispatched.masked_m, x)


def _check_sorted(topk_output: object) -> None:
    """Check the tensors of an expert-sorted routing. The kernel checks other routings."""
    if isinstance(topk_output, TritonKernelTopKOutput):
        expect("routing_data", topk_output.routing_data, RoutingData)
        expect("gather_indx", topk_output.gather_indx, Permutation)
        data, rows = topk_output.routing_data, topk_output.gather_indx
        check_tensor("gather_indx.src_indx", rows.src_indx)
        for name in ("gate_scal", "expt_hist"):
            if getattr(data, name) is not None:
                check_tensor(f"routing_data.{name}", getattr(data, name))


def _check_pairs(ids: object, weights: object, x: torch.Tensor, num_rows: int | None) -> None:
    """Check ids and weights, (R, K) or (T, K).

    num_rows: the required R; None if ids and weights are (T, K).
    """
    ids = _expect_on_device_of_x("topk_ids", ids, x)
    weights = _expect_on_device_of_x("topk_weights", weights, x)
    _check_dims("topk_ids", ids, "(T, K)" if num_rows is None else "(R, K)")
    if ids.dtype not in _ID_DTYPES:
        raise DtypeError("topk_ids", got=ids.dtype, need="int32 or int64")
    if weights.dtype is not torch.float32:
        raise DtypeError("topk_weights", got=weights.dtype, need="float32")
    if num_rows is not None and len(ids) != num_rows:
        raise ShapeError("topk_ids", got=tuple(ids.shape), need=f"(R, K) with R = {num_rows}")
    if weights.shape != ids.shape:
        raise ShapeError("topk_weights", got=tuple(weights.shape), need=tuple(ids.shape))


def _check_counts(counts: object, x: torch.Tensor) -> None:
    counts = _expect_on_device_of_x("masked_m", counts, x)
    experts, capacity = x.shape[:2]
    if counts.dtype is not torch.int32:
        raise DtypeError("masked_m", got=counts.dtype, need="int32")
    if tuple(counts.shape) != (experts,) or not counts.is_contiguous():
        got = f"{tuple(counts.shape)}, strides {counts.stride()}"
        raise ShapeError("masked_m", got=got, need=f"a contiguous (e,) with e = {experts}")
    if counts.device.type == "cpu" and bool(((counts < 0) | (counts > capacity)).any()):
        need = f"0 to C = {capacity} rows for each expert"
        raise RoutingError("masked_m", got=counts.tolist(), need=need)


def _expect_on_device_of_x(what: str, tensor: object, x: torch.Tensor) -> torch.Tensor:
    """Return `tensor` after checking that it is on the device of x."""
    check_tensor(what, tensor)
    assert isinstance(tensor, torch.Tensor)
    if tensor.device != x.device:
        raise DeviceError(what, got=tensor.device, need=f"{x.device}, as hidden_states")
    return tensor


def _check_dims(what: str, tensor: torch.Tensor, dims: str) -> None:
    """Check the number of dimensions. `dims` is text such as "(T, H)"."""
    if tensor.dim() != dims.count(",") + 1:
        raise ShapeError(what, got=tuple(tensor.shape), need=dims)
