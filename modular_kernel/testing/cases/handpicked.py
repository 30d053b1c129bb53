"""Hand-picked cases with sizes that the axes of the pairwise cases do not reach.

The cases reach a second iteration of a loop over columns, a group of columns whose size is not a
power of two, or rows that several programs process together. One or two cases per shape are enough.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from modular_kernel.catalog import check, load_catalog
from modular_kernel.spec.problem import ActivationSpec, Combine, Machine, Problem
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.inputs import InputVariation
from modular_kernel.testing.cases.nan import list_nan_problems
from modular_kernel.testing.cases.path_coverage import list_external_path_cases, list_path_cases
from modular_kernel.testing.cases.quantized import list_declared_problems
from modular_kernel.testing.cases.row_order import apply_part_row_order

_BF16, _FP16 = torch.bfloat16, torch.float16
_PEAK_VALUES = InputVariation(values="peaks")
_BASE = Problem(tokens=5, hidden=48, intermediate=16, experts=1, top_k=1, dtype=_BF16)

HandpickedCase = tuple[Problem, str, InputVariation]  # the second value is the kind of routing


def list_handpicked_cases(
    prepare_finalize: str, experts: str, machine: Machine
) -> tuple[Case, ...]:
    """Return the hand-picked cases that a pairing supports on a machine."""
    # The interpreter's time is proportional to the row length, so parts in Triton get shorter rows.
    uses_triton = "triton" in load_catalog().experts(experts).requires.packages
    long_rows = _list_long_row_cases(16400 if uses_triton else 32800)
    nan = (
        (problem, "uniform", InputVariation(nan=names)) for problem, names in list_nan_problems()
    )
    paths = (
        *list_path_cases(experts),
        *list_external_path_cases(prepare_finalize, experts, machine),
    )
    declared = ((problem, "skips", InputVariation()) for problem in list_declared_problems())
    selected = (
        *_list_group_cases(),
        *_list_tensor_scale_cases(),
        *_list_few_token_cases(),
        *_list_packed_cases(),
        *_list_copied_row_cases(),
        *_list_min_scale_cases(),
        *_list_tie_cases(),
        *_list_threshold_cases(),
        *long_rows,
        *nan,
        *paths,
        *declared,
    )
    candidates = (
        (apply_part_row_order(p, experts), routing, variation) for p, routing, variation in selected
    )
    return tuple(
        Case(prepare_finalize, experts, problem, routing, variation=variation)
        for problem, routing, variation in candidates
        if check(prepare_finalize, experts, problem, machine).ok
    )


def _list_group_cases() -> Iterator[HandpickedCase]:
    """Yield cases with groups of activations whose size is not a power of two.

    The groups are smaller than the block of columns of a program. The last case has more groups
    than one program handles.
    """
    base = replace(_BASE, tokens=7, experts=5, top_k=2)
    ragged = replace(base, hidden=160, intermediate=136)
    yield replace(ragged, quant="fp8_w8a8_block:block=64x96"), "skips", InputVariation()
    yield (
        replace(ragged, quant="int8_w8a8_block:block=32x96", dtype=_FP16),
        "uniform",
        InputVariation(),
    )
    # Tiles do not cross groups, so only the torch parts support groups of 48.
    ragged_groups = replace(base, hidden=104, intermediate=80, quant="fp8_w8a8_block:block=64x48")
    yield ragged_groups, "duplicates", InputVariation()
    many_groups = replace(_BASE, tokens=2, hidden=2080, quant="fp8_w8a8_block:block=32x32")
    yield many_groups, "uniform", InputVariation()


def _list_tensor_scale_cases() -> Iterator[HandpickedCase]:
    """Yield cases with one scale for all tokens, and more columns or rows than a program reads.

    With dynamic scales, the largest value of x is the first value of the last token, or the last
    value of a single token.
    """
    wide = replace(_BASE, hidden=1040, quant="fp8_w8a8_tensor")
    yield replace(wide, dtype=_FP16), "uniform", _PEAK_VALUES
    yield wide.with_tokens(1), "uniform", _PEAK_VALUES
    # Some parts process four tokens one by one. The maximum is not in the first token.
    yield replace(_BASE, tokens=4, experts=17, quant="fp8_w8a8_tensor"), "uniform", _PEAK_VALUES
    yield replace(wide, quant="fp8_w8a8_tensor:static=true"), "uniform", InputVariation()


def _list_min_scale_cases() -> Iterator[HandpickedCase]:
    """Yield cases with values so small that the dynamic scale is clamped to its minimum.

    The activation is approximately linear near 0. With other activations, h would underflow to 0.
    """
    linear = ActivationSpec.parse("swiglu_oai:alpha=1.702,limit=1.0")
    small_outputs = replace(_BASE, activation=linear)
    yield (
        replace(small_outputs, quant="fp8_w8a8_channel"),
        "uniform",
        InputVariation(values="faint"),
    )
    yield (
        replace(small_outputs, quant="fp8_w8a8_tensor"),
        "uniform",
        InputVariation(values="faint"),
    )


def _list_threshold_cases() -> Iterator[HandpickedCase]:
    """Yield cases above the thresholds at which host code switches to another implementation.

    Batch-invariant problems need the same bits above and below a threshold. The sums are so long
    that another order of summation would change bits.
    """
    wide = replace(_BASE, hidden=160, intermediate=96, dtype=torch.float32, batch_invariant=True)
    # The threshold for x A^T, the first product of an adapter, is 8192 pairs times columns.
    lora = replace(wide, experts=3, lora="adapters=3,rank=80")
    yield replace(lora, tokens=35, top_k=3), "skips", InputVariation()
    # A single launch counts the pairs of each expert for up to 4096 pairs.
    many_pairs = replace(wide, tokens=520, hidden=80, intermediate=32, experts=9, top_k=8)
    yield replace(many_pairs, batch_invariant=False), "skips", InputVariation()
    # The threshold for the row length of an adapter's A is 4096.
    yield (
        replace(_BASE, tokens=2, hidden=4112, lora="adapters=3,rank=7"),
        "uniform",
        InputVariation(),
    )


def _list_tie_cases() -> Iterator[HandpickedCase]:
    """Yield cases in which x consists of midpoints between values of the quantized dtype.

    Only midpoints distinguish rounding half to even from rounding half up. Parts may quantize few
    and many tokens in different kernels, so there are cases of both.
    """
    ties = InputVariation(values="ties")
    few_tokens = replace(_BASE, tokens=3, hidden=160, intermediate=96, experts=17, top_k=2)
    many_tokens = replace(few_tokens, tokens=33, experts=3)
    schemes = (
        "fp8_w8a8_tensor",
        "fp8_w8a8_tensor:static=true",
        "fp8_w8a8_channel",
        "fp8_w8a8_block:block=32x32",
        "int8_w8a8_channel",
        "int8_w8a8_block:block=32x32",
        "nvfp4_w4a4",
    )
    for quant in schemes:
        yield replace(few_tokens, quant=quant, bias=True), "uniform", ties
        yield replace(many_tokens, quant=quant, dtype=_FP16), "skips", ties


def _list_few_token_cases() -> Iterator[HandpickedCase]:
    """Yield cases with few tokens and many experts, for kernels that process each token separately.

    In the cases with blocks, the first up row is not at the start of a block of scales. The last
    case has one expert, so a read past the last row is outside of the buffer.
    """
    base = replace(_BASE, tokens=1, hidden=160, intermediate=80, experts=17)
    blocks = replace(base, quant="fp8_w8a8_block:block=48x64")
    yield replace(blocks, top_k=3), "uniform", InputVariation()
    yield blocks.with_tokens(4), "zipf", InputVariation()
    zeros = replace(base, quant="int8_w8a16_group:group=32,zero_points=true", bias=True)
    yield zeros.with_tokens(4), "skips", InputVariation()
    ragged = replace(zeros, hidden=51, intermediate=47, experts=1, bias=False)
    yield ragged, "uniform", InputVariation()


def _list_packed_cases() -> Iterator[HandpickedCase]:
    """Yield cases with packed weights of several experts and biases, for specialized kernels."""
    packed = replace(_BASE, hidden=128, intermediate=64, experts=5, top_k=2, bias=True)
    zeros = replace(packed, quant="int4_w4a16_group:group=32,zero_points=true")
    interleaved = ActivationSpec.parse("swiglu_oai:alpha=1.702,limit=1.0,interleaved=true")
    yield replace(zeros, tokens=9, activation=interleaved), "skips", InputVariation()
    yield replace(zeros, tokens=1), "uniform", InputVariation()
    int4 = replace(packed, quant="int4_w4a16_group:group=64")
    yield replace(int4, tokens=9), "uniform", InputVariation()
    unreduced = replace(int4, tokens=9, combine=Combine.TOPK_UNWEIGHTED)
    yield unreduced, "skips", InputVariation()
    # Two tokens, an ungated activation, and router weights applied to the input.
    on_input = replace(int4, top_k=1, apply_router_weight_on_input=True)
    ungated = replace(on_input, hidden=192, activation=ActivationSpec.parse("relu2"))
    yield ungated.with_tokens(2), "uniform", InputVariation()
    # One token in float16. First, eight experts with one warp each, and K is not a multiple of a
    # block. Then, three experts on eight warps, with repacked words.
    one_token = replace(packed, tokens=1, hidden=160, intermediate=32, dtype=_FP16)
    top_8 = replace(one_token, experts=17, top_k=8, activation=interleaved)
    yield replace(top_8, quant="mxfp4_w4a16"), "skips", InputVariation()
    top_3 = replace(one_token, hidden=64, intermediate=160, experts=7, top_k=3)
    yield replace(top_3, quant="mxfp4_w4a16:repacked=true"), "uniform", InputVariation()
    # Every fourth warp has a full block. A read past the last expert is outside of the buffer.
    full_block = replace(zeros, hidden=64, intermediate=256, experts=2)
    yield full_block.with_tokens(1), "uniform", InputVariation()
    # The depth of GEMM 2 ends after the first half of a block.
    yield replace(full_block, tokens=1, intermediate=128), "uniform", InputVariation()
    # GEMM 2 has two blocks, each of which consists of two chunks.
    yield replace(zeros, tokens=1, hidden=32, intermediate=512), "uniform", InputVariation()
    # The steps of the GEMM with several tokens per expert divide K.
    even_k = replace(int4, tokens=9, hidden=512, intermediate=32)
    yield even_k, "uniform", InputVariation()
    # K is 48, not a multiple of the 32 columns of an MMA. A single group of 64 contains the row, or
    # three groups of 16 divide it. Rows of weights are aligned nevertheless.
    for quant in ("int4_w4a16_group:group=64", "nvfp4_w4a16"):
        odd_k = replace(packed, hidden=48, intermediate=48, experts=2, quant=quant)
        for tokens in (1, 9):
            yield odd_k.with_tokens(tokens), "uniform", InputVariation(layout="spaced")
    # More blocks than are prefetched.
    top_9 = replace(packed, hidden=2144, intermediate=32, experts=10, top_k=9)
    top_9 = replace(top_9, quant="int4_w4a16_group:group=32")
    yield top_9.with_tokens(1), "uniform", InputVariation()
    # Many pairs, whose number is not a multiple of any number of warps.
    top_22 = replace(one_token, hidden=64, experts=40, top_k=22)
    yield replace(top_22, quant="mxfp4_w4a16"), "skips", InputVariation()


def _list_copied_row_cases() -> Iterator[HandpickedCase]:
    unreduced = replace(_BASE, tokens=2, hidden=1040, experts=2, top_k=2, routed_scaling_factor=2.5)
    yield replace(unreduced, combine=Combine.TOPK_WEIGHTED), "skips", InputVariation()
    smallest = replace(_BASE, tokens=1, hidden=1, intermediate=1, quant="fp8_w8a8_channel")
    yield smallest, "uniform", InputVariation()
    unreduced = replace(smallest, quant="fp8_w8a8_tensor", combine=Combine.TOPK_WEIGHTED)
    yield unreduced, "uniform", InputVariation()


def _list_long_row_cases(hidden: int) -> Iterator[HandpickedCase]:
    """Yield cases with rows that share a scale and are longer than one program holds.

    hidden: row length of x in the first case. In the second case, rows of h are so long that the
        largest value is rarely among the first 16384 values, which one program holds.
    """
    base = replace(_BASE, tokens=2, quant="fp8_w8a8_channel")
    yield replace(base, hidden=hidden), "uniform", _PEAK_VALUES
    narrow = replace(base, hidden=16, activation=ActivationSpec.parse("relu2"))
    yield replace(narrow, tokens=4, intermediate=36000), "uniform", InputVariation()
