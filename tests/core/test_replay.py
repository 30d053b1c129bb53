"""Plans record the launches of their first call and replay them in later calls.

A replay runs no host code of the parts, but makes all checks.
"""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from invalid_calls import CASES, PROBLEM, Bad, make_arguments
from replayed_parts import (
    CPU,
    SMALL,
    AddExperts,
    Prepare,
    assert_output,
    expected_output,
    make_inputs,
    make_plan,
    watchers,
)

from modular_kernel.catalog import make_kernel
from modular_kernel.errors import CorruptionError, DtypeError, ShapeError, UnsupportedError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.replay import recording
from modular_kernel.spec.problem import Machine
from modular_kernel.tensors import Routing
from modular_kernel.testing.random_inputs import random_inputs


def test_later_calls_run_no_host_code_of_the_parts() -> None:
    plan, part = make_plan()
    for seed in range(5):  # each call has new tensors
        args = make_inputs(seed=seed)
        assert_output(plan(*args), args)
    assert part.host_calls == 1


def test_a_replay_uses_the_tensors_of_its_call() -> None:
    """Each call has a new tensor for one of the recorded arguments."""
    plan, part = make_plan()
    first, second = make_inputs(seed=1), make_inputs(seed=2)
    plan(*first)
    for index in range(3):
        args = (*first[:index], second[index], *first[index + 1 :])
        assert_output(plan(*args), args)  # type: ignore[arg-type]
    out = torch.full_like(first[0], torch.nan)
    assert plan(*first, out=out) is out
    assert_output(out, first)
    assert part.host_calls == 1


def test_inplace_calls_are_replayed_too() -> None:
    plan, part = make_plan(replace(SMALL, inplace=True))
    for seed in range(3):
        args = make_inputs(seed=seed)
        expected = expected_output(args[0].clone(), *args[1:])
        assert plan(*args) is args[0]
        torch.testing.assert_close(args[0], expected)
    assert part.host_calls == 1


