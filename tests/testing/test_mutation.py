"""`mk test --mutate`: scores, survivors, equivalent mutants, usage errors, and the page of
scores.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from third_party import install, tutorial_parts

from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.cli.mutate import require_no_gpu
from modular_kernel.errors import ConfigurationError
from modular_kernel.report.markdown import render_markdown
from modular_kernel.report.mutation_page import mutation_document, read_scores
from modular_kernel.testing.cases.lists import BASE, Case, cases_for
from modular_kernel.testing.mutation import Mutant, default_seed, mutants_of
from modular_kernel.testing.mutation.bitwise_equivalence import compare_bits, draw_problems
from modular_kernel.testing.mutation.code_equivalence import compare_code, prove_by_code
from modular_kernel.testing.mutation.coverage import CaseCoverage, Coverage
from modular_kernel.testing.mutation.mutant_outcome import MutantOutcome
from modular_kernel.testing.mutation.reviewed_equivalents import (
    EQUIVALENTS,
    MIN_PROBLEMS,
    find_equivalent,
    find_review,
)
from modular_kernel.testing.mutation.scope import modules_of
from modular_kernel.testing.mutation.source import Edit
from modular_kernel.testing.verify.checks import CHECKS
from modular_kernel.testing.verify.one_process import name_check

ROOT = Path(__file__).resolve().parents[2]
# adapters.json belongs to tools/mutate_modules.py, not to a part. The subfolders hold records of
# fresh samples.
RECORDS = [
    path for path in sorted((ROOT / "docs/mutation").rglob("*.json")) if path.stem != "adapters"
]

# The part of the tutorial, with an unused variable added.
FIRST_LINE = "        problem, routing = self.problem, tokens.routing\n"
UNUSED_LINE = "        unused = 40\n"
PACKAGE = tutorial_parts().replace(FIRST_LINE, FIRST_LINE + UNUSED_LINE)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the package of the tutorial in a folder on PYTHONPATH, and return the folder."""
    install(tmp_path, "my_moe", PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


def run_mutate(*options: str) -> tuple[int, Any]:
    """Run `mk test --mutate MyExperts` in a new process. Return its exit code and JSON record.

    Checks that stderr has a line for each mutant that ran.
    """
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "MyExperts")
    command = [sys.executable, "-m", "modular_kernel", "test", "--mutate", "MyExperts", *pair]
    options = ("--level", "smoke", "--json", *options)
    result = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.stdout, result.stderr
    record = json.loads(result.stdout)
    if "--bits" not in options:
        numbers = re.findall(r"^mutant (\d+) of \d+, \w+: \w", result.stderr, re.M)
        assert list(map(int, numbers)) == [*range(1, record["put_in"] + 1)]
    return result.returncode, record


@pytest.mark.cpu  # mutants run in forked processes
@pytest.mark.share(4)
@pytest.mark.slow
def test_mutants_of_a_third_party_part_are_scored(site: Path) -> None:
    unused, wrong_dtype = (
        next(m for m in mutants_of("my_moe", site / "my_moe/__init__.py") if line in m.diff())
        for line in (
            "+        unused = 41",
            "+        total = torch.zeros(output.shape, dtype=torch.bfloat16",
        )
    )
    code, record = run_mutate("--only", unused.ident, "--save", str(site / "scores"))
    assert (code, record["put_in"], record["killed"], record["score"]) == (1, 1, 0, 0)
    assert record == json.loads((site / "scores/MyExperts.json").read_text(encoding="utf-8"))
    (survivor,) = record["survivors"]
    # A call without tokens does not execute the line.
    assert record["cases"] >= survivor["cases"] >= 4
    assert survivor["differing"] == 0
    assert "-        unused = 40\n+        unused = 41" in survivor["diff"]
    pair = "--pf-type MoEPrepareAndFinalizeNoEP --experts-type MyExperts --level smoke"
    assert survivor["command"] == f"mk test --mutate MyExperts --only {unused.ident} {pair}"
    code, record = run_mutate("--only", wrong_dtype.ident)
    assert (code, record["killed"], record["survivors"]) == (0, 1, [])
    code, bits_options = run_mutate("--only", unused.ident, "--bits", "12")
    assert (code, bits_options) == (0, {"id": unused.ident, "problems": 12, "differing": None})
    code, bits_options = run_mutate("--only", wrong_dtype.ident, "--bits", "12")
    assert code == 1
    assert bits_options["problems"] < 12
    assert bits_options["differing"].startswith("mk test --one ")
    code, record = run_mutate("--mutants", "6")
    assert record["put_in"] == 6 == record["killed"] + len(record["survivors"])
    assert record["killed"] >= 2
    assert record["executed"] > 50
    assert record["mutants"] == (
        record["executed"] + sum(record["apart"].values()) + sum(record["not_executed"].values())
    )
    code, other = run_mutate("--mutants", "6", "--sample-seed", "another")
    assert (record["seed"], other["seed"]) == (default_seed(), "another")
    assert mutant_ids(other) != mutant_ids(record)


