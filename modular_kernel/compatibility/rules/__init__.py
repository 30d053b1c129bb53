"""Rules that decide whether two parts can serve a problem on a machine, and `judge`.

A rule is a generator function that takes a `Pairing` and yields a Rejection for each violation. All
rules always run. To add a rule, write a function, add it to RULES, and add a case that it refuses
to the tests; they fail if a rule has none.
"""

from functools import partial
from typing import TYPE_CHECKING

from modular_kernel.utils.argument_checks import expect

if TYPE_CHECKING:
    from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.compatibility.rules import machine as machines
from modular_kernel.compatibility.rules import pair
from modular_kernel.compatibility.rules import problem as problems
from modular_kernel.compatibility.support import (
    ExpertsRequirements,
    Pairing,
    PrepareFinalizeRequirements,
    Rejection,
    Requirements,
    RuleFunction,
    Verdict,
    collect_rejections,
)
from modular_kernel.spec.problem import Machine, Problem, Reduce

RULES: dict[str, RuleFunction] = {
    "format": pair.formats,
    "device": machines.device,
    "arch": machines.arch,
    "archs": machines.archs,
    "package": machines.package,
    "dtype": problems.dtype,
    "fp32_precision": problems.fp32_precision,
    "top_k": problems.top_k,
    "hidden": problems.hidden,
    "intermediate": problems.intermediate,
    "quant": problems.quant,
    "dispatch_quant": pair.dispatch_quant,
    "scale_layout": pair.scale_layout,
    "quant_block": problems.quant_block,
    "blocks": problems.blocks,
    "packing": problems.packing,
    "min_tokens": problems.min_tokens,
    "max_experts": problems.max_experts,
    "addressing": problems.addressing,
    "world_size": problems.world_size,
    "hosts": problems.hosts,
    "max_received": problems.max_received,
    "placement": problems.placement,
    "capacity": problems.capacity,
    "capacity_multiple": pair.capacity_multiple,
    "ids_dtype": problems.ids_dtype,
    "reduce": pair.reduce,
    "keep_topk": pair.keep_topk,
    "router_weight_on_input": pair.router_weight_on_input,
    "activation": problems.activation,
    "bias": problems.bias,
    "padding": pair.padding,
    "invalid_rows": pair.invalid_rows,
    "expert_map": pair.expert_map,
    "chunking": problems.chunking,
    "inplace": problems.required_property("inplace", lambda problem: problem.inplace, "inplace"),
    "graph": problems.required_property("graph", lambda problem: problem.graph, "graph_capturable"),
    "deterministic": problems.required_property(
        "deterministic", lambda p: p.deterministic, "deterministic"
    ),
    "batch_invariant": problems.batch_invariant,
    "asynchronous": problems.asynchronous,
    "lora": problems.lora,
}


def judge(
    pf: "type[PrepareAndFinalize]",
    experts: "type[PermuteExpertsUnpermute]",
    problem: Problem,
    machine: Machine,
) -> Verdict:
    """Judge one pairing. A pure function of the two declarations, the problem and the machine."""
    expect("problem", problem, Problem)
    expect("machine", machine, Machine)
    pairing = Pairing(
        pf.__name__, pf.requires, experts.__name__, experts.requires, problem, machine
    )
    rejections = [r for rule in RULES.values() for r in rule(pairing)]
    rejections += collect_rejections(pf.__name__, partial(pf.extra_rejections, problem, machine))
    rejections += collect_rejections(
        experts.__name__, partial(experts.extra_rejections, problem, machine)
    )
    return Verdict(pf.__name__, experts.__name__, problem, machine, tuple(rejections))


def unavailable(name: str, requires: Requirements, machine: Machine) -> tuple[Rejection, ...]:
    """Return why a part cannot run on `machine` in any pairing; empty if it can."""
    any_problem, fmt = Problem(1, 1, 1, 1, 1), requires.activation_format
    pf = PrepareFinalizeRequirements(activation_format=fmt, reduces=frozenset(Reduce))
    ex = ExpertsRequirements(activation_format=fmt, reduce=Reduce.NOOP)
    if isinstance(requires, ExpertsRequirements):
        pairing = Pairing("", pf, name, requires, any_problem, machine)
    else:
        assert isinstance(requires, PrepareFinalizeRequirements)
        pairing = Pairing(name, requires, "", ex, any_problem, machine)
    rules = machines.device, machines.arch, machines.archs, machines.package
    rejections = [r for rule in rules for r in rule(pairing)]
    return tuple(r for r in rejections if name in r.parties)
