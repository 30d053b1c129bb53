"""The DeepEP parts without a GPU and without DeepEP: refusals, sizes of buffers, order of calls."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import deepep_stand_in as stand_in
import pytest
import torch
import torch.distributed as dist

from modular_kernel.catalog import check
from modular_kernel.compatibility.support import Verdict
from modular_kernel.errors import CommunicationError, ConfigurationError, UnsupportedError
from modular_kernel.settings import nvshmem_uses_ibgda
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Combine, Machine, Parallel, Problem
from modular_kernel.tensors import BatchedShape, StandardShape
from modular_kernel.testing.cases.ranks import rank_pairings
from modular_kernel.testing.ranks.pool import RankPool
from prepare_finalize import (
    DeepEPGroup,
    DeepEPHTPrepareAndFinalize,
    DeepEPLLPrepareAndFinalize,
    DeepEPV2PrepareAndFinalize,
)
from prepare_finalize.deepep import group as group_module
from prepare_finalize.deepep import low_latency as deepep_ll
from prepare_finalize.deepep import v2 as deepep_v2
from prepare_finalize.deepep.group import has_rdma_nic, load_deepep
from prepare_finalize.deepep.low_latency_buffer import LowLatencyBuffer
from prepare_finalize.deepep.part import DeepEPPart

HT, LL, V2 = (f"DeepEP{name}PrepareAndFinalize" for name in ("HT", "LL", "V2"))
EXPERTS = {HT: "TritonExperts", LL: "BatchedTritonExperts", V2: "TritonExperts"}
FIRST_GENERATION = Machine("cuda", (9, 0), frozenset({"triton", "deep_ep", "deep_ep_cpp"}))
SECOND_GENERATION = Machine("cuda", (9, 0), frozenset({"triton", "deep_ep"}))
MACHINES = {HT: FIRST_GENERATION, LL: FIRST_GENERATION, V2: SECOND_GENERATION}
BASE = Problem(64, 2048, 256, 32, 8, parallel=Parallel(2))
BLOCK = "fp8_w8a8_block"


def check_part(part: str, problem: Problem = BASE, machine: Machine | None = None) -> Verdict:
    return check(part, EXPERTS[part], problem, machine or MACHINES[part])


def get_rules(verdict: Verdict) -> set[str]:
    return {rejection.rule for rejection in verdict.rejections}


@pytest.mark.parametrize("part", EXPERTS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"hidden": 7168, "experts": 256, "quant": BLOCK},
        {"quant": "fp8_w8a8_tensor:static=true"},
        {"quant": "fp8_w8a8_channel"},
        {"quant": "int8_w8a8_channel"},
        {"quant": "int8_w8a16_group"},
        {"tokens": 0, "top_k": 1, "ids_dtype": torch.int32},
        {"parallel": Parallel(4, Placement.round_robin(32, 4)), "asynchronous": True},
        {"inplace": True, "routed_scaling_factor": 2.5, "ids_dtype": torch.int64},
    ],
    ids=str,
)
def test_supported_problems_are_accepted(part: str, fields: dict[str, Any]) -> None:
    verdict = check_part(part, replace(BASE, **fields))
    assert verdict.ok, str(verdict)


REFUSED: tuple[tuple[str, dict[str, Any], set[str]], ...] = (
    (HT, {"dtype": torch.float16, "hidden": 8200, "top_k": 33}, {"dtype", "hidden", "top_k"}),
    (HT, {"hidden": 8192}, {"hidden"}),
    (HT, {"hidden": 2176, "quant": BLOCK}, {"hidden"}),
    (HT, {"experts": 258, "quant": "fp8_w8a8_tensor"}, {"max_experts", "dispatch_quant"}),
    (HT, {"parallel": Parallel(3), "graph": True}, {"world_size"}),
    (HT, {"parallel": Parallel(16), "deterministic": True}, {"hosts", "deterministic"}),
    (HT, {"combine": Combine.TOPK_WEIGHTED, "expert_map": True}, {"keep_topk", "expert_map"}),
    (HT, {"local_experts": 3}, {"placement"}),
    (LL, {"hidden": 2304, "dtype": torch.float32, "top_k": 12}, {"hidden", "dtype", "top_k"}),
    (LL, {"experts": 33, "quant": "fp8_w8a8_tensor"}, {"placement", "dispatch_quant"}),
    (LL, {"experts": 1600}, {"max_experts"}),
    (LL, {"apply_router_weight_on_input": True, "top_k": 1}, {"router_weight_on_input"}),
    (LL, {"parallel": Parallel(1)}, {"world_size"}),
    (V2, {"hidden": 2176, "dtype": torch.float16}, {"hidden", "dtype"}),
    (V2, {"experts": 514, "quant": "fp8_w8a8_tensor"}, {"max_experts", "dispatch_quant"}),
)


def format_sorted(value: object) -> str:
    """Return the elements of a set in the same order in every process."""
    return str(sorted(value) if isinstance(value, set) else value)


@pytest.mark.parametrize(("part", "fields", "expected_rules"), REFUSED, ids=format_sorted)
def test_refusals_name_every_violated_rule(
    part: str, fields: dict[str, Any], expected_rules: set[str]
) -> None:
    verdict = check_part(part, replace(BASE, **fields))
    by_part = {rejection.rule for rejection in verdict.rejections if part in rejection.parties}
    assert by_part == expected_rules, str(verdict)


def test_parts_of_different_formats_are_refused() -> None:
    assert "format" in get_rules(check(HT, "BatchedTritonExperts", BASE, FIRST_GENERATION))
    assert "format" in get_rules(check(LL, "TritonExperts", BASE, FIRST_GENERATION))


@pytest.mark.parametrize("part", EXPERTS)
def test_unsupported_machines_are_refused(part: str) -> None:
    without_deepep = replace(MACHINES[part], packages=frozenset({"triton"}))
    assert get_rules(check_part(part, machine=without_deepep)) == {"package"}
    without_fp8 = replace(MACHINES[part], arch=(8, 0))
    assert get_rules(check_part(part, machine=without_fp8)) == {"arch"}
    assert "device" in get_rules(check_part(part, machine=Machine("cpu")))


def test_deepep_2_serves_every_part_and_deepep_1_not_the_second_generation() -> None:
    (reason,) = check_part(V2, machine=FIRST_GENERATION).rejections
    assert (reason.rule, reason.got, reason.need) == ("package", "deep_ep 1", "deep_ep 2")
    for part in EXPERTS:
        verdict = check_part(part, machine=SECOND_GENERATION)
        assert verdict.ok, str(verdict)


@pytest.mark.parametrize("part", EXPERTS)
def test_the_harness_runs_the_part_if_the_library_is_installed(part: str) -> None:
    assert (part, EXPERTS[part]) in rank_pairings(MACHINES[part], 2)


# ------------------------------------------------------------------------------------ the library


@pytest.mark.parametrize(
    "part", [DeepEPHTPrepareAndFinalize, DeepEPLLPrepareAndFinalize, DeepEPV2PrepareAndFinalize]
)
def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch, part: Any) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(ConfigurationError, match=r"deep_ep: got .*, need deep_ep") as exc_info:
        part(BASE)
    assert exc_info.value.what == "deep_ep"


def test_error_contains_the_cause_of_a_failed_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "deep_ep"
    folder.mkdir()
    (folder / "__init__.py").write_text("assert False, 'two versions of NCCL'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    with pytest.raises(ConfigurationError, match="deep_ep: got two versions of NCCL, need"):
        load_deepep(1)


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)])
def test_nvshmem_uses_ibgda_by_default(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    monkeypatch.delenv("NVSHMEM_IB_ENABLE_IBGDA", raising=False)
    if value is not None:
        monkeypatch.setenv("NVSHMEM_IB_ENABLE_IBGDA", value)
    assert nvshmem_uses_ibgda() is expected


def test_rdma_nics_are_found_in_the_device_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(group_module, "_RDMA_DEVICES_DIR", tmp_path / "infiniband")
    assert not has_rdma_nic()
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert has_rdma_nic()


# ------------------------------------------------------------------------------------ the manager


class Buffer(stand_in.DEEP_EP_V1.Buffer):  # type: ignore[name-defined, misc]
    """A Buffer of DeepEP. The manager must raise before it calls the method."""

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        raise AssertionError(num_max_dispatch_tokens_per_rank)


def collect_errors(rank: int, world_size: int, group: dist.ProcessGroup) -> list[str]:
    """Return the messages of errors on a rank of a gloo group."""
    messages = []
    try:
        DeepEPGroup(group)
    except ConfigurationError as error:
        messages.append(str(error))
    group_module._resolve_nccl_group = lambda group: group
    sys.modules["deep_ep"] = ModuleType("deep_ep")
    vars(sys.modules["deep_ep"])["Buffer"] = Buffer
    group_module.has_rdma_nic = lambda: False
    manager = DeepEPGroup(group, timeout_s=5)
    manager.check_equal({"hidden": 64})
    attempts = (
        lambda: manager.check_equal({"hidden": 64, "tokens": 4 + rank}),
        lambda: manager.low_latency(8, 2048, 4),
        lambda: DeepEPGroup(group, num_sms=20 + 2 * rank),
        lambda: DeepEPHTPrepareAndFinalize(replace(BASE, parallel=Parallel(4)), manager),
    )
    for attempt in attempts:
        try:
            attempt()
        except (CommunicationError, ConfigurationError) as error:
            messages.append(str(error))
    manager.destroy()
    try:
        manager.check_equal({})
    except UnsupportedError as error:
        messages.append(str(error))
    return messages


def test_a_manager_refuses_before_communication() -> None:
    with RankPool(2, grace=10) as pool:
        reports = pool.run(collect_errors)
    for report in reports:
        messages = iter(report)
        assert "process group's backend" in next(messages)
        assert "tokens 4, 5 by rank" in next(messages)
        assert "an RDMA NIC, need RDMA NICs with IBGDA" in next(messages)
        assert "num_sms 20, 22 by rank" in next(messages)
        assert "process group's size: got 2, need 4" in next(messages)
        assert "a destroyed manager" in next(messages)


@pytest.mark.parametrize("num_sms", [0, 7, -2])
def test_the_number_of_multiprocessors_is_even(num_sms: int) -> None:
    with pytest.raises(ConfigurationError, match="num_sms"):
        DeepEPGroup(num_sms=num_sms)


class Recorder:
    """A low-latency buffer that records its calls in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def low_latency_dispatch(
        self, x: str, *_: object, return_recv_hook: bool, **__: object
    ) -> tuple[Any, ...]:
        self.calls.append(f"send {x}" if return_recv_hook else f"send and receive {x}")
        return x, None, (), None, lambda: self.calls.append(f"receive {x}")

    def low_latency_combine(self, x: str, *_: object, **__: object) -> None:
        self.calls.append(f"combine {x}")

    def destroy(self) -> None:
        self.calls.append("destroy")


