"""Handpicked cases pass, and each detects the source defects for which it was added."""

from pathlib import Path

import pytest
import torch
from source_defect_runs import SourceDefect, findings

from modular_kernel.catalog import this_machine
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.handpicked import list_handpicked_cases
from modular_kernel.testing.cases.lists import cases_for

PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
HANDPICKED = list_handpicked_cases(*PAIR, this_machine())
QUANTIZE = "modular_kernel/ops/kernels/quantize.py"
NEXT_BLOCKS = "for offset in range(BLOCK_COLUMNS, group_size, BLOCK_COLUMNS):\n"

needs_interpreter = pytest.mark.skipif(
    this_machine().device == "cuda", reason="defects are applied to interpreted kernels"
)


@pytest.mark.parametrize("case", HANDPICKED, ids=str)
def test_handpicked_cases_pass(case: Case, machine: Machine) -> None:
    proof = prove(case, machine)
    assert proof.passed, str(proof)


def test_handpicked_cases_are_in_the_full_list(machine: Machine) -> None:
    all_cases = cases_for(*PAIR, machine).cases
    assert set(HANDPICKED) <= set(all_cases)
    assert len(set(all_cases)) == len(all_cases)


def test_tensors_of_one_element_are_compared(machine: Machine) -> None:
    """A last dimension of size 1 may have any stride, so it could be skipped by mistake."""
    problem = Problem(tokens=1, hidden=1, intermediate=1, experts=1, top_k=1, dtype=torch.bfloat16)
    proof = prove(Case(*PAIR, problem), machine)
    assert proof.passed, str(proof)


# Defects of the operations of TorchExperts, and parts of the names of the cases that detect each.
QUANTIZATION_DEFECTS = (
    (
        SourceDefect(
            "a group includes the columns of the next groups",
            QUANTIZE,
            "end = tl.minimum(first_column + group_size, num_columns)[:, None]",
            "end = (first_column * 0 + num_columns)[:, None]",
        ),
        ("block=64x96", "block=32x96", "block=64x48"),
    ),
    (
        SourceDefect(
            "the maximum only includes the first columns",
            QUANTIZE,
            f"            if not GROUP_FITS_BLOCK:\n"
            f"                {NEXT_BLOCKS}                    next_value",
            f"            if GROUP_FITS_BLOCK:\n"
            f"                {NEXT_BLOCKS}                    next_value",
        ),
        ("H32800",),
    ),
    (
        SourceDefect(
            "the last columns are not written",
            QUANTIZE,
            f"        if not GROUP_FITS_BLOCK:\n"
            f"            {NEXT_BLOCKS}                next_value",
            f"        if GROUP_FITS_BLOCK:\n            {NEXT_BLOCKS}                next_value",
        ),
        ("H32800",),
    ),
    (
        SourceDefect(
            "every block of columns after the first reads the second",
            QUANTIZE,
            "\n                next_value = _load_values(\n"
            "                    x_ptr, router_weights_ptr, rows, columns + offset,",
            "\n                next_value = _load_values(\n"
            "                    x_ptr, router_weights_ptr, rows, columns + BLOCK_COLUMNS,",
        ),
        ("H32800",),
    ),
    (
        SourceDefect(
            "every group reads the columns of the first",
            QUANTIZE,
            "first_column = group_index * group_size",
            "first_column = group_index * 0",
        ),
        ("static=true",),
    ),
    (
        SourceDefect(
            "programs that share rows read the same rows",
            QUANTIZE,
            "tl.program_id(0) % programs_per_segment * BLOCK_ROWS",
            "tl.program_id(0) // programs_per_segment * BLOCK_ROWS",
        ),
        ("T5-H1040",),
    ),
    (
        SourceDefect(
            "the maximum of the tensor only includes the last columns",
            QUANTIZE,
            "amax = maximum_nan(amax, max_nan(tl.abs(value), 1))\n    tl.store",
            "amax = max_nan(tl.abs(value), 1)\n    tl.store",
        ),
        ("T5-H1040",),
    ),
    (
        SourceDefect(
            "the maximum ignores the last columns",
            QUANTIZE,
            "for first in range(0, num_columns, BLOCK_COLUMNS):",
            "for first in range(0, num_columns // BLOCK_COLUMNS * BLOCK_COLUMNS, BLOCK_COLUMNS):",
        ),
        ("T1-H1040",),
    ),
    (
        SourceDefect(
            "scales have no lower bound",
            QUANTIZE,
            "return maximum_nan(tl.div_rn(amax, QMAX), MIN_SCALE)",
            "return tl.div_rn(amax, QMAX)",
        ),
        ("channel-activation=swiglu_oai",),
    ),
    (
        SourceDefect(
            "partial maxima are rounded to 16 bits",
            "modular_kernel/ops/quantize.py",
            'specs[f"{prefix}_partials"] = BufferSpec((num_partials,), torch.float32)',
            'specs[f"{prefix}_partials"] = BufferSpec((num_partials,), torch.bfloat16)',
        ),
        ("T5-H1040",),
    ),
    (
        SourceDefect(
            "every program copies the first columns of an unreduced row",
            "modular_kernel/ops/kernels/rows.py",
            "    columns = tl.program_id(1) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)\n"
            "    mask = columns < hidden_size\n    row =",
            "    columns = tl.program_id(2) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)\n"
            "    mask = columns < hidden_size\n    row =",
        ),
        ("T2-H1040",),
    ),
    (
        SourceDefect(
            "a tensor of one element is treated as empty",
            "modular_kernel/ops/quantize.py",
            "    if x_RK.numel() == 0:\n",
            "    if x_RK.numel() == 1:\n",
        ),
        ("T1-H1-",),
    ),
    (
        SourceDefect(
            "an unreduced output of one element is treated as empty",
            "modular_kernel/ops/reduce.py",
            "    if out.numel() == 0 or (weights_TK",
            "    if out.numel() == 1 or (weights_TK",
        ),
        ("tensor-combine=topk_weighted",),
    ),
)


