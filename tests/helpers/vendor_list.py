"""Every case that the harness has for a part over a vendor's library, against its stand-in.

    PYTHONPATH=tests/helpers TRITON_INTERPRET=1 python tests/helpers/vendor_list.py [PART...]

A line for each part; the exit status is 1 if a case fails. FlashInferOverGloo runs over two ranks.
`make verify` runs it.
"""

import sys
import time

import vendor_stand_in as parts
from flashinfer_stand_in import FlashInferOverGloo

from modular_kernel.catalog import this_machine
from modular_kernel.testing import cases_for, prove
from modular_kernel.testing.cases.ranks import rank_cases_for
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.over_ranks import prove_ranks

OVER_RANKS = "FlashInferOverGloo"


def cases_of(part):
    """All cases of a part, beside the local PrepareAndFinalize of its format."""
    return cases_for(parts.beside(part), part, parts.CPU).cases


def proofs_of(name):
    """The proof of every case of a part."""
    if name == OVER_RANKS:
        machine = this_machine(device="cpu")
        cases = rank_cases_for(FlashInferOverGloo, "TorchExperts", machine, 2, "full").cases
        with RankPool(2) as pool:
            # Scenes of faults are of managers that wait themselves: here the library does.
            return [prove_ranks(case, pool, machine) for case in cases if not case.fault]
    part = getattr(parts, name)
    with parts.libraries():
        return [prove(case, parts.CPU) for case in cases_of(part)]


def main(names):
    failed = 0
    for name in names or (*parts.PARTS, OVER_RANKS):
        start = time.perf_counter()
        proofs = proofs_of(name)
        wrong = [proof for proof in proofs if not proof.passed]
        seconds = time.perf_counter() - start
        sys.stdout.write(f"{name}: {len(proofs)} cases, {len(wrong)} failed, {seconds:.0f} s\n")
        sys.stdout.writelines(f"{proof}\n" for proof in wrong)
        sys.stdout.flush()
        failed += len(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
