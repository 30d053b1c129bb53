"""The output of `mk`: tables in narrow and wide terminals, and JSON on stdout and in files."""

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from run_mk import Mk, make_mk_fixture

from modular_kernel import perf_model
from modular_kernel.cli import output
from modular_kernel.cli.check import make_rule_letters, print_matrix
from modular_kernel.cli.options import ProblemOptions
from modular_kernel.cli.tables import fit_table, format_records, wrap_line
from modular_kernel.spec.problem import Machine
from modular_kernel.text import format_count

TORCH_PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
REFUSED_PAIR = ("--pf-type", "BatchedPrepareAndFinalize", "--experts-type", "TritonExperts")
TINY = ("--tokens", "2", "--hidden", "32", "--intermediate", "32", "--experts", "4")
EXCHANGE = (
    *("--hidden", "128", "--experts", "4", "--top-k", "2", "--tokens-list", "1"),
    *("--replays", "1", "--rounds", "1", "--backend", "gloo", "--only", "Replicated"),
)
LAYERS = Path(perf_model.__file__).with_name("data") / "h200-layers.json"
SKIPPED_KERNEL = SimpleNamespace(kernel="rows_kernel", module="parts", reason="for sm_100 alone")
# Name -> arguments of a command that prints its tables within a few seconds.
TABLE_COMMANDS: dict[str, tuple[str, ...]] = {
    "list": ("list",),
    "models": ("models",),
    "types of models": ("models", "--types"),
    "check": ("check",),
    "check, a pair": ("check", *REFUSED_PAIR),
    "check, refused": ("check", "--top-k", "99"),
    "test": ("test", *TORCH_PAIR, "--one", *TINY),
    "profile": ("profile", *TINY, "--calls", "1"),
    "bench": ("bench", *TORCH_PAIR, *TINY, "--ms", "0.01"),
    "exchange": ("exchange", *EXCHANGE),
    "tune": ("tune", "--explain", "--device-name", "NVIDIA H200"),
    "compose": ("compose", *TINY),
    "plan": ("plan", "--tokens-list", "1"),
    "plan, compared": ("plan", "--compare", str(LAYERS)),
    "doctor": ("doctor",),
    "report": ("report",),
    "bad usage": ("bench", "--experts-type", "TritonExpert"),
}


mk = make_mk_fixture()


