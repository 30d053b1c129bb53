"""Check for the "misunderstood" fault scenario: the operations of a part alone, without ranks.

A part may have operations that only some of its calls use, such as those of calls on GPUs. It can
name cases of them (`PrepareAndFinalize.operation_cases`). Each case runs with kernels, with kernels
under lowered limits, and with torch references, which must write the same bits. The programs of a
launch must not race.
"""

from collections.abc import Callable, Mapping

import torch

from modular_kernel.contracts import PrepareAndFinalize
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.replay.launch.runtime import record_races, use_triton
from modular_kernel.testing.verify.lowered_limits import lower_limits
from modular_kernel.testing.verify.problem_scenarios import Outcomes

Tensors = Mapping[str, torch.Tensor]


def check_operation_cases(part: type[PrepareAndFinalize]) -> Outcomes:
    """Run the cases of a part's operations. Yields (outcome, expected outcome) of each."""
    return compare_cases(part.operation_cases())


def compare_cases(cases: Mapping[str, Callable[[], Tensors]]) -> Outcomes:
    """Run cases with kernels and torch references. Yields (outcome, expected outcome) of each.

    cases: maps names to cases. A case returns the tensors that operations have written.
    """
    has_kernels = use_triton(torch.zeros(1))
    for name, case in cases.items():
        with prefer_torch_reference():
            expected = _run_case(case)
        for is_lowered in (False, True) if has_kernels else ():
            with lower_limits(enabled=is_lowered), record_races() as races:
                outcome = _describe_difference(_run_case(case), expected)
            outcome = next(iter(races), outcome)
            limits = "lowered" if is_lowered else "default"
            yield f"{name}, {limits} limits: {outcome}", f"{name}, {limits} limits: equal bits"
        if not has_kernels:  # the case itself may raise or fail an assertion
            yield _describe_difference(expected, expected), "equal bits"


def _run_case(case: Callable[[], Tensors]) -> Tensors | str:
    """Return the tensors that a case writes, or a description of its error."""
    # A faulty operation may raise anything.
    try:
        return case()
    except Exception as error:  # noqa: BLE001
        return f"raised {type(error).__name__}: {error}"


def _describe_difference(actual: Tensors | str, expected: Tensors | str) -> str:
    """Return "equal bits", or a description of the first difference between two runs of a case."""
    for result in (actual, expected):
        if isinstance(result, str):
            return result
    assert not isinstance(actual, str)
    assert not isinstance(expected, str)
    if actual.keys() != expected.keys():
        return f"{sorted(actual)} written, {sorted(expected)} by the reference"
    for name, tensor in expected.items():
        bits, expected_bits = (
            t.contiguous().flatten().view(torch.uint8) for t in (actual[name], tensor)
        )
        if not torch.equal(bits, expected_bits):
            byte = (
                int((bits != expected_bits).nonzero()[0]) if len(bits) == len(expected_bits) else 0
            )
            return f"{name} differs from the reference, first in byte {byte}"
    return "equal bits"
