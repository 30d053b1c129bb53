"""The path `dequantized` on a GPU, forced even where the heuristics select another path.

The cases cover the weight-only schemes, partial groups and tiles, and experts with no, few and many
tiles. The weights of experts are dequantized all at once or a few experts at a time.
"""

import pytest
from forced_path_cases import CHANGES, LARGE, cases_on, quantized_variants

from experts.triton.configs.select import current_lookup, override_config
from experts.triton.dequantized import dequantized_config
from modular_kernel.spec.problem import Machine
from modular_kernel.testing import Case, prove

QUANTS = (
    "int4_w4a16_group:group=32",
    "int4_w4a16_group",
    "int4_w4a16_group:group=64,zero_points=true",
    "mxfp4_w4a16",
    "mxfp4_w4a16:repacked=true",
    "int8_w8a16_channel",
    "int8_w8a16_group:group=64",
    "int8_w8a16_group:group=32,zero_points=true",
)
ALL_CHANGES: tuple[dict[str, object], ...] = (
    *CHANGES,
    {"hidden": 200, "intermediate": 136},
    {"chunk_tokens": 100},
)
# With few rows, all rounding errors may happen to have the same sign, so the cases have many rows.
CASES = cases_on("dequantized", quantized_variants(QUANTS, ALL_CHANGES, [(LARGE, "zipf")]))


def test_there_are_cases_where_the_path_runs() -> None:
    assert (len(CASES) > 100) == current_lookup().device.tma


@pytest.mark.parametrize("at_once", [64, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_proven(
    case: Case, at_once: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantized_config, "experts_per_chunk", lambda p: min(at_once, p.e))
    with override_config(dequantized_config.default_config(case.problem)):
        proof = prove(case, machine)
    assert proof.passed, str(proof)
