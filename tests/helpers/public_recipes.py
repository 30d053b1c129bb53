"""RECIPES: a valid call of every public callable with tensor arguments, except those in EXEMPT."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from public_calls import Call
from small_layers import E, H, I, K

import modular_kernel as mk
from experts.compat import batched_gemm, ep_moe, ep_scatter
from experts.compat import fused_moe as compat_fused_moe
from modular_kernel import checkpoints
from modular_kernel.checkpoints.formats import format_of
from modular_kernel.checkpoints.fusing import merge
from modular_kernel.integrations.fused_moe import fused_experts, fused_moe
from modular_kernel.integrations.moe_runner import MoeQuantInfo, MoeRunner, MoeRunnerConfig
from modular_kernel.integrations.runner_formats import StandardDispatchOutput
from modular_kernel.layers import balance, lora, router
from modular_kernel.layers import fused_moe as layer
from modular_kernel.layers.adapter_pool import AdapterPool
from modular_kernel.layers.ep_moe import EPMoE
from modular_kernel.layers.rank_share import Share
from modular_kernel.layers.weight_loading import ExpertLoader
from modular_kernel.ops import align, moe_lora, reduce
from modular_kernel.ops.route import RouterTensors, route
from modular_kernel.quant import repacking, scale_tiles
from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.spec.lora import Adapter, slots_from_sequences
from modular_kernel.spec.problem import IdSpace, Machine, Problem
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import DispatchedRouting, ExpertRows, ExpertWeights, Routing
from topk_reduce import (
    KeepTopK,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOp,
)

T, C = 5, 4
PROBLEM = Problem(T, H, I, E, K, dtype=torch.float32)
QUANTIZED = replace(PROBLEM, quant="int8_w8a16_group:group=32,zero_points=true")
ADAPTED = replace(PROBLEM, lora="adapters=2,rank=4")
PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
GROUP = 32
_COPIES = "copies weights into another record, which the call checks"
_STEP = "a step of a call, after `check` or `forward` has checked the tensors"
_PART = "a method of a part, which the kernel calls with tensors that it has checked"
_UNREAD = "reads no tensor"
_SHAPES = "only reads shapes of tensors that `load_experts` made"

# Functions of prepare_finalize.common that parts call with checked tensors.
_EXCHANGE_STEPS = (
    "handshake.exchange_metadata",
    "group_part.FusedDispatchPart.prepare",
    "group_part.FusedDispatchPart.prepare_no_receive",
    "group_part.FusedDispatchPart.send",
    "group_part.GroupPart.local_amax",
    "group_part.GroupPart.local_tokens",
    "group_part.GroupPart.pairs",
    "group_part.GroupPart.prepare",
    "group_part.PackedRowsPart.pack",
    "group_part.PackedRowsPart.prepare_no_receive",
    "group_part.PackedRowsPart.send",
    "packed_rows.RowLayout.clear",
    "packed_rows.RowLayout.write",
    "packed_rows.RowLayout.read",
    "row_buffers.PackedRowBuffers.put_adapters",
    "row_buffers.PackedRowBuffers.unpack",
    "row_buffers.PackedRowBuffers.unpack_into",
    "row_buffers.UnpackedRows.rows",
    "tokens.quantize_tokens",
    "tokens.reduce_rows",
    "tokens.weight_and_reduce",
    "torch_group.TorchGroup.all_gather",
    "torch_group.TorchGroup.all_reduce",
    "torch_group.TorchGroup.all_to_all",
    "torch_group.TorchGroup.block_exchange",
    "torch_group.TorchGroup.send_refusal",
)

EXEMPT: Mapping[str, str] = {
    **{f"prepare_finalize.common.{name}": _PART for name in _EXCHANGE_STEPS},
    "modular_kernel.layers.adapter_pool.AdapterPool.weights": _COPIES,
    "modular_kernel.layers.lora.LoRAManager.weights": _COPIES,
    "modular_kernel.layers.module_state.move_without_cast": "nn.Module._apply calls it",
    "modular_kernel.contracts.CallState": "a part's record of one call, which the kernel makes",
    "modular_kernel.contracts.PermuteExpertsUnpermute.apply": _PART,
    "modular_kernel.contracts.PermuteExpertsUnpermute.path_name": _PART,
    "modular_kernel.contracts.PermuteExpertsUnpermute.prepare": _PART,
    "modular_kernel.contracts.PermuteExpertsUnpermute.roundings": _PART,
    "modular_kernel.contracts.PrepareAndFinalize.finalize_to_new_tensor": _PART,
    "modular_kernel.contracts.PrepareAndFinalize.finalize": _PART,
    "modular_kernel.contracts.PrepareAndFinalize.prepare": _PART,
    "modular_kernel.contracts.PrepareAndFinalize.prepare_no_receive": _PART,
    "modular_kernel.contracts.TopKWeightAndReduce.apply": "abstract: its subclasses are tested",
    "topk_reduce.delegate.TopKWeightAndReduceDelegate.apply": "always raises",
    "modular_kernel.execution.Execution.check_call": _STEP,
    "modular_kernel.execution.Execution.check_weights": _STEP,
    "modular_kernel.execution.Execution.finish": _STEP,
    "modular_kernel.execution.Execution.output": _STEP,
    "modular_kernel.execution.Execution.poison_output": _STEP,
    "modular_kernel.execution.Execution.start_checked": _STEP,
    "modular_kernel.execution.Pending.finish": "finishes a call that `start` has checked",
    "modular_kernel.layers.fused_moe.FusedMoE.computed": _STEP,
    "modular_kernel.layers.fused_moe.FusedMoE.run_exchange": _STEP,
    "modular_kernel.layers.fused_moe.FusedMoE.forward_with": "`forward`, which calls it, is tested",
    "modular_kernel.layers.parameters.ExpertParameters.keep_prepared": _UNREAD,
    "modular_kernel.layers.parallel.all_reduce": "a collective on a tensor that the layer made",
    "modular_kernel.layers.routing.check_selection_bias": "FusedMoE, which calls it, is tested",
    "modular_kernel.layers.weight_loading.ExpertLoader.mark": _UNREAD,
    "modular_kernel.layers.lora.LoRAManager.prepare_moe_lora_batch": (
        "ForwardBatch and MoELoRABatchInfo check the tensors that it passes on"
    ),
    "modular_kernel.layers.lora.MoELoRALayer": "`fold_scaling` and `AdapterPool.load` read it",
    "modular_kernel.checkpoints.loading.LoadedExperts.partial": _SHAPES,
    "modular_kernel.checkpoints.loading.LoadedExperts.problem": _SHAPES,
    "modular_kernel.integrations.moe_runner.MoeQuantInfo": "a record: `MoeRunner.run` reads it",
    "modular_kernel.integrations.moe_runner.MoeQuantInfo.options": _UNREAD,
    "modular_kernel.integrations.moe_runner.MoeQuantInfo.scheme": _UNREAD,
    "modular_kernel.integrations.fused_moe_options.quant_of": _UNREAD,
}


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draw normal values with a standard deviation of 0.2."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 5


def integers(
    *shape: int, low: int = 0, high: int, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randint(low, high, shape, generator=g, dtype=dtype)


def make_weights() -> ExpertWeights:
    """Return unquantized weights of all experts."""
    return ExpertWeights(floats(E, 2 * I, H), floats(E, H, I))


def make_routing(tokens: int = T) -> Routing:
    return Routing(floats(tokens, K).abs(), integers(tokens, K, high=E))


def make_adapter(rank: int = 3) -> Adapter:
    shapes = (E, 2 * rank, H), (E, 2 * I, rank), (E, rank, I), (E, H, rank)
    return Adapter(*(floats(*shape) for shape in shapes))


def make_kernel(problem: Problem = PROBLEM) -> Any:
    return mk.make_kernel(*PAIR, problem, machine=Machine("cpu"))


def _kernel_arguments() -> dict[str, Any]:
    return {
        "x_TH": floats(T, H),
        "weights": make_weights(),
        "routing": make_routing(),
        "out": floats(T, H),
    }


def _make_group_weights() -> checkpoints.GroupWeights:
    return checkpoints.from_gptq(
        _gptq_arguments()["qweight"],
        _gptq_arguments()["scales"],
        _gptq_arguments()["qzeros"],
        group=GROUP,
    )


def _gptq_arguments() -> dict[str, Any]:
    return {
        "qweight": integers(2 * GROUP // 8, 16, high=2**31 - 1),
        "scales": floats(2, 16),
        "qzeros": torch.full((2, 2), 0x11111111, dtype=torch.int32),
        "g_idx": torch.arange(2 * GROUP, dtype=torch.int32) // GROUP,
        "group": GROUP,
    }


def _awq_arguments() -> dict[str, Any]:
    return {
        "qweight": integers(2 * GROUP, 2, high=2**31 - 1),
        "scales": floats(2, 16),
        "qzeros": integers(2, 2, high=2**31 - 1),
        "group": GROUP,
    }


def _compressed_tensors_arguments() -> dict[str, Any]:
    return {
        "weight_packed": integers(16, 2 * GROUP // 8, high=2**31 - 1),
        "weight_scale": floats(16, 2),
        "weight_zero_point": integers(2, 2, high=2**31 - 1),
        "weight_g_idx": torch.arange(2 * GROUP, dtype=torch.int32) // GROUP,
        "group": GROUP,
    }


def _make_symmetric_weights() -> checkpoints.GroupWeights:
    weights = _make_group_weights()
    assert weights.zero_point is not None
    return replace(weights, zero_point=torch.full_like(weights.zero_point, 0x88))


def _fused_arguments() -> dict[str, Any]:
    weights = make_weights()
    topk = (floats(T, K).abs(), integers(T, K, high=E), None)
    biases = {"b1": floats(E, 2 * I), "b2": floats(E, H)}
    return {"hidden_states": floats(T, H), "w1": weights.w1, "w2": weights.w2,
            "topk_output": topk, **biases}  # fmt: skip


def _runner_call() -> Call:
    weights = make_weights()
    runner = MoeRunner("torch", MoeRunnerConfig(inplace=False), dtype=torch.float32)
    topk = floats(T, K).abs(), integers(T, K, high=E)
    info = MoeQuantInfo(weights.w1, weights.w2, floats(E, 2 * I), floats(E, H))
    arguments = {"dispatch_output": StandardDispatchOutput(floats(T, H), topk), "quant_info": info}
    return Call(runner.run, arguments)


def _make_layer(**options: Any) -> layer.FusedMoE:
    layer_ = layer.FusedMoE(E, H, I, 3, **{"params_dtype": torch.float32} | options)
    layer_.set_weights(make_weights())
    return layer_


def _make_adapted_layer() -> tuple[lora.FusedMoEWithLoRA, lora.LoRAManager]:
    base = _make_layer(router=RouterSpec(K, renormalize=True))
    manager = lora.LoRAManager(base.problem, "adapters=2,rank=4", [3])
    manager.load("mine", {3: lora.MoELoRALayer(make_adapter())})
    return lora.FusedMoEWithLoRA(base, manager), manager


def _make_lora_batch_info() -> moe_lora.MoELoRABatchInfo:
    return moe_lora.MoELoRABatchInfo(**_lora_batch_arguments())


def _lora_batch_arguments() -> dict[str, Any]:
    return {
        "weight_indices": torch.tensor([0, -1], dtype=torch.int32),
        "lora_ranks": torch.tensor([3, 2], dtype=torch.int32),
        "scalings": torch.ones(2),
        "seg_indptr": torch.tensor([0, 3, T]),
    }


def _lora_arguments() -> dict[str, Any]:
    return {
        "hidden_states": floats(T, H),
        "topk_ids": integers(T, K, high=E),
        "topk_weights": floats(T, K).abs(),
        "moe_lora_info": _make_lora_batch_info(),
        "output": floats(T, H),
    }


def _lora_call_of_buffers() -> Call:
    buffers = {
        "gate_up_a_buffer": floats(2, E, 4, H),
        "gate_up_b_buffer": floats(2, E, 2 * I, 4),
        "down_a_buffer": floats(2, E, 4, I),
        "down_b_buffer": floats(2, E, H, 4),
    }
    return Call(moe_lora.run_moe_lora, _lora_arguments() | buffers, written=("output",))


def _lora_call_of_pool() -> Call:
    pool = AdapterPool(replace(PROBLEM, lora="adapters=2,rank=4,a13=shared"))
    return Call(lora.LoRABackend(pool).run_moe_lora, _lora_arguments(), written=("output",))


def _forward_with_adapters() -> Call:
    layer_, _ = _make_adapted_layer()
    arguments = {
        "hidden_states": floats(T, H),
        "routing": floats(T, E),
        "moe_lora_info": _make_lora_batch_info(),
    }
    return Call(layer_.forward, arguments)


def _manager_load_call() -> Call:
    manager = lora.LoRAManager(PROBLEM, "adapters=2,rank=4", [3])

    def load(layers: Any) -> None:
        manager.load("mine", layers)
        manager.evict("mine")

    return Call(load, {"layers": {3: lora.MoELoRALayer(make_adapter(), 0.5)}})


def _pool_load_call() -> Call:
    pool = AdapterPool(ADAPTED)

    def load(adapter: Any) -> None:
        pool.load("mine", adapter)
        pool.evict("mine")

    return Call(load, {"adapter": make_adapter()})


def _share_adapter(adapter: Any) -> Adapter:
    return Adapter.share(adapter, 0, 2)


def _select_experts_call(function: Callable[..., object]) -> Call:
    biased = RouterSpec(K, "sigmoid", selection_bias=True)
    tensors = RouterTensors(floats(E))
    logits = {"logits_TE" if function is route else "router_logits": floats(T, E)}
    return Call(function, logits | {"spec": biased, "tensors": tensors})


def _table_routing_call() -> Call:
    spec = RouterSpec(K, table=True)
    token_ids, table = integers(T, high=9), integers(9, K, high=E)
    tensors = RouterTensors(None, table)
    return Call(
        route,
        {"logits_TE": floats(T, E), "spec": spec, "tensors": tensors, "token_ids_T": token_ids},
    )


def _router_call(name: str) -> Call:
    router_ = router.Router(RouterSpec(K, renormalize=True), H, E)
    router_.weight.data.copy_(floats(E, H))
    return Call(getattr(router_, name), {"x_TH": floats(T, H)})


def _table_router_call(name: str) -> Call:
    router_ = router.Router(RouterSpec(K, table=True), H, E, vocabulary=9)
    router_.weight.data.copy_(floats(E, H))
    assert router_.tid2eid is not None
    router_.tid2eid.copy_(integers(9, K, high=E))
    return Call(getattr(router_, name), {"x_TH": floats(T, H), "token_ids": integers(T, high=9)})


_META = {"meta": "parameters may be made on the meta device, and loaded later"}


def _expert_loader_call() -> Call:
    loader, module = ExpertLoader(Share(E, H, I)), torch.nn.Module()
    loader.create_weights(module, torch.float32)
    arguments = {
        "param": module.w13_weight,
        "loaded_weight": floats(I, H),
        "weight_name": "w13_weight",
        "shard_id": "w1",
        "expert_id": 0,
    }
    return Call(loader.weight_loader, arguments, written=("param",), accepts=_META)


def _layer_loader_call() -> Call:
    layer_ = layer.FusedMoE(E, H, I, 3, top_k=K, quant_config=None, params_dtype=torch.float32)
    arguments = {
        "param": layer_.w13_weight,
        "loaded_weight": floats(I, H),
        "weight_name": "w13_weight",
        "shard_id": "w1",
        "expert_id": 0,
    }
    return Call(layer_.weight_loader, arguments, written=("param",), accepts=_META)


def _layer_arguments(**_: Any) -> dict[str, Any]:
    sizes = {"num_experts": E, "hidden_size": H, "intermediate_size": I}
    return sizes | {"params_dtype": torch.float32}


def _make_expert_rows(
    *shape: int, pairs: torch.Tensor | None = None, weights: bool = True
) -> ExpertRows:
    router_weights = floats(T, K).abs() if weights else None
    return ExpertRows(floats(*shape), pairs, router_weights, 1.0)


def _make_dispatched_rows() -> ExpertRows:
    ids, invalid = integers(T, K, high=E), torch.zeros(1, dtype=torch.int32)
    routed = DispatchedRouting(
        None, ids, IdSpace.GLOBAL, E, torch.arange(E, dtype=torch.int32), invalid
    )
    return replace(_make_expert_rows(T, K, H), routing=routed, num_local=E)


def _reduce_call(part: Any, rows: ExpertRows, *out: int) -> Call:
    return Call(part.apply, {"rows": rows, "out": floats(*out)}, written=("out",))


def _make_pairs() -> torch.Tensor:
    return integers(T, K, high=E * C)


def _merge_scales_call() -> Call:
    scale = floats(E, 2).abs() + 0.1
    w = floats(E, 8, 16).to(torch.float8_e4m3fn)
    return Call(checkpoints.merge_scales, {"w_eNK": w, "scale_eS": scale})


def _repack_call(function: Callable[..., object]) -> Call:
    w = integers(2, 4, 16, high=256, dtype=torch.uint8)
    arguments = {"w_eNK": w, "out": torch.empty_like(w)}
    return Call(function, arguments, written=("out",), shared=("w_eNK",))


def _merge_call() -> Call:
    parts = [{"weight": floats(E, I, H)}, {"weight": floats(E, I, H)}]
    return Call(merge, {"format": format_of(None), "projections": parts, "dtype": torch.float32})


def _composed_call(name: str) -> Call:
    kernel: Any = mk.compose(replace(PROBLEM, tokens=1), Machine("cpu"))
    kernel = kernel.plan() if name == "plan" else kernel
    arguments = {
        "x_TH": floats(1, H),
        "weights": make_weights(),
        "routing": make_routing(1),
        "out": floats(1, H),
    }
    if name == "prepare_weights":
        return Call(kernel.prepare_weights, {"weights": make_weights()})
    if name == "warm_up":
        return Call(kernel.plan().warm_up, {"weights": make_weights(), "tokens": (1,)})
    return Call(kernel, arguments, written=("out",))


def _reorder_arguments() -> dict[str, Any]:
    ids = integers(T, K, high=E)
    _, source, _ = ep_moe.run_moe_ep_preproess(ids, E)
    return {"src2dst": source, "topk_ids": ids, "start_expert_id": 0, "end_expert_id": E - 1}


def _aligned_gemm_arguments() -> dict[str, Any]:
    ids = integers(T, K, high=E)
    sorted_ids, expert_ids, padded = align.moe_align_block_size(ids, 16, E)
    return {
        "A": floats(T, H),
        "B": make_weights().w1,
        "bias": None,
        "C": floats(T, K, make_weights().w1.shape[1]),
        "A_scale": None,
        "B_scale": None,
        "B_zp": None,
        "topk_weights": floats(T, K),
        "topk_ids": ids,
        "sorted_token_ids": sorted_ids.clone(),  # the three outputs share one allocation
        "expert_ids": expert_ids.clone(),
        "num_tokens_post_padded": padded.clone(),
        "mul_routed_weight": True,
        "top_k": K,
        "config": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1},
    }


def _scatter_arguments() -> dict[str, Any]:
    ids = integers(T, K, high=2)
    counts = [int((ids == expert).sum()) for expert in range(2)]
    rows = sum(ep_scatter.padded_counts(counts))
    return {
        "recv_x": floats(T, H),
        "recv_x_scale": None,
        "recv_topk": ids,
        "num_recv_tokens_per_expert": counts,
        "expert_start_loc": integers(2, high=2),
        "output_tensor": floats(rows, H),
        "output_tensor_scale": None,
        "m_indices": integers(rows, high=2),
        "output_index": integers(T, K, high=2),
    }


def _segment_arguments() -> dict[str, Any]:
    return {
        "a": floats(6, 32),
        "b": floats(2, 16, 32),
        "c": floats(6, 16),
        "batch_size": 2,
        "weight_column_major": True,
        "seg_indptr": torch.tensor([0, 2, 6]),
        "weight_indices": torch.tensor([1, 0]),
    }


def _silu_arguments() -> dict[str, Any]:
    ids = integers(6, high=E).sort().values.clone()
    return {
        "gateup_output": floats(6, 32),
        "down_input": floats(6, 16),
        "reorder_topk_ids": ids,
        "w2_input_scale": floats(E).abs() + 0.1,
        "start_expert_id": 0,
        "end_expert_id": E - 1,
    }


_LAYERS = "modular_kernel.layers."
RECIPES: Mapping[str, Callable[[], Call]] = {
    "modular_kernel.kernel.FusedMoEModularKernel.__call__": lambda: Call(
        make_kernel(), _kernel_arguments(), written=("out",)
    ),
    "modular_kernel.kernel.FusedMoEModularKernel.start": lambda: Call(
        lambda **arguments: make_kernel().start(**arguments).finish(),
        _kernel_arguments(),
        written=("out",),
    ),
    "modular_kernel.execution.Execution.check": lambda: Call(
        make_kernel().check, _kernel_arguments(), written=("out",)
    ),
    "modular_kernel.plan.Plan.__call__": lambda: Call(
        make_kernel().plan(), _kernel_arguments(), written=("out",)
    ),
    "modular_kernel.kernel.FusedMoEModularKernel.prepare_weights": lambda: Call(
        make_kernel(QUANTIZED).prepare_weights,
        {"weights": quantize_weights(make_weights(), QUANTIZED)},
    ),
    "modular_kernel.tensors.Routing.of": lambda: Call(
        lambda routing, tokens: Routing.of(routing, tokens),
        {"routing": make_routing(), "tokens": torch.tensor([1, 0])},
        receiver="routing",
    ),
    "modular_kernel.select.composed_kernel.ComposedKernel.__call__": lambda: _composed_call("call"),
    "modular_kernel.select.composed_kernel.ComposedKernel.prepare_weights": lambda: _composed_call(
        "prepare_weights"
    ),
    "modular_kernel.select.composed_kernel.ComposedPlan.__call__": lambda: _composed_call("plan"),
    "modular_kernel.select.composed_kernel.ComposedPlan.warm_up": lambda: _composed_call("warm_up"),
    "modular_kernel.quant.quantized_weights.quantize_weights": lambda: Call(
        quantize_weights, {"weights": make_weights(), "problem": QUANTIZED}
    ),
    "modular_kernel.quant.scale_tiles.e8m0_to_float": lambda: Call(
        scale_tiles.e8m0_to_float, {"scale": integers(3, 4, high=256, dtype=torch.uint8)}
    ),
    "modular_kernel.quant.repacking.repack": lambda: _repack_call(repacking.repack),
    "modular_kernel.quant.repacking.unrepack": lambda: _repack_call(repacking.unrepack),
    # ------------------------------------------------------------------------------ adapters
    "modular_kernel.spec.lora.Adapter.share": lambda: Call(
        _share_adapter, {"adapter": make_adapter()}, receiver="adapter"
    ),
    "modular_kernel.spec.lora.slots_from_sequences": lambda: Call(
        slots_from_sequences,
        {"starts_S1": torch.tensor([0, 3, T]), "slots_S": torch.tensor([1, -1]), "tokens": T},
    ),
    "modular_kernel.layers.adapter_pool.AdapterPool.load": _pool_load_call,
    f"{_LAYERS}lora.LoRAManager.load": _manager_load_call,
    f"{_LAYERS}lora.MoELoRALayer.fold_scaling": lambda: Call(
        lora.MoELoRALayer.fold_scaling,
        {"self": lora.MoELoRALayer(make_adapter(), 0.5)},
        receiver="self",
    ),
    f"{_LAYERS}lora.ForwardBatch": lambda: Call(
        lora.ForwardBatch, {"lora_ids": ("mine", None), "seg_indptr": torch.tensor([0, 3, T])}
    ),
    f"{_LAYERS}lora.FusedMoEWithLoRA.forward": _forward_with_adapters,
    f"{_LAYERS}lora.LoRABackend.run_moe_lora": _lora_call_of_pool,
    "modular_kernel.ops.moe_lora.run_moe_lora": _lora_call_of_buffers,
    "modular_kernel.ops.moe_lora.MoELoRABatchInfo": lambda: Call(
        moe_lora.MoELoRABatchInfo, _lora_batch_arguments()
    ),
    "modular_kernel.ops.moe_lora.MoELoRABatchInfo.slots_of": lambda: Call(
        moe_lora.MoELoRABatchInfo.slots_of,
        {"self": _make_lora_batch_info(), "tokens": T},
        receiver="self",
    ),
    # -------------------------------------------------------------------------------- routers
    "modular_kernel.ops.route.route": lambda: _select_experts_call(route),
    "modular_kernel.ops.route.route (table)": _table_routing_call,
    f"{_LAYERS}router.select_experts": lambda: _select_experts_call(router.select_experts),
    f"{_LAYERS}router.Router.logits": lambda: _router_call("logits"),
    f"{_LAYERS}router.Router.route": lambda: _table_router_call("route"),
    f"{_LAYERS}router.Router.forward": lambda: _table_router_call("forward"),
    # --------------------------------------------------------------------------------- layers
    f"{_LAYERS}fused_moe.FusedMoE": lambda: Call(
        layer.FusedMoE,
        _layer_arguments()
        | {"router": RouterSpec(K, "sigmoid", selection_bias=True), "selection_bias": floats(E)},
        accepts=_META,
    ),
    f"{_LAYERS}ep_moe.EPMoE": lambda: Call(
        EPMoE,
        _layer_arguments()
        | {"top_k": K, "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
        | {"correction_bias": floats(E), "experts": "TorchExperts"},
        accepts=_META,
    ),
    f"{_LAYERS}fused_moe.FusedMoE.forward": lambda: Call(
        _make_layer(top_k=K).forward, {"hidden_states": floats(T, H), "routing": make_routing()}
    ),
    f"{_LAYERS}fused_moe.FusedMoE.forward (logits)": lambda: Call(
        _make_layer(router=RouterSpec(K)).forward,
        {"hidden_states": floats(1, T, H), "routing": floats(1, T, E)},
    ),
    f"{_LAYERS}parameters.ExpertParameters.set_weights": lambda: Call(
        _make_layer(top_k=K).set_weights, {"weights": make_weights()}, accepts=_META
    ),
    f"{_LAYERS}parameters.ExpertParameters.weight_loader": _layer_loader_call,
    f"{_LAYERS}weight_loading.ExpertLoader.weight_loader": _expert_loader_call,
    f"{_LAYERS}balance.count": lambda: Call(
        balance.count, {"topk_ids": integers(T, K, high=E), "experts": E}
    ),
    # ---------------------------------------------------------------------------- checkpoints
    "modular_kernel.checkpoints.gptq_awq.from_gptq": lambda: Call(
        checkpoints.from_gptq, _gptq_arguments()
    ),
    "modular_kernel.checkpoints.gptq_awq.from_awq": lambda: Call(
        checkpoints.from_awq, _awq_arguments()
    ),
    "modular_kernel.checkpoints.compressed_tensors.from_compressed_tensors": lambda: Call(
        checkpoints.from_compressed_tensors, _compressed_tensors_arguments()
    ),
    "modular_kernel.checkpoints.gptq_awq.drop_zero_points": lambda: Call(
        checkpoints.drop_zero_points, {"weights": _make_symmetric_weights()}
    ),
    "modular_kernel.checkpoints.gptq_awq.regroup": lambda: Call(
        checkpoints.regroup, {"weights": _make_group_weights(), "group": 16}
    ),
    "modular_kernel.checkpoints.gptq_awq.shard_columns": lambda: Call(
        checkpoints.shard_columns, {"weights": _make_group_weights(), "rank": 0, "world": 2}
    ),
    "modular_kernel.checkpoints.gptq_awq.shard_rows": lambda: Call(
        checkpoints.shard_rows, {"weights": _make_group_weights(), "rank": 0, "world": 2}
    ),
    "modular_kernel.checkpoints.fusing.merge": _merge_call,
    "modular_kernel.checkpoints.fp8_mxfp4.merge_scales": _merge_scales_call,
    "modular_kernel.checkpoints.fp8_mxfp4.channel_scale": lambda: Call(
        checkpoints.channel_scale, {"scale": floats(E, 8, 1).abs() + 0.1}
    ),
    "modular_kernel.checkpoints.fp8_mxfp4.static_scale": lambda: Call(
        checkpoints.static_scale, {"scales": floats(E).abs() + 0.1}
    ),
    "modular_kernel.checkpoints.fp8_mxfp4.from_gpt_oss": lambda: Call(
        checkpoints.from_gpt_oss,
        {
            "blocks": integers(E, 8, 2, 16, high=256, dtype=torch.uint8),
            "scales": integers(E, 8, 2, high=255, dtype=torch.uint8),
        },
    ),
    # --------------------------------------------------------------------------- integrations
    "modular_kernel.integrations.fused_moe.fused_experts": lambda: Call(
        fused_experts,
        _fused_arguments(),
        accepts={"meta": "an operator, which has a result on meta"},
    ),
    "modular_kernel.integrations.fused_moe.fused_moe": lambda: Call(
        fused_moe,
        {"hidden_states": floats(T, H), "w1": make_weights().w1, "w2": make_weights().w2}
        | {"gating_output": floats(T, E), "top_k": K},
    ),
    "modular_kernel.integrations.moe_runner.MoeRunner.run": _runner_call,
    "experts.compat.batched_gemm.batched_gemm": lambda: Call(
        batched_gemm.batched_gemm,
        {
            "a_eCK": floats(2, 4, 32),
            "b_eNK": floats(2, 16, 32),
            "counts_e": torch.tensor([2, 4], dtype=torch.int32),
            "out": floats(2, 4, 16),
        },
        written=("out",),
    ),
    "experts.compat.ep_moe.run_moe_ep_preproess": lambda: Call(
        ep_moe.run_moe_ep_preproess, {"topk_ids": integers(T, K, high=E), "num_experts": E}
    ),
    "experts.compat.ep_moe.pre_reorder": lambda: Call(
        ep_moe.pre_reorder,
        {"hidden_states": floats(T, H), "gateup_input": floats(T * K, H)}
        | _reorder_arguments()
        | {"a1_scales": floats(E).abs() + 0.1},
        written=("gateup_input",),
    ),
    "experts.compat.ep_moe.silu_and_mul": lambda: Call(
        ep_moe.silu_and_mul, _silu_arguments(), written=("down_input",)
    ),
    "experts.compat.ep_moe.post_reorder": lambda: Call(
        ep_moe.post_reorder,
        {"down_output": floats(T * K, H), "output": floats(T, H), "topk_weights": floats(T, K)}
        | _reorder_arguments(),
        written=("output",),
    ),
    "experts.compat.ep_moe.grouped_gemm_triton": lambda: Call(
        ep_moe.grouped_gemm_triton, _segment_arguments(), written=("c",)
    ),
    "experts.compat.fused_moe.moe_sum_reduce_triton": lambda: Call(
        compat_fused_moe.moe_sum_reduce_triton,
        {"input": floats(T, K, H), "output": floats(T, H), "routed_scaling_factor": 2.0},
        written=("output",),
    ),
    "experts.compat.fused_moe.invoke_fused_moe_kernel": lambda: Call(
        compat_fused_moe.invoke_fused_moe_kernel, _aligned_gemm_arguments(), written=("C",)
    ),
    "experts.compat.ep_scatter.ep_scatter": lambda: Call(
        ep_scatter.ep_scatter,
        _scatter_arguments(),
        written=("expert_start_loc", "output_tensor", "m_indices", "output_index"),
    ),
    "experts.compat.ep_scatter.ep_gather": lambda: Call(
        ep_scatter.ep_gather,
        {
            "input_tensor": floats(256, H),
            "recv_topk_ids": integers(T, K, high=2),
            "recv_topk_weight": floats(T, K),
            "input_index": integers(T, K, high=256),
            "output_tensor": floats(T, H),
        },
        written=("output_tensor",),
    ),
    # ------------------------------------------------------------------------------- reducers
    "topk_reduce.contiguous.TopKWeightAndReduceContiguous.apply": lambda: _reduce_call(
        TopKWeightAndReduceContiguous(), _make_dispatched_rows(), T, H
    ),
    "topk_reduce.naive_batched.TopKWeightAndReduceNaiveBatched.apply": lambda: _reduce_call(
        TopKWeightAndReduceNaiveBatched(), _make_expert_rows(E, C, H, pairs=_make_pairs()), T, H
    ),
    "topk_reduce.noop.TopKWeightAndReduceNoOp.apply": lambda: _reduce_call(
        TopKWeightAndReduceNoOp(), _make_expert_rows(T, H, weights=False), T, H
    ),
    "topk_reduce.keep_topk.KeepTopK.apply": lambda: _reduce_call(
        KeepTopK(weighted=True), _make_expert_rows(T, K, H), T, K, H
    ),
    "topk_reduce.keep_topk.KeepTopK.apply (batched)": lambda: _reduce_call(
        KeepTopK(weighted=True), _make_expert_rows(E, C, H, pairs=_make_pairs()), T, K, H
    ),
    "modular_kernel.ops.reduce.moe_sum_reduce": lambda: Call(
        reduce.moe_sum_reduce,
        {"rows_TKH": floats(T, K, H), "out_TH": floats(T, H)},
        written=("out_TH",),
    ),
    "modular_kernel.ops.align.moe_align_block_size": lambda: Call(
        align.moe_align_block_size,
        {
            "topk_ids_TK": integers(T, K, high=E),
            "block_size": 16,
            "num_experts": E,
            "expert_map": torch.arange(E, dtype=torch.int32),
        },
    ),
    "modular_kernel.ops.align.batched_moe_align_block_size": lambda: Call(
        align.batched_moe_align_block_size,
        {"counts_e": torch.tensor([1, 2], dtype=torch.int32), "capacity": 4, "block_size": 16},
    ),
}
