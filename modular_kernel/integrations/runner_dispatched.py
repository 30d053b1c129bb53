"""Runs an experts part on rows that an external dispatcher has received.

ReceivedRows and ReceivedBatches represent external dispatchers in compatibility checks. They are
never called.
"""

from functools import lru_cache

import torch

from modular_kernel import validate
from modular_kernel.catalog import this_machine
from modular_kernel.compatibility.rules import judge
from modular_kernel.compatibility.support import PrepareFinalizeRequirements
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import DtypeError, IncompatibleError, ShapeError
from modular_kernel.ops.quantize import scale_shape
from modular_kernel.ops.reduce import weight_and_sum
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES, STORAGE
from modular_kernel.replay import modes
from modular_kernel.spec.problem import ActivationFormat, Problem, Reduce, RowContents
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    Dispatched,
    ExpertRows,
    ExpertWeights,
    StandardShape,
    StandardTokens,
)
from modular_kernel.workspace import Workspace


class ReceivedRows(PrepareAndFinalize):
    """An external dispatcher of (R, H) rows with local ids, as in the format "deepep_normal"."""

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
        localizes_ids=True,
        dispatch_schemes=ACTIVATION_SCHEMES,
        can_defer_quant=False,
        linear_placement=False,
    )


class ReceivedBatches(PrepareAndFinalize):
    """An external dispatcher of (e, C, H) rows, as in the format "deepep_ll".

    The dispatcher weights and sums the output.
    """

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.BATCHED_EXPERTS,
        reduces=frozenset({Reduce.NAIVE_BATCHED, Reduce.DELEGATE}),
        localizes_ids=True,
        padding=RowContents.UNDEFINED,
        dispatch_schemes=ACTIVATION_SCHEMES,
        can_defer_quant=False,
        linear_placement=False,
    )


_DISPATCHERS = {
    ActivationFormat.STANDARD: ReceivedRows,
    ActivationFormat.BATCHED_EXPERTS: ReceivedBatches,
}


@lru_cache(maxsize=64)
def _make_experts(
    part: type[PermuteExpertsUnpermute], problem: Problem, device: str
) -> PermuteExpertsUnpermute:
    """Create an experts part for a problem. Raises IncompatibleError if it is not supported."""
    dispatcher = _DISPATCHERS[part.requires.activation_format]
    machine = this_machine(device="cpu" if device == "cpu" else None)
    verdict = judge(dispatcher, part, problem, machine)  # type: ignore[type-abstract]
    if not verdict.ok:
        raise IncompatibleError(verdict.pairing, verdict.rejections)
    return part(problem)


@modes.disable_tracing
@modes.disable_autocast
def run_received(
    part: type[PermuteExpertsUnpermute],
    problem: Problem,
    tokens: Dispatched,
    weights: ExpertWeights,
) -> torch.Tensor:
    """Run an experts part on received rows.

    Returns the weighted sums, (R, H), for StandardTokens, or the unweighted rows, (e, C, H), for
    BatchedTokens. Raises an InputError for a tensor that does not match the problem, and
    IncompatibleError if the part does not support the problem.
    """
    is_batched = isinstance(tokens, BatchedTokens)
    x = tokens.x_eCH if isinstance(tokens, BatchedTokens) else tokens.x_TH
    check_rows(x, tokens.scale, problem)
    validate.check_weights(weights, x, problem)
    experts = _make_experts(part, problem, x.device.type)
    if isinstance(tokens, BatchedTokens):
        dispatch_shape: BatchedShape | StandardShape = BatchedShape(*x.shape[:2])
    else:
        dispatch_shape = StandardShape(*tokens.routing.topk_ids_TK.shape)
    workspace_shapes = experts.workspace_shapes(dispatch_shape)
    workspace = Workspace(workspace_shapes.buffers(), x.device)
    output = torch.empty(workspace_shapes.output.shape, dtype=problem.dtype, device=x.device)
    if output.numel():
        experts.apply(tokens, weights=weights, workspace=workspace, output=output)
    if is_batched:
        return output
    assert isinstance(tokens, StandardTokens)
    return _weight_and_reduce(output, tokens, experts)


def _weight_and_reduce(
    rows: torch.Tensor, tokens: StandardTokens, experts: PermuteExpertsUnpermute
) -> torch.Tensor:
    """Weight and sum the experts' output over top-k, if the experts have not done so."""
    reduce, problem, routing = (
        experts.finalize_weight_and_reduce_impl(),
        experts.problem,
        tokens.routing,
    )
    if reduce.kind is Reduce.NOOP:
        return rows
    out = torch.empty((rows.shape[0], problem.hidden), dtype=rows.dtype, device=rows.device)
    scale, weights_TK = problem.routed_scaling_factor, routing.topk_weights_TK
    if reduce.kind is Reduce.DELEGATE:
        weight_and_sum(rows, weights_TK, scale=scale, out=out, routing=routing, num_local=problem.e)
    else:
        expert_rows = ExpertRows(rows, None, weights_TK, scale, routing, problem.e, checked=True)
        reduce.apply(expert_rows, out)
    return out


def check_rows(x: torch.Tensor, scale: torch.Tensor | None, problem: Problem) -> None:
    """Raise DtypeError or ShapeError unless rows and their scales match the problem.

    x: (R, H); or (e, C, H), grouped by expert.
    scale: scale of StandardTokens or BatchedTokens.
    """
    scheme = problem.scheme
    dtype = STORAGE[scheme.activation] if scheme.dispatched_quantized else problem.dtype
    if x.dtype is not dtype:
        raise DtypeError(f"hidden_states for {problem.quant}", got=x.dtype, need=dtype)
    if x.shape[-1] != problem.hidden or not x.is_contiguous():
        got = f"{tuple(x.shape)}, strides {x.stride()}"
        need = f"a contiguous (..., {problem.hidden})"
        raise ShapeError("hidden_states", got=got, need=need)
    if not scheme.dispatched_quantized:
        if scale is not None:
            need = f"None: {problem.quant} does not quantize activations"
            raise ShapeError("hidden_states_scale", got=tuple(scale.shape), need=need)
        return
    if scale is None:
        need = f"the scales of the {problem.quant} rows"
        raise ShapeError("hidden_states_scale", got=None, need=need)
    allowed_shapes: tuple[tuple[int, ...], ...]
    if scheme.activation_granularity == "tensor":
        # Batched parts also read a scale for each row.
        allowed_shapes = ((1,),) if x.dim() == 2 else ((1,), (*x.shape[:-1], 1))
    else:
        allowed_shapes = ((*x.shape[:-1], scale_shape(scheme, 1, problem.hidden)[1]),)
    if tuple(scale.shape) not in allowed_shapes or scale.dtype is not torch.float32:
        got = f"{scale.dtype} {tuple(scale.shape)}"
        need = f"torch.float32 {' or '.join(map(str, allowed_shapes))}"
        raise ShapeError("hidden_states_scale", got=got, need=need)
