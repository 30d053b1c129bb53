"""`mk tune` refuses choices that do not compile, and estimates their shared memory."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from experts.triton.configs.select import override_config
from experts.triton.launch_config import (
    Device,
    LaunchConfig,
    MoEConfig,
    clamp,
    gemms,
    shared_bytes,
)
from experts.triton.standard import TritonExperts
from modular_kernel.catalog import make_kernel
from modular_kernel.measure.cases import quantize
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.cases.quantized import list_schemes
from modular_kernel.testing.compile.report import CompileRecord
from modular_kernel.tuning import compilation
from modular_kernel.tuning.compilation import Compiler, CompileTask, TunedPair, compile_choice

MACHINE = Machine("cuda", (9, 0), frozenset({"triton"}), name="NVIDIA H200")
PAIR = TunedPair("MoEPrepareAndFinalizeNoEP", "TritonExperts", MACHINE)
BATCHED = TunedPair("BatchedPrepareAndFinalize", "BatchedTritonExperts", MACHINE)
PROBLEM = Problem(tokens=64, hidden=512, intermediate=512, experts=4, top_k=2)
VALID_CHOICE = MoEConfig(
    LaunchConfig(16, 64, 128, 1, 4, 3), LaunchConfig(16, 64, 64, 1, 4, 3), "aligned"
)
# Rows are not aligned to vectors, so elements are loaded one by one, and registers are spilled.
SPILLING_PROBLEM = replace(PROBLEM, hidden=504)
TILES = (
    LaunchConfig(16, 64, 128, 1, 4, 4),
    LaunchConfig(32, 64, 64, 1, 4, 2),
    LaunchConfig(64, 128, 128, 1, 4, 3),
    LaunchConfig(128, 64, 64, 1, 8, 4),
)


def compile_and_get_reason(pair: TunedPair, problem: Problem, choice: MoEConfig) -> str:
    return compile_choice(
        CompileTask(pair, pair.make_search_space(problem), problem, (choice,)), choice
    )


def test_valid_choice_compiles() -> None:
    for pair in (PAIR, BATCHED):
        assert compile_and_get_reason(pair, PROBLEM, VALID_CHOICE) == ""
    problem = replace(PROBLEM, bias=True, expert_map=True, local_experts=3)
    assert compile_and_get_reason(PAIR, problem, VALID_CHOICE) == ""
    gemm_records = [r for r in compile_launches(problem, VALID_CHOICE) if "gemm" in r.kernel]
    assert [record.config["HAS_BIAS"] for record in gemm_records] == [True, True]


def test_spilling_choice_is_refused() -> None:
    assert "registers are spilled" in compile_and_get_reason(PAIR, SPILLING_PROBLEM, VALID_CHOICE)


def test_choice_that_does_not_compile_is_refused() -> None:
    invalid_choice = replace(VALID_CHOICE, gemm1=replace(VALID_CHOICE.gemm1, block_n=48))
    assert compile_and_get_reason(PAIR, PROBLEM, invalid_choice).startswith("does not compile")


def test_compiler_processes_give_the_same_reason() -> None:
    with Compiler(workers=1) as compiler:
        space = PAIR.make_search_space(PROBLEM)
        compiler.submit(PAIR, space, PROBLEM, [VALID_CHOICE])
        assert compiler.wait_compiled(PAIR, space, PROBLEM, VALID_CHOICE) is None
        refusal = compiler.wait_compiled(
            PAIR, PAIR.make_search_space(SPILLING_PROBLEM), SPILLING_PROBLEM, VALID_CHOICE
        )
    assert refusal is not None
    assert "registers are spilled" in refusal.reason
    assert not refusal.is_wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quant", ["none", *list_schemes()])
def test_compiled_calls_have_the_dtypes_of_timed_calls(quant: str, dtype: torch.dtype) -> None:
    """If the dtypes differed, a kernel would be compiled again when it is timed."""
    problem = replace(PROBLEM, hidden=128, intermediate=128, quant=quant, dtype=dtype)
    unquantized = ExpertWeights(
        torch.ones(problem.e, problem.w1_rows, 128, dtype=dtype),
        torch.ones(problem.e, 128, 128, dtype=dtype),
    )
    timed_weights = quantize(unquantized, problem)
    compiled_weights = compilation.make_meta_inputs(problem)[1]
    for name, tensor in vars(timed_weights).items():
        meta_tensor = getattr(compiled_weights, name)
        if tensor is None:
            assert meta_tensor is None, name
        else:
            assert (meta_tensor.dtype, meta_tensor.shape) == (tensor.dtype, tensor.shape), name


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block", "int8_w8a16_group", "mxfp4_w4a16"])
def test_estimated_shared_memory_is_an_upper_bound(quant: str) -> None:
    problem, device = replace(PROBLEM, quant=quant), Device.from_machine(MACHINE)
    first, second = gemms(problem)
    for tile in TILES:
        choice = MoEConfig(clamp(tile, first, device), clamp(tile, second, device), "aligned")
        launch_records = compile_launches(problem, choice)
        records = [r for r in launch_records if r.kernel == "grouped_gemm_kernel"]
        assert len(records) == 2
        for record, clamped, gemm in zip(
            records, (choice.gemm1, choice.gemm2), (first, second), strict=True
        ):
            assert record.shared <= shared_bytes(clamped, gemm, device), (gemm, clamped)
            if quant == "none":
                assert record.shared >= 0.8 * shared_bytes(clamped, gemm, device), (gemm, clamped)


def compile_launches(problem: Problem, choice: MoEConfig) -> Iterator[CompileRecord]:
    with override_config(choice):
        kernel = make_kernel(PAIR.prepare_finalize, PAIR.experts, problem, machine=MACHINE)
        yield from compilation.compile_kernels(kernel, "sm_90")


@pytest.mark.parametrize("tokens", [30, 200])
def test_prepared_weights_are_not_tiled_again(tokens: int) -> None:
    pair, problem = replace(PAIR, prepared=True), replace(PROBLEM, quant="mxfp4_w4a16")
    problem, names = problem.with_tokens(tokens), (PAIR.prepare_finalize, PAIR.experts)
    with TritonExperts.described(MACHINE):
        space = pair.make_search_space(problem)
        choice = space.untuned(tokens)
        assert compile_choice(CompileTask(pair, space, problem, (choice,)), choice) == ""
        with space.using(choice):
            kernel = make_kernel(*names, problem, machine=MACHINE)
            unprepared_kernels, prepared_kernels = (
                [
                    record.kernel
                    for record in compilation.compile_kernels(kernel, "sm_90", prepared=prepared)
                ]
                for prepared in (False, True)
            )
    assert unprepared_kernels.count("tile_weights_kernel") == 2
    expected_kernels = [name for name in unprepared_kernels if name != "tile_weights_kernel"]
    assert prepared_kernels == expected_kernels
