"""Weights that are prepared once for a kernel that multiplies 4-bit tiles in registers. A stand-in
computes the products on a CPU.
"""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from grouped_gemm_stand_in import MXFP4, OAI
from prepared_weights_samples import (
    NO_GPU,
    PAIR,
    call_kernel,
    make_launched_fixture,
    make_prepared_kernel,
)
from torch.multiprocessing.reductions import StorageWeakRef

from experts.triton.configs.select import choose_config, override_config
from experts.triton.grouped_w4 import grouped_w4_config
from experts.triton.grouped_w4.bitwise_reference import tile_weights
from experts.triton.grouped_w4.grouped_w4_path import GroupedW4Path
from experts.triton.grouped_w4.layout import PackedFormat, list_tile_rows
from experts.triton.standard import supported_paths
from modular_kernel import make_kernel
from modular_kernel.quant.prepared import SOURCE_FIELDS
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing import Case, prove

pytestmark = NO_GPU
launched = make_launched_fixture()
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"quant": "mxfp4_w4a16:repacked=true", "hidden": 320},
    {"bias": True, "activation": OAI},
    {"intermediate": 320, "activation": "relu2"},
    {"expert_map": True, "local_experts": 3, "experts": 7},
    {"quant": "int4_w4a16_group:group=32", "bias": True},
    {"quant": "int4_w4a16_group:group=64,zero_points=true", "activation": OAI},
    {"quant": "nvfp4_w4a16", "hidden": 320},
)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_outputs_equal_a_call_that_tiles_weights_itself(changes: dict[str, Any]) -> None:
    kernel, inputs = make_prepared_kernel(**changes)
    weights = kernel.prepare_weights(inputs.weights)
    with override_config(grouped_w4_config.default_config(kernel.problem, 64)):
        assert torch.equal(call_kernel(kernel, inputs, weights), call_kernel(kernel, inputs))


def test_prepared_tensors_have_the_tiled_layout() -> None:
    kernel, inputs = make_prepared_kernel()
    weights, problem = kernel.prepare_weights(inputs.weights), kernel.problem
    for name, tensor in vars(inputs.weights).items():
        assert name in SOURCE_FIELDS or getattr(weights, name) is tensor
    rows = list_tile_rows(problem.intermediate, 1, problem.intermediate, gated=True)
    assert inputs.weights.w1_scale is not None
    expected_tensors = tile_weights(
        inputs.weights.w1, inputs.weights.w1_scale, rows, PackedFormat("e2m1")
    )
    for name, tensor in zip(("w1_tiles", "w1_tile_scales"), expected_tensors, strict=True):
        assert torch.equal(getattr(weights, name), tensor)
    assert kernel.prepare_weights(weights).w1_tiles is not weights.w1_tiles  # prepares them again


@pytest.mark.parametrize(
    ("rows", "block_m"),
    [(4, 0), (5, 32), (21, 32), (22, 64), (55, 64), (56, 128), (640, 128), (700, 128)],
)
def test_calls_use_prepared_weights_depending_on_rows(
    rows: int, block_m: int, launched: list[int]
) -> None:
    kernel, inputs = make_prepared_kernel(
        tokens=rows * 2, experts=6, top_k=3, hidden=32, intermediate=32
    )
    config_without_prepared = choose_config(
        kernel.problem, kernel.problem.tokens, supported_paths(kernel.problem)
    )
    call_kernel(kernel, inputs, kernel.prepare_weights(inputs.weights))
    if block_m:
        assert launched == [block_m, block_m]
    else:
        assert not launched
        assert config_without_prepared.path != "grouped_w4"


