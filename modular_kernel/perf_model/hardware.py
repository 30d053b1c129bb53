"""Hardware parameters of the performance model: one GPU, and the links between GPUs.

The H200 and its link inside a host were measured (data/h200-layers.json, data/h200-exchange.json).
Other GPUs have the bandwidth and memory of their data sheets, and the share of the data sheet's
dense peak, and of its link, that an H200 reaches. The network between hosts is assumed to have 400
Gb/s per GPU, with the efficiency and latency that DeepEP's published tables imply.
"""

from dataclasses import dataclass, field

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Machine

_GIGA, _TERA = 1e9, 1e12
# Of the H200's data sheet: 989 TFLOP/s in bfloat16, and 450 GB/s in each direction of NVLink.
_PEAK_SHARE, _LINK_SHARE = 791.6 / 989.5, 393 / 450


def peaks(sixteen_bit: float, eight_bit: float, *, fp8: bool = True) -> dict[str, float]:
    """Return flops per second by operand type, from two rates in TFLOP/s.

    fp8: False for a GPU whose tensor cores do not take float8_e4m3fn.
    """
    rates = {"bfloat16": sixteen_bit, "float16": sixteen_bit, "int8": eight_bit}
    if fp8:
        rates["float8_e4m3fn"] = eight_bit
    return {name: rate * _TERA for name, rate in rates.items()}


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigurationError(name, got=value, need="> 0")


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    flops: per second, by the operands' type, see measure.roofline.operand_type. bandwidth: bytes
    per second of its memory. memory: bytes. arch: compute capability. measured: True if the peaks
    were measured, False if they follow from a data sheet.
    """

    name: str = "NVIDIA H200"
    flops: dict[str, float] = field(default_factory=lambda: peaks(791.6, 1485.9))
    bandwidth: float = 4.8 * _TERA
    memory: float = 141 * _GIGA
    arch: tuple[int, int] = (9, 0)
    measured: bool = True

    def __post_init__(self) -> None:
        _check_positive("bandwidth", self.bandwidth)
        _check_positive("memory", self.memory)
        for name, rate in self.flops.items():
            _check_positive(f"flops in {name}", rate)


@dataclass(frozen=True)
class Link:
    """A link of one GPU.

    bandwidth: bytes per second in each direction. latency: seconds added to an exchange, in
    addition to those of the part.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("link bandwidth", self.bandwidth)
        if not 0 <= self.latency < 1:
            raise ConfigurationError("link latency", got=self.latency, need="seconds in [0, 1)")


@dataclass(frozen=True)
class Cluster:
    """Hosts of `per_host` GPUs each.

    inside: the link between GPUs of a host. between: each GPU's share of the network. Both transfer
    concurrently. hosts: number of hosts. packages: those that its description names; None if it
    names none.
    """

    gpu: Gpu = field(default_factory=Gpu)
    inside: Link = field(default_factory=lambda: Link(393 * _GIGA))
    between: Link = field(default_factory=lambda: Link(50 * _GIGA, 20e-6))
    per_host: int = 8
    hosts: int = 1
    packages: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.per_host <= 1024:
            raise ConfigurationError("ranks of a host", got=self.per_host, need="1 to 1024")
        if not 1 <= self.hosts <= 1024:
            raise ConfigurationError("hosts", got=self.hosts, need="1 to 1024")

    @property
    def gpus(self) -> int:
        """Number of GPUs of all hosts."""
        return self.hosts * self.per_host

    def peers(self, world_size: int) -> tuple[int, int]:
        """Return the numbers of other ranks on this host, and on other hosts."""
        host_ranks = min(self.per_host, world_size)
        return host_ranks - 1, world_size - host_ranks

    def machine(self, packages: frozenset[str]) -> Machine:
        """Return the Machine of one of the GPUs, for compatibility rules, with these packages."""
        gpu = self.gpu
        return Machine("cuda", gpu.arch, packages, name=gpu.name, memory=int(gpu.memory))


def _from_data_sheet(
    name: str, arch: tuple[int, int], rates: dict[str, float], bandwidth: float, memory: float
) -> Gpu:
    """Return a GPU by its data sheet: peaks by type, TB/s and GB of memory."""
    flops = {kind: rate * _PEAK_SHARE for kind, rate in rates.items()}
    return Gpu(name, flops, bandwidth * _TERA, memory * _GIGA, arch, measured=False)


# By the name in `--machine`: the GPU, and the link of one GPU inside a host. Dense peaks.
NAMED_GPUS: dict[str, tuple[Gpu, Link]] = {
    "a100": (
        _from_data_sheet("NVIDIA A100", (8, 0), peaks(312, 624, fp8=False), 2.039, 80),
        Link(300 * _GIGA * _LINK_SHARE),
    ),
    "h100": (
        _from_data_sheet("NVIDIA H100", (9, 0), peaks(989.5, 1979), 3.35, 80),
        Link(450 * _GIGA * _LINK_SHARE),
    ),
    "h200": (Gpu(), Link(393 * _GIGA)),
    "b200": (
        _from_data_sheet("NVIDIA B200", (10, 0), peaks(2250, 4500), 8.0, 180),
        Link(900 * _GIGA * _LINK_SHARE),
    ),
}
