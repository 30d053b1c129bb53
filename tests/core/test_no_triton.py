"""Without triton, all parts without Triton kernels work, and the others report what is missing."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# A program that makes imports of packages fail, as if the packages were not installed.
BLOCK_PACKAGES_TEMPLATE = "import sys\nsys.modules.update(dict.fromkeys({blocked}, None))\n"
TRITON_PARTS = {
    "TritonExperts",
    "GroupedGemmExperts",
    "BatchedTritonExperts",
    "CutlassExpertsFP8",
    "CutlassRowwiseExpertsFP8",
    "BatchedCutlassExpertsFP8",
    "CutlassExpertsFP4",
    "BatchedCutlassExpertsFP4",
    "DeepGemmExperts",
    "BatchedDeepGemmExperts",
    "TritonOrDeepGemmExperts",
    "BatchedTritonOrDeepGemmExperts",
    "TritonKernelsExperts",
    "FlashInferExperts",
    "SymmMemPrepareAndFinalize",
    "HostThenRankPrepareAndFinalize",
}

# What a part needs of packages that are identified by their contents.
PROBED_PACKAGES = {
    "deep_gemm": "DeepGEMM 2.4.2 or newer",
    "triton_kernels": "triton_kernels 3.5, with matmul_ogs and RoutingData",
    "flashinfer": "FlashInfer 0.6.16 or newer, with cutlass_fused_moe_workspace_size",
}


def run_python(program: str, *, blocked: tuple[str, ...] = ("triton",)) -> str:
    """Return the output of a program in a new process that cannot import the packages `blocked`."""
    process = subprocess.run(
        [sys.executable, "-c", BLOCK_PACKAGES_TEMPLATE.format(blocked=blocked) + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def run_mk_json(*args: str) -> Any:
    """Run `mk` without triton, and return its JSON output with the exit code as "code"."""
    program = f"""
from modular_kernel.cli.main import run
try:
    run({[*args, "--json"]})
except SystemExit as ended:
    print(ended.code or 0)
"""
    output, _, code = run_python(program).rstrip().rpartition("\n")
    return {**json.loads(output), "code": int(code)}


def test_all_modules_without_triton_kernels_are_importable() -> None:
    packages = ("modular_kernel", "prepare_finalize", "experts", "topk_reduce")
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    kernel_modules = [
        path
        for path in paths
        if _imports_triton_or_cutlass(path) or path.match("testing/compile/cases.py")
    ]
    modules = [
        _module_name(path)
        for path in paths
        if path not in kernel_modules
        and path.name != "__main__.py"
        and not path.match("integrations/vllm/v0_*.py")  # these import vLLM
        and not path.match("integrations/sglang/v0_*_classes.py")  # these import SGLang
    ]
    assert {path.relative_to(ROOT).parts[:2] for path in kernel_modules} == {
        ("modular_kernel", "ops"),
        ("modular_kernel", "replay"),
        ("modular_kernel", "testing"),
        ("modular_kernel", "interpreter"),
        ("experts", "compat"),
        ("experts", "cutlass"),
        ("experts", "deepgemm"),
        ("experts", "flashinfer"),
        ("experts", "triton"),
        ("experts", "triton_kernels"),
        ("prepare_finalize", "common"),
        ("prepare_finalize", "host_then_rank"),
        ("prepare_finalize", "symm_mem"),
    }
    assert len(modules) > 50
    program = "\n".join(f"import {module}" for module in modules)
    triton_modules = run_python(
        f"{program}\nprint(*[m for m in sys.modules if m.startswith('triton.')])"
    )
    assert triton_modules.split() == []


def _imports_triton_or_cutlass(path: Path) -> bool:
    """Return whether a module imports triton or the CuTe DSL at its top level."""
    source = path.read_text(encoding="utf-8")
    return re.search(r"^(import|from) (triton|cutlass)\b", source, re.M) is not None


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.share(2)
@pytest.mark.parametrize("blocked", [("triton",), ("triton", "ml_dtypes")], ids="+".join)
@pytest.mark.parametrize(
    "pair",
    [
        ("MoEPrepareAndFinalizeNoEP", "TorchExperts"),
        ("BatchedPrepareAndFinalize", "NaiveBatchedExperts"),
    ],
    ids="+".join,
)
def test_the_torch_parts_compute_correct_outputs(
    pair: tuple[str, str], blocked: tuple[str, ...]
) -> None:
    program = f"""
import torch
from modular_kernel import Problem, make_kernel
from modular_kernel.catalog import this_machine
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.reference import float64_reference
torch.set_num_threads(1)
machine = this_machine(device="cpu")
assert "triton" not in machine.packages and not machine.interpreter
problem = Problem(tokens=33, hidden=96, intermediate=80, experts=8, top_k=2, dtype="float32")
inputs = random_inputs(problem, torch.device("cpu"))
exact = float64_reference(*inputs, problem)
out = make_kernel(*{pair}, problem, machine=machine, poison=True)(*inputs)
print(float((out - exact).norm() / exact.norm()), float(exact.std()))
"""
    error, std = map(float, run_python(program, blocked=blocked).split())
    assert error < 1e-6
    assert std > 0.05


def test_triton_parts_are_listed_as_unavailable_with_the_reason() -> None:
    listing = run_mk_json("list")
    assert listing["code"] == 0
    assert listing["broken"] == []
    parts = {part["name"]: part for part in listing["parts"]}
    assert set(parts) >= TRITON_PARTS
    for name, part in parts.items():
        needs_triton = part["requires"] is not None and part["requires"]["triton"]
        assert needs_triton is (name in TRITON_PARTS)
        other_packages = part["requires"] and set(part["requires"]["packages"]) - {"triton"}
        assert part["available"] is not (needs_triton or bool(other_packages))
    for name in TRITON_PARTS:
        missing = [r for r in parts[name]["unavailable"] if r["rule"] == "package"]
        packages = sorted(set(parts[name]["requires"]["packages"]) - {"triton"})
        needs = ["triton", *(PROBED_PACKAGES.get(package, package) for package in packages)]
        assert [(r["parties"], r["need"]) for r in missing] == [
            ([name, "machine"], need) for need in needs
        ]


def test_a_triton_pair_is_refused_with_the_reason() -> None:
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TritonExperts")
    verdict = run_mk_json("check", *pair)
    assert verdict["code"] == 1
    assert "package" in [rejection["rule"] for rejection in verdict["rejections"]]
    assert run_mk_json("check", *pair, "--arch", "9.0", "--packages", "triton")["ok"]


def test_the_harness_verifies_the_torch_pairings() -> None:
    pair = ("--pf-type", "BatchedPrepareAndFinalize", "--experts-type", "NaiveBatchedExperts")
    result = run_mk_json("test", *pair, "--one", "--dtype", "float32")
    assert result["ok"]
    assert not result["machine"]["interpreter"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(
    ("blocked", "note"),
    [
        (
            ("triton",),
            "no CUDA device, and triton is not installed: parts that use Triton are",
        ),
        (
            ("ml_dtypes",),
            "no CUDA device, and ml_dtypes is not installed: parts that use Triton are",
        ),
        ((), "no CUDA device here: Triton kernels run in Triton's CPU interpreter"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_the_reason_for_a_missing_triton_is_reported(blocked: tuple[str, ...], note: str) -> None:
    program = """
import contextlib, io
from modular_kernel.cli.machine_setup import prepare_host
with contextlib.redirect_stderr(io.StringIO()) as notes:
    prepare_host()
print(notes.getvalue())
"""
    assert run_python(program, blocked=blocked).startswith(note)
