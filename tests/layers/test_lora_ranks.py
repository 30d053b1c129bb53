"""FusedMoEWithLoRA over gloo ranks that exchange tokens: each rank has the adapters of its experts.

Outputs are compared with the float64 reference of the whole layer on one rank.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from ep_layers import ALL2ALL, BATCHED, GATHERED, REPLICATED
from lora_layers import FLOATS, MAX_RANK, E, H, I, K, fill_parameters, make_adapter
from small_layers import relative_error
from test_layer_ranks import make_groups

from modular_kernel import reference
from modular_kernel.errors import (
    IncompatibleError,
    ModularKernelError,
    UnsupportedError,
)
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.lora import ForwardBatch, FusedMoEWithLoRA, LoRAManager, MoELoRALayer
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.ops.moe_lora import MoELoRABatchInfo
from modular_kernel.ops.route import route
from modular_kernel.spec.lora import Adapter
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.ranks.pool import RankPool

Pool = Callable[[int], RankPool]
HOST_THEN_RANK = "HostThenRankPrepareAndFinalize"
SYMM_MEM = "SymmMemPrepareAndFinalize"
ROUTER = RouterSpec(K, renormalize=True)
TOKENS = 12
LORA = f"adapters=2,rank={MAX_RANK}"
SEEDS = {"a": 3, "b": 5, "c": 4}  # by name; also the rank of the adapter
COPIES = Placement(((0, 1, 2, 3), (4, 5, 3, 0)))
INT64 = {"dtype": torch.int64, "device": "cpu"}


@dataclass(frozen=True)
class Call:
    """One call of all ranks.

    starts: first token of each rank, and the end of the last rank.
    names: name of the adapter of each token, by first letter; "-" for no adapter.
    load, evict: adapters that are loaded and evicted before the call, in this order.
    """

    starts: tuple[int, ...]
    names: str
    load: str = ""
    evict: str = ""


CALLS = {
    2: (
        Call((0, 5, 12), "-" * TOKENS),
        Call((0, 5, 12), "bbbb-----bbb", load="b"),
        Call((0, 7, 12), "aab--bba-aab", load="a"),
        Call((0, 12, 12), "aab--bba-aab"),  # rank 1 has no tokens
        Call((0, 4, 12), "-----bba-aab"),  # rank 0 has no adapters
        Call((0, 6, 12), "aa--aa-aa---", evict="b"),
        Call((0, 6, 12), "aac-cca-aaac", load="c"),  # in the slot that "b" had
    ),
    4: (
        Call((0, 3, 3, 9, 12), "aab--bba-aab", load="ab"),
        Call((0, 0, 5, 8, 12), "aac-cca-aaac", evict="b", load="c"),
    ),
}


def make_layer(
    rank: int, group: Any, part: str, *, placement: Placement | None = None, **options: Any
) -> FusedMoE:
    """Return this rank's share of the layer that `make_whole_layer` returns."""
    if part == BATCHED:
        options["experts"] = "NaiveBatchedExperts"
    layer = FusedMoE(
        E, H, I, 3, router=ROUTER, parallel=LayerParallel(ep_group=group),
        prepare_finalize=part, placement=placement, max_tokens=TOKENS, **FLOATS, **options,
    )  # fmt: skip
    weights, experts = make_whole_layer().weights(), list(layer.placement.slots[rank])
    layer.set_weights(ExpertWeights(weights.w1[experts], weights.w2[experts]))
    return layer


def make_whole_layer() -> FusedMoE:
    return fill_parameters(FusedMoE(E, H, I, 3, router=ROUTER, **FLOATS))


def load(manager: LoRAManager, name: str, experts: Sequence[int] = range(E)) -> None:
    """Load the matrices of some experts of an adapter."""
    tensors = vars(make_adapter(SEEDS[name], SEEDS[name], num_a13=2))
    factors = Adapter(**{key: tensor[list(experts)] for key, tensor in tensors.items()})
    manager.load(name, {3: MoELoRALayer(factors, 2.0)})


