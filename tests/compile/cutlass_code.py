"""What tests of kernels in CuTe DSL share: whether it is there, and what reads its code."""

from pathlib import Path

import triton

from experts import CutlassExpertsFP8
from modular_kernel.machine import importable

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
PACKAGES = CutlassExpertsFP8.requires.packages
MISSING = not importable(PACKAGES) >= {*PACKAGES}
