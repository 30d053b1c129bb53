"""The two classes of FlashInfer's one-sided all-to-all, with one interface.

`MoeAlltoAllExchange` uses comm.MoeAlltoAll, which FlashInfer contained until 0.7.2.
`NVLinkOneSidedExchange` uses its replacement, moe_ep.NVLinkOneSidedAlltoAll, in releases without
MoeAlltoAll. Both exchange rows through a workspace, which the library shares between objects of
equal sizes. Each object here gets a workspace of its own: `serial` makes its size unique.

An object is used for one call at a time: a dispatch, then a combine.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from modular_kernel.errors import ConfigurationError
from prepare_finalize.common.library_calls import unpack

INVALID_ID = -1  # expert number of unused rows
_ID_BYTES, _WEIGHT_BYTES = 4, 4
_SIZE_STEP = 256  # bytes by which the sizes of workspaces differ; a multiple of their alignments
# Transports of the replacement that the part does not use. They need compute capability 10.0, where
# the part has not run.
_OTHER_TRANSPORTS = ("cft", "lamport")


@dataclass(frozen=True)
class AlltoAllShape:
    """The sizes of one exchange, the same on every rank.

    max_tokens: largest T of a rank, at least 1.
    num_experts: number of expert slots of all ranks together.
    top_k: experts per token.
    hidden: H.
    dtype: dtype of the combined rows, of 16 bits.
    scale_bytes: bytes of one token's scales in the dispatch.
    """

    max_tokens: int
    num_experts: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    scale_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row that is not quantized."""
        return self.hidden * self.dtype.itemsize

    @property
    def dispatch_bytes(self) -> int:
        """Bytes of one token in the dispatch: its row, scales, expert numbers and weights."""
        return self.row_bytes + self.scale_bytes + self.top_k * (_ID_BYTES + _WEIGHT_BYTES)


@dataclass(frozen=True)
class Payloads:
    """The tensors that a dispatch sends or receives, contiguous and with a row for each token.

    rows: (T, H), or quantized rows.
    scale: scales of quantized rows; None if none are sent.
    numbers_TK: int32, expert numbers; -1 skips a pair.
    weights_TK: float32, router weights.
    """

    rows: torch.Tensor
    scale: torch.Tensor | None
    numbers_TK: torch.Tensor
    weights_TK: torch.Tensor


