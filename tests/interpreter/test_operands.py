"""Fast promotion and broadcasting of operands give the same results as upstream."""

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

KINDS = (
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


def tensor(kind: Any, shape: tuple[int, ...]) -> Any:
    values = np.arange(1, 1 + int(np.prod(shape)), dtype=np.int64).reshape(shape or (1,))
    handle = upstream.TensorHandle(values.astype(get_storage_dtype(kind)), kind)
    return tl.tensor(handle, tl.block_type(kind, list(shape)) if shape else kind)


def told(made: Any) -> list[object]:
    """Return everything observable of tensors: types, shapes, and the bits of their data."""
    return [
        (str(t.type), str(t.dtype), str(t.shape), t.handle.data.dtype, t.handle.data.shape,
         str(t.handle.dtype), np.ascontiguousarray(t.handle.data).tobytes())
        for t in made
    ]  # fmt: skip


def outcome(make: Any, *args: Any) -> object:
    try:
        return told(make(*args))
    except Exception as error:  # noqa: BLE001
        return type(error)


@triton.jit
def exp_kernel(y_ptr):
    tl.store(y_ptr, tl.exp(tl.load(y_ptr) * 0))


@pytest.fixture
def semantic(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A semantic object with upstream's functions."""
    monkeypatch.setattr(
        TritonSemantic, "binary_op_type_checking_impl", operands._upstream_promote_operands
    )
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", operands._upstream_broadcast)
    return TritonSemantic(upstream.interpreter_builder)


@pytest.mark.parametrize("left", [*KINDS, *POINTERS], ids=str)
def test_promotion_of_two_tensors(semantic: Any, left: Any) -> None:
    """All pairs of types, with all flags, for equal and different shapes."""
    shapes = (((), ()), ((4,), (4,)), ((4,), ()), ((2, 4), (4, 1)))
    for right, flags, (a, b) in itertools.product((*KINDS, *POINTERS), FLAGS, shapes):
        given = tensor(left, a), tensor(right, b), *flags
        want = outcome(operands._upstream_promote_operands, semantic, *given)
        assert outcome(operands.promote_operands, semantic, *given) == want, (
            left,
            right,
            flags,
            a,
            b,
        )


@pytest.mark.parametrize("kind", [*KINDS, *POINTERS], ids=str)
def test_promotion_of_a_tensor_and_a_number(semantic: Any, kind: Any) -> None:
    for number, flags, shape in itertools.product(NUMBERS, FLAGS, ((), (4,), (2, 4))):
        for given in ((tensor(kind, shape), number), (number, tensor(kind, shape))):
            want = outcome(operands._upstream_promote_operands, semantic, *given, *flags)
            operands._make_constant.cache_clear()  # -0.0 and 0 are one key
            got = outcome(operands.promote_operands, semantic, *given, *flags)
            assert got == want, (kind, number, flags, shape)


@pytest.mark.parametrize("left", SHAPES, ids=str)
def test_broadcasting_of_two_shapes(semantic: Any, left: tuple[int, ...]) -> None:
    for right, kind in itertools.product(SHAPES, (tl.float32, tl.bfloat16, POINTERS[0])):
        given = tensor(tl.int32, left), tensor(kind, right)
        want = outcome(operands._upstream_broadcast, semantic, *given)
        assert outcome(operands.broadcast, semantic, *given) == want, (left, right, kind)


@pytest.mark.parametrize("kind", [*KINDS, *POINTERS], ids=str)
def test_scalar_in_a_zero_dimensional_array(semantic: Any, kind: Any) -> None:
    scalar = tensor(kind, ())
    scalar.handle.data = scalar.handle.data.reshape(())
    for other, flags in itertools.product((*NUMBERS, tensor(kind, ()), tensor(kind, (4,))), FLAGS):
        for given in ((scalar, other), (other, scalar)):
            want = outcome(operands._upstream_promote_operands, semantic, *given, *flags)
            assert outcome(operands.promote_operands, semantic, *given, *flags) == want, (
                other,
                flags,
            )


SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 1e30, 1.0, -7.25)
OPERATIONS: dict[str, tuple[object, ...]] = {
    "add": (False,), "sub": (False,), "mul": (False,), "truediv": (), "floordiv": (), "mod": (),
    "fdiv": (True,), "minimum": (upstream._ir.PROPAGATE_NAN.NONE,),
    "maximum": (upstream._ir.PROPAGATE_NAN.ALL,), "and_": (), "or_": (), "xor_": (), "shl": (),
    "ashr": (), "lshr": (), "logical_and": (), "greater_than": (), "greater_equal": (),
    "less_than": (), "less_equal": (), "equal": (), "not_equal": (),
}  # fmt: skip


ORIGINALS = {
    "binary_op_type_checking_impl": operands._upstream_promote_operands,
    "broadcast_impl_value": operands._upstream_broadcast,
    "__post_init__": operands._upstream_check_handle,
    "_unwrap_if_constexpr": operands._upstream_unwrap,
}


def random_operand(numbers: np.random.Generator, like: Any = None) -> Any:
    """Draw a number or a tensor, often of the same type as `like`."""
    if numbers.random() < 0.25:
        return NUMBERS[numbers.integers(len(NUMBERS))]
    kind = (*KINDS, *POINTERS)[numbers.integers(len(KINDS) + len(POINTERS))]
    if isinstance(like, tl.tensor) and numbers.random() < 0.5:
        kind = like.dtype
    found = tensor(kind, SHAPES[numbers.integers(len(SHAPES))])
    storage, data = get_storage_dtype(kind), found.handle.data
    if storage.kind in "iu":
        limits = np.iinfo(storage)
        few = np.array([limits.min, limits.max, limits.max // 3, 1], storage)
        found.handle.data = numbers.choice(few, data.shape) if numbers.random() < 0.5 else data
    else:
        with np.errstate(all="ignore"):
            found.handle.data = numbers.choice(SPECIAL, data.shape).astype(storage)
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_random_operands_equal_upstream(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of results, and the types of errors, equal those of upstream."""
    numbers = np.random.default_rng(list(OPERATIONS).index(name))
    scope = patch.patch_language()  # it tells unsigned types apart
    semantic = TritonSemantic(upstream.interpreter_builder)

    def result(*given: object) -> list[object]:
        with np.errstate(all="ignore"):
            return [getattr(semantic, name)(*given, *OPERATIONS[name])]

    try:
        for _ in range(400):
            lhs = random_operand(numbers)
            given = lhs, random_operand(numbers, lhs)
            got = outcome(result, *given)
            with monkeypatch.context() as upstream_s:
                for owner, attribute, _ in operands.REPLACEMENTS:
                    if attribute in ORIGINALS:
                        upstream_s.setattr(owner, attribute, ORIGINALS[attribute])
                assert got == outcome(result, *given), (name, given)
    finally:
        scope.restore()


def test_replaced_builtin_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This holds also after a first launch with another function."""
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
    plain = (np.float32(1), np.int64(2), 1.0, tl.constexpr(1), None, tensor(tl.int32, (4,)))
    for given in itertools.product(plain, plain[:-1]):
        for spread in (operands._upstream_broadcast, operands.broadcast):
            with pytest.raises(AttributeError):
                spread(semantic, *given)


def test_cached_numbers_are_read_only(semantic: Any) -> None:
    _, one = operands.promote_operands(semantic, tensor(tl.float32, (4,)), 1.0)
    _, again = operands.promote_operands(semantic, tensor(tl.float32, (4,)), 1.0)
    assert one.handle.data is again.handle.data
    assert one.handle is not again.handle
    with pytest.raises(ValueError, match="read-only"):
        one.handle.data[0] = 2.0


@pytest.mark.parametrize(
    "value",
    [1, None, "x", tl.constexpr(3), [tl.constexpr(1), 2], (tl.constexpr(1), (tl.constexpr(2),))],
    ids=repr,
)
def test_unwrapping_of_constexprs(semantic: Any, value: object) -> None:
    assert repr(operands.unwrap(value)) == repr(operands._upstream_unwrap(value))


def test_handle_with_too_wide_data_is_refused(semantic: Any) -> None:
    with pytest.raises(ValueError, match="exceeds dtype"):
        upstream.TensorHandle(np.zeros(1, np.int64), tl.int32)
    assert upstream.TensorHandle(np.zeros(1, np.bool_), tl.int1).dtype is tl.int1
