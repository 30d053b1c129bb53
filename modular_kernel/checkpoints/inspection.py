"""Inspects a checkpoint by its config.json and the headers of its files.

    report = inspect("checkpoint/")  # checks the names, shapes and dtypes of every layer's experts
    report.groups                    # one LayerGroup for each format, with the fields of Problem

Loading also starts with `read_checkpoint_info`, which finds the layers with experts and their
formats.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modular_kernel.checkpoints import gguf_files
from modular_kernel.checkpoints.checkpoint_files import has_tensors, resolve_path
from modular_kernel.checkpoints.formats import Format, fit_scheme
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
    quantizer_layout,
)
from modular_kernel.models.mistral_params import PARAMS_FILE
from modular_kernel.models.quantization_config import scheme_of
from modular_kernel.models.router_config import router_of_config
from modular_kernel.spec.intermediate_split import split_intermediate
from modular_kernel.spec.problem import ActivationSpec, dtype_name
from modular_kernel.spec.router import RouterSpec
from modular_kernel.text import format_layers, format_ranges
from modular_kernel.utils.argument_checks import expect


@dataclass(frozen=True)
class CheckpointInfo:
    """The sizes, formats and layers with experts of a checkpoint, before any check of tensors.

    config_fields: the fields of Problem in the config.json, without quant, with the activation of
        layer 0.
    formats: the storage formats of all modules.
    layers: [(layout, prefix of the experts' names), ...] for each layer, from `find_layers`.
    config: path of the config.json, and the object in it that describes the layers.
    quantize_inputs: as for `load_experts`.
    """

    files: TensorFiles
    config_fields: dict[str, Any]
    formats: QuantizationMap
    layers: dict[int, list[tuple[ExpertLayout, str]]]
    config: tuple[Path, dict[str, Any]]
    quantize_inputs: bool = False

    def layer_source(self, layer: int) -> LayerSource:
        """Return the source of a layer's experts, with the format that they have in the files.

        Raises ConfigurationError for a layer without experts, and for experts with several formats.
        """
        if layer not in self.layers:
            need = f"one with experts: {format_ranges(sorted(self.layers))}"
            raise ConfigurationError(f"checkpoint {self.files.path}: layer", got=layer, need=need)
        format = self._find_configured_format(layer)
        source = self._find_source(layer, format)
        # The files may have unquantized experts even if the quantization_config does not exclude
        # them. Many quantizers skip MTP layers. bitsandbytes and torchao skip experts that are
        # parameters instead of modules of the model class.
        skips_parameters = format.method in ("bitsandbytes", "torchao") and not source.has_scales()
        is_quantized = format.method != UNQUANTIZED.method
        if skips_parameters or (is_quantized and self.is_mtp_layer(layer)):
            unquantized = self._find_source(layer, UNQUANTIZED)
            if unquantized.has_floats() and (skips_parameters or not format.dequantized):
                return unquantized
        return source

    def representative_layer(self) -> int:
        """Return the lowest layer with experts if all layers have the same format.

        MTP layers are ignored. Raises ConfigurationError if formats differ.
        """
        layers_by_format = dict[str, list[int]]()
        for layer in self.model_layers() or sorted(self.layers):
            layers_by_format.setdefault(str(self.layer_source(layer).format), []).append(layer)
        if len(layers_by_format) > 1:
            descriptions = [
                f"{format_layers(layers)} {name}" for name, layers in layers_by_format.items()
            ]
            got = f"None, and several formats ({'; '.join(descriptions[:4])})"
            raise ConfigurationError(
                f"checkpoint {self.files.path}: layer", got=got, need="the layer's number"
            )
        return next(iter(layers_by_format.values()))[0]

    def is_mtp_layer(self, layer: int) -> bool:
        """Return whether a layer is for multi-token prediction (MTP).

        MTP layers are stored after the layers of the main model.
        """
        num_model_layers = num_layers(*self.config)
        return num_model_layers is not None and layer >= num_model_layers

    def model_layers(self) -> list[int]:
        """Return the layers with experts, except for MTP layers, in ascending order."""
        return [layer for layer in sorted(self.layers) if not self.is_mtp_layer(layer)]

    def _find_configured_format(self, layer: int) -> Format:
        """Return the format of a layer's experts according to the quantization_config."""
        layout, prefix = self.layers[layer][0]
        experts = self.formats.representative_experts(self.config_fields["experts"])
        modules = layout.projection_names(prefix.removesuffix(layout.prefix), experts)
        format = self.formats.common_format(modules, f"experts of layer {layer}")
        return format.with_inputs() if self.quantize_inputs else format

    def _find_source(self, layer: int, format: Format) -> LayerSource:
        fields = self.config_fields
        sizes = (fields["experts"], fields["hidden"], fields["intermediate"])
        return find_source(self.files, format, self.layers[layer], sizes, fields["bias"])

    def problem_fields(
        self, source: LayerSource, world: int = 1, *, dtype: str | None = None
    ) -> dict[str, Any]:
        """Return the fields of Problem that the checkpoint determines, for one of `world` TP ranks.

        `intermediate` is the width of a rank's weights, including padding.

        dtype: dtype of the layer. None uses the dtype in the config.json, or else the dtype of
            unquantized files. Raises DtypeError if the files have several dtypes.
        """
        fields = self.config_fields | ({} if dtype is None else {"dtype": dtype})
        stored_dtype = None if "dtype" in fields else source.dtype()
        fields |= {} if stored_dtype is None else {"dtype": dtype_name(stored_dtype)}
        layer_fields = layer_fields_of_config(*self.config, source.layer_number)
        act = ActivationSpec.parse(layer_fields["activation"])
        if act.gated:
            act = replace(act, interleaved=source.layer.layout.interleaved)
        return fields | _make_share_fields(source.format, fields["intermediate"], world, act)


def read_checkpoint_info(
    files: TensorFiles,
    config: str | Path | None = None,
    prefix: str | None = None,
    *,
    quantize_inputs: bool = False,
) -> CheckpointInfo:
    """Read a checkpoint's config.json, and find its layers with experts by tensor names.

    files: the open files.
    config: a config.json to use instead of the one next to the tensors.
    prefix, quantize_inputs: as for `load_experts`.
    """
    path, config_object = config_of_file(
        str(_find_config_path(files) if config is None else config)
    )
    layouts = LAYOUTS[config_object["model_type"]]
    if isinstance(files, GgufFiles):
        quantization = quantization_of(config_of_file(str(files.path))[1])
        config_object |= {"quantization_config": quantization}
        layouts = gguf_files.LAYOUTS
    elif path.name == PARAMS_FILE:
        layouts = MISTRAL
    # `CheckpointInfo.problem_fields` replaces the fields that differ between layers.
    config_fields: dict[str, Any] = layer_fields_of_config(path, config_object, 0)
    formats = _make_quantization_map(path, config_object, config_fields)
    _, layers = find_layers(files, layouts, prefix)
    return CheckpointInfo(
        files, config_fields, formats, layers, (path, config_object), quantize_inputs
    )


def _find_config_path(files: TensorFiles) -> Path:
    if isinstance(files, GgufFiles):
        return files.path
    return config_path(files.path if files.path.is_dir() else files.path.parent)


def _make_quantization_map(
    path: Path, config: dict[str, Any], fields: dict[str, Any]
) -> QuantizationMap:
    quantization, expert_dtype = quantization_of(config), config.get("expert_dtype")
    if quantization is None:
        scheme_of(str(path), config)  # raises if there is an expert_dtype without quantization
    depth = max(fields["hidden"], fields["intermediate"])
    return QuantizationMap(quantization, path=str(path), depth=depth, expert_dtype=expert_dtype)


def _make_share_fields(
    format: Format, intermediate: int, world: int, act: ActivationSpec
) -> dict[str, Any]:
    """Return quant, activation and intermediate of the Problem of one of `world` TP ranks."""
    scheme = fit_scheme(format, intermediate, world=world, gated=act.gated)
    width = split_intermediate(intermediate, world, scheme).width
    return {"quant": str(scheme), "activation": act, "intermediate": width}


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose experts have one format and activation.

    layers: numbers of the layers.
    nbytes: total size of their experts' tensors in the files, in bytes.
    problem_fields: the fields of Problem of a layer that is not split over ranks.
    """

    layers: tuple[int, ...]
    format: Format
    nbytes: int
    problem_fields: dict[str, Any]

    def __str__(self) -> str:
        size = f"{self.nbytes / 2**30:.1f} GiB" if self.nbytes >= 2**28 else f"{self.nbytes} bytes"
        return f"{format_layers(self.layers)} {_describe_format(self.format)}, {size}"


@dataclass(frozen=True)
class InspectionReport:
    """The experts in a checkpoint, after a check of the headers of all layers.

    groups: the layers by format and activation. The group of the lowest layer comes first.
    is_dtype_from_files: whether the dtype comes from the files instead of the config.json or the
        caller.
    converted_dtypes: dtypes of unquantized files that differ from the dtype of the layer.
    mtp_layers: (number, status) of layers for multi-token prediction. The status is the format, or
        the reason why the layer cannot be loaded.
    """

    groups: tuple[LayerGroup, ...]
    is_dtype_from_files: bool
    converted_dtypes: tuple[str, ...] = ()
    mtp_layers: tuple[tuple[int, str], ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers with experts, except for MTP layers."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    @property
    def nbytes(self) -> int:
        """The total size of the experts' tensors in the files, in bytes, except for MTP layers."""
        return sum(group.nbytes for group in self.groups)

    @property
    def problem_fields(self) -> dict[str, Any]:
        """The fields of Problem of the lowest layer with experts."""
        return self.groups[0].problem_fields

    def __str__(self) -> str:
        summary = f"experts of {'; '.join(map(str, self.groups))}"
        return summary + "".join(f"; MTP layer {n} {status}" for n, status in self.mtp_layers)


def _describe_format(format: Format) -> str:
    return "unquantized" if format == UNQUANTIZED else f"in {format}"


def inspect(checkpoint: str | Path, dtype: str | None = None) -> InspectionReport:
    """Check every layer with experts against the config.json, reading only headers.

    Errors in MTP layers are described in the report instead of being raised.

    checkpoint, dtype: as for `load_experts`.

    Raises the errors that `load_experts` would raise for any layer. Raises DtypeError if only the
    files state the dtype and layers have different dtypes.
    """
    expect("checkpoint", checkpoint, str | Path)
    expect("dtype", dtype, torch.dtype | str | None)
    with open_tensors(Path(checkpoint)) as files:
        info = read_checkpoint_info(files)
        group_by_format: dict[tuple[Format, str, str], LayerGroup] = {}
        layer_by_dtype, file_dtypes = dict[str, int](), set[str]()
        model_layers = info.model_layers()
        for layer in model_layers or sorted(info.layers):
            source = info.layer_source(layer)
            source.check()
            file_dtypes |= {dtype_name(stored) for stored in source.stored_dtypes()}
            fields = info.problem_fields(source, dtype=dtype)
            if "dtype" in fields:
                layer_by_dtype.setdefault(fields["dtype"], layer)
            key = source.format, str(fields["quant"]), str(fields["activation"])
            group = group_by_format.get(key, LayerGroup((), source.format, 0, fields))
            group_by_format[key] = replace(
                group, layers=(*group.layers, layer), nbytes=group.nbytes + source.nbytes()
            )
        if len(layer_by_dtype) > 1:
            got = " and ".join(f"{name} in layer {layer}" for name, layer in layer_by_dtype.items())
            raise DtypeError(f"{files.path}: dtype", got=got, need=ONE_DTYPE)
        is_dtype_given = dtype is not None or "dtype" in info.config_fields
        loaded_dtype = next(iter(layer_by_dtype), "bfloat16")
        mtp_layers = [
            (layer, _describe_mtp_layer(info, layer))
            for layer in sorted(info.layers)
            if layer not in model_layers
        ]
        return InspectionReport(
            tuple(group_by_format.values()),
            is_dtype_from_files=bool(layer_by_dtype) and not is_dtype_given,
            converted_dtypes=tuple(sorted(file_dtypes - {loaded_dtype})),
            mtp_layers=tuple(mtp_layers) if model_layers else (),
        )


def _describe_mtp_layer(info: CheckpointInfo, layer: int) -> str:
    """Return the format of an MTP layer, or the reason why it cannot be loaded."""
    try:
        source = info.layer_source(layer)
        source.check()
    except InputError as error:
        return f"cannot be loaded ({error})"
    return _describe_format(source.format)


@dataclass(frozen=True)
class LayerConfig:
    """The configuration of one layer with experts, from the config.json and the file headers.

    problem_fields: the fields of Problem of one TP rank.
    intermediate: I of an expert before it is split over TP ranks.
    router: None if the model_type has no known router.
    format: the storage format of the files.
    """

    problem_fields: dict[str, Any]
    intermediate: int
    router: RouterSpec | None
    model_type: str
    format: Format


def read_layer_config(
    checkpoint: str | Path, layer: int | None, *, tp: int = 1, dtype: str | None = None
) -> LayerConfig:
    """Read the configuration of one layer from the config.json and the headers of the files.

    checkpoint: as for `load_experts`. A config.json alone, or a folder without tensors, is enough.
        Gate and up rows then have the order of the model_type's published checkpoints.
    layer: number of the layer. None uses any layer with experts.
    tp: number of TP ranks.
    dtype: as for `load_experts`.

    Raises the errors of `load_experts`, and ConfigurationError if `layer` is None and layers have
    several schemes.
    """
    checkpoint_path = resolve_path(checkpoint)
    if checkpoint_path.suffix != ".json" and has_tensors(checkpoint_path):
        with open_tensors(checkpoint_path) as files:
            info = read_checkpoint_info(files)
            source = info.layer_source(info.representative_layer() if layer is None else layer)
            fields, format = info.problem_fields(source, tp, dtype=dtype), source.format
            (path, config), config_fields = info.config, info.config_fields
    else:
        path, config = config_of_file(str(checkpoint_path))
        config_fields = layer_fields_of_config(path, config, layer)
        fields, format = _read_problem_fields(path, config, config_fields, layer, tp)
        fields |= {} if dtype is None else {"dtype": dtype}
    return LayerConfig(
        fields,
        config_fields["intermediate"],
        router_of_config(path, config, fields["top_k"]),
        config["model_type"],
        format,
    )


def _read_problem_fields(
    path: Path, config: dict[str, Any], fields: dict[str, Any], layer: int | None, tp: int
) -> tuple[dict[str, Any], Format]:
    """Return the fields of Problem of one TP rank, and the format, from a config.json alone."""
    if layer is None:
        schemes = layer_schemes(path, config, fields)
        if len(schemes) > 1:
            got = f"None, and several schemes ({'; '.join(map(str, schemes[:4]))})"
            raise ConfigurationError(f"model {path}: layer", got=got, need="the layer's number")
        layer = (schemes[0].layers or (0,))[0]
    formats = _make_quantization_map(path, config, fields)
    modules = quantizer_layout(config).projection_names(
        f"model.layers.{layer}.", formats.representative_experts(fields["experts"])
    )
    format = formats.common_format(modules, f"experts of layer {layer}")
    act = ActivationSpec.parse(str(fields["activation"]))
    return fields | _make_share_fields(format, fields["intermediate"], tp, act), format


def read_expert_dtype(checkpoint: str | Path) -> str | None:
    """Return the dtype of unquantized experts from the headers, or None if it is not determined."""
    if not has_tensors(Path(checkpoint)):
        return None
    try:
        with open_tensors(Path(checkpoint)) as files:
            info = read_checkpoint_info(files)
            dtypes = [info.layer_source(layer).dtype() for layer in sorted(info.layers)]
    except InputError:
        return None
    return next((dtype_name(dtype) for dtype in dtypes if dtype is not None), None)


def raise_header_error(checkpoint: Path, error: Exception) -> None:
    """Raise the error that `inspect` finds in a checkpoint, after another loader has failed.

    The message names the invalid tensor. Returns normally if `inspect` finds no error in the
    headers, or does not support the model.

    error: the error of the other loader, which becomes the cause.
    """
    try:
        inspect(checkpoint)
    except (WeightsError, ShapeError, DtypeError) as header_error:
        raise header_error from error
    except InputError:
        return
