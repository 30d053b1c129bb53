"""Import of FlashInfer's all-to-all, and detection of an installed release that has it.

There are two classes for the same exchange: comm.MoeAlltoAll, until 0.7.2, and its replacement,
moe_ep.NVLinkOneSidedAlltoAll, alone since 0.7.4. `exchange.py` has an adapter for each.
"""

from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.utils.package_probes import PackageProbe, import_context
from prepare_finalize.common.library_calls import LibraryCall, find_mismatch

_MOE_ALLTOALL_FILE = "comm/trtllm_moe_alltoall.py"
_NVLINK_FOLDER = "moe_ep/backends/split/comm/nvlink_one_sided"
# Since 0.6.16, memory can be shared by file descriptors, without a fabric.
_FILE_DESCRIPTORS = ("comm/mnnvl.py", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")
# The kernels skip pairs with invalid expert numbers.
_SKIPS_PAIRS = (
    "data/csrc/nv_internal/tensorrt_llm/kernels/moe/communication/moeAlltoAllKernels.cu",
    "valid_expert",
)

FLASHINFER_ALL2ALL = PackageProbe(
    name="flashinfer.comm",
    locations=("flashinfer",),
    markers=(
        (_MOE_ALLTOALL_FILE, "class MoeAlltoAll"),
        (_MOE_ALLTOALL_FILE, "expert_id_payload_index"),
        _FILE_DESCRIPTORS,
    ),
    alternatives=(
        (
            (f"{_NVLINK_FOLDER}/communication.py", "class NVLinkOneSidedAlltoAll"),
            (f"{_NVLINK_FOLDER}/config.py", "extra_payload_bytes_per_token"),
            _SKIPS_PAIRS,
            _FILE_DESCRIPTORS,
        ),
    ),
    need="FlashInfer with comm.MoeAlltoAll (0.6.16 to 0.7.2) or moe_ep.NVLinkOneSidedAlltoAll"
    " (0.7.4)",
    source="pip install flashinfer-python==0.7.2",
    version_file="_build_meta.py",
)
_NEED = "a build for this torch and CUDA"

# The calls that the adapters make, by class or function.
_MODULE_CALLS = (
    LibraryCall("moe_a2a_get_workspace_size_per_rank", 4),
    LibraryCall(
        "Mapping",
        0,
        ("world_size", "rank", "gpus_per_node", "tp_size", "moe_ep_size", "moe_tp_size"),
    ),
    LibraryCall("MnnvlConfig", 0, ("comm_backend",)),
    LibraryCall("TorchDistBackend", 1),
)
_MOE_ALLTOALL_CALLS = (
    LibraryCall(
        "__init__",
        2,
        (
            *("max_num_tokens", "top_k", "num_experts", "workspace_size_per_rank"),
            "mnnvl_config",
        ),
    ),
    LibraryCall("dispatch", 4, ("invalid_token_expert_id", "expert_id_payload_index")),
    LibraryCall("combine", 3, ("output",)),
    LibraryCall("_reset_workspace", 1),
)
_MOE_EP_CALLS = (
    LibraryCall("BootstrapConfig", 0, ("world_size", "rank", "process_group")),
    LibraryCall(
        "MoEEpCommParams",
        0,
        (
            *("num_experts", "top_k", "max_tokens_per_rank", "hidden_size", "dtype"),
            "invalid_expert_id",
        ),
    ),
    LibraryCall("NVLinkOneSidedConfig", 0, ("extra_payload_bytes_per_token", "comm_backend")),
    LibraryCall("TorchDistBackend", 1),
)
_NVLINK_CALLS = (
    LibraryCall("__init__", 4),
    LibraryCall("dispatch", 4, ("hidden_states_scale",)),
    LibraryCall("combine", 2, ("output",)),
    LibraryCall("destroy", 1),
)


@cache
def load() -> Any:
    """Return a namespace with the functions and classes of FlashInfer that are used.

    It has either MoeAlltoAll or NVLinkOneSidedAlltoAll, and the classes of their arguments.

    Raise ConfigurationError if FlashInfer is missing, cannot be imported, or has another interface.
    """
    with import_context(FLASHINFER_ALL2ALL, need=_NEED) as folder:
        library = _import_classes(folder)
    check_interface(library)
    return library


def check_interface(library: Any) -> None:
    """Raise ConfigurationError if a class of the library does not accept the calls of its adapter.

    library: namespace with the classes, as `load` returns it.
    """
    if hasattr(library, "MoeAlltoAll"):
        mismatch = find_mismatch(library, _MODULE_CALLS) or find_mismatch(
            library.MoeAlltoAll, _MOE_ALLTOALL_CALLS
        )
    else:
        mismatch = find_mismatch(library, _MOE_EP_CALLS) or find_mismatch(
            library.NVLinkOneSidedAlltoAll, _NVLINK_CALLS
        )
        mismatch = mismatch or _find_missing_field(library.NVLinkOneSidedConfig)
    if mismatch:
        need = FLASHINFER_ALL2ALL.need
        raise ConfigurationError(FLASHINFER_ALL2ALL.name, got=mismatch, need=need)


def _import_classes(folder: Path) -> SimpleNamespace:
    if not (folder / _MOE_ALLTOALL_FILE).is_file():
        moe_ep, mnnvl = (import_module(f"flashinfer.{name}") for name in ("moe_ep", "comm.mnnvl"))
        return SimpleNamespace(
            __name__="flashinfer.moe_ep",
            NVLinkOneSidedAlltoAll=moe_ep.NVLinkOneSidedAlltoAll,
            NVLinkOneSidedConfig=moe_ep.NVLinkOneSidedConfig,
            BootstrapConfig=moe_ep.BootstrapConfig,
            MoEEpCommParams=moe_ep.MoEEpCommParams,
            TorchDistBackend=mnnvl.TorchDistBackend,
        )
    comm, mnnvl, moe = (
        import_module(f"flashinfer.comm{submodule}")
        for submodule in ("", ".mnnvl", ".trtllm_moe_alltoall")
    )
    return SimpleNamespace(
        __name__="flashinfer.comm",
        MoeAlltoAll=moe.MoeAlltoAll,
        moe_a2a_get_workspace_size_per_rank=moe.moe_a2a_get_workspace_size_per_rank,
        Mapping=comm.Mapping,
        MnnvlConfig=mnnvl.MnnvlConfig,
        TorchDistBackend=mnnvl.TorchDistBackend,
    )


def _find_missing_field(config_class: Any) -> str:
    """Return what the configuration of the replacement lacks, or "".

    The names of its fields decide which transports are turned off.
    """
    if not is_dataclass(config_class) or not fields(config_class):
        return "NVLinkOneSidedConfig without fields"
    return ""
