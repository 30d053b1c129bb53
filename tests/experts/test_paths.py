"""The code of a path is in a package of its own, and a new path needs only such a package and an
entry in `paths.py`.
"""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from experts.triton.path import Path as LaunchPath
from experts.triton.paths import ALL_PATHS, NAMES

ROOT = Path(__file__).resolve().parents[2]
TRITON = ROOT / "experts" / "triton"
PACKAGES = ("modular_kernel", "prepare_finalize", "experts", "topk_reduce")

TOY_SOURCE = '''
"""A path that a test adds: plain torch, for a few tokens of unquantized layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from experts.triton.candidates import CandidateGroups
from experts.triton.launch_config import Device, Gemm, Launch, MoEConfig, Violation
from experts.triton.path import Path, PathCall
from modular_kernel.ops.mlp import ExpertTokens, expert_mlps
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.workspace import BufferSpec


@dataclass(frozen=True)
class ToyConfig:
    rows: int
    num_warps: int = 1
    num_stages: int = 1
    block_m: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"rows={self.rows}"


class ToyPath(Path):
    name = "toy"
    launch = ToyConfig
    may_reject_tensors = False
    roundings: Roundings | None = None

    @classmethod
    def supports(cls, problem: Problem, device: Device) -> bool:
        weights_output = not problem.apply_router_weight_on_input
        sums_output = problem.combine is Combine.SUM and weights_output
        return sums_output and not problem.scheme.quantized and not problem.batch_invariant

    @classmethod
    def max_tokens(cls, problem: Problem) -> int | None:
        return 3

    @classmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        return MoEConfig(ToyConfig(1), ToyConfig(2), cls.name)

    @classmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
        assert isinstance(config, ToyConfig)
        if config.rows > 8:
            yield Violation("rows", config.rows, "<= 8")

    @classmethod
    def candidates(cls, problem: Problem, tokens: int) -> CandidateGroups:
        return {1: ([ToyConfig(4)], [ToyConfig(5)])} if tokens <= 6 else {}

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def supports_tensors(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        return True

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        return {"toy_seen": BufferSpec((tokens,), torch.float32)}

    def run(self, call: PathCall) -> None:
        SEEN.append(call.config)
        ids_TK, weights_TK = call.tokens.routing.topk_ids_TK, call.tokens.routing.topk_weights_TK
        call.workspace.take("toy_seen", (len(ids_TK),)).zero_()
        call.output.zero_()
        for expert in range(self.problem.e):
            token, slot = (ids_TK == expert).nonzero(as_tuple=True)
            if token.numel():
                entry = ExpertTokens(expert, call.tokens.x_TH[token], None, None)
                (rows,) = expert_mlps([entry], call.weights, self.problem)
                scaled = rows.float() * weights_TK[token, slot, None]
                call.output.index_add_(0, token, scaled.to(call.output.dtype))


SEEN: list[MoEConfig] = []
'''

USE_PROGRAM = """
from dataclasses import replace
from pathlib import Path
import torch
from experts import TritonExperts
from experts.triton.configs.select import choose_config, on_device, override_config
from experts.triton.launch_config import Device, MoEConfig
from experts.triton.toy.path import SEEN, ToyConfig, ToyPath
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.catalog import make_kernel
from modular_kernel.errors import ConfigurationError
from modular_kernel.reference import float64_reference
from modular_kernel.contracts import TunedChoice
from modular_kernel.spec.problem import Problem

def call_and_get_config(problem):
    inputs = random_inputs(problem, torch.device("cpu"))
    out = make_kernel("MoEPrepareAndFinalizeNoEP", "TritonExperts", problem)(*inputs)
    exact = float64_reference(*inputs, problem)
    assert (out.double() - exact).norm() < 1e-5 * exact.norm()
    return SEEN.pop() if SEEN else None

layer = Problem(tokens=3, hidden=48, intermediate=32, experts=5, top_k=2, dtype=torch.float32)
assert call_and_get_config(layer) == ToyPath.default_config(layer, 3, Device())
assert call_and_get_config(layer.with_tokens(4)) is None  # more than max_tokens
config = MoEConfig(ToyConfig(7), ToyConfig(8), "toy")
with override_config(config):
    assert call_and_get_config(layer.with_tokens(6)) == config
with override_config({"gemm1": {"rows": 3}, "gemm2": {"rows": 4}, "path": "toy"}):
    assert call_and_get_config(layer) == MoEConfig(ToyConfig(3), ToyConfig(4), "toy")
try:
    with override_config(MoEConfig(ToyConfig(9), ToyConfig(8), "toy")):
        call_and_get_config(layer)
except ConfigurationError as error:
    assert "GEMM 1 rows: got 9, need <= 8" in str(error), error
else:
    raise AssertionError("launched")

with on_device(Device("A GPU")):
    space = TritonExperts.tunable(layer)
    assert MoEConfig(ToyConfig(4), ToyConfig(5), "toy") in space.candidates(3)
    folder = Path("tuned")
    choices = {3: TunedChoice(config, 1e-5, 2e-5)}
    space.save(choices, folder)
    assert space.saved(folder) == choices
    explanation = space.explain(3)
    assert "path: toy" in explanation and "GEMM 1: rows=1" in explanation, explanation
print("the toy path is one of them")
"""


