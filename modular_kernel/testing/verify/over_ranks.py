"""Run the checks of a case on all ranks in parallel.

Each rank compares the output of its tokens with the float64 reference of the whole layer. All ranks
make the same calls in the same order. A rank stops at the first check that raises an error, because
its peers may never reach the next call.

The tolerance follows from the error of a rounded reference, which models several ranks in plain
torch. Each rank computes the pairs of its experts like the rounded reference of a single rank. It
weights and sums them in float32, and rounds the partial sum to the problem's dtype, in which ranks
exchange it. The partial sums are added in float32 and rounded again.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from modular_kernel import reference
from modular_kernel.catalog import load_catalog, make_kernel, this_machine
from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.placement import pairs_to_slots
from modular_kernel.spec.problem import Combine, Machine, Parallel, Problem
from modular_kernel.tensors import Dispatched, ExpertWeights, Routing
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.inputs import (
    FencedCopier,
    Inputs,
    InputVariation,
    choose_fill,
    make_inputs,
)
from modular_kernel.testing.cases.rank_inputs import inputs_of_rank
from modular_kernel.testing.cases.ranks import RankCase
from modular_kernel.testing.cases.scenario_names import find_manager_class, is_builtin
from modular_kernel.testing.ranks.external_launcher import AnyRanks
from modular_kernel.testing.ranks.pool import RankError
from modular_kernel.testing.verify.checks import CHECKS, Check, Findings
from modular_kernel.testing.verify.compare import Comparison, compare
from modular_kernel.testing.verify.compare_isolated import RoundingErrors
from modular_kernel.testing.verify.compare_nan import compare_with_nan
from modular_kernel.testing.verify.one_process import Proof, format_raised_error, name_check
from modular_kernel.testing.verify.rank_differences import (
    DISPATCH_AGREES,
    compute_local_output,
    describe_dispatch_difference,
    describe_output_difference,
    find_wide_ids,
    record_first_dispatch,
)
from modular_kernel.testing.verify.sample import NUM_REFERENCE_TOKENS, Sample
from modular_kernel.testing.verify.scenario_context import ScenarioContext
from modular_kernel.testing.verify.scenarios import run_scenario
from modular_kernel.testing.verify.trial import Build, Trial, call

# Makes one rank's kernel of a case. The last arguments are `poison` and the process group.
RankBuild = Callable[[Case, Machine, bool, object], FusedMoEModularKernel]
Reference = Callable[[torch.Tensor, ExpertWeights, Routing, Problem], torch.Tensor]
_CPU = torch.device("cpu")


class RankSample(Sample):
    """The tokens and experts of one rank in a call.

    counts: the number of tokens of each rank.
    """

    def __init__(
        self,
        case: RankCase,
        rank: int,
        device: torch.device,
        *,
        counts: tuple[int, ...],
        seed_offset: int,
        strided: bool = False,
    ) -> None:
        self.case, self.counts, self.rank = case, counts, rank
        rank_case = case.of_rank(rank)
        super().__init__(
            rank_case, device, tokens=counts[rank], seed_offset=seed_offset, strided=strided
        )

    @cached_property
    def global_inputs(self) -> Inputs:
        """The inputs of all ranks and the weights of all experts."""
        return self._make_global_inputs(self.variation)

    def _make_global_inputs(self, variation: InputVariation) -> Inputs:
        tokens = self.counts[0] if self.case.is_replicated else sum(self.counts)
        problem = self.case.global_problem.with_tokens(tokens)
        return make_inputs(
            problem,
            self.routing,
            _CPU,
            seed=self.seed,
            strided=self.strided,
            variation=variation,
        )

    @property
    def local_tokens(self) -> slice:
        """The slice of this rank's tokens among those of all ranks."""
        start = 0 if self.case.is_replicated else sum(self.counts[: self.rank])
        return slice(start, start + self.counts[self.rank])

    def _make_call_inputs(self, variation: InputVariation | None = None) -> Inputs:
        global_inputs = (
            self.global_inputs if variation is None else self._make_global_inputs(variation)
        )
        memory = FencedCopier(self.device, fill=choose_fill(self.seed))
        return inputs_of_rank(
            global_inputs, self.local_tokens, self.problem, memory, strided=self.strided
        )

    @property
    def global_original_inputs(self) -> Inputs:
        return self.global_inputs

    @property
    def global_problem(self) -> Problem:
        return self.case.global_problem.with_tokens(len(self.global_inputs.x_TH))

    @cached_property
    def exact(self) -> torch.Tensor:
        return self.global_exact[self.local_tokens].to(self.device)

    @cached_property
    def rounded_reference(self) -> torch.Tensor:
        return self.global_rounded_reference[self.local_tokens].to(self.device)

    @cached_property
    def global_exact(self) -> torch.Tensor:
        """The float64 reference's output for the tokens of all ranks."""
        return self._compute_reference(reference.float64_reference, self.global_inputs.routing)

    @cached_property
    def global_rounded_reference(self) -> torch.Tensor:
        """The rounded reference's output for the tokens of all ranks."""
        return compute_rounded_reference(self.global_inputs, self.problem)

    def compare(self, out: torch.Tensor) -> Comparison:
        """Compare `out` with the float64 reference.

        The rounded reference's error is measured on the tokens of all ranks, because a single rank
        may have too few. If the comparison fails, it is repeated with `rounding_errors`.
        """
        exact, rounded_reference = self.global_exact, self.global_rounded_reference
        if self.variation.nan:
            exact, rounded_reference = (
                t.masked_fill(rounded_reference.isnan(), 0) for t in (exact, rounded_reference)
            )
        norm = exact.norm()
        rounding_error = float((rounded_reference - exact).norm() / norm) if norm else 0.0
        result = self._compare(out, RoundingErrors(rounding_error))
        return result if result.ok else self._compare(out, self.rounding_errors)

    def _compare(self, out: torch.Tensor, rounding_errors: RoundingErrors) -> Comparison:
        args = out, self.exact, self.rounded_reference, self.problem
        if self.variation.nan:
            return compare_with_nan(*args, rounding_errors=rounding_errors)
        return compare(*args, **vars(rounding_errors))

    @cached_property
    def rounding_errors(self) -> RoundingErrors:
        """The errors of the rounded reference, measured on more tokens of the same layer.

        In a call with few tokens, the error of the rounded reference may be small by chance.
        """
        problem = self.case.global_problem.with_tokens(NUM_REFERENCE_TOKENS)
        inputs = make_inputs(problem, "uniform", _CPU, seed=self.seed)
        layer = self.global_inputs
        if self.variation.nan:
            layer = self._make_global_inputs(replace(self.variation, nan=""))
        adapters_T = layer.routing.adapters_T
        if isinstance(adapters_T, torch.Tensor) and len(adapters_T):
            adapters_T = adapters_T[torch.arange(NUM_REFERENCE_TOKENS) % len(adapters_T)]
        routing = replace(inputs.routing, adapters_T=adapters_T)
        inputs = Inputs(inputs.x_TH, layer.weights, routing)
        exact = reference.float64_reference(inputs.x_TH, inputs.weights, routing, problem)
        rounded_reference = compute_rounded_reference(
            inputs, replace(self.problem, chunk_tokens=None)
        )
        num_rows = int((self.exact != 0).flatten(1).any(1).sum())
        return RoundingErrors.measure(
            exact, rounded_reference, min(NUM_REFERENCE_TOKENS, max(1, num_rows))
        )

    def _compute_reference(self, function: Reference, routing: Routing) -> torch.Tensor:
        return function(
            self.global_inputs.x_TH, self.global_inputs.weights, routing, self.global_problem
        )


