"""bitsandbytes checkpoints: nf4 and fp4 weights are dequantized while loading, and int8 codes are
kept.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_mk import run_mk
from safetensors.torch import load_file, save_file
from test_checkpoint_values import compute_output_error

import modular_kernel as mk
from modular_kernel.checkpoints import format_of, loading, merge
from modular_kernel.checkpoints.inspection import inspect
from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    InputError,
    ShapeError,
    WeightsError,
)
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.rank_share import Share
from modular_kernel.layers.weight_loading import ExpertLoader
from modular_kernel.quant.quantized_weights import dequantize_weights
from modular_kernel.testing.checkpoints.published_formats import BLOCK_FORMATS, CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import Sample, Tensors, write

EXPERTS = "model.layers.0.block_sparse_moe.experts"
QUANT_STATE = "weight.quant_state.bitsandbytes__nf4"
# nf4 codes whose absmax values are quantized, too
DOUBLE_QUANTIZED = BLOCK_FORMATS["nf4, double"].config
# Pairs (hidden, intermediate). A block has 64 values, and a byte has two. With the first pair, each
# row consists of whole blocks. With the second and third pairs, a block can contain the end of a
# row and the beginning of the next row. With the last pair, a byte can, too.
SIZES = ((128, 256), (96, 160), (80, 24), (81, 27))


def assert_float32_weights(sample: Sample, loaded: Any, experts: slice = slice(None)) -> None:
    """Assert that float32 weights are exact up to the rounding of two multiplications."""
    for name, exact in (("w1", sample.w1), ("w2", sample.w2)):
        got = getattr(loaded.weights, name).double()
        torch.testing.assert_close(got, exact[experts], rtol=2.0**-21, atol=1e-8)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("format_name", BLOCK_FORMATS)
def test_loaded_values_equal_the_dequantized_codes(
    format_name: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    hidden, intermediate = sizes
    sample = write(tmp_path, "mixtral", format_name, hidden=hidden, intermediate=intermediate)
    loaded = mk.load_experts(tmp_path, 0, dtype="float32")
    assert str(loaded.problem_fields["quant"]) == "none"
    assert_float32_weights(sample, loaded)
    rounded = mk.load_experts(tmp_path, 0)
    assert rounded.weights.w1.dtype is torch.bfloat16
    assert torch.equal(rounded.weights.w1, loaded.weights.w1.bfloat16())  # rounded once
    assert torch.equal(rounded.weights.w2, loaded.weights.w2.bfloat16())
    assert compute_output_error(sample, rounded) <= BLOCK_FORMATS[format_name].bound


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("format_name", BLOCK_FORMATS)
def test_rank_shares_equal_slices_of_all_weights(
    format_name: str, sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lower limit of values per read, reads begin and end within blocks and bytes."""
    hidden, intermediate = sizes
    write(tmp_path, "mixtral", format_name, hidden=hidden, intermediate=intermediate)
    all_weights = mk.load_experts(tmp_path, 0).weights
    monkeypatch.setattr(loading, "_VALUES_PER_STEP", 1 << 10)
    for ep_rank in range(2):
        for tp_rank in range(3):
            share = mk.load_experts(tmp_path, 0, ep=(ep_rank, 2), tp=(tp_rank, 3))
            (first, last), width = share.columns, share.problem_fields["intermediate"]
            experts = slice(2 * ep_rank, 2 * ep_rank + 2)
            w1 = share.weights.w1.unflatten(1, (2, width))[:, :, : last - first]
            want = all_weights.w1[experts].unflatten(1, (2, intermediate))[:, :, first:last]
            assert torch.equal(w1, want)
            w2 = share.weights.w2[..., : last - first]
            assert torch.equal(w2, all_weights.w2[experts, :, first:last])


