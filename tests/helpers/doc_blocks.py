"""Code blocks of Markdown pages: found, and run as a reader would run them.

A page's blocks in `python` run from first to last in one namespace. Blocks in `console` hold
commands after `$ ` with what they print below: each line shown must be printed, in this order, but
for spaces; `...` stands for any lines. A command must exit with 0, unless `$ echo $?` follows. A
block whose first line is `# not run: REASON` is not run, and the reader sees why.
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

# Runs `mk` with these words: its exit code, and what it printed on stdout.
Mk = Callable[..., tuple[int, str]]


@dataclass(frozen=True)
class Block:
    """line: of the page, where the text begins. language: the fence's whole word, maybe ""."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why it is not run; None if it is."""
        first = self.text.partition("\n")[0]
        return first.removeprefix(_NOT_RUN).strip() if first.startswith(_NOT_RUN) else None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Every fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    return [_block(page, text, found) for found in _FENCE.finditer(text)]


def _block(page: Path, text: str, found: re.Match[str]) -> Block:
    line = text.count("\n", 0, found.start("text")) + 1
    lines = found["text"].splitlines()
    indent = len(found["indent"])
    return Block(page, line, found["language"], "\n".join(one[indent:] for one in lines) + "\n")


def module_source(page: Path, name: str) -> str:
    """The blocks of a page whose first line is `# NAME` or `# NAME, continued`, as one module."""
    pieces = [b.text for b in blocks_of(page) if b.text.startswith((f"# {name}\n", f"# {name}, "))]
    assert pieces, f"{page}: no block of {name}"
    return "\n\n".join(pieces)


def run_page(page: Path, mk: Mk) -> dict[str, object]:
    """Run what is to be run; returns the names that the page's Python leaves."""
    names: dict[str, object] = {"__name__": f"page_{page.stem}"}
    try:
        for block in blocks_of(page):
            if block.reason is None and block.language == "python":
                # Padded, so that a traceback tells the line of the page.
                source = "\n" * (block.line - 1) + block.text
                exec(compile(source, str(page), "exec"), names)
            elif block.reason is None and block.language == "console":
                _run_console(block, mk)
    finally:
        torch.set_default_device(None)  # examples set one
    return names


def _run_console(block: Block, mk: Mk) -> None:
    code = 0
    for command, shown in _commands(block):
        if command == "echo $?":
            assert shown == [str(code)], f"{block}: the last command exited with {code}"
            code = 0
            continue
        assert code == 0, f"{block}: a command exited with {code}, and no `$ echo $?` follows"
        program, *words = shlex.split(command)
        assert program == "mk", f"{block}: only mk is run, not {program}"
        with torch.device("cpu"):  # a program of its own: what Python above has set is not its
            code, printed = mk(*words)
        _check_shown(shown, printed, f"{block}: {command}")
    assert code == 0, f"{block}: the last command exited with {code}"


def _commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Each command, with the lines shown below it."""
    first, *others = re.split(r"^\$ ", block.text, flags=re.M)
    assert not first.strip(), f"{block}: must begin with a command"
    for text in others:
        command, *shown = text.strip().splitlines()
        yield command, shown


def _check_shown(shown: list[str], printed: str, where: str) -> None:
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    for line in shown:
        wanted = " ".join(line.split())
        if wanted != "...":
            assert any(one.startswith(wanted) for one in lines), f"{where}: not printed: {line}"
