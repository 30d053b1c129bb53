"""Patches that make Triton's CPU interpreter compute what a GPU computes.

Upstream stores bf16 and fp8 as bit patterns in unsigned integers, so that arithmetic on them is
wrong, conversions truncate or wrap around, and several corner cases of integers differ from the
hardware. `install()` replaces the interpreter's storage and arithmetic:

- bf16 and fp8 are numpy dtypes of `ml_dtypes`: an elementwise operation computes in float32 and
  rounds once, conversions round to nearest even, and fp8 saturates like `cvt.satfinite`;
- `dot` rounds its sum once and adds it in float32 (integers exactly); float32 operands are
  truncated to tf32 unless the kernel requests `ieee`, as on tensor cores;
- float to int truncates and saturates like `cvt.rzi`, `fma` rounds once, `minimum`, `maximum` and
  their reductions drop NaN like PTX, and sums of 16-bit floats round at every step of a tree;
- a Python number passed to a launch becomes the typed scalar that a compiled kernel gets;
- `device_assert` raises, loops work with numpy >= 2.4, and launches of several threads are
  serialized;
- an access outside the launch's arguments raises, see `modular_kernel.interpreter.bounds`, and
  races between programs are reported on request, see `modular_kernel.interpreter.races`.

Written for triton 3.6 to 3.9. Import this module only if triton is installed, and call `install()`
before the first launch. Not emulated: fp8e4b15, and the order of sums inside a `dot`.
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
from modular_kernel.interpreter.block_types import init_block_type, init_tensor, type_of_tuple
from modular_kernel.interpreter.builder import (
    GpuNumericsBuilder,
    GpuNumericsReduce,
    gpu_options,
    scaled_operand,
)
from modular_kernel.interpreter.dtypes import FLOAT32, TritonObject, storage_of
from modular_kernel.interpreter.operands import REPLACEMENTS
from modular_kernel.machine import interpreted_since_import
from modular_kernel.utils import forks

# The original functions, which the replacements below still call.
_implicit_cvt = upstream._implicit_cvt
_patch_lang = upstream._patch_lang
_patch_lang_tensor = upstream._patch_lang_tensor

# The interpreter stores the running program's index in a global, so launches must be serialized.
_LAUNCH_LOCK = threading.RLock()
# Patches of `tl` by the running launches, innermost last; each can restore what it replaced.
_scopes: list[TritonObject] = []

_INTERPRETED = interpreted_since_import()  # triton reads the variable at import


def active() -> bool:
    """Return whether `@triton.jit` interprets kernels on the CPU in this process."""
    return bool(triton.knobs.runtime.interpret and _INTERPRETED)


def install() -> None:
    """Install a GPU's arithmetic in the interpreter for all later launches. Idempotent."""
    if upstream.InterpreterBuilder is GpuNumericsBuilder:
        return
    with _LAUNCH_LOCK:
        _install()
        upstream.InterpreterBuilder = (
            GpuNumericsBuilder  # last, because other threads check it before they launch
        )


def _install() -> None:
    # Existing semantics objects hold the single builder, so change its class in place.
    upstream.interpreter_builder.__class__ = GpuNumericsBuilder
    upstream.interpreter_builder.options = gpu_options(upstream.interpreter_builder)
    upstream.ReduceOps = GpuNumericsReduce
    upstream.GridExecutor = SerialGrid
    upstream.InterpretedFunction.__call__ = _call_device_function
    upstream._get_np_dtype = storage_of
    upstream._implicit_cvt = _typed_argument
    upstream._patch_lang = _patch_language_once
    upstream._patch_lang_tensor = _patch_tensor
    if hasattr(upstream, "_mxfp_value_handle_to_float32"):
        upstream._mxfp_value_handle_to_float32 = scaled_operand
    tl.block_type.__init__ = init_block_type
    tl.tensor.__init__ = init_tensor
    tl.core._type_for_tuple_values = type_of_tuple
    for owner, name, replacement in REPLACEMENTS:
        setattr(owner, name, replacement)


