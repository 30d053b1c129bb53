"""Converts packed integers of compressed-tensors to int4_w4a16_group and int8_w8a16_group.

    w1 = from_compressed_tensors(weight_packed, weight_scale, weight_zero_point, group=32)

The other formats of compressed-tensors store weights in the layout of kernels. `formats` describes
their tensors.
"""

from typing import Annotated

import torch

from modular_kernel.checkpoints.gptq_awq import (
    GroupWeights,
    check_group_order,
    check_packed,
    pack_values,
    resolve_group,
    unpack_words,
)
from modular_kernel.errors import DtypeError, ShapeError
from modular_kernel.spec.problem import dtype_name
from modular_kernel.utils.argument_checks import OneOf, expect
from modular_kernel.utils.tensor_checks import check_tensor


def from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    *,
    group: int,
    bits: int = 4,
    weight_g_idx: torch.Tensor | None = None,
) -> GroupWeights:
    """Convert "pack-quantized" weights: 4- or 8-bit integers, packed into 32-bit words.

    weight_packed: (..., N, K / p) int32 with p = 32 / bits values per word, the first value in the
        lowest bits. Values are stored with an offset of 8 (4 bits) or 128 (8 bits). This is the
        layout of the scheme, so w of the result is a view of a contiguous `weight_packed`.
    weight_scale: (..., N, G) floating.
    weight_zero_point: (..., N / p, G) int32, packed along N. None means that all are 8 or 128.
    group: columns per scale, or -1 for one group of all K.
    bits: 4 or 8.
    weight_g_idx: (..., K) integers, the group of each column. Must be k // group, because columns
        that are ordered by activation (act-order) are not supported.

    Raises ConfigurationError, ShapeError, DtypeError or WeightsError for invalid arguments.
    """
    expect("bits", bits, Annotated[int, OneOf((4, 8))])
    check_packed(weight_packed, "weight_packed")
    check_tensor("weight_scale", weight_scale)
    values_per_word = 32 // bits
    rows, depth = weight_packed.shape[-2], weight_packed.shape[-1] * values_per_word
    group = resolve_group(group, depth)
    check_group_order(weight_g_idx, depth, group, "weight_g_idx")
    scale_shape = (*weight_packed.shape[:-2], rows, -(-depth // group))
    if tuple(weight_scale.shape) != scale_shape:
        raise ShapeError(
            "weight_scale", got=tuple(weight_scale.shape), need=f"(..., N, G) = {scale_shape}"
        )
    if not weight_scale.dtype.is_floating_point:
        got = dtype_name(weight_scale.dtype)
        raise DtypeError("weight_scale", got=got, need="a floating dtype")
    zeros = None
    if weight_zero_point is not None:
        check_packed(weight_zero_point, "weight_zero_point")
        unpacked = unpack_words(weight_zero_point, -2, range(values_per_word))
        if tuple(unpacked.shape) != scale_shape:
            zeros_shape = tuple(weight_zero_point.shape)
            raise ShapeError(
                "weight_zero_point", got=zeros_shape, need=f"(..., N / {values_per_word}, G)"
            )
        zeros = pack_values(unpacked.mT, bits).mT.contiguous()
    w = weight_packed.contiguous().view(torch.uint8)
    return GroupWeights(w, weight_scale.contiguous(), zeros, group, bits)
