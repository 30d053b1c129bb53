"""Source mutants: changed lines, mutated modules, samples, and mutants that no test on a CPU can
detect.
"""

from pathlib import Path

import pytest
from mutation_samples import KERNEL, mutants_in

from modular_kernel.catalog import load_catalog
from modular_kernel.errors import ConfigurationError
from modular_kernel.testing.mutation import draw_sample, mutants_of
from modular_kernel.testing.mutation.cpu_undetectable import (
    DEVICE_REASON,
    OFFSETS_REASON,
    RELEASE_REASON,
    find_undetectable_reason,
)
from modular_kernel.testing.mutation.patched_module import changed_texts
from modular_kernel.testing.mutation.scope import modules_of


@pytest.mark.parametrize(
    ("operator", "line"),
    [
        ("mask lost", "total += tl.load(x_ptr + row * stride_x + offsets, mask=None, other=0.0)"),
        ("compare", "mask = (offsets <= columns) & (row >= 0)"),
        ("compare", "mask = (offsets < columns) & (row > 0)"),
        ("operand lost", "mask = (offsets < columns)"),
        ("operand lost", "total += tl.load(x_ptr + row + offsets, mask=mask, other=0.0)"),
        ("dtype", "total = tl.zeros((BLOCK,), tl.float16)"),
        ("loop", "for step in range(0, (4) - 1):"),
        ("order", "for step in range((4) - 1, (0) - 1, -1):"),
        ("clamp", "total = (total)"),
        ("stale", "pass"),
        ("step lost", "pass"),
        ("64 bits lost", "row = tl.program_id(0)"),
        ("constant", "total = tl.minimum(total, 8.75)"),
    ],
)
def test_operators_mutate_a_kernel(tmp_path: Path, operator: str, line: str) -> None:
    assert (operator, line) in mutants_in(tmp_path, KERNEL)


def test_the_receiver_of_a_removed_call_keeps_its_parentheses(tmp_path: Path) -> None:
    source = "def f(a, b, c):\n    d = (a + b).to(c) * (a >> 16).clamp(0, 9)\n    return d.to(c)\n"
    casts = {line for operator, line in mutants_in(tmp_path, source) if operator == "cast lost"}
    clamps = {line for operator, line in mutants_in(tmp_path, source) if operator == "clamp"}
    assert casts == {"d = (a + b) * (a >> 16).clamp(0, 9)", "return d"}
    assert clamps == {"d = (a + b).to(c) * (a >> 16)"}


def test_code_without_effect_on_values_is_not_mutated(tmp_path: Path) -> None:
    source = '''
"""A text with 1 + 1."""
from typing import Literal

Mode = Literal["a", "b"]
Rows = Tokens | list[int] | None


def f(x: int | None = None) -> int | None:
    """One more, 2 < 3."""
    assert x < 4, "a message"
    if x > 5:
        raise ValueError(f"got {x + 6}")
    launch(num_warps=8)
    return x
'''
    mutants = mutants_in(tmp_path, source)
    assert {key[1] for key in mutants} == {"if not (x > 5):", "pass"}


def test_every_mutant_is_valid_python_and_has_a_unique_identity() -> None:
    catalog = load_catalog()
    mutants = [
        mutant
        for module, path in modules_of("TritonExperts", catalog).items()
        for mutant in mutants_of(module, path)
    ]
    assert len(mutants) > 3000
    assert len({mutant.ident for mutant in mutants}) == len(mutants)
    for mutant in mutants[::20]:
        compile(mutant.text(), "mutant", "exec")


def test_modules_of_a_part_include_its_kernels_and_operations() -> None:
    modules = modules_of("TritonExperts", load_catalog())
    assert {
        "experts.triton.standard",
        "experts.triton.aligned.kernels.grouped_gemm",  # imported when the kernel is launched
        "experts.triton.gemv_tma.kernels.pipeline",
        "modular_kernel.ops.align",
        "modular_kernel.ops.kernels.align",
        "topk_reduce.noop",
    } <= set(modules)
    assert not [
        m
        for m in modules
        if m.endswith(".config")
        or m.startswith(("experts.triton.configs", "experts.torch", "prepare"))
    ]
    with pytest.raises(ConfigurationError, match="TritonExperts"):
        modules_of("NoSuchExperts", load_catalog())


def test_samples_depend_only_on_the_seed(tmp_path: Path) -> None:
    all_mutants = tuple(mutants_in(tmp_path, KERNEL).values())
    sample = draw_sample(all_mutants, 9, "1.0")
    assert len(sample) == 9
    assert sample == draw_sample(all_mutants[::-1], 9, "1.0")
    assert sample != draw_sample(all_mutants, 9, "1.1")
    assert draw_sample(all_mutants, None, "1.0") == all_mutants


def test_mutants_with_32_bit_offsets_are_undetectable(tmp_path: Path) -> None:
    mutants = mutants_in(tmp_path, KERNEL)
    assert (
        find_undetectable_reason(mutants["64 bits lost", "row = tl.program_id(0)"])
        == OFFSETS_REASON
    )
    assert find_undetectable_reason(mutants["clamp", "total = (total)"]) is None
    version_mutants = mutants_in(tmp_path, 'NEW = RELEASE == "3.6"\n')
    assert {find_undetectable_reason(mutant) for mutant in version_mutants.values()} == {
        RELEASE_REASON
    }


MODULE_WITH_ASSEMBLER = """
import triton


def _code(i: int) -> str:
    low = 4 * i
    return f"and.b32 $0, $1, {low:#010x}; "


@triton.jit
def kernel(out_ptr):
    low = 4 * 2
"""


def test_mutants_of_assembler_are_undetectable(tmp_path: Path) -> None:
    """The interpreter does not execute assembler."""
    path = tmp_path / "module.py"
    path.write_text(MODULE_WITH_ASSEMBLER, encoding="utf-8")
    mutants = {
        mutant.first: find_undetectable_reason(mutant) for mutant in mutants_of("module", path)
    }
    assert mutants == {6: DEVICE_REASON, 12: None}


def test_several_mutants_are_applied_together_unless_they_overlap(tmp_path: Path) -> None:
    mutants = mutants_in(tmp_path, KERNEL)
    clamp, order = (
        mutants["clamp", "total = (total)"],
        mutants["compare", "mask = (offsets <= columns) & (row >= 0)"],
    )
    ((_, source),) = changed_texts((clamp, order)).values()
    assert "total = (total)" in source
    assert "mask = (offsets <= columns) & (row >= 0)" in source
    assert changed_texts((clamp,))["module"][1] == clamp.text()
    with pytest.raises(ConfigurationError, match="two at the same place"):
        changed_texts((clamp, clamp))
