"""Convert between token-major and expert-major routing.

Token-major routing has the ids and weights of each token's experts, (T, K). Expert-major routing
has the pairs (tokens together with one of their experts) sorted by expert. Names of fields follow
triton_kernels.
"""

import torch

from modular_kernel.errors import ConfigurationError, ShapeError
from modular_kernel.spec.router import (
    Permutation,
    RoutingData,
    StandardTopKOutput,
    TritonKernelTopKOutput,
)


def to_expert_major(topk_output: StandardTopKOutput, num_experts: int) -> TritonKernelTopKOutput:
    """Sort pairs by expert, stably. Pairs with ids outside [0, num_experts) do not get a row.

    topk_output: weights, (T, K) float32, and ids, (T, K). Further fields are not read.

    Raises ShapeError if the shapes of weights and ids differ.
    """
    weights_TK, ids_TK = topk_output[:2]
    if ids_TK.dim() != 2 or weights_TK.shape != ids_TK.shape:
        got = f"{tuple(weights_TK.shape)} and {tuple(ids_TK.shape)}"
        raise ShapeError("topk_weights and topk_ids", got=got, need="both of shape (T, K)")
    ids = ids_TK.flatten().long()
    ids = ids.where((ids >= 0) & (ids < num_experts), num_experts)
    order = ids.argsort(stable=True)
    valid = ids[order] < num_experts
    rows = torch.arange(len(ids), device=ids.device)
    pair_of_row = order.where(valid, -1)
    row_of_pair = torch.empty_like(order)
    row_of_pair[order] = rows.where(valid, -1)
    gate = (weights_TK.flatten().float()[order]).where(valid, 0.0)
    hist = torch.bincount(ids, minlength=num_experts + 1)[:num_experts]
    data = RoutingData(ids_TK.shape[1], gate, hist.to(torch.int32), num_experts)
    pair, row = pair_of_row.to(torch.int32), row_of_pair.to(torch.int32)
    return TritonKernelTopKOutput(data, Permutation(pair, row), Permutation(row, pair))


def to_token_major(topk_output: TritonKernelTopKOutput) -> StandardTopKOutput:
    """Convert the result of `to_expert_major` back. Pairs without a row get id -1 and weight 0."""
    data, gather, _ = topk_output
    top_k, pairs = data.n_expts_act, gather.src_indx.numel()
    if data.expt_hist is None:
        raise ConfigurationError(
            "routing_data.expt_hist", got=None, need="the number of rows of each expert, (E,)"
        )
    if top_k < 1 or pairs % top_k or data.gate_scal.numel() != pairs:
        got = f"{pairs} pairs, {data.gate_scal.numel()} gates, K = {top_k}"
        raise ShapeError("routing_data", got=got, need="T * K pairs, and a gate for each pair")
    rows = torch.arange(pairs, device=gather.src_indx.device)
    expert = torch.searchsorted(data.expt_hist.cumsum(0), rows, right=True)
    valid = gather.src_indx >= 0
    ids = torch.full((pairs,), -1, dtype=torch.int32, device=rows.device)
    weights = torch.zeros(pairs, dtype=torch.float32, device=rows.device)
    pair = gather.src_indx[valid].long()
    ids[pair], weights[pair] = expert[valid].to(torch.int32), data.gate_scal[valid].float()
    return StandardTopKOutput(weights.view(-1, top_k), ids.view(-1, top_k))
