"""Verdicts on the parts that use vendor libraries, for an H200, a B200 and an A100.

The expected verdicts follow the limits of the libraries. For example, torch's scaled grouped GEMM
needs N and K in multiples of 16 bytes and at most 1023 groups, and DeepGEMM needs sm_90 and sizes
in multiples of 128.
"""

from dataclasses import replace
from typing import Any

import pytest
from run_mk import run_mk

from modular_kernel.catalog import check, load_catalog
from modular_kernel.compatibility.support import PlannedPart
from modular_kernel.errors import UnknownPartError
from modular_kernel.spec.problem import Combine, Machine, Parallel, Problem

LIBRARIES = (
    *("deep_gemm", "triton_kernels", "nvidia_cutlass_dsl", "deep_ep", "deep_ep_cpp"),
    *("flashinfer", "flashinfer.comm"),
)
ALL = frozenset({"triton", "tvm_ffi", *LIBRARIES})
H200 = Machine("cuda", (9, 0), ALL, name="NVIDIA H200")
B200 = Machine("cuda", (10, 0), ALL, name="NVIDIA B200")
A100 = Machine("cuda", (8, 0), ALL, name="NVIDIA A100")
BARE = Machine("cuda", (9, 0), frozenset({"triton"}))
H200_126 = Machine("cuda", (9, 0), ALL, name="NVIDIA H200", cuda=(12, 6))
H200_128 = Machine("cuda", (9, 0), ALL, name="NVIDIA H200", cuda=(12, 8))
NO_EP, LOCAL = "MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize"
HT, LL = "DeepEPHTPrepareAndFinalize", "DeepEPLLPrepareAndFinalize"
CHANNEL, TENSOR, BLOCK = "fp8_w8a8_channel", "fp8_w8a8_tensor", "fp8_w8a8_block"
ROWS, BATCHED_ROWS, CUTE = (
    "CutlassRowwiseExpertsFP8",
    "BatchedCutlassExpertsFP8",
    "CutlassExpertsFP8",
)
FP4, BATCHED_FP4 = "CutlassExpertsFP4", "BatchedCutlassExpertsFP4"
W4A4 = {"quant": "nvfp4_w4a4"}
DG, BATCHED_DG = "DeepGemmExperts", "BatchedDeepGemmExperts"
TK = "TritonKernelsExperts"
FI, FI_ALL2ALL = "FlashInferExperts", "FlashInferCutlassMoEPrepareAndFinalize"
UP = {"activation": "silu:up_first=true"}
TWO_RANKS = {"parallel": Parallel(2)}
EITHER, BATCHED_EITHER = "TritonOrDeepGemmExperts", "BatchedTritonOrDeepGemmExperts"
SWIGLU = "swiglu_oai:alpha=1.702,limit=7.0,interleaved=true"

Row = tuple[str, str, dict[str, Any], Machine, str]