TRITON = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
GEMV_GATE_UP = "experts/triton/gemv/kernels/gate_up.py"
GEMV_W4_DOWN = "experts/triton/gemv_w4/kernels/down.py"
# Defects of TritonExperts, and a part of the name of the only case that detects each.
TRITON_DEFECTS = (
    (
        SourceDefect(
            "the scales of up start at a block boundary",
            GEMV_GATE_UP,
            "((scale_row + up_row_offset) // GROUP_N) * stride_bsn",
            "(scale_row // GROUP_N + up_row_offset // GROUP_N) * stride_bsn",
        ),
        "T1-H160-I80",
    ),
    (
        SourceDefect(
            "up uses the zero points of gate",
            GEMV_GATE_UP,
            "up_zero_point_ptrs = zero_point_ptr + (scale_row + up_row_offset) * stride_bzn",
            "up_zero_point_ptrs = zero_point_ptr + scale_row * stride_bzn",
        ),
        "T4-H160-I80-E17-K1-bfloat16-quant=int8_w8a16",
    ),
    (
        SourceDefect(
            "scales and zero points after the last row are read",
            "experts/triton/gemv/kernels/down.py",
            "scale_mask = valid[:, None, None] & (scale_row < hidden_size)[None, :, None]",
            "scale_mask = valid[:, None, None] & (scale_row <= hidden_size)[None, :, None]",
        ),
        "T1-H51-I47",
    ),
    (
        SourceDefect(
            "kept rows of skipped pairs are not zeroed behind packed weights",
            "experts/triton/aligned/aligned_path.py",
            "WRITE_ZEROS=not self._sums_topk,",
            "WRITE_ZEROS=False,",
        ),
        "T9-H128-I64-E5-K2-bfloat16-quant=int4_w4a16_group:group=64-bias-combine",
    ),
    (
        SourceDefect(
            "packed weights ignore router weights of the input",
            "experts/triton/gemv_w4/kernels/gate_up.py",
            "        sums *= row_weight\n",
            "        sums *= 1.0\n",
        ),
        "H192",
    ),
    (
        SourceDefect(
            "every token is read as the first with packed weights",
            "experts/triton/gemv_w4/kernels/gate_up.py",
            "    x_ptr += (pair // TOP_K).to(tl.int64) * stride_xm\n",
            "",
        ),
        "H192",
    ),
    (
        SourceDefect(
            "e2m1 values are half as large in float16",
            "experts/triton/kernels/unpack_w4.py",
            "if dtype == tl.bfloat16 else 2.0**-16",
            "if dtype == tl.bfloat16 else 2.0**-17",
        ),
        "T1-H160-I32",
    ),
    (
        SourceDefect(
            "router weights are ignored with one warp per pair",
            GEMV_W4_DOWN,
            "if HAS_ROUTER_WEIGHTS and WARPS_PER_PAIR > 0:",
            "if HAS_ROUTER_WEIGHTS and WARPS_PER_PAIR > 1:",
        ),
        "T1-H160-I32",
    ),
    (
        SourceDefect(
            "biases are ignored where pairs do not divide the warps evenly",
            GEMV_W4_DOWN,
            "if HAS_BIAS and WARPS_PER_PAIR > 0:",
            "if HAS_BIAS:",
        ),
        "T1-H64-I160",
    ),
    (
        SourceDefect(
            "the sign of repacked values is lost in float16",
            "experts/triton/kernels/unpack_w4.py",
            "return ((pair & 0x01C001C0) << 3) | (pair & 0x80008000)",
            "return (pair & 0x01C001C0) << 3",
        ),
        "T1-H64-I160",
    ),
    (
        SourceDefect(
            "warps without a block read past the end",
            GEMV_W4_DOWN,
            "valid = valid & (block < BLOCKS)",
            "valid = valid",
        ),
        "T1-H64-I256",
    ),
    (
        SourceDefect(
            "every block of packed weights is multiplied by the first block of h",
            GEMV_W4_DOWN,
            "        h = load_pairs(pairs_ptr, pair, valid, chunk, SIZE_K, CHUNKS * HALVES, "
            "SCALE_SLOTS)\n"
            "    zero_after_loads",
            "    zero_after_loads",
        ),
        "T1-H2144",
    ),
    (
        SourceDefect(
            "the maximum only includes the first columns",
            QUANTIZE,
            f"            if not GROUP_FITS_BLOCK:\n"
            f"                {NEXT_BLOCKS}                    next_value",
            f"            if GROUP_FITS_BLOCK:\n"
            f"                {NEXT_BLOCKS}                    next_value",
        ),
        "H16400",
    ),
)


