"""Correctness tests for a prepare/finalize class together with an experts class (a "pairing").

The classes ("parts") may come from this package or from a third-party package.

    from modular_kernel.testing import cases_for, pairings, prove, sensitivity

    for case in cases_for("MoEPrepareAndFinalizeNoEP", "MyExperts", machine).cases:
        assert prove(case, machine).passed
    results = sensitivity("MoEPrepareAndFinalizeNoEP", "MyExperts", machine)
    assert all(result.ok for result in results)

Packages:

- `cases`: the test cases of a pairing and their input tensors.
- `verify`: runs a case and checks its results. `compare` has the tolerance, `checks` the properties
  that are checked, and `ledger` the list of pairings that must pass.
- `input_mutations`: wrong inputs and outputs, which the checks must detect.
- `mutation`: small changes of the source code of a part, which the checks must detect (mutation
  testing).
- `ranks`: the pool of processes for cases with several ranks.
- `checkpoints`: small checkpoints in published formats.
- `compile`: kernels that are compiled without a GPU.
- `edges`: calls with extreme arguments.
- `stress`: random calls, faults and long runs.

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
from modular_kernel.testing.input_mutations.run import MUTANTS, CallMutantResult, sensitivity
from modular_kernel.testing.verify.compare import Comparison, compare
from modular_kernel.testing.verify.ledger import check_proofs, machine_kind, read_ledger
from modular_kernel.testing.verify.one_process import Proof, prove

__all__ = [
    "MUTANTS",
    "CallMutant",
    "CallMutantResult",
    "Case",
    "Comparison",
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
