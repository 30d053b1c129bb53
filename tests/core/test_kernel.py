"""FusedMoEModularKernel: composition, calls, plans, calls in flight, and poisoned buffers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from experts import NaiveBatchedExperts, TorchExperts
from modular_kernel import reference
from modular_kernel.catalog import make_kernel
from modular_kernel.compatibility.support import PrepareFinalizeRequirements
from modular_kernel.errors import (
    CapacityError,
    ConfigurationError,
    CorruptionError,
    IncompatibleError,
    StateError,
    UnsupportedError,
)
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.problem import ActivationFormat, Machine, Problem, Reduce
from modular_kernel.testing import pairings
from modular_kernel.testing.cases.inputs import Inputs, count_invalid_ids, make_inputs
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.workspace import BufferSpec, WorkspaceShapes
from prepare_finalize import BatchedPrepareAndFinalize, MoEPrepareAndFinalizeNoEP
from topk_reduce import TopKWeightAndReduceNoOp

CPU = Machine("cpu")
PAIRS = (
    (MoEPrepareAndFinalizeNoEP, TorchExperts),
    (BatchedPrepareAndFinalize, NaiveBatchedExperts),
)
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1].__name__)


def make_cpu_inputs(problem: Problem, seed: int = 0, routing: str = "uniform") -> Inputs:
    return make_inputs(problem, routing, torch.device("cpu"), seed=seed)


def compose_parts(
    pair: tuple[Any, Any], problem: Problem = BASE, **options: Any
) -> FusedMoEModularKernel:
    pf, experts = pair
    return FusedMoEModularKernel(pf(problem), experts(problem), machine=CPU, **options)


def run_kernel(kernel: Any, inputs: Inputs, **options: Any) -> torch.Tensor:
    """Call a kernel or a plan."""
    return kernel(inputs.x_TH, inputs.weights, inputs.routing, **options)


def assert_correct(out: torch.Tensor, inputs: Inputs, problem: Problem = BASE) -> None:
    exact = reference.float64_reference(inputs.x_TH, inputs.weights, inputs.routing, problem)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


# Composition


@each_pair
def test_two_instances_compose(pair: tuple[Any, Any]) -> None:
    kernel, inputs = compose_parts(pair), make_cpu_inputs(BASE)
    assert kernel.pairing == f"{pair[0].__name__} x {pair[1].__name__}"
    assert_correct(run_kernel(kernel, inputs), inputs)


def test_classes_and_names_compose_equally() -> None:
    inputs = make_cpu_inputs(BASE)
    from_names = make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", BASE, machine=CPU)
    from_classes = make_kernel(*PAIRS[0], BASE, machine=CPU)
    assert torch.equal(run_kernel(from_names, inputs), run_kernel(from_classes, inputs))


def test_parts_of_different_problems_do_not_compose() -> None:
    experts = TorchExperts(replace(BASE, top_k=3))
    with pytest.raises(ConfigurationError, match="the two parts' problems"):
        FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(BASE), experts, machine=CPU)


def test_a_refused_pairing_states_every_reason() -> None:
    problem = replace(BASE, fp32_precision="tf32")
    with pytest.raises(IncompatibleError) as caught:
        compose_parts((MoEPrepareAndFinalizeNoEP, NaiveBatchedExperts), problem)
    rules = {rejection.rule for rejection in caught.value.rejections}
    assert {"format", "reduce", "fp32_precision"} <= rules


def test_a_reducer_other_than_the_declared_one_is_refused() -> None:
    class WrongReduce(TorchExperts):
        def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceNoOp:
            return TopKWeightAndReduceNoOp()

    with pytest.raises(ConfigurationError, match=r"WrongReduce\.finalize_weight_and_reduce_impl"):
        compose_parts((MoEPrepareAndFinalizeNoEP, WrongReduce))


# Calls


@each_pair
@pytest.mark.parametrize("tokens", [0, 1, BASE.tokens])
def test_calls_with_any_number_of_tokens_are_correct(pair: tuple[Any, Any], tokens: int) -> None:
    kernel, inputs = compose_parts(pair), make_cpu_inputs(BASE.with_tokens(tokens))
    out = run_kernel(kernel, inputs)
    assert out.shape == (tokens, BASE.hidden)
    assert_correct(out, inputs)


@each_pair
def test_out_is_written_and_returned(pair: tuple[Any, Any]) -> None:
    inputs = make_cpu_inputs(BASE)
    out = torch.full_like(inputs.x_TH, torch.nan)
    assert run_kernel(compose_parts(pair), inputs, out=out) is out
    assert_correct(out, inputs)


@each_pair
def test_inplace_overwrites_and_returns_x(pair: tuple[Any, Any]) -> None:
    problem = replace(BASE, inplace=True)
    inputs, overwritten_inputs = make_cpu_inputs(problem), make_cpu_inputs(problem)
    out = run_kernel(compose_parts(pair, problem), overwritten_inputs)
    assert out is overwritten_inputs.x_TH
    assert_correct(out, inputs, problem)


@each_pair
def test_experts_are_not_called_without_tokens(pair: tuple[Any, Any]) -> None:
    class UncalledExperts(pair[1]):  # type: ignore[misc]
        def apply(self, *_: Any, **__: Any) -> None:
            pytest.fail("called with zero rows")

    kernel = compose_parts((pair[0], UncalledExperts))
    out = run_kernel(kernel, make_cpu_inputs(BASE.with_tokens(0)))
    assert out.shape == (0, BASE.hidden)


@pytest.mark.parametrize(
    ("tokens", "pieces"), [(0, []), (7, [7]), (8, [8]), (9, [8, 1]), (19, [8, 8, 3])]
)
def test_calls_are_split_into_chunks(tokens: int, pieces: list[int]) -> None:
    chunk_sizes: list[int] = []

    class CountingExperts(TorchExperts):
        def apply(self, tokens: Any, **kwargs: Any) -> None:
            routing = tokens.routing
            assert len(tokens.x_TH) == len(routing.topk_ids_TK) == len(routing.topk_weights_TK)
            chunk_sizes.append(len(tokens.x_TH))
            super().apply(tokens, **kwargs)

    problem = replace(BASE, chunk_tokens=8)
    inputs = make_cpu_inputs(problem.with_tokens(tokens))
    out = run_kernel(compose_parts((MoEPrepareAndFinalizeNoEP, CountingExperts), problem), inputs)
    assert chunk_sizes == pieces
    assert_correct(out, inputs, problem)


def test_invalid_ids_add_up_over_calls_and_plans() -> None:
    """`kernel.invalid_ids` counts the expert ids outside [-1, E) in all calls."""
    kernel = compose_parts(PAIRS[0])
    assert kernel.invalid_ids == 0
    inputs = make_cpu_inputs(BASE, routing="out_of_range")
    count = count_invalid_ids(inputs.routing, BASE)
    assert count > 0
    run_kernel(kernel, inputs)
    assert kernel.invalid_ids == count
    run_kernel(kernel.plan(), inputs)
    assert kernel.invalid_ids == 2 * count
    run_kernel(kernel, make_cpu_inputs(BASE, routing="skips"))
    assert kernel.invalid_ids == 2 * count


def test_invalid_ids_are_counted_once_in_chunks() -> None:
    problem = replace(BASE, chunk_tokens=4)
    kernel, inputs = (
        compose_parts(PAIRS[0], problem),
        make_cpu_inputs(problem, routing="out_of_range"),
    )
    run_kernel(kernel, inputs)
    assert kernel.invalid_ids == count_invalid_ids(inputs.routing, problem)


# Calls in flight


@each_pair
def test_calls_in_flight_finish_in_any_order(pair: tuple[Any, Any]) -> None:
    kernel = compose_parts(pair)
    inputs = [make_cpu_inputs(BASE.with_tokens(tokens), seed=tokens) for tokens in (19, 4, 0, 11)]
    pending_calls = [kernel.start(i.x_TH, i.weights, i.routing) for i in inputs]
    assert [pending.tokens for pending in pending_calls] == [19, 4, 0, 11]
    for index in (2, 0, 3, 1):
        assert_correct(pending_calls[index].finish(), inputs[index])


def test_a_part_allocates_the_output_unless_out_is_given() -> None:
    class AllocatesOutput(MoEPrepareAndFinalizeNoEP):
        allocates_output = True
        allocated: list[torch.Tensor] = []  # noqa: RUF012 (one list for one test)

        def finalize_to_new_tensor(
            self, expert_output: torch.Tensor, **kwargs: Any
        ) -> torch.Tensor:
            tokens = len(expert_output)
            self.allocated.append(torch.empty(tokens, BASE.hidden, dtype=BASE.dtype))
            self.finalize(expert_output, out=self.allocated[-1], **kwargs)
            return self.allocated[-1]

    inputs = make_cpu_inputs(BASE)
    out, args = torch.empty_like(inputs.x_TH), (inputs.x_TH, inputs.weights, inputs.routing)
    kernel = compose_parts((AllocatesOutput, TorchExperts), BASE)
    calls = (kernel, kernel.plan(), lambda *a, **kwargs: kernel.start(*a, **kwargs).finish())
    for num_allocated, call in enumerate(calls, 1):
        allocated = call(*args)
        assert allocated is AllocatesOutput.allocated[-1]
        assert_correct(allocated, inputs)
        assert call(*args, out=out) is out
        assert_correct(out, inputs)
        assert len(AllocatesOutput.allocated) == num_allocated
    # `start` does not allocate an output, because the part allocates it in `finish`.
    assert kernel.start(*args).out is None
    inplace_kernel = compose_parts((AllocatesOutput, TorchExperts), replace(BASE, inplace=True))
    x_TH = inputs.x_TH.clone()
    assert inplace_kernel(x_TH, *args[1:]) is x_TH
    assert len(AllocatesOutput.allocated) == 3


def make_asynchronous_part() -> type[MoEPrepareAndFinalizeNoEP]:
    """Return a subclass of the NoEP part that dispatches in `receive` and logs its calls."""

    class AsynchronousPart(MoEPrepareAndFinalizeNoEP):
        requires = PrepareFinalizeRequirements(
            activation_format=ActivationFormat.STANDARD,
            reduces=frozenset({Reduce.CONTIGUOUS}),
            asynchronous=True,
        )
        log: list[str] = []  # noqa: RUF012 (one list for one test)

        def prepare_no_receive(self, *args: Any, **kwargs: Any) -> Callable[[], Any]:
            self.log.append("sent")

            def receive() -> Any:
                self.log.append("received")
                return self.prepare(*args, **kwargs)

            return receive

    return AsynchronousPart


def test_an_asynchronous_dispatch_is_received_in_finish() -> None:
    part = make_asynchronous_part()
    problem = replace(BASE, asynchronous=True)
    kernel, inputs = compose_parts((part, TorchExperts), problem), make_cpu_inputs(problem)
    pending = kernel.start(inputs.x_TH, inputs.weights, inputs.routing)
    assert part.log == ["sent"]  # type: ignore[attr-defined]
    assert_correct(pending.finish(), inputs)
    assert part.log == ["sent", "received"]  # type: ignore[attr-defined]


def test_starting_a_synchronous_part_is_refused() -> None:
    part = MoEPrepareAndFinalizeNoEP(BASE)
    inputs = make_cpu_inputs(BASE)
    with pytest.raises(UnsupportedError, match="prepare_no_receive"):
        part.prepare_no_receive(
            inputs.x_TH,
            inputs.routing,
            weights=inputs.weights,
            call=None,  # type: ignore[arg-type]
        )


# Plans


@each_pair
def test_a_plan_computes_the_same_bits(pair: tuple[Any, Any]) -> None:
    kernel = compose_parts(pair)
    plan = kernel.plan()
    for tokens, seed in ((19, 1), (5, 2), (0, 3), (19, 4)):
        inputs = make_cpu_inputs(BASE.with_tokens(tokens), seed)
        assert torch.equal(run_kernel(plan, inputs), run_kernel(kernel, inputs))


@each_pair
def test_a_plan_owns_its_output_and_its_buffers(pair: tuple[Any, Any]) -> None:
    plan, inputs = compose_parts(pair).plan(), make_cpu_inputs(BASE)
    assert plan.nbytes > 0
    first = run_kernel(plan, inputs)
    assert run_kernel(plan, inputs).data_ptr() == first.data_ptr()
    out = torch.empty_like(first)
    assert run_kernel(plan, inputs, out=out) is out


def test_two_plans_may_be_in_use_together() -> None:
    kernel = compose_parts(PAIRS[1])
    plans = kernel.plan(), kernel.plan()
    inputs = make_cpu_inputs(BASE, seed=1), make_cpu_inputs(BASE, seed=2)
    outputs = [run_kernel(*pair) for pair in zip(plans, inputs, strict=True)]
    assert_correct(outputs[0], inputs[0])
    assert_correct(outputs[1], inputs[1])


def test_a_plan_for_fewer_tokens_is_smaller_and_refuses_more_tokens() -> None:
    kernel = compose_parts(PAIRS[1])
    plan = kernel.plan(BASE.with_tokens(4))
    assert plan.nbytes < kernel.plan().nbytes
    inputs = make_cpu_inputs(BASE.with_tokens(4))
    assert_correct(run_kernel(plan, inputs), inputs)
    with pytest.raises(CapacityError):
        run_kernel(plan, make_cpu_inputs(BASE.with_tokens(5)))


def test_a_plan_for_another_problem_is_refused() -> None:
    kernel = compose_parts(PAIRS[0])
    with pytest.raises(ConfigurationError, match="the plan's problem"):
        kernel.plan(replace(BASE, top_k=3))
    with pytest.raises(CapacityError, match="the plan's tokens"):
        kernel.plan(BASE.with_tokens(BASE.tokens + 1))


def test_a_plan_checks_other_weights() -> None:
    plan, inputs = compose_parts(PAIRS[0]).plan(), make_cpu_inputs(BASE)
    run_kernel(plan, inputs)
    invalid_weights = replace(inputs.weights, w2=inputs.weights.w1)
    with pytest.raises(ValueError, match="w2"):
        run_kernel(plan, replace(inputs, weights=invalid_weights))


# Poison


class OverrunningExperts(TorchExperts):
    """Writes one element past the end of its buffer."""

    def workspace_shapes(self, shape: Any) -> WorkspaceShapes:
        return replace(
            super().workspace_shapes(shape), extra={"scratch": BufferSpec((3,), torch.int32)}
        )

    def apply(self, tokens: Any, *, workspace: Any, **kwargs: Any) -> None:
        scratch = workspace.take("scratch", (3,))
        scratch.as_strided((4,), (1,)).zero_()
        super().apply(tokens, workspace=workspace, **kwargs)


@pytest.mark.parametrize("planned", [False, True])
def test_poison_names_the_buffer_that_was_overrun(planned: bool) -> None:
    kernel = compose_parts((MoEPrepareAndFinalizeNoEP, OverrunningExperts), poison=True)
    with pytest.raises(CorruptionError, match="scratch"):
        run_kernel(kernel.plan() if planned else kernel, make_cpu_inputs(BASE))


class LeavesLastRow(TorchExperts):
    """Leaves the last row of its output unwritten."""

    def apply(self, tokens: Any, *, output: torch.Tensor, **kwargs: Any) -> None:
        last_row = output[-1].clone()
        super().apply(tokens, output=output, **kwargs)
        output[-1] = last_row


def find_unwritten(values: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements that were not written, so that they have a poison value.

    Poison values and their sums are NaN or at least 20 in magnitude. Correct outputs are smaller.
    """
    return ~(values.abs() < 20)


