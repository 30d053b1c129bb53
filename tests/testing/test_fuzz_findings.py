"""Inputs that fuzzing found: each raised an untyped exception once and must now raise a typed
error.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from modular_kernel.errors import ConfigurationError, DeviceError, DtypeError, LayoutError
from modular_kernel.ops.route import route
from modular_kernel.spec.problem import Parallel
from modular_kernel.spec.router import RouterSpec
from modular_kernel.testing.stress.fuzz import public_functions, samples
from modular_kernel.testing.stress.fuzz.public_functions import JunkCall
from modular_kernel.utils.argument_checks import resolve_device
from modular_kernel.utils.tensor_checks import check_tensor

pytestmark = pytest.mark.cpu


def test_a_device_whose_package_is_not_installed_is_refused() -> None:
    with pytest.raises(DeviceError, match="hpu"):
        resolve_device("hpu")


@pytest.mark.parametrize("device", [torch.tensor(3), 2.5, "moon", None])
def test_count_invalid_ids_on_refuses_an_invalid_device(device: Any) -> None:
    with pytest.raises(ConfigurationError, match="device"):
        samples.make_torch_kernel().count_invalid_ids_on(device)


def _make_nested_tensor() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)])


@pytest.mark.parametrize(
    "call",
    [lambda x: check_tensor("x", x), lambda x: route(x, RouterSpec(2))],
    ids=["check_tensor", "route"],
)
def test_nested_tensors_are_refused(call: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(LayoutError, match="nested"):
        call(_make_nested_tensor())


def test_quantized_tensors_are_refused() -> None:
    quantized = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    with pytest.raises(DtypeError, match="qint8"):
        check_tensor("starts", quantized)


@pytest.mark.parametrize("experts", [{}, 2.0, [4], "4"])
def test_placing_an_invalid_number_of_experts_is_refused(experts: Any) -> None:
    with pytest.raises(ConfigurationError, match="experts"):
        Parallel(2).place(experts)


def test_uninitialized_parameters_are_refused() -> None:
    with pytest.raises(DtypeError, match="uninitialized"):
        check_tensor("x", torch.nn.UninitializedParameter())


@pytest.mark.parametrize("name", sorted(public_functions._CALLS))
def test_calls_without_junk_arguments_do_not_fail(name: str) -> None:
    """A call that fails without junk could not detect failures caused by junk."""
    outcome = public_functions.check_public_function(JunkCall(name, []))
    missing_files = ("load_experts", "FusedMoE.load", "FusedMoE.from_config", "AdapterPool.evict")
    expected = "typed error" if name in missing_files else "right"
    assert outcome.kind == expected, outcome.description
