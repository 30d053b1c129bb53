"""`mk models`: lists the model names that `--model` accepts, and the types of config.json files."""

from typing import Annotated

from modular_kernel.cli import output
from modular_kernel.cli.command import option
from modular_kernel.cli.options import AsJson
from modular_kernel.cli.presets import MODEL_OF_SHAPE, SHAPES
from modular_kernel.models.families import FAMILIES
from modular_kernel.models.registry import ALIASES, MODELS, Model

_SIZE_FIELDS = ("experts", "top_k", "hidden", "intermediate")
_LEGEND = """E: number of experts. K: experts per token (top-k). H: hidden size.
I: intermediate size. quant: scheme of the published weights, unless --quant
names another one. Abbreviations:
"""
_LAYERS_HEADING = """
Layers for benchmarks and tuning: plain SwiGLU, no bias, no scaling factor,
router weight on the output. A layer has the sizes of a whole model, or of the
shard of one rank (TP N: I / N, EP N: E / N)."""


def list_models(
    types: Annotated[bool, option("List the model types of config.json instead.")] = False,
    as_json: AsJson = None,
) -> None:
    """List the models that --model accepts by name, with their sizes, quantization and properties.

    A second table lists single layers for benchmarks and tuning. --model also accepts the path of a
    config.json or of its folder.
    """
    if types:
        _print_model_types(as_json)
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
    output.print_line(
        _LEGEND + ", ".join(f"{_get_weight_dtype(scheme)} is {scheme}" for scheme in schemes) + "."
    )
    output.print_table(
        ("model", "E", "K", "H", "I", "quant", "unlike plain SwiGLU"),
        [
            (
                name,
                *(getattr(m, field) for field in _SIZE_FIELDS),
                _get_weight_dtype(m.quant),
                _describe_differences(m),
            )
            for name, m in MODELS.items()
        ],
    )
    output.print_table(("alias", "model"), ALIASES.items())
    output.print_line(_LAYERS_HEADING)
    output.print_table(
        ("layer", "E", "K", "H", "I", "sizes of"),
        [
            (name, *(sizes[field] for field in _SIZE_FIELDS), MODEL_OF_SHAPE.get(name, ""))
            for name, sizes in SHAPES.items()
        ],
    )


def _get_weight_dtype(quant: str) -> str:
    """Return the weight dtype in the name of a scheme, such as "int4" for "int4_w4a16_group"."""
    return quant.partition("_")[0]


def _describe_differences(model: Model) -> str:
    """Describe how the layers of a model differ from plain SwiGLU layers."""
    differences = [model.activation] if model.activation != "silu" else []
    differences += ["bias"] if model.bias else []
    differences += ["weighted input"] if model.on_input else []
    differences += [f"output x {model.scaling}"] if model.scaling != 1.0 else []
    return ", ".join(differences)


def _print_model_types(as_json: str | None) -> None:
    types = {name: family.unsupported_reason or "read" for name, family in FAMILIES.items()}
    rows = [
        (name, "refused" if family.unsupported_reason else "read", family.unsupported_reason or "")
        for name, family in FAMILIES.items()
    ]
    columns = ("model type", "config.json", "reason")
    output.print_result(types, as_json, lambda: output.print_table(columns, rows))
