"""Steps of fused_moe that vLLM and SGLang export: tile config, grouped GEMM, and sum over top-k."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import CPU, DEVICE

from experts.compat.fused_moe import (
    invoke_fused_moe_kernel,
    moe_sum_reduce_triton,
    try_get_optimal_moe_config,
)
from experts.triton.configs.select import override_config
from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    InputError,
    RoutingError,
    ShapeError,
)
from modular_kernel.ops.align import moe_align_block_size
from modular_kernel.ops.quantize import dequantize_rows, quantize_values
from modular_kernel.quant.quantized_weights import dequantize, quantize_weights
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights

T, TOP_K, E, N, K = 7, 2, 4, 48, 64
CONFIG = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 2}
SCHEMES = (
    "none",
    "fp8_w8a8_tensor",
    "fp8_w8a8_tensor:static=true",
    "fp8_w8a8_channel",
    "fp8_w8a8_block:block=32x32",
    "int8_w8a8_channel",
    "int8_w8a16_group:group=32,zero_points=true",
    "int4_w4a16_group:group=32",
)


def make_operands(
    quant: str = "none",
    *,
    rows: int = T,
    top_k: int = TOP_K,
    has_bias: bool = True,
    device: torch.device = DEVICE,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return arguments of the grouped GEMM, with skipped pairs, and its float64 result.

    has_bias: whether the result includes the bias.
    """
    g = torch.Generator().manual_seed(4)
    problem = Problem(T, N, K, E, 1, dtype=torch.float32, quant=quant)
    w2 = torch.randn(E, N, K, generator=g).to(device)
    unquantized = ExpertWeights(torch.zeros(E, 2 * K, N, device=device), w2)
    if problem.scheme.static:
        unquantized = replace(
            unquantized,
            a1_scale=torch.tensor([0.1], device=device),
            a2_scale=torch.tensor([0.01], device=device),
        )
    weights = quantize_weights(unquantized, problem) if quant != "none" else unquantized
    a = torch.randn(rows, K, generator=g).to(device)
    ids = torch.randint(E, (T, TOP_K), generator=g).to(device)
    ids = torch.where(ids == 2, -1, ids).to(torch.int32)
    scheme, b, exact_a = problem.scheme, weights.w2, a
    if scheme.quantized:
        assert weights.w2_scale is not None
        b = dequantize(b, weights.w2_scale, weights.w2_zero_point, scheme)
    if scheme.quantizes_activations:
        exact_a = dequantize_rows(*quantize_values(a, scheme, weights.a2_scale), scheme)
    bias = torch.randn(E, N, generator=g).to(device)
    topk_weights = torch.rand(T, TOP_K, generator=g).to(device)
    aligned = moe_align_block_size(ids, CONFIG["BLOCK_SIZE_M"], E)
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    arguments: dict[str, Any] = {
        "A": a, "B": weights.w2, "bias": bias,
        "C": torch.full((T, TOP_K, N), torch.nan, device=device),
        "A_scale": weights.a2_scale, "B_scale": weights.w2_scale, "B_zp": weights.w2_zero_point,
        "topk_weights": topk_weights, "topk_ids": ids, **dict(zip(names, aligned, strict=True)),
        "mul_routed_weight": True, "top_k": top_k, "config": CONFIG, "quant": quant,
    }  # fmt: skip
    experts = ids.flatten().long()
    rows_of_pairs = exact_a.double().repeat_interleave(top_k, 0)
    product = torch.einsum("pk,pnk->pn", rows_of_pairs, b.double()[experts])
    if has_bias:
        product = product + bias.double()[experts]
    product = product * topk_weights.double().view(-1, 1)
    product[experts < 0] = 0
    return arguments, product.view(T, TOP_K, N)


@pytest.mark.parametrize("quant", SCHEMES)
def test_a_gemm_of_tokens_equals_float64(quant: str) -> None:
    arguments, expected = make_operands(quant)
    invoke_fused_moe_kernel(**arguments)
    assert torch.allclose(arguments["C"].double(), expected, rtol=1e-4, atol=1e-4)
    skipped = arguments["C"][arguments["topk_ids"] < 0]
    assert torch.equal(skipped, torch.zeros_like(skipped))
    arguments |= {"bias": None, "C": torch.full_like(arguments["C"], torch.nan)}
    invoke_fused_moe_kernel(**arguments)
    _, expected = make_operands(quant, has_bias=False)
    assert torch.allclose(arguments["C"].double(), expected, rtol=1e-4, atol=1e-4)


