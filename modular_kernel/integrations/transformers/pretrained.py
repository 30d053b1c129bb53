"""Loading of transformers models with experts that stay quantized as in their checkpoint.

    from modular_kernel.integrations.transformers import from_pretrained, register

    register()
    model = from_pretrained("checkpoint/", device="cuda")

`load_experts` reads the experts, which run on our kernels. All other quantized weights are
dequantized while loading. No quantization library is needed. Layers that the model class does not
have, such as those for multi-token prediction (MTP), are not loaded. The model consists of
transformers' own modules.
"""

import copy
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from modular_kernel.checkpoints.checkpoint_files import (
    INDEX_SUFFIX,
    absent_files_error,
)
from modular_kernel.checkpoints.formats import Format
from modular_kernel.checkpoints.fusing import merge
from modular_kernel.checkpoints.inspection import (
    CheckpointInfo,
    raise_header_error,
    read_checkpoint_info,
)
from modular_kernel.checkpoints.loading import (
    LoadedExperts,
    check_quantizable,
    load_experts,
    scheme_to_quantize,
)
from modular_kernel.checkpoints.matrix_layout import FLOATS
from modular_kernel.checkpoints.open_files import open_tensors
from modular_kernel.checkpoints.quantization_map import UNQUANTIZED
from modular_kernel.checkpoints.safetensors_files import TensorFiles
from modular_kernel.checkpoints.torchao import check_metadata
from modular_kernel.errors import (
    ConfigurationError,
    InputError,
    ShapeError,
    UnsupportedError,
    WeightsError,
)
from modular_kernel.integrations.transformers.activations import unsupported_error
from modular_kernel.integrations.transformers.modules import (
    FIELDS,
    INTERLEAVED,
    QUANT,
    first_projection,
    is_dispatched,
    layer_of,
)
from modular_kernel.integrations.transformers.register import Registration, registration
from modular_kernel.models.config_file import hf_quant_config
from modular_kernel.models.expert_layouts import ExpertLayout
from modular_kernel.models.gguf_header import is_gguf
from modular_kernel.quant.quantized_weights import dequantize
from modular_kernel.spec.problem import ActivationSpec, dtype_name, parse_dtype
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.utils import json_files
from modular_kernel.utils.argument_checks import expect, format_value, parse_device
from modular_kernel.utils.progress import logged

METHOD = "modular_kernel"
_MAX_CONFIG_BYTES = 1 << 24
# Of modules that are not experts.
_WEIGHT_NAMES = ("weight", "weight_packed", "qweight", "_weight_qdata", "weight:qdata")
_EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
# Errors of transformers for files and options that it refuses.
_TRANSFORMERS_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    StrictDataclassError,
)
# Options that distribute the tensors of a model over processes or devices.
_DISTRIBUTED_OPTIONS = ("tp_plan", "ep_plan", "distributed_config", "device_mesh", "tp_size")


