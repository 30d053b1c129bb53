"""run_moe_lora, the parallel branch of adapters, compared with float64 loops."""

from dataclasses import replace

import pytest
import torch
from moe_lora_calls import (
    DEVICE,
    STRATEGIES,
    WITH_KERNELS_AND_TORCH,
    Call,
    Sizes,
    assert_close,
    expected_outputs,
    make_call,
    make_implementation_fixture,
    move_to_device,
    replace_ids,
    replace_info,
)

from modular_kernel import ExpertWeights, Problem, Routing, reference
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.ops.moe_lora import (
    MoELoRABatchInfo,
    explain_strategy,
    run_moe_lora,
    should_use_fused_kernel,
)

_implementation = make_implementation_fixture()


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_moe_lora_equals_the_loop(dtype: torch.dtype, strategy: str) -> None:
    c = make_call(dtype=dtype)
    assert_close(c.run(strategy), expected_outputs(c)["out"])


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", ["staged", "fused"])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(tokens=1, top_k=1, rank=1, slots=1),
        Sizes(tokens=5, top_k=8, experts=9, rank=8),
        Sizes(tokens=3, hidden=40, intermediate=24, rank=130, experts=2, top_k=2),
        Sizes(tokens=35, top_k=2, hidden=33, intermediate=17, rank=33),
        Sizes(tokens=17, top_k=2, hidden=130, intermediate=130, rank=32),
        Sizes(tokens=6, slots=1, experts=1),
    ],
    ids=str,
)
def test_moe_lora_of_irregular_sizes_equals_the_loop(sizes: Sizes, strategy: str) -> None:
    c = make_call(sizes)
    if sizes.tokens == 1:
        c = replace_info(replace_ids(c, torch.zeros_like(c.ids)), weight_indices=[0])
        c.weights.fill_(0.7)
    assert_close(c.run(strategy), expected_outputs(c)["out"])


def test_moe_lora_without_tokens_is_empty() -> None:
    c = make_call(Sizes(tokens=0))
    for strategy in STRATEGIES:
        assert c.run(strategy).shape == (0, 72)


