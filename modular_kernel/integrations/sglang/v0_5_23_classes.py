"""The MoE runners of SGLang 0.5.23, which are called through its FusedMoE layer.

SGLang selects a runner by `--moe-runner-backend` and by the quantization method of a layer. A class
of the report is a runner core, or a function that computes a whole layer.
"""

import logging
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sglang
import torch
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import (
    MoeRunnerBackend,
    initialize_moe_config,
    resolve_moe_runner_backend,
)
from sglang.srt.layers.quantization.blockwise_int8 import BlockInt8Config
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.moe_wna16 import MoeWNA16Config
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config
from sglang.srt.runtime_context import SpawnRanks, get_flags, get_parallel, publish
from sglang.srt.server_args import ServerArgs

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
from modular_kernel.integrations.reproducer import EngineLines, write_program
from modular_kernel.integrations.sglang.classes import ACTIVATIONS
from modular_kernel.integrations.sglang.reproducer import write_call
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing

_PACKAGE_DIRECTORY = Path(sglang.__file__).parent
_CPU_NOTE = (
    "SGLang's Triton kernels are interpreted, and its compiled operators are computed in torch"
)
# Exceptions that SGLang's own checks raise.
_REFUSALS = (AssertionError, NotImplementedError, ValueError)


@dataclass(frozen=True)
class Runner:
    """A class of the report, and how SGLang selects it.

    module: its module in `sglang.srt.layers.moe`.
    backend: the value of `--moe-runner-backend`.
    packages: packages that its kernels need, in addition to SGLang.
    find_forward: maps the UnquantizedFusedMoEMethod of a layer to the function that the layer must
        call; None if every quantization method calls the class.
    is_core: whether it is called between the functions that permute rows. SGLang then prefers
        another function for the whole layer, unless SGLANG_CI_DISABLE_MOE_FUSED_FUNC is set.
    needs_gpu: whether it has no implementation in Triton or torch.
    not_called: why the check does not call it; empty if it does.
    """

    module: str
    backend: str
    packages: tuple[str, ...] = ()
    find_forward: Callable[[Any], Callable[..., Any]] | None = None
    is_core: bool = False
    needs_gpu: bool = True
    not_called: str = ""


def _find_gathering_forward(method: Any) -> Callable[..., Any]:
    from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native

    function: Callable[..., Any] = fused_moe_forward_native
    return function


def _make_native_runner(find_forward: Callable[[Any], Callable[..., Any]]) -> Runner:
    return Runner("fused_moe_native", "triton", find_forward=find_forward, needs_gpu=False)


_NEEDS_AMD_GPU, _NEEDS_ASCEND_NPU = "it needs an AMD GPU", "it needs an Ascend NPU"
_UNSUPPORTED_ROUTING = (
    "it receives the routing in a format of triton_kernels, which the check does not make"
)
_INCLUDES_EXCHANGE = "it includes an exchange between ranks"
RUNNERS: Mapping[str, Runner] = {
    "fused_experts_none_to_triton": Runner("moe_runner.triton", "triton", needs_gpu=False),
    "TritonRunnerCore": Runner("moe_runner.triton", "triton", is_core=True, needs_gpu=False),
    "moe_forward_native": _make_native_runner(lambda method: method.forward_cpu),
    "fused_moe_forward_native": _make_native_runner(_find_gathering_forward),
    "TritonKernelsRunnerCore": Runner(
        "moe_runner.triton_kernels", "triton_kernel", ("triton_kernels",),
        not_called=_UNSUPPORTED_ROUTING,
    ),
    "DeepGemmRunnerCore": Runner("moe_runner.deep_gemm", "deep_gemm", ("deep_gemm",)),
    "fused_experts_none_to_marlin": Runner("moe_runner.marlin", "marlin", ("sgl_kernel",)),
    "cutlass_fused_experts_fp8": Runner("cutlass_moe", "cutlass", ("sgl_kernel",)),
    "fused_experts_none_to_flashinfer_cutlass": Runner(
        "moe_runner.flashinfer_cutlass", "flashinfer_cutlass", ("flashinfer",)
    ),
    "fused_experts_none_to_flashinfer_mxfp4": Runner(
        "moe_runner.flashinfer_cutlass", "flashinfer_mxfp4", ("flashinfer",)
    ),
    "fused_experts_none_to_flashinfer_trtllm": Runner(
        "moe_runner.flashinfer_trtllm", "flashinfer_trtllm", ("flashinfer",)
    ),
    "fused_experts_none_to_flashinfer_trtllm_routed": Runner(
        "moe_runner.flashinfer_trtllm", "flashinfer_trtllm_routed", ("flashinfer",)
    ),
    "fused_experts_none_to_flashinfer_cutedsl_fp4": Runner(
        "moe_runner.flashinfer_cutedsl", "flashinfer_cutedsl", ("flashinfer",)
    ),
    "fused_experts_none_to_humming": Runner("moe_runner.humming", "humming", ("humming",)),
    "fused_experts_none_to_hpc_ops": Runner("moe_runner.hpc_ops", "hpc_ops", ("hpc",)),
    "AiterRunnerCore": Runner("moe_runner.aiter", "aiter", not_called=_NEEDS_AMD_GPU),
    "AscendRunnerCore": Runner("moe_runner.ascend", "ascend", not_called=_NEEDS_ASCEND_NPU),
    "flashinfer_megamoe": Runner(
        "flashinfer_megamoe", "flashinfer_megamoe", not_called=_INCLUDES_EXCHANGE
    ),
}  # fmt: skip


