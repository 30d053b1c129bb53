"""`MoeRunner` and `moe_align_block_size` refuse every wrong type, shape, dtype and count."""

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

T, H, WIDE, E, K, C = 5, 32, 16, 4, 2, 6
CONFIG = MoeRunnerConfig(inplace=False)
E4M3 = torch.float8_e4m3fn


def ids(rows: int = T) -> torch.Tensor:
    return torch.arange(rows * K, dtype=torch.int32).view(rows, K) % E


def info() -> MoeQuantInfo:
    w13, w2 = torch.randn(E, 2 * WIDE, H), torch.randn(E, H, WIDE)
    return MoeQuantInfo(w13.bfloat16(), w2.bfloat16())


def info_fp8() -> MoeQuantInfo:
    plain = info()
    return MoeQuantInfo(
        plain.w13_weight.to(E4M3),
        plain.w2_weight.to(E4M3),
        quant="fp8_w8a8_channel",
        w13_scale=torch.rand(E, 2 * WIDE),
        w2_scale=torch.rand(E, H),
    )


def by_expert(**changes: Any) -> DeepEPLLDispatchOutput:
    counts = torch.tensor([1, 2, 0, C], dtype=torch.int32)
    rows = torch.randn(E, C, H).bfloat16()
    right = DeepEPLLDispatchOutput(rows, None, ids(), torch.rand(T, K), counts, 3)
    return right._replace(**changes)


def received(**changes: Any) -> DeepEPNormalDispatchOutput:
    rows = torch.randn(T, H).to(E4M3)
    right = DeepEPNormalDispatchOutput(rows, torch.rand(T, 1), ids(), torch.rand(T, K))
    return right._replace(**changes)


COUNTS = by_expert().masked_m
WRONG: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "rows that are none": (by_expert, {"hidden_states": None}, "hidden_states"),
    "rows without experts": (by_expert, {"hidden_states": torch.zeros(T, H)}, "hidden_states"),
    "rows of fewer experts": (
        by_expert,
        {"hidden_states": torch.zeros(3, C, H).bfloat16(), "masked_m": COUNTS[:3]},
        "hidden_states: got 3 experts, need 4",
    ),
    "no counts": (by_expert, {"masked_m": None}, "masked_m"),
    "counts in a list": (by_expert, {"masked_m": [1, 2, 0, 6]}, "masked_m"),
    "counts of 64 bits": (by_expert, {"masked_m": COUNTS.long()}, "masked_m: got torch.int64"),
    "counts of fewer experts": (by_expert, {"masked_m": COUNTS[:3]}, "masked_m: got .3,., strides"),
    "counts beyond the room": (by_expert, {"masked_m": COUNTS * 100}, "need 0 to C = 6"),
    "counts below zero": (by_expert, {"masked_m": -COUNTS}, "need 0 to C = 6"),
    "counts apart": (by_expert, {"masked_m": COUNTS.repeat(2)[::2]}, "contiguous"),
    "ids that are none": (by_expert, {"topk_ids": None}, "topk_ids"),
    "ids of one dimension": (by_expert, {"topk_ids": ids()[:, 0]}, r"topk_ids.*need \(T, K\)"),
    "weights that are none": (by_expert, {"topk_weights": None}, "topk_weights"),
    "a scale in a list": (received, {"hidden_states_scale": [1.0]}, "hidden_states_scale"),
    "rows in batches": (received, {"hidden_states": torch.zeros(1, T, H).to(E4M3)}, "(R, H)"),
    "ids of other rows": (received, {"topk_ids": ids(9)}, "topk_ids: got .9, 2., need"),
    "ids of floats": (received, {"topk_ids": ids().float()}, "topk_ids: got torch.float32"),
    "weights of 16 bits": (received, {"topk_weights": torch.rand(T, K).bfloat16()}, "need float32"),
    "weights of another K": (received, {"topk_weights": torch.rand(T, 1)}, "topk_weights"),
    "ids on another device": (received, {"topk_ids": ids().to("meta")}, "topk_ids: got meta"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_outputs_of_a_dispatcher(name: str) -> None:
    make, change, match = WRONG[name]
    weights = info() if make is by_expert else info_fp8()
    runner = MoeRunner("torch", CONFIG)
    runner.run(make(), weights)
    with pytest.raises(InputError, match=match):
        runner.run(make(**change), weights)


def test_wrong_tokens() -> None:
    given = StandardDispatchOutput(None, (torch.rand(T, K), ids(), None))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="hidden_states: got NoneType, need a tensor"):
        MoeRunner("torch", CONFIG).run(given, info())


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
def test_options_of_wrong_types(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InputError, match=name):
        MoeRunner("torch", CONFIG, **options)


def test_a_dtype_by_name() -> None:
    assert MoeRunner("torch", CONFIG, dtype="float16").dtype is torch.float16  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, [], {"SGLANG_MOE_PADDING": 1}], ids=str)
def test_wrong_values_of_environment_variables(given: Any) -> None:
    with pytest.raises(InputError, match=r"environment|SGLANG_MOE_PADDING"):
        switches(given)


@pytest.mark.parametrize("tokens", [-1, "x", 2.5])
def test_verdicts_for_wrong_arguments(tokens: Any) -> None:
    sizes = {
        "num_experts": E,
        "hidden_size": H,
        "intermediate_size_per_partition": WIDE,
        "top_k": K,
    }
    runner = MoeRunner("torch", replace(CONFIG, **sizes))
    assert "valid" in runner.explain()
    with pytest.raises(InputError, match="tokens"):
        runner.explain(tokens=tokens)


# ------------------------------------------------------------------------------------------ align


MAP = torch.arange(E, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"topk_ids_TK": [[0]]}, "topk_ids: got list"),
        ({"topk_ids_TK": None}, "topk_ids: got NoneType"),
        ({"topk_ids_TK": ids().to_sparse()}, "topk_ids.*sparse"),
        ({"topk_ids_TK": ids()[0]}, "topk_ids"),
        ({"topk_ids_TK": ids().float()}, "topk_ids"),
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
        ({"expert_map": MAP[:2]}, "expert_map"),
        ({"expert_map": MAP.long()}, "expert_map: got torch.int64"),
        ({"expert_map": MAP[:, None]}, "expert_map"),
        ({"expert_map": MAP.repeat(2)[::2]}, "expert_map.*contiguous"),
        ({"expert_map": MAP.to("meta")}, "expert_map: got meta"),
        ({"ignore_invalid": "no"}, "ignore_invalid"),
        ({"checked": 1}, "checked"),
    ],
    ids=str,
)
def test_alignment_of_wrong_arguments(change: dict[str, Any], match: str) -> None:
    right: dict[str, Any] = {"topk_ids_TK": ids(), "block_size": 16, "num_experts": E}
    moe_align_block_size(**right, expert_map=MAP)
    with pytest.raises(InputError, match=match):
        moe_align_block_size(**right | change)


@pytest.mark.parametrize("block", ["16", 16.0, 3])
def test_alignment_of_wrong_batches(block: Any) -> None:
    with pytest.raises(InputError, match="block_size"):
        batched_moe_align_block_size(COUNTS, C, block)
