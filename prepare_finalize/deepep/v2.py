"""DeepEPV2PrepareAndFinalize: DeepEP 2, with one buffer for training, prefill and decode.

An exchange component ("part") whose dispatch and combine are calls of the library. A pair is one
token with one of its K experts.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from modular_kernel.compatibility.support import PrepareFinalizeRequirements, Rejection
from modular_kernel.contracts import CallState, Receiver
from modular_kernel.ops.mask_unwritten import mask_unwritten_pairs
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.spec.problem import ActivationFormat, Machine, Problem, Reduce, RowContents
from modular_kernel.tensors import Dispatched, ExpertWeights, Handle, Routing, StandardShape
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.library_calls import unpack
from prepare_finalize.common.tokens import number_and_quantize_tokens
from prepare_finalize.deepep.arguments import GPUS_PER_HOST
from prepare_finalize.deepep.library import CPP_MODULE_OF_DEEPEP_1, DEEP_EP
from prepare_finalize.deepep.part import (
    BF16,
    HOPPER,
    DeepEPHandle,
    DeepEPRowsPart,
)

_MIN_TOKENS, _TOKENS_STEP = 8, 128  # see `buffer_tokens`
_MAX_HOSTS = 32
# Threads of the library's kernel that counts rows: one per rank of a host and per expert of a rank.
_COUNTING_THREADS = 128


class DeepEPV2PrepareAndFinalize(DeepEPRowsPart):
    """Send each token's row once to each rank that holds one of its experts.

    The receiving rank computes the weighted sum of the row's pairs. The combine adds the sums of
    all ranks, which are bfloat16 rows, in float32.

    The CPU does not wait. A call has the maximum number of rows. Unused rows have ids of -1 and are
    never read. If the scheme quantizes activations, they are quantized before they are sent. In the
    first call, the library compiles its kernels for the layer's sizes, which takes some seconds.
    """

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cuda"}),
        min_arch=HOPPER,
        packages=(DEEP_EP.name,),
        excluded_packages=(CPP_MODULE_OF_DEEPEP_1,),
        providers=(DEEP_EP,),
        dtypes=BF16,
        top_k=(1, 32),
        hidden_multiple=256,
        graph_capturable=True,
        deterministic=False,
        reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
        localizes_ids=True,
        padding=RowContents.UNDEFINED,
        dispatch_schemes=ACTIVATION_SCHEMES,
        world_sizes=(2, GPUS_PER_HOST * _MAX_HOSTS),
        linear_placement=False,
        ranks_per_host=GPUS_PER_HOST,
        asynchronous=True,
        received_by_library=True,
    )
    generation = 2
    max_experts = 2048

    @classmethod
    def max_slots(cls, problem: Problem) -> int:
        parallel = problem.parallel
        if parallel.hosts == 1:
            return 256
        return _COUNTING_THREADS - parallel.world_size // parallel.hosts

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        rejections = list(super().extra_rejections(problem, machine))
        parties, hosts = (cls.__name__, "problem"), problem.parallel.hosts
        if hosts > _MAX_HOSTS:
            need = f"at most {_MAX_HOSTS}"
            rejections.append(Rejection("hosts", parties, f"{hosts} hosts", need))
        return tuple(rejections)

    def make_buffer(self) -> None:
        self._get_buffer()

    def dispatch_shape(self, tokens: int) -> StandardShape:
        return StandardShape(
            self.world_size * buffer_tokens(self.problem.tokens), self.problem.top_k
        )

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        rows = self.dispatch_shape(tokens).tokens
        return {
            **self.row_specs(tokens, rows),
            "masked_ids": BufferSpec((rows, self.problem.top_k), torch.int32),
            "masked_weights": BufferSpec((rows, self.problem.top_k), torch.float32),
        }

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
        # Pairs with the same expert are joined, because the library stops the device if a token has
        # an expert twice.
        pairs = self.pairs(routing, call, join=True)
        rows, scale = number_and_quantize_tokens(
            x_TH, self.problem, pairs, weights=weights, call=call
        )
        has_row_scales = scale is not None and not self.problem.scheme.static
        # An asynchronous dispatch calls record_stream. Graph capture does not need it, because
        # tensors stay allocated in the graph's pool.
        is_async = not (at_once or self.manager.is_capturing)
        results = self._get_buffer().dispatch(
            (rows, scale) if has_row_scales else rows.contiguous(),
            topk_idx=pairs.numbers_TK,
            topk_weights=pairs.weights_TK,
            num_experts=self.num_experts,
            num_sms=self.manager.num_sms or 0,
            async_with_compute_stream=is_async,
            do_handle_copy=False,  # nothing overwrites the ids before the combine
            do_cpu_sync=False,
        )
        recv_x, recv_ids, recv_weights, library_handle, event = unpack(
            results, 5, "DeepEP's dispatch"
        )

        def receive() -> tuple[Dispatched, Handle]:
            if is_async:
                event.current_stream_wait()
            x_RH, scales = recv_x if has_row_scales else (recv_x, scale)
            num_received = library_handle.psum_num_recv_tokens_per_scaleup_rank[-1]
            slots_RK, weights_RK = self._mask_unwritten(recv_ids, recv_weights, num_received, call)
            tokens = self.local_tokens(call, x_RH, scales, slots_RK, weights_RK)
            return tokens, DeepEPHandle(self, call, library_handle, weights_RK)

        return receive

    def combine_ranks(self, rows_RH: torch.Tensor, library_handle: Any) -> torch.Tensor:
        results = self._get_buffer().combine(rows_RH, library_handle)
        sums_TH: torch.Tensor = unpack(results, 3, "DeepEP's combine")[0]
        return sums_TH

    def _mask_unwritten(
        self,
        ids_RK: torch.Tensor,
        weights_RK: torch.Tensor,
        num_rows: torch.Tensor,
        call: CallState,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots and weights of the rows, with -1 and 0 in unused rows.

        num_rows: int32 scalar tensor, number of received rows, which come first.
        """
        shape, take = tuple(ids_RK.shape), call.workspace.take
        slots_RK, masked_weights_RK = take("masked_ids", shape), take("masked_weights", shape)
        mask_unwritten_pairs(
            ids_RK, weights_RK, num_rows, out_ids_RK=slots_RK, out_weights_RK=masked_weights_RK
        )
        return slots_RK, masked_weights_RK

    def _get_buffer(self) -> Any:
        problem = self.problem
        return self.manager.elastic(
            buffer_tokens(self.problem.tokens), problem.hidden, problem.top_k
        )


def buffer_tokens(tokens: int) -> int:
    """Return the tokens per rank of a buffer for calls of up to `tokens` tokens.

    The library compiles its kernels for each size, so there are only a few sizes: powers of two,
    then multiples of 128.
    """
    if tokens > _TOKENS_STEP:
        return math.ceil(tokens / _TOKENS_STEP) * _TOKENS_STEP
    return max(_MIN_TOKENS, 1 << max(0, tokens - 1).bit_length())
