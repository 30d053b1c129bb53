"""Runs experts with PEFT adapters on kernels that read the base weights and the adapter's factors.

PEFT 0.19 and newer wraps an experts module once for each adapted parameter (`ParamWrapper`). In
each call, the wrapper replaces the parameter W with W + scaling * lhs @ rhs, which allocates a
tensor as large as the weights of all experts. With this module, the outermost wrapper passes W and
the factors to our kernels instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from modular_kernel.integrations.transformers.gradients import needs_gradients
from modular_kernel.integrations.transformers.modules import (
    Layout,
    get_first_projection,
    is_dispatched,
    is_quantized,
    list_tensor_names,
    make_problem_factory,
    read_layout,
    read_tensor,
)
from modular_kernel.integrations.transformers.register import Registration, normalize_call
from modular_kernel.operators.expert_fields import make_expert_weights
from modular_kernel.operators.pairing import serialize_layer
from modular_kernel.spec.lora import MAX_RANK, AdapterSpec
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils.tensor_checks import check_tensors

_Matrices = tuple[torch.Tensor, torch.Tensor]  # A (e, r, K) and B (e, rows, r)
_UNQUANTIZED_FIELDS = frozenset(("w1", "w2", "w1:t", "w2:t", "b1", "b2"))


@dataclass(frozen=True)
class Factors:
    """The factors of scaling * lhs @ rhs, which has the parameter's layout and is added to it."""

    lhs: torch.Tensor
    rhs: torch.Tensor
    scaling: float

    def make_matrices(self, *, transposed: bool) -> _Matrices:
        """Return A, and B multiplied by the scaling.

        transposed: whether the parameter is (e, K, rows).
        """
        a, b = (self.lhs.mT, self.rhs.mT) if transposed else (self.rhs, self.lhs)
        return a, b * self.scaling


@dataclass(frozen=True)
class AdaptedExperts:
    """An experts module with one adapter.

    module: the module without wrappers.
    tensors: tensors of the module, in the order of `list_tensor_names`.
    layout: the layout of the tensors.
    factors: the adapter's factors, by the name of the adapted parameter.
    """

    module: torch.nn.Module
    tensors: tuple[torch.Tensor, ...]
    layout: Layout
    factors: dict[str, Factors]

    @property
    def all_tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that a call reads."""
        factors = (tensor for item in self.factors.values() for tensor in (item.lhs, item.rhs))
        return (*self.tensors, *factors)

    def make_weights(self) -> tuple[AdapterSpec, ExpertWeights]:
        """Return an AdapterSpec with one slot, and the weights with the adapter's matrices."""
        weights = make_expert_weights(self.tensors, self.layout.fields)
        transposed = self.layout.fields.startswith("w1:t")
        rank = max(item.rhs.shape[1] for item in self.factors.values())
        gated = weights.w1.shape[1] != weights.w2.shape[2]
        factors = [
            self.factors.get(name) for name in (get_first_projection(self.module), "down_proj")
        ]
        w1_matrices, w2_matrices = (
            None if item is None else item.make_matrices(transposed=transposed) for item in factors
        )
        a13, b13 = _pad_matrices(w1_matrices, rank, weights.w1)
        a2, b2 = _pad_matrices(w2_matrices, rank, weights.w2)
        weights = replace(weights, lora_a13=a13, lora_b13=b13, lora_a2=a2, lora_b2=b2)
        return AdapterSpec(1, rank, a13_shared=gated), weights


def replace_wrappers(model: torch.nn.Module) -> tuple[str, ...]:
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
            namespace = {"forward": _forward, "__module__": __name__, "_mk_original": cls}
            wrapper.__class__ = type(cls.__name__, (cls,), namespace)  # PEFT checks the name
            names.append(name)
    return tuple(names)


def _is_wrapper(module: Any) -> bool:
    """Return whether a module is PEFT's wrapper of one parameter."""
    return hasattr(type(module), "get_delta_factors")


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    result = None
    if not torch.compiler.is_compiling() and len(args) == 2 and not kwargs:
        result = _run_with_factors(self, (x, *args))
    output: torch.Tensor = (
        self._mk_original.forward(self, x, *args, **kwargs) if result is None else result
    )
    return output


