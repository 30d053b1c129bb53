"""Reference LoRA deltas of both GEMMs, in the arithmetic of `modular_kernel.reference`."""

from collections.abc import Callable

import torch

from modular_kernel.spec.problem import ActivationSpec
from modular_kernel.tensors import ExpertWeights, Routing

Rounding = Callable[[torch.Tensor], torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (R, K), (N, K) -> (R, N)


class Adapters:
    """LoRA deltas B (A x) of a call; 0 for tokens without an adapter.

    u = A x is rounded to the problem's dtype; x and h are unquantized.

    round_operand, product: see `operand` and `product` of the arithmetic.
    round_result: rounds u.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        routing: Routing,
        *,
        product: Product,
        round_operand: Rounding,
        round_result: Rounding,
    ) -> None:
        self._weights, self._slots_T = weights, routing.slots_T
        self._product, self._round_operand, self._round_result = (
            product,
            round_operand,
            round_result,
        )

    def of_w1(
        self, x_RH: torch.Tensor, token: torch.Tensor, expert: int, act: ActivationSpec
    ) -> torch.Tensor | float:
        """Return the delta of GEMM 1, (R, N), for rows (R, H) of tokens (R,) at one expert."""
        a, b = self._weights.lora_a13, self._weights.lora_b13
        if a is None or b is None or self._slots_T is None:
            return 0.0
        rank, num_rows = b.shape[3], b.shape[2]
        if a.shape[2] == rank:  # one A for gate and up, or no gate
            return self._delta(x_RH, a, b, token, expert)
        gates, ups = slice(0, num_rows // 2), slice(num_rows // 2, None)
        if act.interleaved:
            gates, ups = slice(0, None, 2), slice(1, None, 2)
        out = x_RH.new_zeros(len(x_RH), num_rows)
        for rows_slice, rank_slice in ((gates, slice(0, rank)), (ups, slice(rank, None))):
            out[:, rows_slice] = self._delta(
                x_RH, a[:, :, rank_slice], b[:, :, rows_slice], token, expert
            )
        return out

    def of_w2(self, h_RI: torch.Tensor, token: torch.Tensor, expert: int) -> torch.Tensor | float:
        """Return the delta of GEMM 2, (R, H), for rows (R, I) of tokens (R,) at one expert."""
        a, b = self._weights.lora_a2, self._weights.lora_b2
        if a is None or b is None or self._slots_T is None:
            return 0.0
        return self._delta(h_RI, a, b, token, expert)

    def _delta(
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
            u = self._round_result(
                self._product(self._round_operand(rows_RK[selected]), self._round_operand(a))
            )
            out[selected] = self._product(self._round_operand(u), self._round_operand(b))
        return out
