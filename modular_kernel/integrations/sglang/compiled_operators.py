"""Torch implementations of SGLang's compiled operators, for machines without a GPU.

SGLang's Python and Triton code of a MoE layer can then run on a CPU, with Triton's interpreter.
Import this module after SGLang has become importable (`absent_packages`).
"""

from collections.abc import Callable, Mapping
from importlib import import_module

import torch
import torch.nn.functional as F

_FP8_MAX, _INT8_MAX = 448.0, 127.0
_MOE = "sglang.srt.layers.moe"


def install_operators() -> None:
    """Install the operators that SGLang's Triton runner calls.

    Functions that SGLang registers as operators for CUDA are registered for CPUs, too.
    """
    replacements: Mapping[str, Mapping[str, object]] = {
        "sglang.kernels.ops.quantization.fp8_kernel": {
            "sgl_per_tensor_quant_fp8": _per_tensor_quant_fp8,
            "sgl_per_token_quant_fp8": _per_token_quant_fp8,
        },
        # The interpreter cannot run libdevice's `round`, which SGLang's Triton kernel calls.
        "sglang.kernels.ops.moe.fused_moe_triton_kernels": {
            "per_token_quant_int8": _per_token_quant_int8
        },
        f"{_MOE}.moe_runner.triton_utils.moe_align_block_size": {
            "sgl_moe_align_block_size": _moe_align_block_size
        },
        # No tuned configuration has this name.
        f"{_MOE}.moe_runner.triton_utils.fused_moe_triton_config": {
            "get_device_name": lambda *_: "CPU"
        },
        f"{_MOE}.token_dispatcher.standard": {"get_device": lambda: "cpu"},
        # The platform determines the code that runs after the GEMMs. Select the code for sm_90.
        f"{_MOE}.moe_runner.triton_utils.fused_moe": {
            "_is_cuda": True,
            "is_arch_support_pdl": lambda: True,
            "silu_and_mul": _make_gated_activation(F.silu),
            "gelu_and_mul": _make_gated_activation(F.gelu),
            "gelu_tanh_and_mul": _make_gated_activation(
                lambda gate: F.gelu(gate, approximate="tanh")
            ),
            "moe_sum_reduce": _moe_sum_reduce,
        },
    }
    for name, attributes in replacements.items():
        for attribute, value in attributes.items():
            setattr(import_module(name), attribute, value)
    fused_moe = import_module(f"{_MOE}.moe_runner.triton_utils.fused_moe")
    for name in ("inplace_fused_experts", "outplace_fused_experts"):
        function = getattr(fused_moe, name).__wrapped__
        torch.library.impl(f"sglang::{name}", "cpu")(function)


def _write_fp8(output: torch.Tensor, input: torch.Tensor, scale: torch.Tensor) -> None:
    output.copy_((input.float() / scale).clamp(-_FP8_MAX, _FP8_MAX).to(output.dtype))


def _per_tensor_quant_fp8(
    input: torch.Tensor, output: torch.Tensor, scale: torch.Tensor, is_static: bool
) -> None:
    if not is_static and input.numel():  # amax is not defined without values
        scale.copy_(input.float().abs().amax() / _FP8_MAX)
    _write_fp8(output, input, scale)


def _per_token_quant_fp8(input: torch.Tensor, output: torch.Tensor, scale: torch.Tensor) -> None:
    scale.copy_(input.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / _FP8_MAX)
    _write_fp8(output, input, scale)


def _per_token_quant_int8(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = input.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / _INT8_MAX
    quotient = input.float() / scale
    rounded = torch.copysign((quotient.abs() + 0.5).floor(), quotient)  # halves away from zero
    return rounded.to(torch.int8), scale


def _make_gated_activation(
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., None]:
    def write(
        input: torch.Tensor,
        output: torch.Tensor,
        expert_ids: torch.Tensor | None = None,
        expert_step: int = 1,
    ) -> None:
        """Write the activations. Rows whose expert is -1 are not written."""
        gate, up = input.float().chunk(2, dim=-1)
        values = (activation(gate) * up).to(output.dtype)
        if expert_ids is not None:
            experts = expert_ids.repeat_interleave(expert_step)[: len(output), None]
            values = torch.where(experts < 0, output, values)
        output.copy_(values)

    return write


def _moe_sum_reduce(input: torch.Tensor, output: torch.Tensor, factor: float) -> None:
    output.copy_(input.float().sum(1) * factor)


def _moe_align_block_size(  # noqa: PLR0913 (SGLang's)
    topk_ids: torch.Tensor,
    num_buckets: int,
    block_size: int,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    cumsum_buffer: torch.Tensor,
    pad_sorted_ids: bool,
    ignore_invalid_expert: bool = False,
) -> None:
    """Sort pairs by expert, and pad the pairs of each expert to whole blocks.

    num_buckets: number of experts + 1. The first bucket has the pairs whose id is -1, and its
        blocks have the expert -1. It is empty if `ignore_invalid_expert` is set.
    """
    ids = topk_ids.flatten()
    sorted_ids.fill_(ids.numel())
    start = 0
    for expert in range(0 if ignore_invalid_expert else -1, num_buckets - 1):
        pairs = (ids == expert).nonzero().flatten()
        end = start + -(-len(pairs) // block_size) * block_size
        sorted_ids[start : start + len(pairs)] = pairs.to(sorted_ids.dtype)
        expert_ids[start // block_size : end // block_size] = expert
        start = end
    num_tokens_post_pad.fill_(start)
