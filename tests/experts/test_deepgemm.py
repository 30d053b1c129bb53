"""The DeepGEMM parts, with a stand-in that makes the same checks as the library."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vendor_stand_in import (
    BatchedDeepGemm,
    BatchedTritonOrDeepGemm,
    DeepGemm,
    TritonOrDeepGemm,
    deep_gemm_2,
    library_site,
    prove_part,
    stand_in_libraries,
)

from experts.deepgemm import library
from experts.deepgemm.align_rows import align_rows, aligned_specs, max_aligned_rows
from experts.deepgemm.triton_or_deepgemm import (
    BatchedTritonOrDeepGemmExperts,
    TritonOrDeepGemmExperts,
    min_tokens,
)
from modular_kernel.catalog import make_kernel
from modular_kernel.errors import ConfigurationError, StateError
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.replay.launch import launch
from modular_kernel.spec.problem import Combine, IdSpace, Machine, Problem
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.testing.cases.inputs import InputVariation, make_inputs
from modular_kernel.workspace import Workspace

# The interpreter runs our own kernels around the stand-in.
pytestmark = pytest.mark.cpu

BLOCK = "fp8_w8a8_block"
BASE = Problem(tokens=17, hidden=128, intermediate=128, experts=5, top_k=2)
COMMON: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "uniform"),
    ({"quant": BLOCK}, "skips"),
    ({"quant": BLOCK, "hidden": 256, "intermediate": 384}, "duplicates"),
    ({"quant": BLOCK, "tokens": 1, "top_k": 1}, "uniform"),
    ({"tokens": 0}, "uniform"),
    ({"activation": "relu2", "quant": BLOCK}, "empty_experts"),
    ({"activation": "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true"}, "zipf"),
    ({"combine": Combine.TOPK_WEIGHTED, "routed_scaling_factor": 2.5}, "skips"),
    ({"expert_map": True, "local_experts": 3, "quant": BLOCK}, "out_of_range"),
    ({"experts": 1, "top_k": 1, "tokens": 129, "quant": BLOCK}, "all_to_one"),
    ({"experts": 2, "top_k": 1, "tokens": 130}, "all_to_one"),
    ({"inplace": True, "top_k": 3}, "all_skipped"),
)


@pytest.fixture(autouse=True)
def reset_stand_in() -> Iterator[None]:
    deep_gemm_2.launched.clear()
    deep_gemm_2.alignment[0] = 128
    yield
    deep_gemm_2.alignment[0] = 128


@pytest.mark.parametrize(
    ("change", "routing"), [*COMMON, ({"chunk_tokens": 7, "quant": BLOCK}, "skips")]
)
def test_contiguous_cases_are_proven(change: dict[str, Any], routing: str) -> None:
    proof = prove_part(DeepGemm, replace(BASE, **change), routing)
    assert proof.passed, str(proof)


@pytest.mark.parametrize(("change", "routing"), COMMON)
def test_masked_cases_are_proven(change: dict[str, Any], routing: str) -> None:
    proof = prove_part(BatchedDeepGemm, replace(BASE, **change), routing)
    assert proof.passed, str(proof)


@pytest.mark.parametrize("layout", ["transposed", "shifted"])
@pytest.mark.parametrize("quant", ["none", BLOCK])
@pytest.mark.parametrize("part", [DeepGemm, BatchedDeepGemm, TritonOrDeepGemm])
def test_strided_weights_are_accepted(part: Any, quant: str, layout: str) -> None:
    proof = prove_part(part, replace(BASE, quant=quant), variation=InputVariation(layout=layout))
    assert proof.passed, str(proof)


# --------------------------------------------------- parts that select between Triton and DeepGEMM
# With two experts and top-2, each expert has all tokens.
FEW_ROWS = replace(BASE, experts=2, tokens=127)


@pytest.mark.parametrize("quant", ["none", BLOCK])
@pytest.mark.parametrize(("tokens", "uses_deepgemm"), [(127, False), (129, True)])
def test_selecting_part_is_proven(quant: str, tokens: int, uses_deepgemm: bool) -> None:
    assert min_tokens(FEW_ROWS, TritonOrDeepGemm.min_rows(FEW_ROWS)) == 128
    proof = prove_part(TritonOrDeepGemm, replace(FEW_ROWS, tokens=tokens, quant=quant))
    assert proof.passed, str(proof)
    assert bool(deep_gemm_2.launched) is uses_deepgemm


def test_smaller_layers_need_more_rows_for_deepgemm() -> None:
    rows_by_sizes = {(4096, 1536): 128, (4096, 1408): 256, (2048, 1024): 256, (2048, 768): 512}
    for (hidden, intermediate), rows in rows_by_sizes.items():
        problem = replace(BASE, hidden=hidden, intermediate=intermediate)
        assert TritonOrDeepGemmExperts.min_rows(problem) == rows, (hidden, intermediate)
        assert BatchedTritonOrDeepGemmExperts.min_rows(problem) == 64


@pytest.mark.parametrize("layout", ["plain", "shifted"])
def test_selecting_part_quantizes_activations_for_triton(layout: str) -> None:
    problem = replace(FEW_ROWS, tokens=129, quant=BLOCK, hidden=256)
    proof = prove_part(TritonOrDeepGemm, problem, variation=InputVariation(layout=layout))
    assert proof.passed, str(proof)
    assert bool(deep_gemm_2.launched) is (layout == "plain")


@pytest.mark.parametrize(("experts", "uses_deepgemm"), [(2, True), (5, False)])
def test_selecting_batched_part_is_proven(experts: int, uses_deepgemm: bool) -> None:
    proof = prove_part(BatchedTritonOrDeepGemm, replace(FEW_ROWS, experts=experts, tokens=40))
    assert proof.passed, str(proof)
    assert bool(deep_gemm_2.launched) is uses_deepgemm


@pytest.mark.parametrize("part", [TritonOrDeepGemm, BatchedTritonOrDeepGemm])
@pytest.mark.parametrize("change", [{"hidden": 48}, {"bias": True}, {"intermediate": 80}])
def test_sizes_that_the_library_does_not_support_run_on_triton(part: Any, change: Any) -> None:
    problem = replace(FEW_ROWS, tokens=130, **change)
    assert "all calls" in part.explained(problem)[0]
    assert part(problem)._deepgemm is None


def test_the_selection_is_reported() -> None:
    problem = replace(BASE, hidden=4096, intermediate=2048, experts=64, top_k=8)
    assert TritonOrDeepGemmExperts.explained(problem) == (
        "calls of fewer than 1024 tokens: TritonExperts",
        "calls of 1024 tokens or more: DeepGemmExperts, if weights are row-major",
    )
    assert BatchedTritonOrDeepGemmExperts.explained(problem) == (
        "experts with room for fewer than 512 rows: BatchedTritonExperts",
        "experts with room for 512 rows or more: BatchedDeepGemmExperts",
    )
    for part in (TritonOrDeepGemmExperts, BatchedTritonOrDeepGemmExperts):
        (explanation,) = part.explained(replace(problem, bias=True))
        assert explanation.endswith(
            "TritonExperts, because DeepGEMM does not support these sizes or options"
        )


def test_workspaces_are_sized_for_both_parts() -> None:
    """In a plan for many tokens, calls with few tokens run on Triton."""
    problem = replace(FEW_ROWS, tokens=200)
    with stand_in_libraries():
        part = TritonOrDeepGemm(problem)
        kernel = make_kernel("MoEPrepareAndFinalizeNoEP", TritonOrDeepGemm, problem, machine=CPU)
        plan = kernel.plan()
        for tokens, num_launches in ((200, 2), (50, 2), (128, 4)):
            inputs = make_inputs(problem.with_tokens(tokens), "uniform", torch.device("cpu"))
            plan(inputs.x_TH, inputs.weights, inputs.routing)
            assert len(deep_gemm_2.launched) == num_launches
    assert part is not None


CPU = Machine("cpu", None, frozenset({"triton", "ml_dtypes"}), interpreter=True)
LAUNCHES_AROUND_GEMMS = [
    *("count_pairs_kernel", "scan_counts_kernel", "align_rows_kernel"),
    *("permute_and_quantize_kernel", "quantize_rows_kernel", "weight_and_sum_kernel"),
]


def test_interpreted_launches_around_the_gemms_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single kernel permutes and quantizes x, and writes scales in the library's layout."""
    names: list[str] = []
    original_launch = launch.launch

    def record_and_launch(kernel: Any, grid: Any, **kwargs: Any) -> None:
        names.append(kernel.fn.__name__)
        original_launch(kernel, grid, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.startswith(("modular_kernel.ops.", "experts.")) and hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", record_and_launch)
    problem = replace(BASE, quant=BLOCK, hidden=256, intermediate=384)
    inputs = make_inputs(problem, "skips", torch.device("cpu"))
    kernel = make_kernel("MoEPrepareAndFinalizeNoEP", DeepGemm, problem, machine=CPU)
    plan = kernel.plan()
    actual = plan(inputs.x_TH, inputs.weights, inputs.routing)
    assert names == LAUNCHES_AROUND_GEMMS
    with prefer_torch_reference():
        expected = kernel(inputs.x_TH, inputs.weights, inputs.routing)
    assert torch.allclose(actual.float(), expected.float(), rtol=2**-6, atol=2**-10)


# ------------------------------------------------------------------------------------ the library
IMPORTS = "from ._C import m_grouped_fp8_gemm_nt_masked, m_grouped_bf16_gemm_nt_contiguous"


def write_package(site: Path, name: str, source: str = "", *, psum: bool = True) -> None:
    """Write a package like DeepGEMM.

    source: appended to its __init__.py.
    psum: whether its headers have the layout that marks a supported version.
    """
    folder = site / name
    headers = folder / "include/deep_gemm/scheduler"
    headers.mkdir(parents=True)
    (headers / "gemm.cuh").write_text("MGroupedContiguousWithPsumLayout" if psum else "nothing")
    (folder / "_C.py").write_text("m_grouped_fp8_gemm_nt_masked = 1\n"
                                  "m_grouped_bf16_gemm_nt_contiguous = 2\n")  # fmt: skip
    (folder / "__init__.py").write_text(f"{IMPORTS}\n__version__ = '2.5.0'\n{source}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")  # so that no nvcc is needed
    with library_site(tmp_path, monkeypatch, library, "deep_gemm", library._NAME) as folder:
        yield folder


def test_library_is_loaded_by_name(site: Path) -> None:
    write_package(site, "deep_gemm")
    assert library.load().m_grouped_fp8_gemm_nt_masked == 1


def test_a_copy_in_vllm_is_loaded_without_vllm(site: Path) -> None:
    (site / "vllm").mkdir()
    (site / "vllm/__init__.py").write_text("raise SystemExit('vllm was imported')")
    write_package(site, "vllm/third_party/deep_gemm")
    assert library.load().m_grouped_bf16_gemm_nt_contiguous == 2
    assert "vllm" not in sys.modules
    assert "deep_gemm" not in sys.modules


def test_missing_package_and_another_with_its_name_are_refused(site: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"got nothing, need DeepGEMM 2\.4\.2"):
        library.load()
    write_package(site, "deep_gemm", psum=False)
    with pytest.raises(ConfigurationError, match=r"unsupported deep_gemm 2\.5\.0: no MGrouped"):
        library.load()


def test_a_package_that_fails_to_load_is_reported_with_the_reason(site: Path) -> None:
    write_package(site, "deep_gemm", "assert None is not None, 'no CUDA_HOME'")
    with pytest.raises(ConfigurationError, match="no CUDA_HOME, need a build for this torch"):
        library.load()


def test_a_toolkit_without_compiler_is_refused(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image with CUDA's runtime libraries has the folder of the toolkit, but no nvcc."""
    write_package(site, "deep_gemm")
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("DG_JIT_NVCC_COMPILER", raising=False)
    nvcc = tmp_path / "bin/nvcc"
    with pytest.raises(ConfigurationError, match=rf"got no {nvcc}, need nvcc of the CUDA toolkit"):
        library.load()
    nvcc.parent.mkdir()
    nvcc.touch()
    assert library.load().m_grouped_fp8_gemm_nt_masked == 1


def test_another_alignment_of_the_library_is_refused() -> None:
    deep_gemm_2.alignment[0] = 64
    with pytest.raises(StateError, match="got 64, need 128"):
        library.grouped_gemm_contiguous(
            deep_gemm_2, (torch.empty(0), None), (torch.empty(0), None), *[None] * 2
        )


# ----------------------------------------------------------------------------------- aligned rows


@pytest.mark.parametrize("space", [IdSpace.LOCAL, IdSpace.GLOBAL])
def test_aligned_rows_equal_the_reference(space: IdSpace) -> None:
    counts = [0, 129, 0, 1, 128, 0]
    ids = torch.arange(6).repeat_interleave(torch.tensor(counts))
    ids = torch.cat((ids, torch.tensor([-1, 7])))[torch.randperm(260)].view(130, 2)
    expert_map, routed_ids = None, ids
    if space is IdSpace.GLOBAL:  # local experts in reverse order, and one expert of another rank
        expert_map = torch.tensor([5, 4, 3, 2, 1, 0, -1], dtype=torch.int32)
        routed_ids = torch.where((ids >= 0) & (ids < 6), 5 - ids, ids)
    results = []
    for align in (align_rows, align_rows_in_torch):
        invalid = torch.zeros(1, dtype=torch.int32)
        routing = DispatchedRouting(None, routed_ids, space, 7, expert_map, invalid)
        workspace = Workspace(aligned_specs(130, 2, 6), torch.device("cpu"), poison=True)
        results.append((*align(routing, 128, num_local=6, workspace=workspace), invalid))
        workspace.check_red_zones()
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    rows_TK, ends, invalid = results[0]
    assert int(invalid) == 1  # expert id 7
    assert ends.tolist() == [0, 129, 256, 257, 512, 512]
    for expert, first in ((1, 0), (3, 256), (4, 384)):
        want = torch.arange(first, first + counts[expert], dtype=torch.int32)
        assert torch.equal(rows_TK[ids == expert], want)
    assert bool((rows_TK[(ids < 0) | (ids > 5)] == -1).all())
    assert max_aligned_rows(258, 6, 128) == 8 * 128
    assert max_aligned_rows(3, 6, 128) == 3 * 128


def align_rows_in_torch(*args: Any, **kwargs: Any) -> Any:
    with prefer_torch_reference():
        return align_rows(*args, **kwargs)


# ---------------------------------------------------------------------------------------- defects


FP8 = torch.float8_e4m3fn


def make_contiguous_arguments(fp8: bool = True) -> dict[str, Any]:
    a, w = torch.randn(384, 256), torch.randn(3, 128, 256)
    ends = torch.tensor([7, 128, 130], dtype=torch.int32)
    shared = {"d": torch.zeros(384, 128).bfloat16(), "grouped_layout": ends,
              "use_psum_layout": True}  # fmt: skip
    if not fp8:
        return {"a": a.bfloat16(), "b": w.bfloat16(), **shared}
    sfa, sfb = torch.rand(2, 384).T, torch.rand(3, 1, 2)
    return {"a": (a.to(FP8), sfa), "b": (w.to(FP8), sfb), "disable_ue8m0_cast": True, **shared}


def make_masked_arguments() -> dict[str, Any]:
    a, w = torch.randn(3, 128, 256).to(FP8), torch.randn(3, 128, 256).to(FP8)
    sfa, sfb = torch.rand(3, 2, 128).transpose(1, 2), torch.rand(3, 1, 2)
    counts = torch.tensor([5, 0, 128], dtype=torch.int32)
    d = torch.zeros(3, 128, 128).bfloat16()
    return {"a": (a, sfa), "b": (w, sfb), "d": d, "masked_m": counts, "expected_m": 44,
            "disable_ue8m0_cast": True}  # fmt: skip


def test_the_stand_in_computes_and_overwrites_like_the_library() -> None:
    arguments = make_contiguous_arguments()
    deep_gemm_2.m_grouped_fp8_gemm_nt_contiguous(**arguments)
    (a, sfa), (w, sfb), d = arguments["a"], arguments["b"], arguments["d"]
    x = a[:7].float() * sfa[:7].repeat_interleave(128, 1)
    dequantized_w = w[0].float() * sfb[0].repeat_interleave(128, 1)
    expected = x @ dequantized_w.T
    # bf16 rounds by at most 2^-9. The float32 sums of K terms can have another order, which changes
    # each by at most 2^-24 K times the sum of the magnitudes of its terms.
    order_error = 2 * 2**-24 * x.shape[1] * (x.abs() @ dequantized_w.abs().T).max().item()
    torch.testing.assert_close(d[:7].float(), expected, rtol=2**-8, atol=order_error)
    assert not d[64:128].any()  # a half of a tile without used rows is skipped
    assert d[7:64].any()  # unused rows of a half with used rows are multiplied
    arguments = make_masked_arguments()
    deep_gemm_2.m_grouped_fp8_gemm_nt_masked(**arguments)
    assert arguments["d"][1].isnan().all()
    assert arguments["d"][0, 64:].isnan().all()
    assert not arguments["d"][0, :64].isnan().any()


def test_a_tile_that_reaches_into_the_next_expert_overwrites_it() -> None:
    """With capacity 16, a tile of the first expert overlaps the rows of the second expert."""
    a, w = torch.ones(2, 16, 64).bfloat16(), torch.ones(2, 8, 64).bfloat16()
    w[0] = 7
    d = torch.zeros(2, 16, 8).bfloat16()
    counts = torch.tensor([3, 3], dtype=torch.int32)
    deep_gemm_2.m_grouped_bf16_gemm_nt_masked(a, w, d, counts, 3)
    assert d[1, 0, 0] == 7 * 64  # instead of the second expert's result


UNALIGNED_ENDS = {"grouped_layout": torch.tensor([7, 20, 130], dtype=torch.int32)}
CONTIGUOUS_DEFECTS: dict[str, Any] = {
    "a plain sum of counts": UNALIGNED_ENDS,
    "an end beyond the rows": {"grouped_layout": torch.tensor([7, 128, 385], dtype=torch.int32)},
    "ends of int64": {"grouped_layout": torch.tensor([7, 128, 130])},
    "a first row, and ends": {"grouped_layout": torch.tensor([0, 7, 128, 130]).int()},
    "the other layout": {"use_psum_layout": False},
    "rows that are not whole tiles": lambda g: {
        "a": (g["a"][0][:383], torch.rand(2, 384).T[:383]), "d": g["d"][:383]
    },
    "row-major scales": lambda g: {"a": (g["a"][0], torch.rand(384, 2))},
    "too few groups of scales": lambda g: {"a": (g["a"][0], torch.rand(1, 384).T)},
    "scales of packed exponents": {"disable_ue8m0_cast": False},
    "scales of weights along K": lambda g: {"b": (g["b"][0], torch.rand(3, 2, 1))},
    "scales of every weight row": lambda g: {"b": (g["b"][0], torch.rand(3, 128, 2))},
    "weights along N": lambda g: {"b": (g["b"][0].mT.contiguous().mT, g["b"][1])},
    "rows with gaps": lambda g: {"a": (torch.zeros(384, 512).to(FP8)[:, :256], g["a"][1])},
    "results of float32": {"d": torch.zeros(384, 128)},
    "rows of another dtype": lambda g: {"a": (g["a"][0].view(torch.uint8), g["a"][1])},
}  # fmt: skip
MASKED_DEFECTS: dict[str, Any] = {
    "more rows than the capacity": {"masked_m": torch.tensor([5, 0, 129], dtype=torch.int32)},
    "counts of int64": {"masked_m": torch.tensor([5, 0, 128])},
    "too few counts": {"masked_m": torch.tensor([5, 0], dtype=torch.int32)},
    "no rows expected": {"expected_m": 0},
    "rows expected on the device": {"expected_m": torch.tensor(44)},
    "row-major scales": lambda g: {"a": (g["a"][0], torch.rand(3, 128, 2))},
    "scales of all groups' rows": lambda g: {
        "a": (g["a"][0], torch.rand(2, 3, 128).permute(1, 2, 0))
    },
    "scales of 16 bits": lambda g: {"a": (g["a"][0], g["a"][1].bfloat16())},
    "results of fewer rows": {"d": torch.zeros(3, 64, 128).bfloat16()},
    "gaps between groups": lambda g: {"a": (torch.zeros(3, 256, 256).to(FP8)[:, :128], g["a"][1])},
    "weights of another group": lambda g: {"b": (g["b"][0][:2], g["b"][1][:2])},
}


@pytest.mark.parametrize("name", CONTIGUOUS_DEFECTS)
def test_defects_in_contiguous_rows_are_detected(name: str) -> None:
    arguments, change = make_contiguous_arguments(), CONTIGUOUS_DEFECTS[name]
    with pytest.raises(RuntimeError, match="Assertion error"):
        deep_gemm_2.m_grouped_fp8_gemm_nt_contiguous(
            **arguments | (change(arguments) if callable(change) else change)
        )


@pytest.mark.parametrize("name", MASKED_DEFECTS)
def test_defects_in_masked_rows_are_detected(name: str) -> None:
    arguments, change = make_masked_arguments(), MASKED_DEFECTS[name]
    with pytest.raises(RuntimeError, match="Assertion error"):
        deep_gemm_2.m_grouped_fp8_gemm_nt_masked(
            **arguments | (change(arguments) if callable(change) else change)
        )


def test_defects_in_16_bits_are_detected() -> None:
    arguments = make_contiguous_arguments(fp8=False)
    deep_gemm_2.m_grouped_bf16_gemm_nt_contiguous(**arguments)
    for change in ({"a": arguments["a"].half()}, UNALIGNED_ENDS, {"d": arguments["d"][:, :64]}):
        with pytest.raises(RuntimeError, match="Assertion error"):
            deep_gemm_2.m_grouped_bf16_gemm_nt_contiguous(**arguments | change)
