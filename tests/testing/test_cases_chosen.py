"""Cases chosen by hand: each kills the defects that it is there for, and passes without them."""

from pathlib import Path

import pytest
import torch
from put_in import SourceDefect, findings

from modular_kernel.catalog import this_machine
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.handpicked import handpicked_cases
from modular_kernel.testing.cases.lists import cases_for

PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
CHOSEN = handpicked_cases(*PAIR, this_machine())
QUANTIZE = "modular_kernel/ops/kernels/quantize.py"
MORE = "for offset in range(BLOCK_C, group, BLOCK_C):\n"

on_a_cpu = pytest.mark.skipif(
    this_machine().device == "cuda", reason="defects are put in where kernels are interpreted"
)


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_proven(case: Case, machine: Machine) -> None:
    proof = prove(case, machine)
    assert proof.passed, str(proof)


def test_they_are_cases_of_the_full_list(machine: Machine) -> None:
    listed = cases_for(*PAIR, machine).cases
    assert set(CHOSEN) <= set(listed)
    assert len(set(listed)) == len(listed)


def test_one_value_of_two_bytes_in_each_tensor_is_proven(machine: Machine) -> None:
    """A last extent of 1 may have any stride: its bytes are compared all the same."""
    one = Problem(tokens=1, hidden=1, intermediate=1, experts=1, top_k=1, dtype=torch.bfloat16)
    proof = prove(Case(*PAIR, one), machine)
    assert proof.passed, str(proof)


# What is wrong, and by what the cases that tell it are known.
WRONG = (
    (
        SourceDefect(
            "a group takes the next one's columns along",
            QUANTIZE,
            "end = tl.minimum(first + group, num_columns)[:, None]",
            "end = (first * 0 + num_columns)[:, None]",
        ),
        ("block=64x96", "block=32x96", "block=64x48"),
    ),
    (
        SourceDefect(
            "the largest value is that of the first columns",
            QUANTIZE,
            f"            if not WHOLE:\n                {MORE}                    other",
            f"            if WHOLE:\n                {MORE}                    other",
        ),
        ("H32800",),
    ),
    (
        SourceDefect(
            "the last columns are not written",
            QUANTIZE,
            f"        if not WHOLE:\n            {MORE}                other",
            f"        if WHOLE:\n            {MORE}                other",
        ),
        ("H32800",),
    ),
    (
        SourceDefect(
            "every block of columns but the first holds the second's values",
            QUANTIZE,
            "\n                other = _load_values(\n"
            "                    x_ptr, weights_ptr, rows, columns + offset,",
            "\n                other = _load_values(\n"
            "                    x_ptr, weights_ptr, rows, columns + BLOCK_C,",
        ),
        ("H32800",),
    ),
    (
        SourceDefect(
            "every group of columns is the first",
            QUANTIZE,
            "first = group_index * group",
            "first = group_index * 0",
        ),
        ("static=true",),
    ),
    (
        SourceDefect(
            "programs that share rows take the same ones",
            QUANTIZE,
            "tl.program_id(0) % parts * BLOCK_R",
            "tl.program_id(0) // parts * BLOCK_R",
        ),
        ("T5-H1040",),
    ),
    (
        SourceDefect(
            "the largest value of all is that of the last columns",
            QUANTIZE,
            "largest = maximum_nan(largest, max_nan(tl.abs(value), 1))\n    tl.store",
            "largest = max_nan(tl.abs(value), 1)\n    tl.store",
        ),
        ("T5-H1040",),
    ),
    (
        SourceDefect(
            "the last columns are not looked at",
            QUANTIZE,
            "for first in range(0, num_columns, BLOCK_C):",
            "for first in range(0, num_columns // BLOCK_C * BLOCK_C, BLOCK_C):",
        ),
        ("T1-H1040",),
    ),
    (
        SourceDefect(
            "no least scale",
            QUANTIZE,
            "return maximum_nan(tl.div_rn(amax, LARGEST), MIN_SCALE)",
            "return tl.div_rn(amax, LARGEST)",
        ),
        ("channel-activation=swiglu_oai",),
    ),
    (
        SourceDefect(
            "the largest values are kept in 16 bits",
            "modular_kernel/ops/quantize.py",
            'specs[f"{prefix}_partials"] = BufferSpec((num_partials,), torch.float32)',
            'specs[f"{prefix}_partials"] = BufferSpec((num_partials,), torch.bfloat16)',
        ),
        ("T5-H1040",),
    ),
    (
        SourceDefect(
            "every program moves the first columns of a kept row",
            "modular_kernel/ops/kernels/rows.py",
            "    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)\n"
            "    mask = columns < hidden\n    row =",
            "    columns = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)\n"
            "    mask = columns < hidden\n    row =",
        ),
        ("T2-H1040",),
    ),
    (
        SourceDefect(
            "a call of one value is taken for one of none",
            "modular_kernel/ops/quantize.py",
            "    if x_RK.numel() == 0:\n",
            "    if x_RK.numel() == 1:\n",
        ),
        ("T1-H1-",),
    ),
    (
        SourceDefect(
            "a kept row of one value is taken for none",
            "modular_kernel/ops/reduce.py",
            "    if out.numel() == 0 or (weights_TK",
            "    if out.numel() == 1 or (weights_TK",
        ),
        ("tensor-combine=topk_weighted",),
    ),
)


