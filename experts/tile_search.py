"""How the Triton experts are tuned: which tiles are worth timing, and where the best are kept."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from pathlib import Path

from experts.tile_files import Recipe, Times, TunedFor, dump_recipe, read_recipe
from experts.tile_names import TileKey
from experts.tile_regimes import regimes
from experts.tile_shapes import ALIGNED, Gemm, Tile, TilePair, gemms, violations
from experts.tile_store import subfolder
from experts.tiles import choose_tiles, explain, override_config, reread, this_store
from modular_kernel.errors import ConfigurationError
from modular_kernel.tunable import Best, Choice, Search, Tunable
from modular_kernel.types import Problem

# Mean rows of an expert between which a block_m is worth a try.
_BLOCKS_M = {16: (0, 28), 32: (6, 72), 64: (12, 700), 128: (44, 1 << 62)}
# (num_warps, num_stages) to begin with, by block_m; stages are refined later.
_BEGIN = {16: ((4, 4),), 32: ((4, 3),), 64: ((4, 3), (8, 3)), 128: ((8, 3), (4, 3))}
_BLOCKS_N = (32, 64, 128, 256)
_BLOCKS_K = (32, 64, 128, 256)
_REFINED = {"num_stages": (2, 3, 4, 5, 6, 8), "group_m": (1, 8, 16, 32)}
_STEP_BITS = (1024, 4096)  # of a row of A in one step: whole cache lines, not too many
_STEP_SIZE = (2048, 1 << 15)  # weights of one step
_MOST_SUMS = 128  # float32 sums of a thread that just fit its 255 registers
_KEPT = 2  # block_m that are refined


class TileSpace(Tunable):
    """Pairs of tiles, found by turns: GEMM 1, GEMM 2, then stages and swizzle of the best.

    A choice is a TilePair. experts_part: name of the part, noted in the file.
    """

    def __init__(self, problem: Problem, experts_part: str) -> None:
        self.problem = problem
        self.experts_part = experts_part
        self._gemms = gemms(problem)

    def untuned(self, tokens: int) -> Choice:
        return regimes(self.problem, this_store().device, (ALIGNED,)).choose(tokens)

    def using(self, choice: Choice) -> AbstractContextManager[None]:
        assert isinstance(choice, TilePair)
        return override_config(choice)

    def search(self, tokens: int) -> Search:
        seconds: dict[Choice, float] = {}
        yield [choose_tiles(self.problem, tokens)]  # of a file, if there is one
        found: list[TilePair] = []
        for block_m in self.blocks_m(tokens):
            start = self._start(block_m, tokens)
            for index in (0, 1):
                asked = [_with(start, index, tile) for tile in self.tiles(index, block_m)]
                asked += [start] * (start not in seconds)
                seconds.update((yield asked))
                start = _fastest([start, *asked], seconds)
            found.append(start)
        found = sorted((p for p in found if p in seconds), key=seconds.__getitem__)[:_KEPT]
        for pair in found:
            for index, (name, values) in product((0, 1), _REFINED.items()):
                asked = self._variants(pair, index, name, values)
                seconds.update((yield asked))
                pair = _fastest([pair, *asked], seconds)

    def likely(self, tokens: int) -> Sequence[Choice]:
        return [
            _with(self._start(block_m, tokens), index, tile)
            for block_m in self.blocks_m(tokens)
            for index in (0, 1)
            for tile in self.tiles(index, block_m)
        ]

    def blocks_m(self, tokens: int) -> list[int]:
        """Row blocks worth a try, the untuned one first."""
        rows = tokens * self.problem.top_k / self.problem.experts
        first = regimes(self.problem, this_store().device, (ALIGNED,)).choose(tokens).gemm1.block_m
        worth = [m for m, (least, most) in _BLOCKS_M.items() if least <= rows <= most]
        return list(dict.fromkeys([first, *worth]))

    def tiles(self, index: int, block_m: int) -> list[Tile]:
        """Tiles of GEMM 1 (index 0) or GEMM 2 with this block_m, nothing refined yet."""
        group_m, gemm = 1 if block_m <= 32 else 16, self._gemms[index]
        # Weights that are dequantised on the way keep more threads busy.
        begin = _BEGIN[block_m] + (((8, 3),) if gemm.widened and block_m == 32 else ())
        made = [
            Tile(block_m, block_n, block_k, group_m, warps, stages)
            for (warps, stages), block_n, block_k in product(begin, _BLOCKS_N, _BLOCKS_K)
        ]
        wide = (t for t in made if _STEP_BITS[0] <= t.block_k * gemm.a_bits <= _STEP_BITS[1])
        # Where a scheme's groups are narrow there are no wide ones.
        return list(self._sensible(wide, gemm)) or list(self._sensible(made, gemm))

    def _sensible(self, tiles: Iterable[Tile], gemm: Gemm) -> Iterator[Tile]:
        """Those that can be launched, keep their threads busy and spill no sums."""
        device = this_store().device
        for tile in tiles:
            sums = tile.block_m * tile.block_n * gemm.sides // (32 * tile.num_warps)
            step = tile.block_n * tile.block_k * gemm.sides
            if (
                tile.block_m // 4 <= sums <= _MOST_SUMS
                and _STEP_SIZE[0] <= step <= _STEP_SIZE[1]
                and tile.block_k < 2 * gemm.depth
                and next(violations(tile, gemm, device), None) is None
            ):
                yield tile

    def _start(self, block_m: int, tokens: int) -> TilePair:
        """A pair with this block_m that is known to be sound: the untuned table's."""
        steps = regimes(self.problem, this_store().device, (ALIGNED,))
        here = steps.choose(tokens)
        pairs = [p for p in (here, *steps.pairs) if p.gemm1.block_m == block_m]
        if pairs:
            return pairs[0]
        small = min(steps.pairs, key=lambda p: abs(p.gemm1.block_m - block_m))
        return TilePair(
            replace(small.gemm1, block_m=block_m), replace(small.gemm2, block_m=block_m)
        )

    def _variants(
        self, pair: TilePair, index: int, name: str, values: Sequence[int]
    ) -> list[TilePair]:
        """The pair with other values of one field of one tile."""
        tile = (pair.gemm1, pair.gemm2)[index]
        made = (replace(tile, **{name: value}) for value in values)
        sound = self._sensible(made, self._gemms[index])
        return [_with(pair, index, other) for other in sound if other != tile]

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
            tokens: Best(TilePair(one, two), times.us / 1e6, _seconds(times.untuned_us))
            for (tokens, one), (_, two) in zip(recipe.gemm1, recipe.gemm2, strict=True)
            if (times := recipe.times.get(tokens)) is not None
        }

    def save(self, best: Mapping[int, Best], folder: Path) -> Path:
        pairs = {tokens: best[tokens].choice for tokens in sorted(best)}
        launches: tuple[list[tuple[int, Tile]], list[tuple[int, Tile]]] = ([], [])
        for tokens, pair in pairs.items():
            assert isinstance(pair, TilePair)
            launches[0].append((tokens, pair.gemm1))
            launches[1].append((tokens, pair.gemm2))
        recipe = Recipe(
            origin="",
            gemm1=tuple(launches[0]),
            gemm2=tuple(launches[1]),
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
        return explain(self.problem, tokens, device_name)

    def _tuned_for(self) -> TunedFor:
        return TunedFor(self.experts_part, self.problem.hidden, self.problem.top_k)

    def _path(self, folder: Path) -> Path:
        store = this_store()
        name = TileKey.of(self.problem, store.device.name).file_name
        return folder / subfolder(store.triton) / name


def _times(best: Best) -> Times:
    untuned = best.untuned_seconds
    return Times(_us(best.seconds), None if untuned is None else _us(untuned))


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _seconds(us: float | None) -> float | None:
    return None if us is None else us / 1e6


def _with(pair: TilePair, index: int, tile: Tile) -> TilePair:
    return replace(pair, gemm1=tile) if index == 0 else replace(pair, gemm2=tile)


def _fastest(pairs: Sequence[TilePair], seconds: Mapping[Choice, float]) -> TilePair:
    """Of those that were timed; the first where none was."""
    timed = [pair for pair in pairs if pair in seconds]
    return min(timed, key=seconds.__getitem__) if timed else pairs[0]
