"""Plugin for vLLM: MoE layers of supported models run on parts of this package.

vLLM calls `register` through the entry point `modular_kernel` of the group `vllm.general_plugins`.
Code that depends on the version of vLLM is in one module for each supported minor version.
"""

import logging
from importlib import import_module

from modular_kernel.settings import read_vllm_setting

__all__ = ["register"]

_LOG = logging.getLogger("vllm.modular_kernel")

# The module for each supported minor version of vLLM.
MODULE_BY_VERSION = {(0, 26): "v0_26", (0, 33): "v0_33"}


def register() -> None:
    """Install the plugin into the vLLM of this process, unless MK_VLLM is 0.

    This function can be called more than once and never raises. If the version of vLLM is not
    supported, or if anything fails, it logs one line, and vLLM runs as if this package were not
    installed. Triton and parts are not imported until vLLM builds a MoE layer.
    """
    try:
        if read_vllm_setting() == "0":
            return
        version: str = import_module("vllm").__version__
        module_name = MODULE_BY_VERSION.get(_parse_minor_version(version))
        if module_name is None:
            supported = ", ".join(f"{major}.{minor}" for major, minor in MODULE_BY_VERSION)
            _LOG.warning("modular_kernel is off: vLLM is %s, supported: %s", version, supported)
            return
        hooks = import_module("modular_kernel.integrations.vllm.hooks")
        hooks.install(f"modular_kernel.integrations.vllm.{module_name}")
    except Exception as error:  # noqa: BLE001 (vLLM does not catch what a plugin raises)
        _LOG.warning("modular_kernel is off: %r", error)


def _parse_minor_version(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version, or (0, 0) if it does not begin with two numbers."""
    numbers = version.split(".")[:2]
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        return 0, 0
    return int(numbers[0]), int(numbers[1])
