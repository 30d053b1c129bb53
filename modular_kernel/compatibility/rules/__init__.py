"""Rules that decide whether two parts can compute a problem on a machine, and `judge`.

A rule is a generator function that takes a `RuleInput` and yields a Rejection for each violation.
All rules always run, so that a verdict lists every violation. To add a rule, write a function, add
it to RULES, and write a test with a case that the rule refuses. The tests fail for a rule without
such a test.
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
    PrepareFinalizeRequirements,
    Rejection,
    Requirements,
    RuleFunction,
    RuleInput,
    Verdict,
    collect_rejections,
)
from modular_kernel.spec.problem import Machine, Problem, Reduce

RULES: dict[str, RuleFunction] = {
    "format": pair.check_formats,
    "device": machines.check_device,
    "arch": machines.check_arch,  # minimum compute capability
    "archs": machines.check_archs,  # list of supported compute capabilities
    "package": machines.check_package,
    "dtype": problems.check_dtype,
    "fp32_precision": problems.check_fp32_precision,
    "top_k": problems.check_top_k,
    "hidden": problems.check_hidden,
    "intermediate": problems.check_intermediate,
    "quant": problems.check_quant,
    "dispatch_quant": pair.check_dispatch_quant,
    "scale_layout": pair.check_scale_layout,
    "quant_block": problems.check_quant_block,
    "blocks": problems.check_blocks,
    "packing": problems.check_packing,
    "min_tokens": problems.check_min_tokens,
    "max_experts": problems.check_max_experts,
    "addressing": problems.check_addressing,
    "world_size": problems.check_world_size,
    "hosts": problems.check_hosts,
    "max_received": problems.check_max_received,
    "placement": problems.check_placement,
    "capacity": problems.check_capacity,
    "capacity_multiple": pair.check_capacity_multiple,
    "ids_dtype": problems.check_ids_dtype,
    "reduce": pair.check_reduce,
    "keep_topk": pair.check_keep_topk,
    "router_weight_on_input": pair.check_router_weight_on_input,
    "activation": problems.check_activation,
    "bias": problems.check_bias,
    "padding": pair.check_padding,
    "invalid_rows": pair.check_invalid_rows,
    "expert_map": pair.check_expert_map,
    "chunking": problems.check_chunking,
    "inplace": problems.make_property_rule("inplace", lambda problem: problem.inplace, "inplace"),
    "graph": problems.make_property_rule(
        "graph", lambda problem: problem.graph, "graph_capturable"
    ),
    "deterministic": problems.make_property_rule(
        "deterministic", lambda p: p.deterministic, "deterministic"
    ),
    "batch_invariant": problems.check_batch_invariant,
    "asynchronous": problems.check_asynchronous,
    "lora": problems.check_lora,
}


def judge(
    prepare_finalize: "type[PrepareAndFinalize]",
    experts: "type[PermuteExpertsUnpermute]",
    problem: Problem,
    machine: Machine,
) -> Verdict:
    """Return whether two parts can compute `problem` on `machine`, and if not, why.

    This imports nothing, allocates no tensors and launches no kernels.
    """
    expect("problem", problem, Problem)
    expect("machine", machine, Machine)
    pairing = RuleInput(
        prepare_finalize.__name__,
        prepare_finalize.requires,
        experts.__name__,
        experts.requires,
        problem,
        machine,
    )
    rejections = [r for rule in RULES.values() for r in rule(pairing)]
    rejections += collect_rejections(
        prepare_finalize.__name__, partial(prepare_finalize.extra_rejections, problem, machine)
    )
    rejections += collect_rejections(
        experts.__name__, partial(experts.extra_rejections, problem, machine)
    )
    return Verdict(prepare_finalize.__name__, experts.__name__, problem, machine, tuple(rejections))


def judge_part(name: str, requires: Requirements, machine: Machine) -> tuple[Rejection, ...]:
    """Return the reasons why a part cannot run on `machine` in any pairing; empty if it can.

    name: class name of the part.
    requires: what the part declares.
    """
    any_problem, format = Problem(1, 1, 1, 1, 1), requires.activation_format
    any_prepare = PrepareFinalizeRequirements(activation_format=format, reduces=frozenset(Reduce))
    any_experts = ExpertsRequirements(activation_format=format, reduce=Reduce.NOOP)
    if isinstance(requires, ExpertsRequirements):
        pairing = RuleInput("", any_prepare, name, requires, any_problem, machine)
    else:
        assert isinstance(requires, PrepareFinalizeRequirements)
        pairing = RuleInput(name, requires, "", any_experts, any_problem, machine)
    rules = machines.check_device, machines.check_arch, machines.check_archs, machines.check_package
    rejections = [r for rule in rules for r in rule(pairing)]
    return tuple(r for r in rejections if name in r.parties)
