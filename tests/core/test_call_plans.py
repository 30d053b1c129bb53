"""Plans that a kernel creates for its own calls.

A plan holds the workspace and the recorded launches of a kernel. Calls return new outputs, and
kernels share a bounded number of workspaces.
"""

import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replayed_parts import CPU, SMALL, AddExperts, Prepare, assert_output, make_inputs
from torch.overrides import TorchFunctionMode

from experts.triton.configs.select import override_config
from experts.triton.launch_config import LaunchConfig, MoEConfig
from modular_kernel import plan, validate
from modular_kernel.catalog import make_kernel
from modular_kernel.errors import (
    CapacityError,
    ConfigurationError,
    InputError,
    LayoutError,
    ShapeError,
)
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.plan import StreamMemories, StreamMemory, held_bytes
from modular_kernel.replay.recording import is_graph_trees_stream
from modular_kernel.spec.problem import Combine, Machine, Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.random_inputs import random_inputs

TORCH_PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
FP32 = Problem(tokens=64, hidden=64, intermediate=32, experts=4, top_k=2, dtype=torch.float32)


@pytest.fixture(autouse=True)
def use_new_stream_memories(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_memories", StreamMemories())
        yield


def make_recorded_kernel(
    problem: Problem = SMALL, **options: Any
) -> tuple[FusedMoEModularKernel, AddExperts]:
    part = AddExperts(problem)
    return FusedMoEModularKernel(Prepare(problem), part, machine=Machine("cpu"), **options), part


def test_calls_replay_and_return_new_tensors() -> None:
    kernel, part = make_recorded_kernel()
    args = make_inputs()
    outputs = [kernel(*args) for _ in range(4)]
    assert part.host_calls == 1
    assert len({out.data_ptr() for out in outputs}) == 4
    for out in outputs:
        assert_output(out, args)
    other_args = make_inputs(seed=3)
    assert_output(kernel(*other_args), other_args)
    assert_output(outputs[0], args)
    assert part.host_calls == 1


def test_calls_with_out_and_inplace_calls_are_replayed() -> None:
    kernel, part = make_recorded_kernel()
    args = make_inputs()
    for _ in range(3):
        out = torch.full_like(args[0], torch.nan)
        assert kernel(*args, out=out) is out
        assert_output(out, args)
    assert part.host_calls == 1
    kernel, part = make_recorded_kernel(replace(SMALL, inplace=True))
    for seed in range(3):
        args = make_inputs(seed=seed)
        x_before = args[0].clone()
        assert kernel(*args) is args[0]
        assert_output(args[0], (x_before, *args[1:]))
    assert part.host_calls == 1


def test_outputs_of_replays_have_the_shape_and_layout_of_the_first() -> None:
    """There can be gaps between rows of x, and outputs can keep the top-k dimension."""
    kernel, part = make_recorded_kernel()
    x_TH, weights, routing = make_inputs()
    x_TH = torch.cat([x_TH, x_TH], dim=1)[:, : x_TH.shape[1]]
    for _ in range(3):
        out = kernel(x_TH, weights, routing)
        assert out.is_contiguous()
        assert out.shape == x_TH.shape
    assert part.host_calls == 1
    problem = replace(SMALL, combine=Combine.TOPK_UNWEIGHTED)
    kernel, part = make_recorded_kernel(problem)
    for _ in range(3):
        assert kernel(*make_inputs()).shape == (4, 2, 16)
    assert part.host_calls == 1


def test_replays_increment_the_version_of_tensors_that_the_caller_holds() -> None:
    kernel, _ = make_recorded_kernel()
    args = make_inputs()
    out = torch.empty_like(args[0])
    versions = [kernel(*args, out=out)._version for _ in range(3)]
    assert versions == [1, 2, 3]
    kernel, _ = make_recorded_kernel(replace(SMALL, inplace=True))
    version_before = args[0]._version
    for _ in range(3):
        kernel(*args)
    assert args[0]._version == version_before + 3


def test_memory_that_was_freed_after_a_replay_is_refused() -> None:
    kernel, _ = make_recorded_kernel()
    args = make_inputs()
    for _ in range(2):
        kernel(*args)
    args[0].untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="x: got 0 bytes of memory"):
        kernel(*args)


def test_an_output_that_overlaps_an_input_is_refused_after_a_replay_too() -> None:
    kernel, _ = make_recorded_kernel()
    args = make_inputs()
    for _ in range(2):
        kernel(*args)
        with pytest.raises(InputError, match="memory of x"):
            kernel(*args, out=args[0])


