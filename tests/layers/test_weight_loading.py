"""Loading weights tensor by tensor, as inference engines do, equals loading by `load_experts`."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import modular_kernel as mk
from modular_kernel.checkpoints import Format, format_of
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError
from modular_kernel.layers.rank_share import Move, Share, destination
from modular_kernel.layers.weight_loading import (
    ExpertLoader,
    Fp8EPMoEMethod,
    UnquantizedEPMoEMethod,
    make_expert_params_mapping,
)
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import write

EP_TP_SIZES = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 4))


def load_by_name(
    loader: ExpertLoader,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    experts: int = 4,
    fused_prefixes: "dict[str, str] | None" = None,
) -> torch.nn.Module:
    """Load each tensor with the `weight_loader` of its parameter, as models of engines do."""
    layer = torch.nn.Module()
    layer.experts = torch.nn.Module()
    loader.create_weights(layer.experts, dtype)
    parameters = dict(layer.named_parameters())
    mapping = make_expert_params_mapping("w1", "w2", "w3", experts)
    for name, prefix in (fused_prefixes or {}).items():
        mapping += [(f"experts.{prefix}", f"experts.{e}.{name}.", e, name) for e in range(experts)]
    for name, tensor in tensors.items():
        for prefix, weight, expert, shard in mapping:
            if weight in name:
                parameter_name = name[name.index("experts.") :].replace(weight, prefix)
                param = parameters[
                    parameter_name.replace("weight_scale_inv", "weight_scale")
                    if parameter_name not in parameters
                    else parameter_name
                ]
                param.weight_loader(param, tensor, parameter_name, shard, expert)
    return layer.experts


@pytest.mark.parametrize("kind", CHECKPOINT_FORMATS)
def test_loading_by_tensor_equals_loading_from_files(kind: str, tmp_path: Path) -> None:
    write(tmp_path, "mixtral", kind)
    tensors = load_file(tmp_path / "model.safetensors")
    experts = {name: t for name, t in tensors.items() if ".experts." in name}
    format = format_of(CHECKPOINT_FORMATS[kind].config, depth=256)
    for ep, tp in ((1, 1), (2, 2)):
        for ep_rank, tp_rank in product(range(ep), range(tp)):
            if format.scheme.static:  # Gate and up must have the same input scale.
                for name in [n for n in experts if ".w3.input_scale" in n]:
                    experts[name] = experts[name.replace(".w3.", ".w1.")].clone()
            share = Share(4, 128, 256, ep=(ep_rank, ep), tp=(tp_rank, tp))
            loader = ExpertLoader(share, format)
            dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(kind, torch.bfloat16)
            got = loader.expert_weights(load_by_name(loader, experts, dtype))
            expected = mk.load_experts(tmp_path, 0, ep=(ep_rank, ep), tp=(tp_rank, tp)).weights
            for name, tensor in vars(expected).items():
                got_tensor = getattr(got, name)
                assert (got_tensor is None) == (tensor is None), name
                if tensor is not None and not name.startswith("a"):
                    assert torch.equal(got_tensor.float(), tensor.float()), name
                    assert got_tensor.dtype == tensor.dtype or name.endswith("_scale")
            if format.scheme.static:
                scales = [t for n, t in experts.items() if "w1.input_scale" in n]
                assert float(got.a1_scale) == float(torch.stack(scales).max())


def fuse_gate_and_up(format: Format, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Concatenate gate and up of every expert into one tensor w13, which some engines load."""
    stored_by_name = {
        name: stored for stored in format.stored_tensors for name in (stored.name, *stored.aliases)
    }
    fused = dict(tensors)
    for name in [name for name in tensors if ".w1." in name]:
        up, gate = fused.pop(name.replace(".w1.", ".w3.")), fused.pop(name)
        axes = [dim.axis for dim in stored_by_name[name.rpartition(".")[2]].dims]
        gate_up = torch.cat([gate, up], axes.index("N")) if "N" in axes else gate
        fused[name.replace(".w1.", ".w13.")] = gate_up
    return fused


