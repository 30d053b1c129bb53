"""What a checkpoint has, told by its config.json and the headers of its files alone.

found = inspect("checkpoint/")      # every layer's names, shapes and dtypes, or a typed error
found.problem_fields                # of each layer
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modular_kernel.checkpoints.expert_names import LAYOUTS, ExpertLayout
from modular_kernel.checkpoints.formats import Format, fit, format_of
from modular_kernel.checkpoints.safetensors_files import Tensors, has_tensors, open_tensors
from modular_kernel.checkpoints.slices import ONE_DTYPE, LayerSource, find_layers, find_source
from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    InputError,
    ShapeError,
    WeightsError,
)
from modular_kernel.models.config_file import config_of_file, facts_of_config
from modular_kernel.models.router_config import router_of_config
from modular_kernel.spec.problem import ActivationSpec, dtype_name
from modular_kernel.spec.router import RouterSpec
from modular_kernel.utils.argument_checks import expect


@dataclass(frozen=True)
class Examined:
    """What a checkpoint has, before anything is read: sizes and format, and the layers it has.

    config: the config.json, and the object in it that describes the layers.
    """

    files: Tensors
    facts: dict[str, Any]
    format: Format
    layers: dict[int, list[tuple[ExpertLayout, str]]]
    config: tuple[Path, dict[str, Any]]

    def source(self, layer: int) -> LayerSource:
        """Return where the experts of a layer lie."""
        if layer not in self.layers:
            need = f"one with experts: {_ranges(sorted(self.layers))}"
            raise ConfigurationError(f"checkpoint {self.files.path}: layer", got=layer, need=need)
        sizes = (self.facts["experts"], self.facts["hidden"], self.facts["intermediate"])
        return find_source(self.files, self.format, self.layers[layer], sizes, self.facts["bias"])

    def problem_fields(
        self, source: LayerSource, world: int = 1, *, dtype: str | None = None
    ) -> dict[str, Any]:
        """Return what the checkpoint settles of a Problem, on each of `world` ranks of tp.

        dtype: the caller's; None is the config.json's, else that of files that are not quantized.
        DtypeError where those have several.
        """
        facts = dict(self.facts) if dtype is None else self.facts | {"dtype": dtype}
        stored = None if "dtype" in facts else source.dtype()
        facts |= {} if stored is None else {"dtype": dtype_name(stored)}
        act = ActivationSpec.parse(facts["activation"])
        if act.gated:
            act = replace(act, interleaved=source.layer.layout.interleaved)
        scheme = fit(self.format, facts["intermediate"], world=world, gated=act.gated)
        share = facts["intermediate"] // world
        return facts | {"quant": str(scheme), "activation": act, "intermediate": share}


def examine(
    files: Tensors, config: str | Path | None = None, prefix: str | None = None
) -> Examined:
    """Read the config.json of a checkpoint, and find its layers with experts by their names."""
    folder = files.path if files.path.is_dir() else files.path.parent
    path, read = config_of_file(str(folder / "config.json" if config is None else config))
    facts: dict[str, Any] = facts_of_config(path, read)
    given = read.get("quantization_config", read.get("compression_config"))
    _, layers = find_layers(files, LAYOUTS[read["model_type"]], prefix)
    depth = max(facts["hidden"], facts["intermediate"])
    format = format_of(given, path=str(path), depth=depth)
    return Examined(files, facts, format, layers, (path, read))


@dataclass(frozen=True)
class Inspected:
    """What every layer of a checkpoint with experts has, checked.

    layers: their numbers. nbytes: of all their experts' tensors. problem_fields: what it settles of
    a Problem of a whole layer. dtype_of_files: whether the files tell its dtype, no config.json.
    converted: dtypes of the files, where no tensor is quantized, other than the problem's.
    """

    layers: tuple[int, ...]
    format: Format
    nbytes: int
    problem_fields: dict[str, Any]
    dtype_of_files: bool
    converted: tuple[str, ...] = ()

    def __str__(self) -> str:
        numbers = "layer" if len(self.layers) == 1 else "layers"
        size = f"{self.nbytes / 2**30:.1f} GiB" if self.nbytes >= 2**28 else f"{self.nbytes} bytes"
        stored = "unquantized" if str(self.format) == "none" else f"in {self.format}"
        return f"experts of {numbers} {_ranges(self.layers)} {stored}, {size}"


def inspect(checkpoint: str | Path, dtype: str | None = None) -> Inspected:
    """Check every layer with experts of a checkpoint against its config.json, by headers alone.

    checkpoint, dtype: as `load_experts` takes them. Raises what `load_experts` would, and
    DtypeError where the files alone tell dtypes and layers have several.
    """
    expect("checkpoint", checkpoint, str | Path)
    expect("dtype", dtype, torch.dtype | str | None)
    with open_tensors(Path(checkpoint)) as files:
        found = examine(files)
        fields, nbytes, of_layer = dict[str, Any](), 0, dict[str | None, int]()
        stored = set[str]()
        for layer in sorted(found.layers):
            source = found.source(layer)
            source.check()
            nbytes += source.nbytes()
            stored |= {dtype_name(kind) for kind in source.stored_dtypes()}
            own = found.problem_fields(source, dtype=dtype)
            of_layer.setdefault(own.get("dtype"), layer)
            fields = fields or own
        if len(of_layer) > 1:
            got = " and ".join(f"{kind} in layer {layer}" for kind, layer in of_layer.items())
            raise DtypeError(f"{files.path}: dtype", got=got, need=ONE_DTYPE)
        told = "dtype" in fields and dtype is None and "dtype" not in found.facts
        others = tuple(sorted(stored - {fields.get("dtype", "bfloat16")}))
        layers = tuple(sorted(found.layers))
        return Inspected(layers, found.format, nbytes, fields, told, others)


@dataclass(frozen=True)
class LayerConfig:
    """What a checkpoint says of a layer of experts before a tensor is read.

    problem_fields: what it settles of a Problem, on each of the ranks of tp. intermediate: of a
    whole expert. router: None where the router of the model_type is not known here. model_type:
    as the config.json has it.
    """

    problem_fields: dict[str, Any]
    intermediate: int
    router: RouterSpec | None
    model_type: str


def layer_config(
    checkpoint: str | Path, layer: int, *, tp: int = 1, dtype: str | None = None
) -> LayerConfig:
    """Read what a checkpoint's config.json and the headers of its files say of one layer.

    A folder without tensors, or a config.json by itself, is enough: rows of w1 then lie as the
    model's own files have them, and the scheme is the one that the config.json names. Errors of
    `load_experts` for what it reads.
    """
    place = Path(checkpoint)
    if place.suffix != ".json" and has_tensors(place):
        with open_tensors(place) as files:
            found = examine(files)
            fields = found.problem_fields(found.source(layer), tp, dtype=dtype)
            (path, config), facts = found.config, found.facts
    else:
        path, config = config_of_file(str(place))
        facts = facts_of_config(path, config)
        act = ActivationSpec.parse(str(facts["activation"]))
        given = config.get("quantization_config", config.get("compression_config"))
        depth = max(facts["hidden"], facts["intermediate"])  # type: ignore[call-overload]
        format = format_of(given, path=str(path), depth=depth)
        intermediate: Any = facts["intermediate"]
        scheme = fit(format, intermediate, world=tp, gated=act.gated)
        fields = facts | {"quant": str(scheme), "activation": act}
        fields |= {"intermediate": intermediate // tp}
        fields |= {} if dtype is None else {"dtype": dtype}
    whole, top_k = facts["intermediate"], fields["top_k"]
    assert isinstance(whole, int)
    assert isinstance(top_k, int)
    return LayerConfig(fields, whole, router_of_config(path, config, top_k), config["model_type"])


def dtype_of_files(checkpoint: str | Path) -> str | None:
    """Return the dtype of experts that are not quantized, by headers; None where none tells it."""
    if not has_tensors(Path(checkpoint)):
        return None
    try:
        with open_tensors(Path(checkpoint)) as files:
            found = examine(files)
            stored = found.source(min(found.layers)).dtype()
    except InputError:
        return None
    return None if stored is None else dtype_name(stored)


def raise_what_headers_tell(checkpoint: Path, error: Exception) -> None:
    """Raise what a checkpoint's headers tell of its files and experts, where another loader failed.

    error: the loader's, which names no tensor. Returns where the headers tell nothing, or are those
    of a model that is unknown here.
    """
    try:
        inspect(checkpoint)
    except (WeightsError, ShapeError, DtypeError) as found:
        raise found from error
    except InputError:
        return


def _ranges(numbers: Sequence[int]) -> str:
    """Show numbers that follow each other by the first and the last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(a) if a == b else f"{a} to {b}" for a, b in runs]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
