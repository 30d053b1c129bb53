"""The registry of the execution paths of TritonExperts; add a new path to PATHS."""

from experts.triton.aligned.aligned_path import AlignedPath
from experts.triton.aligned_w4.aligned_w4_path import AlignedW4Path
from experts.triton.dequantized.dequantized_path import DequantizedPath
from experts.triton.gemv.gemv_path import GemvPath
from experts.triton.gemv_tma.gemv_tma_path import GemvTmaPath
from experts.triton.gemv_w4.gemv_w4_path import GemvW4Path
from experts.triton.grouped_tma.grouped_tma_path import GroupedTmaPath
from experts.triton.grouped_w4.grouped_w4_path import GroupedW4Path
from experts.triton.path import Path

# The first path supports every problem. Without a tuned file, the last applicable path wins.
PATHS: tuple[type[Path], ...] = (
    AlignedPath,
    AlignedW4Path,
    GemvPath,
    GemvW4Path,
    GemvTmaPath,
    GroupedTmaPath,
    DequantizedPath,
    GroupedW4Path,
)
BASE = PATHS[0]
NAMES = tuple(path.name for path in PATHS)
BY_NAME = dict(zip(NAMES, PATHS, strict=True))
