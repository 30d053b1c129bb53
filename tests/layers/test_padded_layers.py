"""Every way to load layers whose tensor-parallel shards of the intermediate size are padded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_weight_loading import load_by_name

import modular_kernel as mk
from modular_kernel.checkpoints import format_of
from modular_kernel.errors import ConfigurationError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.layers.rank_share import Move, Share, destination, find_padding
from modular_kernel.layers.weight_loading import ExpertLoader
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import write

# Intermediate sizes of formats that pack values into words but have no groups. With 288 columns,
# their shards would not be padded.
PACKED_SIZES = {"compressed int8, weights": 300}
PACKED_SIZES |= dict.fromkeys(
    ("gptq, one group", "awq, one group", "compressed int4, channels"), 296
)


def choose_intermediate(kind: str) -> int:
    without_groups = (
        CHECKPOINT_FORMATS[kind].scheme.split(":")[0].endswith(("none", "tensor", "channel"))
    )
    return PACKED_SIZES.get(kind, 290 if without_groups else 288)


@pytest.mark.parametrize("kind", CHECKPOINT_FORMATS)
def test_padded_shards_loaded_by_tensor_equal_shards_loaded_from_files(
    kind: str, tmp_path: Path
) -> None:
    """Parameters hold arbitrary values before loading, as after `to_empty`, so that the test checks
    the padding, too.
    """
    size = choose_intermediate(kind)
    write(tmp_path, "mixtral", kind, intermediate=size)
    tensors = load_file(tmp_path / "model.safetensors")
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    format = format_of(CHECKPOINT_FORMATS[kind].config, depth=size)
    if format.scheme.static:  # Gate and up must have the same input scale.
        for name in [n for n in experts if ".w3.input_scale" in n]:
            experts[name] = experts[name.replace(".w3.", ".w1.")].clone()
    create_weights = ExpertLoader.create_weights

    class LoaderWithFilledParameters(ExpertLoader):
        def create_weights(self, layer: torch.nn.Module, dtype: torch.dtype) -> None:  # type: ignore[override]
            create_weights(self, layer, dtype)
            for parameter in layer.parameters():
                parameter.data.view(torch.uint8 if parameter.dim() else parameter.dtype).fill_(0x7F)

    for tp_rank in range(4):
        loader = LoaderWithFilledParameters(Share(4, 128, size, tp=(tp_rank, 4)), format)
        dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(kind, torch.bfloat16)
        got = loader.expert_weights(load_by_name(loader, experts, dtype))
        loaded = mk.load_experts(tmp_path, 0, tp=(tp_rank, 4))
        assert tp_rank < 3 or loader.share.padding
        expected = loaded.weights
        for name, tensor in vars(expected).items():
            got_tensor = getattr(got, name)
            assert (got_tensor is None) == (tensor is None), name
            if tensor is not None and not name.startswith("a"):
                assert torch.equal(got_tensor.float(), tensor.float()), name


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize(
    "kind",
    ["mxfp4", "compressed nvfp4", "awq", "compressed int4, zero points", "deepseek fp8", "bf16"],
)
def test_rank_outputs_sum_to_the_layer(kind: str, tp: int, tmp_path: Path) -> None:
    size = {"bf16": 301, "compressed nvfp4": 304}.get(kind, 288)
    sample = write(tmp_path, "gpt_oss", kind, intermediate=size)
    x, weights, ids = sample.inputs(8)
    total, columns = torch.zeros_like(x), 0
    for tp_rank in range(tp):
        layer = FusedMoE.from_config(
            tmp_path,
            0,
            params_dtype="float32",
            parallel=LayerParallel(tp=(tp_rank, tp)),
            experts="TorchExperts",
            router=None,
            top_k=2,
            device="cpu",
        )
        layer.load(tmp_path)
        tp_line = next(s for s in layer.describe().splitlines() if s.startswith("TP rank"))
        count, width = int(tp_line.split()[5]), layer.problem.intermediate
        padded = f", padded to {width}" if count < width else ""
        assert (
            tp_line == f"TP rank {tp_rank} of {tp}: {count} of {size} intermediate columns{padded}"
        )
        columns += count
        total += layer(x.float(), (weights, ids)).double()
    assert columns == size
    expected = sample.expected_output(x.float().double(), weights, ids)
    bound = CHECKPOINT_FORMATS[kind].bound if "fp8" in kind else 1e-5
    assert float((total - expected).norm() / expected.norm()) <= bound


def test_unquantized_layers_can_be_loaded_again(tmp_path: Path) -> None:
    """The padding is zero without a call of `process_weights_after_loading`."""
    sample = write(tmp_path, "mixtral", "bf16", intermediate=301)
    experts = {
        name: t
        for name, t in load_file(tmp_path / "model.safetensors").items()
        if ".experts." in name
    }
    x, weights, ids = sample.inputs(8)
    total = torch.zeros_like(x)
    for t in range(4):
        layer = FusedMoE(
            4, 128, 301, top_k=2, params_dtype=torch.float32, experts="TorchExperts",
            parallel=LayerParallel(tp=(t, 4)), device="cpu",
        )  # fmt: skip
        for _ in range(2):
            for name, tensor in experts.items():
                expert, shard = name.split(".")[-3:-1]
                param = layer.w2_weight if shard == "w2" else layer.w13_weight
                layer.weight_loader(param, tensor.float(), "weight", shard, int(expert))
        assert not any(parameter.isnan().any() for parameter in layer.parameters())
        total += layer(x.float(), (weights, ids)).double()
    expected = sample.expected_output(x.float().double(), weights, ids)
    assert float((total - expected).norm() / expected.norm()) <= 1e-5


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_checkpoints_of_another_size_with_equal_shard_width_are_refused(
    kind: str, tmp_path: Path
) -> None:
    """Every rank refuses the checkpoint, even if its columns are the same in both sizes."""
    sizes = {"bf16": (301, 303), "mxfp4": (288, 320)}[kind]
    for size in sizes:
        write(tmp_path / str(size), "mixtral", kind, intermediate=size)
    for tp_rank in range(4):
        layer = FusedMoE.from_config(
            tmp_path / str(sizes[0]), 0, parallel=LayerParallel(tp=(tp_rank, 4)), device="cpu"
        )
        before = layer.w13_weight
        other_experts = mk.load_experts(tmp_path / str(sizes[1]), 0, tp=(tp_rank, 4))
        assert other_experts.problem_fields["intermediate"] == layer.problem.intermediate
        assert other_experts.intermediate == sizes[1]
        message = f"intermediate_size of the checkpoint: got {sizes[1]}, need {sizes[0]}$"
        with pytest.raises(ConfigurationError, match=message):
            layer.load(tmp_path / str(sizes[1]))
        assert layer.w13_weight is before
        layer.load(tmp_path / str(sizes[0]))


@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "fp8_w8a8_block", "int4_w4a16_group:group=64"])
@pytest.mark.parametrize("size", [192, 290])
def test_layers_can_be_quantized_while_loading(scheme: str, size: int, tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "bf16", intermediate=size)
    for tp_rank in range(2):
        layer = FusedMoE.from_config(
            tmp_path, 0, quantize=scheme, parallel=LayerParallel(tp=(tp_rank, 2)), device="cpu"
        )
        layer.load(tmp_path, quantize=scheme)
        loaded = mk.load_experts(tmp_path, 0, tp=(tp_rank, 2), quantize=scheme)
        assert layer.problem.intermediate == loaded.problem_fields["intermediate"]
        assert torch.equal(layer.w13_weight.view(torch.uint8), loaded.weights.w1.view(torch.uint8))


def test_weight_destinations_of_a_padded_shard() -> None:
    share = Share(2, 64, 288, tp=(1, 4), quant="mxfp4_w4a16")
    assert (share.width, share.columns, share.padding) == (96, (96, 160), 32)
    hidden = (0, 64)
    assert destination(0, "w1", share) == Move(0, (0, 64), hidden, (96, 160), hidden)
    assert destination(0, "w3", share) == Move(0, (96, 160), hidden, (96, 160), hidden)
    assert destination(0, "w2", share) == Move(0, hidden, (0, 64), hidden, (96, 160))
    assert find_padding("w1", share) == ((64, 96), hidden)
    assert find_padding("w3", share) == ((160, 192), hidden)
    assert find_padding("w2", share) == (hidden, (64, 96))
    interleaved = Share(2, 64, 288, tp=(1, 4), quant="mxfp4_w4a16", interleaved=True)
    assert destination(0, "w13", interleaved) == Move(0, (0, 128), hidden, (192, 320), hidden)
    assert find_padding("w13", interleaved) == ((128, 192), hidden)
