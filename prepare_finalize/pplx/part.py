"""PplxPrepareAndFinalize: pplx-kernels within one host, in the batched format.

An exchange component ("part") for experts that take the batched format, (e, C, H): C rows for each
of the e experts of a rank. The library writes a token directly to a row of each of its experts. It
cannot skip a pair (one token with one of its K experts), because it sends every token to exactly K
existing expert slots. Each rank therefore has extra slots, called sinks, that receive the rows of
skipped pairs. In the combine, the outputs of sinks are 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch

from modular_kernel.compatibility.support import PrepareFinalizeRequirements, Rejection
from modular_kernel.contracts import CallState, Receiver, TopKWeightAndReduce
from modular_kernel.errors import CapacityError, UnsupportedError
from modular_kernel.ops.expert_slots import count_slots_per_rank
from modular_kernel.ops.quantize import scale_shape
from modular_kernel.ops.zero_rows import zero_rows
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES, STORAGE
from modular_kernel.spec.problem import (
    MAX_TOP_K,
    ActivationFormat,
    Machine,
    Problem,
    Reduce,
    RowContents,
)
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    Dispatched,
    ExpertWeights,
    Handle,
    Routing,
)
from modular_kernel.workspace import EXPERT_OUTPUT, BufferSpec
from prepare_finalize.common.group_part import FusedDispatchPart, PartHandle
from prepare_finalize.common.tokens import (
    has_shared_scale,
    number_and_quantize_tokens,
    token_specs,
)
from prepare_finalize.pplx.group import PplxBuffers, PplxGroup, PplxShape

# Fields of the problem that must be equal on all ranks.
_SHARED = (
    *("tokens", "hidden", "intermediate", "experts", "top_k", "dtype", "quant", "placement"),
    *("activation", "bias", "routed_scaling_factor"),
)
_ALIGNMENT = 16  # bytes; the library copies rows and scales in units of this size
_MAX_ROW_BYTES = 48 << 10  # a row, its scales and its index must fit into shared memory


@dataclass(frozen=True)
class PplxHandle(PartHandle):
    """Handle of a call.

    use_count: number of calls that have used the buffers, including this one. If it differs from
        `buffers.use_count`, the handle is out of date.
    slots_TK: uint32, the expert slot to which each pair was sent.
    weights_TK: float32, the router weight of each pair.
    sink_counts_S: int32, number of rows in each sink.
    """

    buffers: PplxBuffers
    use_count: int
    slots_TK: torch.Tensor
    weights_TK: torch.Tensor
    sink_counts_S: torch.Tensor


class PplxPrepareAndFinalize(FusedDispatchPart[PplxGroup]):
    """Send a row to each expert of a token, in the batched format (e, W * problem.tokens, H).

    The rows of an expert are in any order. The combine applies the router weights and adds the rows
    of a token in float32. If the scheme quantizes activations, they are quantized before they are
    sent.

    Nothing is read on the host. Kernels wait for peers without a timeout, so a rank that does not
    take part blocks the others permanently. A call that was captured in a CUDA graph uses the same
    buffers in every replay, so no other call of this shape may be in flight during a replay.
    Creating and destroying a part is collective.
    """

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.BATCHED_EXPERTS,
        devices=frozenset({"cuda"}),
        min_arch=(9, 0),
        packages=("pplx_kernels",),
        packages_source_url="https://github.com/perplexityai/pplx-kernels",
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        top_k=(1, MAX_TOP_K),  # pplx-kernels 2bd6e30 loops over any K in its intranode kernels
        hidden_multiple=8,
        reduces=frozenset({Reduce.NAIVE_BATCHED, Reduce.DELEGATE}),
        localizes_ids=True,
        padding=RowContents.UNDEFINED,
        dispatch_schemes=ACTIVATION_SCHEMES,
        can_defer_quant=False,
        world_sizes=(2, 8),
        linear_placement=False,
        one_host=True,
        asynchronous=True,
        graph_capturable=True,
        deterministic=False,  # an expert's rows are in the order of arrival
    )
    manager_class = PplxGroup

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        self._shape = _make_shape(problem)
        self._num_sinks = num_sinks(problem)
        self.manager.check_equal({name: getattr(problem, name) for name in _SHARED})
        self.manager.reserve(self._shape)

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        rejections, name = list(super().extra_rejections(problem, machine)), cls.__name__
        if has_shared_scale(problem):
            got = f"{problem.quant}: one scale for the tokens of all ranks"
            need = "a static scale, or one for each row"
            rejections.append(Rejection("dispatch_quant", (name, "problem"), got, need))
        row_bytes, scale_bytes = _compute_row_bytes(problem)
        total_bytes = row_bytes + scale_bytes + _ALIGNMENT  # with the index of the row
        for is_violated, got, need in (
            (
                row_bytes % _ALIGNMENT,
                f"{row_bytes} bytes a row",
                f"a multiple of {_ALIGNMENT} bytes",
            ),
            (
                scale_bytes > row_bytes,
                f"{scale_bytes} bytes of scales a row",
                f"at most its {row_bytes} bytes",
            ),
            (
                total_bytes > _MAX_ROW_BYTES,
                f"{total_bytes} bytes a row",
                f"at most {_MAX_ROW_BYTES} bytes",
            ),
        ):
            if is_violated:
                rejections.append(Rejection("hidden", (name, "problem"), got, need))
        return tuple(rejections)

    def dispatch_shape(self, tokens: int) -> BatchedShape:
        # The slots of a rank are its experts, then its sinks. The library needs buffers for both.
        world_size = self.problem.parallel.world_size
        return BatchedShape(self._shape.slots // world_size, world_size * self._shape.max_tokens)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        problem, scheme, shape = self.problem, self.problem.scheme, self.dispatch_shape(tokens)
        rows, dtype = (shape.experts, shape.capacity), problem.dtype
        specs = token_specs(problem, tokens)
        if scheme.dispatched_quantized:
            dtype = STORAGE[scheme.activation]
        columns = self._shape.scale_bytes // 4
        if columns:
            specs["sent_scale"] = BufferSpec((tokens, columns), torch.float32)
            specs["batched_scale"] = BufferSpec((*rows, columns), torch.float32)
        return {
            **specs,
            **self.pair_specs(tokens),
            "sent_x": BufferSpec((tokens, problem.hidden), dtype),
            "batched_x": BufferSpec((*rows, problem.hidden), dtype),
            "expert_counts": BufferSpec((shape.experts,), torch.int32),
        }

    def send(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        weights: ExpertWeights,
        call: CallState,
        *,
        at_once: bool,
    ) -> Receiver:
        if len(x_TH) > self._shape.max_tokens:
            need = f"<= {self._shape.max_tokens} (capacity of the buffers)"
            raise CapacityError("tokens", got=len(x_TH), need=need)
        self.manager.check_device(x_TH.device)
        factor = self.problem.routed_scaling_factor
        pairs = self.pairs(routing, call, join=True, factor=factor, num_sinks=self._num_sinks)
        rows, scale = number_and_quantize_tokens(
            x_TH, self.problem, pairs, weights=weights, call=call
        )
        slots_TK = pairs.numbers_TK.view(torch.uint32)
        received = self._take_receive_buffers(call)
        sent = (_make_contiguous(rows, call), self._pad_scale(scale, call))
        buffers = self.manager.take(self._shape)
        use_count, arguments = buffers.use_count, (*received, *sent, slots_TK, None)
        # If `at_once`, the caller receives next, so one launch sends and receives.
        buffers.all_to_all.dispatch(*arguments, do_send=True, do_recv=at_once)

        def receive() -> tuple[Dispatched, Handle]:
            if not at_once:
                buffers.all_to_all.dispatch(*arguments, do_send=False, do_recv=True)
            counts, x_eCH, scales = (t if t is None else t[: self.problem.e] for t in received)
            assert counts is not None
            assert x_eCH is not None
            if scales is not None and scale is not None:
                scales = scales[..., : scale.shape[1]]  # remove padding
            tokens = BatchedTokens(x_eCH, counts, scale if scales is None else scales)
            sink_counts_S = received[0][-self._num_sinks :]
            handle_tensors = slots_TK, pairs.weights_TK, sink_counts_S
            return tokens, PplxHandle(self, call, buffers, use_count, *handle_tensors)

        return receive

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        part_handle = self.check_handle(handle, PplxHandle)
        buffers = part_handle.buffers
        if not buffers.in_use or buffers.use_count != part_handle.use_count:
            raise UnsupportedError(
                "handle", got="one that was combined", need="the handle of an unfinished call"
            )
        shape = self.dispatch_shape(len(out))
        all_rows = part_handle.call.workspace.take(
            EXPERT_OUTPUT, (shape.experts, shape.capacity, self.problem.hidden)
        )
        if expert_output.data_ptr() != all_rows.data_ptr():
            all_rows[: len(expert_output)].copy_(expert_output)
        zero_rows(all_rows[-self._num_sinks :], part_handle.sink_counts_S)
        buffers.all_to_all.combine(
            out, part_handle.slots_TK, part_handle.weights_TK, all_rows, None
        )
        self.manager.release(buffers)

    def _take_receive_buffers(
        self, call: CallState
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the library's output buffers for all N slots: row counts, rows and scales."""
        take, shape = call.workspace.take, self.dispatch_shape(0)
        rows, columns = (shape.experts, shape.capacity), self._shape.scale_bytes // 4
        scales = take("batched_scale", (*rows, columns)) if columns else None
        x_NCH = take("batched_x", (*rows, self.problem.hidden))
        return take("expert_counts", (shape.experts,)), x_NCH, scales

    def _pad_scale(self, scale: torch.Tensor | None, call: CallState) -> torch.Tensor | None:
        """Return the scales to send, padded with columns to a multiple of 16 bytes."""
        columns = self._shape.scale_bytes // 4
        if not columns:
            return None
        assert scale is not None
        if scale.shape[1] == columns:
            return scale
        padded = call.workspace.take("sent_scale", (len(scale), columns))
        padded[:, : scale.shape[1]].copy_(scale)
        return padded


