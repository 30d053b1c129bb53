"""Reference for the LoRA deltas of both GEMMs, with roundings that the caller chooses."""

from collections.abc import Callable

import torch

from modular_kernel.spec.problem import ActivationSpec
from modular_kernel.tensors import ExpertWeights, Routing

Rounding = Callable[[torch.Tensor], torch.Tensor]
Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (R, K), (N, K) -> (R, N)


class Adapters:
    """Computes the LoRA deltas B (A x) of a call, which are 0 for tokens without an adapter.

    x and h are unquantized.

    weights: the weights with the adapters' matrices.
    routing: the call's routing, with the adapter slot of each token.
    matmul: multiplies rows (R, K) by the transpose of a matrix (N, K).
    round_operand: rounds an operand of a matrix product.
    round_u: rounds u = A x.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        routing: Routing,
        *,
        matmul: Matmul,
        round_operand: Rounding,
        round_u: Rounding,
    ) -> None:
        self._weights, self._slots_T = weights, routing.slots_T
        self._matmul, self._round_operand, self._round_u = matmul, round_operand, round_u

    def compute_w1_delta(
        self, x_RH: torch.Tensor, token: torch.Tensor, expert: int, act: ActivationSpec
    ) -> torch.Tensor | float:
        """Return the delta of GEMM 1 for rows of one expert, (R, N).

        x_RH: (R, H), unquantized.
        token: (R,), the token of each row.
        """
        a, b = self._weights.lora_a13, self._weights.lora_b13
        if a is None or b is None or self._slots_T is None:
            return 0.0
        rank, num_rows = b.shape[3], b.shape[2]
        if a.shape[2] == rank:  # one A for gate and up, or no gate
            return self._compute_delta(x_RH, a, b, token, expert)
        gates, ups = slice(0, num_rows // 2), slice(num_rows // 2, None)
        if act.interleaved:
            gates, ups = slice(0, None, 2), slice(1, None, 2)
        out = x_RH.new_zeros(len(x_RH), num_rows)
        for rows_slice, rank_slice in ((gates, slice(0, rank)), (ups, slice(rank, None))):
            out[:, rows_slice] = self._compute_delta(
                x_RH, a[:, :, rank_slice], b[:, :, rows_slice], token, expert
            )
        return out

    def compute_w2_delta(
        self, h_RI: torch.Tensor, token: torch.Tensor, expert: int
    ) -> torch.Tensor | float:
        """Return the delta of GEMM 2 for rows of one expert, (R, H).

        h_RI: (R, I), unquantized.
        token: (R,), the token of each row.
        """
        a, b = self._weights.lora_a2, self._weights.lora_b2
        if a is None or b is None or self._slots_T is None:
            return 0.0
        return self._compute_delta(h_RI, a, b, token, expert)

    def _compute_delta(
        self,
        rows_RK: torch.Tensor,
        a_LeRK: torch.Tensor,
        b_LeNR: torch.Tensor,
        token: torch.Tensor,
        expert: int,
    ) -> torch.Tensor:
        assert self._slots_T is not None
        slots = self._slots_T[token]
        out = rows_RK.new_zeros(len(rows_RK), b_LeNR.shape[2])
        for slot in sorted(set(slots.tolist())):
            if not 0 <= slot < len(a_LeRK):
                continue
            selected = slots == slot
            a = a_LeRK[slot, expert % a_LeRK.shape[1]].to(out.dtype)
            b = b_LeNR[slot, expert % b_LeNR.shape[1]].to(out.dtype)
            u = self._round_u(
                self._matmul(self._round_operand(rows_RK[selected]), self._round_operand(a))
            )
            out[selected] = self._matmul(self._round_operand(u), self._round_operand(b))
        return out
