"""triton_kernels: where it is, what it is told by, and its call.

It has had three interfaces. This is that of 3.5, which vLLM carries: matmul_ogs and RoutingData.
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

from experts.common.row_major import by_rows, copied, is_aligned
from experts.triton_kernels.tile_maps import SIZES, TileMaps
from modular_kernel.utils.package_probes import Provider, forget, importing, module_of

_NAME = "triton_kernels"  # it imports itself by it

TRITON_KERNELS = Provider(
    name=_NAME,
    places=(_NAME, "vllm/third_party/triton_kernels"),
    signs=(
        ("matmul_ogs.py", "def matmul_ogs("),
        ("routing.py", "block_pid_map: dict[int, torch.Tensor]"),
    ),
    need="triton_kernels of 3.5, with matmul_ogs and RoutingData",
    source=(
        "install vLLM, which has a copy, or python/triton_kernels of triton's release 3.5; the "
        "package index's triton-kernels is somebody else's"
    ),
)


@cache
def load() -> Any:
    """Import the parts of triton_kernels that are used, from where it is found.

    ConfigurationError if it is not there, cannot be loaded, or another one is imported already.
    """
    with importing(TRITON_KERNELS, need="one that goes with this triton") as folder, _from(folder):
        product, routing = (import_module(f"{_NAME}.{part}") for part in ("matmul_ogs", "routing"))
    return SimpleNamespace(
        matmul_ogs=product.matmul_ogs,
        PrecisionConfig=product.PrecisionConfig,
        RoutingData=routing.RoutingData,
        ExptData=routing.ExptData,
    )


@contextmanager
def _from(folder: Path) -> Iterator[None]:
    """Have the package be that of the folder, from now on; nothing is left of one that fails."""
    known = sys.modules.get(_NAME)
    if known is not None:
        there = Path(getattr(known, "__file__", None) or "").parent
        if there != folder:
            raise ImportError(f"{_NAME} of {there} is imported already")
        yield
        return
    module_of(folder, _NAME)
    try:
        yield
    except BaseException:
        forget(_NAME)
        raise


def ragged(
    library: Any,
    rows: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    starts: torch.Tensor,
    tiles: TileMaps,
    out: torch.Tensor,
) -> torch.Tensor:
    """Return the product of rows (R, K) and each one's expert's weights (e, N, K), in bfloat16.

    weights: in bfloat16, and None; or two e2m1 values of K in a byte, and the exponent (E8M0) of
    each 32 of them, (e, N, K / 32), as mxfp4 checkpoints have them. The product is in `out` (R, N),
    or where the library chose. Expert i has the rows from starts[i] on, (e + 1,) int32; rows behind
    the last one stay as they are. Weights whose values lie side by side neither along K nor along N
    are copied, and so are weights off 16-byte addresses: TMA.
    """
    w, scale = weights
    precision = None
    if scale is not None:
        # Which dimension is packed is told by the strides: values of K must lie side by side.
        w = by_rows(w)
        precision = library.PrecisionConfig(weight_scale=scale.transpose(1, 2))
    elif 1 not in w.stride()[1:] or not is_aligned(w):
        w = copied(w)
    experts = tiles.counts.numel()
    data = library.ExptData(
        tiles.counts,
        starts,
        {size: tiles.ends[place] for place, size in enumerate(SIZES)},
        {size: tiles.maps[place] for place, size in enumerate(SIZES)},
    )
    routing = library.RoutingData(None, tiles.counts, experts, 1, data)
    made: torch.Tensor = library.matmul_ogs(
        rows, w.transpose(1, 2), None, routing, precision_config=precision, y=out[None]
    )
    return made
