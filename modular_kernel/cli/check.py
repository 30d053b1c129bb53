"""`mk check`: can this pair serve this problem on that machine, and if not, why?"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from modular_kernel.cli import output
from modular_kernel.cli.host import chosen_machine
from modular_kernel.cli.options import AsJson, ExpertsType, PfType, ProblemOptions

if TYPE_CHECKING:
    from modular_kernel.catalog import Catalog
    from modular_kernel.support import Verdict
    from modular_kernel.types import Machine, Problem


def check(
    *,
    options: ProblemOptions,
    pf_type: PfType = None,
    experts_type: ExpertsType = None,
    arch: Annotated[
        str | None, typer.Option(help="Judge for a GPU of this compute capability, such as 9.0.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Judge for a machine with this device: cuda or cpu.")
    ] = None,
    packages: Annotated[
        str | None,
        typer.Option(help="Judge for a machine with these packages only: deep_ep,triton."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Judge one pair, or every pair, for a problem: on this machine or on one described.

    Exits with 0 if the pair is valid (or, without a pair, if some pair is), with 1 if it is
    refused, with every reason, and with 2 on bad usage.
    """
    problem = options.problem()
    machine = chosen_machine(arch, device, packages)
    from modular_kernel.catalog import load_catalog

    catalog = load_catalog()
    verdicts = judged(catalog, pf_type, experts_type, problem, machine)
    single = pf_type is not None and experts_type is not None
    if as_json:
        output.print_json(
            _record(verdicts[0]) if single else matrix_record(verdicts, problem, machine)
        )
    elif single:
        _print_verdict(verdicts[0])
    else:
        print_matrix(verdicts, problem, machine)
        for broken in catalog.broken:
            output.note(f"not judged: {broken.name} from {broken.origin}: {broken.error}")
        for name, origins in catalog.duplicates().items():
            output.note(f"not judged: {name}, claimed by {' and '.join(origins)}")
    if not any(verdict.ok for verdict in verdicts):
        raise typer.Exit(1)


def judged(
    catalog: "Catalog",
    pf_type: str | None,
    experts_type: str | None,
    problem: "Problem",
    machine: "Machine",
) -> "list[Verdict]":
    """Verdicts on every pair that the two names, where given, leave; of several ranks the first
    that is refused, or rank 0's."""
    from modular_kernel.rules import judge

    ranks = range(problem.parallel.world_size)
    problems = [replace(problem, parallel=replace(problem.parallel, rank=r)) for r in ranks]
    pf_names = [pf_type] if pf_type is not None else catalog.names("prepare_finalize")
    experts_names = [experts_type] if experts_type is not None else catalog.names("experts")
    pfs = [catalog.prepare_finalize(name) for name in pf_names]
    experts = [catalog.experts(name) for name in experts_names]
    found = []
    for pf in pfs:
        for ex in experts:
            verdicts = [judge(pf, ex, of_rank, machine) for of_rank in problems]
            found.append(next((verdict for verdict in verdicts if not verdict.ok), verdicts[0]))
    return found


def _record(verdict: "Verdict") -> dict[str, object]:
    return {
        "prepare_finalize": verdict.prepare_finalize,
        "experts": verdict.experts,
        "ok": verdict.ok,
        "rejections": verdict.rejections,
        "problem": verdict.problem,
        "machine": verdict.machine,
    }


def matrix_record(
    verdicts: "list[Verdict]", problem: "Problem", machine: "Machine"
) -> dict[str, object]:
    pairs = []
    for verdict in verdicts:
        record = _record(verdict)
        pairs.append({key: record[key] for key in record if key not in ("problem", "machine")})
    return {"problem": problem, "machine": machine, "pairs": pairs}


def _print_verdict(verdict: "Verdict") -> None:
    where = f"{verdict.problem} on {verdict.machine}"
    if verdict.ok:
        output.line(f"{verdict.pairing}: valid for {where}")
        return
    count = len(verdict.rejections)
    output.line(f"{verdict.pairing}: refused for {where}, {count} reason(s)")
    output.rejections(verdict.rejections)


def print_matrix(verdicts: "list[Verdict]", problem: "Problem", machine: "Machine") -> None:
    valid = sum(verdict.ok for verdict in verdicts)
    output.line(f"{problem} on {machine}: {valid} of {len(verdicts)} pairs are valid")
    rows = [
        (
            verdict.prepare_finalize,
            verdict.experts,
            "valid" if verdict.ok else "refused",
            ", ".join(dict.fromkeys(r.rule for r in verdict.rejections)),
        )
        for verdict in verdicts
    ]
    output.table(("prepare_finalize", "experts", "verdict", "rules violated"), rows)
    if valid < len(verdicts):
        output.line("Every reason of one pair: mk check --pf-type X --experts-type Y")
