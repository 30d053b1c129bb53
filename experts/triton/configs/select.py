"""Select, explain or override the launch configuration of a call.

    config = choose_config(problem, tokens)    # from an override, a tuned file or the defaults
    print(explain(problem, tokens))            # the configuration, its origin and the reason
    with override_config(MoEConfig(...)):      # in this thread, inside the block
        ...

A configuration is the path of TritonExperts that runs a call, with the launches of both GEMMs.
Prepared weights come with a copy in a layout that some paths read faster.
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
    nearest_count,
)
from experts.triton.configs.nearest import MIN_COMPUTE_BOUND_ROWS, depends_on_skew
from experts.triton.launch_config import Device, MoEConfig, find_arch
from experts.triton.paths import ALL_PATHS, BASE_PATH, external_paths
from modular_kernel.machine import current_machine
from modular_kernel.settings import read_settings
from modular_kernel.spec.problem import Problem
from modular_kernel.text import format_count, format_span, pluralize
from modular_kernel.utils.package_probes import installed_version

_PACKAGED_FOLDER = Path(__file__).parent / "data"
_override: ContextVar[TunedConfigs | None] = ContextVar("config override", default=None)
_device: ContextVar[Device | None] = ContextVar("config device", default=None)


def choose_config(
    problem: Problem,
    tokens: int,
    paths: tuple[str, ...] = (BASE_PATH.name,),
    *,
    prepared: bool = False,
) -> MoEConfig:
    """Return the configuration of a call.

    tokens: the number of tokens of the call on this rank; in the batched format, the number of rows
        per expert.
    paths: names of the paths that the caller supports. If a file names another path, the heuristics
        are used instead.
    prepared: whether the call uses prepared weights.

    Files are read at the first call for a problem; a repeated call takes about a microsecond. Raise
    ConfigurationError if a file or an override is malformed or cannot be launched for the problem.
    """
    return _get_cached_config(
        problem, tokens, _Context(_override.get(), _device.get(), paths, prepared)
    )


def buffer_kinds_up_to(
    problem: Problem,
    tokens: int,
    paths: tuple[str, ...] = (BASE_PATH.name,),
    *,
    prepared: bool = False,
) -> list[tuple[int, str, int]]:
    """Return the combinations of path and block_m that calls of up to `tokens` tokens use.

    The combination determines the buffers of a call. An element of the result is (tokens, path,
    block_m), where `tokens` is the largest number of tokens of a call that uses the combination.

    paths: names of the paths that the caller supports.
    prepared: whether the calls use prepared weights.
    """
    return list(
        _get_cached_max_tokens(
            problem, tokens, _Context(_override.get(), _device.get(), paths, prepared)
        )
    )


@contextmanager
def override_config(config: MoEConfig | Mapping[str, object] | None) -> Iterator[None]:
    """Inside the block, use `config` instead of any file.

    Blocks can be nested. The previous state is restored on exit, even after an exception. The
    override applies to the current context only, not to other threads. Workspace sizes depend on
    the override, so kernels and plans must be built in the same block in which they are called.

    config: a configuration; a mapping with the contents of a file (see `configs.files`); or a
        single entry of such a mapping, which then applies to every token count. None ends an
        override of an enclosing block, so that files are used again.
    """
    token = _override.set(None if config is None else configs_from_override(config))
    try:
        yield
    finally:
        _override.reset(token)


@contextmanager
def on_device(device: Device) -> Iterator[None]:
    """Inside the block, choose configurations for `device`, which need not be in this machine.

    This applies to the current context only, not to other threads.
    """
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


def explain(
    problem: Problem,
    tokens: int,
    device_name: str | None = None,
    paths: tuple[str, ...] = (BASE_PATH.name,),
    *,
    prepared: bool = False,
) -> str:
    """Return lines of text that describe the configuration of a call, and why it was chosen.

    Weights and tokens are assumed to have the strides that the checkpoint readers produce, and
    prepared weights the scales that `quantize_weights` computes by default. With scales of another
    dtype, calls use prepared weights for other numbers of tokens.

    device_name: the GPU for which to choose; None for the GPU of this machine.
    paths: names of the paths that the caller supports on that GPU.
    prepared: whether the call uses prepared weights.
    """
    lookup = current_lookup()
    override = _override.get()
    notes: list[str] = []
    if device_name is not None:
        lookup = replace(lookup, device=Device.from_name(device_name))
        if find_arch(device_name) is None:
            limit = f"{lookup.device.shared} bytes of shared memory per block"
            notes = [f"{device_name} is not a known GPU; assuming {limit}"]
    source = _find_source(lookup, override, problem, prepared)
    config_in_file = source.steps.choose(tokens)
    unprepared_config = source.launch_steps(problem, lookup.device, paths).choose(tokens)
    config = source.launch_steps(problem, lookup.device, paths, prepared=prepared).choose(tokens)
    call_label = f"{format_count(tokens, 'token')}{', prepared weights' if prepared else ''}"
    reason = _describe_source(source, problem, tokens, unprepared_config)
    if prepared and not source.prepared and config != unprepared_config:
        reason = f"heuristics for prepared weights, in place of {reason}"
    lines = [
        f"{problem.with_tokens(tokens)}, {call_label}, on {lookup.device.name or 'no GPU'}",
        f"  from {reason}",
        *(
            [f"  the configuration in the file is not used: {config_in_file}"]
            if config_in_file.path != unprepared_config.path
            else []
        ),
        f"  path: {config.path}",
        f"  GEMM 1: {config.gemm1}{' (gate, and as many up columns)' if problem.act.gated else ''}",
        f"  GEMM 2: {config.gemm2}",
        *_describe_external_paths(problem, lookup.device, paths),
        *(
            f"  note: {note}"
            for note in (*notes, *_make_adapter_notes(problem, lookup.device), *source.notes)
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
        lines.append(f"  no tuned file{' for prepared weights' if prepared else ''}; {tuning_hint}")
    return "\n".join(lines)


def _describe_external_paths(
    problem: Problem, device: Device, paths: tuple[str, ...]
) -> Iterator[str]:
    """Yield a line for each path of another package: its name, and whether `problem` can use it.

    Yield nothing if the caller supports only the base path.
    """
    if paths == (BASE_PATH.name,):
        return
    external = external_paths()
    for path, origin in ((usable.path, usable.origin) for usable in external.usable):
        if path.name in paths:
            bounds = format_span(path.min_tokens(problem), path.max_tokens(problem) or "any")
            tokens = f"{bounds} {pluralize('token', 1 if bounds == '1' else 0)}"
            yield f"  path of another package: {path.name} from {origin}, untuned for {tokens}"
        elif not path.supports(problem, device):
            yield f"  path of another package: {path.name} from {origin}, not for this problem"
    for broken in external.broken:
        yield f"  path of another package, not used: {broken.name} from {broken.origin}"


def _make_adapter_notes(problem: Problem, device: Device) -> Iterator[str]:
    """Yield a note if there are paths that only calls without adapters can take."""
    if problem.adapters is None:
        return
    without_lora = replace(problem, lora="none")
    excluded_paths = [
        path.name
        for path in ALL_PATHS
        if path.supports(without_lora, device) and not path.supports(problem, device)
    ]
    if excluded_paths:
        yield f"only calls without adapters take the paths {', '.join(excluded_paths)}"


def _format_rows(rows: float) -> str:
    """Format a mean number of rows: "1 row", "0.125 rows" or "16,384 rows"."""
    number = f"{rows:,.0f}" if rows >= 1000 else f"{rows:.4g}"
    return f"{number} {pluralize('row', 1 if number == '1' else 0)}"


def _describe_source(
    source: Source, problem: Problem, tokens: int, launched_config: MoEConfig
) -> str:
    """Describe where the configuration of a call of `tokens` tokens comes from."""
    tuned_layer = source.step_origins[source.steps.find_step(tokens)] if source.step_origins else ""
    rows = tokens * problem.top_k / problem.experts
    row_count = _format_rows(rows)
    if tuned_layer == "heuristics":
        return "heuristics: no tuned layer is close enough"
    if tuned_layer:
        if depends_on_skew(problem, tokens):
            reason = f"the launches of {tuned_layer} were tuned with uniform routing only"
            return f"heuristics: {rows:.4g} rows per expert, and {reason}"
        if rows > MIN_COMPUTE_BOUND_ROWS and launched_config != source.steps.choose(tokens):
            reason = f"the launches of {tuned_layer} are for other numbers of rows"
            return f"heuristics: {row_count} per expert, and {reason}"
        return f"the nearest layer with a file: {tuned_layer}"
    if source.origin == FIXED:
        return FIXED
    if not source.token_counts:
        step = source.steps.find_step(tokens) + 1
        return f"heuristic {step} of {len(source.steps.last_tokens)}: {row_count} per expert"
    nearest = nearest_count(source.token_counts, tokens)
    count_labels = ", ".join(map(str, source.token_counts))
    if len(source.token_counts) == len(source.steps.last_tokens):
        tuned_tokens = source.token_counts[source.steps.find_step(tokens)]
        if tuned_tokens != nearest:
            reason = f"the path tuned for {nearest} is only for fewer"
            return f"{source.origin}: tokens {tuned_tokens} of {count_labels}, because {reason}"
    return f"{source.origin}: tokens {nearest} is the nearest of {count_labels}"


def clear_caches() -> None:
    """Clear all cached configurations, files and machine properties.

    `mk tune` calls this function after it has written a file.
    """
    for function in (_get_cached_config, _get_cached_max_tokens, _find_steps, _make_machine_lookup):
        function.cache_clear()


def is_overridden() -> bool:
    """Return whether an `override_config` is active."""
    return _override.get() is not None


def is_context_active() -> bool:
    """Return whether an `override_config` or an `on_device` is active."""
    return _override.get() is not None or _device.get() is not None


def current_lookup() -> ConfigLookup:
    """Return the lookup for this machine, or for the GPU of an active `on_device`."""
    lookup, device = _make_machine_lookup(), _device.get()
    return lookup if device is None else replace(lookup, device=device)


@cache
def _make_machine_lookup() -> ConfigLookup:
    """Build the lookup for this machine, assuming that all of its GPUs are equal to the first."""
    user_folder = read_settings().config_dir
    folders = (
        ((PACKAGED, _PACKAGED_FOLDER),)
        if user_folder is None
        else (("user", user_folder), (PACKAGED, _PACKAGED_FOLDER))
    )
    return ConfigLookup(folders, Device.from_machine(current_machine()), triton_version())


def triton_version() -> str | None:
    """Return the version of the installed Triton without importing it."""
    return installed_version("triton")


class _Context(NamedTuple):
    """The part of a cache key that determines a configuration besides problem and tokens."""

    override: TunedConfigs | None
    device: Device | None  # the argument of an active `on_device`
    paths: tuple[str, ...]
    prepared: bool


@lru_cache(maxsize=1 << 10)
def _find_steps(problem: Problem, context: _Context) -> ConfigSteps:
    """Return the configurations for `problem`.

    problem.tokens must be 0, so that all calls of a layer share a cache entry.
    """
    lookup, prepared = current_lookup(), context.prepared
    source = _find_source(lookup, context.override, problem, prepared)
    return source.launch_steps(problem, lookup.device, context.paths, prepared=prepared)


def _find_source(
    lookup: ConfigLookup, override: TunedConfigs | None, problem: Problem, prepared: bool
) -> Source:
    """Return the source of configurations: the override or, without one, the result of `lookup`."""
    if override is None:
        return lookup.find_source(problem, prepared=prepared)
    return fit_to_problem(override, problem, lookup.device, prepared=prepared)


@lru_cache(maxsize=1 << 16)
def _get_cached_config(problem: Problem, tokens: int, context: _Context) -> MoEConfig:
    return _find_steps(problem.with_tokens(0), context).choose(tokens)


@lru_cache(maxsize=1 << 12)
def _get_cached_max_tokens(
    problem: Problem, tokens: int, context: _Context
) -> tuple[tuple[int, str, int], ...]:
    limits = _find_steps(problem.with_tokens(0), context).max_tokens_by_path_and_block(tokens)
    return tuple((limit, path, block_m) for (path, block_m), limit in limits.items())
