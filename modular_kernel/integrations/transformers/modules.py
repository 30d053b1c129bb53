"""Reads the weights and the problem of an experts module of transformers."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd

import torch
from torch._subclasses.fake_tensor import FakeTensor

from modular_kernel.integrations.transformers.activations import unsupported_error
from modular_kernel.operators.expert_fields import make_expert_weights
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights

# Names of attributes that `from_pretrained` and `serve` set to describe a module's tensors. The
# value of FIELDS_ATTRIBUTE maps the name of each parameter to a field and steps, in the syntax of
# `operators.expert_fields`. For example, "w1:first=8" maps the first 8 experts of a parameter to
# w1.
FIELDS_ATTRIBUTE = "_mk_fields"
QUANT_ATTRIBUTE = "_mk_quant"  # quantization scheme
INTERLEAVED_ATTRIBUTE = "_mk_interleaved"  # whether gate and up rows of w1 alternate

_LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")

# Attributes that determine how a module's tensors are read.
_FLAGS = (
    *("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "num_experts"),
    *("block_size", QUANT_ATTRIBUTE, INTERLEAVED_ATTRIBUTE),
)

Names = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """How a module's tensors map to ExpertWeights.

    fields: fields and steps of the tensors, in the syntax of `operators.expert_fields`.
    quant: name of the quantization scheme.
    """

    fields: str
    quant: str = "none"


def list_tensor_names(module: torch.nn.Module) -> Names:
    """Return the names of the attributes that hold the weights.

    Raises UnsupportedError for a module with a norm after each expert.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise unsupported_error(module, "a norm after each expert", "experts without a norm")
    packed_fields: dict[str, str] | None = getattr(module, FIELDS_ATTRIBUTE, None)
    if packed_fields is not None:
        return tuple(packed_fields)
    first_projection = get_first_projection(module)
    names: Names = (first_projection, "down_proj")
    if hasattr(module, f"{first_projection}_scale_inv"):
        names += (f"{first_projection}_scale_inv", "down_proj_scale_inv")
    if getattr(module, "has_bias", False):
        names += (f"{first_projection}_bias", "down_proj_bias")
    return names


