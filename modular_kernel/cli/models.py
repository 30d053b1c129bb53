"""`mk models`: the model names that `--model` accepts, and the supported types of config.json."""

from typing import Annotated

from modular_kernel.cli import output
from modular_kernel.cli.command import option
from modular_kernel.cli.options import AsJson
from modular_kernel.cli.presets import SHAPE_OF, SHAPES
from modular_kernel.models.families import FAMILIES
from modular_kernel.models.registry import ALIASES, MODELS

_LEGEND = """\
E: experts. K: experts of a token (top-k). H: hidden size. I: intermediate size.
also: what is not plain SwiGLU; x N: factor on the routed output."""
_SHAPES = """
Layers for benchmarks and tuning, as plain SwiGLU: no bias, no factor, router
weight on the output. of: the model whose sizes they have, or one rank's share
of it (TP N: 1/N of I, EP N: 1/N of E)."""


def list_models(
    types: Annotated[bool, option("Instead: the model types of config.json, by name.")] = False,
    as_json: AsJson = None,
) -> None:
    """List the models that --model accepts by name, with their sizes and properties.

    Layers and shards for benchmarks and tuning follow. --model also accepts the path of a
    config.json or of its folder.
    """
    if types:
        _list_types(as_json)
        return
    models = {name: {"source": m.source} | m.problem_fields() for name, m in MODELS.items()}
    output.print_result(
        {"models": models, "aliases": ALIASES, "layers": SHAPES}, as_json, _print_models
    )


def _print_models() -> None:
    output.line(f"{_LEGEND}\n")
    output.line(f"{'model':27} {'E':>4} {'K':>3} {'H':>5} {'I':>6}  also")
    for name, m in MODELS.items():
        more = [m.activation] * (m.activation != "silu") + ["bias"] * m.bias
        more += ["weight on input"] * m.on_input + [f"x {m.scaling}"] * (m.scaling != 1.0)
        sizes = f"{m.experts:4} {m.top_k:3} {m.hidden:5} {m.intermediate:6}"
        output.line(f"{name:27} {sizes}  {', '.join(more)}".rstrip())
    output.line("\nThe same model by another name:")
    for alias, name in ALIASES.items():
        output.line(f"{alias:27} {name}")
    output.line(_SHAPES)
    output.line(f"\n{'layer':27} {'E':>4} {'K':>3} {'H':>5} {'I':>6}  of")
    for name, sizes_of in SHAPES.items():
        experts, top_k, hidden, intermediate = sizes_of.values()
        sizes = f"{experts:4} {top_k:3} {hidden:5} {intermediate:6}"
        output.line(f"{name:27} {sizes}  {SHAPE_OF.get(name, '')}".rstrip())


def _list_types(as_json: str | None) -> None:
    types = {name: family.refused or "read" for name, family in FAMILIES.items()}

    def show() -> None:
        for name, family in FAMILIES.items():
            output.line(f"{name:27} {'refused: ' + family.refused if family.refused else 'read'}")

    output.print_result(types, as_json, show)