@pytest.mark.parametrize("option", ["poison", "checked"])
def test_checked_and_poisoned_calls_have_their_own_workspace(option: str) -> None:
    kernel, part = make_recorded_kernel(**{option: True})
    args = make_inputs()
    for _ in range(3):
        assert_output(kernel(*args), args)
    assert part.host_calls == 3
    assert not held_bytes()


def test_subclasses_run_their_own_code() -> None:
    class CountingKernel(FusedMoEModularKernel):
        calls = 0

        def start_checked(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().start_checked(*args, **kwargs)

    part = AddExperts(SMALL)
    kernel, args = CountingKernel(Prepare(SMALL), part, machine=Machine("cpu")), make_inputs()
    for _ in range(3):
        assert_output(kernel(*args), args)
    assert (kernel.calls, part.host_calls) == (3, 3)


def test_all_kernels_share_the_memory_of_a_stream() -> None:
    small = make_kernel(*TORCH_PAIR, FP32, machine=Machine("cpu"))
    large = make_kernel(*TORCH_PAIR, replace(FP32, hidden=2048), machine=Machine("cpu"))
    small_args, large_args = (random_inputs(kernel.problem, CPU) for kernel in (small, large))
    expected = small(*small_args)
    bytes_before = held_bytes()
    assert torch.equal(small(*small_args), expected)
    assert held_bytes() == bytes_before
    large(*large_args)
    assert list(held_bytes()) == [(-1, 0)]
    assert held_bytes()[-1, 0] >= bytes_before[-1, 0]
    assert torch.equal(small(*small_args), expected)


def test_growing_a_workspace_drops_the_recordings_of_the_smaller_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "_GRANULARITY", 1)
    kernel, part = make_recorded_kernel(SMALL.with_tokens(64))
    args_4, args_64 = make_inputs(tokens=4), make_inputs(tokens=64)
    for _ in range(2):
        assert_output(kernel(*args_4), args_4)
    assert part.host_calls == 1
    assert_output(kernel(*args_64), args_64)
    assert_output(kernel(*args_4), args_4)
    assert part.host_calls == 3
    for args in (args_4, args_64, args_4):
        assert_output(kernel(*args), args)
    assert part.host_calls == 3


def test_plan_capacities_are_powers_of_two() -> None:
    kernel = make_kernel(*TORCH_PAIR, FP32.with_tokens(4000), machine=Machine("cpu"))
    x_TH, weights, routing = random_inputs(kernel.problem, CPU)
    for tokens in (0, 1, 15, 16, 17, 31, 33, 2047, 2048, 2049, 4000):
        kernel(x_TH[:tokens], weights, routing.of(slice(tokens)))
    assert kernel._call_plans.capacities == (16, 32, 64, 2048)
    with pytest.raises(CapacityError):
        kernel(torch.cat([x_TH, x_TH]), weights, routing)


def test_nested_and_concurrent_calls_have_their_own_workspace() -> None:
    """Two kernels share the memory of a stream. Between two launches of the outer kernel, the inner
    kernel is called in the same thread and in another thread.
    """
    inner, _ = make_recorded_kernel()
    args, inner_args = make_inputs(), make_inputs(seed=5)
    expected = inner(*inner_args)

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
    kernel = FusedMoEModularKernel(Prepare(SMALL), NestedExperts(SMALL), machine=Machine("cpu"))
    assert_output(kernel(*args), args)
    assert len(results) == 4
    assert all(torch.equal(result, expected) for result in results)


def test_threads_call_one_kernel() -> None:
    kernel = make_kernel(*TORCH_PAIR, FP32, machine=Machine("cpu"))
    calls = [random_inputs(FP32.with_tokens(tokens), CPU) for tokens in (1, 9, 17, 40, 64)]
    expected_outputs = [kernel(*call).clone() for call in calls]
    mismatches: list[int] = []

    def run(seed: int) -> None:
        for step in range(60):
            index = (seed + step) % len(calls)
            if not torch.equal(kernel(*calls[index]), expected_outputs[index]):
                mismatches.append(index)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not mismatches


