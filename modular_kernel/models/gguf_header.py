"""Parses the header of GGUF files (llama.cpp): metadata, and type and offset of each tensor.

    header = read_header(Path("model-Q4_0.gguf"))     # of all files, if the model is split
    header.metadata["general.architecture"]           # "qwen3moe"
    header.tensors["blk.0.ffn_up_exps.weight"].shape  # (E, N, K)

A header has the numbers of entries and tensors, the entries of the metadata (key, type, value), and
a description of each tensor (name, shape, type, offset). All counts and sizes are checked against
the size of the file before they are used. Long arrays, such as the vocabulary of the tokenizer, are
skipped. Little-endian files of versions 2 and 3 are supported.
"""

import mmap
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError, WeightsError

SUFFIX = ".gguf"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_DEFAULT_ALIGNMENT = 32  # bytes, for files without the key general.alignment
_MAX_DIMS = 4
_MAX_NAME_BYTES = 1 << 16
_MAX_ARRAY = 4096  # longer arrays are skipped
_MAX_DEPTH = 4  # nesting of arrays
_MAX_FILES = 1000
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.ASCII)
_STRING, _ARRAY = 8, 9  # types of metadata values
# Format characters of `struct` for the scalar types of metadata values.
_SCALAR_FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_MIN_ENTRY_BYTES = 13  # of an entry of the metadata: key, type, and a value of one byte
_MIN_TENSOR_BYTES = 32  # of the description of a tensor


@dataclass(frozen=True)
class BlockType:
    """A tensor type of ggml. A block of `nbytes` bytes holds `values` adjacent values of a row."""

    name: str
    values: int
    nbytes: int


TYPES: dict[int, BlockType] = {
    number: BlockType(name, values, nbytes)
    for number, name, values, nbytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
    )
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file.

    shape: row-major shape.
    offset: position of the data in the file, in bytes.
    """

    path: Path
    shape: tuple[int, ...]
    type: BlockType
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return prod(self.shape) // self.type.values * self.type.nbytes


@dataclass(frozen=True)
class GgufHeader:
    """The header of a model, which may be split over several files.

    metadata: the metadata of the first file, without long arrays.
    tensors: the tensors of all files, by name.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def is_gguf(path: Path) -> bool:
    """Return whether a path has the suffix of GGUF files."""
    return path.suffix.lower() == SUFFIX


