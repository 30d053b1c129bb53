"""The parts over torch.distributed on gloo ranks compute what one rank does."""

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


def tokens_of(part: str, world: int) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of tokens by rank: uneven, with and without ranks that have none."""
    if part == REPLICATED:
        return (6,) * world, (1,) * world, (0,) * world
    uneven = tuple(range(3, 3 + world))
    return uneven, (0, *uneven[1:]), (*[0] * (world - 1), 5), (0,) * world


def prove(pool: RankPool, layers: list[Layer]) -> None:
    """Check that every output is as accurate as on one rank, and that each rank counts its invalid
    ids.
    """
    reports = pool.run(call_layers, tuple(layers))
    for index, layer in enumerate(layers):
        outputs = [reports[rank][index][0] for rank in range(layer.world_size)]
        comparison = layer.compare(outputs)
        assert comparison.ok, (layer, comparison)
        for rank in range(layer.world_size):
            assert reports[rank][index][1] == layer.invalid(rank), layer


@pytest.mark.parametrize("part", PARTS)
def test_uneven_ranks_and_ranks_without_tokens(pool: RankPool, part: str) -> None:
    counts = tokens_of(part, pool.world_size)
    prove(pool, [Layer(part, tokens_W) for tokens_W in counts])
    prove(pool, [Layer(part, counts[0], strided=True, fields={"ids_dtype": torch.int64})])


@pytest.mark.parametrize("part", PARTS)
def test_placements(pool: RankPool, part: str) -> None:
    world = pool.world_size
    tokens_W = tokens_of(part, world)[0]
    linear = Placement.linear(world + 3, world)
    shuffled = Placement.of_table(
        [(i % world, i // world) for i in reversed(range(3 * world))], world
    )
    copies = {0: (world - 1,), world + 2: tuple(range(world - 1))}
    everywhere = Placement(tuple(tuple(range(world + 3)) for _ in range(world)))
    placements = (
        linear,  # uneven: the first three ranks hold one more
        Placement.round_robin(world + 3, world),
        shuffled,
        linear.with_copies(copies),
        everywhere,
    )
    prove(
        pool,
        [
            Layer(part, tokens_W, placement, fields={"experts": placement.experts, "top_k": 3})
            for placement in placements
        ],
    )


@pytest.mark.parametrize("part", PARTS)
def test_routings(pool: RankPool, part: str) -> None:
    tokens_W = tokens_of(part, pool.world_size)[0]
    names = ("skips", "all_skipped", "out_of_range", "duplicates", "all_to_one", "empty_experts")
    prove(pool, [Layer(part, tokens_W, routing=name) for name in names])


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
def test_quantized_rows_are_exchanged(pair: RankPool, part: str, quant: str) -> None:
    fields = {"dtype": BF16, "quant": quant}
    prove(pair, [Layer(part, counts, fields=fields) for counts in tokens_of(part, 2)[:2]])


@pytest.mark.parametrize(
    "quant",
    [
        "fp8_w8a8_tensor",
        "fp8_w8a8_tensor:static=true",
        "fp8_w8a8_channel",
        "int4_w4a16_group:group=8",
    ],
)
def test_quantized_rows_are_regrouped(pair: RankPool, quant: str) -> None:
    fields = {"dtype": BF16, "quant": quant}
    batched = {"experts_part": "NaiveBatchedExperts", "fields": fields}
    prove(pair, [Layer(BATCHED, counts, **batched) for counts in tokens_of(BATCHED, 2)[:2]])


@pytest.mark.parametrize("part", PARTS)
def test_other_properties(pair: RankPool, part: str) -> None:
    tokens_W = tokens_of(part, 2)[0]
    changes = (
        {"inplace": True},
        {"bias": True, "routed_scaling_factor": 2.5},
        {"dtype": torch.float16},
        {"apply_router_weight_on_input": True, "top_k": 1},
        {"chunk_tokens": 2},
    )
    prove(pair, [Layer(part, tokens_W, fields=change) for change in changes])


@pytest.mark.parametrize("part", [GATHERED, ALL2ALL])
def test_one_scale_for_all_ranks_equals_that_of_one_rank(pair: RankPool, part: str) -> None:
    """Activations are quantized by the maximum over all ranks, bit for bit as on one rank."""
    fields = {"quant": "fp8_w8a8_tensor", "dtype": BF16}
    scales = pair.run(scale_of, Layer(part, (3, 5), fields=fields))
    assert torch.equal(scales[0], scales[1])
    x_TH = Layer(part, (3, 5), fields=fields).inputs().x_TH
    assert torch.equal(scales[0], x_TH.abs().amax().float().reshape(1) / torch.tensor(448.0))


def scale_of(rank: int, world: int, group: object, layer: Layer) -> torch.Tensor:
    kernel, given = layer.kernel(rank, group), layer.inputs_of(rank)
    pending = kernel.start(given.x_TH, given.weights, given.routing)
    tokens, _ = pending.receive()
    return tokens.scale.clone()


def test_expert_parallelism_equals_tensor_parallelism(pair: RankPool) -> None:
    """Expert parallelism over two ranks equals tensor parallelism, where each rank has half of
    every expert.
    """
    layer = Layer(REPLICATED, (6, 6))
    shared_out = pair.run(call_layer, layer)[0][0]
    whole, half = layer.inputs(), layer.global_problem.intermediate // 2
    problem = replace(layer.global_problem, intermediate=half)
    pairing = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    kernel = make_kernel(*pairing, problem, machine=this_machine(device="cpu"))
    cut = torch.zeros_like(shared_out)
    for start in (0, half):
        gate_and_up = whole.weights.w1.unflatten(1, (2, -1))[:, :, start : start + half]
        w2 = whole.weights.w2[:, :, start : start + half]
        weights = ExpertWeights(w1=gate_and_up.flatten(1, 2), w2=w2)
        cut += kernel(whole.x_TH, weights, whole.routing)
    torch.testing.assert_close(shared_out, cut, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------- asynchronous, in flight


@pytest.mark.parametrize("part", PARTS)
def test_two_calls_in_flight_on_one_kernel(pair: RankPool, part: str) -> None:
    layers = tuple(Layer(part, counts, seed=i) for i, counts in enumerate(tokens_of(part, 2)[:2]))
    reports = pair.run(in_flight, layers)
    for index, layer in enumerate(layers):
        comparison = layer.compare([report[index] for report in reports])
        assert comparison.ok, comparison


def in_flight(rank: int, world: int, group: object, layers: tuple[Layer, ...]) -> list:
    """Dispatch two calls, then finish them in the reverse order, with other work in between."""
    most = replace(layers[0].problem(rank), tokens=16)
    kernel = make_kernel(layers[0].part, "TorchExperts", most, group=group, poison=True)
    given = [layer.inputs_of(rank) for layer in layers]
    pending = [kernel.start(each.x_TH, each.weights, each.routing) for each in given]
    shared = given[0].x_TH @ given[0].x_TH.T  # a shared expert, say
    assert shared.isfinite().all()
    results = [each.finish() for each in reversed(pending)]
    return results[::-1]


def test_only_the_receiver_waits(pair: RankPool) -> None:
    for part in (GATHERED, ALL2ALL):
        states = pair.run(dispatch_states, Layer(part, (3, 4)))
        assert states == [("under way", "done")] * 2


def dispatch_states(rank: int, world: int, group: object, layer: Layer) -> tuple[str, str]:
    kernel, given = layer.kernel(rank, group), layer.inputs_of(rank)
    assert kernel.prepare_finalize.has_prepare_no_receive()
    pending = kernel.start(given.x_TH, given.weights, given.routing)
    records = kernel.prepare_finalize.manager.last_calls._records
    before = records[-1]["state"]
    assert records[-1]["phase"] == "dispatch"
    dispatch = records[-1]
    pending.finish()
    return before, dispatch["state"]


@pytest.mark.parametrize("part", PARTS)
def test_plans_can_be_called_repeatedly(pair: RankPool, part: str) -> None:
    layers = tuple(Layer(part, counts, seed=5) for counts in tokens_of(part, 2))
    reports = pair.run(planned, layers)
    for index, layer in enumerate(layers):
        assert layer.compare([report[index] for report in reports]).ok


def planned(rank: int, world: int, group: object, layers: tuple[Layer, ...]) -> list:
    most = replace(layers[0].problem(rank), tokens=16)
    kernel = make_kernel(layers[0].part, "TorchExperts", most, group=group, poison=True)
    plan = kernel.plan()
    results = []
    for layer in layers:
        given = layer.inputs_of(rank)
        results.append(plan(given.x_TH, given.weights, given.routing).clone())
    return results


@pytest.mark.parametrize("part", [GATHERED, ALL2ALL])
def test_many_steps_with_random_numbers_of_tokens(pair: RankPool, part: str) -> None:
    wrong = pair.run(many_steps, Layer(part, (8, 8)))
    assert wrong == [[], []]


def many_steps(rank: int, world: int, group: object, layer: Layer, steps: int = 150) -> list[int]:
    """Alternate calls of the kernel and a plan; return the steps with a wrong output."""
    kernel, given = layer.kernel(rank, group), layer.inputs_of(rank)
    plan, exact = kernel.plan(), layer.exact()[layer.rows(rank)]
    drawn, wrong = random.Random(0), []
    for step in range(steps):
        counts = [drawn.choice((0, 1, drawn.randrange(9))) for _ in range(world)]
        mine = slice(0, counts[rank])
        weights_TK, ids_TK = given.routing.topk_weights_TK, given.routing.topk_ids_TK
        call = plan if step % 3 else kernel
        out = call(given.x_TH[mine], given.weights, Routing(weights_TK[mine], ids_TK[mine]))
        if not torch.allclose(out.double(), exact[mine], rtol=1e-5, atol=1e-5):
            wrong.append(step)
    return wrong


@pytest.mark.parametrize("part", [GATHERED, ALL2ALL])
def test_equal_input_gives_equal_bits(pool: RankPool, part: str) -> None:
    layer = Layer(part, tokens_of(part, pool.world_size)[0], fields={"dtype": BF16})
    once, again = pool.run(call_layer, layer), pool.run(call_layer, layer)
    for first, second in zip(once, again, strict=True):
        assert torch.equal(first[0], second[0])


def test_a_row_is_sent_once_to_each_rank_that_needs_it(pair: RankPool) -> None:
    """However many pairs of a token are on that rank; ranks without a pair get no row."""
    rows = pair.run(rows_sent, Layer(ALL2ALL, (3, 2), fields={"experts": 4, "top_k": 2}))
    assert rows == [((2, 2), (2, 2)), ((2, 1), (2, 1))]  # to and from each rank


def rows_sent(rank: int, world: int, group: object, layer: Layer) -> tuple:
    kernel, given = layer.kernel(rank, group), layer.inputs_of(rank)
    ids = [[[0, 1], [1, 2], [3, 2]], [[1, 2], [0, -1]]][rank]  # experts 0 and 1 are rank 0's
    topk_ids_TK = torch.tensor(ids, dtype=torch.int32)
    routing = replace(given.routing, topk_ids_TK=topk_ids_TK)
    _, handle = kernel.start(given.x_TH, given.weights, routing).receive()
    return handle.to_W, handle.from_W