def from_pretrained(
    name: str | Path,
    *,
    experts_implementation: str = "modular_kernel",
    dtype: torch.dtype | str = "auto",
    auto_class: Any = AutoModelForCausalLM,
    device: torch.device | str | None = None,
    quantize: QuantScheme | str | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model, with or without quantized experts, like `auto_class.from_pretrained`.

    name: a folder, or a model's name on the hub.
    experts_implementation: a name that was passed to `register`.
    dtype: dtype of unquantized weights. "auto" uses that of config.json, else bfloat16.
    device: device of the whole model; experts are loaded to it directly. transformers' device_map
        needs accelerate.
    quantize: a scheme to which the experts of an unquantized checkpoint are quantized, as by
        `load_experts`.
    kwargs: further arguments of from_pretrained, such as `revision`, `token`, `cache_dir` and
        `local_files_only`, which apply to the hub.

    Supports the formats of `load_experts`. Raises

    - ConfigurationError for an unknown format or name, and for a config.json or options that
      transformers refuses;
    - UnsupportedError for a model that is distributed over processes, or that has experts that
      transformers does not dispatch;
    - WeightsError for missing files or tensors, and ShapeError for tensors of the wrong shape,
      where transformers would only warn and use random values;
    - every error of `load_experts`.
    """
    expect("name", name, str | Path)
    _check_class_and_file(auto_class, name)
    registration(experts_implementation)
    scheme = scheme_to_quantize(quantize)
    folder = _folder(name, kwargs)
    dtype = _dtype_of(dtype, kwargs.pop("torch_dtype", None))
    config = _config_of(folder, kwargs.pop("config", None))
    quantization = _quantization_of(config) or hf_quant_config(folder)
    target_device = None if device is None else parse_device(device)
    kwargs["experts_implementation"] = experts_implementation
    if quantization is None and scheme is None:
        _check_dtype(config if dtype in ("auto", None) else dtype)
        _check_files(folder, kwargs)
        with_info = kwargs.pop("output_loading_info", False)
        model, info = _load_checked(
            auto_class, folder, folder, config=config, dtype=dtype, **kwargs
        )
        model = model if target_device is None else model.to(target_device)
        return (model, info) if with_info else model
    for option in ("quantization_config", "output_loading_info"):
        if kwargs.pop(option, None):
            need = "unset: the files or `quantize` define the format; only the model is returned"
            raise UnsupportedError("quantized experts", got=option, need=need)
    distributed = [name for name in _DISTRIBUTED_OPTIONS if kwargs.get(name) is not None]
    if distributed:
        need = (
            "a model in one process; use register() and transformers' from_pretrained to "
            "distribute unquantized models"
        )
        raise UnsupportedError("quantized experts", got=", ".join(distributed), need=need)
    requested_dtype = getattr(config, "dtype", None) if dtype in ("auto", None) else dtype
    layer_dtype = parse_dtype(torch.bfloat16 if requested_dtype is None else requested_dtype)
    original = quantization or {}
    original = original if isinstance(original, dict) else original.to_dict()
    our_config = {"quant_method": METHOD, "original": original, "checkpoint": str(folder)}
    our_config |= {} if target_device is None else {"device": str(target_device)}
    our_config |= {} if scheme is None else {"quantize": str(scheme)}
    for each in (config, config.get_text_config()):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    config.quantization_config = our_config
    generation_config = _generation_config_of(folder)
    with open_tensors(Path(folder)) as files:
        info = read_checkpoint_info(files)
        for layer in info.layers:
            check_quantizable(str(folder), info.source(layer).format, scheme)
        state_dict = _other_tensors(files, info, layer_dtype, _num_layers(config))
        kwargs |= {"config": config, "state_dict": state_dict, "dtype": layer_dtype}
        model, _ = _load_checked(_class_of(auto_class, config), folder, None, **kwargs)
    if generation_config is not None:
        model.generation_config = generation_config
    return model if target_device is None else model.to(target_device)


def _check_class_and_file(auto_class: Any, name: str | Path) -> None:
    """Raise a typed error for an auto class that cannot load, and for a GGUF file."""
    if not callable(getattr(auto_class, "from_pretrained", None)):
        need = "a class with from_pretrained, such as AutoModelForCausalLM"
        raise ConfigurationError("auto_class", got=format_value(auto_class), need=need)
    if is_gguf(Path(name)):
        need = (
            "a folder of safetensors: transformers reads other tensors of GGUF files as floats "
            "only; `load_experts` and `FusedMoE.load` read the experts"
        )
        raise UnsupportedError("checkpoint", got=f"{str(name)[:200]}, a GGUF file", need=need)


def _dtype_of(dtype: torch.dtype | str, torch_dtype: torch.dtype | str | None) -> Any:
    """Return `torch_dtype`, the older name of the argument, if it is given; else `dtype`."""
    if torch_dtype is None:
        return dtype
    if dtype not in ("auto", torch_dtype):
        raise ConfigurationError(
            "torch_dtype", got=torch_dtype, need=f"dtype={dtype}, or one alone"
        )
    return torch_dtype


def _config_of(folder: Path, config: Any) -> Any:
    """Return a copy of the caller's `config`; if it is None, the config of the folder."""
    if config is not None:
        return copy.deepcopy(config)
    try:
        contents = json_files.parse(json_files.read_file(folder / "config.json", _MAX_CONFIG_BYTES))
    except (OSError, ValueError):
        contents = None  # AutoConfig raises the error
    quantization = contents.get("quantization_config") if isinstance(contents, dict) else None
    if not isinstance(quantization, dict | None):
        what, got = f"model {folder}/config.json: quantization_config", str(quantization)[:80]
        raise ConfigurationError(what, got=got, need="an object")
    if quantization == {}:
        need = "an object with quant_method, or none"
        raise ConfigurationError(
            f"model {folder}/config.json: quantization_config", got="{}", need=need
        )
    with _transformers_errors(f"model {folder}/config.json"):
        return AutoConfig.from_pretrained(folder)


def _generation_config_of(folder: Path) -> GenerationConfig | None:
    """Return the folder's generation config, or None if it has none."""
    if not (folder / "generation_config.json").exists():
        return None
    with _transformers_errors(f"model {folder}/generation_config.json"):
        return GenerationConfig.from_pretrained(folder)


@contextmanager
def _transformers_errors(what: str) -> Iterator[None]:
    """Convert the errors that transformers raises for a file or option to ConfigurationError."""
    try:
        yield
    except InputError:
        raise
    except _TRANSFORMERS_ERRORS as error:
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigurationError(what, got=got, need="a value that transformers accepts") from error


def _check_dtype(source: Any) -> None:
    """Check the dtype that transformers will load unquantized weights in.

    source: the dtype, or a config that may have one. Raises ConfigurationError unless it is None, a
    dict of dtypes by module, or a floating dtype of 16 bits or more.
    """
    requested = source if isinstance(source, str | torch.dtype) else getattr(source, "dtype", None)
    dtype = getattr(torch, requested, None) if isinstance(requested, str) else requested
    if (dtype is None and requested is None) or isinstance(dtype, dict):
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        need = "a floating dtype of 16 bits or more"
        raise ConfigurationError("dtype", got=str(requested)[:80], need=need)


def _check_files(folder: Path, options: Mapping[str, Any]) -> None:
    """Check the safetensors that transformers reads as an unquantized model.

    options: arguments of from_pretrained. If they select other files, nothing is checked. Raises
    WeightsError for an invalid index, for a file that is in the index but not in the folder, and
    for a quantized weight, whose codes transformers would load as values.
    """
    selects_others = options.get("variant") or options.get("subfolder")
    names = ("model.safetensors", f"model{INDEX_SUFFIX}")
    has_files = any((folder / name).is_file() for name in names)
    if selects_others or options.get("use_safetensors") is False or not has_files:
        return
    with open_tensors(folder) as files:
        paths = set(files.files.values())
        if not all(path.exists() for path in paths):
            raise absent_files_error(folder, paths)
        for name in sorted(files.names):
            if name.rpartition(".")[2] not in (*_WEIGHT_NAMES, *_EXPERT_PARAMETERS):
                continue
            dtype = files.shape_and_dtype(name)[1]
            if dtype not in (*FLOATS, torch.float64):
                got = f"{dtype_name(dtype)}, and no quantization_config"
                need = "an unquantized weight, or the quantization_config of its format"
                raise WeightsError(files.qualified_name(name), got=got, need=need)


def _load_checked(cls: Any, folder: Path, name: Path | None, **kwargs: Any) -> tuple[Any, Any]:
    """Load a model and its loading info, with errors where transformers would only warn.

    Raises WeightsError for a missing tensor, unless it belongs to a head that is not in the
    checkpoint, and ShapeError for a tensor of the wrong shape.
    """
    any_shape = {"ignore_mismatched_sizes": True}
    try:
        model, info = cls.from_pretrained(name, output_loading_info=True, **{**kwargs, **any_shape})
    except InputError:
        raise
    except (RuntimeError, SafetensorError, *_TRANSFORMERS_ERRORS) as error:
        raise_header_error(folder, error)
        with _transformers_errors(str(folder)):
            raise
    if not kwargs.get("ignore_mismatched_sizes"):
        for key, got, need in sorted(info["mismatched_keys"]):
            raise ShapeError(f"{folder}: {key}", got=tuple(got), need=tuple(need))
    base: str = model.base_model_prefix
    prefixes = ("lm_head", base) if hasattr(model, base) else ("",)
    missing = sorted(key for key in info["missing_keys"] if key.startswith(prefixes))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        need = "every tensor of the model except those of a new head"
        raise WeightsError(str(folder), got=f"no {missing[0]}{more}", need=need)
    return model, info


def _folder(name: str | Path, kwargs: dict[str, Any]) -> Path:
    """Return the folder of a checkpoint, downloaded from the hub unless it is local."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    options = ("revision", "token", "cache_dir", "local_files_only")
    hub_options = {option: kwargs.pop(option) for option in options if option in kwargs}
    try:
        return Path(snapshot_download(str(name), allow_patterns=list(_HUB_FILES), **hub_options))
    except HFValidationError:
        need = "a folder, or a model's name on the hub"
        raise ConfigurationError("checkpoint", got=str(name)[:200], need=need) from None
    except (LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        got = f"{str(name)[:200]} ({type(error).__name__})"
        need = "a folder, a model in the cache, or one on the hub that can be accessed"
        raise ConfigurationError("checkpoint", got=got, need=need) from error


def _class_of(auto_class: Any, config: Any) -> Any:
    """Return the model class of a config.

    It is used instead of the auto class, which does not accept a state dict without a name.
    """
    mapping = getattr(auto_class, "_model_mapping", None)
    if mapping is None:
        return auto_class
    if type(config) not in mapping:
        got, need = type(config).__name__, f"a configuration that {auto_class.__name__} knows"
        raise UnsupportedError("config", got=got, need=need)
    cls = mapping[type(config)]
    if isinstance(cls, tuple):
        named = {each.__name__: each for each in cls}
        matching = [named[name] for name in config.architectures or () if name in named]
        cls = matching[0] if matching else cls[0]
    return cls


def _quantization_of(config: Any) -> Any:
    for each in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            if getattr(each, key, None) is not None:
                return getattr(each, key)
    return None


# ------------------------------------------------------------------------- non-expert weights


def _num_layers(config: Any) -> int | None:
    """Return the number of layers of the language model; files may have more."""
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    return count if type(count) is int else None


def _other_tensors(
    files: TensorFiles, info: CheckpointInfo, dtype: torch.dtype, num_layers: int | None
) -> dict[str, torch.Tensor]:
    """Return all tensors except those of experts, dequantized, by their names in the files.

    num_layers: number of layers of the model. Tensors of further layers that have experts are left
    out.
    """
    extra = [layer for layer in info.layers if num_layers is not None and layer >= num_layers]
    names = files.names - set(_expert_keys(info, extra))
    for layer in extra:
        layout, prefix = info.layers[layer][0]
        prefix = prefix.removesuffix(layout.path)
        names = frozenset(name for name in names if not name.startswith(prefix))
    consumed, dequantized = set[str](), dict[str, torch.Tensor]()
    for base, format, keys in _quantized(files, info, names):
        dequantized[f"{base}.weight"] = _dequantized(files, format, keys, dtype)
        consumed |= set(keys.values())
    return dequantized | {name: files.read(name, ()) for name in names - consumed}


def _expert_keys(info: CheckpointInfo, extra: Collection[int]) -> Iterator[str]:
    """Yield the keys of the experts' tensors in all layers except `extra`."""
    for layer in info.layers:
        if layer in extra:
            continue
        source = info.source(layer)
        source.check()
        for location in source.locations():
            keys = (source.key(location, stored) for stored in source.stored())
            yield from (key for key in keys if key is not None)


def _quantized(
    files: TensorFiles, info: CheckpointInfo, names: frozenset[str]
) -> Iterator[tuple[str, Format, dict[str, str]]]:
    """Yield modules with a quantized weight: name, format, and keys of tensors by stored name.

    Raises WeightsError for a quantized weight that the quantization_config excludes, or describes
    as another format.
    """
    for name in sorted(names):
        base, _, last = name.rpartition(".")
        if last not in _WEIGHT_NAMES or not base:
            continue
        is_packed = f"{name}.absmax" in names  # bitsandbytes may pack 4 bits into floats
        if last == "weight" and files.shape_and_dtype(name)[1] in FLOATS and not is_packed:
            continue
        format = info.formats.format_of(base) or UNQUANTIZED
        weight, *others = format.stored
        keys = {weight.name: name}
        for stored in others:
            candidates = [f"{base}.{each}" for each in (stored.name, *stored.aliases)]
            present = [key for key in candidates if key in names]
            if present:
                keys[stored.name] = present[0]
        scales = [stored.name for stored in others if stored.role == "scale"]
        has_scale = any(scale in keys for scale in scales)
        if last not in (weight.name, *weight.aliases) or not has_scale:
            got = f"{last} of {dtype_name(files.shape_and_dtype(name)[1])}"
            got += f" and no {' or '.join(scales)}" if scales and not has_scale else ""
            need = "an unquantized weight" if format == UNQUANTIZED else f"a weight of {format}"
            need += ", as in its quantization_config"
            raise WeightsError(files.qualified_name(name), got=got, need=need)
        if format.torchao is not None:
            shape, file = files.shape_and_dtype(name)[0], files.files[name].name
            check_metadata(file, files.metadata(name), name, shape, format.torchao)
        yield base, format, keys


def _dequantized(
    files: TensorFiles, format: Format, keys: Mapping[str, str], dtype: torch.dtype
) -> torch.Tensor:
    """Return the dequantized weight (N, K) of one module."""
    matrix = merge(format, [{name: files.read(key, ()) for name, key in keys.items()}], dtype)
    if format.dequantized:
        return matrix.w
    assert matrix.scale is not None
    zero = None if matrix.zero_point is None else matrix.zero_point[None]
    values = dequantize(matrix.w[None], matrix.scale[None], zero, format.scheme)[0]
    if matrix.global_scale is not None:
        values = values * matrix.global_scale
    if matrix.order is not None:
        values = torch.empty_like(values).index_copy_(1, matrix.order.long(), values)
    return values.to(dtype)


# --------------------------------------------------------------------------- expert weights


class Config(QuantizationConfigMixin):
    """The quantization_config of a model that was loaded by `from_pretrained`."""

    def __init__(
        self,
        original: dict[str, Any],
        checkpoint: str,
        device: str | None = None,
        quantize: str | None = None,
        **_: Any,
    ) -> None:
        self.quant_method: Any = METHOD
        self.quantize = quantize
        self.original = original
        self.checkpoint = checkpoint
        self.device = device


class Quantizer(HfQuantizer):
    """A quantizer that excludes experts from transformers' loading and installs packed ones."""

    quantization_config: Config
    requires_calibration = False

    def is_serializable(self) -> bool:
        """Return False: the checkpoint already exists."""
        return False

    @property
    def is_trainable(self) -> bool:
        """True: adapters can be trained while the experts are frozen."""
        return True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        with open_tensors(Path(self.quantization_config.checkpoint)) as files:
            layers = read_checkpoint_info(files).layers
        modules = _modules_of(model)
        expected = {
            layer for layer in layers if layer in modules or not _is_ignored(model, layers, layer)
        }
        if set(modules) != expected:
            got = f"experts of layers {sorted(expected)}, of which {sorted(modules)} are dispatched"
            need = "experts that transformers dispatches by experts_implementation"
            raise UnsupportedError(type(model).__name__, got=got, need=need)
        for module in modules.values():
            for name in list(module._parameters):
                module.register_parameter(name, None)
            module._is_hf_initialized = True  # skip transformers' weight initialization
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        options = self.quantization_config
        checkpoint, device_option = options.checkpoint, options.device
        for number, module in logged(list(_modules_of(model).items()), checkpoint, "layers"):
            device = (
                _device_of(model, number) if device_option is None else parse_device(device_option)
            )
            loaded = load_experts(
                checkpoint, number, dtype=model.dtype, device=device, quantize=options.quantize
            )
            install_weights(module, loaded)
        return model


if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(METHOD)(Config)
    register_quantizer(METHOD)(Quantizer)


def _modules_of(model: torch.nn.Module) -> dict[int, Any]:
    """Return the experts modules that transformers dispatches, by layer number."""
    modules = dict[int, Any]()
    for name, module in model.named_modules():
        number = layer_of(name)
        if number is not None and is_dispatched(module):
            if number in modules:
                got, need = f"two experts modules in layer {number}", "one"
                raise UnsupportedError(type(model).__name__, got=got, need=need)
            modules[number] = module
    return modules


def _is_ignored(
    model: Any, layers: Mapping[int, list[tuple[ExpertLayout, str]]], layer: int
) -> bool:
    """Return whether a model does not have a layer of the files, such as one for MTP."""
    count = _num_layers(model.config)
    if count is not None and layer >= count:
        return True
    _, prefix = layers[layer][0]
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, prefix) for pattern in patterns)


