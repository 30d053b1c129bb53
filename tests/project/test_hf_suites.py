"""Tests of tools/hf_suites, which compares our parts with Hugging Face libraries: every case has an
outcome, and wrong results of our parts are detected.
"""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("transformers") is None or find_spec("safetensors") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from hf_suites import __main__ as program
from hf_suites import classes, packed, upstream
from hf_suites.outcomes import Case, Outcome, judge_errors, summarize

from modular_kernel.integrations.transformers import register
from modular_kernel.integrations.transformers.register import Registration

NAN = float("nan")
CALL = classes.Call("TorchExperts", torch.float32, 11, "no_grad")
CHANNEL_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": None,
        }
    },
}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (1e-3, 1e-3, Outcome.AGREE),
        (2e-2, 1e-3, Outcome.OURS),
        (1e-3, 2e-2, Outcome.THEIRS),
        (NAN, 1e-3, Outcome.OURS),
        (1e-3, NAN, Outcome.THEIRS),
        (2e-2, 2e-2, Outcome.OURS),
    ],
)
def test_float64_attributes_a_mismatch_to_a_side(ours, theirs, expected) -> None:
    assert judge_errors(ours, theirs, 1e-2)[0] is expected


def test_counts_include_every_case() -> None:
    cases = [Case("one", str(outcome), outcome, "why") for outcome in Outcome] * 2 + [
        Case("other", "x", Outcome.AGREE)
    ]
    counts = summarize(cases)
    assert counts["suites"]["one"]["total"] == 2 * len(Outcome)
    assert counts["suites"]["other"] == {
        **dict.fromkeys(map(str, Outcome), 0),
        "agree": 1,
        "total": 1,
    }
    assert {row["cases"] for row in counts["reasons"]} == {2}
    assert len(counts["bad"]) == 4


def test_bad_case_sets_exit_code_1(monkeypatch) -> None:
    for outcome in Outcome:
        cases = Case("one", "x", outcome), Case("one", "y", Outcome.AGREE)
        monkeypatch.setattr(program, "_run_classes", lambda _, cases=cases: cases)
        assert program.main(["classes"]) == int(outcome in (Outcome.OURS, Outcome.RAW))


def test_suite_without_usable_cases_is_bad() -> None:
    unusable = Case("packer", "x", Outcome.NOT_USABLE, "ModuleNotFoundError: datasets")
    counts = summarize([unusable, unusable, Case("other", "x", Outcome.AGREE)])
    assert counts["bad"] == ["packer: no case could be used: ModuleNotFoundError: datasets"]
    assert [(row["why"], row["cases"]) for row in counts["reasons"]] == [(unusable.why, 2)]


def _find_experts_class(name: str) -> type[torch.nn.Module]:
    return next(cls for cls in classes.import_classes() if cls.__name__ == name)


def test_outcome_of_an_experts_class() -> None:
    ours = register("MoEPrepareAndFinalizeNoEP", "TorchExperts", name="suites_test")
    mixtral = _find_experts_class("MixtralExperts")
    assert classes.case(mixtral, CALL, ours).outcome is Outcome.AGREE
    trainable = replace(CALL, mode="grad, trainable")
    assert classes.case(mixtral, trainable, ours).outcome is Outcome.AGREE
    refused_case = classes.case(_find_experts_class("MuseSparkExperts"), CALL, ours)
    assert refused_case.outcome is Outcome.REFUSED
    assert "norm" in refused_case.why