@pytest.mark.parametrize("format_name", BLOCK_FORMATS)
def test_merge_accepts_a_single_matrix(format_name: str, tmp_path: Path) -> None:
    write(tmp_path, "mixtral", format_name)
    loaded, tensors = mk.load_experts(tmp_path, 0), load_file(tmp_path / "model.safetensors")
    format = format_of(BLOCK_FORMATS[format_name].config)
    base = f"{EXPERTS}.2.w2."
    matrix = {n.removeprefix(base): t for n, t in tensors.items() if n.startswith(base)}
    assert torch.equal(merge(format, [matrix], torch.bfloat16).w, loaded.weights.w2[2])
    with pytest.raises(WeightsError, match=r"got no weight\.absmax"):
        merge(format, [{n: t for n, t in matrix.items() if n != "weight.absmax"}], torch.bfloat16)
    with pytest.raises(WeightsError, match="unexpected bias"):
        merge(format, [matrix | {"bias": torch.ones(1)}], torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"quant_config: got (nf4|fp4) \(bitsandbytes"):
        ExpertLoader(Share(4, 128, 256), format)


def test_int8_codes_are_kept(tmp_path: Path) -> None:
    """bitsandbytes stores `SCB`, which is 127 times the scale of a row."""
    sample = write(tmp_path, "mixtral", "bitsandbytes int8")
    loaded = mk.load_experts(tmp_path, 0)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded.weights.w2[1], stored[f"{EXPERTS}.1.w2.weight"])
    w1 = dequantize_weights(loaded.weights, "w1", loaded.problem(1)).double()
    torch.testing.assert_close(w1, sample.w1, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("format_name", ["nf4, double", "bitsandbytes int8"])
def test_experts_without_quant_states_are_unquantized(format_name: str, tmp_path: Path) -> None:
    """transformers 5 does not quantize experts that it stores in a single parameter, although the
    config.json that it writes does not list these experts as skipped.
    """
    sample = write(tmp_path, "qwen3_moe", "bf16")
    config = (BLOCK_FORMATS | CHECKPOINT_FORMATS)[format_name].config
    (tmp_path / "config.json").write_text(
        json.dumps(sample.config | {"quantization_config": config})
    )
    loaded = mk.load_experts(tmp_path, 0)
    assert repr(loaded).startswith("LoadedExperts(4 of 4 experts in none,")
    assert torch.equal(loaded.weights.w1.double(), sample.w1)


def test_skipped_modules_are_unquantized(tmp_path: Path) -> None:
    skip_option = {"llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp"]}
    formats = {layer: format_of(None if layer == 0 else DOUBLE_QUANTIZED) for layer in (0, 1)}
    for layer, format_name in ((0, "bf16"), (1, "nf4, double")):
        write(tmp_path / str(layer), "qwen3_moe", format_name, layers=(layer,))
    tensors = {}
    for layer in (0, 1):
        tensors |= load_file(tmp_path / str(layer) / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "1" / "config.json").read_text())
    config["quantization_config"] |= skip_option
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    report = inspect(tmp_path)
    assert {group.layers: group.format for group in report.groups} == {
        (0,): formats[0],
        (1,): formats[1],
    }
    assert "layer 0 unquantized" in str(report)
    assert "layer 1 in nf4 (bitsandbytes; dequantized)" in str(report)


def test_check_and_layer_accept_an_nf4_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = write(tmp_path, "mixtral", "nf4, double")
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
    for model in (tmp_path, tmp_path / "config.json"):
        result = run_mk(capsys, "check", *pair, "--model", str(model))
        assert result.code == 0
        assert "MoEPrepareAndFinalizeNoEP x TorchExperts: valid" in result.out
    result = run_mk(capsys, "check", *pair, "--model", str(tmp_path))
    assert "experts of layer 0 in nf4 (bitsandbytes; dequantized)" in result.out
    layer = FusedMoE.from_config(tmp_path, 0, top_k=2, experts="TorchExperts")
    layer.load(tmp_path)
    x, weights, ids = sample.inputs(24)
    y = layer(x.bfloat16(), (weights, ids)).double()
    expected = sample.expected_output(x.bfloat16().double(), weights, ids)
    assert (y - expected).norm() / expected.norm() <= 1e-2


