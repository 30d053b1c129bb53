"""Kernels for `fused_experts`, `fused_moe` and `MoeRunner`, cached by problem and device."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from modular_kernel.catalog import check, make_kernel, this_machine
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError
from modular_kernel.integrations.fused_moe_options import MoeRunnerConfig, Quantization
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.operators.kernel_cache import NO_EP, Experts
from modular_kernel.quant.quantized_weights import values_per_word
from modular_kernel.quant.repacking import VALUES_PER_WORD
from modular_kernel.spec.problem import ActivationSpec, Combine, Problem, parse_dtype
from modular_kernel.spec.quantization import QUANT_SCHEMES
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils.tensor_checks import check_tensor

DEFAULT_PARTS: tuple[Experts, ...] = ("TritonExperts", "TorchExperts")
_MIN_TOKENS = 16  # smallest number of tokens that a kernel is created for
_VALUES_PER_ELEMENT = {name: values_per_word(scheme) for name, scheme in QUANT_SCHEMES.items()}
# The keyword of `Quantization` for each field of ExpertWeights after w1 and w2.
FIELDS = {
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


def check_config(
    config: MoeRunnerConfig,
    x_TH: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    options: Quantization,
    *,
    values_per_element: int,
) -> None:
    """Raise ShapeError or DtypeError for a tensor that does not match the config.

    values_per_element: number of weights in an element of w1 and w2.
    """
    for what, tensor in (("w1", w1), ("w2", w2)):
        if tensor.dim() != 3:
            raise ShapeError(what, got=tuple(tensor.shape), need="3 dimensions")
    experts = count_global_experts(w1, options)
    intermediate = w2.shape[2] * values_per_element
    sizes = (
        ("w1", "num_experts", experts, "experts"),
        ("w1", "num_local_experts", w1.shape[0], "local experts"),
        ("x", "hidden_size", x_TH.shape[-1] if x_TH.dim() else 0, "hidden values"),
        ("w2", "intermediate_size_per_partition", intermediate, "intermediate values"),
    )
    for what, name, got, unit in sizes:
        need = getattr(config, name)
        if need is not None and need != got:
            raise ShapeError(what, got=f"{got} {unit}", need=f"{name} = {need}")
    shared = config.num_fused_shared_experts or 0
    if shared > experts:
        need = f"<= {experts}, the number of experts"
        raise ConfigurationError("num_fused_shared_experts", got=shared, need=need)
    dtype = config.params_dtype
    if dtype is not None and w1.is_floating_point() and w1.itemsize > 1 and w1.dtype is not dtype:
        raise DtypeError("w1", got=w1.dtype, need=f"params_dtype = {dtype}")


def count_values_per_element(quant: str) -> int:
    """Return the number of weights in an element of w1 and w2.

    The scheme is not parsed, because torch.compile traces this function but not the parser.
    """
    return VALUES_PER_WORD if "repacked=true" in quant else _VALUES_PER_ELEMENT[quant.split(":")[0]]


def count_global_experts(w1: torch.Tensor, options: Quantization) -> int:
    """Return E: the length of expert_map if it is given, or the number of experts in w1."""
    expert_map = options.get("expert_map")
    if expert_map is not None and expert_map.dim() != 1:
        raise ShapeError("expert_map", got=tuple(expert_map.shape), need="(E,)")
    return w1.shape[0] if expert_map is None else expert_map.shape[0]


def make_weights(
    w1: torch.Tensor, w2: torch.Tensor, extras: Sequence[torch.Tensor | None], quant: str
) -> ExpertWeights:
    """Return ExpertWeights with scales in the shape that kernels require.

    extras: the tensors of the other fields, in the order of FIELDS.
    """
    fields = dict(zip(FIELDS, extras, strict=True))
    for name in ("w1_scale", "w2_scale", "a1_scale", "a2_scale"):
        scale = fields[name]
        if scale is not None:
            fields[name] = _reshape_scale(name, scale, quant)
    return ExpertWeights(w1, w2, **fields)


def _reshape_scale(name: str, scale: torch.Tensor, quant: str) -> torch.Tensor:
    """Return a scale in the shape that kernels require.

    The result is contiguous if it has fewer than three dimensions.
    """
    dims, is_weight_scale = scale.dim(), name in ("w1_scale", "w2_scale")
    is_column = is_weight_scale and "_channel" in quant and dims == 3 and scale.shape[2] == 1
    is_scalar = dims == 0 and not is_weight_scale
    if not (is_column or is_scalar) and (dims > 2 or scale.is_contiguous()):
        return scale
    check_tensor(name, scale, meta=True)  # views and copies require memory
    if is_scalar:
        return scale.reshape(1)
    return (scale[:, :, 0] if is_column else scale).contiguous()


# Fields of a Problem: quant, activation, apply_router_weight_on_input, routed_scaling_factor,
# combine, inplace and chunk_tokens.
KernelOptions = tuple[str, str, bool, float, Combine, bool, int | None]


def get_kernel(
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    kernel_options: KernelOptions,
    parts: tuple[Experts, ...] = DEFAULT_PARTS,
) -> FusedMoEModularKernel:
    """Return the kernel for a call. Its maximum number of tokens is a power of two.

    parts: experts parts. The first part that supports the problem is used.
    """
    values_per_element = count_values_per_element(kernel_options[0])
    _check_sizes(x_TH, weights, values_per_element, kernel_options[1])
    expert_map, e = weights.expert_map, weights.w1.shape[0]
    tokens, hidden = x_TH.shape
    sizes = (
        max(_MIN_TOKENS, 1 << (tokens - 1).bit_length()),
        hidden,
        weights.w2.shape[2] * values_per_element,
        e if expert_map is None else expert_map.shape[0],
        routing.topk_ids_TK.shape[1],
        None if expert_map is None else e,
    )
    bias = weights.b1 is not None or weights.b2 is not None
    chunk_tokens = kernel_options[-1]
    if chunk_tokens is not None and sizes[0] <= chunk_tokens:
        kernel_options = (*kernel_options[:-1], None)  # calls of this kernel are never split
    return _make_kernel(sizes, x_TH.dtype, bias, kernel_options, x_TH.device, parts)


def _check_sizes(
    x_TH: torch.Tensor, weights: ExpertWeights, values_per_element: int, activation: str
) -> None:
    """Raise ShapeError unless the shapes of x, w1 and w2 match."""
    w1, w2 = weights.w1, weights.w2
    for what, tensor, dims in (("x", x_TH, 2), ("w1", w1, 3), ("w2", w2, 3)):
        if tensor.dim() != dims:
            raise ShapeError(what, got=tuple(tensor.shape), need=f"{dims} dimensions")
    (e, rows, h1), (e2, h2, i) = w1.shape, w2.shape
    h, h1, i = x_TH.shape[1], h1 * values_per_element, i * values_per_element
    if h != h1 == h2:
        need = f"(T, H) with H = {h1}, as in w1 and w2"
        raise ShapeError("x", got=tuple(x_TH.shape), need=need)
    if h1 != h:
        need = f"(E, N, H{_format_divisor(values_per_element)}) with H = {h}, as in x"
        raise ShapeError("w1", got=tuple(w1.shape), need=need)
    if (e2, h2) != (e, h):
        columns = f"I{_format_divisor(values_per_element)}"
        need = f"(E, H, {columns}) with E = {e}, as in w1, and H = {h}, as in x"
        raise ShapeError("w2", got=tuple(w2.shape), need=need)
    gated = _is_gated(activation)
    if rows != i * (1 + gated):
        got = f"{tuple(w1.shape)} and {tuple(w2.shape)}, that is, N = {rows} and I = {i}"
        need = f"N = {'2I' if gated else 'I'} for {activation}"
        raise ShapeError("w1 and w2", got=got, need=need)


@lru_cache(maxsize=256)
def _is_gated(activation: str) -> bool:
    return ActivationSpec.parse(activation).gated


def _format_divisor(divisor: int) -> str:
    return "" if divisor == 1 else f" / {divisor}"


@lru_cache(maxsize=256)
def _make_kernel(
    sizes: tuple[int, int, int, int, int, int | None],
    dtype: torch.dtype,
    bias: bool,
    kernel_options: KernelOptions,
    device: torch.device,
    parts: tuple[Experts, ...],
) -> FusedMoEModularKernel:
    """Create a kernel. Each device has its own kernel, which counts invalid ids on that device."""
    tokens, hidden, intermediate, experts, top_k, local_experts = sizes
    quant, activation, on_input, scale, combine, inplace, chunk_tokens = kernel_options
    problem = Problem(
        tokens=tokens,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        local_experts=local_experts,
        top_k=top_k,
        dtype=parse_dtype(dtype),
        quant=quant,
        activation=activation,
        bias=bias,
        expert_map=local_experts is not None,
        apply_router_weight_on_input=on_input,
        routed_scaling_factor=scale,
        combine=combine,
        inplace=inplace,
        chunk_tokens=chunk_tokens,
    )
    machine = this_machine(device="cpu" if device.type == "cpu" else None)
    supported_parts = [part for part in parts if check(NO_EP, part, problem, machine).ok]
    return make_kernel(NO_EP, (*supported_parts, parts[-1])[0], problem, machine=machine)
