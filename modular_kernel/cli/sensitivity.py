"""`mk test --sensitivity`: every defect put into every pairing, and the check that finds it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modular_kernel.cli import output
from modular_kernel.cli.ranks import Host
from modular_kernel.printable import counted

if TYPE_CHECKING:
    from modular_kernel.testing.mutants import Kill

Pair = tuple[str, str]


def run_sensitivity(pairs: Sequence[Pair], host: Host, *, as_json: str | None) -> bool:
    """Print one line for each defect in each pair; returns whether every one was noticed."""
    found: list[Kill] = []
    with output.progress(len(pairs)) as advance:
        for pair in pairs:
            found += host.sensitivity(*pair)
            advance()
    ok = bool(found) and all(kill.ok for kill in found)
    record = {"ok": ok, **host.facts, "mutants": [_record(kill) for kill in found]}
    output.answer(record, as_json, lambda: _print_text(found))
    return ok


def _record(kill: "Kill") -> dict[str, object]:
    return {
        "mutant": kill.mutant,
        "prepare_finalize": kill.case.prepare_finalize,
        "experts": kill.case.experts,
        "case": str(kill.case),
        "ok": kill.ok,
        "unsound": kill.unsound,
        "killed_by": kill.killed_by,
    }


def _print_text(found: "Sequence[Kill]") -> None:
    groups: dict[Pair, list[Kill]] = {}
    for kill in found:
        key = (kill.mutant, f"{kill.case.prepare_finalize} x {kill.case.experts}")
        groups.setdefault(key, []).append(kill)
    rows = [(*key, len(kills), _checks(kills), _fate(kills)) for key, kills in groups.items()]
    columns = ("defect", "pairing", "cases", "found by", "verdict")
    output.table(columns, rows)
    for kill in found:
        if not kill.ok:
            output.line(str(kill))
    missed = sum(not kill.ok for kill in found)
    output.line(
        f"{counted(len(found), 'defect')} put in: {len(found) - missed} found, {missed} not"
    )


def _checks(kills: "Sequence[Kill]") -> str:
    names = [kill.killed_by.partition(":")[0] for kill in kills if kill.killed_by is not None]
    return ", ".join(dict.fromkeys(names))


def _fate(kills: "Sequence[Kill]") -> str:
    if any(kill.unsound is not None for kill in kills):
        return "fails without it"
    return "found" if all(kill.ok for kill in kills) else "MISSED"
