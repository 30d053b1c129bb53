"""Compilation of a C file of this package into a cached Python extension module.

`cuda_replay` and `checkpoints.packed_words` load their C code through `load_module`.
"""

import importlib.util
import platform
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from modular_kernel.errors import ModularKernelError
from modular_kernel.replay.launch.compiled_files import build_cached, find_cached, make_cache_key
from modular_kernel.settings import find_c_compiler
from modular_kernel.text import escape_nonprintable

_TIMEOUT_SECONDS = 120.0  # the compiler usually takes one or two seconds
_MAX_ERROR_CHARS = 300  # maximum length of the compiler's output in a message
_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
_FLAGS = ("-O3", "-shared", "-fPIC", "-Wno-psabi")


class BuildError(ModularKernelError):
    """A C file could not be compiled or loaded."""


def load_module(
    source: Path, name: str, include_dirs: Sequence[str], release: str = ""
) -> ModuleType:
    """Load the extension module of the C file `source`. Compile it if it is not cached.

    The compiled file is stored in MK_CACHE_DIR, or in a temporary folder of this process if
    MK_CACHE_DIR cannot be used.

    name: name of the module, which must match the C file.
    include_dirs: folders of headers that the C file includes, in addition to Python's headers.
    release: version of the library that owns `include_dirs`. It is part of the cache key.

    Raises BuildError if there is no compiler, if the compiler fails, or if the result cannot be
    loaded.
    """
    compiler = find_c_compiler()
    flags = (*_FLAGS, *(f"-I{folder}" for folder in (*include_dirs, *_get_python_include_dirs())))
    versions = (release, compiler, *flags, _SUFFIX, platform.machine(), *platform.libc_ver())
    stem = f"{name}-{make_cache_key(*versions, files=(source,))}"
    library = find_cached(stem, _SUFFIX)
    if library is None:
        if compiler is None:
            raise BuildError("no C compiler found (CC, gcc or clang)")
        command = [compiler, str(source), *flags]
        try:
            library = build_cached(stem, _SUFFIX, lambda output: _compile(command, output))
        except OSError as error:
            raise BuildError(
                f"{name} could not be written: {_format_one_line(str(error))}"
            ) from None
    return _import_extension(name, library)


def _get_python_include_dirs() -> tuple[str, ...]:
    # Debian's default scheme is posix_local, whose include folder has no headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    return (sysconfig.get_paths(scheme=scheme)["include"],)


def _compile(command: list[str], output: Path) -> None:
    """Run the compiler. Raises BuildError if it fails or does not produce the file `output`."""
    try:
        process = subprocess.run(
            [*command, "-o", str(output)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"{_format_one_line(command[0])} did not end within {_TIMEOUT_SECONDS:g} s"
        ) from None
    except OSError as error:
        raise BuildError(
            f"the C compiler could not be run: {_format_one_line(str(error))}"
        ) from None
    if process.returncode != 0 or not output.is_file():
        raise BuildError(
            f"{_format_one_line(command[0])} failed with {process.returncode}: "
            f"{_format_one_line(process.stderr)}"
        )


def _import_extension(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError, RuntimeError, SystemError) as error:
        raise BuildError(f"{name} cannot be loaded: {_format_one_line(str(error))}") from None
    return module


def _format_one_line(text: str) -> str:
    return escape_nonprintable(" ".join(text.split()), max_chars=_MAX_ERROR_CHARS)
