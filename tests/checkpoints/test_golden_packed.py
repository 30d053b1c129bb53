"""Golden files written by compressed-tensors, ModelOpt and GPTQModel decode to the values that
these libraries compute.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modular_kernel import ExpertWeights, Problem
from modular_kernel.checkpoints.formats import format_of
from modular_kernel.checkpoints.fusing import merge
from modular_kernel.quant import nvfp4
from modular_kernel.quant.quantized_weights import dequantize_weights, weight_specs
from modular_kernel.quant.scale_tiles import unpack_pairs
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS

GOLDEN = load_file(Path(__file__).parents[1] / "helpers" / "golden" / "packed.safetensors")
_GPTQ = CHECKPOINT_FORMATS["gptq v2"].config | {"group_size": 32, "desc_act": True}  # type: ignore[operator]
# The quantization_config of a checkpoint with tensors of each kind. Groups have 32 columns.
CONFIGS: dict[str, Any] = {
    "compressed_nvfp4": CHECKPOINT_FORMATS["compressed nvfp4"].config,
    "modelopt_nvfp4": CHECKPOINT_FORMATS["modelopt nvfp4"].config,
    "compressed_int4": CHECKPOINT_FORMATS["compressed int4"].config,
    "compressed_int4_zeros": CHECKPOINT_FORMATS["compressed int4, zero points"].config,
    "gptq_order": _GPTQ | {"sym": True},
    "gptq_order_zeros": _GPTQ,
    "gptq_order_int8": _GPTQ | {"bits": 8},
}
NVFP4_KINDS = ("compressed_nvfp4", "modelopt_nvfp4")


def select_tensors(kind: str) -> dict[str, torch.Tensor]:
    """Return the golden tensors of a kind by their names in the format."""
    prefix = f"{kind}."
    return {n.removeprefix(prefix): t for n, t in GOLDEN.items() if n.startswith(prefix)}


def test_every_golden_tensor_is_tested() -> None:
    assert {name.split(".")[0] for name in GOLDEN} == set(CONFIGS)


@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_weights_equal_the_library(kind: str) -> None:
    """The values are equal bit for bit in the dtype that the library returns. The golden matrix is
    loaded as w2 of one expert.
    """
    tensors = select_tensors(kind)
    want = tensors.pop("unpacked")
    tensors.pop("original", None)
    format = format_of(CONFIGS[kind])
    if format.scheme.weight == "uint4":  # groups of 32 in the file
        format = format.with_scheme(replace(format.scheme, group=(32,)))
    merged = merge(format, [tensors], torch.bfloat16)
    problem = Problem(1, 24, 96, 1, 1, quant=str(format.scheme), activation="relu2")
    fields = {"w2": merged.w, "w2_scale": merged.scale, "w2_zero_point": merged.zero_point}
    fields |= {"w2_global_scale": merged.global_scale}
    w2_tensors = {name: tensor[None] for name, tensor in fields.items() if tensor is not None}
    weights = ExpertWeights(w1=w2_tensors["w2"], **w2_tensors)
    for name, spec in weight_specs(problem).items():
        assert name.startswith("w1") or w2_tensors[name].shape == spec.shape
    got = dequantize_weights(weights, "w2", problem)[0]
    if merged.order is not None:
        assert merged.order.tolist() != list(range(96))
        got = torch.empty_like(got).index_copy_(1, merged.order.long(), got)
    compared_dtype = torch.float16 if "gptq" in kind else torch.bfloat16
    assert torch.equal(got.to(compared_dtype), want.to(compared_dtype))
    if compared_dtype is torch.bfloat16 and want.dtype is torch.float32:
        torch.testing.assert_close(got, want, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("kind", NVFP4_KINDS)
def test_nvfp4_quantizer_equals_the_library(kind: str) -> None:
    tensors = select_tensors(kind)
    global_scale = tensors.get("weight_scale_2")
    inverse = tensors["weight_global_scale"] if global_scale is None else 1 / global_scale
    codes, scale = nvfp4.quantize(tensors["original"], inverse)
    packed = tensors["weight_packed" if global_scale is None else "weight"]
    assert torch.equal(codes, unpack_pairs(packed, 1))
    assert torch.equal(scale.view(torch.uint8), tensors["weight_scale"].view(torch.uint8))
