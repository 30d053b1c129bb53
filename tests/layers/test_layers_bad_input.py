"""FusedMoE, LayerParallel and Router refuse invalid arguments before anything runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_layers import E, H, I, K, Sample, make_layer, rank_weights
from torch.nn.parameter import UninitializedParameter

from modular_kernel.errors import (
    CommunicationError,
    ConfigurationError,
    DtypeError,
    InputError,
    ModularKernelError,
    ShapeError,
    UnsupportedError,
)
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parallel import LayerParallel, all_reduce
from modular_kernel.layers.router import Router, RouterSpec, select_experts
from modular_kernel.spec.placement import Placement

BAD_LAYERS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"top_k": None, "router": None}, "top_k: got None, need a number, because there is no router"),
    ({"top_k": 2}, "top_k: got 2, need 3, as in the router"),
    ({"top_k": 9, "router": None}, "top_k: got 9, need 1 to 8, the number of experts"),
    ({"top_k": 2.5, "router": None}, "top_k: got 2.5, need an int"),
    ({"placement": "evil"}, "placement: got 'evil', need a Placement or None"),
    ({"num_experts": 2}, "router experts: got 2, need from top_k = 3 to 1024"),
    ({"intermediate_size": 3, "parallel": LayerParallel(tp=(0, 5))},
     "tp: ranks: got 5, need at most 3: each rank holds a whole column of intermediate=3"),
    ({"intermediate_size": 3, "parallel": LayerParallel(tp=(0, 5)), "quant_config": "none"},
     "tp: ranks: got 5, need at most 3: each rank holds a whole column of intermediate=3"),
    ({"quant_config": "int4_w4a16_group:group=32", "parallel": LayerParallel(tp=(0, 5))},
     "tp: ranks: got 5, need at most 2: each rank holds a whole group of 32 columns"),
    ({"quant_config": "fp9"}, "quant: got fp9"),
    ({"activation": "tanh"}, "activation: got tanh"),
    ({"parallel": (0, 2)}, "parallel: got tuple, need a LayerParallel or None"),
    ({"parallel": LayerParallel(ep=(0, 2)), "reduce_results": True},
     "reduce_results: got ep of 2 ranks, need ep_group, or reduce_results=False"),
    ({"parallel": LayerParallel(tp=(0, 2)), "reduce_results": True},
     "reduce_results: got tp of 2 ranks, need tp_group"),
    ({"parallel": LayerParallel(ep=(0, 9))}, "placement: experts: got 8"),
    ({"placement": Placement.linear(8, 2)}, "placement: got 8 experts on 2 ranks, need 8 experts"),
    ({"placement": Placement.linear(8, 2).with_copies({0: (1,)}),
      "parallel": LayerParallel(ep=(0, 2))}, "placement: got copies of experts, need no copies"),
    ({"prepare_finalize": "TorchAll2AllPrepareAndFinalize"}, "max_tokens: got None, need the max"),
    ({"prepare_finalize": "NoSuchPart"}, "prepare_finalize part: got 'NoSuchPart'"),
    ({"router": RouterSpec(K, selection_bias=True)}, "selection_bias: got None, need a tensor if"),
    ({"selection_bias": torch.zeros(E)}, "selection_bias: got a tensor, need a tensor if and only"),
    ({"router": Router(RouterSpec(K), H, 9)}, "router num_experts: got 9, need 8, as in the layer"),
    ({"router": 3}, "router: got 3, need a Router or a RouterSpec or None"),
    ({"device": "gpus"}, "device: got 'gpus', need a torch device"),
    ({"layer_id": "a"}, "layer_id: got 'a', need an int or None"),
)  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD_LAYERS, ids=str)
def test_invalid_layer_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    sizes = {"num_experts": E, "hidden_size": H, "intermediate_size": I}
    with pytest.raises(ModularKernelError, match=message):
        FusedMoE(**sizes | {"router": RouterSpec(K)} | options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ep": (2, 2)}, r"ep rank: got 2, need in \[0, 2\)"),
        ({"tp": (0, 0)}, "tp ranks: got 0, need an int >= 1"),
        ({"tp": 2}, "tp: got 2, need a tuple of an int and an int"),
    ],
)
def test_invalid_ranks_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LayerParallel(**fields)


def test_invalid_calls_are_refused() -> None:
    sample = Sample()
    layer, bare = make_layer(sample), make_layer(sample, router=None, top_k=K)
    x_TH, logits = sample.x_TH, sample.logits
    weights, ids, _ = select_experts(logits, sample.router)
    cases: tuple[tuple[FusedMoE, tuple[Any, ...], dict[str, Any], type[InputError], str], ...] = (
        (layer, (x_TH[0], logits), {}, ShapeError, r"x: got \(32,\), need \(..., H\) with H = 32"),
        (layer, (x_TH[:, :9], logits), {}, ShapeError, r"x: got \(7, 9\)"),
        (layer, (None, logits), {}, DtypeError, "x: got NoneType, need a tensor"),
        (layer, (x_TH.double(), logits), {}, DtypeError, "x: got float64, need float32"),
        (layer, (x_TH,), {}, ConfigurationError, "routing: got NoneType, need the router's logits"),
        (layer, (x_TH, UninitializedParameter()), {}, DtypeError,
         "router logits: got an uninitialized parameter, need a tensor"),
        (bare, (x_TH, (UninitializedParameter(), ids)), {}, DtypeError,
         "topk_weights: got an uninitialized parameter, need a tensor"),
        (layer, (x_TH, logits[:, :5]), {}, ShapeError, r"router logits: got \(7, 5\), need .* = 8"),
        (layer, (x_TH, logits[0, 0]), {}, ShapeError, r"router logits: got \(\)"),
        (layer, (x_TH, logits[:5]), {}, ShapeError, r"topk_weights: got \(5, 3\)"),
        (layer, (x_TH, logits), {"token_ids": ids[:, 0]}, ConfigurationError, "token_ids: got a"),
        (bare, (x_TH, logits), {}, ConfigurationError, "routing: got Tensor, need a Routing, or"),
        (bare, (x_TH, None), {}, ConfigurationError, "routing: got NoneType"),
        (bare, (x_TH, (weights,)), {}, ConfigurationError, "routing: got tuple"),
        (bare, (x_TH, (weights, None)), {}, DtypeError, "topk_ids: got NoneType, need a tensor"),
        (bare, (x_TH, (weights, ids[:, :2])), {}, ShapeError, r"got \(7, 3\) and \(7, 2\)"),
        (bare, (x_TH, (weights[:, :2], ids[:, :2])), {}, ShapeError, "topk_weights: got"),
        (bare, (x_TH, (weights[:, :0], ids[:, :0])), {}, ShapeError, "with K of 1 or more"),
        (bare, (x_TH, (weights, ids.float())), {}, DtypeError, "topk_ids: got float32"),
        (bare, (x_TH, (weights, ids)), {"token_ids": ids[:, 0]}, ConfigurationError,
         "token_ids: got a tensor, need None, because the layer has no router"),
        (bare, (x_TH.clone().requires_grad_(), (weights, ids)), {}, UnsupportedError, "gradients"),
    )  # fmt: skip
    for called_layer, arguments, options, error, message in cases:
        with pytest.raises(error, match=message):
            called_layer(*arguments, **options)


def test_invalid_weights_are_refused() -> None:
    sample = Sample(fields={"bias": True})
    layer, valid = make_layer(sample), rank_weights(sample, (0, 1), (0, 1))
    before = {name: p.clone() for name, p in layer.named_parameters()}
    for changes, message in (
        ({"w1": valid.w1[:4]}, r"w13_weight: got \(4, 96, 32\) float32, need \(e, 2I, H\) = "),
        ({"w2": valid.w2.half()}, r"w2_weight: got \(8, 32, 48\) float16, need"),
        ({"b2": None}, r"w2_bias: got None, need \(e, H\) = \(8, 32\)"),
        ({"w1_scale": torch.ones(8)}, "w13_weight_scale: got a tensor, need None"),
        ({"w2": valid.w2.tolist()}, "w2_weight: got list, need a tensor"),
    ):
        with pytest.raises(InputError, match=message):
            layer.set_weights(replace(valid, **changes))
    with pytest.raises(ConfigurationError, match="weights: got dict, need an ExpertWeights"):
        layer.set_weights({})  # type: ignore[arg-type]
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, before[name])
    with pytest.raises(ConfigurationError, match="expert_id: got 8, need 0 to 7"):
        layer.local_expert(8)


def test_invalid_routers_are_refused() -> None:
    for options, message in (
        ({"vocabulary": 5}, "vocabulary: got 5, need a number if the spec has a table"),
        ({"spec": RouterSpec(2, table=True)}, "vocabulary: got None, need a number if"),
        ({"num_experts": 1}, "router experts: got 1"),
        ({"spec": 2}, "router: got 2, need a RouterSpec"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Router(**{"spec": RouterSpec(2), "hidden_size": H, "num_experts": E} | options)
    router = Router(RouterSpec(2), H, E)
    with pytest.raises(ShapeError, match=r"x of the router: got \(3, 5\), need \(T, H\) with"):
        router(torch.zeros(3, 5))
    with pytest.raises(DtypeError, match="x of the router: got int64, need a floating-point dtype"):
        router(torch.zeros(3, H, dtype=torch.int64))
    with pytest.raises(ConfigurationError, match="router zero_experts: got 2, need 0; use `route`"):
        select_experts(torch.zeros(3, 6), RouterSpec(2, zero_experts=2))
    layer = make_layer(Sample(), router=Router(RouterSpec(K), H, E), selection_bias=None)
    with pytest.raises(
        ConfigurationError, match="routing: got Tensor, need None, because the layer has"
    ):
        layer(torch.zeros(3, H), torch.zeros(3, E))


def test_failed_reduction_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("Connection closed by peer\nmore")

    monkeypatch.setattr(torch.distributed, "all_reduce", fail)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    with pytest.raises(CommunicationError, match=r"all-reduce of a layer: got Connection closed"):
        all_reduce(torch.zeros(2), (object(),))
