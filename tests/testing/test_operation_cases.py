"""Operations of a part are compared with their references, and launches with a record."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experts.triton import adapters, operands
from experts.triton.configs.select import override_config
from experts.triton.gemv import gemv_path
from experts.triton.launch_config import LaunchConfig, MoEConfig
from modular_kernel.catalog import load_catalog
from modular_kernel.errors import StateError
from modular_kernel.ops import permute, quantize_tiles
from modular_kernel.replay import stages
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.testing.verify import launch_plans, operation_cases
from modular_kernel.testing.verify.checks import check_stages
from modular_kernel.testing.verify.launch_plans import find_changed_plans, make_plan
from modular_kernel.testing.verify.operation_cases import check_operation_cases
from modular_kernel.testing.verify.planned_calls import list_calls
from modular_kernel.testing.verify.planned_layers import list_layers
from modular_kernel.testing.verify.shared_operations import find_wrong_operations
from prepare_finalize.common import blocks

Cases = Mapping[str, Callable[[], Mapping[str, torch.Tensor]]]
PART = "TorchAll2AllPrepareAndFinalize"


def find_failures(cases: Cases) -> set[str]:
    part: Any = SimpleNamespace(operation_cases=lambda: cases)
    return {
        outcome.rpartition(": ")[2]
        for outcome, expected in check_operation_cases(part)
        if outcome != expected
    }


@pytest.mark.parametrize(
    ("name", "num_cases"),
    [(PART, 100), ("SymmMemPrepareAndFinalize", 8), ("HostThenRankPrepareAndFinalize", 120)],
)
def test_cases_of_the_operations_of_a_part_pass(name: str, num_cases: int) -> None:
    part = load_catalog().prepare_finalize(name)
    results = [*check_operation_cases(part)]
    assert len(results) >= num_cases
    assert not [outcome for outcome, expected in results if outcome != expected]


def test_a_kernel_that_differs_from_its_reference_is_found() -> None:
    def add_one_in_triton() -> dict[str, torch.Tensor]:
        ones = torch.ones(3, dtype=torch.int32)
        ones[1] += int(use_triton(ones))
        return {"ones": ones}

    assert find_failures({"a": add_one_in_triton}) == {
        "ones differs from the reference, first in byte 4"
    }
    assert not find_failures({"a": lambda: {"ones": torch.ones(3)}})


def test_an_error_of_a_case_is_reported() -> None:
    def raise_error() -> dict[str, torch.Tensor]:
        raise AssertionError("wrong")

    assert find_failures({"a": raise_error}) == {"wrong"}


def test_cases_run_with_lowered_limits() -> None:
    default_limit = blocks._SCAN_PAIRS  # one of the limits that `check_operation_cases` lowers

    def read_limit() -> dict[str, torch.Tensor]:
        limit = blocks._SCAN_PAIRS if use_triton(torch.zeros(1)) else default_limit
        return {"limit": torch.tensor([limit])}

    (outcome,) = find_failures({"a": read_limit})
    assert "limit differs" in outcome


def test_a_race_of_a_case_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_cases, "record_races", lambda: nullcontext(["one byte"]))
    case = {"a": lambda: {"ones": torch.ones(3)}}
    part: Any = SimpleNamespace(operation_cases=lambda: case)
    outcomes = [outcome for outcome, _ in check_operation_cases(part)]
    assert outcomes == ["a, default limits: one byte", "a, lowered limits: one byte"]


def test_shared_operations_equal_their_references() -> None:
    assert find_wrong_operations.__wrapped__() == ()


def test_a_wrong_shared_operation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permute, "permute_tokens_ref", lambda *_args, **_kwargs: None)
    first = find_wrong_operations.__wrapped__()[0]
    assert first.startswith(
        "permute_tokens, default limits: rows, 1 columns, weights False differs"
    )


def test_recorded_plans_are_current() -> None:
    assert find_changed_plans.__wrapped__() == ()


def test_an_override_of_configurations_changes_no_plan() -> None:
    launch = LaunchConfig(16, 16, 32, 1, 4, 1)
    with override_config(MoEConfig(launch, launch, "gemv")):
        assert find_changed_plans.__wrapped__() == ()


def test_a_changed_tile_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_tiles, "_VALUES_PER_TILE", 1024)
    first = find_changed_plans.__wrapped__()[0]
    assert first.startswith("quantize fp8_w8a8_block")
    assert "BLOCK_ROWS=8" in first
    assert "BLOCK_ROWS=16" in first


def test_a_missing_and_an_additional_launch_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    name, call = next(iter(list_calls().items()))
    for calls in ({name: lambda: None}, {name: lambda: (call(), call())}, {}):
        monkeypatch.setattr(launch_plans, "list_calls", lambda calls=calls: calls)
        (message,) = (m for m in find_changed_plans.__wrapped__() if m.startswith(f"{name}:"))
        assert "''" in message


def test_layers_of_every_triton_experts_part_are_planned() -> None:
    names = [name for name, _, _ in list_layers()]
    for part in ("TritonExperts", "GroupedGemmExperts", "BatchedTritonExperts"):
        assert sum(part in name for name in names) >= 50


@pytest.mark.parametrize(
    ("module", "name", "value", "message"),
    [
        (adapters, "_MIN_BLOCK_R", 8, "BLOCK_RANK=8"),  # of a GEMM
        (gemv_path, "_MIN_BLOCK_N", 8, "gemv_amax["),  # a buffer
        (operands, "_FLOAT8_ARCH", (8, 6), "refused by"),
    ],
)
def test_a_changed_layer_is_reported(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: object, message: str
) -> None:
    monkeypatch.setattr(module, name, value)
    assert any(message in change for change in find_changed_plans.__wrapped__())


def test_layers_that_may_run_on_paths_of_other_packages_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapters, "_MIN_BLOCK_R", 8)
    parts = (" TritonExperts", " GroupedGemmExperts")
    changed = find_changed_plans.__wrapped__()
    assert all(any(part in message for message in changed) for part in parts)
    external = {"TritonExperts": frozenset({"mine"})}
    monkeypatch.setattr(
        launch_plans, "find_external_paths", lambda part: external.get(part, frozenset())
    )
    changed = find_changed_plans.__wrapped__()
    assert [any(part in message for message in changed) for part in parts] == [False, True]


def test_plans_are_not_recorded_with_paths_of_other_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_plans, "find_external_paths", lambda _part: frozenset({"mine"}))
    record_before = launch_plans._PATH.read_bytes()
    with pytest.raises(StateError, match="got mine from other packages, need built-in paths only"):
        launch_plans._write_record()
    assert launch_plans._PATH.read_bytes() == record_before


def test_a_changed_stage_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "GEMM2", "mk::gemm1_activation")
    assert any("'gemm1_activation: batched" in m for m in find_changed_plans.__wrapped__())


def test_quantization_without_quantized_activations_is_found() -> None:
    def find_problems(quant: str, *entered: str) -> list[str]:
        problem = SimpleNamespace(scheme=QuantScheme.parse(quant))
        trial: Any = SimpleNamespace(
            first=SimpleNamespace(problem=problem),
            first_call=SimpleNamespace(stages=frozenset(entered)),
        )
        return [*check_stages(trial)]

    gemms = stages.GEMM1, stages.GEMM2
    assert not find_problems("none", *gemms)
    assert not find_problems("fp8_w8a8_block", *gemms, stages.QUANTIZE, stages.QUANTIZE_INPUT)
    assert len(find_problems("none", *gemms, stages.QUANTIZE)) == 1
    assert len(find_problems("fp8_w8a16_block", *gemms, stages.QUANTIZE_INPUT)) == 1


def test_static_scale_plan_has_one_launch() -> None:
    calls = list_calls()
    static_calls = [name for name in calls if "static=true 1 7168" in name]
    # Dynamic scales need another launch, which computes maxima.
    assert [len(make_plan(calls[name])) for name in static_calls] == [1]
