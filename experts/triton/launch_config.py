"""Launch configurations of the two GEMMs, and the limits set by hardware, scheme and memory."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Machine, Problem

_MAX_BLOCK = 1024
_MAX_TILE = 1 << 20  # Triton's limit on the elements of one tensor
_WARPS = (1, 2, 4, 8, 16)
_MAX_STAGES = 16
_MAX_GROUP = 4096
_BITS = {"float8_e4m3fn": 8, "int8": 8, "uint8": 8, "uint4": 4, "float4_e2m1": 4}
# Max bytes of shared memory per block, by compute capability.
_SHARED = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (12, 0): 101_376,
}
_MIN_SHARED = 101_376  # the minimum of _SHARED

# (pattern in a device name, compute capability); the first pattern that occurs decides. Names are
# those that the driver reports, or the same with "_" for spaces, as in file names.
_ARCHS = (
    (r"RTX[ _](?:PRO|50\d\d)", (12, 0)),
    (r"G?B300", (10, 3)),
    (r"(?:G?B200|B100)", (10, 0)),
    (r"(?:GH200|H[128]00|H20)", (9, 0)),
    (r"(?:L4|L40S?|L20|RTX[ _]40\d\d|RTX[ _]\d000[ _]Ada)", (8, 9)),
    (r"Orin", (8, 7)),
    (r"(?:A[128]6?|A[14]0|A10G|RTX[ _]30\d\d|RTX[ _]A\d000)", (8, 6)),
    (r"(?:A[138]00|A30)", (8, 0)),
)

# `Violation.what` of the limits that a smaller tile can satisfy.
GROUP_LIMIT = "block_k within a group"
SHARED_LIMIT = "bytes of shared memory"


class Launch(Protocol):
    """The launch configuration of one GEMM; each path defines its own type."""

    @property
    def block_m(self) -> int:
        """Return the rows per block, the same for both GEMMs."""

    @property
    def block_n(self) -> int:
        """Return the output columns per block.

        A gated GEMM 1 computes block_n gate columns and block_n up columns for them.
        """

    @property
    def num_warps(self) -> int:
        """Return the warps per program."""

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the software pipeline along K."""


L = TypeVar("L", bound=Launch)


@dataclass(frozen=True)
class LaunchConfig:
    """The launch of a tiled GEMM.

    Blocks are block_m rows by block_n output columns, in K steps of block_k elements. group_m row
    blocks are computed next to each other, so that they share weight tiles in L2. A gated GEMM 1
    computes block_n gate columns and block_n up columns.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        sizes = f"block_m={self.block_m} block_n={self.block_n} block_k={self.block_k}"
        return f"{sizes} group_m={self.group_m} warps={self.num_warps} stages={self.num_stages}"


@dataclass(frozen=True)
class MoEConfig:
    """The configuration of one call: the launches of both GEMMs and the path that runs them.

    `path` is a name from `experts.triton.paths`. Both GEMMs use the same blocks of rows: raise
    ConfigurationError if their block_m differs.
    """

    gemm1: Launch
    gemm2: Launch
    path: str

    def __post_init__(self) -> None:
        if self.gemm1.block_m != self.gemm2.block_m:
            got = f"{self.gemm1.block_m} and {self.gemm2.block_m}"
            need = "the same for both GEMMs, which share one alignment"
            raise ConfigurationError("block_m of a configuration", got=got, need=need)

    def __str__(self) -> str:
        return f"{self.path}: GEMM 1 {self.gemm1}; GEMM 2 {self.gemm2}"

    def both(self, kind: type[L]) -> tuple[L, L]:
        """Return the launches of GEMM 1 and GEMM 2, asserting that both are of type `kind`."""
        launch1, launch2 = self.gemm1, self.gemm2
        assert isinstance(launch1, kind)
        assert isinstance(launch2, kind)
        return launch1, launch2


@dataclass(frozen=True)
class Device:
    """The device limits that a launch must satisfy.

    name: as reported by the driver; "" without a GPU.
    shared: maximum bytes of shared memory per block.
    warpgroups: the GPU is sm_90 or newer. Its warpgroup MMA (wgmma) reads operands from shared
        memory, so a pipeline of s stages holds s operand tiles there instead of s - 1.
    tma: the TMA kernels, which are written for sm_90 only, can run.
    """

    name: str = ""
    shared: int = _SHARED[9, 0]
    warpgroups: bool = True
    tma: bool = False

    @classmethod
    def of(cls, machine: Machine) -> "Device":
        """Describe the GPU of `machine`; without one, return the limits of sm_90.

        Kernels are compiled for sm_90 on a machine without a GPU.
        """
        if machine.arch is None:
            return cls()
        shared = _SHARED.get(machine.arch, _MIN_SHARED)
        warpgroups, tma = machine.arch >= (9, 0), machine.arch == (9, 0)
        return cls(machine.name, shared, warpgroups=warpgroups, tma=tma)

    @classmethod
    def named(cls, name: str) -> "Device":
        """Describe a GPU by its driver or file name.

        An unknown GPU gets the smallest limits of any supported one.
        """
        arch = arch_of_name(name)
        if arch is None:
            return cls(name, _MIN_SHARED)
        return cls.of(Machine("cuda", arch, name=name))


def arch_of_name(name: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU by its driver or file name; None if not known."""
    for words, arch in _ARCHS:
        if re.search(rf"(?<![^\W_]){words}(?![^\W_])", name):
            return arch
    return None


