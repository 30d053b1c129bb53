"""The GEMM over sorted rows, compared with float64 for schemes, activations and partial tiles.

Rows that are gathered by token give the same bits as rows in order.
"""

from dataclasses import replace

import pytest
import torch

from experts.triton.configs.select import current_lookup
from experts.triton.grouped.base import GemmRows
from experts.triton.grouped_tma import grouped_tma_config
from experts.triton.grouped_tma.grouped_tma_path import GroupedTmaPath
from experts.triton.launch_config import Device, LaunchConfig
from experts.triton.operands import gemm1_operands, gemm2_operands
from modular_kernel.ops.activation import gated_activation_ref
from modular_kernel.ops.quantize import dequantize_rows, quantize_values
from modular_kernel.ops.sort import SortedPairs
from modular_kernel.quant.quantized_weights import dequantize
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.random_inputs import random_inputs

# Rows per expert: none, one, half a tile and its neighbors, whole tiles, and more.
ROWS_PER_EXPERT = (0, 1, 63, 64, 65, 128, 0, 129, 300)
SM_90 = Device("sm_90", tma=True)

pytestmark = pytest.mark.skipif(not current_lookup().device.tma, reason="needs sm_90")


def make_sorted_pairs(counts: tuple[int, ...]) -> SortedPairs:
    tiles, start = [], 0
    for expert, count in enumerate(counts):
        tiles += [(expert, row, start + count) for row in range(start, start + count, 128)]
        start += count
    capacity = len(tiles) + 2  # more capacity than tiles, as in real calls
    tile_table = torch.full((3 * capacity + 1,), 0x3F3F3F3F, dtype=torch.int32)
    tile_table[: 3 * capacity].view(3, -1)[:, : len(tiles)] = torch.tensor(
        tiles, dtype=torch.int32
    ).T
    tile_table[-1] = len(tiles)
    empty = torch.empty(0, 1, dtype=torch.int32)
    return SortedPairs(empty, empty, tile_table.cuda(), empty)


def make_problem(
    quant: str, activation: str, hidden: int, intermediate: int, bias: bool
) -> Problem:
    problem = Problem(
        sum(ROWS_PER_EXPERT), hidden, intermediate, len(ROWS_PER_EXPERT), 1, "bfloat16", quant,
        activation=activation, bias=bias,
    )  # fmt: skip
    assert grouped_tma_config.supports(problem, SM_90)
    return problem


CASES = [
    ("none", "silu", 64, 128, False),
    ("none", "silu", 72, 136, True),
    ("none", "relu2", 200, 264, True),
    ("none", "swiglu_oai:alpha=1.702,limit=1.2,interleaved=true", 320, 104, True),
    ("none", "gelu", 1032, 520, False),
    ("none", "silu", 264, 128, True),
    ("fp8_w8a8_channel", "silu", 128, 144, False),
    ("fp8_w8a8_channel", "relu2", 400, 272, True),
    ("fp8_w8a8_channel", "silu", 656, 272, True),
    ("fp8_w8a8_channel", "gelu", 1024, 80, False),
    ("fp8_w8a8_channel", "swiglu_oai:alpha=1.702,limit=1.2,interleaved=true", 144, 80, True),
    ("fp8_w8a8_block", "silu", 128, 128, False),
    ("fp8_w8a8_block", "silu", 400, 192, True),
    ("fp8_w8a8_block", "relu2", 272, 208, False),
    ("fp8_w8a8_block", "swiglu_oai:alpha=1.702,limit=1.2,interleaved=true", 528, 112, True),
]


