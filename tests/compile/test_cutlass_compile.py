"""The kernel of CutlassExpertsFP8 compiles for sm_90a without a GPU to the expected instructions.

These tests need nvidia-cutlass-dsl, which the extra `cutlass` installs (330 MB, NVIDIA's license).
"""

import re
from collections import Counter
from pathlib import Path

import pytest
from cutlass_code import DSL_MISSING, compile_to_folder, run_cuobjdump

pytestmark = pytest.mark.skipif(DSL_MISSING, reason="pip install '.[cutlass]'")

COMPILE_PROGRAM = (
    "import sys; from experts.cutlass.block_gemm import load_kernel; "
    "load_kernel(sys.argv[1] == 'True')"
)
THREADS, MMA_THREADS, OTHER_THREADS = 384, 256, 128
MAX_LOOP_INSTRUCTIONS = 230  # for a step of 256 columns, which has 128 FFMA


def disassemble(folder: Path, gated: bool) -> tuple[list[tuple[int, str]], str]:
    """Return the addresses and instructions of the kernel, and its resource usage."""
    compile_to_folder(folder, "sm_90a", COMPILE_PROGRAM, str(gated))
    matches = re.finditer(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", run_cuobjdump(folder, "-sass"))
    return [(int(m[1], 16), m[2].strip()) for m in matches], run_cuobjdump(folder, "-res-usage")


def get_opcode(instruction: str) -> str:
    """Return the operation of an instruction, without its predicate."""
    return re.sub(r"^@!?U?P\d+\s+", "", instruction).split()[0]


def find_product_loop(instructions: list[tuple[int, str]]) -> list[str]:
    """Return the instructions of the shortest loop that contains an MMA."""
    loops = []
    for address, instruction in instructions:
        jump = re.search(r"\bBRA\b.*(0x[0-9a-f]+)$", instruction)
        if jump and int(jump[1], 16) < address:
            body = [i for a, i in instructions if int(jump[1], 16) <= a <= address]
            if any("QGMMA" in i for i in body):
                loops.append(body)
    return min(loops, key=len)


@pytest.fixture(scope="module", params=[True, False], ids=["gated", "plain"])
def kernel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[tuple[int, str]], str]:
    return disassemble(tmp_path_factory.mktemp("cubin"), request.param)


def test_kernel_has_the_expected_instructions(kernel: tuple[list[tuple[int, str]], str]) -> None:
    instructions, resources = kernel
    counts = Counter(get_opcode(i) for _, i in instructions)
    assert counts["QGMMA.64x128x32.F32.E4M3.E4M3"] == 8
    # There is one wait for four MMAs, and the assembler must not add waits.
    assert counts["WARPGROUP.ARRIVE"] == counts["WARPGROUP.DEPBAR.LE"] == 2
    assert counts["UTMALDG.2D.MULTICAST"] == 1
    assert any(name.startswith("UTMASTG") for name in counts)
    assert not any(name.startswith(("STL", "LDL")) for name in counts)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", resources).groups())
    assert stack == 0
    # If the warps requested more registers than the block has, they would wait forever.
    registers_by_instruction = {
        name.split(".")[1]: int(i.split()[-1], 16)
        for _, i in instructions
        if (name := get_opcode(i)).startswith("USETMAXREG")
    }
    num_requested = (
        registers_by_instruction["TRY_ALLOC"] * MMA_THREADS
        + registers_by_instruction["DEALLOC"] * OTHER_THREADS
    )
    assert num_requested <= registers * THREADS


def test_main_loop_has_no_barrier_and_few_instructions(
    kernel: tuple[list[tuple[int, str]], str],
) -> None:
    """Without a barrier, the warpgroups do not wait for each other."""
    loop = find_product_loop(kernel[0])
    counts = Counter(get_opcode(i).split(".")[0] for i in loop)
    assert counts["QGMMA"] == 8
    assert counts["FFMA"] == 128
    assert not counts["BAR"]
    assert not counts["LDG"]  # TMA loads scales into shared memory, like the operands.
    assert len(loop) <= MAX_LOOP_INSTRUCTIONS
