"""Time model of a dispatch and of a combine between ranks.

    t = start + latency + max over links of  bytes / (bandwidth * reached)

start, reached: fitted for each part (DirectionModel).
latency: maximum latency of the links (Link).
bytes: maximum over ranks of the bytes that a rank sends or receives over a link.

Links inside and between hosts transfer concurrently. Traffic.rows selects how often the row of a
token is sent, for T tokens per rank and W ranks:

    "rank"   once to each other rank that has one of its experts:  T * sum of p_rank(r) rows
    "pair"   once for each of its K experts on another rank:       T * K * (W - 1) / W rows
    "host"   once to each other host that has one of its experts:  T * sum of p_host(h) rows; then
             inside the host to the ranks, with as many rows as "rank" has in total
    "all"    to every other rank:                                  T * (W - 1) rows
    "sum"    never, because all ranks pass the same T tokens. They synchronize, and all-reduce
             (T, H) float32, which transfers 2 * (W - 1) / W times its size

p_rank(r) and p_host(h) are the probabilities that a token has an expert on rank r and on host h
(see `perf_model.load`). With a skewed routing, the rank with the highest probability determines the
time.
"""

from dataclasses import dataclass

from modular_kernel.errors import ConfigurationError
from modular_kernel.perf_model.hardware import Cluster, Link
from modular_kernel.perf_model.load import EstimatedLoad
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme

_SCALE_BYTES = 4
_FLOAT32_BYTES = 4
ROW_KINDS = ("rank", "pair", "all", "sum", "host")
_TOKENS_PER_PIECE = 1024  # of a part that overlaps its two hops, see Traffic.max_pieces


@dataclass(frozen=True)
class DirectionModel:
    """Parameters of a dispatch or a combine.

    start: seconds before the first byte is sent.
    reached: fraction of the bandwidth that is reached on a link inside a host.
    """

    start: float
    reached: float


