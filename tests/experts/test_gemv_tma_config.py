"""Launches of the `gemv_tma` path: supported problems, tiles, and refusals.

The kernel streams weights with TMA through a ring of stages in shared memory.
"""

from dataclasses import replace

import pytest

from experts.triton.configs.files import TunedConfigs, configs_from_override
from experts.triton.configs.heuristics import make_heuristic_steps, require_config
from experts.triton.configs.lookup import fit_to_problem
from experts.triton.configs.nearest import TunedLayer, borrow_configs
from experts.triton.configs.select import on_device
from experts.triton.gemv_tma import gemv_tma_config
from experts.triton.launch_config import Device, LaunchConfig, MoEConfig, gemms
from experts.triton.paths import ALL_PATHS
from experts.triton.tuning.space import ConfigSpace
from modular_kernel import Problem
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Combine

H200 = Device("NVIDIA H200", tma=True)
QWEN = Problem(
    tokens=1, hidden=2048, intermediate=1408, experts=128, top_k=8, quant="fp8_w8a8_channel"
)
BLOCKS = replace(QWEN, quant="fp8_w8a8_block")
CONFIG = gemv_tma_config.default_config(QWEN, H200)


@pytest.mark.parametrize(
    ("problem", "max_tokens"), [(QWEN, 8), (BLOCKS, 4)], ids=("channel", "block")
)
def test_few_tokens_use_the_path_with_launchable_tiles(problem: Problem, max_tokens: int) -> None:
    assert gemv_tma_config.max_tokens(problem) == max_tokens
    steps = make_heuristic_steps(problem, H200)
    config = steps.choose(1)
    assert config.path == "gemv_tma"
    assert steps.choose(max_tokens) == config
    assert steps.choose(max_tokens + 1).path != "gemv_tma"
    require_config(config, problem, H200, "heuristics")
    other_steps = make_heuristic_steps(problem, H200, ("aligned", "gemv"))
    assert "gemv_tma" not in {config.path for config in other_steps.configs}


@pytest.mark.parametrize(
    ("depth", "block_k", "stages"),
    [(1024, 512, 6), (8192, 512, 4), (10240, 512, 4), (14336, 256, 6), (25600, 128, 2)],
)
def test_the_ring_fills_the_memory_left_by_the_vectors(
    depth: int, block_k: int, stages: int
) -> None:
    """block_k is the largest with which four stages fit in shared memory, if there is such a
    block_k.
    """
    problem = replace(QWEN, intermediate=depth)
    tile = gemv_tma_config.default_config(problem, H200).gemm2
    assert (tile.block_k, tile.num_stages) == (block_k, stages)
    oversized_tile = replace(tile, num_stages=stages + 1)
    violations = list(gemv_tma_config.violations(oversized_tile, gemms(problem)[1], H200))
    assert [violation.what for violation in violations] == ["num_stages"]


def test_short_vectors_with_block_scales_take_the_gemv_path() -> None:
    problem = replace(BLOCKS, intermediate=768)
    assert gemv_tma_config.supports(problem, H200)
    assert make_heuristic_steps(problem, H200).choose(1).path == "gemv"
    channel_problem = replace(problem, quant=QWEN.quant)
    assert make_heuristic_steps(channel_problem, H200).choose(1).path == "gemv_tma"


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float32"},
        {"hidden": 2056},
        {"intermediate": 1416},
        {"intermediate": 26624},
        {"apply_router_weight_on_input": True, "top_k": 1},
        {"combine": Combine.TOPK_WEIGHTED},
        {"top_k": 9},
        {"activation": "relu2"},
        {"quant": "none"},
        {"quant": "int8_w8a8_channel"},
        {"quant": "fp8_w8a8_tensor"},
        {"quant": "fp8_w8a8_block:block=64x64"},
        {"quant": "fp8_w8a8_block", "intermediate": 1424},
    ],
    ids=str,
)
def test_unsupported_problems_take_other_paths(other: dict[str, object]) -> None:
    problem = replace(QWEN, **other)
    assert not gemv_tma_config.supports(problem, H200)
    assert "gemv_tma" not in {pair.path for pair in make_heuristic_steps(problem, H200).configs}


def test_path_requires_sm_90() -> None:
    assert not gemv_tma_config.supports(QWEN, Device("NVIDIA A100"))
    assert "gemv_tma" not in {pair.path for pair in make_heuristic_steps(QWEN, Device()).configs}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_n": 128}, "block_n"),
        ({"block_k": 1024}, "block_k"),
        ({"num_warps": 8}, "num_warps"),
        ({"num_stages": 1}, "num_stages"),
        ({"num_stages": 7}, "num_stages"),
    ],
    ids=str,
)
def test_a_tile_that_its_kernel_cannot_launch_is_refused(
    change: dict[str, int], field: str
) -> None:
    assert fit_to_problem(configs_from_override(CONFIG), QWEN, H200).steps.choose(1) == CONFIG
    gemm1, gemm2 = replace(CONFIG.gemm1, **change), replace(CONFIG.gemm2, **change)
    invalid_config = MoEConfig(gemm1, gemm2, "gemv_tma")
    with pytest.raises(ConfigurationError, match=field):
        fit_to_problem(configs_from_override(invalid_config), QWEN, H200)


def test_a_path_of_a_file_is_limited_to_its_number_of_tokens() -> None:
    """5 tokens are nearer to 1 than to 64, but the path supports only 4."""
    aligned = LaunchConfig(16, 64, 128, 1, 4, 3)
    launches = (((1, CONFIG.gemm1), (64, aligned)), ((1, CONFIG.gemm2), (64, aligned)))
    tuned_configs = TunedConfigs(
        "x", *launches, False, False, paths=((1, "gemv_tma"), (64, "aligned"))
    )
    steps = fit_to_problem(tuned_configs, BLOCKS, H200).steps
    paths = [steps.choose(tokens).path for tokens in (1, 4, 5)]
    assert paths == ["gemv_tma", "gemv_tma", "aligned"]


def test_the_path_of_a_neighbor_is_reused_but_not_its_stages() -> None:
    """The number of stages depends on the depths of the layer's GEMMs."""
    launches = (((1, CONFIG.gemm1),), ((1, CONFIG.gemm2),))
    tuned_configs = TunedConfigs("x", *launches, False, False, paths=((1, "gemv_tma"),))
    problem = replace(QWEN, hidden=3584)
    neighbor = TunedLayer(QWEN.e, QWEN.top_k, QWEN.hidden, QWEN.intermediate, tuned_configs)
    heuristics = make_heuristic_steps(problem, H200, ("aligned",))
    (borrowed,) = borrow_configs([neighbor], problem, H200, heuristics, token_counts=(1,))
    assert borrowed.origin.startswith(neighbor.name)
    assert borrowed.config == gemv_tma_config.default_config(problem, H200) != CONFIG


def test_tuning_candidates_include_all_valid_block_ks() -> None:
    with on_device(H200):
        space = ConfigSpace(QWEN, "X", ALL_PATHS)
        candidates = [config for config in space.candidates(1) if config.path == "gemv_tma"]
        assert not [config for config in space.candidates(64) if config.path == "gemv_tma"]
    assert CONFIG in candidates
    assert {config.gemm1.block_k for config in candidates} == {128, 256, 512}
    for config in candidates:
        require_config(config, QWEN, H200, "tried")