@pytest.mark.parametrize(
    "kind",
    [
        "fp32",
        "deepseek fp8",
        "compressed fp8 channel",
        "awq",
        "gptq",
        "compressed int4, zero points",
        "mxfp4",
    ],
)
def test_loading_fused_gate_and_up_equals_loading_both(kind: str, tmp_path: Path) -> None:
    write(tmp_path, "mixtral", kind)
    tensors = load_file(tmp_path / "model.safetensors")
    experts = {name: t for name, t in tensors.items() if ".experts." in name}
    format, loaded_weights = format_of(CHECKPOINT_FORMATS[kind].config), []
    for tensors_to_load in (experts, fuse_gate_and_up(format, experts)):
        loader = ExpertLoader(Share(4, 128, 256, ep=(1, 2), tp=(1, 2)), format)
        layer = load_by_name(loader, tensors_to_load, torch.float32, fused_prefixes={"w13": "w13_"})
        loaded_weights.append(loader.expert_weights(layer))
    separate, fused = loaded_weights
    for name, tensor in vars(separate).items():
        other = getattr(fused, name)
        assert tensor is other is None or torch.equal(tensor.float(), other.float()), name


@pytest.mark.parametrize("kind", ["fp8 tensor, dynamic", "modelopt nvfp4"])
def test_one_scale_for_interleaved_rows_is_refused(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=r"interleaved: got .* need gate rows first"):
        ExpertLoader(
            Share(2, 128, 192, interleaved=True), format_of(CHECKPOINT_FORMATS[kind].config)
        )


def test_a_scale_block_across_gate_and_up_is_refused() -> None:
    format = format_of(CHECKPOINT_FORMATS["deepseek fp8"].config)
    loader, layer = ExpertLoader(Share(2, 128, 192), format), torch.nn.Module()
    loader.create_weights(layer, torch.bfloat16)
    scale = torch.ones(3, 1)
    with pytest.raises(ConfigurationError, match="gate rows: got 192, need a multiple of 128"):
        loader.weight_loader(layer.w13_weight_scale_inv, scale, "w13_weight_scale_inv", "w13", 0)


