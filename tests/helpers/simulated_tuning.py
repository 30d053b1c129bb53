"""A search space with a simulated benchmark and clock, for tests of the tuner."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from experts.triton.launch_config import LaunchConfig, MoEConfig
from experts.triton.tuning.space import ConfigSpace
from modular_kernel.contracts import Choice, StageTimes, Tunable, TunedChoice
from modular_kernel.tuning.search import Benchmarker, Refusal, TuneJob, TuneResult, tune

FOLDER = Path("nowhere")


class Space(Tunable):
    """A search space whose choices are numbers. 0 is the untuned choice.

    saves: token counts that were passed to each call of `save`. screened: times that were passed to
    each call of `finalists`.
    """

    def __init__(self, choices: Sequence[int] = (1, 2, 3), finalists: int = 2) -> None:
        self.choices, self.count = choices, finalists
        self.kept: dict[int, TunedChoice] = {}
        self.saves: list[list[int]] = []
        self.screened: list[Mapping[Choice, StageTimes]] = []

    def untuned(self, tokens: int) -> Choice:
        return 0

    def candidates(self, tokens: int) -> Sequence[Choice]:
        return self.choices

    def finalists(self, tokens: int, times: Mapping[Choice, StageTimes]) -> Sequence[Choice]:
        self.screened.append(dict(times))
        return sorted(times, key=lambda choice: times[choice].seconds)[: self.count]

    @contextmanager
    def using(self, choice: Choice) -> Iterator[None]:
        yield

    def as_json(self, choice: Choice) -> Mapping[str, object]:
        return {"number": choice}

    def saved(self, folder: Path) -> Mapping[int, TunedChoice]:
        return self.kept

    def save(self, best: Mapping[int, TunedChoice], folder: Path) -> Path:
        self.kept = dict(best)
        self.saves.append(list(best))
        return folder / "file"

    def explain(self, tokens: int, device_name: str | None = None) -> str:
        return f"{tokens} tokens"


Times = Mapping[Choice, float | Refusal] | Callable[[int, Choice], float | Refusal]


@dataclass
class FakeBenchmark(Benchmarker):
    """A benchmark that returns predefined times.

    times: choice -> time or refusal, or a function of (tokens, choice), for `screen`. final: times
    for `compare`; the default is `times`. cost: seconds by which a measurement advances the clock
    `now`.
    """

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

    def wait_compiled(self, tokens: int, choice: Choice) -> Refusal | None:
        return Refusal("spills") if choice in self.spilled else None

    def screen(self, tokens: int, choice: Choice) -> StageTimes | Refusal:
        self.now += self.cost
        self.events.append(("time", tokens))
        self.timed.append((tokens, choice))
        outcome = self.time_of(self.times, tokens, choice)
        return (
            outcome
            if isinstance(outcome, Refusal)
            else StageTimes(outcome, stage_times(outcome, choice))
        )

    def compare(self, tokens: int, choices: Sequence[Choice]) -> Mapping[Choice, float | Refusal]:
        self.compared += choices
        times = self.final or self.times
        return {choice: self.time_of(times, tokens, choice) for choice in choices}

    def time_of(self, times: Times, tokens: int, choice: Choice) -> float | Refusal:
        return times(tokens, choice) if callable(times) else times[choice]


def stage_times(seconds: float, choice: Choice) -> dict[str, float]:
    """Return the seconds of each stage for a pair of tiles, as computed by `tile_cost`."""
    if not isinstance(choice, MoEConfig):
        return {}
    costs = [
        tile_cost(tile, best)
        for tile, best in zip((choice.gemm1, choice.gemm2), BEST_TILES, strict=True)
    ]
    return dict(zip(ConfigSpace.stages, costs, strict=True))


def make_job(space: Tunable, bench: FakeBenchmark, *tokens: int, **changes: object) -> TuneJob:
    budget = changes.pop("budget", 1e9)
    tune_job = TuneJob(space, bench, tokens or (64,), FOLDER, budget, clock=lambda: bench.now)  # type: ignore[arg-type]
    return replace(tune_job, **changes)  # type: ignore[arg-type]


def tune_one(space: Tunable, bench: FakeBenchmark, **changes: object) -> TuneResult:
    """Tune for one number of tokens and return the result."""
    (tuned,) = tune(make_job(space, bench, **changes))
    return tuned


TIMES = {0: 10.0, 1: 8.0, 2: 5.0, 3: 9.0}


# The best tile of each GEMM. No candidate has both of these tiles.
BEST_TILES = (LaunchConfig(64, 64, 128, 16, 4, 3), LaunchConfig(64, 128, 64, 16, 8, 4))


def tile_cost(tile: LaunchConfig, best: LaunchConfig) -> float:
    """Return a time that grows with the distance of a tile from the best one."""
    pairs = zip(vars(tile).values(), vars(best).values(), strict=True)
    return 1.0 + sum(abs(a.bit_length() - b.bit_length()) for a, b in pairs)
