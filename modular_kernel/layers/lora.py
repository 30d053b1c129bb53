"""LoRA for FusedMoE: LoRAManager loads adapters for all layers, and FusedMoEWithLoRA applies them.

    manager = LoRAManager(layer.problem, "adapters=8,rank=16", [layer.layer_id], device)
    manager.load("mine", {3: MoELoRALayer(load_adapter("adapter/", 3, manager.problem))})
    adapted = FusedMoEWithLoRA(layer, manager)
    info = manager.prepare_moe_lora_batch(ForwardBatch(("mine", None), seg_indptr), 3)
    y_TH = adapted(x_TH, router_logits, moe_lora_info=info)

A LoRAManager has one of two modes, which compute different functions. "merged", the default, adds
LoRA deltas to the projections inside the experts, as PEFT does. "parallel_delta" adds a
separate branch in parallel with the experts (`modular_kernel.ops.moe_lora`).

If the layer exchanges tokens between expert-parallel ranks, a token is sent with the slot of its
adapter, and each rank has the matrices of its own experts. Before they send rows, the ranks compare
the names and slots of their adapters in every call.
"""

import hashlib
import math
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.compiler import is_compiling

from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    ShapeError,
    StateError,
    UnsupportedError,
    WeightsError,
)
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.layers.adapter_pool import AdapterPool
from modular_kernel.layers.fused_moe import ComputeExperts, FusedMoE, RoutingLike
from modular_kernel.ops.moe_lora import MoELoRABatchInfo, run_moe_lora
from modular_kernel.replay import modes
from modular_kernel.spec.lora import Adapter, AdapterSpec
from modular_kernel.spec.problem import Problem, dtype_name
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils import forks
from modular_kernel.utils.argument_checks import expect, expect_each
from modular_kernel.utils.tensor_checks import check_tensor, check_tensors

Mode = Literal["merged", "parallel_delta"]
# Reason for which torch.compile does not trace a call.
_NOT_TRACED = (
    "a FusedMoEWithLoRA call with adapters, or with an exchange of tokens, is not traced: the "
    "graph breaks at the call"
)


@dataclass(frozen=True, eq=False)
class MoELoRALayer:
    """The matrices A and B of one adapter for one layer, and the scaling of B A.

    factors: the matrices.
    scaling: factor of B A. It is 1 for the result of `load_adapter`, whose B is already scaled. In
        mode "merged", it is applied to each projection. In mode "parallel_delta", it is applied
        once to the branch.
    """

    factors: Adapter
    scaling: float = 1.0

    def __post_init__(self) -> None:
        expect("factors", self.factors, Adapter)
        expect("scaling", self.scaling, float)

    @property
    def rank(self) -> int:
        """The rank of the factors."""
        return self.factors.lora_a2.shape[1]

    def fold_scaling(self) -> Adapter:
        """Return the factors with both B matrices multiplied by the scaling."""
        check_tensors(vars(self.factors))
        for name, factor in vars(self.factors).items():
            if not factor.is_floating_point():
                need = "a floating-point dtype"
                raise DtypeError(name, got=dtype_name(factor.dtype), need=need)
        if self.scaling == 1.0:
            return self.factors
        b13, b2 = self.factors.lora_b13, self.factors.lora_b2
        return replace(
            self.factors,
            lora_b13=(b13.double() * float(self.scaling)).to(b13.dtype),
            lora_b2=(b2.double() * float(self.scaling)).to(b2.dtype),
        )


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """The sequences of one call and their adapters.

    lora_ids: adapter name of each of the S sequences, or None for no adapter.
    seg_indptr: (S + 1,) integers on the device of the layers: the first token of each sequence,
        then the end of the last sequence.

    Raises ConfigurationError for invalid names, DtypeError unless seg_indptr is a tensor, and
    ShapeError for another length.
    """

    lora_ids: Sequence[str | None]
    seg_indptr: torch.Tensor

    def __post_init__(self) -> None:
        expect("lora_ids", self.lora_ids, list[str | None] | tuple[str | None, ...])
        check_tensor("seg_indptr", self.seg_indptr)
        if self.seg_indptr.shape != (len(self.lora_ids) + 1,):
            size = len(self.lora_ids) + 1
            got = tuple(self.seg_indptr.shape)
            need = f"({size},), one element more than lora_ids"
            raise ShapeError("seg_indptr", got=got, need=need)


