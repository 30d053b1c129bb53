"""A forked child has no CUDA context: what holds one says so there, and nothing hangs."""

import gc

import pytest
import torch
from forked_child import run_in_child

import modular_kernel as mk
from modular_kernel.errors import StateError
from modular_kernel.testing.random_inputs import random_inputs

pytestmark = pytest.mark.gpu
PROBLEM = mk.Problem(16, 256, 128, 4, 2)


def test_a_plan_made_before_the_fork_is_refused_and_freed_in_the_child() -> None:
    kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TritonExperts", PROBLEM)
    given, plans = random_inputs(PROBLEM, torch.device("cuda")), [kernel.plan()]
    want = [plans[0](*given).clone() for _ in range(3)][-1]  # recorded, and a graph by now

    def child() -> str:
        try:
            plans[0](*given)
        except StateError as error:
            said = str(error)
        with pytest.raises(RuntimeError, match="forked subprocess"):
            kernel(*given)
        plans.clear()
        gc.collect()
        return said

    said = run_in_child(child)
    assert "a plan: got a use in a forked child" in said
    assert torch.equal(plans[0](*given), want)
