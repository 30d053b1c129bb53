"""Registers pairings of parts as experts implementations of transformers, and runs their calls."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from operator import index, is_not
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
    activation_of,
    read_activation_key,
    unsupported_error,
)
from modular_kernel.integrations.transformers.constants import (
    make_constant_argument,
    resolve_object,
)
from modular_kernel.integrations.transformers.gradients import (
    needs_gradients,
    run_grouped_mm,
    supports_grouped_mm,
)
from modular_kernel.integrations.transformers.modules import (
    list_tensor_names,
    make_problem_factory,
    read_flags,
    read_layout,
    read_tensor,
    read_tensors,
)
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.operators.expert_fields import make_expert_weights, make_tensor_key
from modular_kernel.operators.experts import EXPERTS, call_experts_operator
from modular_kernel.operators.pairing import Pairing, serialize_layer
from modular_kernel.spec.problem import ActivationSpec
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils.argument_checks import expect
from modular_kernel.utils.tensor_checks import check_strided, check_tensors

Gradients = Literal["fallback", "refuse"]
_ARGUMENT_NAMES = ("hidden_states", "top_k_index", "top_k_weights")


def register(
    prepare_finalize: str | type[PrepareAndFinalize] = "MoEPrepareAndFinalizeNoEP",
    experts: str | type[PermuteExpertsUnpermute] | None = None,
    *,
    name: str = "modular_kernel",
    gradients: Gradients = "fallback",
) -> str:
    """Register a pairing as transformers' experts implementation `name`, and return `name`.

    Several pairings can be registered under different names. Registering a name again replaces its
    pairing.

    prepare_finalize: the prepare/finalize part.
    experts: the experts part. On a GPU, None selects the same experts as in `FusedMoE`. On a CPU,
        None selects transformers' grouped_mm, which is faster, or TorchExperts for modules that
        grouped_mm does not support.
    name: name of the experts implementation.
    gradients: "fallback" runs transformers' grouped_mm in training mode, because its backward is
        faster. In eval mode, torch operations compute the gradients. "refuse" raises
        UnsupportedError for a call in grad mode with an input or weight that requires grad.

    Raises ConfigurationError for any other value of gradients, or for a name of an implementation
    of transformers.
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
    """Register the default pairing as "modular_kernel", unless this name is registered."""
    if ALL_EXPERTS_FUNCTIONS.get("modular_kernel") is None:
        register()


def registration(name: str = "modular_kernel") -> "Registration":
    """Return the Registration of a name, with its pairing and kernels.

    Raises ConfigurationError for a name that is not registered.
    """
    expect("experts implementation", name, str)
    implementation = ALL_EXPERTS_FUNCTIONS.get(name)
    if isinstance(implementation, Registration):
        return implementation
    raise ConfigurationError("experts implementation", got=name, need="a registered name")


@dataclass
class ModuleState:
    """Cached state of an experts module.

    activation_key: the values that determine the activation.
    activation: the activation.
    bound: the weights and the problem of the last call.
    """

    activation_key: ActivationKey
    activation: ActivationSpec
    bound: "BoundWeights | None" = None


@dataclass(frozen=True)
class BoundWeights:
    """Weights of an experts module, and the arguments that describe them to the operator.

    key: dtype, top_k, and the state of the module. The object is valid while the key is unchanged.
    tensors: the module's tensors.
    weights: the tensors as ExpertWeights.
    fields: argument of the operator `experts`.
    layer: argument of the operator `experts`.
    """

    key: tuple[object, ...]
    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    weights: ExpertWeights = field(repr=False)
    fields: str
    layer: str


