"""`mk test`, `mk check` and `mk profile` with several ranks."""

import json
import re
import shlex
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from run_mk import run_mk

from modular_kernel.catalog import this_machine
from modular_kernel.cli import main, verify
from modular_kernel.profiling.chrome import find_violations
from modular_kernel.replay import stages
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing.cases.lists import command
from modular_kernel.testing.cases.ranks import rank_cases_for

PAIR = ("--pf-type", "TorchAll2AllPrepareAndFinalize", "--experts-type", "TorchExperts")
SINGLE_RANK_PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
ON_CPU = ("--backend", "gloo")
Capture = pytest.CaptureFixture[str]


@pytest.mark.share(3)
def test_all_valid_pairings_pass_over_two_ranks(capsys: Capture) -> None:
    args = ("test", "--world-size", "2", *ON_CPU, "--experts-type", "TorchExperts", "--json")
    code, out, _ = run_mk(capsys, *args)
    record = json.loads(out)
    assert code == 0
    assert (record["ok"], record["world_size"], record["backend"]) == (True, 2, "gloo")
    pairs = {pair["prepare_finalize"]: pair for pair in record["pairs"]}
    assert {
        "ReplicatedEPPrepareAndFinalize",
        "AllGatherReduceScatterPrepareAndFinalize",
        "TorchAll2AllPrepareAndFinalize",
    } <= set(pairs)
    assert "MoEPrepareAndFinalizeNoEP" not in pairs
    for pair in pairs.values():
        assert pair["cases"] >= 8
        assert (pair["failed"], pair["failures"]) == (0, [])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("level", ["smoke", "full"])
def test_omitted_cases_are_described_by_level(
    monkeypatch: pytest.MonkeyPatch, ranks: int, level: str
) -> None:
    """Cases over several ranks are hand-picked at both levels, without pairwise coverage."""
    recorded: list[verify.VerifyJob] = []
    monkeypatch.setattr(verify, "_verify", lambda jobs, *_, **__: recorded.extend(jobs) or True)
    pair = PAIR if ranks == 2 else SINGLE_RANK_PAIR
    world = ("--world-size", "2", *ON_CPU) if ranks == 2 else ()
    with pytest.raises(SystemExit) as exit_info:
        main.run(["test", *pair, *world, "--level", level])
    assert not exit_info.value.code
    (coverage,) = (job.coverage for job in recorded)
    assert ("--level full" in coverage) is (level == "smoke")
    if ranks == 2:
        assert "; hand-picked cases without pairwise coverage" in coverage
    elif level == "full":
        assert "pairs of axis values covered" in coverage


def test_command_of_a_case_over_ranks_reproduces_it(capsys: Capture) -> None:
    cases = rank_cases_for(PAIR[1], PAIR[3], this_machine(device="cpu"), 2).cases
    (case,) = (case for case in cases if case.routing == "out_of_range")
    args = shlex.split(command(case))
    assert "--rank-tokens 5,0 --placement copies" in command(case)
    code, out, _ = run_mk(capsys, *args[1:], *ON_CPU)
    assert code == 0
    assert "1 case of 1 pairing: 1 passed, 0 failed" in out


@pytest.mark.cpu  # kernels of the exchange are interpreted
def test_ranks_simulate_hosts(capsys: Capture) -> None:
    part = "HostThenRankPrepareAndFinalize"
    selection = rank_cases_for(
        part, PAIR[3], this_machine(device="cpu"), 4, "smoke", ranks_per_host=2
    )
    case = selection.cases[0]
    assert "--ranks-per-host 2" in command(case)
    code, out, _ = run_mk(capsys, *shlex.split(command(case))[1:], *ON_CPU, "--json")
    record = json.loads(out)
    assert (code, record["ok"], record["hosts"]) == (0, True, 2)
    # A part that supports a single host has no case on two.
    args = ("--world-size", "2", "--ranks-per-host", "1", *ON_CPU, *PAIR[2:])
    code, out, _ = run_mk(capsys, "test", *args, "--pf-type", "SymmMemPrepareAndFinalize")
    assert code == 1
    assert "2 hosts" in out


@pytest.mark.parametrize("verb", ["test", "profile"])
def test_pairs_for_one_rank_are_refused(capsys: Capture, verb: str, tmp_path: Path) -> None:
    args = (*SINGLE_RANK_PAIR, "--world-size", "2", *ON_CPU)
    folder = ("--out", str(tmp_path)) if verb == "profile" else ()
    code, out, err = run_mk(capsys, verb, *args, *folder)
    assert code == 1
    assert re.search(r"world_size +MoEPrepareAndFinalizeNoEP / problem +2 +1 ", out + err)


def test_check_judges_pairs_over_ranks(capsys: Capture) -> None:
    assert run_mk(capsys, "check", *PAIR, "--world-size", "2")[0] == 0
    code, out, _ = run_mk(capsys, "check", *PAIR)
    assert code == 1
    assert re.search(r"world_size +TorchAll2AllPrepareAndFinalize / problem +1 +>= 2", out)
    code, out, _ = run_mk(capsys, "check", "--world-size", "2", "--json")
    verdicts = {(v["prepare_finalize"], v["experts"]): v for v in json.loads(out)["pairs"]}
    assert verdicts[PAIR[1], PAIR[3]]["ok"]
    assert not verdicts[SINGLE_RANK_PAIR[1], SINGLE_RANK_PAIR[3]]["ok"]


