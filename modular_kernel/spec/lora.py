"""Specification of a layer's LoRA adapters: slots, maximum rank, shared matrices, and tensors.

    AdapterSpec.parse("adapters=4,rank=32,a13=shared")

Each expert computes w1 x + B13 (A13 x) before the activation, and w2 h + B2 (A2 h) after it, with
the matrices of the token's adapter. `modular_kernel.tensors.ExpertWeights` describes the layout of
these matrices.
"""

import re
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import Annotated

import torch
from torch.compiler import is_compiling

from modular_kernel.errors import ConfigurationError, DeviceError, DtypeError, ShapeError
from modular_kernel.spec.intermediate_split import split_intermediate
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.utils.argument_checks import (
    MAX_INT32,
    Between,
    Count,
    check_fields,
    expect,
    format_value,
)
from modular_kernel.utils.tensor_checks import check_tensor, check_tensors

NO_ADAPTERS = "none"
MAX_ADAPTERS, MAX_RANK = 65536, 256
_OPTION = re.compile(r"(adapters|rank)=([0-9]{1,9})|(a13|outer)=shared")
_NEED = "none, or adapters=L,rank=R[,a13=shared][,outer=shared], each option once"


@dataclass(frozen=True)
class AdapterSpec:
    """Adapter slots of a layer.

    adapters: L, the number of slots that tokens can select.
    rank: R, the largest rank of an adapter.
    a13_shared: gate and up share one A of shape (R, H), instead of having R rows each.
    outer_shared: all experts share the A of w1 and the B of w2.
    """

    adapters: Annotated[int, Between(1, MAX_ADAPTERS)]
    rank: Annotated[int, Between(1, MAX_RANK)]
    a13_shared: bool = False
    outer_shared: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "lora ")

    @classmethod
    def parse(cls, text: object) -> "AdapterSpec | None":
        """Parse the format of `str()`. Returns None for "none".

        Raises ConfigurationError for any other text.
        """
        if isinstance(text, AdapterSpec):
            return text
        if not isinstance(text, str):
            raise ConfigurationError("lora", got=format_value(text), need=_NEED)
        if text == NO_ADAPTERS:
            return None
        return _parse(text)

    def __str__(self) -> str:
        shared = (("a13", self.a13_shared), ("outer", self.outer_shared))
        options = "".join(f",{key}=shared" for key, is_shared in shared if is_shared)
        return f"adapters={self.adapters},rank={self.rank}{options}"

    def shapes(
        self, experts: int, w1_rows: int, hidden: int, intermediate: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the shape of each adapter tensor of ExpertWeights, by field name.

        experts: e, the number of experts on this rank.
        w1_rows: N, the number of rows of w1: twice `intermediate` if gated.
        """
        slots, rank = self.adapters, self.rank
        num_outer = 1 if self.outer_shared else experts
        num_a = 1 if self.a13_shared or w1_rows == intermediate else 2
        return {
            "lora_a13": (slots, num_outer, num_a * rank, hidden),
            "lora_b13": (slots, experts, w1_rows, rank),
            "lora_a2": (slots, experts, rank, intermediate),
            "lora_b2": (slots, num_outer, hidden, rank),
        }

    def slot_numel(self, experts: int, w1_rows: int, hidden: int, intermediate: int) -> int:
        """Return the number of elements in one slot. The arguments are those of `shapes`."""
        shapes = self.shapes(experts, w1_rows, hidden, intermediate)
        return sum(prod(shape[1:]) for shape in shapes.values())


@lru_cache(maxsize=64)
def _parse(text: str) -> AdapterSpec:
    """Parse a spec. Cached, because many problems have the same spec."""
    items = text.split(",")
    options = [_OPTION.fullmatch(item) for item in items]
    keys = [match[1] or match[3] for match in options if match]
    if not {"adapters", "rank"} <= set(keys) or len(set(keys)) < len(items):
        raise ConfigurationError("lora", got=format_value(text), need=_NEED)
    sizes = {match[1]: int(match[2]) for match in options if match and match[1]}
    return AdapterSpec(sizes["adapters"], sizes["rank"], "a13" in keys, "outer" in keys)


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter of rank r for one layer: the `ExpertWeights` tensors without the slot dimension.

    lora_a13: (e, 2r, H), with r rows for gate, then r rows for up; (e, r, H) if gate and up share
        one A, or if there is no gate.
    lora_b13: (e, N, r), with rows in the order of w1.
    lora_a2: (e, r, I).
    lora_b2: (e, H, r).

    If the experts share lora_a13 and lora_b2, the first dimension of these is 1. The adapter's
    scaling is folded into lora_b13 and lora_b2.
    """

    lora_a13: torch.Tensor
    lora_b13: torch.Tensor
    lora_a2: torch.Tensor
    lora_b2: torch.Tensor

    def share(
        self, rank: int, ranks: int, *, gated: bool = True, quant: QuantScheme | str = "none"
    ) -> "Adapter":
        """Return one tensor-parallel rank's shard of the adapter. The shards' results add up.

        The A of w1 and the B of w2 are replicated. The B of w1 is split along its rows, separately
        for gate and up, and the A of w2 along its columns. A rank's shard covers the same columns
        of I as its weights, and is padded with zeros if they are (`spec.intermediate_split`).

        rank: this tensor-parallel rank.
        ranks: number of tensor-parallel ranks.
        gated: whether w1 has gate rows before up rows. False if w1 has no gate rows, or if gate and
            up rows are interleaved. The rows are then split in one piece.
        quant: quantization scheme of the layer's weights, `layer.problem.quant`.

        Raises ConfigurationError if there are more ranks than columns, and DtypeError or ShapeError
        if a tensor does not belong to a valid adapter or if the rows of lora_b13 do not match
        `gated`.
        """
        expect("gated", gated, bool)
        check_tensors(vars(self))
        for name in ("lora_b13", "lora_a2"):
            tensor = getattr(self, name)
            if tensor.dim() != 3:
                raise ShapeError(name, got=tuple(tensor.shape), need="three dimensions")
        (experts, rows, columns), intermediate = self.lora_b13.shape, self.lora_a2.shape[2]
        expect("ranks", ranks, Count)
        expect("rank", rank, Annotated[int, Between(0, ranks - 1)])
        split = split_intermediate(intermediate, ranks, QuantScheme.parse(quant))
        allowed_rows = (2 * intermediate,) if gated else (intermediate, 2 * intermediate)
        if rows not in allowed_rows:
            need = f"{' or '.join(map(str, allowed_rows))} with gated={gated}"
            raise ShapeError("lora_b13: rows", got=rows, need=need)
        first_column, end_column = split.columns(rank)
        num_padding, rows_per_column = (
            split.width - (end_column - first_column),
            rows // intermediate,
        )
        shape = (experts, 2, intermediate) if gated else (experts, 1, intermediate, rows_per_column)
        b13 = self.lora_b13.reshape(*shape, -1, columns)[:, :, first_column:end_column]
        b13 = torch.nn.functional.pad(b13, (0, 0) * (b13.dim() - 3) + (0, num_padding))
        a2 = torch.nn.functional.pad(self.lora_a2[..., first_column:end_column], (0, num_padding))
        return replace(self, lora_b13=b13.reshape(experts, -1, columns), lora_a2=a2.contiguous())

    def __repr__(self) -> str:
        """Return the shapes, without values."""
        shapes = (
            f"{field.name}={tuple(getattr(self, field.name).shape)}" for field in fields(self)
        )
        return f"Adapter({', '.join(shapes)})"


def slots_from_sequences(
    starts_S1: torch.Tensor, slots_S: torch.Tensor, tokens: int
) -> torch.Tensor:
    """Return `Routing.adapters_T`, (T,) int32, for tokens packed sequence by sequence.

    starts_S1: (S + 1,) integers, ascending from 0. Sequence s consists of the tokens
        [starts[s], starts[s + 1]), and may be empty.
    slots_S: (S,) integers, the adapter slot of each sequence, or -1 for no adapter.
    tokens: T. Tokens after the last sequence have no adapter.

    This function does not synchronize and can be captured in a CUDA graph. Therefore, the values of
    starts_S1 are checked only if they are on the CPU. Raises ConfigurationError, DtypeError,
    ShapeError or DeviceError for invalid arguments.
    """
    for what, tensor in (("starts of sequences", starts_S1), ("slots of sequences", slots_S)):
        check_tensor(what, tensor)
        is_not_integer = tensor.is_floating_point() or tensor.is_complex()
        if is_not_integer or tensor.dtype is torch.bool:
            raise DtypeError(what, got=tensor.dtype, need="integers")
    expect("tokens", tokens, Annotated[int, Between(0, MAX_INT32)])
    if starts_S1.device != slots_S.device:
        need = f"{starts_S1.device}, where the starts are"
        raise DeviceError("slots of sequences", got=slots_S.device, need=need)
    if slots_S.dim() != 1 or starts_S1.shape != (len(slots_S) + 1,):
        got = f"{tuple(starts_S1.shape)} starts, {tuple(slots_S.shape)} slots"
        raise ShapeError("sequences", got=got, need="(S + 1,) starts and (S,) slots")
    if starts_S1.device.type == "cpu" and not is_compiling():
        starts = starts_S1.long()
        if starts[0] or starts[-1] > tokens or bool((starts[1:] < starts[:-1]).any()):
            need = f"ascending from 0, up to {tokens} tokens"
            raise ConfigurationError("starts of sequences", got=starts[:8].tolist(), need=need)
    # Compute in int64: a narrower dtype may not hold -1 or every token index, and an out-of-range
    # slot could wrap around to a valid slot.
    token_T = torch.arange(tokens, device=starts_S1.device)
    sequence_T = torch.searchsorted(starts_S1[1:].long().contiguous(), token_T, right=True)
    slots_S = slots_S.long().clamp(-(1 << 31), (1 << 31) - 1)
    no_adapter = slots_S.new_full((1,), -1)
    return torch.cat([slots_S, no_adapter])[sequence_T].to(torch.int32)
