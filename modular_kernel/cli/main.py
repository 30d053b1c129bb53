"""The `mk` command: registers the verbs. Importing this imports neither torch nor rich."""

import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Annotated

import typer
from typer.main import get_command

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


def _verb(name: str, short: str, function: Callable[..., None]) -> None:
    """Register a verb. short: its line of `mk --help`, which would cut the docstring's first."""
    app.command(name, context_settings=_HELP, short_help=short)(reports_errors(function))


_verb("list", "List every part, what it takes, and whether it can run here.", list_parts)
_verb("models", "List the models that --model takes by name.", list_models)
_verb("check", "Judge a pair, or every pair, for a problem and a machine.", flattened(check))
_verb("test", "Verify a pair, or every pair, against a float64 oracle.", flattened(verify))
_verb("profile", "Trace a pair, and compare each stage with its floor.", flattened(profile))
_verb("bench", "Time our pairs and your own layers beside the floor.", flattened(bench))
_verb("exchange", "Time dispatch and combine alone, over ranks.", flattened(exchange))
_verb("tune", "Measure launches on this GPU and keep the fastest.", flattened(tune))
_verb("compose", "Choose the fastest valid pair for each number of tokens.", flattened(compose))
_verb("plan", "Estimate a layer over 1 to 4096 ranks; nothing is run.", flattened(plan))
_verb("report", "Write the support matrix and the benchmarks as one HTML file.", report)
_verb("compile", "Compile the kernels for a GPU; show registers and spills.", compile_kernels)
_verb("doctor", "Show versions, devices, and what is absent.", doctor)
_verb("demo", "Run four small models with transformers' experts and ours.", demo)


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


@cache
def _command() -> Callable[..., object]:
    """Build the command with all its verbs once, for a process that runs several."""
    return get_command(app)


def run(argv: list[str] | None = None) -> None:
    """Run `mk` with these words, or with the command line's; ends the process.

    The status is 74 if what a verb printed could not be written, whatever the verb found.
    """
    with guarded():
        try:
            _command()(args=_with_values(sys.argv[1:] if argv is None else argv), prog_name="mk")
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