def test_poison_reveals_unwritten_rows() -> None:
    kernel = compose_parts((MoEPrepareAndFinalizeNoEP, LeavesLastRow), poison=True)
    inputs, poison_values = make_cpu_inputs(BASE), set()
    plan = kernel.plan()
    for kernel_or_plan in (kernel, kernel, plan, plan, plan):
        out = run_kernel(kernel_or_plan, inputs)
        assert bool(find_unwritten(out[-1]).all())
        assert not bool(find_unwritten(out[:-1]).any())
        poison_values.add((kernel_or_plan is plan, repr(float(out[-1, 0]))))
    assert len({value for planned, value in poison_values if not planned}) == 2
    assert len({value for planned, value in poison_values if planned}) == 3


def test_poison_overwrites_the_results_of_the_previous_call() -> None:
    class LeavesLastRowLater(TorchExperts):
        """Computes the first call correctly, and does not write the last row in later calls."""

        calls = 0

        def apply(self, tokens: Any, *, output: torch.Tensor, **kwargs: Any) -> None:
            last_row = output[-1].clone()
            super().apply(tokens, output=output, **kwargs)
            self.calls += 1
            if self.calls > 1:
                output[-1] = last_row

    plan = compose_parts((MoEPrepareAndFinalizeNoEP, LeavesLastRowLater), poison=True).plan()
    inputs = make_cpu_inputs(BASE)
    assert_correct(run_kernel(plan, inputs), inputs)
    for _ in range(3):
        assert bool(find_unwritten(run_kernel(plan, inputs)[-1]).all())