def test_quantize_uses_the_float32_values(tmp_path: Path) -> None:
    """The values are not rounded to 16 bits before they are quantized again."""
    write(tmp_path, "mixtral", "nf4")
    quantized = mk.load_experts(tmp_path, 0, quantize="int8_w8a16_group:group=32")
    exact = mk.load_experts(tmp_path, 0, dtype="float32").weights.w2
    values = dequantize_weights(quantized.weights, "w2", quantized.problem(1))
    quantization_step = exact.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    assert bool(((values - exact).unflatten(-1, (-1, 32)).abs() <= 0.52 * quantization_step).all())
    assert "nf4 (bitsandbytes; dequantized), quantized to int8" in repr(quantized)


def change_quant_state(tensors: Tensors, **change: Any) -> None:
    """Change fields in the quant_state of an expert, a tensor with the bytes of a JSON object."""
    name = f"{EXPERTS}.1.w2.{QUANT_STATE}"
    fields: dict[str, Any] = json.loads(bytes(tensors[name].tolist()))
    json_bytes = json.dumps(fields | change).encode()
    tensors[name] = torch.tensor(list(json_bytes), dtype=torch.uint8)


def replace_tensor(name: str, tensor: torch.Tensor) -> Any:
    def change(tensors: Tensors) -> None:
        tensors[f"{EXPERTS}.1.w2.{name}"] = tensor

    return change


def remove_tensor(name: str) -> Any:
    return lambda tensors: tensors.pop(f"{EXPERTS}.1.w2.{name}")


def change_state_fields(**change: Any) -> Any:
    return lambda tensors: change_quant_state(tensors, **change)


NAN = float("nan")
INVALID_TENSORS: dict[str, tuple[Any, type[InputError], str]] = {
    "no quant_state": (
        remove_tensor(QUANT_STATE),
        WeightsError,
        "no .*1.w2.weight.quant_state.bitsandbytes__nf4",
    ),
    "no absmax": (remove_tensor("weight.absmax"), WeightsError, "no .*1.w2.weight.absmax"),
    "too few codes": (
        replace_tensor("weight", torch.ones(5, 1, dtype=torch.uint8)),
        ShapeError,
        r"1.w2.weight: got",
    ),
    "codes of another dtype": (
        replace_tensor("weight", torch.ones(5, dtype=torch.bool)),
        DtypeError,
        "got bool",
    ),
    "codes that are not flattened": (
        replace_tensor("weight", torch.ones(128, 128, dtype=torch.uint8)),
        ShapeError,
        r"1.w2.weight: got \(128, 128\), need \(16384,\) for 32768 values",
    ),
    "an absmax with a wrong shape": (
        replace_tensor("weight.absmax", torch.ones(5, dtype=torch.uint8)),
        ShapeError,
        "absmax",
    ),
    "absmax of larger blocks": (
        replace_tensor("weight.absmax", torch.ones(256, dtype=torch.uint8)),
        WeightsError,
        r"1.w2.weight.absmax: got 256, need 512, one for each block of 64",
    ),
    "a quant_map of 15 values": (
        replace_tensor("weight.quant_map", torch.ones(15)),
        ShapeError,
        r"need \(16,\)",
    ),
    "a quant_map of NaN": (
        replace_tensor("weight.quant_map", torch.full((16,), NAN)),
        WeightsError,
        "got nan",
    ),
    "nested_absmax of NaN": (
        replace_tensor("weight.nested_absmax", torch.full((2,), NAN)),
        WeightsError,
        "nested_absmax",
    ),
    "too few nested_absmax values": (
        replace_tensor("weight.nested_absmax", torch.ones(1)),
        WeightsError,
        "nested_absmax",
    ),
    "too many nested_absmax values": (
        replace_tensor("weight.nested_absmax", torch.ones(3)),
        WeightsError,
        "nested_absmax",
    ),
    "no nested_absmax": (
        remove_tensor("weight.nested_absmax"),
        WeightsError,
        "absmax: got uint8 of double quantization",
    ),
    "no nested_quant_map": (
        remove_tensor("weight.nested_quant_map"),
        WeightsError,
        "absmax: got uint8 of double quantization",
    ),
    "a quant_state that is no JSON": (
        replace_tensor(QUANT_STATE, torch.ones(9, dtype=torch.uint8)),
        WeightsError,
        "got no JSON",
    ),
    "a long quant_state": (
        replace_tensor(QUANT_STATE, torch.ones(5000, dtype=torch.uint8)),
        WeightsError,
        "got 5000 bytes",
    ),
    "a deeply nested quant_state": (
        replace_tensor(QUANT_STATE, torch.full((4000,), 91, dtype=torch.uint8)),
        WeightsError,
        "got no JSON",
    ),
    "a quant_state that is no JSON object": (
        replace_tensor(QUANT_STATE, torch.tensor([49], dtype=torch.uint8)),
        WeightsError,
        "got 1, need",
    ),
    "a quant_state of another quant_type": (
        change_state_fields(quant_type="fp4"),
        WeightsError,
        "fp4.*JSON object of a quant_state of nf4",
    ),
    "a quant_state with another shape": (
        change_state_fields(shape=[256, 128]),
        WeightsError,
        r"shape \(256, 128\), need \(128, 256\)",
    ),
    "a shape that is not integer": (
        change_state_fields(shape=[128.0, 256]),
        WeightsError,
        r"got shape \[128.0, 256\]",
    ),
    "a blocksize of 0": (
        change_state_fields(blocksize=0),
        WeightsError,
        "blocksize 0, need one of 32",
    ),
    "a blocksize that is a string": (
        change_state_fields(blocksize="64"),
        WeightsError,
        "blocksize 64",
    ),
    "a huge blocksize": (change_state_fields(blocksize=1 << 40), WeightsError, "blocksize"),
    "a negative nested_blocksize": (
        change_state_fields(nested_blocksize=-1),
        WeightsError,
        "nested_blocksize -1",
    ),
    "a nested_blocksize of 0": (
        change_state_fields(nested_blocksize=0),
        WeightsError,
        "absmax: got uint8 of double quantization",
    ),
    "an infinite nested_offset": (
        change_state_fields(nested_offset=float("inf")),
        WeightsError,
        "nested_offset inf",
    ),
    "a nested_offset that is a string": (
        change_state_fields(nested_offset="1"),
        WeightsError,
        "nested_offset 1",
    ),
    "an additional tensor": (
        replace_tensor("weight.more", torch.ones(1)),
        WeightsError,
        "1.w2.weight.more, need 4 experts",
    ),
}


