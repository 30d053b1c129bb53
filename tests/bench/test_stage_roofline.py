"""Work and rooflines of stages computed by hand, fused stages, and the load of a rank."""

from dataclasses import replace

import pytest
import torch

from modular_kernel.measure.roofline import Peaks, compute_roofline, compute_work, expert_bytes
from modular_kernel.measure.routing_patterns import Load
from modular_kernel.measure.stage_roofline import (
    RankLoad,
    StageWork,
    compute_stage_roofline,
    compute_stage_works,
)
from modular_kernel.profiling.inputs import load_of_rank
from modular_kernel.replay import stages
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.tensors import Routing

# T = 10, H = 32, I = 64 (N = 128), and K = 2. This rank has 18 pairs of 9 rows and reads 3 experts.
PROBLEM = Problem(tokens=10, hidden=32, intermediate=64, experts=4, top_k=2)
LOAD = RankLoad(tokens=10, rows=9, pairs=18, touched=3, out=4, back=6)
PEAKS = Peaks({"bfloat16": 1e12, "float8_e4m3fn": 2e12}, 1e9, 1e9, 1e9, "given")


def compute_works(*names: str, quant: str = "none") -> dict[str, StageWork]:
    problem = replace(PROBLEM, quant=quant)
    return compute_stage_works(names, problem, problem.scheme, LOAD)


def test_work_of_every_stage_equals_the_value_computed_by_hand() -> None:
    results = compute_works(*stages.STAGES)
    w1, w2 = 3 * 128 * 32 * 2, 3 * 32 * 64 * 2
    assert results == {
        stages.QUANTIZE_INPUT: StageWork(0, 10 * 64, 0, 10 * 32),
        stages.DISPATCH: StageWork(0, 10 * 32, 0, 9 * 32, 6 * 32),
        stages.SORT: StageWork(0, 10 * 2 * 4, 0, 18 * 4),
        stages.PERMUTE: StageWork(0, 9 * 32, 0, 18 * 32),
        stages.SHRINK: StageWork(),  # no adapters
        stages.GEMM1: StageWork(2 * 18 * 128 * 32, 18 * 32, w1, 18 * 128),
        stages.QUANTIZE: StageWork(0, 18 * 128, 0, 18 * 64),
        stages.GEMM2: StageWork(2 * 18 * 64 * 32, 18 * 64, w2, 18 * 64),
        stages.UNPERMUTE: StageWork(0, 18 * 64, 0, 18 * 64),
        stages.REDUCE: StageWork(0, 18 * 64, 0, 9 * 64),
        stages.COMBINE: StageWork(0, 9 * 64, 0, 10 * 64, 6 * 64),
    }


def test_gemms_read_the_output_of_the_previous_stage() -> None:
    """Permuted rows are read once per pair. Unquantized rows have the size of the dtype."""
    works = compute_works(stages.GEMM1, stages.GEMM2)
    assert (works[stages.GEMM1].read, works[stages.GEMM2].read) == (9 * 64, 18 * 128)
    works_with_permute = compute_works(stages.PERMUTE, stages.GEMM1)
    assert works_with_permute[stages.GEMM1].read == 18 * 64
    quantized = compute_works(stages.QUANTIZE_INPUT, stages.GEMM1, quant="fp8_w8a8_channel")
    assert quantized[stages.GEMM1].read == pytest.approx(9 * (32 + 4))
    assert quantized[stages.GEMM1].weights == 3 * 128 * 32


def test_fused_stage_has_no_intermediate_traffic() -> None:
    name = stages.fuse(stages.QUANTIZE, stages.GEMM2, stages.REDUCE)
    (work,) = compute_works(name).values()
    assert work == StageWork(2 * 18 * 64 * 32, 18 * 128, 3 * 32 * 64 * 2, 9 * 64)
    gathered = compute_works(stages.GATHER_GEMM1)[stages.GATHER_GEMM1]
    assert gathered.read == 9 * 64
    sent = compute_works(stages.QUANTIZE_DISPATCH, quant="fp8_w8a8_channel")[
        stages.QUANTIZE_DISPATCH
    ]
    assert sent == StageWork(0, 10 * 64, 0, 9 * 36, 6 * 36)


