"""Selection, explanation and overriding of the launch configuration of a call.

config = choose_config(problem, tokens)    # from an override, a tuned file or the heuristics
print(explain(problem, tokens))            # the configuration, its origin and the reason
with override_config(MoEConfig(...)):      # in this thread, inside the block
    ...
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from experts.triton.configs.files import TunedConfigs, configs_from_override, file_names_for
from experts.triton.configs.heuristics import ConfigSteps
from experts.triton.configs.lookup import (
    FIXED,
    PACKAGED,
    ConfigLookup,
    Source,
    fit_to_problem,
    nearest,
)
from experts.triton.configs.nearest import MIN_COMPUTE_BOUND_ROWS
from experts.triton.launch_config import Device, MoEConfig, arch_of_name
from experts.triton.paths import BASE, PATHS, external_paths
from modular_kernel.machine import current_machine
from modular_kernel.settings import read_settings
from modular_kernel.spec.problem import Problem
from modular_kernel.text import counted
from modular_kernel.utils.package_probes import version_of

_PACKAGED = Path(__file__).parent / "data"
_override: ContextVar[TunedConfigs | None] = ContextVar("config override", default=None)
_device: ContextVar[Device | None] = ContextVar("tile device", default=None)


def choose_config(
    problem: Problem,
    tokens: int,
    paths: tuple[str, ...] = (BASE.name,),
    *,
    prepared: bool = False,
) -> MoEConfig:
    """Return the configuration of a call of `tokens` tokens.

    tokens: tokens on this rank; in the batched format, the capacity C.
    paths: the paths that the caller supports. Where a file names another path, the heuristics are
        used.
    prepared: whether the call uses prepared weights.

    A gated GEMM 1 computes block_n gate columns and block_n up columns. Files are read in the first
    call; a repeated call takes about a microsecond. Raise ConfigurationError if a file or an
    override is malformed or cannot be launched for the problem.
    """
    return _cached_config(
        problem, tokens, _Context(_override.get(), _device.get(), paths, prepared)
    )


def buffer_kinds_up_to(
    problem: Problem,
    tokens: int,
    paths: tuple[str, ...] = (BASE.name,),
    *,
    prepared: bool = False,
) -> list[tuple[int, str, int]]:
    """Return the paths and block_m that calls of up to `tokens` tokens use.

    Each is given as (largest such call in tokens, path, block_m). If `prepared`, the calls have
    prepared weights.
    """
    return list(
        _cached_kinds(problem, tokens, _Context(_override.get(), _device.get(), paths, prepared))
    )


@contextmanager
def override_config(config: MoEConfig | Mapping[str, object] | None) -> Iterator[None]:
    """Use `config` instead of any file inside the block; None restores the lookup of files.

    `config` is a configuration, a mapping with the contents of a file (see `configs.files`), or one
    entry of it, which then applies to every token count. Blocks nest, and the previous state is
    restored on exit, also after an exception. The override applies to the current context only, not
    to other threads. Workspace sizes depend on it: build kernels and plans inside the same block in
    which they are called.
    """
    token = _override.set(None if config is None else configs_from_override(config))
    try:
        yield
    finally:
        _override.reset(token)


@contextmanager
def on_device(device: Device) -> Iterator[None]:
    """Inside the block, in this thread, choose configurations for `device`, which may be absent."""
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
    """Describe what a call of `tokens` tokens launches, its origin and the reason, in text lines.

    device_name: the GPU to choose for; None means this machine's.
    paths: the paths that the caller supports on that GPU.
    prepared: whether the call uses prepared weights.

    Weights and tokens are assumed to have the strides that the checkpoint readers produce.
    """
    lookup = current_lookup()
    override = _override.get()
    notes: list[str] = []
    if device_name is not None:
        lookup = replace(lookup, device=Device.named(device_name))
        if arch_of_name(device_name) is None:
            limit = f"{lookup.device.shared} bytes of shared memory for a block"
            notes = [f"{device_name} is not known by name: assuming {limit}"]
    source = _source(lookup, override, problem, prepared)
    from_file = source.steps.choose(tokens)
    unprepared = source.launch_steps(problem, lookup.device, paths).choose(tokens)
    config = source.launch_steps(problem, lookup.device, paths, prepared=prepared).choose(tokens)
    call_label = f"{counted(tokens, 'token')}{', prepared weights' if prepared else ''}"
    reason = _reason(source, problem, tokens, unprepared)
    if prepared and not source.prepared and config != unprepared:
        reason = f"heuristics of prepared weights, in place of {reason}"
    lines = [
        f"{problem.with_tokens(tokens)}, {call_label}, on {lookup.device.name or 'no GPU'}",
        f"  from {reason}",
        *(
            [f"  the file's launch is not used: {from_file}"]
            if from_file.path != unprepared.path
            else []
        ),
        f"  path: {config.path}",
        f"  GEMM 1: {config.gemm1}{' (gate, and as many up columns)' if problem.act.gated else ''}",
        f"  GEMM 2: {config.gemm2}",
        *_external_lines(problem, lookup.device, paths),
        *(
            f"  note: {note}"
            for note in (*notes, *_adapter_notes(problem, lookup.device), *source.notes)
        ),
        *(f"  looked in {location}" for location in source.searched_locations),
    ]
    if source.origin in ("heuristics", "nearest") or (prepared and not source.prepared):
        device_label = lookup.device.name
        file_name = (
            file_names_for(problem, device_label, prepared=prepared)[0] if device_label else ""
        )
        command = "mk tune --prepared" if prepared else "mk tune"
        tuning_hint = (
            f"`{command}` writes one: {file_name}" if file_name else "tuned files are for a GPU"
        )
        lines.append(f"  no tuned file{' of prepared weights' if prepared else ''}; {tuning_hint}")
    return "\n".join(lines)


def _external_lines(problem: Problem, device: Device, paths: tuple[str, ...]) -> Iterator[str]:
    """Yield a line for each path of another package: usable for `problem`, not for it, or broken.

    Yield none if `paths`, which the caller supports, has only the base path.
    """
    if paths == (BASE.name,):
        return
    external = external_paths()
    for path, origin in ((offered.path, offered.origin) for offered in external.usable):
        if path.name in paths:
            bounds = f"{path.min_tokens(problem)} to {path.max_tokens(problem) or 'any'} tokens"
            yield f"  path of another package: {path.name} from {origin}, untuned for {bounds}"
        elif not path.supports(problem, device):
            yield f"  path of another package: {path.name} from {origin}, not for this problem"
    for broken in external.broken:
        yield f"  path of another package, not used: {broken.name} from {broken.origin}"


def _adapter_notes(problem: Problem, device: Device) -> Iterator[str]:
    """Yield a note that names the paths that only calls without adapters can take."""
    if problem.adapters is None:
        return
    without_lora = replace(problem, lora="none")
    missing = [
        p.name
        for p in PATHS
        if p.supports(without_lora, device) and not p.supports(problem, device)
    ]
    if missing:
        yield f"calls with adapters do not take the paths {', '.join(missing)}; calls without do"


def _reason(source: Source, problem: Problem, tokens: int, launched_config: MoEConfig) -> str:
    lender = source.step_origins[source.steps.index(tokens)] if source.step_origins else ""
    if lender == "heuristics":
        return "heuristics: no tuned layer is close enough"
    if lender:
        rows = tokens * problem.top_k / problem.experts
        if rows > MIN_COMPUTE_BOUND_ROWS and launched_config != source.steps.choose(tokens):
            return f"heuristics: {rows:.4g} rows an expert are not for the launches of {lender}"
        return f"the nearest layer with a file: {lender}"
    if source.origin == FIXED:
        return FIXED
    if not source.keys:
        rows = tokens * problem.top_k / problem.experts
        step = source.steps.index(tokens) + 1
        return f"heuristic {step} of {len(source.steps.last_tokens)}: {rows:.4g} rows an expert"
    key, keys = nearest(source.keys, tokens), ", ".join(map(str, source.keys))
    if len(source.keys) == len(source.steps.last_tokens):
        tuned_tokens = source.keys[source.steps.index(tokens)]
        if tuned_tokens != key:
            return f"{source.origin}: tokens {tuned_tokens} of {keys}, because {key} is for fewer"
    return f"{source.origin}: tokens {key} is the nearest of {keys}"


def clear_caches() -> None:
    """Clear all cached choices, files and machine properties.

    `mk tune` calls this after it has written a file.
    """
    for function in (_cached_config, _cached_kinds, _steps, _machine_lookup):
        function.cache_clear()


def is_overridden() -> bool:
    """Return whether an `override_config` is active."""
    return _override.get() is not None


def is_context_active() -> bool:
    """Return whether an `override_config` or an `on_device` is active."""
    return _override.get() is not None or _device.get() is not None


def current_lookup() -> ConfigLookup:
    """Return the lookup for this machine, or for the GPU of an active `on_device`."""
    lookup, device = _machine_lookup(), _device.get()
    return lookup if device is None else replace(lookup, device=device)


@cache
def _machine_lookup() -> ConfigLookup:
    """Build the lookup for this machine, assuming that all its GPUs are like the first."""
    user_folder = read_settings().config_dir
    folders = (
        ((PACKAGED, _PACKAGED),)
        if user_folder is None
        else (("user", user_folder), (PACKAGED, _PACKAGED))
    )
    return ConfigLookup(folders, Device.of(current_machine()), triton_version())


def triton_version() -> str | None:
    """Return the version of the installed Triton without importing it."""
    return version_of("triton")


class _Context(NamedTuple):
    """Cache key: everything that determines a configuration, except problem and tokens."""

    override: TunedConfigs | None
    device: Device | None  # of `on_device`
    paths: tuple[str, ...]
    prepared: bool


@lru_cache(maxsize=1 << 10)
def _steps(problem: Problem, context: _Context) -> ConfigSteps:
    """Return the configurations for `problem`.

    Its `tokens` must be 0, so that all calls of a layer share a cache entry.
    """
    lookup, prepared = current_lookup(), context.prepared
    source = _source(lookup, context.override, problem, prepared)
    return source.launch_steps(problem, lookup.device, context.paths, prepared=prepared)


def _source(
    lookup: ConfigLookup, override: TunedConfigs | None, problem: Problem, prepared: bool
) -> Source:
    """Return the source of configurations: the override, or the result of the file lookup."""
    if override is None:
        return lookup.source(problem, prepared=prepared)
    return fit_to_problem(override, problem, lookup.device, prepared=prepared)


@lru_cache(maxsize=1 << 16)
def _cached_config(problem: Problem, tokens: int, context: _Context) -> MoEConfig:
    return _steps(problem.with_tokens(0), context).choose(tokens)


@lru_cache(maxsize=1 << 12)
def _cached_kinds(
    problem: Problem, tokens: int, context: _Context
) -> tuple[tuple[int, str, int], ...]:
    limits = _steps(problem.with_tokens(0), context).max_tokens(tokens)
    return tuple((limit, path, block_m) for (path, block_m), limit in limits.items())
