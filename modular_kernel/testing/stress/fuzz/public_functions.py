"""Fuzz target: call public functions with junk for arguments or for tensors inside arguments.

`_CALLS` has a valid call of each function. The functions may only raise errors of this package.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.catalog import check, check_all, make_kernel
from modular_kernel.spec.lora import AdapterSpec, slots_from_sequences
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import ActivationSpec, Machine, Parallel
from modular_kernel.testing.stress.fuzz import samples
from modular_kernel.testing.stress.fuzz.junk import junk, shorten
from modular_kernel.testing.stress.fuzz.outcome import CORRECT, FuzzOutcome, run_or_classify
from modular_kernel.testing.stress.fuzz.samples import PROBLEM, E, H, I, K, T, draw_floats
from modular_kernel.testing.stress.fuzz.target import Target, biased_bool, import_object

Call = tuple[Callable[..., Any], dict[str, Any]]  # a function and its keyword arguments


def _make_call_factory(path: str, /, **arguments: Any) -> Callable[[], Call]:
    """Return a factory of calls of the function or class at `path`, "module:name".

    arguments: keyword arguments of the call. A lambda is replaced by its result in each call.
    """
    return lambda: (import_object(path), {name: _resolve(v) for name, v in arguments.items()})


def _resolve(value: Any) -> Any:
    """Return the value or, if it is a lambda (without parameters), its result."""
    return value() if callable(value) and getattr(value, "__name__", "") == "<lambda>" else value


def _make_weights() -> Any:
    return samples.make_call_inputs().weights


def _make_quantized_call() -> Call:
    problem = replace(PROBLEM, quant="int8_w8a16_group:group=8")
    module = "modular_kernel.quant.quantized_weights"
    return import_object(f"{module}:quantize_weights"), {
        "weights": _make_weights(),
        "problem": problem,
    }


def _make_kernel_call_factory(name: str, *, plan: bool = False) -> Callable[[], Call]:
    """Return a factory of calls of a method of a kernel, or of its plan."""

    def make_call() -> Call:
        inputs, kernel = samples.make_call_inputs(), samples.make_torch_kernel()
        arguments = {"x_TH": inputs.x_TH, "weights": inputs.weights, "routing": inputs.routing}
        if name == "prepare_weights":
            arguments = {"weights": inputs.weights}
        elif name in ("start", "__call__"):
            arguments["out"] = torch.empty(T, H)
        return getattr(kernel.plan() if plan else kernel, name), arguments

    return make_call


def _make_method_call_factory(
    make: Callable[[], Any], method: str, /, **arguments: Any
) -> Callable[[], Call]:
    """Return a factory of calls of a method of the object that `make` returns."""
    return lambda: (getattr(make(), method), {n: _resolve(v) for n, v in arguments.items()})


def _make_pool() -> Any:
    problem = replace(PROBLEM, lora=samples.LORA_OPTIONS)
    return import_object("modular_kernel.layers.adapter_pool:AdapterPool")(problem)


def _make_manager() -> Any:
    return import_object("modular_kernel.layers.lora:LoRAManager")(
        PROBLEM, samples.LORA_OPTIONS, [3]
    )


def _make_lora_layers() -> Any:
    layer = import_object("modular_kernel.layers.lora:MoELoRALayer")
    return {3: layer(samples.make_adapter(2, 0), 0.5)}


def _make_router() -> Any:
    make = import_object("modular_kernel.layers.router:Router")
    router = make(samples.make_router_spec(), H, E)
    router.weight.data.copy_(draw_floats(E, H))
    return router


_LAYER: dict[str, Any] = {
    "num_experts": E, "hidden_size": H, "intermediate_size": I, "layer_id": 3, "top_k": K,
    "quant_config": None, "params_dtype": torch.float32, "activation": "silu", "bias": False,
    "apply_router_weight_on_input": False, "routed_scaling_factor": 1.0, "router": None,
    "selection_bias": None, "shared_experts": None, "shared_partial": False, "parallel": None,
    "reduce_results": False, "prepare_finalize": None, "experts": None, "placement": None,
    "max_tokens": 4, "chunk_tokens": None, "device": "cpu", "prefix": "",
}  # fmt: skip
_TABLE = ((0, 0), (0, 1), (1, 0), (1, 1))
_CALLS: dict[str, Callable[[], Call]] = {
    "check": lambda: (
        check,
        {
            "prepare_finalize": samples.STANDARD_PAIR[0],
            "experts": samples.STANDARD_PAIR[1],
            "problem": PROBLEM,
            "machine": Machine("cpu"),
        },
    ),
    "check_all": lambda: (check_all, {"problem": PROBLEM, "machine": Machine("cpu")}),
    "make_kernel": lambda: (
        make_kernel,
        {
            "prepare_finalize": samples.STANDARD_PAIR[0],
            "experts": samples.STANDARD_PAIR[1],
            "problem": PROBLEM,
            "group": None,
            "machine": Machine("cpu"),
            "checked": False,
            "poison": False,
        },
    ),
    "kernel": _make_kernel_call_factory("__call__"),
    "kernel.start": _make_kernel_call_factory("start"),
    "kernel.prepare_weights": _make_kernel_call_factory("prepare_weights"),
    "kernel.workspace_specs": _make_method_call_factory(
        samples.make_torch_kernel, "workspace_specs", tokens=3
    ),
    "kernel.reserve_workspace": _make_method_call_factory(
        samples.make_torch_kernel, "reserve_workspace", tokens=3, device=torch.device("cpu")
    ),
    "kernel.plan": _make_method_call_factory(samples.make_torch_kernel, "plan", problem=PROBLEM),
    "kernel.count_invalid_ids_on": _make_method_call_factory(
        samples.make_torch_kernel, "count_invalid_ids_on", device=torch.device("cpu")
    ),
    "plan": _make_kernel_call_factory("__call__", plan=True),
    "Problem": lambda: (type(PROBLEM), {f.name: getattr(PROBLEM, f.name) for f in fields(PROBLEM)}),
    "Problem.with_tokens": lambda: (PROBLEM.with_tokens, {"tokens": 3}),
    "ActivationSpec": lambda: (
        ActivationSpec,
        {"kind": "swiglu_oai", "alpha": 1.7, "limit": 7.0, "interleaved": False, "up_first": False},
    ),
    "Parallel": lambda: (
        Parallel,
        {"world_size": 2, "placement": Placement.linear(4, 2), "rank": 0, "ranks_per_host": 2},
    ),
    "Parallel.place": lambda: (Parallel(2).place, {"experts": 4}),
    "Machine": lambda: (
        Machine,
        {"device": "cpu", "arch": None, "packages": frozenset(), "interpreter": False, "name": ""},
    ),
    "AdapterSpec": lambda: (
        AdapterSpec,
        {"adapters": 2, "rank": 4, "a13_shared": False, "outer_shared": False},
    ),
    "AdapterSpec.parse": lambda: (AdapterSpec.parse, {"text": "adapters=2,rank=4"}),
    "slots_from_sequences": lambda: (
        slots_from_sequences,
        {
            "starts_S1": torch.tensor([0, 2, T]),
            "slots_S": torch.tensor([0, -1], dtype=torch.int32),
            "tokens": T,
        },
    ),
    "Placement": lambda: (Placement, {"slots": ((0, 1), (2, 3))}),
    "Placement.linear": lambda: (Placement.linear, {"experts": 4, "world_size": 2}),
    "Placement.of_table": lambda: (Placement.of_table, {"table": _TABLE, "world_size": 2}),
    "Placement.expert_map": lambda: (
        Placement.linear(4, 2).expert_map,
        {"rank": 0, "device": "cpu"},
    ),
    "quantize_weights": _make_quantized_call,
    "weight_specs": _make_call_factory(
        "modular_kernel.quant.quantized_weights:weight_specs",
        problem=replace(PROBLEM, quant="int8_w8a8_channel"),
    ),
    "e8m0_to_float": _make_call_factory(
        "modular_kernel.quant.scale_tiles:e8m0_to_float",
        scale=lambda: torch.full((2, 3), 127, dtype=torch.uint8),
    ),
    "route": _make_call_factory(
        "modular_kernel.ops.route:route",
        logits_TE=lambda: draw_floats(T, E),
        spec=samples.make_router_spec(),
        tensors=None,
        token_ids_T=None,
        ids_dtype=torch.int32,
    ),
    "RouterSpec": _make_call_factory(
        "modular_kernel.spec.router:RouterSpec",
        top_k=2,
        score="sigmoid",
        order="score_first",
        groups=4,
        topk_groups=2,
        group_score="top2",
        selection_bias=False,
        renormalize=True,
        eps=1e-20,
        floor=0.0,
        table=False,
        zero_experts=0,
    ),
    "RouterSpec.columns": _make_method_call_factory(samples.make_router_spec, "columns", experts=8),
    "Router": _make_call_factory(
        "modular_kernel.layers.router:Router",
        spec=samples.make_router_spec(),
        hidden_size=H,
        num_experts=E,
        bias=True,
        vocabulary=None,
        dtype=torch.float32,
        device="cpu",
    ),
    "Router.forward": _make_method_call_factory(
        _make_router, "forward", x_TH=lambda: draw_floats(T, H)
    ),
    "FusedMoE": _make_call_factory("modular_kernel.layers.fused_moe:FusedMoE", **_LAYER),
    "FusedMoE.forward": _make_method_call_factory(
        samples.make_loaded_layer,
        "forward",
        hidden_states=lambda: draw_floats(T, H),
        routing=lambda: samples.make_call_inputs().routing,
        token_ids=None,
    ),
    "FusedMoE.set_weights": _make_method_call_factory(
        samples.make_fused_moe, "set_weights", weights=lambda: _make_weights()
    ),
    "FusedMoE.local_expert": _make_method_call_factory(
        samples.make_fused_moe, "local_expert", expert_id=1
    ),
    "FusedMoE.load": _make_method_call_factory(
        samples.make_fused_moe, "load", checkpoint="/dev/null/none", layer=3
    ),
    "FusedMoE.from_config": _make_call_factory(
        "modular_kernel.layers.fused_moe:FusedMoE.from_config", checkpoint="/dev/null/none", layer=0
    ),
    "LayerParallel": _make_call_factory(
        "modular_kernel.layers.parallel:LayerParallel",
        ep=(0, 2),
        tp=(0, 1),
        ep_group=None,
        tp_group=None,
    ),
    "load_experts": _make_call_factory(
        "modular_kernel.checkpoints.loading:load_experts",
        checkpoint="/dev/null/none",
        layer=0,
        ep=(0, 1),
        tp=(0, 1),
        dtype=None,
        device="cpu",
        placement="linear",
        prefix=None,
        config=None,
        quantize_inputs=False,
    ),
    "AdapterPool": _make_call_factory(
        "modular_kernel.layers.adapter_pool:AdapterPool",
        problem=replace(PROBLEM, lora=samples.LORA_OPTIONS),
        device="cpu",
    ),
    "AdapterPool.load": _make_method_call_factory(
        _make_pool, "load", name="mine", adapter=lambda: samples.make_adapter(2, 0)
    ),
    "AdapterPool.evict": _make_method_call_factory(_make_pool, "evict", name="mine"),
    "AdapterPool.weights": _make_method_call_factory(
        _make_pool, "weights", base=lambda: _make_weights()
    ),
    "LoRAManager": _make_call_factory(
        "modular_kernel.layers.lora:LoRAManager",
        problem=PROBLEM,
        lora=samples.LORA_OPTIONS,
        layers=(3,),
        device="cpu",
        mode="merged",
    ),
    "LoRAManager.load": _make_method_call_factory(
        _make_manager, "load", name="mine", layers=lambda: _make_lora_layers()
    ),
    "ForwardBatch": _make_call_factory(
        "modular_kernel.layers.lora:ForwardBatch",
        lora_ids=("mine", None),
        seg_indptr=lambda: torch.tensor([0, 3, T]),
    ),
    "rebalance": _make_call_factory(
        "modular_kernel.layers.balance:rebalance",
        load=[3.0, 2.0, 1.0, 1.0],
        slots=[2, 2],
        old=Placement.linear(4, 2),
        hosts=1,
        groups=1,
    ),
    "MoeRunnerConfig": _make_call_factory(
        "modular_kernel.integrations.fused_moe:MoeRunnerConfig",
        activation="silu",
        inplace=False,
        no_combine=False,
    ),
    "Share": _make_call_factory(
        "modular_kernel.layers.rank_share:Share",
        experts=E,
        hidden=H,
        intermediate=I,
        ep=(0, 1),
        tp=(0, 1),
        placement="linear",
        gated=True,
        interleaved=False,
    ),
    "moe_align_block_size": _make_call_factory(
        "modular_kernel.ops.align:moe_align_block_size",
        topk_ids_TK=lambda: samples.make_call_inputs().routing.topk_ids_TK,
        block_size=16,
        num_experts=E,
    ),
}


def _alter(tensor: torch.Tensor, kind: str) -> Any:
    if not tensor.untyped_storage().nbytes():
        return tensor  # it is empty, or was freed by an earlier change
    if kind == "freed":
        tensor = tensor.clone()
        tensor.untyped_storage().resize_(0)
        return tensor
    alterations: dict[str, Callable[[], Any]] = {
        "meta": lambda: tensor.to("meta"),
        "0-d": lambda: tensor.new_zeros(()),
        "empty": lambda: tensor[:0],
        "longer": lambda: torch.cat([tensor, tensor]),
        "unsqueezed": lambda: tensor[None],
        "complex": lambda: tensor.to(torch.complex64),
        "bool": lambda: tensor.bool(),
        "float64": lambda: tensor.double(),
        "sparse": lambda: tensor.to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
        "list": tensor.tolist,
        "numpy": tensor.numpy,
        "grad": lambda: tensor.float().requires_grad_(),
        "mkldnn": lambda: tensor.float().to_mkldnn(),
        "nested": lambda: torch.nested.nested_tensor([tensor, tensor]),
    }
    return alterations[kind]()


_ALTERATIONS = (
    "freed", "meta", "0-d", "empty", "longer", "unsqueezed", "complex", "bool", "float64",
    "sparse", "quantized", "list", "numpy", "grad", "mkldnn", "nested",
)  # fmt: skip


@dataclass(frozen=True)
class JunkCall:
    """A call of a public function.

    name: a key of _CALLS.
    changes: (index, new value) for each change. The index selects an argument or a tensor in an
        argument. The value is junk or one of _ALTERATIONS.
    """

    name: str
    changes: list[tuple[int, Any]]


def check_public_function(case: JunkCall) -> FuzzOutcome:
    """Call a public function with junk in one or two arguments. Only typed errors are allowed."""
    function, arguments = _CALLS[case.name]()
    description = case.name
    for index, value in case.changes:
        leaves = _find_leaves(arguments)
        path, old = leaves[index % len(leaves)]
        new = value
        if isinstance(value, str) and value in _ALTERATIONS:
            if not isinstance(old, torch.Tensor):
                continue
            try:
                new = _alter(old, value)
            except (RuntimeError, NotImplementedError, TypeError):
                continue
            description += f", {'.'.join(path)} {value}"
        else:
            description += f", {'.'.join(path)}={shorten(value)}"
        arguments = _replace_leaf(arguments, path, new)
    if case.name in _ALLOCATES_BY_COUNT and any(map(_is_huge, arguments.values())):
        return FuzzOutcome(CORRECT, description)  # valid, but not called: it might use all memory
    result = run_or_classify(description, lambda: function(**arguments))
    return result if isinstance(result, FuzzOutcome) else FuzzOutcome(CORRECT, description)


_ALLOCATES_BY_COUNT = ("moe_align_block_size", "Router")


def _is_huge(count: Any) -> bool:
    return isinstance(count, int) and count > 2**20


def _find_leaves(arguments: dict[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Return the path and value of every argument, and of every tensor in a dataclass."""
    leaves: list[tuple[tuple[str, ...], Any]] = []
    for name, value in arguments.items():
        leaves.append(((name,), value))
        if is_dataclass(value) and not isinstance(value, type):
            leaves += [
                ((name, field.name), getattr(value, field.name))
                for field in fields(value)
                if isinstance(getattr(value, field.name), torch.Tensor)
            ]
    return leaves


def _replace_leaf(arguments: dict[str, Any], path: tuple[str, ...], new: Any) -> dict[str, Any]:
    name, *inner = path
    if not inner:
        return arguments | {name: new}
    return arguments | {name: replace(arguments[name], **{inner[0]: new})}


@st.composite
def _junk_calls(draw: st.DrawFn) -> JunkCall:
    value = st.sampled_from(_ALTERATIONS) if draw(biased_bool(percent_true=50)) else junk
    count = 2 if draw(biased_bool(percent_true=20)) else 1
    changes = [(draw(st.integers(0, 119)), draw(value)) for _ in range(count)]
    return JunkCall(draw(st.sampled_from(sorted(_CALLS))), changes)


TARGETS: tuple[Target[Any], ...] = (
    Target("public_functions", 8, _junk_calls(), check_public_function),
)
