"""Compiled kernels follow the rule for NaN, on every path of TritonExperts.

Each call has a NaN in one argument. The many calls of one scheme share a few compiled kernels.
"""

import sys
from dataclasses import replace

import pytest
from nan_matrix import Counts, check_calls, local_pairs, run, supported_problems

from experts.triton.configs.select import choose_config, current_lookup, override_config
from experts.triton.paths import BY_NAME
from experts.triton.standard import supported_paths
from modular_kernel.spec.problem import ActivationSpec, Machine, Problem
from modular_kernel.testing.cases.nan import list_nan_arguments

TRITON = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
BATCHED = ("BatchedPrepareAndFinalize", "BatchedTritonExperts")
# One scheme per kind. Other group sizes and zero points compile to the same instructions.
QUANTS = (
    "none",
    "fp8_w8a8_tensor",
    "fp8_w8a8_tensor:static=true",
    "fp8_w8a8_channel",
    "fp8_w8a8_block",
    "fp8_w8a16_channel",
    "int8_w8a8_channel",
    "int8_w8a8_block:block=32x32",
    "int8_w8a16_group:group=32,zero_points=true",
    "int4_w4a16_group:group=32,zero_points=true",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
)
CLAMPING_ACTIVATIONS = ("swiglu_oai:alpha=1.702,limit=1.0", "relu2")
SIZE = 256  # hidden and intermediate size, which every path supports


def check_all_paths(problem: Problem, machine: Machine, counts: Counts) -> set[str]:
    """Check the calls of `problem` on every supported path, and return the paths that ran."""
    used_paths = set()
    for path in supported_paths(problem):
        config = BY_NAME[path].default_config(problem, problem.tokens, current_lookup().device)
        with override_config(config):
            used_paths.add(choose_config(problem, problem.tokens, supported_paths(problem)).path)
            check_calls(TRITON, problem, machine, counts, f"path {path}:")
    return used_paths


@pytest.mark.parametrize("quant", QUANTS)
def test_paths_follow_the_nan_rule(
    quant: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = Counts()
    problem = supported_problems(TRITON, quant, machine, SIZE)[0]
    used_paths = check_all_paths(problem, machine, counts)
    with capsys.disabled():
        sys.stdout.write(f"\n{quant}, by {', '.join(sorted(used_paths))}: {counts}")
    assert used_paths == set(supported_paths(problem))
    assert counts.calls == len(used_paths) * len(list_nan_arguments(problem))
    assert counts.wrong == []


@pytest.mark.parametrize("activation", CLAMPING_ACTIVATIONS)
def test_clamping_activations_follow_the_nan_rule(activation: str, machine: Machine) -> None:
    counts = Counts()
    for quant in ("none", "fp8_w8a8_channel"):
        problem = supported_problems(TRITON, quant, machine, SIZE)[0]
        check_all_paths(
            replace(problem, activation=ActivationSpec.parse(activation)), machine, counts
        )
    assert counts.calls > 20
    assert counts.wrong == []


@pytest.mark.parametrize("quant", ["fp8_w8a8_tensor", "fp8_w8a8_block", "int8_w8a8_channel"])
def test_batched_experts_follow_the_nan_rule(quant: str, machine: Machine) -> None:
    counts = Counts()
    check_calls(BATCHED, supported_problems(BATCHED, quant, machine, SIZE)[0], machine, counts)
    assert counts.calls >= 6
    assert counts.wrong == []


def test_unreduced_rows_and_weighted_input_follow_the_nan_rule(machine: Machine) -> None:
    counts = Counts()
    for problem in supported_problems(TRITON, "fp8_w8a8_channel", machine, SIZE)[1:]:
        check_calls(TRITON, problem, machine, counts)
    assert counts.wrong == []


def test_other_parts_follow_the_nan_rule(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other parts run in torch, or use an installed vendor library."""
    for pair in local_pairs(machine):
        if pair in (TRITON, BATCHED):
            continue
        counts = run(pair, machine, ("none", *QUANTS[1:4], "nvfp4_w4a4", "mxfp4_w4a16"), SIZE)
        with capsys.disabled():
            sys.stdout.write(f"\n{' x '.join(pair)}: {counts}")
        assert counts.wrong == [], pair
