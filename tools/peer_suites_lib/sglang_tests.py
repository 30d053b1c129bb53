"""Suites from SGLang's tests: layers, routers, quantizers and activations."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from modular_kernel.spec.problem import ActivationSpec
from peer_suites_lib.checkout import Params, Source
from peer_suites_lib.layers import Layer, LayerCheck, LayerInputs
from peer_suites_lib.outcomes import CaseOutcome, MissingError, Suite, Tolerance
from peer_suites_lib.routers import Router, check_router, make_spec
from peer_suites_lib.row_operations import (
    check_activation,
    check_quantizer,
    draw_normal_rows,
    shrink_rows,
)

_FP8 = torch.float8_e4m3fn


def list_suites(root: Path) -> list[Suite]:
    """Return the suites from a checkout of SGLang."""
    return [*_list_layer_suites(root), *_list_router_suites(root), *_list_row_suites(root)]


def _make_suite(
    source: Source, test: str, check: Callable[[Params], CaseOutcome], *names: str
) -> Suite:
    """Return the suite of a test.

    names: names of lists in a test class that form the grid. Without names, the grid comes from the
        decorators of a test function.
    """

    def cases() -> Iterator[Params]:
        return source.class_grid(test, *names) if names else source.grid(test)

    return Suite("SGLang", f"{source.name}::{test}", cases, check)


def _make_silu(root: Path) -> Any:
    acts = Source(root, "python/sglang/srt/layers/activation.py")
    native: Any = acts.method("SiluAndMul", "forward_native")
    layer = SimpleNamespace(forward_native=lambda x: native(None, x))
    return lambda: layer


# --------------------------------------------------------------------------------------- layers


def _list_layer_suites(root: Path) -> list[Suite]:
    blocks = Source(root, "python/sglang/test/test_block_fp8.py", {"SiluAndMul": _make_silu(root)})
    blocks.define("native_per_token_group_quant_fp8", "native_w8a8_block_fp8_matmul",
                "torch_w8a8_block_fp8_moe")  # fmt: skip
    stubs = {"set_global_server_args_for_scheduler": lambda _: None,
               "ServerArgs": lambda **_: None, "SiluAndMul": _make_silu(root)}  # fmt: skip
    integers = Source(root, "test/registered/quant/test_block_int8.py", stubs)
    integers.define("native_per_token_group_quant_int8", "native_w8a8_block_int8_matmul",
                  "torch_w8a8_block_int8_moe")  # fmt: skip
    rows_of = Source(root, "sgl-kernel/tests/test_per_token_quant_fp8.py",
                     {"is_hip": lambda: False})  # fmt: skip
    codes: Any = rows_of.function("torch_per_token_quant_fp8")

    def quantize_by_row(x: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / 448
        return codes(x, scale), scale

    channels = Source(root, "test/registered/moe/test_triton_moe_channel_fp8_kernel.py",
                      stubs | {"scaled_fp8_quant": quantize_by_row})  # fmt: skip
    channels.define("native_w8a8_per_token_matmul", "torch_w8a8_per_column_moe")
    channels.namespace["fp8_mask"] = lambda a, mask: (
        a.view(torch.int8)[mask].view(a.dtype) if a.dtype is _FP8 else a[mask]
    )

    def quantize_int8_by_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize with rounding to nearest, as their GPU kernel per_token_quant_int8 does."""
        scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / 127
        return (x.float() / scale).round().to(torch.int8), scale

    kernel = Source(root, "test/registered/quant/test_int8_kernel.py",
                    stubs | {"per_token_quant_int8": quantize_int8_by_row})  # fmt: skip
    kernel.define("native_w8a8_per_token_matmul", "torch_w8a8_per_column_moe")
    cpu = Source(root, "test/srt/cpu/utils.py")
    cpu.define("SiluAndMul")
    fp8_block = LayerCheck(
        _make_reference(blocks, "torch_w8a8_block_fp8_moe", _list_block_arguments),
        Tolerance(mean=0.02),
    )
    int8_block = LayerCheck(
        _make_reference(integers, "torch_w8a8_block_int8_moe", _list_routing_arguments),
        Tolerance(mean=0.02),
    )
    fp8_channel = LayerCheck(
        _make_reference(channels, "torch_w8a8_per_column_moe", _list_score_arguments),
        Tolerance(mean=0.05),
    )
    int8_channel = LayerCheck(
        _make_reference(kernel, "torch_w8a8_per_column_moe", _list_score_arguments),
        Tolerance(mean=0.05),
    )
    return [
        _make_suite(
            blocks,
            "TestW8A8BlockFP8FusedMoE",
            partial(_check_block, fp8_block, "fp8_w8a8_block"),
            *_GRID_NAMES,
        ),
        _make_suite(
            integers,
            "TestW8A8BlockINT8FusedMoE",
            partial(_check_block, int8_block, "int8_w8a8_block"),
            *_GRID_NAMES,
        ),
        _make_suite(
            channels,
            "TestW8A8FP8FusedMoE",
            partial(_check_channel, fp8_channel, "fp8_w8a8_channel"),
            *_GRID_NAMES,
        ),
        _make_suite(
            kernel,
            "TestW8A8Int8FusedMoE",
            partial(_check_channel, int8_channel, "int8_w8a8_channel"),
            *_GRID_NAMES,
        ),
        *_list_cpu_suites(root, cpu),
        _make_naive_suite(root, stubs),
    ]