def test_a_call_out_of_memory_allocates_only_its_own_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raise_out_of_memory(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(StreamMemory, "reserve", raise_out_of_memory)
    kernel, part = make_recorded_kernel()
    args = make_inputs()
    for _ in range(2):
        assert_output(kernel(*args), args)
    assert part.host_calls == 2


def test_an_error_leaves_the_memory_usable() -> None:
    kernel, _ = make_recorded_kernel()
    args = make_inputs()
    invalid_weights = replace(args[1], w1=torch.ones(4, 16, 15))
    for _ in range(2):
        with pytest.raises(ShapeError, match="w1"):
            kernel(args[0], invalid_weights, args[2])
        assert_output(kernel(*args), args)
    assert not plan._memories.of(CPU, 0).busy


def test_workspaces_of_a_bounded_number_of_streams_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "_MAX_STREAMS", 2)
    kernel, _ = make_recorded_kernel()
    for stream in range(1, 6):
        stream_plan = kernel._call_plans._find_or_make_plan(kernel, CPU, stream, 4)
        assert stream_plan is not None
        stream_plan.reserve_unless_busy()
        assert len(held_bytes()) <= 2
    args = make_inputs()
    stream_plan = kernel._call_plans._find_or_make_plan(kernel, CPU, 1, 4)  # its memory was freed
    assert stream_plan is not None
    out = stream_plan.run(*args, None)
    assert out is not None
    assert_output(out, args)


def test_reserve_workspace_makes_the_plan() -> None:
    kernel, _ = make_recorded_kernel()
    kernel.reserve_workspace(3)
    assert kernel._call_plans.capacities == (8,)  # the kernel's own tokens
    bytes_before = held_bytes()
    kernel(*make_inputs())
    assert held_bytes() == bytes_before
    with pytest.raises(InputError, match="tokens"):
        kernel.reserve_workspace(-3)
    with pytest.raises(ConfigurationError, match=r"device: got .?nowhere.?, need a torch device"):
        kernel.reserve_workspace(3, device="nowhere")


