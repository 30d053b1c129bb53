"""Activation functions between the two GEMMs of an expert (`activate`), and a kernel.

A gated activation function combines two values, gate and up, for example silu(gate) * up. GEMM
kernels call `activate` in their epilogue. `ActivationSpec` defines the functions.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.extrema import clamp_nan, maximum_nan, minimum_nan

# Triton's interpreter does not support inline assembly.
USE_INLINE_ASM: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _sigmoid(value, FLUSH_SUBNORMALS: tl.constexpr):
    """Return 1 / (1 + exp(-value)).

    FLUSH_SUBNORMALS: whether to use faster instructions. The result may then be zero instead of a
        subnormal number for values below -87.3.
    """
    if USE_INLINE_ASM and FLUSH_SUBNORMALS:
        # A subnormal result of exp2 does not change the sum.
        denominator = 1.0 + tl.exp2(value * -1.4426950216293335)
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            "=r,r",
            [denominator],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        result = tl.sigmoid(value)
    return result


@triton.jit
def _gelu(value):
    return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))


@triton.jit
def _gelu_tanh(value):
    # tanh(z) = 2 sigmoid(2z) - 1, so (1 + tanh(z)) / 2 = sigmoid(2z); sqrt(2/pi) = 0.79788.
    inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
    return value * tl.sigmoid(2.0 * inner)


@triton.jit
def _tanh(value):
    """Return tanh(value).

    For magnitudes from 0.25 on, the result is 2 sigmoid(2z) - 1. For smaller ones, this difference
    would lose digits, so the Taylor series is used. Its first omitted term is 1e-8 of the value.
    """
    is_small = tl.abs(value) < 0.25
    small = tl.where(is_small, value, 0.0)
    square = small * small
    series = 0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203)
    series = small + small * square * (-0.3333333333333333 + square * series)
    return tl.where(is_small, series, 2.0 * tl.sigmoid(2.0 * value) - 1.0)


@triton.jit
def activate(
    gate, up, ACTIVATION: tl.constexpr, ACTIVATION_ALPHA: tl.constexpr,
    ACTIVATION_LIMIT: tl.constexpr,
    FLUSH_SUBNORMALS: tl.constexpr = False,
):  # fmt: skip
    """Return the result of the activation function ACTIVATION for float32 values.

    gate: the gate values, or the only values of a function that is not gated.
    up: the up values. Ignored by functions that are not gated.
    ACTIVATION: the name of the function, `ActivationSpec.kind`.
    ACTIVATION_ALPHA, ACTIVATION_LIMIT: its parameters, `ActivationSpec`. A limit of 0 means that
        there is no limit.
    FLUSH_SUBNORMALS: whether results of functions with a sigmoid may be zero for gates below -87.3.
    """
    if ACTIVATION_LIMIT > 0 and ACTIVATION != "situ":
        up = clamp_nan(up, -ACTIVATION_LIMIT, ACTIVATION_LIMIT)
        if ACTIVATION != "swiglu_clamp_after":
            gate = minimum_nan(gate, ACTIVATION_LIMIT)
    if ACTIVATION == "relu2":
        positive = maximum_nan(gate, 0.0)
        result = positive * positive
    elif ACTIVATION == "silu_no_mul":
        result = gate * _sigmoid(gate, FLUSH_SUBNORMALS)
    elif ACTIVATION == "gelu_no_mul":
        result = _gelu(gate)
    elif ACTIVATION == "gelu_tanh_no_mul":
        result = _gelu_tanh(gate)
    elif ACTIVATION == "gelu":
        result = _gelu(gate) * up
    elif ACTIVATION == "gelu_tanh":
        result = _gelu_tanh(gate) * up
    elif ACTIVATION == "swiglu_oai":
        result = gate * _sigmoid(ACTIVATION_ALPHA * gate, FLUSH_SUBNORMALS) * (up + 1.0)
    elif ACTIVATION == "swiglu_clamp_after":
        result = minimum_nan(gate * _sigmoid(gate, FLUSH_SUBNORMALS), ACTIVATION_LIMIT) * up
    elif ACTIVATION == "situ":
        if ACTIVATION_LIMIT > 0:
            up = ACTIVATION_LIMIT * _tanh(up / ACTIVATION_LIMIT)
        result = ACTIVATION_ALPHA * _tanh(gate / ACTIVATION_ALPHA) * tl.sigmoid(gate) * up
    else:
        tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "swiglu_clamp_before")
        result = gate * _sigmoid(gate, FLUSH_SUBNORMALS) * up
    return result


@triton.jit
def activation_kernel(
    x_ptr, out_ptr, intermediate_size, stride_x, stride_out, up_offset,
    ACTIVATION: tl.constexpr, ACTIVATION_ALPHA: tl.constexpr, ACTIVATION_LIMIT: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    BLOCK_INTERMEDIATE: tl.constexpr,
):  # fmt: skip
    """out[r, i] = act(x[r, i * GATE_STRIDE], x[r, i * GATE_STRIDE + up_offset]), in float32.

    Grid: (rows, blocks of BLOCK_INTERMEDIATE columns of out).

    x_ptr: (rows, 2 * intermediate_size), or (rows, intermediate_size) for functions that are not
        gated; rows are stride_x apart.
    out_ptr: (rows, intermediate_size); rows are stride_out apart.
    GATE_STRIDE: 2 if gate and up columns alternate, 1 otherwise.
    ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT: the activation function (`activate`).
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_INTERMEDIATE + tl.arange(0, BLOCK_INTERMEDIATE)
    mask = columns < intermediate_size
    x_ptrs = x_ptr + row * stride_x + columns * GATE_STRIDE
    gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + up_offset, mask=mask, other=0.0).to(tl.float32)
    result = activate(gate, up, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT)
    tl.store(out_ptr + row * stride_out + columns, result.to(out_ptr.dtype.element_ty), mask=mask)
