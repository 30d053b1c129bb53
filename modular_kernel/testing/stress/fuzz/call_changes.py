"""Single changes to an otherwise valid call.

MUST: the call must be refused. MAY: the call is refused or computed correctly.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.stress.fuzz.random_problems import CallInputs

# (inputs, problem, place) -> changed inputs, or None if it does not apply. place: which of several
# tensors is changed.
Change = Callable[[CallInputs, Problem, int], CallInputs | None]
_One = Callable[[torch.Tensor], Any]


def _x(change: _One) -> Change:
    return lambda given, problem, place: replace(given, x_TH=change(given.x_TH))


def _routing(name: str, change: _One) -> Change:
    def changed(given: CallInputs, problem: Problem, place: int) -> CallInputs:
        new = change(getattr(given.routing, name))
        return replace(given, routing=replace(given.routing, **{name: new}))

    return changed


def _weight(change: _One) -> Change:
    """Change w1, w2 or any other tensor of the weights."""

    def changed(given: CallInputs, problem: Problem, place: int) -> CallInputs:
        names = [name for name, tensor in vars(given.weights).items() if tensor is not None]
        name = names[place % len(names)]
        new = change(getattr(given.weights, name))
        return replace(given, weights=replace(given.weights, **{name: new}))

    return changed


def _out(change: _One) -> Change:
    def changed(given: CallInputs, problem: Problem, place: int) -> CallInputs:
        shape = (given.x_TH.shape[0], *problem.output_shape[1:])
        out = change(torch.empty(shape, dtype=problem.dtype))
        return replace(given, out=out)

    return changed


def _replace_argument(name: str, value: Any) -> Change:
    return lambda given, problem, place: replace(given, **{name: value})


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a lazily negated view. Raises for dtypes that the oracle could not read negated."""
    view = torch._neg_view(tensor)
    view.resolve_neg()
    return view


def _with_freed_memory(tensor: torch.Tensor) -> torch.Tensor:
    new = tensor.clone()
    new.untyped_storage().resize_(0)
    return new


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def _with_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


def _other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64 if tensor.dtype is not torch.float64 else torch.float32)


def _longer(tensor: torch.Tensor) -> torch.Tensor:
    more = tensor[-1:] if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:])
    return torch.cat([tensor, more])


def _wider(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[..., -1:]], -1)


def _extra_tensor(given: CallInputs, problem: Problem, place: int) -> CallInputs | None:
    """Add a tensor that the problem does not have."""
    absent = [name for name, tensor in vars(given.weights).items() if tensor is None]
    return (
        replace(
            given,
            weights=replace(given.weights, **{absent[place % len(absent)]: torch.ones(problem.e)}),
        )
        if absent
        else None
    )


def _missing(given: CallInputs, problem: Problem, place: int) -> CallInputs:
    names = [name for name, tensor in vars(given.weights).items() if tensor is not None]
    removed: dict[str, Any] = {names[place % len(names)]: None}
    return replace(given, weights=replace(given.weights, **removed))


def _out_is_read(given: CallInputs, problem: Problem, place: int) -> CallInputs | None:
    out = given.x_TH
    if problem.inplace or not out.numel() or not out.is_contiguous():
        return None
    return replace(given, out=out)


def _out_in_weights(given: CallInputs, problem: Problem, place: int) -> CallInputs | None:
    shape = (given.x_TH.shape[0], *problem.output_shape[1:])
    flat, count = given.weights.w2, 1
    for size in shape:
        count *= size
    if flat.dtype is not problem.dtype or not flat.is_contiguous() or not 0 < count <= flat.numel():
        return None
    return replace(given, out=flat.view(-1)[:count].view(shape))


def _as_list(tensor: torch.Tensor) -> object:
    return tensor.tolist()


_EACH: tuple[tuple[str, _One], ...] = (
    ("a list", _as_list),
    ("None", lambda tensor: None),
    ("a number", lambda tensor: 3),
    ("meta", lambda tensor: tensor.to("meta")),
    ("one dimension more", lambda tensor: tensor[None]),
    ("complex", lambda tensor: tensor.float().to(torch.complex64)),
    ("longer", _longer),
    ("another dtype", _other_dtype),
    ("sparse", lambda tensor: tensor.float().to_sparse()),
)
_X, _W, _IDS, _T = _x, _weight, "topk_ids_TK", "topk_weights_TK"

