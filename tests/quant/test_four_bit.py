"""The Triton kernel for few rows and 4-bit weights (path aligned_w4), verified with blocks of 8 and
16 rows.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from experts.triton.aligned_w4 import aligned_w4_config
from experts.triton.aligned_w4.aligned_w4_config import AlignedW4Config
from experts.triton.aligned_w4.aligned_w4_path import AlignedW4Path
from experts.triton.batched import BatchedTritonExperts
from experts.triton.configs.files import parse_config_file
from experts.triton.configs.heuristics import make_heuristic_steps
from experts.triton.configs.lookup import fit_to_problem
from experts.triton.configs.select import choose_config, override_config
from experts.triton.launch_config import Device, LaunchConfig, MoEConfig
from experts.triton.path import Path, PathCall
from experts.triton.paths import ALL_PATHS
from experts.triton.standard import TritonExperts
from modular_kernel.catalog import make_kernel
from modular_kernel.errors import ConfigurationError
from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.spec.problem import Combine, Machine, Problem
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.testing.random_inputs import random_inputs

_NO_EP = "MoEPrepareAndFinalizeNoEP"
_OAI = "swiglu_oai:alpha=1.702,limit=1.2,interleaved=true"
_PATHS = ("aligned", "aligned_w4")
_INT4 = "int4_w4a16_group"
_REPACKED = "mxfp4_w4a16:repacked=true"
# The widths are not multiples of a block, and the depths not multiples of a step.
_BASE = replace(BASE, hidden=160, intermediate=96, dtype=torch.bfloat16, quant=_INT4)

_CASES: tuple[tuple[dict[str, Any], str, int], ...] = (
    ({"tokens": 2}, "uniform", 8),
    ({"tokens": 4, "hidden": 256, "intermediate": 256}, "uniform", 8),
    ({"tokens": 5, "quant": f"{_INT4}:zero_points=true", "hidden": 256, "intermediate": 128},
     "skips", 8),
    ({"tokens": 4, "quant": f"{_INT4}:group=64,zero_points=true", "hidden": 192,
      "intermediate": 64, "activation": _OAI, "bias": True}, "duplicates", 8),
    ({"tokens": 6, "quant": f"{_INT4}:group=32", "dtype": torch.float16, "activation": "relu2",
      "bias": True}, "out_of_range", 8),
    ({"tokens": 3, "quant": f"{_INT4}:group=32,zero_points=true", "dtype": torch.float16},
     "uniform", 8),
    ({"tokens": 7, "quant": "mxfp4_w4a16"}, "uniform", 8),
    ({"tokens": 7, "quant": "nvfp4_w4a16", "activation": _OAI, "bias": True}, "uniform", 8),
    ({"tokens": 21, "quant": "nvfp4_w4a16", "dtype": torch.float16}, "all_to_one", 16),
    ({"tokens": 7, "quant": "mxfp4_w4a16", "dtype": torch.float16, "activation": _OAI,
      "bias": True}, "skips", 8),
    ({"tokens": 5, "quant": "mxfp4_w4a16", "combine": Combine.TOPK_WEIGHTED}, "all_skipped", 8),
    ({"tokens": 5, "combine": Combine.TOPK_UNWEIGHTED, "expert_map": True, "local_experts": 3},
     "skips", 8),
    ({"tokens": 4, "top_k": 1, "apply_router_weight_on_input": True, "bias": True}, "uniform", 8),
    ({"tokens": 14, "quant": "mxfp4_w4a16"}, "all_to_one", 8),
    ({"tokens": 36, "quant": f"{_INT4}:zero_points=true"}, "zipf", 16),
    ({"tokens": 21, "quant": "mxfp4_w4a16", "activation": _OAI}, "all_to_one", 16),
    ({"tokens": 7, "quant": _REPACKED}, "uniform", 8),
    ({"tokens": 7, "quant": _REPACKED, "dtype": torch.float16, "activation": _OAI,
      "bias": True}, "skips", 8),
    ({"tokens": 21, "quant": _REPACKED, "hidden": 256, "activation": _OAI}, "all_to_one", 16),
    ({"tokens": 60, "quant": "mxfp4_w4a16", "top_k": 1, "hidden": 64}, "zipf", 16),
    ({"tokens": 4, "quant": "mxfp4_w4a16", "batch_invariant": True}, "uniform", 16),
)  # fmt: skip


@pytest.mark.share(6)
@pytest.mark.parametrize(("changes", "routing", "block_m"), _CASES)
def test_cases_are_proven(
    changes: dict[str, Any],
    routing: str,
    block_m: int,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = set[int]()
    monkeypatch.setattr(AlignedW4Path, "multiply", _record_block_m(blocks))
    problem = replace(_BASE, **changes)
    case = Case(_NO_EP, "TritonExperts", problem, routing)
    # Without the override, calls with few tokens would use another path.
    with override_config(aligned_w4_config.default_config(problem, problem.tokens)):
        proof = prove(case, machine)
    assert proof.passed, str(proof)
    assert blocks == {block_m}


# Every number that a tuned file, an override or `mk tune` can change, at its limits.
_EXTREME_LAUNCHES = (
    (AlignedW4Config(8, 32, 32, 2, 1), f"{_INT4}:group=64,zero_points=true"),
    (AlignedW4Config(8, 64, 64, 8, 4, 96), "mxfp4_w4a16"),
    (AlignedW4Config(16, 128, 128, 1, 2, 255), f"{_INT4}:group=64,zero_points=true"),
    (AlignedW4Config(16, 16, 128, 16, 3), "mxfp4_w4a16"),
)


@pytest.mark.parametrize(("config", "quant"), _EXTREME_LAUNCHES, ids=str)
def test_overrides_reach_the_launch(
    config: AlignedW4Config, quant: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = list[AlignedW4Config]()
    multiply = AlignedW4Path.multiply

    def record_and_multiply(self: AlignedW4Path, *args: Any) -> None:
        launches.append(args[2])
        multiply(self, *args)

    monkeypatch.setattr(AlignedW4Path, "multiply", record_and_multiply)
    problem = replace(_BASE, tokens=2, quant=quant, hidden=64, intermediate=128, experts=3)
    with override_config(MoEConfig(config, config, "aligned_w4")):
        proof = prove(Case(_NO_EP, "TritonExperts", problem, "uniform"), machine)
    assert proof.passed, str(proof)
    assert set(launches) == {config}


@pytest.mark.parametrize(
    ("change", "field_name"),
    [
        ({"block_m": 32}, "block_m"),
        ({"block_n": 8}, "block_n"),
        ({"block_n": 48}, "block_n"),
        ({"block_k": 16}, "block_k"),
        ({"block_k": 256}, "block_k"),
        ({"num_warps": 3}, "num_warps"),
        ({"num_stages": 0}, "num_stages"),
        ({"registers": 256}, "registers"),
    ],
    ids=str,
)
def test_invalid_launches_are_refused(change: dict[str, int], field_name: str) -> None:
    valid = AlignedW4Config(8, 64, 128, 2, 3)
    invalid_config = MoEConfig(replace(valid, **change), replace(valid, **change), "aligned_w4")
    with (
        override_config(invalid_config),
        pytest.raises(ConfigurationError, match=f"override_config.*GEMM 1 {field_name}"),
    ):
        choose_config(_BASE, 4, _PATHS)


def test_tiles_of_another_path_are_refused() -> None:
    tile = LaunchConfig(16, 64, 128, 1, 4, 3)
    with (
        override_config(MoEConfig(tile, tile, "aligned_w4")),
        pytest.raises(ConfigurationError, match="got LaunchConfig, need AlignedW4Config"),
    ):
        choose_config(_BASE, 4, _PATHS)


def _record_block_m(blocks: set[int]) -> Callable[..., None]:
    multiply = AlignedW4Path.multiply

    def record_and_multiply(self: AlignedW4Path, *args: Any) -> None:
        blocks.add(args[2].block_m)
        multiply(self, *args)

    return record_and_multiply


def test_supports_returns_whether_a_problem_is_supported() -> None:
    assert aligned_w4_config.supports(_BASE)
    assert aligned_w4_config.supports(replace(_BASE, quant="mxfp4_w4a16", dtype=torch.float16))
    assert aligned_w4_config.supports(replace(_BASE, quant="mxfp4_w4a16", batch_invariant=True))
    for changes in (
        {"batch_invariant": True},
        {"quant": "none"},
        {"quant": "int8_w8a16_group:group=32"},
        {"dtype": torch.float32},
        {"hidden": 176},  # not a multiple of 32
        {"quant": f"{_INT4}:group=48", "hidden": 192},
    ):
        assert not aligned_w4_config.supports(replace(_BASE, **changes)), changes


def test_misaligned_weights_use_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problem = replace(_BASE, tokens=3)
    x_TH, unquantized_weights, routing = random_inputs(replace(problem, quant="none"), device)
    weights = quantize_weights(unquantized_weights, problem)
    blocks = set[int]()
    monkeypatch.setattr(AlignedW4Path, "multiply", _record_block_m(blocks))
    expected = make_kernel(_NO_EP, "TritonExperts", problem)(x_TH, weights, routing)
    assert blocks == {8}
    blocks.clear()
    storage = torch.empty(weights.w1.numel() + 1, dtype=torch.uint8, device=device)
    shifted = storage[1:].view_as(weights.w1).copy_(weights.w1)
    misaligned = replace(weights, w1=shifted)
    output = make_kernel(_NO_EP, "TritonExperts", problem)(x_TH, misaligned, routing)
    assert not blocks
    torch.testing.assert_close(output.float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_more_rows_use_taller_blocks() -> None:
    mixtral = Problem(tokens=16, hidden=4096, intermediate=14336, experts=8, top_k=2, quant=_INT4)
    assert aligned_w4_config.choose_block_m(mixtral, num_pairs=1) == 8
    assert aligned_w4_config.choose_block_m(mixtral, num_pairs=96) == 8
    assert aligned_w4_config.choose_block_m(mixtral, num_pairs=97) == 16


def test_number_of_active_experts_is_estimated() -> None:
    mixtral = Problem(tokens=16, hidden=4096, intermediate=14336, experts=8, top_k=2, quant=_INT4)
    distribution = aligned_w4_config.RowDistribution.from_call
    assert distribution(mixtral, num_pairs=2).active_experts == pytest.approx(2)
    assert distribution(mixtral, num_pairs=4).active_experts == pytest.approx(3.5)
    half_of_experts = replace(mixtral, expert_map=True, local_experts=4)
    assert distribution(half_of_experts, num_pairs=4).active_experts == pytest.approx(1.75)
    assert distribution(replace(mixtral, top_k=8), num_pairs=8).active_experts == 8


@pytest.mark.parametrize("tokens", [1, 7, 64, 400])
def test_explain_states_the_launches(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(_BASE, tokens=tokens, hidden=256, intermediate=384)
    launches = list[tuple[MoEConfig, bool]]()

    def record_and_multiply(self: Path, call: PathCall) -> None:
        experts = kernel.experts
        assert isinstance(experts, TritonExperts)
        launches.append((call.config, experts._reads_prepared(call.weights, tokens)))

    for path in ALL_PATHS:
        monkeypatch.setattr(path, "run", record_and_multiply)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x_TH, unquantized_weights, routing = random_inputs(replace(problem, quant="none"), device)
    kernel = make_kernel(_NO_EP, "TritonExperts", problem)
    kernel(x_TH, quantize_weights(unquantized_weights, problem), routing)
    ((config, prepared),) = set(launches)
    space = TritonExperts.tunable(problem)
    if prepared:
        space = space.for_prepared_weights()
    explanation = space.explain(tokens)
    assert f"  path: {config.path}\n" in explanation
    for index, launch in enumerate((config.gemm1, config.gemm2), 1):
        assert f"  GEMM {index}: {launch}" in explanation
    assert "path: aligned\n" in BatchedTritonExperts.tunable(problem).explain(tokens)


def test_small_tiles_of_other_tuned_files_are_replaced() -> None:
    """Tiles are replaced for integers with up to 12 rows per expert, and for mxfp4 with block_m up
    to 32 and any number of rows.
    """
    integers = Problem(tokens=1, hidden=4096, intermediate=14336, experts=8, top_k=2, quant=_INT4)
    mxfp4 = replace(integers, quant="mxfp4_w4a16")

    def choose_launches(problem: Problem, tokens: int, block_m: int) -> MoEConfig:
        launch = {
            "BLOCK_SIZE_M": block_m,
            "BLOCK_SIZE_N": 64,
            "BLOCK_SIZE_K": 32,
            "GROUP_SIZE_M": 1,
        }
        tuned_configs = parse_config_file(json.dumps({"1": launch}), "x")
        source = fit_to_problem(tuned_configs, problem, Device())
        return source.launch_steps(problem, Device(), _PATHS).choose(tokens)

    assert choose_launches(integers, 48, 16) == aligned_w4_config.default_config(integers, 48)
    assert choose_launches(integers, 49, 16).path == "aligned"
    assert choose_launches(integers, 4, 32).path == "aligned"
    for tokens in (1, 7, 24, 25, 1 << 20):
        assert choose_launches(mxfp4, tokens, 32) == aligned_w4_config.default_config(mxfp4, tokens)
    assert choose_launches(mxfp4, 1, 64).path == "aligned"


@pytest.mark.parametrize("zeros", ["", ":zero_points=true"])
@pytest.mark.parametrize("experts", [1, 8, 60, 256])
@pytest.mark.parametrize("top_k", [1, 8])
def test_default_launches_change_only_at_breakpoints(zeros: str, experts: int, top_k: int) -> None:
    layer = {"experts": experts, "top_k": min(top_k, experts), "hidden": 2048, "intermediate": 768}
    for quant in (f"{_INT4}{zeros}", "mxfp4_w4a16"):
        problem = replace(_BASE, quant=quant, **layer)
        breakpoints = set(aligned_w4_config.breakpoints(problem))
        end = min(aligned_w4_config.max_tokens(problem), 2000)
        for tokens in range(1, end):
            config, next_config = (
                aligned_w4_config.default_config(problem, t) for t in (tokens, tokens + 1)
            )
            assert config == next_config or tokens in breakpoints, tokens


def test_batch_invariant_blocks_do_not_depend_on_tokens() -> None:
    layer = replace(_BASE, quant="mxfp4_w4a16", batch_invariant=True)
    configs = {aligned_w4_config.default_config(layer, tokens) for tokens in (1, 4, 64, 4096)}
    assert len(configs) == 1
    assert configs == set(make_heuristic_steps(layer, Device(), _PATHS).configs)
    assert {aligned_w4_config.choose_block_m(layer, pairs) for pairs in (1, 4096)} == {16}
