"""Compilation of CuTe DSL kernels in a subprocess, and disassembly of their code."""

import subprocess
import sys
from pathlib import Path

import pytest
import triton

from experts import CutlassExpertsFP8
from modular_kernel.machine import find_importable

DSL_PACKAGES = CutlassExpertsFP8.requires.packages
DSL_MISSING = not find_importable(DSL_PACKAGES) >= {*DSL_PACKAGES}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_to_folder(folder: Path, arch: str, program: str, *arguments: str) -> None:
    """Run `program`, which compiles a kernel, and write the kernel's files to `folder`.

    arch: the target, such as "sm_90a".
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_DSL_ARCH", arch)
        patch.setenv("CUTE_DSL_KEEP_CUBIN", "1")
        patch.setenv("CUTE_DSL_KEEP_PTX", "1")
        patch.setenv("CUTE_DSL_DUMP_DIR", str(folder))
        patch.setenv("MK_CACHE_DIR", str(folder / "cache"))  # an empty cache
        subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=120)


def run_cuobjdump(folder: Path, option: str) -> str:
    """Return the output of cuobjdump for the only kernel in the folder."""
    (cubin,) = folder.glob("*.cubin")
    result = subprocess.run([_CUOBJDUMP, option, cubin], capture_output=True, text=True, check=True)
    return result.stdout
