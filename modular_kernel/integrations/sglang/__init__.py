"""Plugin for SGLang: `--moe-runner-backend modular_kernel` runs its MoE layers on these kernels.

SGLang calls `register` through its entry-point group `sglang.srt.plugins`, in each of its
processes. The code that depends on SGLang's internals is in one module for each supported version;
`translation` and `layer_runner` do not import SGLang.
"""

import logging
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version

from modular_kernel.settings import disables_sglang_plugin

_LOG = logging.getLogger(__name__)
# SGLang's version, without a local part -> the module that registers the backend in it.
VERSIONS: Mapping[str, str] = {"0.5.23": "modular_kernel.integrations.sglang.v0_5_23"}


def register() -> None:
    """Register the backend "modular_kernel" in SGLang.

    It may be called several times, and raises nothing. With MK_SGLANG=0 in the environment it does
    nothing. If SGLang's version is not in VERSIONS, or its internals are not as expected, it logs
    one warning, and SGLang runs as if this package were not installed.
    """
    if disables_sglang_plugin():
        return
    try:
        _register()
    except Exception as error:  # noqa: BLE001  (SGLang must start, whatever fails here)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _LOG.warning("SGLang runs without the MoE backend modular_kernel: %s", reason)


def _register() -> None:
    installed = version("sglang").split("+")[0]
    if installed in VERSIONS:
        import_module(VERSIONS[installed]).install()
        return
    supported = ", ".join(VERSIONS)
    _LOG.warning(
        "SGLang runs without the MoE backend modular_kernel: got SGLang %s, need %s",
        installed,
        supported,
    )
