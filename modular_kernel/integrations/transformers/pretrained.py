"""Loads transformers models whose experts stay quantized as in their checkpoint.

    from modular_kernel.integrations.transformers import from_pretrained, register

    register()
    model = from_pretrained("checkpoint/", device="cuda")

`load_experts` reads the experts, which run on our kernels. All other quantized weights are
dequantized while loading. No quantization library is needed. Layers that the model class does not
have, such as layers for multi-token prediction (MTP), are not loaded. The modules of the model are
those of transformers.
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
    make_absent_files_error,
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
    parse_quantize,
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
    FIELDS_ATTRIBUTE,
    INTERLEAVED_ATTRIBUTE,
    QUANT_ATTRIBUTE,
    get_first_projection,
    is_dispatched,
    parse_layer_number,
)
from modular_kernel.integrations.transformers.register import Registration, registration
from modular_kernel.models.config_file import read_quantization_file
from modular_kernel.models.expert_layouts import ExpertLayout
from modular_kernel.models.gguf_header import is_gguf
from modular_kernel.quant.quantized_weights import dequantize
from modular_kernel.spec.problem import ActivationSpec, dtype_name, parse_dtype
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.utils import json_files
from modular_kernel.utils.argument_checks import expect, format_value, parse_device
from modular_kernel.utils.progress import log_progress

METHOD = "modular_kernel"
_MAX_CONFIG_BYTES = 1 << 24
# Names of weights in modules that are not experts.
_WEIGHT_NAMES = ("weight", "weight_packed", "qweight", "_weight_qdata", "weight:qdata")
_EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
# Errors that transformers raises for files and options that it refuses.
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

    All formats of `load_experts` are supported.

    name: a folder, or the name of a model on the hub.
    experts_implementation: a name that was passed to `register`.
    dtype: dtype of unquantized weights. "auto" uses the dtype in config.json, or bfloat16 if there
        is none.
    auto_class: a class with `from_pretrained`, such as AutoModelForCausalLM.
    device: device of the whole model. Experts are loaded directly to this device. The option
        device_map of transformers needs accelerate.
    quantize: a scheme that `load_experts` quantizes the experts of an unquantized checkpoint to.
    kwargs: further arguments of from_pretrained. `revision`, `token`, `cache_dir` and
        `local_files_only` apply to the hub.

    Raises

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
    scheme = parse_quantize(quantize)
    folder = _find_folder(name, kwargs)
    dtype = _select_dtype(dtype, kwargs.pop("torch_dtype", None))
    config = _load_config(folder, kwargs.pop("config", None))
    quantization = _get_quantization_config(config) or read_quantization_file(folder)
    target_device = None if device is None else parse_device(device)
    kwargs["experts_implementation"] = experts_implementation
    if quantization is None and scheme is None:
        _check_dtype(config if dtype in ("auto", None) else dtype)
        _check_files(folder, kwargs)
        returns_info = kwargs.pop("output_loading_info", False)
        model, loading_info = _load_checked(
            auto_class, folder, folder, config=config, dtype=dtype, **kwargs
        )
        model = model if target_device is None else model.to(target_device)
        return (model, loading_info) if returns_info else model
    for option in ("quantization_config", "output_loading_info"):
        if kwargs.pop(option, None):
            need = f"no {option}: the files or `quantize` define the format"
            if option == "output_loading_info":
                need = f"no {option}: only the model is returned"
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
    original_quantization = quantization or {}
    original_quantization = (
        original_quantization
        if isinstance(original_quantization, dict)
        else original_quantization.to_dict()
    )
    our_config = {
        "quant_method": METHOD,
        "original": original_quantization,
        "checkpoint": str(folder),
    }
    our_config |= {} if target_device is None else {"device": str(target_device)}
    our_config |= {} if scheme is None else {"quantize": str(scheme)}
    for partial_config in (config, config.get_text_config()):
        if hasattr(partial_config, "quantization_config"):
            del partial_config.quantization_config
    config.quantization_config = our_config
    generation_config = _load_generation_config(folder)
    with open_tensors(Path(folder)) as files:
        info = read_checkpoint_info(files)
        for layer in info.layers:
            check_quantizable(str(folder), info.layer_source(layer).format, scheme)
        state_dict = _read_other_tensors(files, info, layer_dtype, _get_num_layers(config))
        kwargs |= {"config": config, "state_dict": state_dict, "dtype": layer_dtype}
        model, _ = _load_checked(_select_model_class(auto_class, config), folder, None, **kwargs)
    if generation_config is not None:
        model.generation_config = generation_config
    return model if target_device is None else model.to(target_device)


def _check_class_and_file(auto_class: Any, name: str | Path) -> None:
    """Raise ConfigurationError for an invalid auto class, and UnsupportedError for a GGUF file."""
    if not callable(getattr(auto_class, "from_pretrained", None)):
        need = "a class with from_pretrained, such as AutoModelForCausalLM"
        raise ConfigurationError("auto_class", got=format_value(auto_class), need=need)
    if is_gguf(Path(name)):
        need = (
            "a folder of safetensors files, because transformers dequantizes all tensors of a GGUF "
            "file; use `load_experts` or `FusedMoE.load` to read the experts"
        )
        raise UnsupportedError("checkpoint", got=f"{str(name)[:200]}, a GGUF file", need=need)


def _select_dtype(dtype: torch.dtype | str, torch_dtype: torch.dtype | str | None) -> Any:
    """Return `dtype`, or `torch_dtype` (the older name of the argument) if it is given."""
    if torch_dtype is None:
        return dtype
    if dtype not in ("auto", torch_dtype):
        need = f"dtype={dtype}, or only one of the two arguments"
        raise ConfigurationError("torch_dtype", got=torch_dtype, need=need)
    return torch_dtype


def _load_config(folder: Path, config: Any) -> Any:
    """Return a copy of `config`, or the config of the folder if `config` is None."""
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
        need = "an object with quant_method, or no quantization_config"
        raise ConfigurationError(
            f"model {folder}/config.json: quantization_config", got="{}", need=need
        )
    with _convert_transformers_errors(f"model {folder}/config.json"):
        return AutoConfig.from_pretrained(folder)


def _load_generation_config(folder: Path) -> GenerationConfig | None:
    """Return the folder's generation config, or None if it has none."""
    if not (folder / "generation_config.json").exists():
        return None
    with _convert_transformers_errors(f"model {folder}/generation_config.json"):
        return GenerationConfig.from_pretrained(folder)


