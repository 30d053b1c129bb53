"""Launches of the grouped_w4 path compile for sm_90, and its MMAs read weights from registers.

In the loop with the MMAs, packed weights and scales are loaded as vectors, nothing is stored to
shared memory, and the assembler does not serialize the MMAs.
"""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from path_launches import launches_of
from triton.runtime.jit import JITFunction

from experts.triton.grouped_w4 import grouped_w4_config
from experts.triton.grouped_w4.grouped_w4_path import GroupedW4Path
from experts.triton.launch_config import Device
from modular_kernel import Problem
from modular_kernel.quant import quantized_weights as stored
from modular_kernel.testing.compile import report
from modular_kernel.testing.compile.report import check

BASE = Problem(
    tokens=600, hidden=512, intermediate=256, experts=4, top_k=2, dtype=torch.bfloat16,
    quant="mxfp4_w4a16",
)  # fmt: skip
DEVICE = Device("sm_90", tma=True)
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9.]*)([^;]*);"
)
_LABEL = re.compile(r"^(\.L_x_\d+):")


@pytest.mark.parametrize("rows", [32, 64, 128])
@pytest.mark.parametrize("experts_per_chunk", [4, 3])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"quant": "mxfp4_w4a16:repacked=true", "activation": "relu2", "bias": True},
        {"hidden": 160, "activation": "swiglu_oai:alpha=1.702,limit=7,interleaved=true"},
        {"quant": "int4_w4a16_group:group=64"},
        {"quant": "int4_w4a16_group:group=32,zero_points=true", "bias": True},
        {"quant": "nvfp4_w4a16"},
    ],
    ids=str,
)
def test_launches_compile_without_violations(
    change: dict[str, object], experts_per_chunk: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(BASE, **change)  # type: ignore[arg-type]
    assert grouped_w4_config.supports(problem, DEVICE)
    monkeypatch.setattr(grouped_w4_config, "experts_per_chunk", lambda p: experts_per_chunk)
    tiles = grouped_w4_config.default_config(problem, rows)
    records = launches_of(GroupedW4Path(problem), problem, tiles)
    num_chunks = -(-4 // experts_per_chunk)
    names = Counter(record.kernel for record in records)
    assert names["tile_weights_kernel"] == names["grouped_gemm_w4_tma_kernel"] == 2 * num_chunks
    assert names["select_expert_tiles_kernel"] == (2 * num_chunks if num_chunks > 1 else 0)
    for record in records:
        is_product = record.kernel == "grouped_gemm_w4_tma_kernel"
        assert check(record, "HGMMA" if is_product else None) == ()
        if is_product:
            packed_format = grouped_w4_config.packed_formats(problem)[0]
            estimated_bytes = grouped_w4_config._count_shared_bytes(
                tiles.gemm1, record.config["STAGING_BUFFERS"], packed_format
            )
            assert (
                estimated_bytes - grouped_w4_config._MAX_BARRIER_BYTES
                <= record.shared
                <= estimated_bytes
            )


def find_mma_loops(cubin: bytes) -> list[list[tuple[str, str]]]:
    """Return the instructions and operands of the innermost loops with MMAs."""
    mma_loops, labels, code = [], {}, []
    disassembly = report._run_tool(triton.knobs.nvidia.nvdisasm.path, "-ndf", "-c", cubin=cubin)
    for line in disassembly.splitlines():
        label, instruction = _LABEL.match(line.strip()), _INSTRUCTION.match(line)
        if label:
            labels[label[1]] = len(code)
        elif instruction:
            code.append((instruction[1], instruction[2]))
    for index, (name, operands) in enumerate(code):
        target = re.search(r"\.L_x_\d+", operands)
        if name == "BRA" and target and labels.get(target[0], index) < index:
            body = code[labels[target[0]] : index]
            num_mmas = sum(name.startswith("HGMMA") for name, _ in body)
            if num_mmas == 8 and not any(n == "EXIT" for n, _ in body):
                mma_loops.append(body)
    min_length = min(map(len, mma_loops), default=0)
    return [body for body in mma_loops if len(body) < 1.5 * min_length]


@pytest.mark.parametrize("rows", [32, 64, 128])
@pytest.mark.parametrize(
    ("quant", "scales", "max_instructions", "num_loads"),
    [
        ("mxfp4_w4a16", torch.uint8, 175, 3),
        ("nvfp4_w4a16", torch.float8_e4m3fn, 190, 3),
        ("int4_w4a16_group", torch.bfloat16, 140, 3),
        ("int4_w4a16_group", torch.float16, 210, 3),
        ("int4_w4a16_group", torch.float32, 290, 3),
        ("int4_w4a16_group:zero_points=true", torch.bfloat16, 175, 3),
        ("int4_w4a16_group:group=32,zero_points=true", torch.float16, 260, 4),
    ],
)
def test_mmas_read_weights_from_registers(
    quant: str,
    scales: torch.dtype,
    max_instructions: int,
    num_loads: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored, "_get_scale_dtypes", lambda problem: (scales,))
    stored._make_weight_specs.cache_clear()
    problem = replace(BASE, quant=quant)
    cubins: list[bytes] = []
    run = JITFunction.run

    def run_and_record(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = run(self, *args, **kwargs)
        if self.fn.__name__ == "grouped_gemm_w4_tma_kernel":
            cubins.append(compiled.asm["cubin"])
        return compiled

    monkeypatch.setattr(JITFunction, "run", run_and_record)
    try:
        launches_of(
            GroupedW4Path(problem), problem, grouped_w4_config.default_config(problem, rows)
        )
    finally:
        stored._make_weight_specs.cache_clear()
    assert len(cubins) == 2
    for cubin in cubins:
        loops = find_mma_loops(cubin)
        assert len(loops) == 4  # for full and half tiles of each of two warpgroups
        for body in loops:
            counts = Counter(name.split(".")[0] for name, _ in body)
            assert not {"STS", "STSM", "STL", "LDL", "SHFL", "STG", "LDG"} & set(counts)
            assert counts["LDS"] == num_loads
            assert len(body) <= max_instructions
            # The left operand is in registers, and only the right operand is a descriptor.
            assert all(
                re.search(r" R\d+, R\d+, gdesc", operands)
                for name, operands in body
                if name.startswith("HGMMA")
            )
            assert sum(name == "WARPGROUP.ARRIVE" for name, _ in body) == 2
            assert sum(name.startswith("WARPGROUP.DEPBAR") for name, _ in body) == 1
