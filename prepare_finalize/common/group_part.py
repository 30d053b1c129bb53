"""GroupPart and its subclasses: bases of PrepareAndFinalize parts over process groups."""

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
    ContiguousShape,
    ContiguousTokens,
    Dispatched,
    DispatchedRouting,
    DispatchShape,
    ExpertWeights,
    Handle,
    Routing,
)
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.agreement import Agreement, Layer, refuse
from prepare_finalize.common.packed_rows import RowLayout
from prepare_finalize.common.row_buffers import PackedRowBuffers
from prepare_finalize.common.tokens import dispatches_quantized, has_shared_scale, quantize_tokens
from prepare_finalize.common.torch_group import TorchGroup
from prepare_finalize.rendezvous.connect import rank_and_size
from prepare_finalize.rendezvous.hosts import Hosts, check_hosts


@dataclass(frozen=True)
class PartHandle(Handle):
    """Base of the handles of all GroupParts: the part that created it, and the call."""

    part: "GroupPart[Any]"
    call: CallState


@dataclass(frozen=True)
class GroupHandle(PartHandle):
    """Handle with the agreement of the call, and the router weights still to apply to rows."""

    agreement: Agreement
    topk_weights_RK: torch.Tensor | None


class Manager(Protocol):
    """Interface of all managers in `prepare_finalize`."""

    rank: int
    world_size: int
    hosts: Hosts

    def __init__(self, group: object | None = None) -> None: ...

    def check_device(self, device: torch.device | str) -> None: ...

    def destroy(self) -> None: ...


M = TypeVar("M", bound=Manager)
H = TypeVar("H", bound=PartHandle)


class GroupPart(PrepareAndFinalize, Generic[M]):
    """Base of parts that exchange through a manager of their process group.

    group: a manager of type `manager_class`, or a ProcessGroup (None: the default one), for which
    the part creates a manager with the default deadline. `destroy` closes the manager only
    if the part created it.

    Raises ConfigurationError if the size of the group, or this process's rank in it, differs from
    the problem's.
    """

    manager_class: ClassVar[type[Any]] = TorchGroup
    prefer_local_copies: ClassVar[bool] = True  # a pair goes to its expert's nearest copy
    ids_dtype = torch.int32  # dtype of the expert numbers that are passed to a library
    manager: M

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        has_manager = isinstance(group, self.manager_class)
        manager: Any = group
        check_rank(
            problem, *((manager.rank, manager.world_size) if has_manager else rank_and_size(group))
        )
        self._owns_manager = not has_manager
        self.manager = manager if has_manager else self.manager_class(group)
        self._tables: dict[torch.device, PlacementTables] = {}
        self._numberings: dict[tuple[torch.device, int], Numbering] = {}
        self._check_hosts()

    def _check_hosts(self) -> None:
        """Raise ConfigurationError if the part or the problem does not support the ranks' hosts."""
        per_host = self.problem.parallel.ranks_per_host
        part, requires = type(self).__name__, self.requires
        try:
            check_hosts(self.manager.hosts, part=part, requires=requires, ranks_per_host=per_host)
        except ConfigurationError:
            self.destroy()
            raise

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        quantize = quantize_rejections(cls.__name__, problem, machine)
        return quantize + placement_rejections(cls.__name__, problem)

    def max_num_tokens_per_rank(self) -> int:
        """Return problem.tokens, or the part's limit if that is lower."""
        limit, tokens = self.requires.max_tokens, self.problem.tokens
        return tokens if limit is None else min(limit, tokens)

    def check_machine(self, machine: Machine) -> None:
        self.manager.check_device(machine.device)

    def destroy(self) -> None:
        """Close the manager if this part created it; the part cannot be used afterwards."""
        if self._owns_manager:
            self.manager.destroy()

    def tables(self, device: torch.device) -> PlacementTables:
        """Return the placement tables on `device`; see `prefer_local_copies`."""
        if device not in self._tables:
            rank, hosts = self.manager.rank, self.manager.hosts
            near_ranks = (
                ((rank,), hosts.ranks_on(hosts.index_W[rank])) if self.prefer_local_copies else ()
            )
            self._tables[device] = self.problem.placement.tables(device, near_ranks)
        return self._tables[device]

    def numbering(self, device: torch.device, *, sinks: int = 0) -> Numbering:
        """Return the numbering of experts that the library uses, for ids on `device`.

        sinks: additional numbers per rank, for skipped pairs (`modular_kernel.ops.expert_slots`).
        """
        numbering = self._numberings.get((device, sinks))
        if numbering is None:
            placement, tables = self.problem.placement, self.tables(device)
            numbering = Numbering(placement, tables, self.manager.rank, sinks)
            self._numberings[device, sinks] = numbering
        return numbering

    def pair_specs(self, tokens: int) -> dict[str, BufferSpec]:
        """Return the buffers that `pairs` takes."""
        shape = (tokens, self.problem.top_k)
        return {
            "pair_numbers": BufferSpec(shape, self.ids_dtype),
            "pair_weights": BufferSpec(shape, torch.float32),
        }

    def pairs(
        self, routing: Routing, call: CallState, *, join: bool, factor: float = 1.0, sinks: int = 0
    ) -> Pairs:
        """Return the pairs of a call, with buffers for their expert numbers and weights."""
        ids_TK, take = routing.topk_ids_TK, call.workspace.take
        return Pairs(
            routing,
            self.numbering(ids_TK.device, sinks=sinks),
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
    ) -> ContiguousTokens:
        """Return the input of the experts: rows with local ids, int32, -1 for other ranks' experts.

        adapters_R, plain_RH: adapter slots of the rows, and the unquantized rows that adapters read
        if x is quantized.
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
        return ContiguousTokens(x_RH, routing, scale, plain_RH)

    def check_handle(self, handle: Handle, kind: type[H]) -> H:
        """Raise UnsupportedError unless this part made `handle`; return it."""
        if getattr(handle, "part", None) is not self:
            got, need = type(handle).__name__, f"one of this {type(self).__name__}"
            raise UnsupportedError("handle", got=got, need=need)
        assert isinstance(handle, kind)  # a part has one handle type
        return handle

    def has_local_scales(self, call: CallState) -> bool:
        """Return whether all scales depend on this rank's tokens only."""
        return not (dispatches_quantized(self.problem, call) and has_shared_scale(self.problem))

    def local_amax(self, x_TH: torch.Tensor, call: CallState) -> torch.Tensor | None:
        """Return amax of this rank's tokens, (1,) float32, if ranks share a scale; else None."""
        if self.has_local_scales(call):
            return None
        if x_TH.numel() == 0:
            return x_TH.new_zeros(1, dtype=torch.float32)
        return x_TH.abs().amax().float().reshape(1)


