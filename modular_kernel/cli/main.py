"""The `mk` command line: registers the verbs.

Importing this module imports neither torch nor rich, so that `mk --help` is fast.
"""

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
from modular_kernel.cli.options import flatten_options
from modular_kernel.cli.output import handle_errors, is_reporting_rank, print_error
from modular_kernel.cli.output_streams import divert_stdout, guard_streams
from modular_kernel.cli.parsing import convert_options, disable_conversion

# A launcher kills all ranks as soon as one of them exits with an error. Ranks other than 0 wait
# this long before they exit, so that rank 0 can report first.
_EXIT_DELAY_S = 5.0
_HELP = {"help_option_names": ["-h", "--help"]}
# The usage error of click, which typer raises for arguments that no verb accepts. Its import path
# differs between typer releases.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
_INTERRUPTED = 130
# Short verbs that only check and exit; they run without garbage collection.
_SHORT_VERBS = frozenset({"list", "models", "check", "plan"})

# Verb -> (module:function, its line in `mk --help`), in the order of the help. The line is explicit
# because typer would otherwise truncate the first line of the docstring.
VERBS = {
    "list": (
        "parts:list_parts",
        "List every part, its capabilities, and whether it can run on this machine.",
    ),
    "models": ("models:list_models", "List the models that --model accepts by name."),
    "check": (
        "check:check",
        "Check whether a pair, or every pair, is valid for a problem and a machine.",
    ),
    "test": ("verify:verify", "Verify a pair, or every pair, against a float64 reference."),
    "profile": ("profile:profile", "Trace a pair and compare each stage with its roofline."),
    "bench": (
        "bench:bench",
        "Time our pairs and your own layers and compare them with the roofline.",
    ),
    "exchange": ("exchange:exchange", "Time only dispatch and combine, over ranks."),
    "tune": ("tune:tune", "Time launch configurations on this GPU and save the fastest."),
    "compose": ("compose:compose", "Choose the default pair or a faster one for each token count."),
    "plan": ("plan:plan", "Estimate the time of a layer on 1 to 4096 ranks without running it."),
    "report": ("report:report", "Write the support matrix and the benchmarks as one HTML file."),
    "compile": (
        "compile:compile_kernels",
        "Compile the kernels for a GPU; show registers and spills.",
    ),
    "doctor": ("doctor:doctor", "Show versions, devices, and missing packages."),
    "demo": ("demo:demo", "Run four small models with transformers' experts and ours."),
}


def application(verbs: Iterable[str] = VERBS) -> typer.Typer:
    """Build the `mk` app with these verbs. Imports the module of each verb."""
    app = typer.Typer(
        name="mk",
        help="Compose fused MoE layers from interchangeable parts, and verify the pairings.",
        no_args_is_help=True,
        add_completion=False,
        # Plain help: rich would account for a third of the time that help takes.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=_HELP,
    )
    app.callback()(_common)
    for verb in verbs:
        path, short = VERBS[verb]
        module, attribute = path.split(":")
        function = getattr(import_module(f"modular_kernel.cli.{module}"), attribute)
        command = app.command(verb, context_settings=_HELP, short_help=short)
        command(handle_errors(convert_options(flatten_options(function))))
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
    """Build the click command for one verb, or for all verbs if `verb` is None.

    Cached, for processes that run several commands.
    """
    command: Any = get_command(application(VERBS if verb is None else (verb,)))
    disable_conversion(command)
    return cast("Callable[..., object]", command)


def run(argv: list[str] | None = None) -> None:
    """Run `mk` with `argv`, or with `sys.argv[1:]` if it is None, and exit the process.

    The exit status is 74 if the output could not be written, whatever the result of the verb.
    """
    with guard_streams():
        try:
            args = _insert_stdout(sys.argv[1:] if argv is None else argv)
            verb = args[0] if args and args[0] in VERBS else None
            with _pause_gc(last=argv is None) if verb in _SHORT_VERBS else nullcontext():
                sys.exit(_status_of(_command(verb), args))
        except SystemExit as end:
            if argv is None and STDOUT in args[1:]:
                sys.stdout.flush()
                divert_stdout()
            if end.code and not is_reporting_rank():
                time.sleep(_EXIT_DELAY_S)
            raise


@contextmanager
def _pause_gc(*, last: bool) -> Iterator[None]:
    """Pause cyclic garbage collection: over torch's objects it takes longer than the verb itself.

    last: the process exits next; freeze all objects, so that exit does not collect them either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if last:
            gc.freeze()
        if was_enabled:
            gc.enable()


def _status_of(command: Callable[..., object], words: list[str]) -> int:
    """Run the command and return its exit status.

    A usage error is printed as one line; typer would print several.
    """
    try:
        status = command(args=words, prog_name="mk", standalone_mode=False)
    except typer.Abort:
        return _INTERRUPTED
    except _USAGE_ERROR as error:
        if words:
            message = " ".join(error.format_message().split()).rstrip(".")
            print_error(f"{message} (see {_help_of(words)})")
        else:
            error.show()  # the help
        return 2
    return status if isinstance(status, int) else 0


def _help_of(words: list[str]) -> str:
    return f"mk {words[0]} -h" if words[0] in VERBS else "mk -h"


def _insert_stdout(words: list[str]) -> list[str]:
    """Insert `-` after each `--json` that has no file.

    This is unambiguous because no verb takes positional arguments.
    """
    args: list[str] = []
    for index, word in enumerate(words):
        args.append(word)
        following = words[index + 1 : index + 2]
        if word == "--json" and (not following or _is_option(following[0])):
            args.append(STDOUT)
    return args


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != STDOUT
