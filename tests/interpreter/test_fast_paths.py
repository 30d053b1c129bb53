"""Fast paths of the interpreter give the same bits, types and errors as upstream."""

from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream

from modular_kernel.interpreter.dtypes import get_storage_dtype
from modular_kernel.interpreter.fast_memory import MEMORY_FAST_PATHS
from modular_kernel.interpreter.fast_paths import LANGUAGE_FAST_PATHS, TENSOR_FAST_PATHS
from modular_kernel.interpreter.operands import _with_semantic
from modular_kernel.interpreter.patch import patch_language

SEMANTIC = TritonSemantic(upstream.interpreter_builder)
KINDS = (
    *(tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64),
    *(tl.float16, tl.bfloat16, tl.float32, tl.float64),
)
POINTERS = (tl.pointer_type(tl.bfloat16), tl.pointer_type(tl.int1))
SHAPES = ((), (1,), (4,), (2, 1), (2, 4))
NUMBERS = (
    *(0, 1, -3, 7, 2**31, -(2**31), True, 0.0, -0.0, 1.5, 1e-40, 1e39, float("inf")),
    *(tl.constexpr(3), tl.constexpr(0.5)),
)
UPSTREAM = {name: getattr(tl.tensor, name) for name in TENSOR_FAST_PATHS}
LANGUAGE = {name: getattr(tl, name) for name in (*LANGUAGE_FAST_PATHS, *MEMORY_FAST_PATHS)}


@pytest.fixture(autouse=True)
def _in_a_launch():
    scope = patch_language()
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        scope.restore()


def tensor(kind, shape, seed=0, largest=9):
    random = np.random.default_rng(seed)
    data = random.integers(-largest, largest, shape or (1,))
    data = np.abs(data) if "u" in kind.name or kind.is_ptr() else data
    data = (data % 2 == 0) if kind is tl.int1 else data.astype(get_storage_dtype(kind))
    whole = tl.block_type(kind, list(shape)) if shape else kind
    return tl.tensor(upstream.TensorHandle(data, kind), whole)


def told(function, *args, **given):
    """Return the bits of the result, or the error."""
    try:
        got = function(*args, **given)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error)
    data = np.ascontiguousarray(got.handle.data)
    types = str(got.type), str(got.dtype), str(got.handle.dtype), str(got.shape), str(got.numel)
    return types, type(got.type).__name__, data.dtype, data.shape, data.tobytes()


class Both:
    """A fast path and upstream's function. taken: number of calls that used the fast path."""

    def __init__(self, cut, member):
        self.slow = _with_semantic(member, SEMANTIC)
        self.calls = self.left = 0
        self.fast = cut(self._counted)

    def _counted(self, *args, **given):
        self.left += 1
        return self.slow(*args, **given)

    def agree(self, *args, **given):
        self.calls += 1
        assert told(self.fast, *args, **given) == told(self.slow, *args, **given), (args, given)

    @property
    def taken(self):
        return self.calls - self.left


BINARY = [name for name in TENSOR_FAST_PATHS if name not in ("__getitem__", "to")]


@pytest.mark.parametrize("name", BINARY)
def test_binary_operations(name):
    both = Both(TENSOR_FAST_PATHS[name], UPSTREAM[name])
    for kind, shape in product((*KINDS, *POINTERS), SHAPES):
        own = tensor(kind, shape, largest=2**7)
        for number in NUMBERS:
            both.agree(own, number)
        for other, wanted in product((*KINDS, *POINTERS), SHAPES):
            both.agree(own, tensor(other, wanted, seed=1))
    assert both.taken > 50
    assert both.left > 50


@pytest.mark.parametrize("name", ["__add__", "__mul__", "__sub__"])
def test_integer_overflow_wraps(name):
    both = Both(TENSOR_FAST_PATHS[name], UPSTREAM[name])
    for kind, shape in product((tl.int32, tl.int64), SHAPES):
        own = tensor(kind, shape, largest=2**31)
        both.agree(own, own)
        both.agree(own, 2**31 - 1)
    assert both.left == 0


def test_indexing():
    both = Both(TENSOR_FAST_PATHS["__getitem__"], UPSTREAM["__getitem__"])
    every = slice(None)
    for kind, shape in product((*KINDS, *POINTERS), SHAPES):
        for slices in (
            *((None, every), (every, None), (every, None, every), (None, every, every)),
            *((every, every), (every,), (None,), None, every, (0, every), (slice(1), None)),
        ):
            both.agree(tensor(kind, shape), slices)
    assert both.taken > 50


def test_conversions():
    both = Both(TENSOR_FAST_PATHS["to"], UPSTREAM["to"])
    narrow = (tl.float8e4nv, tl.float8e5, tl.uint64, tl.int16)
    for kind, wanted, shape in product((*KINDS, *narrow), (*KINDS, *narrow, *POINTERS), SHAPES):
        own = tensor(kind, shape, largest=100)
        both.agree(own, wanted)
        both.agree(own, tl.constexpr(wanted))
    both.agree(tensor(tl.float32, (4,)), tl.bfloat16, fp_downcast_rounding="rtz")
    both.agree(tensor(tl.float32, (4,)), tl.int32, bitcast=True)
    assert both.taken > 50


