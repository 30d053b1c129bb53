"""MoE layers of vLLM, filled with tensors as if a checkpoint were loaded.

On a CPU, vLLM is used without its compiled extension. Loading a layer and quantizing rows to fp8
need only one of its operators, `scaled_fp8_quant`, which `stand_in_operators` replaces by torch.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import vllm
import vllm._custom_ops as vllm_operators
from vllm.config import (
    DeviceConfig,
    ParallelConfig,
    VllmConfig,
    get_current_vllm_config,
    set_current_vllm_config,
)
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import layer as layer_module
from vllm.model_executor.layers.fused_moe import modular_kernel as modular_kernel_module
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig, AutoAWQMoEMethod
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config, ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, Mxfp4Config
from vllm.v1.worker.workspace import init_workspace_manager

from modular_kernel.integrations import vllm as plugin
from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing

_layer_ids = count()
# The function that creates a layer. vLLM 0.26 names it FusedMoE.
make_layer = getattr(layer_module, "FusedMoEFactory", None) or layer_module.FusedMoE
# Our activation -> value of vLLM's MoEActivation.
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "swiglu_oai": "swigluoai",
    "swiglu_clamp_after": "swiglustep",
}


class Gptq(AutoGPTQConfig):
    """GPTQ with the method that vLLM uses on GPUs."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return AutoGPTQMoEMethod(self, layer.moe_config)


class Awq(AutoAWQConfig):
    """AWQ with the method that vLLM uses on GPUs."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return AutoAWQMoEMethod(self, layer.moe_config)


def version_module() -> ModuleType:
    """Return the plugin's module for this version of vLLM."""
    name = plugin.MODULE_BY_VERSION[plugin._parse_minor_version(vllm.__version__)]
    return import_module(f"modular_kernel.integrations.vllm.{name}")


def free_store() -> str:
    """Return the address of a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def vllm_process(
    *, world_size: int = 1, rank: int = 0, store: str = "", ep: bool = False, device: str = "cpu"
) -> Iterator[None]:
    """Make this process rank `rank` of a vLLM that splits layers by TP or EP.

    store: tcp://host:port of rank 0. The default is a free port of this machine. device: "cpu",
    with gloo, or "cuda", with NCCL on GPU 0.
    """
    store = store or free_store()
    parallel = ParallelConfig(tensor_parallel_size=world_size, enable_expert_parallel=ep)
    config = VllmConfig(device_config=DeviceConfig(device), parallel_config=parallel)
    with set_current_vllm_config(config):
        backend = "gloo" if device == "cpu" else "nccl"
        init_distributed_environment(world_size, rank, store, rank, backend)
        ensure_model_parallel_initialized(world_size, 1)
        if device != "cpu":
            init_workspace_manager(torch.device(device, torch.cuda.current_device()))
        yield


def stand_in_operators(monkeypatch: Any) -> None:
    """Replace the compiled operators that loading a layer needs by torch functions."""

    def scaled_fp8_quant(
        x: torch.Tensor, scale: torch.Tensor | None = None, use_per_token_if_dynamic: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if scale is None and use_per_token_if_dynamic:
            scale = x.float().abs().amax(-1, keepdim=True) / 448
        elif scale is None:
            scale = x.float().abs().max().reshape(1) / 448
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    def make_workspace(device: torch.device, max_blocks_per_sm: int = 1) -> torch.Tensor:
        return torch.zeros(max_blocks_per_sm, dtype=torch.int32, device=device)

    for module in (auto_awq, auto_gptq):  # the size of Marlin's workspace depends on the GPU
        if hasattr(module, "marlin_make_workspace_new"):
            monkeypatch.setattr(module, "marlin_make_workspace_new", make_workspace)
    # vLLM 0.26 has a method for layers that Marlin supports, and, for other layers, a method
    # without an oracle. Select the first.
    if hasattr(compressed_tensors_moe, "check_moe_marlin_supports_layer"):
        name = "check_moe_marlin_supports_layer"
        monkeypatch.setattr(compressed_tensors_moe, name, lambda *args, **kwargs: True)
    monkeypatch.setattr(vllm_operators, "scaled_fp8_quant", scaled_fp8_quant)
    monkeypatch.setattr(modular_kernel_module, "current_workspace_manager", CpuWorkspaces)


class CpuWorkspaces:
    """Workspaces for vLLM on a CPU, since the manager of vLLM 0.26 needs an accelerator."""

    def get_simultaneous(self, *specs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in specs]


def compressed_tensors(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str) -> Any:
    """Return vLLM's configuration of a compressed-tensors checkpoint whose layers are equal."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"config_groups": {"group_0": group}, "format": form}
    return CompressedTensorsConfig.from_config(config | {"quant_method": "compressed-tensors"})


