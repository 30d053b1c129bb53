"""`mk compose`: times the valid pairings of a problem and chooses one for each number of tokens.

`mk.compose` makes the same choice in Python. This module converts the options, and runs the
measurement in this process or on a pool of ranks.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from modular_kernel.cli import output
from modular_kernel.cli.command import option
from modular_kernel.cli.compose_output import (
    make_progress_callback,
    make_record,
    print_explanation,
    print_text,
)
from modular_kernel.cli.options import TOKENS_LIST, AsJson, MeasuredProblemOptions, ProblemOptions
from modular_kernel.cli.ranks import Backend, apply_launcher, open_executor
from modular_kernel.cli.refusals import explain_defaults, make_refusal
from modular_kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from modular_kernel.select.autotune import MeasurementOptions
    from modular_kernel.select.pairing_choice import PairingChoice
    from modular_kernel.spec.problem import Machine, Problem

_MAX_TOKENS_ON_GPU = 8192
# Must match modular_kernel.select.autotune.BUDGET_S, whose import would load torch.
_BUDGET_S = 20.0
# Ranks time out this long after the budget, which leaves them time to start, to create weights and
# to finish the last timing.
_TIMEOUT_MARGIN_S = 300


@dataclass(frozen=True, kw_only=True)
class ComposeOptions:
    """Options of the measurement."""

    tokens_list: Annotated[
        tuple[int, ...] | None,
        option(
            "Token counts to measure, such as 1,16,128.  [default: powers of two to --tokens]",
            type=TOKENS_LIST,
        ),
    ] = None
    budget: Annotated[
        float, option("Total seconds, including compilation. With 0, nothing is timed.")
    ] = _BUDGET_S
    routing: Annotated[str, option("Routing pattern: uniform, zipf, zipfA or hotN (hot1).")] = (
        "uniform"
    )
    replicated: Annotated[bool, option("All ranks have the same tokens.")] = False
    ignore_saved: Annotated[bool, option("Ignore cached timings and measure again.")] = False

    def resolve_max_tokens(self, options: ProblemOptions, *, has_gpu: bool) -> int | None:
        """Return the maximum number of tokens per call, or None for the default of a problem.

        In this order, the result is --tokens, the maximum of --tokens-list, or 8192 on a GPU.
        """
        if options.tokens is not None:
            return options.tokens
        if self.tokens_list is not None:
            return max(self.tokens_list)
        return _MAX_TOKENS_ON_GPU if has_gpu else None

    def to_measurement_options(self) -> "MeasurementOptions":
        from modular_kernel.select.autotune import MeasurementOptions

        return MeasurementOptions(
            tokens=self.tokens_list,
            budget=self.budget,
            routing=self.routing,
            replicated=self.replicated,
            ignore_saved=self.ignore_saved,
        )


def compose(
    *,
    options: MeasuredProblemOptions,
    measurement: ComposeOptions,
    explain: Annotated[
        bool, option("Show the times of every pairing, or why it was not timed.")
    ] = False,
    backend: Backend = None,
    as_json: AsJson = None,
) -> None:
    """Choose a pairing for each token count: the default pairing, or a faster one.

    The result of each valid pairing is compared with a float64 reference. Then the pairing and the
    default pairing are timed alternately. Pairings are not timed if they are slower than the
    default according to the record of times that is shipped with this package. Another pairing
    replaces the default if it is faster by more than the measurement noise, or if nothing was timed
    and it is clearly faster in the record.

    Times are cached in MK_CACHE_DIR by device, package versions and problem. Later runs of the same
    command, and mk.compose() in code, reuse them. If the budget runs out, the next run
    continues where the last one stopped. On a GPU, the
    default of --tokens is 8192.

    With --world-size N, all ranks measure together. The time of the slowest rank counts, and all
    ranks choose the same pairing.

    Without a GPU, only parts in plain torch are timed, because times in Triton's interpreter are
    meaningless.

    Exits with 1 if every pairing is refused, and with 2 on bad usage.
    """
    options = apply_launcher(options)
    if measurement.replicated and (options.world_size or 1) == 1:
        raise ConfigurationError(
            "--replicated", got="a single rank", need="--world-size N in addition"
        )
    measurement_options = measurement.to_measurement_options()
    with open_executor(options.world_size, backend) as executor:
        has_gpu = executor.machine.device == "cuda"
        layer_options = options.with_default_sizes(executor.machine.device)
        tokens = measurement.resolve_max_tokens(options, has_gpu=has_gpu)
        problem = replace(layer_options, tokens=tokens).problem()
        if executor.pool is None:
            if as_json != output.STDOUT:
                measurement_options = replace(
                    measurement_options, on_bucket=make_progress_callback(problem)
                )
            from modular_kernel.select.autotune import choose

            choice = choose(problem, executor.machine, options=measurement_options)
        else:
            timeout_s = measurement_options.budget + _TIMEOUT_MARGIN_S
            choices = executor.pool.run(
                _choose_on_rank, problem, executor.machine, measurement_options, timeout=timeout_s
            )
            choice = choices[0]
    if not choice.segments:
        with explain_defaults(options):
            raise make_refusal(f"every pairing for {problem}", choice.candidates.refused)

    def print_all() -> None:
        print_text(choice)
        if explain:
            print_explanation(choice)

    output.print_result(make_record(choice), as_json, print_all)


def _choose_on_rank(
    rank: int,
    _world: int,
    group: Any,
    problem: "Problem",
    machine: "Machine",
    options: "MeasurementOptions",
) -> "PairingChoice":
    """Choose a pairing on one rank of the pool. All ranks return the same choice."""
    from modular_kernel.select.autotune import choose

    rank_problem = replace(problem, parallel=replace(problem.parallel, rank=rank))
    return choose(rank_problem, machine, group=group, options=options)
