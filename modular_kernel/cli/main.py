"""The `mk` command: registers the verbs. Importing this imports neither torch nor rich."""

import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer

import modular_kernel
from modular_kernel.cli.bench import bench
from modular_kernel.cli.check import check
from modular_kernel.cli.compile import compile_kernels
from modular_kernel.cli.compose import compose
from modular_kernel.cli.demo import demo
from modular_kernel.cli.doctor import doctor
from modular_kernel.cli.exchange import exchange
from modular_kernel.cli.models import list_models
from modular_kernel.cli.options import flattened
from modular_kernel.cli.output import STDOUT, reports, reports_errors
from modular_kernel.cli.parts import list_parts
from modular_kernel.cli.plan import plan
from modular_kernel.cli.profile import profile
from modular_kernel.cli.report import report
from modular_kernel.cli.streams import guarded
from modular_kernel.cli.tune import tune
from modular_kernel.cli.verify import verify

# A launcher ends its world as soon as one rank fails: rank 0 is to report before.
_LINGER_S = 5.0
_HELP = {"help_option_names": ["-h", "--help"]}

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


def _verb(name: str, function: Callable[..., None]) -> None:
    app.command(name, context_settings=_HELP)(function)


_verb("list", reports_errors(list_parts))
_verb("models", reports_errors(list_models))
_verb("check", reports_errors(flattened(check)))
_verb("test", reports_errors(flattened(verify)))
_verb("profile", reports_errors(flattened(profile)))
_verb("bench", reports_errors(flattened(bench)))
_verb("exchange", reports_errors(flattened(exchange)))
_verb("tune", reports_errors(flattened(tune)))
_verb("compose", reports_errors(flattened(compose)))
_verb("plan", reports_errors(flattened(plan)))
_verb("report", reports_errors(report))
_verb("compile", reports_errors(compile_kernels))
_verb("doctor", reports_errors(doctor))
_verb("demo", reports_errors(demo))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(modular_kernel.__version__)
        raise typer.Exit


@app.callback()
def _common(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Compose fused MoE layers from interchangeable parts, and verify the pairings."""


def run(argv: list[str] | None = None) -> None:
    """Run `mk` with these words, or with the command line's; ends the process.

    The status is 74 if what a verb printed could not be written, whatever the verb found.
    """
    with guarded():
        try:
            app(args=_with_values(sys.argv[1:] if argv is None else argv), prog_name="mk")
        except SystemExit as end:
            if end.code and not reports():
                time.sleep(_LINGER_S)
            raise


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
