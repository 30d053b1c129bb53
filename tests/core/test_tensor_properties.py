"""Properties of tensors beyond shape and dtype: lazy negation, gradients, storage and aliasing."""

import copy
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from invalid_calls import BIAS, CPU, PROBLEM, Args, kernel_with_spies, make_arguments
from replayed_parts import make_inputs, make_plan
from torch.autograd import forward_ad

from modular_kernel.catalog import check_all, make_kernel, this_machine
from modular_kernel.errors import (
    ConfigurationError,
    InputError,
    LayoutError,
    ShapeError,
    StateError,
    UnsupportedError,
)
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.plan import Plan
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.random_inputs import random_inputs

GROUPS = replace(PROBLEM, quant="int8_w8a16_group:group=32,zero_points=true")
STATIC = replace(PROBLEM, quant="fp8_w8a8_tensor:static=true")
PROBLEMS = (replace(PROBLEM, **BIAS), GROUPS, STATIC)
CALL_TENSORS = ("x", "topk_weights", "topk_ids")


def list_argument_names(problem: Problem) -> tuple[str, ...]:
    weights = make_arguments(problem).weights
    return (*CALL_TENSORS, *(name for name, tensor in vars(weights).items() if tensor is not None))


ARGUMENTS = [(problem, name) for problem in PROBLEMS for name in list_argument_names(problem)]
FLOAT_ARGUMENTS = [
    (problem, name) for problem, name in ARGUMENTS if name != "topk_ids" and "zero" not in name
]


def get_tensor(args: Args, name: str) -> torch.Tensor:
    if name == "x":
        return args.x
    record = args.routing if name in CALL_TENSORS else args.weights
    tensor: torch.Tensor = getattr(record, f"{name}_TK" if name in CALL_TENSORS else name)
    return tensor


def _replace_tensor(args: Args, name: str, tensor: torch.Tensor) -> Args:
    if name == "x":
        return replace(args, x=tensor)
    if name in CALL_TENSORS:
        return replace(args, routing=replace(args.routing, **{f"{name}_TK": tensor}))
    return replace(args, weights=replace(args.weights, **{name: tensor}))


def _assert_refused(error: type[InputError], problem: Problem, args: Args, what: str) -> str:
    """Assert that a call and the first call of a plan raise the error, and return its message."""
    kernel = kernel_with_spies(problem)
    for call in (kernel, kernel.plan()):
        with pytest.raises(error) as caught:
            call(args.x, args.weights, args.routing, out=args.out)
        assert type(caught.value) is error
        assert caught.value.what == what
    return str(caught.value)


def format_id(value: object) -> str:
    return value.quant if isinstance(value, Problem) else str(value)


@pytest.mark.parametrize(("problem", "name"), ARGUMENTS, ids=format_id)
def test_a_lazily_negated_tensor_is_refused(problem: Problem, name: str) -> None:
    args = make_arguments(problem)
    tensor = torch._neg_view(get_tensor(args, name))
    assert tensor.is_neg()
    message = _assert_refused(LayoutError, problem, _replace_tensor(args, name, tensor), name)
    assert "resolve_neg()" in message


def test_a_lazily_negated_output_is_refused() -> None:
    args = make_arguments(PROBLEM)
    out = torch._neg_view(torch.empty_like(args.x))
    _assert_refused(LayoutError, PROBLEM, replace(args, out=out), "out")


@pytest.mark.parametrize(("problem", "name"), FLOAT_ARGUMENTS, ids=format_id)
def test_a_tensor_that_requires_grad_is_refused(problem: Problem, name: str) -> None:
    args = make_arguments(problem)
    tensor = get_tensor(args, name)
    if not tensor.dtype.is_floating_point:
        return  # integers have no gradient
    if tensor.dtype is torch.float8_e4m3fn:
        tensor = tensor.float().requires_grad_().to(tensor.dtype)
        assert tensor.requires_grad
    else:
        tensor.requires_grad_()
    message = _assert_refused(
        UnsupportedError, problem, _replace_tensor(args, name, tensor), "gradients"
    )
    assert f"got {name} that require grad" in message


