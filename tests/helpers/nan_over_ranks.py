"""Calls over two ranks in every scheme and exchange with a NaN in one argument at a time.

Unused experts and adapters are NaN as well.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from nan_matrix import SCHEME_NAMES, Counts, fill_unused

from modular_kernel.catalog import make_kernel, this_machine
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing.cases.case import Case, command
from modular_kernel.testing.cases.inputs import InputVariation
from modular_kernel.testing.cases.nan import list_nan_arguments
from modular_kernel.testing.cases.ranks import RankCase
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.compare_nan import compare_with_nan
from modular_kernel.testing.verify.over_ranks import RankSample
from modular_kernel.testing.verify.sample import Sample
from modular_kernel.testing.verify.trial import call
from modular_kernel.validate import ADAPTER_TENSORS

CPU, RANKS = torch.device("cpu"), 2
LOCAL_PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
# Exchanges without Triton kernels -> number of tokens of each rank.
EXCHANGES = {
    "ReplicatedEPPrepareAndFinalize": (6, 6),
    "AllGatherReduceScatterPrepareAndFinalize": (4, 3),
    "TorchAll2AllPrepareAndFinalize": (4, 3),
    "TorchAll2AllBatchedPrepareAndFinalize": (4, 3),
}
_SCHEMES_WITH_ADAPTERS = (
    "none",
    "fp8_w8a8_channel",
    "fp8_w8a8_tensor",
    "int4_w4a16_group",
    "mxfp4_w4a16",
)


def experts_of(exchange: str) -> str:
    return "NaiveBatchedExperts" if "Batched" in exchange else "TorchExperts"


def cases(exchange: str, quant: str) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    """Yield problems, each with the arguments that get a NaN in turn."""
    tokens = EXCHANGES[exchange]
    # Successive schemes alternate between the two placements.
    make_placement = (Placement.linear, Placement.round_robin)[SCHEME_NAMES.index(quant) % 2]
    parallel = Parallel(RANKS, make_placement(16, RANKS), 0)
    problem = Problem(
        max(tokens), 64, 64, 16, 2, torch.bfloat16, quant=quant, bias=True, parallel=parallel
    )
    yield problem, list_nan_arguments(problem)
    if quant.partition(":")[0] in _SCHEMES_WITH_ADAPTERS:
        yield replace(problem, bias=False, lora="adapters=3,rank=16"), ADAPTER_TENSORS
    on_input = replace(problem, top_k=1, apply_router_weight_on_input=True, bias=False)
    yield on_input, ("x", "topk_weights")


def make_calls_on_rank(
    rank: int, _world: int, group: object, exchange: str, quant: str, in_torch: bool
) -> Counts:
    """Make all calls of an exchange and a scheme on one rank of a RankPool."""
    counts = Counts()
    for problem, names in cases(exchange, quant):
        case = RankCase(exchange, experts_of(exchange), problem, tokens=EXCHANGES[exchange])
        is_always_supported = problem.adapters is None and not problem.apply_router_weight_on_input
        if is_always_supported or case.verdict(this_machine(device="cpu")).ok:
            with prefer_torch_reference(enabled=in_torch):
                _call_with_each_nan(rank, group, case, names, counts)
    return counts


def _call_with_each_nan(
    rank: int, group: object, case: RankCase, names: tuple[str, ...], counts: Counts
) -> None:
    pair, problem = (case.prepare_finalize, case.experts), case.of_rank(rank).problem
    kernel = make_kernel(
        *pair, problem, group=group, machine=this_machine(device="cpu"), poison=True
    )
    counts.kernels += 1
    counts.schemes.add(problem.quant)
    slots = problem.placement.slots[rank]
    for name in names:
        with_nan = replace(case, variation=InputVariation(nan=name))
        sample = RankSample(with_nan, rank, CPU, counts=case.tokens, seed_offset=0)
        routing = sample.global_inputs.routing
        fill_unused(sample.inputs.weights, routing, slots, problem.experts)
        failures = _find_failures(sample, call(kernel, sample), with_nan)
        counts.calls += 1
        if failures:
            counts.wrong.append(f"rank {rank}: {'; '.join(failures)}: {command(with_nan)}")
    kernel.prepare_finalize.destroy()


def _find_failures(sample: RankSample, out: torch.Tensor, case: RankCase) -> tuple[str, ...]:
    """Compare the output of a rank; return the failures.

    The tokens of one rank may be too few to estimate the tolerance. If the comparison fails, it is
    repeated with a tolerance from the rounded reference's errors over the tokens of all ranks.
    """
    if not bool(sample.global_rounded_reference.isnan().any()):
        return ("no value is expected to be NaN",)
    failures = sample.compare(out).problems
    if failures:
        one_rank = Case(*LOCAL_PAIR, case.global_problem, case.routing, case.seed, case.variation)
        tokens = len(sample.global_inputs.x_TH)
        errors = Sample(one_rank, CPU, tokens=tokens, seed_offset=0).rounding_errors
        args = out, sample.exact, sample.rounded_reference, sample.problem
        failures = compare_with_nan(*args, rounding_errors=errors).problems
    return failures


def run(pool: RankPool, exchange: str, quant: str, *, in_torch: bool) -> Counts:
    """Make the calls of an exchange and a scheme on each rank; return the sum of their counts.

    in_torch: operations run in plain torch, even where Triton's interpreter is on.
    """
    total = Counts()
    for counts in pool.run(make_calls_on_rank, exchange, quant, in_torch, timeout=300):
        total.kernels += counts.kernels
        total.calls += counts.calls
        total.schemes |= counts.schemes
        total.wrong += counts.wrong
    return total