def test_a_dispatch_is_received_before_the_next_exchange() -> None:
    recorder = Recorder()
    buffer: Any = LowLatencyBuffer(recorder, 8, 4)
    first = buffer.dispatch("a", None, quantize=False)
    second = buffer.dispatch("b", None, quantize=False)
    second.receive()
    buffer.combine("b", None, None, (), None)
    first.receive()
    buffer.combine("a", None, None, (), None)
    buffer.dispatch("c", None, quantize=False)
    buffer.destroy()
    assert recorder.calls == [
        "send a", "receive a", "send b", "receive b", "combine b", "combine a",
        "send c", "receive c", "destroy",
    ]  # fmt: skip


def test_a_synchronous_dispatch_is_one_launch_without_a_receive() -> None:
    recorder = Recorder()
    buffer: Any = LowLatencyBuffer(recorder, 8, 4)
    buffer.dispatch("a", None, quantize=False)
    arrival = buffer.dispatch("b", None, quantize=False, at_once=True)
    arrival.receive()
    buffer.combine("b", None, None, (), None)
    assert recorder.calls == ["send a", "receive a", "send and receive b", "combine b"]


# ------------------------------------------------------------------------- ids, weights and sizes


def test_a_part_must_define_make_buffer() -> None:
    class WithoutBuffer(DeepEPHTPrepareAndFinalize):
        make_buffer = DeepEPPart.make_buffer

    with pytest.raises(TypeError, match="make_buffer"):
        WithoutBuffer(BASE)


