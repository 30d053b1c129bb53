"""A workspace is one allocation for all buffers of a call.

Declared sizes grow with the number of tokens. With poison, red zones between buffers detect
overruns.
"""

import math
from dataclasses import replace

import pytest
import torch

from modular_kernel.catalog import check_all, make_kernel, this_machine
from modular_kernel.errors import ConfigurationError, CorruptionError
from modular_kernel.replay import recording
from modular_kernel.spec.problem import Problem
from modular_kernel.workspace import FILLS, BufferSpec, Fills, Workspace, workspace_bytes

BASE = Problem(tokens=2000, hidden=16, intermediate=32, experts=256, top_k=8)
CPU = torch.device("cpu")


@pytest.mark.parametrize("experts", [1, 8, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fewer_tokens_never_need_a_larger_buffer(experts: int, dtype: torch.dtype) -> None:
    """The workspace for the maximum number of tokens is large enough for all smaller calls."""
    problem = replace(BASE, experts=experts, dtype=dtype)
    machine = this_machine()
    for verdict in check_all(problem, machine):
        if not verdict.ok:
            continue
        kernel = make_kernel(verdict.prepare_finalize, verdict.experts, problem, machine=machine)
        max_specs = kernel.workspace_specs(problem.tokens)
        for tokens in (1, 2, 7, 40, 100, 319, 320, 321, 750, 1500, 1999):
            for name, spec in kernel.workspace_specs(tokens).items():
                assert spec.numel <= max_specs[name].numel, (verdict.pairing, name, tokens)


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


def test_poison_values_change_between_calls() -> None:
    dtypes = (torch.float16, torch.float8_e4m3fn, torch.int32, torch.uint8, torch.int8)
    specs = {str(dtype): BufferSpec((8,), dtype) for dtype in dtypes}
    workspace = Workspace(specs, CPU, poison=True)
    values_by_call = []
    for _ in range(4):
        buffers = [workspace.take(name, (8,)) for name in specs]
        values = [float(buffer[3]) for buffer in buffers]
        assert all(len(buffer.float().nan_to_num(7.0).unique()) == 1 for buffer in buffers)
        ids = workspace.take(str(torch.uint8), (8,)).view(torch.int32)
        values_by_call.append([*values, int(ids[0])])
        workspace.poison()
    assert repr(values_by_call) == repr(
        [
            [math.nan, math.nan, 0x3F3F3F3F, 255.0, 127.0, -1],
            [300.0, 288.0, 0.0, 0.0, -127.0, 0],
            [-300.0, -288.0, 1.0, 67.0, 67.0, 0x43434343],
            [math.nan, math.nan, 0x3F3F3F3F, 255.0, 127.0, -1],
        ]
    ).replace(str(0x3F3F3F3F), f"{float(0x3F3F3F3F)}")


def test_workspaces_with_shared_fills_continue_their_sequence() -> None:
    specs, fills = {"f": BufferSpec((9,), torch.float32)}, Fills()
    values = [
        float(Workspace(specs, CPU, poison=True, fills=fills).take("f", (9,))[8]) for _ in range(3)
    ]
    assert repr(values) == repr([fill.real for fill in FILLS])


def test_a_write_past_the_end_is_reported_with_the_buffer() -> None:
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


# ------------------------------------------------------------------------- buffers in shared memory

OVERLAPPING_SPECS = {
    "rows": BufferSpec((64,), torch.bfloat16),
    "sums": BufferSpec((256,), torch.bfloat16, over=("rows", "scale", "not_declared")),
    "bias": BufferSpec((8,), torch.float32),
    "scale": BufferSpec((16,), torch.float32),
}


def test_a_buffer_reuses_the_memory_of_dead_ones() -> None:
    workspace = Workspace(OVERLAPPING_SPECS, CPU)
    starts = {
        name: workspace.take(name, spec.shape).data_ptr()
        for name, spec in OVERLAPPING_SPECS.items()
    }
    assert starts["rows"] == starts["sums"]
    assert starts["scale"] == starts["rows"] + 256
    assert starts["bias"] >= starts["sums"] + 512
    assert workspace.nbytes == workspace_bytes(OVERLAPPING_SPECS) == 512 + 256
    separate = {name: replace(spec, over=()) for name, spec in OVERLAPPING_SPECS.items()}
    assert workspace_bytes(separate) == 256 + 512 + 256 + 256


def test_buffers_over_a_larger_one_do_not_overlap() -> None:
    specs = {**OVERLAPPING_SPECS, "rows": BufferSpec((4096,), torch.bfloat16)}
    workspace = Workspace(specs, CPU)
    sums, scale, bias = (workspace.take(n, specs[n].shape) for n in ("sums", "scale", "bias"))
    assert scale.data_ptr() == sums.data_ptr() + 8192
    assert bias.data_ptr() == scale.data_ptr() + 256


def test_a_buffer_is_poisoned_when_it_reuses_the_memory_of_another() -> None:
    """When the other buffer is acquired again, it is poisoned, too."""
    workspace = Workspace(OVERLAPPING_SPECS, CPU, poison=True)
    rows, scale = workspace.take("rows", (64,)), workspace.take("scale", (16,))
    bias = workspace.take("bias", (8,))
    for tensor in (rows, scale, bias):
        tensor.fill_(1)
    assert workspace.take("rows", (64,)).eq(1).all()  # a buffer in use is not poisoned
    sums = workspace.take("sums", (256,))
    assert sums.isnan().all()
    assert rows.isnan().all()
    assert bias.eq(1).all()
    sums.fill_(2)
    workspace.check_red_zones()
    assert workspace.take("scale", (16,)).isnan().all()  # acquired again for the next chunk
    assert workspace.take("rows", (64,)).isnan().all()
    workspace.take("sums", (256,)).fill_(3)
    workspace.check_red_zones()


@pytest.mark.parametrize("name", ["rows", "scale"])
def test_a_write_past_the_end_of_a_dead_buffer_is_reported(name: str) -> None:
    workspace = Workspace(OVERLAPPING_SPECS, CPU, poison=True)
    numel = OVERLAPPING_SPECS[name].numel
    workspace.take(name, (numel,)).as_strided((numel + 1,), (1,))[numel] = 0.0
    workspace.take("sums", (256,)).fill_(2)
    with pytest.raises(CorruptionError, match=name):
        workspace.check_red_zones()
    workspace.poison()
    workspace.check_red_zones()


def test_a_write_past_the_end_of_a_buffer_over_others_is_reported() -> None:
    workspace = Workspace(OVERLAPPING_SPECS, CPU, poison=True)
    workspace.take("sums", (256,)).as_strided((257,), (1,))[256] = 0.0
    with pytest.raises(CorruptionError, match="sums"):
        workspace.check_red_zones()


def test_a_replayed_call_acquires_no_buffer_and_still_detects_overruns() -> None:
    workspace = Workspace(OVERLAPPING_SPECS, CPU, poison=True)
    sums, bias = workspace.take("sums", (256,)), workspace.take("bias", (8,))
    workspace.poison()
    sums.fill_(2)  # over the red zones of `rows` and `scale`
    workspace.check_red_zones(replayed=True)
    bias.as_strided((9,), (1,))[8] = 0.0
    with pytest.raises(CorruptionError, match="bias"):
        workspace.check_red_zones(replayed=True)


def test_poisoning_is_not_part_of_a_recorded_call() -> None:
    """Calls of a poisoned plan must be replayed, too, so that poison reveals launches that were not
    recorded.
    """
    workspace = Workspace(OVERLAPPING_SPECS, CPU, poison=True)
    with recording.record_launches(()) as recorder:
        workspace.take("rows", (1,))
        sums = workspace.take("sums", (256,))
    assert bool(sums.isnan().all())
    assert recorder.refusal_reason == ""
    with recording.record_launches(()) as recorder:
        sums.fill_(0)
    assert recorder.refusal_reason != ""


@pytest.mark.parametrize(
    "over",
    [{"rows": ("rows",)}, {"rows": ("sums",), "sums": ("rows",)}, {"bias": ("sums",)}],
    ids=["itself", "each other", "a chain"],
)
def test_a_buffer_over_one_that_is_over_others_is_refused(over: dict[str, tuple[str, ...]]) -> None:
    specs = {
        name: replace(spec, over=over.get(name, spec.over))
        for name, spec in OVERLAPPING_SPECS.items()
    }
    with pytest.raises(ConfigurationError, match="a buffer over buffers that are not over others"):
        Workspace(specs, CPU)
