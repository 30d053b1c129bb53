"""Workspaces: one allocation, declared sizes that never shrink, red zones that notice."""

from dataclasses import replace

import pytest
import torch

from modular_kernel.catalog import check_all, make_kernel, this_machine
from modular_kernel.errors import CorruptionError
from modular_kernel.types import Problem
from modular_kernel.workspace import BufferSpec, Workspace

BASE = Problem(tokens=2000, hidden=16, intermediate=32, experts=256, top_k=8)
CPU = torch.device("cpu")


@pytest.mark.parametrize("experts", [1, 8, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fewer_tokens_never_need_a_larger_buffer(experts: int, dtype: torch.dtype) -> None:
    """A plan made for the most tokens serves every smaller call, whatever tiles that chooses."""
    problem = replace(BASE, experts=experts, dtype=dtype)
    machine = this_machine()
    for verdict in check_all(problem, machine):
        if not verdict.ok:
            continue
        kernel = make_kernel(verdict.prepare_finalize, verdict.experts, problem, machine=machine)
        most = kernel.workspace_specs(problem.tokens)
        for tokens in (1, 2, 7, 40, 100, 319, 320, 321, 750, 1500, 1999):
            for name, spec in kernel.workspace_specs(tokens).items():
                assert spec.numel <= most[name].numel, (verdict.pairing, name, tokens)


def test_buffers_share_one_allocation_and_do_not_overlap() -> None:
    specs = {"a": BufferSpec((3, 5), torch.bfloat16), "b": BufferSpec((7,), torch.int32)}
    workspace = Workspace(specs, CPU)
    a, b = workspace.take("a", (3, 5)), workspace.take("b", (7,))
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert a.data_ptr() % 256 == b.data_ptr() % 256 == workspace.take("a", (1,)).data_ptr() % 256
    a.fill_(1)
    b.fill_(2)
    assert bool((a == 1).all())
    assert workspace.nbytes == 512


def test_poison_fills_with_nan_and_huge_integers() -> None:
    specs = {"f": BufferSpec((9,), torch.float16), "i": BufferSpec((9,), torch.int32)}
    workspace = Workspace(specs, CPU, poison=True)
    assert bool(workspace.take("f", (9,)).isnan().all())
    assert int(workspace.take("i", (9,)).min()) > 1_000_000_000


def test_a_write_past_the_end_is_named() -> None:
    specs = {"first": BufferSpec((4,), torch.float32), "second": BufferSpec((4,), torch.float32)}
    workspace = Workspace(specs, CPU, poison=True)
    workspace.check_red_zones()
    overrun = workspace.take("first", (4,)).as_strided((5,), (1,))
    overrun[4] = 0.0
    with pytest.raises(CorruptionError, match="first"):
        workspace.check_red_zones()


def test_an_empty_workspace_is_allowed() -> None:
    workspace = Workspace({"none": BufferSpec((0,), torch.float32)}, CPU, poison=True)
    assert workspace.take("none", (0,)).numel() == 0
    workspace.check_red_zones()