@contextmanager
def _convert_transformers_errors(what: str) -> Iterator[None]:
    """Convert the errors that transformers raises for a file or option to ConfigurationError."""
    try:
        yield
    except InputError:
        raise
    except _TRANSFORMERS_ERRORS as error:
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigurationError(what, got=got, need="a value that transformers accepts") from error


def _check_dtype(source: Any) -> None:
    """Check the dtype of unquantized weights.

    source: the dtype, or a config that may have a dtype.

    Raises ConfigurationError unless the dtype is None, a dict of dtypes by module, or a
    floating-point dtype of at least 16 bits.
    """
    requested = source if isinstance(source, str | torch.dtype) else getattr(source, "dtype", None)
    dtype = getattr(torch, requested, None) if isinstance(requested, str) else requested
    if (dtype is None and requested is None) or isinstance(dtype, dict):
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        need = "a floating-point dtype of at least 16 bits"
        raise ConfigurationError("dtype", got=str(requested)[:80], need=need)


def _check_files(folder: Path, options: Mapping[str, Any]) -> None:
    """Check the safetensors files that transformers reads as an unquantized model.

    options: arguments of from_pretrained. If they select other files, nothing is checked.

    Raises WeightsError for an invalid index, for a file that is in the index but not in the folder,
    and for a quantized weight, because transformers would load its codes as values.
    """
    selects_other_files = options.get("variant") or options.get("subfolder")
    names = ("model.safetensors", f"model{INDEX_SUFFIX}")
    has_files = any((folder / name).is_file() for name in names)
    if selects_other_files or options.get("use_safetensors") is False or not has_files:
        return
    with open_tensors(folder) as files:
        paths = set(files.files.values())
        if not all(path.exists() for path in paths):
            raise make_absent_files_error(folder, paths)
        for name in sorted(files.names):
            if name.rpartition(".")[2] not in (*_WEIGHT_NAMES, *_EXPERT_PARAMETERS):
                continue
            dtype = files.shape_and_dtype(name)[1]
            if dtype not in (*FLOATS, torch.float64):
                got = f"{dtype_name(dtype)} without a quantization_config"
                need = "an unquantized weight, or the quantization_config of its format"
                raise WeightsError(files.qualified_name(name), got=got, need=need)


