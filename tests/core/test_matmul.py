"""Matrix products on a CPU do not read memory outside their operands.

For some shapes and strides, oneDNN would read outside them on CPUs with AMX
(modular_kernel.utils.matmul).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import moe_lora_calls
import pytest
import torch
from matmul_monitor import MatmulMonitor
from torch_part_cases import CASES

from modular_kernel import reference
from modular_kernel.catalog import this_machine
from modular_kernel.layers.router import Router
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.operators.gradients import compute_gradients
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing import Case, prove
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.utils.matmul import compact, linear, matmul

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
NAN = float("nan")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SIZES = [(0, 7, 5), (1, 7, 1), (1, 40, 16), (2, 1, 31), (17, 33, 80), (33, 7, 80), (33, 64, 80)]
pytestmark = pytest.mark.cpu


def copy_to_layout(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Copy a matrix to another layout, with NaN in the memory around and between its rows."""
    rows, columns = values.shape
    if layout.startswith("columns"):
        return copy_to_layout(values.T, layout.replace("columns", "rows")).T
    gap = 0 if layout == "rows" else 9
    buffer = values.new_full((rows + 2, columns + gap), NAN)
    view = buffer[1 : rows + 1, :columns]
    view.copy_(values)
    return view


LAYOUTS = ("rows", "rows apart", "columns", "columns apart")


