"""A store in which somebody else has written: a typed error, or nothing is believed."""

import time

import pytest
import torch
import torch.distributed as dist
from ep_layers import ALL2ALL, Layer

from modular_kernel.errors import CommunicationError
from modular_kernel.testing.ranks.pool import RankPool
from prepare_finalize import SymmetricGroup, TorchGroup
from prepare_finalize.rendezvous.failure_log import FailureBoard, failure_key
from prepare_finalize.rendezvous.store_rounds import Meeting

GARBAGE = (b"\xff\x00\x80", b"", b"{", b"7 apples", b"[1]", b"null", b"9" * 5000, b'{"step": "x"}')


@pytest.mark.parametrize("garbage", [g for g in GARBAGE if g[:1] != b"{" or g == b"{"])
def test_facts_that_nobody_told(garbage: bytes) -> None:
    store = dist.HashStore()
    store.set("meeting/1/1", garbage)
    with pytest.raises(CommunicationError, match="a store that fails"):
        Meeting(store, 0, 2, deadline_s=0.5).exchange({"a": 1})


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_failure_that_nobody_posted_is_no_failure(garbage: bytes) -> None:
    store = dist.HashStore()
    store.set(failure_key(1), garbage)
    mine = {"step": 1, "phase": "counts", "waited_s": 0.0}
    assert FailureBoard(store, 0, 2).post(mine, time.monotonic() + 0.2) == {0: mine}


def spoil(rank: int, world: int, group: object) -> list[str]:
    """Both managers, where the number of a rank's attempts is none; and the same once it is."""
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    key = "modular_kernel/attempts/0"
    told = []
    if rank == 0:
        before = store.get(key) if store.check([key]) else b"0"
        store.set(key, "seven")
    dist.barrier()
    for kind in (TorchGroup, SymmetricGroup):
        try:
            manager = kind(group, deadline_s=2.0)
            if kind is SymmetricGroup:
                manager.heap(256, "nothing", lambda heap: None)
        except CommunicationError as error:
            told.append(str(error))
    dist.barrier()
    if rank == 0:
        store.set(key, before)
    dist.barrier()
    layer = Layer(ALL2ALL, (3, 3))
    given, kernel = layer.inputs_of(rank), layer.kernel(rank, group)
    assert torch.isfinite(kernel(given.x_TH, given.weights, given.routing)).all()
    kernel.prepare_finalize.destroy()
    return told


def test_attempts_that_are_no_number() -> None:
    with RankPool(2) as pool:
        for told in pool.run(spoil):
            assert len(told) == 2
            assert all("b'seven' as modular_kernel/attempts/0, not a number" in t for t in told)
