"""The name of an all2all backend and the quantization scheme select the pairing."""

from dataclasses import replace

import pytest
import torch

from modular_kernel.catalog import check, load_catalog
from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.integrations.fused_moe_method import (
    ALL2ALL,
    init_prepare_finalize,
    maybe_make_prepare_finalize,
    select_gemm_impl,
)
from modular_kernel.reference import float64_reference
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.testing.random_inputs import random_inputs

PROBLEM = Problem(tokens=9, hidden=64, intermediate=32, experts=4, top_k=2, dtype=torch.float32)
PROBLEM_OVER_RANKS = replace(PROBLEM, parallel=Parallel(2))
CPU_WITH_TRITON = Machine("cpu", packages=frozenset({"triton"}), interpreter=True)
CPU_ONLY = Machine("cpu")


def test_one_rank_needs_no_exchange() -> None:
    assert maybe_make_prepare_finalize(PROBLEM) is None
    assert maybe_make_prepare_finalize(PROBLEM, "pplx") is None
    x_TH, weights, routing = random_inputs(PROBLEM, torch.device("cpu"))
    kernel = init_prepare_finalize(PROBLEM, machine=CPU_ONLY)
    assert kernel.pairing == "MoEPrepareAndFinalizeNoEP x TorchExperts"
    expected = float64_reference(x_TH, weights, routing, PROBLEM)
    assert torch.allclose(kernel(x_TH, weights, routing).double(), expected, atol=1e-5)


AVAILABLE_BACKENDS = [
    b for b, part in ALL2ALL.items() if part in load_catalog().names("prepare_finalize")
]


@pytest.mark.parametrize("backend", AVAILABLE_BACKENDS)
def test_backend_and_quantization_select_the_pairing(backend: str) -> None:
    catalog = load_catalog()
    part = catalog.prepare_finalize(ALL2ALL[backend])
    bf16_problem = replace(
        PROBLEM_OVER_RANKS, dtype=torch.bfloat16, hidden=2048, intermediate=128, experts=64
    )
    machine = Machine("cuda", (9, 0), frozenset({"triton", *part.requires.packages}))
    for quant in ("none", "fp8_w8a8_block"):
        problem = replace(bf16_problem, quant=quant)
        supported = [
            name for name in catalog.names("experts") if check(part, name, problem, machine).ok
        ]
        if not supported:
            continue
        selected = select_experts(problem, part, machine)
        assert selected in supported
        assert selected in ("TritonExperts", "BatchedTritonExperts")


def select_experts(problem: Problem, part: type, machine: Machine) -> str:
    """Select as `select_gemm_impl` does, without creating the part that exchanges tokens."""
    from modular_kernel.integrations import fused_moe_method

    return fused_moe_method._select_experts(problem, part, load_catalog(), machine)


def test_selected_experts_support_the_problem() -> None:
    assert type(select_gemm_impl(PROBLEM, machine=CPU_ONLY)).__name__ == "TorchExperts"
    assert type(select_gemm_impl(PROBLEM, machine=CPU_WITH_TRITON)).__name__ == "TritonExperts"
    unsupported = replace(PROBLEM, top_k=33)
    with pytest.raises(IncompatibleError) as caught:
        select_gemm_impl(unsupported, machine=CPU_ONLY)
    assert "MoEPrepareAndFinalizeNoEP with any experts" in str(caught.value)
    assert {rejection.rule for rejection in caught.value.rejections} >= {"top_k"}


def test_at_least_nine_backends_are_available() -> None:
    assert len(AVAILABLE_BACKENDS) >= 9


def test_invalid_backends_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="all2all_backend: got 'carrier_pigeon'"):
        maybe_make_prepare_finalize(PROBLEM, "carrier_pigeon")
    for function in (maybe_make_prepare_finalize, init_prepare_finalize):
        with pytest.raises(ConfigurationError, match="all2all_backend: got None, need one of"):
            function(PROBLEM_OVER_RANKS)
    with pytest.raises(ConfigurationError, match="problem: got 7"):
        maybe_make_prepare_finalize(7)  # type: ignore[arg-type]
