"""Recognize mutants that no test on a CPU can detect, and state why.

Mutation scores are computed on CPUs, and leave these mutants out.
"""

import ast
import re
from functools import lru_cache

from modular_kernel.testing.mutation.operators import INT64_LOST
from modular_kernel.testing.mutation.source import Mutant

# Text in statements that concern a GPU, or that only run on a GPU.
_GPU_PATTERN = re.compile(
    r"arch\b|capturable|replayable|packages=|is_cuda|is_meta|use_triton|HAS_TRITON"
    r"|pdl_wait|pdl_arguments\(|inline_asm|== \"cuda\"|debug_barrier"
)
# A tensor moved to a device by name, as in `.to(self.device)`. Cases on a CPU have no other device.
_TRANSFER_PATTERN = re.compile(r"\.to\((?:\w+\.)*_?device\)$")
# Statements that depend on the installed Triton release.
_RELEASE_PATTERN = re.compile(r"\bRELEASE\b|hasattr\(owner, new\)")
# An instruction with its type, as in "and.b32 ".
_INSTRUCTION_PATTERN = re.compile(r"\b[a-z][a-z0-9]*\.(?:\w+\.)*[bsuf](?:16|32|64)(?:x2)?\s")

OFFSETS_REASON = "offsets of 32 bits, wrong from 2^31 elements on (tests/gpu/test_addressing.py)"
DEVICE_REASON = "statements about a GPU, or about whether an operation is interpreted"
RELEASE_REASON = (
    "statements that depend on the Triton release; only the installed one can be tested"
)
REASONS = (OFFSETS_REASON, DEVICE_REASON, RELEASE_REASON)


def find_undetectable_reason(mutant: Mutant) -> str | None:
    """Return why a mutant cannot be detected on a CPU, or None if it might be detected."""
    if mutant.edit.operator == INT64_LOST:
        return OFFSETS_REASON
    text = mutant.path.read_text(encoding="utf-8")
    statement = "\n".join(text.splitlines()[mutant.first - 1 : mutant.last])
    if _RELEASE_PATTERN.search(statement):
        return RELEASE_REASON
    is_gpu_only = (
        _GPU_PATTERN.search(statement)
        or _loses_transfer(mutant, text)
        or mutant.first in _find_lines_with_asm(text)
    )
    return DEVICE_REASON if is_gpu_only else None


def _loses_transfer(mutant: Mutant, text: str) -> bool:
    """Return whether the mutant drops a transfer to a device, which is the CPU in every case."""
    edit = mutant.edit
    replaced = text.encode()[edit.start : edit.end].decode()
    return edit.operator == "cast lost" and bool(_TRANSFER_PATTERN.search(replaced))


@lru_cache(maxsize=64)
def _find_lines_with_asm(text: str) -> frozenset[int]:
    """Return the lines of host functions that contain assembly, which the interpreter ignores."""
    lines = text.splitlines()
    asm_lines = set[int]()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if any(_INSTRUCTION_PATTERN.search(lines[number - 1]) for number in span):
                asm_lines.update(span)
    return frozenset(asm_lines)