def compute_rounded_reference(global_inputs: Inputs, problem: Problem) -> torch.Tensor:
    """Compute the rounded reference of a call across ranks.

    Returns (T, H) or (T, K, H) float64, for the tokens of all ranks.

    global_inputs: the tokens of all ranks and the weights of all experts.
    problem: the problem of any rank.
    """
    routing, tokens = global_inputs.routing, len(global_inputs.x_TH)
    one_rank_problem = replace(problem, parallel=Parallel(), local_experts=None, expert_map=False)
    global_problem = one_rank_problem.with_tokens(tokens)
    if problem.combine is not Combine.SUM:
        return reference.rounded_reference(
            global_inputs.x_TH, global_inputs.weights, routing, global_problem
        )
    ids_TK = routing.topk_ids_TK
    rank_TK, _, _ = pairs_to_slots(ids_TK, problem.placement.tables())
    summed_output_TH = torch.zeros(tokens, problem.hidden)
    for rank in range(problem.parallel.world_size):
        # Pairs with an invalid id belong to no rank, as in the float64 reference.
        local_routing = replace(routing, topk_ids_TK=ids_TK.masked_fill(rank_TK != rank, -1))
        summed_output_TH += reference.rounded_reference(
            global_inputs.x_TH, global_inputs.weights, local_routing, global_problem
        ).float()
    return summed_output_TH.to(problem.dtype).double()


