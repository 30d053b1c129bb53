"""The page of mutation scores shows first scores of new samples next to the studied scores."""

import json
from pathlib import Path
from typing import Any

import pytest

from modular_kernel.errors import ConfigurationError
from modular_kernel.report.markdown import markdown
from modular_kernel.report.mutation_page import mutation_document, read_scores

NOTHING = Path("nothing")


def record(part: str, seed: str, killed: int, equivalent: int, survived: int) -> dict[str, Any]:
    """Return the fields of a record of `mk test --mutate PART --save` that the page reads."""
    proven = [{"id": f"e{i}", "place": "m:1", "operator": "sign"} for i in range(equivalent)]
    survivors = [{"id": f"{part}{seed}{i}", "place": "m:2", "operator": "clamp"}
                 for i in range(survived)]  # fmt: skip
    return {
        "part": part,
        "seed": seed,
        "mutants": 900,
        "executed": 500,
        "put_in": killed + equivalent + survived,
        "killed": killed,
        "score": round(killed / (killed + survived), 4),
        "equivalent": proven,
        "survivors": survivors,
    }


STUDIED = (record("KeepTopK", "0.2.0", 126, 22, 2), record("TorchExperts", "0.2.0", 122, 23, 5))
FIRST = (record("TorchExperts", "fresh-1", 40, 4, 16),)


def page(first: tuple[dict[str, Any], ...]) -> str:
    return markdown(mutation_document(STUDIED, NOTHING, NOTHING, (), first), figures="")


def row_of(text: str, start: str) -> list[str]:
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_first_score_has_a_column_and_an_overall_line() -> None:
    text = page(FIRST)
    assert row_of(text, "part")[-2:] == ["score", "first score"]
    assert row_of(text, "`TorchExperts`")[-2:] == [
        "96.1%",
        "71.4% (40 / 56), 60 sampled, seed fresh-1",
    ]
    assert row_of(text, "`KeepTopK`")[-2:] == ["98.4%", ""]
    assert row_of(text, "all first scores") == ["all first scores", *[""] * 7, "71.4% (40 / 56)"]
    flat = " ".join(text.split())
    assert "**First scores of 1 part: 40 of 56 mutants killed, 71.4%**, of 60 sampled." in flat
    assert "TorchExpertsfresh-10" not in text  # its survivors are not listed


def test_several_first_scores_are_summed() -> None:
    text = page((*FIRST, record("KeepTopK", "fresh-1", 30, 0, 10)))
    assert row_of(text, "all first scores")[-1] == "72.9% (70 / 96)"
    assert "70 of 96 mutants killed, 72.9%**, of 100 sampled" in " ".join(text.split())


def test_without_first_scores_the_page_does_not_name_them() -> None:
    assert "first score" not in page(()).lower()
    assert row_of(page(()), "part")[-1] == "score"


def test_a_first_score_with_the_seed_of_the_studied_sample_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"seed: got 0\.2\.0, need another seed"):
        page((record("TorchExperts", "0.2.0", 40, 4, 16),))
    with pytest.raises(ConfigurationError, match="first score of TritonExperts: got no score"):
        page((record("TritonExperts", "fresh-1", 40, 4, 16),))


def test_first_scores_are_read_from_a_separate_folder(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "KeepTopK.json").write_text(json.dumps(STUDIED[0]))
    (tmp_path / "first/TorchExperts.json").write_text(json.dumps(FIRST[0]))
    assert read_scores(tmp_path) == STUDIED[:1]
    assert read_scores(tmp_path / "first") == FIRST
