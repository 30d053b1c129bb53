"""Public functions raise a typed error for a wrong value of one argument, or accept the value."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from public_calls import Call, leaves
from public_recipes import RECIPES
from public_recipes_without_tensors import JUNK_RECIPES

from modular_kernel.errors import ModularKernelError

ALL_RECIPES: dict[str, Callable[[], Call]] = {**JUNK_RECIPES, **RECIPES}
JUNK: dict[str, Callable[[], object]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "2**70": lambda: 2**70,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "1e300": lambda: 1e300,
    "text": lambda: "evil",
    "empty text": lambda: "",
    "bytes": lambda: b"evil",
    "list": lambda: [1],
    "empty list": list,
    "list of texts": lambda: ["a", "b"],
    "tuple": lambda: (1, 2),
    "tuple of Nones": lambda: (None, None),
    "dict": lambda: {"a": 1},
    "set": lambda: {1},
    "object": object,
    "class": lambda: int,
    "function": lambda: len,
    "dtype": lambda: torch.float64,
    "device": lambda: torch.device("cpu"),
    "module": lambda: torch,
    "nn.Module": torch.nn.Identity,
    "no dimensions": lambda: torch.tensor(1.0),
    "no values": lambda: torch.empty(0),
    "bools": lambda: torch.zeros(2, 2, dtype=torch.bool),
    "complex": lambda: torch.zeros(2, 2, dtype=torch.complex64),
    "doubles": lambda: torch.zeros(2, 3, 4, dtype=torch.float64),
    "integers": lambda: torch.zeros(2, 3, dtype=torch.int64),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.zeros(2, 2, device="meta"),
    "five dimensions": lambda: torch.zeros(1, 1, 1, 1, 1),
}


@cache
def list_paths(name: str) -> tuple[str, ...]:
    """Return the paths of a call's arguments, and of the values that its arguments contain."""
    call = ALL_RECIPES[name]()
    leaf_paths = [path for path, _ in leaves(call.arguments)]
    paths = dict.fromkeys([*call.arguments, *leaf_paths])
    return tuple(path for path in paths if path != call.receiver)


def call_with_junk(name: str, place: int | str, junk: str) -> None:
    """Make a call with a wrong value of one argument, and ignore typed errors.

    place: the path of the argument, or the index of the path.
    """
    call, paths = ALL_RECIPES[name](), list_paths(name)
    path = paths[place % len(paths)] if isinstance(place, int) else place
    try:
        with torch.no_grad():
            call(path, JUNK[junk]())
    except ModularKernelError:
        pass


# Recipes whose valid calls raise a typed error, because their files or adapters do not exist.
RECIPES_THAT_RAISE = {
    "load_experts",
    "load_adapter",
    "inspect",
    "FusedMoE.load",
    "AdapterPool.evict",
    "ExpertLoader.expert_weights",
}


@pytest.mark.parametrize("name", JUNK_RECIPES)
def test_the_unchanged_call_succeeds(name: str) -> None:
    expected = pytest.raises(ModularKernelError) if name in RECIPES_THAT_RAISE else nullcontext()
    with expected:
        JUNK_RECIPES[name]()()


# Calls that once raised an untyped error: (callable, path of the argument, wrong value).
SEEDS = (
    ("FusedMoE", "placement", "text"),
    ("FusedMoE", "prepare_finalize", "bools"),
    ("FusedMoE", "max_tokens", "bools"),
    ("FusedMoE", "params_dtype", "bools"),
    ("EPMoE", "use_grouped_topk", "bools"),
    ("EPMoE", "tp_rank", "no values"),
    ("LayerParallel", "ep_group", "text"),
    ("Router", "device", "text"),
    ("Router", "device", "2**70"),
    ("RouterSpec.columns", "experts", "text"),
    ("kernel.workspace_specs", "tokens", "-1"),
    ("weight_specs", "problem", "text"),
    ("load_experts", "device", "meta"),
    ("inspect", "checkpoint", "None"),
    ("fit_scheme", "format", "None"),
    ("format_of", "depth", "text"),
    ("destination", "share", "None"),
    ("LoRAManager", "layers", "no dimensions"),
    ("select_gemm_impl", "prepare_finalize", "bools"),
    ("should_use_fused_kernel", "hidden_shape", "None"),
    ("ExpertLoader.create_weights", "layer", "None"),
    ("ExpertLoader.create_weights", "dtype", "0"),
    ("GroupedGemmRunner", "device", "None"),
    ("modular_kernel.ops.route.route", "tensors", "0"),
    ("modular_kernel.ops.route.route", "logits_TE", "meta"),
    ("modular_kernel.quant.quantized_weights.quantize_weights", "weights", "None"),
    ("modular_kernel.quant.quantized_weights.quantize_weights", "weights.w1", "None"),
    ("modular_kernel.quant.scale_tiles.e8m0_to_float", "scale", "text"),
    ("modular_kernel.tensors.Routing.of", "tokens", "bools"),
    ("modular_kernel.tensors.Routing.of", "routing.topk_ids_TK", "no values"),
    ("modular_kernel.spec.lora.slots_from_sequences", "tokens", "2**70"),
    ("modular_kernel.layers.lora.MoELoRALayer.fold_scaling", "self.scaling", "2**70"),
    ("modular_kernel.select.composed_kernel.ComposedPlan.warm_up", "tokens", "0"),
    ("modular_kernel.integrations.moe_runner.MoeRunner.run", "dispatch_output.hidden_states",
     "no dimensions"),
    ("modular_kernel.checkpoints.fusing.merge", "projections", "empty list"),
    ("modular_kernel.checkpoints.fusing.merge", "projections[0][weight]", "five dimensions"),
    ("modular_kernel.checkpoints.gptq_awq.drop_zero_points", "weights.bits", "None"),
    ("modular_kernel.checkpoints.gptq_awq.regroup", "weights.group", "0"),
    ("modular_kernel.checkpoints.gptq_awq.shard_rows", "weights.w", "no values"),
    ("experts.compat.ep_moe.grouped_gemm_triton", "weight_column_major", "bools"),
    ("topk_reduce.contiguous.TopKWeightAndReduceContiguous.apply", "rows.num_local", "None"),
    ("topk_reduce.contiguous.TopKWeightAndReduceContiguous.apply", "rows.checked", "bools"),
)  # fmt: skip


def add_seed_examples(test: Callable[..., None]) -> Callable[..., None]:
    for name, path, junk in SEEDS:
        test = example(name=name, place=path, junk=junk)(test)
    return test


@settings(
    max_examples=1200,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@add_seed_examples
@given(
    name=st.sampled_from(sorted(ALL_RECIPES)),
    place=st.integers(0, 40),
    junk=st.sampled_from(sorted(JUNK)),
)
def test_wrong_values_raise_typed_errors(name: str, place: int | str, junk: str) -> None:
    call_with_junk(name, place, junk)
