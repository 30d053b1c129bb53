"""Maps tensors to the fields of ExpertWeights, as a string describes.

Operators take this string because their arguments can only be tensors and strings. For example,
`w1:t,w2:t,b1,b2` maps four tensors to these fields, and transposes the first two. The name of a
field may be followed by steps, each after a colon:

    t         transpose the last two dimensions: a view
    flat      flatten the last two dimensions, (e, N, K / 32, 16) to (e, N, K / 2): a view
    bytes     reinterpret the memory as uint8: a view
    first=N   take the first N entries of the first dimension: a view
    float     convert to float32: a copy if it is not float32
    channel=N expand (e, P, 1) scales of P projections to one per row, N rows in all: a copy
    tiles=RxBxT expand scales of B-row blocks to T-row blocks, where projections have R rows and T
                divides B: a copy
    loaded    raise StateError if the tensor still has its initial fill values

Results are cached (`weights_cache`). Copies are made in the first call with the tensors, and again
after a tensor was moved or written.
"""

from collections.abc import Sequence

import torch

from modular_kernel.errors import ConfigurationError, ShapeError
from modular_kernel.tensors import ExpertWeights, check_loaded

_FIELD_NAMES = frozenset(ExpertWeights.__dataclass_fields__)


def make_expert_weights(tensors: Sequence[torch.Tensor], fields: str) -> ExpertWeights:
    """Make ExpertWeights from tensors.

    fields: the field and the steps of each tensor, as in the docstring of this module.

    Raises ConfigurationError if `fields` is invalid or does not match the tensors, and ShapeError
    if scales do not have the shape that a step requires.
    """
    entries = fields.split(",")
    if len(entries) != len(tensors):
        got, need = f"{len(tensors)} tensors", f"as many as fields name: {fields[:80]}"
        raise ConfigurationError("params", got=got, need=need)
    tensors_by_field: dict[str, torch.Tensor] = {}
    tensors_to_check: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for entry, tensor in zip(entries, tensors, strict=True):
            name, *steps = entry.split(":")
            if name not in _FIELD_NAMES or name in tensors_by_field:
                need = f"one of {', '.join(sorted(_FIELD_NAMES))}, each once"
                raise ConfigurationError("fields", got=name[:80], need=need)
            for step in steps:
                if step == "loaded":
                    tensors_to_check[name] = tensor
                else:
                    tensor = _apply_step(step, tensor)
            tensors_by_field[name] = tensor
        check_loaded(tensors_to_check)
    if not {"w1", "w2"} <= tensors_by_field.keys():
        raise ConfigurationError("fields", got=fields[:80], need="w1 and w2 among the fields")
    return ExpertWeights(**tensors_by_field)


def can_have_gradient(entry: str, *, quantized: bool) -> bool:
    """Return whether the tensor of an entry of `fields` can have a gradient.

    Only biases and unquantized weights can, if no step changes their values.
    """
    name, *steps = entry.split(":")
    names = ("b1", "b2") if quantized else ("w1", "w2", "b1", "b2")
    return name in names and all(s in ("t", "loaded") or s.startswith("first=") for s in steps)


def map_gradient(tensor: torch.Tensor, entry: str, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a tensor from the gradient of the field that was made from it.

    entry: the entry of the tensor in `fields`. `can_have_gradient` must be true for it.
    """
    _, *steps = entry.split(":")
    if steps.count("t") % 2:
        gradient = gradient.transpose(1, 2)
    if gradient.shape[0] == tensor.shape[0]:
        return gradient
    padded = torch.zeros_like(tensor)  # the step first=N has removed the other rows
    padded[: gradient.shape[0]] = gradient
    return padded


def make_tensor_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that changes if the tensor is moved, reshaped or written."""
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.shape, version


def _apply_step(step: str, tensor: torch.Tensor) -> torch.Tensor:
    if step == "t":
        return tensor.transpose(1, 2)
    if step == "flat":
        return tensor.flatten(2)
    if step == "bytes":
        return tensor.view(torch.uint8)
    if step.startswith("first=") and step[6:].isdecimal():
        return tensor[: int(step[6:])]
    if step == "float":
        return tensor.float()
    if step.startswith("channel=") and step[8:].isdecimal():
        rows = int(step[8:])
        return tensor.repeat_interleave(rows // tensor.shape[1], 1).squeeze(-1).contiguous()
    sizes = step.removeprefix("tiles=").split("x")
    if step.startswith("tiles=") and len(sizes) == 3 and all(size.isdecimal() for size in sizes):
        return _expand_tiles(tensor, *map(int, sizes))
    need = "t, flat, bytes, first=N, float, channel=N, tiles=RxBxT or loaded"
    raise ConfigurationError("fields", got=step[:80], need=need)


def _expand_tiles(scale: torch.Tensor, rows: int, block: int, tile: int) -> torch.Tensor:
    """Expand scales of blocks of rows to scales of smaller tiles of rows.

    scale: (e, P ceil(rows / block), k) for P projections of `rows` rows each. The result is
        (e, P ceil(rows / tile), k).
    """
    blocks = -(-rows // block)
    if scale.dim() != 3 or scale.shape[1] % blocks:
        need = f"(e, P x {blocks}, k): scales of {rows} rows in blocks of {block}"
        raise ShapeError("scales", got=tuple(scale.shape), need=need)
    e, scale_rows, columns = scale.shape
    scale_by_projection = scale.view(e, scale_rows // blocks, blocks, columns)
    scale_by_projection = scale_by_projection.repeat_interleave(block // tile, dim=2)
    return scale_by_projection[:, :, : -(-rows // tile)].flatten(1, 2)
