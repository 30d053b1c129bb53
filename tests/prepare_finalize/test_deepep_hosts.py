"""The DeepEP parts with ranks on several hosts: verdicts, buffer arguments and manager errors.

All ranks run on this host, with a stand-in for DeepEP that has the checks of the library.
"""

import os
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import deepep_stand_in as stand_in
import pytest
import torch.distributed as dist
from run_mk import run_mk
from test_deepep import BASE, EXPERTS, HT, LL, MACHINES, V2, get_rules

from modular_kernel.catalog import check
from modular_kernel.errors import ConfigurationError, ModularKernelError
from modular_kernel.spec.problem import Parallel
from modular_kernel.testing.ranks.pool import RankPool
from prepare_finalize import DeepEPGroup, DeepEPHTPrepareAndFinalize
from prepare_finalize.deepep import group as group_module
from prepare_finalize.deepep import part as part_module
from prepare_finalize.deepep.arguments import (
    WORLD_SIZES,
    high_throughput_arguments,
    low_latency_arguments,
)

Buffer = stand_in.DEEP_EP_V1.Buffer


def check_on_cluster(part: str, ranks: int, per_host: int | None, **fields: Any) -> Any:
    parallel = Parallel(ranks, ranks_per_host=per_host)
    problem = replace(BASE, **{"experts": 320, **fields}, parallel=parallel)
    return check(part, EXPERTS[part], problem, MACHINES[part])


@pytest.mark.parametrize(
    ("part", "ranks", "per_host", "fields", "expected_rules"),
    [
        (HT, 8, None, {}, ""),
        (HT, 16, 8, {}, ""),
        (HT, 64, 8, {}, ""),
        (HT, 160, 8, {}, ""),
        (HT, 8, 4, {}, "hosts"),
        (HT, 16, 4, {}, "hosts"),
        (HT, 16, None, {}, "hosts"),
        (HT, 16, 16, {}, "hosts"),
        (HT, 24, 8, {}, "world_size"),  # DeepEP lists this size, but has no kernels for it.
        (HT, 168, 8, {"experts": 336}, "world_size"),
        (HT, 16, 8, {"graph": True}, "hosts"),
        (HT, 8, None, {"graph": True}, ""),
        (HT, 16, 8, {"experts": 1024}, ""),
        (HT, 16, 8, {"experts": 1025}, "max_experts"),
        (LL, 16, 8, {}, ""),
        (LL, 16, 8, {"graph": True}, ""),
        (LL, 320, 8, {}, ""),
        (LL, 8, 4, {}, "hosts"),
        (LL, 9, None, {"experts": 18}, "hosts"),
        (V2, 16, 8, {"graph": True}, ""),
        (V2, 8, 4, {}, ""),
        (V2, 256, 8, {}, ""),
        (V2, 264, 8, {}, "hosts world_size"),
        (V2, 34, 1, {}, "hosts"),
        (V2, 16, None, {}, "hosts"),
        (V2, 16, 8, {"experts": 1920}, ""),
        (V2, 16, 8, {"experts": 1921}, "max_experts"),
        (V2, 32, 8, {"experts": 2080}, "max_experts"),
    ],
    ids=str,
)
def test_verdicts_on_described_clusters(
    part: str, ranks: int, per_host: int | None, fields: dict[str, Any], expected_rules: str
) -> None:
    verdict = check_on_cluster(part, ranks, per_host, **fields)
    assert get_rules(verdict) == set(expected_rules.split()), str(verdict)


