"""Builds a transformers model with random weights, for `mk bench --hf`. Nothing is downloaded.

The model is built from a config.json, or from the default config of its type with the sizes of a
model in `mk models`. transformers is an optional dependency, so it is imported inside functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.config_file import config_of_file, is_model_path
from modular_kernel.models.families import FAMILIES
from modular_kernel.models.registry import find_model
from modular_kernel.select.budget import format_gigabytes, free_bytes
from modular_kernel.spec.problem import parse_dtype

_QUANTIZATION_ENTRIES = ("quantization_config", "compression_config")
# Config entries that refer to quantized weights or custom code, or do not affect the model.
_IGNORED_ENTRIES = (
    *_QUANTIZATION_ENTRIES,
    "auto_map",
    "architectures",
    "transformers_version",
    "_name_or_path",
)
_MAX_FREE_FRACTION = 0.9


@dataclass(frozen=True)
class RandomModel:
    """A model in eval mode.

    model_type: the model_type of its config.
    layers: (number of layers of the model, number of layers in its config).
    parameters, bytes: number of parameters, and their total size in bytes.
    notes: differences between the model and its config.
    """

    model: Any
    model_type: str
    layers: tuple[int, int]
    parameters: int
    bytes: int
    notes: tuple[str, ...]


def import_transformers() -> Any:
    """Import transformers. Raises ConfigurationError if it is missing or too old."""
    try:
        import_module("modular_kernel.integrations.transformers")
        return import_module("transformers")
    except ImportError as error:
        need = "transformers: pip install 'modular-kernel[transformers]'"
        raise ConfigurationError("--hf", got=str(error)[:200], need=need) from None


def build_random_model(
    source: str, device: torch.device, *, dtype: str | None = None, layers: int | None = None
) -> RandomModel:
    """Build a model without running custom code that its config refers to.

    source: path of a config.json or of its folder, or a name in `mk models`.
    dtype: dtype of the weights. None uses the dtype of the config, or bfloat16 if it has none.
    layers: number of layers to build, starting with the first. None builds all.

    Raises ConfigurationError if transformers is missing or cannot build the model type, the file is
    invalid, the model has no experts, or its weights do not fit into the device's free memory.
    """
    transformers = import_transformers()
    values, notes = _read_config_values(transformers, source)
    config_layers = values.get("num_hidden_layers")
    if type(config_layers) is not int or config_layers < 1:
        raise ConfigurationError(
            source, got=f"num_hidden_layers = {config_layers!r}", need="1 or more"
        )
    if layers is not None:
        if not 1 <= layers <= config_layers:
            raise ConfigurationError("--layers", got=layers, need=f"from 1 to {config_layers}")
        values = _keep_first_layers(values, config_layers, layers)
        notes.append(f"{layers} of {config_layers} layers")
    for name in _QUANTIZATION_ENTRIES:
        if values.get(name) is not None:
            notes.append(f"{name} is ignored: weights are random and not quantized")
    config_dtype = values.get("dtype") or values.get("torch_dtype") or "bfloat16"
    weights_dtype = parse_dtype(dtype or config_dtype)
    config = _make_config(transformers, source, values)
    meta_model = _build_model(transformers, source, config, weights_dtype, torch.device("meta"))
    if not any(map(_is_dispatched, meta_model.modules())):
        need = "a model whose experts implementation can be selected"
        if layers is not None:
            need += ", or more --layers, because the first ones may be dense"
        raise ConfigurationError(
            source, got=f"no selectable experts in {type(meta_model).__name__}", need=need
        )
    size = sum(p.nbytes for p in meta_model.parameters())
    free = free_bytes(device)
    if free is not None and size > _MAX_FREE_FRACTION * free:
        got = f"{format_gigabytes(size)} of weights"
        raise ConfigurationError(
            source,
            got=got,
            need=f"at most {format_gigabytes(_MAX_FREE_FRACTION * free)} (see --layers)",
        )
    torch.manual_seed(0)
    return RandomModel(
        model=_build_model(transformers, source, config, weights_dtype, device).eval(),
        model_type=values["model_type"],
        layers=(layers or config_layers, config_layers),
        parameters=sum(p.numel() for p in meta_model.parameters()),
        bytes=size,
        notes=tuple(notes),
    )


def _is_dispatched(module: torch.nn.Module) -> bool:
    """Return whether transformers dispatches the module to a selectable implementation."""
    from modular_kernel.integrations.transformers.modules import is_dispatched

    return is_dispatched(module)


def _read_config_values(transformers: Any, source: str) -> tuple[dict[str, Any], list[str]]:
    """Return the entries of the config of `source`, and notes on default values."""
    if is_model_path(source):
        _, values_of_file = config_of_file(source)
        _get_config_class(transformers, source, values_of_file["model_type"])
        return values_of_file, []
    known_model = find_model(source)
    if known_model is None or not known_model.model_type:
        got = (
            repr(source[:200])
            if known_model is None
            else f"the layer of {known_model.source} alone"
        )
        raise ConfigurationError("--hf", got=got, need="the path of its config.json")
    default_config = _get_config_class(transformers, source, known_model.model_type)()
    values = default_config.to_dict()
    family = FAMILIES[known_model.model_type]
    keys = (family.experts, family.top_k, family.hidden, family.intermediate)
    sizes = (known_model.experts, known_model.top_k, known_model.hidden, known_model.intermediate)
    sizes_by_key = {
        next(name for name in names.split() if name in values): size
        for names, size in zip(keys, sizes, strict=True)
    }
    note = f"attention, layers and vocabulary are the defaults of {type(default_config).__name__}"
    return {**values, **sizes_by_key, "model_type": known_model.model_type}, [note]


def _get_config_class(transformers: Any, source: str, model_type: str) -> Any:
    """Return transformers' configuration class of a model type.

    Raises ConfigurationError if transformers has no causal LM of this type.
    """
    try:
        config_class = transformers.CONFIG_MAPPING[model_type]
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    except KeyError:
        got = f"model_type = {model_type!r}"
        need = f"one that AutoModelForCausalLM of transformers {transformers.__version__} builds"
        raise ConfigurationError(source, got=got, need=need) from None
    return config_class


def _keep_first_layers(
    values: Mapping[str, Any], config_layers: int, layers: int
) -> dict[str, Any]:
    """Reduce a config to its first `layers` layers. Lists with an entry per layer are truncated."""

    def truncate(value: Any) -> Any:
        return value[:layers] if isinstance(value, list) and len(value) == config_layers else value

    return {
        **{name: truncate(value) for name, value in values.items()},
        "num_hidden_layers": layers,
    }


def _make_config(transformers: Any, source: str, values: Mapping[str, Any]) -> Any:
    entries = {name: value for name, value in values.items() if name not in _IGNORED_ENTRIES}
    try:
        return _get_config_class(transformers, source, values["model_type"]).from_dict(entries)
    except Exception as error:  # the config class can raise any exception
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigurationError(source, got=got, need="a config that its class takes") from error


def _build_model(
    transformers: Any, source: str, config: Any, dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    try:
        with device:
            model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, experts_implementation="eager"
            )
    except Exception as error:  # for example, if sizes contradict each other or memory is exhausted
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigurationError(source, got=got, need="a config that can be built") from error
    return model
