"""The `gemv_w4` path of TritonExperts (4-bit weights), forced for few tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from forced_path_cases import prove_with_config

from experts.triton.configs.heuristics import config_violations, is_launchable, make_heuristic_steps
from experts.triton.configs.select import override_config
from experts.triton.gemv_w4 import gemv_w4_config
from experts.triton.gemv_w4.gemv_w4_config import GemvW4Config
from experts.triton.gemv_w4.gemv_w4_path import GemvW4Path
from experts.triton.launch_config import Device, MoEConfig
from modular_kernel.catalog import make_kernel
from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.spec.problem import Combine, Machine
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.testing.random_inputs import random_inputs

_NO_EP = "MoEPrepareAndFinalizeNoEP"
_PATHS = ("aligned", "gemv_w4")
_OAI = "swiglu_oai:alpha=1.702,limit=1.2,interleaved=true"
_INT4, _ZEROS = "int4_w4a16_group", "zero_points=true"
_MXFP4 = "mxfp4_w4a16"
_REPACKED = "mxfp4_w4a16:repacked=true"


def _make_config(first: tuple[int, int, int, int], second: tuple[int, int, int, int]) -> MoEConfig:
    """Return launches from (block_n, block_k, warps, stages) for each GEMM."""
    return MoEConfig(GemvW4Config(*first), GemvW4Config(*second), GemvW4Path.name)


# _LONG and _DEEP take several steps along K, _ONCE takes one, and _MANY has more warps than blocks.
_LONG = _make_config((32, 128, 1, 1), (64, 128, 2, 2))
_DEEP = _make_config((64, 128, 1, 2), (128, 256, 1, 3))
_ONCE = _make_config((64, 512, 4, 1), (128, 256, 4, 1))
_MANY = _make_config((64, 1024, 8, 2), (128, 1024, 8, 2))
_NARROW = _make_config((8, 256, 8, 1), (32, 256, 8, 4))  # 8 columns of gate and 8 of up in one MMA
# GEMM 2 has 8 columns, with two halves of K in one MMA. A program covers K at once, or in steps
# with one or three stages.
_AT_ONCE = _make_config((32, 256, 4, 1), (8, 1024, 8, 1))
_IN_STEPS = _make_config((32, 256, 4, 1), (8, 512, 2, 1))
_STAGED = _make_config((32, 256, 4, 1), (8, 256, 1, 3))
# In GEMM 2, two warps process one pair.
_TWO_WARPS_PER_PAIR = _make_config((32, 256, 4, 1), (8, 256, 8, 2))
# N is not a multiple of a block, and K is not a multiple of a chunk.
_BASE = replace(BASE, hidden=160, intermediate=96, dtype=torch.bfloat16, quant=_INT4)

_CASES: tuple[tuple[dict[str, Any], str, MoEConfig], ...] = (
    ({"tokens": 1}, "uniform", _LONG),
    ({"tokens": 2, "hidden": 416, "top_k": 3}, "skips", _DEEP),
    ({"tokens": 1, "hidden": 192, "intermediate": 608, "top_k": 6, "experts": 7}, "uniform",
     _ONCE),
    ({"tokens": 1, "top_k": 8, "experts": 9}, "uniform", _MANY),
    ({"tokens": 2, "quant": f"{_INT4}:{_ZEROS}", "hidden": 288, "intermediate": 224},
     "skips", _LONG),
    ({"tokens": 2, "quant": f"{_INT4}:group=64,{_ZEROS}", "hidden": 192, "activation": _OAI,
      "bias": True}, "duplicates", _ONCE),
    ({"tokens": 1, "quant": f"{_INT4}:group=32", "dtype": torch.float16, "activation": "relu2",
      "bias": True}, "uniform", _MANY),
    ({"tokens": 2, "quant": f"{_INT4}:group=32,{_ZEROS}", "dtype": torch.float16,
      "intermediate": 288}, "uniform", _DEEP),
    ({"tokens": 1, "quant": f"{_INT4}:group=96", "hidden": 192, "intermediate": 288}, "uniform",
     _ONCE),
    # One group covers the whole depth of GEMM 2.
    ({"tokens": 1, "quant": f"{_INT4}:group=256,{_ZEROS}", "hidden": 512, "intermediate": 160},
     "uniform", _ONCE),
    ({"tokens": 1, "quant": _MXFP4, "hidden": 160, "intermediate": 288}, "uniform", _LONG),
    ({"tokens": 4, "quant": _MXFP4, "top_k": 4}, "skips", _ONCE),
    ({"tokens": 2, "quant": _MXFP4, "dtype": torch.float16, "activation": _OAI, "bias": True},
     "skips", _DEEP),
    ({"tokens": 2, "quant": _MXFP4, "combine": Combine.TOPK_WEIGHTED}, "all_skipped", _MANY),
    ({"tokens": 2, "combine": Combine.TOPK_UNWEIGHTED, "expert_map": True, "local_experts": 3},
     "skips", _LONG),
    ({"tokens": 2, "combine": Combine.TOPK_WEIGHTED, "dtype": torch.float16}, "skips", _ONCE),
    ({"tokens": 2, "expert_map": True, "local_experts": 3, "bias": True}, "uniform", _DEEP),
    ({"tokens": 2, "top_k": 1, "apply_router_weight_on_input": True, "bias": True}, "uniform",
     _LONG),
    ({"tokens": 2, "inplace": True, "routed_scaling_factor": 2.5}, "skips", _ONCE),
    ({"tokens": 2, "top_k": 3, "ids_dtype": torch.int64}, "out_of_range", _MANY),
    ({"tokens": 5, "chunk_tokens": 4, "quant": _MXFP4}, "zipf", _ONCE),
    ({"tokens": 2, "quant": f"{_INT4}:{_ZEROS}", "hidden": 288, "activation": _OAI,
      "bias": True}, "skips", _NARROW),
    ({"tokens": 1, "quant": _MXFP4, "hidden": 256, "intermediate": 100}, "uniform", _NARROW),
    ({"tokens": 2, "intermediate": 992, "top_k": 4}, "skips", _AT_ONCE),
    ({"tokens": 1, "quant": f"{_INT4}:{_ZEROS}", "intermediate": 608, "top_k": 3, "bias": True},
     "uniform", _AT_ONCE),
    ({"tokens": 2, "quant": f"{_INT4}:{_ZEROS}", "intermediate": 608, "top_k": 3}, "skips",
     _IN_STEPS),
    ({"tokens": 1, "quant": f"{_INT4}:group=64,{_ZEROS}", "intermediate": 192,
      "dtype": torch.float16}, "uniform", _IN_STEPS),
    ({"tokens": 2, "quant": f"{_INT4}:group=32", "intermediate": 288, "bias": True}, "duplicates",
     _STAGED),
    ({"tokens": 2, "quant": _MXFP4, "intermediate": 416, "top_k": 3}, "skips", _STAGED),
    ({"tokens": 1, "quant": _MXFP4, "intermediate": 288, "combine": Combine.TOPK_WEIGHTED},
     "uniform", _IN_STEPS),
    # N has whole blocks, so that the compiler knows the alignment of rows of weights.
    ({"tokens": 2, "quant": f"{_INT4}:{_ZEROS}", "hidden": 256, "intermediate": 192,
      "activation": _OAI, "bias": True}, "skips", _LONG),
    ({"tokens": 1, "quant": _MXFP4, "hidden": 256, "intermediate": 192}, "uniform", _LONG),
    ({"tokens": 1, "quant": _REPACKED, "hidden": 160, "intermediate": 288}, "uniform", _LONG),
    ({"tokens": 2, "quant": _REPACKED, "top_k": 3, "activation": _OAI, "bias": True}, "skips",
     _DEEP),
    ({"tokens": 2, "quant": _REPACKED, "dtype": torch.float16, "bias": True}, "uniform", _ONCE),
    ({"tokens": 1, "quant": _REPACKED, "hidden": 256, "intermediate": 104}, "uniform", _NARROW),
    ({"tokens": 2, "quant": _REPACKED, "intermediate": 416, "top_k": 3}, "skips", _STAGED),
    ({"tokens": 2, "quant": _REPACKED, "hidden": 96, "intermediate": 1096, "top_k": 4,
      "experts": 7, "bias": True}, "skips", _TWO_WARPS_PER_PAIR),
    ({"tokens": 1, "quant": _REPACKED, "hidden": 64, "intermediate": 768, "top_k": 4,
      "experts": 5}, "uniform", _TWO_WARPS_PER_PAIR),  # two warps share three whole blocks
    ({"tokens": 1, "quant": _MXFP4, "hidden": 104, "intermediate": 608, "bias": True,
      "combine": Combine.TOPK_WEIGHTED}, "uniform", _TWO_WARPS_PER_PAIR),
    ({"tokens": 1, "quant": f"{_INT4}:group=32,{_ZEROS}", "intermediate": 288, "bias": True,
      "apply_router_weight_on_input": True, "top_k": 1}, "uniform", _TWO_WARPS_PER_PAIR),
)  # fmt: skip


@pytest.mark.share(6)
@pytest.mark.parametrize(("changes", "routing", "pair"), _CASES)
def test_cases_are_proven(
    changes: dict[str, Any], routing: str, pair: MoEConfig, machine: Machine
) -> None:
    proof = prove_with_config(pair, _PATHS, replace(_BASE, **changes), routing, machine)
    assert proof.passed, str(proof)


@pytest.mark.parametrize(
    "pair", [_TWO_WARPS_PER_PAIR, _LONG], ids=["two warps per pair", "roaming"]
)
def test_the_weight_of_a_skipped_pair_is_not_used(pair: MoEConfig) -> None:
    """A warp either processes a single pair, or several pairs one after another ("roaming")."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problem = replace(_BASE, tokens=2, quant=_REPACKED, top_k=2, bias=True)
    x_TH, weights, routing = random_inputs(problem, device)
    routing.topk_ids_TK[0, 1] = routing.topk_ids_TK[1, 0] = -1
    routing.topk_weights_TK[routing.topk_ids_TK < 0] = 0.5
    kernel = make_kernel(_NO_EP, "TritonExperts", problem)
    with override_config(pair):
        expected = kernel(x_TH, weights, routing).clone()
        routing.topk_weights_TK[routing.topk_ids_TK < 0] = torch.nan
        assert torch.equal(kernel(x_TH, weights, routing), expected)


