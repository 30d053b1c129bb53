"""Find the tuned file for a layer, and convert it to configurations by token count.

A tuned file has measured launches for some token counts of one layer on one GPU (`files`). The
configurations of a layer come from the first of these sources that exists:

- an active override (`select.override_config`);
- a file in the user's folder (MK_CONFIG_DIR);
- a packaged file, in data/;
- the nearest layers with a packaged file (`nearest`);
- the defaults (`heuristics`), if there is no packaged file for this GPU and number format.

A folder may have its files in subfolders triton_X_Y_Z/, as SGLang has them, or at its top level, as
vLLM has them. The subfolder of the installed version of Triton is searched first, then the top
level, then the subfolders of other versions, newest first. All of these are searched for one file
name before the next file name is tried (see `files.file_names_for`).

A call uses the launch for the nearest token count in the file, or the smaller count if two are
equally near.

Prepared weights come with a copy in a layout that some paths read faster. Calls with prepared
weights have separate files. Without such a file, they use the same configurations as other calls,
except where a path has its own configurations for prepared weights
(`heuristics.overlay_prepared_configs`).
"""

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from experts.triton.configs.files import (
    ConfigKey,
    TunedConfigs,
    file_names_for,
    read_config_file,
)
from experts.triton.configs.heuristics import (
    ConfigSteps,
    make_heuristic_steps,
    overlay_path,
    overlay_prepared_configs,
    replace_foreign_configs,
    require_config,
)
from experts.triton.configs.nearest import (
    TunedLayer,
    borrow_configs,
    prefer_heuristics_by_rows,
    split_at_breakpoints,
    steps_from_borrowed,
)
from experts.triton.launch_config import (
    GROUP_LIMIT,
    SHARED_LIMIT,
    Device,
    Gemm,
    Launch,
    LaunchConfig,
    MoEConfig,
    clamp,
    gemms,
    require,
    rows_aligned_to_16,
    violations,
)
from experts.triton.path import UNBOUNDED_TOKENS
from experts.triton.paths import ALL_PATHS, BASE_PATH, BUILT_IN_NAMES, BUILT_IN_PATHS, BY_NAME
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem
from modular_kernel.text import escape_nonprintable

_LOG = logging.getLogger("modular_kernel.tiles")
_SUBFOLDER = re.compile(r"triton_(\d+)_(\d+)_(\d+)", re.ASCII)
PACKAGED = "packaged"  # title of the folder that ships with the package
# Values of Source.origin.
NEAREST = "nearest"
FIXED = "one configuration for every number of tokens (batch_invariant)"
_MIN_BLOCK_N = 16
# Launches of vLLM and SGLang that exceed these limits are clamped. Other violations are errors.
_CLAMPED_LIMITS = frozenset({GROUP_LIMIT, SHARED_LIMIT})


@dataclass(frozen=True)
class Source:
    """The configurations of a layer, and where they come from.

    steps: the configurations.
    origin: "override_config", the path of a file, NEAREST, "heuristics" or FIXED.
    token_counts: the token counts in the file.
    step_origins: for each step, the tuned layer from which its configuration is taken; () unless
        origin is NEAREST.
    notes: remarks for `select.explain`.
    searched_locations: locations without a usable file, in order of search.
    is_foreign: whether the file has the format of vLLM or SGLang.
    prepared: whether the steps are for calls with prepared weights.
    """

    steps: ConfigSteps
    origin: str
    token_counts: tuple[int, ...] = ()
    step_origins: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    searched_locations: tuple[str, ...] = ()
    is_foreign: bool = False
    prepared: bool = False

    def launch_steps(
        self, problem: Problem, device: Device, paths: Collection[str], *, prepared: bool = False
    ) -> ConfigSteps:
        """Return the configurations that an experts part uses for its calls.

        paths: names of the implementation paths that the part supports.
        prepared: whether the calls use prepared weights.
        """
        steps = self.steps
        if self.is_foreign:
            steps = replace_foreign_configs(steps, problem, device, paths)
        if not all(config.path in paths for config in steps.configs):
            defaults = make_heuristic_steps(problem, device, paths, prepared=prepared)
            steps = steps.replace_other_paths(paths, defaults)
        if self.origin == NEAREST:
            built_in_paths = [name for name in BUILT_IN_NAMES if name in paths]
            steps = split_at_breakpoints(steps, problem, device)
            steps = prefer_heuristics_by_rows(
                steps, make_heuristic_steps(problem, device, built_in_paths), problem
            )
            # Paths of other packages have no tuned files. Where such a path supports the problem,
            # its defaults replace the launches that come from tuned files of similar layers.
            for path in ALL_PATHS[len(BUILT_IN_PATHS) :]:
                if path.name in paths and path.supports(problem, device):
                    steps = overlay_path(steps, path, problem, device)
        if prepared and not self.prepared:
            return overlay_prepared_configs(steps, problem, device, paths)
        return steps


