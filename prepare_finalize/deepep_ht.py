"""DeepEP's high-throughput kernels (first generation): training and prefill over NVLink."""

from collections.abc import Mapping

import torch

from modular_kernel.contracts import Call, Receiver, TopKWeightAndReduce
from modular_kernel.errors import CommunicationError
from modular_kernel.quant import ACTIVATION_SCHEMES
from modular_kernel.support import PrepareFinalizeRequirements, Rejection
from modular_kernel.tensors import ContiguousShape, Dispatched, ExpertWeights, Handle, Routing
from modular_kernel.types import ActivationFormat, Machine, Problem, Reduce
from modular_kernel.workspace import BufferSpec
from prepare_finalize.all2all.deepep_part import BF16, HOPPER, DeepEPHandle, DeepEPPart
from prepare_finalize.tokens import quantise_tokens, reduced_rows

_WORLD_SIZES = (2, 4, 8)
# A row travels in two halves, each of them and 8 bytes in 8 KiB, a multiple of 16 bytes.
_MOST_ROW_BYTES = 2 * 8176


class DeepEPHTPrepareAndFinalize(DeepEPPart):
    """A token's row goes once to each rank that holds one of its experts; that rank weights and
    adds up its pairs of the row, and the combine adds the ranks' sums, bfloat16 rows in float32.

    Activations are quantised before they travel, where the scheme quantises them. The host waits
    for the number of rows that come. T may differ from rank to rank and be 0.
    """

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cuda"}),
        min_arch=HOPPER,
        packages=("deep_ep", "deep_ep_cpp"),
        dtypes=BF16,
        top_k=(1, 32),
        hidden_multiple=256,  # a warp adds up 32 times 16 bytes of a row at once
        deterministic=False,
        reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
        localises_ids=True,
        dispatch_schemes=ACTIVATION_SCHEMES,
        world_sizes=(_WORLD_SIZES[0], _WORLD_SIZES[-1]),
        asynchronous=True,
        received_by_library=True,
    )
    most_slots = 128

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        found = list(super().extra_rejections(problem, machine))
        parties, world = (cls.__name__, "problem"), problem.parallel.world_size
        if world not in _WORLD_SIZES and _WORLD_SIZES[0] <= world <= _WORLD_SIZES[-1]:
            found.append(Rejection("world_size", parties, str(world), "2, 4 or 8"))
        widest = _MOST_ROW_BYTES // torch.bfloat16.itemsize
        if problem.hidden > widest:
            need = f"<= {widest}: a row in two halves of the bulk copy's buffer"
            found.append(Rejection("hidden", parties, str(problem.hidden), need))
        return tuple(found)

    def make_buffer(self) -> None:
        self.manager.high_throughput(self.problem.hidden)

    def dispatch_shape(self, tokens: int) -> ContiguousShape:
        # Whatever this rank passes, another may pass problem.tokens.
        return ContiguousShape(self.world_size * self.problem.tokens, self.problem.top_k)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        return self.row_specs(tokens, self.dispatch_shape(tokens).tokens)

    def prepare_no_receive(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: Call
    ) -> Receiver:
        self.manager.check_device(x_TH.device)
        made = self.manager.high_throughput(self.problem.hidden)
        ids_TK, weights_TK = self.numbered(routing, call, join=False)
        rows, scale = quantise_tokens(x_TH, self.problem, weights=weights, call=call)
        travels = scale is not None and not self.problem.scheme.static
        counts_R, _, counts_E, is_there_TR, _ = made.buffer.get_dispatch_layout(
            ids_TK, self.numbers
        )
        try:
            got_x, got_ids, got_weights, _, given, event = made.buffer.dispatch(
                (rows, scale) if travels else rows.contiguous(),
                num_tokens_per_rank=counts_R,
                is_token_in_rank=is_there_TR,
                num_tokens_per_expert=counts_E,
                topk_idx=ids_TK,
                topk_weights=weights_TK,
                config=made.dispatch_config,
                async_finish=True,
            )
        except RuntimeError as error:
            raise self._lost(error) from error

        def receive() -> tuple[Dispatched, Handle]:
            event.current_stream_wait()
            x_RH, scales = got_x if travels else (got_x, scale)
            arrived = self.local_tokens(call, x_RH, scales, got_ids, got_weights)
            return arrived, DeepEPHandle(self, call, given, got_weights)

        return receive

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        own = self.own_handle(handle, DeepEPHandle)
        made = self.manager.high_throughput(self.problem.hidden)
        rows_RH = reduced_rows(expert_output, own.weights, self.problem, own.call, reduce)
        combined_TH, _, _ = made.buffer.combine(rows_RH, own.given, config=made.combine_config)
        out.copy_(combined_TH)

    def _lost(self, error: RuntimeError) -> CommunicationError:
        """What a dispatch raises where a rank does not come in the library's own time."""
        got, need = str(error).splitlines()[0][:200], "the same calls on every rank"
        return CommunicationError(
            "DeepEP's dispatch", got=got, need=need, rank=self.manager.rank, phase="dispatch"
        )
