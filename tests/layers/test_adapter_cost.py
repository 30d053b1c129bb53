"""The cost of adapters: bytes and flops computed by hand, the verbs that measure, and the shrink
stage.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_mk import run_mk

from modular_kernel import Problem
from modular_kernel.bench.moe_lora import BRANCH_SIZES, LoRABranchSizes, benchmark_moe_lora
from modular_kernel.measure.adapter_roofline import (
    NO_WORK,
    AdapterWork,
    adapter_bytes,
    adapter_work,
)
from modular_kernel.measure.cases import LayerCase, make_input, make_weights
from modular_kernel.measure.check import compute_expected_output
from modular_kernel.measure.roofline import compute_work
from modular_kernel.measure.routing_patterns import Load, RoutingKind
from modular_kernel.measure.stage_roofline import RankLoad, StageWork, compute_stage_works
from modular_kernel.perf_model.estimate import distribute_over_ranks, estimate_pairings
from modular_kernel.perf_model.hardware import Cluster
from modular_kernel.replay import stages
from modular_kernel.spec.quantization import QuantScheme

CPU, NONE = torch.device("cpu"), QuantScheme.parse("none")
E, H, I, N, R, L = 4, 32, 64, 128, 5, 3  # noqa: E741
PLAIN = Problem(tokens=10, hidden=H, intermediate=I, experts=E, top_k=2)
PROBLEM = replace(PLAIN, lora=f"adapters={L},rank={R}")
# One pair for each of 3 experts: each meets one adapter.
ONE = {"a13": 2 * R * H, "b13": N * R, "a2": R * I, "b2": H * R}


def test_one_pair_of_an_expert_reads_one_adapter() -> None:
    found = adapter_work(PROBLEM, 3, 3)
    assert found == {
        name: AdapterWork(2 * 3 * n, pytest.approx(3 * n * 2)) for name, n in ONE.items()
    }
    assert adapter_work(PLAIN, 3, 3) == dict.fromkeys(ONE, NO_WORK)
    assert adapter_work(PROBLEM, 0, 0) == dict.fromkeys(ONE, NO_WORK)


def test_many_pairs_read_all_adapters_and_few_some() -> None:
    assert adapter_work(PROBLEM, 3000, 3)["a2"].bytes == pytest.approx(3 * L * R * I * 2)
    # Two even draws of three slots meet 3 (1 - 4/9) of them.
    assert adapter_work(PROBLEM, 6, 3)["a2"].bytes == pytest.approx(3 * (5 / 3) * R * I * 2)


def test_factors_shared_by_experts_are_read_once() -> None:
    shared = replace(PROBLEM, lora=f"adapters={L},rank={R},a13=shared,outer=shared")
    found = adapter_work(shared, 3000, 3)
    assert found["a13"].bytes == pytest.approx(L * R * H * 2)
    assert found["b2"].bytes == pytest.approx(L * H * R * 2)
    assert found["b13"].bytes == pytest.approx(3 * L * N * R * 2)
    assert found["a13"].flops == 2 * 3000 * R * H


SHARES = [("", R * (1 / H + 1 / I)), (",a13=shared", R * (2 / (3 * I) + 1 / H))]


@pytest.mark.parametrize(("shared", "share"), SHARES)
def test_the_fraction_of_the_layer_s_flops(shared: str, share: float) -> None:
    problem = replace(PROBLEM, lora=f"adapters={L},rank={R}{shared}")
    load = [Load(20, 4, 1.0)]
    base, whole = (compute_work(each, NONE, load) for each in (PLAIN, problem))
    assert whole.flops / base.flops - 1 == pytest.approx(share)
    added = sum(each.bytes for each in adapter_work(problem, 20, 4).values())
    assert whole.bytes - base.bytes == pytest.approx(added)


def test_bytes_of_a_slot() -> None:
    assert adapter_bytes(PROBLEM) == 2 * E * (2 * R * H + N * R + R * I + H * R)
    assert adapter_bytes(PLAIN) == 0
    half = replace(PROBLEM, local_experts=2, expert_map=True)
    assert adapter_bytes(half) * 2 == adapter_bytes(PROBLEM)


def test_stages_by_hand() -> None:
    """One pair for each of 3 experts: 3 pairs, 3 tokens."""
    names = (stages.SHRINK, stages.GEMM1, stages.GEMM2)
    load = RankLoad(10, 9, 3, 3)
    plain, found = (compute_stage_works(names, p, NONE, load) for p in (PLAIN, PROBLEM))
    assert plain[stages.SHRINK] == StageWork()
    shrink, first, second = (found[name] for name in names)
    assert shrink.flops == 2 * 3 * (2 * R * H + R * I)
    assert shrink.read == 9 * H * 2 + 3 * I * 2
    assert shrink.weights == pytest.approx(3 * (2 * R * H + R * I) * 2)
    assert shrink.written == 3 * 3 * R * 2
    assert first.flops - plain[stages.GEMM1].flops == 2 * 3 * N * R
    assert first.read - plain[stages.GEMM1].read == 3 * 2 * R * 2
    assert first.weights - plain[stages.GEMM1].weights == pytest.approx(3 * N * R * 2)
    assert first.written == plain[stages.GEMM1].written
    assert second.flops - plain[stages.GEMM2].flops == 2 * 3 * H * R
    assert second.read - plain[stages.GEMM2].read == 3 * R * 2
    assert second.weights - plain[stages.GEMM2].weights == pytest.approx(3 * H * R * 2)


@pytest.mark.parametrize("world", [1, 2])
def test_a_plan_counts_their_bytes_and_time(world: int) -> None:
    def estimate(problem: Problem) -> tuple[float, float]:
        estimates = estimate_pairings(distribute_over_ranks(problem, world), Cluster()).estimates
        found = next(each for each in estimates if each.experts_part == "TritonExperts")
        return found.memory.weights, found.experts.seconds

    plain = replace(PLAIN, hidden=1024, intermediate=512, tokens=64)
    adapted = replace(plain, lora="adapters=3,rank=16")
    (base, quick), (whole, slow) = estimate(plain), estimate(adapted)
    assert whole - base == 3 * adapter_bytes(distribute_over_ranks(adapted, world))
    assert adapter_bytes(distribute_over_ranks(adapted, world)) * world == adapter_bytes(adapted)
    assert slow > quick


def test_inputs_and_expected_output_of_a_benchmark_have_adapters() -> None:
    """The expected output includes adapters, also where few experts are selected."""
    problem = replace(PROBLEM, tokens=7, experts=8, dtype=torch.float32)
    for lora in (problem.lora, f"{problem.lora},outer=shared"):
        cell = LayerCase("mine", replace(problem, lora=lora), RoutingKind("hot", 2))
        given, weights = make_input(cell, CPU, 0), make_weights(cell.problem, CPU)
        assert given.routing.slots_T is not None
        assert given.routing.slots_T.tolist() == [0, 1, 2, 0, 1, 2, 0]
        assert given.routing.slots_T.dtype is torch.int32
        with_them = compute_expected_output(cell, given, weights, NONE).exact
        names = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
        plain = LayerCase("mine", replace(problem, lora="none"), cell.routing)
        base = replace(weights, **dict.fromkeys(names))
        bare = replace(given, routing=replace(given.routing, adapters_T=None))
        without = compute_expected_output(plain, bare, base, NONE).exact
        assert float((with_them - without).norm() / without.norm()) > 0.1


def test_the_branch_is_timed_in_its_two_configurations() -> None:
    """Those of the specification, which have the H of DeepSeek-V3; here the sizes are small."""
    assert [(c.tokens, c.hidden, c.rank, c.experts, c.top_k) for c in BRANCH_SIZES] == [
        (256, 2048, 8, 64, 6), (256, 7168, 8, 256, 8),
    ]  # fmt: skip
    small = (LoRABranchSizes(3, 32, 16, 4, 4, 2), LoRABranchSizes(2, 48, 16, 8, 5, 1))
    rows = list(benchmark_moe_lora(CPU, small, dtype=torch.float32, target_ms=1.0))
    assert [(row.sizes, row.strategy) for row in rows] == [
        (sizes, strategy) for sizes in small for strategy in ("staged", "fused")
    ]
    assert [row.is_auto for row in rows] == [False, True] * 2
    for row in rows:  # the row itself, not all of them
        assert str(row).startswith(f"{row.sizes} ({row.strategy}")
        assert f"{row.sizes.tokens / row.us * 1e6:.0f} tokens/s" in str(row)


SIZES = ("--hidden", "64", "--intermediate", "96", "--experts", "4", "--top-k", "2",
         "--dtype", "float32", "--lora", "adapters=2,rank=8")  # fmt: skip


def test_bench_measures_a_layer_with_adapters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    code, _, err = run_mk(
        capsys, "bench", *SIZES, "--tokens", "8", "--experts-type", "TorchExperts",
        "--json", str(out),
    )  # fmt: skip
    assert code == 0, err
    assert "E4-K2-H64-I96 lora:adapters=2,rank=8" in out.read_text()


def test_profile_shows_shrink_as_a_stage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run_mk(
        capsys, "profile", *SIZES, "--tokens", "8", "--experts-type", "TritonExperts",
        "--out", str(tmp_path), "--calls", "2",
    )  # fmt: skip
    assert code == 0, err
    assert "shrink" in out


def test_plan_accepts_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_mk(capsys, "plan", *SIZES[:-2], "--lora", "adapters=2,rank=8",
                            "--tokens", "64", "--machine", "h200")  # fmt: skip
    assert code == 0, err
    assert out
