"""The search space of launch configurations: candidates, finalists, and storage of the best."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median

from experts.triton.configs.files import (
    ConfigKey,
    Times,
    TunedConfigs,
    TunedFor,
    config_to_json,
    dump_config_file,
    read_config_file,
)
from experts.triton.configs.heuristics import ConfigSteps, heuristics, is_launchable
from experts.triton.configs.lookup import triton_subfolder
from experts.triton.configs.select import (
    choose_config,
    clear_caches,
    current_lookup,
    explain,
    on_device,
    override_config,
)
from experts.triton.launch_config import Device, Gemm, Launch, MoEConfig, gemms
from experts.triton.path import Path as LaunchPath
from experts.triton.paths import BASE, BY_NAME
from modular_kernel.contracts import Choice, StageTimes, Tunable, TunedChoice
from modular_kernel.errors import ConfigurationError
from modular_kernel.replay import stages
from modular_kernel.spec.problem import Problem

_MAX_FINAL_KINDS, _MAX_FINAL_LAUNCHES, _MAX_FINALISTS = 2, 2, 4


class ConfigSpace(Tunable):
    """The search space of launch configurations. A choice is a MoEConfig.

    The GEMMs of a choice are timed separately, by their stages. After pickling to another process,
    `using` still chooses for the GPU of this process.

    experts_part: name of the part, which files record.
    paths: the paths of the part. Those that do not support `problem` on the device are dropped.
    prepared: tune calls with prepared weights, which have a separate file.
    """

    stages = (stages.GEMM1, stages.GEMM2)

    def __init__(
        self,
        problem: Problem,
        experts_part: str,
        paths: Sequence[type[LaunchPath]] = (BASE,),
        *,
        prepared: bool = False,
    ) -> None:
        self.problem, self.prepared = problem, prepared
        self.experts_part = experts_part
        self._all_paths = tuple(paths)
        self._gemms = gemms(problem)
        self._device = current_lookup().device
        self.paths = self._supported_paths(self._device)

    @classmethod
    def for_problem(
        cls, problem: Problem, experts_part: str, paths: Sequence[type[LaunchPath]] = (BASE,)
    ) -> "ConfigSpace | None":
        """Return the space, or None for a batch-invariant problem, whose tiles are fixed."""
        return None if problem.batch_invariant else cls(problem, experts_part, paths)

    def _supported_paths(self, device: Device) -> tuple[str, ...]:
        return tuple(path.name for path in self._all_paths if path.supports(self.problem, device))

    def for_prepared_weights(self, device_name: str | None = None) -> "ConfigSpace | None":
        device = self._device if device_name is None else Device.named(device_name)
        supported = (BY_NAME[name] for name in self._supported_paths(device))
        if not any(path.prepared_configs(self.problem) for path in supported):
            return None
        return ConfigSpace(self.problem, self.experts_part, self._all_paths, prepared=True)

    @property
    def _untuned_steps(self) -> ConfigSteps:
        return heuristics(self.problem, self._device, self.paths, prepared=self.prepared)

    def untuned(self, tokens: int) -> Choice:
        return self._untuned_steps.choose(tokens)

    @contextmanager
    def using(self, choice: Choice) -> Iterator[None]:
        assert isinstance(choice, MoEConfig)
        with on_device(self._device), override_config(choice):
            yield

    def candidates(self, tokens: int) -> Sequence[Choice]:
        """Return choices that include every launch of each GEMM at least once."""
        # The current configuration comes from a file if there is one.
        current = choose_config(self.problem, tokens, self.paths, prepared=self.prepared)
        choices = [current] if self._is_valid_config(current) else []
        for path in self.paths:
            for block_m, (first, second) in BY_NAME[path].candidates(self.problem, tokens).items():
                choices += self._paired_choices(path, block_m, (first, second))
        return list(dict.fromkeys(choices))

    def _untuned_configs(self, path: str, block_m: int) -> list[MoEConfig]:
        return [
            c for c in self._untuned_steps.configs if c.path == path and c.gemm1.block_m == block_m
        ]

    def _paired_choices(
        self, path: str, block_m: int, candidates: tuple[Sequence[Launch], Sequence[Launch]]
    ) -> list[MoEConfig]:
        """Pair the launches of both GEMMs with this block_m into as few choices as possible."""
        untuned = self._untuned_configs(path, block_m)
        lists: list[list[Launch]] = []
        for index, gemm in enumerate(self._gemms):
            launches = [(config.gemm1, config.gemm2)[index] for config in untuned]
            launches = list(dict.fromkeys((*launches, *candidates[index])))
            lists.append(
                [launch for launch in launches if self._is_valid_launch(launch, gemm, path)]
            )
        launches1, launches2 = lists
        if not launches1 or not launches2:
            return []
        count = max(len(launches1), len(launches2))
        return [
            MoEConfig(launches1[i % len(launches1)], launches2[i % len(launches2)], path)
            for i in range(count)
        ]

    def _is_valid_launch(self, launch: Launch, gemm: Gemm, path: str) -> bool:
        """Return whether `launch` is valid, and its block_k is less than 2 K."""
        too_deep = getattr(launch, "block_k", 0) >= 2 * gemm.depth
        violations = BY_NAME[path].violations(launch, gemm, self.problem, self._device)
        return not too_deep and next(violations, None) is None

    def _is_valid_config(self, config: MoEConfig) -> bool:
        launches = zip((config.gemm1, config.gemm2), self._gemms, strict=True)
        launchable = config.path in self.paths and is_launchable(config, self.problem, self._device)
        return launchable and all(self._is_valid_launch(*item, config.path) for item in launches)

    def finalists(self, tokens: int, times: Mapping[Choice, StageTimes]) -> Sequence[Choice]:
        """Return the pairs of launches that the time model expects to be the fastest."""
        model = AdditiveTimeModel(times)
        kinds = sorted(model.kinds(), key=model.min_seconds)[:_MAX_FINAL_KINDS]
        pairs = [pair for kind in kinds for pair in model.best_pairs(kind, _MAX_FINAL_LAUNCHES)]
        return sorted(pairs, key=model.seconds)[:_MAX_FINALISTS]

    def as_json(self, choice: Choice) -> Mapping[str, object]:
        assert isinstance(choice, MoEConfig)
        return config_to_json(choice)

    def saved(self, folder: Path) -> Mapping[int, TunedChoice]:
        path = self._path(folder)
        if not path.exists():
            return {}
        tuned_configs = read_config_file(path)
        if not tuned_configs.strict or tuned_configs.tuned_for != self._tuned_for():
            got = (
                tuned_configs.tuned_for if tuned_configs.strict else "a file of vLLM's or SGLang's"
            )
            need = f"{self._tuned_for()}; another folder, or to start afresh"
            raise ConfigurationError(f"config file {path}", got=got, need=need)
        result = {}
        for tokens, config in tuned_configs.configs().items():
            times = tuned_configs.times.get(tokens)
            if times is None:
                continue
            result[tokens] = TunedChoice(config, times.us / 1e6, _seconds(times.untuned_us))
        return result

    def save(self, choices: Mapping[int, TunedChoice], folder: Path) -> Path:
        pairs: dict[int, MoEConfig] = {}
        for tokens in sorted(choices):
            pair = choices[tokens].choice
            assert isinstance(pair, MoEConfig)
            pairs[tokens] = pair
        tuned_configs = TunedConfigs(
            origin="",
            gemm1=tuple((tokens, pair.gemm1) for tokens, pair in pairs.items()),
            gemm2=tuple((tokens, pair.gemm2) for tokens, pair in pairs.items()),
            paths=tuple((tokens, pair.path) for tokens, pair in pairs.items()),
            fused_columns=False,
            strict=True,
            triton=current_lookup().triton,
            tuned_for=self._tuned_for(),
            times={t: _times(choices[t]) for t in pairs},
        )
        path = self._path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(dump_config_file(tuned_configs), encoding="utf-8")
        partial.replace(path)
        clear_caches()
        return path

    def explain(self, tokens: int, device_name: str | None = None) -> str:
        device = self._device if device_name is None else Device.named(device_name)
        paths = self._supported_paths(device)
        return explain(self.problem, tokens, device_name, paths, prepared=self.prepared)

    def _tuned_for(self) -> TunedFor:
        return TunedFor(self.experts_part, self.problem.hidden, self.problem.top_k)

    def _path(self, folder: Path) -> Path:
        lookup = current_lookup()
        name = ConfigKey.of(self.problem, lookup.device.name, prepared=self.prepared).file_name
        return folder / triton_subfolder(lookup.triton) / name


Kind = tuple[str, int]  # path and block_m, which both GEMMs share


class AdditiveTimeModel:
    """Time model of a call: GEMM 1 + GEMM 2 + a rest that depends on path and block_m only."""

    def __init__(self, times: Mapping[Choice, StageTimes]) -> None:
        self.tiles: dict[Kind, tuple[dict[Launch, float], dict[Launch, float]]] = {}
        rests: dict[Kind, list[float]] = {}
        for config, timing in times.items():
            assert isinstance(config, MoEConfig)
            kind = config.path, config.gemm1.block_m
            launches1, launches2 = self.tiles.setdefault(kind, ({}, {}))
            seconds = [timing.stages.get(name, 0.0) for name in ConfigSpace.stages]
            for tiles, tile, stage_seconds in zip(
                (launches1, launches2), (config.gemm1, config.gemm2), seconds, strict=True
            ):
                tiles[tile] = min(stage_seconds, tiles.get(tile, stage_seconds))
            rests.setdefault(kind, []).append(timing.seconds - sum(seconds))
        self.rest = {kind: median(values) for kind, values in rests.items()}

    def kinds(self) -> list[Kind]:
        return list(self.tiles)

    def min_seconds(self, kind: Kind) -> float:
        """Return the modeled seconds of the best pair of this kind."""
        return self.rest[kind] + sum(min(tiles.values()) for tiles in self.tiles[kind])

    def best_pairs(self, kind: Kind, count: int) -> list[MoEConfig]:
        """Return all pairs of the `count` fastest launches of each GEMM."""
        fastest = (sorted(tiles, key=tiles.__getitem__)[:count] for tiles in self.tiles[kind])
        return [MoEConfig(launch1, launch2, kind[0]) for launch1, launch2 in product(*fastest)]

    def seconds(self, pair: MoEConfig) -> float:
        """Return the modeled seconds of a call.

        Raise KeyError if one of its launches was not timed.
        """
        kind = pair.path, pair.gemm1.block_m
        launches1, launches2 = self.tiles[kind]
        return self.rest[kind] + launches1[pair.gemm1] + launches2[pair.gemm2]


def _times(best: TunedChoice) -> Times:
    untuned = best.untuned_seconds
    return Times(_us(best.seconds), None if untuned is None else _us(untuned))


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _seconds(us: float | None) -> float | None:
    return None if us is None else us / 1e6
