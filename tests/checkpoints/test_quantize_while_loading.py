"""Unquantized files that are quantized while loading give the same bits as `quantize_weights`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_checkpoint_shares import load_all_ranks, sum_rank_outputs
from test_checkpoint_values import REFERENCE_PARTS, compute_output_error, dequantize_w1_w2
from torch.profiler import ProfilerActivity, profile

import modular_kernel as mk
from modular_kernel.catalog import this_machine
from modular_kernel.checkpoints.loading import LoadedExperts
from modular_kernel.errors import ConfigurationError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.quant import expert_pieces
from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.spec.quantization import QUANT_SCHEMES
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import write

# Every scheme without static activation scales. The tiles of some do not divide I = 192.
SCHEMES = (
    "fp8_w8a8_tensor",
    "fp8_w8a8_channel",
    "fp8_w8a8_block:block=128x128",
    "fp8_w8a8_block:block=48x40",
    "fp8_w8a16_tensor",
    "fp8_w8a16_channel",
    "fp8_w8a16_block:block=32x64",
    "int8_w8a8_channel",
    "int8_w8a8_block",
    "int8_w8a16_channel",
    "int8_w8a16_group:group=32,zero_points=true",
    "int4_w4a16_group:group=64",
    "int4_w4a16_group:zero_points=true",
    "int8_w8a16_act_order",
    "int4_w4a16_act_order:group=32,zero_points=true",
    "mxfp4_w4a16",
    "mxfp4_w4a16:repacked=true",
    "nvfp4_w4a16",
)
FAMILIES = (
    "mixtral",  # one module per expert
    "gpt_oss",  # stacks (E, K, N), with interleaved rows and biases
    "dbrx",  # matrices (E K, N)
    "nemotron_h",  # no gate
)


def assert_equal_weights(got: ExpertWeights, want: ExpertWeights) -> None:
    for name, tensor in vars(want).items():
        got_tensor = getattr(got, name)
        assert (got_tensor is None) == (tensor is None), name
        if tensor is not None:
            assert got_tensor.dtype is tensor.dtype
            assert torch.equal(view_as_uint8(got_tensor), view_as_uint8(tensor)), name


def slice_tp_share(layer: LoadedExperts, rank: LoadedExperts) -> ExpertWeights:
    """Return a TP rank's share of a layer's weights, padded with zeros."""
    (first, last), width = rank.columns, rank.problem_fields["intermediate"]
    weights, act = layer.weights, rank.problem(1).act
    num_projections = 2 if act.gated else 1

    def slice_rows(tensor: torch.Tensor) -> torch.Tensor:
        sizes = (-1, num_projections) if act.interleaved else (num_projections, -1)
        split = tensor.unflatten(1, sizes).movedim(1 if act.interleaved else 2, -1)
        padded = torch.nn.functional.pad(split[..., first:last], (0, width - (last - first)))
        return padded.movedim(-1, 1 if act.interleaved else 2).flatten(1, 2)

    w2 = torch.nn.functional.pad(weights.w2[..., first:last], (0, width - (last - first)))
    b1, b2 = (
        (None, None)
        if weights.b1 is None or weights.b2 is None
        else (slice_rows(weights.b1), weights.b2.clone())
    )
    if b2 is not None and rank.tp[0]:
        b2.zero_()
    return ExpertWeights(slice_rows(weights.w1).contiguous(), w2.contiguous(), b1=b1, b2=b2)


def view_as_uint8(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as uint8 if it has a 1-byte dtype, because `torch.equal` does not support
    float8.
    """
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def test_every_scheme_is_listed() -> None:
    listed = {scheme.partition(":")[0] for scheme in SCHEMES}
    assert listed == {n for n, s in QUANT_SCHEMES.items() if s.quantized and not s.static}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_weights_equal_quantize_weights(
    family: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, family, "bf16", intermediate=192)
    # With this limit, a matrix is read in several pieces.
    monkeypatch.setattr(expert_pieces, "_VALUES_PER_PIECE", 1 << 13)
    unquantized = mk.load_experts(tmp_path, 0)
    for tp in ((0, 1), (1, 2)):
        loaded = mk.load_experts(tmp_path, 0, tp=tp, quantize=scheme)
        problem = loaded.problem(1)
        assert problem.quant == str(problem.scheme)
        assert_equal_weights(
            loaded.weights, quantize_weights(slice_tp_share(unquantized, loaded), problem)
        )
        bias_bytes = (
            0 if unquantized.weights.b2 is None or tp[0] == 0 else unquantized.weights.b2.nbytes
        )
        columns = loaded.columns[1] - loaded.columns[0]
        assert loaded.bytes_read * 192 == (unquantized.bytes_read - bias_bytes) * columns