def mutant_ids(record: dict[str, Any]) -> set[str]:
    return {*record["died"], *(survivor["id"] for survivor in record["survivors"])}


def test_the_pages_show_every_survivor_and_refuse_an_invalid_file(tmp_path: Path) -> None:
    scores = ROOT / "docs/mutation"
    page = (ROOT / "docs/mutation-scores.md").read_text(encoding="utf-8")
    survivors = (ROOT / "docs/mutation-survivors.md").read_text(encoding="utf-8")
    before, _, fresh = page.partition("## Fresh samples")
    of_scores, _, of_fresh_samples = survivors.partition("## Fresh samples")
    for folder, table, text in (
        (scores, before, of_scores),
        (scores / "first", fresh, of_fresh_samples),
    ):
        for record in read_scores(folder):
            assert f"| `{record['part']}` |" in table
            for survivor in record["survivors"]:
                # A mutant of a fresh sample may be equivalent for another part.
                row, *others = (
                    line for line in text.splitlines() if line.startswith(f"| `{survivor['id']}`")
                )
                assert not others or folder is not scores
                assert survivor["place"] in row
                assert not row.endswith("| Not reviewed yet. |")
    (tmp_path / "Other.json").write_text('{"part": "Another"}', encoding="utf-8")
    with pytest.raises(ConfigurationError, match="another format"):
        read_scores(tmp_path)


def test_equivalents_have_a_proof_a_reason_and_parts(tmp_path: Path) -> None:
    parts = {part.name for part in load_catalog().parts}
    for ident, equivalent in EQUIVALENTS.items():
        assert len(ident) == 8
        assert len(equivalent.reason) > 20
        assert (
            equivalent.forms if equivalent.proof == "code" else equivalent.problems >= MIN_PROBLEMS
        )
        assert set(equivalent.parts) <= parts
        for part in equivalent.parts or ("TorchExperts",):
            assert find_review(ident, part) is equivalent
            expected = None if equivalent.detected_by else equivalent
            assert find_equivalent(ident, part) is expected
    limited_to_parts = next(
        iter(i for i, equivalent in EQUIVALENTS.items() if equivalent.parts), None
    )
    if limited_to_parts is not None:
        assert find_equivalent(limited_to_parts, "DeepEPHTPrepareAndFinalize") is None
    assert find_equivalent("no such", "TorchExperts") is None
    names = {name_check(check) for check in CHECKS}
    assert {equivalent.detected_by for equivalent in EQUIVALENTS.values()} <= {"", *names}


