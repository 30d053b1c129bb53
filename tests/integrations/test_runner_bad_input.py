"""`MoeRunner` and `moe_align_block_size` refuse arguments of wrong type, shape, dtype or range."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from modular_kernel.errors import InputError
from modular_kernel.integrations.moe_runner import (
    MoeQuantInfo,
    MoeRunner,
    MoeRunnerConfig,
    switches,
)
from modular_kernel.integrations.runner_formats import (
    DeepEPLLDispatchOutput,
    DeepEPNormalDispatchOutput,
    StandardDispatchOutput,
)
from modular_kernel.ops.align import batched_moe_align_block_size, moe_align_block_size

T, H, INTERMEDIATE, E, K, C = 5, 32, 16, 4, 2, 6
CONFIG = MoeRunnerConfig(inplace=False)
E4M3 = torch.float8_e4m3fn


def make_ids(rows: int = T) -> torch.Tensor:
    return torch.arange(rows * K, dtype=torch.int32).view(rows, K) % E


def make_info() -> MoeQuantInfo:
    w13, w2 = torch.randn(E, 2 * INTERMEDIATE, H), torch.randn(E, H, INTERMEDIATE)
    return MoeQuantInfo(w13.bfloat16(), w2.bfloat16())


def make_fp8_info() -> MoeQuantInfo:
    info = make_info()
    return MoeQuantInfo(
        info.w13_weight.to(E4M3),
        info.w2_weight.to(E4M3),
        quant="fp8_w8a8_channel",
        w13_scale=torch.rand(E, 2 * INTERMEDIATE),
        w2_scale=torch.rand(E, H),
    )


def make_low_latency_output(**changes: Any) -> DeepEPLLDispatchOutput:
    counts = torch.tensor([1, 2, 0, C], dtype=torch.int32)
    rows = torch.randn(E, C, H).bfloat16()
    valid = DeepEPLLDispatchOutput(rows, None, make_ids(), torch.rand(T, K), counts, 3)
    return valid._replace(**changes)


def make_normal_output(**changes: Any) -> DeepEPNormalDispatchOutput:
    rows = torch.randn(T, H).to(E4M3)
    valid = DeepEPNormalDispatchOutput(rows, torch.rand(T, 1), make_ids(), torch.rand(T, K))
    return valid._replace(**changes)


COUNTS = make_low_latency_output().masked_m
INVALID_OUTPUTS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "rows that are none": (make_low_latency_output, {"hidden_states": None}, "hidden_states"),
    "rows without experts": (
        make_low_latency_output,
        {"hidden_states": torch.zeros(T, H)},
        "hidden_states",
    ),
    "rows of fewer experts": (
        make_low_latency_output,
        {"hidden_states": torch.zeros(3, C, H).bfloat16(), "masked_m": COUNTS[:3]},
        "hidden_states: got 3 experts, need 4",
    ),
    "no counts": (make_low_latency_output, {"masked_m": None}, "masked_m"),
    "counts in a list": (make_low_latency_output, {"masked_m": [1, 2, 0, 6]}, "masked_m"),
    "counts of 64 bits": (
        make_low_latency_output,
        {"masked_m": COUNTS.long()},
        "masked_m: got torch.int64",
    ),
    "counts of fewer experts": (
        make_low_latency_output,
        {"masked_m": COUNTS[:3]},
        "masked_m: got .3,., strides",
    ),
    "counts above the capacity": (
        make_low_latency_output,
        {"masked_m": COUNTS * 100},
        "need 0 to C = 6",
    ),
    "counts below zero": (make_low_latency_output, {"masked_m": -COUNTS}, "need 0 to C = 6"),
    "counts apart": (make_low_latency_output, {"masked_m": COUNTS.repeat(2)[::2]}, "contiguous"),
    "ids that are none": (make_low_latency_output, {"topk_ids": None}, "topk_ids"),
    "ids with one dimension": (
        make_low_latency_output,
        {"topk_ids": make_ids()[:, 0]},
        r"topk_ids.*need \(T, K\)",
    ),
    "weights that are none": (make_low_latency_output, {"topk_weights": None}, "topk_weights"),
    "a scale in a list": (
        make_normal_output,
        {"hidden_states_scale": [1.0]},
        "hidden_states_scale",
    ),
    "rows in batches": (
        make_normal_output,
        {"hidden_states": torch.zeros(1, T, H).to(E4M3)},
        "(R, H)",
    ),
    "ids with another number of rows": (
        make_normal_output,
        {"topk_ids": make_ids(9)},
        "topk_ids: got .9, 2., need",
    ),
    "ids of floats": (
        make_normal_output,
        {"topk_ids": make_ids().float()},
        "topk_ids: got torch.float32",
    ),
    "weights of 16 bits": (
        make_normal_output,
        {"topk_weights": torch.rand(T, K).bfloat16()},
        "need float32",
    ),
    "weights with another K": (
        make_normal_output,
        {"topk_weights": torch.rand(T, 1)},
        "topk_weights",
    ),
    "ids on another device": (
        make_normal_output,
        {"topk_ids": make_ids().to("meta")},
        "topk_ids: got meta",
    ),
}


@pytest.mark.parametrize("name", INVALID_OUTPUTS)
def test_invalid_dispatch_outputs_are_refused(name: str) -> None:
    make_output, change, match = INVALID_OUTPUTS[name]
    info = make_info() if make_output is make_low_latency_output else make_fp8_info()
    runner = MoeRunner("torch", CONFIG)
    runner.run(make_output(), info)
    with pytest.raises(InputError, match=match):
        runner.run(make_output(**change), info)


def test_missing_hidden_states_are_refused() -> None:
    dispatch_output = StandardDispatchOutput(None, (torch.rand(T, K), make_ids(), None))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="hidden_states: got NoneType, need a tensor"):
        MoeRunner("torch", CONFIG).run(dispatch_output, make_info())


@pytest.mark.parametrize(
    "options",
    [
        {"fused": 1},
        {"padding": "yes"},
        {"fast_act": None},
        {"fast_act": "0"},
        {"aiter": 0.0},
        {"aiter": []},
        {"quant": 5},
        {"quant": "fp9"},
        {"dtype": None},
        {"dtype": "int3"},
        {"dtype": torch.int32},
    ],
    ids=str,
)
def test_options_of_wrong_types_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InputError, match=name):
        MoeRunner("torch", CONFIG, **options)


def test_dtype_may_be_a_name() -> None:
    assert MoeRunner("torch", CONFIG, dtype="float16").dtype is torch.float16  # type: ignore[arg-type]


@pytest.mark.parametrize("environment", [None, [], {"SGLANG_MOE_PADDING": 1}], ids=str)
def test_wrong_values_of_environment_variables_are_refused(environment: Any) -> None:
    with pytest.raises(InputError, match=r"environment|SGLANG_MOE_PADDING"):
        switches(environment)


@pytest.mark.parametrize("tokens", [-1, "x", 2.5])
def test_explain_refuses_wrong_numbers_of_tokens(tokens: Any) -> None:
    sizes = {
        "num_experts": E,
        "hidden_size": H,
        "intermediate_size_per_partition": INTERMEDIATE,
        "top_k": K,
    }
    runner = MoeRunner("torch", replace(CONFIG, **sizes))
    assert "valid" in runner.explain()
    with pytest.raises(InputError, match="tokens"):
        runner.explain(tokens=tokens)


# ------------------------------------------------------------------------------------------ align


EXPERT_MAP = torch.arange(E, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"topk_ids_TK": [[0]]}, "topk_ids: got list"),
        ({"topk_ids_TK": None}, "topk_ids: got NoneType"),
        ({"topk_ids_TK": make_ids().to_sparse()}, "topk_ids.*sparse"),
        ({"topk_ids_TK": make_ids()[0]}, "topk_ids"),
        ({"topk_ids_TK": make_ids().float()}, "topk_ids"),
        ({"block_size": 16.0}, "block_size"),
        ({"block_size": "16"}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 24}, "block_size: got 24, need a power of two"),
        ({"block_size": 1 << 40}, "block_size"),
        ({"block_size": 1 << 29}, "aligned pairs: got"),
        ({"num_experts": 4.0}, "num_experts"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": -3}, "num_experts"),
        ({"num_experts": "4"}, "num_experts"),
        ({"expert_map": [0, 1, 2, 3]}, "expert_map: got list"),
        ({"expert_map": EXPERT_MAP[:2]}, "expert_map"),
        ({"expert_map": EXPERT_MAP.long()}, "expert_map: got torch.int64"),
        ({"expert_map": EXPERT_MAP[:, None]}, "expert_map"),
        ({"expert_map": EXPERT_MAP.repeat(2)[::2]}, "expert_map.*contiguous"),
        ({"expert_map": EXPERT_MAP.to("meta")}, "expert_map: got meta"),
        ({"ignore_invalid": "no"}, "ignore_invalid"),
        ({"checked": 1}, "checked"),
    ],
    ids=str,
)
def test_align_refuses_wrong_arguments(change: dict[str, Any], match: str) -> None:
    valid: dict[str, Any] = {"topk_ids_TK": make_ids(), "block_size": 16, "num_experts": E}
    moe_align_block_size(**valid, expert_map=EXPERT_MAP)
    with pytest.raises(InputError, match=match):
        moe_align_block_size(**valid | change)


@pytest.mark.parametrize("block", ["16", 16.0, 3])
def test_batched_align_refuses_wrong_block_sizes(block: Any) -> None:
    with pytest.raises(InputError, match="block_size"):
        batched_moe_align_block_size(COUNTS, C, block)
