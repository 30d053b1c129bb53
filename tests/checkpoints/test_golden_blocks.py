"""Golden files written by bitsandbytes, gguf and torchao decode to the values that these libraries
compute.
"""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from modular_kernel.checkpoints import format_of, merge
from modular_kernel.checkpoints.ggml_blocks import dequantize_blocks, repack_blocks
from modular_kernel.checkpoints.torchao import check_metadata
from modular_kernel.models.gguf_config import FLOAT_TYPES, SUPPORTED_TYPES
from modular_kernel.quant.quantized_weights import dequantize
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.testing.checkpoints.torchao import TORCHAO_FORMATS

FOLDER = Path(__file__).parents[1] / "helpers" / "golden"
BITSANDBYTES_TENSORS = load_file(FOLDER / "bitsandbytes.safetensors")
GGUF_TENSORS = load_file(FOLDER / "gguf.safetensors")
# The kind in TORCHAO_FORMATS for each prefix of tensors in torchao.safetensors.
TORCHAO_KINDS = {
    "int4": "torchao int4",
    "int8": "torchao int8",
    "int8_groups": "torchao int8, groups",
    "int8_inputs": "torchao int8, inputs",
    "fp8": "torchao fp8",
    "fp8_tensor": "torchao fp8, tensor",
    "fp8_inputs": "torchao fp8, inputs",
    "nvfp4": "torchao nvfp4",
    "nvfp4_blocks": "torchao nvfp4, blocks",
    "mxfp8": "torchao mxfp8",
    "mxfp4": "torchao mxfp4",
}


@pytest.mark.parametrize("kind", ["nf4", "nf4_double", "fp4", "fp4_double"])
def test_bitsandbytes_values_equal_the_library(kind: str) -> None:
    """The golden matrices have rows of 72 values, in blocks of 64. Those with double quantization
    store codes in bf16.
    """
    tensors = {
        name.partition("/")[2]: tensor
        for name, tensor in BITSANDBYTES_TENSORS.items()
        if name.partition("/")[0] == kind
    }
    want = tensors.pop("unpacked")
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    format = format_of(config | {"bnb_4bit_quant_type": kind[:3]})
    assert torch.equal(merge(format, [tensors], torch.float32).w, want)
    assert (tensors["weight"].dtype is torch.bfloat16) == ("double" in kind)


def test_golden_file_has_every_quantized_gguf_type() -> None:
    assert {name.partition("/")[0] for name in GGUF_TENSORS} == {*SUPPORTED_TYPES} - {*FLOAT_TYPES}


@pytest.mark.parametrize("kind", sorted({*SUPPORTED_TYPES} - {*FLOAT_TYPES}))
def test_gguf_values_equal_the_library(kind: str) -> None:
    blocks, want = GGUF_TENSORS[f"{kind}/blocks"], GGUF_TENSORS[f"{kind}/unpacked"]
    assert torch.equal(dequantize_blocks(kind, blocks), want)


@pytest.mark.parametrize("kind", TORCHAO_KINDS)
def test_torchao_values_equal_the_library(kind: str) -> None:
    with safe_open(FOLDER / "torchao.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.startswith(f"{kind}.")]  # noqa: SIM118
        tensors = {name.partition(".")[2]: file.get_tensor(name) for name in names}
        metadata = file.metadata()
    want, format = (
        tensors.pop("unpacked"),
        format_of(TORCHAO_FORMATS[TORCHAO_KINDS[kind]].config),
    )
    assert format.torchao is not None
    check_metadata("file", metadata, f"{kind}._weight_qdata", (24, 128), format.torchao)
    merged = merge(format, [tensors], torch.float32)
    if format.dequantized:
        assert torch.equal(merged.w, want)
        return
    assert merged.scale is not None
    got = dequantize(merged.w[None], merged.scale[None], None, format.scheme)[0]
    # The library multiplies three factors in another order, so rounding differs.
    if merged.global_scale is not None:
        torch.testing.assert_close(got * merged.global_scale, want, rtol=2.0**-22, atol=0)
        return
    assert torch.equal(got, want)


@pytest.mark.parametrize(("kind", "quant"), [
    ("Q8_0", "int8_w8a16_group:group=32"),
    ("Q4_0", "int8_w8a16_group:group=32"),
    ("Q5_0", "int8_w8a16_group:group=32"),
    ("IQ4_NL", "int8_w8a16_group:group=32"),
    ("IQ4_XS", "int8_w8a16_group:group=32"),
    ("IQ3_S", "int8_w8a16_group:group=32"),
    ("IQ3_XXS", "int8_w8a16_group:group=32"),
    ("IQ2_XXS", "int8_w8a16_group:group=32"),
    ("IQ1_S", "int8_w8a16_group:group=32"),
    ("TQ1_0", "int8_w8a16_group:group=32"),
    ("TQ2_0", "int8_w8a16_group:group=32"),
    ("Q4_0", "int4_w4a16_group:group=32"),
    ("MXFP4", "mxfp4_w4a16"),
])  # fmt: skip
def test_repacked_gguf_blocks_keep_their_values(kind: str, quant: str) -> None:
    scheme = QuantScheme.parse(quant)
    w, scale = repack_blocks(kind, scheme, GGUF_TENSORS[f"{kind}/blocks"])
    got = dequantize(w[None], scale[None], None, scheme)[0]
    assert torch.equal(got, GGUF_TENSORS[f"{kind}/unpacked"])
