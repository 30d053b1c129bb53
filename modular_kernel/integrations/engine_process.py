"""Loads an engine into the current process. The modules of all engines share this module.

The module itself does not import an engine.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from modular_kernel.errors import UnsupportedError
from modular_kernel.integrations.engine import Engine
from modular_kernel.settings import make_child_environment


@dataclass(frozen=True)
class EnginePackage:
    """The Python package of an engine.

    name: name of the package.
    title: name of the engine in messages.
    modules: maps a supported version prefix, such as "0.33", to the full name of the module that
        defines `make_engine` for it.
    prepare_cpu: makes the package importable and its kernels runnable without a GPU.
    """

    name: str
    title: str
    modules: Mapping[str, str]
    prepare_cpu: Callable[[], None]

    def find_module(self) -> str:
        """Return the full name of the module that supports the installed version.

        Raises UnsupportedError if the package is missing or has another version.
        """
        need = f"{self.title} {' or '.join(self.modules)}"
        try:
            installed_version = version(self.name)
        except PackageNotFoundError:
            raise UnsupportedError(self.title, got="not installed", need=need) from None
        version_parts = installed_version.split("+")[0].split(".")
        for supported, module in self.modules.items():
            if version_parts[: len(supported.split("."))] == supported.split("."):
                return module
        raise UnsupportedError(self.title, got=installed_version, need=need)

    def load(self) -> Engine:
        """Load the engine.

        Raises UnsupportedError if the package is missing, cannot be imported, or has a version that
        is not supported.
        """
        module, need = self.find_module(), "a complete installation"
        if find_spec(self.name) is None:
            raise UnsupportedError(self.title, got="not importable", need=need)
        try:
            if not torch.cuda.is_available():
                self.prepare_cpu()
            engine: Engine = import_module(module).make_engine()
        except (ImportError, AttributeError, TypeError) as error:
            got = f"{version(self.name)}, {type(error).__name__}: {error}"
            raise UnsupportedError(self.title, got=got, need=need) from error
        return engine

    def run_program(self) -> None:
        """Run the Python program on standard input, after preparing the package as in `load`.

        Without a GPU, `prepare_program` of the module for the installed version is called first.
        """
        if not torch.cuda.is_available():
            self.prepare_cpu()
            import_module(self.find_module()).prepare_program()
        exec(compile(sys.stdin.read(), "reproducer.py", "exec"), {"__name__": "__main__"})


def make_engine_environment(*, has_gpu: bool) -> dict[str, str]:
    """Return the environment variables of a process that loads an engine.

    Without a GPU, Triton kernels are interpreted, and torch.compile is disabled, because it would
    need a C++ compiler.
    """
    environment = make_child_environment(interpreted=not has_gpu)
    if not has_gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    return environment


def install_interpreter() -> None:
    """Patch Triton's interpreter so that its results match those of a GPU.

    Raises UnsupportedError if the interpreter is not enabled.
    """
    from modular_kernel.interpreter import patch

    if not patch.is_active():
        raise UnsupportedError("TRITON_INTERPRET", got="not set", need="1, without a GPU")
    patch.install()


def find_missing_requirement(error: BaseException, device: str) -> str | None:
    """Return the requirement whose absence on this machine caused `error`.

    Returns None if the error has another cause.

    error: exception that the engine's code raised.
    device: "cpu" or "cuda".
    """
    message = str(error)
    if isinstance(error, ImportError):
        return message
    if isinstance(error, AttributeError) and "_OpNamespace" in message:
        return f"no compiled operator {message.rpartition('attribute ')[2]}"
    if device == "cpu" and "`_semantic` argument must be provided" in message:
        return "Triton's interpreter cannot run a function of its kernel"
    if device == "cpu" and ("Torch not compiled with CUDA" in message or "NVIDIA" in message):
        return "it needs CUDA"
    return None