def test_a_new_path_needs_a_folder_and_an_entry(tmp_path: Path) -> None:
    """Selection, overrides, limits, files, tuning, `explain` and calls then support the path."""
    for package in (*(ROOT / name for name in PACKAGES), *ROOT.glob("*.egg-info")):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package, tmp_path / package.name, ignore=ignored)
    folder = tmp_path / "experts" / "triton" / "toy"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""A path that a test adds."""\n', encoding="utf-8")
    (folder / "path.py").write_text(TOY_SOURCE.lstrip(), encoding="utf-8")
    paths_file = tmp_path / "experts" / "triton" / "paths.py"
    source = paths_file.read_text(encoding="utf-8")
    old_import = "from experts.triton.path import Path\n"
    assert source.count(old_import) == 1
    new_import = "from experts.triton.toy.path import ToyPath\n"
    source = source.replace(old_import, old_import + new_import)
    assert source.count("\n)\n") == 1
    paths_file.write_text(source.replace("\n)\n", "\n    ToyPath,\n)\n"), encoding="utf-8")

    process = subprocess.run(
        [sys.executable, "-c", USE_PROGRAM],
        cwd=tmp_path,
        env={
            "PYTHONPATH": str(tmp_path),
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PATH": "",
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the toy path is one of them" in process.stdout, process.stderr[-3000:]


def list_names(tree: ast.AST) -> Iterator[str]:
    """Yield the imports, string constants except docstrings, and capitalized names of a module."""
    statements = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    docstrings = {id(value) for value in statements if isinstance(value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                yield node.value
        elif isinstance(node, ast.Name) and node.id[0].isupper():
            yield node.id


@cache
def list_names_by_file() -> dict[Path, set[str]]:
    """Return the names that each file of experts/ uses."""
    files = (f for f in (ROOT / "experts").rglob("*.py") if f != TRITON / "paths.py")
    return {file: set(list_names(ast.parse(file.read_text(encoding="utf-8")))) for file in files}


@pytest.mark.parametrize("path", ALL_PATHS, ids=NAMES)
def test_no_other_module_names_a_path(path: type[LaunchPath]) -> None:
    """Exceptions are subclasses of the path, the list of parts, and SGLang's names of kernels."""
    folder = get_folder(path)
    assert folder.parent == TRITON
    allowed_folders = {get_folder(path_class) for path_class in iterate_subclasses(path)}
    package = f"experts.triton.{folder.name}"
    references = []
    for file, names in list_names_by_file().items():
        if not allowed_folders & set(file.parents) and file.parent.name != "compat":
            path_names = names & {path.name, path.__name__}
            path_names |= {name for name in names if f"{name}.".startswith(f"{package}.")}
            if file == TRITON.parent / "__init__.py":
                path_names = {name for name in path_names if not name.endswith("Experts")}
            references += [(str(file.relative_to(ROOT)), name) for name in path_names]
    assert references == []


def iterate_subclasses(path: type[LaunchPath]) -> Iterator[type[LaunchPath]]:
    """Yield the path and all its subclasses, direct and indirect."""
    yield path
    for subclass in path.__subclasses__():
        yield from iterate_subclasses(subclass)


def get_folder(path: type[LaunchPath]) -> Path:
    return Path(sys.modules[path.__module__].__file__ or "").parent
