"""torch.ops.modular_kernel.experts: one call of a layer that torch.compile and export pass over.

    experts(x_TH, ids_TK, weights_TK, params, fields, layer, pairing) -> y_TH

What is not a tensor is a text, so that an exported program runs in another process, which has to
import this module; it registers torch.ops.modular_kernel.route too. fields: what each tensor of
params is, as `expert_fields` reads it. layer and pairing: as `pairing` writes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

import modular_kernel.ops.route  # noqa: F401 (registers the router's operator)
from modular_kernel.operators.expert_fields import place, weights_from
from modular_kernel.operators.gradients import call_gradients
from modular_kernel.operators.pairing import pairing_of, problem_of
from modular_kernel.spec.problem import Combine
from modular_kernel.tensors import ExpertWeights, Routing


@dataclass(frozen=True)
class _Bound:
    """Weights made of `params`, valid while each is where it was."""

    fields: str
    others: tuple[int, ...]
    places: tuple[object, ...]
    weights: ExpertWeights


# By the first tensor. What is kept are aliases, so that an entry goes with its key.
_bound: Any = WeakIdKeyDictionary()

# Weights with what was prepared of them, by the address of w1, the layer and the pairing. Whoever
# prepared them keeps them.
_prepared = WeakValueDictionary[tuple[int, str, str], ExpertWeights]()


def use_prepared(weights: ExpertWeights, layer: str, pairing: str) -> None:
    """Have calls of the operator with the same w1, layer and pairing run on these weights.

    weights: what a kernel's `prepare_weights` returned; they are used as long as they live.
    """
    _prepared[weights.w1.data_ptr(), layer, pairing] = weights


@torch.library.custom_op("modular_kernel::experts", mutates_args=())
def experts(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    params: Sequence[torch.Tensor],
    fields: str,
    layer: str,
    pairing: str,
) -> torch.Tensor:
    """Return a new tensor like x, (T, H) or (T, K, H). ids and weights as those of a Routing."""
    weights = _prepared_of(params, fields, layer, pairing)
    if weights is None:
        weights = _weights(params, fields)
    return pairing_of(pairing).run(layer, x_TH, weights, Routing(weights_TK, ids_TK))


@experts.register_fake
def _(x_TH, ids_TK, weights_TK, params, fields, layer, pairing):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Shape and dtype of the output."""
    if problem_of(layer, 1).combine is Combine.SUM:
        return x_TH.new_empty(x_TH.shape)
    return x_TH.new_empty((x_TH.shape[0], ids_TK.shape[1], x_TH.shape[1]))


@torch.library.custom_op("modular_kernel::experts_backward", mutates_args=())
def experts_backward(
    grad_TH: torch.Tensor,
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    params: Sequence[torch.Tensor],
    fields: str,
    layer: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of x, weights_TK, b1 and b2; those of biases are empty if there are none."""
    weights = _weights(params, fields)
    routing, problem = Routing(weights_TK, ids_TK), problem_of(layer, len(x_TH))
    return call_gradients(grad_TH, x_TH, weights, routing, problem)


@experts_backward.register_fake
def _(grad_TH, x_TH, ids_TK, weights_TK, params, fields, layer):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Shapes and dtypes of the gradients."""
    biases = [x_TH.new_empty(0)] * 2
    for at, name in enumerate(fields.split(",")):
        if name in ("b1", "b2"):
            biases[name == "b2"] = torch.empty_like(params[at])
    return torch.empty_like(x_TH), torch.empty_like(weights_TK), *biases


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, params, fields, layer, _pairing = inputs
    ctx.save_for_backward(*tensors, *params)
    ctx.texts = fields, layer


def _backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[object, ...]:
    x_TH, ids_TK, weights_TK, *params = ctx.saved_tensors
    fields, layer = ctx.texts
    dx, dweights, db1, db2 = torch.ops.modular_kernel.experts_backward(
        grad_TH.contiguous(), x_TH, ids_TK, weights_TK, params, fields, layer
    )
    biases = {"b1": db1, "b2": db2}
    return dx, None, dweights, [biases.get(name) for name in fields.split(",")], None, None, None


experts.register_autograd(_backward, setup_context=_keep_inputs)

# What a traced call takes.
EXPERTS = torch.ops.modular_kernel.experts


def _prepared_of(
    params: Sequence[torch.Tensor], fields: str, layer: str, pairing: str
) -> ExpertWeights | None:
    """Return weights that were prepared of just these tensors, if there are any."""
    if not _prepared or not params:
        return None
    found = _prepared.get((params[0].data_ptr(), layer, pairing))
    if found is None:
        return None
    for text, param in zip(fields.split(","), params, strict=True):
        own = getattr(found, text.removesuffix(":loaded"), None)
        if own is None or own.data_ptr() != param.data_ptr() or own.shape != param.shape:
            return None
    return found


def _weights(params: Sequence[torch.Tensor], fields: str) -> ExpertWeights:
    found = _bound.get(params[0]) if params else None
    others, places = tuple(map(id, params)), tuple(map(place, params))
    if found is None or (found.fields, found.others, found.places) != (fields, others, places):
        weights = weights_from([param.detach() for param in params], fields)
        found = _Bound(fields, others, places, weights)
        _bound[params[0]] = found
    return found.weights
