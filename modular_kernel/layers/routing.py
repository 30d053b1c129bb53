"""Checks of the router, logits and routing that are passed to a FusedMoE."""

import torch

from modular_kernel.errors import ConfigurationError, ShapeError
from modular_kernel.layers.router import Router
from modular_kernel.models.router_config import router_differences
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import Routing, check_leading_dims
from modular_kernel.utils.argument_checks import expect
from modular_kernel.utils.tensor_checks import check_strided, check_tensor


def get_router_spec(router: Router | RouterSpec | None) -> RouterSpec | None:
    """Return the RouterSpec of a router, or None if there is no router."""
    return router.spec if isinstance(router, Router) else router


def check_selection_bias(
    selection_bias: torch.Tensor | None, router: Router | RouterSpec | None, experts: int
) -> None:
    """Check that a selection bias is given if and only if a RouterSpec requires one.

    selection_bias: (E + zero experts,), or None.
    experts: E.

    Raises ConfigurationError for a missing or unexpected bias, and ShapeError for a wrong shape.
    """
    required = isinstance(router, RouterSpec) and router.selection_bias
    if (selection_bias is not None) != required:
        got = "None" if selection_bias is None else "a tensor"
        need = "a tensor if and only if a RouterSpec has selection_bias"
        raise ConfigurationError("selection_bias", got=got, need=need)
    if selection_bias is not None and isinstance(router, RouterSpec):
        check_tensor("selection_bias", selection_bias, meta=True)
        need_shape = (router.columns(experts),)
        if tuple(selection_bias.shape) != need_shape:
            raise ShapeError("selection_bias", got=tuple(selection_bias.shape), need=need_shape)


def check_router(checkpoint_spec: RouterSpec | None, layer_spec: RouterSpec) -> None:
    """Raise ConfigurationError if the checkpoint's router differs from the layer's router.

    checkpoint_spec: None if the checkpoint's router is unknown, in which case nothing is compared.
    """
    if checkpoint_spec is None:
        return
    names = router_differences(checkpoint_spec, layer_spec)
    if names:
        if "groups" in names and "topk_groups" not in names:
            names = (*names, "topk_groups")  # report both fields, because they act together
        got, need = (
            ", ".join(f"{name}={getattr(spec, name)!r}" for name in names)
            for spec in (checkpoint_spec, layer_spec)
        )
        need = f"{need}, as in the layer's router"
        raise ConfigurationError("router of the checkpoint", got=got, need=need)


def resolve_top_k(top_k: int | None, router: Router | RouterSpec | None, experts: int) -> int:
    """Return K: the router's top_k if there is a router, otherwise `top_k`.

    Raises ConfigurationError if K exceeds the number of experts, or if `top_k`, the router and the
    layer do not match.
    """
    spec = get_router_spec(router)
    if spec is None:
        if top_k is None:
            raise ConfigurationError("top_k", got=None, need="a number, because there is no router")
        expect("top_k", top_k, int)
        if not 1 <= top_k <= experts:
            need = f"1 to {experts}, the number of experts"
            raise ConfigurationError("top_k", got=top_k, need=need)
        return top_k
    if isinstance(router, Router) and router.num_experts != experts:
        need = f"{experts}, as in the layer"
        raise ConfigurationError("router num_experts", got=router.num_experts, need=need)
    if top_k not in (None, spec.top_k):
        raise ConfigurationError("top_k", got=top_k, need=f"{spec.top_k}, as in the router")
    spec.columns(experts)
    return spec.top_k


def flatten_logits(routing: object, columns: int, leading_dims: tuple[int, ...]) -> torch.Tensor:
    """Return logits (..., E) as (T, E).

    routing: the argument that the caller passed as logits.
    columns: the required size of the last dimension.
    leading_dims: the leading dimensions of x, that is, all except H.

    Raises ConfigurationError unless `routing` is a tensor, and ShapeError for a wrong shape.
    """
    if not isinstance(routing, torch.Tensor):
        need = "the router's logits (..., E)"
        raise ConfigurationError("routing", got=type(routing).__name__, need=need)
    check_strided("router logits", routing)
    if routing.dim() < 2 or routing.shape[-1] != columns:
        need = f"(..., E) with E = {columns}"
        raise ShapeError("router logits", got=tuple(routing.shape), need=need)
    check_leading_dims("router logits", routing, leading_dims, "E")
    if routing.dim() == 2:  # `route` checks the tensor
        return routing
    return check_tensor("router logits", routing).reshape(-1, columns)


def normalize_routing(routing: object, leading_dims: tuple[int, ...]) -> Routing:
    """Return a caller's routing as contiguous (T, K) tensors. 16-bit weights become float32.

    routing: a Routing, or (weights, ids), each (..., K). The leading dimensions are those of x, or
        only T.
    leading_dims: the leading dimensions of x, that is, all except H.

    Raises ConfigurationError for an unknown type, and ShapeError if shapes do not match.
    """
    if isinstance(routing, Routing):
        weights, ids = routing.topk_weights_TK, routing.topk_ids_TK
    elif isinstance(routing, tuple | list) and len(routing) >= 2:
        weights, ids = routing[0], routing[1]
    else:
        need = "a Routing, or (weights, ids), each (..., K)"
        raise ConfigurationError("routing", got=type(routing).__name__, need=need)
    check_tensor("topk_weights", weights)
    check_tensor("topk_ids", ids)
    if weights.dim() < 2 or weights.shape != ids.shape or not weights.shape[-1]:
        got = f"{tuple(weights.shape)} and {tuple(ids.shape)}"
        need = "the same shape, (..., K) with K of 1 or more"
        raise ShapeError("topk_weights and topk_ids", got=got, need=need)
    check_leading_dims("topk_weights and topk_ids", ids, leading_dims, "K")
    if weights.dtype in (torch.bfloat16, torch.float16):
        weights = weights.float()
    top_k = weights.shape[-1]
    return Routing(weights.reshape(-1, top_k).contiguous(), ids.reshape(-1, top_k).contiguous())