def shard_paths(path: Path) -> list[Path]:
    """Return all files of the model that contains the file `path`."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    count = min(int(match[3]), _MAX_FILES)
    return [
        path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf")
        for number in range(1, count + 1)
    ]


def find_model_file(folder: Path) -> Path | None:
    """Return the first file of the GGUF model in a folder; None if there is no GGUF file.

    Raises ConfigurationError if there are several models.
    """
    names = sorted(file.name for file in folder.iterdir() if is_gguf(file))
    names = [name for name in names if not name.startswith("mmproj")]  # vision encoders
    first_files = [name for name in names if shard_paths(folder / name)[0].name == name] or names
    if len(first_files) > 1:
        got, need = " and ".join(first_files[:3]), "the path of one model"
        raise ConfigurationError(f"checkpoint {folder}", got=got, need=need)
    return folder / first_files[0] if first_files else None


def read_header(path: Path) -> GgufHeader:
    """Read the header of the model that contains the file `path`.

    Raises WeightsError for a missing, truncated or invalid file.
    """
    metadata, tensors = dict[str, Any](), dict[str, TensorInfo]()
    for number, file in enumerate(shard_paths(path)):
        header = _read_file(file, *_get_size_and_mtime(file))
        metadata = header.metadata if number == 0 else metadata
        for name, info in header.tensors.items():
            if name in tensors:
                got = f"{name}, which is in {tensors[name].path.name} too"
                raise WeightsError(str(file), got=got, need="each tensor once")
            tensors[name] = info
    return GgufHeader(metadata, tensors)


def _get_size_and_mtime(path: Path) -> tuple[int, int]:
    """Return the size in bytes and the modification time in ns, which are keys of a cache."""
    try:
        status = path.stat()
    except OSError as error:
        got = error.strerror or "no file"
        raise WeightsError(str(path), got=got, need="a GGUF file") from None
    if not stat.S_ISREG(status.st_mode):
        raise WeightsError(str(path), got="not a regular file", need="a GGUF file")
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=64)
def _read_file(path: Path, size: int, _mtime: int) -> GgufHeader:
    if size < 24:  # magic number, version and two counts
        raise WeightsError(str(path), got=f"{size} bytes", need="a GGUF file")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).parse_header()
    except OSError as error:
        got = error.strerror or str(error)
        raise WeightsError(str(path), got=got, need="a GGUF file") from None


class _Parser:
    """Parser of the header of one file. Methods parse at `position`, and advance it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def parse_header(self) -> GgufHeader:
        if self.data[:4] != _MAGIC:
            raise self.make_error(f"the first bytes {self.data[:4]!r}", repr(_MAGIC))
        self.position = 4
        version = self.parse_scalar("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            got = f"version {version}" if swapped not in _VERSIONS else "a big-endian file"
            raise self.make_error(got, "version 2 or 3, little-endian")
        tensor_count, entry_count = self.parse_scalar("Q"), self.parse_scalar("Q")
        self.check_count(entry_count, _MIN_ENTRY_BYTES, "entries of metadata")
        metadata = dict[str, Any]()
        for _ in range(entry_count):
            key = self.parse_text()
            if key in metadata:
                raise self.make_error(f"{key[:200]} twice", "each key of the metadata once")
            metadata[key] = self.parse_value(self.parse_scalar("I"), key)
        self.check_count(tensor_count, _MIN_TENSOR_BYTES, "tensors")
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.make_error(f"general.alignment = {str(alignment)[:80]}", "a power of two")
        descriptions = [self.parse_tensor() for _ in range(tensor_count)]
        data_start = -(-self.position // alignment) * alignment
        tensors = dict[str, TensorInfo]()
        for name, info in descriptions:
            if name in tensors:
                raise self.make_error(f"{name[:200]} twice", "each tensor once")
            if info.offset % alignment:
                need = f"a multiple of the alignment {alignment}"
                raise self.make_error(f"{name[:200]} at {info.offset}", need)
            tensor = replace(info, offset=data_start + info.offset)
            if tensor.offset + tensor.nbytes > len(self.data):
                got = f"{name[:200]} up to byte {tensor.offset + tensor.nbytes}"
                raise self.make_error(got, f"a complete file: it has {len(self.data)} bytes")
            tensors[name] = tensor
        parsed_entries = {key: value for key, value in metadata.items() if value is not None}
        return GgufHeader(parsed_entries, tensors)

    def parse_tensor(self) -> tuple[str, TensorInfo]:
        """Parse the description of a tensor. Its offset is relative to the first tensor's data."""
        name, dims = self.parse_text(), self.parse_scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self.make_error(f"{name[:200]} of {dims} dimensions", f"1 to {_MAX_DIMS}")
        shape = tuple(self.parse_scalar("Q") for _ in range(dims))[::-1]
        number, offset = self.parse_scalar("I"), self.parse_scalar("Q")
        block = TYPES.get(number)
        if block is None:
            raise self.make_error(f"{name[:200]} of type {number}", "a supported type of ggml")
        size = prod(shape)
        if min(shape) < 1 or size >= 1 << 62 or shape[-1] % block.values:
            need = f"rows of whole blocks of {block.values} values of {block.name}"
            raise self.make_error(f"{name[:200]} of shape {shape}", need)
        return name, TensorInfo(self.path, shape, block, offset)

    def parse_value(self, kind: int, key: str, depth: int = 0) -> Any:
        """Parse a value of the metadata. Returns None for a skipped value.

        kind: number of the type.
        depth: nesting depth of arrays.
        """
        if kind in _SCALAR_FORMATS:
            return self.parse_scalar(_SCALAR_FORMATS[kind])
        if kind == _STRING:
            return self.parse_text(limit=len(self.data))
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise self.make_error(f"{key[:200]} of type {kind}", "a type of GGUF's metadata")
        return self.parse_array(key, depth)

    def parse_array(self, key: str, depth: int) -> list[Any] | None:
        """Parse an array. Returns None if it is longer than _MAX_ARRAY."""
        item_type, count = self.parse_scalar("I"), self.parse_scalar("Q")
        if item_type in _SCALAR_FORMATS:
            size = struct.calcsize(f"<{_SCALAR_FORMATS[item_type]}")
            self.check_count(count, size, f"items of {key[:200]}")
            if count > _MAX_ARRAY:
                self.position += count * size
                return None
        else:
            self.check_count(count, 8, f"items of {key[:200]}")
        if item_type == _STRING and count > _MAX_ARRAY:
            for _ in range(count):
                self.skip_text()
            return None
        items = [self.parse_value(item_type, key, depth + 1) for _ in range(count)]
        return items if count <= _MAX_ARRAY else None

    def parse_scalar(self, code: str) -> Any:
        """Parse a number with a format character of `struct`."""
        try:
            (value,) = struct.unpack_from(f"<{code}", self.data, self.position)
        except struct.error:
            raise self.make_truncated_error() from None
        self.position += struct.calcsize(f"<{code}")
        return value

    def skip_text(self) -> None:
        size = self.parse_scalar("Q")
        self.position += size
        if self.position > len(self.data):
            raise self.make_truncated_error()

    def parse_text(self, limit: int = _MAX_NAME_BYTES) -> str:
        size, start = self.parse_scalar("Q"), self.position
        if size > limit or start + size > len(self.data):
            raise self.make_error(f"a name of {size} bytes at byte {start}", "a complete file")
        self.position += size
        return self.data[start : start + size].decode("utf-8", "replace")

    def check_count(self, count: int, size: int, what: str) -> None:
        """Raise WeightsError if the rest of the file is too short for `count` items."""
        if count > (len(self.data) - self.position) // size:
            raise self.make_error(f"{count} {what}", "a complete file")

    def make_truncated_error(self) -> WeightsError:
        return self.make_error(
            f"{len(self.data)} bytes, which end in the header", "a complete file"
        )

    def make_error(self, got: str, need: str) -> WeightsError:
        return WeightsError(str(self.path), got=got, need=need)


def expert_tensor_types(header: GgufHeader, layer: int) -> Iterator[str]:
    """Yield the types of the experts' tensors of a layer."""
    for name in EXPERT_TENSORS:
        info = header.tensors.get(f"blk.{layer}.{name}.weight")
        if info is not None:
            yield info.type.name


# Names of the experts' weights in a layer, each of shape (E, N, K). A layer has either gate and up
# or the fused gate_up, and always down.
EXPERT_TENSORS = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")
