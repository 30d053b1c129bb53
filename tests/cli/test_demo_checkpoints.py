"""Quantized checkpoints of `mk demo`: correct layers are within the bound, wrong ones not."""

import pytest
import torch

from modular_kernel.cli.demo import PAIRINGS
from modular_kernel.cli.demo_checkpoints import CHECKPOINTS, check_layer
from modular_kernel.testing.checkpoints.samples import Tensors, write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def exchange_gate_and_up(tensors: Tensors) -> None:
    """Exchange whole modules, or adjacent rows where gate and up alternate."""
    for name in list(tensors):
        for gate, up in ((".w1.", ".w3."), (".gate_proj.", ".up_proj.")):
            if gate in name:
                other = name.replace(gate, up)
                tensors[name], tensors[other] = tensors[other], tensors[name]
        if "gate_up_proj_" in name and "bias" not in name:
            pairs = tensors[name].unflatten(1, (-1, 2))
            tensors[name] = pairs.flip(2).flatten(1, 2).contiguous()


@pytest.mark.parametrize("pair", PAIRINGS[:2], ids=" x ".join)
@pytest.mark.parametrize(("family", "kind"), CHECKPOINTS)
def test_exchanged_gate_and_up_exceed_the_bound(family, kind, pair, tmp_path) -> None:
    good = check_layer(write(tmp_path / "good", family, kind), family, kind, pair, DEVICE)
    assert good.ok
    assert good.error > 0
    changed = write(tmp_path / "bad", family, kind, change=exchange_gate_and_up)
    assert not check_layer(changed, family, kind, pair, DEVICE).ok
