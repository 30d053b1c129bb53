"""`mk plan --prepared`: the memory of prepared weights, in addition to the weights."""

from dataclasses import replace

import pytest
from run_mk import Mk, make_mk_fixture

from modular_kernel.measure.prepared_weights import prepared_tensor_bytes
from modular_kernel.perf_model.estimate import distribute_over_ranks, estimate_pairings
from modular_kernel.perf_model.experts_time import MODELED_EXPERTS_PART
from modular_kernel.perf_model.hardware import Cluster
from modular_kernel.spec.problem import Machine, Problem

mk = make_mk_fixture("plan")
HOPPER = Machine("cuda", (9, 0), frozenset({"triton"}))
CLUSTER = Cluster()
MIXTRAL = Problem(128, 4096, 14336, 8, 2, quant="mxfp4_w4a16")
OPTIONS = ("--model", "mixtral", "--machine", "h200", "--tokens-list", "128", "--prepared")


@pytest.mark.parametrize("world", [1, 2, 8])
def test_estimate_counts_the_declared_bytes_of_a_rank(world: int) -> None:
    problem = distribute_over_ranks(MIXTRAL, world)
    unprepared, prepared = (estimate_pairings(problem, CLUSTER, prepared=p) for p in (False, True))
    assert prepared_tensor_bytes(
        MODELED_EXPERTS_PART, problem, HOPPER
    ) * world == prepared_tensor_bytes(MODELED_EXPERTS_PART, MIXTRAL, HOPPER)
    triton_estimates = [
        estimate for estimate in prepared.estimates if estimate.experts_part == MODELED_EXPERTS_PART
    ]
    assert triton_estimates
    for estimate in triton_estimates:
        memory = estimate.memory
        assert memory.prepared == prepared_tensor_bytes(MODELED_EXPERTS_PART, problem, HOPPER) > 0
        assert memory.total == (
            memory.weights + memory.prepared + memory.workspace + memory.exchange
        )
        assert memory.prepared == pytest.approx(memory.weights, rel=0.01), (
            "prepared weights are a reordered copy"
        )
    estimates_without_prepared = [
        replace(e, memory=replace(e.memory, prepared=0)) for e in prepared.estimates
    ]
    assert estimates_without_prepared == list(unprepared.estimates)


def test_prepared_weights_count_toward_memory(mk: Mk) -> None:
    options = ("--model", "deepseek-v3", "--quant", "mxfp4_w4a16", "--machine", "h200", "--json")
    sizes = ("--tokens", "1", "--experts", "4096")  # two thirds of the memory
    unprepared, prepared = (mk(*options, *sizes, *more).json for more in ([], ["--prepared"]))
    pair = "MoEPrepareAndFinalizeNoEP x TritonExperts"
    (row,) = [row for row in unprepared["estimates"] if row["pairing"] == pair]
    assert row["prepared_bytes"] == 0
    assert pair not in {row["pairing"] for row in prepared["estimates"]}
    (reason,) = [row["reason"] for row in prepared["too_large"] if row["pairing"] == pair]
    assert " of prepared weights" in reason
    assert reason.endswith(", of 141.0 GB")


def test_output_mentions_prepared_weights(mk: Mk) -> None:
    result = mk(*OPTIONS, "--quant", "mxfp4_w4a16")
    assert result.code == 0
    assert "0.7 of weights, 0.7 of prepared weights" in result.out
    assert "times are those of calls without prepared weights" in result.out
    unprepared = mk(*OPTIONS[:-1], "--quant", "mxfp4_w4a16")
    assert "of prepared weights" not in unprepared.out


def test_parts_without_prepared_weights_are_refused(mk: Mk) -> None:
    for quant, *more in (("none",), ("mxfp4_w4a16", "--dtype", "float16")):
        result = mk(*OPTIONS, "--quant", quant, *more)
        assert (result.code, result.out) == (2, "")
        assert f"--prepared: got {quant}, not prepared by " in result.err
        need = "such as mxfp4_w4a16 in bfloat16 by TritonExperts for sm_90, without batch_invariant"
        assert need in result.err
