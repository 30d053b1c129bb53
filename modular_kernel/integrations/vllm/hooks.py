"""Hooks into the functions with which vLLM selects the experts class of a layer.

vLLM has such a function for each kind of quantization, in a module of its folder `oracle`. When
vLLM imports such a module, the function is replaced with one that offers each layer to this package
first. This module does not import vLLM.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, Protocol

from modular_kernel.errors import ModularKernelError, UnsupportedError
from modular_kernel.utils.after_import import call_after_import

LOG = logging.getLogger("vllm.modular_kernel")

_FOLDER = "vllm.model_executor.layers.fused_moe.oracle"
_ORACLE_NAMES = ("unquantized", "fp8", "int8", "int_wna16", "mxfp4", "nvfp4")
ORIGINAL_ATTRIBUTE = "modular_kernel_original"


class Oracle(Protocol):
    """A module of vLLM's `oracle`, and how its layers are offered to our parts.

    module: its full name. select_functions: its functions that select a backend and an experts
    class. later_functions: functions that vLLM calls later for a layer of such a class.
    """

    module: str
    select_functions: tuple[str, ...]
    later_functions: tuple[str, ...]

    def missing(self, module: ModuleType) -> Sequence[str]:
        """Return the names that the oracle relies on and that this version of vLLM lacks."""

    def offer(self, function: str, arguments: dict[str, Any]) -> Any | None:
        """Return the result of `function` for a layer that our parts support; None otherwise.

        For one of select_functions, raises ModularKernelError with the reason if our parts do not
        support the layer.
        """


def install(version_module: str) -> None:
    """Replace the functions of all oracles, now or when vLLM imports them.

    May be called several times. version_module: the module for this version of vLLM, whose
    `ORACLES` maps names to `Oracle`s. It is imported together with the first oracle.
    """
    for name in _ORACLE_NAMES:
        call_after_import(f"{_FOLDER}.{name}", partial(_install_into, name, version_module))


def _install_into(name: str, version_module: str) -> None:
    """Replace all functions of an oracle, or none and log the reason. Raises nothing."""
    try:
        oracles: dict[str, Oracle] = import_module(version_module).ORACLES
        oracle = oracles.get(name)
        if oracle is None:
            return
        module = import_module(oracle.module)
        functions = oracle.select_functions + oracle.later_functions
        if any(hasattr(getattr(module, f, None), ORIGINAL_ATTRIBUTE) for f in functions):
            return  # all were replaced before
        missing = [f for f in functions if not callable(getattr(module, f, None))]
        missing += oracle.missing(module)
        if missing:
            raise UnsupportedError("vLLM", got=f"no {', '.join(missing)}", need="all of them")
        replacements = {f: _make_replacement(oracle, f, getattr(module, f)) for f in functions}
    except Exception as error:  # noqa: BLE001 (raised to vLLM, it would end its import)
        LOG.warning("modular_kernel leaves layers of %s to vLLM: %s", name, _one_line(error))
        return
    for function, replacement in replacements.items():
        replace_everywhere(module, function, replacement)


def replace_everywhere(module: ModuleType, name: str, function: Callable[..., Any]) -> None:
    """Replace a function in its module, and in vLLM's modules that have imported it by name."""
    original = getattr(module, name)
    for other in list(sys.modules.values()):
        is_vllm = getattr(other, "__name__", "").startswith("vllm.")
        if is_vllm and vars(other).get(name) is original:
            setattr(other, name, function)


def _make_replacement(
    oracle: Oracle, name: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that offers a layer to `oracle`, and calls `function` if it is declined."""
    parameters = signature(function)

    def offer(*args: Any, **kwargs: Any) -> Any:
        return oracle.offer(name, parameters.bind(*args, **kwargs).arguments)

    def select(*args: Any, **kwargs: Any) -> Any:
        try:
            selected = offer(*args, **kwargs)
        except ModularKernelError as error:
            log_once(f"modular_kernel leaves a layer to vLLM ({name}): {_one_line(error)}")
            selected = None
        except Exception as error:  # noqa: BLE001 (vLLM can still run the layer)
            LOG.warning("modular_kernel failed and leaves a layer to vLLM: %r", error)
            selected = None
        return function(*args, **kwargs) if selected is None else selected

    def follow(*args: Any, **kwargs: Any) -> Any:
        result = offer(*args, **kwargs)
        return function(*args, **kwargs) if result is None else result

    replacement = wraps(function)(select if name in oracle.select_functions else follow)
    setattr(replacement, ORIGINAL_ATTRIBUTE, function)
    return replacement


@cache
def log_once(message: str) -> None:
    """Log a message once: most layers of a model have the same one."""
    LOG.info("%s", message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or repr(error)
