"""Every path by which a call of TritonExperts may go: a new one is a folder, and a line here."""

from experts.triton.aligned.path import AlignedPath
from experts.triton.aligned_w4.path import AlignedW4Path
from experts.triton.dequantized.path import DequantizedPath
from experts.triton.gemv.path import GemvPath
from experts.triton.gemv_tma.path import GemvTmaPath
from experts.triton.gemv_w4.path import GemvW4Path
from experts.triton.grouped_tma.path import GroupedTmaPath
from experts.triton.grouped_w4.path import GroupedW4Path
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
