"""Kernels in CuTe DSL compiled ahead of time: another process loads them, and compiles no more.

What a loaded one computes needs a GPU. Skipped without nvidia-cutlass-dsl.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cutlass_code import MISSING

pytestmark = pytest.mark.skipif(MISSING, reason="pip install '.[cutlass]'")

# Given nothing, a loaded kernel names all that it takes; one compiled here needs a GPU for that.
ASK = """
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


def ask(which: str, cache: Path) -> str:
    """How many kernels a process compiles that has this cache, and what a loaded one takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MK_CACHE_DIR", str(cache))
        patch.setenv("CUTE_DSL_ARCH", "sm_100a" if which == "fp4" else "sm_90a")  # no GPU says it
        return run("-c", ASK, which)


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the objects of all kernels."""
    folder = tmp_path_factory.mktemp("objects")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MK_CACHE_DIR", str(folder))
        told = run("-m", "experts.cutlass").splitlines()
    found = [Path(line.rpartition(": ")[2]) for line in told]
    assert [line.partition(":")[0] for line in told] == [
        "block_gemm_gated for sm_90a",
        "block_gemm_plain for sm_90a",
        "fp4_gemm for sm_100a",
    ]
    assert all(path.is_file() and path.is_relative_to(folder) for path in found)
    return folder


@pytest.mark.parametrize("which", ["gated", "fp4"])
def test_a_process_loads_what_another_has_compiled(cache: Path, which: str, tmp_path: Path) -> None:
    loaded, compiled = ask(which, cache), ask(which, tmp_path)
    assert (loaded[0], compiled) == ("0", "1")
    assert re.findall(r"(\w+): Tensor\(", loaded) == TENSORS[which]
    assert list(tmp_path.rglob("*.o")) == []  # nothing is kept unasked


def test_an_object_of_other_bytes_is_not_loaded(cache: Path) -> None:
    (path,) = cache.rglob("block_gemm_plain-*.o")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert ask("plain", cache) == "1"
    assert not path.exists()
