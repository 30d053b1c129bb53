"""The steps of the parallel LoRA branch (`modular_kernel.ops.moe_lora`), one function each.

    u_TKR = moe_lora_a(x_TH, gate_up_a, batch)                   # u = gate_up_A x
    h_TKI = moe_lora_gate_up_b(u_TKR, gate_up_b, batch)          # h = silu(B_gate u) * (B_up u)
    v_TKR = moe_lora_a(h_TKI, down_a, batch)                     # v = down_A h
    moe_lora_down_combine(v_TKR, down_b, batch, weights_TK, scalings_L, out_TH)

`moe_lora_fused` does all four steps in one launch. Sums are float32, and u, h and v are rounded to
the dtype of x. The functions do not check their arguments.

L is the number of adapter slots, and R is the maximum rank of an adapter. A pair is a token
together with one of its K experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.utils.matmul import matmul

BLOCK_T = 16  # pairs or tokens per program, the minimum number of rows of an MMA operand
_MAX_BLOCK_R = 32  # maximum number of ranks per step
_MIN_BLOCK_R = 16  # minimum number of ranks per step
_BLOCK_I = 64  # columns of h per program
# By element size in bytes:
_BLOCK_K = {2: 64, 4: 32}  # elements per step along K
_BLOCK_OUT = {2: 128, 4: 64}  # columns of the output per program
_FUSED_TILE = 4096  # elements of a matrix that a program of the fused kernel holds at once
_MAX_FUSED_BLOCK = 256  # maximum number of columns of that matrix


@dataclass(frozen=True)
class PairBatch:
    """The adapter and the expert of each pair.

    ids_TK: (T, K) int32 or int64, contiguous, local expert ids. Pairs with an id outside [0, E) are
        skipped.
    slots_T: (T,) int32, the adapter slot of each token. Tokens with a slot outside [0, L) have no
        adapter.
    ranks_LE: (L, E) integers, with any strides. An adapter with a rank <= 0 adds nothing.
    order_P: (T * K,), the order in which programs process pairs; None means ascending order.
    """

    ids_TK: torch.Tensor
    slots_T: torch.Tensor
    ranks_LE: torch.Tensor
    order_P: torch.Tensor | None = None

    def compute_keys(self) -> torch.Tensor:
        """Return the key of each pair, slot * E + expert, (T, K) int64.

        A pair without an adapter has the key L * E. Does not synchronize with the GPU.
        """
        slots, experts = self.ranks_LE.shape
        slots_T1, ids_TK = self.slots_T[:, None].long(), self.ids_TK.long()
        valid = (slots_T1 >= 0) & (slots_T1 < slots) & (ids_TK >= 0) & (ids_TK < experts)
        keys_TK = slots_T1 * experts + ids_TK
        ranks = self.ranks_LE.flatten()[torch.where(valid, keys_TK, 0)]
        return torch.where(valid & (ranks > 0), keys_TK, slots * experts)

    def group_by_key(self) -> "PairBatch":
        """Return a batch with pairs sorted by key, so that programs share matrices."""
        order_P = self.compute_keys().flatten().argsort(stable=True)
        return PairBatch(self.ids_TK, self.slots_T, self.ranks_LE, order_P)

    def iter_keys(self) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """Yield (pairs, slot, expert, rank) of each key in use, for the torch references."""
        slots, experts = self.ranks_LE.shape
        keys_P = self.compute_keys().flatten()
        keys: torch.Tensor = torch.unique(keys_P)
        for key in keys.tolist():
            if key < slots * experts:
                slot, expert = divmod(key, experts)
                yield (
                    (keys_P == key).nonzero()[:, 0],
                    slot,
                    expert,
                    int(self.ranks_LE[slot, expert]),
                )

    def make_arguments(self) -> dict[str, object]:
        """Return the arguments that all kernels have in common."""
        return {
            "topk_ids_ptr": self.ids_TK,
            "adapter_slots_ptr": self.slots_T,
            "lora_ranks_ptr": self.ranks_LE,
            "num_adapter_slots": self.ranks_LE.shape[0],
            "num_experts": self.ranks_LE.shape[1],
            "stride_ranks_slot": self.ranks_LE.stride(0),
            "stride_ranks_expert": self.ranks_LE.stride(1),
            "TOP_K": self.ids_TK.shape[1],
        }

    def make_pair_arguments(self) -> dict[str, object]:
        """Return the arguments of kernels whose rows are pairs."""
        return self.make_arguments() | {
            "pair_order_ptr": self.order_P,
            "HAS_PAIR_ORDER": self.order_P is not None,
            "num_pairs": self.ids_TK.numel(),
            "BLOCK_M": BLOCK_T,
        }


def moe_lora_a(x: torch.Tensor, a_LERD: torch.Tensor, batch: PairBatch) -> torch.Tensor:
    """Return A[slot, expert, :rank] x for every pair, (T, K, R).

    Values beyond the rank of an adapter, and of pairs without an adapter, are 0.

    x: (T, D), or (T, K, D) with one row per pair. Rows are contiguous.
    a_LERD: (L, E, R, D).
    """
    (tokens, top_k), (_, _, max_rank, depth) = batch.ids_TK.shape, a_LERD.shape
    x_XD = x.flatten(0, -2)
    out_TKR = x.new_empty(tokens, top_k, max_rank)
    if out_TKR.numel() == 0:
        return out_TKR
    if not use_triton(x):
        return _moe_lora_a_ref(x_XD, a_LERD, batch)
    from modular_kernel.ops.kernels.moe_lora import moe_lora_a_kernel

    block = _choose_rank_block(max_rank)
    launch(
        moe_lora_a_kernel,
        (-(-batch.ids_TK.numel() // BLOCK_T), -(-max_rank // block)),
        x_ptr=x_XD,
        a_ptr=a_LERD,
        out_ptr=out_TKR,
        max_rank=max_rank,
        size_k=depth,
        stride_x=x_XD.stride(0),
        PAIRS_PER_X_ROW=batch.ids_TK.numel() // len(x_XD),
        BLOCK_RANK=block,
        BLOCK_K=_BLOCK_K[x.itemsize],
        INPUT_PRECISION="ieee",
        **_make_stride_arguments("a", a_LERD, "rank"),
        **batch.make_pair_arguments(),
    )
    return out_TKR


def _moe_lora_a_ref(x_XD: torch.Tensor, a_LERD: torch.Tensor, batch: PairBatch) -> torch.Tensor:
    """Torch reference of `moe_lora_a`.

    x_XD: (T, D) or (T * K, D).
    """
    tokens, top_k = batch.ids_TK.shape
    out_PR = x_XD.new_zeros(tokens * top_k, a_LERD.shape[2])
    for pairs, slot, expert, rank in batch.iter_keys():
        rows = x_XD[pairs // (tokens * top_k // len(x_XD))]
        u = matmul(rows.float(), a_LERD[slot, expert, :rank].float().T)
        out_PR[pairs, : u.shape[1]] = u.to(out_PR.dtype)
    return out_PR.view(tokens, top_k, -1)


def moe_lora_gate_up_b(u_TKR: torch.Tensor, b_LENR: torch.Tensor, batch: PairBatch) -> torch.Tensor:
    """Return silu(B_gate u) * (B_up u) for every pair, (T, K, I); 0 for pairs without an adapter.

    u_TKR: (T, K, R), contiguous.
    b_LENR: (L, E, 2I, R), with gate rows first.
    """
    intermediate, max_rank = b_LENR.shape[2] // 2, b_LENR.shape[3]
    out_TKI = u_TKR.new_empty(*u_TKR.shape[:2], intermediate)
    if out_TKI.numel() == 0:
        return out_TKI
    if not use_triton(u_TKR):
        return _moe_lora_gate_up_b_ref(u_TKR, b_LENR, batch)
    from modular_kernel.ops.kernels.moe_lora import moe_lora_gate_up_b_kernel

    # Float32 matmuls do not use tensor cores, and triton 3.9 spills registers with more columns.
    block = _BLOCK_I if b_LENR.itemsize == 2 else _BLOCK_I // 2
    launch(
        moe_lora_gate_up_b_kernel,
        (-(-batch.ids_TK.numel() // BLOCK_T), -(-intermediate // block)),
        u_ptr=u_TKR,
        b_ptr=b_LENR,
        out_ptr=out_TKI,
        max_rank=max_rank,
        intermediate_size=intermediate,
        BLOCK_INTERMEDIATE=block,
        BLOCK_RANK=_choose_rank_block(max_rank),
        INPUT_PRECISION="ieee",
        **_make_stride_arguments("b", b_LENR, "n"),
        **batch.make_pair_arguments(),
    )
    return out_TKI


def _moe_lora_gate_up_b_ref(
    u_TKR: torch.Tensor, b_LENR: torch.Tensor, batch: PairBatch
) -> torch.Tensor:
    """Torch reference of `moe_lora_gate_up_b`."""
    tokens, top_k, _ = u_TKR.shape
    u_PR = u_TKR.flatten(0, 1)
    out_PI = u_TKR.new_zeros(tokens * top_k, b_LENR.shape[2] // 2)
    for pairs, slot, expert, rank in batch.iter_keys():
        b = b_LENR[slot, expert, :, :rank].float()
        gate, up = matmul(u_PR[pairs, : b.shape[1]].float(), b.T).chunk(2, dim=1)
        out_PI[pairs] = (torch.nn.functional.silu(gate) * up).to(out_PI.dtype)
    return out_PI.view(tokens, top_k, -1)


def moe_lora_down_combine(
    v_TKR: torch.Tensor,
    b_LEHR: torch.Tensor,
    batch: PairBatch,
    weights_TK: torch.Tensor,
    scalings_L: torch.Tensor,
    out_TH: torch.Tensor,
) -> None:
    """Add sum over k of weights[t, k] * scaling[slot] * (B[slot, expert] v[t, k]) to out[t].

    slot is the adapter slot of token t. The sum is computed in float32 and rounded once.

    v_TKR: (T, K, R), contiguous.
    b_LEHR: (L, E, H, R).
    weights_TK: (T, K) float32, contiguous. Weights of pairs without an adapter are not read.
    scalings_L: (L,) float32.
    out_TH: (T, H), with contiguous rows. Rows of tokens without an adapter are not changed.
    """
    if out_TH.numel() == 0:
        return
    if not use_triton(v_TKR):
        _moe_lora_down_combine_ref(v_TKR, b_LEHR, batch, weights_TK, scalings_L, out_TH)
        return
    from modular_kernel.ops.kernels.moe_lora import moe_lora_down_combine_kernel

    (tokens, hidden), max_rank = out_TH.shape, b_LEHR.shape[3]
    block = _BLOCK_OUT[out_TH.itemsize]
    launch(
        moe_lora_down_combine_kernel,
        (-(-tokens // BLOCK_T), -(-hidden // block)),
        v_ptr=v_TKR,
        topk_weights_ptr=weights_TK,
        scalings_ptr=scalings_L,
        b_ptr=b_LEHR,
        out_ptr=out_TH,
        num_tokens=tokens,
        max_rank=max_rank,
        hidden_size=hidden,
        stride_out=out_TH.stride(0),
        BLOCK_M=BLOCK_T,
        BLOCK_HIDDEN=block,
        BLOCK_RANK=_choose_rank_block(max_rank),
        # Avoids register spills of triton 3.9 with 16-bit dtypes, and of 3.6 with 32-bit dtypes.
        num_warps=8 if out_TH.itemsize == 2 else 4,
        INPUT_PRECISION="ieee",
        **_make_stride_arguments("b", b_LEHR, "n"),
        **batch.make_arguments(),
    )


def _moe_lora_down_combine_ref(
    v_TKR: torch.Tensor,
    b_LEHR: torch.Tensor,
    batch: PairBatch,
    weights_TK: torch.Tensor,
    scalings_L: torch.Tensor,
    out_TH: torch.Tensor,
) -> None:
    """Torch reference of `moe_lora_down_combine`."""
    top_k = batch.ids_TK.shape[1]
    v_PR, weights_P = v_TKR.flatten(0, 1), weights_TK.flatten()
    total_TH = torch.zeros(out_TH.shape, dtype=torch.float32, device=out_TH.device)
    has_adapter_T = torch.zeros(len(out_TH), dtype=torch.bool, device=out_TH.device)
    for pairs, slot, expert, rank in batch.iter_keys():
        b = b_LEHR[slot, expert, :, :rank].float()
        part = matmul(v_PR[pairs, : b.shape[1]].float(), b.T)
        total_TH.index_add_(0, pairs // top_k, part * (weights_P[pairs, None] * scalings_L[slot]))
        has_adapter_T[pairs // top_k] = True
    out_TH.copy_(torch.where(has_adapter_T[:, None], out_TH.float() + total_TH, out_TH))


def moe_lora_staged(
    x_TH: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    batch: PairBatch,
    weights_TK: torch.Tensor,
    scalings_L: torch.Tensor,
    out_TH: torch.Tensor,
) -> None:
    """Add the result of all four steps to out (T, H), with one launch per step.

    matrices: as in `moe_lora_fused`.
    """
    if batch.ids_TK.numel() == 0:
        return
    gate_up_a, gate_up_b, down_a, down_b = matrices
    batch = batch.group_by_key()
    u_TKR = moe_lora_a(x_TH, gate_up_a, batch)
    h_TKI = moe_lora_gate_up_b(u_TKR, gate_up_b, batch)
    v_TKR = moe_lora_a(h_TKI, down_a, batch)
    moe_lora_down_combine(v_TKR, down_b, batch, weights_TK, scalings_L, out_TH)


def moe_lora_fused(
    x_TH: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    batch: PairBatch,
    weights_TK: torch.Tensor,
    scalings_L: torch.Tensor,
    out_TH: torch.Tensor,
) -> None:
    """Add the result of all four steps to out (T, H), in one launch.

    Every program repeats the first three steps for its block of H, so this is efficient only for
    few tokens.

    matrices: A of gate and up (L, E, R, H), B of gate and up (L, E, 2I, R), A of down (L, E, R, I)
        and B of down (L, E, H, R).
    """
    if out_TH.numel() == 0:
        return
    gate_up_a, gate_up_b, down_a, down_b = matrices
    if not use_triton(x_TH):
        u_TKR = _moe_lora_a_ref(x_TH, gate_up_a, batch)
        h_TKI = _moe_lora_gate_up_b_ref(u_TKR, gate_up_b, batch)
        v_TKR = _moe_lora_a_ref(h_TKI.flatten(0, 1), down_a, batch)
        _moe_lora_down_combine_ref(v_TKR, down_b, batch, weights_TK, scalings_L, out_TH)
        return
    from modular_kernel.ops.kernels.moe_lora import moe_lora_fused_kernel

    (tokens, hidden), max_rank = out_TH.shape, gate_up_a.shape[2]
    block_r, block = next_power_of_2(max_rank), choose_fused_block(max_rank)
    launch(
        moe_lora_fused_kernel,
        (tokens, -(-hidden // block)),
        x_ptr=x_TH,
        topk_weights_ptr=weights_TK,
        scalings_ptr=scalings_L,
        gate_up_a_ptr=gate_up_a,
        gate_up_b_ptr=gate_up_b,
        down_a_ptr=down_a,
        down_b_ptr=down_b,
        out_ptr=out_TH,
        max_rank=max_rank,
        hidden_size=hidden,
        intermediate_size=down_a.shape[3],
        stride_x=x_TH.stride(0),
        stride_out=out_TH.stride(0),
        BLOCK_RANK=block_r,
        BLOCK_K=block,
        BLOCK_HIDDEN=block,
        **_make_stride_arguments("gate_up_a", gate_up_a, "rank"),
        **_make_stride_arguments("gate_up_b", gate_up_b, "n"),
        **_make_stride_arguments("down_a", down_a, "rank"),
        **_make_stride_arguments("down_b", down_b, "n"),
        **batch.make_arguments(),
    )


def choose_fused_block(max_rank: int) -> int:
    """Return the number of columns of H per program of the fused kernel."""
    return min(_MAX_FUSED_BLOCK, max(_MIN_BLOCK_R, _FUSED_TILE // next_power_of_2(max_rank)))


def _choose_rank_block(max_rank: int) -> int:
    return min(_MAX_BLOCK_R, max(_MIN_BLOCK_R, next_power_of_2(max_rank)))


def _make_stride_arguments(name: str, matrices: torch.Tensor, row: str) -> dict[str, int]:
    """Return the strides of a buffer's slots, experts and rows, as kernel arguments."""
    names = (f"stride_{name}_{dim}" for dim in ("slot", "expert", row))
    return dict(zip(names, matrices.stride(), strict=False))
