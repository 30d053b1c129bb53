"""Launch configurations of the two GEMMs of a layer, and their limits.

    GEMM 1  h = act(x W1^T). It is gated if the activation function combines a gate and an up value.
    GEMM 2  y = h W2^T.

A launch is valid if `violations` yields nothing. Some paths of `TritonExperts` define their own
type of launch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Machine, Problem

_MAX_BLOCK = 1024  # maximum of block_m, block_n and block_k
_MAX_TILE_ELEMENTS = 1 << 20  # Triton's limit on the elements of one tensor
_NUM_WARPS = (1, 2, 4, 8, 16)  # values of num_warps
_MAX_STAGES = 16
_MAX_GROUP_M = 4096
_DTYPE_BITS = {"float8_e4m3fn": 8, "int8": 8, "uint8": 8, "uint4": 4, "float4_e2m1": 4}
# Maximum bytes of shared memory per block, by compute capability.
_SHARED_BYTES = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (12, 0): 101_376,
}
_MIN_SHARED_BYTES = 101_376  # the minimum of _SHARED_BYTES

# (pattern, compute capability) of GPUs. The first pattern that occurs in a device name applies.
# Names of config files have "_" for each space of the device name.
_ARCH_PATTERNS = (
    (r"RTX[ _](?:PRO|50\d\d)", (12, 0)),
    (r"G?B300", (10, 3)),
    (r"(?:G?B200|B100)", (10, 0)),
    (r"(?:GH200|H[128]00|H20)", (9, 0)),
    (r"(?:L4|L40S?|L20|RTX[ _]40\d\d|RTX[ _]\d000[ _]Ada)", (8, 9)),
    (r"Orin", (8, 7)),
    (r"(?:A[128]6?|A[14]0|A10G|RTX[ _]30\d\d|RTX[ _]A\d000)", (8, 6)),
    (r"(?:A[138]00|A30)", (8, 0)),
)

# Values of `Violation.what` for limits that a smaller tile can satisfy.
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

        To compute them, a gated GEMM 1 multiplies by block_n gate rows and block_n up rows.
        """

    @property
    def num_warps(self) -> int:
        """Return the warps per program."""

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the software pipeline along K."""


LaunchT = TypeVar("LaunchT", bound=Launch)


@dataclass(frozen=True)
class LaunchConfig:
    """The launch of a tiled GEMM.

    block_m: rows per block.
    block_n: output columns per block. To compute them, a gated GEMM 1 multiplies by block_n gate
        rows and block_n up rows.
    block_k: elements along K per step.
    group_m: number of row blocks per group. The blocks of a group are computed for one column block
        before the next, so that they share weight tiles in the L2 cache.
    num_warps: warps per program.
    num_stages: stages of the software pipeline along K.
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
    """The configuration of one call: the path that runs it, and the launches of both GEMMs.

    gemm1: the launch of GEMM 1.
    gemm2: the launch of GEMM 2. It must have the same block_m as gemm1, because both GEMMs use the
        same blocks of rows. If not, raise ConfigurationError.
    path: the name of a path in `experts.triton.paths`.
    """

    gemm1: Launch
    gemm2: Launch
    path: str

    def __post_init__(self) -> None:
        if self.gemm1.block_m != self.gemm2.block_m:
            got = f"{self.gemm1.block_m} and {self.gemm2.block_m}"
            need = "the same block_m for both GEMMs, because they use the same blocks of rows"
            raise ConfigurationError("block_m of a configuration", got=got, need=need)

    def __str__(self) -> str:
        return f"{self.path}: GEMM 1 {self.gemm1}; GEMM 2 {self.gemm2}"

    def typed_launches(self, kind: type[LaunchT]) -> tuple[LaunchT, LaunchT]:
        """Return the launches of GEMM 1 and GEMM 2, both of which must have the type `kind`."""
        launch1, launch2 = self.gemm1, self.gemm2
        assert isinstance(launch1, kind)
        assert isinstance(launch2, kind)
        return launch1, launch2


@dataclass(frozen=True)
class Device:
    """The limits of a GPU for launches.

    name: the name that the driver reports; "" without a GPU.
    shared: maximum bytes of shared memory per block.
    warpgroups: whether the GPU is sm_90 or newer. Its warpgroup MMA (wgmma) reads operands from
        shared memory, so a pipeline of s stages holds s operand tiles there instead of s - 1.
    tma: whether the TMA kernels can run. They are written for sm_90 only.
    """

    name: str = ""
    shared: int = _SHARED_BYTES[9, 0]
    warpgroups: bool = True
    tma: bool = False

    @classmethod
    def from_machine(cls, machine: Machine) -> "Device":
        """Return the limits of the GPU of `machine`, or of sm_90 if it has no GPU.

        Without a GPU, kernels are compiled for sm_90.
        """
        if machine.arch is None:
            return cls()
        shared = _SHARED_BYTES.get(machine.arch, _MIN_SHARED_BYTES)
        warpgroups, tma = machine.arch >= (9, 0), machine.arch == (9, 0)
        return cls(machine.name, shared, warpgroups=warpgroups, tma=tma)

    @classmethod
    def from_name(cls, name: str) -> "Device":
        """Return the limits of the GPU with this name (see `find_arch`).

        For an unknown name, return the smallest limits of all supported GPUs.
        """
        arch = find_arch(name)
        if arch is None:
            return cls(name, _MIN_SHARED_BYTES)
        return cls.from_machine(Machine("cuda", arch, name=name))


