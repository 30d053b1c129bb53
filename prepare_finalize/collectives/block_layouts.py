"""Layouts of the blocks that a problem's rows are sent in."""

from modular_kernel.ops.quantize import scale_shape
from modular_kernel.quant.quantized_weights import STORAGE
from modular_kernel.spec.problem import Problem
from prepare_finalize.common.blocks import BlockLayout


def layouts_of(problem: Problem, rows: int) -> dict[bool, BlockLayout]:
    """Return the layouts of blocks of unquantized rows, and of quantized ones if there are any.

    rows: capacity of a block. The keys tell whether rows are quantized.
    """
    scheme, layouts = problem.scheme, {}
    for quantized in {False, scheme.dispatched_quantized}:
        scales = 0
        if quantized and scheme.activation_granularity != "tensor":
            scales = scale_shape(scheme, 1, problem.hidden)[1]
        layouts[quantized] = BlockLayout(
            rows,
            problem.hidden,
            STORAGE[scheme.activation] if quantized else problem.dtype,
            problem.top_k,
            scales,
            problem.adapters is not None,
        )
    return layouts
