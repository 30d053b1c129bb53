"""Checks of tensors in cases that test_public_tensors does not cover."""

import pytest
import torch

from modular_kernel.errors import ConfigurationError, DeviceError, DtypeError, LayoutError
from modular_kernel.quant.repacking import repack
from modular_kernel.utils.tensor_checks import (
    check_output,
    check_tensor,
    check_tensors,
    compile_only,
)


def test_lazily_conjugated_views_and_sparse_tensors_are_refused() -> None:
    with pytest.raises(LayoutError, match="x: got a lazily conjugated view"):
        check_tensor("x", torch.zeros(2, dtype=torch.complex64).conj())
    with pytest.raises(LayoutError, match=r"x: got torch\.sparse_coo"):
        check_tensor("x", torch.eye(2).to_sparse())
    with pytest.raises(LayoutError, match="x: got a nested tensor"):
        check_tensor("x", torch.nested.nested_tensor([torch.zeros(2)]))


def test_meta_tensors_are_accepted_where_nothing_is_launched() -> None:
    meta = torch.empty(2, device="meta")
    with pytest.raises(DeviceError, match="x: got meta, without memory, need values"):
        check_tensor("x", meta)
    assert check_tensor("x", meta, meta=True) is meta
    with compile_only():
        check_tensor("x", meta)
    with pytest.raises(DeviceError, match="x: got meta"):
        check_tensor("x", meta)
    with pytest.raises(DeviceError, match="x: got cpu, need meta"):
        check_tensor("x", torch.empty(2), device=meta.device, meta=True)


def test_none_is_accepted_for_optional_tensors() -> None:
    check_tensors({"w": torch.empty(2), "b": None}, optional=("b",))
    with pytest.raises(DtypeError, match="w: got NoneType, need a tensor"):
        check_tensors({"w": None, "b": None}, optional=("b",))


def test_views_that_exceed_their_storage_are_refused() -> None:
    """A view also needs the memory before its storage offset."""
    buffer = torch.zeros(8)
    second_half = buffer[4:]
    buffer.untyped_storage().resize_(24)
    with pytest.raises(LayoutError, match=r"x: got 24 bytes of memory .*, need the 32"):
        check_tensor("x", second_half)
    check_tensor("x", buffer[:6])


def test_an_output_with_overlapping_elements_is_refused() -> None:
    buffer = torch.zeros(10)
    check_output("out", buffer[:5], {"x": buffer[5:], "b": None})
    with pytest.raises(ConfigurationError, match="out: got memory of x, need separate memory"):
        check_output("out", buffer[:6], {"x": buffer[5:]})
    with pytest.raises(LayoutError, match=r"out: got strides \(0, 1\)"):
        check_output("out", torch.zeros(4).expand(3, 4), {})


def test_repacking_into_memory_that_overlaps_the_input_is_refused() -> None:
    buffer = torch.zeros(3, 4, 16, dtype=torch.uint8)
    repack(buffer[:2], out=buffer[:2])
    with pytest.raises(ConfigurationError, match="out: got memory of w"):
        repack(buffer[:2], out=buffer[1:])
