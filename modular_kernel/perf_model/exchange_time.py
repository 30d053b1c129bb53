"""Time model of a dispatch and of a combine between ranks.

    t = start + latency + max over links of  bytes / (bandwidth * reached)

start, reached: fitted for each part (DirectionModel). latency: that of the slowest link (Link).
bytes: of the busier of sender and receiver on a link. Links inside and between hosts transfer
concurrently. Traffic.rows says how often the row of a token is sent:

    "rank"   once to each other rank that has one of its experts:  T * sum of p_rank(r) rows
    "pair"   once for each of its K experts on another rank:       T * K * (W - 1) / W rows
    "host"   once to each other host that has one of its experts:  T * sum of p_host(h) rows; and
             from there to the ranks, with as many rows inside a host as "rank" has in total
    "all"    to every other rank:                                  T * (W - 1) rows
    "sum"    no dispatch: all ranks pass the same T tokens, those of the whole world, synchronize,
             and all-reduce (T, H) float32, which transfers 2 * (W - 1) / W times its size

p_rank(r), p_host(h): probability that a token has an expert on rank r, or on host h (see
`perf_model.load`). With a skewed routing, the rank with the highest probability is the busiest.
"""

from dataclasses import dataclass

from modular_kernel.errors import ConfigurationError
from modular_kernel.perf_model.hardware import Cluster, Link
from modular_kernel.perf_model.load import EstimatedLoad
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme

_SCALE_BYTES = 4
_FLOAT32_BYTES = 4
KINDS = ("rank", "pair", "all", "sum", "host")
_CHUNK_TOKENS = 1024  # minimum tokens per piece of a part that overlaps its hops


@dataclass(frozen=True)
class DirectionModel:
    """Parameters of a dispatch or a combine.

    start: seconds before the first byte is sent. reached: fraction of the bandwidth of a link
    inside a host that is reached.
    """

    start: float
    reached: float


@dataclass(frozen=True)
class Traffic:
    """Exchange model of a PrepareAndFinalize.

    A part of another package can define a class attribute `traffic` of this type.

    rows: see the module's docstring. source: where the parameters come from, to print. quantized:
        whether activations are dispatched as the scheme quantizes them.
    quantize_seconds: added to a dispatch that quantizes.
    between: fraction of the network's bandwidth that is reached.
    max_pieces: for "host", the maximum number of pieces in which the two hops overlap; None if they
        overlap row by row.
    own_rows: for "rank", whether rows for a rank's own experts take as long as those for others.
    one_host: the model if all ranks are on one host; None if it is the same.
    """

    rows: str
    dispatch: DirectionModel
    combine: DirectionModel
    source: str
    quantized: bool = True
    quantize_seconds: float = 0.0
    between: float = 0.9
    max_pieces: int | None = None
    own_rows: bool = False
    one_host: "Traffic | None" = None

    def __post_init__(self) -> None:
        if self.rows not in KINDS:
            need = f"one of {', '.join(KINDS)}"
            raise ConfigurationError("rows of a traffic", got=repr(self.rows), need=need)


_NCCL = "fitted at 1 and 4096 tokens on two GPUs; eager, dominated by host time"
DEEPEP, DEEPEP_HT, DEEPEP_2, PPLX = (
    "DeepEPLLPrepareAndFinalize",
    "DeepEPHTPrepareAndFinalize",
    "DeepEPV2PrepareAndFinalize",
    "PplxPrepareAndFinalize",
)
_NOTHING = Traffic("rank", DirectionModel(0, 1), DirectionModel(0, 1), "nothing travels")

