"""The interpreter's fast paths give the bits, types and errors of Triton's functions."""

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
from modular_kernel.interpreter.operands import _bind_semantic
from modular_kernel.interpreter.patch import patch_language

SEMANTIC = TritonSemantic(upstream.interpreter_builder)
DTYPES = (
    *(tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64),
    *(tl.float16, tl.bfloat16, tl.float32, tl.float64),
)
POINTERS = (tl.pointer_type(tl.bfloat16), tl.pointer_type(tl.int1))
SHAPES = ((), (1,), (4,), (2, 1), (2, 4))
NUMBERS = (
    *(0, 1, -3, 7, 2**31, -(2**31), True, 0.0, -0.0, 1.5, 1e-40, 1e39, float("inf")),
    *(tl.constexpr(3), tl.constexpr(0.5)),
)
TENSOR_FUNCTIONS = {name: getattr(tl.tensor, name) for name in TENSOR_FAST_PATHS}
LANGUAGE_FUNCTIONS = {
    name: getattr(tl, name) for name in (*LANGUAGE_FAST_PATHS, *MEMORY_FAST_PATHS)
}


@pytest.fixture(autouse=True)
def _patch_language():
    scope = patch_language()
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        scope.restore()


def make_operand(kind, shape, seed=0, largest=9):
    random = np.random.default_rng(seed)
    data = random.integers(-largest, largest, shape or (1,))
    data = np.abs(data) if "u" in kind.name or kind.is_ptr() else data
    data = (data % 2 == 0) if kind is tl.int1 else data.astype(get_storage_dtype(kind))
    block_type = tl.block_type(kind, list(shape)) if shape else kind
    return tl.tensor(upstream.TensorHandle(data, kind), block_type)


def describe_result(function, *args, **options):
    """Return the types and the bits of the result, or the error."""
    try:
        result = function(*args, **options)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error)
    data = np.ascontiguousarray(result.handle.data)
    types = (
        str(result.type),
        str(result.dtype),
        str(result.handle.dtype),
        str(result.shape),
        str(result.numel),
    )
    return types, type(result.type).__name__, data.dtype, data.shape, data.tobytes()


class ComparedFunctions:
    """A fast path, and the function of Triton that it replaces.

    Attributes:
        num_fast: number of compared calls that the fast path handled.
        num_slow: number of calls that the fast path passed on to the function of Triton.
    """

    def __init__(self, make_fast, upstream_function):
        self.slow = _bind_semantic(upstream_function, SEMANTIC)
        self.num_calls = self.num_slow = 0
        self.fast = make_fast(self._call_slow)

    def _call_slow(self, *args, **options):
        self.num_slow += 1
        return self.slow(*args, **options)

    def assert_agree(self, *args, **options):
        self.num_calls += 1
        assert describe_result(self.fast, *args, **options) == describe_result(
            self.slow, *args, **options
        ), (args, options)

    @property
    def num_fast(self):
        return self.num_calls - self.num_slow


BINARY_OPERATIONS = [name for name in TENSOR_FAST_PATHS if name not in ("__getitem__", "to")]


@pytest.mark.parametrize("name", BINARY_OPERATIONS)
def test_binary_operations_equal_triton(name):
    functions = ComparedFunctions(TENSOR_FAST_PATHS[name], TENSOR_FUNCTIONS[name])
    for kind, shape in product((*DTYPES, *POINTERS), SHAPES):
        operand = make_operand(kind, shape, largest=2**7)
        for number in NUMBERS:
            functions.assert_agree(operand, number)
        for other, other_shape in product((*DTYPES, *POINTERS), SHAPES):
            functions.assert_agree(operand, make_operand(other, other_shape, seed=1))
    assert functions.num_fast > 50
    assert functions.num_slow > 50


@pytest.mark.parametrize("name", ["__add__", "__mul__", "__sub__"])
def test_integer_overflow_equals_triton(name):
    functions = ComparedFunctions(TENSOR_FAST_PATHS[name], TENSOR_FUNCTIONS[name])
    for kind, shape in product((tl.int32, tl.int64), SHAPES):
        operand = make_operand(kind, shape, largest=2**31)
        functions.assert_agree(operand, operand)
        functions.assert_agree(operand, 2**31 - 1)
    assert functions.num_slow == 0


def test_indexing_equals_triton():
    functions = ComparedFunctions(TENSOR_FAST_PATHS["__getitem__"], TENSOR_FUNCTIONS["__getitem__"])
    all_columns = slice(None)
    for kind, shape in product((*DTYPES, *POINTERS), SHAPES):
        for slices in (
            *(
                (None, all_columns),
                (all_columns, None),
                (all_columns, None, all_columns),
                (None, all_columns, all_columns),
            ),
            *(
                (all_columns, all_columns),
                (all_columns,),
                (None,),
                None,
                all_columns,
                (0, all_columns),
                (slice(1), None),
            ),
        ):
            functions.assert_agree(make_operand(kind, shape), slices)
    assert functions.num_fast > 50


def test_conversions_equal_triton():
    functions = ComparedFunctions(TENSOR_FAST_PATHS["to"], TENSOR_FUNCTIONS["to"])
    more_dtypes = (tl.float8e4nv, tl.float8e5, tl.uint64, tl.int16)
    for kind, other_kind, shape in product(
        (*DTYPES, *more_dtypes), (*DTYPES, *more_dtypes, *POINTERS), SHAPES
    ):
        operand = make_operand(kind, shape, largest=100)
        functions.assert_agree(operand, other_kind)
        functions.assert_agree(operand, tl.constexpr(other_kind))
    functions.assert_agree(make_operand(tl.float32, (4,)), tl.bfloat16, fp_downcast_rounding="rtz")
    functions.assert_agree(make_operand(tl.float32, (4,)), tl.int32, bitcast=True)
    assert functions.num_fast > 50