def read_layout(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> Layout:
    """Return the layout of the tensors of `list_tensor_names`, from their shapes and dtypes."""
    packed_fields: dict[str, str] | None = getattr(module, FIELDS_ATTRIBUTE, None)
    if packed_fields is not None:
        return Layout(",".join(packed_fields.values()), getattr(module, QUANT_ATTRIBUTE))
    bias = ",b1,b2" if getattr(module, "has_bias", False) else ""
    transpose = ":t" if getattr(module, "is_transposed", False) else ""
    if not hasattr(module, f"{get_first_projection(module)}_scale_inv"):
        return Layout(f"w1{transpose},w2{transpose}{bias}")
    if transpose:
        raise unsupported_error(module, "transposed float8 weights", "weights (e, N, K)")
    layout = _read_fp8_layout(module, *tensors[:3])
    return Layout(layout.fields + bias, layout.quant)


def read_flags(module: torch.nn.Module) -> tuple[object, ...]:
    """Return the values of attributes that determine how the tensors are read."""
    # Looking up a missing attribute of a module is slow.
    attributes = module.__dict__
    return tuple([attributes.get(name) for name in _FLAGS])


def get_first_projection(module: torch.nn.Module) -> str:
    """Return the attribute name of the projection before the activation."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def is_dispatched(module: torch.nn.Module) -> bool:
    """Return whether transformers runs the module with the selected experts implementation."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "has_gate")


def parse_layer_number(name: str) -> int | None:
    """Return the layer number in the name of a module or tensor."""
    match = _LAYER_NUMBER.search(name)
    return None if match is None else int(match[1])


def is_quantized(module: torch.nn.Module) -> bool:
    """Return whether the module's weights are quantized."""
    has_scale = hasattr(module, f"{get_first_projection(module)}_scale_inv")
    return has_scale or getattr(module, QUANT_ATTRIBUTE, "none") != "none"


def read_tensors(module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the tensors that `list_tensor_names` names."""
    return tuple(read_tensor(module, name) for name in list_tensor_names(module))


def weights_of(module: torch.nn.Module) -> ExpertWeights:
    """Return the module's parameters as ExpertWeights, without a copy.

    w1 is (e, N, H) and w2 is (e, H, I). They are views if the module stores them transposed.
    """
    tensors = read_tensors(module)
    return make_expert_weights(tensors, read_layout(module, tensors).fields)


def read_tensor(module: torch.nn.Module, name: str) -> torch.Tensor:
    """Return a tensor attribute. Raises UnsupportedError unless it is a plain tensor."""
    tensor: object = getattr(module, name, None)
    # A subclass of Tensor may be sharded or quantized. Its memory then does not match its shape.
    if isinstance(tensor, torch.Tensor) and type(tensor) in _TENSOR_TYPES:
        return tensor
    got = f"{name} of type {type(tensor).__name__}"
    raise unsupported_error(module, got, "a plain tensor, neither sharded nor quantized")


_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def make_problem_factory(
    module: torch.nn.Module, tensors: Sequence[torch.Tensor], layout: Layout
) -> Callable[..., Problem]:
    """Return a function that makes the Problem of a module from dtype, top_k and activation.

    `tokens` of the problem is 1. Raises UnsupportedError if the projections do not match each other
    or the module.
    """
    meta_tensors = [torch.empty_like(tensor, device="meta") for tensor in tensors]
    weights = make_expert_weights(meta_tensors, layout.fields)
    w1, w2, gated = weights.w1, weights.w2, getattr(module, "has_gate", True)
    values_per_byte = 2 if QuantScheme.parse(layout.quant).packed else 1
    if w1.dim() != 3 or w2.dim() != 3 or w1.shape[1] != w2.shape[2] * values_per_byte * (1 + gated):
        got = f"{get_first_projection(module)} {tuple(w1.shape)} and down_proj {tuple(w2.shape)}"
        raise unsupported_error(module, got, f"(e, {'2I' if gated else 'I'}, H) and (e, H, I)")
    if getattr(module, "num_experts", w1.shape[0]) != w1.shape[0]:
        got = f"num_experts {module.num_experts} and weights of {w1.shape[0]} experts"
        raise unsupported_error(module, got, "weights of num_experts experts")
    return partial(
        Problem,
        tokens=1,
        hidden=w2.shape[1],
        intermediate=w2.shape[2] * values_per_byte,
        experts=w1.shape[0],
        quant=layout.quant,
        bias=weights.b1 is not None,
    )


def _read_fp8_layout(
    module: torch.nn.Module, w1: torch.Tensor, w2: torch.Tensor, scale: torch.Tensor
) -> Layout:
    """Return the layout of FP8Experts: float8, or mxfp4.

    With block scales, gate and up have separate blocks. If the last blocks of gate and up are
    partial, scales are expanded to smaller blocks that divide the rows. Without blocks, a
    projection has one scale, and activations are quantized per row. Static activation scales of the
    module are ignored, because per-row scales are more accurate.
    """
    if w1.dtype is torch.int8:
        if scale.element_size() > 1:
            raise unsupported_error(
                module, f"float4 with scales of {scale.dtype}", "float8_e8m0fnu"
            )
        return Layout("w1:bytes,w2:bytes,w1_scale:bytes,w2_scale:bytes", "mxfp4_w4a16")
    if w1.dtype is not torch.float8_e4m3fn:
        raise unsupported_error(module, f"quantized weights of {w1.dtype}", "float8_e4m3fn")
    rows, hidden = w2.shape[2], w2.shape[1]
    block: Sequence[int] | None = getattr(module, "block_size", None)
    if block is None:
        steps = f"channel={w1.shape[1]}", f"channel={hidden}"
        quant = "fp8_w8a8_channel"
        return Layout(f"w1,w2,w1_scale:float:{steps[0]},w2_scale:float:{steps[1]}", quant)
    block_rows, block_columns = block
    tile = gcd(rows, block_rows)
    gated = getattr(module, "has_gate", True)
    if tile == block_rows or scale.shape[1] != -(-rows // block_rows) * (1 + gated):
        return Layout(
            "w1,w2,w1_scale:float,w2_scale:float", _format_block_scheme(block_rows, block_columns)
        )
    steps = f"tiles={rows}x{block_rows}x{tile}", f"tiles={hidden}x{block_rows}x{tile}"
    fields = f"w1,w2,w1_scale:float:{steps[0]},w2_scale:float:{steps[1]}"
    return Layout(fields, _format_block_scheme(tile, block_columns))


def _format_block_scheme(rows: int, columns: int) -> str:
    return str(QuantScheme.parse(f"fp8_w8a8_block:block={rows}x{columns}"))
