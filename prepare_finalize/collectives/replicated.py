"""ReplicatedEPPrepareAndFinalize: all ranks have all tokens, and an all-reduce combines them.

An exchange component ("part") for layers whose input is replicated, as after a tensor-parallel
attention. No rows are dispatched. Each rank computes the pairs of its own experts; a pair is one
token with one of its K experts.

In a handshake, ranks exchange metadata to check that they make the same call. The handshake takes
place on the host before a call or, in layers that must not wait on the host, on the device during a
call (`common.device_handshake`).
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from modular_kernel.contracts import CallState, TopKWeightAndReduce
from modular_kernel.errors import CommunicationError, UnsupportedError
from modular_kernel.ops.expert_slots import number_pairs
from modular_kernel.ops.reduce import weight_and_sum
from modular_kernel.replay import stages
from modular_kernel.replay.recording import run_in_replays
from modular_kernel.spec.placement import pairs_to_slots
from modular_kernel.spec.problem import Problem, Reduce
from modular_kernel.tensors import Dispatched, ExpertWeights, Handle, Routing, StandardShape
from modular_kernel.workspace import BufferSpec
from prepare_finalize.collectives.collective_part import STANDARD_REQUIREMENTS
from prepare_finalize.common.blocks import BlockSums, Ranks, mask_remote_pairs, sum_blocks
from prepare_finalize.common.device_handshake import DeviceHandshake
from prepare_finalize.common.device_status import FIELDS, NOT_REFUSED, TOKENS
from prepare_finalize.common.group_part import HandshakePart, PartHandle
from prepare_finalize.common.handshake import check_equal_tokens, exchange_metadata, refusal_index
from prepare_finalize.common.replayable_exchange import ReplayableExchange
from prepare_finalize.common.tokens import quantize_tokens, token_specs, weight_and_reduce


@dataclass(frozen=True)
class _HeaderExchange:
    """An all-gather of headers, the metadata of a device handshake (`device_status.FIELDS`).

    - handshake: the handshakes of the layer.
    - headers_WF: (W, F) int64, the received headers.
    - local_header_F: (F,) int64, the header of this rank.
    """

    handshake: DeviceHandshake
    exchange: ReplayableExchange
    headers_WF: torch.Tensor
    local_header_F: torch.Tensor


@dataclass(frozen=True)
class ReplicatedHandle(PartHandle):
    """Handle of a call with replicated tokens.

    - step: number of the call among the calls of the manager.
    - topk_weights_TK: router weights that `finalize` must apply, or None.
    - headers: the all-gather of headers in a device handshake, or None.
    """

    step: int
    topk_weights_TK: torch.Tensor | None
    headers: "_HeaderExchange | None"


class ReplicatedEPPrepareAndFinalize(HandshakePart):
    """Compute the pairs of local experts on each rank, and all-reduce the sums.

    x, routing and the output are the same on all ranks. Sums are reduced in float32 and rounded to
    the problem's dtype once. The backend chooses the order of additions in the all-reduce, so the
    last bits are not deterministic.

    Ranks compare T on the host before every call. With Problem(graph=True) or
    TorchGroup(checked=False), they compare T on the device after the first call. On GPUs, a call
    whose T differs between ranks then fails when the all-reduce reaches its deadline.
    """

    replayable = True  # plans can replay the recorded launches of calls with a device handshake
    prefer_local_copies = False  # all ranks select copies for all tokens, and must select the same

    requires = replace(STANDARD_REQUIREMENTS, replicated_input=True, deterministic=False)

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        from prepare_finalize.collectives.compile_cases import launch_headers, problems

        return {str(problem): partial(launch_headers, problem) for problem in problems()}

    @classmethod
    def operation_cases(cls) -> Mapping[str, Callable[[], Mapping[str, torch.Tensor]]]:
        from prepare_finalize.collectives.operation_cases import list_cases

        return list_cases()

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        self._device_handshake: DeviceHandshake | None = None
        if problem.graph or not self.manager.checked:
            self.layer.uses_device_handshake = True
            self._device_handshake = DeviceHandshake(self.layer, rows=0, equal_tokens=True)

    def num_dispatchers(self) -> int:
        return 1

    def dispatch_shape(self, tokens: int) -> StandardShape:
        return StandardShape(tokens, self.problem.top_k)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        world = self.problem.parallel.world_size
        return {
            **token_specs(self.problem, tokens),
            **self.pair_specs(tokens),
            "tokens_sum": BufferSpec((tokens, self.problem.hidden), torch.float32),
            "headers": BufferSpec(((world + 1) * len(FIELDS),), torch.int64),
        }

    def may_replay(self) -> bool:
        return self._device_handshake is not None

    def may_record(self) -> bool:
        return self._device_handshake is not None and self._device_handshake.is_established

    def check(self) -> None:
        if self._device_handshake is not None:
            self._device_handshake.check()

    def refuse(self, error: Exception) -> None:
        handshake, manager = self._device_handshake, self.manager
        if handshake is None or not handshake.is_established:
            super().refuse(error)
            return
        if manager.is_capturing():  # the other ranks time out
            return
        with suppress(CommunicationError, UnsupportedError):  # the manager is closed
            step, device = handshake.next_step(), torch.device(manager.device)
            headers = torch.empty(
                (manager.world_size + 1) * len(FIELDS), dtype=torch.int64, device=device
            )
            header_exchange = self._exchange_headers(
                headers, handshake, 0, step, refusal_index(error)
            )
            header_exchange.exchange.wait()
            self._verify_headers(header_exchange)
            # The other ranks reduce the sums of all their tokens.
            tokens = int(header_exchange.headers_WF[:, TOKENS].max())
            sums = torch.zeros(tokens, self.problem.hidden, dtype=torch.float32, device=device)
            if tokens:
                manager.all_reduce(sums, step=step, phase="combine").wait()
            self._end_call(handshake, sums, sums)

    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: CallState
    ) -> tuple[Dispatched, Handle]:
        self.manager.check_device(x_TH.device)
        with stages.stage(stages.DISPATCH):  # sends no rows, but the handshake takes time
            if self._device_handshake is None:
                step, headers = self._exchange_metadata(x_TH, call), None
                slots_TK, weights_TK = self._select_local_pairs(routing, call, first_token=step)
            else:
                step, headers = self._send_header(self._device_handshake, x_TH, call)
                slots_TK, weights_TK = self._select_local_pairs_on_device(routing, call)
        rows, scale = quantize_tokens(x_TH, self.problem, weights=weights, call=call)
        unapplied_TK = None if self.problem.apply_router_weight_on_input else weights_TK
        handle = ReplicatedHandle(self, call, step, unapplied_TK, headers)
        adapters = () if routing.slots_T is None else (routing.slots_T, x_TH)
        return self.local_tokens(call, rows, scale, slots_TK, weights_TK, *adapters), handle

    def _exchange_metadata(self, x_TH: torch.Tensor, call: CallState) -> int:
        """Run the handshake on the host; return the step."""
        no_rows = [0] * self.manager.world_size
        metadata = exchange_metadata(
            self.layer,
            call,
            tokens=x_TH.shape[0],
            rows_W=no_rows,
            device=x_TH.device,
        )
        check_equal_tokens(self.manager, metadata)
        return metadata.step

    def _send_header(
        self, handshake: DeviceHandshake, x_TH: torch.Tensor, call: CallState
    ) -> tuple[int, _HeaderExchange]:
        """Start the all-gather of headers, which overlaps with the experts.

        Return the step and the all-gather.
        """
        tokens = x_TH.shape[0]
        step = handshake.begin(call, tokens, x_TH.device)
        shape = ((self.manager.world_size + 1) * len(FIELDS),)
        headers = call.workspace.take("headers", shape)
        call.peers_notified = True
        return step, self._exchange_headers(headers, handshake, tokens, step)

    def _exchange_headers(
        self,
        headers: torch.Tensor,
        handshake: DeviceHandshake,
        tokens: int,
        step: int,
        refusal: int = NOT_REFUSED,
    ) -> _HeaderExchange:
        """Write the header of this rank and start the all-gather of headers.

        headers: ((W + 1) * F,) int64, buffer for the received headers, followed by this rank's
            header.
        """
        received, header = headers[: -len(FIELDS)], headers[-len(FIELDS) :]
        handshake.counter.write_header(header, tokens, refusal=refusal)
        manager = self.manager
        exchange = ReplayableExchange(
            manager, lambda step: manager.all_gather(received, header, step=step, phase="dispatch")
        )
        exchange.start(step)
        return _HeaderExchange(handshake, exchange, received.view(-1, len(FIELDS)), header)

    def _verify_headers(self, header_exchange: _HeaderExchange) -> None:
        """Verify the headers of all ranks.

        On a CPU, this raises the error immediately, because gloo ends the process if ranks
        all-reduce tensors of different sizes.
        """
        handshake = header_exchange.handshake
        handshake.status.verify(
            header_exchange.headers_WF, header_exchange.local_header_F, handshake.limits
        )
        if self.manager.device == "cpu":
            handshake.raise_failure()
            run_in_replays(handshake.raise_failure)

    def _select_local_pairs(
        self, routing: Routing, call: CallState, first_token: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots (int32) and router weights of all pairs; -1 and 0 for remote pairs.

        first_token: start of the round-robin choice among the copies of a replicated expert, the
            same on every rank. The step of the call lets calls with one token use all copies.
        """
        tables = self.tables(routing.topk_ids_TK.device)
        rank_TK, slot_TK, invalid = pairs_to_slots(
            routing.topk_ids_TK, tables, first_token=first_token
        )
        call.invalid_ids.add_(invalid)
        is_local = rank_TK == self.manager.rank
        slots_TK = torch.where(is_local, slot_TK, -1).to(torch.int32)
        return slots_TK, torch.where(is_local, routing.topk_weights_TK, 0)

    def _select_local_pairs_on_device(
        self, routing: Routing, call: CallState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of `_select_local_pairs`, with two launches that can be replayed.

        The choice of a copy depends only on the index of the token, because the step would be a
        constant in a CUDA graph.
        """
        pairs = self.pairs(routing, call, join=False)
        pairs = replace(pairs, numbering=replace(pairs.numbering, first_token=0))
        number_pairs(pairs)
        ranks = Ranks(self.manager.rank, self.manager.world_size, pairs.numbering.slots)
        mask_remote_pairs(pairs.numbers_TK, pairs.weights_TK, ranks, self.problem.e)
        return pairs.numbers_TK, pairs.weights_TK

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        part_handle = self.check_handle(handle, ReplicatedHandle)
        sum_TH = part_handle.call.workspace.take("tokens_sum", tuple(out.shape))
        weights_TK, headers = part_handle.topk_weights_TK, part_handle.headers
        if reduce.kind is Reduce.NOOP:
            # Plans can replay this launch, but not a copy by torch.
            weight_and_sum(expert_output[:, None], None, scale=1.0, out=sum_TH)
        else:
            weight_and_reduce(expert_output, weights_TK, self.problem, reduce=reduce, out=sum_TH)
        with stages.stage(stages.COMBINE):
            if headers is not None:
                self._all_reduce_on_device(headers, part_handle.step, sum_TH)
                self._end_call(headers.handshake, sum_TH, out)
                return
            if out.numel():  # all ranks have the same T, so all or none make the all-reduce
                self.manager.all_reduce(sum_TH, step=part_handle.step, phase="combine").wait()
            out.copy_(sum_TH)

    def _all_reduce_on_device(
        self, headers: _HeaderExchange, step: int, sum_TH: torch.Tensor
    ) -> None:
        """Verify the headers of all ranks and all-reduce the sums, without waiting on the host."""
        manager = self.manager
        headers.exchange.wait()
        self._verify_headers(headers)
        if sum_TH.numel():
            reduction = ReplayableExchange(
                manager, lambda step: manager.all_reduce(sum_TH, step=step, phase="combine")
            )
            reduction.start(step)
            reduction.wait()

    def _end_call(
        self, handshake: DeviceHandshake, sum_TH: torch.Tensor, out_TH: torch.Tensor
    ) -> None:
        """Count the end of the call; write the rounded sums, or NaN after a failure, to out_TH."""
        sums = BlockSums(sum_TH[None], Ranks(0, 1, 0), first_block=0, local_block=0)
        sum_blocks(sums, out_TH, None, handshake.counter)
