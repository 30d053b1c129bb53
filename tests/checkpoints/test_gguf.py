"""GGUF files: packed or dequantized weights, sizes from metadata, and invalid files."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_mk import run_mk

import modular_kernel as mk
from modular_kernel.catalog import this_machine
from modular_kernel.checkpoints import loading, merge
from modular_kernel.checkpoints.inspection import inspect
from modular_kernel.checkpoints.loading import LoadedExperts
from modular_kernel.errors import ConfigurationError, InputError, ShapeError, WeightsError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.rank_share import Share
from modular_kernel.layers.weight_loading import ExpertLoader
from modular_kernel.models.gguf_header import read_header
from modular_kernel.quant.quantized_weights import dequantize_weights
from modular_kernel.testing.checkpoints.gguf import ARCHITECTURES, file_bytes, write_gguf
from modular_kernel.testing.checkpoints.samples import Sample
from modular_kernel.text import format_layers

PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
INT4, INT8 = "int4_w4a16_group:group=32", "int8_w8a16_group:group=32"
# The scheme in which experts with these GGUF types of (gate, up, down) are loaded.
SCHEME_BY_TYPES: dict[tuple[str, str, str], str] = {
    ("Q4_0", "Q4_0", "Q4_0"): INT4,
    ("Q8_0", "Q8_0", "Q8_0"): INT8,
    ("Q4_0", "Q4_0", "Q8_0"): INT8,
    ("MXFP4", "MXFP4", "MXFP4"): "mxfp4_w4a16",
    ("Q4_K", "Q4_K", "Q6_K"): "none",
    ("Q6_K", "Q6_K", "Q6_K"): "none",
    ("Q8_0", "Q8_0", "Q6_K"): "none",
    ("Q4_K", "Q4_K", "Q4_0"): "none",
    ("Q5_0", "Q5_0", "Q5_0"): INT8,
    ("IQ4_NL", "IQ4_NL", "IQ4_NL"): INT8,
    ("IQ4_XS", "IQ4_XS", "IQ4_XS"): INT8,
    ("IQ4_XS", "IQ4_XS", "Q5_0"): INT8,
    ("Q4_0", "IQ4_NL", "Q8_0"): INT8,
    ("IQ1_S", "IQ1_S", "IQ1_S"): INT8,
    ("IQ2_XXS", "IQ2_XXS", "IQ3_XXS"): INT8,
    ("IQ3_S", "IQ3_S", "IQ4_XS"): INT8,
    ("IQ3_XXS", "IQ3_S", "Q8_0"): INT8,
    ("TQ1_0", "TQ1_0", "TQ2_0"): INT8,
    ("TQ2_0", "TQ2_0", "Q4_0"): INT8,
    ("IQ1_M", "IQ1_M", "IQ2_XS"): "none",
    ("IQ2_S", "IQ2_S", "IQ3_S"): "none",
    ("IQ2_XS", "IQ2_XXS", "Q2_K"): "none",
    ("Q4_1", "Q4_1", "Q5_1"): "none",
    ("Q5_K", "Q5_K", "Q6_K"): "none",
    ("Q2_K", "Q2_K", "Q3_K"): "none",
    ("Q3_K", "Q3_K", "Q5_K"): "none",
    ("Q5_1", "Q4_0", "IQ4_XS"): "none",
    ("Q6_K", "MXFP4", "Q8_0"): "none",
    ("F16", "F32", "Q8_0"): "none",
    ("F32", "F32", "F32"): "none",
    ("F16", "F16", "F16"): "none",
    ("BF16", "BF16", "BF16"): "none",
}


TYPES_WITH_OFFSETS = {"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"}


def dequantize_matrix(loaded: LoadedExperts, name: str) -> torch.Tensor:
    if not loaded.problem(1).scheme.quantized:
        return getattr(loaded.weights, name).double()
    return dequantize_weights(loaded.weights, name, loaded.problem(1)).double()


def compute_output_error(sample: Sample, loaded: LoadedExperts, experts: str = PAIR[1]) -> float:
    x, weights, ids = sample.inputs(24)
    machine = this_machine(device="cpu")
    kernel = mk.make_kernel(PAIR[0], experts, loaded.problem(24), machine=machine)
    y = kernel(x.to(loaded.problem(1).dtype), loaded.weights, mk.Routing(weights, ids)).double()
    expected = sample.expected_output(x.to(loaded.problem(1).dtype).double(), weights, ids)
    return float((y - expected).norm() / expected.norm())


@pytest.mark.parametrize("types", SCHEME_BY_TYPES, ids=" ".join)
def test_loaded_values_equal_the_blocks(types: tuple[str, str, str], tmp_path: Path) -> None:
    sample = write_gguf(tmp_path / "m.gguf", types=types)
    loaded = mk.load_experts(tmp_path / "m.gguf", 0, dtype="float32")
    assert str(loaded.problem_fields["quant"]) == SCHEME_BY_TYPES[types]
    for name, exact in (("w1", sample.w1), ("w2", sample.w2)):
        # The product of code and scale is exact in float32. Types that add an offset round the sum.
        rtol = 2.0**-23 if {*types} & TYPES_WITH_OFFSETS else 0
        torch.testing.assert_close(
            dequantize_matrix(loaded, name), exact, rtol=rtol, atol=2e-8 * (rtol > 0)
        )
    rounded = mk.load_experts(tmp_path / "m.gguf", 0, dtype="bfloat16")
    if SCHEME_BY_TYPES[types] == "none":
        assert torch.equal(rounded.weights.w1, loaded.weights.w1.bfloat16())  # rounded once
    else:
        assert torch.equal(rounded.weights.w1, loaded.weights.w1)
        assert torch.equal(dequantize_matrix(rounded, "w1"), dequantize_matrix(loaded, "w1"))
    if "int" in SCHEME_BY_TYPES[types]:
        has_product_scales = any(name.startswith("IQ") and name != "IQ4_NL" for name in types)
        scale_dtype = torch.float32 if has_product_scales else torch.float16
        assert rounded.weights.w1_scale.dtype is scale_dtype
    assert compute_output_error(sample, rounded) <= 1e-2
    assert compute_output_error(sample, loaded) <= 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_metadata_determines_sizes_and_router(architecture: str, tmp_path: Path) -> None:
    types = ("MXFP4",) * 3 if architecture == "gpt-oss" else ("Q8_0",) * 3
    sample = write_gguf(
        tmp_path / "m.gguf", architecture, types, experts=8, hidden=64, intermediate=96, top_k=3
    )
    loaded = mk.load_experts(tmp_path / "m.gguf", 0)
    fields = loaded.problem_fields
    assert [fields[name] for name in ("experts", "hidden", "intermediate", "top_k")] == [
        8,
        64,
        96,
        3,
    ]
    assert fields["dtype"] is torch.bfloat16
    router = loaded.router
    assert router is not None
    assert router.score == ("sigmoid" if architecture in ("deepseek2", "glm4moe") else "softmax")
    assert router.renormalize == (architecture != "gpt-oss")
    assert router.groups == (2 if architecture == "deepseek2" else 1)
    assert compute_output_error(sample, loaded) <= 1e-2
    assert inspect(tmp_path / "m.gguf").layers == (0,)


@pytest.mark.parametrize(
    "types",
    [("Q4_0",) * 3, ("Q8_0",) * 3, ("MXFP4",) * 3, ("Q5_0",) * 3, ("IQ4_XS",) * 3],
    ids=" ".join,
)
def test_kernels_accept_negative_scales(types: tuple[str, str, str], tmp_path: Path) -> None:
    """Q4_0 of llama.cpp has negative scales. Other quantizers write only positive scales."""
    sample = write_gguf(tmp_path / "m.gguf", types=types)
    loaded = mk.load_experts(tmp_path / "m.gguf", 0)
    scale = loaded.weights.w1_scale
    assert scale is not None
    assert types[0] == "MXFP4" or bool((scale < 0).any())
    assert compute_output_error(sample, loaded, "TritonExperts") <= 1e-2


def test_multi_token_prediction_layers_are_reported_separately(tmp_path: Path) -> None:
    path, layers = tmp_path / "m.gguf", {0: ("Q4_0",) * 3, 1: ("Q8_0",) * 3}
    write_gguf(path, "glm4moe", layers, metadata={"glm4moe.block_count": 2})
    report = inspect(path)
    assert report.layers == (0,)
    assert report.mtp_layers == ((1, f"in {INT8} (gguf)"),)
    assert str(mk.load_experts(path, 1).problem_fields["quant"]) == INT8


def test_softmax_routers_of_deepseek2_equal_deepseek_v2(tmp_path: Path) -> None:
    changes = {"expert_gating_func": 1, "expert_weights_norm": False}
    metadata = {f"deepseek2.{key}": value for key, value in changes.items()}
    write_gguf(tmp_path / "m.gguf", "deepseek2", ("Q8_0",) * 3, metadata=metadata)
    router = mk.load_experts(tmp_path / "m.gguf", 0).router
    assert router is not None
    assert (router.score, router.group_score, router.groups) == ("softmax", "max", 2)
    assert not router.renormalize
    assert not router.selection_bias


@pytest.mark.parametrize(
    "types",
    [types for types in SCHEME_BY_TYPES if set(types) != {"F32"}],
    ids=" ".join,
)
def test_rank_shares_equal_slices_of_all_weights(
    types: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lower limit of values per read, few rows are read at a time. The shares of TP ranks
    cut blocks of 256 values.
    """
    write_gguf(tmp_path / "m.gguf", types=types)
    all_experts = mk.load_experts(tmp_path / "m.gguf", 0, dtype="float32")
    monkeypatch.setattr(loading, "_VALUES_PER_STEP", 1 << 12)
    all_values = {name: dequantize_matrix(all_experts, name) for name in ("w1", "w2")}
    down = read_header(tmp_path / "m.gguf").tensors["blk.0.ffn_down_exps.weight"]
    for ep_rank in range(2):
        for tp_rank in range(3):
            share = mk.load_experts(
                tmp_path / "m.gguf", 0, dtype="float32", ep=(ep_rank, 2), tp=(tp_rank, 3)
            )
            (first, last), width = share.columns, share.problem_fields["intermediate"]
            experts = slice(2 * ep_rank, 2 * ep_rank + 2)
            w1 = dequantize_matrix(share, "w1").unflatten(1, (2, width))[:, :, : last - first]
            assert torch.equal(
                w1, all_values["w1"][experts].unflatten(1, (2, 256))[:, :, first:last]
            )
            w2 = dequantize_matrix(share, "w2")
            assert torch.equal(w2[..., : last - first], all_values["w2"][experts, :, first:last])
            assert not w2[..., last - first :].any()
            cuts_blocks = down.type.values == 256  # each rank must then read all blocks of w2
            assert share.bytes_read < all_experts.bytes_read * (0.5 if cuts_blocks else 0.3)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_fused_tensors_and_split_files_are_read(files: int, fused: bool, tmp_path: Path) -> None:
    """Gate and up can be one tensor, and a model can be split over several files in a folder."""
    sample = write_gguf(tmp_path / "m.gguf", types=("Q8_0",) * 3, fused=fused, files=files)
    for path in (tmp_path, *tmp_path.iterdir()):
        loaded = mk.load_experts(path, 0)
        assert torch.equal(dequantize_matrix(loaded, "w1"), sample.w1)
        assert torch.equal(dequantize_matrix(loaded, "w2"), sample.w2)
    if files > 1:
        (tmp_path / "m-00002-of-00003.gguf").unlink()
        with pytest.raises(WeightsError, match=r"m-00002-of-00003\.gguf: got No such file"):
            mk.load_experts(tmp_path, 0)


