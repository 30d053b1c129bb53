"""Proves all cases of the parts that use vendor libraries, with stand-ins for the libraries.

    PYTHONPATH=tests/helpers TRITON_INTERPRET=1 python tests/helpers/prove_vendor_parts.py [PART...]

The program prints a line for each part and exits with 1 if a case fails. FlashInferOverGloo runs
over two ranks. `make verify` runs this program.
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


def list_cases(part):
    """Return all cases of a part with the local PrepareAndFinalize of its activation format."""
    return cases_for(parts.local_prepare_finalize(part), part, parts.CPU).cases


def prove_all_cases(name):
    """Prove every case of a part."""
    if name == OVER_RANKS:
        machine = this_machine(device="cpu")
        cases = rank_cases_for(FlashInferOverGloo, "TorchExperts", machine, 2, "full").cases
        with RankPool(2) as pool:
            # Fault scenarios need a manager that waits for other ranks. Here the library waits.
            return [prove_ranks(case, pool, machine) for case in cases if not case.fault]
    part = getattr(parts, name)
    with parts.stand_in_libraries():
        return [prove(case, parts.CPU) for case in list_cases(part)]


def main(names):
    num_failed = 0
    for name in names or (*parts.PARTS, OVER_RANKS):
        start = time.perf_counter()
        proofs = prove_all_cases(name)
        failed_proofs = [proof for proof in proofs if not proof.passed]
        seconds = time.perf_counter() - start
        sys.stdout.write(
            f"{name}: {len(proofs)} cases, {len(failed_proofs)} failed, {seconds:.0f} s\n"
        )
        sys.stdout.writelines(f"{proof}\n" for proof in failed_proofs)
        sys.stdout.flush()
        num_failed += len(failed_proofs)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
