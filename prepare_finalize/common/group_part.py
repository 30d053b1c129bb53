"""Base classes of PrepareAndFinalize components ("parts") over the ranks of a process group.

GroupPart                 any transport: manager, placement of experts, checks
|- FusedDispatchPart      the library can send and receive in one launch
`- HandshakePart          TorchGroup: ranks exchange metadata at the start of each call
   `- PackedRowsPart      x, scales, ids, weights and adapters in one row of bytes

Every part has a manager, which owns the connections or buffers of the process group and can be
shared with other layers. A slot is the index of an expert in the weights of its rank. A replicated
expert has slots on several ranks. A pair is one token with one of its K experts.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from modular_kernel.compatibility.support import Rejection
from modular_kernel.contracts import CallState, PrepareAndFinalize, Receiver
from modular_kernel.errors import ConfigurationError, UnsupportedError
from modular_kernel.ops.expert_slots import Numbering, Pairs
from modular_kernel.ops.quantize import quantize_rejections
from modular_kernel.replay import stages
from modular_kernel.spec.placement import PlacementTables
from modular_kernel.spec.problem import IdSpace, Machine, Problem
from modular_kernel.tensors import (
    Dispatched,
    DispatchedRouting,
    DispatchShape,
    ExpertWeights,
    Handle,
    Routing,
    StandardShape,
    StandardTokens,
)
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.handshake import CallMetadata, Layer, refuse
from prepare_finalize.common.packed_rows import RowLayout
from prepare_finalize.common.row_buffers import PackedRowBuffers
from prepare_finalize.common.tokens import dispatches_quantized, has_shared_scale, quantize_tokens
from prepare_finalize.common.torch_group import TorchGroup
from prepare_finalize.rendezvous.connect import get_rank_and_size
from prepare_finalize.rendezvous.hosts import Hosts, check_hosts


@dataclass(frozen=True)
class PartHandle(Handle):
    """Base of the handles of all GroupParts, with the part that created it and its call."""

    part: "GroupPart[Any]"
    call: CallState


@dataclass(frozen=True)
class GroupHandle(PartHandle):
    """Handle with the metadata of the call.

    topk_weights_RK: router weights that `finalize` must apply, or None.
    """

    metadata: CallMetadata
    topk_weights_RK: torch.Tensor | None


class Manager(Protocol):
    """Interface of all managers: objects that own the connections or buffers of a process group.

    - rank, world_size: this rank, and the number of ranks in the group.
    - hosts: hosts of the ranks.
    """

    rank: int
    world_size: int
    hosts: Hosts

    def __init__(self, group: object | None = None) -> None: ...

    def check_device(self, device: torch.device | str) -> None:
        """Raise DeviceError unless tensors on `device` can be exchanged."""

    def destroy(self) -> None:
        """Close the connections and free the buffers. Collective."""


M = TypeVar("M", bound=Manager)
H = TypeVar("H", bound=PartHandle)


class GroupPart(PrepareAndFinalize, Generic[M]):
    """Base of parts that exchange through a manager of their process group.

    group: a manager of type `manager_class`, or a ProcessGroup (None: the default group), for which
        the part creates a manager with the default timeout. `destroy` closes the manager only if
        the part created it.

    Raise ConfigurationError if the size of the group, or this process's rank in it, differs from
    the problem's.
    """

    manager_class: ClassVar[type[Any]] = TorchGroup
    # Whether pairs of a replicated expert go to its copy on this rank or, if there is none, to a
    # copy on this host.
    prefer_local_copies: ClassVar[bool] = True
    ids_dtype = torch.int32  # dtype of the expert numbers that the part's library reads
    manager: M

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        has_manager = isinstance(group, self.manager_class)
        manager: Any = group
        check_rank(
            problem,
            *((manager.rank, manager.world_size) if has_manager else get_rank_and_size(group)),
        )
        self._owns_manager = not has_manager
        self.manager = manager if has_manager else self.manager_class(group)
        self._tables: dict[torch.device, PlacementTables] = {}
        self._numberings: dict[tuple[torch.device, int], Numbering] = {}
        self._check_hosts()

    def _check_hosts(self) -> None:
        per_host = self.problem.parallel.ranks_per_host
        part, requires = type(self).__name__, self.requires
        try:
            check_hosts(self.manager.hosts, part=part, requires=requires, ranks_per_host=per_host)
        except ConfigurationError:
            self.destroy()
            raise

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        rejections = quantize_rejections(cls.__name__, problem, machine)
        return rejections + placement_rejections(cls.__name__, problem)

    def max_num_tokens_per_rank(self) -> int:
        """Return problem.tokens, or the part's limit if that is lower."""
        limit, tokens = self.requires.max_tokens, self.problem.tokens
        return tokens if limit is None else min(limit, tokens)

    def check_machine(self, machine: Machine) -> None:
        self.manager.check_device(machine.device)

    def sharable_group(self) -> M:
        return self.manager

    def destroy(self) -> None:
        """Close the manager if this part created it; the part cannot be used afterwards."""
        if self._owns_manager:
            self.manager.destroy()

    def tables(self, device: torch.device) -> PlacementTables:
        """Return the placement tables, the ranks and slots of each expert's copies, on `device`."""
        if device not in self._tables:
            rank, hosts = self.manager.rank, self.manager.hosts
            near_ranks = (
                ((rank,), hosts.ranks_on(hosts.index_W[rank])) if self.prefer_local_copies else ()
            )
            self._tables[device] = self.problem.placement.tables(device, near_ranks)
        return self._tables[device]

    def numbering(self, device: torch.device, *, num_sinks: int = 0) -> Numbering:
        """Return the numbering of expert slots that the library uses, for ids on `device`.

        num_sinks: number of additional slots per rank that receive skipped pairs, for libraries
            that cannot skip a pair (`modular_kernel.ops.expert_slots`).
        """
        numbering = self._numberings.get((device, num_sinks))
        if numbering is None:
            placement, tables = self.problem.placement, self.tables(device)
            numbering = Numbering(placement, tables, self.manager.rank, num_sinks)
            self._numberings[device, num_sinks] = numbering
        return numbering

    def pair_specs(self, tokens: int) -> dict[str, BufferSpec]:
        """Return the buffers that `pairs` takes from the workspace."""
        shape = (tokens, self.problem.top_k)
        return {
            "pair_numbers": BufferSpec(shape, self.ids_dtype),
            "pair_weights": BufferSpec(shape, torch.float32),
        }

    def pairs(
        self,
        routing: Routing,
        call: CallState,
        *,
        join: bool,
        factor: float = 1.0,
        num_sinks: int = 0,
    ) -> Pairs:
        """Return the (token, expert) pairs of a call, with buffers for expert numbers and weights.

        The other arguments are those of `modular_kernel.ops.expert_slots.Pairs`.
        """
        ids_TK, take = routing.topk_ids_TK, call.workspace.take
        return Pairs(
            routing,
            self.numbering(ids_TK.device, num_sinks=num_sinks),
            take("pair_numbers", tuple(ids_TK.shape)),
            take("pair_weights", tuple(ids_TK.shape)),
            call.invalid_ids,
            join,
            factor,
        )

    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: CallState
    ) -> tuple[Dispatched, Handle]:
        """Call `prepare_no_receive` and wait for its result."""
        return self.prepare_no_receive(x_TH, routing, weights=weights, call=call)()

    def local_tokens(
        self,
        call: CallState,
        x_RH: torch.Tensor,
        scale: torch.Tensor | None,
        slots_RK: torch.Tensor,
        weights_RK: torch.Tensor,
        adapters_R: torch.Tensor | None = None,
        plain_RH: torch.Tensor | None = None,
    ) -> StandardTokens:
        """Return the input of the experts: rows, with the slots of their experts on this rank.

        slots_RK: int32, -1 for experts of other ranks.
        adapters_R: adapter slots of the rows.
        plain_RH: unquantized rows, which adapters read if x is quantized.
        """
        routing = DispatchedRouting(
            topk_weights_TK=weights_RK,
            topk_ids_TK=slots_RK,
            space=IdSpace.LOCAL,
            num_experts=self.problem.e,
            expert_map=None,
            invalid_ids=call.invalid_ids,
            adapters_T=adapters_R,
        )
        return StandardTokens(x_RH, routing, scale, plain_RH)

    def check_handle(self, handle: Handle, handle_type: type[H]) -> H:
        """Return `handle`. Raise UnsupportedError unless this part created it."""
        if getattr(handle, "part", None) is not self:
            got, need = type(handle).__name__, f"one of this {type(self).__name__}"
            raise UnsupportedError("handle", got=got, need=need)
        assert isinstance(handle, handle_type)  # a part has one type of handle
        return handle

    def has_local_scales(self, call: CallState) -> bool:
        """Return whether no scale depends on the tokens of other ranks."""
        return not (dispatches_quantized(self.problem, call) and has_shared_scale(self.problem))

    def local_amax(self, x_TH: torch.Tensor, call: CallState) -> torch.Tensor | None:
        """Return the maximum absolute activation of this rank, (1,) float32.

        Returns None unless the ranks share a scale.
        """
        if self.has_local_scales(call):
            return None
        if x_TH.numel() == 0:
            return x_TH.new_zeros(1, dtype=torch.float32)
        return x_TH.abs().amax().float().reshape(1)


