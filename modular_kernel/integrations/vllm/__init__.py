"""Plugin for vLLM: MoE layers of supported models run on parts of this package.

vLLM calls `register` through the entry point `modular_kernel` of the group `vllm.general_plugins`.
The code that depends on a version of vLLM is in one module for each supported minor version.
"""

import logging
from importlib import import_module

from modular_kernel.settings import vllm_plugin

__all__ = ["register"]

_LOG = logging.getLogger("vllm.modular_kernel")

# Minor version of vLLM -> module for it.
VERSIONS = {(0, 26): "v0_26", (0, 33): "v0_33"}


def register() -> None:
    """Install the plugin into the vLLM of this process, unless MK_VLLM is 0.

    May be called several times, and raises nothing. For a version of vLLM that no module supports,
    or if anything fails, it logs one line, and vLLM runs as if this package were not installed.
    Neither Triton nor any part is imported before vLLM builds a MoE layer.
    """
    try:
        if vllm_plugin() == "0":
            return
        version: str = import_module("vllm").__version__
        name = VERSIONS.get(_minor(version))
        if name is None:
            supported = ", ".join(f"{major}.{minor}" for major, minor in VERSIONS)
            _LOG.warning("modular_kernel is off: vLLM is %s, supported: %s", version, supported)
            return
        hooks = import_module("modular_kernel.integrations.vllm.hooks")
        hooks.install(f"modular_kernel.integrations.vllm.{name}")
    except Exception as error:  # noqa: BLE001 (vLLM does not catch what a plugin raises)
        _LOG.warning("modular_kernel is off: %r", error)


def _minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) if it does not begin with two."""
    numbers = version.split(".")[:2]
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        return 0, 0
    return int(numbers[0]), int(numbers[1])
