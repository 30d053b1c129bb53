"""What is launched, and what bounds it: the least product, a scheme's groups, memory."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Machine, Problem

_LARGEST_BLOCK = 1024
_LARGEST_TILE = 1 << 20  # elements: triton's bound on one tensor
_WARPS = (1, 2, 4, 8, 16)
_MOST_STAGES = 16
_MOST_GROUP = 4096
_BITS = {"float8_e4m3fn": 8, "int8": 8, "uint8": 8, "uint4": 4, "float4_e2m1": 4}
# Bytes of shared memory that one block may ask for, by compute capability.
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
_LEAST_SHARED = 101_376  # of any device that the kernels run on

# Names of sm_90, as a driver spells them or with "_" for a space, as names of files do.
_HOPPER = re.compile(r"(?<![^\W_])(GH200|H[128]00|H20)(?![^\W_])")

# Bounds that a smaller tile satisfies, as violations name them.
GROUP = "block_k within a group"
SHARED = "bytes of shared memory"


class Launch(Protocol):
    """The configuration of one GEMM: what is compiled, as the path that launches it types it."""

    @property
    def block_m(self) -> int:
        """Return the rows of a block, in which both GEMMs find theirs."""

    @property
    def block_n(self) -> int:
        """Return the columns of a block; a gated product has as many up columns."""

    @property
    def num_warps(self) -> int:
        """Return the warps of a program."""

    @property
    def num_stages(self) -> int:
        """Return the steps of the depth that are in flight."""


L = TypeVar("L", bound=Launch)


@dataclass(frozen=True)
class LaunchConfig:
    """A tiled GEMM: block sizes in elements, row blocks per swizzle group, warps, stages.

    A gated GEMM 1 computes block_n gate and block_n up columns.
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
    """What a call launches: both GEMMs, and the path by which rows reach them.

    They share one alignment, so block_m is the same. path: a name of experts.triton.paths.
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
        """Return the launches of GEMM 1 and GEMM 2, which are of this kind."""
        one, two = self.gemm1, self.gemm2
        assert isinstance(one, kind)
        assert isinstance(two, kind)
        return one, two


@dataclass(frozen=True)
class Device:
    """What a launch must fit. name: as the driver gives it, "" without a GPU.

    shared: bytes of shared memory a block may ask for. warpgroups: products read their operands
    from shared memory, so that a pipeline of s stages holds s tiles of them, not s - 1. tma:
    kernels that fetch their operands by TMA, written for sm_90 alone, run here.
    """

    name: str = ""
    shared: int = _SHARED[9, 0]
    warpgroups: bool = True
    tma: bool = False

    @classmethod
    def of(cls, machine: Machine) -> "Device":
        """Describe the machine's GPU; without one, take the limits of sm_90.

        Kernels are compiled for sm_90.
        """
        if machine.arch is None:
            return cls()
        shared = _SHARED.get(machine.arch, _LEAST_SHARED)
        warpgroups, tma = machine.arch >= (9, 0), machine.arch == (9, 0)
        return cls(machine.name, shared, warpgroups=warpgroups, tma=tma)

    @classmethod
    def named(cls, name: str) -> "Device":
        """Describe a GPU by its driver's name, or a file's: as sm_90, if that is known with TMA."""
        return cls(name, tma=_HOPPER.search(name) is not None)


@dataclass(frozen=True)
class Gemm:
    """One of the two products of a problem, as far as it bounds a tile.

    index: 1 or 2. sides: 2 where gate and up columns are computed side by side. a_bits, b_bits:
    of a stored value of the left and the right operand. widened: bits of a weight once it is
    dequantized, 0 if it enters the product as it is stored. scaled: there are scales. group_k: the
    depth of one weight scale, 0 for all of it. least_block_n: columns of the narrowest tile.
    """

    index: int
    depth: int
    sides: int
    a_bits: int
    b_bits: int
    widened: int
    scaled: bool
    group_k: int
    out_bits: int
    tensor_cores: bool
    least_block_n: int = 16

    @property
    def least_block_k(self) -> int:
        """8-bit products need a depth of 32, and so do packed weights: two products of 16."""
        return 32 if min(self.a_bits, self.b_bits) <= 8 else 16

    def __str__(self) -> str:
        return f"GEMM {self.index}"


def gemms(problem: Problem) -> tuple[Gemm, Gemm]:
    """Both products of `problem`."""
    scheme, plain = problem.scheme, problem.dtype.itemsize * 8
    fp32 = problem.dtype is torch.float32 and not scheme.quantizes_activations

    def gemm(index: int, depth: int, sides: int) -> Gemm:
        group = scheme.group[-1] if scheme.group and not scheme.matrix_scales else 0
        return Gemm(
            index=index,
            depth=depth,
            sides=sides,
            a_bits=_BITS[scheme.activation] if scheme.quantizes_activations else plain,
            b_bits=_BITS[scheme.weight] if scheme.quantized else plain,
            widened=plain if scheme.quantized and not scheme.quantizes_activations else 0,
            scaled=scheme.quantized,
            group_k=0 if group >= depth else group,
            out_bits=plain,
            tensor_cores=not fp32 or problem.fp32_precision == "tf32",
        )

    return gemm(1, problem.hidden, 2 if problem.act.gated else 1), gemm(2, problem.intermediate, 1)


def starts_on_16(problem: Problem) -> bool:
    """Return whether rows of both products start on 16 elements."""
    return problem.hidden % 16 == 0 and problem.intermediate % 16 == 0


def shared_bytes(tile: LaunchConfig, gemm: Gemm, device: Device) -> int:
    """Shared memory a block of `tile` asks for: what triton 3.6 allots, or somewhat more.

    One buffer holds a tile of A and one of B (two of a gated GEMM 1). There are num_stages of them
    behind warpgroup products (64 rows or weights, on Hopper), otherwise one less. Weights that are
    dequantized go through registers: warpgroups find them, and A, in one more buffer.
    """
    a_row, b_row = (tile.block_k * bits // 8 for bits in (gemm.a_bits, gemm.b_bits))
    buffer = tile.block_m * a_row + gemm.sides * tile.block_n * b_row
    # Few rows leave the side of 64 to the weights, unless they go through registers.
    filled = tile.block_m >= 64 or (tile.block_n >= 64 and gemm.a_bits < 32 and not gemm.widened)
    warpgroup = device.warpgroups and gemm.tensor_cores and filled and tile.num_warps % 4 == 0
    buffers = max(tile.num_stages - 1, 1)
    extra = 4 * (tile.block_m + gemm.sides * tile.block_n) if gemm.scaled else 0
    if warpgroup and gemm.widened:
        extra += tile.block_m * a_row + tile.block_n * tile.block_k * gemm.widened // 8
    elif warpgroup:
        buffers = tile.num_stages
    return max(buffers * buffer + extra, tile.block_m * tile.block_n * gemm.out_bits // 8)


@dataclass(frozen=True)
class Violation:
    """One bound that a tile breaks."""

    what: str
    got: object
    need: str


def violations(tile: LaunchConfig, gemm: Gemm, device: Device) -> Iterator[Violation]:
    """Every reason not to launch `tile`. Numbers of any size may be asked about."""
    numbers = list(_unusable_numbers(tile, gemm))
    yield from numbers
    if numbers:
        return
    if gemm.group_k and gemm.group_k % tile.block_k:
        need = f"a divisor of {gemm.group_k}: a step has one scale"
        yield Violation(GROUP, tile.block_k, need)
    shared = shared_bytes(tile, gemm, device)
    if shared > device.shared:
        need = f"<= {device.shared} on {device.name or 'this device'}"
        yield Violation(SHARED, shared, need)


def _unusable_numbers(tile: LaunchConfig, gemm: Gemm) -> Iterator[Violation]:
    blocks = (
        ("block_m", 16),
        ("block_n", gemm.least_block_n),
        ("block_k", gemm.least_block_k),
    )
    for name, least in blocks:
        value = getattr(tile, name)
        if not least <= value <= _LARGEST_BLOCK or value & (value - 1):
            yield Violation(name, value, f"a power of two from {least} to {_LARGEST_BLOCK}")
    if not 1 <= tile.group_m <= _MOST_GROUP:
        yield Violation("group_m", tile.group_m, f"1 to {_MOST_GROUP}")
    if tile.num_warps not in _WARPS:
        yield Violation("num_warps", tile.num_warps, f"one of {_WARPS}")
    if not 1 <= tile.num_stages <= _MOST_STAGES:
        yield Violation("num_stages", tile.num_stages, f"1 to {_MOST_STAGES}")
    sizes = (tile.block_m * tile.block_n, tile.block_m * tile.block_k, tile.block_n * tile.block_k)
    if max(sizes) > _LARGEST_TILE:
        yield Violation("elements of a tile", max(sizes), f"<= {_LARGEST_TILE}")


def require(tile: LaunchConfig, gemm: Gemm, device: Device, origin: str) -> LaunchConfig:
    """`tile` if it can be launched; otherwise ConfigurationError names origin, got and need."""
    for violation in violations(tile, gemm, device):
        what = f"{origin}: {gemm} {violation.what}"
        raise ConfigurationError(what, got=violation.got, need=violation.need)
    return tile


def clamped(tile: LaunchConfig, gemm: Gemm, device: Device) -> LaunchConfig:
    """Return the nearest tile that fits.

    To fit, it takes a divisor of the group, then fewer stages, then smaller blocks.

    For tiles with usable numbers. Where nothing fits the least tile tried is returned: `require`
    says why it cannot be launched.
    """
    least = gemm.least_block_k
    tile = replace(tile, block_k=max(tile.block_k, least))
    while gemm.group_k and gemm.group_k % tile.block_k and tile.block_k > least:
        tile = replace(tile, block_k=tile.block_k // 2)
    while shared_bytes(tile, gemm, device) > device.shared:
        if tile.num_stages > 1:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_k > least:
            tile = replace(tile, block_k=tile.block_k // 2)
        elif tile.block_n > gemm.least_block_n:
            tile = replace(tile, block_n=tile.block_n // 2)
        else:
            break
    return tile
