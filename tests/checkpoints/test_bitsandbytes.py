"""bitsandbytes: nf4 and fp4 are dequantized as by its kernels, bit for bit; int8 codes are kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_mk import run_mk
from safetensors.torch import load_file, save_file
from test_checkpoint_values import output_error

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

AT = "model.layers.0.block_sparse_moe.experts"
NF4 = BLOCK_FORMATS["nf4, double"].config
# (hidden, intermediate): rows of whole blocks of 64 values, rows that share a block with the next
# row, and an odd size, with which rows also share a byte.
SIZES = ((128, 256), (96, 160), (80, 24), (81, 27))


def assert_float32(sample: Sample, loaded: Any, experts: slice = slice(None)) -> None:
    """Assert that float32 weights are exact up to the rounding of two multiplications."""
    for name, exact in (("w1", sample.w1), ("w2", sample.w2)):
        got = getattr(loaded.weights, name).double()
        torch.testing.assert_close(got, exact[experts], rtol=2.0**-21, atol=1e-8)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_loaded_values_equal_the_dequantized_codes(
    kind: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    hidden, intermediate = sizes
    sample = write(tmp_path, "mixtral", kind, hidden=hidden, intermediate=intermediate)
    loaded = mk.load_experts(tmp_path, 0, dtype="float32")
    assert str(loaded.problem_fields["quant"]) == "none"
    assert_float32(sample, loaded)
    rounded = mk.load_experts(tmp_path, 0)
    assert rounded.weights.w1.dtype is torch.bfloat16
    assert torch.equal(rounded.weights.w1, loaded.weights.w1.bfloat16())  # rounded once
    assert torch.equal(rounded.weights.w2, loaded.weights.w2.bfloat16())
    assert output_error(sample, rounded) <= BLOCK_FORMATS[kind].bound


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_rank_shares_equal_slices_of_the_whole(
    kind: str, sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if reads of a few rows begin and end within blocks and bytes."""
    hidden, intermediate = sizes
    write(tmp_path, "mixtral", kind, hidden=hidden, intermediate=intermediate)
    whole = mk.load_experts(tmp_path, 0).weights
    monkeypatch.setattr(loading, "_VALUES_PER_STEP", 1 << 10)
    for e in range(2):
        for t in range(3):
            part = mk.load_experts(tmp_path, 0, ep=(e, 2), tp=(t, 3))
            (first, last), width = part.columns, part.problem_fields["intermediate"]
            experts = slice(2 * e, 2 * e + 2)
            w1 = part.weights.w1.unflatten(1, (2, width))[:, :, : last - first]
            want = whole.w1[experts].unflatten(1, (2, intermediate))[:, :, first:last]
            assert torch.equal(w1, want)
            w2 = part.weights.w2[..., : last - first]
            assert torch.equal(w2, whole.w2[experts, :, first:last])


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_merge_accepts_a_single_matrix(kind: str, tmp_path: Path) -> None:
    write(tmp_path, "mixtral", kind)
    loaded, tensors = mk.load_experts(tmp_path, 0), load_file(tmp_path / "model.safetensors")
    format = format_of(BLOCK_FORMATS[kind].config)
    base = f"{AT}.2.w2."
    own = {n.removeprefix(base): t for n, t in tensors.items() if n.startswith(base)}
    assert torch.equal(merge(format, [own], torch.bfloat16).w, loaded.weights.w2[2])
    with pytest.raises(WeightsError, match=r"got no weight\.absmax"):
        merge(format, [{n: t for n, t in own.items() if n != "weight.absmax"}], torch.bfloat16)
    with pytest.raises(WeightsError, match="unexpected bias"):
        merge(format, [own | {"bias": torch.ones(1)}], torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"quant_config: got (nf4|fp4) \(bitsandbytes"):
        ExpertLoader(Share(4, 128, 256), format)


