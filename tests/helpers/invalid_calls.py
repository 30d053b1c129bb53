"""Invalid calls of a kernel: a change to a valid call, and the error that it must raise.

An invalid call must be refused before the kernel calls its parts, so the parts here fail the test
when they are called.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from experts import TorchExperts
from modular_kernel.errors import (
    CapacityError,
    ConfigurationError,
    DeviceError,
    DtypeError,
    InputError,
    LayoutError,
    ShapeError,
    UnsupportedError,
    WeightsError,
)
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.problem import Combine, Machine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.random_inputs import random_inputs
from prepare_finalize import MoEPrepareAndFinalizeNoEP

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
    """Change the tokens."""
    return lambda args: replace(args, x=change(args.x))


def weight(name: str, change: Callable[[Any], Any]) -> Change:
    """Replace a field of the weights. change: computes the field from all weights."""

    def change_weight(args: Args) -> Args:
        return replace(args, weights=replace(args.weights, **{name: change(args.weights)}))

    return change_weight


def route(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change a field of the routing."""

    def change_routing(args: Args) -> Args:
        tensor = change(getattr(args.routing, name))
        return replace(args, routing=replace(args.routing, **{name: tensor}))

    return change_routing


def out(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Pass an output tensor, which `change` makes from x."""
    return lambda args: replace(args, out=change(args.x))


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose rows have gaps between them."""
    return torch.cat([tensor, tensor], dim=1)[:, : tensor.shape[1]]


def column_major(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT


@dataclass(frozen=True)
class Bad:
    """An invalid change of a valid call, and the error that it must raise.

    what, got, need: substrings of the error's attributes of these names.
    """

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
KEEP_TOPK = {"combine": Combine.TOPK_WEIGHTED}  # the output is (T, K, H)
SCALES = ("w1_scale", "w2_scale", "w1_zero_point", "w2_zero_point", "a1_scale", "a2_scale")

# A table with one or two lines per case.
# fmt: off
CASES = (
    Bad("x_rank", x(lambda t: t[..., None]), ShapeError, "x", "(16, 64, 1)", "(T, H) with H = 64"),
    Bad("x_hidden", x(lambda t: t[:, :63].contiguous()), ShapeError, "x", "(16, 63)", "H = 64"),
    Bad("x_dtype", x(lambda t: t.half()), DtypeError, "x", "float16", "bfloat16"),
    Bad("x_device", x(to_meta), DeviceError, "x", "meta", "a cpu tensor"),
    Bad("x_columns", x(column_major), LayoutError, "x", "strides (1, 16)", "contiguous rows"),
    Bad("x_inplace_gaps", x(with_gaps), LayoutError, "x of an in-place call", "strides (128, 1)",
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
        Bad(f"unquantized_{name}", weight(name, lambda w: torch.ones(8)), WeightsError,
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
    Bad("out_kept", out(torch.empty_like), ShapeError, "out", "(16, 64)", "(16, 2, 64)", KEEP_TOPK),
    Bad("out_dtype", out(lambda t: t.float()), DtypeError, "out", "float32", "bfloat16"),
    Bad("out_device", out(to_meta), DeviceError, "out", "meta", "cpu"),
    Bad("out_gaps", out(with_gaps), LayoutError, "out", "(128, 1)", "contiguous"),
    Bad("out_inplace", out(torch.empty_like), ConfigurationError, "out", "a tensor",
        "None, because problem.inplace", INPLACE),
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


def make_arguments(problem: Problem) -> Args:
    tokens_TH, weights, routing = random_inputs(problem, CPU)
    return Args(tokens_TH, weights, routing)


def kernel_with_spies(problem: Problem, **options: Any) -> FusedMoEModularKernel:
    return FusedMoEModularKernel(
        SpyPrepare(problem), SpyExperts(problem), machine=Machine("cpu"), **options
    )
