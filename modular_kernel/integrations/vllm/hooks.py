"""Hooks into the functions with which vLLM selects the experts class of a layer.

vLLM has a module with such functions for each kind of quantization, in its folder `oracle`. The
functions are replaced when vLLM imports the module. A replacement returns one of our experts
classes if a part of this package supports the layer, and otherwise calls vLLM's function. This
module does not import vLLM.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, partial, wraps
from importlib import import_module
from inspect import signature
from types import MappingProxyType, ModuleType
from typing import Any, Protocol

from modular_kernel.errors import ModularKernelError, UnsupportedError
from modular_kernel.utils.after_import import call_after_import

LOG = logging.getLogger("vllm.modular_kernel")

_ORACLE_PACKAGE = "vllm.model_executor.layers.fused_moe.oracle"
_ORACLE_NAMES = ("unquantized", "fp8", "int8", "int_wna16", "mxfp4", "nvfp4")
ORIGINAL_ATTRIBUTE = "modular_kernel_original"


class Oracle(Protocol):
    """The replacements of functions in one module of vLLM's `oracle`.

    module: full name of the module.
    select_functions: names of functions that select a backend and an experts class for a layer.
    later_functions: names of functions that vLLM calls after it has selected the class of a layer.
    callers: (module, class) pairs of quantization methods whose constructors call a select
        function. Their arguments are passed to `handle` as well.
    """

    module: str
    select_functions: tuple[str, ...]
    later_functions: tuple[str, ...]
    callers: tuple[tuple[str, str], ...]

    def find_missing(self, module: ModuleType) -> Sequence[str]:
        """Return the required names that this version of vLLM does not have."""

    def handle(self, function: str, arguments: dict[str, Any]) -> Any | None:
        """Return the result of a replaced function, or None if vLLM's function should be called.

        A select function may also raise ModularKernelError with the reason why our parts do not
        support the layer.

        function: name of the function.
        arguments: arguments of the function by parameter name. Within the constructor of one of
            `callers`, they include the constructor's other arguments.
        """


def install(version_module: str) -> None:
    """Replace the functions of all oracle modules, now or when vLLM imports them.

    This function can be called more than once.

    version_module: name of the module for this version of vLLM. Its `ORACLES` maps the names of
        oracle modules to `Oracle` objects. The module is imported with the first oracle module.
    """
    for name in _ORACLE_NAMES:
        replace = partial(_replace_functions, name, version_module)
        call_after_import(f"{_ORACLE_PACKAGE}.{name}", replace)


def _replace_functions(name: str, version_module: str) -> None:
    """Replace the functions of an oracle module, or log why this is not possible. Never raises."""
    try:
        oracles: dict[str, Oracle] = import_module(version_module).ORACLES
        oracle = oracles.get(name)
        if oracle is None:
            return
        module = import_module(oracle.module)
        functions = oracle.select_functions + oracle.later_functions
        if any(hasattr(getattr(module, f, None), ORIGINAL_ATTRIBUTE) for f in functions):
            return  # the functions have been replaced before
        missing_names = [f for f in functions if not callable(getattr(module, f, None))]
        missing_names += oracle.find_missing(module)
        if missing_names:
            need = "a version of vLLM that has these names"
            raise UnsupportedError("vLLM", got=f"no {', '.join(missing_names)}", need=need)
        replacements = {f: _make_replacement(oracle, f, getattr(module, f)) for f in functions}
    except Exception as error:  # noqa: BLE001 (an exception would abort vLLM's import)
        LOG.warning("modular_kernel leaves layers of %s to vLLM: %s", name, _format_one_line(error))
        return
    for function, replacement in replacements.items():
        replace_everywhere(module, function, replacement)
    for caller_module, caller in oracle.callers:
        call_after_import(caller_module, partial(_record_arguments, caller_module, caller))


# Arguments of the constructor of one of `Oracle.callers`, while it runs.
_constructor_arguments: ContextVar[Mapping[str, Any]] = ContextVar(
    "modular_kernel_constructor_arguments", default=MappingProxyType({})
)


def _record_arguments(module: str, name: str) -> None:
    """Replace the constructor of a class with one that records its arguments while it runs."""
    cls = getattr(import_module(module), name, None)
    if cls is None:
        LOG.warning("modular_kernel does not find %s in %s", name, module)
        return
    original = cls.__init__
    if hasattr(original, ORIGINAL_ATTRIBUTE):
        return
    parameters = signature(original)

    @wraps(original)
    def construct(*args: Any, **kwargs: Any) -> None:
        arguments = parameters.bind(*args, **kwargs).arguments
        token = _constructor_arguments.set(arguments)
        try:
            original(*args, **kwargs)
        finally:
            _constructor_arguments.reset(token)

    setattr(construct, ORIGINAL_ATTRIBUTE, original)
    cls.__init__ = construct


def replace_everywhere(module: ModuleType, name: str, function: Callable[..., Any]) -> None:
    """Replace a function in its module and in all modules of vLLM that have imported it by name."""
    original = getattr(module, name)
    for importer in list(sys.modules.values()):
        is_vllm = getattr(importer, "__name__", "").startswith("vllm.")
        if is_vllm and vars(importer).get(name) is original:
            setattr(importer, name, function)


def _make_replacement(
    oracle: Oracle, name: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls `oracle.handle` and, if the result is None, `function`."""
    parameters = signature(function)

    def handle(*args: Any, **kwargs: Any) -> Any:
        arguments = parameters.bind(*args, **kwargs).arguments
        return oracle.handle(name, {**_constructor_arguments.get(), **arguments})

    def run_select_function(*args: Any, **kwargs: Any) -> Any:
        try:
            selected = handle(*args, **kwargs)
        except ModularKernelError as error:
            log_once(f"modular_kernel leaves a layer to vLLM ({name}): {_format_one_line(error)}")
            selected = None
        except Exception as error:  # noqa: BLE001 (vLLM can still run the layer)
            LOG.warning("modular_kernel failed and leaves a layer to vLLM: %r", error)
            selected = None
        return function(*args, **kwargs) if selected is None else selected

    def run_later_function(*args: Any, **kwargs: Any) -> Any:
        result = handle(*args, **kwargs)
        return function(*args, **kwargs) if result is None else result

    is_select_function = name in oracle.select_functions
    replacement = wraps(function)(run_select_function if is_select_function else run_later_function)
    setattr(replacement, ORIGINAL_ATTRIBUTE, function)
    return replacement


@cache
def log_once(message: str) -> None:
    """Log a message once, because most layers of a model have the same message."""
    LOG.info("%s", message)


def _format_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or repr(error)
