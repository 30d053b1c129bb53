"""Tell which field of an ExpertWeights each tensor of a module is, and how it becomes it.

A text: `w1:t,w2:t,b1,b2` says that four tensors are these fields, the first two transposed. What
may follow a name, each after a colon:

    t         its last two dimensions exchanged: a view
    flat      its last two dimensions made one, (e, N, K / 32, 16) to (e, N, K / 2): a view
    bytes     its memory as uint8: a view
    first=N   the first N of its first dimension: a view
    float     as float32: a copy, if it is not
    channel=N its (e, P, 1) scales of P projections, one for each of N rows: a copy
    tiles=RxBxT its rows are scales of B rows of each projection, which has R: repeated so that
                there is one for each T rows, T being a divisor of B
    loaded    as it is; StateError where it still has the values that a layer is made with

Copies are made when weights are bound, and again where the tensor was moved or written to.
"""

from collections.abc import Sequence

import torch

from modular_kernel.errors import ConfigurationError, ShapeError
from modular_kernel.tensors import ExpertWeights, check_loaded

_NAMES = frozenset(ExpertWeights.__dataclass_fields__)


def weights_from(tensors: Sequence[torch.Tensor], fields: str) -> ExpertWeights:
    """Return the weights that `fields` says the tensors are; ConfigurationError if it does not."""
    named = fields.split(",")
    if len(named) != len(tensors):
        got, need = f"{len(tensors)} tensors", f"as many as fields name: {fields[:80]}"
        raise ConfigurationError("params", got=got, need=need)
    made: dict[str, torch.Tensor] = {}
    to_check: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for text, tensor in zip(named, tensors, strict=True):
            name, *steps = text.split(":")
            if name not in _NAMES or name in made:
                need = f"one of {', '.join(sorted(_NAMES))}, each once"
                raise ConfigurationError("fields", got=name[:80], need=need)
            for step in steps:
                if step == "loaded":
                    to_check[name] = tensor
                else:
                    tensor = _step(step, tensor)
            made[name] = tensor
        check_loaded(to_check)
    if not {"w1", "w2"} <= made.keys():
        raise ConfigurationError("fields", got=fields[:80], need="w1 and w2 among them")
    return ExpertWeights(**made)


def place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what changes when a tensor's memory is exchanged, reshaped, or written to."""
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.shape, version


def _step(step: str, tensor: torch.Tensor) -> torch.Tensor:
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
        return _tiles(tensor, *map(int, sizes))
    need = "t, flat, bytes, first=N, float, channel=N, tiles=RxBxT or loaded"
    raise ConfigurationError("fields", got=step[:80], need=need)


def _tiles(scale: torch.Tensor, rows: int, block: int, tile: int) -> torch.Tensor:
    """(e, P ceil(rows / block), k) scales of P projections to (e, P ceil(rows / tile), k)."""
    blocks = -(-rows // block)
    if scale.dim() != 3 or scale.shape[1] % blocks:
        need = f"(e, P x {blocks}, k): scales of {rows} rows in blocks of {block}"
        raise ShapeError("scales", got=tuple(scale.shape), need=need)
    e, rows_of_scales, columns = scale.shape
    apart = scale.view(e, rows_of_scales // blocks, blocks, columns)
    apart = apart.repeat_interleave(block // tile, dim=2)
    return apart[:, :, : -(-rows // tile)].flatten(1, 2)
