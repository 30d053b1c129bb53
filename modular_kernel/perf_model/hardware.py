"""The machine that is sized for, as numbers: one GPU, and the links between GPUs.

Defaults are of an H200 host (docs/benchmarks/h200-layers.json for the GPU, docs/benchmarks/
h200-exchange.md for the link inside a host); the network between hosts is a given 400 Gb/s for
each GPU, with what published tables of DeepEP imply for its efficiency and latency.
"""

from dataclasses import dataclass, field

from modular_kernel.errors import ConfigurationError

_GIGA, _TERA = 1e9, 1e12


@dataclass(frozen=True)
class Gpu:
    """flops: per second, by the operands' type as bench.floor.operand_type names it. bandwidth:
    bytes per second of its memory. memory: bytes."""

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
        _positive("bandwidth", self.bandwidth)
        for name, rate in self.flops.items():
            _positive(f"flops in {name}", rate)


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes per second out of one GPU, and as many into it. latency: seconds that it
    adds to an exchange, beyond those of the part that makes it."""

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        _positive("link bandwidth", self.bandwidth)
        if not 0 <= self.latency < 1:
            raise ConfigurationError("link latency", got=self.latency, need="seconds in [0, 1)")


@dataclass(frozen=True)
class Cluster:
    """Hosts of `per_host` GPUs. inside: the link between GPUs of a host. between: each GPU's share
    of the network; both carry at the same time."""

    gpu: Gpu = field(default_factory=Gpu)
    inside: Link = field(default_factory=lambda: Link(393 * _GIGA))
    between: Link = field(default_factory=lambda: Link(50 * _GIGA, 20e-6))
    per_host: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.per_host <= 1024:
            raise ConfigurationError("ranks of a host", got=self.per_host, need="1 to 1024")

    def peers(self, world_size: int) -> tuple[int, int]:
        """Count the other ranks in this host, and the ranks in other hosts."""
        here = min(self.per_host, world_size)
        return here - 1, world_size - here


def _positive(what: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigurationError(what, got=value, need="> 0")
