"""The cost of LoRA adapters: bytes and flops, and the `mk` commands that report them."""

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

CPU, UNQUANTIZED = torch.device("cpu"), QuantScheme.parse("none")
E, H, I, N, R, L = 4, 32, 64, 128, 5, 3  # noqa: E741
BASE_PROBLEM = Problem(tokens=10, hidden=H, intermediate=I, experts=E, top_k=2)
PROBLEM = replace(BASE_PROBLEM, lora=f"adapters={L},rank={R}")
# Elements that one pair (a token and one of its experts) reads of each adapter tensor.
ELEMENTS_PER_PAIR = {"a13": 2 * R * H, "b13": N * R, "a2": R * I, "b2": H * R}


def test_one_pair_per_expert_reads_one_adapter() -> None:
    assert adapter_work(PROBLEM, 3, 3) == {
        name: AdapterWork(2 * 3 * n, pytest.approx(3 * n * 2))
        for name, n in ELEMENTS_PER_PAIR.items()
    }
    assert adapter_work(BASE_PROBLEM, 3, 3) == dict.fromkeys(ELEMENTS_PER_PAIR, NO_WORK)
    assert adapter_work(PROBLEM, 0, 0) == dict.fromkeys(ELEMENTS_PER_PAIR, NO_WORK)


def test_many_pairs_read_all_adapters_and_few_pairs_some() -> None:
    assert adapter_work(PROBLEM, 3000, 3)["a2"].bytes == pytest.approx(3 * L * R * I * 2)
    # Two pairs that draw evenly from three adapters use 3 (1 - 4/9) of them on average.
    assert adapter_work(PROBLEM, 6, 3)["a2"].bytes == pytest.approx(3 * (5 / 3) * R * I * 2)


def test_factors_shared_by_experts_are_read_once() -> None:
    shared = replace(PROBLEM, lora=f"adapters={L},rank={R},a13=shared,outer=shared")
    work = adapter_work(shared, 3000, 3)
    assert work["a13"].bytes == pytest.approx(L * R * H * 2)
    assert work["b2"].bytes == pytest.approx(L * H * R * 2)
    assert work["b13"].bytes == pytest.approx(3 * L * N * R * 2)
    assert work["a13"].flops == 2 * 3000 * R * H


ADDED_FLOPS = [("", R * (1 / H + 1 / I)), (",a13=shared", R * (2 / (3 * I) + 1 / H))]


@pytest.mark.parametrize(("shared", "added_fraction"), ADDED_FLOPS)
def test_adapters_add_a_fraction_of_the_flops(shared: str, added_fraction: float) -> None:
    problem = replace(PROBLEM, lora=f"adapters={L},rank={R}{shared}")
    load = [Load(20, 4, 1.0)]
    base, with_adapters = (
        compute_work(layer, UNQUANTIZED, load) for layer in (BASE_PROBLEM, problem)
    )
    assert with_adapters.flops / base.flops - 1 == pytest.approx(added_fraction)
    added = sum(each.bytes for each in adapter_work(problem, 20, 4).values())
    assert with_adapters.bytes - base.bytes == pytest.approx(added)


def test_adapter_bytes_per_slot() -> None:
    assert adapter_bytes(PROBLEM) == 2 * E * (2 * R * H + N * R + R * I + H * R)
    assert adapter_bytes(BASE_PROBLEM) == 0
    half_the_experts = replace(PROBLEM, local_experts=2, expert_map=True)
    assert adapter_bytes(half_the_experts) * 2 == adapter_bytes(PROBLEM)


