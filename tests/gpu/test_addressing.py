"""Offsets of more than 2^31 elements, in each tensor that can be this large. Requires 40 GB."""

from dataclasses import replace

import pytest
import torch

from modular_kernel.catalog import make_kernel
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.tensors import Routing
from modular_kernel.testing.random_inputs import random_inputs

# WIDE_MIDDLE has T * K * I = 3.3e9 activations between the GEMMs. WIDE_ENDS has T * K * H = 3.3e9
# outputs of the second GEMM and, in the batched layout, e * T * H = 3.3e9 inputs.
WIDE_MIDDLE = Problem(tokens=57_344, hidden=128, intermediate=7168, experts=8, top_k=8)
WIDE_ENDS = replace(WIDE_MIDDLE, hidden=7168, intermediate=128)
PAIRS = [
    ("MoEPrepareAndFinalizeNoEP", "TritonExperts"),
    ("BatchedPrepareAndFinalize", "BatchedTritonExperts"),
]
CASES = [
    pytest.param(pair, problem, id=f"{pair[1]}-{problem}")
    for pair in PAIRS
    for problem in (WIDE_MIDDLE, WIDE_ENDS, replace(WIDE_ENDS, combine=Combine.TOPK_WEIGHTED))
]


@pytest.mark.parametrize(("pair", "problem"), CASES)
def test_outputs_beyond_2_to_the_31_elements_are_correct(
    pair: tuple[str, str], problem: Problem
) -> None:
    x_TH, weights, routing = random_inputs(problem, torch.device("cuda"))
    y = make_kernel(*pair, problem)(x_TH, weights, routing)
    # A token's output depends only on this token, so a few tokens show whether offsets overflowed.
    tokens = torch.cat([torch.arange(s, s + 16) for s in (0, 28_000, 37_440, 57_328)]).cuda()
    few_routing = Routing(routing.topk_weights_TK[tokens], routing.topk_ids_TK[tokens])
    small_problem = problem.with_tokens(len(tokens))
    exact = float64_reference(x_TH[tokens], weights, few_routing, small_problem)
    bound = (
        1.25 * (rounded_reference(x_TH[tokens], weights, few_routing, small_problem) - exact).norm()
    )
    assert float((y[tokens].double() - exact).norm()) <= float(bound)
    assert bool(y.isfinite().all())
