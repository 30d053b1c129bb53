"""Memory of one rank for one layer: weights, prepared weights, workspace and exchange buffers.

Workspaces are computed from the sizes of the layer, without creating a part, for the largest
dispatch that a rank may receive. h is a row of activations between the GEMMs. The workspace has

    standard format   for each (token, expert) pair: h, its quantized copy, and a row of w2's
                      output; for each token: the sum of its rows. Parts that call a library sort
                      the rows first. They need max(x + w1's output, w2's output) + h for each pair,
                      because w2's output may overwrite the other two
    batched format    for each of the C rows of e experts: h, its quantized copy, and a row of w2's
                      output; with a library, also w1's output

Exchange buffers are computed from the sizes that the parts allocate. The buffers of libraries are
exact for DeepEP's low-latency mode and pplx-kernels, and estimated from the depth of their queues
for others. The memory of the caching allocator, CUDA graphs and NCCL is not included.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from modular_kernel.catalog import load_catalog
from modular_kernel.compatibility.support import Rejection, Verdict
from modular_kernel.measure.adapter_roofline import adapter_bytes
from modular_kernel.measure.prepared_weights import prepared_tensor_bytes
from modular_kernel.measure.roofline import expert_bytes
from modular_kernel.spec.problem import ActivationFormat, Machine, Problem
from modular_kernel.tensors import BatchedShape, DispatchShape, StandardShape

_GIGA = 1e9
_MIN_PRINTED_BYTES = 0.05 * _GIGA  # smaller sizes would be printed as 0.0 GB
_BASE_PACKAGES = frozenset({"triton", "ml_dtypes"})
_FLOAT32_BYTES, _SCALE_BYTES = 4, 4
_ID_BYTES = 8  # per pair: an int32 id and a float32 weight
_MIN_ROWS_TO_UNPACK = 16  # with more rows per expert, parts may unpack quantized weights first
_CALLS_IN_FLIGHT = 2  # calls of SymmMem and HostThenRank that may be between prepare and finalize
# Channels per peer and rows per channel of DeepEP's high-throughput mode.
_DEEPEP_HT_CHANNELS, _DEEPEP_HT_CHANNEL_ROWS = 10, 256
# DeepEP allocates buffers for a number of tokens that is a multiple of this value.
_DEEPEP_TOKEN_MULTIPLE = 128
_RANKS_PER_HOST = 8


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    prepared: prepared weights, which are needed in addition to `weights`.
    """

    weights: float
    prepared: int
    workspace: int
    exchange: int

    @property
    def total(self) -> float:
        return self.weights + self.prepared + self.workspace + self.exchange

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "prepared weights": self.prepared,
            "workspace": self.workspace,
            "exchange buffers": self.exchange,
        }
        sizes = [
            f"{n / _GIGA:.1f} of {name}" for name, n in parts.items() if n > _MIN_PRINTED_BYTES
        ]
        if self.total <= _MIN_PRINTED_BYTES:
            return f"less than {_MIN_PRINTED_BYTES / _GIGA:g} GB"
        total = f"{self.total / _GIGA:.1f} GB"
        return f"{total} ({', '.join(sizes)})" if sizes else total


def estimate_memory(
    prepare_finalize: str,
    experts: str,
    problem: Problem,
    machine: Machine,
    *,
    prepared: bool = False,
    layers: int = 1,
) -> Memory:
    """Return the memory of the rank problem.parallel.rank for one pairing.

    problem.tokens is the maximum number of tokens of a rank.

    prepared: whether to include prepared weights.
    layers: number of layers whose weights the rank has. They share the workspace and the exchange
        buffers.
    """
    slots = 0 if problem.adapters is None else problem.adapters.adapters
    weights = problem.e * expert_bytes(problem, problem.scheme) + slots * adapter_bytes(problem)
    return Memory(
        layers * weights,
        layers * prepared_bytes(experts, problem, machine) if prepared else 0,
        estimate_workspace(experts, problem, _get_largest_dispatch(prepare_finalize, problem)),
        exchange_bytes(prepare_finalize, problem),
    )


