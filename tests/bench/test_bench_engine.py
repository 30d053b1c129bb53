"""`mk bench --engine`, with a toy engine on a CPU and a simulated clock."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_engine import ToyEngine

from modular_kernel.bench import engine_classes, interleaved
from modular_kernel.bench.engine_classes import EngineLayer, can_time, make_blocks, time_classes
from modular_kernel.bench.interleaved import Comparison
from modular_kernel.catalog import this_machine
from modular_kernel.cli import bench as bench_cli
from modular_kernel.cli.bench_model import ModelOptions
from modular_kernel.cli.options import MeasuredProblemOptions
from modular_kernel.errors import ConfigurationError, UnsupportedError
from modular_kernel.measure import records as status
from modular_kernel.measure.cases import LayerCase
from modular_kernel.measure.records import Row
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.spec.problem import Machine, Problem

CPU = Machine("cpu")
BASE = Problem(tokens=3, hidden=64, intermediate=32, experts=4, top_k=2)
ROUNDS = 5


class CountingClock:
    """A clock that advances by 2 ms at every reading."""

    settle_ms = 0.0

    def __init__(self) -> None:
        self.readings = 0

    def mark(self) -> int:
        self.readings += 1
        return 2 * self.readings

    def ms(self, start: int, end: int) -> float:
        return float(end - start)

    def wait(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> CountingClock:
    clock = CountingClock()
    monkeypatch.setattr(interleaved, "make_clock", lambda device: clock)
    # The tests do not depend on the peaks, so that a fast measurement suffices.
    peaks = partial(interleaved.measure_peaks, size=64, nbytes=1 << 20)
    monkeypatch.setattr(interleaved, "measure_peaks", peaks)
    return clock


def make_cases(*tokens: int) -> list[LayerCase]:
    return [LayerCase("toy", BASE.with_tokens(t), RoutingKind.parse("uniform")) for t in tokens]


def time_named_classes(
    *names: str, tokens: tuple[int, ...] = (3,), quant: str = "none"
) -> dict[str, Row]:
    """Time the named classes and our pairings; return the rows of the last number of tokens."""
    (block,) = make_blocks(ToyEngine(), make_cases(*tokens), [quant], CPU)
    candidates = tuple(
        candidate
        for candidate in block.candidates
        if candidate.name == "TorchExperts" or candidate.name.removeprefix("toy ") in names
    )
    block = interleaved.CaseBlock(block.cases, candidates)
    comparison = Comparison((block,), this_machine(), rounds=ROUNDS, bandwidth=1e12)
    report = time_classes(comparison)
    return {row.layer: row for row in report.rows if row.tokens == tokens[-1]}


def test_right_classes_are_timed_in_turns_with_our_layers(clock: CountingClock) -> None:
    rows = time_named_classes("Right")
    assert set(rows) == {"TorchExperts", "toy Right"}
    for row in rows.values():
        assert (row.status, row.us, row.replays) == (status.OK, 2000.0, ROUNDS)
    # One more round measures how long a round takes.
    assert clock.readings == 2 * len(rows) * (ROUNDS + 1)
    assert rows["toy Right"].origin == status.PEER
    assert rows["toy Right"].library == "toy"


@pytest.mark.usefixtures("clock")
def test_wrong_failing_and_refusing_classes_are_not_timed() -> None:
    rows = time_named_classes("Doubled", "Raising", "Refusing", "NotBuilt")
    assert rows["toy Doubled"].status == status.WRONG
    assert rows["toy Raising"].status == status.FAILED
    assert rows["toy NotBuilt"].status == status.FAILED
    refused = rows["toy Refusing"]
    assert (refused.status, refused.note) == (status.REFUSED, "kernel does not support Tuesdays")
    assert all(row.us is None for name, row in rows.items() if name != "TorchExperts")
    assert rows["TorchExperts"].status == status.OK


@pytest.mark.usefixtures("clock")
def test_a_class_gets_the_weights_of_its_scheme() -> None:
    rows = time_named_classes("Right", tokens=(1, 3), quant="fp8_w8a8_channel")
    assert rows["toy Right"].status == status.OK
    assert rows["toy Right"].quant == "fp8_w8a8_channel"


def test_class_name_selects_its_candidates() -> None:
    (block,) = make_blocks(ToyEngine(), make_cases(1, 3), ["none"], CPU, "Right")
    assert [c.name for c in block.candidates if c.origin == status.PEER] == ["toy Right"]
    with pytest.raises(ConfigurationError, match="--experts-type: got Wrong"):
        make_blocks(ToyEngine(), make_cases(3), ["none"], CPU, "Wrong")
    with pytest.raises(ConfigurationError, match="--quant: got int4_w4a16_group"):
        make_blocks(ToyEngine(), make_cases(3), ["int4_w4a16_group"], CPU)


def test_schemes_whose_scales_engines_change_are_not_timed() -> None:
    assert all(can_time(q) for q in ("none", "fp8_w8a8_block", "int8_w8a8_channel", "mxfp4_w4a16"))
    quants = "fp8_w8a8_tensor:static=true", "int4_w4a16_group", "int8_w8a16_group", "nvfp4_w4a16"
    assert not any(map(can_time, quants))


def test_missing_activation_is_refused() -> None:
    engine = ToyEngine()
    layer = EngineLayer(engine, engine.describe(), "Right", "none")
    assert layer.refusal(BASE) is None
    relu2_problem = Problem(3, 64, 32, 4, 2, activation="relu2")
    assert layer.refusal(relu2_problem) == "toy has no activation relu2"
    assert EngineLayer(engine, engine.describe(), "Abstract", "none").refusal(BASE) == (
        "the class cannot run here"
    )


# ------------------------------------------------------------------------------------- CLI


def run_command(tmp_path: Path, **method_options: Any) -> Path:
    """Run the command with the toy engine; return the path of its record."""
    options = MeasuredProblemOptions(hidden=64, intermediate=32, experts=4, top_k=2)
    record = tmp_path / "record.json"
    bench_cli.bench(
        options=options,
        method=bench_cli.BenchMethod(tokens_list=(3,), bandwidth=1.0, **method_options),
        files=bench_cli.BenchFiles(as_json=str(record)),
        model_options=ModelOptions(),
        experts_type="Right",
        engine="vllm",
    )
    return record


def test_missing_gpu_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UnsupportedError) as caught:
        run_command(tmp_path)
    assert str(caught.value) == "mk bench --engine: got no GPU, need a GPU"


def test_command_records_the_time_of_a_class(
    tmp_path: Path, clock: CountingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check for a GPU is disabled, and the layers run on a CPU."""
    real_make_blocks = engine_classes.make_blocks
    monkeypatch.setattr(bench_cli, "load_engine", lambda engine: ToyEngine())
    monkeypatch.setattr(bench_cli, "check_gpu", lambda machine: None)
    monkeypatch.setattr(
        engine_classes,
        "make_blocks",
        lambda engine, cases, quants, machine, name: real_make_blocks(
            engine, cases, quants, CPU, name
        ),
    )
    record = json.loads(run_command(tmp_path).read_text())
    rows = {row["layer"]: row for row in record["rows"]}
    assert rows["toy Right"]["us"] == 2000.0
    assert len(rows) >= 2


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--eager together with --engine"):
        run_command(tmp_path, eager=True)