@dataclass(frozen=True)
class ConfigLookup:
    """The folders of tuned files, and the device for which to look up configurations.

    folders: (title, path) of each folder, best first.
    device: the device.
    triton: the installed version of Triton, if known.
    """

    folders: tuple[tuple[str, Path], ...]
    device: Device
    triton: str | None = None

    def find_source(self, problem: Problem, *, prepared: bool = False) -> Source:
        """Return the configurations from the best file, the nearest layers or the heuristics.

        Log a warning, once per file, if the file was tuned with another version of Triton or its
        launches are clamped. If a file cannot be read, is malformed or, in our format, does not fit
        the problem, raise a ConfigurationError that names the file.

        prepared: whether to return the configurations of calls with prepared weights. Without a
            file for such calls, the configurations are the same as those of other calls.
        """
        if problem.batch_invariant:  # the launches in a file depend on the number of tokens
            return Source(make_heuristic_steps(problem, self.device), FIXED)
        searched_locations: list[str] = []
        names = file_names_for(problem, self.device.name, prepared=prepared)
        for title, folder in self.folders if self.device.name else ():
            config_file = self._find_file(folder, names)
            if config_file is None:
                reason = "no file" if folder.is_dir() else "no such folder"
                suffix = " for prepared weights" if prepared and folder.is_dir() else ""
                searched_locations.append(f"{title} {folder}: {reason}{suffix}")
                continue
            tuned_configs = _read_both_gemms(config_file)
            if not _has_same_alignment(tuned_configs, problem):
                mismatch = "tuned for rows that start at multiples of 16 elements"
                searched_locations.append(f"{title} {config_file}: {mismatch}")
                continue
            source = fit_to_problem(tuned_configs, problem, self.device, prepared=prepared)
            notes = (*self._describe_triton_mismatch(config_file, tuned_configs), *source.notes)
            if notes:
                _warn_once(f"{config_file}: {'; '.join(notes)}")
            if tuned_configs.tuned_for is not None:
                notes = (*notes, *_describe_layer_differences(tuned_configs, problem))
            return replace(source, notes=notes, searched_locations=tuple(searched_locations))
        if prepared:
            unprepared_source = self.find_source(problem)
            return replace(
                unprepared_source,
                searched_locations=(
                    *dict.fromkeys((*searched_locations, *unprepared_source.searched_locations)),
                ),
            )
        tuned_layers = self._read_packaged_layers(problem)
        if not tuned_layers:
            steps = make_heuristic_steps(problem, self.device)
            return Source(steps, "heuristics", searched_locations=tuple(searched_locations))
        defaults = make_heuristic_steps(problem, self.device, BUILT_IN_NAMES)
        borrowed = borrow_configs(tuned_layers, problem, self.device, defaults)
        step_origins = tuple(borrowed_config.origin for borrowed_config in borrowed)
        return Source(
            steps_from_borrowed(borrowed),
            NEAREST,
            step_origins=step_origins,
            searched_locations=tuple(searched_locations),
        )

    def _read_packaged_layers(self, problem: Problem) -> list[TunedLayer]:
        """Return the layers with packaged files for this device and number format.

        Return [] for a problem whose rows are not aligned to 16 elements, because all packaged
        layers have aligned rows.
        """
        if not self.device.name or not rows_aligned_to_16(problem):
            return []
        problem_key, layers = ConfigKey.from_problem(problem, self.device.name), list[TunedLayer]()
        for title, folder in self.folders:
            if title != PACKAGED:
                continue
            for config_file in sorted((folder / triton_subfolder(self.triton)).glob("E=*.json")):
                key = ConfigKey.parse(config_file.name)
                if replace(problem_key, experts=key.experts, intermediate=key.intermediate) == key:
                    layers.append(TunedLayer.from_config_file(key, read_config_file(config_file)))
        return layers

    def _find_file(self, folder: Path, names: Sequence[str]) -> Path | None:
        subfolders = [folder / name for name in self._iter_subfolders(folder)]
        candidates = (subfolder / name for name in names for subfolder in subfolders)
        # A dangling link or a folder is also returned, so that `read_config_file` rejects it.
        return next((file for file in candidates if file.exists() or file.is_symlink()), None)

    def _iter_subfolders(self, folder: Path) -> Iterator[str]:
        installed = triton_subfolder(self.triton)
        if installed:
            yield installed
        yield ""
        other_versions = []
        for subfolder in folder.iterdir() if folder.is_dir() else ():
            match = _SUBFOLDER.fullmatch(subfolder.name)
            if match is not None and subfolder.name != installed:
                other_versions.append((tuple(map(int, match.groups())), subfolder.name))
        yield from (name for _, name in sorted(other_versions, reverse=True))

    def _describe_triton_mismatch(
        self, config_file: Path, tuned_configs: TunedConfigs
    ) -> Iterator[str]:
        installed = triton_subfolder(self.triton)
        subfolder = config_file.parent.name
        tuned_with = subfolder if _SUBFOLDER.fullmatch(subfolder) else ""
        tuned_with = triton_subfolder(tuned_configs.triton) or tuned_with
        if installed and tuned_with and installed != tuned_with:
            version = tuned_with.removeprefix("triton_").replace("_", ".")
            installed_label = f"the installed version is {self.triton}"
            yield f"tuned with Triton {version}, but {installed_label}; retuning may be faster"


