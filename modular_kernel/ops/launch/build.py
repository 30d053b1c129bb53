"""Compiles a C file of this package into a Python module, and keeps the result.

What is kept is code that this process will run, so it is believed only where nobody else can have
written it: the folder and the file belong to this user, and nobody else may write there. The name
of a file has the hash of its bytes, which is compared before the file is loaded: half a file, or
another one, is compiled again. It appears in one step, whole.
"""

import hashlib
import importlib.util
import os
import platform
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from modular_kernel.errors import ModularKernelError
from modular_kernel.printable import printable
from modular_kernel.settings import c_compiler, read_settings

_SECONDS = 120.0  # for a compiler; it takes one or two
_MOST_WORDS = 300
_DIGITS = 32
_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
_FLAGS = ("-O3", "-shared", "-fPIC", "-Wno-psabi")


class BuildError(ModularKernelError):
    """A C file could not be compiled or loaded; the text says why."""


def module_of(
    source: Path, name: str, include_dirs: Sequence[str], release: str = ""
) -> ModuleType:
    """Return the extension module `name` that the C file `source` makes, compiled if need be.

    Kept in MK_CACHE_DIR; where that cannot be, in a folder of this process that goes when it ends.
    release: of what owns those folders, whose headers another one may change.
    BuildError where there is no compiler, or it fails, or what it made cannot be loaded.
    """
    text = source.read_bytes()
    compiler = c_compiler()
    words = (*_FLAGS, *(f"-I{each}" for each in (*include_dirs, *_python_s())))
    facts = (release, compiler, *words, _SUFFIX, platform.machine(), *platform.libc_ver())
    key = hashlib.sha256(text + "\0".join(map(str, facts)).encode()).hexdigest()[:_DIGITS]
    folder = _folder()
    found = _kept(folder, f"{name}-{key}")
    if found is None:
        if compiler is None:
            raise BuildError("there is no C compiler: neither CC, nor gcc, nor clang")
        found = _compiled([compiler, str(source), *words], folder, f"{name}-{key}")
    return _loaded(name, found)


def _python_s() -> tuple[str, ...]:
    """Folders of Python's own headers; Debian's scheme for local packages has none there."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    return (sysconfig.get_paths(scheme=scheme)["include"],)


def _folder() -> Path:
    """Where modules are kept: a folder that only this user can have written."""
    cache_dir = read_settings().cache_dir
    if cache_dir is not None:
        # By user: several may share a cache, and none shall run another's code.
        folder = cache_dir / f"built-{os.geteuid()}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            pass
        else:
            if _mine(folder, stat.S_ISDIR) and os.access(folder, os.W_OK | os.X_OK):
                return folder
    return Path(_of_this_process().name)


@cache
def _of_this_process() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="modular_kernel-built-", ignore_cleanup_errors=True)


def _mine(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether `path` itself, no link, is of this kind and this user's, writable by no other."""
    try:
        status = path.lstat()
    except OSError:
        return False
    mine = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return mine and kind(status.st_mode)


def _kept(folder: Path, stem: str) -> Path | None:
    """Return a module compiled before, its bytes as its name says; remove others of its stem."""
    for path in sorted(folder.glob(f"{stem}-*{_SUFFIX}")):
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]
        except OSError:
            continue
        if _mine(path, stat.S_ISREG) and path.name == f"{stem}-{digest}{_SUFFIX}":
            return path
        path.unlink(missing_ok=True)
    return None


def _compiled(command: list[str], folder: Path, stem: str) -> Path:
    """Run the compiler and keep what it makes, by a name that says what is in it."""
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part:  # mode 0700
        made = Path(part) / f"made{_SUFFIX}"
        try:
            done = subprocess.run(
                [*command, "-o", str(made)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"{_words(command[0])} did not end within {_SECONDS:g} s") from None
        except OSError as error:
            raise BuildError(f"the C compiler could not be run: {_words(str(error))}") from None
        if done.returncode != 0 or not made.is_file():
            raise BuildError(
                f"{_words(command[0])} failed with {done.returncode}: {_words(done.stderr)}"
            )
        made.chmod(0o600)
        with made.open("rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()[:_DIGITS]
            os.fsync(file.fileno())  # the name may not come to the disk before the bytes
        path = folder / f"{stem}-{digest}{_SUFFIX}"
        made.replace(path)
        return path


def _loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise BuildError(f"{name} cannot be loaded: {_words(str(error))}") from None
    return module


def _words(text: str) -> str:
    return printable(" ".join(text.split()), most=_MOST_WORDS)
