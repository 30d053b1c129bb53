"""Transports that run our PrepareAndFinalize parts."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from modular_kernel.bench.all2all.cases import (
    ExchangeCase,
    ExchangeInputs,
    RankContext,
    Transport,
    dequantize,
)
from modular_kernel.catalog import check, load_catalog
from modular_kernel.contracts import CallState, PrepareAndFinalize, TopKWeightAndReduce
from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.records import OURS
from modular_kernel.spec.problem import ActivationFormat, IdSpace, Machine, Reduce
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    Dispatched,
    DispatchedRouting,
    DispatchShape,
    ExpertWeights,
    Routing,
    StandardTokens,
)
from modular_kernel.workspace import EXPERT_OUTPUT, BufferSpec, Workspace

# Maximum tokens per call in the batched format, whose buffers have a row for each token and expert.
_MAX_BATCHED_TOKENS = 512
# Reductions (weighted sums over K) that experts leave to `finalize`, in order of preference. The
# less `finalize` reduces, the closer its time is to the time of the exchange alone.
_PREFERRED_REDUCTIONS = (Reduce.NOOP, Reduce.NAIVE_BATCHED, Reduce.CONTIGUOUS)


class PartTransport(Transport):
    """A PrepareAndFinalize part with identity experts.

    The identity experts compute as much of the weighted sum as the part supports, so that
    `finalize` does little besides the exchange. If a part can be captured only with
    Problem(graph=True) (`requires.graph_on_request`), its problem has graph=True on a GPU.

    A case is refused if no experts part is compatible. The refusal then states the reasons against
    the pairing with the fewest reasons.

    name: name of the part.
    machine: machine for which compatibility is checked.
    """

    origin = OURS

    def __init__(self, name: str, machine: Machine) -> None:
        self._part_class = load_catalog().prepare_finalize(name)
        self.machine = machine
        self.name = name  # type: ignore[misc]  # this class has one instance per part
        requires = self._part_class.requires
        self.capturable = requires.graph_capturable
        self._graph_on_request = requires.graph_on_request and machine.device == "cuda"
        self.needs_fresh_ranks = bool(requires.packages)
        self.replicated = requires.replicated_input
        self.interpreted = machine.interpreter and requires.triton
        notes = (
            "all ranks pass the same tokens" * self.replicated,
            "blocks of a fixed size" * self._graph_on_request,
        )
        self.note = "; ".join(filter(None, notes))
        self._part: PrepareAndFinalize | None = None
        self._reduction, self._topk_reduce = _find_reducer(self._part_class)

    def with_capacities(self, cases: Iterable[ExchangeCase]) -> tuple[ExchangeCase, ...]:
        """Return the cases with the capacities that this part needs.

        A part that is captured on request always exchanges blocks of `capacity` rows. To measure
        the exchange of `tokens` rows, the capacity must therefore equal the number of tokens.
        """
        if not self._graph_on_request:
            return tuple(cases)
        return tuple(replace(case, capacity=case.tokens) for case in cases)

    def refusal(self, case: ExchangeCase) -> str:
        batched = self._part_class.requires.activation_format is ActivationFormat.BATCHED_EXPERTS
        if batched and case.capacity > _MAX_BATCHED_TOKENS:
            return f"capacity {case.capacity}: {_MAX_BATCHED_TOKENS} at most in the batched format"
        reasons_by_pairing: list[list[str]] = []
        for experts in load_catalog().names("experts"):
            verdict = check(self._part_class, experts, case.problem(0), self.machine)
            if verdict.ok:
                return ""
            reasons_by_pairing.append([str(rejection) for rejection in verdict.rejections])
        reasons_by_pairing.sort(key=len)
        return "; ".join(reasons_by_pairing[0]) if reasons_by_pairing else "no experts part"

    def open(self, case: ExchangeCase, context: RankContext) -> None:
        problem = case.problem(context.rank, graph=self._graph_on_request)
        self._part = part = self._part_class(problem, context.group)
        device = context.device
        self._part_keeps_output = part.keeps_expert_output and self._reduction is Reduce.NOOP
        output_specs = {}
        if not self._part_keeps_output:
            output_specs[EXPERT_OUTPUT] = self._make_output_spec(part.dispatch_shape(case.capacity))
        self._workspace = Workspace(
            {**part.workspace_shapes(case.capacity), **output_specs}, device
        )
        self._invalid_ids = torch.zeros(1, dtype=torch.int32, device=device)
        empty_weight = torch.empty(problem.e, 1, 1, dtype=problem.dtype, device=device)
        self._weights = ExpertWeights(empty_weight, empty_weight)

    def load(self, inputs: ExchangeInputs) -> None:
        assert self._part is not None
        ids = inputs.routing.topk_ids_TK.to(self._part.topk_indices_dtype() or torch.int32)
        self._inputs = inputs
        self._routing = Routing(inputs.routing.topk_weights_TK, ids)
        self._out = torch.empty_like(inputs.x_TH)
        self._call = CallState(
            self._workspace, self._invalid_ids, pairing=f"{self.name} x identity"
        )

    def _make_output_spec(self, shape: DispatchShape) -> BufferSpec:
        """Return the buffer for the output of `identity`, with the maximum number of rows."""
        assert self._part is not None
        hidden, dtype = self._part.problem.hidden, self._part.problem.dtype
        if isinstance(shape, BatchedShape):
            return BufferSpec((shape.experts, shape.capacity, hidden), dtype)
        row = (hidden,) if self._reduction is Reduce.NOOP else (shape.top_k, hidden)
        return BufferSpec((shape.tokens, *row), dtype)

    def dispatch(self) -> None:
        assert self._part is not None
        self.dispatched = self._part.prepare(
            self._inputs.x_TH, self._routing, weights=self._weights, call=self._call
        )

    def identity(self) -> None:
        tokens: Dispatched = self.dispatched[0]
        group = self._inputs.case.scheme.group[-1] if self._inputs.case.scheme.group else 1
        if isinstance(tokens, BatchedTokens):
            rows = dequantize(tokens.x_eCH, tokens.scale, group)
        else:
            rows = _compute_identity_output(tokens, group, self._reduction)
        # The buffer must keep its address, because a captured combine reads from it.
        if self._part_keeps_output:
            assert self._part is not None
            self._output = self._part.expert_output(self.dispatched[1])
        else:
            self._output = self._workspace.take(EXPERT_OUTPUT, tuple(rows.shape))
        self._output.copy_(rows)

    def combine(self) -> torch.Tensor:
        part, handle = self._part, self.dispatched[1]
        assert part is not None
        if part.allocates_output:
            return part.finalize_to_new_tensor(
                self._output, handle=handle, reduce=self._topk_reduce
            )
        part.finalize(self._output, handle=handle, reduce=self._topk_reduce, out=self._out)
        return self._out

    def raise_async_errors(self) -> None:
        check: Callable[[], object] | None = getattr(self._part, "check", None)
        if check is not None:
            check()

    def close(self) -> None:
        part, self._part = self._part, None
        destroy: Callable[[], object] | None = getattr(part, "destroy", None)
        for name in ("_workspace", "_output", "_out", "_call"):
            self.__dict__.pop(name, None)
        self.dispatched = None
        if destroy is not None:
            destroy()


def _find_reducer(cls: type[PrepareAndFinalize]) -> tuple[Reduce, TopKWeightAndReduce]:
    """Return the reduction that the experts leave to `cls`, and the topk_reduce part for it."""
    supported = (reduce for reduce in _PREFERRED_REDUCTIONS if reduce in cls.requires.reduces)
    reduction = next(supported, Reduce.DELEGATE)
    reducers: list[Any] = [part.cls for part in load_catalog().parts if part.kind == "topk_reduce"]
    for reducer in reducers:
        if reducer.kind is reduction:
            return reduction, reducer()
    need = f"one of kind {reduction.value}"
    raise ConfigurationError("topk_reduce", got="no such part", need=need)


def _compute_identity_output(tokens: StandardTokens, group: int, reduction: Reduce) -> torch.Tensor:
    """Return the identity experts' output for R contiguous rows of x.

    For NOOP, the output is (R, H), the weighted sums over this rank's (token, expert) pairs. For
    other reductions, it is (R, K, H), unweighted rows with zeros for the pairs of other ranks.

    group: values per scale.
    reduction: the reduction that is left to `finalize`.
    """
    local_RK = _find_local_pairs(tokens.routing)
    any_local_R1 = local_RK.any(1, keepdim=True)
    # The part may leave rows without a pair on this rank undefined.
    x_RH = torch.where(any_local_R1, dequantize(tokens.x_TH, tokens.scale, group), 0)
    if reduction is not Reduce.NOOP:
        return torch.where(local_RK[..., None], x_RH[:, None], 0).contiguous()
    weights_RK = tokens.routing.topk_weights_TK
    assert weights_RK is not None, "a part that supports NOOP passes router weights to the experts"
    local_weight_R1 = torch.where(local_RK, weights_RK, 0).sum(1, keepdim=True)
    return (x_RH.float() * local_weight_R1).to(x_RH.dtype)


def _find_local_pairs(routing: DispatchedRouting) -> torch.Tensor:
    """Return a (R, K) bool mask of the (token, expert) pairs whose expert is on this rank."""
    ids_RK = routing.topk_ids_TK
    valid = (ids_RK >= 0) & (ids_RK < routing.num_experts)
    if routing.space is IdSpace.GLOBAL and routing.expert_map is not None:
        return valid & (routing.expert_map[ids_RK.clamp(0, routing.num_experts - 1).long()] >= 0)
    return valid
