"""The `gemv` path of TritonExperts, forced for few tokens regardless of the heuristics."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from forced_path_cases import prove_with_config

from experts.triton.configs.heuristics import make_heuristic_steps
from experts.triton.configs.select import choose_config, override_config
from experts.triton.gemv import gemv_config
from experts.triton.launch_config import Device, LaunchConfig, MoEConfig, gemms, violations
from experts.triton.standard import TritonExperts
from modular_kernel.catalog import make_kernel
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Combine, Machine, Problem
from modular_kernel.tensors import StandardShape
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.testing.random_inputs import random_inputs

_NO_EP = "MoEPrepareAndFinalizeNoEP"
_PATHS = ("aligned", "gemv")
# Both configs have several steps along K and several blocks along N in both GEMMs. A program
# processes one or two pairs.
_ONE_PAIR = MoEConfig(LaunchConfig(16, 16, 32, 1, 4, 1), LaunchConfig(16, 16, 64, 1, 4, 1), "gemv")
_TWO_PAIRS = MoEConfig(LaunchConfig(16, 32, 64, 1, 4, 3), LaunchConfig(16, 16, 32, 2, 2, 3), "gemv")
_BF16 = torch.bfloat16
_OAI = "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true"
_WIDE = {"hidden": 160, "intermediate": 96, "dtype": _BF16}

_CASES: tuple[tuple[dict[str, Any], str, MoEConfig], ...] = (
    ({"tokens": 1}, "uniform", _ONE_PAIR),
    ({"tokens": 4, "top_k": 3, "dtype": _BF16}, "duplicates", _TWO_PAIRS),
    ({"tokens": 3, "hidden": 47, "intermediate": 33, "activation": _OAI}, "uniform", _TWO_PAIRS),
    ({"tokens": 2, "bias": True, "activation": "relu2"}, "skips", _TWO_PAIRS),
    ({"tokens": 4, "top_k": 3, "ids_dtype": torch.int64}, "out_of_range", _ONE_PAIR),
    ({"tokens": 3, "expert_map": True, "local_experts": 3, "bias": True}, "uniform", _TWO_PAIRS),
    ({"tokens": 2, "apply_router_weight_on_input": True, "bias": True}, "uniform", _ONE_PAIR),
    ({"tokens": 3, "inplace": True, "routed_scaling_factor": 2.5}, "skips", _TWO_PAIRS),
    ({"tokens": 9, "chunk_tokens": 4, "dtype": _BF16}, "zipf", _TWO_PAIRS),
    ({"tokens": 3, "combine": Combine.TOPK_WEIGHTED, "dtype": torch.float16}, "skips", _TWO_PAIRS),
    ({"tokens": 2, "combine": Combine.TOPK_UNWEIGHTED, "top_k": 3}, "all_skipped", _ONE_PAIR),
    ({"tokens": 2, "quant": "fp8_w8a8_channel", **_WIDE}, "skips", _TWO_PAIRS),
    ({"tokens": 3, "quant": "fp8_w8a8_tensor", **_WIDE}, "skips", _ONE_PAIR),
    ({"tokens": 3, "quant": "fp8_w8a8_tensor:static=true", **_WIDE}, "uniform", _TWO_PAIRS),
    ({"tokens": 4, "quant": "fp8_w8a8_block:block=48x64", **_WIDE}, "duplicates", _TWO_PAIRS),
    ({"tokens": 1, "quant": "fp8_w8a8_block:block=32x32", "activation": _OAI, **_WIDE}, "uniform",
     _ONE_PAIR),
    ({"tokens": 5, "chunk_tokens": 2, "quant": "fp8_w8a8_block:block=32x32", **_WIDE}, "uniform",
     _TWO_PAIRS),
    ({"tokens": 2, "quant": "int8_w8a8_channel", "bias": True, **_WIDE}, "uniform", _TWO_PAIRS),
    ({"tokens": 1, "quant": "int8_w8a16_channel", **_WIDE}, "uniform", _ONE_PAIR),
    ({"tokens": 2, "quant": "int8_w8a16_group:group=32,zero_points=true", **_WIDE}, "uniform",
     _TWO_PAIRS),
    ({"tokens": 2, "quant": "int8_w8a16_group:group=64", **_WIDE}, "all_to_one", _ONE_PAIR),
    # One group covers the whole depth of GEMM 2, then of GEMM 1.
    ({"tokens": 2, "quant": "int8_w8a16_group:zero_points=true", **_WIDE}, "uniform", _ONE_PAIR),
    ({"tokens": 1, "quant": "int8_w8a16_group:zero_points=true", **_WIDE, "hidden": 96}, "uniform",
     _TWO_PAIRS),
)  # fmt: skip


@pytest.mark.share(6)
@pytest.mark.parametrize(("changes", "routing", "pair"), _CASES)
def test_cases_are_proven(
    changes: dict[str, Any], routing: str, pair: MoEConfig, machine: Machine
) -> None:
    proof = prove_with_config(pair, _PATHS, replace(BASE, **changes), routing, machine)
    assert proof.passed, str(proof)


_INT8_GROUPS = "int8_w8a16_group:group=32"
_INT8_ZERO_POINTS = f"{_INT8_GROUPS},zero_points=true"


@pytest.mark.parametrize(
    ("hidden", "intermediate", "quant"),
    [
        (32, 64, "fp8_w8a8_block:block=32x32"),
        (32, 64, "int8_w8a8_block:block=32x32"),
        *(
            (h, i, quant)
            for quant in (_INT8_GROUPS, _INT8_ZERO_POINTS)
            for h, i in ((64, 33), (40, 40), (33, 64))
        ),
        (32, 40, _INT8_ZERO_POINTS),
    ],
)
def test_scales_end_with_the_last_row(
    hidden: int, intermediate: int, quant: str, machine: Machine
) -> None:
    """The last block of rows is partial, and no memory follows its scales and zero points.

    The interpreter raises an error if a kernel reads outside of a tensor.
    """
    problem = Problem(1, hidden, intermediate, experts=2, top_k=1, dtype=_BF16, quant=quant)
    proof = prove(Case(_NO_EP, "TritonExperts", problem, "all_to_one"), machine)  # to expert 1
    assert proof.passed, str(proof)


def test_many_pairs_count_invalid_ids_once() -> None:
    """The ids do not fit in one block, and expert ids do not fit in eight bits."""
    problem = Problem(tokens=140, hidden=16, intermediate=16, experts=300, top_k=8, dtype=_BF16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x_TH, weights, routing = random_inputs(problem, device)
    routing.topk_ids_TK[::7, 3] = 300
    with override_config(_ONE_PAIR):
        kernel = make_kernel(_NO_EP, "TritonExperts", problem)
        kernel(x_TH, weights, routing)
    assert kernel.invalid_ids == 20


def test_few_tokens_use_the_gemv_path() -> None:
    qwen = Problem(tokens=64, hidden=2048, intermediate=768, experts=128, top_k=8)
    mixtral = Problem(tokens=64, hidden=4096, intermediate=14336, experts=8, top_k=2)
    for problem, max_tokens in (
        (qwen, 8),
        (mixtral, 2),
        (replace(qwen, quant="fp8_w8a8_block"), 4),
        (replace(mixtral, quant="fp8_w8a8_channel"), 1),
    ):
        steps = make_heuristic_steps(problem, Device(), _PATHS)
        assert steps.choose(max_tokens) == gemv_config.default_config(problem)
        assert steps.choose(max_tokens + 1).path == "aligned"
        aligned_steps = make_heuristic_steps(problem, Device(), ("aligned",))
        assert aligned_steps.choose(max_tokens).path == "aligned"


@pytest.mark.parametrize(
    ("sizes", "top_k", "max_tokens"),
    [
        ((1792, 5120, 96), 8, 3),  # all steps of GEMM 2 are full
        ((1792, 5120, 96), 10, 0),
        ((4096, 2688, 128), 16, 0),
        ((2048, 512, 256), 10, 4),
        ((2048, 512, 256), 22, 2),
    ],
)
def test_partial_steps_of_large_fp8_layers_use_the_aligned_path(
    sizes: tuple[int, int, int], top_k: int, max_tokens: int
) -> None:
    hidden, intermediate, experts = sizes
    problem = Problem(
        tokens=64, hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k,
        quant="fp8_w8a8_block",
    )  # fmt: skip
    steps = make_heuristic_steps(problem, Device(), _PATHS)
    paths = [steps.choose(tokens).path for tokens in range(1, 6)]
    assert paths == ["gemv"] * max_tokens + ["aligned"] * (5 - max_tokens)
    # If each pair has its own output row, there are no partial steps.
    assert gemv_config.max_tokens(replace(problem, combine=Combine.TOPK_WEIGHTED)) > 0


def test_packed_weights_and_odd_groups_are_not_supported() -> None:
    assert gemv_config.supports(replace(BASE, quant="fp8_w8a8_block"))
    assert gemv_config.supports(replace(BASE, quant="int8_w8a16_group:group=96"))
    assert not gemv_config.supports(replace(BASE, quant="int4_w4a16_group"))
    assert not gemv_config.supports(replace(BASE, hidden=192, quant="fp8_w8a8_block:block=96x96"))


def test_every_default_can_be_launched() -> None:
    for quant in ("none", "fp8_w8a8_channel", "fp8_w8a8_block", "int8_w8a16_channel"):
        for depth in (256, 2048, 2880, 7168, 14336):
            problem = Problem(
                tokens=1, hidden=depth, intermediate=depth, experts=8, top_k=2, quant=quant
            )
            config = gemv_config.default_config(problem)
            for tile, gemm in zip((config.gemm1, config.gemm2), gemms(problem), strict=True):
                assert not list(violations(tile, replace(gemm, group_k=0), Device()))


def test_only_this_path_allows_a_step_over_several_groups() -> None:
    problem = replace(BASE, hidden=256, intermediate=256, quant="fp8_w8a8_block", dtype=_BF16)
    wide = LaunchConfig(16, 16, 256, 1, 4, 1)
    with override_config(MoEConfig(wide, wide, "gemv")):
        assert choose_config(problem, 1, _PATHS).gemm1 == wide
    tiles = MoEConfig(wide, wide, "aligned")
    with override_config(tiles), pytest.raises(ConfigurationError, match="group"):
        choose_config(problem, 1)


def test_activations_are_dispatched_unquantized_if_all_calls_take_this_path() -> None:
    problem = Problem(
        tokens=64, hidden=2048, intermediate=768, experts=128, top_k=8, quant="fp8_w8a8_block"
    )
    experts = TritonExperts(problem)
    assert experts.takes_unquantized(StandardShape(4, 8))
    assert not experts.takes_unquantized(StandardShape(5, 8))
    unquantized_experts = TritonExperts(replace(problem, quant="none"))
    assert not unquantized_experts.takes_unquantized(StandardShape(1, 8))
