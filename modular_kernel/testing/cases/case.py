"""`Case`: one test case, and the command that repeats it alone on any machine."""

import shlex
from dataclasses import dataclass

from modular_kernel.spec.problem import Combine, Problem, dtype_name
from modular_kernel.testing.cases.inputs import ORDINARY, InputVariation


@dataclass(frozen=True)
class Case:
    """One test case: the names of a pairing, a problem, a kind of routing, and a seed.

    Attributes:
        prepare_finalize, experts: names of the two parts in the catalog.
        problem: the problem of the layer and the call.
        routing: one of `inputs.ROUTING_KINDS`.
        seed: seed of the inputs.
        variation: memory layout and values of the tensors.
        interleaved_calls: whether calls alternate with calls of a second kernel, made for another
            problem.
    """

    prepare_finalize: str
    experts: str
    problem: Problem
    routing: str = "uniform"
    seed: int = 0
    variation: InputVariation = ORDINARY
    interleaved_calls: bool = False

    def __str__(self) -> str:
        seed = f"-seed{self.seed}" if self.seed else ""
        pairing = f"{self.prepare_finalize}+{self.experts}"
        suffix = "".join(
            f"-{name}" if value is True else f"-{value}"
            for name, value in self._get_non_default_options().items()
        )
        return f"{pairing}-{self.problem}-{self.routing}{suffix}{seed}"

    def _get_non_default_options(self) -> dict[str, object]:
        options = {
            "layout": (self.variation.layout, ORDINARY.layout),
            "values": (self.variation.values, ORDINARY.values),
            "named": (self.variation.slot_pattern, ORDINARY.slot_pattern),
            "nan": (self.variation.nan, ORDINARY.nan),
            "own-scales": (self.variation.has_short_scales, False),
            "by-turns": (self.interleaved_calls, False),
        }
        return {name: value for name, (value, default) in options.items() if value != default}

    def options(self) -> dict[str, object]:
        """Return the options of `mk test --one` that are not part of the problem."""
        return {"routing": self.routing, "seed": self.seed, **self._get_non_default_options()}


def command(case: Case) -> str:
    """Return the command line that runs this case alone."""
    problem = case.problem
    options: dict[str, object] = {
        "pf-type": case.prepare_finalize,
        "experts-type": case.experts,
        "tokens": problem.tokens,
        "hidden": problem.hidden,
        "intermediate": problem.intermediate,
        "experts": problem.experts,
        "top-k": problem.top_k,
        "dtype": dtype_name(problem.dtype),
        "quant": problem.quant,
        "activation": problem.act,
        **_get_non_default_fields(problem),
        **case.options(),
    }
    arguments = ["mk", "test", "--one"]
    for name, value in options.items():
        arguments += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(arguments)


def _get_non_default_fields(problem: Problem) -> dict[str, object]:
    ids_dtype = problem.ids_dtype
    options = {
        "local-experts": (problem.local_experts, None),
        "ids-dtype": (None if ids_dtype is None else dtype_name(ids_dtype), None),
        "bias": (problem.bias, False),
        "expert-map": (problem.expert_map, False),
        "router-weight-on-input": (problem.apply_router_weight_on_input, False),
        "routed-scaling-factor": (problem.routed_scaling_factor, 1.0),
        "combine": (problem.combine.value, Combine.SUM.value),
        "inplace": (problem.inplace, False),
        "fp32-precision": (problem.fp32_precision, "ieee"),
        "chunk-tokens": (problem.chunk_tokens, None),
        "max-received": (problem.max_received, None),
        "graph": (problem.graph, False),
        "lora": (problem.lora, "none"),
        "batch-invariant": (problem.batch_invariant, False),
        "world-size": (problem.parallel.world_size, 1),
        "ranks-per-host": (problem.parallel.ranks_per_host, None),
    }
    return {name: value for name, (value, default) in options.items() if value != default}
