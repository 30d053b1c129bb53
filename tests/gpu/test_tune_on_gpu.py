"""`mk tune` on a GPU: compiled elsewhere, checked, screened by stage, compared as graphs."""

from dataclasses import replace
from pathlib import Path

import pytest

from experts.triton.configs.select import choose_config, clear_caches
from experts.triton.tuning.space import ConfigSpace
from modular_kernel.catalog import this_machine
from modular_kernel.contracts import StageTimes
from modular_kernel.spec.problem import Problem
from modular_kernel.tuning.compilation import Compiler, TunedPair
from modular_kernel.tuning.measurement import DeviceBenchmarker
from modular_kernel.tuning.search import TuneJob, tune

pytestmark = pytest.mark.alone

PROBLEM = Problem(tokens=256, hidden=2048, intermediate=1024, experts=16, top_k=4)
PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")


def test_screened_stages_add_up_to_what_a_graph_takes() -> None:
    pair = TunedPair(*PAIR, this_machine())
    space = pair.make_search_space(PROBLEM)
    with Compiler(workers=4) as compiler:
        bench = DeviceBenchmarker(pair, PROBLEM, compiler, tokens=(16, 256), space=space)
        untuned = space.untuned(256)
        bench.screen(256, untuned)  # compiles
        took = bench.screen(256, untuned)
        assert isinstance(took, StageTimes), took
        (seconds,) = bench.compare(256, [untuned]).values()
    assert isinstance(seconds, float)
    assert sorted(took.stages) == sorted(ConfigSpace.stages)
    assert 0.5 * took.seconds < sum(took.stages.values()) < took.seconds
    # Events cost some microseconds each; the host's hundreds are not in it.
    assert 0.6 * seconds < took.seconds < 1.5 * seconds + 3e-5


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block"])
def test_a_layer_is_tuned(quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_CONFIG_DIR", str(tmp_path))
    clear_caches()
    problem = replace(PROBLEM, quant=quant)
    pair = TunedPair(*PAIR, this_machine())
    space = pair.make_search_space(problem)
    try:
        with Compiler(workers=8) as compiler:
            bench = DeviceBenchmarker(pair, problem, compiler, tokens=(1, 64), space=space)
            found = list(tune(TuneJob(space, bench, (1, 64), tmp_path, budget=200.0)))
        for tuned in found:
            assert tuned.finished
            assert tuned.wrong_choices == ()
            assert len(tuned.times) > 4
            assert tuned.best is not None
            assert tuned.best.untuned_seconds is not None
            assert tuned.best.seconds <= tuned.best.untuned_seconds
            with space.using(tuned.best.choice):
                there = choose_config(problem, tuned.tokens, tuple(space.paths))  # type: ignore[attr-defined]
            assert there == tuned.best.choice
        assert sorted(space.saved(tmp_path)) == [1, 64]
    finally:
        monkeypatch.undo()
        clear_caches()
