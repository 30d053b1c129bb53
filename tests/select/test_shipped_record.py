"""The shipped record: estimates for other layers, and validation of the file."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modular_kernel.cli import compose_output
from modular_kernel.cli.presets import SHAPES
from modular_kernel.errors import ConfigurationError
from modular_kernel.select import autotune, shipped_record
from modular_kernel.select.autotune import MeasurementOptions, choose, compose
from modular_kernel.select.selection import (
    MAX_RATIO_TO_TIME,
    MAX_RATIO_UNTIMED,
    Bucket,
    Estimate,
    SelectionReason,
    TimedOutcome,
)
from modular_kernel.select.shipped_record import (
    LayerTimes,
    ShippedRecord,
    load_shipped_record,
    parse,
)
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.testing.random_inputs import random_inputs

A, B, C = ("P", "A"), ("P", "B"), ("P", "C")
H200 = Machine("cuda", (9, 0), frozenset({"triton"}), name="NVIDIA H200", cuda=(13, 0))
# The number of rows per expert equals the number of tokens, and size is 64 * 64.
PROBLEM = Problem(16, 64, 64, 8, 8, quant="fp8_w8a8_block")
SIZE = 64.0 * 64


def make_record(*measurements: tuple[str, float, float, dict]) -> ShippedRecord:
    return ShippedRecord((9, 0), tuple(LayerTimes(*measurement) for measurement in measurements))


def make_record_with_ratios(*ratios: float, scheme: str = "fp8_w8a8_block") -> ShippedRecord:
    """Return a record with the ratios of B at 16, 32, 64, ... rows per expert."""
    return make_record(*((scheme, 16.0 * 2**n, SIZE, {A: 1.0, B: r}) for n, r in enumerate(ratios)))


def test_estimate_uses_the_three_nearest_measurements() -> None:
    estimates = make_record_with_ratios(0.9, 0.8, 1.1, 0.1).estimates(PROBLEM, [B, C], A)
    assert estimates == {B: Estimate(0.8, 1.1, trusted=True)}
    estimates_of_more_rows = make_record_with_ratios(0.9, 0.8, 1.1, 0.1).estimates(
        PROBLEM.with_tokens(128), [B], A
    )
    assert estimates_of_more_rows == {B: Estimate(0.1, 1.1, trusted=True)}


def test_distance_includes_sizes() -> None:
    far = [("none", 16.0, SIZE * 16, {A: 1.0, B: 0.5})] * 3
    close = [("none", 16.0, SIZE * 2, {A: 1.0, B: 2.0})] * 3
    estimates = make_record(*far, *close).estimates(replace(PROBLEM, quant="none"), [B], A)
    assert estimates == {B: Estimate(2.0, 2.0, trusted=True)}


def test_ratios_are_relative_to_the_given_default() -> None:
    measurement = ("none", 16.0, SIZE, {A: 1.0, B: 0.5, C: 2.0})
    estimates = make_record(measurement).estimates(replace(PROBLEM, quant="none"), [A, C], B)
    assert estimates == {A: Estimate(2.0, 2.0), C: Estimate(4.0, 4.0)}
    assert make_record(measurement).estimates(replace(PROBLEM, quant="none"), [B], ("P", "D")) == {}


@pytest.mark.parametrize(
    ("change", "trusted"),
    [
        ({}, True),
        ({"quant": "fp8_w8a8_block:block=64x64"}, False),
        ({"quant": "fp8_w8a8_channel"}, False),  # the same element types
        ({"activation": "gelu"}, False),
        ({"bias": True}, False),
        ({"tokens": 4096}, False),  # too far from the measurements
        ({"hidden": 64 * 64}, False),
        ({"tokens": 0}, False),
    ],
    ids=str,
)
def test_only_estimates_of_similar_layers_are_trusted(change: dict, trusted: bool) -> None:
    estimates = make_record_with_ratios(0.9, 0.8, 0.7).estimates(replace(PROBLEM, **change), [B], A)
    assert estimates == {B: Estimate(0.7, 0.9, trusted)}


def test_estimates_from_two_measurements_are_not_trusted() -> None:
    assert make_record_with_ratios(0.9, 0.8).estimates(PROBLEM, [B], A) == {B: Estimate(0.8, 0.9)}


def test_other_scheme_families_have_no_estimate() -> None:
    assert (
        make_record_with_ratios(0.9, 0.8, 0.7).estimates(
            replace(PROBLEM, quant="int8_w8a8_block"), [B], A
        )
        == {}
    )
    assert (
        make_record_with_ratios(0.9, 0.8, 0.7).estimates(
            replace(PROBLEM, quant="fp8_w8a16_block"), [B], A
        )
        == {}
    )


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"lora": "adapters=2,rank=8"},
        {"batch_invariant": True},
        {"chunk_tokens": 8},
        {"parallel": Parallel(2)},
    ],
    ids=str,
)
def test_unrecorded_options_are_not_covered(change: dict) -> None:
    record, problem = make_record_with_ratios(0.9), replace(PROBLEM, quant="none")
    assert record.covers(problem, H200, routing="uniform")
    assert not record.covers(replace(problem, **change), H200, routing="uniform")


def test_other_machines_and_routings_are_not_covered() -> None:
    record = make_record_with_ratios(0.9)
    assert not record.covers(PROBLEM, replace(H200, arch=(8, 0)), routing="uniform")
    assert not record.covers(PROBLEM, Machine("cpu"), routing="uniform")
    assert not record.covers(PROBLEM, H200, routing="zipf")


# ---------------------------------------------------------------------------- the file


def test_the_shipped_record_is_what_the_tool_builds() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, str(root / "tools" / "build_prior.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0
    record = load_shipped_record()
    assert record is not None
    assert record.arch == (9, 0)
    assert len(record.measurements) > 250


def test_shipped_record_selects_no_slower_pairing() -> None:
    """Estimates for a layer are made without the measurements of layers of the same size."""
    record = load_shipped_record()
    assert record is not None
    slower, num_selected = [], 0
    for measurement in record.measurements:
        held_out_record = ShippedRecord(
            record.arch,
            tuple(other for other in record.measurements if other.size != measurement.size),
        )
        hidden = 64
        tokens, experts = (
            (int(measurement.rows), 8)
            if measurement.rows >= 1
            else (1, round(8 / measurement.rows))
        )
        problem = Problem(
            tokens, hidden, int(measurement.size) // hidden, experts, 8, quant=measurement.scheme
        )
        default = next(pair for pair, ratio in measurement.ratios.items() if ratio == 1)
        others = [pair for pair in measurement.ratios if pair != default]
        for pair, estimate in held_out_record.estimates(problem, others, default).items():
            if estimate.trusted and estimate.pessimistic <= MAX_RATIO_UNTIMED:
                num_selected += 1
                slower += [(measurement, pair)] * (measurement.ratios[pair] > 1)
    assert num_selected > 0
    assert slower == []


def test_default_is_not_timed_on_a_recorded_gpu(tmp_path: Path) -> None:
    """For a bfloat16 layer, no pairing is expected to be faster, so nothing is built or timed."""
    problem = Problem(1024, quant="none", **SHAPES["mixtral"])
    choice = choose(
        problem, H200, options=MeasurementOptions(folder=tmp_path, tokens=(1, 16, 1024))
    )
    assert choice.summary == "3 token counts: 3 from the shipped record"
    assert [s.pair for s in choice.segments] == [("MoEPrepareAndFinalizeNoEP", "TritonExperts")]
    (reason,) = (o.why for o in choice.outcomes(16) if o.pair[1] == "TorchExperts")
    assert reason.startswith("not timed: the shipped record expects ")
    assert reason.endswith("x the default's time")
    assert all(
        e.optimistic > MAX_RATIO_TO_TIME for e in choice.pairing_options.estimates[16].values()
    )


def test_trusted_pairing_runs_without_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the record, the naive pairing is faster at 1 to 4 rows per expert and slower at 64 to 256.
    The architecture of the record is None, as for a CPU.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    torch_pairing, naive_pairing = (
        ("MoEPrepareAndFinalizeNoEP", "TorchExperts"),
        ("BatchedPrepareAndFinalize", "NaiveBatchedExperts"),
    )
    measurements = [
        LayerTimes("none", 2.0**n, SIZE, {torch_pairing: 1.0, naive_pairing: 0.9}) for n in range(3)
    ]
    measurements += [
        LayerTimes("none", 2.0**n, SIZE, {torch_pairing: 1.0, naive_pairing: 1.2})
        for n in range(6, 9)
    ]
    monkeypatch.setattr(
        autotune, "load_shipped_record", lambda: ShippedRecord(None, tuple(measurements))
    )  # type: ignore[arg-type]
    problem = replace(PROBLEM, tokens=128, quant="none")
    kernel = compose(problem, Machine("cpu"), options=MeasurementOptions(folder=tmp_path, budget=0))
    segments = [(s.first, s.last, s.pair) for s in kernel.choice.segments]
    assert segments == [(0, 8, naive_pairing), (9, 128, torch_pairing)]
    assert kernel.choice.summary == (
        "8 token counts: 6 from the shipped record, 2 default (budget of 0 s spent)"
    )
    reason = "not timed: budget of 0 s spent"
    assert [o.why for o in kernel.choice.outcomes(16)] == [reason, reason]
    x_TH, weights, routing = random_inputs(problem.with_tokens(3), torch.device("cpu"))
    assert kernel(x_TH, weights, routing).isfinite().all()
    assert list(tmp_path.iterdir()) == []  # nothing is stored


def test_summary_names_the_pairings_that_the_record_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1 token, the naive pairing is timed. At 64, the record expects that it is slower."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    torch_pairing, naive_pairing = (
        ("MoEPrepareAndFinalizeNoEP", "TorchExperts"),
        ("BatchedPrepareAndFinalize", "NaiveBatchedExperts"),
    )
    record = ShippedRecord(
        None,
        tuple(
            LayerTimes("none", rows, SIZE, {torch_pairing: 1.0, naive_pairing: ratio})
            for rows, ratio in ((1, 0.9), (2, 0.9), (4, 0.9), (64, 1.2), (128, 1.2), (256, 1.2))
        ),
    )
    monkeypatch.setattr(autotune, "load_shipped_record", lambda: record)
    problem = replace(PROBLEM, tokens=64, quant="none")
    options = MeasurementOptions(folder=tmp_path, tokens=(1, 64), budget=60)
    choice = choose(problem, Machine("cpu"), options=options)
    assert choice.left_out == {}  # at 64 tokens, nothing was timed
    # The outcome of a default that was timed alone counts as timed, too.
    default = TimedOutcome(torch_pairing, 100.0, 1.0, mode="cpu")
    buckets = (*choice.buckets, Bucket(64, torch_pairing, (default,)))
    partly_timed_choice = replace(choice, buckets=buckets)
    assert partly_timed_choice.left_out == {naive_pairing: (64,)}
    assert partly_timed_choice.selected_by_tokens[64].reason is SelectionReason.TIMED
    assert partly_timed_choice.summary.endswith(
        "; not timed, because the shipped record expects no gain: NaiveBatchedExperts at 1 of 2"
    )
    assert compose_output.make_record(partly_timed_choice)["left_out"] == [
        {"pair": naive_pairing, "tokens": (64,)}
    ]


VALID_RECORD = {
    "schema": "mk-prior/1",
    "device": "G",
    "arch": [9, 0],
    "pairs": [list(A), list(B)],
    "measurements": [["none", 1.0, 64, [1.0, None]]],
}
INVALID_CHANGES = [
    {"schema": "mk-prior/0"},
    {"arch": [9]},
    {"arch": ["9", "0"]},
    {"pairs": None},
    {"pairs": [["P"]]},
    {"pairs": [list(A), list(A)]},
    {"measurements": {}},
    {"measurements": [["none", 1.0, 64]]},
    {"measurements": [["fp7", 1.0, 64, [1.0, None]]]},
    {"measurements": [["none", 0, 64, [1.0, None]]]},
    {"measurements": [["none", 1.0, True, [1.0, None]]]},
    {"measurements": [["none", 1.0, 64, [1.0]]]},
    {"measurements": [["none", 1.0, 64, [1.0, -1]]]},
    {"measurements": [["none", 1.0, 64, [1.0, "1"]]]},
]


def test_valid_record_is_parsed() -> None:
    assert parse(json.dumps(VALID_RECORD)) == ShippedRecord(
        (9, 0), (LayerTimes("none", 1.0, 64.0, {A: 1.0}),)
    )


@pytest.mark.parametrize("change", INVALID_CHANGES, ids=str)
def test_a_record_of_another_form_is_refused(change: dict) -> None:
    with pytest.raises(ConfigurationError, match="the shipped record"):
        parse(json.dumps(VALID_RECORD | change))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"schema": NaN}', None])
def test_corrupt_record_is_ignored_with_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
) -> None:
    file = tmp_path / "prior.json"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setattr(shipped_record, "FILE", file)
    load_shipped_record.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "modular_kernel.select"):
            assert load_shipped_record() is None
        # The process also logs once that the interpreter is enabled, in the first test that runs.
        (message,) = [r.getMessage() for r in caplog.records if r.name == "modular_kernel.select"]
        assert message.startswith("no shipped record of pairings' times: prior.json: ")
        choice = choose(
            PROBLEM, Machine("cpu"), options=MeasurementOptions(folder=tmp_path, budget=0)
        )
        assert choice.segments
    finally:
        load_shipped_record.cache_clear()