class Exchange(Protocol):
    """An object of the library.

    needs_targets: whether the library cannot skip pairs. `dispatch` then needs `targets_TK`.
    """

    needs_targets: bool

    def dispatch(self, sent: Payloads, targets_TK: torch.Tensor | None) -> Payloads:
        """Send each token's tensors once to each rank that has one of its experts.

        targets_TK: int32, expert numbers without skipped pairs, if `needs_targets`.

        Returns the received tensors, of ranks x max_tokens rows. Unused rows have expert numbers of
        -1, and are otherwise undefined.
        """

    def combine(self, sums: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Return the sums over ranks of the rows of each token, (T, H), in `out` unless it is None.

        sums: (ranks, max_tokens, H) contiguous, a row for each received row.
        """

    def free(self) -> None:
        """Free the workspace."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of an exchange.

    communicator: the library's communicator, over all of them.
    group: their process group.
    """

    rank: int
    world_size: int
    communicator: Any
    group: Any


def make_exchange(library: Any, shape: AlltoAllShape, ranks: Ranks, serial: int) -> Exchange:
    """Allocate a workspace, with the class that the library has. Collective.

    serial: a number that no other workspace of these ranks has, the same on every rank.
    """
    if hasattr(library, "MoeAlltoAll"):
        return MoeAlltoAllExchange(library, shape, ranks, serial)
    return NVLinkOneSidedExchange(library, shape, ranks, serial)


class MoeAlltoAllExchange:
    """An Exchange over comm.MoeAlltoAll.

    The library sends a row with a negative expert number to rank 0, so it gets `targets_TK`, and
    the numbers travel beside them.
    """

    needs_targets = True

    def __init__(self, library: Any, shape: AlltoAllShape, ranks: Ranks, serial: int) -> None:
        nbytes = library.moe_a2a_get_workspace_size_per_rank(
            ranks.world_size, shape.max_tokens, shape.dispatch_bytes, shape.row_bytes
        )
        self._all_to_all = library.MoeAlltoAll(
            library.Mapping(
                world_size=ranks.world_size,
                rank=ranks.rank,
                gpus_per_node=ranks.world_size,
                tp_size=ranks.world_size,
                moe_ep_size=ranks.world_size,
                moe_tp_size=1,
            ),
            max_num_tokens=shape.max_tokens,
            top_k=shape.top_k,
            num_experts=shape.num_experts,
            workspace_size_per_rank=nbytes + serial * _SIZE_STEP,
            mnnvl_config=library.MnnvlConfig(comm_backend=ranks.communicator),
        )
        self._max_tokens = shape.max_tokens

    def dispatch(self, sent: Payloads, targets_TK: torch.Tensor | None) -> Payloads:
        scales = [] if sent.scale is None else [sent.scale]
        payloads = [sent.rows, *scales, sent.numbers_TK, sent.weights_TK]
        results = self._all_to_all.dispatch(
            targets_TK,
            payloads,
            self._max_tokens,
            invalid_token_expert_id=INVALID_ID,
            expert_id_payload_index=len(payloads) - 2,
        )
        received = unpack(results, len(payloads), "FlashInfer's MoeAlltoAll.dispatch")
        rows, *received_scales, numbers_RK, weights_RK = (
            payload.flatten(0, 1) for payload in received
        )
        return Payloads(rows, received_scales[0] if scales else None, numbers_RK, weights_RK)

    def combine(self, sums: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        combined: torch.Tensor = self._all_to_all.combine(sums, self._max_tokens, output=out)
        return combined

    def free(self) -> None:
        # The library caches workspaces until the process exits. This private method is the only way
        # to release one.
        self._all_to_all._reset_workspace()


class NVLinkOneSidedExchange:
    """An Exchange over moe_ep.NVLinkOneSidedAlltoAll, which skips pairs with negative numbers.

    Of its transports, only the one with completion flags is used.
    """

    needs_targets = False

    def __init__(self, library: Any, shape: AlltoAllShape, ranks: Ranks, serial: int) -> None:
        rows = ranks.world_size * shape.max_tokens
        config_fields = {field.name for field in fields(library.NVLinkOneSidedConfig)}
        self._all_to_all = library.NVLinkOneSidedAlltoAll(
            library.BootstrapConfig(
                world_size=ranks.world_size, rank=ranks.rank, process_group=ranks.group
            ),
            library.MoEEpCommParams(
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                max_tokens_per_rank=shape.max_tokens,
                hidden_size=shape.hidden,
                dtype=shape.dtype,
                invalid_expert_id=INVALID_ID,
            ),
            library.NVLinkOneSidedConfig(
                extra_payload_bytes_per_token=(
                    shape.scale_bytes + serial * math.ceil(_SIZE_STEP / rows)
                ),
                comm_backend=ranks.communicator,
                **dict.fromkeys(config_fields.intersection(_OTHER_TRANSPORTS), False),
            ),
        )

    def dispatch(self, sent: Payloads, targets_TK: torch.Tensor | None) -> Payloads:
        result = self._all_to_all.dispatch(
            sent.rows, sent.numbers_TK, sent.weights_TK, hidden_states_scale=sent.scale
        )
        names = "hidden_states", "hidden_states_scale", "topk_ids", "topk_weights"
        missing = [name for name in names if not hasattr(result, name)]
        if missing:
            subject = "FlashInfer's NVLinkOneSidedAlltoAll.dispatch"
            raise ConfigurationError(
                subject, got=f"no {', '.join(missing)}", need=f"{', '.join(names)}"
            )
        return Payloads(*(getattr(result, name) for name in names))

    def combine(self, sums: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        combined: torch.Tensor = self._all_to_all.combine(sums, output=out)
        return combined

    def free(self) -> None:
        self._all_to_all.destroy()
