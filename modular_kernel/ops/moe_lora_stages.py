"""The steps of the parallel branch of adapters, one function each, and their torch twins.

    u_TKR = moe_lora_a(x_TH, gate_up_a, batch)                   # A13 x
    h_TKI = moe_lora_gate_up_b(u_TKR, gate_up_b, batch)          # silu(B gate u) * (B up u)
    v_TKR = moe_lora_a(h_TKI, down_a, batch)                     # A2 h
    moe_lora_down_combine(v_TKR, down_b, batch, weights_TK, scalings_L, out_TH)

`moe_lora_fused` does all four in one launch. Sums are float32; u, h and v are rounded to the dtype
of x. They take what `modular_kernel.ops.moe_lora.run_moe_lora` has checked.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.utils.matmul import matmul

BLOCK_T = 16  # pairs, and tokens, of a program: the least rows of a product in tensor cores
_BLOCK_R, _BLOCK_I = 32, 64
# Values of a row by their bytes: in a step of a product's depth, and of what a program adds to the
# output.
_DEPTH, _OUT = {2: 64, 4: 32}, {2: 128, 4: 64}
_LEAST_R = 16
# Values of a matrix that a program of the fused kernel holds at once.
_FUSED_TILE, _MOST_FUSED_BLOCK = 4096, 256


@dataclass(frozen=True)
class PairBatch:
    """Whose matrices each pair has.

    ids_TK: (T, K) int32 or int64, contiguous; others than 0 to E - 1 are skipped. slots_T: (T,)
    int32; others than 0 to L - 1 have no adapter. ranks_LE: (L, E) integers of any strides; at 0
    and below there is nothing to add. order_P: (T K,), the order in which programs take the pairs;
    None is theirs.
    """

    ids_TK: torch.Tensor
    slots_T: torch.Tensor
    ranks_LE: torch.Tensor
    order_P: torch.Tensor | None = None

    def keys(self) -> torch.Tensor:
        """Return slot * E + expert of each pair, (T, K) int64; L E where there is nothing to add.

        It neither synchronizes nor depends on values in its shapes.
        """
        slots, experts = self.ranks_LE.shape
        slots_T1, ids_TK = self.slots_T[:, None].long(), self.ids_TK.long()
        there = (slots_T1 >= 0) & (slots_T1 < slots) & (ids_TK >= 0) & (ids_TK < experts)
        keys_TK = slots_T1 * experts + ids_TK
        ranks = self.ranks_LE.flatten()[torch.where(there, keys_TK, 0)]
        return torch.where(there & (ranks > 0), keys_TK, slots * experts)

    def grouped(self) -> "PairBatch":
        """Return it with its pairs in the order of their keys, so that tiles share matrices."""
        order_P = self.keys().flatten().argsort(stable=True)
        return PairBatch(self.ids_TK, self.slots_T, self.ranks_LE, order_P)

    def of_each_key(self) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """Yield pairs, slot, expert and rank of each key that there is; the twins' own walk."""
        slots, experts = self.ranks_LE.shape
        keys_P = self.keys().flatten()
        found: torch.Tensor = torch.unique(keys_P)
        for key in found.tolist():
            if key < slots * experts:
                slot, expert = divmod(key, experts)
                yield (
                    (keys_P == key).nonzero()[:, 0],
                    slot,
                    expert,
                    int(self.ranks_LE[slot, expert]),
                )

    def arguments(self) -> dict[str, object]:
        """Return the arguments that all kernels have."""
        return {
            "ids_ptr": self.ids_TK,
            "slots_ptr": self.slots_T,
            "ranks_ptr": self.ranks_LE,
            "num_slots": self.ranks_LE.shape[0],
            "num_experts": self.ranks_LE.shape[1],
            "stride_rank_l": self.ranks_LE.stride(0),
            "stride_rank_e": self.ranks_LE.stride(1),
            "TOP_K": self.ids_TK.shape[1],
        }

    def pair_arguments(self) -> dict[str, object]:
        """Return those of kernels whose rows are pairs."""
        return self.arguments() | {
            "order_ptr": self.order_P,
            "GROUPED": self.order_P is not None,
            "num_pairs": self.ids_TK.numel(),
            "BLOCK_T": BLOCK_T,
        }


