"""What a call launches, who decided it, and how to decide otherwise.

config = choose_config(problem, tokens)          # tuned where a file says so, see configs.lookup
print(explain(problem, tokens))                # which file, and why
with override_config(MoEConfig(...)):          # in this thread, inside the block
    ...
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from experts.triton.configs.files import Recipe, names_for, override_recipe
from experts.triton.configs.heuristics import Steps
from experts.triton.configs.lookup import FIXED, PACKAGED, ConfigLookup, Source, fit, nearest
from experts.triton.configs.nearest import LEAST_ROWS
from experts.triton.launch_config import Device, MoEConfig
from experts.triton.paths import BASE, PATHS
from modular_kernel.machine import current_machine
from modular_kernel.settings import read_settings
from modular_kernel.spec.problem import Problem
from modular_kernel.text import counted
from modular_kernel.utils.package_probes import version_of

_PACKAGED = Path(__file__).parent / "data"
_override: ContextVar[Recipe | None] = ContextVar("config override", default=None)
_device: ContextVar[Device | None] = ContextVar("tile device", default=None)


def choose_config(
    problem: Problem,
    tokens: int,
    paths: tuple[str, ...] = (BASE.name,),
    *,
    prepared: bool = False,
) -> MoEConfig:
    """Return what a call of `tokens` tokens launches. Files are read at the first call.

    tokens: of this rank; in the batched format the rows reserved for an expert. paths: those the
    caller can take; where a file says another, the heuristics decide. prepared: of calls with
    prepared weights. A gated GEMM 1 computes
    block_n gate and block_n up columns. ConfigurationError where a file or an override is malformed
    or does not fit. A repeated call takes about a microsecond.
    """
    return _chosen(problem, tokens, _Where(_override.get(), _device.get(), paths, prepared))


def kinds_up_to(
    problem: Problem,
    tokens: int,
    paths: tuple[str, ...] = (BASE.name,),
    *,
    prepared: bool = False,
) -> list[tuple[int, str, int]]:
    """Return (most tokens, path, block_m) for each path and block_m that a call can meet.

    The call has at most `tokens` tokens. prepared: and prepared weights.
    """
    return list(_kinds(problem, tokens, _Where(_override.get(), _device.get(), paths, prepared)))


@contextmanager
def override_config(config: MoEConfig | Mapping[str, object] | None) -> Iterator[None]:
    """Inside the block `config` decides instead of any file; None: files decide again.

    config: a configuration, or a mapping as in a file (see configs.files), or one launch of it for
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
    paths: tuple[str, ...] = (BASE.name,),
    *,
    prepared: bool = False,
) -> str:
    """Say what a call of `tokens` tokens launches, where that comes from, and why.

    device_name: as if on this GPU; None means this machine's. paths: those the caller can take
    there. prepared: with prepared weights. Weights and tokens lie as the importers leave them. One
    fact per line.
    """
    store = this_store()
    recipe = _override.get()
    if device_name is not None:
        store = replace(store, device=Device.named(device_name))
    source = _source(store, recipe, problem, prepared)
    said = source.steps.choose(tokens)
    plain = source.launched(problem, store.device, paths).choose(tokens)
    config = source.launched(problem, store.device, paths, prepared=prepared).choose(tokens)
    where = f"{counted(tokens, 'token')}{', prepared weights' if prepared else ''}"
    why = _why(source, problem, tokens, plain)
    if prepared and not source.prepared and config != plain:
        why = f"heuristics of prepared weights, in place of {why}"
    lines = [
        f"{problem.with_tokens(tokens)}, {where}, on {store.device.name or 'no GPU'}",
        f"  from {why}",
        *([f"  not launched as it says, {said}"] if said.path != plain.path else []),
        f"  path: {config.path}",
        f"  GEMM 1: {config.gemm1}{' (gate, and as many up columns)' if problem.act.gated else ''}",
        f"  GEMM 2: {config.gemm2}",
        *(f"  note: {note}" for note in (*_of_adapters(problem, store.device), *source.notes)),
        *(f"  looked in {place}" for place in source.looked_in),
    ]
    if source.origin in ("heuristics", "nearest") or (prepared and not source.prepared):
        here = store.device.name
        named = names_for(problem, here, prepared=prepared)[0] if here else ""
        verb = "mk tune --prepared" if prepared else "mk tune"
        need = f"`{verb}` writes one: {named}" if named else "tuned files are for a GPU"
        lines.append(f"  no tuned file{' of prepared weights' if prepared else ''}; {need}")
    return "\n".join(lines)


