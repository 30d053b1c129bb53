"""Single changes of an otherwise valid call, for the fuzz targets in `calls`.

A call with a change in MUST_BE_REFUSED must be refused. A call with a change in MAY_BE_REFUSED must
either be refused or return the correct result.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.stress.fuzz.random_problems import CallInputs

# Maps (inputs, problem, tensor_index) to changed inputs, or to None if the change does not apply.
# tensor_index selects the tensor if several can be changed.
Change = Callable[[CallInputs, Problem, int], CallInputs | None]
TensorChange = Callable[[torch.Tensor], Any]


def _change_x(change: TensorChange) -> Change:
    return lambda inputs, problem, tensor_index: replace(inputs, x_TH=change(inputs.x_TH))


def _change_routing(name: str, change: TensorChange) -> Change:
    def change_call(inputs: CallInputs, problem: Problem, tensor_index: int) -> CallInputs:
        new = change(getattr(inputs.routing, name))
        return replace(inputs, routing=replace(inputs.routing, **{name: new}))

    return change_call


def _change_weight(change: TensorChange) -> Change:
    """Return a change of one of the weight tensors."""

    def change_call(inputs: CallInputs, problem: Problem, tensor_index: int) -> CallInputs:
        names = [name for name, tensor in vars(inputs.weights).items() if tensor is not None]
        name = names[tensor_index % len(names)]
        new = change(getattr(inputs.weights, name))
        return replace(inputs, weights=replace(inputs.weights, **{name: new}))

    return change_call


def _change_out(change: TensorChange) -> Change:
    def change_call(inputs: CallInputs, problem: Problem, tensor_index: int) -> CallInputs:
        shape = (inputs.x_TH.shape[0], *problem.output_shape[1:])
        out = change(torch.empty(shape, dtype=problem.dtype))
        return replace(inputs, out=out)

    return change_call


def _replace_argument(name: str, value: Any) -> Change:
    return lambda inputs, problem, tensor_index: replace(inputs, **{name: value})


def _negate(tensor: torch.Tensor) -> torch.Tensor:
    """Return a lazily negated view.

    Raises an error for dtypes that cannot be negated, because the independent reference could not
    read them.
    """
    view = torch._neg_view(tensor)
    view.resolve_neg()
    return view


def _free_memory(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def _add_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def _require_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


def _change_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64 if tensor.dtype is not torch.float64 else torch.float32)


def _append_row(tensor: torch.Tensor) -> torch.Tensor:
    new_row = tensor[-1:] if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:])
    return torch.cat([tensor, new_row])


def _append_column(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[..., -1:]], -1)


def _add_tensor(inputs: CallInputs, problem: Problem, tensor_index: int) -> CallInputs | None:
    """Add a tensor that the problem does not have."""
    absent_names = [name for name, tensor in vars(inputs.weights).items() if tensor is None]
    if not absent_names:
        return None
    added = {absent_names[tensor_index % len(absent_names)]: torch.ones(problem.e)}
    return replace(inputs, weights=replace(inputs.weights, **added))


def _remove_tensor(inputs: CallInputs, problem: Problem, tensor_index: int) -> CallInputs:
    names = [name for name, tensor in vars(inputs.weights).items() if tensor is not None]
    removed: dict[str, Any] = {names[tensor_index % len(names)]: None}
    return replace(inputs, weights=replace(inputs.weights, **removed))


def _use_x_as_out(inputs: CallInputs, problem: Problem, tensor_index: int) -> CallInputs | None:
    out = inputs.x_TH
    if problem.inplace or not out.numel() or not out.is_contiguous():
        return None
    return replace(inputs, out=out)


def _use_w2_as_out(inputs: CallInputs, problem: Problem, tensor_index: int) -> CallInputs | None:
    shape = (inputs.x_TH.shape[0], *problem.output_shape[1:])
    w2, count = inputs.weights.w2, 1
    for size in shape:
        count *= size
    fits = 0 < count <= w2.numel()
    if w2.dtype is not problem.dtype or not w2.is_contiguous() or not fits:
        return None
    return replace(inputs, out=w2.view(-1)[:count].view(shape))


def _to_list(tensor: torch.Tensor) -> object:
    return tensor.tolist()


_INVALID_CHANGES: tuple[tuple[str, TensorChange], ...] = (
    ("a list", _to_list),
    ("None", lambda tensor: None),
    ("a number", lambda tensor: 3),
    ("meta", lambda tensor: tensor.to("meta")),
    ("one dimension more", lambda tensor: tensor[None]),
    ("complex", lambda tensor: tensor.float().to(torch.complex64)),
    ("longer", _append_row),
    ("another dtype", _change_dtype),
    ("sparse", lambda tensor: tensor.float().to_sparse()),
)
_IDS, _WEIGHTS = "topk_ids_TK", "topk_weights_TK"

MUST_BE_REFUSED: tuple[tuple[str, Change], ...] = (
    *((f"x is {name}", _change_x(change)) for name, change in _INVALID_CHANGES),
    *((f"topk_weights: {name}", _change_routing(_WEIGHTS, change))
      for name, change in _INVALID_CHANGES),
    *((f"topk_ids: {name}", _change_routing(_IDS, change)) for name, change in _INVALID_CHANGES),
    *((f"a weight: {name}", _change_weight(change)) for name, change in _INVALID_CHANGES),
    ("x wider", _change_x(_append_column)),
    ("topk_weights wider", _change_routing(_WEIGHTS, _append_column)),
    ("topk_ids wider", _change_routing(_IDS, _append_column)),
    ("topk_ids float", _change_routing(_IDS, torch.Tensor.float)),
    ("topk_ids int16", _change_routing(_IDS, torch.Tensor.short)),
    ("topk_ids bool", _change_routing(_IDS, torch.Tensor.bool)),
    ("a weight wider", _change_weight(_append_column)),
    ("a tensor too many", _add_tensor),
    ("a tensor missing", _remove_tensor),
    ("no weights", _replace_argument("weights", None)),
    ("weights as a dict", _replace_argument("weights", {})),
    ("no routing", _replace_argument("routing", None)),
    ("routing as a tuple", _replace_argument("routing", (1, 2))),
    ("out of another dtype", _change_out(_change_dtype)),
    ("out wider", _change_out(_append_column)),
    ("out longer", _change_out(_append_row)),
    ("out as a list", _change_out(_to_list)),
    ("out is x", _use_x_as_out),
    ("out in w2", _use_w2_as_out),
)  # fmt: skip

# Some of these changes are accepted only if the tensor is empty.
MAY_BE_REFUSED: tuple[tuple[str, Change], ...] = (
    ("x negated", _change_x(_negate)),
    ("a weight negated", _change_weight(_negate)),
    ("topk_weights negated", _change_routing(_WEIGHTS, _negate)),
    ("topk_ids negated", _change_routing(_IDS, _negate)),
    ("x with gaps", _change_x(_add_gaps)),
    ("a weight with gaps", _change_weight(_add_gaps)),
    ("topk_ids with gaps", _change_routing(_IDS, _add_gaps)),
    ("x expanded", _change_x(lambda x: x[:1].expand(x.shape) if len(x) else x)),
    ("x a parameter", _change_x(lambda x: torch.nn.Parameter(x, requires_grad=False))),
    ("a weight a parameter", _change_weight(lambda w: torch.nn.Parameter(w, requires_grad=False))),
    ("out", _change_out(lambda out: out)),
    ("out with gaps", _change_out(_add_gaps)),
    ("out of NaN", _change_out(lambda out: out.fill_(torch.nan))),
    ("out requires grad", _change_out(_require_grad)),
)  # fmt: skip


def free_tensor(inputs: CallInputs, problem: Problem, tensor_index: int) -> CallInputs | None:
    """Free the memory of a tensor that is not empty."""
    if tensor_index % 2:
        return _change_weight(_free_memory)(inputs, problem, tensor_index // 2)
    if not inputs.x_TH.numel():
        return None
    return replace(inputs, x_TH=_free_memory(inputs.x_TH))


def require_grad(inputs: CallInputs, problem: Problem, tensor_index: int) -> CallInputs | None:
    """Make a floating-point tensor require grad."""
    names = [
        name
        for name, tensor in vars(inputs.weights).items()
        if tensor is not None and tensor.dtype.is_floating_point and tensor.element_size() > 1
    ]
    if not names or tensor_index % 3 == 0:
        return _change_x(_require_grad)(inputs, problem, tensor_index)
    name = names[tensor_index // 3 % len(names)]
    new: dict[str, torch.Tensor] = {name: _require_grad(getattr(inputs.weights, name))}
    weights: ExpertWeights = replace(inputs.weights, **new)
    return replace(inputs, weights=weights)


ALL: tuple[tuple[str, Change, bool], ...] = (
    *((name, change, True) for name, change in MUST_BE_REFUSED),
    ("freed memory", free_tensor, True),
    ("requires grad", require_grad, True),
    *((name, change, False) for name, change in MAY_BE_REFUSED),
)
CHANGES: dict[str, tuple[Change, bool]] = {
    name: (change, must_refuse) for name, change, must_refuse in ALL
}
