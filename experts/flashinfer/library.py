"""FlashInfer: where to find the library, and a wrapper of its fused MoE layer.

FlashInfer compiles the kernels of the layer on first use, which takes many minutes, unless they
come from its ahead-of-time build or from the package flashinfer-jit-cache.
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
from modular_kernel.utils.package_probes import PackageProbe, importing

ALIGNMENT = 16  # alignment in bytes of rows and of tensors that TMA reads

FLASHINFER = PackageProbe(
    name="flashinfer",
    places=("flashinfer",),
    markers=(
        # Since 0.6.16: sums in a fixed order, and a workspace allocated by the caller.
        ("fused_moe/core.py", "def cutlass_fused_moe_workspace_size("),
        ("fused_moe/core.py", "use_fused_finalize"),
    ),
    need="FlashInfer 0.6.16 or newer, with cutlass_fused_moe_workspace_size",
    source="pip install flashinfer-python (written for 0.7.2), and build its kernels before",
    version_file="_build_meta.py",
)

# FlashInfer's names of the activations that it computes as `ActivationSpec` defines them.
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

# Activations that clamp with CUTLASS's minimum and maximum, which turn a NaN into the limit.
NAN_CLAMPING_ACTIVATIONS = frozenset({"swiglu_oai", "swiglu_clamp_before", "swiglu_clamp_after"})


@cache
def load() -> Any:
    """Import the functions and enums of FlashInfer that are used.

    Raise ConfigurationError if FlashInfer is missing or cannot be imported.
    """
    with importing(FLASHINFER, need="a build for this torch and CUDA"):
        module = import_module("flashinfer.fused_moe")
        return SimpleNamespace(
            cutlass_fused_moe=module.cutlass_fused_moe,
            cutlass_fused_moe_workspace_size=module.cutlass_fused_moe_workspace_size,
            ActivationType=module.ActivationType,
        )


def is_blockwise(problem: Problem) -> bool:
    """Return whether the scheme has one scale per block of weights."""
    return problem.scheme.granularity == "block"


def input_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of x for the library, which quantizes x itself if there are block scales."""
    is_per_tensor = problem.scheme.quantized and not is_blockwise(problem)
    return STORAGE[problem.scheme.activation] if is_per_tensor else problem.dtype


def workspace_bytes(library: Any, problem: Problem, tokens: int) -> int:
    """Return the workspace size that the library requires for calls of at most `tokens` tokens."""
    nbytes: int = library.cutlass_fused_moe_workspace_size(
        max(1, tokens),
        problem.hidden,
        problem.intermediate,
        problem.e,
        problem.top_k,
        x_dtype=input_dtype(problem),
        weight_dtype=_weight_dtype(problem),
        output_dtype=problem.dtype,
        activation_type=activation_type(library, problem),
        use_deepseek_fp8_block_scale=is_blockwise(problem),
        use_fused_finalize=False,
    )
    return nbytes


@dataclass(frozen=True)
class MoeArguments:
    """The tensors of one call, all contiguous and on 16-byte addresses.

    x_TH: dtype as in `input_dtype`.
    ids_TK: int32 local ids, -1 for a skipped pair; no expert twice in a token.
    weights_TK: float32.
    w1: (e, N, H), up rows first.
    w2: (e, H, I).
    scales: in the library's order. None for 16 bits. Per tensor: w1's times a1's (e,), 1 / a2 (),
        w2's times a2's (e,), a1 (). Per block: w1's and w2's.
    act_3e: alpha, beta and limit of each expert, if the activation has any.
    workspace: uint8, of `workspace_bytes`, on a 128-byte address.
    output: (T, H).
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
    """Write the weighted sums of the layer, added in a fixed order, without atomics."""
    library.cutlass_fused_moe(
        arguments.x_TH,
        arguments.ids_TK,
        arguments.weights_TK,
        arguments.w1,
        arguments.w2,
        problem.dtype,
        list(arguments.scales),
        output=arguments.output,
        use_deepseek_fp8_block_scale=is_blockwise(problem),
        activation_type=activation_type(library, problem),
        use_fused_finalize=False,
        workspace_buffer=arguments.workspace,
        **_constants(problem, arguments.act_3e),
    )


def activation_parameters(problem: Problem) -> tuple[float, ...]:
    """Return (alpha, beta, limit) in the library's convention; () if the activation has none."""
    act = problem.act
    limit = act.limit or 0.0
    return {
        "swiglu_oai": (act.alpha or 0.0, 1.0, limit),
        "swiglu_clamp_before": (1.0, 0.0, limit),
        "swiglu_clamp_after": (1.0, 0.0, limit),
        "situ": (act.alpha or 0.0, limit, 0.0),
    }.get(act.kind, ())


def _constants(problem: Problem, act_3e: torch.Tensor | None) -> dict[str, torch.Tensor]:
    if act_3e is None:
        return {}
    if problem.act.kind == "situ":
        return {"situ_beta": act_3e[0], "situ_linear_beta": act_3e[1]}
    if problem.act.kind == "swiglu_clamp_after":
        return {"swiglu_limit": act_3e[2]}
    names = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
    return dict(zip(names, act_3e, strict=True))


def _weight_dtype(problem: Problem) -> torch.dtype:
    scheme = problem.scheme
    return STORAGE[scheme.weight] if scheme.quantized else problem.dtype


def activation_type(library: Any, problem: Problem) -> Any:
    """Return the library's enum value of the activation.

    Raise UnsupportedError if the installed version has none.
    """
    name = ACTIVATIONS[problem.act.kind]
    try:
        return library.ActivationType[name]
    except KeyError:
        need = f"a FlashInfer that has {name} (0.7.2 does)"
        raise UnsupportedError("activation", got=problem.act.kind, need=need) from None
