"""Suites from vLLM's tests: layers, routers, quantizers, activations and block alignment."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from modular_kernel.spec.problem import ActivationSpec
from peer_suites_lib.checkout import EnumStandIn, Params, Source
from peer_suites_lib.layers import Layer, LayerCheck
from peer_suites_lib.outcomes import CaseOutcome, MissingError, SkippedError, Suite, Tolerance
from peer_suites_lib.routers import Router, check_router, make_spec
from peer_suites_lib.row_operations import (
    ALIGNED_TOKENS,
    check_activation,
    check_align,
    check_quantizer,
    draw_normal_rows,
    shrink_rows,
)
from peer_suites_lib.vllm_dependencies import VllmReferences

Check = Callable[[Params], CaseOutcome]
_TESTS = "tests/kernels/"
_FP8 = torch.float8_e4m3fn


def list_suites(root: Path) -> list[Suite]:
    """Return the suites from a checkout of vLLM."""
    references = VllmReferences(root)
    return [
        *_list_layer_suites(root, references),
        *_list_router_suites(root),
        *_list_row_suites(root, references),
    ]


class VllmTestFile:
    """A test file of vLLM with the parameter grids of its tests."""

    def __init__(self, root: Path, file: str, names: dict[str, object] | None = None) -> None:
        platform = SimpleNamespace(is_fp8_fnuz=lambda: False, is_rocm=lambda: False)
        defaults: dict[str, object] = {"MoEActivation": EnumStandIn(), "current_platform": platform}
        self.file = file
        self.source = Source(root, _TESTS + file, defaults | (names or {}))

    def suite(self, test: str, check: Check, ignored: tuple[str, ...] = ()) -> Suite:
        """Return the suite of a test.

        ignored: parameters to ignore, such as kernel options. Cases that differ only in them are
            merged.
        """

        def cases() -> Iterator[Params]:
            seen_cases = set()
            for params in self.source.grid(test):
                remaining = {key: value for key, value in params.items() if key not in ignored}
                if str(remaining) not in seen_cases:
                    seen_cases.add(str(remaining))
                    yield remaining

        return Suite("vLLM", f"{self.file}::{test}", cases, check)


def _list_layer_suites(root: Path, references: VllmReferences) -> list[Suite]:
    moe_file, cpu_file = (
        VllmTestFile(root, "moe/test_moe.py"),
        VllmTestFile(root, "moe/test_cpu_fused_moe.py"),
    )
    moe_file.source.define("iterative_moe")
    cpu_file.source.namespace |= {"ACT": ["SILU", "SWIGLUOAI", "GELU", "GELU_TANH"]}
    cpu_file.source.define("_ref_moe_activation", "ref_fused_moe")
    unquantized_check = LayerCheck(
        lambda layer, inputs: moe_file.source.namespace["iterative_moe"](  # type: ignore[operator]
            inputs.x, inputs.weights.w1.contiguous(), inputs.weights.w2.contiguous(), inputs.score,
            layer.top_k, layer.experts, inputs.weights.expert_map, False,
        ),
        Tolerance(2e-2, 0),
    )  # fmt: skip
    group_check = LayerCheck(references.torch_moe, Tolerance(2e-2, 0), references.store_groups)
    batched_check = LayerCheck(references.torch_experts, Tolerance(3e-2, 2e-2))
    # rtol is the default of torch.testing for bfloat16. Here it is used for all dtypes.
    bias_check = LayerCheck(
        lambda layer, inputs: cpu_file.source.namespace["ref_fused_moe"](  # type: ignore[operator]
            inputs.x, inputs.weights.w1, inputs.weights.w2, inputs.weights.b1, inputs.weights.b2,
            inputs.routing.topk_weights_TK, inputs.routing.topk_ids_TK,
            _vllm_activation_name(layer),
        ),
        Tolerance(1e-3, 1.6e-2),
    )  # fmt: skip
    fp8_block_check = LayerCheck(references.fp8_block, Tolerance(0.035, 0.035))
    int8_block_check = LayerCheck(references.int8_block, Tolerance(0.065, 0.065))
    fp8_channel_check = LayerCheck(references.fp8_channel, Tolerance(mean=0.05))
    int8_channel_check = LayerCheck(references.int8_channel, Tolerance(mean=0.05))
    fp8_block_file, int8_block_file = (
        VllmTestFile(root, f"moe/test_block_{t}.py") for t in ("fp8", "int8")
    )
    fp8_channel_file = VllmTestFile(root, "moe/test_triton_moe_ptpc_fp8.py")
    int8_channel_file = VllmTestFile(root, "quantization/test_int8_kernel.py")
    return [
        moe_file.suite("test_fused_moe", partial(_check_plain, unquantized_check), ("use_td",)),
        moe_file.suite("test_naive_block_assignment_moe", partial(_check_plain, unquantized_check)),
        moe_file.suite("test_fused_moe_wn16", partial(_check_groups, group_check)),
        VllmTestFile(root, "moe/test_batched_moe.py").suite(
            "test_fused_moe_batched_experts", partial(_check_batched, batched_check)
        ),
        cpu_file.suite("test_cpu_fused_moe", partial(_check_cpu, bias_check), ("isa",)),
        fp8_block_file.suite(
            "test_w8a8_block_fp8_fused_moe",
            partial(_check_block, fp8_block_check, "fp8_w8a8_block"),
        ),
        int8_block_file.suite(
            "test_w8a8_block_int8_fused_moe",
            partial(_check_block, int8_block_check, "int8_w8a8_block"),
        ),
        fp8_channel_file.suite(
            "test_w8a8_fp8_fused_moe",
            partial(_check_channel, fp8_channel_check, "fp8_w8a8_channel"),
        ),
        int8_channel_file.suite(
            "test_w8a8_fp8_fused_moe",
            partial(_check_channel, int8_channel_check, "int8_w8a8_channel"),
        ),
    ]


_ACTS = {"SILU": "silu", "GELU": "gelu", "GELU_TANH": "gelu_tanh", "SWIGLUOAI": "swiglu_oai"}


def _vllm_activation_name(layer: Layer) -> str:
    kind = ActivationSpec.parse(layer.activation).kind
    return next(name for name, ours in _ACTS.items() if ours == kind)


def _check_plain(check: LayerCheck, params: Any) -> CaseOutcome:
    layer = Layer(params["m"], params["k"], params["n"], params["e"], params["topk"],
                  params["dtype"], ep_size=params.get("ep_size", 1),
                  padded=params["padding"])  # fmt: skip
    return check(layer)


def _check_groups(check: LayerCheck, params: Any) -> CaseOutcome:
    bits, group = params["weight_bits"], params["group_size"]
    quant = f"int{bits}_w{bits}a16_group:group={group}" + ",zero_points=true" * params["has_zp"]
    return check(
        Layer(params["m"], params["k"], params["n"], params["e"], params["topk"], params["dtype"],
              quant, ep_size=params["ep_size"], multiple=group)
    )  # fmt: skip


def _check_batched(check: LayerCheck, params: Any) -> CaseOutcome:
    per_token, block, quantized = (
        params["per_act_token_quant"],
        params["block_shape"],
        params["dtype"] is _FP8,
    )
    if (per_token or block) and not quantized:
        raise SkippedError("a granularity without quantization")
    if per_token and block:
        raise SkippedError("scales per block and per token at once")
    quant = "fp8_w8a8_block:block=128x128" if block else "fp8_w8a8_channel"
    if not per_token and not block:
        quant = "fp8_w8a8_tensor" if quantized else "none"
    return check(
        Layer(
            params["m"],
            params["k"],
            params["n"],
            params["e"],
            params["topk"],
            quant=quant,
            multiple=128 if block else 1,
        )
    )


def _check_cpu(check: LayerCheck, params: Any) -> CaseOutcome:
    return check(
        Layer(params["batch_size"], params["hidden_size"], params["intermediate_size"],
              params["expert_num"], max(params["expert_num"] // 2, 1), params["dtype"],
              activation=_ACTS[params["act"]], bias=params["use_bias"],
              scale=(0.02, 0.02, 0.02))
    )  # fmt: skip


def _check_block(check: LayerCheck, quant: str, params: Any) -> CaseOutcome:
    if params["topk"] > params["E"]:
        raise SkippedError("topk > E")
    rows, columns = params["block_size"]
    return check(
        Layer(params["M"], params["K"], params["N"], params["E"], params["topk"], params["dtype"],
              f"{quant}:block={rows}x{columns}", multiple=max(rows, columns))
    )  # fmt: skip


def _check_channel(check: LayerCheck, quant: str, params: Any) -> CaseOutcome:
    return check(
        Layer(
            params["M"],
            params["K"],
            params["N"],
            params["E"],
            params["topk"],
            params["dtype"],
            quant,
            stored="codes",
        )
    )


# -------------------------------------------------------------------------------------- routers


def _list_router_suites(root: Path) -> list[Suite]:
    fused_file, grouped_file = (
        VllmTestFile(root, "moe/test_fused_topk.py"),
        VllmTestFile(root, "moe/test_grouped_topk.py"),
    )
    routing_file = VllmTestFile(root, "moe/test_routing.py")
    softplus_file = VllmTestFile(root, "moe/test_topk_softplus_sqrt.py")
    fused_file.source.define("torch_topk")
    grouped_file.source.define("_single_group_reference")
    routing_file.source.namespace["Llama4MoE"] = SimpleNamespace(custom_routing_function="llama4")
    names = ("fused_topk", "fused_topk_bias", "grouped_topk", "custom_llama4")
    routing_file.source.define(*(f"baseline_{name}" for name in names))
    softplus_file.source.define("_torch_topk_softplus_sqrt")
    baselines = routing_file.source.namespace
    ignored = ("hidden_size", "enable_eplb", "k", "n_hidden")
    topk_check = partial(_check_topk, fused_file.source.namespace["torch_topk"])
    return [
        fused_file.suite("test_fused_topk", partial(topk_check, bias=False), ignored),
        fused_file.suite("test_fused_topk_bias", partial(topk_check, bias=True), ignored),
        grouped_file.suite(
            "test_grouped_topk",
            partial(_check_grouped, baselines["baseline_grouped_topk"]),
            ignored,
        ),
        grouped_file.suite(
            "test_grouped_topk_single_group_tiers",
            partial(_check_single_group, grouped_file.source.namespace["_single_group_reference"]),
        ),
        routing_file.suite(
            "test_fused_topk",
            partial(_check_baseline, baselines["baseline_fused_topk"]),
            ("enable_eplb",),
        ),
        routing_file.suite(
            "test_fused_topk_bias",
            partial(_check_biased, baselines["baseline_fused_topk_bias"]),
            ("enable_eplb",),
        ),
        routing_file.suite(
            "test_grouped_topk",
            partial(_check_grouped, baselines["baseline_grouped_topk"]),
            ("enable_eplb",),
        ),
        routing_file.suite(
            "test_custom",
            partial(_check_llama4, baselines["baseline_custom_llama4"]),
            ("enable_eplb", "renormalize"),
        ),
        softplus_file.suite(
            "test_fused_topk_softplus_sqrt",
            partial(
                _check_softplus_sqrt, softplus_file.source.namespace["_torch_topk_softplus_sqrt"]
            ),
            ignored,
        ),
    ]


def _check_topk(reference: Any, params: Any, *, bias: bool) -> CaseOutcome:
    spec = make_spec(params["topk"], score=params["scoring_func"],
                   renormalize=params["renormalize"], selection_bias=bias)  # fmt: skip
    case = Router(spec, params["num_experts"], params["num_tokens"], params["dtype"])
    return check_router(
        case,
        lambda x, b: reference(x, params["topk"], params["renormalize"], b, params["scoring_func"]),
    )


def _check_grouped(reference: Any, params: Any) -> CaseOutcome:
    k = params.get("topk", params.get("top_k"))
    experts = params.get("n_expert", params.get("global_num_experts"))
    spec = make_spec(k, score=params["scoring_func"], groups=params["num_expert_group"],
                   topk_groups=params["topk_group"], selection_bias=True,
                   renormalize=params["renormalize"])  # fmt: skip
    case = Router(spec, experts, params.get("n_token", params.get("m")),
                  params.get("input_dtype", torch.float32),
                  scaling=params["routed_scaling_factor"])  # fmt: skip
    return check_router(
        case,
        lambda x, b: reference(x, k, params["num_expert_group"], params["topk_group"],
                               params["scoring_func"], params["renormalize"], b,
                               params["routed_scaling_factor"]),
    )  # fmt: skip


def _check_single_group(reference: Any, params: Any) -> CaseOutcome:
    spec = make_spec(params["topk"], score=params["scoring_func"], selection_bias=True,
                   renormalize=params["renormalize"])  # fmt: skip
    case = Router(spec, params["num_experts"], 33, params["input_dtype"], params["bias_dtype"],
                  params["routed_scaling_factor"])  # fmt: skip
    return check_router(
        case,
        lambda x, b: reference(x, b, params["topk"], scoring_func=params["scoring_func"],
                               renormalize=params["renormalize"],
                               routed_scaling_factor=params["routed_scaling_factor"]),
    )  # fmt: skip


def _check_baseline(reference: Any, params: Any) -> CaseOutcome:
    spec = make_spec(params["top_k"], renormalize=params["renormalize"])
    case = Router(spec, params["global_num_experts"], params["m"], atol=1e-3, rtol=1e-3)
    return check_router(case, lambda x, _: reference(x, params["top_k"], params["renormalize"]))


def _check_biased(reference: Any, params: Any) -> CaseOutcome:
    spec = make_spec(params["top_k"], renormalize=params["renormalize"], selection_bias=True)
    factor = params["routed_scaling_factor"]
    case = Router(
        spec, params["global_num_experts"], params["m"], scaling=factor, atol=1e-3, rtol=1e-3
    )
    return check_router(
        case, lambda x, b: reference(x, params["top_k"], params["renormalize"], b, factor)
    )


def _check_llama4(reference: Any, params: Any) -> CaseOutcome:
    spec = make_spec(params["top_k"], score="sigmoid", order="topk_first")
    case = Router(spec, params["global_num_experts"], params["m"], atol=1e-3, rtol=1e-3)
    return check_router(case, lambda x, _: reference(x, params["top_k"]))


def _check_softplus_sqrt(reference: Any, params: Any) -> CaseOutcome:
    spec = make_spec(params["topk"], score="sqrtsoftplus", selection_bias=True,
                   renormalize=params["renormalize"])  # fmt: skip
    factor = params["routed_scaling_factor"]
    case = Router(
        spec,
        params["num_experts"],
        params["num_tokens"],
        params["dtype"],
        scaling=factor,
        atol=2e-2,
    )
    return check_router(
        case, lambda x, b: reference(x, params["topk"], params["renormalize"], factor, b)
    )


# ----------------------------------------------------------------------------------------- rows


def _list_row_suites(root: Path, references: VllmReferences) -> list[Suite]:
    fp8_file, int8_file = (
        VllmTestFile(root, f"quantization/test_{t}_quant.py") for t in ("fp8", "int8")
    )
    group_file = VllmTestFile(root, "quantization/test_per_token_group_quant.py")
    align_file = VllmTestFile(root, "moe/test_moe_align_block_size.py",
                  {"round_up": lambda a, b: -(-a // b) * b})  # fmt: skip
    align_file.source.define("torch_moe_align_block_size")
    golden = align_file.source.namespace["torch_moe_align_block_size"]
    names = {"CUDA_DEVICES": ["cpu"], "FastGELU": "gelu_fast", "NewGELU": "gelu_new",
              "QuickGELU": "gelu_quick", "ReLUSquaredActivation": "relu_squared"}  # fmt: skip
    activation_file = VllmTestFile(root, "core/test_activation.py", names)
    activation_file.source.namespace["torch"] = _TorchWithOps()
    return [
        fp8_file.suite(
            "test_dynamic_per_token_fp8_quant",
            partial(_check_quantizer, "fp8_w8a8_channel", references.fp8_rows),
            ("seed",),
        ),
        fp8_file.suite(
            "test_dynamic_per_tensor_fp8_quant",
            partial(_check_quantizer, "fp8_w8a8_tensor", references.fp8_tensor),
            ("seed",),
        ),
        int8_file.suite(
            "test_dynamic_scaled_int8_quant",
            partial(_check_quantizer, "int8_w8a8_channel", references.int8_rows),
            ("seed",),
        ),
        group_file.suite(
            "test_per_token_group_quant_fp8",
            partial(_check_by_group, "fp8", references.fp8_groups),
            ("column_major", "tma_aligned"),
        ),
        group_file.suite(
            "test_per_token_group_quant_int8",
            partial(_check_by_group, "int8", references.int8_groups),
        ),
        activation_file.suite(
            "test_act_and_mul", partial(_check_gated, references.activations), ("seed", "device")
        ),
        activation_file.suite(
            "test_silu_and_mul_with_clamp", partial(_check_clamped, references), ("seed", "device")
        ),
        align_file.suite(
            "test_moe_align_block_size", partial(_check_aligned, golden), ("pad_sorted_ids",)
        ),
        align_file.suite(
            "test_moe_align_block_size_with_expert_map",
            partial(_check_mapped, golden),
            ("mask_inactive_experts",),
        ),
    ]


class _TorchWithOps:
    """A stand-in for torch in which custom operations are names instead of functions."""

    ops = SimpleNamespace(_C=EnumStandIn())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _check_quantizer(quant: str, reference: Any, params: Any) -> CaseOutcome:
    if params.get("do_scale_ub"):
        raise MissingError("an upper bound on computed activation scales")
    rows, columns, shrink_note = shrink_rows(params["num_tokens"], params["hidden_size"])
    return check_quantizer(
        draw_normal_rows(rows, columns, params["dtype"]) * 8, quant, reference, shrink_note
    )


def _check_by_group(kind: str, reference: Any, params: Any) -> CaseOutcome:
    if params.get("scale_ue8m0"):
        raise MissingError("activation scales that are powers of two")
    group, (rows, columns) = params["group_size"], params["shape"]
    rows, columns, shrink_note = shrink_rows(rows, columns, group)
    x = draw_normal_rows(rows, columns, params["dtype"]) * 8
    quant = f"{kind}_w8a8_block:block={group}x{group}"
    return check_quantizer(x, quant, lambda part: reference(part, group), shrink_note)


_GATED = {
    "silu_and_mul": "silu", "mul_and_silu": "silu:up_first=true", "gelu": "gelu",
    "gelu_tanh": "gelu_tanh", "swigluoai_and_mul": "swiglu_oai",
    "swiglustep_and_mul": "swiglu_clamp_after:limit=7",
}  # fmt: skip


def _make_tolerance(dtype: torch.dtype) -> Tolerance:
    """Return a tolerance that allows for one rounding error.

    vLLM's own test compares exactly, because its kernel rounds like torch.
    """
    rtol = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1.3e-6}[dtype]
    atol = {torch.float16: 1e-3, torch.bfloat16: 1e-3, torch.float32: 1e-5}[dtype]
    return Tolerance(atol, rtol)


def _check_gated(references: Any, params: Any) -> CaseOutcome:
    name = params["activation"]
    if name not in _GATED:
        raise MissingError(f"activation {name}")
    rows, intermediate, shrink_note = shrink_rows(params["num_tokens"], params["d"])
    x = draw_normal_rows(rows, 2 * intermediate, params["dtype"])
    spec = ActivationSpec.parse(_GATED[name])
    return check_activation(
        x, spec, references[name], _make_tolerance(params["dtype"]), shrink_note
    )


def _check_clamped(references: VllmReferences, params: Any) -> CaseOutcome:
    alpha, beta, limit = params["alpha"], params["beta"], params["swiglu_limit"]
    if (alpha, beta) == (1.0, 0.0):
        spec = ActivationSpec("swiglu_clamp_before", limit=limit)
    elif beta == 1.0:
        spec = ActivationSpec("swiglu_oai", alpha, limit, interleaved=False)
    else:
        raise MissingError("swiglu_oai with beta other than 1")
    rows, intermediate, shrink_note = shrink_rows(params["num_tokens"], params["d"])
    x = draw_normal_rows(rows, 2 * intermediate, params["dtype"]) * 4
    return check_activation(x, spec, references.make_clamped(alpha, beta, limit),
                            _make_tolerance(params["dtype"]), shrink_note)  # fmt: skip


def _draw_ids(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, experts, generator=g).topk(top_k)[1].int()


def _check_aligned(golden: Any, params: Any) -> CaseOutcome:
    if params["topk"] > params["num_experts"]:
        raise SkippedError("topk > experts")
    tokens = min(params["m"], ALIGNED_TOKENS)
    shrink_note = f"tokens to {ALIGNED_TOKENS}" if tokens < params["m"] else ""
    experts, block = params["num_experts"], params["block_size"]
    ids = _draw_ids(tokens, params["topk"], experts)
    return check_align(ids, block, experts, lambda x: golden(x, block, experts), shrink_note)


def _check_mapped(golden: Any, params: Any) -> CaseOutcome:
    tokens, experts, block = (
        min(params["m"], ALIGNED_TOKENS),
        params["num_experts"],
        params["block_size"],
    )
    shrink_note = f"tokens to {ALIGNED_TOKENS}" if tokens < params["m"] else ""
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    expert_map[::2] = torch.arange(experts // 2, dtype=torch.int32)
    ids = _draw_ids(tokens, params["topk"], experts)
    return check_align(
        ids,
        block,
        experts,
        lambda x: golden(x, block, experts, expert_map),
        shrink_note,
        expert_map,
    )
