"""`mk list --engine` and `mk test --engine`: lists and tests the experts classes of an engine.

Both load the engine only in worker processes (`modular_kernel.testing.engines`).
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from modular_kernel.cli import output
from modular_kernel.cli.command import POSITIVE, option
from modular_kernel.cli.machine_setup import limit_workers
from modular_kernel.cli.options import AsJson, ProblemOptions
from modular_kernel.settings import update_environment
from modular_kernel.text import format_count

if TYPE_CHECKING:
    from modular_kernel.integrations.engine import Description, Engine
    from modular_kernel.testing.engines.cases import Level
    from modular_kernel.testing.engines.processes import EngineProgram, Result, TimeLimits
    from modular_kernel.testing.engines.rows import Row

EngineName = Annotated[
    Literal["vllm", "sglang"] | None,
    option("Use the experts classes of this engine instead of our parts."),
]
# Engine -> the module with `load_engine` and `make_environment`.
_MODULES = {
    "vllm": "modular_kernel.integrations.vllm.classes",
    "sglang": "modular_kernel.integrations.sglang.classes",
}
# More processes would use more GPU memory, but would hardly save time.
_MAX_GPU_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of `mk test --engine`."""

    engine: EngineName = None
    first_call_limit: Annotated[
        float,
        option(
            "With --engine: time limit of the first call of a case, including compilation, in "
            "seconds.",
            type=POSITIVE,
        ),
    ] = 180.0
    call_limit: Annotated[
        float, option("With --engine: time limit of other calls, in seconds.", type=POSITIVE)
    ] = 20.0
    time_limit: Annotated[
        float | None,
        option(
            "With --engine: start no case after this many seconds.  [default: none]", type=POSITIVE
        ),
    ] = None


def list_engine(engine: str, as_json: AsJson) -> None:
    """Print the experts classes of an engine."""
    description = _load_description(_make_program(engine))
    output.print_result(description, as_json, lambda: _print_classes(description))


def _make_program(engine: str) -> "EngineProgram":
    from importlib import import_module

    import torch

    from modular_kernel.testing.engines.processes import EngineProgram

    module = _MODULES[engine]
    environment = import_module(module).make_environment(has_gpu=torch.cuda.is_available())
    return EngineProgram(module, environment)


def load_engine(engine: str) -> "Engine":
    """Load an engine in this process, with the environment that its worker processes use."""
    from importlib import import_module

    import torch

    module = import_module(_MODULES[engine])
    update_environment(module.make_environment(has_gpu=torch.cuda.is_available()))
    serving_engine: Engine = module.load_engine()
    return serving_engine


def _load_description(program: "EngineProgram") -> "Description":
    from modular_kernel.testing.engines.processes import TimeLimits, describe_engine

    with output.show_activity(lambda: "loading the engine"):
        return describe_engine(program, TimeLimits())


def _print_classes(description: "Description") -> None:
    _print_heading(description)
    rows = [
        (c.name, c.format, ", ".join(c.schemes) or "none of ours")
        for c in description.classes
        if not c.unavailable
    ]
    output.print_table(("class", "format", "quantization schemes"), rows)
    _print_unavailable(description)


def _print_heading(description: "Description") -> None:
    output.print_line(
        f"{description.engine} {description.version} on {description.device_name}: "
        f"experts classes: {len(description.classes)}"
    )
    for note in description.notes:
        output.print_line(f"note: {note}")


def _print_unavailable(description: "Description") -> None:
    """Print the classes that cannot run on this machine, by reason."""
    by_reason: dict[str, list[str]] = {}
    for experts in description.classes:
        if experts.unavailable:
            by_reason.setdefault(experts.unavailable, []).append(experts.name)
    for reason, names in by_reason.items():
        output.print_line(f"not judged, {reason}: {', '.join(names)}")


