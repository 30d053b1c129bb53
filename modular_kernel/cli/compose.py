"""`mk compose`: time the valid pairings of a problem here, and keep which is fastest when."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modular_kernel.cli import output
from modular_kernel.cli.compose_output import explain_text, print_text, record, teller
from modular_kernel.cli.list_options import token_numbers
from modular_kernel.cli.options import AsJson, ProblemOptions
from modular_kernel.cli.ranks import Backend, host_of, launched
from modular_kernel.errors import ConfigurationError, IncompatibleError

if TYPE_CHECKING:
    from modular_kernel.select.autotune import Terms
    from modular_kernel.select.choice import Choice
    from modular_kernel.spec.problem import Machine, Problem

_TOKENS_OF_A_GPU = 8192
_BUDGET_S = 20.0  # as select.choosing has it, which imports torch
_AFTER_BUDGET_S = 300  # for ranks to start, make weights and finish what they began


@dataclass(frozen=True, kw_only=True)
class Choosing:
    """What is measured, and within what."""

    tokens_list: Annotated[
        str | None,
        typer.Option(
            help="Tokens to measure, such as 1,16,128.  [default: powers of two to --tokens]",
            show_default=False,
        ),
    ] = None
    budget: Annotated[
        float, typer.Option(help="Seconds in all, compiling included; 0 times nothing.")
    ] = _BUDGET_S
    routing: Annotated[str, typer.Option(help="uniform, zipf, zipfA or hotN (hot1).")] = "uniform"
    replicated: Annotated[
        bool, typer.Option("--replicated", help="Every rank passes the same tokens.")
    ] = False
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Time again what the cache already has.")
    ] = False

    def most_tokens(self, options: ProblemOptions, *, gpu: bool) -> int | None:
        """Tokens of the problem where --tokens does not say it; None leaves the default."""
        if options.tokens is not None:
            return options.tokens
        if self.tokens_list is not None:
            return max(token_numbers(self.tokens_list))
        return _TOKENS_OF_A_GPU if gpu else None

    def terms(self) -> "Terms":
        from modular_kernel.select.autotune import Terms

        tokens = None if self.tokens_list is None else token_numbers(self.tokens_list)
        return Terms(
            tokens=tokens,
            budget=self.budget,
            routing=self.routing,
            replicated=self.replicated,
            fresh=self.fresh,
        )


def compose(
    *,
    options: ProblemOptions,
    choosing: Choosing,
    explain: Annotated[
        bool, typer.Option("--explain", help="Every pairing: its times, or why it has none.")
    ] = False,
    backend: Backend = None,
    as_json: AsJson = None,
) -> None:
    """Choose a pairing for every number of tokens: the default one, or one known to be faster.

    Every pairing is judged. Of the valid ones those that may be faster than the default, by a
    record that comes with this package, are checked against a float64 oracle and timed by turns
    with it; a pairing that was never recorded is timed, too. Another one than the default serves
    where it is faster by more than the noise, or where the record leaves no doubt.

    Times are kept in MK_CACHE_DIR for the device, the versions and the problem, so the same
    command (and compose() in code) answers at once the next time, and one with too short a budget
    is continued. --tokens is the most tokens of a call: 8192 on a GPU, else 16.

    --model takes a name or the path of a Hugging Face config.json. With --world-size N the ranks
    measure together, the slowest counts, and all choose the same.

    Without a GPU parts in plain torch are timed; Triton's interpreter is left off, because its
    times say nothing.

    Exits with 1 if every pairing is refused; 2 is bad usage.
    """
    options = launched(options)
    if choosing.replicated and (options.world_size or 1) == 1:
        raise ConfigurationError("--replicated", got="one rank", need="--world-size N beside it")
    terms = choosing.terms()
    with host_of(options.world_size, backend) as host:
        gpu = host.machine.device == "cuda"
        options = replace(options, tokens=choosing.most_tokens(options, gpu=gpu))
        problem = options.problem()
        if host.pool is None:
            if as_json != output.STDOUT:
                terms = replace(terms, tell=teller(problem))
            from modular_kernel.select.autotune import choose

            choice = choose(problem, host.machine, terms=terms)
        else:
            limit = terms.budget + _AFTER_BUDGET_S
            choices = host.pool.run(_on_rank, problem, host.machine, terms, timeout=limit)
            choice = choices[0]
    if not choice.segments:
        reasons = [r for verdict in choice.candidates.refused for r in verdict.rejections]
        raise IncompatibleError(f"every pairing for {problem}", reasons)

    def show() -> None:
        print_text(choice)
        if explain:
            explain_text(choice)

    output.answer(record(choice), as_json, show)


def _on_rank(
    rank: int, _world: int, group: Any, problem: "Problem", machine: "Machine", terms: "Terms"
) -> "Choice":
    """Do what one rank of the pool does; all return the same choice."""
    from modular_kernel.select.autotune import choose

    mine = replace(problem, parallel=replace(problem.parallel, rank=rank))
    return choose(mine, machine, group=group, terms=terms)
