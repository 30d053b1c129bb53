"""Accepted keys of a quantization_config, by quantization method.

Ignoring an unknown key could silently change the values of weights, or the rounding of activations.
Therefore, a key with a nonempty value is accepted only if it is read, or if it is listed here as
harmless. Harmless keys are grouped by reason. Some keys are harmless only with certain values.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

Mismatch = tuple[str, str]  # (got, need)

# Keys that `quantization_config`, `module_quantization` and `checkpoints.formats` read: for all
# methods (_READ_FOR_ALL), for one method (_READ_KEYS), in an entry of config_groups
# (_READ_IN_GROUPS), and in the objects "weights" and "input_activations", whose type is
# QuantizationArgs in compressed-tensors (_READ_IN_QUANTIZATION_ARGS).
_READ_FOR_ALL = (
    "quant_method",
    "modules_to_not_convert",
    "ignored_layers",
    "ignore",
    "exclude_modules",
    "modules_in_block_to_quantize",
)
_GPTQ_KEYS = ("bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "dynamic")
_AWQ_KEYS = (
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "zero_point",
    "version",
    "format",
    "dynamic",
)
_READ_KEYS: dict[str, tuple[str, ...]] = {
    "fp8": (
        "activation_scheme",
        "weight_block_size",
        "weight_per_tensor",
        "act_per_tensor",
        "fmt",
        "scale_fmt",
        "expert_dtype",
    ),
    "mxfp8": ("activation_scheme", "weight_block_size", "fmt", "scale_fmt"),
    "fbgemm_fp8": ("activation_scale_ub",),
    "mxfp4": (),
    "bitsandbytes": (
        *("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"),
        *("bnb_4bit_quant_type", "llm_int8_skip_modules"),
    ),
    "quark": (
        *("global_quant_config", "layer_quant_config", "layer_type_quant_config"),
        *("exclude", "algo_config", "export"),
    ),
    "torchao": ("quant_type", "fqn_to_config"),
    "gguf": ("types", "dynamic"),  # written by `gguf_config`
    "gptq": (*_GPTQ_KEYS, "extra_config"),
    "awq": (*_AWQ_KEYS, "extra_config"),
    "compressed-tensors": ("config_groups", "format", "sparsity_config"),
    "modelopt": ("quant_algo", "group_size", "config_groups", "weights", "input_activations"),
}
_READ_IN_GROUPS = ("targets", "weights", "input_activations", "format")
_READ_IN_QUANTIZATION_ARGS = (
    "num_bits",
    "type",
    "strategy",
    "group_size",
    "block_structure",
    "symmetric",
    "dynamic",
    "actorder",
)

_HARMLESS_KEYS = frozenset(
    {
        # Provenance.
        *("version", "producer", "meta", "provider", "quantizer", "uri", "autoround_version"),
        *("model_name_or_path", "model_file_base_name", "model_free"),
        # The KV cache, which experts do not use.
        *("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_method"),
        *("kv_cache_quant_config", "kv_cache_post_rope", "softmax_quant_spec"),
        # Progress and statistics of the quantizer. Dtypes and shapes of tensors are checked.
        *("quantization_status", "global_compression_ratio", "is_checkpoint_fp8_serialized"),
        # Lists of quantized modules. If experts are not in the list, the files have no quantized
        # experts, and loading reports the missing tensors.
        *("block_name_to_quantize", "to_quant_block_names"),
        *("module_name_preceding_first_block", "modules_to_fuse", "packed_modules_mapping"),
        *("lm_head", "targets"),
        # Options of an engine that runs the model.
        *("run_compressed", "use_optimized_inference", "backend", "use_exllama"),
        *("disable_exllama", "exllama_config", "use_cuda_fp16", "max_input_length"),
        *("model_seqlen", "seqlen", "do_fuse", "fuse_max_seq_len", "device"),
        # Options of the quantizer's search for codes and scales. The files contain the result.
        *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups"),
        *("act_group_aware", "hyb_act", "mse", "v2", "v2_alpha", "v2_memory_device"),
        *("gptaq", "gptaq_alpha", "gptaq_memory_device", "foem", "fail_safe", "failsafe"),
        *("fallback", "scale_search", "hessian", "mock_quantization", "process"),
        *("pack_impl", "parallel_packing", "dataset", "tokenizer", "pad_token_id"),
        *("batch_size", "nsamples", "iters", "lr", "minmax_lr", "cache_block_outputs", "amp"),
        *("gradient_accumulate_steps", "low_gpu_mem_usage", "low_cpu_mem_usage"),
        *("enable_quanted_input", "enable_minmax_tuning", "enable_norm_bias_tuning"),
        *("enable_alg_ext", "not_use_best_mse", "dynamic_max_gap", "sampler", "seed"),
        *("offload_to_disk", "offload_to_disk_path", "gc_mode", "shard_strategy"),
        *("vram_strategy", "dense_vram_strategy", "moe_vram_strategy"),
        *("dense_vram_strategy_devices", "moe_vram_strategy_devices", "fused_forward"),
        *("wait_for_submodule_finalizers", "auto_forward_data_parallel"),
        *("compute_device_filter", "weight_only_quant_threads"),
        # The dtype of the stored scales, which is checked.
        "scale_dtype",
        # bitsandbytes: the dtype and double quantization, which the stored tensors also determine;
        # the dtype of products; the threshold of activation columns that are not rounded to int8;
        # and the placement of modules on the CPU.
        *("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant"),
        *("llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload"),
        # Details of activation rounding. Activations are not rounded, because _ALLOWED_VALUES of
        # `act_bits` are 16 or more.
        *("act_data_type", "act_group_size", "act_sym", "act_dynamic"),
    }
)
_HARMLESS_QUANTIZATION_ARGS = frozenset(
    {
        # Options of the search for scales, and dtypes of the stored tensors.
        *("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    }
)

# Keys that are harmless only with these values. Null and empty values are always harmless.
_ALLOWED_VALUES: dict[str, tuple[object, ...]] = {
    "act_bits": (16, 32),
    "data_type": ("int",),
    "llm_int8_has_fp16_weight": (False,),
    "has_zero_point": (False,),
    "is_marlin_format": (False,),
    "method": ("gptq", "awq"),
    "pack_dtype": ("int32", "torch.int32"),
    "pre_quant_scale": (False,),
    "rotation": (False,),
}
_ALLOWED_VALUES_BY_METHOD: dict[str, dict[str, tuple[object, ...]]] = {
    # With True, transformers does not round activations, but the schemes of these formats do.
    "fp8": {"dequantize": (False,)},
    "fbgemm_fp8": {"dequantize": (False,)},
    "compressed-tensors": {"dequantize": (False,)},
    # Activations are not quantized in either case.
    "mxfp4": {"dequantize": (False, True)},
    "mxfp8": {"dequantize": (False, True)},
    # These keys concern embeddings, not experts.
    "torchao": {
        "include_input_output_embeddings": (False, True),
        "untie_embedding_weights": (False, True),
    },
    "quark": {"quant_mode": ("eager_mode", "fx_graph_mode"), "custom_mode": ("quark",)},
    # GPTQModel and transformers also write GPTQ's keys for AWQ. The backend "llm-awq" is not
    # allowed, because it packs in another order. `sym` repeats `zero_point`.
    "awq": {
        "backend": (
            *("autoawq", "auto", "auto_trainable", "machete", "marlin", "exllama_v1"),
            *("exllama_v2", "gemm", "gemm_triton", "gemv", "gemv_fast", "torch_awq"),
            "torch_fused_awq",
        ),
        "checkpoint_format": ("gemm",),
        "desc_act": (False,),
        "sym": (False, True),
    },
}


def unknown_keys(method: str, config: Mapping[str, Any]) -> Iterator[Mismatch]:
    """Yield (got, need) for keys of a quantization_config that are unknown and may change values.

    method: a key of `_READ_KEYS`. `unknown_group_keys` checks the keys inside config_groups.
    """
    allowed_values = _ALLOWED_VALUES | _ALLOWED_VALUES_BY_METHOD.get(method, {})
    yield from _find_unknown(
        config, (*_READ_FOR_ALL, *_READ_KEYS[method]), _HARMLESS_KEYS, allowed_values
    )
    if method == "modelopt":
        yield from _find_unknown_quantization_args(config)


def unknown_group_keys(name: str, group: Mapping[str, Any]) -> Iterator[Mismatch]:
    """Yield (got, need) for unknown keys in the entry `name` of config_groups."""
    path = f"config_groups.{name}."
    yield from _find_unknown(group, _READ_IN_GROUPS, (), {}, path)
    yield from _find_unknown_quantization_args(group, path)


def _find_unknown_quantization_args(
    config: Mapping[str, Any], path: str = ""
) -> Iterator[Mismatch]:
    for key in ("weights", "input_activations"):
        args = config.get(key)
        if isinstance(args, Mapping):
            yield from _find_unknown(
                args, _READ_IN_QUANTIZATION_ARGS, _HARMLESS_QUANTIZATION_ARGS, {}, f"{path}{key}."
            )


def _find_unknown(
    config: Mapping[str, Any],
    read_keys: Collection[str],
    harmless_keys: Collection[str],
    allowed_values: Mapping[str, tuple[object, ...]],
    path: str = "",
) -> Iterator[Mismatch]:
    for key, value in config.items():
        if key in read_keys or is_empty(value):
            continue
        if key in allowed_values:
            allowed = allowed_values[key]
            if not any(value == item and type(value) is type(item) for item in allowed):
                need = " or ".join(map(repr, allowed[:4]))
                yield f"{path}{key} = {value!r}", f"{need}, or no such key"
        elif key not in harmless_keys:
            need = "no such key: it may change values, and it is not implemented"
            yield f"{path}{key} = {value!r}", need


def is_empty(value: object) -> bool:
    """Return whether a value is null or empty, or an object in which all values are empty."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return value is None or value in ("", [], ())