@dataclass(frozen=True)
class Gemm:
    """The properties of one of the two GEMMs that limit its tiles.

    index: 1 or 2.
    depth: K.
    sides: 2 if gate and up columns are computed together, else 1.
    a_bits, b_bits: bits per stored element of the left operand (rows) and the right one (weights).
    dequantized_bits: bits of a dequantized weight; 0 if weights are multiplied as stored.
    scaled: whether the operands have scales.
    group_k: K elements per weight scale; 0 if one scale covers all of K.
    out_bits: bits per element of the output.
    tensor_cores: whether the products run on tensor cores.
    min_block_n: the minimum block_n.
    """

    index: int
    depth: int
    sides: int
    a_bits: int
    b_bits: int
    dequantized_bits: int
    scaled: bool
    group_k: int
    out_bits: int
    tensor_cores: bool
    min_block_n: int = 16

    @property
    def min_block_k(self) -> int:
        """Return the minimum block_k: 32 for operands of 8 bits or less, else 16.

        The K of an MMA with 8-bit operands is 32. Packed weights take two MMAs with a K of 16.
        """
        return 32 if min(self.a_bits, self.b_bits) <= 8 else 16

    def __str__(self) -> str:
        return f"GEMM {self.index}"


def gemms(problem: Problem) -> tuple[Gemm, Gemm]:
    """Return GEMM 1 and GEMM 2 of `problem`."""
    scheme, dtype_bits = problem.scheme, problem.dtype.itemsize * 8
    fp32 = problem.dtype is torch.float32 and not scheme.quantizes_activations

    def gemm(index: int, depth: int, sides: int) -> Gemm:
        group = scheme.group[-1] if scheme.group and not scheme.matrix_scales else 0
        return Gemm(
            index=index,
            depth=depth,
            sides=sides,
            a_bits=_BITS[scheme.activation] if scheme.quantizes_activations else dtype_bits,
            b_bits=_BITS[scheme.weight] if scheme.quantized else dtype_bits,
            dequantized_bits=dtype_bits
            if scheme.quantized and not scheme.quantizes_activations
            else 0,
            scaled=scheme.quantized,
            group_k=0 if group >= depth else group,
            out_bits=dtype_bits,
            tensor_cores=not fp32 or problem.fp32_precision == "tf32",
        )

    return gemm(1, problem.hidden, 2 if problem.act.gated else 1), gemm(2, problem.intermediate, 1)


def rows_aligned_to_16(problem: Problem) -> bool:
    """Return whether the rows of both GEMMs start at a multiple of 16 elements."""
    return problem.hidden % 16 == 0 and problem.intermediate % 16 == 0


