"""Reads the quantization scheme of each layer with experts from a config.json.

    fields = layer_fields_of_config(path, config)     # the sizes
    schemes = layer_schemes(path, config, fields)
    schemes[0].scheme                                 # "int4_w4a16_group:group=128"
    schemes[0].layers                                 # (1, ..., 47)

The result has several entries if layers have different schemes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.expert_layouts import LAYOUTS, ExpertLayout
from modular_kernel.models.module_quantization import ModuleQuantization, find_common_value
from modular_kernel.models.quantization_config import config_error, scheme_of
from modular_kernel.models.torchao_config import METHOD
from modular_kernel.text import format_layers

Config = dict[str, Any]
_MAX_LAYERS = 4096
_MAX_MODULES = 1 << 22  # maximum number of module names that are matched with patterns
_NUM_LAYERS = ("num_hidden_layers", "n_layers", "num_layers")
_NUM_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
UNQUANTIZED = "none"


@dataclass(frozen=True)
class LayerScheme:
    """Layers whose experts have the same scheme.

    layers: numbers of the layers; None for all layers if their number is unknown.
    """

    layers: tuple[int, ...] | None
    scheme: str

    def __str__(self) -> str:
        return f"{format_layers(self.layers)}: {self.scheme}"


def quantization_of(config: Mapping[str, Any]) -> Any:
    """Return the quantization_config of a config.json (compression_config in older files)."""
    return config.get("quantization_config", config.get("compression_config"))


@dataclass(frozen=True)
class SchemeReader:
    """A function that returns the scheme of a module from its quantization_config.

    path: path of the config.json, for messages.
    config: the object of the config.json that has the model_type.
    depth: argument of `scheme_of`.
    """

    path: str
    config: Config
    depth: int | None

    def __call__(self, quantization: Config | None) -> str:
        """Return the scheme of a module.

        quantization: quantization_config of the module; None for an unquantized module.

        Raises ConfigurationError if there is no such scheme.
        """
        if quantization is None:
            return UNQUANTIZED
        config = self.config | {"quantization_config": quantization}
        return scheme_of(self.path, config, depth=self.depth) or UNQUANTIZED


def layer_schemes(path: Path, config: Config, fields: Mapping[str, Any]) -> tuple[LayerScheme, ...]:
    """Return the schemes of a model's layers with experts, in order of their lowest layers.

    Layers for multi-token prediction, which are stored after the model's layers, are not included.

    path: path of the config.json, for messages.
    config: the object of the config.json that has a known model_type.
    fields: experts, hidden and intermediate of the model's layers.

    Raises ConfigurationError for an unknown scheme, for a layer whose experts have several schemes,
    and if layers have different schemes but the number of layers is unknown.
    """
    depth = max(fields["hidden"], fields["intermediate"])
    quantization_config = quantization_of(config)
    read_scheme = SchemeReader(str(path), config, depth)
    if quantization_config is None:
        scheme_of(str(path), config, depth=depth)  # raises if the config has other options
        return (LayerScheme(None, UNQUANTIZED),)
    quantization = ModuleQuantization(str(path), quantization_config)
    layers = layers_with_experts(path, config)
    layout = quantizer_layout(config)
    experts = quantization.representative_experts(fields["experts"])
    numbers = quantization.representative_layers(layers)
    if len(numbers) * len(experts) > _MAX_MODULES:
        got = f"entries for {len(numbers)} layers of {fields['experts']} experts by number"
        raise config_error(str(path), got, "fewer")
    layers_by_scheme: dict[str, list[int]] = {}
    for number in numbers:
        modules = layout.projection_names(f"model.layers.{number}.", experts)
        what = f"experts of layer {number}"
        scheme = find_common_value(quantization, modules, read_scheme, what)
        layers_by_scheme.setdefault(scheme, []).append(number)
    quantization.check_groups_used()
    if len(layers_by_scheme) == 1:
        return (LayerScheme(layers, next(iter(layers_by_scheme))),)
    if layers is None:
        got = f"layers that differ ({' and '.join(layers_by_scheme)}), and no {_NUM_LAYERS[0]}"
        raise config_error(str(path), got, "the number of layers")
    return tuple(
        LayerScheme(tuple(numbers), scheme) for scheme, numbers in layers_by_scheme.items()
    )


def quantizer_layout(config: Config) -> ExpertLayout:
    """Return the layout with the module names that quantizers use in a quantization_config.

    Most quantizers use one module per expert. torchao quantizes the parameters in transformers,
    which are stacks of all experts.
    """
    layouts = LAYOUTS[config["model_type"]]
    quantization = quantization_of(config)
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == METHOD:
        return next((layout for layout in layouts if layout.stacked), layouts[0])
    return next((layout for layout in layouts if not layout.stacked), layouts[0])


def layers_with_experts(path: Path, config: Config) -> tuple[int, ...] | None:
    """Return the numbers of a model's layers with experts.

    Returns None if the config.json does not state the number of layers.
    """
    count = num_layers(path, config)
    if count is None:
        return None
    dense = set(_find_dense_layers(config, count))
    return tuple(layer for layer in range(count) if layer not in dense) or None


def num_layers(path: Path, config: Mapping[str, Any]) -> int | None:
    """Return the number of layers, without layers for multi-token prediction; None if unknown."""
    for key in _NUM_LAYERS:
        value = config.get(key)
        if value is not None:
            if type(value) is not int or not 1 <= value <= _MAX_LAYERS:
                need = f"an integer from 1 to {_MAX_LAYERS}"
                raise ConfigurationError(f"model {path}", got=f"{key} = {value!r}", need=need)
            return value
    types = config.get("layers_block_type")  # Nemotron-3 Ultra has no other key
    if isinstance(types, list) and 1 <= len(types) <= _MAX_LAYERS:
        return len(types)
    return None


def _find_dense_layers(config: Config, count: int) -> Iterator[int]:
    """Yield the layers that have a dense MLP or no MLP, according to the keys of transformers.

    In some models, a key has a different meaning. Its value then has a different type, and is
    ignored.
    """
    for key in _NUM_DENSE:
        value = config.get(key)
        if type(value) is int:
            yield from range(min(value, count))
    last = config.get("moe_layer_end_index")
    if type(last) is int and last >= 0:
        yield from range(last + 1, count)
    for period, remainder in _find_periods(config):
        yield from (layer for layer in range(count) if layer % period != remainder)
    yield from _find_listed_dense_layers(config, count)


def _find_listed_dense_layers(config: Config, count: int) -> Iterator[int]:
    """Yield the layers without experts, according to keys that list layers."""
    for key, sparse in (("mlp_layer_types", "sparse"), ("layers_block_type", "moe")):
        types = config.get(key)
        if isinstance(types, list) and len(types) == count and sparse in types:
            yield from (layer for layer, kind in enumerate(types) if kind != sparse)
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and len(pattern) == count and "E" in pattern:
        yield from (layer for layer, kind in enumerate(pattern) if kind != "E")
    mlp_only_layers = config.get("mlp_only_layers")
    if isinstance(mlp_only_layers, list):
        yield from (layer for layer in mlp_only_layers if type(layer) is int)
    moe_layers = config.get("moe_layers")
    if isinstance(moe_layers, list) and moe_layers:
        yield from (layer for layer in range(count) if layer not in moe_layers)
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list) and len(frequency) == count:
        yield from (layer for layer, has_experts in enumerate(frequency) if not has_experts)


def _find_periods(config: Config) -> Iterator[tuple[int, int]]:
    """Yield (period, remainder), according to keys with a period.

    A layer has experts if layer % period == remainder.
    """
    has_list = bool(config.get("moe_layers"))  # overrides interleave_moe_layer_step (Llama 4)
    for key in ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step"):
        period = config.get(key)
        if type(period) is int and period > 1 and not (has_list and key.startswith("interleave")):
            yield period, period - 1
    period, offset = config.get("expert_layer_period"), config.get("expert_layer_offset", 0)
    if type(period) is int and period > 1 and type(offset) is int and 0 <= offset < period:
        yield period, offset
    period = config.get("moe_layer_freq")
    if type(period) is int and period > 1:
        yield period, 0
