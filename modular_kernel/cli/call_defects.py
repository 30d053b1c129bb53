"""Input and output mutations of parts: the first half of `mk test --mutate`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modular_kernel.cli import output
from modular_kernel.cli.ranks import Host
from modular_kernel.text import counted

if TYPE_CHECKING:
    from modular_kernel.testing.input_mutations.run import Kill

Pair = tuple[str, str]


def run_input_mutations(pairs: Sequence[Pair], host: Host) -> "list[Kill]":
    """Run every input and output mutation on every pair and return which check killed each."""
    kills: list[Kill] = []
    with output.progress(len(pairs), "pairs") as advance:
        for pair in pairs:
            kills += host.sensitivity(*pair)
            advance()
    return kills


def record_of_kill(kill: "Kill") -> dict[str, object]:
    return {
        "mutant": kill.mutant,
        "prepare_finalize": kill.case.prepare_finalize,
        "experts": kill.case.experts,
        "case": str(kill.case),
        "ok": kill.ok,
        "unsound": kill.unsound,
        "killed_by": kill.killed_by,
        "changes_nothing": kill.nothing,
    }


def print_kills(found: "Sequence[Kill]") -> None:
    """Print a table row for each mutation of each pair, then the mutants that were not killed."""
    groups: dict[Pair, list[Kill]] = {}
    for kill in found:
        key = (kill.mutant, f"{kill.case.prepare_finalize} x {kill.case.experts}")
        groups.setdefault(key, []).append(kill)
    rows = [
        (*key, len(kills), _checks(kills), _make_outcome(kills)) for key, kills in groups.items()
    ]
    columns = ("defect", "pairing", "cases", "found by", "verdict")
    output.table(columns, rows)
    for kill in found:
        if not kill.ok or kill.nothing:
            output.line(str(kill))
    missed = sum(not kill.ok for kill in found)
    unused = sum(kill.ok and kill.nothing is not None for kill in found)
    output.line(
        f"{counted(len(found), 'defect')} put into calls: {len(found) - missed - unused} found, "
        f"{missed} not{f', {unused} not applicable' if unused else ''}"
    )


def _checks(kills: "Sequence[Kill]") -> str:
    names = [kill.killed_by.partition(":")[0] for kill in kills if kill.killed_by is not None]
    return ", ".join(dict.fromkeys(names))


def _make_outcome(kills: "Sequence[Kill]") -> str:
    if any(kill.unsound is not None for kill in kills):
        return "fails without the mutation"
    if not all(kill.ok for kill in kills):
        return "MISSED"
    return "found" if any(kill.killed_by for kill in kills) else "not applicable"
