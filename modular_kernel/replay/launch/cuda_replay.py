"""`cuda_replay`: runs all launches of a recorded call with one call of C code (cuda_replay.c).

A launcher of Triton runs a single launch, and passes about 50 arguments through Python. The C file
is compiled on first use with the compiler that Triton uses, and cached
(modular_kernel.replay.launch.build). It loads the functions of the CUDA driver by name, so it is
not linked against a driver.
"""

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from modular_kernel.replay.launch.build import BuildError, load_module
from modular_kernel.replay.recording import Replay

# Triton has no type annotations.
TritonObject = Any

_LOG = logging.getLogger("modular_kernel.replay")
_NAME = "modular_kernel_replay"  # must match cuda_replay.c

MAP_BYTES = 128  # size of a CUtensorMap
_MAP_ALIGNMENT = 128  # declared by CUDA 13; CUDA 12 requires 64
# Triton appends two pointers to scratch memory to each kernel's parameters. Replays pass null.
_NUM_SCRATCH_POINTERS = 2
_INTEGERS = {f"{sign}{bits}" for sign in "iu" for bits in (1, 8, 16, 32, 64)}
_FLOATS = {"fp32": "<f4x", "fp64": "<d"}  # struct formats


@dataclass(frozen=True)
class LaunchRecord:
    """A launch in the form that cuda_replay.c reads.

    kernel: the owner of the function, which this reference keeps alive.
    function: address of the CUfunction.
    threads: number of threads per program.
    shared: bytes of shared memory per program.
    dependent: whether programmatic dependent launch is enabled.
    cooperative: whether all programs must be resident at once.
    values: the parameters of the kernel, each a TMA map (CUtensorMap) or eight bytes.
    slots: parameters that a replay replaces, as (index in `values`, index of an input, byte
        offset). The new value is the address of the input plus the offset. Inputs are the tensors
        of the recorded call whose addresses differ between replays.
    """

    kernel: TritonObject
    function: int
    grid: tuple[int, ...]
    threads: int
    shared: int
    dependent: bool
    cooperative: bool
    values: tuple[bytes, ...]
    slots: tuple[tuple[int, int, int], ...]


def pack_value(kind: str, value: TritonObject) -> bytes | None:
    """Pack a parameter of triton type `kind` into eight bytes. Returns None for an unknown type.

    The value is in the first bytes. The kernel reads only the bytes of its type.
    """
    if kind.startswith("*") or kind in _INTEGERS:
        return _to_word(value or 0)
    return struct.pack(_FLOATS[kind], value) if kind in _FLOATS else None


def pack_tensor_map(descriptor: TritonObject, meta: TritonObject) -> list[bytes] | None:
    """Return the kernel parameters of a triton TensorDescriptor: its TMA map, sizes and strides.

    Returns None if the kernel builds the map, or if triton stores maps in an unknown format.

    meta: triton's metadata of this parameter; None if the kernel builds the map.
    """
    from modular_kernel.replay.launch.triton_versions import encode_tensor_map

    if not meta:
        return None
    encoded = encode_tensor_map(descriptor, meta)
    return None if encoded is None else [encoded[0], *map(_to_word, encoded[1])]


def _to_word(number: int) -> bytes:
    return (int(number) & (2**64 - 1)).to_bytes(8, "little")


def pack_launch(
    compiled: TritonObject,
    grid: tuple[int, ...],
    arguments: Sequence[TritonObject],
    slots: dict[int, tuple[int, int]],
) -> LaunchRecord | None:
    """Pack a launch of a compiled kernel. Returns None if an argument has an unknown type.

    compiled: triton's CompiledKernel.
    arguments: arguments in the order of the kernel's parameters. A tensor is an integer address or
        a triton TensorDescriptor.
    slots: index of an argument -> (index of an input, byte offset).
    """
    metadata, values, slot_entries = compiled.metadata, list[bytes](), list[tuple[int, int, int]]()
    signature = compiled.src.signature.values()
    maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
    for index, (kind, argument) in enumerate(zip(signature, arguments, strict=True)):
        if kind == "constexpr":
            continue
        if index in slots:
            slot_entries.append((len(values), *slots[index]))
        packed = None
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            packed = pack_tensor_map(argument, next(maps, None))
        elif isinstance(kind, str):
            value = pack_value(kind, argument)
            packed = None if value is None else [value]
        if packed is None:
            return None
        values += packed
    return LaunchRecord(
        kernel=compiled,
        function=compiled.function,
        grid=(*grid, 1, 1)[:3],
        threads=metadata.num_warps * metadata.target.warp_size,
        shared=metadata.shared,
        dependent=bool(metadata.launch_pdl),
        cooperative=bool(metadata.launch_cooperative_grid),
        values=(*values, *[bytes(8)] * _NUM_SCRATCH_POINTERS),
        slots=tuple(slot_entries),
    )


@cache
def _build_module() -> tuple[TritonObject, str]:
    """Return (cuda_replay.c as a module, ""), or (None, reason) if it cannot be built."""
    try:
        import triton
        from triton.backends.nvidia.driver import include_dirs

        source, release = Path(__file__).with_suffix(".c"), f"triton {triton.__version__}"
        return load_module(source, _NAME, tuple(include_dirs), release), ""
    except (BuildError, ImportError, OSError) as error:
        _LOG.warning("launches are not replayed: %s", error)
        return None, str(error)


def get_module() -> TritonObject:
    """Return cuda_replay.c as a module; None without a compiler or a suitable driver."""
    return _build_module()[0]


def why_no_module() -> str:
    """Return why `get_module` returns None; "" if the module is available."""
    return _build_module()[1]


PackArguments = tuple[
    list[tuple[TritonObject, ...]], list[tuple[int, int, int, bool]], list[int], bytes
]


def make_pack_arguments(launches: Sequence[LaunchRecord]) -> PackArguments:
    """Return (launches, slots, word_offsets, values), the arguments of `pack` in cuda_replay.c.

    word_offsets: the position of each value, in words of eight bytes.
    values: the concatenated values of all launches, with maps aligned to 128 bytes.
    """
    packed, slots = list[tuple[TritonObject, ...]](), list[tuple[int, int, int, bool]]()
    word_offsets, values = list[int](), b""
    for record in launches:
        first = len(word_offsets)
        launch = (record.function, record.grid, record.threads, record.shared)
        flags = (record.dependent, record.cooperative)
        packed.append((*launch, *flags, first, len(record.values)))
        for index, input_index, offset in record.slots:
            is_map = len(record.values[index]) > 8
            slots.append((first + index, input_index, offset, is_map))
        for value in record.values:
            if len(value) == MAP_BYTES:
                values += bytes(-len(values) % _MAP_ALIGNMENT)
            word_offsets.append(len(values) // 8)
            values += value
    return packed, slots, word_offsets, values


def make_replay(launches: Sequence[LaunchRecord], num_inputs: int) -> Replay:
    """Return a function that replays `launches` in order on the current device.

    num_inputs: the number of pointers that each replay takes.
    """
    module, device = get_module(), torch.cuda.current_device()
    recorded = module.pack(device, num_inputs, *make_pack_arguments(launches), tuple(launches))
    return partial(module.replay, recorded)
