"""Checks for the "misunderstood" fault scenario: memory that the ranks of a host share.

A kernel that waits in vain for a rank sets a status word. The checks simulate this by writing the
word.
"""

import copy
import ctypes
from typing import Any

import torch.distributed as dist

from modular_kernel.errors import CommunicationError
from modular_kernel.testing.cases.scenario_names import find_manager_class, shares_memory
from modular_kernel.testing.verify.manager_scenarios import has_builtin_classes
from modular_kernel.testing.verify.problem_scenarios import Outcomes
from modular_kernel.testing.verify.scenario_context import ScenarioContext, capture_outcome

_NBYTES = 512
_CALL = (1 << 31) + 5  # a call number that needs all 32 bits
_MISSING = (0, 2, 23)  # ranks for which a kernel has waited in vain
_WORLD_SIZE = 24


def check_shared_memory(context: ScenarioContext) -> Outcomes:
    """Check the errors of failed allocations, and the contents of new memory."""
    if not has_builtin_classes(context) or not shares_memory(context.part):
        return
    manager = find_manager_class(context.part)(None)
    memory = getattr(manager, "host_memory", manager)
    yield (
        _allocate_with_error(manager, memory),
        (
            f"({context.rank}, 'construct', 0, 0, 0, ()) exchange between ranks: got the mapping "
            f"failed, need a store that answers within {memory.timeout_s:g} s "
            f"(rank {context.rank}, construct of step 0, peers unknown); "
            f"{_NBYTES} bytes: the mapping failed"
        ),
    )
    sizes = context.format_by_rank("bytes", _NBYTES, 2 * _NBYTES)
    uses = context.format_by_rank("meaning", "a", "b")
    for nbytes, uses_by_rank, got in (
        ((_NBYTES, 2 * _NBYTES), ("a", "a"), sizes),
        ((_NBYTES, _NBYTES), ("a", "b"), uses),
        ((_NBYTES, 2 * _NBYTES), ("a", "b"), f"{sizes}; {uses}"),
    ):
        index = int(context.is_faulty_rank)
        peers = context.peers if context.is_faulty_rank else (1,)
        try:
            manager.allocate_heap(nbytes[index], uses_by_rank[index], lambda _heap: None)
            outcome = "no error"
        except CommunicationError as error:
            outcome = f"{error.peers} {error.got}"
        yield outcome, f"{peers} {got}"
    heap = manager.allocate_heap(_NBYTES, "a", lambda heap: heap.bytes_N[:8].zero_())
    is_filled = heap.bytes_N.tolist() == [0] * 8 + [255] * (_NBYTES - 8)
    yield (
        f"{len(heap.deltas_W)} addresses, filled: {is_filled}",
        (f"{len(heap.deltas_W)} addresses, filled: True"),
    )
    yield from _check_status_words(memory)
    yield from _check_flags(context, manager, memory)
    manager.destroy()


def _check_flags(context: ScenarioContext, manager: Any, memory: Any) -> Outcomes:
    """Check the flags of new buffers, and the flag that ends the waits of a host.

    Memory is filled with NaN when it is allocated, so the part must clear the flags.
    """
    if memory is manager:  # all ranks share one host
        return
    part: Any = context.make_kernel_on(manager).prepare_finalize
    flags = [
        flags_W
        for buffers in part._buffer_pool._buffers
        for flags_W in (buffers.arrived_W, buffers.summed_W)
    ]
    yield f"set: {[bool(flags_W.any()) for flags_W in flags]}", f"set: {[False] * len(flags)}"
    dist.barrier()
    memory.fail()
    yield str(memory.failed.tolist()), "[1]"
    dist.barrier()


def _allocate_with_error(manager: Any, memory: Any) -> str:
    """Return the error of an allocation in which the memory cannot be mapped, and its record."""

    def fail(_heap: object) -> None:
        raise RuntimeError("the mapping failed. More lines\nof the library")

    outcome = capture_outcome(lambda: str(manager.allocate_heap(_NBYTES, "use", fail)))
    record = [*memory.last_calls._records][-1]
    return f"{outcome}; {record['bytes']} bytes: {record['state'].partition('.')[0]}"


def _check_status_words(memory: Any) -> Outcomes:
    """Check the errors that are raised for the status words of kernels."""
    for phase, name in ((1, "dispatch"), (2, "combine")):
        bits = sum(1 << rank for rank in _MISSING)
        simulated = copy.copy(memory)
        simulated.world_size, simulated.reported_rank, simulated.step = _WORLD_SIZE, 7, 9
        simulated._status_word = ctypes.c_int64(phase << 56 | bits << 32 | _CALL)
        expected = (
            f"{_MISSING} {name} of step 9: no flag of call {_CALL} from ranks 0, 2, 23, need every "
            f"rank within {memory.timeout_s:g} s"
        )
        yield (
            f"{_describe_status_error(simulated)} | {_describe_status_error(simulated)}",
            f"{expected} | {expected}",
        )


def _describe_status_error(memory: Any) -> str:
    try:
        memory.check()
    except CommunicationError as error:
        return f"{error.peers} {error.phase} of step {error.step}: {error.got}, need {error.need}"
    return "no error"