def moe_lora_a(x: torch.Tensor, a_LERD: torch.Tensor, batch: PairBatch) -> torch.Tensor:
    """Return A[slot, expert, :rank] x of every pair, (T, K, R); 0 beyond a rank, and of no key.

    x: (T, D), or (T, K, D) with a row for each pair; values of a row side by side. a: (L, E, R, D).
    """
    (tokens, top_k), (_, _, max_rank, depth) = batch.ids_TK.shape, a_LERD.shape
    x_XD = x.flatten(0, -2)
    out_TKR = x.new_empty(tokens, top_k, max_rank)
    if out_TKR.numel() == 0:
        return out_TKR
    if not use_triton(x):
        return _moe_lora_a_ref(x_XD, a_LERD, batch)
    from modular_kernel.ops.kernels.moe_lora import moe_lora_a_kernel

    block = _rank_block(max_rank)
    launch(
        moe_lora_a_kernel,
        (-(-batch.ids_TK.numel() // BLOCK_T), -(-max_rank // block)),
        x_ptr=x_XD,
        a_ptr=a_LERD,
        out_ptr=out_TKR,
        max_rank=max_rank,
        depth=depth,
        stride_x=x_XD.stride(0),
        X_TOP_K=batch.ids_TK.numel() // len(x_XD),
        BLOCK_R=block,
        BLOCK_K=_DEPTH[x.itemsize],
        PRECISION="ieee",
        **_strides("a", a_LERD, "r"),
        **batch.pair_arguments(),
    )
    return out_TKR


def _moe_lora_a_ref(x_XD: torch.Tensor, a_LERD: torch.Tensor, batch: PairBatch) -> torch.Tensor:
    """Torch twin of `moe_lora_a`; x (T, D) or (T K, D)."""
    tokens, top_k = batch.ids_TK.shape
    out_PR = x_XD.new_zeros(tokens * top_k, a_LERD.shape[2])
    for pairs, slot, expert, rank in batch.of_each_key():
        rows = x_XD[pairs // (tokens * top_k // len(x_XD))]
        u = matmul(rows.float(), a_LERD[slot, expert, :rank].float().T)
        out_PR[pairs, : u.shape[1]] = u.to(out_PR.dtype)
    return out_PR.view(tokens, top_k, -1)


def moe_lora_gate_up_b(u_TKR: torch.Tensor, b_LENR: torch.Tensor, batch: PairBatch) -> torch.Tensor:
    """Return silu(B_gate u) * (B_up u) of every pair, (T, K, I); 0 of pairs without a key.

    u: (T, K, R), contiguous. b: (L, E, 2I, R), gate's rows, then up's.
    """
    intermediate, max_rank = b_LENR.shape[2] // 2, b_LENR.shape[3]
    out_TKI = u_TKR.new_empty(*u_TKR.shape[:2], intermediate)
    if out_TKI.numel() == 0:
        return out_TKI
    if not use_triton(u_TKR):
        return _moe_lora_gate_up_b_ref(u_TKR, b_LENR, batch)
    from modular_kernel.ops.kernels.moe_lora import moe_lora_gate_up_b_kernel

    # float32 products take no tensor cores, but registers: of more columns triton 3.9 spills some.
    block = _BLOCK_I if b_LENR.itemsize == 2 else _BLOCK_I // 2
    launch(
        moe_lora_gate_up_b_kernel,
        (-(-batch.ids_TK.numel() // BLOCK_T), -(-intermediate // block)),
        u_ptr=u_TKR,
        b_ptr=b_LENR,
        out_ptr=out_TKI,
        max_rank=max_rank,
        intermediate=intermediate,
        BLOCK_I=block,
        BLOCK_R=_rank_block(max_rank),
        PRECISION="ieee",
        **_strides("b", b_LENR, "n"),
        **batch.pair_arguments(),
    )
    return out_TKI


def _moe_lora_gate_up_b_ref(
    u_TKR: torch.Tensor, b_LENR: torch.Tensor, batch: PairBatch
) -> torch.Tensor:
    """Torch twin of `moe_lora_gate_up_b`."""
    tokens, top_k, _ = u_TKR.shape
    u_PR = u_TKR.flatten(0, 1)
    out_PI = u_TKR.new_zeros(tokens * top_k, b_LENR.shape[2] // 2)
    for pairs, slot, expert, rank in batch.of_each_key():
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
    """out[t] += sum over k of weights[t, k] * scaling of t's slot * (B[slot, expert] v[t, k]).

    v: (T, K, R), contiguous. b: (L, E, H, R). weights: (T, K) float32, contiguous; those of pairs
    without a key are not read. scalings: (L,) float32. out: (T, H), values of a row side by side.
    Summed in float32, rounded once; rows of tokens without a key keep their bits.
    """
    if out_TH.numel() == 0:
        return
    if not use_triton(v_TKR):
        _moe_lora_down_combine_ref(v_TKR, b_LEHR, batch, weights_TK, scalings_L, out_TH)
        return
    from modular_kernel.ops.kernels.moe_lora import moe_lora_down_combine_kernel

    (tokens, hidden), max_rank = out_TH.shape, b_LEHR.shape[3]
    block = _OUT[out_TH.itemsize]
    launch(
        moe_lora_down_combine_kernel,
        (-(-tokens // BLOCK_T), -(-hidden // block)),
        v_ptr=v_TKR,
        weights_ptr=weights_TK,
        scalings_ptr=scalings_L,
        b_ptr=b_LEHR,
        out_ptr=out_TH,
        num_tokens=tokens,
        max_rank=max_rank,
        hidden=hidden,
        stride_out=out_TH.stride(0),
        BLOCK_T=BLOCK_T,
        BLOCK_H=block,
        BLOCK_R=_rank_block(max_rank),
        # Otherwise registers spill: of 16 bits with triton 3.9, of 32 with 3.6.
        num_warps=8 if out_TH.itemsize == 2 else 4,
        PRECISION="ieee",
        **_strides("b", b_LEHR, "n"),
        **batch.arguments(),
    )


def _moe_lora_down_combine_ref(
    v_TKR: torch.Tensor,
    b_LEHR: torch.Tensor,
    batch: PairBatch,
    weights_TK: torch.Tensor,
    scalings_L: torch.Tensor,
    out_TH: torch.Tensor,
) -> None:
    """Torch twin of `moe_lora_down_combine`."""
    top_k = batch.ids_TK.shape[1]
    v_PR, weights_P = v_TKR.flatten(0, 1), weights_TK.flatten()
    total_TH = torch.zeros(out_TH.shape, dtype=torch.float32, device=out_TH.device)
    touched_T = torch.zeros(len(out_TH), dtype=torch.bool, device=out_TH.device)
    for pairs, slot, expert, rank in batch.of_each_key():
        b = b_LEHR[slot, expert, :, :rank].float()
        part = matmul(v_PR[pairs, : b.shape[1]].float(), b.T)
        total_TH.index_add_(0, pairs // top_k, part * (weights_P[pairs, None] * scalings_L[slot]))
        touched_T[pairs // top_k] = True
    out_TH.copy_(torch.where(touched_T[:, None], out_TH.float() + total_TH, out_TH))


def moe_lora_staged(
    x_TH: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    batch: PairBatch,
    weights_TK: torch.Tensor,
    scalings_L: torch.Tensor,
    out_TH: torch.Tensor,
) -> None:
    """Add all four steps' sum to out (T, H), as `moe_lora_fused`, in a launch each.

    A of the second product is multiplied once for each pair.
    """
    if batch.ids_TK.numel() == 0:
        return
    a13, b13, a2, b2 = matrices
    batch = batch.grouped()
    u_TKR = moe_lora_a(x_TH, a13, batch)
    h_TKI = moe_lora_gate_up_b(u_TKR, b13, batch)
    v_TKR = moe_lora_a(h_TKI, a2, batch)
    moe_lora_down_combine(v_TKR, b2, batch, weights_TK, scalings_L, out_TH)


def moe_lora_fused(
    x_TH: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    batch: PairBatch,
    weights_TK: torch.Tensor,
    scalings_L: torch.Tensor,
    out_TH: torch.Tensor,
) -> None:
    """Add all four steps' sum to out (T, H) in one launch; its torch twin is the steps in turn.

    matrices: A (L, E, R, H), B (L, E, 2I, R), A (L, E, R, I), B (L, E, H, R). A program computes
    the first three steps of its token again for each of its blocks of H: for few tokens.
    """
    if out_TH.numel() == 0:
        return
    a13, b13, a2, b2 = matrices
    if not use_triton(x_TH):
        u_TKR = _moe_lora_a_ref(x_TH, a13, batch)
        h_TKI = _moe_lora_gate_up_b_ref(u_TKR, b13, batch)
        v_TKR = _moe_lora_a_ref(h_TKI.flatten(0, 1), a2, batch)
        _moe_lora_down_combine_ref(v_TKR, b2, batch, weights_TK, scalings_L, out_TH)
        return
    from modular_kernel.ops.kernels.moe_lora import moe_lora_fused_kernel

    (tokens, hidden), max_rank = out_TH.shape, a13.shape[2]
    block_r, block = next_power_of_2(max_rank), fused_block(max_rank)
    launch(
        moe_lora_fused_kernel,
        (tokens, -(-hidden // block)),
        x_ptr=x_TH,
        weights_ptr=weights_TK,
        scalings_ptr=scalings_L,
        a13_ptr=a13,
        b13_ptr=b13,
        a2_ptr=a2,
        b2_ptr=b2,
        out_ptr=out_TH,
        max_rank=max_rank,
        hidden=hidden,
        intermediate=a2.shape[3],
        stride_x=x_TH.stride(0),
        stride_out=out_TH.stride(0),
        BLOCK_R=block_r,
        BLOCK_K=block,
        BLOCK_H=block,
        **_strides("a13", a13, "r"),
        **_strides("b13", b13, "n"),
        **_strides("a2", a2, "r"),
        **_strides("b2", b2, "n"),
        **batch.arguments(),
    )


def fused_block(max_rank: int) -> int:
    """Return the columns of H that a program of the fused kernel has."""
    return min(_MOST_FUSED_BLOCK, max(_LEAST_R, _FUSED_TILE // next_power_of_2(max_rank)))


def _rank_block(max_rank: int) -> int:
    return min(_BLOCK_R, max(_LEAST_R, next_power_of_2(max_rank)))


def _strides(name: str, matrices: torch.Tensor, row: str) -> dict[str, int]:
    """Return the arguments of how a buffer's slots, experts and rows lie."""
    names = (f"stride_{name}{each}" for each in ("l", "e", row))
    return dict(zip(names, matrices.stride(), strict=False))