def _of_adapters(problem: Problem, device: Device) -> Iterator[str]:
    """Say which paths a call with adapters cannot take, though one without could."""
    if problem.adapters is None:
        return
    plain = replace(problem, lora="none")
    lost = [p.name for p in PATHS if p.serves(plain, device) and not p.serves(problem, device)]
    if lost:
        yield f"calls with adapters do not take the paths {', '.join(lost)}; calls without do"


def _why(source: Source, problem: Problem, tokens: int, launched: MoEConfig) -> str:
    lender = source.whose[source.steps.index(tokens)] if source.whose else ""
    if lender == "heuristics":
        return "heuristics: no layer with a file is near"
    if lender:
        rows = tokens * problem.top_k / problem.experts
        if rows > LEAST_ROWS and launched != source.steps.choose(tokens):
            return f"heuristics: {rows:.4g} rows an expert are not for the launches of {lender}"
        return f"the nearest layer with a file: {lender}"
    if source.origin == FIXED:
        return FIXED
    if not source.keys:
        rows = tokens * problem.top_k / problem.experts
        place = source.steps.index(tokens) + 1
        return f"heuristic {place} of {len(source.steps.lasts)}: {rows:.4g} rows an expert"
    key, keys = nearest(source.keys, tokens), ", ".join(map(str, source.keys))
    if len(source.keys) == len(source.steps.lasts):
        taken = source.keys[source.steps.index(tokens)]
        if taken != key:
            return f"{source.origin}: tokens {taken} of {keys}, because {key} is for fewer"
    return f"{source.origin}: tokens {key} is the nearest of {keys}"


def reread() -> None:
    """Forget what was read from files, the environment and the machine, as `mk tune` does."""
    for function in (_chosen, _kinds, _steps, _machine_s_store):
        function.cache_clear()


def overridden() -> bool:
    """Return whether an `override_config` decides here."""
    return _override.get() is not None


def is_contextual() -> bool:
    """Return whether an `override_config` or an `on_device` decides here."""
    return _override.get() is not None or _device.get() is not None


def this_store() -> ConfigLookup:
    """Return the folders and the GPU of this machine, or the GPU of `on_device`."""
    store, device = _machine_s_store(), _device.get()
    return store if device is None else replace(store, device=device)


@cache
def _machine_s_store() -> ConfigLookup:
    """Look at this machine once; its first GPU stands for all."""
    own = read_settings().config_dir
    folders = ((PACKAGED, _PACKAGED),) if own is None else (("user", own), (PACKAGED, _PACKAGED))
    return ConfigLookup(folders, Device.of(current_machine()), triton_version())


def triton_version() -> str | None:
    """Return the installed triton's version, without importing it."""
    return version_of("triton")


class _Where(NamedTuple):
    """What decides about a configuration beside the problem and its tokens."""

    recipe: Recipe | None
    device: Device | None  # of `on_device`
    paths: tuple[str, ...]
    prepared: bool


@lru_cache(maxsize=1 << 10)
def _steps(problem: Problem, where: _Where) -> Steps:
    """problem: with tokens = 0, which decide nothing here."""
    store, prepared = this_store(), where.prepared
    source = _source(store, where.recipe, problem, prepared)
    return source.launched(problem, store.device, where.paths, prepared=prepared)


def _source(store: ConfigLookup, recipe: Recipe | None, problem: Problem, prepared: bool) -> Source:
    """Return what decides: an override, or what the store has."""
    if recipe is None:
        return store.source(problem, prepared=prepared)
    return fit(recipe, problem, store.device, prepared=prepared)


@lru_cache(maxsize=1 << 16)
def _chosen(problem: Problem, tokens: int, where: _Where) -> MoEConfig:
    return _steps(problem.with_tokens(0), where).choose(tokens)


@lru_cache(maxsize=1 << 12)
def _kinds(problem: Problem, tokens: int, where: _Where) -> tuple[tuple[int, str, int], ...]:
    most = _steps(problem.with_tokens(0), where).most_tokens(tokens)
    return tuple((limit, path, block_m) for (path, block_m), limit in most.items())
