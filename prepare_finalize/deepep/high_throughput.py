"""DeepEP's high-throughput kernels (first generation): training and prefill."""

from collections.abc import Mapping
from typing import Any

import torch

from modular_kernel.compatibility.support import PrepareFinalizeRequirements, Rejection
from modular_kernel.contracts import Call, Receiver
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.spec.problem import ActivationFormat, Machine, Problem, Reduce, Rows
from modular_kernel.tensors import ContiguousShape, Dispatched, ExpertWeights, Handle, Routing
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.tokens import number_and_quantize_tokens
from prepare_finalize.deepep.arguments import PEERS, WORLD_SIZES
from prepare_finalize.deepep.part import BF16, HOPPER, DeepEPHandle, DeepEPRowsPart

# A row travels in two halves, each of them and 8 bytes in 8 KiB, a multiple of 16 bytes.
_MOST_ROW_BYTES = 2 * 8176


class DeepEPHTPrepareAndFinalize(DeepEPRowsPart):
    """A token's row goes once to each rank that holds one of its experts; that rank weights and
    adds up its pairs of the row, and the combine adds the ranks' sums, bfloat16 rows in float32.

    On one host the host waits for nothing: a call has the most rows that can come, of which those
    that stand for no token have only ids of -1, and are undefined besides, their weights too.
    Between hosts, of 8 ranks each, it waits for the numbers of rows, and no call can be captured: a
    row goes once to each host, and from there to its ranks. Activations are
    quantized before they travel, where the scheme quantizes them. T may differ from rank to rank
    and be 0.
    """

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cuda"}),
        min_arch=HOPPER,
        packages=("deep_ep", "deep_ep_cpp"),
        packages_from="https://github.com/deepseek-ai/DeepEP",
        dtypes=BF16,
        top_k=(1, 32),
        hidden_multiple=256,  # a warp adds up 32 times 16 bytes of a row at once
        graph_capturable=True,
        deterministic=False,
        reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
        localizes_ids=True,
        padding=Rows.UNDEFINED,
        dispatch_schemes=ACTIVATION_SCHEMES,
        world_sizes=(WORLD_SIZES[0], WORLD_SIZES[-1]),
        ranks_per_host=PEERS,
        full_hosts=True,
        graph_across_hosts=False,
        asynchronous=True,
        received_by_library=True,
    )

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        found = list(super().extra_rejections(problem, machine))
        parties, world = (cls.__name__, "problem"), problem.parallel.world_size
        if world not in WORLD_SIZES and WORLD_SIZES[0] <= world <= WORLD_SIZES[-1]:
            need = f"one of {', '.join(map(str, WORLD_SIZES))}"
            found.append(Rejection("world_size", parties, str(world), need))
        widest = _MOST_ROW_BYTES // torch.bfloat16.itemsize
        if problem.hidden > widest:
            need = f"<= {widest}: a row in two halves of the bulk copy's buffer"
            found.append(Rejection("hidden", parties, str(problem.hidden), need))
        return tuple(found)

    @classmethod
    def most_slots(cls, problem: Problem) -> int:
        # A block of threads counts rows: 128 for a rank's experts, 512 for those of a host.
        return 128 if problem.parallel.hosts == 1 else 512 // PEERS

    @property
    def host_waits(self) -> bool:
        """Whether the library tells the host how many rows came, and returns no others."""
        return self.problem.parallel.hosts > 1

    def make_buffer(self) -> None:
        self.manager.high_throughput(self.problem.hidden)

    def dispatch_shape(self, tokens: int) -> ContiguousShape:
        # Whatever this rank passes, another may pass problem.tokens. For no rows at all the library
        # would have the host wait for their number.
        rows = self.world_size * max(1, self.problem.tokens)
        return ContiguousShape(rows, self.problem.top_k)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        return self.row_specs(tokens, self.dispatch_shape(tokens).tokens)

    def send(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        weights: ExpertWeights,
        call: Call,
        *,
        at_once: bool,
    ) -> Receiver:
        self.manager.check_device(x_TH.device)
        made = self.manager.high_throughput(self.problem.hidden)
        pairs = self.pairs(routing, call, join=False)
        rows, scale = number_and_quantize_tokens(
            x_TH, self.problem, pairs, weights=weights, call=call
        )
        travels = scale is not None and not self.problem.scheme.static
        # What a graph holds stays alive in its pool, and needs no stream to be recorded.
        overlaps = not (at_once or self.manager.capturing)
        counts_R, counts_H, counts_E, is_there_TR, _ = made.buffer.get_dispatch_layout(
            pairs.numbers_TK, self.numbers
        )
        got_x, got_ids, got_weights, _, given, event = made.buffer.dispatch(
            (rows, scale) if travels else rows.contiguous(),
            num_tokens_per_rank=counts_R,
            num_tokens_per_rdma_rank=counts_H,
            is_token_in_rank=is_there_TR,
            num_tokens_per_expert=counts_E,
            topk_idx=pairs.numbers_TK,
            topk_weights=pairs.weights_TK,
            num_worst_tokens=0 if self.host_waits else self.dispatch_shape(len(x_TH)).tokens,
            config=made.dispatch_config,
            async_finish=overlaps,
        )

        def receive() -> tuple[Dispatched, Handle]:
            if overlaps:
                event.current_stream_wait()
            x_RH, scales = got_x if travels else (got_x, scale)
            arrived = self.local_tokens(call, x_RH, scales, got_ids, got_weights)
            return arrived, DeepEPHandle(self, call, given, got_weights)

        return receive

    def sums_of_ranks(self, rows_RH: torch.Tensor, given: Any) -> torch.Tensor:
        made = self.manager.high_throughput(self.problem.hidden)
        combined = made.buffer.combine(rows_RH, given, config=made.combine_config)
        sums_TH: torch.Tensor = combined[0]
        return sums_TH