def _compute_row_bytes(problem: Problem) -> tuple[int, int]:
    """Return the bytes of a dispatched row, and the bytes of its scales, padded to 16 bytes."""
    scheme, itemsize, scale_bytes = problem.scheme, problem.dtype.itemsize, 0
    if scheme.dispatched_quantized:
        itemsize = STORAGE[scheme.activation].itemsize
        if scheme.activation_granularity != "tensor":
            scale_bytes = 4 * scale_shape(scheme, 1, problem.hidden)[1]
    return problem.hidden * itemsize, ceil(scale_bytes / _ALIGNMENT) * _ALIGNMENT


def num_sinks(problem: Problem) -> int:
    """Return the number of sinks per rank.

    All K pairs of a token may be skipped, and each pair needs a different sink, on any rank.
    """
    return ceil(problem.top_k / problem.parallel.world_size)


def _make_shape(problem: Problem) -> PplxShape:
    row_bytes, scale_bytes = _compute_row_bytes(problem)
    slots = problem.parallel.world_size * (
        count_slots_per_rank(problem.placement) + num_sinks(problem)
    )
    max_tokens = max(1, problem.tokens)  # the library requires at least one token
    return PplxShape(max_tokens, slots, problem.top_k, problem.hidden, row_bytes, scale_bytes)


def _make_contiguous(rows: torch.Tensor, call: CallState) -> torch.Tensor:
    """Return the rows, contiguous and 16-byte aligned, as the library requires."""
    if rows.is_contiguous() and rows.data_ptr() % _ALIGNMENT == 0:
        return rows
    buffer = call.workspace.take("sent_x", tuple(rows.shape))
    return buffer.copy_(rows)
