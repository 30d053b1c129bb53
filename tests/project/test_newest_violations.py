"""The check of kernels with the newest triton accepts only known regressions."""

from typing import Any

import pytest
from newest_violations import errors

SPILL = "240 bytes of stack per thread: registers are spilled"


def make_entry(*violations: str, **changes: Any) -> dict[str, Any]:
    record = {"kernel": "gemv_gate_up_kernel", "num_warps": 2}
    config = {"TOP_K": 8, "INPUT_QUANT": "group"} | changes.pop("config", {})
    return {"record": record | changes | {"config": config}, "violations": list(violations)}


def make_result(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"kernels": list(entries), "left_out": []}


@pytest.mark.parametrize("top_k", [1, 8, 9, 32])
def test_known_spill_is_accepted_for_any_top_k(top_k: int) -> None:
    """The spill does not depend on TOP_K."""
    assert errors(make_result(make_entry(SPILL, config={"TOP_K": top_k}))) == []


@pytest.mark.parametrize(
    "changes",
    [{"num_warps": 4}, {"config": {"INPUT_QUANT": "token"}}, {"kernel": "gemv_down_kernel"}],
)
def test_unknown_violation_is_an_error(changes: dict[str, Any]) -> None:
    assert errors(make_result(make_entry(SPILL), make_entry(SPILL, **changes))) == [SPILL]


def test_fixed_regression_is_an_error() -> None:
    (message,) = errors(make_result(make_entry()))
    assert message.startswith("no longer violated, remove it here and in docs/versions.md")


def test_missing_kernels_are_an_error() -> None:
    left_out = [{"kernel": "a", "reason": ""}, {"kernel": "b", "reason": "of another GPU"}]
    result = {"kernels": [make_entry(SPILL)], "left_out": left_out}
    assert errors(result) == ["no case launches a"]
    assert errors(make_result())[0] == "no kernel was compiled"