def make_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and router logits of all ranks."""
    g = torch.Generator().manual_seed(9)
    return torch.randn(TOKENS, H, generator=g), torch.randn(TOKENS, E, generator=g)


def make_batch(names: str) -> ForwardBatch:
    """Return a batch of sequences of one token."""
    lora_ids = [None if name == "-" else name for name in names]
    return ForwardBatch(lora_ids, torch.arange(len(names) + 1, **INT64))


def compute_expected_output(manager: LoRAManager, names: str) -> torch.Tensor:
    """Return the float64 output of the whole layer for the tokens of all ranks."""
    x_TH, logits = make_inputs()
    slots = [-1 if name == "-" else manager.pools[3].slots[name] for name in names]
    routing = route(logits, ROUTER).routing
    slots_T = torch.tensor(slots, dtype=torch.int32, device="cpu")
    weights = manager.weights(3, make_whole_layer().weights())
    return reference.float64_reference(
        x_TH, weights, replace(routing, adapters_T=slots_T), manager.problem
    )


def measure_errors(
    rank: int, world: int, group: Any, part: str, placement: Placement | None
) -> list[float]:
    """Return the relative error of this rank's output in each of CALLS."""
    shared_calls = []

    def shared(x_TH: torch.Tensor) -> torch.Tensor:
        shared_calls.append(len(x_TH))
        return torch.tanh(x_TH)

    layer = make_layer(rank, group, part, placement=placement, shared_experts=shared)
    manager, whole = (LoRAManager(problem, LORA, [3]) for problem in (
        layer.problem, make_whole_layer().problem,
    ))  # fmt: skip
    adapted = FusedMoEWithLoRA(layer, manager)
    x_TH, logits = make_inputs()
    errors = []
    for call in CALLS[world]:
        for name in call.evict:
            manager.evict(name)
            whole.evict(name)
        for name in call.load:
            load(manager, name, layer.placement.slots[rank])
            load(whole, name)
        rows = slice(TOKENS) if part == REPLICATED else slice(*call.starts[rank : rank + 2])
        batch = make_batch(call.names[rows])
        expected = compute_expected_output(whole, call.names)[rows] + torch.tanh(x_TH[rows])
        for info in (batch, manager.prepare_moe_lora_batch(batch, 3)):
            with prefer_torch_reference():
                got = adapted(x_TH[rows], logits[rows], moe_lora_info=info)
            errors.append(relative_error(got, expected) if len(got) else 0.0)
    assert layer.counters()["calls"] == len(errors) == len(shared_calls)
    base_kernel, kernel = adapted.kernels()
    assert (base_kernel.problem.lora, kernel.problem.lora) == ("none", LORA)
    assert kernel.prepare_finalize.manager is base_kernel.prepare_finalize.manager  # type: ignore[attr-defined]
    adapted.destroy()
    return errors


@pytest.mark.parametrize("placement", [None, Placement.round_robin(E, 2), COPIES], ids=str)
@pytest.mark.parametrize("part", [REPLICATED, GATHERED, ALL2ALL, BATCHED, HOST_THEN_RANK])
def test_outputs_of_two_ranks_equal_the_reference(
    rank_pool: Pool, part: str, placement: Placement | None
) -> None:
    for errors in rank_pool(2).run(measure_errors, part, placement):
        assert max(errors) < 1e-6, errors


@pytest.mark.parametrize("part", [REPLICATED, GATHERED, ALL2ALL, BATCHED, HOST_THEN_RANK])
def test_outputs_of_four_ranks_equal_the_reference(rank_pool: Pool, part: str) -> None:
    for errors in rank_pool(4).run(measure_errors, part, None):
        assert max(errors) < 1e-6, errors


