"""SGLang's MoE runners, for `modular_kernel.testing.engines`. This module does not import SGLang.

On a machine without a GPU, SGLang's Triton kernels run in Triton's interpreter, and operators of
its compiled extension are computed in torch (`compiled_operators`).
"""

from collections.abc import Mapping
from typing import Any

from modular_kernel.integrations.engine import Engine
from modular_kernel.integrations.engine_process import (
    EnginePackage,
    install_interpreter,
    make_engine_environment,
)
from modular_kernel.spec.problem import ActivationSpec

_SWIGLU_OAI_OPTIONS = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 1.0}
# Name of an activation in the report -> options of SGLang's layer, and what they specify. Limits
# are near 1 to affect many values.
ACTIVATIONS: Mapping[str, tuple[Mapping[str, Any], ActivationSpec]] = {
    "silu": ({}, ActivationSpec("silu")),
    "silu with alpha and limit": (_SWIGLU_OAI_OPTIONS, ActivationSpec("swiglu_oai", 1.702, 1.0)),
    "silu with alpha and limit, not interleaved": (
        {**_SWIGLU_OAI_OPTIONS, "gate_up_interleaved": False},
        ActivationSpec("swiglu_oai", 1.702, 1.0, interleaved=False),
    ),
    "silu with limit": (
        {"gemm1_clamp_limit": 1.0},
        ActivationSpec("swiglu_clamp_after", limit=1.0),
    ),
    "gelu": ({"activation": "gelu"}, ActivationSpec("gelu")),
    "gelu_tanh": ({"activation": "gelu_tanh"}, ActivationSpec("gelu_tanh")),
    "situ": ({"activation": "situ", "gemm1_alpha": 1.5}, ActivationSpec("situ", 1.5)),
    "situ with limit": (
        {"activation": "situ", "gemm1_alpha": 1.5, "gemm1_clamp_limit": 2.0},
        ActivationSpec("situ", 1.5, 2.0),
    ),
    "silu, not gated": ({"is_gated": False}, ActivationSpec("silu_no_mul")),
    "gelu, not gated": (
        {"activation": "gelu", "is_gated": False},
        ActivationSpec("gelu_no_mul"),
    ),
    "relu2, not gated": ({"activation": "relu2", "is_gated": False}, ActivationSpec("relu2")),
}


def make_environment(*, has_gpu: bool) -> dict[str, str]:
    """Return the environment variables of a process that loads SGLang."""
    # MK_SGLANG=0 disables our plugin, so that SGLang's own runners are checked.
    return make_engine_environment(has_gpu=has_gpu) | {"MK_SGLANG": "0"}


def load_engine() -> Engine:
    """Load SGLang and return its MoE runners.

    Raises UnsupportedError if SGLang is missing, cannot be imported, or has another version.
    """
    return _PACKAGE.load()


def prepare_cpu() -> None:
    """Prepare a process without a GPU to run SGLang's Triton kernels in the interpreter.

    Raises UnsupportedError if Triton's interpreter is not enabled.
    """
    from modular_kernel.integrations.sglang.absent_packages import mock_absent_packages
    from modular_kernel.integrations.sglang.compiled_operators import install_operators

    install_interpreter()
    mock_absent_packages()
    install_operators()


def run_program() -> None:
    """Run a Python program from the standard input, with SGLang prepared as in `load_engine`."""
    _PACKAGE.run_program()


_PACKAGE = EnginePackage(
    "sglang",
    "SGLang",
    {"0.5.23": "modular_kernel.integrations.sglang.v0_5_23_classes"},
    prepare_cpu,
)


if __name__ == "__main__":
    run_program()
