"""The interpreter reports races: unordered accesses of programs to one element."""

import pytest
import torch
import triton
import triton.language as tl

from experts import TorchExperts
from modular_kernel.interpreter.access_log import ACCESS_LOG
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.replay.launch.launch import launch
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE
from prepare_finalize import MoEPrepareAndFinalizeNoEP


def find_races(kernel, *arguments, programs=3, **constants):
    with ACCESS_LOG.races() as messages:
        kernel[(programs,)](*arguments, **constants)
    return messages


def zeros(count=8, dtype=torch.int32):
    return torch.zeros(count, dtype=dtype)


@triton.jit
def separate_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(2):
        tl.store(y_ptr + offs, tl.load(y_ptr + offs) + tl.load(x_ptr))


def test_programs_with_separate_elements_do_not_race():
    assert find_races(separate_kernel, zeros(), zeros(24), BLOCK=8) == []
    assert find_races(separate_kernel, zeros(), zeros(24, torch.int8), BLOCK=8) == []


@triton.jit
def same_place_kernel(y_ptr, first, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, offs, mask=offs >= tl.program_id(0) * first)


def test_two_writes_to_one_element_race():
    message = "same_place_kernel: a program writes what another one writes, in y_ptr"
    assert find_races(same_place_kernel, zeros(), 7, BLOCK=8) == [message]
    assert find_races(same_place_kernel, zeros(), 7, BLOCK=8, programs=1) == []
    assert find_races(same_place_kernel, zeros(), 8, BLOCK=8) == []  # Other programs store nothing.


@triton.jit
def neighbor_kernel(y_ptr, step):
    index = tl.program_id(0) + 1
    tl.store(y_ptr + index, tl.load(y_ptr + index + step))


def test_read_and_write_of_one_element_race():
    y = zeros()
    read_after_write = "neighbor_kernel: a program reads what another one writes, in y_ptr"
    write_after_read = "neighbor_kernel: a program writes what another one reads, in y_ptr"
    assert find_races(neighbor_kernel, y, -1) == [read_after_write]
    assert find_races(neighbor_kernel, y, 1) == [write_after_read]
    assert find_races(neighbor_kernel, y, 0) == []
    assert find_races(neighbor_kernel, y, 4) == []


@triton.jit
def counter_kernel(count_ptr, y_ptr, ZEROED: tl.constexpr, SEM: tl.constexpr):
    if ZEROED and tl.program_id(0) == 0:
        tl.store(count_ptr, 0)
    tl.store(y_ptr + tl.program_id(0), 1)
    last = tl.atomic_add(count_ptr, 1, sem=SEM) == tl.num_programs(0) - 1
    if last:
        total = tl.sum(tl.load(y_ptr + tl.arange(0, 4)), axis=0)
        tl.store(y_ptr, total)
        tl.store(count_ptr, 0)


def test_acquire_release_orders_the_last_program():
    count, y = zeros(1), zeros()
    assert find_races(counter_kernel, count, y, ZEROED=False, SEM="acq_rel", programs=4) == []
    assert (y[0], count[0]) == (4, 0)


def test_relaxed_atomics_do_not_order():
    messages = find_races(
        counter_kernel, zeros(1), zeros(), ZEROED=False, SEM="relaxed", programs=4
    )
    assert "counter_kernel: a program reads what another one writes, in y_ptr" in messages
    assert (
        "counter_kernel: a program writes what another one atomically changes, in count_ptr"
        in messages
    )


def test_resetting_a_counter_races():
    messages = find_races(counter_kernel, zeros(1), zeros(), ZEROED=True, SEM="acq_rel", programs=4)
    message = "counter_kernel: a program atomically changes what another one writes, in count_ptr"
    assert message in messages


@triton.jit
def counted_twice_kernel(found_ptr, count_ptr, y_ptr, ZEROED: tl.constexpr):
    tl.store(y_ptr + tl.program_id(0), 1)
    for _ in range(2):
        tl.atomic_add(found_ptr, 1)
    last = tl.atomic_add(count_ptr, 1) == tl.num_programs(0) - 1
    if last:
        tl.store(count_ptr, 0)
        tl.store(y_ptr + tl.arange(0, 4), 2)
    elif ZEROED:
        tl.store(y_ptr + tl.num_programs(0) - 1, 3)


