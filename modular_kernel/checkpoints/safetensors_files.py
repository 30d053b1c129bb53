"""Safetensors files of a checkpoint: names, shapes and dtypes of tensors, and reads of slices.

    with open_tensors(Path("checkpoint/")) as files:
        files.names               # of all tensors, from the index if there is one
        files.facts("model.norm.weight")  # (4096,), torch.bfloat16
        files.read("model.norm.weight", (slice(0, 8),))

The safetensors library checks headers; this module checks the index, which must not refer to files
outside its folder. Every error names the file.
"""

import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from modular_kernel.errors import ConfigurationError, DtypeError, WeightsError
from modular_kernel.utils import json_files

_NEED = "safetensors: pip install safetensors"
_MAX_INDEX_BYTES = 1 << 28
_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFiles:
    """The tensors of a set of safetensors files, which are opened on first use.

    path: the folder or file, for messages. files: the file of each tensor, according to the index.
    bytes_read: of tensor data, by `read`.
    """

    def __init__(self, path: Path, files: Mapping[str, Path]) -> None:
        self.path = path
        self.files = files
        self.bytes_read = 0
        self._open: dict[Path, Any] = {}
        self._names_in_file: dict[Path, frozenset[str]] = {}

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self.files)

    def qualified_name(self, name: str) -> str:
        """Return the name of a tensor's file and of the tensor, for messages."""
        return f"{self.files[name].name}: {name}"

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and dtype of a tensor, from the header."""
        tensor_slice = self._slice(name)
        dtype = tensor_slice.get_dtype()
        if dtype not in _DTYPES:
            raise DtypeError(
                self.qualified_name(name), got=dtype, need=f"one of {', '.join(_DTYPES)}"
            )
        return tuple(tensor_slice.get_shape()), _DTYPES[dtype]

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Return a slice of a tensor, as a view of the memory-mapped file on the CPU.

        slices: slices of its leading dimensions, within its shape.
        """
        try:
            tensor: torch.Tensor = self._slice(name)[slices or ...]
        except _library_errors() as error:
            raise _invalid_file_error(self.files[name], error) from None
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def _slice(self, name: str) -> Any:
        path = self.files[name]
        if path not in self._open:
            self._open[path] = open_file(path)
            self._names_in_file[path] = frozenset(self._open[path].keys())
        if name not in self._names_in_file[path]:
            got, need = f"no {name}", "the tensors that the index lists"
            raise WeightsError(str(path), got=got, need=need)
        return self._open[path].get_slice(name)

    def close(self) -> None:
        """Close the files. Views that were read stay valid."""
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFiles]:
    """Open a safetensors file, or a folder with an index or with files that need none.

    Raises ConfigurationError for another file or folder, WeightsError for an invalid index or
    header.
    """
    tensors = TensorFiles(path, _files(path))
    try:
        yield tensors
    finally:
        tensors.close()


def has_tensors(path: Path) -> bool:
    """Return whether a folder contains safetensors files, or a file has their suffix."""
    try:
        return bool(_index_or_files(path)) if path.is_dir() else path.name.endswith(_SUFFIX)
    except OSError:
        return False


def open_file(path: Path) -> Any:
    """Open a regular safetensors file; convert the library's errors to WeightsError."""
    try:
        from safetensors import safe_open  # noqa: PLC0415 (a missing one is an error of ours)
    except ImportError:
        raise ConfigurationError(f"checkpoint {path}", got="no safetensors", need=_NEED) from None
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise WeightsError(str(path), got="not a regular file", need="a safetensors file")
        return safe_open(str(path), framework="pt", device="cpu")
    except _library_errors() as error:
        raise _invalid_file_error(path, error) from None


def _library_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that the library raises for an invalid file."""
    errors = (OSError, ValueError, IndexError)
    try:
        from safetensors import SafetensorError  # noqa: PLC0415
    except ImportError:
        return errors
    return (*errors, SafetensorError)


def _invalid_file_error(path: Path, error: Exception) -> WeightsError:
    if isinstance(error, WeightsError):
        return error
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return WeightsError(
        str(path), got=" ".join(reason.split())[:200], need="a complete safetensors file"
    )


def _files(path: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    try:
        if not path.is_dir():
            return dict.fromkeys(open_file(path).keys(), path)
        candidates = _index_or_files(path)
    except (OSError, ValueError) as error:
        if isinstance(error, WeightsError | ConfigurationError):
            raise
        raise _invalid_file_error(path, error) from None
    if not candidates:
        need = f"*{_SUFFIX} in it"
        raise ConfigurationError(f"checkpoint {path}", got="no safetensors", need=need)
    if candidates[0].name.endswith(_INDEX_SUFFIX):
        return _read_index(candidates[0])
    files: dict[str, Path] = {}
    for file in candidates:
        for name in open_file(file).keys():  # noqa: SIM118 (it is no mapping)
            if name in files:
                got = f"{name}, which is in {files[name].name} too"
                raise WeightsError(str(file), got=got, need="each tensor once, or an index")
            files[name] = file
    return files


def _index_or_files(path: Path) -> list[Path]:
    """Return the single index of a folder, or else its safetensors files."""
    names = sorted(file.name for file in path.iterdir())
    indices = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if len(indices) > 1:
        got, need = " and ".join(indices[:3]), "one index, or the path of one file"
        raise ConfigurationError(f"checkpoint {path}", got=got, need=need)
    return [path / name for name in indices or names if name.endswith((_SUFFIX, _INDEX_SUFFIX))]


def _read_index(index: Path) -> dict[str, Path]:
    """Return the file of each tensor in an index; all files must be in the index's folder."""
    try:
        content = json_files.parse(json_files.read_file(index, _MAX_INDEX_BYTES))
    except (OSError, ValueError) as error:
        got = f"no JSON: {str(error)[:100]}"
        raise WeightsError(str(index), got=got, need="an index of safetensors") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(str(index), got="no weight_map", need="an object: tensor -> file")
    for name, file in weight_map.items():
        is_file_name = isinstance(file, str) and file.endswith(_SUFFIX) and len(file) <= 255
        if not is_file_name or Path(file).name != file or "\0" in file or "\\" in file:
            got, need = (
                f"{name[:200]} in {str(file)[:200]!r}",
                f"a file in the folder of the index, *{_SUFFIX}",
            )
            raise WeightsError(str(index), got=got, need=need)
    return {name: index.parent / file for name, file in weight_map.items()}
