"""The page of mutation scores shows, for fresh samples of mutants, the first score and the score
after the survivors were studied.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from modular_kernel.errors import ConfigurationError
from modular_kernel.report.markdown import render_markdown
from modular_kernel.report.mutation_page import (
    mutation_document,
    read_scores,
    read_second_sample,
    survivors_document,
)

MISSING_PATH = Path("nothing")
ROOT = Path(__file__).parents[2]


def make_record(
    part: str, seed: str, killed: int, equivalent: int, survived: int
) -> dict[str, Any]:
    """Return the fields of a record of `mk test --mutate PART --save` that the page reads.

    Mutants have the numbers 0, 1, ...: first the killed ones, then the survivors.
    """
    proof = {"proof": "bits", "problems": 2000, "reason": "A placeholder."}
    equivalents = [{"id": f"{part}e{i}", "place": "m:1", "operator": "sign", **proof}
              for i in range(equivalent)]  # fmt: skip
    survivors = [{"id": f"{part}{i}", "place": "m:2", "operator": "clamp"}
                 for i in range(killed, killed + survived)]  # fmt: skip
    return {
        "part": part,
        "seed": seed,
        "mutants": 900,
        "executed": 500,
        "put_in": killed + equivalent + survived,
        "killed": killed,
        "died": {f"{part}{i}": "numeric" for i in range(killed)},
        "score": round(killed / (killed + survived), 4),
        "equivalent": equivalents,
        "survivors": survivors,
    }


STUDIED = (
    make_record("KeepTopK", "0.2.0", 126, 22, 2),
    make_record("TorchExperts", "0.2.0", 122, 23, 5),
)
FIRST_SCORES = (make_record("TorchExperts", "fresh-1", 40, 4, 16),)
AFTER_STUDY = (make_record("TorchExperts", "fresh-1", 50, 4, 6),)


def render_page(
    first_scores: tuple[dict[str, Any], ...],
    after_study: tuple[dict[str, Any], ...] = (),
    notes: Path = MISSING_PATH,
    second_sample: tuple[dict[str, Any], ...] = (),
) -> str:
    """Return the page of scores, followed by the page of survivors."""
    scores = mutation_document(
        STUDIED, MISSING_PATH, notes, (), first_scores, after_study, second_sample
    )
    survivors = survivors_document(STUDIED, notes, first_scores, after_study)
    return render_markdown((*scores, *survivors), figures="")


def find_table_rows(page: str, first_cell: str) -> list[list[str]]:
    lines = (line for line in page.splitlines() if line.startswith(f"| {first_cell} |"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_first_scores_are_shown_in_a_table_and_a_summary() -> None:
    page = render_page(FIRST_SCORES)
    studied, fresh = find_table_rows(page, "`TorchExperts`")
    assert studied[-1] == "96.1%"
    assert fresh == ["`TorchExperts`", "60", "4", "40", "71.4%", "", ""]
    assert find_table_rows(page, "all") == [["all", "60", "4", "40", "71.4%", "", ""]]
    unwrapped = " ".join(page.split())
    assert "**First scores of 1 part: 40 of 56 mutants killed, 71.4%**, of 60 sampled." in unwrapped
    assert "**No fresh sample yet for 1 of 2 scores:** `KeepTopK`." in unwrapped


def test_scores_after_study_are_shown_beside_first_scores() -> None:
    page = render_page(FIRST_SCORES, AFTER_STUDY)
    assert find_table_rows(page, "`TorchExperts`")[1][-3:] == ["71.4%", "50", "89.3%"]
    assert find_table_rows(page, "all")[0][-3:] == ["71.4%", "50", "89.3%"]


def test_several_fresh_samples_are_summed() -> None:
    """A sample that was not tested again counts with its first score."""
    page = render_page((*FIRST_SCORES, make_record("KeepTopK", "fresh-1", 30, 0, 10)), AFTER_STUDY)
    assert find_table_rows(page, "all") == [["all", "100", "4", "70", "72.9%", "80", "83.3%"]]
    assert "70 of 96 mutants killed, 72.9%**, of 100 sampled" in " ".join(page.split())
    assert "No fresh sample yet" not in page


def test_every_survivor_of_a_first_run_is_listed(tmp_path: Path) -> None:
    notes = tmp_path / "notes.json"
    notes.write_text(json.dumps({"TorchExperts40": "No case has groups.", "fresh": "Drawn today."}))
    page = render_page(FIRST_SCORES, AFTER_STUDY, notes)
    assert find_table_rows(page, "`TorchExperts40`")[0][-2:] == ["killed", "No case has groups."]
    assert find_table_rows(page, "`TorchExperts55`")[0][-2:] == ["survives", "Not reviewed yet."]
    assert len([line for line in page.splitlines() if "| clamp |" in line]) == 16 + 2 + 5
    assert "Drawn today." in page
    assert (
        find_table_rows(render_page(FIRST_SCORES), "`TorchExperts40`")[0][-2] == "not tested again"
    )


def test_every_exclusion_is_listed_with_its_proof_and_reason() -> None:
    page = render_page((*FIRST_SCORES, make_record("KeepTopK", "fresh-1", 30, 1, 10)))
    for mutant_id in (*(f"TorchExpertse{i}" for i in range(4)), "KeepTopKe0"):
        (row,) = find_table_rows(page, f"`{mutant_id}`")
        assert row[-2:] == ["2000 problems", "A placeholder."]


def test_the_page_without_first_scores_does_not_mention_them() -> None:
    assert "first score" not in render_page(()).lower()
    assert "fresh sample" not in render_page(()).lower()


def test_a_first_score_with_the_seed_of_the_studied_sample_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"seed: got 0\.2\.0, need another seed"):
        render_page((make_record("TorchExperts", "0.2.0", 40, 4, 16),))
    with pytest.raises(ConfigurationError, match="first score of TritonExperts: got no score"):
        render_page((make_record("TritonExperts", "fresh-1", 40, 4, 16),))


@pytest.mark.parametrize(
    "after_study",
    [
        make_record("TorchExperts", "fresh-2", 50, 4, 6),
        make_record("TorchExperts", "fresh-1", 50, 4, 7),
        make_record("KeepTopK", "fresh-1", 50, 4, 6),
    ],
)
def test_a_score_after_study_of_another_sample_is_refused(after_study: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="after study: got another sample, need the seed"):
        render_page(FIRST_SCORES, (after_study,))


def test_first_scores_are_read_from_a_separate_folder(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "KeepTopK.json").write_text(json.dumps(STUDIED[0]))
    (tmp_path / "first/TorchExperts.json").write_text(json.dumps(FIRST_SCORES[0]))
    assert read_scores(tmp_path) == STUDIED[:1]
    assert read_scores(tmp_path / "first") == FIRST_SCORES


def test_a_second_sample_is_shown_beside_the_first_one() -> None:
    second_sample = (
        make_record("KeepTopK", "fresh-3", 19, 1, 0),
        make_record("TorchExperts", "fresh-3", 30, 10, 20),
    )
    page = render_page(FIRST_SCORES, AFTER_STUDY, second_sample=second_sample)
    assert find_table_rows(page, "`KeepTopK`")[1] == [
        "`KeepTopK`",
        "",
        "",
        "20",
        "1",
        "19",
        "100.0%",
    ]
    assert find_table_rows(page, "`TorchExperts`")[2][1:] == [
        "40 of 56", "71.4%", "60", "10", "30", "60.0%"
    ]  # fmt: skip
    assert find_table_rows(page, "all")[1][1:] == ["40 of 56", "71.4%", "80", "11", "49", "71.0%"]
    assert "No fresh sample yet" not in page


def test_a_second_sample_with_the_seed_of_another_sample_is_refused() -> None:
    for seed in ("fresh-1", "0.2.0"):
        with pytest.raises(ConfigurationError, match=f"seed: got {seed}, need another seed"):
            render_page(FIRST_SCORES, second_sample=(make_record("TorchExperts", seed, 40, 4, 16),))


def test_counts_of_the_second_sample_are_those_of_its_record() -> None:
    record = json.loads((ROOT / "notebook/records/2026-12-fresh-mutants.json").read_text("utf-8"))
    published = read_second_sample(ROOT / "docs/second-fresh-sample.json")
    assert [sample["part"] for sample in published] == sorted(record)
    for sample in published:
        recorded = record[sample["part"]]
        assert (sample["seed"], sample["put_in"]) == (recorded["seed"], recorded["put_in"])
        assert sample["killed"] == recorded["killed"] == len(recorded["died"])
        assert sample["equivalent"] == [item["id"] for item in recorded["equivalent"]]
        survivors = recorded["survivors"]
        assert recorded["put_in"] == recorded["killed"] + len(survivors) + len(
            recorded["equivalent"]
        )
