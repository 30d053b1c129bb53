"""`mk plan --prepared`: the memory of prepared weights beside those that they were made of."""

from dataclasses import replace
from typing import Any

import pytest
from run_mk import Mk, runs_mk

from experts.triton.contiguous import TritonExperts
from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.prepared_weights import declared_bytes
from modular_kernel.perf_model.estimate import over_ranks, size
from modular_kernel.perf_model.experts_time import PART
from modular_kernel.perf_model.hardware import Cluster
from modular_kernel.spec.problem import Machine, Problem

mk = runs_mk("plan")
HOPPER = Machine("cuda", (9, 0), frozenset({"triton"}))
CLUSTER = Cluster()
MIXTRAL = Problem(128, 4096, 14336, 8, 2, quant="mxfp4_w4a16")
WORDS = ("--model", "mixtral", "--worlds", "1,2", "--tokens-list", "128", "--prepared")


@pytest.mark.parametrize("world", [1, 2, 8])
def test_every_estimate_counts_what_the_experts_of_a_rank_declare(world: int) -> None:
    problem = over_ranks(MIXTRAL, world)
    plain, found = (size(problem, CLUSTER, prepared=p, others=True) for p in (False, True))
    assert found.estimates
    assert declared_bytes(PART, problem, HOPPER) * world == declared_bytes(PART, MIXTRAL, HOPPER)
    for one in found.estimates:
        assert one.prepared == declared_bytes(PART, problem, HOPPER) > 0
        assert one.total_weight_bytes == one.weights + one.prepared
        assert one.prepared == pytest.approx(one.weights, rel=0.01), "a copy in another order"
    assert [replace(one, prepared=0) for one in found.estimates] == list(plain.estimates)


def test_what_does_not_fit_with_them_does_not_fit(mk: Mk) -> None:
    words = ("--model", "deepseek-v3", "--quant", "mxfp4_w4a16", "--worlds", "1", "--json")
    few = ("--tokens", "1", "--experts", "4096")  # two thirds of the memory
    plain, prepared = (mk(*words, *few, *more).json["estimates"] for more in ([], ["--prepared"]))
    assert {(row["fits"], row["prepared_bytes"]) for row in plain} == {(True, 0)}
    assert {row["fits"] for row in prepared} == {False}
    assert [row["weights_bytes"] for row in prepared] == [row["weights_bytes"] for row in plain]


def test_the_output_says_that_they_are_counted(mk: Mk) -> None:
    done = mk(*WORDS, "--quant", "mxfp4_w4a16")
    assert done.code == 0
    assert (
        "GB includes prepared weights, 0.7 on each of 1, 0.4 on each of 2, in addition to"
        in done.out
    )
    assert "times are those of calls without prepared weights" in done.out
    assert " 1.5 " in done.out
    plain = mk(*WORDS[:-1], "--quant", "mxfp4_w4a16")
    assert "prepared" not in plain.out
    assert " 1.5 " not in plain.out


def test_what_prepares_nothing_is_refused(mk: Mk) -> None:
    for quant, *more in (("none",), ("mxfp4_w4a16", "--dtype", "float16")):
        done = mk(*WORDS, "--quant", quant, *more)
        assert (done.code, done.out) == (2, "")
        assert f"--prepared: got {quant}, not prepared by TritonExperts" in done.err
        need = "such as mxfp4_w4a16 in bfloat16 by TritonExperts for sm_90, without batch_invariant"
        assert need in done.err


def test_experts_that_cannot_be_asked_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(TritonExperts, "__init__", absent)
    with pytest.raises(ConfigurationError, match="what TritonExperts prepares: got No module"):
        size(MIXTRAL, CLUSTER, prepared=True)
