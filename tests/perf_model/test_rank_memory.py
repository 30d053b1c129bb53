"""Estimates of the memory of a rank agree with what the parts declare and allocate."""

from dataclasses import replace

import pytest

from modular_kernel.catalog import check, load_catalog
from modular_kernel.perf_model.hardware import Cluster
from modular_kernel.perf_model.memory import (
    Memory,
    check_memory,
    estimate_memory,
    estimate_workspace,
    exchange_bytes,
)
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.tensors import BatchedShape, StandardShape
from modular_kernel.workspace import workspace_bytes
from prepare_finalize.pplx.part import _make_shape
from prepare_finalize.symm_mem.group import align_up
from prepare_finalize.symm_mem.launch import buffer_sections

HOPPER = Cluster().machine(frozenset({"triton", "ml_dtypes"}))
DEEPSEEK = Problem(4096, 7168, 2048, 256, 8, parallel=Parallel(8))
QUANTS = ("none", "fp8_w8a8_block", "fp8_w8a8_channel")
NO_EP, LOW_LATENCY = "MoEPrepareAndFinalizeNoEP", "DeepEPLLPrepareAndFinalize"


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("tokens", [1, 128, 4096])
def test_exchange_buffers_are_those_that_the_parts_allocate(quant: str, tokens: int) -> None:
    problem = replace(DEEPSEEK, quant=quant, tokens=tokens)
    heap_bytes = 2 * sum(align_up(section.nbytes) for section in buffer_sections(problem).values())
    assert exchange_bytes("SymmMemPrepareAndFinalize", problem) == pytest.approx(
        heap_bytes, rel=0.03
    )
    library_bytes = _make_shape(problem).device_bytes(8)
    total_bytes = exchange_bytes("PplxPrepareAndFinalize", problem)
    batched_bytes = exchange_bytes("BatchedPrepareAndFinalize", problem)
    assert total_bytes - batched_bytes == pytest.approx(library_bytes, rel=0.05)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize(
    ("name", "world"), [(NO_EP, 1), ("BatchedPrepareAndFinalize", 1)], ids=lambda x: str(x)
)
def test_buffers_of_one_rank_are_those_that_the_parts_declare(
    quant: str, name: str, world: int
) -> None:
    problem = replace(DEEPSEEK, quant=quant, tokens=300, parallel=Parallel(world))
    part = load_catalog().prepare_finalize(name)(problem)
    declared = workspace_bytes(part.workspace_shapes(300))
    assert exchange_bytes(name, problem) == pytest.approx(declared, rel=0.05, abs=1024)


def test_the_low_latency_buffer_has_four_rows_for_each_expert_and_token() -> None:
    nbytes = exchange_bytes(LOW_LATENCY, DEEPSEEK)
    assert nbytes == 256 * 4096 * (4 * (7168 * 2 + 16) + 7168 * 2)
    assert exchange_bytes(LOW_LATENCY, DEEPSEEK.with_tokens(1)) == nbytes // 32, "128 at least"


@pytest.mark.parametrize(
    ("name", "quant"),
    [("CutlassRowwiseExpertsFP8", "fp8_w8a8_channel"), ("TritonExperts", "none"),
     ("TritonExperts", "fp8_w8a8_block"), ("TritonExperts", "mxfp4_w4a16"),
     ("BatchedCutlassExpertsFP8", "fp8_w8a8_channel"), ("BatchedTritonExperts", "none")],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [1024, 65536])
def test_estimated_workspace_covers_the_declared_one(name: str, quant: str, tokens: int) -> None:
    """The estimate is one to about two times the size that a part declares, so it omits nothing."""
    problem = replace(DEEPSEEK, quant=quant)
    part = load_catalog().experts(name)
    batched = part.requires.activation_format.value == "batched_experts"
    shape = BatchedShape(32, tokens) if batched else StandardShape(tokens, 8)
    with part.described(HOPPER):
        declared = part(problem).workspace_shapes(shape)
    nbytes = workspace_bytes({**declared.buffers(), "output": declared.output})
    unpacked = 32 * 3 * 7168 * 2048 if quant == "mxfp4_w4a16" else 0
    assert nbytes * 0.99 <= estimate_workspace(name, problem, shape) <= 2.1 * nbytes + unpacked


def test_layers_have_own_weights_and_share_other_memory() -> None:
    one_rank = estimate_memory(
        NO_EP, "TritonExperts", replace(DEEPSEEK, parallel=Parallel()), HOPPER
    )
    assert one_rank.weights == 256 * 3 * 7168 * 2048 * 2
    eight_ranks = estimate_memory(
        "SymmMemPrepareAndFinalize", "TritonExperts", DEEPSEEK, HOPPER, layers=58
    )
    assert eight_ranks.weights == 58 * one_rank.weights / 8
    one_layer = estimate_memory("SymmMemPrepareAndFinalize", "TritonExperts", DEEPSEEK, HOPPER)
    assert (eight_ranks.workspace, eight_ranks.exchange) == (
        one_layer.workspace,
        one_layer.exchange,
    )
    assert one_layer.workspace > one_rank.workspace, "tokens of 8 ranks may arrive"
    bounded = replace(DEEPSEEK, max_received=8192)
    part = "TorchAll2AllPrepareAndFinalize"
    bounded_memory, unbounded_memory = (
        estimate_memory(part, "TritonExperts", p, HOPPER) for p in (bounded, DEEPSEEK)
    )
    assert bounded_memory.workspace < unbounded_memory.workspace / 3
    assert bounded_memory.exchange < unbounded_memory.exchange
    assert str(bounded_memory).startswith(f"{bounded_memory.total / 1e9:.1f} GB (")


def test_small_sizes_are_not_printed_as_zero() -> None:
    assert str(Memory(2e8, 0, 0, 3)) == "0.2 GB (0.2 of weights)"
    assert str(Memory(4e7, 0, 4_000_000, 0)) == "less than 0.05 GB"
    assert str(Memory(4e7, 0, 40_000_000, 0)) == "0.1 GB"


def test_pair_that_exceeds_known_memory_is_refused() -> None:
    problem, pair = replace(DEEPSEEK, parallel=Parallel()), (NO_EP, "TritonExperts")
    total = int(estimate_memory(*pair, problem, HOPPER).total)

    def find_rejections(memory: int | None) -> list[str]:
        verdict = check(*pair, problem, replace(HOPPER, memory=memory))
        assert verdict.ok, "make_kernel has no rule on memory"
        return [f"{r.rule}: {r.got}, {r.need}" for r in check_memory(verdict).rejections]

    assert find_rejections(None) == find_rejections(total + 1) == []
    (reason,) = find_rejections(total - 1)
    assert reason.startswith(f"memory: {total / 1e9:.1f} GB (22.5 of weights, ")
    assert reason.endswith(f"<= {total / 1e9:.1f} GB of NVIDIA H200 sm_90")
    refused = check("BatchedPrepareAndFinalize", "TritonExperts", problem, HOPPER)
    assert check_memory(refused) is refused
    assert check_memory(check(NO_EP, "TorchExperts", problem, Machine("cpu"))).ok
