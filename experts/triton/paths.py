"""Every path by which a call of TritonExperts may go: a new one is a folder, and a line here."""

from experts.triton.aligned.aligned_path import AlignedPath
from experts.triton.aligned_w4.aligned_w4_path import AlignedW4Path
from experts.triton.dequantized.dequantized_path import DequantizedPath
from experts.triton.gemv.gemv_path import GemvPath
from experts.triton.gemv_tma.gemv_tma_path import GemvTmaPath
from experts.triton.gemv_w4.gemv_w4_path import GemvW4Path
from experts.triton.grouped_tma.grouped_tma_path import GroupedTmaPath
from experts.triton.grouped_w4.grouped_w4_path import GroupedW4Path
from experts.triton.path import Path

# The first serves every problem. Where several take a call without a tuned file, the last one does.
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
