"""Padded shares of tensor-parallel ranks: sums of outputs, codes and scales, zeros in the padding,
and bytes read.

Most layers are small versions of gpt-oss with biases and swiglu_oai. Their gate and up rows are
interleaved or separate. I is not a multiple of the number of ranks times the group size.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_checkpoint_shares import count_expert_bytes, load_all_ranks, sum_rank_outputs
from test_checkpoint_values import dequantize_w1_w2

import modular_kernel as mk
from modular_kernel.checkpoints.formats import fit_scheme, format_of
from modular_kernel.checkpoints.loading import LoadedExperts
from modular_kernel.errors import ConfigurationError
from modular_kernel.quant.quantized_weights import IMPLICIT_ZERO_POINT, quantize_weights
from modular_kernel.quant.scale_tiles import expand_scales, unpack_pairs
from modular_kernel.spec.intermediate_split import IntermediateSplit, split_intermediate
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS, FUSED_FORMATS
from modular_kernel.testing.checkpoints.samples import Sample, write

# The intermediate size of each format. Groups have 32, 64 or 128 columns, and the last group can be
# partial. Packed words have 4 or 8 values.
INTERMEDIATE_BY_FORMAT = {
    "mxfp4": 288,
    "compressed mxfp4": 288,
    "modelopt nvfp4, fused": 304,
    "compressed nvfp4": 304,
    "compressed int4, zero points": 288,
    "awq": 352,
    "gptq": 288,
    "gptq, zero points": 352,
    "gptq int8": 352,
    "compressed int8, weights": 300,
    "gptq, one group": 296,
    "deepseek fp8": 288,
    "compressed fp8 weights, block": 352,
    "bf16": 301,
}
RANKS = (2, 4, 8)
FORMATS = CHECKPOINT_FORMATS | FUSED_FORMATS


def make_padded_sample(sample: Sample, rank: LoadedExperts) -> Sample:
    """Return the sample with the float64 weights of one rank, including their padding."""
    w1, w2 = dequantize_w1_w2(rank)
    b1, b2 = rank.weights.b1.double(), rank.weights.b2.double()
    if rank.problem_fields["activation"].interleaved:
        b1 = torch.cat([b1[:, 0::2], b1[:, 1::2]], 1)
    return replace(sample, w1=w1, w2=w2, b1=b1, b2=b2)


def split_gate_up(rank: LoadedExperts, rows: torch.Tensor) -> torch.Tensor:
    """Split rows (E, 2I, ...) of w1 or b1 into gate and up: (E, 2, I, ...)."""
    if rank.problem_fields["activation"].interleaved:
        return rows.unflatten(1, (-1, 2)).transpose(1, 2)
    return rows.unflatten(1, (2, -1))


def unpack_codes_and_scales(rank: LoadedExperts) -> dict[str, torch.Tensor]:
    """Return the code, the scale and the zero point of each weight by name.

    Tensors of w1 have the shape (E, 2, I, H), and tensors of w2 have the shape (E, H, I).
    """
    scheme, tensors = QuantScheme.parse(rank.problem_fields["quant"]), {}
    for name in ("w1", "w2"):
        w, scale = getattr(rank.weights, name), getattr(rank.weights, f"{name}_scale")
        zero_point = getattr(rank.weights, f"{name}_zero_point")
        tensors[name] = unpack_pairs(w, 2) if scheme.packed else w
        rows, depth = tensors[name].shape[1:]
        if scale is not None:
            scale = scale.view(torch.uint8) if scale.itemsize == 1 else scale
            tensors[f"{name}_scale"] = expand_scales(scale.float(), scheme, rows, depth)
            tensors[f"{name}_scale"] = tensors[f"{name}_scale"].expand(-1, rows, depth)
        if zero_point is not None:
            zero_point = unpack_pairs(zero_point, 1) if scheme.packed else zero_point
            tensors[f"{name}_zero_point"] = expand_scales(zero_point.float(), scheme, rows, depth)
    return {
        name: split_gate_up(rank, t) if name.startswith("w1") else t for name, t in tensors.items()
    }


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("kind", INTERMEDIATE_BY_FORMAT)
def test_outputs_of_padded_shares_sum_to_the_layer(kind: str, tp: int, tmp_path: Path) -> None:
    sample = write(tmp_path, "gpt_oss", kind, intermediate=INTERMEDIATE_BY_FORMAT[kind])
    (layer,) = load_all_ranks(sample, (1, 1), "float32")
    loaded = load_all_ranks(sample, (1, tp), "float32")
    (width,) = {rank.problem_fields["intermediate"] for rank in loaded}
    assert width * tp > INTERMEDIATE_BY_FORMAT[kind]

    # Each column of I is on exactly one rank, and all ranks have the same problem.
    columns = [column for rank in loaded for column in range(*rank.columns)]
    assert columns == list(range(INTERMEDIATE_BY_FORMAT[kind]))
    assert len({str(rank.problem(8)) for rank in loaded}) == 1

    # In float64, outputs of padded shares sum to the output of the layer.
    inputs = sample.inputs(8)
    want = make_padded_sample(sample, layer).expected_output(*inputs)
    rank_outputs = [make_padded_sample(sample, rank).expected_output(*inputs) for rank in loaded]
    got = torch.stack(rank_outputs).sum(0)
    assert float((got - want).norm() / want.norm()) <= 1e-14

    # Check the same with kernels. With fp8, the activations of a share can have other scales.
    y, y_layer = sum_rank_outputs(sample, loaded), sum_rank_outputs(sample, [layer])
    if QuantScheme.parse(loaded[0].problem_fields["quant"]).quantizes_activations:
        expected = sample.expected_output(*sample.inputs(16))
        assert float((y - expected).norm() / expected.norm()) <= FORMATS[kind].bound
    else:
        assert float((y - y_layer).norm() / y_layer.norm()) <= 1e-5


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("kind", INTERMEDIATE_BY_FORMAT)
def test_codes_and_scales_equal_the_files(kind: str, tp: int, tmp_path: Path) -> None:
    sample = write(tmp_path, "gpt_oss", kind, intermediate=INTERMEDIATE_BY_FORMAT[kind])
    layer_tensors = unpack_codes_and_scales(mk.load_experts(tmp_path, 0))
    for rank in load_all_ranks(sample, (1, tp)):
        rank_tensors, (first, end) = unpack_codes_and_scales(rank), rank.columns
        assert rank_tensors.keys() == layer_tensors.keys()
        for name, tensor in rank_tensors.items():
            axis = 2  # the axis of I in both w1 and w2
            got = tensor.narrow(axis, 0, end - first)
            want = layer_tensors[name].narrow(axis, first, end - first)
            assert torch.equal(view_bytes(got), view_bytes(want)), name
            if name.endswith("_scale"):
                assert tensor.isfinite().all()


def view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("kind", INTERMEDIATE_BY_FORMAT)
def test_padding_is_zero(kind: str, tp: int, tmp_path: Path) -> None:
    sample = write(tmp_path, "gpt_oss", kind, intermediate=INTERMEDIATE_BY_FORMAT[kind])
    num_padded = 0
    for rank in load_all_ranks(sample, (1, tp)):
        width = rank.columns[1] - rank.columns[0]  # without padding
        scheme, tensors = rank.problem(1).scheme, unpack_codes_and_scales(rank)
        w1, w2 = dequantize_w1_w2(rank)
        padding = w1.unflatten(1, (2, -1))[:, :, width:], w2[..., width:]
        assert all(not values.any() for values in padding)
        assert not split_gate_up(rank, rank.weights.b1)[:, :, width:].any()
        # The codes equal the zero point, so the padding is 0 for any scale.
        for name in ("w1", "w2"):
            codes = tensors[name].float()
            implicit_zero_point = torch.tensor(float(IMPLICIT_ZERO_POINT.get(scheme.weight, 0)))
            zero_point = tensors.get(f"{name}_zero_point", implicit_zero_point).expand_as(codes)
            assert name == "w1" or torch.equal(codes[..., width:], zero_point[..., width:])
            assert name == "w2" or torch.equal(codes[:, :, width:], zero_point[:, :, width:])
        num_padded += padding[0].numel()
    assert num_padded


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("kind", INTERMEDIATE_BY_FORMAT)
def test_rank_reads_only_its_share(kind: str, tp: int, tmp_path: Path) -> None:
    sample = write(tmp_path, "gpt_oss", kind, intermediate=INTERMEDIATE_BY_FORMAT[kind])
    size, loaded = count_expert_bytes(sample), load_all_ranks(sample, (1, tp))
    for rank in loaded:
        fraction = (rank.columns[1] - rank.columns[0]) / INTERMEDIATE_BY_FORMAT[kind]
        # Every rank reads all of w1's g_idx, which has an int32 for each of the 128 columns of gate
        # and up of 4 experts.
        g_idx_bytes = 4 * 2 * 128 * 4 if kind.startswith("gptq") else 0
        # The margin covers scales that several ranks read, and b2, which the first rank reads.
        assert rank.bytes_read <= 1.08 * size * fraction + g_idx_bytes
    # In these formats, no two ranks read the same tensor element.
    if kind in ("mxfp4", "compressed mxfp4", "bf16"):
        assert sum(rank.bytes_read for rank in loaded) == size


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (2, 8), (4, 4)])
def test_ep_and_tp_ranks_combine(sizes: tuple[int, int], tmp_path: Path) -> None:
    """`sizes` are the numbers of EP ranks and TP ranks."""
    sample = write(tmp_path, "gpt_oss", "mxfp4", intermediate=288)
    layer = load_all_ranks(sample, (1, 1), "float32")
    loaded = load_all_ranks(sample, sizes, "float32")
    assert len(loaded) == sizes[0] * sizes[1]
    y, y_layer = sum_rank_outputs(sample, loaded), sum_rank_outputs(sample, layer)
    assert float((y - y_layer).norm() / y_layer.norm()) <= 1e-5
    assert sum(rank.bytes_read for rank in loaded) == count_expert_bytes(sample)


def test_reading_a_padded_matrix_in_pieces_gives_equal_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = write(tmp_path, "mixtral", "awq", intermediate=288)
    in_one_read = load_all_ranks(sample, (1, 4))
    monkeypatch.setattr("modular_kernel.checkpoints.loading._VALUES_PER_STEP", 1 << 11)
    for rank, in_pieces in zip(in_one_read, load_all_ranks(sample, (1, 4)), strict=True):
        for name, tensor in vars(rank.weights).items():
            assert tensor is None or torch.equal(getattr(in_pieces.weights, name), tensor), name


@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "int4_w4a16_group:group=64,zero_points=true",
                                    "fp8_w8a8_block:block=128x128", "nvfp4_w4a16"])  # fmt: skip
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "nemotron_h"])
def test_shares_quantized_while_loading_have_the_scales_of_the_layer(
    family: str, scheme: str, tmp_path: Path
) -> None:
    """A share has the same scale tiles as the layer, so it also has the same codes."""
    sample = write(tmp_path, family, "bf16", intermediate=290)
    exact = mk.load_experts(tmp_path, 0)
    problem = replace(exact.problem(1), quant=scheme)
    quantized = replace(exact, weights=quantize_weights(exact.weights, problem))
    quantized.problem_fields["quant"] = scheme
    w1, w2 = dequantize_w1_w2(quantized)
    num_projections = 1 if family == "nemotron_h" else 2  # without or with a gate
    w1 = w1.unflatten(1, (num_projections, -1))
    for t in range(2):
        rank = mk.load_experts(tmp_path, 0, tp=(t, 2), quantize=scheme)
        first, end = rank.columns
        got_w1, got_w2 = dequantize_w1_w2(rank)
        got_w1, width = got_w1.unflatten(1, (num_projections, -1)), end - first
        if not problem.scheme.matrix_scales:  # in nvfp4, each share has its own matrix scale
            # In the layer, a block can have rows of both gate and up. In a share, it cannot.
            has_mixed_blocks = family == "mixtral" and problem.scheme.granularity == "block"
            assert has_mixed_blocks or torch.equal(got_w1[:, :, :width], w1[:, :, first:end])
            assert torch.equal(got_w2[..., :width], w2[..., first:end])
        assert not got_w1[:, :, width:].any()
        assert not got_w2[..., width:].any()
    assert sample.w2.shape[2] == end


@pytest.mark.parametrize(
    ("kind", "intermediate", "tp", "message"),
    [
        ("mxfp4", 96, 4, "tp: ranks: got 4, need at most 3: each rank holds a whole group of 32"),
        ("gptq int8", 192, 12, "got 12, need at most 6: each rank holds a whole group of 32"),
        ("awq", 96, 8, "got 8, need at most 3: each rank holds a whole group of 32 columns of"),
        ("deepseek fp8", 208, 8, "got 8, need at most 7: each rank holds a whole group of 32"),
        ("modelopt nvfp4", 48, 4, "got 4, need at most 3: each rank holds a whole group of 16"),
        ("compressed int8, weights", 8, 3, "got 3, need at most 2: each rank holds a whole group"),
        ("bf16", 3, 4, "got 4, need at most 3: each rank holds a whole column of intermediate=3"),
        ("gptq, act-order", 256, 2, "tp: ranks: got 2, need 1: act-order scatters the columns"),
    ],
)  # fmt: skip
def test_more_ranks_than_groups_are_refused(
    kind: str, intermediate: int, tp: int, message: str, tmp_path: Path
) -> None:
    write(tmp_path, "mixtral", kind, intermediate=intermediate)
    for t in range(tp):
        with pytest.raises(ConfigurationError, match=message):
            mk.load_experts(tmp_path, 0, tp=(t, tp))


@pytest.mark.parametrize(
    ("intermediate", "num_ranks", "quant", "expected"),
    [
        (2880, 2, "mxfp4_w4a16", IntermediateSplit(2880, 2, 1440, 1440)),
        (2880, 4, "mxfp4_w4a16", IntermediateSplit(2880, 4, 32, 736)),
        (2880, 8, "mxfp4_w4a16", IntermediateSplit(2880, 8, 32, 384)),
        (2880, 8, "nvfp4_w4a16", IntermediateSplit(2880, 8, 16, 368)),
        (2880, 8, "none", IntermediateSplit(2880, 8, 360, 360)),
        (2880, 8, "fp8_w8a8_block:block=64x128", IntermediateSplit(2880, 8, 128, 384)),
        (200, 4, "int8_w8a16_channel", IntermediateSplit(200, 4, 16, 64)),
        (200, 4, "int8_w8a8_channel", IntermediateSplit(200, 4, 50, 50)),
        (20, 3, "none", IntermediateSplit(20, 3, 8, 8)),
        (3, 3, "none", IntermediateSplit(3, 3, 1, 1)),
        # 48 columns are less than one group for each rank, so columns are split regardless of
        # groups.
        (48, 4, "mxfp4_w4a16", IntermediateSplit(48, 4, 12, 12)),
    ],
)
def test_split_intermediate_of_published_models(
    intermediate: int, num_ranks: int, quant: str, expected: IntermediateSplit
) -> None:
    assert split_intermediate(intermediate, num_ranks, QuantScheme.parse(quant)) == expected


def test_every_split_covers_the_intermediate_dimension() -> None:
    """Shares consist of whole groups. No share is empty or wider than `split.width`."""
    num_splits = 0
    for kind in INTERMEDIATE_BY_FORMAT:
        for intermediate in range(64, 520, 24):
            format = format_of(FORMATS[kind].config, depth=520)
            for world in (1, 2, 3, 5, 8):
                try:
                    scheme = fit_scheme(format, intermediate, world=world)
                except ConfigurationError:
                    continue
                split = split_intermediate(intermediate, world, scheme)
                shares = [split.columns(rank) for rank in range(world)]
                assert [first for first, _ in shares[1:]] == [end for _, end in shares[:-1]]
                assert (shares[0][0], shares[-1][1]) == (0, intermediate)
                assert all(0 < end - first <= split.width for first, end in shares)
                assert split.is_padded == (split.width * world > intermediate)
                has_whole_row_groups = (scheme.group[-1:] or (1,))[0] >= intermediate
                if world > 1 and not has_whole_row_groups:
                    assert all(first % size == 0 for first, _ in shares for size in scheme.group)
                    assert all(split.width % size == 0 for size in scheme.group)
                num_splits += 1
    assert num_splits > 500


def test_padding_of_a_partial_group_uses_its_zero_point(tmp_path: Path) -> None:
    """The padding of the last group of w2 has the code of that group's zero point, which represents
    0.
    """
    write(tmp_path, "mixtral", "compressed int4, zero points", intermediate=160)
    last_rank = mk.load_experts(tmp_path, 0, tp=(1, 2))
    assert last_rank.columns == (128, 160)
    codes = unpack_codes_and_scales(last_rank)
    zero = codes["w2_zero_point"][..., :64]
    assert (zero != 8).any()
    assert torch.equal(codes["w2"][..., 32:64].float(), zero[..., 32:])
    assert not dequantize_w1_w2(last_rank)[1][..., 32:].any()
