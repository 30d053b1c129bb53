"""`fused_experts` and `fused_moe`, as the field calls them: loose tensors and flags, one function.

    y_TH = fused_experts(x_TH, w1, w2, (topk_weights, topk_ids, None), MoeRunnerConfig())
    y_TH = fused_experts(x_TH, w1, w2, topk_output, use_fp8_w8a8=True, block_shape=[128, 128],
                         w1_scale=w1_scale, w2_scale=w2_scale)

Sugar over `make_kernel`: TritonExperts where Triton runs, else TorchExperts, behind
MoEPrepareAndFinalizeNoEP. Registered as torch.ops.modular_kernel.outplace_fused_experts and
inplace_fused_experts, so that torch.compile passes over them without a break. Buffers are
allocated by each call; `FusedMoEModularKernel.plan` allocates them once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypedDict, Unpack

import torch

from modular_kernel.catalog import check, make_kernel, this_machine
from modular_kernel.errors import ConfigurationError, ShapeError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.types import ActivationSpec, Combine, Problem, parse_dtype

_EXPERTS = ("TritonExperts", "TorchExperts")
_SMALLEST_CAPACITY = 16
# What follows w1 and w2 of an ExpertWeights, and the names for it here.
_FIELDS = {
    "b1": "b1",
    "b2": "b2",
    "expert_map": "expert_map",
    "w1_scale": "w1_scale",
    "w2_scale": "w2_scale",
    "w1_zero_point": "w1_zp",
    "w2_zero_point": "w2_zp",
    "a1_scale": "a1_scale",
    "a2_scale": "a2_scale",
}


@dataclass(frozen=True)
class MoeRunnerConfig:
    """How a layer computes, beside its tensors.

    activation: "silu", "gelu" (erf), "gelu_tanh" or any other ActivationSpec. gemm1_alpha with
    gemm1_clamp_limit makes silu gpt-oss's swiglu_oai with interleaved rows, the limit alone
    swiglu_clamp_after. no_combine: (T, K, H), weighted. routed_scaling_factor: None means 1.
    num_experts, top_k: if given, what the tensors must agree with. inplace overwrites x.
    """

    num_experts: int | None = None
    top_k: int | None = None
    activation: ActivationSpec | str = "silu"
    apply_router_weight_on_input: bool = False
    inplace: bool = False
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None

    def activation_spec(self) -> ActivationSpec:
        """The activation by its one name; ConfigurationError for alpha without a limit."""
        alpha, limit = self.gemm1_alpha, self.gemm1_clamp_limit
        if alpha is None and limit is None:
            return ActivationSpec.parse(self.activation)
        if str(self.activation) != "silu":
            need = "silu where gemm1_alpha or gemm1_clamp_limit is given"
            raise ConfigurationError("activation", got=self.activation, need=need)
        if alpha is None:
            return ActivationSpec("swiglu_clamp_after", limit=limit)
        return ActivationSpec("swiglu_oai", alpha, limit, interleaved=True)


class Quantisation(TypedDict, total=False):
    """Flags, of which at most one use_*, and tensors beside w1 and w2, in the field's names.

    block_shape: [bn, bk] of w8a8, [0, g] for groups of g. per_channel_quant: one scale a row. A
    channel's scales may be (E, N, 1), a static activation scale (). Else as `ExpertWeights`.
    """

    use_fp8_w8a8: bool
    use_int8_w8a8: bool
    use_int8_w8a16: bool
    use_int4_w4a16: bool
    per_channel_quant: bool
    block_shape: Sequence[int] | None
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    expert_map: torch.Tensor | None
    w1_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    w1_zp: torch.Tensor | None
    w2_zp: torch.Tensor | None
    a1_scale: torch.Tensor | None
    a2_scale: torch.Tensor | None


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: Sequence[torch.Tensor | None],
    moe_runner_config: MoeRunnerConfig | None = None,
    **options: Unpack[Quantisation],
) -> torch.Tensor:
    """The layer's output: (T, H), hidden_states itself if inplace, (T, K, H) if no_combine.

    hidden_states: (T, H). w1: (E, N, H) or packed, w2: (E, H, I) or packed. topk_output: weights
    (T, K) float32, ids (T, K) with -1 to skip, and what else a router returns. Every InputError
    of `FusedMoEModularKernel`, and IncompatibleError where no part serves the problem.
    """
    config = moe_runner_config or MoeRunnerConfig()
    weights_TK, ids_TK = _topk(topk_output, config)
    if config.num_experts is not None and config.num_experts != _experts(w1, options):
        got = f"{_experts(w1, options)} experts"
        raise ShapeError("w1", got=got, need=f"num_experts = {config.num_experts}")
    if config.inplace and config.no_combine:
        raise ConfigurationError("inplace", got="no_combine=True", need="no_combine=False")
    extras = [options.get(name) for name in _FIELDS.values()]
    settings = (
        quant_of(options),
        str(config.activation_spec()),
        config.apply_router_weight_on_input,
        1.0 if config.routed_scaling_factor is None else config.routed_scaling_factor,
    )
    arguments = (hidden_states, w1, w2, weights_TK, ids_TK, extras, *settings)
    if config.inplace:
        inplace_fused_experts(*arguments)
        return hidden_states
    output: torch.Tensor = outplace_fused_experts(*arguments, config.no_combine)
    return output


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    gating_output: torch.Tensor,
    moe_runner_config: MoeRunnerConfig,
    *,
    renormalize: bool = False,
    **options: Unpack[Quantisation],
) -> torch.Tensor:
    """`fused_experts` behind a softmax over gating_output (T, E) and its top_k largest.

    The config's top_k must be given. renormalize: the K weights of a token sum to 1.
    """
    top_k, experts = moe_runner_config.top_k, gating_output.shape[-1]
    if top_k is None or not 1 <= top_k <= experts:
        raise ConfigurationError("top_k", got=top_k, need=f"1 to {experts}, the router's experts")
    weights_TK, ids_TK = gating_output.float().softmax(-1).topk(top_k)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    topk_output = (weights_TK, ids_TK, gating_output)
    return fused_experts(hidden_states, w1, w2, topk_output, moe_runner_config, **options)


def quant_of(options: Quantisation) -> str:
    """The scheme that the flags name, as Problem.quant takes it."""
    flags = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
    used = [flag.removeprefix("use_") for flag in flags if options.get(flag)]
    block, channels = options.get("block_shape"), bool(options.get("per_channel_quant"))
    if len(used) > 1:
        raise ConfigurationError("quantisation", got=" and ".join(used), need="one use_* flag")
    if not used:
        if block or channels:
            got = "block_shape" if block else "per_channel_quant"
            raise ConfigurationError("quantisation", got=got, need="a use_* flag with it")
        return "none"
    if block is not None and len(block) != 2:
        raise ConfigurationError("block_shape", got=list(block), need="[bn, bk], or [0, group]")
    if block and channels:
        raise ConfigurationError("per_channel_quant", got="block_shape too", need="one of the two")
    weight_only = used[0].endswith("a16")
    if block and (block[0] == 0) != weight_only:
        need = "[0, group]" if weight_only else "[bn, bk], both above 0"
        raise ConfigurationError(f"block_shape of {used[0]}", got=list(block), need=need)
    return _weight_only(used[0], block, options) if weight_only else _w8a8(used[0], block, options)


def _w8a8(name: str, block: Sequence[int] | None, options: Quantisation) -> str:
    if block:
        return f"{name}_block:block={block[0]}x{block[1]}"
    if options.get("per_channel_quant"):
        return f"{name}_channel"
    if name == "int8_w8a8":
        need = "per_channel_quant or block_shape: one scale a tensor is for float8 alone"
        raise ConfigurationError(name, got="one scale a tensor", need=need)
    return f"{name}_tensor" + (":static=true" if options.get("a1_scale") is not None else "")


def _weight_only(name: str, block: Sequence[int] | None, options: Quantisation) -> str:
    if block:
        zeros = ",zero_points=true" if options.get("w1_zp") is not None else ""
        return f"{name}_group:group={block[1]}{zeros}"
    if name == "int4_w4a16":
        raise ConfigurationError(name, got="no block_shape", need="block_shape=[0, group]")
    return f"{name}_channel"


def _topk(
    topk_output: Sequence[torch.Tensor | None], config: MoeRunnerConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    weights_TK, ids_TK = (*topk_output, None, None)[:2]
    if weights_TK is None or ids_TK is None:
        raise ConfigurationError("topk_output", got="None", need="weights and ids, both (T, K)")
    if ids_TK.dim() != 2 or config.top_k not in (None, ids_TK.shape[1]):
        top_k = "" if config.top_k is None else f" with K = top_k = {config.top_k}"
        raise ShapeError("topk_ids", got=tuple(ids_TK.shape), need=f"(T, K){top_k}")
    return weights_TK, ids_TK


def _experts(w1: torch.Tensor, options: Quantisation) -> int:
    """E of all ranks: what an expert_map counts, otherwise those here."""
    expert_map = options.get("expert_map")
    return w1.shape[0] if expert_map is None else expert_map.shape[0]


# ------------------------------------------------------------------------------- as torch's ops
# The last arguments: quant, activation, apply_router_weight_on_input, routed_scaling_factor and,
# out of place, no_combine. extras: the fields of an ExpertWeights in the order of _FIELDS.


@torch.library.custom_op("modular_kernel::outplace_fused_experts", mutates_args=())
def outplace_fused_experts(  # noqa: PLR0913 (an operator's schema has no records)
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    extras: Sequence[torch.Tensor | None],
    quant: str,
    activation: str,
    on_input: bool,
    scale: float,
    no_combine: bool,
) -> torch.Tensor:
    combine = Combine.TOPK_WEIGHTED if no_combine else Combine.SUM
    routing, weights = Routing(topk_weights, topk_ids), _weights(w1, w2, extras, quant)
    facts = (quant, activation, on_input, scale, combine, False)
    return _kernel_for(hidden_states, weights, routing, facts)(hidden_states, weights, routing)


@outplace_fused_experts.register_fake
def _(hidden_states, w1, w2, topk_weights, topk_ids, extras, *settings):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN002, ANN202
    """Shape and dtype of the output. Last of the settings: no_combine."""
    tokens, hidden = hidden_states.shape
    middle = (topk_ids.shape[1],) if settings[-1] else ()
    return hidden_states.new_empty((tokens, *middle, hidden))


@torch.library.custom_op("modular_kernel::inplace_fused_experts", mutates_args=("hidden_states",))
def inplace_fused_experts(  # noqa: PLR0913 (an operator's schema has no records)
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    extras: Sequence[torch.Tensor | None],
    quant: str,
    activation: str,
    on_input: bool,
    scale: float,
) -> None:
    routing, weights = Routing(topk_weights, topk_ids), _weights(w1, w2, extras, quant)
    facts = (quant, activation, on_input, scale, Combine.SUM, True)
    _kernel_for(hidden_states, weights, routing, facts)(hidden_states, weights, routing)


def _weights(
    w1: torch.Tensor, w2: torch.Tensor, extras: Sequence[torch.Tensor | None], quant: str
) -> ExpertWeights:
    fields = dict(zip(_FIELDS, extras, strict=True))
    for name in ("w1_scale", "w2_scale"):
        scale = fields[name]
        if "_channel" in quant and scale is not None and scale.dim() == 3 and scale.shape[2] == 1:
            fields[name] = scale[:, :, 0].contiguous()
    for name in ("a1_scale", "a2_scale"):
        scale = fields[name]
        if scale is not None and scale.dim() == 0:
            fields[name] = scale.reshape(1)
    return ExpertWeights(w1, w2, **fields)


def _kernel_for(
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    facts: tuple[str, str, bool, float, Combine, bool],
) -> FusedMoEModularKernel:
    """The kernel of a problem as large as the next power of two of tokens."""
    for what, tensor, dims in (("x", x_TH, 2), ("w1", weights.w1, 3), ("w2", weights.w2, 3)):
        if tensor.dim() != dims:
            raise ShapeError(what, got=tuple(tensor.shape), need=f"{dims} dimensions")
    quant, activation, on_input, scale, combine, inplace = facts
    packed = quant.startswith("int4")
    expert_map, e = weights.expert_map, weights.w1.shape[0]
    problem = Problem(
        tokens=max(_SMALLEST_CAPACITY, 1 << (x_TH.shape[0] - 1).bit_length()),
        hidden=x_TH.shape[1],
        intermediate=weights.w2.shape[2] * (2 if packed else 1),
        experts=e if expert_map is None else expert_map.shape[0],
        local_experts=None if expert_map is None else e,
        top_k=routing.topk_ids_TK.shape[1],
        dtype=parse_dtype(x_TH.dtype),
        quant=quant,
        activation=activation,
        bias=weights.b1 is not None or weights.b2 is not None,
        expert_map=expert_map is not None,
        apply_router_weight_on_input=on_input,
        routed_scaling_factor=scale,
        combine=combine,
        inplace=inplace,
    )
    return _kernel(problem, x_TH.device)


@lru_cache(maxsize=256)
def _kernel(problem: Problem, device: torch.device) -> FusedMoEModularKernel:
    """One for each problem and device: a kernel counts invalid ids where it runs."""
    machine = this_machine(device="cpu" if device.type == "cpu" else None)
    prepare = "MoEPrepareAndFinalizeNoEP"
    valid = [name for name in _EXPERTS if check(prepare, name, problem, machine).ok]
    return make_kernel(prepare, (*valid, _EXPERTS[-1])[0], problem, machine=machine)