def test_every_pairing_of_the_catalog_composes(machine: Machine) -> None:
    for pf, experts in pairings(machine, "smoke"):
        kernel = make_kernel(pf, experts, BASE, machine=machine)
        inputs = make_inputs(BASE, "uniform", torch.device(machine.device))
        assert_correct(run_kernel(kernel, inputs), inputs)


@pytest.mark.parametrize("name", ["x_TH", "w2", "topk_ids", "topk_weights", "out"])
@pytest.mark.parametrize("change", ["freed", "smaller", "replaced"])
@each_pair
def test_memory_that_changes_after_start_is_not_read(
    pair: tuple[Any, Any], change: str, name: str
) -> None:
    """Memory that was freed after `start` can belong to another tensor when `finish` is called."""
    kernel, inputs = compose_parts(pair), make_cpu_inputs(BASE)
    out = torch.full_like(inputs.x_TH, torch.nan)
    pending = kernel.start(inputs.x_TH, inputs.weights, inputs.routing, out=out)
    routing = inputs.routing
    tensor = {
        "x_TH": inputs.x_TH, "w2": inputs.weights.w2, "topk_ids": routing.topk_ids_TK,
        "topk_weights": routing.topk_weights_TK, "out": out,
    }[name]  # fmt: skip
    if change == "freed":
        tensor.untyped_storage().resize_(0)
    elif change == "smaller":
        tensor.resize_(1, 1)
    else:
        tensor.set_(tensor.clone())
    with pytest.raises(StateError, match=f"^{name.removesuffix('_TH')}: got freed, resized or"):
        pending.finish()
    with pytest.raises(StateError, match="a second call"):
        pending.finish()
    new_inputs = make_cpu_inputs(BASE, seed=1)
    assert_correct(run_kernel(kernel, new_inputs), new_inputs)
