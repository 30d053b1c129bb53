"""A stand-in for FlashInfer's NVLinkOneSidedAlltoAll (0.7.4), in plain torch on any process group.

The signatures and the checks of arguments are the library's. The stand-in also raises where the
library would hang or ignore an error. The rows from a rank arrive in random order, and rows that no
rank sent are NaN, with the invalid expert number. Two instances with the same layout share a
workspace, on which one round at a time may run, as in the library.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from flashinfer_comm import TorchDistBackend, _all_gather, _unwritten_rows, require

__all__ = ["TorchDistBackend"]
TOP_KS = {1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 22}
MAX_PAYLOADS, MAX_RANKS, ALIGNMENT, CACHE_LINE = 4, 64, 256, 128


def align(nbytes, alignment):
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True)
class BootstrapConfig:
    world_size: int
    rank: int
    stream: int = 0
    auto_bootstrap: bool = True
    device: Any = field(default=None, kw_only=True)
    nccl_comm: Any = None
    process_group: Any = None
    tcp_store: Any = None

    def __post_init__(self):
        require(0 <= self.rank < self.world_size, "rank within the world")


@dataclass(frozen=True)
class MoEEpCommParams:
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: Any = None
    dispatch_format: Any = None
    invalid_expert_id: int = -1

    def __post_init__(self):
        for name in ("num_experts", "top_k", "max_tokens_per_rank", "hidden_size"):
            value = getattr(self, name)
            require(isinstance(value, int) and value > 0, f"{name} must be a positive int")
        require(self.top_k <= self.num_experts, "top_k exceeds num_experts")
        require(not 0 <= self.invalid_expert_id < self.num_experts, "invalid_expert_id is invalid")
        require(self.dispatch_format is None, "this stand-in has no dispatch formats")

    @property
    def dispatch_bytes_per_token(self):
        return self.hidden_size * self.dtype.itemsize


@dataclass
class NVLinkOneSidedConfig:
    backend_name: str = "nvlink_one_sided"
    extra_payload_bytes_per_token: int = 0
    eplb_stats_num_experts: int = 0
    enable_rank_mask: bool = False
    use_low_precision_combine: bool = False
    comm_backend: Any = None
    cft: Any = None
    cft_max_tokens_for_dispatch: int = 128
    cft_max_tokens_for_combine: int = 128
    lamport: Any = None
    lamport_max_tokens: Any = None
    timeout_sec: int = 300
    enable_pdl: Any = None


class MoEEpDispatchResult(NamedTuple):
    hidden_states: Any
    topk_ids: Any
    topk_weights: Any
    tokens_per_rank: int
    hidden_states_scale: Any = None
    eplb_gathered_stats: Any = None


class NVLinkOneSidedAlltoAll:
    workspaces = {}  # noqa: RUF012
    made = 0

    def __init__(self, bootstrap, params, config=None):
        require(config is not None, "a configuration, whose transports are decided")
        require(config.cft is False and config.lamport is False, "no other transport")
        comm = config.comm_backend
        require(comm.Get_size() == bootstrap.world_size, "the communicator's size")
        require(comm.Get_rank() == bootstrap.rank, "the communicator's rank")
        require(params.num_experts % bootstrap.world_size == 0, "equal numbers of experts")
        require(config.extra_payload_bytes_per_token >= 0, "extra_payload_bytes_per_token")
        require(params.top_k in TOP_KS, f"top_k={params.top_k} is supported")
        require(bootstrap.world_size <= MAX_RANKS, "at most 64 ranks")
        self.comm = comm.Split(0, bootstrap.rank)
        self.rank, self.ranks, self.params = bootstrap.rank, bootstrap.world_size, params
        tokens = self.ranks * params.max_tokens_per_rank
        self.dispatch_nbytes = align(
            tokens
            * (
                params.dispatch_bytes_per_token
                + 2 * params.top_k * 4
                + config.extra_payload_bytes_per_token
            )
            + MAX_PAYLOADS * ALIGNMENT,
            ALIGNMENT,
        )
        combine_nbytes = align(tokens * params.hidden_size * params.dtype.itemsize, ALIGNMENT)
        layout = self.dispatch_nbytes, combine_nbytes, params.max_tokens_per_rank, params.top_k
        require(len(set(self.comm.allgather(layout))) == 1, "the same layout on every rank")
        self.key = self.rank, self.ranks, layout
        self.state = self.workspaces.setdefault(self.key, {"owner": None, "refcount": 0})
        self.state["refcount"] += 1
        self.round = None
        NVLinkOneSidedAlltoAll.made += 1

    def destroy(self):
        require(self.round is None, "freed between a dispatch and its combine")
        state, self.state = self.state, None
        if state is not None:
            state["refcount"] -= 1
            if not state["refcount"]:
                del self.workspaces[self.key]

    def dispatch(
        self, hidden_states, topk_ids, topk_weights=None, *, hidden_states_scale=None,
        runtime_max_tokens_per_rank=None, eplb_local_stats=None, active_rank_mask=None,
    ):  # fmt: skip
        require(self.state is not None, "destroyed")
        require(self.state["owner"] is None, "a dispatch on this workspace awaits its combine")
        params = self.params
        max_tokens = runtime_max_tokens_per_rank or params.max_tokens_per_rank
        require(0 < max_tokens <= params.max_tokens_per_rank, "tokens within the capacity")
        scales = [] if hidden_states_scale is None else [hidden_states_scale]
        weights = [] if topk_weights is None else [topk_weights]
        payloads = [hidden_states, *scales, topk_ids, *weights]
        self._check_payloads(topk_ids, payloads, max_tokens)
        sent_by_rank = _all_gather(self.comm, (max_tokens, len(payloads), *payloads))
        require(
            len({sent[:2] for sent in sent_by_rank}) == 1, "as many payloads and tokens on ranks"
        )
        out = [_unwritten_rows(self.ranks, max_tokens, payload) for payload in payloads]
        out[1 + len(scales)].fill_(params.invalid_expert_id)
        received = []
        per_rank = params.num_experts // self.ranks
        for source, (_, _, *sent_payloads) in enumerate(sent_by_rank):
            ids = sent_payloads[1 + len(scales)].long()
            is_valid = (ids >= 0) & (ids < params.num_experts)
            is_here = is_valid & (ids.div(per_rank, rounding_mode="floor") == self.rank)
            tokens = is_here.any(1).nonzero().flatten()
            order = torch.Generator().manual_seed(source + 7 * self.rank)
            tokens = tokens[torch.randperm(len(tokens), generator=order)]
            received.append(tokens.tolist())
            for out_rows, payload in zip(out, sent_payloads, strict=True):
                out_rows[source, : len(tokens)] = payload[tokens]
        self.round = received, len(topk_ids), max_tokens
        self.state["owner"] = self
        rows = [payload.flatten(0, 1) for payload in out]
        return MoEEpDispatchResult(
            rows[0],
            rows[1 + len(scales)],
            rows[-1] if weights else None,
            max_tokens,
            rows[1] if scales else None,
        )

    def combine(self, expert_output, *, output=None, active_rank_mask=None):
        require(self.round is not None, "combine called before dispatch")
        received_here, num_tokens, max_tokens = self.round
        require(expert_output.dim() in (2, 3), "expert_output must be 2D or 3D")
        payload = expert_output.reshape(self.ranks, max_tokens, -1)
        require(expert_output.is_contiguous(), "contiguous payload")
        require(payload.dtype in (torch.bfloat16, torch.float16), "a combine dtype")
        if output is None:
            output = torch.empty(num_tokens, payload.shape[2], dtype=payload.dtype)
        require(output.is_contiguous(), "output must be contiguous")
        require(tuple(output.shape) == (num_tokens, payload.shape[2]), "an output row per token")
        require(output.dtype is payload.dtype, "output of payload's dtype")
        total = torch.zeros(num_tokens, payload.shape[2])
        for received, rows in _all_gather(self.comm, (received_here, payload)):
            for index, token in enumerate(received[self.rank]):
                total[token] += rows[self.rank, index].float()
        output.copy_(total)
        self.round = self.state["owner"] = None
        return output

    def _check_payloads(self, ids, payloads, max_tokens):
        require(ids.dtype is torch.int32 and ids.is_contiguous(), "contiguous int32 ids")
        require(ids.dim() == 2 and ids.shape[1] == self.params.top_k, "topk_ids shape")
        require(len(ids) <= max_tokens, "tokens within the workspace")
        require(len(payloads) <= MAX_PAYLOADS, "Too many payloads")
        nbytes = 0
        for payload in payloads:
            require(payload.dim() == 2, "payload must be 2D")
            require(payload.is_contiguous(), "contiguous payload")
            require(len(payload) == len(ids), "payload first dimension must match")
            nbytes += self.ranks * max_tokens * payload.shape[1] * payload.element_size()
            nbytes = align(nbytes, CACHE_LINE)
        require(nbytes <= self.dispatch_nbytes, "Dispatch payload exceeds its workspace capacity")
