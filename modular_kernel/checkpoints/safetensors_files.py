"""Reads safetensors files: names, shapes and dtypes from the headers, and slices of tensors.

    files = TensorFiles(folder, map_tensors_to_files(folder))
    files.names                                      # frozenset of all tensor names
    files.shape_and_dtype("model.norm.weight")       # (4096,), torch.bfloat16
    files.read("model.norm.weight", (slice(0, 8),))  # (8,) bfloat16

`checkpoint_files` selects the files, and `open_files` opens them. Errors of the safetensors library
are converted to WeightsError with the name of the file.
"""

import stat
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from modular_kernel.checkpoints.checkpoint_files import (
    INDEX_SUFFIX,
    find_index_or_files,
    make_absent_files_error,
    make_no_tensors_error,
    read_index,
)
from modular_kernel.errors import ConfigurationError, DtypeError, WeightsError

_INSTALL_HINT = "safetensors: pip install safetensors"
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
    """The tensors in a set of safetensors files. A file is opened when one of its tensors is used.

    path: the folder or file, for messages.
    files: tensor name -> file, from the index if there is one.
    bytes_read: bytes of tensor data that `read` has returned.
    """

    def __init__(self, path: Path, files: Mapping[str, Path]) -> None:
        self.path = path
        self.files = files
        self.bytes_read = 0
        self._open_files: dict[Path, Any] = {}
        self._names_in_file: dict[Path, frozenset[str]] = {}
        self._metadata: dict[Path, dict[str, str]] = {}
        self._headers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.files)

    def qualified_name(self, name: str) -> str:
        """Return "file: tensor" for messages."""
        return f"{self.files[name].name}: {name}"

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and dtype of a tensor, from the header."""
        header = self._headers.get(name)
        if header is None:
            tensor_slice = self._get_slice(name)
            dtype = tensor_slice.get_dtype()
            if dtype not in _DTYPES:
                need = f"one of {', '.join(_DTYPES)}"
                raise DtypeError(self.qualified_name(name), got=dtype, need=need)
            header = self._headers[name] = tuple(tensor_slice.get_shape()), _DTYPES[dtype]
        return header

    def metadata(self, name: str) -> dict[str, str]:
        """Return the metadata (strings by key) in the header of the file that has this tensor."""
        self._get_slice(name)  # opens the file
        path = self.files[name]
        if path not in self._metadata:
            self._metadata[path] = self._open_files[path].metadata() or {}
        return self._metadata[path]

    def nbytes(self, name: str) -> int:
        """Return the size of a tensor in bytes."""
        shape, dtype = self.shape_and_dtype(name)
        return prod(shape) * dtype.itemsize

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Return a slice of a tensor, as a view of the memory-mapped file on the CPU.

        slices: slices of the leading dimensions, within the shape; () for the whole tensor.
        """
        # safetensors allocates on the default device. Entering a device context takes longer than a
        # small read, so it is entered only if the default device is not the CPU.
        device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
        try:
            with device:
                tensor: torch.Tensor = self._get_slice(name)[slices or ...]
        except _list_library_errors() as error:
            raise _make_invalid_file_error(self.files[name], error) from None
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def _get_slice(self, name: str) -> Any:
        path = self.files[name]
        if path not in self._open_files:
            if not path.exists():
                raise make_absent_files_error(self.path, set(self.files.values()))
            self._open_files[path] = open_file(path)
            self._names_in_file[path] = frozenset(self._open_files[path].keys())
        if name not in self._names_in_file[path]:
            got, need = f"no {name}", "the tensors that the index lists"
            raise WeightsError(str(path), got=got, need=need)
        return self._open_files[path].get_slice(name)

    def close(self) -> None:
        """Close the files. Views that were read stay valid."""
        for file in self._open_files.values():
            file.__exit__(None, None, None)
        self._open_files.clear()


def open_file(path: Path) -> Any:
    """Open a safetensors file. Raises WeightsError if it is not a complete, regular file."""
    try:
        from safetensors import safe_open  # noqa: PLC0415 (optional dependency)
    except ImportError:
        raise ConfigurationError(
            f"checkpoint {path}", got="no safetensors", need=_INSTALL_HINT
        ) from None
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise WeightsError(str(path), got="not a regular file", need="a safetensors file")
        return safe_open(str(path), framework="pt", device="cpu")
    except _list_library_errors() as error:
        raise _make_invalid_file_error(path, error) from None


def _list_library_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that the safetensors library raises for an invalid file."""
    errors = (OSError, ValueError, IndexError)
    try:
        from safetensors import SafetensorError  # noqa: PLC0415
    except ImportError:
        return errors
    return (*errors, SafetensorError)


def _make_invalid_file_error(path: Path, error: Exception) -> WeightsError:
    if isinstance(error, WeightsError):
        return error
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return WeightsError(
        str(path), got=" ".join(reason.split())[:200], need="a complete safetensors file"
    )


def map_tensors_to_files(path: Path) -> dict[str, Path]:
    """Return {tensor name: file} for a safetensors file, an index or a folder."""
    try:
        if path.name.endswith(INDEX_SUFFIX):
            return read_index(path)
        if not path.is_dir():
            return dict.fromkeys(open_file(path).keys(), path)
        candidates = find_index_or_files(path)
    except (OSError, ValueError) as error:
        if isinstance(error, WeightsError | ConfigurationError):
            raise
        raise _make_invalid_file_error(path, error) from None
    if not candidates:
        raise make_no_tensors_error(path)
    if candidates[0].name.endswith(INDEX_SUFFIX):
        return read_index(candidates[0])
    files: dict[str, Path] = {}
    for file in candidates:
        for name in open_file(file).keys():  # noqa: SIM118 (`safe_open` is not a mapping)
            if name in files:
                got = f"{name}, which is in {files[name].name} too"
                raise WeightsError(str(file), got=got, need="each tensor once, or an index")
            files[name] = file
    return files
