"""Runs experts with PEFT adapters on kernels that read the base weights and the adapter's factors.

PEFT wraps an experts module once per adapted parameter (`ParamWrapper`, 0.19 and newer). In each
call, the wrapper replaces the parameter by W + scaling lhs rhs, which allocates a tensor as large
as the weights of all experts. Here the outermost wrapper passes W and the factors to our kernels
instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from modular_kernel.integrations.transformers.gradients import needs_gradients
from modular_kernel.integrations.transformers.modules import (
    Layout,
    first_projection,
    is_dispatched,
    is_quantized,
    layout_of,
    names_of,
    problem_of,
    tensor_of,
)
from modular_kernel.integrations.transformers.register import Registration, normalize_call
from modular_kernel.operators.expert_fields import weights_from
from modular_kernel.operators.pairing import layer_text
from modular_kernel.spec.lora import MAX_RANK, AdapterSpec
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils.tensor_checks import check_tensors

_Pair = tuple[torch.Tensor, torch.Tensor]  # A (e, r, K) and B (e, rows, r)
_UNQUANTIZED_FIELDS = frozenset(("w1", "w2", "w1:t", "w2:t", "b1", "b2"))


@dataclass(frozen=True)
class Factors:
    """The term scaling * lhs @ rhs that is added to one parameter, in the parameter's layout."""

    lhs: torch.Tensor
    rhs: torch.Tensor
    scaling: float

    def pair(self, *, transposed: bool) -> _Pair:
        """Return A, and B with the scaling. transposed: the parameter is (e, K, rows)."""
        a, b = (self.lhs.mT, self.rhs.mT) if transposed else (self.rhs, self.lhs)
        return a, b * self.scaling


@dataclass(frozen=True)
class Adapted:
    """An experts module with one adapter.

    tensors: its own tensors, in the order of `names_of`. factors: by the name of the parameter that
    they adapt.
    """

    module: torch.nn.Module
    tensors: tuple[torch.Tensor, ...]
    layout: Layout
    factors: dict[str, Factors]

    @property
    def all_tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that a call reads, which may require gradients."""
        factors = (tensor for each in self.factors.values() for tensor in (each.lhs, each.rhs))
        return (*self.tensors, *factors)

    def with_adapters(self) -> tuple[AdapterSpec, ExpertWeights]:
        """Return an AdapterSpec with one slot, and the weights with the adapter's matrices."""
        weights = weights_from(self.tensors, self.layout.fields)
        transposed = self.layout.fields.startswith("w1:t")
        rank = max(each.rhs.shape[1] for each in self.factors.values())
        gated = weights.w1.shape[1] != weights.w2.shape[2]
        factors = [self.factors.get(name) for name in (first_projection(self.module), "down_proj")]
        pairs = [None if each is None else each.pair(transposed=transposed) for each in factors]
        a13, b13 = _pad_pair(pairs[0], rank, weights.w1)
        a2, b2 = _pad_pair(pairs[1], rank, weights.w2)
        weights = replace(weights, lora_a13=a13, lora_b13=b13, lora_a2=a2, lora_b2=b2)
        return AdapterSpec(1, rank, a13_shared=gated), weights


def serve_wrapped(model: torch.nn.Module) -> tuple[str, ...]:
    """Make PEFT's wrappers of experts run on our kernels. Returns the names of the wrappers."""
    modules = list(model.named_modules())
    wrapped_ids = {id(module.base_layer) for _, module in modules if _is_wrapper(module)}
    names = []
    for name, module in modules:
        if not _is_wrapper(module) or id(module) in wrapped_ids or hasattr(module, "_mk_original"):
            continue
        wrapper: Any = module
        if is_dispatched(wrapper.get_base_layer()):
            cls: Any = type(wrapper)
            body = {"forward": _forward, "__module__": __name__, "_mk_original": cls}
            wrapper.__class__ = type(cls.__name__, (cls,), body)  # PEFT checks the name
            names.append(name)
    return tuple(names)


