"""triton_kernels: where to find it, and a wrapper of its matmul_ogs.

The package has had three interfaces. This module uses that of 3.5, which vLLM vendors: matmul_ogs
and RoutingData.
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
from experts.triton_kernels.tile_maps import SIZES, TileMaps
from modular_kernel.utils.package_probes import PackageProbe, import_from_folder, importing, unload

_NAME = "triton_kernels"  # the package imports its own modules by this name

TRITON_KERNELS = PackageProbe(
    name=_NAME,
    places=(_NAME, "vllm/third_party/triton_kernels"),
    markers=(
        ("matmul_ogs.py", "def matmul_ogs("),
        ("routing.py", "block_pid_map: dict[int, torch.Tensor]"),
    ),
    need="triton_kernels of 3.5, with matmul_ogs and RoutingData",
    source=(
        "install vLLM, which has a copy, or python/triton_kernels of triton's release 3.5; the "
        "package of that name on PyPI is unrelated"
    ),
)


@cache
def load() -> Any:
    """Import the functions and classes of triton_kernels that are used.

    Raise ConfigurationError if it is missing, cannot be loaded, or was imported from another
    folder.
    """
    with (
        importing(TRITON_KERNELS, need="a version for this triton") as folder,
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
    """Import the package from `folder`; if the block raises, remove it from sys.modules again."""
    imported = sys.modules.get(_NAME)
    if imported is not None:
        imported_folder = Path(getattr(imported, "__file__", None) or "").parent
        if imported_folder != folder:
            raise ImportError(f"{_NAME} of {imported_folder} is imported already")
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
    starts: torch.Tensor,
    tiles: TileMaps,
    out: torch.Tensor,
) -> torch.Tensor:
    """Multiply rows (R, K) by the weights (e, N, K) of each row's expert; return bfloat16 results.

    weights: (bfloat16 weights, None), or mxfp4 as in checkpoints: two e2m1 values along K per byte,
        and (e, N, K / 32) E8M0 exponents, one for 32 values.
    starts: (e + 1,) int32, the first row of each expert, then the number of rows. Rows past the
        last expert's are not written.
    tiles: from `tile_maps`.
    out: (R, N). The library may return another tensor instead.

    bf16 weights are copied if they have a stride of 1 along neither K nor N, or are not on a
    16-byte address, because TMA cannot read them. mxfp4 weights are copied unless they are
    row-major and on such an address.
    """
    w, scale = weights
    precision = None
    if scale is not None:
        # The library infers the packed dimension from the strides: that along K must be 1.
        w = to_row_major(w)
        precision = library.PrecisionConfig(weight_scale=scale.transpose(1, 2))
    elif 1 not in w.stride()[1:] or not is_aligned(w):
        w = copy_row_major(w)
    experts = tiles.counts.numel()
    data = library.ExptData(
        tiles.counts,
        starts,
        {size: tiles.ends[index] for index, size in enumerate(SIZES)},
        {size: tiles.maps[index] for index, size in enumerate(SIZES)},
    )
    routing = library.RoutingData(None, tiles.counts, experts, 1, data)
    result: torch.Tensor = library.matmul_ogs(
        rows, w.transpose(1, 2), None, routing, precision_config=precision, y=out[None]
    )
    return result
