"""`mk compile`: compiles every Triton kernel ahead of time for a GPU, and checks the results.

The GPU does not need to be present.
"""

from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

from click.exceptions import Exit

from modular_kernel.cli import output
from modular_kernel.cli.command import IntegerRange, option
from modular_kernel.cli.machine_setup import limit_workers, parse_arch
from modular_kernel.cli.options import AsJson
from modular_kernel.errors import ConfigurationError
from modular_kernel.text import format_count

if TYPE_CHECKING:
    from modular_kernel.testing.compile.cases import CompiledRow, CompileResult


def compile_kernels(
    *,
    check: Annotated[
        bool,
        option(
            "Exit with 1 if a kernel exceeds a limit or is left out without a reason, or if "
            "none is compiled."
        ),
    ] = False,
    arch: Annotated[
        str, option("Compile for a GPU of this compute capability, such as 9.0 or sm_90.")
    ] = "9.0",
    only: Annotated[
        str, option("Compile only kernels and cases whose names contain this text.")
    ] = "",
    workers: Annotated[int, option("Number of worker processes.", type=IntegerRange(1))] = 1,
    as_json: AsJson = None,
) -> None:
    """Compile the kernels for a GPU and show registers, shared memory, spills and instructions.

    Compiles every kernel that the parts would launch on that GPU, and lists the kernels that were
    left out. A case is a call of a part, which may launch several kernels. With --check,
    instructions are counted only in kernels that must use a certain instruction.

    Compiling all kernels, or those of a part, takes minutes in one process. --only KERNEL takes
    seconds, and --workers N compiles in parallel.
    """
    target = "sm_{}{}".format(*parse_arch(arch))
    workers = limit_workers(workers)
    # The first import after installation is slow.
    with output.show_activity(lambda: "loading torch, triton and the parts"):
        kernels = _list_kernels()
        from modular_kernel.testing.compile.cases import compile_all

    output.print_note(_describe_job(kernels, target, only))
    report_progress = partial(
        output.show_progress, from_thread=True
    )  # one kernel may take many seconds
    compiled = compile_all(target, report_progress, workers=workers, name_filter=only)
    if not compiled.rows and not compiled.left_out:
        need = "part of the name of a kernel or a case, such as route_kernel or TritonExperts"
        raise ConfigurationError("--only", got=repr(only[:80]), need=need)
    rows = [_make_record(row) for row in compiled.rows]
    record = {"kernels": rows, "left_out": compiled.left_out, "only": only}
    output.print_result(record, as_json, lambda: _print_text(compiled, check=check, only=only))
    has_unexplained = any(not kernel.reason for kernel in compiled.left_out)
    if check and not compiled.rows:
        output.print_note(
            f"nothing was checked: no case compiles a kernel named {only!r} for {target}"
        )
    if check and (
        has_unexplained or not compiled.rows or any(row.violations for row in compiled.rows)
    ):
        raise Exit(1)


def _list_kernels() -> list[str]:
    """Return the names of all kernels. Raises ConfigurationError if triton is not installed."""
    from modular_kernel.machine import find_importable

    if not find_importable({"triton"}):
        raise ConfigurationError("mk compile", got="no triton", need="the package triton")
    from modular_kernel.testing.compile.kernels_defined import defined_kernels

    return list(defined_kernels())


def _describe_job(kernels: list[str], target: str, only: str) -> str:
    matching = [name for name in kernels if only in name]
    if not only:
        job = (
            f"{format_count(len(kernels), 'kernel')} for {target}, in every form that parts launch"
        )
        return f"{job}; takes minutes (faster: --only KERNEL, --workers N)"
    if matching:
        job = (
            f"{len(matching)} of "
            f"{format_count(len(kernels), 'kernel')} for {target} (named {only!r})"
        )
        return f"{job}, and all kernels of matching cases"
    return f"kernels of cases named {only!r} for {target}: may take minutes"


def _make_record(row: "CompiledRow") -> dict[str, object]:
    return {"case": row.case, "record": row.record, "violations": row.violations}


def _print_text(result: "CompileResult", *, check: bool, only: str) -> None:
    rows = result.rows
    counts = [_format_instructions(row, check=check) for row in rows]
    columns = ("case", "kernel", "config", "regs", "shared", "spills", "instructions", "verdict")
    cells = [_format_cells(*row) for row in zip(rows, counts, strict=True)]
    output.print_table(
        columns, cells, optional=("kernel", "spills", "shared", "config", "instructions")
    )
    violating_rows = [row for row in rows if row.violations]
    for row in violating_rows:
        output.print_line("\n".join(row.violations))
    left_out = [(k.kernel, k.module, k.reason or "no case launches it") for k in result.left_out]
    output.print_table(("left out", "module", "reason"), left_out)
    num_kernels = len({row.record.kernel for row in rows})
    compiled_forms = (
        f"{format_count(num_kernels, 'kernel')} compiled in {format_count(len(rows), 'form')}"
    )
    omitted = (
        f"only cases and kernels matching {only!r} were compiled"
        if only
        else f"{len(left_out)} left out"
    )
    output.print_line(
        f"triton {version('triton')}: {compiled_forms}, {len(violating_rows)} exceed "
        f"a limit; {omitted}"
    )


def _format_instructions(row: "CompiledRow", *, check: bool) -> str:
    """Format a kernel's instruction counts.

    --check counts instructions only in some kernels. The others show "not counted".
    """
    from modular_kernel.testing.compile.report import Instructions

    counts = row.record.instructions
    if check and isinstance(counts, Instructions) and not counts.is_counted:
        return "not counted"
    return ", ".join(f"{name} x{count}" for name, count in counts.items() if count) or "-"


def _format_cells(row: "CompiledRow", instructions: str) -> tuple[object, ...]:
    record = row.record
    config = ", ".join(f"{name}={value}" for name, value in record.config.items())
    launch = f"warps={record.num_warps}, stages={record.num_stages}"
    return (
        row.case,
        record.kernel,
        f"{config}, {launch}" if config else launch,
        record.registers,
        record.shared,
        record.stack + record.spill,
        instructions,
        "exceeds a limit" if row.violations else "ok",
    )