def _device_of(model: torch.nn.Module, number: int) -> torch.device:
    """Return the device of a layer's other parameters."""
    for name, parameter in model.named_parameters():
        if layer_of(name) == number:
            return parameter.device
    raise UnsupportedError(type(model).__name__, got=f"no parameter in layer {number}", need="one")


def install_weights(module: torch.nn.Module, loaded: LoadedExperts) -> None:
    """Register loaded weights, which stay packed, as parameters of an experts module.

    w1 becomes `gate_up_proj` or `up_proj`, and w2 becomes `down_proj`. The other tensors are named
    after these, with the suffixes `_mk_scale`, `_zero_point`, `_global_scale`, `_order`, `_a_scale`
    and `_bias`.
    """
    suffixes = {"": "", "_scale": "_mk_scale"}
    suffixes |= {name: name for name in ("_zero_point", "_global_scale", "_order")}
    fields = {}
    for number, projection in ((1, first_projection(module)), (2, "down_proj")):
        names = {f"w{number}{field}": f"{projection}{suffix}" for field, suffix in suffixes.items()}
        names |= {f"b{number}": f"{projection}_bias", f"a{number}_scale": f"{projection}_a_scale"}
        for field, name in names.items():
            tensor: torch.Tensor | None = getattr(loaded.weights, field, None)
            if tensor is not None:
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                module.register_parameter(name, parameter)
                fields[name] = field
    act = ActivationSpec.parse(loaded.problem_fields["activation"])
    setattr(module, FIELDS, fields)
    setattr(module, QUANT, str(loaded.problem_fields["quant"]))
    setattr(module, INTERLEAVED, act.interleaved)
    cls: Any = type(module)
    module.__class__ = _packed_class(cls)


@lru_cache
def _packed_class(cls: Any) -> Any:
    """Return a subclass of `cls` that refuses other experts implementations.

    Only ours can read packed weights.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        name = self.config._experts_implementation
        implementation = ALL_EXPERTS_FUNCTIONS.get(name)
        if not isinstance(implementation, Registration):
            need = "an implementation from `register`: the weights are packed"
            raise unsupported_error(self, f"experts_implementation {name!r}", need)
        output: torch.Tensor = implementation(self, *args, **kwargs)
        return output

    def reduced(self: Any, _protocol: Any) -> tuple[Any, ...]:
        return _empty_instance, (cls,), self.__getstate__()

    body = {"forward": forward, "__reduce_ex__": reduced, "__module__": __name__}
    return type(f"Packed{cls.__name__}", (cls,), body)


def _empty_instance(cls: Any) -> Any:
    """Return an empty instance for unpickling, because generated classes have no import path."""
    packed = _packed_class(cls)
    return packed.__new__(packed)
