"""CuTe DSL kernels that are compiled ahead of time are loaded by another process.

The results of loaded kernels are tested on a GPU. These tests need nvidia-cutlass-dsl.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cutlass_code import DSL_MISSING

pytestmark = pytest.mark.skipif(DSL_MISSING, reason="pip install '.[cutlass]'")

# Prints the number of compilations and, if the kernel was loaded, its arguments. A call of a loaded
# kernel without arguments raises a TypeError that names them. A kernel that was compiled in the
# same process is not called, because the call would need a GPU.
COUNT_COMPILATIONS_PROGRAM = """
import sys
from cutlass import cute
from experts.cutlass import block_gemm, fp4_gemm

num_compilations, cute_compile = 0, cute.compile

def compile_and_count(*args, **kwargs):
    global num_compilations
    num_compilations += 1
    return cute_compile(*args, **kwargs)

cute.compile = compile_and_count
name = sys.argv[1]
kernel = fp4_gemm.load_kernel() if name == "fp4" else block_gemm.load_kernel(name == "gated")
print(num_compilations)
try:
    num_compilations or kernel()
except TypeError as error:
    print(error)
"""

ARGUMENTS_BY_KERNEL = {
    "gated": ["a", "b", "a_scale", "b_scale", "out", "out_scale", "tiles"],
    "fp4": ["a", "b", "a_scale", "b_scale", "factors", "out", "tiles"],
}


def count_compilations(kernel_name: str, cache: Path) -> str:
    """Load a kernel in another process with this cache.

    Returns the number of compilations and, if the kernel was not compiled, its arguments.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MK_CACHE_DIR", str(cache))
        # Without a GPU, the DSL does not know the architecture.
        patch.setenv("CUTE_DSL_ARCH", "sm_100a" if kernel_name == "fp4" else "sm_90a")
        return run_python("-c", COUNT_COMPILATIONS_PROGRAM, kernel_name)


def run_python(*args: str) -> str:
    result = subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, check=True, timeout=300
    )
    return result.stdout.strip()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile all kernels to a new cache folder, and return the folder."""
    folder = tmp_path_factory.mktemp("objects")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MK_CACHE_DIR", str(folder))
        lines = run_python("-m", "experts.cutlass").splitlines()
    paths = [Path(line.rpartition(": ")[2]) for line in lines]
    assert [line.partition(":")[0] for line in lines] == [
        "block_gemm_gated for sm_90a",
        "block_gemm_plain for sm_90a",
        "fp4_gemm for sm_100a",
    ]
    assert all(path.is_file() and path.is_relative_to(folder) for path in paths)
    return folder


@pytest.mark.parametrize("kernel_name", ["gated", "fp4"])
def test_compiled_objects_are_loaded_by_another_process(
    cache: Path, kernel_name: str, tmp_path: Path
) -> None:
    with_cache = count_compilations(kernel_name, cache)
    without_cache = count_compilations(kernel_name, tmp_path)
    assert (with_cache[0], without_cache) == ("0", "1")
    assert re.findall(r"(\w+): Tensor\(", with_cache) == ARGUMENTS_BY_KERNEL[kernel_name]
    assert list(tmp_path.rglob("*.o")) == []  # Kernels compiled at run time are not cached.


def test_damaged_object_is_not_loaded(cache: Path) -> None:
    (path,) = cache.rglob("block_gemm_plain-*.o")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert count_compilations("plain", cache) == "1"
    assert not path.exists()
