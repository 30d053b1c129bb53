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
    """A test file of vLLM with its grids."""

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
    moe, cpu = (
        VllmTestFile(root, "moe/test_moe.py"),
        VllmTestFile(root, "moe/test_cpu_fused_moe.py"),
    )
    moe.source.define("iterative_moe")
    cpu.source.namespace |= {"ACT": ["SILU", "SWIGLUOAI", "GELU", "GELU_TANH"]}
    cpu.source.define("_ref_moe_activation", "ref_fused_moe")
    unquantized = LayerCheck(
        lambda layer, inputs: moe.source.namespace["iterative_moe"](  # type: ignore[operator]
            inputs.x, inputs.weights.w1.contiguous(), inputs.weights.w2.contiguous(), inputs.score,
            layer.top_k, layer.experts, inputs.weights.expert_map, False,
        ),
        Tolerance(2e-2, 0),
    )  # fmt: skip
    groups = LayerCheck(references.torch_moe, Tolerance(2e-2, 0), references.store_groups)
    batched = LayerCheck(references.torch_experts, Tolerance(3e-2, 2e-2))
    # rtol is the default of torch.testing for bfloat16. Here it is used for all dtypes.
    with_bias = LayerCheck(
        lambda layer, inputs: cpu.source.namespace["ref_fused_moe"](  # type: ignore[operator]
            inputs.x, inputs.weights.w1, inputs.weights.w2, inputs.weights.b1, inputs.weights.b2,
            inputs.routing.topk_weights_TK, inputs.routing.topk_ids_TK, _find_activation(layer),
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
    fp8_rows_file = VllmTestFile(root, "moe/test_triton_moe_ptpc_fp8.py")
    int8_rows_file = VllmTestFile(root, "quantization/test_int8_kernel.py")
    return [
        moe.suite("test_fused_moe", partial(_check_plain, unquantized), ("use_td",)),
        moe.suite("test_naive_block_assignment_moe", partial(_check_plain, unquantized)),
        moe.suite("test_fused_moe_wn16", partial(_check_groups, groups)),
        VllmTestFile(root, "moe/test_batched_moe.py").suite(
            "test_fused_moe_batched_experts", partial(_check_batched, batched)
        ),
        cpu.suite("test_cpu_fused_moe", partial(_check_cpu, with_bias), ("isa",)),
        fp8_block_file.suite(
            "test_w8a8_block_fp8_fused_moe",
            partial(_check_block, fp8_block_check, "fp8_w8a8_block"),
        ),
        int8_block_file.suite(
            "test_w8a8_block_int8_fused_moe",
            partial(_check_block, int8_block_check, "int8_w8a8_block"),
        ),
        fp8_rows_file.suite(
            "test_w8a8_fp8_fused_moe",
            partial(_check_channel, fp8_channel_check, "fp8_w8a8_channel"),
        ),
        int8_rows_file.suite(
            "test_w8a8_fp8_fused_moe",
            partial(_check_channel, int8_channel_check, "int8_w8a8_channel"),
        ),
    ]


_ACTS = {"SILU": "silu", "GELU": "gelu", "GELU_TANH": "gelu_tanh", "SWIGLUOAI": "swiglu_oai"}


def _find_activation(layer: Layer) -> str:
    kind = ActivationSpec.parse(layer.activation).kind
    return next(name for name, ours in _ACTS.items() if ours == kind)


def _check_plain(check: LayerCheck, p: Any) -> CaseOutcome:
    layer = Layer(p["m"], p["k"], p["n"], p["e"], p["topk"], p["dtype"],
                  ep_size=p.get("ep_size", 1), padded=p["padding"])  # fmt: skip
    return check(layer)


def _check_groups(check: LayerCheck, p: Any) -> CaseOutcome:
    bits, group = p["weight_bits"], p["group_size"]
    quant = f"int{bits}_w{bits}a16_group:group={group}" + ",zero_points=true" * p["has_zp"]
    return check(
        Layer(p["m"], p["k"], p["n"], p["e"], p["topk"], p["dtype"], quant,
              ep_size=p["ep_size"], multiple=group)
    )  # fmt: skip


def _check_batched(check: LayerCheck, p: Any) -> CaseOutcome:
    per_token, block, quantized = p["per_act_token_quant"], p["block_shape"], p["dtype"] is _FP8
    if (per_token or block) and not quantized:
        raise SkippedError("a granularity without quantization")
    if per_token and block:
        raise SkippedError("scales per block and per token at once")
    quant = "fp8_w8a8_block:block=128x128" if block else "fp8_w8a8_channel"
    if not per_token and not block:
        quant = "fp8_w8a8_tensor" if quantized else "none"
    return check(
        Layer(p["m"], p["k"], p["n"], p["e"], p["topk"], quant=quant, multiple=128 if block else 1)
    )


def _check_cpu(check: LayerCheck, p: Any) -> CaseOutcome:
    return check(
        Layer(p["batch_size"], p["hidden_size"], p["intermediate_size"], p["expert_num"],
              max(p["expert_num"] // 2, 1), p["dtype"], activation=_ACTS[p["act"]],
              bias=p["use_bias"],
              scale=(0.02, 0.02, 0.02))
    )  # fmt: skip


def _check_block(check: LayerCheck, quant: str, p: Any) -> CaseOutcome:
    if p["topk"] > p["E"]:
        raise SkippedError("topk > E")
    rows, columns = p["block_size"]
    return check(
        Layer(p["M"], p["K"], p["N"], p["E"], p["topk"], p["dtype"],
              f"{quant}:block={rows}x{columns}", multiple=max(rows, columns))
    )  # fmt: skip


def _check_channel(check: LayerCheck, quant: str, p: Any) -> CaseOutcome:
    return check(
        Layer(p["M"], p["K"], p["N"], p["E"], p["topk"], p["dtype"], quant, stored="codes")
    )


# -------------------------------------------------------------------------------------- routers


def _list_router_suites(root: Path) -> list[Suite]:
    fused, grouped = (
        VllmTestFile(root, "moe/test_fused_topk.py"),
        VllmTestFile(root, "moe/test_grouped_topk.py"),
    )
    routing = VllmTestFile(root, "moe/test_routing.py")
    softplus = VllmTestFile(root, "moe/test_topk_softplus_sqrt.py")
    fused.source.define("torch_topk")
    grouped.source.define("_single_group_reference")
    routing.source.namespace["Llama4MoE"] = SimpleNamespace(custom_routing_function="llama4")
    names = ("fused_topk", "fused_topk_bias", "grouped_topk", "custom_llama4")
    routing.source.define(*(f"baseline_{name}" for name in names))
    softplus.source.define("_torch_topk_softplus_sqrt")
    refs = routing.source.namespace
    eplb = ("enable_eplb",)
    skip = ("hidden_size", "enable_eplb", "k", "n_hidden")
    topk_check = partial(_check_topk, fused.source.namespace["torch_topk"])
    return [
        fused.suite("test_fused_topk", partial(topk_check, bias=False), skip),
        fused.suite("test_fused_topk_bias", partial(topk_check, bias=True), skip),
        grouped.suite(
            "test_grouped_topk", partial(_check_grouped, refs["baseline_grouped_topk"]), skip
        ),
        grouped.suite(
            "test_grouped_topk_single_group_tiers",
            partial(_check_single_group, grouped.source.namespace["_single_group_reference"]),
        ),
        routing.suite(
            "test_fused_topk", partial(_check_baseline, refs["baseline_fused_topk"]), eplb
        ),
        routing.suite(
            "test_fused_topk_bias", partial(_check_biased, refs["baseline_fused_topk_bias"]), eplb
        ),
        routing.suite(
            "test_grouped_topk", partial(_check_grouped, refs["baseline_grouped_topk"]), eplb
        ),
        routing.suite(
            "test_custom",
            partial(_check_llama4, refs["baseline_custom_llama4"]),
            (*eplb, "renormalize"),
        ),
        softplus.suite(
            "test_fused_topk_softplus_sqrt",
            partial(_check_softplus_sqrt, softplus.source.namespace["_torch_topk_softplus_sqrt"]),
            skip,
        ),
    ]


def _check_topk(reference: Any, p: Any, *, bias: bool) -> CaseOutcome:
    spec = make_spec(p["topk"], score=p["scoring_func"], renormalize=p["renormalize"],
                   selection_bias=bias)  # fmt: skip
    case = Router(spec, p["num_experts"], p["num_tokens"], p["dtype"])
    return check_router(
        case, lambda x, b: reference(x, p["topk"], p["renormalize"], b, p["scoring_func"])
    )


def _check_grouped(reference: Any, p: Any) -> CaseOutcome:
    k = p.get("topk", p.get("top_k"))
    experts = p.get("n_expert", p.get("global_num_experts"))
    spec = make_spec(k, score=p["scoring_func"], groups=p["num_expert_group"],
                   topk_groups=p["topk_group"], selection_bias=True,
                   renormalize=p["renormalize"])  # fmt: skip
    case = Router(spec, experts, p.get("n_token", p.get("m")), p.get("input_dtype", torch.float32),
                  scaling=p["routed_scaling_factor"])  # fmt: skip
    return check_router(
        case,
        lambda x, b: reference(x, k, p["num_expert_group"], p["topk_group"], p["scoring_func"],
                               p["renormalize"], b, p["routed_scaling_factor"]),
    )  # fmt: skip


def _check_single_group(reference: Any, p: Any) -> CaseOutcome:
    spec = make_spec(p["topk"], score=p["scoring_func"], selection_bias=True,
                   renormalize=p["renormalize"])  # fmt: skip
    case = Router(spec, p["num_experts"], 33, p["input_dtype"], p["bias_dtype"],
                  p["routed_scaling_factor"])  # fmt: skip
    return check_router(
        case,
        lambda x, b: reference(x, b, p["topk"], scoring_func=p["scoring_func"],
                               renormalize=p["renormalize"],
                               routed_scaling_factor=p["routed_scaling_factor"]),
    )  # fmt: skip


def _check_baseline(reference: Any, p: Any) -> CaseOutcome:
    case = Router(make_spec(p["top_k"], renormalize=p["renormalize"]), p["global_num_experts"],
                  p["m"], atol=1e-3, rtol=1e-3)  # fmt: skip
    return check_router(case, lambda x, _: reference(x, p["top_k"], p["renormalize"]))


def _check_biased(reference: Any, p: Any) -> CaseOutcome:
    spec = make_spec(p["top_k"], renormalize=p["renormalize"], selection_bias=True)
    factor = p["routed_scaling_factor"]
    case = Router(spec, p["global_num_experts"], p["m"], scaling=factor, atol=1e-3, rtol=1e-3)
    return check_router(case, lambda x, b: reference(x, p["top_k"], p["renormalize"], b, factor))


def _check_llama4(reference: Any, p: Any) -> CaseOutcome:
    spec = make_spec(p["top_k"], score="sigmoid", order="topk_first")
    case = Router(spec, p["global_num_experts"], p["m"], atol=1e-3, rtol=1e-3)
    return check_router(case, lambda x, _: reference(x, p["top_k"]))


def _check_softplus_sqrt(reference: Any, p: Any) -> CaseOutcome:
    spec = make_spec(p["topk"], score="sqrtsoftplus", selection_bias=True,
                   renormalize=p["renormalize"])  # fmt: skip
    factor = p["routed_scaling_factor"]
    case = Router(spec, p["num_experts"], p["num_tokens"], p["dtype"], scaling=factor, atol=2e-2)
    return check_router(case, lambda x, b: reference(x, p["topk"], p["renormalize"], factor, b))


# ----------------------------------------------------------------------------------------- rows


def _list_row_suites(root: Path, references: VllmReferences) -> list[Suite]:
    fp8, int8 = (VllmTestFile(root, f"quantization/test_{t}_quant.py") for t in ("fp8", "int8"))
    group = VllmTestFile(root, "quantization/test_per_token_group_quant.py")
    align = VllmTestFile(root, "moe/test_moe_align_block_size.py",
                  {"round_up": lambda a, b: -(-a // b) * b})  # fmt: skip
    align.source.define("torch_moe_align_block_size")
    golden = align.source.namespace["torch_moe_align_block_size"]
    device = {"CUDA_DEVICES": ["cpu"], "FastGELU": "gelu_fast", "NewGELU": "gelu_new",
              "QuickGELU": "gelu_quick", "ReLUSquaredActivation": "relu_squared"}  # fmt: skip
    acts = VllmTestFile(root, "core/test_activation.py", device)
    acts.source.namespace["torch"] = _TorchWithOps()
    refs = references
    return [
        fp8.suite(
            "test_dynamic_per_token_fp8_quant",
            partial(_check_quantizer, "fp8_w8a8_channel", refs.fp8_rows),
            ("seed",),
        ),
        fp8.suite(
            "test_dynamic_per_tensor_fp8_quant",
            partial(_check_quantizer, "fp8_w8a8_tensor", refs.fp8_tensor),
            ("seed",),
        ),
        int8.suite(
            "test_dynamic_scaled_int8_quant",
            partial(_check_quantizer, "int8_w8a8_channel", refs.int8_rows),
            ("seed",),
        ),
        group.suite(
            "test_per_token_group_quant_fp8",
            partial(_check_by_group, "fp8", refs.fp8_groups),
            ("column_major", "tma_aligned"),
        ),
        group.suite(
            "test_per_token_group_quant_int8", partial(_check_by_group, "int8", refs.int8_groups)
        ),
        acts.suite("test_act_and_mul", partial(_check_gated, refs.activations), ("seed", "device")),
        acts.suite(
            "test_silu_and_mul_with_clamp", partial(_check_clamped, refs), ("seed", "device")
        ),
        align.suite(
            "test_moe_align_block_size", partial(_check_aligned, golden), ("pad_sorted_ids",)
        ),
        align.suite(
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


def _check_quantizer(quant: str, reference: Any, p: Any) -> CaseOutcome:
    if p.get("do_scale_ub"):
        raise MissingError("an upper bound on computed activation scales")
    rows, columns, shrunk = shrink_rows(p["num_tokens"], p["hidden_size"])
    return check_quantizer(
        draw_normal_rows(rows, columns, p["dtype"]) * 8, quant, reference, shrunk
    )


def _check_by_group(kind: str, reference: Any, p: Any) -> CaseOutcome:
    if p.get("scale_ue8m0"):
        raise MissingError("activation scales that are powers of two")
    group, (rows, columns) = p["group_size"], p["shape"]
    rows, columns, note = shrink_rows(rows, columns, group)
    x = draw_normal_rows(rows, columns, p["dtype"]) * 8
    quant = f"{kind}_w8a8_block:block={group}x{group}"
    return check_quantizer(x, quant, lambda part: reference(part, group), note)


_GATED = {
    "silu_and_mul": "silu", "mul_and_silu": "silu:up_first=true", "gelu": "gelu",
    "gelu_tanh": "gelu_tanh", "swigluoai_and_mul": "swiglu_oai",
    "swiglustep_and_mul": "swiglu_clamp_after:limit=7",
}  # fmt: skip


def _make_tolerance(dtype: torch.dtype) -> Tolerance:
    """Return a tolerance of one rounding.

    vLLM's own test compares exactly, because its kernel rounds like torch.
    """
    rtol = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1.3e-6}[dtype]
    atol = {torch.float16: 1e-3, torch.bfloat16: 1e-3, torch.float32: 1e-5}[dtype]
    return Tolerance(atol, rtol)


def _check_gated(references: Any, p: Any) -> CaseOutcome:
    name = p["activation"]
    if name not in _GATED:
        raise MissingError(f"activation {name}")
    rows, intermediate, shrunk = shrink_rows(p["num_tokens"], p["d"])
    x = draw_normal_rows(rows, 2 * intermediate, p["dtype"])
    spec = ActivationSpec.parse(_GATED[name])
    return check_activation(x, spec, references[name], _make_tolerance(p["dtype"]), shrunk)


def _check_clamped(references: VllmReferences, p: Any) -> CaseOutcome:
    alpha, beta, limit = p["alpha"], p["beta"], p["swiglu_limit"]
    if (alpha, beta) == (1.0, 0.0):
        spec = ActivationSpec("swiglu_clamp_before", limit=limit)
    elif beta == 1.0:
        spec = ActivationSpec("swiglu_oai", alpha, limit, interleaved=False)
    else:
        raise MissingError("swiglu_oai with beta other than 1")
    rows, intermediate, shrunk = shrink_rows(p["num_tokens"], p["d"])
    x = draw_normal_rows(rows, 2 * intermediate, p["dtype"]) * 4
    return check_activation(x, spec, references.make_clamped(alpha, beta, limit),
                            _make_tolerance(p["dtype"]), shrunk)  # fmt: skip


def _draw_ids(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, experts, generator=g).topk(top_k)[1].int()


def _check_aligned(golden: Any, p: Any) -> CaseOutcome:
    if p["topk"] > p["num_experts"]:
        raise SkippedError("topk > experts")
    tokens = min(p["m"], ALIGNED_TOKENS)
    shrunk = f"tokens to {ALIGNED_TOKENS}" if tokens < p["m"] else ""
    experts, block = p["num_experts"], p["block_size"]
    ids = _draw_ids(tokens, p["topk"], experts)
    return check_align(ids, block, experts, lambda x: golden(x, block, experts), shrunk)


def _check_mapped(golden: Any, p: Any) -> CaseOutcome:
    tokens, experts, block = min(p["m"], ALIGNED_TOKENS), p["num_experts"], p["block_size"]
    shrunk = f"tokens to {ALIGNED_TOKENS}" if tokens < p["m"] else ""
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    expert_map[::2] = torch.arange(experts // 2, dtype=torch.int32)
    ids = _draw_ids(tokens, p["topk"], experts)
    return check_align(
        ids, block, experts, lambda x: golden(x, block, experts, expert_map), shrunk, expert_map
    )
