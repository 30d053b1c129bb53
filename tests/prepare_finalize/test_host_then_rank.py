"""HostThenRankPrepareAndFinalize: a row is sent once to each host, and errors name the cause.
MK_HOST_ID simulates several hosts on one machine.
"""

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_fixtures import make_ranks_fixture
from test_ranks_on_hosts import list_shared_memory_files, make_part, set_host_id, wait_for_removal

from modular_kernel.catalog import check, make_kernel, this_machine
from modular_kernel.errors import CommunicationError, ModularKernelError
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.over_ranks import RankTrial, build_kernel
from prepare_finalize import HostThenRankGroup
from prepare_finalize.common.handshake import CallMetadata
from prepare_finalize.host_then_rank import part as part_module
from prepare_finalize.host_then_rank.counts import Geometry, check_counts

CPU = this_machine(device="cpu")
PART = "HostThenRankPrepareAndFinalize"
pytestmark = pytest.mark.cpu


four = make_ranks_fixture(4)


def find_case(routing: str, per_host: int) -> RankCase:
    """Return a smoke case of four ranks with this routing."""
    cases = rank_cases_for(PART, "TorchExperts", CPU, 4, ranks_per_host=per_host).cases
    return next(case for case in cases if case.routing == routing and any(case.tokens))


def count_rows_between_hosts(
    rank: int, world: int, group: object, ids: str, case: RankCase
) -> tuple[Counter[str], int, str]:
    """Count the rows that this rank sends to other hosts.
    Return the numbers by phase, the expected number, and the differences of the output.
    """
    set_host_id(rank, ids)
    num_sent: Counter[str] = Counter()

    def build(rank_case: Any, machine: Machine, poison: bool) -> Any:
        kernel = build_kernel(rank_case, machine, poison, group)
        manager: Any = kernel.prepare_finalize.manager
        exchange, host_of_rank = manager.all_to_all, manager.hosts.index_W

        def count_and_exchange(
            out: Any, rows: Any, *, input_splits: list[int], phase: str, **options: Any
        ) -> Any:
            assert len(rows) == sum(input_splits)
            counts_to_other_hosts = (
                n
                for receiver, n in enumerate(input_splits)
                if host_of_rank[receiver] != host_of_rank[rank]
            )
            num_sent[phase] += sum(counts_to_other_hosts)
            assert not any(
                n for receiver, n in enumerate(input_splits) if (receiver - rank) % ids.count("a")
            )
            return exchange(out, rows, input_splits=input_splits, phase=phase, **options)

        manager.all_to_all = count_and_exchange
        return kernel

    trial = RankTrial(case, rank, CPU, build)
    problems = trial.first.compare(trial.eager_output).problems
    ranks_of_expert = {
        e: {r for r, _ in locations} for e, locations in enumerate(case.problem.placement.locations)
    }
    per_host = ids.count("a")
    expected_rows = 0
    for ids_K in trial.first.inputs.routing.topk_ids_TK.tolist():
        ranks = [ranks_of_expert.get(expert, set()) for expert in ids_K]
        hosts = {next(iter(copies)) // per_host for copies in ranks if len(copies) == 1}
        assert all(len(copies) < 2 for copies in ranks)
        expected_rows += len(hosts - {rank // per_host})
    return num_sent, expected_rows, "; ".join(problems)


@pytest.mark.parametrize(("ids", "per_host"), [("aabb", 2), ("abcd", 1)])
@pytest.mark.parametrize("routing", ["zipf", "skips", "all_to_one"])
def test_a_row_is_sent_once_to_each_host_and_returned_once(
    four: RankPool, ids: str, per_host: int, routing: str
) -> None:
    reports = four.run(count_rows_between_hosts, ids, find_case(routing, per_host))
    assert [problems for _, _, problems in reports] == [""] * 4
    assert [num_sent["dispatch"] for num_sent, _, _ in reports] == [
        expected_rows for _, expected_rows, _ in reports
    ]
    dispatched, combined = (
        sum(num_sent[phase] for num_sent, _, _ in reports) for phase in ("dispatch", "combine")
    )
    assert dispatched == combined > 0


def test_no_rows_are_sent_between_hosts_within_one_host(four: RankPool) -> None:
    reports = four.run(count_rows_between_hosts, "aaaa", find_case("zipf", 4))
    assert [(dict(num_sent), problems) for num_sent, _, problems in reports] == [({}, "")] * 4


def call_with_chunks(
    rank: int, world: int, group: object, ids: str, max_chunks: int
) -> torch.Tensor:
    """Return the output of a call with this number of chunks."""
    set_host_id(rank, ids)
    part_module.HostThenRankPrepareAndFinalize.max_chunks = max_chunks
    case = find_case("skips", 2)
    trial = RankTrial(case, rank, CPU, lambda c, m, p: build_kernel(c, m, p, group))
    part: Any = trial.kernel.prepare_finalize
    assert part._geometry.chunks == max_chunks
    part_module.HostThenRankPrepareAndFinalize.max_chunks = 4
    return trial.eager_output


def test_outputs_do_not_depend_on_the_number_of_chunks(four: RankPool) -> None:
    one_chunk, two_chunks = (
        four.run(call_with_chunks, "aabb", max_chunks) for max_chunks in (1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one_chunk, two_chunks, strict=True))


@pytest.mark.parametrize(
    ("ids", "per_host", "message"),
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
def test_unequal_or_interleaved_hosts_are_refused(
    four: RankPool, ids: str, per_host: int | None, message: str
) -> None:
    messages = four.run(make_part, ids, PART, per_host)
    assert all(message in text for text in messages), messages


def test_too_many_ranks_per_host_are_refused() -> None:
    machine = Machine("cuda", (9, 0), frozenset({"triton"}))
    sizes = {"tokens": 8, "hidden": 512, "intermediate": 512, "experts": 32, "top_k": 2}
    for per_host, ok in ((8, True), (16, False), (None, False)):
        problem = Problem(**sizes, parallel=Parallel(16, ranks_per_host=per_host))
        verdict = check(PART, "TritonExperts", problem, machine)
        assert verdict.ok is ok
        assert ok or "ranks on a host, need at most 8" in str(verdict)
    graph = replace(problem, graph=True, parallel=Parallel(16, ranks_per_host=8))
    assert check(PART, "TritonExperts", graph, machine).ok


def call_with_late_rank(rank: int, world: int, group: object, phase: str) -> tuple[str, float]:
    """Make rank 1 late for the exchange within its host. Return the error and the seconds."""
    set_host_id(rank, "aabb")
    manager = HostThenRankGroup(group, timeout_s=3.0)
    case = find_case("zipf", 2).of_rank(rank)
    kernel = make_kernel(PART, "TorchExperts", case.problem, group=manager)
    part: Any = kernel.prepare_finalize
    trial = RankTrial(find_case("zipf", 2), rank, CPU, lambda *_: kernel)
    if rank == 1:
        name = "_forward" if phase == "dispatch" else "finalize"
        original = getattr(part, name)

        def sleep_and_call(*args: Any, **options: Any) -> Any:
            time.sleep(7)
            return original(*args, **options)

        setattr(part, name, sleep_and_call)
    start_time = time.monotonic()
    try:
        assert trial.eager_output is not None
    except CommunicationError as error:
        return f"{error.peers} {error.phase} {error}", time.monotonic() - start_time
    return "no error", 0.0


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_rank_that_is_late_within_its_host_is_named_on_both_hosts(
    four: RankPool, phase: str
) -> None:
    reports = four.run(call_with_late_rank, phase)
    for rank in (0, 2, 3):
        message, seconds = reports[rank]
        assert message.startswith("(1,)"), reports
        assert "rank 1: on host a" in message
        assert seconds < 6.5
    assert reports[0][0].startswith(f"(1,) {phase}")
    assert reports[1][0] != "no error"


def call_with_broken_rank(rank: int, world: int, group: object) -> tuple[str, float]:
    """Let the experts of rank 1 raise. Return the error and the seconds until it is raised."""
    set_host_id(rank, "aabb")
    case = find_case("zipf", 2)

    def raise_error(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    def build(rank_case: Any, machine: Machine, poison: bool) -> Any:
        kernel = build_kernel(rank_case, machine, poison, group)
        if rank == 1:
            kernel.experts.apply = raise_error  # type: ignore[method-assign]
        return kernel

    trial, start_time = RankTrial(case, rank, CPU, build), time.monotonic()
    try:
        assert trial.eager_output is not None
    except (ModularKernelError, RuntimeError) as error:
        return str(error), time.monotonic() - start_time
    return "no error", 0.0


def test_a_rank_waiting_within_its_host_raises_at_once_if_another_fails(four: RankPool) -> None:
    reports = four.run(call_with_broken_rank)
    assert reports[1][0] == "broken"
    for rank in (0, 2, 3):
        message, seconds = reports[rank]
        assert "got aborted its call: RuntimeError" in message
        assert "peer 1)" in message
        assert seconds < 6


GEOMETRY = Geometry(rank=1, world_size=4, ranks_per_host=2, chunks=2, tokens=3)


def make_counts(rank: int, *, tokens: int = 5) -> list[int]:
    """Return the counts of a rank that sends all tokens to the first rank of every host."""
    chunks = [min(tokens, 3), max(0, tokens - 3)]
    to_hosts = [count for count in chunks for _ in range(2)]
    return [
        *to_hosts,
        *(count if receiver % 2 == 0 else 0 for count in chunks for receiver in range(4)),
    ]


def test_check_counts_computes_splits_and_bounds() -> None:
    rows = tuple(tuple(make_counts(rank)) for rank in range(4))
    way = check_counts(Any, CallMetadata(1, (5,) * 4, rows, 0.0), GEOMETRY)  # type: ignore[arg-type]
    assert (way.sent, way.forwarded, way.received) == ([6, 4], [6, 4], 0)
    assert way.splits(0) == ([0, 3, 0, 3], [0, 3, 0, 3])
    assert (way.crosses_hosts, way.has_rows) == ([True, True], [True, True])
    # Rank 0 gets 6 rows of the first chunk from itself, and 6 from this rank.
    assert way.write_bounds[:, 0].tolist() == [[6, 0], [12, 0]]
    assert way.write_bounds[:, 1].tolist() == [[16, 0], [20, 0]]
    assert way.max_rows_W == [20, 10, 20, 10]


@pytest.mark.parametrize("column", [0, 2, 4, 8])
def test_counts_that_exceed_the_tokens_of_a_chunk_are_refused(column: int) -> None:
    class Manager:
        @staticmethod
        def make_metadata_error(got: str, need: str, *, step: int, peers: list[int]) -> Exception:
            return ValueError(f"{peers} {need}")

    rows = [make_counts(rank) for rank in range(4)]
    rows[2][column] = 4
    metadata = CallMetadata(1, (5,) * 4, tuple(map(tuple, rows)), 0.0)
    with pytest.raises(ValueError, match=r"\[2\] no more than a chunk has tokens"):
        check_counts(Manager(), metadata, GEOMETRY)  # type: ignore[arg-type]


def test_shared_memory_files_are_removed(four: RankPool) -> None:
    files_before = list_shared_memory_files()
    four.run(make_part, "aabb", PART, 2)
    assert wait_for_removal(files_before) == set()


def call_other_layer(
    rank: int, world: int, group: object, ids: str, other_part: str
) -> tuple[str, int]:
    """Call a different layer on rank 1. Return the error and `max_counts`."""
    set_host_id(rank, ids)
    manager, kernels = HostThenRankGroup(group, timeout_s=5.0), []
    for part, tokens in ((PART, 4), (other_part, 9)):
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


@pytest.mark.parametrize("other_part", [PART, "TorchAll2AllPrepareAndFinalize"])
def test_layers_with_another_number_of_counts_raise_on_every_rank(
    four: RankPool, other_part: str
) -> None:
    """A layer for decode has fewer chunks than a layer for prefill."""
    for error, max_counts in four.run(call_other_layer, "aabb", other_part):
        assert "layer 1, 2, 1, 1 by rank" in error
        assert max_counts > 4


def call_after_a_failed_constructor(
    rank: int, world: int, group: object, ids: str
) -> tuple[str, bool]:
    """Make a layer whose sizes differ between ranks, then call a valid layer with the manager."""
    set_host_id(rank, ids)
    manager = HostThenRankGroup(group, timeout_s=5.0)
    parallel = Parallel(world, "linear", rank, ranks_per_host=ids.count("a"))
    problem = Problem(3, 32, 16, experts=8, top_k=2, dtype=torch.float32, parallel=parallel)
    unequal_problem = replace(problem, tokens=3 if rank % 2 else 11)
    with pytest.raises(CommunicationError) as exc_info:
        make_kernel(PART, "TorchExperts", unequal_problem, group=manager)
    kernel = make_kernel("TorchAll2AllPrepareAndFinalize", "TorchExperts", problem, group=manager)
    out = kernel(*random_inputs(problem, torch.device("cpu")))
    return str(exc_info.value), bool(out.isfinite().all())


def test_a_failed_constructor_leaves_the_manager_usable(four: RankPool) -> None:
    for error, is_finite in four.run(call_after_a_failed_constructor, "aabb"):
        assert "ranks that share buffers" in error
        assert is_finite