def compressed_tensors_fp8(problem: Problem) -> Any:
    """Return vLLM's configuration of fp8 per tensor with static scales, or per block."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    weights, inputs = common | {"dynamic": False}, common | {"dynamic": not problem.scheme.static}
    if problem.scheme.granularity == "block":
        rows, columns = problem.scheme.group
        weights |= {"strategy": "block", "block_structure": [rows, columns]}
        inputs |= {"strategy": "group", "group_size": columns}
    else:
        weights |= {"strategy": "tensor"}
        inputs |= {"strategy": "tensor"}
    return compressed_tensors(weights, inputs, "float-quantized")


def modelopt(scheme: str) -> Any:
    """Return vLLM's configuration of a ModelOpt checkpoint."""
    config, algorithm = ModelOptFp8Config, "FP8"
    if scheme == "nvfp4_w4a16":
        config, algorithm = ModelOptNvFp4Config, "NVFP4"
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": []}
    return config.from_config({"quantization": quantization | {"group_size": 16}})


def group_config(problem: Problem, form: str) -> Any:
    """Return vLLM's configuration of int4 or int8 weights with a scale per group of a row."""
    scheme = problem.scheme
    bits = 4 if scheme.packed else 8
    options = {"bits": bits, "group_size": scheme.group[0]}
    if form == "gptq":
        options |= {"desc_act": False, "sym": True, "quant_method": "gptq"}
        return Gptq.from_config(options)
    if form == "moe_wna16":
        options |= {"desc_act": False, "sym": not scheme.zero_points, "quant_method": "gptq"}
        return MoeWNA16Config.from_config(options)
    if form == "awq":
        return Awq.from_config(options | {"zero_point": scheme.zero_points, "quant_method": "awq"})
    weights = {"num_bits": bits, "type": "int", "strategy": "group"}
    weights |= {"group_size": scheme.group[0], "symmetric": not scheme.zero_points}
    return compressed_tensors(weights, None, "pack-quantized")


def quant_config(problem: Problem, form: str = "") -> Any:
    """Return vLLM's configuration of a checkpoint in the problem's scheme, or None if unquantized.

    form: checkpoint format. Weights in groups have "gptq", "awq" or "moe_wna16" (GPTQ, repacked
    while loading). Other schemes have "modelopt" or "compressed-tensors". "" selects vLLM's own
    format for mxfp4 and for fp8 per tensor or block, and otherwise compressed-tensors.
    """
    scheme, name = problem.scheme, problem.scheme.name
    if name == "none":
        return None
    if form == "modelopt":
        return modelopt(name)
    if form == "compressed-tensors":
        return compressed_tensors_fp8(problem)
    if name == "fp8_w8a8_tensor":
        return Fp8Config(True, "static" if scheme.static else "dynamic")
    if name == "fp8_w8a8_block":
        return Fp8Config(True, "dynamic", weight_block_size=list(scheme.group))
    if name == "mxfp4_w4a16":
        return GptOssMxfp4Config() if problem.act.kind == "swiglu_oai" else Mxfp4Config()
    if name == "nvfp4_w4a16":
        common = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        weights, inputs = common | {"dynamic": False}, common | {"dynamic": "local"}
        return compressed_tensors(weights, inputs, "nvfp4-pack-quantized")
    if scheme.granularity == "group":
        return group_config(problem, form)
    kind = "int" if name == "int8_w8a8_channel" else "float"
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    weights = {**common, "strategy": "channel", "dynamic": False}
    inputs = {**common, "strategy": "token", "dynamic": True}
    return compressed_tensors(weights, inputs, f"{kind}-quantized")


def vllm_layer(problem: Problem, form: str = "", **options: Any) -> Any:
    """Return the RoutedExperts of a new vLLM layer with uninitialized parameters."""
    return vllm_runner(problem, form, **options).routed_experts


def vllm_runner(problem: Problem, form: str = "", **options: Any) -> Any:
    """Return a new vLLM layer with its router and uninitialized parameters."""
    # Stands in for a model's configuration. vLLM reads only these fields here.
    model = SimpleNamespace(dtype=problem.dtype, quantization_config=None, hf_config=None)
    config = get_current_vllm_config()
    config.model_config = model
    torch.set_default_dtype(problem.dtype)
    try:
        with torch.device(config.device_config.device):
            return make_layer(
                num_experts=problem.experts,
                top_k=problem.top_k,
                hidden_size=problem.hidden,
                intermediate_size=problem.intermediate,
                params_dtype=problem.dtype,
                quant_config=quant_config(problem, form),
                activation=ACTIVATIONS[problem.act.kind],
                has_bias=problem.bias,
                prefix=f"model.layers.{next(_layer_ids)}.mlp.experts",  # a unique name
                **options,
            )
    finally:
        torch.set_default_dtype(torch.float32)
        config.model_config = None


