"""Options that name files: an unusable path is bad usage, and files are written atomically."""

import json
import os
from pathlib import Path
from typing import Any

import click
import pytest
from run_mk import Mk, runs_mk

from modular_kernel.cli.file_options import FilePath, FileUse
from modular_kernel.cli.main import VERBS, application
from modular_kernel.cli.output_streams import LOST_OUTPUT
from modular_kernel.utils import json_files

mk = runs_mk()

WRITES = (FileUse.WRITE, FileUse.WRITE_OR_STDOUT)
MODEL_VERBS = ("check", "test", "profile", "bench", "tune", "compose", "plan")


PATHS = [
    (verb, parameter.opts[0], parameter.type)
    for verb, command in application().commands.items()
    for parameter in command.params
    if isinstance(parameter.type, click.Path)
]
FILES = [(verb, name, kind.use) for verb, name, kind in PATHS if isinstance(kind, FilePath)]


def test_every_path_option_has_a_use() -> None:
    """The path of an option without a use would not be checked."""
    assert len(FILES) == len(PATHS)
    assert {o for _, o, _ in FILES} >= {
        *("--json", "--markdown", "--plot", "--html", "--times"),
        *("--load", "--peer", "--compare", "--out", "--save", "--docs"),
    }
    assert {verb for verb, option, _ in FILES if option == "--json"} == set(VERBS)


def bad_paths(folder: Path, use: FileUse) -> dict[str, str]:
    """Return unusable paths, by what is wrong with them."""
    (folder / "file").write_text("mine", encoding="utf-8")
    (folder / "nothing").symlink_to(folder / "is not there")
    (folder / "loop").symlink_to(folder / "loop")
    found = {
        "a name of 256 bytes": str(folder / ("x" * 256)),
        "a name of 128 letters of two bytes": str(folder / ("é" * 128)),
        "a folder of 256 bytes": str(folder / ("x" * 256) / "file"),
        "a folder of 256 bytes in one that is not there": str(folder / "new" / ("x" * 256) / "y"),
        "a path of 5,000 bytes": str(folder / "/".join(["x" * 99] * 50)),
        "a NUL byte": str(folder / "a\0b"),
        "not UTF-8": str(folder / "a\udcff"),
        "a link to nothing": str(folder / "nothing"),
        "a link to itself": str(folder / "loop"),
    }
    if use is not FileUse.READ_FOLDER:
        found["below a file"] = str(folder / "file" / "below")
    if use is FileUse.READ:
        found["nothing there"] = str(folder / "absent")
    elif use in WRITES or use is FileUse.WRITE_FOLDER:
        found["in /proc"] = "/proc/x"
        found["below /proc"] = "/proc/x/y"
    if use in WRITES or use is FileUse.READ:
        found["a folder"] = str(folder)
    else:
        found["a file"] = str(folder / "file")
    return found


@pytest.mark.parametrize(
    ("verb", "option", "use"), FILES, ids=[f"{verb} {option}" for verb, option, _ in FILES]
)
def test_unusable_path_is_bad_usage(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, option: str, use: FileUse
) -> None:
    """The status is 2, one line names the option, and no file is created."""
    monkeypatch.chdir(tmp_path)
    paths = bad_paths(tmp_path, use)
    before = sorted(tmp_path.rglob("*"))
    for what, path in paths.items():
        ended = mk(verb, option, path)
        assert (what, ended.code, ended.out) == (what, 2, "")
        (line,) = ended.err.splitlines()
        assert line.startswith(f"error: {option}: got ")
        assert ", need " in line
        assert len(line) < 700
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("verb", "option", "use"),
    [case for case in FILES if case[2] in WRITES or case[2] is FileUse.WRITE_FOLDER],
    ids=lambda case: str(case),
)
def test_folder_without_write_permission_is_bad_usage(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, option: str, use: FileUse
) -> None:
    """Permissions are simulated, because tests may run as root."""
    closed = tmp_path / "closed"
    closed.mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda at, mode: Path(at) != closed and real(at, mode))
    for path in (closed / "new", closed / "more" / "new"):
        ended = mk(verb, option, str(path))
        assert (ended.code, ended.out) == (2, "")
        assert f"error: {option}: got {path}: {closed} is read-only, need " in ended.err
    assert list(closed.iterdir()) == []


@pytest.mark.parametrize("verb", MODEL_VERBS)
def test_model_with_an_invalid_path_is_bad_usage(mk: Mk, tmp_path: Path, verb: str) -> None:
    paths = bad_paths(tmp_path, FileUse.READ)
    for path in paths.values():
        words = ("--one", *PAIR) if verb == "test" else ()
        ended = mk(verb, "--model", path, *words)
        assert ended.code == 2
        assert ended.err.splitlines()[-1].startswith("error: model")
    ended = mk("bench", "--hf", paths["a name of 256 bytes"])
    assert ended.code == 2


PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")


class Full:
    """Stand-in for a disk that is full after some bytes."""

    def __init__(self, most: int) -> None:
        self.most = most

    def write_text(self, path: Path, text: str, **_: Any) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.write(text[: self.most])
        raise OSError(28, "No space left on device")


TINY = ("--tokens", "2", "--hidden", "32", "--intermediate", "32", "--experts", "4")
BENCH = ("bench", *PAIR, *TINY, "--ms", "0.01")
WRITTEN: dict[str, tuple[str, ...]] = {
    "--json": ("check", "--json"),
    "--html": ("report", "--html"),
    "--markdown": ("bench", "--load", "RECORD", "--markdown"),
}


@pytest.mark.parametrize("words", WRITTEN.values(), ids=WRITTEN.keys())
def test_files_are_written_atomically(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    record = tmp_path / "record" / "rows.json"
    if "RECORD" in words:
        assert mk(*BENCH, "--json", str(record)).code == 0
    path = tmp_path / "written"
    words = (*(str(record) if word == "RECORD" else word for word in words), str(path))
    path.write_text("the last one", encoding="utf-8")
    path.chmod(0o640)
    with monkeypatch.context() as patched:
        full = Full(100)
        patched.setattr(Path, "write_text", lambda at, text, **more: full.write_text(at, text))
        ended = mk(*words)
    assert ended.code == LOST_OUTPUT
    assert f"error: output was lost: {path}: No space left on device" in ended.err
    assert path.read_text(encoding="utf-8") == "the last one"
    assert [each.name for each in tmp_path.glob("*") if each != record.parent] == ["written"]
    assert mk(*words).code == 0
    assert path.read_text(encoding="utf-8") != "the last one"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in tmp_path.glob("*") if each != record.parent] == ["written"]


def test_longest_file_name_is_written(mk: Mk, tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    assert mk("list", "--json", str(path)).code == 0
    assert json.loads(path.read_text(encoding="utf-8"))


def test_existing_file_in_a_read_only_folder_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept"
    path.write_text("old", encoding="utf-8")
    real = os.access
    monkeypatch.setattr(os, "access", lambda at, mode: Path(at) != tmp_path and real(at, mode))
    json_files.write(path, "new")
    assert path.read_text(encoding="utf-8") == "new"


def test_interrupt_leaves_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.png"

    def interrupted() -> None:
        with json_files.atomic_write(path) as part:
            assert part.suffix == ".png"
            part.write_text("half", encoding="utf-8")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
