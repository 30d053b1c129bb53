"""Concurrent use of one kernel, its weights and the interpreter by several threads."""

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
COUNTS = (0, 1, 2, 7, 16, 17, 32, 33)


def first_tokens(given: Any, tokens: int) -> Any:
    x_TH, weights, routing = given
    own = mk.Routing(routing.topk_weights_TK[:tokens], routing.topk_ids_TK[:tokens])
    return x_TH[:tokens], weights, own


def check_at_once(call: Any, want: torch.Tensor, given: Any, turns: int) -> None:
    """Call with a different number of tokens in each of eight threads."""

    def run(tokens: int) -> None:
        own = first_tokens(given, tokens)
        for _ in range(turns):
            torch.testing.assert_close(call(*own), want[:tokens])

    run_concurrently(*(lambda n=n: run(n) for n in COUNTS))  # type: ignore[misc]


@pytest.mark.parametrize("experts", ["TorchExperts", "TritonExperts"])
@pytest.mark.parametrize("how", ["kernel", "plan", "layer"])
def test_concurrent_calls_of_several_sizes(
    experts: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = mk.catalog.this_machine(device="cpu")
    if not mk.check("MoEPrepareAndFinalizeNoEP", experts, PROBLEM, machine).ok:
        pytest.skip("no interpreter here")
    given = random_inputs(PROBLEM, CPU)
    kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", experts, PROBLEM, machine=machine)
    want = kernel(*given)
    if how == "layer":
        monkeypatch.setattr(
            "modular_kernel.layers.fused_moe._plan_cache", kernel_cache.KernelCache()
        )
        layer = FusedMoE(4, 64, 32, top_k=2, params_dtype=torch.float32, experts=experts)
        layer.set_weights(given[1])
        check_at_once(lambda x, _, routing: layer(x, routing), want, given, 3)
        return
    made = mk.make_kernel("MoEPrepareAndFinalizeNoEP", experts, PROBLEM, machine=machine)
    check_at_once(made if how == "kernel" else made.plan(), want, given, 3)


def test_layers_are_composed_concurrently(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    given, found = random_inputs(PROBLEM, CPU), list[Any]()
    machine, options = Machine("cpu"), MeasurementOptions(budget=5.0)
    run_concurrently(*[lambda: found.append(compose(PROBLEM, machine, options=options))] * 4)
    want = found[0](*given)
    for kernel in found[1:]:
        torch.testing.assert_close(kernel(*given), want)


def test_the_first_calls_of_two_threads_share_the_count_of_invalid_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = mk.make_kernel(
        "MoEPrepareAndFinalizeNoEP", "TorchExperts", PROBLEM, machine=Machine("cpu")
    )
    zeros, barrier, found = torch.zeros, threading.Barrier(2), list[torch.Tensor]()

    def slow(*given: Any, **options: Any) -> torch.Tensor:
        barrier.wait(60)
        return zeros(*given, **options)

    monkeypatch.setattr(torch, "zeros", slow)
    run_concurrently(*[lambda: found.append(kernel.count_invalid_ids_on(CPU))] * 2)
    assert found[0] is found[1]
    found[0].fill_(3)
    assert kernel.invalid_ids == 3


def test_weights_bound_by_two_threads_at_once_have_different_signatures() -> None:
    known = CheckedWeightsCache()
    wide, narrow = (random_inputs(p, CPU)[1] for p in (PROBLEM, replace(PROBLEM, hidden=32)))
    bound: list[Any] = []

    class Interleaved(dict[Hashable, int]):
        def setdefault(self, key: Hashable, number: int) -> int:  # type: ignore[override]
            if not bound:  # another thread comes in between
                bound.append(None)
                bound.append(known.add(narrow))
            return super().setdefault(key, number)

    known._signature_numbers = Interleaved()
    bound.append(known.add(wide))
    assert bound[1].signature != bound[2].signature


def test_the_interpreter_is_ready_only_after_its_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = pytest.importorskip("triton.runtime.interpreter")
    patch = pytest.importorskip("modular_kernel.interpreter.patch")
    if not patch.is_active():
        pytest.skip("kernels are compiled here")
    patch.install()
    ready, options = [], patch.make_gpu_options

    def looking(builder: object) -> object:
        ready.append(upstream.InterpreterBuilder is patch.GpuNumericsBuilder)
        return options(builder)

    monkeypatch.setattr(patch, "make_gpu_options", looking)
    monkeypatch.setattr(upstream, "InterpreterBuilder", object)
    patch.install()
    assert ready == [False]
    assert upstream.InterpreterBuilder is patch.GpuNumericsBuilder
