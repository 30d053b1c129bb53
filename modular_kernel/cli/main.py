"""The `mk` command: registers the verbs. Importing this imports neither torch nor rich."""

from typing import Annotated

import typer

from modular_kernel.cli.bench import bench
from modular_kernel.cli.check import check
from modular_kernel.cli.compile import compile_kernels
from modular_kernel.cli.compose import compose
from modular_kernel.cli.demo import demo
from modular_kernel.cli.doctor import doctor
from modular_kernel.cli.exchange import exchange
from modular_kernel.cli.models import list_models
from modular_kernel.cli.options import flattened
from modular_kernel.cli.output import reports_errors
from modular_kernel.cli.parts import list_parts
from modular_kernel.cli.plan import plan
from modular_kernel.cli.profile import profile
from modular_kernel.cli.prove import prove
from modular_kernel.cli.report import report
from modular_kernel.cli.streams import guarded
from modular_kernel.cli.tune import tune

app = typer.Typer(
    name="mk",
    help="Compose fused MoE layers from interchangeable parts, and prove the pairings.",
    no_args_is_help=True,
    add_completion=False,
    # Plain help: rich would cost a third of the time that help takes.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.command("list")(reports_errors(list_parts))
app.command("models")(reports_errors(list_models))
app.command("check")(reports_errors(flattened(check)))
app.command("test")(reports_errors(flattened(prove)))
app.command("profile")(reports_errors(flattened(profile)))
app.command("bench")(reports_errors(flattened(bench)))
app.command("exchange")(reports_errors(flattened(exchange)))
app.command("tune")(reports_errors(flattened(tune)))
app.command("compose")(reports_errors(flattened(compose)))
app.command("plan")(reports_errors(flattened(plan)))
app.command("report")(reports_errors(report))
app.command("compile")(reports_errors(compile_kernels))
app.command("doctor")(reports_errors(doctor))
app.command("demo")(reports_errors(demo))


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("modular-kernel"))
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
    """Compose fused MoE layers from interchangeable parts, and prove the pairings."""


def run(argv: list[str] | None = None) -> None:
    """Run `mk` with these words, or with the command line's; ends the process.

    The status is 74 if what a verb printed could not be written, whatever the verb found.
    """
    with guarded():
        app(args=argv, prog_name="mk")