def test_an_output_that_requires_grad_is_refused() -> None:
    args = make_arguments(PROBLEM)
    out = torch.empty_like(args.x).requires_grad_()
    message = _assert_refused(UnsupportedError, PROBLEM, replace(args, out=out), "gradients")
    assert "got out that require grad" in message


@pytest.mark.parametrize("name", ["x", "topk_weights", "w2", "b1"])
def test_a_forward_gradient_is_refused(name: str) -> None:
    problem = replace(PROBLEM, **BIAS)
    args = make_arguments(problem)
    tensor = get_tensor(args, name)
    # torch.no_grad() only disables backward gradients.
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
        message = _assert_refused(
            UnsupportedError, problem, _replace_tensor(args, name, dual), "gradients"
        )
        assert f"got {name} with a forward gradient" in message
        with pytest.raises(pytest.fail.Exception, match="prepare was launched"):
            kernel_with_spies(problem)(args.x, args.weights, args.routing)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_tensors_of_function_transforms_are_refused(transform: Callable[..., object]) -> None:
    args = make_arguments(PROBLEM)
    kernel = kernel_with_spies(PROBLEM)

    def layer(x_TH: torch.Tensor) -> torch.Tensor:
        return kernel(x_TH, args.weights, args.routing).sum()

    x = args.x[None] if transform is torch.func.vmap else args.x
    with torch.no_grad(), pytest.raises((LayoutError, UnsupportedError)):
        transform(layer)(x)


@pytest.mark.parametrize(("problem", "name"), ARGUMENTS, ids=format_id)
def test_freed_memory_is_refused(problem: Problem, name: str) -> None:
    args = make_arguments(problem)
    get_tensor(args, name).untyped_storage().resize_(0)
    message = _assert_refused(LayoutError, problem, args, name)
    assert "got 0 bytes of memory" in message


def test_a_storage_smaller_than_the_shape_is_refused() -> None:
    args = make_arguments(PROBLEM)
    nbytes = args.weights.w2.nbytes
    args.weights.w2.untyped_storage().resize_(nbytes - 2)
    message = _assert_refused(LayoutError, PROBLEM, args, "w2")
    assert message.endswith(f"got {nbytes - 2} bytes of memory (freed or resized?), need "
                         f"the {nbytes} that its shape and strides reach")  # fmt: skip


def make_torch_kernel(problem: Problem) -> FusedMoEModularKernel:
    return make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem, machine=Machine("cpu"))


def test_weights_are_checked_again_after_their_data_is_replaced() -> None:
    args = make_arguments(PROBLEM)
    plan = make_torch_kernel(PROBLEM).plan()
    plan(args.x, args.weights, args.routing)
    w1_data = args.weights.w1.data
    args.weights.w1.data = w1_data[:, :32].clone()
    with pytest.raises(ShapeError, match="w1"):
        plan(args.x, args.weights, args.routing)
    args.weights.w1.data = w1_data[:, :32]  # another shape at the original address
    with pytest.raises(ShapeError, match="w1"):
        plan(args.x, args.weights, args.routing)
    new_w1 = w1_data.flip(0)
    args.weights.w1.data = new_w1  # valid weights at another address
    expected = make_torch_kernel(PROBLEM)(args.x, replace(args.weights, w1=new_w1), args.routing)
    assert torch.equal(plan(args.x, args.weights, args.routing), expected)
    args.weights.w1.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="w1: got 0 bytes"):
        plan(args.x, args.weights, args.routing)


