"""Tiles of the grouped GEMMs: what a call launches, who decided it, and how to decide otherwise.

tiles = choose_tiles(problem, tokens)          # tuned where a file says so, see configs.lookup
print(explain(problem, tokens))                # which file, and why
with override_config(TilePair(...)):           # in this thread, inside the block
    ...
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from experts.triton.aligned_w4 import config as aligned_w4_config
from experts.triton.configs.filenames import names_for
from experts.triton.configs.files import Recipe, override_recipe
from experts.triton.configs.heuristics import Steps, regimes
from experts.triton.configs.lookup import FIXED, PACKAGED, Source, TileStore, fit, nearest
from experts.triton.launch_config import ALIGNED, Device, Tile, TilePair
from modular_kernel.machine import current_machine
from modular_kernel.settings import read_settings
from modular_kernel.types import Problem

__all__ = [
    "Tile",
    "TilePair",
    "choose_tiles",
    "explain",
    "override_config",
    "regimes_up_to",
    "reread",
    "this_store",
]

_PACKAGED = Path(__file__).parent / "data"
_override: ContextVar[Recipe | None] = ContextVar("tile override", default=None)
_device: ContextVar[Device | None] = ContextVar("tile device", default=None)


def choose_tiles(problem: Problem, tokens: int, paths: tuple[str, ...] = (ALIGNED,)) -> TilePair:
    """Tiles for a call of `tokens` tokens. Files are read at the first call for a problem.

    tokens: of this rank; in the batched format the rows reserved for an expert. paths: those the
    caller can take; where a file says another, the tiles are those of the regimes. A gated GEMM 1
    computes block_n gate and block_n up columns. ConfigurationError where a file or an override
    is malformed or does not fit. A repeated call takes about a microsecond.
    """
    return _chosen(problem, tokens, _Where(_override.get(), _device.get(), paths))


def regimes_up_to(
    problem: Problem, tokens: int, paths: tuple[str, ...] = (ALIGNED,)
) -> list[tuple[int, str, int]]:
    """Return (most tokens, path, block_m) for each path and block_m that a call can meet.

    The call has at most `tokens` tokens.
    """
    return list(_regimes(problem, tokens, _Where(_override.get(), _device.get(), paths)))


@contextmanager
def override_config(config: TilePair | Mapping[str, object] | None) -> Iterator[None]:
    """Inside the block `config` decides instead of any file; None: files decide again.

    config: a pair of tiles, or a mapping as in a file (see configs.files), or one launch of it for
    every number of tokens. Blocks nest, and end as they began, whatever is raised inside. Other
    threads do not see it. Workspaces depend on it: make kernels and plans where they are called.
    """
    token = _override.set(None if config is None else override_recipe(config))
    try:
        yield
    finally:
        _override.reset(token)


@contextmanager
def on_device(device: Device) -> Iterator[None]:
    """Inside the block, in this thread, tiles are those for `device`: it need not be here."""
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


def explain(
    problem: Problem,
    tokens: int,
    device_name: str | None = None,
    paths: tuple[str, ...] = (ALIGNED,),
    *,
    few_rows: bool = False,
) -> str:
    """Which tiles a call of `tokens` tokens launches, where they come from, and why those.

    device_name: as if on this GPU; None means this machine's. paths: those the caller can take.
    few_rows: whether it has the launches of aligned_w4.config. One fact per line.
    """
    store = this_store()
    recipe = _override.get()
    if device_name is not None:
        store = replace(store, device=Device(device_name))
    source = fit(recipe, problem, store.device) if recipe else store.source(problem)
    pair = _within(source.steps, problem, store.device, paths).choose(tokens)
    lines = [
        f"{problem}, {tokens} tokens, on {store.device.name or 'no GPU'}",
        f"  from {_why(source, problem, tokens)}",
        f"  GEMM 1: {pair.gemm1}{' (gate, and as many up columns)' if problem.act.gated else ''}",
        f"  GEMM 2: {pair.gemm2}",
        *(_in_their_place(problem, tokens, pair) if few_rows else ()),
        *(f"  note: {note}" for note in source.notes),
        *(f"  looked in {place}" for place in source.looked_in),
    ]
    if source.origin in ("regimes", "neighbours"):
        named = names_for(problem, store.device.name)[0] if store.device.name else ""
        need = f"`mk tune` writes one: {named}" if named else "tuned files are for a GPU"
        lines.append(f"  no tuned file; {need}")
    return "\n".join(lines)


def _in_their_place(problem: Problem, tokens: int, pair: TilePair) -> list[str]:
    """Say what is launched where the kernel of few rows takes the place of `pair`."""
    shapes = aligned_w4_config.launched(problem, tokens, pair)
    if shapes is None:
        return []
    block_m = aligned_w4_config.block_m(problem, tokens * problem.top_k)
    first = "  not launched: few rows of 4-bit weights have a kernel with launches of its own"
    lines = (f"  GEMM {i}: block_m={block_m} {shape}" for i, shape in enumerate(shapes, 1))
    return [first, *lines]


def _why(source: Source, problem: Problem, tokens: int) -> str:
    lender = source.whose[source.steps.index(tokens)] if source.whose else ""
    if lender == "regimes":
        return "regimes: no layer with a file is near"
    if lender:
        return f"the nearest layer with a file: {lender}"
    if source.origin == FIXED:
        return FIXED
    if not source.keys:
        rows = tokens * problem.top_k / problem.experts
        place = source.steps.index(tokens) + 1
        return f"regime {place} of {len(source.steps.lasts)}: {rows:.4g} rows an expert"
    key, keys = nearest(source.keys, tokens), ", ".join(map(str, source.keys))
    if len(source.keys) == len(source.steps.lasts):
        taken = source.keys[source.steps.index(tokens)]
        if taken != key:
            return f"{source.origin}: tokens {taken} of {keys}, because {key} is for fewer"
    return f"{source.origin}: tokens {key} is the nearest of {keys}"


def reread() -> None:
    """Forget what was read from files, the environment and the machine, as `mk tune` does."""
    for function in (_chosen, _regimes, _source, _machine_s_store):
        function.cache_clear()


def this_store() -> TileStore:
    """Return the folders and the GPU of this machine, or the GPU of `on_device`."""
    store, device = _machine_s_store(), _device.get()
    return store if device is None else replace(store, device=device)


@cache
def _machine_s_store() -> TileStore:
    """Look at this machine once; its first GPU stands for all."""
    own = read_settings().config_dir
    folders = ((PACKAGED, _PACKAGED),) if own is None else (("user", own), (PACKAGED, _PACKAGED))
    return TileStore(folders, Device.of(current_machine()), triton_version())


def triton_version() -> str | None:
    """Return the installed triton's version, without importing it."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


