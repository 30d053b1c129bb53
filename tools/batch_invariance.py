"""Prints the tables of docs/batch-invariance.md: which parts are batch invariant, and the cost.

    TRITON_INTERPRET=1 python tools/batch_invariance.py  # rows whose bits change, for every part
    python tools/batch_invariance.py --cost              # launches for sm_90, without a GPU

Progress is printed to stderr. On a GPU, leave TRITON_INTERPRET unset.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experts.triton.configs.select import on_device
from experts.triton.launch_config import Device
from modular_kernel.catalog import collect_packages, load_catalog, make_kernel, this_machine
from modular_kernel.machine import find_importable
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.testing.compile.cases import compile_call
from modular_kernel.testing.compile.report import CompileRecord
from modular_kernel.testing.verify.invariance_table import format_markdown, measure_invariance

SCHEMES = (
    *("none", "fp8_w8a8_channel", "fp8_w8a8_block", "int8_w8a8_channel"),
    *("int4_w4a16_group", "mxfp4_w4a16"),
)
TOKENS = (1, 64, 4096)
COLUMNS = (
    *("scheme", "tokens", "batch invariant", "launches", "kernel of GEMM 1", "BLOCK_M"),
    *("registers", "shared bytes"),
)
PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")


def make_invariance_table() -> str:
    """Return the Markdown table of rows whose bits change, for every part."""
    rows = []
    for row in measure_invariance(this_machine()):
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return format_markdown(rows)


def make_cost_table() -> str:
    """Return the Markdown table of TritonExperts' launches with and without batch invariance."""
    packages = find_importable({"triton", *collect_packages(load_catalog())})
    machine = Machine("cuda", (9, 0), packages, name="NVIDIA H200")
    layer = Problem(tokens=1, hidden=1024, intermediate=512, experts=8, top_k=2)
    rows: list[tuple[object, ...]] = [COLUMNS, ("---",) * len(COLUMNS)]
    for quant in SCHEMES:
        for tokens in TOKENS:
            for invariant in (False, True):
                problem = replace(layer, tokens=tokens, quant=quant, batch_invariant=invariant)
                with on_device(Device.from_machine(machine)):
                    kernel = make_kernel(*PAIR, problem, machine=machine)
                    records = compile_call(kernel, "sm_90")
                cells = (
                    f"`{quant}`",
                    tokens,
                    "yes" if invariant else "no",
                    *_summarize_launches(records),
                )
                print(cells, file=sys.stderr, flush=True)
                rows.append(cells)
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def _summarize_launches(records: list[CompileRecord]) -> tuple[object, ...]:
    """Return the number of launches, and GEMM 1's kernel, BLOCK_M, registers and shared bytes."""
    gemm1 = next(r for r in records if "gemm" in r.kernel or "_up_" in r.kernel)
    block_m = gemm1.config.get("BLOCK_M", "")
    return len(records), f"`{gemm1.kernel}`", block_m, gemm1.registers, gemm1.shared


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cost", action="store_true")
    print(make_cost_table() if parser.parse_args().cost else make_invariance_table(), end="")