def _run_with_factors(wrapper: Any, call: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
    """Run a call with the factors. Returns None if PEFT's forward must run instead.

    PEFT's forward must run if another experts implementation is selected, if not exactly one
    adapter is active, if gradients are needed, in training mode, or if the parts do not support
    adapters.
    """
    module = wrapper.get_base_layer()
    registration = ALL_EXPERTS_FUNCTIONS.get(module.config._experts_implementation or "eager")
    if not isinstance(registration, Registration):
        return None
    experts = read_adapted_experts(wrapper)
    in_training = module.training and registration.gradients == "fallback"
    if experts is None or in_training or needs_gradients((*call[::2], *experts.all_tensors)):
        return None
    x_TH, ids_TK, weights_TK = normalize_call(module, call, experts.tensors[0].shape[0])
    check_tensors({f"tensor {i} of experts": t for i, t in enumerate(experts.all_tensors)})
    with torch.no_grad():
        spec, weights = experts.make_weights()
    problem = make_problem_factory(module, experts.tensors, experts.layout)(
        dtype=x_TH.dtype,
        top_k=ids_TK.shape[1],
        activation=registration.activation(module),
        lora=str(spec),
    )
    layer = serialize_layer(problem)
    if not registration.pairing.can_run(layer, x_TH.device):
        return None
    slots_T = torch.zeros(len(x_TH), dtype=torch.int32, device=x_TH.device)
    return registration.pairing.run(layer, x_TH, weights, Routing(weights_TK, ids_TK, slots_T))


def read_adapted_experts(wrapper: Any) -> AdaptedExperts | None:
    """Return the tensors and factors of a wrapped module.

    Returns None unless the module is unquantized and has exactly one adapter, and the kernels
    support the adapter.
    """
    module, factors = wrapper.get_base_layer(), dict[str, Factors]()
    if is_quantized(module):
        return None
    for nested_wrapper in _iterate_wrappers(wrapper):
        active_adapters = [
            name for name in nested_wrapper.active_adapters if name in nested_wrapper.lora_A
        ]
        name = nested_wrapper.parameter_name
        if (
            nested_wrapper.disable_adapters
            or nested_wrapper.merged
            or len(active_adapters) != 1
            or name in factors
        ):
            return None
        lhs, rhs, scaling = nested_wrapper.get_delta_factors(active_adapters[0])
        if name not in (get_first_projection(module), "down_proj") or rhs.shape[1] > MAX_RANK:
            return None
        factors[name] = Factors(lhs, rhs, float(scaling))
    tensors = tuple(read_tensor(module, name) for name in list_tensor_names(module))
    layout = read_layout(module, tensors)
    if not set(layout.fields.split(",")) <= _UNQUANTIZED_FIELDS:
        return None
    return AdaptedExperts(module, tensors, layout, factors)


def _iterate_wrappers(wrapper: Any) -> Iterator[Any]:
    while _is_wrapper(wrapper):
        yield wrapper
        wrapper = wrapper.base_layer


def _pad_matrices(matrices: _Matrices | None, rank: int, weight: torch.Tensor) -> _Matrices:
    """Return A (1, e, rank, K) and B (1, e, rows, rank), padded with zeros.

    matrices: A and B of a smaller or equal rank; None if the weight is not adapted.
    weight: (e, rows, K), the weight that the matrices adapt.
    """
    experts, rows, columns = weight.shape
    if matrices is not None and matrices[0].shape[1] == rank:
        return matrices[0].contiguous()[None], matrices[1].contiguous()[None]
    a, b = weight.new_zeros(1, experts, rank, columns), weight.new_zeros(1, experts, rows, rank)
    if matrices is not None:
        smaller_rank = matrices[0].shape[1]
        a[0, :, :smaller_rank], b[0, :, :, :smaller_rank] = matrices
    return a, b
