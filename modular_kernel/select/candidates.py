"""Which pairings can serve a problem at all, judged before anything is built."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from modular_kernel.catalog import load_catalog
from modular_kernel.compatibility.rules import judge
from modular_kernel.compatibility.support import Rejection, Verdict
from modular_kernel.operators.kernel_cache import NO_EP
from modular_kernel.select.record import Pair
from modular_kernel.spec.problem import Machine, Problem

# As modular_kernel.operators.kernel_cache.usual_experts has them.
_USUAL_EXPERTS = {"cuda": ("TritonExperts", "TorchExperts"), "cpu": ("TorchExperts",)}
_INTERPRETED = "Triton's interpreter is on in this process, so that no time would say anything"


@dataclass(frozen=True)
class Candidates:
    """Every pairing, judged for every number of tokens asked for.

    order: the valid ones; the untuned default first, which serves whatever no other pairing is
    known to be faster at. valid: by tokens. refused: with every reason, at the most tokens that
    were asked for. silent: pairings that can run here and whose time would say nothing, and why.
    graph: those that can be captured in a CUDA graph.
    """

    order: tuple[Pair, ...]
    valid: dict[int, tuple[Pair, ...]]
    refused: tuple[Verdict, ...]
    silent: dict[Pair, str]
    graph: frozenset[Pair]


def find(
    problem: Problem, machine: Machine, tokens: Sequence[int], *, replicated: bool = False
) -> Candidates:
    """Judge every pairing.

    replicated: every rank passes the same tokens (with several ranks only); parts of the other kind
    compute another layer and are refused.
    """
    verdicts = {t: _verdicts(problem.with_tokens(t), machine, replicated) for t in tokens}
    valid = {t: tuple(_pair(v) for v in found if v.ok) for t, found in verdicts.items()}
    ever = dict.fromkeys(pair for t in sorted(valid, reverse=True) for pair in valid[t])
    graph = frozenset(pair for pair in ever if _captures(pair))
    # Plain parts too: operations that they share with others are interpreted as well.
    silent = dict.fromkeys(ever, _INTERPRETED) if machine.interpreter else {}
    slow = {pair for pair in silent if _triton(pair)}
    order = sorted(ever, key=lambda pair: (pair in slow, pair not in graph, _batched(pair)))
    order = _default_first(order, problem, machine)
    refused = [v for v in verdicts[max(verdicts)] if _pair(v) not in ever]
    return Candidates(tuple(order), valid, tuple(refused), silent, graph)


def _default_first(order: list[Pair], problem: Problem, machine: Machine) -> list[Pair]:
    """Move what runs without any choice to the front: the usual experts.

    One rank has them behind MoEPrepareAndFinalizeNoEP, several behind the first exchange.
    """
    if not order:
        return order
    exchange = NO_EP if problem.parallel.world_size == 1 else order[0][0]
    usual = [(exchange, experts) for experts in _USUAL_EXPERTS[machine.device]]
    default = next((pair for pair in usual if pair in order), order[0])
    return [default, *(pair for pair in order if pair != default)]


def _verdicts(problem: Problem, machine: Machine, replicated: bool) -> list[Verdict]:
    """One for each pairing; of several ranks the first that is refused, or rank 0's."""
    catalog = load_catalog()
    catalog.require_pairs()
    world = problem.parallel.world_size
    problems = [replace(problem, parallel=replace(problem.parallel, rank=r)) for r in range(world)]
    found = []
    for pf_name in catalog.names("prepare_finalize"):
        pf = catalog.prepare_finalize(pf_name)
        other = world > 1 and pf.requires.replicated_input is not replicated
        for name in catalog.names("experts"):
            verdicts = [judge(pf, catalog.experts(name), of_rank, machine) for of_rank in problems]
            verdict = next((v for v in verdicts if not v.ok), verdicts[0])
            if other:
                verdict = replace(
                    verdict, rejections=(*verdict.rejections, _input(pf_name, replicated))
                )
            found.append(verdict)
    return found


def _input(name: str, replicated: bool) -> Rejection:
    same, own = "the same tokens on every rank", "its own tokens on every rank"
    got, need = (own, same) if replicated else (same, own)
    hint = "" if replicated else "replicated=True (--replicated) asks for such parts"
    return Rejection("replicated_input", (name, "problem"), got, need, hint)


def _pair(verdict: Verdict) -> Pair:
    return verdict.prepare_finalize, verdict.experts


def _captures(pair: Pair) -> bool:
    catalog = load_catalog()
    parts = catalog.prepare_finalize(pair[0]), catalog.experts(pair[1])
    return all(part.requires.graph_capturable for part in parts)


def _triton(pair: Pair) -> bool:
    catalog = load_catalog()
    parts = catalog.prepare_finalize(pair[0]), catalog.experts(pair[1])
    return any(part.requires.triton for part in parts)


def _batched(pair: Pair) -> bool:
    """Rows for every expert, filled or not: a last resort where nothing was measured."""
    return load_catalog().experts(pair[1]).requires.activation_format.value == "batched_experts"
