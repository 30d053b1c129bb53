"""How the Triton experts are tuned: which tiles are worth timing, and where the best are kept."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median

from experts.triton.configs.filenames import TileKey
from experts.triton.configs.files import (
    Recipe,
    Times,
    TunedFor,
    dump_recipe,
    pair_as_json,
    read_recipe,
)
from experts.triton.configs.heuristics import regimes
from experts.triton.configs.limits import MOST_TOKENS, path_violations
from experts.triton.configs.lookup import subfolder
from experts.triton.configs.select import (
    choose_tiles,
    explain,
    on_device,
    override_config,
    reread,
    this_store,
)
from experts.triton.launch_config import ALIGNED, Gemm, Tile, TilePair, gemms
from experts.triton.tuning.candidates import FEW_TRIED, ROWS, Entry, entries, rows_span
from modular_kernel import stages
from modular_kernel.errors import ConfigurationError
from modular_kernel.tunable import Best, Choice, Took, Tunable
from modular_kernel.types import Problem

_GROUP_M = 16  # of a swizzle group where an entry names none and blocks are tall
_SHORT = 32  # block_m up to which there is nothing to swizzle
_GROUPS_KEPT, _TILES_KEPT, _FINALISTS = 2, 2, 4


class TileSpace(Tunable):
    """Pairs of tiles. A choice is a TilePair, and its GEMMs are told apart by their stages.

    experts_part: name of the part, noted in the file. paths: those it can take for `problem`.
    few_rows: whether it has the launches of aligned_w4.config.
    Hand it to another process, and `using` pretends this one's GPU there.
    """

    stages = (stages.GEMM1, stages.GEMM2)

    def __init__(
        self,
        problem: Problem,
        experts_part: str,
        paths: Sequence[str] = (ALIGNED,),
        *,
        few_rows: bool = False,
    ) -> None:
        self.problem = problem
        self.experts_part = experts_part
        self.paths = tuple(paths)
        self.few_rows = few_rows
        self._gemms = gemms(problem)
        self._device = this_store().device

    def untuned(self, tokens: int) -> Choice:
        return regimes(self.problem, self._device, self.paths).choose(tokens)

    @contextmanager
    def using(self, choice: Choice) -> Iterator[None]:
        assert isinstance(choice, TilePair)
        with on_device(self._device), override_config(choice):
            yield

    def candidates(self, tokens: int) -> Sequence[Choice]:
        """GEMM 1 and GEMM 2 are tried at once: their times are told apart."""
        now = choose_tiles(self.problem, tokens, self.paths)  # of a file, if there is one
        found = [now] if self._fits(now) else []
        for path in self.paths:
            for block_m in self.blocks_m(path, tokens):
                found += self._diagonal(path, block_m)
        return list(dict.fromkeys(found))

    def blocks_m(self, path: str, tokens: int) -> list[int]:
        """Row blocks worth a try on `path`."""
        rows = tokens * self.problem.top_k / self.problem.experts
        most = MOST_TOKENS.get(path)
        if most and tokens > FEW_TRIED * most(self.problem):
            return []
        known = entries(self.problem, path)[0]
        untuned = {pair.gemm1.block_m for pair in self._untuned_pairs(path)}
        spans = {m: rows_span(self.problem, path, m) for m in ROWS[path]}
        worth = [m for m, (least, most) in spans.items() if least <= rows <= most]
        return [block_m for block_m in worth if block_m in known or block_m in untuned]

    def _untuned_pairs(self, path: str) -> list[TilePair]:
        steps = regimes(self.problem, self._device, self.paths)
        return [pair for pair in steps.pairs if pair.path == path]

    def _diagonal(self, path: str, block_m: int) -> list[TilePair]:
        """Every launch of either GEMM with this block_m, in as few pairs as there can be."""
        untuned = [pair for pair in self._untuned_pairs(path) if pair.gemm1.block_m == block_m]
        lists: list[list[Tile]] = []
        known = entries(self.problem, path)
        for index, gemm in enumerate(self._gemms):
            tiles = [(pair.gemm1, pair.gemm2)[index] for pair in untuned]
            tiles += [_tile(entry, block_m, gemm) for entry in known[index].get(block_m, ())]
            tiles = list(dict.fromkeys(tiles))
            lists.append([tile for tile in tiles if self._sound(tile, gemm, path)])
        first, second = lists
        if not first or not second:
            return []
        count = max(len(first), len(second))
        return [
            TilePair(first[i % len(first)], second[i % len(second)], path) for i in range(count)
        ]

    def _sound(self, tile: Tile, gemm: Gemm, path: str) -> bool:
        """Whether it can be launched and is no deeper than the product."""
        deep = tile.block_k >= 2 * gemm.depth
        found = path_violations(tile, gemm, path, self.problem, self._device)
        return not deep and next(found, None) is None

    def _fits(self, pair: TilePair) -> bool:
        tiles = zip((pair.gemm1, pair.gemm2), self._gemms, strict=True)
        return pair.path in self.paths and all(self._sound(*each, pair.path) for each in tiles)

    def finalists(self, tokens: int, took: Mapping[Choice, Took]) -> Sequence[Choice]:
        """Pair the best GEMM 1 with the best GEMM 2 of the same path and block_m, and near ones."""
        model = Additive(took)
        kinds = sorted(model.kinds(), key=model.least)[:_GROUPS_KEPT]
        pairs = [pair for kind in kinds for pair in model.best_pairs(kind, _TILES_KEPT)]
        return sorted(pairs, key=model.seconds)[:_FINALISTS]

    def as_json(self, choice: Choice) -> Mapping[str, object]:
        assert isinstance(choice, TilePair)
        return pair_as_json(choice)

    def saved(self, folder: Path) -> Mapping[int, Best]:
        path = self._path(folder)
        if not path.exists():
            return {}
        recipe = read_recipe(path)
        if not recipe.strict or recipe.tuned_for != self._tuned_for():
            got = recipe.tuned_for if recipe.strict else "a file of vLLM's or SGLang's"
            need = f"{self._tuned_for()}; another folder, or to start afresh"
            raise ConfigurationError(f"tile file {path}", got=got, need=need)
        return {
            tokens: Best(pair, times.us / 1e6, _seconds(times.untuned_us))
            for tokens, pair in recipe.pairs().items()
            if (times := recipe.times.get(tokens)) is not None
        }

    def save(self, best: Mapping[int, Best], folder: Path) -> Path:
        pairs: dict[int, TilePair] = {}
        for tokens in sorted(best):
            pair = best[tokens].choice
            assert isinstance(pair, TilePair)
            pairs[tokens] = pair
        recipe = Recipe(
            origin="",
            gemm1=tuple((tokens, pair.gemm1) for tokens, pair in pairs.items()),
            gemm2=tuple((tokens, pair.gemm2) for tokens, pair in pairs.items()),
            paths=tuple((tokens, pair.path) for tokens, pair in pairs.items()),
            fused_columns=False,
            strict=True,
            triton=this_store().triton,
            tuned_for=self._tuned_for(),
            times={t: _times(best[t]) for t in pairs},
        )
        path = self._path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(dump_recipe(recipe), encoding="utf-8")
        partial.replace(path)
        reread()
        return path

    def explain(self, tokens: int, device_name: str | None = None) -> str:
        return explain(self.problem, tokens, device_name, self.paths, few_rows=self.few_rows)

    def _tuned_for(self) -> TunedFor:
        return TunedFor(self.experts_part, self.problem.hidden, self.problem.top_k)

    def _path(self, folder: Path) -> Path:
        store = this_store()
        name = TileKey.of(self.problem, store.device.name).file_name
        return folder / subfolder(store.triton) / name


def _tile(entry: Entry, block_m: int, gemm: Gemm) -> Tile:
    columns, block_k, warps, num_stages, *group = entry
    group_m = group[0] if group else 1 if block_m <= _SHORT else _GROUP_M
    return Tile(block_m, columns // gemm.sides, block_k, group_m, warps, num_stages)


Kind = tuple[str, int]  # path and block_m


class Additive:
    """What pairs take by what others took: GEMM 1, GEMM 2 and, for each kind, the rest."""

    def __init__(self, took: Mapping[Choice, Took]) -> None:
        self.tiles: dict[Kind, tuple[dict[Tile, float], dict[Tile, float]]] = {}
        rests: dict[Kind, list[float]] = {}
        for pair, one in took.items():
            assert isinstance(pair, TilePair)
            kind = pair.path, pair.gemm1.block_m
            first, second = self.tiles.setdefault(kind, ({}, {}))
            seconds = [one.stages.get(name, 0.0) for name in TileSpace.stages]
            for tiles, tile, each in zip(
                (first, second), (pair.gemm1, pair.gemm2), seconds, strict=True
            ):
                tiles[tile] = min(each, tiles.get(tile, each))
            rests.setdefault(kind, []).append(one.seconds - sum(seconds))
        self.rest = {kind: median(of) for kind, of in rests.items()}

    def kinds(self) -> list[Kind]:
        return list(self.tiles)

    def least(self, kind: Kind) -> float:
        """Seconds of the best pair of this kind."""
        return self.rest[kind] + sum(min(tiles.values()) for tiles in self.tiles[kind])

    def best_pairs(self, kind: Kind, count: int) -> list[TilePair]:
        """Every pair of the `count` fastest launches of either GEMM."""
        fastest = (sorted(tiles, key=tiles.__getitem__)[:count] for tiles in self.tiles[kind])
        return [TilePair(one, two, kind[0]) for one, two in product(*fastest)]

    def seconds(self, pair: TilePair) -> float:
        """Of a whole call; KeyError where one of its launches was not timed."""
        kind = pair.path, pair.gemm1.block_m
        first, second = self.tiles[kind]
        return self.rest[kind] + first[pair.gemm1] + second[pair.gemm2]


def _times(best: Best) -> Times:
    untuned = best.untuned_seconds
    return Times(_us(best.seconds), None if untuned is None else _us(untuned))


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _seconds(us: float | None) -> float | None:
    return None if us is None else us / 1e6
