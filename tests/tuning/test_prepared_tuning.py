"""Launches of calls with prepared weights: explained, tuned, and saved in separate files."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grouped_gemm_stand_in import MXFP4
from prepared_weights_samples import (
    NO_GPU,
    PAIR,
    call_kernel,
    make_launched_fixture,
    make_prepared_kernel,
)
from run_mk import Mk, make_mk_fixture
from simulated_tuning import FakeBenchmark, tune_one
from tuned_config_files import file_contents, make_h200_fixture, write_config_file

from experts.triton.configs import select as tiles
from experts.triton.configs.files import ConfigKey, config_to_json, file_names_for
from experts.triton.configs.heuristics import make_heuristic_steps
from experts.triton.configs.select import choose_config, current_lookup, explain, override_config
from experts.triton.launch_config import MoEConfig
from experts.triton.paths import BASE_PATH, BY_NAME
from experts.triton.standard import TritonExperts, supported_paths
from experts.triton.tuning.space import ConfigSpace
from modular_kernel.catalog import this_machine
from modular_kernel.cli import tune as tune_verb
from modular_kernel.cli.tune_output import TunedLayer, TuneRecorder, make_record
from modular_kernel.contracts import Choice, StageTimes, TunedChoice
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem
from modular_kernel.tuning.compilation import TunedPair
from modular_kernel.tuning.measurement import DeviceBenchmarker
from modular_kernel.tuning.search import TuneResult

pytestmark = NO_GPU
here = make_h200_fixture()
launched = make_launched_fixture()
mk = make_mk_fixture("tune")
SIZES = {"experts": 6, "top_k": 3, "hidden": 64, "intermediate": 64}
LAYER = replace(MXFP4, tokens=8192, **SIZES)
ON_H200 = ("--device-name", "NVIDIA H200", "--explain", "--prepared", "--model", "mixtral")


def make_space(problem: Problem = LAYER) -> ConfigSpace:
    space = TritonExperts.tunable(problem)
    assert space is not None
    prepared_space = space.for_prepared_weights()
    assert isinstance(prepared_space, ConfigSpace)
    return prepared_space


def get_tokens(rows_per_expert: int) -> int:
    """Return the number of tokens of LAYER with this mean number of rows per expert."""
    return rows_per_expert * LAYER.experts // LAYER.top_k


def find_preparing_paths(problem: Problem) -> set[str]:
    """Return the paths that prepare weights of `problem` on this machine."""
    return {name for name in supported_paths(problem) if BY_NAME[name].prepared_configs(problem)}


# ---------------------------------------------------------------------------------- saved launches


def test_tuned_launches_are_used_with_prepared_weights_only(
    here: Path, launched: list[int]
) -> None:
    def get_seconds(tokens: int, choice: Choice) -> float:
        assert isinstance(choice, MoEConfig)
        return (
            1.0
            if choice.path in find_preparing_paths(LAYER) and choice.gemm1.block_m == 64
            else 100.0
        )

    prepared_space = make_space()
    (kernel, inputs), tokens = make_prepared_kernel(tokens=get_tokens(60), **SIZES), get_tokens(60)
    config_without_prepared = choose_config(LAYER, tokens, prepared_space.paths)
    call_kernel(kernel, inputs, kernel.prepare_weights(inputs.weights))
    call_kernel(kernel, inputs)
    assert launched == [128, 128, 128, 128]
    tuned = tune_one(prepared_space, FakeBenchmark(get_seconds), tokens=(tokens,), folder=here)
    assert tuned.best is not None
    assert tuned.best.untuned_seconds == 100.0, "tiles of 128 rows are untuned"
    assert (
        tuned.file == here / "triton_3_6_0" / file_names_for(LAYER, "NVIDIA H200", prepared=True)[0]
    )
    launched.clear()
    kernel, inputs = make_prepared_kernel(tokens=tokens, **SIZES)
    call_kernel(kernel, inputs, kernel.prepare_weights(inputs.weights))
    assert launched == [64, 64]
    call_kernel(kernel, inputs)
    assert launched == [64, 64, 128, 128]
    assert choose_config(LAYER, tokens, prepared_space.paths) == config_without_prepared
    assert choose_config(LAYER, tokens, prepared_space.paths, prepared=True) == tuned.best.choice
    assert prepared_space.saved(here)[tokens].choice == tuned.best.choice
    explanation = prepared_space.explain(tokens)
    assert f"from {tuned.file}: tokens {tokens} is" in explanation
    assert "no tuned file" not in explanation
    assert str(tuned.file) not in explain(LAYER, tokens, paths=prepared_space.paths)


def test_files_without_prepared_weights_do_not_apply(here: Path) -> None:
    """Such files do not affect the number of rows from which prepared weights are used."""
    prepared_space = make_space()
    other_config = BASE_PATH.default_config(LAYER, 1, current_lookup().device)
    configs_before = {
        t: choose_config(LAYER, t, prepared_space.paths, prepared=True)
        for t in (get_tokens(12), get_tokens(700))
    }
    for name in file_names_for(LAYER, "NVIDIA H200"):
        entries = {"1": config_to_json(other_config), "9999": config_to_json(other_config)}
        path = write_config_file(here / name, {**file_contents(), **entries})
        tiles.clear_caches()
        assert choose_config(LAYER, get_tokens(700), prepared_space.paths) == other_config
        for tokens, config in configs_before.items():
            assert config.path in find_preparing_paths(LAYER)
            assert choose_config(LAYER, tokens, prepared_space.paths, prepared=True) == config
        # With fewer rows, prepared weights are not used.
        assert (
            choose_config(LAYER, get_tokens(4), prepared_space.paths, prepared=True) == other_config
        )
        path.unlink()
    assert prepared_space.saved(here) == {}


def test_file_of_prepared_weights_applies_to_all_their_calls(here: Path) -> None:
    prepared_space = make_space()
    wide = make_heuristic_steps(
        LAYER, current_lookup().device, prepared_space.paths, prepared=True
    ).choose(get_tokens(12))
    other_config = BASE_PATH.default_config(LAYER, 1, current_lookup().device)
    assert wide.path in find_preparing_paths(LAYER)
    prepared_space.save(
        {2: TunedChoice(other_config, 1.0, None), 100: TunedChoice(wide, 1.0, None)}, here
    )
    prepared_space.save(
        {
            2: TunedChoice(other_config, 1.0, None),
            100: TunedChoice(wide, 1.0, None),
            90_000: TunedChoice(other_config, 1.0, None),
        },
        here,
    )
    choices = {
        t: choose_config(LAYER, t, prepared_space.paths, prepared=True)
        for t in (1, 50, 200, 40_000)
    }
    assert choices[1] == choices[50] == other_config
    assert choices[200] == choices[40_000] == wide, (
        "prepared weights are faster with any number of rows"
    )
    assert choose_config(LAYER, 50_000, prepared_space.paths, prepared=True) == other_config
    kernel, _ = make_prepared_kernel(tokens=get_tokens(20), **SIZES)
    assert "tiled_words" not in kernel.workspace_specs(kernel.problem.tokens)


def test_override_takes_precedence_over_the_file(here: Path, launched: list[int]) -> None:
    prepared_space = make_space()
    steps = make_heuristic_steps(
        LAYER, current_lookup().device, prepared_space.paths, prepared=True
    )
    prepared_space.save({1: TunedChoice(steps.choose(get_tokens(12)), 1.0, None)}, here)
    with override_config(steps.choose(get_tokens(60))):
        kernel, inputs = make_prepared_kernel(tokens=9, **SIZES)
        call_kernel(kernel, inputs, kernel.prepare_weights(inputs.weights))
    call_kernel(kernel, inputs, kernel.prepare_weights(inputs.weights))
    assert launched == [128, 128, 32, 32]


def test_file_names_of_prepared_weights_are_unique() -> None:
    key = ConfigKey.from_problem(LAYER, "NVIDIA H200", prepared=True)
    assert file_names_for(LAYER, "NVIDIA H200", prepared=True) == (key.file_name,)
    assert ConfigKey.parse(key.file_name) == key
    assert key.file_name not in file_names_for(LAYER, "NVIDIA H200")
    assert replace(key, prepared=False) == ConfigKey.from_problem(LAYER, "NVIDIA H200")


# ------------------------------------------------------------------------------ candidates


def test_paths_without_prepared_weights_have_no_space() -> None:
    for problem in (replace(LAYER, quant="none"), replace(LAYER, dtype=torch.float16)):
        space = TritonExperts.tunable(problem)
        assert space is not None
        assert space.for_prepared_weights() is None
    with pytest.raises(ConfigurationError, match="can be tuned with prepared weights"):
        TunedPair(*PAIR, this_machine(), prepared=True).make_search_space(
            replace(LAYER, quant="none")
        )


@pytest.mark.parametrize(
    ("number", "is_default", "is_candidate"),
    [(4, False, True), (12, True, True), (60, True, True), (3000, True, True)],
)
def test_candidates_depend_on_rows_per_expert(
    here: Path, number: int, is_default: bool, is_candidate: bool
) -> None:
    prepared_space, tokens = make_space(), get_tokens(number)
    candidate_paths = {
        choice.path for choice in prepared_space.candidates(tokens) if isinstance(choice, MoEConfig)
    }
    untuned = prepared_space.untuned(tokens)
    assert isinstance(untuned, MoEConfig)
    assert (untuned.path in find_preparing_paths(LAYER)) is is_default
    assert bool(candidate_paths & find_preparing_paths(LAYER)) is is_candidate
    assert candidate_paths - find_preparing_paths(LAYER), "others may be faster"


def test_choices_are_timed_with_prepared_weights(launched: list[int]) -> None:
    machine = this_machine()
    if not machine.interpreter:
        pytest.skip("Triton's interpreter is off")
    problem, fake_compiler = replace(LAYER, tokens=40), SimpleNamespace()
    pair = TunedPair(*PAIR, machine, prepared=True)
    search: Any = DeviceBenchmarker(pair, problem, fake_compiler, tokens=(40,), target_ms=1.0)  # type: ignore[arg-type]
    weights = search.weights
    assert weights.w1_tiles is not None
    choice = search.space.untuned(40)
    times = search.screen(40, choice)
    assert isinstance(times, StageTimes), times
    assert set(launched) == {32}
    (seconds,) = search.compare(40, [choice]).values()
    assert isinstance(seconds, float)
    # If the prepared words were not read, setting them to zero would not change the result.
    weights.w1_tiles.data.zero_()  # does not change the version counter
    assert search.screen(40, choice).is_wrong


# ------------------------------------------------------------------------------ the command


def test_explain_shows_launches_without_and_with_prepared_weights(mk: Mk, here: Path) -> None:
    options = ("--quant", "mxfp4_w4a16,none", "--tokens-list", "4,64,4096,32768")
    result = mk(*ON_H200, *options)
    assert result.code == 0
    assert result.err.strip() == "skipped mixtral none: no experts part prepares its weights"
    launches = [
        (
            "prepared weights" in explanation.splitlines()[0],
            explanation.partition("path: ")[2].split()[0],
        )
        for explanation in result.out.split("\n\n")
    ]
    paths = [path for is_prepared, path in launches if not is_prepared]
    assert [is_prepared for is_prepared, _ in launches] == [False, True] * 4
    assert len(set(paths)) > 1
    prepared_paths = [path for is_prepared, path in launches if is_prepared]
    assert prepared_paths == [paths[0], "grouped_w4", "grouped_w4", "grouped_w4"]
    assert paths[1] != "grouped_w4" != paths[3]
    assert "from heuristics for prepared weights, in place of" in result.out
    assert (
        "`mk tune --prepared` writes one: E=8,N=14336,device_name=NVIDIA_H200,dtype=" in result.out
    )
    explanations = json.loads(mk(*ON_H200, *options, "--json").out)["explanations"]
    assert "\n\n".join(explanations).strip() == result.out.strip()


@pytest.mark.parametrize(
    "words", [("--quant", "none"), ("--quant", "mxfp4_w4a16", "--dtype", "float16")]
)
def test_prepared_is_refused_without_prepared_weights(mk: Mk, words: tuple[str, ...]) -> None:
    result = mk(*ON_H200, *words, "--tokens", "64")
    assert (result.code, result.out) == (2, "")
    assert "--prepared: got" in result.err
    assert "need a scheme whose weights a tunable part prepares" in result.err
    assert "mxfp4_w4a16 in bfloat16 on an H200, without batch_invariant" in result.err


def test_device_name_may_be_spelled_as_in_file_names(mk: Mk, here: Path) -> None:
    options = (*ON_H200, "--quant", "mxfp4_w4a16", "--tokens", "64")
    options_of_file_name = [option.replace("NVIDIA H200", "NVIDIA_H200") for option in options]
    assert (
        mk(*options_of_file_name).out.replace("on NVIDIA_H200", "on NVIDIA H200")
        == mk(*options).out
    )


def test_output_and_records_show_prepared_weights(tmp_path: Path) -> None:
    machine = replace(this_machine(), device="cpu")
    if not machine.interpreter:
        pytest.skip("Triton's interpreter is off")
    unprepared, *_ = tune_verb._select_valid([("a", LAYER)], machine, None, "TritonExperts")
    ((name, problem, pair),) = tune_verb._select_valid(
        [("a", LAYER)], machine, None, None, prepared=True
    )
    assert (pair.experts, pair.prepared, unprepared[2].prepared) == ("TritonExperts", True, False)
    layer = TunedLayer(name, problem, pair, make_space(), (64,), tmp_path)
    assert layer.title == "a mxfp4_w4a16 prepared"
    choice = layer.space.untuned(64)
    tuned = TuneResult(64, TunedChoice(choice, 1e-5, 2e-5), {}, {}, finished=True)
    TuneRecorder(layer, tmp_path / "times.jsonl").append(tuned)
    assert json.loads((tmp_path / "times.jsonl").read_text())["prepared"] is True
    assert make_record(layer, [tuned], [])["prepared"] is True
