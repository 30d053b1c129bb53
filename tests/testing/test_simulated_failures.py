"""Checks with a simulated group of six ranks: the managers of this package pass, and defective
managers fail.

A manager holds the communication state of a part over ranks.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from modular_kernel.testing.cases.scenario_names import is_builtin
from modular_kernel.testing.verify import (
    failure_scenarios,
    manager_scenarios,
    memory_scenarios,
    simulated_host_scenarios,
)
from prepare_finalize.collectives.all_to_all import TorchAll2AllPrepareAndFinalize
from prepare_finalize.common import torch_group
from prepare_finalize.common.torch_group import TorchGroup
from prepare_finalize.rendezvous import failure_log, hosts, memory_files
from prepare_finalize.symm_mem.group import SharedMemory, SymmetricGroup

pytestmark = pytest.mark.cpu
Patch = Callable[[pytest.MonkeyPatch], None]


class ExternalManager(TorchGroup):
    """A manager that another package defines."""


class ExternalPart(TorchAll2AllPrepareAndFinalize):
    """A part that another package defines."""

    manager_class = ExternalManager


def make_context(part: Any) -> Any:
    return SimpleNamespace(part=part, rank=0, is_faulty_rank=False, peers=())


BUILTIN_CONTEXT = make_context(TorchAll2AllPrepareAndFinalize)


@pytest.fixture(scope="module", autouse=True)
def one_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_patch(target: object, name: str, value: Any) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


def double_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    find_culprits = failure_log.find_culprits

    def find_with_doubled_timeout(
        rank: int, world_size: int, records: Any, timeout_s: float
    ) -> Any:
        return find_culprits(rank, world_size, records, 2 * timeout_s)

    monkeypatch.setattr(torch_group, "find_culprits", find_with_doubled_timeout)


def test_managers_report_the_ranks_that_failed() -> None:
    manager = TorchGroup()
    checks = [*failure_scenarios.check_simulated_failures(BUILTIN_CONTEXT, manager)]
    assert len(checks) == 19
    assert [outcome for outcome, _ in checks] == [expected for _, expected in checks]
    manager.destroy()


@pytest.mark.parametrize(
    ("defect", "outcome"),
    [
        pytest.param(double_timeout, "failed too", id="a longer timeout"),
        pytest.param(make_patch(torch_group, "clear_frames", id), "freed: False", id="kept frames"),
        pytest.param(
            make_patch(TorchGroup, "_wait_for_culprits", lambda _self, failure: failure),
            "the backend failed",
            id="threads that do not wait",
        ),
        pytest.param(
            make_patch(TorchGroup, "_find_unreachable_ranks", lambda _self, rank: (rank,)),
            "(0,) the group's store",
            id="one unreachable rank",
        ),
        pytest.param(
            make_patch(TorchGroup, "abort", lambda _self, _error: None),
            "failed: False",
            id="no abort",
        ),
    ],
)
def test_managers_with_a_defect_fail(
    monkeypatch: pytest.MonkeyPatch, defect: Patch, outcome: str
) -> None:
    manager = TorchGroup()
    defect(monkeypatch)
    checks = [*failure_scenarios.check_simulated_failures(BUILTIN_CONTEXT, manager)]
    monkeypatch.undo()
    manager.destroy()
    assert any(outcome in got and got != expected for got, expected in checks)


def test_hosts_are_ordered_by_their_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for manager in (TorchGroup(), SymmetricGroup()):
        description = simulated_host_scenarios._find_hosts(manager)
        assert description == f"{simulated_host_scenarios._HOSTS}; readable 0 2 5"
        with monkeypatch.context() as defect:
            defect.setattr(hosts, "_find_lowest_peer", lambda rank, _readable: rank)
            assert simulated_host_scenarios._find_hosts(manager).startswith("6 ranks on 6 hosts")
        manager.destroy()


@pytest.mark.parametrize("seconds", [30.0, 90.0])
def test_files_are_stale_after_a_minute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float
) -> None:
    # Use a separate folder, because other processes remove stale files from the shared one.
    for module in (memory_files, hosts):
        monkeypatch.setattr(module, "SHARED_MEMORY_DIR", tmp_path)
    monkeypatch.setattr(simulated_host_scenarios, "_SHARED_MEMORY", tmp_path)
    ((outcome, expected),) = simulated_host_scenarios._check_stale_files(BUILTIN_CONTEXT)
    assert outcome == expected
    monkeypatch.setattr(memory_files, "_MIN_STALE_AGE_S", seconds)
    ((outcome, expected),) = simulated_host_scenarios._check_stale_files(BUILTIN_CONTEXT)
    assert outcome != expected


def test_status_words_of_kernels_become_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SymmetricGroup()
    checks = [*memory_scenarios._check_status_words(manager)]
    assert [outcome for outcome, _ in checks] == [expected for _, expected in checks]
    monkeypatch.setattr(SharedMemory, "check_open", lambda _self: None)
    checks = [*memory_scenarios._check_status_words(manager)]
    assert [outcome for outcome, _ in checks] == ["no error | no error"] * 2
    manager.destroy()


def test_a_failed_mapping_is_a_communication_error(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SymmetricGroup()
    outcome = memory_scenarios._allocate_with_error(manager, manager)
    assert outcome.startswith("(0, 'construct', 0, 0, 0, ()) exchange between ranks: got the map")
    monkeypatch.delattr(manager, "step")
    assert memory_scenarios._allocate_with_error(manager, manager).startswith("AttributeError")


def test_checks_of_builtin_classes_skip_other_packages() -> None:
    assert is_builtin(TorchGroup)
    assert not is_builtin(ExternalManager)
    external_context = make_context(ExternalPart)
    manager = TorchGroup()
    for checks in (
        failure_scenarios.check_simulated_failures(external_context, manager),
        simulated_host_scenarios.check_simulated_hosts(external_context, manager),  # type: ignore[arg-type]
        memory_scenarios.check_shared_memory(external_context),
        manager_scenarios.check_manager_arguments(external_context),
        manager_scenarios.check_max_received(external_context, manager),
        manager_scenarios.check_too_many_tokens(external_context, manager),  # type: ignore[arg-type]
        manager_scenarios.check_destroyed_manager(external_context, manager),
        manager_scenarios.check_dropped_manager(external_context),
        manager_scenarios.check_threads_ended(external_context, ()),
    ):
        assert list(checks) == []
    assert len([*manager_scenarios.check_manager_arguments(BUILTIN_CONTEXT)]) == 6
    manager.destroy()
