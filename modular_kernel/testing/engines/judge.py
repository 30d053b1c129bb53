"""Judges calls of an engine's experts classes in this process, with the tolerance of `compare`."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from modular_kernel.integrations.engine import (
    Engine,
    EngineCall,
    EngineCase,
    Kind,
    NotJudgedError,
    Outcome,
    Promise,
    RefusedError,
    UnavailableError,
)
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.inputs import Inputs, make_inputs
from modular_kernel.testing.verify.compare import Comparison, compare
from modular_kernel.testing.verify.compare_isolated import NO_ROUNDING_ERRORS, RoundingErrors

# Number of tokens for which a layer's inputs are made. A call uses the first of these tokens. The
# error of the rounded reference in calls with few tokens is measured over all of them.
NUM_TOKENS = 256
_DEFAULT_BOUND = 0.1  # error that a reproducer allows if the case has no bound
_MAX_DETAIL_CHARS = 600  # longer error messages are truncated
# CUDA's messages for a library that has no machine code for this GPU.
_MISSING_KERNEL_MESSAGES = ("no kernel image is available", "invalid device function")

Report = Callable[[str], None]  # receives the name of the phase that begins


class Judge:
    """Judges cases one at a time.

    Keeps the last layer, because consecutive cases often differ only in their number of tokens.
    """

    def __init__(self, engine: Engine, device: torch.device, report: Report) -> None:
        self._engine, self._device, self._report = engine, device, report
        self._layers: dict[EngineCase, _Layer] = {}

    def judge(self, case: EngineCase) -> Outcome:
        """Return the outcome of a case. Never raises an Exception."""
        try:
            self._engine.check_support(case)
            layer = self._get_layer(case)
            outcome = layer.judge(case, self._report)
        except RefusedError as error:
            return Outcome(Kind.REFUSED, str(error))
        except UnavailableError as error:
            return Outcome(Kind.UNAVAILABLE, str(error))
        except NotJudgedError as error:
            return Outcome(Kind.NOT_JUDGED, str(error)[:_MAX_DETAIL_CHARS])
        except Exception as error:  # noqa: BLE001 (it is the result)
            return self._describe_error(error)
        if outcome.kind is Kind.WRONG and case.promise is None:
            bound = outcome.bound or _DEFAULT_BOUND  # there is no bound if values are not finite
            return replace(outcome, reproducer=self._engine.make_reproducer(case, bound))
        return outcome

    def _get_layer(self, case: EngineCase) -> "_Layer":
        key = replace(case, problem=case.problem.with_tokens(NUM_TOKENS), promise=None)
        if key not in self._layers:
            self._layers.clear()  # frees the memory of the previous layer first
            self._layers[key] = _Layer.make(self._engine, key, self._device)
            raise_pending_error(self._device)
        return self._layers[key]

    def _describe_error(self, error: Exception) -> Outcome:
        reason = self._engine.explain_unavailable(error)
        if reason is not None:
            return Outcome(Kind.UNAVAILABLE, reason)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{Path(frame.filename).name}:{frame.lineno}"
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_DETAIL_CHARS]
        is_missing = any(pattern in message for pattern in _MISSING_KERNEL_MESSAGES)
        kind = Kind.MISSING_KERNEL if is_missing else Kind.CRASHED
        is_fatal = False
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in message:
            is_fatal = not _is_usable(self._device)
        self._layers.clear()
        return Outcome(kind, f"{message} ({location})", is_fatal=is_fatal)


def raise_pending_error(device: torch.device) -> None:
    """Raise a CUDA error that an earlier call left unreported.

    Engines do not check every kernel launch. If a launch fails, the next launch by torch raises the
    error, which would then be attributed to another call.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.ones(1, device=device, dtype=torch.float32)  # launches a kernel


