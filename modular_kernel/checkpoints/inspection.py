"""Inspection of a checkpoint by its config.json and file headers, without reading tensors.

report = inspect("checkpoint/")     # checks every layer's names, shapes and dtypes
report.problem_fields               # fields of Problem, common to the layers
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modular_kernel.checkpoints.checkpoint_files import has_tensors, local_path
from modular_kernel.checkpoints.expert_names import LAYOUTS, ExpertLayout
from modular_kernel.checkpoints.formats import Format, fit, format_of
from modular_kernel.checkpoints.safetensors_files import TensorFiles, open_tensors
from modular_kernel.checkpoints.slices import ONE_DTYPE, LayerSource, find_layers, find_source
from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    InputError,
    ShapeError,
    WeightsError,
)
from modular_kernel.models.config_file import config_of_file, problem_fields_of_config
from modular_kernel.models.router_config import router_of_config
from modular_kernel.spec.problem import ActivationSpec, dtype_name
from modular_kernel.spec.router import RouterSpec
from modular_kernel.utils.argument_checks import expect


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint's sizes, format and layers with experts, before any check of tensors.

    config_fields: fields of Problem in the config.json. layers: possible layouts of each layer,
    with name prefixes. config: path of the config.json, and its object that describes the layers.
    """

    files: TensorFiles
    config_fields: dict[str, Any]
    format: Format
    layers: dict[int, list[tuple[ExpertLayout, str]]]
    config: tuple[Path, dict[str, Any]]

    def source(self, layer: int) -> LayerSource:
        """Return the location of a layer's experts."""
        if layer not in self.layers:
            need = f"one with experts: {_ranges(sorted(self.layers))}"
            raise ConfigurationError(f"checkpoint {self.files.path}: layer", got=layer, need=need)
        fields = self.config_fields
        sizes = (fields["experts"], fields["hidden"], fields["intermediate"])
        return find_source(self.files, self.format, self.layers[layer], sizes, fields["bias"])

    def problem_fields(
        self, source: LayerSource, world: int = 1, *, dtype: str | None = None
    ) -> dict[str, Any]:
        """Return the fields of Problem that the checkpoint determines, for one of `world` TP ranks.

        dtype: overrides the dtype in the config.json and the one of unquantized files. Raises
        DtypeError if it is None and unquantized files have several.
        """
        fields = self.config_fields | ({} if dtype is None else {"dtype": dtype})
        stored_dtype = None if "dtype" in fields else source.dtype()
        fields |= {} if stored_dtype is None else {"dtype": dtype_name(stored_dtype)}
        act = ActivationSpec.parse(fields["activation"])
        if act.gated:
            act = replace(act, interleaved=source.layer.layout.interleaved)
        scheme = fit(self.format, fields["intermediate"], world=world, gated=act.gated)
        per_rank = fields["intermediate"] // world
        return fields | {"quant": str(scheme), "activation": act, "intermediate": per_rank}


def read_checkpoint_info(
    files: TensorFiles, config: str | Path | None = None, prefix: str | None = None
) -> CheckpointInfo:
    """Read a checkpoint's config.json, and find its layers with experts by tensor names."""
    folder = files.path if files.path.is_dir() else files.path.parent
    path, config_object = config_of_file(str(folder / "config.json" if config is None else config))
    config_fields: dict[str, Any] = problem_fields_of_config(path, config_object)
    quantization = config_object.get("quantization_config", config_object.get("compression_config"))
    _, layers = find_layers(files, LAYOUTS[config_object["model_type"]], prefix)
    depth = max(config_fields["hidden"], config_fields["intermediate"])
    format = format_of(quantization, path=str(path), depth=depth)
    return CheckpointInfo(files, config_fields, format, layers, (path, config_object))