def test_rows_that_experts_quantize_are_dispatched_unquantized() -> None:
    quantize_and_gemm1 = stages.fuse(stages.QUANTIZE_INPUT, stages.GEMM1)
    computed = compute_works(
        stages.DISPATCH, stages.PERMUTE, quantize_and_gemm1, quant="fp8_w8a8_channel"
    )
    assert computed[stages.DISPATCH] == StageWork(0, 10 * 64, 0, 9 * 64, 6 * 64)
    assert computed[stages.PERMUTE] == StageWork(0, 9 * 64, 0, 18 * 64)


def test_unknown_stages_have_no_work() -> None:
    assert compute_works("mk::mine", stages.fuse(stages.GEMM2, "mk::mine"), stages.EXPERTS) == {}


def test_floor_is_the_maximum_of_three_limits() -> None:
    def floor(work: StageWork, link: float | None = None) -> tuple[float, str]:
        roofline = compute_stage_roofline(work, PROBLEM, PROBLEM.scheme, PEAKS, link)
        return roofline.us, roofline.bound

    assert floor(StageWork(flops=3e6, read=1e3, weights=5e2, written=4e2)) == (3.0, "compute")
    assert floor(StageWork(read=1e3, weights=5e2, written=4e2)) == (pytest.approx(1.9), "memory")
    moved = StageWork(read=1e3, link=4e3)
    assert floor(moved) == (pytest.approx(1.0), "memory")
    assert floor(moved, 1e9) == (pytest.approx(4.0), "link")


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block", "int4_w4a16_group", "mxfp4_w4a16"])
def test_stage_work_sums_to_the_work_of_the_layer(quant: str) -> None:
    """The sums over stages equal the weights and flops of the roofline of the whole layer."""
    problem = replace(PROBLEM, quant=quant, bias=True)
    scheme = problem.scheme
    results = compute_stage_works((stages.GEMM1, stages.GEMM2), problem, scheme, LOAD)
    layer_work = compute_work(problem, scheme, [Load(18, 3, 1.0)])
    assert sum(work.flops for work in results.values()) == layer_work.flops
    weights = sum(work.weights for work in results.values())
    assert weights == pytest.approx(3 * expert_bytes(problem, scheme))
    assert compute_roofline(layer_work, problem, scheme, PEAKS).us > 0


def test_received_and_sent_rows_equal_those_counted_by_hand() -> None:
    """Experts 0 and 1 are on rank 0, and experts 2 and 3 on rank 1."""
    ids_by_rank = ([[0, 1], [0, 2], [2, 3], [-1, 3]], [[0, 2], [2, 3], [1, 0]])
    routings = [Routing(torch.ones(len(ids), 2), torch.tensor(ids)) for ids in ids_by_rank]
    problem = replace(PROBLEM, tokens=4, parallel=Parallel(2))
    loads = [
        load_of_rank(routings, replace(problem, parallel=Parallel(2, rank=rank)), replicated=False)
        for rank in (0, 1)
    ]
    assert loads[0] == RankLoad(tokens=4, rows=4, pairs=6, touched=2, out=3, back=2)
    assert loads[1] == RankLoad(tokens=3, rows=5, pairs=7, touched=2, out=2, back=3)
    replicated = load_of_rank([routings[0]] * 2, problem, replicated=True)
    assert replicated == RankLoad(tokens=4, rows=2, pairs=3, touched=2, out=0, back=4)


def test_copies_of_an_expert_are_used_in_turn() -> None:
    """Expert 0 is on both ranks. Each rank keeps the row of its first token."""
    routing = Routing(torch.ones(1, 1), torch.tensor([[0]]))
    placement = Placement(((0, 1), (0, 2)))
    problem = Problem(tokens=1, hidden=32, intermediate=32, experts=3, top_k=1)
    for rank in (0, 1):
        rank_problem = replace(problem, parallel=Parallel(2, placement, rank))
        load = load_of_rank([routing, routing], rank_problem, replicated=False)
        assert load == RankLoad(tokens=1, rows=1, pairs=1, touched=1)
