"""DeepEPHTPrepareAndFinalize: high-throughput kernels of DeepEP's Buffer, for training and prefill.

An exchange component ("part") whose dispatch and combine are calls of the library. A slot is the
index of an expert in the weights of its rank. The library numbers the slots of all ranks
consecutively. A pair is one token with one of its K experts.
"""

from collections.abc import Mapping
from typing import Any

import torch

from modular_kernel.compatibility.support import PrepareFinalizeRequirements, Rejection
from modular_kernel.contracts import CallState, Receiver
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.spec.problem import ActivationFormat, Machine, Problem, Reduce, RowContents
from modular_kernel.tensors import Dispatched, ExpertWeights, Handle, Routing, StandardShape
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.tokens import number_and_quantize_tokens
from prepare_finalize.deepep.arguments import GPUS_PER_HOST, WORLD_SIZES
from prepare_finalize.deepep.library import DEEP_EP
from prepare_finalize.deepep.part import BF16, HOPPER, DeepEPHandle, DeepEPRowsPart

# The kernels copy a row in two halves, whose sizes are multiples of 16 bytes, through a buffer of 8
# KiB in shared memory. 8 bytes of the buffer are reserved.
_MAX_ROW_BYTES = 2 * 8176


class DeepEPHTPrepareAndFinalize(DeepEPRowsPart):
    """Send each token's row once to each rank that holds one of its experts.

    The receiving rank computes the weighted sum of the row's pairs. The combine adds the sums of
    all ranks, which are bfloat16 rows, in float32.

    On a single host, the CPU does not wait. A call then has the maximum number of rows. Unused rows
    have ids of -1, and undefined values and weights. With several hosts, of 8 ranks each, a row is
    sent once to each host, which forwards it to its ranks. The CPU then waits for the number of
    rows, so a call cannot be captured in a CUDA graph.

    If the scheme quantizes activations, they are quantized before they are sent. T may differ
    between ranks and may be 0.

    The part was run on GPUs with DeepEP 1.2.1. It was not run on a GPU with DeepEP 2, whose Buffer
    has the same methods; with it, the part was verified against a stand-in on a CPU.
    """

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cuda"}),
        min_arch=HOPPER,
        packages=(DEEP_EP.name,),
        providers=(DEEP_EP,),
        dtypes=BF16,
        top_k=(1, 32),
        hidden_multiple=256,  # a warp sums 32 x 16 bytes of a row at a time
        graph_capturable=True,
        deterministic=False,
        reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
        localizes_ids=True,
        padding=RowContents.UNDEFINED,
        dispatch_schemes=ACTIVATION_SCHEMES,
        world_sizes=(WORLD_SIZES[0], WORLD_SIZES[-1]),
        linear_placement=False,
        ranks_per_host=GPUS_PER_HOST,
        full_hosts=True,
        graph_across_hosts=False,
        asynchronous=True,
        received_by_library=True,
    )

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        rejections = list(super().extra_rejections(problem, machine))
        parties, world = (cls.__name__, "problem"), problem.parallel.world_size
        if world not in WORLD_SIZES and WORLD_SIZES[0] <= world <= WORLD_SIZES[-1]:
            need = f"one of {', '.join(map(str, WORLD_SIZES))}"
            rejections.append(Rejection("world_size", parties, str(world), need))
        max_hidden = _MAX_ROW_BYTES // torch.bfloat16.itemsize
        if problem.hidden > max_hidden:
            need = f"<= {max_hidden}, because the library copies half a row at a time through 8 KiB"
            rejections.append(Rejection("hidden", parties, str(problem.hidden), need))
        return tuple(rejections)

    @classmethod
    def max_slots(cls, problem: Problem) -> int:
        # One thread per expert counts rows. A block has 128 threads for a rank, or, with several
        # hosts, 512 threads for the ranks of a host.
        return 128 if problem.parallel.hosts == 1 else 512 // GPUS_PER_HOST

    @property
    def host_waits(self) -> bool:
        """Whether the CPU waits for the number of received rows. There are then no unused rows."""
        return self.problem.parallel.hosts > 1

    def make_buffer(self) -> None:
        self.manager.high_throughput(self.problem.hidden)

    def dispatch_shape(self, tokens: int) -> StandardShape:
        # Other ranks may pass up to problem.tokens even if this rank passes fewer. A capacity of 0
        # would tell the library to wait for the number of rows on the CPU.
        rows = self.world_size * max(1, self.problem.tokens)
        return StandardShape(rows, self.problem.top_k)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        return self.row_specs(tokens, self.dispatch_shape(tokens).tokens)

    def send(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        weights: ExpertWeights,
        call: CallState,
        *,
        at_once: bool,
    ) -> Receiver:
        self.check_call(x_TH.device)
        buffers = self.manager.high_throughput(self.problem.hidden)
        pairs = self.pairs(routing, call, join=False)
        rows, scale = number_and_quantize_tokens(
            x_TH, self.problem, pairs, weights=weights, call=call
        )
        has_row_scales = scale is not None and not self.problem.scheme.static
        # An asynchronous dispatch calls record_stream. Graph capture does not need it, because
        # tensors stay allocated in the graph's pool.
        is_async = not (at_once or self.manager.is_capturing)
        sent = (rows, scale) if scale is not None and has_row_scales else rows.contiguous()
        recv_x, recv_ids, recv_weights, library_handle, event = buffers.dispatch(
            sent,
            pairs.numbers_TK,
            pairs.weights_TK,
            num_experts=self.num_experts,
            num_worst_tokens=0 if self.host_waits else self.dispatch_shape(len(x_TH)).tokens,
            is_async=is_async,
        )

        def receive() -> tuple[Dispatched, Handle]:
            if is_async:
                event.current_stream_wait()
            x_RH, scales = recv_x if has_row_scales else (recv_x, scale)
            tokens = self.local_tokens(call, x_RH, scales, recv_ids, recv_weights)
            return tokens, DeepEPHandle(self, call, library_handle, recv_weights)

        return receive

    def combine_ranks(self, rows_RH: torch.Tensor, library_handle: Any) -> torch.Tensor:
        buffer = self.manager.high_throughput(self.problem.hidden)
        return buffer.combine(rows_RH, library_handle)
