"""SymmMemPrepareAndFinalize: kernels that write to and read from the memory of other GPUs.

An exchange component ("part") for GPUs that reach each other over NVLink. Its buffers are in
symmetric memory: memory with the same layout on every rank, which all ranks can access
(`symm_mem.group`). A pair is one token with one of its K experts.
"""

import hashlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from modular_kernel.compatibility.support import PrepareFinalizeRequirements, Rejection
from modular_kernel.contracts import CallState, Receiver, TopKWeightAndReduce
from modular_kernel.errors import UnsupportedError
from modular_kernel.ops.quantize import QuantizedRows, quantize_rows, quantize_specs, take_quantized
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.replay import stages
from modular_kernel.replay.recording import bypass_replay_while, run_in_replays
from modular_kernel.spec.problem import ActivationFormat, Machine, Problem, Reduce, RowContents
from modular_kernel.tensors import Dispatched, ExpertWeights, Handle, Routing, StandardShape
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.group_part import GroupPart, PartHandle, adapter_rejections
from prepare_finalize.common.tokens import has_shared_scale, weight_and_reduce
from prepare_finalize.symm_mem.group import Heap, SymmetricGroup, align_up
from prepare_finalize.symm_mem.launch import (
    CallBuffers,
    SymmetricExchange,
    buffer_sections,
    quantizes_in_dispatch,
)

_MAX_IN_FLIGHT = 2  # calls between prepare and finalize


@dataclass(frozen=True)
class SymmMemHandle(PartHandle):
    """Handle of an exchange over symmetric memory.

    buffer_index: index of the buffers of the call.
    topk_weights_RK: router weights that `finalize` must apply, or None.
    """

    buffer_index: int
    exchange: SymmetricExchange
    topk_weights_RK: torch.Tensor | None


