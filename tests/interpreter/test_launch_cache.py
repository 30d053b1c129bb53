"""The launch cache replays the writes of a launch if nothing that it read has changed."""

import gc
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from modular_kernel.interpreter.access_log import ACCESS_LOG
from modular_kernel.interpreter.bounds import allow_access
from modular_kernel.interpreter.launch_cache import LaunchCache
from modular_kernel.interpreter.launch_cache import cache_launches as noted_launches
from modular_kernel.replay.launch.runtime import cache_interpreted_launches
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE


@triton.jit
def gather_kernel(x_ptr, at_ptr, y_ptr, count, scale, BLOCK: tl.constexpr):
    """y[i] = scale * x[at[i]]; only even lanes are written."""
    lane = tl.arange(0, BLOCK)
    inside = lane < count
    at = tl.load(at_ptr + lane, mask=inside, other=0)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    tl.store(y_ptr + lane, x * scale, mask=inside & (lane % 2 == 0))


def arguments(dtype=torch.float32):
    x = torch.arange(20, dtype=torch.float32).to(dtype)
    at = torch.tensor([3, 5, 7, 0, 1, 9, 9, 9], dtype=torch.int32)
    return x, at, torch.full((8,), -1.0).to(dtype)


def gathered(x, at, y, count=6, scale=2.0):
    gather_kernel[(1,)](x, at, y, count, scale, BLOCK=8)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_equal_launch_at_other_addresses_is_replayed(dtype):
    want = gathered(*arguments(dtype))
    with noted_launches() as known:
        assert torch.equal(gathered(*arguments(dtype)).float(), want.float())
        x, at, y = arguments(dtype)
        whole = torch.full((64,), 9.0).to(dtype)  # what lies around, and unwritten lanes, stay
        y = whole[16:24]
        assert torch.equal(gathered(x, at, y)[0::2][:3].float(), want[0::2][:3].float())
    assert (known.computed, known.hits) == (1, 1)
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[16:22:2] = False
    assert bool((whole[untouched].float() == 9).all())


def test_changed_input_is_computed_again_if_it_was_read():
    with noted_launches() as known:
        gathered(*arguments())
        x, at, y = arguments()
        x[2], at[6] = 77.0, 1  # no lane that is on reads them
        gathered(x, at, y)
        assert (known.computed, known.hits) == (1, 1)
        x[9] = 77.0  # lane 5 reads it, and writes nothing
        gathered(x, at, y)
        assert (known.computed, known.hits) == (2, 1)
        x[7] = 8.0
        assert gathered(x, at, y)[2] == 16.0
        assert (known.computed, known.hits) == (3, 1)


def test_launch_with_other_arguments_is_computed():
    x, at, y = arguments()
    with noted_launches() as known:
        gathered(x, at, y)
        assert gathered(x, at, y, scale=3.0)[0] == 9.0
        gathered(x, at, y, count=7)
        assert gathered(x, at, y.clone())[0] == 6.0
        assert known.hits == 1
        gathered(x.double(), at, y)  # other types, other room, another place in the same memory
        gathered(x[:19], at, y)
        both = torch.zeros(40)
        gathered(both[:20], at, both[24:32])
        gathered(both[:20], at, both[20:28])
        gather_kernel[(1,)](x, at, y, 6, 2.0, BLOCK=16)
        gather_kernel[(2,)](x, at, y, 6, 2.0, BLOCK=8)
    assert (known.computed, known.hits) == (9, 1)


@triton.jit
def in_place_kernel(y_ptr, count_ptr):
    tl.store(y_ptr, tl.load(y_ptr) + 1)
    tl.atomic_add(count_ptr, 1)