def compare_tp_shares(rank: int, world: int, group: Any) -> float:
    """Return the relative error on two EP ranks, each of which has two TP ranks."""
    ep_rank, tp_rank = divmod(rank, 2)
    x_TH, logits = make_inputs()
    rows = slice(*(0, 5, 12)[ep_rank : ep_rank + 2])
    names = "aab--bba-aab"
    with make_groups(rank, 2, 2) as (ep_group, tp_group):
        layer = FusedMoE(
            E, H, I, 3, router=ROUTER, prepare_finalize=ALL2ALL, max_tokens=TOKENS,
            parallel=LayerParallel(ep_group=ep_group, tp_group=tp_group),
            reduce_results=True, **FLOATS,
        )  # fmt: skip
        experts = list(layer.placement.slots[ep_rank])
        columns = slice(tp_rank * I // 2, (tp_rank + 1) * I // 2)
        weights = make_whole_layer().weights()
        w1 = weights.w1[experts].unflatten(1, (2, I))[:, :, columns].flatten(1, 2)
        w2 = weights.w2[experts][:, :, columns]
        layer.set_weights(ExpertWeights(w1.contiguous(), w2.contiguous()))
        manager = LoRAManager(layer.problem, LORA, [3])
        whole = LoRAManager(make_whole_layer().problem, LORA, [3])
        adapted = FusedMoEWithLoRA(layer, manager)
        for name in "ab":
            load(whole, name)
            tensors = vars(make_adapter(SEEDS[name], SEEDS[name], num_a13=2))
            factors = Adapter(**{key: tensor[experts] for key, tensor in tensors.items()})
            manager.load(name, {3: MoELoRALayer(factors.share(tp_rank, 2), 2.0)})
        with prefer_torch_reference():
            got = adapted(x_TH[rows], logits[rows], moe_lora_info=make_batch(names[rows]))
        adapted.destroy()
    return relative_error(got, compute_expected_output(whole, names)[rows])


def test_outputs_of_ep_and_tp_ranks_equal_the_reference(rank_pool: Pool) -> None:
    assert max(rank_pool(4).run(compare_tp_shares)) < 1e-6


def collect_errors(
    rank: int, world: int, group: Any, part: str, changes: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return the error of a call after each of `changes`, and of a call after the ranks agree.

    changes: adapters that rank 0 and rank 1 load. In upper case: without matrices for the layer.
    """
    layer = make_layer(rank, group, part)
    manager = LoRAManager(layer.problem, LORA, [3])
    adapted = FusedMoEWithLoRA(layer, manager)
    results = []
    for names in (*(change[rank] for change in changes), "ab"):
        for loaded in tuple(manager.pools[3].slots):
            manager.evict(loaded)
        for name in names:
            if name.isupper():
                manager.load(name.lower(), {})
            else:
                load(manager, name, layer.placement.slots[rank])
        results.append(catch_error(adapted, make_batch("-" * TOKENS)))
    adapted.destroy()
    return results


def catch_error(adapted: FusedMoEWithLoRA, batch: Any, *, seconds: float = 5) -> tuple[str, str]:
    """Call the layer. Return the name and the message of its error, or empty strings.

    seconds: maximum time of the call, less than the timeout of an exchange.
    """
    started = time.monotonic()
    try:
        with prefer_torch_reference():
            adapted(*make_inputs(), moe_lora_info=batch)
        return "", ""
    except ModularKernelError as error:
        return type(error).__name__, str(error)
    finally:
        assert time.monotonic() - started < seconds


@pytest.mark.parametrize("part", [REPLICATED, GATHERED, ALL2ALL, BATCHED, HOST_THEN_RANK])
def test_different_adapters_are_refused_on_all_ranks(rank_pool: Pool, part: str) -> None:
    """The slots of a, b differ; rank 1 has no b; rank 1 has no matrices of b. Then, ranks agree."""
    changes = ("ab", "ba"), ("ab", "a"), ("ab", "aB")
    for results in rank_pool(2).run(collect_errors, part, changes):
        *refused, (last_error, _) = results
        for error, message in refused:
            assert error == "CommunicationError"
            assert "got other loaded adapters, other slots of them" in message, message
        assert last_error == "", results


def collect_batch_errors(rank: int, world: int, group: Any, part: str) -> list[tuple[str, str]]:
    """Return the errors of calls in which the batch of rank 1 is invalid, and of a valid call."""
    layer = make_layer(rank, group, part)
    manager = LoRAManager(layer.problem, LORA, [3])
    adapted = FusedMoEWithLoRA(layer, manager)
    load(manager, "a", layer.placement.slots[rank])
    valid = make_batch("a" * TOKENS)
    info = manager.prepare_moe_lora_batch(valid, 3)
    assert info is not None
    short = replace(info, weight_indices=torch.zeros(TOKENS - 1, **INT64), seg_indptr=None)
    batches = make_batch("ax" + "a" * (TOKENS - 2)), short, "a"
    results = [catch_error(adapted, batch if rank == 1 else valid) for batch in (*batches, valid)]
    results.append(catch_error(adapted, None if rank == 1 else valid))
    adapted.destroy()
    return results


@pytest.mark.parametrize("part", [REPLICATED, GATHERED, ALL2ALL, BATCHED, HOST_THEN_RANK])
def test_an_invalid_batch_is_refused_on_all_ranks(rank_pool: Pool, part: str) -> None:
    """The other ranks raise at once, and the next call of all ranks succeeds."""
    first, second = rank_pool(2).run(collect_batch_errors, part)
    expected = (
        ("StateError", "adapter 'x': got not loaded, need a loaded adapter: a"),
        ("ShapeError", "weight_indices: got (11,), need (12,), or seg_indptr"),
        ("ConfigurationError", "moe_lora_info: got 'a'"),
    )
    for (name, message), own, other in zip(expected, second[:3], first[:3], strict=True):
        assert own[0] == name
        assert own[1].startswith(message), own
        assert other[0] == "CommunicationError"
        assert "rank 1 refused its call" in other[1]
    assert first[3] == second[3] == ("", "")
    for error, message in (first[4], second[4]):
        if part == REPLICATED:  # the tokens are the same on all ranks, so one rank cannot omit them
            assert error == "CommunicationError"
            assert "or adapters on some ranks only" in message
        else:
            assert error == ""


def run_with_unused_slots(rank: int, world: int, group: Any, part: str) -> bool:
    """Return whether tokens with slots outside [0, L) are computed without adapters."""
    layer = make_layer(rank, group, part)
    manager = LoRAManager(layer.problem, LORA, [3])
    adapted = FusedMoEWithLoRA(layer, manager)
    for name in "ab":
        load(manager, name, layer.placement.slots[rank])
    slots_T = torch.tensor([2, 1 << 40, -1, -2, -(1 << 33), 0] * 2, **INT64)
    info = MoELoRABatchInfo(slots_T, torch.tensor([3, 5], **INT64), torch.ones(2))
    x_TH, logits = make_inputs()
    with prefer_torch_reference():
        got, expected = (adapted(x_TH, logits, moe_lora_info=i) for i in (info, None))
    is_different = (got != expected).any(1)
    adapted.destroy()
    return is_different.tolist() == [False] * 5 + [True] + [False] * 5 + [True]


@pytest.mark.parametrize("part", [REPLICATED, GATHERED, ALL2ALL, BATCHED, HOST_THEN_RANK])
def test_slots_out_of_range_select_no_adapter(rank_pool: Pool, part: str) -> None:
    assert all(rank_pool(2).run(run_with_unused_slots, part))


def compare_compiled_calls(rank: int, world: int, group: Any) -> bool:
    """Return whether compiled calls with and without adapters equal eager calls."""
    layer = make_layer(rank, group, ALL2ALL)
    manager = LoRAManager(layer.problem, LORA, [3])
    adapted = FusedMoEWithLoRA(layer, manager)
    load(manager, "a", layer.placement.slots[rank])
    torch.compiler.reset()
    compiled = torch.compile(adapted, backend="eager")
    is_equal = True
    with prefer_torch_reference(), torch.no_grad():
        for batch in (None, make_batch("a" * TOKENS)):
            got = compiled(*make_inputs(), moe_lora_info=batch)
            is_equal &= torch.equal(got, adapted(*make_inputs(), moe_lora_info=batch))
    torch.compiler.reset()
    adapted.destroy()
    return is_equal


def test_compiled_calls_equal_eager_calls(rank_pool: Pool) -> None:
    assert all(rank_pool(2).run(compare_compiled_calls))


def collect_refusals(rank: int, world: int, group: Any) -> list[str]:
    messages = []
    for part, options, mode, lora in (
        (ALL2ALL, {}, "parallel_delta", f"{LORA},a13=shared"),
        (SYMM_MEM, {}, "merged", LORA),
        (ALL2ALL, {"quant_config": "fp8_w8a8_channel"}, "merged", LORA),
    ):
        layer = FusedMoE(
            E, H, I, 3, router=ROUTER, parallel=LayerParallel(ep_group=group),
            prepare_finalize=part, max_tokens=TOKENS, **FLOATS, **options,
        )  # fmt: skip
        manager = LoRAManager(layer.problem, lora, [3], mode=mode)  # type: ignore[arg-type]
        with pytest.raises((UnsupportedError, IncompatibleError)) as info:
            FusedMoEWithLoRA(layer, manager)
        messages.append(str(info.value))
        if part == SYMM_MEM:
            kernel, weights = layer.kernels()[0], fill_parameters(layer).weights()
            routing = Routing(torch.ones(1, K), torch.zeros(1, K).int())
            with pytest.raises(UnsupportedError, match=f"same_on_ranks: got {SYMM_MEM}"):
                kernel.start(torch.ones(1, H), weights, routing, same_on_ranks="a")
        layer.destroy()
    return messages


def test_exchanges_that_cannot_serve_adapters_are_refused(rank_pool: Pool) -> None:
    for parallel_delta, symm_mem, quantized in rank_pool(2).run(collect_refusals):
        assert parallel_delta.startswith("mode: got parallel_delta, whose branch is computed on")
        assert symm_mem.startswith(
            f"prepare_finalize: got {SYMM_MEM}, whose ranks do not compare every call"
        )
        assert "unquantized rows, which adapters read" in quantized
