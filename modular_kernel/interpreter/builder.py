"""Operations of Triton's interpreter with the rounding of a GPU, installed by `patch.install`.

`GpuNumericsReduce` implements reductions, and `GpuNumericsBuilder` all other `tl` operations. Both
override methods of upstream, which is Triton's interpreter as released. A lane is one element of a
block. A lane is active if the mask of a load or store is True for it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as upstream

from modular_kernel.interpreter.access_log import ACCESS_LOG
from modular_kernel.interpreter.dtypes import (
    BF16,
    BIT_DTYPES,
    BOOL,
    FLOAT32,
    FLOAT64,
    NARROW_DTYPES,
    Array,
    Dtype,
    TritonObject,
    argmax,
    argmin,
    convert,
    erf,
    fused_multiply_add,
    get_storage_dtype,
    round_toward_zero,
    tree_sum,
    truncate_to_tf32,
    widen,
)
from modular_kernel.interpreter.races import Access

# A TensorHandle of upstream: numpy data with a triton type. Upstream has no type annotations.
Handle = Any


def _make_handle(data: Array, tl_dtype: TritonObject) -> Handle:
    """Return a handle of `data` as the scalar type of `tl_dtype`; as int1 if it is boolean."""
    if data.dtype == BOOL:
        return upstream.TensorHandle(data, tl.int1)
    scalar = tl_dtype.scalar
    return upstream.TensorHandle(convert(data, get_storage_dtype(scalar)), scalar)


def _view_as_bits(handle: Handle) -> Handle:
    """Return `handle` with bf16 and fp8 viewed as unsigned integers, for C++ code of upstream."""
    bits = BIT_DTYPES.get(handle.data.dtype)
    if bits is None:
        return handle
    return upstream.TensorHandle(np.ascontiguousarray(handle.data).view(bits), handle.dtype)


def _check_divisor(handle: Handle) -> Handle:
    """Return `handle`. Raise ZeroDivisionError if it contains 0.

    An integer division by 0 returns 0 in numpy, and an undefined value on a GPU.
    """
    if not np.all(handle.data):
        raise ZeroDivisionError("a kernel divides an integer by 0")
    return handle


def make_gpu_options(builder: TritonObject) -> TritonObject:
    """Return the options of `builder`, with device assertions and without overflow checks.

    Upstream checks an int32 operation for overflow by repeating it in int64, which is slow.
    """
    return replace(builder.options, debug=True, sanitize_overflow=False)


class GpuNumericsBuilder(upstream.InterpreterBuilder):  # type: ignore[misc]
    """Builder of `tl` operations with the rounding of a GPU instead of numpy's.

    Methods named `create_...` override upstream's methods of the same name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.options = make_gpu_options(self)

    # Constants.

    def get_bf16(self, value: float) -> Handle:
        return upstream.TensorHandle(np.array([value], dtype=BF16), tl.bfloat16)

    def get_all_ones_value(self, tl_dtype: TritonObject) -> Handle:
        return upstream.TensorHandle(
            np.invert(np.zeros(1, get_storage_dtype(tl_dtype))), tl_dtype.scalar
        )

    # Conversions.

    def cast_impl(self, src: Handle, dst_type: TritonObject) -> Handle:
        return upstream.TensorHandle(
            convert(src.data, get_storage_dtype(dst_type)), dst_type.scalar
        )

    def create_fp_to_fp(
        self, src: Handle, dst_type: TritonObject, rounding_mode: TritonObject
    ) -> Handle:
        data = convert(src.data, get_storage_dtype(dst_type))
        if rounding_mode == upstream._ir.ROUNDING_MODE.RTZ:
            data = round_toward_zero(widen(src.data), data)
        return upstream.TensorHandle(data, dst_type.scalar)

    def create_int_to_ptr(self, src: Handle, dst_type: TritonObject) -> Handle:
        ACCESS_LOG.mark_address_cast()
        return self.create_bitcast(src, dst_type)

    def create_ptr_to_int(self, src: Handle, dst_type: TritonObject) -> Handle:
        ACCESS_LOG.mark_address_cast()
        return self.create_bitcast(src, dst_type)

    # Elementwise operations. Most methods of upstream pass a numpy function to one of these three.

    def unary_op(self, arg: Handle, op: Callable[..., Array]) -> Handle:
        return _make_handle(op(widen(arg.data)), arg.dtype)

    def binary_op(self, lhs: Handle, rhs: Handle, op: Callable[..., Array]) -> Handle:
        left, right = widen(lhs.data), widen(rhs.data)
        if left.dtype == BOOL and op in (np.add, np.subtract, np.multiply):
            # int1 wraps around like other integers. numpy's bool saturates and has no subtraction.
            return _make_handle((op(left.astype(np.int8), right.astype(np.int8)) & 1) != 0, tl.int1)
        return _make_handle(op(left, right), lhs.dtype)

    def ternary_op(
        self, lhs: Handle, rhs: Handle, other: Handle, op: Callable[..., Array]
    ) -> Handle:
        return _make_handle(op(*(widen(arg.data) for arg in (lhs, rhs, other))), other.dtype)

    def create_select(self, cond: Handle, lhs: Handle, rhs: Handle) -> Handle:
        return _make_handle(np.where(cond.data, lhs.data, rhs.data), rhs.dtype)

    def create_minnumf(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(
        self, arg: Handle, lo: Handle, hi: Handle, propagate_nans: TritonObject
    ) -> Handle:
        if propagate_nans == upstream._ir.PROPAGATE_NAN.NONE:
            return self.create_minnumf(self.create_maxnumf(arg, lo), hi)
        return self.ternary_op(arg, lo, hi, np.clip)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        if z.data.dtype == FLOAT64:
            return super().create_fma(x, y, z)
        storage = get_storage_dtype(z.dtype)
        return _make_handle(fused_multiply_add(x.data, y.data, z.data, storage), z.dtype)

    def create_rsqrt(self, arg: Handle) -> Handle:
        return self.unary_op(arg, lambda data: np.reciprocal(np.sqrt(data)))

    def create_erf(self, arg: Handle) -> Handle:
        return self.unary_op(arg, erf)

    def create_sdiv(self, lhs: Handle, rhs: Handle) -> Handle:
        return super().create_sdiv(lhs, _check_divisor(rhs))

    def create_udiv(self, lhs: Handle, rhs: Handle) -> Handle:
        return super().create_udiv(lhs, _check_divisor(rhs))

    def create_srem(self, lhs: Handle, rhs: Handle) -> Handle:
        return super().create_srem(lhs, _check_divisor(rhs))

    def create_urem(self, lhs: Handle, rhs: Handle) -> Handle:
        return super().create_urem(lhs, _check_divisor(rhs))

    def create_ashr(self, lhs: Handle, rhs: Handle) -> Handle:
        # Before triton 3.8, upstream converted its operands to signed integers in place, which
        # changed later results.
        left, right = (x.data.astype(np.dtype(f"i{x.data.dtype.itemsize}")) for x in (lhs, rhs))
        return _make_handle(np.right_shift(left, right), lhs.dtype)

    # Tensors.

    def create_dot(
        self,
        a: Handle,
        b: Handle,
        d: Handle,
        input_precision: TritonObject,
        max_num_imprecise_acc: TritonObject,
    ) -> Handle:
        x, y, accumulator = a.data, b.data, d.data
        if x.dtype.kind in "iu":
            # BLAS supports float64, which is exact here: sums of int8 products are far below 2**53.
            total = np.matmul(x.astype(FLOAT64), y.astype(FLOAT64)).astype(np.int64)
            return _make_handle(total + accumulator, d.dtype)
        if x.dtype == FLOAT32 and input_precision == upstream._ir.INPUT_PRECISION.TF32:
            x, y = truncate_to_tf32(x), truncate_to_tf32(y)
        # Compute in float64, because the float32 result of BLAS depends on the position of a row.
        total = np.matmul(x.astype(FLOAT64), y.astype(FLOAT64))
        total = total if x.dtype == FLOAT64 else total.astype(FLOAT32)
        return _make_handle(total + accumulator, d.dtype)

    def create_histogram(self, data: Handle, bins: int, mask: Handle | None) -> Handle:
        values = data.data
        is_counted = (values >= 0) & (values < bins)
        if mask is not None:
            is_counted &= mask.data
        counts = np.bincount(values[is_counted].astype(np.int64), minlength=bins)
        return _make_handle(counts.astype(np.int32), tl.int32)

    # Memory. All accesses of kernels use these methods, which log them.

    def create_masked_load(
        self,
        ptrs: Handle,
        mask: TritonObject,
        other: Handle | None,
        *policy: TritonObject,
        **policies: TritonObject,
    ) -> Handle:
        element = ptrs.get_element_ty()
        lanes = mask if isinstance(mask, np.ndarray) else mask.data
        volatile = policies.get("is_volatile", policy[-1] if policy else False)
        access = Access.ATOMIC if volatile else Access.READ
        fill = None if other is None else other.data
        loaded = self.read(ptrs.data, lanes, fill, get_storage_dtype(element), access)
        return upstream.TensorHandle(loaded, element)

    def read(
        self,
        pointers: Array,
        lanes: Array,
        fill: Array | None,
        storage: Dtype,
        access: Access = Access.READ,
    ) -> Array:
        """Return the elements at `pointers`, and `fill` or 0 in inactive lanes.

        lanes: mask of the active lanes.
        """
        ACCESS_LOG.record_access(access, pointers, lanes, storage.itemsize, self._program)
        bits = BIT_DTYPES.get(storage, storage)
        if fill is None:
            fill = _make_zeros(pointers.shape, bits)
        elif bits is not storage:
            fill = np.ascontiguousarray(convert(fill, storage)).view(bits)
        loaded: Array = upstream._interpreter.load(pointers, lanes, fill, bits)
        return loaded if bits is storage else loaded.view(storage)

    def create_masked_store(
        self,
        ptrs: Handle,
        value: Handle,
        mask: TritonObject,
        *policy: TritonObject,
        **policies: TritonObject,
    ) -> TritonObject:
        lanes = mask if isinstance(mask, np.ndarray) else mask.data
        return self.write(ptrs.data, value.data, lanes, get_storage_dtype(ptrs.get_element_ty()))

    def write(self, pointers: Array, values: Array, lanes: Array, storage: Dtype) -> TritonObject:
        """Write elements at `pointers` in the active lanes.

        lanes: mask of the active lanes.
        """
        ACCESS_LOG.record_access(Access.WRITE, pointers, lanes, storage.itemsize, self._program)
        bits = BIT_DTYPES.get(values.dtype)
        if bits is not None:
            values = np.ascontiguousarray(values).view(bits)
        return upstream._interpreter.store(pointers, values, lanes)

    def create_atomic_cas(
        self, ptr: Handle, cmp: Handle, val: Handle, sem: TritonObject, scope: TritonObject
    ) -> Handle:
        self._record_atomic(ptr, np.ones(ptr.data.shape, BOOL), val, sem)
        old = super().create_atomic_cas(ptr, _view_as_bits(cmp), _view_as_bits(val), sem, scope)
        return upstream.TensorHandle(old.data.view(cmp.data.dtype), cmp.dtype.scalar)

    def create_atomic_rmw(
        self,
        op: TritonObject,
        ptr: Handle,
        val: Handle,
        mask: Handle,
        sem: TritonObject,
        scope: TritonObject,
    ) -> Handle:
        self._record_atomic(ptr, mask.data, val, sem)
        if val.data.dtype not in NARROW_DTYPES:
            return super().create_atomic_rmw(op, ptr, val, mask, sem, scope)
        if op not in (upstream._ir.ATOMIC_OP.FADD, upstream._ir.ATOMIC_OP.ADD):
            raise ValueError(f"atomic {op} of {val.dtype}: only add exists")
        return upstream.TensorHandle(_atomic_add(ptr.data, val.data, mask.data), val.dtype.scalar)

    def _record_atomic(self, ptr: Handle, lanes: Array, value: Handle, sem: TritonObject) -> None:
        nbytes = value.data.dtype.itemsize
        ACCESS_LOG.record_access(Access.ATOMIC, ptr.data, lanes, nbytes, self._program)
        if sem == upstream._ir.MEM_SEMANTIC.ACQUIRE_RELEASE:
            ACCESS_LOG.record_acquire_release(ptr.data, lanes, self._program)

    @property
    def _program(self) -> int:
        """Index of the running program in execution order."""
        (x, y, z), (_, rows, columns) = self.grid_idx, self.grid_dim
        return int((x * rows + y) * columns + z)

    # `python -O` removes the `assert` statement of upstream, so this method raises explicitly.

    def create_assert(self, condition: Handle, message: str) -> None:
        if not condition.data.all():
            raise AssertionError(message)


@lru_cache(maxsize=1024)
def _make_zeros(shape: tuple[int, ...], storage: Dtype) -> Array:
    """Return read-only zeros."""
    zeros = np.zeros(shape, storage)
    zeros.flags.writeable = False
    return zeros


def _atomic_add(ptrs: Array, values: Array, mask: Array) -> Array:
    """Add elements one by one, rounding each sum. Return the old values, and 0 in inactive lanes.

    mask: the active lanes.
    """
    addresses, lanes = ptrs.ravel(), np.broadcast_to(mask, ptrs.shape).ravel()
    addends = np.broadcast_to(values, ptrs.shape).ravel().astype(FLOAT32)
    bits, old = BIT_DTYPES[values.dtype], np.zeros(addresses.shape, values.dtype)
    lane, fill = np.ones(1, BOOL), np.zeros(1, bits)
    for i in np.flatnonzero(lanes):
        address = addresses[i : i + 1]
        current = upstream._interpreter.load(address, lane, fill, bits).view(values.dtype)
        old[i] = current[0]
        total = convert(current.astype(FLOAT32) + addends[i], values.dtype)
        upstream._interpreter.store(address, total.view(bits), lane)
    return old.reshape(ptrs.shape)


def convert_scaled_operand(value: Handle) -> Array:
    """Convert an operand of `tl.dot_scaled` to float32, which is exact.

    Upstream has already unpacked fp4 operands.
    """
    data: Array = value.data.astype(FLOAT32)
    return data


# (combine function of triton, numpy reduction of values, numpy reduction to indices). The numpy
# reductions drop NaN, as PTX does.
_NAN_DROPPING_REDUCTIONS = (
    ("_elementwise_max", np.fmax.reduce, None),
    ("_elementwise_min", np.fmin.reduce, None),
    ("_argmax_combine_tie_break_left", np.fmax.reduce, argmax),
    ("_argmax_combine_tie_break_fast", np.fmax.reduce, argmax),
    ("_argmin_combine_tie_break_left", np.fmin.reduce, argmin),
    ("_argmin_combine_tie_break_fast", np.fmin.reduce, argmin),
)


# Combine functions of modular_kernel.ops.kernels.extrema -> equivalent numpy reductions, because
# upstream would call the Python function for every pair of values.
_NAN_PROPAGATING_REDUCTIONS = {"maximum_nan": np.maximum.reduce, "minimum_nan": np.minimum.reduce}


class GpuNumericsReduce(upstream.ReduceOps):  # type: ignore[misc]
    """Reductions with the rounding and the treatment of NaN of a GPU."""

    def apply_impl(self, input: tuple[TritonObject, ...]) -> TritonObject:
        for name, reduce_values, reduce_indices in _NAN_DROPPING_REDUCTIONS:
            if self.combine_fn is getattr(tl.standard, name):
                return self.min_max(input[0], reduce_values, reduce_indices)
        reduction = _NAN_PROPAGATING_REDUCTIONS.get(getattr(self.combine_fn, "__name__", ""))
        if reduction is not None:
            return self.min_max(input[0], reduction, None)
        return super().apply_impl(input)

    def sum(self, input: TritonObject) -> TritonObject:
        data = input.handle.data
        if data.dtype in NARROW_DTYPES or data.dtype == np.float16:
            return self.to_tensor(tree_sum(data, self.axis, self.keep_dims), input.dtype)
        total = np.sum(data, axis=self.axis, keepdims=self.keep_dims, dtype=data.dtype)
        return self.to_tensor(total, input.dtype)
