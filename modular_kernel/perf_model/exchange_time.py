"""Microseconds of a dispatch and of a combine between ranks.

    t = start + latency + max over links of  bytes / (bandwidth * reached)

bytes: what the busier of sender and receiver has on that link. A token's row goes
    "rank"   once to each other rank that holds one of its experts:  T * sum of meets(r)
    "pair"   once for each of its K experts that is elsewhere:       T * K * (W - 1) / W
    "all"    to every other rank:                                    T * (W - 1)
    "host"   once to each other host, and inside each to the ranks that need it (`_by_hosts`)
    "sum"    not at all, but ranks agree first; (T, H) float32 is all-reduced: 2 * (W - 1) / W of it

meets(r): the chance that a token has an expert on rank r (sizing.load); with skew the fullest rank
receives most. Links inside and between hosts carry at the same time. latency: of the network, for
exchanges that leave the host.
"""

from dataclasses import dataclass

from modular_kernel.errors import ConfigurationError
from modular_kernel.perf_model.hardware import Cluster, Link
from modular_kernel.perf_model.load import EstimatedLoad
from modular_kernel.schemes import QuantScheme
from modular_kernel.types import Problem

_SCALE_BYTES = 4
_FLOAT32 = 4
KINDS = ("rank", "host", "pair", "all", "sum")
_CHUNKS, _CHUNK_TOKENS = 4, 1024  # of a part that overlaps hops between hosts and inside them


@dataclass(frozen=True)
class Way:
    """One direction. start: seconds before the first byte. reached: of a link's bandwidth."""

    start: float
    reached: float


@dataclass(frozen=True)
class Traffic:
    """What a part exchanges. rows: see the module. quantised: activations travel as the scheme
    stores them. between: of the network's bandwidth. source: where the numbers are from.

    A part of somebody else's is known by a class attribute `traffic` of this type.
    """

    rows: str
    dispatch: Way
    combine: Way
    source: str
    quantised: bool = True
    quantising: float = 0.0  # seconds that it adds to a dispatch
    between: float = 0.9

    def __post_init__(self) -> None:
        if self.rows not in KINDS:
            need = f"one of {', '.join(KINDS)}"
            raise ConfigurationError("rows of a traffic", got=repr(self.rows), need=need)


_NCCL = "fitted at 1 and 4096 tokens on two GPUs; eager, and mostly the host's time"
DEEPEP = "DeepEP low latency"

# By the name of a PrepareAndFinalize; sizing.compare says which cells they were fitted to.
TRAFFIC = {
    "MoEPrepareAndFinalizeNoEP": Traffic("rank", Way(0, 1), Way(0, 1), "nothing travels"),
    "SymmMemPrepareAndFinalize": Traffic(
        "rank",
        Way(4.9e-6, 0.92),
        Way(5.2e-6, 0.83),
        "fitted at 1 and 4096 tokens on two GPUs",
        quantising=0.7e-6,
    ),
    "TorchAll2AllPrepareAndFinalize": Traffic(
        "rank", Way(1200e-6, 0.37), Way(280e-6, 0.21), _NCCL, quantising=700e-6
    ),
    # Its outer hop begins as TorchAll2All's does, its inner one reaches what SymmMem's does.
    "HostThenRankPrepareAndFinalize": Traffic(
        "host",
        Way(1205e-6, 0.92),
        Way(285e-6, 0.83),
        "the two parts above; itself never measured",
        quantising=700e-6,
    ),
    "AllGatherReduceScatterPrepareAndFinalize": Traffic(
        "all", Way(1290e-6, 0.50), Way(275e-6, 0.37), _NCCL, quantising=700e-6
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
}


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
    if not traffic.quantised or not scheme.quantises_activations:
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
    there = row_bytes(problem, traffic)
    quantising = traffic.quantising if there != back else 0.0
    if traffic.rows == "host":
        ways = ((traffic.dispatch, there), (traffic.combine, back))
        (dispatch, out), (combine, home) = (
            _by_hosts(problem, traffic, load, cluster, way, nbytes) for way, nbytes in ways
        )
        return ExchangeTime(dispatch + quantising, combine, out, home)
    rows = _rows(problem, traffic, load)
    dispatch = _seconds(rows * there, traffic.dispatch, traffic, cluster, world) + quantising
    combine = _seconds(rows * back, traffic.combine, traffic, cluster, world)
    return ExchangeTime(dispatch, combine, rows * there, rows * back)


def _rows(problem: Problem, traffic: Traffic, load: EstimatedLoad) -> float:
    """Return the rows that the busiest rank sends or gets, to and from all others."""
    tokens, world = problem.tokens, problem.parallel.world_size
    if traffic.rows == "all":
        return float(tokens * (world - 1))
    if traffic.rows == "pair":
        return max(tokens * problem.top_k, load.pairs) * (world - 1) / world
    return tokens * (world - 1) * max(load.meets, load.meets_fullest)


def _by_hosts(
    problem: Problem,
    traffic: Traffic,
    load: EstimatedLoad,
    cluster: Cluster,
    way: Way,
    row: float,
) -> tuple[float, float]:
    """Seconds, and bytes that a rank sends or gets on both links, for rows of `row` bytes.

    A host needs a token with the chance 1 - (1 - meets) ** L, as if its L ranks were drawn apart.
    The hop between hosts and the one inside overlap but for a chunk.
    """
    world, tokens = problem.parallel.world_size, problem.tokens
    near, far = cluster.peers(world)
    per_host = near + 1
    meets = max(load.meets, load.meets_fullest)
    inside = tokens * world * meets * near / per_host * row
    outside = tokens * far / per_host * (1 - (1 - meets) ** per_host) * row
    inner = inside / (cluster.inside.bandwidth * way.reached)
    outer = outside / (cluster.between.bandwidth * traffic.between)
    chunks = max(1, min(per_host, _CHUNKS, -(-tokens // _CHUNK_TOKENS)))
    latency = _latency(cluster.inside, *([cluster.between] if far else []))
    carried = max(inner, outer) + min(inner, outer) / chunks
    return way.start + latency + carried, inside + outside


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