# -------------------------------------------------------------------------- quantization configs


def _make_fp8(**options: Any) -> Any:
    return Fp8Config(is_checkpoint_fp8_serialized=True, **options)


def _make_groups(bits: int, group: int) -> Any:
    """Return the config of symmetric GPTQ weights, which SGLang runs with moe_wna16."""
    full_config = {"bits": bits, "group_size": group, "desc_act": False, "sym": True}
    return MoeWNA16Config("gptq", bits, group, False, False, None, full_config)


# Quantization scheme -> its config.
QUANT_CONFIGS: Mapping[str, Callable[[], Any]] = {
    "none": lambda: None,
    "fp8_w8a8_tensor": lambda: _make_fp8(activation_scheme="dynamic"),
    "fp8_w8a8_tensor:static=true": lambda: _make_fp8(activation_scheme="static"),
    "fp8_w8a8_channel": lambda: W8A8Fp8Config(is_checkpoint_fp8_serialized=True),
    "fp8_w8a8_block": lambda: _make_fp8(activation_scheme="dynamic", weight_block_size=[128, 128]),
    "int8_w8a8_channel": lambda: W8A8Int8Config({}),
    "int8_w8a8_block": lambda: BlockInt8Config(
        is_checkpoint_int8_serialized=True,
        activation_scheme="dynamic",
        weight_block_size=[128, 128],
    ),
    "int8_w8a16_group": lambda: _make_groups(8, 128),
    "int4_w4a16_group": lambda: _make_groups(4, 128),
    "int4_w4a16_group:group=32": lambda: _make_groups(4, 32),
}


# ------------------------------------------------------------------------------------- the engine


def start(device: str) -> None:
    """Configure SGLang in this process, for one rank.

    device: "cpu" or "cuda".
    """
    logging.getLogger("sglang").setLevel(logging.ERROR)
    arguments = ServerArgs(model_path="dummy", device=device, moe_runner_backend="triton")
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    initialize_moe_config()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    backend = "gloo" if device == "cpu" else "nccl"
    init_distributed_environment(1, 0, address, 0, backend=backend)
    initialize_model_parallel(backend=backend)


