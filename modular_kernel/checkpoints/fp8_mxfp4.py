"""Conversion of float8 checkpoints' scales and of gpt-oss's mxfp4 weights.

w1, w1_scale = one_scale(gate_up, scales_e2)   # per-half scales -> one scale per expert
a1_scale = static_scale(input_scales)          # "quant": fp8_w8a8_tensor:static=true
w1, w1_scale = from_gpt_oss(blocks, scales)    # "quant": mxfp4_w4a16, interleaved rows
"""

import torch

from modular_kernel.errors import DtypeError, ShapeError, WeightsError
from modular_kernel.spec.problem import dtype_name
from modular_kernel.tensors import check_divisors
from modular_kernel.utils.tensor_checks import check_tensor

_FP8 = torch.float8_e4m3fn
_MXFP4_GROUP = 32
_CODES_PER_STEP = 1 << 18  # float8 codes that are looked up at once, as 32-bit indices


def one_scale(w_eNK: torch.Tensor, scale_eS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rescale float8 weights with S scales per expert to one scale per expert.

    w_eNK: float8_e4m3fn. scale_eS: (e, S) floating, scale s for rows [s N / S, (s + 1) N / S); S =
    2 for gate and up. Returns w (e, N, K) and scale (e,) of fp8_w8a8_tensor. The largest scale is
    kept, and its rows are unchanged; the other rows are rounded again. Raises WeightsError unless
    all scales are finite and above 0.
    """
    check_tensor("w", w_eNK)
    check_tensor("scale", scale_eS)
    if w_eNK.dtype is not _FP8:
        raise DtypeError("w", got=dtype_name(w_eNK.dtype), need=dtype_name(_FP8))
    if w_eNK.dim() != 3:
        raise ShapeError("w", got=tuple(w_eNK.shape), need="(e, N, K)")
    e, rows = w_eNK.shape[:2]
    shape = tuple(scale_eS.shape)
    if len(shape) != 2 or shape[0] != e or not shape[1] or rows % shape[1]:
        raise ShapeError("scale", got=shape, need=f"(e, S) with e = {e} and S dividing N = {rows}")
    scale_eS = _positive_scales(scale_eS, "scale")
    largest_e = scale_eS.amax(1)
    # Exactly 1 for rows of the largest scale and below 1 for the others: no overflow.
    ratio_eS = (scale_eS / largest_e[:, None]).tolist()
    rescaled = w_eNK.clone(memory_format=torch.contiguous_format)
    for expert, ratios in enumerate(ratio_eS):
        for values, ratio in zip(rescaled[expert].chunk(len(ratios)), ratios, strict=True):
            if ratio != 1.0:
                _multiply(values, ratio)
    return rescaled, largest_e


def _multiply(w_NK: torch.Tensor, factor: float) -> None:
    """Multiply contiguous float8 weights by a float32 number, in place, and round them again.

    The products of the 256 codes are computed once and looked up, which is much faster on CPUs than
    converting each weight.
    """
    codes = w_NK.view(torch.uint8).view(-1)
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(_FP8)
    table = (table.float() * factor).to(_FP8).view(torch.uint8)
    for start in range(0, len(codes), _CODES_PER_STEP):
        piece = codes[start : start + _CODES_PER_STEP]
        piece.copy_(table.index_select(0, piece.int()))


def channel_scale(scale: torch.Tensor) -> torch.Tensor:
    """Convert scales (e, N, 1) or (e, N) of any floating dtype to contiguous (e, N) float32."""
    check_tensor("scale", scale)
    if scale.dim() == 3 and scale.shape[2] == 1:
        scale = scale[:, :, 0]
    if scale.dim() != 2:
        raise ShapeError("scale", got=tuple(scale.shape), need="(e, N, 1) or (e, N)")
    return _positive_scales(scale, "scale").contiguous()


def static_scale(scales: torch.Tensor) -> torch.Tensor:
    """Return the maximum of the experts' static activation scales, (1,) float32.

    One scale is used for all experts, because a token is quantized once, before it is dispatched.
    The maximum saturates none.
    """
    check_tensor("activation scales", scales)
    if not scales.numel():
        raise ShapeError("activation scales", got=tuple(scales.shape), need="one or more")
    return usable_inputs(scales, "activation scales").amax().reshape(1)


def usable_inputs(scale: torch.Tensor, what: str) -> torch.Tensor:
    """Return static activation scales as float32; WeightsError if one is no valid divisor."""
    scale = _to_float32(scale, what)
    check_divisors(what, scale)
    return scale


def _positive_scales(scale: torch.Tensor, what: str) -> torch.Tensor:
    """Return scales as float32; raise WeightsError unless all are finite and above 0."""
    scale = _to_float32(scale, what)
    bad = ~(scale.isfinite() & (scale > 0))
    if bool(bad.any()):
        raise WeightsError(what, got=float(scale[bad][0]), need="finite numbers above 0")
    return scale


def _to_float32(scale: torch.Tensor, what: str) -> torch.Tensor:
    if not scale.dtype.is_floating_point:
        raise DtypeError(what, got=dtype_name(scale.dtype), need="a floating dtype")
    return scale.float()


def from_gpt_oss(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mxfp4_w4a16's w (e, N, K / 2), a view of blocks, and scale (e, N, K / 32).

    blocks: (e, N, K / 32, 16) uint8, even k in the low nibble. scales: (e, N, K / 32) uint8 (E8M0).
    The rows of gate_up_proj alternate gate and up; the activation is swiglu_oai. Kernels are faster
    with w repacked by `modular_kernel.quant.repacking.repack`, for "mxfp4_w4a16:repacked=true".
    """
    for what, tensor in (("blocks", blocks), ("scales", scales)):
        check_tensor(what, tensor)
        if tensor.dtype is not torch.uint8:
            raise DtypeError(what, got=dtype_name(tensor.dtype), need="uint8")
    group_bytes = _MXFP4_GROUP // 2
    if blocks.dim() != 4 or blocks.shape[3] != group_bytes:
        raise ShapeError("blocks", got=tuple(blocks.shape), need=f"(e, N, K / 32, {group_bytes})")
    if scales.shape != blocks.shape[:3]:
        need = f"(e, N, K / 32) = {tuple(blocks.shape[:3])}"
        raise ShapeError("scales", got=tuple(scales.shape), need=need)
    return blocks.flatten(2), scales.contiguous()
