"""Find and load FlashInfer, and wrap its fused MoE layer (cutlass_fused_moe).

FlashInfer compiles the kernels of the layer on first use, which takes many minutes, unless it was
built ahead of time or the package flashinfer-jit-cache is installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from modular_kernel.errors import UnsupportedError
from modular_kernel.quant.quantized_weights import STORAGE
from modular_kernel.spec.problem import Problem
from modular_kernel.utils.package_probes import PackageProbe, import_context

ALIGNMENT_BYTES = 16  # alignment of rows and of tensors that TMA reads

FLASHINFER = PackageProbe(
    name="flashinfer",
    locations=("flashinfer",),
    markers=(
        # Since 0.6.16, sums can have a fixed order, and the caller can allocate the workspace.
        ("fused_moe/core.py", "def cutlass_fused_moe_workspace_size("),
        ("fused_moe/core.py", "use_fused_finalize"),
    ),
    need="FlashInfer 0.6.16 or newer, with cutlass_fused_moe_workspace_size",
    source="pip install flashinfer-python==0.7.2, and build its kernels before use",
    version_file="_build_meta.py",
)

# Kind of `ActivationSpec` -> FlashInfer's name of the same activation.
ACTIVATIONS: Mapping[str, str] = {
    "silu": "Swiglu",
    "gelu": "Geglu",
    "gelu_tanh": "GegluTanh",
    "swiglu_oai": "SwigluBias",
    "swiglu_clamp_before": "SwigluBias",
    "swiglu_clamp_after": "SwigluStep",
    "situ": "Situ",
    "relu2": "Relu2",
    "silu_no_mul": "Silu",
    "gelu_no_mul": "Gelu",
}

# Activations that clamp with CUTLASS's minimum and maximum, which replace a NaN by the limit.
NAN_CLAMPING_ACTIVATIONS = frozenset({"swiglu_oai", "swiglu_clamp_before", "swiglu_clamp_after"})


@cache
def load() -> Any:
    """Import FlashInfer; return a namespace of the functions and enums used in this module.

    Raise ConfigurationError if FlashInfer is missing or cannot be imported.
    """
    with import_context(FLASHINFER, need="a build for this torch and CUDA"):
        module = import_module("flashinfer.fused_moe")
        return SimpleNamespace(
            cutlass_fused_moe=module.cutlass_fused_moe,
            cutlass_fused_moe_workspace_size=module.cutlass_fused_moe_workspace_size,
            ActivationType=module.ActivationType,
        )


def has_block_scales(problem: Problem) -> bool:
    """Return whether weights have one scale per block."""
    return problem.scheme.granularity == "block"


def input_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of x in a call of the library.

    If weights have block scales, the library quantizes x itself.
    """
    has_tensor_scales = problem.scheme.quantized and not has_block_scales(problem)
    return STORAGE[problem.scheme.activation] if has_tensor_scales else problem.dtype


def workspace_bytes(library: Any, problem: Problem, max_tokens: int) -> int:
    """Return the size of the library's workspace for at most max_tokens tokens, in bytes."""
    nbytes: int = library.cutlass_fused_moe_workspace_size(
        max(1, max_tokens),
        problem.hidden,
        problem.intermediate,
        problem.e,
        problem.top_k,
        x_dtype=input_dtype(problem),
        weight_dtype=_get_weight_dtype(problem),
        output_dtype=problem.dtype,
        activation_type=activation_type(library, problem),
        use_deepseek_fp8_block_scale=has_block_scales(problem),
        use_fused_finalize=False,
    )
    return nbytes


@dataclass(frozen=True)
class MoeArguments:
    """The tensors of one call. All are contiguous and 16-byte aligned.

    x_TH: the tokens, in the dtype of `input_dtype`.
    ids_TK: int32 local expert ids, -1 for a skipped pair. A token has no expert more than once.
    weights_TK: float32 router weights.
    w1: (e, N, H), with the up rows before the gate rows.
    w2: (e, H, I).
    scales: the scales in the library's order:
        16-bit schemes: ().
        per-tensor scales: w1_scale * a1_scale (e,), 1 / a2_scale (), w2_scale * a2_scale (e,),
            a1_scale ().
        block scales: w1_scale, w2_scale.
    act_3e: (3, e) float32, the alpha, beta and limit of each expert; None if the activation has no
        parameters.
    workspace: uint8, `workspace_bytes` long and 128-byte aligned.
    output: (T, H), in the dtype of the problem.
    """

    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    scales: tuple[torch.Tensor, ...]
    act_3e: torch.Tensor | None
    workspace: torch.Tensor
    output: torch.Tensor


def run(library: Any, problem: Problem, arguments: MoeArguments) -> None:
    """Run the layer, which writes arguments.output. Sums over top-k have a fixed order."""
    library.cutlass_fused_moe(
        arguments.x_TH,
        arguments.ids_TK,
        arguments.weights_TK,
        arguments.w1,
        arguments.w2,
        problem.dtype,
        list(arguments.scales),
        output=arguments.output,
        use_deepseek_fp8_block_scale=has_block_scales(problem),
        activation_type=activation_type(library, problem),
        use_fused_finalize=False,
        workspace_buffer=arguments.workspace,
        **_make_activation_arguments(problem, arguments.act_3e),
    )


def activation_parameters(problem: Problem) -> tuple[float, ...]:
    """Return (alpha, beta, limit) as the library defines them, or () if the activation has none."""
    act = problem.act
    limit = act.limit or 0.0
    return {
        "swiglu_oai": (act.alpha or 0.0, 1.0, limit),
        "swiglu_clamp_before": (1.0, 0.0, limit),
        "swiglu_clamp_after": (1.0, 0.0, limit),
        "situ": (act.alpha or 0.0, limit, 0.0),
    }.get(act.kind, ())


def _make_activation_arguments(
    problem: Problem, act_3e: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    if act_3e is None:
        return {}
    if problem.act.kind == "situ":
        return {"situ_beta": act_3e[0], "situ_linear_beta": act_3e[1]}
    if problem.act.kind == "swiglu_clamp_after":
        return {"swiglu_limit": act_3e[2]}
    names = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
    return dict(zip(names, act_3e, strict=True))


def _get_weight_dtype(problem: Problem) -> torch.dtype:
    scheme = problem.scheme
    return STORAGE[scheme.weight] if scheme.quantized else problem.dtype


def activation_type(library: Any, problem: Problem) -> Any:
    """Return the activation as a member of the library's enum.

    Raise UnsupportedError if the installed version does not have this activation.
    """
    name = ACTIVATIONS[problem.act.kind]
    try:
        return library.ActivationType[name]
    except KeyError:
        need = f"a version of FlashInfer with ActivationType.{name}, such as 0.7.2"
        raise UnsupportedError("activation", got=problem.act.kind, need=need) from None
