"""Microseconds of a dispatch and of a combine between ranks.

    t = start + latency + max over links of  bytes / (bandwidth * reached)

bytes: what the busier of sender and receiver has on that link. A token's row goes
    "rank"   once to each other rank that holds one of its experts:  T * sum of meets(r)
    "pair"   once for each of its K experts that is elsewhere:       T * K * (W - 1) / W
    "host"   once to each other host that holds one of its experts: T * sum of meets_host(h) there,
             and on from there to its ranks, as many rows inside as "rank" has everywhere
    "all"    to every other rank:                                    T * (W - 1)
    "sum"    not at all, but ranks agree first; (T, H) float32 is all-reduced: 2 * (W - 1) / W of it

meets(r): the chance that a token has an expert on rank r (sizing.load); with skew the fullest rank
receives most. Links inside and between hosts carry at the same time. latency: of the network, for
exchanges that leave the host.
"""

from dataclasses import dataclass

from modular_kernel.errors import ConfigurationError
from modular_kernel.perf_model.hardware import Cluster, Link
from modular_kernel.perf_model.load import EstimatedLoad
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme

_SCALE_BYTES = 4
_FLOAT32 = 4
KINDS = ("rank", "pair", "all", "sum", "host")
_CHUNK_TOKENS = 1024  # at least, in a piece of a part whose hops overlap piece by piece


@dataclass(frozen=True)
class Way:
    """One direction. start: seconds before the first byte. reached: of a link's bandwidth."""

    start: float
    reached: float


@dataclass(frozen=True)
class Traffic:
    """What a part exchanges. rows: see the module. quantized: activations travel as the scheme
    stores them. between: of the network's bandwidth. source: where the numbers are from.

    A part of somebody else's is known by a class attribute `traffic` of this type.
    """

    rows: str
    dispatch: Way
    combine: Way
    source: str
    quantized: bool = True
    quantizing: float = 0.0  # seconds that it adds to a dispatch
    between: float = 0.9
    pieces: int | None = None  # "host": in which the two hops overlap, at most; None: row by row

    def __post_init__(self) -> None:
        if self.rows not in KINDS:
            need = f"one of {', '.join(KINDS)}"
            raise ConfigurationError("rows of a traffic", got=repr(self.rows), need=need)


_NCCL = "fitted at 1 and 4096 tokens on two GPUs; eager, and mostly the host's time"
DEEPEP, DEEPEP_HT, DEEPEP_2 = "DeepEP low latency", "DeepEP high throughput", "DeepEP 2"

# By the name of a PrepareAndFinalize; sizing.compare says which cells they were fitted to.
TRAFFIC = {
    "MoEPrepareAndFinalizeNoEP": Traffic("rank", Way(0, 1), Way(0, 1), "nothing travels"),
    "SymmMemPrepareAndFinalize": Traffic(
        "rank",
        Way(4.9e-6, 0.92),
        Way(5.2e-6, 0.83),
        "fitted at 1 and 4096 tokens on two GPUs",
        quantizing=0.7e-6,
    ),
    "TorchAll2AllPrepareAndFinalize": Traffic(
        "rank", Way(1200e-6, 0.37), Way(280e-6, 0.21), _NCCL, quantizing=700e-6
    ),
    # Its outer hop begins as TorchAll2All's does, its inner one reaches what SymmMem's does.
    "HostThenRankPrepareAndFinalize": Traffic(
        "host",
        Way(1205e-6, 0.92),
        Way(285e-6, 0.83),
        "the two parts above; itself never measured",
        quantizing=700e-6,
        pieces=4,
    ),
    "AllGatherReduceScatterPrepareAndFinalize": Traffic(
        "all", Way(1290e-6, 0.50), Way(275e-6, 0.37), _NCCL, quantizing=700e-6
    ),
    "ReplicatedEPPrepareAndFinalize": Traffic("sum", Way(645e-6, 1), Way(180e-6, 0.60), _NCCL),
}
# Libraries by themselves: what a user who sizes for many hosts would otherwise ask for.
OTHERS = {
    DEEPEP: Traffic(
        "pair",
        Way(12.5e-6, 0.72),
        Way(12.5e-6, 0.68),
        "fitted at 1 and 128 tokens on four GPUs, and to its published EP16 and EP256",
    ),
    DEEPEP_HT: Traffic(
        "host",
        Way(88e-6, 0.80),
        Way(50e-6, 0.78),
        "start as on four GPUs, fitted to its published EP16 and EP64",
    ),
    DEEPEP_2: Traffic(
        "host", Way(17e-6, 0.80), Way(18e-6, 0.80), "start as on four GPUs, links as DeepEP's first"
    ),
}
# Where a library serves a part's problem, it serves the part's users; and what it is not made for.
PARTS_OVER = {
    DEEPEP: "DeepEPLLPrepareAndFinalize",
    DEEPEP_HT: "DeepEPHTPrepareAndFinalize",
    DEEPEP_2: "DeepEPV2PrepareAndFinalize",
}
_FEW_TOKENS = 256


def caveat(name: str, problem: Problem) -> str:
    """Say what a library's users should know of such a problem; "" for nothing."""
    if name != DEEPEP or problem.tokens <= _FEW_TOKENS:
        return ""
    row = problem.hidden * problem.dtype.itemsize
    gigabytes = 4 * problem.experts * problem.tokens * row / 1e9
    return (
        f"made for at most {_FEW_TOKENS} tokens: for {problem.tokens} its buffer takes"
        f" {gigabytes:.0f} GB of each GPU"
    )