class _Where(NamedTuple):
    """What decides about tiles beside the problem and its tokens."""

    recipe: Recipe | None
    device: Device | None  # of `on_device`
    paths: tuple[str, ...]


@lru_cache(maxsize=1 << 10)
def _source(problem: Problem, where: _Where) -> Steps:
    """problem: with tokens = 0, which decide nothing here."""
    store, recipe = this_store(), where.recipe
    source = store.source(problem) if recipe is None else fit(recipe, problem, store.device)
    return _within(source.steps, problem, store.device, where.paths)


def _within(steps: Steps, problem: Problem, device: Device, paths: tuple[str, ...]) -> Steps:
    if all(pair.path in paths for pair in steps.pairs):
        return steps
    return steps.within(paths, regimes(problem, device, paths))


@lru_cache(maxsize=1 << 16)
def _chosen(problem: Problem, tokens: int, where: _Where) -> TilePair:
    return _source(problem.with_tokens(0), where).choose(tokens)


@lru_cache(maxsize=1 << 12)
def _regimes(problem: Problem, tokens: int, where: _Where) -> tuple[tuple[int, str, int], ...]:
    most = _source(problem.with_tokens(0), where).most_tokens(tokens)
    return tuple((limit, path, block_m) for (path, block_m), limit in most.items())
