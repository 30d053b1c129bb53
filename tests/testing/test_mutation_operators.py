"""Mutation operators skip changes without effect, and cases with new axis values run first."""

from dataclasses import replace
from pathlib import Path

import pytest
from mutation_samples import KERNEL, mutants_in

from modular_kernel.catalog import this_machine
from modular_kernel.testing.cases.lists import cases_for
from modular_kernel.testing.mutation.coverage import CaseCoverage
from modular_kernel.testing.mutation.cpu_undetectable import DEVICE_REASON, find_undetectable_reason
from modular_kernel.testing.mutation.run_mutant import KillHistory, list_axes
from modular_kernel.testing.mutation.sites import mutants_of


def test_the_tail_operator_rounds_divisions_up(tmp_path: Path) -> None:
    source = KERNEL.replace("range(0, 4)", "range(0, columns // BLOCK)")
    in_kernel = [line for operator, line in mutants_in(tmp_path, source) if operator == "tail"]
    assert in_kernel == ["for step in range(0, (columns + (BLOCK) - 1) // (BLOCK)):"]
    source = KERNEL.replace("range(0, 4)", "range(0, BLOCK // 8)")
    assert not [line for operator, line in mutants_in(tmp_path, source) if operator == "tail"]
    function = "def blocks(columns: int, block: int) -> int:\n    return columns // block\n"
    in_function = [line for operator, line in mutants_in(tmp_path, function) if operator == "tail"]
    assert in_function == ["return -(-(columns) // (block))"]


def test_constants_in_seconds_become_zero_or_a_thousand_times_longer(tmp_path: Path) -> None:
    source = "_GRACE_S = 1.5\nLIMIT = 1.5\n"
    mutants = {line for operator, line in mutants_in(tmp_path, source) if operator == "constant"}
    assert mutants == {"_GRACE_S = 0.0", "_GRACE_S = 1500.0", "LIMIT = 1.875"}


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ("total += x[i]", True),
        ("last = step(last, x[i])", True),
        ("found.append(x[i])", True),
        ("if x[i]:\n            return i", True),
        ("store(out, i, x[i])", False),
        ("total = total | x[i]", False),
        ("total = total - x[i]", True),
        ("total = total | x[i]\n        out[i] = total", True),
        ("mine = x[i]\n        if mine is not None:\n            out[i] = mine", False),
    ],
)
def test_loop_order_is_changed_where_it_matters(tmp_path: Path, body: str, changed: bool) -> None:
    source = f"def f(x, out, found, last, total):\n    for i in range(8):\n        {body}\n"
    operators = {operator for operator, _ in mutants_in(tmp_path, source)}
    assert ("order" in operators) is changed
    assert "loop" in operators


@pytest.mark.parametrize("zero", ["0", "tl.constexpr(0)"])
def test_the_addition_of_a_constant_that_is_0_is_not_changed(tmp_path: Path, zero: str) -> None:
    source = f"_FIRST = {zero}\n_SECOND = 1\ndef f(a):\n    return a + _FIRST, a + _SECOND\n"
    changed = {line for line in list_changed_lines(tmp_path, source) if line.startswith("return")}
    assert changed == {"return a + _FIRST, a", "return a + _FIRST, a - _SECOND"}


def test_an_exact_quotient_is_not_rounded_up(tmp_path: Path) -> None:
    source = (
        "_A = 4096\n_B = 96\ndef f(x):\n    return _A // x.itemsize, _B // x.itemsize, _A // x\n"
    )
    tails = {line for operator, line in mutants_in(tmp_path, source) if operator == "tail"}
    assert len(tails) == 2
    assert not [line for line in tails if "-(-(_A) // (x.itemsize))" in line]


def list_changed_lines(tmp_path: Path, source: str) -> set[str]:
    return {line for _, line in mutants_in(tmp_path, source)}


def test_an_assertion_of_equal_lengths_is_not_removed(tmp_path: Path) -> None:
    source = "def f(a, b, g):\n    return zip(a, b, strict=True), g(a, strict=True)\n"
    strict = {line for line in list_changed_lines(tmp_path, source) if "False" in line}
    assert strict == {"return zip(a, b, strict=True), g(a, strict=False)"}
    source = "def f(a, b):\n    return zip(a, b, strict=False)\n"
    assert "return zip(a, b, strict=True)" in list_changed_lines(tmp_path, source)


@pytest.mark.parametrize(
    ("body", "is_guard"),
    [
        ('need = "more"\n        raise ValueError(need)', True),
        ('raise ValueError("more")', True),
        ("report(a)\n        raise ValueError(a)", False),
        ("a.b = 1\n        raise ValueError(a)", False),
    ],
)
def test_a_condition_of_an_error_is_only_negated(tmp_path: Path, body: str, is_guard: bool) -> None:
    source = f"def f(a, b):\n    if a and not b:\n        {body}\n"
    conditions = {line for line in list_changed_lines(tmp_path, source) if line.startswith("if ")}
    assert "if not (a and not b):" in conditions
    assert (len(conditions) == 1) is is_guard


def test_limits_that_cases_lower_are_not_changed(tmp_path: Path) -> None:
    source = "_SCAN_BLOCK = 1024\n_OTHER = 1024\n"
    path = tmp_path / "count.py"
    path.write_text(source, encoding="utf-8")
    lines = {m.first for m in mutants_of("modular_kernel.ops.count", path)}
    assert lines == {2}
    assert {m.first for m in mutants_of("modular_kernel.ops.other", path)} == {1, 2}


