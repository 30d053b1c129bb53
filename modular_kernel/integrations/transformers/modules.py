"""Read an experts module: which of its tensors are which weights, and what layer they make."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd

import torch
from torch._subclasses.fake_tensor import FakeTensor

from modular_kernel.integrations.transformers.activations import unsupported
from modular_kernel.operators.expert_fields import weights_from
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights

# A module that was loaded quantized says here what its tensors are.
FIELDS, QUANT, INTERLEAVED = "_mk_fields", "_mk_quant", "_mk_interleaved"

_NUMBER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")

# What a module says of its tensors; changed, they are other weights.
_FLAGS = (
    *("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "num_experts"),
    *("block_size", QUANT, INTERLEAVED),
)

Names = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """What the tensors of a module are: `expert_fields` reads fields, quant names the scheme."""

    fields: str
    quant: str = "none"


def names_of(module: torch.nn.Module) -> Names:
    """Return the attributes that hold the weights; UnsupportedError if that is not all there is."""
    if getattr(module, "has_post_expert_norm", False):
        raise unsupported(module, "a norm after each expert", "experts without one")
    own: dict[str, str] | None = getattr(module, FIELDS, None)
    if own is not None:
        return tuple(own)
    first = first_of(module)
    names: Names = (first, "down_proj")
    if hasattr(module, f"{first}_scale_inv"):
        names += (f"{first}_scale_inv", "down_proj_scale_inv")
    if getattr(module, "has_bias", False):
        names += (f"{first}_bias", "down_proj_bias")
    return names


def layout_of(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> Layout:
    """Tell what the tensors of `names_of` are; only their shapes and dtypes are read."""
    own: dict[str, str] | None = getattr(module, FIELDS, None)
    if own is not None:
        return Layout(",".join(own.values()), getattr(module, QUANT))
    bias = ",b1,b2" if getattr(module, "has_bias", False) else ""
    turned = ":t" if getattr(module, "is_transposed", False) else ""
    if not hasattr(module, f"{first_of(module)}_scale_inv"):
        return Layout(f"w1{turned},w2{turned}{bias}")
    if turned:
        raise unsupported(module, "float8 weights, transposed", "(e, N, K)")
    layout = _fp8(module, *tensors[:3])
    return Layout(layout.fields + bias, layout.quant)


def flags_of(module: torch.nn.Module) -> tuple[object, ...]:
    """Return what `names_of`, `layout_of` and `problem_of` read of a module beside its tensors.

    All of it is the module's own: what is missing costs nothing here, as an attribute it would.
    """
    own = module.__dict__
    return tuple([own.get(name) for name in _FLAGS])


def first_of(module: torch.nn.Module) -> str:
    """Name the first projection."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def dispatched(module: torch.nn.Module) -> bool:
    """Tell whether transformers asks the experts implementation to run the module."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "has_gate")


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a module or tensor of this name is in."""
    found = _NUMBER.search(name)
    return None if found is None else int(found[1])


def is_quantized(module: torch.nn.Module) -> bool:
    """Tell whether its weights are anything but plain numbers."""
    scaled = hasattr(module, f"{first_of(module)}_scale_inv")
    return scaled or getattr(module, QUANT, "none") != "none"


def tensors_of(module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the tensors of `names_of`."""
    return tuple(tensor_of(module, name) for name in names_of(module))


def weights_of(module: torch.nn.Module) -> ExpertWeights:
    """Return the module's parameters as they lie.

    w1 is (e, N, H) and w2 is (e, H, I); they are views if transposed.
    """
    tensors = tensors_of(module)
    return weights_from(tensors, layout_of(module, tensors).fields)


def tensor_of(module: torch.nn.Module, name: str) -> torch.Tensor:
    """Return an attribute that has to be a tensor whose values are what its shape says."""
    tensor: object = getattr(module, name, None)
    # A subclass of Tensor may be sharded or quantized: its values are not what its shape says.
    if isinstance(tensor, torch.Tensor) and type(tensor) in _PLAIN:
        return tensor
    got = f"{name} of type {type(tensor).__name__}"
    raise unsupported(module, got, "a plain tensor, neither sharded nor quantized")


_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def problem_of(
    module: torch.nn.Module, tensors: Sequence[torch.Tensor], layout: Layout
) -> Callable[..., Problem]:
    """Return a Problem that lacks its tokens, dtype, top_k and activation.

    UnsupportedError if the two projections contradict each other, or the module.
    """
    meta = [torch.empty_like(tensor, device="meta") for tensor in tensors]
    weights = weights_from(meta, layout.fields)
    w1, w2, gated = weights.w1, weights.w2, getattr(module, "has_gate", True)
    packed = 2 if QuantScheme.parse(layout.quant).packed else 1
    if w1.dim() != 3 or w2.dim() != 3 or w1.shape[1] != w2.shape[2] * packed * (1 + gated):
        got = f"{first_of(module)} {tuple(w1.shape)} and down_proj {tuple(w2.shape)}"
        raise unsupported(module, got, f"(e, {'2I' if gated else 'I'}, H) and (e, H, I)")
    if getattr(module, "num_experts", w1.shape[0]) != w1.shape[0]:
        got = f"num_experts {module.num_experts} and weights of {w1.shape[0]} experts"
        raise unsupported(module, got, "as many of one as of the other")
    return partial(
        Problem,
        tokens=1,
        hidden=w2.shape[1],
        intermediate=w2.shape[2] * packed,
        experts=w1.shape[0],
        quant=layout.quant,
        bias=weights.b1 is not None,
    )


def _fp8(
    module: torch.nn.Module, w1: torch.Tensor, w2: torch.Tensor, scale: torch.Tensor
) -> Layout:
    """Read FP8Experts: float8 weights with scales of blocks, or packed float4 with those of 32.

    Scales of w1 are those of each projection, whose last block may be ragged: gate and up do not
    share one, so they are spread over tiles that both have whole. Without blocks there is one
    scale for a projection, and rows of activations have their own, given ones being ignored: they
    are less exact.
    """
    if w1.dtype is torch.int8:
        if scale.element_size() > 1:
            raise unsupported(module, f"float4 with scales of {scale.dtype}", "float8_e8m0fnu")
        return Layout("w1:bytes,w2:bytes,w1_scale:bytes,w2_scale:bytes", "mxfp4_w4a16")
    if w1.dtype is not torch.float8_e4m3fn:
        raise unsupported(module, f"quantized weights of {w1.dtype}", "float8_e4m3fn")
    rows, hidden = w2.shape[2], w2.shape[1]
    block: Sequence[int] | None = getattr(module, "block_size", None)
    if block is None:
        steps = f"channel={w1.shape[1]}", f"channel={hidden}"
        quant = "fp8_w8a8_channel"
        return Layout(f"w1,w2,w1_scale:float:{steps[0]},w2_scale:float:{steps[1]}", quant)
    high, wide = block
    tile = gcd(rows, high)
    gated = getattr(module, "has_gate", True)
    if tile == high or scale.shape[1] != -(-rows // high) * (1 + gated):
        return Layout("w1,w2,w1_scale:float,w2_scale:float", _block_scheme(high, wide))
    steps = f"tiles={rows}x{high}x{tile}", f"tiles={hidden}x{high}x{tile}"
    fields = f"w1,w2,w1_scale:float:{steps[0]},w2_scale:float:{steps[1]}"
    return Layout(fields, _block_scheme(tile, wide))


def _block_scheme(high: int, wide: int) -> str:
    return str(QuantScheme.parse(f"fp8_w8a8_block:block={high}x{wide}"))
