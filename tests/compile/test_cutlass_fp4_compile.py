"""The kernel of CutlassExpertsFP4, compiled for sm_100a without a GPU, has the expected
instructions.

No such GPU was available, so these tests are the evidence for the kernel: the load, MMA and store
instructions, the layout of tensor memory, the bytes that a barrier waits for, and that
`modular_kernel.quant.scale_layout` is the layout of the DSL's own helper. Skipped without
nvidia-cutlass-dsl, which the extra `cutlass` installs (330 MB, NVIDIA's license).
"""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from cutlass_code import DSL_MISSING, compile_to_folder, run_cuobjdump

from modular_kernel.quant.scale_layout import scale_offset

pytestmark = pytest.mark.skipif(DSL_MISSING, reason="pip install '.[cutlass]'")

COMPILE = "from experts.cutlass.fp4_gemm import load_kernel; load_kernel()"
STAGES, ACCUMULATORS = 6, 2
TILE, STEP = 128, 256
# Bytes of shared memory that a block of an sm_100 may have.
MAX_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class CompiledCode:
    ptx: str
    sass: str
    resources: str


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> CompiledCode:
    folder = tmp_path_factory.mktemp("fp4")
    compile_to_folder(folder, "sm_100a", COMPILE)
    (ptx,) = folder.glob("*.ptx")
    return CompiledCode(
        ptx.read_text(), run_cuobjdump(folder, "-sass"), run_cuobjdump(folder, "-res-usage")
    )


def test_kernel_does_not_spill(code: CompiledCode) -> None:
    registers, stack, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", code.resources).groups()
    )
    assert (stack, local) == (0, 0)
    assert registers <= 65536 // 192
    assert not re.search(r"\b(STL|LDL)\b", code.sass)


def test_each_step_has_the_expected_instructions(code: CompiledCode) -> None:
    """Per step: two loads of values, two loads of scales, and four MMAs of 64 values."""
    counts = Counter(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]+)", code.ptx, re.M))
    by = {
        what: sum(n for name, n in counts.items() if name.startswith(what))
        for what in (
            "cp.async.bulk.tensor.2d.shared", "cp.async.bulk.shared::cluster.global",
            "tcgen05.cp.cta_group::1.32x128b.warpx4", "tcgen05.ld.sync.aligned.32x32b.x32",
            "tcgen05.commit", "tcgen05.alloc", "tcgen05.dealloc", "tcgen05.mma",
            "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16", "st.global.v4",
            "st.global", "st.local", "ld.local",
        )
    }  # fmt: skip
    assert by == {
        "cp.async.bulk.tensor.2d.shared": 2,
        "cp.async.bulk.shared::cluster.global": 2,
        "tcgen05.cp.cta_group::1.32x128b.warpx4": 8,
        "tcgen05.ld.sync.aligned.32x32b.x32": 4,
        "tcgen05.commit": 2,
        "tcgen05.alloc": 1,
        "tcgen05.dealloc": 1,
        "tcgen05.mma": 4,
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16": 4,
        "st.global.v4": 16,  # 128 columns of a row, 8 at a time, and nothing besides
        "st.global": 16,
        "st.local": 0,
        "ld.local": 0,
    }
    machine = Counter(re.findall(r"\b(UTCOMMA|UTCCP|UTMALDG|UBLKCP|LDTM)\b", code.sass))
    assert machine == {"UTCOMMA": 4, "UTCCP": 8, "UTMALDG": 2, "UBLKCP": 2, "LDTM": 4}


def test_barrier_expects_the_bytes_of_a_step(code: CompiledCode) -> None:
    values, scales = 2 * TILE * STEP // 2, 2 * TILE * STEP // 16
    assert moved_constant(code, r"mbarrier\.arrive\.expect_tx\S* \S+, \[%r\d+\], (%r\d+);") == (
        values + scales
    )
    assert moved_constant(
        code, r"cp\.async\.bulk\.shared::cluster\S* \[%r\d+\], \[%rd\d+\], (%r\d+)"
    ) == (scales // 2)


def moved_constant(code: CompiledCode, pattern: str) -> int:
    """Return the constant in the register that the first match of `pattern` captures."""
    register = re.search(pattern, code.ptx)[1]
    return int(re.search(rf"mov\.b32 \t{re.escape(register)}, (\d+);", code.ptx)[1])


def test_instruction_descriptor(code: CompiledCode) -> None:
    """128 x 128 tiles of e2m1 values with e4m3 scales, without negation."""
    plain = {int(n) for n in re.findall(r"\b(136\d{6})\b", code.ptx)}
    descriptor = min(plain)
    assert descriptor >> 7 & 7 == descriptor >> 10 & 7 == 1  # e2m1
    assert (descriptor >> 17 & 63) * 8 == TILE  # columns
    assert (descriptor >> 27 & 3) * 128 == TILE  # rows
    assert not descriptor >> 23 & 1  # e4m3, not e8m0


def test_tensor_memory_layout(code: CompiledCode) -> None:
    """Two accumulator tiles, then the scales of rows, then those of weights; no MMAs overlap."""
    product = r"tcgen05\.mma\S+ \[%r\d+\], \S+ \S+ \S+ \[(%r\d+)\], \[(%r\d+)\]"
    offsets = dict(re.findall(r"add\.s32 \t(%r\d+), %r\d+, (\d+);", code.ptx))
    pairs = [(int(offsets[a]), int(offsets[b])) for a, b in re.findall(product, code.ptx)]
    sums = ACCUMULATORS * TILE
    assert pairs == [(sums + 4 * k, sums + 16 + 4 * k) for k in range(4)]
    allocated = re.search(r"tcgen05\.alloc\S*\s+\S+ (%r\d+);", code.ptx)[1]
    columns = int(re.search(rf"mov\.b32 \t{allocated}, (\d+);", code.ptx)[1])
    assert pairs[-1][1] + 4 <= columns == 512


def test_shared_memory_layout(code: CompiledCode) -> None:
    """The rings of values and scales are aligned to a swizzle period, and fit."""
    first = [int(n) for n in re.findall(r"\[%r\d+\+(\d+)\], \[%rd\d+, \{", code.ptx)]
    assert len(first) == 2
    assert all(at % 1024 == 0 for at in first)
    ring = STAGES * TILE * STEP // 2
    assert first[1] - first[0] >= ring
    assert first[1] + ring + 2 * STAGES * 2048 <= MAX_SHARED_BYTES


LAYOUT = """
import cutlass
from cutlass import cute
from cutlass.utils.blockscaled_layout import tile_atom_to_shape_SF

@cute.jit
def print_layout():
    layout = tile_atom_to_shape_SF((256, 512, 1), 16)
    for row in cutlass.range_constexpr(0, 256, 5):
        for group in cutlass.range_constexpr(32):
            print(row, group, layout((row, group * 16, 0)))

cute.compile(print_layout)
"""


def test_scale_layout_equals_that_of_the_dsl(tmp_path: Path) -> None:
    """For 256 rows and 512 values, which need no padding."""
    (tmp_path / "layout.py").write_text(LAYOUT)  # it is read again, to be compiled
    command = [sys.executable, str(tmp_path / "layout.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    printed = [tuple(map(int, line.split())) for line in done.stdout.splitlines() if line]
    assert len(printed) == 52 * 32
    assert [at for _, _, at in printed] == [
        scale_offset(row, group, 32) for row, group, _ in printed
    ]
