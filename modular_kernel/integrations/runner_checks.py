"""Checks of tensors from an external dispatcher.

Kernels compute addresses from their sizes and values, so invalid ones would cause out-of-bounds
reads.
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

_IDS = (torch.int32, torch.int64)


def check_dispatched(dispatched: DispatchOutput) -> None:
    """Check the tensors of a dispatch output.

    In the standard format, only hidden_states and expert-sorted routing data are checked here; the
    call itself checks the rest. The values of row counts are checked on a CPU only, because reading
    them on a GPU would synchronize. Raises DtypeError, ShapeError, DeviceError, LayoutError or
    RoutingError.
    """
    x = dispatched.hidden_states
    check_tensor("hidden_states", x)
    if isinstance(dispatched, StandardDispatchOutput):
        _check_dims("hidden_states", x, "(T, H)")
        _check_sorted(dispatched.topk_output)
        return
    batched = isinstance(dispatched, DeepEPLLDispatchOutput)
    _check_dims("hidden_states", x, "(e, C, H)" if batched else "(R, H)")
    if dispatched.hidden_states_scale is not None:
        _on_same_device("hidden_states_scale", dispatched.hidden_states_scale, x)
    rows = None if batched else len(x)
    _check_pairs(dispatched.topk_ids, dispatched.topk_weights, x, rows)
    if isinstance(dispatched, DeepEPLLDispatchOutput):
        _check_counts(dispatched.masked_m, x)


def _check_sorted(topk_output: object) -> None:
    """Check the tensors of an expert-sorted routing. Other routings are checked by the call."""
    if isinstance(topk_output, TritonKernelTopKOutput):
        expect("routing_data", topk_output.routing_data, RoutingData)
        expect("gather_indx", topk_output.gather_indx, Permutation)
        data, rows = topk_output.routing_data, topk_output.gather_indx
        check_tensor("gather_indx.src_indx", rows.src_indx)
        for name in ("gate_scal", "expt_hist"):
            if getattr(data, name) is not None:
                check_tensor(f"routing_data.{name}", getattr(data, name))


def _check_pairs(ids: object, weights: object, x: torch.Tensor, rows: int | None) -> None:
    """Check ids and weights (R, K).

    rows: the required R; None if ids are per token, not per row of x.
    """
    ids, weights = _on_same_device("topk_ids", ids, x), _on_same_device("topk_weights", weights, x)
    _check_dims("topk_ids", ids, "(T, K)" if rows is None else "(R, K)")
    if ids.dtype not in _IDS:
        raise DtypeError("topk_ids", got=ids.dtype, need="int32 or int64")
    if weights.dtype is not torch.float32:
        raise DtypeError("topk_weights", got=weights.dtype, need="float32")
    if rows is not None and len(ids) != rows:
        raise ShapeError("topk_ids", got=tuple(ids.shape), need=f"(R, K), R = {rows}")
    if weights.shape != ids.shape:
        raise ShapeError("topk_weights", got=tuple(weights.shape), need=tuple(ids.shape))


def _check_counts(counts: object, x: torch.Tensor) -> None:
    counts = _on_same_device("masked_m", counts, x)
    experts, capacity = x.shape[:2]
    if counts.dtype is not torch.int32:
        raise DtypeError("masked_m", got=counts.dtype, need="int32")
    if tuple(counts.shape) != (experts,) or not counts.is_contiguous():
        got = f"{tuple(counts.shape)}, strides {counts.stride()}"
        raise ShapeError("masked_m", got=got, need=f"(e,), e = {experts}, contiguous")
    if counts.device.type == "cpu" and bool(((counts < 0) | (counts > capacity)).any()):
        need = f"0 to C = {capacity} rows of each expert"
        raise RoutingError("masked_m", got=counts.tolist(), need=need)


def _on_same_device(what: str, tensor: object, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor after checking that it is on the device of x."""
    check_tensor(what, tensor)
    assert isinstance(tensor, torch.Tensor)
    if tensor.device != x.device:
        raise DeviceError(what, got=tensor.device, need=f"{x.device}, where hidden_states are")
    return tensor


def _check_dims(what: str, tensor: torch.Tensor, legend: str) -> None:
    if tensor.dim() != legend.count(",") + 1:
        raise ShapeError(what, got=tuple(tensor.shape), need=legend)
