"""Import of DeepEP, detection of an installed release, and the differences between releases.

DeepEP 1 (package deep_ep with the extension module deep_ep_cpp) has the class Buffer. DeepEP 2
(extension module deep_ep._C) has the class ElasticBuffer, and still has Buffer, with the same
methods. A release is accepted if its classes accept the calls of this package, which are compared
with the signatures of the methods before any of them is called.

Differences of Buffer in DeepEP 2, and who handles them:

- the dtype of ids is chosen when the library is built (`ids_dtype`)
- a low-latency buffer has a limit on tokens, from NVSHMEM_QP_DEPTH (`limits_tokens_by_qp_depth`)
- calls assert that torch does not fill new tensors (`check_torch_settings`)
- the dispatch between hosts fails in 2.0 (`check_dispatch_between_hosts`)
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from modular_kernel.errors import ConfigurationError, UnsupportedError
from modular_kernel.utils.package_probes import PackageProbe
from prepare_finalize.common.library_calls import (
    LIBRARY_ERRORS,
    LibraryCall,
    accepts_keyword,
    find_mismatch,
)
from prepare_finalize.common.torch_group import first_sentence

SOURCE_URL = "https://github.com/deepseek-ai/DeepEP"
# Present with DeepEP 1, absent with DeepEP 2. Both have the package name deep_ep.
CPP_MODULE_OF_DEEPEP_1 = "deep_ep_cpp"

DEEP_EP = PackageProbe(
    name="deep_ep",
    locations=("deep_ep",),
    markers=(
        ("buffers/legacy.py", "class Buffer"),
        ("buffers/elastic.py", "class ElasticBuffer"),
        ("_C*.so", ""),
    ),
    alternatives=(
        (
            ("buffer.py", "class Buffer"),
            ("buffer.py", "explicitly_destroy"),
            ("buffer.py", "num_worst_tokens"),
            (f"../{CPP_MODULE_OF_DEEPEP_1}*", ""),
        ),
    ),
    need="DeepEP 1.2 with deep_ep_cpp, or DeepEP 2 with deep_ep._C",
    source=f"build DeepEP from {SOURCE_URL}, not from a package index",
)

# The calls that the parts make, by class.
_CALLS = {
    "Buffer": (
        LibraryCall(
            "__init__",
            2,
            (
                *("num_nvl_bytes", "num_rdma_bytes", "low_latency_mode"),
                *("num_qps_per_rank", "explicitly_destroy"),
            ),
        ),
        LibraryCall("destroy", 1),
        LibraryCall("get_dispatch_config", 1),
        LibraryCall("get_combine_config", 1),
        LibraryCall("get_low_latency_rdma_size_hint", 4),
        LibraryCall("get_dispatch_layout", 3),
        LibraryCall(
            "dispatch",
            2,
            (
                *("num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank"),
                *("num_tokens_per_expert", "topk_idx", "topk_weights"),
                *("num_worst_tokens", "config", "async_finish"),
            ),
        ),
        LibraryCall("combine", 3, ("config",)),
        LibraryCall("low_latency_dispatch", 5, ("use_fp8", "return_recv_hook")),
        LibraryCall("low_latency_combine", 5, ("out",)),
    ),
    "ElasticBuffer": (
        LibraryCall(
            "__init__",
            2,
            (
                *("num_max_tokens_per_rank", "hidden", "num_topk"),
                *("num_cpu_timeout_secs", "num_gpu_timeout_secs", "explicitly_destroy"),
            ),
        ),
        LibraryCall("destroy", 1),
        LibraryCall(
            "dispatch",
            2,
            (
                *("topk_idx", "topk_weights", "num_experts", "num_sms"),
                *("async_with_compute_stream", "do_handle_copy", "do_cpu_sync"),
            ),
        ),
        LibraryCall("combine", 3),
    ),
}
_CLASSES = {
    1: ("Buffer", "deep_ep 1.2 or 2 with this interface, built against this torch"),
    2: (
        "ElasticBuffer",
        "deep_ep 2 with this interface, built against this torch and the NCCL in use",
    ),
}


def load_deepep(generation: int) -> Any:
    """Import the module deep_ep and check the interface of a generation: 1 or 2.

    Generation 1 is the class Buffer, which DeepEP 1 and 2 have. Generation 2 is the class
    ElasticBuffer, which only DeepEP 2 has.

    Raise ConfigurationError if the module is missing, cannot be loaded, lacks the class, or has
    another interface.
    """
    class_name, need = _CLASSES[generation]
    try:
        library = import_module("deep_ep")
    except LIBRARY_ERRORS as error:
        raise ConfigurationError("deep_ep", got=summarize(error), need=need) from error
    mismatch = _find_interface_mismatch(library, class_name)
    if mismatch:
        got = f"version {get_version(library)}, {mismatch}"
        raise ConfigurationError("deep_ep", got=got, need=need)
    return library


def get_version(library: Any) -> str:
    """Return the version of the library, or its major version if it does not report one.

    DeepEP 2 has `__version__`. DeepEP 1 has only the version of its distribution.
    """
    reported = getattr(library, "__version__", None)
    if isinstance(reported, str):
        return reported[:40]
    if is_deepep_2(library):
        return "2"
    try:
        return version("deep_ep")
    except PackageNotFoundError:
        return "1"


def is_deepep_2(library: Any) -> bool:
    """Return whether the library is of the second major version."""
    return hasattr(library, "ElasticBuffer")


def ids_dtype(library: Any) -> torch.dtype:
    """Return the dtype of ids that the library was built for, int64 or int32.

    DeepEP 1.2.1 and older releases always use int64, and do not export a dtype.
    """
    dtype: torch.dtype = getattr(library, "topk_idx_t", torch.int64)
    return dtype


def limits_tokens_by_qp_depth(buffer_class: Any) -> bool:
    """Return whether low-latency calls assert that a queue pair is deep enough for the tokens.

    The assertion was added in the same release as the argument enable_shrink.
    """
    return accepts_keyword(buffer_class.__init__, "enable_shrink")


def max_tokens_of_qp_depth(depth: int) -> int:
    """Return the maximum number of tokens per rank for queue pairs of `depth` work requests."""
    return depth // 2 - 1


def check_torch_settings(library: Any) -> None:
    """Raise UnsupportedError if torch fills new tensors, which DeepEP 2 does not support.

    The fill would run on the current stream, while the library's kernels write on their stream.
    """
    if not is_deepep_2(library) or not torch.are_deterministic_algorithms_enabled():
        return
    if torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        raise UnsupportedError(
            "torch.utils.deterministic.fill_uninitialized_memory",
            got="True, with torch.use_deterministic_algorithms",
            need="False with deep_ep 2",
        )


def check_dispatch_between_hosts(library: Any) -> None:
    """Raise ConfigurationError for DeepEP 2.0.

    Its Python code passes too few arguments to the high-throughput dispatch of its own extension
    module between hosts. A later commit fixed that without another version.
    """
    if is_deepep_2(library) and get_version(library).startswith("2.0"):
        got = f"version {get_version(library)}"
        need = "deep_ep 1.2, or 2.1 or newer, for high throughput between hosts"
        raise ConfigurationError("deep_ep", got=got, need=need)


def summarize(error: BaseException) -> str:
    """Return the first sentence of an error of the library."""
    return first_sentence(RuntimeError(str(error).strip() or type(error).__name__))


def _find_interface_mismatch(library: Any, class_name: str) -> str:
    """Return how the library differs from the interface of a class, or ""."""
    buffer_class = getattr(library, class_name, None)
    if not isinstance(buffer_class, type):
        return f"without the class {class_name}"
    mismatch = find_mismatch(buffer_class, _CALLS[class_name])
    if mismatch:
        return mismatch
    if class_name == "Buffer" and not isinstance(getattr(buffer_class, "num_sms", None), int):
        return "Buffer.num_sms is not a number"
    if ids_dtype(library) not in (torch.int64, torch.int32):
        return f"topk_idx_t is {str(ids_dtype(library))[:40]}"
    return ""
