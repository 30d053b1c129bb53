"""Layers of SGLang on a CPU, with mocks of packages that its MoE layers import but do not use.

Importing this module makes SGLang importable. `start` publishes a configuration in this process.
"""

import socket
from dataclasses import replace
from typing import Any

import torch

from modular_kernel.integrations.sglang.absent_packages import mock_absent_packages
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.cases.inputs import Inputs, make_inputs

NAME = "modular_kernel"


mock_absent_packages()


def start(backend: str) -> None:
    """Load SGLang's plugins and configure one rank with an MoE backend."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="dummy", device="cpu", moe_runner_backend=backend)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.moe.utils import initialize_moe_config

    initialize_moe_config()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    init_distributed_environment(1, 0, address, 0, backend="gloo")
    initialize_model_parallel(backend="gloo")
    from sglang.kernels.ops.quantization import fp8_kernel

    fp8_kernel.sgl_per_tensor_quant_fp8 = _per_tensor_quant_fp8  # defined only with a GPU


def select(backend: str) -> None:
    """Select another MoE backend for layers that are created later."""
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
    from sglang.srt.runtime_context import get_flags

    get_flags().moe.runner_backend = resolve_moe_runner_backend(backend)


def _per_tensor_quant_fp8(
    x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, is_static: bool
) -> None:
    """Quantize like SGLang's CUDA kernel of the same name."""
    if not is_static:
        scale.fill_(x.float().abs().max() / 448)
    out.copy_((x.float() / scale).clamp(-448, 448))


# ----------------------------------------------------------------------- quantization configs


def fp8_config(**options: Any) -> Any:
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    return Fp8Config(is_checkpoint_fp8_serialized=True, **options)


def channel_config(scheme: str) -> Any:
    from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config
    from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config

    if scheme == "int8_w8a8_channel":
        return W8A8Int8Config({})
    return W8A8Fp8Config(is_checkpoint_fp8_serialized=True)


def int8_block_config() -> Any:
    from sglang.srt.layers.quantization.blockwise_int8 import BlockInt8Config

    return BlockInt8Config(
        is_checkpoint_int8_serialized=True, activation_scheme="dynamic", weight_block_size=[32, 32]
    )


def group_config(bits: int, *, zero_points: bool) -> Any:
    """Return the config of GPTQ weights in groups of 32, which SGLang runs with moe_wna16."""
    from sglang.srt.layers.quantization.moe_wna16 import MoeWNA16Config

    config = {"bits": bits, "group_size": 32, "desc_act": False, "sym": not zero_points}
    return MoeWNA16Config("gptq", bits, 32, zero_points, False, None, config)


# ------------------------------------------------------------------------------------- layers


def layer_inputs(problem: Problem) -> Inputs:
    """Return random inputs. Group scales of weights have the dtype in which SGLang stores them."""
    inputs = make_inputs(problem, "uniform", torch.device("cpu"))
    if problem.scheme.granularity != "group":
        return inputs
    scales = inputs.weights.w1_scale, inputs.weights.w2_scale
    w1_scale, w2_scale = (scale.to(problem.dtype) for scale in scales)  # type: ignore[union-attr]
    return replace(inputs, weights=replace(inputs.weights, w1_scale=w1_scale, w2_scale=w2_scale))


def fused_moe(problem: Problem, quant_config: Any = None, **options: Any) -> Any:
    """Return SGLang's FusedMoE layer for a problem, with uninitialized weights."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    layer = FusedMoE(
        num_experts=problem.experts,
        hidden_size=problem.hidden,
        intermediate_size=problem.intermediate,
        layer_id=3,
        top_k=problem.top_k,
        params_dtype=problem.dtype,
        quant_config=quant_config,
        prefix="model.layers.3.mlp.experts",
        with_bias=problem.bias,
        routed_scaling_factor=problem.routed_scaling_factor,
        apply_router_weight_on_input=problem.apply_router_weight_on_input,
        **options,
    )
    if quant_config is None:  # without a GPU, the layer would run SGLang's code for CPUs
        layer.quant_method._forward_method = layer.quant_method.forward_cuda
    return layer


# Field of ExpertWeights -> its names in SGLang's quantization methods.
_NAMES = {
    "w1": ("w13_weight", "w13_qweight"),
    "w2": ("w2_weight", "w2_qweight"),
    "b1": ("w13_weight_bias",),
    "b2": ("w2_weight_bias",),
    "w1_scale": ("w13_weight_scale_inv", "w13_weight_scale", "w13_scales"),
    "w2_scale": ("w2_weight_scale_inv", "w2_weight_scale", "w2_scales"),
    "w1_zero_point": ("w13_qzeros",),
    "w2_zero_point": ("w2_qzeros",),
    "a1_scale": ("w13_input_scale",),
    "a2_scale": ("w2_input_scale",),
}


def fill(layer: Any, weights: ExpertWeights) -> None:
    """Copy weights into the parameters of a layer, and run SGLang's processing after loading."""
    parameters = dict(layer.named_parameters())
    for name, names in _NAMES.items():
        tensor = getattr(weights, name)
        if tensor is None:
            continue
        (parameter,) = (parameters[n] for n in names if n in parameters)
        if parameter.dim() == 2 and tensor.dim() == 1:
            tensor = tensor[:, None].expand_as(parameter)  # a scale of gate and a scale of up
        elif parameter.dim() == 3 and tensor.dim() == 2:
            tensor = tensor[..., None]
        parameter.data.copy_(tensor)
    layer.quant_method.process_weights_after_loading(layer)


