"""A stand-in for FlashInfer's cutlass_fused_moe on sm_90 (0.7.2), computed in float32 on a CPU.

The stand-in raises where the library asserts, and where the library would silently compute wrong
results: for strided tensors, invalid expert ids, and a token that selects the same expert twice.
The rows of up are the first half of w1. The caller's workspace is overwritten.
"""

from enum import IntEnum

import torch

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
BLOCK, FP8_MAX = 128, 448.0
ActivationType = IntEnum(
    "ActivationType",
    [
        *("Gelu", "Relu", "Silu", "Swiglu", "Geglu", "SwigluBias", "Relu2", "SwigluStep"),
        *("GegluTanh", "Identity", "Situ", "InvalidType", "ClampedRelu2"),
    ],
    start=0,
)
GATED = {
    ActivationType[name]
    for name in ("Swiglu", "Geglu", "SwigluBias", "SwigluStep", "GegluTanh", "Situ")
}
launched = []


def require(condition, message):
    if not condition:
        raise RuntimeError(f"Check failed: {message}")


def cutlass_fused_moe_workspace_size(
    max_num_tokens, hidden_size, intermediate_size, num_experts_total, top_k, *, x_dtype,
    weight_dtype, output_dtype=BF16, activation_type=ActivationType.Swiglu, tp_size=1, tp_rank=0,
    ep_size=1, ep_rank=0, min_latency_mode=False, use_deepseek_fp8_block_scale=False,
    use_w4_group_scaling=False, use_mxfp8_act_scaling=False, use_fused_finalize=True,
    use_packed_weights=False, use_wfp4afp8_humming=False, device=None, backend="cutlass",
):  # fmt: skip
    for size in (max_num_tokens, hidden_size, intermediate_size, num_experts_total, top_k):
        if not size > 0:
            raise ValueError(f"must be positive, got {size}")
    rows = max_num_tokens * top_k
    width = hidden_size + intermediate_size * (2 if activation_type in GATED else 1)
    return rows * (4 * width + 16) + 256 * num_experts_total


