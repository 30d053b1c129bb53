"""Support for vLLM 0.33: its oracles, and experts classes with its interface.

For a layer that our parts support, an oracle returns one of our experts classes, together with the
plain backend: a backend of vLLM that keeps weights in the layout of the checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import torch
import vllm.envs as envs
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    FusedMoEKernel,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.platforms import current_platform

from modular_kernel.checkpoints.gptq_awq import from_awq
from modular_kernel.errors import ModularKernelError, UnsupportedError
from modular_kernel.integrations.vllm import layers
from modular_kernel.integrations.vllm.calls import BatchedCalls, StandardCalls
from modular_kernel.integrations.vllm.hooks import ORIGINAL_ATTRIBUTE, log_once
from modular_kernel.integrations.vllm.prepared_copy import PreparedCopy
from modular_kernel.integrations.vllm.weights import convert_biases, convert_scales
from modular_kernel.replay.recording import can_keep_buffers
from modular_kernel.settings import is_vllm_preparation_enabled
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import BatchedTokens, ExpertWeights, Routing

Arguments = dict[str, Any]
_PROCESS_WEIGHTS_METHOD = "process_weights_after_loading"
_ORACLE_PACKAGE = "vllm.model_executor.layers.fused_moe.oracle"

# Attributes that vLLM's classes must have: CONFIG_FIELDS of FusedMoEConfig, PARALLEL_FIELDS of its
# moe_parallel_config, and QUANT_FIELDS of FusedMoEQuantConfig. Tests check them.
CONFIG_FIELDS = (
    "activation",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "experts_per_token",
    "has_bias",
    "hidden_dim",
    "in_dtype",
    "intermediate_size_per_partition",
    "max_num_tokens",
    "moe_backend",
    "moe_parallel_config",
    "num_experts",
    "num_local_experts",
    "swiglu_alpha",
    "swiglu_beta",
    "swiglu_limit",
    "use_deepep_ll_kernels",
)
# Attributes of moe_parallel_config that select an exchange which our experts do not support.
REFUSED_EXCHANGES = (
    "use_deepep_v2_kernels",
    "use_fi_nvl_one_sided_kernels",
    "use_fi_nvl_two_sided_kernels",
    "use_moonep_kernels",
    "use_mori_kernels",
    "use_passthrough_all2all",
)
PARALLEL_FIELDS = (
    "enable_eplb",
    "use_batched_activation_format",
    "use_ep",
    *REFUSED_EXCHANGES,
)
QUANT_FIELDS = (
    "a1_scale",
    "a2_scale",
    "block_shape",
    "g1_alphas",
    "g2_alphas",
    "gemm1_alpha",
    "gemm1_beta",
    "gemm1_clamp_limit",
    "w1_bias",
    "w1_scale",
    "w1_zp",
    "w2_bias",
    "w2_scale",
    "w2_zp",
)


# ------------------------------------------------------------------------------------ problems


def _describe_machine() -> Machine | None:
    """Return the machine that vLLM runs on, or None if it is neither a CUDA GPU nor a CPU."""
    if current_platform.is_cuda():
        return layers.describe_machine("cuda")
    return layers.describe_machine("cpu") if current_platform.is_cpu() else None


def make_layer_problem(config: Any, scheme: str, quant_config: Any = None) -> Problem:
    """Return the Problem of a layer.

    config: the layer's FusedMoEConfig.
    scheme: quantization scheme.
    quant_config: the layer's FusedMoEQuantConfig; None if it does not exist yet, because the
        experts class is being selected. As in vLLM, its activation options take precedence. It also
        determines whether the layer has biases, because loaded biases may differ from the biases
        that the model declares.

    Raises ConfigurationError or UnsupportedError for a layer that a Problem cannot describe.
    """
    quant_field_by_option = {
        "limit": "gemm1_clamp_limit",
        "alpha": "gemm1_alpha",
        "beta": "gemm1_beta",
    }
    options = {}
    for option, name in quant_field_by_option.items():
        value = getattr(quant_config, name, None)
        options[option] = getattr(config, f"swiglu_{option}") if value is None else value
    activation = layers.make_activation(
        config.activation.value,
        **options,
        situ_beta=getattr(config, "activation_situ_beta", None),  # not in 0.26
        situ_linear_beta=getattr(config, "activation_situ_linear_beta", None),
    )
    bias = config.has_bias
    if quant_config is not None:
        bias = quant_config.w1_bias is not None or quant_config.w2_bias is not None
    use_ep = config.moe_parallel_config.use_ep
    return Problem(
        tokens=config.max_num_tokens,
        hidden=config.hidden_dim,
        intermediate=config.intermediate_size_per_partition,
        experts=config.num_experts,
        top_k=config.experts_per_token,
        dtype=config.in_dtype,
        quant=scheme,
        activation=activation,
        bias=bias,
        local_experts=config.num_local_experts if use_ep else None,
        expert_map=use_ep,
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
    )


# ------------------------------------------------------------------------------------- experts


def make_experts_class(base: type, scheme: str, part: str) -> Any:
    """Return a subclass of StandardExperts or BatchedExperts for one layer."""
    _prepare_after_loading()
    attributes: dict[str, Any] = {"scheme": scheme, "part": part, "__module__": base.__module__}
    attributes |= {"copies": {}, "prepared_copy": PreparedCopy()}
    return type(f"ModularKernel{part}", (base,), attributes)


def _find_weight(layer: Any, name: str) -> torch.Tensor | None:
    """Return the parameter with the processed weights "w13" or "w2" of a layer, or None."""
    for suffix in ("weight", "weight_packed", "qweight"):
        tensor = getattr(layer, f"{name}_{suffix}", None)
        if isinstance(tensor, torch.Tensor):
            return tensor
    return None


def _prepare_after_loading() -> None:
    """Make all quantization methods of MoE layers prepare the weights of our experts.

    `process_weights_after_loading` of the methods is wrapped, because vLLM calls it after each
    load. Only some of the methods call a method of the experts.
    """
    classes = [FusedMoEMethodBase]
    for cls in classes:
        classes += cls.__subclasses__()
        function = vars(cls).get(_PROCESS_WEIGHTS_METHOD)
        if function is not None and not hasattr(function, ORIGINAL_ATTRIBUTE):
            setattr(cls, _PROCESS_WEIGHTS_METHOD, _add_preparation(function))


def _add_preparation(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        function(self, layer)
        experts = getattr(getattr(self, "moe_kernel", None), "fused_experts", None)
        if isinstance(experts, StandardExperts):
            try:
                experts.prepare_weights(layer)
            except ModularKernelError as error:
                if type(experts).prepared_copy.tensors:
                    raise  # CUDA graphs read the copy, which still has the values of the last load
                log_once(f"modular_kernel does not prepare 4-bit weights: {error}")

    setattr(process_weights_after_loading, ORIGINAL_ATTRIBUTE, function)
    return process_weights_after_loading


class StandardExperts(FusedMoEExpertsModular):  # type: ignore[misc]
    """Experts of one layer, from tokens and their routing to the layer's output.

    scheme: quantization scheme, which `make_experts_class` sets.
    part: name of the experts part, which `make_experts_class` sets.
    copies: converted scales and biases that do not share memory with vLLM's tensors, by name. They
        are attributes of the class, because vLLM makes new experts when it reloads the layer.
    prepared_copy: the copy of 4-bit weights in a layout that kernels read faster. It is also an
        attribute of the class.
    refused_exchanges: attributes of FusedMoEParallelConfig that must not be True.
    """

    scheme = "none"
    part = ""
    copies: dict[str, torch.Tensor]
    prepared_copy: PreparedCopy
    refused_exchanges: tuple[str, ...] = REFUSED_EXCHANGES

    def __init__(self, moe_config: Any, quant_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(moe_config, quant_config, *args, **kwargs)
        self._sources: tuple[Any, ...] = ()
        self._weights: ExpertWeights | None = None
        # All sizes are final, because vLLM creates the experts after it has loaded the weights.
        scheme = layers.set_block_shape(self.scheme, quant_config.block_shape)
        problem = make_layer_problem(moe_config, scheme, quant_config)
        self._calls = self._make_calls(problem)
        sources = {
            "w1_scale": quant_config.w1_scale,
            "w2_scale": quant_config.w2_scale,
            "w1_zero_point": quant_config.w1_zp,
            "w2_zero_point": quant_config.w2_zp,
            "a1_scale": quant_config.a1_scale,
            "a2_scale": quant_config.a2_scale,
            "w1_global_scale": quant_config.g1_alphas,
            "w2_global_scale": quant_config.g2_alphas,
        }
        copies = type(self).copies
        biases = quant_config.w1_bias, quant_config.w2_bias
        self._converted = convert_scales(problem, sources, copies)
        self._converted |= convert_biases(problem, *biases, copies)

    @staticmethod
    def activation_format() -> Any:
        """Return the layout of the rows that `prepare` passes on."""
        return FusedMoEActivationFormat.Standard

    # The following methods return True, because `Oracle.handle` checks the layer before it returns
    # the class.

    @staticmethod
    def _supports_current_device() -> bool:
        return _describe_machine() is not None

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @classmethod
    def _supports_parallel_config(cls, moe_parallel_config: Any) -> bool:
        """Refuse EPLB, and exchanges that quantize rows before they send them.

        EPLB is refused because it writes new scales in place, but our converted scales are copies.
        """
        refused = ("enable_eplb", *cls.refused_exchanges)
        return not any(getattr(moe_parallel_config, name) for name in refused)

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True  # the problem from `make_layer_problem` requires batch invariance

    @property
    def expects_unquantized_inputs(self) -> bool:
        """True, because the experts quantize rows in their own kernels."""
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Return a no-op, because the experts apply the router weights and sum over K."""
        return TopKWeightAndReduceNoOP()

    def _make_calls(self, problem: Problem) -> Any:
        machine = _describe_machine()
        assert machine is not None  # otherwise `Oracle.handle` would not have returned the class
        return StandardCalls(problem, self.part, machine)

    def _get_weights(
        self, w1: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor | None
    ) -> ExpertWeights:
        """Return the layer's weights, as the same object for the same tensors and values."""
        sources, copy = (w1, w2, expert_map), type(self).prepared_copy
        is_known = self._weights is not None and all(
            new is old for new, old in zip(sources, self._sources, strict=True)
        )
        if is_known and not copy.is_outdated():
            assert self._weights is not None
            return self._weights
        weights = self._make_weights(*sources)
        # Update the copy if vLLM has written to known weights, or if this is the first call after a
        # load, which may have written to them. Other tensors only have another address.
        if copy.tensors and (is_known or self._weights is None) and can_keep_buffers(w1.device):
            self._calls.prepare(weights, copy)
        self._weights, self._sources = copy.attach(weights), sources
        return self._weights

    def _make_weights(
        self, w1: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor | None
    ) -> ExpertWeights:
        return ExpertWeights(w1.detach(), w2.detach(), expert_map=expert_map, **self._converted)

    def prepare_weights(self, layer: Any) -> None:
        """Write the prepared copy of the layer's weights, which vLLM has just loaded.

        The copy is made now, so that vLLM includes it when it measures memory for the KV cache.
        """
        w1, w2 = (_find_weight(layer, name) for name in ("w13", "w2"))
        has_copy = bool(type(self).prepared_copy.tensors)
        if w1 is None or w2 is None or not (has_copy or is_vllm_preparation_enabled()):
            return
        weights = self._make_weights(w1, w2, getattr(layer, "expert_map", None))
        self._calls.prepare(weights, type(self).prepared_copy)
        self._weights = None

    def _workspace_shape(self, nbytes: int) -> tuple[int, ...]:
        return (-(-nbytes // self.workspace_dtype(self.moe_config.in_dtype).itemsize),)

    def workspace_shapes(  # noqa: PLR0913 (vLLM's)
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of two workspaces and of the output.

        The first workspace is empty, because vLLM uses its memory for the output.
        """
        nbytes = self._calls.workspace_bytes(M, topk)
        return (0,), self._workspace_shape(nbytes), (M, K)

    def apply(  # noqa: PLR0913 (vLLM's)
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the layer's output. The base class describes the arguments."""
        if apply_router_weight_on_input:  # `prepare` has already multiplied the tokens by weights
            topk_weights = torch.ones_like(topk_weights)
        self._calls(
            hidden_states,
            self._get_weights(w1, w2, expert_map),
            Routing(topk_weights.float().contiguous(), topk_ids.contiguous()),
            memory=workspace2.view(torch.uint8),
            out=output,
        )


class BatchedExperts(StandardExperts):
    """Experts of one layer, for rows grouped by expert. `finalize` weights and sums the output."""

    @staticmethod
    def activation_format() -> Any:
        """Return the layout of the rows that `prepare` passes on."""
        return FusedMoEActivationFormat.BatchedExperts

    @property
    def expects_unquantized_inputs(self) -> bool:
        """False, because `prepare` quantizes rows before it sends them."""
        return False

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Return the delegate, so that `finalize` applies the router weights and sums over K."""
        return TopKWeightAndReduceDelegate()

    def _make_calls(self, problem: Problem) -> Any:
        return BatchedCalls(layers.make_local_problem(problem), self.part)

    def workspace_shapes(  # noqa: PLR0913 (vLLM's)
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of two workspaces and of the output.

        M: number of rows of each expert.
        """
        nbytes = self._calls.workspace_bytes(local_num_experts, M)
        return (0,), self._workspace_shape(nbytes), (local_num_experts, M, K)

    def apply(  # noqa: PLR0913 (vLLM's)
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the unweighted rows of the experts. The base class describes the arguments."""
        if a1q_scale is not None and a1q_scale.shape[1] == 1:  # (e, 1, 1): one scale per expert
            a1q_scale = a1q_scale.expand(-1, hidden_states.shape[1], -1)
        self._calls(
            BatchedTokens(hidden_states, expert_tokens_meta.expert_num_tokens, a1q_scale),
            self._get_weights(w1, w2, None),
            memory=workspace2.view(torch.uint8),
            out=output,
        )


# ------------------------------------------------------------------------------------- oracles


def _select_scheme_by_keys(arguments: Arguments) -> str:
    keys = arguments.get("weight_key"), arguments.get("activation_key")
    return layers.select_scheme(*map(layers.make_operand, keys))


def select_group_scheme(arguments: Arguments) -> str:
    """Return the scheme of int4 or int8 weights with group scales, from a quantization config."""
    quant_config, zero_points = arguments["quant_config"], arguments["may_have_zp"]
    act_order = False
    if _is_instance_of(quant_config, "QuantizationArgs"):  # compressed-tensors
        bits, group, act_order = (
            quant_config.num_bits,
            quant_config.group_size,
            quant_config.actorder == "group",
        )
    elif _is_instance_of(quant_config, "AutoGPTQConfig") or _is_instance_of(
        quant_config, "AutoAWQConfig"
    ):
        bits, group = quant_config.weight_bits, quant_config.group_size
        act_order = getattr(quant_config, "desc_act", False)
    elif _is_instance_of(quant_config, "MoeWNA16Config"):
        config, bits, group = arguments["config"], quant_config.weight_bits, quant_config.group_size
        sizes = config.hidden_dim, config.intermediate_size_per_partition
        while group > 1 and any(size % group for size in sizes):
            group //= 2  # as in vLLM's method, which then repeats the scales
    else:
        got, need = type(quant_config).__name__, "GPTQ, AWQ or compressed-tensors"
        raise UnsupportedError("quant_config", got=got, need=need)
    group = -1 if group is None else group
    return layers.select_weight_only_scheme(
        bits, group, zero_points=zero_points, act_order=act_order
    )


def _is_instance_of(value: object, name: str) -> bool:
    """Return whether a value is an instance of a class with this name, without importing it."""
    return any(cls.__name__ == name for cls in type(value).__mro__)


def _select_mxfp4_scheme(arguments: Arguments) -> str:
    """Return mxfp4_w4a16. Raises UnsupportedError if quantized activations are requested."""
    resolve = import_module(
        f"{_ORACLE_PACKAGE}.mxfp4"
    )._resolve_activation_key  # users can override it
    activation = resolve(arguments.get("activation_key"))
    if activation is not None:
        need = "16-bit activations"
        raise UnsupportedError("activations", got=layers.make_operand(activation), need=need)
    return "mxfp4_w4a16"


def _select_nvfp4_scheme(arguments: Arguments) -> str:
    """Return nvfp4_w4a16 on GPUs before sm_100, which have no MMA for 4-bit activations.

    On sm_100 and newer, return the scheme that the keys of weights and activations describe. Raises
    UnsupportedError if DeepEP sends 4-bit rows.
    """
    if envs.VLLM_DEEPEPLL_NVFP4_DISPATCH and arguments["config"].use_deepep_ll_kernels:
        raise UnsupportedError("VLLM_DEEPEPLL_NVFP4_DISPATCH", got=1, need="0, for 16-bit rows")
    weight, activation = (
        layers.make_operand(arguments[f"{x}_key"]) for x in ("weight", "activation")
    )
    machine = _describe_machine()
    if machine is not None and machine.arch is not None and machine.arch >= (10, 0):
        return layers.select_scheme(weight, activation)
    nvfp4_rows = layers.Operand("nvfp4", (1, 16), static=False)
    return layers.select_scheme(weight, None if activation == nvfp4_rows else activation)


def make_group_kernel(arguments: Arguments) -> Any | None:
    """Return the kernel of a layer with our experts, or None for vLLM's experts.

    vLLM's function does not support our experts.
    """
    experts_cls, config = arguments["experts_cls"], arguments["moe_config"]
    if not issubclass(experts_cls, StandardExperts):
        return None
    quant_config = arguments["moe_quant_config"]
    prepare_finalize = maybe_make_prepare_finalize(
        moe=config,
        quant_config=quant_config,
        routing_tables=arguments.get("routing_tables"),
        allow_new_interface=True,
        use_monolithic=False,
    )
    options = {}
    if prepare_finalize.activation_format == FusedMoEActivationFormat.BatchedExperts:
        options["max_num_tokens"] = prepare_finalize.max_num_tokens_per_rank()
        options["num_dispatchers"] = prepare_finalize.num_dispatchers()
    return FusedMoEKernel(prepare_finalize, experts_cls(config, quant_config, **options))


def _convert_awq(arguments: Arguments) -> tuple[Any, ...] | None:
    """Convert AWQ's tensors to the layout of the plain backend.

    Returns None for other formats and other backends, because vLLM converts their tensors.
    """
    quant_config, is_plain_backend = (
        arguments["quant_config"],
        arguments["backend"].name == "TRITON",
    )
    if not is_plain_backend or not _is_instance_of(quant_config, "AutoAWQConfig"):
        return None
    converted = [
        from_awq(
            arguments[name].data,
            arguments[f"{name}_scale"].data,
            arguments[f"{name}_qzeros"].data if quant_config.zero_point else None,
            group=quant_config.group_size,
        )
        for name in ("w13", "w2")
    ]
    pairs_by_field = zip(*((w.w, w.scale, w.zero_point) for w in converted), strict=True)
    tensors = [tensor for pair in pairs_by_field for tensor in pair]
    return (*tensors, None, None, arguments.get("w13_bias"), arguments.get("w2_bias"))


def _keep_nvfp4(arguments: Arguments) -> tuple[Any, ...] | None:
    """Return the tensors of a layer with our experts unchanged. Returns None for vLLM's experts."""
    experts_cls = getattr(arguments["layer"].quant_method, "experts_cls", None)
    if experts_cls is None or not issubclass(experts_cls, StandardExperts):
        return None
    names = [f"{x}{suffix}" for x in ("w13", "w2") for suffix in ("", "_scale", "_scale_2")]
    names.insert(3, "a13_scale")
    return tuple(arguments[name] for name in (*names, "a2_scale"))


@dataclass(frozen=True)
class Oracle:
    """An implementation of `modular_kernel.integrations.vllm.hooks.Oracle`.

    name: name of the module in vLLM's folder `oracle`.
    select_functions: names of functions that select a backend and an experts class for a layer.
    config: name of the parameter for the layer's FusedMoEConfig in select_functions.
    backends: name of the enum of backends.
    plain: name of the plain backend, whose weights keep the layout of the checkpoint.
    requested: values of --moe-backend for which our parts are tried. With any other value, the user
        has chosen one of vLLM's backends.
    scheme: function of the arguments of a select function that returns the quantization scheme, or
        raises UnsupportedError.
    handlers: replacements of later_functions, by name. They return None for layers with vLLM's own
        experts.
    callers: (module, class) pairs of quantization methods whose constructors call a select
        function, if `scheme` reads their arguments.
    used: other names that the module must have.
    bases: base classes of standard experts and of batched experts.
    """

    name: str
    select_functions: tuple[str, ...]
    config: str
    backends: str
    plain: str = "TRITON"
    requested: tuple[str, ...] = ("auto", "triton")
    scheme: Callable[[Arguments], str] = _select_scheme_by_keys
    handlers: Mapping[str, Callable[[Arguments], Any | None]] = field(default_factory=dict)
    callers: tuple[tuple[str, str], ...] = ()
    used: tuple[str, ...] = ()
    bases: tuple[type, type] = (StandardExperts, BatchedExperts)

    @property
    def module(self) -> str:
        """Full name of the module."""
        return f"{_ORACLE_PACKAGE}.{self.name}"

    @property
    def later_functions(self) -> tuple[str, ...]:
        """Names of functions that vLLM calls after it has selected the class of a layer."""
        return tuple(self.handlers)

    def find_missing(self, module: ModuleType) -> Sequence[str]:
        """Return the required names that this version of vLLM does not have."""
        missing = [name for name in self.used if not hasattr(module, name)]
        if not hasattr(getattr(module, self.backends, None), self.plain):
            missing.append(f"{self.backends}.{self.plain}")
        missing += [
            f"parameter {self.config} of {name}"
            for name in self.select_functions
            if hasattr(module, name)
            and self.config not in signature(getattr(module, name)).parameters
        ]
        return missing

    def handle(self, function: str, arguments: Arguments) -> Any | None:
        """Return the result of a function, or None if the layer runs on vLLM's experts.

        The result of a select function is (plain backend, our experts class). A select function
        raises ModularKernelError if our parts do not support the layer.
        """
        if function in self.handlers:
            return self.handlers[function](arguments)
        config = arguments[self.config]
        machine = _describe_machine()
        names = () if machine is None else layers.list_candidate_parts(machine)
        if machine is None or not names or config.moe_backend not in self.requested:
            return None
        scheme = self.scheme(arguments)
        problem = make_layer_problem(config, scheme)
        batched = config.moe_parallel_config.use_batched_activation_format
        part = layers.select_part(problem, names, machine, batched=batched)
        experts = make_experts_class(self.bases[batched], scheme, part)
        keys = arguments.get("weight_key"), arguments.get("activation_key")
        format = experts.activation_format()
        supported, reason = experts.is_supported_config(experts, config, *keys, format)
        if not supported:
            raise UnsupportedError("layer", got=reason, need="options that our experts support")
        log_once(f"modular_kernel runs {problem} with {part}")
        backends = getattr(import_module(self.module), self.backends)
        return backends[self.plain], experts


ORACLES = {
    oracle.name: oracle
    for oracle in (
        Oracle(
            "unquantized",
            ("select_unquantized_moe_backend",),
            "moe_config",
            "UnquantizedMoeBackend",
            # humming and marlin are kernels for the quantized layers of the same model.
            requested=("auto", "triton", "humming", "marlin"),
        ),
        Oracle("fp8", ("select_fp8_moe_backend",), "config", "Fp8MoeBackend"),
        Oracle("int8", ("select_int8_moe_backend",), "config", "Int8MoeBackend"),
        Oracle(
            "int_wna16",
            ("select_wna16_moe_backend",),
            "config",
            "WNA16MoEBackend",
            scheme=select_group_scheme,
            handlers={
                "make_wna16_moe_kernel": make_group_kernel,
                "convert_to_wna16_moe_kernel_format": _convert_awq,
            },
        ),
        Oracle(
            "mxfp4",
            ("select_mxfp4_moe_backend", "select_deepseek_v4_mxfp4_moe_backend"),
            "config",
            "Mxfp4MoeBackend",
            "EMULATION",
            ("auto",),
            _select_mxfp4_scheme,
            used=("_resolve_activation_key",),
        ),
        Oracle(
            "nvfp4",
            ("select_nvfp4_moe_backend",),
            "config",
            "NvFp4MoeBackend",
            "EMULATION",
            ("auto",),
            _select_nvfp4_scheme,
            {"convert_to_nvfp4_moe_kernel_format": _keep_nvfp4},
        ),
    )
}
