"""Selects the cases of an engine's experts classes.

Sizes are small, so that a case takes seconds even in Triton's interpreter. Hidden and intermediate
sizes are multiples of what the format of the weights needs, but of nothing more: the engine's own
predicates decide which sizes a class refuses.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.integrations.engine import Description, EngineCase, ExpertsClass, Promise
from modular_kernel.spec.problem import ActivationSpec, Problem
from modular_kernel.spec.quantization import QuantScheme

Level = Literal["smoke", "full"]

_TOKEN_COUNTS = {"cpu": (1, 2, 17), "cuda": (1, 2, 17, 256)}
_DEFAULT_TOKENS = 17  # number of tokens in cases that vary something else
_MAX_MODEL_EXPERTS = 8  # making the weights of more experts of a large model takes long


@dataclass(frozen=True)
class Selection:
    """Criteria for the selection of cases.

    experts: name of one class; None for all.
    scheme: one quantization scheme; None for all that a class may support.
    model: the problem of a model, whose sizes and activation replace those of the cases.
    """

    level: Level = "smoke"
    experts: str | None = None
    scheme: str | None = None
    model: Problem | None = None


def select_cases(description: Description, selection: Selection) -> list[EngineCase]:
    """Return the cases of all selected classes that can run here.

    Raises ConfigurationError for an unknown class, and for a model whose activation the engine does
    not have.
    """
    classes = description.classes
    if selection.experts is not None:
        classes = tuple(c for c in classes if c.name == selection.experts)
        if not classes:
            need = f"a class of `mk list --engine {description.engine}`"
            raise ConfigurationError("--experts-type", got=selection.experts, need=need)
    cases = dict[EngineCase, None]()
    for experts_class in classes:
        if experts_class.unavailable:
            continue
        for scheme in experts_class.schemes:
            if selection.scheme in (None, scheme):
                cases |= dict.fromkeys(_list_cases(description, experts_class, scheme, selection))
    return list(cases)


def _list_cases(
    description: Description, experts_class: ExpertsClass, scheme: str, selection: Selection
) -> Iterator[EngineCase]:
    token_counts = _TOKEN_COUNTS[description.device]
    if selection.model is not None:
        problem = _make_model_problem(selection.model, scheme)
        activation = _find_activation(description, problem.act)
        case = EngineCase(experts_class.name, activation, problem)
        yield from (with_tokens(case, t) for t in token_counts)
        return
    base = _make_problem(scheme, description.device)
    cases = {
        name: EngineCase(experts_class.name, name, replace(base, activation=spec))
        for name, spec in description.activations.items()
    }
    first_case = next(iter(cases.values()))
    yield from _list_call_variants(first_case, token_counts)
    yield from _list_promise_cases(first_case, skips_ids=experts_class.skips_ids)
    for case in cases.values():
        yield case
        if selection.level == "full":
            yield from (with_tokens(case, t) for t in token_counts)
            yield _with_odd_sizes(case)
            yield _change_problem(case, dtype=torch.float16)
            yield _change_problem(case, bias=True)
    yield _change_problem(first_case, dtype=torch.float16)
    if scheme == "none":
        # Products of Triton kernels have tf32's precision unless a kernel requires more.
        yield _change_problem(first_case, dtype=torch.float32, fp32_precision="tf32")
    for case in list(cases.values())[:2]:
        yield _change_problem(case, bias=True)
    if selection.level == "full":
        yield from (replace(first_case, routing=kind) for kind in ("zipf", "empty_experts"))


def _list_call_variants(case: EngineCase, token_counts: tuple[int, ...]) -> Iterator[EngineCase]:
    """Yield variants of a case: numbers of tokens and experts, sizes, routing, and options."""
    yield from (with_tokens(case, t) for t in token_counts)
    odd_sizes = _with_odd_sizes(case)
    yield odd_sizes
    yield replace(_change_problem(odd_sizes, top_k=1), routing="all_to_one")
    many_experts = _change_problem(case, experts=64, top_k=8)
    yield from (with_tokens(many_experts, t) for t in (1, _DEFAULT_TOKENS))
    yield _change_problem(case, experts=16, local_experts=8, expert_map=True, top_k=8)
    yield _change_problem(case, top_k=1, apply_router_weight_on_input=True)


def _list_promise_cases(case: EngineCase, *, skips_ids: bool) -> Iterator[EngineCase]:
    """Yield one case for each promise that the class makes.

    skips_ids: whether the class promises to skip ids of -1.
    """
    for promise in Promise:
        if promise is Promise.SKIPPED_IDS and not skips_ids:
            continue
        routing = "empty_experts" if promise is Promise.UNUSED_WEIGHTS else "uniform"
        if promise is not Promise.NAN or not _shares_scale(case.problem.scheme):
            yield replace(case, routing=routing, promise=promise)


def _shares_scale(scheme: QuantScheme) -> bool:
    """Return whether all tokens of a call share a scale that is computed from their values."""
    return scheme.activation_granularity == "tensor" and not scheme.static


def with_tokens(case: EngineCase, tokens: int) -> EngineCase:
    """Return the case with another number of tokens."""
    return replace(case, problem=case.problem.with_tokens(tokens))


def _change_problem(case: EngineCase, **changes: object) -> EngineCase:
    """Return the case with some fields of its problem changed."""
    return replace(case, problem=replace(case.problem, **changes))  # type: ignore[arg-type]


def _make_problem(scheme: str, device: str) -> Problem:
    multiple = _get_size_multiple(QuantScheme.parse(scheme))
    hidden, intermediate = (512, 256) if device == "cuda" else (2 * multiple, multiple)
    hidden, intermediate = max(hidden, 128), max(intermediate, 64)
    return Problem(
        tokens=_DEFAULT_TOKENS,
        hidden=hidden,
        intermediate=intermediate,
        experts=8,
        top_k=2,
        quant=scheme,
    )


def _with_odd_sizes(case: EngineCase) -> EngineCase:
    """Return the case with sizes that are odd multiples of what the scheme needs."""
    multiple = _get_size_multiple(case.problem.scheme)
    hidden_factor, intermediate_factor = (13, 5) if multiple < 64 else (3, 1)
    return _change_problem(
        case,
        hidden=hidden_factor * multiple,
        intermediate=intermediate_factor * multiple,
        experts=16,
    )


def _get_size_multiple(scheme: QuantScheme) -> int:
    """Return the number of which the scheme's format requires sizes to be a multiple."""
    if scheme.granularity in ("block", "group"):
        return max(scheme.group)
    return 16 if scheme.quantized else 8  # rows of 16 bytes


def _make_model_problem(model: Problem, scheme: str) -> Problem:
    """Return a problem with the sizes of a model, but fewer experts and tokens."""
    return Problem(
        tokens=_DEFAULT_TOKENS,
        hidden=model.hidden,
        intermediate=model.intermediate,
        experts=min(model.experts, max(_MAX_MODEL_EXPERTS, model.top_k)),
        top_k=model.top_k,
        quant=scheme,
        activation=model.act,
        bias=model.bias,
    )


def _find_activation(description: Description, spec: ActivationSpec) -> str:
    names = [name for name, candidate in description.activations.items() if candidate == spec]
    if not names:
        need = f"an activation of {description.engine}, such as silu"
        raise ConfigurationError("activation", got=str(spec), need=need)
    return names[0]
