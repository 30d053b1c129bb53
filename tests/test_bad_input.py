"""Bad input ends in a typed error that names what was wrong, got and needed; nothing is launched.

`CASES` changes one thing in a call that is otherwise right. The parts of the kernel under test are
spies that fail the test if they are reached.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from experts import TorchExperts
from modular_kernel.catalog import check, check_all, make_kernel, this_machine
from modular_kernel.composer import random_inputs
from modular_kernel.errors import (
    CapacityError,
    ConfigurationError,
    DeviceError,
    DtypeError,
    InputError,
    LayoutError,
    ModularKernelError,
    RoutingError,
    ShapeError,
    UnknownPartError,
    UnsupportedError,
    WeightsError,
)
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.tensors import ExpertWeights, Handle, Routing
from modular_kernel.types import ActivationSpec, Combine, Machine, Parallel, Problem
from prepare_finalize import BatchedPrepareAndFinalize, MoEPrepareAndFinalizeNoEP
from topk_reduce import TopKWeightAndReduceNoOp

PROBLEM = Problem(tokens=16, hidden=64, intermediate=32, experts=8, top_k=2)
CPU = torch.device("cpu")


class SpyPrepare(MoEPrepareAndFinalizeNoEP):
    def prepare(self, *_: Any, **__: Any) -> Any:
        pytest.fail("prepare was launched")


class SpyExperts(TorchExperts):
    def apply(self, *_: Any, **__: Any) -> None:
        pytest.fail("the experts were launched")


@dataclass(frozen=True)
class Args:
    """The arguments of one call."""

    x: torch.Tensor
    weights: ExpertWeights
    routing: Routing
    out: torch.Tensor | None = None


Change = Callable[[Args], Args]


def x(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda args: replace(args, x=change(args.x))


def weight(name: str, change: Callable[[Any], Any]) -> Change:
    def changed(args: Args) -> Args:
        return replace(args, weights=replace(args.weights, **{name: change(args.weights)}))

    return changed


def route(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def changed(args: Args) -> Args:
        new = change(getattr(args.routing, name))
        return replace(args, routing=replace(args.routing, **{name: new}))

    return changed


def out(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda args: replace(args, out=change(args.x))


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Equal values, rows not side by side."""
    return torch.cat([tensor, tensor], dim=1)[:, : tensor.shape[1]]


