"""Code blocks of Markdown pages, extracted and run as a reader would run them.

The `python` blocks of a page run in order in one namespace. `console` blocks have commands after a
dollar prompt, each followed by its output. A command must print the shown lines in this order;
whitespace may differ, and `...` stands for any lines. A command must exit with 0 unless `$ echo $?`
follows. A block whose first line is `# not run: REASON` is not run.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

LANGUAGES = ("python", "console")
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S
)
_NOT_RUN = "# not run:"

# Runs `mk` with the given arguments; returns its exit code and its stdout.
Mk = Callable[..., tuple[int, str]]


@dataclass(frozen=True)
class Block:
    """A code block. line: line number of its first line. language: "" if the fence names none."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def reason(self) -> str | None:
        """The reason why the block is not run, or None if it runs."""
        first_line = self.text.partition("\n")[0]
        if not first_line.startswith(_NOT_RUN):
            return None
        return first_line.removeprefix(_NOT_RUN).strip()

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [_make_block(page, text, match) for match in _FENCE.finditer(text)]


def _make_block(page: Path, text: str, match: re.Match[str]) -> Block:
    line_number = text.count("\n", 0, match.start("text")) + 1
    indent = len(match["indent"])
    lines = [line[indent:] for line in match["text"].splitlines()]
    return Block(page, line_number, match["language"], "\n".join(lines) + "\n")


def module_source(page: Path, name: str) -> str:
    """Join the blocks whose first line is `# NAME` or `# NAME, continued` into one module."""
    sources = [b.text for b in blocks_of(page) if b.text.startswith((f"# {name}\n", f"# {name}, "))]
    assert sources, f"{page}: no block of {name}"
    return "\n\n".join(sources)


def run_page(page: Path, mk: Mk) -> dict[str, object]:
    """Run the blocks of a page; return the namespace of its Python blocks."""
    namespace: dict[str, object] = {"__name__": f"page_{page.stem}"}
    try:
        for block in blocks_of(page):
            if block.reason is None and block.language == "python":
                # Leading newlines let tracebacks show the line numbers of the page.
                source = "\n" * (block.line - 1) + block.text
                exec(compile(source, str(page), "exec"), namespace)
            elif block.reason is None and block.language == "console":
                _run_console(block, mk)
    finally:
        torch.set_default_device(None)  # a page may set a default device
    return namespace


def _run_console(block: Block, mk: Mk) -> None:
    code = 0
    for command, expected_lines in _commands(block):
        if command == "echo $?":
            assert expected_lines == [str(code)], f"{block}: the last command exited with {code}"
            code = 0
            continue
        assert code == 0, f"{block}: a command exited with {code}, and no `$ echo $?` follows"
        program, *arguments = shlex.split(command)
        assert program == "mk", f"{block}: only mk is run, not {program}"
        with torch.device("cpu"):  # a separate program, not affected by the Python blocks
            code, printed = mk(*arguments)
        _check_output(expected_lines, printed, f"{block}: {command}")
    assert code == 0, f"{block}: the last command exited with {code}"


def _commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Yield each command with the lines shown below it."""
    preamble, *sections = re.split(r"^\$ ", block.text, flags=re.M)
    assert not preamble.strip(), f"{block}: must begin with a command"
    for section in sections:
        command, *expected_lines = section.strip().splitlines()
        yield command, expected_lines


def _check_output(expected_lines: list[str], printed: str, location: str) -> None:
    printed_lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    for expected_line in expected_lines:
        expected = " ".join(expected_line.split())
        if expected != "...":
            assert any(line.startswith(expected) for line in printed_lines), (
                f"{location}: not printed: {expected_line}"
            )
