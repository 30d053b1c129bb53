"""register: a pairing as an experts implementation of transformers."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from operator import index
from types import MethodType
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import ConfigurationError, InputError, StateError
from modular_kernel.integrations.transformers.activations import (
    Facts,
    activation_of,
    facts_of,
    unsupported,
)
from modular_kernel.integrations.transformers.gradients import gradients_are_needed, grouped_mm
from modular_kernel.integrations.transformers.modules import (
    flags_of,
    is_quantized,
    layout_of,
    names_of,
    problem_of,
    tensor_of,
    tensors_of,
)
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.operators.expert_fields import place, weights_from
from modular_kernel.operators.experts import EXPERTS
from modular_kernel.operators.pairing import Pairing, layer_text
from modular_kernel.spec.problem import ActivationSpec
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils.tensor_checks import check_strided, check_tensors

Gradients = Literal["fallback", "refuse"]
_NAMES = ("hidden_states", "top_k_index", "top_k_weights")
# Dynamo of torch 2.11 takes no module in a call whose result is a constant; 2.13 was tried. Before
# that the graph breaks at a call, and fullgraph=True says why.
_TRACES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
_BREAKS = f"experts are traced from torch 2.13 on, and this is {torch.__version__}"


def register(
    prepare_finalize: str | type[PrepareAndFinalize] = "MoEPrepareAndFinalizeNoEP",
    experts: str | type[PermuteExpertsUnpermute] | None = None,
    *,
    name: str = "modular_kernel",
    gradients: Gradients = "fallback",
) -> str:
    """Make a pairing known to transformers as the experts implementation `name`; returns `name`.

    experts: None means TritonExperts on a GPU and TorchExperts on a CPU. gradients: what a call
    does that needs them, because grad mode is on and an input or a weight requires grad, or while
    the module trains: "fallback" runs transformers' grouped_mm, "refuse" raises UnsupportedError.
    Several pairings can be registered under different names; registering a name again replaces
    its pairing.
    """
    if gradients not in get_args(Gradients):
        need = " or ".join(get_args(Gradients))
        raise ConfigurationError("gradients", got=repr(gradients), need=need)
    taken = ALL_EXPERTS_FUNCTIONS.get(name)
    if name == "eager" or not (taken is None or isinstance(taken, Registration)):
        need = "a name that transformers does not use itself"
        raise ConfigurationError("experts implementation", got=name, need=need)
    made = Registration(Pairing(prepare_finalize, experts), gradients)
    ExpertsInterface.register(name, made)
    FP8ExpertsInterface.register(name, made)
    return name


def registration(name: str = "modular_kernel") -> "Registration":
    """Return what runs under `name`: its pairing, and the kernels it has built so far."""
    found = ALL_EXPERTS_FUNCTIONS.get(name)
    if isinstance(found, Registration):
        return found
    raise ConfigurationError("experts implementation", got=name, need="a name given to register()")


@dataclass
class Layer:
    """What is remembered of an experts module.

    facts: of its activation. bound: its weights as they were last found, what they make of
    the tensors, and what both depend on.
    """

    facts: Facts
    activation: ActivationSpec
    bound: "Bound | None" = None


@dataclass(frozen=True)
class Bound:
    """Weights of a module, and the text of its layer, while `key` holds."""

    key: tuple[object, ...]
    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    weights: ExpertWeights = field(repr=False)
    layer: str


class Registration:
    """One pairing, and what is kept for the modules that run on it, as long as they live."""

    def __init__(self, pairing: Pairing, gradients: Gradients) -> None:
        self.pairing = pairing
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
        """Run the experts' forward, as transformers calls it.

        hidden_states: (T, H). top_k_index: (T, K), ids past the last expert are skipped.
        top_k_weights: (T, K), any float dtype. Returns a new (T, H) tensor like hidden_states.
        """
        call = (hidden_states, top_k_index, top_k_weights)
        names: tuple[str, ...]
        names, why = (), _BREAKS
        if not torch.compiler.is_compiling():
            for what, tensor in zip(_NAMES, call, strict=True):
                check_strided(what, tensor)
            names, why = names_of(module), ""
        elif _TRACES:
            names, why = _names(module, flags_of(module))
        tensors = tuple([_attribute(module, (name,)) for name in names])
        if any(map(_no_tensor, tensors)):
            if not torch.compiler.is_compiling():
                tensors_of(module)  # raises
            why = "an attribute that is no tensor"
        if why:
            return self._outside(why, module, call)
        needed = gradients_are_needed((hidden_states, top_k_weights, *tensors))
        if needed and self.gradients == "refuse":
            raise unsupported(module, "a call that needs gradients", "torch.no_grad()")
        # Checkpointing of a module that trains runs a forward twice, the first time without.
        if self.gradients == "fallback" and (needed or module.training):
            if not _quantized(module):
                return grouped_mm(module, call)
            return self.forward(module, call, names, tensors, as_operator=True)
        return self.forward(module, call, names, tensors)

    def _outside(
        self,
        why: str,
        module: torch.nn.Module,
        call: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Break the graph, and run the call as an eager one, which raises what there is to raise.

        With fullgraph=True torch raises an error of its own, which says why.
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
        """Run a call on the pairing: as an operator, which has gradients, where that is needed."""
        x_TH, ids_TK, weights_TK = as_given(module, call, tensors[0].shape[0])
        if as_operator or torch.compiler.is_compiling():
            return self._traced(module, (x_TH, ids_TK, weights_TK), tensors)
        bound = self._bound(module, names, x_TH.dtype, ids_TK.shape[1])
        return self.pairing.run(bound.layer, x_TH, bound.weights, Routing(weights_TK, ids_TK))

    def _traced(
        self,
        module: torch.nn.Module,
        call: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tensors: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Put the call into a graph as one operator.

        Shapes are those that are traced: a module whose parameters are sharded has others.
        """
        x_TH, ids_TK, weights_TK = call
        shapes = tuple([tuple(tensor.shape) for tensor in tensors])
        dtypes = tuple([tensor.dtype for tensor in tensors])
        devices = tuple([tensor.device for tensor in tensors])
        top_k = index(ids_TK.shape[1])  # one number, where dynamic shapes have a symbol
        like, own = (shapes, dtypes, devices), flags_of(module)
        found = _constants(self, module, like, x_TH.dtype, x_TH.device, top_k, own)
        if isinstance(found, str):
            return self._outside(found, module, call)
        fields, layer, numbers, functions = found
        # Guards, as those below: a graph holds for what it was traced with.
        for way, function in functions:
            if id(_function(module, way)) != function:
                raise StateError("experts module", got=f"another {way}", need="as traced")
        for way, value in numbers:
            if _attribute(module, way) != value:
                raise StateError("experts module", got=f"another {way[-1]}", need="as traced")
        traced: torch.Tensor = EXPERTS(
            x_TH, ids_TK, weights_TK, list(tensors), fields, layer, _text(self)
        )
        return traced

    def _bound(
        self, module: torch.nn.Module, names: tuple[str, ...], dtype: torch.dtype, top_k: int
    ) -> Bound:
        tensors = tuple([tensor_of(module, name) for name in names])
        layer = self._layer(module)
        key = (dtype, top_k, layer.activation, flags_of(module), tuple(map(place, tensors)))
        bound = layer.bound
        if bound is None or bound.key != key or any(map(_unlike, bound.tensors, tensors)):
            check_tensors(dict(zip(names, tensors, strict=True)))
            layout = layout_of(module, tensors)
            problem = problem_of(module, tensors, layout)(
                dtype=dtype, top_k=top_k, activation=layer.activation
            )
            weights = weights_from(tensors, layout.fields)
            bound = layer.bound = Bound(key, tensors, weights, layer_text(problem))
        return bound

    def activation(self, module: torch.nn.Module) -> ActivationSpec:
        """Return what the module computes between its projections, found once."""
        return self._layer(module).activation

    def _layer(self, module: torch.nn.Module) -> Layer:
        facts = facts_of(module)
        layer = self.layers.get(module)
        if layer is None or layer.facts != facts:
            layer = self.layers[module] = Layer(facts, activation_of(module))
        return layer

    def constants(
        self,
        module: torch.nn.Module,
        tensors: tuple[torch.Tensor, ...],
        dtype: torch.dtype,
        top_k: int,
    ) -> tuple[str, str]:
        """Return fields and layer of the operator, for tensors like these."""
        layout = layout_of(module, tensors)
        problem = problem_of(module, tensors, layout)(
            dtype=dtype, top_k=top_k, activation=self._layer(module).activation
        )
        return layout.fields, layer_text(problem)