@pytest.mark.parametrize(
    ("quant", "scale_dtype", "rows", "block_m"),
    [
        ("int4_w4a16_group:group=32", torch.float32, 5, 0),
        ("int4_w4a16_group:group=32", torch.float32, 6, 32),
        ("int4_w4a16_group:group=32", torch.float16, 3, 0),
        ("int4_w4a16_group:group=32", torch.float16, 4, 32),
        ("int4_w4a16_group:group=32", torch.bfloat16, 1, 0),
        ("int4_w4a16_group:group=32", torch.bfloat16, 2, 32),
        ("int4_w4a16_group:group=32", torch.float32, 512, 128),
        ("int4_w4a16_group:group=32", torch.float32, 513, 0),
        ("int4_w4a16_group:group=32", torch.float16, 768, 128),
        ("int4_w4a16_group:group=32", torch.float16, 769, 0),
        ("int4_w4a16_group:group=32", torch.bfloat16, 2049, 128),
        ("int4_w4a16_group:group=32,zero_points=true", torch.bfloat16, 2049, 0),
        ("nvfp4_w4a16", None, 1, 0),
        ("nvfp4_w4a16", None, 2, 32),
        ("nvfp4_w4a16", None, 2049, 0),
    ],
)
def test_range_of_rows_that_use_prepared_weights(
    quant: str, scale_dtype: torch.dtype | None, rows: int, block_m: int, launched: list[int]
) -> None:
    kernel, inputs = make_prepared_kernel(
        tokens=rows, experts=2, top_k=2, hidden=32, intermediate=32, quant=quant
    )
    weights = inputs.weights
    if scale_dtype is not None:
        assert weights.w1_scale is not None
        assert weights.w2_scale is not None
        converted_scales = weights.w1_scale.to(scale_dtype), weights.w2_scale.to(scale_dtype)
        weights = replace(weights, w1_scale=converted_scales[0], w2_scale=converted_scales[1])
    config = kernel.experts._choose_config(inputs.x_TH, kernel.prepare_weights(weights))  # type: ignore[attr-defined]
    assert (config.gemm1.block_m if config.path == "grouped_w4" else 0) == block_m
    assert not launched


# Mean rows per expert from which prepared weights are faster on an H200 (2026-11-30, triton 3.6.0).
@pytest.mark.parametrize(
    ("layer", "quant", "scale_dtype", "crossover"),
    [
        ((96, 4, 2560, 512), "int4_w4a16_group:group=128", torch.bfloat16, 2.6),
        ((128, 8, 2048, 768), "int4_w4a16_group:group=128", torch.bfloat16, 4.7),
        ((64, 6, 2048, 1408), "int4_w4a16_group:group=128", torch.bfloat16, 5.1),
        ((48, 4, 3072, 384), "int4_w4a16_group:group=128", torch.bfloat16, 8.3),
        ((48, 4, 3072, 384), "int4_w4a16_group:group=128", torch.float16, 11.6),
        ((48, 4, 3072, 384), "int4_w4a16_group:group=128", torch.float32, 14.8),
        ((128, 8, 4096, 1536), "int4_w4a16_group:group=128", torch.float32, 9.4),
        ((32, 4, 2880, 2880), "int4_w4a16_group:group=64", torch.float16, 4.3),
        ((64, 6, 2048, 1408), "mxfp4_w4a16", torch.uint8, 5.0),
        ((48, 4, 3072, 384), "mxfp4_w4a16", torch.uint8, 11.4),
        ((48, 4, 3072, 384), "nvfp4_w4a16", torch.float8_e4m3fn, 6.4),
    ],
    ids=str,
)
def test_minimum_number_of_rows_is_near_the_measured_crossover(
    layer: tuple[int, int, int, int], quant: str, scale_dtype: torch.dtype, crossover: float
) -> None:
    experts, top_k, hidden, intermediate = layer
    problem = Problem(
        tokens=1,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        quant=quant,
    )
    min_tokens = grouped_w4_config.min_prepared_tokens(problem, scale_dtype)
    assert abs(min_tokens * top_k / experts - crossover) <= 2.5


def test_strided_weights_are_prepared(launched: list[int]) -> None:
    kernel, inputs = make_prepared_kernel()
    strided_w1 = torch.empty(*inputs.weights.w1.shape, 2, dtype=torch.uint8)[..., 0].copy_(
        inputs.weights.w1
    )
    weights = kernel.prepare_weights(replace(inputs.weights, w1=strided_w1))
    assert torch.equal(
        call_kernel(kernel, inputs, weights),
        call_kernel(kernel, inputs, kernel.prepare_weights(inputs.weights)),
    )
    assert len(launched) == 4