_GRID_NAMES = ("M", "N", "K", "E", "TOP_KS", "BLOCK_SIZE", "DTYPES")
_Arguments = Callable[[Layer, LayerInputs], tuple[object, ...]]


def _make_reference(
    source: Source, name: str, arguments: _Arguments
) -> Callable[[Layer, LayerInputs], torch.Tensor]:
    def reference(layer: Layer, inputs: LayerInputs) -> torch.Tensor:
        w = inputs.weights
        function: Any = source.function(name)
        output: torch.Tensor = function(inputs.x, w.w1, w.w2, w.w1_scale, w.w2_scale,
                                       *arguments(layer, inputs))  # fmt: skip
        return output

    return reference


def _get_block_shape(layer: Layer) -> list[int]:
    return [int(side) for side in layer.quant.partition("=")[2].split("x")]


def _list_block_arguments(layer: Layer, inputs: LayerInputs) -> tuple[object, ...]:
    return inputs.score, layer.top_k, _get_block_shape(layer)


def _list_routing_arguments(layer: Layer, inputs: LayerInputs) -> tuple[object, ...]:
    routing = inputs.routing
    topk_output = SimpleNamespace(
        topk_weights=routing.topk_weights_TK, topk_ids=routing.topk_ids_TK
    )
    return topk_output, layer.top_k, _get_block_shape(layer)


def _list_score_arguments(layer: Layer, inputs: LayerInputs) -> tuple[object, ...]:
    return inputs.score, layer.top_k


def _check_block(check: LayerCheck, quant: str, p: Any) -> CaseOutcome:
    rows, columns = p["BLOCK_SIZE"]
    return check(
        Layer(p["M"], p["K"], p["N"], p["E"], p["TOP_KS"], p["DTYPES"],
              f"{quant}:block={rows}x{columns}", stored="codes", multiple=max(rows, columns))
    )  # fmt: skip


def _check_channel(check: LayerCheck, quant: str, p: Any) -> CaseOutcome:
    return check(
        Layer(p["M"], p["K"], p["N"], p["E"], p["TOP_KS"], p["DTYPES"], quant, stored="codes")
    )


def _list_cpu_suites(root: Path, utils: Source) -> list[Suite]:
    utils.define("torch_naive_fused_moe")
    naive: Any = utils.namespace["torch_naive_fused_moe"]
    source = Source(root, "test/srt/cpu/test_moe.py")
    tolerance = Tolerance(1e-2, 1e-2)
    check = LayerCheck(
        lambda layer, inputs: naive(inputs.x, inputs.weights.w1, inputs.weights.w2, inputs.score,
                                   layer.top_k, layer.renormalize),
        tolerance,
    )  # fmt: skip

    def case(p: Any) -> CaseOutcome:
        return check(Layer(p["M"], p["K"], p["N"], p["E"], p["topk"], renormalize=p["renormalize"]))

    names = ("M", "N", "K", "E", "topk", "renormalize")
    return [_make_suite(source, "TestFusedExperts", case, *names)]


