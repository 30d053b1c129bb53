"""Layers with combinations of features, their outputs, and rules that state which are refused.

A row has a value for each of `AXES`. `outputs_of` runs the layer of a row on every rank, and
`expected_output` computes its exact output from the dequantized weights of all ranks. `REFUSALS`
has the rules for refused rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from covering_rows import Refusal, Values, draw, one_of

from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.layers.ep_moe import EPMoE
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.layers.router import Router
from modular_kernel.ops.route import Routed, RouterTensors, route
from modular_kernel.quant.quantized_weights import dequantize_weights, quantize_weights
from modular_kernel.reference import float64_reference
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import ActivationSpec, Problem
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.covering import Axis

H, I, E, T, VOCABULARY = 64, 64, 8, 7, 11  # noqa: E741 (intermediate)
LOCAL_BATCHED, REPLICATED = "BatchedPrepareAndFinalize", "ReplicatedEPPrepareAndFinalize"
GATHERED, ALL2ALL = "AllGatherReduceScatterPrepareAndFinalize", "TorchAll2AllPrepareAndFinalize"
ALL2ALL_BATCHED = "TorchAll2AllBatchedPrepareAndFinalize"
EXCHANGES = (REPLICATED, GATHERED, ALL2ALL, ALL2ALL_BATCHED)
BATCHED = (LOCAL_BATCHED, ALL2ALL_BATCHED)
STATIC = "fp8_w8a8_tensor:static=true"
W8A8 = ("fp8_w8a8_channel", "fp8_w8a8_tensor", STATIC)


@dataclass(frozen=True)
class Place:
    """How a layer is distributed over ranks.

    All fields form one axis, so that every `Place` is combined with every value of the other axes.
    exchange: "none" (each rank has all tokens), "replicated" or "rows". split: numbers of EP and TP
    ranks. groups: the process groups of LayerParallel, "none", "each" (EP and TP), or "each and
    both" (EP, TP and the group of all ranks). reduce: whether the layer sums over ranks.
    """

    exchange: str
    split: tuple[int, int]
    groups: str
    reduce: bool

    def __str__(self) -> str:
        ep, tp = self.split
        return f"{self.exchange} ep{ep} tp{tp} {self.groups}{' reduce' * self.reduce}"


def _list_places() -> Iterator[Place]:
    """Yield every valid place. An exchange needs several EP ranks and process groups."""
    for exchange, reduce in product(("none", "replicated", "rows"), (False, True)):
        for split in ((1, 1), (2, 1), (1, 2), (2, 2)):
            if exchange != "none" and split[0] == 1:
                continue
            groups = ["none"] if exchange == "none" else []
            groups += ["each"] if split != (1, 1) else []
            groups += ["each and both"] if split == (2, 2) else []
            yield from (Place(exchange, split, group_kinds, reduce) for group_kinds in groups)


AXES = (
    Axis("layer", ("FusedMoE", "EPMoE")),
    Axis("place", tuple(_list_places())),
    Axis("batched", (False, True)),
    Axis("gathered", (False, True)),
    Axis("router", ("routing", "spec", "biased", "zero experts", "module", "table")),
    Axis("shared", ("none", "whole", "partial")),
    Axis("scaling", (1.0, 1.5)),
    Axis("bias", (False, True)),
    Axis("activation", ("silu", "relu2", "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true")),
    Axis("on input", (False, True)),
    Axis("top-k", (3, 1)),
    Axis("quant", ("none", "fp8_w8a16_channel", "int4_w4a16_group:group=32,zero_points=true",
                   "mxfp4_w4a16", "nvfp4_w4a16", *W8A8)),
    Axis("dtype", ("float32", "bfloat16")),
    Axis("chunk", (None, 3)),
    Axis("placement", ("linear", "round_robin", "copies")),
    Axis("experts", ("torch", "triton"), varies_cost=True),
    Axis("shape", ("(T, H)", "(1, T, H)")),
    Axis("prepared", (False, True)),
)  # fmt: skip


def part_of(row: Values) -> str | None:
    """Return the PrepareAndFinalize of a row."""
    if row["place"].exchange == "none":
        return LOCAL_BATCHED if row["batched"] else None
    if row["place"].exchange == "replicated":
        return REPLICATED
    return ALL2ALL_BATCHED if row["batched"] else GATHERED if row["gathered"] else ALL2ALL


def list_conflicts(row: Values) -> list[str]:
    """Return the reasons why no layer has this combination."""
    reasons, place = [], row["place"]
    if row["gathered"] and (place.exchange != "rows" or row["batched"]):
        reasons.append("this place does not use the all-gather part")
    if row["batched"] and place.exchange == "replicated":
        reasons.append("replicated tokens are not batched")
    if place.split[0] == 1 and row["placement"] != "linear":
        reasons.append("one rank has all experts")
    if row["layer"] == "EPMoE":
        # EPMoE has no arguments for other values of these axes.
        supported_values: dict[str, tuple[Any, ...]] = {
            "router": ("spec", "biased"),
            "shared": ("none",),
        }
        supported_values |= {
            "scaling": (1.0,),
            "bias": (False,),
            "on input": (False,),
            "chunk": (None,),
        }
        supported_values |= {"placement": ("linear",), "batched": (False,)}
        reasons += [
            f"EPMoE has no {name}"
            for name in supported_values
            if row[name] not in supported_values[name]
        ]
        if place.exchange != "none" or place.reduce or place.split[1] > 1:
            reasons.append("EPMoE has no exchange, sum or TP")
    return reasons


def _has_split(*splits: tuple[int, int]) -> Any:
    return lambda row: row["place"].split in splits


_ON_INPUT = one_of("on input", True)
REFUSALS = (
    Refusal(
        "a sum over ranks without their group",
        ConfigurationError,
        r"reduce_results: got (tp|ep) of 2 ranks",
        (
            lambda row: row["place"].reduce,
            lambda row: row["place"].groups == "none",
            _has_split((2, 1), (1, 2), (2, 2)),
        ),
    ),
    Refusal(
        "copies of experts without an exchange",
        ConfigurationError,
        "placement: got copies",
        (one_of("placement", "copies"), lambda row: row["place"].exchange == "none"),
    ),
    Refusal(
        "several weights for one row of input",
        IncompatibleError,
        "router_weight_on_input",
        (_ON_INPUT, lambda row: part_of(row) == LOCAL_BATCHED, one_of("top-k", 3)),
    ),
    Refusal(
        "weights on the input of batched rows of other ranks",
        IncompatibleError,
        "router_weight_on_input",
        (_ON_INPUT, lambda row: part_of(row) == ALL2ALL_BATCHED),
    ),
    Refusal(
        "chunks of batched rows",
        IncompatibleError,
        "chunk",
        (one_of("chunk", 3), lambda row: part_of(row) in BATCHED),
    ),
    Refusal(
        "a scheme that GroupedGemmExperts does not have",
        IncompatibleError,
        "quant",
        (
            one_of("layer", "EPMoE"),
            one_of("experts", "triton"),
            one_of("quant", "fp8_w8a16_channel", "int4_w4a16_group:group=32,zero_points=true",
                   "mxfp4_w4a16", "nvfp4_w4a16"),
        ),
    ),
)  # fmt: skip
# Rows with interpreted kernels take longer.
DRAWN = draw(AXES, REFUSALS, list_conflicts, lambda row: 4.0 if row["experts"] == "triton" else 1.0)


# ------------------------------------------------------------------------------------- inputs


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem_of(row: Values) -> Problem:
    """Return the problem of the layer before it is divided among ranks."""
    return Problem(
        T, H, I, E, row["top-k"],
        dtype=row["dtype"],
        quant=row["quant"],
        activation=row["activation"],
        bias=row["bias"],
        apply_router_weight_on_input=row["on input"],
        routed_scaling_factor=row["scaling"],
    )  # fmt: skip


def spec_of(row: Values) -> RouterSpec:
    """Return the spec of the router of a row."""
    # With top-k 1, renormalized weights would all be 1.
    top_k, renormalize = row["top-k"], row["top-k"] > 1
    if row["layer"] == "EPMoE":
        renormalize = True
    if row["router"] == "biased":
        groups = {"groups": 4, "topk_groups": 2, "selection_bias": True}
        return RouterSpec(top_k, "sigmoid", renormalize=renormalize, **groups)
    options: dict[str, dict[str, Any]] = {
        "zero experts": {"zero_experts": 4},
        "table": {"table": True},
    }
    return RouterSpec(top_k, renormalize=renormalize, **options.get(row["router"], {}))


def _make_x(row: Values) -> torch.Tensor:
    return _draw(T, H, seed=1).to(problem_of(row).dtype)


def _make_router(row: Values) -> Router | None:
    """Return the Router module of a row, if it has one."""
    if row["router"] not in ("module", "table"):
        return None
    vocabulary = VOCABULARY if row["router"] == "table" else None
    router = Router(spec_of(row), H, E, vocabulary=vocabulary)
    router.weight.data.copy_(_draw(E, H, seed=8) / 6)
    if router.tid2eid is not None:
        expert_ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(n))
                             for n in range(VOCABULARY)])  # fmt: skip
        router.tid2eid.copy_(expert_ids[:, : row["top-k"]])
    return router


def _make_selection_bias(row: Values) -> torch.Tensor | None:
    return _draw(E, seed=3) / 4 if row["router"] == "biased" else None


def _make_logits(row: Values) -> torch.Tensor:
    return _draw(T, spec_of(row).columns(E), seed=2)


def _make_token_ids() -> torch.Tensor:
    return torch.arange(T) * 3 % VOCABULARY


def route_tokens(row: Values) -> Routed:
    """Return the routing of all tokens."""
    router = _make_router(row)
    if router is not None:
        token_ids = _make_token_ids() if row["router"] == "table" else None
        return router.route(_make_x(row), token_ids)
    return route(_make_logits(row), spec_of(row), RouterTensors(_make_selection_bias(row)))


def compute_shared_output(x_TH: torch.Tensor) -> torch.Tensor:
    """Return the output of the shared expert."""
    return torch.tanh(x_TH) * 0.5


# ------------------------------------------------------------------------------------ weights


def _make_global_weights(row: Values) -> ExpertWeights:
    """Return the unquantized weights of all experts."""
    rows = problem_of(row).w1_rows
    weights = ExpertWeights(_draw(E, rows, H, seed=4) / 8, _draw(E, H, I, seed=5) / 8)
    if row["bias"]:
        weights = replace(weights, b1=_draw(E, rows, seed=6), b2=_draw(E, H, seed=7))
    if row["quant"] == STATIC:
        scales = torch.tensor([6 / 448]), torch.tensor([40 / 448])
        weights = replace(weights, a1_scale=scales[0], a2_scale=scales[1])
    return weights


def placement_of(row: Values) -> Placement:
    ep = row["place"].split[0]
    if row["placement"] == "round_robin":
        return Placement.round_robin(E, ep)
    linear = Placement.linear(E, ep)
    return linear.with_copies({0: [1], 5: [0]}) if row["placement"] == "copies" else linear


def _w1_rows_of_tp_rank(row: Values, t: int) -> torch.Tensor:
    """Return the rows of w1 that one TP rank has."""
    act = ActivationSpec.parse(row["activation"])
    width = I // row["place"].split[1]
    columns = torch.arange(t * width, (t + 1) * width)
    if act.interleaved:
        return torch.stack([2 * columns, 2 * columns + 1], 1).flatten()
    return torch.cat([columns, columns + I]) if act.gated else columns


def _make_rank_weights(
    row: Values, slots: tuple[int, ...], t: int
) -> tuple[ExpertWeights, Problem]:
    """Return the weights of some experts on one TP rank, and the problem that describes them."""
    global_weights, width, experts = (
        _make_global_weights(row),
        I // row["place"].split[1],
        list(slots),
    )
    rows = _w1_rows_of_tp_rank(row, t)
    problem = replace(problem_of(row), intermediate=width, experts=len(slots), top_k=1)
    weights = replace(
        global_weights,
        w1=global_weights.w1[experts][:, rows].contiguous(),
        w2=global_weights.w2[experts][:, :, t * width : (t + 1) * width].contiguous(),
    )
    if global_weights.b1 is not None and global_weights.b2 is not None:
        weights = replace(
            weights, b1=global_weights.b1[experts][:, rows], b2=global_weights.b2[experts]
        )
    if row["quant"] != "none":
        return quantize_weights(weights, problem), problem
    dtype = problem.dtype
    return replace(weights, w1=weights.w1.to(dtype), w2=weights.w2.to(dtype)), problem


def _dequantize_all_weights(row: Values) -> ExpertWeights:
    """Return the dequantized weights of all ranks as weights of one rank."""
    w1, w2 = torch.empty(E, problem_of(row).w1_rows, H), torch.empty(E, H, I)
    width = I // row["place"].split[1]
    for t in range(row["place"].split[1]):
        for slots in placement_of(row).slots:
            weights, problem = _make_rank_weights(row, slots, t)
            for name, target, index in (
                ("w1", w1, (_w1_rows_of_tp_rank(row, t), slice(None))),
                ("w2", w2, (slice(None), torch.arange(t * width, (t + 1) * width))),
            ):
                values = getattr(weights, name)
                if row["quant"] != "none":
                    values = dequantize_weights(weights, name, problem)
                for slot, e in enumerate(slots):
                    target[e][index] = values[slot].float()
    global_weights = _make_global_weights(row)
    return ExpertWeights(w1, w2, b1=global_weights.b1, b2=global_weights.b2)


def expected_output(row: Values) -> torch.Tensor:
    """Return the exact output for all tokens, (T, H) float64."""
    problem = replace(problem_of(row), quant="none", dtype=torch.float32)
    x_TH, routed = _make_x(row).float(), route_tokens(row)
    total = float64_reference(x_TH, _dequantize_all_weights(row), routed.routing, problem)
    if routed.identity_T is not None:
        total += routed.identity_T[:, None].double() * x_TH.double() * row["scaling"]
    return total if row["shared"] == "none" else total + compute_shared_output(x_TH).double()


# ---------------------------------------------------------------------------------- the layers


def summed_ranks(row: Values) -> int:
    """Return the number of ranks whose outputs are summed. An exchange already sums over EP."""
    ep, tp = row["place"].split
    return int(tp if part_of(row) in EXCHANGES else ep * tp)


def tokens_of(row: Values, e: int) -> slice:
    """Return the tokens that an EP rank passes to the layer."""
    if part_of(row) not in EXCHANGES or part_of(row) == REPLICATED:
        return slice(0, T)
    return slice(0, 4) if e == 0 else slice(4, T)


def make_layer(row: Values, e: int, t: int, **groups: Any) -> FusedMoE:
    """Return the layer on EP rank e and TP rank t."""
    problem, (ep, tp) = problem_of(row), row["place"].split
    quant = None if row["quant"] == "none" else row["quant"]
    options: dict[str, Any] = {"params_dtype": problem.dtype, "activation": row["activation"]}
    if row["layer"] == "EPMoE":
        experts = "GroupedGemmExperts" if row["experts"] == "triton" else "TorchExperts"
        if row["router"] == "biased":
            options |= {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
        group = groups.get("ep_group")
        place = {"tp_size": ep, "tp_rank": e} if group is None else {"tp_group": group}
        layer: FusedMoE = EPMoE(
            E, row["top-k"], H, I, quant_config=quant, experts=experts,
            correction_bias=_make_selection_bias(row), **place, **options,
        )  # fmt: skip
    else:
        layer = FusedMoE(
            E, H, I, None, row["top-k"], quant,
            bias=row["bias"],
            apply_router_weight_on_input=row["on input"],
            routed_scaling_factor=row["scaling"],
            router=None if row["router"] == "routing" else _make_router(row) or spec_of(row),
            selection_bias=_make_selection_bias(row),
            shared_experts=_make_shared_experts(row),
            shared_partial=row["shared"] == "partial",
            parallel=LayerParallel((e, ep), (t, tp), **groups),
            reduce_results=row["place"].reduce,
            prepare_finalize=part_of(row),
            experts=_experts_part_of(row),
            placement=None if row["placement"] == "linear" else placement_of(row),
            max_tokens=T,
            chunk_tokens=row["chunk"],
            **options,
        )  # fmt: skip
    layer.set_weights(_make_rank_weights(row, placement_of(row).slots[e], t)[0])
    if row["prepared"]:
        layer.prepare_weights()
    return layer


def _experts_part_of(row: Values) -> str:
    torch_part, triton_part = ("NaiveBatchedExperts", "BatchedTritonExperts")
    if part_of(row) not in BATCHED:
        torch_part, triton_part = ("TorchExperts", "TritonExperts")
    return triton_part if row["experts"] == "triton" else torch_part


def _make_shared_experts(row: Values) -> Any:
    if row["shared"] == "none":
        return None
    return lambda x: (
        compute_shared_output(x) / (summed_ranks(row) if row["shared"] == "partial" else 1)
    )


def call_layer(row: Values, e: int, t: int, **groups: Any) -> torch.Tensor:
    """Call the layer twice on one rank, and return its last output, (tokens, H)."""
    layer, tokens = make_layer(row, e, t, **groups), tokens_of(row, e)

    def shape_tokens(tensor: torch.Tensor) -> torch.Tensor:
        rank_tokens = tensor[tokens]
        return rank_tokens[None] if row["shape"] == "(1, T, H)" else rank_tokens

    arguments: dict[str, Any] = {}
    if row["router"] == "routing":
        routing = route_tokens(row).routing
        arguments["routing"] = Routing(
            shape_tokens(routing.topk_weights_TK), shape_tokens(routing.topk_ids_TK)
        )
    elif row["router"] == "table":
        arguments["token_ids"] = shape_tokens(_make_token_ids())
    elif row["router"] != "module":
        arguments["routing"] = shape_tokens(_make_logits(row))
    x = shape_tokens(_make_x(row))
    first = layer(x, **arguments)
    out = layer(x, **arguments)
    assert out.shape == x.shape
    # Calls alternate between copies of an expert, which changes the order of additions.
    assert row["placement"] == "copies" or torch.equal(first, out)
    layer.destroy()
    return out.reshape(-1, H)


@contextmanager
def create_groups(rank: int, row: Values, world_group: Any) -> Iterator[dict[str, Any]]:
    """Create the process groups of a rank. All ranks must call this function.

    rank: EP rank * number of TP ranks + TP rank. world_group: the group of all ranks.
    """
    ep, tp = row["place"].split
    groups_by_name: dict[str, Any] = {}
    ranks_by_group = {
        "ep_group": [[e * tp + t for e in range(ep)] for t in range(tp)],
        "tp_group": [[e * tp + t for t in range(tp)] for e in range(ep)],
    }
    for name, groups in ranks_by_group.items():
        for ranks in groups:
            group = dist.new_group(ranks)
            if rank in ranks:
                groups_by_name[name] = group
    # A refused rank destroys its groups at once, so all ranks must have created theirs.
    dist.barrier()
    yield groups_by_name | (
        {"group": world_group} if row["place"].groups == "each and both" else {}
    )
    for group in groups_by_name.values():
        dist.destroy_process_group(group)


def call_on_rank(rank: int, world: int, group: Any, row: Values) -> torch.Tensor | str:
    """Return the output of one rank of a process group, or the refusal as "type: text"."""
    with create_groups(rank, row, group) as groups:
        try:
            return call_layer(row, *divmod(rank, row["place"].split[1]), **groups)
        except (ConfigurationError, IncompatibleError) as error:
            return f"{type(error).__name__}: {error}"


def outputs_of(row: Values, rank_pool: Any) -> list[Any]:
    """Return the output of each rank, or its refusal as "type: text".

    Ranks are processes if the layer has process groups.
    """
    ep, tp = row["place"].split
    if row["place"].groups != "none":
        return list(rank_pool(ep * tp).run(call_on_rank, row))
    outputs: list[Any] = []
    for e, t in product(range(ep), range(tp)):
        try:
            outputs.append(call_layer(row, e, t))
        except (ConfigurationError, IncompatibleError) as error:
            outputs.append(f"{type(error).__name__}: {error}")
    return outputs
