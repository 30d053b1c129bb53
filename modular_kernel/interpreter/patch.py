"""Patches that make the results of Triton's CPU interpreter match the results of a GPU.

Triton's interpreter as released ("upstream") stores bf16 and fp8 as bit patterns in unsigned
integers. Arithmetic on them is wrong, conversions truncate or wrap around, and several corner cases
of integers differ from the hardware. `install()` replaces the storage and the arithmetic:

- bf16 and fp8 are numpy dtypes of `ml_dtypes`. An elementwise operation computes in float32 and
  rounds once. Conversions round to nearest even, and fp8 saturates like `cvt.satfinite`.
- `dot` rounds its sum once and adds it to the accumulator in float32 (integers exactly). Float32
  operands are truncated to tf32, as on tensor cores, unless the kernel requests `ieee`.
- A conversion from float to int truncates and saturates like `cvt.rzi`. `fma` rounds once.
  `minimum`, `maximum` and their reductions drop NaN like PTX. Sums of 16-bit floats round at every
  step of a tree.
- A Python number that is passed to a launch becomes a scalar of the type that a compiled kernel
  gets.
- `device_assert` raises, loops work with numpy >= 2.4, and launches of several threads are
  serialized.
- An access outside the arguments of the launch raises (`modular_kernel.interpreter.bounds`), and
  races between programs can be reported (`modular_kernel.interpreter.races`).
- Invalid launch options such as three warps raise, as in Triton's compiler. Unrolled loops with too
  many iterations to compile in a reasonable time also raise.

The patches are written for triton 3.6 to 3.9. Import this module only if triton is installed, and
call `install()` before the first launch. fp8e4b15 and the order of sums inside a `dot` are not
emulated.
"""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as upstream
from triton.runtime.jit import mangle_type

from modular_kernel.interpreter.access_log import ACCESS_LOG
from modular_kernel.interpreter.block_types import init_block_type, init_tensor, make_tuple_type
from modular_kernel.interpreter.builder import (
    GpuNumericsBuilder,
    GpuNumericsReduce,
    convert_scaled_operand,
    make_gpu_options,
)
from modular_kernel.interpreter.dtypes import FLOAT32, TritonObject, get_storage_dtype
from modular_kernel.interpreter.operands import REPLACEMENTS
from modular_kernel.machine import was_imported_with_interpreter
from modular_kernel.utils import forks

# The original functions, which the replacements below call.
_implicit_cvt = upstream._implicit_cvt
_patch_lang = upstream._patch_lang
_patch_lang_tensor = upstream._patch_lang_tensor

# Launch options that must be a power of two, with the maximum that NVIDIA GPUs allow.
_MAX_BY_OPTION = {"num_warps": 32, "num_ctas": 16}
_MAX_UNROLLED = 512  # maximum number of iterations of `tl.static_range`

# The interpreter stores the index of the running program in a global, so launches are serialized.
_LAUNCH_LOCK = threading.RLock()
# Scopes of the running launches, innermost last. A scope restores the functions of `tl` that its
# launch has replaced.
_scopes: list[TritonObject] = []

_INTERPRETED = was_imported_with_interpreter()  # triton reads TRITON_INTERPRET when it is imported


def is_active() -> bool:
    """Return whether `@triton.jit` interprets kernels on the CPU in this process."""
    return bool(triton.knobs.runtime.interpret and _INTERPRETED)


def install() -> None:
    """Install the arithmetic of a GPU in the interpreter, for all later launches. Idempotent."""
    if upstream.InterpreterBuilder is GpuNumericsBuilder:
        return
    with _LAUNCH_LOCK:
        _install()
        # Set this attribute last, because other threads check it before they launch.
        upstream.InterpreterBuilder = GpuNumericsBuilder


def _install() -> None:
    # Existing objects refer to the single builder, so its class is changed in place.
    upstream.interpreter_builder.__class__ = GpuNumericsBuilder
    upstream.interpreter_builder.options = make_gpu_options(upstream.interpreter_builder)
    upstream.ReduceOps = GpuNumericsReduce
    upstream.GridExecutor = SerialGrid
    upstream.InterpretedFunction.__call__ = _call_device_function
    upstream._get_np_dtype = get_storage_dtype
    upstream._implicit_cvt = _make_typed_argument
    upstream._patch_lang = _patch_language_for_launch
    upstream._patch_lang_tensor = _patch_tensor
    if hasattr(upstream, "_mxfp_value_handle_to_float32"):
        upstream._mxfp_value_handle_to_float32 = convert_scaled_operand
    tl.block_type.__init__ = init_block_type
    tl.tensor.__init__ = init_tensor
    tl.core._type_for_tuple_values = make_tuple_type
    for owner, name, replacement in REPLACEMENTS:
        setattr(owner, name, replacement)