def shared_bytes(tile: LaunchConfig, gemm: Gemm, device: Device) -> int:
    """Return an upper bound on the bytes of shared memory that Triton 3.6 allocates per block.

    A buffer holds one K step: a tile of A and one of B (two in a gated GEMM 1). With wgmma there
    are num_stages buffers, otherwise one less; wgmma is used if the rows or the weights of a tile
    fill its M = 64. Weights that are dequantized pass through registers, so with wgmma they need
    another buffer, as does the tile of A that they are multiplied by.
    """
    a_row, b_row = (tile.block_k * bits // 8 for bits in (gemm.a_bits, gemm.b_bits))
    buffer = tile.block_m * a_row + gemm.sides * tile.block_n * b_row
    # With few rows, the weights become the left operand of wgmma, unless they are dequantized.
    filled = tile.block_m >= 64 or (
        tile.block_n >= 64 and gemm.a_bits < 32 and not gemm.dequantized_bits
    )
    warpgroup = device.warpgroups and gemm.tensor_cores and filled and tile.num_warps % 4 == 0
    buffers = max(tile.num_stages - 1, 1)
    extra = 4 * (tile.block_m + gemm.sides * tile.block_n) if gemm.scaled else 0
    if warpgroup and gemm.dequantized_bits:
        extra += tile.block_m * a_row + tile.block_n * tile.block_k * gemm.dequantized_bits // 8
    elif warpgroup:
        buffers = tile.num_stages
    return max(buffers * buffer + extra, tile.block_m * tile.block_n * gemm.out_bits // 8)


@dataclass(frozen=True)
class Violation:
    """A limit that a launch violates: its name, the value got, and the values needed."""

    what: str
    got: object
    need: str


def violations(tile: LaunchConfig, gemm: Gemm, device: Device) -> Iterator[Violation]:
    """Yield every reason why `tile` cannot be launched. Its fields may have any values."""
    invalid_fields = list(_field_violations(tile, gemm))
    yield from invalid_fields
    if invalid_fields:
        return
    if gemm.group_k and gemm.group_k % tile.block_k:
        need = f"a divisor of {gemm.group_k}: a step has one scale"
        yield Violation(GROUP_LIMIT, tile.block_k, need)
    shared = shared_bytes(tile, gemm, device)
    if shared > device.shared:
        need = f"<= {device.shared} on {device.name or 'this device'}"
        yield Violation(SHARED_LIMIT, shared, need)


def _field_violations(tile: LaunchConfig, gemm: Gemm) -> Iterator[Violation]:
    blocks = (
        ("block_m", 16),
        ("block_n", gemm.min_block_n),
        ("block_k", gemm.min_block_k),
    )
    for name, min_value in blocks:
        value = getattr(tile, name)
        if not min_value <= value <= _MAX_BLOCK or value & (value - 1):
            yield Violation(name, value, f"a power of two from {min_value} to {_MAX_BLOCK}")
    if not 1 <= tile.group_m <= _MAX_GROUP:
        yield Violation("group_m", tile.group_m, f"1 to {_MAX_GROUP}")
    if tile.num_warps not in _WARPS:
        yield Violation("num_warps", tile.num_warps, f"one of {_WARPS}")
    if not 1 <= tile.num_stages <= _MAX_STAGES:
        yield Violation("num_stages", tile.num_stages, f"1 to {_MAX_STAGES}")
    sizes = (tile.block_m * tile.block_n, tile.block_m * tile.block_k, tile.block_n * tile.block_k)
    if max(sizes) > _MAX_TILE:
        yield Violation("elements of a tile", max(sizes), f"<= {_MAX_TILE}")


def require(tile: LaunchConfig, gemm: Gemm, device: Device, origin: str) -> LaunchConfig:
    """Return `tile`; raise ConfigurationError, naming `origin`, if it cannot be launched."""
    for violation in violations(tile, gemm, device):
        what = f"{origin}: {gemm} {violation.what}"
        raise ConfigurationError(what, got=violation.got, need=violation.need)
    return tile


def clamp(tile: LaunchConfig, gemm: Gemm, device: Device) -> LaunchConfig:
    """Shrink `tile` until it fits.

    block_k becomes a divisor of the group. Then the number of stages, block_k and block_n are
    reduced, in this order, until shared memory suffices. The fields of `tile` must be valid. If
    nothing fits, return the smallest tile tried; `require` then reports the violation.
    """
    min_value = gemm.min_block_k
    tile = replace(tile, block_k=max(tile.block_k, min_value))
    while gemm.group_k and gemm.group_k % tile.block_k and tile.block_k > min_value:
        tile = replace(tile, block_k=tile.block_k // 2)
    while shared_bytes(tile, gemm, device) > device.shared:
        if tile.num_stages > 1:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_k > min_value:
            tile = replace(tile, block_k=tile.block_k // 2)
        elif tile.block_n > gemm.min_block_n:
            tile = replace(tile, block_n=tile.block_n // 2)
        else:
            break
    return tile
