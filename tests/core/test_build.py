"""Compiled C extensions are cached atomically, and only files of the current user are loaded."""

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modular_kernel.replay.launch import build, cuda_replay
from modular_kernel.replay.launch.build import BuildError, load_module
from modular_kernel.settings import find_c_compiler

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile with")

SOURCE_TEMPLATE = """#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "mk_answer", NULL, -1, methods};
PyMODINIT_FUNC PyInit_mk_answer(void) { return PyModule_Create(&definition); }
"""
# A separate process loads the extension, because a damaged extension can crash its process.
LOAD_PROGRAM = """
import sys
from pathlib import Path
from modular_kernel.replay.launch.build import load_module
print(load_module(Path(sys.argv[1]), "mk_answer", ()).answer())
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a C file after setting an empty cache folder and a compiler that records its runs."""
    path = tmp_path / "answer.c"
    path.write_text(SOURCE_TEMPLATE.replace("ANSWER", "42"), encoding="utf-8")
    compiler = tmp_path / "counting-cc"
    compiler.write_text(f'#!/bin/sh\necho run >> {tmp_path}/runs\nexec gcc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path / "cache"))
    return path


def load_answer(source: Path) -> str:
    process = subprocess.run(
        [sys.executable, "-c", LOAD_PROGRAM, str(source)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, (process.returncode, process.stderr)
    return process.stdout.strip()


def count_compiler_runs(source: Path) -> int:
    path = source.parent / "runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


def find_cached_file(source: Path) -> Path:
    (path,) = (source.parent / "cache").rglob("mk_answer-*")
    return path


def test_extension_is_compiled_once_and_cached_for_this_user_only(source: Path) -> None:
    previous_mask = os.umask(0)
    try:
        assert load_answer(source) == "42"
    finally:
        os.umask(previous_mask)
    assert load_answer(source) == "42"
    assert count_compiler_runs(source) == 1
    assert find_cached_file(source).stat().st_mode & 0o777 == 0o600
    assert find_cached_file(source).parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in find_cached_file(source).parent.iterdir()] == [
        find_cached_file(source).name
    ]


def test_changed_source_is_compiled_again(source: Path) -> None:
    assert load_answer(source) == "42"
    source.write_text(SOURCE_TEMPLATE.replace("ANSWER", "43"), encoding="utf-8")
    assert load_answer(source) == "43"


@pytest.mark.parametrize("damage", ["truncated", "empty", "forged", "a link", "by others"])
def test_damaged_or_untrusted_files_are_not_loaded(source: Path, damage: str) -> None:
    assert load_answer(source) == "42"
    path = find_cached_file(source)
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) * 3 // 4])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "forged":
        path.write_bytes(content[:-1] + b"!")
    elif damage == "a link":
        link_target = source.parent / "elsewhere.so"
        path.rename(link_target)
        path.symlink_to(link_target)
    else:
        path.chmod(0o666)
    assert load_answer(source) == "42"
    assert count_compiler_runs(source) == 2
    assert not find_cached_file(source).is_symlink()
    assert find_cached_file(source).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_can_write_is_not_used(source: Path) -> None:
    folder = source.parent / "cache" / f"built-{os.geteuid()}"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert load_answer(source) == "42"
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a folder")
def test_a_folder_of_another_user_is_not_used(source: Path) -> None:
    folder = source.parent / "cache" / f"built-{os.geteuid()}"
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder, 12345, -1)
    assert load_answer(source) == "42"
    assert list(folder.iterdir()) == []


def test_an_extension_is_compiled_without_a_cache_folder(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source.parent / "file").touch()
    monkeypatch.setenv("MK_CACHE_DIR", str(source.parent / "file"))
    assert load_answer(source) == "42"


def write_failing_compiler(folder: Path) -> Path:
    path = folder / "failing-cc"
    path.write_text(
        f"#!/bin/sh\necho run >> {folder}/runs\nprintf 'no \\033[31msuch flag' >&2\nexit 3\n"
    )
    path.chmod(0o755)
    return path


def test_the_error_of_a_failing_compiler_is_reported(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(write_failing_compiler(source.parent)))
    with pytest.raises(BuildError, match=r"failed with 3: no \\x1b\[31msuch flag"):
        load_module(source, "mk_answer", ())


def test_an_extension_that_cannot_be_initialized_is_reported(source: Path) -> None:
    source.write_text(
        SOURCE_TEMPLATE.replace("return PyModule_Create(&definition)", "return NULL").replace(
            "ANSWER", "42"
        )
    )
    with pytest.raises(BuildError, match=r"mk_answer cannot be loaded: .*initialization"):
        load_module(source, "mk_answer", ())


def test_missing_compiler_is_reported(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert find_c_compiler() is None
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(source.parent))
    assert find_c_compiler() is None
    with pytest.raises(BuildError, match="no C compiler found"):
        load_module(source, "mk_answer", ())


def test_full_disk_is_reported(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_space(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build, "build_cached", raise_no_space)
    with pytest.raises(BuildError, match=r"mk_answer could not be written: .*No space left"):
        load_module(source, "mk_answer", ())


def test_hanging_compiler_is_killed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = source.parent / "hanging-cc"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    monkeypatch.setattr(build, "_TIMEOUT_SECONDS", 0.3)
    with pytest.raises(BuildError, match=r"hanging-cc did not end within 0\.3 s"):
        load_module(source, "mk_answer", ())


def test_a_failed_build_of_the_replayer_is_logged_once_and_not_retried(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("CC", str(write_failing_compiler(source.parent)))
    cuda_replay._build_module.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "modular_kernel"):
            assert [cuda_replay.get_module() for _ in range(3)] == [None] * 3
        assert "failed with 3" in cuda_replay.why_no_module()
        assert [record.getMessage() for record in caplog.records] == [
            f"launches are not replayed: {cuda_replay.why_no_module()}"
        ]
        assert count_compiler_runs(source) == 1
    finally:
        cuda_replay._build_module.cache_clear()


def test_concurrent_builds_all_load_a_complete_file(source: Path) -> None:
    command = [sys.executable, "-c", LOAD_PROGRAM, str(source)]
    processes: list[Any] = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    answers = [process.communicate()[0].strip() for process in processes]
    assert answers == ["42"] * 3
    assert find_cached_file(source).exists()
