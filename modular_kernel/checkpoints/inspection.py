"""Inspection of a checkpoint by its config.json and file headers, without reading tensors.

report = inspect("checkpoint/")     # checks every layer's names, shapes and dtypes
report.groups                       # layers that are quantized alike, each with fields of Problem
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modular_kernel.checkpoints import gguf_files
from modular_kernel.checkpoints.checkpoint_files import has_tensors, local_path
from modular_kernel.checkpoints.formats import Format, fit
from modular_kernel.checkpoints.gguf_files import GgufFiles
from modular_kernel.checkpoints.open_files import open_tensors
from modular_kernel.checkpoints.quantization_map import UNQUANTIZED, QuantizationMap
from modular_kernel.checkpoints.safetensors_files import TensorFiles
from modular_kernel.checkpoints.slices import ONE_DTYPE, LayerSource, find_layers, find_source
from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    InputError,
    ShapeError,
    WeightsError,
)
from modular_kernel.models.config_file import config_of_file, config_path, layer_fields_of_config
from modular_kernel.models.expert_layouts import LAYOUTS, MISTRAL, ExpertLayout
from modular_kernel.models.layer_quantization import (
    layer_schemes,
    num_layers,
    quantization_of,
    quantized_layout,
)
from modular_kernel.models.mistral_params import NAME as PARAMS
from modular_kernel.models.quantization_config import scheme_of
from modular_kernel.models.router_config import router_of_config
from modular_kernel.spec.intermediate_split import split_intermediate
from modular_kernel.spec.problem import ActivationSpec, dtype_name
from modular_kernel.spec.router import RouterSpec
from modular_kernel.text import format_layers, format_ranges
from modular_kernel.utils.argument_checks import expect


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint's sizes, formats and layers with experts, before any check of tensors.

    config_fields: fields of Problem in the config.json, without quant; the activation is that of
    layer 0. formats: of each module.
    layers: possible layouts of each layer, with name prefixes. config: path of the config.json, and
    its object that describes the layers. quantize_inputs: as for `load_experts`.
    """

    files: TensorFiles
    config_fields: dict[str, Any]
    formats: QuantizationMap
    layers: dict[int, list[tuple[ExpertLayout, str]]]
    config: tuple[Path, dict[str, Any]]
    quantize_inputs: bool = False

    def source(self, layer: int) -> LayerSource:
        """Return the location of a layer's experts.

        Raises ConfigurationError for a layer without experts, or whose experts have several
        formats.
        """
        if layer not in self.layers:
            need = f"one with experts: {format_ranges(sorted(self.layers))}"
            raise ConfigurationError(f"checkpoint {self.files.path}: layer", got=layer, need=need)
        format = self._format(layer)
        source = self._source(layer, format)
        # Quantizers often leave layers for MTP as they are; bitsandbytes and torchao leave experts
        # that are parameters of the model class, and not modules, without an entry for them.
        by_class = format.method in ("bitsandbytes", "torchao")
        often_plain = by_class and not source.has_scales()
        if often_plain or (format.method != UNQUANTIZED.method and self.is_extra(layer)):
            plain = self._source(layer, UNQUANTIZED)
            if plain.has_floats() and (often_plain or not format.dequantized):
                return plain
        return source

    def common_layer(self) -> int:
        """Return the lowest of the model's own layers, if all of them have one format.

        Raises ConfigurationError if they differ, or if the experts of a layer do.
        """
        own = [layer for layer in sorted(self.layers) if not self.is_extra(layer)]
        by_format = dict[str, list[int]]()
        for layer in own or sorted(self.layers):
            by_format.setdefault(str(self.source(layer).format), []).append(layer)
        if len(by_format) > 1:
            texts = [f"{format_layers(layers)} {name}" for name, layers in by_format.items()]
            got = f"None, and several formats ({'; '.join(texts[:4])})"
            raise ConfigurationError(
                f"checkpoint {self.files.path}: layer", got=got, need="the layer's number"
            )
        return next(iter(by_format.values()))[0]

    def is_extra(self, layer: int) -> bool:
        """Return whether a layer follows the model's own, for multi-token prediction (MTP)."""
        count = num_layers(*self.config)
        return count is not None and layer >= count

    def _format(self, layer: int) -> Format:
        layout, prefix = self.layers[layer][0]
        experts = self.formats.experts_to_try(self.config_fields["experts"])
        modules = layout.modules(prefix.removesuffix(layout.path), experts)
        format = self.formats.common_format(modules, f"experts of layer {layer}")
        return format.with_inputs() if self.quantize_inputs else format

    def _source(self, layer: int, format: Format) -> LayerSource:
        fields = self.config_fields
        sizes = (fields["experts"], fields["hidden"], fields["intermediate"])
        return find_source(self.files, format, self.layers[layer], sizes, fields["bias"])

    def problem_fields(
        self, source: LayerSource, world: int = 1, *, dtype: str | None = None
    ) -> dict[str, Any]:
        """Return the fields of Problem that the checkpoint determines, for one of `world` TP ranks.

        intermediate is the width of a rank's weights, which includes padding.
        dtype: overrides the dtype in the config.json and the one of unquantized files. Raises
        DtypeError if it is None and unquantized files have several.
        """
        fields = self.config_fields | ({} if dtype is None else {"dtype": dtype})
        stored_dtype = None if "dtype" in fields else source.dtype()
        fields |= {} if stored_dtype is None else {"dtype": dtype_name(stored_dtype)}
        of_layer = layer_fields_of_config(*self.config, source.number)
        act = ActivationSpec.parse(of_layer["activation"])
        if act.gated:
            act = replace(act, interleaved=source.layer.layout.interleaved)
        scheme = fit(source.format, fields["intermediate"], world=world, gated=act.gated)
        width = split_intermediate(fields["intermediate"], world, scheme).width
        return fields | {"quant": str(scheme), "activation": act, "intermediate": width}


