"""Plans that replay: when the parts' host code runs again, and that no check is lost by it.

The parts here launch on a device of this test's own: host memory, changed through bare addresses,
so that torch does not see the work, as it does not see a kernel of Triton's.
"""

import ctypes
import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_bad_input import CASES, PROBLEM, Bad, arguments

from experts import TorchExperts
from modular_kernel import replay
from modular_kernel.catalog import make_kernel
from modular_kernel.composer import random_inputs
from modular_kernel.errors import CorruptionError, ShapeError, UnsupportedError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.plan import Plan
from modular_kernel.support import ExpertsRequirements
from modular_kernel.tensors import ContiguousTokens, ExpertWeights, Routing
from modular_kernel.types import ActivationFormat, Combine, Machine, Problem, Reduce
from modular_kernel.workspace import BufferSpec, WorkspaceShapes
from prepare_finalize import MoEPrepareAndFinalizeNoEP
from topk_reduce import KeepTopK, TopKWeightAndReduceNoOp

CPU = torch.device("cpu")
SMALL = Problem(tokens=8, hidden=16, intermediate=8, experts=4, top_k=2, dtype=torch.float32)
watchers: list[str] = []


def _floats(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)


def add_kernel(out: int, x: int, w: int, weights: int, count: int) -> None:
    """out[i] = x[i] + w[0] + weights[0], all float32."""
    out_values, x_values = _floats(out, count), _floats(x, count)
    w_0, weight_0 = _floats(w, 1)[0], _floats(weights, 1)[0]
    for i in range(count):
        out_values[i] = x_values[i] + w_0 + weight_0


def launch_add(tensors: Sequence[torch.Tensor], count: int) -> None:
    """`modular_kernel.ops.launch.launch`, for the device of this test."""
    add_kernel(*(tensor.data_ptr() for tensor in tensors), count)
    recorder = replay.recorder()
    if recorder is None:
        return
    places = [recorder.place(tensor) for tensor in tensors]
    fixed = [tensor.data_ptr() for tensor in tensors]

    def again(pointers: Sequence[int]) -> None:
        found = [
            own if place is None else pointers[place[0]] + place[1]
            for own, place in zip(fixed, places, strict=True)
        ]
        add_kernel(*found, count)

    recorder.note(again, play_all, watched)


def play_all(launches: Sequence[Any], inputs: int) -> replay.Play:
    def play(stream: int, pointers: Sequence[int]) -> None:
        assert len(pointers) == inputs
        for again in launches:
            again(pointers)

    return play


def watched() -> bool:
    return bool(watchers)


class Prepare(MoEPrepareAndFinalizeNoEP):
    replayable = True


