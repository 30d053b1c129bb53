"""How well an estimate is known follows from the records of its parts."""

from dataclasses import replace

import pytest

from modular_kernel.perf_model import accuracy as accuracy_module
from modular_kernel.perf_model.accuracy import (
    ORDER_OF_MAGNITUDE,
    compare_exchange_records,
    describe_accuracy,
)
from modular_kernel.perf_model.estimate import (
    Estimate,
    distribute_over_ranks,
    estimate_pairings,
)
from modular_kernel.perf_model.hardware import Cluster
from modular_kernel.perf_model.machines import parse_machine
from modular_kernel.spec.problem import Problem

DEEPSEEK = Problem(128, 7168, 2048, 256, 8, quant="fp8_w8a8_block")


def find_estimate(
    exchange: str, cluster: Cluster, problem: Problem = DEEPSEEK, experts: str = "TritonExperts"
) -> Estimate:
    """Return the estimate of a pairing with one rank on each GPU of the machine."""
    problem = distribute_over_ranks(problem, cluster.gpus, cluster.per_host)
    pairing = f"{exchange}PrepareAndFinalize x {experts}"
    return next(e for e in estimate_pairings(problem, cluster).estimates if e.pairing == pairing)


def find_estimate_of_one_gpu(problem: Problem) -> Estimate:
    estimates = estimate_pairings(problem, parse_machine("h200")).estimates
    return next(e for e in estimates if e.experts_part == "TritonExperts")


def test_worst_error_is_that_of_all_records_of_the_exchange() -> None:
    cluster = parse_machine("8xh200")
    accuracy = describe_accuracy(find_estimate("SymmMem", cluster), cluster)
    errors = [
        abs(comparison.error)
        for comparison in compare_exchange_records()
        if comparison.measured.part == "SymmMemPrepareAndFinalize"
    ]
    assert len(errors) == 24
    assert accuracy.worst == max(errors)
    assert not accuracy.is_rough
    assert accuracy.summary == "parts within 15 % of records"
    assert "24 records of 2 and 4 GPUs, none of 8" in accuracy.reasons[0]
    four = parse_machine("4xh200")
    assert (
        describe_accuracy(find_estimate("SymmMem", four), four)
        .reasons[0]
        .endswith("24 records of 2 and 4 GPUs")
    )


@pytest.mark.parametrize(
    ("machine", "exchange", "reason"),
    [
        ("2x8xh200", "HostThenRank", "exchange: HostThenRank was never measured"),
        ("2x8xh200", "TorchAll2All", "exchange: TorchAll2All was never measured between hosts"),
        ("8xh200", "HostThenRank", "exchange: HostThenRank was never measured"),
    ],
)
def test_exchange_without_records_gives_an_order_of_magnitude(
    machine: str, exchange: str, reason: str
) -> None:
    cluster = parse_machine(machine)
    accuracy = describe_accuracy(find_estimate(exchange, cluster), cluster)
    assert (accuracy.summary, accuracy.is_rough) == (ORDER_OF_MAGNITUDE, True)
    assert accuracy.worst is None
    assert accuracy.reasons[0] == reason


def test_records_of_eager_calls_give_an_order_of_magnitude() -> None:
    cluster = parse_machine("8xh200")
    accuracy = describe_accuracy(find_estimate("ReplicatedEP", cluster), cluster)
    assert accuracy.is_rough
    assert accuracy.reasons[0].endswith("; their host time varies (no CUDA graph)")
    assert "24 records of 2 and 4 GPUs" in accuracy.reasons[0]


def test_records_between_hosts_count_between_hosts_only() -> None:
    """DeepEP's published records of 16 and more GPUs, and ours of 2 and 4 GPUs."""
    two_hosts, one_host = parse_machine("2x8xh200"), parse_machine("8xh200")
    between = describe_accuracy(find_estimate("DeepEPHT", two_hosts), two_hosts)
    assert "of 6 records of 16, 32 and 64 GPUs" in between.reasons[0]
    within = describe_accuracy(find_estimate("DeepEPHT", one_host), one_host)
    assert "of 24 records of 2 and 4 GPUs, none of 8" in within.reasons[0]


def test_experts_prefer_records_of_the_same_sizes() -> None:
    cluster = parse_machine("h200")

    def describe(problem: Problem) -> str:
        return describe_accuracy(find_estimate_of_one_gpu(problem), cluster).reasons[0]

    assert "with fp8_w8a8_block are within 7 % of 6 records of these sizes" in describe(DEEPSEEK)
    other = replace(DEEPSEEK, intermediate=1536)
    assert "with fp8_w8a8_block are within 21 % of 15 records of other sizes" in describe(other)
    unquantized = Problem(128, 4096, 14336, 8, 2)
    assert "without quantization are within 6 % of 6 records of these" in describe(unquantized)


def test_scheme_and_gpu_without_records_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = parse_machine("h200")
    single = Problem(128, 2048, 768, 128, 8, dtype="float32")
    accuracy = describe_accuracy(find_estimate_of_one_gpu(single), cluster)
    assert accuracy.summary == "experts not measured in float32"
    assert accuracy.reasons == ("experts: TritonExperts was never measured in float32",)
    assert accuracy.worst is None
    recorded = accuracy_module.recorded_layers()
    others = tuple(layer for layer in recorded if layer.scheme != "fp8_w8a8_block")
    monkeypatch.setattr(accuracy_module, "recorded_layers", lambda: others)
    accuracy = describe_accuracy(find_estimate_of_one_gpu(DEEPSEEK), cluster)
    assert accuracy.summary == "experts not measured with fp8_w8a8_block"
    for name in ("8xb200", "8xh100", "8xa100"):
        other = parse_machine(name)
        problem = replace(DEEPSEEK, quant="none")
        accuracy = describe_accuracy(find_estimate("SymmMem", other, problem), other)
        assert accuracy.summary == f"not measured on {other.gpu.name}"
        assert accuracy.reasons[-1].startswith(f"GPU: {other.gpu.name} was not measured")