def call(layer: Any, inputs: Inputs) -> torch.Tensor:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    routing = inputs.routing
    topk = StandardTopKOutput(routing.topk_weights_TK, routing.topk_ids_TK.int(), None)
    output: torch.Tensor = layer(inputs.x_TH.clone(), topk)
    return output


def dispatch_output(inputs: Inputs) -> Any:
    """Return the inputs as SGLang's dispatch output on one rank."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    routing = inputs.routing
    topk = StandardTopKOutput(routing.topk_weights_TK, routing.topk_ids_TK.int(), None)
    return StandardDispatchOutput(inputs.x_TH.clone(), None, topk)


def run_core(problem: Problem, inputs: Inputs, info: Any, **options: Any) -> torch.Tensor:
    """Run SGLang's own MoeRunner with our backend; return the hidden states."""
    from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    config = MoeRunnerConfig(
        num_experts=problem.experts,
        num_local_experts=problem.e,
        top_k=problem.top_k,
        layer_id=5,
        inplace=False,
        routed_scaling_factor=problem.routed_scaling_factor,
        **options,
    )
    runner = MoeRunner(resolve_moe_runner_backend(NAME), config)
    output: torch.Tensor = runner.run(dispatch_output(inputs), info).hidden_states
    return output


# --------------------------------------------------------------------- SGLang's own Triton kernel

_TILES = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}


def interpret_triton_backend(monkeypatch: Any) -> None:
    """Replace the functions around SGLang's fused MoE kernel that need a GPU or absent packages.

    The kernel itself is interpreted by Triton.
    """
    from sglang.kernels.ops.moe import fused_moe_triton_kernels as kernels
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe as module

    def fused_experts_impl(*arguments: Any, **options: Any) -> torch.Tensor:
        return module.fused_experts_impl(*arguments[:7], False, *arguments[7:], **options)

    replacements: dict[str, Any] = {
        "moe_align_block_size": _align_pairs_to_blocks,
        "try_get_optimal_moe_config": lambda *_, **__: (_TILES, (None, None)),
        "moe_sum_reduce_triton": lambda rows, out, scale: out.copy_(rows.float().sum(1) * scale),
        "outplace_fused_experts": fused_experts_impl,
    }
    compiled = (
        "swiglu_gpt_oss_sigmoid_alpha",
        "swiglu_no_interleaved_with_alpha_and_limit",
        "_swiglu_silu_clamp_mul",
    )
    for name in compiled:
        replacements[name] = getattr(module, name)._torchdynamo_orig_callable
    for name, function in replacements.items():
        monkeypatch.setattr(module, name, function)
    monkeypatch.setattr(kernels, "scaled_fp8_quant", _scaled_fp8_quant)


def _align_pairs_to_blocks(
    ids_TK: torch.Tensor, block: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pairs sorted by expert, each block's expert, and the padded number of pairs.

    The pairs of each expert are padded to a multiple of `block`.
    """
    ids = ids_TK.flatten()
    pairs, expert_of_block = [], []
    for expert in (-1, *range(experts)):
        pairs_of_expert = (ids == expert).nonzero().flatten().tolist()
        pairs_of_expert += [len(ids)] * (-len(pairs_of_expert) % block)
        pairs += pairs_of_expert
        expert_of_block += [expert] * (len(pairs_of_expert) // block)
    return (
        torch.tensor(pairs, dtype=torch.int32),
        torch.tensor(expert_of_block, dtype=torch.int32),
        torch.tensor([len(pairs)], dtype=torch.int32),
    )


def _scaled_fp8_quant(
    x: torch.Tensor, scale: torch.Tensor | None = None, use_per_token_if_dynamic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    if scale is None and use_per_token_if_dynamic:
        scale = x.float().abs().amax(-1, keepdim=True) / 448
    elif scale is None:
        scale = x.float().abs().max().reshape(1) / 448
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
