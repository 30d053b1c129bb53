"""The experts classes of vLLM 0.33, which are called through its FusedMoEKernel."""

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import modular_kernel as vllm_modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    MoEPrepareAndFinalizeNoDPEPModular,
)
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.worker.workspace import init_workspace_manager

from modular_kernel.errors import ModularKernelError
from modular_kernel.integrations.engine import (
    Description,
    EngineCall,
    EngineCase,
    ExpertsClass,
    NotJudgedError,
    RefusedError,
    UnavailableError,
)
from modular_kernel.integrations.engine_process import find_missing_requirement
from modular_kernel.integrations.vllm.classes import ACTIVATIONS, make_activation_spec
from modular_kernel.integrations.vllm.reproducer import Source, write_reproducer
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_STANDARD = vllm_modular_kernel.FusedMoEActivationFormat.Standard
# Largest number of rows of an expert in calls with rows grouped by expert. It is smaller on a CPU,
# where the interpreter visits every block of rows.
_MAX_ROWS = {"cpu": 32, "cuda": 256}

# Quantization scheme -> names of vLLM's keys of weights and of activations.
KEYS: Mapping[str, tuple[str | None, str | None]] = {
    "none": (None, None),
    "fp8_w8a8_tensor": ("kFp8StaticTensorSym", "kFp8DynamicTensorSym"),
    "fp8_w8a8_tensor:static=true": ("kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    "fp8_w8a8_channel": ("kFp8StaticChannelSym", "kFp8DynamicTokenSym"),
    "fp8_w8a8_block": ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
    "int8_w8a8_channel": ("kInt8StaticChannelSym", "kInt8DynamicTokenSym"),
    "int8_w8a16_group": ("kInt8Static", None),
    "int4_w4a16_group": ("kInt4Static", None),
    "int4_w4a16_group:group=32": ("kInt4Static32", None),
    "mxfp4_w4a16": ("kMxfp4Static", None),
    "nvfp4_w4a16": ("kNvfp4Static", None),
    "nvfp4_w4a4": ("kNvfp4Static", "kNvfp4Dynamic"),
}
# Classes whose predicates raise NotImplementedError, because vLLM selects them in another way or
# not at all -> the schemes that their code computes.
WITHOUT_PREDICATES: Mapping[str, tuple[str, ...]] = {
    "NaiveBatchedExperts": (
        "none",
        "fp8_w8a8_tensor",
        "fp8_w8a8_tensor:static=true",
        "fp8_w8a8_channel",
        "fp8_w8a8_block",
    ),
}
# These classes, and those derived from them, read weights in the layout of the checkpoint.
_CHECKPOINT_LAYOUT_CLASSES = ("TritonExperts", "BatchedTritonExperts", "NaiveBatchedExperts")
_FP8_DEVICE = DeviceCapability(9, 0)
_CPU_NOTE = (
    "vLLM's Triton kernels are interpreted, and its compiled operators are computed in torch; its "
    "predicates answer as on sm_90"
)


# -------------------------------------------------------------------------------- the platform


@contextmanager
def claim_gpu() -> Iterator[None]:
    """On a CPU, make vLLM's platform predicates report an H100 inside the block."""
    if not current_platform.is_cpu():
        yield
        return
    capability = tuple(_FP8_DEVICE)

    def has_capability(needed: Any, *_: object, **__: object) -> bool:
        return capability >= _to_major_minor(needed)

    replacements: dict[str, Callable[..., object]] = {
        "is_cuda": lambda: True,
        "is_cuda_alike": lambda: True,
        "is_cpu": lambda: False,
        "supports_fp8": lambda: True,
        "get_device_capability": lambda *_, **__: _FP8_DEVICE,
        "has_device_capability": has_capability,
        "is_device_capability": lambda needed, *_, **__: capability == _to_major_minor(needed),
        "is_device_capability_family": lambda family, *_, **__: capability[0] == family // 10,
    }
    for name, replacement in replacements.items():
        setattr(current_platform, name, replacement)
    try:
        yield
    finally:
        for name in replacements:
            delattr(current_platform, name)


def _to_major_minor(capability: Any) -> tuple[int, int]:
    if isinstance(capability, int):
        return divmod(capability, 10)
    major, minor = capability
    return major, minor


class CpuWorkspaces:
    """Replacement for vLLM's workspace manager, which requires an accelerator."""

    def get_simultaneous(self, *specs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        """Return uninitialized CPU tensors with these shapes and dtypes."""
        return [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in specs]


def prepare_program() -> None:
    """Replace vLLM's workspace manager with one that allocates CPU tensors."""
    vllm_modular_kernel.current_workspace_manager = CpuWorkspaces


# --------------------------------------------------------------------------------- the classes


def find_classes() -> tuple[dict[str, type], list[str]]:
    """Return the experts classes by name, and the names of modules that cannot be imported."""
    classes, broken_modules = dict[str, type](), list[str]()
    for name in _list_modules("experts"):
        try:
            module = import_module(name)
        except Exception:  # noqa: BLE001 (a module of another platform)
            broken_modules.append(name.rpartition(".")[2])
            continue
        for cls in vars(module).values():
            is_experts = inspect.isclass(cls) and issubclass(
                cls, vllm_modular_kernel.FusedMoEExperts
            )
            if is_experts and cls.__module__ == name:
                classes[cls.__name__] = cls
    return classes, broken_modules


def _list_modules(folder: str) -> list[str]:
    package = import_module(f"{_FUSED_MOE}.{folder}")
    return [info.name for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]


def find_backend(oracle: ModuleType, cls: type, plain: str) -> Any:
    """Return the backend for which an oracle selects `cls`, or a class that falls back to `cls`.

    For other classes that read weights in the layout of the checkpoint, return the plain backend,
    which keeps this layout. Raises NotJudgedError for classes with another layout.

    plain: name of the plain backend.
    """
    backends: Any
    (backends,) = {
        value
        for name, value in vars(oracle).items()
        if inspect.isclass(value)
        and name.lower().endswith("moebackend")
        and value.__module__ == oracle.__name__
    }
    fallback_backends = []
    for backend in backends:
        try:
            classes = oracle.backend_to_kernel_cls(backend)
        except Exception:  # noqa: BLE001 (a backend whose library is missing)
            continue
        for candidate in classes if isinstance(classes, list) else [classes]:
            if candidate is cls:
                return backend
            if cls in getattr(candidate, "get_clses", tuple)():
                fallback_backends.append(backend)
    # Classes that emulate a scheme are derived from TritonExperts, but have a layout of their own.
    reads_checkpoint_layout = any(
        base.__name__ in _CHECKPOINT_LAYOUT_CLASSES for base in cls.__mro__
    )
    if reads_checkpoint_layout and "Emulation" not in cls.__name__:
        return backends[plain]
    if not fallback_backends:
        name = oracle.__name__.rpartition(".")[2]
        raise NotJudgedError(f"vLLM's oracle for {name} never returns it")
    return fallback_backends[0]


@dataclass(frozen=True)
class Layer:
    """Weights in the layout of a class.

    quant_config: the FusedMoEQuantConfig.
    biases: the biases of both GEMMs in the layout of the class; None if the class reads them in the
        layout of the checkpoint.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    quant_config: Any
    biases: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True)
class CheckpointLayer:
    """A layer before its weights are converted."""

    problem: Problem
    cls: Any
    config: Any
    weights: ExpertWeights


class VllmEngine:
    """vLLM in this process."""

    keys = KEYS
    without_predicates = WITHOUT_PREDICATES
    reads_gptq = False  # whether integers with a scale per group are converted from GPTQ's layout

    def __init__(self) -> None:
        self._device = "cpu" if current_platform.is_cpu() else "cuda"
        self._classes, self._broken = find_classes()
        # Some classes read the configuration when they are called.
        self._config = set_current_vllm_config(VllmConfig(device_config=DeviceConfig(self._device)))
        self._config.__enter__()
        if self._device == "cpu":
            prepare_program()
        else:
            init_workspace_manager(torch.device("cuda", torch.cuda.current_device()))

    def add_class(self, cls: type) -> None:
        """Add an experts class that is not part of vLLM, or replace one."""
        self._classes[cls.__name__] = cls

    # ------------------------------------------------------------------------ description

    def describe(self) -> Description:
        """Return vLLM, its classes and the activations to try."""
        notes = []
        if self._device == "cpu":
            notes.append(_CPU_NOTE)
        if self._broken:
            notes.append(f"modules that cannot be imported here: {', '.join(self._broken)}")
        with claim_gpu():
            classes = tuple(
                self._describe_class(name, cls) for name, cls in sorted(self._classes.items())
            )
        device_name = "CPU" if self._device == "cpu" else torch.cuda.get_device_name()
        return Description(
            "vllm",
            vllm.__version__,
            self._device,
            device_name,
            classes,
            {name: make_activation_spec(name) for name in self._list_activations()},
            tuple(notes),
        )

    def _describe_class(self, name: str, cls: Any) -> ExpertsClass:
        unavailable = self._explain_unavailable_class(cls)
        schemes, refused = list[str](), dict[str, str]()
        format = ""
        if not unavailable:
            format = cls.activation_format().value[0]
            for scheme in self.keys:
                reason = self._explain_refused_scheme(cls, scheme)
                if reason:
                    refused[scheme] = reason
                else:
                    schemes.append(scheme)
        # The compiled operator that sorts pairs by expert would skip ids of -1.
        skips_ids = self._device == "cuda" or format == "batched_experts"
        names = tuple(schemes)
        return ExpertsClass(name, cls.__module__, format, unavailable, names, refused, skips_ids)

    def _explain_unavailable_class(self, cls: Any) -> str:
        """Return why no case of a class can run on this machine; "" if some can."""
        if not issubclass(cls, vllm_modular_kernel.FusedMoEExpertsModular):
            return "routes tokens itself, which the check does not support"
        if inspect.isabstract(cls):
            return "an abstract base class"
        try:
            if cls._supports_current_device():
                return ""
        except NotImplementedError:
            known = cls.__name__ in self.without_predicates
            return "" if known else "its predicates are not implemented"
        except Exception as error:  # noqa: BLE001 (such as a missing operator)
            return self.explain_unavailable(error) or f"{type(error).__name__}: {error}"
        return "it does not support this device"

    def _explain_refused_scheme(self, cls: Any, scheme: str) -> str:
        """Return why a class refuses a scheme with every activation; "" if it supports one."""
        known = self.without_predicates.get(cls.__name__)
        if known is not None:
            return "" if scheme in known else "its code does not compute it"
        reasons = []
        for name in self._list_activations():
            problem = Problem(
                16, 256, 128, 8, 2, quant=scheme, activation=make_activation_spec(name)
            )
            try:
                self.check_support(EngineCase(cls.__name__, name, problem))
            except (RefusedError, UnavailableError) as error:
                reasons.append(str(error))
            except Exception as error:  # noqa: BLE001 (of a predicate; `check_support` raises it again)
                reasons.append(f"{type(error).__name__}: {error}")
            else:
                return ""
        return reasons[0]

    def _list_activations(self) -> list[str]:
        values = {activation.value for activation in MoEActivation}
        return [name for name, (value, _) in ACTIVATIONS.items() if value in values]

    def _get_keys(self, scheme: str) -> tuple[Any, Any]:
        weight, activation = (
            None if name is None else getattr(quant_utils, name) for name in self.keys[scheme]
        )
        return weight, activation

    # -------------------------------------------------------------------------- predicates

    def check_support(self, case: EngineCase) -> None:
        """Raise RefusedError or UnavailableError if the class does not support the case."""
        cls: Any = self._classes[case.experts]
        if cls.__name__ in self.without_predicates:
            if not case.problem.act.gated:
                raise RefusedError("its code computes gated activations only")
            return
        config = self.make_config(case)
        try:
            with claim_gpu():
                supported, reason = cls.is_supported_config(
                    cls, config, *self._get_keys(case.problem.quant), cls.activation_format()
                )
        except Exception as error:
            missing = self.explain_unavailable(error)
            if missing is not None:
                raise UnavailableError(missing) from error
            raise
        if not supported:
            raise RefusedError(str(reason))

    def make_config(self, case: EngineCase) -> Any:
        """Return the FusedMoEConfig of a case."""
        problem = case.problem
        value, options = ACTIVATIONS[case.activation]
        parallel = FusedMoEParallelConfig.make_no_parallel()
        if problem.expert_map:
            parallel.use_ep, parallel.ep_size = True, problem.experts // problem.e
            parallel.ep_rank = 1
        field_by_option = {"limit": "swiglu_limit", "alpha": "swiglu_alpha", "beta": "swiglu_beta"}
        field_by_option |= {f"situ_{x}beta": f"activation_situ_{x}beta" for x in ("", "linear_")}
        config_parameters = inspect.signature(FusedMoEConfig).parameters
        options = {
            field_by_option[k]: v
            for k, v in options.items()
            if field_by_option[k] in config_parameters
        }
        with claim_gpu():
            return FusedMoEConfig(
                num_experts=problem.experts,
                experts_per_token=problem.top_k,
                hidden_dim=problem.hidden,
                intermediate_size=problem.intermediate,
                num_local_experts=problem.e,
                num_logical_experts=problem.experts,
                activation=MoEActivation(value),
                device=self._device,
                routing_method=RoutingMethodType.TopK,
                moe_parallel_config=parallel,
                in_dtype=problem.dtype,
                max_num_tokens=_MAX_ROWS[self._device],
                has_bias=problem.bias,
                **options,
            )

    # ------------------------------------------------------------------------------- calls

    def build(self, case: EngineCase, weights: ExpertWeights) -> EngineCall:
        """Return a function that calls a layer of the class with these weights."""
        cls: Any = self._classes[case.experts]
        config = self.make_config(case)
        layer = self._convert(case, cls, config, weights)
        options, prepare = {}, MoEPrepareAndFinalizeNoDPEPModular()
        if cls.activation_format() != _STANDARD:
            rows = _MAX_ROWS[self._device]
            options = {"max_num_tokens": rows, "num_dispatchers": 1}
            rank = config.moe_parallel_config.ep_rank
            prepare = GroupedRows(rows, case.problem.e, 1, rank)
        try:
            experts = cls(config, layer.quant_config, **options)
        except TypeError as error:
            raise NotJudgedError(f"{cls.__name__}(): {error}") from error
        kernel = vllm_modular_kernel.FusedMoEKernel(prepare, experts)
        poison = _add_poison(experts)

        def call(x_TH: torch.Tensor, routing: Routing, poisoned: bool) -> torch.Tensor:
            poison.enabled = poisoned
            with torch.inference_mode():
                output: torch.Tensor = kernel.apply(
                    x_TH,
                    layer.w13,
                    layer.w2,
                    routing.topk_weights_TK,
                    routing.topk_ids_TK,
                    config.activation,
                    case.problem.experts,
                    weights.expert_map,
                    case.problem.apply_router_weight_on_input,
                )
            return output

        return call

    def _convert(self, case: EngineCase, cls: Any, config: Any, weights: ExpertWeights) -> Layer:
        """Convert weights as vLLM does after it has loaded them for this class."""
        problem = case.problem
        if problem.bias and problem.scheme.name.startswith("nvfp4"):
            raise NotJudgedError("vLLM's layers in this scheme have no biases")
        convert = _CONVERSIONS[problem.scheme.name]
        try:
            layer = convert(self, CheckpointLayer(problem, cls, config, weights))
        except (ModularKernelError, NotJudgedError, UnavailableError):
            raise
        except Exception as error:
            missing = self.explain_unavailable(error)
            if missing is not None:
                raise UnavailableError(missing) from error
            raise NotJudgedError(
                f"conversion of the weights: {type(error).__name__}: {error}"
            ) from error
        quant_config, options = layer.quant_config, ACTIVATIONS[case.activation][1]
        for option, name in (("limit", "clamp_limit"), ("alpha", "alpha"), ("beta", "beta")):
            if option in options:
                setattr(quant_config, f"gemm1_{name}", options[option])
        if problem.bias:
            biases = layer.biases or (weights.b1, weights.b2)
            quant_config._w1.bias, quant_config._w2.bias = biases
        return layer

    def name_backend(self, problem: Problem, cls: type) -> str:
        """Return the backend that converts weights, such as "Fp8MoeBackend.TRITON"."""
        oracle, plain = _ORACLES[_CONVERSIONS[problem.scheme.name]]
        return str(find_backend(get_oracle(oracle), cls, plain)) if oracle else ""

    def convert_groups(self, source: CheckpointLayer) -> Layer:
        """Convert integers with a scale per group of a row."""
        oracle, weights = get_oracle("int_wna16"), source.weights
        backend = find_backend(oracle, source.cls, "TRITON")
        packed_weights = weights.w1.view(torch.int32), weights.w2.view(torch.int32)
        scales, biases = (weights.w1_scale, weights.w2_scale), (weights.b1, weights.b2)
        arguments = make_group_arguments(source.problem)
        w13, w2, w13_scale, w2_scale, *other_tensors = oracle.convert_to_wna16_moe_kernel_format(
            backend,
            make_module(source),
            arguments,
            None,
            *packed_weights,
            *scales,
            None,
            None,
            *biases,
        )
        return make_group_layer(
            source.problem, (w13, w2), (w13_scale, w2_scale), other_tensors[-2:]
        )

    def explain_unavailable(self, error: BaseException) -> str | None:
        """Return the missing requirement that caused the error, or None if it has another cause."""
        return find_missing_requirement(error, self._device)

    def make_reproducer(self, case: EngineCase, bound: float) -> str:
        """Return a program that needs only vLLM and torch, and compares the same call."""
        cls: Any = self._classes[case.experts]
        value, options = ACTIVATIONS[case.activation]
        is_batched = cls.activation_format() != _STANDARD
        max_rows = _MAX_ROWS[self._device] if is_batched else None
        backend = self.name_backend(case.problem, cls)
        source = Source(
            cls.__module__,
            cls.__name__,
            value,
            options,
            self._device,
            max_rows,
            backend,
            self.reads_gptq,
        )
        return write_reproducer(case, source, bound)


class GroupedRows(BatchedPrepareAndFinalize):  # type: ignore[misc]
    """A prepare/finalize that groups rows by expert, as vLLM's exchanges do.

    It passes on the counts of local experts only, and sums over K in float32. Otherwise, wrong
    counts and the rounding errors of 16-bit sums would be attributed to the experts class.
    """

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the rows of local experts, their scales, and their counts."""
        local = self.num_local_experts
        return super().prepare(a1, topk_weights, topk_ids, local, *args, **kwargs)

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Write the weighted sums of the rows to `output`."""
        total = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
        first = self.rank * self.num_local_experts
        for expert, rows in enumerate(fused_expert_output):
            tokens, slots = (topk_ids == first + expert).nonzero(as_tuple=True)
            values = rows[: len(tokens)].float()
            if not apply_router_weight_on_input:
                values = values * topk_weights[tokens, slots, None].float()
            total.index_add_(0, tokens, values)
        output.copy_(total)


def _add_poison(experts: Any) -> SimpleNamespace:
    """Patch `experts` to fill its workspaces with NaN before each call.

    The output is part of a workspace. Returns an object whose attribute `enabled` switches this on.
    """
    apply, state = experts.apply, SimpleNamespace(enabled=False)
    parameters = inspect.signature(apply)

    def poisoned_apply(*args: Any, **kwargs: Any) -> Any:
        if state.enabled:
            arguments = parameters.bind(*args, **kwargs).arguments
            arguments |= arguments.get("kwargs", {})
            for name in ("workspace13", "workspace2", "output"):
                if arguments[name].is_floating_point():
                    arguments[name].fill_(torch.nan)
        return apply(*args, **kwargs)

    experts.apply = poisoned_apply
    return state


# --------------------------------------------------------------------------- the conversions


def make_group_arguments(problem: Problem) -> Any:
    """Return compressed-tensors' description of integers with a scale per group."""
    module = import_module("compressed_tensors.quantization")
    bits, group = 4 if problem.scheme.packed else 8, problem.scheme.group[0]
    return module.QuantizationArgs(
        num_bits=bits, type="int", strategy="group", group_size=group, symmetric=True
    )


def make_group_layer(
    problem: Problem,
    weights: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> Layer:
    """Return a layer of integers with a scale per group, whose tensors are converted."""
    bits, group = 4 if problem.scheme.packed else 8, problem.scheme.group[0]
    config = get_oracle("int_wna16").make_wna16_moe_quant_config(*scales, group, bits)
    b1, b2 = biases
    return Layer(*weights, config, None if b1 is None or b2 is None else (b1, b2))


def get_oracle(name: str) -> ModuleType:
    return import_module(f"{_FUSED_MOE}.oracle.{name}")


def make_module(source: CheckpointLayer, **attributes: Any) -> Any:
    """Return a module with the attributes of a layer that vLLM's conversions read."""
    problem, config = source.problem, source.config
    module: Any = torch.nn.Module()
    module.orig_dtype = module.params_dtype = problem.dtype
    module.global_num_experts, module.hidden_size = problem.experts, problem.hidden
    # vLLM passes the number of local experts to `create_weights`, which names it `num_experts`.
    module.num_experts = module.local_num_experts = problem.e
    module.intermediate_size_per_partition = problem.intermediate
    module.activation, module.moe_config = config.activation, config
    for name in ("w1", "w2"):
        vllm_name = "w13" if name == "w1" else name
        weight = torch.nn.Parameter(getattr(source.weights, name), requires_grad=False)
        setattr(module, f"{vllm_name}_weight", weight)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _convert_unquantized(engine: VllmEngine, source: CheckpointLayer) -> Layer:
    oracle = get_oracle("unquantized")
    backend = find_backend(oracle, source.cls, "TRITON")
    weights = source.weights
    w13, w2 = oracle.convert_to_unquantized_kernel_format(
        backend, source.config, weights.w1, weights.w2
    )
    return Layer(w13, w2, FusedMoEQuantConfig.make())


def _convert_fp8(engine: VllmEngine, source: CheckpointLayer) -> Layer:
    oracle, weights, scheme = get_oracle("fp8"), source.weights, source.problem.scheme
    backend = find_backend(oracle, source.cls, "TRITON")
    is_block, is_channel = scheme.granularity == "block", scheme.granularity == "channel"
    module = make_module(source)
    if is_block:
        module.weight_block_size = list(scheme.group)
    scales = [weights.w1_scale, weights.w2_scale]
    if is_channel:
        scales = [scale[..., None] for scale in scales if scale is not None]
    static_scales = weights.a1_scale, weights.a2_scale
    w13, w2, *scales = oracle.convert_to_fp8_moe_kernel_format(
        backend, module, weights.w1, weights.w2, *scales, *static_scales
    )
    config = oracle.make_fp8_moe_quant_config(
        backend,
        *scales,
        *static_scales,
        block_shape=module.weight_block_size if is_block else None,
        per_act_token_quant=is_channel,
        per_out_ch_quant=is_channel,
    )
    return Layer(w13, w2, config)


def _convert_int8(engine: VllmEngine, source: CheckpointLayer) -> Layer:
    oracle, weights = get_oracle("int8"), source.weights
    backend = find_backend(oracle, source.cls, "TRITON")
    w13, w2 = oracle.convert_to_int8_moe_kernel_format(backend, weights.w1, weights.w2)
    assert weights.w1_scale is not None
    assert weights.w2_scale is not None
    scales = weights.w1_scale[..., None], weights.w2_scale[..., None]
    config = oracle.make_int8_moe_quant_config(backend, *scales, per_act_token_quant=True)
    return Layer(w13, w2, config)


def _convert_groups(engine: VllmEngine, source: CheckpointLayer) -> Layer:
    """Convert integers with a scale per group, packed in words along rows."""
    return engine.convert_groups(source)


def _convert_mxfp4(engine: VllmEngine, source: CheckpointLayer) -> Layer:
    oracle, weights = get_oracle("mxfp4"), source.weights
    backend = find_backend(oracle, source.cls, "EMULATION")
    assert weights.w1_scale is not None
    assert weights.w2_scale is not None
    scales = weights.w1_scale.view(torch.uint8), weights.w2_scale.view(torch.uint8)
    convert = oracle.convert_weight_to_mxfp4_moe_kernel_format
    if source.config.activation is MoEActivation.SWIGLUOAI:
        convert = oracle.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format
    biases = weights.b1, weights.b2
    module = make_module(source)
    converted = convert(backend, module, weights.w1, weights.w2, *scales, *biases)
    w13, w2, *scales_and_biases = converted
    w13_scale, w2_scale, b1, b2 = scales_and_biases
    config = oracle.make_mxfp4_moe_quant_config(backend, w13_scale, w2_scale)
    return Layer(w13, w2, config, None if b1 is None else (b1, b2))


def _convert_nvfp4(engine: VllmEngine, source: CheckpointLayer) -> Layer:
    oracle, weights = get_oracle("nvfp4"), source.weights
    backend = find_backend(oracle, source.cls, "EMULATION")
    assert weights.w1_global_scale is not None
    assert weights.w2_global_scale is not None
    (w13, w13_scale, w13_scale_2, a13_scale, w2, w2_scale, w2_scale_2, a2_scale) = (
        oracle.convert_to_nvfp4_moe_kernel_format(
            backend,
            make_module(source),
            weights.w1,
            weights.w1_scale,
            weights.w1_global_scale[:, 0].contiguous(),
            weights.a1_scale,
            weights.w2,
            weights.w2_scale,
            weights.w2_global_scale[:, 0].contiguous(),
            weights.a2_scale,
            source.config.is_act_and_mul,
        )
    )
    config = oracle.make_nvfp4_moe_quant_config(
        backend, w13_scale, w2_scale, w13_scale_2, w2_scale_2, a13_scale, a2_scale
    )
    return Layer(w13, w2, config)


_CONVERSIONS: Mapping[str, Callable[[VllmEngine, CheckpointLayer], Layer]] = {
    "none": _convert_unquantized,
    "fp8_w8a8_tensor": _convert_fp8,
    "fp8_w8a8_channel": _convert_fp8,
    "fp8_w8a8_block": _convert_fp8,
    "int8_w8a8_channel": _convert_int8,
    "int8_w8a16_group": _convert_groups,
    "int4_w4a16_group": _convert_groups,
    "mxfp4_w4a16": _convert_mxfp4,
    "nvfp4_w4a16": _convert_nvfp4,
    "nvfp4_w4a4": _convert_nvfp4,
}

# Conversion -> names of the oracle and of its plain backend; empty for unquantized weights.
_ORACLES: Mapping[Callable[[VllmEngine, CheckpointLayer], Layer], tuple[str, str]] = {
    _convert_unquantized: ("", ""),
    _convert_fp8: ("fp8", "TRITON"),
    _convert_int8: ("int8", "TRITON"),
    _convert_groups: ("int_wna16", "TRITON"),
    _convert_mxfp4: ("mxfp4", "EMULATION"),
    _convert_nvfp4: ("nvfp4", "EMULATION"),
}


def make_engine() -> VllmEngine:
    """Return vLLM in this process."""
    return VllmEngine()
