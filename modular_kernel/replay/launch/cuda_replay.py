"""cuda_replay: run all launches of a recorded call with one C call (cuda_replay.c).

Triton's launchers handle one launch each, with some 50 arguments passed through Python. The C file
is compiled on first use, with the compiler that triton uses for its launchers, and cached
(modular_kernel.replay.launch.build). All driver functions are looked up by name when the module is
loaded.
"""

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from modular_kernel.replay.launch.build import BuildError, module_of
from modular_kernel.replay.recording import Replay

# Triton has no type annotations.
TritonObject = Any

_LOG = logging.getLogger("modular_kernel.replay")
_NAME = "modular_kernel_replay"  # must match cuda_replay.c

MAP_BYTES = 128  # size of a CUtensorMap
_MAP_ALIGNMENT = 128  # declared by CUDA 13; CUDA 12 requires 64
# Triton appends two pointers to scratch memory to each kernel's parameters. They are null here.
_SCRATCH = 2
_INTEGERS = {f"{sign}{bits}" for sign in "iu" for bits in (1, 8, 16, 32, 64)}
_FLOATS = {"fp32": "<f4x", "fp64": "<d"}  # struct formats


@dataclass(frozen=True)
class LaunchRecord:
    """A launch in the form of cuda_replay.c.

    kernel: owner of the function, kept alive with this record.
    function: address of the CUfunction.
    threads: number of threads per program.
    shared: bytes of shared memory per program.
    dependent: whether programmatic dependent launch is enabled.
    cooperative: whether all programs must be resident at once.
    values: the kernel's parameters, each a TMA map or eight bytes.
    slots: (index in `values`, input, byte offset) of each parameter that a replay replaces by the
        address of an input plus the offset.
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
    """Pack a parameter of triton type `kind` into eight bytes; None for an unknown type.

    The value is in the first bytes. A kernel reads as many of them as its type has.
    """
    if kind.startswith("*") or kind in _INTEGERS:
        return _word(value or 0)
    return struct.pack(_FLOATS[kind], value) if kind in _FLOATS else None


def map_values(descriptor: TritonObject, meta: TritonObject) -> list[bytes] | None:
    """Return the kernel parameters of a triton TensorDescriptor: its map, sizes and strides.

    Return None if triton stores maps in an unknown way.

    meta: triton's metadata of this parameter; None if the kernel builds the map itself.
    """
    from modular_kernel.replay.launch.triton_versions import encoded_map

    if not meta:  # the kernel builds the map itself
        return None
    encoded = encoded_map(descriptor, meta)
    return None if encoded is None else [encoded[0], *map(_word, encoded[1])]


def _word(number: int) -> bytes:
    return (int(number) & (2**64 - 1)).to_bytes(8, "little")


def pack(
    compiled: TritonObject,
    grid: tuple[int, ...],
    arguments: Sequence[TritonObject],
    slots: dict[int, tuple[int, int]],
) -> LaunchRecord | None:
    """Pack a launch of a compiled kernel; None if one of its arguments has an unknown type.

    compiled: triton's CompiledKernel.
    arguments: in the order of the kernel's parameters. Tensors are given as integer pointers, or as
        triton descriptors.
    slots: index of an argument -> (input, byte offset).
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
            packed = map_values(argument, next(maps, None))
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
        values=(*values, *[bytes(8)] * _SCRATCH),
        slots=tuple(slot_entries),
    )


@cache
def _build_module() -> tuple[TritonObject, str]:
    """Return cuda_replay.c as a module, or None and the reason.

    It is built once, and a failure is logged once.
    """
    try:
        import triton
        from triton.backends.nvidia.driver import include_dirs

        source, release = Path(__file__).with_suffix(".c"), f"triton {triton.__version__}"
        return module_of(source, _NAME, tuple(include_dirs), release), ""
    except (BuildError, ImportError, OSError) as error:
        _LOG.warning("launches are not replayed: %s", error)
        return None, str(error)


def module() -> TritonObject:
    """Return cuda_replay.c as a module; None without a compiler or a suitable driver."""
    return _build_module()[0]


def why_no_module() -> str:
    """Return why `module` is None; "" if it is available."""
    return _build_module()[1]


PackArguments = tuple[
    list[tuple[TritonObject, ...]], list[tuple[int, int, int, bool]], list[int], bytes
]


def describe(launches: Sequence[LaunchRecord]) -> PackArguments:
    """Return launches, slots, places and values: the arguments of `pack` in cuda_replay.c.

    All values are concatenated, with maps aligned to 128 bytes. A place is the position of a value,
    in words of eight bytes.
    """
    described, slots = list[tuple[TritonObject, ...]](), list[tuple[int, int, int, bool]]()
    places, values = list[int](), b""
    for p in launches:
        first = len(places)
        launch = (p.function, p.grid, p.threads, p.shared, p.dependent, p.cooperative)
        described.append((*launch, first, len(p.values)))
        slots += [
            (first + index, i, offset, len(p.values[index]) > 8) for index, i, offset in p.slots
        ]
        for value in p.values:
            if len(value) == MAP_BYTES:
                values += bytes(-len(values) % _MAP_ALIGNMENT)
            places.append(len(values) // 8)
            values += value
    return described, slots, places, values


def replayer(launches: Sequence[LaunchRecord], inputs: int) -> Replay:
    """Return a function that replays `launches` in order on the current device.

    inputs: the number of input pointers.
    """
    compiled, device = module(), torch.cuda.current_device()
    recorded = compiled.pack(device, inputs, *describe(launches), tuple(launches))
    return partial(compiled.replay, recorded)