@pytest.mark.parametrize("case", INVALID_TENSORS)
def test_invalid_tensors_are_refused(case: str, tmp_path: Path) -> None:
    """The error names the file, the tensor, its value and what is needed instead."""
    change, error_type, message = INVALID_TENSORS[case]
    write(tmp_path, "mixtral", "nf4, double", change=change)
    with pytest.raises(error_type, match=message) as caught:
        mk.load_experts(tmp_path, 0)
    assert "block_sparse_moe" in str(caught.value)
    assert str(tmp_path) in str(caught.value) or "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(("name", "tensor", "message"), [
    ("SCB", torch.full((128,), float("nan")), "SCB: got nan"),
    ("SCB", torch.full((128,), -1.0), "SCB: got -1.0"),
    ("weight_format", torch.tensor(2, dtype=torch.uint8), "weight_format: got 2, need 0"),
])  # fmt: skip
def test_invalid_int8_tensors_are_refused(
    name: str, tensor: torch.Tensor, message: str, tmp_path: Path
) -> None:
    write(tmp_path, "mixtral", "bitsandbytes int8", change=replace_tensor(name, tensor))
    with pytest.raises(WeightsError, match=message):
        mk.load_experts(tmp_path, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load_in_8bit": True}, "load_in_4bit and load_in_8bit, need one of them true"),
        (
            {"load_in_4bit": False, "_load_in_4bit": False},
            "neither load_in_4bit nor load_in_8bit",
        ),
        ({"load_in_4bit": "yes"}, "load_in_4bit = 'yes'"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type = 'int4'"),
        ({"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight = True"),
        ({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules = 'lm_head'"),
        ({"bnb_4bit_rotation": True}, "bnb_4bit_rotation = True"),
    ],
)
def test_unsupported_options_are_refused(change: dict[str, Any], message: str) -> None:
    assert DOUBLE_QUANTIZED is not None
    with pytest.raises(ConfigurationError, match=message):
        format_of(DOUBLE_QUANTIZED | change)
