"""nvfp4 checkpoints loaded with 4-bit activations (quantize_inputs=True): the input scales of each
expert.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import modular_kernel as mk
from modular_kernel.catalog import this_machine
from modular_kernel.checkpoints.formats import format_of
from modular_kernel.checkpoints.fusing import merge
from modular_kernel.checkpoints.loading import load_experts
from modular_kernel.errors import ConfigurationError, WeightsError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import Tensors, write

PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
MODELOPT, COMPRESSED = "modelopt nvfp4", "compressed nvfp4"
# Scales of the inputs of each projection, for experts 0 to 3.
INPUT_SCALES = {
    "w1": [0.01, 0.02, 0.03, 0.04],
    "w3": [0.02, 0.01, 0.01, 0.05],
    "w2": [0.2, 0.1, 0.3, 0.4],
}
A1_SCALES, A2_SCALES = [0.02, 0.02, 0.03, 0.05], INPUT_SCALES["w2"]


def make_scale_setter(kind: str) -> Callable[[Tensors], None]:
    """Return a function that sets INPUT_SCALES for every expert as this kind of file stores
    them.
    """

    def set_scales(tensors: Tensors) -> None:
        for name in tensors:
            suffix = name.rpartition(".")[2]
            if suffix in ("input_scale", "input_global_scale"):
                expert, projection = name.split(".")[-3:-1]
                value = INPUT_SCALES[projection][int(expert)]
                tensors[name] = torch.tensor([1 / value if kind == COMPRESSED else value])

    return set_scales


@pytest.mark.parametrize("kind", [MODELOPT, COMPRESSED])
def test_scales_of_each_expert_are_loaded(kind: str, tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", kind, change=make_scale_setter(kind))
    weight_only = load_experts(sample.folder, 0)
    assert weight_only.problem_fields["quant"] == "nvfp4_w4a16"
    assert weight_only.weights.a1_scale is None
    loaded = load_experts(sample.folder, 0, quantize_inputs=True)
    assert loaded.problem_fields["quant"] == "nvfp4_w4a4"
    assert loaded.weights.a1_scale is not None
    assert loaded.weights.a2_scale is not None
    assert torch.allclose(loaded.weights.a1_scale, torch.tensor(A1_SCALES))
    assert torch.allclose(loaded.weights.a2_scale, torch.tensor(A2_SCALES))
    for name in ("w1", "w2", "w1_scale", "w2_scale", "w1_global_scale", "w2_global_scale"):
        actual, expected = getattr(loaded.weights, name), getattr(weight_only.weights, name)
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def test_ranks_have_the_scales_of_their_experts(tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", MODELOPT, change=make_scale_setter(MODELOPT))
    loaded = load_experts(sample.folder, 0, ep=(1, 2), tp=(1, 2), quantize_inputs=True)
    assert loaded.weights.a1_scale is not None
    assert torch.allclose(loaded.weights.a1_scale, torch.tensor(A1_SCALES[2:]))
    assert torch.allclose(loaded.weights.a2_scale, torch.tensor(A2_SCALES[2:]))


def test_one_scale_of_stacked_experts_applies_to_all(tmp_path: Path) -> None:
    sample = write(tmp_path, "llama4_text", "modelopt nvfp4, fused")
    loaded = load_experts(sample.folder, 0, quantize_inputs=True)
    assert loaded.weights.a1_scale is not None
    assert torch.allclose(loaded.weights.a1_scale, torch.full((4,), 0.01))


def test_stacked_scales_apply_to_each_expert(tmp_path: Path) -> None:
    def set_scales(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("input_scale")]:
            tensors[name] = torch.tensor(A1_SCALES if "gate_up" in name else A2_SCALES)

    sample = write(tmp_path, "llama4_text", "modelopt nvfp4, fused", change=set_scales)
    for rank, local_experts in ((0, slice(0, 2)), (1, slice(2, 4))):
        weights = load_experts(sample.folder, 0, ep=(rank, 2), quantize_inputs=True).weights
        for actual, expected in (
            (weights.a1_scale, A1_SCALES[local_experts]),
            (weights.a2_scale, A2_SCALES[local_experts]),
        ):
            assert actual is not None
            assert torch.allclose(actual, torch.tensor(expected))


@pytest.mark.parametrize("kind", [MODELOPT, COMPRESSED])
def test_merging_keeps_and_checks_scales(kind: str) -> None:
    checkpoint_format = format_of(CHECKPOINT_FORMATS[kind].config).with_inputs()
    name = next(
        tensor.name for tensor in checkpoint_format.stored_tensors if tensor.role == "a_scale"
    )
    generator = torch.Generator().manual_seed(0)
    gate, up = (CHECKPOINT_FORMATS[kind].make(32, 64, generator, 1.0).tensors for _ in range(2))
    values = [1 / 0.02, 1 / 0.03] if kind == COMPRESSED else [0.02, 0.03]
    gate[name], up[name] = (torch.tensor([value]) for value in values)
    merged = merge(checkpoint_format, [gate, up], torch.bfloat16)
    assert merged.a_scale is not None
    assert merged.a_scale.shape == ()
    assert float(merged.a_scale) == pytest.approx(0.03)
    for value in (-0.02, 0.0, torch.nan, torch.inf, 1e-40):
        with pytest.raises(WeightsError, match="activation scales"):
            merge(checkpoint_format, [gate | {name: torch.tensor([value])}, up], torch.bfloat16)


def test_activations_are_rounded_to_4_bits(tmp_path: Path) -> None:
    """Outputs must differ from the float64 output by a few percent, not more and not less."""
    sample = write(tmp_path, "mixtral", MODELOPT, change=make_scale_setter(MODELOPT))
    x, router, ids = sample.inputs(24)
    errors = {}
    for quantize_inputs in (False, True):
        loaded = load_experts(sample.folder, 0, quantize_inputs=quantize_inputs)
        problem = loaded.problem(24)
        kernel = mk.make_kernel(*PAIR, problem, machine=this_machine(device="cpu"))
        y = kernel(x.to(problem.dtype), loaded.weights, mk.Routing(router, ids))
        expected = sample.expected_output(x.to(problem.dtype).double(), router, ids)
        errors[quantize_inputs] = float((y.double() - expected).norm() / expected.norm())
    assert errors[False] < 0.01
    assert 0.03 < errors[True] < 0.25


def test_layers_load_input_scales(tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", MODELOPT, change=make_scale_setter(MODELOPT))
    loaded = load_experts(sample.folder, 0, quantize_inputs=True)
    options = {"params_dtype": "bfloat16", "top_k": 2}
    layer = FusedMoE(4, 128, 256, quant_config="nvfp4_w4a4", **options)  # type: ignore[arg-type]
    layer.load(sample.folder, 0)
    assert torch.equal(layer.w13_input_scale, loaded.weights.a1_scale)


def remove_input_scale(tensors: Tensors) -> None:
    del tensors[next(name for name in tensors if name.endswith("2.w3.input_scale"))]


def set_input_scale_to_zero(tensors: Tensors) -> None:
    name = next(name for name in tensors if name.endswith("2.w3.input_scale"))
    tensors[name] = torch.tensor([0.0])


@pytest.mark.parametrize(
    ("change", "need"), [(remove_input_scale, "input_scale"), (set_input_scale_to_zero, "above 0")]
)
def test_files_without_scales_are_refused(
    change: Callable[[Tensors], None], need: str, tmp_path: Path
) -> None:
    sample = write(tmp_path, "mixtral", MODELOPT, change=change)
    with pytest.raises(WeightsError, match=need):
        load_experts(sample.folder, 0, quantize_inputs=True)
    load_experts(sample.folder, 0)  # succeeds without reading the input scales


@pytest.mark.parametrize("kind", [MODELOPT, COMPRESSED])
def test_scales_without_a_finite_inverse_are_refused(kind: str, tmp_path: Path) -> None:
    def set_tiny_scale(tensors: Tensors) -> None:
        suffixes = ("1.w2.input_scale", "1.w2.input_global_scale")
        tensors[next(name for name in tensors if name.endswith(suffixes))] = torch.tensor([1e-40])

    sample = write(tmp_path, "mixtral", kind, change=set_tiny_scale)
    with pytest.raises(WeightsError, match=r"experts\.1\.w2\.input.*with finite inverses"):
        load_experts(sample.folder, 0, quantize_inputs=True)


@pytest.mark.parametrize("kind", [MODELOPT, COMPRESSED])
def test_negative_scales_are_refused(kind: str, tmp_path: Path) -> None:
    """The instructions with 4-bit operands accept only unsigned scales."""

    def set_negative_scale(tensors: Tensors) -> None:
        name = next(name for name in tensors if name.endswith("1.w2.weight_scale"))
        scale = tensors[name].view(torch.uint8).clone()
        scale[5, 1] |= 0x80
        tensors[name] = scale.view(torch.float8_e4m3fn)

    sample = write(tmp_path, "mixtral", kind, change=set_negative_scale)
    with pytest.raises(WeightsError, match=r"experts\.1\.w2.*got -.*need numbers from 0 on"):
        load_experts(sample.folder, 0, quantize_inputs=True)
    load_experts(sample.folder, 0)  # kernels for 16-bit activations accept negative scales


@pytest.mark.parametrize("kind", ["bf16", "modelopt fp8", "compressed mxfp4"])
def test_other_schemes_are_refused(kind: str, tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", kind)
    with pytest.raises(ConfigurationError, match=r"quantize_inputs: got .*, need nvfp4 files"):
        load_experts(sample.folder, 0, quantize_inputs=True)


def test_files_of_weight_only_nvfp4_are_refused(tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", COMPRESSED)
    config = sample.config["quantization_config"]["config_groups"]
    weight_only = {name: group | {"input_activations": None} for name, group in config.items()}
    changed_config = sample.config | {
        "quantization_config": sample.config["quantization_config"] | {"config_groups": weight_only}
    }
    (tmp_path / "config.json").write_text(json.dumps(changed_config))
    with pytest.raises(ConfigurationError, match="need nvfp4 files of a model that was quantized"):
        load_experts(replace(sample, config=changed_config).folder, 0, quantize_inputs=True)


def test_options_of_experts_determine_the_scheme() -> None:
    """Activations of attention may be quantized although those of experts are not."""
    config = CHECKPOINT_FORMATS[COMPRESSED].config
    assert config is not None
    ((_, group),) = config["config_groups"].items()
    experts = group | {"targets": ["re:.*experts.*"], "input_activations": None}
    attention = group | {"targets": ["re:.*self_attn.*"]}
    checkpoint_format = format_of(config | {"config_groups": {"a": attention, "b": experts}})
    assert str(checkpoint_format) == "nvfp4_w4a16 (compressed-tensors)"
    with pytest.raises(ConfigurationError, match="need nvfp4 files of a model that was quantized"):
        checkpoint_format.with_inputs()