@pytest.mark.parametrize(
    ("body", "is_unread"),
    [
        ("tl.store(q, x, mask=mask)", True),
        ("tl.store(q, x, mask=mask)\n    tl.store(r, x, mask=mask)", True),
        ("tl.store(q, x, mask=wide)", False),
        ("tl.store(q, x)", False),
        ("tl.store(q, x + 1, mask=mask)", True),
        ("tl.store(q, tl.where(mask, x, 0), mask=wide)", True),
        ("tl.store(q, tl.where(wide, x, 0), mask=wide)", False),
        ("tl.store(q, tl.where(mask, 0, x), mask=wide)", False),
        ("tl.store(q, (x > 0) & mask, mask=wide)", True),
        ("tl.store(q, (x > 0) | mask, mask=wide)", False),
        ("y = x.to(tl.int32) * 2\n    tl.store(q, y, mask=mask)", True),
        ("y = x * 2\n    tl.store(q, y, mask=wide)", False),
        ("y = x * 2\n    y = y + 1\n    tl.store(q, y, mask=mask)", False),
        ("some = mask & (q < r)\n    tl.store(q, x, mask=some)", True),
        ("some = mask | (q < r)\n    tl.store(q, x, mask=some)", False),
        ("y = tl.load(r + x, mask=mask, other=0)\n    tl.store(q, y)", True),
        ("y = tl.load(r + x)\n    tl.store(q, y, mask=mask)", False),
        ("tl.store(q + x, r, mask=mask)", True),
        ("tl.store(q, helper(x), mask=mask)", False),
        ("tl.store(q, x[:, None], mask=mask)", False),
        ("if wide:\n        some = mask & q\n    tl.store(q, x, mask=some)", False),
        ("tl.store(q, x, mask=mask)\n    tl.store(r, tl.sum(x, 0))", False),
        ("x = tl.sum(x, 0)\n    tl.store(q, x, mask=mask)", False),
        ("mask = wide\n    tl.store(q, x, mask=mask)", False),
    ],
)
def test_values_of_lanes_that_nothing_reads_are_not_changed(
    tmp_path: Path, body: str, is_unread: bool
) -> None:
    source = (
        "@triton.jit\ndef f(p, q, r, wide):\n    mask = p < 4\n"
        f"    x = tl.load(p, mask=mask, other=0)\n    {body}\n"
    )
    line = "x = tl.load(p, mask=mask, other=1)"
    assert (line not in list_changed_lines(tmp_path, source)) is is_unread


@pytest.mark.parametrize(
    ("argument", "is_absent"),
    [
        ("stride_b=0 if b is None else b.stride(0)", True),
        ("**{'stride_b': 0 if b is None else b.stride(0)}", True),
        ("stride_b=0 if b else b.stride(0)", False),
        ("stride_b=0 if b is not None else b.stride(0)", False),
        ("rows=0 if b is None else b.stride(0)", False),
    ],
)
def test_strides_of_absent_tensors_are_not_changed(
    tmp_path: Path, argument: str, is_absent: bool
) -> None:
    lines = list_changed_lines(tmp_path, f"def f(kernel, b):\n    launch(kernel, {argument})\n")
    changed = argument.replace("0 if", "1 if")
    assert (f"launch(kernel, {changed})" not in lines) is is_absent
    assert any("b.stride(1)" in line for line in lines)


def test_mutants_of_gpu_branches_are_undetectable(tmp_path: Path) -> None:
    source = 'def f(self):\n    if self.device == "cuda" and self.group:\n        stop(1 + 1)\n'
    mutants = mutants_in(tmp_path, source).values()
    reasons = {mutant.first: find_undetectable_reason(mutant) for mutant in mutants}
    assert reasons == {2: DEVICE_REASON, 3: None}


def test_mutants_of_device_transfers_are_undetectable(tmp_path: Path) -> None:
    source = (
        "def f(self, x, y):\n    a = x.to(self.device)\n    b = x.to(y.dtype)\n    return a, b\n"
    )
    mutants = mutants_in(tmp_path, source)
    reasons = {m.first: find_undetectable_reason(m) for m in mutants.values()}
    assert reasons == {2: DEVICE_REASON, 3: None}
    assert {operator for operator, _ in mutants} == {"cast lost"}


def test_cases_with_new_axis_values_run_before_cheaper_cases(tmp_path: Path) -> None:
    mutant = mutants_in(tmp_path, KERNEL)["step lost", "pass"]
    case = cases_for("MoEPrepareAndFinalizeNoEP", "TorchExperts", this_machine(), "smoke").cases[0]
    large = replace(case, problem=case.problem.with_tokens(40 * case.problem.tokens + 129))
    lines = {str(mutant.path): frozenset({mutant.first})}
    covered = [
        CaseCoverage(covered_case, seconds, "", lines)
        for covered_case, seconds in ((case, 1.0), (replace(case, seed=1), 2.0), (large, 9.0))
    ]
    assert [c.seconds for c in KillHistory().order(mutant, covered)] == [1.0, 9.0, 2.0]
    assert list_axes(case) == list_axes(replace(case, seed=1))
    pairs = large.problem.tokens * large.problem.top_k
    assert list_axes(large) > {("routing", case.routing), ("pairs", str(pairs.bit_length()))}