def prepared_bytes(experts: str, problem: Problem, machine: Machine) -> int:
    """Return the bytes of prepared weights of one layer; 0 for a part that calls a library."""
    packages = load_catalog().experts(experts).requires.packages
    if not _BASE_PACKAGES.issuperset(packages):
        return 0
    return prepared_tensor_bytes(experts, problem, machine)


def check_memory(verdict: Verdict) -> Verdict:
    """Return the verdict, with a rejection by the rule "memory" if a valid pairing does not fit.

    The weights of one layer, workspace and exchange buffers are included. The verdict is unchanged
    if the machine's memory is unknown.
    """
    limit = verdict.machine.memory
    if not verdict.ok or limit is None:
        return verdict
    names = verdict.prepare_finalize, verdict.experts
    memory = estimate_memory(*names, verdict.problem, verdict.machine)
    if memory.total <= limit:
        return verdict
    rejection = Rejection(
        "memory",
        (*names, "machine"),
        str(memory),
        f"<= {limit / _GIGA:.1f} GB of {verdict.machine}",
        "fewer tokens per call, or more ranks",
    )
    return replace(verdict, rejections=(rejection,))


def _get_largest_dispatch(prepare_finalize: str, problem: Problem) -> DispatchShape:
    """Return the largest dispatch that the experts of this rank may receive."""
    part = load_catalog().prepare_finalize(prepare_finalize).requires
    world = problem.parallel.world_size
    if part.activation_format is ActivationFormat.BATCHED_EXPERTS:
        return BatchedShape(problem.e, world * _count_buffer_tokens(prepare_finalize, problem))
    rows = problem.tokens if part.replicated_input or world == 1 else _count_received_rows(problem)
    return StandardShape(min(rows, problem.chunk_tokens or rows), problem.top_k)


def _count_received_rows(problem: Problem) -> int:
    """Return the maximum number of rows that a rank may receive, one per token."""
    rows = problem.parallel.world_size * problem.tokens
    return rows if problem.max_received is None else min(rows, problem.max_received)


