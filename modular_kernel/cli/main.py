"""Entry point of the `mk` command.

Importing this module imports neither torch nor rich, so that `mk --help` is fast.
"""

import gc
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module

import click

import modular_kernel
from modular_kernel.cli.command import HelpContext, make_verb
from modular_kernel.cli.output import is_reporting_rank, print_error
from modular_kernel.cli.output_streams import guard_streams, redirect_stdout_to_stderr

# A launcher such as torchrun kills all ranks as soon as one of them exits with an error. Ranks
# other than 0 wait this long before they exit, so that rank 0 can print the error first.
_EXIT_DELAY_S = 5.0
_DESCRIPTION = "Compose fused MoE layers from interchangeable parts, and verify the pairings."
_CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}
_EXIT_INTERRUPTED = 130  # exit status after Ctrl-C
# A garbage collection would take longer than these verbs, so it is paused while they run.
_SHORT_VERBS = frozenset({"list", "models", "check", "plan"})

# Verb -> (module:function, description in `mk --help`), in the order in which the help lists them.
# The descriptions are explicit because click would truncate the first line of the docstring.
VERBS = {
    "list": (
        "parts:list_parts",
        "List every part, its capabilities, and whether it can run on this machine.",
    ),
    "models": ("models:list_models", "List the models that --model accepts by name."),
    "check": (
        "check:check",
        "Check whether pairings are valid for a problem and a machine.",
    ),
    "test": ("verify:verify", "Verify pairings against a float64 reference."),
    "profile": ("profile:profile", "Trace a pairing and compare each stage with its roofline."),
    "bench": (
        "bench:bench",
        "Time our pairings and your own layers and compare them with the roofline.",
    ),
    "exchange": ("exchange:exchange", "Time only dispatch and combine, over ranks."),
    "tune": ("tune:tune", "Time launch configurations on this GPU and save the fastest."),
    "compose": (
        "compose:compose",
        "Choose the default pairing or a faster one for each token count.",
    ),
    "plan": ("plan:plan", "Estimate the time of a layer on 1 to 4096 ranks without running it."),
    "report": ("report:report", "Write the support matrix and the benchmarks as one HTML file."),
    "compile": (
        "compile:compile_kernels",
        "Compile the kernels for a GPU; show registers and spills.",
    ),
    "new": ("new:new", "Write a starter package with a new part, path or scheme."),
    "doctor": ("doctor:doctor", "Show versions, devices, and missing packages."),
    "demo": ("demo:demo", "Run four small models with transformers' experts and ours."),
}


class _VerbGroup(click.Group):
    context_class = HelpContext

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def make_application(verbs: Iterable[str] = VERBS) -> click.Group:
    """Build the `mk` command with these verbs, and import their modules."""
    version = click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_print_version,
        help="Print the version.",
    )
    group = _VerbGroup(
        "mk",
        help=_DESCRIPTION,
        params=[version],
        no_args_is_help=True,
        context_settings=_CONTEXT_SETTINGS,
    )
    for verb in verbs:
        import_path, short_help = VERBS[verb]
        module, attribute = import_path.split(":")
        function = getattr(import_module(f"modular_kernel.cli.{module}"), attribute)
        group.add_command(make_verb(verb, function, short_help))
    return group


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        click.echo(modular_kernel.__version__)
        ctx.exit()


@cache
def _make_command(verb: str | None) -> click.Group:
    """Return the `mk` command with one verb, or with all verbs if `verb` is None."""
    return make_application(VERBS if verb is None else (verb,))


def run(argv: list[str] | None = None) -> None:
    """Run `mk` with `argv`, or with `sys.argv[1:]` if it is None, and exit the process.

    If the output cannot be written, the exit status is 74 instead of the verb's own status.
    """
    with guard_streams():
        try:
            args = sys.argv[1:] if argv is None else argv
            verb = args[0] if args and args[0] in VERBS else None
            exits_after = argv is None
            with _pause_gc(exits_after=exits_after) if verb in _SHORT_VERBS else nullcontext():
                sys.exit(_run_command(_make_command(verb), args))
        except SystemExit as exit_request:
            if argv is None:  # the process exits now, and some packages print at exit
                sys.stdout.flush()
                redirect_stdout_to_stderr()
            if exit_request.code and not is_reporting_rank():
                time.sleep(_EXIT_DELAY_S)
            raise


@contextmanager
def _pause_gc(*, exits_after: bool) -> Iterator[None]:
    """Pause cyclic garbage collection, which takes longer than a short verb once torch is loaded.

    exits_after: whether the process exits after the context. All objects are then frozen, so that
        the garbage collection at exit skips them, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if exits_after:
            gc.freeze()
        if was_enabled:
            gc.enable()


def _run_command(command: click.Group, args: list[str]) -> int:
    """Run the command and return its exit status.

    A usage error is printed as one line. click would print several.
    """
    try:
        status = command.main(args, prog_name="mk", standalone_mode=False)
    except click.Abort:
        return _EXIT_INTERRUPTED
    except click.UsageError as error:
        if args:
            message = " ".join(error.format_message().split()).rstrip(".")
            print_error(
                f"{message} (see mk {args[0]} -h)" if args[0] in VERBS else f"{message} (see mk -h)"
            )
        else:
            error.show()  # the help
        return error.exit_code
    return status if isinstance(status, int) else 0
