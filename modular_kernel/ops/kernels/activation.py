"""The functions of ActivationSpec on float32 values, and a kernel that applies them to rows."""

import triton
import triton.language as tl


@triton.jit
def _at_most(value, limit):
    """min(value, limit), NaN where the value is: the plain minimum would make it the limit."""
    return tl.minimum(value, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _at_least(value, limit):
    """max(value, limit), NaN where the value is."""
    return tl.maximum(value, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Float32 gate and up values to float32; ungated kinds ignore `up`."""
    if KIND == "relu2":
        positive = _at_least(gate, 0.0)
        result = positive * positive
    elif KIND == "silu":
        result = gate * tl.sigmoid(gate) * up
    elif KIND == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == "gelu_tanh":
        # tanh(z) = 2 sigmoid(2z) - 1, so (1 + tanh(z)) / 2 = sigmoid(2z); sqrt(2/pi) = 0.79788.
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate * tl.sigmoid(2.0 * inner) * up
    elif KIND == "swiglu_oai":
        gate = _at_most(gate, LIMIT)
        up = _at_most(_at_least(up, -LIMIT), LIMIT)
        result = gate * tl.sigmoid(ALPHA * gate) * (up + 1.0)
    elif KIND == "swiglu_clamp_after":
        up = _at_most(_at_least(up, -LIMIT), LIMIT)
        result = _at_most(gate * tl.sigmoid(gate), LIMIT) * up
    else:
        tl.static_assert(KIND == "swiglu_clamp_before")
        gate = _at_most(gate, LIMIT)
        up = _at_most(_at_least(up, -LIMIT), LIMIT)
        result = gate * tl.sigmoid(gate) * up
    return result


@triton.jit
def activation_kernel(
    x_ptr, out_ptr, intermediate, stride_x, stride_out, up_offset,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[r, i] = act(x[r, i * STEP], x[r, i * STEP + up_offset])."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < intermediate
    x_ptrs = x_ptr + row * stride_x + columns * STEP
    gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + up_offset, mask=mask, other=0.0).to(tl.float32)
    result = activate(gate, up, KIND, ALPHA, LIMIT)
    tl.store(out_ptr + row * stride_out + columns, result.to(out_ptr.dtype.element_ty), mask=mask)