class FusedDispatchPart(GroupPart[M]):
    """Base of parts whose library can send and receive in one step.

    That takes fewer launches, or less host time, if nothing runs between sending and receiving.
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
        """Start the exchange and return a function that waits for it.

        at_once: True if the caller launches nothing else before it calls that function.
        """


class AgreeingPart(GroupPart[TorchGroup]):
    """Base of parts whose ranks agree on each call (`agree`) before they send any row."""

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        self.layer = Layer(self.manager, problem, self.manager.next_layer())

    def refuse(self, error: Exception) -> None:
        refuse(self.layer, error)

    def abandon(self, error: Exception) -> None:
        self.manager.break_off(error)


class RowsPart(AgreeingPart):
    """Base of parts that send packed rows with ids, weights and adapters.

    Experts get the (R, H) rows that arrived.
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
        """Maximum number of rows that may arrive: W * problem.tokens, or max_received."""
        problem = self.problem
        max_rows = problem.parallel.world_size * problem.tokens
        return max_rows if problem.max_received is None else min(max_rows, problem.max_received)

    def dispatch_shape(self, tokens: int) -> DispatchShape:
        return ContiguousShape(self.max_rows, self.problem.top_k)

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
        """Write the tokens to the first T of the rows `out_RB`, quantized if the call requires it.

        The caller writes ids and weights. amax: maximum absolute activation over all ranks, for
        schemes in which they share a scale. Returns the scales of quantized tokens.
        """
        if self.has_local_scales(call):
            amax = None
        values, scale = quantize_tokens(x_TH, self.problem, weights=weights, call=call, amax=amax)
        layout, tokens = self.layout_of(call), out_RB[: len(x_TH)]
        layout.put(tokens, "x", values)
        if "scale" in layout.sections and scale is not None:
            layout.put(tokens, "scale", scale)
        self.rows.put_adapters(layout, out_RB, routing)
        return scale

    @abstractmethod
    def send(
        self, x_TH: torch.Tensor, routing: Routing, weights: ExpertWeights, call: CallState
    ) -> Receiver:
        """Start the exchange and return a function that waits for it."""


def placement_rejections(part: str, problem: Problem) -> tuple[Rejection, ...]:
    """Return the rejections of a part that looks up experts in Parallel(placement=...)."""
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
    """Return the rejection of adapters by a part that dispatches quantized rows.

    Adapters read unquantized rows.
    """
    if problem.adapters is None or not problem.scheme.dispatched_quantized:
        return ()
    got, need = f"rows of {problem.quant}", "unquantized rows, which adapters read"
    return (Rejection("lora", (part, "problem"), got, need),)


def check_rank(problem: Problem, rank: int, world_size: int) -> None:
    """Raise ConfigurationError unless group size and rank in it match the problem."""
    parallel = problem.parallel
    if world_size != parallel.world_size:
        need = f"{parallel.world_size}, the problem's world_size"
        raise ConfigurationError("process group's size", got=world_size, need=need)
    if rank != parallel.rank:
        need = f"{parallel.rank}, the problem's parallel.rank"
        raise ConfigurationError("rank in the process group", got=rank, need=need)