@pytest.mark.parametrize("name", ["topk_weights", "w1", "w2", "b2"])
def test_an_output_that_overlaps_an_input_is_refused(name: str) -> None:
    problem = replace(PROBLEM, dtype=torch.float32, hidden=16, intermediate=64, **BIAS)
    args = make_arguments(problem)
    numel = args.x.numel()
    tensor = get_tensor(args, name)
    buffer = torch.empty(max(numel, tensor.numel()) + 1)
    view = buffer[1 : tensor.numel() + 1].view(tensor.shape)
    args = _replace_tensor(args, name, view.copy_(tensor))
    out = buffer[:numel].view(args.x.shape)
    message = _assert_refused(ConfigurationError, problem, replace(args, out=out), "out")
    assert f"got the memory of {name}, need separate memory" in message
    inplace_problem = replace(problem, inplace=True)
    inplace_args = replace(args, x=out)
    _assert_refused(ConfigurationError, inplace_problem, inplace_args, "x of an in-place call")


def make_dual(tensor: torch.Tensor) -> torch.Tensor:
    return forward_ad.make_dual(tensor, torch.ones_like(tensor))


def free_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


INVALID: tuple[tuple[Callable[[torch.Tensor], torch.Tensor], type[InputError]], ...] = (
    (torch._neg_view, LayoutError),
    (free_memory, LayoutError),
    (make_dual, UnsupportedError),
)


@pytest.mark.parametrize(("change", "error"), INVALID, ids=["negated", "freed", "dual"])
@pytest.mark.parametrize("name", ["x", "topk_weights"])
def test_invalid_tensors_are_refused_before_a_replay(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], error: type[InputError]
) -> None:
    plan, part = make_plan()
    x_TH, weights, routing = make_inputs()
    plan(x_TH, weights, routing)
    with forward_ad.dual_level():
        if name == "x":
            x_TH = change(x_TH)
        else:
            routing = replace(routing, topk_weights_TK=change(routing.topk_weights_TK))
        with pytest.raises(error):
            plan(x_TH, weights, routing)
    assert part.host_calls == 1


