"""Launches of the gemv_w4 path compile for sm_90 without spills, and keep operands in registers."""

from dataclasses import replace

import pytest
import torch
from path_launches import launches_of

from experts.triton.gemv_w4 import gemv_w4_config
from experts.triton.gemv_w4.gemv_w4_path import GemvW4Path
from experts.triton.launch_config import MoEConfig
from modular_kernel import Problem
from modular_kernel.spec.problem import Combine
from modular_kernel.testing.compile.report import CompileRecord, check

MIXTRAL = Problem(tokens=1, hidden=4096, intermediate=14336, experts=8, top_k=2)
DEEPSEEK = Problem(tokens=1, hidden=7168, intermediate=2048, experts=32, top_k=8)
QWEN3 = Problem(tokens=2, hidden=2048, intermediate=768, experts=128, top_k=8)
# K has 22.5 groups of 128 elements, and both products have a bias.
GPT_OSS = Problem(
    tokens=1, hidden=2880, intermediate=2880, experts=128, top_k=4, bias=True,
    activation="swiglu_oai:alpha=1.702,limit=7.0,interleaved=true",
)  # fmt: skip
MODELS = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK, "qwen3": QWEN3, "gpt-oss": GPT_OSS}
REPACKED = "mxfp4_w4a16:repacked=true"
# The bytes for the partial sums of warps. With more shared memory, warps would exchange operands,
# too.
MAX_SHARED_BYTES = 4096


def compile_gemms(
    problem: Problem, config: MoEConfig, target: str = "sm_90"
) -> list[CompileRecord]:
    """Compile both launches of a call, and return their records."""
    return launches_of(GemvW4Path(problem), problem, config, target=target)


@pytest.mark.share(6)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize(
    "quant",
    ["int4_w4a16_group", "int4_w4a16_group:zero_points=true", "mxfp4_w4a16", REPACKED],
)
def test_default_launches_compile_without_violations(quant: str, model: Problem) -> None:
    problem = replace(model, quant=quant)
    records = compile_gemms(problem, gemv_w4_config.default_config(problem))
    assert [record.kernel for record in records] == [
        "gemv_w4_gate_up_kernel",
        "gemv_w4_down_kernel",
    ]
    for record in records:
        assert check(record, expect="HMMA", max_shared=MAX_SHARED_BYTES) == ()


@pytest.mark.parametrize(
    "quant",
    ["int4_w4a16_group", "int4_w4a16_group:zero_points=true", "mxfp4_w4a16", REPACKED],
)
def test_warps_exchange_only_partial_sums(quant: str) -> None:
    """STS instructions store to shared memory. If warps exchanged ids, too, there would be more."""
    problem = replace(QWEN3, quant=quant, tokens=1)
    _, down = compile_gemms(problem, gemv_w4_config.default_config(problem))
    assert 0 < down.instructions["STS"] <= 3


@pytest.mark.parametrize(
    "quant",
    ["int4_w4a16_group", "int4_w4a16_group:zero_points=true", "mxfp4_w4a16", REPACKED],
)
def test_unpacked_weights_are_not_moved_between_registers(quant: str) -> None:
    """Only ids and sums are moved. If weights were, there would be about six moves for each MMA."""
    for model in (QWEN3, GPT_OSS):
        problem = replace(model, quant=quant, tokens=1)
        up, down = compile_gemms(problem, gemv_w4_config.default_config(problem))
        assert up.instructions["MOV"] <= 20 < up.instructions["HMMA"] * 4
        assert down.instructions["MOV"] <= max(40, 1.5 * down.instructions["HMMA"])


@pytest.mark.parametrize("quant", ["int4_w4a16_group:zero_points=true", "mxfp4_w4a16", REPACKED])
def test_launches_for_more_tokens_compile_without_violations(quant: str) -> None:
    problem = replace(QWEN3, quant=quant)
    tokens_by_config = {
        gemv_w4_config.default_config(problem, tokens): tokens
        for tokens in range(1, gemv_w4_config.max_tokens(problem) + 1)
    }
    assert len(tokens_by_config) > 1
    for config, tokens in tokens_by_config.items():
        for record in compile_gemms(replace(QWEN3, quant=quant, tokens=tokens), config):
            assert check(record, expect="HMMA", max_shared=MAX_SHARED_BYTES) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float16},
        {"dtype": torch.float16, "quant": "mxfp4_w4a16", "activation": "relu2"},
        {"dtype": torch.float16, "quant": "mxfp4_w4a16:repacked=true"},
        {"quant": "int4_w4a16_group:group=32,zero_points=true"},
        {"quant": "int4_w4a16_group:group=256"},
        {"combine": Combine.TOPK_WEIGHTED},
    ],
    ids=str,
)
def test_other_problems_compile_without_violations(change: dict[str, object]) -> None:
    problem = replace(QWEN3, quant="int4_w4a16_group")
    problem = replace(problem, **change)  # type: ignore[arg-type]
    for record in compile_gemms(problem, gemv_w4_config.default_config(problem)):
        assert check(record, expect="HMMA", max_shared=MAX_SHARED_BYTES) == ()


def test_launches_do_not_overlap_before_hopper() -> None:
    problem = replace(QWEN3, quant="mxfp4_w4a16")
    for target, overlaps in (("sm_80", False), ("sm_90", True)):
        for record in compile_gemms(problem, gemv_w4_config.default_config(problem), target):
            assert record.config.get("USE_PDL", False) is overlaps