def _is_usable(device: torch.device) -> bool:
    """Return whether the process can make further calls after a CUDA error.

    A failed launch is reported once. After an error inside a kernel, such as an illegal address,
    every later call fails as well.
    """
    try:
        raise_pending_error(device)
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True)
class _Layer:
    """A layer of an engine with the inputs of its calls."""

    engine: Engine
    case: EngineCase
    inputs: Inputs
    call: EngineCall

    @classmethod
    def make(cls, engine: Engine, case: EngineCase, device: torch.device) -> "_Layer":
        inputs = make_inputs(case.problem, case.routing, device)
        weights = _adapt_weights(inputs.weights, case.problem)
        if case.problem.expert_map:
            weights = replace(weights, expert_map=_make_rank_1_expert_map(case.problem, device))
        routing = inputs.routing
        if case.problem.apply_router_weight_on_input:  # engines multiply by rounded weights
            rounded_weights_TK = routing.topk_weights_TK.to(case.problem.dtype).float()
            routing = replace(routing, topk_weights_TK=rounded_weights_TK)
        inputs = replace(inputs, weights=weights, routing=routing)
        return cls(engine, case, inputs, engine.build(case, weights))

    def judge(self, case: EngineCase, report: Report) -> Outcome:
        if case.promise is not None:
            return _CHECKS[case.promise](self, case, report)
        tokens = case.problem.tokens
        x_TH, routing = self.get_inputs(tokens)
        outputs, seconds = [], []
        for phase in ("first call", "call"):
            report(phase)
            start = perf_counter()
            outputs.append(self.run(x_TH, routing))
            seconds.append(perf_counter() - start)
        report("comparison")
        comparison = self.compare(outputs[0], x_TH, routing)
        if comparison.ok and not torch.equal(*outputs):
            comparison = self.compare(outputs[1], x_TH, routing)
        kind = Kind.RIGHT if comparison.ok else Kind.WRONG
        detail = "; ".join(comparison.problems)
        errors = comparison.error, comparison.bound
        return Outcome(kind, detail, *errors, seconds=tuple(seconds))

    def get_inputs(self, tokens: int) -> tuple[torch.Tensor, Routing]:
        """Return the first `tokens` tokens and their routing."""
        routing = self.inputs.routing
        weights_TK, ids_TK = routing.topk_weights_TK[:tokens], routing.topk_ids_TK[:tokens]
        return self.inputs.x_TH[:tokens], Routing(weights_TK, ids_TK)

    def run(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        *,
        call: EngineCall | None = None,
        poison: bool = False,
    ) -> torch.Tensor:
        """Make a call with copies of the inputs, because some layers overwrite them.

        Returns the output after the call has completed.

        call: the call to make; None means the layer's call.
        poison: whether the call's workspace is filled with NaN first.
        """
        routing_copy = Routing(routing.topk_weights_TK.clone(), routing.topk_ids_TK.clone())
        output = (call or self.call)(x_TH.clone(), routing_copy, poison).clone()
        raise_pending_error(x_TH.device)
        return output

    def compare(
        self, output: torch.Tensor, x_TH: torch.Tensor, routing: Routing, *, first: int = 0
    ) -> Comparison:
        """Compare the rows of the output from row `first` on with the float64 reference."""
        problem = self.case.problem.with_tokens(len(x_TH))
        exact, rounded = _compute_references(x_TH, self.inputs.weights, routing, problem)
        rows = output[first:], exact[first:], rounded[first:]
        result = compare(*rows, problem.with_tokens(len(x_TH) - first))
        if result.ok or output.shape != exact.shape:
            return result
        return compare(
            *rows,
            problem.with_tokens(len(x_TH) - first),
            **vars(self._measure_rounding_errors(len(x_TH))),
        )

    def _measure_rounding_errors(self, tokens: int) -> RoundingErrors:
        """Return the largest errors of the rounded reference in calls with this many tokens."""
        if not 0 < tokens < NUM_TOKENS:
            return NO_ROUNDING_ERRORS
        problem, worst = self.case.problem.with_tokens(tokens), NO_ROUNDING_ERRORS
        for start in range(0, NUM_TOKENS - tokens + 1, tokens):
            rows = slice(start, start + tokens)
            routing = self.inputs.routing.of(torch.arange(NUM_TOKENS)[rows].to(self._device))
            x_TH = self.inputs.x_TH[rows]
            references = _compute_references(x_TH, self.inputs.weights, routing, problem)
            errors = RoundingErrors.measure(*references, tokens)
            pairs = zip(vars(worst).values(), vars(errors).values(), strict=True)
            worst = RoundingErrors(*(max(pair) for pair in pairs))
        return worst

    @property
    def _device(self) -> torch.device:
        return self.inputs.x_TH.device


