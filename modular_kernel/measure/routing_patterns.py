"""Random routings for benchmarks. A routing assigns K of E experts to each token.

uniform   every set of K experts is equally likely
zipfA     K draws without replacement, where the probability of the r-th most popular expert is
          proportional to 1 / r ** A; zipf means zipf1.2
hotN      every token uses the same N <= K experts, and K - N random experts; with hot1, one expert
          gets all tokens

Which experts are popular or hot is drawn for every input.
"""

import re
from dataclasses import dataclass

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import Routing

_KIND = re.compile(r"(uniform)|zipf(\d+(?:\.\d+)?)?|hot(\d+)")
_DEFAULT_ZIPF_EXPONENT = 1.2


@dataclass(frozen=True)
class RoutingKind:
    """A distribution of tokens over experts.

    kind: "uniform", "zipf" or "hot".
    value: the exponent A, or the number N of hot experts.
    """

    kind: str
    value: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "RoutingKind":
        """Parse a name such as "zipf1.2" (see the docstring of this module).

        Raises ConfigurationError if the name is invalid.
        """
        match = _KIND.fullmatch(text)
        if match is None:
            need = "uniform, zipf, zipfA (zipf1.2) or hotN (hot1)"
            raise ConfigurationError("routing", got=repr(text), need=need)
        if match[1]:
            return cls("uniform")
        if match[3]:
            return cls("hot", float(match[3]))
        return cls("zipf", float(match[2]) if match[2] else _DEFAULT_ZIPF_EXPONENT)

    def __str__(self) -> str:
        return self.kind if self.kind == "uniform" else f"{self.kind}{self.value:g}"


def check_top_k(problem: Problem) -> None:
    """Raise ConfigurationError if top_k exceeds the number of experts."""
    if problem.top_k > problem.experts:
        raise ConfigurationError("top_k", got=problem.top_k, need=f"<= experts = {problem.experts}")


def draw_routing(problem: Problem, kind: RoutingKind, generator: torch.Generator) -> Routing:
    """Draw the routing of `problem.tokens` tokens, with K distinct experts each.

    The router weights of a token are positive and sum to 1. The tensors are on the device of
    `generator`.
    """
    check_top_k(problem)
    tokens, top_k, experts = problem.tokens, problem.top_k, problem.experts
    device = generator.device
    scores_TE = torch.rand(tokens, experts, device=device, generator=generator)
    if kind.kind == "zipf":  # Gumbel-top-k: draws without replacement from log-odds plus noise
        popularity_rank_E = torch.randperm(experts, device=device, generator=generator) + 1
        noise_TE = -scores_TE.clamp(min=1e-20).log().neg().clamp(min=1e-20).log()
        scores_TE = noise_TE - kind.value * popularity_rank_E.float().log()
    elif kind.kind == "hot":
        hot_experts = torch.randperm(experts, device=device, generator=generator)[: int(kind.value)]
        scores_TE[:, hot_experts[:top_k]] += 2
    ids_TK = scores_TE.topk(top_k, dim=1).indices
    weights_TK = torch.rand(tokens, top_k, device=device, generator=generator) + 0.1
    weights_TK /= weights_TK.sum(1, keepdim=True)
    dtype = problem.ids_dtype or torch.int32
    return Routing(weights_TK.contiguous(), ids_TK.to(dtype).contiguous())


@dataclass(frozen=True)
class Load:
    """The work that a routing causes for the experts of this rank.

    pairs: number of (token, expert) pairs.
    touched: number of experts with at least one pair.
    skew: number of pairs of the busiest expert, divided by the mean over all experts.
    """

    pairs: int
    touched: int
    skew: float


def count_load(routing: Routing, problem: Problem, expert_map: torch.Tensor | None = None) -> Load:
    """Count the load of a routing on this rank. Synchronizes the device.

    expert_map: (E,) local index of each expert, -1 for experts on other ranks; None if all experts
        are on this rank.
    """
    ids = routing.topk_ids_TK.flatten().long()
    ids = ids[(ids >= 0) & (ids < problem.experts)]
    if expert_map is not None:
        ids = expert_map.long()[ids]
        ids = ids[ids >= 0]
    counts = torch.bincount(ids, minlength=problem.e)
    pairs = int(counts.sum())
    skew = float(counts.max()) * problem.e / pairs if pairs else 0.0
    return Load(pairs, int((counts > 0).sum()), skew)
