"""The `mk` command: registers the verbs. Importing this imports neither torch nor rich."""

import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.main import get_command

import modular_kernel
from modular_kernel.cli.file_options import STDOUT
from modular_kernel.cli.options import flattened
from modular_kernel.cli.output import reports, reports_errors, tell_error
from modular_kernel.cli.output_streams import divert_stdout, guarded
from modular_kernel.cli.parsing import converted, leave_words

# A launcher ends its world as soon as one rank fails: rank 0 is to report before.
_LINGER_S = 5.0
_HELP = {"help_option_names": ["-h", "--help"]}
# What typer raises at words that no verb takes; it has moved between typer's releases.
_BAD_WORDS: Any = typer.BadParameter.__mro__[1]
_INTERRUPTED = 130
# Verbs that judge, and end.
_BRIEF = frozenset({"list", "models", "check", "plan"})

# Verb -> its function, and its line of `mk --help`, which would cut the docstring's first. In the
# order of the help.
VERBS = {
    "list": ("parts:list_parts", "List every part, what it takes, and whether it can run here."),
    "models": ("models:list_models", "List the models that --model takes by name."),
    "check": ("check:check", "Judge a pair, or every pair, for a problem and a machine."),
    "test": ("verify:verify", "Verify a pair, or every pair, against a float64 oracle."),
    "profile": ("profile:profile", "Trace a pair, and compare each stage with its floor."),
    "bench": ("bench:bench", "Time our pairs and your own layers beside the floor."),
    "exchange": ("exchange:exchange", "Time dispatch and combine alone, over ranks."),
    "tune": ("tune:tune", "Measure launches on this GPU and keep the fastest."),
    "compose": ("compose:compose", "Choose the default pair or a faster one, by number of tokens."),
    "plan": ("plan:plan", "Estimate a layer over 1 to 4096 ranks; nothing is run."),
    "report": ("report:report", "Write the support matrix and the benchmarks as one HTML file."),
    "compile": (
        "compile:compile_kernels",
        "Compile the kernels for a GPU; show registers and spills.",
    ),
    "doctor": ("doctor:doctor", "Show versions, devices, and what is absent."),
    "demo": ("demo:demo", "Run four small models with transformers' experts and ours."),
}


def application(verbs: Iterable[str] = VERBS) -> typer.Typer:
    """Return `mk` with these verbs, whose modules are imported."""
    app = typer.Typer(
        name="mk",
        help="Compose fused MoE layers from interchangeable parts, and verify the pairings.",
        no_args_is_help=True,
        add_completion=False,
        # Plain help: rich would cost a third of the time that help takes.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=_HELP,
    )
    app.callback()(_common)
    for verb in verbs:
        place, short = VERBS[verb]
        module, function = place.split(":")
        found = getattr(import_module(f"modular_kernel.cli.{module}"), function)
        command = app.command(verb, context_settings=_HELP, short_help=short)
        command(reports_errors(converted(flattened(found))))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(modular_kernel.__version__)
        raise typer.Exit


def _common(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Compose fused MoE layers from interchangeable parts, and verify the pairings."""


@cache
def _command(verb: str | None) -> Callable[..., object]:
    """Build the command once, for a process that runs several: with one verb, or all for None."""
    made: Any = get_command(application(VERBS if verb is None else (verb,)))
    leave_words(made)
    return cast("Callable[..., object]", made)


def run(argv: list[str] | None = None) -> None:
    """Run `mk` with these words, or with the command line's; ends the process.

    The status is 74 if what a verb printed could not be written, whatever the verb found.
    """
    with guarded():
        try:
            words = _with_values(sys.argv[1:] if argv is None else argv)
            verb = words[0] if words and words[0] in VERBS else None
            with _uncollected(last=argv is None) if verb in _BRIEF else nullcontext():
                sys.exit(_status_of(_command(verb), words))
        except SystemExit as end:
            if argv is None and STDOUT in words[1:]:
                sys.stdout.flush()
                divert_stdout()
            if end.code and not reports():
                time.sleep(_LINGER_S)
            raise


@contextmanager
def _uncollected(*, last: bool) -> Iterator[None]:
    """Look for no cycles of objects within it: torch has so many that this takes longer than to
    judge.

    last: nor as the process ends, which is next.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if last:
            gc.freeze()
        if collects:
            gc.enable()


def _status_of(command: Callable[..., object], words: list[str]) -> int:
    """Run the command: typer would answer bad words in several lines, the last of which counts."""
    try:
        status = command(args=words, prog_name="mk", standalone_mode=False)
    except typer.Abort:
        return _INTERRUPTED
    except _BAD_WORDS as error:
        if words:
            why = " ".join(error.format_message().split()).rstrip(".")
            tell_error(f"{why} (see {_help_of(words)})")
        else:
            error.show()  # the help
        return 2
    return status if isinstance(status, int) else 0


def _help_of(words: list[str]) -> str:
    return f"mk {words[0]} -h" if words[0] in VERBS else "mk -h"


def _with_values(words: list[str]) -> list[str]:
    """Make `--json` without a file `--json -`: no verb takes words that are no options."""
    made: list[str] = []
    for index, word in enumerate(words):
        made.append(word)
        following = words[index + 1 : index + 2]
        if word == "--json" and (not following or _is_option(following[0])):
            made.append(STDOUT)
    return made


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != STDOUT
