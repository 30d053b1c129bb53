"""The path `grouped_tma`, forced even where the heuristics select another path.

The cases cover every axis of the harness, partial groups and tiles, and experts with no, few and
many tiles. The harness adds poisoned workspaces, plans and graphs, and strided weights, for which
the part must select another path.
"""

from dataclasses import replace

import pytest
import torch
from forced_path_cases import cases_on

from experts.triton.configs.select import current_lookup, override_config
from experts.triton.grouped_tma import grouped_tma_config
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE, list_axis_variants
from modular_kernel.testing.cases.quantized import list_quantized_variants

SMALL = replace(BASE, dtype=torch.bfloat16, hidden=144, intermediate=208)
# With 150 rows and more per expert, the last tiles have more or less than 64 rows.
LARGE = replace(SMALL, tokens=391, hidden=320, intermediate=400)


def list_variants() -> list[tuple[Problem, str]]:
    """List every axis in bfloat16, and each quantized case of the harness.

    Axes and schemes are not combined. With few values, a single rounding step would exceed the
    harness's bounds for any implementation.
    """
    block_scaled = replace(LARGE, intermediate=448)
    variants = [
        *list_axis_variants(SMALL),
        *list_axis_variants(LARGE),
        *list_quantized_variants(BASE),
    ]
    for routing in ("uniform", "zipf", "skips", "out_of_range", "empty_experts"):
        variants += [
            (replace(block_scaled, quant="fp8_w8a8_block"), routing),
            (replace(LARGE, quant="fp8_w8a8_channel"), routing),
        ]
    return variants


CASES = cases_on("grouped_tma", list_variants())


def test_there_are_cases_where_the_path_runs() -> None:
    assert (len(CASES) > 100) == current_lookup().device.tma


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_are_correct(case: Case, machine: Machine) -> None:
    with override_config(grouped_tma_config.default_config(case.problem)):
        proof = prove(case, machine)
    assert proof.passed, str(proof)
