"""What FlashInfer's one-sided all-to-all does (0.7.2), over any process group and in plain torch.

It is strict where the library would read or write past its workspaces, hang, or say nothing: every
such use raises. Rows of a rank arrive in no order that a caller could guess; what nobody sent is
NaN. Workspaces are kept by their sizes alone, as the library keeps them: two of one size are one.
"""

import io
from dataclasses import dataclass

import torch
import torch.distributed as dist

TOP_KS = {1, *range(2, 19, 2), 22}
MOST_PAYLOADS, MOST_RANKS = 6, 64


def require(holds, what):
    if not holds:
        raise RuntimeError(f"Check failed: {what}")


def moe_a2a_get_workspace_size_per_rank(
    ep_size, max_num_tokens, total_dispatch_payload_size_per_token,
    combine_payload_size_per_token, eplb_stats_num_experts=0, *, backend="trtllm",
):  # fmt: skip
    def whole(n):
        return -(-n // 128) * 128

    rows = ep_size * max_num_tokens
    there = whole(rows * total_dispatch_payload_size_per_token)
    return 1024 + there + whole(rows * combine_payload_size_per_token)


@dataclass
class Mapping:
    world_size: int
    rank: int
    gpus_per_node: int = 8
    tp_size: int = 1
    moe_tp_size: int = -1
    moe_ep_size: int = -1

    def __post_init__(self):
        require(self.tp_size == self.world_size, "world_size by the sizes of what is parallel")
        require(self.moe_tp_size * self.moe_ep_size == self.tp_size, "tp by moe_tp and moe_ep")


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
        found = [None] * self.Get_size()
        dist.all_gather_object(found, data, group=self._group)
        return tuple(found)

    def Split(self, color, key):
        raise AssertionError("a group of all ranks of the process is made anew")


class MoeAlltoAll:
    kept = {}  # noqa: RUF012
    made = 0

    def __init__(
        self, mapping, max_num_tokens, top_k, num_experts, workspace_size_per_rank=None,
        hidden_size=None, mnnvl_config=None, eplb_stats_num_experts=0, enable_rank_mask=False, *,
        backend="trtllm",
    ):  # fmt: skip
        require(mnnvl_config is not None, "a communicator other than MPI")
        self.comm = mnnvl_config.comm_backend.Split(0, mapping.rank)
        self.rank, self.ranks = mapping.rank, mapping.moe_ep_size
        require(self.comm.Get_size() == self.ranks <= MOST_RANKS, "the group's size")
        require(self.comm.Get_rank() == self.rank, "the group's rank")
        require(top_k in TOP_KS, f"top_k={top_k} has kernels")
        require(num_experts >= self.ranks, "num_experts must be >= ep_size")
        require(
            num_experts % self.ranks == 0, "experts in equal blocks: this stand-in has no other"
        )
        require(max_num_tokens > 0, "max_num_tokens")
        self.most, self.top_k, self.experts = max_num_tokens, top_k, num_experts
        self.nbytes = workspace_size_per_rank
        told = self.comm.allgather((max_num_tokens, top_k, num_experts, workspace_size_per_rank))
        require(len(set(told)) == 1, "the same sizes on every rank")
        self.key = (self.nbytes, self.rank, self.ranks, self.most)
        self.state = self.kept.setdefault(self.key, {"phase": "idle", "of": None})
        require(self.state["of"] in (None, self), "a workspace of another instance")
        self.state["of"] = self
        MoeAlltoAll.made += 1

    def _reset_workspace(self):
        require(self.state["phase"] == "idle", "freed between a dispatch and its combine")
        del self.kept[self.key]
        self.state = {"phase": "deleted"}

    def dispatch(
        self, token_selected_experts, input_payloads, runtime_max_tokens_per_rank,
        invalid_token_expert_id=None, expert_id_payload_index=None, eplb_local_stats=None,
        active_rank_mask=None,
    ):  # fmt: skip
        ids, payloads, most = token_selected_experts, input_payloads, runtime_max_tokens_per_rank
        require(self.state["phase"] == "idle", "dispatch called twice without combine")
        require(0 < most <= self.most, "runtime_max_tokens_per_rank exceeds max_num_tokens")
        self._check(ids, payloads, most)
        told = _everywhere(self.comm, (most, ids, *payloads))
        require(len({one[0] for one in told}) == 1, "one runtime_max_tokens_per_rank")
        rank_of = [one[1].long() // (self.experts // self.ranks) for one in told]
        self.tokens, self.runtime, self.came = len(ids), most, []
        out = [_nothing(self.ranks, most, part) for part in payloads]
        for source, (_, _, *parts) in enumerate(told):
            sent = (rank_of[source] == self.rank).any(1).nonzero().flatten()
            order = torch.Generator().manual_seed(source + 7 * self.rank)
            sent = sent[torch.randperm(len(sent), generator=order)]
            self.came.append(sent.tolist())
            for into, part in zip(out, parts, strict=True):
                into[source, : len(sent)] = part[sent]
            if invalid_token_expert_id is not None:
                require(out[expert_id_payload_index].dtype is torch.int32, "ids to sanitize")
                out[expert_id_payload_index][source, len(sent) :] = invalid_token_expert_id
        self.state["phase"] = "dispatched"
        return out

    def combine(
        self, payload, runtime_max_tokens_per_rank, payload_in_workspace=False, output_dtype=None,
        output_scales=None, output_scalar_scale=1.0, sf_layout=None, output=None, *,
        use_low_precision=False, active_rank_mask=None,
    ):  # fmt: skip
        require(self.state["phase"] == "dispatched", "combine called before successful dispatch")
        require(runtime_max_tokens_per_rank == self.runtime, "as many tokens as were dispatched")
        require(payload.dim() == 3, "payload must be [ep_size, runtime_max_tokens, hidden]")
        require(tuple(payload.shape[:2]) == (self.ranks, self.runtime), "rows of each rank")
        require(payload.is_contiguous(), "payload row by row")
        require(payload.dtype in (torch.bfloat16, torch.float16, torch.float32), "a combine dtype")
        if output is None:
            output = torch.empty(self.tokens, payload.shape[2], dtype=payload.dtype)
        require(output.is_contiguous(), "output must be contiguous")
        require(tuple(output.shape) == (self.tokens, payload.shape[2]), "output of these tokens")
        require(output.dtype is payload.dtype, "output of payload's dtype")
        total = torch.zeros(self.tokens, payload.shape[2])
        for came, rows in _everywhere(self.comm, (self.came, payload)):
            for place, token in enumerate(came[self.rank]):
                total[token] += rows[self.rank, place].float()
        output.copy_(total)
        self.state["phase"] = "idle"
        return output

    def _check(self, ids, payloads, most):
        require(ids.dtype is torch.int32 and ids.is_contiguous(), "int32 ids row by row")
        require(ids.dim() == 2 and ids.shape[1] == self.top_k, "token_selected_experts shape")
        require(len(ids) <= most, "tokens within the workspace")
        # An id below 0 is sent to rank 0 without a word, one too large past the ranks.
        require(bool(((ids >= 0) & (ids < self.experts)).all()), "experts that exist")
        require(0 < len(payloads) <= MOST_PAYLOADS, "Too many payloads")
        total = 0
        for part in payloads:
            require(part.dim() == 2, "payload must be 2D")
            require(part.is_contiguous(), "payload row by row")
            require(len(part) == len(ids), "payload first dimension must match")
            total += self.ranks * most * part.shape[1] * part.element_size()
            require(total % part.element_size() == 0, "Misaligned payload buffer")
        require(1024 + total <= self.nbytes, "workspace size per rank insufficient")


def _nothing(ranks, most, part):
    room = torch.full((ranks, most, part.shape[1] * part.element_size()), 255, dtype=torch.uint8)
    return room.view(part.dtype)


def _everywhere(comm, given):
    file = io.BytesIO()
    torch.save(tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in given), file)
    found = comm.allgather(file.getvalue())
    return [torch.load(io.BytesIO(each), weights_only=False) for each in found]
