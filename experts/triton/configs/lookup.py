"""Which tuned file serves a problem, and the configurations it gives.

Calls with prepared weights have files of their own, and without one take what others take but for
the paths that prepare.

Order: an override in force > the user's folder (MK_CONFIG_DIR) > the packaged files in data/ > the
nearest layers that have a packaged file (`nearest`) > `heuristics`, where no file is for this
device and number format. In a folder a file may lie under
triton_X_Y_Z/, as SGLang keeps them, or at its top, as vLLM does: this triton's subfolder first,
then the top, then other versions, newest first. A name is looked for everywhere in a folder before
the next name is (see configs.filenames).

A file holds launches for some numbers of tokens; a call takes those of the nearest, and of two
equally near ones those of the smaller number.
"""

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from experts.triton.configs.files import VERSION, ConfigKey, Recipe, names_for, read_recipe
from experts.triton.configs.former import MEANT, named_now, path_meant, replaced
from experts.triton.configs.heuristics import Steps, heuristics, require_config, with_prepared
from experts.triton.configs.nearest import Known, borrow, checked_by_rows, steps_of
from experts.triton.launch_config import (
    GROUP,
    SHARED,
    Device,
    Gemm,
    Launch,
    LaunchConfig,
    MoEConfig,
    clamped,
    gemms,
    require,
    starts_on_16,
    violations,
)
from experts.triton.path import ENDLESS
from experts.triton.paths import BASE, BY_NAME
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem
from modular_kernel.text import printable

_LOG = logging.getLogger("modular_kernel.tiles")
_SUBFOLDER = re.compile(r"triton_(\d+)_(\d+)_(\d+)", re.ASCII)
PACKAGED = "packaged"  # what the folder that ships is called
NEAREST = "nearest"  # an origin
FIXED = "one configuration for every number of tokens: batch_invariant"  # an origin
_LEAST_BLOCK_N = 16
# What gives way when a launch of somebody else's is fitted; the rest must be right as it is.
_FITTED = frozenset({GROUP, SHARED})


@dataclass(frozen=True)
class Source:
    """The configurations of a problem and where they come from.

    origin: "override_config", a file, "nearest", "heuristics" or FIXED. keys: numbers of tokens
    that the file has. whose: of each of the steps, the layer it is from. notes: what else a reader
    should know. looked_in: places without a file, in order. former: files of version 1 say so.
    prepared: it says what calls with prepared weights launch.
    """

    steps: Steps
    origin: str
    keys: tuple[int, ...] = ()
    whose: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    looked_in: tuple[str, ...] = ()
    former: bool = False
    prepared: bool = False

    def launched(
        self, problem: Problem, device: Device, paths: Collection[str], *, prepared: bool = False
    ) -> Steps:
        """Return what is launched by these paths where this decides; prepared: weights are."""
        steps = self.steps
        if self.former:
            steps = replaced(steps, problem, device, paths)
        if not all(config.path in paths for config in steps.configs):
            own = heuristics(problem, device, paths, prepared=prepared)
            steps = steps.within(paths, own)
        if self.origin == NEAREST:
            steps = checked_by_rows(steps, heuristics(problem, device, paths), problem)
        if prepared and not self.prepared:
            return with_prepared(steps, problem, device, paths)
        return steps