def column_major(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT


@dataclass(frozen=True)
class Bad:
    """A change, and the error it must end in. got, need: parts of the error's fields."""

    name: str
    change: Change
    error: type[InputError]
    what: str
    got: str
    need: str
    problem: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


W, I = "topk_weights_TK", "topk_ids_TK"  # noqa: E741 (ids)
BIAS, MAP, INPLACE = {"bias": True}, {"expert_map": True}, {"inplace": True}
KEPT = {"combine": Combine.TOPK_WEIGHTED}
SCALES = ("w1_scale", "w2_scale", "w1_zero_point", "w2_zero_point", "a1_scale", "a2_scale")

# A table: a line or two per case.
# fmt: off
CASES = (
    Bad("x_rank", x(lambda t: t[..., None]), ShapeError, "x", "(16, 64, 1)", "(T, H) with H = 64"),
    Bad("x_hidden", x(lambda t: t[:, :63].contiguous()), ShapeError, "x", "(16, 63)", "H = 64"),
    Bad("x_dtype", x(lambda t: t.half()), DtypeError, "x", "float16", "bfloat16"),
    Bad("x_device", x(to_meta), DeviceError, "x", "meta", "a cpu tensor"),
    Bad("x_columns", x(column_major), LayoutError, "x", "strides (1, 16)", "side by side"),
    Bad("x_inplace_gaps", x(with_gaps), LayoutError, "x of an inplace call", "strides (128, 1)",
        "contiguous", INPLACE),
    Bad("x_list", x(torch.Tensor.tolist), DtypeError, "x", "list", "a tensor"),
    Bad("x_sparse", x(torch.Tensor.to_sparse), LayoutError, "x", "sparse_coo", "dense"),
    Bad("ids_list", route(I, torch.Tensor.tolist), DtypeError, "topk_ids", "list", "a tensor"),
    Bad("w1_missing", weight("w1", lambda w: None), DtypeError, "w1", "NoneType", "a tensor"),
    Bad("w1_list", weight("w1", lambda w: w.w1.tolist()), DtypeError, "w1", "list", "a tensor"),
    Bad("w2_sparse", weight("w2", lambda w: w.w2.to_sparse()), LayoutError, "w2", "sparse_coo",
        "dense"),
    Bad("b1_list", weight("b1", lambda w: [0.0]), DtypeError, "b1", "list", "a tensor", BIAS),
    Bad("tokens", x(lambda t: torch.cat([t, t[:1]])), CapacityError, "tokens", "17", "<= problem"),
    Bad("tokens_differ", x(lambda t: t[:15]), ShapeError, "topk_weights", "(16, 2)", "= (15, 2)"),
    Bad("weights_top_k", route(W, lambda t: t.repeat(1, 2)), ShapeError, "topk_weights",
        "(16, 4)", "= (16, 2)"),
    Bad("weights_rank", route(W, torch.flatten), ShapeError, "topk_weights", "(32,)", "(T, K)"),
    Bad("weights_dtype", route(W, lambda t: t.bfloat16()), DtypeError, "topk_weights",
        "bfloat16", "float32"),
    Bad("weights_device", route(W, to_meta), DeviceError, "topk_weights", "meta", "cpu"),
    Bad("weights_gaps", route(W, with_gaps), LayoutError, "topk_weights", "(4, 1)", "contiguous"),
    Bad("ids_top_k", route(I, lambda t: t[:, :1].contiguous()), ShapeError, "topk_ids",
        "(16, 1)", "= (16, 2)"),
    Bad("ids_rank", route(I, lambda t: t[..., None]), ShapeError, "topk_ids", "(16, 2, 1)",
        "(T, K)"),
    Bad("ids_float", route(I, lambda t: t.float()), DtypeError, "topk_ids", "float32",
        "int32 or int64"),
    Bad("ids_int16", route(I, lambda t: t.short()), DtypeError, "topk_ids", "int16",
        "int32 or int64"),
    Bad("ids_dtype", route(I, lambda t: t.int()), DtypeError, "topk_ids", "int32", "int64",
        {"ids_dtype": torch.int64}),
    Bad("ids_device", route(I, to_meta), DeviceError, "topk_ids", "meta", "cpu"),
    Bad("ids_columns", route(I, column_major), LayoutError, "topk_ids", "(1, 16)", "contiguous"),
    Bad("w1_experts", weight("w1", lambda w: w.w1[:7]), ShapeError, "w1", "(7, 64, 64)",
        "(e, 2I, H) = (8, 64, 64)"),
    Bad("w2_experts", weight("w2", lambda w: w.w2[:7]), ShapeError, "w2", "(7, 64, 32)",
        "(e, H, I) = (8, 64, 32)"),
    Bad("w1_ungated", weight("w1", lambda w: w.w1[:, :32]), ShapeError, "w1", "(8, 32, 64)",
        "(e, 2I, H) = (8, 64, 64)"),
    Bad("w1_gated", weight("w1", lambda w: w.w1.repeat(1, 2, 1)), ShapeError, "w1",
        "(8, 64, 64)", "(e, I, H) = (8, 32, 64)", {"activation": "relu2"}),
    Bad("w2_transposed", weight("w2", lambda w: w.w2.mT), ShapeError, "w2", "(8, 32, 64)",
        "(e, H, I) = (8, 64, 32)"),
    Bad("w1_rank", weight("w1", lambda w: w.w1[0]), ShapeError, "w1", "(64, 64)", "(8, 64, 64)"),
    Bad("w1_dtype", weight("w1", lambda w: w.w1.float()), DtypeError, "w1", "float32", "bfloat16"),
    Bad("w2_dtype", weight("w2", lambda w: w.w2.half()), DtypeError, "w2", "float16", "bfloat16"),
    Bad("w1_device", weight("w1", lambda w: w.w1.to("meta")), DeviceError, "w1", "meta", "cpu"),
    Bad("w2_device", weight("w2", lambda w: w.w2.to("meta")), DeviceError, "w2", "meta", "cpu"),
    *(
        Bad(f"unquantised_{name}", weight(name, lambda w: torch.ones(8)), WeightsError,
            "expert weights", name, "no scales or zero points for quant=none")
        for name in SCALES
    ),
    Bad("b1_missing", weight("b1", lambda w: None), WeightsError, "b1", "None", "(8, 64)", BIAS),
    Bad("b2_missing", weight("b2", lambda w: None), WeightsError, "b2", "None", "(8, 64)", BIAS),
    Bad("b1_given", weight("b1", lambda w: torch.ones(8, 64)), WeightsError, "b1", "a tensor",
        "None, as the problem declares"),
    Bad("b1_shape", weight("b1", lambda w: torch.ones(8, 32)), ShapeError, "b1", "(8, 32)",
        "(8, 64)", BIAS),
    Bad("b2_dtype", weight("b2", lambda w: w.b2.half()), DtypeError, "b2", "float16",
        "float32 or bfloat16", BIAS),
    Bad("b1_device", weight("b1", lambda w: w.b1.to("meta")), DeviceError, "b1", "meta", "cpu",
        BIAS),
    Bad("b1_columns", weight("b1", lambda w: column_major(w.b1)), LayoutError, "b1", "(1, 8)",
        "contiguous", BIAS),
    Bad("map_missing", weight("expert_map", lambda w: None), WeightsError, "expert_map", "None",
        "(8,)", MAP),
    Bad("map_given", weight("expert_map", lambda w: torch.arange(8).int()), WeightsError,
        "expert_map", "a tensor", "None"),
    Bad("map_shape", weight("expert_map", lambda w: w.expert_map[:7]), ShapeError, "expert_map",
        "(7,)", "(8,)", MAP),
    Bad("map_dtype", weight("expert_map", lambda w: w.expert_map.long()), DtypeError,
        "expert_map", "int64", "int32", MAP),
    Bad("map_device", weight("expert_map", lambda w: w.expert_map.to("meta")), DeviceError,
        "expert_map", "meta", "cpu", MAP),
    Bad("out_shape", out(lambda t: torch.empty_like(t[:15])), ShapeError, "out", "(15, 64)",
        "(16, 64)"),
    Bad("out_kept", out(torch.empty_like), ShapeError, "out", "(16, 64)", "(16, 2, 64)", KEPT),
    Bad("out_dtype", out(lambda t: t.float()), DtypeError, "out", "float32", "bfloat16"),
    Bad("out_device", out(to_meta), DeviceError, "out", "meta", "cpu"),
    Bad("out_gaps", out(with_gaps), LayoutError, "out", "(128, 1)", "contiguous"),
    Bad("out_inplace", out(torch.empty_like), ConfigurationError, "out", "a tensor",
        "None: inplace writes to x", INPLACE),
    Bad("out_is_x", out(lambda t: t), ConfigurationError, "out", "memory of x", "inplace"),
    Bad("out_overlaps_x", out(lambda t: t.view(-1)[:].view(t.shape)), ConfigurationError, "out",
        "memory of x", "inplace"),
    Bad("grad_x", x(lambda t: t.requires_grad_()), UnsupportedError, "gradients", "x",
        "torch.no_grad()"),
    Bad("grad_w1", weight("w1", lambda w: w.w1.requires_grad_()), UnsupportedError, "gradients",
        "w1", "torch.no_grad()"),
    Bad("grad_b2", weight("b2", lambda w: w.b2.requires_grad_()), UnsupportedError, "gradients",
        "b2", "torch.no_grad()", BIAS),
    Bad("grad_router", route(W, lambda t: t.requires_grad_()), UnsupportedError, "gradients",
        "topk_weights", "torch.no_grad()"),
)
# fmt: on


def arguments(problem: Problem) -> Args:
    tokens_TH, weights, routing = random_inputs(problem, CPU)
    return Args(tokens_TH, weights, routing)


def spied(problem: Problem, **options: Any) -> FusedMoEModularKernel:
    return FusedMoEModularKernel(
        SpyPrepare(problem), SpyExperts(problem), machine=Machine("cpu"), **options
    )


@pytest.mark.parametrize("planned", [False, True], ids=["call", "plan"])
@pytest.mark.parametrize("bad", CASES, ids=str)
def test_bad_tensors(bad: Bad, planned: bool) -> None:
    problem = replace(PROBLEM, **bad.problem)
    args = bad.change(arguments(problem))
    kernel = spied(problem)
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


def test_the_call_itself_is_right() -> None:
    """Without a change the spies are reached: each case fails for its change alone."""
    for problem in (replace(PROBLEM, **changes) for changes in (BIAS, MAP, INPLACE, KEPT, {})):
        args = arguments(problem)
        with pytest.raises(pytest.fail.Exception, match="prepare was launched"):
            spied(problem)(args.x, args.weights, args.routing)


def test_gradients_are_fine_where_none_are_recorded() -> None:
    args = arguments(PROBLEM)
    args.x.requires_grad_()
    kernel = make_kernel(MoEPrepareAndFinalizeNoEP, TorchExperts, PROBLEM, machine=Machine("cpu"))
    with torch.no_grad():
        assert kernel(args.x, args.weights, args.routing).shape == (16, 64)


def test_out_beside_x_in_one_storage_is_fine() -> None:
    args = arguments(PROBLEM)
    both = torch.cat([args.x, torch.zeros_like(args.x)])
    kernel = make_kernel(MoEPrepareAndFinalizeNoEP, TorchExperts, PROBLEM, machine=Machine("cpu"))
    result = kernel(both[:16], args.weights, args.routing, out=both[16:])
    assert result.data_ptr() == both[16:].data_ptr()
    assert torch.equal(result, kernel(args.x, args.weights, args.routing))


def test_capacity_of_a_plan() -> None:
    args, kernel = arguments(PROBLEM), spied(PROBLEM)
    with pytest.raises(CapacityError) as caught:
        kernel.plan(PROBLEM.with_tokens(8))(args.x, args.weights, args.routing)
    assert (caught.value.got, str(caught.value.need)) == (16, "<= problem.tokens 8")
    with pytest.raises(CapacityError) as caught:
        kernel.plan(PROBLEM.with_tokens(17))
    assert (caught.value.got, caught.value.need) == (17, "<= 16, the kernel's")
    with pytest.raises(ConfigurationError, match="the plan's problem"):
        kernel.plan(replace(PROBLEM, top_k=3))


@pytest.mark.parametrize("bad_id", [-2, 8, -(2**31), 2**31 - 1])
def test_checked_mode_refuses_an_id(bad_id: int) -> None:
    args = arguments(PROBLEM)
    args.routing.topk_ids_TK[3, 1] = bad_id
    with pytest.raises(RoutingError) as caught:
        spied(PROBLEM, checked=True)(args.x, args.weights, args.routing)
    assert caught.value.what == "topk_ids"
    assert caught.value.got == f"1 id(s), the first {bad_id} at (3, 1)"
    assert caught.value.need == "-1 or 0 to 7"


def test_checked_mode_lets_skips_and_good_ids_pass() -> None:
    args = arguments(PROBLEM)
    args.routing.topk_ids_TK[0] = torch.tensor([-1, 7], dtype=torch.int32)
    with pytest.raises(pytest.fail.Exception, match="prepare was launched"):
        spied(PROBLEM, checked=True)(args.x, args.weights, args.routing)


PAIRS = [(v.prepare_finalize, v.experts) for v in check_all(PROBLEM, this_machine()) if v.ok]


@pytest.mark.parametrize(("pf", "experts"), PAIRS, ids="+".join)
def test_unchecked_mode_skips_and_counts_an_id(pf: str, experts: str) -> None:
    machine = this_machine()
    tokens_TH, weights, routing = random_inputs(PROBLEM, torch.device(machine.device))
    wrong, skipped = routing.topk_ids_TK.clone(), routing.topk_ids_TK.clone()
    for value, place in ((-2, (0, 0)), (8, (3, 1)), (2**31 - 1, (15, 0))):
        wrong[place], skipped[place] = value, -1
    kernel = make_kernel(pf, experts, PROBLEM, machine=machine)
    weights_TK = routing.topk_weights_TK
    expected = kernel(tokens_TH, weights, Routing(weights_TK, skipped)).clone()
    assert kernel.invalid_ids == 0
    assert torch.equal(kernel(tokens_TH, weights, Routing(weights_TK, wrong)), expected)
    assert kernel.invalid_ids == 3
    kernel(tokens_TH, weights, Routing(weights_TK, wrong))
    assert kernel.invalid_ids == 6


def test_the_torch_pairings_are_among_those() -> None:
    """A refusal must not empty the list above."""
    torch_pairs = {
        ("MoEPrepareAndFinalizeNoEP", "TorchExperts"),
        ("BatchedPrepareAndFinalize", "NaiveBatchedExperts"),
    }
    assert torch_pairs <= set(PAIRS)


# A table: a line or two per case.
# fmt: off
FACTS: tuple[tuple[str, Callable[[], object], str, str, str], ...] = (
    ("inplace_keep_topk", lambda: replace(PROBLEM, **INPLACE, **KEPT), "inplace",
     "combine=TOPK_WEIGHTED", "combine=SUM"),
    ("tokens", lambda: replace(PROBLEM, tokens=-1), "tokens", "-1", ">= 0"),
    ("hidden", lambda: replace(PROBLEM, hidden=0), "hidden", "0", ">= 1"),
    ("top_k", lambda: replace(PROBLEM, top_k=0), "top_k", "0", ">= 1"),
    ("dtype", lambda: replace(PROBLEM, dtype="int8"), "dtype", "int8", "'bfloat16'"),
    ("quant", lambda: replace(PROBLEM, quant="fp5"), "quant", "fp5", "'fp8_w8a8_block'"),
    ("ids", lambda: replace(PROBLEM, ids_dtype=torch.int8), "ids_dtype", "int8", "torch.int64"),
    ("local", lambda: replace(PROBLEM, local_experts=9), "local_experts", "9", "1 to experts = 8"),
    ("fp32", lambda: replace(PROBLEM, fp32_precision="bf16x3"), "fp32_precision", "bf16x3",
     "ieee or tf32"),
    ("chunk", lambda: replace(PROBLEM, chunk_tokens=0), "chunk_tokens", "0", ">= 1 or None"),
    ("activation", lambda: replace(PROBLEM, activation="tanh"), "activation", "tanh", "'silu'"),
    ("option", lambda: ActivationSpec.parse("silu:beta=1"), "activation", "silu:beta=1", "alpha"),
    ("number", lambda: ActivationSpec.parse("swiglu_oai:alpha=x"), "activation", "alpha=x",
     "numbers"),
    ("alpha", lambda: ActivationSpec("silu", alpha=1.0), "activation silu alpha", "1.0", "only"),
    ("no_limit", lambda: ActivationSpec("swiglu_clamp_after"),
     "activation swiglu_clamp_after limit", "None", "a value"),
    ("limit", lambda: ActivationSpec("swiglu_clamp_after", limit=-1.0), "activation limit", "-1",
     "> 0"),
    ("interleaved", lambda: ActivationSpec("relu2", interleaved=True), "activation interleaved",
     "relu2", "gated"),
    ("world", lambda: Parallel(0), "world_size", "0", ">= 1"),
    ("no_arch", lambda: Machine("cuda"), "machine", "('cuda', None)", "an arch"),
    ("arch", lambda: Machine("cpu", (9, 0)), "machine", "('cpu', (9, 0))", "an arch"),
    ("class", lambda: check(TorchExperts, TorchExperts, PROBLEM),  # type: ignore[arg-type]
     "prepare_finalize part", "TorchExperts", "a subclass of PrepareAndFinalize"),
    ("problems", lambda: FusedMoEModularKernel(SpyPrepare(PROBLEM),
                                               SpyExperts(replace(PROBLEM, top_k=1))),
     "the two parts' problems", "K2", "K1"),
)
# fmt: on


@pytest.mark.parametrize("fact", FACTS, ids=[fact[0] for fact in FACTS])
def test_bad_facts(fact: tuple[str, Callable[[], object], str, str, str]) -> None:
    _, make, what, got, need = fact
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert caught.value.what == what
    assert got in str(caught.value.got)
    assert need in str(caught.value.need)


@pytest.mark.parametrize("part", [MoEPrepareAndFinalizeNoEP, BatchedPrepareAndFinalize])
def test_finalize_refuses_a_foreign_handle(part: type) -> None:
    rows_TH = torch.ones(2, 64)
    with pytest.raises(UnsupportedError, match=r"handle: got Handle, need \w+Handle"):
        part(PROBLEM).finalize(
            rows_TH, handle=Handle(), reduce=TopKWeightAndReduceNoOp(), out=torch.empty(2, 64)
        )


def test_unknown_part_suggests_the_nearest() -> None:
    with pytest.raises(UnknownPartError) as caught:
        check("MoEPrepareAndFinalizeNoEp", "TorchExperts", PROBLEM)
    assert caught.value.got == "'MoEPrepareAndFinalizeNoEp'"
    assert str(caught.value.need).startswith("did you mean MoEPrepareAndFinalizeNoEP?")
    with pytest.raises(UnknownPartError) as caught:
        check("MoEPrepareAndFinalizeNoEP", "zzz", PROBLEM)
    assert re.match(r"one of .*TorchExperts", str(caught.value.need))