def triton_subfolder(triton: str | None) -> str:
    """Return the subfolder for a version of Triton, such as "triton_3_6_0"; "" if not known."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", triton or "", re.ASCII)
    return f"triton_{'_'.join(match.groups())}" if match else ""


@cache
def _warn_once(text: str) -> None:
    """Log `text` once per process."""
    _LOG.warning("%s", escape_nonprintable(text))


def _read_both_gemms(config_file: Path) -> TunedConfigs:
    """Read a config file and, if there is one, SGLang's "_down" file for GEMM 2 next to it."""
    tuned_configs = read_config_file(config_file)
    down_file = config_file.with_name(config_file.name.removesuffix(".json") + "_down.json")
    if not tuned_configs.is_foreign or not down_file.exists():
        return tuned_configs
    down_configs = read_config_file(down_file)
    if not down_configs.is_foreign:
        need = "SGLang's format; a file in modular_kernel's format has both GEMMs, without _down"
        got = "a file in modular_kernel's format"
        raise ConfigurationError(f"config file {down_file}", got=got, need=need)
    return replace(tuned_configs, gemm2=down_configs.gemm2)


def _has_same_alignment(tuned_configs: TunedConfigs, problem: Problem) -> bool:
    """Return whether the rows of `problem` have the alignment of the tuned layer.

    The large tiles of tuned files are slow for rows that are not aligned.
    """
    if rows_aligned_to_16(problem):
        return True
    return tuned_configs.tuned_for is not None and tuned_configs.tuned_for.hidden == problem.hidden


