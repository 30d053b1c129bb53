"""Runs a program of this folder in a process whose libcuda.so.1 is driver_stand_in.c."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


def run_with_stand_in(module: str, folder: Path) -> dict[str, Any]:
    """Run `python -m module` and return the JSON object that it prints.

    folder: where the stand-in library is compiled.
    """
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler, without which launches are not replayed")
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    library = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-O1", str(TESTS / "driver_stand_in.c")]
    command += [f"-I{include}" for include in driver.include_dirs]
    subprocess.run([*command, "-o", str(library)], check=True)
    # The dynamic loader reads LD_LIBRARY_PATH when a program starts, so `env` sets it. Triton links
    # its launchers with the library in TRITON_LIBCUDA_PATH.
    program = ["env", "-u", "TRITON_INTERPRET", f"LD_LIBRARY_PATH={folder}"]
    program += [f"TRITON_LIBCUDA_PATH={folder}", f"MK_CACHE_DIR={folder}"]
    program += [sys.executable, "-m", module]
    process = subprocess.run(program, cwd=TESTS, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    result: dict[str, Any] = json.loads(process.stdout)
    return result
