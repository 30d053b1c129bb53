"""Input mutations of scales, zero points and packing, which are visible only in quantized cases.

Each mutation has a name, a description, the condition under which the checks must detect it, and
the function of `inputs` that injects it.
"""

from functools import partial

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.input_mutations import conditions as when
from modular_kernel.testing.input_mutations import inputs
from modular_kernel.testing.input_mutations.inject import CallMutant


def _has_scale_per_row(problem: Problem) -> bool:
    return problem.scheme.granularity in ("channel", "block", "group")


def _has_several_groups(problem: Problem) -> bool:
    """Return whether both GEMMs have more than one group along K."""
    group = problem.scheme.group
    return bool(group) and min(problem.hidden, problem.intermediate) > group[-1]


_has_several_experts = when.both(when.routes_all_pairs, lambda p: p.e > 1 and p.tokens > 1)

_make_quantized_mutant = partial(CallMutant, quantized=True)

SCALE_MUTANTS: tuple[CallMutant, ...] = (
    _make_quantized_mutant(
        "scale_of_next_expert",
        "every expert has its neighbor's scales",
        _has_several_experts,
        arguments=partial(inputs.shift_scales, dim=0),
    ),
    _make_quantized_mutant(
        "scale_of_next_row",
        "every row (or row of blocks) has its neighbor's scales: a wrong stride",
        when.both(when.has_routed_pair, _has_scale_per_row),
        arguments=partial(inputs.shift_scales, dim=1),
    ),
    _make_quantized_mutant(
        "scale_of_next_group",
        "every group along K has its neighbor's scale: a wrong block",
        when.both(when.has_routed_pair, _has_several_groups),
        arguments=partial(inputs.shift_scales, dim=2),
    ),
    _make_quantized_mutant(
        "zero_point_of_next_row",
        "every row has its neighbor's zero points",
        when.both(when.has_routed_pair, lambda p: p.scheme.zero_points),
        arguments=inputs.shift_zero_points,
    ),
    _make_quantized_mutant(
        "zero_points_swapped",
        "the zero points of even and odd rows are exchanged",
        when.both(when.has_routed_pair, lambda p: p.scheme.zero_points and p.scheme.packed),
        arguments=partial(inputs.swap_nibbles, names=("w1_zero_point", "w2_zero_point")),
    ),
    _make_quantized_mutant(
        "nibbles_swapped",
        "the weights of even and odd k are exchanged",
        when.both(when.has_routed_pair, lambda p: p.scheme.packed),
        arguments=partial(inputs.swap_nibbles, names=("w1", "w2")),
    ),
    _make_quantized_mutant(
        "matrix_scales_swapped",
        "the scales of the gate and the up matrix are exchanged",
        when.both(when.has_routed_pair, lambda p: p.scheme.matrix_scales and p.act.gated),
        arguments=inputs.swap_gate_and_up_global_scales,
    ),
    _make_quantized_mutant(
        "matrix_scale_of_next_expert",
        "the second matrix of each expert has the scale of another expert",
        when.both(when.has_routed_pair, lambda p: p.scheme.matrix_scales and p.e > 1),
        arguments=inputs.shift_w2_global_scales,
    ),
    _make_quantized_mutant(
        "order_ignored",
        "the column order of w1 (act order) is ignored",
        when.both(when.has_routed_pair, lambda p: p.scheme.act_order),
        arguments=inputs.ignore_order,
    ),
    _make_quantized_mutant(
        "order_of_next_expert",
        "each expert has the column order of another expert",
        when.both(when.has_routed_pair, lambda p: p.scheme.act_order and p.e > 1),
        arguments=inputs.shift_order,
    ),
    _make_quantized_mutant(
        "given_scale_wrong",
        "a static activation scale is far too small",
        when.both(when.has_routed_pair, lambda p: p.scheme.static),
        arguments=inputs.shrink_static_scale,
    ),
)
