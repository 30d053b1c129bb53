"""Converts vLLM's description of a MoE layer to a Problem, and selects an experts part for it.

This module does not import vLLM. It reads vLLM's quantization keys, activations and configurations
by attribute.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from modular_kernel.catalog import check, load_catalog, this_machine
from modular_kernel.compatibility.rules import judge
from modular_kernel.errors import IncompatibleError, UnsupportedError
from modular_kernel.integrations.runner_dispatched import ReceivedBatches
from modular_kernel.operators.kernel_cache import NO_EP
from modular_kernel.settings import read_vllm_setting
from modular_kernel.spec.problem import ActivationFormat, ActivationSpec, Machine, Problem
from modular_kernel.spec.quantization import QuantScheme

# Parts that are tried on a GPU, unless MK_VLLM names parts.
DEFAULT_PARTS = ("TritonExperts", "BatchedTritonExperts")
_TENSOR, _TOKEN, _CHANNEL = (-1, -1), (1, -1), (-1, 1)  # values of Operand.group
# vLLM's SWIGLUOAI and SWIGLUSTEP use these constants, and ignore the configuration.
_OAI_ALPHA, _SWIGLU_LIMIT = 1.702, 7.0
_ACTIVATIONS_WITHOUT_OPTIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "silu_no_mul": "silu_no_mul",
    "gelu_no_mul": "gelu_no_mul",
    "gelu_tanh_no_mul": "gelu_tanh_no_mul",
    "relu2_no_mul": "relu2",
}


@dataclass(frozen=True)
class Operand:
    """Quantization of weights or activations.

    element: "fp8" (e4m3), "int8", "mxfp4", "nvfp4", or vLLM's name of another element type.
    group: (rows, columns) that share a scale. -1 means all rows or all columns.
    static: whether the scale is given. If False, it is computed in each call.
    symmetric: whether there are no zero points.
    """

    element: str
    group: tuple[int, int]
    static: bool
    symmetric: bool = True

    def __str__(self) -> str:
        kind = "static" if self.static else "dynamic"
        return f"{kind} {'' if self.symmetric else 'asymmetric '}{self.element} {self.group}"


def make_operand(key: Any) -> Operand | None:
    """Convert a `QuantKey` of vLLM to an Operand. None means unquantized."""
    if key is None:
        return None
    element, scale = str(key.dtype).removeprefix("torch."), str(key.scale.dtype)
    if element == "uint8":  # pairs of 4-bit values, whose format depends on the dtype of scales
        element = {"torch.uint8": "mxfp4", "torch.float8_e4m3fn": "nvfp4"}.get(scale, element)
    elif element == "float8_e4m3fn" and scale == "torch.float32":
        element = "fp8"
    elif element == "float8_e4m3fn":
        element = "mxfp8" if scale == "torch.uint8" else f"fp8 with scales in {scale}"
    row, column = key.scale.group_shape
    return Operand(element, (row, column), key.scale.static, key.symmetric)


def select_scheme(weight: Operand | None, activation: Operand | None) -> str:
    """Return the quantization scheme of a layer, as in Problem.quant.

    int4 and int8 weights with group scales are selected by `select_weight_only_scheme`. Raises
    UnsupportedError if no scheme has these operands.
    """
    if weight is None and activation is None:
        return "none"
    if weight is not None and weight.static and weight.symmetric:
        scheme = None
        if weight.element == "fp8":
            scheme = _select_fp8_scheme(weight.group, activation)
        elif weight == Operand("int8", _CHANNEL, static=True):
            per_token = Operand("int8", _TOKEN, static=False)
            scheme = {per_token: "int8_w8a8_channel", None: "int8_w8a16_channel"}.get(activation)
        elif weight.element in ("mxfp4", "nvfp4") and activation is None:
            scheme = f"{weight.element}_w4a16"
        if scheme is not None:
            return scheme
    got = f"{weight or '16-bit'} weights, {activation or '16-bit'} activations"
    raise UnsupportedError("quantization", got=got, need="a scheme that modular_kernel supports")


def _select_fp8_scheme(group: tuple[int, int], activation: Operand | None) -> str | None:
    """Return the scheme of e4m3 weights with float32 scales."""
    if group in (_TENSOR, _CHANNEL):
        granularity = "tensor" if group == _TENSOR else "channel"
        if activation is None:
            return f"fp8_w8a16_{granularity}"
        if activation == Operand("fp8", _TOKEN, static=False):
            return "fp8_w8a8_channel"  # a per-tensor scale is repeated for each channel
        if group == _TENSOR and activation == Operand("fp8", _TENSOR, static=False):
            return "fp8_w8a8_tensor"
        if group == _TENSOR and activation == Operand("fp8", _TENSOR, static=True):
            return "fp8_w8a8_tensor:static=true"
        return None
    if min(group) < 1:
        return None
    option = "" if group == (128, 128) else f":block={group[0]}x{group[1]}"
    if activation is None:
        return f"fp8_w8a16_block{option}"
    # vLLM's key has 128 columns even if groups of activations are as wide as a weight block.
    allowed_activations = (
        Operand("fp8", (1, 128), static=False),
        Operand("fp8", (1, group[1]), static=False),
    )
    return f"fp8_w8a8_block{option}" if activation in allowed_activations else None


def set_block_shape(scheme: str, block: Sequence[int] | None) -> str:
    """Return a block scheme with the block shape of loaded weights, or another scheme unchanged.

    For checkpoints in compressed-tensors' format, vLLM always selects experts for 128x128 blocks.

    block: rows and columns that share a weight scale; None if there are no blocks.
    """
    quant_scheme = QuantScheme.parse(scheme)
    if block is None or quant_scheme.granularity != "block":
        return scheme
    rows, columns = block
    return str(replace(quant_scheme, group=(rows, columns)))


def select_weight_only_scheme(
    bits: int, group_size: int, *, zero_points: bool, act_order: bool = False
) -> str:
    """Return the scheme of int4 or int8 weights with a scale per group and 16-bit activations.

    bits: width of a weight.
    group_size: number of columns that share a scale; -1 means one scale per row.
    act_order: whether the columns are sorted by group.

    Raises UnsupportedError for other widths, for one scale per row, and for act_order.
    """
    if bits not in (4, 8):
        raise UnsupportedError("weight bits", got=bits, need="4 or 8")
    if group_size < 2 or group_size % 2:
        raise UnsupportedError("group_size", got=group_size, need="an even number of columns")
    if act_order:
        need = "columns in their original order"
        raise UnsupportedError("act order", got="columns sorted by group", need=need)
    name = "int4_w4a16_group" if bits == 4 else "int8_w8a16_group"
    options = f":group={group_size}" + (",zero_points=true" if zero_points else "")
    return str(QuantScheme.parse(name + options))


def make_activation(
    name: str,
    *,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
) -> ActivationSpec:
    """Return the activation that vLLM computes for a value of its `MoEActivation`.

    name: the value of the MoEActivation.
    limit: the layer's clamp limit; None if it is not configured.
    alpha: the factor in the sigmoid; None if it is not configured.
    beta: the number that is added to up values; None if it is not configured.
    situ_beta, situ_linear_beta: alpha and limit of situ.

    Raises UnsupportedError for an activation that no part computes.
    """
    if name in _ACTIVATIONS_WITHOUT_OPTIONS:
        return ActivationSpec(_ACTIVATIONS_WITHOUT_OPTIONS[name])
    if name == "swiglustep":
        return ActivationSpec("swiglu_clamp_after", limit=_SWIGLU_LIMIT)
    if name == "situ" and situ_beta is not None:
        has_limit = situ_linear_beta is not None and situ_linear_beta > 0
        return ActivationSpec("situ", situ_beta, situ_linear_beta if has_limit else None)
    if name == "silu":  # vLLM ignores alpha and beta
        return ActivationSpec("silu") if limit is None else _make_clamped_silu(limit)
    got = f"{name}, limit {limit}, alpha {alpha}, beta {beta}"
    if name == "swigluoai":
        if limit in (None, 7) and alpha in (None, _OAI_ALPHA) and beta in (None, 1):
            return ActivationSpec("swiglu_oai", _OAI_ALPHA, _SWIGLU_LIMIT, interleaved=True)
        need = f"limit {_SWIGLU_LIMIT}, alpha {_OAI_ALPHA} and beta 1, vLLM's constants"
        raise UnsupportedError("activation", got=got, need=need)
    if name == "swigluoai_uninterleave" and limit is not None:
        sigmoid_factor, up_offset = 1.0 if alpha is None else alpha, 0.0 if beta is None else beta
        if up_offset == 1:
            return ActivationSpec("swiglu_oai", sigmoid_factor, limit, interleaved=False)
        if (sigmoid_factor, up_offset) == (1, 0):
            return _make_clamped_silu(limit)
    need = "an activation that modular_kernel supports"
    raise UnsupportedError("activation", got=got, need=need)


def _make_clamped_silu(limit: float) -> ActivationSpec:
    return ActivationSpec("swiglu_clamp_before", limit=limit)


def make_local_problem(problem: Problem) -> Problem:
    """Return the problem of this rank's experts, for rows that a dispatcher has sent to them."""
    return replace(problem, experts=problem.e, local_experts=None, expert_map=False)


