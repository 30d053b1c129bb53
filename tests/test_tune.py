"""The tuner: what it picks, what it refuses, what it keeps, and when it stops."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tile_samples import MACHINE, MIXTRAL, NAME, ONE, TWO, launch, on_an_h200, ours, write

from experts import tile_permuted, tiles
from experts.tile_candidates import ROWS, entries
from experts.tile_files import read_recipe
from experts.tile_regimes import regimes
from experts.tile_search import Additive, TileSpace
from experts.tile_shapes import ALIGNED, PERMUTED, SINGLE, Device, Tile, TilePair, gemms, violations
from experts.tiles import choose_tiles, this_store
from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.errors import ConfigurationError
from modular_kernel.tunable import Best, Choice, Took, Tunable
from modular_kernel.tuning.search import Bench, Job, Refusal, Tuned, remaining, tune

FOLDER = Path("nowhere")


class Space(Tunable):
    """Choices are numbers; 0 is the untuned one. saves: what every `save` was given."""

    def __init__(self, choices: Sequence[int] = (1, 2, 3), finalists: int = 2) -> None:
        self.choices, self.count = choices, finalists
        self.kept: dict[int, Best] = {}
        self.saves: list[list[int]] = []
        self.told: list[Mapping[Choice, Took]] = []

    def untuned(self, tokens: int) -> Choice:
        return 0

    def candidates(self, tokens: int) -> Sequence[Choice]:
        return self.choices

    def finalists(self, tokens: int, took: Mapping[Choice, Took]) -> Sequence[Choice]:
        self.told.append(dict(took))
        return sorted(took, key=lambda choice: took[choice].seconds)[: self.count]

    @contextmanager
    def using(self, choice: Choice) -> Iterator[None]:
        yield

    def as_json(self, choice: Choice) -> Mapping[str, object]:
        return {"number": choice}

    def saved(self, folder: Path) -> Mapping[int, Best]:
        return self.kept

    def save(self, best: Mapping[int, Best], folder: Path) -> Path:
        self.kept = dict(best)
        self.saves.append(list(best))
        return folder / "file"

    def explain(self, tokens: int, device_name: str | None = None) -> str:
        return f"{tokens} tokens"


Times = Mapping[Choice, float | Refusal] | Callable[[int, Choice], float | Refusal]


@dataclass
class Fake(Bench):
    """Times by choice, or by what `times` makes of (tokens, choice); `final` those compared."""

    times: Times
    final: Times | None = None
    spilled: tuple[Choice, ...] = ()
    cost: float = 1.0
    now: float = 0.0
    timed: list[tuple[int, Choice]] = field(default_factory=list)
    compared: list[Choice] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)

    def compile_ahead(self, tokens: int, choices: Sequence[Choice]) -> None:
        self.events.append(("compile", tokens))

    def refusal(self, tokens: int, choice: Choice) -> Refusal | None:
        return Refusal("spills") if choice in self.spilled else None

    def screen(self, tokens: int, choice: Choice) -> Took | Refusal:
        self.now += self.cost
        self.events.append(("time", tokens))
        self.timed.append((tokens, choice))
        outcome = self.asked(self.times, tokens, choice)
        return outcome if isinstance(outcome, Refusal) else Took(outcome, staged(outcome, choice))

    def compare(self, tokens: int, choices: Sequence[Choice]) -> Mapping[Choice, float | Refusal]:
        self.compared += choices
        return {c: self.asked(self.final or self.times, tokens, c) for c in choices}

    def asked(self, times: Times, tokens: int, choice: Choice) -> float | Refusal:
        return times(tokens, choice) if callable(times) else times[choice]


def staged(seconds: float, choice: Choice) -> dict[str, float]:
    """Of the stages of a pair of tiles, by the model below."""
    if not isinstance(choice, TilePair):
        return {}
    costs = [
        tile_cost(tile, want)
        for tile, want in zip((choice.gemm1, choice.gemm2), WANTED, strict=True)
    ]
    return dict(zip(TileSpace.stages, costs, strict=True))


def job(space: Tunable, bench: Fake, *tokens: int, **more: object) -> Job:
    budget = more.pop("budget", 1e9)
    made = Job(space, bench, tokens or (64,), FOLDER, budget, clock=lambda: bench.now)  # type: ignore[arg-type]
    return replace(made, **more)  # type: ignore[arg-type]


def only(space: Tunable, bench: Fake, **more: object) -> Tuned:
    (tuned,) = tune(job(space, bench, **more))
    return tuned


TIMES = {0: 10.0, 1: 8.0, 2: 5.0, 3: 9.0}


# ------------------------------------------------------------------------------------ what it picks


def test_the_fastest_right_choice_wins() -> None:
    space = Space()
    bench = Fake(TIMES)
    tuned = only(space, bench)
    assert tuned.best == Best(2, 5.0, 10.0)
    assert (len(tuned.took), tuned.finished, tuned.refused) == (4, True, {})
    assert tuned.file == FOLDER / "file"
    assert space.kept == {64: tuned.best}
    assert bench.compared == [2, 1, 0], "finalists, and the untuned one beside them"


def test_wrong_numbers_never_win_and_are_reported() -> None:
    bench = Fake({**TIMES, 2: Refusal("error 3e-1 > 1e-2", wrong=True)})
    tuned = only(Space(), bench)
    assert tuned.best == Best(1, 8.0, 10.0)
    assert tuned.wrong == (2,)
    assert 2 not in bench.compared


def test_a_choice_that_turns_out_wrong_later_does_not_win() -> None:
    tuned = only(Space(), Fake(TIMES, {**TIMES, 2: Refusal("wrong", wrong=True)}))
    assert tuned.best is not None
    assert tuned.best.choice == 1
    assert tuned.wrong == (2,)


def test_what_spills_is_never_launched_but_the_untuned_is() -> None:
    bench = Fake(TIMES, spilled=(0, 2))
    tuned = only(Space(), bench)
    assert tuned.best == Best(1, 8.0, 10.0)
    assert (64, 2) not in bench.timed
    assert tuned.refused[2].reason == "spills"


def test_the_comparison_decides_not_the_screening() -> None:
    tuned = only(Space(), Fake({**TIMES, 3: 1.0}, {**TIMES, 3: 7.0}))
    assert tuned.best is not None
    assert tuned.best.choice == 2


def test_less_than_a_hundredth_is_noise() -> None:
    assert only(Space(), Fake({**TIMES, 2: 9.95, 1: 10.2, 3: 11})).best == Best(0, 10.0, 10.0)
    found = only(Space(), Fake({**TIMES, 2: 9.85, 1: 10.2, 3: 11})).best
    assert found is not None
    assert found.choice == 2


def test_an_untuned_choice_that_fails_is_no_baseline() -> None:
    tuned = only(Space(), Fake({**TIMES, 0: Refusal("out of memory")}))
    assert tuned.best == Best(2, 5.0, None)


def test_where_nothing_runs_nothing_is_saved() -> None:
    space = Space()
    tuned = only(space, Fake(dict.fromkeys(TIMES, Refusal("no"))))
    assert tuned.best is None
    assert tuned.file is None
    assert space.saves == []


def test_the_part_is_told_what_ran() -> None:
    space = Space()
    only(space, Fake(TIMES, spilled=(1,)))
    assert space.told == [{choice: Took(TIMES[choice]) for choice in (0, 2, 3)}]


# -------------------------------------------------------------------------------- budget and resume


def test_results_are_saved_after_each_number_of_tokens() -> None:
    space = Space()

    def times(tokens: int, choice: Choice) -> float:
        if tokens == 3:
            raise KeyboardInterrupt
        return TIMES[choice]  # type: ignore[index]

    with pytest.raises(KeyboardInterrupt):
        list(tune(job(space, Fake(times), 1, 2, 3)))
    assert space.saves == [[1], [1, 2]]
    bench = Fake(TIMES)
    assert remaining(space, (1, 2, 3, 4, 4), FOLDER, fresh=False) == [3, 4]
    assert [tuned.tokens for tuned in tune(job(space, bench, 1, 2, 3, 4))] == [3, 4]
    assert {tokens for tokens, _ in bench.timed} == {3, 4}
    assert sorted(space.kept) == [1, 2, 3, 4]


def test_fresh_starts_afresh() -> None:
    space = Space()
    space.kept = {1: Best(3, 1.0, 1.0), 7: Best(3, 1.0, 1.0)}
    assert remaining(space, (1, 7), FOLDER, fresh=True) == [1, 7]
    (tuned,) = tune(job(space, Fake(TIMES), 1, fresh=True))
    assert tuned.best is not None
    assert list(space.kept) == [1]


def test_the_budget_is_shared_and_what_is_unused_goes_on() -> None:
    space = Space(tuple(range(1, 100)))
    bench = Fake(lambda tokens, choice: 5.0)
    found = list(tune(job(space, bench, 1, 2, 3, 4, budget=80.0)))
    assert [tuned.finished for tuned in found] == [False] * 4
    tried = [len(tuned.took) for tuned in found]
    assert all(8 <= count <= 20 for count in tried), tried
    quick = Space((1,))
    bench = Fake(lambda tokens, choice: 5.0)
    found = list(tune(job(quick, bench, *range(1, 9), budget=60.0)))
    assert [tuned.finished for tuned in found] == [True] * 8


def test_a_spent_budget_ends_the_run_and_another_continues() -> None:
    space = Space()
    found = list(tune(job(space, Fake(TIMES, cost=100.0), 1, 2, 3, budget=90.0)))
    assert [tuned.tokens for tuned in found] == [1]
    assert found[0].best is not None, "what is best so far counts"
    assert [t.tokens for t in tune(job(space, Fake(TIMES), 1, 2, 3))] == [2, 3]


def test_the_next_number_of_tokens_is_compiled_ahead() -> None:
    bench = Fake(TIMES)
    list(tune(job(Space(), bench, 1, 2, 3)))
    for now, soon in ((1, 2), (2, 3)):
        assert bench.events.index(("compile", soon)) < bench.events.index(("time", now))


def test_every_measurement_ticks() -> None:
    bench, ticks = Fake(TIMES), list[int]()
    only(Space(), bench, tick=lambda: ticks.append(1))
    assert len(ticks) == len(bench.timed) + 1, "the comparison is one"


# ----------------------------------------------------------------------------- the Triton experts


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with on_an_h200(tmp_path, monkeypatch) as folder:
        yield folder


# What both GEMMs cost, as if they were alone: a best pair that no candidate is as a whole.
WANTED = (Tile(64, 64, 128, 16, 4, 3), Tile(64, 128, 64, 16, 8, 4))


def tile_cost(tile: Tile, want: Tile) -> float:
    have, need = vars(tile).values(), vars(want).values()
    return 1.0 + sum(abs(a.bit_length() - b.bit_length()) for a, b in zip(have, need, strict=True))


def model(tokens: int, pair: Choice) -> float:
    assert isinstance(pair, TilePair)
    return 1.0 + tile_cost(pair.gemm1, WANTED[0]) + tile_cost(pair.gemm2, WANTED[1])


@pytest.mark.parametrize("part", ["TritonExperts", "BatchedTritonExperts"])
def test_the_triton_parts_are_tuned_to_their_best(here: Path, part: str) -> None:
    space = load_catalog().experts(part).tunable(MIXTRAL)
    assert isinstance(space, TileSpace)
    assert TilePair(*WANTED) not in space.candidates(128)
    tuned = only(space, Fake(model), tokens=(128,), folder=here)
    assert tuned.best is not None
    assert tuned.best.choice == TilePair(*WANTED), "put together of two candidates"
    assert len(tuned.took) < 60
    assert tuned.file == here / "triton_3_6_0" / NAME
    recipe = read_recipe(tuned.file)
    assert recipe.tuned_for is not None
    assert recipe.tuned_for.experts_part == part
    assert recipe.triton == "3.6.0"
    # A tuned file is then picked up.
    assert choose_tiles(MIXTRAL, 128) == tuned.best.choice
    assert str(tuned.file) in space.explain(128)


def test_a_search_ends_where_nothing_but_the_untuned_runs(here: Path) -> None:
    space = TileSpace(MIXTRAL, "X")
    untuned = space.untuned(64)
    bench = Fake(lambda t, choice: 1.0 if choice == untuned else Refusal("no"))
    tuned = only(space, bench, tokens=(64,), folder=here)
    assert tuned.best == Best(untuned, 1.0, 1.0)
    assert tuned.finished


@pytest.mark.parametrize("tokens", [1, 16, 100, 300, 1000, 8192])
@pytest.mark.parametrize(
    "quant", ["none", "fp8_w8a8_block", "int8_w8a8_channel", "int4_w4a16_group", "mxfp4_w4a16"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_choice_can_be_launched(here: Path, tokens: int, quant: str, dtype: str) -> None:
    problem = replace(MIXTRAL, quant=quant, dtype=dtype)
    space, device = TileSpace(problem, "X"), this_store().device
    found = space.candidates(tokens)
    least = 1 if dtype == "float32" or problem.scheme.packed else 4
    assert least <= len(found) <= 60
    assert len(set(found)) == len(found)
    blocks = {pair.gemm1.block_m for pair in found if isinstance(pair, TilePair)}
    assert blocks == {*space.blocks_m(ALIGNED, tokens), space.untuned(tokens).gemm1.block_m}  # type: ignore[attr-defined]
    for pair in found:
        assert isinstance(pair, TilePair)
        for tile, gemm in zip((pair.gemm1, pair.gemm2), gemms(problem), strict=True):
            assert not list(violations(tile, gemm, device))
        with space.using(pair):
            assert choose_tiles(problem, tokens) == pair


def test_every_entry_can_be_launched_by_some_scheme(here: Path) -> None:
    """One that never can would be dead data."""
    quants = ("none", "fp8_w8a8_channel", "fp8_w8a8_block", "int4_w4a16_group", "mxfp4_w4a16")
    for quant in quants:
        problem = replace(MIXTRAL, quant=quant)
        known, other = entries(problem, ALIGNED)
        assert known == other
        assert {32, 64, 128} <= set(known) <= set(ROWS[ALIGNED])
        for block_m, rows in known.items():
            assert len(set(rows)) == len(rows)
            for _, _, warps, stages, *group in rows:
                assert warps in (1, 2, 4, 8)
                assert 2 <= stages <= 8
                assert all(block_m > 16 for _ in group), "short blocks have nothing to swizzle"


def test_the_untuned_choice_is_that_of_the_regimes_whatever_is_tuned(here: Path) -> None:
    write(here / NAME, ours(tokens_1=(launch(64), launch(64))))
    space = TileSpace(MIXTRAL, "X")
    assert space.untuned(1) == regimes(MIXTRAL, this_store().device, (ALIGNED,)).choose(1)
    assert space.candidates(1)[0] == choose_tiles(MIXTRAL, 1), "what a file says is one too"


def test_paths_are_tried_where_they_may_pay(here: Path) -> None:
    space = TileSpace(MIXTRAL, "X", (ALIGNED, SINGLE, PERMUTED))

    def paths(tokens: int) -> set[str]:
        return {pair.path for pair in space.candidates(tokens) if isinstance(pair, TilePair)}

    assert paths(1) == {ALIGNED, SINGLE}
    assert paths(16) == {ALIGNED}
    assert paths(4096) == {ALIGNED, PERMUTED}
    permuted = tile_permuted.default(MIXTRAL)
    path = space.save({8192: Best(permuted, 1.0, 1.0)}, here)
    assert choose_tiles(MIXTRAL, 8192, (ALIGNED, PERMUTED)).path == PERMUTED
    assert choose_tiles(MIXTRAL, 8192).path == ALIGNED
    assert space.saved(here)[8192].choice == permuted
    assert space.as_json(ONE)["path"] == ALIGNED
    assert path.exists()


def test_a_space_pretends_its_gpu_in_another_process(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = pickle.loads(pickle.dumps(TileSpace(MIXTRAL, "X")))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(tiles, "current_machine", lambda: this_machine(device="cpu"))
        tiles.reread()
        assert this_store().device.name == ""
        with space.using(space.candidates(1)[0]):
            assert this_store().device == Device.of(MACHINE)
        assert this_store().device.name == ""
    tiles.reread()


def test_what_was_not_timed_cannot_be_estimated() -> None:
    took = {pair: Took(model(1, pair), staged(1, pair)) for pair in (ONE, TWO)}
    model_of = Additive(took)
    assert sorted(model_of.kinds()) == [(ALIGNED, 16), (ALIGNED, 32)]
    assert model_of.seconds(ONE) == pytest.approx(model(1, ONE))
    with pytest.raises(KeyError):
        model_of.seconds(TilePair(*WANTED))


def test_results_survive_a_run(here: Path) -> None:
    space = TileSpace(MIXTRAL, "TritonExperts")
    assert space.saved(here) == {}
    best = {
        t: Best(space.candidates(t)[0], 1e-4 + t, None if t == 9 else 2.5e-4) for t in (9, 1, 400)
    }
    path = space.save(best, here)
    assert space.saved(here) == best
    assert [p.name for p in path.parent.iterdir()] == [NAME], "nothing partial stays"
    assert sorted(TileSpace(MIXTRAL.with_tokens(1), "TritonExperts").saved(here)) == [1, 9, 400]


@pytest.mark.parametrize(
    "other",
    [
        TileSpace(replace(MIXTRAL, hidden=2048), "TritonExperts"),
        TileSpace(replace(MIXTRAL, top_k=4), "TritonExperts"),
        TileSpace(MIXTRAL, "BatchedTritonExperts"),
    ],
    ids=["hidden", "top_k", "part"],
)
def test_another_layer_s_file_is_not_continued(here: Path, other: TileSpace) -> None:
    """Their names are equal: E, I and the device."""
    space = TileSpace(MIXTRAL, "TritonExperts")
    path = space.save({1: Best(space.untuned(1), 1.0, 1.0)}, here)
    with pytest.raises(ConfigurationError, match="start afresh") as refused:
        other.saved(here)
    assert str(path) in str(refused.value)


def test_somebody_else_s_file_is_not_continued(here: Path) -> None:
    write(here / "triton_3_6_0" / NAME, {"1": launch()})
    with pytest.raises(ConfigurationError, match="vLLM"):
        TileSpace(MIXTRAL, "TritonExperts").saved(here)


def test_a_part_without_choices_has_nothing_to_tune() -> None:
    assert PermuteExpertsUnpermute.tunable(MIXTRAL) is None
    assert load_catalog().experts("TorchExperts").tunable(MIXTRAL) is None


def test_saving_makes_this_process_read_anew(here: Path) -> None:
    space = TileSpace(MIXTRAL, "TritonExperts")
    before = choose_tiles(MIXTRAL, 64)
    other = next(pair for pair in space.candidates(64) if pair != before)
    space.save({64: Best(other, 1.0, 1.0)}, here)
    assert choose_tiles(MIXTRAL, 64) == other
    tiles.reread()
    assert choose_tiles(MIXTRAL, 64) == other