def _load_checked(cls: Any, folder: Path, name: Path | None, **kwargs: Any) -> tuple[Any, Any]:
    """Return (model, loading info).

    Raises WeightsError for a missing tensor, unless it belongs to a head that is not in the
    checkpoint, and ShapeError for a tensor of the wrong shape. transformers would only warn.
    """
    options = {**kwargs, "ignore_mismatched_sizes": True}  # mismatches are raised below
    try:
        model, loading_info = cls.from_pretrained(name, output_loading_info=True, **options)
    except InputError:
        raise
    except (RuntimeError, SafetensorError, *_TRANSFORMERS_ERRORS) as error:
        raise_header_error(folder, error)
        with _convert_transformers_errors(str(folder)):
            raise
    if not kwargs.get("ignore_mismatched_sizes"):
        for key, got, need in sorted(loading_info["mismatched_keys"]):
            raise ShapeError(f"{folder}: {key}", got=tuple(got), need=tuple(need))
    base_prefix: str = model.base_model_prefix
    prefixes = ("lm_head", base_prefix) if hasattr(model, base_prefix) else ("",)
    missing_keys = sorted(key for key in loading_info["missing_keys"] if key.startswith(prefixes))
    if missing_keys:
        suffix = f" and {len(missing_keys) - 1} more" if len(missing_keys) > 1 else ""
        need = "all tensors of the model, except for a new head"
        raise WeightsError(str(folder), got=f"no {missing_keys[0]}{suffix}", need=need)
    return model, loading_info