def test_where_equals_triton():
    functions = ComparedFunctions(LANGUAGE_FAST_PATHS["where"], LANGUAGE_FUNCTIONS["where"])
    for shape, first, second in product(SHAPES, SHAPES, SHAPES):
        condition = make_operand(tl.int1, shape, seed=2)
        for kind, other in product((tl.int32, tl.int64, tl.float32, tl.bfloat16), repeat=2):
            functions.assert_agree(
                condition, make_operand(kind, first), make_operand(other, second, seed=1)
            )
        for number in NUMBERS:
            functions.assert_agree(condition, make_operand(tl.float32, first), number)
        functions.assert_agree(make_operand(tl.int32, shape), make_operand(tl.float32, first), 0.0)
    assert functions.num_fast > 50


MEMORY_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def make_pointers(memory, shape):
    kind = tl.pointer_type(tl.str_to_ty(triton.runtime.jit.mangle_type(memory), None).element_ty)
    count = int(np.prod(shape or (1,)))
    data = memory.data_ptr() + memory.element_size() * np.arange(count, dtype=np.uint64)
    block_type = tl.block_type(kind, list(shape)) if shape else kind
    handle = upstream.TensorHandle(data.reshape(shape or (1,)), kind)
    return tl.tensor(handle, block_type)


def get_element_dtype(memory):
    return make_pointers(memory, ()).dtype.element_ty


def _begin_launch(*memory):
    from modular_kernel.interpreter.access_log import ACCESS_LOG

    ACCESS_LOG.begin("kernel", {f"x{i}": tensor for i, tensor in enumerate(memory)})
    upstream.interpreter_builder.set_grid_dim(1, 1, 1)
    upstream.interpreter_builder.set_grid_idx(0, 0, 0)


@pytest.mark.parametrize("dtype", MEMORY_DTYPES, ids=str)
def test_loads_equal_triton(dtype):
    functions = ComparedFunctions(MEMORY_FAST_PATHS["load"], LANGUAGE_FUNCTIONS["load"])
    memory = torch.arange(16).to(dtype)
    _begin_launch(memory)
    for shape in SHAPES:
        pointer = make_pointers(memory, shape)
        functions.assert_agree(pointer)
        functions.assert_agree(pointer, volatile=True)
        functions.assert_agree(
            pointer, None, None, cache_modifier=".cg", eviction_policy="evict_first"
        )
        functions.assert_agree(pointer, cache_modifier=".wt")
        functions.assert_agree(pointer, None, 0)
        functions.assert_agree(pointer, None, None, (), "", ".cg", "evict_last")
        functions.assert_agree(pointer, None, None, (), "", ".wt")
        for other_shape in ((), (1,)):  # `other` of a single lane may be a scalar or a block.
            for kind in (tl.float32, tl.bfloat16, tl.int32):
                functions.assert_agree(
                    pointer, make_operand(tl.int1, ()), make_operand(kind, other_shape) + 11
                )
        for other_shape in SHAPES:
            mask = make_operand(tl.int1, other_shape, seed=3)
            functions.assert_agree(pointer, mask)
            functions.assert_agree(pointer, mask=mask, other=0)
            functions.assert_agree(pointer, make_operand(tl.int32, other_shape), 0)
            for number in NUMBERS:
                functions.assert_agree(pointer, mask, number)
            for kind in (tl.float32, tl.bfloat16, tl.int32):
                functions.assert_agree(pointer, mask, make_operand(kind, other_shape))
    assert functions.num_fast > 20 or dtype is torch.bool


@pytest.mark.parametrize("dtype", MEMORY_DTYPES, ids=str)
def test_stores_equal_triton(dtype):
    slow = _bind_semantic(LANGUAGE_FUNCTIONS["store"], SEMANTIC)
    slow_calls = []
    fast = MEMORY_FAST_PATHS["store"](
        lambda *args, **options: slow_calls.append(1) or slow(*args, **options)
    )
    memory, calls = torch.zeros(16).to(dtype), 0
    _begin_launch(memory)

    def store_and_read_bytes(function, shape, *args, **options):
        memory.view(torch.uint8).fill_(7)
        try:
            result = function(make_pointers(memory, shape), *args, **options)
        except Exception as error:  # noqa: BLE001
            return type(error).__name__, str(error)
        return str(result.type), result.handle, memory.view(torch.uint8).tolist()

    values = [
        make_operand(kind, other_shape)
        for kind in (*DTYPES, tl.float8e4nv)
        for other_shape in SHAPES
    ]
    for shape, value in product(SHAPES, [*values, 0, 1.5]):
        masks = [None, *(make_operand(tl.int1, other_shape, seed=3) for other_shape in SHAPES)]
        for mask in masks:
            calls += 1
            assert store_and_read_bytes(fast, shape, value, mask) == store_and_read_bytes(
                slow, shape, value, mask
            ), (
                value.type,
                mask,
            )
        calls += 1
        assert store_and_read_bytes(
            fast, shape, value, eviction_policy="no"
        ) == store_and_read_bytes(slow, shape, value, eviction_policy="no")
    assert 0 < len(slow_calls) < calls or dtype is torch.bool
    value = make_operand(tl.float32, (4,)).to(get_element_dtype(memory))
    for args in ([None, (), ".cg"], [None, (), "no"]):
        assert store_and_read_bytes(fast, (4,), value, *args) == store_and_read_bytes(
            slow, (4,), value, *args
        )
