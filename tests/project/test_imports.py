"""What an import brings in, and what it leaves for the call that needs it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from modular_kernel.settings import make_child_environment

# Costs more than a tenth of a second each, and judges nothing.
HEAVY = (
    "triton",
    "ml_dtypes",
    "transformers",
    "safetensors",
    "matplotlib",
    "jinja2",
    "pydantic",
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
    """But what waits for an import of transformers."""
    found = loaded("import modular_kernel")
    assert {"torch", "triton", "numpy"} & found == set()
    own = {name for name in found if name.startswith("modular_kernel.")}
    assert own == {"modular_kernel.utils", "modular_kernel.utils.after_import"}


def test_help_comes_without_torch() -> None:
    """Verbs import it inside."""
    found = loaded("from modular_kernel.cli.main import make_application; make_application()")
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


# Packages that measure or test, which a judgment does not need.
MEASURING = ("testing", "bench", "select", "tuning", "profiling", "report", "checkpoints", "layers")


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["check", "--arch", "9.0"],
        ["check", "--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TritonExperts"],
        ["check", "--model", "mixtral-8x7b", "--tokens", "512", "--json"],
        ["plan", "--bandwidth", "400"],
    ],
    ids=" ".join,
)
def test_verbs_that_only_judge_load_no_kernel_and_no_laboratory(words: list[str]) -> None:
    run = f"from modular_kernel.cli.main import run\ntry: run({words})\nexcept SystemExit: pass"
    found, of_torch = loaded(run), loaded("import torch")
    assert [name for name in HEAVY if name in found - of_torch] == []
    assert [name for name in found if "kernels" in name.split(".")] == []
    packages = {name.split(".")[1] for name in found if name.startswith("modular_kernel.")}
    assert {"cli", "compatibility"} <= packages
    assert packages & set(MEASURING) == set()


def test_verbs_that_only_judge_load_no_package_but_these() -> None:
    """Beyond torch's own: each costs every call, whether it is needed or not."""
    run = "from modular_kernel.cli.main import run\ntry: run(['{}'])\nexcept SystemExit: pass"
    of_torch = loaded("import torch")
    ours = {"modular_kernel", "experts", "prepare_finalize", "topk_reduce"}
    for verb in ("list", "check", "plan"):
        more = loaded(run.format(verb)) - of_torch
        packages = {name.partition(".")[0] for name in more} - set(sys.stdlib_module_names) - ours
        private = {name for name in packages if name.startswith("_")}
        assert packages - private <= {"click", "rich"}


def test_verbs_that_only_judge_look_for_no_garbage() -> None:
    """It would take longer than to judge; a process that goes on collects as it did."""
    code = (
        "import gc\nseen, until, enable = [], [], gc.enable\n"
        "gc.enable = lambda: (until.append(len(seen)), enable())\n"
        "from modular_kernel.cli.main import run\n"
        "gc.callbacks.append(lambda phase, info: seen.append(phase))\n"
        "try: run(['plan'])\nexcept SystemExit: pass\n"
        "assert gc.isenabled() and gc.get_freeze_count() == 0\nassert until == [0], until"
    )
    loaded(code)


def test_listing_models_loads_no_torch() -> None:
    run = "from modular_kernel.cli.main import run\ntry: run(['models'])\nexcept SystemExit: pass"
    assert loaded(run) & {"torch", "numpy", *HEAVY} == set()


# Seconds of processor time beyond torch's import, and as a share of it where a machine is slow.
JUDGING_SECONDS, JUDGING_SHARE = 0.5, 0.4


def test_verbs_that_only_judge_answer_at_once(tmp_path: Path) -> None:
    """With their bytecode kept, as a user has it; the best of five, as torch's own is."""
    verbs = [["models"], ["list"], ["check"], ["check", "--model", "mixtral-8x7b"], ["plan"]]
    environment = make_child_environment(interpreted=False)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    programs = [["-c", "import torch"], *(["-m", "modular_kernel", *verb] for verb in verbs)]
    for program in programs:
        seconds(program, environment)
    best = [float("inf")] * len(programs)
    for _ in range(5):
        found = [seconds(program, environment) for program in programs]
        best = [min(pair) for pair in zip(best, found, strict=True)]
        limit = best[0] + max(JUDGING_SECONDS, JUDGING_SHARE * best[0])
        if max(best[1:]) <= limit:
            return
    pytest.fail(f"torch takes {best[0]:.2f} s, {verbs} take {best[1:]}, the limit is {limit:.2f} s")


def seconds(program: list[str], environment: Mapping[str, str]) -> float:
    """Processor time of a fresh interpreter."""
    before = os.times()
    command = [sys.executable, *program]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    after = os.times()
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system