def test_check_judges_every_rank(capsys: Capture) -> None:
    """With 3 experts on 2 ranks, --local-experts 2 is valid for rank 0 only."""
    sizes = ("--world-size", "2", "--experts", "3", "--local-experts", "2")
    code, out, _ = run_mk(capsys, "check", *PAIR, *sizes)
    assert code == 1
    assert re.search(r"placement +TorchAll2AllPrepareAndFinalize / problem +local_experts=2", out)


def test_placement_option_is_parsed(capsys: Capture) -> None:
    args = ("check", *PAIR, "--world-size", "2", "--experts", "4", "--json", "--placement")
    for text, expected in (
        ("round_robin", Placement.round_robin(4, 2)),
        ("3,0/1,2", Placement(((3, 0), (1, 2)))),
    ):
        code, out, _ = run_mk(capsys, *args, text)
        assert code == 0
        slots = json.loads(out)["problem"]["parallel"]["placement"]["slots"]
        assert slots == [list(experts) for experts in expected.slots]
    problem = Problem(4, 32, 32, 4, 2, parallel=Parallel(2, Placement.round_robin(4, 2)))
    assert problem.placement.slots == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("test --world-size 0 --backend gloo", "world_size: got 0"),
        ("test --backend gloo", "--backend: got gloo, need --world-size N"),
        ("test --world-size 2 --backend mpi", "--backend: got 'mpi', need nccl or gloo"),
        ("test --world-size 200 --backend nccl", "GPUs: got"),
        ("test --one --rank-tokens 3", "--rank-tokens, --fault, --unchecked: got a single rank"),
        ("test --one --world-size 2 --rank-tokens 3,x", "--rank-tokens: got '3,x'"),
        ("test --one --world-size 2 --rank-tokens 3", "tokens: got 1 numbers"),
        ("test --one --world-size 2 --rank-tokens 3,17", "tokens: got (3, 17)"),
        ("test --one --world-size 2 --placement spiral", "placement: got 'spiral'"),
        ("test --world-size 2 --placement copies", "--one in addition"),
        ("test --ranks-per-host 2", "--ranks-per-host: got 2, need --world-size N"),
        ("test --world-size 4 --ranks-per-host 3 --backend gloo", "need a divisor of the 4 ranks"),
        ("check --world-size 3 --experts 2", "--experts: got 2 experts for 3 ranks"),
    ],
)
def test_invalid_options_are_bad_usage(capsys: Capture, args: str, message: str) -> None:
    arguments = args.split()
    if "--one" in arguments:
        arguments += [*PAIR, *(() if "--world-size" not in arguments else ON_CPU)]
    code, _, err = run_mk(capsys, *arguments)
    assert code == 2
    assert message in err


def test_input_mutations_run_over_ranks(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from modular_kernel.testing.input_mutations import over_ranks

    mutants = [m for m in over_ranks.RANK_MUTANTS if m.name == "last_expert_lost"]
    run_mutants = partial(over_ranks.sensitivity_ranks, mutants=mutants)
    monkeypatch.setattr(over_ranks, "sensitivity_ranks", run_mutants)
    args = ("test", "--mutate", PAIR[1], "--mutants", "0", "--world-size", "2", *ON_CPU, *PAIR)
    code, out, _ = run_mk(capsys, *args, "--json")
    assert code == 0
    (mutant,) = json.loads(out)["calls"]
    assert (mutant["mutant"], mutant["ok"]) == ("last_expert_lost", True)


def test_each_rank_has_a_trace_and_all_share_a_merged_trace(
    capsys: Capture, tmp_path: Path
) -> None:
    args = ("profile", "--world-size", "2", *ON_CPU, *PAIR, "--out", str(tmp_path), "--json")
    # In a call of a smaller layer, most of the time is outside of stages.
    sizes = ("--hidden", "256", "--intermediate", "256")
    for _ in range(3):  # a busy machine may suspend ranks between stages
        code, out, _ = run_mk(capsys, *args, *sizes)
        assert code == 0
        record = json.loads(out)
        coverage = min(rank["coverage"] for rank in record["pairs"][0]["ranks"])
        if coverage > 0.8:
            break
    assert coverage > 0.8
    traces = [Path(trace) for trace in record["traces"]]
    assert [re.search(r"rank\d", trace.name)[0] for trace in traces] == ["rank0", "rank1"]  # type: ignore[index]
    merged = json.loads(Path(record["merged_trace"]).read_text())
    assert find_violations(merged) == []
    events_by_rank = [json.loads(trace.read_text())["traceEvents"] for trace in traces]
    counts = [sum(event["ph"] == "X" for event in events) for events in events_by_rank]
    merged_counts = Counter(event["pid"] for event in merged["traceEvents"] if event["ph"] == "X")
    assert merged_counts == dict(enumerate(counts))
    assert 0 <= record["pairs"][0]["barrier_spread_us"] < 1e6
    for rank in record["pairs"][0]["ranks"]:
        names = {row["stage"] for row in rank["stages"]}
        inner = {stages.DISPATCH, stages.SORT, stages.GEMM1, stages.REDUCE, stages.COMBINE}
        assert inner | {stages.PREPARE, stages.RECEIVE, stages.EXPERTS, stages.FINALIZE} <= names
        assert rank["load"]["out"] > 0