def test_ranks_are_notified_if_a_replay_has_no_memory_for_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, _ = make_plan()
    x_TH, weights, routing = make_inputs()
    for _ in range(2):
        plan(x_TH, weights, routing)
    reported_errors: list[Exception] = []

    def raise_out_of_memory(x_TH: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(plan, "_get_output", raise_out_of_memory)
    monkeypatch.setattr(plan.kernel.prepare_finalize, "refuse", reported_errors.append)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        plan(x_TH, weights, routing)
    assert reported_errors == [caught.value]


def test_a_replayed_call_checks_weights_and_output() -> None:
    plan, part = make_plan()
    x_TH, weights, routing = make_inputs()
    plan_output = plan(x_TH, weights, routing)
    version_before = plan_output._version
    plan(x_TH, weights, routing)
    assert plan_output._version > version_before
    out_in_w1 = weights.w1.view(-1)[: x_TH.numel()].view(x_TH.shape)
    with pytest.raises(ConfigurationError, match="out: got the memory of w1"):
        plan(x_TH, weights, routing, out=out_in_w1)
    routing_without_first = Routing(routing.topk_weights_TK[1:], routing.topk_ids_TK[1:])
    plan(x_TH[1:], weights, routing_without_first)
    with pytest.raises(ConfigurationError, match="x: got memory of the plan's own output"):
        plan(plan_output[1:], weights, routing_without_first)
    weights.w1.data = weights.w1.data[:, :1]
    with pytest.raises(ShapeError, match="w1"):
        plan(x_TH, weights, routing)
    assert part.host_calls == 2  # one recording for each number of tokens


def test_a_plans_own_output_may_be_its_next_input() -> None:
    args = make_arguments(PROBLEM)
    kernel = make_torch_kernel(PROBLEM)
    plan = kernel.plan()
    expected = kernel(kernel(args.x, args.weights, args.routing), args.weights, args.routing)
    plan_output = plan(args.x, args.weights, args.routing)
    assert torch.equal(plan(plan_output, args.weights, args.routing), expected)
    routing_without_first = Routing(args.routing.topk_weights_TK[1:], args.routing.topk_ids_TK[1:])
    with pytest.raises(ConfigurationError, match="x: got memory of the plan's own output"):
        plan(plan_output[1:], args.weights, routing_without_first)


CPU_VERDICTS = check_all(PROBLEM, this_machine(device="cpu"))
PAIRS = [(verdict.prepare_finalize, verdict.experts) for verdict in CPU_VERDICTS if verdict.ok]


@pytest.mark.parametrize(("pf", "experts"), PAIRS)
def test_writing_an_output_increments_its_version(pf: str, experts: str) -> None:
    """Autograd compares versions to detect that a saved tensor was overwritten."""
    args = make_arguments(PROBLEM)
    with torch.no_grad():
        machine = this_machine(device="cpu")
        kernel = make_kernel(pf, experts, PROBLEM, machine=machine)
        plan = kernel.plan()
        out = torch.zeros_like(args.x)
        for call in (kernel, plan):
            version_before = out._version
            call(args.x, args.weights, args.routing, out=out)
            assert out._version > version_before
        plan_output = plan(args.x, args.weights, args.routing)
        version_before = plan_output._version
        plan(args.x, args.weights, args.routing)
        assert plan_output._version > version_before
        inplace_kernel = make_kernel(pf, experts, replace(PROBLEM, inplace=True), machine=machine)
        version_before = args.x._version
        inplace_kernel(args.x, args.weights, args.routing)
        assert args.x._version > version_before
    with torch.inference_mode():  # inference tensors have no version, and no error is raised
        kernel(args.x, args.weights, args.routing, out=torch.zeros_like(args.x))


def test_a_started_call_can_be_finished_once() -> None:
    args = make_arguments(PROBLEM)
    pending = make_torch_kernel(PROBLEM).start(args.x, args.weights, args.routing)
    pending.finish()
    with pytest.raises(StateError, match=r"Pending.finish\(\): got a second call"):
        pending.finish()


def _count_mismatches(
    plan: Plan, inputs: tuple[torch.Tensor, ExpertWeights, Routing], calls: int
) -> int:
    """Return how many of `calls` results of the plan differ from the kernel's result."""
    x_TH, weights, routing = inputs
    expected = plan.kernel(x_TH, weights, routing)
    mismatches = 0
    for _ in range(calls):
        actual = plan(x_TH, weights, routing)
        mismatches += not torch.equal(actual, expected)
    return mismatches


def test_threads_can_share_a_plan() -> None:
    problem = replace(PROBLEM, dtype=torch.float32)
    plan = make_torch_kernel(problem).plan()
    x_TH, weights, routing = random_inputs(problem, CPU)
    inputs = [(x_TH.roll(i, 0), weights, routing) for i in range(8)]
    mismatches: list[int] = []
    threads = [
        threading.Thread(
            target=lambda i=i: mismatches.append(_count_mismatches(plan, inputs[i], 25))
        )
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mismatches == [0] * 8


def test_a_plan_within_its_own_call_is_refused() -> None:
    """A nested call would overwrite buffers that the outer call still reads."""
    args = make_arguments(PROBLEM)
    kernel = make_torch_kernel(PROBLEM)
    plan = kernel.plan()
    finish = kernel.finish

    def call_plan_and_finish(pending: object) -> torch.Tensor:
        plan(args.x, args.weights, args.routing)
        return finish(pending)  # type: ignore[arg-type]

    kernel.finish = call_plan_and_finish  # type: ignore[method-assign]
    with pytest.raises(StateError, match="a plan: got a call within its own call"):
        plan(args.x, args.weights, args.routing)
    del kernel.finish
    plan(args.x, args.weights, args.routing)  # the plan is still usable


def test_a_copied_plan_has_its_own_buffers() -> None:
    args = make_arguments(PROBLEM)
    plan = make_torch_kernel(PROBLEM).plan()
    plan_output = plan(args.x, args.weights, args.routing)
    copy_output = copy.deepcopy(plan)(args.x, args.weights, args.routing)
    assert torch.equal(plan_output, copy_output)
    assert plan_output.data_ptr() != copy_output.data_ptr()
