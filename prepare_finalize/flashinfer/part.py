"""FlashInferCutlassMoEPrepareAndFinalize: rows are written over NVLink to the ranks' workspaces.

An exchange component ("part") over FlashInfer's all-to-all, which is one-sided: a rank writes its
rows to the memory of its peers. Expert numbers count the slots of all ranks. A slot is the index of
an expert in the weights of its rank. A pair is one token with one of its K experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modular_kernel.compatibility.support import PrepareFinalizeRequirements, Rejection
from modular_kernel.contracts import CallState, TopKWeightAndReduce
from modular_kernel.errors import CapacityError, UnsupportedError
from modular_kernel.ops.expert_slots import count_slots_per_rank
from modular_kernel.ops.quantize import scale_shape
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.replay import stages
from modular_kernel.spec.problem import ActivationFormat, Machine, Problem, Reduce, RowContents
from modular_kernel.tensors import Dispatched, ExpertWeights, Handle, Routing, StandardShape
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.group_part import GroupPart, PartHandle
from prepare_finalize.common.tokens import (
    has_shared_scale,
    number_and_quantize_tokens,
    reduce_rows,
    token_specs,
)
from prepare_finalize.flashinfer.exchange import AlltoAllShape, Exchange, Payloads
from prepare_finalize.flashinfer.group import FlashInferBuffers, FlashInferGroup
from prepare_finalize.flashinfer.library import FLASHINFER_ALL2ALL

# The values of K for which FlashInfer's kernels are compiled: the cases of SWITCH_TOP_K in
# moeAlltoAllKernels.cu of 0.6.18 and 0.7.2.post1. There is none for 20. 0.7.4 has 3, too.
TOP_KS = frozenset({1, *range(2, 19, 2), 22})
# Fields of the problem that must be equal on all ranks.
_SHARED = (
    *("tokens", "hidden", "intermediate", "experts", "top_k", "dtype", "quant", "placement"),
    *("activation", "bias", "routed_scaling_factor", "combine", "apply_router_weight_on_input"),
)


@dataclass(frozen=True)
class FlashInferHandle(PartHandle):
    """Handle of a call.

    use_count: number of calls that have used the workspace, including this one. If it differs from
        `buffers.use_count`, the handle is out of date.
    weights_RK: router weights of the received rows.
    """

    buffers: FlashInferBuffers
    use_count: int
    weights_RK: torch.Tensor


class FlashInferCutlassMoEPrepareAndFinalize(GroupPart[FlashInferGroup]):
    """Send each token's row, with ids and weights, once to each rank that holds one of its experts.

    The receiving rank computes the weighted sum of the row's pairs. The combine adds the sums of
    all ranks in float32.

    Experts get world_size * problem.tokens rows in the library's memory, valid until the combine.
    Unused rows have ids of -1 and are never read. If the scheme quantizes activations, they are
    quantized before they are sent, unless the experts quantize them. Releases up to 0.7.2 cannot
    skip pairs. With them, skipped pairs are sent to the sending rank itself, where they are
    ignored.

    Kernels wait for peers, but the host does not wait. A call that was captured in a CUDA graph
    uses the same workspace in every replay, so no other call of this shape may be in flight during
    a replay.

    The part was not run on a GPU. It was verified on a CPU against stand-ins for the classes of
    0.7.2 (MoeAlltoAll) and 0.7.4 (NVLinkOneSidedAlltoAll). Its calls were compared with the
    signatures of these two releases.
    """

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cuda"}),
        min_arch=(9, 0),
        packages=(FLASHINFER_ALL2ALL.name,),
        providers=(FLASHINFER_ALL2ALL,),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        top_k=(1, max(TOP_KS)),
        hidden_multiple=16,
        reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
        localizes_ids=True,
        padding=RowContents.UNDEFINED,
        dispatch_schemes=ACTIVATION_SCHEMES,
        world_sizes=(2, 8),
        linear_placement=False,
        one_host=True,
        graph_capturable=True,
        deterministic=False,  # atomic counters determine the order of a rank's rows
    )
    manager_class = FlashInferGroup

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        self.num_slots = count_slots_per_rank(problem.placement)
        self._shape = _make_shape(problem)
        self.manager.check_equal({name: getattr(problem, name) for name in _SHARED})
        self.manager.reserve(self._shape)

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        rejections = list(super().extra_rejections(problem, machine))
        parties = (cls.__name__, "problem")
        if problem.top_k not in TOP_KS:
            need = f"one of {', '.join(map(str, sorted(TOP_KS)))}"
            rejections.append(Rejection("top_k", parties, str(problem.top_k), need))
        if has_shared_scale(problem):
            got = f"{problem.quant}: one scale for the tokens of all ranks"
            need = "a static scale, or one for each token or group"
            rejections.append(Rejection("dispatch_quant", parties, got, need))
        return tuple(rejections)

    def dispatch_shape(self, tokens: int) -> StandardShape:
        rows = self.problem.parallel.world_size * self._shape.max_tokens
        return StandardShape(rows, self.problem.top_k)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        problem = self.problem
        rows, pair_shape = self.dispatch_shape(tokens).tokens, (tokens, problem.top_k)
        return {
            **token_specs(problem, tokens),
            **self.pair_specs(tokens),
            "targets": BufferSpec(pair_shape, torch.int32),
            "skipped": BufferSpec((rows, problem.top_k), torch.uint8),
            "local_ids": BufferSpec((rows, problem.top_k), torch.int32),
            "local_weights": BufferSpec((rows, problem.top_k), torch.float32),
            "sent_x": BufferSpec((tokens, problem.hidden), problem.dtype),
            "rows_sum": BufferSpec((rows, problem.hidden), problem.dtype),
        }

    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: CallState
    ) -> tuple[Dispatched, Handle]:
        if len(x_TH) > self._shape.max_tokens:
            need = f"<= {self._shape.max_tokens} (capacity of the workspaces)"
            raise CapacityError("tokens", got=len(x_TH), need=need)
        self.manager.check_device(x_TH.device)
        pairs = self.pairs(routing, call, join=False)
        rows, scale = number_and_quantize_tokens(
            x_TH, self.problem, pairs, weights=weights, call=call
        )
        sends_scale = scale is not None and not self.problem.scheme.static
        sent = Payloads(
            _make_contiguous(rows, call),
            scale if sends_scale else None,
            pairs.numbers_TK,
            pairs.weights_TK,
        )
        buffers = self.manager.take(self._shape)
        exchange: Exchange = buffers.all_to_all
        targets_TK = (
            self._compute_targets(pairs.numbers_TK, call) if exchange.needs_targets else None
        )
        with stages.stage(stages.DISPATCH):
            received = exchange.dispatch(sent, targets_TK)
            x_RH, ids_RK, weights_RK = received.rows, received.numbers_TK, received.weights_TK
            slots_RK, local_weights_RK = self._mask_remote_pairs(ids_RK, weights_RK, call)
        scales = received.scale if sends_scale else scale
        tokens = self.local_tokens(call, x_RH, scales, slots_RK, local_weights_RK)
        return tokens, FlashInferHandle(self, call, buffers, buffers.use_count, local_weights_RK)

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        part_handle = self.check_handle(handle, FlashInferHandle)
        buffers, shape = part_handle.buffers, self._shape
        if not buffers.in_use or buffers.use_count != part_handle.use_count:
            raise UnsupportedError(
                "handle", got="one that was combined", need="the handle of an unfinished call"
            )
        rows_RH = reduce_rows(
            expert_output, part_handle.weights_RK, self.problem, part_handle.call, reduce
        )
        world_size = self.problem.parallel.world_size
        payload = rows_RH.view(world_size, shape.max_tokens, self.problem.hidden)
        is_contiguous = out.is_contiguous()
        with stages.stage(stages.COMBINE):
            exchange: Exchange = buffers.all_to_all
            combined = exchange.combine(payload, out if is_contiguous else None)
            if not is_contiguous:
                out.copy_(combined)
        self.manager.release(buffers)

    def _compute_targets(self, numbers_TK: torch.Tensor, call: CallState) -> torch.Tensor:
        """Return the expert numbers of the pairs; skipped pairs get this rank's first number."""
        take, shape = call.workspace.take, tuple(numbers_TK.shape)
        skipped = take("skipped", shape).view(torch.bool)
        torch.lt(numbers_TK, 0, out=skipped)
        targets_TK = take("targets", shape).copy_(numbers_TK)
        return targets_TK.masked_fill_(skipped, self.manager.rank * self.num_slots)

    def _mask_remote_pairs(
        self, numbers_RK: torch.Tensor, weights_RK: torch.Tensor, call: CallState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots of this rank and weights, with -1 and 0 for pairs of other ranks."""
        take, shape = call.workspace.take, tuple(numbers_RK.shape)
        slots_RK, local_weights_RK = take("local_ids", shape), take("local_weights", shape)
        torch.sub(numbers_RK, self.manager.rank * self.num_slots, out=slots_RK)
        local_weights_RK.copy_(weights_RK)
        skipped = take("skipped", shape).view(torch.bool)
        for compare, bound in ((torch.lt, 0), (torch.ge, self.problem.e)):
            compare(slots_RK, bound, out=skipped)
            slots_RK.masked_fill_(skipped, -1)
        torch.lt(slots_RK, 0, out=skipped)
        return slots_RK, local_weights_RK.masked_fill_(skipped, 0)


def _make_shape(problem: Problem) -> AlltoAllShape:
    """Return the sizes of a workspace for rows (quantized or not), scales, ids and weights."""
    scheme, scale_bytes = problem.scheme, 0
    if scheme.dispatched_quantized and scheme.activation_granularity != "tensor":
        scale_bytes = 4 * scale_shape(scheme, 1, problem.hidden)[1]
    return AlltoAllShape(
        max(1, problem.tokens),
        problem.parallel.world_size * count_slots_per_rank(problem.placement),
        problem.top_k,
        problem.hidden,
        problem.dtype,
        scale_bytes,
    )


def _make_contiguous(rows: torch.Tensor, call: CallState) -> torch.Tensor:
    """Return the rows, contiguous and 16-byte aligned, as the library requires."""
    if rows.is_contiguous() and rows.data_ptr() % 16 == 0:
        return rows
    return call.workspace.take("sent_x", tuple(rows.shape)).copy_(rows)
