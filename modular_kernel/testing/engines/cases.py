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

_TOKENS = {"cpu": (1, 2, 17), "cuda": (1, 2, 17, 256)}
_FEW = 17  # tokens of a call that checks one property
_MODEL_EXPERTS = 8  # more experts of a large model take long to make


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
    for experts in classes:
        if not experts.unavailable:
            for scheme in experts.schemes:
                if selection.scheme in (None, scheme):
                    cases |= dict.fromkeys(_list_cases(description, experts, scheme, selection))
    return list(cases)


def _list_cases(
    description: Description, experts: ExpertsClass, scheme: str, selection: Selection
) -> Iterator[EngineCase]:
    tokens = _TOKENS[description.device]
    if selection.model is not None:
        problem = _make_model_problem(selection.model, scheme)
        activation = _find_activation(description, problem.act)
        case = EngineCase(experts.name, activation, problem)
        yield from (with_tokens(case, t) for t in tokens)
        return
    base = _make_problem(scheme, description.device)
    cases = {
        name: EngineCase(experts.name, name, replace(base, activation=spec))
        for name, spec in description.activations.items()
    }
    main = next(iter(cases.values()))
    yield from _list_main_cases(main, tokens)
    yield from _list_promises(main, skips=experts.skips_ids)
    for case in cases.values():
        yield case
        if selection.level == "full":
            yield from (with_tokens(case, t) for t in tokens)
            yield _with_odd_sizes(case)
            yield _change(case, dtype=torch.float16)
            yield _change(case, bias=True)
    yield _change(main, dtype=torch.float16)
    if scheme == "none":
        # Products of Triton kernels have tf32's precision unless a kernel requires more.
        yield _change(main, dtype=torch.float32, fp32_precision="tf32")
    for case in list(cases.values())[:2]:
        yield _change(case, bias=True)
    if selection.level == "full":
        yield from (replace(main, routing=kind) for kind in ("zipf", "empty_experts"))


def _list_main_cases(case: EngineCase, tokens: tuple[int, ...]) -> Iterator[EngineCase]:
    """Yield token counts, sizes, and kinds of routing and calls."""
    yield from (with_tokens(case, t) for t in tokens)
    odd = _with_odd_sizes(case)
    yield odd
    yield replace(_change(odd, top_k=1), routing="all_to_one")
    many = _change(case, experts=64, top_k=8)
    yield from (with_tokens(many, t) for t in (1, _FEW))
    yield _change(case, experts=16, local_experts=8, expert_map=True, top_k=8)
    yield _change(case, top_k=1, apply_router_weight_on_input=True)


def _list_promises(case: EngineCase, *, skips: bool) -> Iterator[EngineCase]:
    """Yield the promises.

    skips: whether to check ids of -1.
    """
    for promise in Promise:
        if promise is Promise.SKIPPED_IDS and not skips:
            continue
        routing = "empty_experts" if promise is Promise.UNUSED_WEIGHTS else "uniform"
        if promise is not Promise.NAN or not _shares_scale(case.problem.scheme):
            yield replace(case, routing=routing, promise=promise)


def _shares_scale(scheme: QuantScheme) -> bool:
    """Return whether all tokens of a call share a scale that is computed from them."""
    return scheme.activation_granularity == "tensor" and not scheme.static


def with_tokens(case: EngineCase, tokens: int) -> EngineCase:
    """Return the case with another number of tokens."""
    return replace(case, problem=case.problem.with_tokens(tokens))


def _change(case: EngineCase, **changes: object) -> EngineCase:
    """Return the case with some fields of its problem changed."""
    return replace(case, problem=replace(case.problem, **changes))  # type: ignore[arg-type]


def _make_problem(scheme: str, device: str) -> Problem:
    step = _get_step(QuantScheme.parse(scheme))
    hidden, intermediate = (512, 256) if device == "cuda" else (2 * step, step)
    hidden, intermediate = max(hidden, 128), max(intermediate, 64)
    return Problem(
        tokens=_FEW, hidden=hidden, intermediate=intermediate, experts=8, top_k=2, quant=scheme
    )


def _with_odd_sizes(case: EngineCase) -> EngineCase:
    """Return the case with sizes that are odd multiples of what the scheme needs."""
    step = _get_step(case.problem.scheme)
    hidden, intermediate = (13 * step, 5 * step) if step < 64 else (3 * step, step)
    return _change(case, hidden=hidden, intermediate=intermediate, experts=16)


def _get_step(scheme: QuantScheme) -> int:
    """Return the number that must divide sizes in the scheme's format."""
    if scheme.granularity in ("block", "group"):
        return max(scheme.group)
    return 16 if scheme.quantized else 8  # rows of 16 bytes


def _make_model_problem(model: Problem, scheme: str) -> Problem:
    """Return a call with the sizes of a model, but few experts."""
    return Problem(
        tokens=_FEW,
        hidden=model.hidden,
        intermediate=model.intermediate,
        experts=min(model.experts, max(_MODEL_EXPERTS, model.top_k)),
        top_k=model.top_k,
        quant=scheme,
        activation=model.act,
        bias=model.bias,
    )


def _find_activation(description: Description, spec: ActivationSpec) -> str:
    names = [name for name, other in description.activations.items() if other == spec]
    if not names:
        need = f"an activation of {description.engine}, such as silu"
        raise ConfigurationError("activation", got=str(spec), need=need)
    return names[0]