class Registration:
    """A registered pairing, which transformers calls as an experts implementation.

    The state of each module that uses it is cached while the module exists.
    """

    def __init__(self, pairing: Pairing, gradients: Gradients) -> None:
        self.pairing = pairing
        self.pairing_text = str(pairing)
        self.gradients = gradients
        self.layers: WeakKeyDictionary[torch.nn.Module, ModuleState] = WeakKeyDictionary()

    @property
    def kernels(self) -> MutableMapping[Any, FusedMoEModularKernel]:
        """The kernels created so far."""
        return self.pairing.kernels

    def __call__(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Run the forward of an experts module. Returns a new (T, H) tensor like hidden_states.

        module: the experts module.
        hidden_states: (T, H).
        top_k_index: (T, K). Ids past the last expert are skipped.
        top_k_weights: (T, K), any floating-point dtype.
        """
        call = (hidden_states, top_k_index, top_k_weights)
        names: tuple[str, ...]
        reason = ""
        if torch.compiler.is_compiling():
            names, reason = _find_tensor_names(make_constant_argument(module), read_flags(module))
        else:
            for what, tensor in zip(_ARGUMENT_NAMES, call, strict=True):
                check_strided(what, tensor)
            names = list_tensor_names(module)
        tensors = tuple([_get_attribute(module, (name,)) for name in names])
        if any(map(_is_not_tensor, tensors)):
            if not torch.compiler.is_compiling():
                read_tensors(module)  # raises
            reason = "an attribute that is not a tensor"
        if reason:
            return self._run_eagerly(reason, module, call)
        needs_backward = needs_gradients((hidden_states, top_k_weights, *tensors))
        if needs_backward and self.gradients == "refuse":
            raise unsupported_error(module, "a call that needs gradients", "torch.no_grad()")
        # `needs_backward` is not enough, because activation checkpointing first runs the forward
        # without gradients.
        prefers_grouped_mm = module.training and self.gradients == "fallback"
        if (prefers_grouped_mm or self.is_slower_on(hidden_states.device)) and _supports_grouped_mm(
            make_constant_argument(module)
        ):
            return run_grouped_mm(module, call)
        return self.forward(module, call, names, tensors, as_operator=needs_backward)

    def is_slower_on(self, device: torch.device) -> bool:
        """Return whether transformers' grouped_mm is faster on a device than the default parts."""
        return device.type == "cpu" and self.pairing.experts is None

    def _run_eagerly(
        self,
        reason: str,
        module: torch.nn.Module,
        call: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Break the graph and run the call eagerly, so that errors have their usual messages.

        reason: why the call cannot be traced, for the error that torch raises with fullgraph=True.
        """
        torch._dynamo.graph_break(msg=reason)
        call_without_dynamo = torch._dynamo.disable(self.__call__)  # type: ignore[no-untyped-call]
        result: torch.Tensor = call_without_dynamo(module, *call)
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

        names, tensors: names and values of the module's tensors.
        as_operator: call the operator, which supports gradients, even if the call is not traced.
        """
        x_TH, ids_TK, weights_TK = normalize_call(module, call, tensors[0].shape[0])
        if torch.compiler.is_compiling():
            return self._trace(module, (x_TH, ids_TK, weights_TK), tensors)
        bound = self._bind_weights(module, names, x_TH.dtype, ids_TK.shape[1])
        if as_operator:
            layer_arguments = bound.fields, bound.layer, self.pairing_text
            result: torch.Tensor = EXPERTS(
                x_TH, ids_TK, weights_TK, list(tensors), *layer_arguments
            )
            return result
        return self.pairing.run(bound.layer, x_TH, bound.weights, Routing(weights_TK, ids_TK))

    def _trace(
        self,
        module: torch.nn.Module,
        call: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tensors: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Run the call as one operator in a traced graph.

        The shapes of the traced tensors are used, because the module's parameters may be sharded.
        """
        x_TH, ids_TK, weights_TK = call
        shapes = tuple([tuple(tensor.shape) for tensor in tensors])
        dtypes = tuple([tensor.dtype for tensor in tensors])
        devices = tuple([tensor.device for tensor in tensors])
        top_k = index(ids_TK.shape[1])  # specializes a symbol of dynamic shapes
        metadata, flags = (shapes, dtypes, devices), read_flags(module)
        owner, experts = make_constant_argument(self), make_constant_argument(module)
        constants = _compute_constants(
            owner, experts, metadata, x_TH.dtype, x_TH.device, top_k, flags
        )
        if isinstance(constants, str):
            return self._run_eagerly(constants, module, call)
        fields, layer, numbers, functions = constants
        # These checks become guards of the graph, which is valid only for these values.
        for path, function in functions:
            value = _get_function(module, path)
            if value is None or (function is not None and id(value) != function):
                need = f"the {path} of the traced call"
                raise StateError("experts module", got=f"another {path}", need=need)
        for path, value in numbers:
            if _get_attribute(module, path) != value:
                need = f"the {path[-1]} of the traced call"
                raise StateError("experts module", got=f"another {path[-1]}", need=need)
        layer_arguments = fields, layer, _get_pairing_text(owner)
        return call_experts_operator(x_TH, ids_TK, weights_TK, list(tensors), *layer_arguments)

    def _bind_weights(
        self, module: torch.nn.Module, names: tuple[str, ...], dtype: torch.dtype, top_k: int
    ) -> BoundWeights:
        tensors = tuple([read_tensor(module, name) for name in names])
        state = self._get_module_state(module)
        key = (
            dtype,
            top_k,
            state.activation,
            read_flags(module),
            tuple(map(make_tensor_key, tensors)),
        )
        bound = state.bound
        if bound is None or bound.key != key or any(map(is_not, bound.tensors, tensors)):
            check_tensors(dict(zip(names, tensors, strict=True)))
            layout = read_layout(module, tensors)
            problem = make_problem_factory(module, tensors, layout)(
                dtype=dtype, top_k=top_k, activation=state.activation
            )
            weights = make_expert_weights(tensors, layout.fields)
            bound = state.bound = BoundWeights(
                key, tensors, weights, layout.fields, serialize_layer(problem)
            )
        return bound

    def activation(self, module: torch.nn.Module) -> ActivationSpec:
        """Return the activation between the module's projections. The result is cached."""
        return self._get_module_state(module).activation

    def _get_module_state(self, module: torch.nn.Module) -> ModuleState:
        activation_key = read_activation_key(module)
        state = self.layers.get(module)
        if state is None or state.activation_key != activation_key:
            state = self.layers[module] = ModuleState(activation_key, activation_of(module))
        return state

    def compute_constants(
        self,
        module: torch.nn.Module,
        tensors: tuple[torch.Tensor, ...],
        dtype: torch.dtype,
        top_k: int,
    ) -> tuple[str, str]:
        """Return the arguments `fields` and `layer` of the operator `experts`.

        tensors: the module's weights, or meta tensors with their shapes and dtypes.
        """
        layout = read_layout(module, tensors)
        problem = make_problem_factory(module, tensors, layout)(
            dtype=dtype, top_k=top_k, activation=self._get_module_state(module).activation
        )
        return layout.fields, serialize_layer(problem)


def normalize_call(
    module: torch.nn.Module, call: tuple[torch.Tensor, torch.Tensor, torch.Tensor], experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, ids and router weights as kernels require them.

    Ids past the last expert become -1, weights become float32, and all tensors are contiguous.

    experts: number of experts of the module.
    """
    x_TH, ids_TK, weights_TK = call
    check_tensors(dict(zip(_ARGUMENT_NAMES, call, strict=True)))
    # Releases without this attribute may also pass ids of experts on other ranks.
    if getattr(module, "_is_expert_parallel", True):
        ids_TK = ids_TK.masked_fill(ids_TK >= experts, -1)
    return x_TH.contiguous(), ids_TK.contiguous(), weights_TK.to(torch.float32).contiguous()


# --------------------------------------------------------------------- constants of a graph


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _find_tensor_names(
    module: torch.nn.Module | int, _flags: tuple[object, ...]
) -> tuple[tuple[str, ...], str]:
    """Return (names of the weights, ""), or ((), reason) if the module is not supported."""
    try:
        return list_tensor_names(resolve_object(module)), ""
    except InputError as error:
        return (), str(error)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _supports_grouped_mm(module: torch.nn.Module | int) -> bool:
    return supports_grouped_mm(resolve_object(module))


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _get_pairing_text(registration: Registration | int) -> str:
    return resolve_object(registration).pairing_text


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _compute_constants(
    registration: Registration | int,
    module: torch.nn.Module | int,
    metadata: tuple[tuple[Any, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    top_k: int,
    _flags: tuple[object, ...],
) -> tuple[object, ...] | str:
    """Return (fields, layer, numbers, functions), or the reason why a call cannot be traced.

    fields and layer are arguments of the operator. They are valid while the module has the
    attributes in numbers, (path, value), and functions, (name, id).

    metadata: shapes, dtypes and devices of the traced tensors.
    """
    registration, module = resolve_object(registration), resolve_object(module)
    shapes, dtypes, devices = metadata
    tensors = tuple(map(_make_meta_tensor, shapes, dtypes))
    try:
        for name, tensor_device in zip(list_tensor_names(module), devices, strict=True):
            if tensor_device != device:
                raise unsupported_error(
                    module, f"{name} on {tensor_device}", f"{name} on {device}, as x"
                )
        activation_key: ActivationKey = read_activation_key(module)
        layer_arguments = registration.compute_constants(module, tensors, dtype, top_k)
    except InputError as error:
        return str(error)
    paths = [path for path in ("_apply_gate", "act_fn") if hasattr(module, path)]
    functions = tuple([(path, _get_traceable_id(_get_function(module, path))) for path in paths])
    return (*layer_arguments, activation_key[2], functions)


def _make_meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _get_traceable_id(function: object) -> int | None:
    """Return the id of a function, or None for a built-in function.

    Dynamo of torch 2.11 does not trace `id` of a built-in function, but guards the attribute.
    """
    return None if isinstance(function, BuiltinFunctionType) else id(function)


def _get_function(module: torch.nn.Module, name: str) -> object:
    """Return an attribute, or the underlying function of a method.

    Methods cannot be compared by identity, because each access creates a new object.
    """
    attribute = _get_attribute(module, (name,))
    return attribute.__func__ if isinstance(attribute, MethodType) else attribute


def _get_attribute(module: torch.nn.Module, path: tuple[str, ...]) -> Any:
    value: Any = module
    for name in path:
        value = getattr(value, name, None)
    return value


def _is_not_tensor(value: object) -> bool:
    return not isinstance(value, torch.Tensor)