def _find_folder(name: str | Path, kwargs: dict[str, Any]) -> Path:
    """Return the folder of a checkpoint, which is downloaded from the hub unless it is local."""
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
        need = "a folder, or the name of a model on the hub"
        raise ConfigurationError("checkpoint", got=str(name)[:200], need=need) from None
    except (LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        got = f"{str(name)[:200]} ({type(error).__name__})"
        need = "a folder, a model in the cache, or a model on the hub that you can access"
        raise ConfigurationError("checkpoint", got=got, need=need) from error


def _select_model_class(auto_class: Any, config: Any) -> Any:
    """Return the model class for a config. Unlike the auto class, it can load a state dict only."""
    mapping = getattr(auto_class, "_model_mapping", None)
    if mapping is None:
        return auto_class
    if type(config) not in mapping:
        got, need = type(config).__name__, f"a configuration that {auto_class.__name__} supports"
        raise UnsupportedError("config", got=got, need=need)
    cls = mapping[type(config)]
    if isinstance(cls, tuple):
        class_by_name = {candidate.__name__: candidate for candidate in cls}
        matching = [
            class_by_name[name] for name in config.architectures or () if name in class_by_name
        ]
        cls = matching[0] if matching else cls[0]
    return cls


def _get_quantization_config(config: Any) -> Any:
    for owner in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            if getattr(owner, key, None) is not None:
                return getattr(owner, key)
    return None


# ------------------------------------------------------------------------- non-expert weights


def _get_num_layers(config: Any) -> int | None:
    """Return the number of layers of the language model. The checkpoint may have more layers."""
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    return count if type(count) is int else None


def _read_other_tensors(
    files: TensorFiles, info: CheckpointInfo, dtype: torch.dtype, num_layers: int | None
) -> dict[str, torch.Tensor]:
    """Return all tensors that do not belong to experts, dequantized, by their names in the files.

    num_layers: number of layers of the model. Tensors of later layers that have experts are
        omitted.
    """
    extra_layers = [
        layer for layer in info.layers if num_layers is not None and layer >= num_layers
    ]
    names = files.names - set(_list_expert_keys(info, extra_layers))
    for layer in extra_layers:
        layout, prefix = info.layers[layer][0]
        prefix = prefix.removesuffix(layout.prefix)
        names = frozenset(name for name in names if not name.startswith(prefix))
    read_keys, dequantized = set[str](), dict[str, torch.Tensor]()
    for base, format, keys in _find_quantized_weights(files, info, names):
        dequantized[f"{base}.weight"] = _read_dequantized(files, format, keys, dtype)
        read_keys |= set(keys.values())
    return dequantized | {name: files.read(name, ()) for name in names - read_keys}


def _list_expert_keys(info: CheckpointInfo, extra_layers: Collection[int]) -> Iterator[str]:
    """Yield the names of the experts' tensors in all layers except `extra_layers`."""
    for layer in info.layers:
        if layer in extra_layers:
            continue
        source = info.layer_source(layer)
        source.check()
        for location in source.locations():
            keys = (source.find_key(location, stored) for stored in source.stored_tensors())
            yield from (key for key in keys if key is not None)


def _find_quantized_weights(
    files: TensorFiles, info: CheckpointInfo, names: frozenset[str]
) -> Iterator[tuple[str, Format, dict[str, str]]]:
    """Yield (module name, format, tensor name by stored name) of modules with quantized weights.

    Raises WeightsError for a quantized weight that the quantization_config excludes, or to which it
    assigns another format.
    """
    for name in sorted(names):
        module_name, _, weight_name = name.rpartition(".")
        if weight_name not in _WEIGHT_NAMES or not module_name:
            continue
        is_packed = f"{name}.absmax" in names  # bitsandbytes may pack 4 bits into floats
        if weight_name == "weight" and files.shape_and_dtype(name)[1] in FLOATS and not is_packed:
            continue
        format = info.formats.format_of(module_name) or UNQUANTIZED
        weight, *other_tensors = format.stored_tensors
        keys = {weight.name: name}
        for stored in other_tensors:
            candidates = [f"{module_name}.{alias}" for alias in (stored.name, *stored.aliases)]
            stored_keys = [key for key in candidates if key in names]
            if stored_keys:
                keys[stored.name] = stored_keys[0]
        scales = [stored.name for stored in other_tensors if stored.role == "scale"]
        has_scale = any(scale in keys for scale in scales)
        if weight_name not in (weight.name, *weight.aliases) or not has_scale:
            got = f"{weight_name} of {dtype_name(files.shape_and_dtype(name)[1])}"
            got += f" without {' or '.join(scales)}" if scales and not has_scale else ""
            need = "an unquantized weight" if format == UNQUANTIZED else f"a weight of {format}"
            need += ", as the quantization_config says"
            raise WeightsError(files.qualified_name(name), got=got, need=need)
        if format.torchao is not None:
            shape, file = files.shape_and_dtype(name)[0], files.files[name].name
            check_metadata(file, files.metadata(name), name, shape, format.torchao)
        yield module_name, format, keys


def _read_dequantized(
    files: TensorFiles, format: Format, keys: Mapping[str, str], dtype: torch.dtype
) -> torch.Tensor:
    """Read and dequantize the weight of one module, (N, K)."""
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
    """The quantization_config of a model that `from_pretrained` has loaded.

    original: the quantization_config of the checkpoint.
    checkpoint: folder of the checkpoint.
    device: device of the experts; None uses the device of each layer's other parameters.
    quantize: scheme to quantize unquantized experts to.
    """

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
    """A quantizer that loads the experts in place of transformers, and keeps them packed."""

    quantization_config: Config
    requires_calibration = False

    def is_serializable(self) -> bool:
        """Return False, because the checkpoint already exists."""
        return False

    @property
    def is_trainable(self) -> bool:
        """True, because adapters can be trained while the experts are frozen."""
        return True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        with open_tensors(Path(self.quantization_config.checkpoint)) as files:
            layers = read_checkpoint_info(files).layers
        modules = _find_experts_modules(model)
        expected = {
            layer for layer in layers if layer in modules or not _is_ignored(model, layers, layer)
        }
        if set(modules) != expected:
            got = f"experts in layers {sorted(expected)}, of which {sorted(modules)} are dispatched"
            need = "experts that transformers dispatches to experts_implementation"
            raise UnsupportedError(type(model).__name__, got=got, need=need)
        for module in modules.values():
            for name in list(module._parameters):
                module.register_parameter(name, None)
            module._is_hf_initialized = True  # skip transformers' weight initialization
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        options = self.quantization_config
        checkpoint, device_option = options.checkpoint, options.device
        for number, module in log_progress(
            list(_find_experts_modules(model).items()), checkpoint, "layers"
        ):
            device = (
                _find_layer_device(model, number)
                if device_option is None
                else parse_device(device_option)
            )
            loaded = load_experts(
                checkpoint, number, dtype=model.dtype, device=device, quantize=options.quantize
            )
            install_weights(module, loaded)
        return model


if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(METHOD)(Config)
    register_quantizer(METHOD)(Quantizer)


def _find_experts_modules(model: torch.nn.Module) -> dict[int, Any]:
    """Return the experts modules that transformers dispatches, by layer number."""
    modules = dict[int, Any]()
    for name, module in model.named_modules():
        number = parse_layer_number(name)
        if number is not None and is_dispatched(module):
            if number in modules:
                got, need = f"two experts modules in layer {number}", "one per layer"
                raise UnsupportedError(type(model).__name__, got=got, need=need)
            modules[number] = module
    return modules


def _is_ignored(
    model: Any, layers: Mapping[int, list[tuple[ExpertLayout, str]]], layer: int
) -> bool:
    """Return whether the model ignores a layer of the files, such as a layer for MTP."""
    count = _get_num_layers(model.config)
    if count is not None and layer >= count:
        return True
    _, prefix = layers[layer][0]
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, prefix) for pattern in patterns)


