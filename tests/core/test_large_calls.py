"""Calls with more than MAX_SHARED_TOKENS tokens allocate their own workspace.

Their launches are replayed in the workspace of each call. In these tests, MAX_SHARED_TOKENS is 4,
and replayed_parts.py simulates launches.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from replayed_parts import CPU, SMALL, AddExperts, Prepare, assert_output, make_inputs, watchers

from modular_kernel import plan
from modular_kernel.errors import CapacityError, InputError, ShapeError, UnsupportedError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.plan import StreamMemories, held_bytes
from modular_kernel.replay import recording
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import Routing
from modular_kernel.utils import call_counters

LARGE = SMALL.with_tokens(64)


@pytest.fixture(autouse=True)
def limit_shared_tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_memories", StreamMemories())
        for module in ("plan", "kernel"):
            patch.setattr(f"modular_kernel.{module}.MAX_SHARED_TOKENS", 4)
        yield


class WatchedExperts(AddExperts):
    """Keeps weak references to the workspaces of its calls."""

    replayable = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.workspaces: list[weakref.ref[torch.Tensor]] = []

    def apply(self, tokens: Any, *, weights: Any, workspace: Any, output: torch.Tensor) -> None:
        self.workspaces.append(weakref.ref(workspace.memory))
        super().apply(tokens, weights=weights, workspace=workspace, output=output)


def make_kernel_and_experts(
    problem: Problem = LARGE, experts: type[AddExperts] = AddExperts, **options: Any
) -> tuple[FusedMoEModularKernel, Any]:
    part = experts(problem)
    kernel = FusedMoEModularKernel(Prepare(problem), part, machine=Machine("cpu"), **options)
    return kernel, part


def get_plan(kernel: FusedMoEModularKernel) -> Any:
    (call_plan,) = {id(plan): plan for plan in kernel._call_plans._plans.values()}.values()
    return call_plan


def test_the_second_call_is_recorded_and_later_calls_are_replayed() -> None:
    kernel, part = make_kernel_and_experts()
    outputs = []
    for seed in range(5):  # each call has new tensors
        args = make_inputs(tokens=8, seed=seed)
        outputs.append(kernel(*args))
        assert_output(outputs[-1], args)
    assert part.host_calls == 2
    assert len({out.data_ptr() for out in outputs}) == 5
    counters = kernel.counters()
    assert (counters["calls"], counters["tokens"], counters["plans"]) == (5, 40, 1)
    assert (counters["recorded_calls"], counters["replayed_calls"]) == (1, 3)
    assert counters["fallback_calls"] == {call_counters.OWN_WORKSPACE: 1}


def test_a_replay_writes_to_no_workspace_of_another_call() -> None:
    """The workspaces of earlier calls are kept alive, so replays get other addresses."""

    class KeepsWorkspaces(AddExperts):
        replayable = True

        def apply(self, tokens: Any, *, weights: Any, workspace: Any, output: torch.Tensor) -> None:
            super().apply(tokens, weights=weights, workspace=workspace, output=output)
            workspaces.append(workspace.memory)

    workspaces: list[torch.Tensor] = []
    kernel, part = make_kernel_and_experts(experts=KeepsWorkspaces)
    for _ in range(2):
        kernel(*make_inputs(tokens=8))
    for workspace_memory in workspaces:
        workspace_memory.fill_(0xA5)
    for seed in range(3):
        args = make_inputs(tokens=8, seed=seed)
        assert_output(kernel(*args), args)
    assert part.host_calls == len(workspaces) == 2
    assert all(bool((memory == 0xA5).all()) for memory in workspaces)


def test_no_workspace_is_held() -> None:
    kernel, part = make_kernel_and_experts(experts=WatchedExperts)
    for _ in range(4):
        kernel(*make_inputs(tokens=8))
    assert len(part.workspaces) == part.host_calls == 2
    assert all(workspace() is None for workspace in part.workspaces)
    assert not held_bytes()
    kernel.reserve_workspace(8)
    assert not held_bytes()
    kernel(*make_inputs(tokens=4))
    assert list(held_bytes()) == [(-1, 0)]


def test_calls_with_out_inplace_or_offset_inputs_are_replayed() -> None:
    kernel, part = make_kernel_and_experts()
    args = make_inputs(tokens=8)
    for _ in range(4):
        out = torch.full_like(args[0], torch.nan)
        assert kernel(*args, out=out) is out
        assert_output(out, args)
    assert part.host_calls == 2
    with pytest.raises(InputError, match="memory of x"):
        kernel(*args, out=args[0])
    for _ in range(3):  # an x that is not aligned to 16 bytes has its own recording
        x_TH = torch.zeros(8 * 16 + 1)[1:].view(8, 16).copy_(args[0])
        assert_output(kernel(x_TH, *args[1:]), args)
    assert part.host_calls == 4
    kernel, part = make_kernel_and_experts(replace(LARGE, inplace=True))
    for seed in range(4):
        args = make_inputs(tokens=8, seed=seed)
        x_before = args[0].clone()
        assert kernel(*args) is args[0]
        assert_output(args[0], (x_before, *args[1:]))
    assert part.host_calls == 2


def test_each_call_reads_its_own_weights() -> None:
    kernel, part = make_kernel_and_experts()
    x_TH, weights, routing = args = make_inputs(tokens=8)
    for _ in range(3):
        assert_output(kernel(*args), args)
    weights.w1.mul_(3)
    assert_output(kernel(*args), args)
    weights.w1.data = weights.w1 + 1  # other memory
    assert_output(kernel(*args), args)
    doubled_weights = replace(weights, w1=weights.w1.clone() * 2)
    assert_output(kernel(x_TH, doubled_weights, routing), (x_TH, doubled_weights, routing))
    assert part.host_calls == 2


def test_each_number_of_tokens_has_a_recording_in_one_plan() -> None:
    kernel, part = make_kernel_and_experts()
    for _ in range(3):
        for tokens in (5, 8, 9, 40, 64):
            args = make_inputs(tokens=tokens)
            assert_output(kernel(*args), args)
    assert part.host_calls == 2 * 5
    assert kernel._call_plans.capacities == (64,)
    with pytest.raises(CapacityError):
        kernel(*make_inputs(tokens=65))


def test_the_number_of_recordings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MAX_RECORDED", 2)
    monkeypatch.setattr(plan, "_MAX_SEEN", 3)
    kernel, part = make_kernel_and_experts()
    for tokens in range(5, 20):  # each number of tokens occurs once, so no call is recorded
        kernel(*make_inputs(tokens=tokens))
    call_plan = get_plan(kernel)
    assert len(call_plan._seen) == 3
    assert not call_plan._recorded._recorded
    assert part.host_calls == 15
    for tokens in range(5, 10):
        for _ in range(3):
            args = make_inputs(tokens=tokens)
            assert_output(kernel(*args), args)
    assert len(call_plan._recorded._recorded) == 2
    assert len(call_plan._seen) <= 3
    assert part.host_calls == 15 + 2 * 5
    for recorded_calls in (5, 6):  # the recording of this number of tokens was dropped
        kernel(*make_inputs(tokens=5))
        assert kernel.counters()["recorded_calls"] == recorded_calls


def test_parts_that_are_not_replayable_have_no_plan_for_large_calls() -> None:
    class UnrecordedExperts(AddExperts):
        replayable = False

    kernel, part = make_kernel_and_experts(experts=UnrecordedExperts)
    for tokens in (8, 8, 8, 4):
        args = make_inputs(tokens=tokens)
        assert_output(kernel(*args), args)
    assert kernel._call_plans.capacities == (4,)
    reasons = {call_counters.OWN_WORKSPACE: 3, call_counters.NOT_REPLAYABLE: 1}
    assert kernel.counters()["fallback_calls"] == reasons
    assert part.host_calls == 4


@pytest.mark.parametrize("option", ["poison", "checked"])
def test_checked_and_poisoned_calls_are_not_replayed(option: str) -> None:
    kernel, part = make_kernel_and_experts(**{option: True})
    args = make_inputs(tokens=8)
    for _ in range(4):
        assert_output(kernel(*args), args)
    assert part.host_calls == 4
    assert kernel.counters()["plans"] == 0


def test_checks_are_made_in_every_call() -> None:
    kernel, _ = make_kernel_and_experts()
    x_TH, weights, routing = args = make_inputs(tokens=8)
    for _ in range(3):
        assert_output(kernel(*args), args)
        with pytest.raises(ShapeError, match="w1"):
            kernel(x_TH, replace(weights, w1=torch.ones(4, 16, 15)), routing)
        with pytest.raises(InputError, match="topk_weights"):
            kernel(x_TH, weights, Routing(routing.topk_weights_TK[:7], routing.topk_ids_TK))
        with pytest.raises(UnsupportedError, match="require grad"):
            kernel(x_TH.clone().requires_grad_(), weights, routing)
    assert not plan._memories.of(CPU, 0).busy


def test_launch_hooks_run_the_host_code() -> None:
    kernel, part = make_kernel_and_experts()
    args = make_inputs(tokens=8)
    for _ in range(3):
        kernel(*args)
    watchers.append("profiler")
    try:
        assert_output(kernel(*args), args)
    finally:
        watchers.clear()
    assert part.host_calls == 3
    assert_output(kernel(*args), args)
    assert part.host_calls == 3


def test_nested_and_concurrent_calls_are_correct() -> None:
    inner, _ = make_kernel_and_experts()
    args, inner_args = make_inputs(tokens=8), make_inputs(tokens=9, seed=5)
    expected = [inner(*inner_args) for _ in range(3)][-1]

    class NestedExperts(AddExperts):
        replayable = False

        def launch(self, tensors: Sequence[torch.Tensor], count: int) -> None:
            super().launch(tensors, count)
            results.append(inner(*inner_args))
            thread = threading.Thread(target=lambda: results.append(inner(*inner_args)))
            thread.start()
            thread.join(30)
            assert not thread.is_alive()

    results: list[torch.Tensor] = []
    kernel, _ = make_kernel_and_experts(experts=NestedExperts)
    assert_output(kernel(*args), args)
    assert len(results) == 4
    assert all(torch.equal(result, expected) for result in results)


def test_threads_call_one_kernel() -> None:
    kernel, _ = make_kernel_and_experts()
    calls = [make_inputs(tokens=tokens, seed=tokens) for tokens in (3, 5, 9, 12)]
    mismatches: list[int] = []

    def run(seed: int) -> None:
        for step in range(20):
            index = (seed + step) % len(calls)
            try:
                assert_output(kernel(*calls[index]), calls[index])
            except AssertionError:
                mismatches.append(index)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not mismatches
    assert kernel.counters()["calls"] == 80


def test_several_calls_in_flight() -> None:
    kernel, part = make_kernel_and_experts()
    first, second = make_inputs(tokens=8), make_inputs(tokens=8, seed=3)
    for _ in range(3):
        kernel(*first)
    pending_calls = [kernel.start(*first), kernel.start(*second)]
    assert_output(kernel(*second), second)
    for pending, args in zip(reversed(pending_calls), (second, first), strict=True):
        assert_output(pending.finish(), args)
    assert part.host_calls == 4


def test_out_of_memory_propagates_and_leaves_the_plan_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, part = make_kernel_and_experts()
    args = make_inputs(tokens=8)
    for _ in range(3):
        kernel(*args)

    def raise_out_of_memory(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", raise_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            kernel(*args)
    assert not plan._memories.of(CPU, 0).busy
    assert_output(kernel(*args), args)
    assert part.host_calls == 2


def test_streams_have_recordings_of_their_own() -> None:
    kernel, part = make_kernel_and_experts()
    args = make_inputs(tokens=8)
    for stream in (1, 2):
        stream_plan = kernel._call_plans._find_or_make_plan(kernel, CPU, stream, 8)
        assert stream_plan is not None
        for _ in range(3):
            out = stream_plan.run(*args, None)
            assert out is not None
            assert_output(out, args)
    assert part.host_calls == 4
    assert not held_bytes()


def test_an_empty_buffer_does_not_keep_its_workspace_alive() -> None:
    memory = torch.empty(64, dtype=torch.uint8)
    with recording.record_launches((memory,)) as recorder:
        assert recorder.locate(memory[16:]) == (0, 16)
        assert recorder.locate(memory[64:]) is None
        outside = torch.empty(4)
        assert recorder.locate(outside) is None
    assert recorder._kept_tensors == [outside]
