"""Find and load triton_kernels, and wrap its ragged matmul, matmul_ogs.

The interface of the package differs between releases. This module uses the interface of release
3.5, which vLLM vendors: matmul_ogs and RoutingData.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from experts.common.row_major import copy_row_major, is_aligned, to_row_major
from experts.triton_kernels.tile_maps import TILE_ROWS, TileMaps
from modular_kernel.utils.package_probes import (
    PackageProbe,
    import_context,
    import_from_folder,
    unload,
)

_NAME = "triton_kernels"  # the package imports its own modules by this name

TRITON_KERNELS = PackageProbe(
    name=_NAME,
    locations=(_NAME, "vllm/third_party/triton_kernels"),
    markers=(
        ("matmul_ogs.py", "def matmul_ogs("),
        ("routing.py", "block_pid_map: dict[int, torch.Tensor]"),
    ),
    need="triton_kernels 3.5, with matmul_ogs and RoutingData",
    source=(
        "install vLLM, which contains a copy, or the folder python/triton_kernels of Triton 3.5; "
        "triton_kernels on PyPI is an unrelated package"
    ),
)


@cache
def load() -> Any:
    """Import triton_kernels; return a namespace of the functions and classes used in this module.

    Raise ConfigurationError if the package is missing, cannot be loaded, or was already imported
    from another folder.
    """
    with (
        import_context(TRITON_KERNELS, need="a version for this triton") as folder,
        _import_package(folder),
    ):
        ogs, routing = (import_module(f"{_NAME}.{name}") for name in ("matmul_ogs", "routing"))
    return SimpleNamespace(
        matmul_ogs=ogs.matmul_ogs,
        PrecisionConfig=ogs.PrecisionConfig,
        RoutingData=routing.RoutingData,
        ExptData=routing.ExptData,
    )


@contextmanager
def _import_package(folder: Path) -> Iterator[None]:
    """Import the package from `folder`, and remove it from sys.modules if the block raises."""
    imported = sys.modules.get(_NAME)
    if imported is not None:
        imported_folder = Path(getattr(imported, "__file__", None) or "").parent
        if imported_folder != folder:
            raise ImportError(f"{_NAME} was already imported from {imported_folder}")
        yield
        return
    import_from_folder(folder, _NAME)
    try:
        yield
    except BaseException:
        unload(_NAME)
        raise


def ragged_matmul(
    library: Any,
    rows: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    bias: torch.Tensor | None,
    starts: torch.Tensor,
    tiles: TileMaps,
    out: torch.Tensor,
) -> torch.Tensor:
    """Multiply each row by the weights of its expert, and add the bias of its expert.

    Return the bfloat16 results (R, N), which are rounded once, after the bias is added.

    library: the result of `load`.
    rows: (R, K) bfloat16.
    weights: bfloat16 weights (e, N, K) and None, or mxfp4 weights in checkpoint layout: two e2m1
        values along K per byte, (e, N, K / 2), and E8M0 scales (e, N, K / 32), one for 32 values.
    bias: (e, N) float32 or bfloat16, or None. It is copied unless it is float32 and contiguous.
    starts: (e + 1,) int32, the first row of each expert, then the number of rows in use. Results of
        later rows are undefined.
    tiles: the tile schedules, from `schedule_tiles`.
    out: (R, N) bfloat16, a buffer for the results. The library may return another tensor.

    Weights that TMA cannot read are copied. bfloat16 weights must be 16-byte aligned, with a stride
    of 1 along K or N. mxfp4 weights must be row-major and 16-byte aligned.
    """
    w, scale = weights
    precision_config = None
    if scale is not None:
        # The stride along K must be 1, because the library infers the packed dimension from it.
        w = to_row_major(w)
        precision_config = library.PrecisionConfig(weight_scale=scale.transpose(1, 2))
    elif 1 not in w.stride()[1:] or not is_aligned(w):
        w = copy_row_major(w)
    if bias is not None:
        # Kernels read a row of consecutive values. If K is split among programs, one of them adds
        # the bias and the others add float32 zeros. Triton compiles these branches only if both
        # have the same dtype.
        bias = bias.float().contiguous()
    experts = tiles.counts.numel()
    expert_data = library.ExptData(
        tiles.counts,
        starts,
        {size: tiles.ends[index] for index, size in enumerate(TILE_ROWS)},
        {size: tiles.maps[index] for index, size in enumerate(TILE_ROWS)},
    )
    routing = library.RoutingData(None, tiles.counts, experts, 1, expert_data)
    result: torch.Tensor = library.matmul_ogs(
        rows, w.transpose(1, 2), bias, routing, precision_config=precision_config, y=out[None]
    )
    return result
