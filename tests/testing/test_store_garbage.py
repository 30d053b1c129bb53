"""Invalid values in the store of a process group raise a typed error or are ignored."""

import time

import pytest
import torch
import torch.distributed as dist
from ep_layers import ALL2ALL, Layer

from modular_kernel.errors import CommunicationError
from modular_kernel.testing.ranks.pool import RankPool
from prepare_finalize import SymmetricGroup, TorchGroup
from prepare_finalize.rendezvous.failure_log import FailureRecords, failure_key
from prepare_finalize.rendezvous.store_collectives import StoreCollectives

GARBAGE = (b"\xff\x00\x80", b"", b"{", b"7 apples", b"[1]", b"null", b"9" * 5000, b'{"step": "x"}')


@pytest.mark.parametrize("garbage", [g for g in GARBAGE if g[:1] != b"{" or g == b"{"])
def test_invalid_gathered_values_raise(garbage: bytes) -> None:
    store = dist.HashStore()
    store.set("gather/1/1", garbage)
    with pytest.raises(CommunicationError, match="a store that fails"):
        StoreCollectives(store, 0, 2, timeout_s=0.5).all_gather({"a": 1})


@pytest.mark.parametrize("garbage", GARBAGE)
def test_invalid_failures_are_ignored(garbage: bytes) -> None:
    store = dist.HashStore()
    store.set(failure_key(1), garbage)
    record = {"step": 1, "phase": "counts", "waited_s": 0.0}
    assert FailureRecords(store, 0, 2).publish_and_collect(record, time.monotonic() + 0.2) == {
        0: record
    }


def collect_errors_of_invalid_attempts(rank: int, world: int, group: object) -> list[str]:
    """Return the errors of a TorchGroup and a SymmetricGroup with an invalid attempt number in the
    store.

    Afterwards, restore the number and check that a layer works.
    """
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    key = "modular_kernel/attempts/0"
    errors = []
    if rank == 0:
        attempts_before = store.get(key) if store.check([key]) else b"0"
        store.set(key, "seven")
    dist.barrier()
    for group_class in (TorchGroup, SymmetricGroup):
        try:
            ep_group = group_class(group, timeout_s=2.0)
            if group_class is SymmetricGroup:
                ep_group.allocate_heap(256, "nothing", lambda heap: None)
        except CommunicationError as error:
            errors.append(str(error))
    dist.barrier()
    if rank == 0:
        store.set(key, attempts_before)
    dist.barrier()
    layer = Layer(part=ALL2ALL, tokens_W=(3, 3))
    inputs, kernel = layer.inputs_of(rank), layer.kernel(rank, group)
    assert torch.isfinite(kernel(inputs.x_TH, inputs.weights, inputs.routing)).all()
    kernel.prepare_finalize.destroy()
    return errors


def test_invalid_attempt_numbers_raise() -> None:
    with RankPool(2) as pool:
        for errors in pool.run(collect_errors_of_invalid_attempts):
            assert len(errors) == 2
            assert all(
                "b'seven' as modular_kernel/attempts/0, not a number" in error for error in errors
            )
