"""Kernels in CuTe DSL, compiled in this process or ahead of time.

    python -m experts.cutlass    # compiles all of them, without a GPU; kept in MK_CACHE_DIR

A process compiles a kernel at its first call, in seconds, unless its object is kept: that loads in
a tenth of one. An object is known by the sources in this folder, the versions of the DSL and of
tvm-ffi, the GPU's architecture and the machine; of anything else it is compiled.
"""

import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from modular_kernel.replay.launch.compiled_files import find, keep, key_of
from modular_kernel.text import printable

_LOG = logging.getLogger("modular_kernel.cutlass")
_SUFFIX, _OPTIONS = ".o", "--enable-tvm-ffi"
_PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi")


@dataclass(frozen=True)
class Kernel:
    """name: of the function in its object. arch: as the DSL calls it, "sm_90a". make: compiles it,
    with the options of cute.compile."""

    name: str
    arch: str
    make: Callable[[str], Any]

    def get(self) -> Callable[..., None]:
        """Load the kernel's object, or compile it where none is kept."""
        path = find(self._stem(), _SUFFIX)
        found = None if path is None else self._loaded(path)
        return self.make(_OPTIONS) if found is None else found  # for the GPU that is here

    def _loaded(self, path: Path) -> Callable[..., None] | None:
        from cutlass import cute

        try:
            found: Callable[..., None] = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[
                self.name
            ]
        except Exception as error:  # noqa: BLE001  whichever the DSL has for it
            _LOG.warning("%s is compiled anew: %s", self.name, printable(str(error)))
            return None
        return found

    def keep(self) -> Path:
        """Compile the kernel unless its object is kept; where that is."""

        def write(path: Path) -> None:
            compiled = self.make(f"{_OPTIONS} --gpu-arch {self.arch}")
            compiled.export_to_c(str(path), self.name)

        return find(self._stem(), _SUFFIX) or keep(self._stem(), _SUFFIX, write)

    def _stem(self) -> str:
        sources = tuple(sorted(Path(__file__).parent.rglob("*.py")))
        facts = (*map(version, _PACKAGES), platform.machine(), *platform.libc_ver())
        return f"{self.name}-{key_of(self.arch, *facts, files=sources)}"