@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"hidden": 1040},
        {"quant": "fp8_w8a8_channel"},
        # There are more tiles than programs, so the rows of the next tile are prefetched.
        {"intermediate": 4096},
        {"intermediate": 4096, "hidden": 1040},
        {"intermediate": 4096, "quant": "fp8_w8a8_channel"},
    ],
    ids=str,
)
def test_gathered_rows_give_bitwise_equal_results(change: dict[str, object], stages: int) -> None:
    """Each token has many rows. The tokens are a slice of a wider tensor that is NaN elsewhere."""
    base = make_problem("none", "silu", 1024, 264, True)
    problem = replace(base, **change)
    assert grouped_tma_config.gathers_tokens(problem)
    _, weights, _ = random_inputs(problem, torch.device("cuda"))
    operands = gemm1_operands(weights, problem)
    generator = torch.Generator("cuda").manual_seed(stages)
    wide = torch.full((40, problem.hidden + 64), float("nan"), device="cuda").bfloat16()
    values = wide[:, 32 : 32 + problem.hidden]
    values.normal_(generator=generator)
    x, scale = values, None
    if problem.scheme.quantized:
        x, scale = quantize_values(values.float(), problem.scheme)
    tokens = torch.randint(0, 40, (sum(ROWS_PER_EXPERT),), device="cuda", generator=generator)
    in_order = GemmRows(
        x[tokens].contiguous(), None if scale is None else scale[tokens].contiguous()
    )
    # Token indices after the last row are undefined.
    undefined_ids = torch.full((9,), 0x3F3F3F3F, device="cuda")
    gathered = GemmRows(x, scale, tokens=torch.cat([tokens, undefined_ids]).int())
    tile = replace(grouped_tma_config.default_config(problem).gemm1, num_stages=stages)
    outputs = []
    for rows in (in_order, gathered):
        out = torch.full(
            (sum(ROWS_PER_EXPERT) + 2, operands.size_n), float("nan"), device="cuda"
        ).bfloat16()
        GroupedTmaPath(problem).multiply(
            rows, operands, tile, make_sorted_pairs(ROWS_PER_EXPERT), out
        )
        outputs.append(out)
    assert bool(outputs[0][: sum(ROWS_PER_EXPERT)].isfinite().all())
    assert torch.equal(outputs[0].view(torch.int16), outputs[1].view(torch.int16))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("gemm", [1, 2])
def test_rows_are_close_to_float64(case: tuple[str, str, int, int, bool], gemm: int) -> None:
    problem = make_problem(*case)
    _, weights, _ = random_inputs(problem, torch.device("cuda"))
    operands = (gemm1_operands if gemm == 1 else gemm2_operands)(weights, problem)
    depth = operands.size_k
    generator = torch.Generator("cuda").manual_seed(gemm)
    # Two rows after those of the last expert stand for skipped pairs. Their outputs must stay NaN.
    values = torch.randn(sum(ROWS_PER_EXPERT) + 2, depth, device="cuda", generator=generator)
    values = values.to(torch.bfloat16)
    a, scale, exact = values, None, values.double()
    if problem.scheme.quantized:
        a, scale = quantize_values(values.float(), problem.scheme)
        exact = dequantize_rows(a, scale, problem.scheme).double()
    out = torch.full((len(values), operands.size_n), float("nan"), device="cuda").bfloat16()
    config = grouped_tma_config.default_config(problem)
    tile: LaunchConfig = config.gemm1 if gemm == 1 else config.gemm2
    GroupedTmaPath(problem).multiply(
        GemmRows(a, scale), operands, tile, make_sorted_pairs(ROWS_PER_EXPERT), out
    )
    w, b = operands.w, operands.bias
    if operands.scale is not None:
        w = dequantize(w, operands.scale, None, problem.scheme)
    start = 0
    for expert, count in enumerate(ROWS_PER_EXPERT):
        if not count:
            continue
        rows = slice(start, start + count)
        expected = exact[rows] @ w[expert].double().T
        magnitude = exact[rows].abs() @ w[expert].double().abs().T
        if b is not None:
            expected = expected + b[expert].double()
        if gemm == 1:
            expected = gated_activation_ref(expected, problem.act).double()
            magnitude = magnitude.max() * expected.abs().clamp(min=1.0)
        # The bound allows for one rounding to bfloat16, and for additions with a relative error of
        # 2^-13 (fp8) or 2^-22 each.
        sum_error = 2.0**-11 if problem.scheme.quantized else 2.0**-18
        bound = expected.abs() * 2.0**-8 + magnitude * sum_error + 1e-6
        assert bool(((out[rows].double() - expected).abs() <= bound).all()), expert
        start += count
    assert bool(out[start:].isnan().all())
