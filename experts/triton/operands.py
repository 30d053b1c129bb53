"""Operands of the two expert GEMMs, and their conversion to kernel arguments.

`gemm1_operands` and `gemm2_operands` collect the weights, scales, zero points, bias and activation
function of a GEMM in a `GemmOperands`. `GemmOperands.arguments` returns them as keyword arguments
of the GEMM kernels.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch

from experts.triton.launch_config import Device, LaunchConfig
from modular_kernel.compatibility.support import Rejection
from modular_kernel.ops.activation import activation_constants, get_gate_up_layout
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, StandardTokens

SCHEMES = frozenset(
    {
        "none",
        "fp8_w8a8_tensor",
        "fp8_w8a8_channel",
        "fp8_w8a8_block",
        "fp8_w8a16_tensor",
        "fp8_w8a16_channel",
        "fp8_w8a16_block",
        "int8_w8a8_channel",
        "int8_w8a8_block",
        "int8_w8a16_channel",
        "int8_w8a16_group",
        "int4_w4a16_group",
        "int8_w8a16_act_order",
        "int4_w4a16_act_order",
        "mxfp4_w4a16",
        "nvfp4_w4a16",
    }
)
TMA_BYTES = 16  # TMA requires tensors and their rows to be aligned to this many bytes
DEFAULT_ZERO_POINT = {"uint8": 128, "uint4": 8}  # default zero point of unsigned weights
_FLOAT8_ARCH = (8, 9)
_MIN_BLOCK_K = 32  # K of an 8-bit MMA; packed weights take two MMAs of K = 16


def supports_tma(problem: Problem, device: Device, schemes: Collection[str]) -> bool:
    """Return whether TMA kernels written for `schemes` can run `problem` on `device`.

    TMA kernels need 16-bit activations and do not support batch invariance.
    """
    supported = problem.scheme.name in schemes and problem.dtype is not torch.float32
    return device.tma and supported and not problem.batch_invariant


@dataclass(frozen=True)
class GemmOperands:
    """The operands of one of the two GEMMs, except the activations.

    w: weights (e, rows, K), any strides; two values per byte if packed. e is the number of local
        experts.
    scale: weight scales (e,), (e, rows) or (e, rows, groups), or None.
    zero_point: (e, rows, groups), two rows per byte if packed, or None.
    global_scale: the second scale of NVFP4, (e, 2) for gate and up, (e, 1) for a single matrix, or
        None.
    order: act order of GPTQ, (e, K): the column of the activations that each weight column
        multiplies; None for the identity.
    bias: (e, rows), or None.
    scheme: the quantization scheme of the weights.
    size_n: N, the number of output columns.
    gate_stride, up_row_offset: output column n uses weight row n * gate_stride and, in a gated
        GEMM, also row n * gate_stride + up_row_offset for up. gate_stride is 2 if gate and up rows
        alternate.
    constants: the constexpr arguments that describe the activation function.
    tiles, tile_scales: prepared w and scale, in the tiled layout of the grouped_w4 path; or None.
    """

    w: torch.Tensor
    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    global_scale: torch.Tensor | None
    order: torch.Tensor | None
    bias: torch.Tensor | None
    scheme: QuantScheme
    size_n: int
    gate_stride: int
    up_row_offset: int
    constants: dict[str, object]
    tiles: torch.Tensor | None = None
    tile_scales: torch.Tensor | None = None

    @cached_property
    def size_k(self) -> int:
        return self.w.shape[2] * (2 if self.scheme.packed else 1)

    @cached_property
    def n_major(self) -> bool:
        """Whether w is an unquantized tensor with stride 1 along N instead of along K."""
        return not self.scheme.quantized and is_n_major(self.w)

    @cached_property
    def adjacent_up(self) -> bool:
        """Whether the gate and up weights of a column are adjacent, so that one tile loads both.

        This requires an N-major w in which gate and up rows alternate.
        """
        return self.gate_stride == 2 and self.up_row_offset == 1 and self.n_major

    def arguments(
        self, tile: LaunchConfig, precision: str, a_scale: torch.Tensor | None
    ) -> dict[str, object]:
        """Return the kernel arguments that are the same for all row layouts.

        precision: `input_precision` of tl.dot for float32 operands.
        a_scale: the scales of the activations: (1,) for one scale, (..., 1) or (..., groups) for
            scales per row; None if activations are not quantized.
        """
        scheme, size_k = self.scheme, self.size_k
        group_n, group_k = scale_group(scheme, size_k)
        # The scale multiplies the partial sum of a K step, so a step must not cross a group
        # boundary. NVFP4 scales multiply the weights instead, so they do not limit block_k.
        block_k = math.gcd(tile.block_k, 0 if scheme.matrix_scales else group_k)
        bias = self.w if self.bias is None else self.bias
        quant_mode = "plain"
        if scheme.quantized:
            quant_mode = "w8a8" if scheme.quantizes_activations else "weight_only"
        tile_rows = tile.block_n * self.gate_stride
        return {
            "b_ptr": self.w,
            "bias_ptr": bias,
            "size_n": self.size_n,
            "size_k": size_k,
            "up_row_offset": self.up_row_offset,
            # The product is computed on the host, because it could overflow an int32 in the kernel.
            "up_offset": self.up_row_offset * self.w.stride(1),
            "stride_be": self.w.stride(0),
            "stride_bn": self.w.stride(1),
            "stride_bk": self.w.stride(2),
            "stride_bias": 0 if self.bias is None else self.bias.stride(0),
            **self._make_weight_scale_arguments(),
            "act_order_ptr": self.w if self.order is None else self.order,
            "stride_act_order_e": 0 if self.order is None else self.order.stride(0),
            "HAS_ACT_ORDER": self.order is not None,
            **_make_row_scale_arguments(a_scale, self.w),
            "GATE_STRIDE": self.gate_stride,
            "HAS_BIAS": self.bias is not None,
            "QUANT_MODE": quant_mode,
            "WEIGHT_FORMAT": word_format(scheme),
            "GROUP_N": group_n,
            "GROUP_K": group_k,
            # All gate rows of a tile share one scale, and so do all its up rows.
            "ONE_SCALE_PER_TILE": group_n % tile_rows == 0
            and (self.up_row_offset % tile_rows == 0 or self.up_row_offset < self.gate_stride),
            "ZERO_POINT": DEFAULT_ZERO_POINT.get(scheme.weight, 0),
            "HAS_ZERO_POINTS": self.zero_point is not None,
            "PACKED": scheme.packed,
            "EVEN_K": size_k % block_k == 0,
            "INPUT_PRECISION": precision,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": block_k,
            "GROUP_M": tile.group_m,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            **self.constants,
        }

    def _make_weight_scale_arguments(self) -> dict[str, object]:
        """Return the pointers and strides of scales and zero points.

        NVFP4 global scales are passed as zero points, because no scheme has both.
        """
        scale = self.w if self.scale is None else self.scale
        zero_point = self.zero_point
        zero_strides: tuple[int, ...] = (0, 0, 0)
        scale_strides = ((*self.scale.stride(), 0, 0) if self.scale is not None else (0, 0, 0))[:3]
        if zero_point is not None:
            zero_strides = zero_point.stride()
        elif self.global_scale is not None:
            zero_point, zero_strides = self.global_scale, (self.global_scale.stride(0), 0, 0)
        names = ("stride_bse", "stride_bsn", "stride_bsk", "stride_bze", "stride_bzn", "stride_bzk")
        return {
            "b_scale_ptr": scale,
            "zero_point_ptr": self.w if zero_point is None else zero_point,
            **dict(zip(names, (*scale_strides, *zero_strides), strict=True)),
        }


def is_n_major(w: torch.Tensor) -> bool:
    """Return whether weights (e, rows, K) are contiguous along their rows (N) instead of along K.

    An example is the transposed view of a contiguous (e, K, rows) tensor.
    """
    _, stride_n, stride_k = w.stride()
    return stride_n == 1 and stride_k != 1


def any_n_major(weights: ExpertWeights) -> bool:
    """Return whether w1 or w2 is contiguous along N."""
    return is_n_major(weights.w1) or is_n_major(weights.w2)


def _make_row_scale_arguments(
    a_scale: torch.Tensor | None, unused: torch.Tensor
) -> dict[str, object]:
    if a_scale is None or a_scale.dim() == 1:
        scale = unused if a_scale is None else a_scale
        return {"a_scale_ptr": scale, "stride_asm": 0, "stride_ask": 0}
    strides = {"stride_asm": a_scale.stride(-2), "stride_ask": a_scale.stride(-1)}
    return {"a_scale_ptr": a_scale, **strides}


def scale_group(scheme: QuantScheme, size_k: int) -> tuple[int, int]:
    """Return (rows, K elements), the part of a weight matrix that one scale covers.

    The second value is 0 if a scale covers all of K.
    """
    rows, group_k = 1, 0
    if scheme.granularity == "block":
        rows, group_k = scheme.group
    elif scheme.granularity == "group":
        (group_k,) = scheme.group
    return rows, 0 if group_k >= size_k else group_k


def word_format(scheme: QuantScheme) -> str:
    """Return the constexpr WEIGHT_FORMAT of the kernels for the weights of `scheme`.

    The result is "integer", "float8", "e2m1" (4-bit floating point), "e2m1_repacked" (e2m1 with
    reordered bits) or "nvfp4" (e2m1 with e4m3 scales).
    """
    if scheme.matrix_scales:
        return "nvfp4"
    if scheme.weight == "float4_e2m1":
        return "e2m1_repacked" if scheme.repacked else "e2m1"
    return "float8" if scheme.weight == "float8_e4m3fn" else "integer"


def weight_rejections(name: str, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
    """Return the reasons why the kernels cannot read the weights of `problem` on `machine`.

    Weights in fp8, or with fp8 scales, require a GPU that converts from fp8. Scale groups must be
    multiples of 32, because a K step has at least 32 elements and must not cross a group boundary.
    """
    rejections = []
    scheme, arch = problem.scheme, machine.arch
    fp8_weights_only = scheme.weight == "float8_e4m3fn" and not scheme.quantizes_activations
    if (fp8_weights_only or scheme.matrix_scales) and arch is not None and arch < _FLOAT8_ARCH:
        got = f"{arch[0]}.{arch[1]} for {scheme.name}"
        rejections.append(
            Rejection("arch", (name, "machine"), got, ">= 8.9 to convert from float8")
        )
    for what, size_k in (("hidden", problem.hidden), ("intermediate", problem.intermediate)):
        group_k = 0 if scheme.matrix_scales else scale_group(scheme, size_k)[1]
        if group_k % _MIN_BLOCK_K:
            need = f"a multiple of {_MIN_BLOCK_K}, or all of {what}={size_k}"
            got = f"a group of {group_k}"
            rejections.append(Rejection("quant_block", (name, "problem"), got, need))
    return tuple(rejections)


def gemm1_operands(weights: ExpertWeights, problem: Problem) -> GemmOperands:
    """Return the operands of GEMM 1: h = act(x W1^T), with K = H and I output columns."""
    spec = problem.act
    gate_stride, up_row_offset = get_gate_up_layout(spec, problem.intermediate)
    return GemmOperands(
        w=weights.w1,
        scale=weights.w1_scale,
        zero_point=weights.w1_zero_point,
        global_scale=weights.w1_global_scale,
        order=weights.w1_order,
        bias=weights.b1,
        scheme=problem.scheme,
        size_n=problem.intermediate,
        gate_stride=gate_stride,
        up_row_offset=up_row_offset,
        constants={**activation_constants(spec), "GATED": spec.gated},
        tiles=weights.w1_tiles,
        tile_scales=weights.w1_tile_scales,
    )


def gemm2_operands(weights: ExpertWeights, problem: Problem) -> GemmOperands:
    """Return the operands of GEMM 2: h W2^T, with K = I and H output columns."""
    return GemmOperands(
        w=weights.w2,
        scale=weights.w2_scale,
        zero_point=weights.w2_zero_point,
        global_scale=weights.w2_global_scale,
        order=None,
        bias=weights.b2,
        scheme=problem.scheme,
        size_n=problem.hidden,
        gate_stride=1,
        up_row_offset=0,
        constants={
            "ACTIVATION": "identity",
            "ACTIVATION_ALPHA": 0.0,
            "ACTIVATION_LIMIT": 0.0,
            "GATED": False,
        },
        tiles=weights.w2_tiles,
        tile_scales=weights.w2_tile_scales,
    )


def activation_scale_kind(scheme: QuantScheme, size_k: int) -> str:
    """Return how activations are scaled: "none", "static", "tensor", "token" or "group".

    "static" means that the scales are part of the weights. "tensor", "token" and "group" are the
    granularity of scales that are computed from the activations. A group that covers all of K
    counts as "token".
    """
    if scheme.static:
        return "static"
    granularity = scheme.activation_granularity
    if granularity == "group" and not scale_group(scheme, size_k)[1]:
        return "token"
    return granularity


def input_scales(
    tokens: StandardTokens, static: torch.Tensor | None, problem: Problem
) -> tuple[str, dict[str, object]]:
    """Return the constexpr INPUT_QUANT of GEMM 1, and the kernel arguments for the scales of x.

    INPUT_QUANT is "prequantized" if x is already quantized, with scales. Otherwise the kernel
    quantizes x, and INPUT_QUANT is the `activation_scale_kind`.

    static: the static activation scale, or None.
    """
    scale, quant = tokens.scale, activation_scale_kind(problem.scheme, problem.hidden)
    if scale is None:
        scale = tokens.x_TH if static is None else static
        return quant, {"x_scale_ptr": scale, "stride_xsm": 0, "stride_xsk": 0}
    strides = scale.stride() if scale.dim() == 2 else (0, 0)
    return "prequantized", {
        "x_scale_ptr": scale,
        "stride_xsm": strides[0],
        "stride_xsk": strides[1],
    }