class AddExperts(TorchExperts):
    """Two launches through a buffer: x + 2 (w1[0] + topk_weights[0]). Counts its host calls."""

    replayable = True
    requires = ExpertsRequirements(
        activation_format=ActivationFormat.STANDARD,
        reduce=Reduce.NOOP,
        keep_topk=True,
        expert_map=True,
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.host_calls = 0

    def workspace_shapes(self, shape: Any) -> WorkspaceShapes:
        rows = BufferSpec((shape.tokens, self.problem.hidden), torch.float32)
        kept = () if self.problem.combine is Combine.SUM else (shape.top_k,)
        output = BufferSpec((shape.tokens, *kept, self.problem.hidden), self.problem.dtype)
        return WorkspaceShapes(rows, BufferSpec((0,), torch.float32), output)

    def finalize_weight_and_reduce_impl(self) -> Any:
        summed = self.problem.combine is Combine.SUM
        return TopKWeightAndReduceNoOp() if summed else KeepTopK(weighted=False)

    def apply(self, tokens: Any, *, weights: Any, workspace: Any, output: torch.Tensor) -> None:
        assert isinstance(tokens, ContiguousTokens)
        self.host_calls += 1
        between = workspace.take("workspace13", tuple(tokens.x_TH.shape))
        router = tokens.routing.topk_weights_TK
        if self.problem.dtype is not torch.float32:
            return  # bad input is not computed with
        self.launch((between, tokens.x_TH, weights.w1, router), tokens.x_TH.numel())
        self.launch((output, between, weights.w1, router), tokens.x_TH.numel())

    def launch(self, tensors: Sequence[torch.Tensor], count: int) -> None:
        launch_add(tensors, count)


def planned(
    problem: Problem = SMALL, experts: type[AddExperts] = AddExperts, **options: Any
) -> tuple[Plan, AddExperts]:
    part = experts(problem)
    kernel = FusedMoEModularKernel(Prepare(problem), part, machine=Machine("cpu"), **options)
    return kernel.plan(), part


def inputs(tokens: int = 4, seed: int = 0) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    generator = torch.Generator().manual_seed(seed)
    x_TH, weights, routing = random_inputs(SMALL.with_tokens(tokens), CPU)
    x_TH = torch.randn(x_TH.shape, generator=generator)
    weights = replace(weights, w1=torch.randn(weights.w1.shape, generator=generator))
    shape = routing.topk_weights_TK.shape
    return x_TH, weights, Routing(torch.rand(shape, generator=generator), routing.topk_ids_TK)


def expected(x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing) -> torch.Tensor:
    step_w, step_r = weights.w1.flatten()[0], routing.topk_weights_TK.flatten()[0]
    return x_TH + step_w + step_r + step_w + step_r


def assert_right(out: torch.Tensor, args: tuple[torch.Tensor, ExpertWeights, Routing]) -> None:
    torch.testing.assert_close(out, expected(*args))


def test_later_calls_run_no_host_code_of_the_parts() -> None:
    plan, part = planned()
    for seed in range(5):  # every tensor elsewhere, and other values
        args = inputs(seed=seed)
        assert_right(plan(*args), args)
    assert part.host_calls == 1


def test_every_tensor_of_a_call_is_its_own() -> None:
    """One argument changed at a time, the others as they were recorded."""
    plan, part = planned()
    first, second = inputs(seed=1), inputs(seed=2)
    plan(*first)
    for place in range(3):
        args = (*first[:place], second[place], *first[place + 1 :])
        assert_right(plan(*args), args)  # type: ignore[arg-type]
    out = torch.full_like(first[0], torch.nan)
    assert plan(*first, out=out) is out
    assert_right(out, first)
    assert part.host_calls == 1


def test_inplace_calls_are_replayed_too() -> None:
    plan, part = planned(replace(SMALL, inplace=True))
    for seed in range(3):
        args = inputs(seed=seed)
        want = expected(args[0].clone(), *args[1:])
        assert plan(*args) is args[0]
        torch.testing.assert_close(args[0], want)
    assert part.host_calls == 1


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that starts four bytes behind a multiple of 16."""
    room = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)
    skip = (-room.data_ptr() // 4) % 4 + 1
    return room[skip : skip + tensor.numel()].view(tensor.shape).copy_(tensor)


def test_another_kind_of_call_is_recorded_apart() -> None:
    plan, part = planned()
    x_TH, weights, routing = inputs()
    long_ids = Routing(routing.topk_weights_TK, routing.topk_ids_TK.long())
    gaps = torch.cat([x_TH, x_TH], 1)[:, : x_TH.shape[1]]
    strided = replace(weights, w1=weights.w1.mT.contiguous().mT)
    kinds = [
        (x_TH, weights, routing),
        inputs(tokens=3),
        (gaps, weights, routing),
        (unaligned(x_TH), weights, routing),
        (x_TH, weights, long_ids),
        (x_TH, strided, routing),
    ]
    for count, args in enumerate(kinds, start=1):
        plan(*args)
        plan(*args)
        assert part.host_calls == count
    assert_right(plan(*kinds[0]), kinds[0])
    assert part.host_calls == len(kinds)


def test_memory_of_weights_is_looked_up_in_every_call() -> None:
    plan, part = planned()
    args = inputs()
    plan(*args)
    args[1].w1.data = torch.ones_like(args[1].w1)
    assert_right(plan(*args), args)
    assert part.host_calls == 1


def test_weights_are_checked_once_each_and_not_kept_alive() -> None:
    plan, _ = planned()
    x_TH, weights, routing = inputs()
    plan(x_TH, weights, routing)
    memory = weakref.ref(weights.w1)
    del weights
    gc.collect()
    assert memory() is None
    wrong = replace(inputs()[1], w1=torch.ones(4, 16, 15))
    with pytest.raises(ShapeError, match="w1"):
        plan(x_TH, wrong, routing)


@pytest.mark.parametrize("bad", CASES, ids=str)
def test_bad_tensors_after_good_ones(bad: Bad) -> None:
    """A call that would be replayed, but for one tensor, ends in the error it always ended in."""
    problem = replace(PROBLEM, **bad.problem)
    plan, part = planned(problem)
    good = arguments(problem)
    for _ in range(2):
        plan(good.x, good.weights, good.routing)
    assert part.host_calls == 1
    args = bad.change(good)
    with pytest.raises(bad.error) as caught:
        plan(args.x, args.weights, args.routing, out=args.out)
    assert caught.value.what == bad.what
    assert bad.got in str(caught.value.got)
    assert bad.need in str(caught.value.need)
    assert part.host_calls == 1


def test_gradients_are_refused_in_a_replay_as_well() -> None:
    plan, _ = planned()
    args = inputs()
    plan(*args)
    args[0].requires_grad_()
    with pytest.raises(UnsupportedError, match="gradients: got x"):
        plan(*args)
    with torch.no_grad():
        assert_right(plan(*args), args)


def test_out_over_x_is_refused_in_a_replay_as_well() -> None:
    plan, _ = planned()
    args = inputs()
    both = torch.cat([args[0], args[0]])
    plan(both[:4], *args[1:], out=both[4:])
    with pytest.raises(ValueError, match="memory of x"):
        plan(both[:4], *args[1:], out=both[1:5])


def test_inputs_in_one_memory_are_not_replayed() -> None:
    """Where two inputs overlap, an address does not tell which of them it came from."""
    plan, part = planned()
    x_TH, weights, routing = inputs()
    shared = replace(weights, w2=weights.w1.flatten()[: weights.w2.numel()].view_as(weights.w2))
    for _ in range(3):
        assert_right(plan(x_TH, shared, routing), (x_TH, shared, routing))
    assert part.host_calls == 3


class Copying(AddExperts):
    """Does with torch what no recording of launches holds."""

    replayable = True

    def apply(self, tokens: Any, *, output: torch.Tensor, **rest: Any) -> None:
        super().apply(tokens, output=output, **rest)
        output.mul_(2)


class Inheriting(AddExperts):
    """Says nothing about itself."""


class Half(Prepare):
    """Says nothing about itself."""


@pytest.mark.parametrize("experts", [Copying, Inheriting])
def test_what_cannot_be_replayed_runs_each_time(experts: type[AddExperts]) -> None:
    plan, part = planned(experts=experts)
    args = inputs()
    first = plan(*args).clone()
    for _ in range(2):
        assert torch.equal(plan(*args), first)
    assert part.host_calls == 3


def test_both_parts_must_be_replayable() -> None:
    kernel = FusedMoEModularKernel(Half(SMALL), AddExperts(SMALL), machine=Machine("cpu"))
    assert not kernel.replayable
    assert planned()[0].kernel.replayable


def test_a_checked_plan_looks_at_every_call() -> None:
    plan, part = planned(checked=True)
    args = inputs()
    plan(*args)
    args[2].topk_ids_TK[0, 0] = 99
    with pytest.raises(ValueError, match="topk_ids"):
        plan(*args)
    assert part.host_calls == 1


def test_profilers_see_stages_and_launches() -> None:
    plan, part = planned()
    args = inputs()
    plan(*args)
    with torch.profiler.profile() as profile:
        plan(*args)
    assert part.host_calls == 2
    assert "mk::experts" in {event.key for event in profile.key_averages()}
    watchers.append("a hook of triton's")
    try:
        plan(*args)
    finally:
        watchers.clear()
    assert part.host_calls == 3
    plan(*args)
    assert part.host_calls == 3


def test_a_replay_is_poisoned_like_any_call() -> None:
    plan, part = planned(poison=True)
    args = inputs()
    for _ in range(3):
        assert_right(plan(*args), args)
    assert part.host_calls == 1
    part.launch = lambda tensors, count: None  # type: ignore[method-assign]
    assert bool(plan(*inputs(tokens=5)).isnan().all())


def test_red_zones_are_watched_in_a_replay() -> None:
    plan, _ = planned(poison=True)
    args = inputs()
    plan(*args)
    buffer = plan._workspace.take("workspace13", (SMALL.tokens, SMALL.hidden))
    past = buffer.as_strided((1,), (1,), buffer.storage_offset() + buffer.numel())

    def overrun(stream: int, pointers: Sequence[int]) -> None:
        past.fill_(0.0)

    (kind, tape) = next(iter(plan._tapes._tapes.items()))
    assert tape is not None
    plan._tapes.keep(kind, replace(tape, plays=(*tape.plays, overrun)))
    with pytest.raises(CorruptionError, match="workspace13"):
        plan(*args)


def test_no_tokens_are_not_recorded() -> None:
    plan, part = planned()
    assert plan(*inputs(tokens=0)).shape == (0, SMALL.hidden)
    assert part.host_calls == 0
    args = inputs()
    assert_right(plan(*args), args)


def test_recordings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MAX_TAPES", 2)
    plan, part = planned()
    for tokens in (1, 2, 3, 3, 2, 1):
        plan(*inputs(tokens=tokens))
    assert part.host_calls == 4  # the first kind had to go, and came back
    assert len(plan._tapes._tapes) == 2


def test_an_error_in_a_recording_leaves_nothing_behind() -> None:
    plan, part = planned()
    args = inputs()

    def fail(tensors: Sequence[torch.Tensor], count: int) -> None:
        raise RuntimeError("no such device")

    part.launch = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no such device"):
        plan(*args)
    assert replay.recorder() is None
    del part.launch  # type: ignore[method-assign]
    assert_right(plan(*args), args)


def test_interpreted_kernels_are_not_replayed(machine: Machine) -> None:
    if machine.device != "cpu" or not machine.interpreter:
        pytest.skip("compiled kernels are replayed: tests/gpu")
    kernel = make_kernel("MoEPrepareAndFinalizeNoEP", "TritonExperts", SMALL)
    plan, args = kernel.plan(), random_inputs(SMALL, CPU)
    want = kernel(*args)
    for _ in range(3):
        assert torch.equal(plan(*args), want)
    assert set(plan._tapes._tapes.values()) <= {None}
