"""Source mutants: what is changed, in which modules, and what is left alone or listed apart."""

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
    undetectable_reason,
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
def test_a_kernel_is_changed_as_hands_slip(tmp_path: Path, operator: str, line: str) -> None:
    assert (operator, line) in mutants_in(tmp_path, KERNEL)


def test_what_a_method_was_called_of_keeps_its_parentheses(tmp_path: Path) -> None:
    text = "def f(a, b, c):\n    d = (a + b).to(c) * (a >> 16).clamp(0, 9)\n    return d.to(c)\n"
    casts = {line for operator, line in mutants_in(tmp_path, text) if operator == "cast lost"}
    clamps = {line for operator, line in mutants_in(tmp_path, text) if operator == "clamp"}
    assert casts == {"d = (a + b) * (a >> 16).clamp(0, 9)", "return d"}
    assert clamps == {"d = (a + b).to(c) * (a >> 16)"}


def test_what_does_not_decide_a_value_is_left_alone(tmp_path: Path) -> None:
    text = '''
"""A text with 1 + 1."""
from typing import Literal

Way = Literal["a", "b"]
Rows = Tokens | list[int] | None


def f(x: int | None = None) -> int | None:
    """One more, 2 < 3."""
    assert x < 4, "a message"
    if x > 5:
        raise ValueError(f"got {x + 6}")
    launch(num_warps=8)
    return x
'''
    found = mutants_in(tmp_path, text)
    assert {key[1] for key in found} == {"if not (x > 5):", "pass"}


def test_every_mutant_is_python_and_has_an_identity_of_its_own() -> None:
    catalog = load_catalog()
    found = [
        mutant
        for module, path in modules_of("TritonExperts", catalog).items()
        for mutant in mutants_of(module, path)
    ]
    assert len(found) > 3000
    assert len({mutant.ident for mutant in found}) == len(found)
    for mutant in found[::20]:
        compile(mutant.text(), "mutant", "exec")


def test_a_part_is_its_modules_its_kernels_and_its_operations() -> None:
    found = modules_of("TritonExperts", load_catalog())
    assert {
        "experts.triton.contiguous",
        "experts.triton.aligned.kernels.grouped_gemm",  # imported late
        "experts.triton.gemv_tma.kernels.pipeline",
        "modular_kernel.ops.align",
        "modular_kernel.ops.kernels.align",
        "topk_reduce.noop",
    } <= set(found)
    assert not [
        m
        for m in found
        if m.endswith(".config")
        or m.startswith(("experts.triton.configs", "experts.torch", "prepare"))
    ]
    with pytest.raises(ConfigurationError, match="TritonExperts"):
        modules_of("NoSuchExperts", load_catalog())


def test_a_sample_is_the_same_for_a_seed_and_another_for_another(tmp_path: Path) -> None:
    every = tuple(mutants_in(tmp_path, KERNEL).values())
    first = draw_sample(every, 9, "1.0")
    assert len(first) == 9
    assert first == draw_sample(every[::-1], 9, "1.0")
    assert first != draw_sample(every, 9, "1.1")
    assert draw_sample(every, None, "1.0") == every


def test_offsets_of_32_bits_are_listed_apart(tmp_path: Path) -> None:
    found = mutants_in(tmp_path, KERNEL)
    assert undetectable_reason(found["64 bits lost", "row = tl.program_id(0)"]) == OFFSETS_REASON
    assert undetectable_reason(found["clamp", "total = (total)"]) is None
    released = mutants_in(tmp_path, 'NEW = RELEASE == "3.6"\n')
    assert {undetectable_reason(mutant) for mutant in released.values()} == {RELEASE_REASON}


ASSEMBLER = """
import triton


def _code(i: int) -> str:
    low = 4 * i
    return f"and.b32 $0, $1, {low:#010x}; "


@triton.jit
def kernel(out_ptr):
    low = 4 * 2
"""


def test_what_writes_assembler_is_listed_apart(tmp_path: Path) -> None:
    """The interpreter reads none of it."""
    path = tmp_path / "module.py"
    path.write_text(ASSEMBLER, encoding="utf-8")
    found = {mutant.first: undetectable_reason(mutant) for mutant in mutants_of("module", path)}
    assert found == {6: DEVICE_REASON, 12: None}


def test_several_mutants_are_put_in_together_and_none_over_another(tmp_path: Path) -> None:
    found = mutants_in(tmp_path, KERNEL)
    clamp, order = (
        found["clamp", "total = (total)"],
        found["compare", "mask = (offsets <= columns) & (row >= 0)"],
    )
    ((_, text),) = changed_texts((clamp, order)).values()
    assert "total = (total)" in text
    assert "mask = (offsets <= columns) & (row >= 0)" in text
    assert changed_texts((clamp,))["module"][1] == clamp.text()
    with pytest.raises(ConfigurationError, match="two at the same place"):
        changed_texts((clamp, clamp))