class SglangEngine:
    """SGLang in this process."""

    def __init__(self) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._runners = dict(RUNNERS)
        start(self._device)

    def add_function(self, name: str, forward: Callable[..., Any], backend: str = "triton") -> None:
        """Add a function (layer, dispatch_output) -> combine input for unquantized layers."""
        runner = _make_native_runner(lambda method: forward)
        self._runners[name] = replace(runner, backend=backend)

    # ------------------------------------------------------------------------ description

    def describe(self) -> Description:
        """Return SGLang, its MoE runners and the activations to try."""
        runners = sorted(self._runners.items())
        classes = [self._describe_class(name, runner) for name, runner in runners]
        known_backends, module = (
            {runner.backend for _, runner in runners} | {"auto"},
            FusedMoE.__module__,
        )
        classes += [
            ExpertsClass(backend.value, module, "", "the check does not know it")
            for backend in MoeRunnerBackend
            if backend.value not in known_backends
        ]
        return Description(
            "sglang",
            version("sglang"),
            self._device,
            "CPU" if self._device == "cpu" else torch.cuda.get_device_name(),
            tuple(classes),
            {name: spec for name, (_, spec) in ACTIVATIONS.items()},
            (_CPU_NOTE,) if self._device == "cpu" else (),
        )

    def _describe_class(self, name: str, runner: Runner) -> ExpertsClass:
        schemes, refused = list[str](), dict[str, str]()
        unavailable = self._explain_unavailable_class(runner)
        if not unavailable:
            for scheme in QUANT_CONFIGS:
                reason = self._explain_refused_scheme(name, scheme)
                if reason:
                    refused[scheme] = reason
                else:
                    schemes.append(scheme)
        module = f"sglang.srt.layers.moe.{runner.module}"
        return ExpertsClass(name, module, "standard", unavailable, tuple(schemes), refused)

    def _explain_unavailable_class(self, runner: Runner) -> str:
        """Return why no case of a class can run on this machine; "" if some can."""
        if runner.not_called:
            return runner.not_called
        if runner.needs_gpu and self._device == "cpu":
            return "it needs a GPU"
        missing = [package for package in runner.packages if find_spec(package) is None]
        return f"no package {' or '.join(missing)}" if missing else ""

    def _explain_refused_scheme(self, name: str, scheme: str) -> str:
        """Return why a class refuses a scheme with every activation; "" if it supports one."""
        reasons = []
        for activation, (_, spec) in ACTIVATIONS.items():
            problem = Problem(16, 512, 256, 8, 2, quant=scheme, activation=spec)
            try:
                self._make_layer(EngineCase(name, activation, problem))
            except (RefusedError, UnavailableError) as error:
                reasons.append(str(error))
            except Exception as error:  # noqa: BLE001 (`build` raises it again)
                reasons.append(f"{type(error).__name__}: {error}")
            else:
                return ""
        return reasons[0]

    # ------------------------------------------------------------------------------- calls

    def check_support(self, case: EngineCase) -> None:
        """Do nothing: SGLang has no predicates. Its checks raise when a layer is made or called."""

    def _make_layer(self, case: EngineCase) -> Any:
        """Return SGLang's FusedMoE layer for the class, with uninitialized weights.

        Raises RefusedError if SGLang's checks fail, or if it selects another runner.
        """
        runner, problem = self._runners[case.experts], case.problem
        get_flags().moe.runner_backend = resolve_moe_runner_backend(runner.backend)
        with self._convert_errors(), _use_ranks(problem), torch.device(self._device):
            layer = FusedMoE(
                num_experts=problem.experts,
                hidden_size=problem.hidden,
                intermediate_size=problem.intermediate,
                layer_id=0,
                top_k=problem.top_k,
                params_dtype=problem.dtype,
                quant_config=QUANT_CONFIGS[problem.quant](),
                prefix="model.layers.0.mlp.experts",
                with_bias=problem.bias,
                apply_router_weight_on_input=problem.apply_router_weight_on_input,
                **ACTIVATIONS[case.activation][0],
            )
        selected = getattr(layer.runner_backend, "value", None)
        if selected != runner.backend:
            raise RefusedError(f"SGLang selects the runner {selected} for this layer")
        self._select_function(layer, runner)
        return layer

    def _select_function(self, layer: Any, runner: Runner) -> None:
        """Make the layer call the function or core of the class."""
        method = layer.quant_method
        is_unquantized = isinstance(method, UnquantizedFusedMoEMethod)
        if runner.find_forward is not None:
            if not is_unquantized:
                raise RefusedError(f"{type(method).__name__} never calls it")
            method._forward_method = runner.find_forward(method)
        elif is_unquantized and self._device == "cpu":
            method._forward_method = method.forward_cuda
        if runner.is_core:
            if method.runner is None or method.runner.runner_core is None:
                raise RefusedError(f"{type(method).__name__} has no runner core")
            method.runner.fused_func = None

    def build(self, case: EngineCase, weights: ExpertWeights) -> EngineCall:
        """Return a function that calls a layer of the class with these weights."""
        layer, problem = self._make_layer(case), case.problem
        with self._convert_errors(), _use_ranks(problem), torch.device(self._device):
            load_weights(layer, weights)
            layer.quant_method.process_weights_after_loading(layer)

        def call(x_TH: torch.Tensor, routing: Routing, poisoned: bool) -> torch.Tensor:
            ids_TK = routing.topk_ids_TK.to(torch.int32)
            topk = StandardTopKOutput(routing.topk_weights_TK, ids_TK, None)
            poison = poison_new_tensors() if poisoned else nullcontext()
            with torch.inference_mode(), self._convert_errors(), _use_ranks(problem), poison:
                output: torch.Tensor = layer(x_TH, topk)
            return output

        return call

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Convert errors of SGLang's checks, and errors caused by missing requirements."""
        try:
            yield
        except (NotJudgedError, RefusedError, UnavailableError):
            raise
        except Exception as error:
            missing = self.explain_unavailable(error)
            if missing is not None:
                raise UnavailableError(missing) from error
            frame = traceback.extract_tb(error.__traceback__)[-1]
            is_raised_by_sglang = Path(frame.filename).is_relative_to(_PACKAGE_DIRECTORY)
            if is_raised_by_sglang and isinstance(error, _REFUSALS):
                message = str(error) or frame.line or type(error).__name__
                raise RefusedError(" ".join(message.split())) from error
            raise

    def explain_unavailable(self, error: BaseException) -> str | None:
        """Return the missing requirement that caused the error, or None if it has another cause."""
        return find_missing_requirement(error, self._device)

    def make_reproducer(self, case: EngineCase, bound: float) -> str:
        """Return a program that needs only SGLang and torch, and compares the same call."""
        runner, options = self._runners[case.experts], ACTIVATIONS[case.activation][0]
        if runner.backend != "triton":
            return ""
        is_native = runner.find_forward is not None
        imports, call = write_call(
            case, options, self._device, is_native=is_native, is_core=runner.is_core
        )
        return write_program(case, EngineLines(imports, call), self._device, bound)