def make_overlapping_matrices(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a matrix for each expert as overlapping views of one buffer, offset by one row."""
    _, experts, rows, columns = shape
    g = torch.Generator().manual_seed(seed)
    storage = torch.randn(rows + experts, columns, generator=g).to(DEVICE) / columns**0.5
    return storage.as_strided(shape, (0, columns, columns, 1))


# (T, H, E, K). H, E and K are those of DeepSeek-V2-Lite and of DeepSeek-V3.
DEEPSEEK_SIZES = [(3, 2048, 64, 6), (1, 7168, 256, 8)]


@pytest.mark.share(2)
@pytest.mark.parametrize(("tokens", "hidden", "experts", "top_k"), DEEPSEEK_SIZES)
def test_moe_lora_of_deepseek_sizes_equals_the_loop(
    tokens: int, hidden: int, experts: int, top_k: int
) -> None:
    """The branch is added to zeros. TF32 would exceed the tolerance of 1e-3 in float32."""
    rank = 8
    g = torch.Generator().manual_seed(hidden)
    shapes = (rank, hidden), (2 * 48, rank), (rank, 48), (hidden, rank)
    buffers = [make_overlapping_matrices((1, experts, *shape), i) for i, shape in enumerate(shapes)]
    ids = torch.rand(tokens, experts, generator=g).topk(top_k).indices
    ranks, scalings = torch.full((1,), rank), torch.full((1,), 2.0)
    c = move_to_device(Call(
        torch.randn(tokens, hidden, generator=g), ids, torch.rand(tokens, top_k, generator=g),
        MoELoRABatchInfo(torch.zeros(tokens).int(), ranks, scalings), [],
        torch.zeros(tokens, hidden),
    ))  # fmt: skip
    c.buffers = buffers
    expected = expected_outputs(c)["out"]
    for strategy in ("staged", "fused"):
        actual = c.run(strategy)
        assert_close(actual, expected, hidden)
        torch.testing.assert_close(actual, expected.float(), rtol=1e-3, atol=1e-3)


def test_moe_lora_differs_from_merged_weights() -> None:
    """If the gate and up factors are zero, the branch adds nothing, but merged LoRA weights do."""
    c = make_call(Sizes(tokens=9, hidden=32, intermediate=24, experts=4, top_k=2, slots=1, rank=6))
    g = torch.Generator().manual_seed(3)
    ranks = torch.full((1,), 6)
    info = MoELoRABatchInfo(torch.zeros(9).int(), ranks, torch.ones(1))
    c = Call(
        c.x.cpu(), c.ids.cpu().clamp(min=0), torch.rand(9, 2, generator=g), info,
        [tensor.cpu().nan_to_num(0.1) for tensor in c.buffers], torch.zeros(9, 32),
    )  # fmt: skip
    problem = Problem(9, 32, 24, 4, 2, torch.float32, lora="adapters=1,rank=6,a13=shared")
    names = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
    w1, w2 = torch.randn(4, 48, 32, generator=g) / 6, torch.randn(4, 32, 24, generator=g) / 5
    routing = Routing(c.weights, c.ids, torch.zeros(9).int())

    def compute_change_by_merged_weights(buffers: list[torch.Tensor]) -> torch.Tensor:
        weights_with_lora = ExpertWeights(w1, w2, **dict(zip(names, buffers, strict=True)))
        base_weights = ExpertWeights(w1, w2)
        problem_without_lora = replace(problem, lora="none")
        base_output = reference.float64_reference(
            c.x, base_weights, replace(routing, adapters_T=None), problem_without_lora
        )
        return reference.float64_reference(c.x, weights_with_lora, routing, problem) - base_output

    with prefer_torch_reference():
        branch, merged = c.run().double(), compute_change_by_merged_weights(c.buffers)
        cosine = float((branch * merged).sum() / branch.norm() / merged.norm())
        assert abs(cosine) < 0.9
        down_only = [torch.zeros_like(b) if i < 2 else b for i, b in enumerate(c.buffers)]
        assert not replace(c, buffers=down_only).run().any()
        assert bool(compute_change_by_merged_weights(down_only).any())


def test_auto_uses_the_implementation_that_it_reports() -> None:
    few_pairs, many_pairs = ((1, 2048), (1, 8), 16, 1024), ((256, 2048), (256, 8), 16, 1024)
    assert should_use_fused_kernel(*few_pairs)
    assert not should_use_fused_kernel(*many_pairs)
    formula = "8 pairs x 8 blocks of H x (1 + 3 I / H) = 160, fused up to 10500"
    assert explain_strategy(*few_pairs) == f"fused: {formula}"
    assert explain_strategy(*many_pairs).startswith("staged: 2048 pairs x 8 blocks")
    large_rank = (*few_pairs[:2], 17, 1024)
    assert not should_use_fused_kernel(*large_rank)
    assert explain_strategy(*large_rank) == "staged: rank 17, fused up to 16"


# (tokens, K, H, I, whether the fused kernel is faster). Measured on an H200 with ranks 8 and 16.
MEASURED_CHOICES = (
    (64, 8, 2048, 768, True),
    (128, 8, 2048, 768, False),
    (32, 6, 2048, 1408, True),
    (128, 6, 2048, 1408, False),
    (16, 2, 4096, 14336, True),
    (32, 2, 4096, 14336, False),
    (16, 8, 7168, 2048, True),
    (64, 8, 7168, 2048, False),
)


@pytest.mark.parametrize(("tokens", "top_k", "hidden", "intermediate", "fused"), MEASURED_CHOICES)
@pytest.mark.parametrize("rank", [8, 16])
def test_auto_chooses_the_faster_kernel(
    tokens: int, top_k: int, hidden: int, intermediate: int, fused: bool, rank: int
) -> None:
    shapes = (tokens, hidden), (tokens, top_k)
    assert should_use_fused_kernel(*shapes, rank, intermediate) is fused


def test_without_an_intermediate_size_it_is_assumed_to_be_the_hidden_size() -> None:
    shapes = (40, 2048), (40, 8)
    assert should_use_fused_kernel(*shapes) is should_use_fused_kernel(*shapes, 16, 2048) is True
    assert not should_use_fused_kernel(*shapes, 16, 6144)


def test_auto_launches_one_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    from modular_kernel.ops import moe_lora

    c, calls = make_call(), list[str]()
    for name in ("fused", "staged"):
        monkeypatch.setattr(moe_lora, f"moe_lora_{name}", lambda *_, name=name: calls.append(name))
    arguments = (c.x, c.ids, c.weights, c.info, *c.buffers, c.output)
    for fused in (True, False):
        monkeypatch.setattr(moe_lora, "should_use_fused_kernel", lambda *_, fused=fused: fused)
        run_moe_lora(*arguments)
        run_moe_lora(*arguments, strategy="staged")
        run_moe_lora(*arguments, strategy="fused")
    assert calls == ["fused", "staged", "fused", "staged", "staged", "fused"]
