"""The layers of other libraries in tools/bench_peers.py. Stand-ins replace the libraries."""

import importlib.util
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from modular_kernel.bench.candidates import peer_candidates
from modular_kernel.measure.cases import make_weights
from modular_kernel.reference import float64_reference
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.random_inputs import random_inputs

FILE = Path(__file__).parents[2] / "tools" / "bench_peers.py"
PROBLEM = Problem(tokens=64, hidden=256, intermediate=128, experts=4, top_k=2)


def import_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FILE.with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def peers() -> ModuleType:
    return import_tool("bench_peers")


def test_missing_libraries_are_named(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert peers.layers() == []
    err = capsys.readouterr().err
    assert err.count("(needs vllm)") == 10
    assert err.count("(needs flashinfer)") == 3
    for name in ("vllm_triton", "vllm_deepgemm", "vllm_cutlass", "triton_kernels", "flashinfer"):
        assert f"not installed: {name}" in err


def test_peers_have_a_scheme_and_refuse_unsupported_layers(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: object())
    layers = peers.layers()
    assert len(layers) == len({(layer.name, layer.quant) for layer in layers}) == 13
    for layer in layers:
        assert str(QuantScheme.parse(layer.quant)) == layer.quant
        supported = PROBLEM.with_tokens(256)
        assert layer.refusal(supported) is None
        for change in ({"activation": "gelu"}, {"bias": True}, {"dtype": torch.float16}):
            assert layer.refusal(replace(supported, **change))
    block_layers = [layer for layer in layers if getattr(layer, "blocks", None) is True]
    assert {layer.quant for layer in block_layers} == {"fp8_w8a8_block", "int4_w4a16_group"}
    assert all(layer.refusal(replace(PROBLEM, tokens=256, hidden=192)) for layer in block_layers)
    (deepgemm_layer,) = (layer for layer in layers if layer.name == "vllm_deepgemm")
    assert "tokens" in deepgemm_layer.refusal(PROBLEM)
    large = PROBLEM.with_tokens(256)
    assert "hidden" in deepgemm_layer.refusal(replace(large, hidden=2560))
    assert deepgemm_layer.refusal(replace(large, hidden=4096)) is None


def test_channel_scales_follow_their_rows(peers: ModuleType) -> None:
    peer = peers.VllmTriton("fp8_w8a8_channel")
    _, _, w1_scale, w2_scale = peer.quantize_weights(
        PROBLEM, make_weights(PROBLEM, torch.device("cpu"))
    )
    assert tuple(w1_scale.shape) == (4, 256, 1)
    assert tuple(w2_scale.shape) == (4, 256, 1)


def test_gate_and_up_rows_are_interleaved(peers: ModuleType) -> None:
    rows = torch.arange(12).reshape(1, 6, 2)
    assert peers.interleave_gate_up(rows)[0, :, 0].tolist() == [0, 6, 2, 8, 4, 10]


class FusedMoEConfig:
    """A stand-in that stores its arguments. Subclasses have the fields of two versions of vLLM."""

    def __init__(self, **options: object) -> None:
        self.options = options


@dataclass(init=False)
class NewConfig(FusedMoEConfig):
    intermediate_size: int = 0


@dataclass(init=False)
class OldConfig(FusedMoEConfig):
    intermediate_size_per_partition: int = 0


@pytest.mark.parametrize("config", [NewConfig, OldConfig])
def test_vllm_experts_accept_the_maximum_tokens(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, config: type[FusedMoEConfig]
) -> None:
    module = SimpleNamespace(
        FusedMoEConfig=config,
        FusedMoEParallelConfig=SimpleNamespace(make_no_parallel=lambda: None),
        RoutingMethodType=SimpleNamespace(Renormalize=None),
    )
    monkeypatch.setattr(peers, "import_module", lambda name: module)
    peer = peers.VllmExperts("vllm_cutlass", "fp8_w8a8_channel", "cutlass_moe", "CutlassExpertsFp8")
    peer.silu = None
    moe_config = peer._make_moe_config(PROBLEM.with_tokens(4096))
    assert moe_config.options["max_num_tokens"] == 4096  # vLLM 0.26 refuses calls with more
    assert moe_config.options[fields(config)[0].name] == PROBLEM.intermediate


def test_file_is_a_valid_peer_file() -> None:
    names = {candidate.name for candidate in peer_candidates(FILE)}
    vllm_names = {
        "vllm_triton",
        "vllm_deepgemm",
        "vllm_cutlass",
        "vllm_marlin",
        "vllm_marlin_mxfp4",
    }
    assert names <= vllm_names | {"triton_kernels", "flashinfer"}


def test_flashinfer_layers_refuse_partial_blocks(
    peers: ModuleType,
) -> None:
    layers = [peers.FlashInferBf16(), peers.FlashInferFp8Block(), peers.FlashInferMxfp4()]
    assert [layer.quant for layer in layers] == ["none", "fp8_w8a8_block", "mxfp4_w4a16"]
    for layer in layers:
        assert layer.refusal(PROBLEM) is None
        assert bool(layer.refusal(replace(PROBLEM, hidden=192))) == (layer.quant != "none")
        assert layer.refusal(replace(PROBLEM, activation="gelu"))


class PlainTorchLayer:
    """A layer in plain torch for the tests of padding."""

    name, quant, needs = "plain", "none", ()

    def refusal(self, problem: Problem) -> str | None:
        return None if problem.hidden % 128 == 0 == problem.intermediate % 64 else "sizes"

    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        self.problem, self.weights = problem, weights

    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        return float64_reference(x_TH, self.weights, routing, self.problem).to(x_TH.dtype)


def test_padding_does_not_change_the_output(peers: ModuleType) -> None:
    problem = replace(PROBLEM, hidden=96, intermediate=80)
    layer = peers.Padded(PlainTorchLayer(), 128, 64)
    assert PlainTorchLayer().refusal(problem)
    assert layer.refusal(problem) is None
    x_TH, weights, routing = random_inputs(problem, torch.device("cpu"))
    layer.setup(problem, weights)
    assert tuple(layer.layer.weights.w1.shape) == (4, 256, 128)
    out = layer.call(x_TH, routing)
    torch.testing.assert_close(
        out, float64_reference(x_TH, weights, routing, problem).to(out.dtype)
    )


def test_flashinfer_up_rows_come_first(peers: ModuleType) -> None:
    rows = torch.arange(12, dtype=torch.bfloat16).reshape(1, 6, 2)
    out = peers.put_up_first(rows)
    assert out.dtype == torch.bfloat16
    assert out[0, :, 0].tolist() == [6, 8, 10, 0, 2, 4]


def test_flashinfer_block_scales_follow_their_rows(
    peers: ModuleType,
) -> None:
    layer = peers.FlashInferFp8Block()
    w1, _, w1_scale, _ = layer.quantize_weights(PROBLEM, make_weights(PROBLEM, torch.device("cpu")))
    layer.load(PROBLEM, make_weights(PROBLEM, torch.device("cpu")))
    half = PROBLEM.intermediate
    assert torch.equal(layer.w1[:, :half].float(), w1[:, half:].float())
    assert torch.equal(layer.scales[0][:, : half // 128], w1_scale[:, half // 128 :])
