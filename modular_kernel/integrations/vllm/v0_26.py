"""Support for vLLM 0.26, based on the module for 0.33.

The function of 0.26 that selects experts for int4 or int8 weights with group scales does not
receive the group size. The size is taken from the arguments of the constructor that calls this
function.
"""

from dataclasses import replace
from typing import Any

from modular_kernel.checkpoints.gptq_awq import from_awq, from_gptq
from modular_kernel.integrations.vllm import v0_33

Arguments = dict[str, Any]

# Attributes that vLLM has only after 0.26.
_NEWER_EXCHANGES = ("use_moonep_kernels", "use_passthrough_all2all")
_NEWER_FIELDS = ("activation_situ_beta", "activation_situ_linear_beta")

REFUSED_EXCHANGES = tuple(e for e in v0_33.REFUSED_EXCHANGES if e not in _NEWER_EXCHANGES)
CONFIG_FIELDS = tuple(f for f in v0_33.CONFIG_FIELDS if f not in _NEWER_FIELDS)
PARALLEL_FIELDS = tuple(f for f in v0_33.PARALLEL_FIELDS if f not in _NEWER_EXCHANGES)
QUANT_FIELDS = v0_33.QUANT_FIELDS


class StandardExperts(v0_33.StandardExperts):
    """Experts for tokens and their routing, with the interface of vLLM 0.26."""

    refused_exchanges = REFUSED_EXCHANGES


class BatchedExperts(v0_33.BatchedExperts):
    """Experts for rows grouped by expert, with the interface of vLLM 0.26."""

    refused_exchanges = REFUSED_EXCHANGES


make_experts_class = v0_33.make_experts_class


# ------------------------------------------------------------- int4 and int8 in groups

_QUANTIZATION_PACKAGE = "vllm.model_executor.layers.quantization"
_COMPRESSED_TENSORS_PACKAGE = f"{_QUANTIZATION_PACKAGE}.compressed_tensors.compressed_tensors_moe"
# The constructors of these classes have the quantization config that the select function lacks.
_GROUP_CALLERS = (
    (f"{_QUANTIZATION_PACKAGE}.auto_gptq", "AutoGPTQMoEMethod"),
    (f"{_QUANTIZATION_PACKAGE}.auto_awq", "AutoAWQMoEMethod"),
    (
        f"{_COMPRESSED_TENSORS_PACKAGE}.compressed_tensors_moe_wna16_marlin",
        "CompressedTensorsWNA16MarlinMoEMethod",
    ),
)


def _select_group_scheme(arguments: Arguments) -> str:
    """Return the scheme of int4 or int8 weights with group scales.

    Raises UnsupportedError if the quantization config is not known.
    """
    quant_config = arguments.get("quant_config", arguments.get("weight_quant"))
    # Only the config of compressed-tensors has `symmetric`, and only that of AWQ has `zero_point`.
    # GPTQ layers have no zero points.
    symmetric = getattr(quant_config, "symmetric", True)
    zero_points = getattr(quant_config, "zero_point", not symmetric)
    return v0_33.select_group_scheme(
        arguments | {"quant_config": quant_config, "may_have_zp": zero_points}
    )


def _convert_group_weights(arguments: Arguments) -> tuple[Any, ...] | None:
    """Convert the tensors of a layer that uses our experts. Returns None if it uses vLLM's.

    All formats have (e, K, N) tensors when vLLM has loaded them.
    """
    experts_cls = getattr(arguments["layer"].quant_method, "experts_cls", None)
    if experts_cls is None or not issubclass(experts_cls, v0_33.StandardExperts):
        return None
    quant_config = arguments["quant_config"]
    is_awq = hasattr(quant_config, "zero_point")
    has_zero_points = (
        quant_config.zero_point if is_awq else not getattr(quant_config, "symmetric", True)
    )
    converted = []
    for name in ("w13", "w2"):
        zeros = arguments.get(f"{name}_qzeros") if has_zero_points else None
        tensors = (
            arguments[name].data,
            arguments[f"{name}_scale"].data,
            None if zeros is None else zeros.data,
        )
        if is_awq:
            converted.append(from_awq(*tensors, group=quant_config.group_size))
        else:
            bits = getattr(quant_config, "num_bits", None) or quant_config.weight_bits
            weights = from_gptq(*tensors, group=quant_config.group_size, minus_one=False, bits=bits)
            converted.append(weights)
    w13, w2 = converted
    orders = (None,) * 4  # g_idx of w13 and w2, and their sort indices
    global_scales = None, None
    biases = arguments.get("w13_bias"), arguments.get("w2_bias")
    zero_points = w13.zero_point, w2.zero_point
    return (w13.w, w2.w, w13.scale, w2.scale, *orders, *zero_points, *global_scales, *biases)


# ------------------------------------------------------------------------------------- oracles

_BASES = StandardExperts, BatchedExperts
ORACLES = {name: replace(oracle, bases=_BASES) for name, oracle in v0_33.ORACLES.items()}
ORACLES["int_wna16"] = replace(
    ORACLES["int_wna16"],
    plain="EMULATION",
    scheme=_select_group_scheme,
    callers=_GROUP_CALLERS,
    handlers={
        "make_wna16_moe_kernel": v0_33.make_group_kernel,
        "convert_to_wna16_moe_kernel_format": _convert_group_weights,
    },
)
