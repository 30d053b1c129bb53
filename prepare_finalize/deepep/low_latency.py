"""DeepEPLLPrepareAndFinalize: low-latency kernels of DeepEP's Buffer, for decode.

An exchange component ("part") for experts that take the batched format, (e, C, H): C rows for each
of the e experts of a rank. If an expert has n tokens, its first n rows are valid. A pair is one
token with one of its K experts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modular_kernel.compatibility.support import PrepareFinalizeRequirements, Rejection
from modular_kernel.contracts import CallState, Receiver, TopKWeightAndReduce
from modular_kernel.ops.expert_slots import number_pairs
from modular_kernel.ops.quantize import (
    quantize_rows,
    quantize_specs,
    take_quantized,
)
from modular_kernel.ops.valid_rows import BatchedRows
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.spec.problem import ActivationFormat, Machine, Problem, Reduce, RowContents
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    Dispatched,
    ExpertWeights,
    Handle,
    Routing,
)
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.tokens import dispatches_quantized
from prepare_finalize.deepep.arguments import GPUS_PER_HOST
from prepare_finalize.deepep.library import DEEP_EP, check_torch_settings
from prepare_finalize.deepep.low_latency_buffer import LowLatencyBuffer, LowLatencyDispatch
from prepare_finalize.deepep.part import (
    BF16,
    HOPPER,
    DeepEPHandle,
    DeepEPPart,
)

_GROUP = 128  # values that share a scale if the library quantizes
# The capacity of an expert, world_size * tokens, must be a multiple of 4. The tokens per rank are
# therefore rounded up to a multiple of 4.
_TOKENS_MULTIPLE = 4
# The hidden sizes for which the kernels are compiled.
_HIDDEN_SIZES = frozenset({2048, 2560, 4096, 5120, 6144, 7168, 8192})


@dataclass(frozen=True)
class LowLatencyHandle(DeepEPHandle):
    """Handle of a low-latency dispatch.

    ids_TK: expert numbers of the pairs that were passed to the library, in its dtype of ids.
    """

    ids_TK: torch.Tensor


class DeepEPLLPrepareAndFinalize(DeepEPPart):
    """Send a row to each expert of a token, in the batched format (e, world_size * tokens, H).

    The valid rows of an expert come first. The combine sends all rows back, and computes their
    weighted sum in float32.

    If the scheme is float8_e4m3fn with one scale per 128 values, the library quantizes in the
    dispatch, with scales of at least 1e-4 / 448. Otherwise, rows are sent in bfloat16 and quantized
    by the receiver. The CPU does not wait. T may differ between ranks and may be 0.

    The part was run on GPUs with DeepEP 1.2.1. It was not run on a GPU with DeepEP 2, whose Buffer
    has the same methods; with it, the part was verified against a stand-in on a CPU. DeepEP 2
    limits the tokens of a rank to NVSHMEM_QP_DEPTH / 2 - 1, 511 by default.
    """

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.BATCHED_EXPERTS,
        devices=frozenset({"cuda"}),
        min_arch=HOPPER,
        packages=(DEEP_EP.name,),
        providers=(DEEP_EP,),
        dtypes=BF16,
        top_k=(1, 11),
        hidden_sizes=_HIDDEN_SIZES,
        graph_capturable=True,
        deterministic=False,
        reduces=frozenset({Reduce.NAIVE_BATCHED, Reduce.DELEGATE}),
        localizes_ids=True,
        padding=RowContents.UNDEFINED,
        dispatch_schemes=ACTIVATION_SCHEMES,
        world_sizes=(2, None),
        linear_placement=False,
        ranks_per_host=GPUS_PER_HOST,
        full_hosts=True,
        asynchronous=True,
        received_by_library=True,
        capacity_unit=_TOKENS_MULTIPLE,
    )

    # 14 experts per SM, on the Hopper GPU with the fewest SMs.
    max_experts = 14 * 114

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        rejections = list(super().extra_rejections(problem, machine))
        slot_counts = sorted({len(slots) for slots in problem.placement.slots})
        if len(slot_counts) > 1:
            got, need = (
                f"{slot_counts[0]} to {slot_counts[-1]} experts on a rank",
                "the same number on each",
            )
            rejections.append(Rejection("placement", (cls.__name__, "problem"), got, need))
        return tuple(rejections)

    def make_buffer(self) -> None:
        self._get_buffer()

    def dispatch_shape(self, tokens: int) -> BatchedShape:
        # Other ranks may pass up to problem.tokens even if this rank passes fewer.
        return BatchedShape(self.problem.e, self.world_size * buffer_tokens(self.problem.tokens))

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        problem, shape = self.problem, self.dispatch_shape(tokens)
        pairs = self.pair_specs(tokens)
        if problem.scheme.dispatched_quantized and not quantized_by_library(problem):
            rows = shape.experts * shape.capacity
            scheme, segments = problem.scheme, shape.experts
            specs = quantize_specs("x", scheme, rows, problem.hidden, segments=segments)
            return {**pairs, **specs}
        return pairs

    def send(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        weights: ExpertWeights,
        call: CallState,
        *,
        at_once: bool,
    ) -> Receiver:
        self.check_call(x_TH.device)
        # Pairs with the same expert are joined, because an expert has room for one row per token.
        # The library applies the router weights, so they are multiplied by the scaling factor.
        factor = self.problem.routed_scaling_factor
        pairs = self.pairs(routing, call, join=True, factor=factor)
        number_pairs(pairs)
        ids_TK, quantize = pairs.numbers_TK, quantized_by_library(self.problem)
        quantize = quantize and dispatches_quantized(self.problem, call)
        dispatch = self._get_buffer().dispatch(
            x_TH.contiguous(), ids_TK, quantize=quantize, at_once=at_once
        )

        def receive() -> tuple[Dispatched, Handle]:
            dispatch.receive()
            handle = LowLatencyHandle(self, call, dispatch.handle, pairs.weights_TK, ids_TK)
            return self._make_batched_tokens(dispatch, weights, call), handle

        return receive

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        part_handle = self.check_handle(handle, LowLatencyHandle)
        check_torch_settings(self.library)
        contiguous_out = out if out.is_contiguous() else out.new_empty(out.shape)
        self._get_buffer().combine(
            expert_output,
            part_handle.ids_TK,
            part_handle.weights,
            part_handle.library_handle,
            contiguous_out,
        )
        if contiguous_out is not out:
            out.copy_(contiguous_out)

    def _make_batched_tokens(
        self, dispatch: LowLatencyDispatch, weights: ExpertWeights, call: CallState
    ) -> BatchedTokens:
        """Return the received rows, quantized if this call dispatches quantized tokens."""
        problem, x_eCH, counts_e = self.problem, dispatch.x_eCH, dispatch.counts_e
        if dispatch.scale_eCG is not None:
            return BatchedTokens(x_eCH, counts_e, dispatch.scale_eCG)
        if not dispatches_quantized(problem, call):
            return BatchedTokens(x_eCH, counts_e)
        scheme, (experts, capacity, hidden) = problem.scheme, x_eCH.shape
        static_scale = weights.a1_scale if scheme.static else None
        shape = experts * capacity, hidden
        out = take_quantized(
            call.workspace, "x", scheme, shape, segments=experts, static_scale=static_scale
        )
        quantize_rows(x_eCH.flatten(0, 1), scheme, out=out, valid_rows=BatchedRows(counts_e))
        scale = out.scale if scheme.static else out.scale.view(experts, capacity, -1)
        return BatchedTokens(out.q_RK.view_as(x_eCH), counts_e, scale)

    def _get_buffer(self) -> LowLatencyBuffer:
        problem = self.problem
        tokens = buffer_tokens(problem.tokens)
        return self.manager.low_latency(tokens, problem.hidden, self.num_experts)


def buffer_tokens(tokens: int) -> int:
    """Return the tokens per rank of a buffer for calls of up to `tokens` tokens."""
    return max(1, math.ceil(tokens / _TOKENS_MULTIPLE)) * _TOKENS_MULTIPLE


def quantized_by_library(problem: Problem) -> bool:
    """Return whether the library's quantization equals the scheme's."""
    scheme = problem.scheme
    has_library_groups = scheme.activation_granularity == "group" and scheme.group[-1] == _GROUP
    return scheme.activation == "float8_e4m3fn" and has_library_groups and problem.hidden % 512 == 0
