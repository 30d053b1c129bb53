"""The search space of `mk tune` for the Triton experts: candidates, finalists, and tuned files.

`mk tune` times the candidates for some token counts, then the finalists more precisely, and saves
the fastest configuration of each token count to a file (`configs.files`).
"""

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
from experts.triton.configs.heuristics import ConfigSteps, is_launchable, make_heuristic_steps
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
from experts.triton.paths import BASE_PATH, BY_NAME
from modular_kernel.contracts import Choice, StageTimes, Tunable, TunedChoice
from modular_kernel.errors import ConfigurationError
from modular_kernel.replay import stages
from modular_kernel.spec.problem import Problem

_MAX_FINAL_KINDS, _MAX_FINAL_LAUNCHES, _MAX_FINALISTS = 2, 2, 4


class ConfigSpace(Tunable):
    """The search space of launch configurations for one layer. A choice is a MoEConfig.

    The GEMMs of a choice are timed separately, as stages of the profile. A ConfigSpace that is
    pickled to another process keeps the device of the process that created it.

    problem: the layer to tune.
    experts_part: the name of the experts class, which is written to files.
    paths: the paths of the experts class. Paths that do not support `problem` on the device are
        dropped.
    prepared: whether to tune calls with prepared weights, which have a separate file.
    """

    stages = (stages.GEMM1, stages.GEMM2)

    def __init__(
        self,
        problem: Problem,
        experts_part: str,
        paths: Sequence[type[LaunchPath]] = (BASE_PATH,),
        *,
        prepared: bool = False,
    ) -> None:
        self.problem, self.prepared = problem, prepared
        self.experts_part = experts_part
        self._all_paths = tuple(paths)
        self._gemms = gemms(problem)
        self._device = current_lookup().device
        self.paths = self._list_supported_paths(self._device)

    @classmethod
    def for_problem(
        cls, problem: Problem, experts_part: str, paths: Sequence[type[LaunchPath]] = (BASE_PATH,)
    ) -> "ConfigSpace | None":
        """Return the space, or None for a batch-invariant problem, whose launches are fixed."""
        return None if problem.batch_invariant else cls(problem, experts_part, paths)

    def _list_supported_paths(self, device: Device) -> tuple[str, ...]:
        return tuple(path.name for path in self._all_paths if path.supports(self.problem, device))

    def for_prepared_weights(self, device_name: str | None = None) -> "ConfigSpace | None":
        device = self._device if device_name is None else Device.from_name(device_name)
        supported = (BY_NAME[name] for name in self._list_supported_paths(device))
        if not any(path.prepared_configs(self.problem) for path in supported):
            return None
        return ConfigSpace(self.problem, self.experts_part, self._all_paths, prepared=True)

    @property
    def _untuned_steps(self) -> ConfigSteps:
        return make_heuristic_steps(self.problem, self._device, self.paths, prepared=self.prepared)

    def untuned(self, tokens: int) -> Choice:
        return self._untuned_steps.choose(tokens)

    @contextmanager
    def using(self, choice: Choice) -> Iterator[None]:
        assert isinstance(choice, MoEConfig)
        with on_device(self._device), override_config(choice):
            yield

    def candidates(self, tokens: int) -> Sequence[Choice]:
        """Return choices that contain each candidate launch of each GEMM at least once."""
        # The current configuration comes from a file if there is one.
        current_config = choose_config(self.problem, tokens, self.paths, prepared=self.prepared)
        choices = [current_config] if self._is_valid_config(current_config) else []
        for path in self.paths:
            for block_m, launches in BY_NAME[path].candidates(self.problem, tokens).items():
                choices += self._pair_launches(path, block_m, launches)
        return list(dict.fromkeys(choices))

    def _get_untuned_configs(self, path: str, block_m: int) -> list[MoEConfig]:
        return [
            c for c in self._untuned_steps.configs if c.path == path and c.gemm1.block_m == block_m
        ]

    def _pair_launches(
        self, path: str, block_m: int, candidates: tuple[Sequence[Launch], Sequence[Launch]]
    ) -> list[MoEConfig]:
        """Pair the candidates of GEMM 1 with those of GEMM 2, so that each occurs at least once.

        The untuned launches with this path and block_m are included.
        """
        untuned = self._get_untuned_configs(path, block_m)
        valid_launches: list[list[Launch]] = []
        for index, gemm in enumerate(self._gemms):
            launches = [(config.gemm1, config.gemm2)[index] for config in untuned]
            launches = list(dict.fromkeys((*launches, *candidates[index])))
            valid_launches.append(
                [launch for launch in launches if self._is_valid_launch(launch, gemm, path)]
            )
        launches1, launches2 = valid_launches
        if not launches1 or not launches2:
            return []
        num_choices = max(len(launches1), len(launches2))
        return [
            MoEConfig(launches1[i % len(launches1)], launches2[i % len(launches2)], path)
            for i in range(num_choices)
        ]

    def _is_valid_launch(self, launch: Launch, gemm: Gemm, path: str) -> bool:
        """Return whether `launch` can be launched and its block_k is less than twice K."""
        has_large_block_k = getattr(launch, "block_k", 0) >= 2 * gemm.size_k
        violations = BY_NAME[path].violations(launch, gemm, self.problem, self._device)
        return not has_large_block_k and next(violations, None) is None

    def _is_valid_config(self, config: MoEConfig) -> bool:
        launches = zip((config.gemm1, config.gemm2), self._gemms, strict=True)
        if config.path not in self.paths or not is_launchable(config, self.problem, self._device):
            return False
        return all(
            self._is_valid_launch(*launch_and_gemm, config.path) for launch_and_gemm in launches
        )

    def finalists(self, tokens: int, times: Mapping[Choice, StageTimes]) -> Sequence[Choice]:
        """Return the configurations that the time model expects to be the fastest."""
        model = AdditiveTimeModel(times)
        kinds = sorted(model.kinds(), key=model.min_seconds)[:_MAX_FINAL_KINDS]
        configs = [
            config for kind in kinds for config in model.combine_fastest(kind, _MAX_FINAL_LAUNCHES)
        ]
        return sorted(configs, key=model.seconds)[:_MAX_FINALISTS]

    def as_json(self, choice: Choice) -> Mapping[str, object]:
        assert isinstance(choice, MoEConfig)
        return config_to_json(choice)

    def saved(self, folder: Path) -> Mapping[int, TunedChoice]:
        path = self._get_config_path(folder)
        if not path.exists():
            return {}
        tuned_configs = read_config_file(path)
        if tuned_configs.is_foreign or tuned_configs.tuned_for != self._make_tuned_for():
            got = (
                "a file of vLLM's or SGLang's"
                if tuned_configs.is_foreign
                else tuned_configs.tuned_for
            )
            need = f"{self._make_tuned_for()}; choose another folder, or start afresh"
            raise ConfigurationError(f"config file {path}", got=got, need=need)
        result = {}
        for tokens, config in tuned_configs.configs().items():
            times = tuned_configs.times.get(tokens)
            if times is None:
                continue
            result[tokens] = TunedChoice(config, times.us / 1e6, _us_to_seconds(times.untuned_us))
        return result

    def save(self, choices: Mapping[int, TunedChoice], folder: Path) -> Path:
        configs: dict[int, MoEConfig] = {}
        for tokens in sorted(choices):
            config = choices[tokens].choice
            assert isinstance(config, MoEConfig)
            configs[tokens] = config
        tuned_configs = TunedConfigs(
            origin="",
            gemm1=tuple((tokens, config.gemm1) for tokens, config in configs.items()),
            gemm2=tuple((tokens, config.gemm2) for tokens, config in configs.items()),
            paths=tuple((tokens, config.path) for tokens, config in configs.items()),
            block_n_includes_up=False,
            is_foreign=False,
            triton=current_lookup().triton,
            tuned_for=self._make_tuned_for(),
            times={tokens: _convert_times_to_us(choices[tokens]) for tokens in configs},
        )
        path = self._get_config_path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path = path.with_name(f".{path.name}.partial")
        partial_path.write_text(dump_config_file(tuned_configs), encoding="utf-8")
        partial_path.replace(path)
        clear_caches()
        return path

    def explain(self, tokens: int, device_name: str | None = None) -> str:
        device = self._device if device_name is None else Device.from_name(device_name)
        paths = self._list_supported_paths(device)
        return explain(self.problem, tokens, device_name, paths, prepared=self.prepared)

    def _make_tuned_for(self) -> TunedFor:
        return TunedFor(self.experts_part, self.problem.hidden, self.problem.top_k)

    def _get_config_path(self, folder: Path) -> Path:
        lookup = current_lookup()
        name = ConfigKey.from_problem(
            self.problem, lookup.device.name, prepared=self.prepared
        ).file_name
        return folder / triton_subfolder(lookup.triton) / name