@dataclass(frozen=True)
class InspectionReport:
    """The checked contents of all layers with experts in a checkpoint.

    layers: numbers of the layers. nbytes: total size of their experts' tensors. problem_fields:
    fields of Problem of a layer that is not split over ranks. dtype_of_files: True if the dtype
    comes from the files, not from the config.json or the caller. converted: dtypes of unquantized
    files that differ from the problem's.
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
        format_text = "unquantized" if str(self.format) == "none" else f"in {self.format}"
        return f"experts of {numbers} {_ranges(self.layers)} {format_text}, {size}"


def inspect(checkpoint: str | Path, dtype: str | None = None) -> InspectionReport:
    """Check every layer with experts against the config.json, reading only headers.

    checkpoint, dtype: as for `load_experts`. Raises what `load_experts` would raise, and DtypeError
    if only the files determine the dtype and layers differ.
    """
    expect("checkpoint", checkpoint, str | Path)
    expect("dtype", dtype, torch.dtype | str | None)
    with open_tensors(Path(checkpoint)) as files:
        info = read_checkpoint_info(files)
        fields, nbytes, layer_of_dtype = dict[str, Any](), 0, dict[str | None, int]()
        file_dtypes = set[str]()
        for layer in sorted(info.layers):
            source = info.source(layer)
            source.check()
            nbytes += source.nbytes()
            file_dtypes |= {dtype_name(kind) for kind in source.stored_dtypes()}
            layer_fields = info.problem_fields(source, dtype=dtype)
            layer_of_dtype.setdefault(layer_fields.get("dtype"), layer)
            fields = fields or layer_fields
        if len(layer_of_dtype) > 1:
            got = " and ".join(f"{kind} in layer {layer}" for kind, layer in layer_of_dtype.items())
            raise DtypeError(f"{files.path}: dtype", got=got, need=ONE_DTYPE)
        dtype_from_files = "dtype" in fields and dtype is None and "dtype" not in info.config_fields
        converted = tuple(sorted(file_dtypes - {fields.get("dtype", "bfloat16")}))
        layers = tuple(sorted(info.layers))
        return InspectionReport(layers, info.format, nbytes, fields, dtype_from_files, converted)


@dataclass(frozen=True)
class LayerConfig:
    """The configuration of one layer with experts, known before a tensor is read.

    problem_fields: fields of Problem, per TP rank. intermediate: I of an expert before it is split
    over TP ranks. router: None if the model_type's router is not known. model_type: from the
    config.json. format: of the files.
    """

    problem_fields: dict[str, Any]
    intermediate: int
    router: RouterSpec | None
    model_type: str
    format: Format


def layer_config(
    checkpoint: str | Path, layer: int, *, tp: int = 1, dtype: str | None = None
) -> LayerConfig:
    """Read the configuration of one layer from the config.json and the headers of the files.

    A folder without tensors, or a config.json alone, is sufficient. The rows of w1 then have the
    order of the model's own files, and the scheme is the one in the config.json. Raises the errors
    of `load_experts` for what is read.
    """
    checkpoint_path = local_path(checkpoint)
    if checkpoint_path.suffix != ".json" and has_tensors(checkpoint_path):
        with open_tensors(checkpoint_path) as files:
            info = read_checkpoint_info(files)
            fields = info.problem_fields(info.source(layer), tp, dtype=dtype)
            (path, config), config_fields, format = info.config, info.config_fields, info.format
    else:
        path, config = config_of_file(str(checkpoint_path))
        config_fields = problem_fields_of_config(path, config)
        act = ActivationSpec.parse(str(config_fields["activation"]))
        quantization = config.get("quantization_config", config.get("compression_config"))
        depth = max(config_fields["hidden"], config_fields["intermediate"])  # type: ignore[call-overload]
        format = format_of(quantization, path=str(path), depth=depth)
        intermediate: Any = config_fields["intermediate"]
        scheme = fit(format, intermediate, world=tp, gated=act.gated)
        fields = config_fields | {"quant": str(scheme), "activation": act}
        fields |= {"intermediate": intermediate // tp}
        fields |= {} if dtype is None else {"dtype": dtype}
    full_intermediate, top_k = config_fields["intermediate"], fields["top_k"]
    assert isinstance(full_intermediate, int)
    assert isinstance(top_k, int)
    router = router_of_config(path, config, top_k)
    return LayerConfig(fields, full_intermediate, router, config["model_type"], format)


def dtype_of_files(checkpoint: str | Path) -> str | None:
    """Return the dtype of unquantized experts from the headers, or None if it is ambiguous."""
    if not has_tensors(Path(checkpoint)):
        return None
    try:
        with open_tensors(Path(checkpoint)) as files:
            info = read_checkpoint_info(files)
            stored_dtype = info.source(min(info.layers)).dtype()
    except InputError:
        return None
    return None if stored_dtype is None else dtype_name(stored_dtype)


def raise_header_error(checkpoint: Path, error: Exception) -> None:
    """Raise the error that a checkpoint's headers explain, after another loader has failed.

    error: of that loader, which names no tensor. Returns if the headers show no error, or the model
    is unknown.
    """
    try:
        inspect(checkpoint)
    except (WeightsError, ShapeError, DtypeError) as header_error:
        raise header_error from error
    except InputError:
        return


def _ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ranges, such as "0 to 3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    ranges = [str(a) if a == b else f"{a} to {b}" for a, b in runs]
    return ", ".join(ranges[:8]) + (", ..." if len(ranges) > 8 else "")
