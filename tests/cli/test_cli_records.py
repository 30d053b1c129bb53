"""Options that read records: errors have one line, and no folder is created before a result."""

from pathlib import Path

import pytest
from run_mk import Mk, make_mk_fixture

# File name -> (content, part of the error).
BAD_RECORDS = {
    "none.json": (None, "No such file or directory"),
    "text.json": (b"x", "invalid JSON: "),
    "bytes.json": (b"\xff", ""),
    "list.json": (b"[1]", ""),
    "other.json": (b'{"schema": "other/1"}', ""),
    "incomplete.json": (b'{"schema": "mk-bench/1"}', ""),
}


mk = make_mk_fixture()


@pytest.mark.parametrize("name", BAD_RECORDS)
@pytest.mark.parametrize(
    "args", [("bench", "--load"), ("exchange", "--load"), ("plan", "--compare")]
)
def test_errors_name_the_bad_record(
    mk: Mk, tmp_path: Path, name: str, args: tuple[str, str]
) -> None:
    content, reason = BAD_RECORDS[name]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    result = mk(*args, str(path))
    assert (result.code, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    assert str(path) in line
    assert f"got {reason}" in line or f"got {path}: {reason}" in line
    assert name != "bytes.json" or "not UTF-8" in line
    assert line.count(": got ") == 1
    assert "Error" not in line
    assert "Errno" not in line


def test_incomplete_record_is_refused(mk: Mk, tmp_path: Path) -> None:
    path = tmp_path / "incomplete.json"
    path.write_text('{"schema": "mk-bench/1"}', encoding="utf-8")
    assert "got an incomplete record: 'rows'" in mk("bench", "--load", str(path)).err


def test_empty_value_is_refused(mk: Mk) -> None:
    assert "error: quant: got '', need one of " in mk("check", "--quant=").err


@pytest.mark.parametrize(
    "args",
    [
        ("check", "--json", "new/record.json", "--tokens", "-1"),
        ("bench", "--markdown", "new/page.md", "--load", "bad.json"),
        ("exchange", "--markdown", "new/page.md", "--load", "bad.json"),
        ("bench", "--json", "new/record.json", "--model", "none such"),
    ],
)
def test_refused_command_creates_no_folder(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    assert mk(*args).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]
