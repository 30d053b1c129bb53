"""The `grouped_tma` path (persistent grouped GEMMs): supported problems, tiles, and refusals."""

from dataclasses import replace

import pytest
import torch

from experts.triton.configs.files import configs_from_override
from experts.triton.configs.heuristics import make_heuristic_steps, require_config
from experts.triton.configs.lookup import fit_to_problem
from experts.triton.configs.select import override_config
from experts.triton.grouped_tma import grouped_tma_config
from experts.triton.grouped_tma.grouped_tma_path import GroupedTmaPath
from experts.triton.launch_config import Device, LaunchConfig, MoEConfig, gemms
from modular_kernel import Problem
from modular_kernel.errors import ConfigurationError
from modular_kernel.tensors import ExpertWeights

H200 = Device("NVIDIA H200", tma=True)
MIXTRAL = Problem(tokens=1, hidden=4096, intermediate=14336, experts=8, top_k=2)
SCHEMES = ("none", "fp8_w8a8_channel", "fp8_w8a8_block")


@pytest.mark.parametrize("quant", SCHEMES)
def test_many_rows_use_the_path_with_launchable_tiles(quant: str) -> None:
    problem = replace(MIXTRAL, quant=quant)
    steps = make_heuristic_steps(problem, H200)
    min_tokens = grouped_tma_config.min_tokens(problem)
    max_narrow = grouped_tma_config.max_narrow_tokens(problem)
    assert 0 < min_tokens < max_narrow
    assert steps.choose(min_tokens - 1).path != "grouped_tma"
    narrow, wide = steps.choose(min_tokens), steps.choose(max_narrow + 1)
    assert narrow == steps.choose(max_narrow)
    assert wide == steps.choose(1 << 40)
    assert (narrow.gemm1.block_n < wide.gemm1.block_n) == (quant == "none")
    for config in (narrow, wide):
        assert config.path == "grouped_tma"
        require_config(config, problem, H200, "heuristics")
        for tile, gemm in zip((config.gemm1, config.gemm2), gemms(problem), strict=True):
            mode = grouped_tma_config.MODE_BY_SCHEME[quant]
            assert not list(grouped_tma_config.violations(tile, gemm, mode, H200))
    aligned_steps = make_heuristic_steps(problem, H200, ("aligned",))
    assert {config.path for config in aligned_steps.configs} == {"aligned"}


def test_only_long_rows_are_gathered() -> None:
    """Gathered rows must have at least as many steps as the largest number of stages of a tile."""
    assert grouped_tma_config.gathers_tokens(MIXTRAL)
    assert grouped_tma_config.gathers_tokens(replace(MIXTRAL, quant="fp8_w8a8_channel"))
    assert not grouped_tma_config.gathers_tokens(replace(MIXTRAL, quant="fp8_w8a8_block"))
    for quant, max_short in (("none", 256), ("fp8_w8a8_channel", 512)):
        problem = replace(MIXTRAL, quant=quant)
        assert not grouped_tma_config.gathers_tokens(replace(problem, hidden=max_short))
        assert grouped_tma_config.gathers_tokens(replace(problem, hidden=max_short + 16))
        gemm = gemms(problem)[0]
        num_steps = (max_short + 16) * gemm.a_bits // 8 // grouped_tma_config.BOX_BYTES + 1
        gemm1 = grouped_tma_config.default_config(problem).gemm1
        tile = replace(gemm1, block_n=64, num_stages=num_steps + 2)
        mode = grouped_tma_config.MODE_BY_SCHEME[quant]
        assert list(grouped_tma_config.violations(tile, gemm, mode, H200))


