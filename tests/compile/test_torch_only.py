"""Without a GPU and Triton's interpreter, parts run their references in torch operations."""

from dataclasses import replace
from functools import partial
from itertools import groupby, islice

import pytest
import torch
from run_mk import run_mk

from modular_kernel.catalog import check_all, make_kernel, this_machine
from modular_kernel.quant.quantized_weights import SCHEMES
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.tensors import Routing
from modular_kernel.testing.cases.lists import Case, cases_for
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.testing.verify.one_process import prove


def get_pairing_and_scheme(case: Case) -> tuple[str, str, str]:
    return case.prepare_finalize, case.experts, case.problem.scheme.name


MACHINE = this_machine(device="cpu")
BASE = Problem(tokens=5, hidden=64, intermediate=32, experts=4, top_k=2)
PAIRS = [(v.prepare_finalize, v.experts) for v in check_all(BASE, MACHINE) if v.ok]
SMOKE = [case for pair in PAIRS for case in cases_for(*pair, MACHINE, "smoke").cases]
FULL = [case for pair in PAIRS for case in cases_for(*pair, MACHINE, "full").cases]
# The first two cases of each pairing and scheme.
QUANTIZED = [
    case
    for (*_, quant), cases in groupby(
        sorted(FULL, key=get_pairing_and_scheme), key=get_pairing_and_scheme
    )
    if quant != "none"
    for case in islice(cases, 2)
]


def test_interpreter_is_off() -> None:
    assert not MACHINE.interpreter
    assert {case.problem.scheme.name for case in QUANTIZED} == SCHEMES - {"none"}
    assert not use_triton(torch.ones(1))
    assert ("MoEPrepareAndFinalizeNoEP", "TorchExperts") in PAIRS
    assert ("BatchedPrepareAndFinalize", "NaiveBatchedExperts") in PAIRS


@pytest.mark.parametrize("case", SMOKE, ids=str)
def test_smoke_cases_are_proven(case: Case) -> None:
    proof = prove(case, MACHINE)
    assert proof.passed, str(proof)


@pytest.mark.share(6)
@pytest.mark.parametrize("case", QUANTIZED, ids=str)
def test_cases_of_every_scheme_are_proven(case: Case) -> None:
    proof = prove(case, MACHINE)
    assert proof.passed, str(proof)


@pytest.mark.share(24)
@pytest.mark.parametrize("case", FULL, ids=str)
def test_full_cases_are_proven(case: Case) -> None:
    proof = prove(case, MACHINE)
    assert proof.passed, str(proof)


@pytest.mark.parametrize("combine", [Combine.SUM, Combine.TOPK_WEIGHTED])
@pytest.mark.parametrize("quant", sorted(SCHEMES))
@pytest.mark.parametrize(("pf", "experts"), PAIRS, ids="+".join)
def test_output_is_zero_if_every_pair_is_skipped(
    pf: str, experts: str, quant: str, combine: Combine
) -> None:
    problem = replace(BASE, quant=quant, combine=combine)
    x_TH, weights, routing = random_inputs(problem, torch.device("cpu"))
    skipped_routing = Routing(routing.topk_weights_TK, torch.full_like(routing.topk_ids_TK, -1))
    out = make_kernel(pf, experts, problem, machine=MACHINE)(x_TH, weights, skipped_routing)
    assert torch.equal(out, torch.zeros_like(out))
    assert out.shape[0] == 5


def test_torch_only_option_proves_the_same_cases(capsys: pytest.CaptureFixture[str]) -> None:
    mk = partial(run_mk, capsys)
    torch_pair = ("--pf-type", "BatchedPrepareAndFinalize", "--experts-type", "NaiveBatchedExperts")
    record = mk("test", "--torch-only", "--one", *torch_pair, "--json").json
    assert record["ok"]
    assert record["machine"]["interpreter"] is False
    assert record["pairs"][0]["cases"] == 1
    result = mk("test", "--torch-only", *torch_pair[:3], "BatchedTritonExperts")
    assert result.code == 1
    assert "Triton's CPU interpreter" in result.out + result.err
    assert mk("test", "--torch-only", "--world-size", "2").code == 2


def test_torch_only_option_refuses_the_interpreter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = run_mk(capsys, "test", "--torch-only")
    assert result.code == 2
    assert "got TRITON_INTERPRET=1" in result.err