def read_checkpoint_info(
    files: TensorFiles,
    config: str | Path | None = None,
    prefix: str | None = None,
    *,
    quantize_inputs: bool = False,
) -> CheckpointInfo:
    """Read a checkpoint's config.json, and find its layers with experts by tensor names."""
    path, config_object = config_of_file(str(_config_path(files) if config is None else config))
    layouts = LAYOUTS[config_object["model_type"]]
    if isinstance(files, GgufFiles):
        quantization = quantization_of(config_of_file(str(files.path))[1])
        config_object |= {"quantization_config": quantization}
        layouts = gguf_files.LAYOUTS
    elif path.name == PARAMS:
        layouts = MISTRAL
    # What differs between layers, `CheckpointInfo.problem_fields` reads again.
    config_fields: dict[str, Any] = layer_fields_of_config(path, config_object, 0)
    formats = _formats(path, config_object, config_fields)
    _, layers = find_layers(files, layouts, prefix)
    return CheckpointInfo(
        files, config_fields, formats, layers, (path, config_object), quantize_inputs
    )


def _config_path(files: TensorFiles) -> Path:
    if isinstance(files, GgufFiles):
        return files.path
    return config_path(files.path if files.path.is_dir() else files.path.parent)


def _formats(path: Path, config: dict[str, Any], fields: dict[str, Any]) -> QuantizationMap:
    quantization, expert_dtype = quantization_of(config), config.get("expert_dtype")
    if quantization is None:
        scheme_of(str(path), config)  # refuses options of experts without quantization
    depth = max(fields["hidden"], fields["intermediate"])
    return QuantizationMap(quantization, path=str(path), depth=depth, expert_dtype=expert_dtype)


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose experts have one format and activation.

    layers: their numbers. nbytes: total size of their experts' tensors. problem_fields: fields of
    Problem of a layer that is not split over ranks.
    """

    layers: tuple[int, ...]
    format: Format
    nbytes: int
    problem_fields: dict[str, Any]

    def __str__(self) -> str:
        size = f"{self.nbytes / 2**30:.1f} GiB" if self.nbytes >= 2**28 else f"{self.nbytes} bytes"
        return f"{format_layers(self.layers)} {_format_text(self.format)}, {size}"


@dataclass(frozen=True)
class InspectionReport:
    """The checked contents of all layers with experts in a checkpoint.

    groups: layers of each format, the one of the lowest layer first. dtype_of_files: True if the
    dtype comes from the files, not from the config.json or the caller. converted: dtypes of
    unquantized files that differ from the problem's. extra: layers after the model's own, for
    multi-token prediction, each with a text about its format, or why it cannot be loaded.
    """

    groups: tuple[LayerGroup, ...]
    dtype_of_files: bool
    converted: tuple[str, ...] = ()
    extra: tuple[tuple[int, str], ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the model's layers with experts."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    @property
    def nbytes(self) -> int:
        """Total size of their experts' tensors."""
        return sum(group.nbytes for group in self.groups)

    @property
    def problem_fields(self) -> dict[str, Any]:
        """The fields of Problem of the lowest layer."""
        return self.groups[0].problem_fields

    def __str__(self) -> str:
        text = f"experts of {'; '.join(map(str, self.groups))}"
        return text + "".join(f"; MTP layer {layer} {what}" for layer, what in self.extra)


def _format_text(format: Format) -> str:
    return "unquantized" if format == UNQUANTIZED else f"in {format}"