def test_program_with_two_atomics_is_not_ordered_before_itself():
    """The program is ordered after all other programs, and races between these are still found."""
    assert find_races(counted_twice_kernel, zeros(1), zeros(1), zeros(), ZEROED=False) == []
    messages = find_races(counted_twice_kernel, zeros(1), zeros(1), zeros(), ZEROED=True)
    assert messages == ["counted_twice_kernel: a program writes what another one writes, in y_ptr"]


@triton.jit
def early_reader_kernel(count_ptr, y_ptr):
    """Program 2 reads what program 1 writes, without an atomic of program 1 between them."""
    tl.store(y_ptr + tl.program_id(0), 1)
    if tl.program_id(0) != 1:
        tl.atomic_add(count_ptr, 1)
    if tl.program_id(0) == 2:
        tl.load(y_ptr + tl.arange(0, 2))


def test_program_that_reads_too_early_races():
    message = "early_reader_kernel: a program reads what another one writes, in y_ptr"
    assert find_races(early_reader_kernel, zeros(1), zeros()) == [message]


@triton.jit
def poll_kernel(flag_ptr, y_ptr):
    if tl.program_id(0) == 0:
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    while tl.load(flag_ptr, volatile=True) == 0:
        pass
    tl.atomic_max(y_ptr, tl.program_id(0))
    tl.atomic_cas(y_ptr + 1, 0, 1)


def test_atomics_and_volatile_loads_do_not_race():
    assert find_races(poll_kernel, zeros(1), zeros()) == []


@triton.jit
def grid_kernel(y_ptr):
    index = (tl.program_id(0) * 2 + tl.program_id(1)) * 2 + tl.program_id(2)
    tl.store(y_ptr + index, 1)
    if index == 7:
        tl.store(y_ptr, 1)


def test_races_in_grids_of_three_dimensions_are_found():
    with ACCESS_LOG.races() as messages:
        grid_kernel[(2, 2, 2)](zeros())
    assert messages == ["grid_kernel: a program writes what another one writes, in y_ptr"]


def test_races_are_recorded_only_on_request():
    with ACCESS_LOG.races() as outer:
        with ACCESS_LOG.races() as inner:
            same_place_kernel[(3,)](zeros(), 7, BLOCK=8)
        separate_kernel[(3,)](zeros(), zeros(24), BLOCK=8)
    assert len(inner) == 1
    assert outer == []
    same_place_kernel[(3,)](zeros(), 7, BLOCK=8)
    assert (len(inner), outer) == (1, [])
    with pytest.raises(ZeroDivisionError), ACCESS_LOG.races():
        raise ZeroDivisionError
    same_place_kernel[(3,)](zeros(), 7, BLOCK=8)


@triton.jit
def rewrite_kernel(y_ptr):
    tl.store(y_ptr, tl.load(y_ptr))


class ExpertsWithRace(TorchExperts):
    """Experts with correct results, but three programs write the first value."""

    def apply(self, tokens, *, weights, workspace, output):
        super().apply(tokens, weights=weights, workspace=workspace, output=output)
        launch(rewrite_kernel, (3,), y_ptr=output)


def test_verification_reports_a_race():
    def build(case, machine, poison):
        parts = MoEPrepareAndFinalizeNoEP(case.problem), ExpertsWithRace(case.problem)
        return FusedMoEModularKernel(*parts, machine=machine, poison=poison)

    case = Case("MoEPrepareAndFinalizeNoEP", "TorchExperts", BASE)
    assert prove(case, build=build).failures == (
        "races: rewrite_kernel: a program reads what another one writes, in y_ptr",
        "races: rewrite_kernel: a program writes what another one reads, in y_ptr",
        "races: rewrite_kernel: a program writes what another one writes, in y_ptr",
    )