@dataclass(frozen=True)
class ExchangeTime:
    """Seconds; bytes: that a rank sends or gets in the dispatch and in the combine."""

    dispatch: float
    combine: float
    dispatch_bytes: float
    combine_bytes: float


def row_bytes(problem: Problem, traffic: Traffic) -> float:
    """Return the bytes of one dispatched row.

    Activations and their scales count; ids and weights are left out.
    """
    scheme: QuantScheme = problem.scheme
    if not traffic.quantized or not scheme.travels_quantized:
        return problem.hidden * problem.dtype.itemsize
    groups = -(-problem.hidden // scheme.group[-1]) if scheme.group else 1
    return problem.hidden + groups * _SCALE_BYTES


def exchange_time(
    problem: Problem, traffic: Traffic, load: EstimatedLoad, cluster: Cluster
) -> ExchangeTime:
    """Return the times for problem.tokens tokens on each of problem.parallel.world_size ranks."""
    world = problem.parallel.world_size
    if world == 1:
        return ExchangeTime(0.0, 0.0, 0.0, 0.0)
    back = problem.hidden * problem.dtype.itemsize
    if traffic.rows == "sum":
        whole = 2 * (world - 1) / world * problem.tokens * problem.hidden * _FLOAT32
        combine = _ring(whole, traffic, cluster, world)
        return ExchangeTime(traffic.dispatch.start, combine, 0.0, whole)
    if traffic.rows == "host" and world > cluster.per_host:
        return _by_host(problem, traffic, load, cluster)
    rows = _rows(problem, traffic, load)
    there = row_bytes(problem, traffic)
    quantizing = traffic.quantizing if there != back else 0.0
    dispatch = _seconds(rows * there, traffic.dispatch, traffic, cluster, world) + quantizing
    combine = _seconds(rows * back, traffic.combine, traffic, cluster, world)
    return ExchangeTime(dispatch, combine, rows * there, rows * back)


def _by_host(
    problem: Problem, traffic: Traffic, load: EstimatedLoad, cluster: Cluster
) -> ExchangeTime:
    """Rows cross the network once for each host; as many as ranks need go on inside.

    What is passed on in pieces overlaps but for one of them.
    """
    world, here = problem.parallel.world_size, cluster.per_host
    outside = problem.tokens * (-(-world // here) - 1) * load.meets_host
    inside = problem.tokens * world * max(load.meets, load.meets_fullest) * (here - 1) / here
    back, there = problem.hidden * problem.dtype.itemsize, row_bytes(problem, traffic)
    pieces = traffic.pieces and min(traffic.pieces, here, -(-problem.tokens // _CHUNK_TOKENS))

    def seconds(each: float, way: Way) -> float:
        network = outside * each / (cluster.between.bandwidth * traffic.between)
        links = inside * each / (cluster.inside.bandwidth * way.reached)
        hops = max(network, links) + (min(network, links) / pieces if pieces else 0.0)
        return way.start + _latency(cluster.inside, cluster.between) + hops

    quantizing = traffic.quantizing if there != back else 0.0
    dispatch = seconds(there, traffic.dispatch) + quantizing
    return ExchangeTime(dispatch, seconds(back, traffic.combine), outside * there, outside * back)


def network_rows(
    problem: Problem, traffic: Traffic, load: EstimatedLoad, cluster: Cluster
) -> float:
    """Return the rows of a token that leave the host in a dispatch, an expected number."""
    near, far = cluster.peers(problem.parallel.world_size)
    if not far or traffic.rows == "sum":
        return 0.0
    if traffic.rows == "host":
        return (-(-problem.parallel.world_size // cluster.per_host) - 1) * load.meets_host
    return _rows(problem, traffic, load) / problem.tokens * far / (near + far)


def _rows(problem: Problem, traffic: Traffic, load: EstimatedLoad) -> float:
    """Return the rows that the busiest rank sends or gets, to and from all others."""
    tokens, world = problem.tokens, problem.parallel.world_size
    if traffic.rows == "all":
        return float(tokens * (world - 1))
    if traffic.rows == "pair":
        return max(tokens * problem.top_k, load.pairs) * (world - 1) / world
    return tokens * (world - 1) * max(load.meets, load.meets_fullest)


def _seconds(nbytes: float, way: Way, traffic: Traffic, cluster: Cluster, world: int) -> float:
    """Rows go to all ranks alike, so each link has its ranks' part."""
    near, far = cluster.peers(world)
    inside = nbytes * near / (near + far) / (cluster.inside.bandwidth * way.reached)
    if not far:
        return way.start + cluster.inside.latency + inside
    outside = nbytes * far / (near + far) / (cluster.between.bandwidth * traffic.between)
    return way.start + _latency(cluster.inside, cluster.between) + max(inside, outside)


def _ring(nbytes: float, traffic: Traffic, cluster: Cluster, world: int) -> float:
    """Return the time of an all-reduce, which is as fast as its slowest link."""
    _, far = cluster.peers(world)
    link = cluster.between if far else cluster.inside
    reached = traffic.between if far else traffic.combine.reached
    return traffic.combine.start + link.latency + nbytes / (link.bandwidth * reached)


def _latency(*links: Link) -> float:
    return max(link.latency for link in links)