def test_matrix_shows_the_rules_that_refuse_each_pair(
    mk: Mk, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = mk("check", "--json").json["pairs"]
    monkeypatch.setattr(output, "get_line_width", lambda _=None: 10_000)
    text = mk("check").out
    rows = {words[0]: words[1:] for words in map(str.split, text.splitlines()) if words}
    letters = {words[0]: name for name, words in rows.items() if words and len(name) == 1}
    experts = list(dict.fromkeys(pair["experts"] for pair in pairs))
    for pair in pairs:
        cells = rows[pair["prepare_finalize"].removesuffix("PrepareAndFinalize")]
        cell = cells[experts.index(pair["experts"])]
        rules = {rejection["rule"] for rejection in pair["rejections"]}
        assert cell == ("ok" if pair["ok"] else "".join(sorted(letters[r] for r in rules)))
    assert [len(make_rule_letters(n)) for n in (0, 1, 26, 52, 60)] == [0, 1, 26, 52, 60]
    assert len(set(make_rule_letters(60))) == 60


def test_matrix_without_parts_is_empty(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no parts if, for example, a file of the user shadows their package."""
    monkeypatch.setattr(output, "get_line_width", lambda _=None: 80)
    print_matrix([], ProblemOptions().problem(), Machine("cpu"))
    assert "0 of 0 pairings are valid" in capsys.readouterr().out


def test_unusual_sizes_are_noted(mk: Mk) -> None:
    assert "warning: top_k=9 of 8 experts: ids will repeat" in mk("check", "--top-k", "9").err
    assert "warning: tokens=0: every call is empty" in mk("check", "--tokens", "0").err
    assert "warning" not in mk("check").err


# ------------------------------------------------------------------------------------------ json


@pytest.mark.parametrize("verb", ["list", "models", "check", "doctor", "plan"])
def test_json_goes_to_stdout_or_to_a_file(mk: Mk, tmp_path: Path, verb: str) -> None:
    args = TABLE_COMMANDS["plan"] if verb == "plan" else (verb,)
    without_value, with_dash = mk(*args, "--json"), mk(*args, "--json", "-")
    assert without_value.out == with_dash.out
    file = tmp_path / "new" / "record.json"
    result = mk(*args, "--json", str(file))
    assert json.loads(file.read_text(encoding="utf-8")) == without_value.json
    assert result.out == mk(*args).out
    assert mk("check", "--json", "--top-k", "2").json["pairs"]


def test_refusal_is_written_to_the_file(mk: Mk, tmp_path: Path) -> None:
    file = tmp_path / "refusal.json"
    result = mk("test", *REFUSED_PAIR, "--json", str(file))
    assert result.code == 1
    assert "refused, 2 reasons" in result.out
    assert len(json.loads(file.read_text(encoding="utf-8"))["rejections"]) == 2


def test_unwritable_file_is_reported_first(mk: Mk, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path, "the folder"),
        (tmp_path / "file" / "below", "file is a file,"),
    ):
        result = mk("test", *TORCH_PAIR, "--json", str(path))
        assert result.code == 2
        assert result.out == ""
        assert f"error: --json: got {reason}" in result.err or reason in result.err


def test_read_only_file_is_reported_first(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only_file = tmp_path / "kept.json"
    read_only_file.write_text("[]", encoding="utf-8")
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path).name != read_only_file.name)
    result = mk("test", *TORCH_PAIR, "--json", str(read_only_file))
    assert (result.code, result.out) == (2, "")
    assert "read-only" in result.err
    assert mk("list", "--json", str(tmp_path / "other.json")).code == 0


@pytest.mark.parametrize("args", [("check", *TORCH_PAIR), ("test", *REFUSED_PAIR)])
def test_full_disk_is_lost_output(mk: Mk, args: tuple[str, ...]) -> None:
    """The verdict is printed, whether the pairing is valid or refused."""
    result = mk(*args, "--json", "/dev/full")
    assert result.code == 74
    assert result.out == mk(*args).out
    assert "error: output was lost: /dev/full: No space left on device\n" in result.err


@pytest.mark.parametrize(
    "args",
    [
        ("report", "--html", "out/page.html"),
        ("bench", "--markdown", "out/page.md"),
        ("exchange", "--markdown", "out/page.md"),
        ("check", "--json", "out/record.json"),
        ("profile",),
    ],
    ids=lambda args: args[0],
)
def test_file_in_place_of_a_folder_is_bad_usage(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").write_text("mine", encoding="utf-8")
    result = mk(*args)
    assert (result.code, result.out) == (2, "")
    option = "--out" if args == ("profile",) else args[1]
    assert f"error: {option}: got out: out is a file, need a folder\n" in result.err


def test_option_is_not_taken_as_a_file(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert mk("list", "--json", "-h").out == mk("list", "-h").out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["bench", "exchange"])
def test_measurements_are_printed_as_json(mk: Mk, tmp_path: Path, verb: str) -> None:
    file = tmp_path / "measured.json"
    assert mk(*TABLE_COMMANDS[verb], "--json", str(file)).code == 0
    loaded = mk(verb, "--load", str(file), "--json")
    assert loaded.json["rows"]
    assert loaded.json["rows"] == json.loads(file.read_text(encoding="utf-8"))["rows"]


# ---------------------------------------------------------------------------------------- layout

COLUMNS = ("name", "us", "note")
ROWS = (("a" * 30, "1.5", "words " * 8), ("b", "12.5", ""))


def test_optional_columns_are_dropped_to_fit() -> None:
    def fit_columns(width: int, *optional: str) -> list[object] | None:
        table = fit_table(COLUMNS, ROWS, width, optional)
        return None if table is None else [column.header for column in table.columns]

    assert fit_columns(100) == ["name", "us", "note"]
    assert fit_columns(66) == ["name", "us", "note"]  # widths 30, 4 and 24, and the padding
    assert fit_columns(63) is None
    assert fit_columns(63, "us", "note") == ["name", "us"]
    assert fit_columns(33, "us", "note") == ["name"]
    assert fit_columns(20, "us", "note") is None


def test_dropped_columns_are_listed_or_rows_become_records(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "get_line_width", lambda _=None: 63)
    output.print_table(COLUMNS, ROWS, optional=("us", "note"))
    assert "not shown in 63 columns (set COLUMNS=200): note" in capsys.readouterr().out
    output.print_table(COLUMNS, ROWS, title="title")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["title", f"name  {'a' * 30}", "us    1.5"]
    assert lines[3].startswith("note  words words")
    assert format_records(COLUMNS, ROWS, 20)[-3:] == ["name  b", "us    12.5", ""]


def test_width_for_dropped_columns_shows_every_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suggested width is at least 200, and larger for a table that needs more."""
    columns, row = ("x", "y", "z"), [letter * 90 for letter in "abc"]
    monkeypatch.setenv("COLUMNS", "100")
    output.print_table(columns, [row], optional=columns[1:])
    text = capsys.readouterr().out
    assert "bbb" not in text
    match = re.search(r"not shown in 100 columns \(set COLUMNS=(\d+)\): y, z", text)
    assert match is not None
    assert 270 < int(match[1]) < 290
    monkeypatch.setenv("COLUMNS", match[1])
    output.print_table(columns, [row], optional=columns[1:])
    wide_text = capsys.readouterr().out
    assert [cell for cell in row if cell not in wide_text] == []
    assert "not shown" not in wide_text


def test_columns_sets_the_width_of_a_dumb_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    names = [letter * 50 for letter in "abc"]
    output.print_table(("x", "y", "z"), [names])
    assert capsys.readouterr().out.split()[-3:] == names


def test_columns_sets_the_width_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", _raise_os_error)
    assert output.get_line_width() == 80
    monkeypatch.setenv("COLUMNS", "50")
    assert output.get_line_width() == 50


def _raise_os_error(fd: int) -> os.terminal_size:
    raise OSError(fd)


@pytest.mark.parametrize("width", range(8, 70))
def test_no_cell_is_truncated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """At large widths, the table fits. At small widths, rows become records."""
    monkeypatch.setattr(output, "get_line_width", lambda _=None: width)
    names = ["AllGatherReduceScatter", "189374.1", "219051.9"]
    output.print_table(("transport", "dispatch", "pair"), [names])
    text = capsys.readouterr().out
    assert [name for name in names if name not in text] == []


def test_empty_columns_are_dropped_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "get_line_width", lambda _=None: 20)
    columns = ("stage", "device us", "host us")
    output.print_table(columns, [("sort", "-", "12"), ("permute", "", "13")], optional=columns[1:])
    text = capsys.readouterr().out
    assert "13" in text
    assert "not shown in 20 columns (set COLUMNS=200): device us" in " ".join(text.split())


def test_lines_are_wrapped_between_words() -> None:
    assert wrap_line("    one two three", 12) == ["    one two", "      three"]
    assert wrap_line("one two", 80) == ["one two"]
    assert wrap_line("one two three", 8) == ["one two", "  three"]
    assert wrap_line("x" * 50, 8) == ["x" * 50]


def test_numbers_agree_with_their_nouns() -> None:
    assert [format_count(n, "case") for n in (0, 1, 2)] == ["0 cases", "1 case", "2 cases"]


def test_progress_lines_are_printed_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: clock[0])
    with output.show_progress(40, "cases") as advance:
        for _ in range(40):
            clock[0] += 1.0
            advance()
    out, err = capsys.readouterr()
    assert err.splitlines() == ["5 of 40 cases in 5 s", "25 of 40 cases in 25 s"]
    assert out == ""


