"""Each keyword of fused_experts and fused_moe has an effect or is refused, and both functions
accept tensors in the formats of other libraries.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fused_experts_calls import BASE, E, H, I, K, T, assert_close, call_fused_experts, make_layer

from experts.triton.configs.select import override_config
from modular_kernel.errors import ConfigurationError, LayoutError, ShapeError
from modular_kernel.integrations import fused_moe_kernels
from modular_kernel.integrations.fused_moe import (
    MoeRunnerConfig,
    StandardTopKOutput,
    fused_experts,
    fused_moe,
    outplace_fused_experts,
)
from modular_kernel.reference import float64_reference
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.tensors import ExpertWeights, Routing


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"activation": "gelu"}, {"activation": "gelu"}),
        ({"routed_scaling_factor": 2.5}, {"routed_scaling_factor": 2.5}),
        ({"no_combine": True}, {"combine": Combine.TOPK_UNWEIGHTED}),
        ({"apply_router_weight_on_input": True}, {"apply_router_weight_on_input": True}),
        ({"gemm1_clamp_limit": 0.5}, {"activation": "swiglu_clamp_after:limit=0.5"}),
        ({"chunk_tokens": 2}, {"chunk_tokens": 2}),
        ({"num_experts": E, "top_k": K}, {}),
    ],
    ids=str,
)
def test_fields_of_the_config_may_be_keywords(
    options: dict[str, Any], fields: dict[str, Any]
) -> None:
    problem = replace(BASE, **fields)
    x_TH, weights, routing = make_layer(problem)
    expected = float64_reference(x_TH, weights, routing, problem)
    assert_close(call_fused_experts(x_TH, weights, routing, **options), expected, 1e-5)
    # A keyword takes precedence over the config.
    activation = "relu2" if "activation" in options else "silu"
    config = MoeRunnerConfig(activation=activation, top_k=K, inplace=False)
    assert_close(call_fused_experts(x_TH, weights, routing, config, **options), expected, 1e-5)


def test_inplace_is_a_keyword_and_biases_have_two_names() -> None:
    problem = replace(BASE, bias=True)
    x_TH, weights, routing = make_layer(problem)
    expected = float64_reference(x_TH, weights, routing, problem)
    without_biases = replace(weights, b1=None, b2=None)
    got = call_fused_experts(
        x_TH, without_biases, routing, w1_bias=weights.b1, w2_bias=weights.b2, inplace=True
    )
    assert got is x_TH
    assert_close(got, expected, 1e-5)
    with pytest.raises(ConfigurationError, match="w1_bias: got both w1_bias and b1, need either"):
        call_fused_experts(x_TH, weights, routing, w1_bias=weights.b1)


def test_calls_are_split_into_chunks() -> None:
    """The operator and the kernel pass at most the requested number of tokens to the experts."""
    x_TH, weights, routing = make_layer(BASE)
    arguments = (x_TH, weights.w1, weights.w2, routing.topk_weights_TK, routing.topk_ids_TK)
    in_one_call = outplace_fused_experts(*arguments, [None] * 9, "none", "silu", False, 1.0, "sum")
    in_chunks = outplace_fused_experts(*arguments, [None] * 9, "none", "silu", False, 1.0, "sum", 2)
    assert_close(in_chunks, in_one_call.double(), 1e-6)
    sizes = (16, H, I, E, K, None)
    fields = ("none", "silu", False, 1.0, Combine.SUM, False, 2)
    assert (
        fused_moe_kernels._make_kernel(
            sizes, torch.float32, False, fields, x_TH.device, fused_moe_kernels.DEFAULT_PARTS
        ).problem.chunk_tokens
        == 2
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"use_fp8": True},
            r"keyword: got 'use_fp8', need use_fp8_w8a8, or another of .*activation",
        ),
        ({"inplce": True}, r"keyword: got 'inplce', need inplace, or"),
        ({"zzz": 1}, "keyword: got 'zzz', need one of .*w2_zp"),
        ({"inplace": "false"}, "inplace: got 'false', need True or False"),
        ({"use_fp8_w8a8": 1}, "use_fp8_w8a8: got 1, need True or False"),
        ({"block_shape": "128"}, "block_shape: got '128', need a list"),
        ({"block_shape": [1.5, 2]}, "block_shape: got list, need a list, each an int"),
        ({"w1_scale": 0.1}, "w1_scale: got 0.1, need a Tensor or None"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor: got nan, need a finite"),
        ({"chunk_tokens": 0}, "chunk_tokens: got 0, need an int >= 1"),
        ({"activation": 5}, "activation: got 5"),
        ({"cfg": None}, "keyword: got 'cfg'"),
    ],
    ids=str,
)
def test_unknown_keywords_and_wrong_values_are_refused(
    options: dict[str, Any], message: str
) -> None:
    x_TH, weights, routing = make_layer(BASE)
    with pytest.raises(ConfigurationError, match=message):
        call_fused_experts(x_TH, weights, routing, **options)
    with pytest.raises(ConfigurationError, match=message):
        fused_moe(x_TH, weights.w1, weights.w2, torch.randn(T, E), top_k=K, **options)


def test_wrong_values_in_the_config_are_refused() -> None:
    x_TH, weights, routing = make_layer(BASE)
    with pytest.raises(ConfigurationError, match="moe_runner_config: got dict, need a MoeRunner"):
        call_fused_experts(x_TH, weights, routing, {"inplace": True})  # type: ignore[arg-type]
    for name in ("inplace", "no_combine", "apply_router_weight_on_input"):
        with pytest.raises(ConfigurationError, match=f"{name}: got 'false', need True or False"):
            MoeRunnerConfig(**{name: "false"})


def test_inplace_defaults_to_true_only_with_a_config() -> None:
    """As in SGLang, x is overwritten if a config is passed that does not set `inplace`."""
    x_TH, weights, routing = make_layer(BASE)
    before = x_TH.clone()
    expected = call_fused_experts(x_TH, weights, routing)
    assert torch.equal(x_TH, before)
    got = call_fused_experts(x_TH, weights, routing, MoeRunnerConfig())
    assert got is x_TH
    assert torch.equal(x_TH, expected)
    with pytest.raises(ConfigurationError, match="inplace: got True with no_combine=True, need"):
        call_fused_experts(x_TH, weights, routing, MoeRunnerConfig(no_combine=True))


def test_correct_sizes_in_the_config_have_no_effect() -> None:
    x_TH, weights, routing = make_layer(BASE)
    expected = call_fused_experts(x_TH, weights, routing)
    sizes = {"num_experts": E, "num_local_experts": E, "hidden_size": H, "layer_id": 3,
             "intermediate_size_per_partition": I, "num_fused_shared_experts": 1}  # fmt: skip
    assert torch.equal(call_fused_experts(x_TH, weights, routing, **sizes), expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_local_experts": 3}, ShapeError, "w1: got 4 local experts, need num_local_experts ="),
        ({"hidden_size": 63}, ShapeError, "x: got 64 hidden values, need hidden_size = 63"),
        ({"intermediate_size_per_partition": 31}, ShapeError,
         "w2: got 32 intermediate values, need intermediate_size_per_partition = 31"),
        ({"num_fused_shared_experts": 5}, ConfigurationError, "got 5, need <= 4, the number"),
        ({"num_fused_shared_experts": -1}, ConfigurationError, "num_fused_shared_experts: got -1"),
        ({"layer_id": "3"}, ConfigurationError, "layer_id: got '3', need an int or None"),
        ({"expert_map": torch.tensor(1)}, ShapeError, r"expert_map: got \(\), need \(E,\)"),
        ({"hidden_size": 0}, ConfigurationError, "hidden_size: got 0, need an int >= 1"),
    ],
)  # fmt: skip
def test_sizes_of_the_config_are_checked(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    x_TH, weights, routing = make_layer(BASE)
    with pytest.raises(error, match=message):
        call_fused_experts(x_TH, weights, routing, **options)


def test_logits_with_shared_experts_are_refused() -> None:
    x_TH, weights, _ = make_layer(BASE)
    with pytest.raises(ConfigurationError, match="num_fused_shared_experts: got 1, need 0, or"):
        fused_moe(
            x_TH, weights.w1, weights.w2, torch.ones(T, E), top_k=K, num_fused_shared_experts=1
        )


def test_default_chunks_have_65536_tokens() -> None:
    assert MoeRunnerConfig().chunk_tokens == 64 * 1024
    routing = Routing(torch.empty(1, K), torch.empty(1, K, dtype=torch.int64))
    weights = ExpertWeights(torch.empty(E, 2 * I, H), torch.empty(E, H, I))
    fields = ("none", "silu", False, 1.0, Combine.SUM, False, 64 * 1024)
    for tokens, chunk in ((1, None), (65536, None), (65537, 65536), (131073, 65536)):
        x_TH = torch.empty(tokens, H)
        assert (
            fused_moe_kernels.get_kernel(x_TH, weights, routing, fields).problem.chunk_tokens
            == chunk
        )


@pytest.mark.parametrize("chunk", [3, 4])
def test_chunked_calls_equal_unchunked_calls(chunk: int) -> None:
    config = MoeRunnerConfig(chunk_tokens=chunk, inplace=False)
    for tokens in (0, chunk - 1, chunk, chunk + 1, 2 * chunk):
        x_TH, weights, routing = make_layer(BASE.with_tokens(tokens))
        got = call_fused_experts(x_TH, weights, routing, config)
        assert torch.allclose(got, call_fused_experts(x_TH, weights, routing), atol=1e-6)


# ------------------------------------------------------------- tensor formats of other libraries


def test_batches_of_sequences_are_accepted() -> None:
    x_TH, weights, routing = make_layer(BASE.with_tokens(6))
    expected = call_fused_experts(x_TH, weights, routing)
    x_BSH = x_TH.view(2, 3, H).clone()
    batched_topk = [t.view(2, 3, K) for t in (routing.topk_weights_TK, routing.topk_ids_TK)]
    for topk_output in (
        (*batched_topk, None),
        (routing.topk_weights_TK, routing.topk_ids_TK, None),
    ):
        got = fused_moe(x_BSH, weights.w1, weights.w2, topk_output)
        assert torch.equal(got, expected.view(2, 3, H))
        uncombined = fused_moe(x_BSH, weights.w1, weights.w2, topk_output, no_combine=True)
        assert uncombined.shape == (2, 3, K, H)
    logits = torch.randn(2, 3, E)
    from_flat_logits = fused_moe(x_TH, weights.w1, weights.w2, logits.view(6, E), top_k=K)
    assert torch.equal(
        fused_moe(x_BSH, weights.w1, weights.w2, logits, top_k=K).view(6, H), from_flat_logits
    )
    got = fused_moe(x_BSH, weights.w1, weights.w2, batched_topk, MoeRunnerConfig())
    assert got is x_BSH
    assert torch.equal(got, expected.view(2, 3, H))
    wrong_batch_shape = [t.view(3, 2, K) for t in batched_topk]
    with pytest.raises(ShapeError, match=r"topk_ids: got \(3, 2, \d\), need \(2, 3, K\)"):
        fused_moe(x_BSH, weights.w1, weights.w2, wrong_batch_shape)
    with pytest.raises(ShapeError, match="gating_output"):
        fused_moe(x_BSH, weights.w1, weights.w2, logits.view(3, 2, E), top_k=K)
    with pytest.raises(LayoutError, match="x of an in-place call: got strides"):
        fused_moe(x_BSH.mT, weights.w1, weights.w2, batched_topk, MoeRunnerConfig())


def test_router_outputs_have_named_fields() -> None:
    x_TH, weights, routing = make_layer(BASE)
    topk_output = StandardTopKOutput(routing.topk_weights_TK, routing.topk_ids_TK)
    topk_weights, topk_ids, router_logits = topk_output
    assert (topk_output.topk_weights, topk_output.topk_ids) == (topk_weights, topk_ids)
    assert router_logits is None
    assert StandardTopKOutput(*(topk_weights, topk_ids, None)) == topk_output
    assert torch.equal(
        fused_moe(x_TH, weights.w1, weights.w2, topk_output),
        call_fused_experts(x_TH, weights, routing),
    )


def test_torch_compile_includes_the_router() -> None:
    x_TH, weights, _ = make_layer(BASE)
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(1))

    def call(x_TH: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return fused_moe(x_TH, weights.w1, weights.w2, logits, top_k=K, renormalize=True) * 2

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x_TH, logits), call(x_TH, logits), atol=1e-5)


# The sizes of the examples in SGLang's documentation of fused_experts, divided by 64. The examples
# are corrected: w1 is (E, 2I, H), and there is one scale per block. They use randn and randint, so
# router weights can be negative and experts can repeat.
EXAMPLE_T, EXAMPLE_H, EXAMPLE_I, EXAMPLE_E = 32, 128, 256, 8


def make_example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(11)
    x_TH = torch.randn(EXAMPLE_T, EXAMPLE_H, dtype=torch.bfloat16, generator=generator)
    w1 = torch.randn(EXAMPLE_E, 2 * EXAMPLE_I, EXAMPLE_H, dtype=torch.bfloat16, generator=generator)
    w2 = torch.randn(EXAMPLE_E, EXAMPLE_H, EXAMPLE_I, dtype=torch.bfloat16, generator=generator)
    topk_weights = torch.randn(EXAMPLE_T, 2, generator=generator)
    topk_ids = torch.randint(0, EXAMPLE_E, (EXAMPLE_T, 2), generator=generator)
    return x_TH, w1, w2, (topk_weights, topk_ids, None)


@pytest.mark.parametrize("quantization", ["bf16", "fp8 expanded", "fp8 blocks"])
def test_examples_of_other_libraries(quantization: str) -> None:
    x_TH, w1, w2, topk_output = make_example()
    config = MoeRunnerConfig(num_experts=EXAMPLE_E, top_k=2, activation="silu", inplace=False)
    options, scales, quant = {}, {}, "none"
    if quantization != "bf16":
        w1, w2 = w1.to(torch.float8_e4m3fn), w2.to(torch.float8_e4m3fn)
        scales = {
            "w1_scale": torch.tensor([0.01]).expand(EXAMPLE_E),
            "w2_scale": torch.tensor([0.02]).expand(EXAMPLE_E),
        }
        options, quant = {"use_fp8_w8a8": True}, "fp8_w8a8_tensor"
    if quantization == "fp8 blocks":
        generator = torch.Generator().manual_seed(12)
        scales = {
            "w1_scale": torch.randn(
                EXAMPLE_E, 2 * EXAMPLE_I // 128, EXAMPLE_H // 128, generator=generator
            ),
            "w2_scale": torch.randn(
                EXAMPLE_E, EXAMPLE_H // 128, EXAMPLE_I // 128, generator=generator
            ),
        }
        options["block_shape"], quant = [128, 128], "fp8_w8a8_block"
    got = fused_experts(
        hidden_states=x_TH, w1=w1, w2=w2, topk_output=topk_output,
        moe_runner_config=config, **options, **scales,
    )  # fmt: skip
    problem = Problem(
        EXAMPLE_T, EXAMPLE_H, EXAMPLE_I, EXAMPLE_E, 2, dtype=torch.bfloat16, quant=quant
    )
    weights = ExpertWeights(w1, w2, **{name: scale.contiguous() for name, scale in scales.items()})
    expected = float64_reference(x_TH, weights, Routing(*topk_output[:2]), problem)
    assert_close(got, expected, 1e-2 if quantization == "bf16" else 0.1)
    tiles = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 16,
             "num_warps": 4, "num_stages": 3}  # fmt: skip
    with override_config(tiles):
        output_with_override = fused_experts(x_TH, w1, w2, topk_output, config, **options, **scales)
    assert_close(output_with_override, expected, 1e-2 if quantization == "bf16" else 0.1)


def test_one_scale_expanded_over_the_experts() -> None:
    problem = replace(BASE, quant="fp8_w8a8_tensor")
    x_TH, weights, routing = make_layer(problem)
    scales = {name: torch.tensor([0.01]).expand(E) for name in ("w1_scale", "w2_scale")}
    got = call_fused_experts(x_TH, weights, routing, use_fp8_w8a8=True, **scales)
    contiguous_weights = replace(
        weights, **{name: scale.contiguous() for name, scale in scales.items()}
    )
    assert_close(got, float64_reference(x_TH, contiguous_weights, routing, problem), 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_weights_of_16_bits_are_widened(dtype: torch.dtype) -> None:
    x_TH, weights, routing = make_layer(BASE)
    bf16_or_fp16_routing = replace(routing, topk_weights_TK=routing.topk_weights_TK.to(dtype))
    float32_routing = replace(routing, topk_weights_TK=bf16_or_fp16_routing.topk_weights_TK.float())
    assert torch.equal(
        call_fused_experts(x_TH, weights, bf16_or_fp16_routing),
        call_fused_experts(x_TH, weights, float32_routing),
    )


def test_fused_moe_accepts_the_output_of_a_router() -> None:
    x_TH, weights, routing = make_layer(BASE)
    topk_output = (routing.topk_weights_TK, routing.topk_ids_TK, None)
    assert torch.equal(
        fused_moe(x_TH, weights.w1, weights.w2, topk_output),
        call_fused_experts(x_TH, weights, routing),
    )
    with pytest.raises(ConfigurationError, match="renormalize: got True with weights and ids"):
        fused_moe(x_TH, weights.w1, weights.w2, topk_output, renormalize=True)
    for invalid_logits in (None, 5, torch.ones(E)):
        with pytest.raises(ShapeError, match="gating_output"):
            fused_moe(x_TH, weights.w1, weights.w2, invalid_logits, top_k=K)
