"""A whole transformers model with random weights, built from a config; nothing is downloaded.

transformers is an optional dependency, so it is imported only inside functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.config_file import config_of_file, is_file
from modular_kernel.models.families import FAMILIES
from modular_kernel.models.registry import model_named
from modular_kernel.select.budget import free_bytes, gigabytes
from modular_kernel.spec.problem import parse_dtype

_QUANTIZED = ("quantization_config", "compression_config")
# Entries of a config that refer to quantized weights or to custom code; neither is used.
_LEFT_OUT = (*_QUANTIZED, "auto_map", "architectures", "transformers_version", "_name_or_path")
_MOST_OF_FREE = 0.9


@dataclass(frozen=True)
class RandomModel:
    """A model in eval mode, with its properties.

    layers: (layers of the model, layers of its config). notes: differences from the config.
    """

    model: Any
    model_type: str
    layers: tuple[int, int]
    parameters: int
    bytes: int
    notes: tuple[str, ...]


def transformers() -> Any:
    """Import transformers; raise ConfigurationError if it is missing or too old."""
    try:
        import_module("modular_kernel.integrations.transformers")
        return import_module("transformers")
    except ImportError as error:
        need = "transformers: pip install 'modular-kernel[transformers]'"
        raise ConfigurationError("--hf", got=str(error)[:200], need=need) from None


def random_model(
    source: str, device: torch.device, *, dtype: str | None = None, layers: int | None = None
) -> RandomModel:
    """Build the model of a config.json, of its folder, or of a name of `mk models`.

    dtype: of the weights; None means that of the config, else bfloat16. layers: keep only this many
    first layers. Custom code that the config refers to is never run. Raises ConfigurationError
    without transformers, for an invalid file, a type that transformers cannot build, a model
    without experts, and weights that do not fit into the free memory of the device.
    """
    library = transformers()
    values, notes = _values(library, source)
    config_layers = values.get("num_hidden_layers")
    if type(config_layers) is not int or config_layers < 1:
        raise ConfigurationError(
            source, got=f"num_hidden_layers = {config_layers!r}", need="1 or more"
        )
    if layers is not None:
        if not 1 <= layers <= config_layers:
            raise ConfigurationError("--layers", got=layers, need=f"from 1 to {config_layers}")
        values = _with_layers(values, config_layers, layers)
        notes.append(f"{layers} of {config_layers} layers")
    for name in _QUANTIZED:
        if values.get(name) is not None:
            notes.append(f"{name} is left out: weights are random and not quantized")
    config_dtype = values.get("dtype") or values.get("torch_dtype") or "bfloat16"
    weights_dtype = parse_dtype(dtype or config_dtype)
    config = _config(library, source, values)
    meta_model = _built(library, source, config, weights_dtype, torch.device("meta"))
    if not any(map(_dispatched, meta_model.modules())):
        need = "a model whose experts transformers dispatches"
        if layers is not None:
            need += ", or more --layers: the first ones may be dense"
        raise ConfigurationError(
            source, got=f"no such experts in {type(meta_model).__name__}", need=need
        )
    size = sum(p.nbytes for p in meta_model.parameters())
    free = free_bytes(device)
    if free is not None and size > _MOST_OF_FREE * free:
        got = f"{gigabytes(size)} of weights"
        raise ConfigurationError(
            source, got=got, need=f"at most {gigabytes(_MOST_OF_FREE * free)} (see --layers)"
        )
    torch.manual_seed(0)
    return RandomModel(
        model=_built(library, source, config, weights_dtype, device).eval(),
        model_type=values["model_type"],
        layers=(layers or config_layers, config_layers),
        parameters=sum(p.numel() for p in meta_model.parameters()),
        bytes=size,
        notes=tuple(notes),
    )


def _dispatched(module: torch.nn.Module) -> bool:
    from modular_kernel.integrations.transformers.modules import is_dispatched

    return is_dispatched(module)


def _values(library: Any, source: str) -> tuple[dict[str, Any], list[str]]:
    """Return the entries of the config of `source`, and notes on entries that are defaults."""
    if is_file(source):
        _, values_of_file = config_of_file(source)
        _class_of(library, source, values_of_file["model_type"])
        return values_of_file, []
    published = model_named(source)
    if published is None or not published.model_type:
        got = repr(source[:200]) if published is None else f"the layer of {published.source} alone"
        raise ConfigurationError("--hf", got=got, need="the path of its config.json")
    default = _class_of(library, source, published.model_type)()
    values = default.to_dict()
    family = FAMILIES[published.model_type]
    keys = (family.experts, family.top_k, family.hidden, family.intermediate)
    sizes = (published.experts, published.top_k, published.hidden, published.intermediate)
    sizes_by_key = {
        next(name for name in names.split() if name in values): size
        for names, size in zip(keys, sizes, strict=True)
    }
    note = f"attention, layers and vocabulary are the defaults of {type(default).__name__}"
    return {**values, **sizes_by_key, "model_type": published.model_type}, [note]


def _class_of(library: Any, source: str, model_type: str) -> Any:
    """Return the configuration class of a model type; raise if there is no causal LM for it."""
    try:
        config_class = library.CONFIG_MAPPING[model_type]
        library.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    except KeyError:
        got = f"model_type = {model_type!r}"
        need = f"one that AutoModelForCausalLM of transformers {library.__version__} builds"
        raise ConfigurationError(source, got=got, need=need) from None
    return config_class


def _with_layers(values: Mapping[str, Any], all_layers: int, layers: int) -> dict[str, Any]:
    """Keep the first `layers` layers, truncating lists with an entry per layer."""

    def kept(value: Any) -> Any:
        return value[:layers] if isinstance(value, list) and len(value) == all_layers else value

    return {**{name: kept(value) for name, value in values.items()}, "num_hidden_layers": layers}


def _config(library: Any, source: str, values: Mapping[str, Any]) -> Any:
    entries = {name: value for name, value in values.items() if name not in _LEFT_OUT}
    try:
        return _class_of(library, source, values["model_type"]).from_dict(entries)
    except Exception as error:  # whatever its validation raises
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigurationError(source, got=got, need="a config that its class takes") from error


def _built(
    library: Any, source: str, config: Any, dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    try:
        with device:
            model: torch.nn.Module = library.AutoModelForCausalLM.from_config(
                config, dtype=dtype, experts_implementation="eager"
            )
    except Exception as error:  # sizes that contradict each other, out of memory
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigurationError(source, got=got, need="a config that can be built") from error
    return model