def inspect(checkpoint: str | Path, dtype: str | None = None) -> InspectionReport:
    """Check every layer with experts against the config.json, reading only headers.

    checkpoint, dtype: as for `load_experts`. Raises what `load_experts` would raise for a layer of
    the model, and DtypeError if only the files determine the dtype and layers differ. Layers for
    multi-token prediction are only described.
    """
    expect("checkpoint", checkpoint, str | Path)
    expect("dtype", dtype, torch.dtype | str | None)
    with open_tensors(Path(checkpoint)) as files:
        info = read_checkpoint_info(files)
        by_format: dict[tuple[Format, str, str], LayerGroup] = {}
        layer_of_dtype, file_dtypes = dict[str, int](), set[str]()
        own = [layer for layer in sorted(info.layers) if not info.is_extra(layer)]
        for layer in own or sorted(info.layers):
            source = info.source(layer)
            source.check()
            file_dtypes |= {dtype_name(kind) for kind in source.stored_dtypes()}
            fields = info.problem_fields(source, dtype=dtype)
            if "dtype" in fields:
                layer_of_dtype.setdefault(fields["dtype"], layer)
            key = source.format, str(fields["quant"]), str(fields["activation"])
            group = by_format.get(key, LayerGroup((), source.format, 0, fields))
            by_format[key] = replace(
                group, layers=(*group.layers, layer), nbytes=group.nbytes + source.nbytes()
            )
        if len(layer_of_dtype) > 1:
            got = " and ".join(f"{kind} in layer {layer}" for kind, layer in layer_of_dtype.items())
            raise DtypeError(f"{files.path}: dtype", got=got, need=ONE_DTYPE)
        stated = dtype is not None or "dtype" in info.config_fields
        loaded_dtype = next(iter(layer_of_dtype), "bfloat16")
        extra = [(layer, _describe_extra(info, layer)) for layer in info.layers if layer not in own]
        return InspectionReport(
            tuple(by_format.values()),
            dtype_of_files=bool(layer_of_dtype) and not stated,
            converted=tuple(sorted(file_dtypes - {loaded_dtype})),
            extra=tuple(sorted(extra)) if own else (),
        )


def _describe_extra(info: CheckpointInfo, layer: int) -> str:
    """Describe the format of a layer that the model itself does not have."""
    try:
        source = info.source(layer)
        source.check()
    except InputError as error:
        return f"cannot be loaded ({error})"
    return _format_text(source.format)


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
    checkpoint: str | Path, layer: int | None, *, tp: int = 1, dtype: str | None = None
) -> LayerConfig:
    """Read the configuration of one layer from the config.json and the headers of the files.

    layer: None means any layer with experts. A folder without tensors, or a config.json alone, is
    sufficient. The rows of w1 then have the order of the model's own files, and the scheme is the
    one in the config.json. Raises the errors of `load_experts` for what is read, and
    ConfigurationError if `layer` is None and layers have several schemes.
    """
    checkpoint_path = local_path(checkpoint)
    if checkpoint_path.suffix != ".json" and has_tensors(checkpoint_path):
        with open_tensors(checkpoint_path) as files:
            info = read_checkpoint_info(files)
            source = info.source(info.common_layer() if layer is None else layer)
            fields, format = info.problem_fields(source, tp, dtype=dtype), source.format
            (path, config), config_fields = info.config, info.config_fields
    else:
        path, config = config_of_file(str(checkpoint_path))
        config_fields = layer_fields_of_config(path, config, layer)
        fields, format = _problem_fields_of_config(path, config, config_fields, layer, tp)
        fields |= {} if dtype is None else {"dtype": dtype}
    return LayerConfig(
        fields,
        config_fields["intermediate"],
        router_of_config(path, config, fields["top_k"]),
        config["model_type"],
        format,
    )


def _problem_fields_of_config(
    path: Path, config: dict[str, Any], fields: dict[str, Any], layer: int | None, tp: int
) -> tuple[dict[str, Any], Format]:
    """Return the fields of Problem of one layer, per TP rank, and its format, without files."""
    if layer is None:
        schemes = layer_schemes(path, config, fields)
        if len(schemes) > 1:
            got = f"None, and several schemes ({'; '.join(map(str, schemes[:4]))})"
            raise ConfigurationError(f"model {path}: layer", got=got, need="the layer's number")
        layer = (schemes[0].layers or (0,))[0]
    formats = _formats(path, config, fields)
    modules = quantized_layout(config).modules(
        f"model.layers.{layer}.", formats.experts_to_try(fields["experts"])
    )
    format = formats.common_format(modules, f"experts of layer {layer}")
    act, intermediate = ActivationSpec.parse(str(fields["activation"])), fields["intermediate"]
    scheme = fit(format, intermediate, world=tp, gated=act.gated)
    width = split_intermediate(intermediate, tp, scheme).width
    return fields | {"quant": str(scheme), "activation": act, "intermediate": width}, format


def dtype_of_files(checkpoint: str | Path) -> str | None:
    """Return the dtype of unquantized experts from the headers, or None if it is ambiguous."""
    if not has_tensors(Path(checkpoint)):
        return None
    try:
        with open_tensors(Path(checkpoint)) as files:
            info = read_checkpoint_info(files)
            dtypes = [info.source(layer).dtype() for layer in sorted(info.layers)]
    except InputError:
        return None
    return next((dtype_name(dtype) for dtype in dtypes if dtype is not None), None)


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
