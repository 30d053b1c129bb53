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
    """What `python -m module` prints, a JSON object. folder: for the library."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler: then nothing is replayed either")
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    library = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-O1", str(TESTS / "driver_stand_in.c")]
    command += [f"-I{include}" for include in driver.include_dirs]
    subprocess.run([*command, "-o", str(library)], check=True)
    # By `env`: the loader reads the first variable when a program starts; triton links with what it
    # finds by the second. A process either interprets kernels or compiles them.
    program = ["env", "-u", "TRITON_INTERPRET", f"LD_LIBRARY_PATH={folder}"]
    program += [f"TRITON_LIBCUDA_PATH={folder}", f"MK_CACHE_DIR={folder}"]
    program += [sys.executable, "-m", module]
    done = subprocess.run(program, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result
