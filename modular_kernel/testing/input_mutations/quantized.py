"""Input mutations of scales, zero points and packing, which only quantized cases detect."""

from functools import partial

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.input_mutations import conditions as when
from modular_kernel.testing.input_mutations import inputs
from modular_kernel.testing.input_mutations.inject import CallMutant


def _scales_per_row(problem: Problem) -> bool:
    return problem.scheme.granularity in ("channel", "block", "group")


def _several_groups(problem: Problem) -> bool:
    """Return whether both GEMMs have more than one group along their depth."""
    group = problem.scheme.group
    return bool(group) and min(problem.hidden, problem.intermediate) > group[-1]


_several_experts = when.both(when.all_routed, lambda p: p.e > 1 and p.tokens > 1)

_quantized = partial(CallMutant, quantized=True)

SCALE_MUTANTS: tuple[CallMutant, ...] = (
    _quantized(
        "scale_of_next_expert",
        "every expert has its neighbor's scales",
        _several_experts,
        arguments=partial(inputs.shift_scales, dim=0),
    ),
    _quantized(
        "scale_of_next_row",
        "every row (or row of blocks) has its neighbor's scales: a wrong stride",
        when.both(when.routed, _scales_per_row),
        arguments=partial(inputs.shift_scales, dim=1),
    ),
    _quantized(
        "scale_of_next_group",
        "every group along the depth has its neighbor's scale: a wrong block",
        when.both(when.routed, _several_groups),
        arguments=partial(inputs.shift_scales, dim=2),
    ),
    _quantized(
        "zero_point_of_next_row",
        "every row has its neighbor's zero points",
        when.both(when.routed, lambda p: p.scheme.zero_points),
        arguments=inputs.shift_zero_points,
    ),
    _quantized(
        "zero_points_swapped",
        "the zero points of even and odd rows are exchanged",
        when.both(when.routed, lambda p: p.scheme.zero_points and p.scheme.packed),
        arguments=partial(inputs.swap_nibbles, names=("w1_zero_point", "w2_zero_point")),
    ),
    _quantized(
        "nibbles_swapped",
        "the weights of even and odd k are exchanged",
        when.both(when.routed, lambda p: p.scheme.packed),
        arguments=partial(inputs.swap_nibbles, names=("w1", "w2")),
    ),
    _quantized(
        "matrix_scales_swapped",
        "the scales of the gate and the up matrix are exchanged",
        when.both(when.routed, lambda p: p.scheme.matrix_scales and p.act.gated),
        arguments=inputs.swap_matrix_scales,
    ),
    _quantized(
        "matrix_scale_of_next_expert",
        "each expert's second matrix has the scale of another one's",
        when.both(when.routed, lambda p: p.scheme.matrix_scales and p.e > 1),
        arguments=inputs.shift_matrix_scales,
    ),
    _quantized(
        "order_ignored",
        "columns of w1 multiply columns of x as they lie",
        when.both(when.routed, lambda p: p.scheme.act_order),
        arguments=inputs.ignore_order,
    ),
    _quantized(
        "order_of_next_expert",
        "each expert has the order of columns of another one",
        when.both(when.routed, lambda p: p.scheme.act_order and p.e > 1),
        arguments=inputs.shift_order,
    ),
    _quantized(
        "given_scale_wrong",
        "a static activation scale is far too small",
        when.both(when.routed, lambda p: p.scheme.static),
        arguments=inputs.shrink_static_scale,
    ),
)
