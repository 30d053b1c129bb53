"""gated_activation: the activation between the two GEMMs, as a separate operation.

A gated activation multiplies act(gate) by up, where gate and up are two halves of the output of
GEMM 1. The two halves are stored separately or interleaved: gate 0, up 0, gate 1, up 1 and so on.
"""

import torch

from modular_kernel.errors import ShapeError
from modular_kernel.ops.permute import choose_hidden_block_size
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.problem import ActivationSpec


def get_gate_up_layout(spec: ActivationSpec, intermediate: int) -> tuple[int, int]:
    """Return (gate_stride, up_offset), the positions of gate and up in the output of GEMM 1.

    Gate i is in column i * gate_stride, and up i is up_offset columns after gate i.
    """
    if not spec.gated:
        return 1, 0
    return (2, 1) if spec.interleaved else (1, intermediate)


def activation_constants(spec: ActivationSpec) -> dict[str, object]:
    """Return the constexpr arguments that the device function `activate` requires."""
    return {
        "ACTIVATION": spec.kind,
        "ACTIVATION_ALPHA": spec.alpha or 0.0,
        "ACTIVATION_LIMIT": spec.limit or 0.0,
    }


def gated_activation(x_RN: torch.Tensor, spec: ActivationSpec, out_RI: torch.Tensor) -> None:
    """Compute out_RI = act(x_RN) in float32, and round once to the dtype of out_RI.

    x_RN: (R, N) with contiguous rows. N is 2I if the activation is gated, and I otherwise.
    out_RI: output, (R, I) with contiguous rows.

    Raises ShapeError if the shapes do not match.
    """
    rows, intermediate = out_RI.shape
    need = (rows, intermediate * (2 if spec.gated else 1))
    if tuple(x_RN.shape) != need:
        raise ShapeError("activation input", got=tuple(x_RN.shape), need=need)
    if out_RI.numel() == 0:
        return
    if not use_triton(x_RN):
        out_RI.copy_(gated_activation_ref(x_RN, spec))
        return
    from modular_kernel.ops.kernels.activation import activation_kernel

    gate_stride, up_offset = get_gate_up_layout(spec, intermediate)
    block = choose_hidden_block_size(intermediate)
    launch(
        activation_kernel,
        (rows, -(-intermediate // block)),
        x_ptr=x_RN,
        out_ptr=out_RI,
        intermediate_size=intermediate,
        stride_x=x_RN.stride(0),
        stride_out=out_RI.stride(0),
        up_offset=up_offset,
        GATE_STRIDE=gate_stride,
        BLOCK_INTERMEDIATE=block,
        **activation_constants(spec),
    )


def gated_activation_ref(x_RN: torch.Tensor, spec: ActivationSpec) -> torch.Tensor:
    """Torch reference of `gated_activation`: (R, N) -> (R, I) in float32."""
    x = x_RN.float()
    if not spec.gated:
        return _apply_ungated_activation(x, spec.kind)
    gate, up = (x[:, ::2], x[:, 1::2]) if spec.interleaved else x.chunk(2, dim=1)
    if spec.kind == "situ":
        assert spec.alpha is not None
        up = up if spec.limit is None else spec.limit * torch.tanh(up / spec.limit)
        return spec.alpha * torch.tanh(gate / spec.alpha) * torch.sigmoid(gate) * up
    if spec.limit is not None:
        up = up.clamp(-spec.limit, spec.limit)
        if spec.kind != "swiglu_clamp_after":
            gate = gate.clamp(max=spec.limit)
    if spec.kind == "swiglu_oai":
        assert spec.alpha is not None
        return gate * torch.sigmoid(spec.alpha * gate) * (up + 1)
    if spec.kind in ("gelu", "gelu_tanh"):
        return _apply_ungated_activation(gate, f"{spec.kind}_no_mul") * up
    gate = torch.nn.functional.silu(gate)
    return (gate.clamp(max=spec.limit) if spec.kind == "swiglu_clamp_after" else gate) * up


def _apply_ungated_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "relu2":
        return torch.relu(x) ** 2
    if kind == "silu_no_mul":
        return torch.nn.functional.silu(x)
    approximate = "tanh" if kind == "gelu_tanh_no_mul" else "none"
    return torch.nn.functional.gelu(x, approximate=approximate)
