"""What ranks tell each other before a call sends anything: that they mean the same call, that none
of them refuses it, and the numbers of rows that will come."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modular_kernel.contracts import Call
from modular_kernel.errors import CommunicationError, UnsupportedError
from modular_kernel.spec.problem import Problem
from prepare_finalize.common.torch_group import TorchGroup

_SHARED = ("tokens", "hidden", "experts", "top_k")
_FIELDS = (*_SHARED, "layer", "call", "step", "order", "others")
# What a rank may refuse a call with, told as its place here; whatever else is the first.
_REFUSALS = (
    "an error",
    *("InputError", "CapacityError", "ConfigurationError", "DeviceError", "DtypeError"),
    *("LayoutError", "RoutingError", "ShapeError", "UnsupportedError", "WeightsError"),
)
_IN_WORDS = {
    "order": "the exchanges before it in another order",
    "others": "another dtype, scheme, placement, activation or pairing",
}


@dataclass
class Layer:
    """A part among those of its manager. number: counted from 1 as they are made, on every rank
    alike. calls: that all ranks agreed on. counts: how many of rows a rank tells; 0: one of each
    rank."""

    manager: TorchGroup
    problem: Problem
    number: int
    calls: int = 0
    counts: int = 0


@dataclass(frozen=True)
class Agreement:
    """What the ranks of one call told.

    tokens_W: T of each rank. rows_WW: [s], the counts of rank s: [s][d], the rows it sends rank d,
    where a part does not count otherwise. largest: of the
    activations of all ranks, where one scale serves them all.
    """

    step: int
    tokens_W: tuple[int, ...]
    rows_WW: tuple[tuple[int, ...], ...]
    largest: float


def agree(
    layer: Layer,
    call: Call,
    *,
    tokens: int,
    rows_W: Sequence[int],
    device: torch.device,
    largest: torch.Tensor | None = None,
) -> Agreement:
    """Exchange T, the rows for each rank, and the largest activation magnitude (float32, (1,)).

    device: where tensors are. CommunicationError on every rank alike, and before anything else is
    sent, if one refuses its call, if ranks disagree on the layer, the pairing, the step or what was
    exchanged before, or if one passes more tokens than buffers are made for. Then the call counts
    for none of them.
    """
    manager, problem = layer.manager, layer.problem
    step = manager.next_step(layer.number, layer.calls + 1)
    call.told = True
    mine = _fields(layer, step, _other_properties(problem, call))
    told = torch.tensor([*mine, tokens, *rows_W, 0, -1], dtype=torch.int64).to(device)
    if largest is not None:
        told[-2:-1] = largest.view(torch.int32)
    heard = torch.empty(manager.world_size * told.numel(), dtype=torch.int64, device=device)
    manager.all_gather(heard, told, step=step, phase="counts").wait()
    table = heard.view(manager.world_size, -1).tolist()
    fields = [row[: len(mine)] for row in table]
    rest = [row[len(mine) : -1] for row in table]
    _not_refused(manager, fields, [row[-1] for row in table], step)
    _same(manager, fields, step)
    _bounded(manager, rest, problem.tokens, step)
    layer.calls += 1
    bits = torch.tensor([row[-1] for row in rest], dtype=torch.int32).view(torch.float32)
    rows_WW = tuple(tuple(row[1:-1]) for row in rest)
    return Agreement(step, next(zip(*rest, strict=True)), rows_WW, float(bits.max()))


def refuse(layer: Layer, error: Exception) -> None:
    """Tell those who call `agree` that this rank refuses the call, and do not wait for them.

    Says nothing where nothing can be told: the manager has failed, or is destroyed.
    """
    manager = layer.manager
    kinds = [_REFUSALS.index(kind.__name__) for kind in type(error).__mro__
             if kind.__name__ in _REFUSALS]  # fmt: skip
    try:
        step = manager.next_step(layer.number, layer.calls + 1)
        mine = _fields(layer, step, 0)
        nothing = [0] * (2 + (layer.counts or manager.world_size))
        told = torch.tensor([*mine, *nothing, (kinds or [0])[0]], dtype=torch.int64)
        told = told.to(manager.device)
        manager.tell(told, step=step, why=type(error).__name__)
    except (CommunicationError, UnsupportedError):
        return


def refuse_unequal_tokens(manager: TorchGroup, agreed: Agreement) -> None:
    """CommunicationError on every rank unless all pass as many tokens."""
    mine = agreed.tokens_W[manager.rank]
    peers = [rank for rank, tokens in enumerate(agreed.tokens_W) if tokens != mine]
    if peers:
        got = f"T = {', '.join(map(str, agreed.tokens_W))} by rank"
        raise manager.disagreement(got, "the same tokens on all", step=agreed.step, peers=peers)


def refuse_more_rows(layer: Layer, agreed: Agreement, received_W: Sequence[int]) -> None:
    """CommunicationError on every rank, before rows move, if one of them would receive too many.

    received_W: by rank. The bound is Problem.max_received.
    """
    most = layer.problem.max_received
    if most is None:
        return
    peers = [rank for rank, rows in enumerate(received_W) if rows > most]
    if peers:
        got = "; ".join(f"{received_W[rank]} rows for rank {rank}" for rank in peers)
        need = f"<= {most}, as Problem.max_received says"
        raise layer.manager.disagreement(got, need, step=agreed.step, peers=peers)


def _fields(layer: Layer, step: int, others: int) -> list[int]:
    """As `_FIELDS` names them."""
    shared = [getattr(layer.problem, name) for name in _SHARED]
    return [*shared, layer.number, layer.calls + 1, step, layer.manager.order, others]


def _not_refused(
    manager: TorchGroup, fields: list[list[int]], refusals: list[int], step: int
) -> None:
    if max(refusals) < 0:
        return
    peers = [rank for rank, refusal in enumerate(refusals) if refusal >= 0]
    at = len(_SHARED)
    shown = [
        f"rank {rank} refused its call {fields[rank][at + 1]} of layer {fields[rank][at]} with "
        f"{_REFUSALS[refusals[rank]]}"
        for rank in peers
    ]
    need = "calls that every rank takes"
    raise manager.disagreement("; ".join(shown), need, step=step, peers=peers)


def _same(manager: TorchGroup, fields: list[list[int]], step: int) -> None:
    mine = fields[manager.rank]
    if fields.count(mine) == len(fields):
        return
    peers = [rank for rank, theirs in enumerate(fields) if theirs != mine]
    shown = []
    for name, *values in zip(_FIELDS, *fields, strict=True):
        if len(set(values)) > 1:
            by_rank = f"{name} {', '.join(map(str, values))} by rank"
            shown.append(_IN_WORDS.get(name, by_rank))
    got = "; ".join(shown)
    need = "one layer, call, pairing, step and order"
    raise manager.disagreement(got, need, step=step, peers=peers)


def _bounded(manager: TorchGroup, rest: list[list[int]], most: int, step: int) -> None:
    """Raise CommunicationError for counts out of bounds.

    What peers say is not trusted with memory before it was looked at.
    """
    peers = []
    for rank, (tokens, *rows, _) in enumerate(rest):
        if not (0 <= tokens <= most and min(rows) >= 0 and max(rows) <= tokens):
            peers.append(rank)
    if peers:
        got = f"tokens and rows {[rest[rank][:-1] for rank in peers]}"
        need = f"0 to problem.tokens = {most}"
        raise manager.disagreement(got, need, step=step, peers=peers)


def _other_properties(problem: Problem, call: Call) -> int:
    """Everything of the layer that ranks must share, as 63 bits."""
    shared = (
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
        call.defer_quant,
        call.pairing,
    )
    digest = hashlib.sha256(repr(shared).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
