"""Mutants that no run on a CPU can tell from the original, by what they change."""

import ast
import re
from functools import lru_cache

from modular_kernel.testing.mutation.operators import WIDE
from modular_kernel.testing.mutation.source import Mutant

# Words of a statement that speaks of a GPU or of what is only done on one.
_GPU = re.compile(
    r"arch\b|capturable|replayable|packages=|is_cuda|is_meta|use_triton|HAS_TRITON"
    r"|after_predecessor|overlap\(|inline_asm|== \"cuda\"|debug_barrier"
)
# What depends on the release of triton that is installed.
_RELEASE = re.compile(r"\bRELEASE\b|hasattr\(owner, new\)")
# An instruction with its type, as in "and.b32 ".
_INSTRUCTION = re.compile(r"\b[a-z][a-z0-9]*\.(?:\w+\.)*[bsuf](?:16|32|64)(?:x2)?\s")

OFFSETS = "offsets of 32 bits, wrong from 2^31 elements on (tests/gpu/test_addressing.py)"
DEVICE = "statements about a GPU, or about whether an operation is interpreted"
RELEASES = "statements about the release of triton: the one installed is one of their sides"
REASONS = (OFFSETS, DEVICE, RELEASES)


def apart(mutant: Mutant) -> str | None:
    """Why a mutant is listed apart instead of being run; None if it is run."""
    if mutant.edit.operator == WIDE:
        return OFFSETS
    text = mutant.path.read_text(encoding="utf-8")
    statement = "\n".join(text.splitlines()[mutant.first - 1 : mutant.last])
    if _RELEASE.search(statement):
        return RELEASES
    return DEVICE if _GPU.search(statement) or mutant.first in _assembling(text) else None


@lru_cache(maxsize=64)
def _assembling(text: str) -> frozenset[int]:
    """Return the lines of host functions that write assembler, which the interpreter does not
    read.
    """
    lines = text.splitlines()
    found = set[int]()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if any(_INSTRUCTION.search(lines[number - 1]) for number in span):
                found.update(span)
    return frozenset(found)
