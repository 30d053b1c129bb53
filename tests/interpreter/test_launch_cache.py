"""The launch cache replays the writes of a launch if the values that the launch read are equal."""

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
from modular_kernel.interpreter.launch_cache import LaunchCache, cache_launches
from modular_kernel.replay.launch.runtime import cache_interpreted_launches
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE


@triton.jit
def gather_kernel(x_ptr, at_ptr, y_ptr, count, scale, BLOCK: tl.constexpr):
    """Store scale * x[at[i]] at y[i] for even i."""
    lane = tl.arange(0, BLOCK)
    inside = lane < count
    index = tl.load(at_ptr + lane, mask=inside, other=0)
    x = tl.load(x_ptr + index, mask=inside, other=0.0)
    tl.store(y_ptr + lane, x * scale, mask=inside & (lane % 2 == 0))


def make_arguments(dtype=torch.float32):
    x = torch.arange(20, dtype=torch.float32).to(dtype)
    index = torch.tensor([3, 5, 7, 0, 1, 9, 9, 9], dtype=torch.int32)
    return x, index, torch.full((8,), -1.0).to(dtype)


def gather(x, index, y, count=6, scale=2.0):
    gather_kernel[(1,)](x, index, y, count, scale, BLOCK=8)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_equal_launch_at_other_addresses_is_replayed(dtype):
    expected = gather(*make_arguments(dtype))
    with cache_launches() as launch_cache:
        assert torch.equal(gather(*make_arguments(dtype)).float(), expected.float())
        x, index, y = make_arguments(dtype)
        memory = torch.full((64,), 9.0).to(dtype)
        y = memory[16:24]
        assert torch.equal(gather(x, index, y)[0::2][:3].float(), expected[0::2][:3].float())
    assert (launch_cache.computed, launch_cache.hits) == (1, 1)
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[16:22:2] = False
    assert bool((memory[untouched].float() == 9).all())


def test_changed_input_is_computed_again_if_it_was_read():
    with cache_launches() as launch_cache:
        gather(*make_arguments())
        x, index, y = make_arguments()
        x[2], index[6] = 77.0, 1  # No lane reads these elements.
        gather(x, index, y)
        assert (launch_cache.computed, launch_cache.hits) == (1, 1)
        x[9] = 77.0  # Lane 5 reads this element, but writes nothing.
        gather(x, index, y)
        assert (launch_cache.computed, launch_cache.hits) == (2, 1)
        x[7] = 8.0
        assert gather(x, index, y)[2] == 16.0
        assert (launch_cache.computed, launch_cache.hits) == (3, 1)


def test_launch_with_other_arguments_is_computed():
    x, index, y = make_arguments()
    with cache_launches() as launch_cache:
        gather(x, index, y)
        assert gather(x, index, y, scale=3.0)[0] == 9.0
        gather(x, index, y, count=7)
        assert gather(x, index, y.clone())[0] == 6.0
        assert launch_cache.hits == 1
        gather(x.double(), index, y)
        gather(x[:19], index, y)
        memory = torch.zeros(40)
        gather(memory[:20], index, memory[24:32])
        gather(memory[:20], index, memory[20:28])
        gather_kernel[(1,)](x, index, y, 6, 2.0, BLOCK=16)
        gather_kernel[(2,)](x, index, y, 6, 2.0, BLOCK=8)
    assert (launch_cache.computed, launch_cache.hits) == (9, 1)


@triton.jit
def in_place_kernel(y_ptr, count_ptr):
    tl.store(y_ptr, tl.load(y_ptr) + 1)
    tl.atomic_add(count_ptr, 1)


def test_modified_input_is_compared_with_its_initial_value():
    y, count = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    with cache_launches() as launch_cache:
        for _ in range(3):
            in_place_kernel[(2,)](y, count)
        assert (launch_cache.computed, launch_cache.hits) == (3, 0)
        assert (float(y), int(count)) == (6.0, 6)
        y.zero_()
        count.zero_()
        in_place_kernel[(2,)](y, count)
        assert (launch_cache.computed, launch_cache.hits) == (3, 1)
        assert (float(y), int(count)) == (2.0, 2)
        y.zero_()
        count.fill_(5)
        in_place_kernel[(2,)](y, count)
    assert (launch_cache.computed, launch_cache.hits) == (4, 1)
    assert int(count) == 7


