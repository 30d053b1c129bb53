"""The checked-in promise: which pairings are proven, on which kind of machine, in how many cases.

A rule that refuses too much would make cases vanish and leave a suite green. The ledger notices:
it says, for each kind of machine, which pairings have to be proven and in how many cases at least.

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

KINDS = ("cpu", "cpu-interpreter", "cuda")


@dataclass(frozen=True)
class Promise:
    """One line: this pairing must be proven in at least `cases` cases on such machines."""

    machine: str
    prepare_finalize: str
    experts: str
    cases: int

    @property
    def pairing(self) -> tuple[str, str]:
        return self.prepare_finalize, self.experts


def machine_kind(machine: Machine, world_size: int = 1) -> str:
    """One of KINDS; of more than one rank "KIND:ranks"."""
    kind = "cuda"
    if machine.device != "cuda":
        kind = "cpu-interpreter" if machine.interpreter else "cpu"
    return kind if world_size == 1 else f"{kind}:{world_size}"


def parse_ledger(text: str) -> tuple[Promise, ...]:
    """Promises from the ledger's text; `#` starts a comment."""
    promises = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 4 or not _is_kind(words[0]) or not words[3].isdecimal():
            kinds = f"MACHINE one of {', '.join(KINDS)}, or with ranks such as {KINDS[0]}:2"
            need = f"MACHINE PREPARE_FINALIZE EXPERTS CASES, {kinds}"
            raise ConfigurationError(f"ledger line {number}", got=line.strip(), need=need)
        promises.append(Promise(words[0], words[1], words[2], int(words[3])))
    return tuple(promises)


def _is_kind(word: str) -> bool:
    kind, colon, ranks = word.partition(":")
    return kind in KINDS and (not colon or (ranks.isdecimal() and int(ranks) > 1))


def read_ledger(path: Path) -> tuple[Promise, ...]:
    """Promises from a file."""
    return parse_ledger(path.read_text(encoding="utf-8"))


def broken_promises(
    ledger: Iterable[Promise], counts: Counter[tuple[str, str]], kind: str
) -> tuple[str, ...]:
    """Return what the ledger demands for `kind` beyond `counts`, cases by pairing, one line each.

    A pairing that has cases and no line is reported too: it would go unguarded.
    """
    promises = [promise for promise in ledger if promise.machine == kind]
    short = [
        f"{kind}: {' x '.join(p.pairing)}: {counts[p.pairing]} cases, {p.cases} are promised"
        for p in promises
        if counts[p.pairing] < p.cases
    ]
    known = {promise.pairing for promise in promises}
    unguarded = [
        f"{kind}: {' x '.join(pairing)}: {count} cases and no line in the ledger"
        for pairing, count in counts.items()
        if count and pairing not in known
    ]
    return (*short, *unguarded)


def check_proofs(ledger: Iterable[Promise], proofs: Iterable[Proof]) -> tuple[str, ...]:
    """Return what the ledger demands beyond the cases that `proofs` proved, for each kind they ran
    on.
    """
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for proof in proofs:
        world_size = proof.case.problem.parallel.world_size
        counter = counts.setdefault(machine_kind(proof.machine, world_size), Counter())
        if proof.passed:
            counter[proof.case.prepare_finalize, proof.case.experts] += 1
    ledger = tuple(ledger)
    return tuple(
        line for kind, counter in counts.items() for line in broken_promises(ledger, counter, kind)
    )