@pytest.mark.parametrize(
    "args",
    [
        (*TABLE_COMMANDS["bench"], "--markdown", "/dev/full"),
        ("report", "--html", "/dev/full"),
    ],
    ids=["bench", "report"],
)
def test_lost_documents_have_their_own_exit_code(mk: Mk, args: tuple[str, ...]) -> None:
    """The exit code is never 1, which means refused. There is no traceback."""
    result = mk(*args)
    assert result.code == 74
    assert "error: output was lost: /dev/full: No space left on device\n" in result.err


def test_lost_profiles_have_their_own_exit_code(mk: Mk, tmp_path: Path) -> None:
    args = (*TABLE_COMMANDS["profile"], "--out", str(tmp_path))
    assert mk(*args).code == 0
    (report,) = tmp_path.glob("*.profile.json")
    report.unlink()
    report.symlink_to("/dev/full")
    result = mk(*args)
    assert result.code == 74
    assert f"error: output was lost: {report}: No space left on device\n" in result.err


def test_long_activities_are_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_FIRST_LINE_S", 0.05)
    monkeypatch.setattr(output, "_LINE_INTERVAL_S", 0.05)
    activity = ["the first"]
    with output.show_activity(lambda: activity[0]):
        time.sleep(0.3)
        activity[0] = "the second"
        time.sleep(0.3)
    err = capsys.readouterr().err
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
    for name in ("the first", "the second"):
        assert err.count(f"{name}: 0 s so far") >= 2
    assert err.index("the first") < err.index("the second")
    with output.show_activity(lambda: "a short activity"):
        pass
    assert capsys.readouterr().err == ""


