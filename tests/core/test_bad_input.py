"""Invalid input raises a typed error, with `got` and `need`, before any kernel is launched."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from invalid_calls import (
    BIAS,
    CASES,
    INPLACE,
    KEEP_TOPK,
    MAP,
    PROBLEM,
    Bad,
    SpyExperts,
    SpyPrepare,
    kernel_with_spies,
    make_arguments,
)

from experts import TorchExperts
from modular_kernel.catalog import check, check_all, make_kernel, this_machine
from modular_kernel.errors import (
    CapacityError,
    ConfigurationError,
    ModularKernelError,
    RoutingError,
    UnknownPartError,
    UnsupportedError,
)
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.lora import AdapterSpec
from modular_kernel.spec.problem import ActivationSpec, Machine, Parallel
from modular_kernel.tensors import Handle, Routing
from modular_kernel.testing.random_inputs import random_inputs
from prepare_finalize import BatchedPrepareAndFinalize, MoEPrepareAndFinalizeNoEP
from topk_reduce import TopKWeightAndReduceNoOp


@pytest.mark.parametrize("planned", [False, True], ids=["call", "plan"])
@pytest.mark.parametrize("bad", CASES, ids=str)
def test_invalid_call_raises_a_typed_error(bad: Bad, planned: bool) -> None:
    problem = replace(PROBLEM, **bad.problem)
    args = bad.change(make_arguments(problem))
    kernel = kernel_with_spies(problem)
    call = kernel.plan() if planned else kernel
    with pytest.raises(bad.error) as caught:
        call(args.x, args.weights, args.routing, out=args.out)
    assert type(caught.value) is bad.error
    assert caught.value.what == bad.what
    assert bad.got in str(caught.value.got)
    assert bad.need in str(caught.value.need)
    assert str(caught.value) == f"{bad.what}: got {caught.value.got}, need {caught.value.need}"
    assert isinstance(caught.value, ModularKernelError)
    assert isinstance(caught.value, ValueError)


def test_valid_call_reaches_the_parts() -> None:
    """The calls of CASES are valid without the change that makes them invalid."""
    for problem in (replace(PROBLEM, **changes) for changes in (BIAS, MAP, INPLACE, KEEP_TOPK, {})):
        args = make_arguments(problem)
        with pytest.raises(pytest.fail.Exception, match="prepare was launched"):
            kernel_with_spies(problem)(args.x, args.weights, args.routing)


def test_inputs_that_require_grad_are_accepted_under_no_grad() -> None:
    args = make_arguments(PROBLEM)
    args.x.requires_grad_()
    kernel = make_kernel(MoEPrepareAndFinalizeNoEP, TorchExperts, PROBLEM, machine=Machine("cpu"))
    with torch.no_grad():
        assert kernel(args.x, args.weights, args.routing).shape == (16, 64)


def test_out_may_share_the_storage_of_x_without_overlap() -> None:
    args = make_arguments(PROBLEM)
    buffer = torch.cat([args.x, torch.zeros_like(args.x)])
    kernel = make_kernel(MoEPrepareAndFinalizeNoEP, TorchExperts, PROBLEM, machine=Machine("cpu"))
    result = kernel(buffer[:16], args.weights, args.routing, out=buffer[16:])
    assert result.data_ptr() == buffer[16:].data_ptr()
    assert torch.equal(result, kernel(args.x, args.weights, args.routing))


def test_plan_refuses_more_tokens_than_its_capacity() -> None:
    args, kernel = make_arguments(PROBLEM), kernel_with_spies(PROBLEM)
    with pytest.raises(CapacityError) as caught:
        kernel.plan(PROBLEM.with_tokens(8))(args.x, args.weights, args.routing)
    assert (caught.value.got, str(caught.value.need)) == (16, "<= problem.tokens 8")
    with pytest.raises(CapacityError) as caught:
        kernel.plan(PROBLEM.with_tokens(17))
    assert (caught.value.got, caught.value.need) == (17, "<= 16, the kernel's")
    with pytest.raises(ConfigurationError, match="the plan's problem"):
        kernel.plan(replace(PROBLEM, top_k=3))


@pytest.mark.parametrize("bad_id", [-2, 8, -(2**31), 2**31 - 1])
def test_checked_mode_refuses_an_invalid_id(bad_id: int) -> None:
    args = make_arguments(PROBLEM)
    args.routing.topk_ids_TK[3, 1] = bad_id
    with pytest.raises(RoutingError) as caught:
        kernel_with_spies(PROBLEM, checked=True)(args.x, args.weights, args.routing)
    assert caught.value.what == "topk_ids"
    assert caught.value.got == f"1 id, the first {bad_id} at (3, 1)"
    assert caught.value.need == "-1 or 0 to 7"


def test_checked_mode_accepts_skips_and_valid_ids() -> None:
    args = make_arguments(PROBLEM)
    args.routing.topk_ids_TK[0] = torch.tensor([-1, 7], dtype=torch.int32)
    with pytest.raises(pytest.fail.Exception, match="prepare was launched"):
        kernel_with_spies(PROBLEM, checked=True)(args.x, args.weights, args.routing)


PAIRS = [(v.prepare_finalize, v.experts) for v in check_all(PROBLEM, this_machine()) if v.ok]


@pytest.mark.parametrize(("pf", "experts"), PAIRS, ids="+".join)
def test_unchecked_mode_skips_and_counts_an_invalid_id(pf: str, experts: str) -> None:
    machine = this_machine()
    tokens_TH, weights, routing = random_inputs(PROBLEM, torch.device(machine.device))
    invalid_ids_TK, skipped_ids_TK = routing.topk_ids_TK.clone(), routing.topk_ids_TK.clone()
    for invalid_id, index in ((-2, (0, 0)), (8, (3, 1)), (2**31 - 1, (15, 0))):
        invalid_ids_TK[index], skipped_ids_TK[index] = invalid_id, -1
    kernel = make_kernel(pf, experts, PROBLEM, machine=machine)
    weights_TK = routing.topk_weights_TK
    expected = kernel(tokens_TH, weights, Routing(weights_TK, skipped_ids_TK)).clone()
    assert kernel.invalid_ids == 0  # -1 is valid and skips a pair
    assert torch.equal(kernel(tokens_TH, weights, Routing(weights_TK, invalid_ids_TK)), expected)
    assert kernel.invalid_ids == 3
    kernel(tokens_TH, weights, Routing(weights_TK, invalid_ids_TK))
    assert kernel.invalid_ids == 6


def test_invalid_ids_are_logged_once_by_each_kernel(caplog: pytest.LogCaptureFixture) -> None:
    """Reading `kernel.invalid_ids` logs a warning. Calls log nothing, because they do not
    synchronize with the GPU.
    """
    x_TH, weights, routing = random_inputs(PROBLEM, torch.device("cpu"))
    invalid_routing = Routing(routing.topk_weights_TK, torch.full_like(routing.topk_ids_TK, 99))
    num_invalid = routing.topk_ids_TK.numel()
    for _ in range(2):
        kernel = make_kernel(
            "MoEPrepareAndFinalizeNoEP", "TorchExperts", PROBLEM, machine=this_machine(device="cpu")
        )
        kernel(x_TH, weights, routing)
        assert kernel.invalid_ids == 0
        kernel(x_TH, weights, invalid_routing)
        assert kernel.count_invalid_ids() == num_invalid
        assert not caplog.records
        for _ in range(2):
            assert kernel.invalid_ids == num_invalid
        (record,) = caplog.records
        assert record.name == "modular_kernel.routing"
        assert "skipped 32 ids outside [-1, 8)" in record.message
        caplog.clear()


def test_tested_pairings_include_the_torch_pairings() -> None:
    """If all pairings were refused by mistake, PAIRS would be empty, and no pairing would be
    tested.
    """
    torch_pairs = {
        ("MoEPrepareAndFinalizeNoEP", "TorchExperts"),
        ("BatchedPrepareAndFinalize", "NaiveBatchedExperts"),
    }
    assert torch_pairs <= set(PAIRS)


# fmt: off
# Each row has the name of the case, a function that raises an error, the error's `what`, and
# substrings of its `got` and `need`.
INVALID_SPECS: tuple[tuple[str, Callable[[], object], str, str, str], ...] = (
    ("inplace_keep_topk", lambda: replace(PROBLEM, **INPLACE, **KEEP_TOPK), "inplace",
     "combine=TOPK_WEIGHTED", "combine=SUM"),
    ("tokens", lambda: replace(PROBLEM, tokens=-1), "tokens", "-1", ">= 0"),
    ("hidden", lambda: replace(PROBLEM, hidden=0), "hidden", "0", ">= 1"),
    ("top_k", lambda: replace(PROBLEM, top_k=0), "top_k", "0", ">= 1"),
    ("dtype", lambda: replace(PROBLEM, dtype="int8"), "dtype", "int8", "one of bfloat16, f"),
    ("quant", lambda: replace(PROBLEM, quant="fp5"), "quant", "fp5", "one of fp8_w8a16_block, fp"),
    ("ids", lambda: replace(PROBLEM, ids_dtype=torch.int8), "ids_dtype", "int8", "torch.int64"),
    ("local", lambda: replace(PROBLEM, local_experts=9), "local_experts", "9", "1 to experts = 8"),
    ("fp32", lambda: replace(PROBLEM, fp32_precision="bf16x3"), "fp32_precision", "bf16x3",
     "ieee or tf32"),
    ("chunk", lambda: replace(PROBLEM, chunk_tokens=0), "chunk_tokens", "0",
     ">= 1 and < 2^31 or None"),
    ("received", lambda: replace(PROBLEM, max_received=0), "max_received", "0",
     ">= 1 and < 2^31 or None"),
    ("activation", lambda: replace(PROBLEM, activation="tanh"), "activation", "tanh", "of silu"),
    ("option", lambda: ActivationSpec.parse("silu:beta=1"), "activation", "silu:beta=1", "alpha"),
    ("number", lambda: ActivationSpec.parse("swiglu_oai:alpha=x"), "activation", "alpha=x",
     "numbers"),
    ("alpha", lambda: ActivationSpec("silu", alpha=1.0), "activation silu alpha", "1.0", "only"),
    ("no_limit", lambda: ActivationSpec("swiglu_clamp_after"),
     "activation swiglu_clamp_after limit", "None", "a number"),
    ("limit", lambda: ActivationSpec("swiglu_clamp_after", limit=-1.0), "activation limit", "-1",
     "> 0"),
    ("interleaved", lambda: ActivationSpec("relu2", interleaved=True), "activation interleaved",
     "relu2", "gated"),
    ("adapters", lambda: AdapterSpec(100000, 8), "lora adapters", "100000", ">= 1 and <= 65536"),
    ("world", lambda: Parallel(0), "world_size", "0", ">= 1"),
    ("no_arch", lambda: Machine("cuda"), "machine", "('cuda', None)", "arch set"),
    ("arch", lambda: Machine("cpu", (9, 0)), "machine", "('cpu', (9, 0))", "arch set"),
    ("class", lambda: check(TorchExperts, TorchExperts, PROBLEM),  # type: ignore[arg-type]
     "prepare_finalize part", "TorchExperts", "a subclass of PrepareAndFinalize"),
    ("problems", lambda: FusedMoEModularKernel(SpyPrepare(PROBLEM),
                                               SpyExperts(replace(PROBLEM, top_k=1))),
     "the two parts' problems", "K2", "K1"),
)
# fmt: on


@pytest.mark.parametrize("case", INVALID_SPECS, ids=[case[0] for case in INVALID_SPECS])
def test_invalid_specs_and_pairings_are_refused(
    case: tuple[str, Callable[[], object], str, str, str],
) -> None:
    _, raise_error, what, got, need = case
    with pytest.raises(ConfigurationError) as caught:
        raise_error()
    assert caught.value.what == what
    assert got in str(caught.value.got)
    assert need in str(caught.value.need)


@pytest.mark.parametrize("part", [MoEPrepareAndFinalizeNoEP, BatchedPrepareAndFinalize])
def test_finalize_refuses_the_handle_of_another_part(part: type) -> None:
    rows_TH = torch.ones(2, 64)
    with pytest.raises(UnsupportedError, match=r"handle: got Handle, need \w+Handle"):
        part(PROBLEM).finalize(
            rows_TH, handle=Handle(), reduce=TopKWeightAndReduceNoOp(), out=torch.empty(2, 64)
        )


def test_unknown_part_suggests_the_nearest() -> None:
    with pytest.raises(UnknownPartError) as caught:
        check("MoEPrepareAndFinalizeNoEp", "TorchExperts", PROBLEM)
    assert caught.value.got == "'MoEPrepareAndFinalizeNoEp'"
    assert str(caught.value.need).startswith("one of MoEPrepareAndFinalizeNoEP, Batched")
    assert str(caught.value.need).endswith("(did you mean MoEPrepareAndFinalizeNoEP?)")
    with pytest.raises(UnknownPartError, match="TorchExperts is a part of another kind"):
        check("TorchExperts", "TorchExperts", PROBLEM)
    with pytest.raises(UnknownPartError) as caught:
        check("MoEPrepareAndFinalizeNoEP", "zzz", PROBLEM)
    assert re.match(r"one of .*TorchExperts", str(caught.value.need))
