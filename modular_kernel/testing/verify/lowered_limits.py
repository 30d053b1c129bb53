"""Lower limits in host code, so that small calls take the branches and loops of large ones.

Host code compares sizes with limits to choose how many columns, rows or pairs a program handles,
whether loads are pipelined, and whether one launch is enough. Most limits are far above the sizes
that the interpreter can compute in acceptable time. No limit in `LOWERED_LIMITS` affects a result
or the size of a buffer.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# module -> name of a limit -> its value inside `lower_limits`
LOWERED_LIMITS: Mapping[str, Mapping[str, int]] = {
    "modular_kernel.ops.align": {"_BLOCKS_PER_FILL_PROGRAM": 2, "_MAX_SINGLE_LAUNCH_PAIRS": 4},
    "modular_kernel.ops.count": {"_SCAN_BLOCK": 1},
    "modular_kernel.ops.permute": {"_MAX_BLOCK_H": 32},
    "modular_kernel.ops.permute_quantize": {"_COLUMNS_PER_PROGRAM": 64, "_MAX_BLOCK_C": 64},
    "modular_kernel.ops.quantize": {"_COLUMNS_PER_PROGRAM": 32, "_MAX_BATCHED_PROGRAMS": 2},
    "modular_kernel.ops.quantize_tiles": {
        "_MAX_BLOCK_C": 64,
        "_MIN_STREAMED_VALUES": 0,
        "_STREAM_COLUMNS": 64,
        "_STREAM_PROGRAMS": 3,
        "_VALUES_PER_TILE": 256,
        "_VALUES_PER_WARP": 64,
    },
    "modular_kernel.ops.sort": {"_TILES_PER_PROGRAM": 2},
    "modular_kernel.ops.zero_rows": {"_MAX_BLOCK_H": 32, "_MAX_PROGRAMS_PER_SEGMENT": 2},
    "prepare_finalize.common.blocks": {
        "_MAX_COPY_BYTES": 64,
        "_MAX_SPLIT_TOKENS": 2,
        "_PAIRS_PER_PROGRAM": 8,
        "_SCAN_PAIRS": 16,
        "_SUM_COLUMNS": 32,
    },
    "prepare_finalize.symm_mem.launch": {"_SMALL_BATCH_TOKENS": 0},
}


@contextmanager
def lower_limits(*, enabled: bool = True) -> Iterator[None]:
    """Inside the block, replace the limits of all imported modules by `LOWERED_LIMITS`.

    enabled: if False, the block changes nothing.
    """
    modules = ((sys.modules.get(name), limits) for name, limits in LOWERED_LIMITS.items())
    lowered_modules = [
        (module, limits) for module, limits in modules if module is not None and enabled
    ]
    defaults = [
        {name: getattr(module, name) for name in limits} for module, limits in lowered_modules
    ]
    for module, limits in lowered_modules:
        vars(module).update(limits)
    try:
        yield
    finally:
        for (module, _), values in zip(lowered_modules, defaults, strict=True):
            vars(module).update(values)