@pytest.mark.parametrize("sizes", EP_TP_SIZES)
def test_shards_are_slices_of_the_weights(sizes: tuple[int, int]) -> None:
    ep, tp = sizes
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (
        torch.randn(4, *s, generator=generator) for s in ((32, 16), (32, 16), (16, 32))
    )
    b1, b3, b2 = (torch.randn(4, n, generator=generator) for n in (32, 32, 16))
    tensors = {}
    for i in range(4):
        for name, w, b in (("w1", gate, b1), ("w3", up, b3), ("w2", down, b2)):
            tensors[f"experts.{i}.{name}.weight"] = w[i]
            tensors[f"experts.{i}.{name}.bias"] = b[i]
    for ep_rank, tp_rank in product(range(ep), range(tp)):
        loader = ExpertLoader(Share(4, 16, 32, ep=(ep_rank, ep), tp=(tp_rank, tp)), bias=True)
        layer = load_by_name(loader, tensors, torch.float32)
        local = slice(ep_rank * 4 // ep, (ep_rank + 1) * 4 // ep)
        columns = slice(tp_rank * 32 // tp, (tp_rank + 1) * 32 // tp)
        assert torch.equal(
            layer.w13_weight, torch.cat([gate[local, columns], up[local, columns]], 1)
        )
        assert torch.equal(layer.w2_weight, down[local, :, columns])
        assert torch.equal(layer.w13_bias, torch.cat([b1[local, columns], b3[local, columns]], 1))
        assert torch.equal(layer.w2_bias, b2[local] if tp_rank == 0 else torch.zeros(4 // ep, 16))
        weights = loader.expert_weights(layer)
        assert weights.w1.data_ptr() == layer.w13_weight.data_ptr()


def test_transposed_storage_has_the_same_values() -> None:
    share = Share(2, 16, 32, tp=(1, 2))
    tensors = {
        f"experts.{i}.{name}.weight": torch.randn(16, 32) if name == "w2" else torch.randn(32, 16)
        for i in range(2)
        for name in ("w1", "w2", "w3")
    }
    loader = ExpertLoader(share)
    transposed_loader = ExpertLoader(share, transposed=True)
    layers = [
        load_by_name(expert_loader, tensors, torch.float32, 2)
        for expert_loader in (loader, transposed_loader)
    ]
    assert layers[1].w13_weight.shape == (2, 16, 32)
    assert layers[1].w2_weight.shape == (2, 16, 16)
    for name in ("w1", "w2"):
        weights = loader.expert_weights(layers[0])
        transposed_weights = transposed_loader.expert_weights(layers[1])
        assert torch.equal(getattr(weights, name), getattr(transposed_weights, name))


def test_the_mapping_has_three_entries_per_expert() -> None:
    assert make_expert_params_mapping("gate_proj", "down_proj", "up_proj", 2) == [
        ("experts.w13_", "experts.0.gate_proj.", 0, "w1"),
        ("experts.w2_", "experts.0.down_proj.", 0, "w2"),
        ("experts.w13_", "experts.0.up_proj.", 0, "w3"),
        ("experts.w13_", "experts.1.gate_proj.", 1, "w1"),
        ("experts.w2_", "experts.1.down_proj.", 1, "w2"),
        ("experts.w13_", "experts.1.up_proj.", 1, "w3"),
    ]


def test_destination_describes_a_slice() -> None:
    share = Share(6, 16, 32, ep=(1, 2), tp=(1, 2))
    assert destination(2, "w1", share) is None
    assert destination(4, "w1", share) == Move(1, (0, 16), (0, 16), (16, 32), (0, 16))
    assert destination(4, "w3", share) == Move(1, (16, 32), (0, 16), (16, 32), (0, 16))
    assert destination(5, "w2", share) == Move(2, (0, 16), (0, 16), (0, 16), (16, 32))
    ungated = Share(6, 16, 32, gated=False)
    assert destination(0, "w3", ungated) == Move(0, (0, 32), (0, 16), (0, 32), (0, 16))
    with pytest.raises(ConfigurationError, match="shard_id: got 'w1', need one of w2, w3"):
        destination(0, "w1", ungated)
    shares = [Share(7, 16, 32, ep=(r, 3)) for r in range(3)]
    assert [[s.local_expert(e) for s in shares] for e in range(7)] == [
        [0, -1, -1], [1, -1, -1], [2, -1, -1], [-1, 0, -1], [-1, 1, -1], [-1, -1, 0], [-1, -1, 1],
    ]  # fmt: skip


def test_quant_methods_create_the_parameters() -> None:
    layer, loader_calls = torch.nn.Module(), []

    def record_call(*arguments: object) -> None:
        loader_calls.append(arguments)

    UnquantizedEPMoEMethod().create_weights(layer, 2, 64, 128, torch.bfloat16, record_call)
    assert {n: (tuple(p.shape), p.dtype) for n, p in layer.named_parameters()} == {
        "w13_weight": ((2, 256, 64), torch.bfloat16),
        "w2_weight": ((2, 64, 128), torch.bfloat16),
    }
    layer.w13_weight.weight_loader(layer.w13_weight, None, "", "w1", 0)
    assert len(loader_calls) == 1
    static = {"quant_method": "fp8", "activation_scheme": "static"}
    layer = torch.nn.Module()
    Fp8EPMoEMethod(static).create_weights(layer, 2, 64, 128, torch.bfloat16, record_call)
    assert {n: (tuple(p.shape), p.dtype, p.quant_method) for n, p in layer.named_parameters()} == {
        "w13_weight": ((2, 256, 64), torch.float8_e4m3fn, ""),
        "w2_weight": ((2, 64, 128), torch.float8_e4m3fn, ""),
        "w13_weight_scale": ((2, 2), torch.float32, "tensor"),
        "w2_weight_scale": ((2,), torch.float32, "tensor"),
        "w13_input_scale": ((2,), torch.float32, ""),
        "w2_input_scale": ((2,), torch.float32, ""),
    }
    assert layer.w13_input_scale.tolist() == [1.0, 1.0]
    for config in (None, "int8_w8a8_channel", "fp8_w8a8_channel"):
        with pytest.raises(ConfigurationError, match="need a float8 format"):
            Fp8EPMoEMethod(config)


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (SimpleNamespace(activation_scheme="dynamic"), "fp8_w8a8_tensor"),
        (SimpleNamespace(activation_scheme="static"), "fp8_w8a8_tensor:static=true"),
        (
            SimpleNamespace(activation_scheme="dynamic", weight_block_size=[64, 32]),
            "fp8_w8a8_block:block=64x32",
        ),
        ("fp8_w8a8_tensor:static=true", "fp8_w8a8_tensor:static=true"),
        ("fp8_w8a8_block:block=64x32", "fp8_w8a8_block:block=64x32"),
    ],
    ids=str,
)
def test_fp8_method_scheme_from_config(config: object, scheme: str) -> None:
    assert str(Fp8EPMoEMethod(config).format.scheme) == scheme


def make_static_fp8_loader() -> tuple[ExpertLoader, torch.nn.Module]:
    format = format_of({"quant_method": "fp8", "activation_scheme": "static"})
    loader, layer = ExpertLoader(Share(2, 64, 128, ep=(0, 2)), format), torch.nn.Module()
    loader.create_weights(layer, torch.bfloat16)
    return loader, layer


def test_input_scales_of_an_expert_must_be_equal() -> None:
    loader, layer = make_static_fp8_loader()
    param, name = layer.w13_input_scale, "experts.w13_input_scale"
    loader.weight_loader(param, torch.tensor(0.5), name, "w1", 0)
    with pytest.raises(WeightsError, match=r"input_scale: got 0\.75, need 0\.5"):
        loader.weight_loader(param, torch.tensor(0.75), name, "w3", 0)
    loader.weight_loader(param, torch.tensor([0.500001]), name, "w3", 0)
    # Expert 1 is on another rank, so its scale is skipped.
    loader.weight_loader(param, torch.tensor(0.25), name, "w1", 1)
    assert param.tolist() == [pytest.approx(0.5, abs=1e-5)]
    scale = layer.w13_weight_scale
    loader.weight_loader(scale, torch.tensor(2.0), "w13_weight_scale", "w3", 0)
    loader.weight_loader(scale, torch.tensor(3.0), "w13_weight_scale", "w1", 0)
    assert scale.tolist() == [[3.0, 2.0]]


def test_missing_tensors_are_named() -> None:
    loader, layer = make_static_fp8_loader()
    with pytest.raises(WeightsError, match="no weight of w1, expert 0 and 8 more"):
        loader.expert_weights(layer)


INVALID_TENSORS = {
    "shard": (("w4", "w13_weight", 0), ConfigurationError, "shard_id: got 'w4'"),
    "expert": (("w1", "w13_weight", 7), ConfigurationError, r"expert_id: got 7, need in \[0, 2\)"),
    "name": (("w1", "w13_qweight", 0), ConfigurationError, "weight_name: got 'w13_qweight'"),
    "parameter": (("w2", "w2_weight", 0), ShapeError, "got .128, 64., need .64, 128."),
}


@pytest.mark.parametrize("case", INVALID_TENSORS)
def test_invalid_loader_arguments_are_refused(case: str) -> None:
    (shard, name, expert), error, message = INVALID_TENSORS[case]
    loader, layer = make_static_fp8_loader()
    before = layer.w13_weight.float().clone()
    weight = torch.ones(128, 64).to(torch.float8_e4m3fn)
    with pytest.raises(error, match=message):
        loader.weight_loader(layer.w13_weight, weight, name, shard, expert)
    assert torch.equal(layer.w13_weight.float(), before)


def test_tensors_of_wrong_shape_or_dtype_are_refused() -> None:
    loader, layer = make_static_fp8_loader()
    with pytest.raises(DtypeError, match="w13_weight: got bfloat16, need float8_e4m3fn"):
        loader.weight_loader(
            layer.w13_weight, torch.ones(128, 64).bfloat16(), "w13_weight", "w1", 0
        )
    with pytest.raises(ShapeError, match=r"w13_weight_scale: got \(128,\), need \(\)"):
        loader.weight_loader(layer.w13_weight_scale, torch.ones(128), "w13_weight_scale", "w1", 0)
    weight = torch.ones(128, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ShapeError, match="w13_weight: parameter"):
        loader.weight_loader(layer.w2_weight, weight, "w13_weight", "w1", 0)
    with pytest.raises(ConfigurationError, match="transposed"):
        ExpertLoader(Share(2, 64, 128), loader.format, transposed=True)