def _find_layer_device(model: torch.nn.Module, number: int) -> torch.device:
    """Return the device of a layer's other parameters."""
    for name, parameter in model.named_parameters():
        if parse_layer_number(name) == number:
            return parameter.device
    got, need = f"no parameter in layer {number}", "a parameter that determines the device"
    raise UnsupportedError(type(model).__name__, got=got, need=need)


def install_weights(module: torch.nn.Module, loaded: LoadedExperts) -> None:
    """Register loaded weights, which stay packed, as parameters of an experts module.

    w1 becomes `gate_up_proj` or `up_proj`, and w2 becomes `down_proj`. The names of other tensors
    consist of the projection's name and one of the suffixes `_mk_scale`, `_zero_point`,
    `_global_scale`, `_order`, `_a_scale` and `_bias`.
    """
    suffixes = {"": "", "_scale": "_mk_scale"}
    suffixes |= {name: name for name in ("_zero_point", "_global_scale", "_order")}
    fields = {}
    for number, projection in ((1, get_first_projection(module)), (2, "down_proj")):
        names = {f"w{number}{field}": f"{projection}{suffix}" for field, suffix in suffixes.items()}
        names |= {f"b{number}": f"{projection}_bias", f"a{number}_scale": f"{projection}_a_scale"}
        for field, name in names.items():
            tensor: torch.Tensor | None = getattr(loaded.weights, field, None)
            if tensor is not None:
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                module.register_parameter(name, parameter)
                fields[name] = field
    act = ActivationSpec.parse(loaded.problem_fields["activation"])
    setattr(module, FIELDS_ATTRIBUTE, fields)
    setattr(module, QUANT_ATTRIBUTE, str(loaded.problem_fields["quant"]))
    setattr(module, INTERLEAVED_ATTRIBUTE, act.interleaved)
    cls: Any = type(module)
    module.__class__ = _make_packed_class(cls)


@lru_cache
def _make_packed_class(cls: Any) -> Any:
    """Return a subclass of `cls` that accepts only experts implementations of this package.

    Other implementations cannot read packed weights.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        name = self.config._experts_implementation
        implementation = ALL_EXPERTS_FUNCTIONS.get(name)
        if not isinstance(implementation, Registration):
            need = "an implementation from `register`, because the weights are packed"
            raise unsupported_error(self, f"experts_implementation {name!r}", need)
        output: torch.Tensor = implementation(self, *args, **kwargs)
        return output

    def reduce_ex(self: Any, _protocol: Any) -> tuple[Any, ...]:
        return _make_empty_instance, (cls,), self.__getstate__()

    namespace = {"forward": forward, "__reduce_ex__": reduce_ex, "__module__": __name__}
    return type(f"Packed{cls.__name__}", (cls,), namespace)


def _make_empty_instance(cls: Any) -> Any:
    """Return an empty instance for unpickling, because generated classes cannot be imported."""
    packed = _make_packed_class(cls)
    return packed.__new__(packed)
