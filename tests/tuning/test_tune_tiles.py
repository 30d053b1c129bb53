"""Tuning of tiles: the search space of TritonExperts, and the files with its results."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_tuning import BEST_TILES, FakeBenchmark, stage_times, tile_cost, tune_one
from tuned_config_files import (
    LARGE_TILES,
    MACHINE,
    MIXTRAL,
    NAME,
    SMALL_TILES,
    file_contents,
    make_h200_fixture,
    vllm_launch,
    write_config_file,
)

from experts.triton.aligned.aligned_config import BLOCK_M_ROWS, entries
from experts.triton.aligned.aligned_path import AlignedPath
from experts.triton.configs import select as tiles
from experts.triton.configs.files import read_config_file
from experts.triton.configs.heuristics import config_violations, make_heuristic_steps
from experts.triton.configs.select import choose_config, current_lookup
from experts.triton.gemv.gemv_path import GemvPath
from experts.triton.grouped_tma import grouped_tma_config
from experts.triton.grouped_tma.grouped_tma_path import GroupedTmaPath
from experts.triton.launch_config import Device, MoEConfig
from experts.triton.paths import ALL_PATHS, BASE_PATH
from experts.triton.tuning.space import AdditiveTimeModel, ConfigSpace
from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.contracts import Choice, PermuteExpertsUnpermute, StageTimes, TunedChoice
from modular_kernel.errors import ConfigurationError
from modular_kernel.tuning.search import Refusal

here = make_h200_fixture()


def compute_seconds(tokens: int, pair: Choice) -> float:
    assert isinstance(pair, MoEConfig)
    return 1.0 + tile_cost(pair.gemm1, BEST_TILES[0]) + tile_cost(pair.gemm2, BEST_TILES[1])


@pytest.mark.parametrize("part", ["TritonExperts", "BatchedTritonExperts"])
def test_triton_parts_get_their_fastest_launches(here: Path, part: str) -> None:
    space = load_catalog().experts(part).tunable(MIXTRAL)
    assert isinstance(space, ConfigSpace)
    assert MoEConfig(*BEST_TILES, "aligned") not in space.candidates(128)
    tuned = tune_one(space, FakeBenchmark(compute_seconds), tokens=(128,), folder=here)
    assert tuned.best is not None
    assert tuned.best.choice == MoEConfig(*BEST_TILES, "aligned"), "the GEMMs of two candidates"
    assert len(tuned.times) < 60
    assert tuned.file == here / "triton_3_6_0" / NAME
    recipe = read_config_file(tuned.file)
    assert recipe.tuned_for is not None
    assert recipe.tuned_for.experts_part == part
    assert recipe.triton == "3.6.0"
    # A tuned file is then picked up.
    assert choose_config(MIXTRAL, 128) == tuned.best.choice
    assert str(tuned.file) in space.explain(128)


def test_search_ends_if_only_the_untuned_choice_runs(here: Path) -> None:
    space = ConfigSpace(MIXTRAL, "X")
    untuned = space.untuned(64)
    bench = FakeBenchmark(lambda t, choice: 1.0 if choice == untuned else Refusal("no"))
    tuned = tune_one(space, bench, tokens=(64,), folder=here)
    assert tuned.best == TunedChoice(untuned, 1.0, 1.0)
    assert tuned.finished


@pytest.mark.parametrize("tokens", [1, 16, 100, 300, 1000, 8192])
@pytest.mark.parametrize(
    "quant", ["none", "fp8_w8a8_block", "int8_w8a8_channel", "int4_w4a16_group", "mxfp4_w4a16"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_choice_can_be_launched(here: Path, tokens: int, quant: str, dtype: str) -> None:
    problem = replace(MIXTRAL, quant=quant, dtype=dtype)
    device = current_lookup().device
    for paths in ((BASE_PATH,), ALL_PATHS):
        space = ConfigSpace(problem, "X", paths)
        candidates = space.candidates(tokens)
        min_candidates = 1 if dtype == "float32" or problem.scheme.packed else 4
        assert min_candidates <= len(candidates) <= (60 if paths == (BASE_PATH,) else 110)
        assert len(set(candidates)) == len(candidates)
        for config in candidates:
            assert isinstance(config, MoEConfig)
            assert config.path in space.paths
            assert not list(config_violations(config, problem, device))
            with space.using(config):
                assert choose_config(problem, tokens, space.paths) == config


def test_candidates_have_blocks_that_rows_fill(here: Path) -> None:
    def find_block_sizes(tokens: int) -> set[int]:
        return {c.gemm1.block_m for c in ConfigSpace(MIXTRAL, "X").candidates(tokens)}

    assert find_block_sizes(1) == {16}
    assert find_block_sizes(64) == {16, 32}
    assert find_block_sizes(128) == {32, 64}
    assert find_block_sizes(4096) == {128}


def test_every_entry_can_be_launched_by_some_scheme(here: Path) -> None:
    """An entry that no scheme can launch would never be used."""
    quants = ("none", "fp8_w8a8_channel", "fp8_w8a8_block", "int4_w4a16_group", "mxfp4_w4a16")
    for quant in quants:
        entries_by_block_m = entries(replace(MIXTRAL, quant=quant))
        assert {32, 64, 128} <= set(entries_by_block_m) <= set(BLOCK_M_ROWS)
        for block_m, rows in entries_by_block_m.items():
            assert len(set(rows)) == len(rows)
            for _, _, warps, stages, *group in rows:
                assert warps in (1, 2, 4, 8)
                assert 2 <= stages <= 8
                assert all(block_m > 16 for _ in group), "short blocks have nothing to swizzle"


def test_small_4_bit_calls_have_separate_launches(here: Path) -> None:
    """A file with the fastest launches determines the launches, and is read back unchanged."""
    problem = replace(MIXTRAL, quant="int4_w4a16_group")
    space = ConfigSpace(problem, "TritonExperts", ALL_PATHS)
    candidates = [c for c in space.candidates(16) if c.path == "aligned_w4"]
    assert {c.gemm1.block_m for c in candidates} == {8, 16}
    other_choice = next(c for c in candidates if c != space.untuned(16))
    space.save({16: TunedChoice(other_choice, 1e-5, 2e-5)}, here)
    assert space.saved(here)[16].choice == other_choice
    assert choose_config(problem, 16, space.paths) == other_choice
    assert f"GEMM 2: {other_choice.gemm2}" in space.explain(16)


def test_untuned_choice_does_not_depend_on_tuned_files(here: Path) -> None:
    write_config_file(here / NAME, file_contents(tokens_1=(vllm_launch(64), vllm_launch(64))))
    space = ConfigSpace(MIXTRAL, "X")
    assert space.untuned(1) == make_heuristic_steps(
        MIXTRAL, current_lookup().device, ("aligned",)
    ).choose(1)
    assert space.candidates(1)[0] == choose_config(MIXTRAL, 1), (
        "the launch of a file is a candidate"
    )


def test_paths_are_tried_at_suitable_token_counts(here: Path) -> None:
    space = ConfigSpace(MIXTRAL, "X", (AlignedPath, GemvPath, GroupedTmaPath))

    def find_paths(tokens: int) -> set[str]:
        return {pair.path for pair in space.candidates(tokens) if isinstance(pair, MoEConfig)}

    assert find_paths(1) == {"aligned", "gemv"}
    assert find_paths(16) == {"aligned"}
    assert find_paths(4096) == {"aligned", "grouped_tma"}
    permuted = grouped_tma_config.default_config(MIXTRAL)
    path = space.save({8192: TunedChoice(permuted, 1.0, 1.0)}, here)
    assert choose_config(MIXTRAL, 8192, ("aligned", "grouped_tma")).path == "grouped_tma"
    assert choose_config(MIXTRAL, 8192).path == "aligned"
    assert space.saved(here)[8192].choice == permuted
    assert space.as_json(SMALL_TILES)["path"] == "aligned"
    assert path.exists()


def test_space_keeps_its_gpu_in_another_process(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = pickle.loads(pickle.dumps(ConfigSpace(MIXTRAL, "X")))
    with monkeypatch.context() as patch:
        patch.setattr(tiles, "current_machine", lambda: this_machine(device="cpu"))
        tiles.clear_caches()
        assert current_lookup().device.name == ""
        with space.using(space.candidates(1)[0]):
            assert current_lookup().device == Device.from_machine(MACHINE)
        assert current_lookup().device.name == ""
    tiles.clear_caches()


def test_time_model_needs_timed_launches() -> None:
    timings = {
        pair: StageTimes(compute_seconds(1, pair), stage_times(1, pair))
        for pair in (SMALL_TILES, LARGE_TILES)
    }
    time_model = AdditiveTimeModel(timings)
    assert sorted(time_model.kinds()) == [("aligned", 16), ("aligned", 32)]
    assert time_model.seconds(SMALL_TILES) == pytest.approx(compute_seconds(1, SMALL_TILES))
    with pytest.raises(KeyError):
        time_model.seconds(MoEConfig(*BEST_TILES, "aligned"))


def test_saved_results_are_loaded_by_the_next_run(here: Path) -> None:
    space = ConfigSpace(MIXTRAL, "TritonExperts")
    assert space.saved(here) == {}
    best = {
        t: TunedChoice(space.candidates(t)[0], 1e-4 + t, None if t == 9 else 2.5e-4)
        for t in (9, 1, 400)
    }
    path = space.save(best, here)
    assert space.saved(here) == best
    assert [p.name for p in path.parent.iterdir()] == [NAME], "no partial file remains"
    assert sorted(ConfigSpace(MIXTRAL.with_tokens(1), "TritonExperts").saved(here)) == [1, 9, 400]


@pytest.mark.parametrize(
    "other_space",
    [
        ConfigSpace(replace(MIXTRAL, hidden=2048), "TritonExperts"),
        ConfigSpace(replace(MIXTRAL, top_k=4), "TritonExperts"),
        ConfigSpace(MIXTRAL, "BatchedTritonExperts"),
    ],
    ids=["hidden", "top_k", "part"],
)
def test_file_of_another_layer_is_not_continued(here: Path, other_space: ConfigSpace) -> None:
    """Both files have the same name, which consists of E, I and the device."""
    space = ConfigSpace(MIXTRAL, "TritonExperts")
    path = space.save({1: TunedChoice(space.untuned(1), 1.0, 1.0)}, here)
    with pytest.raises(ConfigurationError, match="start afresh") as exc_info:
        other_space.saved(here)
    assert str(path) in str(exc_info.value)


def test_file_of_vllm_is_not_continued(here: Path) -> None:
    write_config_file(here / "triton_3_6_0" / NAME, {"1": vllm_launch()})
    with pytest.raises(ConfigurationError, match="vLLM"):
        ConfigSpace(MIXTRAL, "TritonExperts").saved(here)


def test_a_part_without_choices_has_nothing_to_tune() -> None:
    assert PermuteExpertsUnpermute.tunable(MIXTRAL) is None
    assert load_catalog().experts("TorchExperts").tunable(MIXTRAL) is None


def test_saving_reloads_files_in_this_process(here: Path) -> None:
    space = ConfigSpace(MIXTRAL, "TritonExperts")
    untuned_choice = choose_config(MIXTRAL, 64)
    other_choice = next(pair for pair in space.candidates(64) if pair != untuned_choice)
    space.save({64: TunedChoice(other_choice, 1.0, 1.0)}, here)
    assert choose_config(MIXTRAL, 64) == other_choice
    tiles.clear_caches()
    assert choose_config(MIXTRAL, 64) == other_choice


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("NVIDIA H200", "grouped_tma"),
        ("NVIDIA H100 80GB HBM3", "grouped_tma"),
        ("NVIDIA GH200 480GB", "grouped_tma"),
        ("NVIDIA A100-SXM4-80GB", "aligned"),
        ("NVIDIA B200", "aligned"),
    ],
)
def test_explain_uses_the_paths_of_the_named_gpu(here: Path, name: str, path: str) -> None:
    explanation = ConfigSpace(MIXTRAL, "TritonExperts", ALL_PATHS).explain(4096, name)
    assert f"  path: {path}\n" in explanation
