"""Fused Mixture-of-Experts layers, composed of interchangeable and verified parts.

Public names are imported on first use, so that `mk --help` does not import torch. When transformers
is imported, the experts implementation "modular_kernel" is registered with it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from modular_kernel.utils.after_import import call_after_import

if TYPE_CHECKING:
    from modular_kernel.catalog import check, check_all, make_kernel
    from modular_kernel.checkpoints.loading import load_experts
    from modular_kernel.compatibility.support import Rejection, Verdict
    from modular_kernel.contracts import (
        PermuteExpertsUnpermute,
        PrepareAndFinalize,
        TopKWeightAndReduce,
    )
    from modular_kernel.errors import IncompatibleError, ModularKernelError
    from modular_kernel.kernel import FusedMoEModularKernel
    from modular_kernel.layers.fused_moe import FusedMoE
    from modular_kernel.select.autotune import compose
    from modular_kernel.spec.problem import (
        ActivationFormat,
        ActivationSpec,
        Combine,
        Machine,
        Parallel,
        Problem,
    )
    from modular_kernel.tensors import ExpertWeights, Routing

_MODULE_BY_NAME = {
    "check": "catalog",
    "check_all": "catalog",
    "make_kernel": "catalog",
    "compose": "select.autotune",
    "load_experts": "checkpoints.loading",
    "PermuteExpertsUnpermute": "contracts",
    "PrepareAndFinalize": "contracts",
    "TopKWeightAndReduce": "contracts",
    "IncompatibleError": "errors",
    "ModularKernelError": "errors",
    "FusedMoEModularKernel": "kernel",
    "FusedMoE": "layers.fused_moe",
    "Rejection": "compatibility.support",
    "Verdict": "compatibility.support",
    "ExpertWeights": "tensors",
    "Routing": "tensors",
    "ActivationFormat": "spec.problem",
    "ActivationSpec": "spec.problem",
    "Combine": "spec.problem",
    "Machine": "spec.problem",
    "Parallel": "spec.problem",
    "Problem": "spec.problem",
}

__all__ = [  # noqa: RUF022 (same order as _MODULE_BY_NAME)
    "check",
    "check_all",
    "make_kernel",
    "compose",
    "load_experts",
    "PermuteExpertsUnpermute",
    "PrepareAndFinalize",
    "TopKWeightAndReduce",
    "IncompatibleError",
    "ModularKernelError",
    "FusedMoEModularKernel",
    "FusedMoE",
    "Rejection",
    "Verdict",
    "ExpertWeights",
    "Routing",
    "ActivationFormat",
    "ActivationSpec",
    "Combine",
    "Machine",
    "Parallel",
    "Problem",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        metadata = import_module("importlib.metadata")
        try:
            return metadata.version("modular-kernel")
        except metadata.PackageNotFoundError:  # a source checkout that is not installed
            return "unknown"
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'modular_kernel' has no attribute {name!r}")
    return getattr(import_module(f"modular_kernel.{_MODULE_BY_NAME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _register_with_transformers() -> None:
    """Register our experts implementation, if this version of transformers supports it."""
    try:
        import_module("modular_kernel.integrations.transformers.register").register_default()
    except ImportError:
        # This version of transformers is too old. If a user selects the experts implementation
        # "modular_kernel", transformers raises an error.
        return


# Every transformers model imports modeling_utils. After that import, all modules that the
# integration needs are loaded.
call_after_import("transformers.modeling_utils", _register_with_transformers)
