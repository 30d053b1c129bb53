"""A Triton kernel for mutation tests, and a function that lists the mutants of a source."""

from pathlib import Path

from modular_kernel.testing.mutation import Mutant, mutants_of

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, rows, columns, stride_x, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = (offsets < columns) & (row >= 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, 4):
        total += tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=0.0)
    total = tl.minimum(total, 7.0)
    tl.store(out_ptr + row * columns + offsets, tl.where(mask, total, 0.0), mask=mask)
"""


def mutants_in(folder: Path, text: str) -> dict[tuple[str, str], Mutant]:
    """Return {(operator, new lines): mutant} for a module with this text."""
    path = folder / "module.py"
    path.write_text(text, encoding="utf-8")
    mutants = {}
    for mutant in mutants_of("module", path):
        new_lines = [line[1:].strip() for line in mutant.diff().splitlines()[3:] if line[0] == "+"]
        mutants[mutant.edit.operator, " ".join(new_lines)] = mutant
    return mutants