@needs_interpreter
@pytest.mark.share(6)
@pytest.mark.parametrize(("defect", "name_part"), TRITON_DEFECTS, ids=str)
def test_triton_defect_is_detected(defect: SourceDefect, name_part: str, tmp_path: Path) -> None:
    cases = [
        case for case in list_handpicked_cases(*TRITON, this_machine()) if name_part in str(case)
    ]
    assert len(cases) == 1
    assert findings(defect, cases, tmp_path)


@needs_interpreter
def test_repeated_quantization_groups_are_detected(tmp_path: Path) -> None:
    """Tokens are quantized by the kernel that permutes them."""
    defect = SourceDefect(
        "every program quantizes the first groups",
        "modular_kernel/ops/kernels/permute_quantize.py",
        "groups = tl.program_id(0) % group_blocks * BLOCK_GROUPS",
        "groups = tl.program_id(1) % group_blocks * BLOCK_GROUPS",
    )
    pair = ("BatchedPrepareAndFinalize", "NaiveBatchedExperts")
    cases = [
        case for case in list_handpicked_cases(*pair, this_machine()) if "T2-H2080" in str(case)
    ]
    assert len(cases) == 1
    assert findings(defect, cases, tmp_path)


@needs_interpreter
def test_unmarked_padding_is_detected(tmp_path: Path) -> None:
    """Kernels ignore ids out of range, so the uninitialized ids must include valid row numbers."""
    defect = SourceDefect(
        "the first padding row of a block is not marked",
        "modular_kernel/ops/kernels/align.py",
        "is_padding = (position >= padding_start[:, None])",
        "is_padding = (position > padding_start[:, None])",
    )
    cases = cases_for(*TRITON, this_machine(), "smoke").cases[:1]
    assert findings(defect, cases, tmp_path)


@needs_interpreter
@pytest.mark.share(6)
@pytest.mark.parametrize(("defect", "name_parts"), QUANTIZATION_DEFECTS, ids=str)
def test_quantization_defect_is_detected(
    defect: SourceDefect, name_parts: tuple[str, ...], tmp_path: Path
) -> None:
    cases = [case for case in HANDPICKED if any(part in str(case) for part in name_parts)]
    assert findings(defect, cases, tmp_path)
