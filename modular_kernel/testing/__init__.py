"""Correctness tests for pairings of prepare/finalize and experts parts, including third-party ones.

    from modular_kernel.testing import cases_for, pairings, prove, sensitivity

    for case in cases_for("MoEPrepareAndFinalizeNoEP", "MyExperts", machine).cases:
        assert prove(case, machine).passed
    assert all(kill.ok for kill in sensitivity("MoEPrepareAndFinalizeNoEP", "MyExperts", machine))

Packages:

- `cases`: the test cases of a pairing and their input tensors.
- `verify`: runs a case and checks its results: tolerance (`compare`), checks (`checks`), and the
  ledger of pairings that must pass (`ledger`).
- `input_mutations`: injected defects that the checks must detect.
- `ranks`: the pool of processes for cases with several ranks.

No GPU is required. On a GPU, the same code runs unchanged.

With several ranks:

    from modular_kernel.testing.cases.ranks import rank_cases_for
    from modular_kernel.testing.ranks.pool import RankPool
    from modular_kernel.testing.verify.over_ranks import prove_ranks

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
