"""Registration of a pairing as an experts implementation of transformers."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from operator import index
from types import BuiltinFunctionType, MethodType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import ConfigurationError, InputError, StateError
from modular_kernel.integrations.transformers.activations import (
    ActivationKey,
    activation_key_of,
    activation_of,
    unsupported_error,
)
from modular_kernel.integrations.transformers.constants import constant_argument, object_of
from modular_kernel.integrations.transformers.gradients import (
    grouped_mm,
    needs_gradients,
    runs_grouped_mm,
)
from modular_kernel.integrations.transformers.modules import (
    flags_of,
    layout_of,
    names_of,
    problem_of,
    tensor_of,
    tensors_of,
)
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.operators.expert_fields import tensor_key, weights_from
from modular_kernel.operators.experts import EXPERTS, traced_experts
from modular_kernel.operators.pairing import Pairing, layer_text
from modular_kernel.spec.problem import ActivationSpec
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils.argument_checks import expect
from modular_kernel.utils.tensor_checks import check_strided, check_tensors

Gradients = Literal["fallback", "refuse"]
_NAMES = ("hidden_states", "top_k_index", "top_k_weights")


def register(
    prepare_finalize: str | type[PrepareAndFinalize] = "MoEPrepareAndFinalizeNoEP",
    experts: str | type[PermuteExpertsUnpermute] | None = None,
    *,
    name: str = "modular_kernel",
    gradients: Gradients = "fallback",
) -> str:
    """Register a pairing as transformers' experts implementation `name`, and return `name`.

    experts: None selects TritonExperts on a GPU. On a CPU, it selects transformers' grouped_mm,
        which is faster there, and TorchExperts for modules that grouped_mm does not support.
    gradients: "fallback" runs transformers' grouped_mm in training mode, because its backward is
        faster; in eval mode, gradients are computed by torch operations. "refuse" raises
        UnsupportedError for a call in grad mode with an input or weight that requires grad.

    Several pairings can be registered under different names. Registering a name again replaces its
    pairing. Raises ConfigurationError for another value of gradients, or for a name that
    transformers itself uses.
    """
    expect("prepare_finalize", prepare_finalize, str | type)
    expect("experts", experts, str | type | None)
    expect("experts implementation", name, str)
    expect("gradients", gradients, Gradients)
    existing = ALL_EXPERTS_FUNCTIONS.get(name)
    if name == "eager" or not (existing is None or isinstance(existing, Registration)):
        need = "a name that transformers does not use itself"
        raise ConfigurationError("experts implementation", got=name, need=need)
    new_registration = Registration(Pairing(prepare_finalize, experts), gradients)
    ExpertsInterface.register(name, new_registration)
    FP8ExpertsInterface.register(name, new_registration)
    return name


def register_default() -> None:
    """Register the default pairing as "modular_kernel", unless that name is taken."""
    if ALL_EXPERTS_FUNCTIONS.get("modular_kernel") is None:
        register()


def registration(name: str = "modular_kernel") -> "Registration":
    """Return the Registration of `name`, with its pairing and the kernels built so far.

    Raises ConfigurationError for a name that is not registered.
    """
    expect("experts implementation", name, str)
    implementation = ALL_EXPERTS_FUNCTIONS.get(name)
    if isinstance(implementation, Registration):
        return implementation
    raise ConfigurationError("experts implementation", got=name, need="a registered name")


@dataclass
class Layer:
    """Cached state of an experts module.

    activation_key: the values from which its activation was identified. bound: its weights and
    problem in the last call.
    """

    activation_key: ActivationKey
    activation: ActivationSpec
    bound: "Bound | None" = None


@dataclass(frozen=True)
class Bound:
    """Weights of a module. Valid while `key` is unchanged.

    fields, layer: arguments of the operator `experts`.
    """

    key: tuple[object, ...]
    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    weights: ExpertWeights = field(repr=False)
    fields: str
    layer: str


class Registration:
    """One pairing, and a cache entry for each module that uses it, for the module's lifetime."""

    def __init__(self, pairing: Pairing, gradients: Gradients) -> None:
        self.pairing = pairing
        self.pairing_text = str(pairing)
        self.gradients = gradients
        self.layers: WeakKeyDictionary[torch.nn.Module, Layer] = WeakKeyDictionary()

    @property
    def kernels(self) -> MutableMapping[Any, FusedMoEModularKernel]:
        """The kernels built so far."""
        return self.pairing.kernels

    def __call__(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Run the forward of an experts module, with the signature that transformers calls.

        hidden_states: (T, H). top_k_index: (T, K); ids past the last expert are skipped.
        top_k_weights: (T, K), any float dtype. Returns a new (T, H) tensor like hidden_states.
        """
        call = (hidden_states, top_k_index, top_k_weights)
        names: tuple[str, ...]
        why = ""
        if torch.compiler.is_compiling():
            names, why = _names(constant_argument(module), flags_of(module))
        else:
            for what, tensor in zip(_NAMES, call, strict=True):
                check_strided(what, tensor)
            names = names_of(module)
        tensors = tuple([_attribute(module, (name,)) for name in names])
        if any(map(_is_not_tensor, tensors)):
            if not torch.compiler.is_compiling():
                tensors_of(module)  # raises
            why = "an attribute that is not a tensor"
        if why:
            return self._run_eagerly(why, module, call)
        needed = needs_gradients((hidden_states, top_k_weights, *tensors))
        if needed and self.gradients == "refuse":
            raise unsupported_error(module, "a call that needs gradients", "torch.no_grad()")
        # In training, activation checkpointing runs the forward first without gradients.
        trains = module.training and self.gradients == "fallback"
        if (trains or self.is_slower_on(hidden_states.device)) and _runs_grouped_mm(
            constant_argument(module)
        ):
            return grouped_mm(module, call)
        return self.forward(module, call, names, tensors, as_operator=needed)

    def is_slower_on(self, device: torch.device) -> bool:
        """Return whether transformers' grouped_mm is faster on a device than the default parts."""
        return device.type == "cpu" and self.pairing.experts is None

    def _run_eagerly(
        self,
        why: str,
        module: torch.nn.Module,
        call: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Break the graph and run the call eagerly, which raises errors with their usual messages.

        With fullgraph=True, torch raises an error with the reason `why` instead.
        """
        torch._dynamo.graph_break(msg=why)
        outside = torch._dynamo.disable(self.__call__)  # type: ignore[no-untyped-call]
        result: torch.Tensor = outside(module, *call)
        return result

    def forward(
        self,
        module: torch.nn.Module,
        call: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        names: tuple[str, ...],
        tensors: tuple[torch.Tensor, ...],
        *,
        as_operator: bool = False,
    ) -> torch.Tensor:
        """Run a call on the pairing.

        as_operator: call the operator, which supports gradients, even if nothing is traced.
        """
        x_TH, ids_TK, weights_TK = normalize_call(module, call, tensors[0].shape[0])
        if torch.compiler.is_compiling():
            return self._trace(module, (x_TH, ids_TK, weights_TK), tensors)
        bound = self._bound(module, names, x_TH.dtype, ids_TK.shape[1])
        if as_operator:
            texts = bound.fields, bound.layer, self.pairing_text
            result: torch.Tensor = EXPERTS(x_TH, ids_TK, weights_TK, list(tensors), *texts)
            return result
        return self.pairing.run(bound.layer, x_TH, bound.weights, Routing(weights_TK, ids_TK))

    def _trace(
        self,
        module: torch.nn.Module,
        call: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tensors: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Run the call as one operator in a traced graph.

        Shapes come from the traced tensors, because those of sharded parameters differ from the
        module's.
        """
        x_TH, ids_TK, weights_TK = call
        shapes = tuple([tuple(tensor.shape) for tensor in tensors])
        dtypes = tuple([tensor.dtype for tensor in tensors])
        devices = tuple([tensor.device for tensor in tensors])
        top_k = index(ids_TK.shape[1])  # specializes a symbol of dynamic shapes
        metadata, flags = (shapes, dtypes, devices), flags_of(module)
        owner, experts = constant_argument(self), constant_argument(module)
        constants = _constants(owner, experts, metadata, x_TH.dtype, x_TH.device, top_k, flags)
        if isinstance(constants, str):
            return self._run_eagerly(constants, module, call)
        fields, layer, numbers, functions = constants
        # The checks become guards of the graph, which is valid only for these values.
        for path, function in functions:
            value = _function(module, path)
            if value is None or (function is not None and id(value) != function):
                raise StateError("experts module", got=f"another {path}", need="as traced")
        for path, value in numbers:
            if _attribute(module, path) != value:
                raise StateError("experts module", got=f"another {path[-1]}", need="as traced")
        texts = fields, layer, _text(owner)
        return traced_experts(x_TH, ids_TK, weights_TK, list(tensors), *texts)

    def _bound(
        self, module: torch.nn.Module, names: tuple[str, ...], dtype: torch.dtype, top_k: int
    ) -> Bound:
        tensors = tuple([tensor_of(module, name) for name in names])
        layer = self._layer(module)
        key = (dtype, top_k, layer.activation, flags_of(module), tuple(map(tensor_key, tensors)))
        bound = layer.bound
        if bound is None or bound.key != key or any(map(_is_other, bound.tensors, tensors)):
            check_tensors(dict(zip(names, tensors, strict=True)))
            layout = layout_of(module, tensors)
            problem = problem_of(module, tensors, layout)(
                dtype=dtype, top_k=top_k, activation=layer.activation
            )
            weights = weights_from(tensors, layout.fields)
            bound = layer.bound = Bound(key, tensors, weights, layout.fields, layer_text(problem))
        return bound

    def activation(self, module: torch.nn.Module) -> ActivationSpec:
        """Return the activation between the module's projections, determined once."""
        return self._layer(module).activation

    def _layer(self, module: torch.nn.Module) -> Layer:
        activation_key = activation_key_of(module)
        layer = self.layers.get(module)
        if layer is None or layer.activation_key != activation_key:
            layer = self.layers[module] = Layer(activation_key, activation_of(module))
        return layer

    def constants(
        self,
        module: torch.nn.Module,
        tensors: tuple[torch.Tensor, ...],
        dtype: torch.dtype,
        top_k: int,
    ) -> tuple[str, str]:
        """Return the arguments `fields` and `layer` of the operator `experts`.

        tensors: the module's weights, or meta tensors of their shapes and dtypes.
        """
        layout = layout_of(module, tensors)
        problem = problem_of(module, tensors, layout)(
            dtype=dtype, top_k=top_k, activation=self._layer(module).activation
        )
        return layout.fields, layer_text(problem)


def normalize_call(
    module: torch.nn.Module, call: tuple[torch.Tensor, torch.Tensor, torch.Tensor], experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, ids and weights as kernels require them.

    Ids past the last expert become -1, and weights become float32. All are contiguous.
    """
    x_TH, ids_TK, weights_TK = call
    check_tensors(dict(zip(_NAMES, call, strict=True)))
    # Releases without the attribute may also pass ids of experts on other ranks.
    if getattr(module, "_is_expert_parallel", True):
        ids_TK = ids_TK.masked_fill(ids_TK >= experts, -1)
    return x_TH.contiguous(), ids_TK.contiguous(), weights_TK.to(torch.float32).contiguous()


# --------------------------------------------------------------------- constants of a graph


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _names(
    module: torch.nn.Module | int, _flags: tuple[object, ...]
) -> tuple[tuple[str, ...], str]:
    """Return (names of the weights, ""), or ((), reason) if the module is not supported."""
    try:
        return names_of(object_of(module)), ""
    except InputError as error:
        return (), str(error)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _runs_grouped_mm(module: torch.nn.Module | int) -> bool:
    return runs_grouped_mm(object_of(module))


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _text(registration: Registration | int) -> str:
    return object_of(registration).pairing_text


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _constants(
    registration: Registration | int,
    module: torch.nn.Module | int,
    metadata: tuple[tuple[Any, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    top_k: int,
    _flags: tuple[object, ...],
) -> tuple[object, ...] | str:
    """Return (fields, layer, numbers, functions), or the reason why a call is not traced.

    fields and layer are arguments of the operator. They depend on the attributes in numbers (path,
    value) and functions (name, id).
    """
    registration, module = object_of(registration), object_of(module)
    shapes, dtypes, devices = metadata
    tensors = tuple(map(_meta, shapes, dtypes))
    try:
        for name, tensor_device in zip(names_of(module), devices, strict=True):
            if tensor_device != device:
                raise unsupported_error(
                    module, f"{name} on {tensor_device}", f"on {device}, where x is"
                )
        activation_key: ActivationKey = activation_key_of(module)
        texts = registration.constants(module, tensors, dtype, top_k)
    except InputError as error:
        return str(error)
    paths = [path for path in ("_apply_gate", "act_fn") if hasattr(module, path)]
    functions = tuple([(path, _id_in_graph(_function(module, path))) for path in paths])
    return (*texts, activation_key[2], functions)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _id_in_graph(function: object) -> int | None:
    """Return the id of a function, or None if it is built in.

    Dynamo of torch 2.11 does not trace `id` of such a function. Reading it adds a guard, too.
    """
    return None if isinstance(function, BuiltinFunctionType) else id(function)


def _function(module: torch.nn.Module, name: str) -> object:
    """Return an attribute. For a method, return its function.

    Each access to a method creates a new object, which cannot be compared by identity.
    """
    attribute = _attribute(module, (name,))
    return attribute.__func__ if isinstance(attribute, MethodType) else attribute


def _attribute(module: torch.nn.Module, path: tuple[str, ...]) -> Any:
    value: Any = module
    for name in path:
        value = getattr(value, name, None)
    return value


def _is_not_tensor(value: object) -> bool:
    return not isinstance(value, torch.Tensor)


def _is_other(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is not other