def test_an_interrupt_after_the_acquisition_releases_the_lock() -> None:
    kernel, _ = make_recorded_kernel()
    args = make_inputs()
    kernel(*args)

    def interrupt(frame: Any, event: str, function: Any) -> None:
        is_run = frame.f_code.co_name == "run"
        if is_run and event == "c_return" and function.__name__ == "acquire":
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            kernel(*args)
    finally:
        sys.setprofile(None)
    thread = threading.Thread(target=kernel.reserve_workspace, args=(4,), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert_output(kernel(*args), args)


def test_a_copy_has_plans_of_its_own() -> None:
    kernel, _ = make_recorded_kernel()
    args = make_inputs()
    kernel(*args)
    copy = deepcopy(kernel)
    assert not copy._call_plans.capacities
    assert_output(copy(*args), args)


class CountingMode(TorchFunctionMode):
    """Counts the torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_function_modes_see_no_operation_of_a_call() -> None:
    """A mode, such as that of `torch.set_default_device`, would slow down each operation."""
    kernel = make_kernel(*TORCH_PAIR, FP32, machine=Machine("cpu"))
    args = random_inputs(FP32, CPU)
    expected, plan = kernel(*args), kernel.plan()
    with CountingMode() as mode:
        torch.ones(1).sum()
        assert mode.calls == 2
        outputs = [call(*args) for call in (kernel, plan, kernel)]
        outputs.append(kernel.start(*args).finish())
        assert mode.calls == 2
    assert all(torch.equal(out, expected) for out in outputs)
    with torch.device("meta"):
        assert torch.equal(kernel(*args), expected)


# ------------------------------------------------------------------------------------- new weights


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[ExpertWeights]:
    """Return a list to which each check of weights appends them."""
    checked_weights: list[ExpertWeights] = []
    check_weights = validate.check_weights

    def check_and_record(weights: ExpertWeights, *args: Any) -> None:
        checked_weights.append(weights)
        check_weights(weights, *args)

    monkeypatch.setattr(validate, "check_weights", check_and_record)
    return checked_weights


def test_new_records_of_the_same_weights_are_checked_once(
    checks: list[ExpertWeights],
) -> None:
    kernel, part = make_recorded_kernel()
    x_TH, weights, routing = args = make_inputs()
    for _ in range(3):
        same_weights = ExpertWeights(w1=weights.w1.view_as(weights.w1), w2=weights.w2)
        assert_output(kernel(x_TH, same_weights, routing), args)
    assert len(checks) == 1
    assert part.host_calls == 1
    copied_weights = replace(weights, w1=weights.w1.clone())
    assert_output(kernel(x_TH, copied_weights, routing), args)
    assert len(checks) == 2


def test_weights_with_other_strides_in_the_same_memory_are_checked() -> None:
    kernel, _ = make_recorded_kernel()
    x_TH, weights, routing = make_inputs()
    kernel(x_TH, weights, routing)
    shrunk = weights.w1.view_as(weights.w1)
    shrunk.untyped_storage().resize_(shrunk.nbytes // 2)
    with pytest.raises(LayoutError, match="w1"):
        kernel(x_TH, ExpertWeights(w1=shrunk, w2=weights.w2), routing)
    x_TH, weights, routing = make_inputs()
    kernel(x_TH, weights, routing)
    negated = torch._neg_view(weights.w1)
    with pytest.raises(LayoutError, match="w1"):
        kernel(x_TH, ExpertWeights(w1=negated, w2=weights.w2), routing)
    with pytest.raises(ShapeError, match="w1"):
        kernel(x_TH, ExpertWeights(w1=weights.w2, w2=weights.w1), routing)
    ids = torch.arange(4, dtype=torch.int32)
    with pytest.raises(InputError, match="expert_map"):
        kernel(x_TH, replace(weights, expert_map=ids), routing)


# ------------------------------------------------- CUDA graphs and overridden launch configurations


def test_only_the_warm_up_stream_of_graph_trees_is_recognized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor warms up CUDA graphs on its own stream. Calls on other streams keep their plans."""
    managers = {0: SimpleNamespace(stream=SimpleNamespace(cuda_stream=7))}
    trees = SimpleNamespace(get_manager=lambda index, create_if_none_exists: managers.get(index))
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    stream = 7
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    assert is_graph_trees_stream(0)
    assert not is_graph_trees_stream(1)
    stream = 0
    assert not is_graph_trees_stream(0)


class StandInX:
    """Stands in for an x on a GPU."""

    shape, is_cuda, device = torch.Size([1, 16]), True, torch.device("cuda", 0)

    def dim(self) -> int:
        return 2

    def get_device(self) -> int:
        return 0


@pytest.mark.parametrize("stream", [0, 7])
@pytest.mark.parametrize("state", ["none", "captured", "warm-up"])
def test_calls_during_capture_or_warm_up_use_no_plan(
    monkeypatch: pytest.MonkeyPatch, stream: int, state: str
) -> None:
    """The default stream is neither captured nor used for warm-up, so its state is not queried."""
    queried_states: list[str] = []

    def is_in(queried_state: str) -> bool:
        queried_states.append(queried_state)
        return state == queried_state

    monkeypatch.setattr(plan, "_TENSOR_TYPES", (StandInX,))
    monkeypatch.setattr(plan, "is_graph_trees_stream", lambda index: is_in("warm-up"))
    for name, function in {
        "_cuda_getDevice": lambda: 0,
        "_cuda_getCurrentRawStream": lambda index: stream,
        "_cuda_isCurrentStreamCapturing": lambda: is_in("captured"),
    }.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    plans, experts = plan.CallPlans(16), SimpleNamespace(is_overridden=lambda: False)
    monkeypatch.setitem(plans._plans, (0, stream, 0), SimpleNamespace(run=lambda *_: "planned"))  # type: ignore[misc]
    kernel: Any = SimpleNamespace(experts=experts)
    result: Any = plans.run(kernel, StandInX(), None, None, None)  # type: ignore[arg-type]
    assert result == ("planned" if stream == 0 or state == "none" else None)
    assert bool(queried_states) == (stream != 0)


def test_graph_tree_managers_create_their_own_stream() -> None:
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    assert "self.stream = torch.cuda.Stream()" in inspect.getsource(CUDAGraphTreeManager.__init__)


def test_calls_under_an_override_allocate_their_own_workspace() -> None:
    """With other block sizes than the plan's, more padding can be needed than its workspace has."""
    problem = Problem(tokens=64, hidden=64, intermediate=64, experts=8, top_k=2)
    kernel = make_kernel("MoEPrepareAndFinalizeNoEP", "TritonExperts", problem)
    args = random_inputs(problem, torch.device(kernel.machine.device))
    expected, bytes_before = kernel(*args), held_bytes()
    for block_m in (16, 128):
        tile = LaunchConfig(block_m, 32, 32, 1, 4, 2)
        with override_config(MoEConfig(tile, tile, "aligned")):
            torch.testing.assert_close(kernel(*args), expected, rtol=2e-2, atol=2e-2)
    assert held_bytes() == bytes_before
    assert torch.equal(kernel(*args), expected)