def test_stage_works_equal_values_computed_by_hand() -> None:
    """Each of 3 experts gets one pair. The shrink stage multiplies by A."""
    names = (stages.SHRINK, stages.GEMM1, stages.GEMM2)
    load = RankLoad(10, 9, 3, 3)
    base, adapted = (
        compute_stage_works(names, p, UNQUANTIZED, load) for p in (BASE_PROBLEM, PROBLEM)
    )
    assert base[stages.SHRINK] == StageWork()
    shrink, gemm1, gemm2 = (adapted[name] for name in names)
    assert shrink.flops == 2 * 3 * (2 * R * H + R * I)
    assert shrink.read == 9 * H * 2 + 3 * I * 2
    assert shrink.weights == pytest.approx(3 * (2 * R * H + R * I) * 2)
    assert shrink.written == 3 * 3 * R * 2
    assert gemm1.flops - base[stages.GEMM1].flops == 2 * 3 * N * R
    assert gemm1.read - base[stages.GEMM1].read == 3 * 2 * R * 2
    assert gemm1.weights - base[stages.GEMM1].weights == pytest.approx(3 * N * R * 2)
    assert gemm1.written == base[stages.GEMM1].written
    assert gemm2.flops - base[stages.GEMM2].flops == 2 * 3 * H * R
    assert gemm2.read - base[stages.GEMM2].read == 3 * R * 2
    assert gemm2.weights - base[stages.GEMM2].weights == pytest.approx(3 * H * R * 2)


@pytest.mark.parametrize("world", [1, 2])
def test_estimates_include_bytes_and_time_of_adapters(world: int) -> None:
    def estimate(problem: Problem) -> tuple[float, float]:
        estimates = estimate_pairings(distribute_over_ranks(problem, world), Cluster()).estimates
        triton_estimate = next(e for e in estimates if e.experts_part == "TritonExperts")
        return triton_estimate.memory.weights, triton_estimate.experts.seconds

    base_problem = replace(BASE_PROBLEM, hidden=1024, intermediate=512, tokens=64)
    adapted = replace(base_problem, lora="adapters=3,rank=16")
    (base_bytes, base_s), (adapted_bytes, adapted_s) = map(estimate, (base_problem, adapted))
    assert adapted_bytes - base_bytes == 3 * adapter_bytes(distribute_over_ranks(adapted, world))
    assert adapter_bytes(distribute_over_ranks(adapted, world)) * world == adapter_bytes(adapted)
    assert adapted_s > base_s


def test_benchmark_inputs_and_expected_output_include_adapters() -> None:
    """The routing uses only 2 of 8 experts."""
    problem = replace(PROBLEM, tokens=7, experts=8, dtype=torch.float32)
    for lora in (problem.lora, f"{problem.lora},outer=shared"):
        case = LayerCase("mine", replace(problem, lora=lora), RoutingKind("hot", 2))
        call_input, weights = make_input(case, CPU, 0), make_weights(case.problem, CPU)
        assert call_input.routing.slots_T is not None
        assert call_input.routing.slots_T.tolist() == [0, 1, 2, 0, 1, 2, 0]
        assert call_input.routing.slots_T.dtype is torch.int32
        with_adapters = compute_expected_output(case, call_input, weights, UNQUANTIZED).exact
        names = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
        case_without_adapters = LayerCase("mine", replace(problem, lora="none"), case.routing)
        base_weights = replace(weights, **dict.fromkeys(names))
        input_without_adapters = replace(
            call_input, routing=replace(call_input.routing, adapters_T=None)
        )
        without_adapters = compute_expected_output(
            case_without_adapters, input_without_adapters, base_weights, UNQUANTIZED
        ).exact
        assert float((with_adapters - without_adapters).norm() / without_adapters.norm()) > 0.1


def test_the_lora_branch_is_benchmarked_with_both_strategies() -> None:
    """The default sizes include the hidden size of DeepSeek-V3; the measured sizes are smaller."""
    assert [(c.tokens, c.hidden, c.rank, c.experts, c.top_k) for c in BRANCH_SIZES] == [
        (256, 2048, 8, 64, 6), (256, 7168, 8, 256, 8),
    ]  # fmt: skip
    small = (LoRABranchSizes(3, 32, 16, 4, 4, 2), LoRABranchSizes(2, 48, 16, 8, 5, 1))
    rows = list(benchmark_moe_lora(CPU, small, dtype=torch.float32, target_ms=1.0))
    assert [(row.sizes, row.strategy) for row in rows] == [
        (sizes, strategy) for sizes in small for strategy in ("staged", "fused")
    ]
    assert [row.is_auto for row in rows] == [False, True] * 2
    for row in rows:
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


def test_profile_shows_the_shrink_stage(
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
