"""Importing the packages and judging pairings loads no torch, kernels or other packages that are
not needed yet.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from modular_kernel.settings import make_child_environment

# Packages that take more than a tenth of a second to import and are not needed to judge pairings.
SLOW_IMPORTS = (
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


def list_loaded_modules(code: str) -> set[str]:
    """Return the modules that a new process has loaded after it ran `code`."""
    print_modules = "\nimport sys\nprint(*sys.modules)"
    # With TRITON_INTERPRET, importing triton also loads the interpreter.
    command = ["env", "-u", "TRITON_INTERPRET", sys.executable, "-c", code + print_modules]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split())


def test_import_of_the_package_loads_only_the_import_hook() -> None:
    """The hook waits for an import of transformers."""
    modules = list_loaded_modules("import modular_kernel")
    assert {"torch", "triton", "numpy"} & modules == set()
    own_modules = {name for name in modules if name.startswith("modular_kernel.")}
    assert own_modules == {"modular_kernel.utils", "modular_kernel.utils.after_import"}


def test_help_does_not_load_torch() -> None:
    """Verbs import torch inside their functions."""
    modules = list_loaded_modules(
        "from modular_kernel.cli.main import make_application; make_application()"
    )
    assert {"torch", "triton", "numpy"} & modules == set()


def test_judging_does_not_load_slow_imports() -> None:
    code = (
        "import torch\nimport modular_kernel as mk\nproblem = mk.Problem(8, 64, 64, 8, 2)\n"
        "mk.check_all(problem, mk.Machine('cuda', (9, 0)))\n"
        "mk.check('MoEPrepareAndFinalizeNoEP', 'TritonExperts', problem)"
    )
    modules, modules_of_torch = list_loaded_modules(code), list_loaded_modules("import torch")
    assert "experts.triton.standard" in modules
    assert [name for name in SLOW_IMPORTS if name in modules - modules_of_torch] == []


# Packages for measurements and tests, which are not needed to judge pairings.
MEASURING_PACKAGES = (
    "testing",
    "bench",
    "select",
    "tuning",
    "profiling",
    "report",
    "checkpoints",
    "layers",
)


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["check", "--arch", "9.0"],
        ["check", "--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TritonExperts"],
        ["check", "--model", "mixtral-8x7b", "--tokens", "512", "--json"],
        ["plan", "--bandwidth", "400"],
    ],
    ids=" ".join,
)
def test_check_verbs_load_no_kernels_and_no_measuring_packages(arguments: list[str]) -> None:
    code = (
        f"from modular_kernel.cli.main import run\ntry: run({arguments})\nexcept SystemExit: pass"
    )
    modules, modules_of_torch = list_loaded_modules(code), list_loaded_modules("import torch")
    assert [name for name in SLOW_IMPORTS if name in modules - modules_of_torch] == []
    assert [name for name in modules if "kernels" in name.split(".")] == []
    packages = {name.split(".")[1] for name in modules if name.startswith("modular_kernel.")}
    assert {"cli", "compatibility"} <= packages
    assert packages & set(MEASURING_PACKAGES) == set()


def test_judging_verbs_load_only_click_and_rich() -> None:
    """Packages that torch loads are not counted. Every further package would slow down every
    command.
    """
    code = "from modular_kernel.cli.main import run\ntry: run(['{}'])\nexcept SystemExit: pass"
    modules_of_torch = list_loaded_modules("import torch")
    own_packages = {"modular_kernel", "experts", "prepare_finalize", "topk_reduce"}
    for verb in ("list", "check", "plan"):
        additional_modules = list_loaded_modules(code.format(verb)) - modules_of_torch
        packages = (
            {name.partition(".")[0] for name in additional_modules}
            - set(sys.stdlib_module_names)
            - own_packages
        )
        private = {name for name in packages if name.startswith("_")}
        assert packages - private <= {"click", "rich"}


def test_judging_verbs_disable_garbage_collection() -> None:
    """Garbage collection would take longer than judging. It is enabled again afterwards."""
    code = (
        "import gc\nseen, until, enable = [], [], gc.enable\n"
        "gc.enable = lambda: (until.append(len(seen)), enable())\n"
        "from modular_kernel.cli.main import run\n"
        "gc.callbacks.append(lambda phase, info: seen.append(phase))\n"
        "try: run(['plan'])\nexcept SystemExit: pass\n"
        "assert gc.isenabled() and gc.get_freeze_count() == 0\nassert until == [0], until"
    )
    list_loaded_modules(code)


def test_listing_models_loads_no_torch() -> None:
    code = "from modular_kernel.cli.main import run\ntry: run(['models'])\nexcept SystemExit: pass"
    assert list_loaded_modules(code) & {"torch", "numpy", *SLOW_IMPORTS} == set()


# Limits of the processor time beyond the import of torch, in seconds and, for slow machines, as a
# fraction of the import time.
MAX_JUDGING_S, MAX_JUDGING_FRACTION = 0.5, 0.4


def test_judging_verbs_are_fast(tmp_path: Path) -> None:
    """Compare the minimum time of five runs, with cached bytecode, to the time to import torch."""
    verbs = [["models"], ["list"], ["check"], ["check", "--model", "mixtral-8x7b"], ["plan"]]
    environment = make_child_environment(interpreted=False)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    programs = [["-c", "import torch"], *(["-m", "modular_kernel", *verb] for verb in verbs)]
    for program in programs:
        measure_cpu_seconds(program, environment)
    min_seconds = [float("inf")] * len(programs)
    for _ in range(5):
        seconds = [measure_cpu_seconds(program, environment) for program in programs]
        min_seconds = [min(pair) for pair in zip(min_seconds, seconds, strict=True)]
        limit = min_seconds[0] + max(MAX_JUDGING_S, MAX_JUDGING_FRACTION * min_seconds[0])
        if max(min_seconds[1:]) <= limit:
            return
    pytest.fail(
        f"torch takes {min_seconds[0]:.2f} s, {verbs} take {min_seconds[1:]}, "
        f"the limit is {limit:.2f} s"
    )


def measure_cpu_seconds(program: list[str], environment: Mapping[str, str]) -> float:
    """Return the processor time of a new interpreter."""
    times_before = os.times()
    command = [sys.executable, *program]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    times_after = os.times()
    user = times_after.children_user - times_before.children_user
    return user + times_after.children_system - times_before.children_system