@triton.jit
def scattered_kernel(a_ptr, b_ptr, y_ptr):
    """Load lanes from two tensors, and store elements of 8 bytes and of 1 byte at one address."""
    lane = tl.arange(0, 8)
    pointers = tl.where(lane < 4, a_ptr + lane, b_ptr + lane)
    tl.store(y_ptr + lane, tl.load(pointers))
    bytes_ptr = y_ptr.to(tl.pointer_type(tl.int8))
    tl.store(bytes_ptr + 5, tl.load(bytes_ptr + 4) + 1)


def test_only_elements_that_lanes_read_are_compared():
    a, b, y = torch.arange(8), torch.arange(8) + 100, torch.zeros(8, dtype=torch.int64)
    with cache_launches() as launch_cache:
        scattered_kernel[(1,)](a, b, y)
        expected = y.clone()
        a[4:], b[:4] = 7, 7
        y.zero_()
        scattered_kernel[(1,)](a, b, y)
        assert (launch_cache.computed, launch_cache.hits) == (1, 1)
        assert torch.equal(y, expected)
        a[3] = 8
        y.zero_()
        scattered_kernel[(1,)](a, b, y)
        assert launch_cache.computed == 2
        b[7] = 8
        y.zero_()
        scattered_kernel[(1,)](a, b, y)
    assert launch_cache.computed == 3


@triton.jit
def described_kernel(desc, y_ptr):
    tl.store(y_ptr + tl.arange(0, 16), tl.sum(desc.load([0, 0]), axis=0))


def test_shapes_of_descriptors_are_compared():
    x, y = torch.ones(4, 16), torch.zeros(16)
    with cache_launches() as launch_cache:
        for rows in (4, 4, 2):
            described_kernel[(1,)](TensorDescriptor(x[:rows], [rows, 16], [16, 1], [4, 16]), y)
            assert bool((y == rows).all())
        x[1] = 2
        described_kernel[(1,)](TensorDescriptor(x[:2], [2, 16], [16, 1], [4, 16]), y)
        assert bool((y == 3).all())
    assert (launch_cache.computed, launch_cache.hits) == (3, 1)


@triton.jit
def table_kernel(addresses_ptr, x_ptr, y_ptr):
    x_ptr = tl.load(addresses_ptr).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr, tl.load(x_ptr))


@triton.jit
def address_kernel(x_ptr, y_ptr):
    tl.store(y_ptr, x_ptr.to(tl.int64))


def test_kernels_that_cast_addresses_replay_only_at_equal_addresses():
    """At other addresses, the cached addresses of an earlier call would be out of bounds."""
    x, y = torch.ones(64), torch.zeros(1)
    addresses = torch.tensor([x.data_ptr()])
    with cache_launches() as launch_cache:
        for _ in range(2):
            table_kernel[(1,)](addresses, x[:4], y)
        assert (launch_cache.computed, launch_cache.hits) == (1, 1)
        with pytest.raises(Exception, match="got bytes -192 to -189 of x_ptr"):
            table_kernel[(1,)](addresses, x[48:52], y)
        stored_address = torch.zeros(1, dtype=torch.int64)
        for start in (0, 48):
            address_kernel[(1,)](x[start : start + 4], stored_address)
            assert int(stored_address) == x.data_ptr() + 4 * start


@triton.jit
def marking_kernel(y_ptr, number):
    tl.store(y_ptr + tl.program_id(0), number.to(tl.int32, bitcast=True))


@pytest.mark.parametrize("numbers", [(0.0, -0.0), (math.nan, -math.nan), (np.float64(2), 3.0)])
def test_numbers_are_compared_by_bits(numbers):
    expected, actual = torch.zeros(2, 1, dtype=torch.int32)
    for number in numbers:
        marking_kernel[(1,)](expected, number)
        with cache_launches() as launch_cache:
            marking_kernel[(1,)](actual, numbers[0])
            marking_kernel[(1,)](actual, number)
        assert int(actual) == int(expected)
    assert launch_cache.hits == 0


