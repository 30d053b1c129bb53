"""Hardware parameters of the performance model: GPUs, and the links between them.

The H200 and its link inside a host were measured (data/h200-layers.json, data/h200-exchange.json).
For other GPUs, memory size and bandwidth are taken from the data sheet. Their peaks and links are
assumed to reach the same fraction of the data sheet's values as on the H200. The network between
hosts is assumed to have 400 Gb/s per GPU, with the efficiency and latency that DeepEP's published
tables imply.
"""

from dataclasses import dataclass, field

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Machine

_GIGA, _TERA = 1e9, 1e12
# Measured values of an H200, divided by those of its data sheet: TFLOP/s in bfloat16, and GB/s per
# NVLink direction.
_PEAK_FRACTION, _LINK_FRACTION = 791.6 / 989.5, 393 / 450


def make_peak_rates(sixteen_bit: float, eight_bit: float, *, fp8: bool = True) -> dict[str, float]:
    """Return the peak flops per second of each operand type (measure.roofline.compute_type).

    sixteen_bit, eight_bit: peaks in TFLOP/s.
    fp8: whether tensor cores support float8_e4m3fn.
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

    flops: peak flops per second of each operand type (see `make_peak_rates`).
    bandwidth: bytes per second of its memory.
    memory: bytes of its memory.
    arch: compute capability.
    measured: whether the peaks were measured, and neither derived from a data sheet nor given by
        the user.
    """

    name: str = "NVIDIA H200"
    flops: dict[str, float] = field(default_factory=lambda: make_peak_rates(791.6, 1485.9))
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

    bandwidth: bytes per second in each direction.
    latency: seconds that the link adds to an exchange.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("link bandwidth", self.bandwidth)
        if not 0 <= self.latency < 1:
            raise ConfigurationError("link latency", got=self.latency, need="seconds in [0, 1)")


@dataclass(frozen=True)
class Cluster:
    """Hosts with `per_host` GPUs each.

    inside: link of a GPU to other GPUs of its host.
    between: a GPU's share of the network between hosts.
    hosts: number of hosts.
    packages: packages that the machine's JSON file lists; None without a list.
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

    def __str__(self) -> str:
        if self.hosts == 1:
            return f"{self.per_host} {self.gpu.name}"
        return f"{self.hosts} hosts with {self.per_host} {self.gpu.name} each"

    def count_peers(self, world_size: int) -> tuple[int, int]:
        """Return the number of other ranks on this host, and the number on other hosts."""
        host_ranks = min(self.per_host, world_size)
        return host_ranks - 1, world_size - host_ranks

    def machine(self, packages: frozenset[str]) -> Machine:
        """Return one GPU of the cluster and these packages as a Machine for compatibility rules."""
        gpu = self.gpu
        return Machine("cuda", gpu.arch, packages, name=gpu.name, memory=int(gpu.memory))


def _from_data_sheet(
    name: str, arch: tuple[int, int], rates: dict[str, float], bandwidth: float, memory: float
) -> Gpu:
    """Return a GPU with the values of its data sheet.

    rates: peak flops per second of each operand type.
    bandwidth: TB/s.
    memory: GB.
    """
    flops = {operand: rate * _PEAK_FRACTION for operand, rate in rates.items()}
    return Gpu(name, flops, bandwidth * _TERA, memory * _GIGA, arch, measured=False)


# GPU and link inside a host, by the name in `--machine`. Rates are for dense GEMMs.
NAMED_GPUS: dict[str, tuple[Gpu, Link]] = {
    "a100": (
        _from_data_sheet("NVIDIA A100", (8, 0), make_peak_rates(312, 624, fp8=False), 2.039, 80),
        Link(300 * _GIGA * _LINK_FRACTION),
    ),
    "h100": (
        _from_data_sheet("NVIDIA H100", (9, 0), make_peak_rates(989.5, 1979), 3.35, 80),
        Link(450 * _GIGA * _LINK_FRACTION),
    ),
    "h200": (Gpu(), Link(393 * _GIGA)),
    "b200": (
        _from_data_sheet("NVIDIA B200", (10, 0), make_peak_rates(2250, 4500), 8.0, 180),
        Link(900 * _GIGA * _LINK_FRACTION),
    ),
}
