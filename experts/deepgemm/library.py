"""Find and load DeepGEMM, and wrap its grouped GEMMs.

DeepGEMM selects a configuration by the expected number of rows. It compiles a kernel at the first
launch with a given N, K, number of experts and configuration. Before capturing a CUDA graph, run a
call of every size that is to be captured.
"""

from functools import cache
from importlib import import_module
from typing import Any

import torch

from experts.common.row_major import to_row_major
from modular_kernel.errors import ConfigurationError, StateError
from modular_kernel.ops.count import next_power_of_2
from modular_kernel.settings import find_deepgemm_compiler
from modular_kernel.utils.package_probes import PackageProbe, import_context, import_from_folder

TILE_M = 128  # rows per tile in the contiguous layout; the masked layout has tiles of 64 or 128
BLOCK = 128  # elements along K, and weight rows along N, that share a scale
_NAME = "experts.deepgemm.vendored"

DEEP_GEMM = PackageProbe(
    name="deep_gemm",
    locations=("deep_gemm", "vllm/third_party/deep_gemm"),
    markers=(
        ("__init__.py", "m_grouped_fp8_gemm_nt_masked"),
        ("__init__.py", "m_grouped_bf16_gemm_nt_contiguous"),
        # Since 2.4.2, the kernel for sm_90 can locate tiles by the end row of each expert.
        ("include/deep_gemm/scheduler/gemm.cuh", "MGroupedContiguousWithPsumLayout"),
    ),
    need="DeepGEMM 2.4.2 or newer",
    source=(
        "install DeepGEMM with the script in https://github.com/deepseek-ai/DeepGEMM, or install "
        "vLLM, which contains a copy; deep-gemm on PyPI is too old"
    ),
)


@cache
def load() -> Any:
    """Import DeepGEMM from the location that `DEEP_GEMM` finds; return the module.

    Raise ConfigurationError if DeepGEMM is missing, cannot be loaded, or could not compile its
    kernels. DeepGEMM needs the CUDA toolkit.
    """
    need = "a build for this torch and Python, and the CUDA toolkit (CUDA_HOME)"
    with import_context(DEEP_GEMM, need=need) as folder:
        if folder.parent.name == "third_party":  # a plain import would load all of vLLM
            library = import_from_folder(folder, _NAME)
        else:
            library = import_module("deep_gemm")
    _require_compiler()  # after the import, which sets environment variables of the build
    return library


def _require_compiler() -> None:
    """Raise ConfigurationError if there is no nvcc where DeepGEMM looks for it.

    Images with only CUDA's runtime libraries have the toolkit's folder, but no compiler, so that
    DeepGEMM can be imported, and would fail at its first launch.
    """
    compiler = find_deepgemm_compiler()
    if compiler is not None and not compiler.is_file():
        need = "nvcc of the CUDA toolkit (set CUDA_HOME), or DG_JIT_USE_NVRTC=1"
        raise ConfigurationError("compiler of DeepGEMM's kernels", got=f"no {compiler}", need=need)


def grouped_gemm_contiguous(
    library: Any,
    rows: tuple[torch.Tensor, torch.Tensor | None],
    weights: tuple[torch.Tensor, torch.Tensor | None],
    ends: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Multiply each row by the weights of its expert.

    library: the result of `load`.
    rows: values (R, K), where R is a multiple of 128, and scales. The scales are None for bfloat16
        values. For fp8 values, they are (R, K / 128) with a stride of 1 along R.
    weights: values (e, N, K) and scales. The scales are None for bfloat16 values. For fp8 values,
        they are (e, N / 128, K / 128).
    ends: (e,) int32. The rows of expert i start at ends[i - 1], rounded up to a multiple of 128,
        and end before ends[i].
    out: (R, N) bfloat16. DeepGEMM stores whole tiles, so padding rows are undefined.

    Raise StateError if DeepGEMM's alignment of contiguous rows is not 128.
    """
    alignment = library.get_mk_alignment_for_contiguous_layout()
    if alignment != TILE_M:
        need = f"{TILE_M}, the default; do not call set_mk_alignment_for_contiguous_layout"
        raise StateError("DeepGEMM's alignment of contiguous rows", got=alignment, need=need)
    (a, a_scale), (w, w_scale) = rows, weights
    w = to_row_major(w)
    expected_rows = _round_up_rows(len(a) // w.shape[0], len(a))
    options = {"use_psum_layout": True, "expected_m_for_psum_layout": expected_rows}
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
    expected_rows: int,
    out: torch.Tensor,
) -> None:
    """Multiply the rows of each expert by its weights.

    library: the result of `load`.
    rows: values (e, C, K), where C is a multiple of 128, and scales. The scales are None for
        bfloat16 values. For fp8 values, they are (e, C, K / 128) with a stride of 1 along C.
    weights: as in `grouped_gemm_contiguous`.
    counts_e: (e,) int32. Only the first counts_e[i] rows of expert i are valid.
    expected_rows: the expected number of rows per expert, by which DeepGEMM chooses a kernel.
    out: (e, C, N) bfloat16. DeepGEMM stores whole tiles, so rows that are not valid are undefined.
    """
    (a, a_scale), (w, w_scale) = rows, weights
    w, expected_rows = to_row_major(w), _round_up_rows(expected_rows, a.shape[1])
    if a_scale is None:
        library.m_grouped_bf16_gemm_nt_masked(a, w, out, counts_e, expected_rows)
        return
    library.m_grouped_fp8_gemm_nt_masked(
        (a, a_scale), (w, w_scale), out, counts_e, expected_rows, disable_ue8m0_cast=True
    )


def _round_up_rows(num_rows: int, max_rows: int) -> int:
    """Return num_rows rounded up to a power of two, but at most max_rows.

    DeepGEMM may compile a kernel for each value, so rounding limits the number of kernels.
    """
    return min(max_rows, next_power_of_2(max(1, num_rows)))
