"""Check the ledger: a checked-in list of pairings that must pass, with a minimum number of cases.

A pairing is a prepare/finalize class with an experts class. Test cases are generated, and cases
that the compatibility rules refuse are left out. If a rule refuses too much, cases disappear and
the suite still passes. The ledger detects this. Each line names a kind of machine, a pairing, and
how many cases the pairing must pass there.

    # machine         prepare_finalize            experts         cases
    cpu               MoEPrepareAndFinalizeNoEP   TorchExperts    100
    cpu:2             TorchAll2AllPrepareAndFinalize   TorchExperts   10     # two ranks
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.verify.one_process import Proof

MACHINE_KINDS = ("cpu", "cpu-interpreter", "cuda")


@dataclass(frozen=True)
class LedgerEntry:
    """One line of the ledger: the minimum number of cases that a pairing must pass.

    machine: one of MACHINE_KINDS, with ":ranks" appended for several ranks.
    """

    machine: str
    prepare_finalize: str
    experts: str
    cases: int

    @property
    def pairing(self) -> tuple[str, str]:
        return self.prepare_finalize, self.experts


def machine_kind(machine: Machine, world_size: int = 1) -> str:
    """Return one of MACHINE_KINDS, with ":ranks" appended for more than one rank."""
    kind = "cuda"
    if machine.device != "cuda":
        kind = "cpu-interpreter" if machine.interpreter else "cpu"
    return kind if world_size == 1 else f"{kind}:{world_size}"


def parse_ledger(text: str) -> tuple[LedgerEntry, ...]:
    """Parse the ledger's text, in which `#` starts a comment.

    Raise ConfigurationError on a malformed line.
    """
    entries = []
    for line_number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        if len(fields) != 4 or not _is_machine_kind(fields[0]) or not fields[3].isdecimal():
            names = ", ".join(MACHINE_KINDS)
            kinds = f"MACHINE one of {names}, or with ranks such as {MACHINE_KINDS[0]}:2"
            need = f"MACHINE PREPARE_FINALIZE EXPERTS CASES, {kinds}"
            raise ConfigurationError(f"ledger line {line_number}", got=line.strip(), need=need)
        entries.append(LedgerEntry(fields[0], fields[1], fields[2], int(fields[3])))
    return tuple(entries)


def _is_machine_kind(text: str) -> bool:
    kind, colon, ranks = text.partition(":")
    return kind in MACHINE_KINDS and (not colon or (ranks.isdecimal() and int(ranks) > 1))


def read_ledger(path: Path) -> tuple[LedgerEntry, ...]:
    """Read a ledger file; raise ConfigurationError on a malformed line."""
    return parse_ledger(path.read_text(encoding="utf-8"))


def list_unmet_entries(
    ledger: Iterable[LedgerEntry], counts: Counter[tuple[str, str]], kind: str
) -> tuple[str, ...]:
    """Return a message for each pairing with fewer cases in `counts` than the ledger requires.

    Only ledger lines for machines of `kind` apply. A pairing that has cases but no line in the
    ledger is also reported, because nobody would notice if its cases disappeared.
    """
    entries = [entry for entry in ledger if entry.machine == kind]
    too_few = [
        f"{kind}: {' x '.join(e.pairing)}: {counts[e.pairing]} cases, need {e.cases}"
        for e in entries
        if counts[e.pairing] < e.cases
    ]
    listed = {entry.pairing for entry in entries}
    unlisted = [
        f"{kind}: {' x '.join(pairing)}: {count} cases, but no line in the ledger"
        for pairing, count in counts.items()
        if count and pairing not in listed
    ]
    return (*too_few, *unlisted)


def check_proofs(ledger: Iterable[LedgerEntry], proofs: Iterable[Proof]) -> tuple[str, ...]:
    """Return a message for each line of the ledger that the passed proofs do not satisfy.

    Only the kinds of machines that occur in `proofs` are checked.
    """
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for proof in proofs:
        world_size = proof.case.problem.parallel.world_size
        counter = counts.setdefault(machine_kind(proof.machine, world_size), Counter())
        if proof.passed:
            counter[proof.case.prepare_finalize, proof.case.experts] += 1
    ledger = tuple(ledger)
    return tuple(
        message
        for kind, counter in counts.items()
        for message in list_unmet_entries(ledger, counter, kind)
    )
