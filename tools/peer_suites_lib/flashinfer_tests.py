"""Suites from FlashInfer's tests: layers, routers, and table-based routing."""

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from modular_kernel.ops.route import RouterTensors, route
from modular_kernel.quant.quantized_weights import dequantize_weights
from peer_suites_lib.checkout import EnumStandIn, Params, Source
from peer_suites_lib.layers import Layer, LayerCheck, LayerInputs
from peer_suites_lib.outcomes import (
    AGREE,
    OURS,
    THEIRS,
    CaseOutcome,
    MissingError,
    SkippedError,
    Suite,
    Tolerance,
    call_reference,
)
from peer_suites_lib.routers import REFERENCE_TOKENS, Router, Selection, check_router, make_spec

_NAMESPACE: dict[str, object] = {
    "ActivationType": EnumStandIn(), "RoutingMethodType": EnumStandIn(), "zlib": zlib,
    "DEFAULT_SITU_BETA": 4.0, "DEFAULT_SITU_LINEAR_BETA": 25.0, "FP8_DTYPE": torch.float8_e4m3fn,
}  # fmt: skip


def list_suites(root: Path) -> list[Suite]:
    """Return the suites from a checkout of FlashInfer."""
    return [*_list_layer_suites(root), *_list_router_suites(root)]


def _make_suite(
    source: Source, test: str, check: Callable[[Params], CaseOutcome], *ignored: str
) -> Suite:
    """Return the suite of a test.

    ignored: parameters to ignore. Cases that differ only in them are merged.
    """

    def cases() -> Iterator[Params]:
        seen_cases = set()
        for params in source.grid(test):
            remaining = {key: value for key, value in params.items() if key not in ignored}
            if str(remaining) not in seen_cases:
                seen_cases.add(str(remaining))
                yield remaining

    return Suite("FlashInfer", f"{source.name}::{test}", cases, check)


# --------------------------------------------------------------------------------------- layers


def _list_layer_suites(root: Path) -> list[Suite]:
    name = "tests/moe/test_trtllm_cutlass_fused_moe.py"
    enums = Source(root, "flashinfer/tllm_enums.py")
    betas = {key: enums.namespace[key] for key in ("DEFAULT_SITU_BETA", "DEFAULT_SITU_LINEAR_BETA")
             if key in enums.namespace}  # fmt: skip
    cutlass = Source(root, name, _NAMESPACE | betas)
    cutlass.define("compute_with_experts", "compute_with_experts_gelu_tanh")
    mono = Source(root, "tests/moe/test_monomoe.py")
    mono.define("_quant_act_block_wise", "_block_wise_gemm", "_python_reference_fp8")
    mx = _Cutlass(cutlass, "mxfp4_w4a16", torch.bfloat16, Tolerance(1e-1, 1e-1))
    unquantized = _Cutlass(cutlass, "none", torch.float16, Tolerance(1e-2, 1e-2))
    gelu = _Cutlass(cutlass, "none", torch.float16, Tolerance(1e-2, 1e-2), gelu=True)
    fp8 = _Cutlass(cutlass, "fp8_w8a8_tensor", torch.float16, Tolerance(1e-1, 1e-1))
    monomoe = LayerCheck(_make_mono_reference(mono), Tolerance(mean=0.2))
    mxfp8 = partial(_raise_missing, "mxfp8 activations")
    fp4 = partial(_raise_missing, "nvfp4 with a choice of 4 or 6 as the largest code of a group")
    int4 = partial(_raise_missing, "int4 weights with fp8 activations")
    return [
        _make_suite(cutlass, "test_moe", unquantized),
        _make_suite(cutlass, "test_moe_gelu_tanh", gelu),
        _make_suite(cutlass, "test_moe_expert_parallel", partial(_check_expert_parallel, cutlass)),
        _make_suite(cutlass, "test_moe_fp8", fp8),
        _make_suite(cutlass, "test_moe_bf16_mxfp4", mx),
        _make_suite(cutlass, "test_moe_bf16_mxfp4_hopper_correctness", mx),
        _make_suite(cutlass, "test_moe_bf16_mxfp4_hopper_coverage", mx),
        _make_suite(cutlass, "test_moe_bf16_mxfp4_hopper_activations", mx),
        _make_suite(cutlass, "test_moe_nvfp4", fp4),
        _make_suite(cutlass, "test_moe_mxfp8_mxfp4", mxfp8, "use_autotune"),
        _make_suite(cutlass, "test_moe_mxfp8_mxfp8", mxfp8, "use_autotune"),
        _make_suite(cutlass, "test_moe_w4a8", int4, "use_autotune"),
        _make_suite(mono, "test_monomoe_accuracy", partial(_check_mono, monomoe)),
    ]