def test_only_aligned_tokens_are_gathered() -> None:
    """Calls with unaligned tokens take another path, unless tokens are permuted first."""
    for hidden in (512, 128):
        problem = replace(MIXTRAL, hidden=hidden, intermediate=64, experts=2)
        shapes = ((2, problem.w1_rows, hidden), (2, hidden, 64))
        weights = ExpertWeights(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes))
        path = GroupedTmaPath(problem)
        assert path.permutes_tokens == (hidden == 128)
        assert ("permuted_x" in path.specs(4, 128)) == path.permutes_tokens
        buffer = torch.zeros(4, hidden + 12, dtype=torch.bfloat16)
        x_TH = buffer[:, :hidden].contiguous()
        assert path.supports_tensors(weights, x_TH)
        # The stride of rows is not a multiple of 16 bytes.
        assert path.supports_tensors(weights, buffer[:, 8:-4]) == path.permutes_tokens
        assert path.supports_tensors(weights, torch.zeros(4, hidden + 16).bfloat16()[:, 8:-8])
        shifted_x = buffer.view(-1)[4 : 4 + 2 * hidden].view(2, hidden)
        assert path.supports_tensors(weights, shifted_x) == path.permutes_tokens
        shifted_w1 = buffer.new_zeros(2 * 128 * hidden + 4)[4:].view(shapes[0])
        assert not path.supports_tensors(ExpertWeights(shifted_w1, weights.w2), x_TH)


@pytest.mark.parametrize(
    ("stages", "half", "columns", "slots"),
    [(4, 128, 128, 1), (3, 128, 128, 2), (4, 128, 64, 2), (6, 64, 64, 2), (6, 64, 32, 2)],
)
def test_outputs_are_staged_in_the_memory_left_by_the_ring(
    stages: int, half: int, columns: int, slots: int
) -> None:
    """Every valid tile leaves memory for a box of each warpgroup in 227 KiB of shared memory."""
    tile = LaunchConfig(grouped_tma_config.BLOCK_M, 2 * half, 64, 8, 4, stages)
    assert grouped_tma_config.num_staging_buffers(tile, half, columns) == slots
    ring_bytes = stages * (grouped_tma_config.BLOCK_M + 2 * half) * grouped_tma_config.BOX_BYTES
    staging_bytes = slots * 2 * 64 * columns * 2
    assert ring_bytes + staging_bytes <= H200.shared
    assert slots == 2 or ring_bytes + 2 * staging_bytes > H200.shared
    (_, gemm2) = gemms(MIXTRAL)
    assert not list(grouped_tma_config.violations(tile, gemm2, "plain", H200))


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float32"},
        {"hidden": 4100},
        {"intermediate": 1004},
        {"apply_router_weight_on_input": True, "top_k": 1},
        {"quant": "int4_w4a16_group"},
        {"quant": "fp8_w8a8_tensor"},
        {"quant": "fp8_w8a8_block:block=64x64"},
        {"quant": "fp8_w8a8_block", "intermediate": 14352},
    ],
    ids=str,
)
def test_unsupported_problems_take_the_aligned_path(other: dict[str, object]) -> None:
    problem = replace(MIXTRAL, **other)
    assert not grouped_tma_config.supports(problem, H200)
    steps = make_heuristic_steps(problem, H200)
    assert "grouped_tma" not in {config.path for config in steps.configs}


def test_path_requires_sm_90() -> None:
    assert not grouped_tma_config.supports(MIXTRAL, Device("NVIDIA A100"))
    assert not grouped_tma_config.supports(MIXTRAL, Device())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_m": 64}, "block_m"),
        ({"block_n": 32}, "block_n"),
        ({"block_k": 32}, "block_k"),
        ({"num_warps": 8}, "num_warps"),
        ({"num_stages": 5}, "shared memory"),
    ],
    ids=str,
)
def test_a_tile_that_its_kernel_cannot_launch_is_refused(
    change: dict[str, int], message: str
) -> None:
    tile = LaunchConfig(128, 128, 64, 8, 4, 4)
    wide = replace(tile, block_n=256)
    assert fit_to_problem(
        configs_from_override(MoEConfig(tile, wide, "grouped_tma")), MIXTRAL, H200
    )
    invalid_config = MoEConfig(replace(tile, **change), replace(wide, **change), "grouped_tma")
    with pytest.raises(ConfigurationError, match=message):
        fit_to_problem(configs_from_override(invalid_config), MIXTRAL, H200)


def test_invalid_pairs_of_launches_are_refused() -> None:
    tile = LaunchConfig(128, 128, 64, 8, 4, 4)
    with pytest.raises(ConfigurationError, match="128 and 64"):
        MoEConfig(tile, replace(tile, block_m=64), "aligned")
    with (
        pytest.raises(ConfigurationError, match="no-such-path"),
        override_config(MoEConfig(tile, tile, "no-such-path")),
    ):
        pass
