"""Plugin for SGLang: `--moe-runner-backend modular_kernel` runs its MoE layers on these kernels.

SGLang calls `register` through its entry-point group `sglang.srt.plugins`, in each of its
processes. Code that depends on SGLang's internals is in one module for each supported version.
"""

import logging
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version

from modular_kernel.settings import is_sglang_plugin_disabled

_LOG = logging.getLogger(__name__)
# Version of SGLang without its local version label -> module that registers the backend.
MODULE_BY_VERSION: Mapping[str, str] = {"0.5.23": "modular_kernel.integrations.sglang.v0_5_23"}


def register() -> None:
    """Register the backend "modular_kernel" in SGLang.

    This function can be called more than once and never raises. With MK_SGLANG=0 in the
    environment, it does nothing. If SGLang's version is not supported, or its internals are
    not as expected, it logs one warning, and SGLang runs as if this package were not installed.
    """
    if is_sglang_plugin_disabled():
        return
    try:
        _register()
    except Exception as error:  # noqa: BLE001  (SGLang must start even if this fails)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _LOG.warning("SGLang runs without the MoE backend modular_kernel: %s", reason)


def _register() -> None:
    installed_version = version("sglang").split("+")[0]
    if installed_version in MODULE_BY_VERSION:
        import_module(MODULE_BY_VERSION[installed_version]).install()
        return
    supported = ", ".join(MODULE_BY_VERSION)
    _LOG.warning(
        "SGLang runs without the MoE backend modular_kernel: got SGLang %s, need %s",
        installed_version,
        supported,
    )