def _raise_missing(feature: str, p: Any) -> CaseOutcome:
    raise MissingError(feature)


class _Cutlass:
    """Compares layers with `compute_with_experts`, which expects up rows first in w1."""

    def __init__(
        self, source: Source, quant: str, dtype: torch.dtype, tolerance: Tolerance,
        *, gelu: bool = False,
    ) -> None:  # fmt: skip
        self._source, self._quant, self._dtype = source, quant, dtype
        self._tolerance, self._gelu = tolerance, gelu
        self._checks: dict[str, LayerCheck] = {}

    def __call__(self, p: Any) -> CaseOutcome:
        if p["top_k"] > p["num_experts"]:
            raise SkippedError("topk > experts")
        activation, options = _convert_activation(p)
        if self._gelu:
            activation = "gelu_tanh"
        layer = Layer(p["batch_size"], p["hidden_size"], p["intermediate_size"],
                      p["num_experts"], p["top_k"], self._dtype, self._quant, activation,
                      renormalize=True, multiple=32, scale=_get_scale(p),
                      representable="wtype" in p)  # fmt: skip
        reference = partial(_call_reference, self._source, options)
        check = self._checks.setdefault(str(options), LayerCheck(reference, self._tolerance))
        return check(layer)


def _get_scale(p: Any) -> tuple[float, float, float]:
    if "wtype" in p:
        return 1.0, 0.1, 0.09
    return (3.5, 0.2, 0.2) if p.get("activation_type") == "SwigluStep" else (0.2, 0.2, 0.2)


def _convert_activation(p: Any) -> tuple[str, dict[str, object]]:
    """Return our activation, and the corresponding arguments of their reference."""
    kind = p.get("activation_type", "Swiglu")
    if kind == "SwigluStep":
        return "swiglu_clamp_after:limit=7", {"activation_type": kind}
    if kind == "Situ":
        if p.get("situ_per_expert"):
            raise MissingError("situ with constants per expert")
        return f"situ:alpha={4.0},limit={25.0}", {
            "activation_type": kind, "situ_beta": 4.0, "situ_linear_beta": 25.0,
        }  # fmt: skip
    if p.get("alpha") is None:
        return "silu", {}
    arguments = {name: p[name] for name in ("alpha", "beta", "limit")}
    if p["beta"] != 1.0:
        raise MissingError("swiglu_oai with beta other than 1")
    text = f"swiglu_oai:alpha={p['alpha']},limit={p['limit']},interleaved=false"
    return text, arguments


def _call_reference(
    source: Source, options: dict[str, object], layer: Layer, inputs: LayerInputs
) -> torch.Tensor:
    w1, w2 = _put_up_first(_dequantize(inputs, "w1")), _dequantize(inputs, "w2")
    name = "compute_with_experts"
    if layer.activation.startswith("gelu_tanh"):
        name = "compute_with_experts_gelu_tanh"
    function: Any = source.namespace[name]
    output: torch.Tensor = function(
        layer.experts, inputs.x, w1, w2, inputs.routing.topk_ids_TK.long(),
        inputs.routing.topk_weights_TK.to(inputs.x.dtype), **options,
    )  # fmt: skip
    return output


def _put_up_first(w1: torch.Tensor) -> torch.Tensor:
    """Return w1 with up rows first."""
    gate, up = w1.chunk(2, 1)
    return torch.cat([up, gate], 1)


def _dequantize(inputs: LayerInputs, name: str) -> torch.Tensor:
    """Return the dequantized weights in the dtype of x."""
    if inputs.problem.quant == "none":
        stored: torch.Tensor = getattr(inputs.weights, name)
        return stored
    return dequantize_weights(inputs.weights, name, inputs.problem).to(inputs.x.dtype)