def copy_unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that starts four bytes after a multiple of 16."""
    buffer = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)
    start = (-buffer.data_ptr() // 4) % 4 + 1
    return buffer[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def test_a_call_with_another_signature_gets_its_own_recording() -> None:
    plan, part = make_plan()
    x_TH, weights, routing = make_inputs()
    long_ids = Routing(routing.topk_weights_TK, routing.topk_ids_TK.long())
    x_with_gaps = torch.cat([x_TH, x_TH], 1)[:, : x_TH.shape[1]]
    transposed = replace(weights, w1=weights.w1.mT.contiguous().mT)
    calls = [
        (x_TH, weights, routing),
        make_inputs(tokens=3),
        (x_with_gaps, weights, routing),
        (copy_unaligned(x_TH), weights, routing),
        (x_TH, weights, long_ids),
        (x_TH, transposed, routing),
    ]
    for num_signatures, args in enumerate(calls, start=1):
        plan(*args)
        plan(*args)
        assert part.host_calls == num_signatures
    assert_output(plan(*calls[0]), calls[0])
    assert part.host_calls == len(calls)


def test_an_out_of_another_layout_gets_its_own_recording() -> None:
    """Calls with an `out` in the layout of the plan's output share the recording of calls without
    `out`.
    """
    plan, part = make_plan()
    args = make_inputs()
    plan(*args)
    plan(*args, out=torch.empty_like(args[0]))
    assert part.host_calls == 1
    for _ in range(2):
        out = copy_unaligned(torch.full_like(args[0], torch.nan))
        assert plan(*args, out=out) is out
        assert_output(out, args)
    assert part.host_calls == 2
    assert_output(plan(*args), args)
    assert part.host_calls == 2


def test_addresses_of_weights_are_read_in_every_call() -> None:
    plan, part = make_plan()
    args = make_inputs()
    plan(*args)
    args[1].w1.data = torch.ones_like(args[1].w1)
    assert_output(plan(*args), args)
    assert part.host_calls == 1


def test_another_dtype_in_the_same_memory_is_checked_again() -> None:
    plan, _ = make_plan()
    args = make_inputs()
    plan(*args)
    args[1].w1.data = args[1].w1.data.view(torch.int32)
    with pytest.raises(DtypeError, match="w1"):
        plan(*args)


def test_another_layout_in_the_same_memory_is_checked_again() -> None:
    """w1 (4, 16, 16) gets fewer experts, which is invalid, then other strides, which is valid."""
    plan, part = make_plan()
    args = make_inputs()
    weights = args[1]
    for _ in range(2):
        assert_output(plan(*args), args)
    w1_data = weights.w1.data
    weights.w1.data = w1_data[:3]
    with pytest.raises(ShapeError, match="w1"):
        plan(*args)
    weights.w1.data = w1_data.transpose(1, 2)  # needs another recording
    for _ in range(2):
        assert_output(plan(*args), args)
    assert part.host_calls == 2


def test_weights_are_checked_once_and_not_kept_alive() -> None:
    plan, _ = make_plan()
    x_TH, weights, routing = make_inputs()
    plan(x_TH, weights, routing)
    w1_reference = weakref.ref(weights.w1)
    del weights
    gc.collect()
    assert w1_reference() is None
    invalid_weights = replace(make_inputs()[1], w1=torch.ones(4, 16, 15))
    with pytest.raises(ShapeError, match="w1"):
        plan(x_TH, invalid_weights, routing)


@pytest.mark.parametrize("bad", CASES, ids=str)
def test_invalid_tensors_after_a_valid_call_are_refused(bad: Bad) -> None:
    """An invalid tensor raises the same error with and without replay."""
    problem = replace(PROBLEM, **bad.problem)
    plan, part = make_plan(problem)
    valid_args = make_arguments(problem)
    for _ in range(2):
        plan(valid_args.x, valid_args.weights, valid_args.routing)
    assert part.host_calls == 1
    args = bad.change(valid_args)
    with pytest.raises(bad.error) as caught:
        plan(args.x, args.weights, args.routing, out=args.out)
    assert caught.value.what == bad.what
    assert bad.got in str(caught.value.got)
    assert bad.need in str(caught.value.need)
    assert part.host_calls == 1


def test_gradients_are_refused_in_a_replay_as_well() -> None:
    plan, _ = make_plan()
    args = make_inputs()
    plan(*args)
    with pytest.raises(UnsupportedError, match="gradients: got out"):
        plan(*args, out=torch.empty_like(args[0]).requires_grad_())
    args[0].requires_grad_()
    with pytest.raises(UnsupportedError, match="gradients: got x"):
        plan(*args)
    with torch.no_grad():
        assert_output(plan(*args), args)


def test_out_over_x_is_refused_in_a_replay_as_well() -> None:
    plan, _ = make_plan()
    args = make_inputs()
    buffer = torch.cat([args[0], args[0]])
    plan(buffer[:4], *args[1:], out=buffer[4:])
    with pytest.raises(ValueError, match="memory of x"):
        plan(buffer[:4], *args[1:], out=buffer[1:5])


def test_overlapping_inputs_are_not_replayed() -> None:
    """If two inputs overlap, an address does not determine to which input it belongs."""
    plan, part = make_plan()
    x_TH, weights, routing = make_inputs()
    w2_in_w1 = weights.w1.flatten()[: weights.w2.numel()].view_as(weights.w2)
    overlapping = replace(weights, w2=w2_in_w1)
    for _ in range(3):
        assert_output(plan(x_TH, overlapping, routing), (x_TH, overlapping, routing))
    assert part.host_calls == 3


class Copying(AddExperts):
    """Uses a torch operation, which a recording cannot contain."""

    replayable = True

    def apply(self, tokens: Any, *, output: torch.Tensor, **kwargs: Any) -> None:
        super().apply(tokens, output=output, **kwargs)
        output.mul_(2)


class Inheriting(AddExperts):
    """Does not declare whether it can be replayed."""


class UndeclaredPrepare(Prepare):
    """Does not declare whether it can be replayed."""


@pytest.mark.parametrize("experts", [Copying, Inheriting])
def test_parts_that_cannot_be_replayed_run_in_every_call(experts: type[AddExperts]) -> None:
    plan, part = make_plan(experts=experts)
    args = make_inputs()
    first = plan(*args).clone()
    for _ in range(2):
        assert torch.equal(plan(*args), first)
    assert part.host_calls == 3


def test_both_parts_must_be_replayable() -> None:
    kernel = FusedMoEModularKernel(
        UndeclaredPrepare(SMALL), AddExperts(SMALL), machine=Machine("cpu")
    )
    assert not kernel.replayable
    assert make_plan()[0].kernel.replayable


def test_a_checked_plan_checks_every_call() -> None:
    plan, part = make_plan(checked=True)
    args = make_inputs()
    plan(*args)
    args[2].topk_ids_TK[0, 0] = 99
    with pytest.raises(ValueError, match="topk_ids"):
        plan(*args)
    assert part.host_calls == 1


def test_profilers_see_stages_and_launches() -> None:
    plan, part = make_plan()
    args = make_inputs()
    plan(*args)
    with torch.profiler.profile() as profile:
        plan(*args)
    assert part.host_calls == 2
    assert "mk::experts" in {event.key for event in profile.key_averages()}
    watchers.append("a launch hook of Triton")
    try:
        plan(*args)
    finally:
        watchers.clear()
    assert part.host_calls == 3
    plan(*args)
    assert part.host_calls == 3


def test_a_replay_is_poisoned_like_any_call() -> None:
    plan, part = make_plan(poison=True)
    args = make_inputs()
    for _ in range(3):
        assert_output(plan(*args), args)
    assert part.host_calls == 1
    part.launch = lambda tensors, count: None  # type: ignore[method-assign]
    out = plan(*make_inputs(tokens=5))
    fill = torch.full_like(out, plan._workspace.fill.value(out.dtype))
    torch.testing.assert_close(out, fill, rtol=0, atol=0, equal_nan=True)


def test_red_zones_are_checked_in_a_replay() -> None:
    plan, _ = make_plan(poison=True)
    args = make_inputs()
    plan(*args)
    buffer = plan._workspace.take("workspace13", (SMALL.tokens, SMALL.hidden))
    element_past_end = buffer.as_strided((1,), (1,), buffer.storage_offset() + buffer.numel())

    def overrun(stream: int, pointers: Sequence[int]) -> None:
        element_past_end.fill_(0.0)

    (signature, recorded_call) = next(iter(plan._recorded._recorded.items()))
    assert recorded_call is not None
    replays = (*recorded_call.replays, overrun)
    plan._recorded.store(signature, replace(recorded_call, replays=replays))
    with pytest.raises(CorruptionError, match="workspace13"):
        plan(*args)


def test_calls_without_tokens_are_not_recorded() -> None:
    plan, part = make_plan()
    assert plan(*make_inputs(tokens=0)).shape == (0, SMALL.hidden)
    assert part.host_calls == 0
    args = make_inputs()
    assert_output(plan(*args), args)


def test_the_number_of_recordings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MAX_RECORDED", 2)
    plan, part = make_plan()
    for tokens in (1, 2, 3, 3, 2, 1):
        plan(*make_inputs(tokens=tokens))
    assert part.host_calls == 4  # the recording for one token was dropped and made again
    assert len(plan._recorded._recorded) == 2


def test_an_error_during_recording_leaves_no_recording() -> None:
    plan, part = make_plan()
    args = make_inputs()

    def fail_to_launch(tensors: Sequence[torch.Tensor], count: int) -> None:
        raise RuntimeError("no such device")

    part.launch = fail_to_launch  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no such device"):
        plan(*args)
    assert recording.get_active_recorder() is None
    del part.launch  # type: ignore[method-assign]
    assert_output(plan(*args), args)


def test_interpreted_kernels_are_not_replayed(machine: Machine) -> None:
    if machine.device != "cpu" or not machine.interpreter:
        pytest.skip("compiled kernels are replayed: tests/gpu")
    kernel = make_kernel("MoEPrepareAndFinalizeNoEP", "TritonExperts", SMALL)
    plan, args = kernel.plan(), random_inputs(SMALL, CPU)
    expected = kernel(*args)
    for _ in range(3):
        assert torch.equal(plan(*args), expected)
    assert set(plan._recorded._recorded.values()) <= {None}


class StepExperts(AddExperts):
    """Runs host code before, between and after its launches, and lists the steps."""

    replayable = True

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        self.steps: list[str] = []
        self.busy = False

    def apply(self, tokens: Any, **arguments: Any) -> None:
        recording.bypass_replay_while(lambda: self.busy)
        self.run_step("before")
        super().apply(tokens, **arguments)
        self.run_step("after")

    def launch(self, tensors: Sequence[torch.Tensor], count: int) -> None:
        super().launch(tensors, count)
        self.run_step(f"launched to {tensors[0].data_ptr():x}")

    def run_step(self, name: str) -> None:
        def step() -> None:
            with recording.hide_from_recorder():
                torch.zeros(1).add_(1)
            self.steps.append(name)

        step()
        recording.run_in_replays(step)


def test_a_replay_runs_host_code_between_launches() -> None:
    plan, part = make_plan(experts=StepExperts)
    first = make_inputs(seed=1)
    assert_output(plan(*first), first)
    recorded_steps = list(part.steps)
    assert recorded_steps[0] == "before"
    assert recorded_steps[-1] == "after"
    assert len(recorded_steps) == 4
    for seed in (2, 3):
        args = make_inputs(seed=seed)
        assert_output(plan(*args), args)
    assert part.host_calls == 1
    assert part.steps == 3 * recorded_steps


def test_a_bypassed_replay_runs_host_code() -> None:
    plan, part = make_plan(experts=StepExperts)
    args = make_inputs()
    plan(*args)
    for busy, host_calls in ((False, 1), (True, 2), (True, 3), (False, 3)):
        part.busy = busy
        assert_output(plan(*args), args)
        assert part.host_calls == host_calls


def test_an_error_in_a_replay_is_reported_to_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, part = make_plan(experts=StepExperts)
    args, reported_errors = make_inputs(), []
    monkeypatch.setattr(plan.kernel.prepare_finalize, "abandon", reported_errors.append)
    plan(*args)
    monkeypatch.setattr(part, "steps", None)  # so that host code of the replay fails
    with pytest.raises(AttributeError):
        plan(*args)
    assert [type(error) for error in reported_errors] == [AttributeError]


def test_the_first_calls_of_a_part_need_not_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, part = make_plan()
    answers = [False, False, True]
    monkeypatch.setattr(plan.kernel.prepare_finalize, "may_record", lambda: answers.pop(0))
    args = make_inputs()
    for host_calls in (1, 2, 3, 3):
        assert_output(plan(*args), args)
        assert part.host_calls == host_calls
    counters = plan.kernel.counters()
    assert counters["fallback_calls"] == {"first call of a layer over ranks": 2}
    assert (counters["recorded_calls"], counters["replayed_calls"]) == (1, 1)


def test_an_instance_may_decline_to_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, part = make_plan()
    monkeypatch.setattr(plan.kernel.prepare_finalize, "may_replay", lambda: False)
    assert not plan.kernel.replayable
    args = make_inputs()
    for host_calls in (1, 2):
        assert_output(plan(*args), args)
        assert part.host_calls == host_calls
