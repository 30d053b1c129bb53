"""Source mutants: what is changed, what kills it, and that nothing is dropped in silence."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import module_source
from test_third_party import install

from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.report.markdown import markdown
from modular_kernel.report.mutation_page import mutation_document, read_scores
from modular_kernel.testing.cases.lists import BASE, Case, cases_for
from modular_kernel.testing.mutation import (
    Fate,
    Mutant,
    Score,
    Survey,
    drawn,
    mutants_of,
    mutation_score,
)
from modular_kernel.testing.mutation.apart import DEVICE, OFFSETS, RELEASES, apart
from modular_kernel.testing.mutation.attempt import Killers
from modular_kernel.testing.mutation.bits import compare_bits, drawn_problems
from modular_kernel.testing.mutation.coverage import Coverage, Covered, watched
from modular_kernel.testing.mutation.equivalent import EQUIVALENT, LEAST_PROBLEMS, reviewed
from modular_kernel.testing.mutation.record import died, record_of
from modular_kernel.testing.mutation.same_code import same_code
from modular_kernel.testing.mutation.scope import modules_of
from modular_kernel.testing.mutation.serve import texts_of
from modular_kernel.testing.mutation.source import Edit

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/add-a-part.md"

# The tutorial's part with a value that nothing reads.
LINE = "        problem, routing = self.problem, tokens.routing\n"
UNREAD = "        unread = 40\n"
THEIRS = module_source(PAGE, "my_moe/__init__.py").replace(LINE, LINE + UNREAD)

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
    """(operator, new line or lines) -> mutant, of a module with this text."""
    path = folder / "module.py"
    path.write_text(text, encoding="utf-8")
    found = {}
    for mutant in mutants_of("module", path):
        changed = [line[1:].strip() for line in mutant.diff().splitlines()[3:] if line[0] == "+"]
        found[mutant.edit.operator, " ".join(changed)] = mutant
    return found


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


def test_what_an_import_executes_is_told_apart_from_what_calls_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first case that needs a module imports it: its constants are not this case's alone."""
    path = tmp_path / "imported_late.py"
    path.write_text("def f():\n    return 2\n\n\nTWO = f()\n\n\ndef g():\n    return TWO\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with watched({str(path)}) as (called, loaded):
        importlib.import_module("imported_late").g()
    assert loaded[str(path)] - {0} == {1, 2, 5, 8}  # 0: where a module starts
    assert called[str(path)] == {8, 9}


PRIVATE = """_SIZE = 4
_BOTH = 8
_TWICE: int = 2 * _BOTH
PUBLIC = 16


def f(x):
    if x:
        return (
            _SIZE)
    return PUBLIC + _BOTH


def g(size=_TWICE):
    return size
"""


def test_a_private_name_is_told_by_the_statements_that_read_it(tmp_path: Path) -> None:
    """Others read by what an import executes, or public, are told by the import."""
    path = tmp_path / "module.py"
    path.write_text(PRIVATE, encoding="utf-8")
    found = {m.first: m.readers for m in mutants_of("module", path)}
    assert found[1] == ((9, 10),)
    assert {found[line] for line in (2, 3, 4, 8, 11)} == {None}
    mutant = next(m for m in mutants_of("module", path) if m.first == 1)
    cases = cases_for("MoEPrepareAndFinalizeNoEP", "TorchExperts", this_machine(), "smoke").cases
    lines = ({1, 8, 11}, {8, 10})
    covered = [
        Covered(case, 1.0, "", {str(path): frozenset(each)})
        for case, each in zip(cases, lines, strict=False)
    ]
    coverage = Coverage({str(path): frozenset({1, 2, 3, 4})}, tuple(covered))
    assert coverage.executing(mutant) == (covered[1],)
    assert not coverage.loads(mutant)


def test_cases_that_execute_rare_lines_come_first(tmp_path: Path) -> None:
    mutant = mutants_in(tmp_path, KERNEL)["step lost", "pass"]
    cases = cases_for("MoEPrepareAndFinalizeNoEP", "TorchExperts", this_machine(), "smoke").cases
    lines = ({1, 2}, {1, 2}, {1, 2, 3}, {2})
    covered = [
        Covered(case, seconds, "", {str(mutant.path): frozenset(each)})
        for case, seconds, each in zip(cases, (1.0, 2.0, 9.0, 3.0), lines, strict=False)
    ]
    killers = Killers()
    assert [c.seconds for c in killers.ordered(mutant, covered)] == [1.0, 9.0, 2.0, 3.0]
    for _ in range(3):
        killers.note(mutant, covered[3].case)
    assert [c.seconds for c in killers.ordered(mutant, covered)] == [3.0, 1.0, 9.0, 2.0]


def test_who_died_before_a_case_of_two_parts_is_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = mutants_in(tmp_path, KERNEL)["step lost", "pass"]
    pair = "MoEPrepareAndFinalizeNoEP", "TorchExperts"
    first, second = cases_for(*pair, this_machine(), "smoke").cases[:2]
    ran = []

    def kill(mutant: Mutant, coverage: Coverage, *_: object, **__: object) -> Fate:
        ran.append(mutant)
        return Fate(mutant, "killed", "numeric: far off", coverage.cases[0].case)

    def part(name: str, case: Case) -> Survey:
        lines = {str(mutant.path): frozenset(range(mutant.first, mutant.last + 1))}
        coverage = Coverage({}, (Covered(case, 1.0, "", lines),))
        return Survey(name, (pair,), "smoke", (mutant,), coverage)

    monkeypatch.setattr("modular_kernel.testing.mutation.score.attempt", kill)
    known: dict[str, Fate] = {}
    scores = [
        mutation_score(part(name, case), known=known)
        for name, case in (("One", first), ("Two", first), ("Three", second))
    ]
    assert [fate.shared for score in scores for fate in score.fates] == ["", "One", ""]
    assert len(ran) == 2
    records = [record_of(score) for score in scores]
    assert [record["shared"] for record in records] == [0, 1, 0]
    assert records[0]["died"] == {mutant.ident: "numeric"}
    # A later run goes on from a record of the same cases.
    assert died(records[0], part("One", first)) == records[0]["died"]
    assert died(records[0], part("Two", first)) == {}
    again = mutation_score(part("One", first), dead=records[0]["died"])
    assert record_of(again)["killed_by"] == {"numeric": 1}
    assert len(ran) == 2
    assert Fate.before(mutant, "hang").killed


def test_a_run_that_is_stopped_leaves_what_it_knew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who died before comes first, and the score so far is told after every mutant."""
    mutants = tuple(mutants_in(tmp_path, KERNEL).values())
    case = cases_for("MoEPrepareAndFinalizeNoEP", "TorchExperts", this_machine(), "smoke").cases[0]
    lines = {str(mutants[0].path): frozenset(range(1, 99))}
    coverage = Coverage({}, (Covered(case, 1.0, "", lines),))
    found = Survey("One", (), "smoke", mutants, coverage)
    monkeypatch.setattr(
        "modular_kernel.testing.mutation.score.attempt",
        lambda mutant, *_, **__: Fate(mutant, "killed", "numeric: far off", case),
    )
    order = [fate.mutant for fate in mutation_score(found, count=3).fates]
    told: list[Score] = []
    mutation_score(found, count=3, dead={order[-1].ident: "hang"}, told=told.append)
    assert [[fate.mutant for fate in score.fates] for score in told] == [
        [order[2]],
        [order[2], order[0]],
        [order[2], order[0], order[1]],
    ]
    assert record_of(told[1])["died"] == {order[2].ident: "hang", order[0].ident: "numeric"}


def test_a_sample_is_the_same_for_a_seed_and_another_for_another(tmp_path: Path) -> None:
    every = tuple(mutants_in(tmp_path, KERNEL).values())
    first = drawn(every, 9, "1.0")
    assert len(first) == 9
    assert first == drawn(every[::-1], 9, "1.0")
    assert first != drawn(every, 9, "1.1")
    assert drawn(every, None, "1.0") == every


def test_offsets_of_32_bits_are_listed_apart(tmp_path: Path) -> None:
    found = mutants_in(tmp_path, KERNEL)
    assert apart(found["64 bits lost", "row = tl.program_id(0)"]) == OFFSETS
    assert apart(found["clamp", "total = (total)"]) is None
    released = mutants_in(tmp_path, 'NEW = RELEASE == "3.6"\n')
    assert {apart(mutant) for mutant in released.values()} == {RELEASES}


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
    found = {mutant.first: apart(mutant) for mutant in mutants_of("module", path)}
    assert found == {6: DEVICE, 12: None}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which fresh interpreters find the tutorial's package."""
    install(tmp_path, "my_moe", THEIRS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


def mutate(*words: str) -> tuple[int, Any]:
    """Exit code and JSON of `mk test --mutate MyExperts` in a fresh process."""
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "MyExperts")
    command = [sys.executable, "-m", "modular_kernel", "test", "--mutate", "MyExperts", *pair]
    words = ("--level", "smoke", "--json", *words)
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.share(4)
@pytest.mark.slow
def test_mutants_of_a_third_party_are_killed_and_a_survivor_is_shown(site: Path) -> None:
    unread, lost = (
        next(m for m in mutants_of("my_moe", site / "my_moe/__init__.py") if line in m.diff())
        for line in (
            "+        unread = 41",
            "+        total = torch.zeros(output.shape, dtype=torch.bfloat16",
        )
    )
    code, record = mutate("--only", unread.ident, "--save", str(site / "scores"))
    assert (code, record["put_in"], record["killed"], record["score"]) == (1, 1, 0, 0)
    assert record == json.loads((site / "scores/MyExperts.json").read_text(encoding="utf-8"))
    (survivor,) = record["survivors"]
    assert record["cases"] >= survivor["cases"] >= 4  # a call of no tokens ends before
    assert survivor["differing"] == 0
    assert "-        unread = 40\n+        unread = 41" in survivor["diff"]
    pair = "--pf-type MoEPrepareAndFinalizeNoEP --experts-type MyExperts --level smoke"
    assert survivor["command"] == f"mk test --mutate MyExperts --only {unread.ident} {pair}"
    code, record = mutate("--only", lost.ident)
    assert (code, record["killed"], record["survivors"]) == (0, 1, [])
    code, bits = mutate("--only", unread.ident, "--bits", "12")
    assert (code, bits) == (0, {"id": unread.ident, "problems": 12, "differing": None})
    code, bits = mutate("--only", lost.ident, "--bits", "12")
    assert code == 1
    assert bits["problems"] < 12
    assert bits["differing"].startswith("mk test --one ")
    code, record = mutate("--mutants", "6")
    assert record["put_in"] == 6 == record["killed"] + len(record["survivors"])
    assert record["killed"] >= 2
    assert record["executed"] > 50
    assert record["mutants"] == (
        record["executed"] + sum(record["apart"].values()) + sum(record["not_executed"].values())
    )


def test_the_page_shows_every_survivor_and_refuses_another_file(tmp_path: Path) -> None:
    scores = ROOT / "docs/mutation"
    page = (ROOT / "docs/mutation-scores.md").read_text(encoding="utf-8")
    for record in read_scores(scores):
        assert f"| `{record['part']}` |" in page
        for survivor in record["survivors"]:
            assert survivor["command"].split(" --pf-type")[0] in " ".join(page.split())
    (tmp_path / "Other.json").write_text('{"part": "Another"}', encoding="utf-8")
    with pytest.raises(ConfigurationError, match="another form"):
        read_scores(tmp_path)


def test_equivalents_have_a_proof_a_reason_and_their_parts(tmp_path: Path) -> None:
    parts = {part.name for part in load_catalog().parts}
    for ident, why in EQUIVALENT.items():
        assert len(ident) == 8
        assert len(why.reason) > 20
        assert why.forms if why.proof == "code" else why.problems >= LEAST_PROBLEMS
        assert set(why.parts) <= parts
        for part in why.parts or ("TorchExperts",):
            assert reviewed(ident, part) is why
    limited = next(iter(i for i, why in EQUIVALENT.items() if why.parts), None)
    if limited is not None:
        assert reviewed(limited, "DeepEPHTPrepareAndFinalize") is None
    assert reviewed("no such", "TorchExperts") is None


def test_several_mutants_are_put_in_together_and_none_over_another(tmp_path: Path) -> None:
    found = mutants_in(tmp_path, KERNEL)
    clamp, order = (
        found["clamp", "total = (total)"],
        found["compare", "mask = (offsets <= columns) & (row >= 0)"],
    )
    ((_, text),) = texts_of((clamp, order)).values()
    assert "total = (total)" in text
    assert "mask = (offsets <= columns) & (row >= 0)" in text
    assert texts_of((clamp,))["module"][1] == clamp.text()
    with pytest.raises(ConfigurationError, match="two of one place"):
        texts_of((clamp, clamp))


@pytest.mark.share(4)
def test_the_code_of_kernels_tells_a_real_change_from_none(tmp_path: Path) -> None:
    """What stands outside of kernels is refused: their code says nothing of it."""
    path = ROOT / "modular_kernel/ops/kernels/zero_padding.py"
    module = "modular_kernel.ops.kernels.zero_padding"

    def changed(old: str, new: str) -> Mutant:
        text = path.read_text(encoding="utf-8")
        start, line = text.index(old), text[: text.index(old)].count("\n") + 1
        edit = Edit("by hand", start, start + len(old), new)
        return Mutant("by hand", module, path, edit, line, line)

    folded = changed("range(0, hidden, BLOCK_H)", "range(0, hidden, -(-BLOCK_H // 1))")
    assert same_code([folded]).proven
    # An operator by itself, as `compare` writes it.
    path_text = path.read_text(encoding="utf-8")
    at = path_text.index("columns < hidden") + len("columns ")
    line = path_text.count("\n", 0, at) + 1
    real = same_code([Mutant("", module, path, Edit("compare", at, at + 1, "<="), line, line)])
    assert real.differing >= 1
    assert not real.proven
    unread = tmp_path / "module.py"
    unread.write_text("COUNT = 4\n", encoding="utf-8")
    outside = Mutant("by hand", "module", unread, Edit("constant", 8, 9, "5"), 1, 1)
    with pytest.raises(ConfigurationError, match=r"inside a @triton.jit function"):
        same_code([outside])


def test_problems_meet_every_case_first_and_each_mutant_often_enough() -> None:
    machine = this_machine()
    cases = cases_for("MoEPrepareAndFinalizeNoEP", "TorchExperts", machine, "smoke").cases
    covered = [Covered(case, float(i), "", {}) for i, case in enumerate(cases)]
    drawn_twice = [drawn_problems([covered, covered[:2]], 40) for _ in range(2)]
    assert drawn_twice[0] == drawn_twice[1]
    problems = drawn_twice[0]
    assert len({case for case, _ in problems}) == len(problems)
    first = [replace(case.problem, tokens=1) for case, _ in problems[: len(cases)]]
    assert first == [replace(case.problem, tokens=1) for case in cases]
    assert all(
        met.problem.tokens <= case.problem.tokens
        for (met, _), case in zip(problems, cases, strict=False)
    )
    for number in (0, 1):
        assert sum(number in serves for _, serves in problems) >= 40
    fast = {replace(case.problem, tokens=1) for case in cases[:2]}
    assert {replace(case.problem, tokens=1) for case, serves in problems if 1 in serves} == fast


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "words",
    [
        ("--mutate", "NoSuchExperts"),
        ("--mutate", "TorchExperts", "--one"),
        ("--mutate", "TorchExperts", "--mutants", "-1"),
        ("--only", "12345678"),
        ("--mutate", "TorchExperts", "--bits", "10"),
        ("--mutate", "TorchExperts", "--code"),
        ("--mutate", "TorchAll2AllPrepareAndFinalize"),
        ("--mutate", "TorchExperts,TritonExperts", "--only", "12345678"),
        ("--mutate", "TorchExperts", "--resume"),
    ],
)
def test_bad_usage_ends_with_2(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "modular_kernel", "test", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


def test_the_page_names_the_parts_without_a_score(tmp_path: Path) -> None:
    score = json.loads((ROOT / "docs/mutation/TorchExperts.json").read_text(encoding="utf-8"))
    nothing = tmp_path / "absent.json"
    page = markdown(
        mutation_document((score,), nothing, nothing, ("KeepTopK", "TorchExperts")), figures=""
    )
    assert "**No score yet, 1 of 2 parts:** `KeepTopK`." in page.replace("\n", " ")
    page = markdown(mutation_document((score,), nothing, nothing, ("TorchExperts",)), figures="")
    assert "No score yet" not in page


def test_bits_see_what_only_spaced_rows_show() -> None:
    """A proof of equivalence meets the layouts that the cases meet."""
    path = ROOT / "modular_kernel/ops/quantise.py"
    old, text = '"stride_x": x.stride(0)', path.read_text(encoding="utf-8")
    start, line = text.encode().index(old.encode()), text[: text.index(old)].count("\n") + 1
    edit = Edit("stride", start, start + len(old), '"stride_x": x.shape[1]')
    mutant = Mutant("a stride", "modular_kernel.ops.quantise", path, edit, line, line)
    pair = "MoEPrepareAndFinalizeNoEP", "TorchExperts"
    case = Case(*pair, replace(BASE, quant="fp8_w8a8_channel"))
    covered = Covered(case, 1.0, "", {str(path): frozenset({line})})
    assert compare_bits([mutant], Coverage({}, (covered,)), 3).differing is not None
