"""`mk compile` launches every kernel, or gives a reason for skipping it.

These tests compile nothing.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from modular_kernel.testing.compile import cases as compile_cases
from modular_kernel.testing.compile import report as compile_report
from modular_kernel.testing.compile.cases import SkippedKernel, compile_all, find_gemm_operand
from modular_kernel.testing.compile.kernels_defined import defined_kernels
from modular_kernel.testing.compile.report import CompileRecord

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("experts", "prepare_finalize", "modular_kernel/ops")
GLUON = {"grouped_gemm_tma_kernel", "gemv_tma_down_kernel", "gemv_tma_gate_up_kernel"}


@pytest.fixture(autouse=True)
def record_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the names of launched kernels instead of compiling them."""

    def make_recording_run(launch: Any, driver: Any, records: list[CompileRecord]) -> Any:
        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            name, target = self.fn.__name__, driver.name
            records.append(CompileRecord(name, target, {}, {}, 4, 1, 0, 0, 0, 0, {}, 0.0))

        return run

    monkeypatch.setattr(compile_report, "_make_recording_run", make_recording_run)


def read_jitted_functions() -> dict[str, str]:
    """Return the source of all kernel files for each jitted function, without its definition."""
    paths = (p for package in PACKAGES for p in (ROOT / package).rglob("kernels/**/*.py"))
    sources = [path.read_text() for path in paths]
    all_sources = "\n".join(sources)
    functions = {}
    for source in sources:
        for node in ast.parse(source).body:
            decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
            if any(".jit" in ast.unparse(decorator) for decorator in decorators):
                assert isinstance(node, ast.FunctionDef)
                functions[node.name] = all_sources.replace(f"def {node.name}(", "")
    return functions


def test_kernels_are_listed_and_other_jitted_functions_are_used() -> None:
    kernels = {name for name in read_jitted_functions() if name.endswith("_kernel")}
    assert kernels == set(defined_kernels())
    assert len(kernels) >= 33
    assert kernels >= GLUON
    for name, source in read_jitted_functions().items():
        if name not in kernels:
            # The function is called, or passed to warp_specialize or to a reduction.
            uses = (f"{name}(", f"({name},", f"{name})")
            assert any(use in source for use in uses), name


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_is_launched_or_skipped_with_a_reason(target: str) -> None:
    result = compile_all(target)
    launched_kernels = {row.record.kernel for row in result.rows}
    skipped = {kernel.kernel: kernel.reason for kernel in result.left_out}
    assert launched_kernels | set(skipped) == set(defined_kernels())
    hopper_kernels = {
        *GLUON,
        "dequantize_kernel",
        "shrink_tiles_kernel",
        "select_expert_tiles_kernel",
        "grouped_gemm_w4_tma_kernel",
        "tile_weights_kernel",
    }
    expected = {} if target == "sm_90" else dict.fromkeys(hopper_kernels, "sm_90 only")
    if target == "sm_90":  # tests/compile/test_dequantized_compile.py compiles this kernel.
        expected["select_expert_tiles_kernel"] = "launched only for weights of more than 1 GiB"
    if target == "sm_80":
        expected["amax_kernel"] = "fp8 only, sm_89 or newer"
    assert skipped == expected


def test_kernel_without_a_case_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cases, "_list_steps", lambda machine, target, only: [])
    expected = {
        SkippedKernel(k.name, k.module, k.left_out_reason) for k in defined_kernels().values()
    }
    assert sum(kernel.reason == "" for kernel in expected) == len(expected) - 1
    assert set(compile_all("sm_90").left_out) == expected


@pytest.mark.parametrize("only", ["BatchedTritonExperts T4-", "unwritten pairs"])
def test_name_filter_selects_cases(only: str) -> None:
    result = compile_all("sm_90", name_filter=only)
    assert result.rows
    assert all(only in row.case for row in result.rows)
    assert result.left_out == ()


@pytest.mark.parametrize("only", ["combine_kernel", "gemv_w4"])
def test_name_filter_selects_kernels(only: str) -> None:
    """All kernels whose names match are compiled, regardless of the case."""
    result = compile_all("sm_90", name_filter=only)
    assert {row.record.kernel for row in result.rows} == set(defined_kernels(only))
    assert not any(only in row.case for row in result.rows)
    assert result.left_out == ()


def test_skipped_kernel_selected_by_name_has_its_reason() -> None:
    (skipped,) = compile_all("sm_80", name_filter="tile_weights_kernel").left_out
    assert skipped.reason == "sm_90 only"


# For kernels whose instructions `mk compile` does not check, the test file that checks them.
CHECKED_IN_TESTS = {
    "gemv_tma_down_kernel": "test_kernels_compile.py",
    "gemv_tma_gate_up_kernel": "test_kernels_compile.py",
    "gemv_w4_down_kernel": "test_gemv_w4_compile.py",
    "gemv_w4_gate_up_kernel": "test_gemv_w4_compile.py",
    "grouped_gemm_tma_kernel": "test_grouped_tma_compile.py",
    "grouped_gemm_w4_tma_kernel": "test_grouped_w4_compile.py",
    "moe_lora_a_kernel": "test_moe_lora_compile.py",
    "moe_lora_down_combine_kernel": "test_moe_lora_compile.py",
    "moe_lora_gate_up_b_kernel": "test_moe_lora_compile.py",
}
MATRIX_PRODUCT_FUNCTIONS = {"dot", "dot_scaled", "warpgroup_mma"}


def list_names_used() -> dict[str, set[str]]:
    """Return the names that each jitted function uses, by the name of the function."""
    names_by_function: dict[str, set[str]] = {}
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "jit" in ast.unparse(node.decorator_list):  # type: ignore[arg-type]
                attributes = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                names_by_function.setdefault(node.name, set()).update(attributes, names)
    return names_by_function


def test_instructions_of_every_matrix_product_are_checked() -> None:
    """New kernels, and kernels with a renamed operand, must be added to CHECKED_IN_TESTS."""
    names_by_function = list_names_used()

    def multiplies(name: str, callers: tuple[str, ...] = ()) -> bool:
        callees = names_by_function.get(name, set()) - {name, *callers}
        return bool(callees & MATRIX_PRODUCT_FUNCTIONS) or any(
            multiplies(c, (*callers, name)) for c in callees
        )

    kernels = {name: kernel for name, kernel in defined_kernels().items() if multiplies(name)}
    checked_by_mk_compile = set()
    for name, kernel in kernels.items():
        arguments = set(getattr(import_module(kernel.module), name).arg_names)
        if {"BLOCK_M", find_gemm_operand(name)} <= arguments:
            checked_by_mk_compile.add(name)
    assert len(checked_by_mk_compile) >= 8
    assert kernels.keys() == checked_by_mk_compile | CHECKED_IN_TESTS.keys()
    assert not checked_by_mk_compile & CHECKED_IN_TESTS.keys()
    for file in set(CHECKED_IN_TESTS.values()):
        assert "MMA" in (Path(__file__).parent / file).read_text()
