"""Random 4-bit weights in each scheme that kernels can unpack in registers."""

from typing import NamedTuple

import torch

from experts.triton.grouped_w4.bitwise_reference import tile_weights
from experts.triton.grouped_w4.layout import PackedFormat, TiledWeights, choose_packed_format
from experts.triton.operands import GemmOperands, scale_group
from modular_kernel.quant.quantized_weights import dequantize
from modular_kernel.quant.repacking import repack
from modular_kernel.spec.quantization import QuantScheme

INTEGERS = (
    "int4_w4a16_group",
    "int4_w4a16_group:group=32",
    "int4_w4a16_group:group=64,zero_points=true",
    "int4_w4a16_group:group=96,zero_points=true",
    "int4_w4a16_group:group=1024",
)
SCHEMES = ("mxfp4_w4a16", "mxfp4_w4a16:repacked=true", "nvfp4_w4a16", *INTEGERS)


class Sample(NamedTuple):
    """Packed weights of one projection, w1 or w2, and their float32 values (e, rows, depth)."""

    scheme: QuantScheme
    w: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    values: torch.Tensor

    @property
    def packed_format(self) -> PackedFormat:
        return choose_packed_format(self.scheme, 2 * self.w.shape[2], self.scale.dtype)

    @property
    def group(self) -> int:
        return scale_group(self.scheme, 2 * self.w.shape[2])[1]

    def tiled(self, rows: torch.Tensor) -> TiledWeights:
        return tile_weights(
            self.w, self.scale, rows, self.packed_format, group=self.group, zero_point=self.zero
        )

    def product(self, columns: int, step: int, up_row: int, *, gated: bool) -> GemmOperands:
        w = repack(self.w) if self.scheme.repacked else self.w
        return GemmOperands(
            w, self.scale, self.zero, None, None, None, self.scheme, columns, step, up_row,
            {"GATED": gated},
        )  # fmt: skip


def random_weights(
    quant: str,
    experts: int,
    rows: int,
    depth: int,
    *,
    low: int = 100,
    high: int = 150,
    scales: torch.dtype = torch.float16,
) -> Sample:
    """Draw random codes and scales.

    low, high: range of the exponents of mxfp4 scales. scales: dtype of the scales of integer
    weights. nvfp4 scales have both signs and include zero, but not NaN.
    """
    scheme, g = QuantScheme.parse(quant), torch.Generator().manual_seed(0)
    w = torch.randint(256, (experts, rows, depth // 2), generator=g, dtype=torch.uint8)
    shape = (experts, rows, -(-depth // scheme.group[0]))
    zero = None
    if scheme.matrix_scales:
        codes = torch.randint(256, shape, generator=g, dtype=torch.uint8)
        codes = torch.where(codes & 127 == 127, 0, codes)
        scale = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    elif scheme.weight == "float4_e2m1":
        scale = torch.randint(low, high, shape, generator=g, dtype=torch.uint8)
    else:
        scale = (torch.rand(shape, generator=g) * 0.02 + 1e-4).to(scales)
        if scheme.zero_points:
            zero = torch.randint(
                256, (experts, rows // 2, shape[2]), generator=g, dtype=torch.uint8
            )
    stored_scheme = QuantScheme.parse(scheme.name) if scheme.repacked else scheme
    values = dequantize(w, scale, zero, stored_scheme)
    if scheme.weight == "uint4":
        values = values.bfloat16().float()
    return Sample(scheme, w, scale, zero, values)