def _make_naive_suite(root: Path, stubs: dict[str, Any]) -> Suite:
    """Return the suite of TestFusedMOE, whose axes are lists of the class and of a method."""
    silu = stubs["SiluAndMul"]().forward_native
    source = Source(root, "test/registered/moe/test_fused_moe.py",
                    stubs | {"SiluAndMul": lambda: silu})  # fmt: skip
    naive: Any = source.method("TestFusedMOE", "torch_naive_moe")
    tolerances: Any = source.method("TestFusedMOE", "get_tolerance")

    def call_naive(layer: Layer, inputs: LayerInputs) -> torch.Tensor:
        output: torch.Tensor = naive(None, inputs.x, inputs.weights.w1, inputs.weights.w2,
                                    inputs.score, layer.top_k)  # fmt: skip
        return output

    checks = {}
    for dtype in (torch.float16, torch.bfloat16):
        rtol, atol = tolerances(None, dtype)
        checks[dtype] = LayerCheck(call_naive, Tolerance(atol, rtol))

    def case(p: Any) -> CaseOutcome:
        if p["fp8_modes"]:
            raise MissingError("fp8 weights with activations that are scaled but not quantized")
        # Values are about 0.01, as in their test, whose tolerance is wider. The bound on the norm
        # of the error is therefore decisive.
        layer = Layer(p["m_values"], p["k_values"], p["n_values"], p["NUM_EXPERTS"], p["TOP_KS"],
                      p["dtypes"], scale=(0.1, 0.1, 0.1))  # fmt: skip
        return checks[p["dtypes"]](layer)

    names = ("m_values", "n_values", "k_values", "dtypes", "fp8_modes", "NUM_EXPERTS", "TOP_KS")
    return _make_suite(source, "TestFusedMOE", case, *names)


# -------------------------------------------------------------------------------------- routers


def _list_router_suites(root: Path) -> list[Suite]:
    topk = Source(root, "python/sglang/srt/layers/moe/topk.py", {
        "topk_ids_logical_to_physical": lambda ids, _: ids,
        "_mask_topk_ids_padded_region": lambda *_: None,
    })  # fmt: skip
    topk.define("fused_topk_torch_native", "biased_grouped_topk_impl", "kimi_k2_biased_topk_impl")
    softmax = Source(root, "sgl-kernel/tests/test_moe_topk_softmax.py")
    sigmoid = Source(root, "sgl-kernel/tests/test_moe_topk_sigmoid.py")
    gate = Source(root, "sgl-kernel/tests/test_moe_fused_gate.py")
    kimi = Source(root, "sgl-kernel/tests/test_kimi_k2_moe_fused_gate.py")
    native = topk.namespace["fused_topk_torch_native"]
    softmax_check = partial(_check_topk, native, "softmax")
    sigmoid_check = partial(_check_topk, native, "sigmoid")
    return [
        _make_suite(softmax, "test_topkfast_softmax", softmax_check),
        _make_suite(softmax, "test_topk_softmax", softmax_check),
        _make_suite(softmax, "test_topk_softmax_dtype_regression", softmax_check),
        _make_suite(
            softmax, "test_topk_softmax_renormalize", partial(softmax_check, renormalize=True)
        ),
        _make_suite(sigmoid, "test_topk_sigmoid", sigmoid_check),
        _make_suite(sigmoid, "test_topk_sigmoid_dtype_regression", sigmoid_check),
        _make_suite(
            sigmoid, "test_topk_sigmoid_renormalize", partial(sigmoid_check, renormalize=True)
        ),
        _make_suite(
            sigmoid,
            "test_topk_sigmoid_renormalize_correction_bias",
            partial(sigmoid_check, renormalize=True, bias=True),
        ),
        _make_suite(
            gate,
            "test_moe_fused_gate_combined",
            partial(_check_gate, topk.namespace["biased_grouped_topk_impl"]),
        ),
        _make_suite(
            kimi,
            "test_kimi_k2_moe_fused_gate",
            partial(_check_kimi, topk.namespace["kimi_k2_biased_topk_impl"]),
        ),
    ]


def _check_topk(
    native: Any, score: str, p: Any, *, renormalize: bool = False, bias: bool = False
) -> CaseOutcome:
    spec = make_spec(p["topk"], score=score, renormalize=renormalize, selection_bias=bias)
    case = Router(spec, p["num_experts"], p["num_tokens"], p.get("dtype", torch.float32),
                  atol=1e-3, rtol=1e-3)  # fmt: skip
    return check_router(case, lambda x, b: native(x, x, p["topk"], renormalize, b, score))


def _check_gate(reference: Any, p: Any) -> CaseOutcome:
    if p["num_fused_shared_experts"]:
        raise MissingError("router: shared experts appended to the routed ones")
    experts, groups, topk_groups, top_k = p["params"]
    factor = 2.5 if p["apply_routed_scaling_factor_on_output"] else 1.0
    spec = make_spec(top_k, score="sigmoid", groups=groups, topk_groups=topk_groups,
                   selection_bias=True, renormalize=True)  # fmt: skip
    case = Router(spec, experts, p["seq_length"], scaling=factor, atol=1e-3)
    return check_router(
        case,
        lambda x, b: reference(
            x, x, b, top_k, True, groups, topk_groups, routed_scaling_factor=2.5,
            apply_routed_scaling_factor_on_output=p["apply_routed_scaling_factor_on_output"],
        ),
    )  # fmt: skip