class FusedDispatchPart(GroupPart[M]):
    """Base of parts whose library can send and receive in one launch.

    One launch is faster if nothing runs between sending and receiving.
    """

    prepares_at_once = True

    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: CallState
    ) -> tuple[Dispatched, Handle]:
        return self.send(x_TH, routing, weights, call, at_once=True)()

    def prepare_no_receive(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: CallState
    ) -> Receiver:
        return self.send(x_TH, routing, weights, call, at_once=False)

    @abstractmethod
    def send(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        weights: ExpertWeights,
        call: CallState,
        *,
        at_once: bool,
    ) -> Receiver:
        """Start the dispatch and return a function that waits for it.

        at_once: whether the caller calls the returned function next, so that one launch can send
            and receive.
        """


class HandshakePart(GroupPart[TorchGroup]):
    """Base of parts whose ranks exchange metadata (`exchange_metadata`) before they send rows."""

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        self.layer = Layer(self.manager, problem, self.manager.next_layer())

    def compares_calls(self) -> bool:
        return not self.layer.uses_device_handshake  # which compares only the first call in full

    def refuse(self, error: Exception) -> None:
        refuse(self.layer, error)

    def abandon(self, error: Exception) -> None:
        self.manager.abort(error)


class PackedRowsPart(HandshakePart):
    """Base of parts that send packed rows (`common.packed_rows`).

    The experts get the R received rows in the standard format, (R, H).
    """

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        return super().extra_rejections(problem, machine) + adapter_rejections(
            cls.__name__, problem
        )

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        self.rows = PackedRowBuffers(problem)

    @property
    def max_rows(self) -> int:
        """Maximum number of received rows: W * problem.tokens, or problem.max_received if lower."""
        problem = self.problem
        max_rows = problem.parallel.world_size * problem.tokens
        return max_rows if problem.max_received is None else min(max_rows, problem.max_received)

    def dispatch_shape(self, tokens: int) -> DispatchShape:
        return StandardShape(self.max_rows, self.problem.top_k)

    def prepare_no_receive(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: CallState
    ) -> Receiver:
        # Quantization inside `send` has its own profiler range, nested in this one.
        with stages.stage(stages.DISPATCH):
            receive = self.send(x_TH, routing, weights, call)

        def receive_in_stage() -> tuple[Dispatched, Handle]:
            with stages.stage(stages.DISPATCH):
                return receive()

        return receive_in_stage

    def layout_of(self, call: CallState) -> RowLayout:
        """Return the layout of the rows that a call sends."""
        return self.rows.layout(quantized=dispatches_quantized(self.problem, call))

    def pack(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        weights: ExpertWeights,
        call: CallState,
        *,
        amax: float | torch.Tensor | None,
        out_RB: torch.Tensor,
    ) -> torch.Tensor | None:
        """Write activations, scales and adapters of the tokens to the first T rows of `out_RB`.

        Activations are quantized if the call requires it. The caller writes ids and weights.
        Returns the scales of quantized tokens.

        amax: maximum absolute activation over all ranks, if they share a scale.
        out_RB: (rows, bytes) uint8, packed rows.
        """
        if self.has_local_scales(call):
            amax = None
        values, scale = quantize_tokens(x_TH, self.problem, weights=weights, call=call, amax=amax)
        layout, tokens = self.layout_of(call), out_RB[: len(x_TH)]
        layout.write(tokens, "x", values)
        if "scale" in layout.sections and scale is not None:
            layout.write(tokens, "scale", scale)
        self.rows.put_adapters(layout, out_RB, routing)
        return scale

    @abstractmethod
    def send(
        self, x_TH: torch.Tensor, routing: Routing, weights: ExpertWeights, call: CallState
    ) -> Receiver:
        """Start the dispatch and return a function that waits for it."""