def test_values_of_the_files_are_rounded_once(tmp_path: Path) -> None:
    """Values must not be rounded to the dtype of the layer before they are quantized."""
    write(tmp_path, "mixtral", "fp32")
    loaded = mk.load_experts(tmp_path, 0, dtype="bfloat16", quantize="int8_w8a16_group:group=32")
    assert loaded.problem(1).dtype is torch.bfloat16
    unquantized = mk.load_experts(tmp_path, 0, dtype="float32").weights
    assert_equal_weights(loaded.weights, quantize_weights(unquantized, loaded.problem(1)))
    rounded = mk.load_experts(tmp_path, 0, dtype="bfloat16").weights
    assert not torch.equal(quantize_weights(rounded, loaded.problem(1)).w1, loaded.weights.w1)


@pytest.mark.parametrize("scheme", ["fp8_w8a8_block:block=128x128", "int4_w4a16_group:group=64"])
def test_shares_of_whole_tiles_have_the_scales_of_the_layer(scheme: str, tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", "bf16", intermediate=256)
    layer = mk.load_experts(tmp_path, 0, dtype="float32", quantize=scheme)
    ranks = [
        mk.load_experts(tmp_path, 0, tp=(t, 2), dtype="float32", quantize=scheme) for t in (0, 1)
    ]
    w2_scales = [vars(rank.weights)["w2_scale"] for rank in ranks]
    assert torch.equal(torch.cat(w2_scales, 2), vars(layer.weights)["w2_scale"])
    w1_scales = [vars(rank.weights)["w1_scale"].unflatten(1, (2, -1)) for rank in ranks]
    assert torch.equal(torch.cat(w1_scales, 2).flatten(1, 2), vars(layer.weights)["w1_scale"])
    y = sum_rank_outputs(sample, [layer])
    assert float((sum_rank_outputs(sample, ranks) - y).norm() / y.norm()) <= 1e-5


@pytest.mark.parametrize("scheme", ["fp8_w8a8_tensor", "fp8_w8a16_channel"])
def test_ranks_compute_their_own_scales_if_a_scale_covers_several_ranks(
    scheme: str, tmp_path: Path
) -> None:
    sample = write(tmp_path, "mixtral", "bf16", intermediate=256)
    bound = CHECKPOINT_FORMATS["fp8 tensor, dynamic"].bound
    assert compute_output_error(sample, mk.load_experts(tmp_path, 0, quantize=scheme)) <= bound
    loaded = [
        mk.load_experts(tmp_path, 0, ep=(e, 2), tp=(t, 2), dtype="float32", quantize=scheme)
        for e in (0, 1)
        for t in (0, 1)
    ]
    expected = sample.expected_output(*sample.inputs(16))
    assert float((sum_rank_outputs(sample, loaded) - expected).norm() / expected.norm()) <= bound
    unquantized = load_all_ranks(sample, (2, 2))
    assert [rank.bytes_read for rank in loaded] == [rank.bytes_read for rank in unquantized]


REFUSED_CASES: dict[str, tuple[str, Any, str]] = {
    "static fp8": ("bf16", "fp8_w8a8_tensor:static=true", "need no static activation scales"),
    "static nvfp4": ("bf16", "nvfp4_w4a4", "quantize: got nvfp4_w4a4, need no static activation"),
    "none": ("bf16", "none", "quantize: got none, need a quantized scheme, or None"),
    "unknown": ("bf16", "fp7", "quant: got fp7, need one of"),
    "not a name": ("bf16", 8, "quant: got int, need a scheme name"),
    "quantized files": (
        "deepseek fp8",
        "int8_w8a16_group",
        r"quantize=int8_w8a16_group: got fp8_w8a8_block \(fp8\), need unquantized files",
    ),
    "the same scheme": ("deepseek fp8", "fp8_w8a8_block", "need unquantized files"),
}


@pytest.mark.parametrize("case", REFUSED_CASES)
def test_unsupported_schemes_and_quantized_files_are_refused(case: str, tmp_path: Path) -> None:
    kind, scheme, message = REFUSED_CASES[case]
    write(tmp_path, "mixtral", kind)
    with pytest.raises(ConfigurationError, match=message):
        mk.load_experts(tmp_path, 0, quantize=scheme)
    with pytest.raises(ConfigurationError, match=message):
        FusedMoE.from_config(tmp_path, 0, quantize=scheme)


@pytest.mark.parametrize(
    "kind", ["fp8 tensor, static", "fp8 tensor, dynamic", "modelopt fp8", "compressed fp8 tensor"]
)
def test_per_tensor_fp8_loads_per_channel_without_rounding(kind: str, tmp_path: Path) -> None:
    """The scales of gate and up differ. The per-tensor scheme would merge them and round values
    again.
    """
    sample = write(tmp_path, "mixtral", kind)
    loaded = mk.load_experts(tmp_path, 0, quantize="fp8_w8a8_channel")
    assert loaded.weights.a1_scale is None
    w1, w2 = dequantize_w1_w2(loaded)
    torch.testing.assert_close(w1, sample.w1, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(w2, sample.w2, rtol=1e-6, atol=1e-12)
    rounded_again = mk.load_experts(tmp_path, 0)
    assert rounded_again.problem(1).scheme.name == "fp8_w8a8_tensor"
    assert float((dequantize_w1_w2(rounded_again)[0] - sample.w1).norm() / sample.w1.norm()) > 1e-2
    assert compute_output_error(sample, loaded) < compute_output_error(sample, rounded_again)
    for tp in (1, 2):
        expected = sample.expected_output(*sample.inputs(16))
        y = sum_rank_outputs(sample, load_tp_ranks(tmp_path, tp))
        assert float((y - expected).norm() / expected.norm()) <= CHECKPOINT_FORMATS[kind].bound
    with pytest.raises(ConfigurationError, match="need unquantized files"):
        mk.load_experts(tmp_path, 0, quantize="fp8_w8a8_block")


def load_tp_ranks(folder: Path, tp: int) -> list[LoadedExperts]:
    return [
        mk.load_experts(folder, 0, tp=(t, tp), dtype="float32", quantize="fp8_w8a8_channel")
        for t in range(tp)
    ]


def test_odd_share_of_packed_values_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "bf16", intermediate=90)
    with pytest.raises(ConfigurationError, match="intermediate: got 45, need a multiple of 2"):
        mk.load_experts(tmp_path, 0, tp=(0, 2), quantize="int4_w4a16_group:group=30")


@pytest.mark.parametrize("scheme", ["fp8_w8a8_block", "nvfp4_w4a16"])
def test_layer_is_created_and_loaded_in_the_scheme(scheme: str, tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", "bf16", intermediate=256)
    x, weights, ids = sample.inputs(6)
    for tp in range(2):
        parallel = LayerParallel(tp=(tp, 2))
        layer = FusedMoE.from_config(tmp_path, 0, quantize=scheme, top_k=2, parallel=parallel)
        assert str(layer.problem.scheme) == scheme
        layer.load(tmp_path, quantize=scheme)
        loaded = mk.load_experts(tmp_path, 0, tp=(tp, 2), quantize=scheme)
        problem, rank_weights = loaded.partial(6)
        kernel = mk.make_kernel(*REFERENCE_PARTS, problem, machine=this_machine(device="cpu"))
        want = kernel(x.bfloat16(), rank_weights, mk.Routing(weights, ids))
        assert torch.equal(layer(x.bfloat16(), (weights, ids)), want)
    with pytest.raises(ConfigurationError, match="quant of the checkpoint: got none, need"):
        layer.load(tmp_path)
    with pytest.raises(ConfigurationError, match="quant of the checkpoint: got int8_w8a16_channel"):
        layer.load(tmp_path, quantize="int8_w8a16_channel")


def test_repr_states_the_quantization(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "bf16")
    loaded = mk.load_experts(tmp_path, 0, quantize="fp8_w8a8_block:block=128x128")
    assert "4 of 4 experts in none, quantized to fp8_w8a8_block, ep=(0, 1)" in repr(loaded)


EXPERTS, HIDDEN, INTERMEDIATE = 4, 1024, 2048
BITS_BY_SCHEME = {"fp8_w8a8_tensor": 8, "int4_w4a16_act_order": 4, "mxfp4_w4a16:repacked=true": 4}


@pytest.mark.parametrize("scheme", BITS_BY_SCHEME)
@pytest.mark.parametrize("tp", [1, 2])
def test_peak_memory_is_at_most_the_weights_plus_one_matrix(
    scheme: str, tp: int, tmp_path: Path
) -> None:
    """Only allocations by torch count, not the memory-mapped files."""
    write(tmp_path, "mixtral", "bf16", experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE)
    peak_bytes, loaded = measure_peak_bytes(tmp_path, scheme, tp)
    weight_bytes = sum(
        tensor.nbytes for tensor in vars(loaded.weights).values() if tensor is not None
    )
    num_values = EXPERTS * 3 * HIDDEN * INTERMEDIATE // tp
    value_bytes = num_values * BITS_BY_SCHEME[scheme] // 8
    assert value_bytes <= weight_bytes <= 1.2 * value_bytes
    matrix_bytes = 2 * HIDDEN * INTERMEDIATE * torch.bfloat16.itemsize  # w1 of an expert
    assert weight_bytes <= peak_bytes <= weight_bytes + matrix_bytes


def measure_peak_bytes(folder: Path, scheme: str, tp: int) -> tuple[int, LoadedExperts]:
    """Return the maximum number of bytes that torch's CPU allocator held during a load, and the
    loaded experts.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loaded = mk.load_experts(folder, 0, tp=(0, tp), quantize=scheme)
    assert profiler.profiler is not None
    # Each event is an allocation or a release. Mapping the file counts as an allocation of its
    # size.
    mapped_bytes = (folder / "model.safetensors").stat().st_size
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert any(event.nbytes() == mapped_bytes for event in events)
    current_bytes = peak_bytes = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current_bytes += 0 if abs(event.nbytes()) == mapped_bytes else event.nbytes()
        peak_bytes = max(peak_bytes, current_bytes)
    return peak_bytes, loaded


def test_missing_tensor_is_reported_before_reading(tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", "bf16")
    save_file({"model.norm.weight": torch.ones(4)}, sample.folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match="no experts"):
        mk.load_experts(tmp_path, 0, quantize="mxfp4_w4a16")