class SerialGrid(upstream.GridExecutor):  # type: ignore[misc]
    """A launch that runs its programs one after another, without numpy warnings.

    Only one launch runs at a time, even if several threads launch.
    """

    def __call__(self, *args: TritonObject, **kwargs: TritonObject) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        _check_options(self.fn.__name__, kwargs)
        with _LAUNCH_LOCK, np.errstate(all="ignore"):
            run = partial(self._run, *args, **kwargs)
            is_constant_grid = type(self.grid) is tuple and all(
                type(size) is int for size in self.grid
            )
            # Launches with hooks or with a computed grid cannot be cached.
            if self.pre_run_hooks or not is_constant_grid:
                run()
            else:
                ACCESS_LOG.launch(self.fn, self.grid, arguments, run)

    def _run(self, *args: TritonObject, **kwargs: TritonObject) -> None:
        num_outer_scopes = len(_scopes)
        try:
            super().__call__(*args, **kwargs)
        finally:
            del _scopes[num_outer_scopes:]  # upstream has restored them

    def _init_args_hst(
        self, args_dev: tuple[TritonObject, ...], kwargs: dict[str, TritonObject]
    ) -> tuple[list[TritonObject], dict[str, TritonObject]]:
        """Return the arguments of the launch, and start to check accesses against them."""
        positional, named = super()._init_args_hst(args_dev, kwargs)
        arguments = dict(zip(self.arg_names, positional, strict=False)) | named
        ACCESS_LOG.begin(self.fn.__name__, arguments)
        return positional, named


def _check_options(kernel: str, options: dict[str, TritonObject]) -> None:
    """Raise ValueError for a launch option that Triton's compiler refuses.

    options: the keyword arguments of the launch, which upstream ignores.
    """
    for name, maximum in _MAX_BY_OPTION.items():
        value = options.get(name)
        if value is not None and (not 0 < value <= maximum or value & (value - 1)):
            raise ValueError(
                f"{kernel}: {name} is {value}, need a power of two from 1 to {maximum}"
            )


def _call_device_function(
    self: TritonObject, *args: TritonObject, **kwargs: TritonObject
) -> TritonObject:
    """Call a helper of a kernel.

    Upstream's method would also patch `tl` and wrap errors, which the launch has done already.
    """
    return self.rewrite()(*args, **kwargs)


# Passed to `_patch_lang` in place of a kernel. Its globals are all language modules.
_ALL_LANGUAGE_MODULES = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def patch_language() -> TritonObject:
    """Patch all language modules. Return a scope that restores them."""
    scope = _patch_lang(_ALL_LANGUAGE_MODULES)
    for module in (tl, tl.core):
        scope.set_attr(module, "static_range", partial(_unroll, module.static_range))
    return scope


def _unroll(make_range: TritonObject, *args: TritonObject, **kwargs: TritonObject) -> range:
    """Return the iterations of `tl.static_range`. Raise ValueError if there are too many.

    make_range: upstream's replacement of `tl.static_range`.
    """
    iterations: range = make_range(*args, **kwargs)
    if len(iterations) > _MAX_UNROLLED:
        raise ValueError(f"{len(iterations)} unrolled iterations, need at most {_MAX_UNROLLED}")
    return iterations


def _patch_language_for_launch(fn: TritonObject) -> TritonObject:
    """Patch all language modules at the start of a launch, for the kernel and its helpers."""
    scope = patch_language()
    _scopes.append(scope)  # for a child that is forked during the launch
    return scope


class _AfterFork:
    """Fork handler that ends launches of other threads in the child, which has only one thread."""

    def after_fork(self) -> None:
        if forks.reset_lock(_LAUNCH_LOCK):
            return  # the forking thread is in a launch, which continues
        while _scopes:
            _scopes.pop().restore()
        ACCESS_LOG.reset_launch()


_after_fork = _AfterFork()
forks.on_fork(_after_fork)


def _patch_tensor(tensor: TritonObject, scope: TritonObject) -> None:
    """Apply upstream's patch, with a conversion of one-element arrays to int.

    numpy 2.4 rejects upstream's conversion.
    """
    _patch_lang_tensor(tensor, scope)
    for name in ("__index__", "__int__"):
        scope.set_attr(tensor, name, lambda self: int(self.handle.data.item()))


def _make_typed_argument(arg: TritonObject) -> TritonObject:
    """Return an argument of a launch with the type that it has in a compiled kernel.

    The type is int32, int64, float32, int1 or a pointer. Upstream passes a float as a Python
    number, which does not take part in type promotion, and stores integers of 2**31 or more in 32
    bits.
    """
    if isinstance(arg, bool):
        return tl.tensor(upstream.TensorHandle(np.array([arg]), tl.int1), tl.int1)
    if isinstance(arg, int):
        tl_dtype = tl.str_to_ty(mangle_type(arg), None)
        return tl.tensor(
            upstream.TensorHandle(np.array([arg], get_storage_dtype(tl_dtype)), tl_dtype), tl_dtype
        )
    if isinstance(arg, float):
        return tl.tensor(upstream.TensorHandle(np.array([arg], FLOAT32), tl.float32), tl.float32)
    return _implicit_cvt(arg)
