"""player: all launches of a recording in one call of C (player.c beside this file).

Triton's launchers do the same for one launch each, with some 50 arguments through Python. The C
file is compiled when it is first needed, by the compiler that triton builds its launchers with,
and stays in triton's cache. The driver is asked for everything by name when the module is loaded.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from modular_kernel.replay import Play

# Triton ships no annotations.
Foreign = Any

_SCRATCH = 2  # parameters that triton adds to each kernel: pointers to scratch, here null
_INTEGERS = {f"{sign}{bits}" for sign in "iu" for bits in (1, 8, 16, 32, 64)}
_FLOATS = {"fp32": "<f4x", "fp64": "<d"}  # as struct has them


@dataclass(frozen=True)
class Packed:
    """A launch as player.c takes it.

    values: a kernel's parameters, eight bytes each. slots: (which value, input, bytes into it).
    kernel: what owns the function, kept as long as this.
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
    """A parameter of triton's type `kind` in eight bytes; None if that cannot be done.

    Numbers lie in the first bytes, where a kernel reads as many as its type has.
    """
    if kind.startswith("*") or kind in _INTEGERS:
        return (int(value or 0) & (2**64 - 1)).to_bytes(8, "little")
    return struct.pack(_FLOATS[kind], value) if kind in _FLOATS else None


def pack(
    compiled: Foreign,
    grid: tuple[int, ...],
    arguments: Sequence[Foreign],
    slots: dict[int, tuple[int, int]],
) -> Packed | None:
    """A launch of a compiled kernel; None if one of its arguments has an unknown type.

    arguments: in the order of the kernel's parameters, pointers as numbers. slots: which of them
    are (input, bytes into it).
    """
    metadata, values, places = compiled.metadata, list[bytes](), list[tuple[int, int, int]]()
    signature = compiled.src.signature.values()
    for at, (kind, argument) in enumerate(zip(signature, arguments, strict=True)):
        if kind == "constexpr":
            continue
        if at in slots:
            places.append((len(values), *slots[at]))
        value = pack_value(kind, argument) if isinstance(kind, str) else None
        if value is None:
            return None
        values.append(value)
    return Packed(
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
def module() -> Foreign:
    """player.c, compiled; None where there is no compiler or no driver that has what it needs."""
    from triton.backends.nvidia.driver import include_dirs
    from triton.runtime.build import compile_module_from_src

    source = Path(__file__).with_suffix(".c").read_text(encoding="utf-8")
    try:
        return compile_module_from_src(
            source, "modular_kernel_player", include_dirs=list(include_dirs)
        )
    except (ImportError, OSError, RuntimeError):
        return None


Described = tuple[list[tuple[Foreign, ...]], list[tuple[int, int, int]], bytes]


def describe(launches: Sequence[Packed]) -> Described:
    """launches, slots and values as `pack` of player.c takes them: all values in one row."""
    described, slots, values = list[tuple[Foreign, ...]](), list[tuple[int, int, int]](), b""
    for p in launches:
        first = len(values) // 8
        launch = (p.function, p.grid, p.threads, p.shared, p.dependent, p.cooperative)
        described.append((*launch, first, len(p.values)))
        slots += [(first + at, index, offset) for at, index, offset in p.slots]
        values += b"".join(p.values)
    return described, slots, values


def player(launches: Sequence[Packed], inputs: int) -> Play:
    """Plays `launches` in their order on the current device; `inputs`: how many pointers."""
    compiled, device = module(), torch.cuda.current_device()
    tape = compiled.pack(device, inputs, *describe(launches), tuple(launches))
    return partial(compiled.play, tape)
