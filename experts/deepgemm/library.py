"""DeepGEMM: where to find the library, and wrappers of its grouped GEMMs.

DeepGEMM compiles a kernel at its first launch, for N, K, the number of experts, and a configuration
chosen by the expected number of rows. Run a call of every size before capturing a CUDA graph.
"""

from functools import cache
from importlib import import_module
from typing import Any

import torch

from experts.common.row_major import to_row_major
from modular_kernel.errors import StateError
from modular_kernel.ops.count import next_power_of_2
from modular_kernel.utils.package_probes import PackageProbe, import_from_folder, importing

TILE_M = 128  # rows of a tile in the contiguous layout; tiles of the masked one have 64 or 128
BLOCK = 128  # elements along K, and weight rows along N, that share a scale
_NAME = "experts.deepgemm.vendored"

DEEP_GEMM = PackageProbe(
    name="deep_gemm",
    places=("deep_gemm", "vllm/third_party/deep_gemm"),
    markers=(
        ("__init__.py", "m_grouped_fp8_gemm_nt_masked"),
        ("__init__.py", "m_grouped_bf16_gemm_nt_contiguous"),
        # Since 2.4.2 on sm_90: the kernel locates tiles by the end row of each expert.
        ("include/deep_gemm/scheduler/gemm.cuh", "MGroupedContiguousWithPsumLayout"),
    ),
    need="DeepGEMM 2.4.2 or newer",
    source=(
        "install DeepGEMM by the script of https://github.com/deepseek-ai/DeepGEMM, or vLLM, which "
        "has a copy; the package index's deep-gemm is an older one"
    ),
)


@cache
def load() -> Any:
    """Import DeepGEMM from the location that `DEEP_GEMM` finds.

    Raise ConfigurationError if it is missing or cannot be loaded. DeepGEMM needs the folder of the
    CUDA toolkit.
    """
    need = "a build for this torch and Python, and the CUDA toolkit (CUDA_HOME)"
    with importing(DEEP_GEMM, need=need) as folder:
        if folder.parent.name == "third_party":  # a plain import would load all of vLLM
            return import_from_folder(folder, _NAME)
        return import_module("deep_gemm")


def grouped_gemm_contiguous(
    library: Any,
    rows: tuple[torch.Tensor, torch.Tensor | None],
    weights: tuple[torch.Tensor, torch.Tensor | None],
    ends: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out (R, N) = rows (R, K) times the weights (e, N, K) of each row's expert, in bfloat16.

    R is a multiple of 128. Rows and weights come with their scales, or None for bfloat16. For fp8,
    the scales of rows are (R, K / 128) with a stride of 1 along R, and those of weights (e, N /
    128, K / 128). Whole tiles are stored, so rows between experts are undefined. Raise StateError
    if DeepGEMM's alignment of contiguous rows was changed from 128.

    library: the result of `load`.
    ends: (e,) int32. The rows of expert i begin at ends[i - 1], rounded up to a multiple of 128,
        and end before ends[i].
    """
    tile = library.get_mk_alignment_for_contiguous_layout()
    if tile != TILE_M:
        need = f"{TILE_M}; set_mk_alignment_for_contiguous_layout must not change it"
        raise StateError("DeepGEMM's alignment of contiguous rows", got=tile, need=need)
    (a, a_scale), (w, w_scale) = rows, weights
    w = to_row_major(w)
    expected = _bucket_rows(len(a) // w.shape[0], len(a))
    options = {"use_psum_layout": True, "expected_m_for_psum_layout": expected}
    if a_scale is None:
        library.m_grouped_bf16_gemm_nt_contiguous(a, w, out, ends, **options)
        return
    library.m_grouped_fp8_gemm_nt_contiguous(
        (a, a_scale), (w, w_scale), out, ends, disable_ue8m0_cast=True, **options
    )


def grouped_gemm_masked(
    library: Any,
    rows: tuple[torch.Tensor, torch.Tensor | None],
    weights: tuple[torch.Tensor, torch.Tensor | None],
    counts_e: torch.Tensor,
    expected: int,
    out: torch.Tensor,
) -> None:
    """out (e, C, N) = rows (e, C, K) times weights (e, N, K), in bfloat16.

    C is a multiple of 128. Rows and weights come with their scales, or None for bfloat16; for fp8,
    the scales of rows have a stride of 1 along C (see `grouped_gemm_contiguous`).

    library: the result of `load`.
    counts_e: the first counts_e[i] rows of expert i are valid. Whole tiles are stored.
    expected: the expected number of rows per expert.
    """
    (a, a_scale), (w, w_scale) = rows, weights
    w, expected = to_row_major(w), _bucket_rows(expected, a.shape[1])
    if a_scale is None:
        library.m_grouped_bf16_gemm_nt_masked(a, w, out, counts_e, expected)
        return
    library.m_grouped_fp8_gemm_nt_masked(
        (a, a_scale), (w, w_scale), out, counts_e, expected, disable_ue8m0_cast=True
    )


def _bucket_rows(rows: int, max_rows: int) -> int:
    """Round up to a power of two, at most max_rows, because DeepGEMM may compile for each value."""
    return min(max_rows, next_power_of_2(max(1, rows)))
