"""What an import brings in, and what it leaves for the call that needs it."""

import subprocess
import sys

import pytest

# Costs more than a tenth of a second each, and judges nothing.
HEAVY = (
    "triton",
    "ml_dtypes",
    "transformers",
    "safetensors",
    "matplotlib",
    "jinja2",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
)


def loaded(code: str) -> set[str]:
    """Modules that a fresh process has after `code`."""
    ends = "\nimport sys\nprint(*sys.modules)"
    # With the interpreter on, triton itself imports it.
    command = ["env", "-u", "TRITON_INTERPRET", sys.executable, "-c", code + ends]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_the_package_itself_imports_nothing() -> None:
    found = loaded("import modular_kernel")
    assert {"torch", "triton", "numpy"} & found == set()
    assert [name for name in found if name.startswith("modular_kernel.")] == []


def test_help_comes_without_torch() -> None:
    """Verbs import it inside."""
    found = loaded("from modular_kernel.cli.main import application; application()")
    assert {"torch", "triton", "numpy"} & found == set()


def test_judging_leaves_out_what_only_computing_needs() -> None:
    judge = (
        "import torch\nimport modular_kernel as mk\nproblem = mk.Problem(8, 64, 64, 8, 2)\n"
        "mk.check_all(problem, mk.Machine('cuda', (9, 0)))\n"
        "mk.check('MoEPrepareAndFinalizeNoEP', 'TritonExperts', problem)"
    )
    found, of_torch = loaded(judge), loaded("import torch")
    assert "experts.triton.contiguous" in found
    assert [name for name in HEAVY if name in found - of_torch] == []


# Rooms of the laboratory, which judge nothing.
LABORATORY = ("testing", "bench", "select", "tuning", "profiling", "report", "importers", "layers")


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["check", "--arch", "9.0"],
        ["check", "--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TritonExperts"],
        ["plan"],
    ],
    ids=" ".join,
)
def test_verbs_that_only_judge_load_no_kernel_and_no_laboratory(words: list[str]) -> None:
    run = f"from modular_kernel.cli.main import run\ntry: run({words})\nexcept SystemExit: pass"
    found, of_torch = loaded(run), loaded("import torch")
    assert [name for name in HEAVY if name in found - of_torch] == []
    assert [name for name in found if "kernels" in name.split(".")] == []
    rooms = {name.split(".")[1] for name in found if name.startswith("modular_kernel.")}
    assert {"cli", "rules"} <= rooms
    assert rooms & set(LABORATORY) == set()