@dataclass(frozen=True)
class Traffic:
    """Traffic model of a PrepareAndFinalize: the rows that it sends, and how fast.

    A part of another package can define a class attribute `traffic` of this type.

    rows: how often a row is sent, see the module's docstring.
    source: description of where the parameters come from.
    quantized: whether activations are dispatched as the scheme quantizes them.
    quantize_seconds: time that quantization adds to a dispatch.
    between: fraction of the bandwidth that is reached on the network between hosts.
    max_pieces: for "host", the maximum number of pieces into which tokens are divided, so that the
        two hops of different pieces overlap; None if they overlap row by row.
    own_rows: for "rank", whether rows for a rank's own experts take as long as rows for others.
    one_host: the model if all ranks are on one host; None for no difference.
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
        if self.rows not in ROW_KINDS:
            need = f"one of {', '.join(ROW_KINDS)}"
            raise ConfigurationError("rows of a traffic model", got=repr(self.rows), need=need)


_NCCL_SOURCE = "fitted at 1 and 4096 tokens on two GPUs; eager, dominated by host time"
DEEPEP_LL, DEEPEP_HT, DEEPEP_V2, PPLX = (
    "DeepEPLLPrepareAndFinalize",
    "DeepEPHTPrepareAndFinalize",
    "DeepEPV2PrepareAndFinalize",
    "PplxPrepareAndFinalize",
)
_NO_TRAFFIC = Traffic(
    "rank", DirectionModel(0, 1), DirectionModel(0, 1), "no exchange between ranks"
)

# Traffic models by the name of a PrepareAndFinalize. `perf_model.compare` reads the times that they
# were fitted to. A part with neither an entry nor an attribute `traffic` has no estimate.
TRAFFIC_BY_PART = {
    "MoEPrepareAndFinalizeNoEP": _NO_TRAFFIC,
    "BatchedPrepareAndFinalize": _NO_TRAFFIC,
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
        _NCCL_SOURCE,
        quantize_seconds=700e-6,
    ),
    # The start is taken from TorchAll2All, which sends between hosts, and the bandwidth from
    # SymmMem inside a host.
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
        _NCCL_SOURCE,
        quantize_seconds=700e-6,
    ),
    "ReplicatedEPPrepareAndFinalize": Traffic(
        "sum", DirectionModel(645e-6, 1), DirectionModel(180e-6, 0.60), _NCCL_SOURCE
    ),
    DEEPEP_LL: Traffic(
        "pair",
        DirectionModel(12.5e-6, 0.72),
        DirectionModel(12.5e-6, 0.68),
        "fitted at 1 and 128 tokens on four GPUs, and to its published EP16 and EP256",
    ),
    # Inside a host, the library uses other kernels, which also copy the rows that stay on a rank.
    DEEPEP_HT: Traffic(
        "host",
        DirectionModel(88e-6, 0.80),
        DirectionModel(50e-6, 0.78),
        "start of eager calls on four GPUs, links fitted to its published EP16 and EP64",
        one_host=Traffic(
            "rank",
            DirectionModel(31e-6, 0.55),
            DirectionModel(31e-6, 0.76),
            "fitted at 1 and 4096 tokens in bfloat16 on two and four GPUs",
            own_rows=True,
        ),
    ),
    DEEPEP_V2: Traffic(
        "host",
        DirectionModel(17e-6, 0.80),
        DirectionModel(18e-6, 0.80),
        "start as on four GPUs, links as in the first version of DeepEP",
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
_MAX_DEEPEP_LL_TOKENS = 256  # tokens per rank for which DeepEP's low-latency mode is designed


def find_caveat(prepare_finalize: str, problem: Problem) -> str:
    """Return the limit of the part that the problem exceeds and the model ignores, or ""."""
    if prepare_finalize != DEEPEP_LL or problem.tokens <= _MAX_DEEPEP_LL_TOKENS:
        return ""
    return f"made for at most {_MAX_DEEPEP_LL_TOKENS} tokens on each rank"


@dataclass(frozen=True)
class ExchangeTime:
    """Seconds of a dispatch and a combine, and the bytes of the busiest rank in both."""

    dispatch: float
    combine: float
    dispatch_bytes: float
    combine_bytes: float


def row_bytes(problem: Problem, traffic: Traffic) -> float:
    """Return the bytes of one dispatched row and its scales, without ids and router weights."""
    scheme: QuantScheme = problem.scheme
    if not traffic.quantized or not scheme.dispatched_quantized:
        return problem.hidden * problem.dtype.itemsize
    groups = -(-problem.hidden // scheme.group[-1]) if scheme.group else 1
    return problem.hidden + groups * _SCALE_BYTES


def exchange_time(
    problem: Problem, traffic: Traffic, load: EstimatedLoad, cluster: Cluster
) -> ExchangeTime:
    """Return the times of an exchange of problem.tokens tokens on each rank."""
    world_size = problem.parallel.world_size
    if world_size == 1:
        return ExchangeTime(0.0, 0.0, 0.0, 0.0)
    traffic = select_traffic(traffic, world_size, cluster)
    combine_row_bytes = problem.hidden * problem.dtype.itemsize
    if traffic.rows == "sum":
        reduced_bytes = (
            2 * (world_size - 1) / world_size * problem.tokens * problem.hidden * _FLOAT32_BYTES
        )
        combine = _compute_all_reduce_seconds(reduced_bytes, traffic, cluster, world_size)
        return ExchangeTime(traffic.dispatch.start, combine, 0.0, reduced_bytes)
    if traffic.rows == "host" and world_size > cluster.per_host:
        return _compute_two_hop_time(problem, traffic, load, cluster)
    rows = _count_rows_of_busiest_rank(problem, traffic, load)
    dispatch_row_bytes = row_bytes(problem, traffic)
    quantize_seconds = traffic.quantize_seconds if dispatch_row_bytes != combine_row_bytes else 0.0
    dispatch = (
        _compute_one_hop_seconds(
            rows * dispatch_row_bytes, traffic.dispatch, traffic, cluster, world_size
        )
        + quantize_seconds
    )
    combine = _compute_one_hop_seconds(
        rows * combine_row_bytes, traffic.combine, traffic, cluster, world_size
    )
    return ExchangeTime(dispatch, combine, rows * dispatch_row_bytes, rows * combine_row_bytes)


def select_traffic(traffic: Traffic, world_size: int, cluster: Cluster) -> Traffic:
    """Return `traffic.one_host` if it exists and all ranks are on one host, otherwise `traffic`."""
    is_one_host = world_size <= cluster.per_host
    return traffic.one_host if is_one_host and traffic.one_host is not None else traffic


def _compute_two_hop_time(
    problem: Problem, traffic: Traffic, load: EstimatedLoad, cluster: Cluster
) -> ExchangeTime:
    """Return the times of an exchange in two hops: to each host, and from there to its ranks.

    Tokens are divided into up to `max_pieces` pieces. The shorter hop overlaps with the longer one,
    except for one piece.
    """
    world_size, host_ranks = problem.parallel.world_size, cluster.per_host
    rows_between = problem.tokens * (-(-world_size // host_ranks) - 1) * load.host_probability
    rows_inside = (
        problem.tokens
        * world_size
        * max(load.rank_probability, load.fullest_rank_probability)
        * (host_ranks - 1)
        / host_ranks
    )
    combine_row_bytes = problem.hidden * problem.dtype.itemsize
    dispatch_row_bytes = row_bytes(problem, traffic)
    max_pieces = traffic.max_pieces and min(
        traffic.max_pieces, host_ranks, -(-problem.tokens // _TOKENS_PER_PIECE)
    )

    def compute_seconds(bytes_per_row: float, direction: DirectionModel) -> float:
        between = rows_between * bytes_per_row / (cluster.between.bandwidth * traffic.between)
        inside = rows_inside * bytes_per_row / (cluster.inside.bandwidth * direction.reached)
        hops = max(between, inside) + (min(between, inside) / max_pieces if max_pieces else 0.0)
        return direction.start + _get_max_latency(cluster.inside, cluster.between) + hops

    quantize_seconds = traffic.quantize_seconds if dispatch_row_bytes != combine_row_bytes else 0.0
    dispatch = compute_seconds(dispatch_row_bytes, traffic.dispatch) + quantize_seconds
    return ExchangeTime(
        dispatch,
        compute_seconds(combine_row_bytes, traffic.combine),
        rows_between * dispatch_row_bytes,
        rows_between * combine_row_bytes,
    )


def network_rows(
    problem: Problem, traffic: Traffic, load: EstimatedLoad, cluster: Cluster
) -> float:
    """Return the expected number of rows per token that leave the host in a dispatch."""
    host_peers, network_peers = cluster.count_peers(problem.parallel.world_size)
    traffic = select_traffic(traffic, problem.parallel.world_size, cluster)
    if not network_peers or traffic.rows == "sum":
        return 0.0
    if traffic.rows == "host":
        return (-(-problem.parallel.world_size // cluster.per_host) - 1) * load.host_probability
    return (
        _count_rows_of_busiest_rank(problem, traffic, load)
        / problem.tokens
        * network_peers
        / (host_peers + network_peers)
    )


def _count_rows_of_busiest_rank(problem: Problem, traffic: Traffic, load: EstimatedLoad) -> float:
    """Return the number of rows that the busiest rank sends or receives."""
    tokens, world_size = problem.tokens, problem.parallel.world_size
    if traffic.rows == "all":
        return float(tokens * (world_size - 1))
    if traffic.rows == "pair":
        return max(tokens * problem.top_k, load.pairs) * (world_size - 1) / world_size
    receivers = world_size if traffic.own_rows else world_size - 1
    return tokens * receivers * max(load.rank_probability, load.fullest_rank_probability)


def _compute_one_hop_seconds(
    nbytes: float, direction: DirectionModel, traffic: Traffic, cluster: Cluster, world_size: int
) -> float:
    """Return the seconds of an exchange of `nbytes`, divided equally among all other ranks."""
    host_peers, network_peers = cluster.count_peers(world_size)
    inside = (
        nbytes
        * host_peers
        / (host_peers + network_peers)
        / (cluster.inside.bandwidth * direction.reached)
    )
    if not network_peers:
        return direction.start + cluster.inside.latency + inside
    between = (
        nbytes
        * network_peers
        / (host_peers + network_peers)
        / (cluster.between.bandwidth * traffic.between)
    )
    return (
        direction.start + _get_max_latency(cluster.inside, cluster.between) + max(inside, between)
    )


def _compute_all_reduce_seconds(
    nbytes: float, traffic: Traffic, cluster: Cluster, world_size: int
) -> float:
    """Return the seconds of an all-reduce, which the slowest link limits."""
    _, network_peers = cluster.count_peers(world_size)
    link = cluster.between if network_peers else cluster.inside
    reached = traffic.between if network_peers else traffic.combine.reached
    return traffic.combine.start + link.latency + nbytes / (link.bandwidth * reached)


def _get_max_latency(*links: Link) -> float:
    return max(link.latency for link in links)
