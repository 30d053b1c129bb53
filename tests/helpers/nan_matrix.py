"""Calls every experts part in every scheme with a NaN in one argument at a time.

Unused experts and adapters are NaN as well. When run as a program, it prints the failures and the
number of correct calls for each pairing that supports this machine.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

import torch

from modular_kernel.catalog import check, load_catalog, make_kernel, this_machine
from modular_kernel.quant.quantized_weights import SCALE_FIELDS
from modular_kernel.spec.problem import Combine, Machine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.case import Case, command
from modular_kernel.testing.cases.inputs import InputVariation
from modular_kernel.testing.cases.nan import list_nan_arguments
from modular_kernel.testing.cases.quantized import SCHEMES
from modular_kernel.testing.cases.row_order import apply_part_row_order
from modular_kernel.testing.verify.sample import Sample
from modular_kernel.testing.verify.trial import call
from modular_kernel.validate import ADAPTER_TENSORS

LOCAL = ("MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize")
SCHEME_NAMES = ("none", *SCHEMES)


@dataclass
class Counts:
    """Counts of kernels and calls, and a message for each failure."""

    kernels: int = 0
    calls: int = 0
    schemes: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.calls} calls of {self.kernels} kernels in {len(self.schemes)} schemes: "
            f"{self.calls - len(self.wrong)} right"
        )


def problems_of_size(size: int) -> Iterator[Problem]:
    """Yield problems with summed outputs, unreduced top-k, weights on the input, and adapters."""
    base = Problem(
        tokens=6, hidden=size, intermediate=size, experts=12, top_k=2, dtype=torch.bfloat16
    )
    yield base
    yield replace(base, tokens=1, top_k=4, combine=Combine.TOPK_WEIGHTED)
    yield replace(base, tokens=4, top_k=1, apply_router_weight_on_input=True)
    yield replace(base, lora="adapters=3,rank=16")


def local_pairs(machine: Machine) -> tuple[tuple[str, str], ...]:
    """Return the single-rank pairings that support some scheme on `machine`."""
    candidates = ((pf, ex) for pf in LOCAL for ex in load_catalog().names("experts"))
    return tuple(
        pair
        for pair in candidates
        if any(supported_problems(pair, quant, machine, 64) for quant in SCHEME_NAMES)
    )


def supported_problems(
    pair: tuple[str, str], quant: str, machine: Machine, size: int
) -> tuple[Problem, ...]:
    """Return the problems of a scheme that a pair supports, with biases if possible."""
    supported = []
    for base in problems_of_size(size):
        problem = apply_part_row_order(replace(base, quant=quant), pair[1])
        for variant in (replace(problem, bias=True), problem):
            if check(*pair, variant, machine).ok:
                supported.append(variant)
                break
    return tuple(supported)


def check_calls(
    pair: tuple[str, str], problem: Problem, machine: Machine, counts: Counts, label: str = ""
) -> None:
    """Call one kernel with a NaN in each argument that may hold one; update `counts`."""
    device = torch.device(machine.device)
    kernel = make_kernel(*pair, problem, machine=machine, poison=True)
    counts.kernels += 1
    counts.schemes.add(problem.quant)
    clamps_nan = problem.act.kind in kernel.experts.requires.nan_clamping_activations
    # Problems without adapters already test the other arguments.
    names = list_nan_arguments(problem) if problem.adapters is None else ADAPTER_TENSORS
    for name in names:
        if clamps_nan and name not in ("x", "topk_weights"):
            continue
        case = Case(*pair, problem, variation=InputVariation(nan=name))
        sample = Sample(case, device, tokens=problem.tokens, seed_offset=0)
        routing = sample.original_inputs.routing
        fill_unused(sample.inputs.weights, routing, tuple(range(problem.e)), problem.experts)
        failures = sample.compare(call(kernel, sample)).problems
        counts.calls += 1
        assert bool(sample.rounded_reference.isnan().any()), command(case)
        if failures:
            counts.wrong.append(f"{label} {'; '.join(failures)}: {command(case)}")


def fill_unused(
    weights: ExpertWeights, routing: Routing, slots: tuple[int, ...], experts: int
) -> int:
    """Set all tensors of unused experts and adapters to NaN; return the number of unused experts.

    slots: global id of each expert in `weights`. routing: routing of all ranks.
    """
    used = {int(e) for e in routing.topk_ids_TK.flatten().tolist() if 0 <= e < experts}
    unused = [slot for slot, e in enumerate(slots) if e not in used]
    adapters = set() if routing.slots_T is None else set(routing.slots_T.tolist())
    for name in (field_.name for field_ in fields(weights)):
        tensor = getattr(weights, name)
        if tensor is None or name == "expert_map":
            continue
        if name in ADAPTER_TENSORS:
            for adapter in set(range(len(tensor))) - adapters:
                _fill_with_nan(name, tensor[adapter])
        elif len(tensor) == len(slots):
            for slot in unused:
                _fill_with_nan(name, tensor[slot : slot + 1])
    return len(unused)


def _fill_with_nan(name: str, values: torch.Tensor) -> None:
    """Set values to NaN. E8M0 scales are uint8 and have a NaN code; other integers have none."""
    if values.dtype is torch.uint8 and name in SCALE_FIELDS and name.endswith("_scale"):
        values.fill_(255)
    elif values.dtype is torch.float8_e4m3fn:
        values.view(torch.uint8).fill_(0x7F)
    elif values.is_floating_point():
        values.fill_(torch.nan)


def run(
    pair: tuple[str, str], machine: Machine, schemes: tuple[str, ...] = SCHEME_NAMES, size: int = 64
) -> Counts:
    """Check every supported problem of every scheme."""
    counts = Counts()
    for quant in schemes:
        for problem in supported_problems(pair, quant, machine, size):
            check_calls(pair, problem, machine, counts)
    return counts


def main() -> int:
    machine, wrong = this_machine(), 0
    for pair in local_pairs(machine):
        counts = run(pair, machine)
        sys.stdout.write("\n".join([f"{' x '.join(pair)}: {counts}", *counts.wrong, ""]))
        sys.stdout.flush()
        wrong += len(counts.wrong)
    return int(wrong > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
