"""RankPool returns results by rank, raises errors that name the failed rank, and works again after
a failure.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_functions as samples
import torch

from modular_kernel.errors import ConfigurationError, ModularKernelError
from modular_kernel.settings import read_settings
from modular_kernel.testing.ranks.pool import RankError, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def _check_pool(pool: RankPool) -> Iterator[None]:
    """Check after every test that the pool still works."""
    yield
    assert pool.run(samples.total, 2) == [(0, 2, 2.0), (1, 2, 2.0)]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def run_failing_task(pool: RankPool, *task: object, timeout: float = 60) -> RankError:
    """Run a task that must fail. Return the error."""
    with pytest.raises(RankError) as exc_info:
        pool.run(*task, timeout=timeout)  # type: ignore[arg-type]
    return exc_info.value


def test_results_are_ordered_by_rank(pool: RankPool) -> None:
    assert pool.run(samples.total, 3) == [(0, 2, 3.0), (1, 2, 3.0)]
    assert pool.run(samples.pair_up) == [[], [1.0]]


def test_a_pool_of_four_ranks() -> None:
    with RankPool(4) as pool_of_four:
        assert pool_of_four.run(samples.total, 1) == [(rank, 4, 6.0) for rank in range(4)]
        assert pool_of_four.run(samples.pair_up)[3] == [1.0] * 3 + [3.0] * 3


def test_processes_persist_and_have_the_settings_of_the_parent(pool: RankPool) -> None:
    first, second = pool.run(samples.facts), pool.run(samples.facts)
    assert first == second
    assert tuple(pid for pid, *_ in first) == pool.pids
    assert len({os.getpid(), *pool.pids}) == 3
    expected = (1, read_settings().triton_interpret, "gloo")
    assert [tuple(facts) for _, *facts in first] == [expected] * 2


def test_tensors_are_passed_by_value(pool: RankPool) -> None:
    original = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3)
    zeros, received = pool.run(samples.tensors, original)
    assert not zeros.any()
    assert torch.equal(received, original)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_names_its_rank_and_has_its_traceback(pool: RankPool, rank: int) -> None:
    pids = pool.run(samples.facts)
    error = run_failing_task(pool, samples.fail, rank, "quite wrong")
    assert isinstance(error, ModularKernelError)
    assert error.rank == rank
    assert list(error.failures) == [rank]
    assert error.results == {1 - rank: 1 - rank}
    assert f"rank {rank}: Traceback" in str(error)
    assert "rank_functions.py" in str(error)
    assert "ValueError: quite wrong" in str(error)
    assert pool.run(samples.facts) == pids, "the processes must not be restarted"


def test_ranks_blocked_by_a_failed_rank_are_stopped(pool: RankPool) -> None:
    start = time.monotonic()
    error = run_failing_task(pool, samples.fail, 1, "meet")
    assert time.monotonic() - start < 20
    assert error.rank == 1
    assert "did not answer after another rank failed" in error.failures[0]
    assert "barrier" in error.failures[0]


def test_failures_are_ordered_by_time(pool: RankPool) -> None:
    error = run_failing_task(pool, samples.fail_one_after_the_other)
    assert list(error.failures) == [1, 0]
    assert "raised first" in error.failures[1]


def test_a_killed_rank_is_reported_and_restarted(pool: RankPool) -> None:
    pool.run(samples.facts)
    pids_before = pool.pids
    error = run_failing_task(pool, samples.die, 1, signal.SIGKILL)
    assert error.failures[1] == "died: killed by signal SIGKILL"
    pool.run(samples.facts)
    assert not set(pids_before) & set(pool.pids)
    assert not any(is_running(pid) for pid in pids_before)


def test_a_crash_has_a_stack_trace(pool: RankPool) -> None:
    error = run_failing_task(pool, samples.die, 1, signal.SIGSEGV)
    first, *trace = error.failures[1].splitlines()
    assert first == "died: killed by signal SIGSEGV"
    assert "in die" in "\n".join(trace)


def test_a_died_rank_is_listed_before_the_errors_that_it_caused() -> None:
    error = RankError(
        {2: "Traceback: peer gone", 0: "Traceback: peer gone", 1: "died: exit code 3"}, {}
    )
    assert error.rank == 1
    assert list(error.failures) == [1, 2, 0]
    assert str(error).startswith("rank 1: died")


def test_a_rank_that_exits_is_reported(pool: RankPool) -> None:
    error = run_failing_task(pool, samples.leave)
    assert (error.rank, error.failures[0]) == (0, "died: exit code 3")
    assert error.results == {1: None}


def test_a_rank_killed_between_runs_is_reported(pool: RankPool) -> None:
    pool.run(samples.facts)
    os.kill(pool.pids[0], signal.SIGKILL)
    error = run_failing_task(pool, samples.total, 1)
    assert (error.rank, error.failures[0]) == (0, "died: killed by signal SIGKILL")


def test_a_hang_has_a_stack_trace(pool: RankPool) -> None:
    start = time.monotonic()
    error = run_failing_task(pool, samples.hang, 0, 60, timeout=3)
    assert time.monotonic() - start < 20
    assert list(error.failures) == [0]
    assert error.failures[0].startswith("did not answer\n")
    assert "in oversleep" in error.failures[0]


def test_a_stopped_rank_is_reported_without_a_stack_trace(pool: RankPool) -> None:
    error = run_failing_task(pool, samples.die, 0, signal.SIGSTOP, timeout=3)
    assert set(error.failures) == {0, 1}
    assert error.failures[0].endswith("(no stack trace: the process does not handle signals)")
    assert "barrier" in error.failures[1]


def test_results_that_cannot_be_pickled_are_errors(pool: RankPool) -> None:
    error = run_failing_task(pool, samples.unpicklable, 1)
    assert list(error.failures) == [1]
    assert "pickle" in str(error)


def test_results_that_cannot_be_unpickled_are_errors(pool: RankPool) -> None:
    error = run_failing_task(pool, samples.unloadable, 0)
    assert list(error.failures) == [0]
    assert "cannot be unpickled" in str(error)
    assert "not a number" in str(error)


def test_functions_that_cannot_be_pickled_are_refused(pool: RankPool) -> None:
    with pytest.raises(ConfigurationError, match="a picklable function"):
        pool.run(lambda *_: None)


def test_close_removes_processes_and_files() -> None:
    pool = RankPool(2)
    assert pool.pids == ()
    pids = pool.run(samples.ignore_terminate)
    folder = Path(str(pool._folder and pool._folder.name))
    assert folder.is_dir()
    assert all(is_running(pid) for pid in pids)
    pool.close()
    assert not folder.exists()
    assert not any(is_running(pid) for pid in pids)
    assert pool.pids == ()
    pool.close()
    with pytest.raises(ConfigurationError, match="open pool"):
        pool.run(samples.facts)


def test_a_failure_in_the_with_block_leaves_no_process_or_file() -> None:
    with RankPool(2) as pool:
        pool.run(samples.facts)
        pids, folder = pool.pids, Path(str(pool._folder and pool._folder.name))
        run_failing_task(pool, samples.hang, 1, 60, timeout=2)
        assert not any(is_running(pid) for pid in pids)
    assert not folder.exists()


def test_blocks_of_ranks_are_simulated_hosts() -> None:
    with RankPool(4, ranks_per_host=2) as pool:
        assert pool.hosts == 2
        names = pool.run(samples.host)
    assert names == ["host 0", "host 0", "host 1", "host 1"]
    with RankPool(2) as pool:
        assert pool.hosts == 1
        assert pool.run(samples.host) == [read_settings().host_id] * 2


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="world_size: got 0, need >= 1"):
        RankPool(0)
    with pytest.raises(ConfigurationError, match="backend: got mpi"):
        RankPool(2, "mpi")  # type: ignore[arg-type]
    for ranks_per_host in (0, 3, 8):
        with pytest.raises(
            ConfigurationError, match=f"{ranks_per_host}, need a divisor of the 4 ranks"
        ):
            RankPool(4, ranks_per_host=ranks_per_host)
    with pytest.raises(ConfigurationError, match="GPUs: got"):
        RankPool(torch.cuda.device_count() + 1, "nccl")


def test_a_different_triton_interpret_is_refused(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(samples.facts)
    with monkeypatch.context() as patch, RankPool(2) as other_pool:
        patch.setenv("TRITON_INTERPRET", "0" if read_settings().triton_interpret else "1")
        assert "TRITON_INTERPRET: got" in str(run_failing_task(other_pool, samples.facts))


KILLED_PROGRAM = """
import sys
import rank_functions as samples
from modular_kernel.testing.ranks.pool import RankPool
pool = RankPool(2)
pool.run(samples.facts)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_pool_whose_parent_is_killed_leaves_no_files(tmp_path: Path, signal_number: int) -> None:
    tests = Path(__file__).parents[1]
    paths = f"PYTHONPATH={tests / 'helpers'}:{tests.parent}"
    command = ["env", f"TMPDIR={tmp_path}", paths, sys.executable, "-c", KILLED_PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert list(tmp_path.iterdir())
        process.send_signal(signal_number)
    deadline = time.monotonic() + 30
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
