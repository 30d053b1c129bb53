"""What ranks tell each other before a call sends anything: that they mean the same call, and the
numbers of rows that will come."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modular_kernel.contracts import Call
from modular_kernel.types import Problem
from prepare_finalize.all2all.torch_group import TorchGroup

_SHARED = ("tokens", "hidden", "experts", "top_k")
_FIELDS = (*_SHARED, "step", "order", "others")
_IN_WORDS = {
    "order": "the exchanges before it in another order",
    "others": "another dtype, scheme, placement, activation or pairing",
}


@dataclass(frozen=True)
class Agreement:
    """What the ranks of one call told.

    tokens_W: T of each rank. rows_WW: [s][d], the rows rank s sends rank d. largest: of the
    activations of all ranks, where one scale serves them all.
    """

    step: int
    tokens_W: tuple[int, ...]
    rows_WW: tuple[tuple[int, ...], ...]
    largest: float


def agree(
    manager: TorchGroup,
    problem: Problem,
    call: Call,
    *,
    tokens: int,
    rows_W: Sequence[int],
    device: torch.device,
    largest: torch.Tensor | None = None,
) -> Agreement:
    """Exchange T, the rows for each rank, and the largest activation magnitude (float32, (1,)).

    device: where tensors are. CommunicationError on every rank alike, and before anything else is
    sent, if ranks disagree on the layer, the pairing, the step or what was exchanged before, or
    if one passes more tokens than buffers are made for.
    """
    step = manager.next_step()
    world = manager.world_size
    shared = [getattr(problem, name) for name in _SHARED]
    mine = [*shared, step, manager.order, _other_properties(problem, call)]
    told = torch.tensor([*mine, tokens, *rows_W, 0], dtype=torch.int64).to(device)
    if largest is not None:
        told[-1:] = largest.view(torch.int32)
    heard = torch.empty(world * told.numel(), dtype=torch.int64, device=device)
    manager.all_gather(heard, told, step=step, phase="counts").wait()
    table = heard.view(world, -1).tolist()
    fields, rest = [row[: len(mine)] for row in table], [row[len(mine) :] for row in table]
    _same(manager, fields, step)
    _bounded(manager, rest, problem.tokens, step)
    bits = torch.tensor([row[-1] for row in rest], dtype=torch.int32).view(torch.float32)
    rows_WW = tuple(tuple(row[1:-1]) for row in rest)
    return Agreement(step, tuple(row[0] for row in rest), rows_WW, float(bits.max()))


def refuse_unequal_tokens(manager: TorchGroup, agreed: Agreement) -> None:
    """CommunicationError on every rank unless all pass as many tokens."""
    mine = agreed.tokens_W[manager.rank]
    peers = [rank for rank, tokens in enumerate(agreed.tokens_W) if tokens != mine]
    if peers:
        got = f"T = {', '.join(map(str, agreed.tokens_W))} by rank"
        raise manager.disagreement(got, "the same tokens on all", step=agreed.step, peers=peers)


def _same(manager: TorchGroup, fields: list[list[int]], step: int) -> None:
    mine = fields[manager.rank]
    peers = [rank for rank, theirs in enumerate(fields) if theirs != mine]
    if not peers:
        return
    shown = []
    for name, *values in zip(_FIELDS, *fields, strict=True):
        if len(set(values)) > 1:
            by_rank = f"{name} {', '.join(map(str, values))} by rank"
            shown.append(_IN_WORDS.get(name, by_rank))
    got = "; ".join(shown)
    raise manager.disagreement(got, "one layer, pairing, step and order", step=step, peers=peers)


def _bounded(manager: TorchGroup, rest: list[list[int]], most: int, step: int) -> None:
    """What peers say is not trusted with memory before it was looked at."""
    peers = [
        rank
        for rank, (tokens, *rows, _) in enumerate(rest)
        if not (0 <= tokens <= most and all(0 <= n <= tokens for n in rows))
    ]
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
        call.defer_quant,
        call.pairing,
    )
    digest = hashlib.sha256(repr(shared).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
