"""The page of mutation scores, from the records of `mk test --mutate PART --save`."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.report.pages.document import Block, Document, Heading, Items, Table, Text
from modular_kernel.text import counted

Record = dict[str, Any]

_METHOD = (
    (
        "`mk test --mutate PART` changes one place of the part, its kernels, or the operations "
        "that it uses, in memory only: a mask lost or off by one, a stride, an offset, the "
        "index of a scale, a clamp, a constant, the dtype of an accumulator, the order or end "
        "of a loop, a lost step, exchanged operands, a weakened declaration."
    ),
    (
        "Mutants are drawn with the version as seed, from those that a case executes on a CPU "
        "with kernels in Triton's interpreter."
    ),
    (
        "Each case that executes the changed line is run twice. Where a bit of the result "
        "differs, and in a dozen cases where none does, all checks of the case are run. The "
        "first check that fails kills the mutant. A hang, a crash and a rejected valid case "
        "also count as killed."
    ),
    (
        "Cases over several ranks run in separate processes over gloo. Some run a fault "
        "scenario, in which ranks disagree about a call, and check the error that each rank "
        "raises."
    ),
    (
        "Equivalent mutants are not counted. Each is reviewed: either the compiled code of all "
        "kernels that contain its line is the same (`--only ID --code`), or no bit differs in "
        "at least 2,000 random problems (`--only ID --bits 2000`). Proofs and reasons are in "
        "`docs/mutation/*.json`."
    ),
    (
        "Without a GPU no case checks the values of Gluon kernels, TMA copies and the paths "
        "that use them (gemv_tma, grouped_tma, dequantized, grouped_w4), CUTLASS kernels, "
        "overlapping launches (PDL), or offsets beyond 32 bits. These kernels are compiled for "
        "sm_90, and tested with a stand-in or a bitwise reference where there is one."
    ),
)
_COLUMNS = ("part", "mutants", "executed", "put in", "killed", "equivalent", "survived", "score")
_FIRST = "first score"
_NUMERIC = frozenset({*_COLUMNS[1:], _FIRST})


def read_scores(folder: Path) -> tuple[Record, ...]:
    """Read the scores from every *.json in `folder`, sorted by the name of the part.

    Raises ConfigurationError for a file that is not a mutation score.
    """
    return tuple(_read(path) for path in sorted(folder.glob("*.json")))


def mutation_document(
    scores: tuple[Record, ...],
    defects: Path,
    notes: Path,
    parts: Sequence[str] = (),
    first: tuple[Record, ...] = (),
) -> Document:
    """Build the document: table of scores, method, surviving mutants, and handwritten defects.

    defects: output file of tools/source_defects.py. notes: JSON file with a note per survivor id,
    and under "scores" and "defects" notes on the measurements. Both files are optional. parts:
    names of all parts; those without a score are listed. first: records of the first run of a
    sample with another seed, which no case was written for; shown beside the scores.

    Raises ConfigurationError if a record in `first` has no score to stand beside, or its seed.
    """
    known = json.loads(notes.read_text(encoding="utf-8")) if notes.is_file() else {}
    return (
        Heading(1, "Mutation scores"),
        Text(
            "A mutant is a copy of the source with one small defect. The mutation score of a part"
            " is the fraction of its mutants that `mk test --level full` notices (kills). Unit "
            "tests do not take part, except in scopes of `tools/mutation_scopes.json`."
        ),
        Heading(2, "Results"),
        _score_table(scores, _first_by_part(scores, first)),
        Text(
            "executed: mutants in lines that a case executes on a CPU. put in: the sample of "
            "these that was run. score: killed / (killed + survived)."
        ),
        *_first_scores(first),
        *_missing(scores, parts),
        *_note(known, "scores"),
        Heading(2, "Method"),
        Items(_METHOD),
        *_survivors(scores, known),
        *_handwritten_defects(defects, known),
    )


def _first_by_part(scores: tuple[Record, ...], first: tuple[Record, ...]) -> dict[str, Record]:
    """Return the first scores by part; each needs a score of the part with another seed."""
    seeds = {score["part"]: score["seed"] for score in scores}
    for record in first:
        part, seed = record["part"], record["seed"]
        if part not in seeds:
            raise ConfigurationError(f"first score of {part}", got="no score", need="a score too")
        if seed == seeds[part]:
            need = "another seed than the score's, for a sample that no case was written for"
            raise ConfigurationError(f"first score of {part}: seed", got=seed, need=need)
    return {record["part"]: record for record in first}


def _score_table(scores: tuple[Record, ...], first: dict[str, Record]) -> Table:
    """Build the table of scores; with first scores, a column and a last row that sums them."""
    rows = [_row(score) for score in scores]
    if not first:
        return Table(_COLUMNS, rows, numeric=_NUMERIC)
    rows = [
        (*row, _first_text(first[score["part"]]) if score["part"] in first else "")
        for row, score in zip(rows, scores, strict=True)
    ]
    blanks = [""] * (len(_COLUMNS) - 1)
    rows.append(("all first scores", *blanks, _share_text(*_first_counts(first.values()))))
    return Table((*_COLUMNS, _FIRST), rows, numeric=_NUMERIC, totals=1)


def _first_scores(first: tuple[Record, ...]) -> tuple[Block, ...]:
    """Explain the first scores, and state the one over all samples."""
    if not first:
        return ()
    killed, total = _first_counts(first)
    put_in = sum(record["put_in"] for record in first)
    return (
        Text(
            "first score: of a fresh sample with another seed, run once, before anything was "
            "changed for it: killed / (put in - proven equivalent), with the number put in and "
            "the seed. Its survivors are not listed below."
        ),
        Text(
            f"**First scores of {counted(len(first), 'part')}: {killed} of {total} mutants killed, "
            f"{_percentage(killed, total)}**, of {put_in} put in."
        ),
    )


def _first_counts(first: Iterable[Record]) -> tuple[int, int]:
    """Return how many mutants were killed, and how many put in that are not proven equivalent."""
    records = tuple(first)
    proven = sum(len(record["equivalent"]) for record in records)
    return sum(record["killed"] for record in records), sum(
        record["put_in"] for record in records
    ) - proven


def _first_text(record: Record) -> str:
    share = _share_text(*_first_counts((record,)))
    return f"{share}, {record['put_in']} put in, seed {record['seed']}"


def _share_text(killed: int, total: int) -> str:
    return f"{_percentage(killed, total)} ({killed} / {total})"


def _percentage(killed: int, total: int) -> str:
    return f"{killed / total:.1%}" if total else "nothing to change"


def _missing(scores: tuple[Record, ...], parts: Sequence[str]) -> tuple[Block, ...]:
    """List the parts without a score."""
    measured = {score["part"] for score in scores}
    names = [f"`{name}`" for name in parts if name not in measured]
    if not names:
        return ()
    return (Text(f"**No score yet, {len(names)} of {len(parts)} parts:** {', '.join(names)}."),)


def _note(known: dict[str, str], key: str) -> tuple[Block, ...]:
    return (Text(known[key]),) if key in known else ()


def _survivors(scores: tuple[Record, ...], known: dict[str, str]) -> tuple[Block, ...]:
    """Build the table of surviving mutants: one row for each, with the parts that share it."""
    mutants: dict[str, Record] = {}
    parts: dict[str, list[str]] = {}
    for score in scores:
        for item in score["survivors"]:
            mutants.setdefault(item["id"], item)
            parts.setdefault(item["id"], []).append(score["part"])
    if not mutants:
        return ()
    rows = [
        (
            f"`{ident}`",
            f"`{item['place']}`",
            item["operator"],
            _parts_text(parts[ident]),
            known.get(ident, "Not reviewed yet."),
        )
        for ident, item in sorted(mutants.items(), key=lambda entry: entry[1]["place"])
    ]
    return (
        Heading(2, "Surviving mutants"),
        Text(
            "A mutant in code that several parts share survives in each of them. `mk test "
            "--mutate PART --only ID` shows the change and runs it again. A mutant that looks "
            "equivalent counts as survived until its equivalence is proven and reviewed."
        ),
        Table(("id", "place", "change", "part", "reason"), rows),
    )


def _parts_text(parts: Sequence[str]) -> str:
    return f"`{parts[0]}`" if len(parts) == 1 else f"{len(parts)} parts, such as `{parts[0]}`"


def _handwritten_defects(path: Path, known: dict[str, str]) -> tuple[Block, ...]:
    """Build the section of hand-written defects, with outcomes by level."""
    if not path.is_file():
        return ()
    defects: dict[str, Record] = json.loads(path.read_text(encoding="utf-8"))
    rows, lists = [], []
    for level in ("smoke", "full"):
        outcomes = [record.get(level, "not run") for record in defects.values()]
        killed = sum(outcome.startswith("killed") for outcome in outcomes)
        others = [
            str(outcomes.count(outcome)) for outcome in ("survived", "not executed", "not run")
        ]
        rows.append((level, str(len(outcomes)), str(killed), *others))
    for name, record in defects.items():
        outcome = str(record.get("full", record.get("smoke", "not run")))
        if not outcome.startswith("killed"):
            reason = f": {record['why']}" if "why" in record else ""
            if record.get("tests", "").startswith("killed"):
                reason += f"; {record['tests']}"
            lists.append(f"{outcome}: {name} (`{record['file']}`){reason}")
    return (
        Heading(2, "Handwritten defects"),
        Text(
            "`tools/source_defects.json` lists realistic mistakes in kernels, operations and "
            "parts. `python tools/source_defects.py LEVEL` makes each of them, one at a time, and"
            " runs the cases of that level that execute it. A defect that smoke kills counts as "
            "killed in both rows."
        ),
        *_note(known, "defects"),
        Table(("level", "defects", "killed", "survived", "not executed", "not run"), rows),
        *_killed_by_tests([record["tests"] for record in defects.values() if "tests" in record]),
        *((Text("Not killed:"), Items(lists)) if lists else ()),
    )


def _killed_by_tests(outcomes: Sequence[str]) -> tuple[Block, ...]:
    """State how many defects that survive the cases are killed by the tests of operations."""
    if not outcomes:
        return ()
    killed = sum(outcome.startswith("killed") for outcome in outcomes)
    subject = f"Of the {len(outcomes)} that full does not kill"
    return (Text(f"{subject}, the tests of operations (`tests/ops/test_ops_*.py`) kill {killed}."),)


def _read(path: Path) -> Record:
    score = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(score, dict) or score.get("part") != path.stem or "survivors" not in score:
        need = f"what `mk test --mutate {path.stem} --save` writes"
        raise ConfigurationError(str(path), got="another form", need=need)
    return score


def _row(score: Record) -> tuple[str, ...]:
    counts = (score["mutants"], score["executed"], score["put_in"], score["killed"])
    others = len(score["equivalent"]), len(score["survivors"])
    share = f"{score['score']:.1%}" if score["put_in"] else "nothing to change"
    return (f"`{score['part']}`", *map(str, (*counts, *others)), share)
