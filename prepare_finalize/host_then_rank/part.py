"""By hosts: a row crosses the network once for each host that needs it, and its sum once back."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from modular_kernel.compatibility.support import PrepareFinalizeRequirements
from modular_kernel.contracts import Call, Receiver, TopKWeightAndReduce
from modular_kernel.errors import CommunicationError
from modular_kernel.ops.quantize import Quantized
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.replay import stages
from modular_kernel.spec.placement import Placement, PlacementTables, pairs_to_slots
from modular_kernel.spec.problem import ActivationFormat, Parallel, Problem, Reduce
from modular_kernel.tensors import Dispatched, ExpertWeights, Handle, Routing
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.agreement import agree, refuse_more_rows
from prepare_finalize.common.group_part import GroupHandle, RowsPart
from prepare_finalize.common.tokens import (
    quantizes,
    token_specs,
    weight_and_reduce,
)
from prepare_finalize.common.torch_group import Exchange
from prepare_finalize.host_then_rank.counts import Geometry, Passage, passage
from prepare_finalize.host_then_rank.group import HostThenRankGroup
from prepare_finalize.host_then_rank.slots import HostSlots, Room
from prepare_finalize.symm_mem.launch import Slot, SymmetricExchange

_MOST_RANKS = 8  # of a host, as for the kernels that write to all of them
_MOST_CHUNKS = 4
# Tokens that a chunk should have. What is verified on a CPU has few, and is to be cut like others.
_CHUNK_TOKENS = {"cuda": 1024, "cpu": 4}


@dataclass(frozen=True)
class HostThenRankHandle(GroupHandle):
    """token_N: this rank's token of each row it sent, by chunk, host, then token. passes: how the
    rows of each chunk were passed on, None where this host has none of it."""

    token_N: torch.Tensor
    way: Passage
    room: Room
    passes: tuple[SymmetricExchange | None, ...]


class HostThenRankPrepareAndFinalize(RowsPart):
    """A token's row goes once to each host that has one of its experts, to the rank there of the
    same local number, over torch.distributed; that rank writes it to those of its host which hold
    the experts, over NVLink (on a CPU: shared files). On the way back the sums of a host's ranks
    are added there first, in float32 in the order of ranks, and one row goes to the owner, in the
    problem's dtype, who adds hosts' rows in float32 in the order of hosts.

    Large calls are cut into chunks: while one is passed on inside the hosts, the next crosses
    between them. Counts are exchanged first and read on the host: T may differ from rank to rank
    and be 0. Every host has as many ranks, 8 at most, numbered one behind another. Two calls may
    be in flight.
    """

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        triton=True,
        packages=("triton",),
        reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
        localizes_ids=True,
        dispatch_schemes=ACTIVATION_SCHEMES,
        can_defer_quant=False,
        world_sizes=(2, None),
        ranks_per_host=_MOST_RANKS,
        batch_invariant=True,
        asynchronous=True,
        bounds_received=True,
        lora=True,
    )
    manager_class = HostThenRankGroup
    manager: HostThenRankGroup
    keeps_expert_output = True
    most_chunks = _MOST_CHUNKS

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        manager = self.manager
        per_host, tokens = manager.ranks_per_host, problem.tokens
        wanted = -(-tokens // _CHUNK_TOKENS[manager.device])
        chunks = max(1, min(per_host, self.most_chunks, wanted))
        at = Geometry(manager.rank, manager.world_size, per_host, chunks, -(-tokens // chunks))
        self._at, self.layer.counts = at, at.counts
        held = problem.placement.slots[at.host * per_host : (at.host + 1) * per_host]
        self._inner = _inside(problem, at, tuple(map(len, held)))
        self._first_W = _first_numbers(problem.placement, per_host)
        try:
            self._slots = HostSlots(self._inner, problem, manager, self.most_rows)
        except CommunicationError:
            self.destroy()
            raise

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        problem, at = self.problem, self._at
        most, nbytes = problem.tokens, self.rows.most_bytes()
        sent, came = min(at.hosts, problem.top_k) * most, min(at.hosts * most, self.most_rows)
        return {
            **token_specs(problem, most),
            **self.rows.specs(came),
            "packed_own": BufferSpec((most, nbytes), torch.uint8),
            "packed_sent": BufferSpec((sent, nbytes), torch.uint8),
            "packed_came": BufferSpec((came, nbytes), torch.uint8),
            "ranks_of_rows": BufferSpec((came,), torch.int32),
            "places": BufferSpec((at.ranks_per_host * came,), torch.int32),
            "returned": BufferSpec((sent, problem.hidden), problem.dtype),
        }

    def send(
        self, x_TH: torch.Tensor, routing: Routing, weights: ExpertWeights, call: Call
    ) -> Receiver:
        manager, at = self.manager, self._at
        manager.check_device(x_TH.device)
        self._slots.check_free()
        rank_TK, slot_TK, invalid = pairs_to_slots(
            routing.topk_ids_TK, self.tables(x_TH.device), first_token=manager.rank, together=True
        )
        host_TK = rank_TK.div(at.ranks_per_host, rounding_mode="floor")
        to_hosts = at.by_chunk(_wanted(host_TK, at.hosts))
        to_ranks = at.by_chunk(_wanted(rank_TK, at.world_size))
        agreed = agree(
            self.layer,
            call,
            tokens=x_TH.shape[0],
            rows_W=torch.cat((to_hosts.sum(2).flatten(), to_ranks.sum(2).flatten())).tolist(),
            device=x_TH.device,
            largest=self.largest(x_TH, call),
        )
        way = passage(manager, agreed, at)
        refuse_more_rows(self.layer, agreed, way.most_W)
        call.invalid_ids.add_(invalid)
        layout, own, scale = self.pack(x_TH, routing, weights, call, agreed, rows=len(x_TH))
        chunk_N, host_N, place_N = to_hosts.nonzero(as_tuple=True)
        token_N = place_N + chunk_N * at.tokens
        sent = call.workspace.take("packed_sent", (len(token_N), layout.nbytes))
        torch.index_select(own, 0, token_N, out=sent)
        is_there = host_TK[token_N] == host_N[:, None]
        first_W = torch.tensor(self._first_W, device=x_TH.device)
        number_TK = first_W[rank_TK.clamp(min=0)] + slot_TK
        layout.put(sent, "ids", torch.where(is_there, number_TK[token_N], -1).to(torch.int32))
        layout.put(sent, "weights", torch.where(is_there, routing.topk_weights_TK[token_N], 0))
        came = call.workspace.take("packed_came", (sum(way.came), layout.nbytes))
        crossing = [
            self._cross(way, chunk, came, sent, agreed.step, "dispatch")
            for chunk in range(at.chunks)
        ]
        room = self._slots.take(way.received)

        def receive() -> tuple[Dispatched, Handle]:
            passes = self._pass_on(way, came, crossing, room.slot, call, agreed.step)
            slot = room.came
            left = None if self.problem.apply_router_weight_on_input else slot.weights_RK
            scales = scale if slot.scale_RG is None else slot.scale_RG
            arrived = self.local_tokens(
                call, slot.x_RH, scales, slot.ids_RK, slot.weights_RK, slot.adapters_R
            )
            return arrived, HostThenRankHandle(self, call, agreed, left, token_N, way, room, passes)

        return receive

    def _cross(
        self,
        way: Passage,
        chunk: int,
        came: torch.Tensor,
        sent: torch.Tensor,
        step: int,
        phase: str,
    ) -> Exchange | None:
        """Start a chunk's exchange between hosts: from `sent` to `came`, or back in the combine.

        None where no row leaves its host: then it is done.
        """
        to_W, from_W = way.splits(chunk)
        out = came[_chunk(way.came, chunk)]
        given = sent[_chunk(way.sent, chunk)]
        if phase == "combine":
            out, given, to_W, from_W = given, out, from_W, to_W
        if not way.crosses[chunk]:
            out.copy_(given)
            return None
        return self.manager.all_to_all(
            out, given, out_rows=from_W, given_rows=to_W, step=step, phase=phase
        )

    def _pass_on(
        self,
        way: Passage,
        came: torch.Tensor,
        crossing: list[Exchange | None],
        slot: Slot,
        call: Call,
        step: int,
    ) -> tuple[SymmetricExchange | None, ...]:
        """Write the rows of each chunk, as it comes, to the ranks of this host; wait for theirs."""
        room, passes = self.rows.room(call, len(came)), list[SymmetricExchange | None]()
        per_host, started = self._at.ranks_per_host, time.monotonic()
        bits = call.workspace.take("ranks_of_rows", (len(came),))
        places = call.workspace.take("places", (per_host * len(came),))
        tables = self._inner.placement.tables(came.device)
        last = max((chunk for chunk, busy in enumerate(way.busy) if busy), default=-1)
        if way.any_rows:
            self.manager.note(step, "dispatch")
        for chunk, exchange in enumerate(crossing):
            if exchange is not None:
                exchange.wait()
            if not way.busy[chunk]:
                passes.append(None)
                continue
            self.manager.check_inside(step, "dispatch", came.nbytes, started)
            part = _chunk(way.came, chunk)
            here = room.rows(part.start, part.stop)
            self.rows.fill(here, call, [came[part]])
            rows = part.stop - part.start
            places_LN = places[per_host * part.start : per_host * part.stop].view(per_host, rows)
            _places(here.ids_RK, tables, way.room[:, chunk].to(came.device), out=places_LN)
            inside = SymmetricExchange(
                self.manager.memory,
                self._inner,
                slot,
                self._slots.heap.deltas_W,
                bits[part],
                rows,
                places_LN,
            )
            routing = Routing(here.weights_RK, here.ids_RK, here.adapters_R)
            quantized = None
            if quantizes(self.problem, call):
                scale = bits if here.scale is None else here.scale
                quantized = Quantized(here.x_RH, scale)
            inside.send(here.x_RH, routing, tables, call, quantized=quantized, wait=chunk == last)
            passes.append(inside)
            self.manager.check_inside(step, "dispatch", came.nbytes, started)
        return tuple(passes)

    def expert_output(self, handle: Handle) -> torch.Tensor:
        return self.own_handle(handle, HostThenRankHandle).room.came.y_RH

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        own = self.own_handle(handle, HostThenRankHandle)
        way, step, take = own.way, own.agreed.step, own.call.workspace.take
        y_RH, manager, started = own.room.came.y_RH, self.manager, time.monotonic()
        own.room.give_back()
        if expert_output is not y_RH:
            weight_and_reduce(
                expert_output, own.topk_weights_RK, self.problem, reduce=reduce, out=y_RH
            )
        sums = take("rows_sum", (sum(way.came), self.problem.hidden))
        returned = take("returned", (sum(way.sent), self.problem.hidden))
        crossing = []
        with stages.stage(stages.COMBINE):
            if way.any_rows:
                manager.note(step, "combine")
            for chunk, inside in enumerate(own.passes):
                manager.check_inside(step, "combine", sums.nbytes, started)
                if inside is not None:
                    inside.combine(sums[_chunk(way.came, chunk)])
                    manager.check_inside(step, "combine", sums.nbytes, started)
                given, back = sums.view(torch.uint8), returned.view(torch.uint8)
                crossing.append(self._cross(way, chunk, given, back, step, "combine"))
            for exchange in crossing:
                if exchange is not None:
                    exchange.wait()
            sum_TH = take("tokens_sum", tuple(out.shape)).zero_()
            start = 0
            for chunk in range(self._at.chunks):
                # A host returns a token once, so the order of a sum is that of the hosts.
                for rows in way.splits(chunk)[0]:
                    part = slice(start, start + rows)
                    sum_TH.index_add_(0, own.token_N[part], returned[part].float())
                    start += rows
            out.copy_(sum_TH)


def _inside(problem: Problem, at: Geometry, held: tuple[int, ...]) -> Problem:
    """Return what the ranks of a host are to each other: its slots are the experts, numbered by
    rank. held: how many slots each has."""
    starts = accumulate(held, initial=0)
    slots = tuple(tuple(range(start, stop)) for start, stop in pairwise(starts))
    parallel = Parallel(at.ranks_per_host, Placement(slots), at.local_rank)
    return replace(problem, experts=sum(held), local_experts=None, parallel=parallel)


def _first_numbers(placement: Placement, per_host: int) -> tuple[int, ...]:
    """Return the number of each rank's first slot among those of its host."""
    held = tuple(map(len, placement.slots))
    blocks = (held[start : start + per_host] for start in range(0, len(held), per_host))
    return tuple(first for block in blocks for first in (*accumulate(block[:-1], initial=0),))


def _wanted(place_TK: torch.Tensor, places: int) -> torch.Tensor:
    """(places, T): whether a pair of a token goes to each place; -1 goes nowhere."""
    numbers_P = torch.arange(places, device=place_TK.device)
    return (place_TK == numbers_P[:, None, None]).any(2)


def _chunk(rows: Sequence[int], chunk: int) -> slice:
    """Which of all chunks' rows are those of one."""
    start = sum(rows[:chunk])
    return slice(start, start + rows[chunk])


def _places(
    ids_NK: torch.Tensor, tables: PlacementTables, room_2L: torch.Tensor, *, out: torch.Tensor
) -> None:
    """out (L, N) int32 = the row of each row at each rank of the host, -1 where it is not wanted.

    room_2L: int64, the first row there, and the one behind the last that may be written: other
    ranks told how many they are, which no row may contradict.
    """
    rank_NK, _, _ = pairs_to_slots(ids_NK, tables, together=True)
    wanted_LN = _wanted(rank_NK, len(out))
    place_LN = room_2L[0][:, None] + wanted_LN.cumsum(1) - 1
    is_there = wanted_LN & (place_LN < room_2L[1][:, None])
    out.copy_(torch.where(is_there, place_LN, -1))
