"""Cases that run on a chosen path of TritonExperts. A path implements the grouped GEMMs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from experts.triton.configs.select import choose_config, override_config
from experts.triton.launch_config import MoEConfig
from experts.triton.standard import supported_paths
from modular_kernel import check
from modular_kernel.spec.problem import Combine, Machine, Problem
from modular_kernel.testing import Case, Proof, prove
from modular_kernel.testing.cases.inputs import ORDINARY, InputVariation
from modular_kernel.testing.cases.lists import BASE

PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
GPT_OSS_ACTIVATION = "swiglu_oai:alpha=1.702,limit=1.2,interleaved=true"
# Base problems for paths with quantized weights and unquantized rows. LARGE has at least 150 rows
# per expert, so that each expert has full tiles and a partial last tile. Some last tiles have more
# than 64 rows, others have fewer.
SMALL = replace(BASE, dtype=torch.bfloat16, hidden=160, intermediate=224)
LARGE = replace(SMALL, tokens=391, hidden=320, intermediate=448)
CHANGES: tuple[dict[str, object], ...] = (
    {"bias": True, "activation": GPT_OSS_ACTIVATION},
    {"activation": "relu2", "bias": True},
    {"activation": "gelu", "combine": Combine.TOPK_UNWEIGHTED},
    {"expert_map": True, "local_experts": 3},
    {"inplace": True, "routed_scaling_factor": 2.5},
)
ROUTINGS = ("uniform", "zipf", "skips", "out_of_range", "empty_experts", "all_to_one")


def cases_on(path: str, variants: Iterable[tuple[Problem, str]]) -> list[Case]:
    """Return the distinct cases for which the part may select this path."""
    candidates = (Case(*PAIR, problem, routing) for problem, routing in variants)
    return [
        case
        for case in dict.fromkeys(candidates)
        if path in supported_paths(case.problem) and check(*PAIR, case.problem).ok
    ]


def prove_with_config(
    config: MoEConfig,
    paths: tuple[str, ...],
    problem: Problem,
    routing: str,
    machine: Machine,
    variation: InputVariation = ORDINARY,
) -> Proof:
    """Prove a case in which every call launches `config` on one of these paths."""
    with override_config(config):
        assert choose_config(problem, 1, paths) == config
        return prove(Case(*PAIR, problem, routing, variation=variation), machine)


def quantized_variants(
    quants: Sequence[str],
    changes: Sequence[dict[str, object]],
    bases_to_change: Sequence[tuple[Problem, str]],
) -> list[tuple[Problem, str]]:
    """Return pairs of a problem and a routing for each scheme in `quants`.

    SMALL and LARGE are combined with every routing, and each of `changes` is applied to each
    problem of `bases_to_change`.
    """
    variants: list[tuple[Problem, str]] = []
    for quant in quants:
        small, large = (replace(base, quant=quant) for base in (SMALL, LARGE))
        variants += [(base, routing) for routing in ROUTINGS for base in (small, large)]
        for base, routing in bases_to_change:
            variants += [(replace(base, quant=quant, **change), routing) for change in changes]  # type: ignore[arg-type]
    return variants