def _check_kimi(reference: Any, p: Any) -> CaseOutcome:
    on_output = p["apply_routed_scaling_factor_on_output"]
    spec = make_spec(p["topk"], score="sigmoid", selection_bias=True, renormalize=True)
    case = Router(spec, 384, p["seq_length"], p["dtype"], scaling=2.872 if on_output else 1.0,
                  atol=1e-3)  # fmt: skip
    return check_router(
        case,
        lambda x, b: reference(x, x, b, p["topk"], True, routed_scaling_factor=2.872,
                               apply_routed_scaling_factor_on_output=on_output),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------- rows


def _list_row_suites(root: Path) -> list[Suite]:
    blocks = Source(root, "python/sglang/test/test_block_fp8.py")
    blocks.define("native_per_token_group_quant_fp8")
    rows = Source(root, "sgl-kernel/tests/test_per_token_quant_fp8.py", {"is_hip": lambda: False})
    acts = Source(root, "python/sglang/srt/layers/activation.py")
    gated = Source(root, "sgl-kernel/tests/test_activation.py")
    module = Source(root, "python/sglang/test/test_activation.py")
    silu: Any = acts.method("SiluAndMul", "forward_native")
    gelu: Any = acts.method("GeluAndMul", "forward_native")
    erf, tanh = (SimpleNamespace(approximate=kind) for kind in ("none", "tanh"))
    return [
        _make_suite(
            blocks,
            "TestPerTokenGroupQuantFP8",
            partial(_check_by_group, blocks.namespace["native_per_token_group_quant_fp8"]),
            "NUM_TOKENS",
            "D",
            "DTYPES",
            "GROUP_SIZE",
        ),
        _make_suite(
            rows,
            "test_per_token_quant_compare_implementations",
            partial(_check_by_row, rows.function("torch_per_token_quant_fp8")),
        ),
        _make_suite(
            gated,
            "test_fused_silu_mul",
            partial(_check_activation, lambda x: silu(None, x), "silu"),
        ),
        _make_suite(
            gated,
            "test_fused_gelu_tanh_mul",
            partial(_check_activation, lambda x: gelu(tanh, x), "gelu_tanh"),
        ),
        _make_suite(
            gated, "test_fused_gelu_mul", partial(_check_activation, lambda x: gelu(erf, x), "gelu")
        ),
        _make_suite(
            module,
            "TestGeluAndMul",
            partial(_check_activation, lambda x: gelu(tanh, x), "gelu_tanh"),
            "NUM_TOKENS",
            "D",
            "DTYPES",
        ),
        _make_suite(
            module, "TestQuickGELU", _raise_quick_gelu_missing, "NUM_TOKENS", "DIMS", "DTYPES"
        ),
    ]


def _check_by_group(reference: Any, p: Any) -> CaseOutcome:
    group = p["GROUP_SIZE"]
    rows, columns, shrunk = shrink_rows(p["NUM_TOKENS"], p["D"], group)
    x = draw_normal_rows(rows, columns, p["DTYPES"])
    quant = f"fp8_w8a8_block:block={group}x{group}"
    return check_quantizer(x, quant, lambda part: reference(part, group), shrunk)


def _check_by_row(reference: Any, p: Any) -> CaseOutcome:
    """Compare row quantization. The scale for their reference is computed as in their kernel."""
    rows, columns, shrunk = shrink_rows(p["num_tokens"], p["hidden_dim"])
    x = draw_normal_rows(rows, columns, torch.float16)

    def quantize(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = part.float().abs().amax(1, keepdim=True) / 448
        return reference(part, scale), scale

    return check_quantizer(x, "fp8_w8a8_channel", quantize, shrunk)


def _check_activation(reference: Any, kind: str, p: Any) -> CaseOutcome:
    tokens = p["NUM_TOKENS"] if "NUM_TOKENS" in p else p["batch_size"] * p["seq_len"]
    dtype = p.get("DTYPES", torch.float16)
    rows, intermediate, shrunk = shrink_rows(tokens, p["D"] if "D" in p else p["dim"])
    tolerance = Tolerance(1e-2, 1e-2) if dtype is torch.bfloat16 else Tolerance(1e-3, 1e-3)
    x = draw_normal_rows(rows, 2 * intermediate, dtype)
    return check_activation(x, ActivationSpec(kind), reference, tolerance, shrunk)


def _raise_quick_gelu_missing(p: Any) -> CaseOutcome:
    raise MissingError("ungated activation quick_gelu")
