"""Valid calls of public callables without tensor arguments. Tests make one argument invalid."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from public_calls import Call
from public_recipes import ADAPTED, GROUP, PROBLEM, make_kernel
from small_layers import E, H, I, K

import modular_kernel as mk
from experts.compat.ep_moe import GroupedGemmRunner
from modular_kernel import checkpoints
from modular_kernel.checkpoints.formats import Format, fit_scheme, format_of
from modular_kernel.checkpoints.peft import load_adapter
from modular_kernel.integrations.fused_moe_method import (
    init_prepare_finalize,
    maybe_make_prepare_finalize,
    select_gemm_impl,
)
from modular_kernel.integrations.moe_runner import MoeRunner, MoeRunnerConfig
from modular_kernel.layers.adapter_pool import AdapterPool
from modular_kernel.layers.balance import moves, rank_loads, rebalance
from modular_kernel.layers.ep_moe import EPMoE
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.lora import LoRAManager
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.layers.rank_share import Share, destination
from modular_kernel.layers.router import Router
from modular_kernel.layers.weight_loading import ExpertLoader, make_expert_params_mapping
from modular_kernel.ops.moe_lora import should_use_fused_kernel
from modular_kernel.quant.quantized_weights import weight_specs
from modular_kernel.spec.lora import AdapterSpec
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import ActivationSpec, Machine, Parallel, Problem
from modular_kernel.spec.router import RouterSpec

CPU = Machine("cpu")
PART_NAMES = {"prepare_finalize": "MoEPrepareAndFinalizeNoEP", "experts": "TorchExperts"}
SIZES: dict[str, Any] = {"num_experts": E, "hidden_size": H, "intermediate_size": I}
LAYER_ARGUMENTS: dict[str, Any] = SIZES | {
    "layer_id": 3,
    "top_k": K,
    "quant_config": None,
    "params_dtype": torch.float32,
    "activation": "silu",
    "bias": False,
    "apply_router_weight_on_input": False,
    "routed_scaling_factor": 1.0,
    "router": None,
    "selection_bias": None,
    "shared_experts": None,
    "shared_partial": False,
    "parallel": LayerParallel(),
    "reduce_results": False,
    "prepare_finalize": None,
    "experts": None,
    "placement": Placement.linear(E, 1),
    "max_tokens": 4,
    "chunk_tokens": None,
    "device": "cpu",
    "prefix": "",
}
EP_MOE_ARGUMENTS: dict[str, Any] = SIZES | {
    "top_k": K,
    "params_dtype": torch.float32,
    "renormalize": True,
    "use_grouped_topk": True,
    "num_expert_group": 4,
    "topk_group": 2,
    "quant_config": None,
    "tp_size": 1,
    "tp_rank": 0,
    "prefix": "",
    "activation": "silu",
    "experts": "TorchExperts",
    "device": "cpu",
}
ROUTER_SPEC_FIELDS = {
    "top_k": 2,
    "score": "sigmoid",
    "order": "score_first",
    "groups": 4,
    "topk_groups": 2,
    "group_score": "top2",
    "selection_bias": False,
    "renormalize": True,
    "eps": 1e-20,
    "floor": 0.0,
    "table": False,
    "zero_experts": 0,
}
RUNNER_CONFIG_FIELDS = {
    name: getattr(MoeRunnerConfig(), name) for name in MoeRunnerConfig.__dataclass_fields__
}
PROBLEM_FIELDS = {name: getattr(PROBLEM, name) for name in Problem.__dataclass_fields__}
PLACEMENT = Placement.linear(4, 2)
FP8_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
INT4_FORMAT = format_of(
    {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
)

JUNK_RECIPES: Mapping[str, Callable[[], Call]] = {
    "check": lambda: Call(mk.check, PART_NAMES | {"problem": PROBLEM, "machine": CPU}),
    "check_all": lambda: Call(mk.check_all, {"problem": PROBLEM, "machine": CPU}),
    "make_kernel": lambda: Call(
        mk.make_kernel,
        PART_NAMES
        | {"problem": PROBLEM, "group": None, "machine": CPU, "checked": False, "poison": False},
    ),
    "compose": lambda: Call(mk.compose, {"problem": PROBLEM, "machine": CPU, "options": None}),
    "load_experts": lambda: Call(
        mk.load_experts,
        {"checkpoint": "nothing/here", "layer": 0, "ep": (0, 1), "tp": (0, 1), "dtype": None}
        | {"device": "cpu", "placement": "linear", "prefix": None, "config": None}
        | {"quantize_inputs": False},
    ),
    "load_adapter": lambda: Call(
        load_adapter,
        {
            "folder": "nothing/here",
            "layer": 0,
            "problem": ADAPTED,
            "ep": (0, 1),
            "ignored_modules": (),
        },
    ),
    "inspect": lambda: Call(import_inspect(), {"checkpoint": "nothing/here"}),
    "Problem": lambda: Call(Problem, PROBLEM_FIELDS),
    "Problem.with_tokens": lambda: Call(PROBLEM.with_tokens, {"tokens": 4}),
    "Machine": lambda: Call(
        Machine, {"device": "cuda", "arch": (9, 0), "packages": frozenset({"a"}), "name": "b"}
    ),
    "Parallel": lambda: Call(
        Parallel, {"world_size": 2, "placement": "linear", "rank": 0, "ranks_per_host": 1}
    ),
    "ActivationSpec": lambda: Call(
        ActivationSpec, {"kind": "silu", "alpha": None, "limit": None, "interleaved": False}
    ),
    "ActivationSpec.parse": lambda: Call(ActivationSpec.parse, {"text": "silu"}),
    "kernel.plan": lambda: Call(make_kernel().plan, {"problem": PROBLEM}),
    "kernel.workspace_specs": lambda: Call(make_kernel().workspace_specs, {"tokens": 3}),
    "weight_specs": lambda: Call(weight_specs, {"problem": PROBLEM}),
    "AdapterPool": lambda: Call(AdapterPool, {"problem": ADAPTED, "device": "cpu"}),
    "AdapterPool.evict": lambda: Call(_evict, {"name": "mine"}),
    "AdapterSpec": lambda: Call(
        AdapterSpec, {"adapters": 2, "rank": 4, "a13_shared": False, "outer_shared": False}
    ),
    "AdapterSpec.parse": lambda: Call(AdapterSpec.parse, {"text": "adapters=2,rank=4"}),
    "LoRAManager": lambda: Call(
        LoRAManager,
        {"problem": PROBLEM, "lora": "adapters=2,rank=4", "layers": (3,), "device": "cpu"}
        | {"mode": "merged"},
    ),
    "RouterSpec": lambda: Call(RouterSpec, ROUTER_SPEC_FIELDS),
    "RouterSpec.columns": lambda: Call(RouterSpec(2).columns, {"experts": 8}),
    "Router": lambda: Call(
        Router,
        {"spec": RouterSpec(2), "hidden_size": H, "num_experts": E, "bias": True}
        | {"vocabulary": None, "dtype": torch.float32, "device": "cpu"},
    ),
    "FusedMoE": lambda: Call(FusedMoE, LAYER_ARGUMENTS),
    "FusedMoE.load": lambda: Call(
        FusedMoE(**LAYER_ARGUMENTS).load, {"checkpoint": "nothing/here", "layer": 3}
    ),
    "FusedMoE.local_expert": lambda: Call(
        FusedMoE(**LAYER_ARGUMENTS).local_expert, {"expert_id": 1}
    ),
    "FusedMoE.warm_up": lambda: Call(_warm_up, {"tokens": 1}),
    "EPMoE": lambda: Call(EPMoE, EP_MOE_ARGUMENTS),
    "LayerParallel": lambda: Call(
        LayerParallel, {"ep": (0, 2), "tp": (0, 1), "ep_group": None, "tp_group": None}
    ),
    "Placement": lambda: Call(Placement, {"slots": ((0, 1), (2, 3))}),
    "Placement.linear": lambda: Call(Placement.linear, {"experts": 4, "world_size": 2}),
    "Placement.round_robin": lambda: Call(Placement.round_robin, {"experts": 4, "world_size": 2}),
    "Placement.of_table": lambda: Call(
        Placement.of_table, {"table": [(0, 0), (1, 0)], "world_size": 2}
    ),
    "Placement.with_copies": lambda: Call(PLACEMENT.with_copies, {"copies": {0: (1,)}}),
    "Placement.without": lambda: Call(
        PLACEMENT.with_copies({0: (1,), 1: (1,)}).without, {"ranks": [0]}
    ),
    "Placement.from_eplb": lambda: Call(
        Placement.from_eplb, {"physical_to_logical": [0, 1, 2, 3], "ranks": 2, "join": False}
    ),
    "Placement.expert_map": lambda: Call(PLACEMENT.expert_map, {"rank": 0, "device": "cpu"}),
    "Placement.tables": lambda: Call(PLACEMENT.tables, {"device": "cpu", "tiers": ()}),
    "rebalance": lambda: Call(
        rebalance,
        {"load": [3.0, 2.0, 1.0, 1.0], "slots": [2, 2], "old": PLACEMENT, "hosts": 1, "groups": 1},
    ),
    "moves": lambda: Call(moves, {"old": PLACEMENT, "new": Placement.round_robin(4, 2)}),
    "rank_loads": lambda: Call(
        rank_loads, {"load": [1.0] * 4, "placement": PLACEMENT, "ranks_per_host": 2}
    ),
    "format_of": lambda: Call(
        format_of, {"config": FP8_CONFIG, "path": "config.json", "depth": 256}
    ),
    "fit_scheme": lambda: Call(
        fit_scheme, {"format": INT4_FORMAT, "intermediate": 64, "world": 2, "gated": True}
    ),
    "Format.with_scheme": lambda: Call(INT4_FORMAT.with_scheme, {"scheme": INT4_FORMAT.scheme}),
    "Format": lambda: Call(
        Format, {"method": "none", "scheme": INT4_FORMAT.scheme, "minus_one": True}
    ),
    "fit_group": lambda: Call(checkpoints.fit_group, {"group": 128, "columns": 64}),
    "Share": lambda: Call(
        Share,
        {"experts": E, "hidden": H, "intermediate": I, "ep": (0, 1), "tp": (0, 1)}
        | {"placement": "linear", "gated": True, "interleaved": False},
    ),
    "destination": lambda: Call(destination, {"expert": 0, "shard": "w1", "share": Share(E, H, I)}),
    "ExpertLoader": lambda: Call(
        ExpertLoader,
        {"share": Share(E, H, I), "format": None, "bias": False, "transposed": False},
    ),
    "ExpertLoader.create_weights": lambda: Call(
        ExpertLoader(Share(E, H, I)).create_weights,
        {"layer": torch.nn.Module(), "dtype": torch.float32, "device": "cpu"}
        | {"weight_loader": None},
    ),
    "ExpertLoader.expert_weights": lambda: Call(
        ExpertLoader(Share(E, H, I)).expert_weights, {"layer": torch.nn.Module()}
    ),
    "make_expert_params_mapping": lambda: Call(
        make_expert_params_mapping,
        {"ckpt_gate_proj_name": "w1", "ckpt_down_proj_name": "w2", "ckpt_up_proj_name": "w3"}
        | {"num_experts": 2},
    ),
    "MoeRunnerConfig": lambda: Call(MoeRunnerConfig, RUNNER_CONFIG_FIELDS),
    "MoeRunner": lambda: Call(
        MoeRunner,
        {"runner_backend": "torch", "config": MoeRunnerConfig(), "fused": True, "padding": False}
        | {"fast_act": False, "aiter": False, "quant": None, "dtype": torch.float32},
    ),
    "maybe_make_prepare_finalize": lambda: Call(
        maybe_make_prepare_finalize,
        {"problem": PROBLEM, "all2all_backend": None, "group": None},
    ),
    "select_gemm_impl": lambda: Call(
        select_gemm_impl, {"problem": PROBLEM, "prepare_finalize": None, "machine": CPU}
    ),
    "init_prepare_finalize": lambda: Call(
        init_prepare_finalize, {"problem": PROBLEM, "all2all_backend": None, "machine": CPU}
    ),
    "should_use_fused_kernel": lambda: Call(
        should_use_fused_kernel, {"hidden_shape": (4, 64), "topk_shape": (4, 2), "max_rank": 16}
    ),
    "GroupedGemmRunner": lambda: Call(
        GroupedGemmRunner, {"device": "cpu", "use_flashinfer": False}
    ),
}


def import_inspect() -> Callable[..., object]:
    """Return `checkpoints.inspection.inspect`, whose name clashes with the standard library's."""
    from modular_kernel.checkpoints.inspection import inspect

    return inspect


def _evict(name: str) -> None:
    AdapterPool(ADAPTED).evict(name)


def _warm_up(tokens: int) -> None:
    FusedMoE(**LAYER_ARGUMENTS).warm_up(tokens)
