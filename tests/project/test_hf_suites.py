"""tools/hf_suites: every case has an outcome, and wrong results of our parts are detected."""

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
from hf_suites.outcomes import Case, Outcome, judge_errors, summary

from modular_kernel.integrations.transformers import register
from modular_kernel.integrations.transformers.register import Registration

NAN = float("nan")
CALL = classes.Call("TorchExperts", torch.float32, 11, "no_grad")
CHANNEL = {
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
    ("ours", "theirs", "end"),
    [
        (1e-3, 1e-3, Outcome.AGREE),
        (2e-2, 1e-3, Outcome.OURS),
        (1e-3, 2e-2, Outcome.THEIRS),
        (NAN, 1e-3, Outcome.OURS),
        (1e-3, NAN, Outcome.THEIRS),
        (2e-2, 2e-2, Outcome.OURS),
    ],
)
def test_float64_attributes_a_mismatch_to_a_side(ours, theirs, end) -> None:
    assert judge_errors(ours, theirs, 1e-2)[0] is end


def test_counts_include_every_case() -> None:
    cases = [Case("one", str(end), end, "why") for end in Outcome] * 2 + [
        Case("other", "x", Outcome.AGREE)
    ]
    found = summary(cases)
    assert found["suites"]["one"]["total"] == 2 * len(Outcome)
    assert found["suites"]["other"] == {
        **dict.fromkeys(map(str, Outcome), 0),
        "agree": 1,
        "total": 1,
    }
    assert {row["cases"] for row in found["reasons"]} == {2}
    assert len(found["bad"]) == 4


def test_bad_case_sets_exit_code_1(monkeypatch) -> None:
    for end in Outcome:
        ends = Case("one", "x", end), Case("one", "y", Outcome.AGREE)
        monkeypatch.setattr(program, "_classes", lambda _, ends=ends: ends)
        assert program.main(["classes"]) == int(end in (Outcome.OURS, Outcome.RAW))


def test_suite_without_usable_cases_is_bad() -> None:
    absent = Case("packer", "x", Outcome.NOT_USABLE, "ModuleNotFoundError: datasets")
    found = summary([absent, absent, Case("other", "x", Outcome.AGREE)])
    assert found["bad"] == ["packer: no case could be used: ModuleNotFoundError: datasets"]
    assert [(row["why"], row["cases"]) for row in found["reasons"]] == [(absent.why, 2)]


def _experts_class(name: str) -> type[torch.nn.Module]:
    return next(cls for cls in classes.import_classes() if cls.__name__ == name)


def test_outcome_of_an_experts_class() -> None:
    ours = register("MoEPrepareAndFinalizeNoEP", "TorchExperts", name="suites_test")
    mixtral = _experts_class("MixtralExperts")
    assert classes.case(mixtral, CALL, ours).outcome is Outcome.AGREE
    trainable = replace(CALL, mode="grad, trainable")
    assert classes.case(mixtral, trainable, ours).outcome is Outcome.AGREE
    refused = classes.case(_experts_class("MuseSparkExperts"), CALL, ours)
    assert refused.outcome is Outcome.REFUSED
    assert "norm" in refused.why


@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts", "NemotronHExperts"])
def test_defective_part_is_detected_in_a_class(monkeypatch, name) -> None:
    ours = register("MoEPrepareAndFinalizeNoEP", "TorchExperts", name="suites_test")
    forward = Registration.forward

    def off(self, *given, **more):
        return forward(self, *given, **more) * (1 + 1e-4)

    def raising(self, *given, **more):
        raise RuntimeError("no")

    monkeypatch.setattr(Registration, "forward", off)
    assert classes.case(_experts_class(name), CALL, ours).outcome is Outcome.OURS
    monkeypatch.setattr(Registration, "forward", raising)
    assert classes.case(_experts_class(name), CALL, ours).outcome is Outcome.RAW


def _pack(weight: torch.Tensor, _: torch.Generator) -> packed.Packed:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    truth = codes.double() * scale.double()
    tensors = {"weight": codes, "weight_scale": scale}
    return packed.Packed(tensors, truth, truth.float(), weight)


def _outcome(make, config=CHANNEL) -> Outcome:
    ends = {c.outcome for c in packed.cases(iter([packed.Packer("one", "x", config, make)]))}
    (end,) = ends
    return end


def test_packed_matrix_and_its_layer_agree() -> None:
    assert _outcome(_pack) is Outcome.AGREE


def test_packed_mismatch_is_attributed_to_a_side() -> None:
    def theirs_is_off(weight, g):
        made = _pack(weight, g)
        return replace(made, their_values=made.their_values * 1.01)

    def ours_is_off(weight, g):
        made = _pack(weight, g)
        return replace(made, expected=made.expected.roll(1, 0))

    def raises(weight, g):
        raise ValueError("no such group")

    assert _outcome(theirs_is_off) is Outcome.THEIRS
    assert _outcome(ours_is_off) is Outcome.OURS
    assert _outcome(raises) is Outcome.NOT_USABLE
    assert _outcome(_pack, CHANNEL | {"format": "marlin-24"}) is Outcome.REFUSED