def find_arch(device_name: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU, or None if its name is not known.

    device_name: the name that the driver reports, possibly with "_" for each space.
    """
    for pattern, arch in _ARCH_PATTERNS:
        if re.search(rf"(?<![^\W_]){pattern}(?![^\W_])", device_name):
            return arch
    return None


@dataclass(frozen=True)
class Gemm:
    """The properties of a GEMM that limit its tiles. A has the activations and B the weights.

    index: 1 for GEMM 1, 2 for GEMM 2.
    size_k: K, the size that is summed over.
    num_matrices: 2 for a GEMM 1 with gate and up columns; otherwise 1.
    a_bits: bits per stored element of A.
    b_bits: bits per stored element of B.
    dequantized_bits: bits of a dequantized weight; 0 if weights are multiplied as stored.
    has_scales: whether the operands have scales.
    group_k: K elements per weight scale; 0 if one scale covers all of K.
    out_bits: bits per element of the output.
    tensor_cores: whether the GEMM runs on tensor cores.
    min_block_n: the minimum block_n.
    """

    index: int
    size_k: int
    num_matrices: int
    a_bits: int
    b_bits: int
    dequantized_bits: int
    has_scales: bool
    group_k: int
    out_bits: int
    tensor_cores: bool
    min_block_n: int = 16

    @property
    def min_block_k(self) -> int:
        """Return the minimum block_k: 32 for operands of 8 bits or less, otherwise 16.

        An MMA with 8-bit operands has K = 32. Packed 4-bit weights are multiplied in two MMAs with
        K = 16.
        """
        return 32 if min(self.a_bits, self.b_bits) <= 8 else 16

    def __str__(self) -> str:
        return f"GEMM {self.index}"


def gemms(problem: Problem) -> tuple[Gemm, Gemm]:
    """Return GEMM 1 and GEMM 2 of `problem`."""
    scheme, dtype_bits = problem.scheme, problem.dtype.itemsize * 8
    is_float32 = problem.dtype is torch.float32 and not scheme.quantizes_activations

    def make_gemm(index: int, size_k: int, num_matrices: int) -> Gemm:
        group = scheme.group[-1] if scheme.group and not scheme.matrix_scales else 0
        return Gemm(
            index=index,
            size_k=size_k,
            num_matrices=num_matrices,
            a_bits=_DTYPE_BITS[scheme.activation] if scheme.quantizes_activations else dtype_bits,
            b_bits=_DTYPE_BITS[scheme.weight] if scheme.quantized else dtype_bits,
            dequantized_bits=dtype_bits
            if scheme.quantized and not scheme.quantizes_activations
            else 0,
            has_scales=scheme.quantized,
            group_k=0 if group >= size_k else group,
            out_bits=dtype_bits,
            tensor_cores=not is_float32 or problem.fp32_precision == "tf32",
        )

    gemm1 = make_gemm(1, problem.hidden, 2 if problem.act.gated else 1)
    return gemm1, make_gemm(2, problem.intermediate, 1)


def rows_aligned_to_16(problem: Problem) -> bool:
    """Return whether the rows of A and B of both GEMMs start at a multiple of 16 elements."""
    return problem.hidden % 16 == 0 and problem.intermediate % 16 == 0


def shared_bytes(tile: LaunchConfig, gemm: Gemm, device: Device) -> int:
    """Return an upper bound on the bytes of shared memory that Triton 3.6 allocates per block.

    A pipeline buffer holds one K step: a tile of A and a tile of B (two tiles of B in a gated GEMM
    1). There are num_stages buffers with wgmma, the warpgroup MMA of sm_90, and num_stages - 1
    without. Triton uses wgmma if the activation rows or the weight rows of a tile fill its M of 64.
    Dequantized weights pass through registers. With wgmma, the dequantized tile and the tile of A
    each need another buffer.
    """
    a_row_bytes, b_row_bytes = (tile.block_k * bits // 8 for bits in (gemm.a_bits, gemm.b_bits))
    buffer_bytes = tile.block_m * a_row_bytes + gemm.num_matrices * tile.block_n * b_row_bytes
    # With few rows, the weights become the left operand of wgmma, unless they are dequantized.
    fills_wgmma = tile.block_m >= 64 or (
        tile.block_n >= 64 and gemm.a_bits < 32 and not gemm.dequantized_bits
    )
    has_warpgroups = device.warpgroups and tile.num_warps % 4 == 0
    uses_wgmma = has_warpgroups and gemm.tensor_cores and fills_wgmma
    num_buffers = max(tile.num_stages - 1, 1)
    extra_bytes = 4 * (tile.block_m + gemm.num_matrices * tile.block_n) if gemm.has_scales else 0
    if uses_wgmma and gemm.dequantized_bits:
        weight_bytes = tile.block_n * tile.block_k * gemm.dequantized_bits // 8
        extra_bytes += tile.block_m * a_row_bytes + weight_bytes
    elif uses_wgmma:
        num_buffers = tile.num_stages
    out_bytes = tile.block_m * tile.block_n * gemm.out_bits // 8
    return max(num_buffers * buffer_bytes + extra_bytes, out_bytes)


@dataclass(frozen=True)
class Violation:
    """A limit that a launch violates.

    what: the name of the limit, such as a field of the launch.
    got: the value of the launch.
    need: the values that the limit allows.
    """

    what: str
    got: object
    need: str


def violations(tile: LaunchConfig, gemm: Gemm, device: Device) -> Iterator[Violation]:
    """Yield every limit that prevents `tile` from being launched. Its fields may have any value."""
    invalid_fields = list(_find_field_violations(tile, gemm))
    yield from invalid_fields
    if invalid_fields:
        return
    if gemm.group_k and gemm.group_k % tile.block_k:
        need = f"a divisor of {gemm.group_k}, because all elements of a K step share one scale"
        yield Violation(GROUP_LIMIT, tile.block_k, need)
    shared = shared_bytes(tile, gemm, device)
    if shared > device.shared:
        need = f"<= {device.shared} on {device.name or 'this device'}"
        yield Violation(SHARED_LIMIT, shared, need)


def _find_field_violations(tile: LaunchConfig, gemm: Gemm) -> Iterator[Violation]:
    blocks = (
        ("block_m", 16),
        ("block_n", gemm.min_block_n),
        ("block_k", gemm.min_block_k),
    )
    for name, min_value in blocks:
        value = getattr(tile, name)
        if not min_value <= value <= _MAX_BLOCK or value & (value - 1):
            yield Violation(name, value, f"a power of two from {min_value} to {_MAX_BLOCK}")
    if not 1 <= tile.group_m <= _MAX_GROUP_M:
        yield Violation("group_m", tile.group_m, f"1 to {_MAX_GROUP_M}")
    if tile.num_warps not in _NUM_WARPS:
        yield Violation("num_warps", tile.num_warps, f"one of {_NUM_WARPS}")
    if not 1 <= tile.num_stages <= _MAX_STAGES:
        yield Violation("num_stages", tile.num_stages, f"1 to {_MAX_STAGES}")
    sizes = (tile.block_m * tile.block_n, tile.block_m * tile.block_k, tile.block_n * tile.block_k)
    if max(sizes) > _MAX_TILE_ELEMENTS:
        yield Violation("elements of a tile", max(sizes), f"<= {_MAX_TILE_ELEMENTS}")


def require(tile: LaunchConfig, gemm: Gemm, device: Device, origin: str) -> LaunchConfig:
    """Return `tile`. Raise ConfigurationError, with `origin` in its message, if it is not valid."""
    for violation in violations(tile, gemm, device):
        what = f"{origin}: {gemm} {violation.what}"
        raise ConfigurationError(what, got=violation.got, need=violation.need)
    return tile


def clamp(tile: LaunchConfig, gemm: Gemm, device: Device) -> LaunchConfig:
    """Shrink `tile` until it can be launched.

    First, block_k is halved until it divides the scale group. Then the number of stages, block_k
    and block_n are reduced, in this order, until the tile fits in shared memory. The fields of
    `tile` must be valid. If no tile fits, return the smallest tile that was tried. `require` then
    reports its violation.
    """
    min_block_k = gemm.min_block_k
    tile = replace(tile, block_k=max(tile.block_k, min_block_k))
    while gemm.group_k and gemm.group_k % tile.block_k and tile.block_k > min_block_k:
        tile = replace(tile, block_k=tile.block_k // 2)
    while shared_bytes(tile, gemm, device) > device.shared:
        if tile.num_stages > 1:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_k > min_block_k:
            tile = replace(tile, block_k=tile.block_k // 2)
        elif tile.block_n > gemm.min_block_n:
            tile = replace(tile, block_n=tile.block_n // 2)
        else:
            break
    return tile
