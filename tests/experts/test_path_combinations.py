"""The full list of cases covers every reachable combination of a path, a scheme and a feature."""

from dataclasses import replace

import pytest
import torch

from modular_kernel.catalog import this_machine
from modular_kernel.cli.verify import JobResult, VerifyJob, _select_path
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Machine
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE, cases_for
from modular_kernel.testing.cases.path_coverage import (
    PathCombination,
    list_path_cases,
    predict_combinations,
    reachable_combinations,
)

PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
BASE_W4 = replace(BASE, tokens=1, hidden=128, intermediate=64, dtype=torch.bfloat16)

needs_paths = pytest.mark.skipif(
    "triton" not in this_machine().packages or not this_machine().interpreter,
    reason="the lists are those of interpreted kernels",
)


@needs_paths
def test_the_full_list_enters_every_reachable_combination(machine: Machine) -> None:
    remaining = set(reachable_combinations(*PAIR, machine))
    assert {combination.path for combination in remaining} == {
        "aligned",
        "aligned_w4",
        "gemv",
        "gemv_w4",
    }
    assert len(remaining) > 500
    for case in reversed(cases_for(*PAIR, machine).cases):
        if not remaining:
            break
        remaining -= predict_combinations(case)
    assert not remaining, sorted(map(str, remaining))


@needs_paths
@pytest.mark.parametrize("quant", ["int4_w4a16_group:group=32", "nvfp4_w4a16", "fp8_w8a8_channel"])
def test_a_report_states_the_entered_combinations(quant: str, machine: Machine) -> None:
    case = Case(*PAIR, replace(BASE_W4, quant=quant))
    proof = prove(case, machine)
    assert proof.passed, str(proof)
    assert proof.path_combinations == predict_combinations(case)
    name = {"int4": "gemv_w4", "nvfp": "aligned_w4", "fp8_": "gemv"}[quant[:4]]
    assert {combination.path for combination in proof.path_combinations} == {name}


def test_a_part_with_one_path_has_no_combinations(machine: Machine) -> None:
    assert reachable_combinations("MoEPrepareAndFinalizeNoEP", "TorchExperts", machine) == {}
    assert list(list_path_cases("TorchExperts")) == []


@needs_paths
def test_cases_of_one_path_are_selected(machine: Machine) -> None:
    few, many = Case(*PAIR, BASE_W4), Case(*PAIR, BASE_W4.with_tokens(97))
    combinations = predict_combinations(few) | predict_combinations(many)
    assert {combination.path for combination in combinations} == {"gemv", "aligned"}
    job = VerifyJob(*PAIR, (few, many), 0, "", 7, reachable=combinations)
    for path, case in (("gemv", few), ("aligned", many)):
        (selected,) = _select_path([job], path)
        assert selected.cases == (case,)
        assert {combination.path for combination in selected.reachable} == {path}
        assert selected.coverage == f"schemes none; only cases that enter {path}"
    assert _select_path([replace(job, cases=(many,))], "gemv") == []
    # A path without a case fails if the cases must enter all combinations.
    (selected,) = _select_path(
        [replace(job, cases=(many,), requires_all_combinations=True)], "gemv"
    )
    assert not JobResult(selected, ()).ok
    with pytest.raises(
        ConfigurationError, match="got gemm, need one of aligned, gemv, which calls"
    ):
        _select_path([job], "gemm")
    with pytest.raises(ConfigurationError, match="need a part with several code paths"):
        _select_path([replace(job, reachable=frozenset())], "gemv")


def test_a_combination_that_no_case_enters_fails_the_full_list(machine: Machine) -> None:
    case = Case("MoEPrepareAndFinalizeNoEP", "TorchExperts", BASE.with_tokens(1))
    proof = prove(case, machine)
    combinations = frozenset({PathCombination("fast", "nvfp4_w4a16", "bias=True")})
    job = VerifyJob(case.prepare_finalize, case.experts, (case,), 0, "", reachable=combinations)
    smoke, full = (
        JobResult(replace(job, requires_all_combinations=required), (proof,))
        for required in (False, True)
    )
    assert smoke.ok
    assert not full.ok
    assert "fast: 0 of 1 scheme, 0 of 1 combination, never nvfp4_w4a16" in full.paths
    covering_proof = replace(proof, path_combinations=combinations)
    assert JobResult(full.job, (covering_proof,)).ok