# Each row has the two parts, fields of the problem, the machine, and the rules that refuse it.
# fmt: off
TABLE: tuple[Row, ...] = (
    (NO_EP, ROWS, {"quant": CHANNEL}, H200, ""),
    (NO_EP, ROWS, {"quant": CHANNEL}, B200, ""),
    (NO_EP, ROWS, {"quant": CHANNEL}, A100, "archs arch"),
    (NO_EP, ROWS, {"quant": CHANNEL}, BARE, ""),
    (NO_EP, ROWS, {"quant": TENSOR}, H200, ""),
    (NO_EP, ROWS, {"quant": f"{TENSOR}:static=true"}, B200, ""),
    (NO_EP, ROWS, {"quant": BLOCK}, H200, "quant"),
    (NO_EP, ROWS, {}, H200, "quant"),
    (NO_EP, ROWS, {"quant": CHANNEL, "hidden": 200}, H200, "hidden"),
    (NO_EP, ROWS, {"quant": CHANNEL, "hidden": 2880, "intermediate": 2880}, H200, ""),
    (NO_EP, ROWS, {"quant": CHANNEL, "intermediate": 250}, H200, "intermediate"),
    (NO_EP, ROWS, {"quant": CHANNEL, "experts": 1024}, H200, "max_experts"),
    (NO_EP, ROWS, {"quant": CHANNEL, "experts": 1023}, H200, ""),
    (NO_EP, ROWS, {"quant": CHANNEL, "dtype": "float16"}, H200, "dtype"),
    (NO_EP, ROWS, {"quant": CHANNEL, "bias": True}, H200, "bias"),
    (NO_EP, ROWS, {"quant": CHANNEL, "activation": SWIGLU}, H200, ""),
    (NO_EP, ROWS, {"quant": CHANNEL, "graph": True}, H200, ""),
    (NO_EP, ROWS, {"quant": CHANNEL, "batch_invariant": True}, H200, "batch_invariant"),
    (NO_EP, ROWS, {"quant": CHANNEL, "combine": Combine.TOPK_WEIGHTED}, H200, ""),
    (NO_EP, ROWS, {"quant": CHANNEL, "top_k": 1, "apply_router_weight_on_input": True}, H200,
     "router_weight_on_input"),
    (LOCAL, ROWS, {"quant": CHANNEL}, H200, "format reduce"),
    (LOCAL, BATCHED_ROWS, {"quant": CHANNEL}, H200, ""),
    (LOCAL, BATCHED_ROWS, {"quant": TENSOR}, B200, ""),
    (LOCAL, BATCHED_ROWS, {"quant": CHANNEL}, A100, "archs arch"),
    (LOCAL, BATCHED_ROWS, {"quant": CHANNEL, "chunk_tokens": 8}, H200, "chunking"),
    (LOCAL, BATCHED_ROWS, {"quant": BLOCK}, B200, "quant"),
    (NO_EP, CUTE, {"quant": BLOCK}, H200, ""),
    (NO_EP, CUTE, {"quant": BLOCK}, B200, "archs"),
    (NO_EP, CUTE, {"quant": BLOCK}, BARE, "package package"),
    (NO_EP, CUTE, {"quant": CHANNEL}, H200, "quant"),
    (NO_EP, CUTE, {"quant": f"{BLOCK}:block=64x128"}, H200, "blocks"),
    (NO_EP, FP4, W4A4, B200, ""),
    (NO_EP, FP4, W4A4, H200, "archs"),
    (NO_EP, FP4, W4A4, BARE, "archs package package"),
    (NO_EP, FP4, {**W4A4, "graph": True, "deterministic": True, "chunk_tokens": 8}, B200, ""),
    (NO_EP, FP4, {**W4A4, "expert_map": True, "local_experts": 4}, B200, ""),
    (NO_EP, FP4, {"quant": "nvfp4_w4a16"}, B200, "quant"),
    (NO_EP, FP4, {**W4A4, "hidden": 1088}, B200, "hidden"),
    (NO_EP, FP4, {**W4A4, "intermediate": 192}, B200, "intermediate"),
    (NO_EP, FP4, {**W4A4, "dtype": "float16"}, B200, "dtype"),
    (NO_EP, FP4, {**W4A4, "bias": True}, B200, "bias"),
    (NO_EP, FP4, {**W4A4, "activation": SWIGLU}, B200, "activation"),
    (NO_EP, FP4, {**W4A4, "activation": "relu2"}, B200, ""),
    (LOCAL, FP4, W4A4, B200, "format reduce"),
    (LOCAL, BATCHED_FP4, W4A4, B200, ""),
    (LOCAL, BATCHED_FP4, {**W4A4, "tokens": 7}, B200, ""),
    (LOCAL, BATCHED_FP4, W4A4, H200, "archs"),
    (LL, BATCHED_FP4, {**W4A4, **TWO_RANKS, "hidden": 2048, "tokens": 65}, H200, "archs"),
    (HT, FP4, {**W4A4, **TWO_RANKS}, B200, ""),
    (NO_EP, "TritonExperts", W4A4, B200, "quant"),
    (NO_EP, "TorchExperts", W4A4, B200, ""),
    (NO_EP, DG, {}, H200, ""),
    (NO_EP, DG, {"quant": BLOCK}, H200, ""),
    (NO_EP, DG, {}, B200, "archs"),
    (NO_EP, DG, {"quant": BLOCK}, B200, "archs"),
    (NO_EP, DG, {"quant": BLOCK}, A100, "archs arch"),
    (NO_EP, DG, {"quant": BLOCK}, BARE, "package"),
    (NO_EP, DG, {"quant": CHANNEL}, H200, "quant"),
    (NO_EP, DG, {"quant": f"{BLOCK}:block=128x64"}, H200, "blocks"),
    (NO_EP, DG, {"hidden": 2880, "intermediate": 2880}, H200, "hidden intermediate"),
    (NO_EP, DG, {"intermediate": 192}, H200, "intermediate"),
    (NO_EP, DG, {"dtype": "float32"}, H200, "dtype"),
    (NO_EP, DG, {"bias": True}, H200, "bias"),
    (NO_EP, DG, {"activation": SWIGLU}, H200, ""),
    (NO_EP, DG, {"graph": True, "deterministic": True}, H200, ""),
    (NO_EP, DG, {"expert_map": True, "local_experts": 4}, H200, ""),
    (NO_EP, DG, {"chunk_tokens": 8}, H200, ""),
    (HT, DG, {"quant": BLOCK, "parallel": Parallel(2)}, H200, ""),
    (LL, DG, {"hidden": 2048, "parallel": Parallel(2)}, H200, "format reduce"),
    (LOCAL, BATCHED_DG, {}, H200, ""),
    (LOCAL, BATCHED_DG, {"quant": BLOCK, "tokens": 7}, H200, ""),  # LOCAL rounds the capacity up
    (LOCAL, BATCHED_DG, {"quant": BLOCK}, B200, "archs"),
    (LOCAL, BATCHED_DG, {"quant": BLOCK}, BARE, "package"),
    (LOCAL, BATCHED_DG, {"quant": TENSOR}, H200, "quant"),
    (LOCAL, BATCHED_DG, {"hidden": 192}, H200, "hidden"),
    (LL, BATCHED_DG, {"hidden": 2048, "tokens": 64, "parallel": Parallel(2)}, H200, ""),
    (LL, BATCHED_DG, {"hidden": 2048, "tokens": 65, "parallel": Parallel(2)}, H200,
     "capacity_multiple"),
    (LL, BATCHED_DG, {"hidden": 2048, "tokens": 63, "parallel": Parallel(2)}, H200, ""),
    (LL, BATCHED_DG, {"hidden": 2048, "quant": BLOCK, "tokens": 16, "parallel": Parallel(8)},
     H200, ""),
    (LL, BATCHED_DG, {"hidden": 2048, "quant": BLOCK, "tokens": 20, "parallel": Parallel(8)},
     H200, "capacity_multiple"),
    (NO_EP, BATCHED_DG, {}, H200, "format"),
    (NO_EP, EITHER, {}, H200, ""),
    (NO_EP, EITHER, {"quant": BLOCK, "bias": True}, H200, ""),  # runs on Triton only
    (NO_EP, EITHER, {"hidden": 2880, "intermediate": 2880}, H200, ""),
    (NO_EP, EITHER, {}, B200, "archs"),
    (NO_EP, EITHER, {}, BARE, "package"),
    (NO_EP, EITHER, {"quant": CHANNEL}, H200, "quant"),
    (NO_EP, EITHER, {"quant": f"{BLOCK}:block=16x16"}, H200, "quant_block quant_block"),
    (LOCAL, BATCHED_EITHER, {"quant": BLOCK}, H200, ""),
    (LOCAL, BATCHED_EITHER, {"quant": BLOCK}, B200, "archs"),
    (LL, BATCHED_EITHER, {"hidden": 2048, "tokens": 100, "parallel": Parallel(2)}, H200,
     "capacity_multiple"),
    (LOCAL, BATCHED_EITHER, {"intermediate": 80}, H200, ""),
    (LOCAL, BATCHED_EITHER, {"dtype": "float16"}, H200, "dtype"),
    (NO_EP, TK, {}, H200, ""),
    (NO_EP, TK, {}, B200, ""),
    (NO_EP, TK, {}, A100, "arch"),
    (NO_EP, TK, {}, BARE, "package"),
    (NO_EP, TK, {"hidden": 2880, "intermediate": 2880}, H200, ""),
    (NO_EP, TK, {"hidden": 204}, H200, "hidden"),
    (NO_EP, TK, {"quant": "mxfp4_w4a16"}, H200, ""),
    (NO_EP, TK, {"quant": "mxfp4_w4a16"}, B200, "archs"),
    (NO_EP, TK, {"quant": "mxfp4_w4a16:repacked=true"}, H200, "quant"),
    (NO_EP, TK, {"quant": "mxfp4_w4a16", "hidden": 2880}, H200, ""),
    (NO_EP, TK, {"quant": "mxfp4_w4a16", "intermediate": 96}, H200, ""),
    (NO_EP, TK, {"quant": "mxfp4_w4a16", "intermediate": 100}, H200, "intermediate"),
    (NO_EP, TK, {"bias": True}, H200, ""),
    (NO_EP, TK, {"bias": True, "activation": SWIGLU, "hidden": 2880, "intermediate": 2880},
     H200, ""),
    (NO_EP, TK, {"bias": True, "quant": "mxfp4_w4a16", "hidden": 2880, "intermediate": 2880},
     H200, ""),
    (LOCAL, TK, {}, H200, "format reduce"),
    (NO_EP, FI, UP, H200, ""),
    (NO_EP, FI, UP, B200, ""),
    (NO_EP, FI, UP, A100, "archs"),
    (NO_EP, FI, UP, BARE, "package"),
    (NO_EP, FI, {}, H200, "activation"),  # FlashInfer needs up rows first
    (NO_EP, FI, {"activation": SWIGLU}, H200, "activation"),
    (NO_EP, FI, {"activation": "swiglu_oai:up_first=true"}, H200, ""),
    (NO_EP, FI, {"activation": "relu2"}, H200, ""),
    (NO_EP, FI, {"activation": "gelu_tanh_no_mul"}, H200, "activation"),
    (NO_EP, FI, {"activation": "gelu:limit=7.0,up_first=true"}, H200, "activation"),
    (NO_EP, FI, {"activation": "situ:up_first=true"}, H200, "activation"),
    (NO_EP, FI, {**UP, "dtype": "float16"}, H200, ""),
    (NO_EP, FI, {**UP, "dtype": "float32"}, H200, "dtype"),
    (NO_EP, FI, {**UP, "quant": TENSOR}, H200, "quant"),  # FlashInfer computes no scale
    (NO_EP, FI, {**UP, "quant": f"{TENSOR}:static=true"}, H200, ""),
    (NO_EP, FI, {**UP, "quant": f"{TENSOR}:static=true"}, B200, ""),
    (NO_EP, FI, {**UP, "quant": f"{TENSOR}:static=true", "hidden": 1032}, H200, "hidden"),
    (NO_EP, FI, {**UP, "hidden": 1032}, H200, ""),
    (NO_EP, FI, {**UP, "intermediate": 100}, H200, "intermediate"),
    (NO_EP, FI, {**UP, "quant": CHANNEL}, H200, "quant"),
    (NO_EP, FI, {**UP, "quant": BLOCK}, H200, ""),
    (NO_EP, FI, {**UP, "quant": BLOCK}, H200_128, ""),
    (NO_EP, FI, {**UP, "quant": BLOCK}, H200_126, "cuda"),
    (NO_EP, FI, UP, H200_126, ""),
    (NO_EP, FI, {**UP, "quant": BLOCK}, B200, "archs"),
    (NO_EP, FI, {**UP, "quant": BLOCK, "dtype": "float16"}, H200, "dtype"),
    (NO_EP, FI, {**UP, "quant": BLOCK, "intermediate": 192}, H200, "quant_block"),
    (NO_EP, FI, {**UP, "quant": f"{BLOCK}:block=64x128"}, H200, "blocks"),
    (NO_EP, FI, {**UP, "bias": True}, H200, "bias"),
    (NO_EP, FI, {**UP, "combine": Combine.TOPK_WEIGHTED}, H200, "keep_topk"),
    (NO_EP, FI, {**UP, "graph": True, "deterministic": True}, H200, ""),
    (NO_EP, FI, {**UP, "expert_map": True, "local_experts": 4}, H200, ""),
    (LOCAL, FI, UP, H200, "format reduce"),
    (HT, FI, {**UP, **TWO_RANKS}, H200, ""),
    (FI_ALL2ALL, FI, {**UP, **TWO_RANKS}, H200, ""),
    (FI_ALL2ALL, FI, {**UP, **TWO_RANKS, "quant": BLOCK}, H200, ""),
    (FI_ALL2ALL, "TritonExperts", TWO_RANKS, H200, ""),
    (FI_ALL2ALL, "TritonExperts", TWO_RANKS, B200, ""),
    (FI_ALL2ALL, "TritonExperts", TWO_RANKS, A100, "arch"),
    (FI_ALL2ALL, "TritonExperts", TWO_RANKS, BARE, "package"),
    (FI_ALL2ALL, "TritonExperts", {}, H200, "world_size"),
    (FI_ALL2ALL, "TritonExperts", {"parallel": Parallel(16, ranks_per_host=8), "experts": 16},
     H200, "world_size hosts"),
    (FI_ALL2ALL, "TritonExperts", {**TWO_RANKS, "top_k": 3}, H200, "top_k"),
    (FI_ALL2ALL, "TritonExperts", {**TWO_RANKS, "top_k": 6}, H200, ""),
    (FI_ALL2ALL, "TritonExperts", {**TWO_RANKS, "hidden": 1032}, H200, "hidden"),
    (FI_ALL2ALL, "TritonExperts", {**TWO_RANKS, "quant": CHANNEL}, H200, ""),
    (FI_ALL2ALL, "TritonExperts", {**TWO_RANKS, "quant": TENSOR}, H200, "dispatch_quant"),
    (FI_ALL2ALL, "TritonExperts", {**TWO_RANKS, "asynchronous": True}, H200, "asynchronous"),
    (FI_ALL2ALL, "TritonExperts", {**TWO_RANKS, "deterministic": True}, H200, "deterministic"),
    (FI_ALL2ALL, "TritonExperts", {**TWO_RANKS, "graph": True}, H200, ""),
    (FI_ALL2ALL, "BatchedTritonExperts", TWO_RANKS, H200, "format"),
)
# fmt: on