def _check_expert_parallel(source: Source, p: Any) -> CaseOutcome:
    layer = Layer(p["batch_size"], p["hidden_size"], p["intermediate_size"], p["num_experts"],
                  p["top_k"], torch.float16, activation="silu", ep_size=2,
                  renormalize=True, scale=(0.2, 0.2, 0.2))  # fmt: skip

    def reference(layer: Layer, inputs: LayerInputs) -> torch.Tensor:
        assert inputs.weights.expert_map is not None
        ids = inputs.weights.expert_map[inputs.routing.topk_ids_TK.long()]
        function: Any = source.namespace["compute_with_experts"]
        output: torch.Tensor = function(
            inputs.problem.e, inputs.x, _put_up_first(inputs.weights.w1), inputs.weights.w2, ids,
            inputs.routing.topk_weights_TK.to(inputs.x.dtype),
        )  # fmt: skip
        return output

    return LayerCheck(reference, Tolerance(1e-1, 1e-1))(layer)


def _make_mono_reference(source: Source) -> Callable[[Layer, LayerInputs], torch.Tensor]:
    function: Any = source.namespace["_python_reference_fp8"]

    def reference(layer: Layer, inputs: LayerInputs) -> torch.Tensor:
        w, routing = inputs.weights, inputs.routing
        output: torch.Tensor = function(
            inputs.x, w.w1, w.w1_scale, w.w2, w.w2_scale, routing.topk_weights_TK,
            routing.topk_ids_TK, layer.intermediate, layer.hidden,
        )  # fmt: skip
        return output

    return reference


def _check_mono(check: LayerCheck, p: Any) -> CaseOutcome:
    return check(Layer(p["m"], 2048, 512, 256, p["top_k"], quant="fp8_w8a8_block:block=128x128",
                       renormalize=True, multiple=128, scale=(1.0, 0.1, 0.1)))  # fmt: skip


# -------------------------------------------------------------------------------------- routers


def _list_router_suites(root: Path) -> list[Suite]:
    utils = Source(root, "tests/moe/trtllm_gen_fused_moe_utils.py", _NAMESPACE)
    utils.define("routing_reference", "noaux_tc_ref")
    names = ["default", "renormalize", "renormalize_naive", "topk", "sigmoid_renorm", "minimax2"]
    names = [f"routing_reference_{name}" for name in names]
    utils.define(*names)
    references = {name: utils.namespace[name] for name in names}
    routing = Source(root, "tests/moe/test_trtllm_gen_routing.py", _NAMESPACE | references)
    dsv3 = Source(root, "tests/model_optimizations/test_dsv3_fused_routing.py", _NAMESPACE)
    tables = Source(root, "tests/moe/test_hash_topk.py", _NAMESPACE)
    hashed = tables.function("_ref_hash_topk")
    noaux = utils.namespace["noaux_tc_ref"]
    return [
        _make_suite(routing, "test_custom_routing_methods", _check_custom, "tile_tokens_dim"),
        _make_suite(
            routing, "test_deepseekv3_routing", partial(_check_deepseek, noaux), "tile_tokens_dim"
        ),
        _make_suite(
            routing,
            "test_minimax2_routing",
            partial(_check_minimax, utils.namespace["routing_reference_minimax2"]),
            "tile_tokens_dim",
        ),
        _make_suite(dsv3, "test_dsv3_fused_routing_op", partial(_check_dsv3, noaux)),
        _make_suite(tables, "test_hash_topk", partial(_check_hashed, hashed), "launch_with_pdl"),
    ]


_METHODS = {
    "Default": {}, "Renormalize": {"order": "topk_first"},
    "RenormalizeNaive": {"renormalize": True},
    "SigmoidRenorm": {"score": "sigmoid", "renormalize": True}, "Sigmoid": {"score": "sigmoid"},
}  # fmt: skip


def _check_custom(p: Any) -> CaseOutcome:
    method = str(p["routing_method"])
    if method not in _METHODS:
        raise MissingError(f"router: {method}, logits as weights")
    spec = make_spec(p["top_k"], **_METHODS[method])
    case = Router(spec, p["num_experts"], p["num_tokens"], p["logits_dtype"], atol=1e-2, rtol=2e-2,
                  hot_expert=p["hot_expert"])  # fmt: skip

    def reference(x: torch.Tensor, _: object) -> Selection:
        routing_info, scores = p["reference"](x, p["top_k"], p["num_experts"], 8)
        ids = routing_info["topKIndices"].long()
        return scores.float().gather(1, ids), ids

    return check_router(case, reference)


def _make_noaux_reference(
    noaux: Any, groups: int, topk_groups: int, top_k: int, factor: float
) -> Any:
    def reference(x: torch.Tensor, bias: torch.Tensor | None) -> Selection:
        scores = noaux(x.float(), bias, groups, topk_groups, top_k, factor)
        weights, ids = scores.topk(top_k, 1)
        return weights, ids

    return reference