@dataclass(frozen=True)
class ConfigLookup:
    """Folders of tuned files for one device.

    folders: (what it is called, where), best first. triton: the version here, if known.
    """

    folders: tuple[tuple[str, Path], ...]
    device: Device
    triton: str | None = None

    def source(self, problem: Problem, *, prepared: bool = False) -> Source:
        """Return what the first file there is has, or the heuristics. Reads files.

        prepared: for calls with prepared weights; that of other calls where these have no file.
        ConfigurationError names a file that cannot be read, is malformed or, being ours, does not
        fit. Warns, once for each file, where one of another triton is used or was clamped.
        """
        if problem.batch_invariant:  # files are by the number of tokens
            return Source(heuristics(problem, self.device), FIXED)
        looked_in: list[str] = []
        names = names_for(problem, self.device.name, prepared=prepared)
        for title, folder in self.folders if self.device.name else ():
            path = self._first(folder, names)
            if path is None:
                there = "no file" if folder.is_dir() else "no such folder"
                of = " of prepared weights" if prepared and folder.is_dir() else ""
                looked_in.append(f"{title} {folder}: {there}{of}")
                continue
            recipe = _with_down(path)
            if not _same_rows(recipe, problem):
                why = "tuned for rows that start on 16 elements"
                looked_in.append(f"{title} {path}: {why}")
                continue
            found = fit(recipe, problem, self.device, prepared=prepared)
            notes = (*self._foreign_triton(path, recipe), *found.notes)
            if notes:
                _warn(f"{path}: {'; '.join(notes)}")
            if recipe.tuned_for is not None:
                notes = (*notes, *_other_layer(recipe, problem))
            return replace(found, notes=notes, looked_in=tuple(looked_in))
        if prepared:
            others = self.source(problem)
            return replace(others, looked_in=(*dict.fromkeys((*looked_in, *others.looked_in)),))
        known = self._known(problem)
        if not known:
            steps = heuristics(problem, self.device)
            return Source(steps, "heuristics", looked_in=tuple(looked_in))
        lent = borrow(known, problem, self.device, heuristics(problem, self.device, MEANT))
        whose = tuple(one.origin for one in lent)
        return Source(steps_of(lent), NEAREST, whose=whose, looked_in=tuple(looked_in), former=True)

    def _known(self, problem: Problem) -> list[Known]:
        """Return the packaged layers for this device and number format.

        There are none for a problem whose rows start elsewhere than theirs do.
        """
        if not self.device.name or not starts_on_16(problem):
            return []
        wanted, known = ConfigKey.of(problem, self.device.name), list[Known]()
        for title, folder in self.folders:
            if title != PACKAGED:
                continue
            for path in sorted((folder / subfolder(self.triton)).glob("E=*.json")):
                key = ConfigKey.parse(path.name)
                if replace(wanted, experts=key.experts, intermediate=key.intermediate) == key:
                    known.append(Known.of(key, read_recipe(path)))
        return known

    def _first(self, folder: Path, names: Sequence[str]) -> Path | None:
        places = [folder / name for name in self._subfolders(folder)]
        paths = (place / name for name in names for place in places)
        # A dangling link or a folder of that name is met by `read_recipe`, which refuses it.
        return next((path for path in paths if path.exists() or path.is_symlink()), None)

    def _subfolders(self, folder: Path) -> Iterator[str]:
        own = subfolder(self.triton)
        if own:
            yield own
        yield ""
        others = []
        for entry in folder.iterdir() if folder.is_dir() else ():
            match = _SUBFOLDER.fullmatch(entry.name)
            if match is not None and entry.name != own:
                others.append((tuple(map(int, match.groups())), entry.name))
        yield from (name for _, name in sorted(others, reverse=True))

    def _foreign_triton(self, path: Path, recipe: Recipe) -> Iterator[str]:
        here = subfolder(self.triton)
        there = path.parent.name if _SUBFOLDER.fullmatch(path.parent.name) else ""
        there = subfolder(recipe.triton) or there
        if here and there and here != there:
            version = there.removeprefix("triton_").replace("_", ".")
            yield f"tuned with triton {version}, this is {self.triton}: it may not be the best here"


def subfolder(triton: str | None) -> str:
    """Where files tuned with this version of triton lie: "triton_3_6_0"; "" if unknown."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", triton or "", re.ASCII)
    return f"triton_{'_'.join(match.groups())}" if match else ""


@cache
def _warn(text: str) -> None:
    """One line, the first time only."""
    _LOG.warning("%s", printable(text))


def _with_down(path: Path) -> Recipe:
    """Read the recipe of a file, with GEMM 2 from SGLang's file beside it if there is one."""
    recipe = read_recipe(path)
    down = path.with_name(path.name.removesuffix(".json") + "_down.json")
    if recipe.strict or not down.exists():
        return recipe
    second = read_recipe(down)
    if second.strict:
        need = "a file of SGLang's: ours has both GEMMs in one"
        raise ConfigurationError(f"config file {down}", got="a file of ours", need=need)
    return replace(recipe, gemm2=second.gemm2)


def _same_rows(recipe: Recipe, problem: Problem) -> bool:
    """Whether large tiles load this problem's rows as they did the tuner's."""
    if starts_on_16(problem):
        return True
    return recipe.tuned_for is not None and recipe.tuned_for.hidden == problem.hidden


def _other_layer(recipe: Recipe, problem: Problem) -> Iterator[str]:
    assert recipe.tuned_for is not None
    for name in ("hidden", "top_k"):
        there, here = getattr(recipe.tuned_for, name), getattr(problem, name)
        if there != here:
            yield f"tuned for {name}={there}, this problem has {here}"


def nearest(keys: Sequence[int], tokens: int) -> int:
    """Return the key nearest to `tokens`; of two equally near ones the smaller."""
    return min(keys, key=lambda key: (abs(key - tokens), key))


