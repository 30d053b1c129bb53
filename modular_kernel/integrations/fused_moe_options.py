"""Keyword arguments of `fused_experts` and `fused_moe`, and their conversion to Problem fields."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, get_type_hints

import torch

from modular_kernel.errors import ConfigurationError, UnsupportedError
from modular_kernel.spec.problem import ActivationSpec, Combine, Size
from modular_kernel.utils.argument_checks import Count, check_fields, expect

CHUNK_TOKENS = 64 * 1024
_KINDS_WITH_UNGATED_FORM = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class MoeRunnerConfig:
    """Settings of a layer, with the fields and defaults of SGLang 0.5.23.

    num_experts, num_local_experts, hidden_size, intermediate_size_per_partition, top_k: if set,
        the tensors must have these sizes.
    layer_id, layer: number and module of the layer. They have no effect.
    num_fused_shared_experts: number of shared experts among all experts. The caller's routing must
        assign shared experts to every token. Not supported with logits. None means 0.
    params_dtype: if set, the dtype that unquantized weights must have.
    routing_method_type: how the router selects experts. It has no effect if the caller passes
        weights and ids, and is not supported with logits.
    runner_backend: None, or the backend in use, as a name or as an object whose `value` is the
        name.
    activation: "silu", "gelu" (erf), "gelu_tanh", "situ", or any other ActivationSpec.
    is_gated: False selects the ungated form of silu, gelu or gelu_tanh. It has no effect on
        activations that never have a gate.
    inplace: overwrite x with the output.
    no_combine: return (T, K, H) outputs, neither weighted nor scaled. Requires inplace=False.
    no_combine_keep_router_weight: with no_combine, multiply the outputs by the router weights.
    routed_scaling_factor: factor of the output. None means 1.
    gemm1_alpha, gemm1_clamp_limit: alpha and limit of situ. With silu, both together select
        gpt-oss's swiglu_oai, and the limit alone selects swiglu_clamp_after.
    gemm1_beta: the value that swiglu_oai adds to up. Only 1 is supported.
    swiglu_limit: with silu, selects swiglu_clamp_before with this limit.
    gate_up_interleaved: with swiglu_oai, whether the rows of w1 alternate gate and up.
    use_tp_all_gather_activation, silu_mul_keep_fp32: must be False.
    chunk_tokens: maximum number of tokens that are computed at once. None never splits a call.
        SGLang does not have this field.

    Raises ConfigurationError if a field has another type, and UnsupportedError if a field that is
    not supported is True.
    """

    num_experts: Count | None = None
    num_local_experts: Count | None = None
    hidden_size: Count | None = None
    intermediate_size_per_partition: Count | None = None
    layer_id: int | None = None
    top_k: int | None = None
    num_fused_shared_experts: Size | None = None
    params_dtype: torch.dtype | None = None
    routing_method_type: int | None = None
    runner_backend: object | None = None
    activation: ActivationSpec | str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    no_combine_keep_router_weight: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True
    layer: torch.nn.Module | None = field(default=None, repr=False, compare=False)
    use_tp_all_gather_activation: bool = False
    silu_mul_keep_fp32: bool = False
    chunk_tokens: Count | None = CHUNK_TOKENS

    def __post_init__(self) -> None:
        check_fields(self)
        if self.use_tp_all_gather_activation:
            need = "False, because layers gather activations before the call"
            raise UnsupportedError("use_tp_all_gather_activation", got=True, need=need)
        if self.silu_mul_keep_fp32:
            need = "False, because a part decides the dtype between activation and quantization"
            raise UnsupportedError("silu_mul_keep_fp32", got=True, need=need)

    @property
    def combine(self) -> Combine:
        """The form of the output, as in Problem.combine."""
        if not self.no_combine:
            return Combine.SUM
        if self.no_combine_keep_router_weight:
            return Combine.TOPK_WEIGHTED
        return Combine.TOPK_UNWEIGHTED

    @property
    def scale(self) -> float:
        """The factor of the output. With no_combine, this is 1, because the caller scales."""
        factor = self.routed_scaling_factor
        return 1.0 if factor is None or self.no_combine else float(factor)

    def activation_spec(self) -> ActivationSpec:
        """Return the activation that the fields describe.

        Raises ConfigurationError if they contradict each other.
        """
        alpha, limit = self.gemm1_alpha, self.gemm1_clamp_limit
        name = str(self.activation)
        if self.gemm1_beta is not None and (self.gemm1_beta != 1 or alpha is None):
            need = "None, or 1 together with gemm1_alpha, because swiglu_oai adds 1 to up"
            raise ConfigurationError("gemm1_beta", got=self.gemm1_beta, need=need)
        if not self.is_gated:
            return self._select_ungated(name)
        modifiers = (alpha, limit, self.swiglu_limit)
        if modifiers == (None, None, None):
            return ActivationSpec.parse(self.activation)
        if self.swiglu_limit is not None and modifiers[:2] != (None, None):
            got = f"{self.swiglu_limit} with gemm1_alpha or gemm1_clamp_limit"
            need = "either swiglu_limit, or gemm1_alpha and gemm1_clamp_limit"
            raise ConfigurationError("swiglu_limit", got=got, need=need)
        if name == "situ" and self.swiglu_limit is None:
            return ActivationSpec("situ", 4.0 if alpha is None else alpha, limit)
        if name != "silu":
            need = "silu, because gemm1_alpha, gemm1_clamp_limit or swiglu_limit is set"
            raise ConfigurationError("activation", got=self.activation, need=need)
        if self.swiglu_limit is not None:
            return ActivationSpec("swiglu_clamp_before", limit=self.swiglu_limit)
        if alpha is None:
            return ActivationSpec("swiglu_clamp_after", limit=limit)
        return ActivationSpec("swiglu_oai", alpha, limit, interleaved=self.gate_up_interleaved)

    def _select_ungated(self, name: str) -> ActivationSpec:
        for option in ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit"):
            if getattr(self, option) is not None:
                need = "None, because is_gated is False"
                raise ConfigurationError(option, got=getattr(self, option), need=need)
        if name in _KINDS_WITH_UNGATED_FORM:
            return ActivationSpec(f"{name}_no_mul")
        spec = ActivationSpec.parse(self.activation)
        if spec.gated:
            need = f"one of {', '.join(_KINDS_WITH_UNGATED_FORM)}, or an activation without a gate"
            raise ConfigurationError("activation with is_gated=False", got=name, need=need)
        return spec


class Quantization(TypedDict, total=False):
    """Quantization flags and tensors, with the names that vLLM and SGLang use.

    At most one of the use_* flags may be True.

    per_channel_quant: weights have one scale per row.
    block_shape: [rows, columns] of a block for w8a8, or [0, g] for groups of g columns.
    w1_zp, w2_zp: zero points.

    Tensors have the shapes of `ExpertWeights`. Channel scales may also be (E, N, 1), and a static
    activation scale may also be (). Scales with one or two dimensions may have any strides.
    """

    use_fp8_w8a8: bool
    use_int8_w8a8: bool
    use_int8_w8a16: bool
    use_int4_w4a16: bool
    per_channel_quant: bool
    block_shape: list[int] | tuple[int, ...] | None
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    expert_map: torch.Tensor | None
    w1_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    w1_zp: torch.Tensor | None
    w2_zp: torch.Tensor | None
    a1_scale: torch.Tensor | None
    a2_scale: torch.Tensor | None


class Options(Quantization, total=False):
    """Keywords of `fused_experts`: all keys of `Quantization`, and all fields of MoeRunnerConfig.

    A keyword overrides the field with the same name in the config.

    w1_bias, w2_bias: aliases of b1 and b2.
    """

    w1_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    num_experts: int | None
    num_local_experts: int | None
    hidden_size: int | None
    intermediate_size_per_partition: int | None
    layer_id: int | None
    top_k: int | None
    num_fused_shared_experts: int | None
    params_dtype: torch.dtype | None
    routing_method_type: int | None
    runner_backend: object | None
    activation: ActivationSpec | str
    is_gated: bool
    apply_router_weight_on_input: bool
    inplace: bool
    no_combine: bool
    no_combine_keep_router_weight: bool
    routed_scaling_factor: float | None
    gemm1_alpha: float | None
    gemm1_beta: float | None
    gemm1_clamp_limit: float | None
    swiglu_limit: float | None
    gate_up_interleaved: bool
    layer: torch.nn.Module | None
    use_tp_all_gather_activation: bool
    silu_mul_keep_fp32: bool
    chunk_tokens: int | None


_OUT_OF_PLACE = MoeRunnerConfig(inplace=False)
_OPTION_TYPES = get_type_hints(Options)
_CONFIG_FIELDS = tuple(field.name for field in fields(MoeRunnerConfig))
_ALIASES = {"w1_bias": "b1", "w2_bias": "b2"}


def split_options(
    config: MoeRunnerConfig | None, options: Options
) -> tuple[MoeRunnerConfig, Quantization]:
    """Return the config, with fields replaced by keywords, and the quantization options.

    Without a config, inplace is False unless a keyword sets it. Raises ConfigurationError for an
    unknown keyword, or for a value of the wrong type.
    """
    expect("moe_runner_config", config, MoeRunnerConfig | None)
    config = _OUT_OF_PLACE if config is None else config
    remaining: dict[str, Any] = dict(options)
    for name, value in remaining.items():
        if name not in _OPTION_TYPES:
            similar = difflib.get_close_matches(name, _OPTION_TYPES, n=1)
            names = ", ".join(sorted(_OPTION_TYPES))
            need = f"{similar[0]}, or another of {names}" if similar else f"one of {names}"
            raise ConfigurationError("keyword", got=repr(name), need=need)
        expect(name, value, _OPTION_TYPES[name])
    for name, canonical_name in _ALIASES.items():
        if remaining.get(name) is not None:
            if remaining.get(canonical_name) is not None:
                got = f"both {name} and {canonical_name}"
                raise ConfigurationError(name, got=got, need=f"either {name} or {canonical_name}")
            remaining[canonical_name] = remaining[name]
        remaining.pop(name, None)
    changes = {name: remaining.pop(name) for name in _CONFIG_FIELDS if name in remaining}
    quantization: Quantization = remaining  # type: ignore[assignment]
    return replace(config, **changes) if changes else config, quantization


def check_backend(config: MoeRunnerConfig, backend: str) -> None:
    """Raise ConfigurationError unless the config's runner_backend is None or `backend`."""
    requested = config.runner_backend
    name = getattr(requested, "value", requested)
    if name not in (None, backend):
        got, need = repr(name)[:80], f"None or {backend!r}"
        raise ConfigurationError("runner_backend of the config", got=got, need=need)


