"""`ep_scatter` and `ep_gather` copy received rows into expert order and back, as in SGLang.

The rows of an expert are contiguous and padded to a multiple of ALIGNMENT. DeepGEMM's contiguous
grouped GEMM requires this layout. `DeepGemmExperts` creates it with fewer launches.
"""

from collections.abc import Mapping, Sequence

import torch

from modular_kernel.errors import (
    CapacityError,
    DeviceError,
    DtypeError,
    LayoutError,
    RoutingError,
    ShapeError,
)
from modular_kernel.ops.permute import permute_tokens
from modular_kernel.ops.reduce import gather_weight_and_sum
from modular_kernel.utils.argument_checks import expect
from modular_kernel.utils.tensor_checks import check_no_gradients, check_output, check_tensor

ALIGNMENT = 128  # the number of rows of a block in DeepGEMM's contiguous layout


def padded_counts(num_recv_tokens_per_expert: Sequence[int]) -> list[int]:
    """Round up the number of pairs of each expert to a multiple of ALIGNMENT."""
    expect("num_recv_tokens_per_expert", num_recv_tokens_per_expert, list | tuple)
    for count in num_recv_tokens_per_expert:
        expect("num_recv_tokens_per_expert", count, int)
        if count < 0:
            raise RoutingError("num_recv_tokens_per_expert", got=count, need=">= 0")
    return [-(-count // ALIGNMENT) * ALIGNMENT for count in num_recv_tokens_per_expert]


def ep_scatter(  # noqa: PLR0913  (SGLang's arguments, in its order)
    recv_x: torch.Tensor,
    recv_x_scale: torch.Tensor | None,
    recv_topk: torch.Tensor,
    num_recv_tokens_per_expert: Sequence[int],
    expert_start_loc: torch.Tensor,
    output_tensor: torch.Tensor,
    output_tensor_scale: torch.Tensor | None,
    m_indices: torch.Tensor,
    output_index: torch.Tensor,
) -> None:
    """Copy each received row once for each of its local experts, in the order of experts.

    A pair is a received row together with one of its K experts.

    recv_x: (R, H).
    recv_x_scale: the scales of recv_x, (R, G) float32 for G scale groups, or None.
    recv_topk: (R, K) int32 or int64, local ids, -1 for experts of other ranks.
    num_recv_tokens_per_expert: the number of pairs of each expert. `padded_counts` rounds it up.
    expert_start_loc: output (e,) int32, the first row of each expert in output_tensor.
    output_tensor: output (M, H). M is at least the sum of the padded counts. Padding rows are not
        written.
    output_tensor_scale: output (M, G), the scales of output_tensor, or None.
    m_indices: output (M,) int32, the expert of each row, -1 for padding.
    output_index: output (R, K) int32, the row of each pair, -1 for a pair without a row.

    Pairs of an expert keep the order of recv_topk. Raise InputError for tensors that do not match,
    CapacityError if M is too small, and RoutingError if num_recv_tokens_per_expert differs from the
    counts in recv_topk. Comparing the counts synchronizes with the GPU.
    """
    inputs = {"recv_x": recv_x, "recv_topk": recv_topk}
    outputs = {"expert_start_loc": expert_start_loc, "output_tensor": output_tensor}
    outputs |= {"m_indices": m_indices, "output_index": output_index}
    if (recv_x_scale is None) != (output_tensor_scale is None):
        got = "one of them"
        raise ShapeError("recv_x_scale and output_tensor_scale", got=got, need="both or neither")
    if recv_x_scale is not None and output_tensor_scale is not None:
        inputs["recv_x_scale"] = recv_x_scale
        outputs["output_tensor_scale"] = output_tensor_scale
    _check_tensors(inputs, outputs)
    row_counts = padded_counts(num_recv_tokens_per_expert)
    experts, (tokens, hidden) = len(row_counts), recv_x.shape
    num_rows, capacity = sum(row_counts), output_tensor.shape[0]
    _expect_shape("recv_topk", recv_topk, (tokens, recv_topk.shape[-1]))
    _expect_shape("expert_start_loc", expert_start_loc, (experts,))
    _expect_shape("output_tensor", output_tensor, (capacity, hidden))
    _expect_shape("m_indices", m_indices, (capacity,))
    _expect_shape("output_index", output_index, tuple(recv_topk.shape))
    if recv_x_scale is not None and output_tensor_scale is not None:
        groups = recv_x_scale.shape[-1]
        _expect_shape("recv_x_scale", recv_x_scale, (tokens, groups))
        _expect_shape("output_tensor_scale", output_tensor_scale, (capacity, groups))
    if output_tensor.dtype is not recv_x.dtype:
        raise DtypeError("output_tensor", got=output_tensor.dtype, need=recv_x.dtype)
    if num_rows > capacity:
        raise CapacityError("output_tensor", got=f"{capacity} rows", need=f">= {num_rows}")
    device = recv_x.device
    ids = recv_topk.reshape(-1).long()
    # Element 0 counts the skipped pairs, and element i + 1 counts the pairs of expert i.
    pair_counts = torch.bincount(ids.clamp(min=-1) + 1, minlength=experts + 1).tolist()
    if len(pair_counts) != experts + 1 or pair_counts[1:] != list(num_recv_tokens_per_expert):
        got = f"{list(num_recv_tokens_per_expert)}"
        need = f"{pair_counts[1:]}, the counts in recv_topk"
        raise RoutingError("num_recv_tokens_per_expert", got=got, need=need)
    counts = torch.tensor(row_counts, dtype=torch.int64, device=device)
    starts = counts.cumsum(0) - counts
    expert_start_loc.copy_(starts)
    order = ids.argsort(stable=True)
    sorted_ids = ids[order]
    first_pair = torch.tensor([0, *pair_counts[:-1]], dtype=torch.int64, device=device).cumsum(0)
    position_in_expert = torch.arange(len(ids), device=device) - first_pair[sorted_ids + 1]
    pair_rows = torch.where(
        sorted_ids < 0, -1, position_in_expert + starts[sorted_ids.clamp(min=0)]
    )
    flat_index = torch.empty_like(ids).scatter_(0, order, pair_rows)
    output_index.copy_(flat_index.view_as(output_index))
    m_indices.fill_(-1)
    has_row = flat_index >= 0
    m_indices[flat_index[has_row]] = ids[has_row].int()
    permute_tokens(
        recv_x, output_index, None, rows_RH=output_tensor,
        scale_TG=recv_x_scale, scale_rows_RG=output_tensor_scale,
    )  # fmt: skip


def ep_gather(
    input_tensor: torch.Tensor,
    recv_topk_ids: torch.Tensor,
    recv_topk_weight: torch.Tensor,
    input_index: torch.Tensor,
    output_tensor: torch.Tensor,
) -> None:
    """Write the weighted sum of the results of each received row to output_tensor.

    input_tensor: (M, H).
    recv_topk_ids: (R, K), not read.
    recv_topk_weight: (R, K) float32.
    input_index: output_index from `ep_scatter`. Pairs with -1 are skipped.
    output_tensor: (R, H).

    Sums are accumulated in float32. The values of input_index are checked on a CPU, but not on a
    GPU.
    """
    inputs = {"input_tensor": input_tensor, "recv_topk_ids": recv_topk_ids}
    inputs |= {"recv_topk_weight": recv_topk_weight, "input_index": input_index}
    _check_tensors(inputs, {"output_tensor": output_tensor})
    shape = tuple(input_index.shape)
    _expect_shape("recv_topk_ids", recv_topk_ids, shape)
    _expect_shape("recv_topk_weight", recv_topk_weight, shape)
    _expect_shape("output_tensor", output_tensor, (shape[0], input_tensor.shape[1]))
    if recv_topk_weight.dtype is not torch.float32:
        raise DtypeError("recv_topk_weight", got=recv_topk_weight.dtype, need=torch.float32)
    if output_tensor.dtype is not input_tensor.dtype:
        raise DtypeError("output_tensor", got=output_tensor.dtype, need=input_tensor.dtype)
    rows = input_tensor.shape[0]
    is_out_of_range = (input_index < -1) | (input_index >= rows)
    if input_index.device.type == "cpu" and bool(is_out_of_range.any()):
        got = int(input_index[is_out_of_range][0])
        raise RoutingError("input_index", got=got, need=f"-1 to {rows - 1}")
    gather_weight_and_sum(input_tensor, input_index, recv_topk_weight, scale=1.0, out=output_tensor)


def _check_tensors(inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
    """Check devices, layouts, gradients, index dtypes, and that outputs overlap no other tensor."""
    tensors = {**inputs, **outputs}
    first_tensor = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if tensor.device != first_tensor.device:
            raise DeviceError(name, got=tensor.device, need=first_tensor.device)
        if not tensor.is_contiguous():
            raise LayoutError(name, got=f"strides {tensor.stride()}", need="contiguous")
        dims = 1 if name in ("expert_start_loc", "m_indices") else 2
        if tensor.dim() != dims:
            raise ShapeError(name, got=tuple(tensor.shape), need=f"{dims} dimensions")
    check_no_gradients(tensors)
    for name, tensor in outputs.items():
        check_output(name, tensor, {key: other for key, other in tensors.items() if key != name})
    for name in ("expert_start_loc", "m_indices", "output_index", "input_index"):
        if name in tensors and tensors[name].dtype is not torch.int32:
            raise DtypeError(name, got=tensors[name].dtype, need=torch.int32)
    for name in ("recv_topk", "recv_topk_ids"):
        if name in tensors and tensors[name].dtype not in (torch.int32, torch.int64):
            raise DtypeError(name, got=tensors[name].dtype, need="int32 or int64")


def _expect_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ShapeError(name, got=tuple(tensor.shape), need=shape)