def fit(recipe: Recipe, problem: Problem, device: Device, *, prepared: bool = False) -> Source:
    """Return the recipe's configurations for `problem`, of calls with prepared weights or without.

    Raise ConfigurationError if they cannot be launched.
    """
    tops = {t: _top(path, t, recipe, problem, device, prepared) for t, path in recipe.paths}
    one, two = _lasts(recipe.gemm1, tops), _lasts(recipe.gemm2, tops)
    lasts = sorted({last for last, _ in (*one, *two)})
    configs, notes = [], dict[str, None]()
    for last in lasts:
        (tokens, first), (tokens2, second) = (_until(last, choices) for choices in (one, two))
        if recipe.fused_columns:
            places = (f"{recipe.origin}, tokens {t}" for t in (tokens, tokens2))
            first, second, clamps = _fitted(first, second, recipe, problem, device, tuple(places))
            notes |= dict.fromkeys(clamps)
        config = MoEConfig(first, second, dict(recipe.paths).get(tokens, BASE.name))
        if recipe.version < VERSION:
            config = named_now(config, problem, device)
        # Where its path does not serve the problem it is not taken: see Steps.within.
        if BY_NAME[config.path].serves(problem, device):
            require_config(config, problem, device, f"{recipe.origin}, tokens {tokens}")
        configs.append(config)
    if problem.batch_invariant:
        _require_one(configs, problem, device, recipe.origin)
    keys = tuple(tokens for tokens, _ in recipe.gemm1)
    former = recipe.version < VERSION
    steps = Steps(tuple(lasts), tuple(configs))
    return Source(
        steps, recipe.origin, keys, notes=_few(list(notes)), former=former, prepared=prepared
    )


def _until(last: int, choices: Sequence[tuple[int, tuple[int, Launch]]]) -> tuple[int, Launch]:
    return next(choice for end, choice in choices if last <= end)


def _top(
    name: str, tokens: int, recipe: Recipe, problem: Problem, device: Device, prepared: bool
) -> int:
    """Return the most tokens that what was tuned for `tokens` on this path may serve.

    A path of a few tokens reads weights once for every pair: what was tuned for fewer tokens than
    it pays for says nothing about more. What it prepares pays for any number.
    """
    former = recipe.version < VERSION
    path = path_meant(name, problem, device) if former else BY_NAME[name]
    if prepared and path.turns_of_prepared(problem):
        return ENDLESS
    most = path.most_tokens(problem)
    return ENDLESS if most is None else max(tokens, most)


def _require_one(
    configs: Sequence[MoEConfig], problem: Problem, device: Device, origin: str
) -> None:
    served = all(BY_NAME[config.path].serves(problem, device) for config in configs)
    if len(set(configs)) > 1 or not served:
        got = ", ".join(dict.fromkeys(map(str, configs)))
        serving = " or ".join(p.name for p in BY_NAME.values() if p.serves(problem, device))
        need = f"one configuration for every number of tokens, by {serving}: batch_invariant"
        raise ConfigurationError(origin, got=got, need=need)


def _fitted(
    first: Launch,
    second: Launch,
    recipe: Recipe,
    problem: Problem,
    device: Device,
    places: tuple[str, ...],
) -> tuple[LaunchConfig, LaunchConfig, list[str]]:
    """Return launches of vLLM's or SGLang's as they fit here, and which ones were made smaller."""
    made: list[LaunchConfig] = []
    clamps = []
    for tile, gemm, where in zip((first, second), gemms(problem), places, strict=True):
        assert isinstance(tile, LaunchConfig)
        if gemm.sides == 2:
            tile = replace(tile, block_n=max(tile.block_n // 2, _LEAST_BLOCK_N))
        if made:  # SGLang's second file may say otherwise, but the alignment is shared
            tile = replace(tile, block_m=made[0].block_m)
        fitted = _clamped(tile, gemm, device, recipe.strict, where)
        if fitted != tile:
            tokens = where.removeprefix(f"{recipe.origin}, ")
            clamps.append(f"{tokens} {gemm}: {tile} clamped to {fitted}")
        made.append(fitted)
    return made[0], made[1], clamps


def _lasts(
    launches: Sequence[tuple[int, Launch]], tops: Mapping[int, int]
) -> list[tuple[int, tuple[int, Launch]]]:
    """(most tokens to which this launch is the nearest, launch), ascending.

    tops: where launches that are not the last end, at the latest, by their tokens.
    """
    tokens = [t for t, _ in launches]
    ends = [min((low + high) // 2, tops.get(low, ENDLESS)) for low, high in pairwise(tokens)]
    return list(zip([*ends, ENDLESS], launches, strict=True))


def _clamped(
    tile: LaunchConfig, gemm: Gemm, device: Device, strict: bool, where: str
) -> LaunchConfig:
    """`tile`, or a smaller one where it does not fit and need not be taken as it is."""
    if not strict:
        found = {violation.what for violation in violations(tile, gemm, device)}
        if found and found <= _FITTED:
            tile = clamped(tile, gemm, device)
    return require(tile, gemm, device, where)


def _few(notes: list[str]) -> tuple[str, ...]:
    """Return the first note, and how many there are like it."""
    if len(notes) <= 1:
        return tuple(notes)
    return (f"{notes[0]}, and {len(notes) - 1} more like it",)