def judge_engine(
    options: EngineOptions,
    problem_options: ProblemOptions,
    experts: str | None,
    level: "Level",
    workers: int | None,
    as_json: AsJson,
) -> bool:
    """Judge the experts classes of an engine, print the results, and return whether all pass.

    Refused combinations and classes that cannot run on this machine are not counted. The result is
    False if no call is judged, or if some calls are not run.
    """
    from modular_kernel.testing.engines.cases import Selection, select_cases
    from modular_kernel.testing.engines.processes import TimeLimits

    assert options.engine is not None
    model = None if problem_options.model is None else problem_options.problem()
    program = _make_program(options.engine)
    description = _load_description(program)
    selection = Selection(level, experts, problem_options.quant, model)
    cases = select_cases(description, selection)
    limits = TimeLimits(
        first_call=options.first_call_limit, call=options.call_limit, total=options.time_limit
    )
    workers = limit_workers(workers) if workers is not None else _count_workers(description)
    results = _run_cases(cases, program, limits, workers)
    rows = _make_rows(results, program, limits, workers)
    failures = {"wrong", "crashed", "timeout"}
    incomplete = _explain_incomplete(results)
    ok = not incomplete and not any(row.kind in failures for row in rows)
    if experts is not None:
        selected_classes = tuple(c for c in description.classes if c.name == experts)
        description = replace(description, classes=selected_classes)
    record = {
        "ok": ok,
        "incomplete": incomplete,
        "engine": description,
        "level": level,
        "counts": Counter(row.kind for row in rows),
        "rows": [row.make_record() for row in rows],
    }
    output.print_result(record, as_json, lambda: _print_rows(description, rows, incomplete))
    return ok


def _explain_incomplete(results: "Iterable[Result]") -> str:
    """Return why the results do not suffice for a verdict, or "" if they do."""
    from modular_kernel.integrations.engine import Kind

    outcomes = [outcome for _, outcome in results]
    if num_skipped := sum(not outcome.was_run for outcome in outcomes):
        were = "was" if num_skipped == 1 else "were"
        return f"{format_count(num_skipped, 'call')} {were} not run"
    if not any(outcome.kind in (Kind.RIGHT, Kind.WRONG) for outcome in outcomes):
        return "no call was judged right or wrong"
    return ""


def _count_workers(description: "Description") -> int:
    cpus = len(os.sched_getaffinity(0))
    return min(cpus, _MAX_GPU_WORKERS) if description.device == "cuda" else cpus


def _run_cases(
    cases: "Sequence[object]", program: "EngineProgram", limits: "TimeLimits", workers: int
) -> "list[Result]":
    """Return the results in the order of the cases."""
    from modular_kernel.testing.engines.processes import run_cases

    index_by_case = {case: index for index, case in enumerate(cases)}
    results = []
    with output.show_progress(len(cases), "cases") as advance:
        for result in run_cases(list(index_by_case), program, limits, workers):  # type: ignore[arg-type]
            results.append(result)
            advance()
    return sorted(results, key=lambda result: index_by_case[result[0]])


def _make_rows(
    results: "Iterable[Result]", program: "EngineProgram", limits: "TimeLimits", workers: int
) -> "list[Row]":
    """Return the rows, and run the reproducer of the largest error of each class and scheme."""
    from concurrent.futures import ThreadPoolExecutor

    from modular_kernel.testing.engines.processes import run_reproducer
    from modular_kernel.testing.engines.rows import make_rows

    rows, timeout = make_rows(results), limits.first_call + limits.setup
    index_by_scheme: dict[tuple[str, str], int] = {}
    for index in sorted(range(len(rows)), key=lambda n: -(rows[n].worst_ratio or 0.0)):
        row = rows[index]
        if row.reproducer:
            index_by_scheme.setdefault((row.case.experts, row.case.problem.quant), index)

    def reproduce(index: int) -> None:
        status, last_line = run_reproducer(program, rows[index].reproducer, timeout)
        is_reproduced = status == 1 and last_line.startswith("relative RMS error")
        result = last_line if is_reproduced else f"not shown, exit status {status}: {last_line}"
        if status == 0:
            result = "not shown, its error is within the bound"
        rows[index] = replace(rows[index], reproduced=result)

    with output.show_activity(lambda: "running reproducers"), ThreadPoolExecutor(workers) as pool:
        list(pool.map(reproduce, index_by_scheme.values()))
    return rows