def test_terminals_show_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Terminals show a bar, because 40 lines of the demo would scroll its result off the screen."""
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        with output.show_steps(2, "runs") as report_step:
            report_step("a run took 1 s")
            report_step("another took 2 s")
        err = capsys.readouterr().err
        assert (err == "a run took 1 s\nanother took 2 s\n") is not is_terminal
        assert ("took" in err) is not is_terminal


def test_long_steps_are_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_THREAD_INTERVAL_S", 0.05)
    with output.show_progress(3, "kernels", from_thread=True) as advance:
        advance()
        time.sleep(0.3)
    assert capsys.readouterr().err.count("1 of 3 kernels in 0 s\n") >= 2
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def _replace_compile_all(monkeypatch: pytest.MonkeyPatch, compile_all: Callable[..., Any]) -> None:
    module = ModuleType("modular_kernel.testing.compile.cases")
    module.compile_all = compile_all  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_long_compilations_are_noted(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_slowly(
        target: str, progress: Any, workers: int, name_filter: str
    ) -> SimpleNamespace:
        with progress(2) as advance:
            time.sleep(0.3)
            advance("router: 2 kernels")
        return SimpleNamespace(rows=[], left_out=[SKIPPED_KERNEL])

    def find_slowly() -> dict[str, object]:
        time.sleep(0.3)
        return {SKIPPED_KERNEL.kernel: SKIPPED_KERNEL}

    monkeypatch.setattr(output, "_THREAD_INTERVAL_S", 0.05)
    monkeypatch.setattr(output, "_FIRST_LINE_S", 0.05)
    name = "modular_kernel.testing.compile.kernels_defined.defined_kernels"
    monkeypatch.setattr(name, find_slowly)
    _replace_compile_all(monkeypatch, compile_slowly)
    err = mk("compile").err
    assert err.startswith("loading torch, triton and the parts: 0 s so far\n1 kernel for sm_90")
    assert err.count("0 of 2 steps in 0 s\n") >= 2
    assert err.count("1 of 2 steps in 0 s: router: 2 kernels\n") == 1


def test_compile_check_without_kernels_fails(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_nothing = SimpleNamespace(rows=[], left_out=[SKIPPED_KERNEL])
    _replace_compile_all(
        monkeypatch, lambda target, progress, workers, name_filter: compiled_nothing
    )
    args = ("compile", "--only", SKIPPED_KERNEL.kernel)
    assert mk(*args).code == 0
    result = mk(*args, "--check")
    assert result.code == 1
    assert "for sm_100 alone" in result.out
    kernel = SKIPPED_KERNEL.kernel
    note = f"nothing was checked: no case compiles a kernel named {kernel!r} for sm_90\n"
    assert result.err.endswith(note)
