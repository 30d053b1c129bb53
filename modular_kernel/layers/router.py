"""`Router` selects experts from x with a linear gate. `select_experts` selects them from logits.

router = Router(RouterSpec(8, renormalize=True), hidden_size=2048, num_experts=128)
weights, ids, logits = router(x_TH)
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.compiler import is_compiling

from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError
from modular_kernel.layers.module_state import is_state_loaded, move_without_cast
from modular_kernel.ops.route import Routed, RouterTensors, route
from modular_kernel.replay import modes
from modular_kernel.spec.problem import dtype_name, parse_dtype
from modular_kernel.spec.router import RouterSpec, StandardTopKOutput
from modular_kernel.tensors import check_loaded, fill_with_sentinel
from modular_kernel.utils.argument_checks import Count, expect, resolve_device
from modular_kernel.utils.matmul import linear
from modular_kernel.utils.tensor_checks import check_not_dtensor, check_tensor

__all__ = ["Routed", "Router", "RouterSpec", "RouterTensors", "StandardTopKOutput", "route",
           "select_experts"]  # fmt: skip


def select_experts(
    router_logits: torch.Tensor,
    spec: RouterSpec,
    tensors: RouterTensors | None = None,
    *,
    token_ids: torch.Tensor | None = None,
    ids_dtype: torch.dtype = torch.int32,
) -> StandardTopKOutput:
    """Select K experts per token. Return (weights, ids, logits).

    `route` describes the other arguments.

    router_logits: (T, E).

    Raises ConfigurationError if the spec has zero experts, because a StandardTopKOutput cannot hold
    their weight.
    """
    expect("router", spec, RouterSpec)
    if spec.zero_experts:
        need = (
            "0; use `route` or FusedMoE, because StandardTopKOutput has no weight of zero experts"
        )
        raise ConfigurationError("router zero_experts", got=spec.zero_experts, need=need)
    routed = route(router_logits, spec, tensors, token_ids_T=token_ids, ids_dtype=ids_dtype)
    routing = routed.routing
    return StandardTopKOutput(routing.topk_weights_TK, routing.topk_ids_TK, router_logits)


class Router(nn.Module):
    """A linear gate from x (T, H) to logits, followed by the selection of K experts per token.

    The module has these parameters and buffers. Z is the number of zero experts.

    - weight, (E + Z, H): the linear gate.
    - bias, (E + Z,): if `bias` is True.
    - e_score_correction_bias, (E + Z,) float32: if the spec has a selection bias.
    - tid2eid, a buffer of (vocabulary, K) int64: if the spec has a table.

    Until they are loaded, parameters are NaN, the table is -1, and a call raises StateError.

    vocabulary: number of token ids; required if the spec has a table.
    dtype: dtype of the gate. x is cast to it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    e_score_correction_bias: nn.Parameter | None
    tid2eid: torch.Tensor | None

    @modes.disable_inference_mode()
    def __init__(
        self,
        spec: RouterSpec,
        hidden_size: int,
        num_experts: int,
        *,
        bias: bool = False,
        vocabulary: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        expect("router", spec, RouterSpec)
        expect("hidden_size", hidden_size, Count)
        expect("num_experts", num_experts, Count)
        expect("bias", bias, bool)
        expect("vocabulary", vocabulary, Count | None)
        if (vocabulary is not None) != spec.table:
            need = "a number if the spec has a table, else None"
            raise ConfigurationError("vocabulary", got=vocabulary, need=need)
        device = resolve_device(torch.get_default_device() if device is None else device, meta=True)
        self.spec, self.num_experts = spec, num_experts
        columns, gate_dtype = spec.columns(num_experts), parse_dtype(dtype)

        def make_parameter(*shape: int, dtype: torch.dtype = gate_dtype) -> nn.Parameter:
            nan_values = torch.full(shape, torch.nan, dtype=dtype, device=device)
            return nn.Parameter(nan_values, requires_grad=False)

        self.weight = make_parameter(columns, hidden_size)
        self.bias = make_parameter(columns) if bias else None
        has_selection_bias = spec.selection_bias
        self.e_score_correction_bias = (
            make_parameter(columns, dtype=torch.float32) if has_selection_bias else None
        )
        table = None
        if vocabulary is not None:
            table = torch.full((vocabulary, spec.top_k), -1, dtype=torch.int64, device=device)
        self.register_buffer("tid2eid", table)
        # Whether the next call must check that all tensors are loaded.
        self._must_check_loaded = True

    def mark_loaded(self) -> None:
        """Skip the check that parameters are loaded, for a gate that is meant to contain NaN."""
        self._must_check_loaded = False

    def extra_repr(self) -> str:
        """Return the spec and the number of experts, for torch's module representation."""
        return f"{self.spec}, num_experts={self.num_experts}"

    def logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return logits (T, E + zero experts) in the gate's dtype, even under autocast."""
        check_tensor("x of the router", x_TH)
        if not x_TH.is_floating_point():
            need = "a floating-point dtype"
            raise DtypeError("x of the router", got=dtype_name(x_TH.dtype), need=need)
        if x_TH.dim() != 2 or x_TH.shape[1] != self.weight.shape[1]:
            need = f"(T, H) with H = {self.weight.shape[1]}"
            raise ShapeError("x of the router", got=tuple(x_TH.shape), need=need)
        if self._must_check_loaded and not is_compiling():
            for name, tensor in self._list_tensors().items():
                check_not_dtensor(f"router.{name}", tensor)
            check_loaded(self._list_tensors())
            self._must_check_loaded = self.weight.is_meta
        with torch.autocast(x_TH.device.type, enabled=False):
            return linear(x_TH.to(self.weight.dtype), self.weight, self.bias)

    def tensors(self) -> RouterTensors:
        """Return the tensors that `route` takes in addition to the logits."""
        unloaded = (
            tuple(self._list_tensors().values())
            if self._must_check_loaded and is_compiling()
            else ()
        )
        return RouterTensors(self.e_score_correction_bias, self.tid2eid, unloaded)

    def _list_tensors(self) -> dict[str, torch.Tensor]:
        tensors = {
            "weight": self.weight,
            "bias": self.bias,
            "e_score_correction_bias": self.e_score_correction_bias,
            "tid2eid": self.tid2eid,
        }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Self:
        """Move or cast the gate. The selection bias is moved but not cast."""
        selection_bias, was_meta = self.e_score_correction_bias, self.weight.is_meta

        def apply_or_move(tensor: torch.Tensor) -> torch.Tensor:
            return move_without_cast(fn, tensor) if tensor is selection_bias else fn(tensor)

        super()._apply(apply_or_move, recurse)  # type: ignore[no-untyped-call]
        if was_meta and not self.weight.is_meta:  # after `to_empty`
            for name, tensor in self._list_tensors().items():
                fill_with_sentinel(name, tensor.data)
            self._must_check_loaded = True
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *args: Any,
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if self._must_check_loaded:
            self._must_check_loaded = not is_state_loaded(self._list_tensors(), state_dict, prefix)

    def route(
        self,
        x_TH: torch.Tensor,
        token_ids: torch.Tensor | None = None,
        *,
        ids_dtype: torch.dtype = torch.int32,
    ) -> Routed:
        """Return the routing of x (T, H), and the weight of the zero experts.

        token_ids: (T,), required if the spec has a table.
        """
        return route(
            self.logits(x_TH),
            self.spec,
            self.tensors(),
            token_ids_T=token_ids,
            ids_dtype=ids_dtype,
        )

    def forward(
        self, x_TH: torch.Tensor, token_ids: torch.Tensor | None = None
    ) -> StandardTopKOutput:
        """Return (weights, ids, logits) for x (T, H).

        token_ids: (T,), required if the spec has a table.
        """
        return select_experts(self.logits(x_TH), self.spec, self.tensors(), token_ids=token_ids)
