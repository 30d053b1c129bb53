"""cuda_replay: all launches of a recorded call in one call of C (cuda_replay.c beside this file).

Triton's launchers do the same for one launch each, with some 50 arguments through Python. The C
file is compiled when it is first needed, by the compiler that triton builds its launchers with,
and kept (modular_kernel.replay.launch.build). The driver is asked for everything by name when the
module is loaded.
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

# Triton ships no annotations.
Foreign = Any

_LOG = logging.getLogger("modular_kernel.replay")
_NAME = "modular_kernel_replay"  # as cuda_replay.c calls itself

MAP_BYTES = 128  # of a CUtensorMap
_MAP_ALIGNMENT = 128  # what CUDA 13 declares; 12 asks for 64
_SCRATCH = 2  # parameters that triton adds to each kernel: pointers to scratch, here null
_INTEGERS = {f"{sign}{bits}" for sign in "iu" for bits in (1, 8, 16, 32, 64)}
_FLOATS = {"fp32": "<f4x", "fp64": "<d"}  # as struct has them


@dataclass(frozen=True)
class LaunchRecord:
    """A launch as cuda_replay.c takes it.

    values: a kernel's parameters: TMA maps, and eight bytes of each other. slots: (which value,
    input, bytes into it). kernel: what owns the function, kept as long as this.
    """

    kernel: Foreign
    function: int
    grid: tuple[int, ...]
    threads: int
    shared: int
    dependent: bool
    cooperative: bool
    values: tuple[bytes, ...]
    slots: tuple[tuple[int, int, int], ...]


def pack_value(kind: str, value: Foreign) -> bytes | None:
    """Pack a parameter of triton's type `kind` in eight bytes; None if that cannot be done.

    Numbers lie in the first bytes, where a kernel reads as many as its type has.
    """
    if kind.startswith("*") or kind in _INTEGERS:
        return _word(value or 0)
    return struct.pack(_FLOATS[kind], value) if kind in _FLOATS else None


def map_values(descriptor: Foreign, meta: Foreign) -> list[bytes] | None:
    """Return what a kernel takes of a triton TensorDescriptor: its map, sizes and strides.

    None if triton keeps maps in another way than it did. meta: triton's, of this parameter.
    """
    from modular_kernel.replay.launch.triton_versions import encoded_map

    if not meta:  # the kernel makes the map itself
        return None
    found = encoded_map(descriptor, meta)
    return None if found is None else [found[0], *map(_word, found[1])]


def _word(number: int) -> bytes:
    return (int(number) & (2**64 - 1)).to_bytes(8, "little")


def pack(
    compiled: Foreign,
    grid: tuple[int, ...],
    arguments: Sequence[Foreign],
    slots: dict[int, tuple[int, int]],
) -> LaunchRecord | None:
    """Pack a launch of a compiled kernel; None if one of its arguments has an unknown type.

    arguments: in the order of the kernel's parameters, pointers as numbers, boxes of tensors as
    triton's descriptors. slots: which of them are (input, bytes into it).
    """
    metadata, values, places = compiled.metadata, list[bytes](), list[tuple[int, int, int]]()
    signature = compiled.src.signature.values()
    maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
    for at, (kind, argument) in enumerate(zip(signature, arguments, strict=True)):
        if kind == "constexpr":
            continue
        if at in slots:
            places.append((len(values), *slots[at]))
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
        slots=tuple(places),
    )


@cache
def _built() -> tuple[Foreign, str]:
    """cuda_replay.c as a module, or None and why not: tried once in a process, and said once."""
    try:
        import triton
        from triton.backends.nvidia.driver import include_dirs

        source, release = Path(__file__).with_suffix(".c"), f"triton {triton.__version__}"
        return module_of(source, _NAME, tuple(include_dirs), release), ""
    except (BuildError, ImportError, OSError) as error:
        _LOG.warning("launches are not replayed: %s", error)
        return None, str(error)


def module() -> Foreign:
    """cuda_replay.c, compiled; None without a compiler, or a driver that has what it needs."""
    return _built()[0]


def why_no_module() -> str:
    """Say why there is no `module`; "" if there is."""
    return _built()[1]


Described = tuple[list[tuple[Foreign, ...]], list[tuple[int, int, int, bool]], list[int], bytes]


def describe(launches: Sequence[LaunchRecord]) -> Described:
    """Return launches, slots, places and values as `pack` of cuda_replay.c takes them.

    All values lie in one row, maps on multiples of 128 bytes.
    """
    described, slots = list[tuple[Foreign, ...]](), list[tuple[int, int, int, bool]]()
    places, values = list[int](), b""
    for p in launches:
        first = len(places)
        launch = (p.function, p.grid, p.threads, p.shared, p.dependent, p.cooperative)
        described.append((*launch, first, len(p.values)))
        slots += [(first + at, i, offset, len(p.values[at]) > 8) for at, i, offset in p.slots]
        for value in p.values:
            if len(value) == MAP_BYTES:
                values += bytes(-len(values) % _MAP_ALIGNMENT)
            places.append(len(values) // 8)
            values += value
    return described, slots, places, values


def replayer(launches: Sequence[LaunchRecord], inputs: int) -> Replay:
    """Replays `launches` in their order on the current device; `inputs`: how many pointers."""
    compiled, device = module(), torch.cuda.current_device()
    recorded = compiled.pack(device, inputs, *describe(launches), tuple(launches))
    return partial(compiled.replay, recorded)
