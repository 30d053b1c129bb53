"""NaN propagation: every value computed from a NaN is NaN, and no other value is.

The tests cover every scheme and part that runs on a CPU, interpreted and in torch, with NaN in one
argument at a time.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nan_matrix import SCHEME_NAMES, Counts, check_calls, local_pairs, run, supported_problems

from experts.triton.configs.select import current_lookup, override_config
from experts.triton.paths import BY_NAME
from modular_kernel.catalog import check, load_catalog, this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.ops.quantize import quantize_values
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.testing.cases.handpicked import list_handpicked_cases
from modular_kernel.testing.cases.inputs import InputVariation, make_inputs
from modular_kernel.testing.cases.nan import (
    group_nan_arguments,
    list_nan_arguments,
    list_nan_problems,
    split_names,
)
from modular_kernel.testing.verify.compare_nan import compare_with_nan

CPU = torch.device("cpu")
PAIRS = local_pairs(this_machine())
# On a machine with a GPU, PAIRS has more parts, so the list for a CPU is separate.
CPU_WITH_INTERPRETER = Machine("cpu", None, frozenset({"triton", "ml_dtypes"}), interpreter=True)
INTERPRETED_PAIRS = local_pairs(CPU_WITH_INTERPRETER)
PROBLEM = Problem(4, 64, 64, 8, 2, torch.float32)


def test_all_schemes_and_parts_that_run_here_are_covered() -> None:
    tested, on_a_cpu = ({experts for _, experts in pairs} for pairs in (PAIRS, INTERPRETED_PAIRS))
    assert len(on_a_cpu) == 5
    assert on_a_cpu <= tested
    assert len(SCHEME_NAMES) == 22


@pytest.mark.parametrize("pair", PAIRS, ids=" x ".join)
def test_nan_rule_holds_with_interpreted_kernels(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    counts = run(pair, this_machine())
    with capsys.disabled():
        sys.stdout.write(f"\n{' x '.join(pair)}, interpreted: {counts}")
    assert counts.calls > 100
    assert counts.wrong == []


def test_nan_rule_holds_in_plain_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """A process without the interpreter runs the operations in torch."""
    program = ["env", "-u", "TRITON_INTERPRET", sys.executable, "tests/helpers/nan_matrix.py"]
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(program, cwd=root, capture_output=True, text=True, check=False)
    with capsys.disabled():
        sys.stdout.write(f"\nplain torch: {result.stdout}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == [
        "MoEPrepareAndFinalizeNoEP x TorchExperts",
        "BatchedPrepareAndFinalize x NaiveBatchedExperts",
    ]


@pytest.mark.parametrize("quant", ["fp8_w8a8_tensor", "fp8_w8a8_tensor:static=true"])
def test_the_gemv_path_ignores_nan_for_skipped_pairs(quant: str) -> None:
    """The scale that all pairs share may be NaN. Multiplying it by zero would give NaN."""
    machine, counts = this_machine(), Counts()
    pair = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
    problem = replace(supported_problems(pair, quant, machine, 64)[0], tokens=6)
    config = BY_NAME["gemv"].default_config(problem, problem.tokens, current_lookup().device)
    with override_config(config):
        check_calls(pair, problem, machine, counts)
    assert counts.calls == len(list_nan_arguments(problem))
    assert counts.wrong == []


def test_every_scheme_has_cases_for_each_of_its_arguments() -> None:
    """Only cases with many tokens count. Cases with few tokens have NaN only in arguments that
    affect single rows.
    """
    arguments_by_scheme: dict[str, set[str]] = {}
    for problem, nan in list_nan_problems():
        assert set(split_names(nan)) <= set(list_nan_arguments(problem))
        if problem.tokens > 2:
            arguments_by_scheme.setdefault(problem.quant, set()).update(split_names(nan))
    assert set(arguments_by_scheme) == set(SCHEME_NAMES)
    for quant, names in arguments_by_scheme.items():
        assert set(list_nan_arguments(replace(PROBLEM, quant=quant, bias=True))) <= names, quant


@pytest.mark.parametrize("pair", INTERPRETED_PAIRS, ids=" x ".join)
def test_lists_have_nan_cases_of_each_supported_scheme(pair: tuple[str, str]) -> None:
    cases = [
        case for case in list_handpicked_cases(*pair, CPU_WITH_INTERPRETER) if case.variation.nan
    ]
    supported_schemes = {
        quant
        for quant in SCHEME_NAMES
        if check(*pair, replace(cases[0].problem, quant=quant), CPU_WITH_INTERPRETER).ok
    }
    assert supported_schemes <= {case.problem.quant for case in cases}


def test_skipped_pairs_and_tokens_have_nan() -> None:
    inputs = make_inputs(PROBLEM, "uniform", CPU, variation=InputVariation(nan="w1"))
    is_skipped = inputs.routing.topk_ids_TK < 0
    assert is_skipped.tolist() == [[False, False]] * 3 + [[True, True]]
    assert torch.equal(inputs.routing.topk_weights_TK.isnan(), is_skipped)
    assert inputs.x_TH.isnan().any(1).tolist() == [False, False, False, True]
    assert int(inputs.weights.w1.isnan().sum()) == 1


def test_integer_arguments_have_no_nan_cases() -> None:
    problem = replace(PROBLEM, quant="int8_w8a8_channel")
    assert "w1" not in list_nan_arguments(problem)
    with pytest.raises(ConfigurationError, match="w1"):
        make_inputs(problem, "uniform", CPU, variation=InputVariation(nan="w1"))


def test_scales_shared_by_all_tokens_get_separate_calls() -> None:
    names = group_nan_arguments(replace(PROBLEM, quant="fp8_w8a8_tensor:static=true"))
    assert names[1:] == ("a1_scale", "a2_scale")
    assert group_nan_arguments(replace(PROBLEM, quant="fp8_w8a8_tensor"))[1:] == (
        "x",
        "w1",
        "w1_scale",
    )


def test_lost_and_spreading_nan_are_detected() -> None:
    rounded_reference = torch.randn(4, 64, dtype=torch.float64)
    exact = rounded_reference.clone()
    rounded_reference[1] = rounded_reference[2, 3] = torch.nan
    out = rounded_reference.float()
    assert compare_with_nan(out, exact, rounded_reference, PROBLEM).ok
    lost, spread, wrong = out.clone(), out.clone(), out.clone()
    lost[1, 5], spread[0, 0], wrong[2, 4] = 0.0, torch.nan, 9.0
    assert "1 values in 1 rows lost a NaN" in str(
        compare_with_nan(lost, exact, rounded_reference, PROBLEM)
    )
    for changed in (spread, wrong):
        assert not compare_with_nan(changed, exact, rounded_reference, PROBLEM).ok


@pytest.mark.parametrize("scheme", ["int8_w8a8_channel", "fp8_w8a8_block", "fp8_w8a8_tensor"])
def test_computed_scale_of_nan_is_nan(scheme: str) -> None:
    """Integer codes cannot represent NaN, so the scale must."""
    values = torch.randn(3, 256)
    values[1, 200] = torch.nan
    _, scale = quantize_values(values, QuantScheme.parse(scheme))
    rows = scale.isnan().view(len(scale), -1).any(1).tolist()
    assert rows == ([True] if len(scale) == 1 else [False, True, False])


# These parts use libraries that do not support biases or that need larger layers than those of
# `list_nan_problems`. Remove a scheme here and in docs/numerics.md when it gets cases.
SCHEMES_WITHOUT_NAN_CASES = {
    "BatchedCutlassExpertsFP4": {"nvfp4_w4a4"},
    "BatchedCutlassExpertsFP8": {"fp8_w8a8_channel", "fp8_w8a8_tensor:static=true"},
    "BatchedDeepGemmExperts": {"none", "fp8_w8a8_block"},
    "CutlassExpertsFP4": {"nvfp4_w4a4"},
    "CutlassExpertsFP8": {"fp8_w8a8_block"},
    "CutlassRowwiseExpertsFP8": {
        "fp8_w8a8_channel", "fp8_w8a8_tensor", "fp8_w8a8_tensor:static=true",
    },
    "DeepGemmExperts": {"none", "fp8_w8a8_block"},
}  # fmt: skip


def test_parts_without_nan_cases_are_known() -> None:
    """docs/numerics.md lists these parts."""
    missing_by_part: dict[str, set[str]] = {}
    catalog = load_catalog()
    parts = [part for part in catalog.parts if part.kind == "experts"]
    packages = {name for part in parts for name in part.cls.requires.packages}
    for part in parts:
        for arch in ((9, 0), (10, 0)):
            machine = Machine("cuda", arch, frozenset({*packages, "triton"}))
            missing = find_schemes_without_nan_cases(part.name, machine)
            if missing:
                missing_by_part.setdefault(part.name, set()).update(missing)
    assert missing_by_part == SCHEMES_WITHOUT_NAN_CASES


def find_schemes_without_nan_cases(experts: str, machine: Machine) -> set[str]:
    """Return the schemes that a part supports for some layer, but for which no case has NaN."""
    missing = set[str]()
    for prepare in ("MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize"):
        supported = {
            quant
            for quant in SCHEME_NAMES
            for size in (64, 256)
            if check(
                prepare,
                experts,
                Problem(4, size, size, 8, 2, torch.bfloat16, quant=quant),
                machine,
            ).ok
        }
        cases = list_handpicked_cases(prepare, experts, machine) if supported else ()
        missing |= supported - {case.problem.quant for case in cases if case.variation.nan}
    return missing
