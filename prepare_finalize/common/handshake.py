"""The handshake at the start of a call: ranks exchange metadata through the host.

Before any row is sent, one all-gather of int64 values informs every rank of the token and row
counts of all ranks. The values also identify the call: its layer, its problem, and its step (its
number among all calls of the manager). If ranks disagree, or a rank refuses its call because of
invalid arguments, all ranks raise the same error instead of waiting for rows that never arrive.

Each rank sends, in this order: the values of `_FIELDS`; its token count; its row counts, padded to
the same number on all ranks; the bits of its maximum absolute activation; and the index of the
error with which it refuses the call, or NOT_REFUSED.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from modular_kernel.contracts import CallState
from modular_kernel.errors import CommunicationError, UnsupportedError
from modular_kernel.spec.problem import Problem
from prepare_finalize.common.device_status import NOT_REFUSED
from prepare_finalize.common.torch_group import TorchGroup

_PROBLEM_FIELDS = ("tokens", "hidden", "experts", "top_k")
# Values that must be equal on all ranks: fields of the problem; the number of the layer ("layer"),
# of the call among the layer's calls ("call"), and of the call among the manager's calls ("step");
# a hash of the sequence of earlier exchanges ("order"), of CallState.same_on_ranks ("adapters"),
# and of all other properties ("others").
_FIELDS = (*_PROBLEM_FIELDS, "layer", "call", "step", "order", "adapters", "others")
# Errors with which a rank may refuse a call. The index is sent; 0 means any other error.
_REFUSALS = (
    "an error",
    *("InputError", "CapacityError", "ConfigurationError", "DeviceError", "DtypeError"),
    *("LayoutError", "RoutingError", "ShapeError", "UnsupportedError", "WeightsError"),
)
FIELD_MESSAGES = {
    "order": "a different order of earlier exchanges",
    "adapters": "other loaded adapters, other slots of them, or adapters on some ranks only",
    "others": "another dtype, scheme, placement, activation, pairing or adapters",
}


@dataclass
class Layer:
    """One PrepareAndFinalize instance, registered as a layer of its manager.

    - number: index of the layer in the order of creation, from 1; the same on every rank.
    - calls: number of calls whose handshake has succeeded.
    - uses_device_handshake: whether only the first call has a handshake on the host; see
      `device_handshake`.
    """

    manager: TorchGroup
    problem: Problem
    number: int
    calls: int = 0
    uses_device_handshake: bool = False


@dataclass(frozen=True)
class CallMetadata:
    """Metadata of one call from all ranks, the same on every rank.

    - step: number of the call among all calls of the manager.
    - tokens_W: T of each rank.
    - rows_WW: rows_WW[s][d] is the number of rows that rank s sends to rank d, unless the part
      gives its row counts another meaning.
    - amax: maximum absolute activation over all ranks, or 0 if they do not share a scale.
    """

    step: int
    tokens_W: tuple[int, ...]
    rows_WW: tuple[tuple[int, ...], ...]
    amax: float


def exchange_metadata(
    layer: Layer,
    call: CallState,
    *,
    tokens: int,
    rows_W: Sequence[int],
    device: torch.device,
    amax: torch.Tensor | None = None,
    buffer_index: int | None = None,
) -> CallMetadata:
    """Exchange T, row counts and amax with all ranks, and check that all ranks make the same call.

    tokens: T of this rank.
    rows_W: number of rows for each destination rank.
    device: device of the exchanged tensors.
    amax: (1,) float32, maximum absolute activation of this rank; None if ranks do not share a
        scale.
    buffer_index: index of the receive buffers that the call uses; None if the part has no choice.
        The index differs between ranks that have not finished or dropped the same earlier calls.

    Raise CommunicationError on every rank, before any row is sent, if a rank refuses the call, if
    ranks disagree on the layer, pairing, step or earlier exchanges, or if a rank passes more tokens
    than its buffers hold. layer.calls is incremented only if no rank raises.
    """
    manager, problem = layer.manager, layer.problem
    step = manager.next_step(layer.number, layer.calls + 1)
    call.peers_notified = True
    others = _hash_other_properties(layer, call)
    adapters = _hash(call.same_on_ranks) if call.same_on_ranks else 0
    local_fields = _list_local_fields(layer, step, others, adapters)
    if buffer_index is not None:
        order = zlib.crc32(f"buffers {buffer_index}".encode(), manager.order)
        local_fields[_FIELDS.index("order")] = order
    sent = _pack_metadata(manager, local_fields, tokens=tokens, rows_W=rows_W).to(device)
    if amax is not None:
        sent[-2:-1] = amax.view(torch.int32)
    table = _gather_metadata(manager, sent, step)
    fields = [row[: len(local_fields)] for row in table]
    counts = [row[len(local_fields) : -1] for row in table]
    _raise_if_refused(manager, fields, [row[-1] for row in table], step)
    _check_same_fields(manager, fields, step)
    _check_counts(manager, counts, problem.tokens, step)
    layer.calls += 1
    amax_bits = torch.tensor([row[-1] for row in counts], dtype=torch.int32, device="cpu")
    rows_WW = tuple(tuple(row[1 : 1 + len(rows_W)]) for row in counts)
    return CallMetadata(
        step, next(zip(*counts, strict=True)), rows_WW, float(amax_bits.view(torch.float32).max())
    )


def check_equal_sizes(layer: Layer, sizes: Sequence[int], step: int) -> None:
    """Check, before a call over gloo, that all ranks exchange tensors of the same sizes.

    gloo ends the process if the sizes differ. Layers with a device handshake call this function,
    because their headers are compared only after the exchange. Another rank may be in
    `exchange_metadata` (in the first call of a layer) or in `refuse` at the same time. All three
    functions therefore send values in the same format, and every rank raises the same error.

    sizes: the values on which the sizes of the exchanged tensors depend.

    Raise CommunicationError on every rank, before any row is sent, if the sizes differ.
    """
    manager = layer.manager
    local_fields = _list_local_fields(layer, step, -1 - zlib.crc32(repr(tuple(sizes)).encode()))
    table = _gather_metadata(manager, _pack_metadata(manager, local_fields), step)
    fields = [row[: len(local_fields)] for row in table]
    _raise_if_refused(manager, fields, [row[-1] for row in table], step)
    if len({row[-1] for row in fields}) > 1:
        messages = {"others": "blocks of another size, or the first call of a layer"}
        _check_same_fields(manager, fields, step, FIELD_MESSAGES | messages)


def _pack_metadata(
    manager: TorchGroup,
    local_fields: Sequence[int],
    *,
    tokens: int = 0,
    rows_W: Sequence[int] = (),
    refusal: int = NOT_REFUSED,
) -> torch.Tensor:
    """Return the values that this rank sends, int64 on the CPU. The bits of amax are 0."""
    padding = [0] * (manager.max_counts - len(rows_W))
    values = [*local_fields, tokens, *rows_W, *padding, 0, refusal]
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _gather_metadata(manager: TorchGroup, sent: torch.Tensor, step: int) -> list[list[int]]:
    """All-gather `sent`, int64, and return the values of each rank."""
    received = sent.new_empty(manager.world_size * sent.numel())
    manager.all_gather(received, sent, step=step, phase="counts").wait()
    table: list[list[int]] = received.view(manager.world_size, -1).tolist()
    return table


def refuse(layer: Layer, error: Exception) -> None:
    """Notify all peers that this rank refuses its call because of `error`, without waiting.

    The peers raise CommunicationError in `exchange_metadata`. Do nothing if the manager has failed
    or was destroyed.
    """
    manager = layer.manager
    if manager.is_capturing():  # the other ranks time out
        return
    try:
        step = manager.next_step(layer.number, layer.calls + 1)
        local_fields = _list_local_fields(layer, step, 0)
        sent = _pack_metadata(manager, local_fields, refusal=refusal_index(error)).to(
            manager.device
        )
        manager.send_refusal(sent, step=step, reason=type(error).__name__)
    except (CommunicationError, UnsupportedError):
        return


def refusal_index(error: Exception) -> int:
    """Return the index in `_REFUSALS` of the type of an error; 0 for any other type."""
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((_REFUSALS.index(name) for name in names if name in _REFUSALS), 0)


def refusal_name(index: int) -> str:
    """Return the name of the error type with this index in `_REFUSALS`."""
    return _REFUSALS[index] if 0 <= index < len(_REFUSALS) else _REFUSALS[0]


def check_equal_tokens(manager: TorchGroup, metadata: CallMetadata) -> None:
    """Raise CommunicationError on every rank unless all ranks pass the same number of tokens."""
    local_tokens = metadata.tokens_W[manager.rank]
    peers = [rank for rank, tokens in enumerate(metadata.tokens_W) if tokens != local_tokens]
    if peers:
        got = f"T = {', '.join(map(str, metadata.tokens_W))} by rank"
        raise manager.make_metadata_error(
            got, "the same tokens on all", step=metadata.step, peers=peers
        )


def check_max_received(layer: Layer, metadata: CallMetadata, received_W: Sequence[int]) -> None:
    """Raise CommunicationError on every rank if a rank would receive too many rows.

    The limit is Problem.max_received. Call this before any row is sent.

    received_W: number of rows that each rank would receive.
    """
    max_rows = layer.problem.max_received
    if max_rows is None:
        return
    peers = [rank for rank, rows in enumerate(received_W) if rows > max_rows]
    if peers:
        got = "; ".join(f"{received_W[rank]} rows for rank {rank}" for rank in peers)
        need = f"<= {max_rows} (Problem.max_received)"
        raise layer.manager.make_metadata_error(got, need, step=metadata.step, peers=peers)


def _list_local_fields(layer: Layer, step: int, others: int, adapters: int = 0) -> list[int]:
    """Return this rank's values of `_FIELDS`.

    others: hash of the other properties that must be equal, from `_hash_other_properties`.
    adapters: hash of CallState.same_on_ranks, or 0 if it is empty.
    """
    problem_fields = [getattr(layer.problem, name) for name in _PROBLEM_FIELDS]
    call_fields = layer.number, layer.calls + 1, step, layer.manager.order
    return [*problem_fields, *call_fields, adapters, others]


def _raise_if_refused(
    manager: TorchGroup, fields: list[list[int]], refusals: list[int], step: int
) -> None:
    peers = [rank for rank, refusal in enumerate(refusals) if refusal != NOT_REFUSED]
    if not peers:
        return
    layer, call = _FIELDS.index("layer"), _FIELDS.index("call")
    descriptions = [
        f"rank {rank} refused its call {fields[rank][call]} of layer {fields[rank][layer]} "
        f"with {refusal_name(refusals[rank])}"
        for rank in peers
    ]
    need = "calls that every rank accepts"
    raise manager.make_metadata_error("; ".join(descriptions), need, step=step, peers=peers)


def _check_same_fields(
    manager: TorchGroup,
    fields: list[list[int]],
    step: int,
    messages: Mapping[str, str] = FIELD_MESSAGES,
) -> None:
    local_fields = fields[manager.rank]
    if fields.count(local_fields) == len(fields):
        return
    peers = [rank for rank, values in enumerate(fields) if values != local_fields]
    differences = []
    for name, *values in zip(_FIELDS, *fields, strict=True):
        if len(set(values)) > 1:
            by_rank = f"{name} {', '.join(map(str, values))} by rank"
            differences.append(messages.get(name, by_rank))
    got = "; ".join(differences)
    need = "one layer, call, pairing, step and order"
    raise manager.make_metadata_error(got, need, step=step, peers=peers)


def _check_counts(manager: TorchGroup, counts: list[list[int]], max_tokens: int, step: int) -> None:
    """Raise CommunicationError if counts are out of bounds, before they determine buffer sizes."""
    peers = []
    for rank, (tokens, *rows, _) in enumerate(counts):
        if not (0 <= tokens <= max_tokens and min(rows) >= 0 and max(rows) <= tokens):
            peers.append(rank)
    if peers:
        got = f"tokens and rows {[counts[rank][:-1] for rank in peers]}"
        need = f"0 to problem.tokens = {max_tokens}"
        raise manager.make_metadata_error(got, need, step=step, peers=peers)


def _hash_other_properties(layer: Layer, call: CallState) -> int:
    """Return a 63-bit hash of the properties that must be equal and are not in `_FIELDS`."""
    problem = layer.problem
    properties = (
        layer.uses_device_handshake,
        problem.dtype,
        problem.quant,
        problem.placement.slots,
        problem.intermediate,
        str(problem.act),
        problem.bias,
        problem.apply_router_weight_on_input,
        problem.routed_scaling_factor,
        problem.combine,
        problem.max_received,
        problem.adapters,
        call.defer_quant,
        call.pairing,
    )
    return _hash(repr(properties))


def _hash(text: str) -> int:
    """Return a hash of 63 bits, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
