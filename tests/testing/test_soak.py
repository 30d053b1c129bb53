"""The soak over ranks: it finds a wrong output, a leak and a raise, and all ranks stop together."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing.ranks.pool import RankError, RankPool
from modular_kernel.testing.stress.soak import Soak, soak
from modular_kernel.testing.stress.soak_inputs import (
    SoakInputs,
    SoakInputSource,
    compare_with_oracle,
)
from prepare_finalize import TorchAll2AllPrepareAndFinalize

Pool = Callable[[int], RankPool]
SHORT = Soak("TorchAll2AllPrepareAndFinalize", steps=40, check_every=5, hidden=32, tokens=5)
BAD_STEP = 20


class Faulty(TorchAll2AllPrepareAndFinalize):
    """Counts its calls; from one on, what a subclass says happens on rank 1."""

    calls = 0

    def prepare(self, *args, **options):
        raise NotImplementedError

    def prepare_no_receive(self, *args, **options):
        self.calls += 1
        if self.calls == BAD_STEP and self.problem.parallel.rank == 1:
            self.begin()
        return super().prepare_no_receive(*args, **options)

    def begin(self):
        raise ValueError("enough")


class Leaks(Faulty):
    """Keeps 48 MiB: so much comes from the system at once, never from what was freed before."""

    def begin(self):
        self.kept = torch.ones(12 << 20)


class LosesARow(Faulty):
    """The last row of an output is a hundredth too large."""

    def begin(self):
        self.wrong = True

    def finalize(self, expert_output, *, handle, reduce, out):
        super().finalize(expert_output, handle=handle, reduce=reduce, out=out)
        if hasattr(self, "wrong") and len(out):
            out[-1] *= 1.1


def test_a_sound_part_is_found_sound(rank_pool: Pool) -> None:
    first, second = rank_pool(2).run(soak, SHORT)
    assert first.findings == second.findings == ()
    assert first.steps == second.steps == 40
    assert first.checked == 8
    assert first.modes == second.modes
    assert sum(first.modes.values()) == 40
    assert 0 < first.worst < 1
    assert str(first).startswith("40 steps (")


def test_time_ends_it_on_all_ranks_at_once(rank_pool: Pool) -> None:
    first, second = rank_pool(2).run(soak, replace(SHORT, steps=10**6, seconds=0.3))
    assert first.steps == second.steps < 10**5
    assert 0.3 <= first.seconds < 3


def test_a_wrong_row_on_one_rank(rank_pool: Pool) -> None:
    first, second = rank_pool(2).run(soak, replace(SHORT, part=LosesARow, steps=10_000))
    assert first.findings == ()
    assert first.steps == second.steps < 1000  # five findings are enough
    assert second.findings[0].startswith(f"step {BAD_STEP}")
    assert "1 rows far off" in second.findings[0]


def test_memory_that_grows(rank_pool: Pool) -> None:
    job = replace(SHORT, part=Leaks, rss_bytes=16 << 20)
    first, second = rank_pool(2).run(soak, job)
    assert first.findings == ()
    (finding,) = second.findings
    assert finding.startswith("bytes of the process grew by ")


def test_a_raise_is_told_with_its_step(rank_pool: Pool) -> None:
    with pytest.raises(RankError, match=f"at step {BAD_STEP} of the soak, by "):
        rank_pool(2).run(soak, replace(SHORT, part=Faulty))


@pytest.fixture
def scenes() -> list[SoakInputSource]:
    """Of both ranks."""
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


def test_ranks_draw_the_same_world_and_each_its_part_of_it(scenes: list[SoakInputSource]) -> None:
    sizes = []
    for _ in range(50):
        first, second = (each.draw_inputs() for each in scenes)
        assert torch.equal(first.global_inputs.x_TH, second.global_inputs.x_TH)
        assert first.tokens_W == second.tokens_W
        assert torch.equal(torch.cat([first.x_TH, second.x_TH]), first.global_inputs.x_TH)
        sizes += first.tokens_W
        again, _ = (each.draw_inputs(first.tokens_W) for each in scenes)
        assert again.tokens_W == first.tokens_W
        first.refill(again)
        assert torch.equal(first.x_TH, again.global_inputs.x_TH[again.local_tokens])
    assert set(sizes) == set(range(9))
    assert any(int((scene.routing.topk_ids_TK == -1).sum()) for scene in _many(scenes[0]))


def _many(source: SoakInputSource) -> list[SoakInputs]:
    return [source.draw_inputs() for _ in range(20)]


def test_what_is_judged_wrong(scenes: list[SoakInputSource]) -> None:
    from modular_kernel.testing.verify.over_ranks import recipe_over_ranks

    problem = scenes[0].problem
    scene = scenes[0].draw_inputs((5, 3))
    good = recipe_over_ranks(scene.global_inputs, problem)[:5].to(problem.dtype)
    share, wrong = compare_with_oracle(scene, good, problem)
    assert (share < 0.6, wrong) == (True, "")
    for spoil in (lambda out: out[4].mul_(1.05), lambda out: out[2].fill_(float("nan"))):
        out = good.clone()
        spoil(out)
        assert compare_with_oracle(scene, out, problem)[1]
    assert compare_with_oracle(scene, good[:4], problem)[1]
    many = replace(problem, tokens=64)
    source = SoakInputSource(
        many, torch.device("cpu"), random.Random(3), replicated=False, ids_dtype=torch.int64
    )
    scene_of_many = source.draw_inputs((64, 0))
    out = recipe_over_ranks(scene_of_many.global_inputs, many).to(many.dtype)
    assert compare_with_oracle(scene_of_many, out, many)[1] == ""
    out[9] *= 1.04  # a small part of all
    assert compare_with_oracle(scene_of_many, out, many)[1].endswith("1 rows far off")
    swapped = good[[1, 0, 2, 3, 4]]
    assert compare_with_oracle(scene, swapped, problem)[0] > 10
