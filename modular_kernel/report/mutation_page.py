"""The pages of mutation scores and of surviving mutants, from records of `mk test --mutate`.

The pages are docs/mutation-scores.md and docs/mutation-survivors.md. A mutant is a copy of the
source with one small defect. The score of a part is the fraction of its mutants that the cases of
`mk test` detect ("kill"). A fresh sample is a random selection of mutants with another seed. It is
tested before cases are added for its mutants.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.report.pages.document import Block, BulletList, Document, Heading, Table, Text
from modular_kernel.text import format_count

Record = dict[str, Any]

_METHOD = (
    (
        "`mk test --mutate PART` changes the source of the part, its kernels, or the operations "
        "that it uses in one place, in memory only: it removes a mask or shifts it by one, changes "
        "a stride, an offset, the index of a scale, a clamp, a constant, the dtype of an "
        "accumulator, or the order or end of a loop, omits a step, exchanges operands, or weakens "
        "a declaration."
    ),
    (
        "Mutants are sampled from those that a case executes on a CPU with kernels in Triton's "
        "interpreter. The seed is the version of the package."
    ),
    (
        "Changes that cannot have an effect on a valid call are not made: in messages, "
        "docstrings, representations and assertions, among which is `strict=True` of `zip`; in the "
        "value of masked lanes that are never stored; in the stride 0 that a kernel gets for a "
        "tensor that is None, and does not read; in the order of a loop of `|=`, `&=` or "
        "`^=`; in a comparison of times by one reading of the clock; and in the constants of "
        "`verify.lowered_limits`, which only divide work among programs, because the cases run "
        "with two values of each. A condition that only guards a `raise` is negated, but not "
        "changed in other ways."
    ),
    (
        "Each case that executes the changed line runs with and without the change. If any bit of "
        "the result differs, all checks of the case run; they also run in a dozen cases without a "
        "difference. The first check that fails kills the mutant. A hang, a crash and the "
        "rejection of a valid case also count as killed."
    ),
    (
        "Cases over several ranks run in separate processes over gloo. Some run a fault "
        "scenario, in which ranks disagree about a call, and check the error that each rank "
        "raises."
    ),
    (
        "Choices that only make calls slower or need more memory, such as too few programs, count "
        "as defects, and so does the name of a stage in a profile. Since no value shows them, "
        "every case compares calls of the size of models with a record, "
        "`verify/launch_plans.json`: the grids, tiles and stages of operations, of exchange parts "
        "and of layers on the Triton "
        "experts, the buffers of these layers, and the GPUs on which they are refused."
    ),
    (
        "Equivalent mutants are not counted. A survivor in a kernel is equivalent if the machine "
        "code for sm_90 of all kernels that contain its line is unchanged (`--only ID --code`). "
        "This is checked for every survivor before it is counted. The kernels are compiled in all "
        "forms that `mk compile` launches. Others are reviewed: no bit may differ in at least "
        "2,000 random problems (`--only ID --bits 2000`). Proofs and reasons are in "
        "`docs/mutation/*.json`."
    ),
    (
        "Without a GPU no case checks the values of Gluon kernels, TMA copies and the paths "
        "that use them (gemv_tma, grouped_tma, dequantized, grouped_w4), CUTLASS kernels, "
        "overlapping launches (PDL), or offsets beyond 32 bits. These kernels are compiled for "
        "sm_90, and tested with a stand-in or a bitwise reference where there is one."
    ),
)
_COLUMNS = ("part", "mutants", "executed", "sampled", "killed", "equivalent", "survived", "score")
_NUMERIC = frozenset(_COLUMNS[1:])
_FRESH_COLUMNS = (
    "part",
    "sampled",
    "equivalent",
    "killed",
    "first score",
    "killed after study",
    "after study",
)
_SECOND_COLUMNS = (
    "part",
    "first sample: killed",
    "first sample: score",
    "second: sampled",
    "second: equivalent",
    "second: killed",
    "second: score",
)


def read_scores(folder: Path) -> tuple[Record, ...]:
    """Read the scores from every *.json in `folder`, sorted by the name of the part.

    Raises ConfigurationError for a file that is not a mutation score.
    """
    return tuple(_read_score(path) for path in sorted(folder.glob("*.json")))


def read_second_sample(path: Path) -> tuple[Record, ...]:
    """Read the first scores of a second fresh sample, one record per part.

    Return () if there is no file.
    """
    return tuple(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else ()


def mutation_document(
    scores: tuple[Record, ...],
    defects: Path,
    notes: Path,
    parts: Sequence[str] = (),
    first_scores: tuple[Record, ...] = (),
    studied_scores: tuple[Record, ...] = (),
    second_scores: tuple[Record, ...] = (),
) -> Document:
    """Build the page of scores: tables of scores, method, and handwritten defects.

    scores: records of `mk test --mutate PART --save`.
    defects: output file of tools/source_defects.py; may be missing.
    notes: JSON file with a note for each id of a surviving mutant, and with notes on the
        measurements under "scores", "fresh" and "defects"; may be missing.
    parts: names of all parts. Parts without a score are listed.
    first_scores: records of the first run of fresh samples.
    studied_scores: records of the same samples, after cases were added for their survivors.
    second_scores: records of the first run of fresh samples that were drawn later; only the counts,
        the seed and the ids of equivalent mutants (`read_second_sample`).

    Raises ConfigurationError if a part in `first_scores` or `second_scores` has no score or a score
    with the same seed, if a part has the same seed in both, and if the records in `studied_scores`
    have other samples than `first_scores`.
    """
    _check_samples(scores, first_scores, studied_scores)
    _check_seeds(scores, second_scores)
    _check_seeds(first_scores, _filter_by_parts(second_scores, first_scores))
    note_texts = json.loads(notes.read_text(encoding="utf-8")) if notes.is_file() else {}
    return (
        Heading(1, "Mutation scores"),
        Text(
            "A mutant is a copy of the source with one small defect. The mutation score of a part "
            "is the fraction of its mutants that `mk test --level full` detects (kills). Unit "
            "tests are not used, except for the scopes of `tools/mutation_scopes.json`. "
            "[Surviving mutants](mutation-survivors.md) lists those that are not killed."
        ),
        Heading(2, "Results"),
        Table(_COLUMNS, [_make_score_row(score) for score in scores], numeric=_NUMERIC),
        Text(
            "executed: mutants in lines that a case executes on a CPU. sampled: those of them "
            "that were tested. score: killed / (killed + survived)."
        ),
        *_list_parts_without_score(scores, parts),
        *_make_note(note_texts, "scores"),
        *_build_fresh_samples_section(
            scores, first_scores, studied_scores, second_scores, note_texts
        ),
        Heading(2, "Method"),
        BulletList(_METHOD),
        *_build_defects_section(defects, note_texts),
    )


def survivors_document(
    scores: tuple[Record, ...],
    notes: Path,
    first_scores: tuple[Record, ...] = (),
    studied_scores: tuple[Record, ...] = (),
) -> Document:
    """Build the page of mutants that are not killed: surviving ones and equivalent ones.

    The arguments are those of `mutation_document`.
    """
    note_texts = json.loads(notes.read_text(encoding="utf-8")) if notes.is_file() else {}
    studied_by_part = {record["part"]: record for record in studied_scores}
    return (
        Heading(1, "Surviving mutants"),
        Text(
            "The mutants that count as survivors in [Mutation scores](mutation-scores.md), and why "
            "no case kills them."
        ),
        *_build_survivors_table(scores, note_texts),
        *_build_first_survivors_table(first_scores, studied_by_part, note_texts),
        *_build_exclusions_table(first_scores),
    )


def _check_samples(
    scores: tuple[Record, ...], first_scores: tuple[Record, ...], studied_scores: tuple[Record, ...]
) -> None:
    """Raise ConfigurationError for inconsistent records, see `mutation_document`."""
    _check_seeds(scores, first_scores)
    first_samples = {record["part"]: _get_sample(record) for record in first_scores}
    for record in studied_scores:
        if first_samples.get(record["part"]) != _get_sample(record):
            need = "the seed and the mutants of a first score of the part"
            raise ConfigurationError(
                f"score of {record['part']} after study", got="another sample", need=need
            )


def _check_seeds(scores: tuple[Record, ...], first_scores: tuple[Record, ...]) -> None:
    """Raise ConfigurationError unless the part of each first score has a score of another seed."""
    seeds = {score["part"]: score["seed"] for score in scores}
    for record in first_scores:
        part, seed = record["part"], record["seed"]
        if part not in seeds:
            raise ConfigurationError(f"first score of {part}", got="no score", need="a score too")
        if seed == seeds[part]:
            need = "another seed than the score's, for a sample that no case was written for"
            raise ConfigurationError(f"first score of {part}: seed", got=seed, need=need)


def _get_sample(record: Record) -> tuple[str, frozenset[str]]:
    """Return the seed and the ids of the mutants of a record."""
    not_killed = (item["id"] for name in ("equivalent", "survivors") for item in record[name])
    return record["seed"], frozenset((*record["died"], *not_killed))


def _build_fresh_samples_section(
    scores: tuple[Record, ...],
    first_scores: tuple[Record, ...],
    studied_scores: tuple[Record, ...],
    second_scores: tuple[Record, ...],
    note_texts: dict[str, str],
) -> tuple[Block, ...]:
    """Build the section of fresh samples: first scores, scores after study, and exclusions."""
    if not first_scores:
        return ()
    studied_by_part = {record["part"]: record for record in studied_scores}
    rows = [_make_fresh_row(record, studied_by_part.get(record["part"])) for record in first_scores]
    rows.append(_make_fresh_totals(first_scores, studied_by_part))
    killed, total = _count_fresh_mutants(first_scores)
    return (
        Heading(2, "Fresh samples"),
        Text(
            "A fresh sample has another seed than the samples above, and is tested once before any "
            "case is added because of it: that is the first score. Its survivors are then studied. "
            "Where one shows that a case is missing, the case is added, and the survivors are "
            "tested again: that is the score after study, which is not independent of the sample. "
            "Both are killed / (sampled - equivalent)."
        ),
        Text(
            "**First scores of "
            f"{format_count(len(first_scores), 'part')}: {killed} of {total} mutants killed, "
            f"{_format_percentage(killed, total)}**, of "
            f"{sum(record['put_in'] for record in first_scores)} sampled."
        ),
        Table(_FRESH_COLUMNS, rows, numeric=frozenset(_FRESH_COLUMNS[1:]), totals=1),
        *_list_parts_without_fresh_sample(scores, (*first_scores, *second_scores)),
        *_make_note(note_texts, "fresh"),
        *_build_second_sample_section(first_scores, second_scores, note_texts),
    )


def _make_fresh_row(record: Record, studied: Record | None) -> tuple[str, ...]:
    """Return the row of a part.

    studied: None if its sample was not tested again.
    """
    counts = (record["put_in"], len(record["equivalent"]), record["killed"])
    fresh_scores = (_format_score(record), "", "")
    if studied is not None:
        fresh_scores = (_format_score(record), str(studied["killed"]), _format_score(studied))
    return (f"`{record['part']}`", *map(str, counts), *fresh_scores)


def _make_fresh_totals(
    first_scores: tuple[Record, ...], studied_by_part: dict[str, Record]
) -> tuple[str, ...]:
    """Return the row of sums. A sample that was not tested again counts with its first score."""
    latest = tuple(studied_by_part.get(record["part"], record) for record in first_scores)
    sums = (
        sum(record["put_in"] for record in first_scores),
        sum(len(record["equivalent"]) for record in first_scores),
        sum(record["killed"] for record in first_scores),
    )
    fresh_scores = (_format_percentage(*_count_fresh_mutants(first_scores)), "", "")
    if studied_by_part:
        killed, total = _count_fresh_mutants(latest)
        fresh_scores = (fresh_scores[0], str(killed), _format_percentage(killed, total))
    return ("all", *map(str, sums), *fresh_scores)


def _filter_by_parts(records: tuple[Record, ...], others: tuple[Record, ...]) -> tuple[Record, ...]:
    """Return the records of the parts that also have a record in `others`."""
    names = {record["part"] for record in others}
    return tuple(record for record in records if record["part"] in names)


def _build_second_sample_section(
    first_scores: tuple[Record, ...], second_scores: tuple[Record, ...], note_texts: dict[str, str]
) -> tuple[Block, ...]:
    """Build the table that compares the first scores of both samples."""
    if not second_scores:
        return ()
    groups = [
        (f"`{record['part']}`", _filter_by_parts(first_scores, (record,)), (record,))
        for record in second_scores
    ]
    rows = []
    for name, first, second in (*groups, ("all", first_scores, second_scores)):
        killed, total = _count_fresh_mutants(first)
        first_cells = (
            (f"{killed} of {total}", _format_percentage(killed, total)) if first else ("", "")
        )
        killed, total = _count_fresh_mutants(second)
        sampled = sum(record["put_in"] for record in second)
        counts = (sampled, sampled - total, killed)
        rows.append((name, *first_cells, *map(str, counts), _format_percentage(killed, total)))
    columns = _SECOND_COLUMNS
    return (
        Heading(3, "A second fresh sample"),
        Table(columns, rows, numeric=frozenset(columns[1:]), totals=1),
        *_make_note(note_texts, "second_sample"),
    )


def _count_fresh_mutants(records: Iterable[Record]) -> tuple[int, int]:
    """Return the number of killed mutants, and of sampled mutants that are not equivalent."""
    records = tuple(records)
    equivalent = sum(len(record["equivalent"]) for record in records)
    killed = sum(record["killed"] for record in records)
    return killed, sum(record["put_in"] for record in records) - equivalent


def _format_score(record: Record) -> str:
    return _format_percentage(*_count_fresh_mutants((record,)))


def _format_percentage(killed: int, total: int) -> str:
    return f"{killed / total:.1%}" if total else "no mutants"


def _list_parts_without_fresh_sample(
    scores: tuple[Record, ...], first_scores: tuple[Record, ...]
) -> tuple[Block, ...]:
    """List the parts and scopes with a score but without a fresh sample."""
    with_fresh_sample = {record["part"] for record in first_scores}
    names = [f"`{score['part']}`" for score in scores if score["part"] not in with_fresh_sample]
    if not names:
        return ()
    text = f"**No fresh sample yet for {len(names)} of {len(scores)} scores:** {', '.join(names)}."
    return (Text(text),)


def _build_first_survivors_table(
    first_scores: tuple[Record, ...], studied_by_part: dict[str, Record], note_texts: dict[str, str]
) -> tuple[Block, ...]:
    """Build the table of mutants that survived the first run of a fresh sample."""
    rows = []
    for item, parts in _group_by_mutant(first_scores, "survivors"):
        mutant_id = item["id"]
        second_records = [studied_by_part[part] for part in parts if part in studied_by_part]
        if len(second_records) < len(parts):
            outcome = "not tested again"
        else:
            is_killed = all(mutant_id in record["died"] for record in second_records)
            outcome = "killed" if is_killed else "survives"
        rows.append(
            (
                f"`{mutant_id}`",
                f"`{item['place']}`",
                item["operator"],
                _format_parts(parts),
                outcome,
                note_texts.get(mutant_id, "Not reviewed yet."),
            )
        )
    if not rows:
        return ()
    columns = ("id", "place", "change", "part", "after study", "reason")
    return (Heading(2, "Fresh samples"), Table(columns, rows))


def _build_exclusions_table(first_scores: tuple[Record, ...]) -> tuple[Block, ...]:
    """Build the table of equivalent mutants, which the first scores exclude."""
    rows = [
        (
            f"`{item['id']}`",
            f"`{item['place']}`",
            item["operator"],
            _format_parts(parts),
            f"{item['forms']} forms" if item["proof"] == "code" else f"{item['problems']} problems",
            item["reason"],
        )
        for item, parts in _group_by_mutant(first_scores, "equivalent")
    ]
    if not rows:
        return ()
    return (
        Heading(2, "Equivalent mutants of fresh samples"),
        Text(
            "Proof: the number of random problems in which no bit differs, or of compiled forms of "
            "kernels with the same code."
        ),
        Table(("id", "place", "change", "part", "proof", "reason"), rows),
    )


def _group_by_mutant(records: tuple[Record, ...], name: str) -> list[tuple[Record, list[str]]]:
    """Return the distinct mutants of all records, sorted by place, each with its parts.

    name: key of a record's list of mutants, "survivors" or "equivalent".
    """
    mutants: dict[str, Record] = {}
    parts: dict[str, list[str]] = {}
    for record in records:
        for item in record[name]:
            mutants.setdefault(item["id"], item)
            parts.setdefault(item["id"], []).append(record["part"])
    by_place = sorted(mutants.values(), key=lambda item: str(item["place"]))
    return [(item, parts[item["id"]]) for item in by_place]


def _list_parts_without_score(
    scores: tuple[Record, ...], parts: Sequence[str]
) -> tuple[Block, ...]:
    measured = {score["part"] for score in scores}
    names = [f"`{name}`" for name in parts if name not in measured]
    if not names:
        return ()
    return (Text(f"**No score yet, {len(names)} of {len(parts)} parts:** {', '.join(names)}."),)


def _make_note(note_texts: dict[str, str], key: str) -> tuple[Block, ...]:
    return (Text(note_texts[key]),) if key in note_texts else ()


def _build_survivors_table(
    scores: tuple[Record, ...], note_texts: dict[str, str]
) -> tuple[Block, ...]:
    """Build the table of surviving mutants, each with the parts whose cases it survives."""
    rows = [
        (
            f"`{item['id']}`",
            f"`{item['place']}`",
            item["operator"],
            _format_parts(parts),
            note_texts.get(item["id"], "Not reviewed yet."),
        )
        for item, parts in _group_by_mutant(scores, "survivors")
    ]
    if not rows:
        return ()
    return (
        Heading(2, "Scores"),
        Text(
            "A mutant in code that several parts share survives in each of them. `mk test "
            "--mutate PART --only ID` shows the change and runs it again. A mutant that looks "
            "equivalent counts as survived until its equivalence is proven and reviewed."
        ),
        Table(("id", "place", "change", "part", "reason"), rows),
    )


def _format_parts(parts: Sequence[str]) -> str:
    return f"`{parts[0]}`" if len(parts) == 1 else f"{len(parts)} parts, such as `{parts[0]}`"


def _build_defects_section(path: Path, note_texts: dict[str, str]) -> tuple[Block, ...]:
    """Build the section of handwritten defects, with their outcomes by level."""
    if not path.is_file():
        return ()
    defects: dict[str, Record] = json.loads(path.read_text(encoding="utf-8"))
    rows, not_killed = [], []
    for level in ("smoke", "full"):
        outcomes = [record.get(level, "not run") for record in defects.values()]
        killed = sum(outcome.startswith("killed") for outcome in outcomes)
        other_counts = [
            str(outcomes.count(outcome)) for outcome in ("survived", "not executed", "not run")
        ]
        rows.append((level, str(len(outcomes)), str(killed), *other_counts))
    for name, record in defects.items():
        outcome = str(record.get("full", record.get("smoke", "not run")))
        if not outcome.startswith("killed"):
            reason = f": {record['why']}" if "why" in record else ""
            if record.get("tests", "").startswith("killed"):
                reason += f"; {record['tests']}"
            not_killed.append(f"{outcome}: {name} (`{record['file']}`){reason}")
    return (
        Heading(2, "Handwritten defects"),
        Text(
            "`tools/source_defects.json` lists realistic mistakes in kernels, operations and "
            "parts. `python tools/source_defects.py LEVEL` makes them one at a time, and runs the "
            "cases of that level that execute the changed lines. A defect that is killed at level "
            "smoke counts as killed in both rows."
        ),
        *_make_note(note_texts, "defects"),
        Table(("level", "defects", "killed", "survived", "not executed", "not run"), rows),
        *_describe_killed_by_tests(
            [record["tests"] for record in defects.values() if "tests" in record]
        ),
        *((Text("Not killed:"), BulletList(not_killed)) if not_killed else ()),
    )


def _describe_killed_by_tests(outcomes: Sequence[str]) -> tuple[Block, ...]:
    """State how many of the defects that survive all cases are killed by tests of operations."""
    if not outcomes:
        return ()
    killed = sum(outcome.startswith("killed") for outcome in outcomes)
    subject = f"Of the {len(outcomes)} that level full does not kill"
    return (Text(f"{subject}, the tests of operations (`tests/ops/test_ops_*.py`) kill {killed}."),)


def _read_score(path: Path) -> Record:
    score = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(score, dict) or score.get("part") != path.stem or "survivors" not in score:
        need = f"a record of `mk test --mutate {path.stem} --save`"
        raise ConfigurationError(str(path), got="another format", need=need)
    return score


def _make_score_row(score: Record) -> tuple[str, ...]:
    counts = (score["mutants"], score["executed"], score["put_in"], score["killed"])
    last_counts = len(score["equivalent"]), len(score["survivors"])
    percentage = f"{score['score']:.1%}" if score["put_in"] else "no mutants"
    return (f"`{score['part']}`", *map(str, (*counts, *last_counts)), percentage)
