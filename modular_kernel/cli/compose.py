"""`mk compose`: time the valid pairings of a problem and record the fastest per token count."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from modular_kernel.cli import output
from modular_kernel.cli.command import option
from modular_kernel.cli.compose_output import print_explanation, print_text, progress_notes, record
from modular_kernel.cli.options import TOKENS_LIST, AsJson, ProblemOptions
from modular_kernel.cli.ranks import Backend, host_of, with_launcher
from modular_kernel.errors import ConfigurationError, IncompatibleError

if TYPE_CHECKING:
    from modular_kernel.select.autotune import Terms
    from modular_kernel.select.choice import Choice
    from modular_kernel.spec.problem import Machine, Problem

_MAX_TOKENS_ON_GPU = 8192
# Must match modular_kernel.select.autotune.BUDGET_S, whose import would load torch.
_BUDGET_S = 20.0
_AFTER_BUDGET_S = 300  # seconds for ranks to start, create weights and finish their last timing


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
    budget: Annotated[float, option("Total seconds, including compilation; 0 times nothing.")] = (
        _BUDGET_S
    )
    routing: Annotated[str, option("Routing pattern: uniform, zipf, zipfA or hotN (hot1).")] = (
        "uniform"
    )
    replicated: Annotated[bool, option("Every rank passes the same tokens.")] = False
    fresh: Annotated[bool, option("Ignore cached timings and measure again.")] = False

    def max_tokens(self, options: ProblemOptions, *, gpu: bool) -> int | None:
        """Return the maximum number of tokens per call; None means the default of a problem.

        It is --tokens, else the maximum of --tokens-list, else 8192 on a GPU.
        """
        if options.tokens is not None:
            return options.tokens
        if self.tokens_list is not None:
            return max(self.tokens_list)
        return _MAX_TOKENS_ON_GPU if gpu else None

    def terms(self) -> "Terms":
        from modular_kernel.select.autotune import Terms

        return Terms(
            tokens=self.tokens_list,
            budget=self.budget,
            routing=self.routing,
            replicated=self.replicated,
            fresh=self.fresh,
        )


def compose(
    *,
    options: ProblemOptions,
    search: ComposeOptions,
    explain: Annotated[
        bool, option("Show the times of every pairing, or why it was not timed.")
    ] = False,
    backend: Backend = None,
    as_json: AsJson = None,
) -> None:
    """Choose a pairing for each token count: the default pairing, or a faster one.

    Valid pairings are compared with a float64 reference and timed interleaved with the default
    pairing. Pairings that are slower than the default according to the record of times shipped with
    this package are not timed. Another pairing replaces the default if it is faster by more than
    the measurement noise, or if nothing was timed and the record is unambiguous.

    Times are cached in MK_CACHE_DIR by device, package versions and problem. The next run of the
    same command, or mk.compose() in code, reads them from there; if the budget did not suffice, it
    continues where the last run stopped. --tokens is the maximum number of tokens per call
    (default: 8192 on a GPU, else 16).

    --model takes a name or the path of a Hugging Face config.json. With --world-size N all ranks
    measure together, the slowest rank determines the time, and all ranks choose the same pairing.

    Without a GPU only parts in plain torch are timed. Triton's interpreter stays off, because its
    timings are meaningless.

    Exits with 1 if every pairing is refused, and with 2 on bad usage.
    """
    options = with_launcher(options)
    if search.replicated and (options.world_size or 1) == 1:
        raise ConfigurationError(
            "--replicated", got="a single rank", need="--world-size N in addition"
        )
    terms = search.terms()
    with host_of(options.world_size, backend) as host:
        gpu = host.machine.device == "cuda"
        options = replace(options, tokens=search.max_tokens(options, gpu=gpu))
        problem = options.problem()
        if host.pool is None:
            if as_json != output.STDOUT:
                terms = replace(terms, on_bucket=progress_notes(problem))
            from modular_kernel.select.autotune import choose

            choice = choose(problem, host.machine, terms=terms)
        else:
            limit = terms.budget + _AFTER_BUDGET_S
            choices = host.pool.run(_choose_on_rank, problem, host.machine, terms, timeout=limit)
            choice = choices[0]
    if not choice.segments:
        reasons = [r for verdict in choice.candidates.refused for r in verdict.rejections]
        raise IncompatibleError(f"every pairing for {problem}", reasons)

    def show() -> None:
        print_text(choice)
        if explain:
            print_explanation(choice)

    output.print_result(record(choice), as_json, show)


def _choose_on_rank(
    rank: int, _world: int, group: Any, problem: "Problem", machine: "Machine", terms: "Terms"
) -> "Choice":
    """Choose on one rank of the pool. All ranks return the same choice."""
    from modular_kernel.select.autotune import choose

    rank_problem = replace(problem, parallel=replace(problem.parallel, rank=rank))
    return choose(rank_problem, machine, group=group, terms=terms)
