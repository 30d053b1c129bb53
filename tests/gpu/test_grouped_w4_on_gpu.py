"""The path `grouped_w4`, which unpacks 4-bit weights in registers, on a GPU.

The tests force this path for every case. The cases have both tile heights, partial tiles, and
experts with no, few and many tiles. Experts run all at once or a few at a time.
"""

from dataclasses import replace

import pytest
import torch
from forced_path_cases import CHANGES, LARGE, PAIR, SMALL, cases_on, quantized_variants

from experts.triton.configs.select import current_lookup, override_config
from experts.triton.grouped_w4 import grouped_w4_config
from modular_kernel import make_kernel
from modular_kernel.errors import WeightsError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.spec.problem import Machine
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.inputs import make_inputs

MXFP4_SCHEMES = ("mxfp4_w4a16", "mxfp4_w4a16:repacked=true")
OTHER_SCHEMES = (
    "int4_w4a16_group",
    "int4_w4a16_group:group=32",
    "int4_w4a16_group:group=64,zero_points=true",
    "int4_w4a16_group:group=96,zero_points=true",
    "nvfp4_w4a16",
)
MXFP4 = replace(LARGE, quant="mxfp4_w4a16")
ALL_CHANGES: tuple[dict[str, object], ...] = (
    *CHANGES,
    {"hidden": 2880, "intermediate": 96},
    {"hidden": 64, "intermediate": 2880},
    {"chunk_tokens": 100},
    {"tokens": 2048},
)
CHANGED_PROBLEMS = ((LARGE, "zipf"), (LARGE, "uniform"), (SMALL, "skips"))
CASES = cases_on("grouped_w4", quantized_variants(MXFP4_SCHEMES, ALL_CHANGES, CHANGED_PROBLEMS))
OTHER_CASES = cases_on(
    "grouped_w4", quantized_variants(OTHER_SCHEMES, ALL_CHANGES, CHANGED_PROBLEMS[1:2])
)
# Cases whose scales have 16 bits, as they are and with top-3 and a bias.
INT4_CASES = [case for case in OTHER_CASES if case.problem.scheme.weight == "uint4"]
SHORT_SCALE_CASES = [
    replace(case, variation=replace(case.variation, has_short_scales=True), problem=problem)
    for case in INT4_CASES[::3]
    for problem in (case.problem, replace(case.problem, top_k=3, bias=True))
]
OTHER_CASES += SHORT_SCALE_CASES


def test_there_are_cases_where_the_path_runs() -> None:
    assert (len(CASES) > 60 and len(OTHER_CASES) > 90) == current_lookup().device.tma


def _assert_case_is_correct(
    case: Case, rows: int, at_once: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_w4_config, "experts_per_chunk", lambda p: min(at_once, p.e))
    with override_config(grouped_w4_config.default_config(case.problem, rows)):
        proof = prove(case, machine)
    assert proof.passed, str(proof)


@pytest.mark.parametrize(("rows", "at_once"), [(128, 64), (64, 64), (128, 3)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_mxfp4_cases_are_correct(
    case: Case, rows: int, at_once: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _assert_case_is_correct(case, rows, at_once, machine, monkeypatch)


@pytest.mark.parametrize(("rows", "at_once"), [(128, 64), (64, 3)])
@pytest.mark.parametrize("case", OTHER_CASES, ids=str)
def test_integer_and_nvfp4_cases_are_correct(
    case: Case, rows: int, at_once: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _assert_case_is_correct(case, rows, at_once, machine, monkeypatch)


def test_prepared_weights_are_replayed_until_the_weights_are_written() -> None:
    problem = replace(MXFP4, hidden=512, intermediate=768)
    inputs = make_inputs(problem, "uniform", torch.device("cuda"))
    kernel = make_kernel(*PAIR, problem)
    weights, plan = kernel.prepare_weights(inputs.weights), kernel.plan()
    with override_config(grouped_w4_config.default_config(problem, 128)):
        forced_kernel = make_kernel(*PAIR, problem)
        expected = forced_kernel(inputs.x_TH, inputs.weights, inputs.routing)
    for _ in range(3):
        assert torch.equal(plan(inputs.x_TH, weights, inputs.routing), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = plan(inputs.x_TH, weights, inputs.routing)
    output.zero_()
    graph.replay()
    assert torch.equal(output, expected)
    inputs.weights.w2.view(-1)[0] ^= 1
    for replay in (plan, kernel):
        with pytest.raises(WeightsError, match="w2_tiles"):
            replay(inputs.x_TH, weights, inputs.routing)


def test_layer_with_prepared_weights_is_bitwise_equal_to_the_kernel() -> None:
    problem = replace(MXFP4, tokens=384)
    inputs = make_inputs(problem, "uniform", torch.device("cuda"))
    layer = FusedMoE(
        problem.experts, problem.hidden, problem.intermediate, top_k=problem.top_k,
        params_dtype=problem.dtype, quant_config=problem.quant, device="cuda",
    )  # fmt: skip
    layer.set_weights(inputs.weights)
    layer.prepare_weights()
    assert layer.weights().w1_tiles is not None
    kernel = make_kernel(*PAIR, problem)
    expected = kernel(inputs.x_TH, kernel.prepare_weights(inputs.weights), inputs.routing)
    assert torch.equal(layer(inputs.x_TH, inputs.routing), expected)
