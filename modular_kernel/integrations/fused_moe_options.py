"""Keyword arguments of `fused_experts` and `fused_moe`, and their conversion to a problem."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, get_type_hints

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import ActivationSpec, Size
from modular_kernel.utils.argument_checks import Count, check_fields, expect

CHUNK_TOKENS = 64 * 1024


@dataclass(frozen=True)
class MoeRunnerConfig:
    """Settings of a layer beside its tensors.

    num_experts, num_local_experts, hidden_size, intermediate_size_per_partition, top_k: if given,
        the tensors must have these sizes.
    num_fused_shared_experts: number of experts that are shared ones, which the given routing
        assigns to every token. Not supported with logits.
    layer_id: name of the layer; it has no effect.
    activation: "silu", "gelu" (erf), "gelu_tanh", or any other ActivationSpec.
    gemm1_alpha, gemm1_clamp_limit: both turn silu into gpt-oss's swiglu_oai with interleaved rows;
        the limit alone turns it into swiglu_clamp_after.
    inplace: overwrite x with the output.
    no_combine: return weighted outputs (T, K, H); requires inplace=False.
    routed_scaling_factor: None means 1.
    chunk_tokens: maximum number of tokens computed at once; None never splits.

    Raises ConfigurationError if a field has another type.
    """

    num_experts: Count | None = None
    num_local_experts: Count | None = None
    hidden_size: Count | None = None
    intermediate_size_per_partition: Count | None = None
    top_k: int | None = None
    num_fused_shared_experts: Size = 0
    layer_id: int | None = None
    activation: ActivationSpec | str = "silu"
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None
    chunk_tokens: Count | None = CHUNK_TOKENS

    def __post_init__(self) -> None:
        check_fields(self)

    def activation_spec(self) -> ActivationSpec:
        """Return the ActivationSpec; raise ConfigurationError for alpha without a limit."""
        alpha, limit = self.gemm1_alpha, self.gemm1_clamp_limit
        if alpha is None and limit is None:
            return ActivationSpec.parse(self.activation)
        if str(self.activation) != "silu":
            need = "silu where gemm1_alpha or gemm1_clamp_limit is given"
            raise ConfigurationError("activation", got=self.activation, need=need)
        if alpha is None:
            return ActivationSpec("swiglu_clamp_after", limit=limit)
        return ActivationSpec("swiglu_oai", alpha, limit, interleaved=True)


class Quantization(TypedDict, total=False):
    """Flags (at most one use_*) and tensors beside w1 and w2, under vLLM's and SGLang's names.

    block_shape: [bn, bk] of w8a8, or [0, g] for groups of g. per_channel_quant: one scale per row.
    Channel scales may be (E, N, 1), a static activation scale (). Scales with one or two dimensions
    may have any strides. Otherwise as in `ExpertWeights`.
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
    """Quantization, and any field of MoeRunnerConfig, which overrides the config's value.

    w1_bias, w2_bias: aliases of b1 and b2.
    """

    w1_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    num_experts: int | None
    num_local_experts: int | None
    hidden_size: int | None
    intermediate_size_per_partition: int | None
    top_k: int | None
    num_fused_shared_experts: int
    layer_id: int | None
    activation: ActivationSpec | str
    apply_router_weight_on_input: bool
    inplace: bool
    no_combine: bool
    routed_scaling_factor: float | None
    gemm1_alpha: float | None
    gemm1_clamp_limit: float | None
    chunk_tokens: int | None


_OUT_OF_PLACE = MoeRunnerConfig(inplace=False)
_OPTIONS = get_type_hints(Options)
_CONFIG = tuple(field.name for field in fields(MoeRunnerConfig))
_OTHER_NAMES = {"w1_bias": "b1", "w2_bias": "b2"}


def split_options(
    config: MoeRunnerConfig | None, options: Options
) -> tuple[MoeRunnerConfig, Quantization]:
    """Split keywords into fields of the config, which they override, and quantization options.

    Without a config, inplace is False unless a keyword sets it. Raises ConfigurationError for an
    unknown keyword or for a value of another type.
    """
    expect("moe_runner_config", config, MoeRunnerConfig | None)
    config = _OUT_OF_PLACE if config is None else config
    remaining: dict[str, Any] = dict(options)
    for name, value in remaining.items():
        if name not in _OPTIONS:
            similar = difflib.get_close_matches(name, _OPTIONS, n=1)
            need = f"{f'{similar[0]}? ' if similar else ''}One of {', '.join(sorted(_OPTIONS))}"
            raise ConfigurationError("keyword", got=repr(name), need=need)
        expect(name, value, _OPTIONS[name])
    for name, field in _OTHER_NAMES.items():
        if remaining.get(name) is not None:
            if remaining.get(field) is not None:
                raise ConfigurationError(name, got=f"{field} too", need="one of the two")
            remaining[field] = remaining[name]
        remaining.pop(name, None)
    changes = {name: remaining.pop(name) for name in _CONFIG if name in remaining}
    quantization: Quantization = remaining  # type: ignore[assignment]
    return replace(config, **changes) if changes else config, quantization


def quant_of(options: Quantization) -> str:
    """Return the scheme of the flags, as for Problem.quant.

    Raises ConfigurationError for contradictory or incomplete flags.
    """
    flags = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
    used = [flag.removeprefix("use_") for flag in flags if options.get(flag)]
    block, channels = options.get("block_shape"), bool(options.get("per_channel_quant"))
    if len(used) > 1:
        raise ConfigurationError("quantization", got=" and ".join(used), need="one use_* flag")
    if block is not None and len(block) != 2:
        raise ConfigurationError("block_shape", got=list(block), need="[bn, bk], or [0, group]")
    if not used:
        if block or channels:
            got = "block_shape" if block else "per_channel_quant"
            raise ConfigurationError("quantization", got=got, need="a use_* flag with it")
        return "none"
    if block and channels:
        raise ConfigurationError("per_channel_quant", got="block_shape too", need="one of the two")
    weight_only = used[0].endswith("a16")
    if block and (block[0] == 0) != weight_only:
        need = "[0, group]" if weight_only else "[bn, bk], both above 0"
        raise ConfigurationError(f"block_shape of {used[0]}", got=list(block), need=need)
    return _weight_only(used[0], block, options) if weight_only else _w8a8(used[0], block, options)


def _w8a8(name: str, block: Sequence[int] | None, options: Quantization) -> str:
    if block:
        return f"{name}_block:block={block[0]}x{block[1]}"
    if options.get("per_channel_quant"):
        return f"{name}_channel"
    if name == "int8_w8a8":
        need = "per_channel_quant or block_shape: one scale a tensor is for float8 alone"
        raise ConfigurationError(name, got="one scale a tensor", need=need)
    return f"{name}_tensor" + (":static=true" if options.get("a1_scale") is not None else "")


def _weight_only(name: str, block: Sequence[int] | None, options: Quantization) -> str:
    if block:
        zeros = ",zero_points=true" if options.get("w1_zp") is not None else ""
        return f"{name}_group:group={block[1]}{zeros}"
    if name == "int4_w4a16":
        raise ConfigurationError(name, got="no block_shape", need="block_shape=[0, group]")
    return f"{name}_channel"