MIXED_TYPES = {1: ("Q4_K", "Q4_K", "Q6_K"), 2: ("Q4_0",) * 3, 3: ("Q4_0",) * 3, 5: ("F16",) * 3}


def test_layers_may_have_different_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama-quantize writes such files, because it quantizes some layers to more bits."""
    path = tmp_path / "m.gguf"
    write_gguf(path, types=MIXED_TYPES)
    report = inspect(path)
    assert {group.layers: str(group.format) for group in report.groups} == {
        (1,): "Q4_K and Q6_K (gguf; dequantized)",
        (2, 3): f"{INT4} (gguf)",
        (5,): "none",
    }
    sizes = [info.nbytes for name, info in read_header(path).tensors.items() if "_exps" in name]
    assert report.nbytes == sum(sizes)
    with pytest.raises(ConfigurationError, match="one with experts: 1 to 3, 5"):
        mk.load_experts(path, 0)
    pair = ("--pf-type", PAIR[0], "--experts-type", PAIR[1])
    result = run_mk(capsys, "check", *pair, "--model", str(path))
    assert (result.code, result.out.count("valid")) == (0, 3)
    assert f"{format_layers((2, 3))} in {INT4} (gguf)" in result.out
    result = run_mk(capsys, "plan", "--model", str(path), "--quant", INT4, "--world-size", "1")
    assert result.code == 0, result.err


def test_layer_loads_a_gguf_file(tmp_path: Path) -> None:
    sample = write_gguf(tmp_path / "m.gguf", types=("Q4_0",) * 3)
    layer = FusedMoE.from_config(tmp_path / "m.gguf", 0, top_k=2, experts="TorchExperts")
    layer.load(tmp_path / "m.gguf")
    assert str(layer.problem.quant) == INT4
    x, weights, ids = sample.inputs(24)
    y = layer(x.bfloat16(), (weights, ids)).double()
    expected = sample.expected_output(x.bfloat16().double(), weights, ids)
    assert (y - expected).norm() / expected.norm() <= 1e-2


def test_dequantized_types_can_be_quantized_while_loading(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", types=("Q4_K", "Q4_K", "Q6_K"))
    loaded = mk.load_experts(tmp_path / "m.gguf", 0, quantize=INT8)
    exact = mk.load_experts(tmp_path / "m.gguf", 0, dtype="float32").weights.w2.double()
    quantization_step = exact.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    error = (dequantize_matrix(loaded, "w2") - exact).unflatten(-1, (-1, 32)).abs()
    assert bool((error <= 0.52 * quantization_step).all())
    write_gguf(tmp_path / "m.gguf", types=("Q8_0",) * 3)
    with pytest.raises(ConfigurationError, match="need unquantized files"):
        mk.load_experts(tmp_path / "m.gguf", 0, quantize=INT4)


def test_loading_tensor_by_tensor_refuses_blocks(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    format = mk.load_experts(tmp_path / "m.gguf", 0).format
    with pytest.raises(ConfigurationError, match="`load_experts` reads GGUF"):
        merge(format, [{"weight": torch.zeros(256, 256, dtype=torch.uint8)}], torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"`load_experts` reads .* and GGUF"):
        ExpertLoader(Share(4, 256, 256), format)


def test_config_argument_overrides_sizes_and_dtype(tmp_path: Path) -> None:
    """The quantization types of tensors are still read from the GGUF file."""
    write_gguf(tmp_path / "m.gguf", types=("Q8_0",) * 3)
    config = (
        '{"model_type": "qwen3_moe", "hidden_size": 256, "moe_intermediate_size": 256,'
        '"num_experts": 4, "num_experts_per_tok": 3, "hidden_act": "silu", "dtype": "float16"}'
    )
    (tmp_path / "config.json").write_text(config)
    loaded = mk.load_experts(tmp_path / "m.gguf", 0, config=tmp_path / "config.json")
    assert loaded.problem_fields["top_k"] == 3
    assert loaded.problem_fields["dtype"] is torch.float16
    assert str(loaded.problem_fields["quant"]) == INT8


def test_folders_with_two_gguf_models_are_refused(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "b-Q8_0.gguf", "mmproj-F16.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(ConfigurationError, match=r"a-Q4_0\.gguf and b-Q8_0\.gguf, need the path"):
        mk.load_experts(tmp_path, 0)
    (tmp_path / "b-Q8_0.gguf").unlink()
    assert mk.load_experts(tmp_path, 0).problem_fields["experts"] == 4


def rename_tensor(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[new] = tensors.pop(old)

    return change


INVALID_FILES: dict[str, tuple[dict[str, Any], type[InputError], str]] = {
    "architecture": ({"metadata": {"general.architecture": "mamba"}}, ConfigurationError,
                     "general.architecture = 'mamba', need one of qwen2moe"),
    "no architecture": ({"metadata": {"general.architecture": None}}, ConfigurationError, "None"),
    "dense": ({"metadata": {"qwen3moe.expert_count": None}}, ConfigurationError,
              "no qwen3moe.expert_count, need this entry"),
    "count type": ({"metadata": {"qwen3moe.expert_count": "4"}}, ConfigurationError, "integers"),
    "layers": ({"metadata": {"qwen3moe.block_count": 0}}, ConfigurationError, "block_count = 0"),
    "many layers": (
        {"metadata": {"qwen3moe.block_count": 1 << 31}}, ConfigurationError, "1 to 4096 layers"),
    "nextn": ({"metadata": {"qwen3moe.nextn_predict_layers": 9}}, ConfigurationError, "= 9"),
    "hidden": ({"metadata": {"qwen3moe.embedding_length": 128}}, ShapeError,
               r"ffn_gate_exps.weight: got \(4, 256, 256\), need \(4, 256, 128\)"),
    "type": ({"types": ("NVFP4",) * 3}, ConfigurationError,
             r"experts of type NVFP4, of which .* in other tensors, need the model in safetensors"),
    "down": ({"change": rename_tensor("blk.0.ffn_down_exps.weight", "x")}, WeightsError,
             "blk.0: got no blk.0.ffn_down_exps.weight"),
    "extra": ({"change": rename_tensor("blk.0.ffn_gate_inp.weight", "blk.0.ffn_up_exps.scale")},
              WeightsError, "ffn_up_exps.scale"),
    "alignment": ({"metadata": {"general.alignment": 48}}, WeightsError, "general.alignment = 48"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID_FILES)
def test_invalid_metadata_and_tensors_are_refused(case: str, tmp_path: Path) -> None:
    options, error_type, message = INVALID_FILES[case]
    write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(error_type, match=message) as caught:
        mk.load_experts(tmp_path / "m.gguf", 0)
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "byte_offset"),
    [
        ("Q8_0", 0),
        ("Q4_K", 0),
        ("IQ4_XS", 0),
        ("Q5_0", 0),
        ("Q5_1", 2),
        ("Q3_K", 108),
        ("Q2_K", 82),
        ("IQ3_S", 0),
        ("IQ2_S", 0),
        ("TQ1_0", 52),
    ],
)
def test_nan_scale_of_a_block_is_refused(kind: str, byte_offset: int, tmp_path: Path) -> None:
    """`byte_offset` is the position of a float16 scale in the first block."""
    write_gguf(tmp_path / "m.gguf", types=(kind,) * 3)
    info = read_header(tmp_path / "m.gguf").tensors["blk.0.ffn_up_exps.weight"]
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[info.offset + byte_offset : info.offset + byte_offset + 2] = b"\xff\x7f"
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(WeightsError, match=r"blk.0.*got nan, need finite numbers"):
        mk.load_experts(tmp_path / "m.gguf", 0)


def make_header(*changes: tuple[int, bytes]) -> bytes:
    """Return a header without tensors, with bytes replaced at the given offsets."""
    data = bytearray(file_bytes({"general.architecture": "qwen3moe"}, {}))
    for byte_offset, replacement in changes:
        data[byte_offset : byte_offset + len(replacement)] = replacement
    return bytes(data)


HUGE = struct.pack("<Q", 1 << 60)
KEY = struct.pack("<Q", 1) + b"k"
# The first bytes of a header with one metadata entry, and of a header with one tensor description,
# up to and including the name.
ONE_KEY = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + KEY
ONE_TENSOR = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + KEY
INVALID_HEADERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "got 0 bytes"),
    "magic": (make_header((0, b"GGML")), "the first bytes b'GGML'"),
    "version 1": (make_header((4, struct.pack("<I", 1))), "version 1, need version 2 or 3"),
    "big-endian": (make_header((4, struct.pack(">I", 3))), "a big-endian file"),
    "tensors": (make_header((8, HUGE)), f"{1 << 60} tensors, need a complete file"),
    "entries": (make_header((16, HUGE)), f"{1 << 60} entries of metadata"),
    "key": (make_header((24, HUGE)), f"a name of {1 << 60} bytes"),
    "type of value": (ONE_KEY + struct.pack("<IQ", 77, 0), "k of type 77"),
    "text": (ONE_KEY + struct.pack("<I", 8) + HUGE, f"a name of {1 << 60} bytes"),
    "array": (ONE_KEY + struct.pack("<II", 9, 0) + HUGE, f"{1 << 60} items of k"),
    "array of strings": (ONE_KEY + struct.pack("<II", 9, 8) + HUGE, f"{1 << 60} items of k"),
    "long string of many": (
        ONE_KEY + struct.pack("<IIQ", 9, 8, 5000) + HUGE + bytes(8 * 5000), "end in the header"),
    "nested arrays": (
        ONE_KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 40, "k of type 9"),
    "truncated": (make_header()[:40], "complete file"),
    "twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2)
        + (KEY + struct.pack("<IB", 0, 1)) * 2 + bytes(9), "k twice"),
    "dimensions": (ONE_TENSOR + struct.pack("<I", 9) + bytes(40), "k of 9 dimensions"),
    "no rows": (ONE_TENSOR + struct.pack("<IQIQ", 1, 0, 0, 0) + bytes(9), r"k of shape \(0,\)"),
    "overflow": (ONE_TENSOR + struct.pack("<IQQQQIQ", 4, *[1 << 20] * 4, 0, 0), "k of shape"),
    "partial block": (
        ONE_TENSOR + struct.pack("<IQIQ", 1, 33, 2, 0) + bytes(9), "whole blocks of 32"),
    "unknown type": (ONE_TENSOR + struct.pack("<IQIQ", 1, 32, 99, 0) + bytes(9), "k of type 99"),
    "offset": (
        ONE_TENSOR + struct.pack("<IQIQ", 1, 32, 0, 3) + bytes(999), "k at 3, need a multiple"),
    "past the end": (
        ONE_TENSOR + struct.pack("<IQIQ", 1, 32, 0, 1 << 40) + bytes(999), "k up to byte"),
    "tensor twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 2, 0)
        + (KEY + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2 + bytes(99), "k twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID_HEADERS)
def test_invalid_header_is_refused(case: str, tmp_path: Path) -> None:
    """Counts must be compared with the file size before memory is allocated."""
    data, message = INVALID_HEADERS[case]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(WeightsError, match=message) as caught:
        mk.load_experts(tmp_path / "m.gguf", 0)
    assert "m.gguf" in str(caught.value)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hidden=32, intermediate=32)
    data = (tmp_path / "m.gguf").read_bytes()
    tensors_start = min(info.offset for info in read_header(tmp_path / "m.gguf").tensors.values())
    truncated_sizes = [
        *range(0, 400, 7),
        *range(400, tensors_start, 997),
        tensors_start,
        len(data) - 32,
        len(data) - 1,
    ]
    for size in truncated_sizes:
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(WeightsError, match=r"cut\.gguf"):
            mk.load_experts(tmp_path / "cut.gguf", 0)


def test_missing_file_and_folder_with_a_gguf_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no\.gguf: got No such file or directory, need a GGUF"):
        mk.load_experts(tmp_path / "no.gguf", 0)
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ConfigurationError, match=r"folder\.gguf"):
        mk.load_experts(tmp_path / "folder.gguf", 0)
