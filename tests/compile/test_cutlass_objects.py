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

# A call without arguments raises a TypeError that names all arguments of a loaded kernel. Kernels
# that are compiled in the same process need a GPU for this.
COUNT_COMPILATIONS = """
import sys
from cutlass import cute
from experts.cutlass import block_gemm, fp4_gemm

compiled, real = [], cute.compile

def counted(*given, **options):
    compiled.append(given)
    return real(*given, **options)

cute.compile = counted
which = sys.argv[1]
kernel = fp4_gemm.load_kernel() if which == "fp4" else block_gemm.load_kernel(which == "gated")
print(len(compiled))
try:
    compiled or kernel()
except TypeError as error:
    print(error)
"""

TENSORS = {
    "gated": ["a", "b", "a_scale", "b_scale", "out", "out_scale", "tiles"],
    "fp4": ["a", "b", "a_scale", "b_scale", "factors", "out", "tiles"],
}


def count_compilations(kernel_name: str, cache: Path) -> str:
    """Load a kernel in another process with this cache. Return the number of compilations, and the
    arguments of a loaded kernel.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MK_CACHE_DIR", str(cache))
        # Without a GPU, the DSL does not know the architecture.
        patch.setenv("CUTE_DSL_ARCH", "sm_100a" if kernel_name == "fp4" else "sm_90a")
        return run_python("-c", COUNT_COMPILATIONS, kernel_name)


def run_python(*words: str) -> str:
    result = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=True, timeout=300
    )
    return result.stdout.strip()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder with the objects of all kernels."""
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
    loaded, compiled = (
        count_compilations(kernel_name, cache),
        count_compilations(kernel_name, tmp_path),
    )
    assert (loaded[0], compiled) == ("0", "1")
    assert re.findall(r"(\w+): Tensor\(", loaded) == TENSORS[kernel_name]
    assert list(tmp_path.rglob("*.o")) == []  # Kernels compiled at run time are not cached.


def test_damaged_object_is_not_loaded(cache: Path) -> None:
    (path,) = cache.rglob("block_gemm_plain-*.o")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert count_compilations("plain", cache) == "1"
    assert not path.exists()