# By the name of a PrepareAndFinalize. `perf_model.compare` reads the measurements of the fits. A
# part without an entry, and without a `traffic` of its own, has no estimate.
TRAFFIC = {
    "MoEPrepareAndFinalizeNoEP": _NOTHING,
    "BatchedPrepareAndFinalize": _NOTHING,
    "SymmMemPrepareAndFinalize": Traffic(
        "rank",
        DirectionModel(4.9e-6, 0.92),
        DirectionModel(5.2e-6, 0.83),
        "fitted at 1 and 4096 tokens on two GPUs",
        quantize_seconds=0.7e-6,
    ),
    "TorchAll2AllPrepareAndFinalize": Traffic(
        "rank",
        DirectionModel(1200e-6, 0.37),
        DirectionModel(280e-6, 0.21),
        _NCCL,
        quantize_seconds=700e-6,
    ),
    # The outer hop starts like TorchAll2All, the inner one has the bandwidth of SymmMem.
    "HostThenRankPrepareAndFinalize": Traffic(
        "host",
        DirectionModel(1205e-6, 0.92),
        DirectionModel(285e-6, 0.83),
        "derived from SymmMem and TorchAll2All; not measured",
        quantize_seconds=700e-6,
        max_pieces=4,
    ),
    "AllGatherReduceScatterPrepareAndFinalize": Traffic(
        "all",
        DirectionModel(1290e-6, 0.50),
        DirectionModel(275e-6, 0.37),
        _NCCL,
        quantize_seconds=700e-6,
    ),
    "ReplicatedEPPrepareAndFinalize": Traffic(
        "sum", DirectionModel(645e-6, 1), DirectionModel(180e-6, 0.60), _NCCL
    ),
    DEEPEP: Traffic(
        "pair",
        DirectionModel(12.5e-6, 0.72),
        DirectionModel(12.5e-6, 0.68),
        "fitted at 1 and 128 tokens on four GPUs, and to its published EP16 and EP256",
    ),
    # Inside a host the library uses other kernels, which also copy the rows that stay on a rank.
    DEEPEP_HT: Traffic(
        "host",
        DirectionModel(88e-6, 0.80),
        DirectionModel(50e-6, 0.78),
        "start as of eager calls on four GPUs, fitted to its published EP16 and EP64",
        one_host=Traffic(
            "rank",
            DirectionModel(31e-6, 0.55),
            DirectionModel(31e-6, 0.76),
            "fitted at 1 and 4096 tokens in bfloat16 on two and four GPUs",
            own_rows=True,
        ),
    ),
    DEEPEP_2: Traffic(
        "host",
        DirectionModel(17e-6, 0.80),
        DirectionModel(18e-6, 0.80),
        "start as on four GPUs, links as DeepEP's first",
        one_host=Traffic(
            "rank",
            DirectionModel(13e-6, 0.61),
            DirectionModel(13e-6, 0.65),
            "fitted at 1 and 4096 tokens in bfloat16 on four GPUs",
        ),
    ),
    PPLX: Traffic(
        "pair",
        DirectionModel(16.5e-6, 0.62),
        DirectionModel(16.5e-6, 0.45),
        "fitted at 1 and 128 tokens on four GPUs",
    ),
}
_FEW_TOKENS = 256


def caveat(prepare_finalize: str, problem: Problem) -> str:
    """Return the limit of a part that the problem exceeds and the model ignores, or ""."""
    if prepare_finalize != DEEPEP or problem.tokens <= _FEW_TOKENS:
        return ""
    return f"made for at most {_FEW_TOKENS} tokens on each rank"


@dataclass(frozen=True)
class ExchangeTime:
    """Seconds of a dispatch and a combine, and the bytes that a rank sends or receives in each."""

    dispatch: float
    combine: float
    dispatch_bytes: float
    combine_bytes: float


def row_bytes(problem: Problem, traffic: Traffic) -> float:
    """Return the bytes of one dispatched row.

    Activations and their scales are counted; ids and weights are not.
    """
    scheme: QuantScheme = problem.scheme
    if not traffic.quantized or not scheme.dispatched_quantized:
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
    traffic = effective(traffic, world, cluster)
    combine_row = problem.hidden * problem.dtype.itemsize
    if traffic.rows == "sum":
        reduced_bytes = 2 * (world - 1) / world * problem.tokens * problem.hidden * _FLOAT32_BYTES
        combine = _all_reduce_seconds(reduced_bytes, traffic, cluster, world)
        return ExchangeTime(traffic.dispatch.start, combine, 0.0, reduced_bytes)
    if traffic.rows == "host" and world > cluster.per_host:
        return _two_hop_time(problem, traffic, load, cluster)
    rows = _rows(problem, traffic, load)
    dispatch_row = row_bytes(problem, traffic)
    quantize_seconds = traffic.quantize_seconds if dispatch_row != combine_row else 0.0
    dispatch = (
        _seconds(rows * dispatch_row, traffic.dispatch, traffic, cluster, world) + quantize_seconds
    )
    combine = _seconds(rows * combine_row, traffic.combine, traffic, cluster, world)
    return ExchangeTime(dispatch, combine, rows * dispatch_row, rows * combine_row)