def load(problem: Problem, weights: ExpertWeights, form: str = "", **options: Any) -> Any:
    """Return a new vLLM layer with its router and these weights, ready for calls."""
    runner = vllm_runner(problem, form, **options)
    layer = runner.routed_experts
    fill(layer, problem, weights, form)
    layer.quant_method.process_weights_after_loading(layer)
    return runner


def reload(layer: Any, problem: Problem, weights: ExpertWeights, form: str = "") -> None:
    """Load new weights into a layer as vLLM does, into the memory of the original parameters.

    vLLM creates, loads and processes new parameters, copies them to the original parameters, and
    then restores the original parameters in the layer.
    """
    original = _parameters(layer)
    _replace_parameters(layer, _parameters(vllm_layer(problem, form)))
    fill(layer, problem, weights, form)
    layer.quant_method.process_weights_after_loading(layer)
    for name, parameter in original.items():
        parameter.data.copy_(getattr(layer, name))
    _replace_parameters(layer, original)


def _parameters(layer: Any) -> dict[str, Any]:
    """Return the parameters by name. A parameter can have two names."""
    return {name: p for name, p in layer._parameters.items() if p is not None}


def _replace_parameters(layer: Any, new: dict[str, Any]) -> None:
    for name in _parameters(layer):
        delattr(layer, name)
    for name, parameter in new.items():
        layer.register_parameter(name, parameter)


def prepared_tensors(layer: Any) -> dict[str, torch.Tensor]:
    """Return the copy of 4-bit weights that the plugin has prepared for a layer, by field."""
    prepared: dict[str, torch.Tensor] = layer.quant_method.experts_cls.prepared_copy.tensors
    return prepared


def experts_class(runner: Any) -> str:
    """Return the name of the experts class that vLLM has selected for a layer."""
    return getattr(runner.routed_experts.quant_method.experts_cls, "__name__", "None")


def tensors(
    problem: Problem, seed: int = 3
) -> tuple[torch.Tensor, ExpertWeights, torch.Tensor, Routing]:
    """Return x, weights, router logits, and the routing that the logits select, on the CPU."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(problem.dtype)

    e, h, i = problem.experts, problem.hidden, problem.intermediate
    weights = ExpertWeights(normal(e, problem.w1_rows, h) / h**0.5, normal(e, h, i) / i**0.5)
    if problem.bias:
        weights = replace(weights, b1=normal(e, problem.w1_rows), b2=normal(e, h))
    if problem.scheme.static:
        weights = replace(weights, a1_scale=torch.tensor([0.0125]), a2_scale=torch.tensor([0.05]))
    if problem.scheme.quantized:
        weights = quantize_weights(weights, problem)
    if weights.w1_global_scale is not None:  # vLLM also uses gate's scale for up
        weights = replace(weights, w1_global_scale=weights.w1_global_scale[:, :1].repeat(1, 2))
    logits_TE = torch.randn(problem.tokens, e, generator=g)
    values, ids = logits_TE.topk(problem.top_k)
    return normal(problem.tokens, h), weights, logits_TE, Routing(values.softmax(-1), ids)


def fill(layer: Any, problem: Problem, weights: ExpertWeights, form: str = "") -> None:
    """Write weights into the parameters of a layer, as if a checkpoint were loaded."""
    scheme = problem.scheme
    for number, prefix in (("1", "w13"), ("2", "w2")):
        fields = {
            name: getattr(weights, f"{kind}{number}{suffix}")
            for name, kind, suffix in (
                ("weight", "w", ""),
                ("scale", "w", "_scale"),
                ("zeros", "w", "_zero_point"),
                ("global", "w", "_global_scale"),
                ("input", "a", "_scale"),
                ("bias", "b", ""),
            )
        }
        copy(layer, f"{prefix}_bias", fields["bias"])
        if form == "awq":
            _fill_awq(layer, prefix, fields)
        elif form == "moe_wna16":
            copy(layer, f"{prefix}_qweight", fields["weight"])
            copy(layer, f"{prefix}_scales", fields["scale"])
            copy(layer, f"{prefix}_qzeros", fields["zeros"])
        elif form == "gptq":
            _fill_gptq(layer, prefix, fields)
        elif scheme.granularity == "group" and scheme.name.startswith("int"):
            _fill_compressed_tensors(layer, prefix, fields)
        elif scheme.name == "nvfp4_w4a16" and form == "modelopt":
            copy(layer, f"{prefix}_weight", fields["weight"])
            copy(layer, f"{prefix}_weight_scale", fields["scale"])
            copy(layer, f"{prefix}_weight_scale_2", fields["global"])
            getattr(layer, f"{prefix}_input_scale").data.fill_(0.25)
        elif scheme.name == "nvfp4_w4a16":
            copy(layer, f"{prefix}_weight_packed", fields["weight"])
            copy(layer, f"{prefix}_weight_scale", fields["scale"])
            copy(layer, f"{prefix}_weight_global_scale", 1 / fields["global"])
            getattr(layer, f"{prefix}_input_global_scale").data.fill_(4)
        else:
            suffix = "_scale_inv" if hasattr(layer, f"{prefix}_weight_scale_inv") else "_scale"
            scale = fields["scale"]
            if scheme.granularity == "tensor" and number == "1":
                scale = scale[:, None].expand(-1, 2)  # a scale of gate and a scale of up
            copy(layer, f"{prefix}_weight", fields["weight"])
            copy(layer, f"{prefix}_weight{suffix}", scale)
            copy(layer, f"{prefix}_input_scale", fields["input"])


def _pack_words(nibbles: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of the bytes of rows as int32."""
    return nibbles.clone(memory_format=torch.contiguous_format).view(torch.int32)


