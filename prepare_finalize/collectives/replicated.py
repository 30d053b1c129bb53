"""Replicated tokens: no dispatch, and one all-reduce to combine."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from modular_kernel.contracts import Call, TopKWeightAndReduce
from modular_kernel.replay import stages
from modular_kernel.spec.placement import pairs_to_slots
from modular_kernel.tensors import ContiguousShape, Dispatched, ExpertWeights, Handle, Routing
from modular_kernel.workspace import BufferSpec
from prepare_finalize.collectives.requirements import CONTIGUOUS
from prepare_finalize.common.agreement import Agreement, agree, check_equal_tokens
from prepare_finalize.common.group_part import AgreeingPart, GroupHandle
from prepare_finalize.common.tokens import quantize_tokens, token_specs, weight_and_reduce


class ReplicatedEPPrepareAndFinalize(AgreeingPart):
    """Compute the pairs of local experts on each rank, and all-reduce the sums.

    x, routing and the output are the same on all ranks. Sums are reduced in float32 and rounded to
    the problem's dtype once. The backend chooses the order of the all-reduce, so the last bits are
    not deterministic.
    """

    prefer_local_copies = False  # all ranks have all tokens, and must select the same copies

    requires = replace(CONTIGUOUS, replicated_input=True, deterministic=False)

    def num_dispatchers(self) -> int:
        return 1

    def dispatch_shape(self, tokens: int) -> ContiguousShape:
        return ContiguousShape(tokens, self.problem.top_k)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        return {
            **token_specs(self.problem, tokens),
            "tokens_sum": BufferSpec((tokens, self.problem.hidden), torch.float32),
        }

    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: Call
    ) -> tuple[Dispatched, Handle]:
        self.manager.check_device(x_TH.device)
        with stages.stage(stages.DISPATCH):  # sends no rows, but the handshake takes time
            agreement, slots_TK, weights_TK = self._agree(x_TH, routing, call)
        rows, scale = quantize_tokens(x_TH, self.problem, weights=weights, call=call)
        unapplied_TK = None if self.problem.apply_router_weight_on_input else weights_TK
        handle = GroupHandle(self, call, agreement, unapplied_TK)
        adapters = () if routing.slots_T is None else (routing.slots_T, x_TH)
        return self.local_tokens(call, rows, scale, slots_TK, weights_TK, *adapters), handle

    def _agree(
        self, x_TH: torch.Tensor, routing: Routing, call: Call
    ) -> tuple[Agreement, torch.Tensor, torch.Tensor]:
        """Return the agreement of ranks, and the int32 slots and weights of local pairs."""
        no_rows = [0] * self.manager.world_size
        agreement = agree(
            self.layer,
            call,
            tokens=x_TH.shape[0],
            rows_W=no_rows,
            device=x_TH.device,
        )
        check_equal_tokens(self.manager, agreement)
        tables = self.tables(x_TH.device)
        # Steps are the same on every rank; starting at the step makes even calls of one token use
        # all copies round-robin.
        rank_TK, slot_TK, invalid = pairs_to_slots(
            routing.topk_ids_TK, tables, first_token=agreement.step
        )
        call.invalid_ids.add_(invalid)
        is_local = rank_TK == self.manager.rank
        slots_TK = torch.where(is_local, slot_TK, -1).to(torch.int32)
        return agreement, slots_TK, torch.where(is_local, routing.topk_weights_TK, 0)

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        part_handle = self.check_handle(handle, GroupHandle)
        sum_TH = part_handle.call.workspace.take("tokens_sum", tuple(out.shape))
        weight_and_reduce(
            expert_output, part_handle.topk_weights_RK, self.problem, reduce=reduce, out=sum_TH
        )
        with stages.stage(stages.COMBINE):
            if out.numel():  # the same on every rank, since T is
                self.manager.all_reduce(
                    sum_TH, step=part_handle.agreement.step, phase="combine"
                ).wait()
            out.copy_(sum_TH)