def test_modified_input_is_compared_with_its_initial_value():
    y, count = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    with noted_launches() as known:
        for _ in range(3):
            in_place_kernel[(2,)](y, count)
        assert (known.computed, known.hits) == (3, 0)
        assert (float(y), int(count)) == (6.0, 6)
        y.zero_()
        count.zero_()
        in_place_kernel[(2,)](y, count)
        assert (known.computed, known.hits) == (3, 1)
        assert (float(y), int(count)) == (2.0, 2)
        y.zero_()
        count.fill_(5)
        in_place_kernel[(2,)](y, count)
    assert (known.computed, known.hits) == (4, 1)
    assert int(count) == 7


@triton.jit
def scattered_kernel(a_ptr, b_ptr, y_ptr):
    """Load lanes from two tensors, and store elements of different sizes at one address."""
    lane = tl.arange(0, 8)
    pointers = tl.where(lane < 4, a_ptr + lane, b_ptr + lane)
    tl.store(y_ptr + lane, tl.load(pointers))
    bytes_ptr = y_ptr.to(tl.pointer_type(tl.int8))
    tl.store(bytes_ptr + 5, tl.load(bytes_ptr + 4) + 1)


def test_lanes_in_several_tensors_and_elements_of_several_sizes():
    a, b, y = torch.arange(8), torch.arange(8) + 100, torch.zeros(8, dtype=torch.int64)
    with noted_launches() as known:
        scattered_kernel[(1,)](a, b, y)
        want = y.clone()
        a[4:], b[:4] = 7, 7
        y.zero_()
        scattered_kernel[(1,)](a, b, y)
        assert (known.computed, known.hits) == (1, 1)
        assert torch.equal(y, want)
        a[3] = 8
        y.zero_()
        scattered_kernel[(1,)](a, b, y)
        assert known.computed == 2
        b[7] = 8
        y.zero_()
        scattered_kernel[(1,)](a, b, y)
    assert known.computed == 3


@triton.jit
def described_kernel(desc, y_ptr):
    tl.store(y_ptr + tl.arange(0, 16), tl.sum(desc.load([0, 0]), axis=0))


def test_descriptors():
    x, y = torch.ones(4, 16), torch.zeros(16)
    with noted_launches() as known:
        for rows in (4, 4, 2):
            described_kernel[(1,)](TensorDescriptor(x[:rows], [rows, 16], [16, 1], [4, 16]), y)
            assert bool((y == rows).all())
        x[1] = 2
        described_kernel[(1,)](TensorDescriptor(x[:2], [2, 16], [16, 1], [4, 16]), y)
        assert bool((y == 3).all())
    assert (known.computed, known.hits) == (3, 1)


@triton.jit
def table_kernel(addresses_ptr, x_ptr, y_ptr):
    x_ptr = tl.load(addresses_ptr).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr, tl.load(x_ptr))


@triton.jit
def address_kernel(x_ptr, y_ptr):
    tl.store(y_ptr, x_ptr.to(tl.int64))


def test_kernels_that_cast_addresses_replay_only_at_equal_addresses():
    """Addresses of an earlier call would be out of bounds, although all contents are equal."""
    x, y = torch.ones(64), torch.zeros(1)
    addresses = torch.tensor([x.data_ptr()])
    with noted_launches() as known:
        for _ in range(2):
            table_kernel[(1,)](addresses, x[:4], y)
        assert (known.computed, known.hits) == (1, 1)
        with pytest.raises(Exception, match="got bytes -192 to -189 of x_ptr"):
            table_kernel[(1,)](addresses, x[48:52], y)
        told = torch.zeros(1, dtype=torch.int64)
        for start in (0, 48):
            address_kernel[(1,)](x[start : start + 4], told)
            assert int(told) == x.data_ptr() + 4 * start


@triton.jit
def marking_kernel(y_ptr, number):
    tl.store(y_ptr + tl.program_id(0), number.to(tl.int32, bitcast=True))


@pytest.mark.parametrize("numbers", [(0.0, -0.0), (math.nan, -math.nan), (np.float64(2), 3.0)])
def test_numbers_with_different_bits_differ(numbers):
    want, got = torch.zeros(2, 1, dtype=torch.int32)
    for number in numbers:
        marking_kernel[(1,)](want, number)
        with noted_launches() as known:
            marking_kernel[(1,)](got, numbers[0])
            marking_kernel[(1,)](got, number)
        assert int(got) == int(want)
    assert known.hits == 0