def _check_deepseek(noaux: Any, p: Any) -> CaseOutcome:
    if p["num_experts"] > 256 and p["logits_dtype"] is torch.bfloat16:
        raise SkippedError("bfloat16 logits for more than 256 experts")
    spec = make_spec(p["top_k"], score="sigmoid", groups=p["n_group"], topk_groups=p["topk_group"],
                   selection_bias=True, renormalize=True, eps=1e-20)  # fmt: skip
    case = Router(spec, p["num_experts"], p["num_tokens"], p["logits_dtype"], p["bias_dtype"], 2.5,
                  1e-2, 2e-2)  # fmt: skip
    return check_router(
        case, _make_noaux_reference(noaux, p["n_group"], p["topk_group"], p["top_k"], 2.5)
    )


def _check_minimax(reference: Any, p: Any) -> CaseOutcome:
    spec = make_spec(p["top_k"], score="sigmoid", selection_bias=True, renormalize=True, eps=1e-20)
    case = Router(spec, p["num_experts"], p["num_tokens"], p["logits_dtype"], torch.bfloat16,
                  atol=1e-2, rtol=2e-2)  # fmt: skip

    def call_reference_choice(x: torch.Tensor, bias: torch.Tensor | None) -> Selection:
        _, scores = reference(x, bias, p["top_k"], p["num_experts"], 8, 1.0)
        weights, ids = scores.float().topk(p["top_k"], 1)
        return weights, ids

    return check_router(case, call_reference_choice)


def _check_dsv3(noaux: Any, p: Any) -> CaseOutcome:
    groups, topk_groups, top_k, experts = p["n_group"], p["topk_group"], p["topk"], p["num_experts"]
    if topk_groups * groups < top_k or topk_groups > groups:
        raise SkippedError("topk_group * n_group < topk or topk_group > n_group")
    size = experts / groups
    if groups > 1 and (size > 32 or size * topk_groups > 128):
        raise SkippedError("above the limits of their kernel")
    spec = make_spec(top_k, score="sigmoid", groups=groups, topk_groups=topk_groups,
                   selection_bias=True, renormalize=True, eps=1e-20)  # fmt: skip
    tolerance = {torch.bfloat16: 0.1, torch.float16: 0.05, torch.float32: 0.01}[p["data_type"]]
    case = Router(spec, experts, p["num_tokens"], p["data_type"], p["bias_type"], 1.0, tolerance,
                  tolerance)  # fmt: skip
    return check_router(case, _make_noaux_reference(noaux, groups, topk_groups, top_k, 1.0))


def _check_hashed(reference: Any, p: Any) -> CaseOutcome:
    if p["num_fused_shared_experts"]:
        raise MissingError("router: shared experts appended to the routed ones")
    tokens, experts, top_k = min(p["num_tokens"], REFERENCE_TOKENS), p["num_experts"], p["topk"]
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, experts, generator=generator)
    token_ids = torch.randint(0, 1024, (tokens,), generator=generator)
    table = torch.rand(1024, experts, generator=generator).topk(top_k)[1].int()
    their_result = call_reference(reference, logits, token_ids, table, 0, 1.0)
    assert isinstance(their_result, tuple)
    spec = make_spec(top_k, score="sqrtsoftplus", table=True, renormalize=True)
    kernel_rows = slice(0, 8)
    routing = route(
        logits[kernel_rows], spec, RouterTensors(None, table), token_ids_T=token_ids[kernel_rows]
    ).routing
    score = torch.log1p(torch.exp(logits.double())).sqrt().gather(1, table[token_ids].long())
    exact = score / score.sum(1, keepdim=True)
    shrunk = f"tokens to {REFERENCE_TOKENS}" if tokens < p["num_tokens"] else ""
    if not torch.equal(routing.topk_ids_TK, table[token_ids[kernel_rows]]):
        return CaseOutcome(OURS, "experts differ from the table", shrunk)
    if not float((routing.topk_weights_TK.double() - exact[kernel_rows]).abs().max()) <= 1e-5:
        return CaseOutcome(OURS, "weights differ from float64", shrunk)
    agrees = float((their_result[0].double() - exact).abs().max()) <= 1e-5 and torch.equal(
        their_result[1], table[token_ids]
    )
    outcome, why = (AGREE, "") if agrees else (THEIRS, "weights or ids differ from float64")
    return CaseOutcome(outcome, why, shrunk, ("router's kernel",), (tokens, experts, top_k))
