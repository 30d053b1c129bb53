"""The NaN rule over ranks: on every rank, an output is NaN exactly where it depends on a NaN.

The tests cover every quantization scheme with every exchange that does not need Triton, interpreted
and in plain torch. Each call has NaN in one argument, and in all values of unused experts and
adapters.
"""

from collections.abc import Callable

import pytest
import torch
from nan_matrix import SCHEME_NAMES
from nan_over_ranks import EXCHANGES, RANKS, cases, fill_unused, run

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.cases.inputs import InputVariation, make_inputs
from modular_kernel.testing.cases.nan import list_nan_arguments
from modular_kernel.testing.ranks.pool import RankPool

Pool = Callable[[int], RankPool]


@pytest.mark.share(4)
@pytest.mark.parametrize("in_torch", [False, True], ids=["interpreted", "torch"])
@pytest.mark.parametrize("quant", SCHEME_NAMES)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_nan_rule_holds_over_ranks(
    exchange: str, quant: str, in_torch: bool, rank_pool: Pool
) -> None:
    counts = run(rank_pool(RANKS), exchange, quant, in_torch=in_torch)
    assert counts.wrong == []
    problem, _ = next(cases(exchange, quant))
    assert counts.calls >= RANKS * len(list_nan_arguments(problem))


def test_every_argument_has_a_call() -> None:
    """Every scheme has calls with biases, and some schemes have calls with adapters."""
    for exchange in EXCHANGES:
        for quant in SCHEME_NAMES:
            problem_and_names = next(cases(exchange, quant))
            assert {"x", "topk_weights", "b1", "b2"} <= set(problem_and_names[1])
            assert problem_and_names[1] == list_nan_arguments(problem_and_names[0])
        all_names = {
            argument
            for scheme_name in SCHEME_NAMES
            for _, names in cases(exchange, scheme_name)
            for argument in names
        }
        assert {"lora_a13", "lora_b13", "lora_a2", "lora_b2"} <= all_names


def test_only_unused_experts_are_filled_with_nan() -> None:
    problem = Problem(2, 64, 64, 8, 2, torch.float32, quant="fp8_w8a16_channel", bias=True)
    inputs = make_inputs(problem, "uniform", torch.device("cpu"), variation=InputVariation())
    used_experts = set(inputs.routing.topk_ids_TK.flatten().tolist())
    num_unused = fill_unused(inputs.weights, inputs.routing, tuple(range(8)), 8)
    assert num_unused == 8 - len(used_experts)
    for tensor in (inputs.weights.w1, inputs.weights.w1_scale, inputs.weights.b2):
        assert tensor is not None
        is_nan = tensor.float().isnan().flatten(1).all(1).tolist()
        assert is_nan == [e not in used_experts for e in range(8)]
