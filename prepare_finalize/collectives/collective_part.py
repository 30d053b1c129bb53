"""CollectivePart: base of the components ("parts") that exchange rows with torch collectives.

There are two kinds of dispatch: with row counts, which subclasses implement in `send_with_counts`,
and in a fixed-capacity exchange, which this class implements. In both, experts receive rows with
slots. A slot is the index of an expert in the weights of its rank. A pair is one token with one of
its K experts.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import ClassVar

import torch

from modular_kernel.compatibility.support import PrepareFinalizeRequirements
from modular_kernel.contracts import CallState, Receiver
from modular_kernel.errors import ConfigurationError
from modular_kernel.ops.expert_slots import number_pairs
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.spec.problem import ActivationFormat, Problem, Reduce
from modular_kernel.tensors import (
    Dispatched,
    DispatchShape,
    ExpertWeights,
    Handle,
    Routing,
    StandardShape,
    StandardTokens,
)
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.blocks import BlockLayout, OutgoingRows, ReceivedColumns
from prepare_finalize.common.fixed_capacity import (
    FixedCapacityCall,
    FixedCapacityExchange,
    make_block_layouts,
)
from prepare_finalize.common.group_part import PackedRowsPart
from prepare_finalize.common.tokens import dispatches_quantized, quantize_tokens, token_specs

# Requirements of the parts over collectives that dispatch in the standard format.
STANDARD_REQUIREMENTS = PrepareFinalizeRequirements(
    activation_format=ActivationFormat.STANDARD,
    reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
    localizes_ids=True,
    dispatch_schemes=ACTIVATION_SCHEMES,
    world_sizes=(2, None),
    linear_placement=False,
    graph_capturable=True,
    graph_on_request=True,
    lora=True,
)


class CollectivePart(PackedRowsPart):
    """Base of parts that exchange rows with an all-gather or an all-to-all.

    By default, ranks exchange row counts before every call, read them on the host, and send exactly
    the rows that are needed (`send_with_counts`). `fixed_capacity` is then None.

    With Problem(graph=True) or TorchGroup(checked=False), ranks send blocks of a fixed capacity
    instead (`common.fixed_capacity`). The host then reads nothing after the layer's first call, and
    calls can be captured in a CUDA graph.
    """

    uses_all_gather: ClassVar[bool] = False  # whether each rank sends the same rows to all ranks
    fixed_capacity: FixedCapacityExchange | None = None
    keeps_expert_output = True

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        from prepare_finalize.collectives.compile_cases import launch_all, problems

        calls = {"": partial(launch_all, has_single_block=True)}
        if not cls.uses_all_gather:
            calls[", a block for each rank"] = partial(launch_all, has_single_block=False)
        return {
            f"{problem}{suffix}": partial(call, problem)
            for problem in problems()
            for suffix, call in calls.items()
        }

    @classmethod
    def operation_cases(cls) -> Mapping[str, Callable[[], Mapping[str, torch.Tensor]]]:
        from prepare_finalize.collectives.operation_cases import list_cases

        return list_cases()

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        if problem.graph or not self.manager.checked:
            self._check_max_received()
            self.fixed_capacity = self.make_fixed_capacity(self.block_capacity)

    def make_fixed_capacity(self, rows: int) -> FixedCapacityExchange:
        """Return the exchange of calls with a fixed capacity.

        rows: capacity of a block.
        """
        return FixedCapacityExchange(self.layer, rows=rows, uses_all_gather=self.uses_all_gather)

    def _check_max_received(self) -> None:
        max_received, world_size = self.problem.max_received, self.problem.parallel.world_size
        if max_received is not None and max_received < world_size:
            self.destroy()
            need = f">= {world_size}, one row from each rank, in a fixed-capacity exchange"
            raise ConfigurationError("max_received", got=max_received, need=need)

    @property
    def block_capacity(self) -> int:
        """Number of rows that a rank can send to each rank in a fixed-capacity exchange.

        It is problem.tokens, which no routing exceeds, or problem.max_received / world_size if that
        is lower.
        """
        problem = self.problem
        if problem.max_received is None:
            return problem.tokens
        return min(problem.tokens, problem.max_received // problem.parallel.world_size)

    @property
    def max_received_tokens(self) -> int:
        """Maximum number of tokens that this rank receives, without unused rows."""
        if self.fixed_capacity is None:
            return self.max_rows
        return self.fixed_capacity.rows * self.manager.world_size

    @cached_property
    def _layouts(self) -> dict[bool, BlockLayout]:
        return make_block_layouts(self.problem, self.block_capacity)

    def fixed_capacity_specs(self, exchange: FixedCapacityExchange) -> dict[str, BufferSpec]:
        """Return the buffers of a call with a fixed-capacity exchange."""
        problem, layouts = self.problem, (*self._layouts.values(),)
        rows, k = exchange.max_received_rows(layouts), problem.top_k
        specs = {
            **token_specs(problem, problem.tokens),
            **exchange.specs(layouts),
            **self.pair_specs(problem.tokens),
            "rows_ids": BufferSpec((rows, k), torch.int32),
            "rows_weights": BufferSpec((rows, k), torch.float32),
        }
        if problem.adapters is not None:
            specs["rows_adapters"] = BufferSpec((rows,), torch.int32)
        if scales := max(layout.scales for layout in layouts):
            specs["rows_scale"] = BufferSpec((rows, scales), torch.float32)
        return specs

    def send(
        self, x_TH: torch.Tensor, routing: Routing, weights: ExpertWeights, call: CallState
    ) -> Receiver:
        self.manager.check_device(x_TH.device)
        exchange = self.fixed_capacity
        if exchange is None:
            return self.send_with_counts(x_TH, routing, weights, call)
        sent, scale = self._send_fixed_capacity(exchange, x_TH, routing, weights, call)

        def receive() -> tuple[Dispatched, Handle]:
            received = self._receive_fixed_capacity(exchange, sent, scale, call)
            weights_RK = received.routing.topk_weights_TK
            unapplied_RK = None if self.problem.apply_router_weight_on_input else weights_RK
            return self.make_fixed_capacity_handle(received, sent, unapplied_RK, call)

        return receive

    @abstractmethod
    def send_with_counts(
        self, x_TH: torch.Tensor, routing: Routing, weights: ExpertWeights, call: CallState
    ) -> Receiver:
        """Exchange row counts on the host, then start the exchange of exactly as many rows."""

    @abstractmethod
    def make_fixed_capacity_handle(
        self,
        received: StandardTokens,
        sent: FixedCapacityCall,
        weights_RK: torch.Tensor | None,
        call: CallState,
    ) -> tuple[Dispatched, Handle]:
        """Return the received rows in the experts' format, and the handle of the call.

        weights_RK: router weights that `finalize` must apply, or None.
        """

    def _send_fixed_capacity(
        self,
        exchange: FixedCapacityExchange,
        x_TH: torch.Tensor,
        routing: Routing,
        weights: ExpertWeights,
        call: CallState,
    ) -> tuple[FixedCapacityCall, torch.Tensor | None]:
        """Send blocks; return the started call, and the scale if all rows share one."""
        quantizes = dispatches_quantized(self.problem, call)
        layout = self._layouts[quantizes]
        local_amax = self.local_amax(x_TH, call)
        step = exchange.begin(call, len(x_TH), x_TH.device, layout, amax=local_amax is not None)
        if local_amax is not None:
            # `reduce_amax` is a collective, so from here on peers wait for this rank.
            call.peers_notified = True
        amax = None if local_amax is None else exchange.reduce_amax(local_amax, step)
        numbers_TK, weights_TK = routing.topk_ids_TK, routing.topk_weights_TK
        if not self.numbering(x_TH.device).is_linear:  # otherwise, expert numbers are expert ids
            pairs = self.pairs(routing, call, join=False)
            number_pairs(pairs)
            numbers_TK, weights_TK = pairs.numbers_TK, pairs.weights_TK
        buffers, out = exchange.take_buffers(layout, call), None
        x_in_place = quantizes and exchange.has_single_block
        if x_in_place:
            scale_out = buffers.local_section("scale")[: len(x_TH)] if layout.scales else None
            out = buffers.local_section("x")[: len(x_TH)], scale_out
        values, scale = quantize_tokens(
            x_TH, self.problem, weights=weights, call=call, amax=amax, out=out
        )
        rows = OutgoingRows(
            values,
            scale if layout.scales and not x_in_place else None,
            numbers_TK,
            weights_TK,
            routing.slots_T if layout.adapters else None,
            call.invalid_ids,
        )
        sent = exchange.send(rows, buffers, call, step, x_in_place=x_in_place)
        return sent, None if layout.scales else scale

    def _receive_fixed_capacity(
        self,
        exchange: FixedCapacityExchange,
        sent: FixedCapacityCall,
        scale: torch.Tensor | None,
        call: CallState,
    ) -> StandardTokens:
        """Return the received rows. Unused rows have slots of -1.

        scale: the scale if all rows share one.
        """
        take, layout = call.workspace.take, sent.layout
        rows, k = exchange.max_received_rows((layout,)), layout.top_k
        columns = ReceivedColumns(
            exchange.num_local_experts,
            take("rows_ids", (rows, k)),
            take("rows_weights", (rows, k)),
            take("rows_scale", (rows, layout.scales)) if layout.scales else None,
            take("rows_adapters", (rows,)) if layout.adapters else None,
        )
        x_RH = exchange.receive(sent, columns)
        return self.local_tokens(
            call,
            x_RH,
            scale if columns.scale_RG is None else columns.scale_RG,
            columns.slots_RK,
            columns.weights_RK,
            columns.adapters_R,
        )

    @property
    def max_input_rows(self) -> int:
        """Maximum number of rows of the experts' input, including unused rows of blocks."""
        if self.fixed_capacity is None:
            return self.max_rows
        return self.fixed_capacity.max_received_rows((*self._layouts.values(),))

    def dispatch_shape(self, tokens: int) -> DispatchShape:
        return StandardShape(self.max_input_rows, self.problem.top_k)

    def may_replay(self) -> bool:
        return self.fixed_capacity is not None

    def may_record(self) -> bool:
        return self.fixed_capacity is not None and self.fixed_capacity.is_established

    def check(self) -> None:
        if self.fixed_capacity is not None:
            self.fixed_capacity.check()

    def refuse(self, error: Exception) -> None:
        if self.fixed_capacity is None or not self.fixed_capacity.refuse(error):
            super().refuse(error)