def test_numbers_of_tokens_in_buffers_are_rounded_up() -> None:
    assert [deepep_ll.buffer_tokens(n) for n in (0, 1, 4, 5, 128)] == [4, 4, 4, 8, 128]
    buffer_sizes = [deepep_v2.buffer_tokens(n) for n in (0, 1, 8, 9, 100, 128, 129, 4096)]
    assert buffer_sizes == [8, 8, 8, 16, 128, 128, 256, 4096]


@pytest.mark.parametrize(
    ("quant", "by_library"),
    [
        (BLOCK, True),
        ("fp8_w8a8_block:block=64x128", True),
        ("fp8_w8a8_block:block=128x64", False),
        ("int8_w8a8_block", False),
        ("fp8_w8a8_channel", False),
        ("none", False),
    ],
)
def test_low_latency_kernels_quantize_only_fp8_blocks_of_128_columns(
    quant: str, by_library: bool
) -> None:
    problem = replace(BASE, quant=quant)
    assert deepep_ll.quantized_by_library(problem) is by_library
    part = make_part_without_library(DeepEPLLPrepareAndFinalize, problem)
    quantizes_in_part = problem.scheme.quantizes_activations and not by_library
    assert ("x_q" in part.workspace_shapes(3)) is quantizes_in_part


def test_shapes_do_not_depend_on_the_tokens_of_a_rank() -> None:
    """Another rank may have problem.tokens tokens, even if this rank has fewer."""
    problem = replace(BASE, tokens=50)
    part = make_part_without_library(DeepEPHTPrepareAndFinalize, problem)
    assert part.dispatch_shape(3) == StandardShape(100, 8)
    no_tokens = make_part_without_library(DeepEPHTPrepareAndFinalize, replace(problem, tokens=0))
    # A capacity of 0 rows would make the CPU wait for the number of rows.
    assert no_tokens.dispatch_shape(0) == StandardShape(2, 8)
    assert make_part_without_library(DeepEPLLPrepareAndFinalize, problem).dispatch_shape(
        3
    ) == BatchedShape(16, 104)
    part = make_part_without_library(DeepEPV2PrepareAndFinalize, problem)
    assert part.dispatch_shape(3) == StandardShape(128, 8)
    assert part.workspace_shapes(3)["rows_sum"].shape == (128, 2048)


def make_part_without_library(part_class: Any, problem: Problem) -> Any:
    """Return a part without a manager. Only its methods that do not use DeepEP can be called."""
    part = part_class.__new__(part_class)
    part.problem = problem
    return part