def test_grids_are_compared_by_value():
    programs, y = torch.tensor(1), torch.zeros(4, dtype=torch.int32)
    with noted_launches():
        marking_kernel[(1,)](y, 1.0)
        with pytest.raises(Exception, match="float"):
            marking_kernel[(1.0,)](y, 1.0)
        for many in (1, 3):
            y.zero_()
            programs.fill_(many)
            marking_kernel[(programs,)](y, 1.0)
            assert int((y != 0).sum()) == many


STEP = 2.0


@triton.jit
def stepped(x):
    return x * STEP


@triton.jit
def doubled(x):
    return x * STEP * 2


@triton.jit
def stepping_kernel(x_ptr, y_ptr):
    tl.store(y_ptr, stepped(tl.load(x_ptr)))


def test_global_constants_and_helpers_are_compared(monkeypatch):
    x, y = torch.ones(1), torch.zeros(1)
    with noted_launches() as known:
        for step in (2.0, 3.0, 2.0, tl.constexpr(4)):
            monkeypatch.setitem(globals(), "STEP", step)
            stepping_kernel[(1,)](x, y)
            assert float(y) == getattr(step, "value", step)
        assert (known.computed, known.hits) == (3, 1)
        monkeypatch.setitem(globals(), "stepped", doubled)
        stepping_kernel[(1,)](x, y)
    assert float(y) == 8


@triton.jit
def sized_kernel(y_ptr, like: tl.constexpr):
    if isinstance(like, list):
        tl.store(y_ptr, like[0].shape[0])
    else:
        tl.store(y_ptr, like.shape[0])


@pytest.mark.parametrize("held", [lambda x: x, lambda x: [x]], ids=["tensor", "list"])
def test_constexpr_tensors_are_compared_by_shape(held):
    x, y = torch.zeros(6), torch.zeros(1)
    with noted_launches() as known:
        for rows in (2, 3, 3):
            sized_kernel[(1,)](y, held(x.view(rows, -1)))
            assert float(y) == rows
    assert known.hits == (held(x) is x)  # no launch may touch what is in a list


def test_failed_launch_is_not_cached():
    x, at, y = arguments()
    at[5] = 20
    with noted_launches() as known:
        for _ in range(2):
            with pytest.raises(Exception, match="got bytes 80 to 83 of x_ptr"):
                gathered(x, at, y)
    assert (known.computed, known.hits) == (2, 0)


def test_launches_with_race_checks_or_shared_memory_are_computed():
    with noted_launches() as known:
        gathered(*arguments())
        with ACCESS_LOG.races():
            gathered(*arguments())
        gathered(*arguments())
        assert (known.computed, known.hits) == (2, 1)
        shared = torch.zeros(8)
        allow_access(shared)
        gathered(*arguments())
        del shared
        gc.collect()
    assert (known.computed, known.hits) == (3, 1)


def test_launches_outside_the_context_are_computed():
    x, at, y = arguments()
    with cache_interpreted_launches():
        gathered(x, at, y)
    y.fill_(0)
    x[3] = 4
    assert gathered(x, at, y)[0] == 8


def test_verification_computes_each_launch_once(machine, monkeypatch):
    """Calls of a verification that have the inputs of an earlier one use its results.

    The strided call and the calls of reducers do not repeat launches: the former lowers the limits
    of host code, and the latter have inputs of their own.
    """
    kept, case = [], Case("MoEPrepareAndFinalizeNoEP", "TritonExperts", BASE)
    begin = LaunchCache.__init__
    monkeypatch.setattr(LaunchCache, "__init__", lambda self: kept.append(self) or begin(self))
    assert prove(case, machine).passed
    (known,) = kept
    assert known.computed > 0
    assert 2 * known.hits >= known.computed