def _describe_layer_differences(tuned_configs: TunedConfigs, problem: Problem) -> Iterator[str]:
    assert tuned_configs.tuned_for is not None
    for name in ("hidden", "top_k"):
        tuned, actual = getattr(tuned_configs.tuned_for, name), getattr(problem, name)
        if tuned != actual:
            yield f"tuned for {name}={tuned}, but this problem has {name}={actual}"


def nearest_count(token_counts: Sequence[int], num_tokens: int) -> int:
    """Return the element of token_counts nearest to num_tokens, the smaller one in a tie."""
    return min(token_counts, key=lambda count: (abs(count - num_tokens), count))


def fit_to_problem(
    tuned_configs: TunedConfigs, problem: Problem, device: Device, *, prepared: bool = False
) -> Source:
    """Convert the contents of a config file to configurations for `problem` on `device`.

    prepared: whether the configurations are for calls with prepared weights.

    Raise ConfigurationError if a path supports `problem`, but cannot be launched as the file says.
    """
    # For each tuned token count, the number of tokens of the largest call that may use its launch.
    largest_calls = {
        tuned_count: _get_max_tokens_for(path_name, tuned_count, problem, device, prepared)
        for tuned_count, path_name in tuned_configs.paths
    }
    ranges1 = _compute_token_ranges(tuned_configs.gemm1, largest_calls)
    ranges2 = _compute_token_ranges(tuned_configs.gemm2, largest_calls)
    boundaries = sorted({last for last, _ in (*ranges1, *ranges2)})
    configs, notes = [], dict[str, None]()
    for last in boundaries:
        (tokens, launch1), (tokens_gemm2, launch2) = (
            _launch_for(last, ranges) for ranges in (ranges1, ranges2)
        )
        if tuned_configs.block_n_includes_up:
            labels = (f"{tuned_configs.origin}, tokens {t}" for t in (tokens, tokens_gemm2))
            launch1, launch2, clamp_notes = _clamp_foreign_launches(
                launch1, launch2, tuned_configs, problem, device, tuple(labels)
            )
            notes |= dict.fromkeys(clamp_notes)
        config = MoEConfig(launch1, launch2, dict(tuned_configs.paths).get(tokens, BASE_PATH.name))
        # `ConfigSteps.replace_other_paths` replaces a path that does not support the problem.
        if BY_NAME[config.path].supports(problem, device):
            require_config(config, problem, device, f"{tuned_configs.origin}, tokens {tokens}")
        configs.append(config)
    if problem.batch_invariant:
        _require_single_config(configs, problem, device, tuned_configs.origin)
    steps = ConfigSteps(tuple(boundaries), tuple(configs))
    return Source(
        steps,
        tuned_configs.origin,
        token_counts=tuple(tokens for tokens, _ in tuned_configs.gemm1),
        notes=_summarize_notes(list(notes)),
        is_foreign=tuned_configs.is_foreign,
        prepared=prepared,
    )


def _launch_for(
    num_tokens: int, ranges: Sequence[tuple[int, tuple[int, Launch]]]
) -> tuple[int, Launch]:
    """Return the (tuned token count, launch) that a call uses.

    ranges: from `_compute_token_ranges`.
    """
    return next(tuned_launch for last, tuned_launch in ranges if num_tokens <= last)


def _get_max_tokens_for(
    path_name: str, tuned_count: int, problem: Problem, device: Device, prepared: bool
) -> int:
    """Return the number of tokens of the largest call that may use a tuned configuration.

    A path for few tokens reads the weights once per (token, expert) pair, so it is slow for many
    tokens. The limit of its configurations is the larger of `Path.max_tokens` and tuned_count, the
    token count for which the configuration was tuned. Other paths and calls with prepared weights
    have no limit. The limit does not matter for a path that does not support the problem, because
    its configuration is replaced.
    """
    path = BY_NAME[path_name]
    if not path.supports(problem, device) or (prepared and path.prepared_configs(problem)):
        return UNBOUNDED_TOKENS
    max_tokens = path.max_tokens(problem)
    return UNBOUNDED_TOKENS if max_tokens is None else max(tuned_count, max_tokens)


