"""Cases run in this process: the list of some pairings, and the first failure of one case."""

import hashlib
import time
from typing import Literal

import torch

from modular_kernel.catalog import this_machine
from modular_kernel.errors import IncompatibleError
from modular_kernel.testing.cases import Case, cases_for
from modular_kernel.testing.checks import Trial, build_kernel
from modular_kernel.testing.prove import findings
from modular_kernel.types import Machine

Pair = tuple[str, str]
Level = Literal["smoke", "full"]


def case_list(pairs: tuple[Pair, ...], level: Level) -> tuple[tuple[Case, ...], Machine]:
    """Every case of every pairing that is valid here, each once."""
    machine = this_machine()
    found = (case for pair in pairs for case in cases_for(*pair, machine, level).cases)
    return tuple(dict.fromkeys(found)), machine


def first_failure(case: Case, machine: Machine) -> tuple[str | None, float]:
    """What the case fails by first, None if it is proven; and the seconds until then."""
    start = time.perf_counter()
    failure = _first(case, machine)
    return failure, time.perf_counter() - start


def digest(case: Case, machine: Machine) -> str:
    """Every bit of the result of the case's first call, as a digest; or what it raises."""
    trial = Trial(case, machine)
    try:
        out = trial.eager.contiguous()
    # With a mutant a call can fail in any way.
    except Exception as error:  # noqa: BLE001
        return f"raised {type(error).__name__}"
    return hashlib.sha256(out.view(torch.uint8).numpy().tobytes()).hexdigest()


def _first(case: Case, machine: Machine) -> str | None:
    try:
        build_kernel(case, machine, False)
        return next(iter(findings(Trial(case, machine))), None)
    except IncompatibleError as error:
        return f"refused: {error}"
    # A faulty part can fail in any way before the first check, too.
    except Exception as error:  # noqa: BLE001
        return f"build: raised {type(error).__name__}: {error}"
