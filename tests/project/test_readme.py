"""The examples in the README run, and its numbers equal the records."""

import json
import re
from pathlib import Path

import pytest
from doc_blocks import blocks_of, run_page

from modular_kernel.catalog import load_catalog
from modular_kernel.select.composed_kernel import ComposedKernel

PAGE = Path(__file__).parents[2] / "README.md"
README = PAGE.read_text(encoding="utf-8")
KINDS = ("prepare_finalize", "experts", "topk_reduce")


def refuse_commands(*arguments: str) -> tuple[int, str]:
    raise AssertionError(f"a command in the README is not run: {arguments}")


def test_first_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    namespace = run_page(PAGE, refuse_commands)
    y_TH, kernel = namespace["y_TH"], namespace["kernel"]
    assert tuple(y_TH.shape) == (64, 128)
    assert bool(y_TH.isfinite().all())
    assert isinstance(kernel, ComposedKernel)
    choice = kernel.choice
    assert any(bucket.times for bucket in choice.buckets) or choice.candidates.untimeable


def test_transformers_example_has_existing_names() -> None:
    pytest.importorskip("transformers", reason="the extra is not installed")
    (block,) = (block for block in blocks_of(PAGE) if "transformers" in block.text)
    lines = [line for line in block.text.splitlines() if line.startswith(("from", "import"))]
    assert len(lines) == 2
    exec(compile("\n".join(lines), "README.md", "exec"), {})


def test_table_of_commands_is_complete() -> None:
    from modular_kernel.cli.main import VERBS

    table = PAGE.with_name("docs") / "command-line.md"
    listed_verbs = re.findall(r"^\| `mk (\w+)", table.read_text(encoding="utf-8"), re.M)
    assert set(listed_verbs) == set(VERBS)


def test_numbers_in_the_readme_equal_the_records() -> None:
    docs = PAGE.with_name("docs")
    record = json.loads((docs / "verified.json").read_text(encoding="utf-8"))
    cases = sum(pair["cases"] for run in record["runs"] for pair in run["pairs"])
    assert re.findall(r"one rank and two\) has (\d+) cases and no\s+failure", README) == [
        str(cases)
    ]
    parts = load_catalog()
    names = {name for kind in KINDS for name in parts.names(kind)}
    scopes = [json.loads(path.read_text(encoding="utf-8")) for path in docs.glob("mutation/*.json")]
    scores = {scope["part"]: scope["score"] for scope in scopes if scope["part"] in names}
    stated = re.findall(r"\| studied: .*\| (\d+) of (\d+) \| (\d+) to 100 % in each part", README)
    assert stated == [(str(len(scores)), str(len(names)), str(int(100 * min(scores.values()))))]
    assert max(scores.values()) == 1
    fresh_records = [
        json.loads(path.read_text(encoding="utf-8")) for path in docs.glob("mutation/first/*.json")
    ]
    killed = sum(record["killed"] for record in fresh_records)
    num_mutants = sum(record["put_in"] - len(record["equivalent"]) for record in fresh_records)
    stated_fresh = re.findall(r"\| fresh.*\| (\d+) .*\| (\d+) of (\d+) \(", README)
    totals = [sum(map(int, column)) for column in zip(*stated_fresh, strict=True)]
    assert totals == [len(fresh_records), killed, num_mutants]
    second = json.loads((docs / "second-fresh-sample.json").read_text(encoding="utf-8"))
    killed = sum(record["killed"] for record in second)
    num_mutants = sum(record["put_in"] - len(record["equivalent"]) for record in second)
    stated = re.findall(r"\| second fresh.*\| (\d+) of (\d+) \| (\d+) of (\d+) \((\d+) %\)", README)
    counts = (len(second), len(names), killed, num_mutants, round(100 * killed / num_mutants))
    assert stated == [tuple(map(str, counts))]