def effective(traffic: Traffic, world_size: int, cluster: Cluster) -> Traffic:
    """Return `traffic.one_host` if there is one and all ranks are on one host, else `traffic`."""
    one_host = world_size <= cluster.per_host
    return traffic.one_host if one_host and traffic.one_host is not None else traffic


def _two_hop_time(
    problem: Problem, traffic: Traffic, load: EstimatedLoad, cluster: Cluster
) -> ExchangeTime:
    """Return the times of an exchange in two hops: once to each host, and on to its ranks.

    The two hops overlap, except for the first of `max_pieces` pieces.
    """
    world, host_ranks = problem.parallel.world_size, cluster.per_host
    outside = problem.tokens * (-(-world // host_ranks) - 1) * load.p_host
    inside = (
        problem.tokens
        * world
        * max(load.p_rank, load.p_fullest_rank)
        * (host_ranks - 1)
        / host_ranks
    )
    combine_row, dispatch_row = problem.hidden * problem.dtype.itemsize, row_bytes(problem, traffic)
    max_pieces = traffic.max_pieces and min(
        traffic.max_pieces, host_ranks, -(-problem.tokens // _CHUNK_TOKENS)
    )

    def seconds(bytes_per_row: float, direction: DirectionModel) -> float:
        network = outside * bytes_per_row / (cluster.between.bandwidth * traffic.between)
        links = inside * bytes_per_row / (cluster.inside.bandwidth * direction.reached)
        hops = max(network, links) + (min(network, links) / max_pieces if max_pieces else 0.0)
        return direction.start + _max_latency(cluster.inside, cluster.between) + hops

    quantize_seconds = traffic.quantize_seconds if dispatch_row != combine_row else 0.0
    dispatch = seconds(dispatch_row, traffic.dispatch) + quantize_seconds
    return ExchangeTime(
        dispatch,
        seconds(combine_row, traffic.combine),
        outside * dispatch_row,
        outside * combine_row,
    )


def network_rows(
    problem: Problem, traffic: Traffic, load: EstimatedLoad, cluster: Cluster
) -> float:
    """Return the expected number of rows per token that leave the host in a dispatch."""
    near, far = cluster.peers(problem.parallel.world_size)
    traffic = effective(traffic, problem.parallel.world_size, cluster)
    if not far or traffic.rows == "sum":
        return 0.0
    if traffic.rows == "host":
        return (-(-problem.parallel.world_size // cluster.per_host) - 1) * load.p_host
    return _rows(problem, traffic, load) / problem.tokens * far / (near + far)


def _rows(problem: Problem, traffic: Traffic, load: EstimatedLoad) -> float:
    """Return the rows that the busiest rank sends or receives."""
    tokens, world = problem.tokens, problem.parallel.world_size
    if traffic.rows == "all":
        return float(tokens * (world - 1))
    if traffic.rows == "pair":
        return max(tokens * problem.top_k, load.pairs) * (world - 1) / world
    receivers = world if traffic.own_rows else world - 1
    return tokens * receivers * max(load.p_rank, load.p_fullest_rank)


def _seconds(
    nbytes: float, direction: DirectionModel, traffic: Traffic, cluster: Cluster, world: int
) -> float:
    """Return the time of an exchange that sends equally many rows to all other ranks."""
    near, far = cluster.peers(world)
    inside = nbytes * near / (near + far) / (cluster.inside.bandwidth * direction.reached)
    if not far:
        return direction.start + cluster.inside.latency + inside
    outside = nbytes * far / (near + far) / (cluster.between.bandwidth * traffic.between)
    return direction.start + _max_latency(cluster.inside, cluster.between) + max(inside, outside)


def _all_reduce_seconds(nbytes: float, traffic: Traffic, cluster: Cluster, world: int) -> float:
    """Return the time of an all-reduce, limited by the slowest link."""
    _, far = cluster.peers(world)
    link = cluster.between if far else cluster.inside
    reached = traffic.between if far else traffic.combine.reached
    return traffic.combine.start + link.latency + nbytes / (link.bandwidth * reached)


def _max_latency(*links: Link) -> float:
    return max(link.latency for link in links)