Kind = tuple[str, int]  # (path, block_m), which both GEMMs of a configuration share


class AdditiveTimeModel:
    """A model of the time of a call as the sum of GEMM 1, GEMM 2, and all other launches.

    The time of other launches depends only on the path and block_m. The model predicts the time of
    combinations of launches that were not timed together.

    times: the measured times of configurations.
    """

    def __init__(self, times: Mapping[Choice, StageTimes]) -> None:
        # For each kind, the seconds of the launches of GEMM 1 and of GEMM 2.
        self._gemm_seconds: dict[Kind, tuple[dict[Launch, float], dict[Launch, float]]] = {}
        other_seconds: dict[Kind, list[float]] = {}
        for config, timing in times.items():
            assert isinstance(config, MoEConfig)
            kind = config.path, config.gemm1.block_m
            gemm_seconds = self._gemm_seconds.setdefault(kind, ({}, {}))
            measured = [timing.stages.get(name, 0.0) for name in ConfigSpace.stages]
            for seconds_by_launch, launch, seconds in zip(
                gemm_seconds, (config.gemm1, config.gemm2), measured, strict=True
            ):
                seconds_by_launch[launch] = min(seconds, seconds_by_launch.get(launch, seconds))
            other_seconds.setdefault(kind, []).append(timing.seconds - sum(measured))
        self._other_seconds = {kind: median(values) for kind, values in other_seconds.items()}

    def kinds(self) -> list[Kind]:
        """Return the kinds of the measured configurations."""
        return list(self._gemm_seconds)

    def min_seconds(self, kind: Kind) -> float:
        """Return the modeled seconds of the fastest configuration of this kind."""
        fastest = (min(by_launch.values()) for by_launch in self._gemm_seconds[kind])
        return self._other_seconds[kind] + sum(fastest)

    def combine_fastest(self, kind: Kind, count: int) -> list[MoEConfig]:
        """Return all combinations of the `count` fastest launches of each GEMM."""
        fastest = (
            sorted(by_launch, key=by_launch.__getitem__)[:count]
            for by_launch in self._gemm_seconds[kind]
        )
        return [MoEConfig(launch1, launch2, kind[0]) for launch1, launch2 in product(*fastest)]

    def seconds(self, config: MoEConfig) -> float:
        """Return the modeled seconds of a call with `config`.

        Raise KeyError if the launch of one of its GEMMs was not measured.
        """
        kind = config.path, config.gemm1.block_m
        seconds1, seconds2 = self._gemm_seconds[kind]
        return self._other_seconds[kind] + seconds1[config.gemm1] + seconds2[config.gemm2]


def _convert_times_to_us(tuned_choice: TunedChoice) -> Times:
    untuned = tuned_choice.untuned_seconds
    return Times(
        _seconds_to_us(tuned_choice.seconds), None if untuned is None else _seconds_to_us(untuned)
    )


def _seconds_to_us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _us_to_seconds(us: float | None) -> float | None:
    return None if us is None else us / 1e6
