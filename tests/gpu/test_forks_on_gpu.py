"""Calls in a forked child, which cannot use its parent's CUDA context, raise instead of hanging."""

import gc

import pytest
import torch
from forked_child import run_in_child

import modular_kernel as mk
from modular_kernel.errors import StateError
from modular_kernel.testing.random_inputs import random_inputs

pytestmark = pytest.mark.gpu
PROBLEM = mk.Problem(16, 256, 128, 4, 2)


def test_plan_created_before_a_fork_is_refused_and_freed_in_the_child() -> None:
    kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TritonExperts", PROBLEM)
    inputs, plans = random_inputs(PROBLEM, torch.device("cuda")), [kernel.plan()]
    # After three calls, the plan has captured its CUDA graph.
    expected = [plans[0](*inputs).clone() for _ in range(3)][-1]

    def call_in_child() -> str:
        try:
            plans[0](*inputs)
        except StateError as error:
            message = str(error)
        with pytest.raises(RuntimeError, match="forked subprocess"):
            kernel(*inputs)
        plans.clear()
        gc.collect()
        return message

    message = run_in_child(call_in_child)
    assert "a plan: got a call in a forked child process" in message
    assert torch.equal(plans[0](*inputs), expected)
