"""The list of the execution paths of TritonExperts. To add a path, append it to BUILT_IN_PATHS.

`ALL_PATHS`, `NAMES` and `BY_NAME` contain the built-in paths, then the paths of other packages
(`experts.triton.external_paths`). The paths of other packages are loaded on first use, because a
package that provides a path itself imports modules of `experts`.

Without a tuned file, a call takes the last path in the list that supports its problem and its
number of tokens. A path of another package therefore has priority over the built-in paths for the
problems that its `supports` accepts.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import overload

from experts.triton.aligned.aligned_path import AlignedPath
from experts.triton.aligned_w4.aligned_w4_path import AlignedW4Path
from experts.triton.dequantized.dequantized_path import DequantizedPath
from experts.triton.external_paths import ExternalPaths, load_external_paths
from experts.triton.gemv.gemv_path import GemvPath
from experts.triton.gemv_tma.gemv_tma_path import GemvTmaPath
from experts.triton.gemv_w4.gemv_w4_path import GemvW4Path
from experts.triton.grouped_tma.grouped_tma_path import GroupedTmaPath
from experts.triton.grouped_w4.grouped_w4_path import GroupedW4Path
from experts.triton.path import Path

# The first path supports every problem.
BUILT_IN_PATHS: tuple[type[Path], ...] = (
    AlignedPath,
    AlignedW4Path,
    GemvPath,
    GemvW4Path,
    GemvTmaPath,
    GroupedTmaPath,
    DequantizedPath,
    GroupedW4Path,
)
BUILT_IN_NAMES = tuple(path.name for path in BUILT_IN_PATHS)
BASE_PATH = BUILT_IN_PATHS[0]


@cache
def external_paths() -> ExternalPaths:
    """Return the paths of other packages. Entry points are read once per process."""
    return load_external_paths(BUILT_IN_NAMES)


@cache
def _get_paths_by_name() -> dict[str, type[Path]]:
    external = (external_path.path for external_path in external_paths().usable)
    return {path.name: path for path in (*BUILT_IN_PATHS, *external)}


class _PathSequence(Sequence[type[Path]]):
    """All paths, built-in ones first."""

    @overload
    def __getitem__(self, index: int) -> type[Path]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[type[Path]]: ...
    def __getitem__(self, index: int | slice) -> type[Path] | Sequence[type[Path]]:
        return tuple(_get_paths_by_name().values())[index]

    def __len__(self) -> int:
        return len(_get_paths_by_name())


class _NameSequence(Sequence[str]):
    """The names of all paths, in the same order as `ALL_PATHS`."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return tuple(_get_paths_by_name())[index]

    def __len__(self) -> int:
        return len(_get_paths_by_name())


class _PathsByName(Mapping[str, type[Path]]):
    """All paths by name, in the same order as `ALL_PATHS`."""

    def __getitem__(self, name: str) -> type[Path]:
        return _get_paths_by_name()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_get_paths_by_name())

    def __len__(self) -> int:
        return len(_get_paths_by_name())


ALL_PATHS: Sequence[type[Path]] = _PathSequence()
NAMES: Sequence[str] = _NameSequence()
BY_NAME: Mapping[str, type[Path]] = _PathsByName()