def test_int8_codes_are_kept(tmp_path: Path) -> None:
    """LLM.int8() stores 127 times the scale of each row."""
    sample = write(tmp_path, "mixtral", "bitsandbytes int8")
    loaded = mk.load_experts(tmp_path, 0)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded.weights.w2[1], stored[f"{AT}.1.w2.weight"])
    w1 = dequantize_weights(loaded.weights, "w1", loaded.problem(1)).double()
    torch.testing.assert_close(w1, sample.w1, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("kind", ["nf4, double", "bitsandbytes int8"])
def test_experts_without_quant_states_are_unquantized(kind: str, tmp_path: Path) -> None:
    """transformers 5 leaves experts in one parameter unquantized, without listing a module."""
    sample = write(tmp_path, "qwen3_moe", "bf16")
    config = (BLOCK_FORMATS | CHECKPOINT_FORMATS)[kind].config
    (tmp_path / "config.json").write_text(
        json.dumps(sample.config | {"quantization_config": config})
    )
    loaded = mk.load_experts(tmp_path, 0)
    assert repr(loaded).startswith("LoadedExperts(4 of 4 experts in none,")
    assert torch.equal(loaded.weights.w1.double(), sample.w1)


def test_skipped_modules_are_unquantized(tmp_path: Path) -> None:
    skipped = {"llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp"]}
    formats = {layer: format_of(None if layer == 0 else NF4) for layer in (0, 1)}
    for layer, kind in ((0, "bf16"), (1, "nf4, double")):
        write(tmp_path / str(layer), "qwen3_moe", kind, layers=(layer,))
    tensors = {}
    for layer in (0, 1):
        tensors |= load_file(tmp_path / str(layer) / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "1" / "config.json").read_text())
    config["quantization_config"] |= skipped
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    report = inspect(tmp_path)
    assert {group.layers: group.format for group in report.groups} == {
        (0,): formats[0],
        (1,): formats[1],
    }
    text = str(report)
    assert "layer 0 unquantized" in text
    assert "layer 1 in nf4 (bitsandbytes; dequantized)" in text


def test_check_and_layer_accept_an_nf4_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = write(tmp_path, "mixtral", "nf4, double")
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
    for model in (tmp_path, tmp_path / "config.json"):
        ended = run_mk(capsys, "check", *pair, "--model", str(model))
        assert ended.code == 0
        assert "MoEPrepareAndFinalizeNoEP x TorchExperts: valid" in ended.out
    ended = run_mk(capsys, "check", *pair, "--model", str(tmp_path))
    assert "experts of layer 0 in nf4 (bitsandbytes; dequantized)" in ended.out
    layer = FusedMoE.from_config(tmp_path, 0, top_k=2, experts="TorchExperts")
    layer.load(tmp_path)
    x, weights, ids = sample.inputs(24)
    y = layer(x.bfloat16(), (weights, ids)).double()
    truth = sample.expected_output(x.bfloat16().double(), weights, ids)
    assert (y - truth).norm() / truth.norm() <= 1e-2


def test_quantize_uses_the_float32_values(tmp_path: Path) -> None:
    """The values are not rounded to 16 bits before they are quantized again."""
    write(tmp_path, "mixtral", "nf4")
    quantized = mk.load_experts(tmp_path, 0, quantize="int8_w8a16_group:group=32")
    exact = mk.load_experts(tmp_path, 0, dtype="float32").weights.w2
    values = dequantize_weights(quantized.weights, "w2", quantized.problem(1))
    step = exact.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    assert bool(((values - exact).unflatten(-1, (-1, 32)).abs() <= 0.52 * step).all())
    assert "nf4 (bitsandbytes; dequantized), quantized to int8" in repr(quantized)


State = dict[str, Any]


def change_quant_state(tensors: Tensors, **change: Any) -> None:
    """Change fields in the JSON of an expert's quant_state."""
    name = f"{AT}.1.w2.weight.quant_state.bitsandbytes__nf4"
    state: State = json.loads(bytes(tensors[name].tolist()))
    text = json.dumps(state | change).encode()
    tensors[name] = torch.tensor(list(text), dtype=torch.uint8)


def replace_tensor(name: str, tensor: torch.Tensor) -> Any:
    def change(tensors: Tensors) -> None:
        tensors[f"{AT}.1.w2.{name}"] = tensor

    return change


def remove_tensor(name: str) -> Any:
    return lambda tensors: tensors.pop(f"{AT}.1.w2.{name}")


def change_state_fields(**change: Any) -> Any:
    return lambda tensors: change_quant_state(tensors, **change)