def _count_buffer_tokens(prepare_finalize: str, problem: Problem) -> int:
    """Return the number of tokens per rank for which a part allocates its buffers."""
    if not prepare_finalize.startswith("DeepEP"):
        return problem.tokens
    return max(1, -(-problem.tokens // _DEEPEP_TOKEN_MULTIPLE)) * _DEEPEP_TOKEN_MULTIPLE


def estimate_workspace(experts: str, problem: Problem, shape: DispatchShape) -> int:
    """Return the bytes of the workspace and output of an experts part for one dispatch."""
    packages = load_catalog().experts(experts).requires.packages
    if _BASE_PACKAGES.issuperset(packages):
        return _compute_kernels_workspace(problem, shape)
    return _compute_library_workspace(problem, shape)


def _compute_kernels_workspace(problem: Problem, shape: DispatchShape) -> int:
    """Return the workspace of a part that runs this project's kernels."""
    itemsize, scheme = problem.dtype.itemsize, problem.scheme
    hidden_row = problem.hidden * itemsize
    h_row = problem.intermediate * (itemsize + scheme.quantizes_activations)
    if isinstance(shape, BatchedShape):
        return shape.experts * shape.capacity * (h_row + hidden_row)
    workspace_bytes = shape.tokens * (shape.top_k * (hidden_row + h_row) + hidden_row)
    has_many_rows = shape.tokens * shape.top_k > _MIN_ROWS_TO_UNPACK * problem.e
    # With many rows, parts may unpack weight-only quantized weights before the GEMMs.
    if has_many_rows and scheme.quantized and not scheme.quantizes_activations:
        workspace_bytes += problem.e * (problem.w1_rows + problem.intermediate) * problem.hidden
    return workspace_bytes


def _compute_library_workspace(problem: Problem, shape: DispatchShape) -> int:
    """Return the workspace of a part that calls a vendor library."""
    itemsize = problem.dtype.itemsize
    hidden_row = problem.hidden * itemsize
    h_row = problem.intermediate * _get_activation_bytes(problem)
    if isinstance(shape, BatchedShape):
        rows = shape.experts * shape.capacity
        return rows * (problem.w1_rows * itemsize + h_row + hidden_row)
    x_row = problem.hidden * _get_activation_bytes(problem)
    pair_bytes = max(x_row + problem.w1_rows * itemsize, hidden_row) + h_row
    return shape.tokens * (shape.top_k * pair_bytes + hidden_row)


def _get_activation_bytes(problem: Problem) -> int:
    return 1 if problem.scheme.quantizes_activations else problem.dtype.itemsize


def compute_dispatched_row_bytes(problem: Problem) -> int:
    """Return the bytes of a dispatched row with its scales."""
    scheme = problem.scheme
    if not scheme.dispatched_quantized:
        return problem.hidden * problem.dtype.itemsize
    groups = -(-problem.hidden // scheme.group[-1]) if scheme.group else 1
    return problem.hidden + groups * _SCALE_BYTES


def exchange_bytes(prepare_finalize: str, problem: Problem) -> int:
    """Return the bytes of a PrepareAndFinalize's buffers on one rank, or 0 for unknown parts."""
    buffers = _BUFFER_BYTES_BY_PART.get(prepare_finalize)
    return 0 if buffers is None else buffers(problem)


def _compute_unquantized_row_bytes(problem: Problem) -> int:
    return problem.hidden * problem.dtype.itemsize


def _compute_quantized_input_bytes(problem: Problem) -> int:
    return (
        problem.tokens * compute_dispatched_row_bytes(problem) * problem.scheme.dispatched_quantized
    )


def _compute_batched_rows_bytes(problem: Problem) -> int:
    """Return the bytes of C = W * T rows for each expert of this rank."""
    rows = problem.parallel.world_size * problem.tokens
    return problem.e * rows * compute_dispatched_row_bytes(problem)


def _compute_replicated_bytes(problem: Problem) -> int:
    return (
        _compute_quantized_input_bytes(problem) + problem.tokens * problem.hidden * _FLOAT32_BYTES
    )


def _compute_received_bytes(problem: Problem) -> int:
    """Return the bytes of the received rows, packed and unpacked, and of the float32 sums."""
    row = compute_dispatched_row_bytes(problem) + problem.top_k * _ID_BYTES
    sums = problem.tokens * problem.hidden * _FLOAT32_BYTES
    return (
        _count_received_rows(problem) * (2 * row + _compute_unquantized_row_bytes(problem)) + sums
    )


def _compute_all_to_all_bytes(problem: Problem) -> int:
    sent = problem.tokens * min(problem.top_k, problem.parallel.world_size)
    return _compute_received_bytes(problem) + sent * (
        compute_dispatched_row_bytes(problem) + _compute_unquantized_row_bytes(problem)
    )


def _compute_all_gather_bytes(problem: Problem) -> int:
    return _compute_received_bytes(problem) + problem.tokens * compute_dispatched_row_bytes(problem)


def _compute_symm_mem_bytes(problem: Problem) -> int:
    row = (
        compute_dispatched_row_bytes(problem)
        + problem.top_k * _ID_BYTES
        + _compute_unquantized_row_bytes(problem)
    )
    return _CALLS_IN_FLIGHT * problem.parallel.world_size * problem.tokens * row


def _compute_host_then_rank_bytes(problem: Problem) -> int:
    """Return the bytes of the exchange between hosts and of the memory that ranks of a host share.

    In calls with a fixed capacity, a rank receives a block from each host. The blocks for other
    hosts are the same if they have room for all tokens.
    """
    if not problem.graph:
        return _compute_all_to_all_bytes(problem) + _compute_symm_mem_bytes(problem)
    world, hosts = problem.parallel.world_size, problem.parallel.hosts
    rows = _count_received_rows(problem) // world  # that a rank may send to a host
    routing_bytes = problem.top_k * _ID_BYTES
    row_bytes = compute_dispatched_row_bytes(problem) + routing_bytes
    sum_bytes = _compute_unquantized_row_bytes(problem)
    blocks = 1 if rows == problem.tokens else 2
    between_hosts = hosts * rows * (blocks * row_bytes + routing_bytes + 2 * sum_bytes)
    within_host = _CALLS_IN_FLIGHT * world * rows * (row_bytes + sum_bytes)
    own_tokens = problem.tokens * routing_bytes + _compute_quantized_input_bytes(problem)
    return between_hosts + within_host + own_tokens


def _compute_deepep_ll_bytes(problem: Problem) -> int:
    """Return the bytes of two pairs of send and receive buffers, and of the received rows."""
    tokens = _count_buffer_tokens("DeepEPLLPrepareAndFinalize", problem)
    rows = problem.experts * tokens
    return rows * (
        4 * (_compute_unquantized_row_bytes(problem) + 16) + compute_dispatched_row_bytes(problem)
    )


def _compute_deepep_ht_bytes(problem: Problem) -> int:
    """Return the bytes of the ring buffers of all peers, and of received rows and their sums."""
    peers = min(problem.parallel.world_size, _RANKS_PER_HOST)
    hosts = -(-problem.parallel.world_size // _RANKS_PER_HOST)
    ring_bytes = (
        _DEEPEP_HT_CHANNELS
        * _DEEPEP_HT_CHANNEL_ROWS
        * (peers + 2 * hosts * (hosts > 1))
        * _compute_unquantized_row_bytes(problem)
    )
    row_bytes = _count_received_rows(problem) * (
        compute_dispatched_row_bytes(problem) + _compute_unquantized_row_bytes(problem)
    )
    return ring_bytes + row_bytes


def _compute_deepep_v2_bytes(problem: Problem) -> int:
    """Return the bytes of the library's buffers to send and receive dispatched rows and sums."""
    rows = problem.parallel.world_size * _count_buffer_tokens("DeepEPV2PrepareAndFinalize", problem)
    return (
        rows * 2 * (compute_dispatched_row_bytes(problem) + _compute_unquantized_row_bytes(problem))
    )


def _compute_pplx_bytes(problem: Problem) -> int:
    """Return the bytes of the library's buffers, with float32 rows, and of the batched rows."""
    row = max(compute_dispatched_row_bytes(problem), _FLOAT32_BYTES * problem.hidden)
    rows = problem.tokens * problem.e * problem.parallel.world_size
    return rows * row + _compute_batched_rows_bytes(problem)


_BUFFER_BYTES_BY_PART: Mapping[str, Callable[[Problem], int]] = {
    "MoEPrepareAndFinalizeNoEP": _compute_quantized_input_bytes,
    "BatchedPrepareAndFinalize": _compute_batched_rows_bytes,
    "ReplicatedEPPrepareAndFinalize": _compute_replicated_bytes,
    "AllGatherReduceScatterPrepareAndFinalize": _compute_all_gather_bytes,
    "TorchAll2AllPrepareAndFinalize": _compute_all_to_all_bytes,
    "TorchAll2AllBatchedPrepareAndFinalize": lambda p: (
        _compute_all_to_all_bytes(p) + _compute_batched_rows_bytes(p)
    ),
    "SymmMemPrepareAndFinalize": _compute_symm_mem_bytes,
    "HostThenRankPrepareAndFinalize": _compute_host_then_rank_bytes,
    "DeepEPLLPrepareAndFinalize": _compute_deepep_ll_bytes,
    "DeepEPHTPrepareAndFinalize": _compute_deepep_ht_bytes,
    "DeepEPV2PrepareAndFinalize": _compute_deepep_v2_bytes,
    "PplxPrepareAndFinalize": _compute_pplx_bytes,
    "FlashInferCutlassMoEPrepareAndFinalize": _compute_symm_mem_bytes,
}
