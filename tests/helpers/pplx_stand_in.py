"""A stand-in for pplx-kernels over gloo, in plain torch.

The stand-in raises where the library would write past its buffers, hang or return wrong results.
The rows of an expert arrive in random order.
"""

import pickle
from dataclasses import replace
from typing import ClassVar

import torch
from torch._C._distributed_c10d import _resolve_process_group

from prepare_finalize.pplx.group import PplxGroup
from prepare_finalize.pplx.part import PplxPrepareAndFinalize

ALIGNMENT_BYTES = 16


def gather(group, value):
    """Gather `value` from all ranks, even if torch.distributed does not know the group."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([len(data)])]).wait()
    max_size = int(max(sizes))
    padded = torch.zeros(max_size, dtype=torch.uint8)
    padded[: len(data)] = data
    gathered = [torch.zeros(max_size, dtype=torch.uint8) for _ in sizes]
    group.allgather([gathered], [padded]).wait()
    return [
        pickle.loads(bytes(rank_data[: int(size)].numpy()))
        for rank_data, size in zip(gathered, sizes, strict=True)
    ]


def view_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


class AllToAll:
    """One set of buffers, with the library's `intranode`, `dispatch` and `combine`."""

    made = 0
    halves: ClassVar = []  # (do_send, do_recv) of each dispatch of this process

    def __init__(self, **sizes):
        self.__dict__.update(sizes)
        self.group = _resolve_process_group(self.group_name)
        self.local = self.num_experts // self.world_size
        self.state, self.open = "idle", True
        assert self.num_experts % self.world_size == 0
        assert self.world_size // self.dp_size > 1
        assert self.max_num_tokens > 0
        assert self.hidden_dim_bytes % ALIGNMENT_BYTES == 0
        assert self.hidden_dim_scale_bytes % ALIGNMENT_BYTES == 0
        assert self.hidden_dim_scale_bytes <= self.hidden_dim_bytes
        assert self.hidden_dim_bytes + self.hidden_dim_scale_bytes + ALIGNMENT_BYTES <= 48 << 10
        sizes_by_rank = gather(self.group, sorted(sizes.items(), key=str))
        shared_sizes = [
            [(name, value) for name, value in rank_sizes if name not in ("rank", "group_name")]
            for rank_sizes in sizes_by_rank
        ]
        assert all(rank_sizes == shared_sizes[0] for rank_sizes in shared_sizes)
        AllToAll.made += 1

    @classmethod
    def intranode(
        cls,
        max_num_tokens,
        num_experts,
        experts_per_token,
        rank,
        world_size,
        dp_size,
        hidden_dim,
        hidden_dim_bytes,
        hidden_dim_scale_bytes,
        group_name="default",
    ):
        sizes = dict(locals())
        sizes.pop("cls")
        return cls(**sizes)

    def destroy(self):
        assert self.state == "idle", "freed between a dispatch and its combine"
        self.open = False

    def dispatch(self, counts, x, x_scale, tokens, token_scale, indices, bound_m, **split):
        self._enter_dispatch(**split)
        self._check_indices(indices, tokens)
        slots, capacity = self.local, self.max_num_tokens * self.world_size
        assert (counts.dtype, tuple(counts.shape)) == (torch.int32, (slots,))
        assert x.is_contiguous()
        assert tuple(x.shape) == (slots, capacity, self.hidden_dim)
        assert tokens.is_contiguous()
        assert tokens.data_ptr() % ALIGNMENT_BYTES == 0
        assert tokens.shape[1] * tokens.element_size() == self.hidden_dim_bytes
        for scale, rows in ((x_scale, (slots, capacity)), (token_scale, (len(tokens),))):
            assert (scale is None) == (self.hidden_dim_scale_bytes == 0)
            if scale is not None:
                assert tuple(scale.shape) == (*rows, self.hidden_dim_scale_bytes // 4)
                assert scale.dtype == torch.float32
        if split["do_send"]:
            counts.zero_()
            scales = None if token_scale is None else token_scale.clone()
            expert_ids = indices.view(torch.int32).tolist()
            self.received = gather(self.group, (expert_ids, view_bytes(tokens).clone(), scales))
        if not split["do_recv"]:
            return
        self.local_rows = self._shuffle_local_rows()
        for slot, rows in enumerate(self.local_rows):
            counts[slot] = len(rows)
            for row, (source, token) in enumerate(rows):
                view_bytes(x[slot, row]).copy_(self.received[source][1][token])
                if x_scale is not None:
                    x_scale[slot, row] = self.received[source][2][token]

    def combine(self, out, indices, weights, y, bound_m, do_send=True, do_recv=True):
        self._enter("received", "idle")
        assert do_send
        assert do_recv
        self._check_indices(indices, out)
        assert out.dtype in (torch.bfloat16, torch.float16)
        assert weights.dtype == torch.float32
        assert weights.is_contiguous()
        assert y.is_contiguous()
        assert tuple(y.shape) == (
            self.local,
            self.max_num_tokens * self.world_size,
            self.hidden_dim,
        )
        local_outputs = {}
        for slot, rows in enumerate(self.local_rows):
            for row, (source, token) in enumerate(rows):
                expert = self.rank * self.local + slot
                local_outputs[source, token, expert] = y[slot, row].clone()
        outputs = {}
        for rank_outputs in gather(self.group, local_outputs):
            outputs |= {
                (token, expert): output
                for (source, token, expert), output in rank_outputs.items()
                if source == self.rank
            }
        for token, expert_ids in enumerate(indices.view(torch.int32).tolist()):
            total = torch.zeros(self.hidden_dim)
            for expert, weight in zip(expert_ids, weights[token], strict=True):
                total += weight * outputs[token, expert].float()
            out[token] = total.to(out.dtype)

    def _enter_dispatch(self, *, do_send, do_recv):
        """Check that send and receive are one launch, or that a receive follows its send."""
        assert do_send or do_recv
        AllToAll.halves.append((do_send, do_recv))
        self._enter("idle" if do_send else "sent", "received" if do_recv else "sent")

    def _enter(self, before, after):
        assert self.open, "used after destroy"
        assert self.state == before, f"out of turn: {self.state}"
        self.state = after

    def _check_indices(self, indices, rows):
        assert indices.dtype == torch.uint32
        assert indices.is_contiguous()
        assert tuple(indices.shape) == (len(rows), self.experts_per_token)
        assert len(rows) <= self.max_num_tokens
        values = indices.view(torch.int32)
        assert bool(((values >= 0) & (values < self.num_experts)).all())

    def _shuffle_local_rows(self):
        """Return (source rank, token) of the rows of each local slot in random order."""
        rows_of_slots = [[] for _ in range(self.local)]
        first = self.rank * self.local
        for source, (indices, _, _) in enumerate(self.received):
            counts = [0] * self.num_experts
            for token, expert_ids in enumerate(indices):
                assert len(set(expert_ids)) == len(expert_ids), "a token has an expert twice"
                for expert in expert_ids:
                    counts[expert] += 1
                    if first <= expert < first + self.local:
                        rows_of_slots[expert - first].append((source, token))
            assert max(counts) <= self.max_num_tokens, "a slot's buffer overruns"
        order = torch.Generator().manual_seed(self.rank)
        return [
            [rows[i] for i in torch.randperm(len(rows), generator=order).tolist()]
            for rows in rows_of_slots
        ]


class Library:
    """The stand-in for the library's module."""

    AllToAll = AllToAll


class GlooGroup(PplxGroup):
    """A PplxGroup that uses the stand-in."""

    def __init__(self, group=None, **options):
        super().__init__(group, library=Library, **options)


class PplxOverGloo(PplxPrepareAndFinalize):
    """The part, on a CPU and with the stand-in."""

    requires = replace(
        PplxPrepareAndFinalize.requires,
        devices=frozenset({"cpu"}),
        min_arch=None,
        packages=(),
    )

    manager_class = GlooGroup
