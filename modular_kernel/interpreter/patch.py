"""Triton's CPU interpreter, made to give the numbers a GPU gives.

Upstream keeps bf16 and fp8 as bit patterns in unsigned integers, so arithmetic on them is garbage,
conversions truncate or wrap, and several integer corners differ from the hardware. `install()`
replaces the interpreter's storage and arithmetic:

- bf16 and fp8 are numpy dtypes of `ml_dtypes`: an elementwise operation computes in float32 and
  rounds once, conversions round to nearest even, fp8 saturates as `cvt.satfinite` does;
- `dot` adds its sum, rounded once, in float32 (integers exactly), and float32 operands are cut to
  tf32 unless the kernel asks for `ieee`, as tensor cores do;
- float to int truncates and saturates as `cvt.rzi` does, `fma` rounds once, `minimum`, `maximum`
  and their reductions drop NaN as PTX does, sums of 16-bit floats round at every step of a tree;
- a Python number given to a launch becomes the typed scalar that a compiled kernel gets;
- `device_assert` raises, loops work with numpy >= 2.4, launches from several threads take turns;
- an access outside the launch's arguments raises, see `modular_kernel.interpreter.bounds`, and
  programs that race are found where somebody watches, see `modular_kernel.interpreter.races`.

Written against triton 3.6 to 3.9. Import it only where triton exists, and call `install()` before
the first launch. Not emulated: fp8e4b15, the order of sums inside a `dot`.
"""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as upstream
from triton.runtime.jit import mangle_type

from modular_kernel.interpreter.access_log import watch
from modular_kernel.interpreter.block_types import init_block_type, init_tensor, type_of_tuple
from modular_kernel.interpreter.builder import (
    HonestBuilder,
    HonestReduce,
    honest_options,
    scaled_operand,
)
from modular_kernel.interpreter.dtypes import FLOAT32, Foreign, storage_of
from modular_kernel.interpreter.operands import INSTALLED
from modular_kernel.machine import interpreted_since_import
from modular_kernel.utils import forks

# The originals that the replacements below still call.
_implicit_cvt = upstream._implicit_cvt
_patch_lang = upstream._patch_lang
_patch_lang_tensor = upstream._patch_lang_tensor

# The interpreter keeps the running program's index in one global, so one launch at a time.
_ONE_LAUNCH = threading.RLock()
_scopes: list[Foreign] = []  # what launches under way have patched, the innermost last

_INTERPRETED = interpreted_since_import()  # a variable set later changes no function of triton's


def active() -> bool:
    """Tell whether `@triton.jit` interprets kernels on the CPU in this process."""
    return bool(triton.knobs.runtime.interpret and _INTERPRETED)


def install() -> None:
    """Put the honest arithmetic in place of upstream's, for every later launch. Idempotent."""
    if upstream.InterpreterBuilder is HonestBuilder:
        return
    with _ONE_LAUNCH:
        _install()
        upstream.InterpreterBuilder = HonestBuilder  # last: other threads look at it, and launch


def _install() -> None:
    # Semantics objects already hold the one builder there is, so it changes its class in place.
    upstream.interpreter_builder.__class__ = HonestBuilder
    upstream.interpreter_builder.options = honest_options(upstream.interpreter_builder)
    upstream.ReduceOps = HonestReduce
    upstream.GridExecutor = SerialGrid
    upstream.InterpretedFunction.__call__ = _call_device_function
    upstream._get_np_dtype = storage_of
    upstream._implicit_cvt = _as_argument
    upstream._patch_lang = _patch_language_once
    upstream._patch_lang_tensor = _patch_tensor
    if hasattr(upstream, "_mxfp_value_handle_to_float32"):
        upstream._mxfp_value_handle_to_float32 = scaled_operand
    tl.block_type.__init__ = init_block_type
    tl.tensor.__init__ = init_tensor
    tl.core._type_for_tuple_values = type_of_tuple
    for owner, name, replacement in INSTALLED:
        setattr(owner, name, replacement)


class SerialGrid(upstream.GridExecutor):  # type: ignore[misc]
    """A launch: all programs one after the other, one launch at a time, silent as a GPU."""

    def __call__(self, *args: Foreign, **kwargs: Foreign) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        with _ONE_LAUNCH, np.errstate(all="ignore"):
            run = partial(self._run, *args, **kwargs)
            plain = type(self.grid) is tuple and all(type(each) is int for each in self.grid)
            if self.pre_run_hooks or not plain:  # what they do is not known
                run()
            else:
                watch.launch(self.fn, self.grid, arguments, run)

    def _run(self, *args: Foreign, **kwargs: Foreign) -> None:
        outer = len(_scopes)
        try:
            super().__call__(*args, **kwargs)
        finally:
            del _scopes[outer:]  # upstream has restored them

    def _init_args_hst(
        self, args_dev: tuple[Foreign, ...], kwargs: dict[str, Foreign]
    ) -> tuple[list[Foreign], dict[str, Foreign]]:
        """Return the arguments where programs find them; watch that nothing else is touched."""
        positional, named = super()._init_args_hst(args_dev, kwargs)
        arguments = dict(zip(self.arg_names, positional, strict=False)) | named
        watch.begin(self.fn.__name__, arguments)
        return positional, named


def _call_device_function(self: Foreign, *args: Foreign, **kwargs: Foreign) -> Foreign:
    """Call a helper of a kernel. The launch has patched `tl` already, and it wraps errors."""
    return self.rewrite()(*args, **kwargs)


# Stands for any kernel where `_patch_lang` looks for the language modules that it uses.
_EVERY_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def patch_language() -> Foreign:
    """Patch every language module; the scope that is returned restores them."""
    return _patch_lang(_EVERY_LANGUAGE)


def _patch_language_once(fn: Foreign) -> Foreign:
    """Patch all language modules for a launch, so that helpers need not do so at each call."""
    scope = patch_language()
    _scopes.append(scope)  # for a child that is forked during the launch
    return scope


class _AfterFork:
    """Ends, in a forked child, the launch of a thread that is not there."""

    def after_fork(self) -> None:
        if forks.renew(_ONE_LAUNCH):
            return  # the launch is the forking thread's, and goes on
        while _scopes:
            _scopes.pop().restore()
        watch.forget_launch()


_after_fork = _AfterFork()
forks.on_fork(_after_fork)


def _patch_tensor(tensor: Foreign, scope: Foreign) -> None:
    """Upstream's patch, and integers out of one-element arrays, which numpy 2.4 refuses."""
    _patch_lang_tensor(tensor, scope)
    for name in ("__index__", "__int__"):
        scope.set_attr(tensor, name, lambda self: int(self.handle.data.item()))


def _as_argument(arg: Foreign) -> Foreign:
    """Return a launch's argument as a compiled kernel sees it.

    That is int32 or int64, float32, int1 or a pointer.

    Upstream passes a float on as a Python number, which would not take part in type promotion,
    and keeps integers from 2**31 in 32 bits.
    """
    if isinstance(arg, bool):
        return tl.tensor(upstream.TensorHandle(np.array([arg]), tl.int1), tl.int1)
    if isinstance(arg, int):
        kind = tl.str_to_ty(mangle_type(arg), None)
        return tl.tensor(upstream.TensorHandle(np.array([arg], storage_of(kind)), kind), kind)
    if isinstance(arg, float):
        return tl.tensor(upstream.TensorHandle(np.array([arg], FLOAT32), tl.float32), tl.float32)
    return _implicit_cvt(arg)
