"""The handshake of ranks at the start of a call.

Before any row is sent, ranks exchange row counts, and verify that all make the same call and that
none refuses it.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from modular_kernel.contracts import CallState
from modular_kernel.errors import CommunicationError, UnsupportedError
from modular_kernel.spec.problem import Problem
from prepare_finalize.common.torch_group import TorchGroup

_SHARED = ("tokens", "hidden", "experts", "top_k")
_FIELDS = (*_SHARED, "layer", "call", "step", "order", "others")
# Errors with which a rank may refuse a call. The index is sent; 0 stands for any other error.
_REFUSALS = (
    "an error",
    *("InputError", "CapacityError", "ConfigurationError", "DeviceError", "DtypeError"),
    *("LayoutError", "RoutingError", "ShapeError", "UnsupportedError", "WeightsError"),
)
FIELD_MESSAGES = {
    "order": "a different order of earlier exchanges",
    "others": "another dtype, scheme, placement, activation, pairing or adapters",
}


@dataclass
class Layer:
    """One PrepareAndFinalize instance, registered as a layer of its manager.

    - number: index of the layer, starting at 1, in order of creation; the same on every rank.
    - calls: number of calls on which all ranks have agreed.
    - on_device: whether ranks agree on the device after the first call; see `device_agreement`.
    """

    manager: TorchGroup
    problem: Problem
    number: int
    calls: int = 0
    on_device: bool = False


@dataclass(frozen=True)
class Agreement:
    """Values that the ranks exchanged in the handshake of one call.

    - tokens_W: T of each rank.
    - rows_WW: rows_WW[s][d] is the number of rows that rank s sends to rank d, unless the part
      gives its row counts another meaning.
    - amax: maximum absolute activation over all ranks, if they share one scale.
    """

    step: int
    tokens_W: tuple[int, ...]
    rows_WW: tuple[tuple[int, ...], ...]
    amax: float


def agree(
    layer: Layer,
    call: CallState,
    *,
    tokens: int,
    rows_W: Sequence[int],
    device: torch.device,
    amax: torch.Tensor | None = None,
) -> Agreement:
    """Exchange T, row counts and amax with all ranks, and check that all ranks make the same call.

    tokens: T of this rank. rows_W: number of rows for each destination rank. device: device of the
    exchanged tensors. amax: (1,) float32, maximum absolute activation of this rank; None if ranks
    do not share a scale.

    Raises CommunicationError on every rank, before any row is sent, if a rank refuses the call, if
    ranks disagree on the layer, pairing, step or earlier exchanges, or if a rank passes more tokens
    than its buffers hold. layer.calls is incremented only if no rank raises.
    """
    manager, problem = layer.manager, layer.problem
    step = manager.next_step(layer.number, layer.calls + 1)
    call.peers_notified = True
    local_fields = _fields(layer, step, _other_properties(layer, call))
    padding = [0] * (manager.max_counts - len(rows_W))
    sent = torch.tensor(
        [*local_fields, tokens, *rows_W, *padding, 0, -1], dtype=torch.int64, device="cpu"
    ).to(device)
    if amax is not None:
        sent[-2:-1] = amax.view(torch.int32)
    table = _gather(manager, sent, step)
    fields = [row[: len(local_fields)] for row in table]
    counts = [row[len(local_fields) : -1] for row in table]
    _raise_if_refused(manager, fields, [row[-1] for row in table], step)
    _check_same_fields(manager, fields, step)
    _check_counts(manager, counts, problem.tokens, step)
    layer.calls += 1
    amax_bits = torch.tensor([row[-1] for row in counts], dtype=torch.int32, device="cpu")
    rows_WW = tuple(tuple(row[1 : 1 + len(rows_W)]) for row in counts)
    return Agreement(
        step, next(zip(*counts, strict=True)), rows_WW, float(amax_bits.view(torch.float32).max())
    )


def agree_on_sizes(layer: Layer, sizes: Sequence[int], step: int) -> None:
    """Check on a CPU that all ranks exchange tensors of the same sizes in a call.

    gloo ends the process if they do not. Equal sizes imply nothing else: the headers of a call are
    compared afterwards. A rank may also make the first call of a layer, or refuse its call: what is
    exchanged has the form of `agree`, which compares it with the same result.

    sizes: whatever determines the sizes of the call's exchanges.

    Raises CommunicationError on every rank, before any row is sent.
    """
    manager = layer.manager
    local_fields = _fields(layer, step, -1 - zlib.crc32(repr(tuple(sizes)).encode()))
    no_counts = [0] * (2 + manager.max_counts)
    sent = torch.tensor([*local_fields, *no_counts, -1], dtype=torch.int64, device="cpu")
    table = _gather(manager, sent, step)
    fields = [row[: len(local_fields)] for row in table]
    _raise_if_refused(manager, fields, [row[-1] for row in table], step)
    if len({row[-1] for row in fields}) > 1:
        messages = {"others": "blocks of another size, or the first call of a layer"}
        _check_same_fields(manager, fields, step, FIELD_MESSAGES | messages)


def _gather(manager: TorchGroup, sent: torch.Tensor, step: int) -> list[list[int]]:
    """Return the integers that each rank sends."""
    received = sent.new_empty(manager.world_size * sent.numel())
    manager.all_gather(received, sent, step=step, phase="counts").wait()
    table: list[list[int]] = received.view(manager.world_size, -1).tolist()
    return table


def refuse(layer: Layer, error: Exception) -> None:
    """Notify all peers that this rank refuses the call, without waiting for an answer.

    The peers raise CommunicationError in `agree`. Does nothing if the manager has failed or was
    destroyed.
    """
    manager = layer.manager
    if manager.is_capturing():  # other ranks see that the call does not arrive
        return
    try:
        step = manager.next_step(layer.number, layer.calls + 1)
        local_fields = _fields(layer, step, 0)
        no_counts = [0] * (2 + manager.max_counts)
        fields = [*local_fields, *no_counts, refusal_index(error)]
        sent = torch.tensor(fields, dtype=torch.int64, device="cpu").to(manager.device)
        manager.send_refusal(sent, step=step, reason=type(error).__name__)
    except (CommunicationError, UnsupportedError):
        return


def refusal_index(error: Exception) -> int:
    """Return the number that names the type of an error to other ranks; 0 for an unknown type."""
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((_REFUSALS.index(name) for name in names if name in _REFUSALS), 0)


def refusal_name(index: int) -> str:
    """Return the name of the error type with a `refusal_index`."""
    return _REFUSALS[index] if 0 <= index < len(_REFUSALS) else _REFUSALS[0]


def check_equal_tokens(manager: TorchGroup, agreement: Agreement) -> None:
    """Raise CommunicationError on every rank unless all ranks pass the same number of tokens."""
    own_tokens = agreement.tokens_W[manager.rank]
    peers = [rank for rank, tokens in enumerate(agreement.tokens_W) if tokens != own_tokens]
    if peers:
        got = f"T = {', '.join(map(str, agreement.tokens_W))} by rank"
        raise manager.disagreement(got, "the same tokens on all", step=agreement.step, peers=peers)


def check_max_received(layer: Layer, agreement: Agreement, received_W: Sequence[int]) -> None:
    """Raise CommunicationError on every rank if one would receive over Problem.max_received rows.

    Call it before any row is sent. received_W: number of rows that each rank would receive.
    """
    max_rows = layer.problem.max_received
    if max_rows is None:
        return
    peers = [rank for rank, rows in enumerate(received_W) if rows > max_rows]
    if peers:
        got = "; ".join(f"{received_W[rank]} rows for rank {rank}" for rank in peers)
        need = f"<= {max_rows} (Problem.max_received)"
        raise layer.manager.disagreement(got, need, step=agreement.step, peers=peers)


def _fields(layer: Layer, step: int, others: int) -> list[int]:
    """Return the values of `_FIELDS`."""
    shared = [getattr(layer.problem, name) for name in _SHARED]
    return [*shared, layer.number, layer.calls + 1, step, layer.manager.order, others]


def _raise_if_refused(
    manager: TorchGroup, fields: list[list[int]], refusals: list[int], step: int
) -> None:
    if max(refusals) < 0:
        return
    peers = [rank for rank, refusal in enumerate(refusals) if refusal >= 0]
    layer = len(_SHARED)
    refused = [
        f"rank {rank} refused its call {fields[rank][layer + 1]} of layer {fields[rank][layer]} "
        f"with {refusal_name(refusals[rank])}"
        for rank in peers
    ]
    need = "calls that every rank accepts"
    raise manager.disagreement("; ".join(refused), need, step=step, peers=peers)


def _check_same_fields(
    manager: TorchGroup,
    fields: list[list[int]],
    step: int,
    messages: Mapping[str, str] = FIELD_MESSAGES,
) -> None:
    local_fields = fields[manager.rank]
    if fields.count(local_fields) == len(fields):
        return
    peers = [rank for rank, other in enumerate(fields) if other != local_fields]
    differences = []
    for name, *values in zip(_FIELDS, *fields, strict=True):
        if len(set(values)) > 1:
            by_rank = f"{name} {', '.join(map(str, values))} by rank"
            differences.append(messages.get(name, by_rank))
    got = "; ".join(differences)
    need = "one layer, call, pairing, step and order"
    raise manager.disagreement(got, need, step=step, peers=peers)


def _check_counts(manager: TorchGroup, counts: list[list[int]], max_tokens: int, step: int) -> None:
    """Raise CommunicationError for counts out of bounds, before buffers are allocated by them."""
    peers = []
    for rank, (tokens, *rows, _) in enumerate(counts):
        if not (0 <= tokens <= max_tokens and min(rows) >= 0 and max(rows) <= tokens):
            peers.append(rank)
    if peers:
        got = f"tokens and rows {[counts[rank][:-1] for rank in peers]}"
        need = f"0 to problem.tokens = {max_tokens}"
        raise manager.disagreement(got, need, step=step, peers=peers)


def _other_properties(layer: Layer, call: CallState) -> int:
    """Return a 63-bit hash of the remaining properties that all ranks must share."""
    problem = layer.problem
    shared = (
        layer.on_device,
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
    digest = hashlib.sha256(repr(shared).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
