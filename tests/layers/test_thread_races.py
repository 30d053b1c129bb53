"""Several threads use a kernel, its weights and Triton's interpreter at the same time."""

import threading
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_adapter_changes import run_concurrently

import modular_kernel as mk
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.operators import kernel_cache
from modular_kernel.replay.recording import CheckedWeightsCache
from modular_kernel.select.autotune import MeasurementOptions, compose
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.random_inputs import random_inputs

PROBLEM = mk.Problem(
    tokens=33, hidden=64, intermediate=32, experts=4, top_k=2, dtype=torch.float32
)  # fmt: skip
CPU = torch.device("cpu")
TOKEN_COUNTS = (0, 1, 2, 7, 16, 17, 32, 33)


def take_first_tokens(arguments: Any, tokens: int) -> Any:
    x_TH, weights, routing = arguments
    first_routing = mk.Routing(routing.topk_weights_TK[:tokens], routing.topk_ids_TK[:tokens])
    return x_TH[:tokens], weights, first_routing


def check_concurrent_calls(
    call: Any, expected: torch.Tensor, arguments: Any, repetitions: int
) -> None:
    """Compare repeated calls in eight threads, each of which has a different number of tokens."""

    def run(tokens: int) -> None:
        thread_arguments = take_first_tokens(arguments, tokens)
        for _ in range(repetitions):
            torch.testing.assert_close(call(*thread_arguments), expected[:tokens])

    run_concurrently(*(lambda n=n: run(n) for n in TOKEN_COUNTS))  # type: ignore[misc]


@pytest.mark.parametrize("experts", ["TorchExperts", "TritonExperts"])
@pytest.mark.parametrize("callable_kind", ["kernel", "plan", "layer"])
def test_concurrent_calls_of_several_sizes(
    experts: str, callable_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = mk.catalog.this_machine(device="cpu")
    if not mk.check("MoEPrepareAndFinalizeNoEP", experts, PROBLEM, machine).ok:
        pytest.skip("needs Triton's interpreter")
    arguments = random_inputs(PROBLEM, CPU)
    kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", experts, PROBLEM, machine=machine)
    expected = kernel(*arguments)
    if callable_kind == "layer":
        monkeypatch.setattr(
            "modular_kernel.layers.fused_moe._plan_cache", kernel_cache.KernelCache()
        )
        layer = FusedMoE(4, 64, 32, top_k=2, params_dtype=torch.float32, experts=experts)
        layer.set_weights(arguments[1])
        check_concurrent_calls(lambda x, _, routing: layer(x, routing), expected, arguments, 3)
        return
    kernel_under_test = mk.make_kernel(
        "MoEPrepareAndFinalizeNoEP", experts, PROBLEM, machine=machine
    )
    check_concurrent_calls(
        kernel_under_test if callable_kind == "kernel" else kernel_under_test.plan(),
        expected,
        arguments,
        3,
    )


def test_layers_are_composed_concurrently(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    arguments, kernels = random_inputs(PROBLEM, CPU), list[Any]()
    machine, options = Machine("cpu"), MeasurementOptions(budget=5.0)
    run_concurrently(*[lambda: kernels.append(compose(PROBLEM, machine, options=options))] * 4)
    expected = kernels[0](*arguments)
    for kernel in kernels[1:]:
        torch.testing.assert_close(kernel(*arguments), expected)


def test_threads_share_the_counter_of_invalid_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = mk.make_kernel(
        "MoEPrepareAndFinalizeNoEP", "TorchExperts", PROBLEM, machine=Machine("cpu")
    )
    allocate_zeros, barrier, counters = torch.zeros, threading.Barrier(2), list[torch.Tensor]()

    def wait_for_both_and_allocate(*arguments: Any, **options: Any) -> torch.Tensor:
        barrier.wait(60)
        return allocate_zeros(*arguments, **options)

    monkeypatch.setattr(torch, "zeros", wait_for_both_and_allocate)
    run_concurrently(*[lambda: counters.append(kernel.count_invalid_ids_on(CPU))] * 2)
    assert counters[0] is counters[1]
    counters[0].fill_(3)
    assert kernel.invalid_ids == 3


def test_weights_bound_concurrently_have_different_signatures() -> None:
    cache = CheckedWeightsCache()
    wide_weights, narrow_weights = (
        random_inputs(p, CPU)[1] for p in (PROBLEM, replace(PROBLEM, hidden=32))
    )
    bound_weights: list[Any] = []

    class DictInterruptedByAdd(dict[Hashable, int]):
        def setdefault(self, key: Hashable, number: int) -> int:  # type: ignore[override]
            if not bound_weights:  # simulates an `add` in another thread
                bound_weights.append(None)  # prevents recursion
                bound_weights.append(cache.add(narrow_weights))
            return super().setdefault(key, number)

    cache._signature_numbers = DictInterruptedByAdd()
    bound_weights.append(cache.add(wide_weights))
    assert bound_weights[1].signature != bound_weights[2].signature


def test_the_interpreter_is_patched_only_after_its_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = pytest.importorskip("triton.runtime.interpreter")
    patch = pytest.importorskip("modular_kernel.interpreter.patch")
    if not patch.is_active():
        pytest.skip("needs Triton's interpreter")
    patch.install()
    is_patched, make_gpu_options = [], patch.make_gpu_options

    def make_options_and_record(builder: object) -> object:
        is_patched.append(upstream.InterpreterBuilder is patch.GpuNumericsBuilder)
        return make_gpu_options(builder)

    monkeypatch.setattr(patch, "make_gpu_options", make_options_and_record)
    monkeypatch.setattr(upstream, "InterpreterBuilder", object)
    patch.install()
    assert is_patched == [False]
    assert upstream.InterpreterBuilder is patch.GpuNumericsBuilder
