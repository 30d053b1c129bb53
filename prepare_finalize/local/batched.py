"""BatchedPrepareAndFinalize: the batched format, (e, C, H), on a single rank.

The batched format has C rows for each of the e experts on a rank. If an expert has n tokens, its
first n rows are valid. Low-latency all-to-all libraries produce this format. This
PrepareAndFinalize component ("part") produces it without communication, so that the same experts
can run and be tested on one rank. A pair is one token with one of its K experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modular_kernel.compatibility.support import PrepareFinalizeRequirements, Rejection
from modular_kernel.contracts import CallState, PrepareAndFinalize, TopKWeightAndReduce
from modular_kernel.errors import UnsupportedError
from modular_kernel.ops.batch import assign_rows, assign_rows_scratch
from modular_kernel.ops.permute import permute_tokens
from modular_kernel.ops.permute_quantize import permute_and_quantize
from modular_kernel.ops.quantize import (
    QuantizedRows,
    quantize_rejections,
    quantize_rows,
    quantize_specs,
    scale_shape,
    take_quantized,
)
from modular_kernel.ops.valid_rows import PairRows
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES, STORAGE
from modular_kernel.replay import stages
from modular_kernel.spec.problem import (
    ActivationFormat,
    IdSpace,
    Machine,
    Problem,
    Reduce,
    RowContents,
)
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    Dispatched,
    DispatchedRouting,
    ExpertRows,
    ExpertWeights,
    Handle,
    Routing,
)
from modular_kernel.workspace import BufferSpec
from topk_reduce import TopKWeightAndReduceNaiveBatched


@dataclass(frozen=True)
class BatchedHandle(Handle):
    """The state of a call that `prepare` passes to `finalize`.

    row_of_pair_TK: int32, index of the batched row of each pair, in [0, e * C), or -1 if the pair
        has no row.
    topk_weights_TK: router weights that `finalize` must apply, or None.
    """

    row_of_pair_TK: torch.Tensor
    topk_weights_TK: torch.Tensor | None


class BatchedPrepareAndFinalize(PrepareAndFinalize):
    """Copy tokens, (T, H), to the batched format, (e, C, H), one row per token and expert.

    The capacity C is T, rounded up if the experts require a multiple. T rows per expert are enough:
    if a token selects an expert more than once, those pairs share one row. The rows of an expert
    are in the order of tokens. Rows beyond the count of an expert are undefined. Tokens are
    quantized while they are copied, or before they are copied if all tokens share a dynamic scale.
    """

    replayable = True  # a plan can replay its recorded launches
    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.BATCHED_EXPERTS,
        reduces=frozenset({Reduce.NAIVE_BATCHED, Reduce.DELEGATE}),
        keep_topk=True,
        localizes_ids=True,
        multiplies_input=True,
        padding=RowContents.UNDEFINED,
        dispatch_schemes=ACTIVATION_SCHEMES,
        can_defer_quant=False,
        graph_capturable=True,
        batch_invariant=True,
        lora=True,
        rounds_capacity=True,
    )

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        return quantize_rejections(cls.__name__, problem, machine)

    def dispatch_shape(self, tokens: int) -> BatchedShape:
        return BatchedShape(self.problem.e, self.padded_capacity(tokens))

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        problem, scheme = self.problem, self.problem.scheme
        capacity = self.padded_capacity(tokens)
        x_shape, specs = (problem.e, capacity, problem.hidden), dict[str, BufferSpec]()
        dtype = problem.dtype
        if scheme.dispatched_quantized:
            dtype = STORAGE[scheme.activation]
            if _has_dynamic_tensor_scale(scheme):
                specs |= quantize_specs("x", scheme, tokens, problem.hidden)
            elif not scheme.static:
                shape = (problem.e, *scale_shape(scheme, capacity, problem.hidden))
                specs["batched_scale"] = BufferSpec(shape, torch.float32)
        if problem.adapters is not None:
            specs["batched_adapters"] = BufferSpec((problem.e, capacity), torch.int32)
            if scheme.dispatched_quantized:
                specs["batched_unquantized_x"] = BufferSpec(x_shape, problem.dtype)
        return {
            **specs,
            "batched_x": BufferSpec(x_shape, dtype),
            "row_of_pair": BufferSpec((tokens, problem.top_k), torch.int32),
            "expert_counts": BufferSpec((problem.e,), torch.int32),
            "assign_scratch": assign_rows_scratch(tokens, problem.top_k, problem.e),
        }

    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: CallState
    ) -> tuple[Dispatched, Handle]:
        problem, scheme, tokens = self.problem, self.problem.scheme, x_TH.shape[0]
        specs = self.workspace_shapes(tokens)
        buffers = {name: call.workspace.take(name, spec.shape) for name, spec in specs.items()}
        row_of_pair_TK, counts_e = buffers["row_of_pair"], buffers["expert_counts"]
        dispatched_routing = DispatchedRouting(
            topk_weights_TK=None,
            topk_ids_TK=routing.topk_ids_TK,
            space=IdSpace.GLOBAL,
            num_experts=problem.experts,
            expert_map=weights.expert_map,
            invalid_ids=call.invalid_ids,
        )
        with stages.stage(stages.SORT):
            assign_rows(
                dispatched_routing,
                capacity=buffers["batched_x"].shape[1],
                row_of_pair_TK=row_of_pair_TK,
                counts_e=counts_e,
                scratch=buffers["assign_scratch"],
            )
        router_weights_TK = routing.topk_weights_TK
        on_input = problem.apply_router_weight_on_input
        handle = BatchedHandle(row_of_pair_TK, None if on_input else router_weights_TK)
        input_weights = router_weights_TK if on_input else None
        adapter_slots_eC, unquantized_eCH = None, None
        if (adapter_slots_T := routing.slots_T) is not None:
            with stages.stage(stages.PERMUTE):
                adapter_slots_eC, unquantized_eCH = _permute_adapter_inputs(
                    x_TH, adapter_slots_T, row_of_pair_TK, input_weights, buffers
                )
        x_eCH = buffers["batched_x"]
        rows_RH = x_eCH.flatten(0, 1)
        if not scheme.dispatched_quantized:
            with stages.stage(stages.PERMUTE):
                permute_tokens(x_TH, row_of_pair_TK, input_weights, rows_RH=rows_RH)
            return BatchedTokens(x_eCH, counts_e, None, adapter_slots_eC), handle
        scale = buffers.get("batched_scale")
        if _has_dynamic_tensor_scale(scheme):
            with stages.stage(stages.QUANTIZE_INPUT):
                quantized = self._quantize(x_TH, dispatched_routing, router_weights_TK, call)
            with stages.stage(stages.PERMUTE):
                permute_tokens(quantized.q_RK, row_of_pair_TK, None, rows_RH=rows_RH)
            return BatchedTokens(
                x_eCH, counts_e, quantized.scale, adapter_slots_eC, unquantized_eCH
            ), handle
        if scale is None:
            scale = weights.a1_scale
        assert scale is not None, "the weights of a static scheme have a1_scale"
        out = QuantizedRows(rows_RH, scale if scheme.static else scale.flatten(0, 1))
        with stages.stage(stages.PERMUTE_QUANTIZED):
            permute_and_quantize(x_TH, row_of_pair_TK, input_weights, scheme, out=out)
        return BatchedTokens(x_eCH, counts_e, scale, adapter_slots_eC, unquantized_eCH), handle

    def _quantize(
        self,
        x_TH: torch.Tensor,
        dispatched_routing: DispatchedRouting,
        router_weights_TK: torch.Tensor,
        call: CallState,
    ) -> QuantizedRows:
        """Quantize the tokens with a single scale.

        If router weights are applied to the input (K = 1), tokens are multiplied by them first.
        """
        problem, scheme = self.problem, self.problem.scheme
        out = take_quantized(call.workspace, "x", scheme, (x_TH.shape[0], problem.hidden))
        if problem.apply_router_weight_on_input:
            # The weight of a skipped pair is undefined, and its token must not affect the scale.
            valid_rows = PairRows(dispatched_routing, problem.e)
            row_weights_T = router_weights_TK.flatten()
            quantize_rows(x_TH, scheme, out=out, valid_rows=valid_rows, row_weights_R=row_weights_T)
        else:
            quantize_rows(x_TH, scheme, out=out)
        return out

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        if not isinstance(handle, BatchedHandle):
            raise UnsupportedError("handle", got=type(handle).__name__, need="BatchedHandle")
        if reduce.kind is Reduce.DELEGATE:
            reduce = TopKWeightAndReduceNaiveBatched()
        rows = ExpertRows(
            expert_output,
            handle.row_of_pair_TK,
            handle.topk_weights_TK,
            self.problem.routed_scaling_factor,
            checked=True,  # parts made these tensors, or the modular kernel has checked them
        )
        sums_topk = reduce.kind is Reduce.NAIVE_BATCHED
        with stages.stage(stages.GATHER_REDUCE if sums_topk else stages.UNPERMUTE):
            reduce.apply(rows, out)


def _permute_adapter_inputs(
    x_TH: torch.Tensor,
    adapter_slots_T: torch.Tensor,
    row_of_pair_TK: torch.Tensor,
    input_weights: torch.Tensor | None,
    buffers: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the adapter slots of the batched rows, and the unquantized rows or None.

    Adapters read unquantized rows, which are returned only if x is quantized.
    """
    adapter_slots_eC = buffers["batched_adapters"]
    unquantized_eCH = buffers.get("batched_unquantized_x")
    permute_tokens(
        adapter_slots_T[:, None], row_of_pair_TK, None, rows_RH=adapter_slots_eC.view(-1, 1)
    )
    if unquantized_eCH is not None:
        unquantized_RH = unquantized_eCH.flatten(0, 1)
        permute_tokens(x_TH, row_of_pair_TK, input_weights, rows_RH=unquantized_RH)
    return adapter_slots_eC, unquantized_eCH


def _has_dynamic_tensor_scale(scheme: QuantScheme) -> bool:
    """Return whether all tokens of a call share one dynamic scale."""
    return scheme.activation_granularity == "tensor" and not scheme.static