def as_given(
    module: torch.nn.Module, call: tuple[torch.Tensor, torch.Tensor, torch.Tensor], experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, ids and weights as kernels take them."""
    x_TH, ids_TK, weights_TK = call
    check_tensors(dict(zip(_NAMES, call, strict=True)))
    # Releases without the attribute may pass the ids of other ranks' experts too.
    if getattr(module, "_is_expert_parallel", True):
        ids_TK = ids_TK.masked_fill(ids_TK >= experts, -1)
    return x_TH.contiguous(), ids_TK.contiguous(), weights_TK.to(torch.float32).contiguous()


# ------------------------------------------------------------------ what a graph takes as it is


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _names(module: torch.nn.Module, _flags: tuple[object, ...]) -> tuple[tuple[str, ...], str]:
    """Return the names of the weights, or none and why they are refused."""
    try:
        return names_of(module), ""
    except InputError as error:
        return (), str(error)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _quantized(module: torch.nn.Module) -> bool:
    return is_quantized(module)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _text(registration: Registration) -> str:
    return str(registration.pairing)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _constants(
    registration: Registration,
    module: torch.nn.Module,
    like: tuple[tuple[Any, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    top_k: int,
    _flags: tuple[object, ...],
) -> tuple[object, ...] | str:
    """Return fields, layer, and what they depend on: numbers and functions; or why not."""
    shapes, dtypes, devices = like
    tensors = tuple(map(_meta, shapes, dtypes))
    try:
        for name, where in zip(names_of(module), devices, strict=True):
            if where != device:
                raise unsupported(module, f"{name} on {where}", f"on {device}, where x is")
        facts: Facts = facts_of(module)
        texts = registration.constants(module, tensors, dtype, top_k)
    except InputError as error:
        return str(error)
    ways = [way for way in ("_apply_gate", "act_fn") if hasattr(module, way)]
    functions = tuple([(way, id(_function(module, way))) for way in ways])
    return (*texts, facts[2], functions)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _function(module: torch.nn.Module, name: str) -> object:
    """Return an attribute, a method as its function: the method is another object each time."""
    found = _attribute(module, (name,))
    return found.__func__ if isinstance(found, MethodType) else found


def _attribute(module: torch.nn.Module, way: tuple[str, ...]) -> Any:
    found: Any = module
    for name in way:
        found = getattr(found, name, None)
    return found


def _no_tensor(value: object) -> bool:
    return not isinstance(value, torch.Tensor)


def _unlike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is not other
