"""vLLM's experts classes, for `modular_kernel.testing.engines`. This module does not import vLLM.

On a machine without a GPU, vLLM's Triton kernels run in Triton's interpreter, and operators of its
compiled extension are computed in torch (`compiled_operators`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import torch

from modular_kernel.integrations.engine import Engine
from modular_kernel.integrations.engine_process import (
    EnginePackage,
    install_interpreter,
    make_engine_environment,
)
from modular_kernel.integrations.vllm.layers import make_activation
from modular_kernel.spec.problem import ActivationSpec

# Name of an activation in the report -> the value of vLLM's MoEActivation, and its options. Limits
# are near 1 to affect many values. vLLM fixes the limits of swigluoai and swiglustep.
ACTIVATIONS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "silu": ("silu", {}),
    "swigluoai": ("swigluoai", {}),
    "silu with limit": ("silu", {"limit": 1.0}),
    "gelu": ("gelu", {}),
    "gelu_tanh": ("gelu_tanh", {}),
    "swigluoai_uninterleave": (
        "swigluoai_uninterleave",
        {"limit": 1.0, "alpha": 1.702, "beta": 1.0},
    ),
    "swiglustep": ("swiglustep", {}),
    "situ": ("situ", {"situ_beta": 1.5, "situ_linear_beta": 2.0}),
    "silu_no_mul": ("silu_no_mul", {}),
    "gelu_no_mul": ("gelu_no_mul", {}),
    "gelu_tanh_no_mul": ("gelu_tanh_no_mul", {}),
    "relu2_no_mul": ("relu2_no_mul", {}),
}


def make_activation_spec(name: str) -> ActivationSpec:
    """Return the activation that vLLM computes for a key of ACTIVATIONS."""
    value, options = ACTIVATIONS[name]
    return make_activation(value, **options)


def make_environment(*, has_gpu: bool) -> dict[str, str]:
    """Return the environment variables of a process that loads vLLM."""
    environment = make_engine_environment(has_gpu=has_gpu)
    environment["MK_VLLM"] = "0"  # disables our plugin, so that vLLM's own classes are checked
    environment.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return environment if has_gpu else environment | {"VLLM_TARGET_DEVICE": "cpu"}


def load_engine() -> Engine:
    """Load vLLM and return its experts classes.

    Raises UnsupportedError if vLLM is missing, cannot be imported, or has another version.
    """
    return _PACKAGE.load()


def prepare_cpu() -> None:
    """Prepare a process without a GPU to run vLLM's Triton kernels in the interpreter.

    Raises UnsupportedError if Triton's interpreter is not enabled.
    """
    from modular_kernel.integrations.vllm.compiled_operators import install_operators

    install_interpreter()
    with _pretend_triton_has_cpu_backend():
        import_module("vllm.triton_utils")
    install_operators()
    # vLLM queries whether the current stream is being captured in a CUDA graph.
    stream = SimpleNamespace(is_capturing=lambda: False)
    torch.accelerator.current_stream = lambda *_: stream  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False


@contextmanager
def _pretend_triton_has_cpu_backend() -> Iterator[None]:
    """Register a CPU backend in Triton. vLLM defines its kernels only if Triton has a backend."""
    backends = import_module("triton.backends").backends
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))
    try:
        yield
    finally:
        del backends["cpu"]


def run_program() -> None:
    """Run a Python program from the standard input, with vLLM prepared as in `load_engine`."""
    _PACKAGE.run_program()


_MODULE_PREFIX = "modular_kernel.integrations.vllm"
_PACKAGE = EnginePackage(
    "vllm",
    "vLLM",
    {"0.26": f"{_MODULE_PREFIX}.v0_26_classes", "0.33": f"{_MODULE_PREFIX}.v0_33_classes"},
    prepare_cpu,
)


if __name__ == "__main__":
    run_program()