def test_supported_world_sizes_are_those_of_the_library() -> None:
    multi_host_sizes = [ranks for ranks in WORLD_SIZES if ranks > 8]
    assert [ranks // 8 for ranks in multi_host_sizes] == list(stand_in.DEEP_EP_V1.HOSTS)
    assert set(WORLD_SIZES) <= set(stand_in.DEEP_EP_V1.ROWS)


def test_check_has_options_for_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--tokens 64 --hidden 2048 --intermediate 256 --experts 32 --top-k 8"
    pair = f"--pf-type {HT} --experts-type TritonExperts"
    machine = "--device cuda --arch 9.0 --packages deep_ep,deep_ep_cpp,triton"
    for ranks, per_host, rule in ((16, 8, ""), (16, 4, " hosts "), (24, 8, " world_size ")):
        cluster = f"--world-size {ranks} --ranks-per-host {per_host}"
        code, out, err = run_mk(capsys, "check", *f"{pair} {machine} {sizes} {cluster}".split())
        assert code == bool(rule), err
        assert rule in out


# ------------------------------------------------------------------------------------ arguments


def make_process_group(ranks: int) -> Any:
    """Return a stand-in for a ProcessGroup."""
    return SimpleNamespace(size=lambda: ranks)


def compute_row_bytes(hidden: int) -> int:
    return 2 * hidden + stand_in.DEEP_EP_V1.METADATA_BYTES


def round_up(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


@pytest.mark.parametrize("num_sms", [None, 24])
@pytest.mark.parametrize("ranks", [8, 16, 64, 160])
def test_high_throughput_buffer_arguments(ranks: int, num_sms: int | None) -> None:
    """RDMA buffers and queue pairs are needed only above 8 ranks."""
    Buffer.made.clear()
    buffer_arguments = high_throughput_arguments(Buffer, 7168, ranks, num_sms)
    channels = (num_sms or 20) // 2
    nvlink_rows, rdma_rows = stand_in.DEEP_EP_V1.ROWS[ranks]
    # A combine needs one row more than a dispatch.
    nvlink_bytes = round_up(channels * 8 * (nvlink_rows + 1) * compute_row_bytes(7168) + 1)
    rdma_bytes = round_up(
        channels * ranks // 8 * rdma_rows * (compute_row_bytes(7168) + 16) * 2 + 1
    )
    default_num_sms = Buffer.num_sms
    try:
        Buffer.num_sms = num_sms or default_num_sms
        buffer_arguments.buffer.make_buffer(Buffer, make_process_group(ranks))
    finally:
        Buffer.num_sms = default_num_sms
    has_several_hosts = ranks > 8
    assert Buffer.made == [
        (
            ranks,
            nvlink_bytes,
            has_several_hosts * rdma_bytes,
            False,
            channels if has_several_hosts else 1,
        )
    ]
    assert Buffer.num_sms == 20  # The num_sms of one call must not change the default.


@pytest.mark.parametrize("ranks", [8, 16, 64, 160])
def test_low_latency_buffer_arguments(ranks: int) -> None:
    Buffer.made.clear()
    low_latency_arguments(Buffer, 128, 7168, 320, ranks).make_buffer(
        Buffer, make_process_group(ranks)
    )
    nbytes = Buffer.get_low_latency_rdma_size_hint(128, 7168, ranks, 320)
    assert Buffer.made == [(ranks, 0, nbytes, True, 320 // ranks)]


@pytest.mark.parametrize("ranks", [24, 168])
def test_a_size_without_kernels_is_refused_by_the_library_too(ranks: int) -> None:
    with pytest.raises(AssertionError, match="Unsupported"):
        high_throughput_arguments(Buffer, 7168, ranks, None).buffer.make_buffer(
            Buffer, make_process_group(ranks)
        )


@pytest.mark.parametrize("num_sms", [2, 66])
def test_unsupported_numbers_of_multiprocessors_between_hosts_are_refused(num_sms: int) -> None:
    assert high_throughput_arguments(Buffer, 2048, 8, num_sms).buffer.num_rdma_bytes == 0
    with pytest.raises(ConfigurationError, match=f"num_sms: got {num_sms}, need an even"):
        high_throughput_arguments(Buffer, 2048, 16, num_sms)


def test_too_large_buffers_between_hosts_are_refused() -> None:
    assert high_throughput_arguments(Buffer, 7168, 160, 40).buffer.num_rdma_bytes > 0
    with pytest.raises(ConfigurationError, match="with several hosts, so a smaller num_sms"):
        high_throughput_arguments(Buffer, 7168, 160, 64)


# --------------------------------------------------------------------------------- the manager


def make_manager_on_simulated_hosts(rank: int, group: dist.ProcessGroup, nic: bool) -> DeepEPGroup:
    """Return a manager over gloo. Each rank is a simulated host."""
    os.environ["MK_HOST_ID"] = f"host{rank}"  # noqa: TID251
    group_module._resolve_nccl_group = lambda group: group
    group_module.has_rdma_nic = lambda: nic
    library = ModuleType("deep_ep")
    vars(library)["Buffer"] = stand_in.OneRankPerHostBuffer
    group_module.load_deepep = lambda generation: library
    stand_in.DEEP_EP_V1.Buffer.made.clear()
    return DeepEPGroup(group, timeout_s=5)


def describe_outcome(attempt: Any) -> str:
    try:
        attempt()
    except ModularKernelError as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def make_buffers_without_network(
    rank: int, world: int, group: dist.ProcessGroup, without_nic: list[bool]
) -> Any:
    manager = make_manager_on_simulated_hosts(rank, group, not without_nic[rank])
    attempts = lambda: manager.high_throughput(2048), lambda: manager.low_latency(8, 2048, 4)
    messages = [describe_outcome(attempt) for attempt in attempts]
    buffers = list(stand_in.DEEP_EP_V1.Buffer.made)
    manager.destroy()
    return messages, buffers


@pytest.mark.parametrize("without_nic", [[True, True], [False, True]])
def test_hosts_without_a_network_are_refused_on_every_rank(
    without_nic: list[bool],
) -> None:
    with RankPool(2, grace=10) as pool:
        reports = pool.run(make_buffers_without_network, without_nic)
    need = "no RDMA NIC, need RDMA NICs" if all(without_nic) else "RDMA NIC True, False by rank"
    for messages, buffers in reports:
        assert all(need in message for message in messages), messages
        assert buffers == []


def make_several_buffers(rank: int, world: int, group: dist.ProcessGroup) -> Any:
    group_module.high_throughput_arguments = lambda *args: SimpleNamespace(
        buffer=stand_in.BufferArguments(128, 128, False, 10), dispatch=None, combine=None
    )
    group_module.torch = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: None))
    manager = make_manager_on_simulated_hosts(rank, group, True)
    other_manager = DeepEPGroup(group, timeout_s=5)
    attempts = (
        lambda: manager.high_throughput(2048),
        lambda: manager.high_throughput(2048),
        lambda: manager.low_latency(8, 2048, 4),
        lambda: other_manager.high_throughput(2048),
        manager.destroy,
        lambda: other_manager.high_throughput(2048),
        other_manager.destroy,
    )
    return [describe_outcome(attempt) for attempt in attempts], stand_in.DEEP_EP_V1.Buffer.made


def test_a_process_has_one_buffer_between_hosts() -> None:
    with RankPool(2, grace=10) as pool:
        reports = pool.run(make_several_buffers)
    for messages, buffers in reports:
        refused_indices = [
            index
            for index, message in enumerate(messages)
            if "need one Buffer of deep_ep in a process" in message
        ]
        assert refused_indices == [2, 3], messages
        assert [
            message for index, message in enumerate(messages) if index not in refused_indices
        ] == ["made"] * 5
        assert buffers == [(2, 128, 128, False, 10), "destroyed"] * 2


def make_part_on_two_hosts(rank: int, world: int, group: dist.ProcessGroup) -> Any:
    """Make a part over two simulated hosts of one rank."""
    manager = make_manager_on_simulated_hosts(rank, group, True)
    problem = replace(BASE, parallel=Parallel(2, rank=rank))
    part_module.load_deepep = group_module.load_deepep
    messages = describe_outcome(lambda: DeepEPHTPrepareAndFinalize(problem, manager))
    return messages, stand_in.DEEP_EP_V1.Buffer.made


def test_actual_hosts_are_refused_like_described_ones() -> None:
    with RankPool(2, grace=10) as pool:
        reports = pool.run(make_part_on_two_hosts)
    for messages, buffers in reports:
        assert (
            "2 ranks on 2 hosts: 0 on host0; 1 on host1, need 8 consecutive ranks on each host"
            in messages
        ), messages
        assert buffers == []


def make_buffer_of_second_generation(
    rank: int, world: int, group: dist.ProcessGroup, disable_gin: list[str]
) -> str:
    os.environ["EP_DISABLE_GIN"] = disable_gin[rank]  # noqa: TID251
    manager = make_manager_on_simulated_hosts(rank, group, True)
    vars(group_module.load_deepep(2))["ElasticBuffer"] = dict
    group_module.dist = SimpleNamespace(barrier=lambda *args, **options: None)
    group_module.torch = SimpleNamespace(cuda=SimpleNamespace(current_device=lambda: 0))
    return describe_outcome(lambda: manager.elastic(8, 2048, 4))


@pytest.mark.parametrize(
    ("disable_gin", "message"),
    [(["1", "1"], "need EP_DISABLE_GIN=0"), (["0", "1"], "EP_DISABLE_GIN 0, 1 by rank")],
)
def test_the_second_generation_needs_gin_between_hosts(
    disable_gin: list[str], message: str
) -> None:
    with RankPool(2, grace=10) as pool:
        reports = pool.run(make_buffer_of_second_generation, disable_gin)
    assert all(message in report for report in reports), reports
