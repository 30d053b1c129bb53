"""Hardware parameters of the performance model: one GPU, and the links between GPUs.

Defaults are those of an H200 host (data/h200-layers.json for the GPU, data/h200-exchange.json for
the link inside a host). The network between hosts is assumed to have 400 Gb/s
per GPU, with the efficiency and latency that DeepEP's published tables imply.
"""

from dataclasses import dataclass, field

from modular_kernel.errors import ConfigurationError

_GIGA, _TERA = 1e9, 1e12


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    flops: per second, by the operands' type, see measure.roofline.operand_type. bandwidth: bytes
    per second of its memory. memory: bytes.
    """

    name: str = "NVIDIA H200"
    flops: dict[str, float] = field(
        default_factory=lambda: {
            "bfloat16": 791.6 * _TERA,
            "float16": 791.6 * _TERA,
            "float8_e4m3fn": 1485.9 * _TERA,
            "int8": 1485.9 * _TERA,
        }
    )
    bandwidth: float = 4.8 * _TERA
    memory: float = 141 * _GIGA

    def __post_init__(self) -> None:
        _check_positive("bandwidth", self.bandwidth)
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
    concurrently.
    """

    gpu: Gpu = field(default_factory=Gpu)
    inside: Link = field(default_factory=lambda: Link(393 * _GIGA))
    between: Link = field(default_factory=lambda: Link(50 * _GIGA, 20e-6))
    per_host: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.per_host <= 1024:
            raise ConfigurationError("ranks of a host", got=self.per_host, need="1 to 1024")

    def peers(self, world_size: int) -> tuple[int, int]:
        """Return the numbers of other ranks on this host, and on other hosts."""
        host_ranks = min(self.per_host, world_size)
        return host_ranks - 1, world_size - host_ranks


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigurationError(name, got=value, need="> 0")