class RankTrial(Trial):
    """A case as run by one rank. Each sample rotates the token counts of the ranks by one."""

    def __init__(self, case: RankCase, rank: int, machine: Machine, build: Build) -> None:
        self.case, self.machine, self.build = case.of_rank(rank), machine, build
        self.fault = case.fault
        device = torch.device(machine.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        counts = case.tokens
        rotated, rotated_twice = (counts[n:] + counts[:n] for n in (1, 2 % len(counts)))
        half_counts = tuple((count + 1) // 2 for count in rotated_twice)
        make_sample = partial(RankSample, case, rank, device)
        self.first = make_sample(counts=counts, seed_offset=0)
        self.second = make_sample(counts=rotated, seed_offset=1)
        self.other = make_sample(counts=half_counts, seed_offset=2, strided=True)
        self._sample_like_first = partial(make_sample, counts=counts)

    def copy_first_sample(self) -> Sample:
        return self._sample_like_first(seed_offset=0)

    @cached_property
    def scenario_outcomes(self) -> tuple[tuple[str, str], ...]:
        """(outcome, expected outcome) of each call of the case's fault scenario on this rank."""
        if not self.fault:
            return ()
        return run_scenario(
            self.fault,
            ScenarioContext(
                self.case, self.machine, self.first, self.build, self._make_changed_sample
            ),
        )

    def _make_changed_sample(self, changes: Mapping[str, Any]) -> RankSample | None:
        """Return this rank's first sample for a changed layer, or None if the pairing refuses it.

        changes: fields of Problem.
        """
        first_sample = self.first
        assert isinstance(first_sample, RankSample)
        changed_case = replace(
            first_sample.case, problem=replace(first_sample.case.problem, **changes)
        )
        if not changed_case.verdict(self.machine).ok:
            return None
        return RankSample(
            changed_case,
            first_sample.rank,
            first_sample.device,
            counts=first_sample.counts,
            seed_offset=0,
        )

    @property
    def expected_replays(self) -> tuple[tuple[Sample, torch.Tensor], ...]:
        # A graph has a fixed number of tokens on each rank. `second` has a different number, so it
        # cannot be replayed.
        sample = self._sample_like_first(seed_offset=3)
        return (sample, call(self.kernel, sample)), (self.first, self.eager_output)


def check_faults(trial: Trial) -> Findings:
    """Check that every call of the fault scenario has its expected outcome on this rank."""
    assert isinstance(trial, RankTrial)
    for index, (outcome, expected) in enumerate(trial.scenario_outcomes, 1):
        if outcome != expected:
            yield f"call {index} of {trial.fault}: got {outcome}, expected {expected}"
            return  # later differences follow from this one


# The checks of a single process, then the fault scenarios.
RANK_CHECKS: tuple[Check, ...] = (*CHECKS, check_faults)


@dataclass(frozen=True)
class RankReport:
    """Findings of one rank.

    Attributes:
        findings: one line for each failure.
        error, bound: relative error of the rank's first call and its limit, as in Proof.
        invalid_ids: number of invalid ids in the rank's first call.
        dispatch: one line about how the dispatch of the first call differs from the reference, or
            "".
        output: one line about how the output of the first call differs from the reference, or "".
    """

    findings: tuple[str, ...]
    error: float
    bound: float
    invalid_ids: int
    dispatch: str = ""
    output: str = ""


class CheckError(Exception):
    """Raised if a check raises an error. The message lists all findings, that error last."""


def build_kernel(
    case: Case, machine: Machine, poison: bool, group: object
) -> FusedMoEModularKernel:
    """Make one rank's kernel of a case."""
    return make_kernel(
        case.prepare_finalize,
        case.experts,
        case.problem,
        group=group,
        machine=machine,
        poison=poison,
        auto_prepare=False,
    )


@contextmanager
def open_group(case: RankCase, group: object) -> Iterator[object]:
    """Yield the group that a case passes to its kernels.

    The group is `group`, or a manager that has been made with `checked=False`. The manager is
    destroyed at the end, but not after an error, because `destroy` may wait for peers that failed.
    """
    if case.checked:
        yield group
        return
    part = load_catalog().prepare_finalize(case.prepare_finalize)
    manager = find_manager_class(part)(group, checked=False)
    yield manager
    manager.destroy()


def run_checks(
    rank: int,
    _world_size: int,
    group: object,
    case: RankCase,
    machine: Machine,
    build: RankBuild,
    checks: tuple[Check, ...],
) -> RankReport:
    """Run the checks of a case on one rank of a RankPool.

    Raises CheckError if a check raises an error.
    """
    with open_group(case, group) as opened_group:
        return _run_checks(rank, opened_group, case, machine, build, checks)


def _run_checks(
    rank: int,
    group: object,
    case: RankCase,
    machine: Machine,
    build: RankBuild,
    checks: tuple[Check, ...],
) -> RankReport:
    kernels: list[FusedMoEModularKernel] = []
    # The input of the experts in the first call. It is recorded if `check_numeric` is the first
    # check.
    received: list[list[Dispatched]] = []

    def build_on_rank(rank_case: Case, machine: Machine, poison: bool) -> FusedMoEModularKernel:
        kernels.append(build(rank_case, machine, poison, group))
        if len(kernels) == 1 and checks and checks[0] is CHECKS[0]:
            received.append(record_first_dispatch(kernels[0]))
        return kernels[-1]

    trial = RankTrial(case, rank, machine, build_on_rank)
    findings: list[str] = []
    for check in checks:
        name = name_check(check)
        try:
            for finding in check(trial):
                findings.append(f"{name}: {finding}")
        except Exception as error:
            raise CheckError("\n".join([*findings, format_raised_error(name, error)])) from error
    if received and is_builtin(load_catalog().prepare_finalize(case.prepare_finalize)):
        findings += [f"numeric: {finding}" for finding in find_wide_ids(received[0])]
    comparison = trial.first.compare(trial.eager_output)
    unique_findings = tuple(dict.fromkeys(findings))
    # This is skipped if a check raised, because destroying a part may wait for peers that failed.
    for kernel in kernels:
        kernel.prepare_finalize.destroy()
    report = RankReport(
        unique_findings, comparison.error, comparison.bound, trial.first.invalid_ids
    )
    return _add_differences(report, trial, received[0]) if received else report


def _add_differences(
    report: RankReport, trial: RankTrial, received: Sequence[Dispatched]
) -> RankReport:
    """Return `report` with descriptions of what differs from the reference.

    The dispatch is compared on every rank, because a wrong dispatch on one rank may cause a wrong
    output on another.
    """
    sample = trial.first
    assert isinstance(sample, RankSample)
    inputs, problem = sample.global_inputs, sample.problem
    try:
        weighted = sample.input_weighted
        dispatch = describe_dispatch_difference(received, inputs, problem, input_weighted=weighted)
    except Exception as error:  # noqa: BLE001  a part may return anything
        dispatch = f"dispatch: cannot be compared, {type(error).__name__}: {error}"
    if not any(finding.startswith("numeric: ") for finding in report.findings):
        return replace(report, dispatch=dispatch)
    local_only = compute_local_output(inputs, problem, sample.local_tokens, sample.global_problem)
    output = describe_output_difference(trial.eager_output, sample.exact, local_only)
    return replace(report, dispatch=dispatch, output=output or DISPATCH_AGREES)


def prove_ranks(
    case: RankCase,
    pool: AnyRanks,
    machine: Machine | None = None,
    build: RankBuild = build_kernel,
    *,
    checks: Sequence[Check] = RANK_CHECKS,
    timeout: float = 300,
) -> Proof:
    """Run the checks of a case on every rank of a pool.

    pool: a pool with case.world_size ranks.
    machine: the machine to run on; None means the current one with the device of the pool's
        backend.
    build: makes a rank's kernel from (case, machine, poison, group); must be picklable.
    checks: the checks, in the order in which they run.
    timeout: seconds after which a rank that does not respond counts as failed.

    Raises ConfigurationError if the pool has another number of ranks, and IncompatibleError if the
    pairing is refused.
    """
    if pool.world_size != case.world_size:
        need = f"{case.world_size} ranks, as the case says"
        raise ConfigurationError("the pool", got=f"{pool.world_size} ranks", need=need)
    machine = machine or machine_of(pool)
    verdict = case.verdict(machine)
    if not verdict.ok:
        raise IncompatibleError(verdict.pairing, verdict.rejections)
    return prove_unchecked(case, pool, machine, build, checks=checks, timeout=timeout)


def prove_unchecked(
    case: RankCase,
    pool: AnyRanks,
    machine: Machine,
    build: RankBuild,
    *,
    checks: Sequence[Check],
    timeout: float,
) -> Proof:
    """Run `prove_ranks` without validation, for ranks whose source code may have been mutated."""
    start = time.perf_counter()
    failures: list[str] = []
    try:
        task = case, machine, build, tuple(checks)
        reports = dict(enumerate(pool.run(run_checks, *task, timeout=timeout)))
    except RankError as error:
        reports = error.results
        for rank, failure in error.failures.items():
            failures += [f"rank {rank}: {line}" for line in _extract_findings(failure)]
    for rank, report in sorted(reports.items()):
        failures += [f"rank {rank}: {finding}" for finding in report.findings]
    failures += _find_first_difference(reports)
    seconds = time.perf_counter() - start
    is_complete = len(reports) == case.world_size
    worst = (
        max(reports.values(), key=_compute_error_ratio)
        if is_complete
        else RankReport((), math.inf, 0.0, 0)
    )
    invalid_ids = sum(report.invalid_ids for report in reports.values())
    return Proof(case, machine, worst.error, worst.bound, tuple(failures), seconds, invalid_ids)


def _find_first_difference(reports: Mapping[int, RankReport]) -> list[str]:
    """If an output is wrong, return one line about the first difference.

    Differences of the dispatch come first, because they explain wrong outputs.
    """
    wrong_reports = {rank: report for rank, report in reports.items() if report.output}
    if not wrong_reports:
        return []
    for rank, report in sorted(reports.items()):
        if report.dispatch:
            return [f"rank {rank} differs in {report.dispatch}"]
    rank, report = min(wrong_reports.items())
    return [f"rank {rank} differs in {report.output}"]


def machine_of(pool: AnyRanks) -> Machine:
    """Return the current machine with the device of the pool's backend."""
    return this_machine(device="cpu" if pool.backend == "gloo" else "cuda")


def _compute_error_ratio(report: RankReport) -> float:
    return report.error / report.bound if report.bound else math.inf


def _extract_findings(failure: str) -> list[str]:
    """Extract the findings, or else the final error, from the message of a failed rank."""
    findings_text = failure.partition(f"{CheckError.__name__}: ")[2]
    if findings_text:
        return findings_text.splitlines()
    if failure.startswith("Traceback"):
        return [f"raised {failure.strip().splitlines()[-1]}"]
    return [failure.strip()]
