"""Cases of the symmetric-memory kernels, for the test harness.

The harness runs every case with the kernels and with a torch reference, and compares every returned
bit (`PrepareAndFinalize.operation_cases`). The memory of three ranks is in one tensor, so that the
cases need no other rank.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from modular_kernel.contracts import CallState
from modular_kernel.interpreter.bounds import allow_access
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.placement import Placement, PlacementTables, pairs_to_slots
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.tensors import Routing
from modular_kernel.workspace import Workspace
from prepare_finalize.symm_mem.group import align_up
from prepare_finalize.symm_mem.launch import CallBuffers, SymmetricExchange, buffer_sections

_CPU = torch.device("cpu")
_WORLD, _EXPERTS, _TOP_K, _HIDDEN, _CAPACITY = 3, 6, 3, 40, 5
_TOKENS = (4, 0, 5)  # of each rank
_FILL = 0x5A  # byte of memory that has not been written
_TIMEOUT_NS, _SHORT_TIMEOUT_NS = 10**10, 10**6
_DISPATCH, _COMBINE = 1, 2  # phases

_PLACEMENTS = {
    "no copies": Placement.linear(_EXPERTS, _WORLD),
    # The experts have different numbers of copies.
    "copies": Placement.linear(_EXPERTS, _WORLD).with_copies({0: (1, 2), 3: (0,), 4: (0,)}),
}

Tensors = Mapping[str, torch.Tensor]


def list_cases() -> Mapping[str, Callable[[], Tensors]]:
    """Return the cases by name; see `PrepareAndFinalize.operation_cases`."""
    exchanges = {
        f"dispatch and combine, {name}, given rows {has_rows}": partial(
            _exchange, placement, has_rows=has_rows
        )
        for name, placement in _PLACEMENTS.items()
        for has_rows in (False, True)
    }
    return {
        **exchanges,
        "rank lost before dispatch": partial(_lose_rank, _DISPATCH),
        "rank lost before combine": partial(_lose_rank, _COMBINE),
    }


def _exchange(placement: Placement, *, has_rows: bool) -> Tensors:
    """Dispatch the tokens of every rank, then combine random rows.

    has_rows: whether to pass the rows of the tokens explicitly, in reverse order and without token
        1.
    """
    heaps, exchanges = _make_exchanges(placement, has_rows=has_rows)
    outputs, invalid = [], torch.zeros(1, dtype=torch.int32, device=_CPU)
    for exchange in exchanges:
        _send(exchange, invalid)
    received = heaps.clone()
    generator = torch.Generator().manual_seed(1)
    for exchange in exchanges:
        y_RH = exchange.buffers.y_RH
        y_RH.copy_(torch.randn(y_RH.shape, generator=generator, dtype=torch.float32, device=_CPU))
        exchange.buffers.summed_W.fill_(1)  # every rank has finished its rows
    for exchange in exchanges:
        outputs.append(_combine(exchange))
    state = torch.stack(
        [torch.stack((e.buffers.dispatches, e.buffers.combines)) for e in exchanges]
    )
    bits = torch.stack([exchange.rank_bits_T for exchange in exchanges])
    return {
        "received": received,
        "heaps": heaps,
        "output": torch.cat(outputs),
        "ranks of tokens": bits,
        "invalid": invalid,
        "state": state,
    }


def _lose_rank(phase: int) -> Tensors:
    """Make two calls of rank 0 without rank 2, which is lost before `phase` of the first one.

    The first wait of rank 0 for rank 2 fails. Later waits then fail at once, and nothing is
    signaled. Every combine after that gives NaN.
    """
    heaps, exchanges = _make_exchanges(_PLACEMENTS["no copies"], has_rows=False)
    invalid, exchange_0 = torch.zeros(1, dtype=torch.int32, device=_CPU), exchanges[0]
    for exchange in exchanges[: _WORLD - 1 if phase == _DISPATCH else _WORLD]:
        _send(exchange, invalid)
    # Nothing but the failure must make the output NaN.
    exchange_0.buffers.y_RH.zero_()
    for exchange in exchanges[1:]:
        exchange.buffers.y_RH.zero_()
    exchange_0.buffers.summed_W[: _WORLD - 1] = 1
    manager: Any = exchange_0.manager
    manager.timeout_ns = _SHORT_TIMEOUT_NS
    outputs = list[torch.Tensor]()
    for _ in range(2):
        _receive(exchange_0)
        outputs.append(_combine(exchange_0))
    flags = torch.stack([exchange.buffers.summed_W for exchange in exchanges])
    return {
        "output": torch.stack(outputs).isnan(),
        "status": manager.status,
        "failed": manager.failed,
        "flags": flags,
        "combines": exchange_0.buffers.combines,
        "heaps": heaps,
    }


def _make_exchanges(
    placement: Placement, *, has_rows: bool
) -> tuple[torch.Tensor, list[SymmetricExchange]]:
    """Make the heaps of all ranks, (W, bytes), and an exchange on each rank."""
    problem = Problem(
        _CAPACITY,
        _HIDDEN,
        32,
        _EXPERTS,
        _TOP_K,
        dtype=torch.bfloat16,
        lora="adapters=3,rank=7",
        parallel=Parallel(_WORLD, placement),
    )
    layout = buffer_sections(problem)
    nbytes = sum(align_up(section.nbytes) for section in layout.values())
    heaps = torch.full((_WORLD, nbytes), _FILL, dtype=torch.uint8, device=_CPU)
    allow_access(heaps)
    exchanges = [_make_exchange(problem, heaps, rank, has_rows=has_rows) for rank in range(_WORLD)]
    return heaps, exchanges


def _make_exchange(
    problem: Problem, heaps: torch.Tensor, rank: int, *, has_rows: bool
) -> SymmetricExchange:
    views: dict[str, Any] = {"scale_RG": None}
    start = 0
    for name, section in buffer_sections(problem).items():
        raw = heaps[rank, start : start + section.nbytes]
        views[name] = raw.view(section.dtype).view(section.shape)
        start += align_up(section.nbytes)
    for name in ("arrived_W", "summed_W"):
        views[name].zero_()
    counters = torch.zeros(2, 2, dtype=torch.int32, device=_CPU)
    buffers = CallBuffers(**views, dispatches=counters[0], combines=counters[1])
    manager: Any = SimpleNamespace(
        rank=rank,
        world_size=_WORLD,
        failed=torch.zeros(1, dtype=torch.int32, device=_CPU),
        status=torch.zeros(1, dtype=torch.int64, device=_CPU),
        timeout_ns=_TIMEOUT_NS,
    )
    deltas_W = (torch.arange(_WORLD, dtype=torch.int64, device=_CPU) - rank) * heaps.shape[1]
    rank_bits_T = torch.full((_CAPACITY,), -9, dtype=torch.int32, device=_CPU)
    tokens, rows_WT = _TOKENS[rank], None
    if has_rows:
        rows_T = rank * _CAPACITY + torch.arange(tokens, dtype=torch.int32, device=_CPU).flip(0)
        rows_WT = rows_T.repeat(_WORLD, 1)
        rows_WT[:, 1:2] = -1
    return SymmetricExchange(manager, problem, buffers, deltas_W, rank_bits_T, tokens, rows_WT)


def _make_inputs(rank: int) -> tuple[torch.Tensor, Routing]:
    """Return the tokens of a rank, with ids that skip a pair or are invalid."""
    tokens, generator = _TOKENS[rank], torch.Generator().manual_seed(rank)
    x_TH = torch.randn(tokens, _HIDDEN, generator=generator, dtype=torch.float32, device=_CPU)
    weights_TK = torch.rand(tokens, _TOP_K, generator=generator, dtype=torch.float32, device=_CPU)
    first_T = torch.arange(tokens, dtype=torch.int32, device=_CPU)[:, None]
    ids_TK = (first_T + torch.tensor([-2, 0, 3], dtype=torch.int32, device=_CPU)).contiguous()
    adapters_T = torch.arange(tokens, dtype=torch.int32, device=_CPU)
    return x_TH.bfloat16(), Routing(weights_TK, ids_TK, adapters_T)


def _make_tables(placement: Placement) -> PlacementTables:
    """Return the tables of a placement.

    If each expert has one copy, kernels must not read the numbers of copies, which are then wrong.
    """
    tables = placement.tables(_CPU)
    if tables.homes_ER2.shape[1] > 1:
        return tables
    return PlacementTables(tables.homes_ER2, torch.full_like(tables.copies_E, _EXPERTS - 1))


def _send(exchange: SymmetricExchange, invalid: torch.Tensor) -> None:
    x_TH, routing = _make_inputs(exchange.manager.rank)
    if use_triton(x_TH):
        call = CallState(Workspace({}, _CPU), invalid)
        tables = _make_tables(exchange.problem.placement)
        exchange.send(x_TH, routing, tables, call, quantized=None, wait=False)
        return
    rank = exchange.manager.rank
    tables = exchange.problem.placement.tables(_CPU)
    rank_TK, slot_TK, num_invalid = pairs_to_slots(
        routing.topk_ids_TK, tables, first_token=rank, together=True
    )
    invalid += num_invalid
    adapters_T = routing.adapters_T
    assert isinstance(adapters_T, torch.Tensor)
    rows_WT = exchange.row_at_rank_WT
    for token in range(_CAPACITY if rows_WT is None else exchange.tokens):
        bits = 0
        for peer in range(_WORLD):
            row = rank * _CAPACITY + token if rows_WT is None else int(rows_WT[peer, token])
            if row < 0:
                continue
            buffers = _view_peer_buffers(exchange, peer)
            if token >= exchange.tokens:
                buffers["ids_RK"][row], buffers["weights_RK"][row] = -1, 0.0
                buffers["adapters_R"][row] = -1
                continue
            is_on_peer = rank_TK[token] == peer
            buffers["ids_RK"][row] = slot_TK[token].masked_fill(~is_on_peer, -1).int()
            buffers["weights_RK"][row] = routing.topk_weights_TK[token].masked_fill(~is_on_peer, 0)
            buffers["adapters_R"][row] = adapters_T[token]
            if is_on_peer.any():
                buffers["x_RH"][row] = x_TH[token]
                bits |= 1 << peer
        exchange.rank_bits_T[token] = bits
    for peer in range(_WORLD):
        _view_peer_buffers(exchange, peer)["arrived_W"][rank] = 1
    exchange.buffers.dispatches[0] += 1


def _receive(exchange: SymmetricExchange) -> None:
    if use_triton(exchange.rank_bits_T):
        exchange.receive()
    else:
        _wait(exchange, _DISPATCH, exchange.buffers.arrived_W, int(exchange.buffers.dispatches[0]))


def _wait(exchange: SymmetricExchange, phase: int, flags_W: torch.Tensor, number: int) -> bool:
    """Return whether this wait fails because of ranks without a flag, or an earlier wait failed."""
    manager = exchange.manager
    missing = sum(1 << rank for rank in range(_WORLD) if int(flags_W[rank]) < number)
    if missing and not manager.failed:
        manager.failed.fill_(1)
        manager.status.fill_((phase << 56) + (missing << 32) + number)
    return bool(manager.failed)


def _combine(exchange: SymmetricExchange) -> torch.Tensor:
    out_TH = torch.full((exchange.tokens, _HIDDEN), 5.0, dtype=torch.bfloat16, device=_CPU)
    if use_triton(out_TH):
        exchange.combine(out_TH)
        return out_TH
    rank, rows_WT = exchange.manager.rank, exchange.row_at_rank_WT
    number = int(exchange.buffers.combines[0]) + 1
    for peer in range(_WORLD) if not exchange.manager.failed else ():
        _view_peer_buffers(exchange, peer)["summed_W"][rank] = number
    failed = _wait(exchange, _COMBINE, exchange.buffers.summed_W, number)
    for token in range(exchange.tokens):
        total = torch.zeros(_HIDDEN, dtype=torch.float32, device=_CPU)
        for peer in range(_WORLD):
            if int(exchange.rank_bits_T[token]) >> peer & 1:
                row = rank * _CAPACITY + token if rows_WT is None else int(rows_WT[peer, token])
                total += _view_peer_buffers(exchange, peer)["y_RH"][row].float()
        out_TH[token] = torch.nan if failed else total
    exchange.buffers.combines[0] += 1
    return out_TH


def _view_peer_buffers(exchange: SymmetricExchange, peer: int) -> dict[str, torch.Tensor]:
    """Return the buffers of another rank, which are at the same offsets of its memory."""
    views = dict[str, torch.Tensor]()
    for name in buffer_sections(exchange.problem):
        local_view = getattr(exchange.buffers, name)
        offset = local_view.storage_offset() * local_view.itemsize + int(exchange.deltas_W[peer])
        views[name] = local_view.as_strided(
            local_view.shape, local_view.stride(), offset // local_view.itemsize
        )
    return views
