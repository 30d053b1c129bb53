"""Runs a program of this folder in a process whose libcuda.so.1 is built from driver_stand_in.c."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HELPERS = Path(__file__).parent


def run_with_stand_in(module: str, folder: Path) -> dict[str, Any]:
    """Run `python -m module` and return the JSON object that it prints.

    folder: where the stand-in library is compiled.
    """
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler, without which launches are not replayed")
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    library = folder / "libcuda.so.1"
    compile_command = [compiler, "-shared", "-fPIC", "-O1", str(HELPERS / "driver_stand_in.c")]
    compile_command += [f"-I{include}" for include in driver.include_dirs]
    subprocess.run([*compile_command, "-o", str(library)], check=True)
    # The dynamic loader reads LD_LIBRARY_PATH when a program starts, so `env` sets it. Triton links
    # its launchers with the library in TRITON_LIBCUDA_PATH.
    command = ["env", "-u", "TRITON_INTERPRET", f"LD_LIBRARY_PATH={folder}"]
    command += [f"TRITON_LIBCUDA_PATH={folder}", f"MK_CACHE_DIR={folder}"]
    command += [sys.executable, "-m", module]
    process = subprocess.run(command, cwd=HELPERS, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    result: dict[str, Any] = json.loads(process.stdout)
    return result
