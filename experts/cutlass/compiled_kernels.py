"""Compile CuTe DSL kernels in this process, or load object files that were compiled ahead of time.

    python -m experts.cutlass    # compiles all kernels into MK_CACHE_DIR; needs no GPU

At the first call of a kernel, loading its object file takes about 0.1 seconds. Compiling it takes
a few seconds. The cache key covers the sources in this folder, the versions of the DSL and of
tvm-ffi, the GPU architecture, the CPU architecture and libc.
"""

import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from modular_kernel.replay.launch.compiled_files import build_cached, find_cached, make_cache_key
from modular_kernel.text import escape_nonprintable

_LOG = logging.getLogger("modular_kernel.cutlass")
_SUFFIX, _OPTIONS = ".o", "--enable-tvm-ffi"
_PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi")


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel that can be compiled, or loaded from a cached object file.

    name: the name of the function in the object file.
    arch: the GPU architecture as the DSL names it, such as "sm_90a".
    compile: a function that compiles the kernel, given the options of cute.compile.
    """

    name: str
    arch: str
    compile: Callable[[str], Any]

    def load_or_compile(self) -> Callable[..., None]:
        """Load the kernel from its object file, or compile it for the current GPU."""
        path = find_cached(self._make_stem(), _SUFFIX)
        function = None if path is None else self._load(path)
        return self.compile(_OPTIONS) if function is None else function

    def _load(self, path: Path) -> Callable[..., None] | None:
        from cutlass import cute

        try:
            function: Callable[..., None] = cute.runtime.load_module(
                str(path), enable_tvm_ffi=True
            )[self.name]
        except Exception as error:  # noqa: BLE001  the DSL's exceptions vary
            _LOG.warning("recompiling %s: %s", self.name, escape_nonprintable(str(error)))
            return None
        return function

    def compile_to_cache(self) -> Path:
        """Compile the kernel to an object file unless it is cached; return the path of the file."""

        def write_object_file(path: Path) -> None:
            compiled = self.compile(f"{_OPTIONS} --gpu-arch {self.arch}")
            compiled.export_to_c(str(path), self.name)

        return find_cached(self._make_stem(), _SUFFIX) or build_cached(
            self._make_stem(), _SUFFIX, write_object_file
        )

    def _make_stem(self) -> str:
        """Return the name of the object file without its suffix."""
        sources = tuple(sorted(Path(__file__).parent.rglob("*.py")))
        versions = (*map(version, _PACKAGES), platform.machine(), *platform.libc_ver())
        return f"{self.name}-{make_cache_key(self.arch, *versions, files=sources)}"
