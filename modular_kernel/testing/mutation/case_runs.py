"""List the test cases, and run one in this process, to find its first failure or hash its results.

After the source of a module was changed in a forked process, that process imports this module and
thereby the changed source. The hash of all result bits of a case (its digest) shows whether the
change affects the results.
"""

import hashlib
import time
from collections.abc import Sequence
from typing import Literal

import torch

from modular_kernel.catalog import check, this_machine
from modular_kernel.errors import IncompatibleError
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.lists import Case, cases_for
from modular_kernel.testing.verify.one_process import run_all_checks
from modular_kernel.testing.verify.trial import Trial, build_kernel, call

Pair = tuple[str, str]  # names of the PrepareAndFinalize and the experts class of a pairing
Level = Literal["smoke", "full"]  # the short or the full list of cases of a pairing


def list_cases(pairs: tuple[Pair, ...], level: Level) -> tuple[tuple[Case, ...], Machine]:
    """Return every valid case of the pairings, without repetition, and the current machine."""
    machine = this_machine()
    cases = (case for pair in pairs for case in cases_for(*pair, machine, level).cases)
    return tuple(dict.fromkeys(cases)), machine


def list_invalid_cases(cases: Sequence[Case]) -> list[str]:
    """Return the cases that are not valid on this machine."""
    machine = this_machine()
    return [
        str(case)
        for case in cases
        if not check(case.prepare_finalize, case.experts, case.problem, machine).ok
    ]


def run_until_failure(case: Case, machine: Machine) -> tuple[str | None, float]:
    """Run the checks of a case; return (first failure or None, duration in seconds)."""
    start = time.perf_counter()
    failure = _find_first_failure(case, machine)
    return failure, time.perf_counter() - start


def hash_case(case: Case, machine: Machine) -> str:
    """Run the case in this process; return its `hash_trial`, or "raised <error name>"."""
    # A mutant may raise any error.
    try:
        return hash_trial(Trial(case, machine))
    except Exception as error:  # noqa: BLE001
        return f"raised {type(error).__name__}"


def hash_trial(trial: Trial) -> str:
    """Make two calls; return a hash of every bit of their results.

    The first call is the call that the case describes. The second call has half the tokens,
    transposed weights and strided rows. The hash includes the numbers of invalid ids and races in
    the first call.
    """
    first = trial.first_call
    digest = hashlib.sha256(_get_bytes(first.output))
    digest.update(f"{first.invalid_ids} {len(first.races)}".encode())
    digest.update(_get_bytes(call(trial.kernel, trial.other)))
    return digest.hexdigest()


def _get_bytes(output: torch.Tensor) -> bytes:
    return output.contiguous().view(torch.uint8).numpy().tobytes()


def _find_first_failure(case: Case, machine: Machine) -> str | None:
    try:
        build_kernel(case, machine, False)
        return next(iter(run_all_checks(Trial(case, machine))), None)
    except IncompatibleError as error:
        return f"refused: {error}"
    # A mutant may raise any error, even before the first check.
    except Exception as error:  # noqa: BLE001
        return f"build: raised {type(error).__name__}: {error}"
