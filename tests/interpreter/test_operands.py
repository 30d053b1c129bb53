"""Fast promotion and broadcasting of operands give the results of Triton's functions."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream

from modular_kernel.interpreter import operands, patch
from modular_kernel.interpreter.dtypes import get_storage_dtype

DTYPES = (
    tl.int1, tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.uint64,
    tl.float8e4nv, tl.float16, tl.bfloat16, tl.float32, tl.float64,
)  # fmt: skip
POINTERS = (tl.pointer_type(tl.float32), tl.pointer_type(tl.int8))
SHAPES = ((), (4,), (1,), (1, 4), (4, 1), (2, 4), (2, 2))
NUMBERS = (
    0, 1, -1, 127, 255, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**63, 2**64, True, False,
    0.0, -0.0, 1.0, 0.1, -2.5, 1e-40, 1e39, 3.4028234663852886e38, float("inf"), float("nan"),
)  # fmt: skip
FLAGS = tuple(itertools.product((False, True), repeat=4))


def make_operand(dtype: Any, shape: tuple[int, ...]) -> Any:
    values = np.arange(1, 1 + int(np.prod(shape)), dtype=np.int64).reshape(shape or (1,))
    handle = upstream.TensorHandle(values.astype(get_storage_dtype(dtype)), dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


def describe(tensors: Any) -> list[object]:
    """Return the types, the shapes and the bits of tensors."""
    return [
        (str(t.type), str(t.dtype), str(t.shape), t.handle.data.dtype, t.handle.data.shape,
         str(t.handle.dtype), np.ascontiguousarray(t.handle.data).tobytes())
        for t in tensors
    ]  # fmt: skip


def describe_result_or_error(function: Any, *args: Any) -> object:
    try:
        return describe(function(*args))
    except Exception as error:  # noqa: BLE001
        return type(error)


@triton.jit
def exp_kernel(y_ptr):
    tl.store(y_ptr, tl.exp(tl.load(y_ptr) * 0))


@pytest.fixture
def semantic(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a semantic object that has Triton's functions, not the fast ones."""
    monkeypatch.setattr(
        TritonSemantic, "binary_op_type_checking_impl", operands._upstream_promote_operands
    )
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", operands._upstream_broadcast)
    return TritonSemantic(upstream.interpreter_builder)


@pytest.mark.parametrize("left", [*DTYPES, *POINTERS], ids=str)
def test_promotion_of_two_tensors_equals_triton(semantic: Any, left: Any) -> None:
    shapes = (((), ()), ((4,), (4,)), ((4,), ()), ((2, 4), (4, 1)))
    for right, flags, (a, b) in itertools.product((*DTYPES, *POINTERS), FLAGS, shapes):
        args = make_operand(left, a), make_operand(right, b), *flags
        expected = describe_result_or_error(operands._upstream_promote_operands, semantic, *args)
        assert describe_result_or_error(operands.promote_operands, semantic, *args) == expected, (
            left,
            right,
            flags,
            a,
            b,
        )


@pytest.mark.parametrize("dtype", [*DTYPES, *POINTERS], ids=str)
def test_promotion_of_a_tensor_and_a_number_equals_triton(semantic: Any, dtype: Any) -> None:
    for number, flags, shape in itertools.product(NUMBERS, FLAGS, ((), (4,), (2, 4))):
        for operand_pair in (
            (make_operand(dtype, shape), number),
            (number, make_operand(dtype, shape)),
        ):
            expected = describe_result_or_error(
                operands._upstream_promote_operands, semantic, *operand_pair, *flags
            )
            operands._make_constant.cache_clear()  # -0.0 and 0 have the same key.
            actual = describe_result_or_error(
                operands.promote_operands, semantic, *operand_pair, *flags
            )
            assert actual == expected, (dtype, number, flags, shape)


@pytest.mark.parametrize("left", SHAPES, ids=str)
def test_broadcasting_of_two_shapes_equals_triton(semantic: Any, left: tuple[int, ...]) -> None:
    for right, dtype in itertools.product(SHAPES, (tl.float32, tl.bfloat16, POINTERS[0])):
        operand_pair = make_operand(tl.int32, left), make_operand(dtype, right)
        expected = describe_result_or_error(operands._upstream_broadcast, semantic, *operand_pair)
        assert describe_result_or_error(operands.broadcast, semantic, *operand_pair) == expected, (
            left,
            right,
            dtype,
        )


@pytest.mark.parametrize("dtype", [*DTYPES, *POINTERS], ids=str)
def test_promotion_of_zero_dimensional_arrays_equals_triton(semantic: Any, dtype: Any) -> None:
    scalar = make_operand(dtype, ())
    scalar.handle.data = scalar.handle.data.reshape(())
    for other, flags in itertools.product(
        (*NUMBERS, make_operand(dtype, ()), make_operand(dtype, (4,))), FLAGS
    ):
        for operand_pair in ((scalar, other), (other, scalar)):
            expected = describe_result_or_error(
                operands._upstream_promote_operands, semantic, *operand_pair, *flags
            )
            assert (
                describe_result_or_error(operands.promote_operands, semantic, *operand_pair, *flags)
                == expected
            ), (
                other,
                flags,
            )


