"""A whole transformers model of a config, with random weights: nothing is downloaded.

transformers is an extra, imported in functions only.
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
from modular_kernel.select.memory import free_bytes, gigabytes
from modular_kernel.spec.problem import parse_dtype

_QUANTIZED = ("quantization_config", "compression_config")
# Of a file, what says where its weights and its own code are: neither is used.
_LEFT_OUT = (*_QUANTIZED, "auto_map", "architectures", "transformers_version", "_name_or_path")
_MOST_OF_FREE = 0.9


@dataclass(frozen=True)
class RandomModel:
    """A model in eval mode, and what it is made of.

    layers: (those it has, those of its config). notes: what is not as a reader may expect.
    """

    model: Any
    model_type: str
    layers: tuple[int, int]
    parameters: int
    bytes: int
    notes: tuple[str, ...]


def transformers() -> Any:
    """Import the extra; ConfigurationError if it is not there, or too old for the integration."""
    try:
        import_module("modular_kernel.integrations.transformers")
        return import_module("transformers")
    except ImportError as error:
        need = "transformers: pip install 'modular-kernel[transformers]'"
        raise ConfigurationError("--hf", got=str(error)[:200], need=need) from None


def random_model(
    source: str, device: torch.device, *, dtype: str | None = None, layers: int | None = None
) -> RandomModel:
    """Make the model of a config.json, of its folder, or of a name of `mk models`.

    dtype: of its weights; None is the config's, or bfloat16. layers: keep so many, the first ones.
    Code that a file refers to is never run. ConfigurationError without transformers; for a file
    that is none, a type that transformers does not build, one without experts, and weights that do
    not fit into the device's free memory.
    """
    library = transformers()
    values, notes = _values(library, source)
    whole = values.get("num_hidden_layers")
    if type(whole) is not int or whole < 1:
        raise ConfigurationError(source, got=f"num_hidden_layers = {whole!r}", need="1 or more")
    if layers is not None:
        if not 1 <= layers <= whole:
            raise ConfigurationError("--layers", got=layers, need=f"from 1 to {whole}")
        values = _cut(values, whole, layers)
        notes.append(f"{layers} of {whole} layers")
    for name in _QUANTIZED:
        if values.get(name) is not None:
            notes.append(f"{name} is left out: weights are random and not quantized")
    found = values.get("dtype") or values.get("torch_dtype") or "bfloat16"
    wanted = parse_dtype(dtype or found)
    config = _config(library, source, values)
    empty = _built(library, source, config, wanted, torch.device("meta"))
    if not any(map(_dispatched, empty.modules())):
        need = "a model whose experts transformers dispatches"
        if layers is not None:
            need += ", or more --layers: the first ones may be dense"
        raise ConfigurationError(
            source, got=f"no such experts in {type(empty).__name__}", need=need
        )
    size = sum(p.nbytes for p in empty.parameters())
    free = free_bytes(device)
    if free is not None and size > _MOST_OF_FREE * free:
        got = f"{gigabytes(size)} of weights"
        raise ConfigurationError(
            source, got=got, need=f"at most {gigabytes(_MOST_OF_FREE * free)} (see --layers)"
        )
    torch.manual_seed(0)
    return RandomModel(
        model=_built(library, source, config, wanted, device).eval(),
        model_type=values["model_type"],
        layers=(layers or whole, whole),
        parameters=sum(p.numel() for p in empty.parameters()),
        bytes=size,
        notes=tuple(notes),
    )


def _dispatched(module: torch.nn.Module) -> bool:
    from modular_kernel.integrations.transformers.modules import dispatched

    return dispatched(module)


def _values(library: Any, source: str) -> tuple[dict[str, Any], list[str]]:
    """Return the entries of a config of a type with experts, and notes on them."""
    if is_file(source):
        _, given = config_of_file(source)
        _class_of(library, source, given["model_type"])
        return given, []
    known = model_named(source)
    if known is None or not known.model_type:
        got = repr(source[:200]) if known is None else f"the layer of {known.source} alone"
        raise ConfigurationError("--hf", got=got, need="the path of its config.json")
    made = _class_of(library, source, known.model_type)()
    values = made.to_dict()
    family = FAMILIES[known.model_type]
    keys = (family.experts, family.top_k, family.hidden, family.intermediate)
    sizes = (known.experts, known.top_k, known.hidden, known.intermediate)
    own = {
        next(name for name in names.split() if name in values): size
        for names, size in zip(keys, sizes, strict=True)
    }
    note = f"attention, layers and vocabulary are the defaults of {type(made).__name__}"
    return {**values, **own, "model_type": known.model_type}, [note]


def _class_of(library: Any, source: str, model_type: str) -> Any:
    """Return transformers' configuration class of a type that it builds a language model of."""
    try:
        found = library.CONFIG_MAPPING[model_type]
        library.MODEL_FOR_CAUSAL_LM_MAPPING[found]
    except KeyError:
        got = f"model_type = {model_type!r}"
        need = f"one that AutoModelForCausalLM of transformers {library.__version__} builds"
        raise ConfigurationError(source, got=got, need=need) from None
    return found


def _cut(values: Mapping[str, Any], whole: int, layers: int) -> dict[str, Any]:
    """Keep the first layers, and of lists with an entry for each layer the first entries."""

    def kept(value: Any) -> Any:
        return value[:layers] if isinstance(value, list) and len(value) == whole else value

    return {**{name: kept(value) for name, value in values.items()}, "num_hidden_layers": layers}


def _config(library: Any, source: str, values: Mapping[str, Any]) -> Any:
    kept = {name: value for name, value in values.items() if name not in _LEFT_OUT}
    try:
        return _class_of(library, source, values["model_type"]).from_dict(kept)
    except Exception as error:  # whatever its validation raises
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigurationError(source, got=got, need="a config that its class takes") from error


def _built(
    library: Any, source: str, config: Any, dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    try:
        with device:
            made: torch.nn.Module = library.AutoModelForCausalLM.from_config(
                config, dtype=dtype, experts_implementation="eager"
            )
    except Exception as error:  # sizes that contradict each other, out of memory
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigurationError(source, got=got, need="a config that can be built") from error
    return made
