"""The kernel of CutlassExpertsFP4 compiles for sm_100a without a GPU to the expected instructions
and layouts.

The kernel was never run, because no such GPU was available. These tests need nvidia-cutlass-dsl,
which the extra `cutlass` installs (330 MB, NVIDIA's license).
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

COMPILE_PROGRAM = "from experts.cutlass.fp4_gemm import load_kernel; load_kernel()"
STAGES, ACCUMULATORS = 6, 2
TILE, STEP = 128, 256
MAX_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class CompiledCode:
    ptx: str
    sass: str
    resources: str


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> CompiledCode:
    folder = tmp_path_factory.mktemp("fp4")
    compile_to_folder(folder, "sm_100a", COMPILE_PROGRAM)
    (ptx,) = folder.glob("*.ptx")
    return CompiledCode(
        ptx.read_text(), run_cuobjdump(folder, "-sass"), run_cuobjdump(folder, "-res-usage")
    )


def test_kernel_does_not_spill(code: CompiledCode) -> None:
    registers, stack, local_memory = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", code.resources).groups()
    )
    assert (stack, local_memory) == (0, 0)
    assert registers <= 65536 // 192
    assert not re.search(r"\b(STL|LDL)\b", code.sass)


def test_each_step_has_the_expected_instructions(code: CompiledCode) -> None:
    """A step has two loads of values, two loads of scales, and four MMAs of 64 values."""
    counts = Counter(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]+)", code.ptx, re.M))
    counts_by_prefix = {
        prefix: sum(n for name, n in counts.items() if name.startswith(prefix))
        for prefix in (
            "cp.async.bulk.tensor.2d.shared", "cp.async.bulk.shared::cluster.global",
            "tcgen05.cp.cta_group::1.32x128b.warpx4", "tcgen05.ld.sync.aligned.32x32b.x32",
            "tcgen05.commit", "tcgen05.alloc", "tcgen05.dealloc", "tcgen05.mma",
            "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16", "st.global.v4",
            "st.global", "st.local", "ld.local",
        )
    }  # fmt: skip
    assert counts_by_prefix == {
        "cp.async.bulk.tensor.2d.shared": 2,
        "cp.async.bulk.shared::cluster.global": 2,
        "tcgen05.cp.cta_group::1.32x128b.warpx4": 8,
        "tcgen05.ld.sync.aligned.32x32b.x32": 4,
        "tcgen05.commit": 2,
        "tcgen05.alloc": 1,
        "tcgen05.dealloc": 1,
        "tcgen05.mma": 4,
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16": 4,
        "st.global.v4": 16,  # 128 columns of a row, 8 in a store
        "st.global": 16,
        "st.local": 0,
        "ld.local": 0,
    }
    sass_counts = Counter(re.findall(r"\b(UTCOMMA|UTCCP|UTMALDG|UBLKCP|LDTM)\b", code.sass))
    assert sass_counts == {"UTCOMMA": 4, "UTCCP": 8, "UTMALDG": 2, "UBLKCP": 2, "LDTM": 4}


def test_barrier_expects_the_bytes_of_a_step(code: CompiledCode) -> None:
    value_bytes, scale_bytes = 2 * TILE * STEP // 2, 2 * TILE * STEP // 16
    assert find_constant_argument(
        code, r"mbarrier\.arrive\.expect_tx\S* \S+, \[%r\d+\], (%r\d+);"
    ) == (value_bytes + scale_bytes)
    assert find_constant_argument(
        code, r"cp\.async\.bulk\.shared::cluster\S* \[%r\d+\], \[%rd\d+\], (%r\d+)"
    ) == (scale_bytes // 2)


def find_constant_argument(code: CompiledCode, pattern: str) -> int:
    """Return the constant in the register that the first match of `pattern` captures."""
    register = re.search(pattern, code.ptx)[1]
    return int(re.search(rf"mov\.b32 \t{re.escape(register)}, (\d+);", code.ptx)[1])


def test_instruction_descriptor_has_the_tile_and_dtypes(code: CompiledCode) -> None:
    """The descriptor is that of 128 x 128 tiles of e2m1 values with e4m3 scales."""
    candidates = {int(n) for n in re.findall(r"\b(136\d{6})\b", code.ptx)}
    descriptor = min(candidates)
    assert descriptor >> 7 & 7 == descriptor >> 10 & 7 == 1  # e2m1
    assert (descriptor >> 17 & 63) * 8 == TILE  # columns
    assert (descriptor >> 27 & 3) * 128 == TILE  # rows
    assert not descriptor >> 23 & 1  # e4m3, not e8m0


def test_tensor_memory_contains_accumulators_and_scales(code: CompiledCode) -> None:
    """Two accumulator tiles are followed by the scales of rows and those of weights."""
    mma = r"tcgen05\.mma\S+ \[%r\d+\], \S+ \S+ \S+ \[(%r\d+)\], \[(%r\d+)\]"
    offsets = dict(re.findall(r"add\.s32 \t(%r\d+), %r\d+, (\d+);", code.ptx))
    scale_columns = [(int(offsets[a]), int(offsets[b])) for a, b in re.findall(mma, code.ptx)]
    first_scale_column = ACCUMULATORS * TILE
    assert scale_columns == [
        (first_scale_column + 4 * k, first_scale_column + 16 + 4 * k) for k in range(4)
    ]
    allocated = re.search(r"tcgen05\.alloc\S*\s+\S+ (%r\d+);", code.ptx)[1]
    columns = int(re.search(rf"mov\.b32 \t{allocated}, (\d+);", code.ptx)[1])
    assert scale_columns[-1][1] + 4 <= columns == 512


def test_rings_in_shared_memory_are_aligned_and_fit(code: CompiledCode) -> None:
    """The ring buffers of values are aligned to a swizzle period of 1024 bytes, and fit together
    with those of scales.
    """
    offsets = [int(n) for n in re.findall(r"\[%r\d+\+(\d+)\], \[%rd\d+, \{", code.ptx)]
    assert len(offsets) == 2
    assert all(offset % 1024 == 0 for offset in offsets)
    ring_bytes = STAGES * TILE * STEP // 2
    assert offsets[1] - offsets[0] >= ring_bytes
    assert offsets[1] + ring_bytes + 2 * STAGES * 2048 <= MAX_SHARED_BYTES


LAYOUT_PROGRAM = """
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


def test_scale_offset_equals_the_layout_of_the_dsl(tmp_path: Path) -> None:
    (tmp_path / "layout.py").write_text(LAYOUT_PROGRAM)  # The DSL reads the source from this file.
    command = [sys.executable, str(tmp_path / "layout.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    layout = [tuple(map(int, line.split())) for line in result.stdout.splitlines() if line]
    assert len(layout) == 52 * 32
    assert [offset for _, _, offset in layout] == [
        scale_offset(row, group, 32) for row, group, _ in layout
    ]
