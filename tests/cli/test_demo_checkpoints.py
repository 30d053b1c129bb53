"""Quantized checkpoints of `mk demo`: only correct layers have errors within the bound."""

import pytest
import torch

from modular_kernel.cli.demo import PAIRINGS
from modular_kernel.cli.demo_checkpoints import CHECKPOINTS, check_layer
from modular_kernel.testing.checkpoints.samples import Tensors, write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def exchange_gate_and_up(tensors: Tensors) -> None:
    """Exchange the modules of gate and up, or adjacent rows if gate and up rows alternate."""
    for name in list(tensors):
        for gate, up in ((".w1.", ".w3."), (".gate_proj.", ".up_proj.")):
            if gate in name:
                up_name = name.replace(gate, up)
                tensors[name], tensors[up_name] = tensors[up_name], tensors[name]
        if "gate_up_proj_" in name and "bias" not in name:
            pairs = tensors[name].unflatten(1, (-1, 2))
            tensors[name] = pairs.flip(2).flatten(1, 2).contiguous()


@pytest.mark.parametrize("pair", PAIRINGS[:2], ids=" x ".join)
@pytest.mark.parametrize(("family", "format_name"), CHECKPOINTS)
def test_exchanged_gate_and_up_exceed_the_bound(family, format_name, pair, tmp_path) -> None:
    row = check_layer(
        write(tmp_path / "correct", family, format_name), family, format_name, pair, DEVICE
    )
    assert row.ok
    assert row.error > 0
    wrong = write(tmp_path / "wrong", family, format_name, change=exchange_gate_and_up)
    assert not check_layer(wrong, family, format_name, pair, DEVICE).ok
