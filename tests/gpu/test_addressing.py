"""Offsets past 2^31 elements, in each of the tensors that can get that long. Needs 40 GB."""

from dataclasses import replace

import pytest
import torch

from modular_kernel.catalog import make_kernel
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.tensors import Routing
from modular_kernel.testing.random_inputs import random_inputs

# T * K * I = 3.3e9 elements between the products; T * K * H = 3.3e9 rows behind the second;
# e * T * H = 3.3e9 in the batched layout.
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
def test_rows_on_both_sides_of_2_to_the_31(pair: tuple[str, str], problem: Problem) -> None:
    x_TH, weights, routing = random_inputs(problem, torch.device("cuda"))
    y = make_kernel(*pair, problem)(x_TH, weights, routing)
    # A token's output depends on that token alone, so a few tokens tell where offsets wrapped.
    tokens = torch.cat([torch.arange(s, s + 16) for s in (0, 28_000, 37_440, 57_328)]).cuda()
    few = Routing(routing.topk_weights_TK[tokens], routing.topk_ids_TK[tokens])
    small = problem.with_tokens(len(tokens))
    exact = float64_reference(x_TH[tokens], weights, few, small)
    bound = 1.25 * (rounded_reference(x_TH[tokens], weights, few, small) - exact).norm()
    assert float((y[tokens].double() - exact).norm()) <= float(bound)
    assert bool(y.isfinite().all())
