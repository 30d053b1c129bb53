"""Device functions of activations on float32 values, and a kernel that applies them to rows."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.extrema import clamp_nan, maximum_nan, minimum_nan

# Triton's interpreter does not support inline assembly.
USE_INLINE_ASM: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _sigmoid(value, FLUSH_SUBNORMALS: tl.constexpr):
    """Return 1 / (1 + exp(-value)).

    FLUSH_SUBNORMALS: faster, but results below -87.3 may be zero. exp may then flush subnormal
        results, which adding 1 would lose anyway, and the reciprocal may flush its result, so that
        it needs no scaling, unlike a quotient.
    """
    if USE_INLINE_ASM and FLUSH_SUBNORMALS:
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
    """Return tanh(value); below 0.25, where 2 sigmoid(2z) - 1 would cancel, from its series.

    The first neglected term of the series is 1e-8 of the value.
    """
    is_small = tl.abs(value) < 0.25
    small = tl.where(is_small, value, 0.0)
    square = small * small
    series = 0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203)
    series = small + small * square * (-0.3333333333333333 + square * series)
    return tl.where(is_small, series, 2.0 * tl.sigmoid(2.0 * value) - 1.0)


@triton.jit
def activate(
    gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    FLUSH_SUBNORMALS: tl.constexpr = False,
):  # fmt: skip
    """Return the activation KIND of float32 gate and up values; ungated kinds ignore `up`.

    ALPHA, LIMIT: parameters of the activation (`ActivationSpec`); LIMIT 0 means no limit.
    FLUSH_SUBNORMALS: results of kinds with a sigmoid may be zero for gates below -87.3.
    """
    if LIMIT > 0 and KIND != "situ":
        up = clamp_nan(up, -LIMIT, LIMIT)
        if KIND != "swiglu_clamp_after":
            gate = minimum_nan(gate, LIMIT)
    if KIND == "relu2":
        positive = maximum_nan(gate, 0.0)
        result = positive * positive
    elif KIND == "silu_no_mul":
        result = gate * _sigmoid(gate, FLUSH_SUBNORMALS)
    elif KIND == "gelu_no_mul":
        result = _gelu(gate)
    elif KIND == "gelu_tanh_no_mul":
        result = _gelu_tanh(gate)
    elif KIND == "gelu":
        result = _gelu(gate) * up
    elif KIND == "gelu_tanh":
        result = _gelu_tanh(gate) * up
    elif KIND == "swiglu_oai":
        result = gate * _sigmoid(ALPHA * gate, FLUSH_SUBNORMALS) * (up + 1.0)
    elif KIND == "swiglu_clamp_after":
        result = minimum_nan(gate * _sigmoid(gate, FLUSH_SUBNORMALS), LIMIT) * up
    elif KIND == "situ":
        if LIMIT > 0:
            up = LIMIT * _tanh(up / LIMIT)
        result = ALPHA * _tanh(gate / ALPHA) * tl.sigmoid(gate) * up
    else:
        tl.static_assert(KIND == "silu" or KIND == "swiglu_clamp_before")
        result = gate * _sigmoid(gate, FLUSH_SUBNORMALS) * up
    return result


@triton.jit
def activation_kernel(
    x_ptr, out_ptr, intermediate, stride_x, stride_out, up_offset,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[r, i] = act(x[r, i * STEP], x[r, i * STEP + up_offset]), computed in float32.

    Grid: (rows, blocks of BLOCK columns of out).
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < intermediate
    x_ptrs = x_ptr + row * stride_x + columns * STEP
    gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + up_offset, mask=mask, other=0.0).to(tl.float32)
    result = activate(gate, up, KIND, ALPHA, LIMIT)
    tl.store(out_ptr + row * stride_out + columns, result.to(out_ptr.dtype.element_ty), mask=mask)
