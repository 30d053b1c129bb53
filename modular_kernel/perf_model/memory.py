"""Memory of one rank for one layer: weights, prepared weights, workspace and exchange buffers.

Workspaces follow from the sizes of the layer, without creating a part, for the largest dispatch
that may arrive:

    standard   for each pair: the rows that leave the experts, and h, also quantized; and the sum of
               each row. Parts over a library sort the rows first: for each pair
               max(x + w1's output, w2's output) + h, where w2's output may overwrite the other two
    batched    for each of e experts with C rows: h, also quantized, and w2's output; with a library
               w1's output too

Exchange buffers are computed from the sizes that the parts allocate. Of the libraries' own memory,
DeepEP's low-latency buffer and pplx-kernels' are exact; the others have a buffer of known depth for
each peer. The caching allocator, CUDA graphs and NCCL take more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from modular_kernel.catalog import load_catalog
from modular_kernel.compatibility.support import Rejection, Verdict
from modular_kernel.measure.adapter_roofline import adapter_bytes
from modular_kernel.measure.prepared_weights import declared_bytes
from modular_kernel.measure.roofline import expert_bytes
from modular_kernel.spec.problem import ActivationFormat, Machine, Problem
from modular_kernel.tensors import BatchedShape, ContiguousShape, DispatchShape

_GIGA = 1e9
_VISIBLE = 0.05 * _GIGA  # bytes that are not 0.0 GB in text
_OWN_PACKAGES = frozenset({"triton", "ml_dtypes"})
_FLOAT32_BYTES, _SCALE_BYTES = 4, 4
_ID_BYTES = 8  # of each pair: an int32 id and a float32 weight
_ROWS_TO_UNPACK = 16  # rows of an expert from which quantized weights may be unpacked first
_IN_FLIGHT = 2  # calls of SymmMem and HostThenRank between prepare and finalize
_CHANNELS, _CHANNEL_ROWS = 10, 256  # DeepEP high throughput: for each peer
_STEP = 128  # DeepEP's buffers are made for a multiple of this number of tokens
_HOST_PEERS = 8


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. prepared: of prepared weights, kept in addition to `weights`."""

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
        texts = [f"{n / _GIGA:.1f} of {name}" for name, n in parts.items() if n > _VISIBLE]
        return f"{self.total / _GIGA:.1f} GB ({', '.join(texts)})"


def memory_of(
    prepare_finalize: str,
    experts: str,
    problem: Problem,
    machine: Machine,
    *,
    prepared: bool = False,
    layers: int = 1,
) -> Memory:
    """Return the memory of the rank problem.parallel.rank for one pair of parts.

    problem.tokens: the largest call of a rank. prepared: count prepared weights. layers: number of
    layers whose weights the rank holds; workspace and exchange buffers are shared by all of them.
    """
    slots = 0 if problem.adapters is None else problem.adapters.adapters
    weights = problem.e * expert_bytes(problem, problem.scheme) + slots * adapter_bytes(problem)
    return Memory(
        layers * weights,
        layers * prepared_bytes(experts, problem, machine) if prepared else 0,
        workspace_of(experts, problem, _largest_dispatch(prepare_finalize, problem)),
        exchange_bytes(prepare_finalize, problem),
    )


def prepared_bytes(experts: str, problem: Problem, machine: Machine) -> int:
    """Return the bytes of prepared weights of one layer; 0 for a part over a library."""
    packages = load_catalog().experts(experts).requires.packages
    if not _OWN_PACKAGES.issuperset(packages):
        return 0
    return declared_bytes(experts, problem, machine)


def with_memory(verdict: Verdict) -> Verdict:
    """Return the verdict with a rejection by rule "memory" if a valid pair does not fit.

    The machine's memory must be known; otherwise, and for a refused pair, nothing changes. Counted
    are the weights of this one layer, workspace and exchange buffers of the largest call.
    """
    limit = verdict.machine.memory
    if not verdict.ok or limit is None:
        return verdict
    names = verdict.prepare_finalize, verdict.experts
    memory = memory_of(*names, verdict.problem, verdict.machine)
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