def _require_single_config(
    configs: Sequence[MoEConfig], problem: Problem, device: Device, origin: str
) -> None:
    """Raise ConfigurationError unless all configurations are the same and supported.

    A batch-invariant layer must compute a token in the same way for every number of tokens.
    """
    all_supported = all(BY_NAME[config.path].supports(problem, device) for config in configs)
    if len(set(configs)) > 1 or not all_supported:
        got = ", ".join(dict.fromkeys(map(str, configs)))
        supporting = " or ".join(p.name for p in BY_NAME.values() if p.supports(problem, device))
        need = f"the same configuration of {supporting} for every number of tokens"
        raise ConfigurationError(f"{origin}, with batch_invariant", got=got, need=need)


def _clamp_foreign_launches(
    launch1: Launch,
    launch2: Launch,
    tuned_configs: TunedConfigs,
    problem: Problem,
    device: Device,
    labels: tuple[str, ...],
) -> tuple[LaunchConfig, LaunchConfig, list[str]]:
    """Clamp launches of vLLM or SGLang to the limits of this device.

    Return the launches of both GEMMs, and a note for each launch that was clamped.

    labels: the file and the token count of each GEMM, for messages.
    """
    clamped_launches: list[LaunchConfig] = []
    clamp_notes = []
    for launch, gemm, label in zip((launch1, launch2), gemms(problem), labels, strict=True):
        assert isinstance(launch, LaunchConfig)
        if gemm.num_matrices == 2:
            launch = replace(launch, block_n=max(launch.block_n // 2, _MIN_BLOCK_N))
        if clamped_launches:
            # In SGLang's second file, block_m may differ, but both GEMMs use the same blocks.
            launch = replace(launch, block_m=clamped_launches[0].block_m)
        clamped = _clamp_launch(launch, gemm, device, tuned_configs.is_foreign, label)
        if clamped != launch:
            tokens = label.removeprefix(f"{tuned_configs.origin}, ")
            clamp_notes.append(f"{tokens} {gemm}: {launch} clamped to {clamped}")
        clamped_launches.append(clamped)
    return clamped_launches[0], clamped_launches[1], clamp_notes


def _compute_token_ranges(
    tuned_launches: Sequence[tuple[int, Launch]], largest_calls: Mapping[int, int]
) -> list[tuple[int, tuple[int, Launch]]]:
    """Return the range of token counts of each launch, as (last, (tuned token count, launch)).

    A range ends at `last`, and the next one begins at last + 1. A call uses the launch whose tuned
    token count is nearest, unless largest_calls limits this launch to fewer tokens. The last launch
    has no limit.

    tuned_launches: (tuned token count, launch), ascending.
    largest_calls: for a tuned token count, the number of tokens of the largest call that may use
        its launch.
    """
    tuned_counts = [tuned_count for tuned_count, _ in tuned_launches]
    last_counts = [
        min((lower + upper) // 2, largest_calls.get(lower, UNBOUNDED_TOKENS))
        for lower, upper in pairwise(tuned_counts)
    ]
    return list(zip([*last_counts, UNBOUNDED_TOKENS], tuned_launches, strict=True))


def _clamp_launch(
    launch: LaunchConfig, gemm: Gemm, device: Device, is_foreign: bool, label: str
) -> LaunchConfig:
    """Clamp a foreign launch that exceeds only _CLAMPED_LIMITS. Raise for other violations."""
    if is_foreign:
        violated_limits = {violation.what for violation in violations(launch, gemm, device)}
        if violated_limits and violated_limits <= _CLAMPED_LIMITS:
            launch = clamp(launch, gemm, device)
    return require(launch, gemm, device, label)


def _summarize_notes(notes: list[str]) -> tuple[str, ...]:
    """Return the first note, followed by the number of the other notes."""
    if len(notes) <= 1:
        return tuple(notes)
    return (f"{notes[0]}, and {len(notes) - 1} more like it",)