def test_grids_are_compared_by_value():
    programs, y = torch.tensor(1), torch.zeros(4, dtype=torch.int32)
    with cache_launches():
        marking_kernel[(1,)](y, 1.0)
        with pytest.raises(Exception, match="float"):
            marking_kernel[(1.0,)](y, 1.0)
        for num_programs in (1, 3):
            y.zero_()
            programs.fill_(num_programs)
            marking_kernel[(programs,)](y, 1.0)
            assert int((y != 0).sum()) == num_programs


STEP = 2.0


@triton.jit
def times_step(x):
    return x * STEP


@triton.jit
def times_double_step(x):
    return x * STEP * 2


@triton.jit
def stepping_kernel(x_ptr, y_ptr):
    tl.store(y_ptr, times_step(tl.load(x_ptr)))


def test_global_constants_and_helpers_are_compared(monkeypatch):
    x, y = torch.ones(1), torch.zeros(1)
    with cache_launches() as launch_cache:
        for step in (2.0, 3.0, 2.0, tl.constexpr(4)):
            monkeypatch.setitem(globals(), "STEP", step)
            stepping_kernel[(1,)](x, y)
            assert float(y) == getattr(step, "value", step)
        assert (launch_cache.computed, launch_cache.hits) == (3, 1)
        monkeypatch.setitem(globals(), "times_step", times_double_step)
        stepping_kernel[(1,)](x, y)
    assert float(y) == 8


@triton.jit
def sized_kernel(y_ptr, SHAPED: tl.constexpr):
    if isinstance(SHAPED, list):
        tl.store(y_ptr, SHAPED[0].shape[0])
    else:
        tl.store(y_ptr, SHAPED.shape[0])


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x]], ids=["tensor", "list"])
def test_constexpr_tensors_are_compared_by_shape(wrap):
    x, y = torch.zeros(6), torch.zeros(1)
    with cache_launches() as launch_cache:
        for rows in (2, 3, 3):
            sized_kernel[(1,)](y, wrap(x.view(rows, -1)))
            assert float(y) == rows
    assert launch_cache.hits == (wrap(x) is x)  # Launches with lists of tensors are not cached.


def test_failed_launch_is_not_cached():
    x, index, y = make_arguments()
    index[5] = 20
    with cache_launches() as launch_cache:
        for _ in range(2):
            with pytest.raises(Exception, match="got bytes 80 to 83 of x_ptr"):
                gather(x, index, y)
    assert (launch_cache.computed, launch_cache.hits) == (2, 0)


def test_launches_with_race_checks_or_shared_memory_are_computed():
    with cache_launches() as launch_cache:
        gather(*make_arguments())
        with ACCESS_LOG.races():
            gather(*make_arguments())
        gather(*make_arguments())
        assert (launch_cache.computed, launch_cache.hits) == (2, 1)
        shared = torch.zeros(8)
        allow_access(shared)
        gather(*make_arguments())
        del shared
        gc.collect()
    assert (launch_cache.computed, launch_cache.hits) == (3, 1)


def test_launches_outside_the_context_are_computed():
    x, index, y = make_arguments()
    with cache_interpreted_launches():
        gather(x, index, y)
    y.fill_(0)
    x[3] = 4
    assert gather(x, index, y)[0] == 8


def test_verification_computes_each_launch_once(machine, monkeypatch):
    """Calls with the same inputs use the results of earlier launches.

    Strided calls and calls of reducers have different launches.
    """
    caches, case = [], Case("MoEPrepareAndFinalizeNoEP", "TritonExperts", BASE)
    assert prove(case, machine).passed  # also runs the checks that run once per process
    upstream_init = LaunchCache.__init__
    monkeypatch.setattr(
        LaunchCache, "__init__", lambda self: caches.append(self) or upstream_init(self)
    )
    assert prove(case, machine).passed
    (launch_cache,) = caches
    assert launch_cache.computed > 0
    assert 2 * launch_cache.hits >= launch_cache.computed
