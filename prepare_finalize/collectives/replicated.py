"""Every rank sees every token: no dispatch, and one all-reduce at the end."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from modular_kernel.contracts import Call, TopKWeightAndReduce
from modular_kernel.replay import stages
from modular_kernel.spec.placement import pairs_to_slots
from modular_kernel.tensors import ContiguousShape, Dispatched, ExpertWeights, Handle, Routing
from modular_kernel.workspace import BufferSpec
from prepare_finalize.collectives.requirements import CONTIGUOUS
from prepare_finalize.common.agreement import Agreement, agree, refuse_unequal_tokens
from prepare_finalize.common.group_part import AgreeingPart, GroupHandle
from prepare_finalize.common.tokens import quantize_tokens, token_specs, weight_and_reduce


class ReplicatedEPPrepareAndFinalize(AgreeingPart):
    """Each rank computes the pairs of its own experts, and the sums of all ranks are added.

    x and routing must be the same on all ranks, and so is the output. The sums meet in float32
    and are rounded to the problem's dtype once; how the all-reduce orders them is the backend's
    affair, so nothing is promised about the last bits.
    """

    near_first = False  # ranks that have all tokens must agree on copies

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
        with stages.stage(stages.DISPATCH):  # no row travels, but that ranks agree takes time
            agreed, slots_TK, weights_TK = self._agreed(x_TH, routing, call)
        rows, scale = quantize_tokens(x_TH, self.problem, weights=weights, call=call)
        left = None if self.problem.apply_router_weight_on_input else weights_TK
        handle = GroupHandle(self, call, agreed, left)
        adapters = () if routing.slots_T is None else (routing.slots_T, x_TH)
        return self.local_tokens(call, rows, scale, slots_TK, weights_TK, *adapters), handle

    def _agreed(
        self, x_TH: torch.Tensor, routing: Routing, call: Call
    ) -> tuple[Agreement, torch.Tensor, torch.Tensor]:
        """Return what ranks told each other, and the slots and weights of the pairs here.

        Slots are int32.
        """
        nothing = [0] * self.manager.world_size
        agreed = agree(
            self.layer,
            call,
            tokens=x_TH.shape[0],
            rows_W=nothing,
            device=x_TH.device,
        )
        refuse_unequal_tokens(self.manager, agreed)
        tables = self.tables(x_TH.device)
        # Every rank counts steps alike, so calls of one token take turns with copies, too.
        rank_TK, slot_TK, invalid = pairs_to_slots(
            routing.topk_ids_TK, tables, first_token=agreed.step
        )
        call.invalid_ids.add_(invalid)
        here = rank_TK == self.manager.rank
        slots_TK = torch.where(here, slot_TK, -1).to(torch.int32)
        return agreed, slots_TK, torch.where(here, routing.topk_weights_TK, 0)

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        own = self.own_handle(handle, GroupHandle)
        sum_TH = own.call.workspace.take("tokens_sum", tuple(out.shape))
        weight_and_reduce(
            expert_output, own.topk_weights_RK, self.problem, reduce=reduce, out=sum_TH
        )
        with stages.stage(stages.COMBINE):
            if out.numel():  # as every rank finds: T is the same on all
                self.manager.all_reduce(sum_TH, step=own.agreed.step, phase="combine").wait()
            out.copy_(sum_TH)