@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts", "NemotronHExperts"])
def test_defective_part_is_detected_in_a_class(monkeypatch, name) -> None:
    ours = register("MoEPrepareAndFinalizeNoEP", "TorchExperts", name="suites_test")
    forward = Registration.forward

    def forward_slightly_off(self, *args, **kwargs):
        return forward(self, *args, **kwargs) * (1 + 1e-4)

    def raise_error(self, *args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(Registration, "forward", forward_slightly_off)
    assert classes.case(_find_experts_class(name), CALL, ours).outcome is Outcome.OURS
    monkeypatch.setattr(Registration, "forward", raise_error)
    assert classes.case(_find_experts_class(name), CALL, ours).outcome is Outcome.RAW


def _pack(weight: torch.Tensor, _: torch.Generator) -> packed.Packed:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    exact_values = codes.double() * scale.double()
    tensors = {"weight": codes, "weight_scale": scale}
    return packed.Packed(tensors, exact_values, exact_values.float(), weight)


def _judge_packed_case(make, config=CHANNEL_CONFIG) -> Outcome:
    outcomes = {c.outcome for c in packed.cases(iter([packed.Packer("one", "x", config, make)]))}
    (outcome,) = outcomes
    return outcome


def test_packed_matrix_and_its_layer_agree() -> None:
    assert _judge_packed_case(_pack) is Outcome.AGREE


def test_packed_mismatch_is_attributed_to_a_side() -> None:
    def pack_with_wrong_theirs(weight, generator):
        matrix = _pack(weight, generator)
        return replace(matrix, their_values=matrix.their_values * 1.01)

    def pack_with_wrong_ours(weight, generator):
        matrix = _pack(weight, generator)
        return replace(matrix, expected=matrix.expected.roll(1, 0))

    def raise_error(weight, generator):
        raise ValueError("no such group")

    assert _judge_packed_case(pack_with_wrong_theirs) is Outcome.THEIRS
    assert _judge_packed_case(pack_with_wrong_ours) is Outcome.OURS
    assert _judge_packed_case(raise_error) is Outcome.NOT_USABLE
    assert _judge_packed_case(_pack, CHANNEL_CONFIG | {"format": "marlin-24"}) is Outcome.REFUSED


def test_defective_import_is_detected(monkeypatch) -> None:
    merge = packed.merge

    def merge_and_flip_rows(*args):
        merged = merge(*args)
        return replace(merged, w=merged.w.view(torch.uint8).flip(0).view(merged.w.dtype))

    monkeypatch.setattr(packed, "merge", merge_and_flip_rows)
    assert _judge_packed_case(_pack) is Outcome.OURS
    monkeypatch.setattr(packed, "merge", None)
    assert _judge_packed_case(_pack) is Outcome.RAW


def test_wrong_layer_output_is_detected(monkeypatch) -> None:
    layer = packed._compute_layer
    monkeypatch.setattr(packed, "_compute_layer", lambda *args: layer(*args) * 1.001)
    assert _judge_packed_case(_pack) is Outcome.OURS


def _make_test_record(outcome: str, ran: int = 1, why: str = "") -> dict[str, object]:
    return {"outcome": outcome, "why": why, "ran": ran}


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (_make_test_record("passed"), _make_test_record("passed"), Outcome.AGREE),
        (_make_test_record("passed"), _make_test_record("passed", 0), Outcome.NOT_REACHED),
        (_make_test_record("failed"), _make_test_record("failed"), Outcome.NOT_USABLE),
        (_make_test_record("skipped"), _make_test_record("skipped"), Outcome.NOT_USABLE),
        (None, _make_test_record("passed"), Outcome.NOT_USABLE),
        (_make_test_record("passed"), None, Outcome.RAW),
        (_make_test_record("passed"), _make_test_record("lost"), Outcome.RAW),
        (_make_test_record("passed"), _make_test_record("skipped"), Outcome.OURS),
        (
            _make_test_record("passed"),
            _make_test_record("failed", why="E AssertionError"),
            Outcome.OURS,
        ),
        (
            _make_test_record("passed"),
            _make_test_record("failed", why="E modular_kernel.errors.UnsupportedError: x"),
            Outcome.REFUSED,
        ),
        (
            _make_test_record("passed"),
            _make_test_record("failed", why="E modular_kernel.errors.CorruptionError: x"),
            Outcome.OURS,
        ),
    ],
)
def test_upstream_tests_count_only_if_they_pass_without_our_parts(theirs, ours, expected) -> None:
    sides = ({} if side is None else {"a::b": side} for side in (theirs, ours))
    (case,) = upstream.judge(*sides)
    assert case.outcome is expected


def test_failed_comparison_is_attributed_by_float64() -> None:
    case = Case("one", "x", Outcome.OURS, "not close")
    errors = {"eager": 4e-3, "batched_mm": 4e-3}
    assert (
        upstream.judge_by_errors(case, errors | {"modular_kernel": 4.1e-3}).outcome
        is Outcome.THEIRS
    )
    assert upstream.judge_by_errors(case, errors | {"modular_kernel": 6e-3}).outcome is Outcome.OURS
    assert upstream.judge_by_errors(case, errors | {"modular_kernel": NAN}).outcome is Outcome.OURS


def test_nan_is_the_maximum_error(monkeypatch) -> None:
    from hf_suites import float64_errors

    for errors in ([NAN, 1.0], [1.0, NAN]):
        max_errors = dict[str, float]()
        for error in errors:
            float64_errors.update_maximum(max_errors, "ours", error)
        assert max_errors["ours"] != max_errors["ours"]
    float64_errors.update_maximum(max_errors := {"ours": 1.0}, "ours", 2.0)
    float64_errors.update_maximum(max_errors, "ours", 0.5)
    assert max_errors == {"ours": 2.0}


def test_nan_gradient_is_detected() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    experts = torch.nn.ParameterList([weight])
    outcomes = [
        classes._compare_gradients(experts, ours, 2 * weight, torch.float32)[0]
        for ours in (2 * weight, 3 * weight, weight * NAN)
    ]
    assert outcomes == [Outcome.AGREE, Outcome.OURS, Outcome.OURS]


@pytest.mark.parametrize(
    ("source", "succeeds"), [("def test_forward(): pass", True), (None, False)]
)
def test_failed_pytest_run_raises(tmp_path, source, succeeds) -> None:
    """Pytest exits before any case if the file is missing. The folder for outcomes is created."""
    if source is not None:
        (tmp_path / "test_one.py").write_text(source)
    output_file = tmp_path / "new/folder/ours.jsonl"
    arguments = tmp_path, Path(torch.__file__).parents[1], ["test_one.py"], "theirs", output_file
    if not succeeds:
        with pytest.raises(RuntimeError, match="got exit code 4 on side theirs"):
            upstream.run(*arguments)
        return
    upstream.run(*arguments)
    assert '"outcome": "passed"' in output_file.read_text()


def test_test_file_without_cases_is_reported_as_a_case(tmp_path) -> None:
    result_folder = upstream.ResultFolder(tmp_path)
    result_folder.get_path("theirs").write_text(
        '{"case": "f::test_generate", "outcome": "passed", "why": "", "ran": 0}\n'
        '{"case": "half::test_generate", "outcome": "passed", "why": "", "ran": 0}\n'
    )
    result_folder.get_path("ours").write_text(
        '{"case": "f::test_generate", "outcome": "passed", "why": "", "ran": 3}\n'
    )
    result_folder.finish(["f", "g"])
    outcomes = {case.name: case.outcome for case in result_folder.list_outcomes()}
    assert outcomes == {"f::test_generate": Outcome.AGREE, "g": Outcome.NOT_USABLE}
