"""Options that name files: unusable paths are bad usage, and files are written atomically."""

import json
import os
from pathlib import Path
from typing import Any

import click
import pytest
from run_mk import Mk, make_mk_fixture

from modular_kernel.cli.file_options import FilePath, FileUse
from modular_kernel.cli.main import VERBS, make_application
from modular_kernel.cli.output_streams import EXIT_OUTPUT_LOST
from modular_kernel.utils import json_files

mk = make_mk_fixture()

FILE_OUTPUTS = (FileUse.WRITE, FileUse.WRITE_OR_STDOUT)
PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
MODEL_VERBS = ("check", "test", "profile", "bench", "tune", "compose", "plan")


# (verb, option, type) of every option that names a path.
PATHS = [
    (verb, parameter.opts[0], parameter.type)
    for verb, command in make_application().commands.items()
    for parameter in command.params
    if isinstance(parameter.type, click.Path)
]
FILES = [
    (verb, name, path_type.use)
    for verb, name, path_type in PATHS
    if isinstance(path_type, FilePath)
]


def test_every_path_option_has_a_use() -> None:
    """Without a use, the path of an option would not be checked."""
    assert len(FILES) == len(PATHS)
    assert {o for _, o, _ in FILES} >= {
        *("--json", "--markdown", "--plot", "--html", "--times"),
        *("--load", "--peer", "--compare", "--out", "--save", "--docs"),
    }
    assert {verb for verb, option, _ in FILES if option == "--json"} == set(VERBS)


def make_unusable_paths(folder: Path, use: FileUse) -> dict[str, str]:
    """Return a path for each defect that makes a path unusable for `use`."""
    (folder / "file").write_text("text", encoding="utf-8")
    (folder / "broken").symlink_to(folder / "missing")
    (folder / "loop").symlink_to(folder / "loop")
    paths = {
        "a name of 256 bytes": str(folder / ("x" * 256)),
        "a name of 128 letters of two bytes": str(folder / ("é" * 128)),
        "a folder of 256 bytes": str(folder / ("x" * 256) / "file"),
        "a folder of 256 bytes in a missing folder": str(folder / "new" / ("x" * 256) / "y"),
        "a path of 5,000 bytes": str(folder / "/".join(["x" * 99] * 50)),
        "a NUL byte": str(folder / "a\0b"),
        "not UTF-8": str(folder / "a\udcff"),
        "a broken link": str(folder / "broken"),
        "a link to itself": str(folder / "loop"),
    }
    if use is not FileUse.READ_FOLDER:
        paths["below a file"] = str(folder / "file" / "below")
    if use is FileUse.READ:
        paths["a missing file"] = str(folder / "absent")
    elif use in FILE_OUTPUTS or use is FileUse.WRITE_FOLDER:
        paths["in /proc"] = "/proc/x"
        paths["below /proc"] = "/proc/x/y"
    if use in FILE_OUTPUTS or use is FileUse.READ:
        paths["a folder"] = str(folder)
    else:
        paths["a file"] = str(folder / "file")
    return paths


@pytest.mark.parametrize(
    ("verb", "option", "use"), FILES, ids=[f"{verb} {option}" for verb, option, _ in FILES]
)
def test_unusable_path_is_bad_usage(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, option: str, use: FileUse
) -> None:
    """The status is 2, one line names the option, and no file is created."""
    monkeypatch.chdir(tmp_path)
    paths = make_unusable_paths(tmp_path, use)
    before = sorted(tmp_path.rglob("*"))
    for defect, path in paths.items():
        result = mk(verb, option, path)
        assert (defect, result.code, result.out) == (defect, 2, "")
        (line,) = result.err.splitlines()
        assert line.startswith(f"error: {option}: got ")
        assert ", need " in line
        assert len(line) < 700
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("verb", "option", "use"),
    [case for case in FILES if case[2] in FILE_OUTPUTS or case[2] is FileUse.WRITE_FOLDER],
    ids=lambda case: str(case),
)
def test_folder_without_write_permission_is_bad_usage(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, option: str, use: FileUse
) -> None:
    """Permissions are simulated, because tests may run as root."""
    read_only = tmp_path / "read_only"
    read_only.mkdir()
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != read_only and access(path, mode)
    )
    for path in (read_only / "new", read_only / "more" / "new"):
        result = mk(verb, option, str(path))
        assert (result.code, result.out) == (2, "")
        assert f"error: {option}: got {path}: {read_only} is read-only, need " in result.err
    assert list(read_only.iterdir()) == []


