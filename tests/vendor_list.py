"""Every case that the harness has for a part over a vendor's library, against its stand-in.

    PYTHONPATH=tests TRITON_INTERPRET=1 python tests/vendor_list.py [PART...]

A line for each part; the exit status is 1 if a case fails. `make verify` runs it.
"""

import sys
import time

import vendor_stand_in as parts

from modular_kernel.testing import cases_for, prove


def cases_of(part):
    """All cases of a part, beside the local PrepareAndFinalize of its format."""
    return cases_for(parts.beside(part), part, parts.CPU).cases


def main(names):
    failed = 0
    for name in names or parts.PARTS:
        part, start = getattr(parts, name), time.perf_counter()
        cases = cases_of(part)
        with parts.libraries():
            proofs = [prove(case, parts.CPU) for case in cases]
        wrong = [proof for proof in proofs if not proof.passed]
        seconds = time.perf_counter() - start
        sys.stdout.write(f"{name}: {len(cases)} cases, {len(wrong)} failed, {seconds:.0f} s\n")
        sys.stdout.writelines(f"{proof}\n" for proof in wrong)
        sys.stdout.flush()
        failed += len(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