@pytest.mark.parametrize("layout_b", LAYOUTS)
@pytest.mark.parametrize("layout_a", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_equal_float64(dtype: torch.dtype, layout_a: str, layout_b: str) -> None:
    for rows, depth, columns in SIZES:
        generator = torch.Generator().manual_seed(depth)
        a = torch.randn(rows, depth, generator=generator).to(dtype)
        b = torch.randn(depth, columns, generator=generator).to(dtype)
        bias = torch.randn(columns, generator=generator).to(dtype)
        exact = a.double() @ b.double()
        a, b = copy_to_layout(a, layout_a), copy_to_layout(b, layout_b)
        magnitude = max(1.0, float(exact.abs().amax())) if rows else 1.0
        tolerance = 3 * torch.finfo(dtype).eps * magnitude
        with MatmulMonitor() as monitor:
            actual, with_bias = matmul(a, b), linear(a, b.T, bias)
        assert monitor.faults == []
        assert monitor.products == 2
        torch.testing.assert_close(actual.double(), exact, rtol=0, atol=tolerance)
        torch.testing.assert_close(
            with_bias.double(), exact + bias.double(), rtol=0, atol=2 * tolerance
        )
        assert actual.dtype is dtype


def test_dense_operands_are_not_copied() -> None:
    weights = torch.ones(80, 64)
    for matrix in (weights, weights.T, weights[3:9], weights.to("meta")[:, :3]):
        assert compact(matrix) is matrix
    padded = torch.ones(4, 47)[:1, :7]
    assert padded.is_contiguous()
    assert compact(padded).stride() == (7, 1)


def test_products_are_differentiable() -> None:
    a = torch.randn(3, 9, dtype=torch.bfloat16)[:, :7].requires_grad_()
    weight = torch.randn(5, 7, dtype=torch.bfloat16, requires_grad=True)
    linear(a, weight, torch.zeros(5, dtype=torch.bfloat16)).sum().backward()
    assert a.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(a.grad, weight.detach().sum(0).expand(3, 7))


def test_the_check_detects_a_read_outside_the_operands() -> None:
    wide, weight = torch.ones(4, 40), torch.ones(5, 33)
    with MatmulMonitor() as monitor:
        _ = wide[:, :33] @ weight.T
        _ = wide[:1, :33] @ weight.T
        _ = weight.bfloat16() @ weight.bfloat16().T
        _ = torch.einsum("ij,kj->ik", wide[:, :33], weight)
        with torch.inference_mode():
            _ = torch.nn.functional.linear(wide[:, :33], weight)
        _ = wide.double()[:, :33] @ weight.T.double()
        _ = weight @ weight.T
    assert monitor.products == 7
    assert len(monitor.faults) == 5


# ------------------------------------------------------- code that computes products on a CPU


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_of_parts_and_references_are_safe(case: Case) -> None:
    """`prove` calls the parts, the float64 and rounded references, and torch references of ops."""
    with MatmulMonitor() as monitor, prefer_torch_reference():
        proof = prove(case, this_machine(device="cpu"))
    assert proof.passed, str(proof)
    assert monitor.products
    assert monitor.faults == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_of_the_adapter_branch_are_safe(dtype: torch.dtype) -> None:
    call = moe_lora_calls.make_call(dtype=dtype)
    with MatmulMonitor() as monitor, prefer_torch_reference():
        call.run()
    assert monitor.products
    assert monitor.faults == []


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_the_router_are_safe(bias: bool) -> None:
    router = Router(RouterSpec(top_k=2), 40, 5, bias=bias, dtype=torch.bfloat16)
    for parameter in router.parameters():
        parameter.data.normal_()
    x_TH = torch.full((33, 56), NAN, dtype=torch.bfloat16)[:, :40]
    x_TH.copy_(torch.randn(33, 40))
    with MatmulMonitor() as monitor:
        logits = router.logits(x_TH)
    assert monitor.products == 1
    assert monitor.faults == []
    exact = x_TH.double() @ router.weight.double().T
    exact += 0 if router.bias is None else router.bias.double()
    torch.testing.assert_close(logits.double(), exact, rtol=1e-2, atol=5e-2)


def test_products_in_gradients_are_safe() -> None:
    problem = Problem(tokens=9, hidden=40, intermediate=24, experts=3, top_k=2, dtype=torch.float32)
    x_TH, weights, routing = random_inputs(problem, CPU)
    padded = [torch.cat([w, torch.full_like(w, NAN)], 2) for w in (weights.w1, weights.w2)]
    views = [w[..., : w.shape[2] // 2] for w in padded]
    with MatmulMonitor() as monitor:
        actual = compute_gradients(
            torch.ones_like(x_TH), x_TH, ExpertWeights(*views), routing, problem, needs_weights=True
        )
    assert monitor.products
    assert monitor.faults == []
    exact = compute_gradients(
        torch.ones_like(x_TH), x_TH, weights, routing, problem, needs_weights=True
    )
    assert actual.b1 is actual.b2 is exact.b1 is exact.b2 is None
    for got, expected in zip(actual[:4], exact[:4], strict=True):
        torch.testing.assert_close(got, expected)


def test_products_of_the_reference_are_checked() -> None:
    """The reference computes float32 products with its own function."""
    a, b = torch.full((33, 47), NAN)[:, :7], torch.ones(5, 7)
    with MatmulMonitor() as monitor:
        reference._matmul(a, b)
    assert monitor.products == 1
    assert monitor.faults == []


# --------------------------------------------------------------------- unchecked products

PRODUCT_NAMES = {
    *("mm", "bmm", "mv", "dot", "vdot", "matmul", "linear", "einsum", "inner", "tensordot"),
    *("addmm", "addmm_", "addbmm", "baddbmm", "baddbmm_", "addmv", "addmv_", "multi_dot"),
    *("_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "_int_mm", "bilinear", "Linear"),
    *("grouped_mm", "scaled_mm", "scaled_grouped_mm", "scaled_dot_product_attention"),
}
# Files that compute products without the checked functions, and why their products are not 16-bit
# products on a CPU.
UNCHECKED_FILES = {
    "modular_kernel/utils/matmul.py": "the checked functions",
    "modular_kernel/reference/__init__.py": "shares no code with parts; float32 and float64",
    "modular_kernel/interpreter/builder.py": "numpy, float64",
    "modular_kernel/measure/roofline.py": "measures the peak of a GPU",
    "experts/cutlass/scaled_mm.py": "runs on GPUs only",
    "modular_kernel/bench/candidates.py": "torch's grouped product, a peer on a GPU",
    "modular_kernel/testing/checkpoints/samples.py": "float64",
    "modular_kernel/testing/stress/fuzz/independent_reference.py": "float64",
    "modular_kernel/testing/verify/rank_differences.py": "similarity of rows, for a message",
}


def find_products(path: Path) -> Iterator[int]:
    """Yield the numbers of lines with `a @ b` or an attribute in PRODUCT_NAMES."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.MatMult):
            yield node.lineno
        if isinstance(node, ast.Attribute) and node.attr in PRODUCT_NAMES:
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner != "Placement":  # whose `linear` is a layout of experts
                yield node.lineno


def test_every_product_uses_the_checked_functions() -> None:
    lines_by_file = {}
    for package in ("modular_kernel", "experts", "prepare_finalize", "topk_reduce"):
        for path in (ROOT / package).rglob("*.py"):
            lines = [] if "kernels" in path.parts else list(find_products(path))
            if lines:
                lines_by_file[str(path.relative_to(ROOT))] = lines
    assert lines_by_file.keys() == UNCHECKED_FILES.keys()