class SymmMemPrepareAndFinalize(GroupPart[SymmetricGroup]):
    """Write each token's row once to each rank that holds one of its experts.

    The dispatch kernel can quantize the rows. Each rank computes the weighted sum of the pairs of a
    received row. The token's rank reads the sums of all ranks and adds them in float32 in rank
    order. Dispatch and combine are one launch each, and the host does not wait.

    Rows have fixed positions: token t of rank r is row r * problem.tokens + t on every rank,
    regardless of the routing. No counts are exchanged, T may differ between ranks, and a call can
    be captured in a CUDA graph. Experts receive world_size * problem.tokens rows, in which unused
    rows have ids of -1. For calls of very different sizes, compose one kernel for few tokens and
    one for many.

    If a wait in a kernel reaches its deadline, the output is NaN, and the next call, or `check`,
    raises the error. Two calls may be in flight. Requires GPUs with peer access (or, on a CPU with
    interpreted kernels, processes of one machine).
    """

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        triton=True,
        packages=("triton",),
        reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
        localizes_ids=True,
        padding=RowContents.UNDEFINED,
        dispatch_schemes=ACTIVATION_SCHEMES,
        can_defer_quant=False,
        world_sizes=(2, 8),
        linear_placement=False,
        one_host=True,
        lora=True,
        batch_invariant=True,
        asynchronous=True,
        graph_capturable=True,
    )
    replayable = True  # a plan can replay its recorded launches
    manager_class = SymmetricGroup
    keeps_expert_output = True

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        self._buffers: list[CallBuffers] = []
        layout = buffer_sections(problem)
        nbytes = sum(align_up(section.nbytes) for section in layout.values())

        def initialize(heap: Heap) -> None:
            for index in range(_MAX_IN_FLIGHT):
                views = heap.view_sections(layout, index * nbytes)
                self._buffers.append(_make_buffers(views, heap.deltas_W.device))

        self._heap = self.manager.allocate_heap(
            _MAX_IN_FLIGHT * nbytes, layer_signature(problem), initialize
        )
        # Create the tables now, because a call that creates them could not be recorded.
        self.tables(self._heap.deltas_W.device)
        self._free_indices = list(range(_MAX_IN_FLIGHT))
        self._finalizers: dict[int, weakref.finalize[..., SymmMemHandle]] = {}

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        from prepare_finalize.symm_mem.compile_cases import launch_all, problems

        return {str(problem): partial(launch_all, problem) for problem in problems()}

    @classmethod
    def operation_cases(cls) -> Mapping[str, Callable[[], Mapping[str, torch.Tensor]]]:
        from prepare_finalize.symm_mem.operation_cases import list_cases

        return list_cases()

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        rejections = list(super().extra_rejections(problem, machine))
        if has_shared_scale(problem):
            got, need = str(problem.scheme), "a scale per token, per group, or static"
            rejections.append(Rejection("scale_of_all_ranks", (cls.__name__, "problem"), got, need))
        return (*rejections, *adapter_rejections(cls.__name__, problem))

    def dispatch_shape(self, tokens: int) -> StandardShape:
        rows = self.problem.parallel.world_size * self.problem.tokens
        return StandardShape(rows, self.problem.top_k)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        problem, scheme = self.problem, self.problem.scheme
        specs = {"sent": BufferSpec((problem.tokens,), torch.int32)}
        if self._quantizes_before_dispatch():
            specs |= quantize_specs("x", scheme, problem.tokens, problem.hidden)
        return specs

    def may_record(self) -> bool:
        # Buffers with another index are next only if a call is in flight.
        return self._free_indices[:1] == [0]

    def check(self) -> None:
        """Wait for the device. Raise CommunicationError if a call has failed."""
        self.manager.check()

    def _quantizes_before_dispatch(self) -> bool:
        scheme = self.problem.scheme
        in_dispatch = quantizes_in_dispatch(scheme, self.problem.hidden)
        return scheme.dispatched_quantized and not in_dispatch

    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: CallState
    ) -> tuple[Dispatched, Handle]:
        return self._launch_dispatch(x_TH, routing, weights, call, wait=True)

    def prepare_no_receive(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: CallState
    ) -> Receiver:
        received, handle = self._launch_dispatch(x_TH, routing, weights, call, wait=False)

        def receive() -> tuple[Dispatched, Handle]:
            with stages.stage(stages.DISPATCH):
                handle.exchange.receive()
            return received, handle

        return receive

    def _launch_dispatch(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        weights: ExpertWeights,
        call: CallState,
        *,
        wait: bool,
    ) -> tuple[Dispatched, SymmMemHandle]:
        """Launch the dispatch; return the received rows and the handle.

        wait: whether the dispatch also waits for the rows of all ranks.
        """
        problem, manager = self.problem, self.manager
        manager.check_device(x_TH.device)
        manager.next_step()
        if not self._free_indices:
            need = f"at most {_MAX_IN_FLIGHT}: finish one first"
            raise UnsupportedError("calls in flight", got=_MAX_IN_FLIGHT + 1, need=need)
        index = self._free_indices[0]  # removed below, once a handle exists that releases it
        # Every rank must use the same buffers, the first free ones. A replay always uses the
        # buffers of the recorded call.
        bypass_replay_while(lambda: index not in self._free_indices[:1])
        nbytes = x_TH.nbytes

        def begin_replay() -> None:
            manager.next_step()
            manager.log_launch("dispatch", nbytes)

        run_in_replays(begin_replay)
        buffers = self._buffers[index]
        rank_bits_T = call.workspace.take("sent", (problem.tokens,))
        tokens = x_TH.shape[0]
        exchange = SymmetricExchange(
            manager, problem, buffers, self._heap.deltas_W, rank_bits_T, tokens
        )
        quantized = (
            self._quantize(x_TH, weights, call) if self._quantizes_before_dispatch() else None
        )
        manager.log_launch("dispatch", nbytes)
        tables = self.tables(x_TH.device)
        quantizes = quantizes_in_dispatch(problem.scheme, problem.hidden)
        with stages.stage(stages.QUANTIZE_DISPATCH if quantizes else stages.DISPATCH):
            exchange.send(x_TH, routing, tables, call, quantized=quantized, wait=wait)
        topk_weights_RK = None if problem.apply_router_weight_on_input else buffers.weights_RK
        has_static_scale = problem.scheme.dispatched_quantized and problem.scheme.static
        scale = weights.a1_scale if has_static_scale else buffers.scale_RG
        rows = buffers.x_RH, scale, buffers.ids_RK, buffers.weights_RK, buffers.adapters_R
        local_tokens = self.local_tokens(call, *rows)
        handle = SymmMemHandle(self, call, index, exchange, topk_weights_RK)
        # If a call is never finished because of an error, the finalizer releases its buffers.
        self._finalizers[index] = weakref.finalize(handle, self._release, index)
        self._free_indices.remove(index)
        return local_tokens, handle

    def _release(self, buffer_index: int) -> None:
        self._free_indices = sorted((*self._free_indices, buffer_index))

    def _quantize(
        self, x_TH: torch.Tensor, weights: ExpertWeights, call: CallState
    ) -> QuantizedRows:
        scheme = self.problem.scheme
        static_scale = weights.a1_scale if scheme.static else None
        shape = (x_TH.shape[0], self.problem.hidden)
        out = take_quantized(call.workspace, "x", scheme, shape, static_scale=static_scale)
        with stages.stage(stages.QUANTIZE_INPUT):
            quantize_rows(x_TH, scheme, out=out)
        return out

    def expert_output(self, handle: Handle) -> torch.Tensor:
        return self.check_handle(handle, SymmMemHandle).exchange.buffers.y_RH

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        part_handle = self.check_handle(handle, SymmMemHandle)
        if part_handle.buffer_index in self._free_indices:
            raise UnsupportedError(
                "handle", got="the handle of a finished call", need="the handle of a call in flight"
            )
        y_RH, manager = part_handle.exchange.buffers.y_RH, self.manager
        if expert_output is not y_RH:
            weight_and_reduce(
                expert_output, part_handle.topk_weights_RK, self.problem, reduce=reduce, out=y_RH
            )
        nbytes = y_RH.nbytes
        with stages.stage(stages.COMBINE):
            part_handle.exchange.combine(out)

        def end_call() -> None:
            manager.log_launch("combine", nbytes)
            manager.check_open()  # raises an error that has reached the host already

        run_in_replays(end_call)
        self._finalizers.pop(part_handle.buffer_index)()
        end_call()


def _make_buffers(views: dict[str, torch.Tensor], device: torch.device) -> CallBuffers:
    """Return the buffers of a call in their initial state, without flags and rows."""
    views["arrived_W"].zero_()
    views["summed_W"].zero_()
    views["ids_RK"].fill_(-1)
    counters = torch.zeros(2, 2, dtype=torch.int32, device=device)
    if "adapters_R" in views:
        views["adapters_R"].fill_(-1)
    tensors = {name: views[name] for name in views if name != "scale_RG"}
    return CallBuffers(
        scale_RG=views.get("scale_RG"), dispatches=counters[0], combines=counters[1], **tensors
    )


def layer_signature(problem: Problem) -> str:
    """Return a string that identifies the layer and its placement, the same on all ranks.

    `allocate_heap` compares these strings, so that different layers do not share memory.
    """
    parallel = replace(problem.parallel, rank=0)
    without_rank = replace(problem, parallel=parallel, local_experts=None)
    return f"{without_rank} {hashlib.sha256(repr(without_rank).encode()).hexdigest()[:8]}"