@contextmanager
def _use_ranks(problem: Problem) -> Iterator[None]:
    """Build and call layers as rank 1 of SGLang, if the problem has the experts of one rank only.

    `ParallelContext.override` would require process groups of that size.
    """
    parallel = get_parallel()
    saved_overrides = dict(parallel._overrides)
    if problem.expert_map:
        parallel._overrides.update(moe_ep_size=problem.experts // problem.e, moe_ep_rank=1)
    try:
        yield
    finally:
        parallel._overrides = saved_overrides


@contextmanager
def poison_new_tensors() -> Iterator[None]:
    """Fill floating-point tensors from torch.empty and torch.empty_like with NaN."""

    def poison(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = function(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return make

    originals: dict[str, Callable[..., torch.Tensor]]
    originals = {"empty": torch.empty, "empty_like": torch.empty_like}
    for name, function in originals.items():
        setattr(torch, name, poison(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(torch, name, function)


# ------------------------------------------------------------------------------------ weights

# Field of ExpertWeights -> its names in SGLang's quantization methods.
_PARAMETER_NAMES = {
    "w1": ("w13_weight", "w13_qweight"),
    "w2": ("w2_weight", "w2_qweight"),
    "b1": ("w13_weight_bias",),
    "b2": ("w2_weight_bias",),
    "w1_scale": ("w13_weight_scale_inv", "w13_weight_scale", "w13_scales"),
    "w2_scale": ("w2_weight_scale_inv", "w2_weight_scale", "w2_scales"),
    "a1_scale": ("w13_input_scale",),
    "a2_scale": ("w2_input_scale",),
}


def load_weights(layer: Any, weights: ExpertWeights) -> None:
    """Write weights into the parameters of a layer, in the layout of a checkpoint.

    Raises RefusedError if the layer has no parameter for a tensor, and NotJudgedError if it has
    another layout.
    """
    parameters = dict(layer.named_parameters())
    for field, names in _PARAMETER_NAMES.items():
        tensor = getattr(weights, field)
        if tensor is None:
            continue
        name = next((name for name in names if name in parameters), None)
        if name is None:
            method_name = type(layer.quant_method).__name__
            raise RefusedError(f"the layer of {method_name} has no parameter {names[0]}")
        parameter = parameters[name]
        if tensor.numel() == 1:
            tensor = tensor.expand(parameter.shape)  # one static scale for all experts
        elif parameter.dim() == 2 and tensor.dim() == 1:
            tensor = tensor[:, None].expand_as(parameter)  # a scale of gate and a scale of up
        elif parameter.dim() == 3 and tensor.dim() == 2:
            tensor = tensor[..., None]
        if tensor.shape != parameter.shape:
            got = f"{tuple(parameter.shape)}, not {tuple(tensor.shape)}"
            raise NotJudgedError(f"the layer's parameter {name} has the shape {got}")
        if field in ("w1", "b1") and getattr(
            layer.quant_method, "load_up_proj_weight_first", False
        ):
            tensor = tensor.roll(tensor.shape[1] // 2, 1)
        parameter.data.copy_(tensor)


def prepare_program() -> None:
    """Do nothing, because `prepare_cpu` is sufficient for a program on a CPU."""


def make_engine() -> SglangEngine:
    """Return SGLang in this process."""
    return SglangEngine()