def test_every_equivalent_is_still_a_mutant_of_its_parts() -> None:
    """If a line changes, its mutants change, so its old equivalents must be removed from the
    file. Mutants that are no longer made at all must be marked.
    """
    catalog = load_catalog()
    parts_of: dict[str, set[str]] = {}  # module -> parts
    paths: dict[str, Path] = {}
    for part in {part.name for part in catalog.parts}:
        for module, path in modules_of(part, catalog).items():
            parts_of.setdefault(module, set()).add(part)
            paths[module] = path
    remaining = dict(EQUIVALENTS)
    for module, path in paths.items():
        for mutant in mutants_of(module, path):
            equivalent = remaining.pop(mutant.ident, None)
            assert equivalent is None or set(equivalent.parts) <= parts_of[module], mutant.ident
        if not remaining:
            break
    marked = sorted(ident for ident, why in EQUIVALENTS.items() if why.left_out)
    assert sorted(remaining) == marked


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: "/".join(path.parts[-2:]))
def test_equivalents_of_a_record_are_reviewed(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    # Mutants that leave compiled code unchanged need no review.
    equivalents = [each["id"] for each in record["equivalent"] if each.get("proof") != "code"]
    assert [ident for ident in equivalents if not find_review(ident, record["part"])] == []
    survivors = [each["id"] for each in record["survivors"]]
    assert [ident for ident in survivors if find_equivalent(ident, record["part"])] == []


@pytest.mark.share(4)
def test_compiled_code_shows_whether_a_kernel_changed(tmp_path: Path) -> None:
    """A mutant outside a kernel is refused, because compiled code does not show its change."""
    path = ROOT / "modular_kernel/ops/kernels/zero_rows.py"
    module = "modular_kernel.ops.kernels.zero_rows"

    def make_mutant(old: str, new: str) -> Mutant:
        text = path.read_text(encoding="utf-8")
        start, line = text.index(old), text[: text.index(old)].count("\n") + 1
        edit = Edit("by hand", start, start + len(old), new)
        return Mutant("by hand", module, path, edit, line, line)

    equivalent = make_mutant(
        "range(0, hidden_size, BLOCK_HIDDEN)", "range(0, hidden_size, -(-BLOCK_HIDDEN // 1))"
    )
    outcome = prove_by_code(MutantOutcome(equivalent, "survived"))
    assert outcome.status == "equivalent"
    assert outcome.forms >= 1
    # Replace the operator only, as the `compare` mutation operator does.
    path_text = path.read_text(encoding="utf-8")
    offset = path_text.index("columns < hidden_size") + len("columns ")
    line = path_text.count("\n", 0, offset) + 1
    changed = Mutant("", module, path, Edit("compare", offset, offset + 1, "<="), line, line)
    changed_code = compare_code([changed], first_only=True)
    assert changed_code.differing == 1
    assert not changed_code.proven
    module_path = tmp_path / "module.py"
    module_path.write_text("COUNT = 4\n", encoding="utf-8")
    outside = Mutant("by hand", "module", module_path, Edit("constant", 8, 9, "5"), 1, 1)
    with pytest.raises(ConfigurationError, match=r"inside a @triton.jit function"):
        compare_code([outside])
    survivor = MutantOutcome(outside, "survived")
    assert prove_by_code(survivor) == survivor


def test_drawn_problems_cover_every_case_and_mutant() -> None:
    machine = this_machine()
    cases = cases_for("MoEPrepareAndFinalizeNoEP", "TorchExperts", machine, "smoke").cases
    covered = [CaseCoverage(case, float(i), "", {}) for i, case in enumerate(cases)]
    drawn_twice = [draw_problems([covered, covered[:2]], 40) for _ in range(2)]
    assert drawn_twice[0] == drawn_twice[1]
    problems = drawn_twice[0]
    assert len({case for case, _ in problems}) == len(problems)
    first = [replace(case.problem, tokens=1) for case, _ in problems[: len(cases)]]
    assert first == [replace(case.problem, tokens=1) for case in cases]
    assert all(
        drawn.problem.tokens <= case.problem.tokens
        for (drawn, _), case in zip(problems, cases, strict=False)
    )
    for number in (0, 1):
        assert sum(number in mutant_numbers for _, mutant_numbers in problems) >= 40
    first_two = {replace(case.problem, tokens=1) for case in cases[:2]}
    cases_of_mutant_1 = [case for case, mutant_numbers in problems if 1 in mutant_numbers]
    assert {replace(case.problem, tokens=1) for case in cases_of_mutant_1} == first_two


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "arguments",
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
        ("--mutate", "TorchExperts", "--only", "12345678", "--sample-seed", "a"),
        ("--sample-seed", "a"),
    ],
)
def test_usage_errors_exit_with_2(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "modular_kernel", "test", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.share(2)
@pytest.mark.parametrize("bits_options", [(), ("--bits", "3")])
def test_an_unknown_mutant_is_refused_before_any_case_runs(bits_options: tuple[str, ...]) -> None:
    named = ("--mutate", "TorchExperts", "--only", "nosuch", *bits_options)
    command = [sys.executable, "-m", "modular_kernel", "test", *named]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=40
    )
    assert result.returncode == 2
    assert "--only: got 'nosuch', need the identity of one of the" in result.stderr


def test_the_page_names_parts_without_a_score(tmp_path: Path) -> None:
    score = json.loads((ROOT / "docs/mutation/TorchExperts.json").read_text(encoding="utf-8"))
    missing = tmp_path / "absent.json"
    page = render_markdown(
        mutation_document((score,), missing, missing, ("KeepTopK", "TorchExperts")), figures=""
    )
    assert "**No score yet, 1 of 2 parts:** `KeepTopK`." in page.replace("\n", " ")
    page = render_markdown(
        mutation_document((score,), missing, missing, ("TorchExperts",)), figures=""
    )
    assert "No score yet" not in page


@pytest.mark.cpu
def test_bitwise_comparison_includes_strided_rows() -> None:
    """The bitwise comparison uses the same layouts as the cases, here rows with padding."""
    path = ROOT / "modular_kernel/ops/valid_rows.py"
    old, text = '"stride_x": x.stride(0)', path.read_text(encoding="utf-8")
    start, line = text.encode().index(old.encode()), text[: text.index(old)].count("\n") + 1
    edit = Edit("stride", start, start + len(old), '"stride_x": x.shape[1]')
    mutant = Mutant("a stride", "modular_kernel.ops.valid_rows", path, edit, line, line)
    pair = "MoEPrepareAndFinalizeNoEP", "TorchExperts"
    case = Case(*pair, replace(BASE, quant="fp8_w8a8_channel"))
    covered = CaseCoverage(case, 1.0, "", {str(path): frozenset({line})})
    assert compare_bits([mutant], Coverage({}, (covered,)), 3).differing is not None


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigurationError, match="--mutate: got a GPU, need CUDA_VISIBLE_DEVICES="):
        require_no_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_no_gpu()