def _print_rows(description: "Description", rows: "Sequence[Row]", incomplete: str) -> None:
    from modular_kernel.integrations.engine import Kind

    _print_heading(description)
    judged = [row for row in rows if row.kind not in (Kind.REFUSED, Kind.UNAVAILABLE)]
    columns = ("class", "scheme", "dtype", "activations", "outcome", "calls", "error", "promises")
    groups = _merge_activations(judged)
    output.print_table(columns, [_format_rows(group) for group in groups], optional=("dtype",))
    if judged:
        output.print_line(
            "error: largest ratio of the error to its bound; promises: the promises of our parts "
            "that the class breaks, although its results may be right"
        )
    for row in judged:
        if row.kind is not Kind.RIGHT:
            _print_failure(row)
    _print_reasons(rows, Kind.REFUSED)
    _print_reasons(rows, Kind.UNAVAILABLE)
    _print_unavailable(description)
    _print_reproducers(judged)
    counts = Counter(row.kind for row in rows)
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in Kind if counts[kind])
    output.print_line(f"{len(rows)} combinations: {summary or 'none'}")
    if incomplete:
        output.print_line(f"incomplete: {incomplete}")


def _merge_activations(rows: "Iterable[Row]") -> "list[list[Row]]":
    """Group rows that differ only in the activation."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        problem = row.case.problem
        key = row.case.experts, problem.quant, row.dtype, problem.bias, row.kind
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _format_rows(rows: "Sequence[Row]") -> tuple[object, ...]:
    """Format a table row for combinations that differ only in the activation."""
    from modular_kernel.integrations.engine import Kind

    case, ratios = rows[0].case, [row.worst_ratio for row in rows if row.worst_ratio is not None]
    promises = [(p, outcome) for row in rows for p, outcome in row.promises.items()]
    broken = [str(promise) for promise, outcome in promises if outcome.kind is not Kind.RIGHT]
    calls = sum(len(row.numbers) for row in rows)
    return (
        case.experts,
        case.problem.quant,
        rows[0].dtype,
        ", ".join(row.case.activation for row in rows) + (" + biases" if case.problem.bias else ""),
        rows[0].kind,
        calls,
        f"{max(ratios):.2f}" if ratios else "-",
        ", ".join(broken) if broken else ("all kept" if promises else "-"),
    )


def _print_failure(row: "Row") -> None:
    problem, failures = row.case.problem, row.select(row.kind)
    biases = " with biases" if problem.bias else ""
    name = f"{row.case.experts}, {problem.quant}, {row.case.activation}{biases}, {row.dtype}"
    output.print_line(f"{row.kind}: {name}, in {len(failures)} of {len(row.numbers)} calls")
    for case, outcome in failures[:3]:
        output.print_line(f"    {case.shape}: {outcome.detail}")
    if row.reproduced:
        output.print_line(f"    reproducer: {row.reproduced}")


def _print_reasons(rows: "Iterable[Row]", kind: object) -> None:
    """Print the reasons of refused combinations, or of those that cannot run on this machine."""
    by_reason: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.kind is kind:
            by_reason.setdefault((row.case.experts, row.details[0]), []).append(row)
    for (experts, reason), group in by_reason.items():
        schemes = dict.fromkeys(row.case.problem.quant for row in group)
        count = format_count(len(group), "combination")
        output.print_line(f"{kind}: {experts}, {count} ({', '.join(schemes)}): {reason}")


def _print_reproducers(rows: "Iterable[Row]") -> None:
    """Print the reproducers that were run. The JSON record has all of them."""
    for row in rows:
        if row.reproduced:
            print(f"\n{row.reproducer}")  # not wrapped: it is a program
