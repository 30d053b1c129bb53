"""vLLM's experts classes, for `modular_kernel.testing.engines`. This module does not import vLLM.

On a machine without a GPU, vLLM's Triton kernels run in Triton's interpreter, and operators of its
compiled extension are computed in torch (`compiled_operators`).
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import SimpleNamespace

import torch

from modular_kernel.errors import UnsupportedError
from modular_kernel.integrations.engine import Engine
from modular_kernel.integrations.vllm import _parse_minor_version
from modular_kernel.integrations.vllm.layers import make_activation
from modular_kernel.settings import make_child_environment
from modular_kernel.spec.problem import ActivationSpec

# The module for each supported minor version of vLLM.
MODULE_BY_VERSION = {(0, 26): "v0_26_classes", (0, 33): "v0_33_classes"}

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
    """Return the environment variables of a process that loads vLLM.

    Without a GPU, torch.compile is disabled, because vLLM would need a C++ compiler for it.
    """
    environment = make_child_environment(interpreted=not has_gpu)
    environment["MK_VLLM"] = "0"  # the classes are vLLM's own
    environment.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not has_gpu:
        environment |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1",
        }
    return environment


def load_engine() -> Engine:
    """Load vLLM and return its experts classes.

    Raises UnsupportedError if vLLM is missing, cannot be imported, or has another version.
    """
    need = " or ".join(f"{major}.{minor}" for major, minor in MODULE_BY_VERSION)
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        raise UnsupportedError("vLLM", got="not installed", need=f"vLLM {need}") from None
    name = MODULE_BY_VERSION.get(_parse_minor_version(installed))
    if name is None:
        raise UnsupportedError("vLLM", got=installed, need=f"vLLM {need}")
    if find_spec("vllm") is None:
        raise UnsupportedError("vLLM", got="not importable", need="a complete installation")
    has_gpu = torch.cuda.is_available()
    try:
        if not has_gpu:
            prepare_cpu()
        engine: Engine = import_module(f"modular_kernel.integrations.vllm.{name}").make_engine()
    except (ImportError, AttributeError, TypeError) as error:
        got = f"{installed}, {type(error).__name__}: {error}"
        raise UnsupportedError("vLLM", got=got, need="a complete installation") from error
    return engine


def prepare_cpu() -> None:
    """Run vLLM's Triton kernels in the interpreter, for a process without a GPU.

    Raises UnsupportedError if Triton's interpreter is not enabled.
    """
    from modular_kernel.integrations.vllm.compiled_operators import install_operators
    from modular_kernel.interpreter import patch

    if not patch.is_active():
        raise UnsupportedError("TRITON_INTERPRET", got="not set", need="1, without a GPU")
    patch.install()
    with _pretend_triton_has_cpu_backend():
        import_module("vllm.triton_utils")
    install_operators()
    # vLLM asks whether it runs inside a CUDA graph.
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
    if not torch.cuda.is_available():
        prepare_cpu()
        name = MODULE_BY_VERSION[_parse_minor_version(version("vllm"))]
        import_module(f"modular_kernel.integrations.vllm.{name}").replace_workspaces()
    exec(compile(sys.stdin.read(), "reproducer.py", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    run_program()
