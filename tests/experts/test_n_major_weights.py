"""Unquantized weights that are contiguous along N, as some models of transformers store them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from forced_path_cases import GPT_OSS_ACTIVATION, prove_with_config
from path_launches import n_major_like

from experts.triton.aligned import aligned_config
from experts.triton.configs.select import choose_config, override_config
from experts.triton.gemv import gemv_config
from experts.triton.launch_config import Device, LaunchConfig, MoEConfig
from experts.triton.paths import BY_NAME
from experts.triton.standard import TritonExperts, config_for_strides
from modular_kernel.spec.problem import Combine, Machine
from modular_kernel.tensors import StandardShape
from modular_kernel.testing.cases.inputs import InputVariation
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.tuning.compilation import make_meta_inputs

Launch = tuple[int, int, int, int]
_N_MAJOR = InputVariation(layout="transposed")
_PROBLEM = replace(BASE, hidden=160, intermediate=96, dtype=torch.bfloat16)
_GATE_FIRST, _INTERLEAVED = "silu", "silu:interleaved=true"


def _make_aligned_config(
    block_m: int, first: tuple[int, int], second: tuple[int, int]
) -> MoEConfig:
    """Return launches from block_m and (block_n, block_k) for each GEMM."""
    launches = (LaunchConfig(block_m, n, k, 1, 4, 2) for n, k in (first, second))
    return MoEConfig(*launches, "aligned")


def _make_gemv_config(first: Launch, second: Launch) -> MoEConfig:
    """Return launches from (block_n, block_k, warps, pairs per program) for each GEMM."""
    launches = (LaunchConfig(16, n, k, pairs, w, 1) for n, k, w, pairs in (first, second))
    return MoEConfig(*launches, "gemv")


_ALIGNED_CONFIGS = (
    _make_aligned_config(16, (16, 32), (32, 64)),  # rows are the left operand of the MMA
    _make_aligned_config(16, (32, 32), (64, 32)),  # weights are the left operand
    _make_aligned_config(64, (64, 64), (128, 32)),
    _make_aligned_config(128, (32, 32), (64, 32)),
)
_CHANGES: tuple[dict[str, Any], ...] = (
    {"activation": GPT_OSS_ACTIVATION, "bias": True},
    {"activation": _GATE_FIRST, "bias": True},
    {"activation": "relu2"},
    # N and K are not multiples of a block. In the next two problems, they are not multiples of 16
    # bytes either.
    {"activation": _INTERLEAVED, "hidden": 72, "intermediate": 40},
    {"activation": _INTERLEAVED, "hidden": 75, "intermediate": 37, "bias": True},
    {"activation": _GATE_FIRST, "hidden": 75, "intermediate": 37, "dtype": torch.float16},
    {"activation": _INTERLEAVED, "dtype": torch.float32},
    {"activation": GPT_OSS_ACTIVATION, "combine": Combine.TOPK_WEIGHTED},
    {"activation": GPT_OSS_ACTIVATION, "expert_map": True, "local_experts": 3},
    {"activation": _INTERLEAVED, "lora": "adapters=3,rank=16"},
)


@pytest.mark.share(6)
@pytest.mark.parametrize("changes", _CHANGES, ids=str)
@pytest.mark.parametrize(
    "config", _ALIGNED_CONFIGS, ids=lambda c: f"{c.gemm1.block_m}-{c.gemm1.block_n}"
)
def test_tiled_products_equal_float64(
    changes: dict[str, Any], config: MoEConfig, machine: Machine
) -> None:
    problem = replace(_PROBLEM, tokens=37, **changes)
    proof = prove_with_config(config, ("aligned",), problem, "skips", machine, _N_MAJOR)
    assert proof.passed, str(proof)


_GEMV_CONFIGS = (
    _make_gemv_config((16, 64, 4, 1), (64, 32, 4, 4)),
    _make_gemv_config((32, 32, 1, 1), (32, 128, 8, 2)),
    _make_gemv_config((64, 256, 8, 1), (16, 64, 2, 1)),  # all of K at once
)


@pytest.mark.share(6)
@pytest.mark.parametrize("changes", _CHANGES, ids=str)
@pytest.mark.parametrize(
    "config", _GEMV_CONFIGS, ids=lambda c: f"{c.gemm1.block_n}-{c.gemm1.block_k}"
)
def test_gemv_products_equal_float64(
    changes: dict[str, Any], config: MoEConfig, machine: Machine
) -> None:
    problem = replace(_PROBLEM, tokens=2, top_k=3, **changes)
    proof = prove_with_config(config, ("gemv",), problem, "skips", machine, _N_MAJOR)
    assert proof.passed, str(proof)


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["aligned", "gemv"])
@pytest.mark.parametrize("transposed", [("w1", "w2"), ("w1",), ("w2",), ()], ids=str)
def test_launches_depend_on_the_strides_of_each_gemm(name: str, transposed: tuple[str]) -> None:
    problem = replace(_PROBLEM, hidden=256, intermediate=512)
    path = BY_NAME[name](problem)
    config = path.default_config(problem, 1, Device())
    _, weights, _ = make_meta_inputs(problem)
    weights = replace(weights, **{n: n_major_like(getattr(weights, n)) for n in transposed})
    actual = config_for_strides(path, config, weights)
    assert (actual.path, actual.gemm1.block_m) == (name, config.gemm1.block_m)
    assert (actual.gemm1 != config.gemm1) is ("w1" in transposed)
    assert (actual.gemm2 != config.gemm2) is ("w2" in transposed)
    with override_config(config):  # strides do not change an override
        assert config_for_strides(path, config, weights) == config


@pytest.mark.cpu
def test_calls_with_n_major_weights_take_the_aligned_path_from_two_tokens() -> None:
    """Only a call with one token takes the gemv path, unless an override selects this path."""
    problem = replace(_PROBLEM, tokens=8, experts=64, top_k=4)
    x_TH, weights, _ = make_meta_inputs(problem)
    transposed = replace(weights, **{n: n_major_like(getattr(weights, n)) for n in ("w1", "w2")})
    part = TritonExperts(problem)
    expected = {1: "gemv", 2: "aligned", 8: "aligned"}
    assert {t: part.path_name(x_TH[:t], transposed) for t in expected} == expected
    assert {part.path_name(x_TH[:t], weights) for t in expected} == {"gemv"}
    with override_config(_GEMV_CONFIGS[0]):
        assert part.path_name(x_TH, transposed) == "gemv"
    shape = StandardShape(8, problem.top_k)
    specs = BY_NAME["aligned"](problem).specs(8, 16)
    buffers = part.workspace_shapes(shape).buffers()
    assert all(buffers[name].nbytes >= spec.nbytes for name, spec in specs.items())
    quantized = TritonExperts(replace(problem, quant="fp8_w8a8_channel"))
    assert quantized.takes_unquantized(StandardShape(2, problem.top_k))


@pytest.mark.cpu
def test_quantized_and_float32_weights_keep_their_tiles() -> None:
    for changes in ({"quant": "fp8_w8a8_channel"}, {"dtype": torch.float32}, {"hidden": 75}):
        problem = replace(_PROBLEM, **changes)  # type: ignore[arg-type]
        path = BY_NAME["aligned"](problem)
        config = path.default_config(problem, 1, Device())
        _, weights, _ = make_meta_inputs(problem)
        transposed = {n: n_major_like(getattr(weights, n)) for n in ("w1", "w2")}
        assert config_for_strides(path, config, replace(weights, **transposed)) == config


@pytest.mark.cpu
def test_tiles_for_n_major_weights_can_be_launched() -> None:
    problem = replace(_PROBLEM, hidden=2880, intermediate=2880)
    both_n_major = (True, True)
    for tokens in (1, 64, 256, 4096):
        for path, config in (
            ("aligned", aligned_config.default_config(problem, tokens, Device())),
            ("gemv", gemv_config.default_config(problem)),
        ):
            tiles = (
                aligned_config.n_major_config(problem, config, both_n_major, Device())
                if path == "aligned"
                else gemv_config.n_major_config(config, both_n_major)
            )
            with override_config(tiles):  # choose_config raises if the tiles cannot be launched
                assert choose_config(problem, tokens, (path,)) == tiles
