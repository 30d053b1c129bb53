"""TritonKernelsExperts, with a stand-in for the ragged GEMM of triton_kernels."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from vendor_stand_in import TritonKernels, library_site, prove_part, triton_kernels_3_5

from experts.triton_kernels import library
from experts.triton_kernels.tile_maps import (
    TILE_ROWS,
    TileMaps,
    max_num_tiles,
    tile_maps_ref,
    tile_specs,
    write_tile_maps,
)
from modular_kernel.errors import ConfigurationError
from modular_kernel.quant.quantized_weights import dequantize
from modular_kernel.spec.problem import Combine, Problem

SWIGLU_OAI = "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true"
BASE = Problem(tokens=17, hidden=48, intermediate=80, experts=5, top_k=2)


@pytest.mark.parametrize(
    ("change", "routing"),
    [
        ({}, "uniform"),
        ({"top_k": 3, "hidden": 104}, "duplicates"),
        ({"tokens": 1, "top_k": 1}, "uniform"),
        ({"tokens": 0}, "uniform"),
        ({"experts": 1, "top_k": 1, "tokens": 129}, "all_to_one"),
        ({"experts": 300, "top_k": 2, "tokens": 9}, "zipf"),
        ({"activation": "relu2"}, "empty_experts"),
        ({"activation": SWIGLU_OAI}, "zipf"),
        ({"combine": Combine.TOPK_WEIGHTED, "routed_scaling_factor": 2.5}, "skips"),
        ({"expert_map": True, "local_experts": 3}, "out_of_range"),
        ({"inplace": True, "top_k": 3}, "all_skipped"),
        ({"chunk_tokens": 7}, "skips"),
        ({"bias": True, "top_k": 3, "hidden": 104}, "duplicates"),
        ({"bias": True, "activation": SWIGLU_OAI}, "zipf"),
        ({"bias": True, "combine": Combine.TOPK_WEIGHTED}, "skips"),
        ({"bias": True, "routed_scaling_factor": 2.5, "chunk_tokens": 7}, "skips"),
        ({"bias": True, "expert_map": True, "local_experts": 3}, "out_of_range"),
        ({"bias": True, "activation": "relu2", "tokens": 1}, "uniform"),
    ],
)
def test_cases_are_proven(change: dict[str, Any], routing: str) -> None:
    proof = prove_part(TritonKernels, replace(BASE, **change), routing)
    assert proof.passed, str(proof)


# -------------------------------------------------------------------------------------- tile maps


def allocate_tile_maps(counts: list[int], rows: int) -> tuple[torch.Tensor, TileMaps]:
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    specs = tile_specs(rows, len(counts)).values()
    return starts, TileMaps(*(torch.full(s.shape, 7, dtype=torch.int32) for s in specs))


@pytest.mark.parametrize("counts", [[0, 129, 0, 1, 128, 0], [3], [0], [0, 0, 5], [17] * 40])
def test_tile_maps_equal_the_reference(counts: list[int]) -> None:
    starts, actual = allocate_tile_maps(counts, sum(counts) + 2)
    _, reference = allocate_tile_maps(counts, sum(counts) + 2)
    write_tile_maps(starts, actual)
    tile_maps_ref(starts, reference)
    for got, want in zip(vars(actual).values(), vars(reference).values(), strict=True):
        assert torch.equal(got, want)
    for index, size in enumerate(TILE_ROWS):
        tiles = [(b << 16) | e for e, n in enumerate(counts) for b in range(-(-n // size))]
        num_unused = max_num_tiles(sum(counts) + 2, len(counts)) - len(tiles)
        assert actual.maps[index].tolist() == tiles + [-1] * num_unused


# ---------------------------------------------------------------------------------------- defects


def make_arguments() -> dict[str, Any]:
    starts, tiles = allocate_tile_maps([7, 0, 33], 44)
    tile_maps_ref(starts, tiles)
    return {
        "rows": torch.randn(44, 32).bfloat16(),
        "weights": (torch.randn(3, 24, 32).bfloat16(), None),
        "bias": torch.randn(3, 24),
        "starts": starts,
        "tiles": tiles,
        "out": torch.full((44, 24), torch.nan, dtype=torch.bfloat16),
    }


def set_value(tensor: torch.Tensor, value: int, *index: int) -> torch.Tensor:
    """Return a copy with one element changed."""
    copied = tensor.clone()
    copied[index] = value
    return copied


def test_stand_in_equals_float64() -> None:
    arguments = make_arguments()
    library.ragged_matmul(triton_kernels_3_5, **arguments)
    sums = arguments["rows"][7:40].float() @ arguments["weights"][0][2].float().T
    assert torch.equal(arguments["out"][7:40], (sums + arguments["bias"][2]).bfloat16())
    assert arguments["out"][40:].isnan().all()
    library.ragged_matmul(triton_kernels_3_5, **arguments | {"bias": None})
    assert torch.equal(arguments["out"][7:40], sums.bfloat16())


def test_biases_of_any_dtype_and_strides_are_accepted() -> None:
    arguments = make_arguments()
    rounded = arguments["bias"].bfloat16()
    spaced = torch.full((3, 2, 48), torch.nan)
    spaced[:, 0, ::2] = rounded.float()
    results = list[torch.Tensor]()
    for bias in (rounded.float(), rounded, spaced[:, 0, ::2], rounded.T.contiguous().T):
        library.ragged_matmul(triton_kernels_3_5, **arguments | {"bias": bias})
        results.append(arguments["out"][:40].clone())
    assert not torch.equal(rounded.float(), arguments["bias"])
    for result in results[1:]:
        assert torch.equal(result, results[0])


def change_maps(
    arguments: dict[str, Any], of: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    return {"tiles": replace(arguments["tiles"], maps=of(arguments["tiles"].maps))}


def change_counts(
    arguments: dict[str, Any], of: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    return {"tiles": replace(arguments["tiles"], counts=of(arguments["tiles"].counts))}


DEFECTS: dict[str, Any] = {
    "too few starts": lambda arguments: {"starts": arguments["starts"][:-1]},
    "starts of int64": lambda arguments: {"starts": arguments["starts"].long()},
    "starts that are ends": lambda arguments: {"starts": set_value(arguments["starts"], 7, 0)},
    "a count that is too large": lambda arguments: change_counts(
        arguments, lambda counts: set_value(counts, 8, 0)
    ),
    "a tile twice": lambda arguments: change_maps(arguments, lambda m: m[:, :1].expand(4, 5)),
    "expert and tile exchanged": lambda arguments: change_maps(arguments, lambda m: m * 65536),
    "zero for no work": lambda arguments: change_maps(arguments, lambda m: m.clamp(min=0)),
    "too few programs": lambda arguments: change_maps(arguments, lambda m: m[:, :2]),
    "tiles of another size": lambda arguments: {
        "tiles": replace(arguments["tiles"], ends=arguments["tiles"].ends.flip(0))
    },
    "rows of float16": lambda arguments: {"rows": arguments["rows"].half()},
    "rows along M": lambda arguments: {"rows": arguments["rows"].T.contiguous().T},
    "another K": lambda arguments: {"rows": arguments["rows"][:, :16]},
    "biases of fewer experts": lambda arguments: {"bias": arguments["bias"][:2]},
    "biases of fewer columns": lambda arguments: {"bias": arguments["bias"][:, :16]},
    "one bias for all experts": lambda arguments: {"bias": arguments["bias"][0]},
    "results of fewer rows": lambda arguments: {"out": arguments["out"][:40]},
    "results of float32": lambda arguments: {"out": arguments["out"].float()},
}


def make_mxfp4_arguments() -> dict[str, Any]:
    """Return arguments with mxfp4 weights."""
    codes = torch.randint(0, 256, (3, 24, 64), dtype=torch.uint8)
    exponents = torch.randint(124, 128, (3, 24, 4), dtype=torch.uint8)
    rows = torch.randn(44, 128).bfloat16()
    return make_arguments() | {"rows": rows, "weights": (codes, exponents)}


def test_stand_in_equals_float64_with_mxfp4() -> None:
    arguments, problem = make_mxfp4_arguments(), Problem(1, 128, 128, 3, 1, quant="mxfp4_w4a16")
    library.ragged_matmul(triton_kernels_3_5, **arguments)
    values = dequantize(*arguments["weights"], None, problem.scheme)
    expected = arguments["rows"][7:40].float() @ values[2].T + arguments["bias"][2]
    torch.testing.assert_close(arguments["out"][7:40], expected.bfloat16(), rtol=1e-2, atol=1e-2)
    # A scale of 255 becomes infinite, and NaN where it is multiplied by a code of zero.
    codes, exponents = (tensor.clone() for tensor in arguments["weights"])
    codes[2], exponents[2, 5, 0] = 0x22, 255
    changed = {"rows": arguments["rows"].abs(), "weights": (codes, exponents)}
    library.ragged_matmul(triton_kernels_3_5, **arguments | changed)
    assert arguments["out"][7:40, 5].isinf().all()
    codes[2, 5, 0] = 0x20
    library.ragged_matmul(triton_kernels_3_5, **arguments | changed)
    assert arguments["out"][7:40, 5].isnan().all()


MXFP4_DEFECTS: dict[str, Any] = {
    "scales of float32": lambda c, s: (c, s.float()),
    "scales of 16 values": lambda c, s: (c, s.repeat(1, 1, 2)),
    "too few rows of scales": lambda c, s: (c, s[:, :-1]),
    "codes of int32": lambda c, s: (c.int(), s),
    "codes of another K": lambda c, s: (c[..., :-16], s),
}


@pytest.mark.parametrize("name", MXFP4_DEFECTS)
def test_defects_in_mxfp4_are_detected(name: str) -> None:
    arguments = make_mxfp4_arguments()
    with pytest.raises(AssertionError):
        call_with_each_tile_size(
            **arguments | {"weights": MXFP4_DEFECTS[name](*arguments["weights"])}
        )


@pytest.mark.parametrize("sizes", [(128, 256), (160, 72)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("routing", ["skips", "duplicates"])
def test_mxfp4_cases_are_proven(routing: str, bias: bool, sizes: tuple[int, int]) -> None:
    problem = Problem(9, *sizes, 5, 2, quant="mxfp4_w4a16", activation="swiglu_oai", bias=bias)
    for combine in (Combine.SUM, Combine.TOPK_WEIGHTED):
        proof = prove_part(TritonKernels, replace(problem, combine=combine), routing)
        assert proof.passed, str(proof)


def call_with_each_tile_size(**arguments: Any) -> None:
    """Make as many calls as there are tile sizes, which the stand-in uses in turn."""
    for _ in TILE_ROWS:
        library.ragged_matmul(triton_kernels_3_5, **arguments)


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_detected(name: str) -> None:
    arguments = make_arguments()
    with pytest.raises(AssertionError):
        call_with_each_tile_size(**arguments | DEFECTS[name](arguments))


def masked_load_kernel(in_ptr, out_ptr, count):
    """Load bytes with a mask, but without a value for masked bytes, as the library loads scales."""
    index = tl.arange(0, 128)
    tl.store(out_ptr + index, tl.load(in_ptr + index, mask=index < count))


def test_triton_sets_masked_bytes_to_zero() -> None:
    """The part relies on it in mxfp4 if K is not a multiple of 128."""
    source = ASTSource(
        JITFunction(masked_load_kernel), {"in_ptr": "*u8", "out_ptr": "*u8", "count": "i32"}
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    loads = re.findall(r"(.*)\n\s*@%p\d+ ld\.global\.b8 \{ (%rs\d+) \}", ptx)
    assert loads
    for previous, register in loads:
        assert previous.split() == ["mov.u16", f"{register},", "0x0;"]


# ------------------------------------------------------------------------------------ the library


def write_package(site: Path, name: str, *, old: bool = True) -> None:
    folder = site / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "target_info.py").write_text("here = 1\n")
    matmul_source = "from triton_kernels import target_info\ndef matmul_ogs(): ...\n"
    matmul_source += "class PrecisionConfig: ...\n"
    (folder / "matmul_ogs.py").write_text(matmul_source)
    field = "block_pid_map: dict[int, torch.Tensor]" if old else "block_pid_map_data"
    routing_source = f"class ExptData:\n    '''{field}'''\nclass RoutingData: ...\n"
    (folder / "routing.py").write_text(routing_source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with library_site(tmp_path, monkeypatch, library, "triton_kernels") as folder:
        yield folder


def test_a_copy_in_vllm_is_imported_under_its_own_name(site: Path) -> None:
    (site / "vllm").mkdir()
    (site / "vllm/__init__.py").write_text("raise SystemExit('vllm was imported')")
    write_package(site, "vllm/third_party/triton_kernels")
    assert library.load().RoutingData.__module__ == "triton_kernels.routing"
    assert "vllm" not in sys.modules


def test_another_interface_or_package_is_refused(site: Path) -> None:
    write_package(site, "triton_kernels", old=False)
    with pytest.raises(ConfigurationError, match="no block_pid_map: dict"):
        library.load()


def test_a_failed_import_leaves_no_modules(site: Path) -> None:
    write_package(site, "triton_kernels")
    (site / "triton_kernels/target_info.py").write_text("raise ImportError('no such driver')")
    with pytest.raises(ConfigurationError, match="no such driver, need a version for this triton"):
        library.load()
    assert "triton_kernels" not in sys.modules


def test_a_package_imported_from_elsewhere_is_kept(site: Path) -> None:
    write_package(site, "triton_kernels", old=False)
    imported = import_module("triton_kernels")
    (site / "vllm").mkdir()
    (site / "vllm/__init__.py").write_text("")
    write_package(site, "vllm/third_party/triton_kernels")
    with pytest.raises(ConfigurationError, match="was already imported from"):
        library.load()
    assert sys.modules["triton_kernels"] is imported