def _fill_compressed_tensors(layer: Any, prefix: str, fields: dict[str, Any]) -> None:
    """Write weights, packed along K, and zero points, packed along N, in the layout (N, K).

    In vLLM 0.26, the parameters have the layout (K, N), and the loader transposes the tensors of a
    checkpoint.
    """
    tensors = {"packed": fields["weight"].view(torch.int32), "scale": fields["scale"]}
    if fields["zeros"] is not None:
        tensors["zero_point"] = _pack_words(fields["zeros"].mT).mT
    transposed = getattr(getattr(layer, f"{prefix}_weight_packed"), "is_transposed", False)
    for suffix, tensor in tensors.items():
        copy(layer, f"{prefix}_weight_{suffix}", tensor.mT if transposed else tensor)


def _fill_gptq(layer: Any, prefix: str, fields: dict[str, Any]) -> None:
    """Write symmetric weights, packed along K, in GPTQ's layout (K, N)."""
    copy(layer, f"{prefix}_qweight", fields["weight"].view(torch.int32).mT)
    copy(layer, f"{prefix}_scales", fields["scale"].mT)


def _fill_awq(layer: Any, prefix: str, fields: dict[str, Any]) -> None:
    """Write weights and zero points, packed along N, in AWQ's layout (K, N)."""
    low, high = fields["weight"] & 15, fields["weight"] >> 4
    copy(layer, f"{prefix}_qweight", _pack_awq_words(torch.stack((low, high), -1).flatten(2).mT))
    copy(layer, f"{prefix}_scales", fields["scale"].mT)
    zeros = fields["zeros"]
    if zeros is not None:  # two rows in a byte
        rows = torch.stack((zeros & 15, zeros >> 4), 2).flatten(1, 2)
        copy(layer, f"{prefix}_qzeros", _pack_awq_words(rows.mT))


def _pack_awq_words(values: torch.Tensor) -> torch.Tensor:
    """Pack (..., N) 4-bit values into words of eight, in AWQ's order."""
    groups_of_eight = values.unflatten(-1, (-1, 8)).to(torch.int64)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    words = sum(groups_of_eight[..., column] << 4 * place for place, column in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def copy(layer: Any, name: str, tensor: torch.Tensor | None) -> None:
    """Copy a tensor into a parameter of the layer, which may lack dimensions of size 1."""
    if tensor is None:
        return
    parameter = getattr(layer, name)
    if tensor.numel() != parameter.numel():  # one value for all experts
        tensor = tensor.expand(parameter.shape)
    parameter.data.copy_(tensor.reshape(parameter.shape))


def call_runner(runner: Any, x_TH: torch.Tensor, logits_TE: torch.Tensor) -> torch.Tensor:
    """Run a layer with its router, as a model does."""
    config = get_current_vllm_config()
    with torch.inference_mode(), set_forward_context(None, config, num_tokens=len(x_TH)):
        output: torch.Tensor = runner(x_TH.clone(), logits_TE)  # a layer may overwrite its input
        return output.clone()  # the output may be memory that layers share


def call(layer: Any, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Run the layer's experts as vLLM's runner does."""
    with torch.inference_mode():
        output: torch.Tensor = layer.forward_modular(
            x_TH, routing.topk_weights_TK.clone(), routing.topk_ids_TK.int()
        )
    return output