NAN = float("nan")
STATE = "weight.quant_state.bitsandbytes__nf4"
INVALID_TENSORS: dict[str, tuple[Any, type[InputError], str]] = {
    "no state": (
        remove_tensor(STATE),
        WeightsError,
        "no .*1.w2.weight.quant_state.bitsandbytes__nf4",
    ),
    "no absmax": (remove_tensor("weight.absmax"), WeightsError, "no .*1.w2.weight.absmax"),
    "codes": (
        replace_tensor("weight", torch.ones(5, 1, dtype=torch.uint8)),
        ShapeError,
        r"1.w2.weight: got",
    ),
    "code dtype": (
        replace_tensor("weight", torch.ones(5, dtype=torch.bool)),
        DtypeError,
        "got bool",
    ),
    "rows of codes": (
        replace_tensor("weight", torch.ones(128, 128, dtype=torch.uint8)),
        ShapeError,
        r"1.w2.weight: got \(128, 128\), need \(16384,\) for 32768 values",
    ),
    "absmax shape": (
        replace_tensor("weight.absmax", torch.ones(5, dtype=torch.uint8)),
        ShapeError,
        "absmax",
    ),
    "absmax of other blocks": (
        replace_tensor("weight.absmax", torch.ones(256, dtype=torch.uint8)),
        WeightsError,
        r"1.w2.weight.absmax: got 256, need 512, one for each block of 64",
    ),
    "quant_map shape": (
        replace_tensor("weight.quant_map", torch.ones(15)),
        ShapeError,
        r"need \(16,\)",
    ),
    "quant_map NaN": (
        replace_tensor("weight.quant_map", torch.full((16,), NAN)),
        WeightsError,
        "got nan",
    ),
    "nested NaN": (
        replace_tensor("weight.nested_absmax", torch.full((2,), NAN)),
        WeightsError,
        "nested_absmax",
    ),
    "few nested": (
        replace_tensor("weight.nested_absmax", torch.ones(1)),
        WeightsError,
        "nested_absmax",
    ),
    "many nested": (
        replace_tensor("weight.nested_absmax", torch.ones(3)),
        WeightsError,
        "nested_absmax",
    ),
    "no nested": (
        remove_tensor("weight.nested_absmax"),
        WeightsError,
        "absmax: got uint8 of double",
    ),
    "no nested map": (
        remove_tensor("weight.nested_quant_map"),
        WeightsError,
        "absmax: got uint8 of double",
    ),
    "no JSON": (
        replace_tensor(STATE, torch.ones(9, dtype=torch.uint8)),
        WeightsError,
        "got no JSON",
    ),
    "long": (
        replace_tensor(STATE, torch.ones(5000, dtype=torch.uint8)),
        WeightsError,
        "got 5000 bytes",
    ),
    "deep": (
        replace_tensor(STATE, torch.full((4000,), 91, dtype=torch.uint8)),
        WeightsError,
        "got no JSON",
    ),
    "no object": (
        replace_tensor(STATE, torch.tensor([49], dtype=torch.uint8)),
        WeightsError,
        "got 1, need",
    ),
    "kind": (
        change_state_fields(quant_type="fp4"),
        WeightsError,
        "fp4.*JSON object of a quant_state of nf4",
    ),
    "shape": (
        change_state_fields(shape=[256, 128]),
        WeightsError,
        r"shape \(256, 128\), need \(128, 256\)",
    ),
    "shape type": (
        change_state_fields(shape=[128.0, 256]),
        WeightsError,
        r"got shape \[128.0, 256\]",
    ),
    "block": (change_state_fields(blocksize=0), WeightsError, "blocksize 0, need one of 32"),
    "block type": (change_state_fields(blocksize="64"), WeightsError, "blocksize 64"),
    "huge block": (change_state_fields(blocksize=1 << 40), WeightsError, "blocksize"),
    "nested block": (change_state_fields(nested_blocksize=-1), WeightsError, "nested_blocksize -1"),
    "zero nested block": (
        change_state_fields(nested_blocksize=0),
        WeightsError,
        "absmax: got uint8 of double",
    ),
    "offset": (change_state_fields(nested_offset=float("inf")), WeightsError, "nested_offset inf"),
    "offset type": (change_state_fields(nested_offset="1"), WeightsError, "nested_offset 1"),
    "more": (
        replace_tensor("weight.more", torch.ones(1)),
        WeightsError,
        "1.w2.weight.more, need 4 experts",
    ),
}


@pytest.mark.parametrize("case", INVALID_TENSORS)
def test_invalid_tensors_are_refused(case: str, tmp_path: Path) -> None:
    """The error names the file, the tensor, the value found and the value needed."""
    change, kind, message = INVALID_TENSORS[case]
    write(tmp_path, "mixtral", "nf4, double", change=change)
    with pytest.raises(kind, match=message) as caught:
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
    assert NF4 is not None
    with pytest.raises(ConfigurationError, match=message):
        format_of(NF4 | change)
