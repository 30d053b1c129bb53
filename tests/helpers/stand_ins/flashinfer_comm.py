"""A stand-in for FlashInfer's one-sided all-to-all (0.7.2), in plain torch on any process group.

The stand-in raises where the library would access memory outside of its workspaces, hang or ignore
an error. The rows from a rank arrive in random order, and rows that no rank sent are NaN. Two
instances with the same sizes share a workspace, as in the library.
"""

import io
from dataclasses import dataclass

import torch
import torch.distributed as dist

TOP_KS = {1, *range(2, 19, 2), 22}
MAX_PAYLOADS, MAX_RANKS = 6, 64


def require(condition, message):
    if not condition:
        raise RuntimeError(f"Check failed: {message}")


def moe_a2a_get_workspace_size_per_rank(
    ep_size, max_num_tokens, total_dispatch_payload_size_per_token,
    combine_payload_size_per_token, eplb_stats_num_experts=0, *, backend="trtllm",
):  # fmt: skip
    def align(n):
        return -(-n // 128) * 128

    rows = ep_size * max_num_tokens
    dispatch_nbytes = align(rows * total_dispatch_payload_size_per_token)
    return 1024 + dispatch_nbytes + align(rows * combine_payload_size_per_token)


@dataclass
class Mapping:
    world_size: int
    rank: int
    gpus_per_node: int = 8
    tp_size: int = 1
    moe_tp_size: int = -1
    moe_ep_size: int = -1

    def __post_init__(self):
        require(self.tp_size == self.world_size, "world_size equal to tp_size")
        require(
            self.moe_tp_size * self.moe_ep_size == self.tp_size,
            "tp_size equal to moe_tp_size * moe_ep_size",
        )


@dataclass
class MnnvlConfig:
    comm_backend: object = None


class TorchDistBackend:
    def __init__(self, group=None):
        self._group = group

    def Get_rank(self):
        return dist.get_rank(self._group)

    def Get_size(self):
        return dist.get_world_size(self._group)

    def allgather(self, data):
        gathered = [None] * self.Get_size()
        dist.all_gather_object(gathered, data, group=self._group)
        return tuple(gathered)

    def Split(self, color, key):
        raise AssertionError("the group has all ranks, so it must not be split")


class MoeAlltoAll:
    workspaces = {}  # noqa: RUF012
    made = 0

    def __init__(
        self, mapping, max_num_tokens, top_k, num_experts, workspace_size_per_rank=None,
        hidden_size=None, mnnvl_config=None, eplb_stats_num_experts=0, enable_rank_mask=False, *,
        backend="trtllm",
    ):  # fmt: skip
        require(mnnvl_config is not None, "a communicator other than MPI")
        self.comm = mnnvl_config.comm_backend.Split(0, mapping.rank)
        self.rank, self.ranks = mapping.rank, mapping.moe_ep_size
        require(self.comm.Get_size() == self.ranks <= MAX_RANKS, "the group's size")
        require(self.comm.Get_rank() == self.rank, "the group's rank")
        require(top_k in TOP_KS, f"top_k={top_k} is supported")
        require(num_experts >= self.ranks, "num_experts must be >= ep_size")
        require(
            num_experts % self.ranks == 0,
            "experts in equal blocks: this stand-in supports no others",
        )
        require(max_num_tokens > 0, "max_num_tokens")
        self.max_tokens, self.top_k, self.experts = max_num_tokens, top_k, num_experts
        self.nbytes = workspace_size_per_rank
        sizes_by_rank = self.comm.allgather(
            (max_num_tokens, top_k, num_experts, workspace_size_per_rank)
        )
        require(len(set(sizes_by_rank)) == 1, "the same sizes on every rank")
        self.key = (self.nbytes, self.rank, self.ranks, self.max_tokens)
        self.state = self.workspaces.setdefault(self.key, {"phase": "idle", "owner": None})
        require(self.state["owner"] in (None, self), "a workspace of another instance")
        self.state["owner"] = self
        MoeAlltoAll.made += 1

    def _reset_workspace(self):
        require(self.state["phase"] == "idle", "freed between a dispatch and its combine")
        del self.workspaces[self.key]
        self.state = {"phase": "deleted"}

    def dispatch(
        self, token_selected_experts, input_payloads, runtime_max_tokens_per_rank,
        invalid_token_expert_id=None, expert_id_payload_index=None, eplb_local_stats=None,
        active_rank_mask=None,
    ):  # fmt: skip
        ids, payloads, max_tokens = (
            token_selected_experts,
            input_payloads,
            runtime_max_tokens_per_rank,
        )
        require(self.state["phase"] == "idle", "dispatch called twice without combine")
        require(
            0 < max_tokens <= self.max_tokens, "runtime_max_tokens_per_rank exceeds max_num_tokens"
        )
        self._check_dispatch(ids, payloads, max_tokens)
        sent_by_rank = _all_gather(self.comm, (max_tokens, ids, *payloads))
        require(
            len({sent[0] for sent in sent_by_rank}) == 1,
            "the same runtime_max_tokens_per_rank on every rank",
        )
        ranks_by_source = [sent[1].long() // (self.experts // self.ranks) for sent in sent_by_rank]
        self.tokens, self.runtime, self.received = len(ids), max_tokens, []
        out = [_unwritten_rows(self.ranks, max_tokens, payload) for payload in payloads]
        for source, (_, _, *sent_payloads) in enumerate(sent_by_rank):
            tokens = (ranks_by_source[source] == self.rank).any(1).nonzero().flatten()
            order = torch.Generator().manual_seed(source + 7 * self.rank)
            tokens = tokens[torch.randperm(len(tokens), generator=order)]
            self.received.append(tokens.tolist())
            for out_rows, payload in zip(out, sent_payloads, strict=True):
                out_rows[source, : len(tokens)] = payload[tokens]
            if invalid_token_expert_id is not None:
                require(out[expert_id_payload_index].dtype is torch.int32, "ids to sanitize")
                out[expert_id_payload_index][source, len(tokens) :] = invalid_token_expert_id
        self.state["phase"] = "dispatched"
        return out

    def combine(
        self, payload, runtime_max_tokens_per_rank, payload_in_workspace=False, output_dtype=None,
        output_scales=None, output_scalar_scale=1.0, sf_layout=None, output=None, *,
        use_low_precision=False, active_rank_mask=None,
    ):  # fmt: skip
        require(self.state["phase"] == "dispatched", "combine called before successful dispatch")
        require(runtime_max_tokens_per_rank == self.runtime, "as many tokens as in the dispatch")
        require(payload.dim() == 3, "payload must be [ep_size, runtime_max_tokens, hidden]")
        require(tuple(payload.shape[:2]) == (self.ranks, self.runtime), "rows of each rank")
        require(payload.is_contiguous(), "contiguous payload")
        require(payload.dtype in (torch.bfloat16, torch.float16, torch.float32), "a combine dtype")
        if output is None:
            output = torch.empty(self.tokens, payload.shape[2], dtype=payload.dtype)
        require(output.is_contiguous(), "output must be contiguous")
        require(tuple(output.shape) == (self.tokens, payload.shape[2]), "an output row per token")
        require(output.dtype is payload.dtype, "output of payload's dtype")
        total = torch.zeros(self.tokens, payload.shape[2])
        for received, rows in _all_gather(self.comm, (self.received, payload)):
            for index, token in enumerate(received[self.rank]):
                total[token] += rows[self.rank, index].float()
        output.copy_(total)
        self.state["phase"] = "idle"
        return output

    def _check_dispatch(self, ids, payloads, max_tokens):
        require(ids.dtype is torch.int32 and ids.is_contiguous(), "contiguous int32 ids")
        require(ids.dim() == 2 and ids.shape[1] == self.top_k, "token_selected_experts shape")
        require(len(ids) <= max_tokens, "tokens within the workspace")
        # The library would send a row with a negative id to rank 0, and a row with a too large id
        # to a rank that does not exist.
        require(bool(((ids >= 0) & (ids < self.experts)).all()), "valid expert ids")
        require(0 < len(payloads) <= MAX_PAYLOADS, "Too many payloads")
        total = 0
        for payload in payloads:
            require(payload.dim() == 2, "payload must be 2D")
            require(payload.is_contiguous(), "contiguous payload")
            require(len(payload) == len(ids), "payload first dimension must match")
            total += self.ranks * max_tokens * payload.shape[1] * payload.element_size()
            require(total % payload.element_size() == 0, "Misaligned payload buffer")
        require(1024 + total <= self.nbytes, "workspace size per rank insufficient")


def _unwritten_rows(ranks, max_tokens, payload):
    """Return rows (ranks, max_tokens, columns) of bytes 255, which are NaN in floating point."""
    memory = torch.full(
        (ranks, max_tokens, payload.shape[1] * payload.element_size()), 255, dtype=torch.uint8
    )
    return memory.view(payload.dtype)


def _all_gather(comm, values):
    """Return the tuple of values of each rank."""
    file = io.BytesIO()
    torch.save(tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in values), file)
    gathered = comm.allgather(file.getvalue())
    return [torch.load(io.BytesIO(data), weights_only=False) for data in gathered]
