"""`mk tune` on a GPU: choices are compiled in worker processes, checked, screened and compared."""

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


def test_screened_stages_add_up_to_the_graph_time() -> None:
    pair = TunedPair(*PAIR, this_machine())
    space = pair.make_search_space(PROBLEM)
    with Compiler(workers=4) as compiler:
        bench = DeviceBenchmarker(pair, PROBLEM, compiler, tokens=(16, 256), space=space)
        untuned = space.untuned(256)
        bench.screen(256, untuned)  # The first call compiles the kernels.
        measured = bench.screen(256, untuned)
        assert isinstance(measured, StageTimes), measured
        (graph_seconds,) = bench.compare(256, [untuned]).values()
    assert isinstance(graph_seconds, float)
    assert sorted(measured.stages) == sorted(ConfigSpace.stages)
    assert 0.5 * measured.seconds < sum(measured.stages.values()) < measured.seconds
    # Each CUDA event costs a few microseconds. The measured time excludes host time, which is
    # hundreds of microseconds.
    assert 0.6 * graph_seconds < measured.seconds < 1.5 * graph_seconds + 3e-5


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block"])
def test_tuned_choices_are_saved_and_used(
    quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MK_CONFIG_DIR", str(tmp_path))
    clear_caches()
    problem = replace(PROBLEM, quant=quant)
    pair = TunedPair(*PAIR, this_machine())
    space = pair.make_search_space(problem)
    try:
        with Compiler(workers=8) as compiler:
            bench = DeviceBenchmarker(pair, problem, compiler, tokens=(1, 64), space=space)
            results = list(tune(TuneJob(space, bench, (1, 64), tmp_path, budget=200.0)))
        for tuned in results:
            assert tuned.finished
            assert tuned.wrong_choices == ()
            assert len(tuned.times) > 4
            assert tuned.best is not None
            assert tuned.best.untuned_seconds is not None
            assert tuned.best.seconds <= tuned.best.untuned_seconds
            with space.using(tuned.best.choice):
                selected = choose_config(problem, tuned.tokens, tuple(space.paths))  # type: ignore[attr-defined]
            assert selected == tuned.best.choice
        assert sorted(space.saved(tmp_path)) == [1, 64]
    finally:
        monkeypatch.undo()
        clear_caches()
