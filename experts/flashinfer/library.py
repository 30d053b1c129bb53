"""FlashInfer: where it is, what it is told by, and its fused layer.

The library builds the layer's kernels where they are first used, which takes many minutes, unless
they were built before (its ahead-of-time build, or the package flashinfer-jit-cache).
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
from modular_kernel.utils.package_probes import Provider, importing

ALIGNMENT = 16  # bytes, of rows and of what is read by TMA

FLASHINFER = Provider(
    name="flashinfer",
    places=("flashinfer",),
    signs=(
        # Since 0.6.16: the sums can be those of a fixed order, and the workspace is the caller's.
        ("fused_moe/core.py", "def cutlass_fused_moe_workspace_size("),
        ("fused_moe/core.py", "use_fused_finalize"),
    ),
    need="FlashInfer 0.6.16 or newer, with cutlass_fused_moe_workspace_size",
    source="pip install flashinfer-python (written for 0.7.2), and build its kernels before",
    version_file="_build_meta.py",
)

# The library's name of each activation that it computes as `ActivationSpec` has it.
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

# Those whose clamps are CUTLASS's minimum and maximum: a NaN becomes the limit.
LOSE_NAN = frozenset({"swiglu_oai", "swiglu_clamp_before", "swiglu_clamp_after"})


@cache
def load() -> Any:
    """Import the parts of FlashInfer that are used.

    ConfigurationError if it is not there, or cannot be imported.
    """
    with importing(FLASHINFER, need="one that goes with this torch and CUDA"):
        module = import_module("flashinfer.fused_moe")
        return SimpleNamespace(
            cutlass_fused_moe=module.cutlass_fused_moe,
            cutlass_fused_moe_workspace_size=module.cutlass_fused_moe_workspace_size,
            ActivationType=module.ActivationType,
        )


def is_blockwise(problem: Problem) -> bool:
    """Whether the layer is one of fp8 weights with a scale for each block."""
    return problem.scheme.granularity == "block"


def input_dtype(problem: Problem) -> torch.dtype:
    """Return what x must be: by blocks the library quantizes it itself."""
    one_scale = problem.scheme.quantized and not is_blockwise(problem)
    return STORAGE[problem.scheme.activation] if one_scale else problem.dtype


def workspace_bytes(library: Any, problem: Problem, tokens: int) -> int:
    """Return the bytes that calls of at most so many tokens take, from the library."""
    found: int = library.cutlass_fused_moe_workspace_size(
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
    return found


@dataclass(frozen=True)
class Layer:
    """One call's tensors, all contiguous and on 16-byte addresses.

    x_TH as `input_dtype`. ids_TK int32, local, -1 for a skipped pair, none twice in a token;
    weights_TK float32. w1 (e, N, H), up rows first, and w2 (e, H, I). scales: as the library
    counts them: none; or w1's by a1's (e,), one by a2 (), w2's by a2's (e,), a1 (); or w1's and
    w2's by blocks. act_3e: alpha, beta and limit of each expert where the activation has some.
    workspace: uint8, of `workspace_bytes`, on 128 bytes. output (T, H).
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


def run(library: Any, problem: Problem, layer: Layer) -> None:
    """Write the weighted sums of the layer: in a fixed order, without atomics."""
    library.cutlass_fused_moe(
        layer.x_TH,
        layer.ids_TK,
        layer.weights_TK,
        layer.w1,
        layer.w2,
        problem.dtype,
        list(layer.scales),
        output=layer.output,
        use_deepseek_fp8_block_scale=is_blockwise(problem),
        activation_type=activation_type(library, problem),
        use_fused_finalize=False,
        workspace_buffer=layer.workspace,
        **_constants(problem, layer.act_3e),
    )


def activation_numbers(problem: Problem) -> tuple[float, ...]:
    """Return alpha, beta and limit as the library has them; none if it needs none."""
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
    """Return the library's word for the activation; UnsupportedError if this version has none."""
    name = ACTIVATIONS[problem.act.kind]
    try:
        return library.ActivationType[name]
    except KeyError:
        need = f"a FlashInfer that has {name} (0.7.2 does)"
        raise UnsupportedError("activation", got=problem.act.kind, need=need) from None