def _is_wrapper(module: Any) -> bool:
    """Return whether a module is PEFT's wrapper of one parameter."""
    return hasattr(type(module), "get_delta_factors")


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    result = None
    if not torch.compiler.is_compiling() and len(args) == 2 and not kwargs:
        result = _run(self, (x, *args))
    output: torch.Tensor = (
        self._mk_original.forward(self, x, *args, **kwargs) if result is None else result
    )
    return output


def _run(wrapper: Any, call: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
    """Run a call with the factors. Returns None if PEFT's own forward has to run instead.

    That is the case if another experts implementation is selected, if no or several adapters are
    active, if gradients are needed, in training, and if the part does not support adapters.
    """
    module = wrapper.get_base_layer()
    registration = ALL_EXPERTS_FUNCTIONS.get(module.config._experts_implementation or "eager")
    if not isinstance(registration, Registration):
        return None
    experts = read_adapted(wrapper)
    in_training = module.training and registration.gradients == "fallback"
    if experts is None or in_training or needs_gradients((*call[::2], *experts.all_tensors)):
        return None
    x_TH, ids_TK, weights_TK = normalize_call(module, call, experts.tensors[0].shape[0])
    check_tensors({f"tensor {at} of experts": t for at, t in enumerate(experts.all_tensors)})
    with torch.no_grad():
        spec, weights = experts.with_adapters()
    problem = problem_of(module, experts.tensors, experts.layout)(
        dtype=x_TH.dtype,
        top_k=ids_TK.shape[1],
        activation=registration.activation(module),
        lora=str(spec),
    )
    layer = layer_text(problem)
    if not registration.pairing.serves(layer, x_TH.device):
        return None
    slots_T = torch.zeros(len(x_TH), dtype=torch.int32, device=x_TH.device)
    return registration.pairing.run(layer, x_TH, weights, Routing(weights_TK, ids_TK, slots_T))


def read_adapted(wrapper: Any) -> Adapted | None:
    """Return the tensors and factors of a wrapped module.

    None unless it is unquantized and has exactly one adapter, which the kernels support.
    """
    module, factors = wrapper.get_base_layer(), dict[str, Factors]()
    if is_quantized(module):
        return None
    for each in _wrappers_of(wrapper):
        active = [name for name in each.active_adapters if name in each.lora_A]
        name = each.parameter_name
        if each.disable_adapters or each.merged or len(active) != 1 or name in factors:
            return None
        lhs, rhs, scaling = each.get_delta_factors(active[0])
        if name not in (first_projection(module), "down_proj") or rhs.shape[1] > MAX_RANK:
            return None
        factors[name] = Factors(lhs, rhs, float(scaling))
    tensors = tuple(tensor_of(module, name) for name in names_of(module))
    layout = layout_of(module, tensors)
    if not set(layout.fields.split(",")) <= _UNQUANTIZED_FIELDS:
        return None
    return Adapted(module, tensors, layout, factors)


def _wrappers_of(wrapper: Any) -> Iterator[Any]:
    while _is_wrapper(wrapper):
        yield wrapper
        wrapper = wrapper.base_layer


def _pad_pair(pair: _Pair | None, rank: int, weight: torch.Tensor) -> _Pair:
    """Return A (1, e, rank, K) and B (1, e, rows, rank), padded with zeros; None means all zeros.

    weight: (e, rows, K), the weight that the factors adapt.
    """
    experts, rows, depth = weight.shape
    if pair is not None and pair[0].shape[1] == rank:
        return pair[0].contiguous()[None], pair[1].contiguous()[None]
    a, b = weight.new_zeros(1, experts, rank, depth), weight.new_zeros(1, experts, rows, rank)
    if pair is not None:
        pair_rank = pair[0].shape[1]
        a[0, :, :pair_rank], b[0, :, :, :pair_rank] = pair
    return a, b
