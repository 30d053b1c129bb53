"""Find the valid pairings of a problem by the compatibility rules, before anything is built.

A pairing is a pair of parts: a PrepareAndFinalize and an experts class. `compose` considers only
the pairings that this module finds valid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.compatibility.rules import judge
from modular_kernel.compatibility.support import Rejection, Verdict
from modular_kernel.operators.kernel_cache import (
    NO_EP,
    can_load_library,
    list_default_experts,
)
from modular_kernel.select.selection import Pair
from modular_kernel.spec.problem import Machine, Problem

_INTERPRETED = "Triton's interpreter is enabled in this process, so times are not meaningful"


@dataclass(frozen=True)
class Candidates:
    """All pairings of the installed parts, judged for each requested number of tokens.

    order: the pairings that are valid for some number of tokens, with the default pairing first.
    valid: the valid pairings, by number of tokens.
    refused: verdicts of the pairings that are not valid for any number of tokens. They are for the
        largest number of tokens.
    untimeable: valid pairings whose times would be meaningless on this machine, with the reason.
    capturable: valid pairings that can be captured in a CUDA graph.
    """

    order: tuple[Pair, ...]
    valid: dict[int, tuple[Pair, ...]]
    refused: tuple[Verdict, ...]
    untimeable: dict[Pair, str]
    capturable: frozenset[Pair]


def find_candidates(
    problem: Problem, machine: Machine, tokens: Sequence[int], *, replicated: bool = False
) -> Candidates:
    """Judge every pairing of the installed parts at each number of tokens.

    replicated: whether all ranks pass the same tokens. Over several ranks, parts with another
        `requires.replicated_input` are refused.
    """
    verdicts = {t: _judge_all(problem.with_tokens(t), machine, replicated) for t in tokens}
    valid = {t: tuple(_get_pair(v) for v in verdicts[t] if v.ok) for t in verdicts}
    valid_somewhere = dict.fromkeys(pair for t in sorted(valid, reverse=True) for pair in valid[t])
    capturable = frozenset(pair for pair in valid_somewhere if _is_capturable(pair, problem))
    # Parts without Triton kernels are included, because they call operations with Triton kernels.
    untimeable = dict.fromkeys(valid_somewhere, _INTERPRETED) if machine.interpreter else {}
    interpreted = {pair for pair in untimeable if _uses_triton(pair)}
    order = sorted(
        valid_somewhere,
        key=lambda pair: (pair in interpreted, pair not in capturable, _takes_batched_rows(pair)),
    )
    order = _move_default_first(order, problem, machine)
    refused = [v for v in verdicts[max(verdicts)] if _get_pair(v) not in valid_somewhere]
    return Candidates(tuple(order), valid, tuple(refused), untimeable, capturable)


def _move_default_first(order: list[Pair], problem: Problem, machine: Machine) -> list[Pair]:
    """Move the default pairing to the front.

    Its experts part is the one that `select_default_experts` returns. Its PrepareAndFinalize is
    MoEPrepareAndFinalizeNoEP on one rank, and the first PrepareAndFinalize of `order` over several
    ranks.
    """
    if not order:
        return order
    prepare_finalize = NO_EP if problem.parallel.world_size == 1 else order[0][0]
    names = list_default_experts(problem, machine.device)
    pairs = [(prepare_finalize, name) for name in names if (prepare_finalize, name) in order]
    # Libraries of a described machine need not be installed on this one.
    is_described = machine != this_machine(device=machine.device)
    default = next((pair for pair in pairs if is_described or can_load_library(pair[1])), order[0])
    return [default, *(pair for pair in order if pair != default)]


def _judge_all(problem: Problem, machine: Machine, replicated: bool) -> list[Verdict]:
    """Return a verdict for each pairing: of the lowest rank that rejects it, or of rank 0."""
    catalog = load_catalog()
    catalog.require_pairs()
    world_size = problem.parallel.world_size
    problems = [
        replace(problem, parallel=replace(problem.parallel, rank=r)) for r in range(world_size)
    ]
    pairing_verdicts = []
    for part_name in catalog.names("prepare_finalize"):
        prepare_finalize = catalog.prepare_finalize(part_name)
        has_wrong_input = (
            world_size > 1 and prepare_finalize.requires.replicated_input is not replicated
        )
        for name in catalog.names("experts"):
            verdicts = [
                judge(prepare_finalize, catalog.experts(name), rank_problem, machine)
                for rank_problem in problems
            ]
            verdict = next((v for v in verdicts if not v.ok), verdicts[0])
            if has_wrong_input:
                verdict = replace(
                    verdict,
                    rejections=(*verdict.rejections, _make_input_rejection(part_name, replicated)),
                )
            pairing_verdicts.append(verdict)
    return pairing_verdicts


def _make_input_rejection(name: str, replicated: bool) -> Rejection:
    same, different = "the same tokens on every rank", "its own tokens on every rank"
    got, need = (different, same) if replicated else (same, different)
    hint = "" if replicated else "use replicated=True (--replicated) for such parts"
    return Rejection("replicated_input", (name, "problem"), got, need, hint)


def _get_pair(verdict: Verdict) -> Pair:
    return verdict.prepare_finalize, verdict.experts


def _is_capturable(pair: Pair, problem: Problem) -> bool:
    catalog = load_catalog()
    prepare_finalize, experts = catalog.prepare_finalize(pair[0]), catalog.experts(pair[1])
    return prepare_finalize.requires.captures(problem) and experts.requires.graph_capturable


def _uses_triton(pair: Pair) -> bool:
    catalog = load_catalog()
    parts = catalog.prepare_finalize(pair[0]), catalog.experts(pair[1])
    return any(part.requires.triton for part in parts)


def _takes_batched_rows(pair: Pair) -> bool:
    """Return whether the experts use the batched format, in which many rows may be padding."""
    return load_catalog().experts(pair[1]).requires.activation_format.value == "batched_experts"
