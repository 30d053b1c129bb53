"""Proof that a pairing is right, for our own parts and for anybody else's.

    from modular_kernel.testing import cases_for, pairings, prove, sensitivity

    for case in cases_for("MoEPrepareAndFinalizeNoEP", "MyExperts", machine).cases:
        assert prove(case, machine).passed
    assert all(kill.ok for kill in sensitivity("MoEPrepareAndFinalizeNoEP", "MyExperts", machine))

`cases` says what is tried, `inputs` makes the tensors, `compare` holds the tolerance, `checks` the
promises, `mutants` the defects that the checks must find, `ledger` what must have been proven.
Needs no GPU, and runs unchanged on one.

Over ranks: `ranks` holds the pool of processes, `cases_ranks`, `prove_ranks` and `mutants_ranks` do
there what the modules above do in one.

    with RankPool(4) as pool:
        for case in rank_cases_for("TheirDispatch", "MyExperts", machine, world_size=4).cases:
            assert prove_ranks(case, pool, machine).passed
"""

from modular_kernel.testing.cases.case import Case, command
from modular_kernel.testing.cases.lists import cases_for, pairings
from modular_kernel.testing.input_mutations.inject import CallMutant
from modular_kernel.testing.input_mutations.run import MUTANTS, Kill, sensitivity
from modular_kernel.testing.verify.compare import Comparison, compare
from modular_kernel.testing.verify.ledger import check_proofs, machine_kind, read_ledger
from modular_kernel.testing.verify.one_process import Proof, prove

__all__ = [
    "MUTANTS",
    "CallMutant",
    "Case",
    "Comparison",
    "Kill",
    "Proof",
    "cases_for",
    "check_proofs",
    "command",
    "compare",
    "machine_kind",
    "pairings",
    "prove",
    "read_ledger",
    "sensitivity",
]