@pytest.mark.parametrize("path", ["gemv_w4", "aligned_w4"])
def test_smallest_and_largest_e8m0_scales(path: str) -> None:
    """Values with the E8M0 codes 0 and 1 (scales of 2^-127 and 2^-126) are negligible. Scales of
    2^50 and more must give NaN or infinity instead of wrapping around.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problem = replace(_BASE, tokens=2, quant=_MXFP4)
    x_TH, unquantized, routing = random_inputs(replace(problem, quant="none"), device)
    weights = quantize_weights(unquantized, problem)
    paths = _PATHS if path == "gemv_w4" else (path,)
    config = make_heuristic_steps(problem, Device(), paths).choose(1)
    assert config.path == path

    def compute_output(experts: str, scale: torch.Tensor) -> torch.Tensor:
        with override_config(config):
            kernel = make_kernel(_NO_EP, experts, problem)
            return kernel(x_TH, replace(weights, w1_scale=scale), routing)

    assert weights.w1_scale is not None
    tiny, huge = weights.w1_scale.clone(), weights.w1_scale.clone()
    tiny[:, 0::4, :2], tiny[:, 1::4, 0], huge[:, 5] = 0, 1, 250
    actual, expected = (compute_output(part, tiny) for part in ("TritonExperts", "TorchExperts"))
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    assert not compute_output("TritonExperts", huge).isfinite().any()


def test_only_4_bit_problems_of_whole_chunks_are_supported() -> None:
    assert gemv_w4_config.supports(_BASE)
    assert gemv_w4_config.supports(replace(_BASE, quant=_MXFP4, dtype=torch.float16))
    for changes in (
        {"dtype": torch.float32},
        {"hidden": 176},  # not a multiple of 32
        {"quant": f"{_INT4}:group=48", "hidden": 192},
        {"top_k": 65, "experts": 80},
    ):
        assert not gemv_w4_config.supports(replace(_BASE, **changes)), changes


def test_few_tokens_use_the_gemv_w4_path() -> None:
    for quant in (_INT4, f"{_INT4}:{_ZEROS}", _MXFP4):
        for depth in (768, 2048, 2880, 14336):
            problem = replace(_BASE, hidden=depth, intermediate=depth, experts=64, quant=quant)
            max_tokens = gemv_w4_config.max_tokens(problem)
            steps = make_heuristic_steps(problem, Device(), _PATHS)
            assert steps.choose(max_tokens + 1).path == "aligned"
            for tokens in range(1, max_tokens + 1):
                config = steps.choose(tokens)
                assert config == gemv_w4_config.default_config(problem, tokens)
                assert is_launchable(config, problem, Device())


def test_only_gated_first_gemms_can_use_8_columns() -> None:
    assert is_launchable(_NARROW, _BASE, Device())
    violations = config_violations(_NARROW, replace(_BASE, activation="relu2"), Device())
    assert [(gemm, violation.what) for gemm, violation in violations] == [("GEMM 1", "block_n")]


@pytest.mark.parametrize("quant", [_INT4, _MXFP4])
def test_second_gemms_use_at_least_8_columns(quant: str) -> None:
    for columns in (4, 8, 16):
        config = _make_config((32, 256, 4, 1), (columns, 256, 4, 1))
        assert is_launchable(config, replace(_BASE, quant=quant), Device()) is (columns >= 8)


@pytest.mark.parametrize(
    ("quant", "hidden", "intermediate", "top_k", "tokens", "tile"),
    [
        (_INT4, 2048, 768, 8, 1, (8, 1024, 8)),
        (_INT4, 2048, 768, 8, 2, (16, 256, 8)),  # four programs on each SM
        (_INT4, 2048, 1408, 6, 1, (16, 256, 8)),  # more blocks than warps
        (_INT4, 2560, 1536, 6, 1, (8, 512, 8)),
        (_INT4, 2880, 2880, 4, 1, (8, 512, 8)),
        (f"{_INT4}:group=32", 2880, 2880, 4, 1, (16, 256, 8)),
        (_MXFP4, 2048, 768, 8, 1, (8, 256, 8)),
        (f"{_INT4}:group=32", 2048, 768, 8, 1, (8, 256, 8)),
        (_MXFP4, 2048, 1024, 8, 1, (16, 256, 8)),  # more blocks than can be in flight
        (_MXFP4, 2880, 2880, 4, 1, (8, 256, 8)),
        (_INT4, 4096, 1536, 8, 1, (16, 256, 8)),
    ],
)
def test_default_tiles_of_the_second_gemm(
    quant: str, hidden: int, intermediate: int, top_k: int, tokens: int, tile: tuple[int, int, int]
) -> None:
    problem = replace(
        _BASE, quant=quant, hidden=hidden, intermediate=intermediate, top_k=top_k, experts=128
    )
    gemm2 = gemv_w4_config.default_config(problem, tokens).gemm2
    assert (gemm2.block_n, gemm2.block_k, gemm2.num_warps) == tile


def test_narrow_tiles_use_fewer_registers() -> None:
    """With these registers, as many programs are resident on an SM as `gemv_w4_config` assumes."""
    narrow, wide = GemvW4Config(8, 512, 8, 1), GemvW4Config(16, 512, 8, 1)
    for gemm in (1, 2):
        assert gemv_w4_config.max_registers(wide, gemm, words_stay_in_lanes=True) == 128
    assert gemv_w4_config.max_registers(narrow, 1, words_stay_in_lanes=True) * 32 * 32 <= 1 << 16
    assert gemv_w4_config.max_registers(narrow, 2, words_stay_in_lanes=True) * 32 * 24 <= 1 << 16
    deep = replace(narrow, block_k=1024)
    assert gemv_w4_config.max_registers(deep, 2, words_stay_in_lanes=True) == 128
    assert [gemv_w4_config.num_halves(tile) for tile in (narrow, wide)] == [2, 1]


@pytest.mark.parametrize(("warps", "max_registers"), [(4, 255), (8, 255), (16, 128), (32, 64)])
def test_words_exchanged_between_lanes_may_use_all_registers(
    warps: int, max_registers: int
) -> None:
    """With this number of registers, one program fits on an SM."""
    for block_n in (8, 16):
        for gemm in (1, 2):
            tile = GemvW4Config(block_n, 512, warps, 1)
            assert (
                gemv_w4_config.max_registers(tile, gemm, words_stay_in_lanes=False) == max_registers
            )


@pytest.mark.parametrize(
    ("experts", "top_k", "max_tokens"),
    [(8, 2, 2), (32, 8, 2), (32, 4, 4), (128, 8, 8), (512, 1, 8), (2, 2, 1)],
)
def test_max_tokens_of_the_path(experts: int, top_k: int, max_tokens: int) -> None:
    for quant in (_INT4, _MXFP4):
        problem = replace(_BASE, experts=experts, top_k=top_k, quant=quant)
        assert gemv_w4_config.max_tokens(problem) == max_tokens


def test_chunks_per_block_are_limited_by_the_group_size() -> None:
    deep = GemvW4Config(16, 1024, 8, 1)
    chunks = [gemv_w4_config.chunks_per_block(deep, group) for group in (256, 128, 96, 64, 32)]
    assert chunks == [8, 8, 2, 4, 2]
    assert gemv_w4_config.chunks_per_block(replace(deep, block_k=32), 128) == 1