class LoRAManager:
    """Loads named adapters, each into the same slot of every layer's pool.

    problem: the problem of all layers, such as `FusedMoE.problem`.
    lora: number of slots and maximum rank, as in Problem.lora.
    layers: ids of one or more layers.
    device: device of the layers.
    mode: "merged" or "parallel_delta". "parallel_delta" requires a13=shared, activation silu, and
        gate and up rows that are not interleaved.

    Threads may load, evict and prepare batches concurrently, because a lock serializes them.

    If the layers exchange tokens between ranks, each rank has a manager with the matrices of the
    rank's experts. Between the same calls, all ranks must load and evict the same adapters in the
    same order. Otherwise, the next call raises CommunicationError on all ranks.

    Raises ConfigurationError for invalid arguments, and the DeviceError and CapacityError of
    `AdapterPool`.
    """

    def __init__(
        self,
        problem: Problem,
        lora: str | AdapterSpec,
        layers: Iterable[int],
        device: torch.device | str = "cpu",
        *,
        mode: Mode = "merged",
    ) -> None:
        expect("problem", problem, Problem)
        expect("mode", mode, Mode)
        self.problem, self.mode = replace(problem, lora=str(AdapterSpec.parse(lora))), mode
        spec, act = self.problem.adapters, self.problem.act
        if mode == "parallel_delta" and spec is not None:
            is_plain_silu = (act.kind, act.alpha, act.limit, act.interleaved) == (
                "silu",
                None,
                None,
                False,
            )
            if not spec.a13_shared or not is_plain_silu:
                got = f"{spec}, {problem.activation}"
                need = "a13=shared, and activation silu without interleaved rows"
                raise ConfigurationError("parallel_delta", got=got, need=need)
        ids = expect_each("layers", layers, int)
        if not ids or len(set(ids)) < len(ids):
            raise ConfigurationError(
                "layers", got=ids[:8], need="at least one layer id, without duplicates"
            )
        self.pools = {layer: AdapterPool(self.problem, device) for layer in ids}
        slots = 0 if spec is None else spec.adapters
        with modes.disable_inference_mode():
            self._ranks = {
                layer: torch.zeros(slots, dtype=torch.int32, device=device) for layer in self.pools
            }
            self._scalings = {
                layer: torch.ones(slots, dtype=torch.float32, device=device) for layer in self.pools
            }
        self._slots = dict[str, int]()
        self._layers_by_name = dict[str, frozenset[int]]()  # layers for which a name has matrices
        self._interrupted_names = set[str]()  # names whose load or evict was interrupted
        self._lock = threading.RLock()
        forks.on_fork(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy, without the lock."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()
        forks.on_fork(self)

    def after_fork(self) -> None:
        """Reset the lock in a forked child, because a thread of the parent may have held it."""
        forks.reset_lock(self._lock)

    @property
    def has_moe_lora(self) -> bool:
        """Whether any adapter is loaded."""
        return bool(self._slots)

    def load(self, name: str, layers: Mapping[int, MoELoRALayer]) -> int:
        """Load an adapter into the same slot of all layers, and return the slot.

        name: name of the adapter, 1 to 256 characters. It must not be loaded.
        layers: the adapter's matrices by layer id. In all other layers, the slot stays zero.

        Raises every error of `AdapterPool.load`; ConfigurationError for an unknown layer;
        WeightsError for a scaling that float32 cannot represent; StateError if a pool was changed
        without the manager, so that slots differ between layers. After any exception, including
        KeyboardInterrupt, the pools are unchanged.
        """
        expect(f"adapter {name!r}", layers, Mapping)
        for layer, adapter_layer in layers.items():
            self._get_pool(layer)
            expect(f"adapter {name!r}: layer {layer}", adapter_layer, MoELoRALayer)
            if self.mode == "parallel_delta" and not _fits_float32(adapter_layer.scaling):
                need = "a number that float32 can represent"
                what = f"adapter {name!r}: scaling of layer {layer}"
                raise WeightsError(what, got=adapter_layer.scaling, need=need)
        with self._lock:
            self._remove_interrupted()
            return self._load(name, layers)

    def _load(self, name: str, layers: Mapping[int, MoELoRALayer]) -> int:
        for pool in self.pools.values():
            pool.check_change(name)
            if name in pool.slots:
                got = f"loaded in slot {pool.slots[name]}"
                need = "a name that is not loaded; evict the adapter to replace it"
                raise StateError(f"adapter {name!r}", got=got, need=need)
        self._interrupted_names.add(name)
        try:
            slots = {
                layer: pool.load(name, self._make_pool_adapter(layers.get(layer)))
                for layer, pool in self.pools.items()
            }
            slot, *other_slots = set(slots.values())
            if other_slots:
                need = "the same slot in every layer; load and evict only through LoRAManager"
                raise StateError(f"adapter {name!r}: slots by layer", got=slots, need=need)
            for layer, factors in layers.items():
                self._ranks[layer][slot] = factors.rank
                self._scalings[layer][slot] = 1.0 if self.mode == "merged" else factors.scaling
        except BaseException:
            self._remove_interrupted()
            raise
        self._layers_by_name[name] = frozenset(layers)
        self._slots[name] = slot
        self._interrupted_names.discard(name)
        return slot

    def evict(self, name: str) -> None:
        """Free an adapter's slot in every layer. Raises StateError if the name is not loaded."""
        with self._lock:
            self._remove_interrupted()
            self._get_slot(name)
            for pool in self.pools.values():
                pool.check_change(name)
            self._interrupted_names.add(name)
            del self._slots[name]
            self._layers_by_name.pop(name, None)
            self._remove_interrupted()

    def _remove_interrupted(self) -> None:
        """Remove adapters whose load or evict was interrupted from all pools."""
        self._interrupted_names.difference_update(self._slots)
        for name in tuple(self._interrupted_names):
            for layer, pool in self.pools.items():
                slot = pool.slots.get(name)
                if slot is not None:
                    self._ranks[layer][slot], self._scalings[layer][slot] = 0, 1.0
                    pool.evict(name)
            self._interrupted_names.discard(name)

    def prepare_moe_lora_batch(
        self, forward_batch: ForwardBatch, layer_id: int
    ) -> MoELoRABatchInfo | None:
        """Return the `moe_lora_info` of a layer's call, or None if no sequence has an adapter.

        The ranks and scalings in the result are tensors of the manager, which `load` modifies in
        place.
        """
        self._get_pool(layer_id)
        expect("forward_batch", forward_batch, ForwardBatch)
        names = forward_batch.lora_ids
        if not any(name is not None for name in names):
            return None
        with self._lock:
            slots = self._get_slots(names, layer_id)
        ranks = self._ranks[layer_id]
        indices = torch.tensor(slots, dtype=torch.int32, device=ranks.device)
        return MoELoRABatchInfo(indices, ranks, self._scalings[layer_id], forward_batch.seg_indptr)

    def _get_slots(self, names: Sequence[str | None], layer_id: int) -> list[int]:
        slots = [-1 if name is None else self._get_slot(name) for name in names]
        for name, slot in zip(names, slots, strict=True):
            pool_slot = -1 if name is None else self.pools[layer_id].slots.get(name)
            if pool_slot != slot:
                got = f"slot {pool_slot}"
                need = f"slot {slot}; load and evict only through LoRAManager"
                raise StateError(f"adapter {name!r}: pool of layer {layer_id}", got=got, need=need)
        return slots

    def fingerprint(self, layer_id: int) -> str:
        """Return text that two managers share if they have the same adapters in the same slots.

        It depends on the names and slots of the adapters in the layer's pool, and on which of them
        were loaded with matrices for the layer. It does not depend on the matrices, which differ
        between ranks.
        """
        pool = self._get_pool(layer_id)
        with self._lock:
            adapters = [
                (name, slot, layer_id in self._layers_by_name.get(name, ()))
                for name, slot in sorted(pool.slots.items())
            ]
        return hashlib.sha256(repr(adapters).encode()).hexdigest()[:16]

    def backend(self, layer_id: int) -> "LoRABackend":
        """Return the buffers of a layer for mode "parallel_delta"."""
        if self.mode != "parallel_delta":
            raise ConfigurationError("mode", got=self.mode, need="parallel_delta")
        return LoRABackend(self._get_pool(layer_id))

    def weights(self, layer_id: int, base: ExpertWeights) -> ExpertWeights:
        """Return a layer's weights with its adapters."""
        return self._get_pool(layer_id).weights(base)

    def _get_slot(self, name: str) -> int:
        expect("name of an adapter", name, str)
        if name not in self._slots:
            need = f"a loaded adapter: {', '.join(sorted(self._slots)[:8]) or 'none'}"
            raise StateError(f"adapter {name!r}", got="not loaded", need=need)
        return self._slots[name]

    def _get_pool(self, layer: int) -> AdapterPool:
        expect("layer", layer, int)
        if layer not in self.pools:
            need = f"one of {', '.join(map(str, sorted(self.pools)[:8]))}"
            raise ConfigurationError("layer", got=layer, need=need)
        return self.pools[layer]

    def _make_pool_adapter(self, adapter_layer: MoELoRALayer | None) -> Adapter:
        if adapter_layer is not None:
            return adapter_layer.fold_scaling() if self.mode == "merged" else adapter_layer.factors
        problem, spec = self.problem, self.problem.adapters
        assert spec is not None
        shapes = replace(spec, rank=1).shapes(
            problem.e, problem.w1_rows, problem.hidden, problem.intermediate
        )
        zeros = {
            name: torch.zeros(shape[1:], dtype=problem.dtype, device="cpu")
            for name, shape in shapes.items()
        }
        return Adapter(**zeros)


def _fits_float32(number: float) -> bool:
    """Return whether a number neither overflows nor underflows to 0 in float32."""
    try:
        rounded = struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return False
    return math.isfinite(rounded) and (rounded != 0 or number == 0)


class LoRABackend:
    """The matrices of one layer's parallel branch, as four views of an AdapterPool's tensors."""

    def __init__(self, pool: AdapterPool) -> None:
        expect("pool", pool, AdapterPool)
        empty = torch.zeros((), dtype=torch.float32, device="cpu")
        weights = pool.weights(ExpertWeights(empty, empty))
        a13, b13, a2, b2 = weights.lora_a13, weights.lora_b13, weights.lora_a2, weights.lora_b2
        assert a13 is not None
        assert b13 is not None
        assert a2 is not None
        assert b2 is not None
        if a13.shape[2] != a2.shape[2]:
            got = f"lora_a13 with {a13.shape[2]} rows, lora_a2 with rank {a2.shape[2]}"
            need = "one A for gate and up, that is, a13=shared"
            raise ConfigurationError("pool", got=got, need=need)
        experts = a2.shape[1]
        self.moe_gate_up_a_buffer = a13.expand(-1, experts, -1, -1)
        self.moe_gate_up_b_buffer = b13
        self.moe_down_a_buffer = a2
        self.moe_down_b_buffer = b2.expand(-1, experts, -1, -1)

    def run_moe_lora(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        moe_lora_info: MoELoRABatchInfo,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Add the branch to `output` in place, and return `output`.

        `modular_kernel.ops.moe_lora.run_moe_lora` describes the arguments.
        """
        return run_moe_lora(
            hidden_states,
            topk_ids,
            topk_weights,
            moe_lora_info,
            self.moe_gate_up_a_buffer,
            self.moe_gate_up_b_buffer,
            self.moe_down_a_buffer,
            self.moe_down_b_buffer,
            output,
        )


class FusedMoEWithLoRA(nn.Module):
    """A FusedMoE whose tokens may have adapters. A call without adapters runs the base layer.

    base_layer: a layer whose layer_id is in manager.pools, and whose problem equals the manager's
        problem except for lora and tokens.
    manager: the manager of the layer's adapters.

    If experts are sharded, the adapters' contribution is part of this rank's partial sum. In mode
    "parallel_delta", the branch is weighted by the routing and by routed_scaling_factor, like the
    experts' output.

    If base_layer exchanges tokens between ranks, the FusedMoEWithLoRA has a kernel of its own that
    shares the connections of the base layer. All ranks must create it in the same order. A call
    exchanges adapter slots even if this rank's tokens have no adapters, because those of other
    ranks may have some. All ranks must therefore call either this layer or the base layer.

    Raises ConfigurationError if the layer does not match the manager. For a layer that exchanges
    tokens, raises UnsupportedError in mode "parallel_delta" or if the ranks of its prepare/finalize
    part do not compare every call, and IncompatibleError if a part does not support adapters.
    """

    def __init__(self, base_layer: FusedMoE, manager: LoRAManager) -> None:
        super().__init__()
        expect("base_layer", base_layer, FusedMoE)
        expect("manager", manager, LoRAManager)
        if base_layer.layer_id is None or base_layer.layer_id not in manager.pools:
            need = f"a layer of the manager: {sorted(manager.pools)[:8]}"
            raise ConfigurationError("layer_id", got=base_layer.layer_id, need=need)
        spec = manager.problem.adapters
        problem = replace(base_layer.problem, lora=str(spec))
        if problem.with_tokens(1) != manager.problem.with_tokens(1):
            need = f"the problem of the manager, {manager.problem}"
            raise ConfigurationError("problem of the layer", got=str(problem), need=need)
        self.base_layer, self.layer_id = base_layer, base_layer.layer_id
        self._manager, self._problem = manager, problem
        if manager.mode == "parallel_delta" and problem.parallel.world_size > 1:
            got = "parallel_delta, whose branch is computed on the rank of a token"
            need = "merged, because the layer sends tokens to the ranks of their experts"
            raise UnsupportedError("mode", got=got, need=need)
        self._exchange_kernel = base_layer.make_adapter_exchange_kernel(problem)

    def forward(
        self,
        hidden_states: torch.Tensor,
        routing: RoutingLike = None,
        *,
        moe_lora_info: MoELoRABatchInfo | ForwardBatch | None = None,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the layer's output, including the contribution of the adapters.

        moe_lora_info: a ForwardBatch, or the result of the manager's `prepare_moe_lora_batch`, or
            None for no adapters. Its seg_indptr indexes the tokens of hidden_states.view(-1, H).

        If the layer exchanges tokens, and moe_lora_info is invalid on one rank, that rank raises
        the error, and the other ranks raise CommunicationError. This includes a ForwardBatch with
        the name of an adapter that is not loaded. The layer remains usable.

        `FusedMoE.forward` and `modular_kernel.ops.moe_lora.run_moe_lora` describe the other
        arguments and the errors.
        """
        base, kernel = self.base_layer, self._exchange_kernel
        if moe_lora_info is None and kernel is None:
            return base(hidden_states, routing, token_ids=token_ids)  # type: ignore[no-any-return]
        if is_compiling():
            return modes.run_with_graph_break(
                self.forward,
                _NOT_TRACED,
                hidden_states,
                routing,
                moe_lora_info=moe_lora_info,
                token_ids=token_ids,
            )
        run_experts: ComputeExperts
        if kernel is not None:
            run_experts = partial(self._run_exchange, kernel, moe_lora_info)
        elif (info := self._resolve_batch(moe_lora_info)) is not None:
            run = self._run_merged if self._manager.mode == "merged" else self._run_parallel_delta
            run_experts = partial(run, info)
        else:  # no sequence of the batch has an adapter
            run_experts = base.computed
        return base.forward_with(run_experts, hidden_states, routing, token_ids=token_ids)

    def counters(self) -> dict[str, object]:
        """Return the counters of the base layer, and the number of loaded adapters."""
        loaded = self._manager.pools[self.layer_id].slots
        return {**self.base_layer.counters(), "adapters": len(loaded)}

    def kernels(self) -> list[FusedMoEModularKernel]:
        """Return the kernels of the base layer, and the kernel that sends adapter slots, if any."""
        kernels = self.base_layer.kernels()
        return kernels if self._exchange_kernel is None else [*kernels, self._exchange_kernel]

    def destroy(self) -> None:
        """Release the resources of a prepare/finalize part that spans ranks.

        Every rank must call this method. This layer and the base layer cannot be called afterwards.
        """
        if self._exchange_kernel is not None:
            self._exchange_kernel.prepare_finalize.destroy()
        self.base_layer.destroy()

    def _resolve_batch(
        self, batch: MoELoRABatchInfo | ForwardBatch | None
    ) -> MoELoRABatchInfo | None:
        expect("moe_lora_info", batch, MoELoRABatchInfo | ForwardBatch | None)
        if isinstance(batch, ForwardBatch):
            return self._manager.prepare_moe_lora_batch(batch, self.layer_id)
        return batch

    def _run_exchange(
        self,
        kernel: FusedMoEModularKernel,
        batch: MoELoRABatchInfo | ForwardBatch | None,
        x_TH: torch.Tensor,
        routing: Routing,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send the tokens with the slots of their adapters to the ranks of their experts."""
        base, part = self.base_layer, kernel.prepare_finalize
        try:
            info = self._resolve_batch(batch)
            slots_T: torch.Tensor | Literal["none"] = "none"
            if info is not None:
                slots_T = info.slots_of(len(x_TH))
            weights = self._manager.weights(self.layer_id, base.weights())
            same_on_ranks = self._manager.fingerprint(self.layer_id)
        except Exception as error:  # the other ranks wait for this rank
            part.refuse(error)
            raise
        if part.requires.replicated_input:  # the ranks have the same tokens, with their adapters
            same_on_ranks += f", {'no adapters' if info is None else 'adapters'}"
        routing = replace(routing, adapters_T=slots_T)
        return base.run_exchange(kernel, x_TH, weights, routing, same_on_ranks=same_on_ranks)

    def _run_merged(
        self, info: MoELoRABatchInfo, x_TH: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        base = self.base_layer
        weights = self._manager.weights(self.layer_id, base.weights())
        routing = replace(routing, adapters_T=info.slots_of(len(x_TH)))
        return base.computed(x_TH, routing, adapters=(self._problem, weights))

    def _run_parallel_delta(
        self, info: MoELoRABatchInfo, x_TH: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        base = self.base_layer
        y_TH, shared_TH = base.computed(x_TH, routing)
        ids_TK, expert_map_E = routing.topk_ids_TK, base.expert_map
        if expert_map_E is not None:
            valid = (ids_TK >= 0) & (ids_TK < len(expert_map_E))
            ids_TK = torch.where(valid, expert_map_E[torch.where(valid, ids_TK, 0).long()], -1)
        weights_TK = routing.topk_weights_TK * base.problem.routed_scaling_factor
        backend = self._manager.backend(self.layer_id)
        backend.run_moe_lora(x_TH, ids_TK, weights_TK, info, y_TH)
        return y_TH, shared_TH