class SerialGrid(upstream.GridExecutor):  # type: ignore[misc]
    """A launch that runs its programs one after another, without numpy warnings.

    Only one launch runs at a time, also over threads.
    """

    def __call__(self, *args: TritonObject, **kwargs: TritonObject) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        with _LAUNCH_LOCK, np.errstate(all="ignore"):
            run = partial(self._run, *args, **kwargs)
            is_plain_grid = type(self.grid) is tuple and all(
                type(size) is int for size in self.grid
            )
            if self.pre_run_hooks or not is_plain_grid:  # hooks and computed grids cannot be cached
                run()
            else:
                ACCESS_LOG.launch(self.fn, self.grid, arguments, run)

    def _run(self, *args: TritonObject, **kwargs: TritonObject) -> None:
        num_outer_scopes = len(_scopes)
        try:
            super().__call__(*args, **kwargs)
        finally:
            del _scopes[num_outer_scopes:]  # upstream has undone these patches

    def _init_args_hst(
        self, args_dev: tuple[TritonObject, ...], kwargs: dict[str, TritonObject]
    ) -> tuple[list[TritonObject], dict[str, TritonObject]]:
        """Return the launch's arguments, and start checking accesses against them."""
        positional, named = super()._init_args_hst(args_dev, kwargs)
        arguments = dict(zip(self.arg_names, positional, strict=False)) | named
        ACCESS_LOG.begin(self.fn.__name__, arguments)
        return positional, named


def _call_device_function(
    self: TritonObject, *args: TritonObject, **kwargs: TritonObject
) -> TritonObject:
    """Call a helper of a kernel.

    Unlike upstream's method, this does not patch `tl` and wrap errors again: the launch does both.
    """
    return self.rewrite()(*args, **kwargs)


# Passed to `_patch_lang` in place of a kernel: it has every language module as a global.
_ALL_LANGUAGE_MODULES = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def patch_language() -> TritonObject:
    """Patch every language module; return a scope that restores them."""
    return _patch_lang(_ALL_LANGUAGE_MODULES)


def _patch_language_once(fn: TritonObject) -> TritonObject:
    """Patch all language modules at the start of a launch; calls of helpers rely on that."""
    scope = patch_language()
    _scopes.append(scope)  # restored in a child that is forked during the launch
    return scope


class _AfterFork:
    """Fork handler that ends another thread's launch in the child, which lacks that thread."""

    def after_fork(self) -> None:
        if forks.reset_lock(_LAUNCH_LOCK):
            return  # the forking thread's own launch continues
        while _scopes:
            _scopes.pop().restore()
        ACCESS_LOG.forget_launch()


_after_fork = _AfterFork()
forks.on_fork(_after_fork)


def _patch_tensor(tensor: TritonObject, scope: TritonObject) -> None:
    """Apply upstream's patch, and convert one-element arrays to int, which numpy 2.4 rejects."""
    _patch_lang_tensor(tensor, scope)
    for name in ("__index__", "__int__"):
        scope.set_attr(tensor, name, lambda self: int(self.handle.data.item()))


def _typed_argument(arg: TritonObject) -> TritonObject:
    """Return a launch's argument as a compiled kernel gets it.

    That is int32 or int64, float32, int1 or a pointer. Upstream passes a float as a Python number,
    which does not take part in type promotion, and stores integers from 2**31 in 32 bits.
    """
    if isinstance(arg, bool):
        return tl.tensor(upstream.TensorHandle(np.array([arg]), tl.int1), tl.int1)
    if isinstance(arg, int):
        kind = tl.str_to_ty(mangle_type(arg), None)
        return tl.tensor(upstream.TensorHandle(np.array([arg], storage_of(kind)), kind), kind)
    if isinstance(arg, float):
        return tl.tensor(upstream.TensorHandle(np.array([arg], FLOAT32), tl.float32), tl.float32)
    return _implicit_cvt(arg)
