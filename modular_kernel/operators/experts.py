"""torch.ops.modular_kernel.experts: a layer call as one operator, for torch.compile and export.

    experts(x_TH, ids_TK, weights_TK, params, fields, layer, pairing) -> y_TH
    experts_forward(...)  # the same without autograd, and with less overhead per call

x_TH: input.
ids_TK, weights_TK: expert ids and router weights, as in `Routing`.
params: tensors of the weights.
fields: the field of ExpertWeights of each of `params`, as text (`expert_fields`).
layer: the problem without its number of tokens, as text (`pairing.serialize_layer`).
pairing: the two parts of the kernel, as text (`pairing.Pairing`).

Arguments that are not tensors are strings, so that an exported program can run in another process.
This process must import this module, which also registers torch.ops.modular_kernel.route.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

import modular_kernel.ops.route  # noqa: F401 (registers the router's operator)
from modular_kernel.operators.expert_fields import (
    can_have_gradient,
    make_expert_weights,
    map_gradient,
)
from modular_kernel.operators.gradients import compute_gradients
from modular_kernel.operators.pairing import find_pairing, parse_layer
from modular_kernel.operators.weights_cache import WeightsCache
from modular_kernel.replay.modes import is_exporting
from modular_kernel.spec.problem import Combine
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils import operator_library

_weights_cache = WeightsCache()

# Prepared weights, by the address of w1, the layer and the pairing. The caller that prepared them
# keeps them alive. A WeakValueDictionary would be slower, because each call checks whether
# the dict is empty.
_prepared: dict[tuple[int, str, str], "weakref.ref[ExpertWeights]"] = {}


def register_prepared(weights: ExpertWeights, layer: str, pairing: str) -> None:
    """Use prepared weights in operator calls with the same w1, layer and pairing.

    weights: the result of a kernel's `prepare_weights`. It is used as long as it is alive.
    """
    key = weights.w1.data_ptr(), layer, pairing

    def discard(reference: "weakref.ref[ExpertWeights]") -> None:
        if _prepared.get(key) is reference:
            _prepared.pop(key, None)

    _prepared[key] = weakref.ref(weights, discard)


def _fake_output(x_TH, ids_TK, weights_TK, params, fields, layer, pairing):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Return an empty tensor with the shape and dtype of the output."""
    if parse_layer(layer, 1).combine is Combine.SUM:
        return x_TH.new_empty(x_TH.shape)
    return x_TH.new_empty((x_TH.shape[0], ids_TK.shape[1], x_TH.shape[1]))


@operator_library.register_operator("experts_forward", _fake_output)
@operator_library.register_operator("experts", _fake_output)
def experts(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    params: Sequence[torch.Tensor],
    fields: str,
    layer: str,
    pairing: str,
) -> torch.Tensor:
    """Return the output of the layer, a new tensor (T, H) or (T, K, H).

    The docstring of this module describes the arguments.
    """
    weights = _find_prepared(params, fields, layer, pairing) if _prepared else None
    if weights is None:
        weights = _weights_cache.find(params, fields) if params else None
        if weights is None:
            weights = _make_weights(params, fields)
    return find_pairing(pairing).run(layer, x_TH, weights, Routing(weights_TK, ids_TK))


@torch.library.custom_op("modular_kernel::experts_backward", mutates_args=())
def experts_backward(  # noqa: PLR0913 (as the operator above)
    grad_TH: torch.Tensor,
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    params: Sequence[torch.Tensor],
    needed: Sequence[bool],
    fields: str,
    layer: str,
) -> list[torch.Tensor]:
    """Return the gradients of x_TH, of weights_TK, and of the params that need one.

    grad_TH: gradient of the output.
    needed: for each of params, whether its gradient is needed.
    """
    weights = _make_weights(params, fields)
    routing, problem = Routing(weights_TK, ids_TK), parse_layer(layer, len(x_TH))
    names = [entry.partition(":")[0] for entry in fields.split(",")]
    needs_weights = any(
        need and name in ("w1", "w2") for name, need in zip(names, needed, strict=True)
    )
    gradients_by_field = compute_gradients(
        grad_TH, x_TH, weights, routing, problem, needs_weights=needs_weights
    )
    gradients = [
        map_gradient(param, entry, getattr(gradients_by_field, name))
        for param, need, entry, name in zip(params, needed, fields.split(","), names, strict=True)
        if need
    ]
    return [gradients_by_field.x_TH, gradients_by_field.topk_weights_TK, *gradients]


@experts_backward.register_fake
def _(grad_TH, x_TH, ids_TK, weights_TK, params, needed, fields, layer):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, PLR0913
    """Return empty tensors with the shapes and dtypes of the gradients."""
    needed_params = [param for param, need in zip(params, needed, strict=True) if need]
    return [torch.empty_like(tensor) for tensor in (x_TH, weights_TK, *needed_params)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, params, fields, layer, _pairing = inputs
    ctx.save_for_backward(*tensors, *params)
    ctx.strings = fields, layer


def _backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[object, ...]:
    x_TH, ids_TK, weights_TK, *params = ctx.saved_tensors
    fields, layer = ctx.strings
    quantized = parse_layer(layer, 1).scheme.quantized
    needed = [
        need and can_have_gradient(entry, quantized=quantized)
        for need, entry in zip(ctx.needs_input_grad[3], fields.split(","), strict=True)
    ]
    dx, dweights, *gradients = torch.ops.modular_kernel.experts_backward(
        grad_TH.contiguous(), x_TH, ids_TK, weights_TK, params, needed, fields, layer
    )
    dparams = [gradients.pop(0) if need else None for need in needed]
    return dx, None, dweights, dparams, None, None, None


operator_library.register_autograd("experts", _backward, setup_context=_setup_context)

EXPERTS = torch.ops.modular_kernel.experts.default
EXPERTS_FORWARD = torch.ops.modular_kernel.experts_forward.default


def call_experts_operator(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    params: list[torch.Tensor],
    fields: str,
    layer: str,
    pairing: str,
) -> torch.Tensor:
    """Call the operator `experts`, or `experts_forward` if no gradient is needed.

    torch.compile traces a call again if the grad mode changes, so the choice may be part of the
    graph. An exported program may run in any grad mode, so it always calls `experts`.
    """
    tensors = (x_TH, weights_TK, *params)
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    operator = EXPERTS if needs_gradient or is_exporting() else EXPERTS_FORWARD
    output: torch.Tensor = operator(x_TH, ids_TK, weights_TK, params, fields, layer, pairing)
    return output


def _find_prepared(
    params: Sequence[torch.Tensor], fields: str, layer: str, pairing: str
) -> ExpertWeights | None:
    """Return the registered weights that were prepared from these tensors, or None."""
    reference = _prepared.get((params[0].data_ptr(), layer, pairing)) if params else None
    prepared = None if reference is None else reference()
    if prepared is None:
        return None
    for entry, param in zip(fields.split(","), params, strict=True):
        field = getattr(prepared, entry.removesuffix(":loaded"), None)
        if field is None or field.data_ptr() != param.data_ptr() or field.shape != param.shape:
            return None
    return prepared


def _make_weights(params: Sequence[torch.Tensor], fields: str) -> ExpertWeights:
    """Return the weights of these tensors, from the cache if possible."""
    if not params:  # raises ConfigurationError
        return make_expert_weights(params, fields)
    weights = _weights_cache.find(params, fields)
    if weights is None:
        aliases = [param.detach() for param in params]
        weights = _weights_cache.add(params, fields, make_expert_weights(aliases, fields))
    return weights
