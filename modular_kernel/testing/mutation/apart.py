"""Mutants that no run on a CPU can tell from the original, by what they change."""

import re

from modular_kernel.testing.mutation.operators import WIDE
from modular_kernel.testing.mutation.source import Mutant

# Words of a statement that speaks of a GPU or of what is only done on one.
_GPU = re.compile(
    r"arch\b|capturable|replayable|packages=|is_cuda|is_meta|use_triton|HAS_TRITON"
    r"|after_predecessor|overlap\("
)

OFFSETS = "offsets of 32 bits, wrong from 2^31 elements on (tests/gpu/test_addressing.py)"
DEVICE = "statements about a GPU, or about whether an operation is interpreted"
REASONS = (OFFSETS, DEVICE)


def apart(mutant: Mutant) -> str | None:
    """Why a mutant is listed apart instead of being run; None if it is run."""
    if mutant.edit.operator == WIDE:
        return OFFSETS
    lines = mutant.path.read_text(encoding="utf-8").splitlines()
    statement = "\n".join(lines[mutant.first - 1 : mutant.last])
    return DEVICE if _GPU.search(statement) else None