MUST: tuple[tuple[str, Change], ...] = (
    *((f"x is {name}", _x(change)) for name, change in _EACH),
    *((f"topk_weights: {name}", _routing(_T, change)) for name, change in _EACH),
    *((f"topk_ids: {name}", _routing(_IDS, change)) for name, change in _EACH),
    *((f"a weight: {name}", _weight(change)) for name, change in _EACH),
    ("x wider", _x(_wider)),
    ("topk_weights wider", _routing(_T, _wider)),
    ("topk_ids wider", _routing(_IDS, _wider)),
    ("topk_ids float", _routing(_IDS, torch.Tensor.float)),
    ("topk_ids int16", _routing(_IDS, torch.Tensor.short)),
    ("topk_ids bool", _routing(_IDS, torch.Tensor.bool)),
    ("a weight wider", _weight(_wider)),
    ("a tensor too many", _extra_tensor),
    ("a tensor missing", _missing),
    ("no weights", _replace_argument("weights", None)),
    ("weights as a dict", _replace_argument("weights", {})),
    ("no routing", _replace_argument("routing", None)),
    ("routing as a tuple", _replace_argument("routing", (1, 2))),
    ("out of another dtype", _out(_other_dtype)),
    ("out wider", _out(_wider)),
    ("out longer", _out(_longer)),
    ("out as a list", _out(_as_list)),
    ("out is x", _out_is_read),
    ("out in w2", _out_in_weights),
)  # fmt: skip

# May be refused; an empty tensor is harmless.
MAY: tuple[tuple[str, Change], ...] = (
    ("x negated", _x(_negated)),
    ("a weight negated", _weight(_negated)),
    ("topk_weights negated", _routing(_T, _negated)),
    ("topk_ids negated", _routing(_IDS, _negated)),
    ("x with gaps", _x(_with_gaps)),
    ("a weight with gaps", _weight(_with_gaps)),
    ("topk_ids with gaps", _routing(_IDS, _with_gaps)),
    ("x expanded", _x(lambda x: x[:1].expand(x.shape) if len(x) else x)),
    ("x a parameter", _x(lambda x: torch.nn.Parameter(x, requires_grad=False))),
    ("a weight a parameter", _weight(lambda w: torch.nn.Parameter(w, requires_grad=False))),
    ("out", _out(lambda out: out)),
    ("out with gaps", _out(_with_gaps)),
    ("out of NaN", _out(lambda out: out.fill_(torch.nan))),
    ("out requires grad", _out(_with_grad)),
)  # fmt: skip


def freed(given: CallInputs, problem: Problem, place: int) -> CallInputs | None:
    """Free the memory of a tensor with values."""
    weights = given.weights
    if place % 2:
        return _weight(_with_freed_memory)(given, problem, place // 2)
    return (
        replace(given, x_TH=_with_freed_memory(given.x_TH), weights=weights)
        if given.x_TH.numel()
        else None
    )


def graded(given: CallInputs, problem: Problem, place: int) -> CallInputs | None:
    """Make a floating-point tensor require grad."""
    names = [
        name
        for name, tensor in vars(given.weights).items()
        if tensor is not None and tensor.dtype.is_floating_point and tensor.element_size() > 1
    ]
    if not names or place % 3 == 0:
        return _x(_with_grad)(given, problem, place)
    name = names[place // 3 % len(names)]
    new: dict[str, torch.Tensor] = {name: _with_grad(getattr(given.weights, name))}
    weights: ExpertWeights = replace(given.weights, **new)
    return replace(given, weights=weights)


ALL: tuple[tuple[str, Change, bool], ...] = (
    *((name, change, True) for name, change in MUST),
    ("freed memory", freed, True),
    ("requires grad", graded, True),
    *((name, change, False) for name, change in MAY),
)
CHANGES: dict[str, tuple[Change, bool]] = {name: (change, must) for name, change, must in ALL}