def cutlass_fused_moe(
    input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights,
    output_dtype, quant_scales, fc1_expert_biases=None, fc2_expert_biases=None, input_sf=None,
    swiglu_alpha=None, swiglu_beta=None, swiglu_limit=None, tp_size=1, tp_rank=0, ep_size=1,
    ep_rank=0, cluster_size=1, cluster_rank=0, output=None, enable_alltoall=False,
    use_deepseek_fp8_block_scale=False, use_w4_group_scaling=False, use_mxfp8_act_scaling=False,
    min_latency_mode=False, use_packed_weights=False, use_wfp4afp8_humming=False,
    tune_max_num_tokens=8192, enable_pdl=None, activation_type=ActivationType.Swiglu,
    swizzled_input_sf=True, use_fused_finalize=True, profile_ids=None, workspace_buffer=None, *,
    clamped_relu2_limit=None, situ_beta=None, situ_linear_beta=None, backend="cutlass",
):  # fmt: skip
    x, ids, router = input, token_selected_experts, token_final_scales
    w1, w2, act = fc1_expert_weights, fc2_expert_weights, ActivationType(activation_type)
    require(act is not ActivationType.ClampedRelu2, "ClampedRelu2 requires an SM10x GPU")
    require((ep_size, ep_rank, tp_size) == (1, 0, 1), "local ids: this stand-in supports no others")
    require(
        input_sf is None and not use_w4_group_scaling,
        "no scales of x: this stand-in does not support them",
    )
    _check_tensors(x, ids, router, w1, w2)
    _check_sizes(x, w1, w2, act)
    _check_biases(fc1_expert_biases, fc2_expert_biases, w1, w2, output_dtype)
    swiglu = _check_activation_parameters(len(w1), swiglu_alpha, swiglu_beta, swiglu_limit)
    situ = _check_activation_parameters(len(w1), situ_beta, situ_linear_beta, None)
    _check_output(output, x, w2, output_dtype)
    min_workspace_bytes = cutlass_fused_moe_workspace_size(
        len(x), w2.shape[1], w2.shape[2], len(w1), ids.shape[1], x_dtype=x.dtype,
        weight_dtype=w1.dtype, activation_type=act,
    )  # fmt: skip
    _check_workspace(workspace_buffer, min_workspace_bytes)
    gemms = _ScaledGemms(quant_scales, x, w1, w2, by_blocks=use_deepseek_fp8_block_scale)
    launched.append((str(act.name), gemms.kind, use_fused_finalize))
    total = torch.zeros(len(x), w2.shape[1])
    for expert in range(len(w1)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate_up = gemms.multiply_w1(x[token], expert).to(output_dtype).float()
        if fc1_expert_biases is not None:
            gate_up = gate_up + fc1_expert_biases[expert].float()
        parameters = tuple(
            None if values is None else values[expert] for values in (*swiglu, *situ[:2])
        )
        h = _activate(gate_up, act, parameters)
        rows = gemms.multiply_w2(h, expert, output_dtype).to(output_dtype).float()
        if fc2_expert_biases is not None:
            rows = rows + fc2_expert_biases[expert].float()
        total.index_add_(0, token, rows * router[token, slot, None])
    workspace_buffer.fill_(255)
    output.copy_(total)
    return output


# -------------------------------------------------------------------------------- assertions


def _check_contiguous(t, name):
    # The library ignores strides and reads 16 bytes at a time.
    require(t.is_contiguous(), f"{name} contiguous")
    require(t.data_ptr() % 16 == 0, f"{name} aligned to 16 bytes")


def _check_tensors(x, ids, router, w1, w2):
    pairs = {(BF16, BF16), (FP16, FP16), (E4M3, E4M3), (BF16, E4M3)}
    require(x.dim() == 2 and ids.dim() == 2 and router.dim() == 2, "matrices")
    require(w1.dim() == 3 and w2.dim() == 3, "weights of each expert")
    require(
        (x.dtype, w1.dtype) in pairs and w1.dtype is w2.dtype, "a supported combination of dtypes"
    )
    require(ids.dtype is torch.int32, "int32 ids")
    require(router.dtype is FP32, "float32 router weights")
    require(len(x) == len(ids) > 0 and ids.shape == router.shape, "as many tokens")
    for t, name in ((x, "x"), (ids, "ids"), (router, "router weights"), (w1, "w1"), (w2, "w2")):
        _check_contiguous(t, name)
    require(bool(((ids >= -1) & (ids < len(w1))).all()), "ids of these experts, or -1")
    for row in ids.tolist():
        valid = [expert for expert in row if expert >= 0]
        require(len(set(valid)) == len(valid), "every expert at most once per token")


def _check_sizes(x, w1, w2, act):
    hidden, inter = w2.shape[1:]
    require(len(w1) == len(w2), "w1 and w2 of the same number of experts")
    require(w1.shape[1] == inter * (2 if act in GATED else 1), "w1's rows by w2's columns")
    require(w1.shape[2] == hidden == x.shape[1], "w1, w2 and x of the same H")
    multiple = 16 // min(x.element_size(), w1.element_size())
    require(hidden % multiple == 0 and inter % multiple == 0, f"H and I divisible by {multiple}")


def _check_biases(b1, b2, w1, w2, dtype):
    require((b1 is None) == (b2 is None), "both biases or none")
    for bias, w in ((b1, w1), (b2, w2)):
        if bias is not None:
            require(bias.dtype is dtype, "biases in the output's dtype")
            require(tuple(bias.shape) == tuple(w.shape[:2]), "a bias for each row of weights")
            _check_contiguous(bias, "biases")


def _check_activation_parameters(experts, *vectors):
    for vector in vectors:
        if vector is not None:
            require(vector.dtype is FP32, "float32 numbers of activations")
            require(tuple(vector.shape) == (experts,), "a number for each expert")
            require(vector.is_contiguous(), "contiguous numbers")
    return vectors


def _check_output(output, x, w2, dtype):
    require(output is not None, "an output, which the part must pass")
    require(tuple(output.shape) == (len(x), w2.shape[1]), "output (T, H)")
    require(output.dtype is dtype, "output of output_dtype")
    _check_contiguous(output, "output")


def _check_workspace(workspace, min_workspace_bytes):
    require(workspace is not None, "a workspace, which the part must pass")
    require(workspace.dtype in (torch.uint8, torch.int8), "workspace of bytes")
    require(workspace.dim() == 1 and workspace.is_contiguous(), "workspace 1-D")
    require(
        workspace.numel() >= min_workspace_bytes,
        f"workspace_buffer too small: need {min_workspace_bytes}",
    )
    require(workspace.data_ptr() % 128 == 0, "workspace aligned to 128 bytes")


# ------------------------------------------------------------------------------- computation


class _ScaledGemms:
    """Computes the two GEMMs with the scales of a quantization mode."""

    def __init__(self, scales, x, w1, w2, *, by_blocks):
        self.scales, self.w1, self.w2 = scales, w1, w2
        self.kind = "blocks" if by_blocks else "tensor" if x.dtype is E4M3 else "none"
        if by_blocks:
            require(x.dtype is BF16 and w1.dtype is E4M3, "bfloat16 x and fp8 weights")
            require(len(scales) == 2, "two scales")
            for scale, w in zip(scales, (w1, w2), strict=True):
                blocks = (len(w), *(-(-n // BLOCK) for n in w.shape[1:]))
                require(scale.dtype is FP32, "float32 scales")
                require(tuple(scale.shape) == blocks, "a scale for each block")
                require(scale.is_contiguous(), "contiguous scales")
        elif self.kind == "tensor":
            self._check_tensor_scales(len(w1))
        else:
            require(w1.dtype is x.dtype and not scales, "no scales in 16 bits")

    def _check_tensor_scales(self, experts):
        require(len(self.scales) == 4, "Expecting 4 quant scales for fp8 quantization")
        w1_scale, h_scale, w2_scale, x_scale = self.scales
        for scale in self.scales:
            require(scale.dtype is FP32, "float32 scales")
        require(tuple(w1_scale.shape) == (experts,), "fc1 dequant size must be (experts,)")
        require(h_scale.dim() == 0 or h_scale.shape == (experts,), "fc2 quant a scalar")
        require(tuple(w2_scale.shape) == (experts,), "fc2 dequant size must be (experts,)")
        require(x_scale.dim() == 0, "fc1 input dequant a scalar")
        require(w1_scale.is_contiguous() and w2_scale.is_contiguous(), "contiguous scales")

    def multiply_w1(self, x, expert):
        if self.kind == "blocks":
            return (
                _round_by_groups(x.float())
                @ _dequantize_blocks(self.w1[expert], self.scales[0][expert]).T
            )
        product = x.float() @ self.w1[expert].float().T
        return product * self.scales[0][expert] if self.kind == "tensor" else product

    def multiply_w2(self, h, expert, dtype):
        if self.kind == "blocks":
            values = _round_by_groups(h.to(dtype).float())
            return values @ _dequantize_blocks(self.w2[expert], self.scales[1][expert]).T
        if self.kind == "none":
            return h.to(dtype).float() @ self.w2[expert].float().T
        q = (h.to(dtype).float() * self.scales[1]).clamp(-FP8_MAX, FP8_MAX).to(E4M3)
        return q.float() @ self.w2[expert].float().T * self.scales[2][expert]


def _dequantize_blocks(w, scale):
    width = scale.repeat_interleave(BLOCK, 0)[: len(w)].repeat_interleave(BLOCK, 1)
    return w.float() * width[:, : w.shape[1]]


def _round_by_groups(values):
    """Quantize each 128 values of a row to e4m3 and return the dequantized values."""
    groups = values.view(len(values), values.shape[1] // BLOCK, BLOCK)
    scale = (groups.abs().amax(2, keepdim=True) / FP8_MAX).clamp(min=2.0**-33)
    q = (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(E4M3)
    return (q.float() * scale).view_as(values)


def _clamp(value, minimum, maximum):
    """Clamp like CUTLASS, which replaces NaN by a bound."""
    value = torch.fmin(value, torch.as_tensor(maximum))
    return value if minimum is None else torch.fmax(value, torch.as_tensor(minimum))


def _activate(value, act, parameters):
    alpha, beta, limit, situ_beta, situ_linear = parameters
    if act not in GATED:
        return {
            ActivationType.Relu2: lambda v: torch.relu(v) ** 2,
            ActivationType.Silu: torch.nn.functional.silu,
            ActivationType.Gelu: torch.nn.functional.gelu,
        }[act](value)
    up, gate = value.chunk(2, dim=1)
    if act is ActivationType.Situ:
        gate_limit = 4.0 if situ_beta is None else situ_beta
        up_limit = 25.0 if situ_linear is None else situ_linear
        capped = torch.tanh(gate / gate_limit) * torch.sigmoid(gate) * gate_limit
        return capped * torch.tanh(up / up_limit) * up_limit
    if act is ActivationType.SwigluStep:
        bound = 7.0 if limit is None else limit
        gate = torch.nn.functional.silu(gate)
        return _clamp(gate, None, bound) * _clamp(up, -bound, bound)
    if act is ActivationType.SwigluBias or alpha is not None or limit is not None:
        bound = torch.inf if limit is None else limit
        gate, up = _clamp(gate, None, bound), _clamp(up, -bound, bound)
        alpha, beta = 1.0 if alpha is None else alpha, 0.0 if beta is None else beta
        return gate * torch.sigmoid(alpha * gate) * (up + beta)
    name = {ActivationType.Geglu: "none", ActivationType.GegluTanh: "tanh"}.get(act)
    gelu = torch.nn.functional.gelu
    return (torch.nn.functional.silu(gate) if name is None else gelu(gate, approximate=name)) * up