@pytest.mark.parametrize(
    ("verb", "option", "use"),
    [case for case in FILES if case[2] in FILE_OUTPUTS],
    ids=lambda case: str(case),
)
def test_file_in_missing_folders_is_bad_usage(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, option: str, use: FileUse
) -> None:
    """Neither several folders nor one in the root folder are created for a file."""
    monkeypatch.chdir(tmp_path)
    for path, missing in (
        ("/no-such-folder/file", "/no-such-folder"),
        ("/no-such-folder/more/file", "/no-such-folder/more"),
        ("a/b/file", str(tmp_path / "a")),
        (str(tmp_path / "a" / "b" / "file"), str(tmp_path / "a")),
    ):
        result = mk(verb, option, path)
        assert (result.code, result.out) == (2, "")
        message = f"error: {option}: got {path}: there is no folder {missing}, need a file "
        assert result.err.startswith(message)
        assert "in an existing folder" in result.err
    assert list(tmp_path.iterdir()) == []
    assert not Path("/no-such-folder").exists()


@pytest.mark.parametrize("verb", MODEL_VERBS)
def test_model_with_an_invalid_path_is_bad_usage(mk: Mk, tmp_path: Path, verb: str) -> None:
    paths = make_unusable_paths(tmp_path, FileUse.READ)
    for path in paths.values():
        args = ("--one", *PAIR) if verb == "test" else ()
        result = mk(verb, "--model", path, *args)
        assert result.code == 2
        assert result.err.splitlines()[-1].startswith("error: model")
    result = mk("bench", "--hf", paths["a name of 256 bytes"])
    assert result.code == 2


def write_to_full_disk(path: Path, text: str, **_: Any) -> None:
    """Stand in for `Path.write_text` on a disk that is full after 100 characters."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text[:100])
    raise OSError(28, "No space left on device")


TINY = ("--tokens", "2", "--hidden", "32", "--intermediate", "32", "--experts", "4")
BENCH = ("bench", *PAIR, *TINY, "--ms", "0.01")
OUTPUTS: dict[str, tuple[str, ...]] = {
    "--json": ("check", "--json"),
    "--html": ("report", "--html"),
    "--markdown": ("bench", "--load", "RECORD", "--markdown"),
}


@pytest.mark.parametrize("args", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_files_are_written_atomically(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    record = tmp_path / "record" / "rows.json"
    if "RECORD" in args:
        assert mk(*BENCH, "--json", str(record)).code == 0
    path = tmp_path / "written"
    args = (*(str(record) if word == "RECORD" else word for word in args), str(path))
    path.write_text("old", encoding="utf-8")
    path.chmod(0o640)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_to_full_disk)
        result = mk(*args)
    assert result.code == EXIT_OUTPUT_LOST
    assert f"error: output was lost: {path}: No space left on device" in result.err
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.glob("*") if p != record.parent] == ["written"]
    assert mk(*args).code == 0
    assert path.read_text(encoding="utf-8") != "old"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.glob("*") if p != record.parent] == ["written"]


def test_longest_file_name_is_written(mk: Mk, tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    assert mk("list", "--json", str(path)).code == 0
    assert json.loads(path.read_text(encoding="utf-8"))


def test_existing_file_in_a_read_only_folder_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "existing"
    path.write_text("old", encoding="utf-8")
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != tmp_path and access(path, mode)
    )
    json_files.write(path, "new")
    assert path.read_text(encoding="utf-8") == "new"


def test_interrupt_leaves_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"

    def interrupt_write() -> None:
        with json_files.atomic_write(path) as partial_path:
            assert partial_path.suffix == ".png"
            partial_path.write_text("half", encoding="utf-8")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt_write()
    assert list(tmp_path.iterdir()) == []
