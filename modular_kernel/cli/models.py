"""`mk models`: the model names that `--model` accepts, and the model types of a config.json."""

from typing import Annotated

from modular_kernel.cli import output
from modular_kernel.cli.command import option
from modular_kernel.cli.options import AsJson
from modular_kernel.cli.presets import SHAPE_OF, SHAPES
from modular_kernel.models.families import FAMILIES
from modular_kernel.models.registry import ALIASES, MODELS, Model

_SIZE_FIELDS = ("experts", "top_k", "hidden", "intermediate")
_LEGEND = """E: number of experts. K: top-k. H: hidden size. I: intermediate size.
quant: scheme of the published weights, which --quant replaces:
"""
_LAYERS = """
Layers for benchmarks and tuning: plain SwiGLU, no bias, no scaling factor,
router weight on the output. A layer has the sizes of a whole model, or of the
shard of one rank (TP N: I / N, EP N: E / N)."""


def list_models(
    types: Annotated[bool, option("List the model types of config.json instead.")] = False,
    as_json: AsJson = None,
) -> None:
    """List the models that --model accepts by name, with their sizes, quantization and properties.

    A second table lists layers and shards for benchmarks and tuning. --model also accepts the path
    of a config.json or of its folder.
    """
    if types:
        _list_types(as_json)
        return
    models = {
        name: {"source": m.source, "quant": m.quant} | m.problem_fields()
        for name, m in MODELS.items()
    }
    output.print_result(
        {"models": models, "aliases": ALIASES, "layers": SHAPES}, as_json, _print_models
    )


def _print_models() -> None:
    schemes = dict.fromkeys(m.quant for m in MODELS.values() if m.quant != "none")
    output.line(_LEGEND + ", ".join(f"{_short(scheme)} is {scheme}" for scheme in schemes) + ".")
    output.table(
        ("model", "E", "K", "H", "I", "quant", "unlike plain SwiGLU"),
        [
            (name, *(getattr(m, field) for field in _SIZE_FIELDS), _short(m.quant), _differences(m))
            for name, m in MODELS.items()
        ],
    )
    output.table(("alias", "model"), ALIASES.items())
    output.line(_LAYERS)
    output.table(
        ("layer", "E", "K", "H", "I", "sizes of"),
        [
            (name, *(sizes[field] for field in _SIZE_FIELDS), SHAPE_OF.get(name, ""))
            for name, sizes in SHAPES.items()
        ],
    )


def _short(quant: str) -> str:
    """Return the weight dtype of a scheme's name, such as "int4"."""
    return quant.partition("_")[0]


def _differences(model: Model) -> str:
    """Describe the properties of a model that a plain SwiGLU layer does not have."""
    differences = [model.activation] if model.activation != "silu" else []
    differences += ["bias"] if model.bias else []
    differences += ["weighted input"] if model.on_input else []
    differences += [f"output x {model.scaling}"] if model.scaling != 1.0 else []
    return ", ".join(differences)


def _list_types(as_json: str | None) -> None:
    types = {name: family.refused or "read" for name, family in FAMILIES.items()}
    rows = [
        (name, "refused" if family.refused else "read", family.refused or "")
        for name, family in FAMILIES.items()
    ]
    columns = ("model type", "config.json", "reason")
    output.print_result(types, as_json, lambda: output.table(columns, rows))
