"""`mk bench --prepared` adds rows of layers whose weights were prepared once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped_gemm_stand_in import MXFP4
from prepared_weights_samples import NO_GPU, PAIR, make_launched_fixture
from run_mk import Mk, make_mk_fixture
from test_bench import _small_peaks  # noqa: F401  autouse fixture

from experts.triton.standard import TritonExperts
from modular_kernel.bench import run as run_module
from modular_kernel.bench import tables
from modular_kernel.bench.candidates import pairing_candidates
from modular_kernel.bench.run import BenchJob, run
from modular_kernel.catalog import this_machine
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.measure.cases import LayerCase
from modular_kernel.measure.prepared_weights import prepared_specs_of, prepared_tensor_bytes
from modular_kernel.measure.records import Report
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.spec.problem import Machine

pytestmark = NO_GPU
launched = make_launched_fixture()
mk = make_mk_fixture("bench", "--ms", "0.01")
SIZES = {"hidden": 32, "intermediate": 32, "experts": 2, "top_k": 1}
# With 13 rows per expert, GroupedW4Path needs prepared weights.
LAYER = replace(MXFP4, tokens=26, **SIZES)
CASE = LayerCase("small", replace(LAYER, quant="none"), RoutingKind("uniform"))
OPTIONS = (
    *("--pf-type", PAIR[0], "--experts-type", PAIR[1], "--tokens", "26", "--prepared"),
    *(word for name, size in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(size))),
)


@pytest.fixture(name="machine")
def interpreted_machine() -> Machine:
    machine = this_machine()
    if not machine.interpreter:
        pytest.skip("no Triton here")
    return machine


def test_prepared_row_follows_the_row_of_its_pair(machine: Machine, launched: list[int]) -> None:
    candidates = pairing_candidates(*PAIR, [LAYER], machine, prepared=True)
    assert [(candidate.name, candidate.prepared) for candidate in candidates] == [
        ("TritonExperts", False),
        ("TritonExperts prepared", True),
    ]
    launch_counts: list[int] = []
    report = run(
        BenchJob((CASE,), tuple(candidates), machine, target_ms=0.01),
        lambda _report: launch_counts.append(len(launched)),
    )
    assert launch_counts[0] == 0 < launch_counts[1]
    assert set(launched) == {32}
    unprepared_report = replace(report, rows=report.rows[:1])
    unprepared, prepared = report.rows
    assert (unprepared.status, prepared.status) == ("ok", "ok")
    assert prepared.group == unprepared.group
    assert (unprepared.prepared, prepared.prepared) == (False, True)
    assert prepared.floor_us == unprepared.floor_us
    assert tables.layer_label(prepared) == "TritonExperts prepared mxfp4_w4a16"
    assert "TritonExperts prepared mxfp4_w4a16:" in tables.format_row(prepared)
    assert Report.from_json(report.to_json()) == report
    for text in ("\n".join(tables.summary(report)), tables.markdown(report)):
        assert tables.PREPARED_NOTE in text
    assert tables.PREPARED_NOTE not in tables.summary(unprepared_report)
    assert tables.PREPARED_NOTE not in tables.markdown(unprepared_report)


def test_incorrectly_prepared_weights_are_reported_as_wrong(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare_zeros(self: object, weights: Any, out: dict[str, torch.Tensor]) -> None:
        for tensor in out.values():
            tensor.zero_()

    monkeypatch.setattr(TritonExperts, "prepare", prepare_zeros)
    candidates = pairing_candidates(*PAIR, [LAYER], machine, prepared=True)
    (row,) = run(BenchJob((CASE,), tuple(candidates[1:]), machine, target_ms=0.01)).rows
    assert (row.status, row.us) == ("wrong", None)


def test_layers_without_prepared_weights_are_refused(machine: Machine) -> None:
    cases = (replace(CASE, problem=replace(CASE.problem, dtype=torch.float16)),)
    candidates = pairing_candidates(*PAIR, [LAYER], machine, prepared=True)
    (refused,) = run(BenchJob(cases, tuple(candidates[1:]), machine, target_ms=0.01)).rows
    assert (refused.status, refused.prepared, refused.us) == ("refused", True, None)
    assert refused.note == "TritonExperts does not prepare weights of this problem"


def test_weight_sets_count_prepared_bytes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory limits the number of weight sets, so their size must include prepared weights."""
    sizes: list[float] = []

    def choose_rotation(
        call_bytes: float, weight_bytes: float, *_others: Any, **_options: Any
    ) -> Any:
        sizes.append(weight_bytes)
        raise RuntimeError("enough")

    monkeypatch.setattr(run_module, "choose_rotation", choose_rotation)
    candidates = pairing_candidates(*PAIR, [LAYER], machine, prepared=True)
    run(BenchJob((CASE,), tuple(candidates), machine, target_ms=0.01))
    unprepared_bytes, prepared_bytes = sizes
    assert prepared_bytes - unprepared_bytes == prepared_tensor_bytes(PAIR[1], LAYER) > 0


def test_only_parts_that_may_prepare_weights_are_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h200 = Machine("cuda", (9, 0), frozenset({"triton"}), name="NVIDIA H200")
    assert prepared_specs_of(PAIR[1], LAYER, h200) == prepared_specs_of(PAIR[1], LAYER) != {}
    a100 = Machine("cuda", (8, 0), frozenset({"triton"}), name="NVIDIA A100")
    assert prepared_specs_of(PAIR[1], LAYER, a100) == {}
    assert prepared_tensor_bytes(PAIR[1], replace(LAYER, quant="none")) == 0
    created: list[object] = []
    monkeypatch.setattr(PermuteExpertsUnpermute, "__init__", lambda *_: created.append(0))
    assert prepared_specs_of("DeepGemmExperts", LAYER) == {}
    assert not created


def test_command_times_prepared_weights(mk: Mk, machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    result = mk(*OPTIONS, "--quant", "mxfp4_w4a16,none", "--json", str(path))
    assert result.code == 0, result.err
    assert "TritonExperts prepared mxfp4_w4a16" in result.out
    assert tables.PREPARED_NOTE in result.out
    assert "not timed with prepared weights: TritonExperts none" in result.err
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert {(row["layer"], row["prepared"], row["quant"]) for row in rows} == {
        ("TritonExperts", False, "none"),
        ("TritonExperts", False, "mxfp4_w4a16"),
        ("TritonExperts prepared", True, "mxfp4_w4a16"),
        ("torch_grouped_mm", False, "none"),
    }


def test_command_refuses_schemes_without_prepared_weights(mk: Mk, machine: Machine) -> None:
    result = mk(*OPTIONS, "--quant", "none,fp8_w8a8_block")
    assert (result.code, result.out) == (2, "")
    assert "--prepared: got none, fp8_w8a8_block, not prepared by any" in result.err
    result = mk("--prepared", "--hf", "x.json")
    assert result.code == 2
    assert "prepared" in result.err