SPECIAL_FLOATS = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 1e30, 1.0, -7.25)
OPERATIONS: dict[str, tuple[object, ...]] = {
    "add": (False,), "sub": (False,), "mul": (False,), "truediv": (), "floordiv": (), "mod": (),
    "fdiv": (True,), "minimum": (upstream._ir.PROPAGATE_NAN.NONE,),
    "maximum": (upstream._ir.PROPAGATE_NAN.ALL,), "and_": (), "or_": (), "xor_": (), "shl": (),
    "ashr": (), "lshr": (), "logical_and": (), "greater_than": (), "greater_equal": (),
    "less_than": (), "less_equal": (), "equal": (), "not_equal": (),
}  # fmt: skip


UPSTREAM_FUNCTIONS = {
    "binary_op_type_checking_impl": operands._upstream_promote_operands,
    "broadcast_impl_value": operands._upstream_broadcast,
    "__post_init__": operands._upstream_check_handle,
    "_unwrap_if_constexpr": operands._upstream_unwrap,
}


def draw_operand(rng: np.random.Generator, like: Any = None) -> Any:
    """Return a random number or tensor, often of the same type as `like`."""
    if rng.random() < 0.25:
        return NUMBERS[rng.integers(len(NUMBERS))]
    dtype = (*DTYPES, *POINTERS)[rng.integers(len(DTYPES) + len(POINTERS))]
    if isinstance(like, tl.tensor) and rng.random() < 0.5:
        dtype = like.dtype
    operand = make_operand(dtype, SHAPES[rng.integers(len(SHAPES))])
    storage, data = get_storage_dtype(dtype), operand.handle.data
    if storage.kind in "iu":
        limits = np.iinfo(storage)
        extremes = np.array([limits.min, limits.max, limits.max // 3, 1], storage)
        operand.handle.data = rng.choice(extremes, data.shape) if rng.random() < 0.5 else data
    else:
        with np.errstate(all="ignore"):
            operand.handle.data = rng.choice(SPECIAL_FLOATS, data.shape).astype(storage)
    return operand


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_random_operands_equal_triton(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(list(OPERATIONS).index(name))
    scope = patch.patch_language()
    semantic = TritonSemantic(upstream.interpreter_builder)

    def apply_operation(*operand_pair: object) -> list[object]:
        with np.errstate(all="ignore"):
            return [getattr(semantic, name)(*operand_pair, *OPERATIONS[name])]

    try:
        for _ in range(400):
            lhs = draw_operand(rng)
            operand_pair = lhs, draw_operand(rng, lhs)
            actual = describe_result_or_error(apply_operation, *operand_pair)
            with monkeypatch.context() as context:
                for owner, attribute, _ in operands.REPLACEMENTS:
                    if attribute in UPSTREAM_FUNCTIONS:
                        context.setattr(owner, attribute, UPSTREAM_FUNCTIONS[attribute])
                assert actual == describe_result_or_error(apply_operation, *operand_pair), (
                    name,
                    operand_pair,
                )
    finally:
        scope.restore()


def test_replaced_builtin_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    y = torch.zeros(1)
    exp_kernel[(1,)](y)
    assert y.item() == 1
    monkeypatch.setattr(tl, "exp", lambda x: x + 3)
    exp_kernel[(1,)](y)
    assert y.item() == 3
    monkeypatch.setattr(tl, "exp", tl.core.builtin(lambda x, _semantic: _semantic.add(x, 7, True)))
    exp_kernel[(1,)](y)
    assert y.item() == 7


def test_broadcasting_of_non_tensors_raises(semantic: Any) -> None:
    values = (np.float32(1), np.int64(2), 1.0, tl.constexpr(1), None, make_operand(tl.int32, (4,)))
    for operand_pair in itertools.product(values, values[:-1]):
        for broadcast in (operands._upstream_broadcast, operands.broadcast):
            with pytest.raises(AttributeError):
                broadcast(semantic, *operand_pair)


def test_cached_numbers_are_read_only(semantic: Any) -> None:
    _, first = operands.promote_operands(semantic, make_operand(tl.float32, (4,)), 1.0)
    _, second = operands.promote_operands(semantic, make_operand(tl.float32, (4,)), 1.0)
    assert first.handle.data is second.handle.data
    assert first.handle is not second.handle
    with pytest.raises(ValueError, match="read-only"):
        first.handle.data[0] = 2.0


@pytest.mark.parametrize(
    "value",
    [1, None, "x", tl.constexpr(3), [tl.constexpr(1), 2], (tl.constexpr(1), (tl.constexpr(2),))],
    ids=repr,
)
def test_unwrapping_of_constexprs_equals_triton(semantic: Any, value: object) -> None:
    assert repr(operands.unwrap(value)) == repr(operands._upstream_unwrap(value))


def test_handle_with_too_wide_data_is_refused(semantic: Any) -> None:
    with pytest.raises(ValueError, match="exceeds dtype"):
        upstream.TensorHandle(np.zeros(1, np.int64), tl.int32)
    assert upstream.TensorHandle(np.zeros(1, np.bool_), tl.int1).dtype is tl.int1