TRITON = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
SINGLE = "experts/triton/gemv/kernels/gate_up.py"
PACKED_DOWN = "experts/triton/gemv_w4/kernels/down.py"
OF_TRITON = (
    (
        SourceDefect(
            "up's scales start at a whole block",
            SINGLE,
            "((scale_row + up_row) // GROUP_N) * stride_bsn",
            "(scale_row // GROUP_N + up_row // GROUP_N) * stride_bsn",
        ),
        "T1-H160-I80",
    ),
    (
        SourceDefect(
            "up takes gate's zero points",
            SINGLE,
            "up_zero_ptrs = zero_ptr + (scale_row + up_row) * stride_bzn",
            "up_zero_ptrs = zero_ptr + scale_row * stride_bzn",
        ),
        "T4-H160-I80-E17-K1-bfloat16-quant=int8_w8a16",
    ),
    (
        SourceDefect(
            "scales and zero points behind the last row are read",
            "experts/triton/gemv/kernels/down.py",
            "scale_mask = live[:, None, None] & (scale_row < hidden)[None, :, None]",
            "scale_mask = live[:, None, None] & (scale_row <= hidden)[None, :, None]",
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
            "rows of x are not weighted before packed weights",
            "experts/triton/gemv_w4/kernels/gate_up.py",
            "        sums *= row_weight\n",
            "        sums *= 1.0\n",
        ),
        "H192",
    ),
    (
        SourceDefect(
            "every token is the first before packed weights",
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
            "a warp for each pair forgets its router weight",
            PACKED_DOWN,
            "if HAS_ROW_WEIGHTS and TEAM > 0:",
            "if HAS_ROW_WEIGHTS and TEAM > 1:",
        ),
        "T1-H160-I32",
    ),
    (
        SourceDefect(
            "biases are left out where pairs do not share warps evenly",
            PACKED_DOWN,
            "if HAS_BIAS and TEAM > 0:",
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
            "blocks behind the depth are read by warps that have none",
            PACKED_DOWN,
            "live = live & (block < BLOCKS)",
            "live = live",
        ),
        "T1-H64-I256",
    ),
    (
        SourceDefect(
            "later blocks of packed weights meet the first block of h",
            PACKED_DOWN,
            "        h = load_pairs(pairs_ptr, pair, live, chunk, DEPTH, CHUNKS * HALVES, SLOTS)\n"
            "    after",
            "    after",
        ),
        "T1-H2144",
    ),
    (
        SourceDefect(
            "the largest value is that of the first columns",
            QUANTIZE,
            f"            if not WHOLE:\n                {MORE}                    other",
            f"            if WHOLE:\n                {MORE}                    other",
        ),
        "H16400",
    ),
)


@on_a_cpu
@pytest.mark.share(6)
@pytest.mark.parametrize(("wrong", "known_by"), OF_TRITON, ids=str)
def test_a_defect_of_few_tokens_is_told(wrong: SourceDefect, known_by: str, tmp_path: Path) -> None:
    cases = [case for case in handpicked_cases(*TRITON, this_machine()) if known_by in str(case)]
    assert len(cases) == 1
    assert findings(wrong, cases, tmp_path)


@on_a_cpu
def test_groups_that_every_program_takes_are_told(tmp_path: Path) -> None:
    """Of tokens that are quantized on their way to the experts' rows."""
    first = SourceDefect(
        "every program quantizes the first groups",
        "modular_kernel/ops/kernels/permute_quantize.py",
        "groups = tl.program_id(0) % group_blocks * BLOCK_G",
        "groups = tl.program_id(1) % group_blocks * BLOCK_G",
    )
    pair = ("BatchedPrepareAndFinalize", "NaiveBatchedExperts")
    cases = [case for case in handpicked_cases(*pair, this_machine()) if "T2-H2080" in str(case)]
    assert len(cases) == 1
    assert findings(first, cases, tmp_path)


@on_a_cpu
def test_padding_that_is_not_marked_is_told_by_what_lay_in_memory(tmp_path: Path) -> None:
    """Numbers as an earlier call leaves them, not huge ones alone, which kernels leave out."""
    unmarked = SourceDefect(
        "the first padding row of a block is not marked",
        "modular_kernel/ops/kernels/align.py",
        "fill = (position >= padding[:, None])",
        "fill = (position > padding[:, None])",
    )
    cases = cases_for(*TRITON, this_machine(), "smoke").cases[:1]
    assert findings(unmarked, cases, tmp_path)


@on_a_cpu
@pytest.mark.share(6)
@pytest.mark.parametrize(("wrong", "known_by"), WRONG, ids=str)
def test_a_defect_of_long_rows_and_odd_groups_is_told(
    wrong: SourceDefect, known_by: tuple[str, ...], tmp_path: Path
) -> None:
    cases = [case for case in CHOSEN if any(word in str(case) for word in known_by)]
    assert findings(wrong, cases, tmp_path)
