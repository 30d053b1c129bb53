"""An access outside the arguments of an interpreted launch raises an error with its location."""

import gc

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from modular_kernel.errors import CorruptionError
from modular_kernel.interpreter.bounds import Bounds, allow_access


@triton.jit
def load_kernel(x_ptr, y_ptr, first, last, BLOCK: tl.constexpr):
    offs = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs <= last, other=0.0)
    tl.store(y_ptr + tl.arange(0, BLOCK), x)


@triton.jit
def store_kernel(y_ptr, first, last, BLOCK: tl.constexpr):
    offs = first + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, offs, mask=offs <= last)


@triton.jit
def add_kernel(y_ptr, first, last, BLOCK: tl.constexpr):
    offs = first + tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + offs, 1, mask=offs <= last)


@triton.jit
def swap_kernel(y_ptr, index):
    tl.atomic_cas(y_ptr + index, 0, 1)


def make_tensor(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return a tensor in the middle of a storage with twice as much memory on each side."""
    return torch.zeros(5 * count, dtype=dtype)[2 * count : 3 * count]


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_out_of_bounds_loads_raise(dtype):
    x, y = make_tensor(16, dtype), make_tensor(16, dtype)
    size = x.element_size()
    load_kernel[(1,)](x, y, 0, 15, BLOCK=16)
    load_kernel[(1,)](x, y, 8, 15, BLOCK=16)  # Masked lanes may have any address.
    load_kernel[(1,)](x, y, 80, 15, BLOCK=16)
    message = rf"got bytes {16 * size} to {17 * size - 1} of x_ptr, need 0 to {16 * size - 1}"
    with pytest.raises(InterpreterError, match=message):
        load_kernel[(1,)](x, y, 8, 16, BLOCK=16)
    with pytest.raises(InterpreterError, match=f"got bytes {-size} to -1 of x_ptr"):
        load_kernel[(1,)](x, y, -1, 0, BLOCK=16)


@pytest.mark.parametrize("kernel", [store_kernel, add_kernel])
def test_out_of_bounds_writes_raise(kernel):
    y = make_tensor(16)
    kernel[(1,)](y, 8, 15, BLOCK=16)
    assert y[8:].ne(0).all()
    before = y.clone()
    with pytest.raises(InterpreterError, match="got bytes 64 to 67 of y_ptr, need 0 to 63"):
        kernel[(1,)](y, 8, 16, BLOCK=16)
    assert torch.equal(y, before)


def test_out_of_bounds_compare_and_swap_raises():
    y = make_tensor(16)
    swap_kernel[(1,)](y, 15)
    assert y.tolist() == [0] * 15 + [1]
    with pytest.raises(InterpreterError, match="got bytes 64 to 67 of y_ptr"):
        swap_kernel[(1,)](y, 16)


@triton.jit
def descriptor_kernel(x_desc, y_ptr, column, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)[:, None]
    x = x_desc.load([0, column])
    tl.store(y_ptr + row * BLOCK + tl.arange(0, BLOCK)[None, :], x)


def test_descriptors_larger_than_their_tensor_raise():
    x, y = make_tensor(12 * 20).view(12, 20), make_tensor(16 * 16)
    descriptor = TensorDescriptor(x, [12, 20], [20, 1], [16, 16])
    descriptor_kernel[(1,)](descriptor, y, 16, BLOCK=16)
    too_long = TensorDescriptor(x, [13, 20], [20, 1], [16, 16])
    with pytest.raises(InterpreterError, match="of x_desc, need 0 to 959"):
        descriptor_kernel[(1,)](too_long, y, 16, BLOCK=16)


@triton.jit
def tuple_kernel(pair, first):
    x = tl.load(pair[0] + first)
    tl.store(pair[1], x)


def test_out_of_bounds_loads_of_tensors_in_tuples_raise():
    pair = make_tensor(4), make_tensor(4)
    tuple_kernel[(1,)](pair, 3)
    with pytest.raises(InterpreterError, match=r"of pair\[0\], need 0 to 15"):
        tuple_kernel[(1,)](pair, 4)


@triton.jit
def distant_kernel(y_ptr, distance):
    pointer = (y_ptr.to(tl.int64) + distance).to(y_ptr.dtype)
    tl.store(pointer, 7)


def test_shared_memory_is_accessible_until_it_is_freed():
    y, shared = torch.zeros(4, dtype=torch.int32), torch.zeros(1 << 16, dtype=torch.int32)
    distance = shared.data_ptr() - y.data_ptr()
    with pytest.raises(InterpreterError, match="CorruptionError"):
        distant_kernel[(1,)](y, distance)
    allow_access(shared)
    distant_kernel[(1,)](y, distance)
    assert shared[0] == 7
    with pytest.raises(InterpreterError, match="of shared memory"):
        distant_kernel[(1,)](y, distance - 4)
    del shared
    gc.collect()
    with pytest.raises(InterpreterError, match="CorruptionError"):
        distant_kernel[(1,)](y, distance)


def test_memory_between_arguments_is_out_of_bounds():
    memory = torch.zeros(64, dtype=torch.int32)
    bounds = Bounds({"a": memory[:16], "b": memory[32:48], "empty": memory[:0], "number": 3})
    index = np.arange(64)
    pointers = memory.data_ptr() + 4 * index.astype(np.uint64)
    in_bounds = (index < 16) | (index >= 32) & (index < 48)
    bounds.check(pointers, in_bounds, 4)
    with pytest.raises(CorruptionError, match="bytes 64 to 67 of a, need 0 to 63"):
        bounds.check(pointers, in_bounds | (index == 16), 4)
    with pytest.raises(CorruptionError, match="bytes -4 to -1 of b, need 0 to 63"):
        bounds.check(pointers, in_bounds | (index == 31), 4)
    with pytest.raises(CorruptionError, match="bytes 60 to 67 of b, need 0 to 63"):
        bounds.check(pointers, index == 47, 8)
    with pytest.raises(CorruptionError, match="no argument has memory"):
        Bounds({"number": 3}).check(pointers, in_bounds, 4)