def _compute_references(
    x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float64 reference and the rounded reference.

    Engines multiply x by router weights on the input before they quantize x.
    """
    arguments = x_TH, weights, routing, problem
    return float64_reference(*arguments), rounded_reference(*arguments, input_weighted=True)


def _adapt_weights(weights: ExpertWeights, problem: Problem) -> ExpertWeights:
    """Change weights to values that engines can store.

    Gate and up have one global scale, and all experts one static scale. Biases, and scales of
    groups of integers, have the problem's dtype.
    """
    changes = {}
    global_scale = weights.w1_global_scale
    if global_scale is not None:
        changes["w1_global_scale"] = global_scale[:, :1].expand_as(global_scale).contiguous()
    for name in ("a1_scale", "a2_scale"):
        scale = getattr(weights, name)
        if scale is not None:
            changes[name] = scale.amax().expand_as(scale).contiguous()
    rounded_names = ["b1", "b2"]
    if problem.scheme.weight in ("uint4", "uint8"):
        rounded_names += ["w1_scale", "w2_scale"]
    for name in rounded_names:
        tensor = getattr(weights, name)
        if tensor is not None:
            changes[name] = tensor.to(problem.dtype)
    return replace(weights, **changes)


def _make_rank_1_expert_map(problem: Problem, device: torch.device) -> torch.Tensor:
    """Return the expert_map of rank 1, if each rank has equally many consecutive experts."""
    local = torch.arange(problem.experts, dtype=torch.int32, device=device) - problem.e
    return torch.where((local >= 0) & (local < problem.e), local, -1)


# ------------------------------------------------------------------------------------ promises


def _check_nan(layer: _Layer, case: EngineCase, report: Report) -> Outcome:
    x_TH, routing = layer.get_inputs(case.problem.tokens)
    x_TH = x_TH.clone()
    x_TH[0] = torch.nan
    report("first call")
    output = layer.run(x_TH, routing)
    report("comparison")
    if bool(output[0].isfinite().any()):
        return Outcome(Kind.WRONG, "the output of a token with NaN has finite values")
    return _judge_promise(layer.compare(output, layer.get_inputs(len(x_TH))[0], routing, first=1))


def _check_unused_weights(layer: _Layer, case: EngineCase, report: Report) -> Outcome:
    x_TH, routing = layer.get_inputs(case.problem.tokens)
    used_experts = torch.unique(routing.topk_ids_TK.long())
    weights, changes = layer.inputs.weights, {}
    for name in ("w1", "w2", "b1", "b2", "w1_scale", "w2_scale"):
        tensor = getattr(weights, name)
        if tensor is not None and tensor.is_floating_point():
            poisoned = torch.full_like(tensor, torch.nan)
            poisoned[used_experts] = tensor[used_experts]
            changes[name] = poisoned
    call = layer.engine.build(layer.case, replace(weights, **changes))
    report("first call")
    output = layer.run(x_TH, routing, call=call)
    report("comparison")
    return _judge_promise(layer.compare(output, x_TH, routing))


def _check_skipped_ids(layer: _Layer, case: EngineCase, report: Report) -> Outcome:
    x_TH, routing = layer.get_inputs(case.problem.tokens)
    ids_TK, weights_TK = routing.topk_ids_TK.clone(), routing.topk_weights_TK.clone()
    ids_TK[0], ids_TK[1:, -1] = -1, -1
    weights_TK[ids_TK < 0] = 0  # this check does not depend on the weights of skipped pairs
    routing = Routing(weights_TK, ids_TK)
    report("first call")
    output = layer.run(x_TH, routing)
    report("comparison")
    return _judge_promise(layer.compare(output, x_TH, routing))


def _check_workspace(layer: _Layer, case: EngineCase, report: Report) -> Outcome:
    x_TH, routing = layer.get_inputs(case.problem.tokens)
    report("first call")
    output = layer.run(x_TH, routing, poison=True)
    report("comparison")
    return _judge_promise(layer.compare(output, x_TH, routing))


def _check_no_tokens(layer: _Layer, case: EngineCase, report: Report) -> Outcome:
    report("first call")
    output = layer.run(*layer.get_inputs(0))
    need = (0, case.problem.hidden)
    if tuple(output.shape) == need:
        return Outcome(Kind.RIGHT)
    return Outcome(Kind.WRONG, f"shape is {tuple(output.shape)}, should be {need}")


_CHECKS: dict[Promise, Callable[[_Layer, EngineCase, Report], Outcome]] = {
    Promise.NAN: _check_nan,
    Promise.UNUSED_WEIGHTS: _check_unused_weights,
    Promise.SKIPPED_IDS: _check_skipped_ids,
    Promise.WORKSPACE: _check_workspace,
    Promise.NO_TOKENS: _check_no_tokens,
}


def _judge_promise(comparison: Comparison) -> Outcome:
    kind = Kind.RIGHT if comparison.ok else Kind.WRONG
    return Outcome(kind, "; ".join(comparison.problems), comparison.error, comparison.bound)