def _largest_dispatch(prepare_finalize: str, problem: Problem) -> DispatchShape:
    """Return the largest dispatch that the experts of this rank may receive."""
    part = load_catalog().prepare_finalize(prepare_finalize).requires
    world = problem.parallel.world_size
    if part.activation_format is ActivationFormat.BATCHED_EXPERTS:
        return BatchedShape(problem.e, world * _rounded(prepare_finalize, problem))
    rows = problem.tokens if part.replicated_input or world == 1 else _received_rows(problem)
    return ContiguousShape(min(rows, problem.chunk_tokens or rows), problem.top_k)


def _received_rows(problem: Problem) -> int:
    """Return the largest number of rows that a rank may receive, one for each token."""
    rows = problem.parallel.world_size * problem.tokens
    return rows if problem.max_received is None else min(rows, problem.max_received)


def _rounded(prepare_finalize: str, problem: Problem) -> int:
    """Return the tokens of one rank that its buffers are made for."""
    if not prepare_finalize.startswith("DeepEP"):
        return problem.tokens
    return max(1, -(-problem.tokens // _STEP)) * _STEP


def workspace_of(experts: str, problem: Problem, shape: DispatchShape) -> int:
    """Return the bytes of the workspace and output of an experts part for one dispatch."""
    packages = load_catalog().experts(experts).requires.packages
    if _OWN_PACKAGES.issuperset(packages):
        return _own_workspace(problem, shape)
    return _library_workspace(problem, shape)


def _own_workspace(problem: Problem, shape: DispatchShape) -> int:
    """Return the bytes of a part whose kernels gather the rows of x."""
    size, scheme = problem.dtype.itemsize, problem.scheme
    hidden_row = problem.hidden * size
    h_row = problem.intermediate * (size + scheme.quantizes_activations)
    if isinstance(shape, BatchedShape):
        return shape.experts * shape.capacity * (h_row + hidden_row)
    rows = shape.tokens * (shape.top_k * (hidden_row + h_row) + hidden_row)
    many = shape.tokens * shape.top_k > _ROWS_TO_UNPACK * problem.e
    if many and scheme.quantized and not scheme.quantizes_activations:  # weights unpacked by parts
        rows += problem.e * (problem.w1_rows + problem.intermediate) * problem.hidden
    return rows


def _library_workspace(problem: Problem, shape: DispatchShape) -> int:
    """Return the bytes of a part over a library."""
    size = problem.dtype.itemsize
    hidden_row, h_row = problem.hidden * size, problem.intermediate * _activation_bytes(problem)
    if isinstance(shape, BatchedShape):
        rows = shape.experts * shape.capacity
        return rows * (problem.w1_rows * size + h_row + hidden_row)
    x_row = problem.hidden * _activation_bytes(problem)
    pair = max(x_row + problem.w1_rows * size, hidden_row) + h_row
    return shape.tokens * (shape.top_k * pair + hidden_row)


def _activation_bytes(problem: Problem) -> int:
    return 1 if problem.scheme.quantizes_activations else problem.dtype.itemsize


def dispatched_row(problem: Problem) -> int:
    """Return the bytes of a dispatched row with its scales."""
    scheme = problem.scheme
    if not scheme.dispatched_quantized:
        return problem.hidden * problem.dtype.itemsize
    groups = -(-problem.hidden // scheme.group[-1]) if scheme.group else 1
    return problem.hidden + groups * _SCALE_BYTES


def exchange_bytes(prepare_finalize: str, problem: Problem) -> int:
    """Return the bytes of a part's buffers on one rank; 0 for a part of another package."""
    buffers = _BUFFERS.get(prepare_finalize)
    return 0 if buffers is None else buffers(problem)


def _plain_row(problem: Problem) -> int:
    return problem.hidden * problem.dtype.itemsize


def _quantized_tokens(problem: Problem) -> int:
    return problem.tokens * dispatched_row(problem) * problem.scheme.dispatched_quantized


def _batched_rows(problem: Problem) -> int:
    """Return the bytes of C rows for each expert of this rank."""
    rows = problem.parallel.world_size * problem.tokens
    return problem.e * rows * dispatched_row(problem)


def _replicated(problem: Problem) -> int:
    return _quantized_tokens(problem) + problem.tokens * problem.hidden * _FLOAT32_BYTES


def _received(problem: Problem) -> int:
    """Return the bytes of the received rows, as packed and unpacked, and of their sums."""
    row = dispatched_row(problem) + problem.top_k * _ID_BYTES
    sums = problem.tokens * problem.hidden * _FLOAT32_BYTES
    return _received_rows(problem) * (2 * row + _plain_row(problem)) + sums


def _all_to_all(problem: Problem) -> int:
    sent = problem.tokens * min(problem.top_k, problem.parallel.world_size)
    return _received(problem) + sent * (dispatched_row(problem) + _plain_row(problem))


def _all_gather(problem: Problem) -> int:
    return _received(problem) + problem.tokens * dispatched_row(problem)


def _symmetric(problem: Problem) -> int:
    row = dispatched_row(problem) + problem.top_k * _ID_BYTES + _plain_row(problem)
    return _IN_FLIGHT * problem.parallel.world_size * problem.tokens * row


def _low_latency(problem: Problem) -> int:
    """Return the bytes of two buffers, which send and receive, and of the received rows."""
    tokens = _rounded("DeepEPLLPrepareAndFinalize", problem)
    rows = problem.experts * tokens
    return rows * (4 * (_plain_row(problem) + 16) + dispatched_row(problem))


def _high_throughput(problem: Problem) -> int:
    """Return the bytes of a ring for each peer, and of the received rows and their sums."""
    peers = min(problem.parallel.world_size, _HOST_PEERS)
    hosts = -(-problem.parallel.world_size // _HOST_PEERS)
    rings = _CHANNELS * _CHANNEL_ROWS * (peers + 2 * hosts * (hosts > 1)) * _plain_row(problem)
    rows = _received_rows(problem) * (dispatched_row(problem) + _plain_row(problem))
    return rings + rows


def _elastic(problem: Problem) -> int:
    """Return the bytes of the library's buffer, which sends and receives, and of the sums."""
    rows = problem.parallel.world_size * _rounded("DeepEPV2PrepareAndFinalize", problem)
    return rows * 2 * (dispatched_row(problem) + _plain_row(problem))


def _pplx(problem: Problem) -> int:
    """Return the bytes of the library's buffers, with float32 rows, and of the batched rows."""
    row = max(dispatched_row(problem), _FLOAT32_BYTES * problem.hidden)
    rows = problem.tokens * problem.e * problem.parallel.world_size
    return rows * row + _batched_rows(problem)


_BUFFERS: Mapping[str, Callable[[Problem], int]] = {
    "MoEPrepareAndFinalizeNoEP": _quantized_tokens,
    "BatchedPrepareAndFinalize": _batched_rows,
    "ReplicatedEPPrepareAndFinalize": _replicated,
    "AllGatherReduceScatterPrepareAndFinalize": _all_gather,
    "TorchAll2AllPrepareAndFinalize": _all_to_all,
    "TorchAll2AllBatchedPrepareAndFinalize": lambda p: _all_to_all(p) + _batched_rows(p),
    "SymmMemPrepareAndFinalize": _symmetric,
    "HostThenRankPrepareAndFinalize": lambda p: _all_to_all(p) + _symmetric(p),
    "DeepEPLLPrepareAndFinalize": _low_latency,
    "DeepEPHTPrepareAndFinalize": _high_throughput,
    "DeepEPV2PrepareAndFinalize": _elastic,
    "PplxPrepareAndFinalize": _pplx,
    "FlashInferCutlassMoEPrepareAndFinalize": _symmetric,
}
