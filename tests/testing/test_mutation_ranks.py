"""Source mutants of parts over ranks, which are applied in new processes of the ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from ep_layers import ALL2ALL, GATHERED

from modular_kernel.catalog import this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.mutation import (
    Coverage,
    Mutant,
    MutantOutcome,
    OneProcess,
    Survey,
    run_mutant,
    survey,
)
from modular_kernel.testing.mutation.bitwise_equivalence import compare_bits, draw_problems
from modular_kernel.testing.mutation.coverage import CaseCoverage
from modular_kernel.testing.mutation.defects import read_defects
from modular_kernel.testing.mutation.over_ranks import OverRanks, Ranks
from modular_kernel.testing.mutation.record import format_reproducer

ROOT = Path(__file__).resolve().parents[2]
MODULE = "prepare_finalize.collectives.all_gather"
MODULE_FILE = "prepare_finalize/collectives/all_gather.py"
PAIR = ("AllGatherReduceScatterPrepareAndFinalize", "TorchExperts")
BATCHED_PAIR = ("TorchAll2AllBatchedPrepareAndFinalize", "NaiveBatchedExperts")
SYMMETRIC = "SymmMemPrepareAndFinalize"
BY_HOSTS = "HostThenRankPrepareAndFinalize"
BACKEND = OverRanks(2)


@pytest.fixture(scope="module")
def coverage() -> Coverage:
    """Return the coverage of three smoke cases: the first two and the last."""
    full = BACKEND.cover({MODULE: ROOT / MODULE_FILE}, (PAIR,), "smoke")
    assert full.error == ""
    assert len(full.cases) == 13
    return replace(full, cases=(*full.cases[:2], full.cases[-1]))


def make_mutant(old: str, new: str, folder: Path, file: str = MODULE_FILE) -> Mutant:
    """Return a mutant that replaces `old` with `new`. `folder` is used for temporary files."""
    defect_file = folder / "defect.json"
    entry = {"what": "a change", "file": file, "old": old, "new": new}
    defect_file.write_text(json.dumps([entry]), encoding="utf-8")
    (defect,) = read_defects(defect_file, ROOT)
    return defect.mutant


def run_mutant_on_cases(old: str, new: str, coverage: Coverage, folder: Path) -> MutantOutcome:
    """Run the cases with the mutant that replaces `old` with `new`."""
    return run_mutant(make_mutant(old, new, folder), coverage, (PAIR,), "smoke", backend=BACKEND)


def test_a_sum_without_the_last_rank_is_killed(coverage: Coverage, tmp_path: Path) -> None:
    outcome = run_mutant_on_cases(
        "in partial_sums.view(world, -1, hidden):",
        "in partial_sums.view(world, -1, hidden)[:-1]:",
        coverage,
        tmp_path,
    )
    assert outcome.status == "killed"
    # The durations of cases determine their order, and so the first comparison that fails.
    assert outcome.finding.startswith("numeric")
    assert "(rank " in outcome.finding


def test_a_rank_that_skips_an_exchange_is_a_hang(coverage: Coverage, tmp_path: Path) -> None:
    outcome = run_mutant_on_cases(
        "        if max_tokens:\n", "        if max_tokens and manager.rank:\n", coverage, tmp_path
    )
    assert outcome.status == "hang", outcome
    assert outcome.seconds < 25


def test_a_rank_that_exits_is_a_crash(coverage: Coverage, tmp_path: Path) -> None:
    exit_lines = "        if manager.rank:\n            import os\n            os._exit(3)\n"
    outcome = run_mutant_on_cases(
        "        if max_tokens:\n", f"{exit_lines}        if max_tokens:\n", coverage, tmp_path
    )
    assert outcome.status == "crash", outcome
    assert "exit code 3" in outcome.finding


def test_ranks_decide_whether_a_case_is_refused() -> None:
    """A mutant may weaken a rule, so the case must reach the ranks even if this process refuses
    it.
    """
    machine = this_machine(device="cpu")
    case, verdict = rank_cases_for(*BATCHED_PAIR, machine, 2, "full").refused[0]
    assert not verdict.ok
    with Ranks(2, None) as ranks:
        failure, _ = ranks.run_until_failure(case, machine)
    assert failure is not None
    assert failure.startswith("refused: ")
    assert "(rank " in failure


def test_an_equivalent_mutant_survives_every_case(coverage: Coverage, tmp_path: Path) -> None:
    outcome = run_mutant_on_cases(
        "max_tokens = max(metadata.tokens_W)",
        "max_tokens = max(*metadata.tokens_W)",
        coverage,
        tmp_path,
    )
    assert (outcome.status, outcome.num_cases, outcome.differing) == ("survived", 3, 0)
    mutant = make_mutant(
        "max_tokens = max(metadata.tokens_W)", "max_tokens = max(*metadata.tokens_W)", tmp_path
    )
    assert compare_bits([mutant], coverage, 4, backend=BACKEND).problems >= 4
    survey_of_mutant = Survey(PAIR[0], (PAIR,), "smoke", (mutant,), coverage, BACKEND)
    assert "--world-size 2 --pf-type" in format_reproducer(outcome, survey_of_mutant)


def test_bitwise_comparison_finds_a_change_on_one_rank(coverage: Coverage, tmp_path: Path) -> None:
    old = "            out.copy_(sum_TH)"
    mutant = make_mutant(old, f"{old}\n            out.mul_(1 + self.manager.rank / 256)", tmp_path)
    bits = compare_bits([mutant], coverage, 4, backend=BACKEND)
    assert isinstance(bits.differing, RankCase)


@pytest.mark.share(3)
@pytest.mark.cpu  # kernels of some parts are interpreted
@pytest.mark.parametrize(
    ("part", "file", "old", "new", "finding"),
    [
        (ALL2ALL, "common/group_part", "prefer_local_copies: ClassVar[bool] = True",
         "prefer_local_copies: ClassVar[bool] = False",
         "12 pairs computed by ranks 0, expected 14"),
        (SYMMETRIC, "symm_mem/part", "_MAX_IN_FLIGHT = 2", "_MAX_IN_FLIGHT = 3",
         "Pending, expected UnsupportedError"),
        (SYMMETRIC, "rendezvous/hosts", "    if requires.one_host:\n", "    if False:\n",
         "expected ConfigurationError"),
        (SYMMETRIC, "symm_mem/part", "        manager.check_device(x_TH.device)\n", "",
         "expected DeviceError"),
        (SYMMETRIC, "symm_mem/group", "32) & 0xFFFFFF", "32) & 0xFFFFFE", "from ranks , expected"),
        (GATHERED, "common/torch_group", "layer: int = 0", "layer: int = 1", "call 0 of layer 1"),
        (BY_HOSTS, "symm_mem/group", 'begin(0, "construct", nbytes)',
         'begin(1, "construct", nbytes)', "'step': 1, 'phase': 'construct'"),
        (BY_HOSTS, "rendezvous/hosts", "    if max_ranks is None:\n",
         "    if max_ranks is not None:\n", "expected 1 consecutive ranks"),
        (BY_HOSTS, "rendezvous/store_collectives",
         "received and self._store.check([self._make_key(rank)]):", "received:",
         "Timed out waiting"),
        (BY_HOSTS, "host_then_rank/buffers", "heap.view_sections(sections, index * nbytes)",
         "heap.view_sections(sections, 0)", "expected right"),
        (BY_HOSTS, "host_then_rank/group", "            self.host_memory.destroy()",
         "            pass", "expected UnsupportedError"),
        (GATHERED, "common/torch_group", "max(time.monotonic() + _MIN_GRACE_S, started_s",
         "max(0.0, started_s", "expected (0, 'combine', 1, 0, 0, (1,)) exchange between ranks"),
        (GATHERED, "common/torch_group", 'self.device == "cpu":\n            # Wait',
         'self.device != "cpu":\n            # Wait', "quotes no reason from the library"),
        (ALL2ALL, "common/torch_group", "history: int = 1024", "history: int = 1023",
         "1023, expected 1024"),
        (ALL2ALL, "rendezvous/hosts",
         "        or (must_fill_hosts and mean_ranks != max_ranks)\n",
         "", "expected 2 consecutive ranks"),
        (ALL2ALL, "common/row_buffers", "rows * int(problem.adapters is not None)", "rows",
         "without_adapters: 56 bytes of rows_adapters"),
    ],
    ids=["remote-copy", "third-call", "two-hosts", "another-device", "rank-0-omitted",
         "layer-number", "construct-in-a-call", "too-many-ranks-per-host", "no-store-check",
         "shared-slot", "host-memory-not-destroyed", "failure-board-timeout", "polling",
         "history-length", "partial-hosts", "unused-adapter-rows"],
)  # fmt: skip
def test_fault_scenarios_detect_defective_parts(
    part: str, file: str, old: str, new: str, finding: str, tmp_path: Path
) -> None:
    mutant = make_mutant(old, new, tmp_path, f"prepare_finalize/{file}.py")
    faults = {"32) & 0xFFFFFF": "late", "layer: int = 0": "broken-off", "received and": "stays-out",
              "_MIN_GRACE_S": "late", "self.device": "late"}  # fmt: skip
    fault = next((faults[line] for line in faults if line in old), "misunderstood")
    machine = this_machine(device="cpu")
    case = replace(rank_cases_for(part, "TorchExperts", machine, 2).cases[0], fault=fault)
    with Ranks(2, None, (mutant,), [CaseCoverage(case, 5.0, "", {})]) as ranks:
        ranks.start()
        failure, _ = ranks.run_until_failure(case, machine)
    assert failure is not None
    assert finding in failure


def test_drawn_problems_keep_ranks_without_tokens(coverage: Coverage) -> None:
    busy, half_idle, _ = coverage.cases
    drawn = [case for case, _ in draw_problems([[busy], [half_idle]], 20)]
    tokens = {case.tokens for case in drawn if isinstance(case, RankCase)}
    assert len(tokens) > 10
    assert {case.problem.tokens for case in drawn} <= {max(each) for each in tokens}
    assert {second > 0 for _, second in tokens} == {True}
    assert {first for first, _ in tokens} == {0, 1, 2, 3, 4, 5}


def test_refusing_a_valid_case_kills_the_mutant(coverage: Coverage, tmp_path: Path) -> None:
    arguments = "STANDARD_REQUIREMENTS,\n        padding="
    changed = "STANDARD_REQUIREMENTS,\n        world_sizes=(3, None),\n        padding="
    outcome = run_mutant_on_cases(arguments, changed, coverage, tmp_path)
    assert outcome.status == "refused"
    assert outcome.finding.startswith("3 valid cases, first AllGatherReduceScatter")


@pytest.mark.parametrize(
    ("part", "world_size", "need"),
    [
        ("TorchAll2AllPrepareAndFinalize", 1, "--world-size 2 as well"),
        ("MoEPrepareAndFinalizeNoEP", 2, "over 2 ranks"),
        ("DeepEPHTPrepareAndFinalize", 2, "over 2 ranks"),
    ],
)
def test_parts_without_cases_for_a_world_size_are_refused(
    part: str, world_size: int, need: str
) -> None:
    backend = OneProcess() if world_size == 1 else OverRanks(world_size)
    with pytest.raises(ConfigurationError, match=need):
        survey(part, level="smoke", backend=backend)