def test_defective_import_is_detected(monkeypatch) -> None:
    merge = packed.merge

    def upside_down(*given):
        made = merge(*given)
        return replace(made, w=made.w.view(torch.uint8).flip(0).view(made.w.dtype))

    monkeypatch.setattr(packed, "merge", upside_down)
    assert _outcome(_pack) is Outcome.OURS
    monkeypatch.setattr(packed, "merge", None)
    assert _outcome(_pack) is Outcome.RAW


def test_wrong_layer_output_is_detected(monkeypatch) -> None:
    layer = packed._layer
    monkeypatch.setattr(packed, "_layer", lambda *given: layer(*given) * 1.001)
    assert _outcome(_pack) is Outcome.OURS


def _line(outcome: str, ran: int = 1, why: str = "") -> dict[str, object]:
    return {"outcome": outcome, "why": why, "ran": ran}


@pytest.mark.parametrize(
    ("theirs", "ours", "end"),
    [
        (_line("passed"), _line("passed"), Outcome.AGREE),
        (_line("passed"), _line("passed", 0), Outcome.NOT_REACHED),
        (_line("failed"), _line("failed"), Outcome.NOT_USABLE),
        (_line("skipped"), _line("skipped"), Outcome.NOT_USABLE),
        (None, _line("passed"), Outcome.NOT_USABLE),
        (_line("passed"), None, Outcome.RAW),
        (_line("passed"), _line("lost"), Outcome.RAW),
        (_line("passed"), _line("skipped"), Outcome.OURS),
        (_line("passed"), _line("failed", why="E AssertionError"), Outcome.OURS),
        (
            _line("passed"),
            _line("failed", why="E modular_kernel.errors.UnsupportedError: x"),
            Outcome.REFUSED,
        ),
        (
            _line("passed"),
            _line("failed", why="E modular_kernel.errors.CorruptionError: x"),
            Outcome.OURS,
        ),
    ],
)
def test_upstream_test_counts_only_if_it_passes_without_ours(theirs, ours, end) -> None:
    sides = ({} if side is None else {"a::b": side} for side in (theirs, ours))
    (case,) = upstream.judge(*sides)
    assert case.outcome is end


def test_failed_comparison_is_attributed_by_float64() -> None:
    case = Case("one", "x", Outcome.OURS, "not close")
    errors = {"eager": 4e-3, "batched_mm": 4e-3}
    assert upstream.by_errors(case, errors | {"modular_kernel": 4.1e-3}).outcome is Outcome.THEIRS
    assert upstream.by_errors(case, errors | {"modular_kernel": 6e-3}).outcome is Outcome.OURS
    assert upstream.by_errors(case, errors | {"modular_kernel": NAN}).outcome is Outcome.OURS


def test_nan_error_is_the_largest(monkeypatch) -> None:
    from hf_suites import float64_errors

    for found in ([NAN, 1.0], [1.0, NAN]):
        largest = dict[str, float]()
        for error in found:
            float64_errors.update_maximum(largest, "ours", error)
        assert largest["ours"] != largest["ours"]
    float64_errors.update_maximum(largest := {"ours": 1.0}, "ours", 2.0)
    float64_errors.update_maximum(largest, "ours", 0.5)
    assert largest == {"ours": 2.0}


def test_nan_gradient_is_detected() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    experts = torch.nn.ParameterList([weight])
    end = [
        classes._compare_gradients(experts, ours, 2 * weight, torch.float32)[0]
        for ours in (2 * weight, 3 * weight, weight * NAN)
    ]
    assert end == [Outcome.AGREE, Outcome.OURS, Outcome.OURS]


@pytest.mark.parametrize(("text", "ends"), [("def test_forward(): pass", True), (None, False)])
def test_failed_pytest_run_is_no_result(tmp_path, text, ends) -> None:
    """A missing file ends pytest before any case runs. The folder for outcomes is created."""
    if text is not None:
        (tmp_path / "test_one.py").write_text(text)
    into = tmp_path / "new/folder/ours.jsonl"
    call = tmp_path, Path(torch.__file__).parents[1], ["test_one.py"], "theirs", into
    if not ends:
        with pytest.raises(RuntimeError, match="got exit code 4 on side theirs"):
            upstream.run(*call)
        return
    upstream.run(*call)
    assert '"outcome": "passed"' in into.read_text()


def test_test_file_without_cases_is_reported_as_a_case(tmp_path) -> None:
    lines = upstream.ResultFolder(tmp_path)
    lines.path_of("theirs").write_text(
        '{"case": "f::test_generate", "outcome": "passed", "why": "", "ran": 0}\n'
        '{"case": "half::test_generate", "outcome": "passed", "why": "", "ran": 0}\n'
    )
    lines.path_of("ours").write_text(
        '{"case": "f::test_generate", "outcome": "passed", "why": "", "ran": 3}\n'
    )
    lines.finish(["f", "g"])
    ends = {case.name: case.outcome for case in lines.outcomes()}
    assert ends == {"f::test_generate": Outcome.AGREE, "g": Outcome.NOT_USABLE}
