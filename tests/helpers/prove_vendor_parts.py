"""Proves all cases of the parts that use vendor libraries, with stand-ins for the libraries.

    PYTHONPATH=tests/helpers TRITON_INTERPRET=1 python tests/helpers/prove_vendor_parts.py [PART...]

Prints a line for each part. The exit code is 1 if a case fails. FlashInferOverGloo runs over two
ranks. `make verify` runs this program.
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
    """Return all cases of a part with the local PrepareAndFinalize of its activation format."""
    return cases_for(parts.local_prepare_finalize(part), part, parts.CPU).cases


def proofs_of(name):
    """Prove every case of a part."""
    if name == OVER_RANKS:
        machine = this_machine(device="cpu")
        cases = rank_cases_for(FlashInferOverGloo, "TorchExperts", machine, 2, "full").cases
        with RankPool(2) as pool:
            # Fault scenarios need a manager that waits for other ranks. Here the library waits.
            return [prove_ranks(case, pool, machine) for case in cases if not case.fault]
    part = getattr(parts, name)
    with parts.stand_in_libraries():
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
