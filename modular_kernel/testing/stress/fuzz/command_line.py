"""Fuzz targets: the command line with random options, and with invalid file names."""

import contextlib
import io
import tempfile
from typing import Any

from hypothesis import strategies as st

from modular_kernel.settings import preserve_environment
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    TYPED_ERROR,
    UNTYPED_ERROR,
    WRONG_RESULT,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.target import Target, import_object

_FLAGS = (
    "--tokens", "--hidden", "--intermediate", "--experts", "--top-k", "--dtype", "--quant",
    "--activation", "--chunk-tokens", "--max-received", "--combine",
    "--ids-dtype", "--routed-scaling-factor",
    "--bias", "--inplace", "--json", "--pf-type", "--experts-type", "--machine", "--nonsense",
    "--seed", "--routing", "--level", "--help",
)  # fmt: skip
_VALUES = (
    "0", "1", "4", "-1", "2147483648", "1e3", "nan", "x", "", "silu", "swiglu_oai:limit=nan",
    "bf16",
    "fp64", "fp8_w8a8_block:block=0x0", "none", "sum", "int64", "\x1b[2J", "é", "/dev/null",
    "TorchExperts", "MoEPrepareAndFinalizeNoEP", "cpu", "cuda:9", "h200",
)  # fmt: skip


def check_command_line(arguments: list[str]) -> FuzzOutcome:
    """Run `mk list`, `check`, `plan` or `compose` with random options.

    The command must exit with status 0, 1 or 2, without a traceback. No kernel is launched, because
    `compose` gets a time budget of 0.
    """
    description = f"mk {' '.join(map(repr, arguments))}"
    status, output = run_command(arguments, description)
    if isinstance(status, FuzzOutcome):
        return status
    if "\x1b[2J" in output:
        return FuzzOutcome(WRONG_RESULT, f"{description}: a control sequence is printed unescaped")
    return FuzzOutcome(TYPED_ERROR if status else CORRECT, description)


def check_file_name(arguments: list[str]) -> FuzzOutcome:
    """Run a command with a file that cannot be read or written. It must exit with status 2."""
    description = f"mk {' '.join(map(repr, arguments))}"
    status, _ = run_command(arguments, description)
    if isinstance(status, FuzzOutcome):
        return status
    # Status 1 would mean that the problem was refused.
    return FuzzOutcome(
        TYPED_ERROR if status == 2 else WRONG_RESULT, f"{description}: exit {status}"
    )


def run_command(arguments: list[str], description: str) -> tuple[int | FuzzOutcome, str]:
    """Run `mk`; return (exit status, or the outcome if it raises an error; its output)."""
    output = io.StringIO()

    def call() -> int:
        out, err = contextlib.redirect_stdout(output), contextlib.redirect_stderr(output)
        # Files that `--json FILE` writes are removed with the folder.
        folder = tempfile.TemporaryDirectory()
        with out, err, preserve_environment(), folder as folder_path, contextlib.chdir(folder_path):
            try:
                import_object("modular_kernel.cli.main:run")(arguments)
            except SystemExit as error:
                return error.code if isinstance(error.code, int) else int(error.code is not None)
        return 0

    status = run_or_classify(description, call)
    if isinstance(status, FuzzOutcome):  # an uncaught error of any type
        return FuzzOutcome(UNTYPED_ERROR, status.description), output.getvalue()
    if "Traceback" in output.getvalue() or status not in (0, 1, 2):
        return FuzzOutcome(UNTYPED_ERROR, f"{description}: exit {status}"), output.getvalue()
    return status, output.getvalue()


@st.composite
def _commands(draw: st.DrawFn) -> list[str]:
    arguments = [draw(st.sampled_from(("list", "check", "check", "plan", "compose", "nothing")))]
    for _ in range(draw(st.integers(0, 5))):
        arguments.append(draw(st.sampled_from(_FLAGS)))
        if draw(st.integers(0, 4)):
            arguments.append(draw(st.sampled_from(_VALUES)))
    return [*arguments, "--budget", "0"] if arguments[0] == "compose" else arguments


_SIZES = "--tokens 1 --hidden 8 --intermediate 8 --experts 2 --top-k 1"
# Commands that read or write a file. The name of the file is appended to them.
_FILE_COMMANDS = (
    ("list", "--json"),
    ("models", "--json"),
    ("check", *_SIZES.split(), "--json"),
    ("check", "--model"),
    ("plan", "--compare"),
    ("report", "--html"),
)
_path_component = st.one_of(
    st.integers(256, 5000).map(lambda length: "x" * length),
    st.integers(128, 300).map(lambda length: "é" * length),
    st.sampled_from(("\0", "/proc/x", "/dev/null/x", "/dev/null/no/such")),
)


@st.composite
def _file_commands(draw: st.DrawFn) -> list[str]:
    subfolders = draw(st.lists(st.sampled_from(("a", ".", "é")), max_size=2))
    return [*draw(st.sampled_from(_FILE_COMMANDS)), "/".join([draw(_path_component), *subfolders])]


TARGETS: tuple[Target[Any], ...] = (
    Target("command_line", 6, _commands(), check_command_line),
    Target("file_names", 1, _file_commands(), check_file_name),
)
