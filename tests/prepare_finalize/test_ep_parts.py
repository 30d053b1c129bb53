"""The results of parts over torch.distributed on gloo ranks equal those of one rank."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from ep_layers import ALL2ALL, BATCHED, GATHERED, PARTS, REPLICATED, Layer, call_layer, call_layers
from rank_fixtures import make_ranks_fixture

from modular_kernel.catalog import make_kernel, this_machine
from modular_kernel.spec.placement import Placement
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.ranks.pool import RankPool

BF16 = torch.bfloat16


@pytest.fixture(scope="module", params=[2, 4])
def pool(request) -> Iterator[RankPool]:
    with RankPool(request.param, grace=15) as ranks:
        yield ranks


pair = make_ranks_fixture(2)


def list_token_counts(part: str, world: int) -> tuple[tuple[int, ...], ...]:
    """Return several lists of the numbers of tokens by rank. Some ranks have no tokens."""
    if part == REPLICATED:
        return (6,) * world, (1,) * world, (0,) * world
    uneven = tuple(range(3, 3 + world))
    return uneven, (0, *uneven[1:]), (*[0] * (world - 1), 5), (0,) * world


def verify_layers(pool: RankPool, layers: list[Layer]) -> None:
    """Check the accuracy of all outputs, and the counts of invalid ids on each rank."""
    reports = pool.run(call_layers, tuple(layers))
    for index, layer in enumerate(layers):
        outputs = [reports[rank][index][0] for rank in range(layer.world_size)]
        comparison = layer.compare(outputs)
        assert comparison.ok, (layer, comparison)
        for rank in range(layer.world_size):
            assert reports[rank][index][1] == layer.count_invalid_ids(rank), layer


@pytest.mark.parametrize("part", PARTS)
def test_outputs_with_uneven_numbers_of_tokens(pool: RankPool, part: str) -> None:
    counts = list_token_counts(part, pool.world_size)
    verify_layers(pool, [Layer(part, tokens_W) for tokens_W in counts])
    verify_layers(pool, [Layer(part, counts[0], strided=True, fields={"ids_dtype": torch.int64})])


@pytest.mark.parametrize("part", PARTS)
def test_outputs_with_all_placements(pool: RankPool, part: str) -> None:
    world = pool.world_size
    tokens_W = list_token_counts(part, world)[0]
    linear = Placement.linear(world + 3, world)
    shuffled = Placement.of_table(
        [(i % world, i // world) for i in reversed(range(3 * world))], world
    )
    copies = {0: (world - 1,), world + 2: tuple(range(world - 1))}
    everywhere = Placement(tuple(tuple(range(world + 3)) for _ in range(world)))
    placements = (
        linear,  # The first three ranks have one expert more than the others.
        Placement.round_robin(world + 3, world),
        shuffled,
        linear.with_copies(copies),
        everywhere,
    )
    verify_layers(
        pool,
        [
            Layer(part, tokens_W, placement, fields={"experts": placement.experts, "top_k": 3})
            for placement in placements
        ],
    )


@pytest.mark.parametrize("part", PARTS)
def test_outputs_with_all_routings(pool: RankPool, part: str) -> None:
    tokens_W = list_token_counts(part, pool.world_size)[0]
    names = ("skips", "all_skipped", "out_of_range", "duplicates", "all_to_one", "empty_experts")
    verify_layers(pool, [Layer(part, tokens_W, routing=name) for name in names])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "quant",
    [
        "fp8_w8a8_tensor",
        "fp8_w8a8_tensor:static=true",
        "fp8_w8a8_channel",
        "fp8_w8a8_block:block=16x16",
        "int8_w8a8_channel",
        "int4_w4a16_group:group=8",
    ],
)
def test_outputs_with_quantized_rows(pair: RankPool, part: str, quant: str) -> None:
    fields = {"dtype": BF16, "quant": quant}
    verify_layers(
        pair, [Layer(part, counts, fields=fields) for counts in list_token_counts(part, 2)[:2]]
    )


@pytest.mark.parametrize(
    "quant",
    [
        "fp8_w8a8_tensor",
        "fp8_w8a8_tensor:static=true",
        "fp8_w8a8_channel",
        "int4_w4a16_group:group=8",
    ],
)
def test_outputs_with_quantized_rows_in_batches(pair: RankPool, quant: str) -> None:
    fields = {"dtype": BF16, "quant": quant}
    batched = {"experts_part": "NaiveBatchedExperts", "fields": fields}
    verify_layers(
        pair, [Layer(BATCHED, counts, **batched) for counts in list_token_counts(BATCHED, 2)[:2]]
    )


@pytest.mark.parametrize("part", PARTS)
def test_outputs_with_other_fields_of_a_problem(pair: RankPool, part: str) -> None:
    tokens_W = list_token_counts(part, 2)[0]
    changes = (
        {"inplace": True},
        {"bias": True, "routed_scaling_factor": 2.5},
        {"dtype": torch.float16},
        {"apply_router_weight_on_input": True, "top_k": 1},
        {"chunk_tokens": 2},
    )
    verify_layers(pair, [Layer(part, tokens_W, fields=change) for change in changes])


@pytest.mark.parametrize("part", [GATHERED, ALL2ALL])
def test_one_scale_for_all_ranks_equals_that_of_one_rank(pair: RankPool, part: str) -> None:
    """The scale is computed from the maximum over all ranks."""
    fields = {"quant": "fp8_w8a8_tensor", "dtype": BF16}
    scales = pair.run(receive_scale, Layer(part, (3, 5), fields=fields))
    assert torch.equal(scales[0], scales[1])
    x_TH = Layer(part, (3, 5), fields=fields).inputs().x_TH
    assert torch.equal(scales[0], x_TH.abs().amax().float().reshape(1) / torch.tensor(448.0))


def receive_scale(rank: int, world: int, group: object, layer: Layer) -> torch.Tensor:
    kernel, inputs = layer.kernel(rank, group), layer.inputs_of(rank)
    pending = kernel.start(inputs.x_TH, inputs.weights, inputs.routing)
    tokens, _ = pending.receive()
    return tokens.scale.clone()


def test_expert_parallelism_equals_tensor_parallelism(pair: RankPool) -> None:
    """With tensor parallelism, each rank has half of every expert."""
    layer = Layer(REPLICATED, (6, 6))
    shared_out = pair.run(call_layer, layer)[0][0]
    inputs, half = layer.inputs(), layer.global_problem.intermediate // 2
    problem = replace(layer.global_problem, intermediate=half)
    pairing = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    kernel = make_kernel(*pairing, problem, machine=this_machine(device="cpu"))
    summed = torch.zeros_like(shared_out)
    for start in (0, half):
        gate_and_up = inputs.weights.w1.unflatten(1, (2, -1))[:, :, start : start + half]
        w2 = inputs.weights.w2[:, :, start : start + half]
        weights = ExpertWeights(w1=gate_and_up.flatten(1, 2), w2=w2)
        summed += kernel(inputs.x_TH, weights, inputs.routing)
    torch.testing.assert_close(shared_out, summed, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------- asynchronous, in flight


@pytest.mark.parametrize("part", PARTS)
def test_two_calls_in_flight_on_one_kernel(pair: RankPool, part: str) -> None:
    layers = tuple(
        Layer(part, counts, seed=i) for i, counts in enumerate(list_token_counts(part, 2)[:2])
    )
    reports = pair.run(finish_in_reverse_order, layers)
    for index, layer in enumerate(layers):
        comparison = layer.compare([report[index] for report in reports])
        assert comparison.ok, comparison


def finish_in_reverse_order(
    rank: int, world: int, group: object, layers: tuple[Layer, ...]
) -> list:
    """Start two calls, compute something else, then finish them in the reverse order."""
    largest = replace(layers[0].problem(rank), tokens=16)
    kernel = make_kernel(layers[0].part, "TorchExperts", largest, group=group, poison=True)
    inputs = [layer.inputs_of(rank) for layer in layers]
    pending = [
        kernel.start(call_inputs.x_TH, call_inputs.weights, call_inputs.routing)
        for call_inputs in inputs
    ]
    shared = inputs[0].x_TH @ inputs[0].x_TH.T
    assert shared.isfinite().all()
    results = [call.finish() for call in reversed(pending)]
    return results[::-1]


def test_only_the_receiver_waits(pair: RankPool) -> None:
    for part in (GATHERED, ALL2ALL):
        states = pair.run(get_dispatch_states, Layer(part, (3, 4)))
        assert states == [("under way", "done")] * 2


def get_dispatch_states(rank: int, world: int, group: object, layer: Layer) -> tuple[str, str]:
    kernel, inputs = layer.kernel(rank, group), layer.inputs_of(rank)
    assert kernel.prepare_finalize.has_prepare_no_receive()
    pending = kernel.start(inputs.x_TH, inputs.weights, inputs.routing)
    records = kernel.prepare_finalize.manager.last_calls._records
    state_before = records[-1]["state"]
    assert records[-1]["phase"] == "dispatch"
    dispatch = records[-1]
    pending.finish()
    return state_before, dispatch["state"]


@pytest.mark.parametrize("part", PARTS)
def test_plans_can_be_called_repeatedly(pair: RankPool, part: str) -> None:
    layers = tuple(Layer(part, counts, seed=5) for counts in list_token_counts(part, 2))
    reports = pair.run(call_plan, layers)
    for index, layer in enumerate(layers):
        assert layer.compare([report[index] for report in reports]).ok


def call_plan(rank: int, world: int, group: object, layers: tuple[Layer, ...]) -> list:
    largest = replace(layers[0].problem(rank), tokens=16)
    kernel = make_kernel(layers[0].part, "TorchExperts", largest, group=group, poison=True)
    plan = kernel.plan()
    results = []
    for layer in layers:
        inputs = layer.inputs_of(rank)
        results.append(plan(inputs.x_TH, inputs.weights, inputs.routing).clone())
    return results


@pytest.mark.parametrize("part", [GATHERED, ALL2ALL])
def test_many_steps_with_random_numbers_of_tokens(pair: RankPool, part: str) -> None:
    wrong_steps = pair.run(find_wrong_steps, Layer(part, (8, 8)))
    assert wrong_steps == [[], []]


def find_wrong_steps(
    rank: int, world: int, group: object, layer: Layer, steps: int = 150
) -> list[int]:
    """Call a kernel and a plan alternately. Return the steps with a wrong output."""
    kernel, inputs = layer.kernel(rank, group), layer.inputs_of(rank)
    plan, exact = kernel.plan(), layer.exact()[layer.rows(rank)]
    rng, wrong_steps = random.Random(0), []
    for step in range(steps):
        counts = [rng.choice((0, 1, rng.randrange(9))) for _ in range(world)]
        rows = slice(0, counts[rank])
        weights_TK, ids_TK = inputs.routing.topk_weights_TK, inputs.routing.topk_ids_TK
        call = plan if step % 3 else kernel
        out = call(inputs.x_TH[rows], inputs.weights, Routing(weights_TK[rows], ids_TK[rows]))
        if not torch.allclose(out.double(), exact[rows], rtol=1e-5, atol=1e-5):
            wrong_steps.append(step)
    return wrong_steps


@pytest.mark.parametrize("part", [GATHERED, ALL2ALL])
def test_equal_input_gives_equal_bits(pool: RankPool, part: str) -> None:
    layer = Layer(part, list_token_counts(part, pool.world_size)[0], fields={"dtype": BF16})
    first_run, second_run = pool.run(call_layer, layer), pool.run(call_layer, layer)
    for first, second in zip(first_run, second_run, strict=True):
        assert torch.equal(first[0], second[0])


def test_a_row_is_sent_once_to_each_rank_that_needs_it(pair: RankPool) -> None:
    """A rank gets one row for several pairs of a token, and no row if it has no pair."""
    rows = pair.run(count_rows, Layer(ALL2ALL, (3, 2), fields={"experts": 4, "top_k": 2}))
    assert rows == [((2, 2), (2, 2)), ((2, 1), (2, 1))]  # to and from each rank


def count_rows(rank: int, world: int, group: object, layer: Layer) -> tuple:
    kernel, inputs = layer.kernel(rank, group), layer.inputs_of(rank)
    ids = [[[0, 1], [1, 2], [3, 2]], [[1, 2], [0, -1]]][rank]  # Rank 0 has experts 0 and 1.
    topk_ids_TK = torch.tensor(ids, dtype=torch.int32)
    routing = replace(inputs.routing, topk_ids_TK=topk_ids_TK)
    _, handle = kernel.start(inputs.x_TH, inputs.weights, routing).receive()
    return handle.to_W, handle.from_W
