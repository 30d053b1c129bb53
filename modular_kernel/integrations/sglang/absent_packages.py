"""Mocks packages that SGLang imports but that are not installed on a machine without a GPU."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

# Packages that modules of SGLang's MoE layers import, but do not use on a CPU.
PACKAGES = (
    *("flashinfer", "humming", "quack", "sgl_kernel", "soundfile", "timm", "torchao"),
    *("torchcodec", "torchvision"),
)


class _MockImporter(MetaPathFinder, Loader):
    """Imports packages and their modules as mocks."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] not in self._packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        module.__version__ = "99.0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def mock_absent_packages() -> list[str]:
    """Mock those of PACKAGES that are not installed, and return their names."""
    absent = [name for name in PACKAGES if name not in sys.modules and find_spec(name) is None]
    sys.meta_path.append(_MockImporter(absent))
    return absent
