"""The cache of compiled objects never returns a wrong object, even if its folder is corrupted."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from experts.cutlass import compiled_kernels
from modular_kernel.replay.launch.compiled_files import build_cached, find_cached, make_cache_key

STEM, SUFFIX = "kernel-0", ".o"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / f"built-{os.geteuid()}"


def write_content(content: bytes = b"code") -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None  # type: ignore[func-returns-value]


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def make_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("put", [make_pipe, make_link_to_itself, make_dangling_link, Path.mkdir])
def test_entries_that_are_not_files_are_ignored(folder: Path, put: Callable[[Path], None]) -> None:
    path = build_cached(STEM, SUFFIX, write_content())
    path.unlink()
    put(path)
    assert find_cached(STEM, SUFFIX) is None
    rebuilt = build_cached(STEM, SUFFIX, write_content())
    assert rebuilt.read_bytes() == b"code"
    # A folder is not replaced. The object is then stored in a temporary folder of the process.
    assert (rebuilt == path) != (put is Path.mkdir)


def test_compilation_succeeds_if_the_folder_is_removed(folder: Path) -> None:
    build_cached(STEM, SUFFIX, write_content()).unlink()

    def make(path: Path) -> None:
        path.write_bytes(b"code")
        folder.rmdir()

    assert build_cached(STEM, SUFFIX, make).read_bytes() == b"code"


def test_objects_of_a_read_only_folder_are_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_cached(STEM, SUFFIX, write_content())
    access = os.access
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: access(path, mode) and not (Path(path) == folder and mode & os.W_OK),
    )
    assert find_cached(STEM, SUFFIX) == path
    assert find_cached("kernel-1", SUFFIX) is None
    built = build_cached("kernel-1", SUFFIX, write_content(b"more"))
    assert find_cached("kernel-1", SUFFIX) == built
    assert list(folder.iterdir()) == [path]


def test_an_error_of_the_compiler_is_raised_and_nothing_is_cached(folder: Path) -> None:
    def make(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no such GPU")

    with pytest.raises(RuntimeError, match="no such GPU"):
        build_cached(STEM, SUFFIX, make)
    assert find_cached(STEM, SUFFIX) is None
    assert list(folder.iterdir()) == []


def test_a_file_stem_is_not_a_glob_pattern(folder: Path) -> None:
    build_cached("kernel[1]*", SUFFIX, write_content())
    assert find_cached("kernel[1]*", SUFFIX) is not None
    assert find_cached("kernel*", SUFFIX) is None


def test_keys_distinguish_sources_and_options(tmp_path: Path) -> None:
    def key(*options: object, **contents: bytes) -> str:
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        return make_cache_key(*options, files=tuple(tmp_path / name for name in contents))

    keys = [
        key(a=b"xy", b=b"z"), key(a=b"x", b=b"yz"), key(a=b"xyz", b=b""), key(a=b"xyz"),
        key(b=b"xyz"), key("z", a=b"xy"), key("b", "c"), key("b\0c"), key("bc"), key("c", "b"),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key("b", 1, a=b"x") == key("b", "1", a=b"x")


# ------------------------------------------------------------------------------ kernels in CuTe DSL


@pytest.fixture
def loader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the DSL's loader by a stand-in, and return its state. `loads` lists loaded files."""
    stand_in: Any = ModuleType("cutlass")
    state = SimpleNamespace(loads=[], read=lambda path: {"kernel": path.read_bytes()})

    def load_module(path: str, *, enable_tvm_ffi: bool) -> object:
        assert enable_tvm_ffi
        state.loads.append(path)
        return state.read(Path(path))

    stand_in.cute = SimpleNamespace(runtime=SimpleNamespace(load_module=load_module))
    monkeypatch.setitem(sys.modules, "cutlass", stand_in)
    monkeypatch.setattr(compiled_kernels, "version", lambda package: state.version)
    state.version = "4.2.0"
    return state


class FakeCompiledKernel:
    def export_to_c(self, path: str, name: str) -> None:
        Path(path).write_bytes(name.encode())


def make_kernel(arch: str = "sm_90a") -> compiled_kernels.CompiledKernel:
    return compiled_kernels.CompiledKernel("kernel", arch, lambda options: FakeCompiledKernel())


def test_a_cached_object_is_loaded(loader: SimpleNamespace) -> None:
    assert isinstance(make_kernel().load_or_compile(), FakeCompiledKernel)
    path = make_kernel().compile_to_cache()
    assert make_kernel().compile_to_cache() == path
    assert make_kernel().load_or_compile() == b"kernel"
    assert loader.loads == [str(path)]


def test_an_object_of_another_gpu_or_release_is_not_loaded(loader: SimpleNamespace) -> None:
    make_kernel().compile_to_cache()
    assert isinstance(make_kernel("sm_100a").load_or_compile(), FakeCompiledKernel)
    loader.version = "4.3.0"
    assert isinstance(make_kernel().load_or_compile(), FakeCompiledKernel)
    assert loader.loads == []


def test_a_damaged_object_is_not_loaded(loader: SimpleNamespace) -> None:
    path = make_kernel().compile_to_cache()
    path.write_bytes(path.read_bytes()[:3])
    assert isinstance(make_kernel().load_or_compile(), FakeCompiledKernel)
    assert loader.loads == []
    assert not path.exists()


@pytest.mark.parametrize("error", [RuntimeError, OSError, ImportError, KeyError, AttributeError])
def test_an_object_that_fails_to_load_is_recompiled(
    loader: SimpleNamespace, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path) -> object:
        raise error("undefined symbol")

    make_kernel().compile_to_cache()
    loader.read = fail
    assert isinstance(make_kernel().load_or_compile(), FakeCompiledKernel)
    assert "recompiling kernel: " in caplog.text
