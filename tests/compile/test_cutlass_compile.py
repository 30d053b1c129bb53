"""The kernel of CutlassExpertsFP8 compiles for sm_90a without a GPU, to the instructions it needs.

Skipped without nvidia-cutlass-dsl: `pip install '.[cutlass]'` brings it, 330 MB, NVIDIA's license.
"""

import re
from collections import Counter
from pathlib import Path

import pytest
from cutlass_code import MISSING, compile_in, told

pytestmark = pytest.mark.skipif(MISSING, reason="pip install '.[cutlass]'")

COMPILE = (
    "import sys; from experts.cutlass.block_gemm import load_kernel; "
    "load_kernel(sys.argv[1] == 'True')"
)
THREADS, MULTIPLYING, OTHERS = 384, 256, 128
MOST_IN_LOOP = 230  # instructions of a step of 256 columns, 128 of them FFMA


def disassembled(folder: Path, gated: bool) -> tuple[list[tuple[int, str]], str]:
    """Addresses and instructions of the kernel, and what cuobjdump says of its resources."""
    compile_in(folder, "sm_90a", COMPILE, str(gated))
    found = re.finditer(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", told(folder, "-sass"))
    return [(int(m[1], 16), m[2].strip()) for m in found], told(folder, "-res-usage")


def named(instruction: str) -> str:
    """The operation, without its predicate."""
    return re.sub(r"^@!?U?P\d+\s+", "", instruction).split()[0]


def product_loop(instructions: list[tuple[int, str]]) -> list[str]:
    """The shortest loop that multiplies."""
    loops = []
    for address, instruction in instructions:
        jump = re.search(r"\bBRA\b.*(0x[0-9a-f]+)$", instruction)
        if jump and int(jump[1], 16) < address:
            body = [i for at, i in instructions if int(jump[1], 16) <= at <= address]
            if any("QGMMA" in i for i in body):
                loops.append(body)
    return min(loops, key=len)


@pytest.fixture(scope="module", params=[True, False], ids=["gated", "plain"])
def kernel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[tuple[int, str]], str]:
    return disassembled(tmp_path_factory.mktemp("cubin"), request.param)


def test_instructions(kernel: tuple[list[tuple[int, str]], str]) -> None:
    instructions, resources = kernel
    counts = Counter(named(i) for _, i in instructions)
    assert counts["QGMMA.64x128x32.F32.E4M3.E4M3"] == 8
    # A group of four products each: the assembler has not made it wait for every one.
    assert counts["WARPGROUP.ARRIVE"] == counts["WARPGROUP.DEPBAR.LE"] == 2
    assert counts["UTMALDG.2D.MULTICAST"] == 1
    assert any(name.startswith("UTMASTG") for name in counts)
    assert not any(name.startswith(("STL", "LDL")) for name in counts)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", resources).groups())
    assert stack == 0
    # What warps ask for beyond what the block was given at its start would never come.
    given = {
        name.split(".")[1]: int(i.split()[-1], 16)
        for _, i in instructions
        if (name := named(i)).startswith("USETMAXREG")
    }
    wanted = given["TRY_ALLOC"] * MULTIPLYING + given["DEALLOC"] * OTHERS
    assert wanted <= registers * THREADS


def test_loop(kernel: tuple[list[tuple[int, str]], str]) -> None:
    """Nothing waits for the other warpgroup, and little is done beside the products."""
    loop = product_loop(kernel[0])
    counts = Counter(named(i).split(".")[0] for i in loop)
    assert counts["QGMMA"] == 8
    assert counts["FFMA"] == 128
    assert not counts["BAR"]
    assert not counts["LDG"]  # scales come through the ring
    assert len(loop) <= MOST_IN_LOOP