def test_the_table_has_enough_cases() -> None:
    assert len(TABLE) >= 60
    assert {row[3].name for row in TABLE} >= {"NVIDIA H200", "NVIDIA B200"}


@pytest.mark.parametrize(("prepare", "experts", "fields", "machine", "rules"), TABLE, ids=str)
def test_verdict_equals_the_table(
    prepare: str, experts: str, fields: dict[str, Any], machine: Machine, rules: str
) -> None:
    defaults = {"tokens": 128, "hidden": 1024, "intermediate": 512, "experts": 8, "top_k": 2}
    verdict = check(prepare, experts, Problem(**{**defaults, **fields}), machine)
    assert " ".join(r.rule for r in verdict.rejections) == rules, str(verdict)


def test_command_line_options_describe_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line also explains which of two libraries runs a call."""
    args = ["check", "--pf-type", NO_EP, "--experts-type", EITHER, "--hidden", "1024", "--json"]
    packages = ["--packages", "triton,deep_gemm"]
    accepted = run_mk(capsys, *args, "--arch", "9.0", *packages).json
    assert accepted["ok"]
    assert accepted["explained"][0] == "calls of fewer than 2048 tokens: TritonExperts"
    result = run_mk(capsys, *args, "--arch", "10.0", "--packages", "triton")
    assert result.code == 1
    refused = result.json
    assert [r["rule"] for r in refused["rejections"]] == ["archs", "package"]
    assert refused["rejections"][1]["hint"].startswith("install DeepGEMM with the script in")
    assert not refused["explained"]


PART_NAMES = (
    "DeepEPHTPrepareAndFinalize DeepEPLLPrepareAndFinalize PplxPrepareAndFinalize "
    "FlashInferCutlassMoEPrepareAndFinalize MoEPrepareAndFinalizeNoEP BatchedPrepareAndFinalize "
    "BatchedDeepGemmExperts BatchedTritonExperts BatchedTritonOrDeepGemmExperts DeepGemmExperts "
    "TritonExperts TritonOrDeepGemmExperts CutlassExpertsFP8 BatchedCutlassExpertsFP8 "
    "CutlassExpertsFP4 BatchedCutlassExpertsFP4 FlashInferExperts NaiveBatchedExperts"
)


def test_every_listed_part_exists_or_is_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    catalog = load_catalog()
    existing = {*catalog.names("prepare_finalize"), *catalog.names("experts")}
    planned = {part.name: part.blocked_on for part in catalog.planned}
    assert set(PART_NAMES.split()) <= existing | set(planned)
    assert not existing & set(planned)
    output = run_mk(capsys, "list").out
    assert all(name in output for name in PART_NAMES.split())
    # No part is planned at present. The error for a planned part states what blocks the part.
    assert not planned
    planned_part = PlannedPart("LaterExperts", "experts", "its GPU is not there")
    catalog = replace(catalog, planned=(planned_part,))
    with pytest.raises(UnknownPartError, match="planned: its GPU is not there"):
        catalog.experts("LaterExperts")