def test_where():
    both = Both(LANGUAGE_FAST_PATHS["where"], LANGUAGE["where"])
    for shape, first, second in product(SHAPES, SHAPES, SHAPES):
        condition = tensor(tl.int1, shape, seed=2)
        for kind, other in product((tl.int32, tl.int64, tl.float32, tl.bfloat16), repeat=2):
            both.agree(condition, tensor(kind, first), tensor(other, second, seed=1))
        for number in NUMBERS:
            both.agree(condition, tensor(tl.float32, first), number)
        both.agree(tensor(tl.int32, shape), tensor(tl.float32, first), 0.0)
    assert both.taken > 50


ELEMENTS = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def addresses(memory, shape):
    kind = tl.pointer_type(tl.str_to_ty(triton.runtime.jit.mangle_type(memory), None).element_ty)
    count = int(np.prod(shape or (1,)))
    data = memory.data_ptr() + memory.element_size() * np.arange(count, dtype=np.uint64)
    whole = tl.block_type(kind, list(shape)) if shape else kind
    handle = upstream.TensorHandle(data.reshape(shape or (1,)), kind)
    return tl.tensor(handle, whole)


def values_of(memory):
    return addresses(memory, ()).dtype.element_ty


def _begun(*memory):
    from modular_kernel.interpreter.access_log import ACCESS_LOG

    ACCESS_LOG.begin("kernel", {f"x{i}": each for i, each in enumerate(memory)})
    upstream.interpreter_builder.set_grid_dim(1, 1, 1)
    upstream.interpreter_builder.set_grid_idx(0, 0, 0)


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
def test_loads(dtype):
    both = Both(MEMORY_FAST_PATHS["load"], LANGUAGE["load"])
    memory = torch.arange(16).to(dtype)
    _begun(memory)
    for shape in SHAPES:
        pointer = addresses(memory, shape)
        both.agree(pointer)
        both.agree(pointer, volatile=True)
        both.agree(pointer, None, None, cache_modifier=".cg", eviction_policy="evict_first")
        both.agree(pointer, cache_modifier=".wt")
        both.agree(pointer, None, 0)
        both.agree(pointer, None, None, (), "", ".cg", "evict_last")
        both.agree(pointer, None, None, (), "", ".wt")
        for lane in ((), (1,)):  # one lane is a block or none
            for kind in (tl.float32, tl.bfloat16, tl.int32):
                both.agree(pointer, tensor(tl.int1, ()), tensor(kind, lane) + 11)
        for wanted in SHAPES:
            mask = tensor(tl.int1, wanted, seed=3)
            both.agree(pointer, mask)
            both.agree(pointer, mask=mask, other=0)
            both.agree(pointer, tensor(tl.int32, wanted), 0)
            for number in NUMBERS:
                both.agree(pointer, mask, number)
            for kind in (tl.float32, tl.bfloat16, tl.int32):
                both.agree(pointer, mask, tensor(kind, wanted))
    assert both.taken > 20 or dtype is torch.bool


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
def test_stores(dtype):
    """A store returns nothing, so memory is compared."""
    slow = _with_semantic(LANGUAGE["store"], SEMANTIC)
    left = []
    fast = MEMORY_FAST_PATHS["store"](lambda *args, **given: left.append(1) or slow(*args, **given))
    memory, calls = torch.zeros(16).to(dtype), 0
    _begun(memory)

    def stored(function, shape, *args, **given):
        memory.view(torch.uint8).fill_(7)
        try:
            got = function(addresses(memory, shape), *args, **given)
        except Exception as error:  # noqa: BLE001
            return type(error).__name__, str(error)
        return str(got.type), got.handle, memory.view(torch.uint8).tolist()

    values = [tensor(kind, wanted) for kind in (*KINDS, tl.float8e4nv) for wanted in SHAPES]
    for shape, value in product(SHAPES, [*values, 0, 1.5]):
        masks = [None, *(tensor(tl.int1, wanted, seed=3) for wanted in SHAPES)]
        for mask in masks:
            calls += 1
            assert stored(fast, shape, value, mask) == stored(slow, shape, value, mask), (
                value.type,
                mask,
            )
        calls += 1
        assert stored(fast, shape, value, eviction_policy="no") == stored(
            slow, shape, value, eviction_policy="no"
        )
    assert 0 < len(left) < calls or dtype is torch.bool
    value = tensor(tl.float32, (4,)).to(values_of(memory))
    for args in ([None, (), ".cg"], [None, (), "no"]):  # all by position
        assert stored(fast, (4,), value, *args) == stored(slow, (4,), value, *args)