def describe_machine(device: str) -> Machine:
    """Return this machine, without its GPU if `device` is "cpu"."""
    return this_machine(device="cpu" if device == "cpu" else "cuda")


def list_candidate_parts(machine: Machine) -> tuple[str, ...]:
    """Return the names of the experts parts to try for vLLM's layers. () leaves all layers to vLLM.

    On a CPU, parts are tried only if MK_VLLM names them, because vLLM's own kernels are faster than
    plain torch parts.
    """
    setting = read_vllm_setting()
    if setting == "0":
        return ()
    if setting == "1":
        return DEFAULT_PARTS if machine.device == "cuda" else ()
    return tuple(name.strip() for name in setting.split(",") if name.strip())


def select_part(problem: Problem, names: Sequence[str], machine: Machine, *, batched: bool) -> str:
    """Return the first of the named experts parts that supports the layer.

    batched: whether vLLM passes rows grouped by expert.

    Raises UnsupportedError if no named part has the format, UnknownPartError for an unknown name,
    and IncompatibleError, with the reasons for the last part, if no part supports the layer.
    """
    format = ActivationFormat.BATCHED_EXPERTS if batched else ActivationFormat.STANDARD
    catalog = load_catalog()
    parts = {name: catalog.experts(name) for name in names}
    candidates = [n for n, part in parts.items() if part.requires.activation_format is format]
    if not candidates:
        need = f"an experts part for the {format.value} format; name one with MK_VLLM"
        raise UnsupportedError("parts", got=", ".join(names) or "none", need=need)
    for name in candidates:
        if batched:
            verdict = judge(ReceivedBatches, parts[name], make_local_problem(problem), machine)  # type: ignore[type-abstract]
        else:
            verdict = check(NO_EP, name, problem, machine)
        if verdict.ok:
            return name
    raise IncompatibleError(verdict.pairing, verdict.rejections)
