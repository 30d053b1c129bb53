"""Outputs of layers whose tensors have more than 2^31 elements. Requires 40 GB of GPU memory."""

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
    # The output of a token depends on no other token, so the reference needs only a few tokens.
    starts = (0, 28_000, 37_440, 57_328)
    checked_tokens = torch.cat([torch.arange(start, start + 16) for start in starts]).cuda()
    checked_routing = Routing(
        routing.topk_weights_TK[checked_tokens], routing.topk_ids_TK[checked_tokens]
    )
    checked_problem = problem.with_tokens(len(checked_tokens))
    reference_inputs = x_TH[checked_tokens], weights, checked_routing, checked_problem
    exact = float64_reference(*reference_inputs)
    bound = 1.25 * (rounded_reference(*reference_inputs) - exact).norm()
    assert float((y[checked_tokens].double() - exact).norm()) <= float(bound)
    assert bool(y.isfinite().all())
