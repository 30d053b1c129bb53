"""Import of FlashInfer's all-to-all, and detection of an installed version that has it."""

from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from modular_kernel.utils.package_probes import PackageProbe, import_context

FLASHINFER_ALL2ALL = PackageProbe(
    name="flashinfer.comm",
    locations=("flashinfer",),
    markers=(
        ("comm/trtllm_moe_alltoall.py", "class MoeAlltoAll"),
        ("comm/trtllm_moe_alltoall.py", "expert_id_payload_index"),
        # Since 0.6.16, memory can be shared by file descriptors, without a fabric.
        ("comm/mnnvl.py", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"),
    ),
    need="FlashInfer with comm.MoeAlltoAll: 0.6.16 to 0.7.2",
    source="pip install flashinfer-python==0.7.2",
    version_file="_build_meta.py",
)


@cache
def load() -> Any:
    """Return a namespace with the functions and classes of flashinfer.comm that are used.

    Raise ConfigurationError if flashinfer.comm is missing or cannot be imported.
    """
    with import_context(FLASHINFER_ALL2ALL, need="a build for this torch and CUDA"):
        comm, mnnvl, moe = (
            import_module(f"flashinfer.comm{submodule}")
            for submodule in ("", ".mnnvl", ".trtllm_moe_alltoall")
        )
        return SimpleNamespace(
            MoeAlltoAll=moe.MoeAlltoAll,
            moe_a2a_get_workspace_size_per_rank=moe.moe_a2a_get_workspace_size_per_rank,
            Mapping=comm.Mapping,
            MnnvlConfig=mnnvl.MnnvlConfig,
            TorchDistBackend=mnnvl.TorchDistBackend,
        )
