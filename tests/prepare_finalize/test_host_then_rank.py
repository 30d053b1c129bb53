"""HostThenRankPrepareAndFinalize: a row is sent once to each host, and errors name the cause.

MK_HOST_ID makes the ranks of one machine act as ranks of several hosts.
"""

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_fixtures import make_ranks_fixture
from test_ranks_on_hosts import in_memory, left_in_memory, made, simulated

from modular_kernel.catalog import check, make_kernel, this_machine
from modular_kernel.errors import CommunicationError, ModularKernelError
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.over_ranks import RankTrial, build_kernel
from prepare_finalize import HostThenRankGroup
from prepare_finalize.common.handshake import CallMetadata
from prepare_finalize.host_then_rank import part as module
from prepare_finalize.host_then_rank.counts import Geometry, check_counts

CPU = this_machine(device="cpu")
PART = "HostThenRankPrepareAndFinalize"
pytestmark = pytest.mark.cpu


four = make_ranks_fixture(4)


def case_of(routing: str, per_host: int) -> RankCase:
    """Return a smoke case of four ranks by its routing."""
    cases = rank_cases_for(PART, "TorchExperts", CPU, 4, ranks_per_host=per_host).cases
    return next(case for case in cases if case.routing == routing and any(case.tokens))


def crossings(
    rank: int, world: int, group: object, ids: str, case: RankCase
) -> tuple[Counter[str], int, str]:
    """Return the rows that this rank sent to ranks of other hosts, by phase, and the expected
    number.
    """
    simulated(rank, ids)
    crossed: Counter[str] = Counter()

    def build(of_rank: Any, machine: Machine, poison: bool) -> Any:
        kernel = build_kernel(of_rank, machine, poison, group)
        manager: Any = kernel.prepare_finalize.manager
        exchange, home = manager.all_to_all, manager.hosts.index_W

        def counted(
            out: Any, given: Any, *, input_splits: list[int], phase: str, **rest: Any
        ) -> Any:
            assert len(given) == sum(input_splits)
            away = (n for to, n in enumerate(input_splits) if home[to] != home[rank])
            crossed[phase] += sum(away)
            assert not any(n for to, n in enumerate(input_splits) if (to - rank) % ids.count("a"))
            return exchange(out, given, input_splits=input_splits, phase=phase, **rest)

        manager.all_to_all = counted
        return kernel

    trial = RankTrial(case, rank, CPU, build)
    problems = trial.first.compare(trial.eager_output).problems
    homes = {e: {r for r, _ in found} for e, found in enumerate(case.problem.placement.locations)}
    per_host = ids.count("a")
    wanted = 0
    for ids_K in trial.first.inputs.routing.topk_ids_TK.tolist():
        ranks = [homes.get(expert, set()) for expert in ids_K]
        hosts = {next(iter(each)) // per_host for each in ranks if len(each) == 1}
        assert all(len(each) < 2 for each in ranks)
        wanted += len(hosts - {rank // per_host})
    return crossed, wanted, "; ".join(problems)


@pytest.mark.parametrize(("ids", "per_host"), [("aabb", 2), ("abcd", 1)])
@pytest.mark.parametrize("routing", ["zipf", "skips", "all_to_one"])
def test_a_row_is_sent_once_to_each_host_and_returned_once(
    four: RankPool, ids: str, per_host: int, routing: str
) -> None:
    told = four.run(crossings, ids, case_of(routing, per_host))
    assert [problems for _, _, problems in told] == [""] * 4
    assert [crossed["dispatch"] for crossed, _, _ in told] == [wanted for _, wanted, _ in told]
    there, back = (sum(crossed[way] for crossed, _, _ in told) for way in ("dispatch", "combine"))
    assert there == back > 0


def test_within_one_host_the_network_is_not_used(four: RankPool) -> None:
    told = four.run(crossings, "aaaa", case_of("zipf", 4))
    assert [(dict(crossed), problems) for crossed, _, problems in told] == [({}, "")] * 4


def in_chunks(rank: int, world: int, group: object, ids: str, most: int) -> torch.Tensor:
    """Return the output of a call with rows sent in at most that many chunks."""
    simulated(rank, ids)
    module.HostThenRankPrepareAndFinalize.max_chunks = most
    case = case_of("skips", 2)
    trial = RankTrial(case, rank, CPU, lambda c, m, p: build_kernel(c, m, p, group))
    part: Any = trial.kernel.prepare_finalize
    assert part._geometry.chunks == most
    module.HostThenRankPrepareAndFinalize.max_chunks = 4
    return trial.eager_output


def test_chunks_change_no_bit(four: RankPool) -> None:
    one, two = (four.run(in_chunks, "aabb", most) for most in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("ids", "per_host", "told"),
    [
        ("aabb", 2, "made"),
        ("aaaa", None, "made"),
        ("abcd", 1, "made"),
        (
            "abab",
            None,
            "got 4 ranks on 2 hosts: 0, 2 on a; 1, 3 on b, need the same number of consecutive",
        ),
        ("aaab", None, "need the same number of consecutive ranks on each"),
        ("aabb", 1, "need 1 consecutive ranks on each (Parallel.ranks_per_host)"),
    ],
)
def test_supported_numbers_of_hosts(
    four: RankPool, ids: str, per_host: int | None, told: str
) -> None:
    answers = four.run(made, ids, PART, per_host)
    assert all(told in answer for answer in answers), answers


def test_too_many_ranks_per_host_are_refused() -> None:
    machine = Machine("cuda", (9, 0), frozenset({"triton"}))
    sizes = {"tokens": 8, "hidden": 512, "intermediate": 512, "experts": 32, "top_k": 2}
    for per_host, ok in ((8, True), (16, False), (None, False)):
        problem = Problem(**sizes, parallel=Parallel(16, ranks_per_host=per_host))
        verdict = check(PART, "TritonExperts", problem, machine)
        assert verdict.ok is ok
        assert ok or "ranks on a host, need at most 8" in str(verdict)
    graph = replace(problem, graph=True, parallel=Parallel(16, ranks_per_host=8))
    assert "[graph]" in str(check(PART, "TritonExperts", graph, machine))


def stays_away(rank: int, world: int, group: object, phase: str) -> tuple[str, float]:
    """Rank 1 is late for the exchange within its host."""
    simulated(rank, "aabb")
    manager = HostThenRankGroup(group, timeout_s=3.0)
    case = case_of("zipf", 2).of_rank(rank)
    kernel = make_kernel(PART, "TorchExperts", case.problem, group=manager)
    part: Any = kernel.prepare_finalize
    trial = RankTrial(case_of("zipf", 2), rank, CPU, lambda *_: kernel)
    if rank == 1:
        name = "_forward" if phase == "dispatch" else "finalize"
        usual = getattr(part, name)

        def late(*args: Any, **options: Any) -> Any:
            time.sleep(7)
            return usual(*args, **options)

        setattr(part, name, late)
    started = time.monotonic()
    try:
        assert trial.eager_output is not None
    except CommunicationError as error:
        return f"{error.peers} {error.phase} {error}", time.monotonic() - started
    return "whole", 0.0


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_rank_that_is_late_within_its_host_is_named_on_both_hosts(
    four: RankPool, phase: str
) -> None:
    told = four.run(stays_away, phase)
    for rank in (0, 2, 3):
        text, seconds = told[rank]
        assert text.startswith("(1,)"), told
        assert "rank 1: on host a" in text
        assert seconds < 6.5
    assert told[0][0].startswith(f"(1,) {phase}")
    assert told[1][0] != "whole"


def breaks(rank: int, world: int, group: object) -> tuple[str, float]:
    """The experts of rank 1 raise while the other ranks wait, one of them within its host."""
    simulated(rank, "aabb")
    case = case_of("zipf", 2)

    def raising(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    def build(of_rank: Any, machine: Machine, poison: bool) -> Any:
        kernel = build_kernel(of_rank, machine, poison, group)
        if rank == 1:
            kernel.experts.apply = raising  # type: ignore[method-assign]
        return kernel

    trial, started = RankTrial(case, rank, CPU, build), time.monotonic()
    try:
        assert trial.eager_output is not None
    except (ModularKernelError, RuntimeError) as error:
        return str(error), time.monotonic() - started
    return "whole", 0.0


def test_a_rank_waiting_within_its_host_raises_at_once_if_another_fails(four: RankPool) -> None:
    told = four.run(breaks)
    assert told[1][0] == "broken"
    for rank in (0, 2, 3):
        text, seconds = told[rank]
        assert "got aborted its call: RuntimeError" in text
        assert "peer 1)" in text
        assert seconds < 6


AT = Geometry(rank=1, world_size=4, ranks_per_host=2, chunks=2, tokens=3)


def counts_of(rank: int, *, tokens: int = 5) -> list[int]:
    """Return the counts of a rank whose tokens all go to the first rank of every host."""
    chunks = [min(tokens, 3), max(0, tokens - 3)]
    to_hosts = [count for count in chunks for _ in range(2)]
    return [*to_hosts, *(count if to % 2 == 0 else 0 for count in chunks for to in range(4))]


def test_exchanged_counts() -> None:
    rows = tuple(tuple(counts_of(rank)) for rank in range(4))
    way = check_counts(Any, CallMetadata(1, (5,) * 4, rows, 0.0), AT)  # type: ignore[arg-type]
    assert (way.sent, way.forwarded, way.received) == ([6, 4], [6, 4], 0)
    assert way.splits(0) == ([0, 3, 0, 3], [0, 3, 0, 3])
    assert (way.crosses_hosts, way.has_rows) == ([True, True], [True, True])
    # Rank 0 gets 6 and 6 rows of the first chunk, from itself and from this rank.
    assert way.write_bounds[:, 0].tolist() == [[6, 0], [12, 0]]
    assert way.write_bounds[:, 1].tolist() == [[16, 0], [20, 0]]
    assert way.max_rows_W == [20, 10, 20, 10]


@pytest.mark.parametrize("at", [0, 2, 4, 8])
def test_counts_that_exceed_the_tokens_of_a_chunk_are_refused(at: int) -> None:
    class Manager:
        @staticmethod
        def make_metadata_error(got: str, need: str, *, step: int, peers: list[int]) -> Exception:
            return ValueError(f"{peers} {need}")

    rows = [counts_of(rank) for rank in range(4)]
    rows[2][at] = 4
    agreed = CallMetadata(1, (5,) * 4, tuple(map(tuple, rows)), 0.0)
    with pytest.raises(ValueError, match=r"\[2\] no more than a chunk has tokens"):
        check_counts(Manager(), agreed, AT)  # type: ignore[arg-type]


def test_shared_memory_files_are_removed(four: RankPool) -> None:
    before = in_memory()
    four.run(made, "aabb", PART, 2)
    assert left_in_memory(before) == set()


def call_other_layer(rank: int, world: int, group: object, ids: str, other: str) -> tuple[str, int]:
    """Call another layer on rank 1 than on the others; return the error and the counts' number."""
    simulated(rank, ids)
    manager, kernels = HostThenRankGroup(group, timeout_s=5.0), []
    for part, tokens in ((PART, 4), (other, 9)):
        parallel = Parallel(world, "linear", rank, ranks_per_host=ids.count("a"))
        problem = Problem(
            tokens, 32, 16, experts=8, top_k=2, dtype=torch.float32, parallel=parallel
        )
        kernels.append((make_kernel(part, "TorchExperts", problem, group=manager), problem))

    def call(index: int) -> torch.Tensor:
        kernel, problem = kernels[index]
        x_TH, weights, routing = random_inputs(problem.with_tokens(3), torch.device("cpu"))
        return kernel(x_TH, weights, routing)

    try:
        call(rank == 1)
    except CommunicationError as error:
        assert all(bool(call(index).isfinite().all()) for index in (0, 1))
        return str(error), manager.max_counts
    return "", manager.max_counts


@pytest.mark.parametrize("other", [PART, "TorchAll2AllPrepareAndFinalize"])
def test_layers_with_another_number_of_counts_raise_on_every_rank(
    four: RankPool, other: str
) -> None:
    """A layer for decoding has fewer chunks than one for prefill."""
    for error, max_counts in four.run(call_other_layer, "aabb", other):
        assert "layer 1, 2, 1, 1 by rank" in error
        assert max_counts > 4


def call_after_a_failed_constructor(
    rank: int, world: int, group: object, ids: str
) -> tuple[str, bool]:
    """Make a layer with other sizes on some ranks, then call a good layer of the same manager."""
    simulated(rank, ids)
    manager = HostThenRankGroup(group, timeout_s=5.0)
    parallel = Parallel(world, "linear", rank, ranks_per_host=ids.count("a"))
    problem = Problem(3, 32, 16, experts=8, top_k=2, dtype=torch.float32, parallel=parallel)
    other = replace(problem, tokens=3 if rank % 2 else 11)
    with pytest.raises(CommunicationError) as caught:
        make_kernel(PART, "TorchExperts", other, group=manager)
    kernel = make_kernel("TorchAll2AllPrepareAndFinalize", "TorchExperts", problem, group=manager)
    out = kernel(*random_inputs(problem, torch.device("cpu")))
    return str(caught.value), bool(out.isfinite().all())


def test_a_failed_constructor_leaves_the_manager_usable(four: RankPool) -> None:
    for error, is_finite in four.run(call_after_a_failed_constructor, "aabb"):
        assert "ranks that share buffers" in error
        assert is_finite