def test_a_gemm_of_pairs_without_weights_equals_float64() -> None:
    arguments, expected = make_operands(rows=T * TOP_K, top_k=1)
    arguments |= {
        "mul_routed_weight": False,
        "topk_weights": None,
        "C": arguments["C"].flatten(0, 1),
    }
    arguments.pop("quant")
    invoke_fused_moe_kernel(*arguments.values())  # callers of vLLM pass positional arguments
    weights_TK = make_operands(rows=T * TOP_K, top_k=1)[0]["topk_weights"]
    actual = arguments["C"].view(T, TOP_K, N).double() * weights_TK[..., None]
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_empty_input_is_accepted() -> None:
    arguments, _ = make_operands()
    empty = torch.empty(0, TOP_K, dtype=torch.int32, device=DEVICE)
    aligned = moe_align_block_size(empty, 16, E)
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    arguments |= dict(zip(names, aligned, strict=True)) | {
        "topk_ids": empty,
        "A": arguments["A"][:0],
    }
    arguments |= {"C": arguments["C"][:0], "topk_weights": arguments["topk_weights"][:0]}
    invoke_fused_moe_kernel(**arguments)


INVALID_CHANGES: tuple[tuple[dict[str, Any], type[InputError], str], ...] = (
    ({"top_k": 3}, ShapeError, "A: got .* need P / top_k = 14 / 3 rows"),
    ({"C": torch.zeros(T, TOP_K, N + 1)}, ShapeError, "C: got"),
    ({"C": torch.zeros(T, TOP_K, N, dtype=torch.bfloat16)}, DtypeError, "C: got torch.bfloat16"),
    ({"B_scale": torch.ones(E)}, ConfigurationError, "B_scale: got a tensor, need None"),
    ({"quant": "fp8_w8a8_channel"}, DtypeError, "B: got torch.float32, need torch.float8"),
    ({"bias": torch.zeros(E, N + 1)}, ShapeError, "bias: got"),
    ({"topk_weights": torch.ones(T)}, ShapeError, "topk_weights: got"),
    ({"topk_weights": None}, InputError, "topk_weights"),
    (
        {"config": CONFIG | {"BLOCK": 1}},
        ConfigurationError,
        "config: got BLOCK, need only BLOCK_SI",
    ),
    ({"config": CONFIG | {"BLOCK_SIZE_M": 32}}, ShapeError, "need 3 blocks of 32 ids"),
    ({"config": CONFIG | {"BLOCK_SIZE_N": 3}}, ConfigurationError, "BLOCK_SIZE_N|block_n"),
    ({"sorted_token_ids": torch.full((89,), -1, dtype=torch.int32)}, RoutingError, "alignment"),
    ({"expert_ids": torch.full((6,), E, dtype=torch.int32)}, RoutingError, "alignment"),
)


@pytest.mark.parametrize(
    ("changes", "error", "message"), INVALID_CHANGES, ids=lambda value: str(value)[:40]
)
def test_invalid_arguments_are_refused(
    changes: dict[str, Any], error: type[InputError], message: str
) -> None:
    arguments, _ = make_operands(device=CPU)
    with pytest.raises(error, match=message):
        invoke_fused_moe_kernel(**arguments | changes)


def test_moe_sum_reduce_sums_over_top_k() -> None:
    rows, out = torch.randn(5, 3, 40, device=DEVICE), torch.full((5, 40), torch.nan, device=DEVICE)
    moe_sum_reduce_triton(rows, out, 2.5)
    assert torch.allclose(out.double(), rows.double().sum(1) * 2.5, atol=1e-5)
    with pytest.raises(ShapeError):
        moe_sum_reduce_triton(rows, out[:4], 2.5)


def test_the_optimal_config_can_be_launched() -> None:
    shapes = (E, 2 * K, N), (E, N, K)
    config = try_get_optimal_moe_config(*shapes, TOP_K, torch.bfloat16, 7)
    assert set(config) == {*CONFIG, "num_warps", "num_stages"}
    arguments, expected = make_operands()
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    aligned = moe_align_block_size(arguments["topk_ids"], config["BLOCK_SIZE_M"], E)
    invoke_fused_moe_kernel(
        **arguments | dict(zip(names, aligned, strict=True)) | {"config": config}
    )
    assert torch.allclose(arguments["C"].double(), expected, rtol=1e-4, atol=1e-4)
    with override_config(CONFIG):
        overridden = try_get_optimal_moe_config(*shapes, TOP_K, torch.bfloat16, 7)
    assert {key: overridden[key] for key in CONFIG} == CONFIG
    with pytest.raises(ConfigurationError, match="w1_shape and w2_shape"):
        try_get_optimal_moe_config((E, 2 * K, N), (E, K, N), TOP_K, torch.bfloat16, 7)


@pytest.mark.parametrize("shape", [3, None, {E: 1}, "shape", (E, 2 * K, 1.5), iter((E,))])
def test_shapes_and_flags_of_another_type_are_refused(shape: Any) -> None:
    with pytest.raises(ConfigurationError, match="w1_shape"):
        try_get_optimal_moe_config(shape, (E, N, K), TOP_K, torch.bfloat16, 7)
    arguments, _ = make_operands()
    for flag in (torch.zeros(2), None, 1):
        with pytest.raises(ConfigurationError, match="mul_routed_weight"):
            invoke_fused_moe_kernel(**arguments | {"mul_routed_weight": flag})