def placement_rejections(part: str, problem: Problem) -> tuple[Rejection, ...]:
    """Return the rejections of problems that contradict their Parallel(placement=...)."""
    rejections = list[Rejection]()
    num_local_experts = len(problem.placement.slots[problem.parallel.rank])
    parties = (part, "problem")
    if problem.expert_map:
        hint = "Parallel(placement=...) already maps ids to local experts"
        rejections.append(Rejection("expert_map", parties, "an expert_map", "a placement", hint))
    if problem.e != num_local_experts:
        need = f"{num_local_experts} (experts of the placement on this rank)"
        rejections.append(Rejection("placement", parties, f"local_experts={problem.e}", need))
    return tuple(rejections)


def adapter_rejections(part: str, problem: Problem) -> tuple[Rejection, ...]:
    """Return the rejection of adapters if rows are quantized; adapters read unquantized rows."""
    if problem.adapters is None or not problem.scheme.dispatched_quantized:
        return ()
    got, need = f"rows of {problem.quant}", "unquantized rows, which adapters read"
    return (Rejection("lora", (part, "problem"), got, need),)


def check_rank(problem: Problem, rank: int, world_size: int) -> None:
    """Raise ConfigurationError unless the size of the group and this rank match the problem."""
    parallel = problem.parallel
    if world_size != parallel.world_size:
        need = f"{parallel.world_size}, the problem's world_size"
        raise ConfigurationError("process group's size", got=world_size, need=need)
    if rank != parallel.rank:
        need = f"{parallel.rank}, the problem's parallel.rank"
        raise ConfigurationError("rank in the process group", got=rank, need=need)
