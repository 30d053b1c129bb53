"""Converts the scales of float8 checkpoints, and gpt-oss's mxfp4 weights.

w1, w1_scale = merge_scales(gate_up, scales_e2)  # separate scales of gate and up -> one scale
a1_scale = static_scale(input_scales)            # for the scheme fp8_w8a8_tensor:static=true
w1, w1_scale = from_gpt_oss(blocks, scales)      # for mxfp4_w4a16 with interleaved rows
"""

import torch

from modular_kernel.errors import DtypeError, ShapeError, WeightsError
from modular_kernel.spec.problem import dtype_name
from modular_kernel.tensors import check_activation_scales
from modular_kernel.utils.tensor_checks import check_tensor

_FP8 = torch.float8_e4m3fn
_MXFP4_GROUP = 32
_CODES_PER_STEP = 1 << 18  # float8 codes per table lookup, which needs 4 bytes for each index


def merge_scales(w_eNK: torch.Tensor, scale_eS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rescale float8 weights with S scales per expert to one scale per expert.

    w_eNK: (e, N, K) float8_e4m3fn.
    scale_eS: (e, S) floating. Scale s applies to rows [s N / S, (s + 1) N / S). S is 2 if w has
        gate and up rows.

    Returns w (e, N, K) and scale (e,) of fp8_w8a8_tensor. The scale is the maximum of the S scales.
    Rows that already had this scale are unchanged. Other rows are multiplied by the ratio of the
    scales and rounded again. Raises WeightsError unless all scales are finite and above 0.
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
    scale_eS = _convert_positive_scales(scale_eS, "scale")
    max_scale_e = scale_eS.amax(1)
    # Ratios are at most 1, so products cannot overflow. The ratio of the largest scale is exactly
    # 1.
    ratio_eS = (scale_eS / max_scale_e[:, None]).tolist()
    rescaled_eNK = w_eNK.clone(memory_format=torch.contiguous_format)
    for expert, ratios in enumerate(ratio_eS):
        for values, ratio in zip(rescaled_eNK[expert].chunk(len(ratios)), ratios, strict=True):
            if ratio != 1.0:
                _multiply(values, ratio)
    return rescaled_eNK, max_scale_e


def _multiply(w_NK: torch.Tensor, factor: float) -> None:
    """Multiply contiguous float8 weights by a number in float32, and round the products, in place.

    A table of the products of all 256 codes is faster on CPUs than converting each weight.
    """
    codes = w_NK.view(torch.uint8).view(-1)
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(_FP8)
    table = (table.float() * factor).to(_FP8).view(torch.uint8)
    for start in range(0, len(codes), _CODES_PER_STEP):
        chunk = codes[start : start + _CODES_PER_STEP]
        chunk.copy_(table.index_select(0, chunk.int()))


def channel_scale(scale: torch.Tensor) -> torch.Tensor:
    """Convert scales (e, N, 1) or (e, N) of any floating dtype to contiguous (e, N) float32."""
    check_tensor("scale", scale)
    if scale.dim() == 3 and scale.shape[2] == 1:
        scale = scale[:, :, 0]
    if scale.dim() != 2:
        raise ShapeError("scale", got=tuple(scale.shape), need="(e, N, 1) or (e, N)")
    return _convert_positive_scales(scale, "scale").contiguous()


def static_scale(scales: torch.Tensor) -> torch.Tensor:
    """Return the maximum of the experts' static activation scales, (1,) float32.

    All experts need a common scale, because a token is quantized once, before it is dispatched.
    With the maximum, no activation saturates that would not have saturated with its expert's own
    scale.
    """
    check_tensor("activation scales", scales)
    if not scales.numel():
        raise ShapeError("activation scales", got=tuple(scales.shape), need="one or more")
    return convert_input_scale(scales, "activation scales").amax().reshape(1)


def convert_input_scale(scale: torch.Tensor, what: str) -> torch.Tensor:
    """Convert static activation scales to float32.

    Raises WeightsError unless all are valid divisors, because activations are divided by them.
    """
    scale = _to_float32(scale, what)
    check_activation_scales(what, scale)
    return scale


def _convert_positive_scales(scale: torch.Tensor, what: str) -> torch.Tensor:
    """Convert scales to float32. Raises WeightsError unless all are finite and above 0."""
    scale = _to_float32(scale, what)
    is_invalid = ~(scale.isfinite() & (scale > 0))
    if bool(is_invalid.any()):
        raise WeightsError(what, got=float(scale[is_invalid][0]), need="finite numbers above 0")
    return scale


def _to_float32(scale: torch.Tensor, what: str) -> torch.Tensor:
    if not scale.dtype.is_floating_point:
        raise DtypeError(what, got=dtype_name(scale.dtype), need="a floating dtype")
    return scale.float()


def from_gpt_oss(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert gpt-oss's mxfp4 weights to w (e, N, K / 2) and scale (e, N, K / 32) of mxfp4_w4a16.

    blocks: (e, N, K / 32, 16) uint8 with even k in the low nibble. The result w is a view of it.
    scales: (e, N, K / 32) uint8, E8M0 exponents.

    In gate_up_proj, gate and up rows alternate, and the activation is swiglu_oai. Kernels are
    faster with weights that `modular_kernel.quant.repacking.repack` repacks (scheme
    "mxfp4_w4a16:repacked=true").
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
