"""The soak test over ranks (many random calls of one layer) detects wrong outputs, leaks and
exceptions on any rank.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing.ranks.pool import RankError, RankPool
from modular_kernel.testing.stress.soak import Soak, run_soak
from modular_kernel.testing.stress.soak_inputs import (
    SoakInputs,
    SoakInputSource,
    compare_with_float64_reference,
)
from prepare_finalize import TorchAll2AllPrepareAndFinalize

PoolFactory = Callable[[int], RankPool]
SHORT = Soak("TorchAll2AllPrepareAndFinalize", steps=40, check_every=5, hidden=32, tokens=5)
BAD_STEP = 20


class Faulty(TorchAll2AllPrepareAndFinalize):
    """Calls `fail` on rank 1 at step BAD_STEP. Subclasses override it."""

    calls = 0

    def prepare(self, *args, **options):
        raise NotImplementedError

    def prepare_no_receive(self, *args, **options):
        self.calls += 1
        if self.calls == BAD_STEP and self.problem.parallel.rank == 1:
            self.fail()
        return super().prepare_no_receive(*args, **options)

    def fail(self):
        raise ValueError("enough")


class Leaks(Faulty):
    """Leaks 48 MiB. malloc maps a block of this size, so the memory of the process grows."""

    def fail(self):
        self.leaked = torch.ones(12 << 20)


class FailsWithOneDnn(Faulty):
    """Raises an error if oneDNN is enabled, whose cache grows with new shapes."""

    def fail(self):
        if torch.backends.mkldnn.enabled:
            raise ValueError("oneDNN is enabled")


class WrongLastRow(Faulty):
    """Returns a last row that is 10 % too large."""

    def fail(self):
        self.is_wrong = True

    def finalize(self, expert_output, *, handle, reduce, out):
        super().finalize(expert_output, handle=handle, reduce=reduce, out=out)
        if hasattr(self, "is_wrong") and len(out):
            out[-1] *= 1.1


def test_a_correct_part_passes(rank_pool: PoolFactory) -> None:
    first, second = rank_pool(2).run(run_soak, SHORT)
    assert first.findings == second.findings == ()
    assert first.steps == second.steps == 40
    assert first.checked_outputs == 8
    assert first.modes == second.modes
    assert sum(first.modes.values()) == 40
    assert 0 < first.worst < 1
    assert str(first).startswith("40 steps (")
    assert [step for step, *_ in first.resources] == [5, 10, 20, 30, 40]
    assert first.rss_growth == first.resources[-1][2] - first.resources[0][2]
    assert first.format_resources().startswith("step 5: ")


def test_the_time_limit_stops_all_ranks_at_the_same_step(rank_pool: PoolFactory) -> None:
    first, second = rank_pool(2).run(run_soak, replace(SHORT, steps=10**6, seconds=0.3))
    assert first.steps == second.steps < 10**5
    assert 0.3 <= first.seconds < 3


def test_a_wrong_row_on_one_rank_is_found(rank_pool: PoolFactory) -> None:
    first, second = rank_pool(2).run(run_soak, replace(SHORT, part=WrongLastRow, steps=10_000))
    assert first.findings == ()
    assert first.steps == second.steps < 1000  # the soak test stops after five findings
    assert second.findings[0].startswith(f"step {BAD_STEP}")
    assert "1 rows have an error above the bound of a row" in second.findings[0]


def test_a_memory_leak_is_found(rank_pool: PoolFactory) -> None:
    job = replace(SHORT, part=Leaks, rss_bytes=16 << 20)
    first, second = rank_pool(2).run(run_soak, job)
    assert first.findings == ()
    (finding,) = second.findings
    assert finding.startswith("bytes of the process grew by ")


def is_one_dnn_enabled(rank: int, world: int, group: object) -> bool:
    return torch.backends.mkldnn.enabled


def test_one_dnn_is_disabled_in_the_soak_only(rank_pool: PoolFactory) -> None:
    pool = rank_pool(2)
    assert all(not r.findings for r in pool.run(run_soak, replace(SHORT, part=FailsWithOneDnn)))
    assert pool.run(is_one_dnn_enabled) == [True, True]


def test_an_exception_is_reported_with_its_step(rank_pool: PoolFactory) -> None:
    with pytest.raises(RankError, match=f"at step {BAD_STEP} of the soak, by "):
        rank_pool(2).run(run_soak, replace(SHORT, part=Faulty))


@pytest.fixture
def sources() -> list[SoakInputSource]:
    """Return the input sources of both ranks."""
    return [
        SoakInputSource(
            Problem(8, 32, 16, 8, 2, parallel=Parallel(2, rank=rank)),
            torch.device("cpu"),
            random.Random(3),
            replicated=False,
            ids_dtype=torch.int64,
        )
        for rank in (0, 1)
    ]


def test_ranks_draw_slices_of_the_same_inputs(sources: list[SoakInputSource]) -> None:
    sizes = []
    for _ in range(50):
        first, second = (source.draw_inputs() for source in sources)
        assert torch.equal(first.global_inputs.x_TH, second.global_inputs.x_TH)
        assert first.tokens_W == second.tokens_W
        assert torch.equal(torch.cat([first.x_TH, second.x_TH]), first.global_inputs.x_TH)
        sizes += first.tokens_W
        redrawn, _ = (source.draw_inputs(first.tokens_W) for source in sources)
        assert redrawn.tokens_W == first.tokens_W
        first.refill(redrawn)
        assert torch.equal(first.x_TH, redrawn.global_inputs.x_TH[redrawn.local_tokens])
    assert set(sizes) == set(range(9))
    assert any(
        int((inputs.routing.topk_ids_TK == -1).sum()) for inputs in _draw_repeatedly(sources[0])
    )


def _draw_repeatedly(source: SoakInputSource) -> list[SoakInputs]:
    return [source.draw_inputs() for _ in range(20)]


def test_compare_with_float64_reference_finds_wrong_rows(sources: list[SoakInputSource]) -> None:
    from modular_kernel.testing.verify.over_ranks import compute_rounded_reference

    problem = sources[0].problem
    inputs = sources[0].draw_inputs((5, 3))
    correct = compute_rounded_reference(inputs.global_inputs, problem)[:5].to(problem.dtype)
    error_ratio, message = compare_with_float64_reference(inputs, correct, problem)
    assert (error_ratio < 0.6, message) == (True, "")
    for corrupt in (lambda out: out[4].mul_(1.05), lambda out: out[2].fill_(float("nan"))):
        out = correct.clone()
        corrupt(out)
        assert compare_with_float64_reference(inputs, out, problem)[1]
    assert compare_with_float64_reference(inputs, correct[:4], problem)[1]
    larger_problem = replace(problem, tokens=64)
    source = SoakInputSource(
        larger_problem,
        torch.device("cpu"),
        random.Random(3),
        replicated=False,
        ids_dtype=torch.int64,
    )
    many_inputs = source.draw_inputs((64, 0))
    out = compute_rounded_reference(many_inputs.global_inputs, larger_problem).to(
        larger_problem.dtype
    )
    assert compare_with_float64_reference(many_inputs, out, larger_problem)[1] == ""
    # One wrong row of 64 is too little for the error of the output, so only the row bound finds it.
    out[9] *= 1.04
    assert compare_with_float64_reference(many_inputs, out, larger_problem)[1].endswith(
        "1 rows have an error above the bound of a row"
    )
    swapped = correct[[1, 0, 2, 3, 4]]
    assert compare_with_float64_reference(inputs, swapped, problem)[0] > 10