def quant_of(options: Quantization) -> str:
    """Return the quantization scheme that the flags select, as in Problem.quant.

    Raises ConfigurationError if the flags contradict each other or are incomplete.
    """
    flags = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
    selected = [flag.removeprefix("use_") for flag in flags if options.get(flag)]
    block_shape, per_channel = options.get("block_shape"), bool(options.get("per_channel_quant"))
    if len(selected) > 1:
        raise ConfigurationError("quantization", got=" and ".join(selected), need="one use_* flag")
    if block_shape is not None and len(block_shape) != 2:
        raise ConfigurationError(
            "block_shape", got=list(block_shape), need="[bn, bk], or [0, group]"
        )
    if not selected:
        if block_shape or per_channel:
            got = "block_shape" if block_shape else "per_channel_quant"
            need = "a use_* flag in addition"
            raise ConfigurationError("quantization", got=got, need=need)
        return "none"
    if block_shape and per_channel:
        got, need = "per_channel_quant and block_shape", "only one of them"
        raise ConfigurationError("quantization", got=got, need=need)
    weight_only = selected[0].endswith("a16")
    if block_shape and (block_shape[0] == 0) != weight_only:
        need = "[0, group]" if weight_only else "[bn, bk], both > 0"
        raise ConfigurationError(f"block_shape of {selected[0]}", got=list(block_shape), need=need)
    select = _select_weight_only if weight_only else _select_w8a8
    return select(selected[0], block_shape, options)


def _select_w8a8(name: str, block: Sequence[int] | None, options: Quantization) -> str:
    if block:
        return f"{name}_block:block={block[0]}x{block[1]}"
    if options.get("per_channel_quant"):
        return f"{name}_channel"
    if name == "int8_w8a8":
        need = "per_channel_quant or block_shape, because int8 does not support this"
        raise ConfigurationError(name, got="one scale per tensor", need=need)
    return f"{name}_tensor" + (":static=true" if options.get("a1_scale") is not None else "")


def _select_weight_only(name: str, block: Sequence[int] | None, options: Quantization) -> str:
    if block:
        zeros = ",zero_points=true" if options.get("w1_zp") is not None else ""
        return f"{name}_group:group={block[1]}{zeros}"
    if name == "int4_w4a16":
        raise ConfigurationError(name, got="no block_shape", need="block_shape=[0, group]")
    return f"{name}_channel"