@pytest.mark.share(5)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_cases_are_proven(changes: dict[str, Any], machine: Machine) -> None:
    """The harness prepares weights itself, and calls the kernel with and without prepared
    weights.
    """
    problem = replace(MXFP4, tokens=60, **changes)
    proof = prove(Case(*PAIR, problem, "zipf"), machine)
    assert proof.passed, str(proof)


def test_the_harness_detects_wrongly_prepared_weights(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = GroupedW4Path.prepare

    def prepare_wrongly(
        self: GroupedW4Path, weights: ExpertWeights, out: dict[str, torch.Tensor]
    ) -> None:
        original(self, weights, out)
        out["w2_tile_scales"][-1].zero_()

    monkeypatch.setattr(GroupedW4Path, "prepare", prepare_wrongly)
    proof = prove(Case(*PAIR, replace(MXFP4, tokens=60), "uniform"), machine)
    assert proof.failures
    assert all(failure.startswith("prepared_weights: ") for failure in proof.failures)


@pytest.mark.parametrize("misaligned", ["w1", "w2", "w1_scale", "w2_scale"])
def test_misaligned_weights_are_prepared(misaligned: str) -> None:
    kernel, inputs = make_prepared_kernel()
    tensor: torch.Tensor = getattr(inputs.weights, misaligned)
    copy_with_offset = torch.empty(tensor.numel() + 1, dtype=torch.uint8)[1:].view(tensor.shape)
    weights = kernel.prepare_weights(
        replace(inputs.weights, **{misaligned: copy_with_offset.copy_(tensor)})
    )
    assert torch.equal(
        call_kernel(kernel, inputs, weights),
        call_kernel(kernel, inputs, kernel.prepare_weights(inputs.weights)),
    )


def test_weights_are_not_kept_alive() -> None:
    kernel, inputs = make_prepared_kernel()
    w1 = inputs.weights.w1.clone()
    weights, plan = kernel.prepare_weights(replace(inputs.weights, w1=w1)), kernel.plan()
    plan(inputs.x_TH, weights, inputs.routing)
    tiles_ref, memory_ref = weakref.ref(weights.w1_tiles), StorageWeakRef(w1.untyped_storage())
    w1.data = torch.empty(0, dtype=torch.uint8)
    gc.collect()
    assert memory_ref.expired()
    del weights
    gc.collect()
    assert tiles_ref() is None


def test_a_batch_invariant_layer_prepares_nothing() -> None:
    kernel, inputs = make_prepared_kernel(batch_invariant=True)
    assert kernel.prepare_weights(inputs.weights) is inputs.weights


def test_tokens_without_an_adapter_use_prepared_weights(launched: list[int]) -> None:
    kernel, inputs = make_prepared_kernel(lora="adapters=2,rank=8")
    weights = kernel.prepare_weights(inputs.weights)
    call_kernel(kernel, inputs, weights)
    assert not launched
    routing = Routing(inputs.routing.topk_weights_TK, inputs.routing.topk_ids_TK, "none")
    kernel(inputs.x_TH, weights, routing)
    assert launched == [32, 32]


def test_prepared_memory_is_as_documented() -> None:
    problem = Problem(1, 4096, 14336, 8, 2, quant="mxfp4_w4a16")
    specs = make_kernel(*PAIR, problem).experts.prepared_specs()
    weight_bytes = 3 * 8 * 4096 * 14336 // 2
    assert sum(spec.nbytes for spec in specs.values()) == weight_bytes * 17 // 16


def test_calls_with_prepared_weights_need_no_workspace_for_weights() -> None:
    with_few_tokens, with_many_tokens = (
        make_prepared_kernel(tokens=tokens, experts=6, top_k=3)[0].workspace_specs(tokens)
        for tokens in (40, 100)
    )
    # With 20 rows per expert, only calls with prepared weights use this path.
    assert "permuted_x" in with_few_tokens
    assert "tiled_words" not in with_few_tokens
    assert "tiled_words" in with_many_tokens
